"""Memory kept for the next step: the same within the block, fresh outside, and never more than
there is room for."""

import threading

import pytest
import torch

from node.optim import scratch


@pytest.fixture(autouse=True)
def shelf(monkeypatch):
    monkeypatch.setattr(scratch, "_shelf", scratch._Shelf())
    monkeypatch.setattr(scratch, "_room", scratch._Room(1 << 12))


def test_a_name_has_the_memory_it_had_and_another_has_not():
    like = torch.zeros(0, dtype=torch.bfloat16)
    with scratch.reuse():
        first = scratch.empty("a", (8, 16), like)
        other = scratch.empty("b", (8, 16), like)
    with scratch.reuse():
        again = scratch.empty("a", (4, 3), like)
        larger = scratch.empty("a", (16, 16), like)
    assert (again.shape, again.dtype) == ((4, 3), torch.bfloat16)
    assert again.data_ptr() == first.data_ptr() != other.data_ptr()
    assert larger.data_ptr() != first.data_ptr()


def test_outside_and_after_a_failure_everything_is_fresh():
    like = torch.zeros(0)
    given = []

    def fail() -> None:
        with scratch.reuse():
            given.append(scratch.empty("a", (8,), like))
            raise ValueError("within")

    with pytest.raises(ValueError, match="within"):
        fail()
    assert scratch.empty("a", (8,), like).data_ptr() != given[0].data_ptr()


def test_threads_share_only_the_total_scratch_size():
    like = torch.zeros(0)
    found = []

    def act() -> None:
        with scratch.reuse():
            found.extend(scratch.empty("a", (512,), like) for _ in range(2))  # 2 KiB of the 4

    threads = [threading.Thread(target=act) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    same = [found[i].data_ptr() == found[i + 1].data_ptr() for i in (0, 2, 4)]
    assert same == [True, True, False], "two threads keep theirs, for the third there is no room"
    assert scratch._room.left == 0
