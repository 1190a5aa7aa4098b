"""Reasons why micro-batches go where they go, in lines for people. Pure.

Enters: a plan and, at the leader, the costs that it believes. Never: a reason that cannot be read
off them.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, groupby, islice
from statistics import mean

from node.core.ids import ENDS, PeerId, short
from node.core.journey import Path, Plan, PlanMember
from node.scheduler.costs import Costs

SHOWN = 8
"""Different routes that are listed, at most."""
RUNS = 3
"""Runs of micro-batch numbers that are listed for one route, at most."""
APART = 1.15
"""Factor from which a peer is called slower or farther than a sibling."""


def reasons(plan: Plan, stages: int, costs: Costs | None = None) -> list[str]:
    """How the micro-batches of ``plan`` go over ``stages`` block stages, and why the replicas of a
    stage get unequal work."""
    live = {m.stage for m in plan.members if m.current}
    ways: dict[str, list[int]] = {}
    for path in plan.paths:
        ways.setdefault(_way(path, stages, live), []).append(path.index)
    lines = [f"{_numbers(ways[way])} {way}" for way in islice(ways, SHOWN)]
    if more := sum(map(len, islice(ways.values(), SHOWN, None))):
        lines.append(f"and {more} more")
    work = Counter(hop.peer for path in plan.paths for hop in path.hops)
    for stage in range(1, stages + 1):
        lines += _shares(plan, stage, work, costs)
    return lines


def _numbers(indices: Sequence[int]) -> str:
    """Ascending numbers as text; a run of consecutive numbers is written by its ends: 0-3, 5. After
    the first runs only the number of the rest is given."""
    grouped = groupby(enumerate(indices), lambda at: at[1] - at[0])
    runs = [[index for _, index in run] for _, run in grouped]
    said = ["-".join(map(str, sorted({run[0], run[-1]}))) for run in runs[:RUNS]]
    more = sum(map(len, runs[RUNS:]))
    if more:
        said.append(f"{more} more")
    return ", ".join(said)


def _way(path: Path, stages: int, live: set[int]) -> str:
    hops = [hop.stage for hop in path.hops]
    why: list[str] = []
    for stage in range(1, stages + 1):
        if stage not in hops:
            reason = "nobody there"
            if stage in live:
                reason = "its turn"
            why.append(f"skips stage {stage} ({reason})")
    why += [
        f"stage {stage} after {front} (shorter so)"
        for stage, front in zip(hops, accumulate(hops, max), strict=True)
        if stage < front
    ]
    way = " > ".join(f"{hop.stage}:{short(hop.peer)}" for hop in path.hops)
    line = f"from {short(path.origin)} > {way}"
    if why:
        line += f"  {', '.join(why)}"
    return line


def _shares(plan: Plan, stage: int, work: Counter[PeerId], costs: Costs | None) -> list[str]:
    cell = [m for m in plan.stage(stage) if m.current]
    if len(cell) < 2 or len({work[m.peer] for m in cell}) == 1:
        return []
    total = sum(work[m.peer] for m in cell)
    most = max(cell, key=lambda m: (work[m.peer], m.peer))
    return [
        f"stage {stage}: {short(m.peer)} gets {work[m.peer]} of {total}, "
        f"{_why(plan, m, most, costs) or _remainder(total, len(cell))}"
        for m in cell
        if work[m.peer] < work[most.peer]
    ]


def _remainder(total: int, peers: int) -> str:
    """The reason for unequal work among peers that are equally fast and near."""
    if total % peers:
        return f"{total} cannot be dealt equally to {peers} peers"
    return "so the paths of this epoch were dealt"


def _why(plan: Plan, member: PlanMember, most: PlanMember, costs: Costs | None) -> str:
    """Reason for which ``member`` gets less work than ``most``; empty if they are equally good."""
    here, there = (
        (costs.compute.get(m.peer) if costs else None) or (1 / m.speed if m.speed else 0.0)
        for m in (member, most)
    )
    if there and here >= APART * there:
        return f"it is {here / there:.1f}x slower than {short(most.peer)}"
    ends = [m.peer for m in plan.members if m.stage == ENDS and m.current]
    if costs is not None and costs.ways and ends:
        here, there = (
            mean(costs.delay(e, m.peer) + costs.delay(m.peer, e) for e in ends)
            for m in (member, most)
        )
        if there > 0 and here >= APART * there:
            return f"it is {here / there:.1f}x farther from the ends than {short(most.peer)}"
    return ""
