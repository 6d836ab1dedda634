"""Keras with its own `fit`: `init`, `scope` and `wrap_*`, and the rest stays Keras.

    python examples/keras_fit.py
    unidist run -n 2 --backend mirrored examples/keras_fit.py
    unidist run -n 2 --backend ddp examples/keras_fit.py                       # Keras on torch
    unidist run -n 2 --backend horovod --framework tensorflow examples/keras_fit.py
"""

import argparse

import keras
from sklearn.datasets import load_digits

import unidist

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--steps", type=int, help="train on so many batches only")
args = parser.parse_args()

unidist.init(seed=0)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
rows = args.steps * 64 if args.steps else 1437
x, y, x_test, y_test = images[:1437][:rows], labels[:1437][:rows], images[1437:], labels[1437:]

with unidist.scope():
    model = keras.Sequential([
        keras.Input((64,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ])
    model = unidist.wrap_model(model)
    optimizer = unidist.wrap_optimizer(keras.optimizers.Adam(1e-3), model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])

model.fit(x, y, batch_size=64, epochs=args.epochs, verbose=2)  # 64 is the global batch, on every backend
results = model.evaluate(x_test, y_test, batch_size=64, verbose=0, return_dict=True)
unidist.print(f"test accuracy {results['accuracy']:.4f}")
