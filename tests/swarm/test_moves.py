"""A lopsided swarm evens out: one daemon changes its stage and stays the same process, identity and
address."""

import psutil
import pytest

from testbed.daemons.fleet import START_S

pytestmark = pytest.mark.swarm


def test_three_and_one_become_two_and_two(box) -> None:
    peers = box.swarm(
        (1, 3, 1),
        training__min_replicas=1,
        training__epochs=100_000,
        training__rebalance_every_s=4.0,
    )
    peers[1:4] = [box.member(1, str(i), "--set", "may_move=true") for i in range(3)]
    first = peers[1:4]
    lone = peers[4]
    box.start(*peers)
    box.wait("addresses of those that may move", lambda: all(p.status().addresses for p in first))
    before = {
        p.label: (p.pid, psutil.Process(p.pid).create_time(), p.key, set(p.status().addresses))
        for p in first
    }
    mover = box.wait(
        "a peer to move",
        lambda: next((p for p in first if p.events("moving")), None),
        must_run=tuple(peers),
    )
    stays = [p for p in first if p is not mover]
    box.wait(
        "the mover in its new stage",
        lambda: mover.status().stage == 2 and mover.status().state == "training",
        START_S,
    )
    pid, born, key, addresses = before[mover.label]
    process = psutil.Process(mover.pid)
    assert (mover.pid, process.create_time(), mover.key) == (pid, born, key)
    assert set(mover.status().addresses) == addresses
    kinds = [e["kind"] for e in mover.events()]
    # The daemon may own nothing when it is asked to move: the others may have been faster.
    assert "not-handed-over" not in kinds
    assert kinds.index("moving") < len(kinds) - 1 - kinds[::-1].index("hosting")
    assert [e["fields"]["stage"] for e in mover.events("hosting")][:2] == [1, 2]
    box.goes_on(3)
    # On a busy machine measured speeds differ, and another daemon may have moved by now.
    box.wait(
        "two and two", lambda: [sum(p.status().stage == s for p in peers) for s in (1, 2)] == [2, 2]
    )
    box.digests_equal()
    for peer in (p for p in stays if not p.events("moving")):
        assert not peer.events("state-lost")
        assert peer.status().momentum_lost == 0
    # A daemon with only a stage named by its operator is never moved.
    assert not lone.events("moving")
    assert mover.p2pd() is not None
    codes = box.stop_all()
    assert set(codes.values()) == {0}
