"""A benchmark in numbered parts, each a module with ``rows(report, root)``, or ``MODULE:NAME`` for
another such function of it."""

import importlib
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Report, chosen, command_line
from node.core.errors import TuttiError
from testbed.daemons.fleet import Hang, folder

FAILURES = (
    Hang,
    ModuleNotFoundError,
    OSError,
    RuntimeError,
    TuttiError,
    subprocess.SubprocessError,
)
"""Errors of one part of a benchmark, which cost its row and no other."""


def run_asked(
    description: str | None,
    package: str,
    parts: Mapping[str, Sequence[str]],
    quick: Collection[str] = (),
    drawn: Collection[str] = (),
) -> int:
    """Run the parts of ``package`` that the command line names; without ``--only`` all. Returns 0
    when every target holds. ``quick``: numbers of the parts that ``--quick`` makes shorter;
    ``drawn``: those that ``--picture FILE`` draws."""
    parser = command_line(description)
    parser.add_argument("--only", default=",".join(parts), help="some of the numbers above")
    if quick:
        parser.add_argument("--quick", action="store_true", help=f"part {', '.join(quick)} shorter")
    if drawn:
        about = f"draw part {', '.join(drawn)}, .svg or .png"
        parser.add_argument("--picture", type=Path, metavar="FILE", help=about)
    asked = parser.parse_args()
    report = Report()
    more: dict[str, dict[str, Any]] = {number: {"quick": asked.quick} for number in quick}
    for number in drawn:
        more.setdefault(number, {})["picture"] = asked.picture
    run_parts(report, package, parts, chosen(parser, asked.only, parts), more)
    return report.end(asked.json)


def run_parts(
    report: Report,
    package: str,
    parts: Mapping[str, Sequence[str]],
    named: Collection[str],
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Run the modules of ``package`` for each number in ``named``. ``more``: arguments for the
    modules of a number. A module that fails is a row that does not hold."""
    for number, name in ((number, name) for number, names in parts.items() for name in names):
        if number not in named:
            continue
        given = (more or {}).get(number, {})

        def part(report: Report, root: Path, name: str = name, given: Any = given) -> None:
            module, _, function = name.partition(":")
            found = getattr(importlib.import_module(f"{package}.{module}"), function or "rows")
            found(report, root, **given)

        run_part(report, f"{number} {name}", part)


def run_part(report: Report, name: str, part: Callable[[Report, Path], object]) -> None:
    """Run one part in a folder of its own. If it fails, that is a row that does not hold."""
    with folder() as root:
        try:
            part(report, root)
        except FAILURES as e:
            report.add(f"{name} did not come to its end: {e}"[:300], 0, "", holds=False)
