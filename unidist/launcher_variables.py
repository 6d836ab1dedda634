"""The table of launchers: which variables say that one started this process, and which hold ranks and sizes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher; where a field has several names, the first that is set counts.

    `sign` is the variable whose presence says that this launcher started the process, `also` names variables that
    a job of more than one process needs besides. Without node variables the nodes are derived from the local size.
    `one_per_host`: without local variables there is one worker per host. `tasks`: the local size is this node's
    entry of that list (Slurm's notation).
    """

    name: str
    sign: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    one_per_host: bool = False
    tasks: str = ""


# From the innermost to the outermost: under `srun torchrun` both sets exist, and torchrun's describe the worker.
LAUNCHERS = (
    Launcher(
        name="unidist run",
        sign="UNIDIST_TRAIN_RANK",
        rank=("UNIDIST_TRAIN_RANK",),
        size=("UNIDIST_TRAIN_WORLD_SIZE",),
        local_rank=("UNIDIST_TRAIN_LOCAL_RANK",),
        local_size=("UNIDIST_TRAIN_LOCAL_WORLD_SIZE",),
        node_rank=("UNIDIST_TRAIN_NODE_RANK",),
        num_nodes=("UNIDIST_TRAIN_NUM_NODES",),
    ),
    Launcher(
        name="torchrun",
        sign="TORCHELASTIC_RUN_ID",
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK",),
        num_nodes=("GROUP_WORLD_SIZE",),
    ),
    Launcher(
        name="horovodrun",
        sign="HOROVOD_RANK",
        rank=("HOROVOD_RANK",),
        size=("HOROVOD_SIZE",),
        local_rank=("HOROVOD_LOCAL_RANK",),
        local_size=("HOROVOD_LOCAL_SIZE",),
        node_rank=("HOROVOD_CROSS_RANK",),
        num_nodes=("HOROVOD_CROSS_SIZE",),
    ),
    Launcher(
        name="mpirun",
        sign="OMPI_COMM_WORLD_RANK",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher(
        name="mpiexec",
        sign="PMI_RANK",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    Launcher(
        name="environment variables",
        sign="RANK",
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        node_rank=("NODE_RANK", "GROUP_RANK", "CROSS_RANK"),
        num_nodes=("GROUP_WORLD_SIZE", "CROSS_SIZE"),
        also=("MASTER_ADDR", "MASTER_PORT"),
        one_per_host=True,
    ),
    Launcher(
        name="srun",
        sign="SLURM_STEP_ID",
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        node_rank=("SLURM_NODEID",),
        num_nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        tasks="SLURM_STEP_TASKS_PER_NODE",
    ),
)
