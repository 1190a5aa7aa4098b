"""Ask a running node from outside the swarm: py-libp2p dials its p2pd, one question, one answer.

For the command line only, from a machine without torch and without a p2pd of its own. Never in a process that has
hivemind: both register the same protobuf names.
"""

from __future__ import annotations

import logging
import math
import struct
import sys
from collections.abc import Sequence

if "hivemind" in sys.modules:
    raise ImportError("py-libp2p and hivemind register the same protobuf names; ask from a process of its own")

import trio
from google.protobuf.message import DecodeError
from libp2p import new_host
from libp2p.abc import IHost
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError, MultiError
from libp2p.io.abc import ReadWriteCloser
from libp2p.network.config import ConnectionConfig
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from node.core.errors import NetworkFault, UsageFault, WireError
from protos.ask_pb2 import Answer, Ask

PROTOCOL = TProtocol("/tutti/ask/1")
MAX_MESSAGE = 1 << 20
"""Bytes of a question or an answer."""
CLOSING_S = 1.0
"""Longest wait for an orderly end of the connection."""
_HOSTS = {"ip4", "ip6", "dns", "dns4", "dns6"}
_NEXT_STEP = "check the address with whoever gave it to you, and that its port is open"


def ask(multiaddr: str, question: Ask, timeout: float = 10.0, seed: bytes | None = None) -> Answer:
    """Ask the node at ``multiaddr`` (TCP, ending in /p2p/ and its PeerId) and return its answer, a refusal included.

    The connection is Noise-encrypted and proves the PeerId. At most ``timeout`` seconds. Raises UsageFault for an
    address that cannot be dialled, NetworkFault with the reason when there was no answer. Not for use inside an
    event loop: it runs its own. ``seed`` are the 32 bytes of the Ed25519 key to ask as; None: of a new one.
    """
    return ask_first([multiaddr], question, timeout, seed)


def ask_first(multiaddrs: Sequence[str], question: Ask, timeout: float = 10.0, seed: bytes | None = None) -> Answer:
    """As :func:`ask`, trying one address after the other; ``timeout`` seconds for each.

    Raises NetworkFault naming every address with what went wrong there.
    """
    if not 0 < timeout < math.inf:
        raise UsageFault(f"a time-out of {timeout} s", "give a positive number of seconds")
    if not multiaddrs:
        raise UsageFault("no address to ask", "give a multiaddr such as /ip4/203.0.113.7/tcp/4001/p2p/12D3Koo…")
    targets = [(text, _target(text)) for text in multiaddrs]
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)  # a refused dial is our answer to give, not a log line
    reasons = []
    for text, target in targets:
        try:
            return trio.run(_ask, target, question.SerializeToString(), timeout, seed)
        except _NoAnswer as e:
            reasons.append(f"{text}: {e}")
    raise NetworkFault("no answer from " + "; ".join(reasons), _NEXT_STEP)


class _NoAnswer(Exception):
    """One address did not work; the text says what was being done and how it failed."""


def _target(text: str) -> PeerInfo:
    """Who and where. Raises UsageFault with what is wrong."""
    example = "an address looks like /ip4/203.0.113.7/tcp/4001/p2p/12D3Koo…"
    try:
        address = Multiaddr(text)
        names = [protocol.name for protocol in address.protocols()]
        if len(names) == 3 and names[0] in _HOSTS and names[1:] == ["tcp", "p2p"]:
            peer = ID.from_string(str(address.value_for_protocol("p2p")))
            return PeerInfo(peer, [address.decapsulate_code(0x01A5)])
    except (MultiaddrError, ValueError, TypeError, KeyError) as e:
        raise UsageFault(f"not a multiaddr: {text} ({e})", example) from e
    if "p2p" not in names:
        raise UsageFault(f"{text} does not say whom to expect: /p2p/ and the PeerId are missing", example)
    if "p2p-circuit" in names:
        raise UsageFault(f"{text} leads through a relay", "ask a peer that can be dialled directly, such as the relay itself")
    raise UsageFault(f"{text} is not a plain TCP address", example)


async def _ask(target: PeerInfo, question: bytes, timeout: float, seed: bytes | None) -> Answer:
    """One connection, one stream, one exchange. Raises _NoAnswer."""
    doing, answers = ["dialling"], list[Answer]()
    why = f"no answer within {timeout:g} s"
    with trio.move_on_after(timeout):
        try:
            host = _host(timeout, seed)
            async with host.run([]):
                try:
                    answers.append(await _exchange(host, target, question, doing))
                finally:
                    # Shielded: a time-out that also stopped the closing would leave the socket open.
                    with trio.move_on_after(CLOSING_S) as scope:
                        scope.shield = True
                        await host.close()
        except* (BaseLibp2pError, WireError, OSError, EOFError, trio.BrokenResourceError, trio.ClosedResourceError) as group:
            why = _first(group)
    if not answers:  # once there is one, how the connection came apart is of no interest
        raise _NoAnswer(f"{doing[-1]} failed: {why}")
    return answers[0]


def _host(timeout: float, seed: bytes | None = None) -> IHost:
    """A libp2p host that only dials: nothing listens, nothing is announced or discovered, no metrics are served."""
    return new_host(
        key_pair=create_new_key_pair(seed) if seed is not None else None,
        muxer_preference="YAMUX",
        enable_mDNS=False,
        enable_upnp=False,
        enable_autotls=False,
        enable_metrics=False,
        bootstrap=None,
        enable_quic=False,
        negotiate_timeout=max(1, math.ceil(timeout)),
        connection_config=ConnectionConfig(
            dial_timeout=timeout,
            outbound_upgrade_timeout=timeout,
            min_connections=0,  # else it keeps dialling whoever it has heard of until it has as many as the mean of the
            low_watermark=0,  # two watermarks, and races our own dial with a second connection that outlives the first
            high_watermark=1,
        ),
        disable_identify_address_discovery=True,
    )


async def _exchange(host: IHost, target: PeerInfo, question: bytes, doing: list[str]) -> Answer:
    await host.connect(target)
    doing.append("opening the stream")
    stream = await host.new_stream(target.peer_id, [PROTOCOL])
    doing.append("asking")
    await stream.write(struct.pack(">I", len(question)) + question)
    doing.append("reading the answer")
    (size,) = struct.unpack(">I", await _exactly(stream, 4))
    if size > MAX_MESSAGE:
        raise WireError(f"an answer of {size} bytes, more than {MAX_MESSAGE}")
    raw = await _exactly(stream, size)
    try:
        return Answer.FromString(raw)
    except DecodeError as e:
        raise WireError("it is not an Answer") from e


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
    """One line about the innermost cause: libp2p wraps "connection refused" in four layers that do not say so."""
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
