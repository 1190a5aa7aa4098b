"""Connections between any two machines, and the messages when there is none: hosts in network
namespaces, real daemons.

    python -m benchmarks.reach --json -    # everything, half an hour; root, iproute2, nftables
    python -m benchmarks.reach --only 2,7

Rows are named after their question: 1 two hosts on one segment, 2 pairs of routers, 3 a swarm
behind routers, 4 joiners of one second, 5 broken networks, 6 the directory behind routers, 7 evil
relays, 8 a stalled run is not called healthy.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Report, chosen, command_line
from benchmarks.shared.parts import run_part
from benchmarks.shared.waiting import until
from testbed.daemons.fleet import START_S, WORKING, Hang
from testbed.networks.evil_relay import KINDS as EVIL
from testbed.networks.hosts import HostPeer
from testbed.networks.internet import Internet, why_not
from testbed.swarms.broken import CASES, BrokenLab
from testbed.swarms.routed import ROUTERS, boxed, daemon, founded, hosting, printed, to_it

MOVED = 64 << 20
WAY_S = 30.0
"""Asked: a proven way so soon after the start."""
SETTLE_S = 15.0
"""For a better way than the first one to be found."""
CALLED_BACK_S = 60.0
"""Within which two hosts that announce no address for gRPC are connected past libp2p."""
MISSING = "connection between"
"""Words of a status that names a pair of peers which do not reach each other."""


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--only", default="1,2,3,4,5,6,7,8", help="which of the eight")
    asked = parser.parse_args()
    parts = chosen(parser, asked.only, PARTS)
    if reason := why_not():
        print(f"this benchmark needs network namespaces: {reason}", file=sys.stderr)
        return 2
    report = Report()
    for number, one in PARTS.items():
        if number in parts:
            run_part(report, number, one)
    return report.end(asked.json)


# ------------------------------------------------------------ 1: two hosts on one segment


def segment(report: Report, root: Path) -> None:
    for name, families, lan in (
        ("IPv4", (4,), False),
        ("IPv6 only", (6,), False),
        ("mDNS, no invite", (4,), True),
    ):
        with (
            Internet({"one": "lan", "two": "lan"}, families) as net,
            boxed(root / f"{families[0]}-{lan}") as box,
        ):
            founder = daemon(box, net, "one", "start")
            box.wait(
                "the founder to train alone",
                lambda p=founder: p.status().epoch >= 1,
                2 * START_S,
                (founder,),
            )
            words = ("join", "--lan", "--yes") if lan else ("join", printed(founder), "--yes")
            began = time.monotonic()
            joiner = daemon(box, net, "two", *words)
            seconds = until(lambda p=joiner: p.status().state in WORKING, 2 * START_S, began)
            said = f"{joiner.status().reachable}; {dict(joiner.status().paths_to)}"
            report.add(
                f"1 in a plan after join, {name}", seconds, "s", said, "30 s", holds=seconds <= 30
            )


# ------------------------------------------------------------ 2: pairs of routers


def pairs(report: Report, root: Path) -> None:
    called_back = statistics.median(speed_called_back(root))
    report.add("2 called back, between two open hosts", called_back / 2**20, "MiB/s")
    relayed: list[float] = []
    for one, other in itertools.combinations_with_replacement(ROUTERS, 2):
        found = pair(root / f"{one}-{other}", one, other)
        holds = found["first_s"] <= WAY_S and found["equal"]
        past = ", past libp2p" if found["past"] else ""
        speed = f"{found['rate'] / 2**20:.0f} MiB/s"
        text = f"{found['path']}{past}, {speed}, first {found['first']}"
        report.add(
            f"2 {one} and {other}: proven way",
            found["first_s"],
            "s",
            text,
            f"{WAY_S:.0f} s, equal digest",
            holds=holds,
        )
        if found["path"] == "relayed":
            relayed.append(found["rate"])
    share = statistics.median(relayed) / called_back if relayed else 0.0
    report.add(
        "2 relayed, of the speed called back",
        share,
        "x",
        f"median of {len(relayed)} pairs",
        "at least 0.333",
        holds=share >= 1 / 3,
    )
    tries = [pair(root / f"try-{i}", "home", "home") for i in range(5)]
    punched = sum(t["path"] == "punched" for t in tries)
    when = ", ".join(f"{t['best_s']:.1f}" for t in tries)
    report.add(
        "2 home to home punched, of 5 tries",
        punched,
        "tries",
        f"after {when} s",
        "3",
        holds=punched >= 3,
    )


def pair(root: Path, one: str, other: str) -> dict[str, Any]:
    """Put two hosts behind these routers, with one public rendezvous and no setting; returns the
    first path, the best one, whether it leads past libp2p, and its throughput."""
    with Internet({"hub": "open", "one": one, "other": other}) as net:
        hub = HostPeer(net, "hub", root / "hub")
        here = HostPeer(net, "one", root / "one", join=[hub.door])
        there = HostPeer(net, "other", root / "other", join=[hub.door])
        assert here.facts
        both = ((here, there), (there, here))
        began = max(here.started, there.started)
        first = wait_for_ways(here, there, began)
        best = dict(first)
        best_s = first["seconds"]
        while time.monotonic() - began < first["seconds"] + SETTLE_S:
            now = [a.do(do="way", peer=b.peer).get("path", "") for a, b in both]
            if now != best["paths"]:
                best = {"paths": now}
                best_s = time.monotonic() - began
            time.sleep(0.3)
        past = all(a.do(do="way", peer=b.peer).get("bypass") for a, b in both)
        got = [a.do(do="fetch", peer=b.peer, bytes=MOVED) for a, b in (*both, both[0])]
        whole = {g.get("digest") for g in got if g.get("bytes") == MOVED}
        rate = (
            statistics.median(g["bytes"] / g["seconds"] for g in got if "seconds" in g)
            if whole
            else 0.0
        )
        return {
            "first_s": first["seconds"],
            "first": "/".join(first["paths"]),
            "path": worst(best["paths"]),
            "past": past,
            "best_s": best_s,
            "equal": len(whole) == 1 and all(g.get("bytes") == MOVED for g in got),
            "rate": rate,
        }


def speed_called_back(root: Path) -> list[float]:
    """Bytes a second between two open hosts that announce no address for gRPC: libp2p connects
    them, and each asks the other for a TCP connection past it."""
    with Internet({"hub": "open", "one": "open", "other": "open"}) as net:
        hub = HostPeer(net, "hub", root / "t-hub")
        only = {"settings": {"force_tunnel": True}, "join": [hub.door]}
        here, there = (HostPeer(net, n, root / f"t-{n}", **only) for n in ("one", "other"))
        assert here.facts
        wait_for_ways(here, there, here.started)
        # Until the peer has called back, libp2p carries the bytes, at another speed.
        until(
            lambda: here.do(do="way", peer=there.peer).get("bypass"),
            CALLED_BACK_S,
            time.monotonic(),
        )
        got = [here.do(do="fetch", peer=there.peer, bytes=MOVED) for _ in range(5)]
        return [g["bytes"] / g["seconds"] for g in got if "seconds" in g]


def wait_for_ways(here: HostPeer, there: HostPeer, began: float) -> dict[str, Any]:
    """Both directions proven by a ping; raises Hang after two minutes."""
    ways: list[dict[str, Any]] = []
    while time.monotonic() - began < 120:
        ways = [here.do(do="way", peer=there.peer), there.do(do="way", peer=here.peer)]
        if all("path" in way for way in ways):
            return {"seconds": time.monotonic() - began, "paths": [way["path"] for way in ways]}
        time.sleep(0.2)
    raise Hang(f"{here.name} and {there.name} never reached each other: {ways}")


def worst(paths: Sequence[str]) -> str:
    order = ("relayed", "punched", "reversed", "tunnel", "mapped", "direct")
    return min(paths, key=lambda p: order.index(p) if p in order else -1)


# ------------------------------------------------------------ 3: a swarm behind routers


def swarm_behind_routers(report: Report, root: Path) -> None:
    hosts = {
        "hub": "open",
        "relay": "open",
        "ends": "home",
        "one": "symmetric",
        "two": "noudp",
        "three": "cgnat",
    }
    with Internet(hosts) as net, boxed(root) as box:
        file, _ = founded(box, stages=2)
        hub = daemon(box, net, "hub", "bootstrap", "--swarm", str(file))
        box.wait(
            "the rendezvous",
            lambda: hub.status().healthy and "tutti join" in hub.said(),
            START_S,
            (hub,),
        )
        invite = printed(hub)
        relay = daemon(box, net, "relay", "bootstrap", "--swarm", str(file), "--join", invite)
        roles = {
            "ends": ("--role", "ends"),
            "one": ("--stage", "1"),
            "two": ("--stage", "2"),
            "three": ("--stage", "2"),
        }
        box.wait("the second relay", lambda: relay.status().healthy, START_S, (relay,))
        members = [
            daemon(box, net, name, "join", invite, "--yes", *words) for name, words in roles.items()
        ]
        began = time.monotonic()
        seconds = until(lambda: min(p.status().epoch for p in members) >= 20, 180.0, began)
        paths = "; ".join(f"{p.label}: {dict(p.status().paths_to)}" for p in members)
        report.add(
            "3 twenty epochs after the last join",
            seconds,
            "s",
            paths,
            "180 s",
            holds=seconds <= 180,
        )

        epoch = min(p.status().epoch for p in members)
        hub.kill()
        killed = time.monotonic()
        goes_on = until(lambda: min(p.status().epoch for p in members) >= epoch + 3, 60.0, killed)
        lost = epoch - min(p.status().epoch for p in members)
        report.add(
            "3 the rendezvous is killed: three more epochs after",
            goes_on,
            "s",
            "",
            "20 s",
            holds=goes_on <= 20,
        )
        report.add(
            "3 the rendezvous is killed: committed epochs lost",
            max(0, lost),
            "epochs",
            "",
            "0",
            holds=lost <= 0,
        )

        for way, name in (("upnp", "ends"), ("natpmp", "one"), ("pcp", "two")):
            net.map_ports(name, [way])
            began = time.monotonic()
            key = box.made[name].key
            watchers = [p for p in members if p.label != name]
            used = until(
                lambda w=watchers, k=key: any(to_it(p, k) == "mapped" for p in w), 90.0, began
            )
            report.add(
                f"3 a port is mapped by {way}: the direct way is used after",
                used,
                "s",
                "",
                "60 s",
                holds=used <= 60,
            )
        epoch = box.epoch()
        goes_on = until(
            lambda: min(p.status().epoch for p in members) >= epoch + 3, 60.0, time.monotonic()
        )
        report.add(
            "3 three more epochs after the changes of way",
            goes_on,
            "s",
            "",
            "20 s",
            holds=goes_on <= 20,
        )


# ------------------------------------------------------------ 4: joiners of one second


def joiners(report: Report, root: Path) -> None:
    names = [f"j{i}" for i in range(10)]
    with Internet({"hub": "lan", **dict.fromkeys(names, "lan")}) as net, boxed(root) as box:
        file, _ = founded(box, stages=3)
        hub = daemon(box, net, "hub", "start", str(file), "--role", "ends")
        box.wait(
            "the founder", lambda: hosting(hub) and "tutti join" in hub.said(), START_S, (hub,)
        )
        invite = printed(hub)
        peers = [
            daemon(box, net, name, "join", invite, "--yes", "--role", "stage") for name in names
        ]
        recorded: dict[str, float] = {}
        began = time.monotonic()
        covered_s = balanced_s = 0.0
        counts: dict[int, int] = {}
        while time.monotonic() - began < 240 and not (covered_s and balanced_s):
            now = time.monotonic()
            lines = (
                [p for p in hub.peers().peers if p.name.startswith("j")]
                if hub.status().state
                else []
            )
            for line in lines:
                recorded.setdefault(line.peer, now)
            placed = [
                p
                for p in lines
                if p.role == "stage" and p.state not in ("lost", "draining", "choosing")
            ]
            counts = {stage: sum(p.stage == stage for p in placed) for stage in (1, 2, 3)}
            if len(recorded) == len(names):
                last = max(recorded.values())
                if min(counts.values()) and not covered_s:
                    covered_s = max(0.001, now - last)
                if (
                    sum(counts.values()) == len(names)
                    and max(counts.values()) - min(counts.values()) <= 1
                ):
                    balanced_s = max(0.001, now - last)
            time.sleep(0.3)
        spread = ", ".join(f"stage {s}: {n}" for s, n in sorted(counts.items()))
        report.add(
            "4 ten joiners: every stage covered",
            covered_s,
            "s",
            spread,
            "30 s after the last record",
            holds=0 < covered_s <= 30,
        )
        report.add(
            "4 ten joiners: replicas differ by one at most",
            balanced_s,
            "s",
            spread,
            "30 s after the last record",
            holds=0 < balanced_s <= 30,
        )
        train = until(lambda: hub.status().epoch >= 1, 180.0, time.monotonic())
        report.add(
            "4 ten joiners: the first epoch is committed",
            train,
            "s",
            f"{sum(p.running for p in peers)} joiners run",
        )


# ------------------------------------------------------------ 5: broken networks


def broken(report: Report, root: Path) -> None:
    with BrokenLab(root) as lab:
        for case in CASES:
            joined, examined = case.run(lab)
            found = examined.document
            code = found["verdict"]["code"]
            seconds = max(found["seconds"], joined.seconds)
            holds = joined.code == examined.code == case.code and seconds <= 10
            text = f"join {joined.code}, doctor {examined.code}: {found['verdict']['cause']}"[:120]
            report.add(
                f"5 {case.name}",
                seconds,
                "s",
                text,
                f"exit code {int(case.code)} within 10 s",
                holds=holds and code == case.code,
            )


# ------------------------------------------------------------ 6: the directory behind routers


def directory(report: Report, root: Path) -> None:
    kinds = ("home", "symmetric", "noudp", "cgnat")
    hosts = {f"o{i}": "open" for i in range(4)} | {f"r{i}": kinds[i % 4] for i in range(16)}
    with Internet(hosts) as net:
        first = HostPeer(net, "o0", root / "o0")
        others = [
            HostPeer(net, name, root / name, join=[first.door]) for name in hosts if name != "o0"
        ]
        peers = [first, *others]
        began = time.monotonic()
        until(lambda: all(len(p.do(do="look")["others"]) == 19 for p in peers), 120.0, began)
        until(
            lambda: sum(p.do(do="look")["standing"] == "closed" for p in others) == 16,
            120.0,
            time.monotonic(),
        )
        closed = sum(p.do(do="look")["standing"] == "closed" for p in peers)
        for p in peers:
            p.tell(do="reads", seconds=40.0)
        reads = sorted(s for p in peers for s in p.hear()["reads"])
        good = sum(s < 2.0 for s in reads) / len(reads)
        said = (
            f"{len(reads)} reads, median {statistics.median(reads) * 1000:.0f} ms, longest "
            f"{reads[-1]:.2f} s, {closed} peers closed"
        )
        report.add("6 directory reads under 2 s", good, "of all", said, "0.95", holds=good >= 0.95)


# ------------------------------------------------------------ 7: evil relays


def evil_relays(report: Report, root: Path) -> None:
    for kind in EVIL:
        with Internet({"hub": "open", "bad": "open", "one": "home", "other": "symmetric"}) as net:
            hub = HostPeer(net, "hub", root / kind / "hub", reach={"relay": False})
            bad = HostPeer(net, "bad", root / kind / "bad", join=[hub.door], evil=kind)
            here, there = (
                HostPeer(net, n, root / kind / n, join=[hub.door]) for n in ("one", "other")
            )
            met = meets_evil(here, there, bad, kind)
            honest = HostPeer(net, "honest", root / kind / "honest", host="hub", join=[hub.door])
            until(
                lambda two=(here, there): all(len(p.do(do="look")["held"]) == 2 for p in two),
                90.0,
                time.monotonic(),
            )
            began = time.monotonic()
            leaked = False
            recorded = True
            refused = met
            way = dict[str, Any]()
            while time.monotonic() - began < 60:
                got = here.do(do="fetch", peer=there.peer, bytes=1 << 20)
                way = here.do(do="way", peer=there.peer)
                if got.get("bytes") == 1 << 20 and (
                    way.get("via") == honest.peer or kind in ("reads", "replays")
                ):
                    break
                refused = got.get("error", refused)
            seconds = time.monotonic() - began
            if kind in ("reads", "replays"):
                time.sleep(5)
                seen = bad.do(do="evil", active=True)
                token = way.get("token", "")
                assert token
                leaked = any(form in seen["seen"] for form in (token, token.encode().hex()))
                # A relay that has carried nothing has attacked nobody.
                recorded = bool(seen["seen"])
                if kind == "reads":
                    refused = f"{met}; {len(seen['seen']) // 2} bytes read"
                else:
                    recorded = bool(seen["answers"])
                    refused = f"answers to {len(seen['answers'])} replays: {seen['answers']} bytes"
                    leaked |= any(seen["answers"])
            text = f"{refused}"[:100]
            holds = seconds <= 10 and not leaked and recorded
            report.add(
                f"7 a relay that {kind}: replaced or refused",
                seconds,
                "s",
                text,
                "10 s, nothing read",
                holds=holds,
            )
    shares(report, root)


def meets_evil(here: HostPeer, there: HostPeer, bad: HostPeer, kind: str) -> str:
    """Wait until the evil relay carries, or would carry, what one says to the other; what came of
    it."""
    until(
        lambda: all(bad.peer in p.do(do="look")["held"] for p in (here, there)),
        90.0,
        time.monotonic(),
    )
    way: dict[str, Any] = {}

    def met() -> bool:
        way.update({"path": "", "error": ""} | here.do(do="way", peer=there.peer))
        return bool(way["error"]) if kind == "poses" else way.get("via") == bad.peer

    until(met, 60.0, time.monotonic())
    return str(way["error"] or way["path"])


def shares(report: Report, root: Path) -> None:
    """Sixteen pairs over one relay with a limit of 16 MiB/s."""
    cap = 16 << 20
    each = 4 << 20
    hosts = (
        {"hub": "open"}
        | {f"a{i}": "symmetric" for i in range(4)}
        | {f"b{i}": "symmetric" for i in range(4)}
    )
    with Internet(hosts) as net:
        hub = HostPeer(
            net, "hub", root / "s-hub", reach={"relay_rate": float(cap), "relay_circuits_each": 16}
        )
        peers = {n: HostPeer(net, n, root / f"s-{n}", join=[hub.door]) for n in hosts if n != "hub"}
        callers, callees = ([p for n, p in peers.items() if n[0] == kind] for kind in "ab")
        until(lambda: all(p.do(do="look")["held"] for p in callees), 120.0, time.monotonic())
        for a in callers:
            for b in callees:
                wait_for_ways(a, b, time.monotonic())
        began = time.monotonic()
        for a in callers:
            a.tell(do="fetch_all", peers=[b.peer for b in callees], bytes=each)
        got = [g for a in callers for g in a.hear().values()]
        seconds = time.monotonic() - began
        rates = [g["bytes"] / g["seconds"] for g in got if g.get("bytes") == each]
        total = sum(g.get("bytes", 0) for g in got) / seconds
        report.add(
            "7 sixteen circuits: whole", len(rates), "circuits", "", "16", holds=len(rates) == 16
        )
        report.add(
            "7 sixteen circuits: total rate, of the cap",
            total / cap,
            "x",
            f"{seconds:.1f} s",
            "at most 1.1",
            holds=total <= 1.1 * cap,
        )
        fair = min(rates) / max(rates) if rates else 0.0
        report.add(
            "7 sixteen circuits: smallest share, of the largest",
            fair,
            "x",
            "",
            "at least 0.7",
            holds=fair >= 0.7,
        )


# ------------------------------------------------------------ 8: what stalls is not healthy


def truth(report: Report, root: Path) -> None:
    """Public ends, one stage behind each of two routers that let nothing through to each other, and
    no relay."""
    with (
        Internet({"hub": "open", "one": "symmetric", "two": "symmetric"}) as net,
        boxed(root) as box,
    ):
        file, _ = founded(box, stages=2)
        off = ("--set", "reach.relay=false")
        hub = daemon(box, net, "hub", "start", str(file), "--role", "ends", *off)
        box.wait(
            "the founder", lambda: hosting(hub) and "tutti join" in hub.said(), START_S, (hub,)
        )
        invite = printed(hub)
        peers = [
            hub,
            *(
                daemon(box, net, n, "join", invite, "--yes", "--stage", s, *off)
                for n, s in (("one", "1"), ("two", "2"))
            ),
        ]
        for p in peers:
            box.wait(f"{p.label} to host", lambda p=p: hosting(p), 2 * START_S, (p,))
        began = time.monotonic()
        last_good = dict.fromkeys((p.label for p in peers), began)
        while time.monotonic() - began < 60:
            for p in peers:
                if p.status().healthy:
                    last_good[p.label] = time.monotonic()
            time.sleep(0.5)
        longest = max(at - began for at in last_good.values())
        named = hub.status()
        text = f"{named.reason}; fix: {named.next_step}"[:160]
        report.add(
            "8 no way between two stages: called healthy for",
            longest,
            "s",
            text,
            "15 s",
            holds=longest <= 15,
        )
        report.add(
            "8 the missing pair is named",
            int(MISSING in named.reason),
            "",
            text,
            "1",
            holds=MISSING in named.reason,
        )
        peers[1].signal(19, family=True)  # SIGSTOP: the whole peer freezes
        report.add(
            "8 epochs without a complete path",
            hub.status().epoch,
            "epochs",
            "",
            "0",
            holds=hub.status().epoch == 0,
        )
        peers[1].signal(18, family=True)


# ------------------------------------------------------------ shared


PARTS: dict[str, Callable[[Report, Path], None]] = {
    "1": segment,
    "2": pairs,
    "3": swarm_behind_routers,
    "4": joiners,
    "5": broken,
    "6": directory,
    "7": evil_relays,
    "8": truth,
}


if __name__ == "__main__":
    sys.exit(main())
