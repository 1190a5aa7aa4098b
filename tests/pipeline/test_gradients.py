import pytest
import torch

from node.pipeline.gradients import GradientSum


def test_shares_add_up_and_the_first_is_not_kept_by_reference():
    total = GradientSum()
    first = torch.ones(2, 3)
    total.offer([{"a": first}, {"b": torch.ones(1).expand(4)}], 10)
    total.drain()
    total.offer([{"a": torch.full((2, 3), 2.0)}, {"b": torch.ones(4)}], 5)
    expected = {"a": torch.full((2, 3), 3.0), "b": torch.full((4,), 2.0)}
    torch.testing.assert_close(total.whole(), (expected, 15), rtol=0, atol=0)
    assert torch.equal(first, torch.ones(2, 3))
    total.reset()
    assert total.whole() == ({}, 0)


def test_a_share_that_fails_to_be_added_is_added_later(monkeypatch):
    total = GradientSum()
    ones = torch.ones(2)

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    total.offer([{"a": ones}], 3)
    total.drain()
    total.offer([{"a": ones}, {"a": ones, "b": ones}], 5)
    with monkeypatch.context() as short_of_memory:
        short_of_memory.setattr(torch.Tensor, "to", full)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                total.drain()
    torch.testing.assert_close(total.whole(), ({"a": 3 * ones, "b": ones}, 8), rtol=0, atol=0)
