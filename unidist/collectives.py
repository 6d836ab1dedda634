"""Collectives over all ranks: a new value of the type, dtype and device given; shapes and dtypes are compared first."""

from __future__ import annotations

import json
import pickle
from typing import Any

from unidist.agreement import first_difference
from unidist.base import Backend
from unidist.context import current_backend
from unidist.errors import MismatchError
from unidist.nest import map_nest, paths

_OPS = ("mean", "sum", "max", "min", "product")


def all_reduce(x: Any, op: str = "mean", *, grad: bool = False) -> Any:
    """`x` reduced over all ranks, each of which must call it; a new value of the same type, dtype and device everywhere.

    x: a tensor, array or number of any shape, or a nest of them (dict, list, tuple). op: "mean", "sum", "max", "min" or
    "product". grad: let gradients flow through, as on one device; otherwise the result is detached.
    Raises TypeError for the mean of integers or booleans (cast, or sum), MismatchError on all ranks when shapes or dtypes
    differ, CollectiveTimeoutError when a rank does not come.
    """
    backend = current_backend()
    if op not in _OPS:
        raise ValueError(f"op is one of {', '.join(_OPS)}, not {op!r}")
    if grad:
        if op not in ("mean", "sum"):
            raise ValueError(f"gradients flow through 'mean' and 'sum', not through {op!r}")
        return map_nest(lambda leaf: backend._grad_collective("all_reduce", leaf, op=op), x)
    tensors = _tensors(backend, x)
    _check(backend, f"all_reduce({op})", x, tensors)
    for tensor in tensors:
        _check_op(op, backend._signature(tensor)[1])
    reduce = _copy if backend.world.size == 1 else (lambda t: backend._all_reduce(t, op))
    return _rebuild(backend, x, [reduce(tensor) for tensor in tensors])


def all_gather(x: Any, *, grad: bool = False) -> Any:
    """The ranks' values joined along the first axis, in rank order; every rank must call it.

    x: a tensor, array or number, or a nest of them; a number or 0-d tensor becomes one row. First dimensions may
    differ between ranks (also 0), the others and dtypes may not: MismatchError on all ranks. grad: let gradients flow through.
    """
    backend = current_backend()
    if grad:
        return map_nest(lambda leaf: backend._grad_collective("all_gather", leaf), x)
    tensors = [backend._as_rows(tensor) for tensor in _tensors(backend, x)]
    rows = _check(backend, "all_gather", x, tensors, first_free=True, always=True)
    first = [[row[position][1][0] for row in rows] for position in range(len(tensors))]
    gather = (lambda t, dims: _copy(t)) if backend.world.size == 1 else backend._all_gather
    return _rebuild(backend, x, [gather(t, dims) for t, dims in zip(tensors, first)], rows=True)


def broadcast(obj: Any, root: int = 0) -> Any:
    """Rank `root`'s value on all ranks, each of which must call it.

    A model or optimizer (scheduler, scaler) is set in place and returned: weights, buffers, state, hyper-parameters. A
    tensor, array, number or a nest of them gives a new value; for any other object use `broadcast_object`.
    Raises MismatchError on all ranks when names, shapes or dtypes differ.
    """
    backend = current_backend()
    _check_root(backend, root)
    if backend._has_state(obj):
        backend._same_start(obj, root)
        return obj
    tensors = _tensors(backend, obj)
    _check(backend, "broadcast", obj, tensors)
    move = _copy if backend.world.size == 1 else (lambda t: backend._broadcast(t, root))
    return _rebuild(backend, obj, [move(tensor) for tensor in tensors])


def barrier() -> None:
    """Wait until all ranks are here. Raises CollectiveTimeoutError naming the ranks that are missing."""
    current_backend().control.gather("barrier", "")


def broadcast_object(obj: Any = None, root: int = 0) -> Any:
    """Rank `root`'s object, of any size, on all ranks; the others may pass None. It travels as a pickle.

    An object that can't be pickled raises on all ranks: TypeError.
    """
    backend = current_backend()
    _check_root(backend, root)
    mine = backend.world.rank == root
    data, problem = _pickled(obj) if mine else (b"", "")
    sizes = [json.loads(row) for row in backend.control.gather("broadcast_object", json.dumps([len(data), problem]))]
    if sizes[root][1]:
        raise TypeError(f"rank {root}'s object can't be pickled: {sizes[root][1]}")
    if backend.world.size == 1:
        return pickle.loads(data)
    moved = backend._broadcast(backend._as_tensor(_bytes(data, sizes[root][0])), root)
    return pickle.loads(_array(backend, moved).tobytes())


def all_gather_object(obj: Any) -> list[Any]:
    """Every rank's object, in rank order, on all ranks; they travel as pickles.

    One that can't be pickled raises on all ranks: TypeError.
    """
    backend = current_backend()
    data, problem = _pickled(obj)
    rows = [json.loads(row) for row in backend.control.gather("all_gather_object", json.dumps([len(data), problem]))]
    for rank, (_, text) in enumerate(rows):
        if text:
            raise TypeError(f"rank {rank}'s object can't be pickled: {text}")
    if backend.world.size == 1:
        return [pickle.loads(data)]
    sizes = [row[0] for row in rows]
    joined = _array(backend, backend._all_gather(backend._as_tensor(_bytes(data, len(data))), sizes)).tobytes()
    begins = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return [pickle.loads(joined[begin : begin + size]) for begin, size in zip(begins, sizes)]


def _tensors(backend: Backend, x: Any) -> list[Any]:
    return [backend._as_tensor(leaf) for _, leaf in paths(x)]


def _rebuild(backend: Backend, x: Any, tensors: list[Any], *, rows: bool = False) -> Any:
    found = iter(tensors)
    if rows:  # a number's rows are an array, not a number
        return map_nest(lambda leaf: backend._as_leaf(next(found), _rows_like(leaf)), x)
    return map_nest(lambda leaf: backend._as_leaf(next(found), leaf), x)


def _rows_like(leaf: Any) -> Any:
    import numpy

    return numpy.empty(0) if isinstance(leaf, (bool, int, float, complex, numpy.generic)) else leaf


def _copy(tensor: Any) -> Any:
    return tensor


def _check(
    backend: Backend, name: str, x: Any, tensors: list[Any], *, first_free: bool = False, always: bool = False
) -> list[list[list[Any]]]:
    """Every rank's (place, shape, dtype) list; raises MismatchError on all ranks where they don't fit together."""
    mine = [[place or "the value", *backend._signature(tensor)] for (place, _), tensor in zip(paths(x), tensors)]
    if not always and (not backend.settings.check or backend.world.size == 1):
        return [mine]
    rows = [json.loads(row) for row in backend.control.gather(name, json.dumps(mine))]
    compared = [[[p, ["any", *s[1:]] if first_free else s, d] for p, s, d in row] for row in rows]
    if any(row != compared[0] for row in compared):
        raise MismatchError(f"{name} got values that don't fit together: {first_difference(compared)}")
    return rows


def _check_op(op: str, dtype: str) -> None:
    if op == "mean" and not ("float" in dtype or "complex" in dtype):
        raise TypeError(f"the mean of {dtype} values is not of that type: cast to a float type first, or use op='sum'")
    if dtype == "bool" and op in ("sum", "product"):
        raise TypeError(f"the {op} of bool values is not a bool: cast first, or use op='max' (any) or 'min' (all)")


def _check_root(backend: Backend, root: int) -> None:
    if not 0 <= root < backend.world.size:
        raise ValueError(f"root is a rank from 0 to {backend.world.size - 1}, not {root!r}")


def _pickled(obj: Any) -> tuple[bytes, str]:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), ""
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        return b"", f"{type(error).__name__}: {error}"


def _bytes(data: bytes, size: int) -> Any:
    import numpy

    return numpy.frombuffer(data, dtype=numpy.uint8).copy() if data else numpy.zeros(size, numpy.uint8)


def _array(backend: Backend, tensor: Any) -> Any:
    import numpy

    return backend._as_leaf(tensor, numpy.empty(0, numpy.uint8))
