"""The owner changes how a real swarm in one process averages, while it trains."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lab.memory_net import MemoryNet
from node.app.change import signed, wanted
from node.core.errors import Refused
from node.core.ids import ENDS
from node.core.journey import Plan
from node.identity.keys import Identity
from node.manifest import Manifest, amended
from node.training.protocol.rules import levels
from tests.golden.test_same_curve import Peer, manifest, one_thread

__all__ = ["one_thread"]

EPOCHS = 12
DILOCO = (
    b'[averaging]\ncell = 1\n[outer]\nstrategy = "butterfly"\ncarries = "deltas"\nevery = '
    b'2\noptimizer = "nesterov"\ncodec = "int8"\n'
)


async def test_one_cell_becomes_several_that_do_diloco(tmp_path: Path) -> None:
    owner = Identity.ephemeral()
    small = {
        "pipeline.stages": 1,
        "training.epochs": EPOCHS,
        "training.eval_every": 0,
        "training.min_replicas": 1,
    }
    small["training.target_batch"] = 16
    m = Manifest.parse(amended(manifest().owned_by(owner.peer_id), small).sign(owner))
    text = signed(m, wanted(m, DILOCO), 1, owner)
    net, keys = MemoryNet(), [Identity.ephemeral() for _ in range(3)]
    peers = [
        Peer(net, m, stage, k, {keys[0].peer_id}, tmp_path)
        for stage, k in zip((ENDS, 1, 1), keys, strict=True)
    ]
    plans: dict[int, Plan] = {}
    kept: list[str] = []
    try:
        for peer in peers:
            await peer.transport.start()

        def planned(plan: Plan) -> None:
            plans[plan.epoch] = plan
            if plan.epoch == 3:
                peers[2].training.change(text)

        peers[2].training.on_plan = planned
        peers[1].training.on_change = kept.append
        for peer in peers:
            peer.training.start()
        async with asyncio.timeout(120):
            await asyncio.gather(*(p.training.finished.wait() for p in peers))
        first = next(p for p in plans.values() if p.change)
        assert levels(first)
        assert 3 < first.epoch < 8
        assert kept == [text], "everybody has it from the plan"
        assert all(
            p.change == text and p.since == first.epoch
            for e, p in plans.items()
            if e >= first.epoch
        )
        assert {len(p.cells(1)) for p in plans.values() if p.epoch > first.epoch} == {2}
        assert any(p.outer for p in plans.values() if first.epoch < p.epoch < EPOCHS - 1), (
            "outer rounds as the change says"
        )
        assert any(apart > 0 for p in plans.values() for _, apart in p.spread.values())
        assert peers[1].work.stage.digest == peers[2].work.stage.digest, (
            "the last epoch is an outer round"
        )
        for peer in peers:
            assert peer.training.standing.in_force.revision == 1
            assert not [e for e in peer.journal.recent(1000) if e.level == "error"]
        events = [e.kind for e in peers[0].journal.recent(10_000)]
        assert events.count("averaging-changed") == 1
        assert "epoch-abandoned" not in events
        forged = text.replace('"revision":1', '"revision":2')
        for bad in (forged, text.replace("int8", "int4")):
            with pytest.raises(Refused):
                peers[1].training.change(bad)
        old = replace(
            peers[1].training.member.plan, change="", outer=1, leader=peers[0].training.me
        )  # type: ignore[type-var]
        assert "in force" in peers[1].training.standing.refuses(old, peers[1].work.read(""))
    finally:
        for peer in peers:
            await peer.close()
