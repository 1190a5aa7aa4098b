"""Values that must not have become worse: speeds and losses beside an earlier commit, benchmarks
with rows that must hold, the simulator, the time of all tests. Each is run as a person would run
it, in a tree of its own."""

import ast
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks.averaging import speed as averaging_speed
from benchmarks.codebase.tree import Tree
from benchmarks.report import NOT_JUDGED, ROOT, Report

PAIRS = 5
ROUNDS = 60
LEAST = 0.98
SCHEDULES = 10_000
LARGEST = 1000
REPLAYED = 1000
RECORDED = {
    "a changed bit of a recording is found": (
        "tests/training/test_recording.py -k test_a_changed_bit_ends_the_replay_with_an_error"
    ),
    "the demo's recordings, one of a peer that was killed, replay": (
        "tests/swarm/test_demo.py -k compose"
    ),
}
"""Tests that record and play again."""
TESTS_S = 15 * 60
ONE_RUN_S = 2 * 3600
DEFAULTS = """
import sys
from node.manifest import Manifest
sys.stdout.buffer.write(Manifest.default_demo().to_toml())
"""
FIELDS = ("unit", "peer", "target", "holds")
GONE = ("peer", "chair", "labour", "pipe", "rounds", "edges", "streams", "past")
"""Modules that the simulator once had as copies of services."""
HOLDING = (
    ("chaos", "--quick"),
    ("scheduler",),
    ("live_paths",),
    ("trace",),
    ("skipping",),
    ("partition",),
    ("exactness",),
    ("cells", "--only", "3,4,6,9"),
    ("strangers",),
)
"""Benchmarks with rows that must all hold."""
LOSSES = """
import tempfile
from pathlib import Path
import torch
from node.manifest import Manifest
try:
    from testbed.reference.swarm import Reference
except ImportError:  # where it was before
    try:
        from benchmarks.reference.swarm import Reference
    except ImportError:
        from node.reference import Reference
torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as home:
    for row in Reference(Manifest.default_demo(), Path(home)).train(8):
        print(float(row.loss).hex())
"""


def replays(report: Report) -> None:
    """Rows 4: recordings of schedules and of a demo, and their replays."""
    words = ("benchmarks.simulator", "--replay", "--schedules", str(REPLAYED))
    for row in _json(ROOT, "-m", *words, may_fail=True)["results"]:
        report.add(*(row[k] for k in ("name", "value", *FIELDS)))
    for what, test in RECORDED.items():
        command = [sys.executable, "-m", "pytest", "-q", *test.split()]
        done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
        green = done.returncode == 0
        report.add(f"4 {what}", int(green), "of 1 test", test, "1", green)


def simulator(report: Report) -> None:
    """Rows 5a: the simulator's schedules and planted bugs."""
    left = [name for name in GONE if (ROOT / "node" / "sim" / f"{name}.py").exists()]
    report.add(
        "5a copies of services in node/sim", len(left), "files", ", ".join(left), "0", not left
    )
    command = ("benchmarks.simulator", "--schedules", str(SCHEDULES), "--sizes", "100,1000")
    done = _json(ROOT, "-m", *command, may_fail=True)
    rows = {r["name"].partition(" ")[2]: r for r in done["results"]}
    seconds = rows["schedules, wall"]["value"]
    count = rows["schedules"]["value"]
    report.add(
        "5a schedules",
        count,
        "schedules",
        f"{rows['schedules']['peer']}; {seconds:.0f} s, {rows['schedules, wall']['peer']}",
        f"at least {SCHEDULES}",
        count >= SCHEDULES,
    )
    broken = rows["violations"]["value"]
    report.add("5a schedules that broke an invariant", broken, "", "", "0", not broken)
    cost = rows[f"cost per epoch and peer at {LARGEST} peers"]
    report.add(f"5a epoch of {LARGEST} peers, each", cost["value"], "ms", cost["peer"])
    caught = rows["planted bugs caught"]
    report.add("5a planted bugs caught", caught["value"], *(caught[k] for k in FIELDS))


def beside(report: Report, base: Tree, commit: str) -> None:
    """Rows 5b: losses and speeds beside the tree of ``commit``."""
    was = Path(base.root)
    here = ROOT
    for tree in (was, here):
        compiled(tree)
    losses = [_losses(tree) for tree in (was, here)]
    report.add(
        "5b reference losses",
        "the same bits" if losses[0] == losses[1] else "other bits",
        "",
        f"{len(losses[0])} epochs, {commit} beside",
        "the same bits",
        losses[0] == losses[1] and bool(losses[0]),
    )
    (curve, numbers), (curve_now, numbers_now) = _golden(was), _golden(here)
    # New tests bring numbers of their own; one that was changed would be missing.
    untouched = curve == curve_now and not numbers - numbers_now
    report.add(
        "5b golden curve and the tolerances of its tests",
        "untouched" if untouched else "changed",
        "",
        f"beside {commit}",
        "untouched",
        untouched,
    )
    rates: dict[str, list[tuple[float, float]]] = {}
    for run in range(PAIRS):
        pair = [_rates(tree) for tree in ((was, here) if run % 2 else (here, was))]
        old, new = pair if run % 2 else reversed(pair)
        for name in old.keys() & new.keys():
            rates.setdefault(name, []).append((old[name], new[name]))
        said = ", ".join(f"{n} {pairs[-1][1] / pairs[-1][0]:.3f}" for n, pairs in rates.items())
        print(f"pair {run + 1} of {PAIRS}: {said}", file=sys.stderr, flush=True)
    for what, seconds in averaging_speed.beside(was, here, ROUNDS):
        rates[f"benchmarks.averaging, {what}, rounds"] = [
            (1 / old, 1 / new) for old, new in seconds
        ]
    for name, pairs in sorted(rates.items()):
        ratios = sorted(new / old for old, new in pairs)
        low, ratio, high = quantiles(ratios)
        beside = f"{commit}; {len(ratios)} pairs, half of them {low:.3f} to {high:.3f}"
        report.add(f"5b {name}", ratio, "x", beside, f"at least {LEAST}", ratio >= LEAST)


def held(report: Report) -> None:
    """Rows 5c: benchmarks with rows that must hold; no verdict while some are not judged."""
    for name, *options in HOLDING:
        with contextlib.suppress(subprocess.CalledProcessError):
            rows = _json(ROOT, "-m", f"benchmarks.{name}", *options, may_fail=True)["results"]
            wrong = [r["name"] for r in rows if r["holds"] is False]
            unjudged = sum(NOT_JUDGED in r["target"] for r in rows)
            asked = sum(r["holds"] is not None for r in rows)
            said = f"{asked - len(wrong)} of {asked} rows hold, {unjudged} are not judged"
            print(f"benchmarks.{name}: {said}", file=sys.stderr, flush=True)
            report.add(
                f"5c rows of benchmarks.{name} that hold",
                asked - len(wrong),
                f"of {asked}",
                "; ".join(wrong) or f"{unjudged} rows are not judged",
                "all",
                None if unjudged and not wrong else not wrong and asked > 0,
            )
            continue
        report.add(f"5c rows of benchmarks.{name} that hold", 0, "", "it failed", "all", False)


def compiled(tree: Path) -> None:
    """Make the compiled files of a tree, so that none is made while the clock runs."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", "node"], cwd=tree, check=False)


def mutants(report: Report) -> None:
    """Rows 7."""
    for row in _json(ROOT, "-m", "benchmarks.mutants", may_fail=True)["results"]:
        report.add(*(row[k] for k in ("name", "value", *FIELDS)))


def all_tests(report: Report) -> None:
    """Rows 8: all tests on a fresh clone, after `make setup`."""
    with tempfile.TemporaryDirectory(prefix="tutti-tests-") as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        subprocess.run(["make", "setup"], cwd=clone, check=True, stdout=sys.stderr)
        began = time.monotonic()
        done = subprocess.run(["make", "test"], cwd=clone, stdout=sys.stderr, check=False)
        seconds = time.monotonic() - began
    report.add(
        "8 make test",
        round(seconds),
        "s",
        f"{os.cpu_count()} cores, " + ("green" if done.returncode == 0 else "red"),
        f"green, at most {TESTS_S}",
        done.returncode == 0 and seconds <= TESTS_S,
    )


def _run(tree: Path, *command: str, may_fail: bool = False) -> str:
    """Stdout of a command in that tree. Raises CalledProcessError when it fails, and TimeoutExpired
    after `ONE_RUN_S`."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=ONE_RUN_S,
        check=False,
    )
    if done.returncode and not (may_fail and done.stdout.strip()):
        raise subprocess.CalledProcessError(done.returncode, command)
    return done.stdout


def _json(tree: Path, *command: str, may_fail: bool = False) -> dict[str, Any]:
    """The object that a benchmark of that tree ends in."""
    text = _run(tree, *command, "--json", "-", may_fail=may_fail)
    return json.loads(text.splitlines()[-1])


def _losses(tree: Path) -> list[str]:
    return _run(tree, "-c", LOSSES).split()


def _golden(tree: Path) -> tuple[bytes, Counter[float]]:
    """The curve, and every number with a decimal point in the tests that use it."""
    folder = tree / "tests" / "golden"
    return (folder / "curve.json").read_bytes(), Counter(
        node.value
        for path in sorted(folder.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, float)
    )


def demo_rate(tree: Path) -> float:
    """Tokens per second of one run of the demo, with the settings of a new run: those of the demo
    itself have changed."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as manifest:
        manifest.write(_run(tree, "-c", DEFAULTS))
        manifest.flush()
        words = ("cli.py", "demo", "--manifest", manifest.name, "--json", "--epochs", "40")
        demo = json.loads(_run(tree, *words).splitlines()[-1])
    return float(demo["tokens_per_s"])


def _rates(tree: Path) -> dict[str, float]:
    """Speeds of one run, by name: higher is better."""
    found = {"demo, tokens per second": demo_rate(tree)}
    for row in _json(tree, "-m", "benchmarks.pipeline", "--runs", "1", may_fail=True)["results"]:
        if row["name"].endswith("tokens per second"):
            found["benchmarks.pipeline, tokens per second"] = row["value"]
    return found
