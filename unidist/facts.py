"""Ranks, sizes and names; before `init` they are those of a job of one process, so that libraries can ask."""

from __future__ import annotations

from typing import Any

from unidist import context as _context
from unidist.world import World

_ALONE = World()


def _world() -> World:
    return _context._current.world if _context._current is not None else _ALONE


def rank() -> int:
    """This process's number in the job, from 0; 0 before `init`."""
    return _world().rank


def local_rank() -> int:
    """This process's number on its host, from 0; 0 before `init`."""
    return _world().local_rank


def node_rank() -> int:
    """The number of this host in the job, from 0; 0 before `init`."""
    return _world().node_rank


def world_size() -> int:
    """Processes in the job (not devices); 1 before `init`."""
    return _world().size


def local_world_size() -> int:
    """Processes of the job on this host; 1 before `init`."""
    return _world().local_size


def num_replicas() -> int:
    """Replicas of the model in the job; 1 before `init`."""
    return _context._current._backend.num_replicas if _context._current is not None else 1


def device() -> Any:
    """The framework's device of this process. Raises NotInitializedError before `init`."""
    return _context.current().device


def backend() -> str:
    """The backend's name, such as "ddp". Raises NotInitializedError before `init`."""
    return _context.current().backend


def framework() -> str:
    """ "torch" or "tensorflow". Raises NotInitializedError before `init`."""
    return _context.current().framework
