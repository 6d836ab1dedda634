"""Cases 72 to 80: weights that are not sample counts, and habits of real scripts."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from field_cases.toys import after_step, numbers, w1, weight_of
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_backward


@check(1, "a loss over tokens: two on one rank, one on the other", number=72, flavours="native", needs=(exchanges_in_backward,),
       cases={"step": True, "own-loop": False})  # fmt: skip
def tokens(bench: Bench, in_step: bool) -> None:
    shares = ((1, 2), (3,))[: bench.size]
    model, optimizer = w1(bench)
    x, y = (bench.tensor(part) for part in numbers(*shares[bench.rank]))

    def loss(outputs: Any, targets: Any) -> Any:
        return ((outputs - targets) ** 2).sum(), len(targets)

    if in_step:
        unidist.make_train_step(model, optimizer, loss)((x, y))
    else:
        unidist.backward(loss(model(x), y))
        optimizer.step()
    bench.close(weight_of(bench, model), after_step(*[value for share in shares for value in share]), "the weight")


@check(1, "class-weighted cross-entropy, two samples of unequal classes a rank", number=74, flavours="native",
       needs=(exchanges_in_backward,), cases={"recognised": True, "total": False})  # fmt: skip
def class_weights(bench: Bench, recognised: bool) -> None:
    torch = bench.module
    classes = np.array([0, 0, 1, 0][: 2 * bench.size])
    inputs = np.arange(1.0, 1.0 + len(classes))[:, None]
    weight = torch.tensor([1.0, 9.0], dtype=torch.float64)

    def made() -> Any:
        model = torch.nn.Linear(1, 2, bias=False).double()
        torch.nn.init.ones_(model.weight)
        return model

    model = unidist.wrap_model(made())
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    weight_here = weight.to(bench.backend.device)
    total = torch.nn.CrossEntropyLoss(weight_here, reduction="sum")
    loss = (
        torch.nn.CrossEntropyLoss(weight_here)
        if recognised
        else lambda outputs, targets: (total(outputs, targets), weight_here[targets].sum())
    )
    step = unidist.make_train_step(model, optimizer, loss)
    for batch in unidist.wrap_data((inputs, classes), global_batch_size=len(classes)):
        step(batch)
    alone = made()
    torch.nn.CrossEntropyLoss(weight)(alone(torch.from_numpy(inputs)), torch.from_numpy(classes)).backward()
    bench.close(bench.array(model.weight), bench.array(alone.weight - 0.1 * alone.weight.grad), "the weight")


@check(2, "an optimizer built before the wrap trains", number=75, flavours="native")
def built_before(bench: Bench) -> None:
    torch = bench.module
    model = bench.model("linear", {"0/kernel": np.ones((1, 1))}, wrapped=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    unidist.wrap_model(model)
    unidist.wrap_optimizer(optimizer, model)
    step = unidist.make_train_step(model, optimizer, bench.loss("linear"))
    for batch in unidist.wrap_data(numbers(1, 2, 3), global_batch_size=3):
        step(batch)
    bench.close(weight_of(bench, model), after_step(1, 2, 3), "the weight")


@check(7, "attributes and methods of the user's model", number=80, flavours="native")
def attributes(bench: Bench) -> None:
    torch = bench.module

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(1, 1)
            self.config = {"width": 1}

        def forward(self, x: Any) -> Any:
            return self.module(x)

        @torch.no_grad()
        def generate(self, x: Any) -> Any:
            return self(x)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = unidist.wrap_model(Net())
    compare.same((model.config, type(model.module)), ({"width": 1}, torch.nn.Linear), "config and module")
    compare.true(not model.generate(torch.ones(1, 1, device=bench.backend.device)).requires_grad, "generate works without gradients")
    compare.same(type(unidist.wrap_optimizer(model.configure_optimizers(), model)), torch.optim.SGD, "the optimizer")
