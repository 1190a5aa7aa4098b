"""A wide-area network on one machine: network namespaces joined by a hub in user space that shapes
every directed link.

Needs root, /dev/net/tun and iproute2, and no module of the kernel that could be missing. Carries
roughly half a Gbit/s in all. Host i has the address 10.88.0.(i+1); nothing leaves the machine.

    with Wan(3) as wan:
        wan.shape(0, 1, delay_s=0.04, rate_bps=100e6)     # both directions; both=False for one
        wan.cut({0}, {1, 2})    # a partition; both=False cuts one way; heal() undoes it
"""

import contextlib
import fcntl
import heapq
import os
import random
import re
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from testbed.daemons import namespaces
from testbed.daemons.fleet import Host

_TUNSETIFF = 0x400454CA
_TUN_NO_PI = 0x1001
_NETWORK = bytes((10, 88, 0))
_BURST = 64
"""Packets read from one host before the others have their turn."""
_EARLY_S = 0.001
"""Seconds that a packet is handed on too early at most: a wake-up for several is cheaper."""


@dataclass
class Link:
    """One direction. Times in seconds, ``loss`` in [0, 1], rate in bits per second (0:
    unlimited)."""

    delay_s: float = 0.0
    loss: float = 0.0
    rate_bps: float = 0.0
    limit_packets: int = 4000
    cut: bool = False
    free_at: float = field(default=0.0, repr=False)
    queued: int = field(default=0, repr=False)
    dropped: int = 0
    carried: int = 0
    """Bytes of the packets that it took, headers included."""


_Parcel = tuple[float, int, Link, int, bytes]
"""When it is due, its number, its link, the host it goes to, the packet."""


class Wan:
    """The network of ``hosts`` machines, as a context; leaving it takes the namespaces down."""

    def __init__(self, hosts: int, mtu: int = 9000, seed: int = 0) -> None:
        self.names = [f"tutti{os.getpid()}x{i}" for i in range(hosts)]
        self.links = {(i, j): Link() for i in range(hosts) for j in range(hosts) if i != j}
        self._mtu = mtu
        self._dice = random.Random(seed)
        self._stop = threading.Event()
        self._tuns: list[int] = []
        self._hub: threading.Thread | None = None

    def __enter__(self) -> "Wan":
        _sweep()
        try:
            for i, name in enumerate(self.names):
                _ip("netns", "add", name)
                self._tuns.append(_tun_in(name, f"{self.address(i)}/24", self._mtu))
        except BaseException:  # also a Ctrl-C
            self.close()
            raise
        self._hub = threading.Thread(target=self._run, name="wan", daemon=True)
        self._hub.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take every namespace down. Safe to call twice."""
        self._stop.set()
        if self._hub is not None:
            self._hub.join(2.0)
        for tun in self._tuns:
            os.close(tun)
        self._tuns = []
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)

    def address(self, i: int) -> str:
        return f"10.88.0.{i + 1}"

    def host(self, i: int) -> Host:
        """Where a daemon of host ``i`` runs."""
        return Host(self.address(i), namespaces.through(self.names[i]))

    def shape(self, i: int, j: int, *, both: bool = True, **changes: float | bool) -> None:
        """Change fields of :class:`Link` between two hosts."""
        for pair in ((i, j), (j, i))[: 2 if both else 1]:
            for name, value in changes.items():
                setattr(self.links[pair], name, value)

    def shape_all(self, **changes: float | bool) -> None:
        """The same for every link."""
        for i, j in self.links:
            self.shape(i, j, both=False, **changes)

    def cut(self, a: Iterable[int], b: Iterable[int], *, both: bool = True) -> None:
        """Nothing from ``a`` reaches ``b`` any more, and with ``both`` nothing comes back."""
        others = set(b)
        for i in a:
            for j in others - {i}:
                self.shape(i, j, both=both, cut=True)

    def heal(self) -> None:
        """Every link as it was in the beginning."""
        self.shape_all(cut=False, delay_s=0.0, loss=0.0, rate_bps=0.0)

    def _run(self) -> None:
        hub = select.epoll()
        host = {tun: i for i, tun in enumerate(self._tuns)}
        for tun in self._tuns:
            hub.register(tun, select.EPOLLIN)
        due: list[_Parcel] = []
        number = 0
        while not self._stop.is_set():
            patience = min(0.1, max(0.0, due[0][0] - time.monotonic())) if due else 0.1
            for tun, _ in hub.poll(patience):
                for _ in range(_BURST):
                    try:
                        packet = os.read(tun, self._mtu)
                    except BlockingIOError:
                        break
                    if parcel := self._accept(host[tun], packet, number):
                        number += 1
                        heapq.heappush(due, parcel)
            now = time.monotonic() + _EARLY_S
            while due and due[0][0] <= now:
                _, _, link, to, packet = heapq.heappop(due)
                link.queued -= 1
                try:
                    os.write(self._tuns[to], packet)
                except BlockingIOError:
                    link.dropped += 1
        hub.close()

    def _accept(self, source: int, packet: bytes, number: int) -> _Parcel | None:
        if len(packet) < 20 or packet[0] >> 4 != 4 or packet[16:19] != _NETWORK:
            return None
        link = self.links.get((source, packet[19] - 1))
        if link is None:
            return None
        if link.cut or link.queued >= link.limit_packets or self._dice.random() < link.loss:
            link.dropped += 1
            return None
        at = time.monotonic()
        if link.rate_bps:
            at = link.free_at = max(link.free_at, at) + len(packet) * 8 / link.rate_bps
        link.queued += 1
        link.carried += len(packet)
        return at + link.delay_s, number, link, packet[19] - 1, packet


def why_not() -> str:
    """Why this user cannot have such a network; empty when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Wan(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as e:
        return f"no network namespaces here: {e}"


def _sweep() -> None:
    """Take down what a program that was killed has left."""
    for name in os.listdir(namespaces.FOLDER) if os.path.isdir(namespaces.FOLDER) else ():
        made = re.fullmatch(r"tutti([0-9]+)x[0-9]+", name)
        if made and not os.path.exists(f"/proc/{made[1]}"):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _tun_in(name: str, address: str, mtu: int) -> int:
    """A file descriptor that is the network card of the namespace. Raises OSError,
    CalledProcessError."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        namespaces.enter(name)
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        try:
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", b"wan0", _TUN_NO_PI))
            _ip("addr", "add", address, "dev", "wan0")
            _ip("link", "set", "wan0", "mtu", str(mtu), "up")
            _ip("link", "set", "lo", "up")
        except BaseException:  # also a Ctrl-C
            os.close(tun)
            raise
        # The machine's congestion control may be one that does not slow down for loss.
        with (
            contextlib.suppress(OSError),
            open("/proc/sys/net/ipv4/tcp_congestion_control", "w") as f,
        ):
            f.write("cubic")
        return tun
    finally:
        namespaces.move_to(home)
        os.close(home)
