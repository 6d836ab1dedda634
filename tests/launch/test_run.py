"""`unidist run` with real workers: codes, output, signals, what is left behind. The scripts use the control plane only."""

import contextlib
import fcntl
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CONNECT = """
import os, signal, subprocess, sys, time
from unidist.control import connect, report_uncaught
from unidist.world import read_world
world = read_world(os.environ)
rank = world.rank
def join():
    control = connect(world, os.environ, 30.0)
    report_uncaught(control)
    return control
"""
IGNORE_ALL = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)\n"


class Launch:
    """One `python -m unidist run`; every process of it carries a mark in its environment."""

    def __init__(self, folder: Path, script: str, *options: str, arguments: tuple[str, ...] = (), **how: Any) -> None:
        self.mark = f"MARK_{uuid.uuid4().hex}=1"
        path = folder / f"script_{uuid.uuid4().hex[:8]}.py"
        path.write_text(CONNECT + script)
        name, _, value = self.mark.partition("=")
        self.start = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "unidist", "run", *options, str(path), *arguments],
            **{
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                "env": os.environ | {name: value, "TMPDIR": str(folder)} | how.pop("environ", {}),
                **how,
            },
        )
        self.out = self.err = ""

    def wait(self, seconds: float = 15.0, text: str | None = None) -> int:
        self.out, self.err = self.process.communicate(text, timeout=seconds)
        return self.process.returncode

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def left(self) -> list[int]:
        """The processes of this launch that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches: list[Launch] = []

    def start(script: str, *options: str, **how: Any) -> Launch:
        launches.append(Launch(tmp_path, script, *options, **how))
        return launches[-1]

    yield start
    for launch in launches:
        for pid in launch.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launch.process.wait()


def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.02)


def test_all_is_well(run: Callable[..., Launch], tmp_path: Path) -> None:
    """Variables for unidist and for plain torch scripts, the rank's own output, standard input at rank 0, arguments."""
    script = """
line = sys.stdin.read().strip()
join().close()
control = join()
rows = control.gather("row", ",".join([os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], line, *sys.argv[1:]]))
if rank == 0:
    print(rows, world.launcher, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) > 0)
else:
    print("nobody needs to see this")
"""
    job = run(script, "-n", "2", "--log-dir", str(tmp_path / "logs"), arguments=("--lr", "-n", "x"), stdin=subprocess.PIPE)
    assert job.wait(text="typed\n") == 0
    assert job.out == "['0,0,2,typed,--lr,-n,x', '1,1,2,,--lr,-n,x'] unidist run 127.0.0.1 True\n"
    assert job.err == ""
    assert (tmp_path / "logs" / "rank1.log").read_text() == "nobody needs to see this\n"


def test_the_job_has_the_failed_workers_code(run: Callable[..., Launch]) -> None:
    """Rank 0 waits in a round of 30 s, and hears why; the job ends at once."""
    script = """
control = join()
if rank == 1:
    eval(sys.argv[1])
try:
    control.gather("all_reduce", "")
except RuntimeError as error:
    print(error, file=sys.stderr, flush=True)
    time.sleep(30)
"""
    ends = {
        "sys.exit(7)": (7, "exit code 7"),
        "os.kill(os.getpid(), signal.SIGKILL)": (137, "killed by SIGKILL"),
        "os.kill(os.getpid(), signal.SIGSEGV)": (139, "killed by SIGSEGV"),
        "os._exit(3)": (3, "exit code 3"),
    }
    jobs = {end: run(script, "-n", "2", arguments=(end,)) for end in ends}
    for end, (code, words) in ends.items():
        job = jobs[end]
        assert job.wait() == code
        assert f"rank 1 failed first: {words}" in job.err and "rank 0 stopped" in job.err
        assert "rank 1" in job.err.partition("unidist run")[0]
        assert job.seconds < 6.0
        assert job.left() == []


def test_the_first_failure_is_on_top_with_its_last_lines(run: Callable[..., Launch]) -> None:
    """Rank 2 raises and takes its time to exit; the others fail because of it, and earlier."""
    script = """
import atexit
control = join()
if rank == 2:
    atexit.register(time.sleep, 0.7)
    for number in range(30):
        print("line", number)
    raise ValueError("the cause")
control.gather("all_reduce", "")
"""
    job = run(script, "-n", "3")
    assert job.wait() == 1
    report = job.err[job.err.index("unidist run:") :].splitlines()
    assert report[0] == "unidist run: rank 2 failed first: exit code 1"
    assert report[1].startswith("unidist run: the last 20 lines of rank 2, all of them in ")
    shown = report[2:22]
    assert shown[-1] == "    ValueError: the cause"
    assert "    line 29" in shown and "    line 12" not in shown
    assert "rank 1 failed too: exit code 1" in "\n".join(report[22:])
    assert "PeerFailedError: rank 2 failed while all_reduce waited for it" in job.err
    log = Path(report[1].split(" in ")[-1].rstrip(":"))
    assert "line 0\n" in log.read_text()
    assert "PeerFailedError" not in "\n".join(report[:22])


def test_tee_shows_every_line_with_its_rank(run: Callable[..., Launch], tmp_path: Path) -> None:
    script = """
print("one\\ntwo", rank)
print("to stderr", rank, file=sys.stderr)
sys.stdout.write(f"no newline {rank}")
"""
    job = run(script, "-n", "2", "--tee", "all", "--log-dir", str(tmp_path / "logs"))
    assert job.wait() == 0
    assert sorted(job.out.splitlines()) == sorted(f"[{r}] {line}" for r in (0, 1) for line in ("one", f"two {r}", f"no newline {r}"))
    assert sorted(job.err.splitlines()) == ["[0] to stderr 0", "[1] to stderr 1"]
    assert "two 0\n" in (tmp_path / "logs" / "rank0.log").read_text()


def test_nothing_is_left_of_a_job_whose_worker_fails(run: Callable[..., Launch], tmp_path: Path) -> None:
    """Workers that ignore SIGTERM, with children in sessions of their own and an orphan whose parent is gone."""
    script = (
        IGNORE_ALL
        + f"""
subprocess.Popen(["sleep", "98"], start_new_session=True)
subprocess.run(["sh", "-c", "setsid sh -c 'trap : TERM; sleep 99; sleep 99' &"])
open({str(tmp_path)!r} + f"/ready{{rank}}", "w").close()
if rank == 1:
    while not os.path.exists({str(tmp_path)!r} + "/go"):
        time.sleep(0.02)
    sys.exit(5)
time.sleep(99)
"""
    )
    job = run(script, "-n", "2")
    until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    assert len(job.left()) >= 7
    (tmp_path / "go").touch()
    failed = time.monotonic()
    assert job.wait() == 5
    assert time.monotonic() - failed < 8.0
    assert job.left() == []


def _ready(folder: Path) -> str:
    return f'open({str(folder)!r} + f"/ready{{rank}}", "w").close()\n'


def test_ctrl_c_reaches_the_workers(run: Callable[..., Launch], tmp_path: Path) -> None:
    script = f"""
try:
    {_ready(tmp_path)}
    time.sleep(30)
except KeyboardInterrupt:
    open({str(tmp_path)!r} + f"/interrupted{{rank}}", "w").close()
"""
    job = run(script, "-n", "2")
    until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    os.kill(job.process.pid, signal.SIGINT)
    assert job.wait(2.5) == 130
    assert all((tmp_path / f"interrupted{rank}").exists() for rank in range(2))
    assert "failed" not in job.err


def test_workers_that_ignore_signals(run: Callable[..., Launch], tmp_path: Path) -> None:
    """They are killed after three seconds, or at once when the user asks twice."""
    cases = [((signal.SIGINT, signal.SIGINT), 130), ((signal.SIGINT,), 130), ((signal.SIGTERM,), 143)]
    jobs = []
    for number in range(len(cases)):
        (tmp_path / str(number)).mkdir()
        jobs.append(run(IGNORE_ALL + _ready(tmp_path / str(number)) + "time.sleep(30)\n", "-n", "2"))
    until(lambda: len(list(tmp_path.glob("*/ready*"))) == 2 * len(cases))
    asked = time.monotonic()
    for job, (signals, _) in zip(jobs, cases):
        for number in signals:
            os.kill(job.process.pid, number)
            time.sleep(0.2)
    for job, (signals, code) in zip(jobs, cases):
        assert job.wait() == code
        assert (2.5 < time.monotonic() - asked < 6.0) if len(signals) == 1 else (time.monotonic() - asked < 2.0)
        assert job.left() == []


def test_workers_die_with_a_killed_launcher(run: Callable[..., Launch], tmp_path: Path) -> None:
    job = run(IGNORE_ALL + _ready(tmp_path) + "time.sleep(30)\n", "-n", "2")
    until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    job.process.kill()
    until(lambda: job.left() == [], 5.0)


def test_a_worker_that_hangs_after_its_error(run: Callable[..., Launch]) -> None:
    """Its traceback is out, its process does not end: the job does, with 1."""
    script = """
import threading
control = join()
if rank == 1:
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise ValueError("and then it hangs")
time.sleep(60)
"""
    job = run(script, "-n", "2")
    assert job.wait() == 1
    assert job.seconds < 9.0
    assert "rank 1 failed first" in job.err and "ValueError: and then it hangs" in job.err


def test_an_error_that_the_script_survives_is_no_failure(run: Callable[..., Launch]) -> None:
    """As when `unidist.init` raises on a rank, and the script goes on without it."""
    script = """
control = join()
if rank == 1:
    control.fail("caught by the script")
control.close()
time.sleep(3.3)
print("done")
"""
    job = run(script, "-n", "2")
    assert job.wait() == 0
    assert job.out == "done\n"


def test_two_jobs_at_once_and_a_worker_that_never_joins(run: Callable[..., Launch]) -> None:
    script = "control = join()\nprint(control.gather('row', sys.argv[1]))\n"
    jobs = [run(script, "-n", "2", arguments=(name,)) for name in "ab"]
    alone = run("control = join() if rank == 0 else None\n", "-n", "2")
    assert [job.wait() for job in jobs] == [0, 0]
    assert [job.out for job in jobs] == ["['a', 'a']\n", "['b', 'b']\n"]
    assert alone.wait() == 1
    assert "rank 1 ended, without an error, before it came to unidist.init" in alone.err
    assert alone.seconds < 8.0


def test_a_taken_port_is_named_at_once(run: Callable[..., Launch]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = run("raise SystemExit(9)\n", "-n", "2", "--port", str(port))
        assert job.wait() == 1
    assert f"port {port}" in job.err and len(job.err.splitlines()) == 1
    free = run("print(os.environ['MASTER_PORT'])\n", "-n", "1", "--port", str(port))
    assert (free.wait(), free.out) == (0, f"{port}\n")


SHOW = "print(*(os.environ.get(n) for n in sys.argv[1:]))\n"
NAMES = (
    "UNIDIST_TRAIN_BACKEND",
    "UNIDIST_TRAIN_FRAMEWORK",
    "UNIDIST_TRAIN_NUM_DEVICES",
    "WORLD_SIZE",
    "KERAS_BACKEND",
    "UNIDIST_TRAIN_TIMEOUT",
)


def test_what_the_workers_are_told(run: Callable[..., Launch]) -> None:
    cases = [
        ((), {}, "None None None 1 None None"),
        ((), {"CUDA_VISIBLE_DEVICES": "0,1,2"}, "None None None 3 None None"),
        (("-n", "2", "--backend", "mirrored"), {}, "mirrored None 2 1 tensorflow None"),
        (("-n", "2", "--backend", "ddp", "--timeout", "5"), {"KERAS_BACKEND": "torch"}, "ddp None 2 2 torch 5.0"),
        (("-n", "2", "--backend", "horovod"), {"KERAS_BACKEND": "jax"}, "horovod None 2 2 jax None"),
        (("-n", "2", "--backend", "horovod", "--framework", "tf"), {}, "horovod tf 2 2 tensorflow None"),
    ]
    jobs = [run(SHOW, *options, arguments=NAMES, environ=environ) for options, environ, _ in cases]
    assert [(job.wait(), job.out) for job in jobs] == [(0, shown + "\n") for _, _, shown in cases]


def test_threads_are_shared_out_unless_the_user_chose(run: Callable[..., Launch]) -> None:
    cores = len(os.sched_getaffinity(0))
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
    assert not any(name in os.environ for name in names)
    choices = [("2", {}), ("2", {names[0]: "7"}), ("1", {})]
    jobs = [run(SHOW, "-n", number, arguments=names, environ=environ) for number, environ in choices]
    share = max(cores // 2, 1)
    assert [(job.wait(), job.out) for job in jobs] == [(0, f"{share} {share}\n"), (0, f"7 {share}\n"), (0, "None None\n")]


def test_a_wrong_command_line(run: Callable[..., Launch]) -> None:
    cases: list[tuple[tuple[str, ...], dict[str, str], int, list[str]]] = [
        (("--backend", "ddp"), {"KERAS_BACKEND": "tensorflow"}, 1, ["'tensorflow'", "'torch'", "--backend ddp"]),
        (("--framework", "tensorflow"), {"KERAS_BACKEND": "torch"}, 1, ["'tensorflow'", "'torch'", "--framework tensorflow"]),
        (("--backend", "dpp"), {}, 1, ["'dpp'", "'ddp'"]),
        (("-n", "0"), {}, 2, ["-n"]),
        (("--tee", "some"), {}, 2, ["'some'", "all"]),
    ]
    jobs = [run("raise SystemExit(9)\n", *options, environ=environ) for options, environ, _, _ in cases]
    for job, (_, _, code, words) in zip(jobs, cases):
        assert job.wait() == code
        assert all(word in job.err for word in words)
        assert code == 2 or len(job.err.splitlines()) == 1


def _unidist(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "unidist", "run", *arguments], capture_output=True, text=True, cwd=folder, timeout=15)


def test_modules_programs_and_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(sys.argv[1:])")
    assert _unidist("-m", "package", "--lr", "1", folder=tmp_path).stdout == "['--lr', '1']\n"
    assert _unidist("package", "-m", folder=tmp_path).stdout == "['-m']\n"
    assert _unidist("echo", "-n", "x", folder=tmp_path).stdout == "x"
    missing = _unidist("train.py", folder=tmp_path)
    assert missing.returncode == 1 and "'train.py'" in missing.stderr
    assert "'nothing-like-it'" in _unidist("nothing-like-it", folder=tmp_path).stderr


def test_the_terminal_is_rank_0s(tmp_path: Path) -> None:
    """With a real terminal: rank 0 reads and writes it, and one Ctrl-C reaches it once."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, signal, subprocess, sys, time
rank = os.environ["RANK"]
def count(*_):
    print("INTERRUPT", flush=True)
    sys.exit(0) if rank != "0" else None
signal.signal(signal.SIGINT, count)
open({str(tmp_path)!r} + "/ready" + rank, "w").close()
if rank == "0":
    subprocess.run(["stty", "-echo"])
    print("TTY", sys.stdin.isatty(), sys.stdout.isatty(), "GOT", input())
while not os.path.exists({str(tmp_path / "end")!r}):
    time.sleep(0.02)
""")
    leader, follower = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(follower, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, "-m", "unidist", "run", "-n", "2", "--log-dir", str(tmp_path), str(script)],
        stdin=follower, stdout=follower, stderr=follower, preexec_fn=own_terminal,
    )  # fmt: skip
    os.close(follower)
    seen = b""

    def read_until(mark: bytes) -> None:
        nonlocal seen
        while mark not in seen:
            seen += os.read(leader, 1024)

    os.write(leader, b"typed\n")
    read_until(b"GOT typed")
    until(lambda: (tmp_path / "ready1").exists(), 10.0)  # an interrupt that comes before its handler ends a process unheard
    os.write(leader, b"\x03")
    read_until(b"INTERRUPT")
    until(lambda: "INTERRUPT" in (tmp_path / "rank1.log").read_text(), 3.0)
    time.sleep(0.5)
    (tmp_path / "end").touch()
    assert process.wait(5.0) == 130
    assert termios.tcgetattr(leader)[3] & termios.ECHO
    with contextlib.suppress(OSError):
        while part := os.read(leader, 1024):
            seen += part
    os.close(leader)
    assert b"TTY True True" in seen
    assert seen.count(b"INTERRUPT") == 1


def test_run_imports_neither_rich_nor_a_framework() -> None:
    """The command's module, as the launcher imports it; a launcher should be up at once, and small."""
    unwanted = ("rich", "torch", "tensorflow", "numpy", "unidist.cli.install")
    code = f"import sys, unidist.cli.app as a; a.COMMANDS['run'].load('run'); print([m for m in {unwanted} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15).stdout == "[]\n"


def test_help_needs_no_commands_module() -> None:
    """One that can't be imported, for want of a package, must not take the others' help with it."""
    code = (
        "import sys; from unidist.cli import app, main; sys.argv = ['unidist', '--help']\n"
        "app.COMMANDS['demo'] = app.Command('no.such:module', 'is listed')\nmain.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15)
    assert done.returncode == 0, done.stderr
    assert "is listed" in done.stdout and "Run a script on N devices" in done.stdout
