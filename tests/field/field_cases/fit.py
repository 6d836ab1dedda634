"""Cases 46 to 52 and what belongs to them: Keras' own fit, evaluate and predict, each compared with a bare model on one device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import unidist
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, several_processes, several_replicas

RATE = 2.0**-5
X = np.array([[1.0, 2.0], [-1.0, 0.5], [0.25, -2.0], [1.5, 1.0], [-0.5, -1.5], [2.0, 0.0], [0.75, -0.25]])
Y = np.array([[1.0], [0.0], [0.0], [1.0], [0.0], [1.0], [1.0]])


def _dense(bench: Bench, rate: float = RATE, **settings: Any) -> tuple[Any, Any]:
    """A bare model of one sigmoid unit with weights that are not symmetric, and its bare optimizer; build it in a scope or outside."""
    keras = bench.module
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation="sigmoid")])
    model.set_weights([np.array([[0.5], [-0.25]]), np.array([0.125])])
    return model, keras.optimizers.SGD(rate, momentum=0.875, **settings)


def pair(bench: Bench, build: Any, **compile_options: Any) -> tuple[Any, Any]:
    """(wrapped, bare): two models of `build() -> (model, optimizer)`, both compiled; options are called to make objects anew."""

    def options() -> dict[str, Any]:
        return {name: value() if callable(value) else value for name, value in compile_options.items()}

    with unidist.scope():
        model, optimizer = build()
        unidist.wrap_model(model)
        model.compile(unidist.wrap_optimizer(optimizer, model), **options())
    bare, optimizer = build()
    bare.compile(optimizer, **options())
    return model, bare


def same(bench: Bench, model: Any, bare: Any, found: Any = None, wanted: Any = None) -> None:
    """Weights, optimizer slots and histories agree, and the ranks hold the same bits."""
    for name, one, other in (
        ("weights", model.get_weights(), bare.get_weights()),
        ("slots", [np.array(bench.array(v)) for v in model.optimizer.variables], [bench.array(v) for v in bare.optimizer.variables]),
    ):
        compare.true(len(one) == len(other), f"there are as many {name}")
        for a, b in zip(one, other):
            bench.close(a, b, name)
    if wanted is not None:
        compare.same(sorted(found.history), sorted(wanted.history), "the names in history")
        for name, values in wanted.history.items():
            bench.close(np.array(found.history[name]), np.array(values), name, tolerance=max(bench.tolerance, 1e-6))
        compare.true(all(row == found.history for row in bench.everywhere(found.history)), "history is the same on all ranks")
    bench.equal_everywhere(model)


def _metrics(bench: Bench) -> list[Any]:
    metrics = bench.module.metrics
    return [metrics.MeanAbsoluteError(name="mae"), metrics.AUC(name="auc"), metrics.Precision(name="p"), metrics.TruePositives(name="tp")]


@check(11, "metrics from merged state, in history, validation and evaluate", number=46, flavours="keras")
def metrics(bench: Bench) -> None:
    """Seven samples in batches of four, so that the shares differ; AUC of p=[.1,.4,.35,.8,.9] by hand besides."""
    model, bare = pair(bench, lambda: _dense(bench), loss="binary_crossentropy", metrics=lambda: _metrics(bench))
    options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (X[:5], Y[:5]), "validation_batch_size": 4}
    same(bench, model, bare, model.fit(X, Y, **options), bare.fit(X, Y, **options))
    found, wanted = (m.evaluate(X[:5], Y[:5], batch_size=4, verbose=0, return_dict=True) for m in (model, bare))
    bench.close(found, wanted, "what evaluate gives", tolerance=max(bench.tolerance, 1e-6))
    keras = bench.module
    with unidist.scope():
        same_out = unidist.wrap_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")]))
        same_out.compile(loss="mse", metrics=[keras.metrics.AUC(name="auc"), keras.metrics.TruePositives(name="tp")])
    p, y = np.array([[0.1], [0.4], [0.35], [0.8], [0.9]]), np.array([[0.0], [0.0], [1.0], [1.0], [1.0]])
    found = same_out.evaluate(p, y, batch_size=4, verbose=0, return_dict=True)
    compare.true(abs(found["auc"] - 5 / 6) < 1e-3 and found["tp"] == 2, f"AUC and true positives are one device's, not {found}")
