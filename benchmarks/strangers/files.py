"""A manifest that names a file of the joiner: a live swarm, and a watch on that file."""

import contextlib
import ctypes
import os
from pathlib import Path

from benchmarks.report import Report
from benchmarks.strangers.watched import MODULE
from testbed.daemons.fleet import START_S, Box, Hang, Peer
from testbed.daemons.forks import Forks

NAME = "passwords.txt"
LINES = 4000
IN_OPEN = 0x20
"""inotify(7): a file was opened."""
EVENTS_BYTES = 1 << 16
ENDED_S = 20.0
"""Seconds for a joiner to end, or to show that it does not."""


class OpenWatch:
    """Tells if a file was opened, by anybody (inotify)."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        watch = libc.inotify_add_watch(self._descriptor, os.fsencode(path), IN_OPEN)
        if self._descriptor < 0 or watch < 0:
            raise OSError(ctypes.get_errno(), "no inotify", str(path))
        self._seen = False

    def opened(self) -> bool:
        """True when the file has been opened since the beginning."""
        with contextlib.suppress(BlockingIOError):
            self._seen = bool(os.read(self._descriptor, EVENTS_BYTES)) or self._seen
        return self._seen

    def close(self) -> None:
        """Watch no longer."""
        os.close(self._descriptor)


def rows(report: Report, root: Path) -> None:
    """An owner whose manifest names ``~/passwords.txt`` reads its own file; a joiner that agreed to
    everything does not read its own."""
    root.mkdir(parents=True, exist_ok=True)
    box = Box(root, forks=Forks(MODULE))
    homes = {}
    for who in ("owner", "guest"):
        homes[who] = root / f"home-of-{who}"
        homes[who].mkdir()
        lines = (f"{who} {number}: {number * number}\n" for number in range(LINES))
        (homes[who] / NAME).write_text("".join(lines))
    watches = {who: OpenWatch(home / NAME) for who, home in homes.items()}
    try:
        owner = box.swarm((1, 1, 1), data__source=f"file:~/{NAME}", training__min_replicas=1)[0]
        owner.environment = {**owner.environment, "HOME": str(homes["owner"])}
        owner.start()
        box.wait("an owner that answers", lambda: owner.status().state, START_S, (owner,))
        box.wait("the owner's text", watches["owner"].opened, START_S, (owner,))
        guest = box.newcomer("guest", owner, "--role", "ends")
        guest.environment = {**guest.environment, "HOME": str(homes["guest"])}
        guest.start()
        said = _settled(box, guest)
        opened = watches["guest"].opened()
    finally:
        box.clean_up()
        for watch in watches.values():
            watch.close()
    report.add(
        "5 a joiner's own file that a manifest names without a hash",
        "opened" if opened else "never opened",
        "",
        f"the owner's own was opened; the joiner: {said}"[:400],
        "never opened",
        holds=not opened,
    )


def _settled(box: Box, guest: Peer) -> str:
    """The state in which a joiner settles, or its last words."""
    states = ("training", "ready", "waiting", "finished")
    try:
        box.wait(
            "a joiner that ended or joined",
            lambda: not guest.running or guest.status().state in states,
            START_S,
        )
        box.wait("its end", lambda: not guest.running, ENDED_S)
    except Hang:
        return f"it is {guest.status().state or 'silent'}"
    return "it ended: " + " ".join(guest.child.tail(6).split())
