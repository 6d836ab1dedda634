"""Horovod's operations under TensorFlow: one process per device, started by any launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from unidist.agreement import given_up
from unidist.errors import MismatchError, UnsupportedError
from unidist.groups import Group, members
from unidist.launchers import horovod_start
from unidist.world import World
from unidist_keras.fit import divide
from unidist_keras.functions import check_functions
from unidist_tf import state
from unidist_tf.agreed import Kinds
from unidist_tf.base import TFBackend
from unidist_tf.devices import grow_memory, one_gpu
from unidist_tf.keras import install_build, install_test_step, install_train_step

horovod_start.require("tensorflow", "mpi_lib")

import horovod.tensorflow as hvd  # noqa: E402  its own error would not say how to install it

from unidist_tf import horovod_grad  # noqa: E402
from unidist_tf import horovod_ops as ops  # noqa: E402


class Horovod(TFBackend):
    """Gradients go through grouped allreduces; `init` adopts a Horovod that is initialised already."""

    name = "horovod"
    abilities: ClassVar[frozenset[str]] = frozenset({"groups", "reduce_gradients", "processes"})

    @classmethod
    def _adopted(cls) -> World | None:
        return horovod_start.adopted_world(hvd, os.environ)

    @classmethod
    def _meet(cls, address: str | None) -> str:
        length = int(hvd.broadcast(tf.constant(len(address or "")), 0, name="unidist.meet.length"))
        text = tf.constant(list((address or " " * length).encode()), tf.uint8)
        return bytes(hvd.broadcast(text, 0, name="unidist.meet").numpy()).decode()

    def _start_devices(self) -> None:
        one_gpu(self.world)
        grow_memory()
        self._service: horovod_start.Handle | None = None
        self._process_sets: dict[tuple[int, ...], Any] = {}  # Horovod has each set of ranks once
        self._fp16 = False
        self._kinds = Kinds(self.control)
        if not hvd.is_initialized():
            self._service = horovod_start.start(self.world, self.control, self.settings.timeout, os.environ)
            with self.control.waiting("Horovod's start"):
                hvd.init()

    def _stop(self) -> None:
        if self._service is None and not self.control.failures():
            for process_set in self._process_sets.values():
                hvd.remove_process_set(process_set)
        self._process_sets.clear()
        if self._service is not None:
            hvd.shutdown()
            self._service.stop()

    @property
    def device(self) -> str:
        """This worker's GPU, else the CPU."""
        return str((tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU"))[0].name)

    def _hardware(self) -> str:
        return f"{super()._hardware()}, horovod {'nccl' if hvd.nccl_built() else 'gloo' if hvd.gloo_enabled() else 'mpi'}"

    # objects

    def _adapt_model(self, model: Any) -> None:
        if self.world.size > 1:
            divide(model, self)
            install_train_step(model, self)
            install_test_step(model, self)
            install_build(model, self, None)
            check_functions(model, self, no_jit="Horovod's operations have no XLA form", bounded=self._bounded)
        else:
            super()._adapt_model(model)

    def _wrap_optimizer(self, optimizer: Any, model: Any, *, compression: Any, options: Mapping[str, Any]) -> Any:
        if compression not in (None, "fp16"):
            raise UnsupportedError(f"compression is None or 'fp16' on Horovod, not {compression!r}")
        self._fp16 = compression == "fp16"
        return super()._wrap_optimizer(optimizer, model, compression=None, options=options)

    def _end_of_pass(self) -> None:
        if self.world.size > 1:
            for model in self._models.with_statistics(self.control):
                state.same_start(self, "the running statistics", state.running_statistics(model), 0)

    # exchange

    def _num_parts(self) -> int:
        return self.world.size

    def _sum(self, gradients: Sequence[Any], weight: Any, variables: Sequence[Any] | None = None) -> tuple[list[Any], Any]:
        if self.world.size == 1:
            return list(gradients), weight
        with self._bounded("the exchange of gradients"):
            given = list(gradients) if variables is None else self._kinds.filled(gradients, variables)
            dense = [tf.convert_to_tensor(g) for g in given if g is not None and not isinstance(g, tf.IndexedSlices)]
            used = self._kinds.used(gradients) if variables is not None and tf.executing_eagerly() else []
            extra = [t for t in (weight, *used) if t is not None]
            summed = ops.sum_dense([*dense, *extra], self._fp16) if dense or extra else []
            found = iter(summed)
            result = [g if g is None else ops.sum_sparse(g) if isinstance(g, tf.IndexedSlices) else next(found) for g in given]
        total = None if weight is None else next(found)
        for flags in found:
            result = [g if flag else None for g, flag in zip(result, flags.numpy().tolist())]
        return result, total

    def _explained(self, operation: str, error: tf.errors.OpError) -> Exception:
        """Horovod's errors as unidist's, with the ranks that it doesn't name; TensorFlow's own errors as they are."""
        text = str(error.message)
        if "ismatched" in text:
            return MismatchError(f"{operation} got values that don't fit together: {text}")
        if "Horovod" not in text:
            return error  # type: ignore[no-any-return]
        return given_up(self.control, operation, self.settings.timeout, text)

    # collectives

    def _new_group(self, group: Group) -> Any:
        if group.size in (1, self.world.size):
            return ops.ALL
        timeout = self.settings.timeout
        self._service = horovod_start.allow_groups(hvd, self._service, self.world, self.control, timeout)
        if group.ranks not in self._process_sets:
            with self.control.waiting("new_group"):
                self._process_sets[group.ranks] = hvd.add_process_set(list(group.ranks))
        return self._process_sets[group.ranks]

    def _ranks(self, group: Group | None) -> Any:
        """The process set of a group."""
        return ops.ALL if group is None else self.groups[group]

    def _all_reduce(self, tensor: Any, op: str, *, group: Group | None = None) -> Any:
        with self._bounded(f"all_reduce({op})"):
            return ops.all_reduce(tensor, op, self._ranks(group))

    def _reduce_scatter(self, tensor: Any, op: str, sizes: Sequence[int], *, group: Group | None = None) -> Any:
        with self._bounded(f"reduce_scatter({op})"):
            return ops.reduce_scatter(tensor, op, sizes, self._ranks(group))

    def _all_gather(self, tensor: Any, first_dims: Sequence[int], *, group: Group | None = None) -> Any:
        with self._bounded("all_gather"):
            return ops.all_gather(tensor, first_dims, self._ranks(group))

    def _all_to_all(self, tensor: Any, table: Sequence[Sequence[int]], *, group: Group | None = None) -> Any:
        with self._bounded("all_to_all"):
            return ops.all_to_all(tensor, table, self._ranks(group))

    def _broadcast(self, tensor: Any, root: int, *, group: Group | None = None) -> Any:
        with self._bounded("broadcast"):
            return ops.broadcast(tensor, root, self._ranks(group))

    def _grad_parts(self, group: Group | None) -> int:
        return len(members(self, group))

    def _differentiable(self, name: str, tensor: tf.Tensor, *, group: Group | None, **arguments: Any) -> tf.Tensor:
        if tensor.dtype.is_complex:  # Horovod has none; both parts travel as one tensor
            parts = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
            moved = self._differentiable(name, parts, group=group, **arguments)
            return tf.complex(moved[..., 0], moved[..., 1])
        with self._bounded(f"{name}(grad=True)"):
            return getattr(horovod_grad, name)(tensor, *arguments.values(), self._ranks(group))
