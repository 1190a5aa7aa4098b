"""What goes with a version of the parameters: where the sampler is, who owned what, how much was
counted. Pure.

The leader plans from it. It comes from the plans this peer took part in, from a checkpoint, or from
another peer that remembers the plan behind the version; a version whose plan nobody remembers goes
on from a guess, and says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from node.core.ids import PeerId
from node.core.journey import UNKNOWN, Losses, Plan, Version, lineage_after
from node.core.samples import WHOLE, Cursor, SampleClass
from node.data.order import Sampler

GENESIS = Version(0)
"""What a run begins with: every peer can make it."""


@dataclass(frozen=True)
class PlanContext:
    """What goes with a version: the sampler, who owned what, tokens counted until then; the change
    to how cells average that was in force. ``founded``: a cell begins here, and the owners are
    those of the cell it comes from. ``reference``: losses before the first step."""

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


class Memory:
    """What the leader knows of plans. ``history``: the newest plan known; ``dropped``: its
    micro-batches that did not count. :meth:`recalled` replaces both by what other peers
    remember."""

    def __init__(
        self,
        from_checkpoint: Callable[[Version], PlanContext | None],
        history: Plan | None,
        dropped: Sequence[int],
    ) -> None:
        self._from_checkpoint = from_checkpoint
        self.history, self._dropped = history, tuple(dropped)
        self._next: tuple[Version, PlanContext] | None = None
        self._asked: tuple[Version, float] | None = None
        self.forgotten: set[Version] = set()

    def planned(self, plan: Plan) -> None:
        """This plan was made; nothing of it has been committed yet."""
        self.history, self._dropped, self._next, self._asked = plan, (), None, None

    def committed(
        self,
        version: Version,
        plan: Plan,
        owners: dict[str, PeerId],
        dropped: Sequence[int],
        tokens: int,
    ) -> None:
        """``plan`` made ``version``, with these owners in the end."""
        self.history, self._dropped = plan, tuple(dropped)
        self._next = version, PlanContext.after(plan, dropped, owners, tokens)

    def past(self, base: Version, tokens: int, batch: int) -> PlanContext | None:
        """What goes with ``base``, None when this peer does not know. ``tokens``: counted, as other
        peers report (-1: none does). ``batch``: samples of an epoch, to guess the sampler's
        position when no peer remembers the plan."""
        if self._next is not None and self._next[0] == base:
            return self._next[1]
        h = self.history
        if h is not None and base == h.base:
            return PlanContext.before(h)
        if h is not None and base == makes(h, self._dropped):
            return PlanContext.after(h, self._dropped, h.owners, max(tokens, h.tokens))
        if base == GENESIS:
            return PlanContext(WHOLE, {}, 0)
        found = self._from_checkpoint(base)
        if found is None and base in self.forgotten:
            guess = SampleClass(0, 0, base.epoch * batch)
            return PlanContext((guess,), {}, max(0, tokens))
        return found

    def knows(self, version: Version) -> bool:
        """True if a checkpoint of this peer has the context of ``version``."""
        return self._from_checkpoint(version) is not None

    def stood(self, version: Version) -> dict[int, Version]:
        """Stages whose parameters at ``version`` are those of an older one, as far as the newest
        plan tells."""
        h = self.history
        if h is None or not h.stood:
            return {}
        if version == h.base:
            return h.stood
        worked = {m.stage for m in h.members if m.current}
        return (
            {s: v for s, v in h.stood.items() if s not in worked}
            if version == makes(h, self._dropped)
            else {}
        )

    def asking(self, base: Version, now: float, patience_s: float) -> str:
        """What to do about the plan behind ``base``: "ask" the others, "wait" for their answers, or
        "over", ``patience_s`` after they were asked."""
        if self._asked is None or self._asked[0] != base:
            self._asked = (base, now + patience_s)
            return "ask"
        return "wait" if now < self._asked[1] else "over"

    def ask_again(self, version: Version) -> bool:
        """Forget that others were asked for ``version``; whether they had been."""
        asked = self._asked is not None and self._asked[0] == version
        if asked:
            self._asked = None
        return asked

    def recalled(self, version: Version, plan: Plan | None, dropped: Sequence[int]) -> bool | None:
        """Others answered: True when they knew, False when nobody does, None when we did not
        ask."""
        if not self.ask_again(version):
            return None
        if plan is None or not self._explains(version, plan, dropped):
            self.forgotten.add(version)
            return False
        self.history, self._dropped, self._next = plan, tuple(dropped), None
        return True

    def _explains(self, version: Version, plan: Plan, dropped: Sequence[int]) -> bool:
        """Whether a recalled plan starts from the version or made it, and has exactly the samples
        that its cursor gives."""
        samples = [s for path in plan.paths for s in path.samples]
        if sorted(samples) != sorted(Sampler(plan.cursor).take(len(samples))):
            return False
        return version in (plan.base, makes(plan, dropped))


def makes(plan: Plan, dropped: Sequence[int]) -> Version:
    """The version that ``plan`` makes when these micro-batches do not count."""
    return Version(plan.epoch + 1, lineage_after(plan, dropped))
