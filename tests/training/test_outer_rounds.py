"""Two cells of a stage and the outer rounds between them: real exchanges, real parameters,
gradients that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from node.app.snapshot import outer_line
from node.averaging.exchange.request import RoundOutcome, RoundRequest
from node.averaging.reducers.spread import ERROR
from node.averaging.strategies.diloco import OuterState, outer_step, pseudo_gradient
from node.averaging.strategies.outer import OuterSettings
from node.core.errors import Refused
from node.core.ids import PeerId
from node.core.journey import Plan, PlanMember, in_cell
from node.training.leader.attempt import EpochAttempt
from node.training.protocol import events as ev
from node.training.protocol.meetings import speakers
from node.training.protocol.plan_context import makes
from node.training.protocol.rules import Rules, levels
from protos.control_pb2 import SpreadLine
from tests.training.conftest import SHAPES, Block, Peer, Rig

PARAMETERS = OuterSettings("butterfly", "parameters", 1)
DELTAS = OuterSettings("butterfly", "deltas", 1, "nesterov", codec="int8")
STATE = OuterSettings("gossip", "state", 1, "nesterov")
BEGUN = OuterState.begin(dict(Block().named_parameters()))
"""The anchor that every peer begins with."""


def inner(rig: Rig, cells: Sequence[Sequence[Peer]], after: Plan | None) -> Plan:
    """An epoch of gradients: each cell's first peer owns everything there."""
    members = tuple(PlanMember(p.me, 1, 1.0, True, i) for i, cell in enumerate(cells) for p in cell)
    owners = {in_cell(n, i): cell[0].me for i, cell in enumerate(cells) for n in SHAPES}
    return replace(
        rig.plan([p for cell in cells for p in cell], {}, after), members=members, owners=owners
    )


def meeting(
    rig: Rig, cells: Sequence[Sequence[Peer]], after: Plan, listeners: Sequence[Peer] = ()
) -> Plan:
    """An outer round of all cells in one group; everybody averages a part."""
    plan = inner(rig, cells, after)
    peers = sorted(p.me for cell in cells for p in cell)
    reducers = {name: PeerId(peers[i % len(peers)]) for i, name in enumerate(SHAPES)}
    more = tuple(PlanMember(p.me, 1, 1.0, False, 0) for p in listeners)
    return replace(
        plan, paths=(), outer=plan.epoch // 2 + 1, reducers=reducers, members=plan.members + more
    )


def equal(a: Peer, b: Peer) -> bool:
    return a.work.stage.digest == b.work.stage.digest


async def four(rig: Rig) -> list[list[Peer]]:
    rig.deadline_s = 60.0  # nobody dies here, so that nothing is waited for
    peers = await rig.add("a", "b", "c", "d")
    return [peers[:2], peers[2:]]


async def trained(rig: Rig, outer: OuterSettings) -> tuple[list[list[Peer]], list[Peer], Plan]:
    """Two cells of two under these settings, their peers, and the plan of an epoch of gradients
    that is done."""
    rig.outer = outer
    cells = await four(rig)
    everybody, plan = [p for cell in cells for p in cell], inner(rig, cells, None)
    await rig.epoch(plan, *everybody)
    return cells, everybody, plan


async def test_cells_train_apart_and_average_their_parameters(rig: Rig) -> None:
    cells, (a, b, c, d), plan = await trained(rig, PARAMETERS)
    assert equal(a, b)
    assert equal(c, d)
    assert not equal(a, c)
    mean = {n: (a.parameters()[n] + c.parameters()[n]) / 2 for n in SHAPES}
    plan = meeting(rig, cells, plan)
    await rig.epoch(plan, a, b, c, d)
    for p in (a, b, c, d):
        assert all(torch.equal(t, mean[n]) for n, t in p.parameters().items())
    following = await rig.epoch(inner(rig, cells, plan), a, b, c, d)
    assert not equal(a, c), "each cell goes on with its own gradients and its own optimizer state"
    assert not [e for p in (a, b, c, d) for e in p.events("state-lost")]
    assert a.owner.staged(following.epoch) == set(SHAPES)
    assert {a.owner.through(n) for n in SHAPES} == {plan.epoch}


async def test_members_of_a_cell_agree_on_a_sketch_and_report_spread(
    rig: Rig,
) -> None:
    cells, everybody, plan = await trained(rig, PARAMETERS)
    (a, b), (c, d) = cells

    def told(plan: Plan, **changed: ev.Committed) -> dict[int, tuple[int, float]]:
        attempt = EpochAttempt(plan, 0.0, 1.0)
        for p in everybody:
            said = ev.Committed(p.me, plan.hash, 0, p.work.stage.digest, sketch=p.work.sketch)
            attempt.outcomes[p.me] = changed.get(p.name, said)
        return attempt.apart({(1, 0): a.work.stage.digest, (1, 1): c.work.stage.digest})

    assert a.work.sketch == b.work.sketch != c.work.sketch == d.work.sketch
    both = [torch.cat([p.parameters()[n].flatten() for n in SHAPES]) for p in (a, c)]
    true = float((both[0] - both[1]).norm() / torch.cat(both).norm() / 2**0.5)
    assert told(plan) == {1: (2, pytest.approx(true, rel=4 * ERROR))}
    silent = {p.name: ev.Committed(p.me, plan.hash, 0, p.work.stage.digest) for p in (c, d)}
    assert told(plan, **silent) == {}, "one cell is not compared with itself"
    other = ev.Committed(a.me, plan.hash, 0, "another digest", sketch=d.work.sketch)
    assert told(plan, a=other) == told(plan), "who holds something else says nothing of the cell"
    plan = meeting(rig, cells, plan)
    await rig.epoch(plan, a, b, c, d)
    assert told(plan) == {1: (2, 0.0)}
    assert outer_line(a.work, 0).spread == SpreadLine(), "nothing is shown that no plan said"
    whole = replace(inner(rig, [[a, b, c, d]], plan), spread={0: (9, 0.9), 1: (2, 0.25)})
    await rig.epoch(whole, a, b, c, d)
    assert a.work.sketch == (), "one cell has nothing to be compared with"
    assert outer_line(a.work, 0).spread == SpreadLine(cells=2, relative=0.25, error=ERROR)


@pytest.mark.parametrize("settings", [PARAMETERS, replace(DELTAS, codec="fp32")])
async def test_a_cell_weighs_its_work_whatever_it_claims(rig: Rig, settings: OuterSettings) -> None:
    cells, everybody, plan = await trained(rig, settings)
    (a, _), (c, d) = cells
    for p in (c, d):
        assert p.outer is not None
        run = p.outer.run
        p.outer.run = lambda request, hook, run=run: run(
            replace(request, tokens=3 * request.tokens), hook
        )  # type: ignore[method-assign]
    mean = {n: (3 * a.parameters()[n] + c.parameters()[n]) / 4 for n in SHAPES}
    if settings.carries == "deltas":
        mean = outer_step(BEGUN, {n: BEGUN.anchor[n] - t for n, t in mean.items()}, settings).anchor
    plan = replace(meeting(rig, cells, plan), worked={(1, 0): 3, (1, 1): 1})
    await rig.epoch(plan, *everybody)
    assert len({p.work.stage.digest for p in everybody}) == 1
    torch.testing.assert_close(a.parameters(), mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [replace(DELTAS, codec="fp32"), STATE])
async def test_diloco_makes_equal_outer_steps_and_keeps_its_momentum(
    rig: Rig, settings: OuterSettings
) -> None:
    rig.outer = settings
    cells = await four(rig)
    (a, b), (c, d) = cells
    state, plan = OuterState.begin(a.parameters()), None
    for _ in range(2):
        plan = await rig.epoch(inner(rig, cells, plan), a, b, c, d)
        moved = [pseudo_gradient(state, p.parameters()) for p in (a, c)]
        state = outer_step(state, {n: (moved[0][n] + moved[1][n]) / 2 for n in SHAPES}, settings)
        plan = meeting(rig, cells, plan)
        await rig.epoch(plan, a, b, c, d)
        assert len({p.work.stage.digest for p in (a, b, c, d)}) == 1
        for p in (a, d):
            torch.testing.assert_close(p.parameters(), state.anchor, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(p.anchored.momentum, state.momentum, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("before", [PARAMETERS, STATE])
async def test_a_change_starts_anchors_after_all_cells_average(
    rig: Rig, before: OuterSettings
) -> None:
    cells, everybody, plan = await trained(rig, before)
    (a, b), (c, d) = cells
    mean = {n: (a.parameters()[n] + c.parameters()[n]) / 2 for n in SHAPES}
    old = a.work.anchor.state
    changed = replace(meeting(rig, cells, plan), change="deltas", since=1)
    assert levels(changed)
    assert a.work.objection(changed) == ""
    await rig.epoch(changed, *everybody)
    for p in everybody:
        assert all(torch.equal(t, mean[n]) for n, t in p.parameters().items())
        assert all(torch.equal(t, mean[n]) for n, t in p.anchored.anchor.items())
        assert not any(t.any() for t in p.anchored.momentum.values())
    again = replace(meeting(rig, cells, plan), change="deltas", since=1)
    await rig.begin(again, *everybody)
    assert a.work.anchor.state is old, "it was undone"
    await rig.averaged(again, *everybody)
    state = OuterState.begin(mean)
    plan = replace(inner(rig, cells, again), change="deltas", since=1)
    await rig.epoch(plan, *everybody)
    moved = [pseudo_gradient(state, p.parameters()) for p in (a, c)]
    settings = rig.read("deltas").outer
    state = outer_step(state, {n: (moved[0][n] + moved[1][n]) / 2 for n in SHAPES}, settings)
    await rig.epoch(replace(meeting(rig, cells, plan), change="deltas", since=1), *everybody)
    assert len({p.work.stage.digest for p in everybody}) == 1
    torch.testing.assert_close(a.parameters(), state.anchor, rtol=1e-5, atol=1e-6)


async def test_rounding_errors_end_with_any_change(rig: Rig) -> None:
    settings = replace(DELTAS, codec="top-k", feedback=True)
    cells, everybody, plan = await trained(rig, settings)
    plan = meeting(rig, cells, plan)
    await rig.epoch(plan, *everybody)
    assert any(p.work.anchor.residual.words for p in everybody)
    for p in everybody:
        p.work.read = lambda change: Rules(1, settings, 1, change)
    plan = await rig.epoch(inner(rig, cells, plan), *everybody)
    plan = replace(meeting(rig, cells, plan), change="to the same", since=plan.epoch + 1)
    await rig.epoch(plan, *everybody)
    assert not any(
        p.work.anchor.residual.words or p.work.anchor.residual.means for p in everybody
    ), "all was averaged as it is"


async def test_a_plan_of_an_unsigned_change_is_refused(
    rig: Rig,
) -> None:
    rig.outer = replace(PARAMETERS, every=3)
    cells = await four(rig)
    a = cells[0][0]
    plan = meeting(rig, cells, inner(rig, cells, None))
    assert "outer round" in a.work.objection(plan), "none is due at epoch 1 by the rig's settings"
    assert a.work.objection(replace(plan, change="deltas", since=1)) == ""
    assert a.work.objection(replace(plan, change="deltas", since=0)) == "", "by the change one is"
    assert "outer round" in a.work.objection(replace(plan, outer=0, change="deltas", since=1))

    def nobody(change: str) -> Rules:
        raise Refused("not signed by the owner")

    a.work.read = nobody
    assert a.work.objection(replace(plan, change="forged", since=1)) == "not signed by the owner"


async def test_who_has_no_anchor_copies_the_result_and_has_one_then(rig: Rig) -> None:
    cells, (a, b, c, d), plan = await trained(rig, DELTAS)
    (e,) = await rig.add("e")
    plan = meeting(rig, cells, plan, [e])
    everybody = (a, b, c, d, e)
    await rig.begin(plan, *everybody)
    ended = await rig.average(plan, *everybody)
    said = [e.text for p in everybody for e in p.events("member-failed")]
    assert [bool(x.missing) for x in ended] == [False] * 4 + [True], said
    got = await e.work.copy(
        plan, rig.round(plan, 1, sources=(a.me, b.me), digest=a.work.stage.digest)
    )
    assert not got.missing
    await e.work.adopt(plan)
    assert len({p.work.stage.digest for p in everybody}) == 1
    assert all(torch.equal(e.anchored.momentum[n], a.anchored.momentum[n]) for n in SHAPES)


@pytest.mark.parametrize("codec", ["top-k", "int4"])
async def test_with_feedback_no_cells_change_is_lost(rig: Rig, codec: str) -> None:
    rig.outer = OuterSettings(
        "butterfly", "deltas", 1, "sgd", lr=1.0, momentum=0.0, codec=codec, feedback=True
    )
    cells = await four(rig)
    (a, b), (c, d) = cells
    everybody = (a, b, c, d)
    begun, plan = a.parameters(), None
    moved = {n: torch.zeros(shape) for n, shape in SHAPES.items()}
    for turn in range(4):
        plan = await rig.epoch(inner(rig, cells, plan), *everybody)
        for n, t in moved.items():
            t += a.anchored.anchor[n] - (a.parameters()[n] + c.parameters()[n]) / 2
        if turn == 2:
            residual = [p.work.anchor.residual.words for p in everybody]
            undone = meeting(rig, cells, plan)
            await rig.epoch(undone, *everybody)
            assert any(
                p.work.anchor.residual.words is not was
                for p, was in zip(everybody, residual, strict=True)
            )
        plan = meeting(rig, cells, plan)
        await rig.epoch(plan, *everybody)
        assert len({p.work.stage.digest for p in everybody}) == 1
    assert [bool(p.work.anchor.residual.words) for p in everybody] == [True] * 4, "they took turns"
    for n in SHAPES:
        # half of the weight is each cell's
        residual_now = sum(p.work.anchor.residual.words[n] for p in everybody) / 2
        residual_now = residual_now + sum(
            p.work.anchor.residual.means.get(n, torch.zeros(())) for p in everybody
        )
        torch.testing.assert_close(
            begun[n] - a.parameters()[n] + residual_now, moved[n], rtol=1e-4, atol=1e-5
        )


async def test_a_replacing_speaker_keeps_only_its_own_rounding_error(rig: Rig) -> None:
    cells, peers, plan = await trained(rig, replace(DELTAS, codec="top-k", feedback=True))
    a, b, c, d = peers
    plan = meeting(rig, cells, plan)
    speaks = {p for p in peers if p.me in speakers(plan, (1, 0), ())}
    (dies,) = speaks & {a, b}
    (other,) = {a, b} - speaks
    living = [p for p in peers if p is not dies]
    owners = {n: other.me for n in SHAPES}
    await rig.begin(plan, *living)
    await rig.averaged(plan, *living, attempt=1, dead=(dies.me,), owners=owners)
    assert len({p.work.stage.digest for p in living}) == 1
    assert other.work.anchor.residual.words.keys() == set(SHAPES)
    assert other.work.anchor.residual.means.keys() == set(SHAPES)
    (silent,) = {c, d} - speaks
    assert silent.work.anchor.residual.words == {}


async def test_a_lone_cell_keeps_no_rounding_error_of_a_failed_round(
    rig: Rig,
) -> None:
    cells, everybody, plan = await trained(rig, replace(DELTAS, codec="top-k", feedback=True))
    met = meeting(rig, cells, plan)
    await rig.begin(met, *everybody)
    r = rig.round(met)
    # and nobody adopts it
    await asyncio.gather(*(p.work.average(met, r, False) for p in everybody))
    alone = meeting(rig, cells[:1], plan)
    await rig.epoch(alone, *cells[0])
    assert equal(*cells[0])
    assert all(p.work.anchor.residual.words == {} for p in cells[0]), "nothing was rounded"


@pytest.mark.parametrize("again", [False, True])
async def test_a_cell_late_for_a_quorum_counts_once_in_the_next_round(
    rig: Rig, again: bool
) -> None:
    rig.outer = settings = OuterSettings(
        "butterfly", "deltas", 1, "sgd", momentum=0.0, quorum=1, grace_s=0.0
    )
    cells = await four(rig)
    (a, b), (c, d) = cells
    everybody, on_time = (a, b, c, d), asyncio.Event()
    plan, state, moved = None, OuterState.begin(a.parameters()), []
    for p in (c, d):
        assert p.outer is not None

        async def late(request: RoundRequest, hook: Any, run: Any = p.outer.run) -> RoundOutcome:
            if request.round.epoch < (5 if again else 3):
                await on_time.wait()
            return await run(request, hook)

        p.outer.run = late  # type: ignore[method-assign]

    async def both(plan: Plan) -> None:
        on_time.clear()
        waiting = asyncio.gather(*(rig.average(plan, p) for p in (c, d)))
        for ended in await rig.average(plan, a, b):
            assert not ended.missing, "a quorum of one waits for nobody"
        on_time.set()
        assert not any(e.missing for (e,) in await waiting)

    for turn in range(3):
        plan = await rig.epoch(inner(rig, cells, plan), *everybody)
        moved.append([pseudo_gradient(state, p.parameters()) for p in (a, c)])
        here, there = moved[-1]
        plan = replace(meeting(rig, cells, plan), reducers={n: a.me for n in SHAPES})
        without = not turn or (again and turn == 1)
        rig.outer = replace(settings, grace_s=0.0 if without else 30.0)
        if without:
            mean = here
            await rig.begin(plan, *everybody)
            await both(plan)
        else:
            owing = turn == (2 if again else 1)
            mean = {n: (here[n] + there[n] + owing * moved[turn - 1][1][n]) / 2 for n in SHAPES}
            await rig.epoch(plan, *everybody)
        state = outer_step(state, mean, settings)
        assert len({p.work.stage.digest for p in everybody}) == 1
        torch.testing.assert_close(a.parameters(), state.anchor, rtol=1e-5, atol=1e-6)
    assert all(p.work.anchor.residual.late == {} for p in everybody)


async def test_a_cell_without_a_micro_batch_stays_as_it_is(rig: Rig) -> None:
    rig.outer = PARAMETERS
    cells = await four(rig)
    (a, b), (c, d) = cells

    async def nothing(epoch: int) -> tuple[dict[str, torch.Tensor], int]:
        return {}, 0

    for p in (c, d):
        p.work.engines.pipeline.take_gradients = nothing  # type: ignore[method-assign]
    was = c.parameters()
    await rig.epoch(inner(rig, cells, None), a, b, c, d)
    assert all(torch.equal(t, was[n]) for p in (c, d) for n, t in p.parameters().items())
    assert not torch.equal(a.parameters()["layers.0.a"], was["layers.0.a"])


async def test_a_checkpoint_restores_cell_anchor_and_rounding_errors(rig: Rig) -> None:
    rig.outer = replace(DELTAS, feedback=True)
    a, b, c, d = await rig.add("a", "b", "c", "d", every=1)
    cells = [[a, b], [c, d]]
    plan = await rig.epoch(inner(rig, cells, None), a, b, c, d)
    plan = meeting(rig, cells, plan)
    await rig.epoch(plan, a, b, c, d)
    await rig.copied(a, b, c, d)  # one at a time is written, and none waits
    await rig.begin(
        replace(inner(rig, cells, plan), worked={(1, 1): 4}, mass={(1, 0): 5, (1, 1): 7}),
        a,
        b,
        c,
        d,
    )
    await rig.copied(a, b, c, d)
    state, residual, version = d.anchored, d.work.anchor.residual, makes(plan, ())
    assert residual.means
    assert d.work.checkpoints()[-1] == version
    past = d.work.local_checkpoints.recall(version)
    assert past is not None
    assert past.worked == {(1, 1): 4}
    assert past.mass == {(1, 0): 5, (1, 1): 7}
    d.work.anchor.forget()
    d.work.cell = 0
    assert d.work.checkpoints() == (), "another cell's checkpoint is none to go back to"
    d.work.cell = -1
    await d.work.restore(version)
    assert d.work.cell == 1
    assert all(torch.equal(d.anchored.anchor[n], state.anchor[n]) for n in SHAPES)
    assert d.work.anchor.residual is not residual
    assert d.work.anchor.residual.means.keys() == residual.means.keys()
    assert all(torch.equal(d.work.anchor.residual.means[n], t) for n, t in residual.means.items())
