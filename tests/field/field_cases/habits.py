"""Cases 72, 74, 75 and 80: weights that are not sample counts, and habits of real scripts."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from field_cases.toys import after_step, w1, weight_of
from unidist.errors import MismatchError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_backward


def _padded(bench: Bench, sequences: int) -> tuple[Any, Any]:
    """Sequences of two tokens (n, 2, 1) of which every other has one valid; 1, 2, 3, ... as they come; the mask (n, 2)."""
    x = np.zeros((sequences, 2, 1))
    mask = np.ones((sequences, 2))
    mask[1::2, 1] = 0.0
    x[mask > 0, 0] = np.arange(1.0, mask.sum() + 1)
    return x, mask


WINDOWS = {"one": 1, "two": 2}


@check(1, "a loss over valid tokens as (total, tokens), whole and over micro-batches", number=72, cases=WINDOWS)
def tokens(bench: Bench, k: int) -> None:
    """On two replicas {1, 2} and {3}: 1.093333; a mean of means would be 1.115."""
    x, mask = _padded(bench, max(2, bench.replicas) * k)
    ops = bench.ops()

    def loss(outputs: Any, targets: Any) -> Any:
        valid = targets[..., 1:]
        return ops.sum(ops.square(outputs - targets[..., :1]) * valid), ops.sum(valid)

    model, optimizer = w1(bench)
    if bench.flavour == "keras":
        return _tokens_of_keras(bench, x, mask, loss, k)
    step = unidist.make_train_step(model, optimizer, loss, gradient_accumulation_steps=k)
    for batch in unidist.wrap_data((x, np.concatenate([2 * x, mask[..., None]], 2)), global_batch_size=len(x) // k):
        step(batch)
    bench.close(weight_of(bench, model), after_step(*x[mask > 0, 0]), "the weight")
    return None


def _tokens_of_keras(bench: Bench, x: Any, mask: Any, loss: Any, k: int) -> None:
    with unidist.scope():
        model = unidist.wrap_model(bench.masked(2))
        optimizer = bench.optimizer("plain", model, rate=0.01)
    step = unidist.make_train_step(model, optimizer, loss, gradient_accumulation_steps=k)
    for batch in unidist.wrap_data((x, np.concatenate([2 * x, mask[..., None]], 2)), global_batch_size=len(x) // k):
        step(batch)
    bench.close(weight_of(bench, model), after_step(*x[mask > 0, 0]), "the weight")


HOW = ("total", "object", "function", "backward")


@check(1, "class weights: as (total, weight), as torch's object, in a function, in unidist.backward", number=74, flavours="native",
       needs=(exchanges_in_backward,), cases={how: how for how in HOW})  # fmt: skip
def class_weights(bench: Bench, how: str) -> None:
    """Two samples a rank, of unequal classes; weights 1 and 9."""
    torch = bench.module
    weight = bench.tensor([1.0, 9.0])
    torch.manual_seed(8)
    model, alone = torch.nn.Linear(2, 2).double(), torch.nn.Linear(2, 2).double()
    alone.load_state_dict(model.state_dict())
    unidist.wrap_model(model)
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    n = 2 * bench.size
    x, y = np.random.default_rng(9).standard_normal((n, 2)), np.array([0, 0, *[1] * (n - 2)] if n > 2 else [0, 1])
    entropy = torch.nn.functional.cross_entropy
    losses: dict[str, Any] = {
        "total": lambda outputs, targets: (entropy(outputs, targets, weight=weight, reduction="sum"), weight[targets].sum()),
        "object": torch.nn.CrossEntropyLoss(weight=weight), "function": lambda outputs, targets: entropy(outputs, targets, weight=weight),
    }  # fmt: skip
    data = unidist.wrap_data((x, y), global_batch_size=n)
    if how == "backward":
        for inputs, targets in data:
            unidist.backward(losses["function"](model(inputs), targets))
            optimizer.step()
    else:
        step = unidist.make_train_step(model, optimizer, losses[how])
        for batch in data:
            step(batch)
    entropy(alone(bench.tensor(x)), bench.tensor(y), weight=weight).backward()
    for found, expected in zip(model.parameters(), alone.parameters()):
        bench.close(bench.array(found), bench.array(expected - 0.5 * expected.grad), "a weight")


@check(2, "an optimizer that was built before the wrap trains; one of another model is refused with the counts", number=75,
       flavours="native",       needs=(exchanges_in_backward,))  # fmt: skip
def built_before(bench: Bench) -> None:
    torch = bench.module
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    unidist.wrap_model(model)
    unidist.wrap_optimizer(optimizer, model)
    x = 1.0 + bench.rank
    (model(bench.tensor([[x]])) - 2 * x).square().mean().backward()
    optimizer.step()
    bench.close(bench.array(model.weight), [[after_step(*(1.0 + rank for rank in range(bench.size)))]], "the weight")
    other = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)).double()
    with compare.raises(MismatchError, "4 parameters", "4 of which", "1"):
        unidist.wrap_optimizer(torch.optim.SGD(other.parameters(), lr=0.1), model)


@check(7, "attributes and methods of the user's model work on the wrapped one", number=80, flavours="native")
def attributes(bench: Bench) -> None:
    torch = bench.module

    class Chat(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.config = {"width": 2}
            self.module = torch.nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.module(x)

        @torch.no_grad()
        def generate(self, x: Any) -> Any:
            return self.forward(self.forward(x))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    model = Chat().double()
    wrapped = unidist.wrap_model(model)
    compare.true(wrapped is model and isinstance(wrapped, Chat), "it is the user's object")
    compare.same(wrapped.config, {"width": 2}, "its config")
    compare.true(isinstance(wrapped.module, torch.nn.Linear), "its own attribute `module`")
    x = bench.tensor([[1.0 + bench.rank, 1.0]])
    bench.close(bench.array(wrapped.generate(x)), bench.array(wrapped.module(wrapped.module(x))), "what generate gives")
    optimizer = unidist.wrap_optimizer(wrapped.configure_optimizers(), wrapped)
    wrapped(x).sum().backward()
    optimizer.step()
    unidist.assert_replicas_equal(wrapped)
