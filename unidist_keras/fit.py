"""Keras' own fit, evaluate and predict in a job of several processes: each takes the whole data and works on its share.

`divide` puts them on the model instance. Batch sizes are global. Metrics are merged as sums of their state over all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy

from unidist.agreement import check_same
from unidist.batch import split_sizes
from unidist.collectives import all_gather
from unidist.data import GlobalPlan
from unidist.errors import UnsupportedError
from unidist.nest import leaves, map_nest
from unidist_keras.on_instance import of_class, put

if TYPE_CHECKING:
    from unidist.base import Backend

DEFAULT_BATCH = 32


class FitState:
    """What a running fit tells the exchange in the optimizer's `apply`; one per backend.

    weight: rows of this step when they have to ride along, since shares may be uneven; stepping: inside Keras' train step.
    """

    def __init__(self) -> None:
        self.weight: Any = None
        self.stepping = False
        self.drop_metrics = False
        self._counting = False

    @contextlib.contextmanager
    def counting_rows(self, count: bool) -> Iterator[None]:
        """Around a fit: whether its batches may be uneven."""
        self._counting = count
        try:
            yield
        finally:
            self._counting = False

    @contextlib.contextmanager
    def step(self, rows: Any) -> Iterator[None]:
        """Around Keras' own train step on `rows` samples (a number, or a tensor while tracing)."""
        self.stepping, self.weight = True, rows if self._counting else None
        try:
            yield
        finally:
            self.stepping, self.weight = False, None


def divide(model: Any, backend: Backend) -> None:
    """Replace `fit`, `evaluate` and `predict` of this model object; its class and saved form stay Keras'."""
    for name, function in (
        ("fit", functools.partial(_fit, model, backend)),
        ("evaluate", functools.partial(_evaluate, model, backend)),
        ("predict", functools.partial(_predict, backend)),
        ("_get_metrics_result_or_logs", functools.partial(_merged, model, backend)),
    ):
        put(model, name, functools.partial(function, of_class(model, name)))


class Shares(keras.utils.PyDataset):
    """This process's rows of every global batch of arrays, in an order that is the same on all ranks."""

    def __init__(self, arrays: tuple[Any, ...], plan: GlobalPlan) -> None:
        super().__init__()
        self._arrays = arrays
        self._plan = plan
        self._epoch = 0
        self._order = plan.order(0)

    @property
    def num_batches(self) -> int:
        return self._plan.num_steps or 0

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, step: int) -> Any:
        mine = self._plan.positions(step)
        rows = self._order[mine.start : mine.stop]
        return map_nest(lambda leaf: leaf[rows], self._arrays)

    def on_epoch_end(self) -> None:
        if self._plan.shuffle:
            self._epoch += 1
            self._order = self._plan.order(self._epoch)


class BatchShares(keras.utils.PyDataset):
    """This process's rows of the global batches that a user's PyDataset makes."""

    def __init__(self, dataset: Any, rank: int, size: int) -> None:
        super().__init__()
        self._dataset = dataset
        self._rank, self._size = rank, size

    @property
    def num_batches(self) -> Any:
        return self._dataset.num_batches

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, step: int) -> Any:
        batch = map_nest(numpy.asarray, self._dataset[step])
        rows = _part(len(leaves(batch)[0]), self._rank, self._size)
        if rows.start == rows.stop:
            raise UnsupportedError(f"batch {step} has fewer samples than the job has processes; make it larger, or drop it")
        return map_nest(lambda leaf: leaf[rows], batch)

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()


def _part(total: int, rank: int, size: int) -> slice:
    sizes = split_sizes(total, size)
    begin = sum(sizes[:rank])
    return slice(begin, begin + sizes[rank])


def _as_arrays(what: str, *values: Any) -> tuple[Any, ...]:
    """Nests of NumPy arrays; None at the end is left out."""
    while values and values[-1] is None:
        values = values[:-1]
    for leaf in leaves(values):
        if leaf is not None and not hasattr(leaf, "__array__") and not isinstance(leaf, numpy.ndarray):
            raise UnsupportedError(
                f"{what} takes arrays or a keras.utils.PyDataset in a job of several processes, not a {type(leaf).__name__}; every rank "
                "gives the whole data, and unidist takes its share"
            )
    return tuple(value if value is None else map_nest(_to_numpy, value) for value in values)


def _to_numpy(leaf: Any) -> Any:
    return leaf if isinstance(leaf, numpy.ndarray) else keras.ops.convert_to_numpy(leaf)


def _check_whole(backend: Backend, what: str, arrays: tuple[Any, ...], batch_size: int) -> int:
    """The number of rows, after the ranks compared sizes and checksums of the first and last rows."""
    flat = [leaf for leaf in leaves(arrays) if leaf is not None]
    if len({len(leaf) for leaf in flat}) != 1:
        raise ValueError(f"the arrays have different numbers of rows: {[len(leaf) for leaf in flat]}")
    rows = [["batch size", batch_size]] + [[f"array {i}", list(a.shape), str(a.dtype), _checksum(a)] for i, a in enumerate(flat)]
    check_same(
        backend.control, f"the data given to {what} (every rank gives the whole data; data that is split already goes through "
        "unidist.wrap_data(..., already_sharded=True, per_replica_batch_size=...) and make_train_step)", rows
    )  # fmt: skip
    return len(flat[0])


def _checksum(array: Any) -> int:
    ends = numpy.concatenate([array[:1].reshape(-1), array[-1:].reshape(-1)])
    return zlib.crc32(repr(ends.tolist()).encode()) if array.dtype.hasobject else zlib.crc32(ends.tobytes())


def _quiet(backend: Backend, verbose: Any) -> Any:
    return verbose if backend.world.rank == 0 else 0


def _fit(
    model: Any, backend: Any, original: Callable[..., Any], x: Any = None, y: Any = None, batch_size: int | None = None, epochs: int = 1,
    verbose: Any = "auto", callbacks: Any = None, validation_split: float = 0.0, validation_data: Any = None, shuffle: bool = True,
    class_weight: Any = None, sample_weight: Any = None, initial_epoch: int = 0, steps_per_epoch: int | None = None,
    validation_steps: int | None = None, validation_batch_size: int | None = None, validation_freq: Any = 1,
) -> Any:  # fmt: skip
    """Keras' fit over the shares of global batches; the history is the same on all ranks."""
    batch = batch_size or DEFAULT_BATCH
    if isinstance(x, keras.utils.PyDataset):
        data: Any = BatchShares(x, backend.world.rank, backend.world.size)
        even = False
    else:
        arrays = _as_arrays("fit", x, y, sample_weight)
        rows = _check_whole(backend, "fit", arrays, batch)
        if validation_split:
            split = math.floor(rows * (1.0 - validation_split))
            validation_data = map_nest(lambda leaf: leaf[split:], arrays)
            arrays, rows = map_nest(lambda leaf: leaf[:split], arrays), split
        plan = _plan(backend, rows, batch, shuffle)
        data, even = Shares(arrays, plan), all(plan.share(step).even for step in range(plan.num_steps or 0))
    if validation_data is not None:
        validation_data, validation_batch_size = _validation(backend, validation_data, validation_batch_size or batch, validation_steps)
    with backend.fit.counting_rows(not even):
        return original(
            data, epochs=epochs, verbose=_quiet(backend, verbose), callbacks=callbacks, validation_data=validation_data, shuffle=False,
            class_weight=class_weight, initial_epoch=initial_epoch, steps_per_epoch=steps_per_epoch,
            validation_batch_size=validation_batch_size, validation_freq=validation_freq,
        )  # fmt: skip


def _plan(backend: Backend, rows: int, batch: int, shuffle: bool) -> GlobalPlan:
    local = backend.local_replicas
    plan = GlobalPlan(rows, batch, backend.num_replicas, backend.world.rank * local, local, shuffle, False, backend.settings.seed or 0)
    smallest = plan.share((plan.num_steps or 1) - 1).total
    if smallest < backend.num_replicas:
        raise UnsupportedError(
            f"fit's last batch has {smallest} of {rows} samples, fewer than the {backend.num_replicas} replicas; choose another batch_size, or "  # noqa: E501
            "use make_train_step, which counts empty shares exactly"
        )
    return plan


def _validation(backend: Backend, data: Any, batch: int, steps: int | None) -> tuple[Any, int]:
    """This rank's part of the validation data, and its batch size."""
    if isinstance(data, keras.utils.PyDataset):
        return BatchShares(data, backend.world.rank, backend.world.size), batch
    arrays = _as_arrays("validation_data", *data)
    part, empty = _own_rows(backend, "validation_data", arrays, batch, steps)
    if empty:
        raise UnsupportedError("the validation data has fewer samples than the job has processes")
    return part, math.ceil(batch / backend.world.size)


def _own_rows(backend: Backend, what: str, arrays: tuple[Any, ...], batch: int, steps: int | None) -> tuple[Any, bool]:
    """(this rank's consecutive rows, False), or (one borrowed row, True) when there are fewer rows than ranks."""
    total = _check_whole(backend, what, arrays, batch)
    if steps is not None:
        total = min(total, steps * batch)
    rows = _part(total, backend.world.rank, backend.world.size)
    empty = rows.start == rows.stop
    rows = slice(0, 1) if empty else rows
    return map_nest(lambda leaf: None if leaf is None else leaf[rows], arrays), empty


def _evaluate(
    model: Any, backend: Any, original: Callable[..., Any], x: Any = None, y: Any = None, batch_size: int | None = None, verbose: Any = "auto",  # noqa: E501
    sample_weight: Any = None, steps: int | None = None, callbacks: Any = None, return_dict: bool = False, **internal: Any,
) -> Any:  # fmt: skip
    """Keras' evaluate over this rank's rows; the result is merged over all ranks."""
    if internal:  # fit's own validation, whose data is split already
        return original(
            x=x, y=y, batch_size=batch_size, verbose=_quiet(backend, verbose), sample_weight=sample_weight, steps=steps, callbacks=callbacks,  # noqa: E501
            return_dict=return_dict, **internal,
        )  # fmt: skip
    if isinstance(x, keras.utils.PyDataset):
        shares = BatchShares(x, backend.world.rank, backend.world.size)
        return original(shares, verbose=_quiet(backend, verbose), steps=steps, callbacks=callbacks, return_dict=return_dict)
    batch = batch_size or DEFAULT_BATCH
    part, empty = _own_rows(backend, "evaluate", _as_arrays("evaluate", x, y, sample_weight), batch, steps)
    x, y, sample_weight = (*part, None, None)[:3]
    backend.fit.drop_metrics = empty
    try:
        return original(
            x, y, batch_size=math.ceil(batch / backend.world.size), verbose=_quiet(backend, verbose), sample_weight=sample_weight,
            callbacks=callbacks, return_dict=return_dict,
        )  # fmt: skip
    finally:
        backend.fit.drop_metrics = False


def _merged(model: Any, backend: Any, original: Callable[..., Any], logs: Any) -> Any:
    """At the end of an epoch or evaluation: every metric's state summed over the ranks, then its result."""
    for metric in model.metrics:
        for variable in metric.variables:
            local = backend._as_tensor(variable)
            total = backend._all_reduce(local * 0 if backend.fit.drop_metrics else local, "sum")
            variable.assign(total)
    return original(logs)


def _predict(
    backend: Backend, original: Callable[..., Any], x: Any, batch_size: int | None = None, verbose: Any = "auto", steps: int | None = None,
    callbacks: Any = None,
) -> Any:  # fmt: skip
    """Keras' predict over this rank's rows; every rank gets all rows, in order."""
    batch = batch_size or DEFAULT_BATCH
    part, empty = _own_rows(backend, "predict", _as_arrays("predict", x), batch, steps)
    mine = original(part[0], batch_size=math.ceil(batch / backend.world.size), verbose=_quiet(backend, verbose), callbacks=callbacks)
    return all_gather(map_nest(lambda leaf: leaf[:0] if empty else leaf, mine))
