"""Samples and their file."""

import json

import pytest

from node.web.samples import FILE, FRESH, MOST, MOST_TEXT, SampleFile, TextSample, with_sample


def made(epoch: int) -> TextSample:
    return TextSample(epoch, 1000 * epoch, f"text {epoch}")


def test_the_first_and_the_newest_are_kept():
    kept: list[TextSample] = []
    for epoch in range(0, 4000, 4):
        kept = with_sample(kept, made(epoch))
        assert len(kept) <= MOST
    epochs = [one.epoch for one in kept]
    assert epochs[0] == 0
    assert epochs[-FRESH:] == list(range(4000 - 4 * FRESH, 4000, 4))
    assert epochs == sorted(set(epochs))


def test_a_run_that_went_back_loses_what_came_after():
    assert with_sample([made(4), made(8)], made(6)) == [made(4), made(6)]


def test_the_file_gives_back_what_was_written(tmp_path):
    SampleFile(tmp_path, "run", "The ").write([made(1), made(2)])
    assert SampleFile(tmp_path, "run", "The ").read() == [made(1), made(2)]
    assert SampleFile(tmp_path, "another", "The ").read() == []
    assert SampleFile(tmp_path, "run", "A ").read() == []


@pytest.mark.parametrize(
    "rows",
    [
        "[",
        "[]",
        "null",
        "[" * 100_000,
        json.dumps({"run_id": "run", "prompt": "p", "samples": 7}),
        json.dumps({"run_id": "run", "prompt": "p", "samples": [7, {"epoch": -1}, {"epoch": 1}]}),
        " " * (2 << 20),
    ],
)
def test_a_damaged_file_counts_as_empty(tmp_path, rows):
    (tmp_path / FILE).write_text(rows)
    assert SampleFile(tmp_path, "run", "p").read() == []


def test_texts_of_a_file_are_bounded_and_without_control_characters(tmp_path):
    row = {"epoch": 1, "tokens": 2, "text": "\x1b[31m\ud800" + "x" * 10_000}
    document = {"run_id": "run", "prompt": "p", "samples": [row] * 50}
    (tmp_path / FILE).write_text(json.dumps(document))
    found = SampleFile(tmp_path, "run", "p").read()
    assert len(found) == MOST
    assert len(found[0].text) == MOST_TEXT
    assert "\x1b" not in found[0].text
    found[0].text.encode()
