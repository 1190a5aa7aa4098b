"""An owner that gives parameters which no step of the optimizer makes: nobody adopts them."""

import pytest
import torch

from node.core.journey import Plan
from tests.training.conftest import EPOCHS, Peer, Rig, same, shared


def lies(peer: Peer, by: float) -> None:
    """Move the first number of every part by ``by`` more in each of its steps."""
    true = peer.owner.step_parts

    def step_parts(*args: object) -> dict[str, torch.Tensor]:
        fresh = true(*args)  # type: ignore[arg-type]
        for tensor in fresh.values():
            tensor.view(-1)[0] += by
        return fresh

    setattr(peer.owner, "step_parts", step_parts)  # noqa: B010 - a liar has other code


def blamed(peer: Peer) -> list[tuple[str, float]]:
    """(peer, weight) of each fault that this peer has counted."""
    return [(about, weight) for about, _, weight in peer.transport.faults if weight]


async def refused(rig: Rig) -> tuple[Peer, Peer, Peer, Plan]:
    """Three peers and the plan of an epoch: the first lies, the others refuse its parameters."""
    liar, b, c, plan = await rig.trained("abc", 2)
    before = b.parameters()
    plan = await rig.begun([liar, b, c], shared(liar, b, c), plan)
    lies(liar, 1.0)
    _, *ended = await rig.average(plan, liar, b, c)
    for said in ended:
        assert said.impossible == said.failed == (liar.me,)
        assert set(said.missing) == {"layers.0.a", "layers.0.norm"}
    same(b.parameters(), before)
    return liar, b, c, plan


async def test_parts_beyond_the_longest_step_are_refused_and_stepped_by_another(rig: Rig) -> None:
    liar, b, c, plan = await refused(rig)
    for honest in (b, c):
        assert set(blamed(honest)) == {(liar.me, 1.0)}
    assert not blamed(liar)
    owners = {"layers.0.a": b.me, "layers.0.norm": b.me}
    await rig.averaged(plan, b, c, attempt=1, dead=(liar.me,), owners=owners)
    assert b.work.stage.digest == c.work.stage.digest != liar.work.stage.digest


async def test_they_are_not_copied_either(rig: Rig) -> None:
    liar, b, _, plan = await refused(rig)
    sources = {"sources": (liar.me,), "digest": liar.work.stage.digest}
    ended = await b.work.copy(plan, rig.round(plan, 1, **sources))
    assert ended.impossible == ended.failed == (liar.me,)
    assert set(ended.missing) == set(rig.shapes)


async def test_a_step_that_is_long_and_possible_is_adopted(rig: Rig) -> None:
    a, b, plan = await rig.trained("ab", 2)
    plan = await rig.begun([a, b], shared(a, b), plan)
    lies(a, 1e-5)
    await rig.averaged(plan, a, b)
    assert a.work.stage.digest == b.work.stage.digest


async def test_a_listener_takes_what_it_cannot_judge(rig: Rig) -> None:
    a, b, plan = await rig.trained("ab", 2)
    (late,) = await rig.add("c")
    plan = rig.plan([a, b], shared(a, b), plan, listeners=[late])
    await rig.begin(plan, a, b, late)
    await rig.averaged(plan, a, b, late)
    assert late.work.stage.digest == a.work.stage.digest


@pytest.mark.parametrize("epoch", [0, 50])
async def test_the_bound_follows_the_learning_rate(rig: Rig, epoch: int) -> None:
    """In the last epoch a step of earlier ones is too long."""
    (peer,) = await rig.add("a")
    limits = peer.work._inner._limits
    held = peer.parameters()
    limit = limits.of("layers.0.norm", (8,), epoch)
    moved = {"layers.0.norm": held["layers.0.norm"] + 0.99 * limit.each}
    assert limits.objection(held, moved, epoch) == ""
    assert limits.objection(held, moved, EPOCHS - 1) != ""
