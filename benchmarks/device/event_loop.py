"""The longest callback of a daemon's event loop while a swarm trains with the tensors and messages
of a model of half a billion parameters.

Part 2 of ``python -m benchmarks.device``. Daemons are real: an ends peer and two replicas of one
block stage, with checkpoints and copies of optimizer state in every epoch. The width and the
matrices are those of a model with 0.5 billion parameters in 24 layers; the stage has few layers and
the vocabulary is bytes, so that two cores compute an epoch in a minute. Callbacks are measured in
processor time of the loop's thread (``callbacks.py``), after the first epoch.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.device.callbacks import MODULE, Turn, read_turns
from benchmarks.report import Report
from testbed.daemons import books
from testbed.daemons.fleet import Box, Hang, Peer, folder
from testbed.daemons.forks import Forks
from testbed.daemons.told import Told

ITEM = "2"
HELD_MS = 5.0
"""Longest callback, in milliseconds of processor time."""
MODEL: dict[str, Any] = {
    "model.layers": 1,
    "model.d_model": 1024,
    "model.heads": 16,
    "model.kv_heads": 4,
    "model.d_ff": 4864,
    "model.seq_len": 1024,
    "pipeline.stages": 1,
    "pipeline.micro_batch": 4,
    "pipeline.wire": "bf16",
    "pipeline.forward_timeout_s": 300.0,
    "training.target_batch": 8,
    "training.min_replicas": 1,
    "training.eval_every": 2,
    "training.eval_batches": 1,
    "training.epochs": 100,
    "training.epoch_timeout_s": 900.0,
    "data.source": "builtin:pydoc",
}
NODE = ("checkpoint.every=1",)
NODES = (1, 2)
START_S = 300.0
EPOCH_S = 600.0
EPOCHS = 3
WORST = 12


def commits(peers: list[Peer]) -> list[Told]:
    """The commits that the leader told, one for each epoch, in order."""
    return books.commits(e for p in peers for e in p.told())


def measured(wire: str, epochs: int) -> dict[str, list[Turn]]:
    """The long callbacks of each daemon in ``epochs`` epochs after the first. Raises Hang if the
    swarm does not train."""
    with contextlib.ExitStack() as stack:
        box = Box(stack.enter_context(folder()), settings=NODE, forks=Forks(MODULE))
        stack.callback(box.clean_up)
        peers = box.swarm(NODES, **{**MODEL, "pipeline.wire": wire})
        try:
            for peer in peers:
                peer.start()
            box.wait(
                f"{1 + epochs} epochs",
                lambda: len(commits(peers)) > epochs,
                START_S + (1 + epochs) * EPOCH_S,
                tuple(peers),
            )
        except Hang:
            print(box.story(), file=sys.stderr)
            raise
        done = commits(peers)
        return {p.label: read_turns(p.home, done[0].at, done[epochs].at) for p in peers}


def rows(report: Report, root: Path | None = None, quick: bool = False) -> None:
    """Measure and add the rows."""
    epochs = EPOCHS
    if quick:
        epochs = 1
    wires = ("bf16",)
    for wire in wires:
        found = measured(wire, epochs)
        for label, turns in found.items():
            told(turns, label)
            longest = 0.0
            where = f"none took a millisecond, {epochs} epochs"
            if turns:
                longest = 1000 * turns[0].seconds
                where = f"{turns[0].what}: {turns[0].where}"
            report.add(
                f"{ITEM} {wire}, {label}: longest callback of the event loop",
                round(longest, 2),
                "ms of processor time",
                where,
                f"< {HELD_MS:g}",
                longest < HELD_MS,
            )


def told(turns: list[Turn], label: str) -> None:
    """Say the longest callbacks on stderr, one of each kind."""
    seen: dict[tuple[str, str], int] = {}
    first: dict[tuple[str, str], Turn] = {}
    for turn in turns:
        kind = (turn.what, turn.where)
        seen[kind] = seen.get(kind, 0) + 1
        first.setdefault(kind, turn)
    for kind, turn in list(first.items())[:WORST]:
        print(
            f"{label}: {1000 * turn.seconds:.1f} ms ({1000 * turn.garbage_s:.1f} for garbage, "
            f"{turn.faults} faults, {turn.switches} switches), "
            f"{seen[kind]} times, {turn.what}: {turn.where}",
            file=sys.stderr,
        )
