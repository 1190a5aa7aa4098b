"""What an owner decides while a cell's contributions come in: whom to read, whom to refuse, when to step, whom to serve.

One machine per daemon, all epochs. A *round* is one attempt of an epoch; a *stream* is one exchange some peer has open
with us. Three rules carry everything else:

* a part is *claimed* when it is handed to the optimizer and *fresh* when it came back; a claimed part is never claimed
  again in its epoch, whatever attempt, term or set of contributors comes later: late comers get the bytes that exist;
* a step takes all parts of this owner that are not claimed yet, and only contributions that cover all of them;
* the first fault of an attempt latches: until the next attempt opens, everybody who still waits is refused.

Pure: no clock, no socket, no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from node.averaging.events import (
    Action,
    Began,
    Ended,
    Event,
    Fail,
    Forgot,
    Gone,
    Kind,
    Opened,
    Read,
    Refuse,
    Serve,
    Spoiled,
    Step,
    StepFailed,
    Stepped,
    Ticked,
    Uploaded,
    Voided,
    Wait,
)
from node.core.ids import PeerId, RoundId, short


class _Phase(Enum):
    HELD = "its round is not open here"
    READING = "its gradients are coming"
    WAITING = "wants its parts"
    SETTLED = "served or refused"


@dataclass(slots=True)
class _Stream:
    began: Began
    phase: _Phase = _Phase.HELD

    @property
    def live(self) -> bool:
        return self.phase is not _Phase.SETTLED


@dataclass(slots=True)
class _Epoch:
    """``given``: tokens by contributor of the current attempt; ``present``: came with nothing to give;
    ``missing``: died, left, or spoiled their contribution."""

    rounds: dict[RoundId, Opened] = field(default_factory=dict)
    current: Opened | None = None
    claimed: set[str] = field(default_factory=set)
    fresh: set[str] = field(default_factory=set)
    given: dict[PeerId, int] = field(default_factory=dict)
    present: set[PeerId] = field(default_factory=set)
    missing: set[PeerId] = field(default_factory=set)
    barred: set[PeerId] = field(default_factory=set)
    fault: str = ""


class RoundMachine:
    """``handle(event, now) -> actions``. ``held_per_peer`` and ``held_total`` bound the streams that wait for a round."""

    def __init__(self, held_per_peer: int = 4, held_total: int = 256) -> None:
        self._held_per_peer, self._held_total = held_per_peer, held_total
        self._epochs: dict[int, _Epoch] = {}
        self._streams: dict[int, _Stream] = {}
        self._floor = -1

    def handle(self, event: Event, now: float) -> list[Action]:
        """The only door. Raises ValueError when our own side opens a round that is not newer than the last of its epoch."""
        match event:
            case Opened():
                return self._opened(event, now)
            case Began():
                return self._began(event, now)
            case Uploaded(stream):
                return self._uploaded(stream, now)
            case Spoiled(stream, kind, text):
                return self._spoiled(stream, kind, text, now)
            case Ended(stream):
                return self._ended(stream, now)
            case Gone(peer):
                return self._gone(peer, now)
            case Ticked():
                return [a for e in self._epochs.values() for a in self._step_if_ready(e, now)]
            case Stepped(number, names):
                return self._stepped(number, names)
            case StepFailed(number, names, text):
                return self._step_failed(number, names, text)
            case Forgot(number):
                return self._forgot(number)
            case Voided(number):
                return self._voided(number)

    def _opened(self, opened: Opened, now: float) -> list[Action]:
        if opened.round.epoch <= self._floor:
            raise ValueError(f"epoch {opened.round.epoch} is over")
        epoch = self._epochs.setdefault(opened.round.epoch, _Epoch())
        if epoch.current is not None and opened.round <= epoch.current.round:
            raise ValueError(f"{opened.round} is not newer than {epoch.current.round}")
        epoch.current = epoch.rounds[opened.round] = opened
        epoch.claimed |= opened.held
        epoch.fresh |= opened.held
        epoch.given = {opened.me: opened.tokens} if opened.tokens else {}
        epoch.present, epoch.missing, epoch.barred, epoch.fault = {opened.me}, set(), set(), ""
        actions: list[Action] = []
        for number, stream in self._of_epoch(opened.round.epoch):
            if stream.phase is _Phase.HELD and stream.began.round <= opened.round:
                actions += self._judge(number, stream)
            elif stream.phase in (_Phase.READING, _Phase.WAITING) and not self._wanted(stream, epoch) <= epoch.claimed:
                actions.append(self._refuse(number, Kind.SUPERSEDED, f"attempt {opened.round.attempt} has begun"))
        return actions + self._serve_ready(opened.round.epoch) + self._step_if_ready(epoch, now)

    def _began(self, began: Began, now: float) -> list[Action]:
        stream = self._streams[began.stream] = _Stream(began)
        actions = self._judge(began.stream, stream)
        epoch = self._epochs.get(began.round.epoch)
        return actions if epoch is None else actions + self._step_if_ready(epoch, now)

    def _judge(self, number: int, stream: _Stream) -> list[Action]:
        """Read, hold, serve or refuse a stream whose head is known."""
        began = stream.began
        if began.round.epoch <= self._floor:
            return [self._refuse(number, Kind.FORGOTTEN, f"epoch {began.round.epoch} is over")]
        epoch = self._epochs.get(began.round.epoch)
        opened = None if epoch is None else epoch.rounds.get(began.round)
        if epoch is None or opened is None:
            if epoch is not None and epoch.current is not None and began.round < epoch.current.round:
                return [self._refuse(number, Kind.SUPERSEDED, f"this peer is at attempt {epoch.current.round.attempt}")]
            return self._hold(number, stream)
        refusal = self._objection(number, began, opened)
        if refusal is not None:
            return [refusal]
        wanted = self._wanted(stream, epoch)
        if wanted <= epoch.claimed:
            stream.phase = _Phase.WAITING
            if opened is epoch.current:
                epoch.present.add(began.peer)
            return self._serve_if_fresh(number, stream, epoch) or [Wait(number)]
        if opened is not epoch.current:
            return [self._refuse(number, Kind.SUPERSEDED, f"this peer is at attempt {epoch.current.round.attempt}")]  # type: ignore[union-attr]
        if epoch.fault:
            return [self._refuse(number, Kind.FAILED, epoch.fault)]
        if began.tokens == 0 or began.peer in epoch.given:
            stream.phase = _Phase.WAITING
            epoch.present.add(began.peer)
            return [Wait(number)]
        return self._read(number, stream, epoch, opened)

    def _objection(self, number: int, began: Began, opened: Opened) -> Refuse | None:
        """What is wrong with a head whatever the state of the round."""
        if began.plan_hash != opened.plan_hash:
            return self._refuse(number, Kind.PLAN, f"plan {began.plan_hash[:12]!r} is not {opened.plan_hash[:12]!r}")
        if began.ownership_hash != opened.ownership_hash:
            return self._refuse(number, Kind.OWNERSHIP, f"{began.ownership_hash[:12]!r} is not {opened.ownership_hash[:12]!r}")
        if began.peer not in opened.members:
            return self._refuse(number, Kind.STRANGER, "not in this round's view", 1.0)
        if began.tokens and began.peer in opened.listeners:
            return self._refuse(number, Kind.STRANGER, "a listener has no gradients to give", 1.0)
        if bool(began.tokens) != bool(began.names) or len(set(began.names)) != len(began.names):
            return self._refuse(number, Kind.HEADS, "tokens and tensors come together, each tensor once", 1.0)
        if not opened.mine.issuperset(began.names):
            return self._refuse(number, Kind.HEADS, "names parts this peer does not own", 1.0)
        if began.tokens > opened.token_limit:
            return self._refuse(number, Kind.VALUES, f"{began.tokens} tokens where {opened.token_limit} are possible", 1.0)
        return None

    def _read(self, number: int, stream: _Stream, epoch: _Epoch, opened: Opened) -> list[Action]:
        peer = stream.began.peer
        if peer in epoch.barred:
            return [self._refuse(number, Kind.VALUES, "an earlier contribution to this round was refused")]
        if not (opened.mine - epoch.claimed) <= set(stream.began.names):
            return [self._refuse(number, Kind.HEADS, "leaves out parts that are not stepped yet", 1.0)]
        actions: list[Action] = [
            self._refuse(other, Kind.SUPERSEDED, "a newer exchange of the same peer")
            for other, s in self._of_epoch(opened.round.epoch)
            if other != number and s.phase is _Phase.READING and s.began.peer == peer
        ]
        stream.phase = _Phase.READING
        epoch.missing.discard(peer)
        return [*actions, Read(number)]

    def _hold(self, number: int, stream: _Stream) -> list[Action]:
        held = [s for n, s in self._streams.items() if s.phase is _Phase.HELD and n != number]
        if len(held) >= self._held_total or sum(s.began.peer == stream.began.peer for s in held) >= self._held_per_peer:
            return [self._refuse(number, Kind.BUSY, "too many exchanges wait for rounds that are not open here")]
        return []

    def _uploaded(self, number: int, now: float) -> list[Action]:
        stream = self._streams.get(number)
        if stream is None or stream.phase is not _Phase.READING:
            return []
        epoch = self._epochs[stream.began.round.epoch]
        stream.phase = _Phase.WAITING
        if self._wanted(stream, epoch) <= epoch.claimed:
            return self._serve_if_fresh(number, stream, epoch)
        epoch.given[stream.began.peer] = stream.began.tokens
        return self._step_if_ready(epoch, now)

    def _spoiled(self, number: int, kind: Kind, text: str, now: float) -> list[Action]:
        stream = self._streams.get(number)
        if stream is None or stream.phase is not _Phase.READING:
            return []
        epoch = self._epochs[stream.began.round.epoch]
        epoch.missing.add(stream.began.peer)
        epoch.barred.add(stream.began.peer)
        return [self._refuse(number, kind, text, 1.0), *self._step_if_ready(epoch, now)]

    def _ended(self, number: int, now: float) -> list[Action]:
        stream = self._streams.pop(number, None)
        if stream is None or not stream.live or stream.phase is _Phase.HELD:
            return []
        epoch, peer = self._epochs[stream.began.round.epoch], stream.began.peer
        if any(s.live and s.began.peer == peer for _, s in self._of_epoch(stream.began.round.epoch)):
            return []
        epoch.missing.add(peer)  # its contribution, if whole, stays: what is given is given
        return self._step_if_ready(epoch, now)

    def _gone(self, peer: PeerId, now: float) -> list[Action]:
        actions: list[Action] = []
        for number, epoch in self._epochs.items():
            if any(s.phase is _Phase.READING and s.began.peer == peer for _, s in self._of_epoch(number)):
                continue  # its gradients are coming all the same; if they stop, the stream ends
            epoch.missing.add(peer)
            actions += self._step_if_ready(epoch, now)
        return actions

    def _step_if_ready(self, epoch: _Epoch, now: float) -> list[Action]:
        opened = epoch.current
        if opened is None or epoch.fault or not opened.mine - epoch.claimed:
            return []
        awaited = opened.members - opened.listeners - epoch.present - epoch.missing - epoch.given.keys()
        if awaited and now < opened.contribute_by:
            return []
        if not epoch.given:
            return self._latch(opened.round.epoch, epoch, "nobody gave gradients for these parts")
        names = opened.mine - epoch.claimed
        epoch.claimed |= names
        return [Step(opened.round, tuple(sorted(names)), tuple(sorted(epoch.given)), sum(epoch.given.values()))]

    def _stepped(self, number: int, names: frozenset[str]) -> list[Action]:
        epoch = self._epochs.get(number)
        if epoch is None:
            return []
        epoch.fresh |= names
        return self._serve_ready(number)

    def _step_failed(self, number: int, names: frozenset[str], text: str) -> list[Action]:
        epoch = self._epochs.get(number)
        if epoch is None:
            return []
        epoch.claimed -= names - epoch.fresh
        return self._latch(number, epoch, text)

    def _latch(self, number: int, epoch: _Epoch, text: str) -> list[Action]:
        epoch.fault = epoch.fault or text
        waiting = [
            n
            for n, s in self._of_epoch(number)
            if s.phase in (_Phase.READING, _Phase.WAITING) and not self._wanted(s, epoch) <= epoch.claimed
        ]
        return [*(self._refuse(n, Kind.FAILED, epoch.fault) for n in waiting), Fail(number, epoch.fault)]

    def _forgot(self, number: int) -> list[Action]:
        self._floor = max(self._floor, number)
        actions: list[Action] = [
            self._refuse(n, Kind.FORGOTTEN, f"epoch {s.began.round.epoch} is over")
            for n, s in self._streams.items()
            if s.live and s.began.round.epoch <= number
        ]
        self._epochs = {n: e for n, e in self._epochs.items() if n > number}
        return actions

    def _voided(self, number: int) -> list[Action]:
        """The swarm went back. Streams whose round is not open here stay: they may belong to the new beginning."""
        self._floor = min(self._floor, number - 1)
        actions: list[Action] = [
            self._refuse(n, Kind.SUPERSEDED, f"epoch {number} begins anew")
            for n, s in self._streams.items()
            if s.live and s.phase is not _Phase.HELD and s.began.round.epoch >= number
        ]
        self._epochs = {n: e for n, e in self._epochs.items() if n < number}
        return actions

    def _serve_ready(self, number: int) -> list[Action]:
        epoch = self._epochs[number]
        ready = [(n, s) for n, s in self._of_epoch(number) if s.phase in (_Phase.READING, _Phase.WAITING)]
        return [action for n, s in ready for action in self._serve_if_fresh(n, s, epoch)]

    def _serve_if_fresh(self, number: int, stream: _Stream, epoch: _Epoch) -> list[Action]:
        wanted = self._wanted(stream, epoch)
        if not wanted <= epoch.fresh:
            return []
        stream.phase = _Phase.SETTLED
        return [Serve(number, tuple(sorted(wanted)))]

    def _refuse(self, number: int, kind: Kind, text: str, weight: float = 0.0) -> Refuse:
        self._streams[number].phase = _Phase.SETTLED
        return Refuse(number, kind, text, weight)

    def _of_epoch(self, number: int) -> list[tuple[int, _Stream]]:
        return [(n, s) for n, s in sorted(self._streams.items()) if s.began.round.epoch == number]

    @staticmethod
    def _wanted(stream: _Stream, epoch: _Epoch) -> frozenset[str]:
        """A contributor is answered with the parts it gave to; a listener with all this peer owns in its round."""
        return frozenset(stream.began.names) or epoch.rounds[stream.began.round].mine

    def awaited(self, number: int) -> tuple[PeerId, ...]:
        """Who has not contributed to the current attempt of an epoch, for the operator's eyes."""
        epoch = self._epochs.get(number)
        if epoch is None or epoch.current is None:
            return ()
        here = epoch.present | epoch.given.keys()
        return tuple(sorted(epoch.current.members - epoch.current.listeners - here, key=short))
