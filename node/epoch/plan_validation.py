"""Checks whether anybody could work by a plan, whoever signed it: a plan comes from a peer, and is
checked before anything is done by it. Pure. Enters: a plan, and this peer's own knowledge (its
stage's parts, the manifest). Leaves: a reason against the plan, empty for none. Never: the
signature and the term; the receiver of the plan has checked these."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from node.consensus.rules import Read
from node.core.errors import Refused
from node.core.ids import ENDS, PeerId
from node.core.journey import Path, Plan
from node.pipeline.route import fewest_hops
from node.pipeline.settings import PipelineSettings
from node.scheduler.link_formats import links
from node.scheduler.promises import broken_promise, unfair_share
from node.scheduler.settings import SchedulerSettings

MOST_PARTNERS = 64
"""Bound on the partners of a window."""
MOST_WITHIN_S = 1e6
"""Bound on the length of a window, in seconds."""


def objection(
    plan: Plan,
    me: PeerId,
    shapes: Mapping[str, tuple[int, ...]],
    pipeline: PipelineSettings,
    read: Read,
    *,
    scheduler: SchedulerSettings,
    micro_batches: int,
) -> str:
    """The reason why nobody could work by ``plan``; "" if there is none. ``me`` is the peer that
    checks, and its stage has parameters of these ``shapes``; ``scheduler`` and ``micro_batches`` of
    an epoch are the manifest's."""
    try:
        read(plan.change)
    except Refused as e:
        return str(e)
    if plan.parent:
        return _of_founding(plan, pipeline.stages)
    return (
        _of_window(plan)
        or _of_owners(plan, me, shapes)
        or of_paths(plan, pipeline, scheduler, micro_batches)
        or _of_wires(plan, pipeline)
    )


def _of_founding(plan: Plan, stages: int) -> str:
    """The reason why no cell can begin with this plan; "" if there is none."""
    if plan.paths or plan.outer or plan.cell_id in ("", plan.parent):
        return "a plan that founds a cell and has work in it, or founds no other cell"
    if {m.stage for m in plan.members} != set(range(stages + 1)):
        return "a cell that lacks a stage"
    return ""


def _of_window(plan: Plan) -> str:
    """The reason why a cell cannot average with others by this plan; "" if there is none."""
    w = plan.window
    if bool(plan.outer) != bool(w.means) or (plan.outer and (plan.paths or w.number)):
        return "an outer round with work in it, or without a mean"
    if len(w.partners) >= MOST_PARTNERS or w.within_s > MOST_WITHIN_S:
        return "a window with more partners, or a longer one, than any"
    return ""


def _of_owners(plan: Plan, who: PeerId, shapes: Mapping[str, tuple[int, ...]]) -> str:
    me = plan.member(who)
    if me is None:
        return ""
    mine = {m.peer for m in plan.stage(me.stage) if m.current}
    alone = any(plan.owners.get(name) not in mine for name in shapes)
    if alone:
        return "a parameter of this stage has no owner among its members"
    return ""


def of_paths(
    plan: Plan, pipeline: PipelineSettings, scheduler: SchedulerSettings, micro_batches: int
) -> str:
    """The reason why the planner of a run with these settings lays no such paths; "" if there is
    none. Takes time in proportion to the hops of the plan."""
    if not plan.paths:
        return ""
    current = {(m.stage, m.peer) for m in plan.members if m.current}
    why = _of_micro_batches(plan.paths, current, pipeline, micro_batches)
    if why:
        return why
    live = {stage for stage, _ in current} - {ENDS}
    if why := broken_promise(plan.paths, live, scheduler, pipeline.stages):
        return why
    ends = [(m.peer, m.speed) for m in plan.members if m.current and m.stage == ENDS]
    return unfair_share(Counter(path.origin for path in plan.paths), ends)


def _of_wires(plan: Plan, pipeline: PipelineSettings) -> str:
    """The reason why nobody could send in the formats of this plan; "" if there is none."""
    if not plan.wires:
        return ""
    allowed = pipeline.wires[1:]
    if any(wire not in allowed for wire in plan.wires.values()):
        return "a link in a number format that the settings do not allow"
    if not plan.wires.keys() <= links(plan.paths).keys():
        return "a number format for a link that no micro-batch takes"
    return ""


def _of_micro_batches(
    paths: Sequence[Path],
    current: Set[tuple[int, PeerId]],
    pipeline: PipelineSettings,
    micro_batches: int,
) -> str:
    if len(paths) != micro_batches or any(i != path.index for i, path in enumerate(paths)):
        return f"other micro-batches than 0 to {micro_batches - 1}"
    fewest = fewest_hops(pipeline.stages, pipeline.may_skip)
    stages = range(1, pipeline.stages + 1)
    for path in paths:
        if len(path.samples) != pipeline.micro_batch or (ENDS, path.origin) not in current:
            return "a micro-batch of the wrong size, or without an ends peer"
        visited = {h.stage for h in path.hops}
        if not (len(visited) == len(path.hops) >= fewest and all(s in stages for s in visited)):
            return "a path that does not visit enough block stages, each once at most"
        if any((h.stage, h.peer) not in current for h in path.hops):
            return "a path over somebody who is no current member"
    if len({s for path in paths for s in path.samples}) < len(paths) * pipeline.micro_batch:
        return "a sample in two micro-batches, or twice in one"
    return ""
