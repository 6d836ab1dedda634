"""MirroredStrategy: one process drives several devices; replicas sum their gradients through its collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from unidist.batch import Share, split_sizes
from unidist.errors import UnsupportedError
from unidist.groups import Group
from unidist.nest import map_nest
from unidist_keras.fit import put_logs
from unidist_keras.functions import check_functions
from unidist_tf import state, tensors, windows
from unidist_tf.base import TFBackend
from unidist_tf.devices import grow_memory, several, split_cpu
from unidist_tf.keras import install_build, install_statistics, install_test_step, install_train_step


class Mirrored(TFBackend):
    """GPUs, or logical CPUs where there is none. Options go to MirroredStrategy (`cross_device_ops`)."""

    name = "mirrored"
    abilities: ClassVar[frozenset[str]] = frozenset({"reduce_gradients", "replicas"})

    def _check_options(self) -> None:
        """They go to MirroredStrategy, which checks them itself."""

    def _start_devices(self) -> None:
        split_cpu(self.settings.num_devices)
        grow_memory()
        self._devices = several(self.settings.num_devices)
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
        """Keras lets each replica keep the statistics of its own share; the first replica's are the model's."""
        for model in self._models.with_statistics(self.control) if self.num_replicas > 1 else []:
            for variable in state.running_statistics(model).values():
                variable.assign(tf.convert_to_tensor(self._copies(variable)[0]))

    def _adapt_model(self, model: Any) -> None:
        super()._adapt_model(model)
        if self.num_replicas > 1:
            put_logs(model, self)
            on_cpu = "" if "GPU" in self._devices[0] else "MirroredStrategy crashes with it on logical CPUs"
            check_functions(model, self, no_jit=on_cpu, one_step=on_cpu, make=windows.two_steps)
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
        return 1 if self._replica() is None else self.local_replicas

    def _seen_scale(self) -> Any:
        share = self.shares.seen().share
        if self._replica() is not None and share is not None and not share.even:
            raise ValueError(
                f"the batch last drawn has shares {share.sizes}, and a replica can't know its own: pass the rows of its gradients as "
                "unidist.reduce_gradients(gradients, weight=rows), or use make_train_step"
            )
        return 1.0

    def _sum(self, gradients: Sequence[Any], weight: Any, variables: Sequence[Any] | None = None) -> tuple[list[Any], Any]:
        context = self._replica()
        present = [g for g in gradients if g is not None] + ([] if weight is None else [weight])
        if context is None or self.local_replicas == 1 or not present:
            return list(gradients), weight
        summed = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, present))
        return [None if g is None else next(summed) for g in gradients], None if weight is None else next(summed)

    def _differentiable(self, name: str, tensor: tf.Tensor, *, group: Group | None, **arguments: Any) -> tf.Tensor:
        context, parts = tf.distribute.get_replica_context(), self.local_replicas
        if name == "all_gather":
            return context.all_gather(tensor, axis=0)
        if name == "all_to_all":
            return _exchanged(context, tensor, arguments["sizes"], parts)
        total = context.all_reduce(getattr(tf.distribute.ReduceOp, arguments["op"].upper()), tensor)
        if name == "all_reduce":
            return total
        begin, size = tensors.rows_of(tf.shape(tensor)[0], context.replica_id_in_sync_group, parts)
        return total[begin : begin + size]

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


def _exchanged(context: Any, tensor: tf.Tensor, sizes: Sequence[int] | None, parts: int) -> tf.Tensor:
    """all_to_all in a replica's context: all rows are gathered, and those for this replica taken."""
    given = [tensors.rows_of(tf.shape(tensor)[0], part, parts)[1] for part in range(parts)] if sizes is None else list(sizes)
    table = tf.reshape(context.all_gather(tf.stack(given), axis=0), [parts, parts])
    begins = tf.reshape(tf.cumsum(tf.reshape(table, [-1]), exclusive=True), [parts, parts])
    joined, own = context.all_gather(tensor, axis=0), context.replica_id_in_sync_group
    return tf.concat([joined[begins[a, own] : begins[a, own] + table[a, own]] for a in range(parts)], 0)
