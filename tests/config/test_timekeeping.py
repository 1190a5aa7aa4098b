"""A daemon notices that its clock is wrong, that it is right again, and that it stood still."""

import time
from collections.abc import Collection

import pytest

from node.app.timekeeping import ASKED, ClockKeeper
from node.core.clock import ClockReading
from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.telemetry.events import Journal
from node.transport.clocks import PeerClocks
from protos.ask_pb2 import Answer, Ask, PingAnswer

A, B, C, D = (PeerId(f"12D3KooWxxxx{c * 6}") for c in "ABCD")


class Others:
    """Other peers by name: the seconds that their clock is behind, None for no answer."""

    def __init__(self, **behind: float | None) -> None:
        self.behind = {PeerId(f"12D3KooWxxxx{name * 6}"): by for name, by in behind.items()}
        self.clocks = PeerClocks(time.monotonic)
        self.asked = list[PeerId]()

    def connected(self) -> Collection[PeerId]:
        return list(self.behind)

    async def ask(self, whom: str, question: Ask, timeout: float = 10.0) -> Answer:
        peer = PeerId(whom)
        self.asked.append(peer)
        by = self.behind[peer]
        if by is None:
            raise PeerFault(peer, "no answer")
        now = time.time()
        self.clocks.told(peer, now - by, now, 0.0)
        return Answer(ping=PingAnswer(name=f"peer-{peer[-1].lower()}", time=now - by))


class Clock:
    """The clocks of a machine, turned by hand."""

    def __init__(self) -> None:
        self.at = ClockReading(100.0, 100.0, 1_800_000_000.0)

    def __call__(self) -> ClockReading:
        return self.at

    def turn(self, running: float, always: float, wall: float) -> None:
        at = self.at
        self.at = ClockReading(at.running + running, at.always + always, at.wall + wall)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def keeper(others: Others, clock: Clock) -> tuple[ClockKeeper, Journal]:
    journal = Journal()
    return ClockKeeper(others, journal, clock), journal


def told(journal: Journal) -> list[tuple[str, str]]:
    return [(event.kind, event.text) for event in journal.recent()]


async def test_a_wrong_clock_is_said_once_and_so_is_a_right_one(clock: Clock):
    others = Others(A=3600.0, B=3600.0, C=3601.0)
    kept, journal = keeper(others, clock)
    await kept.compare()
    await kept.compare()
    assert (found := kept.wrong()) is not None
    assert found.ahead_s == pytest.approx(3600.0, abs=1.0)
    (kind, text), *more = told(journal)
    assert (kind, more) == ("clock-wrong", [])
    assert text == (
        "the clock of this machine is 1 h ahead of the middle one of peer-a (AAAAAA), peer-b "
        "(BBBBBB), peer-c (CCCCCC)"
    )
    others.behind = dict.fromkeys(others.behind, 0.5)
    clock.turn(1.0, 1.0, -3599.0)
    kept.tick()
    await kept.compare()
    assert kept.wrong() is None
    assert [kind for kind, _ in told(journal)][1:] == ["clock-set", "clock-right"]
    assert "set back by 1 h" in told(journal)[1][1]


async def test_nobody_is_asked_again_whose_clock_is_known(clock: Clock):
    others = Others(A=0.0, B=0.0, C=0.0, D=0.0)
    kept, journal = keeper(others, clock)
    for _ in range(3):
        await kept.compare()
    assert len(others.asked) == ASKED
    assert told(journal) == []


async def test_a_peer_that_does_not_answer_is_no_comparison(clock: Clock):
    others = Others(A=None)
    kept, journal = keeper(others, clock)
    for _ in range(3):
        await kept.compare()
    assert others.asked == [A]
    assert (kept.wrong(), told(journal)) == (None, [])


async def test_one_wrong_clock_of_two_is_nobodys_in_particular(clock: Clock):
    kept, journal = keeper(Others(A=-90.0), clock)
    await kept.compare()
    ((_, text),) = told(journal)
    assert text.endswith("1 min 30 s behind that of peer-a (AAAAAA): one of the two is wrong")


@pytest.mark.parametrize(("running", "slept"), [(181.0, False), (1.0, True)])
async def test_a_process_that_wakes_says_so_and_compares_anew(
    clock: Clock, running: float, slept: bool
):
    others = Others(A=0.0)
    kept, journal = keeper(others, clock)
    await kept.compare()
    clock.turn(running, 181.0, 181.0)
    kept.tick()
    ((kind, text),) = told(journal)
    assert kind == "woke"
    assert text.startswith("woke after 180 s in which this")
    assert ("slept" in text) is slept
    assert (kept.stopped_s, kept.slept) == (180.0, slept)
    assert others.clocks.offset() is None, "an answer from before says nothing"
    await kept.compare()
    assert others.asked == [A, A]
