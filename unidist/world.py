"""World: this process's rank and the sizes of the job, read from the innermost launcher's variables.

A set that is incomplete or contradicts itself is an error, never a guess.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from unidist import tf_config
from unidist.errors import LaunchError
from unidist.launcher_variables import LAUNCHERS, Launcher


@dataclass(frozen=True)
class World:
    """Who this process is among the processes of the job (not replicas, not devices)."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    launcher: str = "python"


# Slurm numbers the steps that are no `srun` (the batch script, the shell of `salloc`) from the top of 32 bits.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def read_world(environ: Mapping[str, str]) -> World:
    """The world that the innermost launcher describes; rank 0 of 1 when there is none.

    Raises `LaunchError` naming the variable when that launcher's set is incomplete, not integer or contradictory.
    """
    seen = _seen(environ)
    if seen:
        return _read(seen[0], environ)
    size = environ.get("WORLD_SIZE", "1").strip()
    if size not in ("", "1"):
        raise LaunchError(
            f"WORLD_SIZE is {size!r}, but RANK is not set: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT on every "
            "worker, or start the script with `unidist run`"
        )
    cluster = tf_config.read(environ)
    return World() if cluster is None else _of_cluster(cluster)


def _of_cluster(cluster: tf_config.Cluster) -> World:
    """TF_CONFIG alone: workers with one host name share a host."""
    hosts, rank = cluster.hosts, cluster.rank
    names = list(dict.fromkeys(hosts))
    own = hosts[rank]
    return World(rank, len(hosts), hosts[:rank].count(own), hosts.count(own), names.index(own), len(names), tf_config.VARIABLE)


def explain_world(environ: Mapping[str, str]) -> list[str]:
    """One line for each launcher whose variables are there and one for the choice, for `unidist env`."""
    seen = _seen(environ)
    lines = [f"{launcher.name}: {launcher.sign}={environ[launcher.sign]}" for launcher in seen]
    if "SLURM_JOB_ID" in environ and not any(launcher.name == "srun" for launcher in seen):
        lines.append("Slurm: a job but no step of srun, so its variables describe the batch script, not workers")
    try:
        world = read_world(environ)
    except LaunchError as error:
        return [*lines, f"not usable: {error}"]
    if not seen and world.launcher != tf_config.VARIABLE:
        return [*lines, "no launcher: one process, rank 0 of 1"]
    why = "the innermost of them" if len(seen) > 1 else "the only one"
    where = f"local rank {world.local_rank} of {world.local_size}, node {world.node_rank} of {world.num_nodes}"
    return [*lines, f"taken: {world.launcher}, {why}: rank {world.rank} of {world.size}, {where}"]


def with_hosts(world: World, hosts: list[str]) -> World:
    """`world` with the node numbers that the ranks' host names give, for launchers that don't number nodes.

    Open MPI can deal ranks out host by host in turn, so the rank alone doesn't say on which host it is.
    """
    launcher = next((entry for entry in LAUNCHERS if entry.name == world.launcher), None)
    names = list(dict.fromkeys(hosts))
    if launcher is None or launcher.node_rank or hosts.count(hosts[world.rank]) != world.local_size:
        return world
    return replace(world, node_rank=names.index(hosts[world.rank]), num_nodes=len(names))


def _seen(environ: Mapping[str, str]) -> list[Launcher]:
    """The launchers whose sign is set, the innermost first."""
    seen = [launcher for launcher in LAUNCHERS if launcher.sign in environ]
    if "SLURM_STEP_ID" in environ and _special_step(environ["SLURM_STEP_ID"]):
        seen = [launcher for launcher in seen if launcher.name != "srun"]
    # `srun --mpi=pmi2` sets PMI_RANK and PMI_SIZE, but only Slurm's own variables know the local rank.
    by_slurm = any(launcher.name == "srun" for launcher in seen)
    return [launcher for launcher in seen if not (by_slurm and launcher.name == "mpiexec" and _no_local(environ))]


def _special_step(step: str) -> bool:
    return step.isdigit() and int(step) >= _FIRST_SPECIAL_STEP


def _no_local(environ: Mapping[str, str]) -> bool:
    return "MPI_LOCALRANKID" not in environ and "PMI_LOCAL_RANK" not in environ


def _read(launcher: Launcher, environ: Mapping[str, str]) -> World:
    rank = _required(launcher, launcher.rank, environ)
    size = _required(launcher, launcher.size, environ)
    if size < 1:
        raise LaunchError(f"{launcher.size[0]} is {size}, but a job has at least 1 worker")
    _below(launcher.rank[0], rank, launcher.size[0], size)
    if size > 1:
        _present(launcher, environ)
    node_rank = _integer(launcher.node_rank, environ)
    local_rank, local_size = _locals(launcher, environ, size, node_rank or 0)
    num_nodes = _integer(launcher.num_nodes, environ) or -(-size // local_size)
    if node_rank is None:
        node_rank = min(rank // local_size, num_nodes - 1)
    else:
        _below(launcher.node_rank[0], node_rank, "the number of nodes", num_nodes)
    return World(rank, size, local_rank, local_size, node_rank, num_nodes, launcher.name)


def _locals(launcher: Launcher, environ: Mapping[str, str], size: int, node_rank: int) -> tuple[int, int]:
    """Local rank and local size; never worked out from the global rank."""
    lone = size == 1 or (launcher.one_per_host and not _given(launcher.local_rank + launcher.local_size, environ))
    if lone and _integer(launcher.local_rank, environ) is None:
        return 0, 1
    local_rank = _required(launcher, launcher.local_rank, environ)
    if launcher.tasks:
        local_size = _tasks_of_node(launcher.tasks, environ, node_rank)
    elif local_rank + 1 == size:  # the last local rank of the last rank leaves one answer only
        local_size = _integer(launcher.local_size, environ) or size
    else:
        local_size = _required(launcher, launcher.local_size, environ)
    size_name = launcher.tasks or launcher.local_size[0]
    _below(launcher.local_rank[0], local_rank, size_name, local_size)
    if local_size > size:
        raise LaunchError(f"{size_name} is {local_size}, more than the whole job's {launcher.size[0]}, {size}")
    return local_rank, local_size


def _tasks_of_node(name: str, environ: Mapping[str, str], node: int) -> int:
    """The entry of `node` in Slurm's list of tasks per node: "2(x3),1" stands for 2, 2, 2, 1."""
    text = environ.get(name)
    if text is None:
        raise LaunchError(f"{name} is not set, but srun needs it to tell how many workers share this host")
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise LaunchError(f"{name} is {text!r}, which is no list of tasks per node such as '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise LaunchError(f"{name} is {text!r}, which has {len(counts)} nodes, but SLURM_NODEID is {node}")
    return counts[node]


def _given(names: tuple[str, ...], environ: Mapping[str, str]) -> str | None:
    return next((name for name in names if name in environ), None)


def _integer(names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    """The value of the first of `names` that is set; None when none is."""
    name = _given(names, environ)
    if name is None:
        return None
    if not re.fullmatch(r"\s*[0-9]+\s*", environ[name]):
        raise LaunchError(f"{name} is {environ[name]!r}, but it has to be an integer, 0 or more")
    return int(environ[name])


def _required(launcher: Launcher, names: tuple[str, ...], environ: Mapping[str, str]) -> int:
    value = _integer(names, environ)
    if value is None:
        given = f"{launcher.sign}={environ[launcher.sign]!r}"
        raise LaunchError(f"{given} says that {launcher.name} started this process, but {' or '.join(names)} is not set")
    return value


def _present(launcher: Launcher, environ: Mapping[str, str]) -> None:
    missing = [name for name in launcher.also if not environ.get(name, "").strip()]
    if missing:
        raise LaunchError(
            f"RANK={environ['RANK']!r} and WORLD_SIZE={environ['WORLD_SIZE']!r} are set, but {' and '.join(missing)} "
            "is missing or empty: set it to rank 0's address and a free port there, the same on every worker"
        )


def _below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise LaunchError(f"{name} is {value}, but {limit_name} is {limit}, so it has to be in 0..{limit - 1}")
