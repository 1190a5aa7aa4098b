"""One member lies, in every way it can; the honest ones go on, hold the same bits, and remember who
it was."""

import asyncio
from dataclasses import replace

import pytest
import torch

from node.averaging.reducers.quarantine import FEWEST_KNOWN, WEIGHT
from node.averaging.settings import AveragingSettings
from node.core.errors import PeerFault
from node.core.ids import RoundId
from node.identity.faults import FaultBook

REDUCERS = ("mean", "clipped-mean", "median", "trimmed-mean", "centered-clip")


class Lair:
    """The last peer of a cell owns nothing and says whatever it likes; the plan gave everybody its
    tokens."""

    def __init__(self, cell):
        self.cell = cell
        *self.honest, self.liar = cell.peers
        self.allowed = {p: cell.tokens(p) for p in cell.peers}
        self.total = sum(self.allowed.values())
        self.owners = cell.owners(self.honest)

    def request(self, peer, **changes):
        return self.cell.request(
            peer,
            owners=self.owners,
            allowed=self.allowed,
            total=self.total,
            most=self.total,
            **changes,
        )

    async def lie(self, owner, request):
        (group,) = request.groups_of(owner, 1 << 20)
        try:
            return await self.cell.exchanges(self.liar, owner, request).one(
                group, group.names, 10.0
            )
        except PeerFault as fault:
            return fault

    async def round(self, lie, **changes):
        """Run one round with the liar's request changed by `lie`.

        Returns the honest peers' outcomes, and by owner its answer to the liar.
        """
        requests = {p: self.request(p, **changes) for p in self.honest}
        owners = sorted(set(self.owners.values()))
        lies = [self.lie(o, replace(self.request(self.liar, **changes), **lie)) for o in owners]
        outcomes, answers = await asyncio.gather(self.cell.run_all(requests), asyncio.gather(*lies))
        return outcomes, dict(zip(owners, answers, strict=True))

    def counted(self, owner):
        """Faults that an owner counts against its peers: (peer, weight)."""
        return [(p, w) for p, _, w in self.cell.transports[owner].faults]


@pytest.fixture
async def lair(cell_of):
    return Lair(await cell_of(4))


def times(gradients, factor):
    return {n: g * factor for n, g in gradients.items()}


def agree(bits, outcomes):
    first, *rest = outcomes.values()
    assert not first.missing
    assert all(bits(o.fresh, first.fresh) for o in rest)
    assert all(bool(torch.isfinite(t).all()) for t in first.fresh.values())
    return first.fresh


def tokens(lair, peer, outcome):
    """Behind the parts."""
    return {part.tokens for part in lair.cell.made(peer, outcome).values()}


async def test_a_loud_one_is_left_out_and_counted_but_gets_the_parts(lair, bits, grads):
    outcomes, answers = await lair.round({"gradients": times(grads(lair.liar), 2000.0)})
    fresh = agree(bits, outcomes)
    assert bits(fresh, lair.cell.expected(lair.honest))
    for owner, answer in answers.items():
        assert set(outcomes[owner].quarantined) == {lair.liar}
        assert outcomes[owner].contributors == set(lair.honest)
        assert (tokens(lair, owner, outcomes[owner]), lair.counted(owner)) == (
            {60},
            [(lair.liar, WEIGHT)],
        )
        assert bits({n: h.tensor for n, h in answer[0].items()}, {n: fresh[n] for n in answer[0]})


async def test_a_repair_counts_the_same_offence_once(lair, bits, grads):
    p0, p1, p2 = lair.honest
    await lair.round({"gradients": times(grads(lair.liar), 2000.0)})
    held = {n: h for n, h in lair.cell.rounds[p0]._epoch(7).held.items() if h.source != p2}
    assert held
    lair.cell.rounds[p0]._epochs[7].held = held
    lair.owners = {n: o if o != p2 else p0 for n, o in lair.owners.items()}
    outcomes, _ = await lair.round(
        {"gradients": times(grads(lair.liar), 2000.0)}, round=RoundId(7, 1, 1)
    )
    assert bits(agree(bits, outcomes), lair.cell.expected(lair.honest))
    assert len(lair.cell.steps[p0]) == 2
    assert lair.counted(p0) == [(lair.liar, WEIGHT)]


async def test_more_tokens_than_it_was_given_weigh_what_it_was_given(lair, bits, grads):
    outcomes, _ = await lair.round({"gradients": times(grads(lair.liar), 2.5), "tokens": 100})
    fresh = agree(bits, outcomes)
    assert all(tokens(lair, p, o) == {100} for p, o in outcomes.items())
    expected = lair.cell.expected(lair.cell.peers)
    assert all(torch.allclose(fresh[n], expected[n], atol=1e-5) for n in expected)


@pytest.mark.parametrize("reducer", REDUCERS)
async def test_a_quiet_lie_is_bounded_and_the_honest_agree(cell_of, bits, grads, reducer):
    lair = Lair(await cell_of(4, AveragingSettings(reducer=reducer, round_timeout_s=10.0)))
    truth, _ = await lair.round({})
    lied, _ = await lair.round({"gradients": times(grads(lair.liar), -1.0)}, round=RoundId(8, 1, 0))
    there = agree(bits, truth)
    here = agree(bits, lied)
    moved = sum(float((here[n] - there[n]).square().sum()) for n in here) ** 0.5
    given = sum(float(g.square().sum()) for g in grads(lair.liar).values()) ** 0.5 / 40
    assert 0 < moved <= 0.1 * 2 * given, (
        "a step is a tenth of the mean, the lie at most two of its contributions"
    )


async def test_offences_add_up_to_a_ban(lair, bits, grads):
    book = FaultBook()
    bans = []
    for epoch in range(6):
        await lair.round(
            {"gradients": times(grads(lair.liar), 2000.0)}, round=RoundId(7 + epoch, 1, 0)
        )
        peer, weight = lair.counted(lair.honest[0])[-1]
        assert len(lair.counted(lair.honest[0])) == epoch + 1
        bans.append(book.count(peer, weight, now=10.0 * epoch))
    assert [b > 0 for b in bans] == [False] * 5 + [True]
    assert book.banned(lair.liar, 50.0)
    assert not any(book.banned(p, 50.0) for p in lair.honest)


async def test_of_two_the_loud_one_is_known_by_the_epochs_before(cell_of, bits, grads):
    lair = Lair(await cell_of(2))
    (honest,) = lair.honest
    loud = {"gradients": times(grads(lair.liar), 2000.0)}
    for epoch in range(FEWEST_KNOWN):
        outcomes, _ = await lair.round({}, round=RoundId(7 + epoch, 1, 0))
        assert not outcomes[honest].quarantined
    outcomes, _ = await lair.round(loud, round=RoundId(20, 1, 0))
    assert set(outcomes[honest].quarantined) == {lair.liar}
    assert bits(outcomes[honest].fresh, lair.cell.expected([honest]))
    lair.cell.rounds[honest].void(7)
    outcomes, _ = await lair.round(loud, round=RoundId(20, 2, 0))
    assert not outcomes[honest].quarantined, "what was undone is nothing to go by"


async def test_an_owner_quarantines_its_own_oversized_contribution(lair, bits, grads):
    owner = lair.honest[0]
    requests = {p: lair.request(p) for p in lair.cell.peers}
    requests[owner] = replace(requests[owner], gradients=times(grads(owner), 3000.0))
    outcomes = await lair.cell.run_all(requests)
    agree(bits, outcomes)
    assert (set(outcomes[owner].quarantined), lair.counted(owner)) == ({owner}, [])


async def test_too_few_contributions_for_the_reducer_reported_once(cell_of, bits):
    cell = await cell_of(2, AveragingSettings(reducer="median", round_timeout_s=10.0))
    said = []
    for service in cell.rounds.values():
        service._say = lambda kind, text, level: said.append((kind, text))
    for epoch in (7, 8):
        outcomes = await cell.run_all(
            {p: cell.request(p, round=RoundId(epoch, 1, 0)) for p in cell.peers}
        )
        assert bits(agree(bits, outcomes), cell.expected(cell.peers))
    assert [kind for kind, _ in said] == ["reducer-fell-back"] * 2, "once at each owner"
    assert "median" in said[0][1]
