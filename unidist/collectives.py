"""Collectives over the ranks: a new value of the type, dtype and device given; shapes and dtypes are compared first."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from unidist.base import Backend
from unidist.batch import split_sizes
from unidist.call import Call, Leaf
from unidist.errors import UnsupportedError
from unidist.groups import Group
from unidist.nest import map_nest

_OPS = ("mean", "sum", "max", "min", "product")


def all_reduce(x: Any, op: str = "mean", *, group: Group | str | None = None, grad: bool = False) -> Any:
    """`x` reduced over all ranks, each of which must call it; a new value of the same type, dtype and device everywhere.

    x: a tensor, array or number of any shape, or a nest of them (dict, list, tuple). op: "mean", "sum", "max", "min" or
    "product"; half and 8-bit floats are added and multiplied in float32 and rounded once, integers wrap around like NumPy's.
    group: only these ranks take part and call it. grad: let gradients flow through, as on one device; otherwise the result is detached.
    Raises TypeError for the mean of integers or booleans (cast, or sum), MismatchError on all ranks when shapes or dtypes
    differ, CollectiveTimeoutError when a rank does not come.
    """
    call = Call(f"all_reduce({_known(op)})", group)
    if grad:
        return _with_gradients(call, "all_reduce", x, op=_differentiable(op))
    leaves, _ = call.agree(lambda: call.leaves(x))
    for leaf in leaves:
        _check_op(op, leaf.dtype)
    if call.size == 1:
        return call.rebuild(x, [leaf.tensor for leaf in leaves])
    return call.rebuild(x, [call.backend._all_reduce(leaf.tensor, op, **call.options) for leaf in leaves])


def reduce_scatter(x: Any, op: str = "mean", *, group: Group | str | None = None, grad: bool = False) -> Any:
    """This rank's piece of what `all_reduce(x, op)` gives; every rank must call it.

    x: a tensor or array (n, ...), or a nest of them. The pieces are consecutive along the first axis; of n rows over r ranks the
    first n % r ranks get one row more than the others, who may get none: any n works, and `all_gather` joins the pieces
    again. op, group, grad and errors as for `all_reduce`; TypeError for what has no first axis.
    """
    call = Call(f"reduce_scatter({_known(op)})", group)
    if grad:
        return _with_gradients(call, "reduce_scatter", x, op=_differentiable(op))
    leaves, _ = call.agree(lambda: call.leaves(x, lambda leaf: _check_rows(leaf, "reduce_scatter")))
    for leaf in leaves:
        _check_op(op, leaf.dtype)
    if call.size == 1:
        return call.rebuild(x, [leaf.tensor for leaf in leaves])
    sizes = [split_sizes(leaf.shape[0], call.size) for leaf in leaves]
    return call.rebuild(x, [call.backend._reduce_scatter(leaf.tensor, op, s, **call.options) for leaf, s in zip(leaves, sizes)])


def all_gather(x: Any, *, group: Group | str | None = None, grad: bool = False) -> Any:
    """The ranks' values joined along the first axis, in rank order; every rank must call it.

    x: a tensor, array or number, or a nest of them; a number or 0-d tensor becomes one row. First dimensions may
    differ between ranks (also 0), the others and dtypes may not: MismatchError on all ranks. group: only these ranks take part
    and call it. grad: let gradients flow through; the row that an empty share borrowed is left out with `outputs[:data.share.size]`.
    """
    call = Call("all_gather", group)
    if grad:
        return _with_gradients(call, "all_gather", x)
    leaves, rows = call.agree(lambda: call.leaves(x, rows=True), first_free=True, always=True)
    if call.size == 1:
        return call.rebuild(x, [leaf.tensor for leaf in leaves], rows=True)
    first_dims = [[row[number][1][0] for row in rows] for number in range(len(leaves))]
    joined = [call.backend._all_gather(leaf.tensor, dims, **call.options) for leaf, dims in zip(leaves, first_dims)]
    return call.rebuild(x, joined, rows=True)


def all_to_all(x: Any, *, sizes: Sequence[int] | None = None, group: Group | str | None = None, grad: bool = False) -> Any:
    """The pieces that all ranks have for this one, joined along the first axis in rank order; every rank must call it.

    x: a tensor or array (n, ...), or a nest of them. It is cut along its first axis into one consecutive piece per rank, of
    `sizes` rows (may be 0, may differ between ranks, n in all) or, without, of n over the ranks
    with one row more for each of the first n % ranks. The r-th rank gets everyone's r-th piece. n may differ between ranks; the other
    dimensions and dtypes may not: MismatchError on all ranks. ValueError for sizes that don't fit, TypeError for what has no
    first axis; the other ranks then raise MismatchError. group: only these ranks take part and call it. grad: let gradients flow through.
    """
    call = Call("all_to_all", group)

    def cut(leaf: Leaf) -> None:
        leaf.sizes = piece_sizes(leaf.shape, sizes, call.size)

    if grad:
        return _with_gradients(call, "all_to_all", x, sizes=sizes)
    leaves, rows = call.agree(lambda: call.leaves(x, cut), first_free=True, always=True)
    if call.size == 1:
        return call.rebuild(x, [leaf.tensor for leaf in leaves])
    tables = [[row[number][3] for row in rows] for number in range(len(leaves))]
    return call.rebuild(x, [call.backend._all_to_all(leaf.tensor, table, **call.options) for leaf, table in zip(leaves, tables)])


def broadcast(obj: Any, root: int = 0, *, group: Group | str | None = None) -> Any:
    """Rank `root`'s value on all ranks, each of which must call it.

    A model or optimizer (scheduler, scaler) is set in place and returned: weights, buffers, state, hyper-parameters. A
    tensor, array, number or a nest of them gives a new value; for any other object use `broadcast_object`. group: only these
    ranks take part and call it, `root` (a rank of the job) among them; not for models and optimizers, whose replicas stay equal.
    Raises MismatchError on all ranks when names, shapes or dtypes differ.
    """
    call = Call("broadcast", group)
    _check_root(call, root)
    if call.backend._has_state(obj):
        if call.size < call.backend.world.size:
            raise UnsupportedError(
                "models, optimizers and their like are broadcast to all ranks, so that replicas stay equal: leave group out"
            )
        call.backend._same_start(obj, root)
        return obj
    leaves, _ = call.agree(lambda: call.leaves(obj))
    if call.size == 1:
        return call.rebuild(obj, [leaf.tensor for leaf in leaves])
    return call.rebuild(obj, [call.backend._broadcast(leaf.tensor, root, **call.options) for leaf in leaves])


def barrier(*, group: Group | str | None = None) -> None:
    """Wait until all ranks (of `group`) are here. Raises CollectiveTimeoutError naming the ranks that are missing."""
    Call("barrier", group).gather("")


def broadcast_object(obj: Any = None, root: int = 0, *, group: Group | str | None = None) -> Any:
    """Rank `root`'s object, of any size, on all ranks (of `group`); the others may pass None. It travels as a pickle.

    An object that can't be pickled raises on all ranks: TypeError.
    """
    call = Call("broadcast_object", group)
    _check_root(call, root)
    data, problem = _pickled(obj) if call.backend.world.rank == root else (b"", "")
    size, problem = call.gather([len(data), problem])[call.ranks.index(root)]
    if problem:
        raise TypeError(f"rank {root}'s object can't be pickled: {problem}")
    if call.size == 1:
        return pickle.loads(data)
    moved = call.backend._broadcast(call.backend._as_tensor(_bytes(data, size)), root, **call.options)
    return pickle.loads(_array(call.backend, moved).tobytes())


def all_gather_object(obj: Any, *, group: Group | str | None = None) -> list[Any]:
    """Every rank's object, in rank order, on all ranks (of `group`); they travel as pickles.

    One that can't be pickled raises on all ranks: TypeError.
    """
    call = Call("all_gather_object", group)
    data, problem = _pickled(obj)
    rows = call.gather([len(data), problem])
    for rank, (_, text) in zip(call.ranks, rows):
        if text:
            raise TypeError(f"rank {rank}'s object can't be pickled: {text}")
    if call.size == 1:
        return [pickle.loads(data)]
    sizes = [row[0] for row in rows]
    joined = call.backend._all_gather(call.backend._as_tensor(_bytes(data, len(data))), sizes, **call.options)
    text = memoryview(_array(call.backend, joined))
    begins = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return [pickle.loads(text[begin : begin + size]) for begin, size in zip(begins, sizes)]


def piece_sizes(shape: Sequence[int], sizes: Sequence[int] | None, parts: int) -> list[int]:
    """How many rows of (n, ...) `all_to_all` sends to each of so many ranks. Raises TypeError, ValueError."""
    if not shape:
        raise TypeError("all_to_all cuts the first axis, and a number or 0-d tensor has none")
    if sizes is None:
        return list(split_sizes(shape[0], parts))
    given = [int(size) for size in sizes]
    if len(given) != parts or min(given) < 0 or sum(given) != shape[0]:
        raise ValueError(f"sizes are one number of rows for each of {parts} ranks, {shape[0]} in all, not {given}")
    return given


def _with_gradients(call: Call, name: str, x: Any, **arguments: Any) -> Any:
    return map_nest(lambda leaf: call.backend._grad_collective(name, leaf, **arguments, **call.options), x)


def _known(op: str) -> str:
    if op not in _OPS:
        raise ValueError(f"op is one of {', '.join(_OPS)}, not {op!r}")
    return op


def _differentiable(op: str) -> str:
    if op not in ("mean", "sum"):
        raise ValueError(f"gradients flow through 'mean' and 'sum', not through {op!r}")
    return op


def _check_op(op: str, dtype: str) -> None:
    if op == "mean" and not ("float" in dtype or "complex" in dtype):
        raise TypeError(f"the mean of {dtype} values is not of that type: cast to a float type first, or use op='sum'")
    if dtype == "bool" and op in ("sum", "product"):
        raise TypeError(f"the {op} of bool values is not a bool: cast first, or use op='max' (any) or 'min' (all)")
    if "complex" in dtype and op in ("max", "min"):
        raise TypeError(f"complex numbers have no order, so no {op}: reduce their absolute values")


def _check_rows(leaf: Leaf, name: str) -> None:
    if not leaf.shape:
        raise TypeError(f"{name} cuts the first axis, and a number or 0-d tensor has none")


def _check_root(call: Call, root: int) -> None:
    if not 0 <= root < call.backend.world.size:
        raise ValueError(f"root is a rank from 0 to {call.backend.world.size - 1}, not {root!r}")
    if root not in call.ranks:
        raise ValueError(f"root is one of the group's ranks {list(call.ranks)}, not {root!r}")


def _pickled(obj: Any) -> tuple[bytes, str]:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), ""
    except Exception as error:  # an object's own __reduce__ may raise anything, and the other ranks wait
        return b"", f"{type(error).__name__}: {error}"


def _bytes(data: bytes, size: int) -> Any:
    import numpy

    return numpy.frombuffer(data, dtype=numpy.uint8) if data else numpy.zeros(size, numpy.uint8)


def _array(backend: Backend, tensor: Any) -> Any:
    import numpy

    return backend._as_leaf(tensor, numpy.empty(0, numpy.uint8))
