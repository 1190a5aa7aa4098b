"""Events of daemons from their event files: read once, or followed while they are written."""

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Told:
    """One event of one daemon. ``at``: Unix seconds of this machine, the same clock for all."""

    who: str
    at: float
    level: str
    component: str
    kind: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def raw(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            name: getattr(self, name)
            for name in ("at", "level", "component", "kind", "text", "fields")
        }

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def __str__(self) -> str:
        moment = time.strftime("%H:%M:%S", time.localtime(self.at))
        return (
            f"{moment}.{int(self.at % 1 * 1000):03d} {self.who:12} {self.level:7} "
            f"{self.component}/{self.kind}: {self.text[:200]}"
        )


def parsed(who: str, lines: Iterable[bytes]) -> Iterator[Told]:
    """Parse whole lines to events; a line without an event is left out."""
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            e = json.loads(line)
            yield Told(
                who,
                float(e["at"]),
                e["level"],
                e["component"],
                e["kind"],
                e["text"],
                e.get("fields") or {},
            )


def without_home(text: str) -> str:
    """A text as a daemon of the default home says it: its commands name no home."""
    return re.sub(r"(?<=\btutti) --home \S+", "", text)


def read_told(who: str, path: Path) -> list[Told]:
    """Everything in the file now; nothing when there is none."""
    try:
        return list(parsed(who, path.read_bytes().splitlines()))
    except FileNotFoundError:
        return []


class Follower:
    """Reader of the events appended to a file, across its rotation."""

    def __init__(self, who: str, path: Path) -> None:
        self.who = who
        self._path = path
        self._file: BufferedReader | None = None
        self._rest = b""

    def read(self) -> list[Told]:
        """Events since the last call."""
        found: list[Told] = []
        for _ in range(2):  # the old file to its end, then the one that took its place
            if self._file is None:
                try:
                    self._file = self._path.open("rb")
                except FileNotFoundError:
                    return found
            *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
            found += parsed(self.who, lines)
            try:
                same = os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
            except FileNotFoundError:
                same = True
            if same:
                break
            self.close()
        return found

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._rest = b""


class Chronicle:
    """The events of several daemons, in the order in which they happened."""

    def __init__(self) -> None:
        self._followers: dict[str, Follower] = {}
        self.events: list[Told] = []

    def follow(self, who: str, path: Path) -> None:
        """One more daemon; a second word about the same one changes nothing."""
        self._followers.setdefault(who, Follower(who, path))

    def read(self) -> list[Told]:
        """Add what came; everything so far, oldest first."""
        fresh = [e for f in self._followers.values() for e in f.read()]
        if fresh:
            self.events = sorted(self.events + fresh, key=lambda e: e.at)
        return self.events

    def close(self) -> None:
        for follower in self._followers.values():
            follower.close()
