"""What the two kinds of round of a stage have in common: who owns which part, and what an attempt
came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from node.averaging.exchange.request import RoundOutcome
from node.averaging.strategies.outer import pieces
from node.core.ids import PeerId, short
from node.core.journey import Plan
from node.optim.ownership import ownership_hash
from node.optim.parts import ParameterPart, parts_of
from node.optim.settings import OptimSettings
from node.training.protocol import events as ev
from node.training.state.engines import Engines
from node.training.state.stage import StageState


class Rounds:
    """Of one stage at one peer. ``done`` and ``failed`` count attempts; ``seconds``, ``nbytes``
    (tensor bytes sent and received), ``members`` and ``contributors`` are of the last one,
    ``deadline_s`` what it had."""

    def __init__(
        self,
        stage: StageState,
        engines: Engines,
        optimizer: OptimSettings,
        me: PeerId,
        parts: Sequence[ParameterPart] | None = None,
    ) -> None:
        """``parts``: what can be owned of the stage; None: each parameter."""
        self.shapes = stage.shapes
        self._parts = tuple(parts_of(self.shapes, optimizer) if parts is None else parts)
        self._method = optimizer.name
        self.operations = {part.name: part.cost for part in self._parts}
        self.stage, self._engines, self._me = stage.stage, engines, me
        self.done = self.failed = 0
        self.seconds = self.deadline_s = 0.0
        self.nbytes = self.members = self.contributors = 0

    def owners(self, plan: Plan, r: ev.RoundArrived) -> dict[str, PeerId]:
        """Who averages and steps each part of this stage in this attempt: the plan's word, and the
        leader's where it has changed."""
        return {name: r.owners.get(name, plan.owners[name]) for name in self.shapes}

    def hash_of(self, owners: Mapping[str, PeerId]) -> str:
        """What travels with every exchange, so that nobody averages by other owners."""
        return ownership_hash(
            [part for part in self._parts if part.name in owners], owners, self._method
        )

    def carried(self, window: int, fragments: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts of this stage that a window carries: all, or a fragment in its
        turn."""
        sizes = {part.name: part.bytes for part in self._parts}
        names = pieces(sizes, fragments)[window % fragments]
        return {name: of for name, of in self.shapes.items() if name in names}

    def ended(
        self,
        plan: Plan,
        r: ev.RoundArrived,
        outcome: RoundOutcome,
        members: int,
    ) -> ev.RoundEnded:
        """The attempt has come to this: for the record, and for the leader."""
        self.done += not outcome.missing
        self.failed += bool(outcome.missing)
        self.seconds, self.nbytes, self.deadline_s = outcome.seconds, outcome.nbytes, r.deadline_s
        self.members, self.contributors = members, len(outcome.contributors)
        self._engines.metrics.time_spent("round", outcome.seconds)
        for peer, why in {**outcome.failed, **outcome.refused, **outcome.quarantined}.items():
            self._engines.journal.emit(
                "averaging",
                "member-failed",
                f"peer {short(peer)}: {why}",
                "warning",
                peer=peer,
                epoch=plan.epoch,
            )
        failed = tuple(sorted(p for p in outcome.failed if p != self._me))
        return ev.RoundEnded(
            plan.epoch,
            plan.term,
            r.attempt,
            tuple(sorted(outcome.fresh)),
            outcome.missing,
            failed,
        )
