"""Cases 46 to 52 and what belongs to them: Keras' own fit, evaluate and predict, each compared with a bare model on one device."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import unidist
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_backward, several_processes, several_replicas

RATE = 2.0**-5
X = np.array([[1.0, 2.0], [-1.0, 0.5], [0.25, -2.0], [1.5, 1.0], [-0.5, -1.5], [2.0, 0.5], [0.75, -0.25]])
Y = np.array([[1.0], [0.0], [0.0], [1.0], [0.0], [1.0], [1.0]])


def _dense(bench: Bench, rate: float = RATE, **settings: Any) -> tuple[Any, Any]:
    """A bare model of one sigmoid unit with weights that are not symmetric, and its bare optimizer; build it in a scope or outside."""
    keras = bench.module
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation="sigmoid")])
    model.set_weights([np.array([[0.5], [-0.25]]), np.array([0.125])])
    return model, keras.optimizers.SGD(rate, momentum=0.875, **settings)


def pair(bench: Bench, build: Any, **compile_options: Any) -> tuple[Any, Any]:
    """(wrapped, bare): two models of `build() -> (model, optimizer)`, both compiled; options are called to make objects anew."""

    def options() -> dict[str, Any]:
        return {name: value() if callable(value) else value for name, value in compile_options.items()}

    with unidist.scope():
        model, optimizer = build()
        unidist.wrap_model(model)
        model.compile(unidist.wrap_optimizer(optimizer, model), **options())
    bare, optimizer = build()
    bare.compile(optimizer, run_eagerly=True, **options())
    return model, bare


def same(bench: Bench, model: Any, bare: Any, found: Any = None, wanted: Any = None) -> None:
    """Weights, optimizer slots and histories agree, and the ranks hold the same bits."""
    for name, one, other in (
        ("weights", model.get_weights(), bare.get_weights()),
        ("slots", [np.array(bench.array(v)) for v in model.optimizer.variables], [bench.array(v) for v in bare.optimizer.variables]),
    ):
        compare.true(len(one) == len(other), f"there are as many {name}")
        for a, b in zip(one, other):
            bench.close(a, b, name)
    if wanted is not None:
        compare.same(sorted(found.history), sorted(wanted.history), "the names in history")
        for name, values in wanted.history.items():
            bench.close(np.array(found.history[name]), np.array(values), name, tolerance=max(bench.tolerance, 1e-6))
        compare.true(all(row == found.history for row in bench.everywhere(found.history)), "history is the same on all ranks")
    bench.equal_everywhere(model)


def _metrics(bench: Bench) -> list[Any]:
    metrics = bench.module.metrics
    return [metrics.MeanAbsoluteError(name="mae"), metrics.AUC(name="auc"), metrics.Precision(name="p"), metrics.TruePositives(name="tp")]


@check(11, "metrics from merged state, in history, validation and evaluate", number=46, flavours="keras")
def metrics(bench: Bench) -> None:
    """Seven samples in batches of four, so that the shares differ; AUC of p=[.1,.4,.35,.8,.9] by hand besides."""
    model, bare = pair(bench, lambda: _dense(bench), loss="binary_crossentropy", metrics=lambda: _metrics(bench))
    options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (X[:5], Y[:5]), "validation_batch_size": 4}
    same(bench, model, bare, model.fit(X, Y, **options), bare.fit(X, Y, **options))
    found, wanted = (m.evaluate(X[:5], Y[:5], batch_size=4, verbose=0, return_dict=True) for m in (model, bare))
    bench.close(found, wanted, "what evaluate gives", tolerance=max(bench.tolerance, 1e-6))
    keras = bench.module
    with unidist.scope():
        same_out = unidist.wrap_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")]))
        same_out.compile(loss="mse", metrics=[keras.metrics.AUC(name="auc"), keras.metrics.TruePositives(name="tp")])
    p, y = np.array([[0.1], [0.4], [0.35], [0.8], [0.9]]), np.array([[0.0], [0.0], [1.0], [1.0], [1.0]])
    found = same_out.evaluate(p, y, batch_size=4, verbose=0, return_dict=True)
    compare.true(abs(found["auc"] - 5 / 6) < 1e-3 and found["tp"] == 2, f"AUC and true positives are one device's, not {found}")


class _Seen:
    """What callbacks saw at the end of epochs, as a list that a LambdaCallback fills."""

    def __init__(self, bench: Bench) -> None:
        self.logs: list[dict[str, Any]] = []
        self.callback = bench.module.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: self.logs.append(dict(logs)))


def _own_step(bench: Bench) -> tuple[Any, Any]:
    """A subclass with a train step of its own, as Keras' guides write them; its logs hold a number that is no metric."""
    keras = bench.module
    torch = bench.backend.framework == "torch"

    class OwnStep(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(2.0**-4))
            self.mae = keras.metrics.MeanAbsoluteError(name="mae")

        def call(self, inputs: Any, training: bool = False) -> Any:
            self.add_loss(2.0**-3 * keras.ops.mean(keras.ops.square(inputs)))
            return self.dense(inputs)

        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True) -> Any:
            return keras.ops.mean(keras.ops.square(y - y_pred)) + sum(self.losses)

        def train_step(self, data: Any) -> Any:
            x, y = data
            if torch:
                self.zero_grad()
                loss = self.compute_loss(x, y, self(x, training=True))
                loss.backward()
                gradients = [v.value.grad for v in self.trainable_weights]
            else:
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x, y, self(x, training=True))
                gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(gradients, self.trainable_weights)
            self.mae.update_state(y, keras.ops.zeros_like(y))
            return {"first": keras.ops.mean(x), "mae": self.mae.result()}

    model = OwnStep()
    model(keras.ops.zeros((1, 2)))
    model.set_weights([np.array([[0.5], [-0.25]]), np.array([0.125])])
    return model, keras.optimizers.SGD(RATE)


@check(11, "logs of a train step of the user's own, in history and in what callbacks see", number=47, flavours="keras")
def own_logs(bench: Bench) -> None:
    """The last batch holds rows 4 to 6; `first` is the mean of their inputs, `mae` that of all targets."""
    model, bare = pair(bench, lambda: _own_step(bench))
    seen = _Seen(bench)
    options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    same(bench, model, bare, model.fit(X, Y, callbacks=[seen.callback], **options), bare.fit(X, Y, **options))
    for logs in seen.logs:
        bench.close(float(logs["first"]), X[4:].mean(), "what callbacks see")
        bench.close(float(logs["mae"]), np.abs(Y).mean(), "what callbacks see of a metric", tolerance=1e-6)
    compare.true(all(rows == seen.logs for rows in bench.everywhere(seen.logs)), "callbacks see the same on all ranks")


@check(11, "callbacks: one file, one decision, also when they are on one rank only or decide there", number=48, flavours="keras")
def callbacks(bench: Bench) -> None:
    """Reduced rates and early stops follow the epochs' logs; a guarded callback of rank 0 sets a rate, one of the last rank stops."""
    keras, last = bench.module, bench.rank == bench.size - 1
    folder = Path(bench.everywhere(tempfile.mkdtemp())[0])
    model, bare = pair(bench, lambda: _dense(bench, rate=4.0), loss="mse")
    shared = [
        keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=1.0),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=1.0),
    ]
    files = [
        keras.callbacks.CSVLogger(str(folder / "log.csv")),
        keras.callbacks.ModelCheckpoint(str(folder / f"{{epoch}}-of-{bench.rank}.weights.h5"), save_weights_only=True),
    ]
    options = {"batch_size": 4, "epochs": 6, "shuffle": False, "verbose": 0, "validation_data": (X[:3], Y[:3])}
    found = model.fit(X, Y, callbacks=[*shared, *files], **options)
    wanted = bare.fit(X, Y, callbacks=shared, **options)
    compare.true(len(found.epoch) == 2, "training stops early")
    same(bench, model, bare, found, wanted)
    bench.control.gather("the files", "")
    names = sorted(path.name for path in folder.iterdir())
    compare.same(names, ["1-of-0.weights.h5", "2-of-0.weights.h5", "log.csv"], "the files")
    compare.true(len((folder / "log.csv").read_text().splitlines()) == 3, "the log has a header and a line for each epoch")

    def set_rate(epoch: int, logs: Any) -> None:
        model.optimizer.learning_rate = 2.0**-7

    def stop(epoch: int, logs: Any) -> None:
        model.stop_training = epoch == 1

    guarded = [keras.callbacks.LambdaCallback(on_epoch_end=set_rate)] if bench.rank == 0 else []
    guarded += [keras.callbacks.LambdaCallback(on_epoch_end=stop)] if last else []
    history = model.fit(X, Y, batch_size=4, epochs=5, verbose=0, callbacks=guarded)
    compare.true(bench.everywhere(len(history.epoch)) == [2] * bench.size, "all ranks stop when one does")
    bench.close(bench.learning_rate(model.optimizer), 2.0**-7, "the rate that rank 0 set")
    bench.equal_everywhere(model)


@check(11, "a loss that is no number in one rank's rows stops all ranks after the same batch", number=48, flavours="keras")
def not_a_number(bench: Bench) -> None:
    """Row 5, of the second batch of two, is the last rank's."""
    keras = bench.module
    model, _ = pair(bench, lambda: _dense(bench), loss="mse")
    x = np.concatenate([X[:6], X[:6]])
    x[5] = np.nan
    seen: list[int] = []
    counting = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: seen.append(batch))
    model.fit(x, np.concatenate([Y[:6], Y[:6]]), batch_size=3, shuffle=False, epochs=3, verbose=0,
              callbacks=[counting, keras.callbacks.TerminateOnNaN()])  # fmt: skip
    compare.true(bench.everywhere(seen) == [[0, 1]] * bench.size, f"every rank began the batches 0 and 1, not {bench.everywhere(seen)}")


@check(10, "steps_per_epoch goes on in the data where the last epoch ended", number=49, flavours="keras")
def limited_steps(bench: Bench) -> None:
    """Three batches, two steps an epoch, two epochs: three updates in all."""
    model, bare = pair(bench, lambda: _dense(bench), loss="mse")
    x, y = X[:6], Y[:6]
    options = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0, "steps_per_epoch": 2, "validation_data": (X, Y)}
    options |= {"validation_steps": 1, "validation_batch_size": 5}
    same(bench, model, bare, model.fit(x, y, **options), bare.fit(x, y, **options))
    compare.true(int(bench.array(model.optimizer.iterations)) == 3, "there are three updates")


def _named(bench: Bench) -> tuple[Any, Any]:
    """Dict inputs, an embedding with a mask, dict outputs, a loss each (one of them a function that returns a scalar), L2."""
    keras = bench.module
    inputs = {"a": keras.Input((2,), name="a"), "ids": keras.Input((3,), dtype="int32", name="ids")}
    table = np.arange(10.0).reshape(5, 2) / 8
    words = keras.layers.Embedding(5, 2, mask_zero=True, embeddings_initializer=keras.initializers.Constant(table))(inputs["ids"])
    left = keras.layers.Dense(1, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(2.0**-5))(inputs["a"])
    right = keras.layers.Dense(1, kernel_initializer="ones")(words)
    model = keras.Model(inputs, {"left": left, "right": right})
    decay = keras.optimizers.schedules.ExponentialDecay(2.0**-4, 1, 0.5)
    return model, keras.optimizers.SGD(decay, use_ema=True, ema_momentum=0.5)


IDS = np.array([[1, 2, 3], [4, 0, 0], [2, 2, 0], [3, 0, 0], [1, 0, 0], [4, 4, 4], [2, 1, 0]])


@check(1, "dicts in and out, masks, losses and weights per output, L2, a schedule, EMA", number=50, flavours="keras")
def nested(bench: Bench) -> None:
    ops = bench.module.ops
    model, bare = pair(
        bench, lambda: _named(bench), loss=lambda: {"left": lambda y, p: ops.mean(ops.square(y - p)), "right": "mse"},
        loss_weights=lambda: {"left": 2.0, "right": 1.0}, metrics=lambda: {"left": ["mae"]},
    )  # fmt: skip
    x = {"a": X, "ids": IDS}
    y = {"left": Y, "right": np.repeat(Y[:, None, :], 3, axis=1)}
    options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0, "validation_split": 0.3}
    same(bench, model, bare, model.fit(x, y, **options), bare.fit(x, y, **options))
    five = {name: value[:5] for name, value in x.items()}
    found, wanted = (m.predict(five, batch_size=4, verbose=0) for m in (model, bare))
    compare.same(list(found), list(wanted), "the keys")
    for name, rows in wanted.items():
        bench.close(found[name], rows, f"the outputs {name!r}")


OPTIMIZERS = {
    "global-clipnorm": {"global_clipnorm": 2.0**-4}, "accumulation": {"gradient_accumulation_steps": 3},
    "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
}  # fmt: skip
CHEAP = {"clipnorm": {"clipnorm": 2.0**-4}, "clipvalue": {"clipvalue": 2.0**-5}, "decay": {"weight_decay": 2.0**-3}}


@check(4, "what an optimizer does with gradients, after they are reduced", number=51, flavours="keras", cases=OPTIMIZERS)
def optimizers(bench: Bench, settings: dict[str, Any]) -> None:
    """Two batches an epoch, windows of three that go on over its end."""
    if "ema_overwrite_frequency" in settings and bench.local_replicas > 1:
        with unidist.scope(), compare.raises(unidist.UnsupportedError, "ema_overwrite_frequency"):
            unidist.wrap_optimizer(_dense(bench, **settings)[1])
        return
    model, bare = pair(bench, lambda: _dense(bench, **settings), loss="mse")
    options = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}
    same(bench, model, bare, model.fit(X, Y, **options), bare.fit(X, Y, **options))


@check(4, "what else an optimizer does with gradients", number=51, flavours="keras", cases=CHEAP, needs=(exchanges_in_backward,))
def more_optimizers(bench: Bench, settings: dict[str, Any]) -> None:
    """On TensorFlow these go the way of `global-clipnorm`, and tracing is dear."""
    optimizers(bench, settings)


def _mean_loss(bench: Bench) -> Any:
    ops = bench.module.ops
    return lambda y, p: ops.mean(ops.square(y - p))


@check(1, "a last batch with fewer rows than replicas, a loss that is no number without rows, class weights", number=49, flavours="keras")
def last_row(bench: Bench) -> None:
    """Seven rows in batches of three: the last batch has one row, and BatchNorm's statistics are those of replica 0."""
    model, bare = pair(bench, lambda: _dense(bench), loss=lambda: _mean_loss(bench), metrics=lambda: ["mae"])
    options = {"batch_size": 3, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (X[:4], Y[:4])}
    same(bench, model, bare, model.fit(X, Y, **options), bare.fit(X, Y, **options))
    found, wanted = (m.predict(X[:1], batch_size=3, verbose=0) for m in (model, bare))
    bench.close(found, wanted, "the output for one row")


def _normalised(bench: Bench) -> tuple[Any, Any]:
    keras = bench.module
    layers = [
        keras.layers.Dense(3, activation="tanh"),
        keras.layers.BatchNormalization(momentum=0.5, epsilon=2.0**-5),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((2,)), *layers])
    weights = model.get_weights()
    model.set_weights([np.arange(1.0, w.size + 1).reshape(w.shape) / 8 for w in weights])
    return model, keras.optimizers.SGD(RATE)


@check(6, "synchronised BatchNorm in fit, where a last batch of one row leaves a replica without any", number=49, flavours="keras")
def normalised(bench: Bench) -> None:
    with unidist.scope():
        model, optimizer = _normalised(bench)
        unidist.wrap_model(model, sync_batchnorm=True)
        model.compile(unidist.wrap_optimizer(optimizer, model), loss="mse")
    bare, optimizer = _normalised(bench)
    bare.compile(optimizer, loss="mse", run_eagerly=True)
    options = {"batch_size": 3, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (X[:4], Y[:4])}
    found, wanted = model.fit(X, Y, **options), bare.fit(X, Y, **options)
    bench.close(found.history, wanted.history, "history", tolerance=max(bench.tolerance, 1e-6))
    for one, other in zip(model.get_weights(), bare.get_weights()):
        bench.close(one, other, "weights and statistics", tolerance=max(bench.tolerance, 1e-6))


def _sources(bench: Bench) -> dict[str, Any]:
    """The whole data in batches of three, in the forms that this framework's Keras takes."""
    keras = bench.module

    class Batches(keras.utils.PyDataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return X[3 * index : 3 * index + 3], Y[3 * index : 3 * index + 3]

    if bench.backend.framework == "torch":
        import torch

        rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
        own: Any = torch.utils.data.DataLoader(rows, batch_size=3)
    else:
        import tensorflow as tf

        own = tf.data.Dataset.from_tensor_slices((X, Y)).batch(3)
    half = slice(None) if bench.size == 1 else slice(0, 4) if bench.rank == 0 else slice(4, 7)
    split = bench.size > 1
    sharded = unidist.wrap_data((X[half], Y[half]), already_sharded=split, global_batch_size=4)
    return {"own": own, "PyDataset": Batches(), "wrap_data": unidist.wrap_data((X, Y), global_batch_size=3), "sharded": sharded}


@check(10, "data in every form is cut by its own batches, for training, validation and prediction", number=50, flavours="keras")
def forms(bench: Bench) -> None:
    """One model trains on each in turn; data that is split already has 4 and 3 rows, so its steps hold 2+2 and 2+1 rows."""
    model, bare = pair(bench, lambda: _dense(bench), loss="mse", metrics=lambda: ["mae"])
    for name, data in _sources(bench).items():
        x, y, batch = X, Y, 3
        if name == "sharded":
            order = [0, 1, 4, 5, 2, 3, 6] if bench.size == 2 else list(range(7))
            x, y, batch = X[order], Y[order], 4
        found = model.fit(data, epochs=2, verbose=0, shuffle=False, validation_data=data)
        wanted = bare.fit(x, y, batch_size=batch, epochs=2, verbose=0, shuffle=False, validation_data=(x, y))
        same(bench, model, bare, found, wanted)
        if name in ("own", "PyDataset"):
            bench.close(model.predict(data, verbose=0), bare.predict(X, batch_size=3, verbose=0), f"the outputs for {name}")


@check(10, "shuffled arrays: each epoch in its own order, which all ranks share", number=49, flavours="keras", needs=(several_processes,))
def shuffled(bench: Bench) -> None:
    from unidist.data import GlobalPlan

    model, bare = pair(bench, lambda: _dense(bench), loss="mse")
    model.fit(X, Y, batch_size=3, epochs=3, verbose=0, initial_epoch=1)
    plan = GlobalPlan(7, 3, 1, 0, 1, True, False, bench.backend.settings.seed or 0)
    for epoch in (1, 2):
        order = plan.order(epoch)
        bare.fit(X[order], Y[order], batch_size=3, shuffle=False, verbose=0)
    same(bench, model, bare)


@check(10, "what can't be split, or differs between ranks, raises on all and says what to do", number=50, flavours="keras",
       needs=(several_processes,))  # fmt: skip
def refused_data(bench: Bench) -> None:
    model, _ = pair(bench, lambda: _dense(bench), loss="mse")
    with compare.raises(unidist.UnsupportedError, "generator", "already_sharded=True"):
        model.fit(((X, Y) for _ in range(3)), verbose=0)
    with compare.raises(unidist.MismatchError, "already_sharded=True", "rank 1"):
        model.fit(X + bench.rank, Y, verbose=0)
    with compare.raises(unidist.MismatchError, "validation_data", "already_sharded=True"):
        model.fit(X, Y, validation_data=(X[bench.rank :], Y[bench.rank :]), verbose=0)

    class Apart(bench.module.utils.PyDataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return X, Y + bench.rank

    with compare.raises(unidist.MismatchError, "different batches", "already_sharded=True"):
        model.fit(Apart(), epochs=3, verbose=0)
    with compare.raises(unidist.UnsupportedError, "set"):
        model.fit({1, 2}, verbose=0)


@check(12, "wrong orders: not wrapped, compiled before, wrapped twice", number=50, flavours="keras", needs=(several_replicas,))
def wrong_order(bench: Bench) -> None:
    with unidist.scope():
        model, optimizer = _dense(bench)
        model.compile(optimizer, loss="mse")
        unidist.wrap_model(model)
    with compare.raises(unidist.UnsupportedError, "wrap_optimizer"):
        model.fit(X, Y, verbose=0)
    with compare.raises(unidist.UnsupportedError, "wrapped already"):
        unidist.wrap_model(model)
    unidist.wrap_optimizer(optimizer, model)
    model.fit(X, Y, batch_size=4, verbose=0)
    bench.equal_everywhere(model)
    if bench.size > 1:
        bare, optimizer = _dense(bench)
        bare.compile(unidist.wrap_optimizer(optimizer), loss="mse")
        with compare.raises(unidist.UnsupportedError if bench.backend.framework == "torch" else unidist.MismatchError, "wrap_model"):
            bare.fit(X, Y, verbose=0)


@check(7, "a saved model goes on without unidist and the other way round, and a killed fit goes on", number=52, flavours="keras")
def resumed(bench: Bench) -> None:
    """Slots, epoch and rate come from rank 0's files, which the other ranks do not have; the whole equals an uninterrupted fit."""
    keras = bench.module
    folder = Path(tempfile.mkdtemp())

    def build() -> tuple[Any, Any]:
        return _dense(bench)

    class Killed(Exception):
        pass

    def kill(epoch: int, logs: Any) -> None:
        if epoch == 1:
            raise Killed

    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    model, bare = pair(bench, build, loss="mse")
    bare.fit(X, Y, epochs=4, **options)
    backup = keras.callbacks.BackupAndRestore(str(folder / "backup"))
    with compare.raises(Killed):
        model.fit(X, Y, epochs=4, callbacks=[backup, keras.callbacks.LambdaCallback(on_epoch_end=kill)], **options)
    with unidist.scope():
        again, optimizer = build()
        unidist.wrap_model(again)
        again.compile(unidist.wrap_optimizer(optimizer, again), loss="mse")
    history = again.fit(X, Y, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(str(folder / "backup"))], **options)
    compare.same(history.epoch, [2, 3], "the epochs after the restart")
    same(bench, again, bare)
    path = str(folder / "model.keras")
    again.save(path)
    loaded = keras.models.load_model(path)
    compare.same(json.loads(json.dumps(loaded.get_config())), json.loads(json.dumps(again.get_config())), "the saved config")
    loaded.fit(X, Y, epochs=1, **options)
    bare.fit(X, Y, epochs=1, **options)
    for a, b in zip(loaded.get_weights(), bare.get_weights()):
        bench.close(a, b, "the weights without unidist")
    with unidist.scope():
        back = keras.models.load_model(path)
        unidist.wrap_model(back)
        unidist.wrap_optimizer(back.optimizer, back)
    back.fit(X, Y, epochs=1, **options)
    same(bench, back, bare)


@check(13, "a warm-up begins at the optimizer's rate and ends at factor times it, a constant amount a batch", number=51, flavours="keras")
def warmup(bench: Bench) -> None:
    import unidist.keras as ours

    keras = bench.module
    model, _ = pair(bench, lambda: _dense(bench, rate=2.0**-4), loss="mse")
    rates: list[float] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: rates.append(bench.learning_rate(model.optimizer)))
    model.fit(X, Y, batch_size=4, epochs=3, verbose=0, callbacks=[ours.LearningRateWarmup(3.0, epochs=2), note])
    bench.close(np.array(rates), 2.0**-4 * np.array([1.0, 1.5, 2.0, 2.5, 3.0, 3.0]), "the rates")
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[ours.LearningRateWarmup(steps=1)])
    bench.close(bench.learning_rate(model.optimizer), 3 * 2.0**-4 * bench.replicas, "the rate after a warm-up by the number of replicas")
    for wrong in ({"factor": 0.0}, {"epochs": 0}, {"steps": -1}):
        with compare.raises(ValueError, "positive"):
            ours.LearningRateWarmup(**wrong)


@check(12, "jit_compile works or is switched off with a warning; steps_per_execution works or is refused", number=51, flavours="keras",
       needs=(several_replicas,))  # fmt: skip
def compiled(bench: Bench) -> None:
    import warnings

    model, bare = pair(bench, lambda: _dense(bench), loss="mse")
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    with unidist.scope():
        model.compile(model.optimizer, loss="mse", jit_compile=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, Y, **options)
    compare.true(bench.rank > 0 or any("jit_compile" in str(w.message) for w in caught), "rank 0 warns")
    bare.fit(X, Y, **options)
    same(bench, model, bare)
    with unidist.scope():
        model.compile(model.optimizer, loss="mse", steps_per_execution=2)
    if bench.backend.framework == "torch" or bench.size == 1:
        with compare.raises((ValueError, unidist.UnsupportedError), "steps_per_execution"):
            model.fit(X, Y, **options)
    else:
        model.fit(X, Y, **options)
        bare.fit(X, Y, **options)
        same(bench, model, bare)


@check(10, "fit writes into nobody's arrays, given as they are or as views from a PyDataset", number=50, flavours="keras",
       cases={"arrays": False, "views": True})  # fmt: skip
def untouched(bench: Bench, views: bool) -> None:
    """Aligned ones, whose memory TensorFlow takes as it is."""
    keras = bench.module
    n = 4 * bench.replicas
    arrays = []
    for seed in range(2):
        raw = np.empty(8 * n * 8 + 64, np.uint8)
        begin = -raw.ctypes.data % 64
        arrays.append(raw[begin : begin + 8 * n * 8].view(np.float64).reshape(n, 8))
        arrays[-1][:] = np.random.default_rng(seed).standard_normal((n, 8))
    kept = [array.copy() for array in arrays]

    class Views(keras.utils.PyDataset):  # type: ignore[misc, name-defined]
        num_batches = 2

        def __getitem__(self, step: int) -> Any:
            return tuple(array[step * n // 2 : (step + 1) * n // 2] for array in arrays)

    with unidist.scope():
        model = unidist.wrap_model(keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)]))
        model.compile(unidist.wrap_optimizer(keras.optimizers.SGD(0.01), model), "mse")
    model.fit(*([Views()] if views else arrays), **({} if views else {"batch_size": n // 2}), shuffle=False, verbose=0)
    for array, value in zip(arrays, kept):
        compare.same(array, value, "the user's array")
