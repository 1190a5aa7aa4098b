"""The record of refusals in the last minute."""

from node.identity.refusals import LATELY_S, MUCH, Refusals


def test_people_are_told_of_many_refusals_of_the_last_minute() -> None:
    at = [0.0]
    counted: list[str] = []
    some = Refusals(lambda: at[0], counted.append)
    for number in range(MUCH - 1):
        some.count("place", f"peer {number % 3}")
    assert some.line() == ""
    some.count("rate", "peer 0")
    assert some.line() == (
        f"{MUCH} calls of 3 peers refused in the last minute: no place free, too often"
    )
    assert len(counted) == MUCH
    at[0] = LATELY_S + 1.5
    assert some.line() == ""
    some.count("token", None, MUCH)
    assert some.line() == f"{MUCH} calls refused in the last minute: no handshake"
