"""How the ranks find the control plane's address: a table of ways, by what the launcher left in the environment."""

import contextlib
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from unidist import filestore, httpstore, tcpstore, tf_config
from unidist.errors import LaunchError
from unidist.world import World

_FIRST_PORT = 28500


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
    cluster = tf_config.read(environ) if world.launcher == tf_config.VARIABLE else None
    if cluster is not None:
        return _cluster(world, environ, cluster, generation, one_host)
    job = _job(environ)
    if one_host and world.launcher != "environment variables" and (job or not environ.get("MASTER_ADDR")):
        return _file(world, job or f"parent-{os.getppid()}", generation)
    return _master(world, environ, one_host)


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


def _file(world: World, job: str, generation: int) -> Meeting:
    """All ranks on one host: a file named after the job, which rank 0 writes and takes away when all have met."""
    path = filestore.path_of(f"{job}-{generation}")
    return Meeting(
        f"the file {path}",
        lambda address: filestore.put(path, address),
        lambda _: filestore.get(path),
        bind="127.0.0.1",
        hosts=("127.0.0.1",),
        forget=(lambda: filestore.forget(path)) if world.rank == 0 else _nothing,
    )


def _cluster(world: World, environ: Mapping[str, str], cluster: tf_config.Cluster, generation: int, one_host: bool) -> Meeting:
    """TF_CONFIG: on the first worker's host, at MASTER_PORT or a port that is made of the workers' addresses."""
    if one_host:
        return _file(world, f"tf-config-{cluster.name}", generation)
    port = str(_FIRST_PORT + int(cluster.name, 16) % 2000)
    told = {"MASTER_ADDR": cluster.hosts[0], "MASTER_PORT": port}
    return _master(world, told | dict(environ), one_host)


def _job(environ: Mapping[str, str]) -> str | None:
    """The launcher's own name of this job; None where it has none."""
    if environ.get("SLURM_JOB_ID") and environ.get("SLURM_STEP_ID"):
        return _plain(f"slurm-{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}")
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "TORCHELASTIC_RUN_ID")
    return next((_plain(f"{name}-{environ[name]}") for name in names if environ.get(name)), None)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


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
    routed = own_address(towards)
    return tuple(dict.fromkeys(name for name in (routed, towards, socket.gethostname()) if name))


def own_address(towards: str) -> str:
    """This machine's address on the way to `towards`; "" if that is the machine itself. Sends nothing (UDP)."""
    with contextlib.suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(towards or "192.0.2.1", 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            own = str(probe.getsockname()[0])
            return "" if own.startswith("127.") or own == "::1" else own
    return ""
