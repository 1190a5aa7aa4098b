"""A swarm in which something is going to happen: its daemons on the hosts of a wide-area network,
followed from outside.

with arena((2, 2, 2, 2)) as a:
    a.heal()                     # everybody up, in one plan, digests equal
    a.peers["stage-1-0"].kill()
"""

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from testbed.daemons.books import COMMITTED, Books, in_plan
from testbed.daemons.fleet import START_S, WORKING, Box, Hang, Host, Peer
from testbed.daemons.forks import Forks
from testbed.daemons.limits import Limits
from testbed.daemons.told import Chronicle, Told
from testbed.networks.wan import Wan

T = TypeVar("T")
HEAL_S = 150.0
"""Bound of the way back to full strength: restarts, fetched state, one plan for all."""
POLL_S = 0.1


class Arena:
    """A box of daemons, the network between them (None: loopback), and their events."""

    def __init__(
        self, box: Box, nodes: Sequence[int], wan: Wan | None, limits: Limits, **changes: Any
    ) -> None:
        self.box = box
        self.nodes = tuple(nodes)
        self.wan = wan
        self.limits = limits
        self.peers: dict[str, Peer] = {p.label: p for p in box.swarm(self.nodes, **changes)}
        self.chronicle = Chronicle()
        self.keys = {
            label: p.key
            for label, p in self.peers.items()
            if p.home.joinpath("identity.key").exists()
        }

    @property
    def manifest(self):
        return self.box.manifest

    @property
    def sequence(self) -> int:
        return self.manifest.model.seq_len

    def host(self, label: str) -> int:
        """The number of its host in the network."""
        return list(self.peers).index(label)

    def add(self, peer: Peer) -> Peer:
        """A newcomer takes part from now on."""
        self.peers[peer.label] = peer
        return peer

    def forget(self, label: str) -> None:
        """It is not expected back."""
        self.peers.pop(label).close()
        self.box.made.pop(label, None)

    # ----------------------------------------------------------- watching

    def read(self) -> list[Told]:
        """Everything told until now."""
        for label, peer in self.peers.items():
            self.chronicle.follow(label, peer.events_path)
        return self.chronicle.read()

    def books(self) -> Books:
        return Books(self.read())

    def wait(self, what: str, condition: Callable[[], T | None], seconds: float) -> T:
        return self.box.wait(what, condition, seconds)

    def commits(self, since: float = 0.0) -> list[Told]:
        return [e for e in self.read() if e.kind == COMMITTED and e.at >= since]

    def epochs(self, count: int, seconds: float, *, led_by: Sequence[str] = ()) -> None:
        """Wait for ``count`` more commits, told by one of ``led_by`` when given. Raises Hang."""
        begin = time.time()

        def enough() -> bool:
            return sum(not led_by or e.who in led_by for e in self.commits(begin)) >= count

        self.wait(f"{count} more epochs", enough, seconds)

    def leader(self) -> Peer:
        """The living daemon that reported the newest plan or commit. Raises Hang if there is
        none."""
        ends = [
            e for e in self.read() if e.kind in ("epoch-planned", COMMITTED) and e.who in self.peers
        ]
        live = [e for e in ends if self.peers[e.who].running]
        if not live:
            raise Hang("nobody leads")
        return self.peers[live[-1].who]

    def key(self, label: str) -> str:
        if label not in self.keys:
            self.keys[label] = self.peers[label].key
        return self.keys[label]

    # ----------------------------------------------------------- health

    def heal(self, seconds: float = HEAL_S) -> float:
        """Everything undone, everybody up, in one plan, at one epoch, digests equal; how many
        seconds it took. Raises Hang."""
        began = time.monotonic()
        if self.wan is not None:
            self.wan.heal()
        self.limits.lift()
        for peer in self.peers.values():
            peer.signal(signal.SIGCONT, family=True)
            if not peer.running:
                peer.start()
        deadline = began + max(seconds, START_S)
        self.wait("everybody in one plan", self.complete, deadline - time.monotonic())
        if not self.box.agree(max(10.0, deadline - time.monotonic())):
            raise Hang("the replicas of a stage do not come to one digest")
        self.epochs(1, max(10.0, deadline - time.monotonic()))
        return time.monotonic() - began

    def complete(self) -> bool:
        """Everybody runs, is in the newest plan and works."""
        for peer in self.peers.values():
            if not peer.running:
                raise Hang(f"{peer.label} ended: {peer.child.tail(3)}")
        if in_plan(self.read()) != (len(self.peers), 0):
            return False
        seen = [p.status() for p in self.peers.values()]
        return (
            all(s.state in WORKING for s in seen)
            and max(s.epoch for s in seen) - min(s.epoch for s in seen) <= 1
        )

    def when(self, peer: Peer, phase: str, seconds: float = 20.0) -> bool:
        """Wait until the peer says it is in this phase of an epoch ("run", "average"); False when
        it never was seen in it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if peer.status().phase == phase:
                return True
        return False

    def held_out(self, since: float, seconds: float) -> tuple[int, float]:
        """(epoch, loss) of the first evaluation told after ``since``. Raises Hang."""

        def found() -> Told | None:
            return next((e for e in self.read() if e.kind == "evaluated" and e.at >= since), None)

        told = self.wait("an evaluation", found, seconds)
        return int(told.get("epoch")), float(told.get("loss_val"))


@contextlib.contextmanager
def arena(
    nodes: Sequence[int],
    *,
    network: bool = True,
    home: Path | None = None,
    disks: Sequence[str] = (),
    whole: bool = True,
    forks: Forks | None = None,
    **changes: Any,
) -> Iterator[Arena]:
    """A swarm that has been started and is whole; nothing of it is left afterwards.

    `disks`: labels of peers that keep their checkpoints on a small disk of their own. `whole`
    False: do not wait until all replicas agree. `forks`: as in :class:`~testbed.daemons.fleet.Box`.
    Raises Hang when the swarm does not start.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_orderly())
        root = home or Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="tutti-", ignore_cleanup_errors=True)
            )
        )
        wan = stack.enter_context(Wan(sum(nodes))) if network else None
        hosts: tuple[Host, ...] = tuple(wan.host(i) for i in range(sum(nodes))) if wan else ()
        limits = Limits()
        stack.callback(limits.close)
        box = Box(root, hosts, forks=forks)
        stack.callback(box.clean_up)
        made = Arena(box, nodes, wan, limits, **changes)
        stack.callback(made.chronicle.close)
        for label in disks:
            limits.small_disk(made.peers[label].config.checkpoint_dir(box.manifest.run_id), "8m")
        try:
            if whole:
                made.heal()
            else:
                box.start(*made.peers.values())
            yield made
        except Hang:
            print(box.story(), file=sys.stderr)
            raise


@contextlib.contextmanager
def _orderly() -> Iterator[None]:
    """Let SIGTERM end the program as Ctrl-C does, so that it takes down everything it started."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
