"""A peer of a live run that the owner revokes: who still listens to it, and what others lose. It
hosts the ends, so it could lead."""

import time
from pathlib import Path

from benchmarks.firsthour.strangers import LOST
from benchmarks.report import Report
from benchmarks.shared.loss import loss_row
from testbed.daemons.books import COMMITTED, CONTRIBUTED
from testbed.daemons.fleet import START_S, Box, Peer

WHAT = "6 a revoked peer"
WITHIN_S, AFTER_S = 10.0, 30.0
"""Until when everybody refuses it; how long it is watched afterwards."""


def rows(report: Report, root: Path) -> None:
    """Five rows."""
    root.mkdir(parents=True, exist_ok=True)
    box = Box(root)
    try:
        peers = box.swarm(
            (2, 2, 2),
            training__epochs=100_000,
            training__eval_every=0,
            training__rebalance_every_s=0.0,
        )
        for peer in peers:
            peer.start()
        box.until_training(*peers)
        box.goes_on(3, 2 * START_S)
        revoke(report, box, peers[1], [p for p in peers if p is not peers[1]])
        box.stop_all()
        loss_row(report, WHAT, box, peers)
    finally:
        box.clean_up()


def revoke(report: Report, box: Box, victim: Peer, others: list[Peer]) -> None:
    """The first of ``others`` is the owner's."""
    before = {p.label: len(p.told()) for p in [victim, *others]}
    done = box.tutti("swarm", "revoke", victim.key, home=others[0].label)
    begun = time.time()
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    time.sleep(AFTER_S)
    told = {p.label: p.told()[before[p.label] :] for p in [victim, *others]}
    # Commits are told by leaders only, and the victim may be none.
    given = [t.at - begun for t in told[victim.label] if t.kind == CONTRIBUTED]
    theirs = [t.at - begun for t in told[others[0].label] if t.kind == COMMITTED]
    later = sum(at > WITHIN_S for at in theirs)
    lost = [t for p in others for t in told[p.label] if t.kind in LOST]
    followers = [p.label for p in others if p.status().leader == victim.key]
    last = max(given, default=0.0)
    report.add(
        f"{WHAT}: its last epoch after the owner's word",
        last,
        "s",
        f"{len(given)} epochs with it since then",
        f"at most {WITHIN_S:g}",
        holds=last <= WITHIN_S,
    )
    report.add(
        f"{WHAT}: followers it has",
        len(followers),
        "peers",
        " ".join(followers),
        "0",
        holds=not followers,
    )
    report.add(
        f"{WHAT}: epochs that the others lost",
        len(lost),
        "epochs",
        " ".join(sorted({t.kind for t in lost})),
        "0",
        holds=not lost,
    )
    report.add(
        f"{WHAT}: epochs that the others committed later",
        later,
        "epochs",
        f"in {AFTER_S - WITHIN_S:g} s",
        "1",
        holds=later >= 1,
    )
