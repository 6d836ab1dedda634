"""Cases of Keras models: losses, accumulation, embeddings, BatchNorm, optimizers as Keras' own, loss scales, own loops."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import unidist
from field_cases.toys import RATE, after_step, numbers, w1, weight_of
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_apply, several_replicas

_KERAS: dict[str, Any] = {"flavours": "keras"}


def _close(bench: Bench, found: Any, expected: Any, what: str = "the weight") -> None:
    """Rates like 0.01 pass through float32 in Keras."""
    bench.close(found, expected, what, tolerance=1e-6)


def _line(bench: Bench, **options: Any) -> Any:
    """A wrapped model of one weight 1.0; options: of its layer."""
    keras = bench.module
    with unidist.scope():
        return unidist.wrap_model(
            keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", **options)])
        )


def _compile(bench: Bench, model: Any, optimizer: Any, **options: Any) -> Any:
    with unidist.scope():
        model.compile(unidist.wrap_optimizer(optimizer(bench.module.optimizers), model), **({"loss": "mse"} | options))
    return model


@check(1, "fit counts losses once and regularisers once", number=1, cases={"plain": (0.0, 1.15, 7.5), "l2": (0.5, 1.14, 8.0)}, **_KERAS)
def regularised(bench: Bench, case: tuple[float, float, float]) -> None:
    factor, weight, loss = case
    model = _compile(
        bench, _line(bench, kernel_regularizer=bench.module.regularizers.L2(factor) if factor else None), lambda o: o.SGD(RATE)
    )
    x, y = numbers(1, 2, 3, 4)
    found = model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history["loss"][0]
    _close(bench, found, loss, "the loss")
    _close(bench, weight_of(bench, model), weight)
    _close(bench, model.evaluate(x, y, batch_size=4, verbose=0), 7.5 * (2 - weight) ** 2 + factor * weight**2, "evaluate")


@check(1, "a train step of the user's with a local mean", number=2, needs=(exchanges_in_apply,), cases={"four": 4, "three": 3}, **_KERAS)
def local_mean(bench: Bench, n: int) -> None:
    keras, tf = bench.module, bench.tf  # type: ignore[attr-defined]

    class LocalMean(keras.Sequential):  # type: ignore[misc, name-defined]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
            return {"mean": loss}

    with unidist.scope():
        model = unidist.wrap_model(LocalMean([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]))
    values = range(1, n + 1)
    x, y = numbers(*values)
    _compile(bench, model, lambda o: o.SGD(RATE), loss=None).fit(x, y, batch_size=n, shuffle=False, verbose=0)
    _close(bench, weight_of(bench, model), after_step(*values))


@check(3, "accumulation is the mean over the window and the ranks", number=7, **_KERAS)
def window_mean(bench: Bench) -> None:
    """Loss w * x, weight 0, rate 1: replica r sees 1 + r, then 2 + r."""
    model, optimizer = w1(bench, rate=1.0, weight=0.0)
    step = unidist.make_train_step(model, optimizer, lambda outputs, targets: bench.ops().mean(outputs), gradient_accumulation_steps=2)
    x = np.concatenate([1.0 + np.arange(bench.replicas), 2.0 + np.arange(bench.replicas)]).reshape(-1, 1)
    for batch in unidist.wrap_data((x, x), global_batch_size=bench.replicas):
        step(batch)
    _close(bench, weight_of(bench, model), -x.mean())
    compare.same(step.updates, 1, "the updates")


@check(3, "Keras' own gradient_accumulation_steps: one device's, or refused by name", number=8, **_KERAS)
def own_accumulation(bench: Bench) -> None:
    model = _line(bench)
    try:
        _compile(bench, model, lambda o: o.SGD(0.001, gradient_accumulation_steps=2))
    except unidist.UnsupportedError as error:
        compare.true("make_train_step" in str(error), f"the message helps: {error}")
        compare.true(bench.local_replicas > 1, "only replicas within a process refuse it")
        return
    x, y = numbers(*range(1, 9))
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    _close(bench, weight_of(bench, model), 1.099399)


OPTIMIZERS = {
    "sgd": lambda o: o.SGD(0.125, momentum=0.5), "adam": lambda o: o.Adam(0.125), "adagrad": lambda o: o.Adagrad(0.125),
    "adafactor": lambda o: o.Adafactor(0.125), "rmsprop": lambda o: o.RMSprop(0.125),
}  # fmt: skip
IDS = np.array([[0, 1], [1, 1], [2, 3], [3, 3]])


def _embedding(bench: Bench) -> Any:
    """A bare model with a second, unused table beside; row 4 of the first is never looked up."""
    keras = bench.module
    first = keras.Input((2,), dtype="int64")
    shared = keras.layers.Embedding(5, 2, embeddings_initializer="ones")
    other = keras.layers.Embedding(3, 1, embeddings_initializer="ones")(keras.ops.zeros_like(first))
    merged = keras.layers.Concatenate()([keras.layers.Flatten()(shared(first)), keras.layers.Flatten()(shared(first[:, ::-1]))])
    return keras.Model(first, [keras.layers.Dense(1, kernel_initializer="ones")(merged), other])


def _step_embedding(bench: Bench, optimizer: Any, replicated: bool) -> list[Any]:
    keras, ops = bench.module, bench.ops()
    y = np.arange(4.0).reshape(4, 1)

    def loss(outputs: Any, targets: Any) -> Any:
        return ops.mean(ops.square(outputs[0] - targets), axis=1)

    if replicated:
        with unidist.scope():
            model = unidist.wrap_model(_embedding(bench))
            wrapped = unidist.wrap_optimizer(optimizer(keras.optimizers), model)
        step = unidist.make_train_step(model, wrapped, loss)
        data = unidist.wrap_data((IDS, y), global_batch_size=3)
        for _ in range(2):
            for batch in data:
                step(batch)
        unidist.assert_replicas_equal(model)
        unidist.assert_replicas_equal(wrapped)
        return [np.asarray(value) for value in model.get_weights()]
    tf, model = bench.tf, _embedding(bench)  # type: ignore[attr-defined]
    alone = optimizer(keras.optimizers)
    for _ in range(2):
        for rows in (slice(0, 3), slice(3, 4)):
            with tf.GradientTape() as tape:
                value = ops.mean(loss(model(IDS[rows]), y[rows]))
            variables = model.trainable_variables
            gradients = tape.gradient(value, [v.value for v in variables])
            alone.apply([None if g is None else tf.convert_to_tensor(g) for g in gradients], variables)
    return [np.asarray(value) for value in model.get_weights()]


@check(5, "a sparse table used twice with rows that repeat, and one that is not used, by every optimizer as on one device with dense "
       "gradients", number=10, cases=OPTIMIZERS, needs=(exchanges_in_apply,), **_KERAS)  # fmt: skip
def embedding(bench: Bench, optimizer: Any) -> None:
    """Adam, Adagrad, RMSprop move rows that no sample looked up by decayed slots alike; unused rows and tables stay ones."""
    found, expected = _step_embedding(bench, optimizer, True), _step_embedding(bench, optimizer, False)
    for number, (mine, truth) in enumerate(zip(found, expected)):
        bench.close(mine, truth, f"weight {number}", tolerance=1e-9)
    compare.same(found[0][4].tolist(), [1.0, 1.0], "the row that no sample looks up")
    compare.true(any((value == 1.0).all() for value in found if value.shape == (3, 1)), "the unused table stays")


@check(5, "an embedding in fit, with rows that repeat within a sample and over replicas, against NumPy", number=10, **_KERAS)
def embedding_in_fit(bench: Bench) -> None:
    keras = bench.module
    with unidist.scope():
        model = unidist.wrap_model(keras.Sequential([
            keras.Input((2,), dtype="int64"), keras.layers.Embedding(5, 1, embeddings_initializer="ones"), keras.layers.Flatten(),
            keras.layers.Dense(1, kernel_initializer="ones"),
        ]))  # fmt: skip
    _compile(bench, model, lambda o: o.SGD(0.1)).fit(IDS, np.ones((4, 1)), batch_size=4, epochs=2, shuffle=False, verbose=0)
    table, kernel, bias = np.ones(5), np.ones(2), 0.0
    for _ in range(2):
        error = (table[IDS] @ kernel + bias - 1.0) * 2 / 4
        fall = np.zeros(5)
        np.add.at(fall, IDS, error[:, None] * kernel)
        table, kernel, bias = table - 0.1 * fall, kernel - 0.1 * error @ table[IDS], bias - 0.1 * error.sum()
    bench.close(np.asarray(model.get_weights()[0]).ravel(), table, "the table", tolerance=max(bench.tolerance, 1e-6))


@check(3, "sparse gradients together with accumulation", number=11, needs=(exchanges_in_apply,), **_KERAS)
def sparse_window(bench: Bench) -> None:
    """Two batches of two are one of four: rows 0 to 3 of a table of ones fall by how often they are looked up, over 4 samples."""
    keras = bench.module
    with unidist.scope():
        model = unidist.wrap_model(keras.Sequential([
            keras.Input((2,), dtype="int64"), keras.layers.Embedding(5, 1, embeddings_initializer="ones"), keras.layers.Flatten(),
        ]))  # fmt: skip
        optimizer = unidist.wrap_optimizer(keras.optimizers.SGD(0.125), model)
    ops = bench.ops()
    step = unidist.make_train_step(model, optimizer, lambda outputs, targets: ops.sum(outputs, axis=1), gradient_accumulation_steps=2)
    for batch in unidist.wrap_data((IDS, IDS), global_batch_size=2):
        step(batch)
    counts = np.bincount(IDS.ravel(), minlength=5)
    bench.close(np.asarray(model.get_weights()[0]).ravel(), 1 - 0.125 * counts / 4, "the table")


@check(8, "gradients through a mean over replicas, grad=True", number=12, needs=(exchanges_in_apply,), **_KERAS)
def through_a_collective(bench: Bench) -> None:
    """Each replica's loss is the mean over replicas of its own w * x: the gradient is the mean of x, on every replica."""
    tf = bench.tf  # type: ignore[attr-defined]

    def gradients(index: Any) -> list[Any]:
        w = tf.constant(1.0, tf.float64)
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = unidist.all_reduce(w * (tf.cast(index, tf.float64) + 1.0), "mean", grad=True)
        return [tape.gradient(loss, w)]

    rows = bench.on_replicas(gradients, reduce=True)
    for (found,) in rows:
        bench.close(bench.array(found), np.mean(1.0 + np.arange(bench.replicas)), "the reduced gradient")


@check(6, "two forward passes through BatchNorm, one backward", number=23, **_KERAS)
def two_passes(bench: Bench) -> None:
    with unidist.scope():
        model = unidist.wrap_model(bench.normalised(2, 0.0), sync_batchnorm=True)
    ops, n = bench.ops(), 2 * bench.replicas

    def loss(model: Any, batch: Any) -> Any:
        x, _ = batch
        return ops.mean(ops.square(model(x, training=True) - 1.0) + ops.square(model(3.0 * x, training=True) + 1.0))

    step = unidist.make_train_step(model, bench.optimizer("plain", model, rate=0.125), compute_loss=loss)
    rows = np.random.default_rng(2).standard_normal((n, 2))
    for batch in unidist.wrap_data((rows, rows), global_batch_size=n):
        step(batch)
    bench.close(bench.statistics(model)[0], 3.0 * rows.mean(0), "the mean of the second pass", tolerance=max(bench.tolerance, 1e-9))
    bench.equal_everywhere(model)


@check(6, "{0, 2} and {10, 12}: statistics on every replica, in memory and saved", number=24, cases={"own": False, "synchronised": True},
       needs=(several_replicas,), **_KERAS)  # fmt: skip
def statistics(bench: Bench, synchronised: bool) -> None:
    if bench.replicas != 2:
        return
    with unidist.scope():
        model = unidist.wrap_model(bench.normalised(1, 0.0), sync_batchnorm=synchronised)
    x = np.array([[0.0], [2.0], [10.0], [12.0]])
    step = unidist.make_train_step(model, bench.optimizer("plain", model, rate=0.0), bench.loss("linear"))
    for batch in unidist.wrap_data((x, x), global_batch_size=4):
        step(batch)
    expected = (6.0, 26.0) if synchronised else (1.0, 1.0)
    held = [float(np.asarray(value).reshape(())) for value in bench.statistics(model)]
    bench.close(np.array(held), np.array(expected), "mean and variance")
    unidist.assert_replicas_equal(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(Path(folder) / "saved.weights.h5")
        again = bench.normalised(1, 0.0)
        again.load_weights(Path(folder) / "saved.weights.h5")
    bench.close(np.array([float(np.asarray(v).reshape(())) for v in bench.statistics(again)]), np.array(expected), "as saved")


@check(6, "sync BatchNorm on CPU normalises over 32 samples, and the model goes on alone", number=25, **_KERAS)
def on_cpu(bench: Bench) -> None:
    with unidist.scope():
        model = unidist.wrap_model(bench.normalised(2, 0.0), sync_batchnorm=True)
    x = np.random.default_rng(4).standard_normal((32, 2))
    step = unidist.make_train_step(model, bench.optimizer("plain", model, rate=0.0), bench.loss("linear"))
    for batch in unidist.wrap_data((x, x[:, :1]), global_batch_size=32):
        step(batch)
    bench.close(bench.statistics(model)[1], x.var(0), "the variance of all 32", tolerance=max(bench.tolerance, 1e-9))
    bare = bench.module.Sequential.from_config(model.get_config())
    bare.set_weights(model.get_weights())
    bench.close(bench.forward(bare, x), bench.forward(model, x), "what a bare model predicts")


@check(6, "boolean and integer weights of a model: rank 0's, in their exact dtype", number=26, **_KERAS)
def odd_weights(bench: Bench) -> None:
    keras, dtypes = bench.module, ("bool", "int16", "int32", "uint8", "float16")

    class Odd(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(1,), initializer="ones")
            self.odd = [self.add_weight(shape=(3,), dtype=d, initializer="zeros", trainable=False, name=d) for d in dtypes]

        def call(self, x: Any) -> Any:
            return x * self.kernel

    with unidist.scope():
        model = keras.Sequential([keras.Input((1,)), Odd()])
        for variable in model.layers[0].odd:
            variable.assign(np.array([bench.rank == 0, False, True]).astype(str(variable.dtype)))
        unidist.wrap_model(model)
    for variable, name in zip(model.layers[0].odd, dtypes):
        compare.same(bench.array(variable), np.array([True, False, True]).astype(name), f"the {name} weight")
    unidist.assert_replicas_equal(model)


@check(7, "a wrapped optimizer's config makes a bare one, with its slots", number=34, cases=OPTIMIZERS, **_KERAS)
def config(bench: Bench, optimizer: Any) -> None:
    keras = bench.module
    model = _line(bench)
    with unidist.scope():
        wrapped = unidist.wrap_optimizer(optimizer(keras.optimizers), model)
    again = type(wrapped).from_config(wrapped.get_config())
    compare.same(type(again), type(optimizer(keras.optimizers)), "the class")
    compare.same("apply" in vars(again), False, "unidist's method on it")
    again.build(bench.normalised(1, 0.5).trainable_variables[:1])
    compare.same(len(again.variables), len(wrapped.variables), "the variables")
    forms = [keras.optimizers.serialize(o) for o in (wrapped, optimizer(keras.optimizers))]
    for form in forms:
        del form["config"]["name"]  # which Keras numbers per process
    compare.same(forms[0], forms[1], "the saved form")


@check(7, "Adam, one epoch, save, load, one epoch: as without the break", number=36, needs=(exchanges_in_apply,), **_KERAS)
def resumed(bench: Bench) -> None:
    keras = bench.module
    x, y = numbers(1, 2, 3, 4)
    model = _compile(bench, _line(bench), lambda o: o.Adam(0.01))
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        with unidist.scope():
            loaded = keras.saving.load_model(path)
    unidist.wrap_model(loaded)
    with unidist.scope():
        unidist.wrap_optimizer(loaded.optimizer, loaded)
    loaded.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    _close(bench, float(np.asarray(loaded.get_weights()[0]).reshape(())), 1.019997, "the kernel")
    compare.same(int(bench.array(loaded.optimizer.iterations)), 2, "the updates")


@check(
    1, "a schedule, use_ema and a loss scale inside fit", number=51, cases={"decay": "decay", "ema": "ema", "scaled": "scaled"}, **_KERAS
)
def inside_fit(bench: Bench, what: str) -> None:
    """n = 6 in batches of two, SGD at 0.01 that decays by 0.5 each step; x^2 has means 2.5, 12.5, 30.5."""

    def optimizer(o: Any) -> Any:
        if what == "decay":
            return o.SGD(o.schedules.ExponentialDecay(RATE, 1, 0.5))
        return o.SGD(RATE, use_ema=True, ema_momentum=0.5) if what == "ema" else o.LossScaleOptimizer(o.SGD(RATE), initial_scale=64.0)

    model = _compile(bench, _line(bench), optimizer)
    x, y = numbers(*range(1, 7))
    model.fit(x, y, batch_size=2, shuffle=False, verbose=0)
    weight, mean, rate = 1.0, 1.0, RATE
    for squares in (2.5, 12.5, 30.5):
        weight += 2 * rate * squares * (2 - weight)
        mean = weight if squares == 2.5 else 0.5 * mean + 0.5 * weight
        rate *= 0.5 if what == "decay" else 1.0
    found = weight_of(bench, model)
    _close(bench, found, mean if what == "ema" else weight)
    if what == "decay":
        _close(bench, found, 1.295516)


@check(1, "loss scales that begin apart: rank 0's everywhere; an inf on the last replica is skipped by all", number=53, **_KERAS)
def loss_scales(bench: Bench) -> None:
    o = bench.module.optimizers
    model = _line(bench)
    with unidist.scope():
        scaler = o.LossScaleOptimizer(o.SGD(RATE), initial_scale=1024.0 * (1 + bench.rank))
        optimizer = unidist.wrap_optimizer(scaler, model)
    compare.same(float(bench.array(optimizer.dynamic_scale)), 1024.0, "the scale at the start")
    step = unidist.make_train_step(model, optimizer, bench.loss("linear"))
    x, y = numbers(1, 2, 3, 4)
    y[-1] = np.inf
    for batch in unidist.wrap_data((x, y), global_batch_size=4):
        step(batch)
    compare.same((weight_of(bench, model), float(bench.array(optimizer.dynamic_scale))), (1.0, 512.0), "weight and scale")
    unidist.assert_replicas_equal(optimizer)


@check(1, "a masked model divides by what is not masked", number=73, needs=(exchanges_in_apply,), **_KERAS)
def masked(bench: Bench) -> None:
    with unidist.scope():
        model = unidist.wrap_model(bench.masked(2))
    _compile(bench, model, lambda o: o.SGD(RATE))
    x = np.array([[[1.0], [2.0]], [[3.0], [0.0]]])
    found = model.fit(x, 2 * x, batch_size=2, shuffle=False, verbose=0).history["loss"][0]
    _close(bench, weight_of(bench, model), 1.093333333333)
    _close(bench, found, 14 / 3, "the loss")


@check(4, "the toy in an own traced loop: reduce_gradients, then clipping, then apply", number=1, needs=(exchanges_in_apply,), **_KERAS)
def clipped_own_loop(bench: Bench) -> None:
    """Shares {1, 2} and {3}: the mean gradient is -28/3, clipped to 4.0 after the reduction."""
    tf = bench.tf  # type: ignore[attr-defined]
    model, optimizer = w1(bench)
    norms: list[Any] = []
    apply = optimizer.apply

    class Clipping:
        """What the bench's own step calls: the gradients that it has reduced, by their norm."""

        def apply(self, gradients: Any, variables: Any) -> Any:
            clipped, norm = tf.clip_by_global_norm(gradients, 4.0)
            norms.append(norm)
            return apply(clipped, variables)

    step = bench.own_step(model, Clipping(), bench.loss("linear", "mean"), reduce=True)
    data = unidist.wrap_data(numbers(1, 2, 3), global_batch_size=4)
    for x, y in data:
        step(x, y, data.share)
    compare.true(bool(norms), "the step was traced")
    _close(bench, weight_of(bench, model), 1.0 + RATE * 4.0)
