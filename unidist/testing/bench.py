"""Bench: what a check needs of a framework, in one form; a flavour of models (torch's own, or Keras') fills it in."""

from __future__ import annotations

import base64
import contextlib
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

import unidist
from unidist.base import Backend
from unidist.testing import compare, golden

CLASS_WEIGHTS = (0.5, 1.0, 2.0)  # of the network "classifier" in losses of the form "total"


class Bench(ABC):
    """Models of one flavour on the backend that `unidist.init` started.

    formula: of golden's optimizers; tolerance: of weights and losses in float64; clip_epsilon: what the flavour adds to the norm that it
    clips by; module: the flavour's own package (torch or keras).
    """

    flavour: ClassVar[str]
    formula: ClassVar[str]
    tolerance: float
    clip_epsilon: float
    module: Any

    def __init__(self, backend: Backend) -> None:
        self.rejoin(backend)

    def rejoin(self, backend: Backend) -> None:
        """Take the facts of the backend that runs now."""
        self.backend = backend
        self.rank = backend.world.rank
        self.size = backend.world.size
        self.replicas = backend.num_replicas
        self.local_replicas = backend.local_replicas
        self.abilities = backend.abilities
        self.control = backend.control

    # models

    def model(
        self, network: str | golden.Network, weights: golden.Weights | None = None, *, wrapped: bool = True, named_inputs: bool = False,
        freeze: Sequence[str] = (), **options: Any,
    ) -> Any:  # fmt: skip
        """A network with golden weights (default: `initial_weights`); freeze: numbers of layers that don't train.

        named_inputs: it takes a dict {"features": x}. options: of wrap_model.
        """
        network = golden.NETWORKS[network] if isinstance(network, str) else network
        weights = golden.initial_weights(network.name) if weights is None else weights
        with unidist.scope():
            model = self._build(network, weights, named_inputs)
            for number in freeze:
                self._freeze(model, network, number)
            return unidist.wrap_model(model, **options) if wrapped else model

    @abstractmethod
    def _build(self, network: golden.Network, weights: golden.Weights, named_inputs: bool) -> Any:
        """A bare model of the network's layers, in float64, with these weights."""

    @abstractmethod
    def _freeze(self, model: Any, network: golden.Network, number: str) -> None:
        """Make a layer untrainable."""

    @abstractmethod
    def tied(self, weight: Any) -> Any:
        """A bare model that applies one square layer without bias twice; weight: as golden's kernel (n, n)."""

    @abstractmethod
    def normalised(self, features: int, momentum: float) -> Any:
        """A bare model: a layer that changes nothing, BatchNorm, a layer to one output with weights 1, no biases; epsilon 2**-10.

        features: inputs; momentum: what the running statistics keep of themselves.
        """

    @abstractmethod
    def statistics(self, model: Any) -> tuple[Any, Any]:
        """The running mean and variance of `normalised` as arrays."""

    @abstractmethod
    def unbiased(self) -> bool:
        """Whether running variances are unbiased ones."""

    def optimizer(self, kind: str, model: Any, *, rate: float = 0.125, wrapped: bool = True, **settings: Any) -> Any:
        """golden's "sgd" or "adam", or "plain" (SGD without momentum); settings: in place of golden's hyper-parameters."""
        truth = golden.TorchSGD(rate) if kind == "plain" else golden.make_optimizer(self.formula, kind, rate)
        with unidist.scope():
            optimizer = self._optimizer(replace(truth, **settings), model)
            return unidist.wrap_optimizer(optimizer, model) if wrapped else optimizer

    @abstractmethod
    def _optimizer(self, truth: Any, model: Any) -> Any:
        """The flavour's optimizer with the hyper-parameters of golden's."""

    @abstractmethod
    def loss(self, network: str, form: str = "mean") -> Any:
        """A loss of (outputs, targets).

        form: "mean", "samples" (one value each), "total" (total and weight; "classifier" with CLASS_WEIGHTS), "object" (the flavour's own).
        """

    @abstractmethod
    def weights(self, model: Any) -> golden.Weights:
        """The weights by golden's names and in its layout, read without unidist."""

    @abstractmethod
    def forward(self, model: Any, inputs: Any, *, training: bool = False) -> Any:
        """The outputs for an array, as an array, without gradients."""

    @abstractmethod
    def learning_rate(self, optimizer: Any) -> float:
        """The rate of the next update."""

    # values

    @abstractmethod
    def tensor(self, values: Any, dtype: str | None = None) -> Any:
        """The framework's tensor, on this process's device; dtype by name ("bfloat16")."""

    @abstractmethod
    def array(self, tensor: Any) -> Any:
        """The values as a NumPy array."""

    @abstractmethod
    def dtype(self, tensor: Any) -> str:
        """The dtype's name."""

    @abstractmethod
    def is_tensor(self, value: Any) -> bool:
        """Whether this is the framework's tensor."""

    @abstractmethod
    def numbers(self, tensor: Any) -> Any:
        """The values as an array of float64 or complex128, also of dtypes that NumPy lacks."""

    @abstractmethod
    def ops(self) -> Any:
        """A namespace of functions with NumPy's names that losses are written with."""

    # data

    def data(self, data: golden.Data, batch: int, **options: Any) -> unidist.Data:
        """golden's data through wrap_data, as (inputs, targets) or (inputs, targets, sample_weight)."""
        parts = [data.inputs, data.targets, data.sample_weight]
        return unidist.wrap_data(tuple(part for part in parts if part is not None), global_batch_size=batch, **options)

    # what only one framework or flavour has

    def masked(self, steps: int) -> Any:
        """A bare Keras model that skips time steps of zeros (n, steps, 1) and multiplies the others by a weight of 1."""
        raise NotImplementedError

    def two_outputs(self) -> Any:
        """A bare Keras model of (n, 2) with two heads of one output, kernels of ones and biases of 0."""
        raise NotImplementedError

    def trace(self, function: Any) -> Any:
        """The function as a traced one."""
        raise NotImplementedError

    def on_replicas(self, function: Any, *, reduce: bool) -> list[list[Any]]:
        """What `function(index of the replica)` gives on each of this process's replicas, its list reduced when asked for."""
        raise NotImplementedError

    def own_step(self, model: Any, optimizer: Any, loss: Any, *, reduce: bool) -> Any:
        """A traced step of a user's own: (inputs, targets, share) of this process; reduce: before apply, by the rows of each replica."""
        raise NotImplementedError

    # several ranks

    def everywhere(self, value: Any) -> list[Any]:
        """Every rank's value, over the control plane rather than the engine that is under test."""
        rows = self.control.gather("the bench", base64.b64encode(pickle.dumps(value)).decode())
        return [pickle.loads(base64.b64decode(row)) for row in rows]

    @contextlib.contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Within it, the control plane's waits end after so many seconds."""
        before = self.control.timeout
        self.control.timeout = seconds
        try:
            yield
        finally:
            self.control.timeout = before

    @contextlib.contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Within it, "asked" counts requests to the control plane, and on PyTorch "exchanged" what the transport reduces."""
        counts = {"asked": 0}
        watched = [(self.control, "_ask", "asked")]
        transport = getattr(self.backend, "transport", None)
        if transport is not None:
            counts["exchanged"] = 0
            watched.append((transport, "sum_", "exchanged"))

        def counter(original: Any, name: str) -> Any:
            def counted(*arguments: Any) -> Any:
                counts[name] += 1
                return original(*arguments)

            return counted

        for owner, method, name in watched:
            setattr(owner, method, counter(getattr(owner, method), name))
        try:
            yield counts
        finally:
            for owner, method, _ in watched:
                delattr(owner, method)

    def close(self, actual: Any, truth: Any, what: str = "the value", *, tolerance: float | None = None) -> None:
        """Equal within the flavour's tolerance."""
        compare.close(actual, truth, self.tolerance if tolerance is None else tolerance, what)

    def equal_everywhere(self, model: Any) -> None:
        """All replicas hold the same bits: by unidist's own check, and by comparing the weights here."""
        unidist.assert_replicas_equal(model)
        rows = self.everywhere({name: value.tobytes() for name, value in self.weights(model).items()})
        for rank, row in enumerate(rows):
            for name, value in row.items():
                compare.true(value == rows[0][name], f"{name!r} has the same bits on ranks 0 and {rank}")


def golden_layout(network: golden.Network, values: Sequence[Any]) -> golden.Weights:
    """Values in model order under golden's names."""
    return dict(zip(network.shapes(), values, strict=True))


def as_float64(weights: Mapping[str, Any]) -> golden.Weights:
    """Copies in float64."""
    return {name: np.array(value, dtype=np.float64) for name, value in weights.items()}
