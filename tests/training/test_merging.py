"""What cells with equal anchors make of their differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from node.averaging.strategies.diloco import OuterState
from node.averaging.strategies.outer import OuterSettings
from node.core.errors import WireError
from node.training.rounds.error_feedback import feedback_of
from node.training.rounds.merging import MOMENTUM, OuterSteps, moved

DENSE = OuterSettings("butterfly", "deltas", optimizer="nesterov", momentum=0.8, window_s=60.0)
SPARSE = replace(DENSE, optimizer="sgd", momentum=0.0, lr=1.0, codec="top-k", feedback=True)
SHAPES = {"w": (70, 90), "b": (90,)}
CELLS = ("a" * 16, "b" * 16, "c" * 16)


class Keeper:
    def __init__(self, s: OuterSettings, start: Mapping[str, Tensor]) -> None:
        self.state: OuterState | None = OuterState.begin(start)
        self.residual = feedback_of(s)

    def gives(self, of: Mapping[str, Tensor] | None = None) -> None: ...


def drawn(seed: int) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=dice) for name, shape in SHAPES.items()}


def window(s: OuterSettings, number: int, keepers: list[Keeper]) -> list[dict[str, Tensor]]:
    """Every cell trains somewhere, and makes its own step of what all gave."""
    merges = [OuterSteps(k, s, SHAPES, number) for k in keepers]
    locals_ = []
    for i, k in enumerate(keepers):
        assert k.state is not None
        at = drawn(100 * number + i)
        locals_.append({n: t + 0.1 * at[n] for n, t in k.state.anchor.items()})
    given = [m.gives(local) for m, local in zip(merges, locals_, strict=True)]
    made = []
    for i, (merge, keeper) in enumerate(zip(merges, keepers, strict=True)):
        said = {c: merge.opens(g or {}) for c, g in zip(CELLS, given, strict=True)}
        own = said.pop(CELLS[i])
        made.append(merge.makes(CELLS[i], own, said))
        keeper.residual.spoken()
        keeper.residual.moved()
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
    ],
    ids=lambda s: f"{s.codec}-{s.optimizer}",
)
def test_every_cell_comes_to_the_same_bits_window_after_window(s: OuterSettings) -> None:
    keepers = [Keeper(s, drawn(7)) for _ in CELLS]
    before = drawn(7)
    for number in range(1, 5):
        made = window(s, number, keepers)
        for name in made[0]:
            assert all(torch.equal(made[0][name], other[name]) for other in made[1:])
    assert not torch.equal(made[0]["w"], before["w"])


def test_what_coding_loses_is_owed_and_taken_back_with_the_round() -> None:
    keeper = Keeper(SPARSE, drawn(7))
    merge = OuterSteps(keeper, SPARSE, SHAPES, 1)
    local = drawn(8)
    said = merge.opens(merge.gives(local) or {})
    again = merge.opens(merge.gives(local) or {})
    assert all(torch.equal(said[n], again[n]) for n in said), "asked again it is the same"
    keeper.residual.spoken()
    keeper.residual.moved()
    for name, value in drawn(7).items():
        whole = value - local[name]
        assert torch.equal(keeper.residual.words[name], whole - said[name])
    keeper.residual.rolled_back()
    assert not keeper.residual.words


def test_bytes_that_nobody_writes_are_refused() -> None:
    merge = OuterSteps(Keeper(SPARSE, drawn(7)), SPARSE, SHAPES, 1)
    given = merge.gives(drawn(8)) or {}
    short = {**given, "w": given["w"][:-1].clone()}
    with pytest.raises(WireError):
        merge.opens(short)
    noise = given["w"].clone()
    noise.view(torch.uint8).fill_(255)
    with pytest.raises(WireError):
        merge.opens({**given, "w": noise})


def test_one_that_is_far_longer_than_the_others_counts_for_less() -> None:
    s = replace(DENSE, optimizer="sgd", momentum=0.0, lr=1.0)
    keeper = Keeper(s, {n: torch.zeros(of) for n, of in SHAPES.items()})
    merge = OuterSteps(keeper, s, SHAPES, 1)
    near, far = drawn(1), {n: 100.0 * t for n, t in drawn(2).items()}
    made = merge.makes(CELLS[0], near, {CELLS[1]: drawn(3), CELLS[2]: far})
    assert float(made["w"].norm()) < 2.0 * float(near["w"].norm())


def test_who_copies_keeps_what_it_has_learned_since_its_anchor() -> None:
    keeper = Keeper(DENSE, drawn(7))
    merge = OuterSteps(keeper, DENSE, SHAPES, 1)
    here, result = drawn(8), drawn(9)
    after = moved(here, merge.since(here, True), result)
    for name, was in drawn(7).items():
        assert torch.allclose(after[name] - result[name], here[name] - was, atol=1e-5)
