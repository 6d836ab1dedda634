"""Collects the outputs of all shares of a pass and puts them in the order of the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unidist.nest import leaves, map_nest

if TYPE_CHECKING:
    from unidist.base import Backend
    from unidist.data import Data


def collect(backend: Backend, model: Any, data: Data, root: int | None) -> Any:
    """Outputs of every sample as NumPy arrays, on all ranks or on `root`; one exchange for the whole pass."""
    import numpy

    from unidist.collectives import all_gather

    backend._end_of_pass()
    parts, shares = [], []
    for batch in data:
        share = backend.shares.take()
        shares.append(share)
        parts.append(backend._predict_batch(model, batch, share))
    if not parts:
        raise ValueError("there is nothing to predict: the data holds no batch")
    mine = map_nest(lambda *rows: numpy.concatenate(rows), parts[0], *parts[1:])
    joined = all_gather(mine)
    if root is not None and backend.world.rank != root:
        return None
    order = _order(backend, shares)
    return map_nest(lambda rows: rows[order], joined) if leaves(joined) else joined


def _order(backend: Backend, shares: list[Any]) -> Any:
    """Row numbers in the joined outputs (rank after rank, step after step) in the order step after step, rank after rank."""
    import numpy

    local, size = backend.local_replicas, backend.world.size
    counts = numpy.array([[sum(s.sizes[r * local : (r + 1) * local]) for s in shares] for r in range(size)])
    begins = (numpy.cumsum(counts.reshape(-1)) - counts.reshape(-1)).reshape(counts.shape)
    pieces = [numpy.arange(begins[r, s], begins[r, s] + counts[r, s]) for s in range(len(shares)) for r in range(size)]
    return numpy.concatenate(pieces)
