"""What the control server knows of one job: who came where, who failed, who ended, what was stored. No sockets."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from unidist.wire import Message

Reply = Callable[[Message], None]
Members = tuple[int, ...]  # the ranks that a gather is among
Place = tuple[Members, int]  # the n-th gather among them


@dataclass
class Arrival:
    """One rank that waits in a gather or for a key."""

    name: str
    payload: str
    timeout: float
    reply: Reply
    since: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        return self.since + self.timeout


@dataclass
class Round:
    """The ranks that came to one gather among `members`, and when the first of them gives up."""

    members: tuple[int, ...]
    came: dict[int, Arrival] = field(default_factory=dict)
    first: Arrival | None = None

    def add(self, rank: int, arrival: Arrival) -> None:
        self.came[rank] = arrival
        if self.first is None or arrival.deadline < self.first.deadline:
            self.first = arrival


class Session:
    """The n-th gather of every rank among the same ranks is one round, whatever it is called; it ends complete or given up, for all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failed: dict[int, str] = {}
        self.ended: set[int] = set()
        self.joined: set[int] = set()
        self.left: set[int] = set()
        self.inside: dict[int, str] = {}
        self.watchers: dict[int, Reply] = {}
        self._rounds: dict[Place, Round] = {}
        self._position: dict[Members, dict[int, int]] = {}
        self._given_up: dict[Place, Message] = {}
        self._values: dict[str, str] = {}
        self._getters: dict[int, Arrival] = {}

    def gather(self, rank: int, arrival: Arrival, members: Members) -> None:
        """`rank` came to its next round among `members`."""
        position = self._position.setdefault(members, dict.fromkeys(members, 0))
        place = (members, position[rank])
        position[rank] += 1
        late = self._given_up.get(place)
        if late is not None:
            arrival.reply(_late(rank, arrival.name, late))
            self._forget()
            return
        this = self._rounds.setdefault(place, Round(members))
        this.add(rank, arrival)
        if len(this.came) == len(members):
            self._complete(place)
            return
        gone = [other for other in (*self.failed, *(self.ended & set(members))) if other not in this.came]
        if gone:
            self._give_up(place, self._gone(gone[0], arrival.name))

    def fail(self, rank: int, text: str) -> None:
        """`rank` failed or died: those that wait for it learn it now, later ones when they come. The first text stays."""
        if rank in self.failed:
            return
        self.failed[rank] = text
        self.inside.pop(rank, None)
        for other, watcher in self.watchers.items():
            if other != rank:
                watcher({"event": "failed", "rank": rank, "text": text})
        self._abandon(rank)
        waiting, self._getters = self._getters, {}
        for getter in waiting.values():
            getter.reply(self._gone(rank, f"get({getter.name!r})"))

    def end(self, rank: int) -> None:
        """`rank` says goodbye; it will come to no round any more. A failure that it posted before stays one."""
        self.left.add(rank)
        if rank not in self.failed and rank not in self.ended:
            self.ended.add(rank)
            self.inside.pop(rank, None)
            self._abandon(rank)

    def gone(self, rank: int) -> bool:
        return rank in self.failed or rank in self.ended

    def set(self, key: str, value: str) -> None:
        self._values[key] = value
        for rank, getter in list(self._getters.items()):
            if getter.name == key:
                self._getters.pop(rank).reply({"value": value})

    def get(self, rank: int, getter: Arrival) -> None:
        if getter.name in self._values:
            getter.reply({"value": self._values[getter.name]})
        elif self.failed:
            getter.reply(self._gone(next(iter(self.failed)), f"get({getter.name!r})"))
        else:
            self._getters[rank] = getter

    def deadline(self) -> float | None:
        """When the next wait ends; None when nobody waits."""
        ends = [this.first.deadline for this in self._rounds.values() if this.first is not None]
        ends += [getter.deadline for getter in self._getters.values()]
        return min(ends, default=None)

    def expire(self, now: float) -> None:
        """Ends the waits whose time is over."""
        for place, this in list(self._rounds.items()):
            if this.first is not None and this.first.deadline <= now:
                self._give_up(place, self._timed_out(this, this.first))
        for rank, getter in list(self._getters.items()):
            if getter.deadline <= now:
                text = f"no rank set the key {getter.name!r} within {getter.timeout:.3g} s"
                self._getters.pop(rank).reply({"error": "timeout", "text": text})

    def who(self) -> dict[int, str]:
        """The ranks that are known to wait, and in what: here, or as their watchdogs told."""
        here = {rank: arrival.name for this in self._rounds.values() for rank, arrival in this.came.items()}
        getting = {rank: f"get({getter.name!r})" for rank, getter in self._getters.items()}
        return {**self.inside, **here, **getting}

    def _complete(self, place: Place) -> None:
        came = self._rounds.pop(place).came
        names = {rank: came[rank].name for rank in sorted(came)}
        if len(set(names.values())) > 1:
            answer: Message = {"error": "mismatch", "text": f"the ranks called different operations: {calls(names)}"}
        else:
            answer = {"values": [came[rank].payload for rank in sorted(came)]}
        for rank in sorted(came, reverse=True):  # rank 0 may be in the server's process: once awake, it competes for the GIL
            came[rank].reply(answer)

    def _abandon(self, rank: int) -> None:
        for place, this in list(self._rounds.items()):
            if rank not in this.came and (rank in this.members or rank in self.failed):
                self._give_up(place, self._gone(rank, next(iter(this.came.values())).name))
        self._forget()

    def _give_up(self, place: Place, answer: Message) -> None:
        came = self._rounds.pop(place).came
        self._given_up[place] = answer
        for arrival in came.values():
            arrival.reply(answer)
        self._forget()

    def _forget(self) -> None:
        """Drops the given-up rounds that no living rank can still come to."""
        if self._given_up:
            living = {m: [n for rank, n in position.items() if not self.gone(rank)] for m, position in self._position.items()}
            oldest = {members: min(numbers, default=0) for members, numbers in living.items()}
            self._given_up = {place: answer for place, answer in self._given_up.items() if place[1] >= oldest[place[0]]}

    def _gone(self, rank: int, name: str) -> Message:
        if rank in self.failed:
            text = self.failed[rank]
            return {"error": "failed", "text": f"rank {rank} failed while {name} waited for it: {text}", "rank": rank, "reason": text}
        return {"error": "failed", "text": f"rank {rank} ended, without an error, before it came to {name}"}

    def _timed_out(self, this: Round, over: Arrival) -> Message:
        came, waiting = this.came, self.who()
        missing = [rank for rank in this.members if rank not in came]
        inside = {rank: waiting[rank] for rank in missing if rank in waiting}
        where = f" ({', '.join(f'rank {rank} is in {name}' for rank, name in inside.items())})" if inside else ""
        text = f"{over.name} was not complete after {over.timeout:.3g} s: {ranks(came)} came, {ranks(missing)} did not{where}"
        return {"error": "timeout", "text": text}


def ranks(numbers: Iterable[int]) -> str:
    """`rank 1` or `ranks 0, 2`; past twelve only the first ten and how many more."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 12:
        return f"ranks {', '.join(map(str, ordered[:10]))} and {len(ordered) - 10} more"
    return f"ranks {', '.join(map(str, ordered))}"


def calls(names: dict[int, str]) -> str:
    """`rank 0 called all_reduce, rank 1 broadcast`, with the ranks of one name together."""
    by_name: dict[str, list[int]] = {}
    for rank, name in names.items():
        by_name.setdefault(name, []).append(rank)
    (first, numbers), *others = by_name.items()
    return ", ".join([f"{ranks(numbers)} called {first}", *(f"{ranks(them)} {name}" for name, them in others)])


def _late(rank: int, name: str, answer: Message) -> Message:
    """What a rank gets that comes to a round which the others have left."""
    if answer["error"] == "failed":
        return answer
    return {**answer, "text": f"rank {rank} came to {name} when the others had given up: {answer['text']}"}
