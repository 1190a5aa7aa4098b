"""Books of live swarms: epochs and samples, lost or counted twice, in stories of plans and
commits. No daemon runs."""

import json
from pathlib import Path

import pytest

from testbed.daemons.books import Books, Losses, in_plan
from testbed.daemons.told import Chronicle, Told, read_told

SEQ = 10


class Story:
    """Writer of the lines that leaders would log; a second passes with every line."""

    def __init__(self) -> None:
        self.events: list[Told] = []

    def tell(
        self, who: str, kind: str, text: str = "", level: str = "info", **fields: object
    ) -> "Story":
        self.events.append(
            Told(who, float(len(self.events)), level, "training", kind, text, fields)
        )
        return self

    def plan(
        self, epoch: int, base: str, *, who: str = "a", term: int = 0, **more: object
    ) -> "Story":
        return self.tell(
            who,
            "epoch-planned",
            epoch=epoch,
            lineage=base,
            term=term or epoch,
            hash=f"{who}{term}{epoch}{base}",
            **more,
        )

    def commit(
        self, epoch: int, makes: str, *, who: str = "a", term: int = 0, **more: object
    ) -> "Story":
        return self.tell(
            who, "epoch-committed", epoch=epoch + 1, lineage=makes, term=term or epoch, **more
        )

    def epoch(self, epoch: int, base: str, makes: str, **more: object) -> "Story":
        return self.plan(epoch, base, **more).commit(epoch, makes, **more)  # type: ignore[arg-type]

    @property
    def books(self) -> Books:
        return Books(self.events)


def quiet() -> Story:
    return Story().epoch(0, "", "v1").epoch(1, "v1", "v2")


def test_nothing_is_lost_in_a_quiet_run():
    books = quiet().plan(2, "v2").books
    assert books.losses() == Losses(0, 0)
    assert sorted(books.history()) == [0, 1]
    assert books.first_tries(0, 2) == (2, 2, 2)


def test_an_attempt_that_was_begun_anew_is_abandoned():
    story = quiet().plan(2, "v2").plan(2, "v2", term=9).commit(2, "v3", term=9)
    assert story.books.losses() == Losses(0, 1)
    assert story.books.first_tries(0, 3) == (3, 2, 2)


def test_an_attempt_that_was_outgrown_is_not_abandoned():
    story = quiet().plan(2, "v2")
    story.tell("a", "epoch-outgrown", epoch=2, hash=story.events[-1].get("hash"), waiting=3)
    story.plan(2, "v2", term=9).commit(2, "v3", term=9)
    assert story.books.losses() == Losses(0, 0)
    story.plan(3, "v3").plan(3, "v3", term=10).commit(3, "v4", term=10)
    assert story.books.losses() == Losses(0, 1), "what was not outgrown still counts"


def test_a_rival_plan_that_nobody_followed_costs_nothing():
    story = quiet().plan(2, "v2").plan(2, "v2", who="b").commit(2, "v3")
    assert story.books.losses() == Losses(0, 0)


def test_a_swarm_that_goes_back_commits_again():
    story = quiet().epoch(2, "v2", "v3").epoch(1, "v1", "w2", term=7).epoch(2, "w2", "w3", term=8)
    assert story.books.losses() == Losses(2, 0)
    assert {a.makes for a in story.books.history().values()} == {(1, "v1"), (2, "w2"), (3, "w3")}


def test_of_two_sides_the_one_that_goes_on_counts():
    story = quiet()
    for n in (2, 3):
        story.epoch(n, f"v{n}", f"v{n + 1}").epoch(
            n, "v2" if n == 2 else "w3", f"w{n + 1}", who="b"
        )
    story.epoch(4, "v4", "v5")
    assert story.books.losses() == Losses(2, 0)
    assert all(a.plan.who == "a" for a in story.books.history().values())


def test_an_epoch_that_another_leader_commits_is_one_attempt():
    story = Story().epoch(0, "", "v1").plan(1, "v1", term=2)
    story.tell("b", "epoch-taken-over", epoch=1, term=2, hash="a21v1")
    books = story.commit(1, "v2", who="b", term=2).plan(2, "v2", who="b", term=3).books
    assert books.losses() == Losses(0, 0)
    assert books.history()[1].commit is not None
    assert books.history()[1].makes == (2, "v2")


def test_a_commit_a_dying_leader_did_not_report_is_no_loss():
    story = quiet().plan(2, "v2").epoch(3, "v3", "v4", who="b")
    assert story.books.losses() == Losses(0, 0)
    assert sorted(story.books.history()) == [0, 1, 2, 3]


@pytest.mark.parametrize(("cursor", "found"), [(40, (0, 0)), (44, (4, 0)), (32, (0, 8))])
def test_samples_are_counted_or_handed_back_or_missing(cursor: int, found: tuple[int, int]):
    story = Story().plan(0, "", cursor=0, returned=0, tokens=0).commit(0, "v1")
    story.plan(1, "v1", cursor=24, returned=4, tokens=20 * SEQ).commit(1, "v2")
    story.plan(2, "v2", cursor=cursor + 3, returned=3, tokens=40 * SEQ).commit(2, "v3")
    assert story.books.accounted(0.0, SEQ) == found
    assert quiet().books.accounted(0.0, SEQ) is None
    assert story.books.accounted(-1.0, SEQ) == found, (
        "also when it was struck before the first commit"
    )


@pytest.mark.parametrize(("theirs", "twice"), [(80, 0.0), (110, 3.0), (0, 0.0)])
def test_a_stage_that_counts_more_than_the_leader_counted_twice(theirs: int, twice: float):
    story = Story().plan(0, "")
    key = story.events[0].fields["hash"]
    story.tell("x", "contributed", hash=key, stage=1, tokens=80).tell(
        "y", "contributed", hash=key, stage=1, tokens=theirs
    )
    story.tell("z", "contributed", hash=key, stage=2, tokens=160).commit(0, "v1", tokens=160)
    assert story.books.counted_twice(0.0, SEQ) == twice
    assert quiet().books.counted_twice(0.0, SEQ) is None


def test_the_first_notice_by_another_peer_names_the_victim():
    story = (
        Story()
        .tell("v", "peer-lost", "peer AAAAAA is gone", peer="PeerAAAAAA")
        .tell("b", "peer-lost", "peer BBBBBB")
    )
    story.tell("b", "epoch-committed", "peer AAAAAA").tell(
        "c", "hop-turned", "no answer", peer="PeerAAAAAA"
    )
    notice = story.books.first_notice(0.0, ("v",), {"PeerAAAAAA"})
    assert (notice.who, notice.kind) == ("c", "hop-turned")
    assert story.books.first_notice(4.0, ("v",), {"PeerAAAAAA"}) is None
    assert story.tell("c", "leading").books.first_notice(4.0, ("v",), {"PeerAAAAAA"}) is not None


def test_members_of_the_newest_plan_are_counted():
    assert in_plan(
        Story().plan(0, "", members=8, listeners=2).plan(1, "", members=7, listeners=0).events
    ) == (7, 0)
    assert in_plan([]) == (0, 0)


def line(kind: str, at: float) -> str:
    return (
        json.dumps(
            {
                "at": at,
                "level": "info",
                "component": "training",
                "kind": kind,
                "text": "",
                "fields": {},
            }
        )
        + "\n"
    )


def test_a_file_is_followed_over_half_lines_and_its_rotation(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    chronicle = Chronicle()
    chronicle.follow("p", path)
    assert chronicle.read() == []
    path.write_text(line("one", 1.0) + "no event\n" + line("three", 3.0)[:20])
    assert [e.kind for e in chronicle.read()] == ["one"]
    with path.open("a") as f:
        f.write(line("three", 3.0)[20:])
    path.rename(tmp_path / "events.jsonl.1")
    path.write_text(line("two", 2.0))
    assert [e.kind for e in chronicle.read()] == ["one", "two", "three"]
    assert [e.kind for e in read_told("p", path)] == ["two"]
    chronicle.close()
