"""TensorFlow on several hosts: two network namespaces; where those can't be made, two processes that count as hosts on the loopback."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespaces import ADDRESSES, can_make_namespaces

from unidist.testing.jobs import clean_environment

WHERE = "two-namespaces" if can_make_namespaces() else "loopback-only"

FIT = """
import sys
import keras, numpy as np, unidist
unidist.init(sys.argv[1], framework="tensorflow", timeout=60)
assert unidist.current().world.num_nodes == 2
weights = []
for samples in (4, 3):  # shares {1,2},{3,4} and {1,2},{3}
    x = np.arange(1.0, samples + 1, dtype="float32")[:, None]
    with unidist.scope():
        layers = [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
        model = unidist.wrap_model(keras.Sequential(layers))
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        model.compile(unidist.wrap_optimizer(keras.optimizers.SGD(0.01), model), loss=loss, metrics=["mae"])
    history = model.fit(x, 2 * x, batch_size=4, shuffle=False, verbose=0).history
    assert history["mae"] == [np.arange(1.0, samples + 1).mean()], history
    weights.append(round(float(model.get_weights()[0].item()), 6))
    # Of three samples rank 0 takes two steps and rank 1 one.
    found = model.evaluate(x, 2 * x, sample_weight=np.ones(samples), batch_size=2, verbose=0)[0]
    np.testing.assert_allclose(found, (weights[-1] - 2) ** 2 * np.mean(x**2), rtol=1e-5)
print("WEIGHTS", *weights, flush=True)
"""

AGAIN = """
import json, sys
import keras, numpy as np, unidist
weights = []
x = np.arange(1.0, 5.0, dtype="float32")[:, None]
for _ in range(2):
    with unidist.init("multiworkermirrored", timeout=60) as context:
        assert context._backend._cluster.addresses == json.loads(sys.argv[1]) and context.world.launcher == "TF_CONFIG"
        with unidist.scope():
            layers = [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
            model = unidist.wrap_model(keras.Sequential(layers))
            model.compile(unidist.wrap_optimizer(keras.optimizers.SGD(0.01), model), loss="mse")
        model.fit(x, 2 * x, batch_size=4, shuffle=False, verbose=0)
        weights.append(round(float(model.get_weights()[0].item()), 6))
        assert unidist.all_gather_object(unidist.rank()) == [0, 1]
print("WEIGHTS", *weights, flush=True)
"""

FAILS = """
import os, signal, sys, time
import keras, numpy as np, unidist
unidist.init("mirrored", framework="tensorflow", timeout=60)
with unidist.scope():
    model = unidist.wrap_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    model.compile(unidist.wrap_optimizer(keras.optimizers.SGD(0.01), model), loss="mse")
def die(batch, logs):
    if batch == 2 and unidist.rank() == 1:
        print(time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
x = np.ones((64, 1), "float32")
model.fit(x, x, batch_size=4, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_begin=die)])
print("went on", flush=True)
"""

LATE = """
import tensorflow as tf, unidist
import os
if os.environ["RANK"] == "1":
    tf.ones([])
unidist.init("mirrored", framework="tensorflow", timeout=60)
"""


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def start(folder: Path, script: str, environs: list[dict[str, str]], *arguments: str, inside: list[list[str]] | None = None):
    path = folder / "script.py"
    path.write_text(script)
    common = clean_environment(os.environ) | {"KERAS_BACKEND": "tensorflow", "UNIDIST_TRAIN_QUIET": "1"}
    return [
        subprocess.Popen(
            [*before, sys.executable, str(path), *arguments], env=common | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for before, own in zip(inside or [[], []], environs)
    ]


def finish(processes):
    """(code, stdout, stderr) of each."""
    try:
        return [(process.returncode, *texts) for process in processes for texts in [process.communicate(timeout=90)]]
    finally:
        for process in processes:
            process.kill()


def plain(rank: int, address: str, port: int, local_size: int = 1) -> dict[str, str]:
    own = {"LOCAL_RANK": str(rank if local_size > 1 else 0), "LOCAL_WORLD_SIZE": str(local_size)}
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port), **own}


def test_tf_config_alone(tmp_path):
    """Field case 52: what a TFJob sets, no other launcher. The servers listen where it says; a second `init` goes on with them."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [one.getsockname()[1], other.getsockname()[1]]
    cluster = {"chief": [f"127.0.0.1:{ports[0]}"], "worker": [f"localhost:{ports[1]}"]}
    tasks = [{"type": "chief", "index": 0}, {"type": "worker", "index": 0}]
    environs = [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task}), "MASTER_PORT": str(ports[0] + 1)} for task in tasks]
    for code, out, err in finish(start(tmp_path, AGAIN, environs, json.dumps([*cluster["chief"], *cluster["worker"]]))):
        assert (code, out) == (0, "WEIGHTS 1.15 1.15\n"), err


@pytest.mark.parametrize("where", [WHERE])
@pytest.mark.parametrize("backend", ["mirrored", "horovod"])
def test_fit_on_two_hosts(backend, where, tmp_path, request, free_port):
    """Field case 52 and keras issue 20585, between two hosts: the weights of one device, with even and uneven shares."""
    if backend == "horovod":
        pytest.importorskip("horovod")
    apart = where == "two-namespaces"
    inside = request.getfixturevalue("two_hosts") if apart else None
    address = ADDRESSES[0] if apart else "127.0.0.1"
    done = finish(start(tmp_path, FIT, [plain(rank, address, free_port) for rank in range(2)], backend, inside=inside))
    for code, out, err in done:
        assert (code, out) == (0, "WEIGHTS 1.15 1.093333\n"), err


def test_a_killed_rank_ends_the_others_in_fit(tmp_path, free_port):
    first, second = start(tmp_path, FAILS, [plain(rank, "127.0.0.1", free_port, 2) for rank in range(2)])
    (code, out, err), (killed, told, _) = finish([first, second])
    assert killed == -9 and code == 83, err
    assert "went on" not in out and "rank 0 was in a step of Keras' fit" in err
    assert time.time() - float(told) < 30.0


def test_tensorflow_used_before_init(tmp_path, free_port):
    """All ranks raise: the start of TensorFlow's server would wait for ever, and hold Python's lock."""
    for code, _, err in finish(start(tmp_path, LATE, [plain(rank, "127.0.0.1", free_port, 2) for rank in range(2)])):
        assert code == 1 and "LaunchError: TensorFlow was used before unidist.init" in err and "(rank 1)" in err
