"""The control plane with real processes: rounds, errors on every rank, deaths, the watchdog, forks, strangers at the port."""

import itertools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from unidist import meeting
from unidist.control import Control, connect
from unidist.control_server import Server
from unidist.errors import CollectiveTimeoutError, LaunchError, MismatchError, NotInitializedError, PeerFailedError
from unidist.wire import Stream, encode
from unidist.world import World, read_world

_jobs = itertools.count()
_fork = multiprocessing.get_context("fork")
Body = Callable[[Control], Any]


class Ranks:
    """Forked workers that meet as under mpirun; each sends what its body returned, or the error that it raised."""

    def __init__(self, size: int, body: Body, *, timeout: float = 3.0, grace: float = 5.0, present: int | None = None) -> None:
        job, self.stderr = f"test-{os.getpid()}-{next(_jobs)}", tempfile.TemporaryFile()
        self.workers: list[tuple[Any, Connection]] = []
        for rank in range(size if present is None else present):
            here, there = _fork.Pipe(duplex=False)
            process = _fork.Process(target=self._work, args=(rank, size, job, body, timeout, grace, there))
            process.start()
            there.close()
            self.workers.append((process, here))

    def _work(self, rank: int, size: int, job: str, body: Body, timeout: float, grace: float, answer: Connection) -> None:
        os.dup2(self.stderr.fileno(), 2)
        environ = {"PMIX_NAMESPACE": job} | {
            f"OMPI_COMM_WORLD_{name}": str(number)
            for name, number in (("RANK", rank), ("SIZE", size), ("LOCAL_RANK", rank), ("LOCAL_SIZE", size))
        }
        try:
            control = connect(read_world(environ), environ, timeout, grace=grace)
            answer.send(body(control))
            control.close()
        except Exception as error:
            answer.send(error)

    def results(self, seconds: float = 15.0) -> list[Any]:
        """What the ranks sent; a rank that sent nothing counts with its exit code, as a tuple."""
        end, found = time.monotonic() + seconds, []
        for process, answer in self.workers:
            process.join(max(end - time.monotonic(), 0.1))
            if process.is_alive():
                process.kill()
                pytest.fail(f"rank {len(found)} did not end")
            try:
                found.append(answer.recv())
            except EOFError:
                found.append(("exit", process.exitcode))
        return found

    def said(self) -> str:
        self.stderr.seek(0)
        return self.stderr.read().decode()


def run(size: int, body: Body, **options: Any) -> list[Any]:
    return Ranks(size, body, **options).results()


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returned or raised."""
    try:
        return call()
    except Exception as error:
        return error


def test_rounds_and_store() -> None:
    def body(control: Control) -> list[Any]:
        if control.rank == 2:
            control.set("key", "välue")
        return [
            control.gather("all_reduce", f"of {control.rank}"),
            control.broadcast("broadcast", "from 1" if control.rank == 1 else None, root=1),
            control.get("key", 3.0),
            control.hosts,
            control.rank_0_host,
        ]

    host = socket.gethostname()
    assert run(3, body) == [[["of 0", "of 1", "of 2"], "from 1", "välue", [host] * 3, "127.0.0.1"]] * 3


def test_alone_answers_at_once() -> None:
    control = connect(World(), {}, 1.0)
    control.set("key", "value")
    with control.waiting("nothing"):
        assert (control.gather("x", "y"), control.broadcast("x", "y"), control.get("key", 0.0)) == (["y"], "y", "value")
    assert control.failures() == {}
    with pytest.raises(CollectiveTimeoutError, match="'other'"):
        control.get("other", 0.0)
    control.fail("nobody hears it")
    control.close()
    control.close()


def test_different_operations_raise_on_all_ranks_and_the_next_round_works() -> None:
    def body(control: Control) -> Any:
        first = outcome(lambda: control.gather("broadcast" if control.rank == 1 else "all_reduce", ""))
        return first, control.gather("next", str(control.rank))

    for error, after in run(3, body):
        assert isinstance(error, MismatchError)
        assert "ranks 0, 2 called all_reduce, rank 1 broadcast" in str(error)
        assert after == ["0", "1", "2"]


def test_rounds_among_some_ranks_go_on_beside_the_others() -> None:
    def body(control: Control) -> Any:
        rounds = range(3) if control.rank != 1 else ()
        found = [control.gather("all_reduce", f"{number} of {control.rank}", ranks=[0, 2]) for number in rounds]
        return found, control.gather("all", str(control.rank))

    among = [[f"{number} of 0", f"{number} of 2"] for number in range(3)]
    everyone = ["0", "1", "2"]
    assert run(3, body) == [(among, everyone), ([], everyone), (among, everyone)]


def test_a_rank_missing_among_some_is_named_with_where_it_is() -> None:
    def body(control: Control) -> Any:
        if control.rank == 2:
            return outcome(lambda: control.gather("barrier", "", timeout=1.5)), None
        if control.rank == 0:
            first = outcome(lambda: control.gather("all_reduce", "", timeout=0.4, ranks=[0, 2]))
            return first, outcome(lambda: control.gather("barrier", ""))
        return outcome(lambda: control.gather("barrier", "", timeout=1.5)), None

    (error, after), *others = run(3, body)
    assert isinstance(error, CollectiveTimeoutError)
    assert "all_reduce" in str(error) and "rank 0 came, rank 2 did not (rank 2 is in barrier)" in str(error)
    assert after == ["", "", ""] and [one for one, _ in others] == [after, after]


def test_a_failed_rank_ends_rounds_that_it_is_not_in() -> None:
    def body(control: Control) -> Any:
        if control.rank == 1:
            time.sleep(0.3)
            control.fail("it broke")
            return None
        if control.rank == 0:
            return outcome(lambda: control.gather("all_reduce", "", timeout=20.0, ranks=[0, 2]))
        time.sleep(0.6)
        return outcome(lambda: control.gather("all_reduce", "", timeout=20.0, ranks=[0, 2]))

    first, _, late = run(3, body)
    assert isinstance(first, PeerFailedError) and isinstance(late, PeerFailedError)
    assert "rank 1 failed" in str(first) and "it broke" in str(late)


def test_a_rank_that_ended_does_not_end_rounds_without_it() -> None:
    def body(control: Control) -> Any:
        if control.rank == 1:
            return None
        time.sleep(0.3 * control.rank)
        return control.gather("all_reduce", str(control.rank), ranks=[0, 2])

    assert run(3, body) == [["0", "2"], None, ["0", "2"]]


def test_a_late_rank_raises_too_and_the_next_round_works() -> None:
    def body(control: Control) -> Any:
        if control.rank == 1:
            time.sleep(1.2)
        start = time.monotonic()
        first = outcome(lambda: control.gather("all_reduce", "old", timeout=0.5))
        return first, time.monotonic() - start, control.gather("next", f"new {control.rank}")

    (early, waited, after), (late, at_once, after_late) = run(2, body)
    assert isinstance(early, CollectiveTimeoutError) and isinstance(late, CollectiveTimeoutError)
    assert "all_reduce" in str(early) and "rank 0 came, rank 1 did not" in str(early)
    assert "rank 1 came to all_reduce when the others had given up" in str(late)
    assert 0.4 < waited < 1.1 and at_once < 0.5
    assert after == after_late == ["new 0", "new 1"]


def test_a_posted_failure_ends_the_others_waits_at_once() -> None:
    def body(control: Control) -> Any:
        if control.rank == 1:
            time.sleep(0.3)
            control.fail("ValueError: boom")
            return "posted"
        start = time.monotonic()
        waits = outcome(lambda: control.gather("all_reduce", "")), outcome(lambda: control.get("key", 60.0))
        return *waits, outcome(lambda: control.gather("again", "")), time.monotonic() - start, control.failures()

    (first, get, again, seconds, known), posted = run(2, body, timeout=60.0)
    assert posted == "posted"
    for error in (first, get, again):
        assert isinstance(error, PeerFailedError) and "rank 1" in str(error) and "ValueError: boom" in str(error)
    assert "all_reduce" in str(first) and "'key'" in str(get)
    assert seconds < 2.0
    assert known == {1: "ValueError: boom"}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_noticed_at_once(victim: int) -> None:
    """Also while a child that it forked, such as a DataLoader's worker, lives on with copies of its descriptors."""

    def body(control: Control) -> Any:
        if control.rank == victim:
            if os.fork() == 0:
                time.sleep(1.5)
                os._exit(0)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        return outcome(lambda: control.gather("all_reduce", "")), time.monotonic() - start

    results = run(2, body, timeout=60.0)
    assert results[victim] == ("exit", -signal.SIGKILL)
    error, seconds = results[1 - victim]
    assert isinstance(error, PeerFailedError) and seconds < 1.2
    assert ("rank 1 failed" if victim == 1 else "serves the control plane") in str(error)


def test_a_rank_that_ended_in_order_is_not_awaited() -> None:
    def body(control: Control) -> Any:
        if control.rank == 1:
            control.close()
            return outcome(lambda: control.gather("all_reduce", ""))
        return outcome(lambda: control.gather("all_reduce", "")), control.failures()

    (error, failures), own = run(2, body, timeout=60.0)
    assert isinstance(error, PeerFailedError) and "rank 1 ended, without an error, before it came to all_reduce" in str(error)
    assert failures == {}
    assert isinstance(own, NotInitializedError)


def test_close_does_not_wait_for_a_thread_that_waits() -> None:
    def body(control: Control) -> Any:
        threading.Thread(target=lambda: outcome(lambda: control.get("never", 60.0)), daemon=True).start()
        time.sleep(0.3)
        start = time.monotonic()
        control.close()
        return time.monotonic() - start < 2.0

    assert run(2, body) == [True, True]


def test_a_forked_child_leaves_its_parents_connection_alone() -> None:
    def body(control: Control) -> Any:
        child = os.fork()
        if child == 0:
            refused = isinstance(outcome(lambda: control.gather("in the child", "")), NotInitializedError)
            control.fail("in the child")
            control.close()
            os._exit(0 if refused and control.rank >= 0 else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status, control.gather("in the parent", str(control.rank)), control.failures()

    assert run(2, body) == [(0, ["0", "1"], {})] * 2


def test_an_interrupted_round_does_not_answer_the_next_one() -> None:
    def body(control: Control) -> Any:
        if control.rank == 0:
            signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                control.gather("interrupted", "old")
        else:
            time.sleep(0.6)
            assert control.gather("interrupted", "old") == ["old", "old"]
        return control.gather("next", f"new {control.rank}")

    assert run(2, body) == [["new 0", "new 1"]] * 2


def test_large_texts() -> None:
    def body(control: Control) -> Any:
        return [len(text) for text in control.gather("big", "ä" * (1_000_000 + control.rank))]

    assert run(2, body) == [[1_000_000, 1_000_001]] * 2


def test_get_names_the_key_that_nobody_set() -> None:
    def body(control: Control) -> Any:
        missing = outcome(lambda: control.get("the port", 0.3))
        return missing, control.gather("next", "")

    for error, after in run(2, body):
        assert isinstance(error, CollectiveTimeoutError) and "'the port'" in str(error) and "0.3 s" in str(error)
        assert after == ["", ""]


def test_missing_ranks_are_named_at_the_start() -> None:
    start = time.monotonic()
    for error in run(4, lambda control: "never", timeout=1.5, present=2):
        assert isinstance(error, CollectiveTimeoutError)
        assert "ranks 0, 1 came, ranks 2, 3 did not" in str(error)
    assert time.monotonic() - start < 4.0


def test_connect_again_after_close() -> None:
    def body(control: Control) -> Any:
        job = f"again-{os.getppid()}"
        environ = {"PMIX_NAMESPACE": job}
        found = [control.gather("first", str(control.rank))]
        control.close()
        for _ in range(2):
            again = connect(World(control.rank, 2, control.rank, 2, launcher="mpirun"), environ, 3.0)
            found.append(again.gather("again", str(control.rank)))
            again.close()
        return found

    assert run(2, body) == [[["0", "1"]] * 3] * 2


def test_meet_through_a_given_group() -> None:
    def body(control: Control) -> Any:
        world = World(control.rank, 2, control.rank, 2, launcher="a group of its own")
        inner = connect(world, {}, 3.0, meet=lambda address: control.broadcast("address", address))
        found = inner.gather("inner", str(control.rank))
        inner.close()
        return found

    assert run(2, body) == [["0", "1"]] * 2


def test_the_watchdog() -> None:
    """Three jobs at once: a failure while in the engine, one while in Python, and a wait that nobody ends."""

    def in_engine(control: Control) -> Any:
        if control.rank == 1:
            control.fail("ValueError: boom")
            return "failed"
        with control.waiting("all_reduce(layer 1)"):
            time.sleep(20.0)

    def in_python(control: Control) -> Any:
        if control.rank == 1:
            os._exit(0)
        time.sleep(20.0)

    def overdue(control: Control) -> Any:
        if control.rank == 1:
            control.get("never", 60.0)
        if control.rank == 0:
            with control.waiting("backward", timeout=1.0):
                time.sleep(20.0)
        if control.rank == 2:
            with control.waiting("all_gather"):
                time.sleep(9.0)
        time.sleep(9.0)

    start = time.monotonic()
    engine, python, wait = Ranks(2, in_engine, grace=1.0), Ranks(2, in_python), Ranks(4, overdue, grace=0.5)
    assert engine.results() == [("exit", 83), "failed"]
    assert time.monotonic() - start < 4.0
    assert "rank 1 failed: ValueError: boom; rank 0 was in all_reduce(layer 1)" in engine.said()
    wait.workers[0][0].join(9.0)
    assert wait.workers[0][0].exitcode == 83
    assert 5.5 < time.monotonic() - start < 8.0
    assert (
        "rank 0 waited 6 s in backward; known to wait: rank 1 in get('never'), rank 2 all_gather; not known to wait: rank 3" in wait.said()
    )
    assert python.results()[0] == wait.results()[0] == ("exit", 83)
    assert time.monotonic() - start < 10.5
    assert "rank 0 had not ended by itself" in python.said()


def test_a_peer_that_ends_by_itself_is_left_alone() -> None:
    """The watchdog ends nothing after `close`, and nothing because of a rank that ended in order."""

    def body(control: Control) -> Any:
        if control.rank == 0:
            control.close()
            with control.waiting("a wait after the end"):
                time.sleep(0.8)
            return "alive"
        if control.rank == 1:
            return "ended"
        with control.waiting("a group without rank 1"):
            time.sleep(1.2)
        return "alive"

    assert run(3, body, grace=0.1) == ["alive", "ended", "alive"]


UNCAUGHT = """
import os, sys, time
from unidist.control import connect, report_uncaught
from unidist.world import read_world
control = connect(read_world(os.environ), os.environ, 30.0)
sys.excepthook = lambda *_: print("the user's own hook")
report_uncaught(control)
if control.rank == 1:
    raise ZeroDivisionError("in rank one")
try:
    control.gather("all_reduce", "")
except RuntimeError as error:
    print(type(error).__name__, error)
"""


def test_an_uncaught_exception_is_told_to_the_others() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", UNCAUGHT],
            env=os.environ
            | {"PMIX_NAMESPACE": f"uncaught-{os.getpid()}"}
            | {f"OMPI_COMM_WORLD_{name}": str(n) for name, n in (("RANK", rank), ("SIZE", 2), ("LOCAL_RANK", rank), ("LOCAL_SIZE", 2))},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=15)[0] for process in processes]
    assert "PeerFailedError" in said[0] and "ZeroDivisionError: in rank one" in said[0]
    assert said[1] == "the user's own hook\n"
    assert [process.returncode for process in processes] == [0, 1]


def _stream(server: Server, **hello: Any) -> Any:
    stream = Stream(socket.create_connection(("127.0.0.1", server.port), timeout=3.0))
    stream.send({"token": server.token, "rank": 0, "size": 2, "generation": 0, "kind": "main"} | hello)
    return stream, outcome(lambda: stream.receive(2.0))


def test_strangers_change_nothing() -> None:
    server = Server(2)
    server.start()
    length = (5).to_bytes(4, "big")
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        length + b"[[[[[",
        b"\xff" * 9,
        encode({"op": "gather"}),
        (4000).to_bytes(4, "big") + b"[" * 4000,
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=3.0) as stranger:
            stranger.sendall(garbage)
            answer = outcome(lambda: stranger.recv(10))
            assert answer == b"" or isinstance(answer, OSError)
    assert isinstance(_stream(server, token="wrong")[1], ConnectionError)
    assert "says that the job has 3 workers" in _stream(server, size=3)[1]["text"]
    first, answer = _stream(server)
    assert answer == {"hello": 0}
    assert "two processes say that they are rank 0" in _stream(server)[1]["text"]
    assert server.failures() == {}
    first.close()
    server.close()


def test_a_file_that_a_dead_job_left_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    place = meeting.find(World(0, 2, 0, 2, launcher="mpirun"), {"PMIX_NAMESPACE": "old"}, 0, None)
    place.publish(f"127.0.0.1:{port}/token")
    (file,) = next(tmp_path.iterdir()).iterdir()
    assert file.stat().st_mode & 0o777 == 0o600

    def body(control: Control) -> Any:
        if control.rank == 0:
            time.sleep(0.4)
        again = connect(World(control.rank, 2, control.rank, 2, launcher="mpirun"), {"PMIX_NAMESPACE": "old"}, 3.0)
        again.close()
        return again.size

    for stale in range(8):  # whatever number this process's forks have come to
        file.with_name(f"PMIX_NAMESPACE-old-{stale}").write_text(file.read_text())
    assert run(2, body) == [2, 2]


def test_a_directory_that_others_can_read_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"unidist-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(LaunchError, match="0700"):
        meeting.find(World(0, 2, 0, 2, launcher="mpirun"), {"PMIX_NAMESPACE": "x"}, 0, None)


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({}, "MASTER_ADDR"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "none"}, "'none'"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "70000"}, "'70000'"),
    ],
)
def test_no_way_to_meet_on_several_hosts(environ: dict[str, str], word: str) -> None:
    with pytest.raises(LaunchError, match=word):
        meeting.find(World(0, 2, 0, 1, 0, 2, "mpirun"), environ, 0, None)


def test_slurms_first_node_is_the_meeting_point() -> None:
    environ = {"SLURM_STEP_NODELIST": "node[03-05,9],login", "SLURM_JOB_ID": "4711"}
    place = meeting.find(World(1, 2, 0, 1, 1, 2, "srun"), environ, 0, None)
    assert place.lookup(1.0) == "node03:29211/job-of-2"
    assert place.bind == ""
