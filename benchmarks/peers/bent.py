"""A daemon that means harm: the product's own, one part of it bent before it starts.

    python -m benchmarks.peers.bent KIND PROGRAM ARGUMENT...

PROGRAM is what would start the daemon (:attr:`testbed.daemons.fleet.Peer.child`): it is run in this
process's place, with this module where it names the command line.
"""

import asyncio
import base64
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.app.launch import PROGRAM
from node.averaging.strategies import group_forming as machine
from node.checkpoint.state import StateKind
from node.config import write_atomically
from node.coordinator.service import Training
from node.core.ids import CellId, PeerId
from node.core.journey import Plan, Version
from node.outer.forming import GroupFinder, Search
from node.outer.notes import Acceptance
from node.outer.window import WindowRound
from node.pipeline.hops.notes import Notes
from protos import cells_pb2 as pb
from protos import training_pb2 as training_pb

TIMES = 100.0
LEAKED = 50
MODULE = "benchmarks.peers.bent"


def through(kind: str) -> tuple[str, ...]:
    """Value of :attr:`node.app.launch.Child.through` for a daemon of this kind."""
    return (sys.executable, "-m", MODULE, kind)


def silent() -> None:
    """It offers a group in its turn and collects what others sign; then it names no group and
    releases nobody. It accepts nobody's offer, so that its turn always comes."""

    def name(self: GroupFinder, search: Search, key: str, members: Collection[CellId]) -> None:
        self.board.journal.emit("lab", "harm", f"keeps {len(members) - 1} cells waiting")

    def release(self: GroupFinder, search: Search, cells: Iterable[CellId]) -> None:
        pass

    async def offered(self: GroupFinder, *_: Any) -> pb.CellsReply:
        return pb.CellsReply(accepts=False, reason="busy")

    _bend(GroupFinder, _name=name, _release=release, _offered=offered)


def absent() -> None:
    """The cell posts under the window's key, never answers another cell's question, and asks no
    cell."""

    async def tell(self: GroupFinder, request: pb.CellsNote, context: Any) -> pb.CellsReply:
        self.board.journal.emit("lab", "harm", "lets another cell wait for an answer")
        await asyncio.Event().wait()
        raise AssertionError("nothing sets this event")

    def happens(
        self: GroupFinder,
        search: Search,
        event: machine.Event,
        shown: Mapping[CellId, Acceptance] | None = None,
    ) -> bool:
        if isinstance(event, machine.CellsRead):
            event = machine.CellsRead(event.key, frozenset())
        return was(self, search, event, shown)

    was = GroupFinder._happens  # pyright: ignore[reportPrivateUsage]
    _bend(GroupFinder, Tell=tell, _happens=happens)


def noise() -> None:
    """The cell gives random numbers in a window, the same to all that ask."""

    def drawn(window: int, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        dice = torch.Generator().manual_seed(window)
        return {name: torch.randn(t.shape, generator=dice) for name, t in given.items()}

    _gives(drawn)


def heavy() -> None:
    """The cell gives 100 times its values."""
    _gives(lambda window, given: {name: TIMES * t.to("cpu") for name, t in given.items()})


def leaks() -> None:
    """It gives the plans that it hears, with all that came with them, to strangers: the newest
    stand in ``leaked`` in its home, as base64, a line each."""
    kept: deque[bytes] = deque(maxlen=LEAKED)
    path = Path(sys.argv[sys.argv.index("--home") + 1]) / "leaked"
    was = Training._hear_plan  # pyright: ignore[reportPrivateUsage]

    async def hear(self: Training, peer: PeerId, note: training_pb.PlanNote) -> str | None:
        kept.append(base64.b64encode(note.SerializeToString()))
        write_atomically(path, b"\n".join(kept))
        return await was(self, peer, note)

    _bend(Training, _hear_plan=hear)


def withholds() -> None:
    """It takes every plan and does its work, but never tells the leader that it has committed."""
    was = Training.tell_leader

    async def tell(self: Training, plan: Plan, note: training_pb.Note) -> bool:
        if note.WhichOneof("say") == "committed":
            return True
        return await was(self, plan, note)

    _bend(Training, tell_leader=tell)


def unnamed() -> None:
    """An origin that names no micro-batch as finished: the hops keep their shares."""

    def keep(self: Notes, index: int, peers: tuple[PeerId, ...]) -> None:
        pass

    _bend(Notes, tell_counted=keep)


def _gives(bent: Callable[[int, Mapping[str, Tensor]], dict[str, Tensor]]) -> None:
    """Bend the tensors given to other cells; within its own cell the daemon serves the true
    ones."""
    was = WindowRound.describe

    def describe(
        self: WindowRound, kind: StateKind, window: int | None
    ) -> tuple[Version, Mapping[str, Tensor]] | None:
        found = was(self, kind, window)
        if found is None or kind is not StateKind.SNAPSHOT:
            return found
        engines = self._engines  # pyright: ignore[reportPrivateUsage]
        engines.journal.emit("lab", "harm", "gives what it does not have", window=window)
        return found[0], bent(found[0].epoch, found[1])

    _bend(WindowRound, describe=describe)


def _bend(what: type, **names: Any) -> None:
    for name, value in names.items():
        setattr(what, name, value)


KINDS: dict[str, Callable[[], None]] = {
    "silent": silent,
    "absent": absent,
    "noise": noise,
    "heavy": heavy,
    "leaks": leaks,
    "unnamed": unnamed,
    "withholds": withholds,
}


def main(kind: str, words: list[str]) -> int:
    """Run the daemon if `words` are a command line of it, and otherwise the program that starts
    it."""
    if words and words[0] == sys.executable:
        at = words.index(PROGRAM)
        os.execv(words[0], [*words[:at], "-m", MODULE, kind, *words[at + 1 :]])
    import cli

    KINDS[kind]()
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
