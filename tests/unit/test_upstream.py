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
assert callable(model._get_metrics_result_or_logs) and model._initial_epoch is None
assert keras.callbacks.EarlyStopping.__module__.startswith("keras.src.callbacks.")
optimizer = keras.optimizers.SGD()
assert isinstance(optimizer._learning_rate, keras.Variable)
optimizer.build(model.trainable_variables)
assert [v.path for v in optimizer._trainable_variables] == [v.path for v in model.trainable_variables]
adam = keras.optimizers.Adam()
adam.build(model.trainable_variables)
slots = [v.path.replace("/", "_") + "_momentum" for v in model.trainable_variables]
assert set(slots) <= {v.name for v in adam.variables}, [v.name for v in adam.variables]
from keras.src.losses import loss
for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution", "reduce_weighted_values", "apply_mask"):
    assert callable(getattr(loss, name)), name
norm = keras.layers.BatchNormalization()
norm.build((None, 2))
assert callable(norm._moments) and norm._reduction_axes == [0] and callable(model._flatten_layers)
dropout = keras.layers.Dropout(0.5)
assert dropout._seed_generators == [dropout.seed_generator] and callable(dropout.seed_generator.next)
scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
scaling.build(model.trainable_variables)
assert scaling.inner_optimizer.built and float(scaling.dynamic_scale) == scaling.initial_scale and hasattr(scaling, "step_counter")
if keras.config.backend() == "tensorflow":
    import tensorflow as tf
    assert callable(optimizer._all_reduce_sum_gradients) and callable(model._maybe_symbolic_build) and callable(model._symbolic_build)
    model.compile(optimizer, loss="mse", metrics=["mae"])
    assert model._compile_loss.metrics == [] and not model._compile_loss.built and not model._compile_metrics.built
    held = keras.optimizers.SGD(gradient_accumulation_steps=2, use_ema=True)
    held.build(model.trainable_variables)
    assert [v.shape for v in held._accumulated_gradients] == [v.shape for v in model.trainable_variables] and int(held._iterations) == 0
    assert held._get_variable_index(model.trainable_variables[1]) == 1
    for name in ("_backend_apply_gradients", "_backend_increment_gradient_accumulators", "_clip_gradients", "_apply_weight_decay",
                 "_backend_update_step", "_update_model_variables_moving_average"):
        assert callable(getattr(held, name)), name
    batched = tf.data.Dataset.range(4).shuffle(2, seed=1).batch(2)
    assert [type(d).__name__ for d in batched._inputs()] == ["_ShuffleDataset"] and hasattr(batched, "_batch_size"), batched
    counted, sliced = tf.data.Dataset.range(4), tf.data.Dataset.from_tensor_slices([1, 2])
    assert [type(d).__name__ for d in (counted, sliced)] == ["_RangeDataset", "_TensorSliceDataset"]
    assert int(counted._stop) - int(counted._start) == 4 * int(counted._step) and len(sliced._tensors) == 1
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
