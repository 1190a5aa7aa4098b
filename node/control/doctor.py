"""Faults between this machine and a swarm: its own network, the swarm's addresses, clock, key."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf import json_format

from node.control.diagnose import (
    WATCH_S,
    Diagnosis,
    Machine,
    clock_of,
    stranded,
    this_machine,
    verdict,
    watch_identity,
)
from node.control.words import ahead_or_behind, clean, span
from node.core.clock import CLOCK_S
from node.core.ids import PeerId, named
from node.core.numbers import several
from node.identity.invites import peer_of_address
from protos.ask_pb2 import Ask, AskPeers, AskPing, PeersAnswer
from protos.control_pb2 import ReachReport

LIMIT_S = 9.5
"""A whole examination, in seconds."""
ASKING_S = 0.7
"""Asking a peer that has answered before, in seconds."""


@dataclass(frozen=True)
class Checkup:
    """Findings of an examination, and the seconds it took."""

    machine: Machine
    findings: tuple[Diagnosis, ...]
    verdict: Diagnosis
    seconds: float

    @property
    def clock_s(self) -> float | None:
        """Seconds by which this clock is ahead of the median clock of the peers that answered."""
        return clock_of(self.findings)[0]


def examine(
    addresses: Sequence[str],
    *,
    me: PeerId | None = None,
    admission: bytes = b"",
    seed: bytes | None = None,
    first: bool = False,
    seconds: float = LIMIT_S,
) -> Checkup:
    """Try ``addresses`` (multiaddrs of peers), and look for further faults once one answers.

    ``me``: the PeerId of this home, to find a daemon elsewhere that runs with it; None: do not
    look, for a daemon runs here. ``admission`` and ``seed``: the token for a private swarm, and the
    key to ask with. ``first``: be content with the first address that answers. Takes ``seconds`` at
    most. Raises UsageFault for text that is no multiaddr of a peer.
    """
    begin = time.monotonic()
    machine = this_machine()

    def left(most: float) -> float:
        return max(0.1, min(most, begin + seconds - time.monotonic()))

    findings: list[Diagnosis] = []
    if addresses:
        from node.control.observer import PATIENCE_S, ask_first, survey

        ping = Ask(ping=AskPing())
        whom = Ask(peers=AskPeers(admission=admission))
        heard = survey(addresses, [ping, whom], left(PATIENCE_S), seed, first=first)
        answered = [h for h in heard if h.good]
        if first and answered:
            heard = answered  # the others were given up
            told = {peer_of_address(h.finding.address) for h in heard}
            others = [a for a in addresses if peer_of_address(a) not in told]
            if others and any(abs(h.finding.clock_s or 0.0) > CLOCK_S for h in heard):
                # If others can be asked, one peer does not decide which of two clocks is wrong.
                heard += survey(others, [ping], left(PATIENCE_S), seed)
        findings = [h.finding for h in heard]
        if me is not None and answered:
            place = answered[0].finding.address
            known = [answered[0].answers[1].peers]
            calling = Ask(peers=AskPeers(admission=admission, call=me))

            def peers() -> PeersAnswer:
                # The first answer was not held up by a call, which takes its time where nobody is.
                if known:
                    return known.pop()
                return ask_first([place], calling, left(3.0), seed).peers

            in_use = watch_identity(me, peers, left(WATCH_S + ASKING_S) - ASKING_S)
            if in_use is not None:
                findings.append(in_use)
    elif not any(machine.routes.values()):
        findings = [stranded()]
    return Checkup(machine, tuple(findings), verdict(findings), time.monotonic() - begin)


def beside_peers(checkup: Checkup, report: ReachReport) -> Checkup:
    """The findings, adjusted to the connections of the daemon that runs here: connected peers show
    that no default route is needed, so its lack is only a note."""
    connected = sum(bool(way.path) for way in report.ways)
    chosen = checkup.verdict
    if chosen.ok or chosen != stranded() or not connected:
        return checkup
    cause = f"{chosen.cause}; {several(connected, 'peer')} connected all the same"
    effect = "peers in other networks cannot be reached"
    return replace(checkup, verdict=replace(chosen, ok=True, cause=cause, effect=effect))


def daemon_lines(report: ReachReport) -> list[str]:
    """Lines for people: how others reach the daemon that runs here, and its attempts to reach each
    of them."""
    ports = ", ".join(f"{name} {port}" for name, port in sorted(report.ports.items()))
    lines = [f"the daemon here: {report.reachable}", f"  {'ports':10} {ports}"]
    lines += [f"  {'address':10} {clean(address)}" for address in report.addresses]
    lines += [f"  {'seen at':10} {clean(address)}" for address in report.seen]
    names = {way.peer: clean(way.name, 16) for way in report.ways}

    def who(peer: str) -> str:
        return named(PeerId(clean(peer, 80)), names.get(peer, ""))

    lines += [f"  {'relay':10} {who(relay)}" for relay in report.relays]
    lines += [
        f"  {'router':10} {way}: {clean(why) or 'maps the ports'}"
        for way, why in sorted(report.mapping.items())
    ]
    if report.lan:
        lines.append(f"  {'LAN':10} no discovery: {clean(report.lan)}")
    lines += [
        f"  {'start peer':10} {clean(a)}: {clean(why) or 'connected'}"
        for a, why in sorted(report.bootstrap.items())
    ]
    for way in report.ways:
        via = ""
        if way.via:
            via = f" by {who(way.via)}"
        proven = ""
        if way.proven_s:
            proven = f"   {way.rtt_s * 1000:.0f} ms, proven {span(way.proven_s)} ago"
        lines.append(
            f"  {'peer':10} {who(way.peer)}, {clean(way.standing, 8)}: "
            f"{way.path or 'not reached'}{via}{proven}"
        )
        lines += [
            f"  {'':10}   {name}: {clean(why, 120) or 'works'}"
            for name, why in sorted(way.tried.items())
        ]
    return lines


def daemon_document(report: ReachReport) -> dict[str, Any]:
    """The same as JSON-ready values."""
    return json_format.MessageToDict(report, preserving_proto_field_name=True)


def checkup_document(checkup: Checkup) -> dict[str, Any]:
    """JSON-ready values: machine, findings, verdict and seconds."""
    machine = checkup.machine
    return {
        "machine": {
            "addresses": [
                {"interface": name, "address": address, "scope": scope}
                for name, address, scope in machine.addresses
            ],
            "routes": {f"ipv{version}": way or None for version, way in machine.routes.items()},
            "clock_s": checkup.clock_s,
        },
        "findings": [finding.document() for finding in checkup.findings],
        "verdict": checkup.verdict.document() | {"exit_code": int(checkup.verdict.exit_code)},
        "seconds": round(checkup.seconds, 2),
    }


def checkup_lines(checkup: Checkup) -> list[str]:
    """For people, 80 columns wide where addresses allow it."""
    machine = checkup.machine
    chosen = checkup.verdict
    lines = ["this machine"]
    lines += [f"  {name:10} {address:28} {scope}" for name, address, scope in machine.addresses]
    for version, way in machine.routes.items():
        leaves = "no way out"
        if way:
            leaves = f"leaves from {way}"
        lines.append(f"  IPv{version:<7} {leaves}")
    if checkup.clock_s is not None:
        way = ahead_or_behind(checkup.clock_s)
        lines.append(f"  {'clock':10} {span(abs(checkup.clock_s))} {way} those that answered")
    of_addresses = [f for f in checkup.findings if f.address]
    if of_addresses:
        lines.append("addresses of the swarm")
    for finding in of_addresses:
        mark = "ok" if finding.ok else finding.layer
        lines += [f"  {mark:10} {finding.address}", f"  {'':10} {finding.cause}"]
    mark = "fault"
    if chosen.ok:
        mark = "note" if chosen.code else "ok"
    lines.append(f"{mark:12} {chosen.cause}")
    advice = {"effect": chosen.effect, "fix": chosen.fix}
    lines += [f"  {label:10} {text}" for label, text in advice.items() if text]
    return lines
