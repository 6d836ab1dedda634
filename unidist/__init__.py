"""unidist: one API for distributed training over PyTorch and TensorFlow; importing it loads the standard library only."""

from unidist.base import Step
from unidist.batch import Share
from unidist.collectives import all_gather, all_gather_object, all_reduce, barrier, broadcast, broadcast_object
from unidist.context import Context, current, init, is_initialized, shutdown
from unidist.data import Data
from unidist.errors import (
    CollectiveTimeoutError,
    FrameworkMismatchError,
    LaunchError,
    MismatchError,
    MissingDependencyError,
    NotInitializedError,
    PeerFailedError,
    UnidistError,
    UnknownBackendError,
    UnsupportedError,
)
from unidist.facts import (
    backend,
    device,
    framework,
    local_rank,
    local_world_size,
    node_rank,
    num_replicas,
    rank,
    world_size,
)
from unidist.messages import is_main_process, main_process_first, main_process_only, print
from unidist.objects import (
    assert_replicas_equal,
    get_weights,
    native,
    scope,
    set_weights,
    wrap_model,
    wrap_optimizer,
)
from unidist.steps import (
    Mean,
    accumulate,
    backward,
    clip_gradients,
    data_shard,
    evaluate,
    gather_predictions,
    make_train_step,
    predict,
    reduce_gradients,
    wrap_data,
)
from unidist.version import __version__

__all__ = [
    "CollectiveTimeoutError", "Context", "Data", "FrameworkMismatchError", "LaunchError", "Mean", "MismatchError",
    "MissingDependencyError", "NotInitializedError", "PeerFailedError", "Share", "Step", "UnidistError", "UnknownBackendError",
    "UnsupportedError", "__version__", "accumulate", "all_gather", "all_gather_object", "all_reduce", "assert_replicas_equal",
    "backend", "backward", "barrier", "broadcast", "broadcast_object", "clip_gradients", "current", "data_shard", "device",
    "evaluate", "framework", "gather_predictions", "get_weights", "init", "is_initialized", "is_main_process", "local_rank",
    "local_world_size", "main_process_first", "main_process_only", "make_train_step", "native", "node_rank", "num_replicas",
    "predict", "print", "rank", "reduce_gradients", "scope", "set_weights", "shutdown", "wrap_data", "wrap_model",
    "wrap_optimizer", "world_size",
]  # fmt: skip
