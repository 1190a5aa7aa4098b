"""Paths that change the order of stages, and leave some out, through whole pipelines: the same
numbers as that order in one process."""

from dataclasses import replace

import pytest

from node.core.ids import PeerId
from node.core.journey import Hop
from node.pipeline.events import Direction, Settled
from tests.pipeline.conftest import dies_at

WAYS = ((2, 1, 3), (1, 3, 2), (3, 2), (2, 1), (1, 2, 3), (3, 1, 2))


@pytest.fixture
async def swarm(make_swarm):
    return await make_swarm(may_skip=0.34).fill(replicas=2)


def reordered(swarm, ways):
    """A plan in which micro-batch i visits the stages ways[i], replicas in turns."""
    plan = swarm.plan(len(ways))
    return replace(
        plan,
        paths=tuple(
            replace(
                path,
                hops=tuple(Hop(s, PeerId(f"s{s}{'ab'[(path.index + s) % 2]}")) for s in order),
            )
            for path, order in zip(plan.paths, ways, strict=True)
        ),
    )


async def test_any_order_computes_what_it_computes_in_one_process(swarm):
    plan = swarm.adopt(reordered(swarm, WAYS))
    done = await swarm.run(plan)
    assert all(r.counted and r.tokens == 32 for r in done.values())
    await swarm.check(plan)
    assert all(not ear.events for ear in swarm.ears.values()), {
        n: e.events for n, e in swarm.ears.items()
    }
    assert all(room.stash.used == 0 for room in swarm.pipelines.values())
    # The order matters to the numbers: in rising order they are others.
    rising = replace(
        plan,
        paths=tuple(
            replace(p, hops=tuple(sorted(p.hops, key=lambda h: h.stage))) for p in plan.paths
        ),
    )
    assert swarm.reference(rising)[1] != pytest.approx(swarm.reference(plan)[1], rel=1e-6)


async def test_a_replica_lost_in_backward_is_replaced_in_any_order(swarm):
    plan = swarm.adopt(reordered(swarm, WAYS))
    died = dies_at(swarm, "s2a", Settled, Direction.FORWARD, 1)
    await swarm.run(plan, counted=True)
    assert died.is_set()
    await swarm.check(plan, (2,))


@pytest.mark.parametrize("gone", [1, 2, 3])
async def test_a_stage_that_is_gone_is_left_out_of_any_order(swarm, gone):
    plan = swarm.adopt(reordered(swarm, ((2, 1, 3), (3, 1, 2), (1, 2, 3))))
    await swarm.kill(f"s{gone}a", f"s{gone}b")
    await swarm.run(plan, counted=True)
    assert sum(e.events.count("hop-skipped") for e in swarm.ears.values()) == 3
    left = replace(
        plan,
        paths=tuple(
            replace(p, hops=tuple(h for h in p.hops if h.stage != gone)) for p in plan.paths
        ),
    )
    await swarm.check(left)
