"""Whole rounds over real gRPC between peers of one process."""

import asyncio

import pytest
import torch

from node.averaging.reducers.reducer import beyond_format, norms_of
from node.averaging.settings import AveragingSettings
from node.core.ids import RoundId
from tests.averaging.conftest import SHAPES, stepped, with_peers
from tests.transport.conftest import until


@pytest.mark.parametrize("count", [1, 3, 5])
async def test_everybody_holds_the_same_weighted_mean_step(cell_of, bits, count):
    cell = await cell_of(count)
    outcomes = await cell.run_all({p: cell.request(p) for p in reversed(cell.peers)})
    for peer, outcome in outcomes.items():
        assert bits(outcome.fresh, cell.expected(cell.peers))
        assert not outcome.missing
        assert not outcome.failed
        assert outcome.contributors == set(cell.peers)
        total = sum(map(cell.tokens, cell.peers))
        assert all(part.tokens == total for part in cell.made(peer, outcome).values())
        stepped = {n for names in cell.steps[peer] for n in names}
        assert stepped == {n for n, o in cell.owners().items() if o == peer}
    assert all(len(steps) <= 1 for steps in cell.steps.values())


@pytest.mark.parametrize("reducer", ["mean", "clipped-mean"])
async def test_the_wire_rounds_the_owners_own_gradients_too(cell_of, bits, reducer):
    results = []
    for shift in (0, 1):
        cell = await cell_of(
            3, AveragingSettings(wire="bf16", round_timeout_s=10.0, reducer=reducer, clip=1.0)
        )
        owners = {n: cell.peers[(i + shift) % 3] for i, n in enumerate(sorted(cell.owners()))}
        outcomes = await cell.run_all({p: cell.request(p, owners=owners) for p in cell.peers})
        assert all(bits(o.fresh, outcomes[cell.peers[0]].fresh) for o in outcomes.values())
        results.append(outcomes[cell.peers[0]].fresh)
    assert bits(*results)
    exact = cell.expected(cell.peers)
    assert reducer != "mean" or all(
        torch.allclose(results[0][n], exact[n], atol=1e-2) for n in exact
    )
    assert not bits(results[0], exact)


async def test_a_late_listener_and_a_duplicate_get_the_same_bytes(cell_of, bits):
    cell, p0, p1, p2 = await with_peers(cell_of(3))
    changes = {"listeners": frozenset({p2}), "owners": cell.owners([p0, p1])}
    first = await cell.run_all({p: cell.request(p, **changes) for p in (p0, p1)})
    steps = {p: list(s) for p, s in cell.steps.items()}
    late = await cell.run(cell.request(p2, gradients=None, tokens=0, **changes), p2)
    assert bits(late.fresh, first[p0].fresh)
    again = await cell.run_all(
        {p: cell.request(p, round=RoundId(7, 1, 1), **changes) for p in (p0, p1)}
    )
    assert bits(again[p1].fresh, first[p0].fresh)
    assert cell.steps == steps, "a part was stepped twice in its epoch"


async def test_members_may_be_faster_than_the_owner(cell_of, bits):
    cell, p0, p1, p2 = await with_peers(cell_of(3))
    early = [asyncio.ensure_future(cell.run(cell.request(p), p)) for p in (p1, p2)]
    await until(lambda: len(cell.rounds[p0]._lines) == 2, 10)
    assert not any(line.orders.qsize() for line in cell.rounds[p0]._lines.values())
    outcomes = [await cell.run(cell.request(p0), p0), *await asyncio.gather(*early)]
    assert all(bits(o.fresh, cell.expected(cell.peers)) for o in outcomes)


async def test_a_dead_owner_is_replaced_by_a_repair(cell_of, bits):
    cell = await cell_of(4)
    *alive, dead = cell.peers
    await cell.net.kill(dead)
    requests = {p: cell.request(p, deadline_s=100.0) for p in alive}
    first = await asyncio.wait_for(cell.run_all(requests), 20.0)
    lost = sorted(n for n, o in cell.owners().items() if o == dead)
    for outcome in first.values():
        assert list(outcome.missing) == lost
        assert set(outcome.failed) == {dead}
        assert bits(outcome.fresh, {n: t for n, t in cell.expected(alive).items() if n not in lost})
    repaired = {n: o if o != dead else alive[1] for n, o in cell.owners().items()}
    second = await cell.run_all({p: cell.repair(p, alive, repaired) for p in alive})
    assert all(not o.missing for o in second.values())
    assert all(bits(o.fresh, cell.expected(alive)) for o in second.values())
    assert cell.steps[alive[1]][-1] == tuple(lost), "only the orphans may be stepped in a repair"
    assert all(o.nbytes < f.nbytes for o, f in zip(second.values(), first.values(), strict=True))


async def test_an_exchange_whose_connection_is_closed_has_failed(cell_of):
    cell, p0, p1 = await with_peers(cell_of(2))
    cell.net.mute(p1)
    running = asyncio.ensure_future(cell.run(cell.request(p0, deadline_s=100.0), p0))
    channel = await cell.transports[p0].channel(p1)
    await until(lambda: channel._open, 10)
    await channel.close()
    assert (await running).failed == {p1: "its connection was closed"}


async def test_after_a_repair_every_part_names_its_own_contributors(cell_of, bits):
    cell, p0, p1, p2, late = await with_peers(cell_of(4))
    p1_owns = {"d.weight", "e.weight"}
    owners = {n: p1 if n in p1_owns else p0 for n in cell.owners()}

    def broken(means):
        raise RuntimeError("out of memory")

    changes = {"members": (p0, p1, p2, late), "listeners": frozenset({late}), "owners": owners}
    failing = cell.rounds[p1].run_round(cell.request(p1, **changes), broken)
    await asyncio.gather(failing, *(cell.run(cell.request(p, **changes), p) for p in (p0, p2)))
    # One answer now has two means: the part that p0 made with p1, and those it makes without p1.
    again = {"listeners": frozenset({late})}
    alone = dict.fromkeys(owners, p0)
    requests = {p: cell.repair(p, [p0, p2, late], alone, **again) for p in (p0, p2)}
    requests[late] = cell.repair(late, [p0, p2, late], alone, gradients=None, tokens=0, **again)
    outcomes = await cell.run_all(requests)
    for peer, outcome in outcomes.items():
        for name, part in cell.made(peer, outcome).items():
            by = (p0, p2) if name in p1_owns else (p0, p1, p2)
            assert (part.contributors, part.tokens) == (by, sum(map(cell.tokens, by)))
            assert bits({name: outcome.fresh[name]}, cell.expected(list(by), [name]))


async def test_a_mean_that_cannot_be_sent_back_fails_the_round_only(cell_of):
    cell, p0, p1 = await with_peers(
        cell_of(2, AveragingSettings(round_timeout_s=10.0, max_gradient_norm=1e9))
    )
    changes = {
        "owners": dict.fromkeys(SHAPES, p0),
        "down": "fp16",
        # Fit, and more than fp16 has.
        "gradients": {n: torch.full(s, 1e7) for n, s in SHAPES.items()},
    }
    mine, theirs = (
        cell.rounds[p].run_round(cell.request(p, **changes), lambda means: means) for p in (p0, p1)
    )
    for outcome in await asyncio.gather(mine, theirs):
        assert "the owner's step failed" in outcome.failed[p0]
        assert "not finite" in outcome.failed[p0]
    assert cell.errors == []


async def test_a_member_whose_sums_fp16_cannot_hold_listens(cell_of, bits):
    cell, p0, p1 = await with_peers(
        cell_of(2, AveragingSettings(round_timeout_s=10.0, max_gradient_norm=1e9))
    )
    changes = {"owners": cell.owners([p0]), "up": "fp16"}
    large = {n: torch.full(s, 1e6) for n, s in SHAPES.items()}
    mine, theirs = await asyncio.gather(
        cell.run(cell.request(p0, **changes), p0),
        cell.run(cell.request(p1, **changes, gradients=large), p1),
    )
    assert bits(mine.fresh, theirs.fresh)
    assert {part.contributors for part in cell.made(p0, mine).values()} == {(p0,)}
    assert not mine.failed
    norms = norms_of(large, SHAPES)
    assert "fp16" in beyond_format(large, norms, "fp16")
    for held in (beyond_format(large, norms, "bf16"), beyond_format({}, {"a": 6e4}, "fp16")):
        assert held == ""


async def test_sums_of_a_lone_contributor_need_not_fit_the_wire(cell_of, bits):
    """Its replica is a listener, or there is none: the sums do not travel."""
    for count in (1, 2):
        cell = await cell_of(count, AveragingSettings(round_timeout_s=10.0, max_gradient_norm=1e9))
        p0, *others = cell.peers
        large = {n: torch.full(s, 1e6) for n, s in SHAPES.items()} | {"e.weight": torch.ones(1) / 3}
        changes = {"owners": cell.owners([p0]), "listeners": frozenset(others), "gradients": large}
        outcomes = await cell.run_all(
            {p: cell.request(p, up="fp16", **changes) for p in cell.peers}
        )
        rounded = large | {"e.weight": large["e.weight"].half().float()}
        for outcome in outcomes.values():
            assert not outcome.failed
            assert not outcome.refused
            assert bits(outcome.fresh, {n: stepped(n, g / 10) for n, g in rounded.items()})


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
async def test_without_a_step_the_means_are_the_result_to_the_bit(cell_of, bits, codec):
    """The same contributions pass through a step that changes nothing, and through no step:
    rounding and messages on the way are the same."""
    results = []
    for step in (None, lambda means: means):
        cell = await cell_of(3)
        rounds = [
            cell.rounds[p].run_round(cell.request(p, up=codec, down=codec), step)
            for p in cell.peers
        ]
        outcomes = await asyncio.gather(*rounds)
        assert all(not o.missing and bits(o.fresh, outcomes[0].fresh) for o in outcomes)
        assert not any(
            g
            for rounds in cell.rounds.values()
            for e in rounds._epochs.values()
            for a in e.attempts.values()
            for g in a.given
        )
        results.append(outcomes[0].fresh)
    assert bits(*results)


async def test_requests_that_contradict_themselves_are_ours_to_fix(cell_of, grads):
    cell, p0, p1 = await with_peers(cell_of(2))
    wrong = grads(p0) | {"a.weight": torch.zeros(4, 6)}
    for changes in (
        {"members": (p1,)},
        {"owners": {"a.weight": p0}},
        {"gradients": wrong},
        {"members": (p0,)},
    ):
        with pytest.raises(ValueError, match="member|owner|gradients|round"):
            await cell.run(cell.request(p0, **changes), p0)


async def test_an_epoch_the_swarm_went_back_to_is_averaged_anew(cell_of, bits, grads):
    cell, p0, p1 = await with_peers(cell_of(2))
    await cell.run_all({p: cell.request(p) for p in cell.peers})
    for peer in cell.peers:
        with pytest.raises(ValueError, match="not newer"):
            await cell.run(cell.request(peer), peer)
        cell.rounds[peer].forget(9)
        with pytest.raises(ValueError, match="over"):
            await cell.run(cell.request(peer), peer)
        cell.rounds[peer].void(7)
    outcomes = await cell.run_all(
        {
            p: cell.request(
                p, round=RoundId(7, 2, 0), gradients={n: 2 * g for n, g in grads(p).items()}
            )
            for p in cell.peers
        }
    )
    assert all(not o.missing and not o.failed for o in outcomes.values())
    assert bits(outcomes[p0].fresh, outcomes[p1].fresh)
    assert not bits(outcomes[p0].fresh, cell.expected(cell.peers)), (
        "what was stepped before does not count"
    )
