"""Every optimizer's state through real rounds: an owner leaves, one joins, and a swarm comes back
smaller and larger."""

from typing import Any

import pytest
import torch

from node.core.errors import OutOfResources, StepFault
from node.core.ids import PeerId
from node.optim.ownership import assign
from node.optim.parts import SCRATCH_KEPT, parts_of, step_scratch
from node.optim.settings import OptimSettings

METHODS = ("muon", "shampoo", "soap", "adamw")


def settings(method: str) -> OptimSettings:
    return OptimSettings(name=method, warmup=0, precondition_every=3)


def placed(rig: Any, peers: Any, before: Any = None) -> dict[str, PeerId]:
    return assign(parts_of(rig.shapes, rig.optim), [(p.me, 1.0) for p in peers], before)


def by_peer(rig: Any, owners: dict[str, PeerId]) -> dict[str, Any]:
    return {name: rig.peers[peer] for name, peer in owners.items()}


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(got, expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
async def test_an_owner_leaves_and_one_joins_and_nothing_is_lost(
    rig: Any, alone: Any, method: str
) -> None:
    rig.optim = settings(method)
    alone = type(alone)(rig.optim)
    a, b, c = await rig.add("a", "b", "c", buddy_every=1)
    first = placed(rig, (a, b, c))
    plan = await rig.train((a, b, c), by_peer(rig, first), 4)
    # c leaves: its parts are fetched from it while the next epoch runs.
    second = placed(rig, (a, b), first)
    moved = {n: rig.peers[first[n]] for n in first if first[n] != second[n]}
    plan = await rig.epoch(rig.plan((a, b), by_peer(rig, second), plan, moved=moved), a, b)
    # d joins: parameters from the others, state of its parts from their owners.
    (d,) = await rig.add("d", buddy_every=1)
    await d.work.join((a.me, b.me), None)
    third = placed(rig, (a, b, d), second)
    moved = {n: rig.peers[second[n]] for n in second if second[n] != third[n]}
    plan = await rig.epoch(rig.plan((a, b, d), by_peer(rig, third), plan, moved=moved), a, b, d)
    alone.epochs(["abc"] * 4 + ["ab", "abd"])
    assert d.me in third.values()
    for p in (a, b, d):
        same(p.parameters(), alone.parameters)
        assert p.work.state_export.taking.lost == p.work.state_export.taking.age == 0
        for name in (n for n, o in third.items() if o == p.me):
            assert p.owner.after(name, 5)["steps"].tolist() == [6.0]


@pytest.mark.parametrize("method", METHODS)
async def test_a_swarm_of_three_comes_back_as_two_and_as_five(
    rig: Any, alone: Any, method: str
) -> None:
    rig.optim = settings(method)
    alone = type(alone)(rig.optim)
    peers = await rig.add("a", "b", "c", every=4, buddy_every=1)
    before = placed(rig, peers)
    plan = await rig.train(peers, by_peer(rig, before), 4)
    await rig.begin(rig.plan(peers, by_peer(rig, before), plan), *peers)
    alone.epochs(["abc"] * 4)
    for p in peers:
        await p.work.local_checkpoints.saved()
    for back, new in (("ab", ""), ("abc", "de")):
        again = type(rig)(rig.home)
        again.optim = rig.optim
        try:
            here = await again.add(*back, buddy_every=1)
            for p in here:
                (version,) = p.work.checkpoints()
                await p.work.restore(version)
            for p in await again.add(*new, buddy_every=1):
                await p.work.join([q.me for q in here], None)
                here.append(p)
            past = here[0].work.local_checkpoints.recall(version)
            assert past.owners == before
            owners = placed(again, here, past.owners)
            moved = {
                n: again.peers[o]
                for n, o in past.owners.items()
                if o in again.peers and owners[n] != o
            }
            last = again.plan(here, by_peer(again, owners), plan, moved=moved)
            await again.epoch(last, *here)
            # Who came back has its own state; the rest came from its owner, or as the copy of an
            # epoch before.
            old = {n for n, o in past.owners.items() if o not in again.peers}
            assert bool(old) == (back == "ab")
            expected = alone.stepped([p.name for p in here], 4, dict.fromkeys(old, 3))
            same(here[0].parameters(), expected)
            assert sum(p.work.state_export.taking.lost for p in here) == 0
            assert max(p.work.state_export.taking.age for p in here) == (1 if old else 0)
        finally:
            await again.close()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("when", ["in the round", "between epochs"])
async def test_an_owner_that_dies_costs_every_method_the_same_age(
    rig: Any, alone: Any, method: str, when: str
) -> None:
    """Its buddy has the state of two epochs before, all of it: preconditioners and the count of
    steps too, and of no part more or less than of another method's."""
    rig.optim = settings(method)
    alone = type(alone)(rig.optim)
    a, b, c = await rig.add("a", "b", "c", buddy_every=2)
    first = placed(rig, (a, b, c))
    plan = await rig.train((a, b, c), by_peer(rig, first), 5)
    alone.epochs(["abc"] * 5)
    gone = [n for n, owner in first.items() if owner == a.me]
    assert gone
    for name in gone:
        kept = b.work.state_export.spares.get(name)
        assert kept.version.epoch == 4
        same(kept.state, alone.saved[4][name])
    heirs = dict.fromkeys(gone, c.me)
    left = first | heirs
    if when == "in the round":
        last = rig.plan((a, b, c), by_peer(rig, first), plan)
        await rig.begin(last, a, b, c)
        await rig.net.kill(a.me)
        for ended in await rig.average(last, b, c):
            assert set(ended.missing) == set(gone)
        await rig.averaged(last, b, c, attempt=1, dead=(a.me,), owners=heirs)
    else:
        await rig.net.kill(a.me)
        last = await rig.epoch(rig.plan((b, c), by_peer(rig, left), plan), b, c)
    expected = alone.stepped(["b", "c"], 5, dict.fromkeys(gone, 4))
    for p in (b, c):
        same(p.parameters(), expected)
        assert p.work.state_export.taking.lost == 0
    assert c.work.state_export.taking.age == 1
    for name in gone:
        # One step of six is missing in the state, and no other.
        assert c.owner.after(name, 5)["steps"].tolist() == [5.0]
    # The epoch after needs nobody's copy any more.
    await rig.epoch(rig.plan((b, c), by_peer(rig, left), last), b, c)
    assert all(c.owner.through(name) == 5 for name in gone)


async def test_a_part_that_cannot_be_stepped_fails_only_the_attempt(
    rig: Any, monkeypatch: Any
) -> None:
    rig.optim = settings("soap")
    a, b = await rig.add("a", "b", buddy_every=0)
    first = {"layers.0.a": a, "layers.0.norm": a, "layers.0.b": b, "layers.1.a": b}
    plan = await rig.train((a, b), first, 1)
    last = rig.plan((a, b), first, plan)
    await rig.begin(last, a, b)

    def fails(*_: Any) -> Any:
        raise StepFault(
            "a (8, 8) matrix cannot be stepped: did not converge", "take a smaller learning rate"
        )

    monkeypatch.setattr(a.owner, "step_parts", fails)
    for ended in await rig.average(last, a, b):
        assert set(ended.missing) == {"layers.0.a", "layers.0.norm"}
    second = dict.fromkeys(("layers.0.a", "layers.0.norm"), b.me)
    await rig.averaged(last, a, b, attempt=1, owners=second)
    assert a.work.stage.digest == b.work.stage.digest
    assert not a.errors, "the daemon ends for an error that a task leaves"


def test_memory_for_a_stage_counts_the_largest_matrix_whole(tmp_path: Any) -> None:
    from node.app.capacity import check_memory
    from node.config import NodeConfig
    from node.manifest import Manifest, amended
    from node.model.cost import RoundBytes, stage_bytes
    from node.model.shapes import parameter_shapes
    from node.pipeline.settings import PipelineLimits

    config = NodeConfig(tmp_path, limits=PipelineLimits(recompute="off"))
    demo = Manifest.default_demo()
    needed = {
        (name, peers): check_memory(
            config,
            amended(demo, {"optimizer.name": name, "training.min_replicas": peers}),
            1,
            1 << 40,
        )
        for name in METHODS
        for peers in (1, 1000)
    }
    alone = {name: needed[name, 1].needed for name in METHODS}
    assert alone["muon"] < alone["shampoo"] < alone["soap"]
    assert alone["adamw"] < alone["shampoo"], "more state than Muon's, but less to step it"
    parts = parts_of(parameter_shapes(demo.model, demo.pipeline.stages, 1), settings("soap"))
    largest, matrix = max(p.state for p in parts), max(p.bytes for p in parts)
    step = step_scratch(parts, settings("soap"), demo.averaging.group_bytes)
    shared = stage_bytes(
        demo.model,
        demo.pipeline.stages,
        1,
        micro_batch=demo.pipeline.micro_batch,
        in_flight=config.limits.in_flight,
        rounds=RoundBytes(largest, largest, 1000 * matrix, step, min(step, SCRATCH_KEPT)),
    )
    assert needed["soap", 1000].needed == shared.total, (
        "however many share the rest, somebody has all of the largest"
    )
    verdict = check_memory(config, demo, 1, alone["muon"])
    assert not verdict.ok
    with pytest.raises(OutOfResources) as fault:
        verdict.require()
    assert fault.value.next_step
    # What is left for state is what makes it fit: a peer says so to the leader.
    spare = check_memory(config, demo, 1, 1 << 40).spare
    assert 0 < spare < int((1 << 40) * 0.9) - alone["muon"]
    # A block stage has all adapters: there is nothing to step at the ends.
    frozen = check_memory(config, amended(demo, {"model.adapter": 2}), 0, 1 << 40)
    assert 0 < frozen.needed < check_memory(config, demo, 0, 1 << 40).needed
