"""Routers on loopback that speak NAT-PMP and PCP, written from the RFCs, not from the code."""

import asyncio
import socket
import struct

NUMBERS = {6: "tcp", 17: "udp"}


class FakeRouter(asyncio.DatagramProtocol):
    """A router on loopback. `speaks`: "pcp", "natpmp". `table`: (protocol, internal port) to
    (external port, lifetime in s)."""

    def __init__(self, *speaks: str) -> None:
        self.speaks = set(speaks)
        self.address = "203.0.113.7"
        self.table: dict[tuple[str, int], tuple[int, int]] = {}
        self.nonces: dict[tuple[str, int], bytes] = {}
        self.taken: set[int] = set()
        self.epoch = 1000
        self.result = 0
        self.longest = 7200
        """Longest lifetime of a mapping in s."""
        self.lose = 0
        """Number of requests that get lost from now on."""
        self.mute = False
        """Requests are carried out and not answered."""
        self.before: list[bytes] = []
        """Datagrams sent before each answer."""
        self.heard: list[bytes] = []
        self.peers: set[tuple[str, int]] = set()
        self.asked = asyncio.Event()
        self.port = 0

    async def start(self) -> "FakeRouter":
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", 0)
        )
        self.port = self._transport.get_extra_info("sockname")[1]
        return self

    def close(self) -> None:
        self._transport.close()

    def restart(self) -> None:
        self.table.clear()
        self.nonces.clear()
        self.epoch = 0

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.heard.append(data)
        self.peers.add(addr)
        self.asked.set()
        if self.lose:
            self.lose -= 1
            return
        answer = None
        if data[0] == 2:
            answer = self._pcp(data) if "pcp" in self.speaks else self._other(data)
        elif data[0] == 0:
            answer = self._natpmp(data) if "natpmp" in self.speaks else self._other(data)
        if answer and not self.mute:
            for junk in self.before:
                self._transport.sendto(junk, addr)
            self._transport.sendto(answer, addr)

    def _other(self, data: bytes) -> bytes | None:
        """Answer "unsupported version" in the protocol that this router speaks."""
        if "natpmp" in self.speaks:
            return struct.pack("!BBHI", 0, data[1] | 128, 1, self.epoch)
        return struct.pack("!BBBBII12x", 2, 128, 0, 1, 0, self.epoch) if self.speaks else None

    def _grant(self, key: tuple[str, int], external: int, lifetime: int) -> tuple[int, int]:
        if not lifetime:
            self.table.pop(key, None)
            self.nonces.pop(key, None)
            return 0, 0
        if key in self.table:
            external = self.table[key][0]
        while external in self.taken:
            external += 1
        self.table[key] = external, min(lifetime, self.longest)
        return self.table[key]

    def _natpmp(self, data: bytes) -> bytes:
        head = struct.pack("!BBHI", 0, data[1] | 128, self.result, self.epoch)
        if self.result:
            return head
        if data[1] == 0:
            return head + socket.inet_aton(self.address)
        internal, external, lifetime = struct.unpack("!HHI", data[4:])
        key = ({1: "udp", 2: "tcp"}[data[1]], internal)
        return head + struct.pack("!HHI", internal, *self._grant(key, external, lifetime))

    def _pcp(self, data: bytes) -> bytes:
        opcode = data[1]
        lifetime = int.from_bytes(data[4:8], "big")
        assert data[8:24] == bytes(10) + b"\xff\xff" + socket.inet_aton("127.0.0.1")
        if opcode == 0:
            return struct.pack("!BBBBII12x", 2, 128, 0, 0, 0, self.epoch)
        nonce, number, internal, external = struct.unpack_from("!12sB3xHH", data, 24)
        key = (NUMBERS[number], internal)
        result = self.result
        if self.nonces.get(key, nonce) != nonce:
            result = 2
        if not result:
            external, lifetime = self._grant(key, external, lifetime)
            if lifetime:
                self.nonces[key] = nonce
        host = bytes(10) + b"\xff\xff" + socket.inet_aton(self.address)
        head = struct.pack("!BBBBII12x", 2, 129, 0, result, lifetime, self.epoch)
        return head + struct.pack("!12sB3xHH", nonce, number, internal, external) + host
