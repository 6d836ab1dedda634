"""Contract 8 and 9: collectives among some of the ranks, while the others go on."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import unidist
from unidist.errors import CollectiveTimeoutError, MismatchError, UnsupportedError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, several_processes


def has_groups(bench: Any) -> str | None:
    """Some of the ranks may do a collective among themselves."""
    return None if "groups" in bench.abilities or bench.size == 1 else "no groups of ranks here"


_GROUPS = (has_groups,)


@check(8, "every collective among all ranks, the last one, and every second one", flavours="once", needs=_GROUPS, few=True)
def group_collectives(bench: Bench) -> None:
    n, r = bench.size, bench.rank
    for ranks in (range(n), [n - 1], range(0, n, 2)):
        group, others = unidist.new_group(reversed(ranks)), [k for k in range(n) if k not in ranks]
        compare.same((group.ranks, group.size), (tuple(ranks), len(ranks)), "the ranks of the group")
        compare.same((group.rank, len({group, group})), (list(ranks).index(r) if r in ranks else None, 1), "this rank's place in it")
        if r in others:
            with compare.raises(ValueError, f"rank {r}", str(list(ranks))):
                unidist.all_reduce(1.0, group=group)
            continue
        _inside(bench, group, list(ranks))
    compare.same(unidist.all_reduce(1, "sum"), n, "the next collective of all ranks")


def _inside(bench: Bench, group: unidist.Group, ranks: list[int]) -> None:
    mine, place, size = bench.tensor(np.arange(4.0) + bench.rank), ranks.index(bench.rank), len(ranks)
    compare.same(bench.array(unidist.all_reduce(mine, group=group)).tolist(), (np.arange(4.0) + np.mean(ranks)).tolist(), "all_reduce")
    compare.same(unidist.all_gather(bench.rank, group=group).tolist(), ranks, "all_gather")
    compare.same(bench.array(unidist.broadcast(mine, ranks[-1], group=group)).tolist(), (np.arange(4.0) + ranks[-1]).tolist(), "broadcast")
    rows = np.repeat([[bench.rank]], size, 0)
    compare.same(unidist.reduce_scatter(rows, "sum", group=group).tolist(), [[sum(ranks)]], "reduce_scatter")
    numbered = np.arange(size) + 10 * bench.rank
    compare.same(unidist.all_to_all(numbered, group=group).tolist(), [10 * rank + place for rank in ranks], "all_to_all")
    unidist.barrier(group=group)
    compare.same(unidist.broadcast_object({"of": bench.rank}, ranks[0], group=group), {"of": ranks[0]}, "broadcast_object")
    compare.same(unidist.all_gather_object([bench.rank], group=group), [[rank] for rank in ranks], "all_gather_object")


@check(8, "new_group raises on all ranks for ranks that are none, come twice, or differ", flavours="once", needs=_GROUPS)
def group_arguments(bench: Bench) -> None:
    n = bench.size
    wrong: tuple[tuple[Any, str], ...] = (([], "at least one"), ([0, 0], "twice"), ([0, n], str(n - 1)), (["a"], "whole numbers"))
    for ranks, text in wrong:
        with compare.raises(ValueError, text):
            unidist.new_group(ranks)
    if n > 1:
        with compare.raises(MismatchError, "rank 0", "[0]", "[1]"):
            unidist.new_group([0] if bench.rank == 0 else [1])
        with compare.raises(ValueError if bench.rank == 0 else MismatchError, "twice"):
            unidist.new_group([0, 0] if bench.rank == 0 else [0])
    for group, kind, text in ((1, TypeError, "new_group"), ("others", TypeError, "replicas"), ("stages", UnsupportedError, "split")):
        with compare.raises(kind, text):
            unidist.all_reduce(1.0, group=group)  # type: ignore[arg-type]
    with compare.raises(ValueError, "made before"):
        unidist.all_reduce(1.0, group=unidist.Group((0,), 0, "of another init"))
    compare.same(unidist.all_reduce(1, "sum", group="replicas"), n, 'the group "replicas"')


@check(
    8, "a group's values that don't fit together raise in it, and a root outside it", flavours="once", needs=(several_processes, has_groups)
)
def group_mismatches(bench: Bench) -> None:
    group = unidist.new_group(range(bench.size))
    first = bench.rank == 0
    with compare.raises(MismatchError, "all_reduce", "2", "3", "among ranks"):
        unidist.all_reduce(np.ones(2 if first else 3), group=group)
    with compare.raises(MismatchError, "all_reduce", "all_gather"):
        (unidist.all_reduce if first else unidist.all_gather)(1.0, group=group)
    others = unidist.new_group([0])
    if first:
        with compare.raises(ValueError, "root", "[0]"):
            unidist.broadcast(1.0, 1, group=others)
        with compare.raises(UnsupportedError, "all ranks"):
            unidist.broadcast(bench.model("mlp", wrapped=False), group=others)
    compare.same(unidist.all_reduce(1, "sum", group=group), bench.size, "the next collective of the group")
    compare.same(unidist.all_reduce(1, "sum"), bench.size, "the next collective of all ranks")


@check(9, "a late rank of a group is named in it; ranks outside go on", flavours="once", needs=(several_processes, has_groups), few=True)
def late_in_group(bench: Bench) -> None:
    ranks = list(range(bench.size))[-2:]
    group = unidist.new_group(ranks)
    if bench.rank in ranks:
        if bench.rank == ranks[1]:
            time.sleep(1.0)
        with bench.patience(0.5), compare.raises(CollectiveTimeoutError, f"all_reduce(sum) among ranks {ranks}", f"rank {ranks[1]}"):
            unidist.all_reduce(np.ones(2), "sum", group=group)
    compare.same(unidist.all_reduce(1, "sum"), bench.size, "the next collective of all ranks")
    if bench.rank in ranks:
        compare.same(unidist.all_reduce(1, "sum", group=group), 2, "the next collective of the group")
