"""A small internet on one machine: hosts in network namespaces, public or behind routers that
translate addresses.

Needs root, iproute2 and nftables; nothing leaves the machine, no host has a route outside. Public
addresses are of 11.0.0.0/24 and 2a09:8280:1::/64, which libp2p takes for public (it does not
private and documentation ranges).

    with Internet({"hub": "open", "anna": "home", "ben": "symmetric", "carl": "home@anna"}) as net:
        net.popen("anna", ["python3", "-m", "http.server"])
        net.map_ports("anna")            # miniupnpd in anna's router: UPnP, NAT-PMP and PCP
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.daemons import namespaces
from testbed.daemons.fleet import Host

KINDS: Mapping[str, str] = {
    "open": "an address on the public segment, no router",
    "home": "one router: source ports are kept, so the mapping does not depend on the destination; "
    "filtering does",
    "symmetric": "one router: a new random port for every destination",
    "noudp": "home, and no UDP leaves it",
    "cgnat": "home behind a second router of the provider (100.64.0.0/10); both keep ports",
    "lan": "an address on a private segment without a way out; all hosts of this kind share it",
}
"""Kinds of hosts. Routers drop packets that no host inside asked for. "KIND@NAME" stands behind the
router of host NAME and has its kind."""

V6 = "2a09:8280:1"
_UPNPD_S = 10.0


@dataclass(frozen=True)
class Place:
    """One host: its namespace, its addresses, the namespace of its router ("" for none) and that
    one's public address."""

    name: str
    kind: str
    namespace: str
    address: str
    address6: str
    router: str = ""
    public: str = ""

    @property
    def through(self) -> tuple[str, ...]:
        """The command that runs another on this host."""
        return namespaces.through(self.namespace)

    @property
    def host(self) -> Host:
        """Where :class:`~testbed.daemons.fleet.Box` starts a daemon of this host: listening
        wherever it does by default."""
        return Host("", self.through)


class Internet:
    """``hosts``: name to kind, see :data:`KINDS`. ``families``: 4, 6 or both; without 4 no host has
    an IPv4 address but loopback."""

    def __init__(self, hosts: Mapping[str, str], families: Sequence[int] = (4,)) -> None:
        for name, kind in hosts.items():
            if kind.partition("@")[0] not in KINDS:
                raise ValueError(f"{name}: no kind {kind!r}; there are {', '.join(KINDS)}")
        self._hosts = dict(hosts)
        self._families = frozenset(families)
        self._prefix = f"tn{os.getpid()}"
        self.places: dict[str, Place] = {}
        self._started: list[subprocess.Popen[Any]] = []
        self._folders: list[Path] = []
        self._cables = 0
        self._routers: dict[str, tuple[str, int]] = {}

    def __enter__(self) -> "Internet":
        sweep()
        try:
            self._segment("net")
            self._segment("lan")
            for number, (name, kind) in enumerate(self._hosts.items(), start=10):
                self.places[name] = self._host(name, kind, number)
            self._route6()
        except BaseException:  # also a Ctrl-C: no namespace stays
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes started through :meth:`popen` and take every namespace down. Safe to
        call twice."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._started = []
        for name in _spaces(self._prefix):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    # ----------------------------------------------------------- using

    def __getitem__(self, name: str) -> Place:
        return self.places[name]

    def add_bridges(self, name: str, count: int) -> None:
        """Give a host ``count`` bridges with Docker's addresses: 172.17.0.1, 172.18.0.1, and so on,
        the same on every host. The last bridge has no carrier. Raises OSError."""
        for number in range(17, 17 + count):
            bridge = f"br-{number}"
            port = f"v{number}"
            far_end = f"w{number}"
            last = number == 16 + count
            for words in (
                ("link", "add", "name", bridge, "type", "bridge"),
                ("link", "add", port, "type", "veth", "peer", "name", far_end),
                ("link", "set", far_end, "down" if last else "up"),
                ("link", "set", port, "up", "master", bridge),
                ("addr", "add", f"172.{number}.0.1/16", "dev", bridge),
                ("link", "set", bridge, "up"),
            ):
                self._sh("ip", *words, ns=self.places[name].namespace)

    def popen(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Run a command on a host; it is killed when the network is taken down, if it still runs
        then."""
        process = subprocess.Popen([*self.places[name].through, *command], **options)
        self.ends(process)
        return process

    def ends(self, process: subprocess.Popen[Any]) -> None:
        """Kill a process when the network is taken down, if it still runs then."""
        self._started.append(process)

    def run(
        self, name: str, command: Sequence[str], timeout: float = 60.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end and return its exit code and output."""
        return subprocess.run(
            [*self.places[name].through, *command],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            **options,
        )

    def filter(self, name: str, *rules: str) -> None:
        """Replace the packet filter of the host itself by nftables rules such as "input meta
        l4proto udp drop"; none: let all in."""
        chains = {
            hook: [r.removeprefix(hook + " ") for r in rules if r.startswith(hook + " ")]
            for hook in ("input", "output")
        }
        text = "".join(
            f"chain {h} {{ type filter hook {h} priority 0; {'; '.join(of)} ; }}\n"
            for h, of in chains.items()
            if of
        )
        self._nft(
            self.places[name].namespace,
            f"table inet host {{}}\ndelete table inet host\ntable inet host {{\n{text}}}\n",
        )

    def no_route(self, name: str) -> None:
        """Take the default route of a host away."""
        self._sh("ip", "route", "del", "default", ns=self.places[name].namespace)

    def shape(self, name: str, rate_bps: float) -> None:
        """Limit what leaves a host to ``rate_bps`` bits per second."""
        rate = f"{rate_bps:.0f}bit"
        burst = f"{max(16_384, round(rate_bps / 8 / 100))}"
        device = ("dev", "eth0", "root", "tbf", "rate", rate, "burst", burst, "latency", "100ms")
        self._sh("tc", "qdisc", "replace", *device, ns=self.places[name].namespace)

    def map_ports(
        self, name: str, ways: Sequence[str] = ("upnp", "natpmp", "pcp")
    ) -> subprocess.Popen[Any]:
        """Start miniupnpd in the router of a host, offering only these ways; it is returned
        running.

        Raises FileNotFoundError when miniupnpd is not installed, TimeoutError when it does not come
        up.
        """
        binary = miniupnpd()
        if binary is None:
            raise FileNotFoundError(
                "miniupnpd is not installed (Debian: apt install miniupnpd-nftables)"
            )
        place = self.places[name]
        folder = Path(tempfile.mkdtemp(prefix="tutti-upnpd-"))
        self._folders.append(folder)
        inside = place.address.rpartition(".")[0]
        config = folder / "miniupnpd.conf"
        pmp = "yes" if {"natpmp", "pcp"} & set(ways) else "no"
        config.write_text(
            f"ext_ifname=wan\next_ip={place.public}\nlistening_ip=lan\n"
            f"enable_upnp={'yes' if 'upnp' in ways else 'no'}\n"
            f"enable_natpmp={pmp}\nsecure_mode=yes\nlease_file={folder}/leases\n"
            "uuid=00000000-0000-0000-0000-000000000001\n"
            "upnp_table_name=upnp\nupnp_nat_table_name=upnp\n"
            "upnp_forward_chain=through\nupnp_nat_chain=enter\n"
            f"upnp_nat_postrouting_chain=leave\nallow 1024-65535 {inside}.0/24 1024-65535\ndeny "
            "0-65535 0.0.0.0/0 0-65535\n"
        )
        self._nft(
            place.router,
            "table inet upnp {}\ndelete table inet upnp\ntable inet upnp {\n chain through { }\n "
            "chain enter { }\n chain leave { }\n"
            " chain first { type nat hook prerouting priority -100; jump enter; }\n}\n",
        )
        # The version of a request is its first byte: 0 is NAT-PMP, 2 is PCP.
        other = {"natpmp": 2, "pcp": 0}
        silent = [
            f" udp dport 5351 @th,64,8 {version} drop\n"
            for way, version in other.items()
            if way in ways and len(ways) == 1
        ]
        self._nft(
            place.router,
            "table ip silent {}\ndelete table ip silent\n"
            f"table ip silent {{\n chain here {{\n type filter hook input priority "
            f"-10;\n{''.join(silent)} }}\n}}\n",
        )
        log = (folder / "log").open("wb")
        process = subprocess.Popen(
            [
                *namespaces.through(place.router),
                binary,
                "-d",
                "-f",
                str(config),
                "-P",
                str(folder / "pid"),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        self._started.append(process)
        deadline = time.monotonic() + _UPNPD_S
        up = b"listening on" if "upnp" in ways else b"Listening for NAT-PMP/PCP"
        while up not in (said := (folder / "log").read_bytes()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(
                    f"miniupnpd did not come up: {said.decode(errors='replace')[-500:]}"
                )
            time.sleep(0.05)
        return process

    # ----------------------------------------------------------- making

    def _host(self, name: str, kind: str, number: int) -> Place:
        kind, _, beside = kind.partition("@")
        space = self._space(name)
        if kind in ("open", "lan"):
            segment = "net" if kind == "open" else "lan"
            base, base6 = ("11.0.0", V6) if kind == "open" else ("192.168.9", "fd77:7")
            self._plug(segment, number, space, "eth0")
            address, address6 = self._address(
                space, "eth0", f"{base}.{number}", 24, f"{base6}::{number}", 64
            )
            return Place(
                name, kind, space, address, address6, "", address if kind == "open" else ""
            )
        if beside:
            router, home = self._routers[beside]
            last = number
        else:
            router = self._router(name, kind, number)
            home = number
            last = 2
            self._routers[name] = router, home
        self._cable(f"{self._prefix}s{home}", f"h{number}", space, "eth0")
        self._sh("ip", "link", "set", f"h{number}", "master", "sw0", ns=f"{self._prefix}s{home}")
        inside6 = f"{V6}:{home:x}" if kind != "cgnat" else ""
        address, address6 = self._address(
            space, "eth0", f"192.168.{home}.{last}", 24, inside6 and f"{inside6}::{last}", 64
        )
        if 4 in self._families:
            self._sh("ip", "route", "add", "default", "via", f"192.168.{home}.1", ns=space)
        if address6:
            self._sh("ip", "-6", "route", "add", "default", "via", f"{inside6}::1", ns=space)
        return Place(name, kind, space, address, address6, router, f"11.0.0.{home}")

    def _router(self, name: str, kind: str, number: int) -> str:
        """The router(s) of one home, with a switch inside; returns the innermost one's
        namespace."""
        outer = self._space(f"{name}-r")
        self._plug("net", number, outer, "wan")
        self._address(outer, "wan", f"11.0.0.{number}", 24, f"{V6}::{number}", 64)
        inside = outer
        self._rules(outer, kind)
        if kind == "cgnat":
            inside = self._space(f"{name}-h")
            self._cable(outer, "lan", inside, "wan")
            self._sh("ip", "addr", "add", f"100.64.{number}.1/24", "dev", "lan", ns=outer)
            self._sh("ip", "addr", "add", f"100.64.{number}.2/24", "dev", "wan", ns=inside)
            self._sh("ip", "route", "add", "default", "via", f"100.64.{number}.1", ns=inside)
            self._rules(inside, "home")
        switch = self._space(f"s{number}")
        self._switch(switch)
        self._cable(switch, "uplink", inside, "lan")
        self._sh("ip", "link", "set", "uplink", "master", "sw0", ns=switch)
        self._address(
            inside,
            "lan",
            f"192.168.{number}.1",
            24,
            f"{V6}:{number:x}::1" if kind != "cgnat" else "",
            64,
        )
        return inside

    def _route6(self) -> None:
        """Every home has an IPv6 prefix of its own, which all others on the public segment reach
        through its router."""
        if 6 not in self._families:
            return
        outside = {p.namespace for p in self.places.values() if p.kind == "open"}
        homes = {home: space for space, home in self._routers.values() if self._six(space)}
        for space in outside | set(homes.values()):
            for home, router in homes.items():
                if router != space:
                    self._sh(
                        "ip",
                        "-6",
                        "route",
                        "add",
                        f"{V6}:{home:x}::/64",
                        "via",
                        f"{V6}::{home}",
                        ns=space,
                    )

    def _six(self, space: str) -> bool:
        return V6 in self._sh("ip", "-6", "addr", "show", "dev", "lan", ns=space)

    def _rules(self, space: str, kind: str) -> None:
        how = "random,fully-random" if kind == "symmetric" else ""
        udp = 'iifname "lan" meta l4proto udp drop' if kind == "noudp" else ""
        self._sh("sysctl", "-qw", "net.ipv4.ip_forward=1", ns=space)
        if 6 in self._families:
            self._sh("sysctl", "-qw", "net.ipv6.conf.all.forwarding=1", ns=space)
        self._nft(
            space,
            f"""
table ip t {{
 chain leave {{ type nat hook postrouting priority 100; oifname "wan" masquerade {how}; }}
 chain through {{
  type filter hook forward priority 0; policy accept;
  {udp}
  iifname "wan" ct state established,related accept
  iifname "wan" ct status dnat accept
  iifname "wan" drop
 }}
 chain here {{
  type filter hook input priority 0; policy accept;
  iifname "wan" ct state established,related accept
  iifname "wan" drop
 }}
}}
table ip6 t {{
 chain through {{
  type filter hook forward priority 0; policy accept;
  {udp}
  iifname "wan" ct state established,related accept
  iifname "wan" meta l4proto icmpv6 accept
  iifname "wan" drop
 }}
}}
""",
        )

    def _segment(self, name: str) -> None:
        self._switch(self._space(name))

    def _switch(self, space: str) -> None:
        self._sh(
            "ip", "link", "add", "name", "sw0", "type", "bridge", "mcast_snooping", "0", ns=space
        )
        self._sh("ip", "link", "set", "sw0", "up", ns=space)

    def _plug(self, segment: str, number: int, space: str, interface: str) -> None:
        switch = f"{self._prefix}{segment}"
        self._cable(switch, f"p{number}", space, interface)
        self._sh("ip", "link", "set", f"p{number}", "master", "sw0", ns=switch)

    def _address(
        self, space: str, interface: str, four: str, bits: int, six: str, bits6: int
    ) -> tuple[str, str]:
        if 4 in self._families:
            self._sh("ip", "addr", "add", f"{four}/{bits}", "dev", interface, ns=space)
        else:
            four = ""
        if 6 in self._families and six:
            self._sh("ip", "addr", "add", f"{six}/{bits6}", "dev", interface, "nodad", ns=space)
        elif 6 not in self._families:
            self._sh("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1", ns=space)
            self._sh("sysctl", "-qw", "net.ipv6.conf.lo.disable_ipv6=0", ns=space)
            six = ""
        return four, six

    def _space(self, name: str) -> str:
        space = f"{self._prefix}{name}"
        self._sh("ip", "netns", "add", space)
        self._sh("ip", "link", "set", "lo", "up", ns=space)
        return space

    def _cable(self, one: str, one_if: str, other: str, other_if: str) -> None:
        self._cables += 1
        ends = [f"{self._prefix}a{self._cables}"[-15:], f"{self._prefix}b{self._cables}"[-15:]]
        self._sh("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, ns, name in ((ends[0], one, one_if), (ends[1], other, other_if)):
            self._sh("ip", "link", "set", end, "netns", ns, "name", name)
            self._sh("ip", "link", "set", name, "up", ns=ns)

    def _nft(self, space: str, text: str) -> None:
        self._sh("nft", "-f", "-", ns=space, text=text)

    def _sh(self, *words: str, ns: str = "", text: str | None = None) -> str:
        command = [*(namespaces.through(ns) if ns else ()), *words]
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout


def miniupnpd() -> str | None:
    """Where it is installed; None where it is not."""
    return shutil.which("miniupnpd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def why_not(kind: str = "home") -> str:
    """Why this user cannot have such a network with hosts of this kind; empty when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    needed = [("ip", "iproute2"), ("tc", "iproute2"), ("nft", "nftables")]
    for program, package in needed[: 2 if kind in ("open", "lan") else 3]:
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: apt install {package})"
    try:
        with Internet({"a": kind}) as net:
            net.shape("a", 1e9)
            return ""
    except OSError as e:
        return f"no network namespaces here: {e}"


def sweep() -> None:
    """Take down what a program that was killed has left."""
    for name in os.listdir(namespaces.FOLDER) if os.path.isdir(namespaces.FOLDER) else ():
        made = re.match(r"tn([0-9]+)[a-z]", name)
        if made and not os.path.exists(f"/proc/{made[1]}"):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _spaces(prefix: str) -> list[str]:
    found = os.listdir(namespaces.FOLDER) if os.path.isdir(namespaces.FOLDER) else []
    return sorted(name for name in found if re.fullmatch(rf"{prefix}[a-z].*", name))
