"""TorchBackend: what all torch backends share; each adds how it starts and how it exchanges."""

from __future__ import annotations

import contextlib
import functools
import random
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy
import torch

from unidist import frameworks
from unidist.agreement import Models, given_up
from unidist.base import Backend, Step, StepOptions
from unidist.batch import Share
from unidist.checkpoint.parts import Store
from unidist.cli.identity import check_not_modin
from unidist.collectives import broadcast_object
from unidist.data import Source
from unidist.errors import FrameworkMismatchError, MismatchError, PeerFailedError, UnidistError, UnsupportedError
from unidist.groups import Group, position
from unidist_torch import differentiable, evaluation, state, tensors
from unidist_torch.class_losses import as_total, scalar_weight
from unidist_torch.data import read_source
from unidist_torch.devices import local_device
from unidist_torch.engines import Engines, check_wrapped
from unidist_torch.hooks import Engine
from unidist_torch.step import TorchStep, clip
from unidist_torch.transport import Alone, Transport
from unidist_torch.weighted import WeightedWindow

check_not_modin()

# In the engines' words: a rank did not come in time, or has gone.
_BROKEN_OFF = ("imed out", "Horovod has been shut down", "onnection closed by peer", "onnection reset by peer", "remote process exited")


class TorchBackend(Backend):
    """Models, optimizers, steps and state on PyTorch; `transport` carries tensors between the processes."""

    framework = "torch"
    abilities: ClassVar[frozenset[str]] = frozenset({"backward"})
    transport: Transport = Alone()

    def _start(self) -> None:
        self._check_options()
        self._device = local_device(self.world)
        self.engines = Engines()
        self.weighted = WeightedWindow(self)
        self._models = Models()
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()

    def _seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)  # from which Keras' initializers and seed generators take their seeds

    def _check_options(self) -> None:
        """Raise TypeError for options of `init` that the engine does not take: none of the engines here takes any."""
        if self.settings.options:
            raise TypeError(f"init got options that {self.framework}/{self.name} does not know: {sorted(self.settings.options)}")

    def _stop(self) -> None:
        self.engines.close()
        for transport in self.groups.values():
            if transport is not None:
                transport.close()

    @property
    def device(self) -> torch.device:
        """This worker's device."""
        return self._device

    def _hardware(self) -> str:
        if self._device.type == "cuda":
            return f"{self.world.size} x {torch.cuda.get_device_name(self._device)}"
        return "CPU"

    # objects

    def _make_engine(self, model: torch.nn.Module, *, find_unused: bool, options: Mapping[str, Any]) -> Engine | None:
        """The exchange for a native model's backward passes; None where there is nothing to exchange."""
        raise NotImplementedError

    def _wrap_model(self, model: Any, *, sync_batchnorm: bool, find_unused_parameters: bool, options: Mapping[str, Any]) -> Any:
        if not isinstance(model, torch.nn.Module):
            raise FrameworkMismatchError(f"wrap_model takes a torch.nn.Module or a Keras model, not a {type(model).__name__}")
        if model in self._models:
            raise UnsupportedError("this model is wrapped already")
        if frameworks.is_keras(model):
            from unidist_torch.keras import check_built

            check_built(model)
            if options:
                raise TypeError(f"wrap_model got options that mean nothing for a Keras model: {sorted(options)}")
        model.to(self._device)
        if sync_batchnorm:
            self._sync_batchnorm(model)
        self._same_start(model, 0)
        if not frameworks.is_keras(model):
            self._attach(model, find_unused=find_unused_parameters, options=options)
        else:
            self._adapt_keras(model)
        self._models.add(model, statistics=bool(running_statistics(model)))
        if self.settings.seed is not None:
            torch.manual_seed(self.settings.seed + 1_000_003 * (self.world.rank + 1))
        return model

    def _attach(self, model: torch.nn.Module, *, find_unused: bool, options: Mapping[str, Any]) -> None:
        engine = self._make_engine(model, find_unused=find_unused, options=options)
        if engine is not None:
            self.engines.attach(model, engine)

    def _adapt_keras(self, model: Any) -> None:
        from unidist_torch.keras import adapt_model, take

        (adapt_model if self.world.size > 1 else take)(model, self)

    @functools.cached_property
    def fit(self) -> Any:
        """What a running Keras fit tells the exchange."""
        from unidist_keras.fit import FitState

        return FitState()

    def _sync_batchnorm(self, model: torch.nn.Module) -> None:
        """Replace BatchNorm layers by synchronised ones where there is more than one process."""
        raise UnsupportedError(f"{self.framework}/{self.name} has no synchronised BatchNorm")

    def _wrap_optimizer(self, optimizer: Any, model: Any, *, compression: Any, options: Mapping[str, Any]) -> Any:
        if compression is not None:
            raise UnsupportedError(f"{self.framework}/{self.name} offers no compression of gradients, so {compression!r} can't be used")
        if options:
            raise TypeError(f"wrap_optimizer got options that {self.framework}/{self.name} does not know: {sorted(options)}")
        if frameworks.is_keras(optimizer):
            from unidist_torch.keras import adapt_optimizer

            adapt_optimizer(optimizer, model, self)
            self._same_start(optimizer, 0)
            return optimizer
        if not state.is_native_optimizer(optimizer):
            raise FrameworkMismatchError(f"wrap_optimizer takes a torch or Keras optimizer, not a {type(optimizer).__name__}")
        if model is not None:
            self._check_parameters(optimizer, model)
            if frameworks.is_keras(model) and self.engines.get(model) is None:
                self._attach(model, find_unused=False, options={})
        state.place(optimizer)
        self._same_start(optimizer, 0)
        if self.world.size > 1:
            self.engines.watch(optimizer)
        return optimizer

    def _check_parameters(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        mine = {id(p) for p in model.parameters()}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        others = [p for p in held if id(p) not in mine]
        if others:
            raise MismatchError(
                f"the optimizer holds {len(held)} parameters, {len(others)} of which are not the model's {len(mine)} (the first: "
                f"shape {tuple(others[0].shape)}); build it from model.parameters()"
            )

    def check_keras(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Once for each Keras optimizer: raises UnsupportedError when it would train variables of no wrapped model."""
        if optimizer not in self._checked:
            check_wrapped({id(v.value): v.value for v in variables}, (p for model in self._models for p in model.parameters()))
            self._checked.add(optimizer)

    def check_step(self, model: Any, optimizer: Any) -> None:
        """Whether a step can be made of these. Raises UnsupportedError when they were not wrapped in a job of several."""
        if self.world.size == 1:
            return
        inside = list(model.modules()) if isinstance(model, torch.nn.Module) else []
        if not any(module in self._models for module in inside):
            raise UnsupportedError("make_train_step takes a model that went through wrap_model; otherwise nothing would be exchanged")
        if isinstance(optimizer, torch.optim.Optimizer) and not self.engines.of(model) and any(p.requires_grad for p in model.parameters()):
            raise UnsupportedError("a torch optimizer on a Keras model needs wrap_optimizer(optimizer, model), with the model")

    def _native(self, obj: Any) -> Any:
        engine = self.engines.get(obj)
        found = engine.native() if engine is not None else None
        return obj if found is None else found

    def _replicated(self, obj: Any) -> dict[str, Any]:
        return state.model_tensors(obj) if isinstance(obj, torch.nn.Module) else state.optimizer_tensors(obj)

    def _has_state(self, obj: Any) -> bool:
        if isinstance(obj, dict) and hasattr(obj, "_metadata"):
            raise TypeError(
                "this is a model's state_dict, whose tensors are the model's own: call unidist.broadcast(model), which sets them in place"
            )
        return state.has_state(obj)

    def _same_start(self, obj: Any, root: int) -> None:
        if isinstance(obj, torch.nn.Module):
            state.broadcast_tensors(self.transport, self.control, "the model", state.model_tensors(obj), root)
        elif frameworks.is_keras(obj):
            from unidist_torch.keras import same_hyperparameters

            same_hyperparameters(obj, root, broadcast_object)
            state.broadcast_tensors(self.transport, self.control, "the optimizer", state.optimizer_tensors(obj), root)
        else:
            state.broadcast_state(self.transport, self.control, self.world.rank, obj, root, broadcast_object)

    def _end_of_pass(self) -> None:
        if self.world.size == 1:
            return
        with torch.no_grad():
            for model in self._models.with_statistics(self.control):
                for tensor in running_statistics(model).values():
                    tensor.copy_(self.transport.broadcast(tensor.detach().contiguous(), 0))

    # exchange

    def _backward(self, loss: Any, *, scale: float | None, weight: Any) -> None:
        drawn = self.shares.current
        empty = isinstance(scale, float) and scale == 0.0
        if isinstance(loss, tuple):
            loss, weight = loss
        elif loss.ndim:
            loss = loss.reshape(loss.shape[0], -1).mean(1).mean()
            loss = loss if weight is None else loss * weight
        elif weight is not None:
            loss = loss * weight
        elif (own := scalar_weight(loss, drawn.share)) is not None:
            loss, weight = as_total(loss, own), own
        self.shares.parameter_scale = 0.0 if empty else 1.0
        for engine in self.engines.all():
            if empty or engine._scaled:
                engine.scale_gradients(0.0 if empty else 1.0)
        factor: Any = scale or 1.0
        if weight is not None:
            factor = self.weighted.factor(drawn, weight, empty, loss)
        elif not drawn.begins and self.weighted.held:
            raise UnsupportedError("the batches of a window must all have losses with weights, or none of them")
        self.run_backward(loss if isinstance(factor, float) and factor == 1.0 else loss * factor)
        self.engines.check([e for e in self.engines.all() if e.forwards and e.drawn.exchange])

    def run_backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`; where the engine fails because of another rank, the error says so (see `explained`)."""
        try:
            loss.backward()
        except RuntimeError as error:
            explained = self.explained("backward", error)
            if explained is error:
                raise
            raise explained from error

    def explained(self, operation: str, error: RuntimeError) -> Exception:
        """An engine's error as unidist's: another rank's own, or with the ranks that did not come in time; else as it is."""
        if self.world.size == 1 or isinstance(error, UnidistError):
            return error
        if failed := self._failed_elsewhere():
            rank, text = next(iter(failed.items()))
            return PeerFailedError(f"rank {rank} failed while this one was in {operation}: {text}")
        if not any(sign in str(error) for sign in _BROKEN_OFF):
            return error
        return given_up(self.control, operation, self.settings.timeout, str(error))

    @contextlib.contextmanager
    def _bounded(self, operation: str) -> Iterator[None]:
        """Around a collective of the engine: it is bounded in time, and its errors are unidist's."""
        with self.control.waiting(operation):
            try:
                yield
            except RuntimeError as error:
                explained = self.explained(operation, error)
                raise explained from (error if explained is not error else None)

    def _failed_elsewhere(self) -> dict[int, str]:
        """The ranks that failed; an engine's broken connection may be noticed a moment before the news arrives."""
        for _ in range(20):
            if failures := self.control.failures():
                return failures
            time.sleep(0.05)
        return {}

    def weight_scale(self, weight: torch.Tensor) -> torch.Tensor:
        """What a total is multiplied by before the mean over processes, for the sum of weights over all ranks; 0 where that is 0."""
        total = self.transport.all_reduce(weight, "sum")
        return torch.where(total == 0, torch.zeros_like(total), self.world.size / total)

    def average_keras(self, gradients: Sequence[Any], variables: Sequence[Any], *, scale: float | None, weight: Any) -> list[Any]:
        """For Keras' optimizers: the reduced gradients, in one exchange; a variable used on no rank keeps None."""
        if self.world.size == 1:
            return list(gradients)
        from unidist_torch.keras import average

        return average(gradients, variables, scale, weight, self.transport)

    def _clip(self, optimizer: Any, *, max_norm: float | None, max_value: float | None) -> Any:
        if frameworks.is_keras(optimizer):
            raise UnsupportedError("a Keras optimizer reduces in apply; use its clipnorm, global_clipnorm or clipvalue, or make_train_step")
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        clip(gradients, max_norm, max_value)
        return norm

    # steps

    def _train_step(self, model: Any, optimizer: Any, options: StepOptions) -> Step:
        return TorchStep(self, model, optimizer, options)

    def _evaluate_batch(
        self, model: Any, batch: Any, share: Share | None, loss: Any, metrics: Mapping[str, Any]
    ) -> dict[str, tuple[float, float]]:
        return evaluation.evaluate_batch(model, batch, share, loss, metrics)

    def _is_metric(self, metric: Any) -> bool:
        return evaluation.is_metric(metric)

    def _merge_metric(self, metric: Any) -> float:
        return evaluation.merge_metric(self.transport, metric)

    def _predict_batch(self, model: Any, batch: Any, share: Share | None) -> Any:
        return evaluation.predict_batch(model, batch, share)

    # data

    def _source(self, data: Any, *, shuffle: bool, options: Mapping[str, Any]) -> Source:
        return read_source(data, self, shuffle=shuffle, options=options)

    def _fit_data(self, data: Any) -> Any:
        from unidist_torch.fit_data import fit_data

        return fit_data(self, data)

    # collectives

    def _as_tensor(self, leaf: Any) -> Any:
        return tensors.as_tensor(leaf)

    def _as_rows(self, tensor: Any) -> Any:
        return tensor.reshape(1) if tensor.ndim == 0 else tensor

    def _as_leaf(self, tensor: Any, like: Any) -> Any:
        return tensors.as_leaf(tensor, like)

    def _signature(self, tensor: Any) -> tuple[tuple[int, ...], str]:
        return tuple(tensor.shape), tensors.dtype_name(tensor)

    def _new_group(self, group: Group) -> Any:
        with self._bounded("new_group"):
            return self.transport.subgroup(group.ranks, group.name)

    def transport_of(self, group: Group | None) -> Transport:
        """What carries tensors between the ranks of a group; None: between all."""
        return self.transport if group is None else self.groups[group]

    def _all_reduce(self, tensor: Any, op: str, *, group: Group | None = None) -> Any:
        with self._bounded(f"all_reduce({op})"):
            return self.transport_of(group).all_reduce(tensor, op)

    def _reduce_scatter(self, tensor: Any, op: str, sizes: Sequence[int], *, group: Group | None = None) -> Any:
        with self._bounded(f"reduce_scatter({op})"):
            return self.transport_of(group).reduce_scatter(tensor, op, sizes, position(self, group))

    def _all_gather(self, tensor: Any, first_dims: Sequence[int], *, group: Group | None = None) -> Any:
        with self._bounded("all_gather"):
            return self.transport_of(group).all_gather(tensor, first_dims)

    def _all_to_all(self, tensor: Any, table: Sequence[Sequence[int]], *, group: Group | None = None) -> Any:
        with self._bounded("all_to_all"):
            return self.transport_of(group).all_to_all(tensor, table, position(self, group))

    def _broadcast(self, tensor: Any, root: int, *, group: Group | None = None) -> Any:
        with self._bounded("broadcast"):
            return self.transport_of(group).broadcast(tensor, root)

    def _grad_collective(self, name: str, tensor: Any, **arguments: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            raise FrameworkMismatchError(f"{name}(grad=True) takes torch tensors, not {type(tensor).__name__}")
        return differentiable.apply(name, tensor, **arguments)

    # state

    def _weights(self, model: Any) -> dict[str, Any]:
        self._end_of_pass()
        return {name: tensors.as_array(tensor) for name, tensor in state.model_tensors(model).items()}

    def _set_weights(self, model: Any, weights: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, tensor in state.model_tensors(model).items():
                tensor.copy_(torch.from_numpy(numpy.asarray(weights[name])))

    def _store(self) -> Store:
        from unidist_torch.checkpoint import TorchStore

        return TorchStore(self._device)


def running_statistics(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers by name, and what Keras holds as non-trainable variables."""
    if frameworks.is_keras(model):
        from unidist_torch.keras import numbered

        return {name: v.value for name, v in numbered(model.non_trainable_variables).items() if "seed" not in name}
    return dict(model.named_buffers())
