"""Numbers and curves as short text: counts, rates, spans, sparklines. Pure."""

import math
import re
from collections.abc import Sequence

GONE = ("lost", "left")
"""States of a peer that is not there any more."""
BLOCKS = " ▁▂▃▄▅▆▇█"
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""Control characters other than tabs and line ends, halves of surrogate pairs, and marks that turn
the direction of the text behind them."""


def clean(text: str, limit: int = 200) -> str:
    """Text from outside made safe for a terminal: one line, no control or escape characters, at
    most ``limit`` long."""
    text = "".join(c if c.isprintable() else " " for c in text[: 4 * limit])
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return text


def shown(text: str) -> str:
    """Text of the model made safe for a terminal: it may hold any byte, and escape sequences must
    not reach the terminal. Lines and tabs stay, carriage returns go."""
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r", ""))


def count(number: float) -> str:
    """1204 -> "1,204", 18204 -> "18.2k", 41_200_000 -> "41.2M"."""
    if not math.isfinite(number):
        return "-"
    if abs(number) < 10_000:
        return f"{number:,.0f}"
    for unit, step in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= step * 0.9995:
            return f"{number / step:.1f}{unit}"
    return f"{number:,.0f}"


def bits(rate: float) -> str:
    """Bytes a second as lines are sold: 2.5e6 -> "20 Mbit/s", 300 -> "2.4 kbit/s"."""
    number = 8 * rate
    for unit in ("", "k", "M"):
        if number < 999.5:
            return f"{number:.3g} {unit}bit/s"
        number /= 1000
    return f"{number:.3g} Gbit/s"


def span(seconds: float) -> str:
    """At most five characters: "41s", "18m", "3h12m", "2d04h"."""
    whole = 0
    if math.isfinite(seconds):
        whole = int(max(0.0, seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86400:
        if whole < 36000:
            return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
        return f"{whole // 3600}h"
    if whole < 864000:
        return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
    return f"{whole // 86400}d"


def lasting(seconds: float) -> str:
    """A duration inside a sentence, in at most two units: "45 s", "3 h 10 min"."""
    whole = 0
    if math.isfinite(seconds):
        whole = round(max(0.0, seconds))
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    first = next((i for i, (_, size) in enumerate(units) if whole >= size), len(units) - 1)
    name, size = units[first]
    text = f"{whole // size} {name}"
    if first + 1 < len(units):
        smaller, step = units[first + 1]
        if rest := whole % size // step:
            text += f" {rest} {smaller}"
    return text


def ahead_or_behind(seconds: float) -> str:
    """Words for a clock that is ``seconds`` ahead of another: "ahead of", or "behind" below 0."""
    return "ahead of" if seconds > 0 else "behind"


def milliseconds(seconds: float) -> str:
    """A round trip, "-" for unknown."""
    if seconds <= 0:
        return "-"
    if seconds >= 0.0095:
        return f"{seconds * 1000:.0f}ms"
    return f"{seconds * 1000:.1f}ms"


def resample(values: Sequence[float], width: int) -> list[float]:
    """At most ``width`` points: finite values, averaged in equal buckets when there are more."""
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) <= width:
        return finite
    edges = [round(i * len(finite) / width) for i in range(width + 1)]
    return [sum(finite[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """A bar for every point, ``height`` rows, highest value at the top; every bar shows at least
    its foot."""
    points = resample(values, width)
    if not points or height < 1:
        return [""] * max(0, height)
    low = min(points)
    high = max(points)
    reach = high - low
    steps = [1 + round((v - low) / reach * (8 * height - 1)) if reach > 0 else 4 for v in points]
    return [
        "".join(BLOCKS[min(8, max(0, s - 8 * row))] for s in steps)
        for row in reversed(range(height))
    ]


def stacked(shares: Sequence[float], glyphs: Sequence[str], width: int) -> list[str]:
    """One run of glyphs per share, together exactly ``width`` long (all empty when nothing was
    measured)."""
    total = sum(s for s in shares if s > 0)
    if total <= 0:
        return [""] * len(shares)
    runs = []
    done = 0
    so_far = 0.0
    for share, glyph in zip(shares, glyphs, strict=True):
        so_far += max(0.0, share)
        edge = round(so_far / total * width)
        runs.append(glyph * (edge - done))
        done = edge
    return runs
