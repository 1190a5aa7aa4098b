"""An epoch in which a peer of a block stage dies or becomes four times slower, in the replay of its
plan: with what members do by themselves, and with a leader that plans again.

Members (node/pipeline/route.py): where the plan's peer is dead, each sender takes the replica
that would be done first by the plan's speeds and shares; where it is full, it asks the others or
waits, whichever makes the epoch shorter here. A peer that has become slow keeps its work. The
leader: the same at once; ``notice_s`` later, and some times more, it changes micro-batches that
have not left their ends peers, each change tried on a copy that knows the state of every task.
Nothing is charged for telling its members, so this is the most that it can gain. What is under way
is not changed: nobody tells the leader where it is.
"""

import random
from collections import Counter
from collections.abc import Sequence

from node.pipeline.route import PAUSE_S
from node.scheduler.planning.problem import PathProblem, Route
from node.scheduler.planning.replay import TRAVELS, WAITING, ReplayedRun, Token
from node.tools.replan import ReplanEvent, drifted, improve

TRIES, APART_S = 8, 0.25
"""Of the leader: so many times, so many seconds apart."""


class Detours(ReplayedRun):
    """Routing by members; ``ask``: a full peer answers BUSY and the others are asked, else the
    tensor waits there."""

    def __init__(self, problem: PathProblem, routes: Sequence[Route], *, ask: bool) -> None:
        self.ask = ask
        work = Counter(n for route in routes for n in route[1:])
        each = [(1 + problem.backward) * c for c in problem.compute]
        self.share_s = each
        self.done_s = [(work[n] + 1) * s for n, s in enumerate(each)]
        self.asked: dict[int, set[int]] = {}
        self.pauses: Counter[int] = Counter()
        super().__init__(problem, routes)

    def strike(self, event: ReplanEvent) -> None:
        """Let it happen."""
        if event.what != "death":
            self.change(event.problem(self.problem))
            return
        for i in self.die(event.peer):
            h = self.routes[i].index(event.peer)
            self.bend(i, h, self.instead(i, self.problem.stage_of[event.peer], {event.peer}))

    def instead(self, i: int, stage: int, asked: set[int]) -> int:
        """The replica that would be done first, of those not asked yet, in turns where equal."""
        others = [n for n in self.problem.stages[stage] if n not in self.dead | asked]
        turn = i % len(others)
        n = min((*others[turn:], *others[:turn]), key=self.done_s.__getitem__)
        self.done_s[n] += self.share_s[n]
        return n

    def _land(self, n: int, token: Token) -> None:
        i, k = token.mb, self.step[token.mb]
        full = self.held[n] >= self.problem.slots[n]
        if not (self.ask and full and token.hop < 0 and 0 < k < len(self.routes[i])):
            self.asked.pop(i, None)
            super()._land(n, token)
            return
        before, stage = self.routes[i][k - 1], self.problem.stage_of[n]
        asked = self.asked.setdefault(i, set())
        asked.add(n)
        pause = 0.0
        if not set(self.problem.stages[stage]) - self.dead - asked:
            pause = min(PAUSE_S[0] * 2 ** self.pauses[i], PAUSE_S[1])
            self.pauses[i] = min(self.pauses[i] + 1, 16)
            asked.clear()
        there = self.instead(i, stage, asked)
        self.routes[i][k], self.state[i] = there, TRAVELS
        # The sender keeps the tensor until it is accepted, and sends it from where it is.
        self._at(self.now + pause + self.problem.delays[before][there], "land", there, token)


class Launches(Detours):
    """What a leader can change: only what has not begun."""

    def open_from(self, i: int) -> int:
        """The first hop of micro-batch i that may be changed; its length when there is none."""
        return 1 if self.state[i] == WAITING else len(self.routes[i])


def by_members(problem: PathProblem, routes: Sequence[Route], event: ReplanEvent) -> float:
    """Makespan with whichever of the two kinds of routing by members is shorter."""
    found = []
    for ask in (False, True):
        running = Detours(problem, routes, ask=ask)
        running.until(event.at)
        running.strike(event)
        found.append(running.finish())
    return min(found)


def by_leader(
    problem: PathProblem, routes: Sequence[Route], event: ReplanEvent, notice_s: float, seed: int
) -> float:
    """Makespan when the leader knows of the event ``notice_s`` later and plans again."""
    running = Launches(problem, routes, ask=False)
    running.until(event.at)
    running.strike(event)
    dice = random.Random(seed)
    for k in range(TRIES):
        running.until(event.at + notice_s + k * APART_S)
        improve(running, event, dice, set())
    return running.finish()


def an_event(problem: PathProblem, what: str, span: float, seed: int) -> ReplanEvent:
    """A peer of a block stage with another replica, at some time of the middle of the epoch."""
    dice = random.Random(seed)
    peer = dice.choice([n for row in problem.stages[1:] if len(row) > 1 for n in row])
    at = span * dice.uniform(0.1, 0.8)
    if what == "death":
        return ReplanEvent(at, "death", peer)
    return ReplanEvent(at, "drift", problem=lambda before: drifted(before, 4.0, 1.0, peer))
