"""Mixed precision for one training step: while it is traced, the model's float32 layers have Keras' mixed dtype policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from unidist.errors import UnsupportedError
from unidist_tf.keras import loss_scale

POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
# Their outputs are probabilities, of which half precision would keep two or three digits.
_WIDE = (keras.activations.softmax, keras.activations.log_softmax, keras.activations.sigmoid, keras.activations.log_sigmoid)


def check_precision(model: Any, optimizer: Any, precision: str | None) -> None:
    """Raise UnsupportedError where a step can't compute in this precision: for a `tf.Module`, or a model without float32 layers.

    Raises ValueError for "fp16" with an optimizer that does not scale the loss.
    """
    if precision is None:
        return
    if not isinstance(model, keras.Layer):
        raise UnsupportedError(f"precision={precision!r} works on Keras' layers; a tf.Module casts its own tensors")
    wanted = keras.dtype_policies.get(POLICIES[precision]).compute_dtype
    if not _float32_layers(model) and all(layer.compute_dtype != wanted for layer in model._flatten_layers()):
        raise UnsupportedError(
            f"precision={precision!r} works on layers that compute in float32, and this model computes in {model.compute_dtype}; build it "
            f"in float32, or under keras.config.set_dtype_policy({POLICIES[precision]!r}) without precision="
        )
    if precision == "fp16" and loss_scale(optimizer) is None and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "precision='fp16' needs a scaled loss, since small gradients are 0 in half precision: use "
            "unidist.wrap_optimizer(keras.optimizers.LossScaleOptimizer(optimizer), model), or precision='bf16'"
        )


@contextlib.contextmanager
def computed_in(model: Any, precision: str | None) -> Iterator[None]:
    """Around the tracing of a forward pass. Weights and updates stay in float32; afterwards the layers are as before."""
    changed = [] if precision is None else [(layer, layer.dtype_policy) for layer in _float32_layers(model)]
    for layer, _ in changed:
        layer.dtype_policy = POLICIES[precision or ""]
    try:
        yield
    finally:
        for layer, policy in changed:
            layer.dtype_policy = policy


def _float32_layers(model: Any) -> list[Any]:
    """Those that may compute in half precision."""
    return [
        layer
        for layer in model._flatten_layers()
        if layer.dtype_policy.name == "float32"
        and not isinstance(layer, keras.layers.Softmax)
        and getattr(layer, "activation", None) not in _WIDE
    ]


def widened(tensor: Any) -> Any:
    """Half precision as float32: outputs on their way to a loss, and losses on their way to a sum."""
    return tf.cast(tensor, tf.float32) if getattr(tensor, "dtype", None) in (tf.float16, tf.bfloat16) else tensor
