"""Handwritten digits with a small convolutional network: one file for PyTorch and TensorFlow and every backend.
    python examples/digits.py                                  # one device, on Keras' own backend
    unidist run -n 2 --backend ddp examples/digits.py          # or mirrored, or horovod with --framework
    KERAS_BACKEND=torch torchrun --nproc-per-node 2 examples/digits.py
"""

import argparse
import itertools
import time

import keras
import numpy
from sklearn.datasets import load_digits

import unidist

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--steps", type=int, help="stop each epoch after so many steps")
parser.add_argument("--record", help="write the weights after the first epoch and the results to this .npz file")
args = parser.parse_args()

unidist.init(seed=1)
images, labels = load_digits(return_X_y=True)
order = numpy.random.default_rng(0).permutation(len(images))
images = (images[order] / 16).astype("float32").reshape(-1, 8, 8, 1)
labels = labels[order].astype("int64")
train, test = (images[:1437], labels[:1437]), (images[1437:], labels[1437:])

with unidist.scope():
    model = keras.Sequential([
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ])
    draw = numpy.random.default_rng(2)  # the same initial weights on both frameworks
    model.set_weights([draw.normal(0, (2 / max(w.size // w.shape[-1], 1)) ** 0.5, w.shape) * (w.ndim > 1) for w in model.get_weights()])
    model = unidist.wrap_model(model)
    optimizer = unidist.wrap_optimizer(keras.optimizers.SGD(0.2), model)

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
data = unidist.wrap_data(train, global_batch_size=64, shuffle=True)
step = unidist.make_train_step(model, optimizer, loss)
first, started = None, time.perf_counter()
for epoch in range(args.epochs):
    for batch in itertools.islice(data, args.steps):
        step(batch)
    mean_loss = step.mean_loss()
    unidist.print(f"epoch {epoch + 1}/{args.epochs}: loss {mean_loss:.4f}")
    first = first or unidist.get_weights(model)
    started = time.perf_counter() if epoch == 0 else started  # the first epoch compiles
speed = max(args.epochs - 1, 1) * len(train[0]) / (time.perf_counter() - started)
metrics = {"accuracy": keras.metrics.SparseCategoricalAccuracy()}
results = unidist.evaluate(model, unidist.wrap_data(test, global_batch_size=64), loss, metrics)
unidist.print(f"test accuracy {results['accuracy']:.4f} | {speed:,.0f} samples/s")
if args.record and unidist.is_main_process():
    numpy.savez(args.record, loss=mean_loss, accuracy=results["accuracy"], speed=speed, **first)
