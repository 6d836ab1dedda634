"""One process, two logical CPUs: MirroredStrategy's steps and fit against NumPy, and its errors. Run this file alone."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
import tensorflow as tf

import unidist
from unidist.testing import golden
from unidist.testing.golden import optimizers


@pytest.fixture(scope="module", autouse=True)
def two_devices():
    keras.backend.set_floatx("float64")
    unidist.init("mirrored", framework="tensorflow", num_devices=2)
    yield
    unidist.shutdown()
    keras.backend.set_floatx("float32")


def build(name):
    """The Keras model of a golden network, with its initial weights."""
    layers = {
        "linear": [keras.Input((1,)), keras.layers.Dense(1, use_bias=False)],
        "mlp": [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)],
        "embedding": [
            keras.Input((3,), dtype="int64"), keras.layers.Embedding(7, 2), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1),
        ],
    }  # fmt: skip
    with unidist.scope():
        model = keras.Sequential(layers[name])
        model.set_weights(list(golden.initial_weights(name).values()))
    return unidist.wrap_model(model)


def optimizer(name="sgd", **options):
    with unidist.scope():
        if name == "sgd":
            return keras.optimizers.SGD(0.125, **optimizers.EXACT_SGD, **options)
        return keras.optimizers.Adam(0.125, **optimizers.EXACT_ADAM, **options)


def weights(model):
    return list(unidist.get_weights(model).values())


def close(model, result, tolerance=1e-10):
    for mine, (name, truth) in zip(weights(model), result.weights.items()):
        np.testing.assert_allclose(mine, truth, rtol=0, atol=tolerance, err_msg=name)


def mse(outputs, targets):
    return tf.reduce_mean((outputs - targets) ** 2, axis=1)


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("network", "options"),
    [
        ("mlp", {}),
        ("mlp", {"accumulation": 2}),
        ("mlp", {"clip_norm": 0.25}),
        ("mlp", {"clip_value": 0.03125}),
        ("embedding", {}),
        ("embedding", {"clip_norm": 0.25}),
    ],
)
def test_step_is_one_devices(network, options, name):
    data = golden.dataset(network, 11)
    truth = golden.train(
        golden.NETWORKS[network], golden.make_optimizer("keras", name), data=data, global_batch_size=3, epochs=2, **options
    )
    model = build(network)
    tuned = unidist.wrap_optimizer(optimizer(name), model)
    named = {"gradient_accumulation_steps" if k == "accumulation" else k: v for k, v in options.items()}
    step = unidist.make_train_step(model, tuned, keras.losses.MeanSquaredError(), **named)
    losses = []
    wrapped = unidist.wrap_data((data.inputs, data.targets), global_batch_size=3)
    for _ in range(2):
        for batch in wrapped:
            step(batch)
        losses.append(step.mean_loss())
    close(model, truth)
    np.testing.assert_allclose(losses, truth.epoch_losses(2), rtol=0, atol=1e-10)
    assert step.num_traces == 1
    if options.get("clip_norm"):
        np.testing.assert_allclose(float(step.last_norm), truth.norms[-1], rtol=1e-10)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_total_and_weight(accumulation):
    data = golden.dataset("mlp", 10)
    counts = golden.sample_weights(10)
    truth = golden.train(
        golden.NETWORKS["mlp"], golden.make_optimizer("keras", "sgd"), data=data, global_batch_size=4, epochs=2, sample_weight=counts,
        denominator="weights", accumulation=accumulation,
    )  # fmt: skip

    def loss(model, batch):
        x, y, w = batch
        return tf.reduce_sum(mse(model(x, training=True), y) * w), tf.reduce_sum(w)

    model = build("mlp")
    step = unidist.make_train_step(
        model, unidist.wrap_optimizer(optimizer(), model), compute_loss=loss, gradient_accumulation_steps=accumulation
    )
    wrapped = unidist.wrap_data((data.inputs, data.targets, counts), global_batch_size=4)
    for _ in range(2):
        for batch in wrapped:
            step(batch)
    close(model, truth)


def test_sample_weights_divide_by_samples():
    data = golden.dataset("mlp", 10)
    counts = golden.sample_weights(10)
    truth = golden.train(
        golden.NETWORKS["mlp"], golden.make_optimizer("keras", "sgd"), data=data, global_batch_size=4, sample_weight=counts
    )
    for loss in (keras.losses.MeanSquaredError(), mse):
        model = build("mlp")
        step = unidist.make_train_step(model, unidist.wrap_optimizer(optimizer(), model), loss)
        for batch in unidist.wrap_data((data.inputs, data.targets, counts), global_batch_size=4):
            step(batch)
        close(model, truth)


@pytest.mark.parametrize("rows", [3, 4, 1])
def test_own_loop_counts_by_weight(rows):
    model = build("linear")
    with unidist.scope():
        tuned = unidist.wrap_optimizer(keras.optimizers.SGD(0.0078125), model)
    x = np.arange(1.0, rows + 1.0)[:, None]
    strategy = unidist.current().strategy

    def replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        mine = tf.constant(x)[index * 2 : index * 2 + 2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(mine) - 2.0 * mine) ** 2)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        gradients = unidist.reduce_gradients(gradients, weight=tf.shape(mine)[0])
        clipped, _ = tf.clip_by_global_norm(gradients, 1000.0)
        tuned.apply(clipped, model.trainable_variables)

    tf.function(lambda: strategy.run(replica), autograph=False)()
    np.testing.assert_allclose(weights(model)[0], 1 + 2 * 0.0078125 * (x**2).mean(), rtol=1e-12)


def test_own_loop_has_to_say_the_weight_of_an_uneven_batch():
    model = build("linear")
    unidist.wrap_optimizer(optimizer(), model)
    next(iter(unidist.wrap_data(np.ones((3, 1)), global_batch_size=4)))
    with pytest.raises(ValueError, match=r"weight=rows"):
        unidist.current().strategy.run(lambda: unidist.reduce_gradients([tf.ones((1, 1), tf.float64)]))


class Line(tf.Module):
    """A model without Keras."""

    def __init__(self):
        super().__init__()
        self.parts = [tf.Variable([[1.0]], dtype=tf.float64)]

    def __call__(self, x, times):
        return x @ self.parts[0] * times


@pytest.mark.parametrize("inputs", [tuple, dict])
def test_module_with_several_inputs(inputs):
    with unidist.scope():
        model = unidist.wrap_model(Line())
        tuned = unidist.wrap_optimizer(keras.optimizers.SGD(0.0078125, momentum=0.5), model)
    x, times = np.arange(1.0, 4.0)[:, None], np.ones((3, 1))
    data = ((x, times) if inputs is tuple else {"times": times, "x": x}, 2 * x)
    step = unidist.make_train_step(model, tuned, mse)
    for batch in unidist.wrap_data(data, global_batch_size=4):
        step(batch)
    found = unidist.get_weights(model)
    assert list(found) == ["parts/0"]
    np.testing.assert_allclose(found["parts/0"], 1 + 2 * 0.0078125 * 14 / 3, rtol=1e-12)


def test_other_optimizers():
    with pytest.raises(unidist.FrameworkMismatchError, match="Keras 3"):
        unidist.wrap_optimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))


def fitted(n, batch, model=None, epochs=1, rate=0.0078125, **arguments):
    model = model or build("linear")
    with unidist.scope():
        model.compile(unidist.wrap_optimizer(keras.optimizers.SGD(rate), model), **({"loss": "mse"} | arguments))
    x = np.arange(1.0, n + 1.0)[:, None]
    history = model.fit(x, 2 * x, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
    return float(weights(model)[0][0, 0]), next(iter(history.history.values()))


@pytest.mark.parametrize(("n", "squares", "loss"), [(4, 7.5, 7.5), (3, 14 / 3, 14 / 3), (1, 1.0, 1.0)])
def test_fit_counts_rows(n, squares, loss):
    weight, losses = fitted(n, 4)
    np.testing.assert_allclose([weight, losses[0]], [1 + 2 * 0.0078125 * squares, loss], rtol=1e-12)


class LocalMean(keras.Model):
    """The obvious train step, with a mean of what it is given; Keras itself logs 0.0 for a step's own "loss"."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        self.build((None, 1))

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"mean": loss}


@pytest.mark.parametrize(("n", "squares"), [(4, 7.5), (3, 14 / 3)])
def test_fit_with_a_train_step_of_the_users(n, squares):
    with unidist.scope():
        model = LocalMean()
    unidist.wrap_model(model)
    weight, losses = fitted(n, 4, model, loss=None)
    np.testing.assert_allclose([weight, losses[0]], [1 + 2 * 0.0078125 * squares, squares], rtol=1e-12)


def test_fit_with_a_mask():
    with unidist.scope():
        model = keras.Sequential(
            [keras.Input((2, 1)), keras.layers.Masking(), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
        )
    unidist.wrap_model(model)
    with unidist.scope():
        model.compile(unidist.wrap_optimizer(keras.optimizers.SGD(0.0078125), model), loss="mse")
    x = np.array([[[1.0], [2.0]], [[3.0], [0.0]]])
    history = model.fit(x, 2 * x, batch_size=2, epochs=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(weights(model)[0], 1 + 2 * 0.0078125 * 14 / 3, rtol=1e-12)
    np.testing.assert_allclose(history.history["loss"], 14 / 3, rtol=1e-12)


def test_fit_clips_the_reduced_gradient():
    model = build("linear")
    with unidist.scope():
        model.compile(unidist.wrap_optimizer(keras.optimizers.SGD(0.125, clipnorm=1.0), model), loss="mse")
    x = np.array([[1.0], [2.0], [3.0]])
    model.fit(x, 2 * x, batch_size=4, shuffle=False, verbose=0)
    np.testing.assert_allclose(weights(model)[0], 1.125, rtol=1e-12)


def test_fit_with_a_regulariser_and_a_sum():
    with unidist.scope():
        model = keras.Sequential(
            [
                keras.Input((1,)),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.5)),
            ]
        )
    unidist.wrap_model(model)
    weight, losses = fitted(3, 4, model, loss=keras.losses.MeanSquaredError(reduction="sum"))
    np.testing.assert_allclose([weight, losses[0]], [1 + 0.0078125 * (2 * 14 - 1), 14.5], rtol=1e-12)


def test_fit_needs_the_wrapped_optimizer():
    model = build("linear")
    with unidist.scope():
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
    with pytest.raises(unidist.UnsupportedError, match="did not go through wrap_optimizer"):
        model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)


def test_evaluate_and_predict_uneven():
    data = golden.dataset("mlp", 7)
    model = build("mlp")
    outputs = golden.NETWORKS["mlp"].forward(golden.initial_weights("mlp"), data.inputs)
    wrapped = unidist.wrap_data((data.inputs, data.targets), global_batch_size=3)
    found = unidist.evaluate(model, wrapped, "mse", {"mae": keras.metrics.MeanAbsoluteError(), "value": mse})
    errors = outputs - data.targets
    np.testing.assert_allclose(found["loss"], (errors**2).mean(), rtol=1e-12)
    np.testing.assert_allclose(found["value"], (errors**2).mean(), rtol=1e-12)
    np.testing.assert_allclose(found["mae"], abs(errors).mean(), rtol=1e-6)
    np.testing.assert_allclose(unidist.predict(model, wrapped), outputs, rtol=1e-12)


def test_built_outside_the_scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with pytest.raises(unidist.UnsupportedError, match=r"unidist\.scope\(\)"):
        unidist.wrap_model(model)
    with pytest.raises(unidist.UnsupportedError, match=r"unidist\.scope\(\)"):
        unidist.wrap_optimizer(keras.optimizers.SGD(0.1), build("linear"))


def test_other_variables():
    tuned = optimizer()
    unidist.wrap_optimizer(tuned, build("linear"))
    with pytest.raises(unidist.MismatchError, match="built for 1 variables"):
        unidist.wrap_optimizer(tuned, build("mlp"))


def test_objects_stay_keras():
    model = build("mlp")
    tuned = unidist.wrap_optimizer(optimizer("adam"), model)
    assert type(tuned) is keras.optimizers.Adam
    assert tuned.get_config()["beta_1"] == optimizers.EXACT_ADAM["beta_1"]
    assert type(keras.optimizers.Adam.from_config(tuned.get_config())) is keras.optimizers.Adam


def test_more_devices_than_there_are():
    unidist.shutdown()
    with pytest.raises(unidist.LaunchError, match="4 devices were asked for, but TensorFlow was initialised with 2"):
        unidist.init("mirrored", framework="tensorflow", num_devices=4)
    unidist.init("mirrored", framework="tensorflow", num_devices=2)
