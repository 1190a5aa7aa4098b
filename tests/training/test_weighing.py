"""Weights of cells by the agreement of their differences."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from node.outer.weighing import LESS, PIECE, weights_of

SIZE = 4000


def direction(seed: int) -> Tensor:
    drawn = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    return drawn / drawn.norm()


def honest(seed: int, cosine: float = 0.3) -> dict[str, Tensor]:
    """A difference of a cell: a direction that all share, and noise of its own, so that two of
    them have this cosine."""
    whole = math.sqrt(cosine) * direction(0) + math.sqrt(1.0 - cosine) * direction(seed)
    return {"w": whole[:1000].view(10, 100), "b": whole[1000:]}


def noise(seed: int) -> dict[str, Tensor]:
    return {"w": direction(seed)[:1000].view(10, 100), "b": direction(seed)[1000:]}


def scaled(of: dict[str, Tensor], by: float) -> dict[str, Tensor]:
    return {name: by * t for name, t in of.items()}


@pytest.mark.parametrize("cosine", [0.1, 0.3, 0.8, 0.97])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_cells_that_agree_as_usual_count_whole(cosine: float, count: int) -> None:
    given = {str(i): honest(i + 1, cosine) for i in range(count)}
    assert weights_of(given) == dict.fromkeys(given, 1.0)


@pytest.mark.parametrize("length", [0.01, 1.0, 30.0])
def test_a_difference_that_points_elsewhere_counts_less(length: float) -> None:
    given = {"a": honest(1), "b": scaled(noise(9), length), "c": honest(2)}
    assert weights_of(given) == {"a": 1.0, "b": LESS, "c": 1.0}


def test_a_difference_against_the_others_or_without_length_counts_less() -> None:
    given = {str(i): honest(i) for i in range(1, 5)}
    given["turned"] = scaled(honest(7), -1.0)
    given["zero"] = scaled(honest(8), 0.0)
    assert weights_of(given) == {**dict.fromkeys("1234", 1.0), "turned": LESS, "zero": LESS}


def test_a_cell_that_went_half_of_the_way_counts_whole() -> None:
    given = {"a": honest(1), "b": honest(2), "slow": scaled(honest(3, 0.15), 0.5)}
    assert set(weights_of(given).values()) == {1.0}


@pytest.mark.parametrize("length", [0.5, 1.0, 1.2])
def test_copies_share_the_weight_of_one(length: float) -> None:
    copy = {n: length * t + 0.2 * length * noise(20)[n] for n, t in honest(1).items()}
    given = {"a": honest(1), "b": copy, "c": honest(2), "d": honest(3)}
    assert weights_of(given) == {"a": 0.5, "b": 0.5, "c": 1.0, "d": 1.0}


def test_copies_of_a_difference_that_does_not_help_have_one_voice() -> None:
    given = {"a": honest(1), "b": noise(9), "c": honest(2), "d": noise(9)}
    assert weights_of(given) == {"a": 1.0, "b": LESS / 2, "c": 1.0, "d": LESS / 2}


@pytest.mark.parametrize("cosine", [0.1, 0.3, 0.8, 0.97])
@pytest.mark.parametrize(("good", "bad"), [(3, 1), (3, 2), (5, 3)])
def test_cells_that_agree_are_not_taken_for_copies_beside_others_that_point_elsewhere(
    cosine: float, good: int, bad: int
) -> None:
    given = {f"good {i}": honest(i + 1, cosine) for i in range(good)}
    given |= {f"bad {i}": noise(50 + i) for i in range(bad)}
    weights = weights_of(given)
    assert {weights[cell] for cell in given if cell.startswith("good")} == {1.0}
    assert {weights[cell] for cell in given if cell.startswith("bad")} == {LESS}


@pytest.mark.parametrize("third", ["a", "b"])
def test_beside_a_copy_a_single_other_cell_counts_whole(third: str) -> None:
    """Two that are the same and one that is not: nobody can say which is wrong."""
    given = {"a": honest(1, 0.1), "b": honest(2, 0.1)}
    given["c"] = given[third]
    assert set(weights_of(given).values()) == {1.0}


def test_without_a_majority_that_agrees_nobody_is_judged() -> None:
    given = {"a": honest(1), "b": honest(2), "c": noise(9), "d": noise(10)}
    assert set(weights_of(given).values()) == {1.0}
    assert set(weights_of({str(i): noise(i) for i in range(9)}).values()) == {1.0}


def test_differences_without_numbers_count_whole() -> None:
    assert set(weights_of(dict.fromkeys("abc", {})).values()) == {1.0}
    assert set(weights_of({c: {"w": torch.zeros(3)} for c in "abc"}).values()) == {1.0}


def test_the_order_in_which_contributions_arrive_changes_nothing() -> None:
    given = {"a": honest(1), "b": noise(9), "c": honest(2), "d": honest(2)}
    expected = weights_of(given)
    for order in itertools.permutations(given):
        assert weights_of({cell: given[cell] for cell in order}) == expected


def test_differences_longer_than_a_piece_are_judged_whole() -> None:
    """The cells differ only behind the first piece."""
    given: dict[str, dict[str, Tensor]] = {}
    for i, cell in enumerate("abc"):
        tail = (noise if cell == "c" else honest)(i + 1)["b"]
        given[cell] = {"w": torch.cat([torch.zeros(PIECE), tail])}
    assert weights_of(given) == {"a": 1.0, "b": 1.0, "c": LESS}


@pytest.mark.parametrize("copied", [2, 3, 4])
def test_plain_copies_are_found_where_they_are_most_of_a_group(copied: int) -> None:
    given = {f"copy {i}": honest(1) for i in range(copied)} | {"x": honest(2), "y": honest(3)}
    assert weights_of(given) == dict.fromkeys(given, 1 / copied) | {"x": 1.0, "y": 1.0}


@pytest.mark.parametrize("copied", [2, 3, 4])
def test_cells_that_agree_are_no_copies_beside_plain_ones(copied: int) -> None:
    """Beside a cell that points elsewhere, too."""
    given = {f"copy {i}": honest(1, 0.97) for i in range(copied)}
    given |= {"x": honest(2, 0.97), "y": honest(3, 0.97), "bad": noise(50)}
    expected = dict.fromkeys(given, 1 / copied) | {"x": 1.0, "y": 1.0, "bad": LESS}
    assert weights_of(given) == expected
