"""Contract 10: the shares of an epoch are a partition of the data, the same steps on every rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import unidist
from unidist.errors import MismatchError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, several_processes

Seen = list[list[float]]


def seen(bench: Bench, data: Any, pick: Any = lambda batch: batch) -> Seen:
    """What this process is given, step by step, as lists of numbers; borrowed rows are left out."""
    found = []
    for batch in data:
        rows = bench.array(pick(batch)).reshape(-1).tolist()
        found.append(rows[: data.share.size])
    return found


def everyone(bench: Bench, mine: Seen) -> Seen:
    """What the whole job is given, step by step, in rank order; every rank has the same number of steps."""
    ranks = bench.everywhere(mine)
    compare.same([len(row) for row in ranks], [len(mine)] * bench.size, "the number of steps of every rank")
    return [[value for row in ranks for value in row[step]] for step in range(len(mine))]


def whole(n: int, batch: int) -> Seen:
    """The batches of one device in order."""
    return [[float(i) for i in range(begin, min(begin + batch, n))] for begin in range(0, n, batch)]


def sizes_of(bench: Bench, total: int) -> tuple[int, ...]:
    """Samples of each replica, by the rule that the first shares hold one more: as if they were dealt out one by one."""
    return tuple(len(range(total)[replica :: bench.replicas]) for replica in range(bench.replicas))


def own_part(bench: Bench, batch: list[float]) -> list[float]:
    """This process's consecutive piece of a batch."""
    sizes = sizes_of(bench, len(batch))
    first = bench.rank * bench.local_replicas
    begin = sum(sizes[:first])
    return batch[begin : begin + sum(sizes[first : first + bench.local_replicas])]


SIZES = {f"{n}-by-{b}": (n, b) for n, b in ((10, 4), (12, 4), (9, 4), (7, 3), (5, 1), (3, 8), (1, 4), (16, 8))}


@check(
    10,
    "consecutive shares of consecutive batches, none twice, none lost",
    flavours="once",
    cases=SIZES,
    few=("10-by-4", "7-by-3", "5-by-1"),
)
def partition(bench: Bench, case: tuple[int, int]) -> None:
    n, batch = case
    data = unidist.wrap_data(np.arange(float(n)), global_batch_size=batch)
    compare.same(len(data), -(-n // batch), "len(data)")
    for _ in range(2):
        mine = seen(bench, data)
        compare.same(mine, [own_part(bench, rows) for rows in whole(n, batch)], "this process's samples")
        compare.same(everyone(bench, mine), whole(n, batch), "the job's samples")


@check(10, "shares say what they are", flavours="once")
def shares(bench: Bench) -> None:
    data = unidist.wrap_data(np.arange(9.0), global_batch_size=4)
    found: list[Any] = []
    for _ in data:
        found.append(data.share)
    compare.same([share.sizes for share in found], [sizes_of(bench, k) for k in (4, 4, 1)], "the sizes by replica")
    compare.same([share.total for share in found], [4, 4, 1], "the totals")
    compare.same([share.last for share in found], [False, False, True], "which is the last")
    compare.same(unidist.data_shard(), (bench.rank, bench.size), "data_shard")


@check(10, "drop_last", flavours="once")
def drop_last(bench: Bench) -> None:
    data = unidist.wrap_data(np.arange(10.0), global_batch_size=4, drop_last=True)
    compare.same(len(data), 2, "len(data)")
    compare.same(everyone(bench, seen(bench, data)), whole(8, 4), "the job's samples")


@check(10, "per_replica_batch_size", flavours="once")
def per_replica(bench: Bench) -> None:
    n = 5 * bench.replicas
    data = unidist.wrap_data(np.arange(float(n)), per_replica_batch_size=2)
    compare.same(everyone(bench, seen(bench, data)), whole(n, 2 * bench.replicas), "the job's samples")


@check(10, "shuffled: another order each epoch, the same again, a partition in each", flavours="once", few=True)
def shuffled(bench: Bench) -> None:
    def epochs() -> list[list[float]]:
        data = unidist.wrap_data(np.arange(23.0), global_batch_size=4, shuffle=True)
        return [[value for step in everyone(bench, seen(bench, data)) for value in step] for _ in range(3)]

    first = epochs()
    for order in first:
        compare.same(sorted(order), [float(i) for i in range(23)], "the samples of an epoch")
        compare.true(order != sorted(order), "the order is shuffled")
    compare.true(first[0] != first[1] != first[2] != first[0], "each epoch has its own order")
    compare.same(epochs(), first, "the orders of the same data wrapped again")
    data = unidist.wrap_data(np.arange(23.0), global_batch_size=4, shuffle=True)
    data.set_epoch(2)
    compare.same([v for step in everyone(bench, seen(bench, data)) for v in step], first[2], "the order after set_epoch(2)")


@check(10, "state_dict: the next batch after a resume is the next", flavours="once", cases={"in-order": False, "shuffled": True})
def resume(bench: Bench, shuffle: bool) -> None:
    def fresh() -> unidist.Data:
        return unidist.wrap_data(np.arange(11.0), global_batch_size=3, shuffle=shuffle)

    straight = fresh()
    expected = [seen(bench, straight) for _ in range(3)]
    for epoch, stop in ((0, 2), (1, 4), (1, 1)):
        data = fresh()
        for _ in range(epoch):
            seen(bench, data)
        iterator = iter(data)
        for _ in range(stop):
            next(iterator)
        state = data.state_dict()
        again = fresh()
        again.load_state_dict(state)
        rest = seen(bench, again) if stop < 4 else []
        compare.same(rest, expected[epoch][stop:] if stop < 4 else [], f"the rest of epoch {epoch} after {stop} steps")
        compare.same(seen(bench, again), expected[epoch + 1], f"the epoch after {epoch}")


@check(10, "leaving an epoch early does not spoil the next", flavours="once")
def left_early(bench: Bench) -> None:
    data = unidist.wrap_data(np.arange(8.0), global_batch_size=4)
    for _ in data:
        break
    compare.same(everyone(bench, seen(bench, data)), whole(8, 4), "the next pass")


@check(10, "data that is split already: known lengths, uneven", flavours="once", few=True)
def already_sharded(bench: Bench) -> None:
    lengths = [5 if rank == 0 else 3 for rank in range(bench.size)]
    mine = np.arange(float(lengths[bench.rank])) + 100 * bench.rank
    each = 2 * bench.local_replicas
    data = unidist.wrap_data(mine, per_replica_batch_size=2, already_sharded=True)
    found = seen(bench, data)
    compare.same([v for step in found for v in step], mine.tolist(), "this process's samples")
    compare.same(len(found), -(-5 // each), "the steps, those of the longest")
    everyone(bench, found)
    compare.same(len(data), len(found), "len(data)")


@check(10, "whole data of different lengths raises on every rank", flavours="once", needs=(several_processes,))
def different_lengths(bench: Bench) -> None:
    with compare.raises(MismatchError, "already_sharded=True", "5", "6"):
        unidist.wrap_data(np.arange(5.0 + min(bench.rank, 1)), global_batch_size=2)
    with compare.raises(MismatchError, "batch size"):
        unidist.wrap_data(np.arange(6.0), global_batch_size=2 + min(bench.rank, 1))
    with compare.raises(MismatchError, "no sample"):
        unidist.wrap_data(np.arange(6.0 * min(bench.rank, 1)), per_replica_batch_size=2, already_sharded=True)
    compare.same(everyone(bench, seen(bench, unidist.wrap_data(np.arange(6.0), global_batch_size=2))), whole(6, 2), "the next data")


@check(10, "whole data of different samples raises on every rank", flavours="once", needs=(several_processes,))
def different_samples(bench: Bench) -> None:
    with compare.raises(MismatchError, "already_sharded=True", "rank 1"):
        unidist.wrap_data(np.arange(5.0) + bench.rank, global_batch_size=2)
    compare.same(everyone(bench, seen(bench, unidist.wrap_data(np.arange(6.0), global_batch_size=2))), whole(6, 2), "the next data")


@check(10, "a state of other batches: the same samples go on, or it is refused", flavours="once")
def resume_other_batches(bench: Bench) -> None:
    before = unidist.wrap_data(np.arange(16.0), global_batch_size=4, shuffle=True)
    batches = iter(before)
    drawn = [next(batches) for _ in range(3)]
    state = before.state_dict()
    after = unidist.wrap_data(np.arange(16.0), global_batch_size=2, shuffle=True)
    order = [value for step in everyone(bench, seen(bench, after)) for value in step]
    after.load_state_dict(state)
    compare.same([v for step in everyone(bench, seen(bench, after)) for v in step], order[4 * len(drawn) :], "the rest of the epoch")
    with compare.raises(ValueError, "global_batch_size=4", "3"):
        unidist.wrap_data(np.arange(16.0), global_batch_size=8, shuffle=True).load_state_dict(state)


@check(10, "no batch size is guessed", flavours="once")
def batch_size(bench: Bench) -> None:
    rows = np.arange(4.0)
    with compare.raises(ValueError, "global_batch_size", "per_replica_batch_size"):
        unidist.wrap_data(rows)
    with compare.raises(ValueError, "both"):
        unidist.wrap_data(rows, global_batch_size=2, per_replica_batch_size=1)
    for size in (0, -1, 2.5, True):
        with compare.raises(ValueError, repr(size)):
            unidist.wrap_data(rows, global_batch_size=size)  # type: ignore[arg-type]
    with compare.raises(ValueError, "rows", "3", "4"):
        unidist.wrap_data((np.arange(3.0), rows), global_batch_size=2)


class Named(NamedTuple):
    """A batch with names."""

    x: Any
    y: Any


NESTS = {
    "tuple": (lambda x, y: (x, y), lambda b: b[0], tuple),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda b: b["x"], dict),
    "nested": (lambda x, y: ({"a": x, "b": (x,)}, y), lambda b: b[0]["b"][0], tuple),
    "alone": (lambda x, y: x, lambda b: b, None),
}


@check(10, "batches keep the data's form, rows stay together, and are tensors of the framework", flavours="once", cases=NESTS)
def forms(bench: Bench, case: Any) -> None:
    make, pick, kind = case
    x = np.arange(7.0)
    data = unidist.wrap_data(make(x, x + 100), global_batch_size=3, shuffle=True)
    for batch in data:
        compare.true(kind is None or type(batch) is kind, f"a batch is a {kind}")
        compare.true(bench.is_tensor(pick(batch)), "a leaf is a tensor of the framework")
        compare.same(bench.dtype(pick(batch)), "float64", "the dtype")
        if kind is tuple:
            compare.same((bench.array(batch[1]) - bench.array(pick(batch))).tolist(), [100.0] * len(bench.array(batch[1])), "y - x")
    compare.same(sorted(v for step in everyone(bench, seen(bench, data, pick)) for v in step), x.tolist(), "the job's samples")


@check(10, "dtypes of the data are kept", flavours="once")
def kept_dtypes(bench: Bench) -> None:
    arrays = {name: np.arange(4).astype(name) for name in ("float32", "float64", "int64", "int32", "uint8", "bool")}
    for batch in unidist.wrap_data(arrays, global_batch_size=4):
        compare.same({name: bench.dtype(value) for name, value in batch.items()}, {name: name for name in arrays}, "the dtypes")


@check(10, "tensors as data", flavours="once")
def tensors(bench: Bench) -> None:
    data = unidist.wrap_data((bench.tensor(np.arange(6.0)), bench.tensor(np.arange(6))), global_batch_size=4)
    compare.same(everyone(bench, seen(bench, data, lambda b: b[0])), whole(6, 4), "the job's samples")
