"""Paths epoch after epoch: stages take turns, everybody's turn comes, slow and far peers get less,
searches serve the next epoch."""

import random
from collections import Counter

import pytest

from node.core.errors import UsageFault
from node.core.ids import PeerId
from node.core.journey import Hop, Path
from node.scheduler.costs import Costs, LinkCost, Measured, believe
from node.scheduler.planning.bounds import lower_bounds
from node.scheduler.router import FORGOTTEN, Laid, Rotation, Router, problem_of, search
from node.scheduler.settings import SchedulerSettings


def peers(stage: int, count: int) -> list[tuple[PeerId, float]]:
    return [(PeerId(f"{'e' if not stage else stage}{chr(97 + i)}"), 0.0) for i in range(count)]


ENDS = peers(0, 2)


def blocks(stages: int, replicas: int = 2) -> dict[int, list[tuple[PeerId, float]]]:
    return {s: peers(s, replicas) for s in range(1, stages + 1)}


def samples(count: int) -> list[tuple[int, ...]]:
    return [(i,) for i in range(count)]


def alike(stages: int, **slow: float) -> Costs:
    """Costs that are equal for all peers, except those in `slow`, which take this many times as
    long."""
    everybody = [p for p, _ in (*ENDS, *(row for rows in blocks(stages).values() for row in rows))]
    said = {
        p: Measured(
            0.1 * slow.get(p, 1.0),
            0.2 * slow.get(p, 1.0),
            0.05,
            8,
            tuple((q, LinkCost(0.06, 0.02)) for q in everybody if q != p),
        )
        for p in everybody
    }
    return believe(said, {p for p, _ in ENDS})


def visits(paths: tuple[Path, ...]) -> Counter[int]:
    return Counter(h.stage for p in paths for h in p.hops)


def test_turns_follow_speeds_and_origins_are_interleaved() -> None:
    origins = [(PeerId("ea"), 3.0), (PeerId("eb"), 1.0)]
    stages = {1: [(PeerId("1a"), 1.0), (PeerId("1b"), 3.0)], 2: [(PeerId("2a"), 0.0)]}

    def lay(origins, stages) -> tuple[Path, ...]:
        router = Router(SchedulerSettings("round-robin"), 2)
        return router.lay(origins, stages, samples(8), Costs()).paths

    paths = lay(origins, stages)
    assert [(p.index, p.samples) for p in paths] == [(i, (i,)) for i in range(8)]
    assert "".join(p.origin[1] for p in paths) == "aaabaaab"
    assert all([h.stage for h in p.hops] == [1, 2] for p in paths)
    assert Counter(p.hops[0].peer for p in paths) == {"1b": 6, "1a": 2}
    swapped = {s: row[::-1] for s, row in reversed(stages.items())}
    assert lay(origins[::-1], swapped) == paths, "the order of the arguments does not matter"


def test_a_planned_run_is_never_longer_than_round_robin() -> None:
    costs = alike(3, **{"2a": 3.0})
    turns = Router(SchedulerSettings("round-robin"), 3).lay(ENDS, blocks(3), samples(8), costs)
    planned = Router(SchedulerSettings("planned"), 3).lay(ENDS, blocks(3), samples(8), costs)
    assert planned.run_s <= turns.run_s
    work = Counter(h.peer for p in planned.paths for h in p.hops)
    assert work[PeerId("2a")] < work[PeerId("2b")]
    same = Router(SchedulerSettings("planned"), 3).lay(
        ENDS[::-1], dict(reversed(blocks(3).items())), samples(8), costs
    )
    assert same.paths == planned.paths


@pytest.mark.parametrize("how", ["planned", "round-robin"])
@pytest.mark.parametrize(("stages", "total", "ends"), [(3, 8, 2), (3, 9, 3), (4, 6, 2)])
def test_every_origin_trains_every_stage_equally_often(
    how: str, stages: int, total: int, ends: int
) -> None:
    settings = SchedulerSettings(how, skip=0.34)
    router = Router(settings, stages)
    hops = settings.hops(stages)
    sources = peers(0, ends)
    met: set[tuple[PeerId, int]] = set()
    seen: Counter[int] = Counter()
    for epoch in range(1, 7):
        laid = router.lay(sources, blocks(stages), samples(total), alike(stages))
        assert all(len({h.stage for h in p.hops}) == len(p.hops) == hops for p in laid.paths)
        here = visits(laid.paths)
        assert max(here.values()) - min(here[s] for s in range(1, stages + 1)) <= 1
        seen += here
        assert max(seen.values()) - min(seen.values()) <= 1, f"after epoch {epoch}"
        met |= {(p.origin, h.stage) for p in laid.paths for h in p.hops}
        router.rotation.counted(laid.paths)
        if epoch % 3 == 0:
            assert met == {(o, s) for o, _ in sources for s in range(1, stages + 1)}
            met.clear()


@pytest.mark.parametrize("how", ["planned", "round-robin"])
@pytest.mark.parametrize(("stages", "total"), [(4, 5), (6, 9), (7, 3)])
def test_stages_that_come_and_go_get_paths_with_short_jumps(
    how: str, stages: int, total: int
) -> None:
    settings = SchedulerSettings(how, skip=0.5, max_jump=2)
    chance = random.Random(total)
    settings.check(stages, total, 0.5)
    router = Router(settings, stages)
    hops = settings.hops(stages)
    for _ in range(20):
        gone = chance.sample(range(1, stages + 1), chance.choice([0, 0, stages - hops]))
        here = {s: [] if s in gone else row for s, row in blocks(stages, 1).items()}
        laid = router.lay(ENDS, here, samples(total), alike(stages))
        searched(router, laid, alike(stages), 5)
        numbers = [visits(laid.paths)[s] for s in here if s not in gone]
        assert sum(numbers) == total * hops
        assert max(numbers) - min(numbers) <= 1
        router.rotation.counted(laid.paths)


def test_a_stage_without_a_peer_is_left_out_of_short_paths() -> None:
    gone = {**blocks(3), 2: []}
    laid = Router(SchedulerSettings("planned", skip=0.34), 3).lay(ENDS, gone, samples(6), alike(3))
    assert visits(laid.paths) == {1: 6, 3: 6}
    with pytest.raises(ValueError, match="2 stages have a peer, a path has 3 hops"):
        Router(SchedulerSettings(), 3).lay(ENDS, gone, samples(6), alike(3))


@pytest.mark.parametrize("how", ["planned", "round-robin"])
@pytest.mark.parametrize(
    ("stages", "skip", "keep", "total"), [(4, 0.25, 1, 9), (4, 0.5, 1, 8), (5, 0.4, 2, 7)]
)
def test_the_first_stages_are_on_every_path(
    how: str, stages: int, skip: float, keep: int, total: int
) -> None:
    settings = SchedulerSettings(how, skip=skip, keep_first=keep)
    settings.check(stages, total, skip)
    router = Router(settings, stages)
    hops = settings.hops(stages)
    seen: Counter[int] = Counter()
    for _ in range(5):
        laid = router.lay(ENDS, blocks(stages), samples(total), alike(stages))
        searched(router, laid, alike(stages), 60)
        assert all(len(p.hops) == hops for p in laid.paths)
        assert [visits(laid.paths)[s] for s in range(1, keep + 1)] == [total] * keep
        seen += visits(laid.paths)
        others = [seen[s] for s in range(keep + 1, stages + 1)]
        assert max(others) - min(others) <= 1
        router.rotation.counted(laid.paths)
    # A first stage without peers is not waited for.
    laid = router.lay(ENDS, {**blocks(stages), 1: []}, samples(total), alike(stages))
    assert 1 not in visits(laid.paths)


def test_bounds_hold_where_stages_are_not_visited_equally_often() -> None:
    router = Router(SchedulerSettings("planned", skip=0.5, keep_first=1), 4)
    laid = router.lay(ENDS, blocks(4, 1), samples(12), alike(4))
    problem = problem_of(laid.task, alike(4), {})
    assert problem.visits == (12, 4, 4, 4)
    bounds = lower_bounds(problem)
    assert max(bounds.values()) <= laid.run_s
    # Twelve micro-batches one after the other at the only peer of the first stage.
    assert bounds["stage"] >= 12 * 0.3


def searched(router: Router, laid: Laid, costs: Costs, moves: int = 200) -> bool:
    if (job := router.job(laid, costs)) is not None:
        router.improved(job, *search(job, moves=moves))
    return job is not None


def test_a_search_improves_the_next_epoch_and_ends() -> None:
    costs = alike(3, **{"1a": 2.0, "3b": 1.7})
    router = Router(SchedulerSettings("planned", skip=0.34), 3)
    first = router.lay(ENDS, blocks(3), samples(9), costs)
    asked = 0
    last = first
    for _ in range(24):
        asked += searched(router, last, costs)
        router.rotation.counted(last.paths)
        last = router.lay(ENDS, blocks(3), samples(9), costs)
        assert last.run_s > 0
    assert last.run_s <= first.run_s
    assert 1 <= asked < 24
    slower = alike(3, **{"1a": 2.0, "3b": 1.7, "2a": 4.0, "2b": 4.0})
    assert router.job(router.lay(ENDS, blocks(3), samples(9), slower), slower) is not None


def test_what_is_laid_at_once_is_bounded_for_a_large_swarm() -> None:
    ends = peers(0, 20)
    stages = {s: [(PeerId(f"{s:02d}{i:03d}"), 1.0) for i in range(40)] for s in range(1, 13)}
    laid = Router(SchedulerSettings("planned", skip=0.25), 12).lay(
        ends, stages, samples(4000), Costs()
    )
    assert (laid.how, laid.run_s) == ("turns", 0.0)
    assert set(visits(laid.paths).values()) == {3000}


@pytest.mark.parametrize(
    ("given", "stages", "batches", "may_skip", "says"),
    [
        ({"skip": 0.2}, 3, 8, 0.5, "leaves out none of 3"),
        ({"skip": 0.34}, 3, 8, 0.0, "pipeline.may_skip"),
        ({"skip": 0.9}, 10, 5, 0.9, "do not visit every stage"),
        ({"skip": 0.5, "max_jump": 1}, 4, 8, 0.5, "max_jump"),
        ({"skip": 0.5, "keep_first": 2}, 4, 8, 0.5, "at most 1"),
        ({"skip": 0.5, "keep_first": 1}, 8, 2, 0.5, "3 micro-batches or more"),
    ],
)
def test_settings_that_cannot_hold_together_are_refused(
    given: dict[str, float], stages: int, batches: int, may_skip: float, says: str
) -> None:
    with pytest.raises(UsageFault) as e:
        SchedulerSettings(**given).check(stages, batches, may_skip)  # pyright: ignore
    assert says in f"{e.value} {e.value.next_step}"


def test_settings_that_hold_are_taken() -> None:
    SchedulerSettings(skip=0.34, max_swaps=2, max_jump=2).check(3, 8, 0.34)
    SchedulerSettings().check(3, 1, 0.0)
    SchedulerSettings(keep_first=9).check(3, 1, 0.0)
    SchedulerSettings(skip=0.5, keep_first=1, max_jump=3).check(4, 8, 0.5)


@pytest.mark.parametrize(
    ("skip", "keep", "shares"),
    [
        (0.0, 2, [1.0, 1.0, 1.0, 1.0, 1.0]),
        (0.25, 0, [1.0, 0.75, 0.75, 0.75, 0.75]),
        (0.25, 1, [1.0, 1.0, 2 / 3, 2 / 3, 2 / 3]),
        (0.5, 1, [1.0, 1.0, 1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_the_ends_and_kept_stages_are_on_all_paths_and_the_others_on_a_share(
    skip: float, keep: int, shares: list[float]
) -> None:
    settings = SchedulerSettings(skip=skip, keep_first=keep)
    assert [settings.shares_of_visits(4)[s] for s in range(5)] == shares


def test_a_replica_of_an_idle_stage_gets_its_share_of_the_work() -> None:
    costs = alike(2, ea=4.0, eb=4.0, **{"1b": 1.1, "2b": 1.1})
    laid = Router(SchedulerSettings("planned"), 2).lay(ENDS, blocks(2), samples(24), costs)
    work = Counter(h.peer for p in laid.paths for h in p.hops)
    assert laid.how == "insertion", "turns would be even by themselves"
    assert work[PeerId("1b")] >= 9, "the shortest plan gives it seven"


def test_nothing_is_owed_to_ends_peers_that_have_long_gone() -> None:
    rotation = Rotation()
    stays, goes = PeerId("ea"), PeerId("eb")

    def path(origin: PeerId) -> Path:
        return Path(0, origin, (0,), (Hop(1, PeerId("1a")),))

    rotation.counted([path(stays), path(goes)])
    for _ in range(FORGOTTEN - 1):
        rotation.counted([path(stays)])
    both = {stays: 1, goes: 1}
    assert {o for o, _ in rotation.owed(both, (1, 2), 1)} == {stays, goes}
    rotation.counted([path(stays)])
    assert {o for o, _ in rotation.owed(both, (1, 2), 1)} == {stays}
