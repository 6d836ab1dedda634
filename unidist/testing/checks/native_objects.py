"""Contract 7: a wrapped model or optimizer is the user's own object."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np

import unidist
from unidist.errors import FrameworkMismatchError, UnsupportedError
from unidist.testing import compare, golden
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_backward, several_processes
from unidist.testing.trial import Trial, setup, truth


@check(7, "wrap_model(m) is m, of its own class, with its own keys and attributes")
def same_object(bench: Bench) -> None:
    model = bench.model("mlp", wrapped=False)
    kind, state = type(model), _keys(bench, model)
    model.note = {"hidden": 4}
    compare.true(unidist.wrap_model(model) is model, "wrap_model returns the same object")
    compare.true(type(model) is kind, "its class is its own")
    compare.same(_keys(bench, model), state, "its keys")
    compare.same(model.note, {"hidden": 4}, "its attribute")
    optimizer = bench.optimizer("adam", model, wrapped=False)
    kind = type(optimizer)
    compare.true(unidist.wrap_optimizer(optimizer, model) is optimizer, "wrap_optimizer returns the same object")
    compare.true(type(optimizer) is kind, "its class is its own")
    compare.true(unidist.native(optimizer) is not None and unidist.native(model) is not None, "native gives an object")


def _keys(bench: Bench, model: Any) -> list[str]:
    return list(model.state_dict()) if bench.flavour == "native" else [variable.path for variable in model.weights]


@check(7, "methods and attributes of the user's class work", flavours="native")
def user_methods(bench: Bench) -> None:
    torch = bench.module

    class Talker(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
            self.config = {"width": 2}

        def forward(self, x: Any) -> Any:
            return self.layer(x)

        def generate(self, x: Any) -> Any:
            with torch.no_grad():
                return self.layer(self.layer(x))

    model = unidist.wrap_model(Talker())
    compare.same(model.config, {"width": 2}, "config")
    compare.same(tuple(model.generate(bench.tensor(np.ones((1, 2), "float32"))).shape), (1, 2), "the shape that generate gives")
    compare.same(list(dict(model.named_modules())), ["", "layer"], "the modules")


@check(7, "wrapping twice, or something that is no model, is refused")
def wrong_objects(bench: Bench) -> None:
    model = bench.model("mlp")
    with compare.raises(UnsupportedError, "already"):
        unidist.wrap_model(model)
    for thing in ("a string", object(), np.zeros(2)):
        with compare.raises(FrameworkMismatchError, "model"):
            unidist.wrap_model(thing)
        with compare.raises(FrameworkMismatchError, "optimizer"):
            unidist.wrap_optimizer(thing, model)


@check(7, "deepcopy gives a bare copy, which one rank may train alone", flavours="native", needs=(exchanges_in_backward,))
def deep_copy(bench: Bench) -> None:
    trial = Trial(rest="none", steps=1, epochs=1)
    model, optimizer, data = setup(bench, trial)
    step = unidist.make_train_step(model, optimizer, bench.loss("mlp", "mean"))
    for batch in data:
        step(batch)
    twin = copy.deepcopy(model)
    for (name, value), (other, held) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        compare.same(other, name, "a key of the copy")
        compare.same(bench.array(held), bench.array(value), f"the copy's {name!r}")
    before = bench.weights(model)
    if bench.rank == 0:
        rows = bench.tensor(golden.dataset("mlp", 3).inputs)
        twin(rows).sum().backward()
        compare.true(all(parameter.grad is not None for parameter in twin.parameters()), "the copy has gradients of its own")
        bench.module.optim.SGD(twin.parameters(), lr=0.1).step()
    unidist.barrier()  # a copy that communicates would still wait for the other ranks here
    for name, value in bench.weights(model).items():
        compare.same(np.asarray(value), np.asarray(before[name]), f"the model's own {name!r}")
    for batch in data:
        step(batch)
    bench.close(bench.weights(model), truth(bench, Trial(rest="none", steps=1, epochs=2)).weights, "weight")


@check(7, "a pickle, and a file of the state, name nothing of unidist", flavours="native")
def files(bench: Bench) -> None:
    torch = bench.module
    trial = Trial(rest="none", steps=1, epochs=1)
    samples = trial.samples(bench.replicas)
    model = unidist.wrap_model(
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).double(), **_sync(bench)
    )
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5), model)
    step = unidist.make_train_step(model, optimizer, bench.loss("mlp", "mean"))
    for batch in bench.data(samples, trial.batch(bench.replicas)):
        step(batch)
    for what, obj in (("the model", model), ("its state", model.state_dict()), ("the optimizer's state", optimizer.state_dict())):
        compare.true(b"unidist" not in pickle.dumps(obj), f"a pickle of {what} does not need unidist")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    loaded.eval()
    bench.close(bench.array(loaded(bench.tensor(samples.inputs))), bench.forward(model, samples.inputs), "the loaded model's outputs")
    bare = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).double()
    bare.load_state_dict(model.state_dict())
    torch.optim.SGD(bare.parameters(), lr=1.0).load_state_dict(optimizer.state_dict())


def _sync(bench: Bench) -> dict[str, bool]:
    return {} if 6 in bench.backend.refuses else {"sync_batchnorm": True}


@check(7, "schedulers take the wrapped optimizer, and the step steps them once an update", flavours="native", few=True)
def schedulers(bench: Bench) -> None:
    torch = bench.module
    trial = Trial(rest="none", steps=4, epochs=1)
    model, optimizer, data = setup(bench, trial)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step = unidist.make_train_step(model, optimizer, bench.loss("mlp", "mean"), gradient_accumulation_steps=2, scheduler=scheduler)
    for batch in data:
        step(batch)
    bench.close(bench.learning_rate(optimizer), 0.125 * 0.25, "the rate after two updates")
    parts = golden.windows(golden.batches(trial.samples(bench.replicas), trial.batch(bench.replicas)), 2)
    formula = golden.make_optimizer("torch", "sgd", lambda count: 0.125 * 0.5**count)
    bench.close(bench.weights(model), golden.train_windows(golden.NETWORKS["mlp"], formula, parts).weights, "weight")


@check(7, "a schedule of Keras", flavours="keras")
def keras_schedule(bench: Bench) -> None:
    keras, trial = bench.module, Trial(rest="uneven", steps=3, epochs=1)
    model = bench.model("mlp")
    with unidist.scope():
        rate = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.125, 0.0625])
        optimizer = unidist.wrap_optimizer(keras.optimizers.SGD(rate, momentum=0.875), model)
    step = unidist.make_train_step(model, optimizer, bench.loss("mlp"))
    for batch in bench.data(trial.samples(bench.replicas), trial.batch(bench.replicas)):
        step(batch)
    parts = golden.windows(golden.batches(trial.samples(bench.replicas), trial.batch(bench.replicas)), 1)
    formula = golden.make_optimizer("keras", "sgd", lambda count: 0.125 if count < 2 else 0.0625)
    bench.close(bench.weights(model), golden.train_windows(golden.NETWORKS["mlp"], formula, parts).weights, "weight")


@check(7, "the optimizer is an optimizer: groups, zero_grad, a rate set by hand, state into a bare one", flavours="native",
       needs=(exchanges_in_backward,))  # fmt: skip
def optimizer_interface(bench: Bench) -> None:
    torch = bench.module
    model = bench.model("mlp")
    optimizer = bench.optimizer("adam", model)
    rows = bench.tensor(golden.dataset("mlp", 2).inputs)
    model(rows).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    compare.true(all(parameter.grad is None for parameter in model.parameters()), "zero_grad sets gradients to None, torch's default")
    model(rows).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    compare.true(all(not parameter.grad.any() for parameter in model.parameters()), "zero_grad(set_to_none=False) fills with zeros")
    optimizer.param_groups[0]["lr"] = 0.5
    compare.same(bench.learning_rate(optimizer), 0.5, "the rate set by hand")
    bare = torch.optim.Adam(model.parameters(), lr=0.1)
    bare.load_state_dict(optimizer.state_dict())
    compare.same(bare.state_dict()["param_groups"][0]["lr"], 0.5, "the rate in the bare optimizer")
    spare = torch.nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [spare], "lr": 0.25})
    compare.same(len(optimizer.param_groups), 2, "the number of groups")
    compare.same(type(copy.deepcopy(optimizer)), torch.optim.Adam, "the class of a deep copy")


@check(7, "a closure (LBFGS) trains as on one device", flavours="native", needs=(exchanges_in_backward,))
def closure(bench: Bench) -> None:
    """On W1 one LBFGS step of rate 1 without line search goes along the gradient first, then by the exact curvature: to w = 2."""
    torch = bench.module
    n = 2 * bench.replicas
    model = bench.model("linear")
    optimizer = unidist.wrap_optimizer(torch.optim.LBFGS(model.parameters(), max_iter=4), model)
    for x, y in bench.data(golden.dataset("linear", n), n):

        def again(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            return loss

        optimizer.step(again)
    bench.close(bench.weights(model)["0/kernel"], [[2.0]], "the weight", tolerance=1e-6)
    unidist.assert_replicas_equal(model)


@check(7, "m.compile() changes no key and trains", flavours="native", needs=(exchanges_in_backward,))
def compiled(bench: Bench) -> None:
    trial = Trial(rest="uneven", epochs=1)
    model, optimizer, data = setup(bench, trial)
    keys = list(model.state_dict())
    model.compile(backend="eager")
    step = unidist.make_train_step(model, optimizer, bench.loss("mlp", "mean"))
    for batch in data:
        step(batch)
    compare.same(list(model.state_dict()), keys, "the keys")
    bench.close(bench.weights(model), truth(bench, trial).weights, "weight")


@check(7, "config and saved form of a Keras model are Keras' own", flavours="keras")
def keras_config(bench: Bench) -> None:
    bare = bench.model("mlp", wrapped=False)
    config = bare.get_config()
    model = unidist.wrap_model(bare)
    optimizer = bench.optimizer("adam", model)
    compare.same(model.get_config(), config, "the model's config")
    with unidist.scope():
        twin = type(model).from_config(model.get_config())
        copy_of_optimizer = type(optimizer).from_config(optimizer.get_config())
    twin.set_weights(model.get_weights())
    inputs = golden.dataset("mlp", 3).inputs
    bench.close(bench.forward(twin, inputs), bench.forward(model, inputs), "the outputs of a model from the config")
    compare.same(type(copy_of_optimizer), type(optimizer), "the class of an optimizer from the config")
    compare.true("unidist" not in repr(model.get_config()), "the config does not name unidist")


@check(7, "a forward pass that goes around the hooks raises, on every rank, or counts", flavours="native", ends_job=True,
       needs=(several_processes, exchanges_in_backward))  # fmt: skip
def around_the_hooks(bench: Bench) -> None:
    """Ranks have different inputs: what was not exchanged would differ, and must not be applied."""
    model = bench.model("linear")
    optimizer = bench.optimizer("plain", model, rate=1.0)
    x = bench.tensor(np.full((1, 1), 1.0 + bench.rank))
    try:
        model.network  # noqa: B018  the attribute is the user's
        model[0](x).sum().backward()
        optimizer.step()
    except (unidist.MismatchError, unidist.PeerFailedError) as error:
        compare.true("model" in str(error), "the message names the model's call")
        bench.close(bench.weights(model)["0/kernel"], [[1.0]], "the weight after the error")
        return
    bench.close(bench.weights(model)["0/kernel"], [[1.0 - np.mean([1.0 + rank for rank in range(bench.size)])]], "the weight")
