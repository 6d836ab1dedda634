"""Contract 3: a window of batches is one batch, by weight; the epoch's end cuts it."""

from __future__ import annotations

import numpy as np

import unidist
from unidist.testing import compare, golden
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_backward, several_processes
from unidist.testing.trial import Trial, setup, verify

TRIALS = {
    "whole-windows": Trial(rest="none", accumulation=2, steps=4),
    "cut-at-the-end": Trial(rest="none", accumulation=2, steps=3),
    "uneven-last-batch": Trial("classifier", "adam", rest="uneven", accumulation=3, steps=4),
    "empty-share-in-a-window": Trial(rest="one", accumulation=2, steps=3),
    "empty-share-alone": Trial(rest="one", accumulation=2, steps=2),
    "per-sample": Trial(form="samples", rest="uneven", accumulation=2, steps=3),
    "class-weights": Trial("classifier", form="total", rest="uneven", accumulation=2, steps=3),
    "class-weights-empty": Trial("classifier", form="total", rest="one", accumulation=2, steps=3),
    "embedding": Trial("embedding", "sgd", rest="uneven", accumulation=2, steps=3),
    "longer-than-the-epoch": Trial(rest="uneven", accumulation=9, steps=2),
}
KERAS = ("cut-at-the-end", "empty-share-in-a-window", "class-weights")


@check(
    3, "a window is one batch", cases=TRIALS, flavours={"native": TRIALS, "keras": KERAS}, few=("uneven-last-batch", "class-weights-empty")
)
def accumulate(bench: Bench, trial: Trial) -> None:
    verify(bench, trial)


@check(3, "no weight moves before a window ends")
def held_until_the_end(bench: Bench) -> None:
    model, optimizer, data = setup(bench, Trial(rest="none", steps=3))
    step = unidist.make_train_step(model, optimizer, bench.loss("mlp", "mean"), gradient_accumulation_steps=2)
    moved, before = [], bench.weights(model)
    for batch in data:
        step(batch)
        after = bench.weights(model)
        moved.append(any(not np.array_equal(after[name], value) for name, value in before.items()))
        before = {name: value.copy() for name, value in after.items()}
    compare.same(moved, [False, True, True], "whether weights moved, batch by batch")
    compare.same(step.updates, 2, "step.updates")


@check(3, "gradients travel once per update: until then they are each rank's own", flavours="native",
       needs=(exchanges_in_backward, several_processes))  # fmt: skip
def exchanged_once(bench: Bench) -> None:
    model, optimizer, data = setup(bench, Trial(rest="none", steps=2))
    step = unidist.make_train_step(model, optimizer, bench.loss("mlp", "mean"), gradient_accumulation_steps=2)
    kinds = []
    for batch in data:
        step(batch)
        ranks = bench.everywhere(bench.array(next(model.parameters()).grad).tobytes())
        kinds.append(len(set(ranks)))
    compare.same(kinds, [bench.size, 1], "how many different gradients the ranks hold, batch by batch")


@check(3, "a step serves several passes, and batches of its own after them")
def windows_after_an_epoch(bench: Bench) -> None:
    """A cut window must not leak into the next epoch."""
    trial = Trial(rest="uneven", steps=2, epochs=3, accumulation=2)
    verify(bench, trial)
    compare.same(len(golden.windows(golden.batches(trial.samples(bench.replicas), trial.batch(bench.replicas)), 2)), 2, "windows an epoch")
