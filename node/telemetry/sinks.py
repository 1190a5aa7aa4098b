"""Where the journal is written: a rotated JSONL file, or a terminal. Each sink writes on its own
thread.

A slow or full disk, a terminal nobody reads, a closed pipe: the sink drops events, counts them, and
says so in its next line that gets through.
"""

import contextlib
import fcntl
import os
import shutil
import sys
import threading
import time
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from node.telemetry.events import LEVELS, Event

OUTPUT_BYTES = 8 << 20
"""Size above which the output of a daemon that has no terminal is begun anew."""


class ThreadedSink:
    """A bounded queue and the one thread that empties it through :meth:`_write`."""

    def __init__(self, name: str, limit: int, level: str) -> None:
        self._waiting: deque[Event] = deque(maxlen=limit)
        self._floor = LEVELS[level]
        self._wake = threading.Condition(threading.RLock())
        self._closing = False
        self.dropped = 0
        """Events lost that no line has told of yet."""
        self._thread = threading.Thread(target=self._run, name=f"tutti-{name}", daemon=True)
        self._thread.start()

    def accept(self, event: Event) -> None:
        """Queue for writing; the oldest one waiting is dropped when ``limit`` are. Never blocks,
        never raises."""
        if LEVELS[event.level] < self._floor:
            return
        with self._wake:
            if self._closing:
                return
            self.dropped += len(self._waiting) == self._waiting.maxlen
            self._waiting.append(event)
            self._wake.notify()

    def close(self, timeout: float = 2.0) -> None:
        """Write the waiting events, for at most ``timeout`` seconds, and end the thread. Safe to
        call twice."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closing:
                    self._wake.wait()
                if not self._waiting:
                    break
                batch = list(self._waiting)
                self._waiting.clear()
                dropped = self.dropped
                self.dropped = 0
            if dropped:
                batch.insert(
                    0,
                    Event(
                        time.time(),
                        "warning",
                        "telemetry",
                        "events-dropped",
                        f"{dropped} events could not be written",
                        {"count": dropped},
                    ),
                )
            failed = self._write(batch)
            if dropped and failed == len(batch):  # the notice is lost too: say it next time
                failed += dropped - 1
            with self._wake:
                self.dropped += failed
        self._finish()

    def _write(self, batch: list[Event]) -> int:
        """Write in order; returns how many at the end of ``batch`` could not be written. Raises
        nothing."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Release the thread's resources."""


class JsonlSink(ThreadedSink):
    """One JSON object a line, appended to ``path`` (0600).

    When the file would pass ``max_bytes`` it becomes ``path.1``, that one ``path.2``, up to
    ``keep``: the disk holds ``(keep + 1) * max_bytes`` at most. A line is written whole or taken
    back.
    """

    def __init__(self, path: Path, max_bytes: int = 16 << 20, keep: int = 2) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._fd: int | None = None
        self._size = 0
        super().__init__("jsonl", 10_000, "debug")

    def _write(self, batch: list[Event]) -> int:
        for done, event in enumerate(batch):
            line = event.to_json().encode() + b"\n"
            try:
                fd = self._open() if self._fd is None else self._fd
                if self._size and self._size + len(line) > self._max_bytes:
                    self._rotate()
                    fd = self._open()
                self._append(fd, line)
            except OSError:
                self._finish()  # the next batch opens it again, perhaps on a disk with room
                return len(batch) - done
        return 0

    def _append(self, fd: int, line: bytes) -> None:
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(fd, left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._size)
            raise
        self._size += len(line)

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._fd).st_size
        return self._fd

    def _rotate(self) -> None:
        self._finish()
        numbered = [f"{self._path}.{number}" for number in range(self._keep, 0, -1)]
        for older, newer in pairwise([*numbered, self._path]):
            with contextlib.suppress(FileNotFoundError):
                os.replace(newer, older)

    def _finish(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


class StreamSink(ThreadedSink):
    """Lines for a terminal or a service manager. ``form``: "json" for one object a line; "text" and
    "auto" for lines that people read.

    ``output``: the file of a daemon without a terminal. If the stream appends to it, it holds
    ``max_bytes`` and a line at most: before the next line ``output.1`` gets its newest
    ``max_bytes``, and it is emptied. Other writers of the process append to the same file. A stream
    to any other file is left as it is: the operator has redirected it.
    """

    def __init__(
        self,
        stream: TextIO,
        form: str = "auto",
        *,
        limit: int = 2_000,
        level: str = "info",
        output: Path | None = None,
        max_bytes: int = OUTPUT_BYTES,
    ) -> None:
        self._stream = stream
        self._json = form == "json"
        self._output: Path | None = None
        if output is not None and _appends(stream, output):
            self._output = output
        self._max_bytes = max_bytes
        super().__init__("stderr", limit, level)

    def _write(self, batch: list[Event]) -> int:
        try:
            for event in batch:
                if self._output is not None:
                    self._bound(self._output)
                self._stream.write((event.to_json() if self._json else as_text(event)) + "\n")
                self._stream.flush()
        except (OSError, ValueError):  # a closed pipe, a closed file
            return len(batch)
        return 0

    def _bound(self, output: Path) -> None:
        """Empty the file if it is too large. Raises OSError."""
        fd = self._stream.fileno()
        if os.fstat(fd).st_size <= self._max_bytes:
            return
        # Without room for a copy, the room on the disk is worth more than the old lines.
        with contextlib.suppress(OSError):
            if _is_at(fd, output):
                _keep_end(output, self._max_bytes)
        # Whoever appends to the file goes on at its new end.
        os.ftruncate(fd, 0)


def _appends(stream: TextIO, path: Path) -> bool:
    """Return True if the stream appends to the file at ``path``."""
    try:
        fd = stream.fileno()
        return _is_at(fd, path) and bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND)
    except (OSError, ValueError):  # it is no file, or it is closed; or there is none at ``path``
        return False


def _is_at(fd: int, path: Path) -> bool:
    """Return True if the descriptor is one of the file at ``path``. Raises OSError."""
    return os.path.samestat(os.fstat(fd), path.stat())


def _keep_end(path: Path, most: int) -> None:
    """Copy the last ``most`` bytes of a larger file to ``path.1``. Raises OSError."""
    earlier = os.open(f"{path}.1", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(earlier, "wb") as kept, path.open("rb") as whole:
        whole.seek(-most, os.SEEK_END)
        shutil.copyfileobj(whole, kept)


def say(text: str) -> None:
    """Write a line to standard output. If nobody reads that, or its disk is full, nothing more is
    written there.

    The process goes on, and ends with its own exit code although the buffered text cannot be
    written.
    """
    try:
        print(text, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def as_text(event: Event) -> str:
    """One line for people, local time; control characters, which could repaint a terminal, are made
    visible."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.at))
    mark = "" if event.level == "info" else f"{event.level}: "
    return f"{clock} {_visible(event.component):<10} {mark}{_visible(event.text)}"


def _visible(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
