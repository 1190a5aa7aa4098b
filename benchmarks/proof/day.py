"""A day of volunteers: the product's services in virtual time, with machines that come and go as
SETI@home's hosts do, a day in an hour. The rows say what the hour costs to simulate, and where the
compute went that was there.

The account and the trace are :mod:`testbed.volunteers.losses` and :mod:`testbed.volunteers.people`.
"""

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Report
from node.telemetry import pictures
from testbed.volunteers.day import DayOutcome, day_setup, play
from testbed.volunteers.losses import Loss

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VOLUNTEERS, HOUR_S = 1_000, 3600.0
MANY, MINUTES_S = 10_000, 120.0
QUICK, QUICK_S, QUICK_BATCH = 60, 240.0, 80
"""Volunteers, seconds, and micro-batches of an epoch of the short run: one small cell."""
MOST_CPU_S = 1200.0
MOST_LOSS = 0.05


def rows(report: Report, root: Path, quick: bool = False, picture: Path | None = None) -> None:
    """The rows of part 8."""
    if quick:
        day = play(QUICK, QUICK_S, setup=replace(day_setup(), micro_batches=QUICK_BATCH))
    else:
        day = play(VOLUNTEERS, HOUR_S)
    if picture is not None:
        title = f"{day.volunteers} volunteers, {day.seconds:.0f} s"
        pictures.write(picture, lambda: _svg(day, title), lambda: _figure(day, title))
    _cost(report, day)
    account = day.account
    report.add(
        "8 tokens committed over the ideal",
        account.tokens_committed / account.tokens_ideal,
        "share",
        f"{account.tokens_committed} tokens; {day.there:.0f} machines there on average, "
        f"{day.cells} cells at the end",
    )
    report.add(
        f"8 {Loss.UNDER_WAY.value}", day.losses[Loss.UNDER_WAY] / account.ideal, "share", "not lost"
    )
    for loss in Loss:
        share = day.losses[loss] / account.ideal
        if loss is not Loss.UNDER_WAY:
            report.add(
                f"8 loss: {loss.value}",
                share,
                "share",
                "",
                f"at most {MOST_LOSS}",
                holds=share <= MOST_LOSS,
            )
    rest = account.ideal - account.useful - sum(day.losses.values())
    report.add(
        "8 ideal less useful work and all losses",
        rest / account.ideal,
        "share",
        "",
        "0, to 9 places",
        holds=abs(rest) < 1e-9 * account.ideal,
    )
    if not quick:
        _cost(report, play(MANY, MINUTES_S))


def _cost(report: Report, day: DayOutcome) -> None:
    """The row of the processor time of a day."""
    each = 1e6 * day.cpu_s / (day.there * day.seconds)
    report.add(
        f"8 processor time of {day.volunteers} volunteers for {day.seconds:.0f} s",
        day.cpu_s,
        "s",
        f"{each:.0f} us for a second of a machine that is there, {day.events} events",
        f"at most {MOST_CPU_S:.0f}",
        holds=day.cpu_s <= MOST_CPU_S,
    )


# ------------------------------------------------------------ the picture

USEFUL = "useful work"
GREEN = "#2ca02c"
COLOURS = (
    "#1f77b4",
    "#aec7e8",
    "#c6dbef",
    "#ff7f0e",
    "#d62728",
    "#ff9896",
    "#fdd0a2",
    "#fdae6b",
    "#fd8d3c",
    "#9467bd",
    "#c5b0d5",
    "#8c564b",
    "#c49c94",
    "#7f7f7f",
    "#c7c7c7",
)
"""A colour for each cause of loss, in the order of :class:`Loss`."""


def _shares(day: DayOutcome) -> tuple[list[float], dict[str, list[float]]]:
    """Minutes, and the share of the ideal of each minute that went into useful work and into each
    cause. Work of epochs under way is shown as useful."""
    minutes: list[float] = []
    rows: dict[str, list[float]] = {USEFUL: [], **{loss.value: [] for loss in Loss}}
    for before, after in pairwise([(0.0, 0.0, 0.0, dict.fromkeys(Loss, 0.0)), *day.shown]):
        ideal = after[1] - before[1]
        if ideal <= 0:
            continue
        minutes.append(after[0] / 60.0)
        useful = after[2] - before[2]
        for loss in Loss:
            seconds = after[3][loss] - before[3][loss]
            if loss is Loss.UNDER_WAY:
                useful += seconds
            rows[loss.value].append(seconds / ideal)
        rows[USEFUL].append(useful / ideal)
    del rows[Loss.UNDER_WAY.value]
    return minutes, rows


def _figure(day: DayOutcome, title: str) -> "Figure":
    """The picture for a PNG. Raises UsageFault without matplotlib."""
    minutes, rows = _shares(day)
    made = pictures.new_figure(11.0, 5.0)
    axes = made.add_subplot()
    values = [[max(0.0, v) for v in row] for row in rows.values()]
    axes.stackplot(minutes, values, labels=list(rows), colors=[GREEN, *COLOURS])
    axes.set_ylim(0, 1)
    axes.set_xlabel("virtual minutes")
    axes.set_ylabel("share of the compute that was there")
    axes.set_title(title, fontsize=11, loc="left")
    made.legend(loc="outside right upper", frameon=False, fontsize=8)
    return made


def _svg(day: DayOutcome, title: str) -> str:
    """The same as SVG: a column for each minute."""
    minutes, rows = _shares(day)
    left, top, wide, high = 50.0, 40.0, 700.0, 320.0
    each = wide / max(1, len(minutes))
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="1120" height="420" '
        'font-family="sans-serif" font-size="12"><rect width="1120" height="420" fill="white"/>'
        f'<text x="{left}" y="24" font-size="14">{escape(title)}</text>'
    ]
    for i in range(len(minutes)):
        at = top + high
        for (name, row), colour in zip(rows.items(), (GREEN, *COLOURS), strict=False):
            part = min(max(0.0, row[i]) * high, at - top)
            at -= part
            out.append(
                f'<rect x="{left + i * each:.2f}" y="{at:.2f}" width="{each:.2f}" '
                f'height="{part:.2f}" fill="{colour}"><title>{escape(name)}</title></rect>'
            )
    out += _legend([*rows], left + wide + 16, top)
    last = f"{minutes[-1]:.0f}" if minutes else "0"
    out.append(
        f'<text x="{left}" y="{top + high + 18}">0</text>'
        f'<text x="{left + wide}" y="{top + high + 18}" text-anchor="end">{last} virtual minutes'
        f'</text><text x="{left - 6}" y="{top + 10}" text-anchor="end">1</text></svg>'
    )
    return "\n".join(out) + "\n"


def _legend(names: Sequence[str], x: float, y: float) -> list[str]:
    """A line of text for each name, with its colour."""
    return [
        f'<rect x="{x}" y="{y + 20 * i}" width="12" height="12" fill="{colour}"/>'
        f'<text x="{x + 18}" y="{y + 20 * i + 11}">{escape(name)}</text>'
        for i, (name, colour) in enumerate(zip(names, (GREEN, *COLOURS), strict=False))
    ]
