"""Cases 12, 54 to 58, 61 and 77: collectives, what they carry, and the gradients that flow through them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unidist
from field_cases.toys import RATE, w1, weight_of
from unidist.errors import CollectiveTimeoutError, MismatchError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_apply, exchanges_in_backward, one_replica_each, several_processes

_SEVERAL = (several_processes,)


# 12 and 77: gradients through collectives


def _train(bench: Bench, values: Any, loss: Callable[[Any, Any], Any]) -> float:
    """The one weight after a step of make_train_step over the values, with a loss of (model, batch)."""
    model, optimizer = w1(bench)
    step = unidist.make_train_step(model, optimizer, compute_loss=loss)
    for batch in unidist.wrap_data(values, global_batch_size=len(values)):
        step(batch)
    return weight_of(bench, model)


@check(8, "the gradient through a mean over ranks is one device's", number=12)
def gradient_of_a_mean(bench: Bench) -> None:
    values = np.arange(1.0, 2 * bench.replicas + 1)[:, None]
    found = _train(bench, values, lambda model, x: unidist.all_reduce(bench.ops().mean(model(x)), grad=True))
    bench.close(found, 1 - RATE * values.mean(), "the weight")


@check(8, "a loss made only of detached collectives raises in backward", number=12, flavours="native")
def detached_in_backward(bench: Bench) -> None:
    model, _ = w1(bench)
    x = bench.tensor(np.ones((1, 1)))
    for call in (unidist.all_reduce, unidist.all_gather, unidist.reduce_scatter, unidist.all_to_all, unidist.broadcast):
        for backward in (lambda loss: loss.backward(), unidist.backward):
            with compare.raises(RuntimeError, "grad"):
                backward(call(model(x)).sum())


@check(8, "a loss made only of detached collectives has no gradient, and can't be applied", number=12, needs=(exchanges_in_apply,))
def detached_in_tape(bench: Bench) -> None:
    tf: Any = bench.tf  # type: ignore[attr-defined]
    model, optimizer = w1(bench)
    variables = model.trainable_variables
    for call in (unidist.all_reduce, unidist.all_gather, unidist.reduce_scatter, unidist.all_to_all, unidist.broadcast):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(call(model(np.ones((1, 1)))))
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        compare.same(gradients, [None], f"the gradient of a loss of {call.__name__}")
    with compare.raises(ValueError, "No gradients"):
        optimizer.apply(gradients, variables)
    with compare.raises(unidist.UnsupportedError, "grad=True"):
        _train(bench, np.ones((2 * bench.replicas, 1)), lambda model, x: unidist.all_reduce(bench.ops().mean(model(x))))


def _contrastive(bench: Bench, rows: Any, others: Any) -> Any:
    """Mean over the rows i of log sum_j exp(z_i z_j) - z_i z_i, with j over the others."""
    ops = bench.ops()
    logits = rows * ops.reshape(others, (1, -1))
    return ops.mean(ops.log(ops.sum(ops.exp(logits), 1)) - ops.sum(rows * rows, 1))


def _own_rows(bench: Bench, model: Any, x: Any) -> Any:
    """The loss of this share's rows against all, which differs from rank to rank."""
    rows = model(x)
    return _contrastive(bench, rows, unidist.all_gather(rows, grad=True))


def _all_rows(bench: Bench, model: Any, x: Any) -> Any:
    """The loss of all rows, the same on all ranks."""
    rows = unidist.all_gather(model(x), grad=True)
    return _contrastive(bench, rows, rows)


def _after_contrastive(values: Any) -> float:
    """The weight after a step from 1 with z = w x: one device, by hand."""
    x = values[:, 0]
    p = np.exp(np.outer(x, x))
    p /= p.sum(1, keepdims=True)
    return 1.0 - RATE * float(np.mean(2 * x * (p @ x) - 2 * x * x))


def _embeddings(bench: Bench, case: str) -> Any:
    """4 samples a replica; "uneven": the last replica has one less."""
    return np.linspace(0.1, 1.3, 4 * bench.replicas - (case == "uneven"))[:, None]


_SHARES = {"even": "even", "uneven": "uneven"}


@check(8, "a contrastive loss over gathered embeddings trains as on one device", number=77, cases=_SHARES)
def contrastive(bench: Bench, case: str) -> None:
    values = _embeddings(bench, case)
    for loss in (_all_rows, _own_rows) if case == "uneven" else (_all_rows,):
        found = _train(bench, values, lambda model, x, loss=loss: loss(bench, model, x))
        bench.close(found, _after_contrastive(values), f"the weight by {loss.__name__}")


@check(8, "a contrastive loss and plain backward", number=77, cases=_SHARES, flavours="native", needs=(exchanges_in_backward,))
def contrastive_backward(bench: Bench, case: str) -> None:
    values = _embeddings(bench, case)
    model, optimizer = w1(bench)
    for x in unidist.wrap_data(values, global_batch_size=len(values)):
        _own_rows(bench, model, x).backward()
        optimizer.step()
    bench.close(weight_of(bench, model), _after_contrastive(values), "the weight")


@check(8, "a contrastive loss and a tape", number=77, cases=_SHARES, needs=(exchanges_in_apply, one_replica_each))
def contrastive_tape(bench: Bench, case: str) -> None:
    tf: Any = bench.tf  # type: ignore[attr-defined]
    values = _embeddings(bench, case)
    model, optimizer = w1(bench)
    variables = model.trainable_variables
    for x in unidist.wrap_data(values, global_batch_size=len(values)):
        with tf.GradientTape() as tape:
            loss = _own_rows(bench, model, x)
        optimizer.apply(unidist.reduce_gradients(tape.gradient(loss, [v.value for v in variables])), variables)
    bench.close(weight_of(bench, model), _after_contrastive(values), "the weight")


# 54 to 58: what collectives carry

_TORCH_ONLY = ("float8_e4m3fnuz", "float8_e5m2fnuz")
_DTYPES = (
    "bool", "uint8", "int8", "int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "complex64",
)  # fmt: skip


@check(8, "dtypes that gloo and Horovod lack, 0-d too", number=54, flavours="once")
def dtypes(bench: Bench) -> None:
    n, r = bench.size, bench.rank
    for dtype in _DTYPES + (_TORCH_ONLY if "backward" in bench.abilities else ()):
        for shape in ((), (2,), (2, 3)):
            base = bench.tensor(np.full(shape, 1.0), "float32" if "complex" not in dtype else "complex64")
            mine = bench.tensor(bench.numbers(base * (r % 2)).astype("complex64" if "complex" in dtype else "float32"), dtype)
            rows = (n, *shape[1:]) if not shape else (n * shape[0], *shape[1:])
            ranks = np.repeat(np.arange(n) % 2, rows[0] // n).reshape(-1, *[1] * (len(rows) - 1)) * np.ones(rows)
            gathered = unidist.all_gather(mine)
            moved = unidist.broadcast(mine, n - 1)
            reduced = unidist.all_reduce(mine, "max" if dtype == "bool" else "sum")
            for value, expected in ((gathered, ranks), (moved, np.full(shape, (n - 1) % 2)), (reduced, np.full(shape, n // 2))):
                compare.same((bench.dtype(value), tuple(value.shape)), (dtype, expected.shape), f"dtype and shape of {dtype}{shape}")
                compare.same(bench.numbers(value).tolist(), expected.tolist(), f"values of {dtype}{shape}")


@check(8, "sums beyond a float's digits, means beyond a half's range", number=54, flavours="once")
def wide_values(bench: Bench) -> None:
    n, r = bench.size, bench.rank
    big = 2**62 + 1
    compare.same(unidist.all_reduce(np.array([big if r == 0 else 1]), "sum").tolist(), [big + n - 1], "the sum of int64")
    mine = np.array([2**63 + 1 + r, r], np.uint64)
    compare.same(unidist.all_reduce(mine, "max").tolist(), [2**63 + n, n - 1], "the maximum of uint64")
    compare.same(unidist.all_reduce(mine, "min").tolist(), [2**63 + 1, 0], "the minimum of uint64")
    compare.same(unidist.broadcast(mine).tolist(), [2**63 + 1, 0], "uint64")
    first = np.array([2**63 + 1 if r == 0 else 1], np.uint64)
    compare.same(unidist.all_reduce(first, "sum").tolist(), [2**63 + n], "the sum of uint64")
    compare.same(unidist.all_reduce(first, "max").tolist(), [2**63 + 1], "the maximum of uint64 on both sides of 2**63")
    compare.same(unidist.reduce_scatter(np.repeat(first, n), "min").tolist(), [1 if n > 1 else 2**63 + 1], "the minimum there")
    compare.same(unidist.reduce_scatter(np.repeat(mine[:1], n), "max").tolist(), [2**63 + n], "a piece of the maximum of uint64")
    half = np.full(n, 60000.0, np.float16)
    compare.same(unidist.all_reduce(half).tolist(), [60000.0] * n, "the mean of float16, whose sum is no float16")
    compare.same(unidist.reduce_scatter(half).tolist(), [60000.0], "a piece of it")
    compare.same(unidist.all_reduce(np.float16(60000.0)), np.float16(60000.0), "a NumPy scalar")


@check(8, "arrays in any memory order and byte order come back as they were", number=54, flavours="once")
def arrays(bench: Bench) -> None:
    n, r = bench.size, bench.rank
    base = np.arange(12.0).reshape(3, 4)
    frozen = base + r
    frozen.flags.writeable = False
    layouts: dict[str, Any] = {
        "big-endian": (base + r).astype(">f8"), "big-endian integers": (base + r).astype(">i4"), "Fortran": np.asfortranarray(base + r),
        "reversed": (base[::-1, ::-1] + r)[::-1, ::-1], "read-only": frozen, "every second column": np.repeat(base + r, 2, 1)[:, ::2],
    }  # fmt: skip
    for what, mine in layouts.items():
        truth = [base + k for k in range(n)]
        for name, found, expected in (
            ("all_reduce", unidist.all_reduce(mine, "sum"), np.sum(truth, 0)),
            ("all_gather", unidist.all_gather(mine), np.concatenate(truth)),
            ("broadcast", unidist.broadcast(mine, n - 1), truth[-1]), ("reduce_scatter", unidist.reduce_scatter(mine, "max"), None),
            ("all_to_all", unidist.all_to_all(mine), None),
        ):  # fmt: skip
            compare.same(found.dtype, mine.dtype, f"the dtype of {name} of {what}")
            if expected is not None:
                compare.same(found.tolist(), expected.tolist(), f"{name} of {what}")
    with compare.raises(TypeError, "mask"):
        unidist.all_reduce(np.ma.masked_array([1.0, 2.0], [True, False]))
    with compare.raises(TypeError, "datetime64"):
        unidist.broadcast(np.array(["2020-01-01"], "datetime64[D]"))
    with compare.raises(OverflowError, "int64"):
        unidist.all_reduce(2**63, "sum")


@check(8, "parameters, subclasses, conjugates, channels-last and sparse tensors", number=54, flavours="native")
def kinds_of_tensors(bench: Bench) -> None:
    torch, n, r = bench.module, bench.size, bench.rank
    parameter = torch.nn.Parameter(bench.tensor(np.full(2, 1.0 + r)))
    found = unidist.all_reduce(parameter)
    compare.true(type(found) is torch.Tensor and not found.requires_grad, "a Parameter gives a plain tensor without gradient")
    compare.same(bench.array(found).tolist(), [(n + 1) / 2] * 2, "its mean")
    images = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last) + r
    compare.same(
        unidist.all_reduce(images, "sum").tolist(), (torch.arange(24.0).reshape(1, 2, 3, 4) * n + sum(range(n))).tolist(), "images"
    )
    for call in (unidist.broadcast, unidist.all_reduce, unidist.all_gather):
        compare.same(call(torch.tensor([1 + 2j]).conj())[0].item(), 1 - 2j, f"{call.__name__} of a conjugate")
        compare.same(call(torch.tensor([1 + 2j]).conj().imag)[0].item(), -2.0, f"{call.__name__} of a negative view")
    dense = torch.eye(3) * (1 + r)
    for layout in (torch.sparse_coo, torch.sparse_csr):
        found = unidist.all_reduce(dense.to_sparse(layout=layout), "sum")
        compare.same((found.layout, found.to_dense().tolist()), (layout, (torch.eye(3) * sum(range(1, n + 1))).tolist()), f"{layout}")


@check(8, "empty tensors in every collective, also on one rank only", number=55, flavours="once")
def empty(bench: Bench) -> None:
    n = bench.size
    for dtype in ("float32", "int16", "bool", "bfloat16"):
        mine = bench.tensor(np.zeros((1, 0, 2), np.float32), dtype)
        calls: list[tuple[Any, tuple[int, ...]]] = [
            (unidist.all_reduce(mine, "max"), (1, 0, 2)), (unidist.broadcast(mine), (1, 0, 2)), (unidist.all_gather(mine), (n, 0, 2)),
            (unidist.reduce_scatter(mine, "max"), (int(bench.rank == 0), 0, 2)),
            (unidist.all_to_all(mine), (n if bench.rank == 0 else 0, 0, 2)),
        ]  # fmt: skip
        for found, shape in calls:
            compare.same((bench.dtype(found), tuple(found.shape)), (dtype, shape), "dtype and shape")
        one = bench.tensor(np.ones((0 if bench.rank == 0 and n > 1 else 2, 3), np.float32), dtype)
        rows = 2 * max(n - 1, 1)
        compare.same(bench.numbers(unidist.all_gather(one)).tolist(), [[1.0] * 3] * rows, "rows where rank 0 has none")
        compare.same(
            tuple(unidist.all_to_all(one, sizes=[0] * (n - 1) + [len(one)]).shape), (rows if bench.rank == n - 1 else 0, 3), "its rows"
        )


@check(8, "all_gather of (2 + rank, 3), of (0, 3), and of trailing dimensions that differ", number=56, flavours="once")
def unequal_rows(bench: Bench) -> None:
    n, r = bench.size, bench.rank
    found = unidist.all_gather(bench.tensor(np.full((2 + r, 3), float(r))))
    compare.same(bench.array(found).tolist(), np.concatenate([np.full((2 + k, 3), float(k)) for k in range(n)]).tolist(), "the rows")
    compare.same(tuple(unidist.all_gather(bench.tensor(np.zeros((0, 3)))).shape), (0, 3), "no rows at all")
    if n > 1:
        with compare.raises(MismatchError, "3", "4"):
            unidist.all_gather(bench.tensor(np.zeros((2, 3 if r == 0 else 4))))
        with compare.raises(MismatchError, "all_gather"):
            unidist.all_gather(bench.tensor(np.zeros((2, 3) if r == 0 else (2, 3, 1))))
    compare.same(unidist.all_gather(r).tolist(), list(range(n)), "the next one")


@check(8, "the mean of integers is a TypeError on every rank", number=57, flavours="once")
def integer_means(bench: Bench) -> None:
    for values in ([1, 2] if bench.rank == 0 else [3, 5], -1 if bench.rank == 0 else 0):
        for mine in (np.array(values), bench.tensor(np.array(values)), bench.tensor(np.array(values), "int16")):
            with compare.raises(TypeError, "sum"):
                unidist.all_reduce(mine)
            with compare.raises(TypeError, "sum" if mine.ndim else "first axis"):
                unidist.reduce_scatter(mine)
    compare.same(unidist.all_reduce(1, "sum"), bench.size, "the next collective")


@check(8, "collectives return new values and leave their argument; the default is the mean", number=58, flavours="once")
def new_values(bench: Bench) -> None:
    n, r = bench.size, bench.rank
    mine = np.arange(2.0 * n) + r
    before, tensor = mine.copy(), bench.tensor(mine)
    calls = (unidist.all_reduce, unidist.all_gather, unidist.broadcast, unidist.reduce_scatter, unidist.all_to_all)
    for call in calls:
        found = call(mine)
        compare.true(not np.shares_memory(found, mine), f"{call.__name__} shares no memory with its argument")
        found[...] = -1.0
        call(tensor)
        compare.same(mine, before, f"the array after {call.__name__}")
        compare.same(bench.array(tensor), before, f"the tensor after {call.__name__}")
    compare.same(unidist.all_reduce(mine).tolist(), (np.arange(2.0 * n) + (n - 1) / 2).tolist(), "the mean")


# 61: waits end


@check(9, "the time-out holds in every collective, in barrier, and in groups", number=61, flavours="once", needs=_SEVERAL)
def waits(bench: Bench) -> None:
    group = unidist.new_group(range(bench.size))
    x, late, patience = np.ones(2), bench.size - 1, 0.25
    calls: dict[str, Callable[..., Any]] = {
        "all_reduce": lambda **o: unidist.all_reduce(x, **o), "all_gather": lambda **o: unidist.all_gather(x, **o),
        "reduce_scatter": lambda **o: unidist.reduce_scatter(x, **o), "all_to_all": lambda **o: unidist.all_to_all(x, **o),
        "broadcast": lambda **o: unidist.broadcast(x, **o), "broadcast_object": lambda **o: unidist.broadcast_object(1, **o),
        "all_gather_object": lambda **o: unidist.all_gather_object(1, **o), "barrier": lambda **o: unidist.barrier(**o),
    }  # fmt: skip
    if bench.rank == late:
        time.sleep(patience * (len(calls) + 4))
    for name, call in calls.items():
        options = {"group": group} if name in ("all_reduce", "all_to_all", "barrier") else {}
        started = time.monotonic()
        with bench.patience(patience), compare.raises(CollectiveTimeoutError, name, f"rank {late}"):
            call(**options)
        compare.true(bench.rank == late or time.monotonic() - started < patience + 3.0, f"{name} ended in time")
    compare.same(unidist.all_reduce(1, "sum", group=group), bench.size, "the next collective of the group")
    compare.same(unidist.all_reduce(1, "sum"), bench.size, "the next collective")


@check(8, "an object of 64 MB travels within seconds", number=61, flavours="once")
def large_object(bench: Bench) -> None:
    mine, started = bytes(1 << 26) + b"end" if bench.rank == 0 else None, time.monotonic()
    found = unidist.broadcast_object(mine)
    compare.same((len(found), found[-3:]), ((1 << 26) + 3, b"end"), "its size and its end")
    compare.true(time.monotonic() - started < 20.0, "it came within seconds")
