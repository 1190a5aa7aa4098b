"""What the rest of the daemon needs from the directory."""

from __future__ import annotations

from typing import Protocol

from node.core.ids import PeerId
from node.dht.record import PeerBody, PeerEntry, Posting
from node.dht.topics import PEERS


class DirectoryPort(Protocol):
    """Post the own record, read everybody's. No call raises for a network that is down: the board
    is what was heard."""

    async def publish(self, body: PeerBody, times: float = 1.0, topic: str = PEERS) -> bool:
        """Post ``body`` and keep it posted until :meth:`withdraw`, ``times`` as rarely as the
        settings say; it lives so many times as long. ``topic``: ``peers`` or that of a cell; what
        was published under another one is withdrawn. False: no storage took it this time."""
        ...

    @property
    def neighbours(self) -> int:
        """Peers this node can ask; another number means that somebody has come or gone."""
        ...

    async def withdraw(self) -> None:
        """Take the own record down; others stop seeing it with their next reading."""
        ...

    async def read(self, topic: str = PEERS) -> dict[PeerId, PeerEntry]:
        """The verified, unexpired record of everybody who published under ``topic`` in PeerId
        order, the own one included."""
        ...

    async def post(self, topic: str, body: bytes, life_s: float) -> bool:
        """Post ``body``, 1 to 2,048 bytes, under a topic (:mod:`node.dht.topics`) for ``life_s``
        seconds; it is not posted again. False: no storage took it this time. Raises WireError for
        what others would refuse."""
        ...

    async def look(self, topic: str) -> dict[PeerId, Posting]:
        """Everybody's verified, unexpired posting under a topic in PeerId order, the own one
        included. Raises WireError for what is no topic."""
        ...

    async def close(self) -> None:
        """Stop refreshing. Does not withdraw: a record left behind expires by itself."""
        ...
