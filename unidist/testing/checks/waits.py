"""Contract 9: a rank that does not come ends the wait of the others, by name, and the next operation works."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unidist
from unidist.errors import CollectiveTimeoutError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, several_processes

_PATIENCE = 0.5
_LATE = 1.0

OPERATIONS: dict[str, Callable[[Bench], Any]] = {
    "barrier": lambda bench: unidist.barrier(),
    "all_reduce": lambda bench: unidist.all_reduce(bench.tensor(np.ones(3))),
    "all_gather": lambda bench: unidist.all_gather(bench.tensor(np.ones(3))),
    "reduce_scatter": lambda bench: unidist.reduce_scatter(bench.tensor(np.ones(3))),
    "all_to_all": lambda bench: unidist.all_to_all(bench.tensor(np.ones(3))),
    "broadcast": lambda bench: unidist.broadcast(bench.tensor(np.ones(3))),
    "broadcast_object": lambda bench: unidist.broadcast_object({}),
    "all_gather_object": lambda bench: unidist.all_gather_object({}),
    "new_group": lambda bench: unidist.new_group([0]),
}


@check(9, "the message names the operation and who is missing; the late rank is told; the next works", needs=(several_processes,),
       flavours="once", cases=OPERATIONS, few=("all_reduce",))  # fmt: skip
def late_rank(bench: Bench, operation: Callable[[Bench], Any]) -> None:
    name = next(key for key, value in OPERATIONS.items() if value is operation)
    unidist.barrier()
    late = bench.size - 1
    started = time.monotonic()
    if bench.rank == late:
        time.sleep(_LATE)
    with bench.patience(_PATIENCE), compare.raises(CollectiveTimeoutError, name, f"rank {late}"):
        operation(bench)
    if bench.rank != late:
        took = time.monotonic() - started
        compare.true(_PATIENCE - 0.1 <= took < _PATIENCE + 3.0, f"the wait of {took:.2f} s is one of about {_PATIENCE} s")
    compare.same(unidist.all_reduce(1, "sum"), bench.size, "the next collective")


@check(9, "a rank that comes in time is waited for", needs=(several_processes,), flavours="once")
def slow_rank(bench: Bench) -> None:
    if bench.rank == 0:
        time.sleep(0.3)
    compare.same(bench.array(unidist.all_reduce(bench.tensor(np.ones(2)), "sum")).tolist(), [float(bench.size)] * 2, "the sum")
