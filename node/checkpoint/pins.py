"""Snapshots a donor holds still while joiners read them: few, and not for ever.

A pin keeps references to the tensors of one epoch, so training goes on while they are read; the
price is the memory of an epoch that would otherwise be gone. Hence the bounds: the number of pins
of one reader, of strangers, and of all; their bytes together; the time without a reader that gets
on, and the time at all. A reader that gets on comes before one that does not.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from node.checkpoint.state import WIRE, StateKind
from node.core.ids import PeerId
from node.core.journey import Version
from node.wire.remote import HeldTensor, collected, on_cpu
from node.wire.tensors import digest_of, encode, expected_head, hashes_of, nbytes_of
from protos import state_pb2

PINS = 8
"""Snapshots held at once; half of them may be read by strangers only."""
TIMES = 4
"""Bytes of all snapshots together, as a multiple of the stage's parameters, or of the largest
snapshot where that is more."""
OF_READER = 4
"""Snapshots that a member of the run may read: it needs parameters, optimizer state and the state
of outer rounds."""
OF_STRANGER = 2
"""Snapshots that a stranger may read: it needs parameters and the outer optimizer's state."""
IDLE_S = 60.0
"""Seconds for which a snapshot is held for a reader that uses it no more. It may wait as long for
the description by another donor."""
BEHIND_S = 10.0
"""The same for a reader that has taken bytes of this snapshot or of another, but next to
nothing."""
STUCK_S = 600.0
"""Seconds for which a reader may take no byte, though it asks for descriptions again: it may be
busy with another stage."""
SPARE_S = 2.0
"""Seconds without use after which a snapshot gives way to a new one that lacks place or memory."""
GRACE_S = 30.0
"""First seconds of a reading, which do not count for its pace."""
NIBBLE_GRACE_S = 8.0
"""The same for the question whether it takes next to nothing: what a nibbler holds is free 30
seconds after its last bite, also where it had only begun."""
PACE_S = 1200.0
"""Seconds in which a reader has to be on its way to read a snapshot, to keep it while another
reader needs the place."""
SHARE = 16
"""Donors at once between which a joiner may divide a snapshot: a nibbler has taken less of one than
a sixteenth of it at that pace."""
LONGEST_S = 3600.0


class PinKey(NamedTuple):
    """Stage, kind and version of a snapshot."""

    stage: int
    kind: StateKind
    version: Version


@dataclass(slots=True)
class Reading:
    """One reader of a snapshot: ``total`` bytes that it was told of, ``got`` bytes that it has
    taken, again and again included. ``used``: when it last asked for something, ``moved``: when it
    last took a byte."""

    began: float
    used: float
    moved: float
    names: set[str] = field(default_factory=set)
    total: int = 0
    got: int = 0
    again: bool = False
    """True if it had read all of it and began anew."""

    @property
    def done(self) -> bool:
        return self.got >= self.total

    def told(self, names: Mapping[str, int], now: float) -> None:
        """The reader asked for a description of these tensors; ``names``: bytes of each."""
        if self.total and self.done and not names.keys() - self.names:
            self.began = now
            self.got = 0
            self.again = True
        for name in names.keys() - self.names:
            self.names.add(name)
            self.total += names[name]
        self.used = now

    def behind(self, within_s: float, now: float) -> bool:
        """Return True if this reader begins anew, or is slow."""
        return self.again or self.slow(within_s, now)

    def slow(self, within_s: float, now: float, grace_s: float = GRACE_S) -> bool:
        """Return True if this reader will not have read everything ``within_s`` seconds after its
        beginning at the pace that it has kept so far. Its first ``grace_s`` seconds do not
        count."""
        elapsed = now - self.began - grace_s
        return not self.done and elapsed * self.total > self.got * within_s

    def over(self, idle_s: float, now: float) -> bool:
        """Return True if the reader takes nothing any more: it used the snapshot ``idle_s`` ago."""
        return now - self.used > idle_s or (not self.done and now - self.moved > STUCK_S)


@dataclass
class Pin:
    """One snapshot. ``views``: the tensors' bytes, ``hashes``: hashes of their pieces, both made
    once; ``given``: bytes of each tensor that went to a peer; ``readers``: requests under way."""

    key: PinKey
    tensors: dict[str, HeldTensor]
    born: float
    readings: dict[PeerId, Reading] = field(default_factory=dict)
    views: dict[str, memoryview] = field(default_factory=dict)
    hashes: dict[str, bytes] = field(default_factory=dict)
    given: Counter[tuple[PeerId, str]] = field(default_factory=Counter)
    readers: int = 0

    @property
    def used(self) -> float:
        """The time of its last use."""
        return max((reading.used for reading in self.readings.values()), default=self.born)

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers as they travel."""
        return sum(nbytes_of(tensor.shape, WIRE) for tensor in self.tensors.values())

    def uses(self, peer: PeerId, now: float) -> bool:
        """``peer`` uses it now; False where this is not its snapshot."""
        if (reading := self.readings.get(peer)) is None:
            return False
        reading.used = now
        return True

    def took(self, peer: PeerId, nbytes: int, now: float) -> None:
        """``peer`` has taken ``nbytes``."""
        if (reading := self.readings.get(peer)) is not None:
            reading.got += nbytes
            reading.used = now
            reading.moved = now

    def view(self, name: str) -> memoryview:
        """The fp32 bytes of one tensor; for one on a device, or with other processes, this is its
        copy on the CPU."""
        if name not in self.views:
            # The copy replaces the tensor: memory of the device is scarcer.
            self.tensors[name] = on_cpu(self.tensors[name])
            self.views[name] = encode(collected(self.tensors[name]), WIRE)
        return self.views[name]

    def describe(self, names: tuple[str, ...]) -> state_pb2.StateManifest:
        """Heads, hashes and digest of ``names``, all of them held. Reads every byte the first time,
        so run it off the event loop."""
        version = self.key.version
        manifest = state_pb2.StateManifest(
            epoch=version.epoch,
            lineage=version.lineage,
            stage=self.key.stage,
            kind=self.key.kind.code,
        )
        for name in names:
            if name not in self.hashes:
                self.hashes[name] = hashes_of(self.view(name))
            manifest.tensors.add(
                head=expected_head(name, self.tensors[name].shape, WIRE), hashes=self.hashes[name]
            )
        manifest.digest = digest_of(
            {name: (self.tensors[name].shape, self.hashes[name]) for name in names}
        )
        return manifest


class Pins:
    """All pins of a donor. Pure: ``now`` is monotonic seconds given by the caller.

    ``parameters``: bytes of the stage's parameters; ``rate``: bytes a second that the donor gives
    to all readers together, 0 for no limit; ``established(peer)`` says if ``peer`` is a member of
    the run or has worked with this peer.
    """

    def __init__(
        self,
        parameters: int = 0,
        rate: float = 0.0,
        established: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self._parameters = parameters
        self._rate = rate
        self._established = established
        self._pins: dict[PinKey, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def clear(self) -> None:
        """Give every snapshot up, whoever reads it."""
        self._pins.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots."""
        return sum(pin.nbytes for pin in self._pins.values())

    def find(
        self, stage: int, kind: StateKind | None, epoch: int, lineage: str, now: float
    ) -> Pin | None:
        """The pin of that state; an empty ``lineage`` stands for any. None when there is none."""
        self.expire(now)
        for key, pin in self._pins.items():
            if (
                key[:2] == (stage, kind)
                and key.version.epoch == epoch
                and lineage in ("", key.version.lineage)
            ):
                return pin
        return None

    def hold(
        self, key: PinKey, tensors: Mapping[str, HeldTensor], peer: PeerId, now: float
    ) -> Pin | None:
        """The pin of ``key`` for ``peer`` to read, a new one if there is none. ``tensors`` are
        added to it, counters as numbers; tensors that it has already stay as they are. None when
        there is no place or no memory; a pin is never taken from readers that get on."""
        self.expire(now)
        new = {n: t for n, t in tensors.items() if key not in self._pins or self._lacks(key, n)}
        nbytes = sum(nbytes_of(tensor.shape, WIRE) for tensor in new.values())
        if key not in self._pins:
            self._give_way(key, now)
        self._leave(key, peer)
        if not self._has_room(key, nbytes, peer, now):
            return None
        pin = self._pins.setdefault(key, Pin(key, {}, now))
        for name, tensor in new.items():
            pin.tensors[name] = tensor
            if not tensor.dtype.is_floating_point:
                pin.tensors[name] = collected(tensor).float()
        self.reads(pin, peer, (), now)
        return pin

    def reads(self, pin: Pin, peer: PeerId, names: Collection[str], now: float) -> None:
        """``peer`` is told of these tensors of a pin and may read them."""
        told = {name: nbytes_of(pin.tensors[name].shape, WIRE) for name in names}
        self._leave(pin.key, peer)
        pin.readings.setdefault(peer, Reading(now, now, now)).told(told, now)

    def _leave(self, key: PinKey, peer: PeerId) -> None:
        """Take from ``peer`` the pins that it has not used for the longest time, until it may hold
        one for ``key`` too."""
        most = OF_STRANGER
        if self._established(peer):
            most = OF_READER
        mine = [p for p in self._pins.values() if peer in p.readings and p.key != key]
        mine.sort(key=lambda pin: pin.readings[peer].used)
        for pin in mine[: max(0, len(mine) + 1 - most)]:
            del pin.readings[peer]
            if not pin.readings:
                del self._pins[pin.key]

    def holds(self, pin: Pin) -> bool:
        """Return True if this pin is still held."""
        return self._pins.get(pin.key) is pin

    def _lacks(self, key: PinKey, name: str) -> bool:
        return name not in self._pins[key].tensors

    def _give_way(self, key: PinKey, now: float) -> None:
        """Optimizer state is copied every few epochs: old snapshots of it would fill the memory one
        after the other."""
        if key.kind is StateKind.PARAMETERS:
            return
        for old in [p for p in self._pins.values() if p.key.kind is key.kind]:
            if self._spare(old, now):
                del self._pins[old.key]

    def _has_room(self, key: PinKey, nbytes: int, peer: PeerId, now: float) -> bool:
        """Return True if there is a place, and memory for ``nbytes`` more bytes of ``key``. Unused
        snapshots make room first, then snapshots of readers that do not get on. For a peer of the
        run, strangers' snapshots make room too."""
        while (candidates := self._in_the_way(key, nbytes, peer)) is not None:
            victim = self._victim(candidates, peer, now)
            if victim is None:
                return False
            del self._pins[victim.key]
        return True

    def _in_the_way(self, key: PinKey, nbytes: int, peer: PeerId) -> list[Pin] | None:
        """Pins of which one has to go before ``nbytes`` more bytes of ``key`` may be held for
        ``peer``; None if none has to."""
        others = [pin for pin in self._pins.values() if pin.key != key]
        new = key not in self._pins
        largest = max((pin.nbytes for pin in others), default=0)
        most = TIMES * max(self._parameters, largest, nbytes)
        if nbytes and others and self.nbytes + nbytes > most:
            return others
        if new and len(others) >= PINS:
            return others
        strange = [pin for pin in others if self._strange(pin)]
        if new and not self._established(peer) and len(strange) >= PINS // 2:
            return strange
        return None

    def _strange(self, pin: Pin) -> bool:
        """Return True if nobody of the run reads this pin."""
        return not any(self._established(peer) for peer in pin.readings)

    @staticmethod
    def _spare(pin: Pin, now: float) -> bool:
        return not pin.readers and now - pin.used > SPARE_S

    def _victim(self, others: Sequence[Pin], peer: PeerId, now: float) -> Pin | None:
        spare = [
            pin
            for pin in others
            if self._read(pin) or (self._spare(pin, now) and self._settled(pin))
        ]
        if spare:
            return min(spare, key=lambda pin: pin.used)
        slow = [pin for pin in others if self._slow(pin, now)]
        if slow:
            return min(slow, key=lambda pin: self._pace(pin, now))
        strange = [pin for pin in others if self._strange(pin)]
        if strange and self._established(peer):
            return min(strange, key=lambda pin: self._pace(pin, now))
        return None

    @staticmethod
    def _read(pin: Pin) -> bool:
        """Return True for optimizer state of which every reader has all that it was told of. It is
        copied in every epoch, which may be shorter than :data:`SPARE_S`."""
        if pin.key.kind is StateKind.PARAMETERS or pin.readers or not pin.readings:
            return False
        return all(reading.total and reading.done for reading in pin.readings.values())

    @staticmethod
    def _settled(pin: Pin) -> bool:
        """Return True if nobody is in the middle of reading it."""
        return all(reading.done or not reading.got for reading in pin.readings.values())

    def _slow(self, pin: Pin, now: float) -> bool:
        within_s = self._within_s(pin)
        return all(reading.behind(within_s, now) for reading in pin.readings.values())

    def _within_s(self, pin: Pin) -> float:
        """Seconds in which a reader has to be on its way to read a snapshot."""
        if not self._rate:
            return PACE_S
        count = sum(len(p.readings) for p in self._pins.values())
        return max(PACE_S, 2 * count * pin.nbytes / self._rate)

    def _nibblers(self, now: float) -> set[PeerId]:
        """Readers that have taken bytes of a snapshot, but next to nothing."""
        found: set[PeerId] = set()
        for pin in self._pins.values():
            within_s = SHARE * self._within_s(pin)
            for peer, reading in pin.readings.items():
                begun = reading.got > 0 and not pin.readers
                if begun and reading.slow(within_s, now, NIBBLE_GRACE_S):
                    found.add(peer)
        return found

    @staticmethod
    def _pace(pin: Pin, now: float) -> float:
        """Share of the snapshot that its best reader takes in a second."""
        return max(
            (r.got / max(1, r.total) / (1.0 + now - r.began) for r in pin.readings.values()),
            default=0.0,
        )

    def others(self, stage: int, kind: StateKind, now: float) -> bool:
        """Return True if state of this kind of another stage is being read, or was just now."""
        return any(
            key.kind is kind and key.stage != stage and not self._spare(pin, now)
            for key, pin in self._pins.items()
        )

    def expire(self, now: float) -> None:
        """Let go of pins without a reader that takes anything, and of every pin older than
        :data:`LONGEST_S`."""
        nibblers = self._nibblers(now)
        for pin in list(self._pins.values()):
            for peer, reading in list(pin.readings.items()):
                idle_s = IDLE_S
                if peer in nibblers and not pin.readers:
                    idle_s = BEHIND_S
                if reading.over(idle_s, now):
                    del pin.readings[peer]
            if not pin.readings or now - pin.born > LONGEST_S:
                del self._pins[pin.key]
