"""The operator's window, daemon side: gRPC over a unix socket that only this user may open."""

import asyncio
import contextlib
import inspect
import os
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, NoReturn, Protocol

import grpc

from node.control.sockets import CODE_KEY, NEXT_KEY, clear_stale
from node.control.text import present
from node.core.errors import (
    ExitCode,
    LocalFault,
    NetworkFault,
    PeerFault,
    Refused,
    WireError,
)
from node.core.home import socket_target
from node.core.tasks import Tasks
from node.telemetry.events import LEVELS, Event, Journal, Subscription
from protos import ask_pb2, control_pb2, control_pb2_grpc

MAX_PINGS = 1000
MAX_HISTORY = 10_000
MAX_TOKENS = 4096
MOST_PAUSE_S = 366 * 86400.0
"""Seconds from which a pause lasts until a resume."""
MAX_REASON = 100
"""Characters of an operator's reason for a pause."""


class DaemonWindow(Protocol):
    """The daemon. Every method is called in its loop; each may also be written as a coroutine
    function."""

    @property
    def journal(self) -> Journal: ...

    def snapshot(self) -> control_pb2.Snapshot | Awaitable[control_pb2.Snapshot]:
        """Everything one screen needs, already measured: no waiting, no network."""
        ...

    def peers(self) -> ask_pb2.PeersAnswer | Awaitable[ask_pb2.PeersAnswer]:
        """Every peer in sight, this one (path "self") and the lost included."""
        ...

    async def cells(self) -> control_pb2.CellsAnswer:
        """A sample of the run's cells, as their leaders say of them; all of them where they are
        few. Raises UsageFault where a run has one."""
        ...

    async def history(self, after: int, edition: int) -> control_pb2.RunHistory:
        """Epochs above ``after``, or all of them for a reader of another edition; the work of each
        peer in them, and the memory that each stage needs."""
        ...

    async def ping(self, peer: str, count: int, improve: bool = False) -> control_pb2.PingReport:
        """``count`` round trips to a PeerId, its last letters, or a multiaddr; with ``improve``
        after every better way was tried. Failures go into ``error``."""
        ...

    def reach(self) -> control_pb2.ReachReport | Awaitable[control_pb2.ReachReport]:
        """How this peer is reached, and its ways to others."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Finish the work in flight, hand over, withdraw, and let the daemon end. Raises
        TimedOut."""
        ...

    def stop(self) -> None:
        """Ask the daemon to end; returns at once."""
        ...

    async def pause(self, seconds: float | None, reason: str, now: bool) -> str:
        """Pause for ``seconds``, or until a resume if None. Returns a sentence once the memory is
        given back. Raises UsageFault for a daemon that holds nothing of a model."""
        ...

    def resume(self) -> str | Awaitable[str]:
        """Work again, whatever the operator's rules say now; returns a sentence at once."""
        ...

    def generate(
        self, request: control_pb2.GenerateRequest
    ) -> AsyncIterator[control_pb2.Piece]: ...

    def evaluate(
        self, request: control_pb2.EvaluateRequest
    ) -> AsyncIterator[control_pb2.Evaluated]:
        """One message for each choice of missing stages, ``leave_out`` first."""
        ...

    def export(self, request: control_pb2.ExportRequest) -> AsyncIterator[control_pb2.Event]:
        """Yield events of kind "export-progress", then one of kind "exported". The fields of the
        last one hold the directory."""
        ...

    def invite(self) -> control_pb2.InviteReply | Awaitable[control_pb2.InviteReply]: ...

    def switch(self, change: str) -> control_pb2.SwitchReply | Awaitable[control_pb2.SwitchReply]:
        """Pass on a change that the owner signed. Raises Refused for one that it did not,
        UsageFault for one that is not new."""
        ...

    def order(self, order: str) -> control_pb2.OrderReply | Awaitable[control_pb2.OrderReply]:
        """Pass on an order to the run that its owner signed. Raises Refused for one that the owner
        did not sign, and for an old one."""
        ...


class ControlService(control_pb2_grpc.ControlServicer):
    """Answers the command line and the monitor from a :class:`DaemonWindow`."""

    def __init__(self, window: DaemonWindow, path: Path) -> None:
        self._window = window
        self.path = path
        self._server: grpc.aio.Server | None = None
        self._tasks = Tasks("control")
        self._inode = -1

    async def start(self) -> None:
        """Listen. A socket left by a dead daemon is replaced; Refused when a living one answers or
        the path is not ours."""
        clear_stale(self.path)
        server = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 1 << 20)]
        )
        control_pb2_grpc.add_ControlServicer_to_server(self, server)
        try:
            server.add_insecure_port(socket_target(self.path))
            os.chmod(self.path, 0o600)
            self._inode = self.path.stat().st_ino
        except (RuntimeError, OSError) as e:
            raise Refused(
                f"cannot listen on {self.path}: {e}",
                "check that --home is a directory you may write",
            ) from e
        await server.start()
        self._server = server

    async def close(self, grace_s: float = 1.0) -> None:
        """Let running answers end for ``grace_s``, then hang up and remove the socket, if it is
        still ours."""
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None
        await self._tasks.close()
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()

    async def Status(
        self, request: control_pb2.StatusRequest, context: Any
    ) -> control_pb2.Snapshot:
        return await self._answer(context, self._window.snapshot)

    async def Peers(self, request: control_pb2.PeersRequest, context: Any) -> ask_pb2.PeersAnswer:
        answer = await self._answer(context, self._window.peers)
        if request.all:
            return answer
        return ask_pb2.PeersAnswer(
            swarm=answer.swarm,
            peers=present(answer.peers),
            reason=answer.reason,
            next_step=answer.next_step,
        )

    async def Ping(self, request: control_pb2.PingPeer, context: Any) -> control_pb2.PingReport:
        count = min(max(1, request.count), MAX_PINGS)
        return await self._answer(context, self._window.ping, request.peer, count, request.improve)

    async def History(
        self, request: control_pb2.RunHistoryRequest, context: Any
    ) -> control_pb2.RunHistory:
        return await self._answer(context, self._window.history, request.after, request.edition)

    async def Reach(
        self, request: control_pb2.ReachRequest, context: Any
    ) -> control_pb2.ReachReport:
        return await self._answer(context, self._window.reach)

    async def Events(
        self, request: control_pb2.EventsRequest, context: Any
    ) -> AsyncIterator[control_pb2.Event]:
        level = request.level if request.level in LEVELS else "info"
        with self._window.journal.subscribe(
            size=MAX_HISTORY, level=level, last=min(request.last, MAX_HISTORY)
        ) as feed:
            if not request.follow:
                feed.close()  # unread events can still be read
            async for event in feed:
                yield as_event(event)

    async def Drain(
        self, request: control_pb2.DrainRequest, context: Any
    ) -> AsyncIterator[control_pb2.Event]:
        with self._window.journal.subscribe(level="info") as feed:
            work = self._tasks.spawn(self._drain(request.timeout_s or 600.0, feed), "drain")
            async for event in feed:
                yield as_event(event)
        fault = await work
        if fault is not None:
            await refuse(context, fault)

    async def _drain(self, timeout_s: float, feed: Subscription) -> LocalFault | PeerFault | None:
        """Drain goes on when the command that asked for it is interrupted: half a drain would be no
        use to anybody."""
        try:
            await self._window.drain(timeout_s)
        except (LocalFault, PeerFault) as fault:
            return fault
        finally:
            feed.close()
        return None

    async def Stop(self, request: control_pb2.StopRequest, context: Any) -> control_pb2.StopReply:
        await self._answer(context, self._window.stop)
        return control_pb2.StopReply(text="stopping")

    async def Pause(
        self, request: control_pb2.PauseRequest, context: Any
    ) -> control_pb2.PauseReply:
        seconds = None
        if 0 < request.seconds < MOST_PAUSE_S:
            seconds = request.seconds
        reason = request.reason[:MAX_REASON]
        text = await self._answer(context, self._window.pause, seconds, reason, request.now)
        return control_pb2.PauseReply(text=text)

    async def Resume(
        self, request: control_pb2.ResumeRequest, context: Any
    ) -> control_pb2.ResumeReply:
        text = await self._answer(context, self._window.resume)
        return control_pb2.ResumeReply(text=text)

    async def Generate(
        self, request: control_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[control_pb2.Piece]:
        request.max_tokens = min(request.max_tokens or 100, MAX_TOKENS)
        async for piece in self._stream(context, self._window.generate, request):
            yield piece

    async def Evaluate(
        self, request: control_pb2.EvaluateRequest, context: Any
    ) -> AsyncIterator[control_pb2.Evaluated]:
        async for found in self._stream(context, self._window.evaluate, request):
            yield found

    async def Export(
        self, request: control_pb2.ExportRequest, context: Any
    ) -> AsyncIterator[control_pb2.Event]:
        async for event in self._stream(context, self._window.export, request):
            yield event

    async def Cells(
        self, request: control_pb2.CellsRequest, context: Any
    ) -> control_pb2.CellsAnswer:
        return await self._answer(context, self._window.cells)

    async def Invite(
        self, request: control_pb2.InviteRequest, context: Any
    ) -> control_pb2.InviteReply:
        return await self._answer(context, self._window.invite)

    async def Switch(
        self, request: control_pb2.SwitchRequest, context: Any
    ) -> control_pb2.SwitchReply:
        return await self._answer(context, self._window.switch, request.change)

    async def Order(
        self, request: control_pb2.OrderRequest, context: Any
    ) -> control_pb2.OrderReply:
        return await self._answer(context, self._window.order, request.order)

    async def _answer(self, context: Any, ask: Any, *args: Any) -> Any:
        try:
            value = ask(*args)
            if inspect.isawaitable(value):
                return await value
            return value
        except (LocalFault, PeerFault, WireError) as fault:
            await refuse(context, fault, self._window.journal.names.within(str(fault)))

    async def _stream(self, context: Any, ask: Any, *args: Any) -> AsyncIterator[Any]:
        try:
            async with contextlib.aclosing(ask(*args)) as items:  # ended with its caller
                async for item in items:
                    yield item
        except (LocalFault, PeerFault, WireError) as fault:
            await refuse(context, fault, self._window.journal.names.within(str(fault)))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not this call was cancelled, but work that it waited for. Without a status the client
            # would wait until its deadline.
            broken = NetworkFault("the daemon gave up what was asked", "see  tutti status")
            await refuse(context, broken)


async def refuse(context: Any, fault: Exception, text: str = "") -> NoReturn:
    """End the call with a fault the client can rebuild: sentence, next step, exit code. ``text``
    stands for the words of the fault where it is given."""
    code = ExitCode.NETWORK
    next_step = "try again; the swarm routes around a failing peer"
    if isinstance(fault, LocalFault):
        code = fault.code
        next_step = fault.next_step
    metadata = ((CODE_KEY, str(int(code))), (NEXT_KEY, next_step.encode()))
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text or str(fault), metadata)
    raise AssertionError("abort raises")


def as_event(event: Event) -> control_pb2.Event:
    """A journal entry as the message of the wire."""
    return control_pb2.Event(
        at=event.at,
        level=event.level,
        component=event.component,
        kind=event.kind,
        text=event.text,
        fields=event.fields_json(),
    )
