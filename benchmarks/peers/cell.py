"""One member of a cell as a process of its own: its round over TLS gRPC, and the same step by
collectives of torch.

    python -m benchmarks.peers.cell RANK WORLD PORT LAYERS WIDTH [LISTEN ANNOUNCE]

LISTEN and ANNOUNCE are ports of its gRPC server, and of the line in front of it
(benchmarks/peers/line.py). It speaks lines of JSON: it prints its own identity, reads those of the
others, then answers each order with the seconds it took. Times come from the machine's monotonic
clock, so times of several processes may be compared.
"""

import asyncio
import json
import math
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from node.averaging.exchange.request import RoundRequest
from node.averaging.exchange.service import CellRound
from node.averaging.settings import AveragingSettings
from node.core.clock import SystemClock
from node.core.ids import PeerId, RoundId
from node.identity.keys import Identity
from node.optim.owner import Owner
from node.optim.ownership import assign
from node.optim.parts import parts_of
from node.optim.settings import OptimSettings
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from node.transport.handshake import Facts
from node.transport.service import Transport
from node.transport.settings import TransportSettings
from testbed.reference.swarm import step_all

TOKENS = 100
LR = 0.02
MOMENTUM = 0.95


def matrices(layers: int, width: int) -> dict[str, tuple[int, int]]:
    """The matrices of `layers` layers in the proportions of Qwen3-0.6B, which has width 1024."""
    d = width
    each = {
        "q": (2 * d, d),
        "k": (d, d),
        "v": (d, d),
        "o": (d, 2 * d),
        "gate": (3 * d, d),
        "up": (3 * d, d),
        "down": (d, 3 * d),
    }
    return {
        f"model.layers.{i:02}.{name}_proj.weight": shape
        for i in range(layers)
        for name, shape in each.items()
    }


class Cut(CellRound):
    """A cell's round that may cut its groups anew between two rounds."""

    def cut(self, group_bytes: int) -> None:
        self._settings = replace(self._settings, group_bytes=group_bytes)


class Worker:
    """``orders``: what the parent may ask for, by name."""

    def __init__(
        self,
        rank: int,
        world: int,
        port: int,
        layers: int,
        width: int,
        listen: int = 0,
        announce: int = 0,
    ) -> None:
        self.rank = rank
        self.world = world
        self.port = port
        self.network = TransportSettings(
            host="127.0.0.1",
            grpc_port=listen,
            announce=(f"127.0.0.1:{announce}",) if announce else (),
        )
        self.shapes = matrices(layers, width)
        dice = torch.Generator().manual_seed(7)
        self.parameters = {n: torch.randn(s, generator=dice) * 0.02 for n, s in self.shapes.items()}
        dice.manual_seed(100 + rank)
        self.gradients = {
            n: torch.randn(s, generator=dice) * TOKENS for n, s in self.shapes.items()
        }
        self.settings = OptimSettings(lr=LR, momentum=MOMENTUM, warmup=0)
        self.thread = ThreadPoolExecutor(1)
        self.epoch = 0
        self.made: dict[str, tuple[list[Tensor], list[Tensor], Any]] = {}

    async def live(self) -> None:
        """Answer orders until there are no more."""
        loop = asyncio.get_running_loop()
        transport = self.transport = Transport(
            Identity.ephemeral(),
            self.network,
            Journal(clock=SystemClock()),
            Metrics(),
            lambda: Facts("a" * 64, "bench", "0", b""),
            lambda peer, hello: math.inf,
        )
        self.cell = Cut(transport, AveragingSettings(round_timeout_s=300.0), executor=self.thread)
        await transport.start()
        try:
            while not transport.p2p.addresses():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            _say({"peer": transport.peer_id, "addresses": transport.p2p.addresses()})
            everybody = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
            for peer, addresses in everybody.items():
                if peer != transport.peer_id:
                    transport.learn(PeerId(peer), addresses)
            self.peers = tuple(sorted(map(PeerId, everybody)))
            parts = parts_of(self.shapes, self.settings)
            self.owners = assign(parts, [(p, 1.0) for p in self.peers])
            self.owner = Owner(self.settings, 0)
            await loop.run_in_executor(None, self._join)
            _say({})
            while line := await loop.run_in_executor(None, sys.stdin.readline):
                order = json.loads(line)
                await asyncio.sleep(max(0.0, order.pop("at") - time.monotonic()))
                _say(await self._timed(order.pop("do"), order))
        finally:
            await self.cell.close()
            await transport.close()

    def _join(self) -> None:
        address = f"tcp://127.0.0.1:{self.port}"
        dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=self.world)

    async def _timed(self, do: str, order: dict[str, Any]) -> dict[str, Any]:
        before = self._moved()
        cpu = _cpu()
        began = time.monotonic()
        more = await getattr(self, f"do_{do}")(**order)
        ended = time.monotonic()
        moved = [b - a for a, b in zip(before, self._moved(), strict=True)]
        return {
            "began": began,
            "ended": ended,
            "cpu": _cpu() - cpu,
            "sent": moved[0],
            "received": moved[1],
            **(more or {}),
        }

    def _moved(self) -> list[int]:
        links = self.transport.peers().values()
        return [sum(link.sent for link in links), sum(link.received for link in links)]

    async def do_round(self, group_bytes: int, identity: bool = False) -> dict[str, Any]:
        """Ours: gradients to owners, their steps, fresh parameters back. ``identity``: no
        optimizer, the same bytes."""
        self.cell.cut(group_bytes)
        self.epoch += 1
        request = RoundRequest(
            round=RoundId(self.epoch, 1, 0),
            plan_hash="plan",
            members=self.peers,
            listeners=frozenset(),
            owners=self.owners,
            ownership_hash="owners",
            shapes=self.shapes,
            gradients=self.gradients,
            tokens=TOKENS,
            deadline_s=300.0,
        )
        outcome = await self.cell.run_round(request, self._identity if identity else self._step)
        self.owner.commit(self.epoch)
        self.cell.forget(self.epoch)
        if outcome.missing:
            raise RuntimeError(f"the round failed: {outcome.failed}")
        return {}

    def _step(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.owner.step_parts(self.parameters, means, self.epoch)

    @staticmethod
    def _identity(means: dict[str, Tensor]) -> dict[str, Tensor]:
        return means

    async def do_step(self) -> None:
        """Step this member's own parts alone, without an exchange."""
        self.epoch += 1
        mine = {n: self.gradients[n] for n, o in self.owners.items() if o == self.transport.peer_id}
        await self._on_thread(lambda: self._step(mine))
        self.owner.commit(self.epoch)

    async def do_gloo(self, optimizer: str) -> None:
        """All-reduce, then the optimizer of that name in every process."""
        await self._on_thread(lambda: self._gloo(optimizer))

    def _gloo(self, name: str) -> None:
        if name not in self.made:
            # Same shapes next to each other: gloo gathers only equal tensors, and round robin
            # gathers neighbours.
            order = sorted(self.shapes, key=lambda n: (self.shapes[n], n))
            tensors = [torch.nn.Parameter(self.parameters[n].clone()) for n in order]
            sums = [torch.empty_like(tensor) for tensor in tensors]
            for tensor, total in zip(tensors, sums, strict=True):
                tensor.grad = total
            self.made[name] = sums, [self.gradients[n] for n in order], OPTIMIZERS[name](tensors)
        sums, gradients, optimizer = self.made[name]
        for total, gradient in zip(sums, gradients, strict=True):
            total.copy_(gradient)
        for work in [dist.all_reduce(total, async_op=True) for total in sums]:
            if work is not None:
                work.wait()
        for total in sums:
            total.div_(TOKENS * self.world)
        optimizer.step()

    async def _on_thread(self, work: Callable[[], object]) -> None:
        await asyncio.get_running_loop().run_in_executor(self.thread, work)


def _replicated(tensors: list[torch.nn.Parameter]) -> Any:
    return torch.optim.Muon(tensors, lr=LR, momentum=MOMENTUM, weight_decay=0.0)


def _round_robin(tensors: list[torch.nn.Parameter]) -> Any:
    from pytorch_optimizer import DistributedMuon

    return DistributedMuon([{"params": tensors, "use_muon": True}], lr=LR, momentum=MOMENTUM)


class _Ours:
    """Our kernel in every process: what replication costs with the same arithmetic as in the
    cell."""

    def __init__(self, tensors: list[torch.nn.Parameter]) -> None:
        self._tensors = {f"model.layers.0.{i:03}.weight": t for i, t in enumerate(tensors)}
        self._owner = Owner(OptimSettings(lr=LR, momentum=MOMENTUM, warmup=0), 0)
        self._epoch = 0

    def step(self) -> None:
        fresh = step_all(
            self._owner,
            self._tensors,
            {n: t.grad for n, t in self._tensors.items() if t.grad is not None},
            self._epoch,
        )
        self._epoch += 1
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(fresh[name])


OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], Any]] = {
    "replicated": _replicated,
    "replicated-ours": _Ours,
    "round-robin": _round_robin,
}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(Worker(*map(int, sys.argv[1:])).live())
