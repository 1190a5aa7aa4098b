"""The journal: order, memory, listeners, threads, and emitting that never fails its caller."""

import asyncio
import json
import logging

import pytest

from node.telemetry.events import MAX_LINE, Event, Journal, JournalHandler
from testbed.fakes.clock import VirtualClock


class Pile:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def accept(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


def kinds(events: list[Event]) -> list[str]:
    return [e.kind for e in events]


def test_an_event_carries_its_text_fields_and_time() -> None:
    journal = Journal(clock=VirtualClock(100.0, skew=5.0))
    journal.emit("dht", "peer-seen", "saw a peer", "warning", peer="abc", n=3)
    assert journal.recent() == [
        Event(105.0, "warning", "dht", "peer-seen", "saw a peer", {"peer": "abc", "n": 3})
    ]


def test_the_ring_keeps_the_newest_and_filters_by_level() -> None:
    journal = Journal(keep=4)
    for i, level in enumerate(["error", "debug", "info", "warning", "error", "debug"]):
        journal.emit("r", str(i), "", level)
    assert kinds(journal.recent()) == ["2", "3", "4", "5"]
    assert kinds(journal.recent(2)) == ["4", "5"]
    assert kinds(journal.recent(10, "warning")) == ["3", "4"]
    assert (kinds(journal.recent(1, "warning")), journal.recent(0)) == (["4"], [])


def test_odd_input_is_recorded_rather_than_raised() -> None:
    journal = Journal()
    journal.emit("r", "k", "x" * 10_000, "shouting")
    (event,) = journal.recent()
    assert (event.level, len(event.text)) == ("info", 2000)


async def test_a_subscriber_gets_history_then_live_events() -> None:
    journal = Journal()
    for i in range(3):
        journal.emit("r", str(i), "")
    with journal.subscribe(last=2) as feed:
        journal.emit("r", "3", "")
        assert [(await anext(feed)).kind for _ in range(3)] == ["1", "2", "3"]
    with pytest.raises(StopAsyncIteration):
        await anext(feed)
    journal.emit("r", "4", "")
    with pytest.raises(StopAsyncIteration):
        await anext(feed)


async def test_a_slow_listener_loses_its_oldest() -> None:
    journal = Journal()
    feed = journal.subscribe(size=2)
    for i in range(5):
        journal.emit("r", str(i), "")
    feed.close()
    assert [e.kind async for e in feed] == ["3", "4"]


async def test_a_listener_may_ask_for_a_level() -> None:
    journal = Journal()
    feed = journal.subscribe(level="warning")
    for level in ("debug", "error", "info", "warning"):
        journal.emit("r", level, "", level)
    journal.close()
    assert [e.kind async for e in feed] == ["error", "warning"]


async def test_threads_emit_and_a_waiting_listener_hears_all_in_order() -> None:
    pile = Pile()
    journal = Journal([pile], keep=10_000)
    feed = journal.subscribe(size=10_000)

    def device(name: str) -> None:
        for i in range(500):
            journal.emit("device", name, "", i=i)

    async def listen() -> list[Event]:
        return [await anext(feed) for _ in range(2000)]

    async with asyncio.timeout(20):
        heard, *_ = await asyncio.gather(
            listen(), *(asyncio.to_thread(device, name) for name in "abcd")
        )
    for name in "abcd":
        assert [e.fields["i"] for e in heard if e.kind == name] == list(range(500))
    assert len(pile.events) == len(journal.recent()) == 2000


def test_a_listener_whose_loop_is_gone_does_not_disturb() -> None:
    journal = Journal()

    async def abandon() -> None:
        feed = journal.subscribe()
        waiting = asyncio.ensure_future(anext(feed))
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(abandon())
    journal.emit("r", "after", "")
    assert kinds(journal.recent()) == ["after"]


def test_closing_closes_the_sinks_and_keeps_later_events() -> None:
    pile = Pile()
    journal = Journal([pile])
    journal.emit("r", "a", "")
    journal.close()
    journal.emit("r", "b", "")
    assert (pile.closed, kinds(journal.recent())) == (1, ["a", "b"])


def test_json_lines_are_valid_whatever_the_fields_hold() -> None:
    circle: list[object] = []
    circle.append(circle)
    odd = Event(
        1.5,
        "info",
        "r",
        "k",
        "line\nbreak \x1b[2J",
        {"nan": float("nan"), "obj": object, "circle": circle, "s": "\ud800"},
    )
    line = odd.to_json()
    assert "\n" not in line
    assert "\x1b" not in line
    read = json.loads(line)
    assert (read["at"], read["kind"], read["text"]) == (1.5, "k", "line\nbreak \x1b[2J")
    assert read["fields"]["nan"] == "nan"
    assert read["fields"]["circle"] == "<list>"
    assert json.loads(Event(0, "info", "r", "k", "t", {"a": [1, "x"]}).to_json())["fields"] == {
        "a": [1, "x"]
    }
    assert json.loads(Event(0, "info", "r", "k", "t", {"a": "x" * MAX_LINE}).fields_json()) == {
        "omitted_characters": MAX_LINE + 9
    }


def test_library_logs_come_in() -> None:
    log = logging.Logger("chatty.inner")
    pile = Pile()
    log.addHandler(JournalHandler(Journal([pile])))
    log.error("broken %s", "pipe")
    log.warning("too many %s")
    log.warning("does not fit %d", "x")
    log.error("ExecuteBatchError raised in core by servicer method [%s]", "/a.Service/Call")
    log.info("hush")
    assert [(e.component, e.kind, e.level, e.text) for e in pile.events] == [
        ("chatty", "log", "error", "broken pipe"),
        ("chatty", "log", "warning", "too many %s"),
        ("chatty", "log", "warning", "does not fit %d"),
        # gRPC's word for a caller that has gone
        (
            "chatty",
            "log",
            "debug",
            "ExecuteBatchError raised in core by servicer method [/a.Service/Call]",
        ),
    ]
