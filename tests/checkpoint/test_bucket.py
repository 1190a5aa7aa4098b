from __future__ import annotations

import random

import pytest
import torch

from node.checkpoint.bucket import Bucket
from node.checkpoint.pins import PinKey, Pins, chosen
from node.checkpoint.state import StateKind
from node.core.journey import Version


def test_no_rate_is_no_limit() -> None:
    assert [Bucket(0).reserve(1 << 30, 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_a_burst_then_the_rate() -> None:
    bucket = Bucket(1000, burst_s=0.5)
    assert bucket.reserve(500, 10.0) == 0.0
    assert bucket.reserve(1000, 10.0) == 1.0
    assert bucket.reserve(1000, 10.0) == 2.0, "waiters queue behind each other"
    assert bucket.reserve(500, 100.0) == 0.0, "unused rate is kept only up to the burst"
    assert bucket.reserve(100, 100.0) == pytest.approx(0.1)


def test_the_average_never_exceeds_the_rate() -> None:
    dice, bucket, now, sent = random.Random(1), Bucket(2000, burst_s=0.25), 0.0, []
    for _ in range(1000):
        now += dice.expovariate(4)
        size = dice.randrange(1, 1000)
        sent.append((now + bucket.reserve(size, now), size))
    for i in range(0, len(sent), 50):
        window = sent[i:]
        assert sum(size for _, size in window) <= 2000 * (window[-1][0] - window[0][0] + 0.25) + 1000


def key(epoch: int) -> PinKey:
    return PinKey(1, StateKind.PARAMETERS, Version(epoch))


def test_pins_are_few_and_expire_unused_or_old() -> None:
    pins, tensors = Pins(limit=2, idle_s=10, longest_s=100), {"w": torch.ones(2)}
    assert pins.add(key(1), tensors, 0) is not None
    assert pins.add(key(2), tensors, 0) is not None
    assert pins.add(key(3), tensors, 1) is None
    assert pins.get(key(1), 9) is not None
    assert pins.get(key(2), 11) is None, "nobody read it for longer than idle_s"
    assert pins.add(key(3), tensors, 11) is not None
    for now in range(12, 100, 5):
        assert pins.get(key(1), now) is not None
    assert pins.get(key(1), 101) is None, "in use, but no joiner holds a snapshot for ever"


def test_a_snapshot_nobody_reads_gives_way_to_a_new_one() -> None:
    pins, tensors = Pins(limit=2, idle_s=10, longest_s=100), {"w": torch.ones(2)}
    old, read = pins.add(key(1), tensors, 0), pins.add(key(2), tensors, 0)
    assert old is not None
    assert read is not None
    read.readers = 1
    assert pins.add(key(3), tensors, 5) is not None
    assert pins.get(key(1), 5) is None
    assert pins.get(key(2), 5) is read


def test_a_pin_keeps_what_training_has_replaced() -> None:
    pins, live = Pins(), {"w": torch.ones(2), "step": torch.tensor(3)}
    pin = pins.add(key(1), live, 0)
    live["w"] = torch.zeros(2)
    assert pin is not None
    manifest = pin.describe(("step", "w"))
    assert bytes(pin.view("w")) == torch.ones(2).numpy().tobytes()
    assert pin.describe(("step", "w")) is manifest
    assert [t.head.name for t in manifest.tensors] == ["step", "w"]


def test_chosen_names() -> None:
    assert chosen(["b", "a"], []) == ("a", "b")
    assert chosen(["b", "a"], ["a", "a"]) == ("a",)
    assert chosen(["b", "a"], ["a", "c"]) is None
