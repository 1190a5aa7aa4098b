"""The losses of the parameters, as the leader's plans carry them. Pure. Enters: training losses of
committed epochs, results of evaluations on the held-out text. Leaves: the losses of the next plan,
facts for the record. Never: a measurement."""

from dataclasses import replace

from node.core.journey import UNKNOWN, Losses, Plan, Version, is_worse
from node.epoch.events import RecordFact
from node.epoch.facts import RunFacts
from node.epoch.leader import reports
from node.epoch.plan_context import PlanContext


class Evaluation:
    """Losses since the plan ``history``, if any."""

    def __init__(self, facts: RunFacts, history: Plan | None) -> None:
        self._facts = facts.evaluation
        self._epochs = facts.epochs
        self.training = 0.0
        """Training loss of the newest epoch, nats per token."""
        self.held_out = 0.0
        """Loss on the held-out text when it was measured last, nats per token."""
        self.reference = UNKNOWN
        """Losses before the first step, as the newest plan has them."""
        self._measured = False
        """True once the held-out loss before the first step was asked for, whatever the result."""
        self._evaluating = 0
        """Epoch of the parameters that are being evaluated on the held-out text."""
        self._told_worse = False
        """True if the journal of this leader, or of the one before, has the warning."""
        if history is not None:
            self.recalled(history)
            self.reference = history.reference
            self._told_worse = self._is_worse(history.epoch, history.loss_val)

    def recalled(self, plan: Plan) -> None:
        """The swarm goes on from the version behind this plan."""
        self.training = plan.loss
        self.held_out = plan.loss_val

    def trained(self, loss: float) -> None:
        """An epoch was committed. ``loss``: its training loss."""
        self.training = loss

    # ----------------------------------------------------------- evaluations

    def is_due_before(self, base: Version) -> bool:
        """Return True if the held-out loss of ``base`` must be measured before the first step is
        planned."""
        f = self._facts
        return not base.epoch and f.reference and bool(f.eval_every) and not self._measured

    def is_due_after(self, made: Version) -> bool:
        """Return True if the held-out loss of a version that was just committed must be
        measured."""
        every = self._facts.eval_every
        return bool(every) and (made.epoch % every == 0 or made.epoch == self._epochs)

    def begin(self, epoch: int) -> None:
        """The parameters at ``epoch`` are being evaluated."""
        self._evaluating = epoch
        if not epoch:
            self._measured = True

    def is_of(self, epoch: int) -> bool:
        """Return True if the parameters at ``epoch`` are being evaluated."""
        return epoch == self._evaluating

    def result(self, loss: float) -> list[RecordFact]:
        """The held-out loss is measured; 0 if it could not be. Returns facts for the record."""
        epoch = self._evaluating
        said: list[RecordFact] = []
        if loss > 0:
            self.held_out = loss
            said.append(reports.evaluated(epoch, loss))
        if not epoch:
            self.reference = Losses(0.0, loss)
        elif self._is_worse(epoch, loss) and not self._told_worse:
            self._told_worse = True
            before = self.reference.held_out
            said.append(reports.worse(epoch, loss, before, self._facts.advice))
        return said

    def _is_worse(self, epoch: int, loss: float) -> bool:
        return is_worse(loss, self.reference, epoch, self._facts.warmup)

    # ----------------------------------------------------------- the reference

    def with_reference(self, base: Version, past: PlanContext) -> PlanContext:
        """Add the losses before the first step to the context, once they are known. The first epoch
        measures the training loss of its initial parameters."""
        if not self._facts.reference:
            return past
        known = past.reference
        if not base.epoch:
            known = Losses(0.0, known.held_out or self.reference.held_out)
        elif base.epoch == 1:
            known = Losses(known.training or self.training, known.held_out)
        self.reference = known
        return replace(past, reference=known)
