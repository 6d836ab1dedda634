"""Models and optimizers: wrapping them, what is under them, their weights, and whether the ranks hold the same."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

from unidist import frameworks
from unidist.agreement import check_same
from unidist.base import Backend
from unidist.context import current_backend
from unidist.errors import FrameworkMismatchError, MismatchError

T = TypeVar("T")


def scope() -> contextlib.AbstractContextManager[Any]:
    """Build models and Keras optimizers inside `with unidist.scope():`; it does nothing where none is needed.

    Under "mirrored" it is the strategy's scope, without which variables would live on one device only.
    """
    return current_backend()._scope()


def wrap_model(model: T, *, sync_batchnorm: bool = False, find_unused_parameters: bool = False, **options: Any) -> T:
    """Make a `torch.nn.Module` or Keras model ready for training on several devices; every rank must call it.

    Works in place and returns the same object: its class, attributes, methods and keys are the user's. It is moved to this
    worker's device, and all ranks then hold rank 0's weights and buffers. sync_batchnorm: normalise over the global batch.
    find_unused_parameters: allow parameters that a forward pass does not use ("ddp"). options: go to the engine untouched.

    Raises MismatchError on all ranks when names, shapes or dtypes differ, naming the first; FrameworkMismatchError for a
    model of the other framework; UnsupportedError for what the backend can't do.
    """
    backend = current_backend()
    _check_framework(backend, model, "model")
    backend._wrap_model(model, sync_batchnorm=sync_batchnorm, find_unused_parameters=find_unused_parameters, options=options)
    return model


def wrap_optimizer(optimizer: T, model: Any = None, *, compression: Any = None, **options: Any) -> T:
    """Make a torch or Keras optimizer ready; every rank must call it. Returns the same object.

    All ranks then hold rank 0's state and every hyper-parameter in every param group. model: the wrapped model whose
    parameters it holds; they are compared. compression: what the engine offers for the exchange ("fp16" on Horovod).
    Raises MismatchError when the optimizer holds other parameters than the model's, or the ranks differ.
    """
    backend = current_backend()
    _check_framework(backend, optimizer, "optimizer")
    backend._wrap_optimizer(optimizer, model, compression=compression, options=options)
    return optimizer


def native(obj: Any) -> Any:
    """The engine's object under a wrapped model or optimizer: the DistributedDataParallel, the strategy.

    The object itself where the engine has none.
    """
    return current_backend()._native(obj)


def get_weights(model: Any) -> dict[str, Any]:
    """Name to NumPy array of all weights and buffers, whole, on every rank; all ranks must call it."""
    return current_backend()._weights(model)


def set_weights(model: Any, weights: Mapping[str, Any]) -> None:
    """Set all weights and buffers from `get_weights`' form; all ranks must call it with the same.

    Raises MismatchError for missing, unknown or wrongly shaped names before anything is set.
    """
    backend = current_backend()
    current = backend._weights(model)
    absent, unknown = sorted(set(current) - set(weights)), sorted(set(weights) - set(current))
    if absent or unknown:
        raise MismatchError(f"the weights don't fit the model: missing {absent[:5]}, unknown {unknown[:5]}")
    for name, value in current.items():
        if tuple(value.shape) != tuple(weights[name].shape):
            raise MismatchError(f"weight {name!r} has shape {tuple(value.shape)}, not {tuple(weights[name].shape)}")
    backend._set_weights(model, weights)


def assert_replicas_equal(model: Any) -> None:
    """Compare every parameter and buffer of a model (or an optimizer's state) bit for bit across all replicas, by hash.

    Every rank must call it. Replicas within one process ("mirrored") are compared too. Raises MismatchError on all ranks, naming the
    first that differs.
    """
    backend = current_backend()
    rows = [(name, *_described(backend, tensor)) for name, tensor in backend._replicated(model).items()]
    check_same(backend.control, "the replicas' state", rows)
    for name, _, _, hashes in rows:
        if len(set(hashes)) > 1:
            raise MismatchError(f"the replicas' state differs within each process: {name} has {', '.join(hashes)} on its replicas")


def _described(backend: Backend, tensor: Any) -> tuple[list[int], str, list[str]]:
    """Shape, dtype, and the hash of each copy that this process holds."""
    arrays = [backend._as_leaf(backend._as_tensor(copy), _numpy().empty(0)) for copy in backend._copies(tensor)]
    return list(arrays[0].shape), str(arrays[0].dtype), [hashlib.sha256(array.tobytes()).hexdigest()[:16] for array in arrays]


def _numpy() -> Any:
    import numpy

    return numpy


def _check_framework(backend: Backend, obj: Any, what: str) -> None:
    if frameworks.origin(obj) == "tf_keras":
        raise FrameworkMismatchError(
            f"the {what} is of tf_keras (Keras 2), which unidist does not cover; build it with Keras 3 (import keras)"
        )
    found = frameworks.framework_of(obj)
    if found == backend.framework:
        return
    if frameworks.is_keras(obj):
        raise FrameworkMismatchError(
            f"the {what} is Keras' on {found}, but unidist runs {backend.framework}/{backend.name}; set "
            f"KERAS_BACKEND={backend.framework} before keras is imported, or choose a backend of {found}"
        )
    of = f"of {found}" if found else f"a {type(obj).__module__}.{type(obj).__qualname__}"
    raise FrameworkMismatchError(f"the {what} is {of}, but unidist runs {backend.framework}/{backend.name}")
