"""The operator's window, command line side: synchronous, every call with a deadline, faults as
their own errors again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError, Message

from node.control.quick import Unanswered, unary
from node.control.sockets import CODE_KEY, NEXT_KEY, listener
from node.core.errors import ExitCode, LocalFault, NotRunning, TimedOut
from protos import ask_pb2, control_pb2

if TYPE_CHECKING:
    import grpc

    from protos.control_pb2_grpc import ControlStub

T = TypeVar("T")
M = TypeVar("M", bound=Message)
CELLS_S = 30.0
"""For reads of the directory, each of which takes a second or two."""


class ControlClient(contextlib.AbstractContextManager["ControlClient"]):
    """A conversation with the daemon whose socket is ``path``. Raises NotRunning when none listens
    there."""

    def __init__(self, path: Path, timeout_s: float = 5.0, home: Path | None = None) -> None:
        self.path, self.timeout_s = path, timeout_s
        pid = listener(path)
        if pid is None:
            raise NotRunning(
                f"no daemon is running in {home or path.parent}",
                "start one with  tutti start , or name its directory with  --home DIR",
            )
        self.pid = pid
        """Process id of the daemon, 0 when the system does not tell."""
        self._channel: grpc.Channel | None = None

    @cached_property
    def _stub(self) -> ControlStub:
        """Made when it is needed: gRPC takes longer to import than a question to the daemon
        takes."""
        import grpc

        from protos.control_pb2_grpc import ControlStub

        options = [("grpc.max_receive_message_length", 8 << 20), ("grpc.enable_http_proxy", 0)]
        self._channel = grpc.insecure_channel(f"unix:{self.path}", options=options)
        return ControlStub(self._channel)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def status(self) -> control_pb2.Snapshot:
        return self._look("Status", control_pb2.StatusRequest(), control_pb2.Snapshot)

    def peers(self, *, everybody: bool = False) -> ask_pb2.PeersAnswer:
        """Live training peers; with ``everybody`` the lost and the rendezvous too."""
        return self._look("Peers", control_pb2.PeersRequest(all=everybody), ask_pb2.PeersAnswer)

    def cells(self) -> control_pb2.CellsAnswer:
        """What there is of other cells is read in the directory, so it takes a few seconds."""
        return self._ask(self._stub.Cells, control_pb2.CellsRequest(), CELLS_S)

    def ping(self, peer: str, count: int = 3, *, improve: bool = False) -> control_pb2.PingReport:
        patience = self.timeout_s + 10.0 * count + (60.0 if improve else 0.0)
        return self._ask(
            self._stub.Ping, control_pb2.PingPeer(peer=peer, count=count, improve=improve), patience
        )

    def reach(self) -> control_pb2.ReachReport:
        """How the daemon's peer is reached, and its ways to others."""
        return self._look("Reach", control_pb2.ReachRequest(), control_pb2.ReachReport)

    def invite(self) -> control_pb2.InviteReply:
        return self._look("Invite", control_pb2.InviteRequest(), control_pb2.InviteReply)

    def switch(self, change: str) -> int:
        """Hand in a change that the owner signed; its number."""
        return self._ask(self._stub.Switch, control_pb2.SwitchRequest(change=change)).revision

    def stop(self, *, now: bool = False) -> str:
        return self._ask(self._stub.Stop, control_pb2.StopRequest(now=now)).text

    def events(
        self, *, follow: bool = False, last: int = 20, level: str = "info"
    ) -> Iterator[control_pb2.Event]:
        """History, then live events until the daemon ends or the iterator is closed."""
        request = control_pb2.EventsRequest(follow=follow, last=last, level=level)
        return self._read(self._stub.Events, request, None if follow else self.timeout_s)

    def drain(self, timeout_s: float) -> Iterator[control_pb2.Event]:
        return self._read(
            self._stub.Drain, control_pb2.DrainRequest(timeout_s=timeout_s), timeout_s + 30.0
        )

    def generate(
        self, request: control_pb2.GenerateRequest, timeout_s: float = 600.0
    ) -> Iterator[control_pb2.Piece]:
        return self._read(self._stub.Generate, request, timeout_s)

    def evaluate(
        self, request: control_pb2.EvaluateRequest, timeout_s: float = 3600.0
    ) -> Iterator[control_pb2.Evaluated]:
        return self._read(self._stub.Evaluate, request, timeout_s)

    def export(self, directory: str, timeout_s: float = 3600.0) -> Iterator[control_pb2.Event]:
        return self._read(
            self._stub.Export, control_pb2.ExportRequest(directory=directory), timeout_s
        )

    def wait_gone(self, timeout_s: float) -> bool:
        """True as soon as nobody listens on the socket any more, False after ``timeout_s``."""
        end = time.monotonic() + timeout_s
        while listener(self.path) is not None:
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)
        return True

    def _look(self, method: str, request: Message, kind: type[M]) -> M:
        """A question that changes nothing, so that it may be asked again to hear why it was
        refused."""
        if self._channel is None:
            name = f"/{control_pb2.DESCRIPTOR.services_by_name['Control'].full_name}/{method}"
            try:
                return kind.FromString(
                    unary(self.path, name, request.SerializeToString(), self.timeout_s)
                )
            except TimeoutError as e:
                raise self._late() from e
            except (Unanswered, DecodeError):
                pass
        return self._ask(getattr(self._stub, method), request)

    def _ask(self, call: Callable[..., T], request: Any, timeout_s: float | None = None) -> T:
        import grpc

        try:
            return call(request, timeout=timeout_s or self.timeout_s)
        except grpc.RpcError as error:
            raise self._fault(error) from error

    def _read(
        self, call: Callable[..., Any], request: Any, timeout_s: float | None
    ) -> Iterator[Any]:
        import grpc

        stream = call(request, timeout=timeout_s)
        try:
            yield from stream
        except grpc.RpcError as error:
            raise self._fault(error) from error
        finally:
            stream.cancel()

    def _fault(self, error: Any) -> LocalFault:
        import grpc

        status, details = error.code(), error.details() or ""
        extra = {key: value for key, value in error.trailing_metadata() or ()}
        if CODE_KEY in extra:
            code = ExitCode.UNEXPECTED
            with contextlib.suppress(ValueError):
                code = ExitCode(int(extra[CODE_KEY]))
            return LocalFault(
                details, bytes(extra.get(NEXT_KEY, b"")).decode(errors="replace"), code
            )
        if status == grpc.StatusCode.DEADLINE_EXCEEDED:
            return self._late()
        if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return NotRunning(
                "the daemon went away while it was asked",
                "see why with  tutti logs ; start it again with  tutti start",
            )
        return LocalFault(
            f"the daemon failed to answer: {details[:300]}", "see  tutti logs --level error"
        )

    def _late(self) -> TimedOut:
        return TimedOut(
            "the daemon did not answer in time",
            f"it may be busy; see  tutti logs , socket {self.path}",
        )
