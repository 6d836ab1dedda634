"""Checkpoints on TensorFlow: variables of Keras models, of `tf.Module`s and of Keras' optimizers by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras
import ml_dtypes  # which TensorFlow itself stands on
import numpy
import tensorflow as tf

from unidist.checkpoint.parts import Part, Store
from unidist.checkpoint.safetensors_package import safetensors_module
from unidist.errors import FrameworkMismatchError
from unidist_keras.checkpoint import OptimizerPart, VariablesPart, models_weights, seed_states, set_seed_states
from unidist_keras.names import model_variables
from unidist_tf import state
from unidist_tf.keras import build_optimizer

if TYPE_CHECKING:
    from unidist_tf.base import TFBackend

_DTYPES = {
    "F64": numpy.float64, "F32": numpy.float32, "F16": numpy.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2, "I64": numpy.int64, "I32": numpy.int32, "I16": numpy.int16, "I8": numpy.int8, "U64": numpy.uint64,
    "U32": numpy.uint32, "U16": numpy.uint16, "U8": numpy.uint8, "BOOL": numpy.bool_, "C64": numpy.complex64,
}  # fmt: skip


class TFStore(Store):
    """Variables under a strategy are read from the first replica and set on all."""

    def __init__(self, backend: TFBackend) -> None:
        self._backend = backend

    def model(self, model: Any) -> Part:
        if not state.is_model(model):
            raise FrameworkMismatchError(f"model is a {type(model).__name__}, not a Keras model or a tf.Module")
        return VariablesPart(_variables(model), _read, self.signature)

    def optimizer(self, optimizer: Any, models: Mapping[str, Any]) -> Part:
        if not state.is_optimizer(optimizer):
            raise FrameworkMismatchError(f"optimizer is a {type(optimizer).__name__}, not an optimizer of Keras 3")
        only = next(iter(models.values())) if len(models) == 1 else None

        def build() -> None:
            if only is not None:
                with self._backend._scope():
                    build_optimizer(optimizer, only)

        trained = {id(v) for model in models.values() for v in state.trainable(model)}
        return OptimizerPart(optimizer, models_weights(models, _variables), trained, _read, self.signature, build)

    def signature(self, value: Any) -> tuple[tuple[int, ...], str] | None:
        if isinstance(value, (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)):
            raise TypeError(f"a checkpoint holds dense tensors; a {type(value).__name__} is none")
        return (tuple(value.shape), value.dtype.name) if isinstance(value, tf.Tensor) else None

    def write(self, named: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
        ready = {name: numpy.ascontiguousarray(tensor.numpy()).reshape(tensor.shape) for name, tensor in named.items()}
        for name, array in ready.items():
            if array.dtype == numpy.complex128:  # which the format lacks
                ready[name] = array.reshape(*array.shape, 1).view(numpy.float64)
        safetensors_module("safetensors.numpy").save_file(ready, path)

    def read(self, data: bytes, dtypes: Mapping[str, str]) -> dict[str, Any]:
        found = {}
        for name, stored in safetensors_module("safetensors").deserialize(data):
            array = numpy.frombuffer(stored["data"], _DTYPES[stored["dtype"]]).reshape(stored["shape"])
            if dtypes.get(name) == "complex128":
                array = array.view(numpy.complex128).reshape(array.shape[:-1])
            found[name] = tf.constant(array)
        return found

    def random_state(self, models: Mapping[str, Any]) -> dict[str, Any]:
        return {"seed_generators": seed_states(_keras(models), keras.ops.convert_to_numpy)}

    def set_random_state(self, state: Mapping[str, Any], seed: int | None, models: Mapping[str, Any]) -> None:
        set_seed_states(_keras(models), state["seed_generators"], keras.ops.convert_to_numpy, own_seeds=seed is not None)


def _keras(models: Mapping[str, Any]) -> dict[str, Any]:
    return {label: model for label, model in models.items() if isinstance(model, keras.Layer)}


def _variables(model: Any) -> Mapping[str, Any]:
    """The model's variables by name, Keras' own objects where it has them, as its optimizers know them."""
    return model_variables(model) if isinstance(model, keras.Layer) else state.model_state(model)


def _read(variable: Any) -> Any:
    return tf.convert_to_tensor(state.raw(variable))
