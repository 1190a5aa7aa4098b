"""Plans of the planner are never refused, whoever died and however fast anybody is; plans that
break a promise of the settings are, each with its reason."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.core.errors import UsageFault
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path, Plan, PlanMember
from node.epoch.plan_validation import of_paths
from node.pipeline.settings import PipelineSettings
from node.scheduler.costs import Costs, LinkCost, Measured, believe
from node.scheduler.proven import NoWay, complete, reroute
from node.scheduler.router import Router, search
from node.scheduler.settings import SchedulerSettings

Row = list[tuple[PeerId, float]]


def plan_of(paths: tuple[Path, ...], rows: dict[int, Row]) -> Plan:
    members = tuple(PlanMember(p, s, v) for s, row in rows.items() for p, v in row)
    listener = PlanMember(PeerId("listener"), 1, 1.0, current=False)
    return Plan(0, 1, members[0].peer, (*members, listener), paths, {})


def a_run(dice: random.Random) -> tuple[SchedulerSettings, int, int, float]:
    """Settings that a manifest accepts, stages, micro-batches, and what journeys may leave out."""
    while True:
        stages = dice.randint(1, 8)
        total = dice.randint(1, 20)
        skip = dice.choice([0.0, 0.0, 0.25, 0.34, 0.5])
        found = SchedulerSettings(
            dice.choice(["planned", "round-robin"]),
            skip,
            dice.choice([0, 0, 1, 2]),
            dice.choice([0, 0, 1, 2, 3]),
            dice.choice([0, 0, 1]),
        )
        try:
            found.check(stages, total, skip)
        except UsageFault:
            continue
        return found, stages, total, skip


def a_swarm(dice: random.Random, live: list[int]) -> dict[int, Row]:
    """Peers at the ends and at each of these stages; some were never measured."""
    unknown = dice.choice([0.0, 0.3, 1.0])
    return {
        s: [
            (
                PeerId(f"{s}-{chr(97 + i)}"),
                0.0 if dice.random() < unknown else 2 ** (dice.randint(-6, 6) / 2),
            )
            for i in range(dice.randint(1, 3))
        ]
        for s in (ENDS, *live)
    }


def measured(dice: random.Random, rows: dict[int, Row]) -> Costs:
    everybody = [p for row in rows.values() for p, _ in row]
    said = {
        p: Measured(
            dice.uniform(0.01, 1),
            dice.uniform(0.01, 1),
            0.05,
            dice.randint(1, 8),
            tuple((q, LinkCost(dice.uniform(0.01, 0.5), 0.02)) for q in everybody if q != p),
        )
        for p in everybody
        if dice.random() < 0.9
    }
    return believe(said, {p for p, _ in rows[ENDS]})


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_what_the_planner_makes_is_never_refused(seed: int) -> None:
    """Epoch after epoch of one run: peers come and go, up to the last of a stage where plans may go
    around it; not everybody is proven to reach everybody; searches serve later epochs."""
    dice = random.Random(seed)
    scheduler, stages, total, may_skip = a_run(dice)
    router = Router(scheduler, stages)
    hops = scheduler.hops(stages)
    for _ in range(5):
        gone = dice.sample(range(1, stages + 1), dice.randint(0, stages - hops))
        rows = a_swarm(dice, [s for s in range(1, stages + 1) if s not in gone])
        cut = dice.choice([0.0, 0.1])
        apart = {
            frozenset((a, b))
            for row in rows.values()
            for a, _ in row
            for other in rows.values()
            for b, _ in other
            if dice.random() < cut
        }

        def proven(a: PeerId, b: PeerId, apart: set[frozenset[PeerId]] = apart) -> bool:
            return frozenset((a, b)) not in apart

        ends = rows[ENDS]
        live = sorted(rows.keys() - {ENDS})
        # like the leader's routing, leave out ends peers without a proven path
        if hops == len(live):
            replicas = {s: [p for p, _ in rows[s]] for s in live}
            ends = [(p, v) for p, v in ends if complete(p, live, replicas, proven)]
        costs = measured(dice, rows)
        blocks = {s: rows[s] for s in live}
        try:
            laid = router.lay(ends, blocks, [(i,) for i in range(total)], costs) if ends else None
            if laid is None:
                continue
            paths = reroute(laid.paths, lambda hop, rows=rows: rows[hop.stage], proven)
        except (NoWay, UsageFault):
            continue  # there is no plan, so nobody is asked to follow one
        plan = plan_of(paths, rows)
        pipeline = PipelineSettings(stages, 1, may_skip=may_skip)
        assert of_paths(plan, pipeline, scheduler, total) == ""
        router.rotation.counted(paths)
        if (job := router.job(laid, costs)) is not None and dice.random() < 0.2:
            router.improved(job, *search(job, moves=20))


SKIPS = SchedulerSettings("planned", skip=0.34)
PEERS: dict[int, Row] = {
    s: [(PeerId(f"{s}{c}"), 1.0) for c in "ab"] for s in range(4)
}  # stages 1 to 3, each path two of them


def sound(scheduler: SchedulerSettings = SKIPS, total: int = 6) -> Plan:
    laid = Router(scheduler, 3).lay(
        PEERS[0], {s: PEERS[s] for s in (1, 2, 3)}, [(i,) for i in range(total)], Costs()
    )
    return plan_of(laid.paths, PEERS)


def changed(plan: Plan, at: int, /, *stages: int, peer: str = "a", **other: object) -> Plan:
    """The plan with another path for one micro-batch."""
    hops = tuple(Hop(s, PeerId(f"{s}{peer}")) for s in stages) or plan.paths[at].hops
    path = replace(plan.paths[at], **{"hops": hops, **other})  # type: ignore[arg-type]
    return replace(plan, paths=(*plan.paths[:at], path, *plan.paths[at + 1 :]))


def why(plan: Plan, scheduler: SchedulerSettings = SKIPS, total: int = 6) -> str:
    return of_paths(plan, PipelineSettings(3, 1, may_skip=scheduler.skip), scheduler, total)


@pytest.mark.parametrize(
    ("stages", "other", "says"),
    [
        ((1, 2, 3), {}, "3 block stages, where the settings say 2"),
        *((stages, {}, "does not visit enough") for stages in ((1,), (1, 1), (1, 4))),
        # A plan has exactly its epoch's micro-batches, from current members to current members.
        ((), {"index": 3}, "other micro-batches"),
        ((), {"samples": (5,)}, "a sample in two"),
        ((), {"samples": (6, 7)}, "wrong size"),
        ((), {"origin": PeerId("1a")}, "without an ends peer"),
        ((1, 2), {"peer": "z"}, "no current member"),
        ((), {"hops": (Hop(1, PeerId("listener")), Hop(2, PeerId("2a")))}, "no current member"),
    ],
)
def test_a_path_that_breaks_a_promise_is_refused(stages, other, says: str) -> None:
    assert says in why(changed(sound(), 0, *stages, **other))


def test_a_sound_plan_has_the_epochs_micro_batches_and_lengths() -> None:
    assert why(sound()) == ""
    assert "other micro-batches than 0 to 6" in why(sound(), total=7)
    room = PipelineSettings(3, 1, may_skip=0.67)  # journeys may do with one stage, plans have two
    assert "1 block stages" in of_paths(changed(sound(), 0, 1), room, SKIPS, 6)


def test_a_stage_that_is_visited_less_than_its_share_is_refused() -> None:
    plan = sound()
    lazy = replace(
        plan,
        paths=tuple(
            replace(p, hops=(Hop(1, PeerId("1a")), Hop(2, PeerId("2b")))) for p in plan.paths
        ),
    )
    assert "get 0 to 6 of them" in why(lazy)
    # Where the stage has no member, the planner makes these same paths.
    without = replace(lazy, members=tuple(m for m in lazy.members if m.stage != 3))
    assert why(without) == ""


def test_a_stage_that_is_kept_is_on_every_path() -> None:
    kept = replace(SKIPS, keep_first=1)
    plan = sound(kept)
    assert why(plan, kept) == ""
    assert "are kept" in why(changed(plan, 0, 2, 3), kept)


def test_swaps_and_jumps_keep_to_the_settings() -> None:
    plan = sound()
    index = next(i for i, p in enumerate(plan.paths) if {h.stage for h in p.hops} == {1, 2})
    back = changed(plan, index, 2, 1)
    assert "swaps" in why(back)
    assert why(back, replace(SKIPS, max_swaps=1)) == ""
    index = next(i for i, p in enumerate(plan.paths) if {h.stage for h in p.hops} == {1, 3})
    far = changed(plan, index, 3, 1)
    assert "further than 1" in why(far, replace(SKIPS, max_swaps=1))
    assert why(far, replace(SKIPS, max_swaps=2)) == ""
    assert "jumps from stage 1 to 3" in why(plan, replace(SKIPS, max_jump=1))


@pytest.mark.parametrize("scheduler", [SKIPS, SchedulerSettings()])
def test_ends_peers_start_what_falls_to_them_by_their_speeds(scheduler: SchedulerSettings) -> None:
    plan = sound(scheduler)
    assert Counter(p.origin for p in plan.paths) == {"0a": 3, "0b": 3}
    other = plan.paths[0].origin
    index = next(i for i, p in enumerate(plan.paths) if p.origin != other)
    more = changed(plan, index, origin=other)
    assert "by other shares than their speeds" in why(more, scheduler)
    alone = replace(plan, paths=tuple(replace(p, origin=other) for p in plan.paths))
    # The other one may have no proven path, which only the leader knows.
    assert why(alone, scheduler) == ""
