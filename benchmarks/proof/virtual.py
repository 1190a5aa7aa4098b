"""Goodput while peers die, in virtual time: the daemon's own services over simulated lines, so that
no other program's load is in the figures.

Twelve peers train over lines of a few Mbit/s. Every fifteen seconds one of them dies, and a
newcomer comes at once in its place. Goodput is as in :mod:`benchmarks.proof.goodput`.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Report
from node.core.ids import PeerId
from node.scheduler.settings import SchedulerSettings
from node.sim.faults import Fault, strike
from node.sim.setup import LinkProfile, Setup, WorkTimes, toy_parts
from node.sim.swarm import SimSwarm
from node.sim.world.loop import quiet

STAGES = 3
EVERY_S = 15.0
SETTLES_S = 60.0
QUIET_S = 120.0
DEATHS_S = 600.0
LOOK_S = 0.25
LEAST = 0.93
LEADER = "kill-leader"
ANY = "kill"
PEER = "Decoupled DiLoCo reports 0.88"


@dataclass(frozen=True)
class Case:
    """A swarm and its deaths. ``nodes``: peers at the ends and of each block stage."""

    name: str
    nodes: Sequence[int]
    kind: str


CASES = (
    Case("any peer", (3, 3, 3, 3), ANY),
    Case("leaders alone", (3, 3, 3, 3), LEADER),
    Case("any peer, two stages of three with one replica", (4, 6, 1, 1), ANY),
)


@dataclass
class Watched:
    """A simulated swarm, looked at from outside. ``live``: numbers of live members, one each
    :data:`LOOK_S`."""

    swarm: SimSwarm
    live: list[int] = field(default_factory=list)

    def stretch(self, seconds: float) -> tuple[float, float, list[float]]:
        """Let time pass. Returns tokens a second and the mean number of live members between the
        last commits before the beginning and before the end, and the seconds between commits."""
        world = self.swarm.world
        commits = self.swarm.watch.commits
        began = commits[-1].at
        first = len(self.live)
        end = world.now + seconds
        while world.now < end:
            world.run(min(end, world.now + LOOK_S), None)
            self.live.append(self._members())
        found = {c.epoch: c for c in commits if c.at > began}
        times = [began, *sorted(c.at for c in found.values())]
        gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
        rate = sum(c.tokens for c in found.values()) / (times[-1] - began)
        return rate, statistics.fmean(self.live[first:]), gaps

    def _members(self) -> int:
        """Current members of the newest plan that are alive."""
        chief = self.swarm.chief()
        newest = None
        if chief is not None and chief.leader is not None:
            newest = chief.leader.memory.history
        if newest is None:
            return 0
        peers = self.swarm.peers
        return sum(m.current and m.peer in peers and peers[m.peer].alive for m in newest.members)


def setup(nodes: Sequence[int]) -> Setup:
    """The swarm without the peers of a stage above the fewest."""
    return Setup(
        ends=nodes[0],
        stages=STAGES,
        replicas=min(nodes[1:]),
        epochs=1 << 20,
        micro_batches=12,
        micro_batch=8,
        tokens=8 * 128,
        parts=toy_parts(STAGES, 6),
        activation=1 << 17,
        epoch_timeout_s=60.0,
        round_timeout_s=30.0,
        forward_timeout_s=20.0,
        in_flight=8,
        stash=256,
        checkpoint_every=5,
        links=LinkProfile(0.02, 0.005, 8e6, 0.0),
        work=WorkTimes(0.01, 0.02, 0.005, 0.1, 1.1),
        scheduler=SchedulerSettings(),
    )


def rows(report: Report, root: Path, quick: bool = False) -> None:
    """A row of goodput for each case, and a row of the epochs that deaths made longer."""
    for case in CASES:
        with quiet():
            _case(report, case, 90.0 if quick else DEATHS_S)


def _replace(swarm: SimSwarm, fault: Fault) -> None:
    """Let a peer die and a newcomer come in its place. Nobody comes where nobody can die: no peer
    leads, or the stage would be lost."""
    before = len(swarm.struck)
    strike(swarm, fault)
    if len(swarm.struck) > before:
        _, _, victim, _ = swarm.struck[-1]
        swarm.add(swarm.peers[PeerId(victim)].stage)


def _case(report: Report, case: Case, seconds: float) -> None:
    swarm = SimSwarm(setup(case.nodes), seed=1)
    few = min(case.nodes[1:])
    for stage, count in enumerate(case.nodes[1:], 1):
        for _ in range(count - few):
            swarm.add(stage)
    watched = Watched(swarm)
    swarm.world.run(SETTLES_S, None)
    usual, all_live, gaps = watched.stretch(QUIET_S)
    dice = random.Random(1)
    for i in range(int(seconds / EVERY_S)):
        at = EVERY_S * (i + dice.random())
        swarm.world.push(at, _replace, swarm, Fault(0.0, case.kind, dice.randrange(1000)))
    rate, live, rough = watched.stretch(seconds)
    deaths = sum(kind == case.kind for _, kind, *_ in swarm.struck)
    share = live / all_live
    goodput = rate / usual / share
    epoch_s = statistics.fmean(gaps)
    report.add(
        f"3 virtual time, goodput with a death every {EVERY_S:.0f} s: {case.name}",
        goodput,
        "ratio",
        f"{deaths} deaths; {rate / usual:.3f} of the quiet rate with {share:.3f} of the peers; an "
        f"epoch in {epoch_s:.2f} s; {PEER}",
        f"at least {LEAST}",
        holds=goodput >= LEAST and deaths > 1,
    )
    longest = sorted((gap - epoch_s for gap in rough), reverse=True)
    report.add(
        f"3 virtual time, longest delay of a commit: {case.name}",
        longest[0],
        "seconds of virtual time",
        "each of the longest: " + ", ".join(f"{s:.1f}" for s in longest[:deaths]),
    )
