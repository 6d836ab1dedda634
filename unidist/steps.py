"""Training, evaluation and prediction on shares: the data, the step, and the verbs for own loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from unidist import data as data_module
from unidist.base import Backend, Step, StepOptions
from unidist.batch import Share
from unidist.context import current_backend
from unidist.data import Accumulated, Data
from unidist.errors import FrameworkMismatchError
from unidist.metrics import Mean as _Mean
from unidist.metrics import sum_over_ranks

_PRECISIONS = (None, "bf16", "fp16")


def wrap_data(
    data: Any,
    *,
    global_batch_size: int | None = None,
    per_replica_batch_size: int | None = None,
    already_sharded: bool = False,
    shuffle: bool = False,
    drop_last: bool = False,
    **loader_options: Any,
) -> Data:
    """This process's share of each global batch, on its device; build it once, each iteration is one epoch.

    data: arrays or tensors, alone or in a tuple or dict, with one sample a row; a torch Dataset, IterableDataset or
    DataLoader; a tf.data.Dataset (of samples; one that batches is cut anew); a Keras PyDataset, whose own batches are
    the global ones, so that no size is given. Every rank gives the whole data, or with already_sharded=True its own part.
    Exactly one of global_batch_size (what one device would take) and per_replica_batch_size. shuffle: another order each epoch,
    the same again from the same seed. loader_options: for the framework's loader (num_workers, collate_fn).

    Shares are consecutive pieces; the first `batch % replicas` hold one sample more. All ranks take the same
    number of steps. Every rank must call it, and iterate. Raises ValueError for no or two sizes or a stream to be shuffled,
    MismatchError when ranks hold whole data that differs in length or in the first and last rows of arrays, or a part without
    any sample, FrameworkMismatchError for the other framework's data. Warns when there is no step at all.
    """
    return data_module.make_data(
        current_backend(), data, global_batch_size=global_batch_size, per_replica_batch_size=per_replica_batch_size,
        already_sharded=already_sharded, shuffle=shuffle, drop_last=drop_last, options=loader_options,
    )  # fmt: skip


def data_shard() -> tuple[int, int]:
    """(index, count): which part of the data this process reads, for people who split it themselves."""
    world = current_backend().world
    return world.rank, world.size


def make_train_step(
    model: Any,
    optimizer: Any,
    loss: Any = None,
    *,
    compute_loss: Any = None,
    gradient_accumulation_steps: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    precision: str | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    check_every: int = 0,
) -> Step:
    """A step that trains on one batch: `step(batch)` returns the mean loss of this process's share, detached.

    model, optimizer: as wrapped. loss: a Keras loss, or a function `(outputs, targets)`; compute_loss: a function
    `(model, batch)` instead. Either returns a scalar mean over the samples, one value per sample, or (total, weight) when the loss
    is not a mean over samples. A batch is (inputs, targets) or (inputs, targets, sample_weight); inputs are a tensor, a tuple
    (positional) or a dict (keywords). gradient_accumulation_steps: batches per update; a window ends with the epoch. clip_norm,
    clip_value: bounds on the reduced gradient. precision: "bf16" or "fp16", in which the forward pass computes where that is safe, while
    weights and updates stay as they are (torch modules; Keras models have a dtype policy for it). scheduler: stepped once per update
    (torch). scaler: torch's GradScaler, set to rank 0's state; one is made for "fp16" when none is given. An update that it skips, on
    all ranks or none, is not counted and steps no scheduler.
    check_every: after every so many updates compare all replicas bit for bit, as `assert_replicas_equal` does.

    `step.mean_loss()` is the exact mean over all samples and ranks since its last call, `step.updates` the number of updates.
    """
    backend = current_backend()
    if (loss is None) == (compute_loss is None):
        raise ValueError("make_train_step takes either loss or compute_loss")
    if not (isinstance(gradient_accumulation_steps, int) and gradient_accumulation_steps >= 1):
        raise ValueError(f"gradient_accumulation_steps is a whole number of at least 1, not {gradient_accumulation_steps!r}")
    for name, bound in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if bound is not None and not bound > 0:
            raise ValueError(f"{name} is a number above 0, not {bound!r}")
    if precision not in _PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(map(repr, _PRECISIONS))}, not {precision!r}")
    if not (isinstance(check_every, int) and check_every >= 0):
        raise ValueError(f"check_every is a whole number of updates, 0 for never, not {check_every!r}")
    options = StepOptions(loss, compute_loss, gradient_accumulation_steps, clip_norm, clip_value, precision, scheduler, scaler, check_every)
    return backend._train_step(model, optimizer, options)


def backward(loss: Any, *, weight: Any = None, share: Share | None = None) -> None:
    """`loss.backward()` in an own PyTorch loop, with the share said: when it returns, every `.grad` is reduced.

    loss: a scalar mean over this process's share, one value per sample, or (total, weight). weight: how much the local mean
    counts against the other ranks' (every rank gives one; an exchange); share: `data.share`, when it isn't that of the
    batch drawn last. Raises FrameworkMismatchError on TensorFlow, where `reduce_gradients` is the verb.
    """
    backend = current_backend()
    if "backward" not in backend.abilities:
        raise FrameworkMismatchError(
            f"{backend.framework}/{backend.name} has no backward pass to call; compute gradients with tf.GradientTape and pass "
            "them to unidist.reduce_gradients, or to the wrapped optimizer's apply"
        )
    backend._backward(loss, scale=_scale(backend, weight, share, loss), weight=weight)


def reduce_gradients(gradients: Sequence[Any], *, weight: Any = None, share: Share | None = None) -> list[Any]:
    """The gradients reduced over all replicas, in an own TensorFlow loop, also inside tf.function and strategy.run.

    gradients: those of the local mean loss, None where there is none. weight, share: as for `backward`; inside a traced function say
    which, with tensors. The wrapped optimizer's `apply` then does not reduce them again.
    Raises FrameworkMismatchError on PyTorch, where they are reduced in backward.
    """
    backend = current_backend()
    if "reduce_gradients" not in backend.abilities:
        raise FrameworkMismatchError(
            f"{backend.framework}/{backend.name} reduces gradients in backward; call loss.backward() or unidist.backward(loss)"
        )
    return backend._average(gradients, scale=_scale(backend, weight, share, None), weight=weight)


def _scale(backend: Backend, weight: Any, share: Share | None, loss: Any) -> Any:
    if weight is not None and share is not None:
        raise ValueError("give weight or share, not both")
    if weight is not None and not isinstance(loss, tuple):
        return 0.0 if backend.shares.last is not None and backend.shares.last.size == 0 else None
    if isinstance(loss, tuple):  # its own weight counts, unless the sample is a borrowed one
        mine = share if share is not None else backend.shares.last
        return 0.0 if mine is not None and mine.size == 0 else None
    if share is None:
        return backend._seen_scale()
    drawn = backend.shares.current
    return drawn.scale if drawn.share is share else share.scale  # in a window a batch counts by the window's size


def accumulate(data: Iterable[Any], k: int) -> Iterator[Accumulated]:
    """Windows of k batches for own loops, one exchange each:

        for window in unidist.accumulate(data, k):
            optimizer.zero_grad()
            for batch in window: loss_fn(...).backward()
            optimizer.step()

    The gradient is that of one batch of the window's size; the loss is not divided by k. The last window of an epoch may be
    shorter. Works where gradients are exchanged in backward; otherwise use `make_train_step`.
    """
    backend = current_backend()
    if "backward" not in backend.abilities:
        raise FrameworkMismatchError(
            f"{backend.framework}/{backend.name} exchanges in the optimizer's apply; use make_train_step(gradient_accumulation_steps=k)"
        )
    if k < 1:
        raise ValueError(f"a window holds at least 1 batch, not {k!r}")
    return data_module.windows(backend, data, k)


def clip_gradients(optimizer: Any, *, max_norm: float | None = None, max_value: float | None = None) -> Any:
    """Clip the reduced gradients by their global norm or by value, between backward and step; returns the norm before.

    Every rank must call it. Raises ValueError unless exactly one bound is given.
    """
    if (max_norm is None) == (max_value is None):
        raise ValueError("clip_gradients takes either max_norm or max_value")
    return current_backend()._clip(optimizer, max_norm=max_norm, max_value=max_value)


def evaluate(model: Any, data: Iterable[Any], loss: Any = None, metrics: Mapping[str, Any] | None = None) -> dict[str, float]:
    """The exact means over all samples of all ranks of a loss and of metrics, in evaluation mode, without gradients.

    data: from `wrap_data`; every rank must call it and gets the same numbers. loss: as for `make_train_step`. metrics: name to
    a function `(outputs, targets)` with one value per sample or a scalar mean, or to a metric object of Keras, which is
    computed from the merged state of all ranks. Returns {"loss": ..., name: ...}.
    """
    backend = current_backend()
    functions = dict(metrics or {})
    sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in (["loss"] if loss is not None else []) + list(functions)}
    backend._end_of_pass()
    for batch in data:
        share = backend.shares.take()
        for name, (total, weight) in backend._evaluate_batch(model, batch, share, loss, functions).items():
            sums[name][0] += total
            sums[name][1] += weight
    flat = sum_over_ranks(backend.control, "evaluate", [value for pair in sums.values() for value in pair])
    means = {name: _ratio(flat[2 * i], flat[2 * i + 1]) for i, name in enumerate(sums)}
    for name, metric in functions.items():
        if backend._is_metric(metric):
            means[name] = backend._merge_metric(metric)
    return means


def _ratio(total: float, weight: float) -> float:
    return total / weight if weight else float("nan")


def predict(model: Any, data: Data, *, root: int | None = None) -> Any:
    """The model's outputs for all n samples, exactly n rows in the order of the data, as NumPy arrays.

    data: from `wrap_data`, not shuffled; its batches are inputs, or tuples that begin with them. Every rank must call it. root:
    give the result to that rank only, None to the others. Raises ValueError for shuffled data.
    """
    backend = current_backend()
    if not isinstance(data, Data):
        raise TypeError(f"predict takes what wrap_data returned, not {type(data).__name__}")
    if data.plan.shuffle:
        raise ValueError("predict gives outputs in the order of the data, so it takes data wrapped with shuffle=False")
    from unidist.prediction import collect

    return collect(backend, model, data, root)


def Mean() -> _Mean:
    """A running mean over all samples of all ranks: `update(value)` locally, `compute()` together. See `metrics.Mean`."""
    return _Mean(current_backend())


def gather_predictions(outputs: Any) -> Any:
    """Outputs of this process's share of the batch last drawn, as those of the whole batch on every rank.

    outputs: a nest of tensors with one row a sample; a borrowed row is dropped. Every rank must call it.
    """
    from unidist.collectives import all_gather
    from unidist.nest import map_nest

    backend = current_backend()
    share = backend.shares.seen().share
    return all_gather(map_nest(lambda rows: rows[: share.size], outputs) if share is not None else outputs)
