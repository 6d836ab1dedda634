"""How the ranks find the control plane's address: a table of ways, by what the launcher left in the environment."""

import contextlib
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from unidist import httpstore, tcpstore
from unidist.control_server import Server
from unidist.errors import CollectiveTimeoutError, LaunchError
from unidist.wire import Message, Stream
from unidist.world import World

_RETRY = 0.05
_FIRST_PORT = 28500
_PATIENCE = 3.0  # seconds for one of the server's names to answer; it may have names that nobody can reach


def _nothing() -> None: ...


@dataclass(frozen=True)
class Meeting:
    """A way to pass one address on. An address reads `host[,host...]:port/token`, the hosts being one machine's."""

    where: str
    publish: Callable[[str], None]
    lookup: Callable[[float], str | None]
    served_by_rank_0: bool = True
    bind: str = ""
    port: int = 0
    token: str = ""
    hosts: tuple[str, ...] = ()
    forget: Callable[[], None] = _nothing


def find(world: World, environ: Mapping[str, str], generation: int, meet: Callable[[str | None], str] | None) -> Meeting:
    """The way for this launcher; `LaunchError` when there is none."""
    one_host = world.local_size == world.size
    if meet is not None:
        return _given(meet, one_host)
    if environ.get("UNIDIST_TRAIN_STORE"):
        return _hosted(environ["UNIDIST_TRAIN_STORE"])
    if world.launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _torchrun(environ, generation, one_host)
    if world.launcher == "horovodrun" and environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        return _horovodrun(environ, generation, one_host)
    if one_host and world.launcher != "environment variables":
        return _file(world, environ, generation)
    return _master(world, environ, one_host)


def serve(world: World, place: Meeting, generation: int) -> Server:
    """Rank 0's server, listening and published."""
    try:
        server = Server(world.size, host=place.bind, port=place.port, token=place.token, generation=generation)
    except OSError as error:
        raise LaunchError(
            f"rank 0 can't listen on port {place.port}, which {place.where} names: {error.strerror or error}; choose a free port"
        ) from error
    server.start()
    place.publish(f"{','.join(place.hosts)}:{server.port}/{server.token}")
    return server


def reach(place: Meeting, server: Server | None, hello: Message, deadline: float) -> tuple[str, Stream]:
    """The server's address and a connection to it; waits for rank 0 until the deadline."""
    if server is not None:
        own = f"{place.bind or '127.0.0.1'}:{server.port}/{server.token}"
        return own, open_stream(own, hello, deadline)
    start, problem = time.monotonic(), ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            address = place.lookup(left)
            if address is not None:
                return address, open_stream(address, hello, deadline)
        except (OSError, ValueError, _NotYet) as error:
            problem = f" (the last try: {error})"
        time.sleep(_RETRY)
    raise CollectiveTimeoutError(
        f"rank {hello['rank']} waited {time.monotonic() - start:.0f} s in unidist.init for rank 0, looking at {place.where}{problem}"
    )


class _NotYet(Exception):
    """What answers at the address is an earlier job, or none of ours: look again."""


def open_stream(address: str, hello: Message, deadline: float) -> Stream:
    """A connection whose hello was accepted; tries the address's hosts in order."""
    names, _, rest = address.rpartition(":")
    port, _, token = rest.partition("/")
    problem: OSError | None = None
    for host in names.split(","):
        left = min(max(deadline - time.monotonic(), 0.01), _PATIENCE)
        try:
            stream = Stream(socket.create_connection((host, int(port)), timeout=left))
        except OSError as error:
            problem = error
            continue
        return _greet(stream, {**hello, "token": token}, left)
    raise problem or OSError(f"no host in {address!r}")


def _greet(stream: Stream, hello: Message, timeout: float) -> Stream:
    try:
        stream.send(hello)
        answer = stream.receive(timeout)
    except (OSError, ValueError):
        stream.close()
        raise
    if "hello" in answer:
        return stream
    stream.close()
    if answer.get("error") == "launch":
        raise LaunchError(answer["text"])
    raise _NotYet(answer.get("text", "something that isn't unidist answered"))


def _given(meet: Callable[[str | None], str], one_host: bool) -> Meeting:
    """Through a process group that exists already: one call on each rank."""
    found: list[str] = []

    def publish(address: str) -> None:
        meet(address)

    def lookup(_: float) -> str:
        if not found:
            found.append(meet(None))
        return found[0]

    return Meeting("the given process group", publish, lookup, bind=_bind(one_host), hosts=_hosts(one_host, ""))


def _hosted(address: str) -> Meeting:
    return Meeting("UNIDIST_TRAIN_STORE", lambda _: None, lambda _: address, served_by_rank_0=False)


def _torchrun(environ: Mapping[str, str], generation: int, one_host: bool) -> Meeting:
    host, port = environ["MASTER_ADDR"], _port(environ["MASTER_PORT"])
    key = f"unidist/{environ['TORCHELASTIC_RUN_ID']}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{generation}"
    return Meeting(
        f"torchrun's store at {host}:{port}",
        lambda address: tcpstore.put(host, port, key, address),
        lambda timeout: tcpstore.wait(host, port, key, timeout),
        bind=_bind(one_host),
        hosts=_hosts(one_host, host),
    )


def _horovodrun(environ: Mapping[str, str], generation: int, one_host: bool) -> Meeting:
    """horovodrun's key-value store speaks HTTP: PUT and GET of /scope/key, 404 for what is not there yet."""
    host, port = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    key = f"/unidist/{generation}"
    names = _hosts(one_host, host) + (() if one_host else (environ.get("HOROVOD_HOSTNAME", "localhost"),))
    return Meeting(
        f"horovodrun's store at {host}:{port}",
        lambda address: httpstore.put(host, port, key, address),
        lambda _: httpstore.get(host, port, key),
        bind=_bind(one_host),
        hosts=names,
    )


def _file(world: World, environ: Mapping[str, str], generation: int) -> Meeting:
    """All ranks on one host: a file that only this user can read, named after the job. Rank 0 writes it in one step."""
    path = _private_directory() / f"{_job(environ)}-{generation}"

    def publish(address: str) -> None:
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(address)
        draft.replace(path)

    def lookup(_: float) -> str | None:
        return path.read_text() if path.exists() else None

    def forget() -> None:
        if world.rank == 0:
            path.unlink(missing_ok=True)

    return Meeting(f"the file {path}", publish, lookup, bind="127.0.0.1", hosts=("127.0.0.1",), forget=forget)


def _private_directory() -> Path:
    path = Path(tempfile.gettempdir()) / f"unidist-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    state = path.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise LaunchError(f"{path} has to be a directory of this user alone (mode 0700), since the ranks meet there: remove it")
    return path


def _job(environ: Mapping[str, str]) -> str:
    """The launcher's name of this job; without one, the process that started all ranks."""
    if environ.get("SLURM_JOB_ID") and environ.get("SLURM_STEP_ID"):
        return f"slurm-{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "TORCHELASTIC_RUN_ID")
    name = next((f"{name}-{environ[name]}" for name in names if environ.get(name)), "parent")
    return re.sub(r"[^A-Za-z0-9_.-]", "_", f"{name}-{os.getppid()}" if name == "parent" else name)


def _master(world: World, environ: Mapping[str, str], one_host: bool) -> Meeting:
    """Rank 0 listens on exactly MASTER_PORT. The token only tells jobs apart unless UNIDIST_TRAIN_TOKEN is set."""
    host = environ.get("MASTER_ADDR") or _first_node(environ.get("SLURM_STEP_NODELIST", ""))
    if not host:
        raise LaunchError(
            f"{world.launcher} started {world.size} workers on {world.num_nodes} hosts and says nothing about where they "
            "can meet: set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, the same on every worker"
        )
    port = _port(environ.get("MASTER_PORT") or _default_port(environ))
    token = environ.get("UNIDIST_TRAIN_TOKEN") or f"job-of-{world.size}"
    address = f"{'127.0.0.1' if one_host else host}:{port}/{token}"
    where = f"MASTER_ADDR and MASTER_PORT ({host}:{port})"
    return Meeting(where, lambda _: None, lambda _: address, bind=_bind(one_host), port=port, token=token)


def _default_port(environ: Mapping[str, str]) -> str:
    digits = re.sub(r"\D", "", environ.get("SLURM_JOB_ID", "")) or "0"
    return str(_FIRST_PORT + int(digits) % 2000)


def _port(text: str) -> int:
    if not (text.strip().isdigit() and 0 < int(text) < 1 << 16):
        raise LaunchError(f"MASTER_PORT is {text!r}, but it has to be a port, 1 to 65535")
    return int(text)


def _first_node(nodes: str) -> str:
    """The first host of Slurm's list: "node[03-05,9],login" starts with node03."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^\[,]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def _bind(one_host: bool) -> str:
    return "127.0.0.1" if one_host else ""


def _hosts(one_host: bool, towards: str) -> tuple[str, ...]:
    """Names for this machine; on several hosts the address that the route to the meeting point has comes first."""
    if one_host:
        return ("127.0.0.1",)
    routed = _own_address(towards)
    return tuple(dict.fromkeys(name for name in (routed, towards, socket.gethostname()) if name))


def _own_address(towards: str) -> str:
    """This machine's address on the way to `towards`; "" if that is the machine itself. Sends nothing (UDP)."""
    with contextlib.suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(towards or "192.0.2.1", 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            own = str(probe.getsockname()[0])
            return "" if own.startswith("127.") or own == "::1" else own
    return ""
