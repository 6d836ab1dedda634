"""Groups of ranks that do a collective among themselves, while the other ranks go on."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from unidist.base import Backend
from unidist.context import current_backend
from unidist.errors import MismatchError, UnsupportedError


@dataclass(frozen=True)
class Group:
    """What `new_group` returns: some of the job's ranks. It can be compared, hashed and copied, and lives until `shutdown`.

    ranks: in ascending order, which is the order of the group's results. rank: this process's place among them, None outside.
    """

    ranks: tuple[int, ...]
    rank: int | None
    name: str = field(repr=False)  # the same on all ranks, and no other group's

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)


def new_group(ranks: Iterable[int]) -> Group:
    """A group of these ranks, for the `group` of collectives; every rank of the job must call it, with the same ranks.

    The ranks come in ascending order, as both PyTorch and Horovod have them. Raises on all ranks: MismatchError when they were
    given different ranks; ValueError for no rank at all, one twice, one that is none of the job; UnsupportedError where the
    backend has no groups; CollectiveTimeoutError.
    """
    backend = current_backend()
    given, problem = _read(ranks, backend.world.size)
    rows = [json.loads(r) for r in backend.control.gather("new_group", json.dumps([given, problem, secrets.token_hex(4)]))]
    if problem:
        raise ValueError(problem)
    for rank, (others, text, _) in enumerate(rows):
        if text or others != given:
            theirs = text or f"ranks {others}"
            raise MismatchError(f"new_group got different ranks: rank {backend.world.rank} said ranks {given}, rank {rank}: {theirs}")
    mine = given.index(backend.world.rank) if backend.world.rank in given else None
    group = Group(tuple(given), mine, rows[0][2])
    backend.groups[group] = backend._new_group(group) if backend.world.size > 1 else None
    return group


def _read(ranks: Iterable[int], size: int) -> tuple[list[int], str]:
    """The ranks in order, and what is wrong with them."""
    try:
        given = sorted(int(rank) for rank in ranks)
    except (TypeError, ValueError) as error:
        return [], f"new_group takes ranks, as whole numbers, not {ranks!r}: {error}"
    if not given:
        return given, "new_group takes at least one rank"
    if len(set(given)) < len(given):
        return given, f"new_group got a rank twice: {given}"
    if not (0 <= given[0] and given[-1] < size):
        return given, f"new_group takes ranks from 0 to {size - 1}, not {given}"
    return given, ""


def find_group(backend: Backend, group: object, operation: str) -> Group | None:
    """The group that a collective was given; None for the whole job.

    Raises at once, on this rank alone: TypeError for what is no group, ValueError on a rank outside the group, or for a group
    of an earlier `init`; UnsupportedError for "stages".
    """
    if group is None or group == "replicas":
        return None
    if group == "stages":
        raise UnsupportedError('group="stages" needs layers that are split over devices, and they are not; "replicas" is the whole job')
    if not isinstance(group, Group):
        raise TypeError(f'group is a Group from unidist.new_group, "replicas", or None for all ranks, not {group!r}')
    if group not in backend.groups:
        raise ValueError(f"the group of ranks {list(group.ranks)} was made before the last unidist.init; make it again")
    if group.rank is None:
        raise ValueError(f"rank {backend.world.rank} called {operation} with a group that it is not in: ranks {list(group.ranks)}")
    return group


def members(backend: Backend, group: Group | None) -> Sequence[int]:
    """The ranks that take part."""
    return range(backend.world.size) if group is None else group.ranks


def position(backend: Backend, group: Group | None) -> int:
    """This process among those that take part."""
    return backend.world.rank if group is None or group.rank is None else group.rank
