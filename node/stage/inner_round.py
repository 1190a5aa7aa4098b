"""The inner round at one member, which ends an epoch of micro-batches: gradients to their owners,
the owners' steps, fresh parameters to all. Also the parts shared with the rounds between cells: the
owner of each part, and the result of an attempt. Enters: a plan, the leader's message on each
attempt. Leaves: the cell's next parameters, the result of the round. Never: another cell (that is
:mod:`node.outer.window`), a byte on the wire (:mod:`node.averaging`'s)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from node.averaging.exchange.request import RoundOutcome, RoundRequest, WeightCaps
from node.averaging.strategies.outer import pieces
from node.core.ids import ENDS, PeerId, RoundId, short
from node.core.journey import Plan
from node.epoch import events as ev
from node.optim.ownership import ownership_hash
from node.optim.parts import ParameterPart, parts_of
from node.optim.settings import OptimSettings
from node.optim.step_limit import StepLimits
from node.pipeline.route import fewest_hops
from node.stage.engines import Engines
from node.stage.state import StageState
from node.stage.state_export import StateExport
from node.wire.tensors import to_host


@dataclass
class RoundFigures:
    """Figures of the attempts at one peer, for its operator. ``done`` and ``failed`` count
    attempts; ``seconds``, ``nbytes`` (tensor bytes sent and received), ``members``,
    ``contributors`` and ``deadline_s`` describe the last attempt."""

    done: int = 0
    failed: int = 0
    seconds: float = 0.0
    deadline_s: float = 0.0
    nbytes: int = 0
    members: int = 0
    contributors: int = 0

    def count(self, outcome: RoundOutcome, deadline_s: float, members: int) -> None:
        """An attempt among ``members`` with this deadline has ended."""
        self.done += not outcome.missing
        self.failed += bool(outcome.missing)
        self.seconds = outcome.seconds
        self.nbytes = outcome.nbytes
        self.deadline_s = deadline_s
        self.members = members
        self.contributors = len(outcome.contributors)


class Rounds:
    """Rounds of one stage at one peer, inner and outer."""

    def __init__(
        self,
        stage: StageState,
        engines: Engines,
        optimizer: OptimSettings,
        me: PeerId,
        parts: Sequence[ParameterPart] | None = None,
    ) -> None:
        """``parts``: the parts of the stage that can be owned; None: each parameter."""
        self.shapes = stage.shapes
        self._parts = tuple(parts_of(self.shapes, optimizer) if parts is None else parts)
        self._method = optimizer.name
        self.operations = {part.name: part.cost for part in self._parts}
        self.stage = stage.stage
        self._engines = engines
        self._me = me
        self.figures = RoundFigures()

    def owners(self, plan: Plan, r: ev.RoundArrived) -> dict[str, PeerId]:
        """The owner that averages and steps each part of this stage in this attempt: the plan's, or
        the one to which the leader has moved the part."""
        return {name: r.owners.get(name, plan.owners[name]) for name in self.shapes}

    def hash_of(self, owners: Mapping[str, PeerId]) -> str:
        """A hash of these owners. It travels with every exchange, so that nobody averages by other
        owners."""
        return ownership_hash(
            [part for part in self._parts if part.name in owners], owners, self._method
        )

    def carried(self, window: int, fragments: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts of this stage that a window carries: all of them, or one fragment in
        its turn."""
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
        """Record the outcome of an attempt, and return the report for the leader."""
        self.figures.count(outcome, r.deadline_s, members)
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
            tuple(sorted(outcome.impossible)),
        )


class InnerRound:
    """The inner rounds of one stage at one peer. ``sequence``: tokens of a sample; ``limits``:
    bounds on a step of the run's optimizer."""

    def __init__(
        self,
        stage: StageState,
        engines: Engines,
        state_export: StateExport,
        rounds: Rounds,
        sequence: int,
        limits: StepLimits,
    ) -> None:
        self._stage = stage
        self._engines = engines
        self._rounds = rounds
        self._state_export = state_export
        self._sequence = sequence
        self._limits = limits
        self._gradients: Mapping[str, Tensor] | None = None
        """Gradients that this peer contributes to every attempt of the plan in force, once they
        were taken."""
        self._tokens = 0
        self._before_s = 0.0

    def begin(self) -> None:
        """Forget the gradients: the next ones are computed for another plan."""
        self._gradients = None
        self._tokens = 0
        self._before_s = self._engines.meter.compute_s

    async def attempt(
        self, plan: Plan, r: ev.RoundArrived, listener: bool
    ) -> tuple[ev.RoundEnded, dict[str, Tensor]]:
        """Make one attempt. Returns its outcome and the fresh parameters that have arrived."""
        if self._gradients is None and not listener:
            await self._take(plan, r)
        owners = self._rounds.owners(plan, r)
        cell = [m for m in plan.stage(self._stage.stage) if m.peer not in r.dead]
        if not listener:
            self._state_export.opens(plan, owners, r.dead)
        gradients = self._gradients
        tokens = self._tokens
        if listener:
            gradients = None
            tokens = 0
        request = RoundRequest(
            round=RoundId(plan.epoch, plan.term, r.attempt),
            plan_hash=plan.hash,
            members=tuple(m.peer for m in cell),
            listeners=frozenset(m.peer for m in cell if not m.current),
            owners=owners,
            ownership_hash=self._rounds.hash_of(owners),
            shapes=self._rounds.shapes,
            down=self._stage.format,
            gradients=gradients,
            tokens=tokens,
            deadline_s=r.deadline_s,
            caps=caps_of(plan, self._stage.stage, self._sequence, r.dropped),
            ready=lambda names: self._state_export.taking.ready(names, r.deadline_s),
            hold=(lambda names: self._hold(plan, names)) if self._may_go_idle() else None,
            # A listener holds other parameters than the step began from.
            check=None if listener else partial(self.objection, plan),
        )
        try:
            outcome = await self._engines.cell.run_round(
                request, lambda mean: self._step(plan.epoch, mean)
            )
        except ValueError as e:
            # The leader's note contradicts its plan: this attempt cannot be run by anybody.
            self._engines.journal.emit(
                "averaging", "round-absurd", str(e), "error", epoch=plan.epoch
            )
            missing = tuple(sorted(self._rounds.shapes))
            return ev.RoundEnded(plan.epoch, plan.term, r.attempt, (), missing, ()), {}
        finally:
            self._state_export.closes()
        return self._rounds.ended(plan, r, outcome, len(cell)), outcome.fresh

    def objection(self, plan: Plan, fresh: Mapping[str, Tensor]) -> str:
        """The reason why no step from the version in place, which the plan starts from, can have
        made these parameters; empty if there is none. May run in any thread."""
        return self._limits.objection(self._stage.parameters(), fresh, plan.epoch)

    async def _take(self, plan: Plan, r: ev.RoundArrived) -> None:
        """Take the gradients of this plan from the pipeline, with the first attempt."""
        e = self._engines
        meter = self._engines.meter
        paths = plan.paths
        await e.pipeline.receipts(plan.epoch, r.dropped)
        self._gradients, self._tokens = await e.pipeline.take_gradients(plan.epoch)
        if paths and self._tokens:
            took = meter.compute_s - self._before_s
            pipeline = e.pipeline
            meter.epoch_done(pipeline.micro_batches, self._tokens, pipeline.computed, took)
        e.journal.emit(
            "training",
            "contributed",
            f"{self._tokens} tokens of epoch {plan.epoch} went through here",
            "debug",
            epoch=plan.epoch,
            hash=plan.hash[:12],
            stage=self._stage.stage,
            tokens=self._tokens,
        )

    def _step(self, epoch: int, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        meter = self._engines.meter
        began = meter.timer()
        fresh = self._engines.owner.step_parts(self._stage.parameters(), mean, epoch)
        stepped = {name: to_host(t) for name, t in fresh.items()}
        took = meter.timer() - began
        operations = sum(self._rounds.operations[name] for name in mean)
        meter.steps.stepped(epoch, operations, took)
        return stepped

    def _may_go_idle(self) -> bool:
        """Return True if this stage may be left without a token that counts: a block stage that
        journeys leave out, and any stage in a run that does not train on all tokens."""
        p = self._engines.pipeline.settings
        if self._engines.pipeline.shape.loss_mask:
            return True
        return self._stage.stage != ENDS and fewest_hops(p.stages, p.may_skip) < p.stages

    def _hold(self, plan: Plan, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Keep parameters and optimizer state as they are, because nobody in the cell has
        gradients."""
        self._engines.owner.hold(names, plan.epoch)
        here = self._stage.parameters()
        return {name: here[name].detach().to("cpu", copy=True) for name in names}


def caps_of(plan: Plan, stage: int, sequence: int, dropped: Collection[int] = ()) -> WeightCaps:
    """Limits on the weights of contributions to ``stage``, with samples of ``sequence`` tokens.
    ``dropped``: micro-batches that do not count. Nobody can honestly have more tokens behind its
    gradients than all micro-batches have, counted or not.

    The limits are the same at every member, because they depend on the plan and the leader's note
    alone. A micro-batch counts for the peers that the plan names, also when a dead hop was
    replaced: :func:`node.averaging.reducers.quarantine.weights` leaves room for that.
    """
    allowed = {m.peer: 0 for m in plan.stage(stage) if m.current}
    total = most = 0
    for path in plan.paths:
        tokens = len(path.samples) * sequence
        most += tokens
        total += tokens * (path.index not in dropped)
        if stage == ENDS:
            peers = {path.origin}
        else:
            peers = {hop.peer for hop in path.hops if hop.stage == stage}
        for peer in peers & allowed.keys():
            allowed[peer] += tokens
    return WeightCaps(most, allowed, total)
