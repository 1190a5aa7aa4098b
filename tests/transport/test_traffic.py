"""Traffic: the bytes that count, the messages that wait, and those that never do.
tests/reach/test_shares.py tests turns in virtual time."""

import asyncio
import errno
import os
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from node.core.ids import PeerId
from node.identity.refusals import Refusals
from node.transport.auth import TOKEN_KEY, AuthInterceptor, Callers, LabelledChannel
from node.transport.handshake import Tokens
from node.transport.limits import LARGEST, Limit
from node.transport.traffic import (
    BULK,
    Beside,
    Moved,
    Paced,
    Traffic,
    acknowledged,
    on_wire,
    read_io,
    size_of,
)

CALLER = PeerId("caller")
CALLED = PeerId("called")
LARGE = b"x" * (4 * BULK)


class Gate(Traffic):
    """Traffic with turns given by hand: a message of BULK bytes or more waits until its direction
    is open."""

    def __init__(self) -> None:
        super().__init__(1e6, 1e6)
        self.up = asyncio.Event()
        self.down = asyncio.Event()
        self.asked: list[tuple[str, str, int]] = []
        self.first = asyncio.Event()

    async def may_send(self, peer: Any, message: Any) -> None:
        await self._turn("up", self.up, peer, size_of(message))

    async def may_read(self, peer: Any, message: Any) -> None:
        await self._turn("down", self.down, peer, size_of(message))

    async def _turn(self, way: str, opened: asyncio.Event, peer: Any, nbytes: int) -> None:
        if nbytes >= BULK:
            self.asked.append((way, peer, nbytes))
            self.first.set()
            await opened.wait()


class Lane:
    """A server and a channel to it, each with its traffic."""

    def __init__(self, ours: Traffic, theirs: Traffic) -> None:
        self.ours = ours
        self.theirs = theirs
        tokens = Tokens()
        token = tokens.issue(CALLER).hex()
        tokens.accept(CALLER)
        auth = AuthInterceptor(tokens, 128, 64, theirs, Callers(), Refusals())
        auth.rows |= {f"/T/{name}": Limit(LARGEST, 64, 100, 100) for name in ("Up", "Down", "Ping")}
        self.server = grpc.aio.server(interceptors=[auth])
        methods = {
            "Up": grpc.stream_stream_rpc_method_handler(_sum),
            "Down": grpc.unary_stream_rpc_method_handler(_give),
            "Ping": grpc.unary_unary_rpc_method_handler(_echo),
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("T", methods),))
        self._label = ((TOKEN_KEY, token),)

    async def __aenter__(self) -> LabelledChannel:
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        raw = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.channel = LabelledChannel(raw, self._label, traffic=self.ours, peer=CALLED)
        return self.channel

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(None)


async def _sum(requests: Any, context: Any) -> None:
    total = 0
    async for message in requests:
        total += len(message)
    await context.write(str(total).encode())


async def _give(request: bytes, context: Any) -> Any:
    for _ in range(int(request)):
        yield LARGE


async def _echo(request: bytes, context: Any) -> bytes:
    return request


async def test_both_ends_count_the_same_and_no_less_than_the_messages():
    ours = Traffic()
    theirs = Traffic()
    async with Lane(ours, theirs) as channel:
        assert [m async for m in channel.stream_stream("/T/Up")(LARGE for _ in range(3))] == [
            str(3 * len(LARGE)).encode()
        ]
        assert len([m async for m in channel.unary_stream("/T/Down")(b"2")]) == 2
        assert await channel.unary_unary("/T/Ping")(b"hello") == b"hello"
    assert (ours.sent, ours.received) == (theirs.received, theirs.sent)
    assert 3 * len(LARGE) < ours.sent < 3.5 * len(LARGE)
    assert 2 * len(LARGE) < ours.received < 2.5 * len(LARGE)


@pytest.mark.parametrize(
    ("mine", "way"), [(True, "up"), (False, "up"), (True, "down"), (False, "down")]
)
async def test_large_messages_wait_their_turn_and_small_ones_do_not(mine: bool, way: str):
    gate = Gate()
    lane = Lane(gate, Traffic()) if mine else Lane(Traffic(), gate)
    async with lane as channel:
        # Bytes that one end sends up come down at the other.
        upward = (way == "up") == mine
        call = (
            channel.stream_stream("/T/Up")([LARGE, LARGE])
            if upward
            else channel.unary_stream("/T/Down")(b"2")
        )
        reading = asyncio.ensure_future(_all(call))
        await gate.first.wait()
        for _ in range(3):
            assert await channel.unary_unary("/T/Ping")(b"hello") == b"hello"
        assert await channel.unary_unary("/T/Ping")(b"x" * 2 * BULK) == b"x" * 2 * BULK, (
            "whole calls do not wait either"
        )
        assert not reading.done()
        assert gate.asked == [(way, CALLED if mine else CALLER, len(LARGE))], "one at a time"
        (gate.up if way == "up" else gate.down).set()
        assert await reading == ([str(2 * len(LARGE)).encode()] if upward else [LARGE, LARGE])
        assert len(gate.asked) == 2


async def _all(call: Any) -> list[bytes]:
    return [message async for message in call]


async def test_read_and_write_of_a_call_wait_as_iteration_does():
    gate = Gate()
    async with Lane(gate, Traffic()) as channel:
        call = channel.unary_stream("/T/Down")(b"1")
        reading = asyncio.ensure_future(call.read())
        await gate.first.wait()
        assert not reading.done()
        gate.down.set()
        assert await reading == LARGE
        assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]


async def test_a_stream_that_was_cancelled_while_it_waited_goes_on():
    turn = asyncio.Event()

    async def wait(message: int) -> None:
        await turn.wait()

    paced = Paced([1, 2, 3], wait)
    first = asyncio.ensure_future(anext(paced))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    turn.set()
    assert [m async for m in paced] == [2, 3]


async def test_what_is_sent_without_waiting_delays_what_waits():
    traffic = Traffic(max_up=1e9)
    traffic.count_raw(10**12, 0)  # a quarter of an hour of the cap
    waiting = asyncio.ensure_future(traffic.may_send(CALLED, bytes(BULK)))
    other = asyncio.ensure_future(traffic.may_read(CALLED, bytes(BULK)))
    await other
    await traffic.may_send(CALLED, bytes(BULK - 1))
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize("mine", [True, False])
async def test_the_one_large_message_of_a_stream_delays_what_waits(mine: bool):
    """The message is sent, and read, without waiting."""
    capped = Traffic(max_up=1e4, max_down=1e4)
    lane = Lane(capped, Traffic()) if mine else Lane(Traffic(), capped)
    async with lane as channel:
        assert await _all(channel.unary_stream("/T/Down")(b" " * 64 * BULK + b"0")) == []
    turn = capped.may_send if mine else capped.may_read
    waiting = asyncio.ensure_future(turn(CALLED, bytes(BULK)))
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


def test_headers_and_acknowledgements_count():
    assert on_wire(0) > 0
    assert on_wire(1448 * 100, 0) == (1448 + 66) * 100
    assert on_wire(10, 3) == on_wire(10) + 2 * (on_wire(10) - 10)
    assert (acknowledged(1), acknowledged(1448 * 200)) == (66, 66 * 101)
    traffic = Traffic()
    traffic.into(None, False)(bytes(10_000))
    assert (traffic.sent, traffic.received) == (acknowledged(10_000), on_wire(10_000))


MOVED = [
    ((7, 1000, 2000, 0, 0), (2000, 1000), "since its start"),
    (
        (7, 51_000, 52_000, 50_000, 50_000),
        (0, 0),
        "a tunnel's bytes are counted where they are made",
    ),
    ((7, 51_300, 52_100, 50_000, 50_000), (100, 300), ""),
    ((7, 51_300, 52_100, 50_050, 50_050), (0, 0), "told before it was read"),
    ((7, 51_400, 52_250, 50_050, 50_050), (100, 50), ""),
    ((7, 52_400, 53_250, 50_050, 50_050, 1000), (0, 0), "may be ours"),
    ((7, 52_500, 53_450, 50_050, 50_050, 1000), (200, 100), ""),
    ((7, 52_500, 53_450, 51_050, 51_050), (0, 0), "and was"),
    ((7, 53_000, 53_950, 51_550, 51_050), (500, 0), "a call of ours is read from us and sent"),
    ((7, 60_000, 60_950, 51_550, 58_050), (0, 7000), "a call of others is received and handed on"),
    ((8, 40, 30, 51_560, 58_060), (30, 40), "another process begins anew"),
    ((8, 41, 33, 51_560, 58_060), (3, 1), ""),
]
"""Readings one after the other: (process, bytes read, bytes written, bytes read from us beside
that, bytes written to us, bytes that may be ours), the bytes (sent, received) that count, and
why."""


def test_what_p2pd_moves_for_others_is_not_its_own():
    beside = Beside()
    for seen, counts, why in MOVED:
        assert beside.since(*seen) == counts, why


def test_the_rate_lately_leaves_out_the_second_under_way():
    moved = Moved()
    for second in range(20):
        moved.count(100, 10, second + 0.5)
    assert moved.mean(20.1, 10) == (100, 10)
    assert moved.mean(19.9, 10) == (100, 10)
    assert moved.mean(25.0, 10) == (50, 5)


def test_the_system_reports_the_bytes_a_process_wrote():
    before = read_io(os.getpid())
    if before is None:
        pytest.skip("this system does not tell")
    with open("/dev/null", "wb") as file:
        file.write(b"x" * 100_000)
    after = read_io(os.getpid())
    assert after[1] - before[1] >= 100_000
    assert read_io(2**22 + 1) is None


def test_without_a_descriptor_nothing_is_told_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(pid: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(psutil, "Process", none_left)
    assert read_io(1) is None
