"""One sample as the model sees it, against the targets that it is trained on."""

import asyncio

import numpy as np
import pytest

from node.core.errors import UsageFault
from node.data.marks import CONTEXT, LAST
from node.data.order import SampleOrder
from node.data.sample_text import sample_lines
from node.data.samples import sample_of, samples_at
from node.data.sources import Corpus
from node.data.tokenizer import ByteTokenizer
from node.stage.text import pair
from tests.data.streamed import listed, stream, write

WORDS = ByteTokenizer()


def row(*parts: tuple[str, int]) -> np.ndarray:
    """Ids with their mark: each text's mark holds for all its tokens."""
    ids = [WORDS.encode(text).astype(np.uint32) | np.uint32(mark) for text, mark in parts]
    return np.concatenate(ids)


TALK = row(("hi?", CONTEXT), ("yes", 0), ("\n", LAST), ("who?", CONTEXT), ("me", 0))


@pytest.mark.parametrize("end", [None, LAST])
def test_what_is_shown_is_what_is_trained_on(end):
    sample = sample_of(TALK, end, marked=True)
    tokens, targets = pair(TALK.astype(np.int64)[None], end, marked=True)
    assert sample.ids[:-1].tolist() == tokens[0].tolist()
    assert sample.trained[1:].tolist() == (targets[0] >= 0).tolist()
    plain = np.array([1, 9, 2, 9, 3])
    sample = sample_of(plain, 9, marked=False)
    _, targets = pair(plain[None], 9)
    assert sample.trained[1:].tolist() == (targets[0] >= 0).tolist()


def test_lines_on_a_pipe_and_on_a_terminal():
    sample = sample_of(TALK, LAST, marked=True)
    assert list(sample_lines(sample, 1, WORDS, bold=False)) == [
        "sample 1: 12 tokens, 6 trained on",
        "  | hi?{+yes+}",
        "  |-- the next document, which does not see this one --",
        "  | who?{+me+}",
    ]
    bold = "\n".join(sample_lines(sample, 1, WORDS, bold=True))
    assert "\x1b[2mhi?\x1b[0m\x1b[1myes\x1b[0m" in bold
    assert "{+" not in bold
    cut = list(sample_lines(sample, 1, WORDS, bold=False, most=4))
    assert cut[1:] == ["  | hi?{+y+} …"]


def test_text_that_is_all_trained_on_has_no_marks_and_moves_no_cursor():
    sample = sample_of(WORDS.encode("a\x1b[2Jb\tc\r"), None, marked=False)
    assert list(sample_lines(sample, 12, WORDS, bold=True)) == [
        "sample 12: 8 tokens, all trained on",
        "  | a\ufffd[2Jb c\ufffd",
    ]


def test_samples_of_a_corpus_are_those_of_their_positions():
    corpus = Corpus(np.arange(41, dtype=np.uint8), np.arange(0), "", 259, 10)
    order = SampleOrder(corpus.windows, 3)
    for position, sample in zip((0, 5), samples_at(corpus, [0, 5], 3), strict=True):
        start = 10 * order.sample(position)
        assert sample.ids.tolist() == list(range(start, start + 11))
    with pytest.raises(UsageFault, match="counted from 1"):
        samples_at(corpus, [-1], 3)


def test_samples_of_a_stream_are_those_of_training(tmp_path):
    (tmp_path / "web").mkdir()
    write(tmp_path / "web" / "a.jsonl", [f"text {i}" * 9 for i in range(90)])
    source = f"file:{listed(tmp_path / 'web')}"
    found = samples_at(stream(source, tmp_path), [1, 2], 42)

    async def wanted() -> np.ndarray:
        made = stream(source, tmp_path)
        try:
            return await made.rows([1, 2])
        finally:
            await made.close()

    assert [s.ids.tolist() for s in found] == asyncio.run(wanted()).tolist()
