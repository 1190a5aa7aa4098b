"""Routes of forward-only work around stages that nobody serves: which block stages it visits, and
at which peers.

Enters: the plan, the stages that the operator leaves out, answers to pings. Leaves: hops. Never: a
stage left out that the operator has not named and the run's skip ratio does not allow; nor the
ends.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from node.core.errors import NetworkFault, PeerFault, refuse
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Plan
from node.core.tasks import Tasks
from node.pipeline.route import fewest_hops
from node.pipeline.settings import PipelineSettings
from node.transport.port import TransportPort

T = TypeVar("T")
PING_S = 3.0
"""Seconds to wait for a sign of life."""
WATCH_S = 5.0
"""Seconds after which work that is not home may have been lost with a later hop: the hops are then
pinged, again after as long."""
TOGETHER = 4
"""Replicas of a stage that are asked at once; the others only if none of these lives."""
TRIES = 5
"""Ways tried for one piece of work."""


@dataclass(frozen=True)
class Reroute:
    """``live``: block stages that are visited, rising, each with peers that answer. ``asked``:
    stages left out because the operator says so, ``dead``: because nobody who serves them answers.
    ``stages``: block stages of the run."""

    live: tuple[tuple[int, tuple[PeerId, ...]], ...]
    asked: tuple[int, ...]
    dead: tuple[int, ...]
    stages: int

    def hops(self, turn: int) -> tuple[Hop, ...]:
        """One live replica of every stage that is visited, in turn."""
        return tuple(Hop(s, peers[turn % len(peers)]) for s, peers in self.live)

    @property
    def missing(self) -> tuple[int, ...]:
        """Every stage that is left out, rising."""
        return tuple(sorted((*self.asked, *self.dead)))


def named(stages: int, leave_out: Collection[int], after: int = 0) -> tuple[int, ...]:
    """The block stages the operator leaves out: these, and with ``after`` every one behind that
    one. Raises UsageFault."""
    last = max((after, *leave_out))
    without = set(leave_out)
    if after:
        without.update(range(after + 1, stages + 1))
    asked = sorted(without)
    refuse(
        (
            last > stages,
            f"block stage {last} is not in this swarm",
            f"it has block stages 1 to {stages}",
        ),
        (
            ENDS in asked,
            "stage 0, the ends, is never left out: it is the embedding and the head",
            f"leave out block stages, 1 to {stages}",
        ),
        (len(asked) == stages, "that leaves out every block stage", "leave out one less"),
    )
    return tuple(asked)


def decide(
    settings: PipelineSettings, live: Mapping[int, Sequence[PeerId]], asked: Collection[int]
) -> Reroute:
    """Leave out the stages in ``asked``, and the stages without a peer in ``live``, if all of them
    together are within the run's skip ratio.

    Raises NetworkFault, naming the stage and what to do, when a stage nobody serves may not be left
    out.
    """
    stages = settings.stages
    dead = tuple(s for s in range(1, stages + 1) if s not in asked and not live.get(s))
    kept = stages - len(asked) - len(dead)
    if dead and kept < fewest_hops(stages, settings.may_skip):
        most = stages - fewest_hops(stages, settings.may_skip)
        what = f"stages {', '.join(map(str, dead))} have"
        if len(dead) == 1:
            what = f"stage {dead[0]} has"
        already = ""
        if asked:
            already = f", {len(asked)} are left out already"
        step = (
            "wait for a replacement (tutti peers shows who is there; tutti swarm invite brings one)"
        )
        if kept:
            force = ",".join(map(str, sorted((*asked, *dead))))
            step += f", or go without all the same: --drop-stages {force}"
        raise NetworkFault(
            f"{what} no live peer, and by itself this run leaves out at most {most} of its "
            f"{stages} block stages "
            f"(pipeline.may_skip = {settings.may_skip}){already}",
            step,
        )
    found = tuple(
        (s, tuple(live[s])) for s in range(1, stages + 1) if s not in asked and s not in dead
    )
    return Reroute(found, tuple(sorted(asked)), dead, stages)


async def is_alive(transport: TransportPort, peer: PeerId) -> bool:
    """Return True if ``peer`` answers a ping within :data:`PING_S` seconds."""
    try:
        async with asyncio.timeout(PING_S):
            await transport.ping(peer, PING_S)
    except (PeerFault, TimeoutError):
        return False
    return True


class ForwardRouter:
    """Carries forward-only work through the live swarm; of one request, closed with it.

    ``plan()`` is the newest plan, or None.
    """

    def __init__(
        self,
        transport: TransportPort,
        settings: PipelineSettings,
        plan: Callable[[], Plan | None],
        asked: Collection[int] = (),
    ) -> None:
        self.transport = transport
        self.settings = settings
        self.asked = tuple(asked)
        self._plan = plan
        self._tasks = Tasks("around")
        self.reroute = Reroute((), (), (), settings.stages)
        """The way in use; without live stages before the first :meth:`look`."""

    async def look(self) -> Reroute:
        """Find the peers that answer now and choose the stages to visit. Raises NetworkFault when
        too few stages have one, or this peer follows no plan yet."""
        plan = self._plan()
        if plan is None:
            raise NetworkFault(
                "this peer follows no plan yet: stages still load, or lack a peer",
                "try again in a moment;  tutti status  says what is waited for",
            )
        wanted = [s for s in range(1, self.settings.stages + 1) if s not in self.asked]
        cells = [[m.peer for m in plan.stage(s) if m.current] for s in wanted]
        living = await asyncio.gather(*(self._living(peers) for peers in cells))
        self.reroute = decide(self.settings, dict(zip(wanted, living, strict=True)), self.asked)
        return self.reroute

    async def take(self, turn: int, work: Callable[[tuple[Hop, ...]], Coroutine[Any, Any, T]]) -> T:
        """The result of ``work(hops)``, on another way when a hop is lost; replicas take turns by
        ``turn``.

        Raises NetworkFault when a stage that may not be left out has nobody, no way worked, or this
        peer gives up its stage.
        """
        reroute = self.reroute
        if not reroute.live:
            reroute = await self.look()
        why = ""
        for _ in range(TRIES):
            try:
                return await self._watched(reroute.hops(turn), work)
            except PeerFault as e:
                why = str(e)
                turn = turn + 1
                reroute = await self.look()
        raise NetworkFault(
            f"everybody answers, but forward work does not come home: {why}",
            "see tutti logs, here and there",
        )

    async def close(self) -> None:
        """End all work."""
        await self._tasks.close()

    async def _watched(
        self, hops: tuple[Hop, ...], work: Callable[[tuple[Hop, ...]], Coroutine[Any, Any, T]]
    ) -> T:
        """A hop that has taken the work tells nobody when it dies, so the hops are asked now and
        then."""
        task = self._tasks.spawn(work(hops), "forward")
        try:
            while not (await asyncio.wait((task,), timeout=WATCH_S))[0]:
                for hop, alive in zip(
                    hops,
                    await asyncio.gather(*(is_alive(self.transport, h.peer) for h in hops)),
                    strict=True,
                ):
                    if not alive and not task.done():
                        raise PeerFault(hop.peer, f"stage {hop.stage} does not answer")
            if task.cancelled():  # not by this task: the pipeline was closed
                raise NetworkFault("this peer has given up its stage", "see  tutti status")
            return task.result()
        finally:
            task.cancel()

    async def _living(self, peers: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """The peers that answer, of the first group in which any does."""
        for i in range(0, len(peers), TOGETHER):
            some = peers[i : i + TOGETHER]
            answers = await asyncio.gather(*(is_alive(self.transport, p) for p in some))
            if any(answers):
                return tuple(p for p, alive in zip(some, answers, strict=True) if alive)
        return ()
