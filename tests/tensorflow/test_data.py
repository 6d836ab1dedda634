"""Feeds on TensorFlow: what each of several processes gets of every kind of data, without starting any."""

import contextlib
import os
from types import SimpleNamespace

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
import tensorflow as tf

import unidist
from unidist.nest import leaves
from unidist.plans import BatchPlan, GlobalPlan, ShardedPlan
from unidist_tf.data import read_source

# test_tf_mirrored.py may run in this process later, and devices can't be made once TensorFlow was used.
with contextlib.suppress(RuntimeError):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

BACKEND = SimpleNamespace(_batch_device=contextlib.nullcontext, world=SimpleNamespace(size=2, rank=0))


def source(data, shuffle=False, **options):
    return read_source(data, BACKEND, shuffle=shuffle, options=options)


def shares(data, batch=4, ranks=2, shuffle=False, epoch=0, start=0, drop_last=False, kind=GlobalPlan):
    """Per rank the (sizes, batch) pairs of an epoch."""
    found = []
    for rank in range(ranks):
        understood = source(data, shuffle)
        plan = kind(understood.length, batch, ranks, rank, 1, shuffle, drop_last, 7)
        found.append([(share, rows) for share, rows in understood.build(plan).iterate(epoch, start)])
    return found


def values(found):
    """Per step, all ranks' values together, without borrowed ones."""
    steps = zip(*found)
    return [[int(v) for share, rows in step for v in np.asarray(leaves(rows)[0])[: share.size].ravel()] for step in steps]


def flat(found):
    return [v for step in values(found) for v in step]


def stream():
    return tf.data.Dataset.range(10).filter(lambda x: True)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.arange(10)[index * 4 : index * 4 + 4][:, None], np.zeros(4)[: 10 - index * 4]


class Lines:
    """An iterable that begins anew and has no length."""

    def __iter__(self):
        return iter(range(10))


KINDS = {
    "array": lambda: np.arange(10),
    "tensor": lambda: tf.range(10),
    "dict": lambda: {"x": np.arange(10), "y": tf.zeros((10, 2))},
    "sequence": lambda: [np.int64(i) for i in range(10)],
    "iterable": Lines,
    "dataset": lambda: tf.data.Dataset.range(10),
    "batched": lambda: tf.data.Dataset.range(10).batch(3),
    "batched and mapped": lambda: tf.data.Dataset.range(10).batch(3).map(lambda x: x).prefetch(2),
    "padded": lambda: tf.data.Dataset.range(10).map(lambda x: tf.repeat(x, x + 1)).padded_batch(2),
    "unknown length": stream,
    "batched, unknown length": lambda: stream().batch(3),
    "zipped batches": lambda: tf.data.Dataset.zip(tf.data.Dataset.range(10).batch(3), tf.data.Dataset.range(10).batch(3)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_consecutive(kind):
    found = shares(KINDS[kind]())
    if kind == "padded":
        firsts = [[int(row[0]) for share, rows in step for row in rows.numpy()[: share.size]] for step in zip(*found)]
        assert firsts == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert found[0][1][1].shape == found[1][1][1].shape == (2, 8)  # as long as the longest of the global batch
        return
    assert values(found) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [share.sizes for share, _ in found[0]] == [(2, 2), (2, 2), (1, 1)]
    assert [share.last for share, _ in found[1]] == [False, False, True]


@pytest.mark.parametrize("kind", ["array", "dataset", "batched", "unknown length", "sequence"])
def test_empty_shares_borrow(kind):
    for found in shares(KINDS[kind](), batch=3, ranks=4):
        assert all(len(leaves(rows)[0]) == max(share.size, 1) for share, rows in found)
    assert flat(shares(KINDS[kind](), batch=3, ranks=4)) == list(range(10))


@pytest.mark.parametrize("kind", ["array", "dataset", "batched", "unknown length"])
def test_drop_last_and_resume(kind):
    assert values(shares(KINDS[kind](), drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert values(shares(KINDS[kind](), start=1)) == [[4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("kind", ["array", "dict", "dataset", "batched", "sequence"])
def test_shuffled_order_is_the_plans(kind):
    epochs = [flat(shares(KINDS[kind](), shuffle=True, epoch=epoch)) for epoch in (0, 1, 0)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] == epochs[2] != epochs[1]
    assert epochs[0] == GlobalPlan(10, 4, 2, 0, 1, True, False, 7).order(0).tolist()


def test_sharded():
    data = [tf.data.Dataset.range(5), tf.data.Dataset.range(5, 8)]
    plans = [ShardedPlan(n, 4, 2, rank, 1, False, False, 0, (5, 3)) for rank, n in enumerate((5, 3))]
    found = [list(source(d).build(plan).iterate(0, 0)) for d, plan in zip(data, plans)]
    assert values(found) == [[0, 1, 5, 6], [2, 3, 7], [4]]
    assert [share.sizes for share, _ in found[1]] == [(2, 2), (2, 1), (1, 0)]


def test_pydataset_makes_its_own_batches():
    assert source(Batches()).own_batches
    assert values(shares(Batches(), kind=BatchPlan, batch=1)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_lengths():
    dropped = tf.data.Dataset.range(10).batch(3, drop_remainder=True)
    assert (source(dropped).length, source(dropped).drop_last) == (10, True)
    mapped = source(dropped.map(lambda x: x))
    assert (mapped.length, mapped.drop_last) == (9, True)
    assert "(3)" in source(tf.data.Dataset.range(10).batch(3)).hint
    assert source(tf.data.Dataset.range(10).batch(3).take(2)).length is None
    assert source(tf.data.Dataset.range(10).batch(3).unbatch()).length is None
    assert source(tf.data.Dataset.range(4).repeat()).length is None


def test_dtypes_stay():
    (pairs,) = shares({"a": np.zeros(2, "float64"), "b": np.zeros(2, "uint8"), "c": np.array(["x", "y"])}, ranks=1)
    assert [leaf.dtype.name for leaf in leaves(pairs[0][1])] == ["float64", "uint8", "string"]


def test_split_data_is_recognised():
    assert source(tf.data.Dataset.range(10).shard(2, 0).batch(2)).split == "tf.data.shard"
    assert source(tf.data.Dataset.range(10)).split == ""


def test_orders_that_differ_between_ranks_are_refused():
    """Where each rank reads the whole; parts may be shuffled as they like."""
    assert "shuffles without a seed" in source(tf.data.Dataset.range(10).shuffle(10).batch(2)).unordered
    assert source(tf.data.Dataset.range(10).shuffle(10, seed=1)).unordered == ""


def test_a_dataset_that_shuffles_resumes_in_the_order_of_its_epoch():
    def rows():
        return tf.data.Dataset.range(10).shuffle(10, seed=3)

    feed = source(rows()).build(GlobalPlan(10, 4, 1, 0, 1, False, False, 7))
    straight = [[int(v) for _, batch in feed.iterate(epoch, 0) for v in batch] for epoch in range(3)]
    assert straight[0] != straight[1] != straight[2]
    resumed = source(rows()).build(GlobalPlan(10, 4, 1, 0, 1, False, False, 7)).iterate(2, 1)
    assert [int(v) for _, batch in resumed for v in batch] == straight[2][4:]


def test_content_tells_other_samples_apart():
    one, other = np.arange(10.0), np.arange(10.0) + 1
    makes = [lambda x: x, lambda x: (x, x), tf.constant, tf.data.Dataset.from_tensor_slices, list,
             lambda x: tf.data.Dataset.range(int(x[0]), 10 + int(x[0])).batch(2)]  # fmt: skip
    for make in makes:
        first, again, second = (source(make(values)).content() for values in (one, one, other))
        assert first == again != second
    assert source(tf.data.Dataset.from_generator(lambda: iter([1.0]), tf.float64)).content() is None
    assert source(tf.ragged.constant([[1], [2, 3]])).content() != source(tf.ragged.constant([[1], [2, 4]])).content()
    assert source(np.array([1, "a"], object)).content() is not None


def test_wrong_data():
    with pytest.raises(ValueError, match=r"different numbers of rows: \[2, 3\]"):
        source((np.zeros(2), np.zeros(3)))
    with pytest.raises(TypeError, match="mean nothing on TensorFlow"):
        source(np.zeros(2), num_workers=2)
    with pytest.raises(TypeError, match="can't read a int"):
        source(3)
    foreign = type("Dataset", (), {"__module__": "torch.utils.data"})()
    with pytest.raises(unidist.FrameworkMismatchError, match="is torch's"):
        source(foreign)


def test_a_generator_lasts_for_one_epoch():
    feed = source(iter(range(4))).build(GlobalPlan(None, 4, 1, 0, 1, False, False, 0))
    assert len(list(feed.iterate(0, 0))) == 1
    with pytest.raises(ValueError, match="read once"):
        list(feed.iterate(1, 0))
