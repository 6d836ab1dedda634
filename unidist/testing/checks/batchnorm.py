"""Contract 6: BatchNorm over the replica's share, or over the global batch; running statistics are rank 0's."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np

import unidist
from unidist.errors import UnsupportedError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, several_processes, several_replicas
from unidist.testing.trial import Trial, setup

_EPSILON = 2.0**-10
_RATE = 0.125


def _rows(n: int) -> Any:
    return np.random.default_rng(5).standard_normal((n, 2)) * 3.0 + np.array([1.0, -2.0])


def _moments(bench: Bench, rows: Any) -> tuple[Any, Any]:
    return rows.mean(0), rows.var(0, ddof=1 if bench.unbiased() else 0)


def _wrapped(bench: Bench, momentum: float = 0.0, **options: Any) -> Any:
    with unidist.scope():
        return unidist.wrap_model(bench.normalised(2, momentum), **options)


def _train(bench: Bench, model: Any, data: Any) -> Any:
    step = unidist.make_train_step(model, bench.optimizer("plain", model, rate=_RATE), bench.loss("linear", "mean"))
    for batch in data:
        step(batch)
    return step


def _close(bench: Bench, found: tuple[Any, Any], expected: tuple[Any, Any], what: str) -> None:
    for name, one, other in zip(("mean", "variance"), found, expected):
        bench.close(one, other, f"the running {name} {what}", tolerance=max(bench.tolerance, 1e-9))


@check(6, "without sync_batchnorm the statistics are those of rank 0's share, on every rank, after the pass", refusable=False)
def own_statistics(bench: Bench) -> None:
    n = 3 * bench.replicas
    rows = _rows(n)
    model = _wrapped(bench)
    _train(bench, model, unidist.wrap_data((rows, np.zeros((n, 1))), global_batch_size=n))
    _close(bench, bench.statistics(model), _moments(bench, rows[:3]), "of the model")
    unidist.assert_replicas_equal(model)


@check(6, "calls that all ranks make (get_weights, evaluate) bring rank 0's statistics also in the middle of a pass", refusable=False)
def statistics_in_a_pass(bench: Bench) -> None:
    n = 3 * bench.replicas
    rows = np.concatenate([_rows(n), 2.0 * _rows(n)])
    model = _wrapped(bench)
    step = unidist.make_train_step(model, bench.optimizer("plain", model, rate=0.0), bench.loss("linear", "mean"))
    for number, batch in enumerate(unidist.wrap_data((rows, np.zeros((2 * n, 1))), global_batch_size=n)):
        step(batch)
        held = [value for value in unidist.get_weights(model).values() if value.shape == (2,)]
        for expected in _moments(bench, rows[number * n : number * n + 3]):
            found = min(held, key=lambda value: float(np.abs(value - expected).max()))
            bench.close(found, expected, f"the statistics in get_weights after batch {number}", tolerance=max(bench.tolerance, 1e-9))
        unidist.assert_replicas_equal(model)


@check(6, "momentum: the running statistics move as the layer's own rule says", refusable=False)
def momentum(bench: Bench) -> None:
    n, keep = 2 * bench.replicas, 0.75
    rows = _rows(2 * n)
    model = _wrapped(bench, keep)
    _train(bench, model, unidist.wrap_data((rows[:n], np.zeros((n, 1))), global_batch_size=n))
    mean, variance = _moments(bench, rows[:2])
    _close(bench, bench.statistics(model), ((1 - keep) * mean, keep * 1.0 + (1 - keep) * variance), "after one step")


@check(6, "rank 0 may evaluate alone, at any time", refusable=False, needs=(several_processes,))
def rank_0_alone(bench: Bench) -> None:
    n = 2 * bench.replicas
    rows = _rows(n)
    model = _wrapped(bench)
    data = unidist.wrap_data((rows, np.zeros((n, 1))), global_batch_size=n)
    _train(bench, model, data)
    if bench.rank == 0:
        outputs = bench.forward(model, rows)
        compare.true(np.isfinite(outputs).all(), "the outputs are finite")
    unidist.barrier()


@check(6, "a share of one sample raises on all ranks, before anything is computed", refusable=False, needs=(several_replicas,))
def share_of_one(bench: Bench) -> None:
    n = bench.replicas + 1
    model = _wrapped(bench)
    before = bench.weights(model)
    data = unidist.wrap_data((_rows(n), np.zeros((n, 1))), global_batch_size=n)
    with compare.raises(UnsupportedError, "sync_batchnorm", "drop_last"):
        _train(bench, model, data)
    for name, value in bench.weights(model).items():
        compare.same(np.asarray(value), np.asarray(before[name]), f"weight {name!r} after the error")


def _loss(rows: Any, first: Any, gamma: Any, beta: Any, last: Any) -> float:
    """The mean squared output: kernels (in, out), as Keras holds them."""
    hidden = rows @ first
    normal = (hidden - hidden.mean(0)) / np.sqrt(hidden.var(0) + _EPSILON)
    return float((((normal * gamma + beta) @ last - 1.0) ** 2).mean())


def _quotient(function: Callable[[Any], float], point: Any) -> Any:
    gradient = np.zeros_like(point)
    for index in np.ndindex(point.shape):
        shift = np.zeros_like(point)
        shift[index] = 2.0**-17
        gradient[index] = (function(point + shift) - function(point - shift)) / 2.0**-16
    return gradient


def _after_one_step(rows: Any) -> list[Any]:
    """Weights after one step on one device, by finite differences."""
    weights = [np.eye(2), np.ones(2), np.zeros(2), np.ones((2, 1))]
    gradients = [
        _quotient(lambda value, i=i: _loss(rows, *[value if i == j else w for j, w in enumerate(weights)]), weights[i])  # type: ignore[misc]
        for i in range(4)
    ]
    return [weight - _RATE * gradient for weight, gradient in zip(weights, gradients)]


def _learned(bench: Bench, model: Any) -> list[Any]:
    """first, gamma, beta, last from the model's weights in order."""
    values = [np.asarray(value) for value in bench.weights(model).values()]
    if bench.flavour == "native":
        first, gamma, beta, last = values
        return [first.T, gamma, beta, last.T]
    return [values[0], values[1], values[2], values[-1]]


@check(
    6,
    "sync_batchnorm normalises over the global batch: weights and statistics are one device's",
    cases={"even": 2, "uneven": None},
    few=True,
)
def synchronised(bench: Bench, each: int | None) -> None:
    n = 2 * bench.replicas if each else 2 * bench.replicas + 1
    rows = _rows(n)
    model = _wrapped(bench, sync_batchnorm=True)
    _train(bench, model, unidist.wrap_data((rows, np.ones((n, 1))), global_batch_size=n))
    _close(bench, bench.statistics(model), _moments(bench, rows), "over the global batch")
    for number, (found, expected) in enumerate(zip(_learned(bench, model), _after_one_step(rows))):
        bench.close(found, expected, f"weight {number}", tolerance=max(bench.tolerance, 1e-7))
    unidist.assert_replicas_equal(model)


@check(6, "another model's empty share before it changes nothing")
def synchronised_after(bench: Bench) -> None:
    trial = Trial("linear", "sgd", "one", steps=1, epochs=1)
    model, optimizer, data = setup(bench, trial)
    step = unidist.make_train_step(model, optimizer, bench.loss("linear", "mean"))
    for batch in data:
        step(batch)
    synchronised(bench, 2)


@check(6, "sync_batchnorm with fewer samples than replicas: the borrowed ones do not count", flavours="keras", needs=(several_replicas,))
def synchronised_borrowed(bench: Bench) -> None:
    """A loss of the form (total, weight), whose gradient through the moments a borrowed sample must not touch."""
    row = _rows(1)
    model = _wrapped(bench, sync_batchnorm=True)
    step = unidist.make_train_step(model, bench.optimizer("plain", model, rate=_RATE), bench.loss("linear", "total"))
    for batch in unidist.wrap_data((row, np.ones((1, 1))), global_batch_size=2 * bench.replicas):
        step(batch)
    # One sample is its own mean, so the output is 0 and only beta has a gradient: 2 (0 - 1) times the last kernel.
    expected = [np.eye(2), np.ones(2), np.full(2, 2.0 * _RATE), np.ones((2, 1))]
    for number, (found, value) in enumerate(zip(_learned(bench, model), expected)):
        bench.close(found, value, f"weight {number}", tolerance=max(bench.tolerance, 1e-9))
    _close(bench, bench.statistics(model), (row[0], np.zeros(2)), "of the one sample")
    unidist.assert_replicas_equal(model)


@check(6, "sync_batchnorm with an empty share", needs=(several_processes,))
def synchronised_empty(bench: Bench) -> None:
    """The second step has samples on rank 0 only; the statistics keep nothing of the first."""
    mine = _rows(4) if bench.rank == 0 else _rows(4)[:2]
    model = _wrapped(bench, sync_batchnorm=True)
    data = unidist.wrap_data((mine, np.ones((len(mine), 1))), per_replica_batch_size=2 // bench.local_replicas, already_sharded=True)
    step = unidist.make_train_step(model, bench.optimizer("plain", model, rate=0.0), bench.loss("linear", "mean"))
    for batch in data:
        step(batch)
    _close(bench, bench.statistics(model), _moments(bench, _rows(4)[2:]), "over the samples that count")


@check(6, "field case 24: {0, 2} and {10, 12} give mean 6, variance 26 (unbiased 34.667)", flavours="native", needs=(several_processes,))
def field_case(bench: Bench) -> None:
    if bench.size != 2:
        return
    rows = np.array([[0.0, 0.0], [2.0, 2.0], [10.0, 10.0], [12.0, 12.0]])
    model = _wrapped(bench, sync_batchnorm=True)
    _train(bench, model, unidist.wrap_data((rows, np.ones((4, 1))), global_batch_size=4))
    _close(bench, bench.statistics(model), (np.full(2, 6.0), np.full(2, 26.0 * 4 / 3)), "of the field case")


@check(6, "models that one rank has dropped do not disturb the others", refusable=False, flavours="native", needs=(several_processes,))
def dropped_models(bench: Bench) -> None:
    """Ranks collect garbage at different times; what they exchange at the end of a pass must not depend on it."""
    n = 3 * bench.replicas
    rows = _rows(n)
    kept = [_wrapped(bench) for _ in range(3)]
    if bench.rank == 0:
        del kept[1]
        gc.collect()
    model = kept[-1]
    _train(bench, model, unidist.wrap_data((rows, np.zeros((n, 1))), global_batch_size=n))
    _close(bench, bench.statistics(model), _moments(bench, rows[:3]), "of the model that is left")
    unidist.assert_replicas_equal(model)
