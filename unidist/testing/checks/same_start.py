"""Contract 2: after wrapping, all ranks hold rank 0's weights, buffers, optimizer state and hyper-parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from unidist.errors import MismatchError
from unidist.testing import compare, golden
from unidist.testing.bench import Bench
from unidist.testing.table import check, several_processes, several_replicas
from unidist.testing.trial import Trial, setup, truth

_SEVERAL = (several_processes,)


@check(2, "weights that differ between ranks become rank 0's, bit for bit", few=True)
def weights(bench: Bench) -> None:
    model = bench.model("mlp", golden.initial_weights("mlp", seed=bench.rank))
    found = bench.weights(model)
    for name, value in golden.initial_weights("mlp", seed=0).items():
        compare.same(np.asarray(found[name]), value, f"weight {name!r}")
    bench.equal_everywhere(model)


@check(2, "get_weights and set_weights go round")
def set_weights(bench: Bench) -> None:
    model = bench.model("mlp")
    before = unidist.get_weights(model)
    compare.same([value.size for value in before.values()], [value.size for value in bench.weights(model).values()], "the sizes")
    unidist.set_weights(model, {name: value + 1.0 for name, value in before.items()})
    bench.close(bench.weights(model), {name: value + 1.0 for name, value in golden.initial_weights("mlp").items()}, "weight")
    name = next(iter(before))
    with compare.raises(MismatchError, name):
        unidist.set_weights(model, {key: value for key, value in before.items() if key != name})
    with compare.raises(MismatchError, name):
        unidist.set_weights(model, {key: value[:1] if key == name else value for key, value in before.items()})


def _widths(bench: Bench) -> golden.Network:
    return golden.Network("odd", (golden.Dense(3, 4 + bench.rank), golden.Tanh(), golden.Dense(4 + bench.rank, 2)), golden.MSE)


def _more_layers(bench: Bench) -> golden.Network:
    extra = (golden.Dense(4, 4),) if bench.rank else ()
    return golden.Network("odd", (golden.Dense(3, 4), golden.Tanh(), *extra, golden.Dense(4, 2)), golden.MSE)


@check(2, "models of different shapes raise on all ranks", needs=_SEVERAL, cases={"width": _widths, "number-of-layers": _more_layers})
def different_models(bench: Bench, case: Any) -> None:
    network = case(bench)
    weights = {name: np.zeros(shape) for name, shape in network.shapes().items()}
    bare = bench.model(network, weights, wrapped=False)
    with compare.raises(MismatchError, "rank 0", "rank 1"):
        unidist.wrap_model(bare)
    unidist.barrier()


@check(2, "the message names the parameter, its shapes and dtypes", needs=_SEVERAL, flavours="native")
def named_difference(bench: Bench) -> None:
    torch = bench.module
    width = 4 + min(bench.rank, 1)
    with compare.raises(MismatchError, "1.weight", f"{[2, 4]}", f"{[2, 5]}"):
        unidist.wrap_model(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(width, 2)))
    with compare.raises(MismatchError, "weight", "float32", "float64"):
        unidist.wrap_model(torch.nn.Linear(2, 2).to(torch.float64 if bench.rank else torch.float32))


BUFFERS = {dtype: dtype for dtype in ("bool", "uint8", "int16", "int64", "bfloat16", "float64", "complex64")}


@check(2, "buffers of any dtype, and frozen integer parameters", flavours="native", cases=BUFFERS, few=("int16",))
def buffers(bench: Bench, dtype: str) -> None:
    torch = bench.module

    def values(rank: int) -> Any:
        return bench.tensor(np.array([[1, 0, rank], [rank, 1, 1]]), dtype)

    model = torch.nn.Linear(2, 2)
    model.register_buffer("kept", values(bench.rank))
    model.register_buffer("empty", bench.tensor(np.zeros((0, 3)), dtype))
    if dtype == "int64":
        model.register_parameter("frozen", torch.nn.Parameter(values(bench.rank + 1), requires_grad=False))
    unidist.wrap_model(model)
    compare.same(bench.dtype(model.kept), dtype, "the buffer's dtype")
    compare.true(bool((model.kept == values(0)).all()), "the buffer is rank 0's")
    compare.same(tuple(model.empty.shape), (0, 3), "the empty buffer's shape")
    if dtype == "int64":
        compare.true(bool((model.frozen == values(1)).all()), "the frozen parameter is rank 0's")


@check(2, "the learning rate and other hyper-parameters become rank 0's", few=True)
def hyperparameters(bench: Bench) -> None:
    """A rank that kept its own would train elsewhere."""
    trial = Trial(rest="uneven")
    model = bench.model("mlp")
    optimizer = bench.optimizer("sgd", model, rate=0.125 / (1 + bench.rank), momentum=0.875 if bench.rank == 0 else 0.5)
    step = unidist.make_train_step(model, optimizer, bench.loss("mlp", "mean"))
    data = bench.data(trial.samples(bench.replicas), trial.batch(bench.replicas))
    for _ in range(trial.epochs):
        for batch in data:
            step(batch)
    bench.close(bench.learning_rate(optimizer), 0.125, "the learning rate")
    bench.close(bench.weights(model), truth(bench, trial).weights, "weight")
    bench.equal_everywhere(model)


@check(2, "param groups: every hyper-parameter of each, whatever its type", flavours="native")
def param_groups(bench: Bench) -> None:
    torch = bench.module
    model = bench.model("mlp")
    first, *others = model.parameters()
    mine = bench.rank
    optimizer = torch.optim.AdamW(
        [{"params": [first], "lr": 0.5 + mine, "betas": (0.5, 0.75 + 0.01 * mine)}, {"params": others, "weight_decay": 0.25 + mine}],
        lr=torch.tensor(0.125 + mine), eps=2.0**-10 * (1 + mine), amsgrad=mine == 0,
    )  # fmt: skip
    unidist.wrap_optimizer(optimizer, model)
    one, two = optimizer.param_groups
    compare.same((float(one["lr"]), tuple(one["betas"]), one["eps"], one["amsgrad"]), (0.5, (0.5, 0.75), 2.0**-10, True), "the first group")
    compare.same((float(two["lr"]), two["weight_decay"], two["amsgrad"]), (0.125, 0.25, True), "the second group")


@check(2, "state that rank 0 alone has reaches the others, and no weight moves", flavours="native", cases={"sgd": "sgd", "adam": "adam"})
def optimizer_state(bench: Bench, kind: str) -> None:
    """Rank 0 took two steps before wrapping; wrapped training then goes on where these ended."""
    samples = golden.dataset("mlp", 12)
    model = bench.model("mlp", wrapped=False)
    optimizer = bench.optimizer(kind, model, wrapped=False)
    loss = bench.loss("mlp", "mean")
    for batch in golden.batches(samples[:8], 4) if bench.rank == 0 else []:
        optimizer.zero_grad()
        loss(model(bench.tensor(batch.inputs)), bench.tensor(batch.targets)).backward()
        optimizer.step()
    unidist.wrap_model(model)
    before = bench.weights(model)
    unidist.wrap_optimizer(optimizer, model)
    for name, value in bench.weights(model).items():
        compare.same(np.asarray(value), np.asarray(before[name]), f"weight {name!r} after wrap_optimizer")
    unidist.assert_replicas_equal(optimizer)
    step = unidist.make_train_step(model, optimizer, loss)
    for batch in bench.data(samples[8:], 4):
        step(batch)
    network, formula = golden.NETWORKS["mlp"], golden.make_optimizer(bench.formula, kind)
    bench.close(bench.weights(model), golden.train(network, formula, data=samples, global_batch_size=4).weights, "weight")


@check(2, "an optimizer of other parameters is refused", flavours="native")
def other_parameters(bench: Bench) -> None:
    model, other = bench.model("mlp"), bench.model("mlp")
    with compare.raises(MismatchError, "model.parameters()"):
        unidist.wrap_optimizer(bench.optimizer("sgd", other, wrapped=False), model)
    with compare.raises(MismatchError, "model.parameters()"):
        unidist.wrap_optimizer(bench.module.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1), model)


@check(2, "an optimizer built before the model was wrapped trains it", flavours="native")
def built_before(bench: Bench) -> None:
    trial = Trial(rest="uneven", epochs=1)
    model = bench.model("mlp", wrapped=False)
    optimizer = bench.optimizer("sgd", model, wrapped=False)
    unidist.wrap_model(model)
    unidist.wrap_optimizer(optimizer, model)
    step = unidist.make_train_step(model, optimizer, bench.loss("mlp", "mean"))
    for batch in bench.data(trial.samples(bench.replicas), trial.batch(bench.replicas)):
        step(batch)
    bench.close(bench.weights(model), truth(bench, trial).weights, "weight")


@check(2, "optimizers with different param groups raise on all ranks", flavours="native", needs=_SEVERAL)
def different_groups(bench: Bench) -> None:
    model = bench.model("mlp")
    parameters = list(model.parameters())
    groups = [{"params": parameters}] if bench.rank == 0 else [{"params": parameters[:1]}, {"params": parameters[1:]}]
    with compare.raises(MismatchError, "rank 0", "rank 1"):
        unidist.wrap_optimizer(bench.module.optim.SGD(groups, lr=0.1), model)
    unidist.barrier()


@check(2, "broadcast sets a model in place, from any rank", few=True)
def broadcast_model(bench: Bench) -> None:
    root = bench.size - 1
    model = bench.model("mlp", wrapped=False)
    values = {name: value + bench.rank for name, value in golden.initial_weights("mlp").items()}
    model = bench.model("mlp", values, wrapped=False)
    compare.true(unidist.broadcast(model, root) is model, "broadcast returns the model itself")
    for name, value in golden.initial_weights("mlp").items():
        compare.same(np.asarray(bench.weights(model)[name]), value + root, f"weight {name!r}")


@check(2, "assert_replicas_equal notices one bit, and names where", needs=_SEVERAL)
def replicas_differ(bench: Bench) -> None:
    trial = Trial(rest="none", steps=1, epochs=1)
    model, _, _ = setup(bench, trial)
    unidist.assert_replicas_equal(model)
    values = {name: value.copy() for name, value in golden.initial_weights("mlp").items()}
    if bench.rank == bench.size - 1:
        values["1/kernel"][0, 0] = np.nextafter(values["1/kernel"][0, 0], np.inf)
    other = bench.model("mlp", values, wrapped=False)
    with compare.raises(MismatchError, "rank 0", f"rank {bench.size - 1}"):
        unidist.assert_replicas_equal(other)


@check(2, "a lazy module asks for a batch first, on all ranks", flavours="native")
def lazy_module(bench: Bench) -> None:
    with compare.raises(unidist.UnsupportedError, "lazy", "weight"):
        unidist.wrap_model(bench.module.nn.LazyLinear(2))


@check(2, "a Keras model without weights yet is refused", flavours="keras")
def unbuilt(bench: Bench) -> None:
    keras = bench.module
    with unidist.scope(), compare.raises(ValueError, "Input"):
        unidist.wrap_model(keras.Sequential([keras.layers.Dense(2)]))


@check(
    2, "make_train_step(check_every=n) notices a replica that drifts, also within a process", flavours="keras", needs=(several_replicas,)
)
def checked_while_training(bench: Bench) -> None:
    """With BatchNorm, whose running statistics differ between passes and are no drift."""
    n = 2 * bench.replicas
    with unidist.scope():
        model = unidist.wrap_model(bench.normalised(2, 0.5))
    step = unidist.make_train_step(model, bench.optimizer("plain", model), bench.loss("linear", "mean"), check_every=2)
    rows = np.random.default_rng(3).standard_normal((4 * n, 2))
    with compare.raises(MismatchError, "kernel") as caught:
        for number, batch in enumerate(unidist.wrap_data((rows, np.zeros((4 * n, 1))), global_batch_size=n)):
            compare.true(number < 4 and step.updates == number, "it is noticed at the fourth update")
            if number == 2 and bench.rank == bench.size - 1:
                copy = bench.backend._copies(model.trainable_variables[0].value)[-1]
                copy.assign_add(np.full((2, 2), 2.0**-30)) if hasattr(copy, "assign_add") else copy.data.add_(2.0**-30)
            step(batch)
    compare.true(step.updates == 4, f"at the fourth update: {caught.text}")
