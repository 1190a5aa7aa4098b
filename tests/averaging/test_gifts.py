"""Contributions along directed edges: who gives to the round of another cell gathers nothing there,
and its owners give their own."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from node.averaging.exchange.events import (
    Ended,
    EndStream,
    Kind,
    PeerFoundDead,
    Read,
    ReduceAndStep,
    Serve,
    Stepped,
    TimePassed,
    Uploaded,
    Wait,
)
from node.averaging.exchange.member import Exchanges
from node.averaging.exchange.request import RoundOutcome, RoundRequest
from node.averaging.settings import AveragingSettings
from node.core.ids import PeerId, RoundId
from tests.averaging.conftest import SHAPES, Cell, gradients_of, same
from tests.averaging.test_machine import OPEN, A, B, C, P, began, feed, opened

INWARD = {"members": frozenset({A, B, C}), "listeners": frozenset({B})}
"""A and B are the cell, C gives to it."""


def test_a_one_way_contribution_is_acknowledged_without_parts():
    machine = opened(**INWARD)
    assert feed(machine, began(1, B, tokens=0), began(2, C, one_way=True)) == [Wait(1), Read(2)]
    assert feed(machine, Uploaded(2)) == [
        Serve(2, ()),
        ReduceAndStep(OPEN.round, 0, (P,), (A, C), 15),
    ]
    assert feed(machine, Stepped(3, frozenset({P})), Ended(2)) == [Serve(1, (P,))]
    assert feed(machine, began(3, C, one_way=True)) == [Serve(3, ())], "it was here already"


def test_a_late_one_way_contribution_is_acknowledged_unused():
    machine = opened(**INWARD)
    assert feed(machine, began(1, C, one_way=True), TimePassed(), now=100.0) == [
        Read(1),
        ReduceAndStep(OPEN.round, 0, (P,), (A,), 10),
        Wait(1),
    ]
    assert feed(machine, Stepped(3, frozenset({P}))) == [Serve(1, ())]


def test_a_one_way_contribution_outlives_its_sender():
    machine = opened(**INWARD)
    assert feed(machine, PeerFoundDead(C)) == [ReduceAndStep(OPEN.round, 0, (P,), (A,), 10)]
    machine = opened(members=frozenset({A, C, "e"}))
    assert feed(machine, began(1, C, one_way=True), Uploaded(1), Ended(1), PeerFoundDead(C))[
        1:
    ] == [Serve(1, ())]
    assert feed(machine, PeerFoundDead(PeerId("e"))) == [
        ReduceAndStep(OPEN.round, 0, (P,), (A, C), 15)
    ]


def test_a_repair_refuses_the_old_one_way_contributions():
    machine = opened(**INWARD)
    feed(machine, began(1, C, one_way=True))
    (refused, *rest) = feed(
        machine,
        replace(OPEN, round=RoundId(3, 1, 1), members=frozenset({A, B}), listeners=frozenset({B})),
    )
    assert isinstance(refused, EndStream)
    assert (refused.kind, refused.weight) == (Kind.SUPERSEDED, 0.0)
    assert rest == [ReduceAndStep(RoundId(3, 1, 1), 0, (P,), (A,), 10)]


async def held(cell_of, count: int = 4, **settings) -> Cell:
    """p0 and p1 are a cell, the others give to it."""
    return await cell_of(
        count, AveragingSettings(round_timeout_s=10.0, group_bytes=256, **settings)
    )


def to_cell(cell: Cell, peer: str, **changes: object) -> RoundRequest:
    """The round of the cell as ``peer`` knows it: p0 and p1 own everything, everybody's values
    weigh 1 but those of p2, 3."""
    pair = [PeerId("p0"), PeerId("p1")]
    weigh = {p: 3 if p == "p2" else 1 for p in cell.peers}
    own = {
        "listeners": frozenset(pair) - {peer},
        "inward": peer in pair,
        "tokens": weigh[PeerId(peer)],
    }
    return cell.request(
        PeerId(peer),
        owners=cell.owners(pair),
        summed=False,
        allowed=weigh,
        total=1,
        most=3,
        **{**own, **changes},
    )


def mean_of(name: str, *peers: str) -> torch.Tensor:
    weights = [3.0 if p == "p2" else 1.0 for p in peers]
    return sum(
        (w * gradients_of(p)[name] for w, p in zip(weights, peers, strict=True)),
        torch.zeros(SHAPES[name]),
    ) / sum(weights)


async def meet(cell: Cell, givers: list[str], **changes: object) -> list[RoundOutcome]:
    """Both of the cell average, the others give; what the two have."""
    rounds = [
        cell.rounds[PeerId(p)].run(to_cell(cell, p, **changes), lambda mean: mean)
        for p in ("p0", "p1")
    ]
    one_way_sends = [cell.rounds[PeerId(p)].give(to_cell(cell, p)) for p in givers]
    found = await asyncio.gather(*rounds, *one_way_sends)
    return [o for o in found if isinstance(o, RoundOutcome)]


async def test_a_cell_with_one_way_contributions_ends_with_equal_bits(cell_of):
    cell = await held(cell_of)
    left, right = await meet(cell, ["p2", "p3"])
    assert not left.missing
    assert same(left.fresh, right.fresh)
    owners = cell.owners([PeerId("p0"), PeerId("p1")])
    for name, tensor in left.fresh.items():
        torch.testing.assert_close(tensor, mean_of(name, owners[name], "p2", "p3"))
        assert (
            left.parts[name].contributors
            == right.parts[name].contributors
            == (owners[name], "p2", "p3")
        )
        assert left.parts[name].tokens == 5
    size = sum(4 * t.numel() for t in gradients_of("p2").values())
    links = cell.transports[PeerId("p2")].peers().values()
    assert sum(link.sent for link in links) == size, "once, to the owner of each part"
    assert sum(link.received for link in links) == 0, "what the cell makes of it is nothing to it"


async def test_a_dead_owners_parts_are_made_of_the_cells_own_values(cell_of, monkeypatch):
    cell, told = await held(cell_of, 3), list[PeerId]()
    monkeypatch.setattr(cell.rounds[PeerId("p2")]._owner, "gone", told.append)
    await cell.net.kill(PeerId("p1"))
    alive, one_way = to_cell(cell, "p0", deadline_s=60.0), to_cell(cell, "p2", deadline_s=60.0)
    first, _ = await asyncio.gather(
        cell.rounds[PeerId("p0")].run(alive, lambda mean: mean),
        cell.rounds[PeerId("p2")].give(one_way),
    )
    owners = cell.owners([PeerId("p0"), PeerId("p1")])
    lost = {name for name, owner in owners.items() if owner == "p1"}
    assert set(first.missing) == lost
    assert told == ["p1"], "whom a gift does not reach is not waited for in the giver's own round"
    again = replace(
        alive,
        round=RoundId(7, 1, 1),
        members=(PeerId("p0"),),
        owners=dict.fromkeys(SHAPES, PeerId("p0")),
        listeners=frozenset(),
    )
    second = await cell.rounds[PeerId("p0")].run(again, lambda mean: mean)
    assert not second.missing
    for name, tensor in second.fresh.items():
        assert second.parts[name].contributors == (("p0",) if name in lost else ("p0", "p2"))
        torch.testing.assert_close(
            tensor, mean_of(name, "p0") if name in lost else mean_of(name, "p0", "p2")
        )


async def test_a_one_way_contribution_of_a_wrong_weight_is_refused(cell_of):
    cell = await held(cell_of, 3)
    one_way = to_cell(cell, "p2", tokens=4)
    (left, right), sent = await asyncio.gather(
        meet(cell, []), cell.rounds[PeerId("p2")].give(one_way)
    )
    assert sent == 0
    assert not left.missing
    assert same(left.fresh, right.fresh)
    assert left.contributors == {"p0", "p1"}
    assert [(who, weight) for who, _, weight in cell.transports[PeerId("p0")].faults] == [
        ("p2", 1.0)
    ]


async def test_what_is_not_fit_to_be_given_is_not_sent(cell_of, monkeypatch):
    cell, asked = await held(cell_of, 3), list[object]()

    async def all_of(*given):
        asked.append(given)

    monkeypatch.setattr(Exchanges, "all", all_of)
    bad = {n: torch.full(s, float("nan")) for n, s in SHAPES.items()}
    assert await cell.rounds[PeerId("p2")].give(to_cell(cell, "p2", gradients=bad)) == 0
    assert asked == []
    await cell.rounds[PeerId("p2")].give(to_cell(cell, "p2"))
    assert len(asked) == 2, "else it asks in another way"


async def test_one_way_contributions_to_several_owners_end_together(cell_of, monkeypatch):
    cell = await held(cell_of, 3)
    waits, ended = asyncio.Event(), list[str]()

    async def all_of(exchanges, requests, timeout, took):
        if exchanges._owner == "p0":
            await waits.wait()
            raise ValueError("cannot be said")
        try:
            waits.set()
            await asyncio.Event().wait()
        finally:
            ended.append(exchanges._owner)

    monkeypatch.setattr(Exchanges, "all", all_of)
    with pytest.raises(ValueError, match="cannot be said"):
        await cell.rounds[PeerId("p2")].give(to_cell(cell, "p2"))
    assert ended == ["p1"], "what is given to the other owner does not go on without its caller"
