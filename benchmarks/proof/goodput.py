"""Goodput while peers die. Twelve daemons train over slow lines in network namespaces, so that the
cores are not the limit. Every fifteen seconds one of them is killed (SIGKILL), and a newcomer joins
at once in its place: by invite, from a process that has loaded the program already.

Goodput is the number of committed tokens over that of the quiet swarm in the same time, times the
share of live peers. A peer is live from the first plan with it to its death. Both sides are the
same swarm: first without deaths, then with deaths. Epochs that do not hold count for nothing.
"""

import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from benchmarks.shared.churn import Churn
from benchmarks.shared.load import Moment
from node.identity.keys import Identity
from testbed.daemons.books import COMMITTED, PLANNED, Books
from testbed.daemons.fleet import Hang
from testbed.daemons.forks import Forks
from testbed.daemons.told import Told
from testbed.networks.wan import why_not
from testbed.swarms.arena import Arena, arena

EVEN = (3, 3, 3, 3)
"""Three peers at the ends and of each block stage."""
THIN = (4, 6, 1, 1)
"""Two of three block stages with one replica. It is never killed: no other peer has its stage."""
SHAPE: dict[str, Any] = {
    "model__layers": 3,
    "model__seq_len": 128,
    "pipeline__stages": 3,
    "pipeline__micro_batch": 8,
    "training__target_batch": 192,
    "training__epochs": 100_000,
    "training__eval_every": 0,
    "training__min_replicas": 1,
    "training__rebalance_every_s": 0.0,
}
RATE_BPS = 3e6
DELAY_S = 0.02
"""Of every line between two hosts, each way."""
SETTLES_S = 20.0
"""Seconds on slow lines before anything is measured."""
EVERY_S = 15.0
STUCK_S = 120.0
"""Longest time without a new epoch."""
LEAST = 0.93
BUSY = 0.6
"""Most of the cores' time that the quiet swarm may take."""
PEER = "Decoupled DiLoCo reports 0.88"


@dataclass(frozen=True)
class Lengths:
    """Seconds of each part of the measurement."""

    quiet: float = 45.0
    any: float = 240.0
    leaders: float = 105.0
    thin: float = 105.0


FULL = Lengths()
QUICK = Lengths(30.0, 75.0, 45.0, 45.0)


@dataclass(frozen=True)
class Stretch:
    """A part of a story from one commit to another: tokens of the epochs that hold, seconds,
    seconds between commits, and peers that were live, as a mean over time."""

    tokens: int
    seconds: float
    gaps: tuple[float, ...]
    live: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def rows(report: Report, root: Path, quick: bool = False, lengths: Lengths | None = None) -> None:
    """Rows of deaths of any peers, of leaders, and with two thin stages. Without the right to make
    network namespaces: one row that does not hold. ``lengths``: others than those of ``quick``."""
    if why := why_not():
        report.add("3 swarms measured", 0, "swarms", why, "2", holds=False)
        return
    lengths = lengths or (QUICK if quick else FULL)
    with contextlib.closing(Forks()) as forks:
        _swarm(report, forks, EVEN, lengths.quiet, {"": lengths.any, "leaders": lengths.leaders})
        _swarm(report, forks, THIN, lengths.quiet, {"two thin stages": lengths.thin})


def _swarm(
    report: Report,
    forks: Forks,
    nodes: Sequence[int],
    quiet_s: float,
    parts: dict[str, float],
) -> None:
    """Measure one swarm: quiet, then with deaths. ``parts``: seconds by the name of what is special
    about the deaths."""
    with arena(nodes, forks=forks, **SHAPE) as a:
        assert a.wan is not None
        a.wan.shape_all(rate_bps=RATE_BPS, delay_s=DELAY_S)
        _watch(a, SETTLES_S)
        before = Moment.now()
        quiet = _watch(a, quiet_s)
        busy = _busy(before, Moment.now())
        name = f"3 quiet, {' + '.join(map(str, nodes))} peers"
        report.add(
            f"{name}: time of the cores that the swarm takes",
            busy,
            "share",
            f"{quiet.rate:.0f} tokens a second, an epoch in {statistics.median(quiet.gaps):.1f} s",
            f"at most {BUSY}",
            holds=busy <= BUSY,
        )
        for special, seconds in parts.items():
            churn = Churn(a, seed=1, leading=special == "leaders", invites=8)
            rough = _watch(a, seconds, churn)
            _told(report, a, special, quiet, rough, churn)


def _busy(before: Moment, after: Moment) -> float:
    return (after.ours - before.ours) / (after.all - before.all)


def _watch(a: Arena, seconds: float, churn: Churn | None = None) -> Stretch:
    """Look on from the next commit to the first one after ``seconds``; with ``churn`` a peer dies
    every fifteen seconds. Raises Hang."""
    a.epochs(1, STUCK_S)
    began = a.commits()[-1].at
    due = began + EVERY_S / 2
    while (now := time.time()) < began + seconds:
        last = a.commits()[-1].at
        if now - last > STUCK_S:
            raise Hang(f"no epoch for {STUCK_S:.0f} s")
        if churn is not None:
            if now >= due:
                churn.strike()
                due += EVERY_S
            churn.mind()
        time.sleep(0.5)
    a.epochs(1, STUCK_S)
    kills = [] if churn is None else [at for at, _ in churn.kills]
    return stretch(a.read(), kills, began, a.commits()[-1].at)


def stretch(events: Sequence[Told], kills: Sequence[float], began: float, end: float) -> Stretch:
    """The part of a story between two commits. ``kills``: times of deaths."""
    held = [h.commit for h in Books(events).history().values() if h.commit is not None]
    found = sorted((c for c in held if began < c.at <= end), key=lambda c: c.at)
    times = [began, *(c.at for c in found)]
    gaps = tuple(b - a for a, b in zip(times, times[1:], strict=False))
    tokens = sum(int(c.get("tokens")) for c in found)
    return Stretch(tokens, end - began, gaps, live_peers(events, kills, began, end))


def live_peers(events: Sequence[Told], kills: Sequence[float], began: float, end: float) -> float:
    """Mean over time of the members of the newest plan, without listeners and without those that
    died since."""
    plans = [
        (e.at, int(e.get("members")) - int(e.get("listeners"))) for e in events if e.kind == PLANNED
    ]
    changes = sorted([*plans, *((at, None) for at in kills)], key=lambda change: change[0])
    live = 0
    total = 0.0
    since = began
    for at, members in changes:
        if at > end:
            break
        if at > since:
            total += live * (at - since)
            since = at
        live = live - 1 if members is None else members
    total += live * (end - since)
    return total / (end - began)


def _told(
    report: Report, a: Arena, special: str, quiet: Stretch, rough: Stretch, churn: Churn
) -> None:
    """Rows of one way to die."""
    share = rough.live / quiet.live
    goodput = rough.rate / quiet.rate / share
    who = f" ({special})" if special else ""
    usual = statistics.median(quiet.gaps)
    lost = sorted(gap - usual for gap in rough.gaps)
    began = churn.kills[0][0] if churn.kills else time.time()
    notices = _notices(a, churn)
    report.add(
        f"3 goodput with a death every {EVERY_S:.0f} s{who}",
        goodput,
        "x",
        f"{len(churn.kills)} deaths, {churn.leaders} of leaders; {rough.rate / quiet.rate:.3f} of "
        f"the quiet rate with {share:.3f} of the peers; {PEER}",
        f"at least {LEAST}",
        holds=goodput >= LEAST and len(churn.kills) > 1,
    )
    report.add(
        f"3 seconds that the slowest epochs took longer than a quiet one{who}",
        lost[-1],
        "s",
        f"of {len(lost)}: " + ", ".join(f"{s:.1f}" for s in lost[: -len(churn.kills) - 1 : -1]),
    )
    report.add(
        f"3 seconds until a death is noticed{who}",
        max(notices, default=0.0),
        "s",
        "each: " + ", ".join(f"{s:.1f}" for s in notices),
    )
    arrived = churn.arrived_s or [0.0]
    report.add(
        f"3 newcomer, from its start to its place in a plan{who}",
        statistics.median(arrived),
        "s, median",
        f"{len(churn.arrived_s)} newcomers; {len(churn.given_up)} gave up",
    )
    losses = a.books().losses()
    commits = [c for c in a.read() if c.kind == COMMITTED and c.at >= began]
    dropped = sum(int(c.get("dropped", 0)) for c in commits)
    report.add(
        f"3 epochs begun and given up{who}",
        losses.abandoned,
        "epochs",
        f"{losses.again} committed and lost again; {dropped} micro-batches did not count",
        "0 committed and lost again",
        holds=losses.again == 0,
    )


def _notices(a: Arena, churn: Churn) -> list[float]:
    """Seconds from each death to the first word of another peer about it."""
    books = a.books()
    found: list[float] = []
    for at, label in churn.kills:
        key = Identity.load(a.box.root / label / "identity.key").peer_id
        notice = books.first_notice(at, (label,), {key})
        if notice is not None:
            found.append(notice.at - at)
    return found
