"""Inconsistent plans meet an objection, whoever signed them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from node.consensus.rules import Read, Rules
from node.core.errors import Refused
from node.core.ids import CellId, PeerId
from node.core.journey import Electorate, Hop, Partner, Path, Plan, PlanMember, Window
from node.epoch.plan_validation import MOST_PARTNERS, MOST_WITHIN_S, objection, of_paths
from node.pipeline.settings import PipelineSettings
from node.scheduler.settings import SchedulerSettings

E, S, T = (PeerId(p) for p in ("ends", "first", "second"))
OWN = CellId("ab" * 8)
PARENT = CellId("cd" * 8)
SHAPES = {"w": (2, 2), "b": (2,)}
PIPELINE = PipelineSettings(stages=1, micro_batch=1)
PATH = Path(0, E, (5,), (Hop(1, S),))
PLAN = Plan(
    7,
    1,
    E,
    (PlanMember(E, 0, 1.0), PlanMember(S, 1, 1.0), PlanMember(T, 1, 1.0, current=False)),
    (PATH,),
    {"w": S, "b": S},
    cell_id=OWN,
)
PARTNER = Partner(PARENT, E, {})
MEANS = replace(PLAN, paths=(), outer=7, window=Window(0, (PARTNER,), means={1: "d"}))
FOUNDS = replace(
    PLAN,
    members=PLAN.members[:2],
    paths=(),
    owners={"w": T, "b": T},
    parent=PARENT,
    electorate=Electorate((E, S)),
)


def says(plan: Plan, me: PeerId = S, read: Read = lambda change: Rules()) -> str:
    return objection(
        plan, me, SHAPES, PIPELINE, read, scheduler=SchedulerSettings(), micro_batches=1
    )


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        MEANS,
        replace(PLAN, window=Window(7, (PARTNER,), 60.0)),
        replace(PLAN, window=Window(7, (PARTNER,) * (MOST_PARTNERS - 1), MOST_WITHIN_S)),
        FOUNDS,
        replace(FOUNDS, owners={}),
    ],
)
def test_what_a_leader_plans_is_followed(plan: Plan) -> None:
    assert says(plan) == ""


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (replace(MEANS, paths=PLAN.paths), "an outer round with work"),
        (replace(MEANS, window=Window(7, (PARTNER,), means={1: "d"})), "an outer round with work"),
        (replace(MEANS, window=Window(0, (PARTNER,))), "without a mean"),
        (replace(PLAN, window=MEANS.window), "an outer round"),
        (replace(PLAN, window=Window(7, (PARTNER,) * MOST_PARTNERS, 60.0)), "more partners"),
        (replace(PLAN, window=Window(7, (PARTNER,), 2 * MOST_WITHIN_S)), "a longer one"),
        (replace(FOUNDS, paths=PLAN.paths), "has work in it"),
        (replace(FOUNDS, outer=7, window=MEANS.window), "has work in it"),
        (replace(FOUNDS, parent=OWN), "founds no other cell"),
        (replace(FOUNDS, members=PLAN.members[1:2]), "lacks a stage"),
        (replace(PLAN, paths=(replace(PATH, index=1),)), "other micro-batches than 0 to 0"),
        (replace(PLAN, paths=(PATH, replace(PATH, index=1, samples=(6,)))), "other micro-batches"),
        (replace(PLAN, paths=(replace(PATH, samples=(5, 6)),)), "of the wrong size"),
        (replace(PLAN, paths=(replace(PATH, samples=()),)), "of the wrong size"),
        (
            replace(
                PLAN,
                members=(*PLAN.members[:2], PlanMember(T, 2)),
                paths=(replace(PATH, hops=(Hop(2, T),)),),
            ),
            "not visit enough block stages",
        ),
        (
            replace(PLAN, paths=(replace(PATH, hops=(Hop(1, S), Hop(1, S))),)),
            "not visit enough block stages",
        ),
        (replace(PLAN, paths=(replace(PATH, origin=S),)), "without an ends peer"),
        (replace(PLAN, paths=(replace(PATH, hops=()),)), "not visit enough block stages"),
        (replace(PLAN, paths=(replace(PATH, hops=(Hop(1, T),)),)), "no current member"),
    ],
)
def test_what_no_leader_plans_is_refused(plan: Plan, why: str) -> None:
    assert why in says(plan)


OTHER = PeerId("other ends")
TWO_STAGES = PipelineSettings(stages=2, micro_batch=1, may_skip=0.5)
SKIPPING = SchedulerSettings(skip=0.5)


def by_two_stages(stages: Sequence[int], origins: Sequence[PeerId] = (E, OTHER)) -> str:
    """The objection to paths over one stage each in a run that leaves out one of its two. Both ends
    peers are equally fast."""
    peers = {1: S, 2: T}
    paths = tuple(
        Path(i, origin, (i,), (Hop(stage, peers[stage]),))
        for i, (stage, origin) in enumerate(zip(stages, origins, strict=True))
    )
    members = (
        PlanMember(E, 0, 1.0),
        PlanMember(OTHER, 0, 1.0),
        PlanMember(S, 1, 1.0),
        PlanMember(T, 2, 1.0),
    )
    plan = replace(PLAN, members=members, paths=paths)
    return of_paths(plan, TWO_STAGES, SKIPPING, len(paths))


def test_paths_that_keep_the_promises_of_the_run_are_followed() -> None:
    assert by_two_stages((1, 2)) == ""


def test_paths_that_break_a_promise_of_the_run_are_refused() -> None:
    assert "share visits" in by_two_stages((1, 1))


def test_ends_peers_that_start_other_shares_than_their_speeds_say_are_refused() -> None:
    fair = (E, OTHER, E, OTHER)
    assert by_two_stages((1, 2, 1, 2), fair) == ""
    assert by_two_stages((1, 2, 1, 2), (E, E, E, OTHER)) != ""


def test_an_ends_peer_without_a_path_may_start_nothing() -> None:
    path = Path(0, E, (0,), (Hop(1, S), Hop(2, T)))
    paths = tuple(replace(path, index=i, samples=(i,)) for i in range(4))
    members = (*PLAN.members[:2], PlanMember(OTHER, 0, 1.0), PlanMember(T, 2, 1.0))
    plan = replace(PLAN, members=members, paths=paths)
    two = PipelineSettings(stages=2, micro_batch=1)
    assert of_paths(plan, two, SchedulerSettings(), len(paths)) == ""
    assert by_two_stages((1, 2, 1, 2), (E,) * 4) == ""


@pytest.mark.parametrize("owners", [{"w": S}, {}, {"w": S, "b": E}, {"w": S, "b": T}])
def test_every_part_of_a_stage_has_an_owner_who_can_step_it(owners: dict) -> None:
    assert "has no owner" in says(replace(PLAN, owners=owners))
    assert "has no owner" in says(replace(MEANS, owners=owners))
    assert says(replace(PLAN, owners=owners), me=PeerId("stranger")) == ""


def test_a_plan_of_an_unsigned_change_is_refused() -> None:
    def nobody(change: str) -> Rules:
        raise Refused("not signed by the owner")

    assert says(replace(PLAN, change="forged"), read=nobody) == "not signed by the owner"
    assert says(replace(FOUNDS, change="forged"), read=nobody) == "not signed by the owner"
