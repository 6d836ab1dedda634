"""torch's own data for Keras' fit over several processes: loaders are cut by a plan, so that a process reads its own rows only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from unidist.data import Data, make_plan
from unidist_keras.datasets import SPLIT_ALREADY, Passes, Shares, of_data

if TYPE_CHECKING:
    from unidist_torch.base import TorchBackend


class _Stream(IterableDataset[Any]):
    """Batches of this process, for a loader that passes them on."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    def __iter__(self) -> Iterator[Any]:
        return iter(self._passes)


class _SizedStream(_Stream):
    """Likewise, of known length."""

    def __init__(self, passes: Passes, length: int) -> None:
        super().__init__(passes)
        self._length = length

    def __len__(self) -> int:
        return self._length


def fit_data(backend: TorchBackend, data: Any) -> Shares | None:
    """Shares of a DataLoader, whose batches are the global ones, or of what `wrap_data` gave; None for anything else.

    Raises ValueError for a loader that is split by rank already, UnsupportedError for one that can't be cut anew.
    """
    if isinstance(data, DataLoader):
        data = _cut(backend, data)
    if not isinstance(data, Data):
        return None
    steps = data.plan.num_steps
    stream = _Stream(Passes(data)) if steps is None else _SizedStream(Passes(data), steps)
    return of_data(data, DataLoader(stream, batch_size=None))


def _cut(backend: TorchBackend, loader: DataLoader[Any]) -> Data:
    source = backend._source(loader, shuffle=False, options={})
    if source.split:
        raise ValueError(f"this DataLoader is split by {source.split} already; give one of the whole data; {SPLIT_ALREADY}")
    plan = make_plan(
        backend, source, loader.batch_size or 1, already_sharded=False, drop_last=loader.drop_last, shuffle=bool(source.shuffle),
        seed=backend.settings.seed or 0,
    )  # fmt: skip
    return Data(backend, plan, source.build(plan))
