"""Part 5 of ``benchmarks.averaging``: the same model and text under every strategy, as rows and as
a picture."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.averaging.replicas import Curve, Line, Task, Text, data_parallel, pushed, rounds
from benchmarks.report import Report
from benchmarks.shared import chart
from node.averaging.strategies.outer import OuterSettings

DILOCO = OuterSettings(carries="deltas", optimizer="nesterov", momentum=0.8)
"""A momentum of 0.9, as published for runs of thousands of outer steps, remembers too long for the
hundred of these."""
MOSHPIT = OuterSettings("moshpit", grid=(2, 2))
PARALLEL = "data parallel"
PLAIN = "DiLoCo, H 50"
INT8 = "DiLoCo, H 50, int8"
Run = Callable[[Task, Text, Line], Curve]
Points = list[tuple[int, float, float]]


def of(settings: OuterSettings, slow: int = 0) -> Run:
    return lambda task, text, line: rounds(task, text, line, settings, slow=slow)


RUNS: dict[str, Run] = {
    PARALLEL: data_parallel,
    "parameter server, no barrier": lambda task, text, line: pushed(task, text, line, locked=True),
    "Hogwild": lambda task, text, line: pushed(task, text, line, locked=False),
    "local SGD, butterfly, every 50": of(OuterSettings()),
    "local SGD, Moshpit 2 x 2, every 50": of(MOSHPIT),
    "local SGD, random pairs, every 50": of(OuterSettings("gossip")),
    PLAIN: of(DILOCO),
    INT8: of(replace(DILOCO, codec="int8")),
    "DiLoCo, H 50, int4": of(replace(DILOCO, codec="int4")),
    "DiLoCo, H 50, top-k, feedback": of(replace(DILOCO, codec="top-k", feedback=True)),
    "DiLoCo, H 50, Moshpit 2 x 2": of(
        replace(MOSHPIT, carries="state", optimizer="nesterov", momentum=0.8)
    ),
    "DiLoCo, H 50, random pairs": of(replace(DILOCO, strategy="gossip", carries="state")),
    "streaming DiLoCo, 2 fragments": of(replace(DILOCO, fragments=2, codec="int8")),
    "DiLoCo, H 50, quorum, one of 4 at half speed": of(replace(DILOCO, quorum=3), slow=1),
}


def training(report: Report, steps: int, only: str, plot: Path | None) -> dict[str, Points]:
    """Add a row with loss, bytes and time for each strategy, then the rows about DiLoCo. Returns
    the curves, as points (tokens, seconds, loss)."""
    wanted = [w.strip() for w in only.split(",") if w.strip()]
    line = Line()
    with tempfile.TemporaryDirectory(prefix="averaging-") as home:
        task = Task(steps=steps)
        text = Text(task, Path(home))
        curves: dict[str, Curve] = {}
        for name, run in RUNS.items():
            if not wanted or any(name.startswith(w) for w in wanted):
                curves[name] = curve = run(task, text, line)
                report.add(
                    f"5 {name}",
                    round(curve.loss, 4),
                    "nats a token, held out",
                    f"{curve.per_token:.4g} bytes by a peer for each of its tokens, "
                    f"{curve.seconds:.0f} s at 20 Mbit/s and 100 ms, "
                    f"{curve.tokens:,} tokens",
                )
    parallel, plain, coded = (curves.get(n) for n in (PARALLEL, PLAIN, INT8))
    if parallel and plain:
        off = plain.loss / parallel.loss - 1
        fewer = parallel.per_token / plain.per_token
        report.add(
            "5 DiLoCo, H 50, beside data parallelism",
            100 * off,
            "% more loss",
            f"{fewer:.1f} times fewer bytes",
            "at most 2",
            off <= 0.02,
        )
        report.add(
            "5 bytes of DiLoCo, H 50",
            fewer,
            "ratio, data parallelism over DiLoCo",
            "",
            "50",
            abs(fewer - 50) < 1,
        )
    if plain and coded:
        off = coded.loss / plain.loss - 1
        report.add(
            "5 int8 pseudo-gradients",
            100 * off,
            "% more loss than fp32",
            f"{plain.per_token / coded.per_token:.2f} times fewer bytes",
            "at most 0.5",
            off <= 0.005,
        )
    points = {name: curve.points for name, curve in curves.items()}
    if plot and points:
        draw(points, steps, plot)
    return points


def draw(points: dict[str, Points], steps: int, where: Path) -> None:
    """Loss over tokens and over simulated time."""
    across = ((0, "tokens, millions", 1e6), (1, "simulated seconds", 1.0))
    panels = [
        (
            label,
            "held-out loss, nats a token",
            {n: [(p[at] / unit, p[2]) for p in c] for n, c in points.items()},
        )
        for at, label, unit in across
    ]
    chart.write(where, f"4 replicas, {steps} steps each, 20 Mbit/s and 100 ms", panels, top=2.5)
