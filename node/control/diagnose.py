"""Reasons why a swarm cannot be reached, in plain words: a finding for each address, and one to
report.

The part without an event loop and libp2p; :mod:`node.control.observer` tries the addresses.
"""

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from node.control.retries import Nobody, Unanswered
from node.control.words import GONE, ahead_or_behind, clean, span
from node.core.addresses import Scope, scope
from node.core.clock import CLOCK_S
from node.core.errors import ExitCode, LocalFault, NetworkFault, Refused
from node.core.ids import PeerId, short
from node.core.version import PROTOCOLS, Protocols
from node.identity.invites import HostPort, endpoint_of, peer_of_address, scope_of
from node.reach.interfaces import interface_addresses, leaves_from
from protos.ask_pb2 import PeersAnswer

LAYERS = ("address", "name", "family", "route", "connect", "proof", "answer")
"""Steps that have to work before an answer comes, first to last; a finding names the one that
failed."""
WATCH_S = 6.5
"""Seconds of the longest watch for another user of this identity: records are refreshed every 5 s,
or every 20 s in an idle swarm."""
_NOWHERE = {4: ("198.51.100.1", "203.0.113.1"), 6: ("2001:db8::1", "3fff::1")}
"""Documentation addresses: only a default route leads to two of them. Nothing is sent there."""

_WORDS: dict[ExitCode, tuple[str, str]] = {
    ExitCode.NETWORK: (
        "no question of ours is answered there",
        "check the address with whoever gave it to you, or ask for a fresh invite",
    ),
    ExitCode.NO_ROUTE: (
        "nothing can be sent there",
        "connect this machine to a network (cable, Wi-Fi, VPN) and try again",
    ),
    ExitCode.PORT_CLOSED: (
        "the machine is there, its daemon is not, or a firewall rejects the connection",
        "check there that the daemon runs and listens on {transport} port {port}; "
        "if it has another port, ask for a fresh invite",
    ),
    ExitCode.NAME_NOT_FOUND: (
        "nobody can tell which machine is meant",
        "check the name with whoever gave it to you, and the name servers (DNS) of this machine",
    ),
    ExitCode.NO_ANSWER: (
        "packets vanish on the way, most often in a firewall or router at the other side",
        "let {transport} port {port} in there (firewall, port forwarding), or use another address",
    ),
    ExitCode.UDP_BLOCKED: (
        "UDP packets vanish on the way, in a firewall at either side",
        "let UDP out here and UDP port {port} in there, or ask for an invite with a TCP address",
    ),
    ExitCode.NO_COMMON_FAMILY: (
        "the two machines have no kind of address in common",
        "ask for an invite with an {own} address, or get {other} from your network",
    ),
    ExitCode.CLOCK_WRONG: (
        "what others sign looks expired or not yet valid here, and what we sign does so there",
        "set the clock of this machine (timedatectl set-ntp true), then try again",
    ),
    ExitCode.OTHER_SERVICE: (
        "the daemon that is looked for does not listen on this port",
        "check the port with whoever gave you the address: {transport} port {port} belongs to "
        "something else there",
    ),
    ExitCode.IDENTITY_IN_USE: (
        "two peers with one PeerId take each other's place in the swarm",
        "stop the other daemon, or give this one a key of its own with  --home DIR",
    ),
}
_LATER = (
    "somebody is there and does not answer this question",
    "try again later, or ask whoever runs it what  tutti status  says there",
)
"""Effect and fix where there was a sign of life and no answer."""
_NO_MACHINE = (
    "connect",
    ExitCode.NO_ANSWER,
    "no machine has this address, or a firewall there rejects us",
)
_FORBIDDEN = "route", ExitCode.NETWORK, "the firewall of this machine forbids it"
_REFUSALS: dict[int, tuple[str, ExitCode, str]] = {
    errno.ECONNREFUSED: (
        "connect",
        ExitCode.PORT_CLOSED,
        "connection refused: nobody listens on {transport} port {port}",
    ),
    errno.ENETUNREACH: ("route", ExitCode.NO_ROUTE, "no route to the network"),
    errno.EADDRNOTAVAIL: ("route", ExitCode.NO_ROUTE, "no route to the network"),
    errno.EHOSTUNREACH: _NO_MACHINE,
    errno.EHOSTDOWN: _NO_MACHINE,
    errno.ETIMEDOUT: _NO_MACHINE,
    errno.EPERM: _FORBIDDEN,
    errno.EACCES: _FORBIDDEN,
}
"""Layer, exit code and cause for each of the operating system's errors of a connection."""


@dataclass(frozen=True)
class Diagnosis:
    """Finding about one address, or about this machine where ``address`` is empty.

    ``layer`` is the one that failed, of ``LAYERS`` (of this machine also clock, identity, machine);
    "answer" for an address that works. ``cause``, ``effect`` and ``fix`` are sentences. ``code`` is
    the exit code; of a finding that is ``ok`` OK or, as a warning, another. ``clock_s``: the
    seconds by which this clock is ahead of the answerer's, None where that is not known. ``alive``:
    the address gave a sign of life, and may answer another time.
    """

    address: str
    layer: str
    ok: bool
    cause: str
    effect: str = ""
    fix: str = ""
    code: ExitCode = ExitCode.OK
    clock_s: float | None = None
    alive: bool = False

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of a command with this finding: OK for a warning."""
        if self.ok:
            return ExitCode.OK
        return self.code

    def document(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self) | {"code": int(self.code)}


@dataclass(frozen=True)
class Machine:
    """Addresses and routes of this machine.

    ``addresses``: interface, address and word for its scope, of every interface that is up.
    ``routes``: for IP version 4 and 6 the address from which packets to the internet leave, "" for
    no way out.
    """

    addresses: tuple[tuple[str, str, str], ...]
    routes: dict[int, str]

    @property
    def versions(self) -> frozenset[int]:
        """Versions of IP of which an interface has more than a loopback or link-local address."""
        useful = (Scope.PUBLIC.word, Scope.PRIVATE.word)
        return frozenset(_version(text) for _, text, scope in self.addresses if scope in useful)


def failed(address: str, layer: str, code: ExitCode, cause: str, **words: str) -> Diagnosis:
    """The finding for an address that does not work, or for this machine where it is empty, with
    the effect and the fix of ``code``.

    ``words``: words for the texts' fields besides transport and port.
    """
    effect, fix = (text.format(**words, **_port_words(address)) for text in _WORDS[code])
    return Diagnosis(address, layer, False, cause, effect, fix, code)


def not_tried(address: str, why: str = "") -> Diagnosis:
    """An address that was not dialled. Without a reason ``why``, the command line cannot dial it,
    but the daemon may."""
    why = why or "the command line dials TCP and QUIC only"
    if "/p2p-circuit" in address:
        why = "it leads through a relay"
    return failed(address, "address", ExitCode.NETWORK, f"not tried: {why}")


def silent(address: str, seconds: float, layer: str = "connect") -> Diagnosis:
    """An address that had said nothing after ``seconds``, while ``layer`` was waited for."""
    within = f"within {seconds:.2g} s"
    if layer == "connect" and _place(address).quic:
        return failed(address, layer, ExitCode.UDP_BLOCKED, f"no answer over UDP {within}")
    if layer == "connect":
        return failed(address, layer, ExitCode.NO_ANSWER, f"no answer {within}")
    what = "connected, but the question is not answered"
    if layer == "proof":
        what = "it accepts connections but does not prove who it is"
    return unanswered(address, layer, f"{what} {within}")


def unanswered(address: str, layer: str, cause: str) -> Diagnosis:
    """An address that gave a sign of life and no answer."""
    return Diagnosis(address, layer, False, cause, *_LATER, ExitCode.NETWORK, alive=True)


def refused(address: str, error: OSError) -> Diagnosis:
    """Finding for a connection that failed at once, by the operating system's error."""
    known = _REFUSALS.get(error.errno or 0)
    if known is None:
        return failed(address, "connect", ExitCode.NETWORK, clean(error.strerror or str(error)))
    layer, code, cause = known
    found = failed(address, layer, code, cause.format(**_port_words(address)))
    if known is _FORBIDDEN:
        return replace(found, fix="let the connection out in the firewall of this machine")
    return found


def unresolved(address: str, host: str, why: str) -> Diagnosis:
    """A name without an address."""
    return failed(address, "name", ExitCode.NAME_NOT_FOUND, f"the name {clean(host)} {why}")


def incompatible(address: str, theirs: Protocols, version: str, clock_s: float | None) -> Diagnosis:
    """A peer that answers and speaks no protocol version that is spoken here."""
    software = ""
    if version:
        software = f" (tutti {clean(version, 20)})"
    return Diagnosis(
        address,
        "answer",
        False,
        f"it speaks {theirs}{software}, this tutti {PROTOCOLS}",
        "the two cannot work together",
        PROTOCOLS.advice(theirs),
        ExitCode.PROTOCOL,
        clock_s,
    )


def no_way(address: str, host: str, here: Machine) -> Diagnosis | None:
    """Reason why this machine cannot send anything to the IP address ``host``; None if it can."""
    version = _version(host)
    if scope(host) is not Scope.LOOPBACK and version not in here.versions:
        others = [v for v in here.versions if v != version]
        if others and here.routes.get(others[0]):
            own = f"IPv{others[0]}"
            other = f"IPv{version}"
            code = ExitCode.NO_COMMON_FAMILY
            cause = f"this machine has no {other} address, only {own}"
            return failed(address, "family", code, cause, own=own, other=other)
        cause = f"this machine has no IPv{version} address and no other way out"
        return failed(address, "route", ExitCode.NO_ROUTE, cause)
    try:
        leaves_from(host)
    except OSError:
        cause = "no route to the network"
        if not here.routes.get(version):
            cause += ": this machine has no default route"
        return failed(address, "route", ExitCode.NO_ROUTE, cause)
    return None


def stranded() -> Diagnosis:
    """This machine has no way out at all."""
    cause = "this machine has no default route, neither of IPv4 nor of IPv6"
    return failed("", "route", ExitCode.NO_ROUTE, cause)


def this_machine() -> Machine:
    """Interfaces that are up, their addresses, and the ways out. Nothing is sent."""
    found = [(name, address, scope(address).word) for name, address in interface_addresses()]
    routes = {}
    for version, nowhere in _NOWHERE.items():
        try:
            routes[version] = [leaves_from(address) for address in nowhere][0]
        except OSError:
            routes[version] = ""
    return Machine(tuple(found), routes)


def verdict(findings: Sequence[Diagnosis]) -> Diagnosis:
    """The one finding to report, with its exit code.

    If an address answers: a clock that is wrong, an identity in use, else a finding that is ``ok``,
    with the code UDP_BLOCKED as a warning when UDP gets nowhere while TCP works. If none does: of
    the addresses that most people could dial the one nearest to an answer, TCP before QUIC.
    """
    of_addresses = [f for f in findings if f.address]
    answered = [f for f in of_addresses if f.ok]
    faults = [f for f in findings if not f.address and not f.ok]
    if not of_addresses:
        if faults:
            return faults[0]
        return Diagnosis("", "machine", True, "there is no address to try")
    if not answered:
        tried = [f for f in of_addresses if f.layer != LAYERS[0]] or of_addresses
        widest = min(scope_of(f.address) for f in tried)
        return max((f for f in tried if scope_of(f.address) == widest), key=_nearness)
    ahead, peers = clock_of(findings)
    if ahead is not None and abs(ahead) > CLOCK_S:
        return wrong_clock(ahead, peers)
    if faults:
        return faults[0]
    said = f"{len(answered)} of {len(of_addresses)} addresses answer"
    over_udp = [f for f in of_addresses if _place(f.address).quic]
    if over_udp and all(f.code is ExitCode.UDP_BLOCKED for f in over_udp):
        lost = over_udp[0]
        said = f"{said}, all over TCP: {over_udp[0].cause}"
        return Diagnosis("", "connect", True, said, lost.effect, lost.fix, lost.code)
    return Diagnosis("", "answer", True, said)


def clock_of(findings: Sequence[Diagnosis]) -> tuple[float | None, int]:
    """By how many seconds this clock is ahead of the middle one of the peers that told theirs.

    None when none did; and how many did.
    """
    clocks = {
        peer_of_address(f.address): f.clock_s
        for f in findings
        if f.address and f.clock_s is not None
    }
    if not clocks:
        return None, 0
    return median(clocks.values()), len(clocks)


def fault_of(chosen: Diagnosis, findings: Sequence[Diagnosis]) -> LocalFault:
    """``chosen`` as the error that ends a command, with all findings for readers of JSON."""
    return Refused(f"{chosen.cause}; {chosen.effect}", chosen.fix, chosen.code, _details(findings))


class NobodyAnswers(NetworkFault):
    """Nobody has answered a question: the cause to report, then every address. ``why``: a sentence
    to report instead of the cause."""

    def __init__(self, findings: Sequence[Diagnosis], why: str = "") -> None:
        chosen = verdict(findings)
        lines = [f"nobody answers: {why or chosen.cause}; {chosen.effect}"]
        lines += [f"{f.address}: {f.cause}" for f in findings]
        super().__init__("\n".join(lines), chosen.fix, chosen.code, _details(findings))
        self.findings = tuple(findings)

    @property
    def outcome(self) -> Unanswered | Nobody:
        """The attempt, for :class:`~node.control.retries.Retries`."""
        alive = [f for f in self.findings if f.alive]
        chosen = verdict(alive or self.findings)
        if alive:
            return Unanswered(chosen.layer == "answer", chosen.cause)
        refused = chosen.code is ExitCode.PORT_CLOSED
        silent = chosen.code in (ExitCode.NO_ANSWER, ExitCode.UDP_BLOCKED)
        return Nobody(final=not (refused or silent), refused=refused)


def _details(findings: Sequence[Diagnosis]) -> dict[str, Any]:
    return {"findings": [f.document() for f in findings]}


def identity_in_use(me: PeerId, where: str) -> Diagnosis:
    """Somebody else runs with this machine's key; ``where``: how that is known."""
    cause = f"the identity key of this home, {short(me)}, is in use elsewhere: {where}"
    return failed("", "identity", ExitCode.IDENTITY_IN_USE, cause)


def watch_identity(
    me: PeerId,
    ask: Callable[[], PeersAnswer],
    seconds: float = WATCH_S,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Diagnosis | None:
    """Find a daemon elsewhere that runs as ``me``: it answers ``ask``, or its record is refreshed
    during the watch. Return the finding, None if none is seen.

    For a home without a running daemon of its own. ``ask`` asks the swarm for its peers and may
    raise NetworkFault; it is called for the last time after ``seconds`` seconds, and only once if
    it fails or there is no record. A writer goes unnoticed if its clock is ahead of the answerer's
    by more than the age of its records: they look new at any time.
    """
    end = now() + seconds
    first = None
    last = False
    while True:
        try:
            answer = ask()
            line = next((p for p in answer.peers if p.peer == me and p.state not in GONE), None)
        except NetworkFault:
            return None
        if line is None:
            return None
        if line.path == "self":
            return identity_in_use(me, "the peer that answers has it")
        who = clean(line.name, 40) or "a peer"
        if answer.called:
            return identity_in_use(me, f"{who} of the swarm answers with it")
        if first is not None and line.seen_s < first[1] + (now() - first[0]) - 1.0:
            return identity_in_use(me, f"{who} of the swarm refreshes its record with it")
        if first is None and line.seen_s > 0.0:  # 0 may stand for less: of a clock that is ahead
            first = now(), line.seen_s
        if last:
            return None
        pause = min(1.0, end - now())
        last = pause < 1.0
        sleep(max(0.0, pause))


def wrong_clock(ahead: float, peers: int) -> Diagnosis:
    """This clock is ``ahead`` seconds ahead of the median clock of ``peers`` peers."""
    way = ahead_or_behind(ahead)
    whose = "the peer"
    if peers > 1:
        whose = f"the middle one of {peers} peers"
    cause = f"the clock of this machine is {span(abs(ahead))} {way} that of {whose} that answered"
    return replace(failed("", "clock", ExitCode.CLOCK_WRONG, cause), clock_s=ahead)


def _nearness(finding: Diagnosis) -> tuple[int, bool, bool]:
    """Rank of a finding: by the layer reached, then by an answer of any kind, then TCP first."""
    heard = finding.code not in (ExitCode.NO_ANSWER, ExitCode.UDP_BLOCKED)
    return LAYERS.index(finding.layer), heard, not _place(finding.address).quic


def _port_words(address: str) -> dict[str, str]:
    place = _place(address)
    return {"port": str(place.port), "transport": "UDP" if place.quic else "TCP"}


def _place(address: str) -> HostPort:
    return endpoint_of(address) or HostPort("dns", "", 0, False)


def _version(host: str) -> int:
    return 6 if ":" in host else 4
