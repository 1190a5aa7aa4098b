"""What rounding loses between cells: who rounded owes it, pays it when it rounds next, and nobody
pays twice."""

import itertools

import pytest
import torch
from torch import Tensor

from node.averaging.coding.codecs import decode
from node.averaging.strategies.outer import OuterSettings
from node.training.rounds.error_feedback import FADES, ErrorFeedback, feedback_of

CODECS = ["top-k", "int4", "int8"]
ROUNDS = itertools.count()


def numbers(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn((30, 40), generator=g), "b": torch.randn(7, generator=g)}


def speak(residual: ErrorFeedback, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """A round in which all that is said is taken, and its version becomes final."""
    residual.begin(str(next(ROUNDS)))
    said, _ = residual.says(given)
    residual.spoken()
    residual.moved()
    residual.settled()
    return said


def spoken(codec: str) -> tuple[ErrorFeedback, dict[str, Tensor]]:
    """One that has spoken once, and what it owes since."""
    residual = ErrorFeedback(codec)
    speak(residual, numbers(1))
    return residual, dict(residual.words)


def unchanged(residual: ErrorFeedback, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(residual.words[n], before[n]) for n in before)


@pytest.mark.parametrize("codec", CODECS)
def test_every_change_is_sent_or_kept_as_rounding_error(codec: str) -> None:
    residual, moved, said = (
        ErrorFeedback(codec),
        dict.fromkeys("ab", torch.zeros(())),
        dict.fromkeys("ab", torch.zeros(())),
    )
    for seed in range(40):
        given = numbers(seed)
        word, moved = speak(residual, given), {n: moved[n] + given[n] for n in given}
        said = {n: said[n] + word[n] for n in given}
    for n in moved:
        torch.testing.assert_close(said[n] + residual.words[n], moved[n], rtol=1e-4, atol=1e-3)
    assert residual.words["a"].any()


@pytest.mark.parametrize("codec", CODECS)
def test_encoding_with_feedback_is_repeatable(codec: str) -> None:
    residual, _ = spoken(codec)
    said, coded = residual.says(numbers(2))
    again, bytes_again = residual.says(numbers(2))
    for n, t in said.items():
        assert torch.equal(decode(coded[n], t.numel(), codec).view(t.shape), t)
        assert torch.equal(again[n], t)
        assert torch.equal(bytes_again[n], coded[n])


def test_rounding_errors_change_only_for_parts_that_are_said() -> None:
    residual, before = spoken("top-k")
    speak(residual, {"a": numbers(2)["a"]})
    assert torch.equal(residual.words["b"], before["b"]), "this window carried another fragment"
    assert not torch.equal(residual.words["a"], before["a"])


def test_a_refused_message_leaves_rounding_errors_unchanged() -> None:
    residual, before = spoken("int4")
    residual.begin(str(next(ROUNDS)))
    residual.says(numbers(2))
    residual.moved()  # only what others made was put in place
    assert unchanged(residual, before)
    residual.begin(str(next(ROUNDS)))
    residual.spoken()
    residual.moved()
    assert unchanged(residual, before), "said in another round"


def test_an_undone_round_leaves_rounding_errors_unchanged() -> None:
    residual, before = spoken("int4")
    residual.begin(str(next(ROUNDS)))
    residual.says(numbers(2))
    residual.spoken()
    residual.begin(str(next(ROUNDS)))  # another window before anything was adopted
    residual.moved()
    assert unchanged(residual, before)
    residual.says(numbers(2))
    residual.spoken()
    residual.moved()
    assert not torch.equal(residual.words["a"], before["a"])
    assert residual.owed is not residual.words, "the version before is the final one"
    residual.rolled_back()
    assert unchanged(residual, before)


def test_who_joins_owes_what_another_replica_owes() -> None:
    residual, joins = ErrorFeedback("int8"), ErrorFeedback("int8")
    speak(residual, numbers(1))
    speak(joins, numbers(2))
    before = dict(joins.words)
    joins.takes_over(residual.words)
    assert joins.words == residual.words
    assert joins.words is not residual.words
    joins.rolled_back()
    assert joins.words == before


@pytest.mark.parametrize("codec", ["top-k", "int8"])
def test_words_nobody_can_use_are_forgotten(codec: str) -> None:
    residual, _ = spoken(codec)
    bad = numbers(2)
    bad["b"][0] = float("inf")
    residual.begin(str(next(ROUNDS)))
    said, coded = residual.says(bad)
    assert not coded
    assert said["b"] is bad["b"], "as it is, so that nothing is given"
    residual.moved()
    assert residual.words == {}


def test_what_is_owed_fades_in_formats_that_leave_numbers_out() -> None:
    for codec, share in (("top-k", FADES), ("int8", 1.0)):
        s = OuterSettings("butterfly", "deltas", "sgd", codec=codec, feedback=True, window_s=60.0)
        residual = feedback_of(s)
        speak(residual, numbers(1))
        owed, nothing = residual.words["a"], {"a": torch.zeros(30, 40)}
        said = speak(residual, nothing)
        torch.testing.assert_close(said["a"] + residual.words["a"], share * owed)


def test_rounding_errors_of_another_shape_are_not_restored() -> None:
    residual, _ = spoken("int4")
    other = ErrorFeedback("int4")
    other.restored("a", residual.saved("a"), (3, 3))
    assert other.words == {}
