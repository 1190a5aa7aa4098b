"""Pictures as files: SVG from text that the caller makes, PNG by matplotlib, which is loaded when
one is wanted.

Enters: the drawing, a path. Leaves: a file. Never: a window, a global figure (pyplot), matplotlib
for an SVG.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from node.core.errors import refuse, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS = 110
"""Pixels for an inch."""
LIBRARY = "matplotlib"
KINDS = (".svg", ".png")


def check(path: Path) -> None:
    """Check ``path`` before long work. Raises UsageFault if it is no picture that can be made here,
    with the next step."""
    kind = path.suffix.lower()
    refuse(
        (
            kind not in KINDS,
            f"{path.name}: no such kind of picture",
            "name a file that ends in .svg or .png",
        ),
        (
            kind == ".png" and importlib.util.find_spec(LIBRARY) is None,
            f"a PNG needs {LIBRARY}, which is not installed",
            f"install it:  {sys.executable} -m pip install {LIBRARY}   or name a file that ends in "
            ".svg",
        ),
    )


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, ``width`` by ``height`` inches. Raises UsageFault without the library."""
    check(Path("new.png"))
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DOTS, layout="constrained")


def write(path: Path, svg: Callable[[], str], figure: Callable[[], Figure]) -> None:
    """Draw in the kind that the name ends in; the other is not made. Raises UsageFault, and for
    a file that cannot be written LocalFault or OutOfResources."""
    check(path)
    with writing(path, "name a file in a directory that can be written"):
        if path.suffix.lower() == ".svg":
            path.write_text(svg(), encoding="utf-8")
        else:
            figure().savefig(path, format="png")
