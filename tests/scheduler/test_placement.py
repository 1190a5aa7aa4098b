from collections import Counter

import pytest

from node.core.ids import PeerId
from node.scheduler.placement import Move, StageTerms, choose_moves, choose_stage, level, spread

ME, A, B, C, D = (PeerId(x) for x in ("me", "A", "B", "C", "D"))
PEERS = [PeerId(f"peer{i}") for i in range(20)]


VIEW = {1: {A: 0.1}, 2: {}, 3: {B: 9.0}}


@pytest.mark.parametrize(
    ("view", "able", "stage"),
    [
        pytest.param(VIEW, [1, 2, 3], 2, id="an empty stage comes first"),
        pytest.param(VIEW, [1, 3], 1, id="then the slowest"),
        pytest.param({1: {A: 1.0}}, [1, 2], 2, id="one that nobody has heard of is empty"),
        pytest.param({1: {A: 5.0}, 2: {B: 1.0, C: 1.0}}, [1, 2], 2, id="speed counts, not heads"),
        pytest.param(
            {1: {A: 0.0, B: 0.0}, 2: {C: 0.0}, 3: {D: 0.0, ME: 0.0}},
            [1, 2],
            2,
            id="unknown speeds: the fewest replicas",
        ),
        pytest.param({1: {ME: 100.0}, 2: {A: 1.0}}, [1, 2], 1, id="not my own old record"),
    ],
)
def test_a_joiner_goes_where_it_is_needed_most(view, able, stage: int) -> None:
    assert choose_stage(view, able, ME) == stage


def test_joiners_that_cannot_see_each_other_spread_out() -> None:
    chosen = Counter(choose_stage({}, [1, 2, 3], PeerId(f"peer{i}")) for i in range(300))
    assert set(chosen) == {1, 2, 3}
    assert min(chosen.values()) > 60


RING = {0: {A: 1.0}, 1: {B: 1.0}, 2: {}, 3: {C: 1.0}, 4: {}, 5: {D: 1.0}}


@pytest.mark.parametrize(
    ("view", "able", "closed", "stage"),
    [
        # Stage 2 lies between B and C, stage 4 between C and D.
        (RING, [2, 4], {ME, B}, 4),
        (RING, [2, 4], {ME, D}, 2),
        # The last stage sends to the ends.
        ({0: {A: 1.0}, 1: {B: 1.0}, 2: {}, 3: {}, 4: {C: 1.0}}, [2, 3], {ME, C}, 2),
        ({0: {A: 1.0}, 1: {}, 2: {B: 1.0}, 3: {C: 1.0}, 4: {}}, [1, 4], {ME, C}, 1),
        # A slow stage is chosen whether or not its neighbours can be dialled.
        ({0: {A: 1.0}, 1: {B: 1.0}, 2: {C: 2.0}}, [1, 2], {ME, A, C}, 1),
    ],
)
def test_a_peer_that_cannot_be_dialled_goes_beside_those_who_can(
    view, able, closed, stage: int
) -> None:
    assert choose_stage(view, able, ME, closed) == stage


def test_a_peer_that_can_be_dialled_goes_where_it_would_go_anyway() -> None:
    assert all(choose_stage(RING, [2, 4], p, {B}) == choose_stage(RING, [2, 4], p) for p in PEERS)


def test_those_who_choose_together_agree_whom_a_relay_is_spared() -> None:
    choosers = {p: range(1, 5) for p in PEERS[:4]}
    closed = set(PEERS[:2])
    chosen = spread({0: {A: 1.0}}, choosers, closed)
    assert sorted(chosen.values()) == [1, 2, 3, 4]
    assert chosen == spread({0: {A: 1.0}}, dict(reversed(choosers.items())), closed)


def test_nothing_to_choose_from_is_an_error() -> None:
    with pytest.raises(ValueError, match="no stage"):
        choose_stage({1: {A: 1.0}}, [], ME)


def test_concurrent_choosers_spread_out_and_agree() -> None:
    for n in range(1, 21):
        choosers = dict.fromkeys(PEERS[:n], (0, 1, 2))
        chosen = spread({0: {A: 0.0}}, choosers)
        assert chosen == spread({0: {A: 0.0}}, dict(reversed(choosers.items())))
        counts = Counter([0, *chosen.values()])
        assert max(counts[s] for s in range(3)) - min(counts[s] for s in range(3)) <= 1
    pairs = [spread({}, dict.fromkeys(PEERS[i : i + 2], (1, 2))) for i in range(18)]
    assert {tuple(pair.values()) for pair in pairs} == {(1, 2), (2, 1)}


def test_a_peer_that_can_host_less_chooses_first() -> None:
    for i in range(19):
        assert spread({}, {PEERS[i]: (0, 1), PEERS[i + 1]: (1,)}) == {
            PEERS[i]: 0,
            PEERS[i + 1]: 1,
        }
    with pytest.raises(ValueError, match="no stage"):
        spread({}, {A: ()})


def test_choosers_go_where_speed_is_missing() -> None:
    chosen = spread({1: {A: 9.0}, 2: {B: 1.0}}, dict.fromkeys(PEERS[:2], (1, 2)))
    assert set(chosen.values()) == {2}, "5 each, the median: 9 beside 6 and then 11"


def levelled(view, free, lacking=None) -> list[tuple[PeerId, int, int]]:
    chosen = level(view, dict.fromkeys(free, (0, 1, 2, 3)), lacking)
    return [(m.peer, m.source, m.target) for m in chosen]


def test_levelling_moves_the_fewest_to_within_one_peer() -> None:
    for n in range(2, 20):
        view = {1: dict.fromkeys(PEERS[:n], 0.0), 2: {}, 3: {}}
        moves = levelled(view, PEERS[:n])
        counts = Counter(s for s in (1, 2, 3) for _ in view[s])
        for _, source, target in moves:
            counts[source], counts[target] = counts[source] - 1, counts[target] + 1
        assert max(counts.values()) - min(counts[s] for s in (1, 2, 3)) <= 1
        assert len(moves) == n - -(-n // 3)


def test_the_order_settles_which_peer_stays_whoever_looks() -> None:
    view = {1: dict.fromkeys(PEERS[:3], 0.0), 2: {A: 0.0, B: 0.0}, 3: {}}
    (first,) = levelled(view, PEERS[:3])
    other_way = {3: {}, 2: view[2], 1: dict(reversed(view[1].items()))}
    assert levelled(other_way, reversed(PEERS[:3])) == [first]
    assert levelled(view, [A])[0] == (A, 2, 3), "who is not free stays"
    assert levelled(view, []) == []
    assert levelled({1: view[1], 2: view[2]}, PEERS) == [], "3 and 2"


THREE = {1: {A: 3.0, B: 1.0, C: 2.0}, 2: {}}
FIVE = dict.fromkeys(PEERS[:5], 0.0)


@pytest.mark.parametrize(
    ("view", "free", "lacking", "steps"),
    [
        pytest.param(THREE, (A, B, C), None, [(B, 1, 2), (C, 1, 2)], id="3 beside 3"),
        pytest.param({1: {A: 1.0, B: 9.0}, 2: {}}, [B], None, [(B, 1, 2)], id="any beside nothing"),
        pytest.param(
            {1: {A: 3.0, B: 0.0, C: 2.0}, 2: {}}, (A, B, C), [2], [(B, 1, 2)], id="unknown: slowest"
        ),
        pytest.param({1: {A: 0.0}, 2: {}, 3: {B: 0.0}}, (A, B), [2], [], id="none is emptied"),
        pytest.param({1: {A: 0.0, B: 0.0}, 2: {C: 0.0}}, (A, B, C), [2], [], id="two and one"),
    ],
)
def test_the_slowest_of_a_stage_moves_if_none_gets_worse(view, free, lacking, steps) -> None:
    assert levelled(view, free, lacking) == steps


@pytest.mark.parametrize(
    ("view", "free", "lacking", "found"),
    [
        (THREE, {A: (2,), B: (2,)}, [2], [Move(B, 1, 2, float("inf"))]),
        ({1: {A: 3.0, B: 1.0}, 2: {C: 3.5}}, dict.fromkeys((A, B, C), (1, 2)), None, []),
        ({1: {A: 3.0, B: 1.0}, 2: {C: 2.0}}, {B: (1, 2)}, None, [Move(B, 1, 2, 1.5)]),
        pytest.param({1: {A: 1.1, B: 1.0}, 2: {C: 1.0}}, {B: (1, 2)}, None, [], id="as good"),
        pytest.param({1: FIVE, 2: {}}, dict.fromkeys(PEERS[:5], (1, 3)), [2], [], id="not able"),
    ],
)
def test_a_move_says_how_much_faster_the_slowest_gets(view, free, lacking, found) -> None:
    assert level(view, free, lacking) == found


def test_only_lacking_stages_are_filled() -> None:
    assert [m[1:] for m in levelled({1: FIVE, 2: {}, 3: {A: 0.0}}, PEERS, [2])] == [(1, 2)]
    assert [m[1:] for m in levelled({1: FIVE}, PEERS, [2, 3])] == [(1, 2), (1, 3)]


def moves(view, download_s=10.0, horizon_s=300.0, **more) -> list[tuple[PeerId, int, int]]:
    chosen = choose_moves(view, download_s=download_s, horizon_s=horizon_s, **more)
    return [(m.peer, m.source, m.target) for m in chosen]


FOUR = {1: {A: 2.0, B: 2.0, C: 2.0}, 2: {D: 2.0}}
UNEVEN = {1: {A: 1.0, B: 2.0, C: 2.0}, 2: {D: 3.6}}


@pytest.mark.parametrize(
    ("view", "price", "found"),
    [
        (FOUR, {}, [Move(A, 1, 2, 2.0)]),
        (UNEVEN, {"horizon_s": 1e9}, [Move(A, 1, 2, pytest.approx(4 / 3.6))]),
        ({1: {A: 1.0, B: 2.0}, 2: {}}, {"horizon_s": 60}, [Move(A, 1, 2, float("inf"))]),
    ],
    ids=["the slowest stage is lifted", "a little", "a stage nobody hosts gets a peer"],
)
def test_a_change_of_stage_says_what_it_gains(view, price, found) -> None:
    assert choose_moves(view, **{"download_s": 10, "horizon_s": 300} | price) == found


@pytest.mark.parametrize(
    ("view", "more", "steps"),
    [
        (FOUR, {"stay": {A, B, C}}, []),
        (FOUR, {"terms": {2: StageTerms(barred={A}), 1: StageTerms(barred={B, C})}}, [(B, 1, 2)]),
        (FOUR, {"terms": {1: StageTerms(keep=3)}}, []),
        pytest.param({1: {A: 1.0, B: 2.0, C: 3.0}, 2: {D: 1.0}}, {}, [(B, 1, 2)], id="one fits"),
        pytest.param({1: {A: 1.0, B: 1.0}, 2: {C: 1.0}}, {}, [], id="only moves the bottleneck"),
        pytest.param(
            {1: {A: 1.0, B: 2.0, C: 2.0}, 2: {D: 3.9}}, {"horizon_s": 1e9}, [], id="too little"
        ),
        # Half of A's work in 10 s of download is more than the gain of 0.4 a second in 12 s.
        (UNEVEN, {"horizon_s": 12}, []),
        (UNEVEN, {"horizon_s": 13}, [(A, 1, 2)]),
        (UNEVEN, {"horizon_s": 13, "terms": {2: StageTerms(fetch_s=11.0)}}, []),
        (UNEVEN, {"horizon_s": 13, "terms": {1: StageTerms(fetch_s=11.0)}}, [(A, 1, 2)]),
        (
            {1: {A: 2.0, B: 2.0}, 2: {C: 1.0}, 3: {D: 9.0}},
            {"download_s": 1, "horizon_s": 10},
            [(A, 1, 2)],
        ),
        ({1: {A: 1.0, B: 1.0, C: 1.0}, 2: {D: 1.0}}, {}, [(A, 1, 2)]),
        # A peer on its way counts at its target, and stays there.
        ({1: {A: 1.0, B: 1.0, C: 1.0}, 2: {D: 1.0, ME: 1.0}}, {"away": {ME}}, []),
        pytest.param(
            {1: {A: 1.0, B: 1.0, ME: 1.0}, 2: {D: 0.5}}, {"away": {ME, A}}, [], id="B alone serves"
        ),
        # A stage is never left empty.
        ({1: {A: 50.0}, 2: {B: 1.0}}, {"download_s": 1, "horizon_s": 1000}, []),
        ({1: {A: 50.0}}, {"download_s": 1, "horizon_s": 1000}, []),
    ],
)
def test_a_move_that_costs_more_than_it_gains_is_not_made(view, more, steps) -> None:
    assert moves(view, **more) == steps


def test_a_stage_on_fewer_paths_needs_less_speed() -> None:
    half = {2: StageTerms(visits=0.5)}
    even = {1: {A: 2.0, B: 2.0}, 2: {C: 1.9}}
    assert len(moves(even)) == 1
    assert moves(even, terms=half) == [], "4, and 1.9 for half of the visits"
    (move,) = choose_moves(
        {1: {A: 2.0}, 2: {B: 2.0, C: 2.0}}, download_s=1.0, horizon_s=300.0, terms=half
    )
    assert (move.target, move.gain) == (1, 2.0), "2 and 8 before, 4 and 4 then"


def test_two_stages_that_are_equally_slow_are_helped_together() -> None:
    six = [[PeerId(f"{s}{i}") for i in range(6)] for s in range(4)]
    view = {s + 1: dict.fromkeys(six[s][:n], 1.0) for s, n in enumerate((4, 4, 6, 6))}
    chosen = moves(view)
    assert [(a, b) for _, a, b in chosen] == [(3, 1), (4, 2)]
    assert moves(view, most=1) == [], "one alone gains nothing"
