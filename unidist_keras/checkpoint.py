"""Checkpoints of Keras models and optimizers on either framework: variables by names that are the same in every process.

An optimizer's slots are known by the weight that they belong to, so that freezing a layer shifts nothing. Private names of Keras that are
read: `Optimizer._trainable_variables` (what it was built for); that are set: `_learning_rate` (a schedule).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from unidist.checkpoint.parts import Part, check_class, check_names, signature_of
from unidist.errors import MismatchError
from unidist_keras.names import model_variables, without_numbers

Reader = Callable[[Any], Any]
_PLAIN = (bool, int, float, str, type(None))


def models_weights(models: Mapping[str, Any], of_model: Callable[[Any], Mapping[str, Any]] = model_variables) -> dict[str, Any]:
    """Name to variable of all models' weights; with several models the name begins with the model's label."""
    return {f"{label}/{name}" if label else name: v for label, model in models.items() for name, v in of_model(model).items()}


def seed_generators(models: Mapping[str, Any]) -> dict[str, Any]:
    """The states of the models' seed generators by place: variables that are neither weights nor metrics."""
    found = {}
    for label, model in models.items():
        known = {id(v) for v in (*getattr(model, "weights", ()), *getattr(model, "metrics_variables", ()))}
        others = [v for v in model.variables if id(v) not in known and getattr(v, "name", "") == "seed_generator_state"]
        found.update({f"{label}/{index}": variable for index, variable in enumerate(others)})
    return found


def seed_states(models: Mapping[str, Any], to_array: Callable[[Any], Any]) -> dict[str, list[int]]:
    """JSON of the seed generators."""
    return {name: [int(n) for n in to_array(variable)] for name, variable in seed_generators(models).items()}


def set_seed_states(models: Mapping[str, Any], states: Mapping[str, list[int]], to_array: Callable[[Any], Any], *, own_seeds: bool) -> None:
    """The other way round, for those that both have; own_seeds: only how far they are, of a stream of their own."""
    for name, variable in seed_generators(models).items():
        if name in states:
            seed, position = states[name]
            variable.assign([int(to_array(variable)[0]), position] if own_seeds else [seed, position])


class VariablesPart(Part):
    """A model as its variables; read: a variable's value as a tensor."""

    def __init__(self, named: Mapping[str, Any], read: Reader, signature: Callable[[Any], Any]) -> None:
        self._named = named
        self._read = read
        self._signature = signature

    def state(self) -> Any:
        return {name: self._read(variable) for name, variable in self._named.items()}

    def check(self, state: Any, facts: Mapping[str, Any]) -> None:
        held = {name: self._signature(value) for name, value in self.state().items()}
        check_names("the model", held, {name: signature_of(slot) for name, slot in state.items()})

    def restore(self, state: Any, facts: Mapping[str, Any]) -> None:
        for name, variable in self._named.items():
            variable.assign(state[name])


class OptimizerPart(Part):
    """An optimizer as its variables by name and its plain hyper-parameters.

    weights: of the models, by name; one that is not trained is frozen. build: called when it was not built yet.
    """

    def __init__(
        self, optimizer: Any, weights: Mapping[str, Any], trained: set[int], read: Reader, signature: Callable[[Any], Any],
        build: Callable[[], Any],
    ) -> None:  # fmt: skip
        self._optimizer = optimizer
        self._read = read
        self._signature = signature
        if not optimizer.built:
            build()
        self._frozen = [name for name, variable in weights.items() if id(variable) not in trained]
        self._named = named_variables(optimizer, {id(variable): name for name, variable in weights.items()})

    def state(self) -> Any:
        values = {name: self._read(variable) for name, (_, variable) in self._named.items()}
        return {"variables": values, "hyperparameters": hyperparameters(self._optimizer)}

    def facts(self) -> dict[str, Any]:
        weight_of = {name: weight for name, (weight, _) in self._named.items() if weight is not None}
        return {"class": type(self._optimizer).__name__, "frozen": self._frozen, "weight_of": weight_of, "built": self._optimizer.built}

    def check(self, state: Any, facts: Mapping[str, Any]) -> None:
        check_class("the optimizer", self._optimizer, facts)
        if facts["built"] and not self._optimizer.built:
            raise MismatchError(
                "the optimizer was not built yet, and can't be for one of several models: call unidist.wrap_optimizer(optimizer, model) "
                "with the model that it trains"
            )
        _check_rate(hyperparameters(self._optimizer), state["hyperparameters"])
        weight_of = {name: weight for name, (weight, _) in self._named.items()}
        new = {n for n, weight in weight_of.items() if weight is not None and (weight in facts["frozen"] or not facts["built"])}
        dropped = {n for n, weight in facts["weight_of"].items() if weight in self._frozen}
        saved = {name: signature_of(slot) for name, slot in state["variables"].items()}
        held = {name: self._signature(self._read(variable)) for name, (_, variable) in self._named.items()}
        check_names(
            "the optimizer",
            {name: value for name, value in held.items() if name in saved or name not in new},
            {name: value for name, value in saved.items() if name in held or name not in dropped},
        )

    def restore(self, state: Any, facts: Mapping[str, Any]) -> None:
        set_hyperparameters(self._optimizer, state["hyperparameters"])
        for name, (_, variable) in self._named.items():
            if name in state["variables"]:
                variable.assign(state["variables"][name])


def named_variables(optimizer: Any, weight_names: Mapping[int, str]) -> dict[str, tuple[str | None, Any]]:
    """name: (the weight that it belongs to or None, variable); slots are named by their weight, the others by themselves.

    Keras names a slot by the path of its weight; where several weights have one path, their slots come in the weights' order.
    Raises ValueError for an optimizer that was built for a weight of no given model.
    """
    by_path: dict[str, list[str]] = {}
    for variable in getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables if optimizer.built else []:
        if id(variable) not in weight_names:
            raise ValueError(
                f"the optimizer trains {variable.name!r}, which is a weight of no given model; pass model= with all models that it trains"
            )
        path = getattr(variable, "path", variable.name)
        by_path.setdefault(str(path).replace("/", "_").replace(":", "_"), []).append(weight_names[id(variable)])
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[str, tuple[str | None, Any]] = {}
    for variable in optimizer.variables:
        path = max((p for p in by_path if variable.name.startswith(f"{p}_")), key=len, default="")
        if not path:
            name, weight = without_numbers(variable.name), None
        else:
            slot = variable.name[len(path) + 1 :]
            weights = by_path[path]
            weight = weights[seen[path, slot] % len(weights)]
            seen[path, slot] += 1
            name = f"{weight}/{slot}"
        while name in found:
            name += "'"
        found[name] = weight, variable
    return found


def hyperparameters(optimizer: Any) -> dict[str, Any]:
    """The plain values of an optimizer's config, of a schedule its class and config, of an inner optimizer its own."""
    config = optimizer.get_config()
    plain = {name: value for name, value in config.items() if isinstance(value, _PLAIN) and name not in ("name", "learning_rate")}
    schedule = getattr(optimizer, "_learning_rate", None)
    if hasattr(schedule, "get_config") and not hasattr(schedule, "assign"):
        plain["schedule"] = [type(schedule).__name__, schedule.get_config()]
    inner = getattr(optimizer, "inner_optimizer", None)
    return plain if inner is None else {**plain, "inner": hyperparameters(inner)}


def set_hyperparameters(optimizer: Any, values: Mapping[str, Any]) -> None:
    """The other way round; learning rates that are no schedules are variables."""
    for name, value in values.items():
        if name == "inner":
            set_hyperparameters(optimizer.inner_optimizer, value)
        elif name == "schedule":
            if optimizer._learning_rate.get_config() != value[1]:
                optimizer._learning_rate = type(optimizer._learning_rate).from_config(value[1])
        elif hasattr(optimizer, name):
            with contextlib.suppress(AttributeError):  # a property that can't be set follows from others
                setattr(optimizer, name, value)


def _check_rate(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    kinds = [values["schedule"][0] if "schedule" in values else "a number" for values in (mine, saved)]
    if kinds[0] != kinds[1]:
        raise MismatchError(f"the optimizer's learning rate is {kinds[0]}, but {kinds[1]} in the checkpoint")
    if "inner" in mine and "inner" in saved:
        _check_rate(mine["inner"], saved["inner"])
