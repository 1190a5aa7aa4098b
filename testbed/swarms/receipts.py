"""The books of receipts of a simulated swarm, which outlive the processes of its peers, and peers
with older software, which know no receipts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from node.coordinator.credit.audit import RunAudit, audit
from node.coordinator.credit.record import EpochRecord
from node.coordinator.leading import alike
from node.core.errors import Refused
from node.core.ids import PeerId
from node.sim.process import SimPeer, SimSigner
from node.sim.swarm import MachineFactory

CHECKS = SimSigner(PeerId("auditor"))


@dataclass
class MemoryBook:
    """Records in memory."""

    records: list[bytes] = field(default_factory=list)

    def append(self, record: bytes) -> None:
        """Add a record."""
        self.records.append(record)


@dataclass
class SwarmBooks:
    """A book for each peer. ``is_old``: True for the name of a peer with older software;
    ``counted``: tokens that the member of each peer's newest process counts in its history."""

    is_old: Callable[[PeerId], bool] = lambda peer: False
    books: dict[PeerId, MemoryBook] = field(default_factory=dict)
    counted: dict[PeerId, Callable[[], int]] = field(default_factory=dict)

    def factory(self) -> MachineFactory:
        """Factory whose peers write into these books."""
        return MachineFactory(services=self._opens)

    def _opens(self, peer: SimPeer) -> None:
        training = peer.training
        self.counted[peer.name] = lambda: training.member.tokens
        if not self.is_old(peer.name):
            training.credit.book = self.books.setdefault(peer.name, MemoryBook())
            return
        credit: Any = training.credit
        credit.commits = lambda *_, **__: None
        credit.collect = lambda *_, **__: None
        training.leading.addressed = alike

    def records(self) -> list[EpochRecord]:
        """The records of all books."""
        return [EpochRecord.parse(r) for book in self.books.values() for r in book.records]

    def committed(self) -> int:
        """Tokens that the swarm has committed, as its members count them."""
        return max(counted() for counted in self.counted.values())

    def audit(self) -> RunAudit:
        """The audit of all books together."""
        (run,) = audit([self.records()], is_signed).values()
        return run


def is_signed(peer: PeerId, data: bytes, signature: bytes, domain: str) -> bool:
    """Return True if a simulated peer has signed the data."""
    try:
        CHECKS.verify(peer, data, signature, domain)
    except Refused:
        return False
    return True
