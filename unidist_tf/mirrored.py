"""MirroredStrategy: one process drives several devices, and several such processes are one job.

Replicas sum their gradients through the strategy's collectives; what a process has summed is then summed over processes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from unidist.agreement import given_up
from unidist.batch import Share, split_sizes
from unidist.errors import MismatchError, UnsupportedError
from unidist.groups import Group
from unidist.nest import map_nest
from unidist_keras.fit import divide, put_logs
from unidist_keras.functions import check_functions
from unidist_tf import multiworker, state, tensors, windows
from unidist_tf.agreed import Kinds
from unidist_tf.base import TFBackend
from unidist_tf.devices import grow_memory, own_gpus, several, split_cpu
from unidist_tf.keras import install_build, install_statistics, install_test_step, install_train_step
from unidist_tf.worker_ops import WorkerOps, differentiable_gather, differentiable_reduce


class Mirrored(TFBackend):
    """GPUs, or logical CPUs where there is none. Options go to MirroredStrategy (`cross_device_ops`)."""

    name = "mirrored"
    abilities: ClassVar[frozenset[str]] = frozenset({"reduce_gradients", "replicas", "processes"})

    def _check_options(self) -> None:
        """They go to MirroredStrategy, which checks them itself."""

    def _start_devices(self) -> None:
        split_cpu(self.settings.num_devices)
        own = own_gpus(self.world, self.settings.num_devices)
        grow_memory()
        if self.world.size == 1:
            self._devices = several(self.settings.num_devices)
        else:
            self._cluster = multiworker.join(self.world, self.control, own)
            self._devices = several(own, self._cluster.task)
            host = f"{self._cluster.task}device:CPU:0"
            self._workers = WorkerOps(self.world.rank, self.world.size, self._devices[0], host, self.settings.timeout)
            self._kinds = Kinds(self.control)
        options = dict(self.settings.options)
        if "GPU" not in self._devices[0]:
            # Measured on two CPU cores, 10 k parameters: 2.9 ms a step instead of up to 5.4 with TensorFlow's choice.
            options.setdefault("cross_device_ops", tf.distribute.ReductionToOneDevice())
        self.strategy = tf.distribute.MirroredStrategy(self._devices, **options)
        self.windows = windows.Windows()

    @property
    def local_replicas(self) -> int:
        return len(self._devices)

    @property
    def device(self) -> str:
        """The first of the devices."""
        return self._devices[0]

    def _hardware(self) -> str:
        return super()._hardware() if self.world.size == 1 else f"{super()._hardware()}, TensorFlow's collectives"

    def _engine(self) -> Mapping[str, Any]:
        return {"strategy": self.strategy}

    def _scope(self) -> contextlib.AbstractContextManager[Any]:
        return self.strategy.scope()  # type: ignore[no-any-return]

    def _native(self, obj: Any) -> Any:
        return self.strategy if obj in self._models else obj

    def _batch_device(self) -> contextlib.AbstractContextManager[Any]:
        """On the host: each replica takes its own rows to its device."""
        return tf.device("CPU:0")  # type: ignore[no-any-return]

    # objects

    def _check_place(self, obj: Any, what: str) -> None:
        variables = [state.raw(v) for v in obj.variables]
        outside = [v for v in variables if not self.strategy.extended.variable_created_in_scope(v)]
        if outside:
            raise UnsupportedError(
                f"the {what} was built outside unidist.scope(), so its variables (the first: {outside[0].name!r}) live on one device; "
                f"build it inside: with unidist.scope(): {what} = ..."
            )

    def _check_optimizer(self, optimizer: Any) -> None:
        self._check_place(optimizer, "optimizer")
        if self.num_replicas == 1:
            return
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if getattr(inner, "use_ema", False) and inner.ema_overwrite_frequency:
            raise UnsupportedError(
                "ema_overwrite_frequency of Keras' optimizers doesn't run under MirroredStrategy, which allows no such condition "
                "in a step; leave it out, or use keras.callbacks.SwapEMAWeights, or the backend horovod"
            )
        if inner is not optimizer and windows.accumulates(inner):
            raise UnsupportedError(
                "gradient_accumulation_steps inside a LossScaleOptimizer doesn't run under MirroredStrategy; use "
                "unidist.make_train_step(..., gradient_accumulation_steps=k), or the backend horovod"
            )
        if windows.accumulates(optimizer):
            windows.adapt(optimizer, self)

    def _copies(self, tensor: Any) -> Sequence[Any]:
        return self.strategy.experimental_local_results(tensor)  # type: ignore[no-any-return]

    def _end_of_pass(self) -> None:
        """Keras lets each replica keep the statistics of its own share; the first replica's of rank 0 are the model's."""
        for model in self._models.with_statistics(self.control) if self.num_replicas > 1 else []:
            found = state.running_statistics(model)
            for variable in found.values():
                variable.assign(tf.convert_to_tensor(self._copies(variable)[0]))
            if self.world.size > 1:
                state.same_start(self, "the running statistics", found, 0)

    def _adapt_model(self, model: Any) -> None:
        if self.world.size > 1:
            divide(model, self)
        else:
            super()._adapt_model(model)
        if self.num_replicas > 1:
            on_cpu = "" if "GPU" in self._devices[0] else "MirroredStrategy crashes with it on logical CPUs"
            check_functions(model, self, no_jit=on_cpu, one_step=on_cpu, make=windows.two_steps, bounded=self._bounded)
            if self.world.size == 1:
                put_logs(model, self)
                install_statistics(model, self)
            install_train_step(model, self)
            install_test_step(model, self)
            install_build(model, self, self.strategy)

    # exchange

    def _replica(self) -> Any:
        """The context of the replica that calls; None outside `strategy.run`."""
        context = tf.distribute.get_replica_context()
        return context if context is not None and context.strategy is self.strategy else None

    def _replica_number(self) -> Any:
        context = self._replica()
        return 0 if context is None else context.replica_id_in_sync_group

    def _num_parts(self) -> int:
        return self.world.size if self._replica() is None else self.num_replicas

    def _place(self) -> Any:
        """Which of the `_num_parts` this is."""
        context, rank = self._replica(), self.world.rank
        return rank if context is None else rank * self.local_replicas + context.replica_id_in_sync_group

    def _seen_scale(self) -> Any:
        share = self.shares.seen().share
        if self._replica() is None or self.local_replicas == 1:
            return super()._seen_scale()
        if share is not None and not share.even:
            raise ValueError(
                f"the batch last drawn has shares {share.sizes}, and a replica can't know its own: pass the rows of its gradients as "
                "unidist.reduce_gradients(gradients, weight=rows), or use make_train_step"
            )
        return 1.0

    def _sum(self, gradients: Sequence[Any], weight: Any, variables: Sequence[Any] | None = None) -> tuple[list[Any], Any]:
        if self._num_parts() == 1:
            return list(gradients), weight
        if self.world.size > 1 and variables is not None:
            return self._sum_agreed(gradients, weight, variables)
        present = [g for g in gradients if g is not None] + ([] if weight is None else [weight])
        summed = iter(self._add(present) if present else [])
        return [None if g is None else next(summed) for g in gradients], None if weight is None else next(summed)

    def _sum_agreed(self, gradients: Sequence[Any], weight: Any, variables: Sequence[Any]) -> tuple[list[Any], Any]:
        """As `_sum`; the processes tell each other once which gradients there are, and eagerly in each step which were used."""
        given = self._kinds.filled(gradients, variables)
        used = self._kinds.used(gradients) if tf.executing_eagerly() else []
        extra = [t for t in (weight, *used) if t is not None]
        present = [g if isinstance(g, tf.IndexedSlices) else tf.convert_to_tensor(g) for g in given if g is not None]
        summed = iter(self._add([*present, *extra]) if present or extra else [])
        result = [None if g is None else next(summed) for g in given]
        total = None if weight is None else next(summed)
        for flags in summed:
            result = [g if flag else None for g, flag in zip(result, flags.numpy().tolist())]
        return result, total

    def _add(self, values: Sequence[Any]) -> list[Any]:
        """Dense and sparse tensors, summed over the replicas of all processes, or outside of replicas over processes."""
        if self.world.size == 1:
            return list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, list(values)))
        context = self._replica()
        if context is None:
            with self._bounded("an exchange of gradients"):
                return self._workers.sum([_tensor(v) for v in values])
        return list(context.merge_call(self._add_merged, args=tuple(_tensor(v) for v in values)))

    def _add_merged(self, strategy: Any, *values: Any) -> list[Any]:
        if self.local_replicas == 1:
            own = list(values)
        else:
            # Not the strategy's choice: what is summed on the first device goes from there to the other processes.
            first = self._devices[0]
            own = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, [(value, first) for value in values])
            own = [strategy.experimental_local_results(value)[0] for value in own]
        with self._bounded("an exchange of gradients"):
            return self._workers.sum(own)

    def _differentiable(self, name: str, tensor: tf.Tensor, *, group: Group | None, **arguments: Any) -> tf.Tensor:
        parts, place = self._num_parts(), self._place()
        gather: Callable[[tf.Tensor], tf.Tensor]
        if self.world.size > 1:
            gather = functools.partial(differentiable_gather, index=place, parts=parts, add=self._add)
            reduce = functools.partial(differentiable_reduce, parts=parts, add=self._add)
        else:
            context = tf.distribute.get_replica_context()
            gather = functools.partial(context.all_gather, axis=0)
            reduce = lambda x, op: context.all_reduce(getattr(tf.distribute.ReduceOp, op.upper()), x)  # noqa: E731
        if name == "all_gather":
            return gather(tensor)
        if name == "all_to_all":
            return _exchanged(gather, tensor, arguments["sizes"], parts, place)
        total = reduce(tensor, op=arguments["op"])
        if name == "all_reduce":
            return total
        begin, size = tensors.rows_of(tf.shape(tensor)[0], place, parts)
        return total[begin : begin + size]

    def _explained(self, operation: str, error: tf.errors.OpError) -> Exception:
        """TensorFlow's errors of collectives as unidist's, with the ranks that it doesn't name; its other errors as they are."""
        text = str(error.message)
        if self.world.size == 1 or "ollective" not in text:
            return error  # type: ignore[no-any-return]
        self._cluster.broken = (
            f"TensorFlow's collectives of this process were given up, so that new processes are needed: {text.splitlines()[0]}"
        )
        if "ismatch" in text:
            return MismatchError(f"{operation} got values that don't fit together: {text}")
        return given_up(self.control, operation, self.settings.timeout, text)

    # collectives

    def _all_reduce(self, tensor: Any, op: str, *, group: Group | None = None) -> Any:
        with self._bounded(f"all_reduce({op})"):
            return self._workers.all_reduce(tensor, op)

    def _all_gather(self, tensor: Any, first_dims: Sequence[int], *, group: Group | None = None) -> Any:
        with self._bounded("all_gather"):
            return self._workers.all_gather(tensor, first_dims)

    def _broadcast(self, tensor: Any, root: int, *, group: Group | None = None) -> Any:
        with self._bounded("broadcast"):
            return self._workers.broadcast(tensor, root)

    # steps

    def _sizes(self, batch: Any, share: Share | None) -> list[int]:
        rows = tensors.num_rows(batch)
        if share is None:
            return list(split_sizes(rows, self.local_replicas))
        if rows != max(share.size, 1):
            raise ValueError(f"the batch has {rows} rows, but wrap_data gave one of {share.size}: a replica can't find its rows in it")
        return list(share.local_sizes)

    def _spread(self, function: Callable[..., Any], batch: Any, sizes: tf.Tensor, *numbers: tf.Tensor) -> list[Any]:
        starts = tf.minimum(tf.cumsum(sizes, exclusive=True), tf.maximum(tf.reduce_sum(sizes) - 1, 0))

        def replica(*numbers: tf.Tensor) -> Any:
            index = tf.distribute.get_replica_context().replica_id_in_sync_group
            begin, size = starts[index], sizes[index]
            stop = begin + tf.maximum(size, 1)
            return function(map_nest(lambda leaf: leaf if leaf is None else leaf[begin:stop], batch), size, *numbers)

        return self._on_replicas(replica, *numbers)

    def _on_replicas(self, function: Callable[..., Any], *numbers: tf.Tensor) -> list[Any]:
        results = self.strategy.run(function, args=numbers)
        local = self.strategy.experimental_local_results
        return [map_nest(lambda value, i=i: local(value)[i], results) for i in range(self.local_replicas)]

    def _update_metric(self, metric: Any, targets: Any, outputs: Any, sample_weight: Any) -> None:
        if not any(self.strategy.extended.variable_created_in_scope(state.raw(v)) for v in metric.variables):
            return super()._update_metric(metric, targets, outputs, sample_weight)

        def first_replica() -> None:
            if tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group) == 0:
                metric.update_state(targets, outputs, sample_weight=sample_weight)

        self.strategy.run(first_replica)
        return None


def _exchanged(gather: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor, sizes: Sequence[int] | None, parts: int, own: Any) -> tf.Tensor:
    """all_to_all among replicas: `gather` joins all rows, and those for replica `own` are taken."""
    given = [tensors.rows_of(tf.shape(tensor)[0], part, parts)[1] for part in range(parts)] if sizes is None else list(sizes)
    table = tf.reshape(gather(tf.stack(given)), [parts, parts])
    begins = tf.reshape(tf.cumsum(tf.reshape(table, [-1]), exclusive=True), [parts, parts])
    joined = gather(tensor)
    return tf.concat([joined[begins[a, own] : begins[a, own] + table[a, own]] for a in range(parts)], 0)


def _tensor(value: Any) -> Any:
    """Dense values as tensors; sparse ones as they are."""
    return value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)
