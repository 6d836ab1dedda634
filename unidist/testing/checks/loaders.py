"""Contract 10 with each framework's own kinds of data: data sets, loaders, streams."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import unidist
from unidist.errors import FrameworkMismatchError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.checks.data import everyone, own_part, seen, whole
from unidist.testing.table import check, several_processes


@dataclass
class Sample:
    """A batch as a dataclass."""

    x: Any
    y: Any


def _dataset(bench: Bench, n: int) -> Any:
    torch = bench.module

    class Numbers(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return n

        def __getitem__(self, index: int) -> Any:
            return {"x": float(index), "pid": os.getpid()}

    return Numbers()


def _x(batch: Any) -> Any:
    return batch["x"]


@check(10, "a Dataset through two loader workers, built once", flavours="native")
def loader_workers(bench: Bench) -> None:
    data = unidist.wrap_data(_dataset(bench, 11), global_batch_size=4, num_workers=2)
    workers: set[int] = set()

    def pick(batch: Any) -> Any:
        workers.update(bench.array(batch["pid"]).tolist())
        return batch["x"]

    for _ in range(2):
        compare.same(everyone(bench, seen(bench, data, pick)), whole(11, 4), "the job's samples")
    compare.same(len(workers), 2, "the number of worker processes over two epochs")
    compare.true(os.getpid() not in workers, "the samples came from the workers")


@check(10, "a Dataset: shuffled, resumed, collated", flavours="native")
def dataset(bench: Bench) -> None:
    torch = bench.module

    def collate(rows: list[Any]) -> Sample:
        return Sample(torch.tensor([row["x"] for row in rows]), len(rows))

    data = unidist.wrap_data(_dataset(bench, 10), global_batch_size=4, shuffle=True, collate_fn=collate)
    kinds = [type(batch) for batch in data]
    compare.same(kinds, [Sample] * 3, "the batches' class")
    orders = [[v for step in everyone(bench, seen(bench, data, lambda b: b.x)) for v in step] for _ in range(2)]
    compare.true(orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]) == [float(i) for i in range(10)], "two orders of all")
    again = unidist.wrap_data(_dataset(bench, 10), global_batch_size=4, shuffle=True)
    compare.same([v for step in everyone(bench, seen(bench, again, _x)) for v in step] != orders[0], True, "epoch 0 differs from epoch 1")
    again.load_state_dict({"epoch": 1, "step": 1, "seed": again.plan.seed})
    compare.same([v for step in everyone(bench, seen(bench, again, _x)) for v in step], orders[0][4:], "the rest of epoch 1")


@check(10, "a DataLoader keeps its order and settings; its batch size is not guessed at", flavours="native")
def data_loader(bench: Bench) -> None:
    loader_class = bench.module.utils.data.DataLoader
    with compare.raises(ValueError, "global_batch_size", "batch_size=4"):
        unidist.wrap_data(loader_class(_dataset(bench, 10), batch_size=4))
    in_order = unidist.wrap_data(loader_class(_dataset(bench, 10), batch_size=4), global_batch_size=4, shuffle=True)
    compare.same(everyone(bench, seen(bench, in_order, _x)), whole(10, 4), "a loader that does not shuffle keeps its order")
    mixed = unidist.wrap_data(loader_class(_dataset(bench, 10), batch_size=4, shuffle=True), global_batch_size=4)
    orders = [[v for step in everyone(bench, seen(bench, mixed, _x)) for v in step] for _ in range(2)]
    compare.true(orders[0] != orders[1] and sorted(orders[0]) == [float(i) for i in range(10)], "a loader that shuffles goes on to")


@check(10, "a user's sampler draws the same on every rank", flavours="native")
def sampler(bench: Bench) -> None:
    torch = bench.module
    weighted = torch.utils.data.WeightedRandomSampler([0.0, 1.0, 1.0, 2.0, 0.0, 1.0], 9)
    loader = torch.utils.data.DataLoader(_dataset(bench, 6), batch_size=3, sampler=weighted)
    data = unidist.wrap_data(loader, global_batch_size=3)
    drawn = [v for step in everyone(bench, seen(bench, data, _x)) for v in step]
    compare.same(len(drawn), 9, "the samples of an epoch")
    compare.true(set(drawn) <= {1.0, 2.0, 3.0, 5.0}, "samples of weight 0 are not drawn")


@check(
    10, "a DistributedSampler is recognised, and refused unless the data is said to be split", flavours="native", needs=(several_processes,)
)
def distributed_sampler(bench: Bench) -> None:
    torch = bench.module
    split = torch.utils.data.distributed.DistributedSampler(_dataset(bench, 9), bench.size, bench.rank, shuffle=False)
    loader = torch.utils.data.DataLoader(_dataset(bench, 9), batch_size=2, sampler=split)
    with compare.raises(ValueError, "DistributedSampler", "already_sharded=True"):
        unidist.wrap_data(loader, global_batch_size=2)
    data = unidist.wrap_data(loader, per_replica_batch_size=2, already_sharded=True)
    found = [v for step in everyone(bench, seen(bench, data, _x)) for v in step]
    compare.same(sorted(set(found)), [float(i) for i in range(9)], "the samples")


def _stream(bench: Bench, n: int, begin: int = 0) -> Any:
    torch = bench.module

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[float]:
            info = torch.utils.data.get_worker_info()
            numbers = range(begin, begin + n)
            return iter(float(i) for i in (numbers if info is None else numbers[info.id :: info.num_workers]))

    return Stream()


@check(10, "a stream of unknown length: each item once over ranks and workers", flavours="native", cases={"0-workers": 0, "2-workers": 2})
def stream(bench: Bench, workers: int) -> None:
    data = unidist.wrap_data(_stream(bench, 10), global_batch_size=4, num_workers=workers)
    with compare.raises(TypeError, "length"):
        len(data)
    for _ in range(2):
        mine = seen(bench, data)
        compare.same(mine, [own_part(bench, rows) for rows in whole(10, 4)], "this process's samples")
    with compare.raises(ValueError, "stream"):
        unidist.wrap_data(_stream(bench, 10), global_batch_size=4, shuffle=True)


@check(10, "streams that are split already end together", flavours="native", few=True, cases={"short": 5, "long": 70})
def split_stream(bench: Bench, n: int) -> None:
    """The ranks tell each other how much they have once per 32 batches; rank 0 has two more."""
    length = n + 2 * (bench.rank == 0)
    data = unidist.wrap_data(_stream(bench, length, 1000 * bench.rank), per_replica_batch_size=1, already_sharded=True)
    for _ in range(2):
        mine = seen(bench, data)
        compare.same([v for step in mine for v in step], [float(1000 * bench.rank + i) for i in range(length)], "this process's samples")
        everyone(bench, mine)


@check(10, "an endless stream can be left", flavours="native")
def endless(bench: Bench) -> None:
    torch = bench.module

    class Endless(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[float]:
            number = 0.0
            while True:
                yield number
                number += 1.0

    found = []
    for batch, _ in zip(unidist.wrap_data(Endless(), global_batch_size=2 * bench.replicas), range(3)):
        found.append(bench.array(batch).tolist())
    compare.same([v for step in everyone(bench, found) for v in step], [float(i) for i in range(6 * bench.replicas)], "the job's samples")


def _resumable(bench: Bench) -> dict[str, Callable[[], unidist.Data]]:
    """Makers of data of 11 samples in batches of 4, by the kind of what reads it."""
    if hasattr(bench, "tf"):
        rows = bench.tf.data.Dataset.range(11)
        return {
            "a data set": lambda: unidist.wrap_data(rows, global_batch_size=4, shuffle=True),
            "one of unknown length": lambda: unidist.wrap_data(rows.filter(lambda i: True), global_batch_size=4),
            "one that shuffles": lambda: unidist.wrap_data(rows.shuffle(11, seed=5), global_batch_size=4),
        }
    torch = bench.module.utils.data
    sampler = torch.WeightedRandomSampler([1.0] * 11, 11)
    return {
        "loader workers": lambda: unidist.wrap_data(_dataset(bench, 11), global_batch_size=4, shuffle=True, num_workers=2),
        "a sampler": lambda: unidist.wrap_data(torch.DataLoader(_dataset(bench, 11), sampler=sampler), global_batch_size=4),
        "a stream": lambda: unidist.wrap_data(_stream(bench, 11), global_batch_size=4),
        "a stream's workers": lambda: unidist.wrap_data(_stream(bench, 11), global_batch_size=4, num_workers=2),
    }


@check(10, "state_dict in the middle of an epoch: the next batch is the very next, whatever reads the data", flavours="once")
def resume_anywhere(bench: Bench) -> None:
    def pick(batch: Any) -> Any:
        return batch["x"] if isinstance(batch, dict) else batch

    for name, make in _resumable(bench).items():
        straight = make()
        expected = [seen(bench, straight, pick) for _ in range(3)]
        data = make()
        seen(bench, data, pick)
        batches = iter(data)
        next(batches)
        state = data.state_dict()
        del batches
        again = make()
        again.load_state_dict(state)
        compare.same([seen(bench, again, pick) for _ in range(2)], [expected[1][1:], expected[2]], f"the rest of {name}")


@check(10, "a PyDataset's own batches are the global ones", flavours="keras")
def pydataset(bench: Bench) -> None:
    keras = bench.module

    class Batches(keras.utils.PyDataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 3

        def __getitem__(self, step: int) -> Any:
            rows = np.arange(4.0 * step, min(4.0 * step + 4, 11.0))
            return rows, rows + 100

    data = unidist.wrap_data(Batches())
    compare.same(len(data), 3, "len(data)")
    for _ in range(2):
        compare.same(everyone(bench, seen(bench, data, lambda b: b[0])), whole(11, 4), "the job's samples")
    with compare.raises(ValueError, "own batches"):
        unidist.wrap_data(Batches(), global_batch_size=4)


def _has_tf(bench: Bench) -> str | None:
    return None if hasattr(bench, "tf") else "tf.data is TensorFlow's"


@check(10, "tf.data: of samples, batched, shuffled, of unknown length", flavours="keras", needs=(_has_tf,))
def tf_data(bench: Bench) -> None:
    tf: Any = bench.tf  # type: ignore[attr-defined]
    rows = tf.data.Dataset.range(10)
    for dataset in (rows, rows.batch(3), rows.batch(5).prefetch(1)):
        data = unidist.wrap_data(dataset, global_batch_size=4)
        for _ in range(2):
            compare.same(everyone(bench, seen(bench, data)), whole(10, 4), "the job's samples")
    unknown = unidist.wrap_data(rows.filter(lambda i: i < 7), global_batch_size=4)
    compare.same(everyone(bench, seen(bench, unknown)), whole(7, 4), "the samples of a filtered data set")
    pairs = unidist.wrap_data(tf.data.Dataset.from_tensor_slices((np.arange(6.0), np.arange(6))), global_batch_size=4)
    compare.same(everyone(bench, seen(bench, pairs, lambda b: b[0])), whole(6, 4), "the samples of pairs")
    split = unidist.wrap_data(rows.shard(bench.size, bench.rank), per_replica_batch_size=2, already_sharded=True)
    compare.same(sorted(v for step in everyone(bench, seen(bench, split)) for v in step), [float(i) for i in range(10)], "split data")


def _goes_on(bench: Bench, make: Any, pick: Any = lambda batch: batch) -> None:
    """Left in the second epoch after one step, new data goes on with that epoch's second step, and with the third epoch after it."""
    whole_run = make()
    epochs = [seen(bench, whole_run, pick) for _ in range(3)]
    left = make()
    seen(bench, left, pick)
    iterator = iter(left)
    next(iterator)
    state = left.state_dict()
    again = make()
    again.load_state_dict(state)
    compare.same([seen(bench, again, pick) for _ in range(2)], [epochs[1][1:], epochs[2]], "the rest")


def _by_sampler(bench: Bench) -> Any:
    data = bench.module.utils.data
    sampler = data.WeightedRandomSampler([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 10)
    return unidist.wrap_data(data.DataLoader(_dataset(bench, 6), sampler=sampler), global_batch_size=4)


def _part(bench: Bench) -> Any:
    """Split already; rank 0 has two samples more."""
    stream = _stream(bench, 5 + 2 * (bench.rank == 0), 100 * bench.rank)
    return unidist.wrap_data(stream, per_replica_batch_size=1, already_sharded=True)


TORCH_KINDS = {
    "workers": lambda bench: unidist.wrap_data(_dataset(bench, 10), global_batch_size=4, shuffle=True, num_workers=2),
    "sampler": _by_sampler,
    "stream": lambda bench: unidist.wrap_data(_stream(bench, 10), global_batch_size=4),
    "stream-by-workers": lambda bench: unidist.wrap_data(_stream(bench, 10), global_batch_size=4, num_workers=2),
    "part": _part,
}


@check(10, "torch's kinds of data go on at the very next batch", flavours="native", cases=TORCH_KINDS)
def torch_goes_on(bench: Bench, make: Any) -> None:
    _goes_on(bench, lambda: make(bench), lambda batch: batch["x"] if isinstance(batch, dict) else batch)


TF_KINDS = {
    "samples": lambda rows: rows,
    "unknown-length": lambda rows: rows.filter(lambda i: i < 9),
    "shuffled-by-itself": lambda rows: rows.shuffle(10, seed=4).batch(3),
}


@check(10, "tf.data goes on at the very next batch", flavours="keras", cases=TF_KINDS, needs=(_has_tf,))
def tf_goes_on(bench: Bench, make: Any) -> None:
    tf: Any = bench.tf  # type: ignore[attr-defined]
    _goes_on(bench, lambda: unidist.wrap_data(make(tf.data.Dataset.range(10)), global_batch_size=4))


@check(10, "a position counts in samples: another batch size goes on at the very next sample", flavours="once")
def other_batch_size(bench: Bench) -> None:
    data = unidist.wrap_data(np.arange(16.0), global_batch_size=4, shuffle=True)
    order = [value for step in everyone(bench, seen(bench, data)) for value in step]
    again = unidist.wrap_data(np.arange(16.0), global_batch_size=2, shuffle=True)
    again.load_state_dict({**data.state_dict(), "epoch": 0, "step": 1})
    compare.same([value for step in everyone(bench, seen(bench, again)) for value in step], order[4:], "the rest of the epoch")
    coarse = unidist.wrap_data(np.arange(16.0), global_batch_size=8, shuffle=True)
    with compare.raises(ValueError, "1 global batches of 4", "global_batch_size=4"):
        coarse.load_state_dict({**data.state_dict(), "epoch": 0, "step": 1})


@check(10, "data of the other framework, and what is no data, is refused", flavours="once")
def foreign_data(bench: Bench) -> None:
    with compare.raises((TypeError, FrameworkMismatchError), "int"):
        unidist.wrap_data(3, global_batch_size=2)
    with compare.raises(TypeError):
        unidist.wrap_data((), global_batch_size=2)
    with compare.raises(TypeError, "shuffel"):
        unidist.wrap_data(np.arange(4.0), global_batch_size=2, shuffel=True)
