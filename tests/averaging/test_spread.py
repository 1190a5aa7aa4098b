"""The distance between cells, told from sketches of their parameters: close to the true one, and of
nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.averaging.reducers.sketch import SAMPLES, Sketcher
from node.averaging.reducers.spread import ERROR, WIDTH, apart, packed, unpacked
from node.core.errors import WireError

LARGE = 3 * SAMPLES + 17


def vector(seed: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def cut(flat: torch.Tensor, *at: int) -> dict[str, torch.Tensor]:
    """Tensors that are one vector in the order of their names."""
    edges = (0, *at, len(flat))
    return {f"{i:03d}": flat[a:b] for i, (a, b) in enumerate(pairwise(edges))}


def sketch(flat: torch.Tensor, about: str = "run/1") -> tuple[float, ...]:
    return Sketcher({"": len(flat)}, about).of({"": flat})


def true(cells: Sequence[torch.Tensor]) -> float:
    stack = torch.stack(list(cells)).double()
    return float((stack - stack.mean(0)).norm() / stack.norm())


@pytest.mark.parametrize("size", [1000, LARGE])
@pytest.mark.parametrize("scale", [1e-4, 0.1, 1.0])
def test_the_spread_is_the_true_one_within_its_error(size: int, scale: float) -> None:
    cells = [vector(0, size) + scale * vector(i, size) for i in (1, 2, 3)]
    found = [apart([sketch(c, f"run/{n}") for c in cells]) / true(cells) for n in range(40)]
    mean = sum(found) / len(found)
    # Three cells: two differences are averaged, so it is a little better than what is said of two.
    assert abs(mean - 1) < 4 * ERROR / math.sqrt(len(found))
    spread = math.sqrt(sum((f - mean) ** 2 for f in found) / len(found))
    assert 0.4 * ERROR < spread < 1.4 * ERROR
    assert max(abs(f - 1) for f in found) < 4 * ERROR


def test_a_full_sketch_sees_a_difference_in_few_parameters() -> None:
    one = vector(1, SAMPLES)
    two = one.clone()
    two[100:200] += 5.0
    assert apart([sketch(one), sketch(two)]) == pytest.approx(true([one, two]), rel=4 * ERROR)


def test_equal_cells_are_not_apart() -> None:
    cells = [sketch(vector(1, LARGE)) for _ in range(3)]
    assert cells[0] == cells[1] == cells[2], "every replica makes the same numbers"
    assert apart(cells) == 0.0
    assert apart([sketch(torch.zeros(10))] * 2) == 0.0
    assert apart([sketch(vector(1, 99)), sketch(-vector(1, 99))]) == 1.0
    with pytest.raises(ValueError, match="no cell"):
        apart([])


@given(st.lists(st.integers(0, LARGE), max_size=20), st.booleans())
def test_how_the_parameters_are_cut_does_not_matter(at: list[int], halves: bool) -> None:
    flat = vector(5, LARGE)
    parts = cut(flat, *sorted(at))
    if halves:
        parts = {n: t.reshape(-1, 2) if len(t) % 2 == 0 else t for n, t in reversed(parts.items())}
    assert Sketcher({n: t.numel() for n, t in parts.items()}, "run/1").of(parts) == sketch(flat)


def test_runs_are_sketched_differently_and_every_range_is_read() -> None:
    flat = vector(1, LARGE)
    assert sketch(flat, "run/1") != sketch(flat, "run/2")
    for begin in range(0, LARGE - 8, LARGE // 50):
        changed = flat.clone()
        changed[begin : begin + 8] += 1.0
        assert sketch(changed) != sketch(flat)


def test_a_sketch_round_trips_and_malformed_ones_are_refused() -> None:
    told = sketch(vector(1, 500))
    assert unpacked(packed(told)) == told
    assert unpacked(packed(())) == ()
    for raw in (
        packed(told)[:-4],
        packed(told) + b"1234",
        packed((math.inf,) * WIDTH),
        packed((math.nan,) * WIDTH),
    ):
        with pytest.raises(WireError):
            unpacked(raw)


def test_parameters_that_are_not_finite_have_no_sketch() -> None:
    assert sketch(torch.full((9,), math.nan)) == ()
    assert sketch(torch.full((9,), math.inf)) == ()


def test_half_precision_and_strides_are_read_as_what_they_hold() -> None:
    flat = vector(1, 1000).bfloat16()
    assert sketch(flat) == sketch(flat.float())
    wide = flat.reshape(20, 50)
    assert Sketcher({"": 1000}, "run/1").of({"": wide.t().contiguous().t()}) == sketch(flat)
