"""Contributions of cells and the result of a window, number by number."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from node.averaging.strategies.diloco import OuterState
from node.averaging.strategies.outer import OuterSettings
from node.core.errors import WireError
from node.outer.merging import (
    FAR,
    MOMENTUM,
    MOST_NAMED,
    MOST_PUSHED,
    MOST_STEPS,
    STEP,
    TAKEN,
    Merge,
    Named,
    OuterPushes,
    OuterSteps,
    WindowState,
    distance,
    finite,
    mean_of,
    merge_of,
    moved,
    nearer,
    pushed_by,
)

PARAMETERS = OuterSettings("butterfly", window_s=60.0)
PLAIN = OuterSettings("butterfly", "deltas", "sgd", lr=1.0, momentum=0.0, window_s=60.0)
NESTEROV = OuterSettings("butterfly", "deltas", "nesterov", momentum=0.8, window_s=60.0)
STATE = replace(NESTEROV, strategy="gossip", carries="state")
HOGWILD = replace(PLAIN, strategy="hogwild")
SHAPES = {"w": (3,), "b": (2,)}
A, B, C, D = ("aa0000" + "0" * 10, "bb0000" + "0" * 10, "cc0000" + "0" * 10, "dd0000" + "0" * 10)


def filled(w: float, b: float = 0.0) -> dict[str, Tensor]:
    return {"w": torch.full((3,), w), "b": torch.full((2,), b)}


def kept(w: float = 0.0) -> WindowState:
    """A stage's state with its anchor at ``w``."""
    return WindowState(OuterState.begin(filled(w)))


def steps(s: OuterSettings = PLAIN) -> OuterSteps:
    return OuterSteps(kept(), s, SHAPES)


def same(found: Named, expected: Named) -> None:
    torch.testing.assert_close(dict(found), dict(expected))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (PARAMETERS, Merge),
        (STATE, Merge),
        (NESTEROV, OuterSteps),
        (HOGWILD, OuterPushes),
        (replace(PLAIN, strategy="parameter-server"), OuterSteps),
        (replace(PLAIN, strategy="parameter-server", staleness=2), OuterPushes),
    ],
    ids=lambda value: value.strategy if isinstance(value, OuterSettings) else value.__name__,
)
def test_a_result_has_the_names_and_shapes_that_its_takers_expect(
    settings: OuterSettings, kind: type[Merge]
) -> None:
    merge = merge_of(settings, kept(), SHAPES, 2)
    assert type(merge) is kind
    own = merge.opens(merge.gives(filled(1.0)) or {})
    made = merge.makes(A, own, {B: own})
    assert {name: tuple(t.shape) for name, t in made.items()} == merge.made()


def test_parameters_are_given_as_they_are_and_averaged() -> None:
    merge = Merge(WindowState(), PARAMETERS, SHAPES)
    given = merge.gives({"w": torch.ones(3, dtype=torch.bfloat16)})
    same(given or {}, {"w": torch.ones(3)})
    same(merge.makes(A, filled(1.0), {B: filled(4.0), C: filled(7.0)}), filled(4.0))
    assert not merge.lacks(A, filled(1.0)), "it cannot be told"
    assert merge.since(filled(3.0), True)["w"].equal(filled(3.0)["w"])


def test_a_cell_without_an_anchor_gives_only_parameters() -> None:
    for settings in (STATE, NESTEROV, HOGWILD):
        assert merge_of(settings, WindowState(), SHAPES, 2).gives(filled(1.0)) is None
    with pytest.raises(ValueError, match="anchor"):
        OuterSteps(WindowState(), PLAIN, SHAPES).makes(A, filled(1.0), {})


def test_a_state_is_given_after_the_cells_own_outer_step() -> None:
    given = Merge(kept(), STATE, SHAPES).gives(filled(1.0)) or {}
    # nesterov: the difference -1 and 0.8 times the momentum, which is -1 as well
    same({"w": given["w"]}, {"w": torch.full((3,), STATE.lr * 1.8)})
    same({"w": given["w" + MOMENTUM]}, {"w": torch.full((3,), -1.0)})
    assert given.keys() == {"w", "b", "w" + MOMENTUM, "b" + MOMENTUM}


@pytest.mark.parametrize("settings", [PARAMETERS, PLAIN, HOGWILD], ids=lambda s: s.strategy)
def test_numbers_that_are_not_finite_are_refused(settings: OuterSettings) -> None:
    merge = merge_of(settings, kept(), SHAPES, 2)
    given = merge.gives(filled(1.0)) or {}
    assert finite(merge.opens(given))
    with pytest.raises(WireError, match="finite"):
        merge.opens({**given, "b": torch.tensor([1.0, float("nan")])})


def test_bytes_beyond_the_numbers_are_zero() -> None:
    merge = steps(replace(PLAIN, codec="bf16"))
    given = merge.gives(filled(1.0)) or {}
    same(merge.opens(given), filled(-1.0))
    assert given["w"].numel() == 2, "six bytes in two words"
    longer = torch.cat([given["w"], torch.zeros(1)])
    dirty = given["w"].clone()
    dirty.view(torch.uint8)[-1] = 1
    for bad in (longer, dirty):
        with pytest.raises(WireError, match="w is not 6 bytes of bf16"):
            merge.opens({**given, "w": bad})


def test_a_difference_that_cannot_be_coded_is_not_given() -> None:
    assert steps(replace(PLAIN, codec="int8")).gives(filled(float("nan"))) is None


def test_an_outer_step_goes_along_the_mean_of_the_differences() -> None:
    made = steps().makes(A, filled(1.0, 2.0), {B: filled(3.0)})
    same({"w": made["w"], "b": made["b"]}, filled(-2.0, -1.0))
    same({"w": made["w" + MOMENTUM]}, {"w": torch.full((3,), 2.0)})


@pytest.mark.parametrize(
    ("longest", "counts_for"),
    [
        (0.0, 0.0),
        (FAR, FAR),
        (FAR + 0.01, (FAR + 0.01) / 2),
        (4 * FAR, FAR),
        (4.1 * FAR, 4.1 * FAR / 8),
    ],
)
def test_a_difference_far_longer_than_the_median_is_halved_until_it_is_not(
    longest: float, counts_for: float
) -> None:
    came = {B: filled(1.0), C: filled(1.0), D: filled(longest)}
    made = steps().makes(A, filled(1.0), came)
    same({"w": made["w"]}, {"w": torch.full((3,), -(3.0 + counts_for) / 4)})


def test_the_median_of_three_lengths_is_the_second() -> None:
    made = steps().makes(A, filled(1.0), {B: filled(0.1), C: filled(2.9)})
    same({"w": made["w"]}, {"w": torch.full((3,), -4.0 / 3)})


def test_of_two_differences_none_is_too_long() -> None:
    made = steps().makes(A, filled(1.0), {B: filled(99.0)})
    same({"w": made["w"]}, {"w": torch.full((3,), -50.0)})
    made = steps().makes(A, filled(0.0), {B: filled(0.0), C: filled(99.0)})
    same({"w": made["w"]}, {"w": torch.full((3,), -33.0)})


def test_a_result_replaces_what_was_given_or_the_anchor() -> None:
    merge = OuterSteps(kept(5.0), PLAIN, {"w": (3,)})
    same(merge.since(filled(1.0), False), {"w": torch.full((3,), 1.0)})
    same(merge.since(filled(1.0), True), {"w": torch.full((3,), 5.0)})
    without = OuterSteps(WindowState(), PLAIN, {"w": (3,)})
    same(without.since(filled(1.0), True), {"w": torch.full((3,), 1.0)})


# ------------------------------------------------------------ pushes to a server


def server(step: int = 0, staleness: int | None = None, members: int = 4) -> OuterPushes:
    """The merge of a server whose anchor is at zero, made at ``step``."""
    holds = kept()
    holds.step = step
    settings = HOGWILD
    if staleness is not None:
        settings = replace(PLAIN, strategy="parameter-server", staleness=staleness)
    return OuterPushes(holds, settings, SHAPES, members)


def push(w: float, step: int) -> dict[str, Tensor]:
    return {**filled(w), STEP: torch.tensor([float(step)])}


def test_a_push_counts_for_its_share_of_the_group() -> None:
    made = server(7).makes(A, push(1.0, 7), {B: push(3.0, 7)})
    same({"w": made["w"]}, {"w": torch.full((3,), -(1.0 + 3.0) / 4)})
    assert made[STEP].tolist() == [8.0]


def test_a_result_names_the_cells_whose_pushes_it_has() -> None:
    merge = server()
    made = merge.makes(A, push(1.0, 0), {C: push(1.0, 0)})
    assert [merge.lacks(cell, made) for cell in (A, B, C)] == [False, True, False]
    assert made[TAKEN].numel() == MOST_NAMED


@pytest.mark.parametrize(
    ("staleness", "refused"), [(0, [B, C]), (1, [C]), (2, []), (None, [])], ids=str
)
def test_a_push_is_refused_beyond_the_staleness_in_steps(
    staleness: int | None, refused: list[str]
) -> None:
    merge = server(7, staleness)
    made = merge.makes(A, push(1.0, 7), {B: push(1.0, 6), C: push(1.0, 5), D: push(1.0, 9)})
    assert merge.ages == {B: 1, C: 2, D: 0}
    assert [cell for cell in (A, B, C, D) if merge.lacks(cell, made)] == refused
    assert [merge.late(age) for age in (1, 2)] == [B in refused, C in refused]


def test_a_push_that_contains_one_that_was_taken_is_refused() -> None:
    merge = server(7)
    taken = server(4).makes(A, push(1.0, 4), {B: push(1.0, 4), C: push(1.0, 2)})
    merge._kept.pushed = pushed_by(taken, {})
    made = merge.makes(A, push(1.0, 7), {B: push(1.0, 4), C: push(1.0, 5), D: push(1.0, 1)})
    assert merge.repeated == {B}
    assert [merge.refuses(cell) for cell in (B, C, D)] == [True, False, False]
    assert [cell for cell in (A, B, C, D) if merge.lacks(cell, made)] == [B]


def test_the_newest_pushes_are_remembered_and_none_of_a_later_step() -> None:
    def result(step: int, *cells: float) -> dict[str, Tensor]:
        whose = [*cells, *[0.0] * (MOST_NAMED - len(cells))]
        return {STEP: torch.tensor([float(step)]), TAKEN: torch.tensor(whose)}

    found = pushed_by(result(3, 7.0, 9.0), {})
    assert found == {7.0: 3, 9.0: 3}
    found = pushed_by(result(4, 9.0), found)
    assert found == {7.0: 3, 9.0: 4}
    assert pushed_by(result(4, 8.0), found) == {7.0: 3, 8.0: 4}, "another server, another step 4"
    for step in range(5, 5 + MOST_PUSHED):
        found = pushed_by(result(step, float(100 + step)), found)
    assert len(found) == MOST_PUSHED
    assert 9.0 not in found


def test_the_own_push_counts_at_any_step() -> None:
    merge = server(7, 0)
    assert not merge.lacks(A, merge.makes(A, push(1.0, 0), {}))


def test_steps_are_numbered_below_their_bound() -> None:
    merge = server(MOST_STEPS - 1)
    given = merge.gives(filled(1.0)) or {}
    assert given[STEP].tolist() == [MOST_STEPS - 1]
    assert merge.opens(given)[STEP].tolist() == [MOST_STEPS - 1]
    made = merge.makes(A, push(1.0, MOST_STEPS - 1), {})
    assert made[STEP].tolist() == [MOST_STEPS - 1], "it goes no further"
    assert merge.opens({**given, STEP: torch.zeros(1)})[STEP].tolist() == [0.0]


# ------------------------------------------------------------ arithmetic


def test_training_since_the_window_began_stays_and_mixing_keeps_a_share() -> None:
    same(moved(filled(5.0), filled(1.0), filled(2.0)), filled(6.0))
    same(moved(filled(5.0, 1.0), filled(1.0), filled(3.0), 0.25), filled(6.5, 1.0))
    assert moved(filled(5.0), {"w": torch.ones(3)}, filled(2.0)).keys() == {"w"}


def test_a_mean_is_over_all_cells() -> None:
    same(mean_of({A: filled(1.0), B: filled(2.0), C: filled(6.0)}), filled(3.0))


def test_a_distance_is_relative_to_the_length_of_the_second() -> None:
    assert distance({"w": torch.tensor([3.0, 5.0])}, {"w": torch.tensor([3.0, 4.0])}) == 0.2
    assert distance({"w": torch.tensor([3.0, 4.0])}, {"w": torch.zeros(2)}) == 5.0
    assert distance(filled(1.0), filled(1.0)) == 0.0
    apart = distance(filled(2.0, 3.0), filled(1.0, 1.0))
    assert apart == pytest.approx((11 / 5) ** 0.5)


def test_nearer_is_a_share_of_the_way_from_the_second() -> None:
    same(nearer(filled(5.0), filled(1.0), 0.25), filled(2.0))
