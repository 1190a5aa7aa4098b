"""The caller's side: one line (gRPC channel) to each peer, dialled when first wanted, dropped when
it breaks, replaced by a better one. Enters: peers that are wanted. Leaves: channels; the outcome of
each attempt. Never: a choice of when to try for better (that is :mod:`node.reach.ladder`)."""

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio

from node.core.errors import PeerFault
from node.core.ids import PeerId, named, short
from node.core.newest import Newest
from node.core.patience import Patience
from node.core.tasks import Tasks, is_cancelled
from node.identity.faults import PEERS_KEPT
from node.reach.interfaces import is_own, without_own_bridges
from node.reach.ladder import BypassWay, Climb, ClimbAttempt, Outside, Rung, bypass_of
from node.telemetry.events import Journal
from node.transport.addresses import host_of_target
from node.transport.auth import TOKEN_KEY, LabelledChannel
from node.transport.handshake import Acquaintance
from node.transport.p2p import P2pDaemon
from node.transport.settings import TransportSettings
from node.transport.traffic import Traffic
from node.transport.ways.bypass import Bypass
from node.transport.ways.join import Pay
from node.transport.ways.punch import OPEN_S as PUNCH_S
from node.transport.ways.relays import Relays
from node.transport.ways.tunnel import STREAM, Carry, Tunnel, carry_over

RETIRE_S = 5.0
"""Seconds for which a forgotten channel still takes calls, from callers that have just asked for
it."""
FINISH_S = 3600.0
"""Most seconds for the calls of a forgotten channel to finish: an answer of the ends may take ten
minutes, an exchange as long as the owner's step."""

REDIAL_S = 2.0
"""Seconds for the next dial of a peer that is probably dead, or more if dials of this peer were
measured to take longer."""
LOST_FOR_S = 30.0
"""Seconds after its connection broke for which a peer is probably dead."""

HEAD_START_S = 0.5
"""Seconds by which a better way starts before the next one when both are tried."""

PROBED = 16
"""Connections that are probed all the time, so that a peer that stands still is noticed before it
is called. A further connection is probed only while a call is under way on it: probing a connection
costs its two sides 0.1 ms of processor time a second, so 60 peers that all probe each other would
need a third of a core."""

READY = grpc.ChannelConnectivity.READY
FAILED = grpc.ChannelConnectivity.TRANSIENT_FAILURE
SHUTDOWN = grpc.ChannelConnectivity.SHUTDOWN


@dataclass(eq=False)
class OpenWay:
    """A working channel to a peer. ``via``: the relay it goes through, "" for none; ``since`` Unix
    seconds."""

    met: Acquaintance
    rung: Rung
    channel: LabelledChannel
    tunnel: Tunnel | None
    since: float
    via: PeerId = PeerId("")
    bypass: bool = False
    """True if a socket that libp2p arranged carries the bytes past it."""
    near: bool = False
    """True if it was dialled at an address of this machine."""
    broken: bool = False
    """True if the connection broke and every listener has been told."""

    @property
    def quality(self) -> tuple[Rung, bool]:
        """The larger of two connections to the same peer is the better one."""
        return self.rung, self.bypass


@dataclass
class Tried:
    """Outcome of the last attempt of each kind at one peer: "" for success, else the reason."""

    climb: Climb
    outcome: dict[str, str] = field(default_factory=dict)
    busy: bool = False


class Lines:
    """``greet`` shakes hands with a peer over libp2p, ``greet_through(peer, relay)`` through a
    relay, ``prepare`` makes the libp2p connection that an attempt needs; all raise PeerFault.
    ``traffic`` counts calls, ``carried`` the bytes of tunnels. ``past`` opens sockets past libp2p,
    ``outside()``: facts about this peer that decide between them."""

    def __init__(
        self,
        p2p: P2pDaemon,
        settings: TransportSettings,
        greet: Callable[[PeerId], Awaitable[Acquaintance]],
        greet_through: Callable[[PeerId, PeerId], Awaitable[Acquaintance]],
        relays: Relays,
        journal: Journal,
        tasks: Tasks,
        punch: bool,
        prepare: Mapping[ClimbAttempt, Callable[[PeerId], Awaitable[None]]],
        patience: Patience,
        traffic: Traffic,
        carried: Pay,
        past: Bypass,
        outside: Callable[[], Outside],
    ) -> None:
        self._p2p = p2p
        self._settings = settings
        self._patience = patience
        self._greet = greet
        self._greet_through = greet_through
        self._prepare = prepare
        self._relays = relays
        self._traffic = traffic
        self._carried = carried
        self._bypass = past
        self._outside = outside
        self._journal = journal
        self._tasks = tasks
        self.open: dict[PeerId, OpenWay] = {}
        """All open lines, by peer."""
        self._dialling: dict[PeerId, asyncio.Task[OpenWay | PeerFault]] = {}
        self._limits: dict[PeerId, asyncio.Timeout] = {}
        """The time limits of the dials under way."""
        self._lost: Newest[PeerId, float] = Newest(PEERS_KEPT)
        self._tried = defaultdict[PeerId, Tried](lambda: Tried(Climb(punch)))
        self._numbers = itertools.count()
        self.on_lost: list[Callable[[PeerId], None]] = []

    def tried(self, peer: PeerId) -> dict[str, str]:
        """Outcome of the last attempt at the peer, by way: "" for success, else the reason."""
        known = self._tried.get(peer)
        if not known:
            return {}
        return dict(known.outcome)

    async def get(self, peer: PeerId) -> OpenWay:
        """The line to ``peer``, dialled once however many ask at the same time. Raises
        PeerFault."""
        line = self.open.get(peer)
        if line is not None:
            if line.met.until > time.time():
                return line
            # The peer's admission has run out: it has to show a newer one before we call it again.
            self.forget(peer, line.channel)
        dialling = self._dialling.get(peer)
        if dialling is None:
            dialling = self._dialling[peer] = self._tasks.spawn(
                _caught(self._dial(peer)), f"dial {short(peer)}"
            )
            dialling.add_done_callback(lambda _: self._dialling.pop(peer, None))
        try:
            # Shielded: others may be waiting for the same dialling when this caller is cancelled.
            made = await asyncio.shield(dialling)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise PeerFault(peer, "the dial was given up") from None
        if isinstance(made, PeerFault):
            raise PeerFault(made.peer, made.reason, made.weight) from made
        return made

    def forget(self, peer: PeerId, channel: LabelledChannel | None = None) -> bool:
        """Drop the peer's line, or only the one of ``channel`` if that is still used. The next
        ``get`` dials anew, and not for long if the connection broke."""
        line = self.open.get(peer)
        if line is None or (channel is not None and line.channel is not channel):
            return False
        self._drop(peer, line)
        if line.channel.get_state() is not READY:
            self._broke(line)
        return True

    def _drop(self, peer: PeerId, line: OpenWay) -> None:
        del self.open[peer]
        self._tried[peer].climb.reached(Rung.NONE, time.monotonic())
        self._tasks.spawn(self._retire(line), f"retire {short(peer)}")

    def doubt(self, peer: PeerId) -> None:
        """The leader reports the peer dead: end a dial that is under way, and make the next one
        short."""
        self._lost[peer] = time.monotonic()
        if (dialling := self._dialling.get(peer)) is not None:
            dialling.cancel()

    async def close(self) -> None:
        """End every line, with its calls."""
        lines = list(self.open.values())
        self.open = {}
        for line in lines:
            await _end(line)

    # ----------------------------------------------------------- the first line

    async def _dial(self, peer: PeerId) -> OpenWay:
        now = time.monotonic()
        began = self._patience.running(now)
        lost = now - self._lost.get(peer, -LOST_FOR_S) < LOST_FOR_S
        try:
            redial_s = None
            if lost:
                redial_s = self._redial_s(peer)
            async with asyncio.timeout(redial_s) as limit:
                self._limits[peer] = limit
                line = await self._first(peer)
        except TimeoutError as e:
            waited = time.monotonic() - now
            raise PeerFault(peer, f"no answer in {waited:.1f} s since its connection broke") from e
        finally:
            self._limits.pop(peer, None)
        self._patience.took(("dial", peer), self._patience.running(time.monotonic()) - began)
        self._lost.pop(peer, None)
        self._take(peer, line)
        return line

    def _redial_s(self, peer: PeerId) -> float:
        """Seconds for dialling a peer after its connection broke."""
        return self._patience.within(("dial", peer), REDIAL_S, time.monotonic())

    async def _first(self, peer: PeerId) -> OpenWay:
        """The first of all ways that works: libp2p, then each relay of the peer a moment later."""
        relayed = [(f"relay {short(r)}", self._through(peer, r)) for r in self._relays.of(peer)]
        ways = [("libp2p", self._over_libp2p(peer)), *relayed]
        return await self._race(peer, ways, self._tried[peer].outcome)

    async def _race(
        self,
        peer: PeerId,
        ways: Sequence[tuple[str, Coroutine[Any, Any, OpenWay]]],
        outcome: dict[str, str],
        head_start_s: float = HEAD_START_S,
        kind: str = "dial",
    ) -> OpenWay:
        """Start each way ``head_start_s`` seconds after the one before, or when that has failed;
        the first line wins. The outcome of each way is written to ``outcome``; ``kind`` names the
        tasks. Raises PeerFault."""
        reasons: dict[str, PeerFault] = {}
        waiting = list(ways)
        running = dict[asyncio.Task[OpenWay | PeerFault], str]()
        try:
            while waiting or running:
                if waiting:
                    name, way = waiting.pop(0)
                    running[self._tasks.spawn(_caught(way), f"{kind} {short(peer)} {name}")] = name
                timeout = None
                if waiting:
                    timeout = head_start_s
                done, _ = await asyncio.wait(
                    running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                won: OpenWay | None = None
                for one in done:
                    name = running.pop(one)
                    made = one.result()
                    outcome[name] = ""
                    if isinstance(made, PeerFault):
                        outcome[name] = made.reason
                        reasons[name] = made
                    elif won is None:
                        won = made
                    else:
                        await _end(made)
                if won is not None:
                    return won
        finally:
            for one in running:
                one.cancel()
                one.add_done_callback(self._discard)
            for _, way in waiting:
                way.close()
        if len(reasons) == 1:
            raise next(iter(reasons.values()))
        raise PeerFault(
            peer,
            "; ".join(f"{name}: {e.reason}" for name, e in reasons.items()),
            max((e.weight for e in reasons.values()), default=0.0),
        )

    def _discard(self, late: asyncio.Task[OpenWay | PeerFault]) -> None:
        """Close a connection that was made after another one had won the race."""
        if not late.cancelled() and isinstance(made := late.result(), OpenWay):
            self._tasks.spawn(_end(made), "discard")

    async def _over_libp2p(self, peer: PeerId) -> OpenWay:
        met = await self._greet(peer)
        # It lives. If it is the wire to its address that died, that takes a while to find out, and
        # the tunnel is left.
        tcp = [("tcp", self._direct(met))] if met.targets else []
        ways = [*tcp, ("tunnel", self._tunnelled(met))]
        # A tunnel costs both sides more than a wire, and a process that is late is slow by either.
        head_start_s = HEAD_START_S + self._patience.slack(time.monotonic())
        return await self._race(peer, ways, self._tried[peer].outcome, head_start_s)

    async def _through(self, peer: PeerId, relay: PeerId) -> OpenWay:
        return await self._tunnelled(await self._greet_through(peer, relay), relay)

    def _take(self, peer: PeerId, line: OpenWay) -> None:
        """Make this the peer's line; the one before keeps the calls that it has until they end."""
        old = self.open.get(peer)
        self.open[peer] = line
        self._tried[peer].climb.reached(line.rung, time.monotonic())
        self._tasks.spawn(self._watch(line), f"watch {short(peer)}")
        if old is not None:
            self._tasks.spawn(self._retire(old), f"retire {short(peer)}")
        name = named(peer, line.met.name)
        via = ""
        if line.via:
            via = f" by {short(line.via)}"
        past = ""
        if line.bypass:
            past = ", past libp2p"
        instead = ""
        if old:
            instead = f" instead of {old.rung.word}"
        self._journal.emit(
            "transport",
            "line-up",
            f"{name} is reached: {line.rung.word}{via}{past}{instead}",
            peer=peer,
            path=line.rung.word,
            bypass=line.bypass,
            protocol=line.met.protocol,
        )

    def rest(self, now: float) -> None:
        """Close the lines on which nothing was said for the settings' ``idle_s``."""
        for peer, line in list(self.open.items()):
            if line.channel.idle_s(now) > self._settings.idle_s and self.forget(peer, line.channel):
                name = named(peer, line.met.name)
                self._journal.emit(
                    "transport",
                    "line-idle",
                    f"the idle connection to {name} is closed; the next call dials again",
                    "debug",
                    peer=peer,
                )

    # ----------------------------------------------------------- a better one

    def climb(self, now: float) -> None:
        """Start whatever attempt at a better line is due."""
        for peer, line in self.open.items():
            if (attempt := self._due(peer, line, now)) is not None:
                self._tasks.spawn(self._better(peer, line, attempt), f"climb {short(peer)}")
        if len(self._tried) > 4 * max(64, len(self.open)):
            for peer in [p for p, t in self._tried.items() if p not in self.open and not t.busy]:
                del self._tried[peer]

    def news(self, peer: PeerId) -> None:
        """The peer announces other addresses: worth a try at once."""
        if (known := self._tried.get(peer)) is not None:
            known.climb.news(time.monotonic())

    async def improve(self, peer: PeerId) -> None:
        """Try every way to ``peer`` that is better than the present line, once and at once; used by
        ``tutti ping``. Raises PeerFault if there is no line at all."""
        await self.get(peer)
        if not self._tried[peer].busy:
            self.news(peer)
        while (line := self.open.get(peer)) is not None:
            if (attempt := self._due(peer, line, time.monotonic())) is None:
                break
            await self._better(peer, line, attempt)

    def _due(self, peer: PeerId, line: OpenWay, now: float) -> ClimbAttempt | None:
        """The attempt at a better line that is to be made now; one at a time."""
        known = self._tried[peer]
        known.climb.connected = self._p2p.how(peer)
        known.climb.dialable = bool(line.met.targets)
        known.climb.carried = line.tunnel is not None and not line.bypass
        known.climb.carried &= self._way_past(line) is not None
        if known.busy:
            return None
        attempt = known.climb.due(now)
        known.busy = attempt is not None
        return attempt

    async def _better(self, peer: PeerId, line: OpenWay, attempt: ClimbAttempt) -> None:
        known = self._tried[peer]
        made = None
        why = ""
        try:
            async with asyncio.timeout(4 * self._dial_s(peer)):
                if attempt in self._prepare:
                    await self._prepare[attempt](peer)
                made = await self._attempted(peer, line, attempt)
        except PeerFault as e:
            why = e.reason
        except TimeoutError:
            why = "no answer in time"
        finally:
            known.busy = False
        known.outcome[attempt.value] = why
        if made is None or self.open.get(peer) is not line or made.quality <= line.quality:
            known.climb.failed(attempt, time.monotonic())
            if made is not None:
                await _end(made)
            return
        self._take(peer, made)

    async def _attempted(self, peer: PeerId, line: OpenWay, attempt: ClimbAttempt) -> OpenWay:
        """The connection that an attempt leads to. Raises PeerFault."""
        if attempt is ClimbAttempt.BYPASS:
            return await self._past(line)
        # Its addresses, or it itself, may be others than when it was met.
        dial = attempt is ClimbAttempt.DIAL
        only_relayed = dial and line.via and not self._p2p.how(line.met.peer)
        if only_relayed:
            met = await self._greet_through(peer, line.via)
        else:
            met = await self._greet(peer)
        if dial:
            return await self._direct(met)
        return await self._tunnelled(met)

    # ----------------------------------------------------------- channels

    async def _direct(self, met: Acquaintance) -> OpenWay:
        """TCP to the first of its addresses that answers. Raises PeerFault."""
        patience = self._dial_s(met.peer)

        async def one(target: str) -> OpenWay:
            channel = await self._opened(met, target, patience)
            rung = Rung.DIRECT
            if target in met.mapped:
                rung = Rung.MAPPED
            near = is_own(host_of_target(target))
            return OpenWay(met, rung, channel, None, time.time(), near=near)

        targets = without_own_bridges(met.targets, host_of_target)
        ways = [(target, one(target)) for target in targets]
        try:
            return await self._race(met.peer, ways, {}, head_start_s=0.0, kind="tcp")
        except PeerFault as e:
            raise PeerFault(
                met.peer, f"none of its {len(ways)} addresses answers in {patience:.3g} s"
            ) from e

    async def _tunnelled(self, met: Acquaintance, relay: PeerId | None = None) -> OpenWay:
        timeout = 2 * self._dial_s(met.peer)
        if relay is not None:
            open_stream = partial(self._relays.open_tunnel, relay, met.token, met.peer, timeout)
        else:
            open_stream = partial(self._p2p.open_stream, met.peer, STREAM, timeout)
        carry = partial(carry_over, open_stream, self._carried)
        tunnel, channel = await self._through_socket(met, carry, timeout, relay is not None)
        rung = Rung.RELAYED if relay is not None else self._p2p.how(met.peer) or Rung.TUNNEL
        return OpenWay(met, rung, channel, tunnel, time.time(), relay or PeerId(""))

    def _way_past(self, line: OpenWay) -> BypassWay | None:
        return bypass_of(line.rung, line.met.protocol, self._outside())

    async def _past(self, line: OpenWay) -> OpenWay:
        """A connection on the same rung that goes past libp2p. Raises PeerFault."""
        met = line.met
        timeout = 2 * self._dial_s(met.peer)
        match self._way_past(line):
            case BypassWay.CALL_BACK:
                carry = partial(self._bypass.call_back, met.peer)
            case BypassWay.PUNCH:
                carry = partial(self._bypass.punch, met.peer)
                timeout += PUNCH_S
            case BypassWay.RELAY:
                carry = partial(self._relays.carry, line.via, met.token, met.peer, timeout)
            case None:
                raise PeerFault(met.peer, "no way past libp2p leads to it any more")
        tunnel, channel = await self._through_socket(met, carry, timeout, bool(line.via))
        now = time.time()
        return OpenWay(met, line.rung, channel, tunnel, now, line.via, bypass=True)

    async def _through_socket(
        self, met: Acquaintance, carry: Carry, timeout: float, relayed: bool
    ) -> tuple[Tunnel, LabelledChannel]:
        """A local socket, the end of a tunnel that ``carry`` makes for each connection, and the
        channel that uses it. Raises PeerFault."""
        path = self._p2p.runtime / f"tunnel-{next(self._numbers)}.sock"
        try:
            tunnel = Tunnel(met.peer, path, carry)
        except OSError as e:
            raise PeerFault(met.peer, f"no socket for a tunnel: {e}") from e
        try:
            await tunnel.start()
            return tunnel, await self._opened(met, tunnel.target, timeout, relayed)
        except BaseException as e:  # also cancelled
            await tunnel.close()
            if isinstance(e, OSError):
                raise PeerFault(met.peer, f"no socket for a tunnel: {e}") from e
            if not isinstance(e, PeerFault):
                raise
            why = f"no tunnel to its gRPC server came up in {timeout:.3g} s"
            raise PeerFault(met.peer, tunnel.fault or why) from e

    def _dial_s(self, peer: PeerId) -> float:
        """Seconds for the dial of one address: by the measured dials of this peer, at least the
        operator's setting."""
        return self._patience.within(
            ("dial", peer), self._settings.dial_timeout_s, time.monotonic()
        )

    def _channel(self, met: Acquaintance, target: str, relayed: bool = False) -> LabelledChannel:
        options: list[tuple[str, Any]] = [
            ("grpc.ssl_target_name_override", met.server_name),
            *self._settings.connection_options(
                relayed,
                self._patience.slack(time.monotonic()),
                probe_idle=len(self.open) < PROBED,
            ),
            ("grpc.initial_reconnect_backoff_ms", 500),
            ("grpc.max_reconnect_backoff_ms", 5000),
            ("grpc.use_local_subchannel_pool", 1),
            # Peers are dialled, never a proxy from the environment, and a peer's name says nothing
            # about balancing.
            ("grpc.enable_http_proxy", 0),
            ("grpc.service_config_disable_resolution", 1),
        ]
        # The one root is the one certificate the handshake delivered: whoever shows another is not
        # the peer.
        pinned = grpc.ssl_channel_credentials(root_certificates=met.certificate)
        raw = grpc.aio.secure_channel(target, pinned, options=options)
        peer = met.peer

        async def fresh() -> LabelledChannel:
            self.forget(peer, channel)
            return (await self.get(peer)).channel

        channel = LabelledChannel(
            raw,
            ((TOKEN_KEY, met.token),),
            fresh,
            lambda call: call.add_done_callback(
                lambda done: self._tasks.spawn(self._look(peer, channel, done), "look")
            ),
            self._traffic,
            peer,
        )
        return channel

    async def _opened(
        self, met: Acquaintance, target: str, timeout: float, relayed: bool = False
    ) -> LabelledChannel:
        """A channel that has connected; an address that refuses is not tried twice. Raises
        PeerFault, also after ``timeout`` seconds."""
        channel = self._channel(met, target, relayed)
        try:
            async with asyncio.timeout(timeout):
                while (state := channel.get_state(try_to_connect=True)) is not READY:
                    if state is FAILED:
                        raise PeerFault(met.peer, "no answer")
                    await channel.wait_for_state_change(state)
        except BaseException as e:  # also cancelled
            await channel.close()
            if isinstance(e, TimeoutError):
                raise PeerFault(met.peer, "no answer") from e
            raise
        return channel

    async def _watch(self, line: OpenWay) -> None:
        """Forget the line as soon as its connection breaks, so that the next call dials instead of
        waiting in backoff."""
        while (state := line.channel.get_state()) is READY:
            await line.channel.wait_for_state_change(READY)
        if state is not SHUTDOWN:
            self._broke(line)

    def _broke(self, line: OpenWay) -> None:
        """The connection of this line broke. A call that failed over it may have dropped the line
        already. Nobody is told if the peer has another connection."""
        peer = line.met.peer
        now = time.monotonic()
        if self.open.get(peer) is line:
            self._drop(peer, line)
        if line.broken or peer in self.open:
            return
        line.broken = True
        self._lost[peer] = now
        if (limit := self._limits.get(peer)) is not None and limit.when() is None:
            limit.reschedule(asyncio.get_running_loop().time() + self._redial_s(peer))
        if line.via:
            self._relays.blame(line.via, now)
        self._journal.emit(
            "transport",
            "line-lost",
            f"the connection to {named(peer, line.met.name)} broke",
            "debug",
            peer=peer,
            path=line.rung.word,
        )
        for callback in self.on_lost:
            callback(peer)

    async def _look(self, peer: PeerId, channel: LabelledChannel, call: Any) -> None:
        # A stream cannot be repeated for its caller, but its next one should not meet the same
        # refusal.
        if await call.code() is grpc.StatusCode.UNAUTHENTICATED:
            self.forget(peer, channel)

    async def _retire(self, line: OpenWay) -> None:
        try:
            await asyncio.sleep(RETIRE_S)
            await line.channel.close(FINISH_S)
        finally:
            await _end(line)


async def _caught(way: Coroutine[Any, Any, OpenWay]) -> OpenWay | PeerFault:
    """A fault is an outcome here, not a task that failed."""
    try:
        return await way
    except PeerFault as e:
        return e


async def _end(line: OpenWay) -> None:
    with contextlib.suppress(grpc.aio.UsageError):
        await line.channel.close()
    if line.tunnel is not None:
        await line.tunnel.close()
