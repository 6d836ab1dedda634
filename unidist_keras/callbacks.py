"""Callbacks of Keras over several processes: who runs which, what they decide holds on all ranks; and a warm-up for large batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy

from unidist.collectives import broadcast, broadcast_object
from unidist.errors import MismatchError, UnsupportedError
from unidist.facts import num_replicas

if TYPE_CHECKING:
    from unidist.base import Backend

# What writes files, or to the terminal: rank 0's run only.
_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint", "ProgbarLogger", "RemoteMonitor", "TensorBoard")
    if hasattr(keras.callbacks, name)
)
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def agreed(callbacks: Any, backend: Backend, set_epoch: Callable[[int], None] | None, mark: Callable[[], Any]) -> Any:
    """The callbacks of this rank's fit, an Agreement last; every rank calls it.

    set_epoch: tells the data which epoch begins. mark: a value that must be the same on ranks that are equally far.
    """
    given = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else keras.tree.flatten(callbacks or [])
    own = [json.dumps([_restores(given), any(_may_stop_in_batch(callback) for callback in given)])]
    rows = [json.loads(row) for row in backend.control.gather("the callbacks of fit", own[0])]
    kind = BatchAgreement if any(stops for _, stops in rows) else Agreement
    mine = given if backend.world.rank == 0 else [callback for callback in given if not isinstance(callback, _WRITERS)]
    agreement = kind(backend, any(restores for restores, _ in rows), set_epoch, mark)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks = [*(c for c in mine if not isinstance(c, Agreement)), agreement]
        agreement.set_model(callbacks.model)
        return callbacks
    return [*mine, agreement]


def quiet(callbacks: Any, backend: Backend) -> Any:
    """The callbacks of this rank's evaluate or predict: those that write run on rank 0 only."""
    if backend.world.rank == 0 or callbacks is None or isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return [callback for callback in keras.tree.flatten(callbacks) if not isinstance(callback, _WRITERS)]


def _restores(callbacks: list[Any]) -> bool:
    return any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks)


def _may_stop_in_batch(callback: Any) -> bool:
    """Whether a callback could set `stop_training` between the batches of an epoch; Keras' own do not, but for one."""
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        return True
    if isinstance(callback, (LearningRateWarmup, Agreement)) or type(callback).__module__.startswith("keras.src.callbacks."):
        return isinstance(callback, keras.callbacks.LambdaCallback)
    return any(getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook) for hook in _BATCH_HOOKS)


class Agreement(keras.callbacks.Callback):  # type: ignore[misc]
    """The last callback on every rank: what a callback decided on one of them (to stop, another learning rate) holds on all.

    It meets the other ranks at the begin and end of epochs. A learning rate is rank 0's; training stops when any rank stops.
    """

    def __init__(self, backend: Backend, restores: bool, set_epoch: Callable[[int], None] | None, mark: Callable[[], Any]) -> None:
        super().__init__()
        self._backend, self._restores, self._set_epoch, self._mark = backend, restores, set_epoch, mark

    def on_train_begin(self, logs: Any = None) -> None:
        """After rank 0's BackupAndRestore has read its files: weights, optimizer and epoch are rank 0's."""
        if not self._restores:
            return
        self.model._initial_epoch = broadcast_object(self.model._initial_epoch)
        broadcast(self.model)
        optimizer = self.model.optimizer
        if optimizer is not None:
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            broadcast(optimizer)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """The data's order of this epoch; a learning rate that a scheduler has set."""
        if self._set_epoch is not None:
            self._set_epoch(epoch)
        self._meet("the begin of an epoch")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Whether to go on, and with which learning rate."""
        self._meet("the end of an epoch")

    def _meet(self, what: str) -> None:
        rate, mark = _rate(self.model.optimizer), self._mark()
        rows = [json.loads(row) for row in self._backend.control.gather(what, json.dumps([bool(self.model.stop_training), rate, mark]))]
        self.model.stop_training = any(stop for stop, _, _ in rows)
        if rate is not None and rows[0][1] is not None and rate != rows[0][1]:
            self.model.optimizer.learning_rate = rows[0][1]
        marks = dict(mark for _, _, mark in rows if mark is not None)
        if any(marks[count] != value for count, value in (mark for _, _, mark in rows if mark is not None)):
            raise MismatchError(
                "the ranks' data sets made different batches in this epoch; every rank must give the whole data in one order (seed what "
                "shuffles), or say unidist.wrap_data(..., already_sharded=True, per_replica_batch_size=...)"
            )


class BatchAgreement(Agreement):
    """Also after every batch, since some rank has a callback that may stop there; costs a small exchange each."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Whether to go on."""
        stop = self._backend._as_tensor(numpy.array([float(bool(self.model.stop_training))], numpy.float32))
        self.model.stop_training = bool(float(self._backend._all_reduce(stop, "max")[0]))


def _rate(optimizer: Any) -> float | None:
    """The learning rate when callbacks can set it: None for a schedule."""
    variable = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    return float(keras.ops.convert_to_numpy(variable)) if isinstance(variable, keras.Variable) else None


class LearningRateWarmup(keras.callbacks.Callback):  # type: ignore[misc]
    """A linear warm-up for large batches: from the optimizer's rate to `factor` times it, a constant amount more each batch.

    factor: how much larger the batch is than the one that the rate was chosen for; by default the number of replicas. The ramp takes
    `epochs` epochs, or `steps` batches when they are given; then the rate stays at the product until another callback changes it.

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", section 2.2.

    Raises ValueError for a factor or length that is not positive, and in `fit` for a length in epochs when Keras does not know how many
    batches an epoch has; UnsupportedError for an optimizer whose rate is a schedule.
    """

    def __init__(self, factor: float | None = None, *, epochs: float = 5, steps: int | None = None) -> None:
        super().__init__()
        if (factor is not None and factor <= 0) or epochs <= 0 or (steps is not None and steps <= 0):
            raise ValueError(f"factor, epochs and steps must be positive, not factor={factor!r}, epochs={epochs!r}, steps={steps!r}")
        self.factor, self.epochs, self.steps = factor, epochs, steps
        self._base: float | None = None
        self._done = False

    def set_model(self, model: Any) -> None:
        """The rate to begin with is read here, before a checkpoint brings one of the middle of the ramp."""
        super().set_model(model)
        if self._base is None:
            self._base = _rate(model.optimizer)

    def on_train_begin(self, logs: Any = None) -> None:
        """Check what is needed."""
        if self._base is None:
            raise UnsupportedError("LearningRateWarmup needs an optimizer with a rate that can be set, not one with a schedule")
        if self.steps is None and not self.params.get("steps"):
            raise ValueError("Keras does not know how many batches an epoch of this data has; say LearningRateWarmup(steps=...)")
        self._done = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Where the epoch begins on the ramp."""
        self._first = epoch * (self.params.get("steps") or 0)
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """The rate of this batch."""
        if self._done:
            return
        length = self.steps if self.steps is not None else self.epochs * self.params["steps"]
        factor = num_replicas() if self.factor is None else self.factor
        place = self._first + batch if self.params.get("steps") or self._epoch == 0 else length
        part = min(place / length, 1.0)
        self._done = part == 1.0
        self.model.optimizer.learning_rate = (self._base or 0.0) * (1.0 + (factor - 1.0) * part)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The rate joins the logs, as with Keras' own schedulers."""
        if logs is not None:
            logs["learning_rate"] = _rate(self.model.optimizer)
