"""Frames of the control plane: four bytes of length, then one JSON object; no pickle, so a peer can only send data."""

import json
import os
import select
import socket
import struct
import time
import weakref
from typing import Any, Protocol

Message = dict[str, Any]

_LENGTH = struct.Struct("!I")
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_CHUNK = 1 << 16
_SEND_SECONDS = 30.0
MAX_FRAME = (1 << 32) - 1


class _Closable(Protocol):
    def close_in_child(self) -> None: ...


# A forked child (a DataLoader's worker) inherits the descriptors; while it holds them, nobody sees its parent die.
_inherited: "weakref.WeakSet[_Closable]" = weakref.WeakSet()


def close_in_children(owner: _Closable) -> None:
    """Calls `owner.close_in_child()` in every process forked from here on."""
    _inherited.add(owner)


def _close_inherited() -> None:
    for owner in list(_inherited):
        owner.close_in_child()
    _inherited.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


def encode(message: Message) -> bytes:
    """The frame of `message`."""
    body = _encode(message).encode()
    return _LENGTH.pack(len(body)) + body


def decode(buffer: bytearray, limit: int) -> list[Message]:
    """Takes every complete frame off the front of `buffer`; ValueError for one that is too long or no JSON object."""
    messages: list[Message] = []
    start = 0
    while len(buffer) - start >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer, start)
        if length > limit:
            raise ValueError(f"a frame of {length} bytes, {limit} are allowed here")
        end = start + _LENGTH.size + length
        if len(buffer) < end:
            break
        message = json.loads(buffer[start + _LENGTH.size : end].decode())
        if not isinstance(message, dict):
            raise ValueError(f"a frame that holds {type(message).__name__}, not an object")
        messages.append(message)
        start = end
    del buffer[:start]
    return messages


class Stream:
    """A client's connection: one thread may receive while another sends, and a part that was read survives Ctrl-C."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.host: str = connection.getpeername()[0]
        self._socket = connection
        self._buffer = bytearray()
        self._ready: list[Message] = []
        close_in_children(self)

    def send(self, message: Message) -> None:
        """Raises OSError when the server is gone or does not read."""
        data = memoryview(encode(message))
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, _SEND_SECONDS)

    def receive(self, timeout: float) -> Message:
        """The next message; TimeoutError when none is complete in time, ConnectionError when the server is gone."""
        deadline = time.monotonic() + timeout
        while not self._ready:
            self._wait(select.POLLIN, deadline - time.monotonic())
            data = self._socket.recv(_CHUNK)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._buffer += data
            self._ready = decode(self._buffer, MAX_FRAME)
        return self._ready.pop(0)

    def _wait(self, event: int, seconds: float) -> None:
        poll = select.poll()  # not select(), which can't take the descriptors above 1023 of a busy process
        poll.register(self._socket, event)
        if not poll.poll(max(seconds, 0.0) * 1000):
            raise TimeoutError("the server of the control plane does not answer")

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def close_in_child(self) -> None:
        """Closes a forked child's copy; the parent's connection stays up."""
        self._socket.close()
