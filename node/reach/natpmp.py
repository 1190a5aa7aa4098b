"""NAT-PMP (RFC 6886) and PCP MAP (RFC 6887): their messages, and the exchange with the gateway.
Enters: ports to map, datagrams from the gateway. Leaves: mappings and leases, or a RouterFault.
Never: an answer from any other address, IPv6, a mapping for another host."""

import asyncio
import contextlib
import socket
import struct
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from typing import TypeVar

from node.core.errors import WireError
from node.reach.gateway import (
    LEASE_S,
    Gateway,
    GatewayProtocol,
    Granted,
    Mapping,
    Port,
    RouterFault,
)

T = TypeVar("T")

PORT = 5351
WAITS_S = (0.25, 0.5, 1.0, 2.0)
"""Seconds each transmission of a request waits for its answer. RFC 6886 goes on to 64 s, RFC 6887
starts with 3 s; here the asker gets its result soon, and asks again later."""

ANSWER = 0x80  # added to the opcode of a request
ADDRESS = 0  # NAT-PMP's opcode
MAPS = {"udp": 1, "tcp": 2}  # NAT-PMP's opcodes
ANNOUNCE = 0  # PCP's opcode
MAP = 1  # PCP's opcode
_PMP = 0  # version
_PCP = 2  # version
_NUMBERS = {"tcp": 6, "udp": 17}  # IANA's protocol numbers, for PCP
_LONGEST = 1100  # bytes of a PCP message (RFC 6887, section 7)
_PREFIX = bytes(10) + b"\xff\xff"  # of an IPv4 address written as an IPv6 one

PMP_RESULTS = {
    1: "it does not know this version",
    2: "mapping is not allowed",
    3: "it has no address outside",
    4: "it has no room for more mappings",
    5: "it does not know this request",
}
PCP_RESULTS = {
    1: "it does not know this version",
    2: "mapping is not allowed",
    3: "it finds the request malformed",
    4: "it does not know this request",
    5: "it does not know an option",
    6: "it finds an option malformed",
    7: "it has no address outside",
    8: "it has no room for more mappings",
    9: "it does not map this protocol",
    10: "this host has too many mappings",
    11: "the external port is not available",
    12: "an address is translated between this host and the router",
    13: "it finds too many remote peers",
}


# ------------------------------------------------------------ messages


@dataclass(frozen=True, slots=True)
class MapAnswer:
    """An answer of either protocol. ``epoch`` and ``lifetime`` in seconds; fields that the answer
    does not carry are empty. ``nonce`` and ``protocol`` are PCP's."""

    opcode: int
    result: int
    epoch: int
    host: str = ""
    internal: int = 0
    external: int = 0
    lifetime: int = 0
    nonce: bytes = b""
    protocol: str = ""


def pmp_address() -> bytes:
    """Ask for the external address."""
    return struct.pack("!BB", _PMP, ADDRESS)


def pmp_map(port: Port, external: int, lifetime: int) -> bytes:
    """Ask to map ``port`` for ``lifetime`` seconds, at ``external`` if free; 0 s deletes."""
    if not lifetime:
        external = 0
    return struct.pack("!BBHHHI", _PMP, MAPS[port[0]], 0, port[1], external, lifetime)


def read_pmp(data: bytes) -> MapAnswer:
    """Decode an answer; a refusal may be short. Raises WireError if it is no NAT-PMP answer."""
    if len(data) < 8:
        raise WireError(f"a NAT-PMP answer has 8 bytes at least, not {len(data)}")
    version, opcode, result, epoch = struct.unpack_from("!BBHI", data)
    if version != _PMP or not opcode & ANSWER:
        raise WireError("this is no NAT-PMP answer")
    answer = MapAnswer(opcode - ANSWER, result, epoch)
    if result:
        return answer
    if answer.opcode == ADDRESS and len(data) >= 12:
        return replace(answer, host=str(IPv4Address(data[8:12])))
    if answer.opcode in MAPS.values() and len(data) >= 16:
        return MapAnswer(answer.opcode, 0, epoch, "", *struct.unpack_from("!HHI", data, 8))
    raise WireError(f"this is no NAT-PMP answer: opcode {answer.opcode}, {len(data)} bytes")


def _pcp_header(opcode: int, lifetime: int, client: str) -> bytes:
    return struct.pack("!BBHI", _PCP, opcode, 0, lifetime) + _PREFIX + IPv4Address(client).packed


def pcp_announce(client: str) -> bytes:
    """Ask for nothing but an answer. ``client`` is this host's address towards the gateway."""
    return _pcp_header(ANNOUNCE, 0, client)


def pcp_map(
    client: str,
    nonce: bytes,
    port: Port,
    external: int,
    host: str,
    lifetime: int,
) -> bytes:
    """Ask to map ``port`` for ``lifetime`` seconds, at ``host``:``external`` if free; 0 s deletes.

    ``nonce`` is 12 bytes; a mapping is renewed or deleted only with the nonce it was made with.
    """
    if not lifetime:
        external = 0
        host = "0.0.0.0"
    body = struct.pack("!12sB3xHH", nonce, _NUMBERS[port[0]], port[1], external)
    return _pcp_header(MAP, lifetime, client) + body + _PREFIX + IPv4Address(host).packed


def read_pcp(data: bytes) -> MapAnswer:
    """Decode an answer; a refusal may end after its header. Raises WireError if it is no PCP
    answer."""
    if not 24 <= len(data) <= _LONGEST or len(data) % 4:
        raise WireError(f"a PCP answer does not have {len(data)} bytes")
    version, opcode, result, lifetime, epoch = struct.unpack_from("!BBxBII", data)
    if version != _PCP or not opcode & ANSWER:
        raise WireError("this is no PCP answer")
    answer = MapAnswer(opcode - ANSWER, result, epoch, lifetime=lifetime)
    if answer.opcode != MAP or (result and len(data) < 60):
        return answer
    if len(data) < 60:
        raise WireError(f"a PCP answer to MAP does not have {len(data)} bytes")
    nonce, number, internal, external, prefix, host = struct.unpack_from("!12sB3xHH12s4s", data, 24)
    protocol = next((name for name, n in _NUMBERS.items() if n == number), "")
    if not result and (prefix != _PREFIX or not protocol):
        raise WireError("a PCP answer is about an IPv4 address, and about TCP or UDP")
    return MapAnswer(
        MAP, result, epoch, str(IPv4Address(host)), internal, external, lifetime, nonce, protocol
    )


def state_lost(before: tuple[float, int], after: tuple[float, int]) -> bool:
    """True when a server lost its mappings between two answers, each (our seconds, its epoch).

    The rule of RFC 6887, section 8.5, which suits NAT-PMP (RFC 6886, section 3.6) too.
    """
    ours = after[0] - before[0]
    its = after[1] - before[1]
    return its < -1 or ours + 2 < its - its / 16 or its + 2 < ours - ours / 16


# ------------------------------------------------------------ the exchange


async def exchange(request: bytes, accept: Callable[[bytes], T | None], host: str, port: int) -> T:
    """Send ``request`` until ``accept`` takes an answer, once for each of :data:`WAITS_S`.

    ``accept`` returns None for an answer to something else and raises WireError for a malformed
    one: both are passed over. Raises other exceptions of ``accept``, and RouterFault if no answer
    came or the port is closed.
    """
    loop = asyncio.get_running_loop()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connected:
            connected.setblocking(False)
            # Nothing comes in but from that address and port, and a closed port is told.
            connected.connect((host, port))
            for wait in WAITS_S:
                await loop.sock_sendall(connected, request)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        while True:
                            came = await loop.sock_recv(connected, _LONGEST + 1)
                            with contextlib.suppress(WireError):
                                if (answer := accept(came)) is not None:
                                    return answer
                            await asyncio.sleep(0)  # a flood must not keep the loop to itself
    except ConnectionRefusedError as e:
        raise RouterFault(f"the router has port {port} closed") from e
    except OSError as e:  # no descriptor is free, for one
        raise RouterFault(f"the router cannot be asked: {e.strerror or e}") from e
    raise RouterFault(f"the router does not answer on port {port}")


# ------------------------------------------------------------ the two ways


class _Pmp(GatewayProtocol):
    """Base of both protocols: a port of the gateway, and an epoch that shows lost state."""

    def __init__(self, gateway: Gateway, port: int = PORT) -> None:
        super().__init__(gateway)
        self._port = port
        self._last: tuple[float, int] | None = None
        self._lost = False

    async def map(self, ports: Sequence[Port]) -> Granted:
        self._lost = False
        return await super().map(ports)

    async def check(self) -> bool:
        return await self._intact() and not self._lost

    @abstractmethod
    async def _intact(self) -> bool:
        """Ask for the epoch and the address outside; False if the address is another one."""

    async def _exchange(self, request: bytes, accept: Callable[[bytes], T | None]) -> T:
        return await exchange(request, accept, self.gateway.address, self._port)

    def _note(self, epoch: int) -> None:
        now = (time.monotonic(), epoch)
        self._lost |= self._last is not None and state_lost(self._last, now)
        self._last = now

    @abstractmethod
    async def _map(self, port: Port, before: Mapping | None, lifetime: int) -> MapAnswer:
        """Ask to map ``port``, as ``before`` if that is free; 0 s deletes."""

    async def _ask(self, port: Port) -> tuple[Mapping, float]:
        answer = await self._map(port, self.held.get(port), LEASE_S)
        if not answer.external or not answer.lifetime or answer.host == "0.0.0.0":
            raise RouterFault("the router answers, but maps nothing")
        return Mapping(*port, answer.host, answer.external, self.name), float(answer.lifetime)

    async def _delete(self, port: Port) -> None:
        await self._map(port, None, 0)


class NatPmp(_Pmp):
    """Mappings by NAT-PMP."""

    name = "NAT-PMP"
    _host = ""

    async def probe(self) -> None:
        await self._intact()

    async def _intact(self) -> bool:
        answer = await self._exchange(pmp_address(), lambda data: self._read(data, ADDRESS, 0))
        if answer.host == "0.0.0.0":
            raise RouterFault("the router has no address outside")
        before = self._host
        self._host = answer.host
        return before == answer.host

    async def _map(self, port: Port, before: Mapping | None, lifetime: int) -> MapAnswer:
        external = port[1]
        if before:
            external = before.external
        request = pmp_map(port, external, lifetime)
        answer = await self._exchange(
            request, lambda data: self._read(data, MAPS[port[0]], port[1])
        )
        return replace(answer, host=self._host)

    def _read(self, data: bytes, opcode: int, internal: int) -> MapAnswer | None:
        if data[:1] == bytes([_PCP]):
            raise RouterFault("the router speaks PCP, but not NAT-PMP")
        answer = read_pmp(data)
        if answer.opcode != opcode or (not answer.result and answer.internal != internal):
            return None
        if answer.result:
            raise _refused(PMP_RESULTS, answer.result)
        self._note(answer.epoch)
        return answer


class Pcp(_Pmp):
    """Mappings by PCP. ``nonce`` is 12 bytes; to change the mappings of an earlier process it must
    be the same."""

    name = "PCP"

    def __init__(self, gateway: Gateway, nonce: bytes, port: int = PORT) -> None:
        super().__init__(gateway, port)
        self._nonce = nonce

    async def probe(self) -> None:
        # Whatever the result: a server that does not know ANNOUNCE may know MAP.
        await self._exchange(
            pcp_announce(self.gateway.local),
            lambda data: answer if (answer := self._read(data)).opcode == ANNOUNCE else None,
        )

    async def _intact(self) -> bool:
        # Renewing one mapping shows the address outside, which ANNOUNCE does not.
        for port, before in self.held.items():
            if before:
                return (await self._ask(port))[0] == before
        return False

    async def _map(self, port: Port, before: Mapping | None, lifetime: int) -> MapAnswer:
        def accept(data: bytes) -> MapAnswer | None:
            answer = self._read(data)
            if answer.opcode != MAP:
                return None
            about = (answer.nonce, answer.protocol, answer.internal)
            if answer.nonce and about != (self._nonce, *port):
                return None
            if answer.result:
                raise _refused(PCP_RESULTS, answer.result)
            self._note(answer.epoch)
            return answer

        external = port[1]
        host = "0.0.0.0"
        if before:
            external = before.external
            host = before.host
        request = pcp_map(self.gateway.local, self._nonce, port, external, host, lifetime)
        return await self._exchange(request, accept)

    def _read(self, data: bytes) -> MapAnswer:
        if data[:1] == bytes([_PMP]):
            raise RouterFault("the router speaks NAT-PMP, but not PCP")
        return read_pcp(data)


def _refused(results: dict[int, str], code: int) -> RouterFault:
    return RouterFault(f"the router refuses: {results.get(code, f'result {code}')}")
