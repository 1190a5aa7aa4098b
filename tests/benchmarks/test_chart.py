"""Pictures: the format by the name of the file, refusals before the work, and the contents of a
PNG."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest

from benchmarks.shared import chart
from node.core.errors import LocalFault, UsageFault
from node.telemetry import pictures

PANELS = [
    (
        "tokens",
        "loss",
        {"one": [(0.0, 2.0), (1.0, 1.0)], "two": [(0.0, 3.0), (1.0, math.nan), (2.0, 2.5)]},
    )
]


def colours(path: Path) -> set[tuple[int, int, int]]:
    from matplotlib.image import imread

    pixels = (imread(path)[..., :3] * 255).round().astype(int)
    return {tuple(p) for row in pixels[::2] for p in row[::2].tolist()}


def rgb(text: str) -> tuple[int, int, int]:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def test_a_chart_is_drawn_in_both_kinds(tmp_path: Path) -> None:
    for kind in ("svg", "png"):
        chart.write(tmp_path / f"c.{kind}", "losses", PANELS, top=9.0)
    assert "losses" in (tmp_path / "c.svg").read_text()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    found = colours(tmp_path / "c.png")
    assert {rgb(chart.COLOURS[0]), rgb(chart.COLOURS[1])} <= found
    assert rgb(chart.COLOURS[2]) not in found


def test_an_svg_needs_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    chart.write(tmp_path / "c.svg", "losses", PANELS, top=9.0)
    assert (tmp_path / "c.svg").exists()


def test_a_missing_library_is_reported_with_its_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageFault) as caught:
        chart.write(tmp_path / "c.png", "losses", PANELS, top=9.0)
    assert "-m pip install matplotlib" in caught.value.next_step
    assert not (tmp_path / "c.png").exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name in ("c.bmp", "c", "png"):
        with pytest.raises(UsageFault, match="no such kind"):
            pictures.check(tmp_path / name)
    for kind in ("svg", "png"):
        with pytest.raises(LocalFault, match="cannot write") as caught:
            chart.write(tmp_path / "no" / f"c.{kind}", "losses", PANELS, top=9.0)
        assert not isinstance(caught.value, UsageFault)
