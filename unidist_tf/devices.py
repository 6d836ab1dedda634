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


def several(count: int | None) -> list[str]:
    """The names of `count` devices of this process: GPUs where there are any, else logical CPUs, made here; all GPUs for None.

    Raises LaunchError when there are fewer, naming both numbers.
    """
    gpus = tf.config.list_logical_devices("GPU")
    if gpus:
        wanted = len(gpus) if count is None else count
        if wanted > len(gpus):
            raise LaunchError(f"{wanted} devices were asked for, but this process sees {len(gpus)} GPUs")
        return [gpu.name for gpu in gpus[:wanted]]
    return _logical_cpus(count or 1)


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


def _logical_cpus(wanted: int) -> list[str]:
    cpus = tf.config.list_logical_devices("CPU")
    if len(cpus) < wanted:
        raise LaunchError(
            f"{wanted} devices were asked for, but TensorFlow was initialised with {len(cpus)} logical CPU{'s' if len(cpus) > 1 else ''} "
            "before unidist.init (by an operation or a list of devices), and can't change that; call unidist.init first"
        )
    return [cpu.name for cpu in cpus[:wanted]]
