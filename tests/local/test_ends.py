"""The ends cut over two processes by the vocabulary, which two do not divide; their layers, where
they hold any, by heads and inner width."""

import pytest
import torch

from node.core.ids import ENDS
from node.core.journey import Version
from node.model.documents import NO_TARGET
from node.model.shapes import parameter_shapes
from node.pipeline.visit_buffers import VisitBuffers
from testbed.models.visits import arrived, read

TOKENS = torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(3))
X = TOKENS[:, :-1].contiguous()
Y = TOKENS[:, 1:].contiguous()
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def hidden(seed):
    return torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(seed))


def loss_of(side, h, targets):
    """Take the loss of hidden states at the head; returns the visit and their gradient."""
    work = arrived(h)
    work.targets = targets
    side.math.loss(work)
    return work, torch.frombuffer(work.upstream, dtype=torch.float32).view(3, 16, 32)


def trip(side, seed):
    """Embedding, loss of some hidden states, and the embedding's backward, counted as one
    micro-batch."""
    first = VisitBuffers(0.0, (3, 16, 32), batch=lambda: (X, Y))
    side.math.embed(first)
    last, dh = loss_of(side, hidden(seed), first.targets)
    first.gradient = read(dh)
    side.math.embed_backward(first)
    side.gradients.offer([last.share, first.share], last.tokens)
    side.gradients.drain()
    return torch.frombuffer(first.output, dtype=torch.float32), dh, last.loss_sum


def test_epochs_of_training_are_those_of_one_device(ends):
    for epoch in range(2):
        for seed in (epoch, 10 + epoch):
            y, dh, loss = trip(ends.two, seed)
            y1, dh1, loss1 = trip(ends.one, seed)
            torch.testing.assert_close(y, y1, **CLOSE)
            torch.testing.assert_close(dh, dh1, **CLOSE)
            assert loss == pytest.approx(loss1, rel=1e-6)
        ends.step_alike(epoch, 2 * 48)
    model = ends.local.settings
    assert ends.one.state.parameters().keys() == parameter_shapes(model, 1, ENDS).keys()


def test_forward_only_work_is_that_of_one_device(ends):
    ends.two.state.adopt(ends.one.state.parameters(), Version(90))
    two = ends.two.math
    one = ends.one.math
    h = hidden(4)
    torch.testing.assert_close(two.logits_only(read(h)), one.logits_only(read(h)), **CLOSE)
    last = (4, 15, 21, 47)  # documents end there
    sent, alone = (torch.frombuffer(m.embed_only(X, last), dtype=torch.float32) for m in (two, one))
    torch.testing.assert_close(sent, alone, **CLOSE)
    alone, _ = one.loss_only(read(h), Y)
    assert two.loss_only(read(h), Y) == (pytest.approx(alone, rel=1e-6), 48)


def test_a_token_without_a_target_is_left_out_of_the_loss(ends):
    ends.two.state.adopt(ends.one.state.parameters(), Version(91))
    targets = Y.clone()
    targets[0, 3] = targets[2, 15] = NO_TARGET
    (two, dh), (one, dh1) = (loss_of(side, hidden(5), targets) for side in (ends.two, ends.one))
    assert [bool(d[0, 3].any()) for d in (dh, dh1)] == [False, False]
    assert (two.loss_sum, two.tokens) == (pytest.approx(one.loss_sum, rel=1e-6), 46)
    torch.testing.assert_close(dh, dh1, **CLOSE)


def test_a_token_outside_the_vocabulary_spares_the_devices(ends):
    with pytest.raises(IndexError):
        ends.two.math.embed_only(X + 61)
    h = torch.zeros(3, 16, 32)
    with pytest.raises(IndexError):
        ends.two.math.loss_only(read(h), Y - 61)
    with pytest.raises(ValueError, match="targets"):
        ends.two.math.loss_only(read(h), Y[:, :4])
    assert ends.two.math.loss_only(read(h), Y)[1] == 48
    assert ends.lost == []
