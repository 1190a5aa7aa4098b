"""State of a stage: its seven kinds, the source that donors take it from, and the snapshot that a
joiner gets."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from node.core.ids import PeerId
from node.core.journey import Version
from node.wire.remote import HeldTensor
from protos import state_pb2

WIRE = "fp32"
"""State always travels exactly: a rounded copy would not have the digest."""


class StateKind(StrEnum):
    """``PARAMETERS`` of a stage, named as the model names them; ``OPTIMIZER`` state of the parts a
    peer owns, named "<part>/<state>"; ``SPARE``: copies it keeps of other owners' optimizer state,
    named alike; ``OUTER``: anchor and outer momentum of the stage, "<part>/anchor" and
    "<part>/momentum". ``SNAPSHOT``: parameters that a cell gives others in a window, whose number
    stands in place of the epoch; ``MEAN``: the mean of its own and its partners' snapshots.
    ``BASE``: the weights that the run begins from, or trains adapters beside, at epoch 0."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    SPARE = "spare"
    OUTER = "outer"
    SNAPSHOT = "snapshot"
    MEAN = "mean"
    BASE = "base"

    @property
    def code(self) -> state_pb2.Kind:
        return getattr(state_pb2, self.name)

    @classmethod
    def of(cls, code: int) -> "StateKind | None":
        """The kind behind a number of the wire, None for one this software does not know."""
        return next((kind for kind in cls if kind.code == code), None)


class StateProvider(Protocol):
    """The part of the daemon that holds state others may fetch."""

    def describe(
        self, stage: int, kind: StateKind, epoch: int | None, lineage: str
    ) -> tuple[Version, Mapping[str, HeldTensor]] | None:
        """The state of ``stage`` at ``epoch`` (None: the newest committed), or None when it is not
        held.

        A ``lineage`` that is not empty must be the lineage of that state.

        The tensors are kept by reference until joiners have read them: a later epoch must replace
        them and not write into them.
        """
        ...

    def listing(self, stage: int, kind: StateKind) -> Mapping[str, Version]:
        """Parts of ``stage`` there is OPTIMIZER or SPARE state of, each with its version."""
        ...


@dataclass(frozen=True)
class StateSnapshot:
    """State fetched whole: fp32 on the CPU, its digest verified. ``sources`` are the bytes each
    donor gave."""

    version: Version
    """Version as the donors report it; checked only if the digest was known before."""
    tensors: dict[str, torch.Tensor]
    sources: dict[PeerId, int]


def by_part(flat: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """ "<part>/<state>" to part to state."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in flat.items():
        name, _, state = key.rpartition("/")
        parts.setdefault(name, {})[state] = tensor
    return parts
