"""Contract 12: what can't be done raises and says what can; no silent fallback."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from unidist.context import current
from unidist.errors import FrameworkMismatchError, UnknownBackendError, UnsupportedError
from unidist.testing import compare, golden
from unidist.testing.bench import Bench
from unidist.testing.table import POINTS, check, exchanges_in_apply, exchanges_in_backward, several_processes


@check(12, "what the backend declares to refuse is a point of the contract, with a reason", flavours="once", refusable=False)
def declared(bench: Bench) -> None:
    for point, reason in bench.backend.refuses.items():
        compare.true(
            point in POINTS and isinstance(reason, str) and reason.strip(), f"refuses[{point!r}] = {reason!r} is a point and a reason"
        )


@check(12, "the facts agree with each other", flavours="once")
def facts(bench: Bench) -> None:
    context = current()
    compare.same((unidist.backend(), unidist.framework()), (bench.backend.name, bench.backend.framework), "the names")
    compare.same((context.world.rank, context.world.size), (unidist.rank(), unidist.world_size()), "the world")
    compare.same(unidist.num_replicas(), bench.replicas, "the replicas")
    compare.true(unidist.is_initialized() and unidist.device() is not None, "init was called, and there is a device")
    with compare.raises(AttributeError):
        context.no_such_thing  # noqa: B018


@check(12, "init again: the same is fine, something else is an error", flavours="once")
def init_again(bench: Bench) -> None:
    request = dict(current()._request)
    compare.true(unidist.init(**request) is current(), "the same arguments give the same context")
    with compare.raises(RuntimeError, "seed", "shutdown"):
        unidist.init(**{**request, "seed": 123456})


@check(12, "the other framework's verb names the right one", flavours="once", needs=(exchanges_in_backward,))
def torch_verbs(bench: Bench) -> None:
    with compare.raises(FrameworkMismatchError, "backward"):
        unidist.reduce_gradients([np.zeros(2)])


@check(12, "the other framework's verb names the right one", flavours="once", needs=(exchanges_in_apply,))
def tensorflow_verbs(bench: Bench) -> None:
    with compare.raises(FrameworkMismatchError, "reduce_gradients"):
        unidist.backward(bench.tensor(1.0))
    with compare.raises(FrameworkMismatchError, "gradient_accumulation_steps"):
        list(unidist.accumulate([1, 2], 2))


@check(12, "unknown options and compressions are errors")
def unknown_options(bench: Bench) -> None:
    bare = bench.model("mlp", wrapped=False)
    with compare.raises(TypeError, "no_such_option"):
        unidist.wrap_model(bare, no_such_option=1)
    model = bench.model("mlp")
    with compare.raises(UnsupportedError, "zip"):
        unidist.wrap_optimizer(bench.optimizer("sgd", model, wrapped=False), model, compression="zip")
    with compare.raises(TypeError, "no_such_option"):
        unidist.wrap_optimizer(bench.optimizer("sgd", model, wrapped=False), model, no_such_option=1)


@check(12, "make_train_step checks what it is given")
def step_arguments(bench: Bench) -> None:
    model = bench.model("mlp")
    optimizer, loss = bench.optimizer("sgd", model), bench.loss("mlp", "mean")
    for arguments in ({}, {"loss": loss, "compute_loss": loss}):
        with compare.raises(ValueError, "loss", "compute_loss"):
            unidist.make_train_step(model, optimizer, **arguments)
    for k in (0, 1.5, -1):
        with compare.raises(ValueError, "gradient_accumulation_steps", repr(k)):
            unidist.make_train_step(model, optimizer, loss, gradient_accumulation_steps=k)  # type: ignore[arg-type]


@check(12, "a model that was not wrapped would train on its own: refused", needs=(several_processes,))
def unwrapped(bench: Bench) -> None:
    bare = bench.model("mlp", wrapped=False)
    with compare.raises(UnsupportedError, "wrap_model"):
        unidist.make_train_step(bare, bench.optimizer("sgd", bare, wrapped=False), bench.loss("mlp", "mean"))


@check(12, "a scalar loss can't take sample weights: refused before anything moves")
def scalar_with_weights(bench: Bench) -> None:
    samples = golden.dataset("mlp", 4 * bench.replicas)
    weighted = golden.Data(samples.inputs, samples.targets, golden.sample_weights(len(samples)))
    model = bench.model("mlp")
    step = unidist.make_train_step(model, bench.optimizer("sgd", model), bench.loss("mlp", "mean"))
    with compare.raises(UnsupportedError, "one value per sample", "(total, weight)"):
        for batch in bench.data(weighted, len(samples)):
            step(batch)
    bench.close(bench.weights(model), golden.initial_weights("mlp"), "weight")


@check(12, "names that people try get a sentence that helps", flavours="once")
def names(bench: Bench) -> None:
    from unidist import registry

    for name, text in (("nccl", "ddp"), ("gloo", "ddp"), ("ddpp", "did you mean"), ("jax", "framework")):
        with compare.raises(UnknownBackendError, text):
            registry.candidates(name)


@check(12, "objects of Keras with another backend, or Keras 2, are told apart", flavours="once")
def foreign_objects(bench: Bench) -> None:
    class Model:
        """Looks like a model of Keras 2."""

    Model.__module__ = "tf_keras.src.models"
    kept: Any = Model()
    with compare.raises(FrameworkMismatchError, "Keras 3"):
        unidist.wrap_model(kept)
