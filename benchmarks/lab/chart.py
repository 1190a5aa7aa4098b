"""Curves as one SVG, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
DASHES = ("", "6 3", "2 2")
WIDTH, HEIGHT, LEFT, TOP, GAP, BELOW = 460, 320, 60, 40, 70, 50
Points = Sequence[tuple[float, float]]


def svg(title: str, panels: Sequence[tuple[str, str, Mapping[str, Points]]], *, top: float, legend: int = 230) -> str:
    """Panels side by side: (what is across, what is up, curves by name). ``top``: values above it are cut off."""
    names = list(dict.fromkeys(name for _, _, curves in panels for name in curves))
    width = LEFT + len(panels) * (WIDTH + GAP) + legend
    height = max(TOP + HEIGHT + BELOW, TOP + 18 * len(names) + 20)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for i, (across, up, curves) in enumerate(panels):
        out += _panel(LEFT + i * (WIDTH + GAP), across, up, curves, names, top)
    for i, name in enumerate(names):
        x, y = width - legend, TOP + 12 + 18 * i
        out.append(
            f'<line x1="{x}" x2="{x + 28}" y1="{y}" y2="{y}" {_stroke(i)}/><text x="{x + 34}" y="{y + 4}">{escape(name)}</text>'
        )
    return "\n".join([*out, "</svg>\n"])


def _panel(x0: int, across: str, up: str, curves: Mapping[str, Points], names: list[str], top: float) -> list[str]:
    every = [p for points in curves.values() for p in points]
    right, low = max(x for x, _ in every), min(y for _, y in every)
    high = min(top, max(y for _, y in every))

    def place(x: float, y: float) -> str:
        return f"{x0 + WIDTH * x / right:.1f},{TOP + HEIGHT * (high - min(y, high)) / (high - low):.1f}"

    out = [f'<rect x="{x0}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>']
    for tick in _ticks(0, right):
        x = x0 + WIDTH * tick / right
        out.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{tick:g}</text>')
    for tick in _ticks(low, high):
        y = TOP + HEIGHT * (high - tick) / (high - low)
        out.append(f'<line x1="{x0}" x2="{x0 + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        out.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    out.append(f'<text x="{x0 + WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">{escape(across)}</text>')
    out.append(f'<text x="{x0}" y="{TOP - 6}">{escape(up)}</text>')
    for name, points in curves.items():
        line = " ".join(place(x, y) for x, y in points if math.isfinite(y))
        out.append(f'<polyline points="{line}" fill="none" {_stroke(names.index(name))}/>')
    return out


def _stroke(index: int) -> str:
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    return f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="1.6"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _ticks(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(step * k for k in (1, 2, 5, 10) if (high - low) / (step * k) <= 6)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
