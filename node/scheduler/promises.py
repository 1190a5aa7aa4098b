"""Check of an epoch's paths against the promises that the run's settings make for every plan, for
members, who see the plan only. Pure.

Enters: paths, the members that can be on them, settings. Leaves: a reason, empty if all promises
hold. Never: a comparison with shorter paths, debts, or proven connections: only the leader has
measured costs, earlier paths and proofs.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from node.core.ids import PeerId
from node.core.journey import Path
from node.scheduler.planning.problem import MOST_COUNT
from node.scheduler.planning.rules import jumps_too_far, swaps_too_much
from node.scheduler.quotas import NOMINAL
from node.scheduler.settings import SchedulerSettings

ROUNDING = 1e-9
"""Relative; turns multiply seconds, and here counts are divided by speeds."""


def broken_promise(
    paths: Sequence[Path], live: Collection[int], settings: SchedulerSettings, stages: int
) -> str:
    """Check how the paths go through the block stages: the number of stages each visits, how far it
    swaps and jumps, and how often every stage is visited. ``live``: the block stages, of the run's
    ``stages``, with a current member. Returns the reason for which a promise is broken, empty if
    all hold. Takes time in proportion to the hops."""
    hops = settings.hops(stages)
    rows = sorted(live)
    place = {s: k for k, s in enumerate(rows, 1)}
    jump = settings.max_jump or MOST_COUNT
    visits: Counter[int] = Counter()
    # Few orders are different, and most paths share one.
    for order, count in Counter(tuple(h.stage for h in path.hops) for path in paths).items():
        if len(order) != hops:
            return f"a path over {len(order)} block stages, where the settings say {hops}"
        # Stages without members are not there: the bounds count places among those that are.
        at = [place[s] for s in order]
        swaps = swaps_too_much(at, settings.max_swaps, max(1, settings.max_swaps))
        if why := swaps or jumps_too_far(at, jump):
            return why
        for s in order:
            visits[s] += count
    kept = settings.kept(rows, hops)
    if any(visits[s] != len(paths) for s in kept):
        return (
            f"a path that leaves out one of the stages 1 to {settings.keep_first}, which are kept"
        )
    shared = [visits[s] for s in rows[len(kept) :]]
    if shared and max(shared) - min(shared) > 1:
        return f"block stages that share visits get {min(shared)} to {max(shared)} of them"
    return ""


def unfair_share(counts: Mapping[PeerId, int], ends: Sequence[tuple[PeerId, float]]) -> str:
    """The reason why no fair split of micro-batches by these speeds of the ends peers (0: unknown)
    gives these shares; empty if the shares are fair. ``counts``: micro-batches of the peers that
    start some. Peers without micro-batches are left alone: they may have no proven path.

    :func:`node.scheduler.quotas.quotas` gives each micro-batch to the peer that would finish it
    first. So no peer finishes its last one later than another would finish one more. All peers of
    unknown speed count as equally fast, at some speed between the known ones.
    """
    able = [(p, v) for p, v in ends if counts.get(p)]
    known = [(counts[p], v) for p, v in able if 0 < v < math.inf]
    unknown = [counts[p] for p, v in able if not 0 < v < math.inf]
    late = max((c / v for c, v in known), default=0.0)
    """Time at which the last of them is done, and below the first time at which one more would
    be."""
    soon = min(((c + 1) / v for c, v in known), default=math.inf)
    fair = late <= soon * (1 + ROUNDING)
    if fair and unknown:
        speeds = [v for _, v in ends if 0 < v < math.inf] or [NOMINAL]
        slowest = max(min(speeds), max(unknown) / soon)
        fastest = max(speeds)
        if late:
            fastest = min(fastest, (min(unknown) + 1) / late)
        fair = max(unknown) <= min(unknown) + 1 and slowest <= fastest * (1 + ROUNDING)
    if fair:
        return ""
    return "ends peers start micro-batches by other shares than their speeds"
