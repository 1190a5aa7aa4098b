"""The books of a swarm, kept from what its daemons told: epochs and samples lost or counted twice,
detection, recovery.

Pure: events in, numbers out. Definitions:

* An *attempt* is one plan, also where another leader than its own commits it. The history that
  holds is the newest commit and, from each plan backwards, the version it started from. ``again``:
  attempts that were committed and do not belong to it. ``abandoned``: attempts that were begun
  before the one of the same epoch that holds, and never committed. A plan that nobody followed
  costs nothing, and one that its leader began anew with peers that waited ends sooner for it.
* ``unaccounted`` at a plan is *next position - positions handed back - samples counted* in the
  history it starts from. It stays what it was while every sample is counted once or handed back;
  more means lost, less means handed out twice.
* A stage counted samples twice when the gradients its living members took into a round stand for
  more tokens than the leader counted.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from testbed.daemons.told import Told

NAMING = {"peer-lost", "peer-left", "leader-silent", "member-failed", "hop-turned", "note-refused"}
"""Kinds of events that say of a peer that it does not do its part."""
LEADING = "leading"
"""Said by who takes the place of a leader."""
PLANNED = "epoch-planned"
TAKEN_OVER = "epoch-taken-over"
OUTGROWN = "epoch-outgrown"
"""Said by a leader that begins its epoch anew, for peers that wait."""
COMMITTED = "epoch-committed"
CONTRIBUTED = "contributed"


def commits(told: Iterable[Told]) -> list[Told]:
    """One commit of each epoch, in order: a leader that was replaced may have told of one too."""
    found = {e.get("epoch"): e for e in told if e.kind == COMMITTED}
    return [found[n] for n in sorted(found)]


@dataclass(frozen=True)
class Losses:
    """Epochs that had to be done more than once: ``again`` had been committed, ``abandoned`` had
    not."""

    again: int = 0
    abandoned: int = 0

    @property
    def epochs(self) -> int:
        return self.again + self.abandoned

    def since(self, before: "Losses") -> "Losses":
        return Losses(max(0, self.again - before.again), max(0, self.abandoned - before.abandoned))


@dataclass(eq=False)
class Attempt:
    """A plan and, when it was told, its commit."""

    plan: Told
    commit: Told | None = None

    @property
    def epoch(self) -> int:
        return int(self.plan.get("epoch", 0))

    @property
    def starts_from(self) -> tuple[int, str]:
        return self.epoch, str(self.plan.get("lineage", ""))

    @property
    def makes(self) -> tuple[int, str] | None:
        return (self.epoch + 1, str(self.commit.get("lineage", ""))) if self.commit else None


class Books:
    """Over all events of a story, oldest first."""

    def __init__(self, events: Sequence[Told]) -> None:
        self.events = events
        self.attempts: list[Attempt] = []
        newest: dict[tuple[str, int, int], Attempt] = {}
        plans: dict[str, Attempt] = {}
        for e in events:
            key = e.who, int(e.get("term", 0)), int(e.get("epoch", 0))
            if e.kind == PLANNED:
                made = newest[key] = plans[str(e.get("hash"))] = Attempt(e)
                self.attempts.append(made)
            elif e.kind == TAKEN_OVER and (begun := plans.get(str(e.get("hash")))) is not None:
                newest[key] = begun
            elif e.kind == COMMITTED:
                known = newest.get((e.who, int(e.get("term", 0)), int(e.get("epoch", 0)) - 1))
                if known is not None and known.commit is None:
                    known.commit = e

    def history(self) -> dict[int, Attempt]:
        """The attempts that hold, by the epoch they start from."""
        held: dict[int, Attempt] = {}
        at = max((a for a in self.attempts if a.commit), key=_committed_at, default=None)
        while at is not None:
            held[at.epoch] = at
            at = self._before(at)
        return held

    def _before(self, later: Attempt) -> Attempt | None:
        """The attempt that made the version ``later`` starts from."""
        earlier = [
            a for a in self.attempts if a.epoch == later.epoch - 1 and a.plan.at <= later.plan.at
        ]
        made = [a for a in earlier if a.makes == later.starts_from]
        # A leader that died of it never told its last commit; then the last plan was it.
        return max(made or earlier, key=lambda a: a.plan.at, default=None)

    def losses(self) -> Losses:
        """Work that was done more than once in the whole story."""
        held = self.history()
        outgrown = {str(e.get("hash")) for e in self.events if e.kind == OUTGROWN}
        again = sum(a.commit is not None and held.get(a.epoch) is not a for a in self.attempts)
        abandoned = sum(
            a.commit is None
            and str(a.plan.get("hash")) not in outgrown
            and (h := held.get(a.epoch)) is not None
            and h is not a
            and a.plan.at < h.plan.at
            for a in self.attempts
        )
        return Losses(again, abandoned)

    def first_tries(self, begin: int, end: int) -> tuple[int, int, int]:
        """Return (epochs from `begin` to before `end` that hold, epochs among them held by their
        first plan, epochs among the latter without repair or loss)."""
        held = {epoch: a for epoch, a in self.history().items() if begin <= epoch < end}
        first: dict[int, Attempt] = {}
        for a in self.attempts:
            first.setdefault(a.epoch, a)
        straight = [a for epoch, a in held.items() if first[epoch] is a]
        clean = [
            a
            for a in straight
            if a.commit and not any(a.commit.get(k, 0) for k in ("repaired", "dropped", "dead"))
        ]
        return len(held), len(straight), len(clean)

    def counted_twice(self, begin: float, sequence: int) -> float | None:
        """Samples that some stage counted more than once, in attempts that hold and were planned
        since `begin`; None if no peer reports its counts."""
        shares: dict[str, dict[int, dict[str, int]]] = {}
        for e in self.events:
            if e.kind == CONTRIBUTED and e.at >= begin:
                shares.setdefault(str(e.get("hash")), {}).setdefault(int(e.get("stage", 0)), {})[
                    e.who
                ] = int(e.get("tokens", 0))
        if not shares:
            return None
        worst = 0
        for a in self.history().values():
            if a.commit is None or a.plan.at < begin or a.commit.get("dead", 0):
                # what the dead contributed was not averaged, and which of it was is not told
                continue
            counted = int(a.commit.get("tokens", 0))
            by_stage = shares.get(str(a.plan.get("hash")), {})
            worst += max(
                (max(0, sum(by.values()) - counted) for by in by_stage.values()), default=0
            )
        return worst / sequence

    def accounted(self, begin: float, sequence: int) -> tuple[float, float] | None:
        """(samples lost, samples handed out twice) between the last plan before ``begin`` and the
        newest that holds; None when plans do not tell enough."""
        held = sorted(self.history().values(), key=lambda a: a.epoch)
        known = [(a.plan.at, u) for a in held if (u := unaccounted(a.plan, sequence)) is not None]
        # A run that is struck before its first commit has taken nothing that counts.
        before = [u for at, u in known if at <= begin] or [0.0] * (0 in self.history())
        if not known or not before:
            return None
        change = known[-1][1] - before[-1]
        return max(0.0, change), max(0.0, -change)

    def first_notice(
        self, since: float, victims: Collection[str], keys: Collection[str]
    ) -> Told | None:
        """The first event after `since` in which a daemon that is no victim (label) names a victim
        (PeerId) or begins to lead."""
        for e in self.events:
            if (
                e.at >= since
                and e.who not in victims
                and (e.kind == LEADING or (e.kind in NAMING and _names(e, keys)))
            ):
                return e
        return None

    def next_commit(self, since: float, without: Collection[str] = ()) -> Told | None:
        """The first commit after ``since`` that none of ``without`` led."""
        return next(
            (
                e
                for e in self.events
                if e.kind == COMMITTED and e.at >= since and e.who not in without
            ),
            None,
        )


def unaccounted(plan: Told, sequence: int) -> float | None:
    """Samples taken, not handed back and not counted at a plan; None when it does not tell
    enough."""
    if not {"cursor", "returned", "tokens"} <= plan.fields.keys():
        return None
    return plan.fields["cursor"] - plan.fields["returned"] - plan.fields["tokens"] / sequence


def in_plan(events: Iterable[Told]) -> tuple[int, int]:
    """(members, listeners) of the newest plan."""
    newest = max((e for e in events if e.kind == PLANNED), key=lambda e: e.at, default=None)
    return (int(newest.get("members", 0)), int(newest.get("listeners", 0))) if newest else (0, 0)


def _names(e: Told, keys: Collection[str]) -> bool:
    return e.get("peer") in keys or any(key[-6:] in e.text for key in keys)


def _committed_at(a: Attempt) -> float:
    return a.commit.at if a.commit else 0.0
