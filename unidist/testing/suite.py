"""Launches all checks of a backend and says what came of each: what `unidist test` and the pytest suite stand on."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from unidist import registry
from unidist.errors import UnknownBackendError
from unidist.registry import Entry
from unidist.testing import outcomes
from unidist.testing.jobs import Ended, clean_environment, run_job
from unidist.testing.outcomes import FAILED, PASSED, Outcome
from unidist.testing.table import CONTRACT, Check, checks_of, select

WORKER = "unidist.testing.worker"
ALONGSIDE = 2  # jobs at a time, of those that have one check each
_EXIT = "9-exit"


def find_entry(key: str) -> Entry:
    """The backend of a key such as "torch/ddp". Raises UnknownBackendError, also where the framework has to be said."""
    found = registry.candidates(key)
    if len(found) > 1:
        raise UnknownBackendError(f"{key!r} is one of {' and '.join(entry.key for entry in found)}: say which")
    return found[0]


def check_names(key: str, n: int, only: Sequence[str] = (), catalogue: str = CONTRACT) -> list[str]:
    """The names of what `launch` reports, in its order."""
    return [check.name for check in _selected(find_entry(key), only, catalogue)] + [_EXIT]


def launch(
    key: str,
    n: int,
    folder: Path | None = None,
    timeout: float = 600.0,
    *,
    only: Sequence[str] = (),
    catalogue: str = CONTRACT,
    wait: float = 30.0,
    progress: Callable[[Outcome], None] = lambda outcome: None,
    processes: int | None = None,
) -> list[Outcome]:
    """Run the checks of a backend on n devices of this host; one outcome for each, passed only if it passed on all ranks.

    processes: that share the devices, where one process may drive several ("mirrored"). folder: keeps the workers' lines and output.
    timeout: seconds for each job. only: names of checks, numbers of points, or "few" (those that show shares and weights). catalogue:
    the package of checks, which can be imported here. wait: what the workers' `init(timeout=)` is. progress: told of each check as rank
    0 ends it.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="unidist-test-") as name:
            return launch(key, n, Path(name), timeout, only=only, catalogue=catalogue, wait=wait, progress=progress, processes=processes)
    entry = find_entry(key)
    job = _Job(entry, n, folder, timeout, wait, progress, catalogue, processes)
    chosen = _selected(entry, only, catalogue)
    apart = [check for check in chosen if check.ends_job and job.processes > 1]
    together = [check for check in chosen if check not in apart]
    with ThreadPoolExecutor(ALONGSIDE) as pool:
        found = job.run("all", together, only) if together else {}
        alone = [pool.submit(job.run, check.name, [check], [check.name]) for check in apart]
        for future in alone:
            found |= future.result()
    exits = [found.pop(name) for name in list(found) if name.startswith(_EXIT)]
    bad = [outcome for outcome in exits if not outcome.fine]
    return [found[check.name] for check in chosen] + [bad[0] if bad else exits[0]]


def _selected(entry: Entry, only: Sequence[str], catalogue: str) -> list[Check]:
    chosen = select(checks_of(entry.framework, catalogue), only, apart=True)
    if not chosen:
        raise ValueError(f"none of {', '.join(map(repr, only))} is a check of {entry.key}, the number of a point, or 'few'")
    return chosen


class _Job:
    """The launches of one backend."""

    def __init__(
        self, entry: Entry, n: int, folder: Path, timeout: float, wait: float, progress: Callable[[Outcome], None], catalogue: str,
        processes: int | None,
    ) -> None:  # fmt: skip
        self.processes = registry.num_processes(entry.name, entry.framework, n, processes)
        self._asked = processes
        self._entry, self._n, self._folder, self._timeout, self._wait, self._progress = entry, n, folder, timeout, wait, progress
        self._catalogue = catalogue

    def run(self, label: str, checks: list[Check], only: Sequence[str]) -> dict[str, Outcome]:
        """One launch of these checks: outcomes by name, and one under a name that begins with the exit's."""
        folder = self._folder / label
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self.processes):  # what an earlier launch left in a folder that is kept
            outcomes.path_of(folder, rank).unlink(missing_ok=True)
        arguments = ["--out", str(folder), "--timeout", str(self._wait), "--catalogue", self._catalogue]
        arguments += [part for name in only for part in ("--only", name)]
        ended = run_job(
            WORKER, arguments, self._n, folder=folder, timeout=self._timeout, backend=self._entry.name, framework=self._entry.framework,
            processes=self._asked, environ=_path_to(self._catalogue), watch=self._watcher(folder),
        )  # fmt: skip
        ranks = [outcomes.read(folder, rank) for rank in range(self.processes)]
        merged = outcomes.merge(ranks, {check.name: (check.point, check.title) for check in checks}, ended.words())
        found = {outcome.name: outcome for outcome in merged}
        found[f"{_EXIT} {label}"] = _exit(ended, merged)
        return found

    def _watcher(self, folder: Path) -> Callable[[], None]:
        told: set[str] = set()

        def watch() -> None:
            for name, outcome in outcomes.read(folder, 0).items():
                if name not in told and outcome.status != outcomes.STARTED:
                    told.add(name)
                    self._progress(outcome)

        return watch


def _path_to(catalogue: str) -> dict[str, str]:
    """Variables with which a worker can import the catalogue as well."""
    if catalogue == CONTRACT:
        return {}
    origin = importlib.import_module(catalogue).__file__
    assert origin is not None
    known = clean_environment(os.environ)["PYTHONPATH"]
    return {"PYTHONPATH": os.pathsep.join([str(Path(origin).parents[catalogue.count(".") + 1]), known])}


def _exit(ended: Ended, merged: list[Outcome]) -> Outcome:
    """Whether the workers ended in order; a failed check is reason enough for another code than 0."""
    title = "the workers end in order"
    if ended.code == 0 or (ended.code is not None and any(not outcome.fine for outcome in merged)):
        return Outcome(_EXIT, 9, title, PASSED)
    return Outcome(_EXIT, 9, title, FAILED, 0.0, ended.words())
