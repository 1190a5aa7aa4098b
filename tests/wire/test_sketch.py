"""Sketches of tensors: alike for one tensor and for related ones, not for others."""

import math

import pytest
import torch

from node.core.errors import WireError
from node.wire.sketch import (
    BYTES,
    MOST_ALIKE,
    NOTHING,
    Sketch,
    SketchTable,
    encode_all,
)
from node.wire.sketcher import Sketcher, read_sketch
from node.wire.tensors import begin_encoding, to_host

SHAPE = (4, 16, 48)


def sketch(tensor: torch.Tensor, seed: str = "plan") -> Sketch:
    return read_sketch(Sketcher(seed).sketch(tensor).tolist())


def likeness(one: Sketch, other: Sketch) -> float:
    """Likeness of two tensors, as :meth:`SketchTable.compare` finds it."""
    table = SketchTable([one.encoded(), other.encoded()], 1)
    (found,), _ = table.compare([(0, 0)], [(1, 0)])
    return found


def noise(number: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))


def test_a_sketch_travels_in_its_bytes() -> None:
    made = sketch(3 * noise(1))
    assert made.size == pytest.approx(math.log(3), abs=0.05)
    raw = made.encoded()
    assert len(raw) == BYTES
    came = Sketch.parse(raw)
    assert came.numbers == made.numbers
    assert came.size == pytest.approx(made.size, abs=0.002)
    table = SketchTable([encode_all([made, NOTHING]), encode_all([made, made])], 2)
    (alike, zero), (growth, _) = table.compare([(0, 0), (0, 1)], [(1, 1), (1, 0)])
    assert alike == pytest.approx(MOST_ALIKE)
    assert math.isnan(zero)
    assert growth == 0.0
    for wrong in (raw[:-1], raw + b"x", b"x"):
        with pytest.raises(WireError):
            Sketch.parse(wrong)
        with pytest.raises(WireError):
            SketchTable([raw, wrong], 1)


def test_likeness_is_of_the_angle_and_not_of_the_size() -> None:
    x = noise(1)
    for angle in (0.3, 1.0, 1.5):
        y = math.cos(angle) * x + math.sin(angle) * noise(2)
        found = [likeness(sketch(x, f"{i}"), sketch(7 * y, f"{i}")) for i in range(20)]
        mean = sum(found) / len(found)
        assert mean == pytest.approx(math.atanh(math.cos(angle)), abs=0.15)
    assert likeness(sketch(x), sketch(5 * x)) == pytest.approx(MOST_ALIKE)
    assert likeness(sketch(x), sketch(-x)) == pytest.approx(-MOST_ALIKE)


@pytest.mark.parametrize("what", ["all tokens", "first token"])
def test_other_tokens_are_unlike_though_they_have_much_in_common(what: str) -> None:
    common = 10 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    common[:] = common[0, 0]
    if what == "first token":
        common[:, 1:] = 0.0
    one = sketch(noise(1) + common)
    other = likeness(one, sketch(noise(2) + common))
    same = likeness(one, sketch(noise(1) + 0.3 * noise(2) + common))
    assert abs(other) < 0.6 < 1.5 < same


def test_a_few_long_rows_and_rows_of_zeros_decide_no_size() -> None:
    """In a young model the gradients of a few tokens are many times longer than the others."""
    x = noise(1)
    long = x.clone()
    long[0, 0] *= 30.0
    assert sketch(x).size < sketch(long).size < sketch(x).size + 0.2
    assert long.square().mean().sqrt() > 3 * x.square().mean().sqrt()
    some = x.clone()
    some[0, :8] = 0.0
    assert sketch(some).size == pytest.approx(sketch(x).size + 2 * math.log(7 / 8), abs=0.05)


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
def test_rounding_on_the_wire_changes_no_sketch(wire: str) -> None:
    x = noise(1)
    made = begin_encoding(x, wire, measure=False)
    came = to_host(made.data).float().view(SHAPE)
    assert likeness(sketch(x), sketch(came)) > 3.5
    assert likeness(sketch(x.bfloat16()), sketch(x)) > 3.5


def test_zeros_and_numbers_that_are_not_finite_have_no_sketch() -> None:
    x = noise(1)
    for empty in (torch.zeros(SHAPE), torch.full(SHAPE, float("nan"))):
        assert sketch(empty) == NOTHING
        assert math.isnan(likeness(sketch(x), sketch(empty)))
