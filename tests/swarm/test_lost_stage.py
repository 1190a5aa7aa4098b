"""A cell that has lost the only peer of a stage goes on without it, and gets the stage back from
another cell."""

import json

import pytest

from testbed.daemons.fleet import START_S, WORKING, Box, Peer

pytestmark = pytest.mark.swarm


def leader_of(peers: list[Peer], cell: str) -> Peer:
    return next(p for p in peers if p.status().cell.cell == cell and p.status().stage == 0)


def lacks_a_peer(box: Box, peer: Peer) -> bool:
    """Return True if a cell that `tutti cells` shows has a stage without a peer."""
    shown = box.tutti("cells", "--json", home=peer.label)
    seen = json.loads(shown.stdout)["seen"] if shown.returncode == 0 else []
    return len(seen) == 2 and any(not min(cell["replicas"]) for cell in seen)


def test_a_newcomer_brings_the_stage_back_from_another_cell(box: Box) -> None:
    peers = box.swarm(
        (2, 2, 2),
        pipeline__stages=2,
        pipeline__may_skip=0.5,
        scheduler__paths="planned",
        scheduler__skip=0.5,
        averaging__cell=1,
        outer__strategy="gossip",
        outer__carries="parameters",
        # Records of cells live for three quarters of a window: on a busy machine those of a short
        # one end before they are posted again.
        outer__window_s=24.0,
        training__min_replicas=1,
        training__epochs=100_000,
    )
    box.start(*peers)
    box.wait(
        "a cell of three",
        lambda: sum(bool(p.events("cell-entered")) for p in peers) == 3,
        120.0,
        tuple(peers),
    )
    lost = next(p for p in peers if p.status().stage == 2 and p.events("cell-entered"))
    cell = lost.status().cell.cell
    leader = leader_of(peers, cell)
    box.wait("some epochs", lambda: lost.status().epoch >= leader.status().epoch >= 3)
    lost.kill()
    box.wait("paths around the stage", lambda: leader.events("stage-left-out"), 120.0, (leader,))
    # Until then a newcomer may find both cells in equal need, and join the other one.
    box.wait("the lack in the directory", lambda: lacks_a_peer(box, leader), 120.0, (leader,), 2.0)
    newcomer = box.newcomer("new", leader, "--stage", "2").start()
    back = box.wait("the stage", lambda: leader.events("stage-back"), START_S, (leader, newcomer))
    assert back[0]["fields"]["stage"] == 2
    assert newcomer.events("from-another-cell")
    assert newcomer.status().cell.cell == cell
    began = newcomer.status().epoch
    box.wait(
        "work of the newcomer",
        lambda: newcomer.status().state in WORKING and newcomer.status().epoch > began,
        120.0,
        (leader, newcomer),
    )
