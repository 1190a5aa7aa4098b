"""The handshake of two peers, over a libp2p stream where Noise has proven both PeerIds. Each gives
the other its gRPC addresses, the certificate to pin, and a token that stands for the other's
identity in later calls. Each also names the protocol versions it speaks; both continue with the
newest common one, or the handshake ends with a Farewell that gives the reason.
"""

import asyncio
import hashlib
import hmac
import itertools
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from node.core.errors import (
    ExitCode,
    LocalFault,
    PeerFault,
    ProtocolMismatch,
    Refused,
    WireError,
)
from node.core.ids import PeerId
from node.core.version import PROTOCOLS, Protocols
from node.identity.faults import PEERS_KEPT
from node.reach.secure import Secured, check_certificate
from node.transport.addresses import grpc_target
from node.transport.frames import (
    FrameReader,
    Streams,
    Writer,
    converse,
    parsed,
    read_frame,
    see_off,
    write_frame,
)
from node.transport.port import printable
from protos.handshake_pb2 import Farewell, HandshakeFrame, Hello

STREAM = "/tutti/handshake/1"
FRAME_BYTES = 32 * 1024
TOKEN_BYTES = 32
SEE_OFF_S = 3.0
ADDRESSES = 8
"""Addresses of one peer that are tried, all at the same time."""


class NoCommonProtocol(ProtocolMismatch):
    """The peer speaks ``theirs``, of which nothing is spoken here; the text is for its operator."""

    def __init__(self, ours: Protocols, theirs: Protocols, version: str) -> None:
        super().__init__(
            f"you speak {theirs}, we speak {ours}; {theirs.advice(ours)}", theirs.advice(ours)
        )
        self.theirs = theirs
        self.version = printable(version)[:32]


class IncompatiblePeer(PeerFault):
    """There is no protocol version that this peer and we both speak."""

    def __init__(self, peer: PeerId, ours: Protocols, theirs: Protocols) -> None:
        super().__init__(peer, f"it speaks {theirs}, this tutti {ours}; {ours.advice(theirs)}")


@dataclass(frozen=True, slots=True)
class Facts:
    """The content of this peer's Hello. ``run_id`` is empty for a rendezvous, which has no bulk
    plane."""

    run_id: str
    name: str
    version: str
    admission: bytes = b""
    protocols: Protocols = PROTOCOLS

    def versions(self) -> dict[str, Any]:
        """The fields of an answer or a farewell that say which versions are spoken here."""
        return {
            "oldest_protocol": self.protocols.oldest,
            "newest_protocol": self.protocols.newest,
            "version": self.version,
        }


@dataclass(frozen=True, slots=True)
class Acquaintance:
    """A checked Hello. ``targets``: host:port for gRPC to dial; ``mapped``: the targets that the
    peer's router maps; ``token``: our token for calls to this peer; ``until``: Unix time when its
    admission ends; ``protocol``: the version that both sides go on with."""

    peer: PeerId
    targets: tuple[str, ...]
    certificate: bytes
    server_name: str
    token: str
    name: str
    version: str
    protocol: int = 1
    until: float = math.inf
    mapped: frozenset[str] = frozenset()


Admit = Callable[[PeerId, Hello], float]
"""Raises Refused for a peer that is not wanted; else the Unix time until which it may come,
infinity for no end."""


class Tokens:
    """One token for each peer. When there are more than 4096, the stranger that met us longest ago
    loses its token; ``established`` peers keep theirs.

    A token is valid only after :meth:`accept`, because it is handed over before the other side's
    identity is proven, and no longer than its peer is admitted. ``wall`` is the clock, Unix
    seconds.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        established: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self._wall = wall
        self._established = established
        self._of: OrderedDict[PeerId, bytes] = OrderedDict()
        self._owner: dict[bytes, PeerId] = {}
        self._accepted: dict[PeerId, float] = {}

    def issue(self, peer: PeerId) -> bytes:
        """The token ``peer`` shall show us; the same when asked again, so that its older channels
        stay valid."""
        token = self._of.pop(peer, None) or secrets.token_bytes(TOKEN_BYTES)
        self._of[peer] = token
        self._owner[_key(token.hex())] = peer
        if len(self._of) > PEERS_KEPT:
            self._make_room()
        return token

    def _make_room(self) -> None:
        """Forget the stranger that met us longest ago, or without strangers any peer."""
        for peer in list(itertools.islice(self._of, len(self._of) - 1)):
            if not self._established(peer):
                break
            self._of.move_to_end(peer)
        else:
            peer = next(iter(self._of))
        self.revoke(peer)

    def owner(self, shown: str) -> PeerId | None:
        """Peer that this token (hex) was given to; None for an unknown token. Hashes are compared,
        so timing tells nothing."""
        peer = self._owner.get(_key(shown))
        if peer is not None and self.knows(peer):
            return peer
        return None

    def accept(self, peer: PeerId, until: float = math.inf) -> None:
        """The peer's Hello was good: from now on its token speaks for it, until this Unix time."""
        self.issue(peer)
        self._accepted[peer] = until

    def knows(self, peer: PeerId) -> bool:
        """Return True if the peer was accepted and its admission has not ended."""
        return self.left(peer) > 0

    def left(self, peer: PeerId) -> float:
        """Seconds until the peer's admission ends: infinity for never, 0 for a stranger."""
        until = self._accepted.get(peer, -math.inf)
        if until < math.inf:
            return max(0.0, until - self._wall())
        return until

    def proves(self, peer: PeerId, message: bytes, shown: bytes) -> bool:
        """Return True if ``shown`` is HMAC-SHA256 of ``message`` under the token of ``peer``, and
        the peer is accepted."""
        token = self._of.get(peer)
        return (
            token is not None
            and self.knows(peer)
            and hmac.compare_digest(shown, hmac.digest(token, message, "sha256"))
        )

    def revoke(self, peer: PeerId) -> None:
        """Forget the peer's token; its next call is refused until it has met us again."""
        token = self._of.pop(peer, None)
        self._accepted.pop(peer, None)
        if token is not None:
            del self._owner[_key(token.hex())]


class Handshake:
    """Both sides of the meeting. ``admit`` is asked at both sides."""

    def __init__(
        self,
        streams: Streams,
        tokens: Tokens,
        facts: Callable[[], Facts],
        addresses: Callable[[], tuple[list[str], list[str]]],
        certificate: bytes,
        admit: Admit,
        mismatched: Callable[[PeerId, Protocols, str], None] = lambda peer, theirs, version: None,
    ) -> None:
        """``addresses()``: host:port that others should dial for gRPC, and the ones among them that
        a router maps. ``mismatched(peer, theirs, version)`` is told of a peer without a common
        protocol version, and of its software."""
        self._mismatched = mismatched
        self._streams = streams
        self._tokens = tokens
        self._facts = facts
        self._addresses = addresses
        self._certificate = certificate
        self._admit = admit

    async def greet(self, peer: PeerId, timeout: float) -> Acquaintance:
        """Meet ``peer``. Raises PeerFault: unreachable, silent, talking nonsense (weight 1),
        saying farewell, or IncompatiblePeer."""
        if not self._facts().run_id:
            raise PeerFault(peer, "we serve no run, so there is nothing to call it for")
        greeting = HandshakeFrame(hello=self._hello(peer)).SerializeToString()
        return self._understand(
            peer, await converse(self._streams, peer, STREAM, greeting, FRAME_BYTES, timeout)
        )

    async def greet_over(self, peer: PeerId, stream: Secured, timeout: float) -> Acquaintance:
        """The same over a private stream that has proven ``peer``; it is closed afterwards."""
        try:
            async with asyncio.timeout(timeout):
                await write_frame(
                    stream, HandshakeFrame(hello=self._hello(peer)).SerializeToString()
                )
                return self._understand(peer, await read_frame(stream, FRAME_BYTES))
        except (TimeoutError, OSError, WireError) as e:
            raise PeerFault(
                peer, f"the handshake through a relay broke off: {e or 'no answer in time'}"
            ) from e
        finally:
            stream.close()

    def _understand(self, peer: PeerId, raw: bytes) -> Acquaintance:
        try:
            frame = _parse(raw)
            if frame.WhichOneof("say") == "farewell":
                raise self._parted(peer, frame.farewell)
            return self._check(peer, frame.hello)
        except NoCommonProtocol as e:
            self._mismatched(peer, e.theirs, e.version)
            raise IncompatiblePeer(peer, self._facts().protocols, e.theirs) from e
        except WireError as e:
            raise PeerFault(peer, f"bad handshake: {e}", 1.0) from e
        except Refused as e:
            raise PeerFault(peer, f"not admitted by us: {e}") from e
        except LocalFault as e:
            raise PeerFault(peer, str(e)) from e

    async def answer(
        self, peer: PeerId, reader: FrameReader, writer: Writer
    ) -> Acquaintance | None:
        """Answer a greeting with Hello, or with Farewell and None. Raises WireError for nonsense,
        after saying so."""
        frame = _parse(await read_frame(reader, FRAME_BYTES))
        met = nonsense = None
        try:
            met = self._check(peer, frame.hello)
            reply = HandshakeFrame(hello=self._hello(peer))
        except (LocalFault, WireError) as e:
            self._tokens.revoke(peer)
            if isinstance(e, NoCommonProtocol):
                self._mismatched(peer, e.theirs, e.version)
            if isinstance(e, WireError):
                nonsense = e
            code = ExitCode.PROTOCOL
            if isinstance(e, LocalFault):
                code = e.code
            farewell = Farewell(code=code, reason=str(e), **self._facts().versions())
            reply = HandshakeFrame(farewell=farewell)
        await write_frame(writer, reply.SerializeToString())
        await see_off(reader, SEE_OFF_S)
        if nonsense is not None:
            raise nonsense
        return met

    async def turn_away(self, reader: FrameReader, writer: Writer, reason: str) -> None:
        """Answer a greeting with Farewell, without parsing it. It is read all the same: bytes that
        nobody has read look like the end of the conversation. Raises WireError for one that is too
        long."""
        await read_frame(reader, FRAME_BYTES)
        farewell = Farewell(code=ExitCode.REFUSED, reason=reason, **self._facts().versions())
        await write_frame(writer, HandshakeFrame(farewell=farewell).SerializeToString())
        await see_off(reader, SEE_OFF_S)

    def _hello(self, peer: PeerId) -> Hello:
        facts = self._facts()
        addresses, mapped = self._addresses()
        return Hello(
            protocol=facts.protocols.oldest,
            newest_protocol=facts.protocols.newest,
            run_id=facts.run_id,
            addresses=addresses[:ADDRESSES],
            mapped=mapped[:ADDRESSES],
            certificate=self._certificate,
            token=self._tokens.issue(peer),
            admission=facts.admission,
            name=facts.name,
            version=facts.version,
        )

    def _parted(self, peer: PeerId, said: Farewell) -> PeerFault | NoCommonProtocol:
        """The fault that a Farewell stands for. Software without version windows compares versions
        before runs, so if its only version is not spoken here, that is the reason. Raises
        WireError."""
        ours = self._facts().protocols
        theirs = Protocols.said(said.oldest_protocol, said.newest_protocol)
        if said.code == ExitCode.PROTOCOL and not ours.common(theirs):
            return NoCommonProtocol(ours, theirs, said.version)
        return PeerFault(peer, f"says farewell: {printable(said.reason)}")

    def _check(self, peer: PeerId, hello: Hello) -> Acquaintance:
        """Raises LocalFault with the code of a Farewell for a stranger, WireError for nonsense."""
        facts = self._facts()
        ours = facts.run_id
        theirs = Protocols.said(hello.protocol, hello.newest_protocol)
        protocol = facts.protocols.common(theirs)
        if not protocol:
            raise NoCommonProtocol(facts.protocols, theirs, hello.version)
        if not ours or hello.run_id != ours:
            raise LocalFault(
                f"you train run {printable(hello.run_id)[:12] or '(none)'}, we train "
                f"{ours[:12] or '(none)'}",
                "check the invite",
                ExitCode.PROTOCOL,
            )
        until = self._admit(peer, hello)
        if len(hello.token) != TOKEN_BYTES:
            raise WireError(f"a token has {TOKEN_BYTES} bytes, not {len(hello.token)}")
        met = Acquaintance(
            peer=peer,
            targets=tuple(grpc_target(a) for a in hello.addresses[:ADDRESSES]),
            mapped=frozenset(grpc_target(a) for a in hello.mapped[:ADDRESSES]),
            certificate=hello.certificate,
            server_name=check_certificate(hello.certificate),
            token=hello.token.hex(),
            name=printable(hello.name)[:64],
            version=printable(hello.version)[:32],
            protocol=protocol,
            until=until,
        )
        self._tokens.accept(peer, until)
        return met


def _parse(raw: bytes) -> HandshakeFrame:
    frame = parsed(HandshakeFrame, raw, "a handshake")
    if frame.WhichOneof("say") is None:
        raise WireError("an empty handshake")
    return frame


def _key(shown: str) -> bytes:
    return hashlib.sha256(shown.encode()).digest()
