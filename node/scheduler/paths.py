"""Where every micro-batch of an epoch goes: one replica of every block stage, chosen by measured
speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path
from node.scheduler.quotas import turns


def assign_paths(
    origins: Sequence[tuple[PeerId, int]],
    stages: Mapping[int, Sequence[tuple[PeerId, float]]],
    samples: Sequence[tuple[int, ...]],
) -> tuple[Path, ...]:
    """Lay the path of every micro-batch of an epoch.

    ``origins`` are the ends peers with the number of micro-batches each starts, ``stages`` the
    replicas of every block stage (1..S) with their speeds in micro-batches per second, ``samples``
    the sequences of each micro-batch. Path i is made of ``samples[i]``; the quotas sum to
    ``len(samples)``.

    Origins take turns in proportion to their quotas, so that all of them are busy from the first
    micro-batch to the last; inside every stage the replicas take turns in proportion to their
    speeds, each stage by itself. The result is a pure function of the arguments, and their order
    does not matter. Raises ValueError for quotas that do not sum to the samples, a stage without a
    replica, or stages that are not 1..S.
    """
    quota = {peer: count for peer, count in origins}
    if len(quota) != len(origins):
        raise ValueError("an origin is named twice")
    if any(count < 0 for count in quota.values()) or sum(quota.values()) != len(samples):
        raise ValueError(
            f"quotas {sorted(quota.values())} do not add up to {len(samples)} micro-batches"
        )
    order = sorted(stages)
    if order != list(range(ENDS + 1, ENDS + 1 + len(order))):
        raise ValueError(f"block stages are numbered 1..S, not {order}")
    empty = [stage for stage in order if not stages[stage]]
    if empty:
        raise ValueError(f"stage {empty[0]} has no replica")
    if not samples:
        return ()
    replicas = {stage: turns(stages[stage]) for stage in order}
    # The i-th turn of a peer with quota q ends at i/q, so after exactly sum(q) turns everybody has
    # had its quota.
    starters = turns([(peer, float(count)) for peer, count in quota.items() if count])
    return tuple(
        Path(
            index,
            next(starters),
            tuple(ids),
            tuple(Hop(stage, next(replicas[stage])) for stage in order),
        )
        for index, ids in enumerate(samples)
    )
