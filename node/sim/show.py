"""A run drawn as a time line: epochs going up, faults marked. For a terminal in block characters,
for a file as SVG or figure."""

from __future__ import annotations

from html import escape
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from node.control.words import BLOCKS
from node.sim.run import ScheduleOutcome
from node.telemetry.pictures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS = {
    "kill": "x",
    "kill-leader": "X",
    "kill-each": "x",
    "replace": "r",
    "restart": "r",
    "restart-all": "R",
    "stop": "t",
    "stop-all": "T",
    "outage": "o",
    "pause": "p",
    "pause-leader": "P",
    "join": "+",
    "leave": "-",
    "partition": "|",
    "one-way": "<",
    "partial-partition": "/",
    "flap": "~",
    "slow-link": "s",
    "loss": "s",
    "slow-peer": "s",
    "skew": "c",
    "corrupt": "!",
    "broken-step": "!",
    "lie": "?",
    "silent": "?",
    "overstep": "?",
    "come": "+",
    "stranger": "?",
}
"""One letter for each kind of fault."""
RED = "\x1b[31m"
GREEN = "\x1b[32m"
DIM = "\x1b[2m"
PLAIN = "\x1b[0m"
HEIGHT = 6
"""Lines of the curve."""


def timeline(o: ScheduleOutcome, width: int, colour: bool = False) -> list[str]:
    """Lines of at most ``width`` characters: epochs over virtual seconds, of the cell that is
    furthest, below them the faults that struck."""
    columns = max(10, width - 8)
    span = max(o.seconds, 1e-9)
    top = max(1, o.setup.epochs)
    levels = [0] * columns
    for c in o.commits:
        i = min(columns - 1, int(c.at / span * columns))
        if c.cell:
            levels[i] = max(levels[i], c.epoch)
        else:
            levels[i] = c.epoch
    for i in range(1, columns):
        if o.cells_lead:
            levels[i] = max(levels[i], levels[i - 1])
        else:
            levels[i] = levels[i] or levels[i - 1]
    red, green, dim, plain = (RED, GREEN, DIM, PLAIN) if colour else ("", "", "", "")
    lines = []
    for row in range(HEIGHT, 0, -1):
        cells = "".join(
            BLOCKS[min(8, max(0, round((level / top * HEIGHT - row + 1) * 8)))] for level in levels
        )
        name = " " * 7
        if row == HEIGHT:
            name = f"{top:>6} "
        elif row == 1:
            name = f"{0:>6} "
        lines.append(f"{dim}{name}{plain}{green}{cells.rstrip()}{plain}")
    marks = [" "] * columns
    for at, kind, *_ in o.struck:
        marks[min(columns - 1, int(at / span * columns))] = MARKS[kind]
    if o.struck:
        lines.append(f"{dim}faults {plain}{red}{''.join(marks).rstrip()}{plain}")
        lines += [f"{dim}       {line}{plain}" for line in _legend(o, columns)]
    end = f"{o.seconds:.0f} s"
    lines.append(f"{dim}       0{end:>{columns - 1}}{plain}")
    return lines


def _lines(o: ScheduleOutcome) -> list[list[tuple[float, int]]]:
    """For each cell the times and epochs of its commits. The first one begins with nothing, another
    where it was founded."""
    made: dict[str, list[tuple[float, int]]] = {}
    for c in o.commits:
        begin = (0.0, 0)
        if made:
            begin = (c.at, c.epoch - 1)
        made.setdefault(c.cell, [begin]).append((c.at, c.epoch))
    return list(made.values()) or [[(0.0, 0)]]


def _legend(o: ScheduleOutcome, width: int) -> list[str]:
    """The letters of the faults that struck, in lines of at most ``width`` characters."""
    lines = [""]
    for kind in dict.fromkeys(kind for _, kind, *_ in o.struck):
        word = f"{MARKS[kind]} {kind}"
        if lines[-1] and len(lines[-1]) + 2 + len(word) > width:
            lines.append("")
        if lines[-1]:
            lines[-1] += "  "
        lines[-1] += word
    return [line[:width] for line in lines]


def svg(o: ScheduleOutcome, title: str) -> str:
    """The same as a picture: a step line of epochs for each cell, a red line for each fault, grey
    where it lasts."""
    w = 900.0
    h = 360.0
    left = 50.0
    low = 300.0
    span = max(o.seconds, 1e-9)
    top = max(1, o.setup.epochs)

    def x(at: float) -> float:
        return round(left + (w - left - 20) * min(at, span) / span, 1)

    def y(epoch: float) -> float:
        return round(low - (low - 50) * epoch / top, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w:.0f}" height="{h:.0f}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{left}" y="24" '
        f'font-size="15">{escape(title)}</text>',
    ]
    parts += [
        f'<rect x="{x(at)}" y="50" width="{max(0.0, x(at + seconds) - x(at)):.1f}" '
        f'height="{low - 50}" fill="#ddd" fill-opacity="0.5"/>'
        for at, _, _, seconds in o.struck
        if seconds
    ]
    for at, kind, who, _ in o.struck:
        parts += [
            f'<line x1="{x(at)}" y1="50" x2="{x(at)}" y2="{low}" stroke="#c33" stroke-width="0.8">',
            f"<title>{escape(f'{at:.2f} s {kind} {who}')}</title></line>",
        ]
    for line in _lines(o):
        steps = [((at, old), (at, new)) for (_, old), (at, new) in pairwise(line)]
        corners = [line[0], *chain.from_iterable(steps), (span, line[-1][1])]
        points = " ".join(f"{x(at)},{y(epoch)}" for at, epoch in corners)
        parts.append(f'<polyline fill="none" stroke="#272" stroke-width="2" points="{points}"/>')
    parts += [
        *(
            f'<text x="{left - 8}" y="{y(epoch) + 4}" text-anchor="end">{epoch}</text>'
            for epoch in sorted({0, top // 2, top})
        ),
        *(
            f'<text x="{x(at)}" y="{low + 20}" text-anchor="middle">{at:.0f}</text>'
            for at in (span * i / 5 for i in range(6))
        ),
        f'<text x="{(left + w) / 2}" y="{low + 42}" text-anchor="middle">virtual seconds</text>',
        f'<text x="14" y="{(low + 50) / 2}" transform="rotate(-90 14 {(low + 50) / 2})" '
        'text-anchor="middle">epoch</text></svg>',
    ]
    return "\n".join(parts) + "\n"


def figure(o: ScheduleOutcome, title: str) -> Figure:
    """The same for a PNG, with the letters of the faults. Raises UsageFault without matplotlib."""
    made = new_figure(11.0, 4.6)
    axes = made.add_subplot()
    top = max(1, o.setup.epochs)
    for at, _, _, seconds in o.struck:
        if seconds:
            axes.axvspan(at, min(at + seconds, o.seconds), color="#ddd", alpha=0.5, linewidth=0)
    for at, kind, *_ in o.struck:
        axes.axvline(at, ymax=0.93, color="#c33", linewidth=0.8)
        axes.text(at, top * 1.02, MARKS[kind], color="#c33", ha="center", fontsize=8)
    for line in _lines(o):
        axes.step(
            [*(at for at, _ in line), o.seconds],
            [*(epoch for _, epoch in line), max(epoch for _, epoch in line)],
            where="post",
            color="#227722",
            linewidth=2,
        )
    axes.set_xlim(0, max(o.seconds, 1e-9))
    axes.set_ylim(0, top * 1.08)
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel("epoch")
    axes.set_title("\n".join([title, *_legend(o, 110)]).rstrip(), fontsize=10, loc="left")
    return made
