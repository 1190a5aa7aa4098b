"""Real daemons under real faults: the cost of each fault for a swarm of eight (two ends, three
block stages of two).

    python -m benchmarks.chaos [--quick | --scenario NAME ...] [--json -]

All scenarios take about 20 minutes on 2 cores, --quick 4, a single one 2. Needs root for network
namespaces. One swarm is brought back to full strength between scenarios: all eight in one plan,
digests equal. Figures of a scenario:

  epochs_lost      epochs that had been committed and were committed again, and epochs abandoned or
                   begun anew
  samples_lost     samples that were neither counted nor handed back to the order of samples
  samples_double   samples handed out twice, or counted more than once by a stage
  detect_s         from the fault to the first event of a peer it did not strike that names the
                   victim or takes its place
  recover_s        from detection (from the fault where nobody need notice) to the next commit
  digests_equal    the replicas of every stage agree at the end, and no digest differed meanwhile
  loss_val_ratio   held-out loss afterwards, over a quiet run's after equally many epochs
  full_s           from the end of the fault to full strength (restarts included)

The quiet run is the same model, data and seed in one process without a network, which computes what
an undisturbed swarm does; how well the swarm agrees with it before the first fault is a row of its
own. Every wait has a bound: a scenario that exceeds one is a row that says so, and the next one
gets a fresh swarm.
"""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Report, command_line
from testbed.daemons.books import Losses
from testbed.daemons.fleet import Hang
from testbed.daemons.limits import Unavailable
from testbed.networks.wan import why_not
from testbed.swarms.arena import Arena, arena
from testbed.swarms.scenarios import NODES, QUICK, SCENARIOS, SHAPE, SMALL_DISK, Scenario, Strike

ITEM = 1
NOTICE_S = 60.0
"""Seconds without a notice and a commit after which a scenario hangs."""
RATIO = 1.03


@dataclass
class Outcome:
    """One scenario's figures; None: not known."""

    scenario: str
    hangs: bool = False
    epochs_lost: int | None = None
    again: int | None = None
    samples_lost: float | None = None
    samples_double: float | None = None
    detect_s: float | None = None
    recover_s: float | None = None
    digests_equal: bool = False
    loss_val_ratio: float | None = None
    full_s: float | None = None
    epoch: int = 0
    loss_val: float = 0.0
    seen: str = ""
    notes: str = ""


def main() -> int:
    """Run the scenarios, print a table and the rows; exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--scenario",
        action="append",
        choices=[s.name for s in SCENARIOS],
        help="only this one; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument(
        "--keep",
        metavar="DIR",
        type=Path,
        help="leave the daemons' files there, a directory for each swarm",
    )
    args = parser.parse_args()
    if reason := why_not():
        print(f"cannot run: {reason}", file=sys.stderr)
        return 2
    names = args.scenario or (QUICK if args.quick else [s.name for s in SCENARIOS])
    chosen = [s for s in SCENARIOS if s.name in names]
    report = Report()
    quiet = Outcome("before the first fault")
    outcomes = list(play(chosen, quiet, args.keep))
    compare([quiet, *outcomes])
    share = quiet.loss_val_ratio
    report.add(
        f"{ITEM} quiet loss_val_ratio",
        share,
        "swarm / one process",
        "",
        "within 1%",
        share is not None and abs(share - 1) < 0.01,
    )
    for scenario, outcome in zip(chosen, outcomes, strict=True):
        judge(report, scenario, outcome)
    print(table(outcomes), file=sys.stderr)
    return report.end(args.json, scenarios=[asdict(o) for o in outcomes])


def play(chosen: Sequence[Scenario], quiet: Outcome, keep: Path | None = None) -> Iterator[Outcome]:
    """The scenarios one after the other, in one swarm while that stays whole. ``quiet`` gets the
    loss before the first."""
    left = list(chosen)
    number = 0
    while left:
        number += 1
        try:
            with arena(
                NODES, home=keep and (keep / str(number)).absolute(), disks=_disks(left), **SHAPE
            ) as a:
                if not quiet.epoch:
                    quiet.epoch, quiet.loss_val = a.held_out(0.0, 120.0)
                while left:
                    outcome = run(a, left.pop(0))
                    yield outcome
                    if outcome.hangs:
                        break
        except Hang as e:
            if not left:
                return
            yield Outcome(left.pop(0).name, hangs=True, notes=f"the swarm did not start: {e}")


def run(a: Arena, scenario: Scenario) -> Outcome:
    """One scenario in a swarm that is whole, and back to that."""
    outcome = Outcome(scenario.name)
    print(f"\n== {scenario.name}: {scenario.says}", file=sys.stderr, flush=True)
    strike = None
    try:
        a.heal()
        before = a.books().losses()
        strike = scenario.do(a)
        strike.hold()
        strike.undo()
        _watch(a, scenario, strike, outcome)
        outcome.full_s = round(a.heal(), 1)
        outcome.epoch, outcome.loss_val = a.held_out(time.time(), 60.0)
        outcome.digests_equal = a.box.agree()
        _settle(a, strike, before, outcome)
    except Unavailable as e:
        outcome.notes = f"not possible here: {e}"
        return outcome
    except Hang as e:
        outcome.hangs = True
        outcome.notes = str(e)
        print(a.box.story(), file=sys.stderr)
    if strike is not None:
        outcome.notes = " ".join(
            [outcome.notes, *(f"{k} {v}" for k, v in strike.notes.items())]
        ).strip()
    print(f"   {json.dumps(asdict(outcome))}", file=sys.stderr, flush=True)
    return outcome


def _watch(a: Arena, scenario: Scenario, strike: Strike, outcome: Outcome) -> None:
    """Find the notice, if there should be one, and the commit after it, among the events; wait if
    they have not come yet."""
    keys = {a.key(label) for label in strike.victims}
    struck = () if scenario.twins else strike.victims
    since = strike.at
    if scenario.detect_s is not None:
        notice = a.wait(
            "anybody to notice", lambda: a.books().first_notice(strike.at, struck, keys), NOTICE_S
        )
        outcome.detect_s = round(notice.at - strike.at, 2)
        outcome.seen = f"{notice.kind} by {notice.who}"
        since = notice.at
    commit = a.wait("the next commit", lambda: a.books().next_commit(since, strike.apart), NOTICE_S)
    outcome.recover_s = round(commit.at - since, 2)


def _settle(a: Arena, strike: Strike, before: Losses, outcome: Outcome) -> None:
    books = a.books()
    lost = books.losses().since(before)
    outcome.again = lost.again
    outcome.epochs_lost = lost.epochs
    accounted = books.accounted(strike.at, a.sequence)
    doubled = books.counted_twice(strike.at, a.sequence)
    if accounted is not None:
        outcome.samples_lost = accounted[0]
        outcome.samples_double = None if doubled is None else accounted[1] + doubled
    differed = [e for e in books.events if e.kind == "digest-mismatch" and e.at >= strike.at]
    outcome.digests_equal = outcome.digests_equal and not differed
    outcome.notes = (
        f"{outcome.notes} {len(differed)} digests differed" if differed else outcome.notes
    )


def compare(outcomes: Sequence[Outcome]) -> None:
    """Fill in the loss over the quiet run's loss after equally many epochs."""
    wanted = sorted({o.epoch for o in outcomes if o.epoch})
    if not wanted:
        return
    print(f"\n== the quiet run: {wanted[-1]} epochs in one process", file=sys.stderr, flush=True)
    found = quiet_losses(wanted)
    for outcome in outcomes:
        if outcome.epoch:
            outcome.loss_val_ratio = round(outcome.loss_val / found[outcome.epoch], 4)


def quiet_losses(epochs: Sequence[int]) -> dict[int, float]:
    """Held-out loss of the undisturbed run after each of these epochs (ascending)."""
    import torch

    from node.identity.keys import Identity
    from node.manifest import Manifest
    from testbed.daemons.fleet import signed
    from testbed.reference.swarm import Reference

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        alone = Reference(Manifest.parse(signed(Identity.ephemeral(), SHAPE)), Path(home))
        done = 0
        found = {}
        for epoch in epochs:
            for _ in alone.train(epoch - done):
                pass
            done, found[epoch] = epoch, alone.evaluate()
    return found


def judge(report: Report, scenario: Scenario, o: Outcome) -> None:
    """The rows of one scenario with their targets."""

    def row(what: str, value: Any, unit: str, target: str = "", holds: bool | None = None) -> None:
        report.add(
            f"{ITEM} {o.scenario} {what}",
            value,
            unit,
            o.seen if what == "detect_s" else "",
            target,
            holds,
        )

    if o.notes.startswith("not possible"):
        report.unmeasured(f"{ITEM} {o.scenario} hangs", "false", o.notes)
        return
    row("hangs", o.hangs, o.notes, "false", not o.hangs)
    if o.hangs:
        return
    if scenario.again is None:
        row(
            "epochs_lost", o.epochs_lost, f"epochs, of them {o.again} of the smaller side's history"
        )
    else:
        most = (
            None
            if scenario.abandoned is None or o.epochs_lost is None
            else scenario.again + scenario.abandoned
        )
        fine = (
            most is not None and (o.epochs_lost or 0) <= most and (o.again or 0) <= scenario.again
        )
        row(
            "epochs_lost",
            o.epochs_lost,
            f"epochs, {o.again} of them committed before",
            f"<= {most}, {scenario.again}",
            fine,
        )
    row("samples_lost", o.samples_lost, "samples", "0", o.samples_lost == 0)
    row("samples_double", o.samples_double, "samples", "0", o.samples_double == 0)
    if scenario.detect_s is not None:
        fine = o.detect_s is not None and o.detect_s < scenario.detect_s
        row("detect_s", o.detect_s, "s", f"< {scenario.detect_s:g}", fine)
    if scenario.recover_s is None:
        row("recover_s", o.recover_s, "s, with the time daemons need to start")
    else:
        fine = o.recover_s is not None and o.recover_s <= scenario.recover_s
        row("recover_s", o.recover_s, "s", f"<= {scenario.recover_s:g}", fine)
    row("digests_equal", o.digests_equal, "", "true", o.digests_equal)
    near = o.loss_val_ratio is not None and o.loss_val_ratio <= RATIO
    row("loss_val_ratio", o.loss_val_ratio, f"after {o.epoch} epochs", f"<= {RATIO}", near)
    row("full_s", o.full_s, "s to full strength")


def table(outcomes: Sequence[Outcome]) -> str:
    """For people."""
    heads = (
        "scenario",
        "lost",
        "again",
        "samples",
        "double",
        "detect",
        "recover",
        "digests",
        "loss",
        "full",
        "seen",
    )
    lines: list[tuple[str, ...]] = [heads]
    for o in outcomes:
        if o.hangs:
            lines.append((o.scenario, "HANGS", *[""] * 8, o.notes[:60]))
            continue
        cells = (
            o.epochs_lost,
            o.again,
            o.samples_lost,
            o.samples_double,
            o.detect_s,
            o.recover_s,
            o.digests_equal,
            o.loss_val_ratio,
            o.full_s,
        )
        lines.append(
            (
                o.scenario,
                *(
                    "?" if c is None else f"{c:g}" if isinstance(c, float) else str(c)
                    for c in cells
                ),
                o.seen or o.notes[:60],
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _disks(scenarios: Sequence[Scenario]) -> tuple[str, ...]:
    return (SMALL_DISK,) if any(s.name == "disk-full" for s in scenarios) else ()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
