"""The operator's window, command line side: synchronous, every call with a deadline, faults as
their own errors again."""

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc

from node.control.sockets import CHANNEL, carried, listener
from node.core.errors import ExitCode, LocalFault, NotRunning, TimedOut
from node.core.home import socket_target
from protos import ask_pb2, control_pb2
from protos.control_pb2_grpc import ControlStub

T = TypeVar("T")
CELLS_S = 30.0
"""Seconds for reads of the directory, each of which takes a second or two."""
PAUSE_S = 900.0
"""Seconds for leaving a plan and writing a checkpoint of a large model."""
GENERATE_S = 600.0
"""Seconds for a text."""
EXPORT_S = 7 * 86400.0
"""Seconds for the export of a large model over a slow line."""


class ControlClient(contextlib.AbstractContextManager["ControlClient"]):
    """A conversation with the daemon that listens on the socket ``path``. Raises NotRunning if none
    listens there, Refused if another user's does."""

    def __init__(self, path: Path, timeout_s: float = 5.0, home: Path | None = None) -> None:
        self.path = path
        self.timeout_s = timeout_s
        pid = listener(path)
        if pid is None:
            raise NotRunning(
                f"no daemon is running in {home or path.parent}",
                "start one with  tutti start , or name its directory with  --home DIR",
            )
        self.pid = pid
        """Process id of the daemon, 0 when the system does not tell."""
        self._process = _process(pid)
        self._channel = grpc.insecure_channel(socket_target(path), options=CHANNEL)
        self._stub = ControlStub(self._channel)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

    def status(self) -> control_pb2.Snapshot:
        return self._ask(self._stub.Status, control_pb2.StatusRequest())

    def peers(self, *, everybody: bool = False) -> ask_pb2.PeersAnswer:
        """Live training peers; with ``everybody`` the lost and the rendezvous too."""
        return self._ask(self._stub.Peers, control_pb2.PeersRequest(all=everybody))

    def cells(self) -> control_pb2.CellsAnswer:
        """A sample of the run's cells. They are read from the directory, which takes a few
        seconds."""
        return self._ask(self._stub.Cells, control_pb2.CellsRequest(), CELLS_S)

    def ping(self, peer: str, count: int = 3, *, improve: bool = False) -> control_pb2.PingReport:
        patience = self.timeout_s + 10.0 * count
        if improve:
            patience += 60.0
        return self._ask(
            self._stub.Ping, control_pb2.PingPeer(peer=peer, count=count, improve=improve), patience
        )

    def reach(self) -> control_pb2.ReachReport:
        """How the daemon's peer is reached, and its ways to others."""
        return self._ask(self._stub.Reach, control_pb2.ReachRequest())

    def invite(self) -> control_pb2.InviteReply:
        return self._ask(self._stub.Invite, control_pb2.InviteRequest())

    def switch(self, change: str) -> int:
        """Hand in a change that the owner signed; its number."""
        return self._ask(self._stub.Switch, control_pb2.SwitchRequest(change=change)).revision

    def order(self, order: str) -> int:
        """Hand in an order to the run that its owner signed; its number."""
        return self._ask(self._stub.Order, control_pb2.OrderRequest(order=order)).number

    def stop(self, *, now: bool = False) -> str:
        return self._ask(self._stub.Stop, control_pb2.StopRequest(now=now)).text

    def pause(self, seconds: float | None, reason: str, *, now: bool) -> str:
        """Pause for ``seconds``, or until a resume if None; returns a sentence once the daemon has
        given its memory back."""
        request = control_pb2.PauseRequest(seconds=seconds or 0.0, reason=reason, now=now)
        return self._ask(self._stub.Pause, request, PAUSE_S).text

    def resume(self) -> str:
        return self._ask(self._stub.Resume, control_pb2.ResumeRequest()).text

    def events(
        self, *, follow: bool = False, last: int = 20, level: str = "info"
    ) -> Iterator[control_pb2.Event]:
        """History, then live events until the daemon ends or the iterator is closed."""
        request = control_pb2.EventsRequest(follow=follow, last=last, level=level)
        timeout_s = None
        if not follow:
            timeout_s = self.timeout_s
        return self._read(self._stub.Events, request, timeout_s)

    def drain(self, timeout_s: float) -> Iterator[control_pb2.Event]:
        return self._read(
            self._stub.Drain, control_pb2.DrainRequest(timeout_s=timeout_s), timeout_s + 30.0
        )

    def generate(
        self, request: control_pb2.GenerateRequest, timeout_s: float = GENERATE_S
    ) -> Iterator[control_pb2.Piece]:
        return self._read(self._stub.Generate, request, timeout_s)

    def evaluate(self, request: control_pb2.EvaluateRequest) -> Iterator[control_pb2.Evaluated]:
        return self._read(self._stub.Evaluate, request, 3600.0)

    def export(self, request: control_pb2.ExportRequest) -> Iterator[control_pb2.Event]:
        """Progress and the result. The daemon ends an export that gets nothing more."""
        return self._read(self._stub.Export, request, EXPORT_S)

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait for the end of the daemon's process; where the system does not tell the process,
        until nobody listens on the socket. Returns False after ``timeout_s``."""
        if self._process >= 0:
            ended = select.poll()
            ended.register(self._process, select.POLLIN)
            return bool(ended.poll(round(timeout_s * 1000)))
        end = time.monotonic() + timeout_s
        while listener(self.path) is not None:
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)
        return True

    def _ask(self, call: Callable[..., T], request: Any, timeout_s: float | None = None) -> T:
        try:
            return call(request, timeout=timeout_s or self.timeout_s)
        except grpc.RpcError as error:
            raise as_fault(error, self.path) from error

    def _read(
        self, call: Callable[..., Any], request: Any, timeout_s: float | None
    ) -> Iterator[Any]:
        stream = call(request, timeout=timeout_s)
        try:
            yield from stream
        except grpc.RpcError as error:
            raise as_fault(error, self.path) from error
        finally:
            stream.cancel()


def as_fault(error: Any, path: Path) -> LocalFault:
    """The fault that an RpcError of the daemon behind the socket ``path`` stands for."""
    status = error.code()
    details = error.details() or ""
    if told := carried(error, ExitCode.UNEXPECTED):
        return LocalFault(details, *told)
    if status == grpc.StatusCode.DEADLINE_EXCEEDED:
        return TimedOut(
            "the daemon did not answer in time",
            f"it may be busy; see  tutti logs , socket {path}",
        )
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return NotRunning(
            "the daemon went away while it was asked",
            "see why with  tutti logs ; start it again with  tutti start",
        )
    return LocalFault(
        f"the daemon failed to answer: {details[:300]}", "see  tutti logs --level error"
    )


def _process(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 where there is none."""
    if pid <= 0 or pid == os.getpid():
        return -1
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # another system, or a process of another namespace
        return -1
