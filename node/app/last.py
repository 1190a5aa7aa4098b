"""Last known status of a home without a daemon: the run, the checkpoints on the disk, the time and
the reason of the daemon's end. Reads files; loads no engine."""

import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from node.app.launch import LOG
from node.config import NodeConfig
from node.control.words import clean, span
from node.core.errors import LocalFault
from node.core.ids import ENDS, short_cell, stage_name
from node.identity.keys import Identity
from node.manifest import Manifest
from node.orders.order import RunEnded, ended, going_on

TAIL = 1 << 18
"""Number of bytes at the end of the event file that are read."""
STARTED = "started"
"""Kind of the event with which a daemon begins."""
STOPPING = "stopping"
"""Kind of the event with which a daemon ends."""
ANEW = "starts-anew"
"""Kind of the event with which a daemon ends to become a daemon of another stage."""
ANEW_S = 300.0
"""Seconds within which a daemon that starts anew answers again, on a busy machine."""
_STAGE = re.compile(r"stage-([0-9]{1,4})")
_EPOCH = re.compile(r"epoch-([0-9]{1,18})")


@dataclass(frozen=True)
class LastKnown:
    """``epochs``: the newest checkpoint of each stage on this disk, by stage. ``at``: Unix time of
    the end, or of the last event where the daemon did not say that it ends; 0: not known. ``why``:
    the reason it gave, "" for none."""

    run_id: str = ""
    swarm: str = ""
    cell: str = ""
    epochs: tuple[tuple[int, int], ...] = ()
    of: int = 0
    at: float = 0.0
    why: str = ""
    next_step: str = ""
    """Advice for a run that its owner has ended; "" for one that can be started."""
    anew: bool = False
    """True if the daemon ended to start itself anew, and its process is still there."""
    pid: int = 0
    """That process; 0 if it is not known."""

    def starts(self, now: float) -> bool:
        """Return True if the daemon starts itself anew at Unix time ``now``."""
        return self.anew and now - self.at < ANEW_S

    def document(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return asdict(self) | {"epochs": {str(stage): epoch for stage, epoch in self.epochs}}

    def lines(self, now: float) -> list[str]:
        """The same as lines for people, at Unix time ``now``; no lines if nothing is known."""
        found: list[str] = []
        if self.run_id:
            cell = ""
            if self.cell:
                cell = f", cell {short_cell(self.cell)}"
            found.append(f"last run   {clean(self.swarm, 16)} {self.run_id[:6]}{cell}")
        for stage, epoch in self.epochs:
            found.append(f"on disk    {stage_name(stage)}, epoch {epoch}/{self.of}")
        if self.run_id and not self.epochs:
            found.append("on disk    no checkpoint yet")
        if self.at:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.at))
            ago = span(now - self.at)
            if self.starts(now):
                found.append(f"starts     anew since {ago}: {clean(self.why, 300)}")
            elif self.why:
                found.append(f"ended      {when}, {ago} ago: {clean(self.why, 300)}")
            else:
                found.append(
                    f"last seen  {when}, {ago} ago; it did not say why it ended: killed, or the "
                    "machine went off"
                )
        return found


def last_known(config: NodeConfig) -> LastKnown:
    """Read the files of a home. Raises nothing: a file that cannot be read tells nothing."""
    end = _end(config.events_path)
    why = end.why
    anew = end.anew and lives(end.pid)
    if end.anew and not anew:
        why += ", and has not come back"
        out = config.home / LOG
        if out.exists():
            why += f": its output is in {out}"
    known = None
    with contextlib.suppress(LocalFault):
        known = config.remembered()
    if known is None:
        return LastKnown(at=end.at, why=why, anew=anew, pid=end.pid)
    manifest = known[0]
    run_id = manifest.run_id
    next_step = ""
    order = ended(run_id, manifest.swarm.owner, config.order(run_id), time.time())
    if order is not None:
        if _is_owner(config, manifest):
            next_step = going_on(manifest.training.epochs, str(config.manifest_path(run_id)))
        fault = RunEnded(order, next_step)
        next_step = f"{fault.what}: {fault.next_step}"
    return LastKnown(
        run_id=run_id,
        swarm=manifest.swarm.name,
        cell=config.cell(run_id),
        epochs=tuple(sorted(epochs_on_disk(config.checkpoint_dir(run_id)))),
        of=manifest.training.epochs,
        at=end.at,
        why=why,
        next_step=next_step,
        anew=anew,
        pid=end.pid,
    )


def lives(pid: int) -> bool:
    """Return True if there is a process ``pid``, and for 0, which is not known."""
    import psutil

    return not pid or psutil.pid_exists(pid)


def _is_owner(config: NodeConfig, manifest: Manifest) -> bool:
    with contextlib.suppress(LocalFault):
        return Identity.load(config.identity_path).peer_id == manifest.swarm.owner
    return False


def epochs_on_disk(checkpoints: Path) -> Iterator[tuple[int, int]]:
    """Stage and newest epoch of the checkpoints in a directory."""
    for stage, where in _numbered(checkpoints, _STAGE):
        epochs = [epoch for epoch, _ in _numbered(where, _EPOCH)]
        if epochs and stage >= ENDS:
            yield stage, max(epochs)


def _numbered(directory: Path, name: re.Pattern[str]) -> list[tuple[int, Path]]:
    try:
        found = [(name.fullmatch(path.name), path) for path in directory.iterdir()]
    except OSError:
        return []
    return [(int(match[1]), path) for match, path in found if match is not None]


class _End(NamedTuple):
    """Unix time and reason of the last daemon's end. ``why`` "": not known, and the time is that of
    its last event; ``anew``: it starts itself anew, in process ``pid``."""

    at: float = 0.0
    why: str = ""
    anew: bool = False
    pid: int = 0


def _end(events: Path) -> _End:
    """The last daemon's end, by its event file."""
    newest = 0.0
    end = _End()
    for event in _tail(events):
        newest = event["at"]
        if event["kind"] == STARTED:
            end = _End()
        elif event["kind"] in (STOPPING, ANEW):
            anew = event["kind"] == ANEW
            end = _End(event["at"], event["text"], anew, event["pid"])
    if not end.why:
        return _End(newest)
    return end


def _tail(events: Path) -> Iterator[dict[str, Any]]:
    """The newest events of a file; a torn line is left out."""
    try:
        with events.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL))
            raw = file.read(TAIL)
    except OSError:
        return
    for line in raw.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            entry = json.loads(line)
            yield {
                "at": float(entry["at"]),
                "kind": str(entry["kind"]),
                "text": str(entry["text"]),
                "pid": int(entry.get("fields", {}).get("pid", 0)),
            }
