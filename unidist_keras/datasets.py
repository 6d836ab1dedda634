"""The data of Keras' fit, evaluate and predict in a job of several processes: each process's rows of every global batch.

Arrays and PyDatasets are cut here, in the same way for both frameworks; a framework's own data sets by its package.
A process that has no row of a batch gets one of 0 rows, so that all take the same number of steps.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy

from unidist.agreement import check_same
from unidist.batch import Share, split_sizes
from unidist.data import Data, GlobalPlan
from unidist.errors import UnsupportedError
from unidist.nest import leaves, map_nest

if TYPE_CHECKING:
    from unidist.base import Backend

DEFAULT_BATCH = 32
SPLIT_ALREADY = "data that is split already goes through unidist.wrap_data(..., already_sharded=True, per_replica_batch_size=...)"


@dataclass(frozen=True)
class Shares:
    """What Keras is given in place of the user's data. even: all ranks have equally many rows of every batch."""

    data: Any
    even: bool = False

    def set_epoch(self, epoch: int) -> None:
        """The order of an epoch, where the data has one of its own."""
        if isinstance(self.data, ArrayShares):
            self.data.set_epoch(epoch)

    def sizes(self, steps: int | None) -> list[tuple[int, ...]] | None:
        """Rows of every rank in each batch, where they are known beforehand."""
        if not isinstance(self.data, ArrayShares):
            return None
        return self.data.sizes()[:steps]

    def mark(self) -> Any:
        """(passes, checksum) of the first batch of the pass, where every rank makes whole batches."""
        return self.data.mark if isinstance(self.data, BatchShares) else None


class ArrayShares(keras.utils.PyDataset):  # type: ignore[misc]
    """This process's rows of every global batch of arrays, in an order that is the same on all ranks."""

    def __init__(self, arrays: tuple[Any, ...], plan: GlobalPlan) -> None:
        super().__init__()
        self._arrays = arrays
        self._plan = plan
        self.set_epoch(0)

    @property
    def num_batches(self) -> int:
        """Batches of a pass."""
        return self._plan.num_steps or 0

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, step: int) -> Any:
        if step == 0 and self._passed:
            self.set_epoch(self._epoch + 1)
        self._passed = step > 0 and step == self.num_batches - 1
        mine = self._plan.positions(step)
        rows = self._order[mine.start : mine.stop] if self._plan.shuffle else slice(mine.start, mine.stop)
        return map_nest(lambda leaf: None if leaf is None else _own_memory(leaf[rows]), self._arrays)

    def sizes(self) -> list[tuple[int, ...]]:
        """Rows of every rank in each batch."""
        local, found = self._plan.local, [self._plan.share(step).sizes for step in range(self.num_batches)]
        return [tuple(sum(sizes[i : i + local]) for i in range(0, len(sizes), local)) for sizes in found]

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass in this epoch's order; another pass before the next call is in the order that follows."""
        self._epoch = epoch
        self._order = self._plan.order(epoch) if self._plan.shuffle else None
        self._passed = False


class BatchShares(keras.utils.PyDataset):  # type: ignore[misc]
    """This process's rows of the global batches that a user's PyDataset makes."""

    def __init__(self, dataset: Any, rank: int, size: int) -> None:
        super().__init__(workers=dataset.workers, use_multiprocessing=dataset.use_multiprocessing, max_queue_size=dataset.max_queue_size)
        self._dataset = dataset
        self._rank, self._size = rank, size
        self.mark = [0, 0]

    @property
    def num_batches(self) -> Any:
        """Batches of a pass."""
        return self._dataset.num_batches

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, step: int) -> Any:
        batch = map_nest(lambda leaf: None if leaf is None else _to_numpy(leaf), self._dataset[step])
        if step == 0:
            self.mark = [self.mark[0] + 1, _checksum(told_by(batch))]
        rows = part(len(first_leaf(batch)), self._rank, self._size)
        return map_nest(lambda leaf: None if leaf is None else _own_memory(leaf[rows]), batch)

    def on_epoch_begin(self) -> None:
        """The user's own."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """The user's own."""
        self._dataset.on_epoch_end()


def _own_memory(rows: Any) -> Any:
    """Not a view of the user's array: TensorFlow takes aligned memory as it is, and was seen to write `y - outputs` into it."""
    return rows if rows.base is None else rows.copy()


class Passes:
    """Passes over what `wrap_data` gave. One that was left after its first batch (Keras looks at its shapes) is gone on with."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._open: tuple[Iterator[tuple[Share, Any]], tuple[Share, Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        pairs, first = self._open or (self._data._epoch_pairs(), None)
        self._open = None
        first = next(pairs, None) if first is None else first
        if first is None:
            return
        self._open = (pairs, first)
        yield _own(*first)
        self._open = None
        for share, batch in pairs:
            yield _own(share, batch)


def _own(share: Share, batch: Any) -> Any:
    """The rows that count: none of a borrowed one."""
    return batch if share.size else map_nest(lambda leaf: leaf[:0], batch)


def of_data(data: Data, source: Any) -> Shares:
    """What `wrap_data` gave, through `source`, the form in which Keras takes it."""
    steps = data.plan.num_steps
    return Shares(source, steps is not None and all(data.plan.share(step).even for step in range(steps)))


def read(
    backend: Backend, what: str, x: Any, y: Any = None, sample_weight: Any = None, *, batch_size: int | None = None,
    steps: int | None = None, shuffle: bool = False,
) -> Shares:  # fmt: skip
    """The user's data as this process's shares of it; every rank must call it with the whole data, or with `wrap_data`'s.

    Raises UnsupportedError for what can't be split, MismatchError on all ranks for data that differs between them.
    """
    if not is_arrays(x):
        if y is not None or sample_weight is not None:
            raise ValueError(f"{what} got targets or sample weights beside a {type(x).__name__}, which must hold them itself")
        return _read_batches(backend, what, x)
    arrays = as_arrays(what, x, y, sample_weight)
    return cut(backend, arrays, check_whole(backend, what, arrays, batch_size), batch_size, steps, shuffle)


def _read_batches(backend: Backend, what: str, data: Any) -> Shares:
    if isinstance(data, keras.utils.PyDataset):
        check_same(backend.control, f"the PyDataset given to {what} ({SPLIT_ALREADY})", [["number of batches", data.num_batches]])
        return Shares(BatchShares(data, backend.world.rank, backend.world.size))
    if not isinstance(data, Data) and hasattr(data, "__next__"):
        raise UnsupportedError(
            f"{what} can't split a {type(data).__name__} over several processes, since nobody knows what the other ranks' would yield; "
            f"give arrays, a keras.utils.PyDataset or the framework's own data set; {SPLIT_ALREADY}"
        )
    found = backend._fit_data(data)
    if found is None:
        raise UnsupportedError(
            f"{what} takes arrays, a keras.utils.PyDataset, what unidist.wrap_data returns, or {backend.framework}'s own batched data in a "
            f"job of several processes, not a {type(data).__name__}; every rank gives the whole data, and unidist takes its share"
        )
    return found  # type: ignore[no-any-return]


def cut(backend: Backend, arrays: tuple[Any, ...], rows: int, batch_size: int | None, steps: int | None, shuffle: bool) -> Shares:
    """Arrays in global batches; without a size Keras' own: as many as make `steps` of the rows, else 32."""
    batch = batch_size or (math.ceil(rows / steps) if steps else DEFAULT_BATCH)
    local = backend.local_replicas
    plan = GlobalPlan(rows, batch, backend.num_replicas, backend.world.rank * local, local, shuffle, False, backend.settings.seed or 0)
    return Shares(ArrayShares(arrays, plan), all(plan.share(step).even for step in range(plan.num_steps or 0)))


def is_arrays(x: Any) -> bool:
    """Whether it is an array or a nest of them."""
    return all(leaf is None or hasattr(leaf, "__array__") for leaf in leaves(x)) and not isinstance(x, keras.utils.PyDataset)


def as_arrays(what: str, *values: Any) -> tuple[Any, ...]:
    """Nests of NumPy arrays; None at the end is left out."""
    while values and values[-1] is None:
        values = values[:-1]
    for leaf in leaves(values):
        if leaf is not None and not hasattr(leaf, "__array__"):
            raise UnsupportedError(f"{what} takes arrays in a job of several processes, not a {type(leaf).__name__}")
    given = (tuple(value) if isinstance(value, list) else value for value in values)  # tf.data would stack the parts of a list
    return tuple(map_nest(lambda leaf: None if leaf is None else _to_numpy(leaf), value) for value in given)


def _to_numpy(leaf: Any) -> Any:
    return leaf if isinstance(leaf, numpy.ndarray) else keras.ops.convert_to_numpy(leaf)


def check_whole(backend: Backend, what: str, arrays: tuple[Any, ...], batch_size: int | None) -> int:
    """The number of rows, after the ranks compared sizes and checksums of the first and last rows."""
    flat = [leaf for leaf in leaves(arrays) if leaf is not None]
    if len({len(leaf) for leaf in flat}) != 1:
        raise ValueError(f"the arrays have different numbers of rows: {[len(leaf) for leaf in flat]}")
    rows = [["batch size", batch_size]] + [[f"array {i}", list(a.shape), str(a.dtype), _checksum([a])] for i, a in enumerate(flat)]
    check_same(
        backend.control,
        f"the data given to {what} (every rank gives the whole data; {SPLIT_ALREADY}; that can be given to fit)",
        rows,
    )
    return len(flat[0])


def told_by(batch: Any) -> list[Any]:
    """The arrays of a batch by which ranks compare it: its targets, which augmentation leaves alone; inputs where there are none."""
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    return [numpy.asarray(leaf) for leaf in leaves(parts[0] if parts[1] is None else parts[1]) if leaf is not None]


def _checksum(arrays: list[Any]) -> int:
    total = 0
    for array in arrays:
        ends = numpy.concatenate([array[:1].reshape(-1), array[-1:].reshape(-1)])
        total = zlib.crc32(repr(ends.tolist()).encode() if array.dtype.hasobject else ends.tobytes(), total)
    return total


def part(total: int, rank: int, size: int) -> slice:
    """This rank's consecutive rows of a batch."""
    sizes = split_sizes(total, size)
    begin = sum(sizes[:rank])
    return slice(begin, begin + sizes[rank])


def first_leaf(batch: Any) -> Any:
    """The first array of a batch."""
    return next(leaf for leaf in leaves(batch) if leaf is not None)
