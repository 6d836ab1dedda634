"""torch's class losses divide by class weights or by the targets that they don't ignore: what that was, told from the module or the graph."""

from __future__ import annotations

from typing import Any

import torch

from unidist.batch import Share
from unidist.errors import UnsupportedError

_CLASS_LOSSES = ("NllLossBackward0", "NllLoss2DBackward0")
_SCALED = ("MulBackward0", "DivBackward0", "NegBackward0", "ToCopyBackward0")
_SUMS = ("AddBackward0", "SubBackward0", "StackBackward0", "SumBackward0", "SumBackward1", "MeanBackward0")
_MEAN = 1
_DEFAULT_IGNORED = -100


def class_weight(loss: Any, targets: torch.Tensor) -> torch.Tensor | None:
    """What a module of torch's divides by for these targets; None where it is the number of samples.

    Sample-wise targets with neither class weights nor an `ignore_index` of the user's are taken to ignore none.
    """
    if loss.weight is None and loss.ignore_index == _DEFAULT_IGNORED and targets.ndim < 2:
        return None
    counted = targets != loss.ignore_index
    if loss.weight is None:
        return counted.sum()
    return (loss.weight[torch.where(counted, targets, 0)] * counted).sum()


def scalar_weight(loss: torch.Tensor, share: Share | None) -> torch.Tensor | None:
    """What a scalar loss was divided by when it is `cross_entropy` or `nll_loss`, times a number or not; None for other losses.

    None also where it is the number of samples: no class weights, no `ignore_index` of the user's, one target for each sample of the share.
    Ranks see the same kind of loss, so that all or none find a weight. Raises UnsupportedError when such a loss is one term of a sum.
    """
    node = loss.grad_fn
    while node is not None and node.name() in _SCALED:
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if len(parents) != 1:
            break
        node = parents[0]
    if node is None:
        return None
    if node.name() in _CLASS_LOSSES:
        return node._saved_total_weight if _is_weighted(node, share) else None  # type: ignore[attr-defined,no-any-return]
    if _holds_weighted(node, share):
        raise UnsupportedError(
            "the loss is a sum of terms, of which a cross entropy with class weights, ignore_index or several targets a sample divides by "
            "something else than the number of samples, so ranks can't be averaged: give (total, weight), with every term times the weight"
        )
    return None


def _is_weighted(node: Any, share: Share | None) -> bool:
    if node._saved_reduction != _MEAN:
        return False
    ignored = node._saved_ignore_index - 2**64 if node._saved_ignore_index >= 2**63 else node._saved_ignore_index
    targets = node._saved_target
    several = targets.ndim > 1 or (share is not None and targets.numel() != max(share.size, 1))
    return node._saved_weight is not None or ignored != _DEFAULT_IGNORED or several


def _holds_weighted(node: Any, share: Share | None) -> bool:
    """Whether a weighted class loss is among the terms below; only sums and multiples are looked through."""
    waiting = [node]
    while waiting:
        found = waiting.pop()
        if found.name() in _CLASS_LOSSES and _is_weighted(found, share):
            return True
        if found.name() in _SCALED or found.name() in _SUMS:
            waiting += [parent for parent, _ in found.next_functions if parent is not None]
    return False


def as_total(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The total of a mean that was divided by `weight`; 0 where nothing counted."""
    return torch.where(weight > 0, loss, torch.zeros_like(loss)) * weight.to(loss.dtype)
