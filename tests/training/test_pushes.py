"""Outer rounds without a barrier: cells push what they moved by to a server that answers each by
itself, over gRPC on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from node.averaging.strategies.outer import OuterSettings
from node.core.journey import Plan
from node.training.protocol.meetings import PUSH_AGAIN
from node.training.protocol.plan_context import makes
from node.training.protocol.rules import Rules
from tests.training.conftest import SHAPES, Peer, Rig
from tests.training.test_outer_rounds import BEGUN, equal, inner, meeting, trained

HOGWILD = OuterSettings("hogwild", "deltas", 1, "sgd", lr=1.0)
"""Of two cells each steps by half."""
STALE = replace(HOGWILD, strategy="parameter-server", staleness=1)

Values = dict[str, torch.Tensor]


def served(plan: Plan, *servers: Peer) -> Plan:
    """The same outer round with these as servers, part by part in turns."""
    return replace(
        plan, reducers={name: servers[i % len(servers)].me for i, name in enumerate(SHAPES)}
    )


async def in_order(rig: Rig, plan: Plan, *cells: Sequence[Peer]) -> None:
    """An outer round in which the cells come one after another; the first peer of all serves."""
    await rig.begin(plan, *(p for cell in cells for p in cell))
    under_way = [asyncio.ensure_future(rig.average(plan, *cells[0]))]
    server = cells[0][0].outer
    assert server is not None
    while not server._owner.held(plan.epoch).keys() >= SHAPES.keys():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    for cell in cells[1:]:
        await rig.averaged(plan, *cell)
    for ended in (await asyncio.gather(*under_way))[0]:
        assert not ended.missing, ended


def stepped(here: Values, before: Values, after: Values, cells: int = 2) -> Values:
    """What is served after a cell that pulled ``before`` and has ``after`` has pushed."""
    return {n: here[n] - (before[n] - after[n]) / cells for n in SHAPES}


def same(a: Values, b: Values) -> bool:
    return all(torch.allclose(a[n], b[n], rtol=1e-5, atol=1e-6) for n in SHAPES)


async def test_cells_push_and_pull_one_by_one_to_their_own_values(rig: Rig) -> None:
    cells, (a, b, c, d), plan = await trained(rig, HOGWILD)
    begun, left, right = BEGUN.anchor, a.parameters(), c.parameters()
    plan = served(meeting(rig, cells, plan), a)
    await in_order(rig, plan, (a, b), (c, d))
    assert equal(a, b)
    assert equal(c, d)
    first = stepped(begun, begun, left)
    both = stepped(first, begun, right)
    assert same(a.parameters(), first), "it did not wait for the others"
    assert same(c.parameters(), both)
    assert not equal(a, c)
    for p in (a, b, c, d):
        assert all(torch.equal(p.anchored.anchor[n], t) for n, t in p.parameters().items())
    plan = await rig.epoch(inner(rig, cells, plan), a, b, c, d)
    assert not [e for p in (a, b, c, d) for e in p.events("state-lost")]
    left, right = a.parameters(), c.parameters()
    plan = served(meeting(rig, cells, plan), a)
    await in_order(rig, plan, (a, b), (c, d))
    third = stepped(both, first, left)
    assert same(a.parameters(), third), "the server has what came after its own cell's pull"
    assert same(c.parameters(), stepped(third, both, right))
    assert len(a.events("serving-begun")) == 1


async def test_servers_begin_anew_with_a_change(
    rig: Rig,
) -> None:
    cells, everybody, plan = await trained(rig, HOGWILD)
    (a, b), (c, d) = cells
    plan = served(meeting(rig, cells, plan), a)
    await in_order(rig, plan, (a, b), (c, d))
    for p in everybody:
        p.work.read = lambda change: Rules(1, HOGWILD, 1, change)
    plan = await rig.epoch(inner(rig, cells, plan), *everybody)
    plan = replace(meeting(rig, cells, plan), change="to the same", since=plan.epoch + 1)
    await rig.epoch(plan, *everybody)
    level = a.parameters()
    assert equal(a, c)
    plan = replace(inner(rig, cells, plan), change="to the same", since=plan.epoch)
    await rig.epoch(plan, *everybody)
    left = a.parameters()
    plan = replace(served(meeting(rig, cells, plan), a), change="to the same", since=plan.since)
    await in_order(rig, plan, (a, b), (c, d))
    assert same(a.parameters(), stepped(level, level, left))


async def test_an_epoch_that_begins_anew_applies_nothing_twice(rig: Rig) -> None:
    cells, (a, b, c, d), plan = await trained(rig, HOGWILD)
    first = served(meeting(rig, cells, plan), a)
    await in_order(rig, first, (a, b), (c, d))
    ends = a.parameters(), c.parameters()
    again = served(meeting(rig, cells, plan), a)
    await in_order(rig, again, (a, b), (c, d))
    assert same(a.parameters(), ends[0])
    assert same(c.parameters(), ends[1])


@pytest.mark.parametrize("codec", ["fp32", "int8"])
async def test_two_servers_each_serve_half_of_the_coded_pushes(rig: Rig, codec: str) -> None:
    cells, (a, b, c, d), plan = await trained(rig, replace(HOGWILD, codec=codec, shards=2))
    begun = BEGUN.anchor
    moved = [{n: begun[n] - p.parameters()[n] for n in SHAPES} for p in (a, c)]
    plan = served(meeting(rig, cells, plan), a, c)
    await rig.epoch(plan, a, b, c, d)
    assert equal(a, b)
    assert equal(c, d)
    for i, name in enumerate(SHAPES):
        mine, theirs = a.parameters()[name], c.parameters()[name]
        whole = begun[name] - 0.5 * (moved[0][name] + moved[1][name])
        own, other = (begun[name] - 0.5 * moved[cell][name] for cell in (i % 2, 1 - i % 2))
        loose = (
            1e-6
            if codec == "fp32"
            else 0.01 * float(moved[0][name].abs().max() + moved[1][name].abs().max())
        )
        firsts = (mine, theirs) if i % 2 == 0 else (theirs, mine)
        orders = (own, whole), (whole, other)
        assert any(
            all(torch.allclose(f, x, atol=loose) for f, x in zip(firsts, order, strict=True))
            for order in orders
        ), name


async def test_a_late_push_is_not_applied_and_is_reported(
    rig: Rig,
) -> None:
    rig.outer = STALE
    rig.deadline_s = 60.0
    a, b, c = await rig.add("a", "b", "c")
    cells = [[a], [b], [c]]
    plan = await rig.epoch(inner(rig, cells, None), a, b, c)
    plan = served(meeting(rig, cells, plan), a)
    await in_order(rig, plan, [a], [b], [c])  # a has pulled when two more pushes were to come
    late = c.parameters()
    plan = await rig.epoch(inner(rig, cells, plan), a, b, c)
    plan = served(meeting(rig, cells, plan), a)
    await in_order(rig, plan, [a], [b], [c])
    assert same(a.parameters(), late), "what is served is as it was; what the cell had is gone"
    (said,) = a.events("push-refused")
    assert (said.fields["cell"], said.fields["age"]) == (0, 2)
    assert a.work.anchor.serving.refused == 1
    assert a.work.engines.metrics.values()['tutti_pushes_total{result="refused"}'] == 1


async def test_a_joiner_without_an_anchor_pushes_from_the_next_round(
    rig: Rig,
) -> None:
    cells, (a, b, c, d), plan = await trained(rig, HOGWILD)
    (e,) = await rig.add("e")
    plan = served(meeting(rig, cells, plan, [e]), c)
    await in_order(rig, plan, (c, d), (a, b, e))
    assert equal(e, a), "it listens in the first cell"
    assert all(torch.equal(e.anchored.anchor[n], t) for n, t in e.parameters().items())


async def test_a_cell_without_an_anchor_only_pulls(
    rig: Rig,
) -> None:
    rig.outer, rig.deadline_s = HOGWILD, 60.0
    a, c = await rig.add("a", "c")
    plan = await rig.epoch(inner(rig, [[a], [c]], None), a, c)
    c.work.anchor.state = None
    plan = served(meeting(rig, [[a], [c]], plan), a)
    await in_order(rig, plan, [a], [c])
    assert same(c.parameters(), a.parameters()), (
        "what another cell has pulled says nothing of how far this one has come"
    )
    assert same(c.anchored.anchor, c.parameters())


async def test_a_server_that_waited_hears_a_dead_speakers_replacement(
    rig: Rig,
) -> None:
    rig.outer = HOGWILD
    rig.deadline_s = 8.0
    peers = await rig.add("a", "b", "c", "d")
    (a, b), (c, d) = cells = [peers[:2], peers[2:]]
    begun, plan = a.parameters(), inner(rig, cells, None)
    await rig.epoch(plan, a, b, c, d)
    left, right = a.parameters(), c.parameters()
    plan = served(meeting(rig, cells, plan), a)
    speaker, other = (c, d) if plan.outer % 2 == 0 else (d, c)
    await rig.begin(plan, a, b, c, d)
    await rig.net.kill(speaker.me)
    first, mate, lacking = await rig.average(plan, a, b, other)
    assert set(first.missing) == set(SHAPES), "it stays for the cell that it could not answer"
    assert not mate.missing, "who only belongs to the server's cell does not"
    assert set(lacking.missing) == set(SHAPES)
    told = {"attempt": 1, "dead": (speaker.me,), "among": (other.me,)}
    ended = await rig.average(plan, a, other, **told)
    assert [e.missing for e in ended] == [(), ()]
    assert equal(a, b)
    assert same(a.parameters(), stepped(begun, begun, left))
    assert same(other.parameters(), stepped(a.parameters(), begun, right))


async def test_a_server_waits_a_few_attempts_for_an_unanswered_cell(
    rig: Rig,
) -> None:
    rig.outer, rig.deadline_s = HOGWILD, 60.0
    a, c = await rig.add("a", "c")
    plan = await rig.epoch(inner(rig, [[a], [c]], None), a, c)
    plan = served(meeting(rig, [[a], [c]], plan), a)
    await rig.begin(plan, a)
    for attempt in range(PUSH_AGAIN + 1):
        ended = asyncio.ensure_future(a.work.average(plan, rig.round(plan, attempt), False))
        while not ended.done():
            a.work.rounds.gone(c.me)  # which counts once the round is open
            await asyncio.wait([ended], timeout=0.05)
        assert set(ended.result().missing) == (set(SHAPES) if attempt < PUSH_AGAIN else set()), (
            attempt
        )


async def test_a_new_server_continues_with_what_its_cell_pulled(rig: Rig) -> None:
    rig.outer = HOGWILD
    rig.deadline_s = 60.0
    a, b, c = await rig.add("a", "b", "c")
    cells = [[a], [b], [c]]
    begun, plan = a.parameters(), inner(rig, cells, None)
    await rig.epoch(plan, a, b, c)
    parts = [p.parameters() for p in (b, c)]
    plan = served(meeting(rig, cells, plan), a)
    await rig.begin(plan, a, b, c)
    await rig.net.kill(a.me)
    for ended in await rig.average(plan, b, c):
        assert set(ended.missing) == set(SHAPES)
    owners = dict.fromkeys(SHAPES, b.me)
    await rig.averaged(plan, b, c, attempt=1, dead=(a.me,), owners=owners)
    own, theirs = stepped(begun, begun, parts[0], 3), stepped(begun, begun, parts[1], 3)
    orders = (own, stepped(own, begun, parts[1], 3)), (stepped(theirs, begun, parts[0], 3), theirs)
    assert any(
        same(b.parameters(), first) and same(c.parameters(), second) for first, second in orders
    )
    assert len(b.events("serving-begun")) == 1


async def test_a_checkpoint_restores_the_anchor_and_ends_serving(
    rig: Rig,
) -> None:
    rig.outer = HOGWILD
    a, c = await rig.add("a", "c", every=1)
    cells = [[a], [c]]
    plan = await rig.epoch(inner(rig, cells, None), a, c)
    plan = served(meeting(rig, cells, plan), a)
    await in_order(rig, plan, [a], [c])
    await rig.copied(a, c)  # one at a time is written, and none waits
    await rig.begin(inner(rig, cells, plan), a, c)
    await rig.copied(a, c)
    assert a.work.anchor.serving.names == set(SHAPES)
    assert c.work.anchor.serving.names == set()
    pulled = a.parameters()
    await a.work.restore(makes(plan, ()))
    assert a.work.anchor.serving.names == set()
    assert all(torch.equal(a.work.anchor.pulled(n), pulled[n]) for n in SHAPES)


async def test_a_cell_alone_steps_by_the_served_value_too(rig: Rig) -> None:
    rig.outer = HOGWILD
    (a,) = await rig.add("a")
    plan = await rig.epoch(inner(rig, [[a]], None), a)
    left = a.parameters()
    await rig.epoch(served(meeting(rig, [[a]], plan), a), a)
    assert same(a.parameters(), left), "one cell, one whole step"
    assert len(a.events("serving-begun")) == 1
