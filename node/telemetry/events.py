"""Facts as they happen: one journal, a short memory, live listeners, sinks that write elsewhere.

Any thread may emit. Emitting costs a few microseconds, never waits for a disk, a terminal or a
listener, and never raises because of one: whoever cannot keep up loses its oldest events.
"""

import asyncio
import json
import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from node.core.clock import Clock, SystemClock
from node.core.ids import PeerId, short
from node.core.names import Names

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
MAX_TEXT = 2_000
MAX_LINE = 64 * 1024
EPOCH = "epoch-reported"
"""Kind of the event by which every peer reports an epoch to sinks of curves. Only the leader has
the details, in ``epoch-committed``."""


@dataclass(frozen=True, slots=True)
class Event:
    """One fact. ``at`` Unix seconds, ``kind`` a stable word for machines, ``text`` a sentence for
    people.

    ``fields`` are plain values (numbers, strings, lists of them); they are read later, on other
    threads: leave them be.
    """

    at: float
    level: str
    component: str
    kind: str
    text: str
    fields: dict[str, Any] = field(default_factory=dict)

    def fields_json(self) -> str:
        """``fields`` as a JSON object, always valid: values without a JSON form (nan, infinity,
        objects) become strings."""
        try:
            written = json.dumps(self.fields, allow_nan=False, default=str)
        except (ValueError, TypeError, RecursionError):
            written = json.dumps({str(k): _plain(v) for k, v in self.fields.items()})
        if len(written) <= MAX_LINE:
            return written
        return json.dumps({"omitted_characters": len(written)})

    def to_json(self) -> str:
        """One line: a JSON object of at, level, component, kind, text and fields."""
        head = json.dumps(
            {
                "at": self.at,
                "level": self.level,
                "component": self.component,
                "kind": self.kind,
                "text": self.text,
            }
        )
        return f'{head[:-1]}, "fields": {self.fields_json()}}}'


class Sink(Protocol):
    """Destination of events. ``accept`` does not block, raise or log, from any thread; ``close``
    writes all events accepted so far, and later ones are not written."""

    def accept(self, event: Event) -> None: ...
    def close(self) -> None: ...


class Subscription(AsyncIterator[Event], AbstractContextManager["Subscription"]):
    """Events from now on for one asynchronous reader; made by :meth:`Journal.subscribe` inside a
    running loop.

    Holds at most ``size`` unread events, the newest. Iteration ends when it is closed.
    """

    def __init__(self, journal: "Journal", size: int, level: str) -> None:
        self._journal = journal
        self._floor = LEVELS.get(level, 0)
        self._unread: deque[Event] = deque(maxlen=size)
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._closed = False

    async def __anext__(self) -> Event:
        while not self._unread:
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            # Something may have come between the first look and this line.
            if not self._unread and not self._closed:
                await self._wake.wait()
        return self._unread.popleft()

    def put(self, event: Event) -> None:
        """Put an event in; for the journal, under its lock, from any thread."""
        if LEVELS[event.level] < self._floor:
            return
        self._unread.append(event)
        self._rouse()

    def close(self) -> None:
        """Stop listening; unread events can still be read. Safe to call twice."""
        self._journal.forget(self)
        self._closed = True
        self._rouse()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rouse(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the reader's loop is gone, and the reader with it
            self._closed = True


class Journal:
    """The record of one process. ``keep`` newest events stay readable; every event goes to every
    sink. Texts show the names in :attr:`names` before the short ids of peers. ``finish(text)``: the
    text as people read it."""

    def __init__(
        self,
        sinks: Iterable[Sink] = (),
        *,
        clock: Clock | None = None,
        keep: int = 2_000,
        finish: Callable[[str], str] = str,
    ) -> None:
        self._clock = clock or SystemClock()
        self.names = Names()
        self._finish = finish
        self._sinks = tuple(sinks)
        self._ring: deque[Event] = deque(maxlen=keep)
        self._subscriptions = set[Subscription]()
        # Re-entrant: a destructor or signal handler that emits may interrupt an emit on its own
        # thread.
        self._lock = threading.RLock()

    def emit(
        self, component: str, kind: str, text: str, level: str = "info", **fields: Any
    ) -> None:
        """Record a fact, from any thread. An unknown level counts as "info"; text is cut at 2000
        characters."""
        event = Event(
            self._clock.wall(),
            level if level in LEVELS else "info",
            component,
            kind,
            self._finish(self.names.within(str(text)))[:MAX_TEXT],
            fields,
        )
        with self._lock:
            self._ring.append(event)
            for subscription in self._subscriptions:
                subscription.put(event)
        for sink in self._sinks:
            sink.accept(event)

    def recent(self, n: int | None = None, level: str = "debug") -> list[Event]:
        """The newest ``n`` (all that are kept: None) of at least this level, oldest first."""
        floor = LEVELS.get(level, 0)
        with self._lock:
            chosen = [e for e in self._ring if LEVELS[e.level] >= floor]
        if n is None:
            return chosen
        return chosen[max(0, len(chosen) - n) :]

    def subscribe(self, size: int = 1_000, level: str = "debug", last: int = 0) -> Subscription:
        """Listen, from inside a running loop, starting with the ``last`` newest events: none
        missed, none twice."""
        subscription = Subscription(self, size, level)
        with self._lock:
            for event in self.recent(last, level):
                subscription.put(event)
            self._subscriptions.add(subscription)
        return subscription

    def forget(self, subscription: Subscription) -> None:
        """Drop a subscription; :meth:`Subscription.close` calls it."""
        with self._lock:
            self._subscriptions.discard(subscription)

    def close(self) -> None:
        """End every subscription and close the sinks, waiting shortly for their last lines. Later
        events are only kept."""
        for subscription in list(self._subscriptions):
            subscription.close()
        for sink in self._sinks:
            sink.close()


WINDOW_S = 60.0
"""Seconds of a window."""
LINES = 10
"""Most lines about one peer in a window."""
PEERS_KEPT = 1024
"""Peers that are counted apart; the count of one that was dropped starts again."""


@dataclass(slots=True)
class _Window:
    began: float
    told: int = 0
    kept_back: Counter[str] = field(default_factory=Counter)


class RateLimitedLog:
    """Writes lines that strangers cause to ``journal``: a few about each of them, then one with the
    number of lines that were kept back. A stranger who can cause any number of lines could fill the
    disk with them, or push everything else out of the journal.

    ``now`` is the clock, monotonic seconds. For the thread of the event loop.
    """

    def __init__(self, journal: Journal, now: Callable[[], float] = monotonic) -> None:
        self._journal = journal
        self._now = now
        self._windows: OrderedDict[PeerId, _Window] = OrderedDict()

    def emit(
        self, peer: PeerId, component: str, kind: str, text: str, level: str = "info", **fields: Any
    ) -> None:
        """As ``Journal.emit``, unless there were ``LINES`` about ``peer`` within ``WINDOW_S``
        already."""
        now = self._now()
        while self._windows and now - next(iter(self._windows.values())).began >= WINDOW_S:
            self._end_oldest()
        window = self._windows.get(peer)
        if window is None:
            window = self._windows[peer] = _Window(now)
            if len(self._windows) > PEERS_KEPT:
                self._end_oldest()
        if window.told < LINES:
            window.told += 1
            self._journal.emit(component, kind, text, level, peer=peer, **fields)
        else:
            window.kept_back[kind] += 1

    def close(self) -> None:
        """Write the numbers of lines that were kept back so far."""
        while self._windows:
            self._end_oldest()

    def _end_oldest(self) -> None:
        """Windows are in the order in which they began."""
        peer, window = self._windows.popitem(last=False)
        if not window.kept_back:
            return
        counts = ", ".join(f"{n} {kind}" for kind, n in sorted(window.kept_back.items()))
        text = (
            f"{window.kept_back.total()} more lines about {short(peer)} within a minute: {counts}"
        )
        self._journal.emit(
            "journal", "kept-back", text, "warning", peer=peer, lines=window.kept_back.total()
        )


CALLER_GONE = "ExecuteBatchError raised in core"
"""First words of gRPC's error for an answer that could not be sent, because the asker has gone. It
logs an error, but peers come and go."""


class JournalHandler(logging.Handler):
    """Leads the warnings and errors of libraries into a journal: component is the logger's first
    name, kind "log".

    ``quiet``: all of it at level debug, for a library that warns its developers, or warns of
    others' mistakes.
    """

    def __init__(self, journal: Journal, *, quiet: bool = False) -> None:
        super().__init__(logging.WARNING)
        self._journal = journal
        self._quiet = quiet

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError, KeyError):
            # arguments that do not fit the format are the caller's mistake, not ours
            text = str(record.msg)
        level = next((name for name in reversed(LEVELS) if record.levelno >= LEVELS[name]), "debug")
        if self._quiet or text.startswith(CALLER_GONE):
            level = "debug"
        self._journal.emit(record.name.partition(".")[0], "log", text, level, logger=record.name)


def _plain(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=str))
    except (ValueError, TypeError, RecursionError):
        if isinstance(value, float):
            return str(value)
        return f"<{type(value).__name__}>"
