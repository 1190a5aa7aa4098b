"""One object at the end of every benchmark: ``{commit, machine, results: [{name, value, unit, peer,
target, holds}]}``."""

import json
import os
import platform
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Row:
    """A figure. `peer`: the figure it was measured beside; `target`: the requirement; `holds` None:
    there is no requirement."""

    name: str
    value: Any
    unit: str
    peer: str = ""
    target: str = ""
    holds: bool | None = None


@dataclass
class Report:
    """Collects rows; prints them for people as they come, and as JSON at the end."""

    rows: list[Row] = field(default_factory=list)

    def add(self, *row: Any, **named: Any) -> Row:
        """One more :class:`Row`, said at once on stderr."""
        made = Row(*row, **named)
        self.rows.append(made)
        mark = {True: "holds", False: "DOES NOT HOLD", None: ""}[made.holds]
        value = f"{made.value:.4g}" if isinstance(made.value, float) else made.value
        print(
            f"{made.name}: {value} {made.unit}  {made.peer}  {made.target} {mark}".rstrip(),
            file=sys.stderr,
            flush=True,
        )
        return made

    def end(self, where: str | None, **more: Any) -> int:
        """Write it; the exit code: 0 when every target holds."""
        self.write(where, **more)
        return 0 if all(row.holds is not False for row in self.rows) else 1

    def write(self, where: str | None, **more: Any) -> None:
        """``-``: one JSON line on stdout; a path: that file; None: nothing. ``more``: other fields
        of the object."""
        if where is None:
            return
        text = json.dumps(
            {
                "commit": commit(),
                "machine": machine(),
                "results": [asdict(r) for r in self.rows],
                **more,
            }
        )
        if where == "-":
            print(text, flush=True)
        else:
            Path(where).write_text(text + "\n")


def command_line(description: str | None) -> ArgumentParser:
    """Parser of a benchmark's arguments. ``description`` is printed as it stands by ``--help``;
    ``--json`` names the place of the result, as :meth:`Report.write` takes it."""
    about = (description or "").replace("%", "%%")
    program = Path(sys.argv[0])
    parser = ArgumentParser(
        prog=program.parent.name if program.stem == "__main__" else program.stem,
        description=about,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - for stdout")
    return parser


def chosen(parser: ArgumentParser, words: str, parts: Collection[str]) -> list[str]:
    """The parts that ``--only`` names, separated by commas. Ends the program with the parser's
    error for one that there is not: a run of nothing would hold."""
    named = words.split(",")
    if unknown := [word for word in named if word not in parts]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(parts)}")
    return named


def commit() -> str:
    """The commit measured, with ``+`` when the tree has changes; "unknown" outside a checkout."""
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (name.stdout.strip() + ("+" if dirty.stdout.strip() else "")) or "unknown"


def machine() -> str:
    """Processor, cores, Python and torch in one line."""
    from importlib.metadata import version

    model = next(
        (line.partition(":")[2].strip() for line in cpuinfo() if line.startswith("model name")),
        platform.processor() or "?",
    )
    return (
        f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python "
        f"{platform.python_version()}, torch {version('torch')}"
    )


def cpuinfo() -> list[str]:
    """Lines of /proc/cpuinfo; none where there is no such file."""
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
