"""Ends of processes at seeded moments: epochs lost, and equality of the loss curve to the bit.

A swarm lives through one moment after the other: at a random time it is stopped, drained, signalled
or killed, one machine or all of them, and started again. Its machines give every micro-batch the
same place in every sum (one is in flight at a time, every stage has one replica). So a run that is
never stopped has the same losses to the last bit, until a machine dies while others live. In a run
of several cells windows follow the wall clock, and the lineage of the versions is compared instead,
which covers their whole history.
"""

import math
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Report
from node.checkpoint.settings import CheckpointSettings
from testbed.daemons.books import COMMITTED, PLANNED
from testbed.daemons.fleet import START_S, Box, Hang, Peer
from testbed.daemons.forks import Forks
from testbed.daemons.told import Told

KINDS = ("stop", "drain", "SIGTERM", "Ctrl-C", "SIGKILL")
MOMENTS = 20
END_S = 200.0
"""Bound of a planned end: a drain lets an epoch of a minute end first."""
STILL_S = 2.0
"""Seconds for which a machine is down before it starts again."""
WITHIN_S = CheckpointSettings().within_s
SHARED: dict[str, Any] = {"training__epochs": 100_000, "training__min_replicas": 1}
SETTINGS = ("limits.in_flight=1",)
SLOW_SETTINGS = (*SETTINGS, "transport.max_up=16000", "transport.shared_memory=off")
"""At the least rate that a peer may be given, the tensors of an epoch take a minute. They have to
be there before the first epoch's deadline: micro-batches that come later do not count, and no other
run would have the same losses. Tensors in memory that daemons of one machine share are not sent,
and no cap would slow them."""
SLOW: dict[str, Any] = {
    "training__target_batch": 64,
    "training__eval_every": 0,
    "pipeline__wire": "fp32",
}
CELLS: dict[str, Any] = {
    "pipeline__stages": 1,
    "averaging__cell": 1,
    "outer__strategy": "gossip",
    "outer__carries": "parameters",
    "outer__window_s": 15.0,
}


@dataclass(frozen=True)
class Case:
    """A swarm: ``nodes`` of each stage on machines of their own, or all stages on one (None).
    ``pause_s``: between two moments, at most."""

    name: str
    nodes: tuple[int, ...] | None
    pause_s: float
    changes: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = SETTINGS
    cells: int = 1


CASES = (
    Case("one machine, epochs of 0.1 s", None, 4.0),
    Case("three machines, epochs of 0.1 s", (1, 1, 1), 4.0),
    Case("three cells of two machines, epochs of 0.1 s", (3, 3), 8.0, CELLS, cells=3),
    Case("one machine, epochs of a minute", None, 130.0, SLOW, SLOW_SETTINGS),
    Case("three machines, epochs of a minute", (1, 1, 1), 130.0, SLOW, SLOW_SETTINGS),
)


@dataclass(frozen=True)
class Moment:
    """The end of one or all machines ``at`` a Unix time, and its cost. ``lost``: committed epochs
    that were done again, by cell; ``work_s``: seconds that these epochs had taken; ``other``: cells
    that went on from a version of another history; ``end_s``: until the last process was gone."""

    at: float
    kind: str
    everybody: bool
    lost: tuple[int, ...]
    work_s: float
    other: int
    end_s: float

    @property
    def planned(self) -> bool:
        return self.kind != "SIGKILL"


def rows(report: Report, root: Path, quick: bool) -> None:
    """Row 1 for every case; ``quick``: only cases with short epochs, five moments each."""
    moments = 5 if quick else MOMENTS
    slow = [] if quick else [c for c in CASES if c.pause_s >= 60.0]
    # Cases with long epochs wait most of the time, so they can run beside the others.
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(_judged, report, root, case, moments // 2) for case in slow]
        for case in [c for c in CASES if c.pause_s < 60.0]:
            _judged(report, root, case, moments)
        for done in waiting:
            done.result()


def _judged(report: Report, root: Path, case: Case, moments: int) -> None:
    folder = root / re.sub(r"\W+", "-", case.name)
    box = Box(folder, settings=case.settings, forks=Forks())
    box.root.mkdir()
    try:
        peers = _made(box, case)
        found = list(_lived(box, case, peers, moments))
        told = [e for p in peers for e in p.told()]
    except Hang:
        print(box.story(), file=sys.stderr, flush=True)
        raise
    finally:
        box.clean_up()
    _say(report, case, found)
    if case.cells == 1:
        straight = _never_stopped(box, case, _losses(told))
        kills = [m.at for m in found if not m.planned and (case.nodes and not m.everybody)]
        _compare(report, case, told, straight, min(kills, default=math.inf))


# ------------------------------------------------------------ a swarm and its moments


def _made(box: Box, case: Case) -> list[Peer]:
    """Start the machines of a case, and wait until they train in its number of cells."""
    changes = {**SHARED, **case.changes}
    if case.nodes is None:
        box.swarm((1,), **changes)
        box.made.clear()
        box.doors.clear()
        peers = [box.peer("ends-0", "start", str(box.root / "swarm.toml"))]
    else:
        peers = box.swarm(case.nodes, **changes)
    box.start(*peers)

    def cells() -> set[str]:
        return {str(e.get("cell", "")) for p in peers for e in _committed(p)[-3:]}

    what = f"commits of {case.cells} cells"
    box.wait(what, lambda: len(cells()) == case.cells, 4 * START_S, tuple(peers))
    return peers


def _lived(box: Box, case: Case, peers: Sequence[Peer], moments: int) -> Iterator[Moment]:
    """Let the moments pass; yields each when the swarm goes on."""
    dice = random.Random(case.name)
    kinds = [(kind, everybody) for kind in KINDS for everybody in (True, False)]
    chosen = (kinds * (moments // len(kinds) + 1))[:moments]
    dice.shuffle(chosen)
    chosen.sort(key=lambda moment: moment[0] == "SIGKILL")  # see _compare
    for kind, everybody in chosen:
        time.sleep(dice.uniform(0.2, case.pause_s))
        victims = list(peers) if everybody else [dice.choice(list(peers))]
        at = time.time()
        began = time.monotonic()
        _tell(box, kind, victims)
        for victim in victims:
            _gone(victim, kind)
        end_s = time.monotonic() - began
        down = time.time()
        before = [e for p in peers for e in _committed(p) if e.at <= down]
        time.sleep(STILL_S)
        for victim in victims:
            victim.start()
        lost = _resumed(box, case, peers, before, down)
        made = Moment(at, kind, everybody, *lost, end_s)
        print(f"  {case.name}: {made}", file=sys.stderr, flush=True)
        yield made


def _tell(box: Box, kind: str, victims: Sequence[Peer]) -> None:
    """Tell machines to end, all at once. Raises Hang if a command fails."""
    numbers = {"SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT, "SIGKILL": signal.SIGKILL}
    if kind in numbers:
        for victim in victims:
            victim.signal(numbers[kind])
        return
    with ThreadPoolExecutor(len(victims)) as pool:
        homes = [victim.home for victim in victims]
        answers = pool.map(lambda home: box.tutti(kind, home=home, timeout=END_S), homes)
    for victim, done in zip(victims, answers, strict=True):
        if done.returncode:
            raise Hang(f"{kind} at {victim.label}: {done.stdout} {done.stderr}")


def _gone(victim: Peer, kind: str) -> None:
    """Wait until a machine is gone. Raises Hang if it did not end in order."""
    code = victim.wait(END_S)
    if code not in (0, 130) and kind != "SIGKILL":
        raise Hang(f"{victim.label} ended with {code} after {kind}: {victim.child.tail()}")


def _committed(peer: Peer) -> list[Told]:
    return [e for e in peer.told() if e.kind == COMMITTED]


def _resumed(
    box: Box, case: Case, peers: Sequence[Peer], before: Sequence[Told], down: float
) -> tuple[tuple[int, ...], float, int]:
    """Wait until every cell goes on. Returns the number of committed epochs that each cell does
    again, the seconds that these had taken in the worst cell, and the number of cells that go on
    from another history."""
    newest = _newest(before)

    def going() -> dict[str, int] | None:
        """Epoch of each cell's earliest plan after the end. In a run of several cells a plan does
        not name its cell, so the epoch before the earliest commit is taken."""
        found: dict[str, int] = {}
        for e in [e for p in peers for e in p.told() if e.at > down]:
            cell = str(e.get("cell", ""))
            epoch = int(e.get("epoch", -1))
            if case.cells == 1 and e.kind == PLANNED:
                found[""] = min(epoch, found.get("", epoch))
            elif case.cells > 1 and e.kind == COMMITTED:
                found[cell] = min(epoch - 1, found.get(cell, epoch))
        return found if found.keys() >= newest.keys() else None

    # A peer without its neighbours can make a plan that is never carried out. So all have to be
    # back.
    box.until_training(*peers)
    begun = box.wait("every cell to go on", going, 4 * START_S, tuple(peers))
    lost = tuple(max(0, newest[cell] - begun[cell]) for cell in sorted(newest))
    work_s = max(_work_s(before, cell, begun[cell], newest[cell]) for cell in newest)
    bases = _bases(case, peers, down)
    # A leader may have been stopped between a commit and telling it: then plans begin later.
    other = sum(
        begun[cell] == newest[cell] and lineage not in bases[cell]
        for cell, lineage in _lineages(before).items()
    )
    return lost, work_s, other


def _bases(case: Case, peers: Sequence[Peer], down: float) -> dict[str, set[str]]:
    """Lineages from which the next epoch of each cell was planned. For a run of one cell all plans
    after `down` count, otherwise only the plan behind the earliest commit."""
    told = sorted((e for p in peers for e in p.told()), key=lambda e: e.at)
    planned = [e for e in told if e.kind == PLANNED]
    if case.cells == 1:
        return {"": {str(e.get("lineage")) for e in planned if e.at > down}}
    base_of = {str(e.get("hash")): str(e.get("lineage")) for e in planned}
    found: dict[str, set[str]] = {}
    for e in told:
        if e.kind == COMMITTED and e.at > down:
            found.setdefault(str(e.get("cell", "")), {base_of.get(str(e.get("hash")), "")})
    return found


def _lineages(commits: Sequence[Told]) -> dict[str, str]:
    """The lineage that each cell committed last."""
    ordered = sorted(commits, key=lambda e: e.at)
    return {str(e.get("cell", "")): str(e.get("lineage")) for e in ordered}


def _newest(commits: Sequence[Told]) -> dict[str, int]:
    """The epoch that each cell committed last."""
    ordered = sorted(commits, key=lambda e: e.at)
    return {str(e.get("cell", "")): int(e.get("epoch")) for e in ordered}


def _work_s(commits: Sequence[Told], cell: str, begun: int, newest: int) -> float:
    """Seconds that a cell's epochs from ``begun`` to ``newest`` took, by their last commits."""
    took = {
        int(e.get("epoch")): float(e.get("seconds", 0.0))
        for e in sorted(commits, key=lambda e: e.at)
        if str(e.get("cell", "")) == cell
    }
    return sum(took.get(epoch, 0.0) for epoch in range(begun + 1, newest + 1))


# ------------------------------------------------------------ results


def _say(report: Report, case: Case, found: Sequence[Moment]) -> None:
    planned = [m for m in found if m.planned]
    killed = [m for m in found if not m.planned]
    kinds = ", ".join(f"{sum(m.kind == k for m in found)} {k}" for k in KINDS)
    lost = sum(sum(m.lost) for m in planned)
    report.add(
        f"1 epochs lost by {len(planned)} planned ends, {case.name}",
        lost,
        "epochs",
        f"{kinds}; {sum(m.everybody for m in found)} of everybody",
        "0",
        holds=lost == 0 and bool(planned),
    )
    other = sum(m.other for m in planned)
    report.add(
        f"1 cells that went on from another history after these, {case.name}",
        other,
        "cells",
        "by the lineage of versions, a hash of all plans before",
        "0",
        holds=other == 0 and bool(planned),
    )
    report.add(
        f"1 seconds until a planned end is over, {case.name}",
        median(m.end_s for m in planned if m.kind != "drain"),
        "s",
        f"at most {max(m.end_s for m in planned):.1f}, a drain's epoch included",
    )
    if killed:
        worst = max(m.work_s for m in killed)
        again = max(max(m.lost) for m in killed)
        report.add(
            f"1 committed work lost by {len(killed)} kills, {case.name}",
            worst,
            "s",
            f"at most {again} epochs; a moment every {case.pause_s / 2:.0f} s on average",
            f"at most {WITHIN_S:.0f}, or one epoch",
            holds=worst <= WITHIN_S or again <= 1,
        )


def _losses(told: Sequence[Told]) -> dict[int, set[str]]:
    """Epoch to all losses that were ever committed for it, to the last bit."""
    found: dict[int, set[str]] = {}
    for e in told:
        if e.kind == COMMITTED:
            found.setdefault(int(e.get("epoch")), set()).add(float(e.get("loss")).hex())
    return found


def _never_stopped(box: Box, case: Case, losses: Mapping[int, object]) -> dict[int, set[str]]:
    """The losses of the same run on one machine that nothing happens to, up to the same epoch. A
    cap on what a machine sends changes no number, nor does memory that its daemons share, and both
    are as usual."""
    other = Box(box.root / "never-stopped", settings=SETTINGS, forks=Forks())
    home = other.root / "ends-0"
    home.mkdir(parents=True)
    shutil.copy(box.root / "ends-0" / "identity.key", home)
    try:
        peer = other.peer("ends-0", "start", str(box.root / "swarm.toml"))
        other.start(peer)
        last = max(losses)
        seconds = START_S + last * 2.0
        other.wait(f"epoch {last} of {case.name}", lambda: other.epoch() >= last, seconds, (peer,))
        return _losses(peer.told())
    finally:
        other.clean_up()


def _compare(
    report: Report,
    case: Case,
    told: Sequence[Told],
    straight: Mapping[int, set[str]],
    killed: float,
) -> None:
    """Compare losses until the time ``killed``, at which one machine of several was killed. Others
    go back to a checkpoint then, and a micro-batch that comes before they are there is put off to
    the next epoch, so that the same samples are taken in another order."""
    parts = {"": [e for e in told if e.at < killed], " after a kill": told}
    for when, events in parts.items():
        losses = _losses(events)
        other = sorted(e for e in losses if len(losses[e]) != 1 or losses[e] != straight.get(e))
        apart = max((_apart(losses[e], straight.get(e, set())) for e in other), default=0.0)
        first = f", first at epoch {other[0]}, by at most {apart:.2g} of a loss" if other else ""
        row = (
            f"1 losses that differ from a run that never stopped{when}, {case.name}",
            len(other),
            "epochs",
            f"of {len(losses)}, compared to the last bit{first}",
        )
        if not when:
            report.add(*row, "0", holds=not other and bool(losses))
        elif killed < math.inf:
            report.add(*row)


def _apart(losses: Collection[str], straight: Collection[str]) -> float:
    """Largest relative difference between losses of one epoch, 0 where there is no other one."""
    values = [float.fromhex(loss) for loss in (*losses, *straight)]
    return (max(values) - min(values)) / max(values)
