"""Facts of a run in a recording: everything that a fresh machine needs beside its events. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from node.consensus.rules import Rules
from node.coordinator.recording.values import Reader, Writer
from node.core.errors import Refused, WireError
from node.core.ids import NO_CELL, CellId, PeerId
from node.core.journey import MOST_PATHS, Plan, Version
from node.epoch.facts import PlanFunctions, RunFacts, Waits, WorkSizes
from node.epoch.leader.conduct import Record
from node.optim.ownership import assign
from node.optim.parts import ParameterPart
from node.scheduler.router import Router
from node.scheduler.settings import SchedulerSettings

MOST_STAGES = 4096
"""Block stages of a run, as in its manifest."""
FORMAT = 2
"""Number of the format. A reader refuses any other."""


@dataclass(frozen=True)
class RunNumbers:
    """The amounts of a run, as in :class:`~node.epoch.facts.RunFacts`."""

    stages: int
    epochs: int
    target_batch: int
    micro_batch: int
    min_replicas: int
    waits: Waits
    sizes: WorkSizes
    run_id: str
    spare: int
    prove: bool

    def __post_init__(self) -> None:
        """Raises ValueError for a run that no manifest may have: a fresh machine makes lists of its
        stages and micro-batches."""
        most = self.micro_batch * MOST_PATHS
        if not (1 <= self.stages <= MOST_STAGES and 1 <= self.target_batch <= most):
            raise ValueError("more stages or micro-batches than a run may have")


@dataclass(frozen=True)
class LossChecks:
    """Evaluations of a run and the advice that follows from them, as in
    :class:`~node.epoch.facts.RunFacts`."""

    eval_every: int
    reference: bool
    warmup: int
    advice: str


@dataclass(frozen=True)
class Setup:
    """The first record of a recording, which has the fields of ``run`` and ``losses`` beside the
    others. ``version``: the tutti that wrote it; ``peer``: the peer that recorded itself.
    ``scheduler`` and ``parts`` (by stage) are what paths and owners are made from."""

    version: str
    peer: PeerId
    run: RunNumbers
    losses: LossChecks
    scheduler: SchedulerSettings
    parts: dict[int, tuple[ParameterPart, ...]]

    @classmethod
    def of(
        cls,
        version: str,
        peer: PeerId,
        facts: RunFacts,
        scheduler: SchedulerSettings,
        parts: Mapping[int, tuple[ParameterPart, ...]],
    ) -> "Setup":
        """The setup of a peer that plans with these facts."""
        run = RunNumbers(**{name: getattr(facts, name) for name in _names(RunNumbers)})
        losses = LossChecks(**{name: getattr(facts, name) for name in _names(LossChecks)})
        return cls(version, peer, run, losses, scheduler, dict(parts))

    @classmethod
    def read(cls, document: Any, reader: Reader) -> "Setup":
        """The setup in a record. Raises WireError for anything that is none."""
        if not isinstance(document, dict) or document.keys() & GROUPS.keys():
            raise WireError("a setup has the fields of its run beside the others")
        rest = dict(document)
        for group, kind in GROUPS.items():
            document = {name: rest.pop(name) for name in _names(kind) if name in rest}
            rest[group] = document
        return reader.fields(rest, cls)

    def document(self, writer: Writer) -> dict[str, Any]:
        """The setup as a record has it."""
        found = writer.fields(self)
        for group in GROUPS:
            found |= found.pop(group)
        return found

    def facts(self, rules: Mapping[str, Rules]) -> RunFacts:
        """The facts of a fresh leader. ``rules``: settings by the owner's change, "" for the
        manifest's own."""
        numbers = {**vars(self.run), **vars(self.losses)}

        def read(change: str) -> Rules:
            if change not in rules:
                raise Refused("not a change that was read when this was recorded", "")
            return rules[change]

        make = PlanFunctions(
            assign=lambda stage, cell, previous, room: assign(
                self.parts[stage], cell, previous, room
            ),
            router=lambda: Router(self.scheduler, self.run.stages),
            read=read,
        )
        return RunFacts(make=make, **numbers)


GROUPS: Mapping[str, type[Any]] = {"run": RunNumbers, "losses": LossChecks}
"""Fields of a setup whose own fields stand beside the others in a record."""


def _names(kind: type[Any]) -> list[str]:
    """The names of the fields of a dataclass."""
    return [field.name for field in fields(kind)]


@dataclass(frozen=True)
class MemberStart:
    """A member machine begins: the arguments of :class:`~node.epoch.member.Member`."""

    me: PeerId
    at: Version
    checkpoints: tuple[Version, ...]
    tokens: int


@dataclass(frozen=True)
class LeaderStart:
    """A leader machine begins: the arguments of :class:`~node.epoch.leader.leader.Leader`.
    ``conduct`` has the newest record last."""

    me: PeerId
    term: int
    history: Plan | None
    dropped: tuple[int, ...]
    rules: Rules | None
    known: frozenset[PeerId]
    cell: CellId
    conduct: tuple[tuple[PeerId, Record], ...]

    @classmethod
    def of(
        cls,
        me: PeerId,
        *,
        term: int = 0,
        history: Plan | None = None,
        dropped: Sequence[int] = (),
        rules: Rules | None = None,
        known: frozenset[PeerId] = frozenset(),
        cell: CellId = NO_CELL,
        conduct: Mapping[PeerId, Record] | None = None,
    ) -> "LeaderStart":
        """The start of a leader with these arguments."""
        records = tuple((conduct or {}).items())
        return cls(me, term, history, tuple(dropped), rules, known, cell, records)

    def arguments(self) -> dict[str, Any]:
        """The arguments of a leader beside its peer and the facts of the run."""
        return {
            "term": self.term,
            "history": self.history,
            "dropped": self.dropped,
            "rules": self.rules,
            "known": self.known,
            "cell": self.cell,
            "conduct": dict(self.conduct),
        }
