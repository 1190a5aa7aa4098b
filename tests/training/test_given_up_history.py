"""The loss of a peer whose side of a partition gives up its history for another one."""

import pytest

from node.consensus.version_history import GivenUp, VersionHistory
from node.core.journey import Version


def version(epoch: int, line: str = "a") -> Version:
    return Version(epoch, line * 32)


def history(*versions: Version) -> VersionHistory:
    """History of a peer that began epochs from these versions, with 100 tokens an epoch."""
    made = VersionHistory()
    for each in versions:
        made.stood(each, 100 * each.epoch)
    return made


def rows(*versions: Version) -> list[tuple[Version, int]]:
    return [(each, 100 * each.epoch) for each in versions]


def lost(past: VersionHistory) -> tuple[int, int]:
    return past.given_up_epochs, past.given_up_tokens


def test_a_peer_that_is_only_behind_loses_nothing() -> None:
    past = history(version(1), version(2))
    assert past.give_up(version(2), 200, rows(version(5), version(2))) is None
    assert lost(past) == (0, 0)


def test_epochs_since_the_histories_parted_are_lost() -> None:
    past = history(version(1), version(2), version(3, "b"), version(4, "b"))
    theirs = rows(version(9), version(3), version(2), version(1))
    assert past.give_up(version(5, "b"), 530, theirs) == GivenUp(2, 3, 330)
    assert lost(past) == (3, 330)


def test_losses_add_up() -> None:
    past = history(version(2), version(3, "b"))
    past.give_up(version(4, "b"), 400, rows(version(9), version(2)))
    past.stood(version(9), 900)
    past.stood(version(10, "c"), 1000)
    assert past.give_up(version(11, "c"), 1100, rows(version(12), version(9))) == GivenUp(9, 2, 200)
    assert lost(past) == (4, 400)


def test_a_loss_is_counted_once_however_many_plans_a_peer_listens_to() -> None:
    past = history(version(2), version(3, "b"))
    at = version(4, "b")
    for newest in (9, 10):
        found = past.give_up(at, 400, rows(version(newest), version(2)))
        assert (found is not None) is (newest == 9)
        assert lost(past) == (2, 200)
    past.stood(version(3, "b"), 300)
    assert past.give_up(at, 400, rows(version(20), version(2))) == GivenUp(2, 2, 200)


def test_a_loss_of_tokens_is_never_negative() -> None:
    past = history(version(2))
    found = past.give_up(version(3, "b"), 150, rows(version(9), version(2)))
    assert found == GivenUp(2, 1, 0)


def test_a_version_that_was_undone_belongs_to_no_history() -> None:
    past = history(version(1), version(2), version(3), version(4), version(3, "b"))
    theirs = rows(version(9), version(4), version(3), version(2))
    assert past.give_up(version(4, "b"), 400, theirs) == GivenUp(2, 2, 200)


def test_a_peer_from_before_all_that_the_leader_remembers_is_taken_for_behind() -> None:
    past = history(version(1))
    theirs = rows(version(40), version(39))
    assert past.give_up(version(2), 200, theirs) is None
    assert past.give_up(version(41, "b"), 4100, theirs) is None, "one epoch may be under way"
    assert lost(past) == (0, 0)


@pytest.mark.parametrize("theirs", [rows(version(40), version(39)), []], ids=["older", "none"])
def test_a_peer_beyond_a_foreign_history_cannot_say_what_it_loses(
    theirs: list[tuple[Version, int]],
) -> None:
    past = history(version(41, "b"))
    with pytest.raises(LookupError, match="epoch 42"):
        past.give_up(version(42, "b"), 4200, theirs)
    assert lost(past) == (0, 0)
