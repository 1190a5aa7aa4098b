"""Mutants of the state machines: each has one small fault, which a test of its own package has to
notice.

  python -m benchmarks.mutants [--count 200] [--seed 1] [--only NAME,NAME] [--json -]

A fault is another comparison, operator, number or returned value, a condition turned round, or a
statement left out. The places are drawn from all places in the machines. The tests that run the
line of a fault are run until the first one fails. A mutant that no test notices is listed on
stderr, and so is a line that no test runs; both count as alive, unless :data:`SAME` says why the
fault changes nothing.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.codebase.mutations import Mutation, mutations
from benchmarks.codebase.tree import read
from benchmarks.report import ROOT, Report, chosen, command_line

MACHINES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "consensus": (("node/consensus",), ("tests/training",)),
    "epoch": (("node/epoch",), ("tests/training",)),
    "outer": (
        tuple(f"node/outer/{name}.py" for name in ("anchor", "forming", "merging", "window")),
        ("tests/cells", "tests/training"),
    ),
    "pipeline": (("node/pipeline/machine.py",), ("tests/pipeline",)),
    "exchange": (("node/averaging/exchange/machine.py",), ("tests/averaging",)),
}
"""Files of each group of machines, and the tests of its package."""
SAME: dict[str, str] = {}
"""Faults that change nothing, as :class:`Mutation` prints them without the line's number, and
why."""
KILLED = 0.9
ROUND_S = 900.0
"""Seconds for all tests of a package under the tracer."""
TIMES = 5.0
SPARE_S = 20.0
"""A mutant's tests may take :data:`TIMES` as long as without it, and this; more counts as
noticed."""
LOADED = ("benchmarks", "node", "protos", "testbed", "tests")
"""Packages that a mutant's process loads from its own tree."""
FAILED = 1
"""Exit code of pytest with a failure."""
BROKEN = 2
"""Exit code of pytest if it could not load the tests."""
UNEXPECTED = 70
"""Exit code of a process in which pytest itself did not work."""


@dataclass(frozen=True)
class Covered:
    """Tests of a package: those that run a line, by "file:line", and the seconds of each."""

    tests: dict[str, list[str]]
    seconds: dict[str, float]


def main() -> int:
    """Print the share of mutants that are noticed; exit 0 when it is enough."""
    parser = command_line(__doc__)
    parser.add_argument("--count", type=int, default=200, help="mutants, all groups together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(MACHINES), help="groups of machines")
    args = parser.parse_args()
    groups = chosen(parser, args.only, tuple(MACHINES))
    report = Report()
    _preload()
    with tempfile.TemporaryDirectory(prefix="tutti-mutants-") as folder:
        copy = Path(folder) / "tree"
        _copied(copy)
        draw = random.Random(args.seed)
        places = [
            (group, mutation)
            for group in groups
            for source in read(copy).under(*MACHINES[group][0])
            for mutation in mutations(source)
        ]
        drawn = draw.sample(places, min(args.count, len(places)))
        alive: Counter[str] = Counter()
        for group in groups:
            mine = [mutation for of, mutation in drawn if of == group]
            if mine:
                alive[group] = _judge(report, copy, group, mine)
    share = 1 - alive.total() / max(1, len(drawn))
    report.add(
        "7 mutants noticed by the tests of their own package",
        share,
        f"of {len(drawn)}, drawn from {len(places)} by seed {args.seed}; alive: {dict(alive)}",
        "",
        f"at least {KILLED}",
        holds=share >= KILLED,
    )
    return report.end(args.json)


def _copied(to: Path) -> None:
    """Copy what tests need."""
    to.mkdir()
    skipped = shutil.ignore_patterns("__pycache__", "*.pyc")
    for path in ROOT.iterdir():
        if path.name.startswith(".") or path.is_symlink():
            continue
        if path.is_dir():
            shutil.copytree(path, to / path.name, ignore=skipped)
        else:
            shutil.copy2(path, to / path.name)


def _judge(report: Report, copy: Path, group: str, drawn: list[Mutation]) -> int:
    """The number of these mutants that are alive."""
    covered = _covered(copy, group)
    fates: Counter[str] = Counter()
    for number, mutation in enumerate(drawn):
        fate = _fate(copy, mutation, covered)
        fates[fate] += 1
        said = f"{group} {number + 1}/{len(drawn)} {fate}: {mutation}"
        print(said, file=sys.stderr, flush=True)
    alive = fates["alive"] + fates["not run"]
    report.add(
        f"7 mutants of {group} noticed",
        1 - alive / len(drawn),
        f"of {len(drawn)}: {dict(fates)}",
    )
    return alive


def _fate(copy: Path, mutation: Mutation, covered: Covered) -> str:
    if _named(mutation) in SAME:
        return "the same"
    path = copy / mutation.path
    # A line inside of a statement has no event of its own where it only names things.
    lines = (f"{path}:{mutation.line}", f"{path}:{mutation.statement}")
    tests = next((covered.tests[line] for line in lines if line in covered.tests), [])
    if not tests:
        return "not run"
    tests = sorted(tests, key=lambda test: covered.seconds[test])
    text = path.read_text()
    path.write_text(mutation.applied(text))
    try:
        most_s = SPARE_S + TIMES * sum(covered.seconds[test] for test in tests)
        code = _pytest(copy, tests, most_s)
    finally:
        path.write_text(text)
    if code is None:
        return "takes too long"
    if code in (FAILED, BROKEN) or code < 0:  # a signal ended the process
        return "noticed"
    if code == UNEXPECTED:
        raise SystemExit(f"pytest did not work with the mutant {mutation}")
    return "alive"


def _named(mutation: Mutation) -> str:
    return str(mutation).replace(f":{mutation.line}:", ":", 1)


def _covered(copy: Path, group: str) -> Covered:
    files, tests = MACHINES[group]
    traced = {str(copy / source.path) for source in read(copy).under(*files)}
    into = copy.parent / f"{group}.json"
    code = _pytest(copy, list(tests), ROUND_S, traced, into)
    if code != 0:
        raise SystemExit(f"the tests of {group} fail without a fault: exit code {code}")
    return Covered(**json.loads(into.read_text()))


def _preload() -> None:
    """Load what every mutant's process would load again."""
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401


def _pytest(
    copy: Path,
    tests: list[str],
    most_s: float,
    traced: set[str] | None = None,
    into: Path | None = None,
) -> int | None:
    """Exit code of pytest with these tests, in a process of its own; None if it took longer than
    ``most_s`` seconds."""
    listed = copy.parent / "tests.txt"
    listed.write_text("\n".join(tests))
    child = os.fork()
    if child == 0:
        code = UNEXPECTED
        # This process must never go on as its parent, which removes the tree.
        try:
            os.setsid()
            code = _in_child(copy, listed, traced, into)
        finally:
            os._exit(code)
    ends = time.monotonic() + most_s
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _in_child(copy: Path, listed: Path, traced: set[str] | None, into: Path | None) -> int:
    """Run pytest on the copy; this process has loaded nothing of it."""
    import pytest

    from benchmarks.codebase.covering import Covering

    os.chdir(copy)
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy), *(p for p in sys.path if p not in ("", str(ROOT)))]
    for name in [n for n in sys.modules if n.partition(".")[0] in LOADED]:
        del sys.modules[name]
    plugins = []
    if traced is not None and into is not None:
        plugins.append(Covering(traced, into))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={copy}"]
    return int(pytest.main([*options, f"@{listed}"], plugins=plugins))


if __name__ == "__main__":
    sys.exit(main())
