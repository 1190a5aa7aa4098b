import threading

import pytest
import torch

from node.pipeline.gradients import GradientSum

LONG_S = 20.0


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


class Slow(dict[str, torch.Tensor]):
    """A share whose first tensor is not there before ``go``."""

    def __init__(self) -> None:
        super().__init__({"a": torch.ones(2)})
        self.asked = threading.Event()
        self.go = threading.Event()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.asked.set()
        assert self.go.wait(LONG_S)
        return super().__getitem__(name)


def test_a_new_epoch_does_not_wait_for_shares_of_the_old_one():
    total = GradientSum()
    old = Slow()
    total.offer([old, {"a": torch.ones(2)}], 3)
    adding = threading.Thread(target=total.drain)
    adding.start()
    assert old.asked.wait(LONG_S)
    reset = threading.Thread(target=total.reset)
    reset.start()
    try:
        reset.join(LONG_S / 2)
        assert not reset.is_alive()
        total.offer([{"a": torch.full((2,), 5.0)}], 7)
        assert total.micro_batches == 1
        torch.testing.assert_close(total.whole(), ({"a": torch.full((2,), 5.0)}, 7), rtol=0, atol=0)
    finally:
        old.go.set()
        adding.join(LONG_S)
    torch.testing.assert_close(total.whole(), ({"a": torch.full((2,), 5.0)}, 7), rtol=0, atol=0)


def test_an_epoch_that_began_anew_has_no_sums():
    total = GradientSum()
    old = Slow()
    total.offer([old], 3)
    found: list[object] = []
    reading = threading.Thread(target=lambda: found.append(total.whole()))
    reading.start()
    assert old.asked.wait(LONG_S)
    total.reset()
    old.go.set()
    reading.join(LONG_S)
    assert found == [({}, 0)]
