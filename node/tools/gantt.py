"""A plan as a picture: each peer's work over time, as text, SVG or a figure. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from node.scheduler.planning.problem import PathProblem
from node.scheduler.planning.replay import ReplayTask
from node.telemetry.pictures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 72
LINES = 40
COLOURS = {"f": "#4a90d9", "l": "#9b6fd0", "b": "#e08a3c"}
WORDS = {"f": "forward", "l": "loss", "b": "backward"}
MOST_INCHES = 40.0
"""Most inches of height of a PNG."""
LEAST_INCHES = 0.14
"""Inches of width from which a task bears its number."""
FEW_TASKS = 1500
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def label(problem: PathProblem, n: int) -> str:
    """Stage and peer, and the place if it has a name."""
    stage = "ends"
    if problem.stage_of.get(n) != 0:
        stage = f"{problem.stage_of.get(n, '-')!s:>4}"
    place = ""
    if problem.labels:
        place = problem.labels[n][:10]
    return f"{stage} {n:>4} {place}".rstrip()


def terminal(problem: PathProblem, tasks: Sequence[ReplayTask], colour: bool = True) -> list[str]:
    """A line for each peer, the busiest of each stage if there are many. A column shows the task
    that fills most of it: the forward of origin 1 as 1, its backward the same in another colour
    or, without colour, as ``~``, and a loss as ``*``."""
    span = max((t.end for t in tasks), default=0.0) or 1.0
    names = {o: DIGITS[k % len(DIGITS)] for k, o in enumerate(problem.stages[0])}
    origin = {t.mb: t.peer for t in tasks if t.hop == 0}
    by: dict[int, list[ReplayTask]] = {n: [] for stage in problem.stages for n in stage}
    for task in tasks:
        by[task.peer].append(task)
    shown = _shown(problem, by)
    width = max(len(label(problem, n)) for n in shown)
    lines = []
    for n in shown:
        cells = [" "] * COLUMNS
        fill = [0.0] * COLUMNS
        for task in by[n]:
            for c in range(
                int(task.start / span * COLUMNS), min(COLUMNS, int(task.end / span * COLUMNS) + 1)
            ):
                share = min(task.end, (c + 1) * span / COLUMNS) - max(
                    task.start, c * span / COLUMNS
                )
                if share > fill[c]:
                    fill[c] = share
                    cells[c] = _cell(names.get(origin.get(task.mb, -1), "?"), task.kind, colour)
        load = sum(t.end - t.start for t in by[n]) / span
        lines.append(f"{label(problem, n):<{width}} {''.join(cells)} {load:>4.0%}")
    end = f"{span:.1f} s"
    lines.append(f"{'':<{width}} 0{end:>{COLUMNS - 1}}")
    if hidden := len(by) - len(shown):
        lines.append(f"  and {hidden} peers that are less busy")
    places = problem.labels or range(len(problem.compute))
    ends = "  ".join(f"{names[o]} {places[o]}" for o in problem.stages[0][:12])
    marks = "a letter is a forward, ~ a backward, * a loss"
    if colour:
        marks = "blue forward, orange backward, violet loss"
    lines.append(f"origins: {ends}   {marks}")
    return lines


def _cell(name: str, kind: str, colour: bool) -> str:
    if not colour:
        return {"f": name, "l": "*", "b": "~"}[kind]
    code = {"f": 44, "l": 45, "b": 43}[kind]
    return f"\x1b[30;{code}m{name}\x1b[0m"


def _shown(problem: PathProblem, by: dict[int, list[ReplayTask]]) -> list[int]:
    if len(by) <= LINES:
        return list(by)
    each = max(1, LINES // len(problem.stages))
    busy = {n: sum(t.end - t.start for t in tasks) for n, tasks in by.items()}
    return [n for stage in problem.stages for n in sorted(stage, key=lambda n: -busy[n])[:each]][
        :LINES
    ]


def svg(problem: PathProblem, tasks: Sequence[ReplayTask], title: str) -> str:
    """All peers and all tasks; a task says its micro-batch and times when the pointer rests on
    it."""
    span = max((t.end for t in tasks), default=0.0) or 1.0
    rows = list(problem.stage_of)
    height = 14.0
    left = 150.0
    wide = 1000.0
    place = {n: 40 + k * height for k, n in enumerate(rows)}
    low = 40 + len(rows) * height
    origin = {t.mb: t.peer for t in tasks if t.hop == 0}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + 20:.0f}" '
        f'height="{low + 50:.0f}" '
        'font-family="sans-serif" font-size="10">',
        '<rect width="100%" height="100%" fill="white"/><text x="10" y="20" '
        f'font-size="14">{escape(title)}</text>',
    ]
    for k, n in enumerate(rows):
        shade = "#ffffff"
        if problem.stage_of[n] % 2:
            shade = "#f4f4f4"
        parts.append(
            f'<rect x="0" y="{place[n]:.1f}" width="{left + wide}" height="{height}" '
            f'fill="{shade}"/>\n'
            f'<text x="6" y="{40 + k * height + 10.5:.1f}">'
            f"{escape(label(problem, n).strip())}</text>"
        )
    for t in tasks:
        x = left + wide * t.start / span
        w = max(0.4, wide * (t.end - t.start) / span)
        text = (
            f"{WORDS[t.kind]} of micro-batch {t.mb} of {origin.get(t.mb, '?')}: {t.start:.3f} "
            f"to {t.end:.3f} s"
        )
        parts.append(
            f'<rect x="{x:.2f}" y="{place[t.peer] + 1:.1f}" width="{w:.2f}" height="{height - 2}" '
            f'fill="{COLOURS[t.kind]}">'
            f"<title>{escape(text)}</title></rect>"
        )
    for i in range(11):
        x = left + wide * i / 10
        parts.append(
            f'<line x1="{x:.1f}" y1="36" x2="{x:.1f}" y2="{low:.1f}" stroke="#bbb" '
            'stroke-width="0.5"/>\n'
            f'<text x="{x:.1f}" y="{low + 14:.1f}" text-anchor="middle">{span * i / 10:.2f} '
            "s</text>"
        )
    for i, (kind, word) in enumerate(WORDS.items()):
        x = left + i * 90
        parts.append(
            f'<rect x="{x}" y="{low + 26:.1f}" width="12" height="10" fill="{COLOURS[kind]}"/>\n'
            f'<text x="{x + 16}" y="{low + 35:.1f}">{word}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def figure(problem: PathProblem, tasks: Sequence[ReplayTask], title: str) -> Figure:
    """The same for a PNG; where there is room a task bears the number of its micro-batch. Raises
    UsageFault without matplotlib."""
    rows = [n for stage in problem.stages for n in stage]
    place = {n: k for k, n in enumerate(rows)}
    span = max((t.end for t in tasks), default=0.0) or 1.0
    wide = 15.0
    high = min(MOST_INCHES, 1.6 + 0.24 * len(rows))
    made = new_figure(wide, high)
    axes = made.add_subplot()
    numbered: Sequence[ReplayTask] = ()
    edge = 0.0
    if len(tasks) <= FEW_TASKS:
        numbered = tasks
        edge = 0.4
    for n in rows:
        if problem.stage_of[n] % 2:
            axes.axhspan(place[n] - 0.5, place[n] + 0.5, color="#f2f2f2", linewidth=0, zorder=0)
    for kind, word in WORDS.items():
        mine = [t for t in tasks if t.kind == kind]
        axes.barh(
            [place[t.peer] for t in mine],
            [t.end - t.start for t in mine],
            left=[t.start for t in mine],
            height=0.84,
            color=COLOURS[kind],
            edgecolor="white",
            linewidth=edge,
            label=word,
        )
    for t in numbered:
        if t.kind != "l" and (t.end - t.start) / span * wide > LEAST_INCHES:
            axes.text(
                (t.start + t.end) / 2,
                place[t.peer],
                str(t.mb),
                ha="center",
                va="center",
                fontsize=5.5,
                color="white",
            )
    each = max(1, len(rows) * 14 // int(high * 72) + (len(rows) > 0.9 * MOST_INCHES / 0.24))
    axes.set_yticks(
        range(0, len(rows), each),
        [" ".join(label(problem, n).split()) for n in rows[::each]],
        fontsize=7,
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, span * 1.005)
    axes.grid(axis="x", color="#bbb", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=11, loc="left")
    axes.legend(loc="lower left", bbox_to_anchor=(0.75, 1.0), ncols=3, fontsize=8, frameon=False)
    return made
