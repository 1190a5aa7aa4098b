"""The daemons of this machine: ``tutti ps``. Enters: the sockets that are listened on. Leaves: one
line for each home."""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from node.control.client import ControlClient
from node.control.words import clean
from node.core.errors import LocalFault, NotRunning, Refused
from node.core.home import control_socket
from node.core.ids import stage_name

SOCKETS = Path("/proc/net/unix")
LISTENS = 0x10000
"""Flag of a socket there that is listened on (``__SO_ACCEPTCON``)."""
ANSWER_S = 2.0
"""Longest wait for the answer of a daemon, in seconds."""
AT_ONCE = 16
"""Daemons that are asked at once."""
STOPPED = "not running"
SILENT = "does not answer"
FOREIGN = "another user's"


@dataclass(frozen=True)
class FoundDaemon:
    """``home`` "" where the daemon does not answer and its socket is not in its home; ``pid`` 0
    where nothing runs or the system does not tell."""

    home: str
    pid: int
    state: str
    run_id: str = ""
    swarm: str = ""
    work: str = ""
    epoch: int = 0

    def document(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return asdict(self)


def found(homes: Sequence[Path]) -> list[FoundDaemon]:
    """Daemons that listen in ``homes``, in the homes of their children, and at every control socket
    that the system lists. The first of ``homes`` is in the answer in any case."""
    known = {control_socket(home): home for home in homes}
    for home in homes:
        with contextlib.suppress(OSError):
            known |= {control_socket(child): child for child in (home / "local").iterdir()}
    places = {path: None for path in sockets()} | known
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(_asked, places, places.values()))
    # Homes without a daemon are left out, except the home that was asked about.
    there = [one for one in rows if one.state != STOPPED or one.home == str(homes[0])]
    return sorted(there, key=lambda one: (one.state == STOPPED, one.home, one.pid))


def sockets(table: Path = SOCKETS) -> Iterator[Path]:
    """Control sockets of this network namespace that are listened on; none where the system has no
    list of them."""
    if sys.platform != "linux":
        return
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").split("\n")[1:]
    except OSError:
        return
    for line in lines:
        # Num RefCount Protocol Flags Type St Inode Path
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and int(fields[3], 16) & LISTENS and fields[7].endswith("/ctl.sock"):
            yield Path(fields[7])


def lines(daemons: Iterable[FoundDaemon]) -> list[str]:
    """For people: a line for each daemon, the home last, because it may be long."""
    rows = [("PID", "STATE", "RUN", "WORK", "EPOCH", "HOME")]
    for one in daemons:
        run = f"{clean(one.swarm, 16)} {clean(one.run_id, 64)[:6]}".strip() or "-"
        epoch = str(one.epoch) if one.run_id else "-"
        rows.append((str(one.pid or "-"), one.state, run, one.work or "-", epoch, _home(one)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _home(one: FoundDaemon) -> str:
    return clean(one.home, 4096) or "not known"


def _asked(path: Path, home: Path | None) -> FoundDaemon:
    where = home
    if where is None and control_socket(path.parent) == path:
        where = path.parent
    name = str(where or "")
    try:
        with ControlClient(path, ANSWER_S) as client:
            try:
                said = client.status()
            except LocalFault:
                return FoundDaemon(name, client.pid, SILENT)
            work = said.role
            if work not in ("", "rendezvous"):
                work = stage_name(said.stage)
            return FoundDaemon(
                home=said.home or name,
                pid=client.pid,
                state=clean(said.state, 12),
                run_id=said.swarm.run_id,
                swarm=said.swarm.name,
                work=work,
                epoch=said.epoch,
            )
    except Refused:
        return FoundDaemon(name, 0, FOREIGN)
    except (NotRunning, OSError):
        return FoundDaemon(name, 0, STOPPED)
