"""Where the workers' output goes: rank 0 has the terminal, the others a file each, or all of it comes with its rank in front."""

import os
import selectors
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

_TAIL_LINES = 20
_TAIL_BYTES = 1 << 16
_CHUNK = 1 << 16


@dataclass
class Pipe:
    """One stream of one worker when everything is shown."""

    rank: int
    source: int
    target: BinaryIO
    copy: BinaryIO | None
    rest: bytes = b""


@dataclass
class Output:
    """With `tee` every line of every rank is shown, and `keep` copies it to a file of `directory` for each rank.

    Without it each rank above 0 writes to its file there. The pipes are read when `selector` says so.
    """

    directory: Path
    tee: bool
    keep: bool
    selector: selectors.BaseSelector
    pipes: dict[int, Pipe] = field(default_factory=dict)

    def log(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.log"

    def open(self, rank: int) -> tuple[int | None, int | None]:
        """The descriptors for a worker's stdout and stderr, which the caller closes after the start; None inherits."""
        if self.tee:
            copy = self.log(rank).open("wb", buffering=0) if self.keep else None
            return self._pipe(rank, sys.stdout.buffer, copy), self._pipe(rank, sys.stderr.buffer, copy)
        if rank == 0:
            return None, None
        log = os.open(self.log(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        return log, os.dup(log)

    def _pipe(self, rank: int, target: BinaryIO, copy: BinaryIO | None) -> int:
        source, sink = os.pipe()
        os.set_blocking(source, False)
        self.pipes[source] = Pipe(rank, source, target, copy)
        self.selector.register(source, selectors.EVENT_READ, self.pipes[source])
        return sink

    def pump(self, pipe: Pipe) -> bool:
        """Shows the whole lines that have come; False when there was nothing to read."""
        try:
            data = os.read(pipe.source, _CHUNK)
        except BlockingIOError:
            return False
        *lines, pipe.rest = (pipe.rest + data).split(b"\n")
        _show(pipe, lines)
        if not data:
            self._end(pipe)
        return bool(data)

    def drain(self) -> None:
        """Shows what is left when all workers are gone; what they left running may hold the pipes, so their end is not awaited."""
        for pipe in list(self.pipes.values()):
            while self.pump(pipe):
                pass
            if pipe.source in self.pipes:
                self._end(pipe)

    def _end(self, pipe: Pipe) -> None:
        _show(pipe, [pipe.rest] if pipe.rest else [])
        self.selector.unregister(pipe.source)
        os.close(self.pipes.pop(pipe.source).source)

    def tail(self, rank: int) -> list[str]:
        """The last lines of a rank that writes to a file."""
        if self.tee or rank == 0 or not self.log(rank).exists():
            return []
        with self.log(rank).open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]


def _show(pipe: Pipe, lines: list[bytes]) -> None:
    for line in lines:
        pipe.target.write(b"[%d] %s\n" % (pipe.rank, line))
        if pipe.copy is not None:
            pipe.copy.write(line + b"\n")
    pipe.target.flush()
