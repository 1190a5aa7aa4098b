"""Outer steps of cells with equal anchors, from their differences."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from node.averaging.strategies.diloco import OuterState
from node.averaging.strategies.outer import OuterSettings
from node.core.errors import WireError
from node.outer.merging import (
    MOMENTUM,
    STEP,
    Named,
    OuterPushes,
    OuterSteps,
    WindowState,
    mean_of,
    moved,
    pushed_by,
)
from node.outer.weighing import LESS

DENSE = OuterSettings("butterfly", "deltas", optimizer="nesterov", momentum=0.8, window_s=60.0)
SPARSE = replace(DENSE, optimizer="sgd", momentum=0.0, lr=1.0, codec="top-k", feedback=True)
SHAPES = {"w": (70, 90), "b": (90,)}
CELLS = ("a" * 16, "b" * 16, "c" * 16)


def drawn(seed: int) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=dice) for name, shape in SHAPES.items()}


def window(s: OuterSettings, number: int, keepers: list[WindowState]) -> list[dict[str, Tensor]]:
    """Let every cell train somewhere, give its difference, and make its own step from all of them;
    returns the steps."""
    merges = [OuterSteps(k, s, SHAPES) for k in keepers]
    locals_ = []
    for i, k in enumerate(keepers):
        at = drawn(100 * number + i)
        locals_.append({n: t + 0.1 * at[n] for n, t in k.state.anchor.items()})
    given = [m.gives(local) for m, local in zip(merges, locals_, strict=True)]
    made = []
    for i, (merge, keeper) in enumerate(zip(merges, keepers, strict=True)):
        said = {c: merge.opens(g or {}) for c, g in zip(CELLS, given, strict=True)}
        own = said.pop(CELLS[i])
        made.append(merge.makes(CELLS[i], own, said))
        keeper.words = merge.owes or {}
        keeper.state = OuterState(
            {n: made[i][n] for n in SHAPES}, {n: made[i][n + MOMENTUM] for n in SHAPES}
        )
    return made


@pytest.mark.parametrize(
    "s",
    [
        DENSE,
        replace(DENSE, codec="int8"),
        replace(DENSE, codec="int4", feedback=True),
        replace(DENSE, codec="top-k", feedback=True),
        SPARSE,
        replace(DENSE, codec="int8", weights="agreement"),
    ],
    ids=lambda s: f"{s.codec}-{s.optimizer}-{s.weights}",
)
def test_every_cell_comes_to_the_same_bits_window_after_window(s: OuterSettings) -> None:
    keepers = [WindowState(OuterState.begin(drawn(7))) for _ in CELLS]
    before = drawn(7)
    for number in range(1, 5):
        made = window(s, number, keepers)
        for name in made[0]:
            assert all(torch.equal(made[0][name], other[name]) for other in made[1:])
    assert not torch.equal(made[0]["w"], before["w"])


def test_bytes_that_nobody_writes_are_refused() -> None:
    merge = OuterSteps(WindowState(OuterState.begin(drawn(7))), SPARSE, SHAPES)
    given = merge.gives(drawn(8)) or {}
    noise = given["w"].clone()
    noise.view(torch.uint8).fill_(255)
    for bad in (given["w"][:-1].clone(), noise):
        with pytest.raises(WireError):
            merge.opens({**given, "w": bad})


def test_one_that_is_far_longer_than_the_others_counts_for_less() -> None:
    keeper = WindowState(OuterState.begin({n: torch.zeros(of) for n, of in SHAPES.items()}))
    merge = OuterSteps(keeper, replace(DENSE, optimizer="sgd", momentum=0.0, lr=1.0), SHAPES)
    near = drawn(1)
    far = {n: 100.0 * t for n, t in drawn(2).items()}
    made = merge.makes(CELLS[0], near, {CELLS[1]: drawn(3), CELLS[2]: far})
    assert float(made["w"].norm()) < 2.0 * float(near["w"].norm())


def test_by_agreement_the_step_goes_along_the_differences_that_help() -> None:
    s = replace(DENSE, optimizer="sgd", momentum=0.0, lr=1.0, weights="agreement")
    shared = drawn(1)
    given = {
        cell: {n: shared[n] + t for n, t in drawn(seed).items()}
        for cell, seed in zip(CELLS, (2, 3, 4), strict=True)
    }
    given[CELLS[1]] = drawn(5)
    steps: list[dict[str, Tensor]] = []
    for cell in CELLS:
        merge = OuterSteps(WindowState(OuterState.begin(drawn(7))), s, SHAPES)
        steps.append(merge.makes(cell, given[cell], {c: t for c, t in given.items() if c != cell}))
        assert merge.weights == {CELLS[0]: 1.0, CELLS[1]: LESS, CELLS[2]: 1.0}
    for name, was in drawn(7).items():
        assert all(torch.equal(steps[0][name], step[name]) for step in steps[1:])
        a, b, c = (given[cell][name] for cell in CELLS)
        mean = (a + LESS * b + c) / (2.0 + LESS)
        assert torch.allclose(steps[0][name], was - mean, atol=1e-5)


def test_equal_weights_are_the_plain_mean_to_the_bit() -> None:
    given = {cell: drawn(i) for i, cell in enumerate(CELLS)}
    for name, mean in mean_of(given, dict.fromkeys(CELLS, 1.0)).items():
        assert torch.equal(mean, mean_of(given)[name])
        total = sum(
            (given[cell][name].double() for cell in CELLS[1:]), given[CELLS[0]][name].double()
        )
        assert torch.equal(mean, (total / len(CELLS)).float())


def test_a_peer_that_copies_keeps_what_it_has_learned_since_its_anchor() -> None:
    merge = OuterSteps(WindowState(OuterState.begin(drawn(7))), DENSE, SHAPES)
    here = drawn(8)
    result = drawn(9)
    after = moved(here, merge.since(here, True), result)
    for name, was in drawn(7).items():
        assert torch.allclose(after[name] - result[name], here[name] - was, atol=1e-5)


HOGWILD = OuterSettings("hogwild", "deltas", "sgd", lr=1.0, momentum=0.0, window_s=60.0)


class Cell(WindowState):
    """A cell of one giver. `local`: its parameters."""

    def __init__(self, start: Mapping[str, Tensor]) -> None:
        super().__init__(OuterState.begin(start))
        self.local = dict(start)

    def trains(self, by: Mapping[str, Tensor]) -> None:
        self.local = {name: t + by[name] for name, t in self.local.items()}

    def takes(
        self, name: str, merge: OuterPushes, given: Mapping[str, Tensor], made: Named
    ) -> bool:
        """Take over the result; returns True if this cell's push was in it."""
        left_out = merge.lacks(name, made)
        self.local = moved(self.local, merge.since(given, left_out), made)
        self.state = OuterState({n: made[n] for n in SHAPES}, self.state.momentum)
        self.step = int(made[STEP])
        self.pushed = pushed_by(made, self.pushed)
        return not left_out


def served(
    cells: list[Cell],
    present: set[int],
    s: OuterSettings = HOGWILD,
    lost: Collection[int] = (),
) -> list[bool]:
    """Play one window, which the first cell serves and only `present` ones come to in time; the
    result does not reach the `lost` ones. Returns for each cell whether its push was taken, as far
    as it knows."""
    merges = [OuterPushes(c, s, SHAPES, len(cells)) for c in cells]
    given = [dict(c.local) for c in cells]
    said = [m.opens(m.gives(c.local) or {}) for m, c in zip(merges, cells, strict=True)]
    came = {CELLS[i]: said[i] for i in present}
    made = merges[0].makes(CELLS[0], said[0], came)
    assert set(merges[0].ages) == {CELLS[i] for i in present}
    return [
        c.takes(CELLS[i], merges[i], given[i], made)
        if i in (present | {0, 1}).difference(lost)
        else False
        for i, c in enumerate(cells)
    ]


def test_every_push_counts_once_also_after_it_was_left_out() -> None:
    start = drawn(0)
    cells = [Cell(start) for _ in CELLS]
    moves = [drawn(i + 1) for i in range(6)]
    for cell, by in zip(cells, moves[:3], strict=True):
        cell.trains(by)
    assert served(cells, {2}) == [True, False, True]
    for cell, by in zip(cells, moves[3:], strict=True):
        cell.trains(by)
    assert served(cells, {1, 2}) == [True, True, True]
    total = {n: start[n] + sum(m[n] for m in moves) / 3 for n in SHAPES}
    for cell in cells:
        torch.testing.assert_close(cell.local, total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("staleness", [None, 8])
def test_a_push_is_not_taken_again_when_its_result_did_not_reach_its_cell(
    staleness: int | None,
) -> None:
    s = HOGWILD
    if staleness is not None:
        s = replace(HOGWILD, strategy="parameter-server", staleness=staleness)
    start = drawn(0)
    cells = [Cell(start) for _ in CELLS]
    cells[2].trains(first := drawn(1))
    served(cells, {2}, s, lost={2})
    for number in (2, 3):
        cells[2].trains(drawn(number))
        assert served(cells, {1, 2}, s, lost={2})[:2] == [True, True]
        once = {n: start[n] + first[n] / 3 for n in SHAPES}
        torch.testing.assert_close(dict(cells[0].local), once, rtol=1e-5, atol=1e-5)
    assert served(cells, {1, 2}, s) == [True, True, False]
    assert cells[2].step == cells[0].step == 4
    assert served(cells, {1, 2}, s) == [True, True, True], "it has a newer anchor now"


def test_another_server_that_has_the_results_takes_no_push_again_either() -> None:
    start = drawn(0)
    cells = [Cell(start) for _ in CELLS]
    cells[2].trains(first := drawn(1))
    served(cells, {1, 2}, lost={2})
    serves = OuterPushes(cells[1], HOGWILD, SHAPES, 2)
    own = serves.opens(serves.gives(cells[1].local) or {})
    stays = OuterPushes(cells[2], HOGWILD, SHAPES, 2)
    again = stays.opens(stays.gives(cells[2].local) or {})
    made = serves.makes(CELLS[1], own, {CELLS[2]: again})
    assert serves.repeated == {CELLS[2]}
    for n in SHAPES:
        torch.testing.assert_close(made[n], start[n] + first[n] / 3, rtol=1e-5, atol=1e-5)


def test_a_push_that_is_too_old_is_kept_by_its_cell() -> None:
    stale = replace(HOGWILD, strategy="parameter-server", staleness=1)
    start = drawn(0)
    cells = [Cell(start) for _ in CELLS]
    for _ in range(2):
        served(cells, {1}, stale)  # the third one is away
    cells[2].trains(by := drawn(1))
    assert (cells[0].step, cells[2].step) == (2, 0)
    assert served(cells, {1, 2}, stale) == [True, True, False]
    assert cells[2].step == 3, "it goes on from the newest anchor"
    torch.testing.assert_close(
        cells[2].local, {n: start[n] + by[n] for n in SHAPES}, rtol=1e-5, atol=1e-5
    )
    assert served(cells, {1, 2}, stale) == [True, True, True]
    torch.testing.assert_close(
        cells[0].local, {n: start[n] + by[n] / 3 for n in SHAPES}, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("step", [-1.0, float("nan"), float("inf"), 2.0**24])
def test_a_step_that_nobody_made_is_refused(step: float) -> None:
    merge = OuterPushes(Cell(drawn(0)), HOGWILD, SHAPES, 2)
    given = merge.gives(drawn(1)) or {}
    with pytest.raises(WireError, match="step"):
        merge.opens({**given, STEP: torch.tensor([step])})
