"""Rounds in many groups over real gRPC between peers of one process: the same bits as in one,
whoever dies between two of them."""

import asyncio
import threading
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch

from node.averaging.exchange import member
from node.averaging.exchange.events import LET_IN, Kind, Uploaded
from node.averaging.exchange.member import Unwelcome
from node.averaging.exchange.owner import ExchangeServer
from node.averaging.settings import AveragingSettings
from node.core.ids import RoundId
from tests.averaging.conftest import SHAPES, with_peers
from tests.transport.conftest import until

EACH = 1
"""Bytes of a group that make every part a group of its own."""


@pytest.fixture
async def cut(cell_of):
    """Factory of cells in which every part is a group of its own: `await cut(3)`."""

    async def make(count, **changes):
        return await cell_of(
            count, replace(AveragingSettings(round_timeout_s=120.0, group_bytes=EACH), **changes)
        )

    return make


class Gates:
    """Gates between an owner's steps: `seen` is set when a step has begun, and step n goes on after
    `open(n)`."""

    def __init__(self, step):
        self.loop = asyncio.get_running_loop()
        self.step = step
        self.done = 0
        self.seen = [asyncio.Event() for _ in range(8)]
        self.gates = [threading.Event() for _ in range(8)]

    def __call__(self, means):
        number = self.done
        self.done = self.done + 1
        self.loop.call_soon_threadsafe(self.seen[number].set)
        if not self.gates[number].wait(300):
            raise TimeoutError("nobody opened this gate")
        return self.step(means)

    def open(self, *numbers):
        for number in numbers or range(8):
            self.gates[number].set()


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
async def test_many_groups_give_the_bits_of_one(cell_of, cut, bits, wire):
    one = await cell_of(3, AveragingSettings(wire=wire, round_timeout_s=120.0))
    many = await cut(3, wire=wire)
    whole = await one.run_all({p: one.request(p) for p in one.peers})
    parts = await many.run_all({p: many.request(p) for p in many.peers})
    for peer in one.peers:
        assert bits(parts[peer].fresh, whole[peer].fresh)
        assert not parts[peer].missing
        assert (parts[peer].nbytes, len(one.steps[peer])) == (whole[peer].nbytes, 1)
        assert sorted(many.steps[peer]) == [
            (n,) for n, o in sorted(many.owners().items()) if o == peer
        ], "one by one"
        assert many.transports[peer].faults == []


async def test_listeners_and_spoiled_members_get_every_group(cut, bits, grads):
    cell, p0, p1, p2, p3 = await with_peers(cut(4))
    changes = {"listeners": frozenset({p3}), "owners": cell.owners([p0, p1])}
    spoiled = grads(p2) | {"c.weight": torch.full((5,), float("nan"))}
    requests = {p: cell.request(p, **changes) for p in (p0, p1)}
    requests |= {
        p2: cell.request(p2, gradients=spoiled, **changes),
        p3: cell.request(p3, gradients=None, tokens=0, **changes),
    }
    outcomes = await cell.run_all(requests)
    assert all(bits(o.fresh, cell.expected([p0, p1])) for o in outcomes.values())
    assert cell.steps[p3] == cell.transports[p0].faults == []
    assert "not finite" in outcomes[p2].refused[p2]


async def test_an_owner_killed_mid_round_leaves_its_finished_groups(cut, bits):
    cell, p0, p1, p2 = await with_peers(cut(3))
    owners = cell.owners([p2])
    gates = Gates(cell.step_of(p2))
    victim = asyncio.ensure_future(
        cell.rounds[p2].run_round(cell.request(p2, owners=owners), gates)
    )
    others = [asyncio.ensure_future(cell.run(cell.request(p, owners=owners), p)) for p in (p0, p1)]
    gates.open(0, 1)
    await gates.seen[2].wait()
    await until(lambda: all(len(cell.rounds[p]._epoch(7).held) == 2 for p in (p0, p1)), 60)
    done = sorted(cell.rounds[p0]._epoch(7).held)
    await cell.net.kill(p2)
    first = await asyncio.gather(*others)
    gates.open()
    victim.cancel()
    await asyncio.gather(victim, return_exceptions=True)
    for outcome in first:
        assert bits(outcome.fresh, cell.expected(cell.peers, done))
        assert set(outcome.failed) == {p2}
        assert set(outcome.missing) == owners.keys() - set(done)
    second = await cell.run_all(
        {p: cell.repair(p, [p0, p1], cell.owners([p0, p1])) for p in (p0, p1)}
    )
    expected = cell.expected([p0, p1]) | cell.expected(cell.peers, done)
    assert all(bits(o.fresh, expected) for o in second.values())
    assert all(not o.missing for o in second.values())
    assert {n for p in (p0, p1) for step in cell.steps[p] for n in step} == owners.keys() - set(
        done
    )


async def test_a_member_that_stops_after_a_group_is_in_that_one_only(cut, bits):
    cell, p0, p1, p2 = await with_peers(cut(3))
    owners = cell.owners([p0])
    requests = {p: cell.request(p, owners=owners, deadline_s=300.0) for p in (p0, p1)}
    running = asyncio.ensure_future(cell.run_all(requests))
    request = cell.request(p2, owners=owners)
    first, *_ = request.groups_of(p0, EACH)
    await cell.exchanges(p2, p0, request).one(first, first.names, 300.0)
    cell.rounds[p0].gone(p2)
    outcomes = await asyncio.wait_for(running, 300)
    expected = cell.expected([p0, p1]) | cell.expected(cell.peers, ["a.weight"])
    assert all(bits(o.fresh, expected) for o in outcomes.values())


async def test_a_failed_step_keeps_earlier_groups_and_is_repaired(cut, bits):
    cell, p0, p1 = await with_peers(cut(2))
    owners = cell.owners([p1])
    step = cell.step_of(p1)

    def broken(means):
        if len(cell.steps[p1]) == 2:
            raise RuntimeError("out of memory")
        return step(means)

    failing = cell.rounds[p1].run_round(cell.request(p1, owners=owners), broken)
    good, bad = await asyncio.gather(cell.run(cell.request(p0, owners=owners), p0), failing)
    assert "refused our exchange, failed" in good.failed[p1]
    assert "RuntimeError" in bad.failed[p1]
    assert "out of memory" not in good.failed[p1], "our exceptions are not for other peers"
    assert [str(e) for e in cell.errors] == ["out of memory"]
    done = [name for names in cell.steps[p1] for name in names]
    assert bits(bad.fresh, cell.expected(cell.peers, done))
    assert bits(good.fresh, cell.expected(cell.peers, list(good.fresh)))
    assert set(good.fresh) <= set(done)
    assert not cell.rounds[p1]._epochs[7].attempts[RoundId(7, 1, 0)].given, (
        "what no step will take is let go"
    )
    repaired = await cell.run_all(
        {p: cell.repair(p, cell.peers, dict.fromkeys(owners, p0)) for p in cell.peers}
    )
    assert all(bits(o.fresh, cell.expected(cell.peers)) for o in repaired.values())


async def test_contributions_are_released_at_the_next_attempt(cell_of, bits, monkeypatch):
    cell = await cell_of(3, AveragingSettings(round_timeout_s=120.0))
    came = asyncio.Event()
    tell = ExchangeServer._feed

    def heard(owner, event):
        tell(owner, event)
        if isinstance(event, Uploaded):
            came.set()

    monkeypatch.setattr(ExchangeServer, "_feed", heard)
    p0, p1, _ = cell.peers
    owners = dict.fromkeys(cell.owners(), p0)
    first = asyncio.ensure_future(
        cell.run_all({p: cell.request(p, owners=owners) for p in (p0, p1)})
    )
    await asyncio.wait_for(came.wait(), 60)
    attempts = cell.rounds[p0]._epochs[7].attempts
    assert attempts[RoundId(7, 1, 0)].given.keys() == {(0, p0), (0, p1)}
    again = await cell.run_all({p: cell.repair(p, [p0, p1], owners) for p in (p0, p1)})
    assert all(bits(o.fresh, cell.expected([p0, p1])) for o in again.values())
    assert not attempts[RoundId(7, 1, 0)].given
    await first


async def test_mismatched_groups_are_refused_by_kind_without_a_fault(cut):
    cell, p0, p1 = await with_peers(cut(2))
    request = cell.request(p1, owners=cell.owners([p0]))
    running = asyncio.ensure_future(
        cell.run(cell.request(p0, owners=cell.owners([p0]), deadline_s=300.0), p0)
    )
    exchanges = cell.exchanges(p1, p0, request)
    (whole,) = request.groups_of(p0, 1 << 20)
    first, second, *_ = request.groups_of(p0, EACH)
    for wrong in (
        whole,
        replace(first, index=1),
        replace(first, index=99),
        replace(second, digest=first.digest),
    ):
        with pytest.raises(Unwelcome) as caught:
            await exchanges.one(wrong, wrong.names, 300.0)
        assert f", {Kind.GROUPS.value}: " in caught.value.reason
    with pytest.raises(Unwelcome) as caught:
        await exchanges.one(first, second.names, 300.0)
    assert f", {Kind.HEADS.value}: " in caught.value.reason
    assert [w for _, _, w in cell.transports[p0].faults] == [1.0]
    cell.rounds[p0].gone(p1)
    assert not (await asyncio.wait_for(running, 300)).missing


async def test_an_owner_that_stops_answering_fails_by_the_deadline(cut, bits):
    cell, p0, p1 = await with_peers(cut(2))
    owners = cell.owners([p1])
    gates = Gates(cell.step_of(p1))
    running = asyncio.ensure_future(
        cell.rounds[p1].run_round(cell.request(p1, owners=owners), gates)
    )
    gates.open(0)
    outcome = await asyncio.wait_for(
        cell.run(cell.request(p0, owners=owners, deadline_s=3.0), p0), 300
    )
    gates.open()
    cell.rounds[p1].gone(p0)
    await running
    assert outcome.failed == {p1: "gave no fresh parts in time"}
    assert len(outcome.fresh) <= 1
    assert bits(outcome.fresh, cell.expected(cell.peers, list(outcome.fresh)))


@pytest.mark.parametrize("early", [True, False])
async def test_nobody_waits_for_an_owner_that_is_dead_for_the_leader_alone(cut, bits, early):
    """It answers, but never hears that the round has begun."""
    cell, p0, p1, p2 = await with_peers(cut(3))
    owners = cell.owners()
    if early:
        for p in (p0, p1):
            cell.rounds[p].lost(7, p2)
    running = asyncio.ensure_future(
        cell.run_all({p: cell.request(p, owners=owners, deadline_s=300.0) for p in (p0, p1)})
    )
    if not early:
        await asyncio.sleep(1.0)
        for p in (p0, p1):
            cell.rounds[p].lost(7, p2)
    outcomes = await asyncio.wait_for(running, 100)
    for outcome in outcomes.values():
        assert outcome.failed == {p2: "was found dead by the leader"}
        assert set(outcome.missing) == {n for n, owner in owners.items() if owner == p2}
        assert bits(outcome.fresh, cell.expected([p0, p1], list(outcome.fresh)))


async def test_groups_are_sent_in_order_though_encoded_out_of_order(cut, bits, monkeypatch):
    cell, p0, p1 = await with_peers(cut(2))
    encode = member.encode
    later = threading.Event()

    def slow(tensor, codec):
        if tensor.shape == SHAPES["a.weight"]:
            assert later.wait(60)
        done = encode(tensor, codec)
        if tensor.shape == SHAPES["c.weight"]:
            later.set()
        return done

    monkeypatch.setattr(member, "encode", slow)
    owners = cell.owners([p0])
    requests = {p: cell.request(p, owners=owners, deadline_s=300.0) for p in cell.peers}
    outcomes = await asyncio.wait_for(cell.run_all(requests), 120)
    assert all(bits(o.fresh, cell.expected(cell.peers)) for o in outcomes.values())


class Counted:
    """Counter of the bytes that an owner has read and that are still alive, by part.

    The thread that read a contribution may let go of it only when it gets the processor again; a
    test that expects it to be gone therefore waits a while.
    """

    def __init__(self, monkeypatch):
        self.of = Counter()
        self.peak = 0
        self._changed = threading.Condition(threading.RLock())
        read = ExchangeServer._fit

        def fit(owner, *args):
            given, fault = read(owner, *args)
            for name, coded in given.named.items():
                self.count(name, 4 * coded.numbers)
                weakref.finalize(coded, self.count, name, -4 * coded.numbers)
            return given, fault

        monkeypatch.setattr(ExchangeServer, "_fit", fit)

    @property
    def alive(self):
        return self.of.total()

    def count(self, name, nbytes):
        with self._changed:
            self.of[name] += nbytes
            self.peak = max(self.peak, self.alive)
            self._changed.notify_all()

    def gone(self, names):
        with self._changed:
            return self._changed.wait_for(lambda: not any(self.of[name] for name in names), 60)


PART = 4 * 64 * 64
"""Bytes of one part."""
PARTS = 12


@pytest.mark.parametrize(
    ("group_bytes", "least", "most"),
    [
        pytest.param(PART, 0, LET_IN * 2 * PART, id="each a group"),
        pytest.param(100 * PART, PARTS * 2 * PART, PARTS * 2 * PART, id="all in one"),
    ],
)
async def test_an_owner_holds_no_more_than_its_window_of_every_member(
    cell_of, monkeypatch, group_bytes, least, most
):
    settings = AveragingSettings(round_timeout_s=120.0, group_bytes=group_bytes)
    counted = Counted(monkeypatch)
    cell = await cell_of(3, settings, chunk=4096)
    shapes = {f"p{i:02}": (64, 64) for i in range(PARTS)}
    seen = []
    changes = {
        "shapes": shapes,
        "owners": dict.fromkeys(shapes, cell.peers[0]),
        "gradients": {n: torch.ones(s) for n, s in shapes.items()},
    }

    def step(means):
        assert counted.gone(means), "the group that is stepped is gone before its step"
        seen.append(counted.alive)
        return {n: m + 1 for n, m in means.items()}

    running = [cell.rounds[p].run_round(cell.request(p, **changes), step) for p in cell.peers]
    assert all(not o.missing for o in await asyncio.gather(*running))
    assert counted.alive == 0, "what was given is gone after the step"
    assert max(seen) <= (LET_IN - 1) * 2 * group_bytes
    assert least <= counted.peak <= most


@pytest.mark.parametrize(
    ("up", "down", "groups"),
    [
        ("fp32", "fp32", 8),
        ("fp16", "fp16", 4),
        ("int8", "int8", 3),
        ("int8", "fp32", 8),
        ("top-k", "top-k", 2),
    ],
)
async def test_groups_are_cut_by_what_travels_and_bounded_in_memory(cell_of, up, down, groups):
    cell, mine, other = await with_peers(cell_of(2))
    shapes = {f"p{i}": (1 << 10,) for i in range(8)}
    owners = dict.fromkeys(shapes, other)
    gradients = {n: torch.ones(s) for n, s in shapes.items()}
    found = cell.request(
        mine, shapes=shapes, owners=owners, gradients=gradients, up=up, down=down
    ).groups_of(other, 4 << 10)
    assert (len(found), [n for g in found for n in g.names]) == (groups, sorted(shapes))
