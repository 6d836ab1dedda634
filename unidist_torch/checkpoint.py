"""Checkpoints on torch: modules by their state_dict's names, optimizer state by the names of the parameters."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from unidist import frameworks
from unidist.checkpoint.parts import Part, Store, check_class, check_names, signature_of
from unidist.checkpoint.safetensors_package import safetensors_module
from unidist.checkpoint.tree import Slot
from unidist.errors import FrameworkMismatchError, MismatchError
from unidist_torch import state, tensors

_COMPILED = "_orig_mod."  # what torch.compile puts in front of names


class TorchStore(Store):
    """device: of this process, whose generator is kept besides the CPU's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def model(self, model: Any) -> Part:
        if not isinstance(model, torch.nn.Module):
            raise FrameworkMismatchError(f"model is a {type(model).__name__}, not a torch.nn.Module or Keras model")
        if frameworks.is_keras(model):
            from unidist_keras.checkpoint import VariablesPart, models_weights

            return VariablesPart(models_weights({"": model}), lambda v: v.value.detach(), self.signature)
        return ModulePart(model, self)

    def optimizer(self, optimizer: Any, models: Mapping[str, Any]) -> Part:
        if isinstance(optimizer, torch.optim.Optimizer):
            return OptimizerPart(optimizer, models, self)
        if not (frameworks.is_keras(optimizer) and hasattr(optimizer, "apply")):
            raise FrameworkMismatchError(f"optimizer is a {type(optimizer).__name__}, not an optimizer of torch or Keras")
        from unidist_keras.checkpoint import OptimizerPart as KerasOptimizerPart
        from unidist_keras.checkpoint import models_weights

        only = next(iter(models.values())) if len(models) == 1 else None
        trained = {id(v) for model in models.values() for v in model.trainable_variables}
        build = (lambda: None) if only is None else (lambda: optimizer.build(only.trainable_variables))
        return KerasOptimizerPart(optimizer, models_weights(models), trained, lambda v: v.value.detach(), self.signature, build)

    def signature(self, value: Any) -> tuple[tuple[int, ...], str] | None:
        if not isinstance(value, torch.Tensor):
            return None
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            raise TypeError(f"a checkpoint holds dense tensors with values; {_describe(value)} is none")
        return tuple(value.shape), tensors.dtype_name(value)

    def write(self, named: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
        seen: set[int] = set()
        ready = {}
        for name, tensor in named.items():
            plain = tensor.detach().cpu().resolve_conj().contiguous()
            if plain.dtype is torch.complex128:  # which the format lacks
                plain = torch.view_as_real(plain)
            place = plain.untyped_storage().data_ptr()
            ready[name] = plain.clone() if place in seen else plain
            seen.add(place)
        safetensors_module("safetensors.torch").save_file(ready, path)

    def read(self, data: bytes, dtypes: Mapping[str, str]) -> dict[str, Any]:
        found = {}
        for name, tensor in safetensors_module("safetensors.torch").load(data).items():
            own = tensor.clone()
            found[name] = torch.view_as_complex(own) if dtypes.get(name) == "complex128" else own
        return found

    def random_state(self, models: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"cpu": _text(torch.get_rng_state())}
        if self._device.type == "cuda":
            found["cuda"] = _text(torch.cuda.get_rng_state(self._device))
        keras_models = {label: model for label, model in models.items() if frameworks.is_keras(model)}
        if keras_models:
            from unidist_keras.checkpoint import seed_states

            found["seed_generators"] = seed_states(keras_models, _to_list)
        return found

    def set_random_state(self, state: Mapping[str, Any], seed: int | None, models: Mapping[str, Any]) -> None:
        if seed is not None:
            torch.manual_seed(seed)
        else:
            torch.manual_seed(int.from_bytes(hashlib.sha256(state["cpu"].encode()).digest()[:7], "big"))  # for devices that were not saved
            torch.set_rng_state(_bytes(state["cpu"]))
            if self._device.type == "cuda" and "cuda" in state:
                torch.cuda.set_rng_state(_bytes(state["cuda"]), self._device)
        keras_models = {label: model for label, model in models.items() if frameworks.is_keras(model)}
        if keras_models:
            from unidist_keras.checkpoint import set_seed_states

            set_seed_states(keras_models, state.get("seed_generators", {}), _to_list, own_seeds=seed is not None)


class ModulePart(Part):
    """A module's `state_dict`; a tensor with several names is stored once, under the first."""

    def __init__(self, model: torch.nn.Module, store: TorchStore) -> None:
        state.model_tensors(model)  # raises for parameters without a shape
        self._model = model
        self._store = store

    def _own(self) -> tuple[dict[str, Any], dict[str, str]]:
        """(values by name, name of a tied tensor to its first name)."""
        values: dict[str, Any] = {}
        tied: dict[str, str] = {}
        first: dict[int, str] = {}
        for key, value in self._model.state_dict(keep_vars=True).items():
            name = key.replace(_COMPILED, "")
            if isinstance(value, torch.Tensor) and first.setdefault(id(value), name) != name:
                tied[name] = first[id(value)]
            else:
                values[name] = value
        return values, tied

    def state(self) -> Any:
        return self._own()[0]

    def facts(self) -> dict[str, Any]:
        return {"tied": self._own()[1]}

    def check(self, state: Any, facts: Mapping[str, Any]) -> None:
        values, tied = self._own()
        held = {name: self._store.signature(value) for name, value in values.items()}
        saved = {name: signature_of(value) for name, value in state.items()}
        check_names("the model", held | {name: held[first] for name, first in tied.items()},
                    saved | {name: saved[first] for name, first in facts["tied"].items()})  # fmt: skip
        for name, first in tied.items():
            if facts["tied"].get(name, name) != facts["tied"].get(first, first):
                raise MismatchError(f"{name!r} and {first!r} are one tensor of the model, but two in the checkpoint")

    def restore(self, state: Any, facts: Mapping[str, Any]) -> None:
        complete = {**state, **{name: state[first] for name, first in facts["tied"].items()}}
        self._model.load_state_dict({key: complete[key.replace(_COMPILED, "")] for key in self._model.state_dict()})


class OptimizerPart(Part):
    """A torch optimizer: groups with the names of their parameters, state by name."""

    def __init__(self, optimizer: torch.optim.Optimizer, models: Mapping[str, Any], store: TorchStore) -> None:
        self._optimizer = optimizer
        self._store = store
        self._names: dict[int, str] = {}
        self._frozen: list[str] = []
        for name, parameter in _parameters(models):
            self._names.setdefault(id(parameter), name)
            if not parameter.requires_grad:
                self._frozen.append(name)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    raise ValueError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that no given model has; pass model= with all "
                        "models whose parameters it holds, since its state is kept by their names"
                    )

    def _groups(self) -> list[list[str]]:
        return [[self._names[id(p)] for p in group["params"]] for group in self._optimizer.param_groups]

    def state(self) -> Any:
        own = dict(self._optimizer.state_dict())
        names = [name for group in self._groups() for name in group]
        states = {}
        for key, values in own.pop("state").items():
            if not isinstance(key, int):
                raise TypeError(f"the optimizer's state has the key {key!r}, which is no parameter; a checkpoint can't hold it")
            states[names[key]] = values
        groups = [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in own.pop("param_groups")]
        return {"state": states, "groups": groups, "others": own}

    def facts(self) -> dict[str, Any]:
        return {"class": type(self._optimizer).__name__, "frozen": self._frozen, "groups": self._groups()}

    def check(self, state: Any, facts: Mapping[str, Any]) -> None:
        check_class("the optimizer", self._optimizer, facts)
        saved = [name for group in facts["groups"] for name in group]
        held = [name for group in self._groups() for name in group]
        for name in saved:
            if name not in {*held, *self._frozen}:
                raise MismatchError(f"the saved optimizer held the parameter {name!r}, this one does not, and it is not frozen")
        for name in held:
            if name not in {*saved, *facts["frozen"]}:
                raise MismatchError(f"the optimizer holds the parameter {name!r}, the saved one did not, and it was not frozen there")
        self._matched(facts)
        shapes = {self._names[id(p)]: tuple(p.shape) for group in self._optimizer.param_groups for p in group["params"]}
        for name, values in state["state"].items():
            for key, slot in values.items():
                mine = self._optimizer.state.get(self._parameter(name), {}).get(key) if name in shapes else None
                if isinstance(slot, Slot) and isinstance(mine, torch.Tensor) and tuple(mine.shape) != slot.shape:
                    raise MismatchError(f"{key!r} of {name!r} has shape {tuple(mine.shape)} here, {slot.shape} in the checkpoint")

    def _parameter(self, name: str) -> Any:
        return next(p for group in self._optimizer.param_groups for p in group["params"] if self._names[id(p)] == name)

    def _matched(self, facts: Mapping[str, Any]) -> list[int | None]:
        """For each group the saved one that holds its parameters; None where all of them are new. Groups are neither cut nor joined."""
        of_name = {name: number for number, group in enumerate(facts["groups"]) for name in group}
        found: list[int | None] = []
        for number, group in enumerate(self._groups()):
            known = [name for name in group if name in of_name]
            numbers = list(dict.fromkeys(of_name[name] for name in known))
            if len(numbers) > 1:
                other = next(name for name in known if of_name[name] != numbers[0])
                raise MismatchError(f"{known[0]!r} and {other!r} are in one param group, but in two in the checkpoint")
            if numbers and numbers[0] in found:
                raise MismatchError(f"{known[0]!r} is in param group {number}, but in one with an earlier group's in the checkpoint")
            found.append(numbers[0] if numbers else None)
        return found

    def restore(self, state: Any, facts: Mapping[str, Any]) -> None:
        own = self._optimizer.state_dict()
        names = [name for group in self._groups() for name in group]
        for group, number in zip(own["param_groups"], self._matched(facts)):
            group.update({} if number is None else state["groups"][number])
        own["state"] = {index: state["state"][name] for index, name in enumerate(names) if name in state["state"]}
        own.update(state["others"])
        self._optimizer.load_state_dict(own)


def _parameters(models: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and parameters of all models; with several models a name begins with the model's label."""
    for label, model in models.items():
        if frameworks.is_keras(model):
            from unidist_keras.names import model_variables

            weights = {name: variable.value for name, variable in model_variables(model).items()}
            known = {id(value) for value in weights.values()}
            others = [p for p in model.parameters() if id(p) not in known]  # states of seed generators and metrics
            named = [*weights.items(), *((f"other/{index}", parameter) for index, parameter in enumerate(others))]
        else:
            named = [(name.replace(_COMPILED, ""), parameter) for name, parameter in model.named_parameters()]
        for name, parameter in named:
            yield f"{label}/{name}" if label else name, parameter


def _describe(value: torch.Tensor) -> str:
    return f"one of layout {value.layout}, dtype {value.dtype}, shape {tuple(value.shape)}, on {value.device.type}"


def _to_list(variable: Any) -> Any:
    return variable.value.tolist()


def _text(value: torch.Tensor) -> str:
    return base64.b64encode(bytes(value.tolist())).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
