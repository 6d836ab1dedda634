"""MirroredStrategy: one process drives several devices; replicas sum their gradients through its collectives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from unidist.batch import Share, split_sizes
from unidist.errors import UnsupportedError
from unidist.nest import map_nest
from unidist_keras.fit import put_logs
from unidist_keras.functions import check_functions
from unidist_keras.on_instance import put
from unidist_tf import gradients as grads
from unidist_tf import state, tensors, windows
from unidist_tf.base import TFBackend
from unidist_tf.devices import grow_memory, several, split_cpu
from unidist_tf.keras import install_build, install_test_step, install_train_step


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
        super()._check_optimizer(optimizer)
        self._check_place(optimizer, "optimizer")
        if self.num_replicas == 1:
            return
        if getattr(optimizer, "use_ema", False) and optimizer.ema_overwrite_frequency:
            raise UnsupportedError(
                "ema_overwrite_frequency of Keras' optimizers doesn't run under MirroredStrategy, which allows no such condition "
                "in a step; leave it out, or use keras.callbacks.SwapEMAWeights, or the backend horovod"
            )
        if windows.accumulates(optimizer):
            windows.adapt(optimizer, self)

    def _sync_batchnorm(self, model: Any) -> None:
        for layer in model._flatten_layers() if isinstance(model, keras.Layer) else []:
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = True

    def _adapt_model(self, model: Any) -> None:
        super()._adapt_model(model)
        if self.num_replicas > 1:
            put_logs(model, self)
            on_cpu = "" if "GPU" in self._devices[0] else "MirroredStrategy crashes with it on logical CPUs"
            check_functions(model, self, no_jit=on_cpu, one_step=on_cpu, make=windows.two_steps)
            install_train_step(model, self)
            install_test_step(model, self)
            install_build(model, self, self.strategy)

    # exchange

    def _replica(self) -> Any:
        """The context of the replica that calls; None outside `strategy.run`."""
        context = tf.distribute.get_replica_context()
        return context if context is not None and context.strategy is self.strategy else None

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

    def _wrap_optimizer(self, optimizer: Any, model: Any, *, compression: Any, options: Mapping[str, Any]) -> Any:
        super()._wrap_optimizer(optimizer, model, compression=compression, options=options)
        if self.num_replicas > 1:
            put(optimizer, "scale_loss", functools.partial(self._weigh, optimizer))
        return optimizer

    def _weigh(self, optimizer: Any, loss: Any) -> Any:
        """In `fit`, the loss times the replica's rows before gradients are taken: some pass to other replicas (synchronised BatchNorm)."""
        loss = type(optimizer).scale_loss(optimizer, loss)
        if self.counting.weight is None:
            return loss
        self.counting.weighed = True
        return loss * tf.cast(self.counting.weight, loss.dtype)

    def _reduce(
        self, gradients: Sequence[Any], *, scale: Any = None, weight: Any = None, variables: Sequence[Any] | None = None
    ) -> list[Any]:
        if weight is None or not self.counting.weighed or self._num_parts() == 1:
            return super()._reduce(gradients, scale=scale, weight=weight, variables=variables)
        self.counting.weighed = False
        weight = grads.cast_weight(weight, gradients)
        summed, total = self._sum(grads.kept_if(weight > 0, gradients), weight)
        return grads.divided(summed, total)

    def _grad_collective(self, name: str, tensor: Any, **arguments: Any) -> Any:
        context = self._replica()
        if context is None or self.local_replicas == 1:
            return tf.convert_to_tensor(tensor)
        if name == "all_gather":
            return context.all_gather(tensor, axis=0)
        return context.all_reduce(getattr(tf.distribute.ReduceOp, arguments["op"].upper()), tensor)

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
