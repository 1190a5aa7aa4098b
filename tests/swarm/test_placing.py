"""Daemons that come at one moment spread over the stages, and where none is they mend it."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.lab.fleet import START_S, WORKING, Box, Peer

pytestmark = pytest.mark.swarm
LONG = {"training__epochs": 100_000, "training__min_replicas": 1}


def places(peers: list[Peer]) -> Counter[int]:
    """Those who take part in the epochs, by stage."""
    return Counter(s.stage for p in peers if (s := p.status()).state in WORKING)


def everybody(box: Box, peers: list[Peer]) -> Counter[int]:
    """Where they are once all of them take part."""

    def placed() -> Counter[int] | None:
        counts = places(peers)
        return counts if counts.total() == len(peers) else None

    return box.wait("everybody in a plan", placed, START_S, tuple(peers))


def test_six_joiners_of_one_moment_cover_every_stage_evenly(box) -> None:
    (founder,) = box.swarm((1, 0, 0, 0), pipeline__stages=3, model__layers=3, **LONG)
    founder.start()
    box.wait("the founder", lambda: bool(founder.status().addresses), START_S, (founder,))
    words = ("start", str(box.root / "swarm.toml"), "--join", box.door)
    joiners = [box.peer(f"joiner-{i}", *words) for i in range(6)]
    for peer in joiners:
        peer.start()
    counts = everybody(box, [founder, *joiners])
    assert sorted(counts) == [0, 1, 2, 3]
    assert max(counts.values()) - min(counts.values()) <= 1
    box.goes_on(2)
