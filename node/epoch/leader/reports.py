"""The leader's facts for the record, a function for each sentence. Pure. Readers of event files
search for the kinds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from node.consensus.rules import Rules
from node.core.errors import OutOfResources
from node.core.ids import PeerId, short, short_cell, stage_name
from node.core.journey import Electorate, Plan, Version
from node.core.samples import rows as cursor_rows
from node.epoch.events import RecordFact
from node.epoch.leader.attempt import EpochAttempt
from node.scheduler.placement import Move

# ----------------------------------------------------------- members


def peer_left(peer: PeerId) -> RecordFact:
    """A peer left, as it had announced."""
    return RecordFact("peer-left", f"peer {short(peer)} has left", facts={"peer": peer})


def peer_lost(peer: PeerId, why: str) -> RecordFact:
    """A peer is taken for dead."""
    return RecordFact("peer-lost", f"peer {short(peer)} {why}", "warning", {"peer": peer})


def on_probation(peer: PeerId, why: str, seconds: float) -> RecordFact:
    """A peer is put on probation for ``seconds``."""
    return RecordFact(
        "peer-on-probation",
        f"peer {short(peer)} {why}: it gets no work for {seconds:.0f} s",
        "warning",
        {"peer": peer, "seconds": round(seconds, 1)},
    )


def lied(peer: PeerId, why: str, seconds: float) -> RecordFact:
    """A peer is put on probation for its tensors."""
    return replace(on_probation(peer, f"{why}, in several epochs", seconds), kind="false-tensors")


def excused(peer: PeerId) -> RecordFact:
    """A peer's probation ends: it has shown that it was only slow."""
    text = f"peer {short(peer)} was only slow: its probation is over"
    return RecordFact("peer-excused", text, facts={"peer": peer})


def move_asked(m: Move) -> RecordFact:
    """A peer is asked to change its stage."""
    return RecordFact(
        "move-asked",
        f"peer {short(m.peer)} should change from {stage_name(m.source)} to "
        f"{stage_name(m.target)}: the swarm becomes {m.gain:.2f} times as fast",
        facts={"peer": m.peer, "source": m.source, "target": m.target, "gain": m.gain},
    )


def help_asked(m: Move) -> RecordFact:
    """A peer is asked to help a stage that has too few to plan an epoch."""
    return RecordFact(
        "move-asked",
        f"stage {m.target} lacks peers: {short(m.peer)} of stage {m.source} should change to it",
        facts={"peer": m.peer, "source": m.source, "target": m.target},
    )


def out_of_room(why: OutOfResources) -> RecordFact:
    """The members' memory does not hold the optimizer's state."""
    return RecordFact(
        "out-of-memory", f"the members cannot own every parameter: {why}; {why.next_step}", "error"
    )


# ----------------------------------------------------------- where to start from


def agreement_lost(stages: Sequence[int]) -> RecordFact:
    """Nobody who would take part holds the parameters that these stages had agreed on."""
    return RecordFact(
        "agreement-lost",
        "nobody has the parameters that were agreed on at "
        f"{', '.join(map(stage_name, stages))}: goes on with what the peers there hold",
        "warning",
        {"stages": list(stages)},
    )


def undone_counted() -> RecordFact:
    """Replicas did not agree on a version, and nobody has the one before."""
    return RecordFact(
        "undone-counted",
        "nobody can go back to the epoch that all agreed on: goes on with one replica's result",
        "warning",
    )


def history_lost(version: Version) -> RecordFact:
    """Nobody knows the context of a version."""
    return RecordFact(
        "history-lost",
        f"nobody remembers the plan behind epoch {version.epoch}: the order of samples is guessed",
        "warning",
        {"epoch": version.epoch},
    )


def version_unproven(version: Version, holders: Sequence[PeerId]) -> RecordFact:
    """Peers claim a version that the leader has not made, and no certificate shows that it
    counts."""
    who = ", ".join(map(short, holders[:3]))
    if len(holders) > 3:
        who += " and others"
    return RecordFact(
        "version-unproven",
        f"epoch {version.epoch}, held by {who}, is ignored: too few voters can have committed it, "
        "and no peer showed a certificate",
        "warning",
        {"epoch": version.epoch, "lineage": version.lineage, "peers": list(holders[:16])},
    )


def history_changed(base: Version, was: Version, tokens: int, here: int) -> RecordFact:
    """The swarm goes on from another history, one with more counted tokens."""
    return RecordFact(
        "history-changed",
        f"goes on from epoch {base.epoch} of a history with {tokens} tokens, more than the "
        f"{here} here",
        "warning",
        {"epoch": base.epoch, "from": was.epoch, "tokens": tokens},
    )


def went_back(base: Version, was: Version) -> RecordFact:
    """The swarm goes on from an older version."""
    return RecordFact(
        "went-back",
        f"goes back from epoch {was.epoch} to {base.epoch}, which every stage still has",
        "warning",
        {"epoch": base.epoch, "from": was.epoch},
    )


def stage_left_out(stage: int, base: Version) -> RecordFact:
    """Paths begin to go around a stage."""
    return RecordFact(
        "stage-left-out",
        f"nobody holds stage {stage}: epoch {base.epoch} goes on without it",
        "warning",
        {"stage": stage, "epoch": base.epoch},
    )


def stage_back(stage: int, base: Version, held: Version) -> RecordFact:
    """Paths lead through a stage again; its parameters are of version ``held``."""
    return RecordFact(
        "stage-back",
        f"stage {stage} is there again from epoch {base.epoch} on, with the parameters of epoch "
        f"{held.epoch}",
        facts={"stage": stage, "epoch": base.epoch, "held": held.epoch},
    )


# ----------------------------------------------------------- the epoch


def cell_divided(founded: Plan) -> RecordFact:
    """Some peers of the cell become a cell of their own."""
    return RecordFact(
        "cell-divided",
        f"cell {short_cell(founded.parent)} divides at epoch {founded.epoch}: "
        f"{len(founded.members)} of its peers become cell {short_cell(founded.cell_id)}",
        facts={"cell": founded.cell_id, "peers": len(founded.members), "epoch": founded.epoch},
    )


def averaging_changed(rules: Rules, base: Version) -> RecordFact:
    """The owner's change comes into force."""
    o = rules.outer
    cell = rules.cell or "all replicas"
    every = f", {o.says}" if o.windows else ""
    return RecordFact(
        "averaging-changed",
        f"change {rules.revision} of the owner comes into force at epoch {base.epoch}: cells of "
        f"{cell}{every}",
        facts={"epoch": base.epoch, "revision": rules.revision},
    )


def epoch_planned(plan: Plan, left_out: Sequence[int], paths: Mapping[str, Any]) -> RecordFact:
    """An epoch is planned. ``paths``: the router's facts about them."""
    listeners = sum(not m.current for m in plan.members)
    does = f"{len(plan.paths)} micro-batches over {len(plan.members) - listeners} peers"
    if plan.outer:
        does = f"puts in place {_means_of(plan)}"
    text = f"epoch {plan.epoch}: {does}"
    if listeners:
        text += f", {listeners} catching up"
    facts: dict[str, object] = {
        "epoch": plan.epoch,
        "lineage": plan.lineage,
        "term": plan.term,
        "hash": plan.hash[:12],
        "members": len(plan.members),
        "listeners": listeners,
        "cursor": sum(c.taken for c in plan.cursor),
        "returned": sum(len(c.returned) for c in plan.cursor),
        "positions": cursor_rows(plan.cursor),
        "tokens": plan.tokens,
        "micro_batches": len(plan.paths),
        "peers": [m.peer for m in plan.members],
        **paths,
    }
    if left_out:
        facts["left_out"] = list(left_out)
    if plan.outer:
        facts["outer"] = plan.outer
    return RecordFact("epoch-planned", text, "debug", facts)


def epoch_taken_over(a: EpochAttempt) -> RecordFact:
    """This leader goes on with the epoch of another one."""
    plan = a.plan
    given_back = len(a.results.dropped)
    text = (
        f"epoch {plan.epoch} goes on under this leader; {given_back} of {len(plan.paths)} "
        "micro-batches are given back"
    )
    facts: dict[str, object] = {
        "epoch": plan.epoch,
        "term": plan.term,
        "hash": plan.hash[:12],
        "dead": sorted(a.dead),
        "dropped": given_back,
    }
    return RecordFact("epoch-taken-over", text, facts=facts)


def round_repaired(stage: int, attempt: int, dead: int) -> RecordFact:
    """A round is tried again; ``dead``: members of the epoch that have died so far."""
    return RecordFact(
        "round-repaired",
        f"stage {stage} repeats its round (repair {attempt}, members dead so far: {dead})",
        "warning",
        {"stage": stage, "attempt": attempt, "dead": dead},
    )


def epoch_committed(
    a: EpochAttempt, base: Version, epochs: int, loss: float, now: float
) -> RecordFact:
    """The attempt has made ``base``. ``epochs``: number of epochs of the run."""
    came = f"loss {loss:.3f}"
    if a.plan.outer:
        came = f"{_means_of(a.plan)} are in place"
    facts: dict[str, object] = {
        "epoch": base.epoch,
        "lineage": base.lineage,
        "term": a.plan.term,
        "hash": a.plan.hash[:12],
        "loss": loss,
        "tokens": a.results.tokens,
        "counted": len(a.results.counted),
        "seconds": now - a.timing.started,
        "run_s": a.timing.closed - a.timing.started,
        "within_s": [round(a.plan.deadline_s, 3), round(a.timing.round_s, 3)],
        "predicted_s": round(sum(a.plan.forecast), 4),
        "dropped": len(a.results.dropped),
        "repaired": sum(a.attempts.values()),
        "dead": len(a.dead),
    }
    if a.plan.electorate.orphan:
        facts["orphan"] = True
    if a.plan.cell_id:
        facts |= {"cell": a.plan.cell_id, "outer": a.plan.outer}
    text = f"epoch {base.epoch}/{epochs} committed, {came}"
    return RecordFact("epoch-committed", text, facts=facts)


def _means_of(plan: Plan) -> str:
    """The means that an outer round puts in place, in words."""
    partners = ", ".join(short_cell(p.cell) for p in plan.window.partners)
    stages = len({m.stage for m in plan.members})
    text = f"the means with cell {partners}"
    if len(plan.window.means) < stages:
        text += f" at {len(plan.window.means)} of {stages} stages"
    return text


def stage_fell_back(held: Mapping[int, Version]) -> RecordFact:
    """Stages go on from an older version. ``held``: that version by stage, because no newer one is
    left."""
    what = ", ".join(f"stage {s} from epoch {v.epoch}" for s, v in held.items())
    return RecordFact(
        "stage-fell-back",
        f"the newest parameters of some stages are lost: goes on with {what}; what was learned "
        "there since is lost",
        "error",
        {"stages": {str(s): v.epoch for s, v in held.items()}},
    )


def epoch_uncertain(a: EpochAttempt) -> RecordFact:
    """The remaining members have committed, and they are too few to decide that the version
    counts."""
    e = a.plan.electorate
    by = a.committed
    count = sum(p in by for p in e.voters)
    return RecordFact(
        "epoch-uncertain",
        f"epoch {a.plan.epoch + 1} is computed but not committed: {count} of {len(e.voters)} "
        "voters hold it, which is too few",
        "warning",
        {
            "epoch": a.plan.epoch + 1,
            "voters": len(e.voters),
            "voted": count,
            "hash": a.plan.hash[:12],
        },
    )


def orphaned(e: Electorate) -> RecordFact:
    """Too few voters have come back: the peers that are here go on alone."""
    return RecordFact(
        "orphaned",
        f"goes on without a majority of the {len(e.elders)} voters: if these have gone on too, "
        "what is learned here is discarded when the two sides meet",
        "warning",
        {"voters": len(e.voters), "elders": len(e.elders)},
    )


def epoch_abandoned(a: EpochAttempt, why: str) -> RecordFact:
    """An attempt is given up: nothing of it counts."""
    return RecordFact(
        "epoch-abandoned",
        f"epoch {a.plan.epoch} starts again: {why}",
        "warning",
        {
            "epoch": a.plan.epoch,
            "hash": a.plan.hash[:12],
            "micro_batches": len(a.plan.paths),
        },
    )


def epoch_outgrown(a: EpochAttempt, waiting: int) -> RecordFact:
    """An attempt is given up: with the peers that wait, a new one ends sooner than its rest."""
    return RecordFact(
        "epoch-outgrown",
        f"epoch {a.plan.epoch} starts again with the {waiting} peers that wait for the next one: "
        f"that ends sooner than the rest of it with {len(a.alive)}",
        facts={
            "epoch": a.plan.epoch,
            "hash": a.plan.hash[:12],
            "members": len(a.alive),
            "waiting": waiting,
        },
    )


def digest_mismatch(peer: PeerId, stage: int) -> RecordFact:
    """A member has another digest than its stage; equal digests inside a cell are an invariant."""
    return RecordFact(
        "digest-mismatch",
        f"peer {short(peer)} differs from its cell and catches up",
        "error",
        {"peer": peer, "stage": stage},
    )


def disputed(stages: Sequence[int]) -> str:
    """Members of a cell hold different parameters, and no majority has the same."""
    where = ", ".join(f"stage {s}" for s in stages)
    return f"replicas of {where} computed different parameters, and no majority agrees"


def digests_disputed(stages: Sequence[int], again: bool) -> RecordFact:
    """Nobody knows the right side of a mismatch. ``again``: the epoch is repeated; else repetition
    did not help."""
    kind = "digest-mismatch"
    text = disputed(stages)
    if not again:
        kind = "digests-disputed"
        text += ", after repeats too: goes on with those of one replica"
    return RecordFact(kind, text, "error", {"stages": list(stages)})


def evaluated(epoch: int, loss: float) -> RecordFact:
    """The held-out loss was measured. ``loss``: nats per token on the held-out text."""
    return RecordFact(
        "evaluated",
        f"held-out loss {loss:.3f} at epoch {epoch}",
        facts={"epoch": epoch, "loss_val": loss},
    )


def worse(epoch: int, loss: float, before: float, advice: str) -> RecordFact:
    """The held-out loss is higher than ``before``, the loss of the model before training."""
    return RecordFact(
        "worse-than-before",
        f"the held-out loss {loss:.3f} at epoch {epoch} is above {before:.3f}, that before "
        f"training: {advice}",
        "warning",
        {"epoch": epoch, "loss_val": loss, "loss_val_before": before},
    )


def run_finished(epochs: int) -> RecordFact:
    """The last version of the run is committed."""
    return RecordFact("run-finished", f"all {epochs} epochs are committed")
