"""The leader of the epoch: plan, run, close, round, commit. Pure: events and time in, actions out.

    GATHER  every stage has a live peer that can start from one version  -> plan        -> RUN
    RUN     every micro-batch has an outcome, or the deadline has passed  -> close      -> ROUND
    ROUND   every live member has committed                               -> next version -> GATHER
            a member lacks parts and nobody is still averaging            -> repair      -> ROUND

It is a coordinator, never a data path. Whatever it knows it can learn again from what peers say every second,
so the next leader starts in GATHER with a higher term and loses nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from node.core.ids import ENDS, PeerId, short
from node.core.journey import Member, Path, Plan
from node.scheduler.throughput import quantise
from node.training import events as ev

FORGIVE_AFTER = 8
"""Epochs without a micro-batch after which a replica's measured speed is no longer believed."""


class Phase(Enum):
    """Where the epoch is."""

    GATHER = "gather"
    EVALUATE = "evaluate"
    RUN = "run"
    ROUND = "round"
    FINISHED = "finished"


class SamplerPort(Protocol):
    """The resumable sample order; positions are natural numbers, each handed out once unless given back."""

    def take(self, n: int) -> tuple[int, ...]: ...
    def give_back(self, positions: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class RunFacts:
    """What the manifest fixes, and the pure functions the plan is made of.

    ``assign(stage, ((peer, speed), …), previous owners) -> owners`` places the parts of one stage;
    ``assign_paths(origins, stages, samples) -> paths`` routes the micro-batches;
    ``sampler(cursor)`` gives a sampler at that position; ``cursor(sampler)`` reads it back;
    ``recall(epoch)`` is what a checkpoint of that epoch says of cursor and owners, None without one.
    ``settle_s``: a young swarm waits so long for company; ``late_s``: silence that means death;
    ``patience_s``: wait for a lost version before an older one is taken.
    """

    stages: int
    epochs: int
    target_batch: int
    micro_batch: int
    min_replicas: int
    epoch_timeout_s: float
    round_timeout_s: float
    eval_every: int
    assign: Callable[[int, Sequence[tuple[PeerId, float]], Mapping[str, PeerId] | None], dict[str, PeerId]]
    assign_paths: Callable[..., tuple[Path, ...]]
    sampler: Callable[[tuple[int, tuple[int, ...]]], Any]
    cursor: Callable[[Any], tuple[int, tuple[int, ...]]]
    recall: Callable[[int], tuple[tuple[int, tuple[int, ...]], dict[str, PeerId]] | None] = lambda epoch: None
    settle_s: float = 1.0
    late_s: float = 4.0
    patience_s: float = 10.0


@dataclass
class Candidate:
    """A peer as the leader last heard of it."""

    stage: int
    holds: int
    digest: str
    speed: float
    checkpoints: tuple[int, ...]
    heard: float
    since: float

    def can_start(self, epoch: int) -> bool:
        return self.holds == epoch or epoch in self.checkpoints


@dataclass
class _Epoch:
    """What is known about the epoch under way."""

    plan: Plan
    started: float
    deadline: float
    closed: float = 0.0
    results: dict[int, ev.Result] = field(default_factory=dict)
    dead: set[PeerId] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)
    outcomes: dict[PeerId, ev.Committed | ev.Incomplete] = field(default_factory=dict)
    owners: dict[str, PeerId] = field(default_factory=dict)
    repaired: int = 0


class Leader:
    """The machine. ``history`` is the newest plan this peer took part in, if any: it carries cursor and owners over."""

    def __init__(
        self,
        me: PeerId,
        facts: RunFacts,
        *,
        term: int = 0,
        history: Plan | None = None,
        dropped: Sequence[int] = (),
        cursor: tuple[int, tuple[int, ...]] | None = None,
    ) -> None:
        self.me, self.facts, self.term = me, facts, term
        self.phase = Phase.GATHER
        self.base: int | None = None
        self.candidates: dict[PeerId, Candidate] = {}
        self.waiting_for = "peers"
        self.loss = history.loss if history else 0.0
        self.loss_val = history.loss_val if history else 0.0
        self.tokens = history.tokens if history else 0
        self.repaired = self.failed_rounds = self.mismatches = 0
        self._epoch: _Epoch | None = None
        self._owners: dict[str, PeerId] = dict(history.owners) if history else {}
        self._history = history
        self._cursor = cursor if cursor is not None else self._cursor_after(history, dropped)
        self._agreed: dict[int, str] = {}
        self._speeds: dict[PeerId, float] = {}
        self._idle: dict[PeerId, int] = {}
        self._evaluated = -1
        self._changed: float | None = None
        self._stuck_since: float | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan in force, if an epoch is under way."""
        return self._epoch.plan if self._epoch else None

    def handle(self, event: Any, now: float) -> list[Any]:
        """One event in, actions out. Unknown or stale events change nothing."""
        if self.phase is Phase.FINISHED and not isinstance(event, ev.Heard):
            return []
        match event:
            case ev.Heard():
                return self._heard(event, now)
            case ev.Left(peer):
                return self._gone(peer, now, "left")
            case ev.Unreachable(peer):
                return self._gone(peer, now, "does not answer")
            case ev.Accused(about, by, _):
                alive = about in self.candidates and about != self.me and by in self.candidates
                return [ev.Probe(about)] if alive else []
            case ev.Finished():
                return self._finished(event, now)
            case ev.Committed() | ev.Incomplete():
                return self._outcome(event, now)
            case ev.Evaluated(epoch, loss):
                return self._was_evaluated(epoch, loss, now)
            case ev.Tick():
                return self._tick(now)
        return []

    # ------------------------------------------------------------ who is there

    def _heard(self, e: ev.Heard, now: float) -> list[Any]:
        old = self.candidates.get(e.peer)
        self.term = max(self.term, e.term)
        fresh = old is None or old.stage != e.stage
        self.candidates[e.peer] = Candidate(
            e.stage, e.holds, e.digest, e.speed, e.checkpoints, now, now if old is None or fresh else old.since
        )
        if fresh:
            self._changed = now
        if self.phase is Phase.FINISHED and self._history is not None and self._history.member(e.peer) is None:
            # Somebody came for the end: the last plan again, with it in, so that it serves too.
            return self._plan(self._history.epoch, now) if e.holds == self._history.epoch else []
        return self._try_plan(now) if self.phase is Phase.GATHER else []

    def _gone(self, peer: PeerId, now: float, why: str) -> list[Any]:
        if peer == self.me or self.candidates.pop(peer, None) is None:
            return []
        self._changed = now
        done: list[Any] = [ev.Report("peer-lost", f"peer {short(peer)} {why}", "warning", {"peer": peer})]
        epoch = self._epoch
        if epoch is None or epoch.plan.member(peer) is None or peer in epoch.dead:
            return done
        epoch.dead.add(peer)
        if self.phase is Phase.RUN:
            lost = [p.index for p in epoch.plan.paths if p.origin == peer and p.index not in epoch.results]
            for index in lost:
                epoch.results[index] = ev.Result(index, False, 0.0, 0)
            return done + self._close_if_done(now)
        if self.phase is Phase.ROUND:
            epoch.outcomes.pop(peer, None)
            member = epoch.plan.member(peer)
            return done + self._settle_cell(member.stage if member else ENDS, now)
        return done

    def _tick(self, now: float) -> list[Any]:
        done: list[Any] = []
        for peer, c in list(self.candidates.items()):
            if peer != self.me and now - c.heard > self.facts.late_s:
                done += self._gone(peer, now, f"was last heard {now - c.heard:.1f} s ago")
        epoch = self._epoch
        if self.phase is Phase.GATHER:
            done += self._try_plan(now)
        elif epoch is not None and now >= epoch.deadline:
            if self.phase is Phase.RUN:
                for path in epoch.plan.paths:
                    epoch.results.setdefault(path.index, ev.Result(path.index, False, 0.0, 0))
                done += self._close_if_done(now)
            elif self.phase is Phase.ROUND:
                late = [m.peer for m in self._alive(epoch) if m.peer not in epoch.outcomes and m.peer != self.me]
                for peer in late:
                    done += self._gone(peer, now, "did not finish the round in time")
                if self.phase is Phase.ROUND and not late:
                    done += self._abandon(now, "this peer did not finish its own round")
            elif self.phase is Phase.EVALUATE:
                done += self._was_evaluated(epoch.plan.epoch, 0.0, now)
        return done

    # ------------------------------------------------------------ plan

    def _try_plan(self, now: float) -> list[Any]:
        facts = self.facts
        need = facts.min_replicas if self.base is None else 1
        cells = {s: [p for p, c in self.candidates.items() if c.stage == s] for s in range(facts.stages + 1)}
        thin = [s for s, peers in cells.items() if len(peers) < (need if s != ENDS else 1)]
        if thin:
            self.waiting_for = "a peer for " + ", ".join("the ends" if s == ENDS else f"stage {s}" for s in thin)
            return []
        # A young swarm waits a moment, so that peers that start together are in the first plan together.
        if self.base is None and self._changed is not None and now - self._changed < facts.settle_s:
            self.waiting_for = "more peers"
            return []
        base = self._choose_base(cells, now)
        if base is None:
            return []
        self.waiting_for, self._stuck_since = "", None
        return self._plan(base, now)

    def _choose_base(self, cells: Mapping[int, Sequence[PeerId]], now: float) -> int | None:
        """The version to start from: the one just committed; else the newest every stage can start from."""

        def startable(epoch: int) -> bool:
            return all(any(self._can_start(self.candidates[p], epoch) for p in peers) for peers in cells.values())

        if self.base is not None and startable(self.base):
            return self.base
        if self._stuck_since is None:
            self._stuck_since = now
        # Going back costs epochs, so a swarm that has lost a whole stage first gives it a chance to return.
        if self.base is not None and now - self._stuck_since < self.facts.patience_s:
            self.waiting_for = f"a peer that holds epoch {self.base}"
            return None
        known = {c.holds for c in self.candidates.values()} | {k for c in self.candidates.values() for k in c.checkpoints}
        feasible = sorted((e for e in known if startable(e)), reverse=True)
        if not feasible:
            self.waiting_for = "stages that hold one version in common"
            return None
        return feasible[0]

    def _speed(self, peer: PeerId, measured: float) -> float:
        # Who gets nothing is not measured either: now and then its speed counts as unknown, and it is tried again.
        if self._idle.get(peer, 0) >= FORGIVE_AFTER:
            return 0.0
        self._speeds[peer] = quantise(measured, self._speeds.get(peer, 0.0), per_octave=2)
        return self._speeds[peer]

    def _can_start(self, c: Candidate, epoch: int) -> bool:
        """Holds the version, and, where the cell has agreed on its digest, the very same one."""
        if c.holds == epoch and epoch == self.base and self._agreed.get(c.stage, c.digest) != c.digest:
            return False
        return c.can_start(epoch)

    def _plan(self, base: int, now: float) -> list[Any]:
        facts = self.facts
        self._agree(base)
        if self._history is None or base not in (self._history.epoch, self._history.epoch + 1):
            self._cursor, self._owners = facts.recall(base) or ((base * facts.target_batch, ()), {})
        members = tuple(
            Member(p, c.stage, self._speed(p, c.speed), self._can_start(c, base))
            for p, c in sorted(self.candidates.items())
            if c.stage <= facts.stages
        )
        self.term += 1
        finished = base >= facts.epochs
        sampler = facts.sampler(self._cursor)
        cursor = facts.cursor(sampler)
        paths: tuple[Path, ...] = ()
        if not finished:
            count = facts.target_batch // facts.micro_batch
            samples = [tuple(sampler.take(facts.micro_batch)) for _ in range(count)]
            by_stage = {s: [(m.peer, m.speed) for m in members if m.stage == s and m.current] for s in range(facts.stages + 1)}
            paths = facts.assign_paths(by_stage[ENDS], {s: by_stage[s] for s in range(1, facts.stages + 1)}, samples)
        owners: dict[str, PeerId] = {}
        for stage in range(facts.stages + 1):
            cell = [(m.peer, m.speed) for m in members if m.stage == stage and m.current]
            owners.update(facts.assign(stage, cell, self._owners or None))
        here = {m.peer for m in members}
        moved = {p: old for p, new in owners.items() if (old := self._owners.get(p, new)) != new and old in here}
        plan = Plan(
            base, self.term, self.me, members, paths, owners, moved, dict(self._agreed), facts.epoch_timeout_s,
            cursor, self.loss, self.loss_val, self.tokens,
        )  # fmt: skip
        self._owners, self._history = owners, plan
        working = {h.peer for p in paths for h in p.journey}
        self._idle = {m.peer: 0 if m.peer in working else self._idle.get(m.peer, 0) + 1 for m in members if m.current}
        if finished:
            self.phase, self._epoch = Phase.FINISHED, None
            return [ev.SendPlan(plan), ev.Report("run-finished", f"all {facts.epochs} epochs are committed")]
        self.phase = Phase.RUN
        self._epoch = _Epoch(plan, now, now + facts.epoch_timeout_s)
        listeners = sum(not m.current for m in members)
        return [
            ev.SendPlan(plan),
            ev.Report(
                "epoch-planned",
                f"epoch {base}: {len(paths)} micro-batches over {len(members) - listeners} peers"
                + (f", {listeners} catching up" if listeners else ""),
                "debug",
                {"epoch": base, "term": self.term, "hash": plan.hash[:12], "members": len(members), "listeners": listeners},
            ),
        ]

    def _agree(self, base: int) -> None:
        """What the digest of every stage is at ``base``: what was committed, else what most of its peers say."""
        for stage in range(self.facts.stages + 1):
            said = {p: c.digest for p, c in self.candidates.items() if c.stage == stage and c.holds == base and c.digest}
            if base != self.base or stage not in self._agreed:
                self._agreed.pop(stage, None)
                if said:
                    self._agreed[stage] = _majority(said)
        self.base = base

    # ------------------------------------------------------------ run and close

    def _finished(self, e: ev.Finished, now: float) -> list[Any]:
        epoch = self._epoch
        if self.phase is not Phase.RUN or epoch is None or e.plan_hash != epoch.plan.hash:
            return []
        mine = {p.index for p in epoch.plan.paths if p.origin == e.peer}
        for result in e.results:
            # The first word counts: a micro-batch contributes at most once.
            if result.index in mine and result.index not in epoch.results:
                epoch.results[result.index] = result
        return self._close_if_done(now)

    def _close_if_done(self, now: float) -> list[Any]:
        epoch = self._epoch
        if epoch is None or self.phase is not Phase.RUN or len(epoch.results) < len(epoch.plan.paths):
            return []
        if not any(r.counted for r in epoch.results.values()):
            return self._abandon(now, "no micro-batch was finished")
        self.phase, epoch.closed = Phase.ROUND, now
        epoch.deadline = now + self.facts.round_timeout_s * 1.5
        dropped = self._dropped(epoch)
        done: list[Any] = []
        for stage in range(self.facts.stages + 1):
            cell = [m for m in self._alive(epoch) if m.stage == stage]
            owners = self._reown(epoch, stage, {})
            if owners is None:
                return done + self._abandon(now, f"stage {stage} has lost every peer that holds epoch {epoch.plan.epoch}")
            epoch.attempts[stage] = 0
            done.append(
                ev.SendRound(
                    tuple(m.peer for m in cell),
                    epoch.plan,
                    0,
                    tuple(sorted(epoch.dead)),
                    owners,
                    (),
                    dropped,
                    self.facts.round_timeout_s,
                )  # fmt: skip
            )
        return done

    def _reown(self, epoch: _Epoch, stage: int, holders: Mapping[str, PeerId]) -> dict[str, PeerId] | None:
        """Owners that differ from the plan's: a dead owner's parts go to whoever holds them fresh, else are repaired."""
        current = {p: o for p, o in {**epoch.plan.owners, **epoch.owners}.items() if p in self._parts(epoch, stage)}
        cell = [(m.peer, m.speed) for m in self._alive(epoch) if m.stage == stage and m.current]
        if not cell:
            return None
        orphans = {p for p, o in current.items() if o in epoch.dead}
        if orphans:
            repaired = self.facts.assign(stage, cell, {p: o for p, o in current.items() if p not in orphans})
            for part in orphans:
                epoch.owners[part] = holders.get(part, repaired[part])
        return {p: o for p, o in epoch.owners.items() if p in current}

    def _parts(self, epoch: _Epoch, stage: int) -> set[str]:
        peers = {m.peer for m in epoch.plan.members if m.stage == stage}
        return {p for p, o in epoch.plan.owners.items() if o in peers}

    def _dropped(self, epoch: _Epoch) -> tuple[int, ...]:
        return tuple(sorted(i for i, r in epoch.results.items() if not r.counted))

    def _alive(self, epoch: _Epoch) -> list[Member]:
        return [m for m in epoch.plan.members if m.peer not in epoch.dead]

    # ------------------------------------------------------------ round and commit

    def _outcome(self, e: ev.Committed | ev.Incomplete, now: float) -> list[Any]:
        epoch = self._epoch
        if self.phase is not Phase.ROUND or epoch is None or e.plan_hash != epoch.plan.hash:
            return []
        member = epoch.plan.member(e.peer)
        if member is None or e.peer in epoch.dead:
            return []
        if isinstance(e, ev.Incomplete) and (
            e.attempt != epoch.attempts[member.stage] or isinstance(epoch.outcomes.get(e.peer), ev.Committed)
        ):
            return []
        epoch.outcomes[e.peer] = e
        if isinstance(e, ev.Committed) and (c := self.candidates.get(e.peer)):
            c.holds, c.digest, c.speed = epoch.plan.epoch + 1, e.digest, e.speed or c.speed
        done: list[Any] = []
        if isinstance(e, ev.Incomplete):
            # The accused are probed now, so that the repair does not hand them the same parts again.
            done = [ev.Probe(p) for p in e.failed if p in self.candidates and p != self.me]
        return done + self._settle_cell(member.stage, now)

    def _settle_cell(self, stage: int, now: float) -> list[Any]:
        epoch = self._epoch
        if epoch is None or self.phase is not Phase.ROUND:
            return []
        cell = [m.peer for m in self._alive(epoch) if m.stage == stage]
        if not any(m.stage == stage and m.current for m in self._alive(epoch)) and not any(
            isinstance(epoch.outcomes.get(p), ev.Committed) for p in cell
        ):
            return self._abandon(now, f"stage {stage} has lost every peer that holds epoch {epoch.plan.epoch}")
        if any(p not in epoch.outcomes for p in cell):
            return []
        unfinished = [p for p in cell if isinstance(epoch.outcomes[p], ev.Incomplete)]
        if unfinished:
            return self._repair(epoch, stage, unfinished, now)
        return self._commit(now) if all(m.peer in epoch.outcomes for m in self._alive(epoch)) else []

    def _repair(self, epoch: _Epoch, stage: int, unfinished: list[PeerId], now: float) -> list[Any]:
        """Nobody in the cell is averaging any more and some lack parts: copy from who has all, else re-own the dead's."""
        cell = [m.peer for m in self._alive(epoch) if m.stage == stage]
        complete = tuple(p for p in cell if isinstance(epoch.outcomes[p], ev.Committed))
        epoch.attempts[stage] += 1
        if epoch.attempts[stage] > 2 * len(cell) + 2:
            return self._abandon(now, f"stage {stage} could not finish its round in {epoch.attempts[stage]} attempts")
        holders: dict[str, PeerId] = {}
        for peer in unfinished:
            outcome = epoch.outcomes.pop(peer)
            if isinstance(outcome, ev.Incomplete):
                holders.update({part: peer for part in outcome.holds if part not in holders})
        owners = {} if complete else self._reown(epoch, stage, holders)
        if owners is None:
            return self._abandon(now, f"stage {stage} has lost every peer that holds epoch {epoch.plan.epoch}")
        epoch.deadline = now + self.facts.round_timeout_s * 1.5
        epoch.repaired += 1
        self.repaired += 1
        return [
            ev.SendRound(
                tuple(unfinished), epoch.plan, epoch.attempts[stage], tuple(sorted(epoch.dead)), owners, complete,
                self._dropped(epoch), self.facts.round_timeout_s,
            ),
            ev.Report("round-repaired", f"stage {stage} averages again without the dead", "warning",
                      {"stage": stage, "attempt": epoch.attempts[stage], "dead": len(epoch.dead)}),
        ]  # fmt: skip

    def _commit(self, now: float) -> list[Any]:
        epoch = self._epoch
        if epoch is None:
            return []
        done = self._check_digests(epoch)
        counted = [r for r in epoch.results.values() if r.counted]
        tokens = sum(r.tokens for r in counted)
        self.loss = sum(r.loss_sum for r in counted) / max(1, tokens)
        self.tokens += tokens
        self.base = epoch.plan.epoch + 1
        self._cursor = self._cursor_after(epoch.plan, self._dropped(epoch))
        self._owners.update(epoch.owners)
        done.append(
            ev.Report(
                "epoch-committed",
                f"epoch {self.base}/{self.facts.epochs} committed, loss {self.loss:.3f}",
                facts={
                    "epoch": self.base,
                    "loss": self.loss,
                    "tokens": tokens,
                    "seconds": now - epoch.started,
                    "run_s": epoch.closed - epoch.started,
                    "dropped": len(self._dropped(epoch)),
                    "repaired": epoch.repaired,
                    "dead": len(epoch.dead),
                },
            )  # fmt: skip
        )
        every = self.facts.eval_every
        if every and (self.base % every == 0 or self.base == self.facts.epochs) and self._evaluated != self.base:
            self.phase = Phase.EVALUATE
            epoch.deadline = now + self.facts.epoch_timeout_s
            return [*done, ev.Evaluate(self.base, epoch.plan)]
        self.phase, self._epoch = Phase.GATHER, None
        return done + self._try_plan(now)

    def _check_digests(self, epoch: _Epoch) -> list[Any]:
        """Equal digests inside a cell are an invariant; who differs from the majority has to catch up."""
        done: list[Any] = []
        self._agreed = {}
        for stage in range(self.facts.stages + 1):
            said = {
                p: o.digest
                for p, o in epoch.outcomes.items()
                if isinstance(o, ev.Committed) and (m := epoch.plan.member(p)) and m.stage == stage
            }
            best = self._agreed[stage] = _majority(said)
            for peer in sorted(p for p, digest in said.items() if digest != best):
                self.mismatches += 1
                done.append(
                    ev.Report(
                        "digest-mismatch",
                        f"peer {short(peer)} differs from its cell and catches up",
                        "error",
                        {"peer": peer, "stage": stage},
                    )  # fmt: skip
                )
        return done

    def _was_evaluated(self, epoch: int, loss: float, now: float) -> list[Any]:
        if self.phase is not Phase.EVALUATE or epoch != self.base:
            return []
        self._evaluated = epoch
        done: list[Any] = []
        if loss > 0:
            self.loss_val = loss
            done = [
                ev.Report("evaluated", f"held-out loss {loss:.3f} at epoch {epoch}", facts={"epoch": epoch, "loss_val": loss})
            ]
        self.phase, self._epoch = Phase.GATHER, None
        return done + self._try_plan(now)

    def _abandon(self, now: float, why: str) -> list[Any]:
        """Give this attempt up: nothing of it counts, all its samples go back, the version stays."""
        epoch = self._epoch
        self.failed_rounds += 1
        self.phase, self._epoch, self._changed = Phase.GATHER, None, now
        if epoch is not None:
            self._cursor = epoch.plan.cursor
        return [ev.Report("epoch-abandoned", f"epoch {epoch.plan.epoch if epoch else '?'} starts again: {why}", "warning")]

    def _cursor_after(self, plan: Plan | None, dropped: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        if plan is None:
            return (0, ())
        sampler = self.facts.sampler(plan.cursor)
        for _ in plan.paths:
            sampler.take(self.facts.micro_batch)
        lost = set(dropped)
        sampler.give_back([s for p in plan.paths if p.index in lost for s in p.samples])
        return self.facts.cursor(sampler)


def _majority(said: Mapping[PeerId, str]) -> str:
    """The digest most peers report; a tie goes to the one the smallest PeerId reports, for every leader alike."""
    count = Counter(said.values())
    return max(((count[said[p]], -i, said[p]) for i, p in enumerate(sorted(said))), key=lambda t: t[:2])[2]
