"""What rounding loses between cells: who rounded owes it, pays it when it rounds next, and nobody
pays twice."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from node.averaging.coding.codecs import decode
from node.averaging.exchange.request import PartOrigin
from node.core.ids import PeerId
from node.training.rounds.error_feedback import ErrorFeedback

ME, OTHER = PeerId("me"), PeerId("other")
CODECS = ["top-k", "int4", "int8"]


def numbers(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn((30, 40), generator=g), "b": torch.randn(7, generator=g)}


def parts(*names: str, by: PeerId = ME, owner: PeerId = OTHER) -> dict[str, PartOrigin]:
    return {name: PartOrigin(owner, 1, (by,)) for name in names}


ROUNDS = itertools.count()


def speak(
    residual: ErrorFeedback, given: dict[str, Tensor], taken: dict[str, PartOrigin]
) -> dict[str, Tensor]:
    residual.begin(str(next(ROUNDS)))
    said, _ = residual.says(given)
    residual.ended(taken, said, ME)
    residual.moved()
    residual.settled()
    return said


@pytest.mark.parametrize("codec", CODECS)
def test_every_change_is_sent_or_kept_as_rounding_error(codec: str) -> None:
    residual, moved, said = (
        ErrorFeedback(codec),
        dict.fromkeys("ab", torch.zeros(())),
        dict.fromkeys("ab", torch.zeros(())),
    )
    for seed in range(40):
        given = numbers(seed)
        word = speak(residual, given, parts("a", "b"))
        moved = {n: moved[n] + given[n] for n in given}
        said = {n: said[n] + word[n] for n in given}
    for n in moved:
        torch.testing.assert_close(said[n] + residual.words[n], moved[n], rtol=1e-4, atol=1e-3)
    assert residual.words["a"].any()


@pytest.mark.parametrize("codec", CODECS)
def test_encoding_with_feedback_is_repeatable(codec: str) -> None:
    residual = ErrorFeedback(codec)
    speak(residual, numbers(1), parts("a", "b"))
    said, coded = residual.says(numbers(2))
    again, bytes_again = residual.says(numbers(2))
    for n, t in said.items():
        assert torch.equal(decode(coded[n], t.numel(), codec).view(t.shape), t)
        assert torch.equal(again[n], t)
        assert torch.equal(bytes_again[n], coded[n])


def test_rounding_errors_change_only_for_accepted_parts() -> None:
    residual = ErrorFeedback("top-k")
    speak(residual, numbers(1), parts("a", "b"))
    before = dict(residual.words)
    speak(residual, numbers(2), parts("a") | parts("b", by=OTHER))
    assert torch.equal(residual.words["b"], before["b"]), "that part was averaged without its word"
    assert not torch.equal(residual.words["a"], before["a"])


def test_an_undone_round_leaves_rounding_errors_unchanged() -> None:
    residual = ErrorFeedback("int4")
    speak(residual, numbers(1), parts("a", "b"))
    before = dict(residual.words)
    residual.begin(str(next(ROUNDS)))
    residual.says(numbers(2))
    residual.ended(parts("a", "b"), numbers(2), ME)
    residual.begin(str(next(ROUNDS)))  # the epoch begins anew before anything was adopted
    residual.moved()
    assert all(torch.equal(residual.words[n], before[n]) for n in before)
    said, _ = residual.says(numbers(2))
    residual.ended(parts("a", "b"), said, ME)
    residual.moved()
    assert not torch.equal(residual.words["a"], before["a"])
    residual.rolled_back()
    assert all(torch.equal(residual.words[n], before[n]) for n in before)


def test_only_the_final_averager_keeps_its_rounding_error() -> None:
    residual, total, given = ErrorFeedback("top-k"), torch.zeros(30, 40), torch.zeros(30, 40)
    mean = fresh = dict[str, Tensor]()
    for seed in range(20):
        mean = {"a": numbers(seed)["a"]}
        residual.begin(str(next(ROUNDS)))
        whole = residual.makes(mean)
        fresh = {"a": torch.where(whole["a"].abs() > 1, whole["a"], 0.0)}
        residual.ended(parts("a", owner=ME), fresh, ME)
        residual.moved()
        total, given = total + mean["a"], given + fresh["a"]
    torch.testing.assert_close(given + residual.means["a"], total, rtol=1e-4, atol=1e-3)
    before = residual.means["a"]
    residual.begin(str(next(ROUNDS)))
    residual.makes(mean)
    residual.ended(parts("a", owner=OTHER), fresh, ME)
    residual.moved()
    assert torch.equal(residual.means["a"], before), "somebody else averaged it in the end"


def test_copied_parts_drop_their_rounding_error() -> None:
    residual = ErrorFeedback("int8")
    speak(residual, numbers(1), parts("a", "b"))
    before = residual.words["b"]
    residual.says(numbers(2))
    residual.copied(["a"])
    assert residual.words.keys() == {"b"}
    assert residual.words["b"] is before
    residual.rolled_back()
    assert residual.words.keys() == {"a", "b"}


@pytest.mark.parametrize("codec", ["top-k", "int8"])
def test_words_nobody_can_use_are_forgotten(codec: str) -> None:
    residual = ErrorFeedback(codec)
    speak(residual, numbers(1), parts("a", "b"))
    bad = numbers(2)
    bad["b"][0] = float("inf")
    said, coded = residual.says(bad)
    assert not coded
    assert said["b"] is bad["b"], "as it is, for the exchange to refuse"
    residual.ended({}, {}, ME, refused=True)
    residual.moved()
    assert residual.words == {}


def test_a_checkpoint_keeps_the_rounding_errors() -> None:
    residual, back = ErrorFeedback("int4"), ErrorFeedback("int4")
    speak(residual, numbers(1), parts("a", "b"))
    residual.makes(numbers(3))
    residual.ended(parts("a", owner=ME), numbers(4), ME)
    residual.moved()
    for n, t in numbers(1).items():
        back.restored(n, residual.saved(n), tuple(t.shape))
    assert back.words.keys() == {"a", "b"}
    assert back.means.keys() == {"a"}
    assert all(torch.equal(back.words[n], residual.words[n]) for n in back.words)
    other = ErrorFeedback("int4")
    other.restored("a", residual.saved("a"), (3, 3))
    assert other.words == {}


def test_a_mean_made_while_a_round_is_read_does_not_disturb_it() -> None:
    class Meanwhile(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            # as a step does that the round did not wait for, on a thread of its own
            residual.makes({"late": torch.ones(3)})
            return super().__getitem__(name)

    residual = ErrorFeedback("int8")
    residual.begin("round")
    made = residual.makes(numbers(0))
    residual.ended(parts("a", "b", owner=ME), Meanwhile({n: t - 1 for n, t in made.items()}), ME)
    residual.moved()
    assert residual.means.keys() == {"a", "b"}
    assert all(torch.allclose(t, torch.ones(())) for t in residual.means.values())
