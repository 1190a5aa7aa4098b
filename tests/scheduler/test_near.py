"""Peers that leave when a cell divides: near peers stay together, and both halves stay fast."""

import math
import random
from itertools import product

import pytest

from node.core.ids import PeerId
from node.scheduler.near import KEEPS, _apart, _exchanged, leavers


def site(peer: str) -> str:
    return peer[-1]


def sites(a: PeerId, b: PeerId) -> float:
    return 0.0 if a == b else 0.02 if site(a) == site(b) else 0.2


def stages(count: int, each: str, speed: float = 1.0) -> dict[int, list[tuple[PeerId, float]]]:
    """One peer of every stage at each of the sites."""
    return {s: [(PeerId(f"p{s}{i}{at}"), speed) for i, at in enumerate(each)] for s in range(count)}


@pytest.mark.parametrize("count", [2, 4, 7])
@pytest.mark.parametrize("each", ["ab", "abba", "aabb"])
def test_two_sites_become_two_cells(count, each):
    rows = stages(count, each)
    for me, _ in rows[0]:
        away = leavers(rows, me, len(each), sites)
        assert {site(p) for p in away} == {"ab".replace(site(me), "")}
        assert sorted(away.values()) == sorted(list(range(count)) * (len(each) // 2))


def test_without_measured_ways_the_fast_and_the_slow_are_spread():
    rows = {s: [(PeerId(f"p{s}{i}"), 10.0 - i) for i in range(4)] for s in range(3)}
    away = leavers(rows, PeerId("p00"), 4, lambda a, b: 0.05)
    assert away == {PeerId(f"p{s}{i}"): s for s in range(3) for i in (1, 3)}


def test_near_peers_part_where_one_site_has_all_fast_ones():
    rows = {s: [(PeerId(f"p{s}0a"), 9.0), (PeerId(f"p{s}1a"), 9.0),
                (PeerId(f"p{s}2b"), 1.0), (PeerId(f"p{s}3b"), 1.0)] for s in range(2)}  # fmt: skip
    away = leavers(rows, PeerId("p00a"), 4, sites)
    assert all(sum(v for p, v in rows[s] if p in away) >= KEEPS * 10 for s in rows)


@pytest.mark.parametrize("seed", range(20))
def test_the_division_is_about_as_near_as_any(seed):
    draw = random.Random(seed)
    rows = {s: [(PeerId(f"p{s}-{i}"), 1.0) for i in range(n)] for s, n in enumerate((3, 4, 4, 3))}
    at = {p: (draw.random(), draw.random()) for row in rows.values() for p, _ in row}
    apart = {(a, b): 2 * math.dist(at[a], at[b]) for a, b in product(at, repeat=2)}
    me = rows[0][0][0]
    away = leavers(rows, me, 1, lambda a, b: math.dist(at[a], at[b]))
    found = _apart(apart, rows, {s: {p} for p, s in away.items()})
    least = min(
        _apart(apart, rows, {s: {p} for s, p in enumerate(one)})
        for one in product(*([p for p, _ in row if p != me] for row in rows.values()))
    )
    assert found <= 1.15 * least


@pytest.mark.parametrize("seed", range(40))
def test_half_of_every_stage_leaves_whatever_the_distances(seed):
    draw = random.Random(seed)
    rows = {
        s: [(PeerId(f"p{s}-{i}"), draw.choice([0.0, draw.random()])) for i in range(n)]
        for s, n in enumerate(draw.choices(range(2, 7), k=draw.randint(1, 5)))
    }
    me = draw.choice(rows[0])[0]
    most = draw.randint(1, 4)
    table: dict[tuple[PeerId, PeerId], float] = {}
    away = leavers(rows, me, most, lambda a, b: table.setdefault((a, b), draw.random()))
    assert me not in away
    for s, row in rows.items():
        assert sum(p in away for p, _ in row) == min(most, len(row) // 2)
        assert all(away.get(p, s) == s for p, _ in row)


@pytest.mark.parametrize("seed", range(10))
def test_no_other_exchange_brings_the_halves_nearer(seed):
    draw = random.Random(seed)
    rows = {s: [(PeerId(f"p{s}-{i}"), 0.0) for i in range(draw.randint(2, 7))] for s in range(4)}
    everybody = [p for row in rows.values() for p, _ in row]
    apart = {(a, b): draw.random() * (a != b) for a, b in product(everybody, repeat=2) if a <= b}
    apart |= {(b, a): s for (a, b), s in apart.items()}
    even = {s: {p for p, _ in row[1::2]} for s, row in rows.items()}
    found = _exchanged(rows, even, even, everybody[0], apart)
    for stage, row in rows.items():
        for a, b in product({p for p, _ in row} - found[stage] - {everybody[0]}, found[stage]):
            other = found | {stage: found[stage] ^ {a, b}}
            assert _apart(apart, rows, other) > _apart(apart, rows, found) - 1e-9
    assert _apart(apart, rows, found) < _apart(apart, rows, even)
