"""The control plane's TCP server: one daemon thread that moves frames between the sockets and the job's `Hub`."""

import contextlib
import errno
import secrets
import selectors
import socket
import threading
import time

from unidist.control_hub import Hub, Member
from unidist.control_session import Reply
from unidist.wire import MAX_FRAME, Message, close_in_children, decode, encode

_HELLO_LIMIT = 4096  # bytes; nothing longer is read from someone who has not shown the token
_HELLO_SECONDS = 10.0
_CHUNK = 1 << 18


class _Peer:
    """One connection: what was read and not understood yet, what is still to be written, whose it is."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.until = time.monotonic() + _HELLO_SECONDS
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.member: Member | None = None


class Server:
    """Serves one job; `generation` None serves all that its workers start, one after the other, as the launcher does."""

    def __init__(self, size: int, *, host: str = "127.0.0.1", port: int = 0, token: str = "", generation: int | None = None) -> None:
        """Listens at once; raises OSError when the port is taken. `host` "" is every interface, IPv6 too."""
        self.token = token or secrets.token_hex(16)
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._hub = Hub(size, self.token, generation)
        self._changed = threading.Condition()  # its lock guards the hub, which the launcher's thread asks too
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._peers: set[_Peer] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="unidist-control", daemon=True)
        close_in_children(self)

    def start(self) -> None:
        """Starts answering; those that connected before wait in the listener's queue."""
        self._thread.start()

    def report_exit(self, rank: int, text: str | None) -> None:
        """The launcher saw `rank` exit: in order when `text` is None, else it failed as `text` says."""
        with self._changed:
            self._hub.report_exit(rank, text)
        self._wake()

    def failures(self) -> dict[int, str]:
        """Failed ranks and what they said, the first failure first."""
        with self._changed:
            return self._hub.failures()

    def open_failures(self) -> bool:
        """Whether a rank failed and has not left in order since."""
        with self._changed:
            return self._hub.open_failures()

    def wait_ended(self, timeout: float) -> bool:
        """Waits until every rank said goodbye, failed or died; False when some have not by then."""
        with self._changed:
            return self._changed.wait_for(self._hub.all_ended, timeout)

    def close(self) -> None:
        """Tells the watchdogs that the server goes in order, and stops."""
        self._closing = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join(2.0)
        else:
            self.close_in_child()

    def close_in_child(self) -> None:
        """Closes this process's sockets; a forked child's copies would hide the parent's death and hold its port."""
        for peer in self._peers:
            peer.socket.close()
        for own in (self._listener, self._wake_read, self._wake_write):
            own.close()
        self._selector.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    def _run(self) -> None:
        seconds: float | None = None
        while not self._closing:
            events = self._selector.select(seconds)
            with self._changed:
                for key, mask in events:
                    self._serve(key, mask)
                seconds = self._expire(time.monotonic())
                self._changed.notify_all()
        self._hub.say_closing()
        self.close_in_child()

    def _expire(self, now: float) -> float | None:
        """Ends the waits whose time is over; the seconds until the next one is, None without any."""
        self._hub.expire(now)
        silent = [peer for peer in self._peers if peer.member is None]
        for peer in silent:
            if peer.until <= now:
                self._drop(peer)
        ends = [peer.until for peer in silent if peer.until > now]
        end = min(filter(None, [self._hub.deadline(), *ends]), default=None)
        return None if end is None else max(end - time.monotonic(), 0.0)

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
            for message in decode(peer.incoming, MAX_FRAME if peer.member else _HELLO_LIMIT):
                self._handle(peer, message)
        except (ValueError, KeyError, TypeError, RecursionError):
            self._drop(peer)

    def _handle(self, peer: _Peer, message: Message) -> None:
        reply = self._reply(peer, message.get("id"))
        if peer.member is None:
            peer.member = self._hub.hello(message, reply)
        else:
            self._hub.handle(peer.member, message, reply)

    def _reply(self, peer: _Peer, number: object) -> Reply:
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
        if peer in self._peers:
            self._peers.discard(peer)
            self._selector.unregister(peer.socket)
            peer.socket.close()
            if peer.member is not None:
                self._hub.leave(peer.member)


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
