"""Records the machines of one peer: the arguments they start from, each event with its time, and
the actions that they gave. Enters: calls of the machines. Leaves: lines of a recording. Never: a
tensor; a decision: a recorded machine decides like any other."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from node.consensus.rules import Read, Rules
from node.coordinator.recording.chain import Chain
from node.coordinator.recording.setup import FORMAT, LeaderStart, MemberStart, RecordingSetup
from node.coordinator.recording.values import ValueWriter
from node.core.ids import PeerId
from node.core.journey import Version
from node.core.version import VERSION
from node.epoch import events as ev
from node.epoch.facts import RunFacts
from node.epoch.leader.leader import Leader
from node.epoch.member import Member
from node.optim.parts import ParameterPart
from node.scheduler.settings import SchedulerSettings

MOST_BYTES = 256 << 20
"""Bytes of a recording. A heartbeat takes 1.6 KB, so a leader of eight peers writes 50 MB an
hour."""
LEADER = "leader"
MEMBER = "member"


class Recorder:
    """The recording of one process. ``write`` takes whole lines, in order. After ``most`` bytes, or
    at a value that cannot be written, the recording ends early, which its last line says and
    ``on_end(why)`` is told; the machines go on."""

    def __init__(
        self,
        write: Callable[[bytes], None],
        most: int = MOST_BYTES,
        on_end: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._write = write
        self._most = most
        self._on_end = on_end
        self._chain = Chain()
        self._written = 0
        self._shared: set[str] = set()
        self._read: set[str] = set()
        self._writer = ValueWriter(self._share)
        self.ended = False

    def begin(
        self,
        peer: PeerId,
        facts: RunFacts,
        scheduler: SchedulerSettings,
        parts: Mapping[int, tuple[ParameterPart, ...]],
    ) -> None:
        """Write the setup, before any machine starts. ``peer``: the peer that is recorded."""
        setup = RecordingSetup.of(VERSION, peer, facts, scheduler, parts)
        self._line({"recording": FORMAT, "setup": self._writer.fields(setup)})

    def reads(self, read: Read) -> Read:
        """A reader of the owner's changes that records the settings in each. A change that is
        refused is not recorded, and is refused again by a replay."""

        def recorded(change: str) -> Rules:
            rules = read(change)
            if change not in self._read:
                self._read.add(change)
                self._line({"change": change, "rules": self._writer.fields(rules)})
            return rules

        return recorded

    def member(
        self, me: PeerId, at: Version, checkpoints: tuple[Version, ...] = (), tokens: int = 0
    ) -> Member:
        """A member that is recorded; the arguments of :class:`Member`."""
        self._start(MEMBER, MemberStart(me, at, checkpoints, tokens))
        return RecordedMember(self, me, at, checkpoints, tokens)

    def leader(self, me: PeerId, facts: RunFacts, **history: Any) -> Leader:
        """A leader that is recorded; the arguments of :class:`Leader`."""
        return RecordedLeader(self, facts, LeaderStart.of(me, **history))

    def leads(self, start: LeaderStart) -> None:
        """A leader begins."""
        self._start(LEADER, start)

    def took(
        self, machine: str, event: Any, now: float, decide: Callable[[], list[Any]]
    ) -> list[Any]:
        """Let a machine decide on an event, record both, and return the actions."""
        if self.ended:
            return decide()
        # Before the machine decides: it may change what the event holds.
        line = {"to": machine, "now": now, "event": self._written_event(event)}
        try:
            actions = decide()
        except Exception as e:
            self._line({**line, "raised": type(e).__name__})
            raise
        self._line({**line, "actions": [self._written_event(action) for action in actions]})
        return actions

    def _written_event(self, value: Any) -> list[Any]:
        """An event or an action as it is written; an empty list once the recording has ended."""
        if self.ended:
            return []
        try:
            return self._writer.event(value)
        except (TypeError, ValueError, AttributeError) as e:
            self._end(f"a {type(value).__name__} cannot be written: {e}")
            return []

    def close(self, why: str) -> None:
        """End the recording."""
        if not self.ended:
            self._line({"end": why})
            self.ended = True

    def _start(self, machine: str, start: Any) -> None:
        if not self.ended:
            self._line({"start": machine, "with": self._writer.fields(start)})

    def _share(self, name: str, document: Callable[[], Any]) -> None:
        if name not in self._shared:
            self._shared.add(name)
            self._line({"name": name, "is": document()})

    def _line(self, document: Any) -> None:
        if self.ended:
            return
        line = self._chain.line(document)
        self._written += len(line)
        self._write(line)
        if self._written >= self._most:
            self._end(f"it has {self._most >> 20} MiB, the most it may have")

    def _end(self, why: str) -> None:
        """End the recording early."""
        self.ended = True
        self._write(self._chain.line({"end": why, "early": True}))
        self._on_end(why)


class RecordedMember(Member):
    """A member of which each event and its actions are recorded."""

    def __init__(self, recorder: Recorder, *about: Any) -> None:
        super().__init__(*about)
        self._recorder = recorder

    def handle(self, event: ev.MemberEvent, now: float) -> list[ev.MemberAction]:
        """As :meth:`Member.handle`."""
        decide = super().handle
        return self._recorder.took(MEMBER, event, now, lambda: decide(event, now))


class RecordedLeader(Leader):
    """A leader of which each event and its actions are recorded."""

    def __init__(self, recorder: Recorder, facts: RunFacts, start: LeaderStart) -> None:
        recorder.leads(start)
        super().__init__(start.me, facts, **start.arguments())
        self._recorder = recorder

    def handle(self, event: ev.LeaderEvent, now: float) -> list[ev.LeaderAction]:
        """As :meth:`Leader.handle`."""
        decide = super().handle
        return self._recorder.took(LEADER, event, now, lambda: decide(event, now))

    def __deepcopy__(self, memo: dict[int, Any]) -> Leader:
        """A copy that decides alike, and is not recorded."""
        twin = Leader.__new__(Leader)
        for name, value in vars(self).items():
            if value is not self._recorder:
                setattr(twin, name, copy.deepcopy(value, memo))
        return twin
