"""Contract 1 for torch's own class losses, which divide by class weights or by the targets that they don't ignore."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

import unidist
from unidist.errors import UnsupportedError
from unidist.testing import compare
from unidist.testing.bench import CLASS_WEIGHTS, Bench
from unidist.testing.table import check, several_processes

RATE = 0.125
# (options of cross_entropy, targets a sample, what the loss is multiplied by)
LOSSES: dict[str, tuple[dict[str, Any], int, float]] = {
    "class-weights": ({"weight": CLASS_WEIGHTS}, 1, 1.0),
    "ignore-index": ({"ignore_index": 1}, 1, 1.0),
    "tokens": ({}, 3, 1.0),
    "weighted-tokens-times-3": ({"weight": CLASS_WEIGHTS}, 3, 3.0),
}
HOW = ("step", "backward", "window")
CASES = {f"{how}-{name}": (how, name) for how in HOW for name in LOSSES}


def _loss(bench: Bench, options: dict[str, Any], factor: float) -> Any:
    torch = bench.module
    given = {**options, **({"weight": bench.tensor(np.array(options["weight"]))} if "weight" in options else {})}
    entropy = torch.nn.functional.cross_entropy
    return lambda outputs, targets: factor * entropy(outputs.reshape(-1, len(CLASS_WEIGHTS)), targets.reshape(-1), **given)


def _data(bench: Bench, tokens: int) -> tuple[Any, Any]:
    """An uneven batch; with several targets a sample some are torch's own mark for those that don't count."""
    generator, n = np.random.default_rng(3), 2 * bench.replicas + 1
    targets = generator.integers(0, len(CLASS_WEIGHTS), (n, tokens))
    if tokens > 1:
        targets[::2, 1:] = -100
    targets[0] = 0
    return generator.standard_normal((n, tokens, 2)), targets


def _models(bench: Bench) -> tuple[Any, Any]:
    torch = bench.module
    torch.manual_seed(5)
    model = torch.nn.Linear(2, len(CLASS_WEIGHTS)).double()
    bare = copy.deepcopy(model)
    return unidist.wrap_model(model), bare


@check(1, "a cross entropy that does not divide by samples is recognised in a function of the user's", cases=CASES, flavours="native",
       few=("step-tokens",))  # fmt: skip
def class_loss(bench: Bench, case: tuple[str, str]) -> None:
    how, name = case
    options, tokens, factor = LOSSES[name]
    loss, (x, y) = _loss(bench, options, factor), _data(bench, tokens)
    model, bare = _models(bench)
    optimizer = bench.optimizer("plain", model, rate=RATE)
    windows = 2 if how == "window" else 1
    data = unidist.wrap_data((x, y), global_batch_size=-(-len(x) // windows))
    if how == "step":
        step = unidist.make_train_step(model, optimizer, loss)
        for batch in data:
            step(batch)
        bench.close(step.mean_loss(), float(loss(bare(bench.tensor(x)), bench.tensor(y))), "the mean loss")
    else:
        for window in unidist.accumulate(data, windows):
            optimizer.zero_grad()
            for inputs, targets in window:
                unidist.backward(loss(model(inputs), targets))
            optimizer.step()
    loss(bare(bench.tensor(x)), bench.tensor(y)).backward()
    for parameter, truth in zip(model.parameters(), bare.parameters()):
        bench.close(bench.array(parameter), bench.array(truth - RATE * truth.grad), "a weight")
    bench.equal_everywhere(model)


@check(11, "evaluate counts such a loss by what it divides by", flavours="native", cases=LOSSES)
def evaluated(bench: Bench, case: tuple[dict[str, Any], int, float]) -> None:
    options, tokens, factor = case
    loss, (x, y) = _loss(bench, options, factor), _data(bench, tokens)
    model, bare = _models(bench)
    found = unidist.evaluate(model, unidist.wrap_data((x, y), global_batch_size=len(x)), loss)
    bench.close(found["loss"], float(loss(bare(bench.tensor(x)), bench.tensor(y))), "the loss")


@check(12, "as one term of a sum it is refused: no weight fits both terms", flavours="native", needs=(several_processes,))
def class_loss_in_a_sum(bench: Bench) -> None:
    (x, y), loss = _data(bench, 1), _loss(bench, {"ignore_index": 1}, 1.0)
    model, _ = _models(bench)
    step = unidist.make_train_step(
        model, bench.optimizer("plain", model), lambda outputs, targets: loss(outputs, targets) + outputs.square().mean()
    )
    with compare.raises(UnsupportedError, "(total, weight)"):
        for batch in unidist.wrap_data((x, y), global_batch_size=len(x)):
            step(batch)
