from dataclasses import replace

import numpy as np
import pytest
import torch

from node.core.errors import UsageFault
from node.data.batches import batch, held_out_batch
from node.data.order import SampleOrder
from node.data.sources import Corpus
from node.model.documents import NO_TARGET


def corpus(held=50):
    return Corpus(
        np.arange(101, dtype=np.uint16), np.arange(1000, 1000 + held, dtype=np.uint16), "", 2000, 10
    )


def test_targets_are_one_ahead_and_windows_come_in_the_order():
    order = SampleOrder(corpus().windows, 1)
    tokens, targets = batch(corpus(), order, [3, 0, 3])
    assert tokens.shape == targets.shape == (3, 10)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)
    assert tokens[:, 0].tolist() == [order.sample(p) * 10 for p in (3, 0, 3)]
    assert tokens.is_contiguous()
    assert targets.is_contiguous()


def test_a_pass_targets_every_token_but_the_first_once():
    order = SampleOrder(corpus().windows, 1)
    _, targets = batch(corpus(), order, range(order.count))
    assert sorted(targets.flatten().tolist()) == list(range(1, 101))


def test_held_out_batches_go_through_the_text_and_round_again():
    first, _ = held_out_batch(corpus(), 0, 3)
    second, targets = held_out_batch(corpus(), 1, 3)
    assert first[:, 0].tolist() == [1000, 1010, 1020]
    assert (second[:, 0].tolist(), targets[0, -1]) == ([1030, 1000, 1010], 1040)
    with pytest.raises(UsageFault):
        held_out_batch(corpus(held=0), 0, 3)


def test_the_last_token_of_a_masked_document_has_no_target():
    text = corpus()
    order = SampleOrder(text.windows, 1)
    tokens, targets = batch(replace(text, end=30), order, range(order.count))
    plain = batch(text, order, range(order.count))
    assert torch.equal(tokens, plain[0])
    assert (targets == NO_TARGET).sum() == 1
    assert torch.equal(targets, plain[1].masked_fill(tokens == 30, NO_TARGET))
    held = held_out_batch(replace(text, end=1011), 0, 3)[1]
    assert held[1, :2].tolist() == [1011, NO_TARGET]
