"""Parameters in bf16: fp32 masters travel with the optimizer's state, through real rounds, real
transfers and checkpoints."""

from typing import Any

import pytest
import torch

from node.optim.owner import Owner
from node.optim.parts import LOW
from node.optim.settings import OptimSettings
from node.optim.steps import join
from tests.training.conftest import OPTIM, same

HALF = OptimSettings(warmup=0, parameters="bf16")


@pytest.fixture
def rig(rig: Any) -> Any:
    rig.optim = HALF
    return rig


def equal(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def check(owners: dict[str, Any], epoch: int, peers: Any) -> None:
    """Assert that all peers have the same bits, and that every owner has the other half of its own
    parts."""
    here = peers[0].parameters()
    assert all(equal(p.parameters(), here) for p in peers)
    assert {t.dtype for t in here.values()} == {torch.bfloat16}
    lows = [owner.owner.after(name, epoch)[LOW] for name, owner in owners.items()]
    assert {low.dtype for low in lows} == {torch.int16}
    assert all(low.any() for low in lows), "there is something to lose"


async def test_masters_move_to_a_new_owner_bit_for_bit(rig: Any) -> None:
    a, b, c = await rig.add("a", "b", "c", buddy_every=0)
    first = rig.placed((a, b, c))
    plan = await rig.train((a, b, c), first, 3)
    check(first, 2, (a, b, c))
    second = rig.placed((a, b), first)
    moved = {n: p for n, p in first.items() if second[n] is not p}
    states = {n: p.owner.after(n, 2) for n, p in moved.items()}
    assert states
    last = await rig.begun((a, b), second, plan, moved=moved)
    for name, state in states.items():
        await second[name].taking.ready([name], 60.0)
        assert equal(second[name].owner.state(name), state)
    await rig.averaged(last, a, b)
    check(second, 3, (a, b))


@pytest.mark.parametrize("copied", [True, False])
async def test_an_owner_dies_and_its_masters_come_from_copies(rig: Any, copied: bool) -> None:
    """A copy of the plan's version continues to the bit; an older copy is used as old momentum
    is."""
    a, b, c = await rig.add("a", "b", "c", buddy_every=4 if copied else 3)
    first = rig.placed((a, b, c))
    plan = await rig.train((a, b, c), first, 4)
    gone = [n for n, p in first.items() if p is a]
    last = await rig.begun((a, b, c), first, plan)
    await rig.copied(a, b, c)
    before = {n: a.owner.state(n) for n in gone}
    parameters = b.parameters()
    await rig.net.kill(a.me)
    heirs = {n: c if n in gone else p for n, p in first.items()}
    await rig.averaged(last, b, c, dead=(a.me,), owners={n: c.me for n in gone})
    check(heirs, 4, (b, c))
    assert (c.taking.age, c.taking.lost) == (0 if copied else 1, 0)
    mean = rig.mean(["b", "c"], 4)
    for name in gone:
        if not copied:  # of version 3
            old = b.spares.get(name)
            assert not equal(old.state, before[name])
            before[name] = dict(old.state)
        alone = Owner(HALF, 100)
        alone.load_state(name, rig.shapes[name], before[name], 3)
        fresh = alone.step(name, parameters[name], mean[name], 4)
        got = join(b.parameters()[name], c.owner.after(name, 4)[LOW])
        same(got, join(fresh, alone.after(name, 4)[LOW]))


async def test_masters_come_back_from_checkpoints_bit_for_bit(rig: Any) -> None:
    a, b = await rig.add("a", "b", every=3, buddy_every=1)
    owners = rig.placed((a, b))
    plan = await rig.train((a, b), owners, 3)
    last = await rig.begun((a, b), owners, plan)
    await rig.copied(a, b)
    parameters = a.parameters()
    states = a.states() | b.states()
    await rig.averaged(last, a, b)
    async with rig.again() as again:
        x, y = await again.add("a", "b", buddy_every=1)
        for p in (x, y):
            (version,) = p.work.local_checkpoints.versions()
            await p.work.restore(version)
            assert equal(p.parameters(), parameters)
        restored = x.states() | y.states()
        assert restored.keys() == states.keys()
        assert all(equal(restored[n], states[n]) for n in states)
        kept = {n: again.peers[p.name] for n, p in owners.items()}
        await again.epoch(again.plan((x, y), kept, plan), x, y)
        check(kept, 3, (x, y))
        assert equal(x.parameters(), a.parameters()), "as if nobody had stopped"
        # A joining peer has the parameters to the bit, and no state.
        (z,) = await again.add("z")
        await z.work.join((x.me, y.me), None)
        assert equal(z.parameters(), x.parameters())
        assert (z.work.stage.digest, z.states()) == (x.work.stage.digest, {})


async def test_fresh_parameters_travel_in_half_the_bytes(rig: Any) -> None:
    numbers = sum(torch.Size(shape).numel() for shape in rig.shapes.values())
    moved = {}
    async with rig.again() as whole:
        whole.optim = OPTIM
        for one in (whole, rig):
            a, b = await one.add("a", "b", buddy_every=0)
            await one.train((a, b), dict.fromkeys(one.shapes, a), 1)
            moved[one.optim.parameters] = b.work.rounds.figures.nbytes
    assert moved == {"fp32": (4 + 4) * numbers, "bf16": (4 + 2) * numbers}
