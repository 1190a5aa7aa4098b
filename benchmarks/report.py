"""One object at the end of every benchmark: ``{commit, machine, results: [{name, value, unit, peer,
target, holds}]}``, with the ``load`` meanwhile and the ``arguments`` of the command.

Where other programs kept the cores busy, speeds are not judged: ``holds`` is None, and ``target``
says so.
"""

import json
import os
import platform
import re
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.shared.load import Load, Moment

BUSY = 0.15
"""Share of the cores' time, taken by other programs and by the host, from which no speed is
judged."""
TIMED = re.compile(
    r"(s|ms|us|µs|min|x|times)\b|[^ ]+/s\b|.* a second\b|(% )?of (a core|processor time)\b"
)
"""Beginning of the unit of a speed, a time or a ratio of them. A ratio of anything else has the
unit "ratio" or "share", a count that of the things counted."""
RESULTS = (":!docs/benchmarks", ":!docs/benchmarks.md")
"""Paths of results, as patterns of git that leave them out."""
NOT_JUDGED = "not judged"
"""Words of the ``target`` of a row that could not be judged, before the reason."""
UNJUDGED = 3
"""Exit code where some rows could not be judged and all others hold. A command line that cannot be
read ends with 2."""
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
    """Collects rows; prints them for people as they come, and as JSON at the end. Made before
    anything is measured: it notes the load and the commit."""

    rows: list[Row] = field(default_factory=list)
    began: Moment = field(default_factory=Moment.now)
    tree: str = field(default_factory=lambda: commit())

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

    def unmeasured(self, name: str, target: str, reason: str) -> Row:
        """A row that this machine cannot measure, which the exit code tells
        (:data:`UNJUDGED`)."""
        return self.add(name, "not measured", "", target=f"{target}; {NOT_JUDGED}: {reason}")

    def end(self, where: str | None, **more: Any) -> int:
        """Write it; the exit code: 0 when every target holds, :data:`UNJUDGED` when all that can be
        judged hold, else 1."""
        rows = self.write(where, **more)
        unjudged = sum(row.holds is None and NOT_JUDGED in row.target for row in rows)
        if any(row.holds is False for row in rows):
            return 1
        return UNJUDGED if unjudged else 0

    def write(self, where: str | None, **more: Any) -> list[Row]:
        """Write the rows so far, as they can be judged, and return them. ``-``: one JSON line on
        stdout; a path: that file; None: nothing. ``more``: other fields of the object."""
        load = Moment.now().load_since(self.began)
        rows = judged(self.rows, load)
        if rows != self.rows:
            print(f"speeds are not judged: {load}", file=sys.stderr, flush=True)
        text = json.dumps(
            {
                "commit": self._measured(),
                "arguments": arguments(sys.argv[1:]),
                "machine": machine(),
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "load": asdict(load),
                "results": [asdict(r) for r in rows],
                **more,
            }
        )
        if where == "-":
            print(text, flush=True)
        elif where is not None:
            Path(where).write_text(text + "\n")
        return rows

    def _measured(self) -> str:
        """The commit that was measured; both, with ``+``, if the tree changed meanwhile."""
        now = commit()
        if now == self.tree:
            return now
        return f"{self.tree}..{now.rstrip('+')}+"


def judged(rows: Sequence[Row], load: Load) -> list[Row]:
    """The rows as they can be judged under that load: speeds are not where the cores were busy with
    other work."""
    if load.others + load.stolen < BUSY:
        return list(rows)
    return [
        replace(row, holds=None, target=f"{row.target}; {NOT_JUDGED}: {load}")
        if row.holds is not None and TIMED.match(row.unit)
        else row
        for row in rows
    ]


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
    """The parts that ``--only`` names, separated by commas; a number names all parts with this
    number and a letter. Ends the program with the parser's error for one that there is not: a run
    of nothing would hold."""
    found = list[str]()
    for word in words.split(","):
        lettered = [p for p in parts if word.isdigit() and p[:-1] == word and p[-1].isalpha()]
        named = [word] * (word in parts) + lettered
        if not named:
            parser.error(f"--only {word}: there are {', '.join(parts)}")
        found += named
    return found


def arguments(words: Sequence[str]) -> list[str]:
    """The words of a command line without ``--json`` and its value."""
    kept = list[str]()
    given = iter(words)
    for word in given:
        if word == "--json":
            next(given, None)
        elif not word.startswith("--json="):
            kept.append(word)
    return kept


def commit() -> str:
    """The commit of the tree now, with ``+`` when the tree has changes beside results; "unknown"
    outside a checkout."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        changes = _git("status", "--porcelain", "--", ".", *RESULTS)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (name + "+" * bool(changes)) or "unknown"


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=10)
    return done.stdout.strip()


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
