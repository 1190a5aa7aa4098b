"""Guests of a private run: strangers without an invite, who know its id, its manifest and the
addresses of its peers. One is a daemon, the others say what strangers of an open run say."""

import time
from pathlib import Path
from typing import Any

from benchmarks.firsthour.strangers import ATTACK_S, LOST, Strangers
from benchmarks.report import Report
from benchmarks.shared.loss import loss_row
from node.identity.admission import admission_token
from node.identity.invites import Invite
from node.identity.keys import Identity
from testbed.daemons.fleet import START_S, Box, Peer

WHAT = "6 a guest of a private run"


def rows(report: Report, root: Path) -> None:
    """Six rows."""
    root.mkdir(parents=True, exist_ok=True)
    box = Box(root)
    try:
        peers = box.swarm(
            (1, 1, 1),
            swarm__admission="invite",
            training__min_replicas=1,
            training__epochs=100_000,
            training__eval_every=0,
            training__rebalance_every_s=0.0,
        )
        for peer in peers[1:]:
            words = list(peer.child.arguments)
            words[words.index("--join") + 1] = invite(box, peers[0])
            peer.child.arguments = tuple(words)
        for peer in peers:
            peer.start()
        box.until_training(*peers)
        box.goes_on(3, 2 * START_S)
        intruder = box.member(1, "guest").start()
        band = Strangers(
            root / "guests",
            manifest=str(root / "swarm.toml"),
            join=list(box.doors.values()),
            below=min(p.key for p in peers),
            stages=[0, 1, 2],
            knows={p.key: [p.status().stage, list(p.status().addresses)] for p in peers},
        )
        try:
            _attack(report, box, peers, intruder, band)
            box.stop_all()
            loss_row(report, WHAT, box, peers)
        finally:
            band.end()
    finally:
        box.clean_up()


def invite(box: Box, owner: Peer) -> str:
    """For whoever holds it."""
    key = Identity.load(owner.home / "identity.key")
    run = box.manifest.run_id
    token = admission_token(key, run, None, time.time() + 3600)
    return Invite(run, key.peer_id, (box.door,), token).encode()


def _attack(report: Report, box: Box, peers: list[Peer], intruder: Peer, band: Strangers) -> None:
    box.wait("the guest to run", lambda: intruder.status().state, START_S, (intruder,))
    before = {p.label: len(p.told()) for p in peers}
    begin = box.epoch()
    since = time.monotonic()
    said: dict[str, Any] = band.do(do="attack", kind="guests", seconds=ATTACK_S)
    during = peers[0].status().epoch - begin
    seconds = time.monotonic() - since
    seen = [*band.do(do="look")["peers"], len(intruder.peers().peers) - 1]
    guests = {*band.peers, intruder.key}
    followers = [p.label for p in peers if p.status().leader in guests]
    listed = [p.label for p in peers if guests & {line.peer for line in p.peers().peers}]
    told = [t for p in peers for t in p.told()[before[p.label] :]]
    lost = [t for t in told if t.kind in LOST]
    report.add(
        f"{WHAT}: epochs lost",
        len(lost),
        "epochs",
        " ".join(sorted({t.kind for t in lost})),
        "0",
        holds=not lost,
    )
    report.add(
        f"{WHAT}: followers it won",
        len({*followers, *listed}),
        "peers",
        f"{len(followers)} follow one of {len(guests)}, {len(listed)} see one",
        "0",
        holds=not followers and not listed,
    )
    report.add(
        f"{WHAT}: words heard",
        said["sent"] - said["unheard"],
        f"of {said['sent']}",
        f"{said['accepted']} accepted; {said['heard']}"[:300],
        "0",
        holds=said["sent"] > 0 and said["sent"] == said["unheard"],
    )
    report.add(
        f"{WHAT}: peers of the run that it sees",
        max(seen),
        f"of {len(peers)}",
        f"{seen}, the last of them a daemon",
        "0",
        holds=not max(seen),
    )
    report.add(
        f"{WHAT}: epochs committed meanwhile",
        during,
        "epochs",
        f"in {seconds:.0f} s",
        "1",
        holds=during >= 1,
    )
