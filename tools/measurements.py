"""The page of measurements, docs/benchmarks.md, from the results of the benchmarks.

``make bench`` runs benchmarks, keeps the object that each ends in under docs/benchmarks/results,
and writes the page anew with ``python -m tools.measurements``; a test compares both. Figures are
typed nowhere.
"""

import ast
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.__main__ import FOLDER as BENCHMARKS
from benchmarks.__main__ import names
from tools.reference import prose, table

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "benchmarks.md"
RESULTS = DOCS / "benchmarks" / "results"
FIELDS = {"arguments", "commit", "machine", "date", "load", "results"}
"""Fields of a result that the page shows."""
HOLDS = {True: "yes", False: "**no**", None: ""}
INTRODUCTION = """\
# Measurements

<!-- Written by `make bench`. Figures belong into docs/benchmarks/results. -->

Each table is what one command printed last: `make bench BENCH=NAME` runs it and writes this page
anew (one part of it: `PART=3`; shorter, where it can be: `WITH=--quick`). Ratios to something
measured in the same run carry over to other machines; seconds do not. Where other programs kept the
cores busy, speeds are not judged, and the row says so.
[Earlier measurements](benchmarks/history.md) have their own page, with what was tried and dropped.
"""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page, from the object of each benchmark that has one, by name; of a part of a benchmark,
    by ``NAME.PART``."""
    lines = [INTRODUCTION]
    for name, result in sorted(results.items(), key=_place):
        lines += _section(name, result)
    run = {name.partition(".")[0] for name in results}
    missing = [f"`{name}`" for name in names() if name not in run]
    if missing:
        lines += ["## Not run since this page is written by a program", "", ", ".join(missing), ""]
    return "\n".join(lines)


def _place(kept: tuple[str, Mapping[str, Any]]) -> tuple[str, int, str]:
    """Place on the page: parts of a benchmark by their numbers."""
    name, _, part = kept[0].partition(".")
    first = part.partition(",")[0]
    return name, int(first) if first.isdigit() else 0, part


def _section(kept: str, result: Mapping[str, Any]) -> list[str]:
    name, _, part = kept.partition(".")
    heading = f"{name}, part {part}" if part else name
    command = " ".join([f"python -m benchmarks.{name}", *result["arguments"]])
    load = result["load"]
    # A part that did not come to its end has no target, but does not hold.
    asked = [row for row in result["results"] if row["target"] or row["holds"] is not None]
    held = ""
    if asked:
        held = f": {sum(row['holds'] is True for row in asked)} of {len(asked)} rows hold"
    rows = [
        [
            prose(row["name"]),
            prose(f"{_figure(row['value'])} {row['unit']}".strip()),
            prose(row["peer"]),
            prose(row["target"]),
            HOLDS[row["holds"]],
        ]
        for row in result["results"]
    ]
    return [
        f"## {heading}",
        "",
        f"{prose(_about(name))} `{command}`, {result['date']}, commit "
        f"{result['commit']}{held}. {prose(result['machine'])}; "
        f"meanwhile other programs took {load['others']:.0%} of the cores, the host "
        f"{load['stolen']:.0%}.",
        "",
        *table(["", "measured", "beside", "asked", "holds"], rows),
    ]


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _about(name: str) -> str:
    """First sentence of a benchmark's docstring."""
    file = BENCHMARKS / f"{name}.py"
    if not file.exists():
        file = BENCHMARKS / name / "__main__.py"
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    sentence = " ".join(text.split("\n\n", 1)[0].split())
    return sentence.partition(". ")[0].rstrip(".:") + "."


def kept(directory: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The object of each benchmark, by name, and of parts by ``NAME.PART``. Raises ValueError for a
    file that is no result of a benchmark, or of one that is gone."""
    return {file.stem: _result(file) for file in sorted(directory.glob("*.json"))}


def _result(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except ValueError:
        found = None
    name = file.stem.partition(".")[0]
    if name not in names() or not isinstance(found, dict) or not found.keys() >= FIELDS:
        raise ValueError(f"{file} is not the result of a benchmark: remove it or measure again")
    return found


def main() -> None:
    """Write the page. Ends with the reason if a result cannot be read."""
    try:
        text = page(kept())
    except ValueError as e:
        sys.exit(str(e))
    PAGE.write_text(text)
    print(PAGE)


if __name__ == "__main__":
    main()
