"""Streaming DiLoCo with an overlap: a fragment is taken from one version and lands some epochs
later, in everybody at the same one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from node.averaging.exchange.request import RoundOutcome, RoundRequest
from node.averaging.strategies.diloco import outer_step, pseudo_gradient
from node.averaging.strategies.outer import OuterSettings
from node.core.journey import Plan
from node.training.protocol.meetings import fragment, meeting, number, sends, speakers
from node.training.protocol.rules import Rules, lands
from node.training.protocol.rules import sends as sends_by
from tests.training.conftest import LEADER, SHAPES, Peer, Rig
from tests.training.test_fragments import PIECES, SIZES, sending
from tests.training.test_outer_rounds import BEGUN, equal, four, inner, trained
from tests.training.test_outer_rounds import meeting as whole

STREAM = OuterSettings(
    "butterfly", "deltas", 4, "nesterov", momentum=0.8, fragments=2, overlap=1, mixing=0.25
)
"""Rounds at epochs 2, 5, 8, ..; their fragments are sent with the plans of epochs 1, 4, 7, .."""


def with_sends(rig: Rig, cells: Sequence[Sequence[Peer]], after: Plan, number: int) -> Plan:
    """An epoch of gradients that sends the fragment of a round."""
    return replace(
        inner(rig, cells, after),
        sends=number,
        reducers=sending(rig, cells, after, (number - 1) % 2 + 1).reducers,
    )


def landing(
    rig: Rig,
    cells: Sequence[Sequence[Peer]],
    after: Plan,
    number: int,
    **more: list[tuple[Peer, int]],
) -> Plan:
    return replace(sending(rig, cells, after, (number - 1) % 2 + 1, **more), outer=number)


async def under_way(*peers: Peer) -> None:
    """Wait until what is under way has come."""
    tasks = [
        s.exchange
        for p in peers
        if (s := p.work._outer._sending) is not None and s.exchange is not None
    ]
    assert len(tasks) == len(peers)
    await asyncio.wait(tasks)


def test_what_is_sent_lands_so_many_epochs_later() -> None:
    for s in (
        STREAM,
        replace(STREAM, overlap=0),
        replace(STREAM, every=6, fragments=1, overlap=5),
        replace(STREAM, every=9, fragments=3, overlap=2),
    ):
        sent = {e: n for e in range(40) if (n := sends(s, e, 40))}
        landed = {e: n for e in range(39) if (n := number(e, s.gap, 40))}
        assert {e + s.overlap: n for e, n in sent.items()} == (landed if s.overlap else {})
        assert not any(number(e, s.gap, 40) for e in sent), "no outer round sends for the next one"
        assert fragment(s, 39, 40) == 0, (
            "at the end everything is exchanged by everybody, who wait for it"
        )
        assert all(fragment(s, e, 40) for e in landed)


def test_a_change_takes_nothing_that_is_under_way_with_it() -> None:
    changed = Rules(1, STREAM, 1, "by the owner")
    plan = Plan(8, 1, LEADER, (), (), {}, change="by the owner", fragment=1, outer=3)
    assert [lands(replace(plan, since=since), STREAM) for since in (0, 6, 7, 8)] == [
        True,
        True,
        False,
        False,
    ]
    assert not lands(replace(plan, fragment=0), STREAM)
    assert [sends_by(changed, since, 7, 40) for since in (6, 7)] == [3, 0], (
        "the plan that levels sends nothing"
    )


async def test_a_fragment_lands_mixed_with_later_training(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, everybody, plan = await trained(rig, STREAM)
    (a, b), (c, d) = cells
    state, gave = BEGUN, list[str]()
    for p in everybody:

        def gives(of: Any = None, name: str = p.name, gives: Any = p.work.anchor.gives) -> Any:
            gave.append(name)
            return gives(of)

        monkeypatch.setattr(p.work.anchor, "gives", gives)
    for n in (1, 2):
        names = PIECES[n - 1]
        moved = [pseudo_gradient(state, {k: p.parameters()[k] for k in names}) for p in (a, c)]
        plan = await rig.epoch(with_sends(rig, cells, plan, n), *everybody)
        meanwhile = {p.name: p.parameters() for p in everybody}
        state = outer_step(state, {k: (moved[0][k] + moved[1][k]) / 2 for k in names}, STREAM)
        await under_way(*everybody)
        plan = landing(rig, cells, plan, n)
        await rig.epoch(plan, *everybody)
        assert equal(a, b)
        assert equal(c, d)
        assert not equal(a, c)
        for p in everybody:
            for k, t in p.parameters().items():
                want = (
                    torch.lerp(state.anchor[k], meanwhile[p.name][k], 0.25)
                    if k in names
                    else meanwhile[p.name][k]
                )
                torch.testing.assert_close(t, want, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(
                    p.anchored.anchor[k], state.anchor[k], rtol=1e-5, atol=1e-6
                )
                assert torch.equal(p.anchored.anchor[k], a.anchored.anchor[k])
        plan = await rig.epoch(inner(rig, cells, plan), *everybody)
        assert all(
            p.work._outer._sending is None and p.work.rounds.under_way is None for p in everybody
        )
    assert not [
        e for p in everybody for kind in ("round-absurd", "member-failed") for e in p.events(kind)
    ]
    assert len(gave) == 2 * len(cells), "a speaker of each cell, and not again where it lands"


async def test_an_epoch_begun_anew_keeps_what_is_under_way(
    rig: Rig,
) -> None:
    cells, everybody, first = await trained(rig, replace(STREAM, every=6, overlap=2))
    a, b, c, d = everybody
    await rig.epoch(with_sends(rig, cells, first, 1), *everybody)
    old = a.work._outer._sending
    assert old is not None
    exchange = old.exchange
    assert exchange is not None
    again = await rig.epoch(with_sends(rig, cells, first, 1), *everybody)
    new = a.work._outer._sending
    assert new is not old
    plan = await rig.epoch(inner(rig, cells, again), *everybody)
    plan = await rig.epoch(inner(rig, cells, again), *everybody)
    assert a.work._outer._sending is new, "only the epoch after was undone"
    await under_way(*everybody)
    plan = landing(rig, cells, plan, 1)
    await rig.epoch(plan, *everybody)
    assert equal(a, b)
    assert equal(c, d)
    assert exchange.done()


async def test_a_peer_that_returned_copies_the_outer_step(rig: Rig) -> None:
    cells, (a, b, c, d), plan = await trained(rig, STREAM)
    (e,) = await rig.add("e")
    everybody = (a, b, c, d, e)
    plan = await rig.epoch(with_sends(rig, cells, plan, 1), a, b, c, d)
    await under_way(a, b, c, d)
    d.work.anchor.history = object()  # its parameters are those of the cell, and come from its disk
    plan = landing(rig, cells, plan, 1, listeners=[(e, 0)])
    await rig.begin(plan, *everybody)
    ended = await rig.average(plan, *everybody)
    assert [len(x.missing) for x in ended] == [0, 0, 0, len(PIECES[0]), len(SHAPES)]
    for p in (d, e):
        assert not (await p.work.copy(plan, rig.round(plan, 1, sources=(a.me, b.me)))).missing
        await p.work.adopt(plan)
    given = a.state.bytes_given[d.me] + b.state.bytes_given[d.me]
    assert given == 2 * sum(SIZES[n] for n in PIECES[0]), (
        "of the rest its own anchor is everybody's"
    )
    assert equal(c, d)
    assert equal(a, e)
    assert all(torch.equal(d.anchored.momentum[n], a.anchored.momentum[n]) for n in SHAPES)


async def test_a_sending_is_served_to_others_after_its_epoch_settled(
    rig: Rig,
) -> None:
    cells, everybody, plan = await trained(rig, replace(STREAM, every=6, overlap=2))
    (_, _, c, d), go_on = everybody, asyncio.Event()
    assert d.outer is not None
    run = d.outer.run

    async def slow(request: RoundRequest, hook: Any) -> RoundOutcome:
        await go_on.wait()
        return await run(request, hook)

    d.outer.run = slow  # type: ignore[method-assign]
    plan = with_sends(rig, cells, plan, 1)
    plan = replace(plan, reducers={n: c.me for n in PIECES[0]})
    await rig.epoch(plan, *everybody)
    plan = await rig.epoch(inner(rig, cells, plan), *everybody)
    go_on.set()
    await under_way(*everybody)
    await rig.epoch(landing(rig, cells, plan, 1), *everybody)
    assert equal(c, d)


async def test_a_sending_does_not_await_peers_out_of_the_plan(rig: Rig) -> None:
    cells, everybody, plan = await trained(rig, STREAM)
    sent = replace(with_sends(rig, cells, plan, 1), deadline_s=600.0)
    silent = next(p for p in cells[1] if p.me in speakers(meeting(sent, 2), (1, 0), ()))
    assert silent.outer is not None

    async def never(request: RoundRequest, hook: Any) -> RoundOutcome:
        await asyncio.Event().wait()
        raise AssertionError

    silent.outer.run = never  # type: ignore[method-assign]
    sent = replace(sent, reducers={n: cells[0][0].me for n in PIECES[0]})
    await rig.epoch(sent, *everybody)
    living = [p for p in everybody if p is not silent]
    left = [[p for p in cell if p is not silent] for cell in cells]
    plan = landing(rig, left, sent, 1)
    await rig.begin(plan, *living)
    await under_way(*living)
    await rig.averaged(plan, *living)
    assert equal(*cells[0])


async def test_a_change_due_at_a_landing_exchanges_all_parts(
    rig: Rig,
) -> None:
    cells, everybody, plan = await trained(rig, STREAM)
    plan = await rig.epoch(with_sends(rig, cells, plan, 1), *everybody)
    for p in everybody:
        p.work.read = lambda change: Rules(1, STREAM, 1, change)
    plan = replace(whole(rig, cells, plan), outer=1, change="to the same", since=2)
    await rig.epoch(plan, *everybody)
    assert len({p.work.stage.digest for p in everybody}) == 1
    assert all(p.work._outer._sending is None for p in everybody)


async def test_a_quorum_while_sending_waits_until_the_landing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, everybody, plan = await trained(rig, replace(STREAM, quorum=1))
    asked: list[RoundRequest] = []
    for p in everybody:
        assert p.outer is not None

        async def run(request: RoundRequest, hook: Any, run: Any = p.outer.run) -> RoundOutcome:
            asked.append(request)
            return await run(request, hook)

        monkeypatch.setattr(p.outer, "run", run)
    sent = replace(with_sends(rig, cells, plan, 1), forecast=(2.0, 0.5))
    await rig.epoch(sent, *everybody)
    await under_way(*everybody)
    assert [r.quorum.spare_s for r in asked] == [2.5] * 4
    plan = landing(rig, cells, sent, 1)
    await rig.begin(plan, *everybody)
    for p in everybody:
        assert p.work._outer._sending is not None
        p.work._outer._sending.stop()
    await rig.averaged(plan, *everybody, attempt=1)
    assert [r.quorum.spare_s for r in asked[4:]] == [None] * 4, "there everybody waits"


async def test_a_failed_sending_is_exchanged_at_its_landing(rig: Rig) -> None:
    cells, everybody, plan = await trained(rig, STREAM)
    (a, b), (c, d) = cells
    moved = [pseudo_gradient(BEGUN, {k: p.parameters()[k] for k in PIECES[0]}) for p in (a, c)]
    plan = await rig.epoch(with_sends(rig, cells, plan, 1), *everybody)
    for p in everybody:
        sent = p.work._outer._sending
        assert sent is not None
        sent.stop()  # an averager died, say, and nobody has all of it
    plan = landing(rig, cells, plan, 1)
    await rig.begin(plan, *everybody)
    assert all(e.missing for e in await rig.average(plan, *everybody))
    await rig.averaged(plan, *everybody, attempt=1)
    state = outer_step(BEGUN, {k: (moved[0][k] + moved[1][k]) / 2 for k in PIECES[0]}, STREAM)
    assert equal(a, b)
    assert equal(c, d)
    for p in everybody:
        torch.testing.assert_close(p.anchored.anchor, state.anchor, rtol=1e-5, atol=1e-6)


async def test_a_repeated_exchange_ignores_the_earlier_sending(rig: Rig) -> None:
    """The second exchange was of fewer cells than the first one, say: its debts are none of the
    other's."""
    cells, everybody, plan = await trained(rig, replace(STREAM, codec="int4", feedback=True))
    sent = await rig.epoch(with_sends(rig, cells, plan, 1), *everybody)
    await under_way(*everybody)
    given_up = landing(rig, cells, sent, 1)
    await rig.begin(given_up, *everybody)
    r = rig.round(given_up, 1)
    assert not any(
        e.missing
        for e in await asyncio.gather(*(p.work.average(given_up, r, False) for p in everybody))
    )
    plan = landing(rig, cells, sent, 1)
    await rig.begin(plan, *everybody)
    assert all(e.missing for e in await rig.average(plan, *everybody))
    await rig.averaged(plan, *everybody, attempt=1)
    assert equal(*cells[0])
    assert equal(*cells[1])


async def test_an_undone_landing_lands_again_with_equal_bits(
    rig: Rig,
) -> None:
    cells, everybody, plan = await trained(rig, replace(STREAM, codec="int4", feedback=True))
    sent = await rig.epoch(with_sends(rig, cells, plan, 1), *everybody)
    await under_way(*everybody)
    await rig.epoch(landing(rig, cells, sent, 1), *everybody)
    once = [p.parameters() for p in everybody]
    residual = [{n: t.clone() for n, t in p.work.anchor.residual.words.items()} for p in everybody]
    assert any(residual)
    again = landing(rig, cells, sent, 1)
    await rig.begin(again, *everybody)
    assert not any(p.work.anchor.residual.words for p in everybody), "undone"
    await rig.averaged(again, *everybody)
    for p, was, debt in zip(everybody, once, residual, strict=True):
        assert all(torch.equal(t, was[n]) for n, t in p.parameters().items())
        assert p.work.anchor.residual.words.keys() == debt.keys()
        assert all(torch.equal(t, debt[n]) for n, t in p.work.anchor.residual.words.items())


@pytest.mark.parametrize("wrong", ["nothing", "another round", "other parts", "more parts"])
async def test_a_plan_that_sends_other_than_is_due_is_objected_to(rig: Rig, wrong: str) -> None:
    rig.outer = STREAM
    cells = await four(rig)
    a = cells[0][0]
    plan = with_sends(rig, cells, inner(rig, cells, None), 1)
    plan = replace(plan, paths=())
    assert a.work.objection(plan) == ""
    worse = {
        "nothing": replace(plan, sends=0),
        "another round": replace(plan, sends=2),
        "other parts": replace(plan, reducers={n: a.me for n in PIECES[1]}),
        "more parts": replace(plan, reducers={n: a.me for n in SHAPES}),
    }[wrong]
    assert a.work.objection(worse)
    assert Plan.parse(plan.canonical()) == plan
    assert meeting(plan, 2).averagers((1, 0)).keys() == PIECES[0]
