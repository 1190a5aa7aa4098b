"""How long a fetch waits for donors that say nothing."""

import pytest

from node.checkpoint import description_wait as waiting
from node.checkpoint.description_wait import DescriptionWait, alone_s

GB = 10**9


def after(asked: int, nbytes: int, *answers: float, refused: int = 0) -> DescriptionWait:
    """The wait after descriptions that came at these seconds, and refusals that came at once."""
    wait = DescriptionWait(asked, nbytes)
    for seconds in answers:
        wait.answered(seconds, True)
    for _ in range(refused):
        wait.answered(0.0, False)
    return wait


def test_what_most_donors_describe_is_waited_for_no_longer() -> None:
    assert after(3, GB, 0.1, 0.2).over(2, 0.2)
    assert not after(3, GB, 0.1, 0.2).over(1, 0.2), "they differ"
    assert not after(4, GB, 0.1, 0.2).over(2, 0.2), "the others could outvote them"
    assert after(4, GB, 0.1, 0.2, refused=1).over(2, 0.2)


def test_nothing_is_over_before_anybody_has_described_anything() -> None:
    assert not after(3, 1000, refused=2).over(0, 1e6)


def test_a_silent_donor_costs_a_few_seconds_where_the_state_is_small() -> None:
    wait = after(2, 10**6, 0.1)
    assert not wait.over(1, waiting.LEAST_S - 0.1)
    assert wait.over(1, waiting.LEAST_S)


def test_a_large_state_takes_long_to_hash() -> None:
    assert after(2, 4 * GB, 0.1).until_s() == pytest.approx(40.0)
    assert after(2, 4 * GB, 35.0).until_s() == pytest.approx(70.0), "as the other one shows"


def test_a_few_quick_answers_do_not_cut_off_the_others() -> None:
    """A liar needs no time."""
    quick = after(8, 10**6, 0.1)
    half = after(8, 10**6, 0.1, 0.2, 0.2, 0.2)
    assert quick.until_s() == waiting.FEW_TIMES * half.until_s()


def test_one_donor_alone_has_time_by_its_size() -> None:
    assert alone_s(0) == waiting.ALONE_S
    assert alone_s(10 * GB) > 400.0
