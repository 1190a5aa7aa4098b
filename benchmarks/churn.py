"""A swarm under steady churn: every 5 epochs a random peer is killed and a stranger joins in its
place, for 100 epochs.

    python -m benchmarks.churn [--epochs 100] [--every 5] [--seed 1] [--json -]

Eight daemons on loopback (two ends, three block stages of two). Takes about 12 minutes on 2 cores:
the same epochs once without and once with deaths. Newcomers have new identities, come by invite and
choose their stage themselves.

  commit at first attempt   share of the epochs that were committed by the first plan made for them
  ... without any repair    epochs among them that needed no repaired round and lost no peer and no
                            micro-batch
  loss ratio                held-out loss at the end, beside the quiet swarm's: same model, data,
                            seed and epochs. It has no target: this run is too short to tune it, and
                            benchmarks.proof judges the loss beside a tuned run
"""

import contextlib
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.report import Report, command_line
from benchmarks.shared.churn import Churn
from testbed.daemons.books import Books
from testbed.daemons.fleet import WORKING, Hang
from testbed.swarms.arena import Arena, arena

NODES = (2, 2, 2, 2)
FIRST_TRY = 0.95
PEER = "torchft reports 82% of the steps committed, at one failure per 6 steps on 30 replica groups"
STUCK_S = 120.0
"""Longest time without a new epoch."""
SHAPE: dict[str, Any] = {
    "model__layers": 3,
    "model__d_model": 64,
    "model__d_ff": 160,
    "model__seq_len": 64,
    "pipeline__stages": 3,
    "pipeline__micro_batch": 8,
    "training__target_batch": 512,
    "training__eval_every": 10,
    "training__eval_batches": 4,
}
"""Epochs of a few seconds, so that a newcomer, which needs ten to start, is there before many more
have died."""


@dataclass
class Ran:
    """One run: seconds, held-out loss at the end, its books, and its deaths."""

    seconds: float
    loss_val: float
    books: Books
    churn: Churn | None
    digests_equal: bool


def main() -> int:
    """Run both, print, and exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--epochs", type=int, default=100, help="epochs of each run")
    parser.add_argument("--every", type=int, default=5, help="epochs between two deaths")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of victims")
    args = parser.parse_args()
    report = Report()
    try:
        quiet = run(args.epochs, 0, args.seed)
        rough = run(args.epochs, args.every, args.seed)
        tell(report, args.epochs, args.every, quiet, rough)
    except Hang as e:
        report.add("2 hangs", True, str(e), "", "false", False)
    return report.end(args.json)


def run(epochs: int, every: int, seed: int) -> Ran:
    """Train all epochs in a new swarm; with `every` above 0, one peer dies every `every` epochs.
    Raises Hang."""
    with arena(NODES, network=False, whole=False, training__epochs=epochs, **SHAPE) as a:
        churn = Churn(a, seed)
        began = time.monotonic()
        moved = time.monotonic()
        last = -1
        due = every
        while last < epochs:
            made = max((int(e.get("epoch", 0)) for e in a.commits()), default=0)
            now = time.monotonic()
            if made > last:
                last = made
                moved = now
                if made % 10 == 0:
                    print(
                        f"epoch {made}: {len(churn.kills)} deaths, {len(a.peers)} peers, "
                        f"{now - began:.0f} s",
                        file=sys.stderr,
                    )
            if now - moved > STUCK_S:
                raise Hang(f"no epoch after {last} for {STUCK_S:.0f} s")
            if every and due <= made < epochs and churn.strike():
                due += every
            churn.mind()
            time.sleep(0.1)
        seconds = time.monotonic() - began
        epoch, loss = _last_loss(a, epochs)
        print(
            f"{epoch} epochs in {seconds:.0f} s, {len(churn.kills)} deaths, held-out loss "
            f"{loss:.4f}",
            file=sys.stderr,
        )
        # A peer that is still on its way when the run ends has nothing to compare.
        there = [p for p in a.peers.values() if p.status().state in WORKING]
        equal = a.box.agree(of=there)
        return Ran(
            seconds,
            loss,
            a.books(),
            churn if every else None,
            equal and not any(e.kind == "digest-mismatch" for e in a.read()),
        )


def _last_loss(a: Arena, epochs: int) -> tuple[int, float]:
    def found() -> tuple[int, float] | None:
        told = [e for e in a.read() if e.kind == "evaluated" and e.get("epoch") == epochs]
        return (epochs, float(told[-1].get("loss_val"))) if told else None

    return a.wait("the last evaluation", found, 60.0)


def tell(report: Report, epochs: int, every: int, quiet: Ran, rough: Ran) -> None:
    """The rows of item 2. ``every``: epochs between two deaths, as asked."""
    churn = rough.churn
    if churn is None:
        return
    _, straight, clean = rough.books.first_tries(0, epochs)
    lost = rough.books.losses()
    kills = len(churn.kills)
    share = straight / epochs
    ratio = rough.loss_val / quiet.loss_val
    load = f"{kills} of 8 peers killed, {churn.leaders} of them leading, over {epochs} epochs"
    report.add(
        "2 commit at first attempt share",
        round(share, 3),
        load,
        PEER,
        f">= {FIRST_TRY}",
        share >= FIRST_TRY,
    )
    report.add(
        "2 commit at first attempt without any repair share",
        round(clean / epochs, 3),
        "of all epochs",
        PEER,
    )
    report.add(
        "2 loss ratio to quiet run",
        round(ratio, 4),
        "churn / quiet",
        f"quiet {quiet.loss_val:.4f}",
    )
    report.add(
        "2 epochs committed and lost again",
        lost.again,
        "epochs",
        f"{lost.abandoned} abandoned before their commit",
    )
    report.add(
        "2 digests equal at the end", rough.digests_equal, "", "", "true", rough.digests_equal
    )
    least = max(1, epochs // every // 2)
    report.add(
        "2 deaths",
        kills,
        "peers",
        f"{churn.postponed} looks found nobody who could be spared",
        f"at least {least}, half of those that were due",
        holds=kills >= least,
    )
    report.add(
        "2 time ratio to quiet run",
        round(rough.seconds / quiet.seconds, 2),
        "churn / quiet",
        f"quiet {quiet.seconds:.0f} s",
    )
    if churn.arrived_s:
        report.add(
            "2 newcomer start to plan",
            round(median(churn.arrived_s), 1),
            "s, median",
            f"{len(churn.arrived_s)} newcomers",
        )
    report.add(
        "2 newcomers that gave up", len(churn.given_up), "peers", " | ".join(churn.given_up)[:300]
    )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
