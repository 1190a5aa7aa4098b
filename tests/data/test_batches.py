import numpy as np
import torch

from node.data.order import SampleOrder
from node.data.sources import Corpus
from node.model.documents import NO_TARGET
from node.stage.text import Text


def text(held=50, end=None):
    corpus = Corpus(
        np.arange(101, dtype=np.uint16),
        np.arange(1000, 1000 + held, dtype=np.uint16),
        "",
        2000,
        10,
        end,
    )
    return Text(corpus, SampleOrder(corpus.windows, 1), 3)


def test_targets_are_one_ahead_and_windows_come_in_the_order():
    tokens, targets = text().at([3, 0, 3])
    assert tokens.shape == targets.shape == (3, 10)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)
    assert tokens[:, 0].tolist() == [text().order.sample(p) * 10 for p in (3, 0, 3)]
    assert all(t.is_contiguous() for t in (tokens, targets))


def test_a_pass_targets_every_token_but_the_first_once():
    _, targets = text().at(range(text().order.count))
    assert sorted(targets.flatten().tolist()) == list(range(1, 101))


def test_held_out_batches_go_through_the_text_and_round_again():
    first, _ = text().held_out(0)
    second, targets = text().held_out(1)
    assert first[:, 0].tolist() == [1000, 1010, 1020]
    assert (second[:, 0].tolist(), targets[0, -1]) == ([1030, 1000, 1010], 1040)
    assert text(held=0).held_out_count() == 0


def test_the_last_token_of_a_masked_document_has_no_target():
    every = range(text().order.count)
    tokens, targets = text(end=30).at(every)
    plain = text().at(every)
    assert torch.equal(tokens, plain[0])
    assert (targets == NO_TARGET).sum() == 1
    assert torch.equal(targets, plain[1].masked_fill(tokens == 30, NO_TARGET))
    assert text(end=1011).held_out(0)[1][1, :2].tolist() == [1011, NO_TARGET]
