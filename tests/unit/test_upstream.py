"""The private names of other libraries that docs/upstream.md lists are still there, and take what they are given."""

import inspect
import subprocess
import sys

TORCH = """
import inspect, torch
from torch.nn.parallel import DistributedDataParallel as DDP
for name in ("_pre_forward", "_post_forward", "_check_reducer_finalized"):
    assert hasattr(DDP, name), name
assert "init_sync" in inspect.signature(DDP.__init__).parameters
assert hasattr(torch.autograd.Variable._execution_engine, "queue_callback")
assert issubclass(torch.nn.BatchNorm2d, torch.nn.modules.batchnorm._BatchNorm)
from torch.utils.data._utils import worker
assert hasattr(worker, "_worker_info")
"""

KERAS = """
import keras
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
assert callable(model._get_metrics_result_or_logs)
optimizer = keras.optimizers.SGD()
optimizer.build(model.trainable_variables)
assert [v.path for v in optimizer._trainable_variables] == [v.path for v in model.trainable_variables]
from keras.src.losses import loss
for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution", "reduce_weighted_values", "apply_mask"):
    assert callable(getattr(loss, name)), name
assert callable(keras.layers.BatchNormalization()._moments) and callable(model._flatten_layers)
if keras.config.backend() == "tensorflow":
    import tensorflow as tf
    assert callable(optimizer._all_reduce_sum_gradients) and callable(model._maybe_symbolic_build)
    batched = tf.data.Dataset.range(4).shuffle(2, seed=1).batch(2)
    assert [type(d).__name__ for d in batched._inputs()] == ["_ShuffleDataset"] and hasattr(batched, "_batch_size"), batched
    assert callable(tf.distribute.get_strategy().extended.variable_created_in_scope)
    from tensorflow.python.eager import context
    assert context.context()._context_handle is not None
    layer = keras.layers.BatchNormalization()
    layer.build((None, 2))
    assert layer._reduction_axes == [0]
    sent = dict(input=tf.ones([2]), group_size=1, group_key=1, instance_key=1, ordering_token=[], merge_op="Add", final_op="Id")
    assert tf.raw_ops.CollectiveReduceV2(**sent, communication_hint="auto", timeout_seconds=5.0).numpy().tolist() == [1.0, 1.0]
"""


def run(code, **environ):
    import os

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environ}, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_torch():
    run(TORCH)


def test_keras_on_torch():
    run(KERAS, KERAS_BACKEND="torch")


def test_keras_on_tensorflow():
    run(KERAS, KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3")


def test_horovods_rendezvous():
    from horovod.runner.common.util import hosts
    from horovod.runner.http.http_server import RendezvousServer

    assert {"start", "init", "stop"} <= {name for name, _ in inspect.getmembers(RendezvousServer)}
    assert len(hosts.get_host_assignments(hosts.parse_hosts("a:1,b:1"), 2)) == 2
