"""The caller's side: one line (channel) to each peer, dialled when first wanted, dropped when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from node.core.errors import PeerFault
from node.core.ids import PeerId, short
from node.core.tasks import Tasks
from node.transport.channels import LabelledChannel
from node.transport.doorman import TOKEN_KEY
from node.transport.frames import Streams
from node.transport.handshake import Acquaintance
from node.transport.settings import TransportSettings
from node.transport.tunnel import Tunnel

if TYPE_CHECKING:
    from node.telemetry.events import Journal

RETIRE_S, FINISH_S = 5.0, 120.0
"""A forgotten channel takes calls for RETIRE_S more, for who has just asked for it, then FINISH_S to finish them."""

REDIAL_S, LOST_FOR_S = 2.0, 30.0
"""A peer whose connection broke less than LOST_FOR_S ago is probably dead: it has REDIAL_S to prove the contrary."""

READY, FAILED = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE


@dataclass(eq=False)
class Line:
    """A working channel to a peer. ``path`` is "direct" or "tunnel", ``since`` Unix seconds."""

    met: Acquaintance
    path: str
    channel: LabelledChannel
    tunnel: Tunnel | None
    since: float


class Lines:
    """``greet`` shakes hands with a peer, ``runtime`` is a 0700 directory for the sockets of tunnels."""

    def __init__(
        self,
        streams: Streams,
        settings: TransportSettings,
        greet: Callable[[PeerId], Awaitable[Acquaintance]],
        runtime: Path,
        journal: Journal,
        tasks: Tasks,
    ) -> None:
        self._streams, self._settings, self._greet = streams, settings, greet
        self._runtime, self._journal, self._tasks = runtime, journal, tasks
        self._lines: dict[PeerId, Line] = {}
        self._dialling: dict[PeerId, asyncio.Task[Line | PeerFault]] = {}
        self._lost: dict[PeerId, float] = {}
        self._numbers = itertools.count()
        self.on_lost: list[Callable[[PeerId], None]] = []

    def line(self, peer: PeerId) -> Line | None:
        """The line there is now."""
        return self._lines.get(peer)

    def all(self) -> dict[PeerId, Line]:
        """Every line there is now."""
        return dict(self._lines)

    async def get(self, peer: PeerId) -> Line:
        """The line to ``peer``, dialled once however many ask at the same time. Raises PeerFault."""
        line = self._lines.get(peer)
        if line is not None:
            if line.met.until > time.time():
                return line
            # The peer's admission has run out: it has to show a newer one before we call it again.
            self.forget(peer, line)
        dialling = self._dialling.get(peer)
        if dialling is None:
            dialling = self._dialling[peer] = self._tasks.spawn(self._dial(peer), f"dial {short(peer)}")
            dialling.add_done_callback(lambda _: self._dialling.pop(peer, None))
        try:
            # Shielded: others may be waiting for the same dialling when this caller is cancelled.
            made = await asyncio.shield(dialling)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                raise
            raise PeerFault(peer, "the dial was given up") from None
        if isinstance(made, PeerFault):
            raise PeerFault(made.peer, made.reason, made.weight) from made
        return made

    def forget(self, peer: PeerId, line: Line | None = None) -> bool:
        """Drop the peer's line, or only ``line`` if that is still the one. The next ``get`` dials anew."""
        current = self._lines.get(peer)
        if current is None or (line is not None and current is not line):
            return False
        del self._lines[peer]
        self._tasks.spawn(self._retire(current), f"retire {short(peer)}")
        return True

    def doubt(self, peer: PeerId) -> None:
        """Others say that it is dead: who waits for a dial to it waits no longer, and the next one is a short one."""
        self._lost[peer] = time.monotonic()
        if (dialling := self._dialling.get(peer)) is not None:
            dialling.cancel()

    async def close(self) -> None:
        """End every line, with its calls."""
        lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            await _end(line)

    async def _dial(self, peer: PeerId) -> Line | PeerFault:
        lost = time.monotonic() - self._lost.get(peer, -LOST_FOR_S) < LOST_FOR_S
        try:
            async with asyncio.timeout(REDIAL_S if lost else None):
                met = await self._greet(peer)
            # It lives. If it is the wire to its address that died, that takes a while to find out, and the tunnel is left.
            line = await self._direct(met) or await self._tunnelled(met)
        except PeerFault as e:
            return e
        except TimeoutError:
            return PeerFault(peer, f"no answer in {REDIAL_S:g} s since its connection broke")
        self._lost.pop(peer, None)
        self._lines[peer] = line
        self._tasks.spawn(self._watch(line), f"watch {short(peer)}")
        self._journal.emit(
            "transport", "line-up", f"{met.name or short(peer)} is reached: {line.path}", peer=peer, path=line.path
        )
        return line

    async def _direct(self, met: Acquaintance) -> Line | None:
        for target in met.targets:
            channel = self._channel(met, target)
            if await self._ready(channel, self._settings.dial_timeout_s):
                return Line(met, "direct", channel, None, time.time())
            await channel.close()
        return None

    async def _tunnelled(self, met: Acquaintance) -> Line:
        timeout = 2 * self._settings.dial_timeout_s
        tunnel = Tunnel(self._streams, met.peer, self._runtime / f"tunnel-{next(self._numbers)}.sock", timeout)
        await tunnel.start()
        channel = self._channel(met, tunnel.target)
        if await self._ready(channel, timeout):
            return Line(met, "tunnel", channel, tunnel, time.time())
        await channel.close()
        await tunnel.close()
        tried = f"none of its {len(met.targets)} addresses answers and " if met.targets else ""
        raise PeerFault(met.peer, f"{tried}no tunnel to its gRPC server came up in {timeout:g} s")

    def _channel(self, met: Acquaintance, target: str) -> LabelledChannel:
        settings = self._settings
        options: list[tuple[str, Any]] = [
            ("grpc.ssl_target_name_override", met.server_name),
            *settings.connection_options(),
            ("grpc.initial_reconnect_backoff_ms", 500),
            ("grpc.max_reconnect_backoff_ms", 5000),
            ("grpc.use_local_subchannel_pool", 1),
            # Peers are dialled, never a proxy from the environment, and a peer's name says nothing about balancing.
            ("grpc.enable_http_proxy", 0),
            ("grpc.service_config_disable_resolution", 1),
        ]
        # The one root is the one certificate the handshake delivered: whoever shows another is not the peer.
        pinned = grpc.ssl_channel_credentials(root_certificates=met.certificate)
        raw = grpc.aio.secure_channel(target, pinned, options=options)
        peer = met.peer

        async def fresh() -> LabelledChannel:
            self._drop(peer, channel)
            return (await self.get(peer)).channel

        channel = LabelledChannel(
            raw,
            ((TOKEN_KEY, met.token),),
            fresh,
            lambda call: call.add_done_callback(lambda done: self._tasks.spawn(self._look(peer, channel, done), "look")),
        )
        return channel

    async def _ready(self, channel: LabelledChannel, timeout: float) -> bool:
        """Whether the channel connects in time; an address that refuses is not tried twice."""
        try:
            async with asyncio.timeout(timeout):
                while (state := channel.get_state(try_to_connect=True)) is not READY:
                    if state is FAILED:
                        return False
                    await channel.wait_for_state_change(state)
                return True
        except TimeoutError:
            return False

    async def _watch(self, line: Line) -> None:
        """Forget the line as soon as its connection breaks, so that the next call dials instead of waiting in backoff."""
        peer = line.met.peer
        while line.channel.get_state() is READY:
            await line.channel.wait_for_state_change(READY)
        if self.forget(peer, line):
            self._lost[peer] = time.monotonic()
            self._journal.emit("transport", "line-lost", f"lost {line.met.name or short(peer)}", peer=peer, path=line.path)
            for callback in self.on_lost:
                callback(peer)

    async def _look(self, peer: PeerId, channel: LabelledChannel, call: Any) -> None:
        # A stream cannot be repeated for its caller, but its next one should not meet the same refusal.
        if await call.code() is grpc.StatusCode.UNAUTHENTICATED:
            self._drop(peer, channel)

    def _drop(self, peer: PeerId, channel: LabelledChannel) -> None:
        line = self._lines.get(peer)
        if line is not None and line.channel is channel:
            self.forget(peer, line)

    async def _retire(self, line: Line) -> None:
        try:
            await asyncio.sleep(RETIRE_S)
            await line.channel.close(FINISH_S)
        finally:
            await _end(line)


async def _end(line: Line) -> None:
    with contextlib.suppress(grpc.aio.UsageError):
        await line.channel.close()
    if line.tunnel is not None:
        await line.tunnel.close()
