"""How an epoch's paths are laid. Part of the manifest."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from node.core.errors import refuse
from node.core.ids import ENDS
from node.core.tables import setting


@dataclass(frozen=True)
class SchedulerSettings:
    """The stages and peers that every micro-batch visits."""

    paths: str = setting(
        "planned",
        "planned: laid by the measured costs of peers and links | round-robin: replicas take turns "
        "by speed.",
        choices=("planned", "round-robin"),
    )
    skip: float = setting(
        0.0,
        "Share of the block stages that every micro-batch leaves out by plan, each in its turn; 0: "
        "none. The ends are never left out.",
        least=0.0,
        most=0.999,
    )
    max_swaps: int = setting(
        0,
        "Number of times that a path may go back behind the furthest stage it has reached, and "
        "number of stages that it may go back in all; 0: stages in order.",
        least=0,
        most=4096,
    )
    max_jump: int = setting(
        0, "Number of stages that a path may go ahead at once; 0: no bound.", least=0, most=4096
    )

    keep_first: int = setting(
        0,
        "Number of first block stages that are on every path while somebody holds them; the others "
        "share the remaining visits.",
        least=0,
        most=4096,
    )

    def hops(self, stages: int) -> int:
        """Block stages of every path, of ``stages`` there are."""
        return stages - math.floor(self.skip * stages + 1e-9)

    def kept(self, live: Sequence[int], hops: int) -> list[int]:
        """The block stages kept on every path of ``hops`` hops, among the rising ``live`` stages,
        which have a peer; empty where every path visits all."""
        if hops < len(live):
            return [s for s in live if s <= self.keep_first]
        return []

    def shares_of_visits(self, stages: int) -> dict[int, float]:
        """Share of the micro-batches that visit each stage, the ends included, of ``stages`` block
        stages that all have peers."""
        hops = self.hops(stages)
        blocks = range(1, stages + 1)
        kept = self.kept(blocks, hops)
        others = 1.0
        if len(kept) < stages:
            others = (hops - len(kept)) / (stages - len(kept))
        return {ENDS: 1.0, **dict.fromkeys(blocks, others), **dict.fromkeys(kept, 1.0)}

    def check(self, stages: int, micro_batches: int, may_skip: float) -> None:
        """Check that the settings can hold for ``stages`` block stages and ``micro_batches``
        micro-batches in an epoch.

        ``may_skip``: share of the stages that members let a journey leave out, planned and not
        planned together. Raises UsageFault if they cannot hold.
        """
        hops = self.hops(stages)
        refuse(
            (
                self.skip and hops == stages,
                f"scheduler.skip = {self.skip:g} leaves out none of {stages} block stages",
                f"0, or {math.ceil(1000 / stages) / 1000:g} and more to leave out one",
            ),
            (
                hops < 1,
                f"scheduler.skip = {self.skip:g} leaves out every block stage",
                "leave one at least",
            ),
            (
                stages - hops > math.floor(may_skip * stages + 1e-9),
                f"scheduler.skip = {self.skip:g} plans to leave out {stages - hops} of {stages} "
                "block stages",
                f"members allow what pipeline.may_skip = {may_skip:g} says: give it {self.skip:g} "
                "or more",
            ),
            (
                self.keep_first >= hops and hops < stages,
                f"scheduler.keep_first = {self.keep_first}: a path of {hops} of {stages} block "
                "stages would visit no others",
                f"at most {hops - 1}, or a smaller scheduler.skip",
            ),
        )
        kept = 0
        if hops < stages:
            kept = min(self.keep_first, stages)
        refuse(
            (
                micro_batches * (hops - kept) < stages - kept,
                f"scheduler.skip = {self.skip:g}: {micro_batches} micro-batches over {hops} of "
                f"{stages} block stages each do not "
                "visit every stage in an epoch",
                f"training.target_batch must be {-(-(stages - kept) // (hops - kept))} "
                "micro-batches or more",
            )
        )
        if self.max_jump:
            # Equal visits within the bound on jumps: if one micro-batch for each shared stage can
            # keep them, any multiple of that number can.
            from node.scheduler.planning.dealing import deal
            from node.scheduler.planning.problem import PathProblem

            peers = tuple(range(stages + 1))
            count = stages - kept
            visits = ()
            if kept:
                visits = (count,) * kept + (hops - kept,) * count
            deal(
                PathProblem(
                    "settings",
                    ((0.0,) * len(peers),) * len(peers),
                    (1.0,) * len(peers),
                    tuple((n,) for n in peers),
                    hops + 1,
                    (1,) * len(peers),
                    {0: count},
                    max_jump=self.max_jump,
                    visits=visits,
                )
            )
