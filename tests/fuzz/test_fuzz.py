"""Random networks, losses, batches, windows and clippings train as on one device, on every backend; `make fuzz` draws more of them."""

import os
from collections.abc import Callable

import pytest
from fuzz_play import job

from unidist.testing import run

DRAWS = int(os.environ.get("UNIDIST_FUZZ_DRAWS", "10"))
SEED = int(os.environ.get("UNIDIST_FUZZ_SEED", "1"))
JOBS = [
    ("torch", "local", 1), ("torch", "ddp", 2), ("torch", "ddp", 3), ("torch", "horovod", 2), ("torch", "horovod", 3),
    ("tensorflow", "local", 1), ("tensorflow", "mirrored", 2), ("tensorflow", "mirrored", 3), ("tensorflow", "horovod", 2),
    ("tensorflow", "horovod", 3),
]  # fmt: skip


@pytest.mark.parametrize("framework, backend, n", JOBS)
def test_draws(framework: str, backend: str, n: int, record_property: Callable[[str, object], None]) -> None:
    played = run(job, n, backend=backend, framework=framework, args=(DRAWS, SEED), timeout=120 + 5 * DRAWS)
    record_property("draws", played[0])
    assert played[0] == DRAWS
