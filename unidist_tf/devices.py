"""Which of TensorFlow's devices a process uses; decided before TensorFlow first uses any."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from unidist.errors import LaunchError
from unidist.launchers.gpus import pick
from unidist.world import World


def grow_memory() -> None:
    """GPUs take memory as it is needed, not all at once."""
    for gpu in tf.config.get_visible_devices("GPU"):
        # Raised once TensorFlow has used the GPU: it then keeps the memory that it has.
        with contextlib.suppress(RuntimeError):
            tf.config.experimental.set_memory_growth(gpu, True)


def one_gpu(world: World) -> None:
    """This worker sees its `local_rank`-th visible GPU only; the one there is where exactly one is visible.

    Raises LaunchError when the host shows fewer GPUs than it has workers, or TensorFlow has used them all already.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if len(gpus) <= 1:
        return
    try:
        tf.config.set_visible_devices(gpus[pick(world.local_rank, world.local_size, len(gpus))], "GPU")
    except RuntimeError as error:
        raise LaunchError("TensorFlow had used the GPUs before unidist.init could choose this worker's; call init first") from error


def own_gpus(world: World, count: int | None) -> int:
    """This worker sees its part of the visible GPUs only, `count` of them or an equal part; returns how many devices it drives.

    Raises LaunchError when the host shows too few, or TensorFlow has used them all already.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus or world.local_size == 1 or len(gpus) == (count or 1):
        return count or len(gpus) or 1
    each = count or len(gpus) // world.local_size
    if not each or each * world.local_size > len(gpus):
        raise LaunchError(
            f"this host shows {len(gpus)} GPUs to {world.local_size} workers{f' of {count}' if count else ''}; start fewer workers, or say "
            "num_devices"
        )
    try:
        tf.config.set_visible_devices(gpus[world.local_rank * each : (world.local_rank + 1) * each], "GPU")
    except RuntimeError as error:
        raise LaunchError("TensorFlow had used the GPUs before unidist.init could choose this worker's; call init first") from error
    return each


def several(count: int | None, task: str = "") -> list[str]:
    """The names of `count` devices of this process: GPUs where there are any, else logical CPUs, made here; all GPUs for None.

    task: how this process's devices begin in a cluster. Raises LaunchError when there are fewer, naming both numbers.
    """
    gpus = [gpu for gpu in tf.config.list_logical_devices("GPU") if gpu.name.startswith(task)]
    if gpus:
        wanted = len(gpus) if count is None else count
        if wanted > len(gpus):
            raise LaunchError(f"{wanted} devices were asked for, but this process sees {len(gpus)} GPUs")
        return [gpu.name for gpu in gpus[:wanted]]
    return _logical_cpus(count or 1, task)


def split_cpu(count: int | None) -> None:
    """Without a GPU, cut the CPU into `count` logical devices while that is possible."""
    if tf.config.get_visible_devices("GPU") or (count or 1) == 1:
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    present = tf.config.get_logical_device_configuration(cpu)
    if present is None or len(present) < (count or 1):
        # Raised once TensorFlow's devices are initialised; `several` then says whether there are enough.
        with contextlib.suppress(RuntimeError):
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * (count or 1))


def _logical_cpus(wanted: int, task: str) -> list[str]:
    cpus = [cpu for cpu in tf.config.list_logical_devices("CPU") if cpu.name.startswith(task)]
    if len(cpus) < wanted:
        raise LaunchError(
            f"{wanted} devices were asked for, but TensorFlow was initialised with {len(cpus)} logical CPU{'s' if len(cpus) > 1 else ''} "
            "before unidist.init (by an operation or a list of devices), and can't change that; call unidist.init first"
        )
    return [cpu.name for cpu in cpus[:wanted]]
