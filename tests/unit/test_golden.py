"""The NumPy truth against finite differences, hand-computed values, real torch and real Keras on both backends.

Run as a script (`KERAS_BACKEND=... python test_golden.py OUT.npz`) it is the worker that trains the cases with Keras.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unidist.testing import golden
from unidist.testing.golden import NETWORKS, Array, Data, Network, Weights

ROOT = Path(golden.__file__).parents[3]
NAMES = list(NETWORKS)
WEIGHTED = [(None, "samples"), (golden.sample_weights(10), "samples"), (golden.sample_weights(10), "weights")]
CLASS_WEIGHTS = {0: 0.5, 1: 1.0, 2: 2.0}


def halved(count: int) -> float:
    """A learning rate that drops after two updates."""
    return 0.125 if count < 2 else 0.0625


def distance(one: Weights, other: Weights) -> float:
    """The largest difference of two sets of weights."""
    assert list(one) == list(other)
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def difference_quotient(function: Callable[[Array], float], point: Array, step: float = 1e-5) -> Array:
    """Central finite differences of a scalar function, element by element."""
    gradient = np.zeros_like(point)
    for index in np.ndindex(point.shape):
        shift = np.zeros_like(point)
        shift[index] = step
        gradient[index] = (function(point + shift) - function(point - shift)) / (2 * step)
    return gradient


# Gradients


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("sample_weight", "denominator"), WEIGHTED, ids=["plain", "by-samples", "by-weights"])
def test_gradients_are_finite_differences(name: str, sample_weight: Array | None, denominator: Any) -> None:
    data = golden.dataset(name)
    data = Data(data.inputs, data.targets, sample_weight)
    weights = golden.initial_weights(name, seed=3)

    def loss(changed: Weights) -> float:
        sums = golden.compute_sums(NETWORKS[name], weights | changed, data, denominator=denominator)
        return sums.total / sums.weight

    found = golden.compute_sums(NETWORKS[name], weights, data, denominator=denominator).mean_gradients()
    assert list(found) == list(weights)
    for key, value in weights.items():
        expected = difference_quotient(lambda point, key=key: loss({key: point}), value)  # type: ignore[misc]
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(found[key], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["mlp", "classifier"])
def test_gradient_of_each_loss_is_finite_difference(name: str) -> None:
    loss, data = NETWORKS[name].loss, golden.dataset(name)
    outputs = 3.0 * np.random.default_rng(5).standard_normal((len(data), {"mlp": 2, "classifier": 3}[name]))
    expected = difference_quotient(lambda point: float(loss.values(point, data.targets).sum()), outputs)
    np.testing.assert_allclose(loss.gradient(outputs, data.targets), expected, rtol=1e-6, atol=1e-9)


def test_cross_entropy_of_large_logits_is_finite() -> None:
    values = golden.CROSS_ENTROPY.values(np.array([[1000.0, 0.0], [0.0, 1000.0]]), np.array([0, 0]))
    np.testing.assert_array_equal(values, [0.0, 1000.0])


def test_mean_squared_error_is_a_mean_over_outputs_too() -> None:
    values = golden.MSE.values(np.array([[1.0, 3.0], [0.0, 0.0]]), np.zeros((2, 2)))
    np.testing.assert_array_equal(values, [5.0, 0.0])
    assert golden.mean(values) == 2.5


def test_total_and_weight() -> None:
    values, weights = np.array([1.0, 2.0, 3.0]), np.array([2.0, 0.0, 0.5])
    assert golden.total_and_weight(values) == (6.0, 3.0)
    assert golden.total_and_weight(values, weights) == (3.5, 3.0)
    assert golden.total_and_weight(values, weights, "weights") == (3.5, 2.5)
    np.testing.assert_array_equal(golden.class_sample_weights(np.array([2, 0, 7]), CLASS_WEIGHTS), [2.0, 0.5, 0.0])


# Toy W1 of the field cases: one step on a set S gives 1 + 0.02 * mean(x^2 over S)

W1 = NETWORKS["linear"]
W1_SGD = golden.TorchSGD(0.01)


@pytest.mark.parametrize(("n", "loss", "expected"), [(4, 7.5, 1 + 0.02 * 30 / 4), (3, 14 / 3, 1 + 0.02 * 14 / 3), (8, 25.5, 1.51)])
def test_w1_one_batch(n: int, loss: float, expected: float) -> None:
    result = golden.train(W1, W1_SGD, data=golden.dataset("linear", n), global_batch_size=8)
    assert result.weights["0/kernel"] == pytest.approx(np.array([[expected]]), abs=1e-14)
    assert result.losses == pytest.approx([loss], abs=1e-14)
    assert result.norms == pytest.approx([2 * loss], abs=1e-13)  # the gradient is -2 * mean(x^2)


def test_w1_uneven_micro_batches() -> None:
    data = golden.dataset("linear", 8)
    window = [data[0:3], data[3:4], data[4:5], data[5:8]]
    result = golden.train_windows(W1, W1_SGD, [window])
    assert result.weights["0/kernel"] == pytest.approx(np.array([[1.51]]), abs=1e-14)
    assert result.losses == pytest.approx([14 / 3, 16, 25, 149 / 3])
    assert result.epoch_losses() == pytest.approx([25.5])


@pytest.mark.parametrize(("epochs", "expected"), [(1, 1.051), (2, 1.099399)])
def test_w1_accumulation_over_epochs(epochs: int, expected: float) -> None:
    data = golden.dataset("linear", 8)
    result = golden.train(W1, golden.KerasSGD(0.001), data=data, global_batch_size=4, accumulation=2, epochs=epochs)
    assert result.weights["0/kernel"] == pytest.approx(np.array([[expected]]), abs=1e-12)


# Batches, shares, windows


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("sample_weight", "denominator"), WEIGHTED, ids=["plain", "by-samples", "by-weights"])
@pytest.mark.parametrize(("size", "accumulation"), [(2, 2), (3, 3), (1, 10)])
def test_accumulated_batches_are_one_batch(name: str, sample_weight: Array | None, denominator: Any, size: int, accumulation: int) -> None:
    def run(global_batch_size: int, k: int) -> golden.Result:
        return golden.train(
            NETWORKS[name],
            golden.make_optimizer("torch", "adam"),
            data=golden.dataset(name),
            global_batch_size=global_batch_size,
            accumulation=k,
            epochs=2,
            sample_weight=sample_weight,
            denominator=denominator,
        )

    parts, whole = run(size, accumulation), run(size * accumulation, 1)
    assert distance(parts.weights, whole.weights) < 1e-12
    np.testing.assert_allclose(parts.norms, whole.norms, rtol=1e-12)
    np.testing.assert_allclose(parts.epoch_losses(2), whole.epoch_losses(2), rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cuts", [[0, 5, 10], [0, 4, 7, 10], [0, 10, 10], [0, 0, 1, 10]])
def test_contributions_of_shares_add_up(name: str, cuts: list[int]) -> None:
    data, weights = golden.dataset(name), golden.initial_weights(name)
    shares = [data[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]
    first, *others = [golden.compute_sums(NETWORKS[name], weights, share) for share in shares]
    for other in others:
        first = first + other
    whole = golden.compute_sums(NETWORKS[name], weights, data)
    assert (first.total, first.weight) == (pytest.approx(whole.total, rel=1e-14), 10.0)
    assert distance(first.gradients, whole.gradients) < 1e-12 * max(1.0, golden.global_norm(whole.gradients))


def test_batches_and_windows() -> None:
    data = golden.dataset("linear", 10)
    assert [len(batch) for batch in golden.batches(data, 4)] == [4, 4, 2]
    assert [len(batch) for batch in golden.batches(data, 4, drop_last=True)] == [4, 4]
    assert [len(batch) for batch in golden.batches(data[0:8], 4, drop_last=True)] == [4, 4]
    assert [len(window) for window in golden.windows(golden.batches(data, 2), 2)] == [2, 2, 1]
    np.testing.assert_array_equal(golden.batches(data, 4)[2].inputs, [[9.0], [10.0]])


def test_a_sample_of_weight_zero_counts_only_in_the_denominator() -> None:
    data, sample_weight = golden.dataset("mlp", 4), golden.sample_weights(4)
    assert sample_weight[3] == 0.0
    changed = Data(data.inputs.copy(), data.targets)
    changed.inputs[3] = 100.0
    network, optimizer = NETWORKS["mlp"], golden.make_optimizer("torch", "sgd")
    options: dict[str, Any] = {"global_batch_size": 4, "sample_weight": sample_weight}
    one, other = [golden.train(network, optimizer, data=each, **options) for each in (data, changed)]
    assert distance(one.weights, other.weights) == 0.0
    assert one.batch_weights == [4.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"accumulation": 0}, "accumulation is 0"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "give one of them"),
        ({"sample_weight": np.ones(3)}, r"shape \(3,\).*\(4,\)"),
        ({"sample_weight": np.zeros(4), "denominator": "weights"}, "sum to 0.0"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    given = {"data": golden.dataset("linear", 4), "global_batch_size": 4} | options
    with pytest.raises(ValueError, match=message):
        golden.train(W1, W1_SGD, **given)


# Clipping


def test_clip_by_norm_returns_what_the_field_case_expects() -> None:
    gradients = {"a": np.array([1.5])}
    assert golden.clip_by_norm(gradients, 1.0)["a"] == [1.0]
    assert golden.clip_by_norm(gradients, 1.5)["a"] == [1.5]
    assert golden.clip_by_norm({"a": np.zeros(2)}, 1.0)["a"].tolist() == [0.0, 0.0]
    assert golden.global_norm({"a": np.array([3.0]), "b": np.array([[0.0, 4.0]])}) == 5.0
    assert golden.clip_by_value({"a": np.array([-3.0, 0.5, 2.0])}, 1.0)["a"].tolist() == [-1.0, 0.5, 1.0]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_clipping_acts_on_the_final_gradient_and_tells_its_true_norm(accumulation: int) -> None:
    network, start = NETWORKS["mlp"], golden.initial_weights("mlp")
    options: dict[str, Any] = {"data": golden.dataset("mlp"), "global_batch_size": 10 // accumulation}
    options["accumulation"] = accumulation
    free = golden.train(network, golden.TorchSGD(1.0), **options)
    by_norm = golden.train(network, golden.TorchSGD(1.0), clip_norm=0.25, **options)
    by_value = golden.train(network, golden.TorchSGD(1.0), clip_value=0.125, **options)
    moved = {name: start[name] - by_norm.weights[name] for name in start}
    assert free.norms[0] > 0.5
    assert by_norm.norms[0] == free.norms[0] == by_value.norms[0]
    assert golden.global_norm(moved) == pytest.approx(0.25, abs=1e-14)
    for name, value in start.items():
        np.testing.assert_allclose(moved[name] / 0.25, (value - free.weights[name]) / free.norms[0], atol=1e-14)
        expected = np.clip(value - free.weights[name], -0.125, 0.125)
        np.testing.assert_allclose(value - by_value.weights[name], expected, atol=1e-14)


# The data and the weights


@pytest.mark.parametrize("name", NAMES)
def test_data_and_weights_are_fixed_and_float64(name: str) -> None:
    network, data, weights = NETWORKS[name], golden.dataset(name), golden.initial_weights(name)
    assert {key: value.shape for key, value in weights.items()} == network.shapes()
    assert {value.dtype for value in weights.values()} == {np.dtype("float64")}
    assert network.forward(weights, data.inputs).dtype == np.float64
    assert distance(weights, golden.initial_weights(name)) == 0.0
    np.testing.assert_array_equal(data.inputs, golden.dataset(name).inputs)
    np.testing.assert_array_equal(data.targets, golden.dataset(name).targets)
    twice = golden.torch_layout(golden.torch_layout(weights))
    assert distance(twice, weights) == 0.0


def test_weight_names_count_layers_with_weights() -> None:
    assert NETWORKS["mlp"].shapes() == {"0/kernel": (3, 4), "0/bias": (4,), "1/kernel": (4, 2), "1/bias": (2,)}
    assert NETWORKS["embedding"].shapes() == {"0/embeddings": (7, 2), "1/kernel": (2, 1), "1/bias": (1,)}
    assert golden.torch_layout(golden.initial_weights("mlp"))["0/kernel"].shape == (4, 3)


def test_importing_the_truth_imports_no_framework() -> None:
    code = "import sys, unidist.testing.golden; print({'torch', 'tensorflow', 'keras', 'jax'} & set(sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")


# The formulas are four different ones, so that a comparison with the wrong one fails


def trained(formula: str, name: str, learning_rate: Any = 0.125) -> Weights:
    optimizer = golden.make_optimizer(formula, name, learning_rate)
    return golden.train(NETWORKS["mlp"], optimizer, data=golden.dataset("mlp"), global_batch_size=4, epochs=2).weights


def test_formulas_differ_where_they_should() -> None:
    assert distance(trained("torch", "sgd"), trained("keras", "sgd")) < 1e-14
    assert distance(trained("torch", "sgd", halved), trained("keras", "sgd", halved)) > 1e-3
    assert distance(trained("torch", "adam"), trained("keras", "adam")) > 1e-4
    assert distance(trained("torch", "sgd"), trained("torch", "adam")) > 1e-2


def test_unknown_optimizer() -> None:
    with pytest.raises(ValueError, match="'lion'"):
        golden.make_optimizer("torch", "lion")


# Real torch, float64. Imported by the tests that need it: other unit tests ask which frameworks are loaded.


def build_torch(network: Network, weights: Weights) -> Any:
    """The network as a torch.nn.Sequential with these weights."""
    import torch

    class Mean(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.mean(1)

    makers: dict[type, Callable[[Any], Any]] = {
        golden.Dense: lambda layer: torch.nn.Linear(layer.num_inputs, layer.num_outputs, bias=layer.use_bias),
        golden.Tanh: lambda layer: torch.nn.Tanh(),
        golden.Embedding: lambda layer: torch.nn.Embedding(layer.num_rows, layer.width),
        golden.MeanOverPositions: lambda layer: Mean(),
    }
    model = torch.nn.Sequential(*[makers[type(layer)](layer) for layer in network.layers]).double()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), golden.torch_layout(weights).values(), strict=True):
            parameter.copy_(torch.from_numpy(value))
    return model


def torch_weights(model: Any, network: Network) -> Weights:
    values = [parameter.detach().numpy() for parameter in model.parameters()]
    return golden.torch_layout(dict(zip(network.shapes(), values, strict=True)))


def torch_optimizer(name: str, model: Any) -> Any:
    import torch

    truth: Any = golden.make_optimizer("torch", name)
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=truth.learning_rate, momentum=truth.momentum)
    return torch.optim.Adam(model.parameters(), lr=truth.learning_rate, betas=(truth.beta_1, truth.beta_2), eps=truth.epsilon)


def train_torch(
    name: str, optimizer_name: str, *, scheduled: bool = False, clip_norm: float | None = None
) -> tuple[Weights, list[float], list[float]]:
    """Weights, batch losses and norms of torch's own loop: batches of 4, 2 epochs."""
    import torch

    network, data = NETWORKS[name], golden.dataset(name)
    model = build_torch(network, golden.initial_weights(name))
    optimizer = torch_optimizer(optimizer_name, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: halved(count) / 0.125 if scheduled else 1.0)
    loss_fn = torch.nn.CrossEntropyLoss() if network.loss is golden.CROSS_ENTROPY else torch.nn.MSELoss()
    losses: list[float] = []
    norms: list[float] = []
    for batch in golden.batches(data, 4) * 2:
        optimizer.zero_grad()
        loss = loss_fn(model(torch.from_numpy(batch.inputs)), torch.from_numpy(batch.targets))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm or float("inf")).item())
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return torch_weights(model, network), losses, norms


@pytest.mark.parametrize("name", ["mlp", "classifier", "embedding"])
@pytest.mark.parametrize("optimizer_name", ["sgd", "adam"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_torch_trains_to_the_same_weights(name: str, optimizer_name: str, scheduled: bool) -> None:
    weights, losses, norms = train_torch(name, optimizer_name, scheduled=scheduled)
    optimizer = golden.make_optimizer("torch", optimizer_name, halved if scheduled else 0.125)
    truth = golden.train(NETWORKS[name], optimizer, data=golden.dataset(name), global_batch_size=4, epochs=2)
    assert distance(weights, truth.weights) < 1e-12
    np.testing.assert_allclose(losses, truth.losses, rtol=0, atol=1e-12)
    np.testing.assert_allclose(norms, truth.norms, rtol=0, atol=1e-12)


def test_torch_clips_with_an_epsilon_in_the_norm() -> None:
    weights, _, norms = train_torch("mlp", "sgd", clip_norm=0.25)
    options: dict[str, Any] = {"data": golden.dataset("mlp"), "global_batch_size": 4, "epochs": 2, "clip_norm": 0.25}
    exact = golden.train(NETWORKS["mlp"], golden.make_optimizer("torch", "sgd"), **options)
    like_torch = golden.train(NETWORKS["mlp"], golden.make_optimizer("torch", "sgd"), clip_epsilon=1e-6, **options)
    assert min(norms) > 0.25
    assert distance(weights, like_torch.weights) < 1e-12
    np.testing.assert_allclose(norms, like_torch.norms, rtol=0, atol=1e-12)
    assert distance(weights, exact.weights) > 1e-8


def test_torch_class_weights_and_ignore_index_divide_by_the_weights() -> None:
    import torch

    network, data, weights = NETWORKS["classifier"], golden.dataset("classifier"), golden.initial_weights("classifier")
    model = build_torch(network, weights)
    class_weights = {0: 0.5, 1: 3.0}
    loss_fn = torch.nn.CrossEntropyLoss(torch.tensor([0.5, 3.0, 7.0], dtype=torch.float64), ignore_index=2)
    loss = loss_fn(model(torch.from_numpy(data.inputs)), torch.from_numpy(data.targets))
    loss.backward()
    weighted = Data(data.inputs, data.targets, golden.class_sample_weights(data.targets, class_weights))
    sums = golden.compute_sums(network, weights, weighted, denominator="weights")
    gradients = [parameter.grad.numpy() for parameter in model.parameters()]
    found = golden.torch_layout(dict(zip(weights, gradients, strict=True)))
    assert set(data.targets) == {0, 1, 2}
    assert loss.item() == pytest.approx(sums.total / sums.weight, abs=1e-14)
    assert distance(found, sums.mean_gradients()) < 1e-14


# Real Keras, one process per backend: torch must not be imported after TensorFlow

CASES: dict[str, dict[str, Any]] = {
    **{f"{name}-{kind}": {"name": name, "kind": kind} for name in NAMES[1:] for kind in ("sgd", "adam")},
    "embedding-adam": {"name": "embedding", "kind": "adam", "densify": True},
    "large-epsilon": {"name": "mlp", "kind": "adam", "epsilon": 2.0**-6},
    "schedule": {"name": "mlp", "kind": "sgd", "schedule": halved},
    "sample-weight": {"name": "mlp", "kind": "sgd", "sample_weight": golden.sample_weights(10)},
    "class-weight": {"name": "classifier", "kind": "adam", "class_weight": CLASS_WEIGHTS},
    "clip-norm": {"name": "mlp", "kind": "sgd", "clip_norm": 0.25},
    "clip-value": {"name": "mlp", "kind": "sgd", "clip_value": 0.125},
    "accumulation": {"name": "mlp", "kind": "sgd", "size": 2, "accumulation": 2},
}
# On TensorFlow Keras squares the gradients of an id's occurrences one by one, where Adam wants the square of their sum.
SPARSE_CASE = {"name": "embedding", "kind": "adam"}
TOLERANCE = {"tensorflow": 1e-10, "torch": 1e-5}  # Keras on torch multiplies matrices in float32


def keras_truth_optimizer(case: dict[str, Any], formula: str = "keras") -> Any:
    optimizer = golden.make_optimizer(formula, case["kind"], case.get("schedule", 0.125))
    return replace(optimizer, **{key: case[key] for key in ("epsilon",) if key in case})


def truth_for_keras(case: dict[str, Any], formula: str = "keras") -> tuple[Weights, Array]:
    """Weights and epoch losses; Keras' windows go on over the end of an epoch."""
    data, size = golden.dataset(case["name"]), case.get("size", 4)
    weight = case.get("sample_weight")
    if "class_weight" in case:
        weight = golden.class_sample_weights(data.targets, case["class_weight"])
    two_epochs = golden.batches(Data(data.inputs, data.targets, weight), size) * 2
    result = golden.train_windows(
        NETWORKS[case["name"]],
        keras_truth_optimizer(case, formula),
        golden.windows(two_epochs, case.get("accumulation", 1)),
        clip=golden.Clip(case.get("clip_norm"), case.get("clip_value")),
    )
    return result.weights, result.epoch_losses(2)


def build_keras(network: Network, inputs: Array) -> Any:
    """The network as a keras.Sequential."""
    import keras

    makers: dict[type, Callable[[Any], Any]] = {
        golden.Dense: lambda layer: keras.layers.Dense(layer.num_outputs, use_bias=layer.use_bias),
        golden.Tanh: lambda layer: keras.layers.Activation("tanh"),
        golden.Embedding: lambda layer: keras.layers.Embedding(layer.num_rows, layer.width),
        golden.MeanOverPositions: lambda layer: keras.layers.GlobalAveragePooling1D(),
    }
    first = keras.Input(inputs.shape[1:], dtype=str(inputs.dtype))
    return keras.Sequential([first, *[makers[type(layer)](layer) for layer in network.layers]])


def keras_optimizer(case: dict[str, Any]) -> Any:
    import keras

    truth = keras_truth_optimizer(case)
    piecewise = keras.optimizers.schedules.PiecewiseConstantDecay
    rate = piecewise([1], [halved(0), halved(2)]) if "schedule" in case else truth.learning_rate
    common = {
        "global_clipnorm": case.get("clip_norm"),
        "clipvalue": case.get("clip_value"),
        "gradient_accumulation_steps": case.get("accumulation"),
    }
    if case["kind"] == "sgd":
        return keras.optimizers.SGD(rate, momentum=truth.momentum, **common)
    return keras.optimizers.Adam(rate, beta_1=truth.beta_1, beta_2=truth.beta_2, epsilon=truth.epsilon, **common)


def train_keras(case: dict[str, Any]) -> dict[str, Array]:
    """Weights by name and epoch losses of `fit`: 2 epochs, no shuffle."""
    import keras

    network, data = NETWORKS[case["name"]], golden.dataset(case["name"])
    model = build_keras(network, data.inputs)
    model.set_weights(list(golden.initial_weights(case["name"]).values()))
    classes = network.loss is golden.CROSS_ENTROPY
    losses = keras.losses
    loss = losses.SparseCategoricalCrossentropy(from_logits=True) if classes else losses.MeanSquaredError()
    optimizer = keras_optimizer(case)
    if case.get("densify"):
        apply = optimizer.apply
        optimizer.apply = lambda grads, variables: apply(
            [keras.ops.convert_to_tensor(keras.ops.convert_to_numpy(grad)) for grad in grads], variables
        )
    model.compile(optimizer, loss, run_eagerly=True)  # tracing would cost more than the training
    options = {key: case[key] for key in ("sample_weight", "class_weight") if key in case}
    size = case.get("size", 4)
    history = model.fit(data.inputs, data.targets, batch_size=size, epochs=2, shuffle=False, verbose=0, **options)
    return dict(zip(network.shapes(), model.get_weights(), strict=True)) | {"losses": np.array(history.history["loss"])}


def main(output: str) -> None:
    """Train every case with the Keras backend of the environment, and store what came out."""
    import keras

    keras.config.set_floatx("float64")
    cases = CASES | {"sparse": SPARSE_CASE}
    found = {f"{label}|{key}": value for label, case in cases.items() for key, value in train_keras(case).items()}
    np.savez(output, backend=keras.backend.backend(), **found)


def run_keras(backend: str, output: Path) -> dict[str, Array]:
    """What a process with this Keras backend found: "label|weight" and "label|losses"."""
    ours = {"KERAS_BACKEND": backend, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, __file__, str(output)]
    done = subprocess.run(command, env=os.environ | ours, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    with np.load(output) as found:
        assert found["backend"] == backend
        return dict(found)


@pytest.fixture(scope="module")
def keras_found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Array]]:
    """Both backends at the same time, since most of it is their import."""
    folder = tmp_path_factory.mktemp("keras")
    with ThreadPoolExecutor() as pool:
        runs = {backend: pool.submit(run_keras, backend, folder / f"{backend}.npz") for backend in TOLERANCE}
        return {backend: run.result() for backend, run in runs.items()}


def keras_distance(found: dict[str, Array], label: str, truth: Weights) -> float:
    return distance(truth, {name: found[f"{label}|{name}"] for name in truth})


@pytest.mark.parametrize("label", CASES)
@pytest.mark.parametrize("backend", TOLERANCE)
def test_keras_trains_to_the_same_weights(keras_found: dict[str, dict[str, Array]], backend: str, label: str) -> None:
    found = keras_found[backend]
    weights, losses = truth_for_keras(CASES[label])
    assert keras_distance(found, label, weights) < TOLERANCE[backend]
    np.testing.assert_allclose(found[f"{label}|losses"], losses, rtol=0, atol=TOLERANCE[backend])


@pytest.mark.parametrize("label", ["schedule", "large-epsilon"])
@pytest.mark.parametrize("backend", TOLERANCE)
def test_keras_does_not_follow_the_torch_formulas(keras_found: dict[str, dict[str, Array]], backend: str, label: str) -> None:
    weights, _ = truth_for_keras(CASES[label], "torch")
    assert keras_distance(keras_found[backend], label, weights) > 1e-3


def test_keras_adam_on_tensorflow_squares_repeated_ids_apart(keras_found: dict[str, dict[str, Array]]) -> None:
    """When this fails, upstream sums an IndexedSlices before it squares it, and `densify` can go from the cases."""
    weights, _ = truth_for_keras(SPARSE_CASE)
    assert keras_distance(keras_found["tensorflow"], "sparse", weights) > 1e-2
    assert keras_distance(keras_found["torch"], "sparse", weights) < TOLERANCE["torch"]


if __name__ == "__main__":
    main(sys.argv[1])
