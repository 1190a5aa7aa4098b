"""The demo as a newcomer starts it: seconds to the first committed epoch and to the end, held-out
loss, shares of the replicas; and a run in which a peer is killed and replaced.

    python -m benchmarks.demo [--runs 5] [--json -]

Every run is a ``tutti demo`` of its own, without a page, with the settings of the demo.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.report import ROOT, Report, command_line

FIRST_S = 15.0
WHOLE_S = 150.0
LOSS = 1.25
"""Nats per byte of held-out text."""
LONGEST_S = 1200.0
"""Seconds after which a run is ended. The slowest machine so far took 240."""


def main() -> int:
    """Print all; exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs without a kill")
    asked = parser.parse_args()
    report = Report()
    try:
        whole(report, [run() for _ in range(asked.runs)])
        killed(report, run("--kill"))
    except (OSError, subprocess.SubprocessError, ValueError) as e:
        report.add(f"6 the demo did not come to its end: {e}"[:300], 0, "", holds=False)
    return report.end(asked.json)


def run(*words: str) -> dict[str, Any]:
    """The outcome of one demo. Raises CalledProcessError, TimeoutExpired or ValueError where it
    has none."""
    done = subprocess.run(
        [sys.executable, "cli.py", "demo", "--json", "--page", "never", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def whole(report: Report, runs: Sequence[dict[str, Any]]) -> None:
    """Rows of runs to the last epoch."""
    first = [run["first_epoch_seconds"] for run in runs]
    seconds = [run["seconds"] for run in runs]
    losses = [run["loss_val"] for run in runs]
    report.add(
        "6 seconds from the start to the first committed epoch",
        statistics.median(first),
        "s",
        spread(first),
        f"at most {FIRST_S:g}",
        statistics.median(first) <= FIRST_S,
    )
    report.add(
        "6 seconds from the start to the end",
        statistics.median(seconds),
        "s",
        f"{spread(seconds)}; {runs[0]['epochs']} epochs, {runs[0]['tokens']:,} tokens",
        f"at most {WHOLE_S:g}",
        statistics.median(seconds) <= WHOLE_S,
    )
    report.add(
        "6 held-out loss at the end",
        statistics.median(losses),
        "nats per byte",
        f"{spread(losses, 3)}; {statistics.median(run['loss_first'] for run in runs):.2f} at first",
        f"at most {LOSS:g}",
        round(statistics.median(losses), 2) <= LOSS,
    )
    sound = [run["digests_equal"] and run["compared"] > 0 and not run["failures"] for run in runs]
    report.add(
        "6 runs whose replicas have the same bits at the end, without a failure",
        sum(sound),
        "runs",
        f"of {len(runs)}",
        "all",
        all(sound),
    )
    least = [lesser_share(run["work"]) for run in runs]
    report.add(
        "6 work of the less busy replica over that of its sibling, least of all stages",
        statistics.median(least),
        "ratio",
        spread(least, 2),
    )


def killed(report: Report, outcome: dict[str, Any]) -> None:
    """Rows of the run with a kill."""
    report.add(
        "6 with --kill: seconds from the kill until the replacement works",
        outcome["replaced_in_s"],
        "s",
        f"{outcome['killed']} was killed; {outcome['epochs']} epochs in "
        f"{outcome['seconds']:.0f} s, held-out loss {outcome['loss_val']:.3f}",
        "it works",
        outcome["replaced_in_s"] > 0 and outcome["digests_equal"],
    )


def lesser_share(work: dict[str, float]) -> float:
    """The smallest share of a replica over that of the busiest one at its stage. ``work``: shares
    by label, such as ``stage-1-0``."""
    stages: dict[str, list[float]] = {}
    for label, share in work.items():
        stages.setdefault(label.rpartition("-")[0], []).append(share)
    return min(min(shares) / max(shares) for shares in stages.values())


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Least and most of some values, as text."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f} in {len(values)} runs"


if __name__ == "__main__":
    sys.exit(main())
