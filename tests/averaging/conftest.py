"""A cell of peers in one process, and the answer it should give."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from node.averaging.exchange.member import Exchanges
from node.averaging.exchange.request import FreshPart, RoundOutcome, RoundRequest, WeightCaps
from node.averaging.exchange.service import CellRound
from node.averaging.settings import AveragingSettings
from node.core.ids import PeerId, RoundId
from testbed.fakes.memory_net import MemoryNet, MemoryTransport

torch.set_num_threads(1)

SHAPES = {
    "a.weight": (6, 4),
    "b.weight": (33, 7),
    "c.weight": (5,),
    "d.weight": (3, 2, 2),
    "e.weight": (1,),
}


def gradients_of(peer: str) -> dict[str, torch.Tensor]:
    seed = int.from_bytes(hashlib.sha256(peer.encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 10 for name, shape in SHAPES.items()}


class Cell:
    """Peers "p0".."pN" with fixed gradients; peer i has 10 * (i + 1) tokens; owners go round."""

    def __init__(self, count: int, settings: AveragingSettings, chunk: int = 64) -> None:
        self.net = MemoryNet()
        self.settings = settings
        self.chunk = chunk
        self.peers = [PeerId(f"p{i}") for i in range(count)]
        self.transports: dict[PeerId, MemoryTransport] = {}
        self.rounds: dict[PeerId, CellRound] = {}
        self.steps: dict[PeerId, list[tuple[str, ...]]] = {p: [] for p in self.peers}
        self.errors: list[BaseException] = []

    async def start(self) -> None:
        for peer in self.peers:
            transport = self.transports[peer] = self.net.transport(peer)
            self.rounds[peer] = CellRound(
                transport,
                self.settings,
                chunk=self.chunk,
                on_error=lambda _, e: self.errors.append(e),
            )
            await transport.start()

    async def close(self) -> None:
        for service in self.rounds.values():
            await service.close()
        await self.net.close()

    def tokens(self, peer: PeerId) -> int:
        return 10 * (int(peer[1:]) + 1)

    def owners(self, peers: list[PeerId] | None = None) -> dict[str, PeerId]:
        among = peers or self.peers
        return {name: among[i % len(among)] for i, name in enumerate(sorted(SHAPES))}

    def request(self, peer: PeerId, **changes: object) -> RoundRequest:
        """Attempt 0 of epoch 7 with everybody in it; ``changes`` are fields of RoundRequest, or of
        its caps."""
        caps: dict[str, Any] = {
            f.name: changes.pop(f.name) for f in fields(WeightCaps) if f.name in changes
        }
        request = RoundRequest(
            round=RoundId(7, 1, 0),
            plan_hash="plan",
            members=tuple(self.peers),
            listeners=frozenset(),
            owners=self.owners(),
            ownership_hash="owners",
            shapes=SHAPES,
            gradients=gradients_of(peer),
            tokens=self.tokens(peer),
            deadline_s=self.settings.round_timeout_s,
        )
        return replace(request, caps=WeightCaps(**caps), **changes)  # type: ignore[arg-type]

    def repair(
        self, peer: PeerId, alive: list[PeerId], owners: Mapping[str, PeerId], **changes: object
    ) -> RoundRequest:
        return self.request(
            peer,
            round=RoundId(7, 1, 1),
            members=tuple(alive),
            owners=owners,
            ownership_hash="repaired",
            **changes,
        )

    def exchanges(self, peer: PeerId, owner: PeerId, request: RoundRequest) -> Exchanges:
        """The exchanges of `peer` with one owner: `request` uploaded as fp32, in chunks of 64."""
        return Exchanges(self.transports[peer], owner, replace(request, up="fp32"), True, 64)

    def step_of(self, peer: PeerId) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        def step(means: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            self.steps[peer].append(tuple(means))
            return {name: stepped(name, mean) for name, mean in means.items()}

        return step

    async def run(self, request: RoundRequest, peer: PeerId) -> RoundOutcome:
        return await self.rounds[peer].run_round(request, self.step_of(peer))

    def made(self, peer: PeerId, outcome: RoundOutcome) -> dict[str, FreshPart]:
        """Provenance of each part of its outcome."""
        held = self.rounds[peer]._epoch(7).held
        return {name: held[name] for name in outcome.fresh}

    async def run_all(self, requests: Mapping[PeerId, RoundRequest]) -> dict[PeerId, RoundOutcome]:
        outcomes = await asyncio.gather(
            *(self.run(request, peer) for peer, request in requests.items())
        )
        return dict(zip(requests, outcomes, strict=True))

    def expected(
        self, contributors: list[PeerId], names: Iterable[str] = tuple(SHAPES)
    ) -> dict[str, torch.Tensor]:
        """Parameters that every member must hold: the gradients' mean weighted by tokens, summed in
        PeerId order, then stepped."""
        total = sum(self.tokens(p) for p in contributors)
        fresh = {}
        for name in names:
            summed = torch.zeros(SHAPES[name])
            for peer in sorted(contributors):
                summed = summed + gradients_of(peer)[name]
            fresh[name] = stepped(name, summed / total)
        return fresh


def stepped(name: str, mean: torch.Tensor) -> torch.Tensor:
    return torch.full_like(mean, len(name)) - 0.1 * mean


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Comparison of tensors bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


async def with_peers(making: Awaitable[Cell]) -> tuple[Any, ...]:
    """The cell and each of its peers."""
    cell = await making
    return cell, *cell.peers


@pytest.fixture
async def cell_of() -> AsyncIterator[Callable]:
    """``await cell_of(3)``: a started cell, closed after the test."""
    cells: list[Cell] = []

    async def make(count: int, settings: AveragingSettings | None = None, chunk: int = 64) -> Cell:
        cell = Cell(count, settings or AveragingSettings(round_timeout_s=10.0), chunk)
        cells.append(cell)
        await cell.start()
        return cell

    yield make
    for cell in cells:
        await cell.close()


@pytest.fixture
def bits() -> Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]:
    return same


@pytest.fixture
def grads() -> Callable[[str], dict[str, torch.Tensor]]:
    return gradients_of
