"""Curves in panels side by side: an SVG without a plotting library, or a PNG with one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from node.telemetry import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
)
DASHES = ("", "6 3", "2 2")
STYLES = ("-", "--", ":")
WIDTH = 460
HEIGHT = 320
LEFT = 60
TOP = 40
GAP = 70
BELOW = 50
Points = Sequence[tuple[float, float]]
Panels = Sequence[tuple[str, str, Mapping[str, Points]]]


def write(where: Path, title: str, panels: Panels, *, top: float) -> None:
    """Write a picture, .svg or .png by the name's end: panels side by side, each (x label, y label,
    curves by name). `top`: values above it are cut off. Raises UsageFault, LocalFault."""
    pictures.write(
        where, lambda: svg(title, panels, top=top), lambda: figure(title, panels, top=top)
    )


def figure(title: str, panels: Panels, *, top: float, base: int = 0) -> Figure:
    """The same as :func:`svg` for a PNG; ``base``: of a logarithmic axis across. Raises UsageFault
    without matplotlib."""
    names = list(dict.fromkeys(name for _, _, curves in panels for name in curves))
    made = pictures.new_figure(5.2 * len(panels) + 2.6, 4.4)
    every = made.subplots(1, len(panels), squeeze=False)[0]
    for axes, (across, up, curves) in zip(every, panels, strict=True):
        for name, points in curves.items():
            i = names.index(name)
            x, y = zip(*points, strict=True)
            axes.plot(
                x,
                y,
                color=COLOURS[i % len(COLOURS)],
                linestyle=STYLES[i // len(COLOURS) % len(STYLES)],
                label=name,
            )
        values = [y for points in curves.values() for _, y in points if math.isfinite(y)]
        axes.set_ylim(top=min(top, max(values) + 0.03 * (max(values) - min(values))))
        if base:
            axes.set_xscale("log", base=base)
        else:
            axes.set_xlim(left=0)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.grid(color="#eee")
    lines = {line.get_label(): line for axes in every for line in axes.lines}
    made.legend(
        list(lines.values()), list(lines), loc="outside right upper", frameon=False, fontsize=9
    )
    made.suptitle(title, fontsize=11)
    return made


def svg(title: str, panels: Panels, *, top: float, legend: int = 230) -> str:
    """Panels side by side as SVG, each (x label, y label, curves by name). `top`: values above it
    are cut off."""
    names = list(dict.fromkeys(name for _, _, curves in panels for name in curves))
    width = LEFT + len(panels) * (WIDTH + GAP) + legend
    height = max(TOP + HEIGHT + BELOW, TOP + 18 * len(names) + 20)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{LEFT}" y="20" '
        f'font-size="14">{escape(title)}</text>',
    ]
    for i, (across, up, curves) in enumerate(panels):
        out += _panel(LEFT + i * (WIDTH + GAP), across, up, curves, names, top)
    for i, name in enumerate(names):
        x = width - legend
        y = TOP + 12 + 18 * i
        out.append(
            f'<line x1="{x}" x2="{x + 28}" y1="{y}" y2="{y}" {_stroke(i)}/><text x="{x + 34}" '
            f'y="{y + 4}">{escape(name)}</text>'
        )
    return "\n".join([*out, "</svg>\n"])


def _panel(
    x0: int, across: str, up: str, curves: Mapping[str, Points], names: list[str], top: float
) -> list[str]:
    every = [p for points in curves.values() for p in points]
    right = max(x for x, _ in every)
    low = min(y for _, y in every)
    high = min(top, max(y for _, y in every))

    def place(x: float, y: float) -> str:
        across = x0 + WIDTH * x / right
        down = TOP + HEIGHT * (high - min(y, high)) / (high - low)
        return f"{across:.1f},{down:.1f}"

    out = [
        f'<rect x="{x0}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>'
    ]
    for tick in _ticks(0, right):
        x = x0 + WIDTH * tick / right
        out.append(
            f'<text x="{x:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{tick:g}</text>'
        )
    for tick in _ticks(low, high):
        y = TOP + HEIGHT * (high - tick) / (high - low)
        out.append(f'<line x1="{x0}" x2="{x0 + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        out.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    out.append(
        f'<text x="{x0 + WIDTH / 2}" y="{TOP + HEIGHT + 36}" '
        f'text-anchor="middle">{escape(across)}</text>'
    )
    out.append(f'<text x="{x0}" y="{TOP - 6}">{escape(up)}</text>')
    for name, points in curves.items():
        line = " ".join(place(x, y) for x, y in points if math.isfinite(y))
        out.append(f'<polyline points="{line}" fill="none" {_stroke(names.index(name))}/>')
    return out


def _stroke(index: int) -> str:
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    return f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="1.6"' + (
        f' stroke-dasharray="{dash}"' if dash else ""
    )


def _ticks(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(step * k for k in (1, 2, 5, 10) if (high - low) / (step * k) <= 6)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
