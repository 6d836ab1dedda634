"""Contract 4: clipping acts on the reduced gradient and tells its true global norm."""

from __future__ import annotations

import numpy as np

import unidist
from unidist.testing import compare, golden
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_backward
from unidist.testing.trial import Trial, setup, truth, verify

TRIALS = {
    "norm": Trial(clip_norm=0.25),
    "norm-out-of-reach": Trial(clip_norm=1e6),
    "norm-adam-empty-share": Trial("classifier", "adam", rest="one", clip_norm=0.125),
    "norm-of-a-window": Trial(rest="uneven", steps=3, accumulation=2, clip_norm=0.25),
    "norm-of-class-weights": Trial("classifier", form="total", clip_norm=0.125),
    "norm-embedding": Trial("embedding", "sgd", clip_norm=0.125),
    "value": Trial(clip_value=0.0625),
    "value-of-a-window": Trial(rest="one", steps=3, accumulation=2, clip_value=0.0625),
}


@check(
    4,
    "clipped as on one device",
    cases=TRIALS,
    flavours={"native": TRIALS, "keras": ("norm", "value-of-a-window")},
    few=("norm-of-a-window",),
)
def clip(bench: Bench, trial: Trial) -> None:
    verify(bench, trial)
    if trial.clip_norm is not None and trial.clip_norm < 1.0:
        compare.true((truth(bench, trial).norms > trial.clip_norm).all(), "the bound bites")


@check(4, "clip_gradients in an own loop clips the mean 1.5 of 0.5, 2.5, ... to 1, and returns 1.5 or its like",
       flavours="native", needs=(exchanges_in_backward,))  # fmt: skip
def clip_gradients(bench: Bench) -> None:
    network = golden.NETWORKS["linear"]
    model = bench.model(network, {"0/kernel": np.zeros((1, 1))})
    optimizer = bench.optimizer("plain", model, rate=1.0)
    inputs = np.array([[0.5 + 2.0 * rank] for rank in range(bench.replicas)])
    (batch,) = list(unidist.wrap_data(inputs, global_batch_size=bench.replicas))
    optimizer.zero_grad()
    model(batch).mean().backward()
    norm = unidist.clip_gradients(optimizer, max_norm=0.25)
    optimizer.step()
    bench.close(float(norm), inputs.mean(), "the norm before")
    bench.close(bench.weights(model)["0/kernel"], [[-0.25 * inputs.mean() / (inputs.mean() + bench.clip_epsilon)]], "the weight")


@check(4, "clip_gradients by value in an own loop", flavours="native", needs=(exchanges_in_backward,))
def clip_values(bench: Bench) -> None:
    trial = Trial(rest="uneven", clip_value=0.0625, epochs=1)
    model, optimizer, data = setup(bench, trial)
    loss, norms = bench.loss("mlp", "mean"), []
    for x, y in data:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        norms.append(float(unidist.clip_gradients(optimizer, max_value=0.0625)))
        optimizer.step()
    expected = truth(bench, trial)
    bench.close(bench.weights(model), expected.weights, "weight")
    bench.close(np.array(norms), expected.norms, "the norms before clipping")


@check(4, "exactly one positive bound", flavours="once")
def bounds(bench: Bench) -> None:
    model = bench.model("linear")
    optimizer = bench.optimizer("sgd", model)
    with compare.raises(ValueError, "max_norm", "max_value"):
        unidist.clip_gradients(optimizer)
    with compare.raises(ValueError, "max_norm", "max_value"):
        unidist.clip_gradients(optimizer, max_norm=1.0, max_value=1.0)
    with compare.raises(ValueError, "clip_norm", "-1"):
        unidist.make_train_step(model, optimizer, bench.loss("linear", "mean"), clip_norm=-1.0)
