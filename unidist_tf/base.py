"""TFBackend: what local, mirrored and horovod share; each adds how it starts and how it sums over replicas."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from unidist.agreement import Models
from unidist.base import Backend, Step, StepOptions
from unidist.batch import Share
from unidist.checkpoint.parts import Store
from unidist.cli.identity import check_not_modin
from unidist.collectives import piece_sizes
from unidist.data import Source
from unidist.errors import FrameworkMismatchError, MismatchError, UnsupportedError
from unidist.groups import Group
from unidist_keras.counting import check_keras
from unidist_keras.fit import take
from unidist_keras.names import check_built
from unidist_keras.randomness import separate
from unidist_tf import gradients as grads
from unidist_tf import state, tensors
from unidist_tf.batchnorm import synchronise
from unidist_tf.data import read_source
from unidist_tf.differentiable import counted
from unidist_tf.evaluation import Evaluations, is_metric, merge_metric
from unidist_tf.keras import Counting, adapt_optimizer, build_optimizer, is_wrapped
from unidist_tf.precision import check_precision
from unidist_tf.shares import TracedShareLog
from unidist_tf.step import TFStep

check_not_modin()


class TFBackend(Backend):
    """Models, optimizers, steps and state on TensorFlow; `_sum` and `_spread` are what the replicas do together."""

    framework = "tensorflow"
    abilities: ClassVar[frozenset[str]] = frozenset({"reduce_gradients"})
    shares: TracedShareLog

    def _start(self) -> None:
        if keras.config.backend() != "tensorflow":
            raise FrameworkMismatchError(
                f"Keras runs on {keras.config.backend()!r}, but unidist runs {self.framework}/{self.name}; set KERAS_BACKEND=tensorflow "
                "before keras is imported"
            )
        check_keras()
        self._check_options()
        self._start_devices()
        self.shares = TracedShareLog()
        self.counting = Counting()
        self.reduced = grads.Reduced()
        self._models = Models()
        self._of_wrapped: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that were seen to hold wrapped models' variables
        self._evaluations = Evaluations(self)

    def _seed(self, seed: int) -> None:
        keras.utils.set_random_seed(seed)

    def _check_options(self) -> None:
        """Raise TypeError for options of `init` that the engine does not take; most take none."""
        if self.settings.options:
            raise TypeError(f"init got options that {self.framework}/{self.name} does not know: {sorted(self.settings.options)}")

    def _start_devices(self) -> None:
        """Choose the devices, before TensorFlow first uses any; start the engine."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Nothing was started that outlives the objects."""

    def _hardware(self) -> str:
        gpus = tf.config.list_logical_devices("GPU")
        return f"{self.num_replicas} x {gpus[0].name.removeprefix('/device:')}" if gpus else "CPU"

    # objects

    def _wrap_model(self, model: Any, *, sync_batchnorm: bool, find_unused_parameters: bool, options: Mapping[str, Any]) -> Any:
        if options:
            raise TypeError(f"wrap_model got options that {self.framework}/{self.name} does not know: {sorted(options)}")
        if not state.is_model(model):
            raise FrameworkMismatchError(f"wrap_model takes a Keras model or a tf.Module, not a {type(model).__name__}")
        if model in self._models:
            raise UnsupportedError("this model is wrapped already")
        if isinstance(model, keras.Layer):
            check_built(model)
        self._check_place(model, "model")
        if self.num_replicas > 1:
            synchronise(model, self, every=sync_batchnorm)
            if isinstance(model, keras.Layer):
                separate(model, self._replica_number)
        self._same_start(model, 0)
        if isinstance(model, keras.Model):
            self._adapt_model(model)
        self._models.add(model, statistics=bool(state.running_statistics(model)))
        return model

    def _check_place(self, obj: Any, what: str) -> None:
        """Raise where the variables of a model or optimizer are not where the engine needs them."""

    def _adapt_model(self, model: Any) -> None:
        """Make Keras' own fit, evaluate and predict right on this model object."""
        take(model, self)

    def _wrap_optimizer(self, optimizer: Any, model: Any, *, compression: Any, options: Mapping[str, Any]) -> Any:
        if compression is not None:
            raise UnsupportedError(f"{self.framework}/{self.name} offers no compression of gradients, so {compression!r} can't be used")
        if options:
            raise TypeError(f"wrap_optimizer got options that {self.framework}/{self.name} does not know: {sorted(options)}")
        if not state.is_optimizer(optimizer):
            raise FrameworkMismatchError(
                f"wrap_optimizer takes an optimizer of Keras 3 (keras.optimizers), not a {type(optimizer).__module__}."
                f"{type(optimizer).__qualname__}"
            )
        self._check_optimizer(optimizer)
        if model is not None:
            with self._scope():
                build_optimizer(optimizer, model)
        adapt_optimizer(optimizer, self)
        self._same_start(optimizer, 0)
        return optimizer

    def _check_optimizer(self, optimizer: Any) -> None:
        """Raise UnsupportedError for what this backend can't do with it."""

    def check_wrapped(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Before an exchange: raise MismatchError for variables of a model that was never wrapped, which began apart on each rank."""
        if self.world.size == 1 or optimizer in self._of_wrapped:
            return
        wrapped = {id(state.raw(v)) for model in self._models for v in state.trainable(model)}
        if any(id(state.raw(v)) not in wrapped for v in variables):
            raise MismatchError(
                "the optimizer holds variables of a model that did not go through wrap_model, so each rank began with its own: call "
                "unidist.wrap_model(model) first"
            )
        self._of_wrapped.add(optimizer)

    def _replicated(self, obj: Any) -> dict[str, Any]:
        return state.optimizer_state(obj) if state.is_optimizer(obj) else state.model_state(obj)

    def _has_state(self, obj: Any) -> bool:
        return state.is_model(obj) or state.is_optimizer(obj)

    def _same_start(self, obj: Any, root: int) -> None:
        if state.is_optimizer(obj):
            if self.world.size > 1:
                state.same_hyperparameters(obj, root)
            state.same_start(self, "the optimizer", state.optimizer_state(obj), root)
        else:
            state.same_start(self, "the model", state.model_state(obj), root)

    @functools.cached_property
    def fit(self) -> Any:
        """What Keras' fit over several processes keeps."""
        from unidist_keras.fit import FitState

        return FitState()

    # exchange

    def _seen_scale(self) -> Any:
        """How the batch last drawn counts: a number, or in a traced function a tensor that is read whenever it runs."""
        return self.shares.seen().scale if tf.executing_eagerly() else self.shares.traced_scale()

    @contextlib.contextmanager
    def _bounded(self, operation: str) -> Iterator[None]:
        """Around a call that may wait for other ranks: it is bounded in time, and its errors are unidist's."""
        with self.control.waiting(operation):
            try:
                yield
            except tf.errors.OpError as error:
                explained = self._explained(operation, error)
                raise explained from (error if explained is not error else None)

    def _explained(self, operation: str, error: tf.errors.OpError) -> Exception:
        """An engine's error as unidist's, with the ranks that it doesn't name; TensorFlow's other errors as they are."""
        return error  # type: ignore[no-any-return]

    def _later_scale(self) -> Any:
        """How a gradient that is taken here will count later, in `apply`; 0 for a borrowed sample."""
        if self.counting.scaled:
            return 1.0 if self.counting.rows is None else self.counting.rows > 0
        return self._seen_scale() if self.counting.weight is None else self.counting.weight

    def _replica_number(self) -> Any:
        """The number of the replica that calls, of all in the job."""
        return self.world.rank

    def _num_parts(self) -> int:
        """How many gradients `_sum` adds where it is called."""
        return 1

    def _sum(self, gradients: Sequence[Any], weight: Any, variables: Sequence[Any] | None = None) -> tuple[list[Any], Any]:
        """Gradients and weight, each summed over all replicas in one exchange; one that is None everywhere stays None.

        variables: those of the gradients, where some may be None on this replica only.
        """
        return list(gradients), weight

    def _reduce(
        self, gradients: Sequence[Any], *, scale: Any = None, weight: Any = None, variables: Sequence[Any] | None = None
    ) -> list[Any]:
        parts = self._num_parts()
        if parts == 1 or all(g is None for g in gradients):
            return list(gradients)
        if weight is None:
            factor = 1.0 / parts if scale is None else scale / parts
            return self._sum(grads.scaled(gradients, factor), None, variables)[0]
        weight = grads.cast_weight(weight, gradients)
        summed, total = self._sum(grads.scaled(gradients, weight), weight, variables)
        return grads.divided(summed, total)

    def _average(self, gradients: Sequence[Any], *, scale: Any, weight: Any) -> list[Any]:
        reduced = self._reduce(gradients, scale=scale, weight=weight)
        if self._num_parts() > 1:
            self.reduced.note(gradients, reduced)
        return reduced

    def _clip(self, optimizer: Any, *, max_norm: float | None, max_value: float | None) -> Any:
        raise FrameworkMismatchError(
            "an optimizer on TensorFlow holds no gradients to clip; clip what unidist.reduce_gradients returns, or use "
            "make_train_step(clip_norm=...), or the optimizer's own global_clipnorm, clipnorm and clipvalue"
        )

    # steps

    def _spread(self, function: Callable[..., Any], batch: Any, sizes: tf.Tensor, *numbers: tf.Tensor) -> list[Any]:
        """In a traced function: the results of `function(rows, size, *numbers)` on this process's replicas.

        A replica whose size is 0 computes on a borrowed row.
        """
        return [function(batch, sizes[0], *numbers)]

    def _on_replicas(self, function: Callable[..., Any], *numbers: tf.Tensor) -> list[Any]:
        """In a traced function: the results of `function(*numbers)` on this process's replicas."""
        return [function(*numbers)]

    def _update_metric(self, metric: Any, targets: Any, outputs: Any, sample_weight: Any) -> None:
        """Add this process's share to a metric object of Keras."""
        metric.update_state(targets, outputs, sample_weight=sample_weight)

    def _sizes(self, batch: Any, share: Share | None) -> list[int]:
        """Samples of this process's replicas."""
        if share is not None:
            return list(share.local_sizes)
        return [tensors.num_rows(batch)]

    def _check_step(self, model: Any, optimizer: Any) -> None:
        if not state.is_optimizer(optimizer):
            raise FrameworkMismatchError(f"make_train_step takes an optimizer of Keras 3, not a {type(optimizer).__name__}")
        if self.num_replicas == 1:
            return
        if model not in self._models:
            raise UnsupportedError("make_train_step takes a model that went through wrap_model, on all ranks")
        if not is_wrapped(optimizer):
            raise UnsupportedError("make_train_step takes an optimizer that went through wrap_optimizer, on all ranks")

    def _train_step(self, model: Any, optimizer: Any, options: StepOptions) -> Step:
        self._check_step(model, optimizer)
        if options.scaler is not None:
            raise UnsupportedError(
                "make_train_step(scaler=...) is torch's; on TensorFlow the optimizer scales the loss: use "
                "unidist.wrap_optimizer(keras.optimizers.LossScaleOptimizer(optimizer), model)"
            )
        check_precision(model, optimizer, options.precision)
        with self._scope():
            build_optimizer(optimizer, model)
            return TFStep(self, model, optimizer, options)

    def _evaluate_batch(
        self, model: Any, batch: Any, share: Share | None, loss: Any, metrics: Mapping[str, Any]
    ) -> dict[str, tuple[float, float]]:
        return self._evaluations.evaluate(model, batch, share, loss, metrics)

    def _is_metric(self, metric: Any) -> bool:
        return is_metric(metric)

    def _merge_metric(self, metric: Any) -> float:
        return merge_metric(self, metric)

    def _predict_batch(self, model: Any, batch: Any, share: Share | None) -> Any:
        return self._evaluations.predict(model, batch, share)

    # data

    def _source(self, data: Any, *, shuffle: bool, options: Mapping[str, Any]) -> Source:
        return read_source(data, self, shuffle=shuffle, options=options)

    def _batch_device(self) -> contextlib.AbstractContextManager[Any]:
        """Where batches are made."""
        return tf.device(self.device)  # type: ignore[no-any-return]

    def _fit_data(self, data: Any) -> Any:
        from unidist_tf.fit_data import fit_data

        return fit_data(self, data)

    # collectives

    def _as_tensor(self, leaf: Any) -> Any:
        return tensors.as_tensor(leaf)

    def _as_rows(self, tensor: Any) -> Any:
        return tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tensor

    def _as_leaf(self, tensor: Any, like: Any) -> Any:
        return tensors.as_leaf(tensor, like)

    def _signature(self, tensor: Any) -> tuple[tuple[int, ...], str]:
        return tuple(tensor.shape), tensor.dtype.name

    def _all_reduce(self, tensor: Any, op: str, *, group: Group | None = None) -> Any:
        return tensor

    def _all_gather(self, tensor: Any, first_dims: Sequence[int], *, group: Group | None = None) -> Any:
        return tensor

    def _broadcast(self, tensor: Any, root: int, *, group: Group | None = None) -> Any:
        return tensor

    def _join(self, parts: Sequence[Any]) -> Any:
        return tf.concat(parts, 0)

    def _grad_parts(self, group: Group | None) -> int:
        """How many replicas take part in a collective with gradients that is called here."""
        return self._num_parts()

    def _grad_collective(self, name: str, tensor: Any, *, group: Group | None = None, **arguments: Any) -> Any:
        parts = self._grad_parts(group)
        value = self._grad_value(name, tensor, parts, **arguments)
        if parts == 1:
            return tf.identity(value)
        return counted(lambda x: self._differentiable(name, x, group=group, **arguments), value, self._later_scale())

    def _differentiable(self, name: str, tensor: tf.Tensor, *, group: Group | None, **arguments: Any) -> tf.Tensor:
        """A collective over the replicas whose gradient is the sum of what all replicas ask of the result."""
        raise NotImplementedError

    def _grad_value(self, name: str, value: Any, parts: int, *, op: str = "", sizes: Sequence[int] | None = None) -> tf.Tensor:
        """The tensor of a collective with gradients among `parts`, checked as far as its shape is known while tracing."""
        tensor = tf.convert_to_tensor(value.value if isinstance(value, keras.Variable) else value)
        if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            raise TypeError(f"gradients flow through floating-point and complex tensors, not through {tensor.dtype.name}")
        if name == "all_gather":
            return self._as_rows(tensor)
        if name in ("reduce_scatter", "all_to_all") and tensor.shape.rank == 0:
            raise TypeError(f"{name} cuts the first axis, and a number or 0-d tensor has none")
        if name == "all_to_all" and sizes is not None:
            rows = sum(sizes) if tensor.shape[0] is None else tensor.shape[0]
            piece_sizes((rows,), sizes, parts)
        return tensor

    # state

    def _weights(self, model: Any) -> dict[str, Any]:
        self._end_of_pass()
        return {name: tensors.as_array(tf.convert_to_tensor(v)) for name, v in state.model_state(model).items()}

    def _set_weights(self, model: Any, weights: Mapping[str, Any]) -> None:
        state.set_weights(model, weights)

    def _store(self) -> Store:
        from unidist_tf.checkpoint import TFStore

        return TFStore(self)
