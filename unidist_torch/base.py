"""TorchBackend: what all torch backends share; each adds how it starts and how it exchanges."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy
import torch

from unidist import frameworks
from unidist.agreement import Models
from unidist.base import Backend, Step, StepOptions
from unidist.batch import Share
from unidist.cli.identity import check_not_modin
from unidist.collectives import broadcast_object
from unidist.context import raise_everywhere
from unidist.data import Source
from unidist.errors import CollectiveTimeoutError, FrameworkMismatchError, MismatchError, PeerFailedError, UnidistError, UnsupportedError
from unidist.nest import map_nest
from unidist_torch import differentiable, state, tensors
from unidist_torch.data import read_source
from unidist_torch.devices import local_device
from unidist_torch.hooks import Engine
from unidist_torch.step import Losses, TorchStep, clip, unpack
from unidist_torch.transport import Alone, Transport

check_not_modin()

_WHO_CAME = 2.0  # seconds in which the ranks that gave an operation up find each other, to tell which are missing


class TorchBackend(Backend):
    """Models, optimizers, steps and state on PyTorch; `transport` carries tensors between the processes."""

    framework = "torch"
    abilities: ClassVar[frozenset[str]] = frozenset({"backward"})
    transport: Transport = Alone()

    def _start(self) -> None:
        self._check_options()
        self._device = local_device(self.world)
        self._engines: weakref.WeakKeyDictionary[torch.nn.Module, Engine] = weakref.WeakKeyDictionary()
        self._models = Models()
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._attached = 0
        # optimizer: (when it was worked out, engines that hold its parameters, their passes at its last step)
        self._holds: weakref.WeakKeyDictionary[Any, tuple[Any, list[Engine], dict[Engine, int]]] = weakref.WeakKeyDictionary()
        if self.settings.seed is not None:
            torch.manual_seed(self.settings.seed)

    def _check_options(self) -> None:
        """Raise TypeError for options of `init` that the engine does not take: none of the engines here takes any."""
        if self.settings.options:
            raise TypeError(f"init got options that {self.framework}/{self.name} does not know: {sorted(self.settings.options)}")

    def _stop(self) -> None:
        for engine in self._engines.values():
            engine.close()

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
            self._engines[model] = engine
            self._attached += 1

    def _adapt_keras(self, model: Any) -> None:
        if self.world.size > 1:
            from unidist_torch.keras import adapt_model

            adapt_model(model, self)

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
            if frameworks.is_keras(model) and model not in self._engines:
                self._attach(model, find_unused=False, options={})
        self._same_start(optimizer, 0)
        if self.world.size > 1:
            optimizer.register_step_pre_hook(self._before_step)
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

    def _before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """Before any weight moves in an own loop: was everything exchanged? (A closure runs its passes later.)"""
        closure = arguments[1] if len(arguments) > 1 else keywords.get("closure")  # the first is the optimizer itself
        self._find_engines(optimizer)
        if closure is None:
            self.check_exchanged(self._unchecked(optimizer))

    def _find_engines(self, optimizer: Any) -> None:
        """Work out which engines exchange an optimizer's parameters, again when it or the wrapped models changed.

        Raises UnsupportedError when it would train parameters that no engine exchanges.
        """
        key = (len(optimizer.param_groups), self._attached)
        if self._holds.get(optimizer, (None,))[0] == key:
            return
        held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        known = self._holds.get(optimizer, (None, [], {}))[2]
        mine = [engine for engine in self._engines.values() if any(id(p) in held for p in engine.parameters)]
        check_wrapped(held, (p for engine in mine for p in engine.parameters))
        self._holds[optimizer] = (key, mine, {engine: known.get(engine, 0) for engine in mine})

    def _unchecked(self, optimizer: Any) -> list[Engine]:
        """The engines with parameters of this optimizer, without those whose passes since its last step were checked already."""
        _, mine, passes = self._holds[optimizer]
        unchecked = [engine for engine in mine if engine.forwards or engine.passes == passes[engine]]
        passes.update({engine: engine.passes for engine in mine})
        return unchecked

    def engines_of(self, model: Any) -> list[Engine]:
        """The engines that a step over this model drives: its own, else those of wrapped modules inside it."""
        if model in self._engines:
            return [self._engines[model]]
        inside = set(model.modules()) if isinstance(model, torch.nn.Module) else set()
        return [engine for wrapped, engine in self._engines.items() if wrapped in inside]

    def check_keras(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Once for each Keras optimizer: raises UnsupportedError when it would train variables of no wrapped model."""
        if optimizer not in self._checked:
            check_wrapped({id(v.value): v.value for v in variables}, (p for model in self._models for p in model.parameters()))
            self._checked.add(optimizer)

    def check_exchanged(self, engines: list[Engine]) -> None:
        """After backward: raises on this rank and posts to the board when an engine did not exchange.

        Raises RuntimeError naming unused parameters, or the method that went around the forward hooks.
        """
        for engine in engines:
            if engine.forwards == 0 and any(p.grad is not None and p.requires_grad for p in engine.parameters):
                raise_everywhere(MismatchError(
                    "gradients were computed by a forward pass that went around the model's own call (another method than "
                    "model(...)), so they were not exchanged; call the model itself, or wrap the module whose call it is"
                ))  # fmt: skip
            if engine.repeated():
                raise_everywhere(UnsupportedError(
                    "gradients came several times in one backward pass (reentrant activation checkpointing), of which the engine exchanges "
                    "the first: call torch.utils.checkpoint.checkpoint with use_reentrant=False, or pass static_graph=True to wrap_model"
                ))  # fmt: skip
            unused = engine.unexchanged() if engine.forwards else []
            if unused:
                raise_everywhere(MismatchError(
                    f"parameters without a gradient in this step: {', '.join(unused[:5])}{'...' if len(unused) > 5 else ''}; pass "
                    "find_unused_parameters=True to wrap_model when a forward pass does not use all of them"
                ))  # fmt: skip
            engine.forwards = 0

    def check_step(self, model: Any, optimizer: Any) -> None:
        """Whether a step can be made of these. Raises UnsupportedError when they were not wrapped in a job of several."""
        if self.world.size == 1:
            return
        inside = list(model.modules()) if isinstance(model, torch.nn.Module) else []
        if not any(module in self._models for module in inside):
            raise UnsupportedError("make_train_step takes a model that went through wrap_model; otherwise nothing would be exchanged")
        if isinstance(optimizer, torch.optim.Optimizer) and not self.engines_of(model) and self._trainable(model):
            raise UnsupportedError("a torch optimizer on a Keras model needs wrap_optimizer(optimizer, model), with the model")

    def _trainable(self, model: torch.nn.Module) -> bool:
        return any(p.requires_grad for p in model.parameters())

    def _native(self, obj: Any) -> Any:
        engine = self._engines.get(obj) if isinstance(obj, torch.nn.Module) else None
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
        if isinstance(loss, tuple):
            loss, weight = loss
            weight = torch.as_tensor(weight, dtype=loss.dtype, device=loss.device).detach()
            factor = self._weight_scale(weight if scale is None else torch.zeros_like(weight))
            scale = factor if scale is None else scale
        elif loss.ndim:
            loss = loss.reshape(loss.shape[0], -1).mean(1).mean()
        if weight is not None and scale is None:
            local = torch.as_tensor(weight, dtype=torch.float64)
            scale = float(local * self._weight_scale(local))
        for engine in self._engines.values():
            if engine._scaled:
                engine.scale_gradients(1.0)
            if isinstance(scale, float) and scale == 0.0:
                engine.scale_gradients(0.0)
        self.run_backward(loss if isinstance(scale, float) and scale in (0.0, 1.0) else loss * scale)
        self.check_exchanged([e for e in self._engines.values() if e.forwards and e.drawn.exchange])

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
        if not any(sign in str(error) for sign in ("imed out", "Horovod has been shut down")):
            return error
        try:
            self.control.gather(f"the end of {operation}", "", timeout=_WHO_CAME)
        except PeerFailedError as known:
            return known
        except (CollectiveTimeoutError, MismatchError) as known:
            return CollectiveTimeoutError(f"{operation} was given up (timeout {self.settings.timeout:g} s): {known}")
        return CollectiveTimeoutError(f"{operation} was given up on all ranks (timeout {self.settings.timeout:g} s): {error}")

    def _failed_elsewhere(self) -> dict[int, str]:
        """The ranks that failed; an engine's broken connection may be noticed a moment before the news arrives."""
        for _ in range(20):
            if failures := self.control.failures():
                return failures
            time.sleep(0.05)
        return {}

    def _weight_scale(self, weight: torch.Tensor) -> torch.Tensor:
        """What a total is multiplied by before the mean over processes, for the sum of weights over all ranks; 0 where that is 0."""
        total = self.transport.all_reduce(weight, "sum")
        return torch.where(total == 0, torch.zeros_like(total), self.world.size / total)

    def _average(self, gradients: Sequence[Any], *, scale: float | None, weight: Any) -> list[Any]:
        """For Keras' optimizers: the reduced gradients, in one exchange; a parameter used on no rank keeps None."""
        present = [g for g in gradients if g is not None]
        if self.world.size == 1 or not present:
            return list(gradients)
        from unidist_torch.keras import average

        return average(gradients, scale, weight, self.transport)

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
        inputs, targets, sample_weight = unpack(batch)
        outputs = self._infer(model, inputs)
        if share is not None and share.size == 0:
            return {}
        size = float(share.size if share is not None else 1)
        found = {}
        with torch.no_grad():
            if loss is not None:
                value, weight = Losses(model, loss, None).of_outputs(outputs, targets, sample_weight)
                found["loss"] = (float(value) * size, size) if weight is None else (float(value), float(weight))
            for name, metric in metrics.items():
                if self._is_metric(metric):
                    metric.update_state(targets, outputs, sample_weight=sample_weight)
                else:
                    found[name] = _metric_sums(metric(outputs, targets), size)
        return found

    def _infer(self, model: Any, inputs: Any) -> Any:
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return Losses(model, None, None).outputs(inputs, training=False)
        finally:
            model.train(was_training)

    def _is_metric(self, metric: Any) -> bool:
        return frameworks.is_keras(metric) and hasattr(metric, "update_state")

    def _merge_metric(self, metric: Any) -> float:
        for variable in metric.variables:
            variable.assign(self.transport.all_reduce(variable.value.detach().contiguous(), "sum"))
        result = float(metric.result())
        metric.reset_state()
        return result

    def _predict_batch(self, model: Any, batch: Any, share: Share | None) -> Any:
        outputs = self._infer(model, unpack(batch)[0])
        return map_nest(lambda rows: tensors.as_array(rows[: share.size] if share is not None else rows), outputs)

    # data

    def _source(self, data: Any, *, shuffle: bool, options: Mapping[str, Any]) -> Source:
        return read_source(data, self, shuffle=shuffle, options=options)

    # collectives

    def _as_tensor(self, leaf: Any) -> Any:
        return tensors.as_tensor(leaf)

    def _as_rows(self, tensor: Any) -> Any:
        return tensor.reshape(1) if tensor.ndim == 0 else tensor

    def _as_leaf(self, tensor: Any, like: Any) -> Any:
        return tensors.as_leaf(tensor, like)

    def _signature(self, tensor: Any) -> tuple[tuple[int, ...], str]:
        return tuple(tensor.shape), tensors.dtype_name(tensor)

    def _all_reduce(self, tensor: Any, op: str) -> Any:
        with self.control.waiting(f"all_reduce({op})"):
            return self.transport.all_reduce(tensor, op)

    def _all_gather(self, tensor: Any, first_dims: Sequence[int]) -> Any:
        with self.control.waiting("all_gather"):
            return self.transport.all_gather(tensor, first_dims)

    def _broadcast(self, tensor: Any, root: int) -> Any:
        with self.control.waiting("broadcast"):
            return self.transport.broadcast(tensor, root)

    def _grad_collective(self, name: str, tensor: Any, **arguments: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            raise FrameworkMismatchError(f"{name}(grad=True) takes torch tensors, not {type(tensor).__name__}")
        return differentiable.apply(name, tensor, self, **arguments)

    # state

    def _weights(self, model: Any) -> dict[str, Any]:
        self._end_of_pass()
        return {name: tensors.as_array(tensor) for name, tensor in state.model_tensors(model).items()}

    def _set_weights(self, model: Any, weights: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, tensor in state.model_tensors(model).items():
                tensor.copy_(torch.from_numpy(numpy.asarray(weights[name])))


def check_wrapped(held: Mapping[int, torch.Tensor], exchanged: Iterable[torch.Tensor]) -> None:
    """Raise UnsupportedError when an optimizer holds trainable parameters (by id) that are in no wrapped model."""
    known = {id(p) for p in exchanged}
    strays = [p for key, p in held.items() if p.requires_grad and key not in known]
    if strays:
        raise UnsupportedError(
            f"the optimizer holds {len(held)} parameters, {len(strays)} of which (the first: shape {tuple(strays[0].shape)}) are in no "
            "wrapped model, so every rank would train its own; call wrap_model on the module that holds them, before the first step"
        )


def running_statistics(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers by name, and what Keras holds as non-trainable variables."""
    if frameworks.is_keras(model):
        from unidist_torch.keras import numbered

        return {name: v.value for name, v in numbered(model.non_trainable_variables).items() if "seed" not in name}
    return dict(model.named_buffers())


def _metric_sums(values: torch.Tensor, size: float) -> tuple[float, float]:
    if values.ndim == 0:
        return float(values) * size, size
    return float(values.double().sum()), float(values.numel())
