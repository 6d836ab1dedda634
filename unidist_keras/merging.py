"""What history and callbacks get at the end of an epoch: metrics from the merged state of all ranks, other logs as their means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy

from unidist.collectives import all_reduce

if TYPE_CHECKING:
    from unidist.base import Backend


def merged_logs(model: Any, backend: Backend, original: Callable[..., Any], logs: Any) -> Any:
    """The logs of an epoch or evaluation, the same on every rank; each of them must call it.

    Metrics come from their merged state. A train step of the user's own may return more: those are means over the ranks, by rows.
    """
    if backend.world.size > 1:
        backend._end_of_pass()
        merge_states(model.metrics, backend.world.rank, backend.world.size)
    if not isinstance(logs, Mapping):
        return original(logs)
    results = model.get_metrics_result()
    if set(logs) == set(results):
        return results
    updated = {metric.name for metric in model.metrics if any(numpy.any(_values(v)) for v in metric.variables)}
    own = {name: value for name, value in logs.items() if name not in results or (name in _names(model) and name not in updated)}
    return {**{name: results.get(name) for name in logs if name not in own}, **_means(own, backend)}


def _names(model: Any) -> set[str]:
    return {metric.name for metric in model.metrics}


def merge_states(metrics: list[Any], rank: int, size: int) -> None:
    """Every metric's variables over all ranks, in one exchange: sums, or what else a variable says of its aggregation."""
    variables = [variable for metric in metrics for variable in metric.variables]
    if not variables:
        return
    parts = [_values(v).astype(numpy.float64) * _share(v, rank, size) for v in variables]
    flat = numpy.concatenate([part.reshape(-1) for part in parts])
    total = all_reduce(flat, "sum")
    for variable, part in zip(variables, numpy.split(total, numpy.cumsum([part.size for part in parts])[:-1])):
        variable.assign(part.reshape(variable.shape).astype(keras.backend.standardize_dtype(variable.dtype)))


def _share(variable: Any, rank: int, size: int) -> float:
    how = getattr(variable, "aggregation", "sum")
    if how == "mean":
        return 1.0 / size
    return float(rank == 0) if how == "only_first_replica" else 1.0


def _values(variable: Any) -> Any:
    return keras.ops.convert_to_numpy(variable)


def _means(logs: dict[str, Any], backend: Backend) -> dict[str, Any]:
    """Numbers as the mean over ranks, by the rows of the last batch where those are known; the rest as it is."""
    rows = backend.fit.rows
    names = [name for name, value in logs.items() if numpy.ndim(_number(value)) == 0 and numpy.isreal(_number(value))]
    if backend.world.size == 1 or not names or rows is None:
        return logs
    values = numpy.array([float(_number(logs[name])) for name in names])
    sums = all_reduce(numpy.append(values * rows if rows else values * 0.0, rows), "sum")
    return {**logs, **dict(zip(names, (sums[:-1] / sums[-1]).tolist()))}


def _number(value: Any) -> Any:
    return keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else numpy.asarray(value)
