"""The control plane: rounds of short texts between the ranks, a small store, an error board; nothing of it per step.

Standard library only, so that it works before, and without, any framework. Rank 0 (or `unidist run`) serves it over
TCP; `meeting.py` finds the address by launcher, `watchdog.py` ends a process whose wait can't end otherwise.
"""

import atexit
import contextlib
import itertools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from unidist import control_client, meeting
from unidist.control_server import Server
from unidist.errors import CollectiveTimeoutError, LaunchError, MismatchError, NotInitializedError, PeerFailedError
from unidist.watchdog import Spot, Waiting, Watchdog
from unidist.wire import Message, Stream
from unidist.world import World

_ERRORS: dict[str, type[Exception]] = {
    "timeout": CollectiveTimeoutError,
    "mismatch": MismatchError,
    "failed": PeerFailedError,
    "launch": LaunchError,
    "taken": LaunchError,
}
_SLACK = 10.0  # seconds that the server may be late with its own answer to a timeout
_GOODBYE = 5.0  # seconds that rank 0 stays for the others
_TRACEBACK_LINES = 12

# Every `unidist.init` of a process meets under a number of its own, so that none reads an earlier one's address.
_generations = itertools.count()


def _nothing() -> None: ...


class Control:
    """This rank's end of the control plane. A job of one answers itself at once, without a server."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.hosts: list[str] = [socket.gethostname()] * size
        self.rank_0_host = "127.0.0.1"  # the address at which this rank reached rank 0's machine
        self._pid = os.getpid()
        self._stream: Stream | None = None
        self._server: Server | None = None
        self._watchdog: Watchdog | None = None
        self._spot = Spot()
        self._values: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        self._closed = False
        self._unhook: Callable[[], None] = _nothing

    @classmethod
    def alone(cls) -> "Control":
        """The control plane of a job of one process."""
        return cls(0, 1, 0.0)

    def gather(self, name: str, payload: str, *, timeout: float | None = None, ranks: Sequence[int] | None = None) -> list[str]:
        """All ranks' payloads, by rank; every rank must call it, or each of `ranks` (in ascending order, this one among them).

        The n-th gather of each rank among the same ranks meets the n-th of the others. Raises on every rank that came:
        `MismatchError` when the names differ, `CollectiveTimeoutError` when a rank does not come in `timeout` seconds (default:
        that of `connect`), `PeerFailedError` as soon as one can't come any more. The next gather works again.
        """
        if self.size == 1 or (ranks is not None and len(ranks) == 1):
            return [payload]
        limit = self.timeout if timeout is None else timeout
        message: Message = {"op": "gather", "name": name, "payload": payload, "timeout": limit}
        if ranks is not None and len(ranks) < self.size:
            message["ranks"] = list(ranks)
        answer = self._ask(message, limit)
        return [str(value) for value in answer["values"]]

    def broadcast(self, name: str, payload: str | None, root: int = 0) -> str:
        """Rank `root`'s payload on every rank; every rank must call it, and it fails as `gather` does."""
        if self.rank == root and payload is None:
            raise TypeError(f"rank {root} is the root of {name}, so its payload has to be a string, not None")
        mine = payload if self.rank == root and payload is not None else ""
        return self.gather(name, mine)[root]

    def set(self, key: str, value: str) -> None:
        """Stores `value` for every rank."""
        if self.size == 1:
            self._values[key] = value
        else:
            self._ask({"op": "set", "key": key, "value": value}, self.timeout)

    def get(self, key: str, timeout: float) -> str:
        """The value that some rank stored, as soon as it is there; `CollectiveTimeoutError` after `timeout` seconds."""
        if self.size > 1:
            return str(self._ask({"op": "get", "name": key, "timeout": timeout}, timeout)["value"])
        if key not in self._values:
            raise CollectiveTimeoutError(f"nobody set the key {key!r}, and in a job of one nobody else will")
        return self._values[key]

    def fail(self, text: str) -> None:
        """Posts this rank's error. It is final: the others raise `PeerFailedError` and the job ends."""
        if self._stream is None or self._closed or self._pid != os.getpid():
            return
        with contextlib.suppress(OSError):
            self._send(self._stream, {"op": "fail", "text": text})
        if self._watchdog is not None:
            self._watchdog.failed_here(text)

    def failures(self) -> dict[int, str]:
        """The other ranks that failed, with their texts, as far as this process has heard; no round trip."""
        return {} if self._watchdog is None else dict(self._watchdog.failures)

    def waiting(self, operation: str, timeout: float | None = None) -> Waiting:
        """A context for an engine call that can't be interrupted: the watchdog bounds it, nothing is sent."""
        return Waiting(self._spot, operation, self.timeout if timeout is None else timeout)

    def close(self) -> None:
        """Ends this rank's part in order; may be called twice. Rank 0 stays for the others for at most 5 s."""
        self._close(stop_watching=True)

    def _close(self, stop_watching: bool) -> None:
        if self._closed or self._pid != os.getpid():
            return
        if self._watchdog is not None and stop_watching:
            self._watchdog.stop()
        if self._stream is not None:
            with contextlib.suppress(OSError):  # no answer is awaited: another thread may still wait for one of its own
                self._send(self._stream, {"op": "bye"})
            self._stream.close()
        self._closed = True
        self._unhook()
        atexit.unregister(self._at_exit)
        if self._server is not None:
            self._server.wait_ended(_GOODBYE)
            self._server.close()

    def _at_exit(self) -> None:
        """The end of the script is an end in order; after a failure the watchdog still guards the engines' own exits."""
        self._close(stop_watching=self._watchdog is None or self._watchdog.reason is None)

    def _send(self, stream: Stream, message: Message) -> None:
        with self._sending:
            stream.send(message)

    def _ask(self, message: Message, timeout: float) -> Message:
        """One request and its answer; answers to requests that were given up (Ctrl-C) are passed over."""
        if self._stream is None or self._closed or self._pid != os.getpid():
            raise NotInitializedError(f"the control plane of rank {self.rank} is closed, or belongs to the parent of this process")
        name = str(message.get("name", message["op"]))
        with self._asking:
            number = next(self._numbers)
            deadline = time.monotonic() + timeout + _SLACK
            try:
                self._send(self._stream, {**message, "id": number})
                answer: Message = {}
                while answer.get("id") != number:
                    answer = self._stream.receive(deadline - time.monotonic())
            except TimeoutError as error:
                raise CollectiveTimeoutError(f"the server of the control plane did not answer {name} in time") from error
            except OSError as error:
                raise PeerFailedError(self._server_gone(name)) from error
        if "error" in answer:
            if "rank" in answer and self._watchdog is not None:
                self._watchdog.failures.setdefault(answer["rank"], answer["reason"])
            raise _ERRORS[answer["error"]](answer["text"])
        return answer

    def _server_gone(self, name: str) -> str:
        known = next(iter(self.failures().items()), None)
        if known is not None:
            return f"rank {known[0]} failed while {name} waited for it: {known[1]}"
        return f"the process that serves the control plane was gone when rank {self.rank} came to {name}"


def connect(
    world: World,
    environ: Mapping[str, str],
    timeout: float,
    *,
    meet: Callable[[str | None], str] | None = None,
    grace: float = 5.0,
) -> Control:
    """Joins the job's ranks; every rank must call it, equally often.

    `meet`: how an existing process group passes rank 0's address on; rank 0 calls it with the address, others with
    None. `grace`: seconds that an engine call may go on after another rank failed. Raises `CollectiveTimeoutError`
    naming the ranks that did not come in `timeout` seconds, `LaunchError` when there is no way to meet.
    """
    if world.size == 1:
        return Control.alone()
    deadline = time.monotonic() + timeout
    generation = next(_generations)
    place = meeting.find(world, environ, generation, meet)
    control = Control(world.rank, world.size, timeout)
    try:
        if world.rank == 0 and place.served_by_rank_0:
            control._server = control_client.serve(world.size, place, generation)
        _join(control, place, generation, deadline, grace)
    except BaseException:
        control.close()
        raise
    finally:
        place.forget()
    return control


def _join(control: Control, place: "meeting.Meeting", generation: int, deadline: float, grace: float) -> None:
    """Opens both connections and waits for all ranks."""
    hello = {"rank": control.rank, "size": control.size, "generation": generation}
    address, control._stream = control_client.reach(place, control._server, {**hello, "kind": "main"}, deadline)
    control.rank_0_host = control._stream.host
    watching = control_client.open_stream(address, {**hello, "kind": "watch"}, deadline)
    server = "rank 0" if place.served_by_rank_0 else "unidist run"
    control._watchdog = Watchdog(watching, control._spot, control.rank, control.size, grace, server)
    control._watchdog.start()
    atexit.register(control._at_exit)
    control.hosts = control.gather("unidist.init", socket.gethostname(), timeout=max(deadline - time.monotonic(), 0.0))


def report_uncaught(control: Control) -> None:
    """Posts an exception that ends this process to the other ranks, then does what `sys.excepthook` did; until `close`."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        lines = "".join(traceback.format_exception(kind, error, trace)).rstrip().splitlines()
        control.fail("\n".join(lines[-_TRACEBACK_LINES:]))
        return previous(kind, error, trace)

    def unhook() -> None:
        if sys.excepthook is hook:
            sys.excepthook = previous

    sys.excepthook = hook
    control._unhook = unhook
