"""The program of each worker: runs all checks of a backend in one order, and writes a line for each as it goes.

unidist run -n 2 --backend ddp --framework torch -m unidist.testing.worker --out DIR
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import time
import traceback
from pathlib import Path

import unidist
from unidist import frameworks
from unidist.context import current, current_backend
from unidist.errors import CollectiveTimeoutError, MismatchError, NotInitializedError, PeerFailedError, UnsupportedError
from unidist.testing import outcomes
from unidist.testing.bench import Bench
from unidist.testing.outcomes import Outcome
from unidist.testing.table import CONTRACT, Check, checks_of, select

_BENCHES = {
    ("torch", "native"): "unidist.testing.torch_bench:TorchBench",
    ("torch", "keras"): "unidist.testing.keras_bench:KerasBench",
    ("tensorflow", "keras"): "unidist.testing.tf_bench:TFBench",
}
_PATIENCE = 2  # waits for a rank that does not come, each as long as the workers' own
_ROUNDS = 20  # in which the ranks find each other again after a check that failed on some


class Worker:
    """This rank's run over the checks."""

    def __init__(self, folder: Path) -> None:
        backend = current_backend()
        self._framework, self._rank, self._timeout = backend.framework, backend.world.rank, backend.settings.timeout
        self._refuses = dict(backend.refuses)
        self._folder = folder
        self._benches: dict[str, Bench | str] = {}

    def run(self, checks: list[Check]) -> bool:
        """Run all, as long as all ranks come along; whether none failed here."""
        fine = True
        for check in checks:
            self._write(check, outcomes.STARTED)
            self._prepare(check.flavour)
            started = time.perf_counter()
            status, message = self._run(check)
            seconds = time.perf_counter() - started
            met = [status] if check.ends_job else self._meet(check, status)
            if not met:
                status, message = outcomes.FAILED, message or "the other ranks did not come to the end of this check"
            self._write(check, status, seconds, message)
            fine = fine and status != outcomes.FAILED
            if not met:
                return False
            self._clean(again=outcomes.FAILED in met and not check.ends_job)
        return fine

    def _run(self, check: Check) -> tuple[str, str]:
        bench = self._benches[check.flavour]
        obstacle = bench if isinstance(bench, str) else check.obstacle(bench)
        if obstacle is not None:
            return outcomes.NOT_APPLICABLE, obstacle
        reason = self._refuses.get(check.point) if check.refusable else None
        try:
            check.function(bench)
        except UnsupportedError as error:
            if reason is not None and reason in str(error):
                return outcomes.REFUSED, str(error)
            return outcomes.FAILED, _short(error)
        except Exception as error:  # the next check is to run whatever this one met
            return outcomes.FAILED, _short(error)
        if reason is not None:
            return outcomes.FAILED, f"the backend declares that it refuses this point ({reason}), but no UnsupportedError came"
        return outcomes.PASSED, ""

    def _prepare(self, flavour: str) -> None:
        """The flavour's bench, on the backend that runs now."""
        if flavour not in self._benches:
            self._benches[flavour] = self._make_bench(flavour)
        bench = self._benches[flavour]
        if not isinstance(bench, str):
            bench.rejoin(current_backend())

    def _make_bench(self, flavour: str) -> Bench | str:
        if flavour == "keras" and not frameworks.is_installed("keras"):
            return "Keras is not installed"
        module, _, name = _BENCHES[self._framework, flavour].partition(":")
        bench: Bench = getattr(importlib.import_module(module), name)(current_backend())
        gc.collect()
        gc.freeze()  # a collection after each check then looks at what the check left, and at nothing else
        return bench

    def _meet(self, check: Check, status: str) -> list[str]:
        """Every rank's status, when all have ended this check; ranks that are elsewhere get an error there, and come then."""
        timed_out = 0
        for _ in range(_ROUNDS):
            try:
                return current_backend().control.gather(f"the end of check {check.name}", status, timeout=self._timeout)
            except MismatchError:
                continue
            except CollectiveTimeoutError:  # also when this rank was late itself, and the others have come here since
                timed_out += 1
            except (PeerFailedError, NotInitializedError):
                break
            if timed_out == _PATIENCE:
                break
        return []

    @staticmethod
    def _clean(again: bool) -> None:
        """Forget what the check left; after a failure the engine may be broken, so that all join anew."""
        current_backend().shares.clear()
        gc.collect()
        if again:
            request = dict(current()._request)
            unidist.shutdown()
            unidist.init(**request)

    def _write(self, check: Check, status: str, seconds: float = 0.0, message: str = "") -> None:
        outcome = Outcome(check.name, check.point, check.title, status, round(seconds, 4), message)
        outcomes.write(self._folder, self._rank, outcome)


def _short(error: BaseException) -> str:
    """The error, and the last lines of where it came from."""
    lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-6)
    return "".join(lines).rstrip()


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="folder for the lines")
    parser.add_argument("--only", action="append", default=[], help="a check's name, a point's number, or few")
    parser.add_argument("--catalogue", default=CONTRACT, help="the package of checks")
    parser.add_argument("--timeout", type=float, default=30.0)
    arguments = parser.parse_args()
    unidist.init(timeout=arguments.timeout, seed=7)
    checks = select(checks_of(unidist.framework(), arguments.catalogue), arguments.only, apart=unidist.world_size() == 1)
    fine = Worker(arguments.out).run(checks)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
