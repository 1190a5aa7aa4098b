import io
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from node.control.terminal import PLAIN, _safe, plain, prepare, shows

ROOT = Path(__file__).parents[2]


def written(text: str, encoding: str) -> bytes:
    """Bytes that a terminal of ``encoding`` gets for ``text``."""
    prepare()
    sent = io.BytesIO()
    stream = _safe(io.TextIOWrapper(sent, encoding=encoding, newline=""))
    stream.write(text)
    stream.flush()
    return sent.getvalue()


def test_frames_arrows_and_letters_have_a_likeness():
    assert written("┌─┐│╰╱ 1 → 2 … 5.5 ↓ café ✓", "ascii") == b"+-+|+/ 1 > 2 ~ 5.5 v cafe +"
    assert written("café 1 → 2", "latin-1") == "café 1 > 2".encode("latin-1")
    assert written("café 1 → 2…", "cp1252") == "café 1 > 2…".encode("cp1252")
    assert written("café 1 → 2…", "utf-8") == "café 1 → 2…".encode()


def test_a_character_without_a_code_is_written_as_wide_question_marks():
    assert written("a日本b", "ascii") == b"a????b"
    assert written("a\udcffb", "utf-8") == b"a?b"


def test_every_likeness_is_ascii_of_one_column():
    assert {len(text) for text in PLAIN.values() if text.isascii()} == {1}


def test_levels_of_a_chart_and_kinds_of_a_bar_stay_apart():
    assert len({plain(c) for c in "▁▂▃▄▅▆▇█"}) == 8
    assert len({plain(c) for c in "█▓▒░"}) == 4


@given(st.text(), st.sampled_from(["ascii", "latin-1", "cp1252", "koi8-r", "utf-8"]))
def test_any_text_can_be_written(text, encoding):
    written(text, encoding).decode(encoding)


@given(st.text(st.characters(categories=["L", "N", "P", "S"])))
def test_columns_stay_where_they_are(text):
    assert len(written(text, "ascii")) == cell_len(text)


def test_a_stream_that_was_closed_before_leads_nowhere():
    code = """
import os, sys
from node.control.terminal import prepare
prepare()
made = os.open("/dev/null", os.O_RDONLY)
print("nobody reads this")
sys.stdout.flush()
sys.exit(3 if made < 3 else 0)
"""
    script = f"exec {sys.executable} -c '{code}' >&- 2>&- <&-"
    assert subprocess.run(["sh", "-c", script], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize(("encoding", "can"), [("ascii", False), ("utf-8", True), ("cp437", True)])
def test_block_elements_are_shown_where_the_encoding_has_them(encoding, can):
    assert shows("█▀▄", io.TextIOWrapper(io.BytesIO(), encoding=encoding)) is can
