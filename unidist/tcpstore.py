"""The few words of torch's TCPStore protocol that a process needs to leave, or wait for, one value in torchrun's store.

A process that holds TensorFlow only can thus meet there. Source: `QueryType` and `validationMagicNumber` in torch's
`TCPStoreBackend.hpp`; integers are in the host's byte order, strings and lists begin with a 64-bit length.
"""

import socket
import struct

_VALIDATE, _SET, _GET, _WAIT = 0, 1, 3, 6
_MAGIC = 0x3C85F7CE
_STOP_WAITING = 0


def put(host: str, port: int, key: str, value: str) -> None:
    """Stores `value`; OSError when the store is not there."""
    with _open(host, port, 10.0) as store:
        store.sendall(bytes([_SET]) + _text(key) + _text(value))
        store.sendall(bytes([_GET]) + _text(key))
        _read_text(store)  # the set has no answer; the get's says that it arrived


def wait(host: str, port: int, key: str, timeout: float) -> str | None:
    """The value, as soon as it is there; None after `timeout` seconds."""
    with _open(host, port, timeout) as store:
        try:
            store.sendall(bytes([_WAIT]) + struct.pack("=Q", 1) + _text(key))
            if _read(store, 1)[0] != _STOP_WAITING:
                return None
            store.sendall(bytes([_GET]) + _text(key))
            return _read_text(store)
        except TimeoutError:
            return None


def _open(host: str, port: int, timeout: float) -> socket.socket:
    store = socket.create_connection((host, port), timeout=timeout)
    store.sendall(bytes([_VALIDATE]) + struct.pack("=I", _MAGIC))
    return store


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("=Q", len(data)) + data


def _read_text(store: socket.socket) -> str:
    (length,) = struct.unpack("=Q", _read(store, 8))
    return _read(store, length).decode()


def _read(store: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = store.recv(length - len(data))
        if not part:
            raise ConnectionResetError("torchrun's store closed the connection")
        data += part
    return data
