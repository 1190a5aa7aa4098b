"""Paths over pairs that are proven to reach each other, and nothing else, whatever planned them."""

import random
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.core.ids import PeerId
from node.core.journey import Hop, Path
from node.scheduler.costs import Costs
from node.scheduler.proven import NoWay, complete, missing, reroute
from node.scheduler.router import Router
from node.scheduler.settings import SchedulerSettings

E = PeerId("ends-e")
F = PeerId("ends-f")


def pool(*counts: int) -> dict[int, list[tuple[PeerId, float]]]:
    return {
        s: [(PeerId(f"s{s}-{i}"), 1.0) for i in range(n)] for s, n in enumerate(counts, start=1)
    }


def fully(*apart: tuple[str, str]):
    """Everybody reaches everybody but these pairs."""
    gone = {frozenset(pair) for pair in apart}
    return lambda a, b: a == b or frozenset((a, b)) not in gone


def laid(stages) -> tuple[Path, ...]:
    router = Router(SchedulerSettings("round-robin"), len(stages))
    return router.lay([(E, 1.0)], stages, [(i,) for i in range(8)], Costs()).paths


def siblings_of(stages):
    return lambda hop: stages[hop.stage]


def holds(paths, proven) -> bool:
    return all(proven(a.peer, b.peer) for path in paths for a, b in pairwise(path.journey))


def test_paths_over_proven_pairs_stay_as_they_are() -> None:
    stages = pool(2, 3)
    paths = laid(stages)
    assert reroute(paths, siblings_of(stages), fully()) == paths


def test_paths_avoid_an_unproven_pair_and_share_the_load() -> None:
    stages = pool(2, 2, 2)
    proven = fully(("s1-0", "s2-0"), ("s2-1", "s3-1"))
    paths = reroute(laid(stages), siblings_of(stages), proven)
    assert holds(paths, proven)
    work = [
        sum(h.peer == p for path in paths for h in path.hops)
        for p in ("s1-0", "s1-1", "s2-0", "s2-1", "s3-0", "s3-1")
    ]
    assert min(work) >= 2, work


def test_the_way_back_to_the_ends_counts_too() -> None:
    stages = pool(1, 2)
    paths = reroute(laid(stages), siblings_of(stages), fully(("s2-0", E)))
    assert {path.hops[-1].peer for path in paths} == {"s2-1"}
    with pytest.raises(NoWay, match=r"a connection between .* of stage 2 and .* of the ends"):
        reroute(laid(stages), siblings_of(stages), fully(("s2-0", E), ("s2-1", E)))


def test_the_missing_pairs_are_those_at_which_paths_end() -> None:
    stages = {1: [PeerId("s1-0")], 2: [PeerId("s2-0"), PeerId("s2-1")], 3: [PeerId("s3-0")]}
    proven = fully(("s2-0", "s3-0"), ("s2-1", "s3-0"), ("s1-0", "s2-1"))
    assert not complete(E, [1, 2, 3], stages, proven)
    assert missing([E], [1, 2, 3], stages, proven) == [
        (Hop(2, PeerId("s2-0")), Hop(3, PeerId("s3-0")))
    ]
    assert complete(E, [1, 2, 3], stages, fully())


@settings(max_examples=200)
@given(st.integers(0, 10**9), st.integers(1, 4), st.integers(1, 4), st.floats(0.0, 1.0))
def test_a_way_is_found_whenever_there_is_one(
    seed: int, depth: int, width: int, share: float
) -> None:
    dice = random.Random(seed)
    stages = pool(*(dice.randint(1, width) for _ in range(depth)))
    everybody = [E, *(p for row in stages.values() for p, _ in row)]
    links = {frozenset(pair) for pair in product(everybody, everybody) if dice.random() < share}

    def proven(a: PeerId, b: PeerId) -> bool:
        return a == b or frozenset((a, b)) in links

    exists = any(
        proven(E, way[0]) and all(proven(a, b) for a, b in pairwise(way)) and proven(way[-1], E)
        for way in product(*([p for p, _ in stages[s]] for s in sorted(stages)))
    )
    replicas = {s: [p for p, _ in row] for s, row in stages.items()}
    assert complete(E, sorted(stages), replicas, proven) == exists
    if exists:
        assert holds(reroute(laid(stages), siblings_of(stages), proven), proven)
        return
    with pytest.raises(NoWay) as caught:
        reroute(laid(stages), siblings_of(stages), proven)
    assert caught.value.pairs
    assert not any(proven(a.peer, b.peer) for a, b in caught.value.pairs)
