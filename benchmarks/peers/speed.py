"""One peer that averages 16 Mi numbers with others, as a process of its own: ours, hivemind's
averager, or gloo. `wire` only sends the same number of bytes.

    python -m benchmarks.peers.speed {ours,tunnel,wire,gloo,hivemind} RANK WORLD PORT NUMBERS

Speaks lines of JSON as benchmarks/peers/cell.py does: it prints its own address, reads those of the
others, then answers each order (a number format and an instant) with the times of its begin and
end. Its result is compared with the true mean.
"""

import asyncio
import json
import math
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import torch
import uvloop

from node.core.memory import keep_freed

PART = 1 << 20
"""Numbers of one of our parts: 4 MiB, a matrix of a small model."""
TOLERANCE = {"fp32": 1e-6, "fp16": 1e-3, "int8": 0.05}
"""Largest relative distance from the true mean that still counts as averaged."""


def numbers_of(rank: int, count: int) -> torch.Tensor:
    """A peer's contribution."""
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


class Peer(Protocol):
    """``hello`` and ``meet`` before the first order; both may block."""

    def hello(self) -> Any: ...

    def meet(self, others: list[Any]) -> None: ...

    def average(self, codec: str) -> dict[str, float]: ...

    def result(self, codec: str) -> torch.Tensor: ...

    def close(self) -> None: ...


class Gloo:
    """One all-reduce of everything. Its sum is divided after the clock has stopped."""

    def __init__(self, rank: int, world: int, port: int, count: int) -> None:
        self.rank = rank
        self.world = world
        self.port = port
        self.given = numbers_of(rank, count)
        self.sum = torch.empty(0)

    def hello(self) -> None:
        pass

    def meet(self, others: list[Any]) -> None:
        import torch.distributed as dist

        address = f"tcp://127.0.0.1:{self.port}"
        dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=self.world)
        self.dist, self.sum = dist, self.given.clone()

    def ready(self, codec: str) -> None:
        self.sum.copy_(self.given)

    def average(self, codec: str) -> dict[str, float]:
        self.dist.all_reduce(self.sum)
        return {}

    def result(self, codec: str) -> torch.Tensor:
        return self.sum / self.world

    def close(self) -> None:
        pass


class Hivemind:
    """``DecentralizedAverager``, one for each format. The number of peers is told it, so its
    matchmaking waits for nobody."""

    def __init__(self, rank: int, world: int, port: int, count: int) -> None:
        self.rank = rank
        self.world = world
        self.count = count
        self.dht: Any = None
        self.averagers: dict[str, tuple[Any, list[torch.Tensor]]] = {}

    def hello(self) -> list[str]:
        import hivemind

        if self.rank == 0:
            self.dht = hivemind.DHT(start=True)
            return [str(a) for a in self.dht.get_visible_maddrs()]
        return []

    def meet(self, others: list[Any]) -> None:
        import hivemind
        from hivemind.averaging import DecentralizedAverager
        from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization

        # As it stands it does not run with NumPy 2.4: int() of an array of one number.
        Uniform8BitQuantization.extract = _extract
        if self.dht is None:
            self.dht = hivemind.DHT(initial_peers=others[0], start=True)
        formats = {
            "fp32": NoCompression(),
            "fp16": Float16Compression(),
            "int8": Uniform8BitQuantization(),
        }
        for codec, compression in formats.items():
            averager = DecentralizedAverager(
                [torch.zeros(self.count)],
                self.dht,
                start=True,
                prefix=f"speed-{codec}",
                target_group_size=self.world,
                min_group_size=self.world,
                min_matchmaking_time=1.0,
                request_timeout=0.5,
                compression=compression,
                bandwidth=1e9,
            )
            self.averagers[codec] = averager, []

    def ready(self, codec: str) -> None:
        with self.averagers[codec][0].get_tensors() as tensors:
            tensors[0].copy_(numbers_of(self.rank, self.count))

    def average(self, codec: str) -> dict[str, float]:
        began = time.monotonic()
        step = self.averagers[codec][0].step(wait=False, timeout=60.0)
        met = None
        while not step.done():
            if met is None and step.began_allreduce:
                met = time.monotonic()
            time.sleep(0.002)
        if not step.result():
            raise RuntimeError("hivemind did not average")
        return {"met": (met or time.monotonic()) - began}

    def result(self, codec: str) -> torch.Tensor:
        with self.averagers[codec][0].get_tensors() as tensors:
            return tensors[0].clone()

    def close(self) -> None:
        for averager, _ in self.averagers.values():
            averager.shutdown()
        self.dht.shutdown()


def _extract(self: Any, serialized_tensor: Any) -> torch.Tensor:
    import numpy as np

    data = serialized_tensor.buffer
    size = int(np.frombuffer(data, count=1, dtype=np.int64)[0])
    codebook = torch.as_tensor(np.frombuffer(data, offset=8, count=size, dtype=np.float32).copy())
    places = np.frombuffer(data, offset=8 + 4 * size, dtype=np.uint8)
    return codebook[
        torch.as_tensor(places, dtype=torch.int64).reshape(tuple(serialized_tensor.size))
    ]


class Ours:
    """The cell's round as the daemon runs it; the mean itself is what an owner gives back, in the
    format it came in. ``tunnel``: libp2p carries all bytes, as it does between peers with no
    way past it."""

    def __init__(self, rank: int, world: int, port: int, count: int, tunnel: bool = False) -> None:
        keep_freed()  # as a daemon does
        self.rank = rank
        self.tunnel = tunnel
        self.epoch = 0
        self.shapes = {
            f"part.{i:03}": (min(PART, count - start),)
            for i, start in enumerate(range(0, count, PART))
        }
        parts = numbers_of(rank, count).split(PART)
        self.given = dict(zip(self.shapes, parts, strict=True))
        self.fresh: dict[str, torch.Tensor] = {}
        self.loop = uvloop.new_event_loop()  # as a daemon
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def hello(self) -> dict[str, Any]:
        return self._do(self._start())

    async def _start(self) -> dict[str, Any]:
        from node.core.clock import SystemClock
        from node.identity.keys import Identity
        from node.reach.ladder import Outside
        from node.telemetry.events import Journal
        from node.telemetry.metrics import Metrics
        from node.transport.handshake import Facts
        from node.transport.service import Transport
        from node.transport.settings import TransportSettings

        self.transport = Transport(
            Identity.ephemeral(),
            TransportSettings(host="127.0.0.1", force_tunnel=self.tunnel),
            Journal(clock=SystemClock()),
            Metrics(),
            lambda: Facts("a" * 64, "bench", "0", b""),
            lambda peer, hello: math.inf,
        )
        if self.tunnel:
            # Nothing listens for the peers that would call back, past libp2p.
            self.transport.lines._outside = lambda: Outside(listens=False)
        self._serve()
        await self.transport.start()
        while not self.transport.p2p.addresses():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return {"peer": self.transport.peer_id, "addresses": self.transport.p2p.addresses()}

    def _serve(self) -> None:
        from node.averaging.exchange.service import CellRound
        from node.averaging.settings import AveragingSettings

        self.cell = CellRound(
            self.transport, AveragingSettings(round_timeout_s=60.0, quarantine=0.0)
        )

    def meet(self, others: list[Any]) -> None:
        from node.core.ids import PeerId

        for other in others:
            if other["peer"] != self.transport.peer_id:
                self.transport.learn(PeerId(other["peer"]), other["addresses"])
        self.peers = sorted(PeerId(o["peer"]) for o in others)
        self._do(self._greet())

    async def _greet(self) -> None:
        """Dial everybody before the clock runs. On a busy machine a first dial may fail, and p2pd
        backs off from the next."""
        from node.core.errors import PeerFault

        for peer in self.peers:
            for _ in range(10 if peer != self.transport.peer_id else 0):
                try:
                    await self.transport.ping(peer)
                    break
                except PeerFault:
                    await asyncio.sleep(3.0)

    def ready(self, codec: str) -> None:
        self.fresh = {}

    def average(self, codec: str) -> dict[str, float]:
        return self._do(self._average(codec))

    async def _average(self, codec: str) -> dict[str, float]:
        from node.averaging.exchange.request import RoundRequest
        from node.core.ids import RoundId
        from node.partition.matrices import Unit
        from node.partition.plan import assign_units

        began, self.epoch = time.monotonic(), self.epoch + 1
        units = [Unit(name, 1, n, n, 4 * n) for name, (n,) in self.shapes.items()]
        owners = assign_units(units, [(p, 1.0) for p in self.peers])
        met = time.monotonic() - began
        request = RoundRequest(
            round=RoundId(self.epoch, 1, 0),
            plan_hash="plan",
            members=tuple(self.peers),
            listeners=frozenset(),
            owners=owners,
            ownership_hash="owners",
            shapes=self.shapes,
            gradients=self.given,
            tokens=1,
            deadline_s=60.0,
            up=codec,
            down=codec,
        )
        outcome = await self.cell.run_round(request, None)
        self.cell.forget(self.epoch)
        if outcome.missing or len(outcome.contributors) != len(self.peers):
            raise RuntimeError(f"the round failed: {outcome.failed}")
        ways = self.transport.lines.open.values()
        if self.tunnel and any(w.bypass or w.tunnel is None for w in ways):
            raise RuntimeError("a connection went past libp2p")
        self.fresh = outcome.fresh
        return {"met": met}

    def result(self, codec: str) -> torch.Tensor:
        return torch.cat([self.fresh[name] for name in sorted(self.fresh)])

    def close(self) -> None:
        self._do(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def _close(self) -> None:
        await self.cell.close()
        await self.transport.close()


class Wire(Ours):
    """The same bytes both ways over the same connections, in as large messages with nothing in
    them: what gRPC and TLS take alone."""

    METHOD = "/tutti.bench.Wire/Exchange"

    def _serve(self) -> None:
        import grpc

        from node.transport.limits import LARGEST, Limit

        service, _, name = self.METHOD[1:].partition("/")
        handlers = {name: grpc.stream_stream_rpc_method_handler(self._exchange)}
        self.transport.serve_also(self.METHOD, Limit(LARGEST, 64, 1000, 1000))
        self.transport.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, handlers),)
        )

    async def _exchange(self, requests: Any, context: Any) -> None:
        first = await anext(aiter(requests))
        message = bytes(len(first))
        count = int.from_bytes(first[:4])

        async def read() -> None:
            async for _ in requests:
                pass

        reading = asyncio.ensure_future(read())
        for _ in range(count):
            await context.write(message)
        await reading

    async def _average(self, codec: str) -> dict[str, float]:
        from node.averaging.exchange.owner import CHUNK
        from node.wire.coding.formats import nbytes_of

        total = sum(nbytes_of(n, codec) for (n,) in self.shapes.values()) // len(self.peers)
        count = -(-total // CHUNK) or 1
        message = count.to_bytes(4) + bytes(total // count - 4)

        async def messages() -> AsyncIterator[bytes]:
            for _ in range(count):
                yield message

        async def one(peer: Any) -> None:
            channel = await self.transport.channel(peer)
            async for _ in channel.stream_stream(self.METHOD)(messages()):
                pass

        await asyncio.gather(*(one(peer) for peer in self.peers if peer != self.transport.peer_id))
        return {}

    def result(self, codec: str) -> torch.Tensor:
        return torch.zeros(sum(n for (n,) in self.shapes.values()))

    async def _close(self) -> None:
        await self.transport.close()


KINDS: dict[str, Callable[..., Any]] = {
    "ours": Ours,
    "wire": Wire,
    "tunnel": lambda *words: Ours(*words, tunnel=True),
    "gloo": Gloo,
    "hivemind": Hivemind,
}


def main() -> None:
    """Take orders until stdin ends."""
    torch.set_num_threads(1)
    kind, (rank, world, port, count) = sys.argv[1], map(int, sys.argv[2:6])
    peer = KINDS[kind](rank, world, port, count)
    _say(peer.hello())
    peer.meet(json.loads(sys.stdin.readline()))
    _say({"pid": os.getpid()})
    exact = torch.stack([numbers_of(r, count) for r in range(world)]).mean(0)
    try:
        while line := sys.stdin.readline():
            order = json.loads(line)
            codec = order["codec"]
            peer.ready(codec)
            _say({})
            at = json.loads(sys.stdin.readline())["at"]
            time.sleep(max(0.0, at - time.monotonic()))
            began = time.monotonic()
            more = peer.average(codec)
            told = {"began": began, "ended": time.monotonic(), **more}
            _say(told)
            sys.stdin.readline()
            result = peer.result(codec)
            off = float((result - exact).norm() / exact.norm())
            _say(
                {
                    "off": off,
                    "digest": int(result.view(torch.int32).sum(dtype=torch.int64)),
                    "fine": off <= TOLERANCE[codec],
                }
            )
            del result
    finally:
        peer.close()


def _say(line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
