"""What the operator's window needs from the daemon behind it: one port, implemented by the daemon
and by a canned one in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Protocol

from node.telemetry.events import Journal
from protos.ask_pb2 import PeersAnswer
from protos.control_pb2 import (
    CellsAnswer,
    Evaluated,
    EvaluateRequest,
    Event,
    GenerateRequest,
    InviteReply,
    Piece,
    PingReport,
    ReachReport,
    Snapshot,
    SwitchReply,
)


class Window(Protocol):
    """The daemon. Every method is called in its loop; each may also be written as a coroutine
    function."""

    @property
    def journal(self) -> Journal: ...

    def snapshot(self) -> Snapshot | Awaitable[Snapshot]:
        """Everything one screen needs, already measured: no waiting, no network."""
        ...

    def peers(self) -> PeersAnswer | Awaitable[PeersAnswer]:
        """Every peer in sight, this one (path "self") and the lost included."""
        ...

    async def cells(self) -> CellsAnswer:
        """A sample of the run's cells, as their leaders say of them; all of them where they are
        few. Raises UsageFault where a run has one."""
        ...

    async def ping(self, peer: str, count: int, improve: bool = False) -> PingReport:
        """``count`` round trips to a PeerId, its last letters, or a multiaddr; with ``improve``
        after every better way was tried. Failures go into ``error``."""
        ...

    def reach(self) -> ReachReport | Awaitable[ReachReport]:
        """How this peer is reached, and its ways to others."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Finish what is in flight, hand over, withdraw, and let the daemon end. Raises
        TimedOut."""
        ...

    def stop(self) -> None:
        """Ask the daemon to end; returns at once."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Piece]: ...

    def evaluate(self, request: EvaluateRequest) -> AsyncIterator[Evaluated]:
        """One message for each choice of missing stages, that of ``leave_out`` first."""
        ...

    def export(self, directory: str) -> AsyncIterator[Event]:
        """Progress, then one event of kind "exported" whose fields hold the directory."""
        ...

    def invite(self) -> InviteReply | Awaitable[InviteReply]: ...

    def switch(self, change: str) -> SwitchReply | Awaitable[SwitchReply]:
        """Pass on a change that the owner signed. Raises Refused for one that it did not,
        UsageFault for one that is not new."""
        ...
