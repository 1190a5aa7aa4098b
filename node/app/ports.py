"""What changing a stage, choosing one and posting a record need of the peer they are done for: a
daemon or a simulated peer. :mod:`node.app.placing` and :mod:`node.app.posting` need more of it."""

from __future__ import annotations

from typing import Protocol

from node.app.assembly import Services
from node.core.clock import Clock
from node.core.tasks import Tasks
from node.manifest import Manifest
from node.telemetry.events import Journal
from node.training.presence import Presence


class PeerPort(Protocol):
    """The peer: a daemon, or a simulated one."""

    draining: bool
    role: str
    tasks: Tasks
    presence: Presence | None

    @property
    def name(self) -> str: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def journal(self) -> Journal: ...
    @property
    def manifest(self) -> Manifest | None: ...
    @property
    def assembled(self) -> Services | None: ...
    @property
    def ending(self) -> bool: ...
    def stop(self, why: str) -> None: ...
