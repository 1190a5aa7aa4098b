"""A benchmark in numbered parts, each a module with ``rows(report, root)``."""

import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from benchmarks.lab.fleet import Hang, folder
from benchmarks.report import Report


def run_parts(
    report: Report,
    package: str,
    parts: Mapping[str, Sequence[str]],
    chosen: Collection[str],
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Run the modules of ``package`` that ``parts`` names for each chosen number, ``more`` given to
    those of a number. What does not come to its end is a row that does not hold."""
    for number, name in ((number, name) for number, names in parts.items() for name in names):
        if number not in chosen:
            continue
        with folder() as root:
            try:
                part = importlib.import_module(f"{package}.{name}")
                part.rows(report, root, **(more or {}).get(number, {}))
            except (Hang, RuntimeError, TimeoutError) as e:
                said = f"{number} {name} did not come to its end: {e}"[:300]
                report.add(said, 0, "", holds=False)
