"""Context: the job as this process sees it; `init` builds the current one, the only state of the package."""

from __future__ import annotations

import atexit
import json
import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from unidist import frameworks, registry
from unidist.base import Backend, Settings
from unidist.errors import MismatchError, NotInitializedError, UnidistError, UnknownBackendError, UnsupportedError
from unidist.version import __version__

if TYPE_CHECKING:
    from unidist.control import Control
    from unidist.world import World

_current: Context | None = None


class Context:
    """What `init` returns: the world, the backend, and the engine's own objects; also a context manager that shuts down."""

    def __init__(self, backend: Backend, request: dict[str, Any]) -> None:
        self._backend = backend
        self._request = request

    @property
    def world(self) -> World:
        """This process among the processes of the job."""
        return self._backend.world

    @property
    def control(self) -> Control:
        """The control plane."""
        return self._backend.control

    @property
    def backend(self) -> str:
        """The backend's name, such as "ddp"."""
        return self._backend.name

    @property
    def framework(self) -> str:
        """ "torch" or "tensorflow"."""
        return self._backend.framework

    @property
    def device(self) -> Any:
        """The framework's device of this process."""
        return self._backend.device

    def __getattr__(self, name: str) -> Any:
        """The engine's own objects: `process_group`, `strategy`, `device_mesh`, where the engine has them."""
        if name.startswith("_"):
            raise AttributeError(name)
        engine = self._backend._engine()
        if name in engine:
            return engine[name]
        raise AttributeError(f"{self._backend.framework}/{self._backend.name} has no {name!r}; it has {sorted(engine)}")

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt)):
            self.control.fail(f"{type(error).__name__}: {error}")
        shutdown()


def current() -> Context:
    """The context of this process.

    Raises NotInitializedError before `init` and after `shutdown`.
    """
    if _current is None:
        raise NotInitializedError("call unidist.init() first; there is no context before it and after unidist.shutdown()")
    return _current


def current_backend() -> Backend:
    """The backend of the current context. Raises NotInitializedError."""
    return current()._backend


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    return _current is not None


def init(
    backend: str | None = None,
    *,
    framework: str | None = None,
    timeout: float = 600.0,
    check: bool = True,
    seed: int | None = None,
    num_devices: int | None = None,
    **options: Any,
) -> Context:
    """Join the job: every process calls it once, before models are built.

    backend: "ddp", "mirrored", "horovod", "dataparallel", "local", or None for what the launcher was told, else for one
    process and one device "local", for several "ddp" (torch) or "mirrored" (tensorflow). framework: "torch" or "tensorflow";
    None for what the launcher was told, what the backend implies, the one imported, the one installed. timeout: seconds
    after which any wait for other ranks ends with an error. check: compare names, shapes and dtypes across ranks before data
    moves. seed: the same initial weights, another random stream for each replica, the order of the data. num_devices: devices
    of this process for backends that drive several ("mirrored"). options: go to the engine untouched. What `unidist run` was told
    wins. Twice with the same arguments is fine.

    Raises UnknownBackendError, MissingDependencyError, FrameworkMismatchError, LaunchError (variables, ports, devices),
    MismatchError when ranks were told different things, CollectiveTimeoutError when a rank does not come, RuntimeError
    when called again with other arguments.
    """
    global _current
    request = {"backend": backend, "framework": framework, "timeout": timeout, "check": check, "seed": seed,
               "num_devices": num_devices, **options}  # fmt: skip
    if _current is not None:
        if _current._request != request:
            raise RuntimeError(
                f"unidist was initialised with {_told(_current._request)}, now with {_told(request)}; call unidist.shutdown() before"
            )
        return _current
    timeout = float(os.environ.get("UNIDIST_TRAIN_TIMEOUT") or timeout)
    if not timeout > 0:
        raise ValueError(f"timeout is a number of seconds above 0, not {timeout!r}")
    told = _launcher_num_devices() if num_devices is None else num_devices
    settings = Settings(float(timeout), bool(check), seed, told, options)
    _current = Context(_start(_choose(backend, framework), settings), request)
    return _current


def shutdown() -> None:
    """Leave the job: ends what `init` started, nothing that it adopted. Without `init`, or twice, it does nothing.

    Every rank should call it or end; waits at most a few seconds for the others.
    """
    global _current
    if _current is None:
        return
    backend, _current = _current._backend, None
    atexit.unregister(shutdown)
    try:
        backend._stop()
    finally:
        backend.control.close()


def _told(request: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in request.items() if value is not None)


def _launcher_num_devices() -> int | None:
    text = os.environ.get("UNIDIST_TRAIN_NUM_DEVICES")
    return int(text) if text else None


def _choose(backend: str | None, framework: str | None) -> tuple[str | None, str]:
    """(backend or None for the framework's own, framework) from the launcher, the arguments, and what is there."""
    backend = _prefer_launcher("UNIDIST_TRAIN_BACKEND", "backend", backend)
    framework = _prefer_launcher("UNIDIST_TRAIN_FRAMEWORK", "framework", framework)
    name = None if backend in (None, "auto") else backend
    if framework is not None:
        framework = registry.framework_name(framework)
    if name is not None and framework is None:
        owners = list(dict.fromkeys(entry.framework for entry in registry.candidates(name)))
        framework = owners[0] if len(owners) == 1 else _present(owners)
    elif name is not None:
        registry.find(str(framework), name)
    return name, framework or _present(list(frameworks.FRAMEWORKS))


def _prefer_launcher(variable: str, what: str, argument: str | None) -> str | None:
    told = os.environ.get(variable) or None
    if told is not None and argument is not None and told != argument and os.environ.get("UNIDIST_TRAIN_RANK", "0") == "0":
        print(f"unidist: {what} {told!r} from unidist run, in place of init's {argument!r}", file=sys.stderr)
    return told or argument


def _present(allowed: list[str]) -> str:
    """The one framework that is imported, else the one installed, among those allowed."""
    backend = frameworks.keras_backend()
    if backend is not None and backend not in frameworks.FRAMEWORKS:
        raise UnknownBackendError(f"Keras runs on {backend!r}; set KERAS_BACKEND to torch or tensorflow before it is imported")
    for found in (frameworks.imported(), frameworks.installed()):
        choice = [name for name in found if name in allowed]
        if len(choice) == 1:
            return choice[0]
        if choice:
            break
    from unidist.errors import MissingDependencyError

    if not frameworks.installed():
        raise MissingDependencyError(
            "neither torch nor tensorflow is installed; pip install 'unidist-train[torch]' or 'unidist-train[tensorflow]'"
        )
    raise UnknownBackendError(
        f"it can't be told which framework is meant ({' and '.join(allowed)} are both there): import the one you use before "
        "unidist.init, or say framework='torch' or framework='tensorflow', or run with unidist run --framework"
    )


def _start(choice: tuple[str | None, str], settings: Settings) -> Backend:
    """The started backend; what goes wrong on one rank is told to the others."""
    from unidist.control import connect, report_uncaught
    from unidist.world import read_world, with_hosts

    name, framework = choice
    world = read_world(os.environ)
    if name is None and world.launcher == "horovodrun":
        name = "horovod"
    cls = registry.find(framework, name or _several(framework)).load()
    adopted = cls._adopted()
    world = adopted or world
    if name is None and world.size == 1 and not _has_devices(framework, settings):
        cls = registry.find(framework, "local").load()
    if world.size > 1 and "processes" not in cls.abilities:
        raise UnsupportedError(_one_process_only(cls, world))
    control = connect(world, os.environ, settings.timeout, meet=cls._meet if adopted else None)
    try:
        _agree(control, cls, settings)
        world = with_hosts(world, control.hosts)
        backend = cls(world, control, settings)
        backend._start()
        if settings.seed is not None:  # after the start, which may draw numbers of its own
            backend._seed(settings.seed)
    except BaseException as error:
        control.fail(f"{type(error).__name__}: {error}")
        control.close()
        raise
    report_uncaught(control)
    atexit.register(shutdown)
    _announce(backend)
    return backend


def _several(framework: str) -> str:
    """A framework's own backend for several devices."""
    return "ddp" if framework == "torch" else "mirrored"


def _has_devices(framework: str, settings: Settings) -> bool:
    """Whether one process of the framework drives several devices by itself."""
    from unidist.launchers.gpus import num_visible_gpus

    return framework == "tensorflow" and (settings.num_devices or num_visible_gpus()) > 1


def _one_process_only(cls: type[Backend], world: World) -> str:
    others = [e.name for e in registry.entries() if e.framework == cls.framework and not e.alone]
    if world.launcher == "torchrun" and cls.framework == "tensorflow":
        return (
            f"torchrun started {world.size} processes, but the framework here is tensorflow; with Keras set KERAS_BACKEND=torch before it "
            "is imported, or use backend='mirrored'"
        )
    return (
        f"backend {cls.name!r} of {cls.framework} drives all its devices from one process, but {world.launcher} started "
        f"{world.size}; start one, or use {' or '.join(map(repr, others))}"
    )


def _agree(control: Control, cls: type[Backend], settings: Settings) -> None:
    """All ranks were told the same. Raises MismatchError on all of them otherwise."""
    mine = {"unidist": __version__, "backend": f"{cls.framework}/{cls.name}", "timeout": settings.timeout,
            "check": settings.check, "seed": settings.seed, "options": sorted(map(str, settings.options))}  # fmt: skip
    rows = [json.loads(row) for row in control.gather("init", json.dumps(mine))]
    for key in mine:
        values = [row[key] for row in rows]
        if any(value != values[0] for value in values):
            raise MismatchError(f"unidist.init was told a different {key} on each rank: {values}")


def _announce(backend: Backend) -> None:
    """One line on rank 0's stderr that says what the job does."""
    world = backend.world
    if world.rank != 0 or os.environ.get("UNIDIST_TRAIN_QUIET") == "1":
        return
    workers = f"{world.size} worker{'s' if world.size > 1 else ''} on {world.num_nodes} host{'s' if world.num_nodes > 1 else ''}"
    replicas = f", {backend.num_replicas} replicas" if backend.num_replicas != world.size else ""
    print(
        f"unidist {__version__} | {backend.framework}/{backend.name} | {workers}{replicas} ({backend._hardware()}) | started by {world.launcher}",  # noqa: E501
        file=sys.stderr, flush=True,
    )  # fmt: skip


def raise_everywhere(error: UnidistError) -> None:
    """Post an error of this rank to the board, so that waiting ranks hear of it, and raise it."""
    if _current is not None:
        _current.control.fail(f"{type(error).__name__}: {error}")
    raise error
