"""unidist: one API for distributed training over PyTorch and TensorFlow.

Importing it loads nothing but this file: each public name brings its module when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unidist.base import Step as Step
    from unidist.batch import Share as Share
    from unidist.collectives import (
        all_gather as all_gather,
        all_gather_object as all_gather_object,
        all_reduce as all_reduce,
        barrier as barrier,
        broadcast as broadcast,
        broadcast_object as broadcast_object,
    )
    from unidist.context import Context as Context, current as current, init as init, is_initialized as is_initialized, shutdown as shutdown
    from unidist.data import Data as Data
    from unidist.errors import (
        CollectiveTimeoutError as CollectiveTimeoutError,
        FrameworkMismatchError as FrameworkMismatchError,
        LaunchError as LaunchError,
        MismatchError as MismatchError,
        MissingDependencyError as MissingDependencyError,
        NotInitializedError as NotInitializedError,
        PeerFailedError as PeerFailedError,
        UnidistError as UnidistError,
        UnknownBackendError as UnknownBackendError,
        UnsupportedError as UnsupportedError,
    )
    from unidist.facts import (
        backend as backend,
        device as device,
        framework as framework,
        local_rank as local_rank,
        local_world_size as local_world_size,
        node_rank as node_rank,
        num_replicas as num_replicas,
        rank as rank,
        world_size as world_size,
    )
    from unidist.messages import (
        is_main_process as is_main_process,
        main_process_first as main_process_first,
        main_process_only as main_process_only,
        print as print,
    )
    from unidist.objects import (
        assert_replicas_equal as assert_replicas_equal,
        get_weights as get_weights,
        native as native,
        scope as scope,
        set_weights as set_weights,
        wrap_model as wrap_model,
        wrap_optimizer as wrap_optimizer,
    )
    from unidist.steps import (
        Mean as Mean,
        accumulate as accumulate,
        backward as backward,
        clip_gradients as clip_gradients,
        data_shard as data_shard,
        evaluate as evaluate,
        gather_predictions as gather_predictions,
        make_train_step as make_train_step,
        predict as predict,
        reduce_gradients as reduce_gradients,
        wrap_data as wrap_data,
    )
    from unidist.version import __version__ as __version__

_MODULES = {
    "base": "Step",
    "batch": "Share",
    "collectives": "all_gather all_gather_object all_reduce barrier broadcast broadcast_object",
    "context": "Context current init is_initialized shutdown",
    "data": "Data",
    "errors": "CollectiveTimeoutError FrameworkMismatchError LaunchError MismatchError MissingDependencyError "
    "NotInitializedError PeerFailedError UnidistError UnknownBackendError UnsupportedError",
    "facts": "backend device framework local_rank local_world_size node_rank num_replicas rank world_size",
    "messages": "is_main_process main_process_first main_process_only print",
    "objects": "assert_replicas_equal get_weights native scope set_weights wrap_model wrap_optimizer",
    "steps": "Mean accumulate backward clip_gradients data_shard evaluate gather_predictions make_train_step predict "
    "reduce_gradients wrap_data",
    "version": "__version__",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = list(_HOME)  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """A public name, from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module 'unidist' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"unidist.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
