"""Why nobody could work by a plan, whoever signed it: a plan comes from a peer, and is checked before anything is done by it. Pure.
Enters: a plan, what this peer knows for itself (its stage's parts, the manifest). Leaves: a reason, empty for none.
Never: the signature and the term: who hears the plan has looked at these."""

from __future__ import annotations

from node.core.errors import Refused
from node.core.ids import ENDS, PeerId
from node.core.journey import Plan
from node.pipeline.route import fewest_hops
from node.pipeline.settings import PipelineSettings
from node.training.meetings import meeting
from node.training.rounds import Rounds
from node.training.rules import Read, Rules, carries, due, sends


def objection(plan: Plan, me: PeerId, rounds: Rounds, pipeline: PipelineSettings, read: Read, epochs: int) -> str:
    """Asked by ``me``, whose stage has the parts of ``rounds``; ``epochs``: of the run."""
    try:
        rules = read(plan.change)
    except Refused as e:
        return str(e)
    number = due(rules, plan.since, plan.epoch, epochs)
    fragment = carries(rules, plan.since, plan.epoch, epochs)
    sending = sends(rules, plan.since, plan.epoch, epochs)
    if (plan.outer, plan.fragment, plan.sends) != (number, fragment, sending) or (number and plan.paths):
        return "an outer round when none is due, or none when one is"
    return _of_owners(plan, me, rounds, rules) or _of_paths(plan, pipeline)


def _of_owners(plan: Plan, who: PeerId, rounds: Rounds, rules: Rules) -> str:
    me = plan.member(who)
    if me is None:
        return ""
    meets = meeting(plan, rules.outer.fragments) if plan.sends else plan
    carried = rounds.carried(meets.fragment, rules.outer.fragments)
    mine = {m.peer for m in plan.cell(me.stage, me.cell) if m.current}
    unit = meets.unit_of(me)
    there, averagers = {m.peer for m in meets.unit(unit) if m.current}, meets.averagers(unit)
    if any(plan.owner(name, me.cell) not in mine for name in rounds.shapes) or any(
        averagers.get(name) not in there for name in carried
    ):
        return "a parameter of this stage has no owner among its members"
    if meets.fragment and averagers.keys() & rounds.shapes.keys() != carried:
        return "an outer round of other parts than are due"
    return ""


def _of_paths(plan: Plan, pipeline: PipelineSettings) -> str:
    fewest = fewest_hops(pipeline.stages, pipeline.may_skip)
    current = {(m.stage, m.peer) for m in plan.members if m.current}
    for path in plan.paths:
        if len(path.samples) != pipeline.micro_batch or (ENDS, path.origin) not in current:
            return "a micro-batch of the wrong size, or without an ends peer"
        visited = {h.stage for h in path.hops}
        if not (len(visited) == len(path.hops) >= fewest and visited <= set(range(1, pipeline.stages + 1))):
            return "a path that does not visit enough block stages, each once at most"
        if any((h.stage, h.peer) not in current for h in path.hops):
            return "a path over somebody who is no current member"
    return ""
