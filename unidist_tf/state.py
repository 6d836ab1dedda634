"""What a Keras model, `tf.Module` or optimizer holds by name, and how rank `root`'s comes to the others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from unidist.agreement import check_same
from unidist.collectives import broadcast_object
from unidist_keras.names import model_variables

if TYPE_CHECKING:
    from unidist_tf.base import TFBackend

_NUMBERS = re.compile(r"_\d+")


def is_model(obj: Any) -> bool:
    """Whether it is a Keras model or layer, or a `tf.Module`."""
    return isinstance(obj, (keras.Layer, tf.Module))


def is_optimizer(obj: Any) -> bool:
    """Whether it is an optimizer of Keras 3."""
    return isinstance(obj, keras.optimizers.Optimizer)


def raw(variable: Any) -> Any:
    """The TensorFlow variable under a Keras one."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def model_state(model: Any) -> dict[str, Any]:
    """Weights by name, those that are trained and those that are not; the names are the same in every process."""
    if isinstance(model, keras.Layer):
        return {name: raw(variable) for name, variable in model_variables(model).items()}
    found = model._flatten(predicate=lambda leaf: isinstance(leaf, tf.Variable), with_path=True)
    return {"/".join(map(str, path)): variable for path, variable in found}


def optimizer_state(optimizer: Any) -> dict[str, Any]:
    """Iterations, learning rate and slots by place."""
    return {f"{i}/{_NUMBERS.sub('', v.name)}": raw(v) for i, v in enumerate(optimizer.variables)}


def trainable(model: Any) -> list[Any]:
    """The variables that a step trains, as the optimizer knows them."""
    return list(model.trainable_variables)


def same_start(backend: TFBackend, what: str, named: Mapping[str, Any], root: int) -> None:
    """Rank `root`'s values in all variables, after names, shapes and dtypes were compared.

    Raises MismatchError on all ranks.
    """
    check_same(backend.control, what, [[name, list(v.shape), v.dtype.name] for name, v in named.items()])
    if backend.world.size > 1:
        for variable in named.values():
            variable.assign(backend._broadcast(tf.convert_to_tensor(variable), root))


def same_hyperparameters(optimizer: Any, root: int) -> None:
    """Rank `root`'s hyper-parameters on the others, a schedule included; what is a variable travels with the state."""
    config = broadcast_object(optimizer.get_config(), root)
    for name, value in config.items():
        if isinstance(value, (int, float, bool, type(None))) and name != "learning_rate" and hasattr(optimizer, name):
            setattr(optimizer, name, value)
    rate = config.get("learning_rate")
    if isinstance(rate, dict) and rate != optimizer.get_config().get("learning_rate"):
        optimizer._learning_rate = keras.optimizers.schedules.deserialize(rate)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        same_hyperparameters(optimizer.inner_optimizer, root)


def set_weights(model: Any, weights: Mapping[str, Any]) -> None:
    """Every weight from `weights`, whose names and shapes were compared."""
    for name, variable in model_state(model).items():
        variable.assign(tf.cast(numpy.asarray(weights[name]), variable.dtype))


def running_statistics(model: Any) -> dict[str, Any]:
    """Weights that are not trained: BatchNorm's moving mean and variance, and others like them."""
    mine = {id(raw(v)) for v in trainable(model)}
    return {name: variable for name, variable in model_state(model).items() if id(variable) not in mine}
