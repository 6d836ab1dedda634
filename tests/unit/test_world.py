"""The world is read from launcher variables: the innermost launcher counts, and a broken set is named, never guessed."""

import pytest

from unidist import meeting
from unidist.errors import LaunchError
from unidist.world import World, explain_world, read_world, with_hosts

UNIDIST = {
    "UNIDIST_TRAIN_RANK": "3",
    "UNIDIST_TRAIN_WORLD_SIZE": "4",
    "UNIDIST_TRAIN_LOCAL_RANK": "3",
    "UNIDIST_TRAIN_LOCAL_WORLD_SIZE": "4",
    "UNIDIST_TRAIN_NODE_RANK": "0",
    "UNIDIST_TRAIN_NUM_NODES": "1",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}
HOROVODRUN = {
    "HOROVOD_RANK": "2",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TF_CONFIG = {
    "TF_CONFIG": '{"cluster": {"worker": ["b:2222", "b:2223", "c:2222"], "chief": ["a:2222"], "ps": ["p:1"]}, '
    '"task": {"type": "worker", "index": 1}}'
}
PLAIN = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
SLURM_JOB = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "7", "SLURM_NNODES": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SLURM_STEP = SLURM_JOB | {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, World(), id="alone"),
        pytest.param(UNIDIST, World(3, 4, 3, 4, 0, 1, "unidist run"), id="unidist run"),
        pytest.param(TORCHRUN, World(5, 8, 1, 4, 1, 2, "torchrun"), id="torchrun"),
        pytest.param(TF_CONFIG, World(2, 4, 1, 2, 1, 3, "TF_CONFIG"), id="TF_CONFIG"),
        pytest.param(TF_CONFIG | UNIDIST, World(3, 4, 3, 4, 0, 1, "unidist run"), id="unidist run under TF_CONFIG"),
        pytest.param({"TF_CONFIG": "{}"}, World(), id="TF_CONFIG without a cluster"),
        pytest.param(HOROVODRUN, World(2, 4, 0, 2, 1, 2, "horovodrun"), id="horovodrun"),
        pytest.param(OPEN_MPI, World(5, 8, 1, 4, 1, 2, "mpirun"), id="Open MPI"),
        pytest.param(MPICH, World(3, 4, 1, 2, 1, 2, "mpiexec"), id="MPICH"),
        pytest.param(PLAIN, World(1, 3, 0, 1, 1, 3, "environment variables"), id="PyTorchJob"),
        pytest.param(
            PLAIN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}, World(1, 3, 1, 3, 0, 1, "environment variables"), id="plain, one host"
        ),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, World(launcher="environment variables"), id="a plain job of one needs no address"),
        pytest.param(SLURM_STEP, World(6, 7, 0, 1, 3, 4, "srun"), id="srun"),
        pytest.param(
            SLURM_STEP | {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"},
            World(5, 7, 1, 2, 2, 4, "srun"),
            id="srun, node 2",
        ),
        pytest.param(
            SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "7", "SLURM_NTASKS": "9"}, World(6, 7, 0, 1, 3, 4, "srun"), id="the step's size counts"
        ),
        pytest.param(SLURM_JOB, World(), id="sbatch without srun"),
        pytest.param(SLURM_STEP | {"SLURM_STEP_ID": "4294967290"}, World(), id="the shell of salloc"),
    ],
)
def test_each_launcher(environ: dict[str, str], expected: World) -> None:
    assert read_world(environ) == expected


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (SLURM_STEP | TORCHRUN, "torchrun"),
        (SLURM_STEP | OPEN_MPI, "mpirun"),
        (SLURM_STEP | TORCHRUN | UNIDIST, "unidist run"),
        (SLURM_STEP | PLAIN, "environment variables"),
        (OPEN_MPI | TORCHRUN, "torchrun"),
        (SLURM_STEP | {"MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "7"}, "srun"),
        (SLURM_STEP | {"PMI_RANK": "6", "PMI_SIZE": "7"}, "srun"),
    ],
)
def test_the_innermost_launcher_counts(environ: dict[str, str], launcher: str) -> None:
    assert read_world(environ).launcher == launcher


def _without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        pytest.param(PLAIN | {"RANK": ""}, ["RANK", "''"], id="empty"),
        pytest.param(PLAIN | {"RANK": "x"}, ["RANK", "'x'"], id="no number"),
        pytest.param(PLAIN | {"RANK": "-1"}, ["RANK", "'-1'"], id="negative"),
        pytest.param(PLAIN | {"RANK": "3"}, ["RANK is 3", "WORLD_SIZE is 3"], id="rank too high"),
        pytest.param(PLAIN | {"WORLD_SIZE": "0"}, ["WORLD_SIZE is 0"], id="no workers"),
        pytest.param(_without(PLAIN, "WORLD_SIZE"), ["WORLD_SIZE", "RANK='1'"], id="no size"),
        pytest.param(_without(PLAIN, "MASTER_ADDR"), ["MASTER_ADDR"], id="no address"),
        pytest.param(PLAIN | {"MASTER_PORT": " "}, ["MASTER_PORT"], id="blank port"),
        pytest.param({"WORLD_SIZE": "2"}, ["WORLD_SIZE is '2'", "RANK"], id="size alone"),
        pytest.param(PLAIN | {"LOCAL_RANK": "0"}, ["LOCAL_WORLD_SIZE"], id="half of the local variables"),
        pytest.param(PLAIN | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, ["LOCAL_RANK is 2"], id="local rank too high"),
        pytest.param(PLAIN | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, ["LOCAL_WORLD_SIZE", "4", "3"], id="host larger than job"),
        pytest.param(_without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), ["OMPI_COMM_WORLD_LOCAL_RANK"], id="MPI without local rank"),
        pytest.param(_without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), ["OMPI_COMM_WORLD_SIZE"], id="MPI without size"),
        pytest.param({"PMI_RANK": "1", "PMI_SIZE": "4"}, ["MPI_LOCALRANKID"], id="PMI without local rank"),
        pytest.param(TORCHRUN | {"GROUP_RANK": "2"}, ["GROUP_RANK is 2"], id="node rank too high"),
        pytest.param(SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"}, ["SLURM_STEP_TASKS_PER_NODE", "'two'"], id="tasks unreadable"),
        pytest.param(SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, ["SLURM_STEP_TASKS_PER_NODE", "2 nodes"], id="tasks too few"),
        pytest.param(_without(SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE"), ["SLURM_STEP_TASKS_PER_NODE"], id="tasks missing"),
    ],
)
def test_a_broken_set_is_named(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        read_world(environ)
    for word in words:
        assert word in str(caught.value)


def test_the_local_rank_never_comes_from_the_global_one() -> None:
    """Rank 3 of 4 with one worker per host is local rank 0; mpirun's triple without a local size has one answer only."""
    assert read_world(PLAIN | {"RANK": "2"}).local_rank == 0
    triple = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert read_world(triple) == World(1, 2, 1, 2, 0, 1, "mpirun")


def test_ranks_dealt_out_host_by_host() -> None:
    """`mpirun --map-by node`: ranks 0 and 2 on one host, 1 and 3 on the other."""
    environ = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    assert with_hosts(read_world(environ), ["a", "b", "a", "b"]).node_rank == 1
    assert with_hosts(read_world(environ), ["a", "a", "a", "a"]).num_nodes == 2  # two containers may share a name
    assert with_hosts(read_world(TORCHRUN), ["a"] * 8).node_rank == 1


def test_explain_names_what_was_seen_and_taken() -> None:
    lines = "\n".join(explain_world(SLURM_STEP | TORCHRUN))
    assert "torchrun: TORCHELASTIC_RUN_ID=none" in lines
    assert "srun: SLURM_STEP_ID=0" in lines
    assert "taken: torchrun, the innermost of them: rank 5 of 8" in lines
    assert "no launcher" in "\n".join(explain_world({}))
    assert "batch script" in "\n".join(explain_world(SLURM_JOB))
    assert "RANK is '' " in "\n".join(explain_world({"RANK": ""})).replace(",", " ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "can't be read"),
        ('{"cluster": {"worker": ["a:1"]}}', "can't be read"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}', "ps 0, which is not one of its workers"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}', "worker 1, which is not one of its workers"),
    ],
)
def test_a_broken_tf_config_is_named(text: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        read_world({"TF_CONFIG": text})


def test_where_the_ranks_of_tf_config_meet() -> None:
    """At the first worker's host, all at the same port, which other jobs don't share."""
    world = read_world(TF_CONFIG)
    places = [meeting.find(world, TF_CONFIG | more, 0, None) for more in ({}, {"MASTER_PORT": "77"})]
    assert [place.port for place in places] == [int(places[0].lookup(1.0).split(":")[1].split("/")[0]), 77]
    assert places[0].lookup(1.0).startswith("a:") and places[1].lookup(1.0).startswith("a:77/")
    other = {"TF_CONFIG": TF_CONFIG["TF_CONFIG"].replace("c:2222", "c:2224")}
    assert meeting.find(read_world(other), other, 0, None).port != places[0].port
