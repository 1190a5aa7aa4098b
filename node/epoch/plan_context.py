"""The context of a version of the parameters: the sampler's position, the owners, the counted
tokens. Pure.

The leader plans from it. It comes from the plans this peer took part in, from a checkpoint, or from
another peer that remembers the plan behind the version. If nobody remembers that plan, the leader
goes on from a guess, and says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.core.ids import PeerId
from node.core.journey import UNKNOWN, Losses, Path, Plan, Version, lineage_after
from node.core.samples import WHOLE, Cursor, SampleClass
from node.data.order import Sampler

GENESIS = Version(0)
"""The version that a run begins with: every peer can make it."""


@dataclass(frozen=True)
class PlanContext:
    """The context of a version: the sampler's position, the owners of the parts, the tokens counted
    until then, and the owner's change that was in force. ``founded``: a cell begins here, and the
    owners are the previous cell's. ``reference``: losses before the first step."""

    cursor: Cursor
    owners: dict[str, PeerId]
    tokens: int
    change: str = ""
    founded: bool = False
    reference: Losses = UNKNOWN

    @classmethod
    def before(cls, plan: Plan) -> "PlanContext":
        """The context of the version that ``plan`` starts from."""
        return cls(
            plan.cursor,
            dict(plan.owners),
            plan.tokens,
            plan.change,
            founded=bool(plan.parent),
            reference=plan.reference,
        )

    @classmethod
    def after(
        cls, plan: Plan, dropped: Sequence[int], owners: Mapping[str, PeerId], tokens: int
    ) -> "PlanContext":
        """The context of the version that ``plan`` makes: its samples are taken, and the samples of
        ``dropped`` micro-batches returned."""
        sampler = Sampler(plan.cursor)
        lost = set(dropped)
        for path in plan.paths:
            sampler.take(len(path.samples))
        sampler.give_back([s for p in plan.paths if p.index in lost for s in p.samples])
        return cls(
            sampler.cursor(),
            dict(owners),
            tokens,
            plan.change,
            reference=plan.reference,
        )


@dataclass(frozen=True)
class PastPlan:
    """A plan that was followed. ``dropped``: its micro-batches that did not count; ``dead``: the
    members that its leader has found dead."""

    plan: Plan
    dropped: tuple[int, ...] = ()
    dead: tuple[PeerId, ...] = ()

    @property
    def counted(self) -> list[Path]:
        """Paths of the micro-batches that counted."""
        return [path for path in self.plan.paths if path.index not in self.dropped]


class Memory:
    """The leader's knowledge of plans. ``newest``: the newest plan known, if any. :meth:`recalled`
    replaces it by the memory of other peers."""

    def __init__(self, newest: PastPlan | None) -> None:
        self._kept: dict[Version, PlanContext] = {}
        """Contexts in the checkpoints of this peer."""
        self.history: Plan | None = None
        """The newest plan known."""
        self._dropped: tuple[int, ...] = ()
        self.tokens = 0
        """Tokens counted in the history that the swarm goes on with."""
        if newest is not None:
            self.history = newest.plan
            self._dropped = newest.dropped
            self.tokens = newest.plan.tokens
        self._next: tuple[Version, PlanContext] | None = None
        self._asked: tuple[Version, float] | None = None
        self.forgotten: set[Version] = set()

    def kept(self, contexts: Sequence[tuple[Version, PlanContext]]) -> None:
        """These are the contexts in the checkpoints of this peer."""
        self._kept = dict(contexts)

    def goes_on(self, past: PlanContext) -> None:
        """The swarm goes on from the version with this context."""
        self.tokens = past.tokens

    def planned(self, plan: Plan) -> None:
        """This plan was made; nothing of it has been committed yet."""
        self.history = plan
        self._dropped = ()
        self._next = None
        self._asked = None

    def committed(
        self,
        version: Version,
        plan: Plan,
        owners: dict[str, PeerId],
        dropped: Sequence[int],
        tokens: int,
    ) -> None:
        """``plan`` made ``version``, with these owners in the end. ``tokens``: counted by it."""
        self.tokens += tokens
        self.history = plan
        self._dropped = tuple(dropped)
        self._next = version, PlanContext.after(plan, dropped, owners, self.tokens)

    def past(self, base: Version, tokens: int, batch: int) -> PlanContext | None:
        """The context of ``base``, None if this peer does not know it. ``tokens``: counted tokens,
        as other peers report (-1: none does). ``batch``: samples of an epoch, to guess the
        sampler's position when no peer remembers the plan."""
        if self._next is not None and self._next[0] == base:
            return self._next[1]
        h = self.history
        if h is not None and base == h.base:
            return PlanContext.before(h)
        if h is not None and base == makes(h, self._dropped):
            return PlanContext.after(h, self._dropped, h.owners, max(tokens, h.tokens))
        if base == GENESIS:
            return PlanContext(WHOLE, {}, 0)
        found = self._kept.get(base)
        if found is None and base in self.forgotten:
            guess = SampleClass(0, 0, base.epoch * batch)
            return PlanContext((guess,), {}, max(0, tokens))
        return found

    def knows(self, version: Version) -> bool:
        """True if a checkpoint of this peer has the context of ``version``."""
        return version in self._kept

    def stood(self, version: Version) -> dict[int, Version]:
        """Stages that have an older version's parameters at ``version``, with that older version,
        by the newest plan."""
        h = self.history
        if h is None or not h.stood:
            return {}
        if version == h.base:
            return h.stood
        if version != makes(h, self._dropped):
            return {}
        worked = {m.stage for m in h.members if m.current}
        return {s: v for s, v in h.stood.items() if s not in worked}

    def asking(self, base: Version, now: float, patience_s: float) -> str:
        """The next step about the plan behind ``base``: "ask" the others, "wait" for their answers,
        or "over", ``patience_s`` after they were asked."""
        if self._asked is None or self._asked[0] != base:
            self._asked = (base, now + patience_s)
            return "ask"
        return "wait" if now < self._asked[1] else "over"

    def ask_again(self, version: Version) -> bool:
        """Forget that other peers were asked for ``version``. Return True if they had been."""
        asked = self._asked is not None and self._asked[0] == version
        if asked:
            self._asked = None
        return asked

    def recalled(self, version: Version, plan: Plan | None, dropped: Sequence[int]) -> bool | None:
        """Other peers answered. Return True if they knew the plan, False if nobody does, None if
        they were not asked."""
        if not self.ask_again(version):
            return None
        if plan is None or not self._explains(version, plan, dropped):
            self.forgotten.add(version)
            return False
        self.history = plan
        self._dropped = tuple(dropped)
        self._next = None
        return True

    def _explains(self, version: Version, plan: Plan, dropped: Sequence[int]) -> bool:
        """Return True if a recalled plan starts from the version or made it, and has exactly the
        samples that its cursor gives."""
        samples = [s for path in plan.paths for s in path.samples]
        if sorted(samples) != sorted(Sampler(plan.cursor).take(len(samples))):
            return False
        return version in (plan.base, makes(plan, dropped))


def makes(plan: Plan, dropped: Sequence[int]) -> Version:
    """The version that ``plan`` makes when these micro-batches do not count."""
    return Version(plan.epoch + 1, lineage_after(plan, dropped))
