import math

import pytest

from node.control.words import (
    BLOCKS,
    chart,
    clean,
    count,
    milliseconds,
    resample,
    shown,
    span,
    stacked,
)
from node.core.numbers import several


@pytest.mark.parametrize(
    ("word", "numbers", "said"),
    [
        (count, (0, 1204, 9999, 18_204, 41_200_000), "0 1,204 9,999 18.2k 41.2M"),
        (count, (3e9, math.nan), "3.0G -"),
        (span, (0.8, 41, 61, 11_540, 36_000, 187_200), "0s 41s 1m 3h12m 10h 2d04h"),
        (span, (-5, math.inf), "0s 0s"),
        (milliseconds, (0, 0.0004, 0.031), "- 0.4ms 31ms"),
    ],
)
def test_numbers_become_short_words(word, numbers: tuple[float, ...], said: str):
    assert " ".join(map(word, numbers)) == said


@pytest.mark.parametrize("seconds", [10**k * m for k in range(8) for m in (1, 3, 9)])
def test_a_span_fits_its_column(seconds: int):
    assert len(span(seconds)) <= 5


def test_text_from_outside_cannot_move_the_cursor():
    assert clean("a\x1b[2Jb\nc\rd\x07") == "a [2Jb c d "
    assert clean("x" * 300, 10) == "x" * 9 + "…"


@pytest.mark.parametrize(
    "text",
    [
        "10\u202f000\u00a0€",
        "東京\u3000大阪",
        "\N{WOMAN}\u200d\N{PERSONAL COMPUTER}\ufe0f",
        "می\u200cخواهم\u200f",
        "a\u00adb\n\tc",
    ],
)
def test_ordinary_text_of_the_model_is_shown_as_it_is(text: str):
    assert shown(text) == text


def test_text_of_the_model_cannot_steer_the_terminal():
    assert shown("a\x1b[2Jb\x9bc\x00d\x7f") == "a\ufffd[2Jb\ufffdc\ufffdd\ufffd"
    assert shown("\ud800 \u202eexe.txt\u2066") == "\ufffd \ufffdexe.txt\ufffd"
    assert shown("a\r\nb\rc") == "a\nbc"


def test_a_chart_has_its_shape():
    rows = chart([4, 3, 2, 1], 10, 2)
    assert rows == ["█▄  ", "███▁"] or (
        len(rows) == 2 and rows[0][0] == "█" and rows[1][-1] == "▁" and rows[0][-1] == " "
    )
    assert chart([], 10, 3) == ["", "", ""]
    assert chart([math.nan, 1.0, math.inf], 5, 1) == [BLOCKS[4]]


def test_resampling_keeps_the_mean_and_the_width():
    values = [float(i) for i in range(1000)]
    short = resample(values, 78)
    assert len(short) == 78
    assert sum(short) / 78 == pytest.approx(499.5, rel=0.01)
    assert short == sorted(short)


def test_a_stacked_bar_is_exactly_as_wide_as_asked():
    for width in range(1, 40):
        assert sum(map(len, stacked([1, 2, 3.3, 0.1], "abcd", width))) == width
    assert stacked([0, 0], "ab", 10) == ["", ""]
    assert stacked([1, 0, 3], "abc", 8) == ["aa", "", "cccccc"]


@pytest.mark.parametrize(
    ("number", "what", "said"),
    [
        (1, "part", "1 part"),
        (0, "part", "0 parts"),
        (2, "micro-batch", "2 micro-batches"),
        (2, "epoch", "2 epochs"),
        (3, "copy", "3 copies"),
        (3, "day", "3 days"),
        (2, "address", "2 addresses"),
    ],
)
def test_a_number_of_things_has_its_plural(number: int, what: str, said: str):
    assert several(number, what) == said
