"""One process, one device: the reference that every other backend is compared with."""

from __future__ import annotations

import tensorflow as tf

from unidist_tf.base import TFBackend
from unidist_tf.devices import grow_memory


class Local(TFBackend):
    """Nothing is exchanged."""

    name = "local"

    def _start_devices(self) -> None:
        grow_memory()

    @property
    def device(self) -> str:
        """TensorFlow's own choice: the first GPU, else the CPU."""
        return str((tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU"))[0].name)

    def _hardware(self) -> str:
        count = len(tf.config.list_logical_devices("GPU"))
        if count > 1:
            return f"uses 1 of {count} GPUs; all: unidist run -n {count} --backend mirrored SCRIPT"
        return super()._hardware()
