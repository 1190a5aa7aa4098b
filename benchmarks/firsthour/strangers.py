"""Strangers in a live open swarm of eight daemons: what each of their attacks costs, in epochs and
in peers that are not listened to."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import bent
from benchmarks.report import Report
from benchmarks.shared.loss import loss_row
from node.consensus.election import RIPE_S
from testbed.daemons.fleet import REPOSITORY, START_S, Box, Peer

KINDS = {
    "term": "plans of term 2^62",
    "no-paths": "plans without micro-batches",
    "tokens": "a history of 2^53 tokens",
    "leads": "a ground key that claims to lead",
    "forged": "forged certificates",
    "replays": "plans of before and their certificates, replayed",
}
NODES = (2, 3, 3)
ATTACK_S = 20.0
GIVEN_UP = ("epoch-abandoned", "epoch-uncertain")
"""Events of an epoch that ended without a commit, at its leader."""
LOST = (
    *GIVEN_UP,
    "went-back",
    "stage-fell-back",
    "undone-counted",
    "history-changed",
    "history-given-up",
    "run-finished",
)
"""Events of honest daemons that mean an epoch lost, or all of them."""


class Strangers:
    """A process of :mod:`benchmarks.peers.stranger`."""

    def __init__(self, home: Path, **asked: Any) -> None:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._errors = home / "stderr"
        with self._errors.open("wb") as err:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.peers.stranger",
                    json.dumps({"home": str(home), **asked}),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                cwd=REPOSITORY,
            )
        self.peers: list[str] = self._read()["peers"]

    def do(self, **asked: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._read()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the strangers ended: {self._errors.read_text()[-1500:]}")
        return json.loads(line)


def rows(report: Report, root: Path, number: str = "7") -> None:
    """``number``: that the names of the rows begin with."""
    box = Box(root)
    try:
        peers = box.swarm(
            NODES, training__epochs=100_000, training__eval_every=0, training__rebalance_every_s=0.0
        )
        peers[-1].child.through = bent.through("leaks")
        for peer in peers:
            peer.start()
        box.until_training(*peers)
        box.goes_on(3, 2 * START_S)
        began = time.monotonic()
        box.wait(
            "peers that have worked with each other",
            lambda: time.monotonic() - began > 1.5 * RIPE_S,
            3 * RIPE_S,
        )
        with strangers(box, peers, "yesterday") as spy:
            wait_to_see(box, spy)
            if spy.do(do="keep", leaked=str(peers[-1].home / "leaked"))["kept"] < 0:
                raise RuntimeError("no plan of the honest leader came with a certificate")
            box.goes_on(3, 2 * START_S)
            for kind, what in KINDS.items():
                if kind == "replays":
                    attack(report, box, peers, spy, kind, f"{number} {what}")
                    continue
                with strangers(box, peers, kind) as band:
                    wait_to_see(box, band)
                    attack(report, box, peers, band, kind, f"{number} {what}")
        box.digests_equal()
        box.stop_all()
        loss_row(report, f"{number} all strangers", box, peers)
    finally:
        box.clean_up()


@contextlib.contextmanager
def strangers(box: Box, peers: Sequence[Peer], label: str) -> Iterator[Strangers]:
    """One at the ends, with a PeerId below all that are there, and one in each block stage."""
    below = min(p.key for p in peers if p.label in box.doors)
    made = Strangers(
        box.root / f"strangers-{label}",
        manifest=str(box.root / "swarm.toml"),
        join=list(box.doors.values()),
        below=below,
        stages=list(range(len(NODES))),
    )
    try:
        yield made
    finally:
        made.end()


def wait_to_see(box: Box, band: Strangers) -> None:
    box.wait(
        "strangers that see the swarm",
        lambda: min(band.do(do="look")["peers"]) >= sum(NODES),
        START_S,
    )


def attack(
    report: Report, box: Box, peers: Sequence[Peer], band: Strangers, kind: str, what: str
) -> None:
    """One kind of attack, and the epochs around it; ``what``: how its rows begin."""
    before = {p.label: len(p.told()) for p in peers}
    begin = box.epoch()
    since = time.monotonic()
    said = band.do(do="attack", kind=kind, seconds=ATTACK_S, whom=sorted(p.key for p in peers))
    followers = [p.label for p in peers if p.status().leader in band.peers]
    during = box.epoch() - begin
    seconds = time.monotonic() - since
    box.goes_on(3)
    told = [t for p in peers for t in p.told()[before[p.label] :]]
    lost = [t for t in told if t.kind in LOST]
    epochs = len([t for t in lost if t.kind in GIVEN_UP])
    worse = [t for t in lost if t.kind not in GIVEN_UP]
    leaders = [t for t in told if t.kind == "leading"]
    banned = {t.get("peer") for t in told if t.kind == "banned"}
    honest = {p.key for p in peers}
    words = (
        f"{said['sent']} words, {said['accepted']} accepted, {said['refused']} refused, "
        f"{said['unheard']} not heard"
    )
    report.add(
        f"{what}: epochs lost beyond the one under way",
        max(0, epochs - 1) + len(worse),
        "epochs",
        f"{words}; {epochs} epochs given up, {len(leaders)} changes of leader "
        f"{sorted({t.kind for t in worse})}",
        "0",
        holds=epochs <= 1 and not worse and said["sent"] > said["unheard"],
    )
    report.add(
        f"{what}: followers won",
        len(followers),
        "peers",
        " ".join(followers),
        "0",
        holds=not followers,
    )
    wronged = sorted(str(p)[-6:] for p in banned & honest)
    report.add(
        f"{what}: peers banned that are no strangers",
        len(wronged),
        "peers",
        f"{len(banned - honest)} strangers of {len(band.peers)} banned {wronged or ''}".strip(),
        "0",
        holds=not wronged,
    )
    report.add(
        f"{what}: epochs committed meanwhile",
        during,
        "epochs",
        f"in {seconds:.0f} s",
        "1",
        holds=during >= 1,
    )
