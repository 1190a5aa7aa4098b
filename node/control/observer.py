"""Ask running nodes from outside the swarm: py-libp2p dials their p2pd, one question, one answer.

For the command line only, from a machine without torch and without a p2pd of its own. Never in a
process that has hivemind: both register the same protobuf names. All addresses are tried at the
same time, over TCP and, where that has not helped after a moment, over QUIC. py-libp2p 0.8.1 and
the go-libp2p of hivemind's p2pd understand each other over QUIC: tests/control/test_observer.py
asks a real one, over IPv4 and IPv6.
"""

import contextlib
import logging
import math
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

if "hivemind" in sys.modules:
    raise ImportError(
        "py-libp2p and hivemind register the same protobuf names; ask from a process of its own"
    )

import libp2p.transport.quic.transport as quic_transport
import trio
from aioquic.quic.connection import QuicConnection
from libp2p import new_host
from libp2p.abc import IHost
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError, MultiError
from libp2p.io.abc import ReadWriteCloser
from libp2p.network.config import ConnectionConfig
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.transport.quic.exceptions import QUICError
from multiaddr import Multiaddr

from node.control.diagnose import (
    Diagnosis,
    Machine,
    NobodyAnswers,
    failed,
    incompatible,
    no_way,
    not_tried,
    refused,
    silent,
    this_machine,
    unanswered,
    unresolved,
    verdict,
)
from node.control.retries import ATTEMPT_S, busy_s
from node.control.words import clean
from node.core.errors import ExitCode, UsageFault, WireError
from node.core.ids import PeerId
from node.core.version import PROTOCOLS, Protocols
from node.identity.invites import HostPort, endpoint_of, peer_of_address
from node.wire import bounds
from protos.ask_pb2 import Answer, Ask

PROTOCOL = TProtocol("/tutti/ask/1")
MAX_MESSAGE = 1 << 20
"""Bytes of a question or an answer."""
PATIENCE_S = ATTEMPT_S
"""Seconds for all addresses together."""
QUIC_AFTER_S = 1.5
"""Seconds until QUIC is tried, if no TCP address has answered and nothing at the peer's TCP
addresses speaks libp2p."""
GRACE_S = 2.0
"""Seconds that a survey gives the other addresses after the first one has answered."""
NAME_S = 5.0
"""Seconds of the longest wait for the addresses behind a name."""
GREETING_S = 1.0
"""Seconds for another kind of service to greet."""
CLOSING_S = 1.0
"""Seconds of the longest wait for an orderly end of the connection."""
HOSTS_OF_A_NAME = 4
_HELLO = b"\x13/multistream/1.0.0\n"
"""First bytes of both sides of a libp2p connection over TCP."""
_BROKEN = (
    BaseLibp2pError,
    QUICError,
    WireError,
    OSError,
    EOFError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)
"""Exceptions of a conversation that breaks off."""


@dataclass(frozen=True)
class AddressAnswers:
    """Finding for one address, and its answers, one for each question, if it works."""

    finding: Diagnosis
    answers: tuple[Answer, ...] = ()

    @property
    def good(self) -> bool:
        """True if the first answer is no refusal, and comes from a peer that speaks a protocol
        version that is spoken here."""
        return (
            bool(self.answers)
            and self.answers[0].WhichOneof("answer") != "refusal"
            and bool(PROTOCOLS.common(protocols_of(self.answers[0])))
        )


def ask_first(
    multiaddrs: Sequence[str], question: Ask, timeout: float = PATIENCE_S, seed: bytes | None = None
) -> Answer:
    """Ask the node at ``multiaddrs`` (each ending in /p2p/ and its PeerId), all at the same time:
    the first good answer wins, a refusal included, the others are given up.

    The connection is encrypted and proves the PeerId. ``timeout`` seconds in all. ``seed``: the 32
    bytes of the Ed25519 key to ask as; None: a new one. Raises UsageFault for text that is no
    multiaddr of a peer, NetworkFault with the fault of every address. Not for use inside an event
    loop: it runs its own.
    """
    heard = survey(multiaddrs, [question], timeout, seed, first=True)
    answered = [h for h in heard if h.answers]
    if not answered:
        raise NobodyAnswers([h.finding for h in heard])
    # A refusal that says when to ask again is worth more than another refusal.
    return max(answered, key=lambda h: (h.good, busy_s(h.answers[0]) > 0)).answers[0]


def survey(
    multiaddrs: Sequence[str],
    questions: Sequence[Ask],
    timeout: float = PATIENCE_S,
    seed: bytes | None = None,
    *,
    first: bool = False,
) -> list[AddressAnswers]:
    """Try all addresses at the same time, with all questions on one connection. Return the finding
    and the answers of each address.

    ``first``: give the other addresses up when one has given a good answer to the first question,
    and a peer's other addresses when it has refused; findings of addresses that were given up mean
    nothing. QUIC waits a moment for TCP then. Otherwise QUIC is tried at once, and the others get a
    few seconds more. Never more than ``timeout`` seconds. Raises UsageFault as :func:`ask_first`
    does.
    """
    if not multiaddrs:
        raise UsageFault(
            "no address to ask", "give a multiaddr such as /ip4/203.0.113.7/tcp/4001/p2p/12D3Koo…"
        )
    for text in multiaddrs:
        peer_of_address(text)
    for name in ("libp2p", "quic"):  # a refused dial is our answer to give, not a log line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return trio.run(_Survey(multiaddrs, questions, timeout, seed, first).run)


class _Flat(QuicConnection):
    """Reduces a sender's address to (host, port). For IPv6 the system gives four values, while
    py-libp2p dials aioquic with two; aioquic compared them and took every answer for a
    stranger's."""

    def receive_datagram(self, data: bytes, addr: Any, now: float) -> None:
        super().receive_datagram(data, addr[:2], now)


quic_transport.__dict__["NativeQUICConnection"] = _Flat


@dataclass
class _Trial:
    """One IP address of one address being tried: how far it has come, and the time of the newest
    step."""

    address: str
    place: HostPort
    host: str
    at: float
    layer: str = "connect"
    greeted: bool = False
    """Something that speaks libp2p has accepted a connection."""
    answers: list[Answer] = field(default_factory=list)


class _Survey:
    """All addresses at the same time. ``first``: only until one has given a good answer."""

    def __init__(
        self,
        addresses: Sequence[str],
        questions: Sequence[Ask],
        timeout: float,
        seed: bytes | None,
        first: bool,
    ) -> None:
        self._raw = [question.SerializeToString() for question in questions]
        self._timeout = timeout
        self._seed = seed
        self._first = first
        self._here: Machine = this_machine()
        self._found: dict[str, list[AddressAnswers]] = {address: [] for address in addresses}
        self._tcp = {
            a for a in addresses if (place := endpoint_of(a)) is not None and not place.quic
        }
        self._tcp_failed = trio.Event()
        self._greeted: set[PeerId] = set()
        """Peers with a TCP address where something speaks libp2p: QUIC would only be slower."""

    async def run(self) -> list[AddressAnswers]:
        deadline = trio.current_time() + self._timeout
        # Made before any task runs: the first answer shortens the others' time.
        self._scopes = {address: trio.move_on_at(deadline) for address in self._found}
        async with trio.open_nursery() as nursery:
            for address in self._found:
                nursery.start_soon(self._try, address)
        return [_best(found) for found in self._found.values()]

    async def _try(self, address: str) -> None:
        place = endpoint_of(address)
        begin = trio.current_time()
        found = self._found[address]
        if place is None:
            found.append(AddressAnswers(not_tried(address)))
            return
        with self._scopes[address]:
            if place.quic and self._first and self._tcp:
                with trio.move_on_after(QUIC_AFTER_S):
                    await self._tcp_failed.wait()
                if peer_of_address(address) in self._greeted:
                    await self._tcp_failed.wait()
            hosts = await self._hosts(address, place)
            async with trio.open_nursery() as nursery:
                for host in hosts:
                    nursery.start_soon(
                        self._dial, _Trial(address, place, host, trio.current_time())
                    )
        if not found and place.quic and peer_of_address(address) in self._greeted:
            found.append(AddressAnswers(not_tried(address, "the peer listens at its TCP address")))
        if not found:  # the time was over before anything was dialled
            seconds = trio.current_time() - begin
            if place.named:
                late = unresolved(address, place.host, f"was not resolved within {seconds:.2g} s")
            else:
                late = silent(address, seconds)
            found.append(AddressAnswers(late))
        self._tcp.discard(address)
        if not self._tcp:
            self._tcp_failed.set()

    async def _hosts(self, address: str, place: HostPort) -> list[str]:
        """The IP addresses to dial; with none, why is among the findings."""
        if not place.named:
            return [place.host]
        family = {4: socket.AF_INET, 6: socket.AF_INET6}.get(place.version, socket.AF_UNSPEC)
        why = f"was not resolved within {NAME_S:g} s"
        with trio.move_on_after(NAME_S):
            try:
                # The system's resolver, which knows /etc/hosts and whatever else is set up here.
                known = await trio.socket.getaddrinfo(
                    place.host, place.port, family, socket.SOCK_STREAM
                )
                return list(dict.fromkeys(str(one[4][0]) for one in known))[:HOSTS_OF_A_NAME]
            except socket.gaierror as e:
                gone = e.errno in (
                    socket.EAI_NONAME,
                    getattr(socket, "EAI_NODATA", socket.EAI_NONAME),
                )
                why = "was not resolved: no name server answers"
                if gone:
                    why = "does not exist"
            except UnicodeError:
                why = "cannot be a name"
        self._found[address].append(AddressAnswers(unresolved(address, place.host, why)))
        return []

    async def _dial(self, trial: _Trial) -> None:
        """Try one IP address: its finding is added to the others, also when the time is over."""
        address = trial.address
        begin = trial.at
        finding = no_way(address, trial.host, self._here)
        try:
            if finding is None and trial.place.quic:
                finding = await self._over_quic(trial)
            elif finding is None:
                greeting = await _connect(trial)
                trial.greeted = greeting.startswith(_HELLO)
                if trial.greeted:
                    self._greeted.add(peer_of_address(address))
                finding = other_service(address, greeting) or await self._converse(trial)
        except OSError as e:
            finding = refused(address, e)
        finally:
            answers = tuple(trial.answers)
            if len(answers) == len(self._raw):
                heard = AddressAnswers(_answered(address, answers, trial.at - begin), answers)
                self._shorten(address, heard)
            else:
                heard = AddressAnswers(
                    finding or silent(address, trio.current_time() - begin, trial.layer)
                )
            self._found[address].append(heard)

    def _shorten(self, address: str, heard: AddressAnswers) -> None:
        """One address has answered: how long the others are still waited for."""
        now = trio.current_time()
        peer = peer_of_address(address)
        for other, scope in self._scopes.items():
            if not self._first:
                scope.deadline = min(scope.deadline, now + GRACE_S)
            elif heard.good or peer_of_address(other) == peer:
                scope.deadline = now

    async def _over_quic(self, trial: _Trial) -> Diagnosis | None:
        finding = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_refused_udp, trial.host, trial.place.port)
                finding = await self._converse(trial)
                nursery.cancel_scope.cancel()
        except* OSError as group:
            finding = refused(trial.address, cast("OSError", group.exceptions[0]))
        return finding

    async def _converse(self, trial: _Trial) -> Diagnosis | None:
        """One connection, one stream for each question. None when all are answered, or time was
        over."""
        place = trial.place
        host = trial.host
        peer = ID.from_string(peer_of_address(trial.address))
        literal = HostPort("ip6" if ":" in host else "ip4", host, place.port, place.quic)
        finding = None
        try:
            made = _host(self._timeout, self._seed, quic=place.quic)
            async with made.run([]):
                try:
                    await made.connect(PeerInfo(peer, [Multiaddr(str(literal))]))
                    trial.layer = "answer"
                    for question in self._raw:
                        trial.answers.append(await _exchange(made, peer, question))
                    trial.at = trio.current_time()
                finally:
                    # Shielded: a time-out that also stopped the closing would leave the socket
                    # open.
                    with trio.move_on_after(CLOSING_S) as scope:
                        scope.shield = True
                        await made.close()
        except* _BROKEN as group:
            finding = _broke(trial, _first(group))
        return finding


def _best(found: Sequence[AddressAnswers]) -> AddressAnswers:
    """Choose among the IP addresses behind one name: the one that answered, or came nearest."""
    chosen = verdict([heard.finding for heard in found])
    return next((h for h in found if h.answers or h.finding is chosen), found[0])


def protocols_of(answer: Answer) -> Protocols:
    """The protocol versions of the peer that answers. Raises WireError."""
    return Protocols.said(answer.oldest_protocol, answer.newest_protocol)


def _answered(address: str, answers: Sequence[Answer], seconds: float) -> Diagnosis:
    said = answers[0].WhichOneof("answer")
    who = ""
    clock = None
    for answer in answers:
        if answer.WhichOneof("answer") == "ping":
            who = f" by {clean(answer.ping.name, 40)}, version {clean(answer.ping.version, 20)}"
            clock = None
            if answer.ping.time:
                clock = time.time() - answer.ping.time
    theirs = protocols_of(answers[0])
    if not PROTOCOLS.common(theirs):
        return incompatible(address, theirs, answers[0].version, clock)
    if said == "refusal":
        cause = f"refuses to answer: {clean(answers[0].refusal.reason)}"
    else:
        cause = f"answered in {seconds:.2f} s{who}"
    return Diagnosis(address, "answer", True, cause, clock_s=clock)


def _broke(trial: _Trial, why: str) -> Diagnosis:
    """A conversation that ended early: while the peer was to prove its identity, or later."""
    address = trial.address
    layer = "proof"
    if trial.layer == "answer":
        cause = f"connected, but the answer did not come: {clean(why)}"
        return unanswered(address, trial.layer, cause)
    if "mismatch" in why.lower() or "does not correspond" in why:
        return failed(
            address, layer, ExitCode.NETWORK, "somebody else answers there, with another PeerId"
        )
    if "not yet valid" in why or "has expired" in why:  # of a certificate, which only QUIC has
        return failed(
            address,
            layer,
            ExitCode.CLOCK_WRONG,
            "its certificate is not valid by the clock of this machine",
        )
    cause = f"it hangs up before it has proven who it is ({clean(why)})"
    if trial.greeted:
        return unanswered(address, layer, cause)
    return failed(address, layer, ExitCode.NETWORK, cause)


async def _connect(trial: _Trial) -> bytes:
    """Make a TCP connection, and return the first bytes that come back; b"" when none do in a
    moment. py-libp2p makes its own connection, but reports neither how making it failed nor which
    service speaks there, only that a message is wrong.

    Raises OSError as the system gives it.
    """
    family = socket.AF_INET6 if ":" in trial.host else socket.AF_INET
    with trio.socket.socket(family, socket.SOCK_STREAM) as probe:
        await probe.connect((trial.host, trial.place.port))
        trial.layer = "proof"
        with trio.move_on_after(GREETING_S), contextlib.suppress(OSError):
            await probe.send(_HELLO)
            return await probe.recv(64)
    return b""


def other_service(address: str, greeting: bytes) -> Diagnosis | None:
    """The finding for an address where another kind of service speaks; None for a peer, and for a
    silent one."""
    if not greeting or greeting.startswith(_HELLO):
        return None
    known = {
        b"SSH-": "an SSH server",
        b"HTTP/": "a web server",
        b"220": "a mail or FTP server",
        # An alert, which TLS answers to bytes of other protocols.
        b"\x15\x03": "a TLS server (the gRPC port of a peer is one)",
    }
    who = next(
        (words for start, words in known.items() if greeting.startswith(start)), "another service"
    )
    return failed(
        address,
        "proof",
        ExitCode.OTHER_SERVICE,
        f"{who} answers there, not the libp2p port of a peer",
    )


async def _refused_udp(host: str, port: int) -> None:
    """Raises OSError when the system says that nothing can be sent or nobody listens; never
    returns.

    Only a connected socket is told that. The byte that asks is no QUIC, which servers drop.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with trio.socket.socket(family, socket.SOCK_DGRAM) as probe:
        await probe.connect((host, port))
        await probe.send(b"\0")
        while True:
            await probe.recv(1)


def _host(timeout: float, seed: bytes | None = None, *, quic: bool = False) -> IHost:
    """A libp2p host that only dials: nothing listens, nothing is announced or discovered, no
    metrics are served."""
    key_pair = None
    if seed is not None:
        key_pair = create_new_key_pair(seed)
    return new_host(
        key_pair=key_pair,
        muxer_preference="YAMUX",
        enable_mDNS=False,
        enable_upnp=False,
        enable_autotls=False,
        enable_metrics=False,
        bootstrap=None,
        enable_quic=quic,
        negotiate_timeout=max(1, math.ceil(timeout)),
        connection_config=ConnectionConfig(
            dial_timeout=timeout,
            outbound_upgrade_timeout=timeout,
            # Else it keeps dialling the peers it has heard of until it has the mean of the two
            # watermarks of connections, and races our own dial with a second connection that
            # outlives the first.
            min_connections=0,
            low_watermark=0,
            high_watermark=1,
        ),
        disable_identify_address_discovery=True,
    )


async def _exchange(host: IHost, peer: ID, question: bytes) -> Answer:
    stream = await host.new_stream(peer, [PROTOCOL])
    await stream.write(struct.pack(">I", len(question)) + question)
    (size,) = struct.unpack(">I", await _exactly(stream, 4))
    if size > MAX_MESSAGE:
        raise WireError(f"an answer of {size} bytes, more than {MAX_MESSAGE}")
    raw = await _exactly(stream, size)
    # The other side waits for this: closing first, it would reset what we have not read yet.
    with trio.move_on_after(CLOSING_S), contextlib.suppress(BaseLibp2pError, QUICError):
        await stream.close()
    answer = bounds.parse(Answer, raw, "an Answer")
    protocols_of(answer)
    return answer


async def _exactly(stream: ReadWriteCloser, count: int) -> bytes:
    """``count`` bytes; raises WireError when the other side ends the stream before."""
    buffer = bytearray()
    while len(buffer) < count:
        piece = await stream.read(count - len(buffer))
        if not piece:
            raise WireError(f"the stream ended after {len(buffer)} of {count} bytes")
        buffer += piece
    return bytes(buffer)


def _first(error: BaseException) -> str:
    """One line about the innermost cause: libp2p wraps "connection refused" in four layers that do
    not say so."""
    said = type(error).__name__
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, BaseExceptionGroup):
            inner = inner.exceptions[0]
        elif isinstance(inner, MultiError) and inner.errors:
            inner = inner.errors[-1]
        else:
            said = str(inner).strip() or said
            inner = inner.__cause__ if isinstance(inner, BaseLibp2pError) else None
    return said.splitlines()[0][:300]
