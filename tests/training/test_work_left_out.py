"""A stage that was left out for some epochs goes on where it stood: the same parameters, the same
momentum, no epoch twice."""

from __future__ import annotations

from typing import Any

import torch

from node.core.journey import Version

LATER = Version(9, "ee" * 16)


async def test_parameters_and_momentum_continue_after_skipped_epochs(rig: Any, alone: Any) -> None:
    (a,) = await rig.add("a", every=1)
    owners = dict.fromkeys(rig.shapes, a)
    plan = await rig.train((a,), owners, 3)
    alone.epochs(["a"] * 3)
    # What it made last becomes final, then the swarm's version is that of nine epochs.
    held = a.work.version
    await a.work.settle(
        held.epoch, rig.plan((a,), owners, plan, epoch=LATER.epoch, lineage=LATER.lineage)
    )
    digest = a.work.stage.digest
    await a.work.go_to(LATER, "left out")
    assert (a.work.version, a.work.stage.settled, a.work.stage.digest) == (LATER, LATER, digest)
    back = rig.plan((a,), owners, plan, epoch=LATER.epoch, lineage=LATER.lineage, stood={1: held})
    a.plan = None
    await rig.epoch(back, a)
    assert a.work.version.epoch == LATER.epoch + 1
    assert not a.events("state-lost")
    assert not a.events("momentum-old")
    expected = alone.stepped("a", LATER.epoch, dict.fromkeys(rig.shapes, 3))
    for name, t in a.parameters().items():
        torch.testing.assert_close(t, expected[name], atol=2e-6, rtol=1e-5)
    # A checkpoint of the version before is not written anew under the epoch that became final late.
    await a.work.local_checkpoints.saved()
    assert held not in a.work.checkpoints()
    assert a.owner.through("layers.0.a") == LATER.epoch - 1
