"""A rank's way to the control server: rank 0 starts it, everyone looks its address up and greets it until the deadline."""

import socket
import time

from unidist.control_server import Server
from unidist.errors import CollectiveTimeoutError, LaunchError
from unidist.meeting import Meeting
from unidist.wire import Message, Stream

_RETRY = 0.05
_PATIENCE = 3.0  # seconds for one of the server's names to answer; it may have names that nobody can reach


class _NotYet(Exception):
    """What answers at the address is an earlier job, or none of ours: look again."""


def serve(size: int, place: Meeting, generation: int) -> Server:
    """Rank 0's server, listening and published. Raises `LaunchError` when the port is taken."""
    try:
        server = Server(size, host=place.bind, port=place.port, token=place.token, generation=generation)
    except OSError as error:
        reason = error.strerror or str(error)
        raise LaunchError(f"rank 0 can't listen on port {place.port}, which {place.where} names: {reason}; choose a free port") from error
    server.start()
    place.publish(f"{','.join(place.hosts)}:{server.port}/{server.token}")
    return server


def reach(place: Meeting, server: Server | None, hello: Message, deadline: float) -> tuple[str, Stream]:
    """The server's address and a connection to it; waits for rank 0 until the deadline."""
    if server is not None:
        own = f"{place.bind or '127.0.0.1'}:{server.port}/{server.token}"
        return own, open_stream(own, hello, deadline)
    start, problem = time.monotonic(), ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            address = place.lookup(left)
            if address is not None:
                return address, open_stream(address, hello, deadline)
        except (OSError, ValueError, _NotYet) as error:
            problem = f" (the last try: {error})"
        time.sleep(_RETRY)
    waited = time.monotonic() - start
    raise CollectiveTimeoutError(
        f"rank {hello['rank']} waited {waited:.0f} s in unidist.init for rank 0, looking at {place.where}{problem}"
    )


def open_stream(address: str, hello: Message, deadline: float) -> Stream:
    """A connection whose hello was accepted; tries the address's hosts in order."""
    names, _, rest = address.rpartition(":")
    port, _, token = rest.partition("/")
    problem: OSError | None = None
    for host in names.split(","):
        left = min(max(deadline - time.monotonic(), 0.01), _PATIENCE)
        try:
            return _greet(Stream(socket.create_connection((host, int(port)), timeout=left)), {**hello, "token": token}, left)
        except OSError as error:
            problem = error
    raise problem or OSError(f"no host in {address!r}")


def _greet(stream: Stream, hello: Message, timeout: float) -> Stream:
    try:
        stream.send(hello)
        answer = stream.receive(timeout)
    except (OSError, ValueError):
        stream.close()
        raise
    if "hello" in answer:
        return stream
    stream.close()
    if answer.get("error") == "launch":
        raise LaunchError(answer["text"])
    raise _NotYet(answer.get("text", "something that isn't unidist answered"))
