"""Snapshots a donor holds still while joiners read them: few, and not for ever.

A pin keeps references to the tensors of one epoch, so training goes on while they are read; the
price is the memory of an epoch that would otherwise be gone. Hence the bounds: how many, how long
unused, how long at all.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from node.checkpoint.state import WIRE, StateKind
from node.core.ids import PeerId
from node.core.journey import Version
from node.wire.tensors import digest_of, encode, expected_head, hashes_of
from protos import state_pb2

PINS = 8
IDLE_S = 60.0
SPARE_S = 2.0
"""Unused for so long, a snapshot gives way to a new one when all places are taken."""
LONGEST_S = 3600.0


class PinKey(NamedTuple):
    """What a pin is a snapshot of."""

    stage: int
    kind: StateKind
    version: Version


@dataclass
class Pin:
    """One snapshot. ``views``: the bytes of tensors and ``hashes`` those of their pieces, made
    once; ``given``: how many bytes of a tensor went to a peer."""

    key: PinKey
    tensors: dict[str, torch.Tensor]
    born: float
    used: float
    views: dict[str, memoryview] = field(default_factory=dict)
    hashes: dict[str, bytes] = field(default_factory=dict)
    given: Counter[tuple[PeerId, str]] = field(default_factory=Counter)
    readers: int = 0

    def view(self, name: str) -> memoryview:
        """The fp32 bytes of one tensor; for one on a device this is its copy on the CPU."""
        if name not in self.views:
            self.views[name] = encode(self.tensors[name], WIRE)
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
    """All pins of a donor. Pure: ``now`` is monotonic seconds given by the caller."""

    def __init__(self) -> None:
        self._pins: dict[PinKey, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def find(
        self, stage: int, kind: StateKind | None, epoch: int, lineage: str, now: float
    ) -> Pin | None:
        """The pin of that state, used now; an empty ``lineage`` stands for any. None when there is
        none."""
        self.expire(now)
        for key, pin in self._pins.items():
            if (
                key[:2] == (stage, kind)
                and key.version.epoch == epoch
                and lineage in ("", key.version.lineage)
            ):
                pin.used = now
                return pin
        return None

    def hold(self, key: PinKey, tensors: Mapping[str, torch.Tensor], now: float) -> Pin | None:
        """The pin of ``key``, used now, a new one if there is none, with these tensors too,
        counters as numbers; what was there already stays as it is. None when :data:`PINS` others
        are in use; a pin in use is never taken from its readers."""
        self.expire(now)
        if key not in self._pins:
            # Epochs may follow each other faster than pins grow old, and their readers have long
            # gone.
            spare = [p for p in self._pins.values() if not p.readers and now - p.used > SPARE_S]
            if key.kind is not StateKind.PARAMETERS:
                # Optimizer state is copied every few epochs: old snapshots of it would fill the
                # memory one after the other.
                for old in [p for p in spare if p.key.kind is key.kind]:
                    spare.remove(old)
                    del self._pins[old.key]
            if len(self._pins) >= PINS:
                if not spare:
                    return None
                del self._pins[min(spare, key=lambda p: p.used).key]
            self._pins[key] = Pin(key, {}, now, now)
        pin = self._pins[key]
        pin.used = now
        for name, tensor in tensors.items():
            pin.tensors.setdefault(name, tensor if tensor.is_floating_point() else tensor.float())
        return pin

    def others(self, stage: int, kind: StateKind, now: float) -> bool:
        """Whether state of this kind of another stage is being read, or was a moment ago."""
        return any(
            key.kind is kind and key.stage != stage and (pin.readers or now - pin.used <= SPARE_S)
            for key, pin in self._pins.items()
        )

    def expire(self, now: float) -> None:
        """Let go of what nobody read for :data:`IDLE_S`, and of everything older than
        :data:`LONGEST_S`."""
        for key in [
            k for k, p in self._pins.items() if now - p.used > IDLE_S or now - p.born > LONGEST_S
        ]:
            del self._pins[key]
