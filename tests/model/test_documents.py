"""Documents packed into one sequence are computed as if each were alone."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from node.model.documents import NO_TARGET, ends_of, lengths_of, within
from node.model.settings import ModelSettings
from node.model.stages import build
from node.pipeline.visit_buffers import StageMath
from testbed.models.visits import visit
from testbed.reference.unsplit import Unsplit

SMALL = ModelSettings(layers=3, d_model=32, heads=4, kv_heads=2, d_ff=48, vocab=61, seq_len=16)
LENGTHS = ((5, 1, 7, 3), (16,), (9, 7))
"""Lengths of the documents in three sequences; the second's last document continues in the
third."""
ENDS = (4, 5, 12, 15, 40, 47)


def packed(settings: ModelSettings = SMALL) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, settings.vocab, (3, 17), generator=torch.Generator().manual_seed(7))
    targets = tokens[:, 1:].clone()
    targets.view(-1)[list(ENDS)] = NO_TARGET
    return tokens[:, :-1].contiguous(), targets


def test_ends_and_lengths_say_the_same() -> None:
    assert ends_of(packed()[1]) == ENDS
    assert lengths_of(ENDS, 3, 16) == (5, 1, 7, 3, 16, 9, 7)
    assert lengths_of((15, 47), 3, 16) == lengths_of((), 3, 16) == ()
    assert [within(ENDS, i, 1, 16) for i in range(3)] == [(4, 5, 12, 15), (), (8, 15)]
    assert within(ENDS, 1, 2, 16) == (24, 31)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_packed_document_is_as_it_is_alone(qk_norm: bool, recompute: bool) -> None:
    settings = replace(SMALL, qk_norm=qk_norm)
    together = Unsplit(settings)
    alone = Unsplit(settings)
    together.blocks.recompute = recompute
    tokens, targets = packed(settings)
    logits = together.logits(tokens, ENDS)
    loss, count = together.loss(tokens, targets)
    loss.backward()
    assert count == 48 - len(ENDS)
    total = torch.zeros(())
    for row, lengths in enumerate(LENGTHS):
        for stop, length in zip(accumulate(lengths), lengths, strict=True):
            here = slice(stop - length, stop)
            own = alone.logits(tokens[row : row + 1, here])[0]
            torch.testing.assert_close(logits[row, here], own, rtol=0, atol=1e-5)
            piece, _ = alone.loss(tokens[row : row + 1, here], targets[row : row + 1, here])
            piece.backward()
            total += piece.detach()
    assert float(loss.detach()) == pytest.approx(float(total), rel=1e-6)
    for a, b in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("most", [1, 2])
def test_a_visit_in_slices_keeps_documents_apart(most: int) -> None:
    x = torch.randn(3, 16, 32)
    dy = torch.randn(3, 16, 32)
    whole = visit(StageMath(build(SMALL, 1, 1), "fp32"), x, dy, ENDS)
    sliced = StageMath(build(SMALL, 1, 1), "fp32", recompute="stage")
    sliced.slice = most
    found = visit(sliced, x, dy, ENDS)
    for a, b in zip(found[:2], whole[:2], strict=True):
        one, other = (torch.frombuffer(bytearray(raw), dtype=torch.float32) for raw in (a, b))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for name, share in whole[2].items():
        torch.testing.assert_close(found[2][name], share, rtol=1e-5, atol=1e-5)
