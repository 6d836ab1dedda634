"""Cases of Keras' fit that end their job."""

import pytest

import unidist
from unidist.testing import run


def fail_in_a_callback():
    import os

    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    import numpy

    unidist.init(timeout=30)
    x = numpy.ones((4, 1), "float32")
    model = unidist.wrap_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    model.compile(unidist.wrap_optimizer(keras.optimizers.SGD(), model), loss="mse")

    def fail(epoch, logs):
        if unidist.rank() == 1:
            raise KeyError("in the callback of rank 1")

    model.fit(x, x, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=fail)])


def test_an_exception_in_one_ranks_callback_ends_the_job():
    """Rank 0 waits at the end of the epoch and hears of it; nobody waits for the 30 seconds."""
    with pytest.raises((KeyError, unidist.PeerFailedError), match="in the callback of rank 1"):
        run(fail_in_a_callback, 2, backend="ddp", framework="torch", timeout=100)
