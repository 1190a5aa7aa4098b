"""Why nobody could work by a plan, whoever signed it: a plan comes from a peer, and is checked
before anything is done by it. Pure. Enters: a plan, what this peer knows for itself (its stage's
parts, the manifest). Leaves: a reason, empty for none. Never: the signature and the term: who hears
the plan has looked at these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from node.averaging.strategies.outer import DIRECTED, OuterSettings
from node.core.errors import Refused
from node.core.ids import ENDS, PeerId
from node.core.journey import Path, Plan, Unit, Version
from node.pipeline.route import fewest_hops
from node.pipeline.settings import PipelineSettings
from node.scheduler.promises import broken_promise, unfair_share
from node.scheduler.settings import SchedulerSettings
from node.training.protocol.edges import WHOLE, adds_up
from node.training.protocol.meetings import Meetings, meeting
from node.training.protocol.plan_context import worked_after
from node.training.protocol.rules import LEVEL, Read, Rules, carries, due, levels, sends

MOST_PARTNERS, MOST_WITHIN_S = 64, 1e6
"""Of one window."""


class PartsPort(Protocol):
    """The parts of a stage: :class:`node.training.rounds.common.Rounds`, of which nobody here needs
    the tensors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def carried(self, fragment: int, fragments: int) -> frozenset[str]: ...


def objection(
    plan: Plan,
    me: PeerId,
    rounds: PartsPort,
    pipeline: PipelineSettings,
    read: Read,
    epochs: int,
    here: Version,
    followed: Plan | None = None,
    *,
    scheduler: SchedulerSettings,
    micro_batches: int,
) -> str:
    """Asked by ``me``, whose stage has the parts of ``rounds``; ``scheduler`` and ``micro_batches``
    of an epoch are the manifest's; the rest as in :func:`of_averaging`."""
    try:
        rules = read(plan.change)
    except Refused as e:
        return str(e)
    if plan.parent:
        return _of_founding(plan, pipeline.stages)
    return (
        of_averaging(plan, rules, epochs, here, followed)
        or _of_owners(plan, me, rounds, rules)
        or of_paths(plan, pipeline, scheduler, micro_batches)
    )


def of_averaging(
    plan: Plan, rules: Rules, epochs: int, here: Version, followed: Plan | None = None
) -> str:
    """Why cells cannot average so, whichever parts there are. ``epochs``: of the run; ``here``: the
    version in place; ``followed``: the plan that this peer took part in last, if any."""
    if rules.outer.windows:
        return _of_window(plan)
    number = due(rules, plan.since, plan.epoch, epochs)
    fragment = carries(rules, plan.since, plan.epoch, epochs)
    sending = sends(rules, plan.since, plan.epoch, epochs)
    if (plan.outer, plan.fragment, plan.sends) != (number, fragment, sending) or (
        number and plan.paths
    ):
        return "an outer round when none is due, or none when one is"
    # What is in place was made by the plan followed last, unless it came from elsewhere; between
    # two terms there may have been another plan from the same version, which counts and was not
    # heard of here.
    made = (
        followed is not None
        and (followed.epoch + 1, followed.term + 1) == (plan.epoch, plan.term)
        and here == plan.base
    )
    settings = LEVEL if levels(plan) else rules.outer
    before = followed if made else None
    return of_edges(plan, settings) or of_mass(plan, settings, before) or of_work(plan, before)


def _of_founding(plan: Plan, stages: int) -> str:
    """Why no cell can begin so."""
    if plan.paths or plan.outer or plan.cell_id in ("", plan.parent):
        return "a plan that founds a cell and has work in it, or founds no other cell"
    if {m.stage for m in plan.members} != set(range(stages + 1)):
        return "a cell that lacks a stage"
    return ""


def _of_window(plan: Plan) -> str:
    """Why a cell that leads itself cannot meet others so."""
    w = plan.window
    if bool(plan.outer) != bool(w.means) or (plan.outer and (plan.paths or w.number)):
        return "an outer round with work in it, or without a mean"
    if plan.fragment or plan.sends or plan.senders or plan.mass or plan.worked or plan.reducers:
        return "an outer round of cells that one leader plans for"
    if any(m.cell or m.group for m in plan.members):
        return "members of several cells"
    if len(w.partners) >= MOST_PARTNERS or w.within_s > MOST_WITHIN_S:
        return "a window with more partners, or a longer one, than any"
    return ""


def _of_owners(plan: Plan, who: PeerId, rounds: PartsPort, rules: Rules) -> str:
    me = plan.member(who)
    if me is None:
        return ""
    meets = meeting(plan, rules.outer.fragments) if plan.sends else plan
    carried = rounds.carried(meets.fragment, rules.outer.fragments)
    mine = {m.peer for m in plan.cell(me.stage, me.cell) if m.current}
    if rules.outer.windows:
        alone = any(plan.owner(name, me.cell) not in mine for name in rounds.shapes)
        return "a parameter of this stage has no owner among its members" if alone else ""
    unit = meets.unit_of(me)
    there, averagers = {m.peer for m in meets.unit(unit) if m.current}, meets.averagers(unit)
    if any(plan.owner(name, me.cell) not in mine for name in rounds.shapes) or any(
        averagers.get(name) not in there for name in carried
    ):
        return "a parameter of this stage has no owner among its members"
    if meets.fragment and averagers.keys() & rounds.shapes.keys() != carried:
        return "an outer round of other parts than are due"
    return ""


def of_edges(plan: Plan, settings: OuterSettings) -> str:
    """Why these are not the edges of the strategy: every peer works them out from the cells and the
    number of the round."""
    edges: dict[Unit, tuple[int, ...]] = {}
    if plan.outer and settings.strategy in DIRECTED:
        meetings = Meetings(settings, {}, 0, 0)  # no strategy with edges throws dice
        for stage in {m.stage for m in plan.members if m.current}:
            edges |= {
                (stage, cell): among
                for cell, among in meetings.senders(plan.cells(stage), plan.outer).items()
            }
    if plan.senders != edges:
        return "edges between cells that are not those of the strategy"
    if edges and any(m.group != m.cell for m in plan.members if (m.stage, m.cell) in edges):
        return "cells in one group where each makes a mean of its own"
    return ""


def of_mass(plan: Plan, settings: OuterSettings, before: Plan | None) -> str:
    """Why cells cannot weigh what the plan says."""
    weighed = bool(settings.every) and settings.strategy == "push-sum"
    units = {(m.stage, m.cell) for m in plan.members if m.current} if weighed else set()
    if plan.mass.keys() != units or any(mass < 1 for mass in plan.mass.values()):
        return "masses that are not of its cells, or not above 0"
    for stage in {stage for stage, _ in plan.mass}:
        here = [mass for (at, _), mass in plan.mass.items() if at == stage]
        if 2 * sum(here) <= len(here) * WHOLE:
            return "cells with less than half of the mass that they begin with"
    if before is not None and not adds_up(plan, before):
        return "masses that do not add up to what the plan before leaves"
    return ""


def of_work(plan: Plan, before: Plan | None) -> str:
    """Why no cell can have worked so much since it met others, by which it is weighed when it does.
    A cell that was cut from another goes on from what that one did, so the most of the stage bounds
    each."""
    most: dict[int, int] = {}
    for (stage, _), count in (
        worked_after(before, ()) if before is not None else plan.worked
    ).items():
        most[stage] = max(count, most.get(stage, 0))
    if any(count > most.get(stage, 0) for (stage, _), count in plan.worked.items()):
        return "a cell that has worked more than the plan before gave any"
    return ""


def of_paths(
    plan: Plan, pipeline: PipelineSettings, scheduler: SchedulerSettings, micro_batches: int
) -> str:
    """Why the planner of a run with these settings lays no such paths. Takes time in proportion to
    the hops of the plan."""
    if not plan.paths:
        return ""
    current = {(m.stage, m.peer) for m in plan.members if m.current}
    why = _of_micro_batches(plan.paths, current, pipeline, micro_batches)
    if why:
        return why
    live = {stage for stage, _ in current} - {ENDS}
    if len({(m.stage, m.cell) for m in plan.members if m.current}) > len(live) + 1:
        return ""  # a stage has several cells, and each column of them turns of its own
    if why := broken_promise(plan.paths, live, scheduler, pipeline.stages):
        return why
    ends = [(m.peer, m.speed) for m in plan.members if m.current and m.stage == ENDS]
    skips = scheduler.hops(pipeline.stages) < len(live)
    return unfair_share(Counter(path.origin for path in plan.paths), ends, skips)


def _of_micro_batches(
    paths: Sequence[Path],
    current: Set[tuple[int, PeerId]],
    pipeline: PipelineSettings,
    micro_batches: int,
) -> str:
    if len(paths) != micro_batches or any(i != path.index for i, path in enumerate(paths)):
        return f"other micro-batches than 0 to {micro_batches - 1}"
    fewest, stages = fewest_hops(pipeline.stages, pipeline.may_skip), range(1, pipeline.stages + 1)
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
