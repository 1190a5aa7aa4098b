"""The time at which the cell gives its parameters to the partners of a window, and at which the
result is put in place. Pure. Enters: the group that was found, the means that members hold, the
plans that were made. Leaves: the window in the next plan. Never: the choice of partners, a
tensor."""

from collections import Counter
from dataclasses import replace

from node.core.journey import NO_WINDOW, Plan, Version, Window
from node.epoch import events as ev
from node.epoch.leader.roster import Roster

TRIES = 3
"""Number of failed outer rounds after which a window is given up."""


class Windows:
    """Windows of one leader, one at a time."""

    def __init__(self) -> None:
        self._group: ev.Grouped | None = None
        self._given: Version | None = None
        self._tries = 0

    def grouped(self, e: ev.Grouped) -> None:
        """The cell has found partners. If two windows overlap, the later one counts."""
        if self._group is None or e.window.number > self._group.window.number:
            self._group = e
            self._given = None
            self._tries = 0

    def forget(self) -> None:
        """The settings have changed: drop the group, which was found under the old ones."""
        self._group = None

    def next(self, roster: Roster, base: Version, now: float) -> Window:
        """The window in the plan that starts from ``base``: the cell gives this version, or its
        stages put their means in place, or neither (NO_WINDOW)."""
        g = self._group
        if g is None:
            return NO_WINDOW
        if self._given is None and now < g.until:
            self._given = base
        if self._given == base and now < g.until and not self._tries:
            return replace(g.window, within_s=g.until - now)
        means, whole = self._means(roster, base, g.window.number)
        if now < g.until and not whole:
            return NO_WINDOW
        if not means or self._tries >= TRIES:
            self._group = None
            return NO_WINDOW
        self._tries += 1
        return Window(0, g.window.partners, means=means)

    def number(self) -> int:
        """Number of the window whose round has not ended, 0 for none."""
        if self._group is None:
            return 0
        return self._group.window.number

    def committed(self, plan: Plan) -> None:
        """A plan has been committed."""
        if self._group is not None and plan.outer == self._group.window.number:
            self._group = None

    def _means(self, roster: Roster, base: Version, window: int) -> tuple[dict[int, str], bool]:
        """For each stage with a mean of the window, the digest that most of its replicas hold; and
        True if all replicas of all stages hold the same."""
        means: dict[int, str] = {}
        whole = True
        here = roster.peers.candidates
        for stage in roster.participants.by_stage():
            able = roster.versions.workers(stage, base)
            said = Counter(mean[1] for p in able if (mean := here[p].outer.mean)[0] == window)
            whole = whole and len(said) == 1 and sum(said.values()) == len(able)
            if said:
                means[stage] = min(said, key=lambda digest: (-said[digest], digest))
        return means, whole
