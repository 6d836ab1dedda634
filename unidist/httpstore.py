"""One value in horovodrun's key-value store, in plain HTTP/1.0: `http.client` costs 25 ms to import."""

import socket

_SECONDS = 5.0


def put(host: str, port: int, path: str, value: str) -> None:
    """Stores `value` under `path`, which is "/scope/key"; OSError when the store does not take it."""
    body = value.encode()
    status, _ = _request(host, port, f"PUT {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    if status != 200:
        raise OSError(f"horovodrun's store at {host}:{port} answered {status} to PUT {path}")


def get(host: str, port: int, path: str) -> str | None:
    """The value; None when it is not there yet."""
    status, body = _request(host, port, f"GET {path} HTTP/1.0\r\n\r\n".encode())
    return body.decode() if status == 200 else None


def _request(host: str, port: int, request: bytes) -> tuple[int, bytes]:
    """Status and body; under HTTP/1.0 the answer ends with the connection."""
    with socket.create_connection((host, port), timeout=_SECONDS) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(4096):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(maxsplit=2)[1]), body
