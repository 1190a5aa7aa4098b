"""Rounding errors between cells: the peer that rounded keeps the error and adds it when it rounds
next, and nobody adds it twice."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from node.averaging.strategies.diloco import OuterState
from node.averaging.strategies.outer import OuterSettings
from node.outer import merging
from node.outer.anchor import SAVED, Anchor
from node.outer.merging import FADES, STEP, WORDS, OuterSteps, WindowState, says
from node.wire.coding.codecs import decode

CODECS = ["top-k", "int4", "int8"]
SETTINGS = OuterSettings("butterfly", "deltas", "sgd", codec="int4", feedback=True, window_s=60.0)


def numbers(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn((30, 40), generator=g), "b": torch.randn(7, generator=g)}


@pytest.fixture
def kept() -> WindowState:
    """A stage's state with an error-feedback residual."""
    made = WindowState(OuterState.begin(numbers(0)))
    _, _, made.words = says(numbers(1), {}, "int4")
    return made


@pytest.fixture
def anchor() -> Anchor:
    stage: Any = SimpleNamespace(parameters=lambda: numbers(0))
    return Anchor(stage, SETTINGS, None, None, None)


@pytest.mark.parametrize("codec", CODECS)
def test_every_change_is_sent_or_kept_as_rounding_error(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "FADES", 1.0)
    owed: dict[str, Tensor] = {}
    moved, said = (dict.fromkeys("ab", torch.zeros(())) for _ in range(2))
    for seed in range(40):
        given = numbers(seed)
        word, _, owed = says(given, owed, codec)
        moved = {n: moved[n] + given[n] for n in given}
        said = {n: said[n] + word[n] for n in given}
    for n in moved:
        torch.testing.assert_close(said[n] + owed[n], moved[n], rtol=1e-4, atol=1e-3)
    assert owed["a"].any()


@pytest.mark.parametrize("codec", CODECS)
def test_encoding_with_feedback_is_repeatable(codec: str) -> None:
    _, _, owed = says(numbers(1), {}, codec)
    said, coded, _ = says(numbers(2), owed, codec)
    again, bytes_again, _ = says(numbers(2), owed, codec)
    for n, t in said.items():
        assert torch.equal(decode(coded[n], t.numel(), codec).view(t.shape), t)
        assert torch.equal(again[n], t)
        assert torch.equal(bytes_again[n], coded[n])


def test_rounding_errors_change_only_for_parts_that_are_said_and_once_they_are_taken(
    kept: WindowState,
) -> None:
    before = dict(kept.words)
    merge = OuterSteps(kept, SETTINGS, {"a": (30, 40)})
    assert merge.gives(numbers(2)) is not None
    assert kept.words == before, "it may still be that nobody takes it"
    assert merge.owes["b"] is before["b"], "this window carried another fragment"
    assert not torch.equal(merge.owes["a"], before["a"])


def test_rounding_errors_are_forgotten_with_a_difference_that_nobody_can_use(
    kept: WindowState,
) -> None:
    bad = numbers(2)
    bad["b"][0] = float("inf")
    assert OuterSteps(kept, SETTINGS, {"a": (30, 40), "b": (7,)}).gives(bad) is None
    assert kept.words == {}


@pytest.mark.parametrize(("codec", "share"), [("top-k", FADES), ("int8", 1.0)])
def test_what_is_owed_fades_in_formats_that_leave_numbers_out(codec: str, share: float) -> None:
    _, _, owed = says(numbers(1), {}, codec)
    said, _, left = says({"a": torch.zeros(30, 40)}, owed, codec)
    torch.testing.assert_close(said["a"] + left["a"], share * owed["a"])


def test_rounding_errors_of_another_shape_are_not_restored(
    kept: WindowState, anchor: Anchor
) -> None:
    own = {"anchor": numbers(0), "momentum": numbers(0), WORDS: dict(kept.words)}
    own[WORDS]["b"] = torch.zeros(3, 3)
    anchor.restored({n + SAVED: {part: of[n] for part, of in own.items()} for n in "ab"}, 0)
    assert anchor.state is not None
    assert anchor.words.keys() == {"a"}


def test_a_version_that_is_undone_takes_the_servers_step_with_it(anchor: Anchor) -> None:
    anchor.takes({**numbers(1), STEP: torch.tensor([3.0])}, None)
    assert anchor.step == 3
    anchor.rolled_back()
    assert anchor.step == 0
