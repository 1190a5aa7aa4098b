"""Attacks of strangers and bent members on live daemons: what each of them costs.

    python -m benchmarks.strangers --json -           # everything, an hour and a half on two cores
    python -m benchmarks.strangers --only 1,4 --quick

1 to 18  the attacks, by the numbers of the review that found them
table    every RPC, stream and topic is in the table of docs/protocol.md

Malformed messages are measured by ``benchmarks.fuzzing``, quiet speed by ``benchmarks.codebase``.

A live attack has a minute (with --quick half of one) after a quiet minute of the same swarm: eight
daemons of an open run, three of a private one. The attackers run on the same machine; epochs are
not judged where both sides together kept nearly all of its processors busy.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.report import Report, chosen, command_line
from benchmarks.shared.parts import FAILURES, run_part
from benchmarks.strangers import shown
from benchmarks.strangers.siege import FULL_S, QUICK_S, Siege, assault, siege
from benchmarks.strangers.table import ATTACKS, GROUNDS, Attack
from testbed.daemons.fleet import folder

PARTS = [*map(str, range(1, 19)), "table"]


def live(report: Report, root: Path, attacks: Sequence[Attack], seconds: float) -> None:
    """Run attacks of one ground, on one swarm as long as it is well after them."""
    left = list(attacks)
    tries = 0
    while left:
        ground = GROUNDS[left[0].ground]
        tries += 1
        where = root / f"{left[0].ground}-{tries}"
        with siege(where, ground) as place:
            _until_unwell(report, place, left, seconds)


def _until_unwell(report: Report, place: Siege, left: list[Attack], seconds: float) -> None:
    """Take attacks from ``left`` and run them, until one leaves the swarm unwell."""
    while left:
        attack = left.pop(0)
        name = f"{attack.number} {attack.what}"
        try:
            assault(report, place, attack, name, seconds)
        except FAILURES as e:
            report.add(f"{name} did not come to its end: {e}"[:400], 0, "", holds=False)
            return
        well = place.well
        report.add(f"{name}: the members go on afterwards", well, "", "", "true", holds=well)
        if not well:
            return


def main() -> int:
    """Run the chosen rows; exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="numbers and words, with commas")
    parser.add_argument("--quick", action="store_true", help="half the time for each")
    asked = parser.parse_args()
    report = Report()
    wanted = chosen(parser, asked.only, PARTS)
    seconds = QUICK_S if asked.quick else FULL_S
    with folder() as root:
        for name in GROUNDS:
            attacks = [a for a in ATTACKS if a.ground == name and a.number in wanted]
            try:
                live(report, root, attacks, seconds)
            except FAILURES as e:
                report.add(f"the {name} run did not come about: {e}"[:400], 0, "", holds=False)
    for number in wanted:
        run_part(report, number, partial(shown.rows, number=number))
    return report.end(asked.json)


if __name__ == "__main__":
    sys.exit(main())
