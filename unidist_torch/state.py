"""What a model, optimizer, scheduler or scaler holds, and how rank `root`'s comes to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unidist import frameworks
from unidist.agreement import check_same
from unidist.control import Control
from unidist.errors import UnsupportedError
from unidist.nest import map_nest
from unidist_torch import tensors
from unidist_torch.transport import Transport

_TOGETHER = 64 << 20  # bytes that one exchange may hold besides the tensors themselves


def is_native_optimizer(obj: Any) -> bool:
    """Whether this is a torch optimizer rather than Keras'."""
    return isinstance(obj, torch.optim.Optimizer)


def has_state(obj: Any) -> bool:
    """Whether `broadcast` sets it in place: a module, optimizer, scheduler, scaler, or Keras' model or optimizer."""
    if isinstance(obj, (torch.nn.Module, torch.optim.Optimizer)):
        return True
    if frameworks.is_keras(obj) and hasattr(obj, "variables"):
        return True
    return hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict") and frameworks.origin(obj) in ("torch", None)


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, tied ones under each of their names once; Keras' own where torch does not see them."""
    lazy = [name for name, p in model.named_parameters() if isinstance(p, torch.nn.parameter.UninitializedParameter)]
    if lazy:
        raise UnsupportedError(f"parameter {lazy[0]!r} has no shape yet (a lazy module): run one batch through the model before wrap_model")
    found: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters()}
    found.update(model.named_buffers())
    if frameworks.is_keras(model):
        from unidist_torch.keras import model_variables

        return {name: variable.value for name, variable in model_variables(model).items()}
    return found


def optimizer_tensors(optimizer: Any) -> dict[str, torch.Tensor]:
    """The tensors of an optimizer's state by place."""
    if not is_native_optimizer(optimizer):
        from unidist_torch.keras import numbered

        return {name: variable.value for name, variable in numbered(optimizer.variables).items()}
    found = {}
    for index, state in optimizer.state_dict()["state"].items():
        found.update({f"{index}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)})
    return found


def describe(named: dict[str, torch.Tensor]) -> list[list[Any]]:
    """(name, shape, dtype) rows for the comparison between ranks."""
    return [[name, list(tensor.shape), tensors.dtype_name(tensor)] for name, tensor in named.items()]


def broadcast_tensors(transport: Transport, control: Control, what: str, named: dict[str, torch.Tensor], root: int) -> None:
    """Rank `root`'s values in place of the others', after names, shapes and dtypes were compared."""
    check_same(control, what, describe(named))
    if transport.size == 1:
        return
    with torch.no_grad():
        for group in _groups(list(named.values())):
            parts = [tensors.as_bytes(tensor.detach()) for tensor in group]
            moved = transport.broadcast_(torch.cat(parts), root).split([part.numel() for part in parts])
            for tensor, data in zip(group, moved):
                tensor.copy_(tensors.from_bytes(data, tensor.dtype, tuple(tensor.shape)))


def _groups(all_tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Consecutive tensors that travel together: of at most 64 MB, or one that is larger."""
    groups: list[list[torch.Tensor]] = []
    room = 0
    for tensor in all_tensors:
        size = tensor.numel() * tensor.element_size()
        if not groups or size > room:
            groups.append([])
            room = _TOGETHER
        groups[-1].append(tensor)
        room -= size
    return groups


def broadcast_state(transport: Transport, control: Control, rank: int, obj: Any, root: int, objects: Callable[[Any, int], Any]) -> None:
    """Rank `root`'s `state_dict` into every other rank's object: state and hyper-parameters of any type.

    No step is taken, so nothing moves that the state does not hold. Raises MismatchError when param groups differ.
    """
    state = obj.state_dict()
    if is_native_optimizer(obj):
        groups = [[f"param group {i}", len(g["params"])] for i, g in enumerate(state["param_groups"])]
        shapes = [[f"parameter {i}", list(p.shape)] for i, p in enumerate(p for g in obj.param_groups for p in g["params"])]
        check_same(control, "the optimizer", groups + shapes)
    if transport.size == 1:
        return
    received: list[torch.Tensor] = []
    skeleton = map_nest(lambda leaf: _Slot(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf, state)
    skeleton = objects(skeleton if rank == root else None, root)
    mine = iter([leaf for leaf in _leaves(state) if isinstance(leaf, torch.Tensor)]) if rank == root else iter(())

    def fetch(leaf: Any) -> Any:
        if not isinstance(leaf, _Slot):
            return leaf
        tensor = next(mine).detach().contiguous() if rank == root else torch.zeros(leaf.shape, dtype=leaf.dtype)
        received.append(transport.broadcast(tensor, root))
        return received[-1]

    # The root as well: `load_state_dict` may change dtypes (NAdam's), and ranks that differ in them drift apart.
    obj.load_state_dict(map_nest(fetch, skeleton))


def place(optimizer: torch.optim.Optimizer) -> None:
    """State that lies on another device than its parameter (loaded before the model moved) goes there, as `load_state_dict` does it."""
    if any(_lies_apart(held, parameter) for parameter, held in optimizer.state.items() if isinstance(parameter, torch.Tensor)):
        optimizer.load_state_dict(optimizer.state_dict())


def _lies_apart(held: Any, parameter: torch.Tensor) -> bool:
    tensors_held = [leaf for leaf in _leaves({k: v for k, v in held.items() if k != "step"}) if isinstance(leaf, torch.Tensor)]
    return any(leaf.device != parameter.device for leaf in tensors_held)


class _Slot:
    """The place of a tensor in a state that travels without its tensors."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    map_nest(found.append, value)
    return found
