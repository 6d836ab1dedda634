"""Contract 8: collectives return new values of what was given, exactly, or raise on every rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import unidist
from unidist.errors import MismatchError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_apply, several_processes

_SEVERAL = (several_processes,)
_DTYPES = (
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16",
    "float32", "float64", "complex64", "complex128",
)  # fmt: skip


def _values(rank: int) -> Any:
    """Small whole numbers that every dtype holds, different on each rank."""
    return np.array([[0, 1, 2], [rank, 1, rank % 2]])


def _tensor(bench: Bench, values: Any, dtype: str) -> Any:
    return bench.tensor(np.asarray(values).astype("float32" if "float" in dtype else dtype.replace("bfloat16", "float32")), dtype)


def _equal(bench: Bench, found: Any, expected: Any, dtype: str, what: str) -> None:
    compare.true(bench.is_tensor(found), f"{what} is a tensor of the framework")
    compare.same(bench.dtype(found), dtype, f"the dtype of {what}")
    wanted = _tensor(bench, expected, dtype)
    compare.same(tuple(found.shape), tuple(wanted.shape), f"the shape of {what}")
    compare.same(bench.numbers(found).tolist(), bench.numbers(wanted).tolist(), what)


@check(
    8,
    "broadcast, all_gather and all_reduce of every dtype are exact",
    flavours="once",
    cases={d: d for d in _DTYPES},
    few=("int16", "bool"),
)
def dtypes(bench: Bench, dtype: str) -> None:
    mine = _tensor(bench, _values(bench.rank), dtype)
    ranks = [_values(rank) for rank in range(bench.size)]
    root = bench.size - 1
    _equal(bench, unidist.broadcast(mine, root), ranks[root], dtype, "broadcast")
    _equal(bench, unidist.all_gather(mine), np.concatenate(ranks), dtype, "all_gather")
    if "complex" not in dtype:
        _equal(bench, unidist.all_reduce(mine, "max"), np.max([r.astype(bool) if dtype == "bool" else r for r in ranks], 0), dtype, "max")
        _equal(bench, unidist.all_reduce(mine, "min"), np.min([r.astype(bool) if dtype == "bool" else r for r in ranks], 0), dtype, "min")
    if dtype != "bool":
        _equal(bench, unidist.all_reduce(mine, "sum"), np.sum(ranks, 0), dtype, "sum")
    if "float" in dtype or "complex" in dtype:
        quarters = _tensor(bench, 4.0 * bench.size * _values(bench.rank), dtype)
        _equal(bench, unidist.all_reduce(quarters), np.sum(ranks, 0) * 4.0, dtype, "mean, the default")
    _equal(bench, mine, _values(bench.rank), dtype, "the argument afterwards")


@check(8, "product", flavours="once")
def product(bench: Bench) -> None:
    found = unidist.all_reduce(bench.tensor(np.array([2.0, float(bench.rank + 1)])), "product")
    factorial = float(np.prod(np.arange(1, bench.size + 1)))
    compare.same(bench.array(found).tolist(), [2.0**bench.size, factorial], "the products")


@check(8, "the mean of integers and booleans is a TypeError that says cast or sum, on every rank", flavours="once", few=True)
def integer_mean(bench: Bench) -> None:
    for value in (3, True, np.array([1, 2]), bench.tensor(np.array([1, 2])), {"a": bench.tensor(np.array([True]))}):
        with compare.raises(TypeError, "cast", "sum"):
            unidist.all_reduce(value)
    with compare.raises(TypeError, "bool"):
        unidist.all_reduce(True, "sum")
    with compare.raises(ValueError, "average", "mean"):
        unidist.all_reduce(1.0, "average")
    compare.same(unidist.all_reduce(1, "sum"), bench.size, "the next collective")


@check(8, "numbers and NumPy values come back as what they were", flavours="once")
def numbers(bench: Bench) -> None:
    n, r = bench.size, bench.rank
    ranks = range(n)
    found = unidist.all_reduce(0.5 + r)
    compare.true(type(found) is float and found == float(np.mean([0.5 + k for k in ranks])), "a float stays one")
    found = unidist.all_reduce(2**53 + 1 + r, "max")
    compare.true(type(found) is int and found == 2**53 + n, "an int stays one, exactly")
    compare.true(unidist.all_reduce(r == 0, "min") is (n == 1), "a bool stays one")
    compare.true(unidist.all_reduce(r == 0, "max") is True, "a bool stays one")
    compare.same(unidist.all_reduce(complex(r, 1), "sum"), complex(sum(ranks), n), "the sum of complex numbers")
    compare.same(unidist.broadcast(0.1 + r), 0.1, "a float keeps all its digits")
    one = unidist.all_reduce(np.float32(r), "sum")
    compare.true(isinstance(one, np.float32) and one == sum(ranks), "a NumPy scalar stays one")
    for dtype in ("float64", "float32", "int16", "uint8", "bool", "int64"):
        array = np.array([[r % 2, 1], [1, 0]], dtype)
        compare.same(
            unidist.all_gather(array), np.concatenate([np.array([[k % 2, 1], [1, 0]], dtype) for k in ranks]), f"all_gather of {dtype}"
        )
        compare.same(unidist.broadcast(array, n - 1), np.array([[(n - 1) % 2, 1], [1, 0]], dtype), f"broadcast of {dtype}")
    compare.same(unidist.all_gather(r), np.arange(n), "all_gather of an int")
    compare.same(unidist.all_gather(0.5 * r), 0.5 * np.arange(n), "all_gather of a float")


class Pair(NamedTuple):
    """A named tuple of two."""

    left: Any
    right: Any


@check(8, "nests keep their form, leaf by leaf", flavours="once")
def nests(bench: Bench) -> None:
    r, n = bench.rank, bench.size
    nest = {
        "a": bench.tensor(np.array([1.0 * r])),
        "b": (2.0 * r, [np.array([3.0 * r])]),
        "c": Pair(r * 1.0, bench.tensor(np.array(4.0 * r))),
        "d": {},
    }
    found = unidist.all_reduce(nest)
    mean = (n - 1) / 2
    compare.same(list(found), ["a", "b", "c", "d"], "the keys")
    compare.true(
        type(found["c"]) is Pair and type(found["b"]) is tuple and type(found["b"][1]) is list, "tuples, lists and named tuples stay"
    )
    compare.same(bench.array(found["a"]).tolist(), [mean], "a")
    compare.same((found["b"][0], found["b"][1][0].tolist()), (2 * mean, [3 * mean]), "b")
    compare.same((found["c"].left, float(bench.array(found["c"].right))), (mean, 4 * mean), "c")
    compare.same(found["d"], {}, "d")
    compare.same(bench.array(unidist.all_gather(nest)["c"].right).tolist(), [4.0 * k for k in range(n)], "all_gather of a 0-d tensor")


@check(8, "0-d, empty, and not contiguous: memory layout never matters", flavours="once", few=True)
def layouts(bench: Bench) -> None:
    r, n = bench.rank, bench.size
    scalar = unidist.all_reduce(bench.tensor(np.array(float(r))), "sum")
    compare.same((tuple(scalar.shape), float(bench.array(scalar))), ((), float(sum(range(n)))), "a 0-d tensor")
    for shape in ((0,), (1, 0, 2), (0, 3)):
        empty = bench.tensor(np.zeros(shape))
        compare.same(tuple(unidist.all_reduce(empty).shape), shape, "the shape of an empty all_reduce")
        compare.same(tuple(unidist.broadcast(empty).shape), shape, "the shape of an empty broadcast")
        compare.same(tuple(unidist.all_gather(empty).shape), (shape[0] * n, *shape[1:]), "the shape of an empty all_gather")
    base = np.arange(12.0).reshape(3, 4) + 100 * r
    for what, array in (
        ("transposed", base.T),
        ("every second", base[:, ::2]),
        ("reversed", base[::-1]),
        ("repeated", np.broadcast_to(base[:1], (3, 4))),
    ):
        bases = [array - 100 * r + 100 * k for k in range(n)]
        compare.same(unidist.all_reduce(array, "sum"), np.sum(bases, 0), f"all_reduce of {what}")
        compare.same(unidist.all_gather(array), np.concatenate(bases), f"all_gather of {what}")
        compare.same(unidist.broadcast(array, n - 1), np.array(bases[-1], order="C"), f"broadcast of {what}")


@check(8, "strided and expanded tensors", flavours="native")
def strided_tensors(bench: Bench) -> None:
    n = bench.size
    base = bench.tensor(np.arange(12.0).reshape(3, 4) + bench.rank)
    for view in (base.t(), base[:, ::2], base[:1].expand(3, 4), base.as_strided((2, 2), (1, 1)), base.t().conj()):
        plain = view.contiguous() - bench.rank
        mean = plain + (n - 1) / 2
        compare.same(bench.array(unidist.all_reduce(view)).tolist(), bench.array(mean).tolist(), "all_reduce of a view")
        compare.same(bench.array(unidist.broadcast(view, n - 1)).tolist(), bench.array(plain + n - 1).tolist(), "broadcast of a view")


@check(8, "all_gather joins rows in rank order; first dimensions may differ, also 0", flavours="once", few=True)
def unequal_rows(bench: Bench) -> None:
    n = bench.size
    for counts in ([2 + k for k in range(n)], [3 * (k % 2) for k in range(n)], [0] * n):
        rows = [np.full((count, 3), float(rank)) for rank, count in enumerate(counts)]
        found = unidist.all_gather(bench.tensor(rows[bench.rank]))
        compare.same(bench.array(found).tolist(), np.concatenate(rows).tolist(), f"rows of {counts}")
        compare.same(tuple(found.shape), (sum(counts), 3), f"the shape of {counts}")
        compare.same(unidist.all_gather(rows[bench.rank]), np.concatenate(rows), f"arrays of {counts}")


@check(8, "shapes, dtypes or structures that don't match raise on every rank, naming both, and the next collective works", flavours="once",
       needs=_SEVERAL, few=True)  # fmt: skip
def mismatches(bench: Bench) -> None:
    first = bench.rank == 0
    two, three = np.zeros((2, 2)), np.zeros((2, 3))
    for name, call in (("all_reduce", unidist.all_reduce), ("broadcast", unidist.broadcast), ("all_gather", unidist.all_gather)):
        cases: list[tuple[Any, Any, tuple[str, ...]]] = [
            (bench.tensor(two), bench.tensor(three), ("2, 2", "2, 3")),
            (bench.tensor(two, "float32"), bench.tensor(two, "float64"), ("float32", "float64")),
            ({"a": two}, {"b": two}, ("['a']", "['b']")),
            ([two], [two, two], ("rank 0", "rank 1")),
        ]
        if name == "all_gather":
            cases[0] = (bench.tensor(two), bench.tensor(three), ("2", "3"))
        for one, other, texts in cases:
            with compare.raises(MismatchError, name, *texts):
                call(one if first else other)
            compare.same(unidist.all_reduce(1, "sum"), bench.size, f"the collective after a mismatch of {name}")
    with compare.raises(MismatchError, "all_reduce", "broadcast"):
        (unidist.all_reduce if first else unidist.broadcast)(1.0)
    with compare.raises(MismatchError, "sum", "max"):
        unidist.all_reduce(1.0, "sum" if first else "max")
    compare.same(unidist.all_reduce(1, "sum"), bench.size, "the collective after different calls")


@check(8, "results are new values that share no memory, and carry no gradient", flavours="native")
def new_values(bench: Bench) -> None:
    torch = bench.module
    mine = torch.ones(3, dtype=torch.float64, device=bench.backend.device, requires_grad=True)
    for call in (unidist.all_reduce, unidist.broadcast, unidist.all_gather):
        found = call(mine)
        compare.true(not found.requires_grad, f"{call.__name__} carries no gradient")
        found += 1.0
        compare.same(bench.array(mine).tolist(), [1.0, 1.0, 1.0], f"the argument after {call.__name__} and a change of its result")
    array = np.ones(3)
    for call in (unidist.all_reduce, unidist.broadcast, unidist.all_gather):
        call(array)[...] = 7.0
        compare.same(array.tolist(), [1.0, 1.0, 1.0], f"the array after {call.__name__} and a change of its result")


@check(8, "grad=True: the gradient is one device's", flavours="native", few=True)
def gradients(bench: Bench) -> None:
    """The job's loss is the mean of the ranks' losses; its gradient by x_r is size times what plain backward leaves on rank r."""
    n, r = bench.size, bench.rank
    x = bench.tensor(np.array([1.0 + r])).requires_grad_()
    (unidist.all_reduce(x, grad=True) * (1.0 + r)).sum().backward()
    # loss_r = (1 + r) * mean(x): d mean_r(loss_r) / dx_s = mean(1 + r) / n, of which each rank's backward leaves n times that
    bench.close(bench.array(x.grad), [np.mean([1.0 + k for k in range(n)])], "the gradient through a mean")
    x.grad = None
    (unidist.all_reduce(x, "sum", grad=True) * (1.0 + r)).sum().backward()
    bench.close(bench.array(x.grad), [sum(1.0 + k for k in range(n))], "the gradient through a sum")
    rows = bench.tensor(np.full((1 + r, 2), 1.0 + r)).requires_grad_()
    gathered = unidist.all_gather(rows, grad=True)
    compare.same(tuple(gathered.shape), (sum(1 + k for k in range(n)), 2), "the shape of the gathered rows")
    factors = bench.tensor(np.arange(float(len(gathered)))[:, None])
    (gathered * factors * (1.0 + r)).sum().backward()
    begin = sum(1 + k for k in range(r))
    expected = np.arange(begin, begin + 1 + r)[:, None] * np.ones((1, 2)) * sum(1.0 + k for k in range(n))
    bench.close(bench.array(rows.grad), expected, "the gradient of the gathered rows")


@check(8, "a loss over all pairs of gathered rows trains as on one device", flavours="native")
def pairs(bench: Bench) -> None:
    """loss = mean over all pairs of (w x_i) (w x_j) = w^2 mean(x)^2, so one step of rate 0.01 goes to 1 - 0.02 mean(x)^2."""
    torch = bench.module
    model = bench.model("linear")
    optimizer = bench.optimizer("plain", model, rate=0.01)
    n = 2 * bench.replicas
    values = np.arange(1.0, n + 1)[:, None]
    for x in unidist.wrap_data(values, global_batch_size=n):
        rows = unidist.all_gather(model(x), grad=True)
        torch.mean(rows @ rows.T).backward()
        optimizer.step()
    bench.close(bench.weights(model)["0/kernel"], [[1 - 0.02 * values.mean() ** 2]], "the weight")


@check(8, "objects of any size, None on the receivers", flavours="once", few=True)
def objects(bench: Bench) -> None:
    root = bench.size - 1
    thing = {"name": "a thing", "rows": list(range(5)), "array": np.arange(3), "none": None}
    found = unidist.broadcast_object(thing if bench.rank == root else None, root)
    compare.same(
        (found["name"], found["rows"], found["array"].tolist(), found["none"]), ("a thing", [0, 1, 2, 3, 4], [0, 1, 2], None), "the object"
    )
    big = bytes(1 << 20) + b"end" if bench.rank == 0 else None
    compare.same(unidist.broadcast_object(big)[-3:], b"end", "the end of a large object")
    compare.true(unidist.broadcast_object(None) is None, "None itself travels")
    compare.same(
        unidist.all_gather_object("x" * (bench.rank * 1000)), ["x" * (k * 1000) for k in range(bench.size)], "objects of different sizes"
    )
    compare.same(unidist.all_gather_object({bench.rank: None}), [{k: None} for k in range(bench.size)], "every rank's object")


class Unwilling:
    """An object whose own pickling fails, as it likes."""

    def __reduce__(self) -> Any:
        raise RuntimeError("it will not")


@check(8, "an object that can't be pickled raises on all ranks, and the next call works", flavours="once")
def unpicklable(bench: Bench) -> None:
    with compare.raises(TypeError, "rank 0", "pickled"):
        unidist.broadcast_object((lambda: None) if bench.rank == 0 else None)
    with compare.raises(TypeError, f"rank {bench.size - 1}", "pickled"):
        unidist.all_gather_object((lambda: None) if bench.rank == bench.size - 1 else 1)
    with compare.raises(TypeError, "rank 0", "will not"):
        unidist.broadcast_object(Unwilling() if bench.rank == 0 else None)
    compare.same(unidist.all_gather_object(bench.rank), list(range(bench.size)), "the next call")


@check(8, "a root that is no rank, a leaf that is no value", flavours="once")
def wrong_arguments(bench: Bench) -> None:
    for call in (unidist.broadcast, unidist.broadcast_object):
        with compare.raises(ValueError, "root", str(bench.size)):
            call(1.0, bench.size)
    with compare.raises(TypeError, "str"):
        unidist.all_reduce("text")
    unidist.barrier()


@check(8, "broadcast of a wrapped model's state_dict is refused, with the call that is right", flavours="native")
def state_dict(bench: Bench) -> None:
    model = bench.model("mlp")
    with compare.raises((TypeError, ValueError), "broadcast(model"):
        unidist.broadcast(model.state_dict())


@check(8, "schedulers and scalers are broadcast in place", flavours="native")
def stateful_objects(bench: Bench) -> None:
    torch = bench.module
    model = bench.model("mlp")
    optimizer = bench.optimizer("sgd", model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1 + bench.rank, 0.5)
    compare.true(unidist.broadcast(scheduler) is scheduler, "broadcast returns the scheduler")
    compare.same(scheduler.step_size, 1, "the step size")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + bench.rank))
    scaler.scale(torch.ones(1))
    unidist.broadcast(scaler)
    compare.same(scaler.get_scale(), 8.0, "the scale")


@check(8, "inside a traced function a collective raises", flavours="keras", needs=(exchanges_in_apply,))
def traced(bench: Bench) -> None:
    with compare.raises((RuntimeError, TypeError, unidist.UnsupportedError), "traced"):
        bench.trace(lambda x: unidist.all_reduce(x))(bench.tensor(np.ones(2)))
    compare.same(unidist.all_reduce(1, "sum"), bench.size, "the next collective")


@check(8, "print once per job, blocks for rank 0 first and only", flavours="once")
def once_per_job(bench: Bench) -> None:
    calls: list[str] = []
    unidist.main_process_only(lambda: calls.append("only"))()
    with unidist.main_process_first():
        calls.append("first")
    compare.same(calls, (["only"] if bench.rank == 0 else []) + ["first"], "what ran here")
    compare.same(unidist.is_main_process(), bench.rank == 0, "is_main_process")
    compare.same((unidist.rank(), unidist.world_size()), (bench.rank, bench.size), "rank and world_size")


@check(8, "devices(cluster=True): the same on all ranks, each host once, each rank on one host", flavours="once")
def devices(bench: Bench) -> None:
    hosts = unidist.devices(cluster=True)
    compare.same(sorted(rank for found in hosts for rank in found.host.ranks), list(range(bench.size)), "the ranks of all hosts")
    texts = unidist.all_gather_object([found.to_dict() for found in hosts])
    compare.true(all(text == texts[0] for text in texts), "every rank has the same list")
    mine = next(found for found in hosts if bench.rank in found.host.ranks)
    compare.same([gpu.uuid for gpu in mine], [gpu.uuid for gpu in unidist.devices()], "the GPUs of this host")
