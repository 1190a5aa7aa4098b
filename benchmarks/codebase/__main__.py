"""The code base, counted from its syntax trees, beside an earlier commit; and the figures that must
not have become worse with it.

  python -m benchmarks.codebase [--base COMMIT] [--only 1,2,3] [--list] [--json -]

1  sentences that stumble, assignments and expressions of several things at once, long signatures,
   large classes and packages, functions that the program never reaches, lines over 100 columns
2  files and stops of an activation, a gradient, a plan and an outer round, from the walks in
   docs/architecture.md
3  contracts of the imports, and the machines among them
4  1,000 recorded schedules, and the demo with a kill, played again (half an hour)
5  5a the simulator's schedules and planted bugs (twenty minutes to an hour); 5b speeds and losses
   beside the earlier commit (forty minutes); 5c benchmarks with rows that must hold (two hours)
7  mutants of the state machines (an hour)
8  the time of `make test` on a fresh clone

6, tasks for newcomers, is tried by people who have only the repository.
"""

import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.codebase import large, reading, unchanged
from benchmarks.codebase import tree as source
from benchmarks.codebase.reached import unreached
from benchmarks.codebase.tree import Tree
from benchmarks.codebase.walks import check, read_walk
from benchmarks.report import ROOT, Report, chosen, command_line

PARTS = ("1", "2", "3", "4", "5a", "5b", "5c", "7", "8")
BASE = "c2d8ad2"
TEXTS = ("node", "cli.py", "tests")
CODE = ("node", "cli.py")
STUMBLING = 0.02
"""Share of the sentences, at most."""
PER_THOUSAND = (
    ("assignments of several values", reading.parallel_assignments, 2.0),
    ("conditional expressions", reading.conditional_expressions, 15.0),
)
LARGE = (
    (
        f"functions of more than {reading.PARAMETERS} parameters",
        reading.long_signatures,
        large.FUNCTIONS,
    ),
    (f"classes of more than {reading.ATTRIBUTES} attributes", reading.large_classes, large.CLASSES),
)
FILES = 20
SHARED = 20
SKIPPED = 20
UNWIRED = {"merging shares of samples": ".samples.merged"}
"""Functions that nothing reaches yet and that may stay; the last section of docs/protocol.md says
why."""
OUTSIDE = {
    "the program that forks the daemons of a demo": ".demo.forks.main",
    "libraries that read a file of a confined call": ".confined.program.Source.seekable",
    "the page of all settings, by tools/reference.py": ".tables.Setting.range_sentence",
    "programs with a service of their own": ".transport.service.Transport.serve_also",
}
"""Functions that the program never names, by their callers."""
WALKS = {
    "An activation's hop": (15, 25),
    "A gradient on its way to a fresh parameter": (20, 36),
    "A plan from leader to member": (15, 33),
    "An outer round": (18, 0),
}
"""Headings in docs/architecture.md: most files allowed, and how many they were at 82c642a (0: there
was no such walk)."""
STOPS = {"A plan from leader to member": 16, "An outer round": 20}
"""Most stops allowed, a file that stands twice being two; no file stands more often."""
TWICE = 2


def main() -> int:
    """Print all; exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--base", metavar="COMMIT", default=BASE, help=f"default: {BASE}")
    parser.add_argument("--only", default=",".join(PARTS), help="which of them")
    parser.add_argument("--list", action="store_true", help="name what was counted, on stderr")
    args = parser.parse_args()
    report = Report()
    parts = chosen(parser, args.only, PARTS)
    now = source.read(ROOT)
    with source.at_commit(ROOT, args.base) as before:
        if "1" in parts:
            read_aloud(report, now, before, named=args.list)
            shape(report, now, before, named=args.list)
        if "2" in parts:
            walks(report, now, named=args.list)
        if "3" in parts:
            contracts(report)
        if "4" in parts:
            unchanged.replays(report)
        if "5a" in parts:
            unchanged.simulator(report)
        if "5b" in parts:
            unchanged.beside(report, before, args.base)
        if "5c" in parts:
            unchanged.held(report)
        if "7" in parts:
            unchanged.mutants(report)
        if "8" in parts:
            unchanged.all_tests(report)
    return report.end(args.json, base=args.base)


def read_aloud(report: Report, now: Tree, before: Tree, *, named: bool) -> None:
    """Add rows 1."""
    said = reading.sentences(_written(now, *TEXTS))
    said_before = reading.sentences(_written(before, *TEXTS))
    flagged = [one for one in said if one.stumble]
    flagged_before = [one for one in said_before if one.stumble]
    share = len(flagged) / len(said)
    report.add(
        "1 sentences of docstrings and comments that stumble",
        100 * share,
        "%",
        f"{len(flagged)} of {len(said)}; before {len(flagged_before)} of {len(said_before)}",
        f"at most {100 * STUMBLING:g}",
        share <= STUMBLING,
    )
    _list([f"{one.path}:{one.line}: {one.stumble}: {one.text}" for one in flagged], named)
    code = _written(now, *CODE)
    code_before = _written(before, *CODE)
    statements = source.count(code)
    statements_before = source.count(code_before)
    for what, count, most in PER_THOUSAND:
        found = count(code)
        rate = 1000 * len(found) / statements
        old = 1000 * len(count(code_before)) / statements_before
        report.add(
            f"1 {what} in 1,000 statements",
            rate,
            "",
            f"{len(found)} in all; before {old:.1f}",
            f"at most {most}",
            rate <= most,
        )
        _list(found, named)
    for what, count, excuses in LARGE:
        found = count(code)
        wrong = large.judge(found, excuses).wrong
        report.add(
            f"1 {what}, without a reason",
            len(wrong),
            "",
            "; ".join(wrong) or f"{len(found)} in all; before {len(count(code_before))}",
            "0: none in consensus, epoch, outer and coordinator; a reason for each elsewhere",
            not wrong,
        )
        _list(map(str, found), named)


def _written(tree: Tree, *folders: str) -> list[source.Source]:
    """The files of ``folders`` that people wrote."""
    generated = ("_pb2.py", "_pb2_grpc.py")
    return [one for one in tree.under(*folders) if not one.path.endswith(generated)]


def shape(report: Report, now: Tree, before: Tree, *, named: bool) -> None:
    """Rows 1 of larger pieces than sentences."""
    folder, most = source.largest_package(now.under("node"))
    was = " ".join(map(str, source.largest_package(before.under("node"))))
    report.add(
        f"1 files in the largest package ({folder})",
        most,
        "",
        f"before {was}",
        f"at most {FILES}",
        most <= FILES,
    )
    loose, stay = _unwired(now)
    old, _ = _unwired(before)
    _row(report, "1 public functions that the program never reaches", loose, old, 0, named)
    report.add("1 the same, waiting to be wired in", len(stay), "", ", ".join(UNWIRED))
    code = ("cli.py", "node", "testbed", "tests", "benchmarks")
    long, old = source.long_lines(now.under(*code)), source.long_lines(before.under(*code))
    _row(report, "1 lines over 100 columns", long, old, 0, named)
    skipped = source.skipped_formatting(now.under("node"))
    old = source.skipped_formatting(before.under("node"))
    _row(report, "1 lines of node/ the formatter may not touch", skipped, old, SKIPPED, named)
    shared = _flat(source.shared_class_names(now.under("node")))
    old = _flat(source.shared_class_names(before.under("node")))
    _row(report, "1 classes that share a name", shared, old, SHARED, named)


def _unwired(tree: Tree) -> tuple[list[str], list[str]]:
    """Functions that nothing reaches: those that may not be; those that may, and what only they
    call."""
    loose = unreached(tree, (*UNWIRED.values(), *OUTSIDE.values()))
    return loose, [f for f in unreached(tree, OUTSIDE.values()) if f not in loose]


def _flat(places: dict[str, list[str]]) -> list[str]:
    return [f"{name} {path}" for name, paths in sorted(places.items()) for path in paths]


def _row(
    report: Report, name: str, found: list[str], old: list[str], most: int, named: bool
) -> None:
    """How many were found, beside the base's; each by name with ``--list``."""
    before = f"before {len(old)}"
    target = f"at most {most}"
    report.add(name, len(found), "", before, target, len(found) <= most)
    _list(found, named)


def _list(found: Iterable[str], named: bool) -> None:
    """Print each on stderr, with ``--list``."""
    if named:
        for one in found:
            print(f"    {one}", file=sys.stderr)


def walks(report: Report, now: Tree, *, named: bool) -> None:
    """Add rows 2 from the page's lists: all files must exist, and each must follow from the one
    before."""
    page = (Path(now.root) / "docs" / "architecture.md").read_text()
    for title, (most, old) in WALKS.items():
        stops = read_walk(page, title)
        walk = check(now, stops)
        wrong = [f"no {f}" for f in walk.missing] + [f"{a} not with {b}" for a, b in walk.unlinked]
        report.add(
            f"2 {title[0].lower()}{title[1:]}: files",
            len(walk.files),
            "; ".join(wrong) or ("" if walk.files else "not in docs/architecture.md"),
            f"at 82c642a {old or 'none'}",
            f"at most {most}, all there and linked",
            walk.sound and len(walk.files) <= most,
        )
        _list(walk.files, named)
        if title in STOPS:
            _stops(report, title, stops)


def _stops(report: Report, title: str, stops: tuple[str, ...]) -> None:
    """Add a row for the length of a walk."""
    often = [path for path, count in Counter(stops).items() if count > TWICE]
    report.add(
        f"2 {title[0].lower()}{title[1:]}: stops",
        len(stops),
        "; ".join(often),
        "",
        f"at most {STOPS[title]}, no file more than twice",
        0 < len(stops) <= STOPS[title] and not often,
    )


def contracts(report: Report) -> None:
    """Add rows 3: each contract of pyproject.toml, and how many files are machines by them."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = re.search(r"^Contracts: (\d+) kept, (\d+) broken", done.stdout, re.MULTILINE)
    found = {"kept": 0, "broken": 0}
    if said:
        found = {"kept": int(said[1]), "broken": int(said[2])}
    report.add(
        "3 contracts of the imports kept",
        found["kept"],
        f"of {sum(found.values())}",
        "",
        "all",
        done.returncode == 0 and found["kept"] > 0 and not found["broken"],
    )
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (pure,) = (one for one in settings["contracts"] if one["id"] == "machines")
    machines = {path for name in pure["source_modules"] for path in _files_of(name)}
    report.add("3 files without a clock, a socket, dice or an await", len(machines), "files")


def _files_of(module: str) -> Iterator[Path]:
    """Files of a module or package, as a contract names it."""
    place = module.replace(".", "/")
    yield from ROOT.glob(f"{place}.py")
    yield from ROOT.glob(f"{place}/**/*.py")


if __name__ == "__main__":
    sys.exit(main())
