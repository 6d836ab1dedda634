"""unidist: one API for distributed training over PyTorch and TensorFlow.

Importing it loads nothing but this file: each public name brings its module when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unidist.base import Step as Step
    from unidist.batch import Share as Share
    from unidist.checkpoint.verbs import load as load
    from unidist.checkpoint.verbs import save as save
    from unidist.collectives import (
        all_gather as all_gather,
    )
    from unidist.collectives import (
        all_gather_object as all_gather_object,
    )
    from unidist.collectives import (
        all_reduce as all_reduce,
    )
    from unidist.collectives import (
        all_to_all as all_to_all,
    )
    from unidist.collectives import (
        barrier as barrier,
    )
    from unidist.collectives import (
        broadcast as broadcast,
    )
    from unidist.collectives import (
        broadcast_object as broadcast_object,
    )
    from unidist.collectives import (
        reduce_scatter as reduce_scatter,
    )
    from unidist.context import Context as Context
    from unidist.context import current as current
    from unidist.context import init as init
    from unidist.context import is_initialized as is_initialized
    from unidist.context import shutdown as shutdown
    from unidist.data import Data as Data
    from unidist.errors import (
        CollectiveTimeoutError as CollectiveTimeoutError,
    )
    from unidist.errors import (
        FrameworkMismatchError as FrameworkMismatchError,
    )
    from unidist.errors import (
        LaunchError as LaunchError,
    )
    from unidist.errors import (
        MismatchError as MismatchError,
    )
    from unidist.errors import (
        MissingDependencyError as MissingDependencyError,
    )
    from unidist.errors import (
        NotInitializedError as NotInitializedError,
    )
    from unidist.errors import (
        PeerFailedError as PeerFailedError,
    )
    from unidist.errors import (
        UnidistError as UnidistError,
    )
    from unidist.errors import (
        UnknownBackendError as UnknownBackendError,
    )
    from unidist.errors import (
        UnsupportedError as UnsupportedError,
    )
    from unidist.facts import (
        backend as backend,
    )
    from unidist.facts import (
        device as device,
    )
    from unidist.facts import (
        framework as framework,
    )
    from unidist.facts import (
        local_rank as local_rank,
    )
    from unidist.facts import (
        local_world_size as local_world_size,
    )
    from unidist.facts import (
        node_rank as node_rank,
    )
    from unidist.facts import (
        num_replicas as num_replicas,
    )
    from unidist.facts import (
        rank as rank,
    )
    from unidist.facts import (
        world_size as world_size,
    )
    from unidist.groups import Group as Group
    from unidist.groups import new_group as new_group
    from unidist.hardware.inventory import devices as devices
    from unidist.messages import (
        is_main_process as is_main_process,
    )
    from unidist.messages import (
        main_process_first as main_process_first,
    )
    from unidist.messages import (
        main_process_only as main_process_only,
    )
    from unidist.messages import (
        print as print,
    )
    from unidist.objects import (
        assert_replicas_equal as assert_replicas_equal,
    )
    from unidist.objects import (
        get_weights as get_weights,
    )
    from unidist.objects import (
        native as native,
    )
    from unidist.objects import (
        scope as scope,
    )
    from unidist.objects import (
        set_weights as set_weights,
    )
    from unidist.objects import (
        wrap_model as wrap_model,
    )
    from unidist.objects import (
        wrap_optimizer as wrap_optimizer,
    )
    from unidist.steps import (
        Mean as Mean,
    )
    from unidist.steps import (
        accumulate as accumulate,
    )
    from unidist.steps import (
        backward as backward,
    )
    from unidist.steps import (
        clip_gradients as clip_gradients,
    )
    from unidist.steps import (
        data_shard as data_shard,
    )
    from unidist.steps import (
        evaluate as evaluate,
    )
    from unidist.steps import (
        gather_predictions as gather_predictions,
    )
    from unidist.steps import (
        make_train_step as make_train_step,
    )
    from unidist.steps import (
        predict as predict,
    )
    from unidist.steps import (
        reduce_gradients as reduce_gradients,
    )
    from unidist.steps import (
        wrap_data as wrap_data,
    )
    from unidist.version import __version__ as __version__

_MODULES = {
    "base": "Step",
    "batch": "Share",
    "checkpoint.verbs": "load save",
    "collectives": "all_gather all_gather_object all_reduce all_to_all barrier broadcast broadcast_object reduce_scatter",
    "context": "Context current init is_initialized shutdown",
    "data": "Data",
    "errors": "CollectiveTimeoutError FrameworkMismatchError LaunchError MismatchError MissingDependencyError "
    "NotInitializedError PeerFailedError UnidistError UnknownBackendError UnsupportedError",
    "facts": "backend device framework local_rank local_world_size node_rank num_replicas rank world_size",
    "groups": "Group new_group",
    "hardware.inventory": "devices",
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
    if name == "keras":
        return importlib.import_module("unidist.keras")
    if name not in _HOME:
        raise AttributeError(f"module 'unidist' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"unidist.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
