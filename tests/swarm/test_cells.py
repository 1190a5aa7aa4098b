"""Cells that lead themselves: a cell divides, both train on at their own pace and average in
windows, and one goes on when the other is gone with the founder."""

import json
import time
from collections import Counter

import pytest

from testbed.daemons.fleet import Box, Peer

pytestmark = pytest.mark.swarm


def met(peer: Peer) -> int:
    """Outer rounds that this leader has committed: plans with one that a later plan followed."""
    epochs = {e["fields"]["epoch"] for e in peer.events("epoch-committed")}
    return sum(
        e["fields"]["epoch"] + 1 in epochs
        for e in peer.events("epoch-planned")
        if e["fields"].get("outer")
    )


def cells_seen(box: Box, peer: Peer) -> int:
    """Cells in `tutti cells` with a peer at the ends and in the block stage."""
    shown = box.tutti("cells", "--json", home=peer.label)
    assert shown.returncode == 0, shown.stderr
    seen = json.loads(shown.stdout)["seen"]
    return sum(c["works"] and min(c["replicas"]) >= 1 for c in seen)


def test_cells_divide_average_and_outlive_the_founders(box) -> None:
    peers = box.swarm(
        (2, 2),
        pipeline__stages=1,
        averaging__cell=1,
        outer__strategy="gossip",
        outer__carries="parameters",
        outer__window_s=12.0,
        training__min_replicas=1,
        training__epochs=100_000,
    )
    box.start(*peers)
    left = box.wait(
        "two peers in a cell of their own",
        lambda: len(found := [p for p in peers if p.events("cell-entered")]) == 2 and found,
        must_run=tuple(peers),
    )
    stayed = [p for p in peers if p not in left]
    assert Counter(p.status().stage for p in left) == Counter(p.status().stage for p in stayed)
    leaders = [next(p for p in cell if p.status().stage == 0) for cell in (stayed, left)]
    box.wait(
        "outer rounds of both cells",
        lambda: all(met(leader) >= 2 for leader in leaders),
        120.0,
        must_run=tuple(peers),
    )
    box.wait("records of both cells", lambda: cells_seen(box, leaders[0]) == 2, 120.0)
    assert not any(p.events("state-lost") for p in peers), "owners took the optimizer's state over"
    killed = time.time()
    for peer in stayed:
        peer.kill()
    before = leaders[1].status().epoch
    box.wait("epochs without the others", lambda: leaders[1].status().epoch >= before + 20, 180.0)
    abandoned = [e for e in leaders[1].events("epoch-abandoned") if e["at"] >= killed]
    assert not abandoned, "a cell that dies costs another no epoch"
    assert set(p.end() for p in left) == {0}
