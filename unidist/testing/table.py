"""The table of checks: `@check` registers a function, `checks_of` lists what a framework's launch runs, in order."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

POINTS = {
    1: "one device is the truth",
    2: "same start",
    3: "accumulation",
    4: "clipping",
    5: "parameters",
    6: "BatchNorm",
    7: "native objects stay native",
    8: "collectives",
    9: "every wait ends",
    10: "data",
    11: "metrics",
    12: "nothing hidden",
    13: "randomness",
}
CONTRACT = "unidist.testing.checks"  # the catalogue that is shipped
# What models are made of: modules and optimizers of torch itself, or Keras on the framework.
FLAVOURS = {"torch": ("native", "keras"), "tensorflow": ("keras",)}

Need = Callable[[Any], "str | None"]


@dataclass(frozen=True)
class Check:
    """One check of one flavour: `function(bench)` returns when the contract holds, else raises.

    needs: each says why the check does not apply to a bench, or None. refusable: a backend whose `refuses` names the point must raise
    UnsupportedError here. few: one of those that three workers run. ends_job: leaves the job in failure, so it gets its own.
    """

    name: str
    point: int
    title: str
    flavour: str
    function: Callable[[Any], None]
    needs: tuple[Need, ...] = ()
    refusable: bool = True
    few: bool = False
    ends_job: bool = False

    def obstacle(self, bench: Any) -> str | None:
        """Why this check does not apply."""
        return next((reason for need in self.needs if (reason := need(bench)) is not None), None)


@dataclass(frozen=True)
class Registered:
    """A check before its cases and flavours are told apart; number: the point's, or the field case's."""

    catalogue: str
    number: int
    point: int
    title: str
    name: str
    function: Callable[..., None]
    cases: Mapping[str, Any]
    flavours: str | Mapping[str, Collection[str]]
    settings: Mapping[str, Any]
    few: bool | Collection[str]


_registered: list[Registered] = []


def check(
    point: int,
    title: str,
    *,
    cases: Mapping[str, Any] | None = None,
    flavours: str | Mapping[str, Collection[str]] = "each",
    few: bool | Collection[str] = False,
    number: int | None = None,
    **settings: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a check of a contract point; its name is the point (or `number`) and the function's, with each case's appended.

    cases: name to what is passed after the bench. flavours: "each", "once" (whatever the framework's first flavour is), a
    flavour, or flavour to the cases it runs. few: whether (or which cases) three workers run it. settings: fields of Check.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__.replace("_", "-")
        catalogue = function.__module__.rpartition(".")[0]
        first = point if number is None else number
        _registered.append(Registered(catalogue, first, point, title, name, function, cases or {}, flavours, settings, few))
        return function

    return register


def registered_in(catalogue: str) -> list[Registered]:
    """What a catalogue's modules register, by number, cases not yet told apart."""
    for module in importlib.import_module(catalogue).MODULES:
        importlib.import_module(f"{catalogue}.{module}")
    return sorted((r for r in _registered if r.catalogue == catalogue), key=lambda r: r.number)


def checks_of(framework: str, catalogue: str = CONTRACT) -> list[Check]:
    """All checks of a framework, in the order in which a launch runs them; imports no framework.

    catalogue: the package whose modules register them; its `MODULES` names the modules in their order.
    """
    found = [one for registered in registered_in(catalogue) for one in _expand(registered, FLAVOURS[framework])]
    return sorted(found, key=lambda one: (one.ends_job, one.point > 12))


def select(checks: Sequence[Check], only: Sequence[str] = (), *, apart: bool = False) -> list[Check]:
    """Those that `only` names: by name, by point, or "few"; all when it is empty. apart: also those that end their job.

    A check that ends its job is always there when it is named.
    """
    named = [check for check in checks if not only or check.name in only or str(check.point) in only or ("few" in only and check.few)]
    return [check for check in named if apart or not check.ends_job or check.name in only]


def _expand(registered: Registered, flavours: tuple[str, ...]) -> list[Check]:
    found = []
    for case in registered.cases or {"": None}:
        for flavour in flavours:
            if not _runs(registered, case, flavour, flavours[0]):
                continue
            arguments = (registered.cases[case],) if case else ()
            parts = [str(registered.number), registered.name, *([case] if case else []), *(["keras"] if flavour == "keras" else [])]
            few = registered.few if isinstance(registered.few, bool) else case in registered.few
            title = f"{registered.title}: {case}" if case else registered.title
            function = functools.partial(_call, registered.function, arguments)
            found.append(Check("-".join(parts), registered.point, title, flavour, function, few=few, **registered.settings))
    return found


def _runs(registered: Registered, case: str, flavour: str, first: str) -> bool:
    chosen = registered.flavours
    if isinstance(chosen, str):
        return chosen == "each" or chosen == flavour or (chosen == "once" and flavour == first)
    return flavour in chosen and (not case or case in chosen[flavour])


def _call(function: Callable[..., None], arguments: tuple[Any, ...], bench: Any) -> None:
    function(bench, *arguments)


# What a check may need


def several_processes(bench: Any) -> str | None:
    """More than one rank."""
    return None if bench.size > 1 else "one process only"


def two_processes(bench: Any) -> str | None:
    """Two ranks, for which the case gives its numbers."""
    return None if bench.size == 2 else "the numbers are those of two processes"


def several_replicas(bench: Any) -> str | None:
    """More than one replica of the model."""
    return None if bench.replicas > 1 else "one replica only"


def one_replica_each(bench: Any) -> str | None:
    """Each process holds one replica."""
    return None if bench.local_replicas == 1 else "a process holds several replicas"


def exchanges_in_backward(bench: Any) -> str | None:
    """Gradients are exchanged in backward."""
    return None if "backward" in bench.abilities else "gradients are not exchanged in backward here"


def exchanges_in_apply(bench: Any) -> str | None:
    """`reduce_gradients` exchanges."""
    return None if "reduce_gradients" in bench.abilities else "gradients are exchanged in backward here"


def engine_of_its_own(bench: Any) -> str | None:
    """Tensors do not travel over the control plane."""
    return "tensors travel over the control plane" if "relayed" in bench.abilities else None


def synchronises_batchnorm(bench: Any) -> str | None:
    """`sync_batchnorm=True` is not refused."""
    return bench.backend.refuses.get(6)  # type: ignore[no-any-return]
