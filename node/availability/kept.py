"""The operator's pause on the disk, so that it survives a restart of the daemon, and the rules that
the operator has overruled, so that they survive a change of its stage."""

import contextlib
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from node.availability.machine import By


@dataclass(frozen=True, slots=True)
class KeptPause:
    """A pause of the operator. ``seconds``: its length, None until a resume; ``ends_at``: its end
    in Unix seconds, 0 without one."""

    seconds: float | None
    ends_at: float
    reason: str

    def left_s(self, wall: float) -> float | None:
        """Seconds until it ends, None for no end. A clock that was set back does not make it longer
        than it was."""
        if self.seconds is None:
            return None
        return max(0.0, min(self.seconds, self.ends_at - wall))


def read(path: Path) -> KeptPause | None:
    """The pause in a file; None if there is none, or it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        seconds = found["seconds"]
        if seconds is not None:
            seconds = float(seconds)
        return KeptPause(seconds, float(found["ends_at"]), str(found["reason"])[:200])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(path: Path, pause: KeptPause | None) -> None:
    """Keep a pause, or remove the file with None. Raises OSError."""
    if pause is None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return
    said = {"seconds": pause.seconds, "ends_at": pause.ends_at, "reason": pause.reason}
    _replace(path, said)


def hand_on(path: Path, overruled: Collection[By]) -> None:
    """Keep the overruled rules for the next process. Raises OSError."""
    _replace(path, sorted(overruled))


def taken(path: Path) -> set[By]:
    """The overruled rules that the process before this one has handed on. Their file is removed: a
    rule may be open while no daemon runs."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        return {By(name) for name in found}
    except (OSError, ValueError, TypeError):
        return set()


def _replace(path: Path, said: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(json.dumps(said), encoding="utf-8")
    os.replace(fresh, path)
