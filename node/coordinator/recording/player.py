"""Plays a recording into fresh machines and compares their actions with the recorded ones. Pure.
Enters: the lines of a recording. Leaves: counts, and the first difference. Never: an effect; the
actions were carried out when they were recorded."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from node.consensus.rules import Rules
from node.coordinator.recording.chain import (
    GET_AGAIN,
    RecordingDamaged,
    documents,
    text_of,
)
from node.coordinator.recording.recorder import LEADER, MEMBER
from node.coordinator.recording.setup import FORMAT, LeaderStart, MemberStart, RecordingSetup
from node.coordinator.recording.values import ValueReader, ValueWriter
from node.core.errors import TuttiError, WireError
from node.core.newest import Newest
from node.core.version import VERSION
from node.epoch import events
from node.epoch.leader.leader import Leader
from node.epoch.member import Member
from node.scheduler.router import SearchJob

Machine = Leader | Member
STRANGE = (
    TuttiError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a record raises that no recorder wrote."""
DEEPEST = 64
"""Levels of lists and objects in a record; a recorder writes a dozen."""
SEARCHES = 64
"""Searches of which a result may still come."""


@dataclass(frozen=True)
class Difference:
    """An event to which a fresh machine answers otherwise. ``record``: its number in the recording;
    ``number``: its number among the events of that machine, from 1; ``expected``: the recorded
    actions; ``found``: the actions of the fresh machine, written alike."""

    record: int
    machine: str
    number: int
    now: float
    event: list[Any]
    expected: list[Any]
    found: list[Any]

    @property
    def at(self) -> int:
        """Number of the first action that differs, from 0."""
        pairs = zip(self.expected, self.found, strict=False)
        same = [a == b for a, b in pairs]
        if False in same:
            return same.index(False)
        return len(same)


@dataclass
class Played:
    """Result of playing a recording. ``records`` were read. ``machines`` started and took
    ``events``, counted by machine; none after ``difference``. ``end``: why the recording ended,
    empty for one that did not end in order; ``early``: before its daemon."""

    setup: RecordingSetup | None = None
    records: int = 0
    machines: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    actions: int = 0
    difference: Difference | None = None
    end: str = ""
    early: bool = False


KINDS: Mapping[str, Mapping[str, type[Any]]] = {
    LEADER: {kind.__name__: kind for kind in get_args(events.LeaderEvent)},
    MEMBER: {kind.__name__: kind for kind in get_args(events.MemberEvent)},
}
"""The events of each machine, by name."""


def _is_deeper(document: Any, levels: int) -> bool:
    if isinstance(document, dict):
        document = list(document.values())
    if not isinstance(document, list):
        return False
    return not levels or any(_is_deeper(one, levels - 1) for one in document)


def _is_action(document: Any) -> bool:
    match document:
        case [str(), dict()]:
            return True
    return False


class Player:
    """Plays one recording, record after record."""

    def __init__(self) -> None:
        self.played = Played()
        self._shared: dict[str, Any] = {}
        self._rules: dict[str, Rules] = {}
        self._searches: Newest[str, SearchJob] = Newest(SEARCHES)
        self._reader = ValueReader(self._shared, self._searches)
        self._found: dict[str, Any] = {}
        """Plans and sets of the newest actions of a fresh machine, which the recording lacks."""
        self._writer = ValueWriter(self._name)
        self._machines: dict[str, Machine] = {}

    def play(self, lines: Iterable[bytes]) -> Played:
        """Play all up to the first difference; the lines after it are only checked for damage.
        Raises RecordingDamaged for the first record that is cut, changed, or none that a recorder
        writes; :attr:`played` has the ones before it."""
        for document in documents(lines):
            try:
                self._record(document)
            except STRANGE as e:
                raise self._unknown(document, e) from e
            self.played.records += 1
        if self.played.setup is None:
            raise RecordingDamaged(0, "is missing: the file is empty")
        return self.played

    def _unknown(self, document: Any, error: Exception) -> RecordingDamaged:
        """The fault that names a record which is whole, and none that this tutti writes."""
        version = ""
        if self.played.setup is not None:
            version = self.played.setup.version
        if isinstance(document, dict) and isinstance(document.get("setup"), dict):
            version = str(document["setup"].get("version", ""))[:32]
        step = GET_AGAIN
        if version not in ("", VERSION):
            step = f"it was written by tutti {version}, and this is {VERSION}: use that version"
        what = f"is none that is known: {type(error).__name__}: {error}"
        return RecordingDamaged(self.played.records, what, step)

    def _record(self, document: Any) -> None:
        if _is_deeper(document, DEEPEST):
            raise WireError("too many levels")
        if self.played.end:
            raise WireError("it comes after the end")
        match document:
            case {"recording": number, "setup": setup} if self.played.setup is None:
                if number != FORMAT:
                    raise WireError(f"format {number}, and this tutti reads format {FORMAT}")
                self.played.setup = self._reader.fields(setup, RecordingSetup)
            case _ if self.played.setup is None:
                raise WireError("a recording begins with its setup")
            case {"end": str(why)}:
                self.played.end = why or "stopped"
                self.played.early = document.get("early") is True
            case _ if self.played.difference is not None:
                pass
            case {"name": str(name), "is": shared}:
                self._shared[name] = shared
            case {"change": str(change), "rules": rules}:
                self._rules[change] = self._reader.fields(rules, Rules)
            case {"start": str(machine), "with": start}:
                self._start(machine, start, self.played.setup)
            case {"to": str(machine), "now": int() | float() as now, "event": event}:
                self._event(machine, float(now), event, document)
            case _:
                raise WireError("unknown")

    def _start(self, machine: str, start: Any, setup: RecordingSetup) -> None:
        self.played.machines[machine] += 1
        if machine == MEMBER:
            m = self._reader.fields(start, MemberStart)
            self._machines[MEMBER] = Member(m.me, m.at, m.checkpoints, m.tokens)
        elif machine == LEADER:
            s = self._reader.fields(start, LeaderStart)
            self._machines[LEADER] = Leader(s.me, setup.facts(self._rules), **s.arguments())
        else:
            raise WireError(f"there is no machine {machine[:64]}")

    def _event(self, name: str, now: float, event: Any, document: Mapping[str, Any]) -> None:
        machine = self._machines.get(name)
        if machine is None:
            raise WireError("the machine of this event has not started")
        arrived = self._reader.event(event, KINDS[name])
        self.played.events[name] += 1
        found = self._decided(machine, arrived, now)
        raised = document.get("raised")
        if raised:
            expected = [["raised", {"kind": raised}]]
        else:
            expected = document["actions"]
        if not isinstance(expected, list) or not all(map(_is_action, expected)):
            raise WireError("the actions of an event are names of classes and their fields")
        self.played.actions += len(found)
        if text_of(found) != text_of(expected):
            number = self.played.events[name]
            self.played.difference = Difference(
                self.played.records, name, number, now, event, expected, found
            )

    def _decided(self, machine: Machine, event: Any, now: float) -> list[Any]:
        """The actions of a fresh machine as a recording has them."""
        self._found.clear()
        try:
            actions = machine.handle(event, now)
        except Exception as e:  # noqa: BLE001 - it is what the recorded machine did too, or differs
            return [["raised", {"kind": type(e).__name__}]]
        found: list[Any] = []
        for action in actions:
            written = self._writer.event(action)
            if isinstance(action, events.SearchPaths):
                self._searches[written[1]["job"]] = action.job
            found.append(written)
        return found

    def _name(self, name: str, document: Callable[[], Any]) -> None:
        if name not in self._shared:
            self._found[name] = document()

    def shared(self, name: str) -> Any:
        """The plan or set of this name, recorded or of the newest actions; None if there is
        none."""
        return self._shared.get(name, self._found.get(name))
