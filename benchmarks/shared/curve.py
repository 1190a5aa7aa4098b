"""Curves over a logarithmic axis as an SVG picture. Enters: points. Leaves: text. Never: a file."""

import math
from collections.abc import Mapping, Sequence
from html import escape

W = 900.0
H = 380.0
LEFT = 70.0
LOW = 310.0
TOP = 50.0
COLOURS = ("#272", "#23c", "#c33", "#888")


def curves(
    title: str, x_name: str, y_name: str, lines: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """One polyline a name over log2(x), x above 0; y from 0. Raises ValueError without points."""
    points = [p for line in lines.values() for p in line]
    if not points:
        raise ValueError("nothing to draw")
    first, last = (math.log2(f(x for x, _ in points)) for f in (min, max))
    top = 1.1 * max(y for _, y in points)

    def at(x: float, y: float) -> tuple[float, float]:
        share = (math.log2(x) - first) / (last - first) if last > first else 0.5
        return round(LEFT + share * (W - LEFT - 30), 1), round(LOW - y / top * (LOW - TOP), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{W:.0f}" height="{H:.0f}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{LEFT}" y="24" '
        f'font-size="15">{escape(title)}</text>',
    ]
    for x in sorted({x for x, _ in points}):
        parts.append(f'<text x="{at(x, 0)[0]}" y="{LOW + 18}" text-anchor="middle">{x:g}</text>')
    for i in range(6):
        y = top * i / 5
        _, down = at(2**first, y)
        parts.append(f'<line x1="{LEFT}" y1="{down}" x2="{W - 30}" y2="{down}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{down + 4}" text-anchor="end">{y:.2f}</text>')
    for i, (name, line) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        drawn = " ".join(f"{x},{y}" for x, y in (at(*p) for p in sorted(line)))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{drawn}"/>')
        parts.append(
            f'<text x="{W - 40}" y="{TOP + 16 * i}" text-anchor="end" '
            f'fill="{colour}">{escape(name)}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + W) / 2}" y="{LOW + 42}" text-anchor="middle">{escape(x_name)}</text>'
    )
    middle = (LOW + TOP) / 2
    parts.append(
        f'<text x="16" y="{middle}" transform="rotate(-90 16 {middle})" '
        f'text-anchor="middle">{escape(y_name)}</text></svg>'
    )
    return "\n".join(parts) + "\n"
