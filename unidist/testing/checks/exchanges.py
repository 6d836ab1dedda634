"""Contract 8: reduce_scatter and all_to_all, with what they have in common with the other collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import unidist
from unidist.batch import split_sizes
from unidist.errors import MismatchError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, several_processes

_SEVERAL = (several_processes,)
_DTYPES = ("bool", "uint8", "int8", "int16", "uint16", "uint32", "int64", "uint64", "float16", "bfloat16", "float64", "complex64")


def pieces(values: Any, sizes: Sequence[int]) -> list[Any]:
    """Consecutive pieces along the first axis."""
    return np.split(values, np.cumsum(sizes)[:-1])


@check(8, "reduce_scatter gives each rank its piece of the reduced value; any first dimension", flavours="once", few=True)
def reduce_scatter(bench: Bench) -> None:
    n, r = bench.size, bench.rank
    functions: dict[str, Callable[..., Any]] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "product": np.prod}
    for rows in (0, 1, n - 1, n, 2 * n + 1):
        ranks = [np.arange(2.0 * rows).reshape(rows, 2) * (1 - 2 * (k % 2)) + k for k in range(n)]
        for op, function in functions.items():
            whole = function(ranks, axis=0)
            found = unidist.reduce_scatter(bench.tensor(ranks[r]), op)
            compare.true(bench.is_tensor(found), "the piece is a tensor")
            bench.close(bench.array(found), pieces(whole, split_sizes(rows, n))[r], f"the piece of {rows} rows, {op}")
            bench.close(bench.array(unidist.all_gather(found)), whole, f"the pieces of {rows} rows joined, {op}")
    nest = unidist.reduce_scatter({"a": [np.arange(4) + r], "b": np.ones((n, 1), np.float32)}, "sum")
    expected = pieces(np.arange(4) * n + sum(range(n)), split_sizes(4, n))[r]
    compare.same((nest["a"][0].tolist(), nest["b"].tolist(), nest["b"].dtype), (expected.tolist(), [[float(n)]], np.float32), "a nest")


@check(8, "all_to_all: rank r gets everyone's r-th piece; a second one brings all rows back", flavours="once", few=True)
def all_to_all(bench: Bench) -> None:
    n, r = bench.size, bench.rank
    uneven = [[(a + 2 * b) % 3 for b in range(n)] for a in range(n)]
    only_first = [[3 if b == 0 else 0 for b in range(n)] for a in range(n)]
    default = [list(split_sizes(2 * n + a, n)) for a in range(n)]
    for table in (uneven, only_first, [[0] * n] * n, default):
        ranks = [np.arange(2.0 * sum(sizes)).reshape(sum(sizes), 2) + 100 * a for a, sizes in enumerate(table)]
        found = unidist.all_to_all(bench.tensor(ranks[r]), sizes=None if table is default else table[r])
        expected = np.concatenate([pieces(rows, sizes)[r] for rows, sizes in zip(ranks, table)])
        compare.same(bench.array(found).tolist(), expected.tolist(), f"the rows by {table}")
        compare.same(tuple(found.shape), expected.shape, "their shape")
        back = unidist.all_to_all(found, sizes=[sizes[r] for sizes in table])
        compare.same(bench.array(back).tolist(), ranks[r].tolist(), f"the rows back again by {table}")


@check(8, "reduce_scatter and all_to_all of every dtype are exact", flavours="once")
def exchanged_dtypes(bench: Bench) -> None:
    n, r = bench.size, bench.rank
    for dtype in _DTYPES:
        ranks = [(np.arange(2 * n) % 2 + (k % 2)) % 2 for k in range(n)]
        mine = bench.tensor(ranks[r].astype("float32" if "float" in dtype else dtype), dtype)
        found = unidist.all_to_all(mine)
        compare.same((bench.dtype(found), tuple(found.shape)), (dtype, (2 * n,)), f"dtype and shape of all_to_all of {dtype}")
        compare.same(
            bench.numbers(found).tolist(), np.concatenate([k[2 * r : 2 * r + 2] for k in ranks]).tolist(), f"all_to_all of {dtype}"
        )
        op = "max" if dtype == "bool" else "sum"
        whole = np.max(ranks, 0) if dtype == "bool" else np.sum(ranks, 0)
        found = unidist.reduce_scatter(mine, op)
        compare.same(bench.dtype(found), dtype, f"the dtype of reduce_scatter of {dtype}")
        compare.same(bench.numbers(found).tolist(), whole[2 * r : 2 * r + 2].tolist(), f"reduce_scatter of {dtype}")


@check(
    8,
    "what doesn't fit together, or can't be cut, raises on every rank, and the next call works",
    flavours="once",
    needs=_SEVERAL,
    few=True,
)
def exchange_mismatches(bench: Bench) -> None:
    first, n = bench.rank == 0, bench.size
    two, three = np.zeros((n, 2)), np.zeros((n, 3))
    for name, call in (("reduce_scatter", unidist.reduce_scatter), ("all_to_all", unidist.all_to_all)):
        for one, other, texts in (
            (bench.tensor(two), bench.tensor(three), ("2", "3")),
            (bench.tensor(two, "float32"), bench.tensor(two), ("float32", "float64")),
            ([two], [two, two], ("rank 0", "rank 1")),
        ):
            with compare.raises(MismatchError, name, *texts):
                call(one if first else other)
        with compare.raises(TypeError if first else MismatchError, "first axis"):
            call(1.0 if first else two)
        with compare.raises(TypeError if first else MismatchError, "NoneType"):
            call(None if first else two)
        compare.same(unidist.all_reduce(1, "sum"), n, f"the collective after a mismatch of {name}")
    with compare.raises(ValueError if first else MismatchError, "sizes", str(n)):
        unidist.all_to_all(two, sizes=[1] * (n + 1) if first else None)
    with compare.raises(TypeError, "cast"):
        unidist.reduce_scatter(np.arange(n))
    with compare.raises(MismatchError, "sum", "max"):
        unidist.reduce_scatter(two, "sum" if first else "max")
    compare.same(unidist.all_reduce(1, "sum"), n, "the next collective")


@check(8, "a leaf that only one rank gets wrong raises on all of them", flavours="once", needs=_SEVERAL)
def wrong_leaf(bench: Bench) -> None:
    first = bench.rank == 0
    for wrong, kind, text in ((None, TypeError, "NoneType"), ("text", TypeError, "str"), (2**70, OverflowError, "int64")):
        for call in (unidist.all_reduce, unidist.all_gather, unidist.broadcast):
            with compare.raises(kind if first else MismatchError, text, *([] if first else ["rank 0"])):
                call(wrong if first else 1.0)
    compare.same(unidist.all_reduce(1, "sum"), bench.size, "the next collective")


@check(8, "init(check=False) sends nothing beside the data", flavours="once", needs=_SEVERAL)
def unchecked(bench: Bench) -> None:
    control, before = bench.control, bench.backend.settings
    sent: list[str] = []
    gather = control.gather
    control.gather = lambda name, *given, **named: sent.append(name) or gather(name, *given, **named)  # type: ignore[method-assign, func-returns-value]
    bench.backend.settings = replace(before, check=False)
    try:
        total = unidist.all_reduce(np.ones(2), "sum")
        moved = unidist.broadcast(np.ones(2) + bench.rank, 1)
        piece = unidist.reduce_scatter(np.ones(bench.size), "sum")
        compared = [name for name in sent if name.startswith(("all_reduce", "broadcast", "reduce_scatter"))]
        compare.same(compared, [], "what was compared over the control plane")
        rows = unidist.all_gather(np.ones(1 + bench.rank))
    finally:
        bench.backend.settings = before
        del control.gather
    compare.same(total.tolist(), [float(bench.size)] * 2, "the sum")
    compare.same((moved.tolist(), piece.tolist()), ([2.0, 2.0], [float(bench.size)]), "broadcast and reduce_scatter")
    compare.same(len(rows), sum(1 + k for k in range(bench.size)), "rows whose number differs")


def gradients(bench: Bench, values: Any, loss: Callable[[Any, Any], Any]) -> list[tuple[int, Any]]:
    """(replica, gradient) for each replica here of `loss(x, replica)`, where x is `values` times 1 + replica."""
    if "backward" in bench.abilities:
        x = bench.tensor(values * (1.0 + bench.rank)).requires_grad_()
        loss(x, bench.rank).backward()
        return [(bench.rank, bench.array(x.grad))]
    tf: Any = bench.tf  # type: ignore[attr-defined]

    def replica(index: Any) -> list[Any]:
        x = tf.constant(values) * (1.0 + tf.cast(index, tf.float64))
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(x, tf.cast(index, tf.float64))
        return [tape.gradient(value, x)]

    first = bench.rank * bench.local_replicas
    return [(first + i, bench.array(tf.convert_to_tensor(row[0]))) for i, row in enumerate(bench.on_replicas(replica, reduce=False))]


@check(8, "grad=True of reduce_scatter and all_to_all: the gradient is one device's", flavours="once", few=True)
def exchanged_gradients(bench: Bench) -> None:
    """Of the sum of the replicas' losses, of which each counts by 1 + its number."""
    n = bench.replicas
    rows = 2 * n + 1
    values, factors = np.arange(1.0, 2 * rows + 1).reshape(rows, 2), np.arange(1.0, rows + 1)[:, None]
    owner = np.repeat(np.arange(n), split_sizes(rows, n))[:, None]
    weight = bench.tensor(factors)
    for op, factor in (("mean", 1.0 / n), ("sum", 1.0)):
        for index, found in gradients(bench, values, _scattered(bench, weight, op)):
            bench.close(found, np.ones((1, 2)) * (1.0 + owner) * factors * factor, f"the gradient of replica {index} through a {op}")
    sizes = [rows if part == n - 1 else 0 for part in range(n)]
    for given, to in ((None, owner), (sizes, np.full((rows, 1), n - 1))):
        for index, found in gradients(bench, values, _exchanged(bench, given)):
            bench.close(found, 2 * (1.0 + to) * values * (1.0 + index), f"the gradient of replica {index} through all_to_all")


def _scattered(bench: Bench, weight: Any, op: str) -> Callable[[Any, Any], Any]:
    return lambda x, replica: bench.ops().sum((1.0 + replica) * unidist.reduce_scatter(x * weight, op, grad=True))


def _exchanged(bench: Bench, sizes: Sequence[int] | None) -> Callable[[Any, Any], Any]:
    return lambda x, replica: bench.ops().sum((1.0 + replica) * unidist.all_to_all(x, sizes=sizes, grad=True) ** 2)
