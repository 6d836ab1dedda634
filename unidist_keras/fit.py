"""Keras' own fit, evaluate and predict in a job of several processes: each takes the whole data and works on its share.

`divide` puts them on the model instance. Batch sizes are global. What they return is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy

from unidist.collectives import all_gather, all_gather_object
from unidist.data import Data
from unidist.errors import UnsupportedError
from unidist.nest import map_nest
from unidist_keras import datasets
from unidist_keras.callbacks import agreed, quiet
from unidist_keras.merging import merged_logs
from unidist_keras.on_instance import of_class, put

if TYPE_CHECKING:
    from unidist.base import Backend


class FitState:
    """What a running fit tells the exchange in the optimizer's `apply`; one per backend.

    weight: rows of this step when they have to ride along, since shares may be uneven; stepping: inside Keras' train step;
    rows: of the step that ran last, where Python knows it.
    """

    def __init__(self) -> None:
        self.weight: Any = None
        self.stepping = False
        self.rows: float | None = None
        self._counting = True

    @contextlib.contextmanager
    def counting_rows(self, count: bool) -> Iterator[None]:
        """Around a fit: whether its batches may be uneven, as outside one (`train_on_batch`)."""
        self._counting = count
        try:
            yield
        finally:
            self._counting = True

    @contextlib.contextmanager
    def step(self, rows: float) -> Iterator[None]:
        """Around Keras' own train step on so many samples."""
        self.stepping, self.rows, self.weight = True, rows, rows if self._counting else None
        try:
            yield
        finally:
            self.stepping, self.weight = False, None


def divide(model: Any, backend: Backend) -> None:
    """Replace `fit`, `evaluate` and `predict` of this model object; its class and saved form stay Keras'."""
    for name, function in (("fit", _fit), ("evaluate", _evaluate), ("predict", _predict)):
        put(model, name, functools.partial(function, model, backend, of_class(model, name)))
    put_logs(model, backend)


def put_logs(model: Any, backend: Backend) -> None:
    """Logs at the end of epochs from the state of all replicas."""
    name = "_get_metrics_result_or_logs"
    put(model, name, functools.partial(merged_logs, model, backend, of_class(model, name)))


def _verbose(backend: Backend, verbose: Any) -> Any:
    return verbose if backend.world.rank == 0 else 0


def _fit(
    model: Any, backend: Any, original: Callable[..., Any], x: Any = None, y: Any = None, batch_size: int | None = None, epochs: int = 1,
    verbose: Any = "auto", callbacks: Any = None, validation_split: float = 0.0, validation_data: Any = None, shuffle: bool = True,
    class_weight: Any = None, sample_weight: Any = None, initial_epoch: int = 0, steps_per_epoch: int | None = None,
    validation_steps: int | None = None, validation_batch_size: int | None = None, validation_freq: Any = 1,
) -> Any:  # fmt: skip
    """Keras' fit over the shares of global batches; the history is the same on all ranks."""
    read = functools.partial(datasets.read, backend)
    later = validation_batch_size or batch_size
    if validation_split and validation_data is None:
        shares, validation = _split(backend, validation_split, (x, y, sample_weight), batch_size, later, steps_per_epoch, shuffle)
    else:
        shares = read("fit", x, y, sample_weight, batch_size=batch_size, steps=steps_per_epoch, shuffle=shuffle)
        validation = None
    if validation_data is not None:
        given = keras.utils.unpack_x_y_sample_weight(validation_data)
        validation = read("validation_data", *given, batch_size=later, steps=validation_steps)
    set_epoch = shares.set_epoch if steps_per_epoch is None else None
    shares.set_epoch(initial_epoch)
    with backend.fit.counting_rows(not shares.even):
        return original(
            shares.data, epochs=epochs, verbose=_verbose(backend, verbose), callbacks=agreed(callbacks, backend, set_epoch, shares.mark),
            validation_data=None if validation is None else validation.data, shuffle=False, class_weight=class_weight,
            initial_epoch=initial_epoch, steps_per_epoch=steps_per_epoch, validation_steps=validation_steps,
            validation_freq=validation_freq,
        )  # fmt: skip


def _split(
    backend: Backend, part: float, values: tuple[Any, ...], batch: int | None, later: int | None, steps: int | None, shuffle: bool
) -> tuple[datasets.Shares, datasets.Shares]:
    """The first rows to train on, the last ones for validation."""
    if not datasets.is_arrays(values[0]):
        raise UnsupportedError(f"validation_split takes arrays, not a {type(values[0]).__name__}; give validation_data")
    arrays = datasets.as_arrays("fit", *values)
    rows = datasets.check_whole(backend, "fit", arrays, batch)
    first = math.floor(rows * (1.0 - part))
    if not 0 < first < rows:
        raise ValueError(f"validation_split={part!r} leaves nothing of the {rows} rows to train on, or nothing to validate with")
    head, tail = (map_nest(lambda leaf: None if leaf is None else leaf[chosen], arrays) for chosen in (slice(first), slice(first, rows)))
    return datasets.cut(backend, head, first, batch, steps, shuffle), datasets.cut(backend, tail, rows - first, later, None, False)


def _evaluate(
    model: Any, backend: Any, original: Callable[..., Any], x: Any = None, y: Any = None, batch_size: int | None = None,
    verbose: Any = "auto", sample_weight: Any = None, steps: int | None = None, callbacks: Any = None, return_dict: bool = False,
    **internal: Any,
) -> Any:  # fmt: skip
    """Keras' evaluate over this rank's shares of global batches; the result is merged over all ranks."""
    verbose = _verbose(backend, verbose)
    backend._end_of_pass()
    if internal:  # fit's own validation, whose data is split already
        return original(
            x=x, y=y, batch_size=batch_size, verbose=verbose, sample_weight=sample_weight, steps=steps, callbacks=callbacks,
            return_dict=return_dict, **internal,
        )  # fmt: skip
    shares = datasets.read(backend, "evaluate", x, y, sample_weight, batch_size=batch_size, steps=steps)
    return original(shares.data, verbose=verbose, steps=steps, callbacks=quiet(callbacks, backend), return_dict=return_dict)


class _Rows(keras.callbacks.Callback):  # type: ignore[misc]
    """How many rows each batch of predict gave here."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        first = keras.tree.flatten(logs)[0]
        self.sizes.append(int(first.shape[0]) if numpy.ndim(first) else 1)  # Keras makes a number of a single one


def _predict(
    model: Any, backend: Backend, original: Callable[..., Any], x: Any, batch_size: int | None = None, verbose: Any = "auto",
    steps: int | None = None, callbacks: Any = None,
) -> Any:  # fmt: skip
    """Keras' predict over this rank's shares of global batches; every rank gets all rows, in order."""
    if isinstance(x, Data):
        raise UnsupportedError("predict takes the whole data; for what wrap_data returned use unidist.predict(model, data)")
    backend._end_of_pass()
    shares = datasets.read(backend, "predict", x, batch_size=batch_size, steps=steps)
    sizes, rows = shares.sizes(steps), _Rows()
    given = keras.tree.flatten(quiet(callbacks, backend) or []) + ([] if sizes else [rows])
    mine = original(shares.data, verbose=_verbose(backend, verbose), steps=steps, callbacks=given)
    order = _in_order(sizes or list(zip(*all_gather_object(rows.sizes))))
    return map_nest(lambda leaf: leaf[order], all_gather(mine))


def _in_order(sizes: Sequence[Sequence[int]]) -> Any:
    """Positions of the rows, batch by batch, in the ranks' outputs joined by rank; sizes: of each batch, the rows of each rank."""
    by_rank = numpy.array(sizes).T
    flat = by_rank.reshape(-1)
    begins = (numpy.cumsum(flat) - flat).reshape(by_rank.shape)
    return numpy.concatenate([numpy.arange(b, b + n) for b, n in zip(begins.T.reshape(-1), by_rank.T.reshape(-1))])


def take(model: Any, backend: Backend) -> None:
    """For a model of one process: its `fit` and `evaluate` also take what `wrap_data` returns, and no data is written into.

    A PyDataset often gives views of arrays. MirroredStrategy hands their memory to replicas that may write into it (`y - outputs`).
    """
    for name in ("fit", "evaluate", "predict"):
        put(model, name, functools.partial(_taking, backend, of_class(model, name), name != "predict"))


def _taking(backend: Any, original: Callable[..., Any], wrapped: bool, x: Any = None, *args: Any, **kwargs: Any) -> Any:
    for_keras = functools.partial(_for_keras, backend, wrapped)
    if "validation_data" in kwargs:
        kwargs["validation_data"] = for_keras(kwargs["validation_data"])
    return original(for_keras(x), *args, **kwargs)


def _for_keras(backend: Any, wrapped: bool, data: Any) -> Any:
    if isinstance(data, Data):
        if not wrapped:
            raise UnsupportedError("predict takes the whole data; for what wrap_data returned use unidist.predict(model, data)")
        return backend._fit_data(data).data
    if isinstance(data, keras.utils.PyDataset) and backend.local_replicas > 1:
        return datasets.BatchShares(data, 0, 1)
    return data
