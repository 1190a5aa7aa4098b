"""Traffic of a peer: all that it sends and receives is counted, and kept under the operator's caps.
Enters: sizes of gRPC messages, p2pd's traffic. Leaves: turns to send and to read.

Where a cap is set, a message of :data:`BULK` bytes or more waits for its turn before it is handed
to gRPC. A received message waits before it is handed on; its sender waits with it, for HTTP/2 lets
no more in than is read. Smaller messages (heartbeats, plans, receipts, probes) never wait, but
count. The counts are the bytes that a network interface counts: :func:`on_wire`.
"""

import asyncio
import time
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Iterator,
)
from typing import Any

import psutil

from node.reach import shares

BULK = 4096
"""Bytes from which a message waits."""
SEGMENT = 1448
"""Bytes of data in a full TCP segment over Ethernet."""
HEADERS = 66
"""Bytes of the headers around a TCP segment."""
MESSAGE = 110
"""Bytes that a message costs beside its own: frames of gRPC and HTTP/2, a TLS record, a segment of
its own."""
PER_ACK = 2
"""Full segments that are acknowledged together (RFC 9293, 3.8.6.3)."""
RELAYED_WEIGHT = 0.1
"""Weight of bytes that are relayed for others, beside one peer's own traffic."""
PAYLOAD = 0.9
"""Share of a cap that a plan counts with: the rest is for headers, acknowledgements and small
messages."""
BURST_S = 1.0
"""Seconds of a cap that may go at once after a pause: training pauses at the end of every epoch."""
LATELY_S = 10.0

Coder = Callable[[Any], Any] | None
"""A serialiser or a deserialiser of messages; None: they are bytes."""


def on_wire(nbytes: int, messages: int = 1) -> int:
    """Bytes on the wire for ``nbytes`` bytes of payload in ``messages`` messages."""
    return nbytes + MESSAGE * messages + nbytes // SEGMENT * HEADERS


def acknowledged(nbytes: int) -> int:
    """Bytes that go the other way for ``nbytes`` that came."""
    return HEADERS * (1 + nbytes // (SEGMENT * PER_ACK))


class Moved:
    """Bytes ``sent`` and ``received`` since the start, and in each second of the last minute.
    ``now`` is in seconds of a steady clock."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self._seconds: deque[list[int]] = deque(maxlen=60)

    def count(self, sent: int, received: int, now: float) -> None:
        """Count bytes that went just now."""
        self.sent += sent
        self.received += received
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        self._seconds[-1][1] += sent
        self._seconds[-1][2] += received

    def rates(self, now: float) -> tuple[float, float]:
        """Bytes sent and received in the busiest second, zeros for nothing lately."""
        fresh = [row for row in self._seconds if now - row[0] < 60]
        return max((float(r[1]) for r in fresh), default=0.0), max(
            (float(r[2]) for r in fresh), default=0.0
        )

    def mean(self, now: float, seconds: float) -> tuple[float, float]:
        """Bytes a second sent and received, over the last ``seconds`` (60 at most) without the one
        under way."""
        fresh = [row for row in self._seconds if 0 < int(now) - row[0] <= seconds]
        return sum(r[1] for r in fresh) / seconds, sum(r[2] for r in fresh) / seconds


class Share(shares.Shares):
    """Turns under a rate, on the clock of the event loop: :class:`~node.reach.shares.Shares` for
    tasks that wait. ``rate``: bytes a second for all together; 0: nothing ever waits."""

    def __init__(self, rate: float, burst_s: float = shares.BURST_S) -> None:
        super().__init__(rate, time.monotonic(), burst_s)
        self._granted: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, pair: Hashable, count: int, weight: float = 1.0) -> None:
        """Return when ``pair`` may send ``count`` bytes; see
        :meth:`~node.reach.shares.Shares.ask`."""
        if not self.rate:
            return
        number = self.ask(pair, count, weight)
        granted = self._granted[number] = asyncio.get_running_loop().create_future()
        if self._timer is None:
            self._go_on()
        try:
            await granted
        finally:
            self._granted.pop(number, None)
            self.drop(number)

    def _go_on(self) -> None:
        for number in self.grant(time.monotonic()):
            if (granted := self._granted.get(number)) is not None and not granted.done():
                granted.set_result(None)
        wait = self.wait()
        self._timer = None
        if wait is not None:
            self._timer = asyncio.get_running_loop().call_later(wait, self._go_on)


class Traffic(Moved):
    """Bytes moved on the wire. ``max_up``, ``max_down``: bytes a second, 0 for no cap. Calls of one
    message each way count and never wait."""

    def __init__(self, max_up: float = 0.0, max_down: float = 0.0) -> None:
        super().__init__()
        self.max_up = max_up
        self.max_down = max_down
        self.capped = bool(max_up or max_down)
        """True if there is a cap, so that messages may wait."""
        self._up = Share(max_up, BURST_S)
        self._down = Share(max_down, BURST_S)

    def lately(self) -> tuple[float, float]:
        """Bytes a second sent and received, over the last :data:`LATELY_S` seconds."""
        return self.mean(time.monotonic(), LATELY_S)

    # ----------------------------------------------------------- counting

    def out(self, serialise: Coder, stream: bool) -> Callable[[Any], bytes]:
        """Return ``serialise`` with a count of its bytes; a large message of a ``stream`` has had
        its turn already."""

        def told(message: Any) -> bytes:
            data = serialise(message) if serialise else message
            waited = stream and len(data) >= BULK
            self._count(on_wire(len(data)), acknowledged(len(data)), up_paid=waited)
            return data

        return told

    def into(self, deserialise: Coder, stream: bool) -> Callable[[bytes], Any]:
        """Return ``deserialise`` with a count of its bytes; a large message of a ``stream`` will
        wait for its turn before it is handed on."""

        def told(data: bytes) -> Any:
            waits = stream and len(data) >= BULK
            self._count(acknowledged(len(data)), on_wire(len(data)), down_paid=waits)
            if deserialise:
                return deserialise(data)
            return data

        return told

    def count_raw(self, sent: int, received: int) -> None:
        """Bytes of streams that are not gRPC's: p2pd's own."""
        up = 0
        if sent:
            up = on_wire(sent, 0)
        down = 0
        if received:
            down = on_wire(received, 0)
        self._count(up, down)

    def _count(self, up: int, down: int, up_paid: bool = False, down_paid: bool = False) -> None:
        now = time.monotonic()
        self.count(up, down, now)
        if not up_paid:
            self._up.spend(up, now)
        if not down_paid:
            self._down.spend(down, now)

    # ----------------------------------------------------------- waiting

    async def may_send(self, peer: Hashable, message: Any) -> None:
        """Return when ``message`` may go to ``peer``."""
        if (nbytes := size_of(message)) >= BULK:
            await self._up.take(peer, on_wire(nbytes))

    async def may_read(self, peer: Hashable, message: Any) -> None:
        """Return when ``message``, which has come from ``peer``, may be handed on."""
        if (nbytes := size_of(message)) >= BULK:
            await self._down.take(peer, on_wire(nbytes))

    async def may_relay(self, nbytes: int) -> None:
        """Return when ``nbytes`` bytes, received for others, may go on to them; they have counted
        then."""
        await self._down.take(_OTHERS, on_wire(nbytes, 0), RELAYED_WEIGHT)
        await self._up.take(_OTHERS, on_wire(nbytes, 0), RELAYED_WEIGHT)
        self._count(on_wire(nbytes, 0), on_wire(nbytes, 0), True, True)


_OTHERS = object()


def size_of(message: Any) -> int:
    """Bytes of a message that was not serialised yet; 0 for none."""
    if isinstance(message, bytes):
        return len(message)
    if not hasattr(message, "ByteSize"):
        return 0
    return message.ByteSize()


class Paced(AsyncIterator[Any]):
    """``messages``, each after ``turn(message)``. Unlike a generator it goes on after it was
    cancelled."""

    def __init__(
        self, messages: AsyncIterable[Any] | Iterable[Any], turn: Callable[[Any], Awaitable[None]]
    ) -> None:
        self._messages: Any = (
            aiter(messages) if isinstance(messages, AsyncIterable) else iter(messages)
        )
        self._turn = turn

    async def __anext__(self) -> Any:
        if isinstance(self._messages, Iterator):
            try:
                message = next(self._messages)
            except StopIteration:
                raise StopAsyncIteration from None
        else:
            message = await anext(self._messages)
        await self._turn(message)
        return message


class PacedStream:
    """A call or a servicer's context with messages that wait: ``read`` hands a message on after
    ``reads(message)``, ``write`` sends one after ``sends(message)``. All else is ``raw``'s."""

    def __init__(
        self,
        raw: Any,
        reads: Callable[[Any], Awaitable[None]],
        sends: Callable[[Any], Awaitable[None]],
    ) -> None:
        self._raw = raw
        self._reads = reads
        self._sends = sends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    async def read(self) -> Any:
        message = await self._raw.read()
        await self._reads(message)
        return message

    async def write(self, message: Any) -> None:
        await self._sends(message)
        await self._raw.write(message)

    def __aiter__(self) -> Paced:
        return Paced(self._raw, self._reads)


class Beside:
    """p2pd's own traffic over the network, beside the streams that it carried for us. Enters: the
    bytes that it has read and written since its start, to and from anywhere. Pure.

    Part of them is no traffic of its own. p2pd reads and writes every byte of a stream, on our side
    of it and on the network's, and the network's is counted where the stream is. It reads a call of
    ours from us before it sends it, and writes a call of others to us after it received it.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._began = (0, 0)
        self._told = (0, 0)

    def since(
        self, pid: int, read: int, written: int, from_us: int, to_us: int, under_way: int = 0
    ) -> tuple[int, int]:
        """Bytes sent and received since the last call; of a new process since its start.
        ``from_us``, ``to_us``: bytes of all processes so far that were read or written beside their
        own traffic. ``under_way``: that many more may be."""
        if pid != self._pid:
            self._pid = pid
            self._began = (from_us, to_us)
            self._told = (0, 0)
        sent = written - (to_us - self._began[1]) - under_way
        received = read - (from_us - self._began[0]) - under_way
        more = max(0, sent - self._told[0]), max(0, received - self._told[1])
        self._told = self._told[0] + more[0], self._told[1] + more[1]
        return more


def read_io(pid: int) -> tuple[int, int] | None:
    """Bytes that a process of ours has read and written so far, sockets included; None where the
    system does not tell, or this process has no descriptor left to ask it."""
    try:
        moved: Any = psutil.Process(pid).io_counters()
        return moved.read_chars, moved.write_chars
    except (psutil.Error, OSError, AttributeError):
        return None
