"""Contract 1 in mixed precision on Keras models: `precision=`, and models that were built under a mixed dtype policy."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from unidist.errors import UnsupportedError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_apply, synchronises_batchnorm

POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
_RATE = 0.125


def _data(bench: Bench) -> tuple[Any, Any]:
    n = 2 * bench.replicas + 1
    x = np.random.default_rng(7).standard_normal((n, 3)).astype("float32")
    return x, (x[:, :2] * 0.5).astype("float32")


def _build(bench: Bench, policy: str) -> Any:
    """An MLP with BatchNorm in float32 weights, always the same ones."""
    layers = bench.module.layers
    with unidist.scope():
        model = bench.module.Sequential([
            bench.module.Input((3,), dtype="float32"), layers.Dense(4, "tanh", dtype=policy),
            layers.BatchNormalization(momentum=0.5, dtype=policy), layers.Dense(2, dtype=policy),
        ])  # fmt: skip
        draw = np.random.default_rng(1).standard_normal
        model.set_weights([np.abs(draw(w.shape)) if "variance" in w.path else draw(w.shape) for w in model.weights])
        return unidist.wrap_model(model, sync_batchnorm=True)


def _optimizer(bench: Bench, model: Any, scaled: bool) -> Any:
    optimizers = bench.module.optimizers
    with unidist.scope():
        optimizer = optimizers.SGD(_RATE)
        return unidist.wrap_optimizer(optimizers.LossScaleOptimizer(optimizer, initial_scale=256.0) if scaled else optimizer, model)


def _trained(bench: Bench, policy: str, precision: str | None = None) -> list[Any]:
    model = _build(bench, policy)
    step = unidist.make_train_step(
        model, _optimizer(bench, model, "fp16" in (precision, policy) or policy == "mixed_float16"), "mse", precision=precision
    )
    data = _data(bench)
    for batch in unidist.wrap_data(data, global_batch_size=len(data[0])):
        loss = step(batch)
    compare.same(bench.dtype(loss), "float32", "the loss")
    policies = {layer.dtype_policy.name for layer in model.layers}
    compare.same(policies, {policy}, "the layers' policies after the step")
    unidist.assert_replicas_equal(model)
    return [np.asarray(value) for value in model.get_weights()]


@check(
    1,
    "precision= trains as a model of the mixed policy does, near to float32",
    cases=POLICIES,
    flavours="keras",
    needs=(exchanges_in_apply,),
)
def precision(bench: Bench, policy: str) -> None:
    name = next(name for name, value in POLICIES.items() if value == policy)
    found, built = _trained(bench, "float32", name), _trained(bench, policy)
    for number, (mine, theirs) in enumerate(zip(found, built)):
        compare.same(mine, theirs, f"weight {number}")
    if name == "bf16":
        exact = _trained(bench, "float32")
        for number, (mine, wide) in enumerate(zip(found, exact)):
            compare.close(mine, wide, 2.0**-5, f"weight {number} beside float32")
        compare.true(any((mine != wide).any() for mine, wide in zip(found, exact)), "it was computed in half precision")


@check(1, "fit of a model of the mixed policy: the loss scale that Keras adds is every replica's", cases=POLICIES, flavours="keras",
       needs=(synchronises_batchnorm,))  # fmt: skip
def mixed_fit(bench: Bench, policy: str) -> None:
    model = _build(bench, policy)
    model.dtype_policy = policy
    with unidist.scope():
        model.compile(_optimizer(bench, model, False), loss="mse")
    x, y = _data(bench)
    x, y = np.concatenate([x, x]), np.concatenate([y, y])
    y[0] = np.inf if policy == "mixed_float16" else y[0]
    model.fit(x, y, batch_size=len(x) // 2, epochs=1, shuffle=False, verbose=0)
    unidist.assert_replicas_equal(model)
    if policy == "mixed_float16":
        compare.true(type(model.optimizer).__name__ == "LossScaleOptimizer", "Keras scales the loss")
        skipped = np.log2(2.0**15 / float(bench.array(model.optimizer.dynamic_scale)))
        compare.true(skipped >= 1, "the inf halved the scale")
        compare.same(int(bench.array(model.optimizer.iterations)), 2 - int(skipped), "the updates that were not skipped")
    compare.true(all(np.isfinite(value).all() for value in model.get_weights()[:2]), "the weights are finite")
    bench.equal_everywhere(model)


@check(12, "precision and scaler that a step can't have are refused", flavours="keras", needs=(exchanges_in_apply,))
def impossible_precision(bench: Bench) -> None:
    wide, model = bench.model("mlp"), _build(bench, "float32")
    loss = bench.loss("mlp", "mean")
    with compare.raises(UnsupportedError, "float32", "mixed_bfloat16"):
        unidist.make_train_step(wide, bench.optimizer("sgd", wide), loss, precision="bf16")
    with compare.raises(ValueError, "LossScaleOptimizer"):
        unidist.make_train_step(model, _optimizer(bench, model, False), loss, precision="fp16")
    with compare.raises(UnsupportedError, "LossScaleOptimizer"):
        unidist.make_train_step(wide, bench.optimizer("sgd", wide), loss, scaler=object())
