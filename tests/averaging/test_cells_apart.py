"""Rounds whose members are in cells: each cell is averaged and answered by itself, and none waits
for another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.averaging.exchange.events import (
    Ended,
    EndStream,
    Event,
    Fail,
    Kind,
    Opened,
    PeerFoundDead,
    Read,
    ReduceAndStep,
    Serve,
    Spoiled,
    Stepped,
    TimePassed,
    Uploaded,
    Wait,
)
from node.averaging.exchange.ledger import Given, RoundAttempt
from node.averaging.exchange.machine import RoundMachine
from node.averaging.exchange.owner import ExchangeServer
from node.averaging.exchange.request import RoundRequest
from node.averaging.settings import AveragingSettings
from node.core.ids import PeerId, RoundId
from tests.averaging.conftest import SHAPES, Cell, gradients_of, same, with_peers
from tests.averaging.test_machine import OPEN, A, B, C, D, P, began, feed

E = PeerId("e")
CELLS = {A: 0, B: 1, C: 1, D: 2}
"""A serves itself; B speaks for C; D is alone."""
APART = replace(
    OPEN, members=frozenset(CELLS), listeners=frozenset({C}), cells=CELLS, may_hold=True, tokens=1
)
AGAIN = replace(APART, round=RoundId(3, 1, 1), held=frozenset({P}))


def step(cell: int, *by: PeerId) -> ReduceAndStep:
    return ReduceAndStep(OPEN.round, 0, (P,), by, len(by), cell)


def serving() -> RoundMachine:
    machine = RoundMachine()
    assert feed(machine, APART) == [step(0, A)], "the owner does not wait for the others"
    assert feed(machine, Stepped(3, frozenset({P}), 0)) == []
    return machine


def test_each_cell_is_stepped_once_its_own_speaker_contributed():
    machine = serving()
    assert feed(machine, began(1, C, tokens=0), began(2, D, tokens=1), began(3, B, tokens=1)) == [
        Wait(1),
        Read(2),
        Read(3),
    ]
    assert feed(machine, Uploaded(3)) == [step(1, B)]
    assert feed(machine, Uploaded(2)) == [step(2, D)], "no cell waits for another one's step"
    assert feed(machine, Stepped(3, frozenset({P}), 1)) == [Serve(1, (P,), 1), Serve(3, (P,), 1)]
    assert feed(machine, Stepped(3, frozenset({P}), 2)) == [Serve(2, (P,), 2)]
    assert feed(machine, began(4, B, tokens=1)) == [Serve(4, (P,), 1)], (
        "what is repeated is not applied again"
    )


def test_a_cell_without_a_push_is_served_the_current_value():
    machine = serving()
    assert feed(machine, began(1, D, tokens=0)) == [
        Wait(1),
        ReduceAndStep(OPEN.round, 0, (P,), (), 0, 2),
    ]
    assert feed(machine, began(2, C, tokens=0)) == [Wait(2)]
    refused, failed = feed(machine, PeerFoundDead(B))
    assert isinstance(refused, EndStream)
    assert (refused.stream, refused.kind) == (2, Kind.FAILED)
    assert (failed.epoch, failed.cell) == (3, 1)
    machine = serving()
    feed(machine, began(1, D, tokens=1))
    assert [type(a) for a in feed(machine, Spoiled(1, Kind.VALUES, "not finite"))] == [
        EndStream,
        ReduceAndStep,
    ], "what it gave is unfit"


def test_a_failed_cell_is_reopened_with_another_speaker():
    machine = serving()
    feed(
        machine,
        began(1, D, tokens=1),
        Uploaded(1),
        Stepped(3, frozenset({P}), 2),
        began(2, B, tokens=1),
        Ended(2),
    )
    without_b = {p: cell for p, cell in CELLS.items() if p != B}
    assert (
        feed(
            machine,
            replace(AGAIN, members=frozenset(without_b), listeners=frozenset(), cells=without_b),
        )
        == []
    )
    assert feed(machine, began(3, D, tokens=1, round_id=AGAIN.round)) == [Serve(3, (P,), 2)]
    feed(machine, began(4, C, tokens=1, round_id=AGAIN.round))
    assert feed(machine, Uploaded(4)) == [ReduceAndStep(AGAIN.round, 0, (P,), (C,), 1, 1)]
    assert feed(machine, began(5, B, tokens=1)) == [Wait(5)], "the dead that is not dead"
    assert feed(machine, Stepped(3, frozenset({P}), 1)) == [Serve(4, (P,), 1), Serve(5, (P,), 1)], (
        "gets what its cell got"
    )


def test_a_stranger_is_one_in_every_cell():
    machine = serving()
    (refused,) = feed(machine, began(1, E, tokens=1))
    assert (refused.kind, refused.weight) == (Kind.STRANGER, 1.0)


def test_the_late_speaker_fails_its_own_cell_only():
    machine = serving()
    feed(machine, began(1, D, tokens=1), Uploaded(1), Stepped(3, frozenset({P}), 2))
    assert feed(machine, TimePassed(), now=99.0) == []
    assert feed(machine, TimePassed(), now=100.0) == [
        Fail(3, "nobody gave gradients for these parts", 1)
    ]


ORDER = st.lists(
    st.sampled_from(["give", "ask", "drop", "tick", "gone", "again", "done"]), max_size=30
)


@settings(max_examples=150, deadline=None)
@given(ORDER, st.lists(st.sampled_from([B, C, D]), min_size=30, max_size=30), st.booleans())
def test_no_schedule_steps_a_cell_twice_or_serves_another_cell(
    kinds: list[str], who: list[PeerId], early: bool
) -> None:
    machine, stepped, number, now = RoundMachine(), [], 0, 0.0
    opened: Opened | None = None if early else APART
    streams: dict[int, tuple[PeerId, int, bool]] = {}
    fresh: set[int] = set()
    busy: list[int] = []

    def tell(*events: object) -> None:
        for action in feed(machine, *events, now=now):
            if isinstance(action, ReduceAndStep):
                stepped.append(action.cell)
                busy.append(action.cell)
                assert all(CELLS[p] == action.cell for p in action.contributors)
            if isinstance(action, Serve):
                peer = streams[action.stream][0]
                assert action.cell == CELLS[peer]
                assert action.cell in fresh
            if isinstance(action, Read):
                streams[action.stream] = (*streams[action.stream][:2], True)
            if isinstance(action, EndStream):
                assert action.weight == 0, "nobody here is to blame"

    if opened:
        tell(opened)
    for kind, peer in zip(kinds, who, strict=False):
        speaks, attempt = peer != C, 0 if opened in (None, APART) else 1
        match kind:
            case "give" | "ask":
                number += 1
                streams[number] = (peer, attempt, False)
                tokens = 1 if kind == "give" and speaks else 0
                tell(replace(began(number, peer, tokens=tokens), round=RoundId(3, 1, attempt)))
            case "done":
                for n in [n for n, (p, _, reading) in streams.items() if p == peer and reading]:
                    streams[n] = (*streams[n][:2], False)
                    tell(Uploaded(n))
                if busy:
                    cell = busy.pop(0)
                    fresh.add(cell)
                    tell(Stepped(3, frozenset({P}), cell))
            case "drop":
                for n in [n for n, (p, *_) in streams.items() if p == peer][:1]:
                    del streams[n]
                    tell(Ended(n))
            case "tick":
                now += 30.0
                tell(TimePassed())
            case "gone":
                tell(PeerFoundDead(peer))
            case _:
                after = (
                    APART
                    if opened is None
                    else replace(AGAIN, held=frozenset({P}) if 0 in fresh else frozenset())
                )
                if opened is None or opened is APART:
                    opened = after
                    tell(after)
    assert len(stepped) == len(set(stepped)), "a push is applied once, whatever is repeated"
    assert not opened or 0 in stepped


# ----------------------------------------------------------- over gRPC


class Servers:
    """What the owners of a cell made of what came: a running sum at each, and how often they were
    asked."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.sums = {p: {n: torch.zeros(s) for n, s in SHAPES.items()} for p in cell.peers}
        self.calls: list[tuple[PeerId, int, tuple[str, ...]]] = []

    def request(
        self, peer: PeerId, cells: Mapping[PeerId, int], owners: list[PeerId], **changes: object
    ) -> RoundRequest:
        first = {min(p for p, at in cells.items() if at == cell) for cell in cells.values()}

        def apply(
            cell: int, names: tuple[str, ...], means: Mapping[str, torch.Tensor]
        ) -> dict[str, torch.Tensor]:
            here = self.sums[peer]
            self.calls.append((peer, cell, names))
            here.update({n: here[n] + means[n] for n in means})
            return {n: here[n] for n in names}

        speaks = peer in first
        own = {
            "gradients": gradients_of(peer) if speaks else None,
            "tokens": int(speaks),
            "listeners": frozenset(cells) - first,
        }
        fixed = {
            "members": tuple(cells),
            "cells": cells,
            "apply": apply,
            "summed": False,
            "owners": self.cell.owners(owners),
        }
        return self.cell.request(peer, **{**fixed, "most": 1, **own, **changes})


async def test_each_cell_is_served_the_value_right_after_its_push(cell_of):
    cell, p0, p1, p2, p3 = await with_peers(
        cell_of(4, AveragingSettings(round_timeout_s=20.0, group_bytes=256))
    )
    cells, servers = {p0: 0, p1: 1, p2: 1, p3: 2}, Servers(cell)

    async def one(peer: PeerId, **changes: object):
        return await cell.run(servers.request(peer, cells, [p0], **changes), peer)

    serve = asyncio.ensure_future(one(p0))
    last = await one(p3)
    assert not serve.done(), "it is there for those who have not come yet"
    left, right = await asyncio.gather(one(p1), one(p2))
    first = await serve
    assert [o.missing for o in (first, last, left, right)] == [()] * 4
    assert first.unserved == ()
    mine, theirs, third = (gradients_of(p) for p in (p0, p1, p3))
    assert same(first.fresh, mine)
    assert all(torch.equal(last.fresh[n], mine[n] + third[n]) for n in SHAPES)
    assert all(torch.equal(left.fresh[n], mine[n] + third[n] + theirs[n]) for n in SHAPES)
    assert same(left.fresh, right.fresh), "who speaks and who listens end with the same bits"
    again = await one(p1, round=RoundId(7, 1, 1))
    assert same(again.fresh, left.fresh), "what it has is not asked for again"
    assert len(servers.calls) == len(set(servers.calls))


async def test_two_servers_hear_the_cell_of_a_dead_speaker_on_retry(cell_of, monkeypatch):
    cell, p0, p1, p2, p3 = await with_peers(
        cell_of(4, AveragingSettings(round_timeout_s=20.0, group_bytes=256))
    )
    cells, servers = {p0: 0, p1: 1, p2: 2, p3: 2}, Servers(cell)
    await cell.net.kill(p2)
    begin = ExchangeServer.open

    def told(owner: ExchangeServer, request: RoundRequest, *others: object) -> RoundAttempt:
        attempt = begin(owner, request, *others)
        owner.gone(p2)
        return attempt

    monkeypatch.setattr(ExchangeServer, "open", told)
    runs = [cell.run(servers.request(p, cells, [p0, p1]), p) for p in (p0, p1, p3)]
    first, second, waiting = await asyncio.gather(*runs)
    assert (first.missing, second.missing) == ((), ())
    assert set(first.unserved) | set(second.unserved) == set(SHAPES), "cell 2 has nothing of either"
    assert set(waiting.missing) == set(SHAPES)
    told = {"round": RoundId(7, 1, 1), "ownership_hash": "again"}
    alive = {p: cell for p, cell in cells.items() if p != p2}
    a, b, c = await asyncio.gather(
        *(cell.run(servers.request(p, alive, [p0, p1], **told), p) for p in (p0, p1, p3))
    )
    assert (a.unserved, b.unserved, c.missing) == ((), (), ())
    assert same(a.fresh, first.fresh)
    assert same(b.fresh, second.fresh)
    both = {n: gradients_of(p0)[n] + gradients_of(p1)[n] + gradients_of(p3)[n] for n in SHAPES}
    assert all(torch.allclose(c.fresh[n], both[n]) for n in SHAPES), (
        "three pushes, each of them once"
    )


async def test_who_begins_to_serve_a_part_has_pushed_to_it_before(cell_of):
    cell, p0, p1, p2 = await with_peers(
        cell_of(3, AveragingSettings(round_timeout_s=20.0, group_bytes=256))
    )
    servers, here = Servers(cell), {p0: 0, p1: 1}
    first = await asyncio.gather(*(cell.run(servers.request(p, here, [p0]), p) for p in (p0, p1)))
    assert [o.missing for o in first] == [(), ()]
    await cell.net.kill(p0)
    servers.sums[p1] = dict(first[1].fresh)
    again = {"round": RoundId(7, 1, 1), "ownership_hash": "again"}
    requests = [servers.request(p, {p1: 1, p2: 2}, [p1], **again) for p in (p1, p2)]
    serves, late = await asyncio.gather(
        *(cell.run(r, p) for r, p in zip(requests, (p1, p2), strict=True))
    )
    assert (serves.missing, late.missing) == ((), ())
    assert same(serves.fresh, first[1].fresh), "what its own cell has pulled is not pushed to again"
    assert {at for peer, at, _ in servers.calls if peer == p1} == {2}


async def test_who_only_serves_again_asks_nobody_and_has_all(cell_of):
    cell, p0, p1, p2 = await with_peers(
        cell_of(3, AveragingSettings(round_timeout_s=20.0, group_bytes=256))
    )
    cells, servers = {p0: 0, p1: 1, p2: 2}, Servers(cell)
    here = {p: {k: v for k, v in cells.items() if k != p2} for p in (p0, p1)}
    first = await asyncio.gather(
        *(cell.run(servers.request(p, here[p], [p0, p1]), p) for p in (p0, p1))
    )
    assert [o.missing for o in first] == [(), ()]
    again = {"round": RoundId(7, 1, 1), "ownership_hash": "again"}
    serves = servers.request(p0, {p0: 0, p2: 2}, [p0, p2], gathers=False, **again)
    late = servers.request(p2, {p2: 2}, [p0, p2], members=(p0, p2), **again)
    there, came = await asyncio.gather(cell.run(serves, p0), cell.run(late, p2))
    assert (there.missing, came.missing) == ((), ())
    assert same(there.fresh, first[0].fresh), (
        "what another served before is as good as what it serves now"
    )
    assert all(transport.faults == [] for transport in cell.transports.values())


async def test_a_push_is_stepped_though_the_next_attempt_drops_it(cell_of, monkeypatch):
    cell, p0, p1, p2 = await with_peers(
        cell_of(3, AveragingSettings(round_timeout_s=60.0, group_bytes=256))
    )
    cells, servers = {p0: 0, p1: 1, p2: 2}, Servers(cell)
    first, others = (servers.request(p0, among, [p0]) for among in (cells, {p0: 0, p2: 2}))
    busy, goes_on, came, tell = (
        threading.Event(),
        threading.Event(),
        asyncio.Semaphore(0),
        ExchangeServer._feed,
    )

    def heard(owner: ExchangeServer, event: Event) -> None:
        tell(owner, event)
        if isinstance(event, Uploaded):
            came.release()

    monkeypatch.setattr(ExchangeServer, "_feed", heard)

    def held_up(
        at: int, names: tuple[str, ...], means: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        if at == 1:
            busy.set()
            assert goes_on.wait(60)
        assert first.apply is not None
        return first.apply(at, names, means)

    serving = asyncio.ensure_future(cell.run(replace(first, apply=held_up), p0))
    pushing = asyncio.ensure_future(cell.run(servers.request(p1, cells, [p0]), p1))
    await asyncio.to_thread(busy.wait, 60)
    async with asyncio.timeout(60):
        await came.acquire()
        await came.acquire()
    again = replace(others, round=RoundId(7, 1, 1), ownership_hash="again")
    second = asyncio.ensure_future(cell.run(again, p0))
    await asyncio.sleep(0)
    goes_on.set()
    assert (await pushing).missing == ()
    for task in (serving, second):
        task.cancel()
    await asyncio.gather(serving, second, return_exceptions=True)
    assert cell.errors == []
    assert all(
        torch.equal(servers.sums[p0][n], gradients_of(p0)[n] + gradients_of(p1)[n]) for n in SHAPES
    )


def test_what_is_dropped_while_a_step_takes_its_own():
    class Meanwhile(dict[PeerId, int]):
        def get(self, *asked):
            attempt.given.pop((0, A), None)
            return super().get(*asked)

    async def begin() -> RoundAttempt:
        future = asyncio.get_running_loop().create_future()
        request = RoundRequest(
            OPEN.round,
            "plan",
            (A, B),
            frozenset(),
            {},
            "own",
            {},
            None,
            0,
            1.0,
            cells=Meanwhile({A: 0, B: 1}),
        )
        return RoundAttempt(request, lambda means: means, (), future)

    attempt = asyncio.run(begin())
    attempt.given |= {(group, peer): Given(1, {}, {}) for group in (0, 1) for peer in (A, B)}
    attempt.begun |= {(0, 0), (1, 0)}
    before = attempt.given
    attempt.drop((0, 1))
    assert attempt.given is before, "what a step takes is taken out of what is kept"
    assert set(attempt.given) == {(0, B)}


async def test_a_push_that_is_not_finite_is_refused_and_served(cell_of, monkeypatch):
    cell, p0, p1, p2 = await with_peers(cell_of(3, AveragingSettings(round_timeout_s=20.0)))
    cells, servers = {p0: 0, p1: 1, p2: 1}, Servers(cell)
    bad = {n: torch.full(s, float("nan")) for n, s in SHAPES.items()}
    monkeypatch.setattr(cell.rounds[p1], "_fit_to_give", _blindly)
    runs = [
        cell.run(servers.request(p0, cells, [p0]), p0),
        cell.run(servers.request(p1, cells, [p0], gradients=bad), p1),
        cell.run(servers.request(p2, cells, [p0]), p2),
    ]
    first, liar, honest = await asyncio.gather(*runs)
    assert liar.missing
    assert "refused" in liar.failed[p0]
    assert same(honest.fresh, first.fresh)
    assert p1 in first.refused
    assert [(who, weight) for who, _, weight in cell.transports[p0].faults] == [(p1, 1.0)]


async def _blindly(request: RoundRequest) -> tuple[int, dict[str, float], dict[PeerId, str]]:
    return request.tokens, dict.fromkeys(SHAPES, 1.0), {}


def test_a_group_is_named_as_in_any_round():
    machine = serving()
    (refused,) = feed(machine, replace(began(1, B, tokens=1), digest="another"))
    assert refused.kind is Kind.GROUPS
