"""Plays draws on a backend, on every rank alike, and compares with one device; runs in the ranks of a job."""

from __future__ import annotations

import base64
import importlib
import os
import pickle
import traceback
from typing import Any

import numpy as np
from fuzz_draws import Draw, draws, truth
from hypothesis import HealthCheck, Phase, given, seed, settings

import unidist
from unidist.context import current_backend
from unidist.testing.bench import Bench
from unidist.testing.worker import _BENCHES


def play(bench: Bench, draw: Draw) -> None:
    """Train as drawn; weights, losses and norms are those of one device."""
    freeze = () if draw.frozen is None else (str(draw.frozen),)
    model = bench.model(draw.network, draw.weights(), freeze=freeze)
    optimizer = bench.optimizer(draw.optimizer, model, rate=draw.rate, **draw.settings())
    found = _fit(bench, draw, model, optimizer) if draw.loop == "fit" else _train(bench, draw, model, optimizer)
    losses, norms, orders = found
    expected = truth(draw, bench.formula, bench.clip_epsilon, orders, bench.replicas)
    bench.close(bench.weights(model), expected.weights, "weight")
    if losses:
        there = [index for index, loss in enumerate(expected.losses) if not np.isnan(loss)]
        bench.close(np.array(losses)[there], np.array(expected.losses)[there], "the epochs' losses")
    if norms:
        bench.close(np.array(norms), np.array(expected.norms), "the norms before clipping")
    bench.equal_everywhere(model)


def _arrays(draw: Draw, rank: int) -> tuple[Any, ...]:
    samples = draw.data()
    begin = sum(draw.parts[:rank])
    rows = slice(begin, begin + draw.parts[rank]) if draw.parts else slice(None)
    return tuple(a[rows] for a in (samples.inputs, samples.targets, samples.sample_weight) if a is not None)


class _Samples:
    """A sequence of samples, each a tuple."""

    def __init__(self, arrays: tuple[Any, ...]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if index >= len(self):
            raise IndexError(index)
        return tuple(array[index] for array in self._arrays)


class _Stream:
    """The same without a length."""

    def __init__(self, samples: _Samples) -> None:
        self._samples = samples

    def __iter__(self) -> Any:
        return iter([self._samples[index] for index in range(len(self._samples))])


def _source(bench: Bench, draw: Draw) -> Any:
    arrays = _arrays(draw, bench.rank)
    if draw.source == "arrays":
        return arrays
    if unidist.framework() == "tensorflow":
        import tensorflow as tf

        made = tf.data.Dataset.from_tensor_slices(arrays)
        return made if draw.source == "dataset" else made.filter(lambda *sample: True)
    samples = _Samples(arrays)
    return samples if draw.source == "dataset" else _Stream(samples)


def _train(bench: Bench, draw: Draw, model: Any, optimizer: Any) -> tuple[list[float], list[float], list[Any]]:
    data = unidist.wrap_data(
        _source(bench, draw), global_batch_size=draw.batch, shuffle=draw.shuffle, drop_last=draw.drop_last,
        already_sharded=bool(draw.parts),
    )  # fmt: skip
    loop = {"step": _steps, "own": _own, "said": _own, "weight": _own, "traced": _traced}[draw.loop]
    losses, norms = loop(bench, draw, model, optimizer, data)
    straight = np.arange(len(draw.data()))
    return losses, norms, [data.plan.order(epoch) if draw.shuffle else straight for epoch in range(draw.epochs)]


def _steps(bench: Bench, draw: Draw, model: Any, optimizer: Any, data: Any) -> tuple[list[float], list[float]]:
    bounds = {f"clip_{kind}": bound for kind, bound in ([draw.clip] if draw.clip else [])}
    step = unidist.make_train_step(
        model, optimizer, bench.loss(draw.network.name, draw.form), gradient_accumulation_steps=draw.accumulation, check_every=2, **bounds
    )
    losses, norms = [], []
    for _ in range(draw.epochs):
        for batch in data:
            before = step.updates
            step(batch)
            if step.updates > before and "clip_norm" in bounds:
                norms.append(float(bench.array(step.last_norm)))
        losses.append(step.mean_loss())
    return losses, norms


def _own(bench: Bench, draw: Draw, model: Any, optimizer: Any, data: Any) -> tuple[list[float], list[float]]:
    loss, norms = bench.loss(draw.network.name, draw.form), []
    for _ in range(draw.epochs):
        for window in unidist.accumulate(data, draw.accumulation):
            optimizer.zero_grad()
            for x, y in window:
                value = loss(model(x), y)
                if draw.loop == "said":
                    unidist.backward(value)
                elif draw.loop == "weight":
                    unidist.backward(value, weight=data.share.size)
                else:
                    value.backward()
            if draw.clip:
                norm = unidist.clip_gradients(optimizer, **{f"max_{draw.clip[0]}": draw.clip[1]})
                norms.append(float(bench.array(norm)))
            optimizer.step()
    return [], norms


def _traced(bench: Bench, draw: Draw, model: Any, optimizer: Any, data: Any) -> tuple[list[float], list[float]]:
    step = bench.own_step(model, optimizer, bench.loss(draw.network.name, "mean"), reduce=True)
    for _ in range(draw.epochs):
        for x, y in data:
            step(x, y, data.share)
    return [], []


def _fit(bench: Bench, draw: Draw, model: Any, optimizer: Any) -> tuple[list[float], list[float], list[Any]]:
    samples = draw.data()
    with unidist.scope():
        model.compile(optimizer, bench.loss(draw.network.name, "object"))
    history = model.fit(
        samples.inputs, samples.targets, sample_weight=samples.sample_weight, batch_size=draw.batch, epochs=draw.epochs, shuffle=False,
        verbose=0,
    )  # fmt: skip
    return list(history.history["loss"]), [], [np.arange(len(samples))] * draw.epochs


def job(count: int, first_seed: int) -> int:
    """On every rank: `count` draws, which rank 0 makes and the others are told. Raises AssertionError with the smallest draw that fails."""
    unidist.init(timeout=30, seed=7)
    framework = unidist.framework()
    benches = {}
    for flavour in ("native", "keras"):
        if (framework, flavour) in _BENCHES:
            module, _, name = _BENCHES[framework, flavour].partition(":")
            benches[flavour] = getattr(importlib.import_module(module), name)(current_backend())
    if unidist.rank() != 0:
        while _play_told(benches):
            pass
        return 0
    played = []
    dead = []

    @seed(first_seed)
    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False,
        phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(draws(framework, unidist.num_replicas(), unidist.world_size()))
    def test(draw: Draw) -> None:
        if dead:
            raise dead[0]
        played.append(draw)
        try:
            _everywhere(benches, draw)
        except Lost as error:
            dead.append(error)
            raise

    try:
        test()
    finally:
        if not dead:
            _tell(None)
    return len(played)


class Lost(Exception):
    """The ranks did not find each other again after a draw."""


def _tell(draw: Draw | None) -> Draw | None:
    """Rank 0's draw on all ranks."""
    text = base64.b64encode(pickle.dumps(draw)).decode() if unidist.rank() == 0 else None
    told: Draw | None = pickle.loads(base64.b64decode(current_backend().control.broadcast("the next draw", text)))
    return told


def _everywhere(benches: dict[str, Any], draw: Draw) -> None:
    """Play it on all ranks; raises on rank 0 what went wrong anywhere."""
    _tell(draw)
    failed = [row for row in _outcomes(benches, draw) if row]
    if failed:
        raise AssertionError("\n".join([repr(draw), *failed]))


def _play_told(benches: dict[str, Any]) -> bool:
    draw = _tell(None)
    if draw is None:
        return False
    _outcomes(benches, draw)
    return True


def _outcomes(benches: dict[str, Any], draw: Draw) -> list[str]:
    """What went wrong on each rank, "" for nothing."""
    text = ""
    try:
        play(benches[draw.flavour], draw)
    except Exception:
        text = f"on rank {unidist.rank()}: {traceback.format_exc(limit=-5)}"
        if os.environ.get("UNIDIST_FUZZ_LOUD"):
            print(repr(draw), text, flush=True)
    current_backend().shares.clear()
    try:
        return current_backend().control.gather("the end of a draw", text)
    except Exception as error:
        raise Lost(f"{draw!r}\n{text or 'this rank was fine'}\n{error}") from error
