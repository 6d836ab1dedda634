"""Share: what each replica has of a global batch; Window: the batches of one update; both plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from unidist.errors import UnsupportedError


def split_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` consecutive pieces of `total` samples; the first `total % parts` hold one more."""
    small, extra = divmod(total, parts)
    return tuple(small + (part < extra) for part in range(parts))


@dataclass(frozen=True)
class Share:
    """The samples of one global batch by replica, known on every rank without an exchange.

    sizes: samples of each replica of the job; first, local: this process's replicas are first .. first + local - 1;
    last: whether the epoch ends with this batch.
    """

    sizes: tuple[int, ...]
    first: int = 0
    local: int = 1
    last: bool = False
    total: int = field(init=False)
    even: bool = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.sizes))
        object.__setattr__(self, "even", min(self.sizes) == max(self.sizes) > 0)
        object.__setattr__(self, "size", sum(self.local_sizes))

    @property
    def local_sizes(self) -> tuple[int, ...]:
        """Samples of this process's replicas; an empty one among them computes on a borrowed sample."""
        return self.sizes[self.first : self.first + self.local]

    @property
    def index(self) -> int:
        """Index of this process's first replica."""
        return self.first

    @property
    def scale(self) -> float:
        """What this process's mean gradient is multiplied by before a plain mean over equal processes."""
        return self.size * (len(self.sizes) / self.local) / self.total if self.total else 0.0


def check_batchnorm(share: Share) -> None:
    """Raise UnsupportedError where a replica would normalise over one sample; all ranks know it, before anything is computed."""
    if min(share.sizes) > 1 or share.total == len(share.sizes) == 1:
        return
    raise UnsupportedError(
        f"BatchNorm can't normalise a share of one sample, and the batch is split as {share.sizes}: use wrap_model("
        "sync_batchnorm=True), drop_last=True, or another batch size"
    )


@dataclass(frozen=True)
class Drawn:
    """How a drawn batch counts in plain backward passes: by `scale`, exchanged at once or (False) later in its window.

    begins: whether its window does.
    """

    share: Share | None
    scale: float
    exchange: bool
    begins: bool = True


EVEN = Drawn(None, 1.0, True)
HELD = Drawn(None, 1.0, False)


class ShareLog:
    """What was drawn from `wrap_data` since the last forward pass, so that plain calls know what they compute on."""

    def __init__(self) -> None:
        self._drawn: list[Drawn] = []
        self._current = EVEN
        self.last: Share | None = None  # of the batch drawn last, until its pass ends
        self.empty = False  # the current batch is a borrowed sample that does not count
        self.parameter_scale = 1.0  # what plain backward passes multiply the parameters' gradients by

    def draw(self, share: Share | None, scale: float | None = None, exchange: bool = True, begins: bool = True) -> None:
        """Note that the batch with this share was handed to the user."""
        if scale is None:
            scale = share.scale if share is not None else 1.0
        self._drawn.append(Drawn(share, scale, exchange, begins))

    def take(self) -> Share | None:
        """The share that an explicit call (`step`) works on; the passes inside it then count as they are."""
        if self._drawn:
            share = self.seen().share
            self._current = EVEN
            return share
        share, self._current, self.empty = self._current.share, EVEN, False
        return share

    def seen(self) -> Drawn:
        """How a forward pass counts: as the batch last drawn, evenly when none came from `wrap_data`.

        Raises ValueError when several that count differently were drawn since.
        """
        drawn = self._drawn
        if drawn:
            if len(drawn) > 1 and any((d.scale, d.exchange) != (drawn[0].scale, drawn[0].exchange) for d in drawn):
                sizes = [d.share.sizes if d.share is not None else None for d in drawn]
                drawn.clear()
                raise ValueError(
                    f"batches of different shares {sizes} were drawn from wrap_data since the last forward pass, so it "
                    "can't be known which of them the loss is over: say so with unidist.backward(loss, share=data.share)"
                )
            self._current = drawn[-1]
            self.last = self._current.share
            self.empty = self.last is not None and self.last.size == 0
            drawn.clear()
        return self._current

    @property
    def current(self) -> Drawn:
        """How the batch counts that the last forward pass was over; nothing is taken, nothing raised."""
        return self._drawn[-1] if self._drawn else self._current

    def hold(self) -> None:
        """The next passes add to a window that is exchanged later."""
        self._current = HELD

    def clear(self) -> None:
        """Forget what was drawn."""
        self._drawn.clear()
        self._current, self.last, self.empty = EVEN, None, False


class Window:
    """The batches of one update: `k` of them, fewer when the epoch ends.

    Gradients are summed over its batches with `factor` and reach the mean over all samples of the window when what
    was summed is multiplied by `correction` at its end, which is 1 for a window of k equal batches.
    """

    def __init__(self, k: int, num_processes: int) -> None:
        self.k = k
        self._processes = num_processes
        self.count = 0
        self.complete = False
        self._expected = 0.0
        self._total = 0.0

    def add(self, share: Share | None) -> float:
        """Take in the next batch and return its factor; `complete` then tells whether the update follows."""
        if self.complete:
            self.count, self._total, self.complete = 0, 0.0, False
        size, total = (share.size, share.total) if share is not None else (1, self._processes)
        if self.count == 0:
            self._expected = float(self.k * total)
        self.count += 1
        self._total += total
        self.complete = self.count == self.k or (share is not None and share.last)
        return size * self._processes / self._expected if self._expected else 0.0

    @property
    def correction(self) -> float:
        """What the sum over a complete window still has to be multiplied by."""
        return self._expected / self._total if self._total else 0.0
