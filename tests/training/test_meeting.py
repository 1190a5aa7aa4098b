"""Cells of one stage that meet in windows: real exchanges, real parameters, made-up gradients."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from node.averaging.strategies.diloco import OuterState, outer_step, pseudo_gradient
from node.averaging.strategies.keys import server_of
from node.averaging.strategies.outer import OuterSettings, pieces
from node.checkpoint.state import StateKind
from node.core.ids import CellId
from node.core.journey import Host, Partner, Plan, Version, Window
from node.epoch.plan_context import makes
from node.outer import merging, window
from tests.training.conftest import SHAPES, Peer, Rig

PARAMETERS = OuterSettings("butterfly", window_s=60.0)
DELTAS = OuterSettings("butterfly", "deltas", "nesterov", momentum=0.8, window_s=60.0)
STATE = replace(DELTAS, strategy="gossip", carries="state")
WITHIN_S = 60.0
"""Bound in s of the waits in a window; nobody dies here, so none is reached."""


class Cells:
    """Cells of stage 1 that train and meet all with all; the first peer of each owns everything.
    `last`: the latest finished plan of each cell."""

    def __init__(self, rig: Rig, *cells: Sequence[Peer]) -> None:
        self.rig = rig
        self.cells = cells
        self.last: list[Plan | None] = [None for _ in cells]

    @property
    def everybody(self) -> list[Peer]:
        return [p for cell in self.cells for p in cell]

    def partners(self, of: int) -> tuple[Partner, ...]:
        return tuple(
            Partner(_name(i), cell[0].me, {1: tuple(Host(p.me) for p in cell)})
            for i, cell in enumerate(self.cells)
            if i != of
        )

    def plan(self, i: int, said: Window, *, outer: int = 0) -> Plan:
        cell = self.cells[i]
        return self.rig.plan(
            cell,
            dict.fromkeys(SHAPES, cell[0]),
            self.last[i],
            cell_id=_name(i),
            window=said,
            outer=outer,
            **{"paths": ()} if outer else {},
        )

    async def train(self) -> None:
        """Train every cell for an epoch, by plans without a window."""
        for i, cell in enumerate(self.cells):
            self.last[i] = await self.rig.epoch(self.plan(i, Window()), *cell)

    async def give(self, number: int) -> list[dict[str, Tensor]]:
        """Let every cell give its parameters and train for an epoch meanwhile; returns the
        parameters given."""
        given = [cell[0].parameters() for cell in self.cells]
        for i, cell in enumerate(self.cells):
            self.last[i] = self.plan(i, Window(number, self.partners(i), WITHIN_S))
            await self.rig.begin(self.last[i], *cell)
        for cell, plan in zip(self.cells, self.last, strict=True):
            await self.rig.averaged(plan, *cell)
        await asyncio.gather(*(p.work.windows._meeting.task for p in self.everybody))
        assert {p.work.windows.mean[0] for p in self.everybody} == {number}
        return given

    def landing(self, i: int, number: int) -> Plan:
        """Plan of the outer round that puts the window's mean in place."""
        _, digest = self.cells[i][0].work.windows.mean
        return self.plan(i, Window(0, self.partners(i), means={1: digest}), outer=number)

    async def land(self, number: int) -> None:
        for i, cell in enumerate(self.cells):
            self.last[i] = await self.rig.epoch(self.landing(i, number), *cell)

    async def meet(self, number: int) -> None:
        await self.give(number)
        await self.land(number)


def _name(i: int) -> CellId:
    return CellId("abcdef"[i] * 16)


def mean(of: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {n: torch.stack([t[n] for t in of]).mean(0) for n in SHAPES}


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "AGAIN_S", 0.01)


async def two_and_one(rig: Rig, outer: OuterSettings, every: int = 0) -> Cells:
    """A cell of two and a cell of one under these settings, after an epoch of gradients."""
    rig.outer = outer
    rig.deadline_s = WITHIN_S
    a, b, c = await rig.add("a", "b", "c", every=every)
    cells = Cells(rig, [a, b], [c])
    await cells.train()
    return cells


async def test_cells_keep_what_they_learned_while_a_mean_was_made(rig: Rig) -> None:
    cells = await two_and_one(rig, PARAMETERS)
    a, b, c = cells.everybody
    given = await cells.give(7)
    version, found = a.work.describe(1, StateKind.SNAPSHOT, 7, "")
    assert version == Version(7)
    assert all(torch.equal(found[n], given[0][n]) for n in SHAPES), "as when the window began"
    assert a.work.describe(1, StateKind.SNAPSHOT, 6, "") is None
    learned = [p.parameters() for p in (a, c)]
    await cells.land(7)
    for p, here, was in zip((a, c), learned, given, strict=True):
        close(p.parameters(), {n: here[n] + mean(given)[n] - was[n] for n in SHAPES})
    assert a.work.stage.digest == b.work.stage.digest != c.work.stage.digest
    news = a.work.windows.news
    assert (news.number, news.cells, news.peers) == (7, 2, 2)
    assert news.nbytes + b.work.windows.news.nbytes > 0


@pytest.mark.parametrize("settings", [DELTAS, STATE], ids=lambda s: s.carries)
async def test_diloco_makes_equal_outer_steps_and_keeps_its_momentum(
    rig: Rig, settings: OuterSettings
) -> None:
    rig.outer = settings
    rig.deadline_s = WITHIN_S
    a, b, c = await rig.add("a", "b", "c")
    cells = Cells(rig, [a, b], [c])
    state = OuterState.begin(a.parameters())
    for number in (7, 8):
        await cells.train()
        given = await cells.give(number)
        state = outer_step(
            state, mean([pseudo_gradient(state, local) for local in given]), settings
        )
        await cells.land(number)
        for p in cells.everybody:
            close(p.anchored.anchor, state.anchor)
            close(p.anchored.momentum, state.momentum)
    for p in cells.everybody:
        p.work.anchor.names_itself()
    names = {p.work.anchor.name for p in cells.everybody}
    assert len(names) == 1, "what differs would be copied from each other"
    assert bool(names.pop()) is (settings is DELTAS)


async def test_a_window_steps_its_fragment_and_leaves_cells_the_rest(rig: Rig) -> None:
    cells = await two_and_one(rig, replace(DELTAS, fragments=2))
    a, _, c = cells.everybody
    begun = a.anchored
    carried = a.work.rounds.carried(7, 2)
    assert carried.keys() in pieces({n: t.nbytes for n, t in a.parameters().items()}, 2)
    await cells.give(7)
    before = [p.parameters() for p in (a, c)]
    await cells.land(7)
    for name in SHAPES:
        stays = name not in carried
        for p, was in zip((a, c), before, strict=True):
            assert torch.equal(p.parameters()[name], was[name]) is stays
            assert torch.equal(p.anchored.anchor[name], begun.anchor[name]) is stays
        assert torch.equal(a.anchored.anchor[name], c.anchored.anchor[name])
    await cells.train()
    await cells.meet(8)
    assert not any(torch.equal(a.anchored.anchor[n], begun.anchor[n]) for n in SHAPES)


async def test_an_undone_landing_lands_again_with_equal_bits(rig: Rig) -> None:
    cells = await two_and_one(rig, replace(DELTAS, codec="int8", feedback=True))
    a = cells.everybody[0]
    await cells.give(7)
    before = a.anchored
    owed = dict(a.work.anchor.words)
    done = list(cells.last)
    await cells.land(7)
    after = a.anchored
    digest = a.work.stage.digest
    words = a.work.anchor.words
    assert after is not before
    assert words.keys() == set(SHAPES)
    cells.last = done
    for i, cell in enumerate(cells.cells):
        await rig.begin(cells.landing(i, 7), *cell)
    assert a.anchored is before
    assert a.work.anchor.words == owed
    cells.last = done
    await cells.land(7)
    assert a.work.stage.digest == digest
    assert all(torch.equal(a.anchored.anchor[n], after.anchor[n]) for n in SHAPES)


async def test_an_anchor_that_came_with_a_copy_goes_with_the_version_that_was_given_up(
    rig: Rig,
) -> None:
    cells = await two_and_one(rig, DELTAS)
    a, b, _ = cells.everybody
    await cells.give(7)
    before = b.anchored
    plan = cells.landing(0, 7)
    await rig.begin(plan, a, b)
    await rig.averaged(plan, a)
    r = rig.round(plan, 1, sources=(a.me,), digest=a.work.stage.digest)
    assert not (await b.work.copy(plan, r)).missing
    assert b.anchored is not before
    again = cells.landing(0, 7)
    await rig.begin(again, a, b)
    assert b.anchored is before, "the copied version was not put in place"
    await rig.averaged(again, a, b)
    assert a.work.stage.digest == b.work.stage.digest
    assert all(torch.equal(b.anchored.anchor[n], a.anchored.anchor[n]) for n in SHAPES)


@pytest.mark.parametrize("codec", ["top-k", "int4"])
async def test_with_feedback_no_cells_change_is_lost(
    rig: Rig, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(DELTAS, optimizer="sgd", lr=1.0, momentum=0.0, codec=codec, feedback=True)
    cells = await two_and_one(rig, settings)
    a, b, c = cells.everybody
    monkeypatch.setattr(merging, "FADES", 1.0)
    begun = a.anchored.anchor
    moved = {n: torch.zeros(of) for n, of in SHAPES.items()}
    for number in range(1, 4):
        anchor = a.anchored.anchor
        given = await cells.give(number)
        moved = {n: moved[n] + anchor[n] - mean(given)[n] for n in SHAPES}
        await cells.land(number)
    assert all(torch.equal(a.work.anchor.words[n], t) for n, t in _words(b).items())
    for n in SHAPES:
        owed = (_words(a)[n] + _words(c)[n]) / 2
        came = begun[n] - a.anchored.anchor[n]
        torch.testing.assert_close(came + owed, moved[n], rtol=1e-4, atol=1e-5)


def _words(p: Peer) -> dict[str, Tensor]:
    return p.work.anchor.words


async def test_a_peer_that_has_no_anchor_copies_the_result_and_has_one_then(rig: Rig) -> None:
    cells = await two_and_one(rig, replace(DELTAS, codec="int8", feedback=True))
    a, b, _ = cells.everybody
    await cells.give(7)
    (joins,) = await rig.add("joins")
    plan = replace(
        cells.landing(0, 7),
        members=rig.plan([a, b], {}, cells.last[0], listeners=[joins]).members,
    )
    await rig.begin(plan, a, b, joins)
    assert joins.work.anchor.state is None
    ended = await rig.average(plan, a, b, joins)
    assert [bool(e.missing) for e in ended] == [False, False, True]
    r = rig.round(plan, 1, sources=(a.me, b.me), digest=a.work.stage.digest)
    assert not (await joins.work.copy(plan, r)).missing
    await joins.work.adopt(plan)
    assert joins.work.stage.digest == a.work.stage.digest
    assert all(torch.equal(joins.anchored.momentum[n], a.anchored.momentum[n]) for n in SHAPES)
    assert all(torch.equal(_words(joins)[n], _words(a)[n]) for n in SHAPES)


async def test_a_replica_that_fetches_its_parameters_in_a_window_copies_the_result(
    rig: Rig,
) -> None:
    cells = await two_and_one(rig, DELTAS)
    a, b, _ = cells.everybody
    await cells.give(7)
    stage = a.work.stage
    await b.work.fetch_base(stage.version, [a.me], stage.digest, WITHIN_S)
    assert b.work.anchor.state is None
    assert b.work.windows.mean == (0, "")
    plan = cells.landing(0, 7)
    await rig.begin(plan, a, b)
    ended = await rig.average(plan, a, b)
    assert [bool(e.missing) for e in ended] == [False, True]
    r = rig.round(plan, 1, sources=(a.me,), digest=stage.digest)
    assert not (await b.work.copy(plan, r)).missing
    await b.work.adopt(plan)
    assert all(torch.equal(b.anchored.anchor[n], a.anchored.anchor[n]) for n in SHAPES)


async def test_a_checkpoint_restores_anchor_and_rounding_errors(rig: Rig) -> None:
    cells = await two_and_one(rig, replace(DELTAS, codec="int8", feedback=True), every=1)
    c = cells.everybody[-1]
    await rig.copied(c)  # one at a time is written, and none waits
    await cells.give(7)
    await rig.copied(c)
    await cells.land(7)
    await rig.copied(c)
    version = makes(cells.last[1], ())
    state = c.anchored
    words = _words(c)
    assert words.keys() == set(SHAPES)
    await cells.train()
    await rig.copied(c)
    assert version in c.work.local_checkpoints.versions()
    c.work.anchor.forget()
    await c.work.restore(version)
    assert c.work.stage.version == version
    assert c.work.windows.mean == (0, ""), "the window belongs to other parameters"
    assert all(torch.equal(c.anchored.anchor[n], state.anchor[n]) for n in SHAPES)
    assert all(torch.equal(c.anchored.momentum[n], state.momentum[n]) for n in SHAPES)
    assert all(torch.equal(_words(c)[n], words[n]) for n in SHAPES)


async def test_a_change_of_the_owner_ends_anchors_or_begins_them(rig: Rig) -> None:
    cells = await two_and_one(rig, PARAMETERS)
    assert cells.everybody[0].work.anchor.state is None
    begins = [p.parameters() for p in cells.everybody]
    for i, cell in enumerate(cells.cells):
        said = Window(7, cells.partners(i), WITHIN_S)
        await rig.begin(replace(cells.plan(i, said), change="deltas"), *cell)
    await asyncio.gather(*(p.work.windows._meeting.task for p in cells.everybody))
    for p, begun in zip(cells.everybody, begins, strict=True):
        assert all(torch.equal(p.anchored.anchor[n], begun[n]) for n in SHAPES)
    for i, cell in enumerate(cells.cells):
        await rig.begin(cells.plan(i, Window()), *cell)
    assert all(p.work.anchor.state is None for p in cells.everybody)


async def test_a_change_of_the_owner_ends_the_window_under_way(rig: Rig) -> None:
    cells = await two_and_one(rig, PARAMETERS)
    *_, c = cells.everybody
    plan = replace(cells.plan(1, Window(7, cells.partners(1), WITHIN_S)), change="deltas")
    await rig.begin(plan, c)
    meeting = c.work.windows._meeting.task
    await rig.begin(cells.plan(1, Window()), c)
    await asyncio.wait([meeting])
    assert meeting.cancelled()
    assert c.work.windows._meeting is None


@pytest.mark.parametrize(
    "settings",
    [
        replace(PARAMETERS, strategy="parameter-server"),
        replace(DELTAS, strategy="parameter-server"),
        OuterSettings("hogwild", "deltas", "sgd", lr=1.0, momentum=0.0, window_s=60.0),
    ],
    ids=lambda s: f"{s.strategy}-{s.carries}",
)
async def test_one_cell_makes_the_mean_and_the_others_take_it(
    rig: Rig, settings: OuterSettings
) -> None:
    rig.outer = settings
    rig.deadline_s = WITHIN_S
    peers = await rig.add("a", "b", "c")
    cells = Cells(rig, *([p] for p in peers))
    server = server_of(1, [_name(i) for i in range(3)], settings.shards)
    for number in (1, 2):
        await cells.train()
        given = await cells.give(number)
        meetings = [p.work.windows._meeting for p in peers]
        assert [m.server is None for m in meetings] == [_name(i) == server for i in range(3)]
        before = [p.parameters() for p in peers]
        made = [m.mean.tensors for m in meetings]
        assert len({p.work.windows.mean for p in peers}) == 1, "all have the server's bits"
        await cells.land(number)
        for p, was, gave, mean_ in zip(peers, before, given, made, strict=True):
            close(p.parameters(), {n: was[n] + (mean_[n] - gave[n]) for n in SHAPES})
        if settings.carries == "parameters":
            close({n: made[0][n] for n in SHAPES}, mean(given))  # type: ignore[index]
