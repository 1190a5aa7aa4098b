"""Every optimizer's state through real rounds: an owner leaves, one joins, and a swarm comes back
smaller and larger."""

from typing import Any

import pytest
import torch

from node.app.capacity import check_memory
from node.config import NodeConfig
from node.core.errors import StepFault
from node.manifest import Manifest, amended
from node.model.cost import RoundBytes, stage_bytes
from node.model.shapes import parameter_shapes
from node.optim.parts import SCRATCH_KEPT, parts_of, step_scratch
from node.optim.settings import OptimSettings
from node.pipeline.settings import PipelineLimits
from tests.training.conftest import Alone, Rig, shared
from tests.training.conftest import same as near

METHODS = ("muon", "shampoo", "soap", "adamw")


def settings(method: str) -> OptimSettings:
    return OptimSettings(name=method, warmup=0, precondition_every=3)


@pytest.fixture(params=METHODS)
def alone(request: pytest.FixtureRequest, rig: Rig) -> Alone:
    """One process that steps with the same method as the rig."""
    rig.optim = settings(request.param)
    return Alone(rig.optim)


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    near(got, expected, atol=5e-5, rtol=1e-4)


async def test_an_owner_leaves_and_one_joins_and_nothing_is_lost(rig: Any, alone: Any) -> None:
    a, b, c = await rig.add("a", "b", "c", buddy_every=1)
    first = rig.placed((a, b, c))
    plan = await rig.train((a, b, c), first, 4)
    # c leaves: its parts are fetched from it while the next epoch runs.
    second = rig.placed((a, b), first)
    moved = {n: p for n, p in first.items() if second[n] is not p}
    plan = await rig.epoch(rig.plan((a, b), second, plan, moved=moved), a, b)
    # d joins: parameters from the others, state of its parts from their owners.
    (d,) = await rig.add("d", buddy_every=1)
    await d.work.join((a.me, b.me), None)
    third = rig.placed((a, b, d), second)
    moved = {n: p for n, p in second.items() if third[n] is not p}
    plan = await rig.epoch(rig.plan((a, b, d), third, plan, moved=moved), a, b, d)
    alone.epochs(["abc"] * 4 + ["ab", "abd"])
    assert d in third.values()
    for p in (a, b, d):
        same(p.parameters(), alone.parameters)
        assert p.taking.lost == p.taking.age == 0
        for name in (n for n, o in third.items() if o is p):
            assert p.owner.after(name, 5)["steps"].tolist() == [6.0]


async def test_a_swarm_of_three_comes_back_as_two_and_as_five(rig: Any, alone: Any) -> None:
    peers = await rig.add("a", "b", "c", every=4, buddy_every=1)
    before = rig.placed(peers)
    plan = await rig.train(peers, before, 4)
    await rig.begun(peers, before, plan)
    alone.epochs(["abc"] * 4)
    await rig.copied(*peers)
    for back, new in (("ab", ""), ("abc", "de")):
        async with rig.again() as again:
            here = await again.add(*back, buddy_every=1)
            for p in here:
                (version,) = p.work.local_checkpoints.versions()
                await p.work.restore(version)
            for p in await again.add(*new, buddy_every=1):
                await p.work.join([q.me for q in here], None)
                here.append(p)
            past = here[0].work.local_checkpoints.recall(version)
            assert past.owners == {n: p.me for n, p in before.items()}
            owners = again.placed(here, past.owners)
            moved = {
                n: again.peers[o]
                for n, o in past.owners.items()
                if o in again.peers and owners[n].me != o
            }
            await again.epoch(again.plan(here, owners, plan, moved=moved), *here)
            # A peer that came back has its own state. The rest came from its owner, or from the
            # copy of the epoch before.
            old = {n for n, o in past.owners.items() if o not in again.peers}
            assert bool(old) == (back == "ab")
            names = [p.name for p in here]
            same(here[0].parameters(), alone.stepped(names, 4, dict.fromkeys(old, 3)))
            assert sum(p.taking.lost for p in here) == 0
            assert max(p.taking.age for p in here) == (1 if old else 0)


@pytest.mark.parametrize("when", ["in the round", "between epochs"])
async def test_an_owner_that_dies_costs_every_method_the_same_age(
    rig: Any, alone: Any, when: str
) -> None:
    """Its buddy has all of the state two epochs before, for every method and the same parts:
    preconditioners and the count of steps too."""
    a, b, c = await rig.add("a", "b", "c", buddy_every=2)
    first = rig.placed((a, b, c))
    plan = await rig.train((a, b, c), first, 5)
    alone.epochs(["abc"] * 5)
    gone = [n for n, owner in first.items() if owner is a]
    assert gone
    for name in gone:
        assert b.spares.get(name).version.epoch == 4
        same(b.spares.get(name).state, alone.saved[4][name])
    left = first | dict.fromkeys(gone, c)
    if when == "in the round":
        last = await rig.begun((a, b, c), first, plan)
        await rig.net.kill(a.me)
        for ended in await rig.average(last, b, c):
            assert set(ended.missing) == set(gone)
        await rig.averaged(last, b, c, attempt=1, dead=(a.me,), owners=dict.fromkeys(gone, c.me))
    else:
        await rig.net.kill(a.me)
        last = await rig.epoch(rig.plan((b, c), left, plan), b, c)
    expected = alone.stepped(["b", "c"], 5, dict.fromkeys(gone, 4))
    for p in (b, c):
        same(p.parameters(), expected)
    assert (b.taking.lost, c.taking.lost, c.taking.age) == (0, 0, 1)
    for name in gone:
        # One step of six is missing in the state, and no other.
        assert c.owner.after(name, 5)["steps"].tolist() == [5.0]
    # The epoch after needs nobody's copy any more.
    await rig.epoch(rig.plan((b, c), left, last), b, c)
    assert all(c.owner.through(name) == 5 for name in gone)


async def test_a_part_that_cannot_be_stepped_fails_only_the_attempt(
    rig: Any, monkeypatch: Any
) -> None:
    rig.optim = settings("soap")
    a, b, plan = await rig.trained("ab", 1, buddy_every=0)
    last = await rig.begun((a, b), shared(a, b), plan)

    def fails(*_: Any) -> Any:
        raise StepFault(
            "a (8, 8) matrix cannot be stepped: did not converge", "take a smaller learning rate"
        )

    monkeypatch.setattr(a.owner, "step_parts", fails)
    for ended in await rig.average(last, a, b):
        assert set(ended.missing) == {"layers.0.a", "layers.0.norm"}
    await rig.averaged(last, a, b, attempt=1, owners=dict.fromkeys(ended.missing, b.me))
    assert a.work.stage.digest == b.work.stage.digest
    assert not a.errors, "the daemon ends for an error that a task leaves"


def test_memory_for_a_stage_counts_the_largest_matrix_whole(tmp_path: Any) -> None:
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
    largest = max(p.state for p in parts)
    matrix = max(p.bytes for p in parts)
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
    # `spare` is the memory left for state, which a peer reports to the leader.
    spare = check_memory(config, demo, 1, 1 << 40).spare
    assert 0 < spare < int((1 << 40) * 0.9) - alone["muon"]
    # A block stage has all adapters: there is nothing to step at the ends.
    frozen = check_memory(config, amended(demo, {"model.adapter": 2}), 0, 1 << 40)
    assert 0 < frozen.needed < check_memory(config, demo, 0, 1 << 40).needed
