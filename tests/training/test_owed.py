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
from node.training.rounds.owed import ErrorFeedback

ME, OTHER = PeerId("me"), PeerId("other")
CODECS = ["top-k", "int4", "int8"]


def numbers(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn((30, 40), generator=g), "b": torch.randn(7, generator=g)}


def parts(*names: str, by: PeerId = ME, owner: PeerId = OTHER) -> dict[str, PartOrigin]:
    return {name: PartOrigin(owner, 1, (by,)) for name in names}


ROUNDS = itertools.count()


def speak(
    owed: ErrorFeedback, given: dict[str, Tensor], taken: dict[str, PartOrigin]
) -> dict[str, Tensor]:
    owed.begin(str(next(ROUNDS)))
    said, _ = owed.says(given)
    owed.ended(taken, said, ME)
    owed.moved()
    owed.settled()
    return said


@pytest.mark.parametrize("codec", CODECS)
def test_what_was_moved_has_been_said_or_is_owed(codec: str) -> None:
    owed, moved, said = (
        ErrorFeedback(codec),
        dict.fromkeys("ab", torch.zeros(())),
        dict.fromkeys("ab", torch.zeros(())),
    )
    for seed in range(40):
        given = numbers(seed)
        word = speak(owed, given, parts("a", "b"))
        moved = {n: moved[n] + given[n] for n in given}
        said = {n: said[n] + word[n] for n in given}
    for n in moved:
        torch.testing.assert_close(said[n] + owed.words[n], moved[n], rtol=1e-4, atol=1e-3)
    assert owed.words["a"].any()


@pytest.mark.parametrize("codec", CODECS)
def test_its_bytes_are_what_it_says_and_the_same_when_it_is_asked_again(codec: str) -> None:
    owed = ErrorFeedback(codec)
    speak(owed, numbers(1), parts("a", "b"))
    said, coded = owed.says(numbers(2))
    again, bytes_again = owed.says(numbers(2))
    for n, t in said.items():
        assert torch.equal(decode(coded[n], t.numel(), codec).view(t.shape), t)
        assert torch.equal(again[n], t)
        assert torch.equal(bytes_again[n], coded[n])


def test_what_was_not_taken_is_owed_no_more_than_before_and_what_was_is() -> None:
    owed = ErrorFeedback("top-k")
    speak(owed, numbers(1), parts("a", "b"))
    before = dict(owed.words)
    speak(owed, numbers(2), parts("a") | parts("b", by=OTHER))
    assert torch.equal(owed.words["b"], before["b"]), "that part was averaged without its word"
    assert not torch.equal(owed.words["a"], before["a"])


def test_a_round_that_is_undone_or_never_adopted_leaves_debts_as_they_were() -> None:
    owed = ErrorFeedback("int4")
    speak(owed, numbers(1), parts("a", "b"))
    before = dict(owed.words)
    owed.begin(str(next(ROUNDS)))
    owed.says(numbers(2))
    owed.ended(parts("a", "b"), numbers(2), ME)
    owed.begin(str(next(ROUNDS)))  # the epoch begins anew before anything was adopted
    owed.moved()
    assert all(torch.equal(owed.words[n], before[n]) for n in before)
    said, _ = owed.says(numbers(2))
    owed.ended(parts("a", "b"), said, ME)
    owed.moved()
    assert not torch.equal(owed.words["a"], before["a"])
    owed.rolled_back()
    assert all(torch.equal(owed.words[n], before[n]) for n in before)


def test_means_are_owed_by_who_averaged_them_where_its_result_was_the_one() -> None:
    owed, total, given = ErrorFeedback("top-k"), torch.zeros(30, 40), torch.zeros(30, 40)
    mean = fresh = dict[str, Tensor]()
    for seed in range(20):
        mean = {"a": numbers(seed)["a"]}
        owed.begin(str(next(ROUNDS)))
        whole = owed.makes(mean)
        fresh = {"a": torch.where(whole["a"].abs() > 1, whole["a"], 0.0)}
        owed.ended(parts("a", owner=ME), fresh, ME)
        owed.moved()
        total, given = total + mean["a"], given + fresh["a"]
    torch.testing.assert_close(given + owed.means["a"], total, rtol=1e-4, atol=1e-3)
    before = owed.means["a"]
    owed.begin(str(next(ROUNDS)))
    owed.makes(mean)
    owed.ended(parts("a", owner=OTHER), fresh, ME)
    owed.moved()
    assert torch.equal(owed.means["a"], before), "somebody else averaged it in the end"


def test_nothing_is_owed_where_nobody_knows_what_became_of_it() -> None:
    owed = ErrorFeedback("int8")
    speak(owed, numbers(1), parts("a", "b"))
    before = owed.words["b"]
    owed.says(numbers(2))
    owed.copied(["a"])
    assert owed.words.keys() == {"b"}
    assert owed.words["b"] is before
    owed.rolled_back()
    assert owed.words.keys() == {"a", "b"}


@pytest.mark.parametrize("codec", ["top-k", "int8"])
def test_words_nobody_can_use_are_forgotten(codec: str) -> None:
    owed = ErrorFeedback(codec)
    speak(owed, numbers(1), parts("a", "b"))
    bad = numbers(2)
    bad["b"][0] = float("inf")
    said, coded = owed.says(bad)
    assert not coded
    assert said["b"] is bad["b"], "as it is, for the exchange to refuse"
    owed.ended({}, {}, ME, refused=True)
    owed.moved()
    assert owed.words == {}


def test_a_checkpoint_keeps_what_is_owed() -> None:
    owed, back = ErrorFeedback("int4"), ErrorFeedback("int4")
    speak(owed, numbers(1), parts("a", "b"))
    owed.makes(numbers(3))
    owed.ended(parts("a", owner=ME), numbers(4), ME)
    owed.moved()
    for n, t in numbers(1).items():
        back.restored(n, owed.saved(n), tuple(t.shape))
    assert back.words.keys() == {"a", "b"}
    assert back.means.keys() == {"a"}
    assert all(torch.equal(back.words[n], owed.words[n]) for n in back.words)
    other = ErrorFeedback("int4")
    other.restored("a", owed.saved("a"), (3, 3))
    assert other.words == {}


def test_a_mean_that_is_made_while_the_round_is_looked_at_does_not_disturb_it() -> None:
    class Meanwhile(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            # as a step does that the round did not wait for, on a thread of its own
            owed.makes({"late": torch.ones(3)})
            return super().__getitem__(name)

    owed = ErrorFeedback("int8")
    owed.begin("round")
    made = owed.makes(numbers(0))
    owed.ended(parts("a", "b", owner=ME), Meanwhile({n: t - 1 for n, t in made.items()}), ME)
    owed.moved()
    assert owed.means.keys() == {"a", "b"}
    assert all(torch.allclose(t, torch.ones(())) for t in owed.means.values())
