"""Keras with its own `fit`: `init`, `scope` and `wrap_*`, and the rest stays Keras.

    python examples/keras_fit.py
    unidist run -n 2 --backend mirrored examples/keras_fit.py
    unidist run -n 2 --backend ddp examples/keras_fit.py                       # Keras on torch
    unidist run -n 2 --backend horovod --framework tensorflow examples/keras_fit.py

With `--backup DIR` a job that was killed goes on where it was when the same command is started again.
"""

import argparse
import os

import keras
from sklearn.datasets import load_digits

import unidist
import unidist.keras

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--steps", type=int, help="train on so many batches only")
parser.add_argument("--backup", help="a directory for what a restart needs")
parser.add_argument("--stop-after", type=int, help="end the process after so many epochs, as a crash would")
args = parser.parse_args()

unidist.init(seed=0)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
rows = args.steps * 64 if args.steps else 1437
x, y, x_test, y_test = images[:1437][:rows], labels[:1437][:rows], images[1437:], labels[1437:]

with unidist.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model = unidist.wrap_model(model)
    optimizer = unidist.wrap_optimizer(keras.optimizers.Adam(5e-4), model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])

callbacks = [
    unidist.keras.LearningRateWarmup(2.0, epochs=1),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=5),  # every rank sees the same val_loss
]
if args.backup:
    callbacks.append(keras.callbacks.BackupAndRestore(args.backup))  # rank 0 writes, all ranks go on from its files
if args.stop_after:
    end = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epoch + 1 == args.stop_after and os._exit(1))
    callbacks.append(end)

model.fit(  # 64 is the global batch, on every backend
    x, y, batch_size=64, epochs=args.epochs, validation_split=0.1, callbacks=callbacks, verbose=2
)
results = model.evaluate(x_test, y_test, batch_size=64, verbose=0, return_dict=True)
unidist.print(f"test accuracy {results['accuracy']:.4f}")
