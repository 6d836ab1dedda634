"""What the control server does with a message: who may join, which session it belongs to, who is gone. No sockets."""

import secrets
import time
from dataclasses import dataclass

from unidist.control_session import Arrival, Reply, Session
from unidist.wire import Message

_REPORT_SECONDS = 1.0  # for the launcher to say how a rank ended whose connection broke
_DIED = "its process died without an error that Python saw (killed, or crashed)"


@dataclass(frozen=True)
class Member:
    """A connection that showed the token. A rank's main one carries its requests, its other one the news for its watchdog."""

    session: Session
    generation: int
    rank: int
    main: bool


class Hub:
    """One job. `generation` None takes every `unidist.init` of the workers, each with a session of its own: the launcher's."""

    def __init__(self, size: int, token: str, generation: int | None) -> None:
        self._size = size
        self._token = token
        self._generation = generation
        self._sessions: dict[int, Session] = {}
        self._members: set[tuple[int, int, bool]] = set()
        self._exited: dict[int, str | None] = {}
        self._lost: list[tuple[float, Member]] = []

    def hello(self, message: Message, reply: Reply) -> Member | None:
        """The first message of a connection; None when it does not fit the job. Raises ValueError for a stranger."""
        if not secrets.compare_digest(str(message["token"]), self._token):
            raise ValueError("not the token of this job")
        rank, generation, main = message["rank"], message["generation"], message["kind"] == "main"
        refusal = self._refusal(rank, message["size"], generation, main)
        if refusal is not None:
            reply(refusal)
            return None
        member = Member(self._session(generation), generation, rank, main)
        self._members.add((generation, rank, main))
        reply({"hello": rank})
        self._greet(member, reply)
        return member

    def handle(self, member: Member, message: Message, reply: Reply) -> None:
        """Any later message. Raises KeyError, TypeError or ValueError when it is not one of ours."""
        session, rank, verb = member.session, member.rank, message["op"]
        if verb == "gather":
            session.gather(rank, _arrival(message, message["payload"], reply), _members(message, rank, self._size))
        elif verb == "get":
            session.get(rank, _arrival(message, "", reply))
        elif verb == "who":
            reply({"who": {str(other): name for other, name in session.who().items()}})
        else:
            self._note(session, rank, verb, message)
            reply({})

    def leave(self, member: Member) -> None:
        """A connection is over. Without a goodbye its rank has died; where there is a launcher, it may know more."""
        self._members.discard((member.generation, member.rank, member.main))
        if not member.main:
            member.session.watchers.pop(member.rank, None)
        elif not member.session.gone(member.rank):
            self._lost.append((time.monotonic() + (_REPORT_SECONDS if self._generation is None else 0.0), member))

    def report_exit(self, rank: int, text: str | None) -> None:
        """The launcher saw `rank` exit: in order when `text` is None, else it failed as `text` says."""
        self._exited[rank] = text
        for session in self._sessions.values():
            _mark_exit(session, rank, text)

    def failures(self) -> dict[int, str]:
        """Failed ranks and what they said, the first failure first."""
        return {rank: text for session in self._sessions.values() for rank, text in session.failed.items()}

    def open_failures(self) -> bool:
        """Whether a rank failed and has not left since, as it does when its script caught the error of `unidist.init`."""
        return any(not session.left.issuperset(session.failed) for session in self._sessions.values())

    def all_ended(self) -> bool:
        return all(session.gone(rank) for session in self._sessions.values() for rank in session.joined)

    def deadline(self) -> float | None:
        """When the next wait ends; None when nobody waits."""
        ends = [end for session in self._sessions.values() if (end := session.deadline()) is not None]
        return min([*ends, *(when for when, _ in self._lost)], default=None)

    def expire(self, now: float) -> None:
        """Ends the waits whose time is over."""
        for session in self._sessions.values():
            session.expire(now)
        for when, member in self._lost:
            if when <= now and not member.session.gone(member.rank):
                member.session.fail(member.rank, _DIED)
        self._lost = [lost for lost in self._lost if lost[0] > now]

    def say_closing(self) -> None:
        """Tells the watchdogs that the server goes in order."""
        for session in self._sessions.values():
            for watcher in session.watchers.values():
                watcher({"event": "closing"})

    def _refusal(self, rank: int, size: int, generation: int, main: bool) -> Message | None:
        if self._generation not in (None, generation):
            return {"error": "retry", "text": "an earlier unidist.init of the same job is still ending there"}
        if size != self._size or not 0 <= rank < size:
            return {"error": "launch", "text": f"rank {rank} says that the job has {size} workers, its server says {self._size}"}
        if (generation, rank, main) in self._members:
            return {"error": "taken", "text": f"two processes say that they are rank {rank} of this job"}
        return None

    def _greet(self, member: Member, reply: Reply) -> None:
        member.session.joined.add(member.rank)
        if not member.main:
            member.session.watchers[member.rank] = reply
            for rank, text in member.session.failed.items():
                if rank != member.rank:
                    reply({"event": "failed", "rank": rank, "text": text})

    def _session(self, generation: int) -> Session:
        if generation not in self._sessions:
            self._sessions[generation] = Session(self._size)
            for rank, text in self._exited.items():
                _mark_exit(self._sessions[generation], rank, text)
        return self._sessions[generation]

    @staticmethod
    def _note(session: Session, rank: int, verb: str, message: Message) -> None:
        """What a rank tells, and needs no more than a receipt for."""
        if verb == "set":
            session.set(str(message["key"]), str(message["value"]))
        elif verb == "fail":
            session.fail(rank, str(message["text"]))
        elif verb == "bye":
            session.end(rank)
        elif verb == "inside":
            session.inside[rank] = str(message["name"])
        elif verb == "outside":
            session.inside.pop(rank, None)
        else:
            raise ValueError(f"no such message: {verb!r}")


def _mark_exit(session: Session, rank: int, text: str | None) -> None:
    if text is None:
        session.end(rank)
    elif rank not in session.ended:
        session.fail(rank, text)


def _members(message: Message, rank: int, size: int) -> tuple[int, ...]:
    """The ranks that a gather is among: all, unless it names some."""
    if "ranks" not in message:
        return tuple(range(size))
    members = tuple(map(int, message["ranks"]))
    if rank not in members or not all(0 <= member < size for member in members):
        raise ValueError(f"rank {rank} of {size} came to a gather among {members}")
    return members


def _arrival(message: Message, payload: str, reply: Reply) -> Arrival:
    return Arrival(str(message["name"]), str(payload), float(message["timeout"]), reply)
