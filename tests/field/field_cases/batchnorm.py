"""Cases 23 to 26: BatchNorm and buffers."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_backward, several_processes


def _net(bench: Bench, **options: Any) -> Any:
    """BatchNorm over two features, whose statistics are the last batch's, between layers of ones."""
    with unidist.scope():
        return unidist.wrap_model(bench.normalised(2, 0.0), **options)


@check(6, "two forward passes through a net with BatchNorm, one backward", number=23, flavours="native", needs=(exchanges_in_backward,),
       cases={"own": False, "synchronised": True})  # fmt: skip
def two_passes(bench: Bench, synchronised: bool) -> None:
    model = _net(bench, sync_batchnorm=synchronised)
    optimizer = bench.optimizer("plain", model, rate=0.125)
    generator = np.random.default_rng(bench.rank)
    for _ in range(2):
        a, b = (bench.tensor(generator.standard_normal((4, 2))) for _ in range(2))
        optimizer.zero_grad()
        (model(a).square().mean() + model(b).square().mean()).backward()
        optimizer.step()
    unidist.assert_replicas_equal(optimizer)
    compare.same(len(set(bench.everywhere(bench.array(model[0].weight).tobytes()))), 1, "the number of different weights")


@check(6, "running statistics: rank 0's on all ranks after the pass; over the batch when synchronised", number=24,
       cases={"own": False, "synchronised": True})  # fmt: skip
def statistics(bench: Bench, synchronised: bool) -> None:
    """{0, 2} on the first replica, {10, 12} on the second, and so on."""
    model = _net(bench, sync_batchnorm=synchronised)
    rows = np.repeat(np.concatenate([[10.0 * r, 10.0 * r + 2.0] for r in range(bench.replicas)]), 2).reshape(-1, 2)
    step = unidist.make_train_step(model, bench.optimizer("plain", model, rate=0.0), bench.loss("linear", "object"))
    for batch in unidist.wrap_data((rows, np.ones((len(rows), 1))), global_batch_size=len(rows)):
        step(batch)
    counted = rows if synchronised else rows[:2]
    variance = counted.var(0, ddof=1 if bench.unbiased() else 0)
    kept = {name: np.array(value) for name, value in unidist.get_weights(model).items()}  # as it would be saved
    for found, expected in zip(bench.statistics(model), (counted.mean(0), variance)):
        bench.close(found, expected, "a running statistic", tolerance=max(bench.tolerance, 1e-9))
        compare.true(any(np.array_equal(np.asarray(found), value) for value in kept.values()), "what is saved is what is in memory")
    unidist.assert_replicas_equal(model)


@check(
    6, "synchronised BatchNorm runs on CPUs, and can be turned back for inference", number=25, flavours="native", needs=(several_processes,)
)
def on_cpus(bench: Bench) -> None:
    torch = bench.module
    model = _net(bench, sync_batchnorm=True)
    rows = bench.tensor(np.random.default_rng(7).standard_normal((4, 2)))
    model(rows).sum().backward()
    model.eval()
    bare = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.BatchNorm1d(2, eps=2.0**-10), torch.nn.Linear(2, 1, bias=False))
    bare.double().load_state_dict(model.state_dict())
    bare.eval()
    bench.close(bench.array(model(rows)), bench.array(bare(rows)), "the outputs of a bare model with the same state")


DTYPES = ("bool", "int16", "uint8", "int64", "float16", "bfloat16", "complex64")


@check(2, "buffers of any dtype, and a frozen integer parameter, are rank 0's, exactly", number=26, flavours="native",
       cases={dtype: dtype for dtype in DTYPES})  # fmt: skip
def buffers(bench: Bench, dtype: str) -> None:
    torch = bench.module
    values = [np.array([[1, 0, rank % 2], [0, 1, 1]]) for rank in range(max(bench.size, 2))]
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", bench.tensor(values[bench.rank], dtype))
    model.register_parameter("codes", torch.nn.Parameter(bench.tensor(values[bench.rank], "int32"), requires_grad=False))
    unidist.wrap_model(model)
    compare.same(bench.dtype(model.mask), dtype, "the buffer's dtype")
    compare.true(bool((model.mask == bench.tensor(values[0], dtype)).all()), "the buffer is rank 0's")
    compare.same(bench.array(model.codes), values[0].astype(np.int32), "the codes")
    with torch.no_grad():
        model.mask.copy_(bench.tensor(values[(bench.rank + 1) % bench.size], dtype))
    unidist.broadcast(model, root=bench.size - 1)
    compare.true(bool((model.mask == bench.tensor(values[0], dtype)).all()), "the buffer is the last rank's")
