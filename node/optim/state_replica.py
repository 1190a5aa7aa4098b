"""Copies of other owners' optimizer state: the death of an owner costs its momentum some epochs of
age and not its life.

The choice of copies is a pure function of a cell's members, so nobody negotiates it: the *buddy* of
an owner is the next member in PeerId order, the first after the last.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from node.core.ids import PeerId
from node.core.journey import Version
from node.optim.parts import LOW
from node.optim.steps import HeldState
from node.wire.remote import HeldTensor, collected


def buddy(owner: PeerId, cell: Iterable[PeerId]) -> PeerId | None:
    """The member that keeps copies of the state of ``owner``; None if the cell has nobody else."""
    others = sorted(set(cell) - {owner})
    if not others:
        return None
    return next((p for p in others if p > owner), others[0])


def wards(me: PeerId, cell: Collection[PeerId]) -> tuple[PeerId, ...]:
    """The owners that have ``me`` as their buddy: the member before it, or nobody."""
    return tuple(sorted(p for p in cell if p != me and buddy(p, cell) == me))


@dataclass(frozen=True, slots=True)
class StateReplica:
    """Optimizer state of one part after the update that made ``version``: on the CPU, fp32 except
    ``LOW``, or on several devices if this peer owned the part."""

    version: Version
    state: HeldState


MOST_VERSIONS = 1024
"""Versions that a trail remembers."""


class VersionTrail:
    """The versions that led to the parameters here, while this peer was there; the newest
    :data:`MOST_VERSIONS` of them."""

    def __init__(self) -> None:
        self._past = dict[int, str]()
        """Lineage by epoch, rising."""

    def stand(self, version: Version) -> None:
        """Record that ``version`` is in place."""
        # Another lineage at the same epoch is another history: the remembered versions say nothing
        # about it.
        same = self._past.get(version.epoch, version.lineage) == version.lineage
        oldest = version.epoch - MOST_VERSIONS
        self._past = {
            e: line for e, line in self._past.items() if same and oldest < e < version.epoch
        }
        self._past[version.epoch] = version.lineage

    def forget(self) -> None:
        """The parameters in place before belong to another history: remember nothing of them."""
        self._past = {}

    def at(self, epoch: int) -> Version:
        """The version of that epoch; without its lineage where this peer was not there."""
        return Version(epoch, self._past.get(epoch, ""))

    def leads_from(self, version: Version) -> bool:
        """Return True if the parameters in place came from ``version``, to this peer's
        knowledge."""
        return (
            0 < version.epoch <= next(reversed(self._past), 0)
            and self._past.get(version.epoch, version.lineage) == version.lineage
        )


class Spares(dict[str, StateReplica]):
    """The newest copy of each part, apart from the state of this peer's own parts."""

    def put(self, name: str, version: Version, state: HeldState) -> None:
        """Keep a copy unless a newer one is held. The tensors are kept by reference: do not write
        into them."""
        held = self.get(name)
        if held is None or held.version.epoch <= version.epoch:
            narrow = dict(state)
            if LOW in narrow:
                narrow[LOW] = collected(narrow[LOW]).to(torch.int16)
            self[name] = StateReplica(version, narrow)

    def versions(self) -> dict[str, Version]:
        """The version of each part's copy, by part."""
        return {name: spare.version for name, spare in self.items()}

    def at(self, epoch: int, lineage: str = "") -> tuple[Version, dict[str, HeldTensor]] | None:
        """All copies of one version, by "<part>/<state>"; an empty ``lineage`` stands for any. None
        if there is no copy."""
        versions = set(self.versions().values())
        found = [v for v in versions if v.epoch == epoch and lineage in ("", v.lineage)]
        if not found:
            return None
        return min(found), {
            f"{name}/{key}": tensor
            for name, spare in self.items()
            if spare.version == min(found)
            for key, tensor in spare.state.items()
        }

    def drop(self, names: Iterable[str]) -> None:
        """Forget these parts."""
        for name in names:
            self.pop(name, None)

    def keep_only(self, trail: VersionTrail) -> None:
        """Forget copies of versions that did not lead to the parameters here."""
        self.drop(
            [name for name, version in self.versions().items() if not trail.leads_from(version)]
        )
