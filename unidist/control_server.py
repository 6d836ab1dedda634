"""The control plane's TCP server: one daemon thread that moves frames between sockets and the job's `Session`."""

import contextlib
import errno
import secrets
import selectors
import socket
import threading
import time
from typing import Any

from unidist.control_session import Arrival, Reply, Session
from unidist.wire import MAX_FRAME, Message, close_in_children, decode, encode

_HELLO_LIMIT = 4096  # bytes; nothing longer is read from someone who has not shown the token
_HELLO_SECONDS = 10.0
_REPORT_SECONDS = 1.0  # for the launcher to say how a rank ended whose connection broke
_CHUNK = 1 << 18


class _Peer:
    """One connection: what was read and not understood yet, what is still to be written, whose it is."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.since = time.monotonic()
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.session: Session | None = None
        self.rank = -1
        self.main = False


class Server:
    """Serves one job. `generation` None takes every `unidist.init` of the workers, each with a session of its own."""

    def __init__(self, size: int, *, host: str = "127.0.0.1", port: int = 0, token: str = "", generation: int | None = None) -> None:
        """Listens at once; raises OSError when the port is taken. `host` "" is every interface, IPv6 too."""
        self.token = token or secrets.token_hex(16)
        self.size = size
        self._generation = generation
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._sessions: dict[int, Session] = {}
        self._exited: dict[int, str | None] = {}
        self._lock = threading.Condition()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._peers: set[_Peer] = set()
        self._lost: list[tuple[float, Session, int]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="unidist-control", daemon=True)
        close_in_children(self)

    def start(self) -> None:
        """Starts answering; those that connected before wait in the listener's queue."""
        self._thread.start()

    def report_exit(self, rank: int, text: str | None) -> None:
        """The launcher saw `rank` exit: in order when `text` is None, else it failed as `text` says."""
        with self._lock:
            self._exited[rank] = text
            for session in self._sessions.values():
                _mark_exit(session, rank, text)
        self._wake()

    def failures(self) -> dict[int, str]:
        """Failed ranks and what they said, the first failure first."""
        with self._lock:
            return {rank: text for session in self._sessions.values() for rank, text in session.failed.items()}

    def open_failures(self) -> bool:
        """Whether a rank failed and has not left since, as it does when its script caught the error of `unidist.init`."""
        with self._lock:
            return any(not session.left.issuperset(session.failed) for session in self._sessions.values())

    def wait_ended(self, timeout: float) -> bool:
        """Waits until every rank said goodbye, failed or died; False when some have not by then."""
        with self._lock:
            return self._lock.wait_for(self._all_ended, timeout)

    def close(self) -> None:
        """Tells the watchers that the server goes in order, and stops."""
        self._closing = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def close_in_child(self) -> None:
        """Drops a forked child's copies of the sockets, so that the parent's death is seen and its port is free."""
        for peer in self._peers:
            peer.socket.close()
        for own in (self._listener, self._wake_read, self._wake_write):
            own.close()
        self._selector.close()

    def _all_ended(self) -> bool:
        return all(session.gone(rank) for session in self._sessions.values() for rank in session.joined)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    def _run(self) -> None:
        while not self._closing:
            events = self._selector.select(self._patience())
            with self._lock:
                for key, mask in events:
                    self._serve(key, mask)
                self._expire()
                self._lock.notify_all()
        self._shut()

    def _patience(self) -> float | None:
        """Seconds until the next wait ends."""
        ends = [end for session in self._sessions.values() if (end := session.deadline()) is not None]
        ends += [peer.since + _HELLO_SECONDS for peer in self._peers if peer.session is None]
        ends += [when for when, _, _ in self._lost]
        return max(min(ends) - time.monotonic(), 0.0) if ends else None

    def _expire(self) -> None:
        now = time.monotonic()
        for session in self._sessions.values():
            session.expire(now)
        for peer in [peer for peer in self._peers if peer.session is None and peer.since + _HELLO_SECONDS <= now]:
            self._drop(peer)
        for when, session, rank in self._lost:
            if when <= now and not session.gone(rank):
                session.fail(rank, "its process died without an error that Python saw (killed, or crashed)")
        self._lost = [lost for lost in self._lost if lost[0] > now]

    def _serve(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fileobj is self._wake_read:
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(_CHUNK)
        elif key.data in self._peers:
            if mask & selectors.EVENT_WRITE:
                self._flush(key.data)
            if mask & selectors.EVENT_READ:
                self._read(key.data)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = _Peer(connection)
            self._peers.add(peer)
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        peer.incoming += data
        try:
            for message in decode(peer.incoming, MAX_FRAME if peer.session else _HELLO_LIMIT):
                self._handle(peer, message)
        except (ValueError, KeyError, TypeError, RecursionError):
            self._drop(peer)

    def _handle(self, peer: _Peer, message: Message) -> None:
        session, reply = peer.session, self._reply(peer, message.get("id"))
        if session is None:
            self._hello(peer, message, reply)
        elif message["op"] == "gather":
            session.gather(peer.rank, _arrival(message, message["payload"], reply))
        elif message["op"] == "set":
            session.set(message["key"], message["value"])
            reply({})
        elif message["op"] == "get":
            session.get(peer.rank, _arrival(message, "", reply))
        else:
            self._note(session, peer.rank, message, reply)

    def _note(self, session: Session, rank: int, message: Message, reply: Reply) -> None:
        """What a rank tells about itself."""
        if message["op"] == "fail":
            session.fail(rank, message["text"])
        elif message["op"] == "bye":
            session.end(rank)
        elif message["op"] == "inside":
            session.inside[rank] = message["name"]
        elif message["op"] == "outside":
            session.inside.pop(rank, None)
        elif message["op"] == "who":
            reply({"who": {str(other): name for other, name in session.who().items()}})
            return
        reply({})

    def _hello(self, peer: _Peer, message: Message, reply: Reply) -> None:
        """The first frame has to show the token and fit the job; everyone else is dropped or told why not."""
        if not secrets.compare_digest(str(message["token"]), self.token):
            self._drop(peer)
            return
        refusal = self._refusal(message)
        if refusal is not None:
            reply(refusal)
            return
        session = self._session(message["generation"])
        peer.rank, peer.session, peer.main = message["rank"], session, message["kind"] == "main"
        session.joined.add(peer.rank)
        reply({"hello": peer.rank})
        if not peer.main:
            session.watchers[peer.rank] = reply
            for rank, text in session.failed.items():
                if rank != peer.rank:
                    reply({"event": "failed", "rank": rank, "text": text})

    def _refusal(self, message: Message) -> Message | None:
        rank, size, generation = message["rank"], message["size"], message["generation"]
        if self._generation not in (None, generation):
            return {"error": "retry", "text": "an earlier unidist.init of the same job is still ending there"}
        if size != self.size or not 0 <= rank < self.size:
            text = f"rank {rank} says that the job has {size} workers, its server says {self.size}"
            return {"error": "launch", "text": text}
        taken = any(
            peer.session is self._sessions.get(generation) and (peer.rank, peer.main) == (rank, message["kind"] == "main")
            for peer in self._peers
            if peer.session is not None
        )
        return {"error": "taken", "text": f"two processes say that they are rank {rank} of this job"} if taken else None

    def _session(self, generation: int) -> Session:
        if generation not in self._sessions:
            self._sessions[generation] = Session(self.size)
            for rank, text in self._exited.items():
                _mark_exit(self._sessions[generation], rank, text)
        return self._sessions[generation]

    def _reply(self, peer: _Peer, number: Any) -> Reply:
        def reply(message: Message) -> None:
            peer.outgoing += encode(message if number is None else {**message, "id": number})
            self._flush(peer)

        return reply

    def _flush(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        try:
            sent = peer.socket.send(peer.outgoing)
        except BlockingIOError:
            sent = 0
        except OSError:
            peer.outgoing.clear()  # its end is read, and handled, there
            return
        del peer.outgoing[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
        if self._selector.get_key(peer.socket).events != wanted:
            self._selector.modify(peer.socket, wanted, peer)

    def _drop(self, peer: _Peer) -> None:
        """The connection is over; a rank whose main connection ends without a goodbye has died, or its launcher knows more."""
        self._peers.discard(peer)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.session is None:
            return
        if not peer.main:
            peer.session.watchers.pop(peer.rank, None)
        elif not peer.session.gone(peer.rank):
            patience = _REPORT_SECONDS if self._generation is None else 0.0
            self._lost.append((time.monotonic() + patience, peer.session, peer.rank))

    def _shut(self) -> None:
        for session in self._sessions.values():
            for watcher in session.watchers.values():
                watcher({"event": "closing"})
        for peer in self._peers:
            peer.socket.close()
        for own in (self._listener, self._wake_read, self._wake_write):
            own.close()
        self._selector.close()


def _mark_exit(session: Session, rank: int, text: str | None) -> None:
    if text is None:
        session.end(rank)
    elif rank not in session.ended:
        session.fail(rank, text)


def _arrival(message: Message, payload: str, reply: Reply) -> Arrival:
    return Arrival(str(message["name"]), str(payload), float(message["timeout"]), reply)


def _listen(host: str, port: int) -> socket.socket:
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # IPv6 compiled in, but switched off
                raise
    return socket.create_server(("", port), backlog=1024)
