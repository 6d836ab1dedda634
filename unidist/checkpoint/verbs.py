"""`save` and `load`: the whole state of a training in a folder; all ranks call them, rank 0 writes and reads."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from unidist.agreement import first_difference
from unidist.base import Backend
from unidist.checkpoint import folder, streams, tree
from unidist.checkpoint.parts import DataPart, Part, StatePart, Store
from unidist.checkpoint.together import attempt, meet
from unidist.context import current_backend
from unidist.errors import MismatchError
from unidist.version import __version__

StrPath = str | os.PathLike[str]

_KINDS = ("model", "optimizer", "scheduler", "scaler", "data")  # in the order in which they are restored
_LABEL = re.compile(r"[A-Za-z0-9_-]+")
_TOGETHER = 64 << 20  # bytes that are sent at once


def save(
    path: StrPath,
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    extra: Any = None,
) -> None:
    """Write the whole state of a training into the folder `path`; every rank must call it, and rank 0 writes.

    model, optimizer, scheduler, scaler, data (what `wrap_data` returned): one object each, or a dict or list of them. An optimizer
    needs the models whose parameters it holds, since its state is kept by their names. extra: plain values (numbers, strings, None, lists,
    tuples, dicts) of rank 0. The random state of every rank is kept as well. Tensors are stored as safetensors, the rest as JSON.

    An older checkpoint of that name is replaced as a whole; a writer that is killed leaves it as it was. All ranks return when the new
    one is complete, and all raise when it could not be written: OSError, FileExistsError where another folder is, TypeError naming a value
    that can't be stored, MismatchError when the ranks pass different objects, CollectiveTimeoutError when a rank does not come.
    """
    backend, given, store, parts = _begin("save", model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, data=data)
    control = backend.control
    models = _models(given)
    states = control.gather("save's random states", json.dumps(streams.random_state(store, models)))
    backend._end_of_pass()
    attempt(control, "save", lambda: _write(backend, store, path, parts, states, extra), here=backend.world.rank == 0)


def load(path: StrPath, *, model: Any = None, optimizer: Any = None, scheduler: Any = None, scaler: Any = None, data: Any = None) -> Any:
    """Set the objects to what `save` wrote into the folder `path`, in place, and return its `extra`; every rank must call it.

    Call it when everything is wrapped. The job may have any number of workers and any backend of the same framework; rank 0 reads and
    sends to the others. What is not given is left out. With an optimizer, which means that training goes on, the random state
    is set too: each rank gets its own back, one that the saved job did not have a state derived from rank 0's and its own number.

    Names, shapes, dtypes and classes are compared first, and a difference raises MismatchError on all ranks before anything is changed.
    Parameters that were frozen in the saved job may be new in the optimizer, and begin without state; the state of parameters that
    are frozen now is dropped. Raises FileNotFoundError where no checkpoint is, ValueError for a damaged one or another version.
    """
    backend, given, store, parts = _begin("load", model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, data=data)
    control = backend.control
    files = _share(backend, attempt(control, "load", lambda: folder.read(path), here=backend.world.rank == 0))
    manifest = folder.parse(files.pop(folder.MANIFEST), str(path))
    attempt(control, "load", lambda: _check(backend, parts, manifest))
    attempt(control, "load", lambda: _restore(store, parts, manifest, files))
    if optimizer is not None:
        streams.set_random_state(store, manifest["random"], backend.world.rank, _models(given))
    return tree.decode(manifest["extra"], lambda slot: None)


def _begin(verb: str, **objects: Any) -> tuple[Backend, dict[str, dict[str, Any]], Store, Any]:
    """What both verbs do first, on all ranks together: (backend, what was given, the framework's store, its parts)."""
    backend = current_backend()
    given = _given(**objects)
    _come(backend, verb, given)
    store: Store = backend._store()
    return backend, given, store, attempt(backend.control, verb, lambda: _parts(store, given))


def _given(**objects: Any) -> dict[str, dict[str, Any]]:
    """kind: {label: object}; the label is "" for an object that was given by itself."""
    found: dict[str, dict[str, Any]] = {}
    for kind in _KINDS:
        value = objects[kind]
        if value is None:
            continue
        several = type(value) in (dict, list, tuple)
        labelled = dict(value) if type(value) is dict else {str(i): v for i, v in enumerate(value)} if several else {"": value}
        for label in labelled:
            if several and not (isinstance(label, str) and _LABEL.fullmatch(label)):
                raise ValueError(f"names of several objects are made of letters, digits, '_' and '-', since they name files; not {label!r}")
        found[kind] = labelled
    return found


def _models(given: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    return given.get("model", {})


def _come(backend: Backend, verb: str, given: Mapping[str, Mapping[str, Any]]) -> None:
    """All ranks are here with the same kinds of objects. Raises on all of them otherwise."""
    mine = [[_name(kind, label), type(obj).__name__] for kind, objects in given.items() for label, obj in objects.items()]
    rows = [json.loads(row) for row in meet(backend.control, verb, json.dumps(mine))]
    if any(row != rows[0] for row in rows):
        raise MismatchError(f"{verb} got other objects on some ranks: {first_difference(rows)}")


def _name(kind: str, label: str) -> str:
    return f"{kind}.{label}" if label else kind


def _parts(store: Store, given: Mapping[str, Mapping[str, Any]]) -> dict[str, Part]:
    """Every object's part by its name. Raises TypeError for one that can't be saved, ValueError for an optimizer without its model."""
    makers: dict[str, Any] = {
        "model": lambda obj, name: store.model(obj),
        "optimizer": lambda obj, name: store.optimizer(obj, _models(given)),
        "scheduler": StatePart, "scaler": StatePart, "data": DataPart,
    }  # fmt: skip
    return {_name(kind, label): makers[kind](obj, _name(kind, label)) for kind in given for label, obj in given[kind].items()}


def _write(backend: Backend, store: Store, path: StrPath, parts: Mapping[str, Part], states: list[str], extra: Any) -> None:
    files: dict[str, Any] = {}
    described = {}
    for name, part in parts.items():
        tensors: dict[str, Any] = {}
        described[name] = {"state": tree.encode(part.state(), "", functools.partial(_take, store, tensors)), "facts": part.facts()}
        if tensors:
            files[f"{name}.safetensors"] = functools.partial(store.write, tensors)
    contents = {
        "unidist": __version__, "framework": backend.framework, "backend": backend.name, "world_size": backend.world.size,
        "num_replicas": backend.num_replicas, "extra": tree.encode(extra, "extra", lambda place, value: None),
        "parts": described, "random": [json.loads(row) for row in states],
    }  # fmt: skip
    folder.write(path, files, contents)


def _take(store: Store, tensors: dict[str, Any], place: str, value: Any) -> tree.Slot | None:
    try:
        signature = store.signature(value)
    except TypeError as error:
        raise TypeError(f"{place}: {error}") from error
    if signature is None:
        return None
    name = place
    while name in tensors:
        name += "'"
    tensors[name] = value
    return tree.Slot(name, *signature)


def _share(backend: Backend, files: dict[str, bytes] | None) -> dict[str, bytes]:
    """Rank 0's files on all ranks, through the engine."""
    sizes = json.loads(backend.control.broadcast("load's files", json.dumps({name: len(data) for name, data in (files or {}).items()})))
    if backend.world.size == 1:
        return files or {}
    return {name: _send(backend, files[name] if files else None, size) for name, size in sizes.items()}


def _send(backend: Backend, data: bytes | None, size: int) -> bytes:
    import numpy

    moved = []
    for begin in range(0, size, _TOGETHER):
        length = min(_TOGETHER, size - begin)
        piece = numpy.zeros(length, numpy.uint8) if data is None else numpy.frombuffer(data, numpy.uint8, length, begin)
        received = backend._broadcast(backend._as_tensor(piece), 0)
        if data is None:
            moved.append(backend._as_leaf(received, piece).tobytes())
    return b"".join(moved) if data is None else data


def _check(backend: Backend, parts: Mapping[str, Part], manifest: Mapping[str, Any]) -> None:
    if manifest["framework"] != backend.framework:
        raise MismatchError(f"the checkpoint is of {manifest['framework']}, but unidist runs {backend.framework}/{backend.name}")
    saved = manifest["parts"]
    for name, part in parts.items():
        if name not in saved:
            raise MismatchError(f"the checkpoint holds no {name!r}; it holds {', '.join(saved) or 'nothing'}")
        part.check(tree.decode(saved[name]["state"], lambda slot: slot), saved[name]["facts"])


def _restore(store: Store, parts: Mapping[str, Part], manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    states = []
    for name, part in parts.items():  # all files are understood before the first object is set
        described = manifest["parts"][name]
        dtypes = {slot.name: slot.dtype for slot in tree.slots(described["state"]).values()}
        tensors = store.read(files[f"{name}.safetensors"], dtypes) if dtypes else {}
        states.append((part, _decoded(described["state"], tensors), described["facts"]))
    for part, state, facts in states:
        part.restore(state, facts)


def _decoded(state: Any, tensors: Mapping[str, Any]) -> Any:
    return tree.decode(state, lambda slot: tensors[slot.name])
