"""Cases 38 to 45 and 76: data that is split, by whom, how often, and in which order."""

from __future__ import annotations

import itertools
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import unidist
from field_cases.toys import RATE, numbers, w1, weight_of
from unidist.errors import MismatchError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.checks.data import everyone, own_part, seen, whole
from unidist.testing.table import check, several_processes


def on_tensorflow(bench: Bench) -> str | None:
    """tf.data is there."""
    return None if hasattr(bench, "tf") else "tf.data is TensorFlow's"


def flat(steps: list[list[float]]) -> list[float]:
    """The samples of all steps."""
    return [value for step in steps for value in step]


def counted(n: int) -> list[float]:
    """0 to n - 1."""
    return [float(i) for i in range(n)]


def trained(bench: Bench, data: Any, *, loss: Any = None, **options: Any) -> float:
    """The toy's weight after a pass over (x, y) batches; equal on all ranks."""
    model, optimizer = w1(bench)
    step = unidist.make_train_step(model, optimizer, bench.loss("linear") if loss is None else loss, **options)
    for batch in data:
        step(batch)
    bench.equal_everywhere(model)
    return weight_of(bench, model)


def by_one_device(batches: list[list[float]]) -> float:
    """The toy's weight after a step on each batch: the gradient of mean((w x - 2 x)^2) is 2 (w - 2) mean(x^2)."""
    weight = 1.0
    for batch in batches:
        weight -= RATE * 2 * (weight - 2) * float(np.mean(np.square(batch)))
    return weight


# 38, 39: tf.data


@check(10, "one file is enough for all ranks", number=38, flavours="keras", needs=(on_tensorflow,), cases={"records": True, "lines": False})
def one_file(bench: Bench, records: bool) -> None:
    tf: Any = bench.tf  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "data")
        if records:
            with tf.io.TFRecordWriter(path) as writer:
                for number in range(10):
                    writer.write(str(number).encode())
        else:
            Path(path).write_text("".join(f"{number}\n" for number in range(10)))
        kind = tf.data.TFRecordDataset if records else tf.data.TextLineDataset
        rows = tf.data.Dataset.from_tensor_slices([path]).interleave(kind).map(lambda line: tf.strings.to_number(line, tf.float64))
        for dataset in (rows, rows.batch(4)):
            data = unidist.wrap_data(dataset, global_batch_size=4)
            for _ in range(2):
                compare.same(everyone(bench, seen(bench, data)), whole(10, 4), "the job's samples")


@check(10, "each policy of sharding gives each item once", number=39, flavours="keras", needs=(on_tensorflow,))
def policies(bench: Bench) -> None:
    """The policies are about tf.distribute's own splitting, which unidist does not use; parts are split by whoever says so."""
    tf: Any = bench.tf  # type: ignore[attr-defined]
    for policy in tf.data.experimental.AutoShardPolicy:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policy
        rows = tf.data.Dataset.range(10).with_options(options)
        data = unidist.wrap_data(rows.batch(2).with_options(options), global_batch_size=2)
        compare.same(everyone(bench, seen(bench, data)), whole(10, 2), f"the job's samples under {policy}")
    each = unidist.wrap_data(rows, per_replica_batch_size=5, already_sharded=True)
    compare.same(flat(seen(bench, each)), counted(10), "all of it on every rank, when it is said to be split")
    part = rows.shard(bench.size, bench.rank)
    if bench.size > 1:
        with compare.raises(ValueError, "tf.data.shard", "already_sharded=True"):
            unidist.wrap_data(part.batch(2), global_batch_size=2)
    split = unidist.wrap_data(part.shuffle(10), per_replica_batch_size=2, already_sharded=True)
    compare.same(sorted(flat(everyone(bench, seen(bench, split)))), counted(10), "the parts")
    dropping = unidist.wrap_data(rows.batch(4, drop_remainder=True), global_batch_size=4)
    compare.same(everyone(bench, seen(bench, dropping)), whole(8, 4), "what drop_remainder leaves")


# 40, 43: few samples


@check(10, "fewer samples than ranks", number=40, flavours="once", cases={str(n): n for n in range(3)})
def few_samples(bench: Bench, n: int) -> None:
    for drop in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data = unidist.wrap_data(np.arange(float(n)), global_batch_size=2, drop_last=drop)
        steps = n // 2 if drop else -(-n // 2)
        compare.same(len(data), steps, "len(data)")
        compare.same(any("no step at all" in str(warning.message) for warning in caught), steps == 0, "whether no step is warned of")
        compare.same(everyone(bench, seen(bench, data)), whole(n, 2)[:steps], "the job's samples")


@check(10, "a rank whose part is empty", number=40, flavours="once", needs=(several_processes,), cases={"known": True, "stream": False})
def empty_part(bench: Bench, known: bool) -> None:
    """It has no sample that could be borrowed: all ranks raise, with the lengths; the next data works."""
    mine = [float(i) for i in range(2 * (bench.rank == 0))]
    lengths = [2] + [0] * (bench.size - 1)
    with compare.raises(MismatchError, "no sample at all", "rank 1", str(lengths)):
        data = unidist.wrap_data(np.array(mine) if known else Lines(mine), per_replica_batch_size=2, already_sharded=True)
        seen(bench, data)
    compare.same(flat(everyone(bench, seen(bench, unidist.wrap_data(np.arange(3.0), global_batch_size=2)))), counted(3), "the next data")


@check(10, "all parts empty: no step, and a warning on all", number=40, flavours="once")
def nothing_at_all(bench: Bench) -> None:
    for sharded in (False, True):
        data = unidist.wrap_data(Lines([]), per_replica_batch_size=2, already_sharded=sharded)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compare.same(seen(bench, data), [], "the steps")
        compare.true(any("no step at all" in str(warning.message) for warning in caught), "no step is warned of")


@check(1, "a global batch smaller than the world", number=43, cases={"1": 1, "3": 3})
def small_batches(bench: Bench, batch: int) -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    data = unidist.wrap_data(numbers(*values), global_batch_size=batch)
    sizes = [len(values[begin : begin + batch]) for begin in range(0, 4, batch)]
    found = []
    model, optimizer = w1(bench)
    step = unidist.make_train_step(model, optimizer, bench.loss("linear"))
    for pair in data:
        found.append(sum(data.share.sizes))
        compare.true(len(bench.array(pair[0])) >= 1, "no batch is empty")
        step(pair)
    compare.same(found, sizes, "the global batches")
    bench.equal_everywhere(model)
    truth = by_one_device([values[begin : begin + batch] for begin in range(0, 4, batch)])
    bench.close(weight_of(bench, model), truth, "the weight")


@check(10, "parts that have no place in the global batch", number=43, flavours="once", needs=(several_processes,))
def no_place(bench: Bench) -> None:
    with compare.raises(ValueError, "per_replica_batch_size", "global batch of 1"):
        unidist.wrap_data(np.arange(3.0), global_batch_size=1, already_sharded=True)


# 41, 42: order and settings of loaders


def _dataset(bench: Bench, n: int) -> Any:
    torch = bench.module

    class Numbers(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return n

        def __getitem__(self, index: int) -> float:
            return float(index)

    return Numbers()


class Shuffled:
    """A user's sampler that shuffles with Python's own generator."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(self.n), self.n))


class Buckets:
    """A user's batch sampler: batches of 3, 4, 3 in a random order."""

    sizes = (3, 4, 3)

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(10).tolist()
        ends = list(itertools.accumulate(self.sizes))
        return iter([order[end - size : end] for size, end in zip(self.sizes, ends)])


class OwnState:
    """A sampler whose generator nobody else can seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(10), 10))


def _subset_sampler(torch: Any) -> Any:
    return torch.utils.data.SubsetRandomSampler(range(10))


LOADERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "shuffle": lambda torch: {"shuffle": True},
    "generator": lambda torch: {"shuffle": True, "generator": torch.Generator()},
    "subset-sampler": lambda torch: {"sampler": _subset_sampler(torch)},
    "own-sampler": lambda torch: {"sampler": Shuffled(10)},
    "batch-sampler": lambda torch: {"batch_sampler": Buckets()},
    "torch-batch-sampler": lambda torch: {"batch_sampler": torch.utils.data.BatchSampler(_subset_sampler(torch), 4, drop_last=False)},
    "workers": lambda torch: {"sampler": Shuffled(10), "num_workers": 2},
}


@check(10, "another order in each epoch, a partition, the same again", number=41, flavours="native", cases=LOADERS)
def orders(bench: Bench, options: Callable[[Any], dict[str, Any]]) -> None:
    def passes() -> tuple[Any, Callable[[], list[float]]]:
        made = options(bench.module)
        loader = bench.module.utils.data.DataLoader(_dataset(bench, 10), **made)
        data = unidist.wrap_data(loader, **({} if "batch_sampler" in made else {"global_batch_size": 4}))
        return data, lambda: flat(everyone(bench, seen(bench, data)))

    random.seed(bench.rank)
    np.random.seed(bench.rank)
    data, one_pass = passes()
    epochs = [one_pass() for _ in range(3)]
    for order in epochs:
        compare.same(sorted(order), counted(10), "the samples of an epoch")
    compare.true(epochs[0] != epochs[1] != epochs[2] != epochs[0], "each epoch has its own order")
    random.seed(100 + bench.rank)
    again, one_more = passes()
    again.load_state_dict({**data.state_dict(), "epoch": 1, "step": 1})
    first = len(epochs[1]) - len(one := one_more())
    compare.same(one, epochs[1][first:], "the rest of epoch 1 after a resume")
    compare.true(0 < first < 10, "the resume was in the middle")


@check(10, "a sampler that draws differently on each rank is told to all", number=41, flavours="native", needs=(several_processes,))
def own_state(bench: Bench) -> None:
    def wrapped(seed: int) -> Any:
        loader = bench.module.utils.data.DataLoader(_dataset(bench, 10), batch_size=4, sampler=OwnState(seed))
        return unidist.wrap_data(loader, global_batch_size=4)

    with compare.raises(MismatchError, "OwnState", "seed"):
        seen(bench, wrapped(bench.rank))
    compare.same(sorted(flat(everyone(bench, seen(bench, wrapped(5))))), counted(10), "with one seed")


class Pair(NamedTuple):
    """A batch with names."""

    x: Any
    y: Any


@dataclass
class Record:
    """A batch as a dataclass."""

    x: Any


COLLATES: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda x: (x, -x),
    "dict": lambda x: {"x": x},
    "named-tuple": lambda x: Pair(x, -x),
    "dataclass": lambda x: Record(x),
}


def _first(batch: Any) -> Any:
    if isinstance(batch, dict):
        return batch["x"]
    return batch[0] if isinstance(batch, tuple) else batch.x


@check(10, "a validation loader keeps order, settings and the type of its batches", number=42, flavours="native", cases=COLLATES)
def validation(bench: Bench, collate: Callable[[Any], Any]) -> None:
    torch = bench.module
    started: list[int] = []
    loader = torch.utils.data.DataLoader(
        _dataset(bench, 10), batch_size=4, collate_fn=lambda rows: collate(torch.tensor(rows)), drop_last=True,
        worker_init_fn=started.append, generator=torch.Generator().manual_seed(3), timeout=0,
    )  # fmt: skip
    data = unidist.wrap_data(loader, global_batch_size=4, shuffle=True)
    kinds = {type(batch) for batch in data}
    compare.same(kinds, {type(collate(1))}, "the batches' type")
    compare.same(everyone(bench, seen(bench, data, _first)), whole(8, 4), "the samples in order, without the last two")
    inner = data._feed._loader
    for name in ("collate_fn", "worker_init_fn", "generator", "num_workers", "timeout", "pin_memory"):
        compare.true(getattr(inner, name) is getattr(loader, name), f"{name} is the user's")


@check(10, "loaders of other kinds", number=42, flavours="native")
def other_loaders(bench: Bench) -> None:
    torch = bench.module.utils.data
    weighted = torch.DataLoader(_dataset(bench, 6), batch_size=3, sampler=torch.WeightedRandomSampler([0.0, 1, 1, 2, 0, 1], 9))
    drawn = flat(everyone(bench, seen(bench, unidist.wrap_data(weighted, global_batch_size=4))))
    compare.same((len(drawn), set(drawn) <= {1.0, 2.0, 3.0, 5.0}), (9, True), "the samples of the weighted sampler")
    short = torch.DataLoader(_dataset(bench, 10), sampler=torch.RandomSampler(_dataset(bench, 10), num_samples=4))
    compare.same(
        len(flat(everyone(bench, seen(bench, unidist.wrap_data(short, global_batch_size=4))))), 4, "the samples of a short sampler"
    )
    single = torch.DataLoader(_dataset(bench, 5), batch_size=None)
    with compare.raises(ValueError, "batch_size=None", "global_batch_size"):
        unidist.wrap_data(single)
    compare.same(everyone(bench, seen(bench, unidist.wrap_data(single, global_batch_size=2))), whole(5, 2), "a loader without batches")


# 44, 45: streams


class Lines:
    """An iterable that begins anew, without a length."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)


class Mixed:
    """A stream that shuffles itself with Python's and NumPy's generators."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[float]:
        order = random.sample(range(self.n), self.n)
        return iter([float(order[i]) for i in np.random.permutation(self.n)])


@check(
    10,
    "an iterable: each item once over ranks and workers",
    number=44,
    cases={"0": 0, "2": 2},
    flavours={"native": ("0", "2"), "keras": ("0",)},
)
def streams(bench: Bench, workers: int) -> None:
    """In order, and where it shuffles itself by the process's generators, which differ between ranks and workers."""
    options = {"num_workers": workers} if workers else {}
    random.seed(bench.rank)
    np.random.seed(bench.rank)
    data = unidist.wrap_data(Lines(counted(10)), global_batch_size=4, **options)
    compare.same(seen(bench, data), [own_part(bench, rows) for rows in whole(10, 4)], "this process's samples")
    mixed = unidist.wrap_data(Mixed(10), global_batch_size=4, **options)
    orders = [flat(everyone(bench, seen(bench, mixed))) for _ in range(2)]
    compare.same([sorted(order) for order in orders], [counted(10)] * 2, "the samples of two epochs")
    compare.true(orders[0] != orders[1], "each epoch has its own order")
    again = unidist.wrap_data(Mixed(10), global_batch_size=4, **options)
    again.load_state_dict({**again.state_dict(), "epoch": 1, "step": 1})
    compare.same(flat(everyone(bench, seen(bench, again))), orders[1][4:], "the rest of epoch 1 after a resume")


def _pairs(values: list[float]) -> list[Any]:
    return [(np.array([value]), np.array([2 * value])) for value in values]


PARTS = [[1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]


def uneven(bench: Bench, known: bool) -> tuple[Any, list[list[float]]]:
    """Parts of five and three samples, two at a time: the data, and the global batches. One process: one part."""
    parts = [PARTS[0], *[PARTS[1]] * (bench.size - 1)]
    mine = parts[bench.rank]
    each = 2 * bench.local_replicas
    rows = numbers(*mine) if known else Lines(_pairs(mine))
    data = unidist.wrap_data(rows, per_replica_batch_size=2, already_sharded=True)
    steps = -(-5 // each)
    return data, [[value for part in parts for value in part[step * each : (step + 1) * each]] for step in range(steps)]


@check(1, "ranks with unequal numbers of batches", number=45, cases={"known": True, "stream": False})
def unequal_batches(bench: Bench, known: bool) -> None:
    data, batches = uneven(bench, known)
    bench.close(trained(bench, data), by_one_device(batches), "the weight")


@check(3, "unequal numbers of batches in windows of two, and with a loss over tokens", number=45)
def unequal_windows(bench: Bench) -> None:
    """The window that the end of the longest part cuts short is flushed; empty shares have no token."""
    data, batches = uneven(bench, known=False)
    windows = [batches[begin] + (batches[begin + 1] if begin + 1 < len(batches) else []) for begin in range(0, len(batches), 2)]
    total = bench.loss("linear", "total")
    bench.close(trained(bench, data, loss=total, gradient_accumulation_steps=2), by_one_device(windows), "the weight")


@check(10, "whole streams that differ between ranks raise on all of them", number=45, flavours="once", needs=(several_processes,),
       cases={"early": (6, 2), "late": (150, 144)})  # fmt: skip
def whole_streams(bench: Bench, lengths: tuple[int, int]) -> None:
    data = unidist.wrap_data(Lines(counted(lengths[min(bench.rank, 1)])), global_batch_size=2)
    with compare.raises(MismatchError, "already_sharded=True"):
        seen(bench, data)
    compare.same(everyone(bench, seen(bench, unidist.wrap_data(np.arange(3.0), global_batch_size=2))), whole(3, 2), "the next data")


# 76: split by hand, then by unidist


def _by_hand(bench: Bench) -> Any:
    return np.arange(8.0)[bench.rank :: bench.size]


def _native_parts(bench: Bench) -> dict[str, Callable[[], Any]]:
    torch = bench.module.utils.data
    rows = _by_hand(bench)
    indices = list(range(8))[bench.rank :: bench.size]
    tensors = torch.TensorDataset(bench.module.from_numpy(rows))
    return {
        "tensors": lambda: tensors,
        "subset": lambda: torch.Subset(_dataset(bench, 8), indices),
        "joined": lambda: torch.ConcatDataset([torch.Subset(_dataset(bench, 8), indices)]),
        "loader": lambda: torch.DataLoader(tensors, batch_size=2),
    }


def _tf_parts(bench: Bench) -> dict[str, Callable[[], Any]]:
    tf: Any = bench.tf  # type: ignore[attr-defined]
    return {
        "tf.data": lambda: tf.data.Dataset.from_tensor_slices(_by_hand(bench)),
        "batched": lambda: tf.data.Dataset.from_tensor_slices(_by_hand(bench)).map(lambda x: x).batch(2),
        "range": lambda: tf.data.Dataset.range(bench.rank, 8, bench.size),
    }


@check(10, "data split by hand is not split again", number=76, flavours="once", needs=(several_processes,))
def split_twice(bench: Bench) -> None:
    """Parts of equal length, which lengths alone don't tell apart: refused on all ranks; with a word each item comes once."""
    parts = {
        "array": lambda: _by_hand(bench), "nest": lambda: (_by_hand(bench), _by_hand(bench)),
        "tensor": lambda: bench.tensor(_by_hand(bench)), "list": lambda: _by_hand(bench).tolist(),
        **(_tf_parts(bench) if hasattr(bench, "tf") else _native_parts(bench)),
    }  # fmt: skip
    for name, make in parts.items():
        with compare.raises(MismatchError, "already_sharded=True", "per_replica_batch_size"):
            unidist.wrap_data(make(), global_batch_size=2)
        data = unidist.wrap_data(make(), per_replica_batch_size=1, already_sharded=True)
        found = flat(everyone(bench, seen(bench, data, lambda batch: batch[0] if isinstance(batch, (tuple, list)) else batch)))
        compare.same(sorted(found), counted(8), f"the samples of {name}, each once")


@check(10, "samplers that split are refused", number=76, flavours="native", needs=(several_processes,))
def splitting_samplers(bench: Bench) -> None:
    torch = bench.module.utils.data
    split = torch.distributed.DistributedSampler(_dataset(bench, 8), bench.size, bench.rank, shuffle=False)
    loaders = [{"sampler": split}, {"batch_sampler": torch.BatchSampler(split, 2, False)}]
    for options in loaders:
        with compare.raises(ValueError, "DistributedSampler", "already_sharded=True"):
            unidist.wrap_data(torch.DataLoader(_dataset(bench, 8), **options), global_batch_size=2)
    data = unidist.wrap_data(torch.DataLoader(_dataset(bench, 8), **loaders[0]), per_replica_batch_size=2, already_sharded=True)
    compare.same(sorted(flat(everyone(bench, seen(bench, data)))), counted(8), "the samples, each once")


@check(10, "the same whole data passes, in whatever form", number=76, flavours="once")
def whole_data(bench: Bench) -> None:
    rows = [np.arange(3.0), np.array(["a", "b", "c"]) if hasattr(bench, "tf") else np.arange(3), np.arange(3.0) * np.nan, np.zeros((3, 0))]
    for one in rows:
        compare.same(len(unidist.wrap_data(one, global_batch_size=2)), 2, f"the steps of {one.dtype}{one.shape}")
    compare.same(len(unidist.wrap_data([1.0, 2.0, 3.0], global_batch_size=2)), 2, "the steps of a list")
    if not hasattr(bench, "tf"):
        for dtype in ("bfloat16", "bool", "complex64", "float16"):
            compare.same(len(unidist.wrap_data(bench.tensor(np.ones(3), dtype), global_batch_size=2)), 2, f"the steps of {dtype}")
