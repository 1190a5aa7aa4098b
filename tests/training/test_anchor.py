"""The anchor of a stage: the version that it belongs to, its parts on the disk and for others."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from node.averaging.strategies.diloco import OuterState
from node.averaging.strategies.outer import OuterSettings
from node.checkpoint.errors import NOT_HELD, NoDonor
from node.checkpoint.state import StateKind, StateSnapshot
from node.core.ids import PeerId
from node.core.journey import Plan, PlanMember, Version
from node.core.tasks import Tasks
from node.outer.anchor import SAVED, Anchor
from node.outer.merging import MOMENTUM, STEP, TAKEN, WORDS
from node.stage.state import StageState
from node.telemetry.events import Journal

DELTAS = OuterSettings("butterfly", "deltas", "nesterov", window_s=60.0)
FEEDBACK = replace(DELTAS, codec="int8", feedback=True)
STATE = replace(DELTAS, strategy="gossip", carries="state")
PARAMETERS = OuterSettings("butterfly", window_s=60.0)
ME = PeerId("me")
MATE = PeerId("mate")
BEGUN = Version(0)
NONE_HERE = f"answered NOT_FOUND: {NOT_HELD}"
"""The reason with which a fetch fails at a replica that has no anchor."""
NEXT = Version(1, "b" * 32)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))


def filled(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((3,), value)}


class Scene:
    """An anchor, and the stage that it belongs to. ``gives``: the answer of other replicas that
    are asked for their anchor; None: none of them gives one, for the reasons ``why``. They answer
    once ``answered`` is set."""

    def __init__(self, settings: OuterSettings = DELTAS) -> None:
        self.stage = StageState(Layer(), 1)
        self.journal = Journal()
        self.asked: list[tuple[list[PeerId], Version, set[str]]] = []
        self.answered = asyncio.Event()
        self.gives: dict[str, Tensor] | None = None
        self.why: dict[PeerId, str] = {}
        engines: Any = SimpleNamespace(fetch=self.fetch, journal=self.journal, aside=self.aside)
        self.anchor = Anchor(self.stage, settings, engines, Tasks("test"), ME)

    async def aside(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)

    async def fetch(
        self,
        donors: Sequence[PeerId],
        stage: int,
        kind: StateKind,
        version: Version,
        shapes: Mapping[str, Sequence[int]],
    ) -> StateSnapshot:
        assert (stage, kind) == (1, StateKind.OUTER)
        self.asked.append((list(donors), version, set(shapes)))
        await self.answered.wait()
        if self.gives is None:
            raise NoDonor("its anchor", self.why)
        return StateSnapshot(version, self.gives, {})

    def lands(self, value: float, version: Version = NEXT, **more: Any) -> None:
        """The result of a window becomes the anchor, then the parameters in place."""
        mean = {**filled(value), "w" + MOMENTUM: torch.full((3,), -value), **more}
        self.anchor.takes(mean, None)
        self.stage.adopt(filled(value), version)

    @property
    def at(self) -> float | None:
        """The number in the anchor; None without one."""
        state = self.anchor.state
        if state is None:
            return None
        return float(state.anchor["w"][0])


FETCHED = {
    "w/anchor": torch.full((3,), 7.0),
    "w/momentum": torch.full((3,), 8.0),
    f"w/{WORDS}": torch.full((3,), 9.0),
}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [(DELTAS, True), (STATE, True), (PARAMETERS, False), (replace(DELTAS, window_s=0.0), False)],
    ids=["deltas", "state", "parameters", "one-cell"],
)
def test_a_run_of_differences_between_cells_has_an_anchor(
    settings: OuterSettings, kept: bool
) -> None:
    scene = Scene(settings)
    assert (scene.at is not None) is kept
    scene.anchor.forget()
    assert scene.anchor.lacking is kept
    scene.anchor.begin()
    assert (scene.at is not None) is kept


def test_an_anchor_is_named_where_it_must_be_equal_in_all_cells() -> None:
    scene = Scene()
    assert scene.anchor.name == "", "it has not been computed"
    scene.anchor.names_itself()
    first = scene.anchor.name
    scene.lands(1.0)
    assert scene.anchor.name == ""
    scene.anchor.names_itself()
    assert scene.anchor.name not in ("", first)
    twin = Scene()
    twin.anchor.names_itself()
    assert twin.anchor.name == first
    differs = Scene(STATE)
    differs.anchor.names_itself()
    assert differs.anchor.name == ""
    scene.anchor.forget()
    scene.anchor.names_itself()
    assert scene.anchor.name == ""


def test_the_anchor_of_each_version_is_described_until_it_is_final() -> None:
    scene = Scene()
    scene.lands(1.0)
    for version, at in ((NEXT, 1.0), (BEGUN, 0.0)):
        found = scene.anchor.describe(version.epoch, version.lineage)
        assert found is not None
        assert found[0] == version
        assert found[1]["w/anchor"].equal(torch.full((3,), at))
        assert found[1]["w/momentum"].equal(torch.full((3,), -at))
    assert scene.anchor.describe(2, "") is None
    assert scene.anchor.describe(1, "c" * 32) is None
    newest = scene.anchor.describe(None, "")
    assert newest is not None
    assert newest[0] == NEXT
    scene.stage.settle()
    scene.anchor.settled()
    assert scene.anchor.describe(0, "") is None
    scene.anchor.rolled_back()
    assert scene.at == 1.0, "what is final is not undone"


def test_a_version_that_is_undone_takes_its_anchor_along() -> None:
    scene = Scene()
    scene.anchor.words = filled(5.0)
    scene.lands(1.0, **{STEP: torch.tensor([3.0])})
    assert (scene.anchor.step_at(NEXT), scene.anchor.step_at(BEGUN)) == (3, 0)
    scene.anchor.takes(filled(2.0), filled(6.0))
    assert scene.anchor.words["w"][0] == 6.0
    scene.stage.roll_back()
    scene.anchor.rolled_back()
    assert (scene.at, scene.anchor.step) == (0.0, 0), "two results before the next version"
    assert scene.anchor.words["w"][0] == 5.0
    scene.lands(4.0)
    scene.anchor.rolled_back()
    assert scene.at == 0.0


def test_the_pushes_in_an_anchor_are_undone_with_it_and_forgotten_with_it() -> None:
    scene = Scene()
    taken = {STEP: torch.tensor([4.0]), TAKEN: torch.tensor([7.0, 0.0])}
    scene.lands(1.0, **taken)
    scene.stage.settle()
    scene.anchor.settled()
    assert scene.anchor.pushed == {7.0: 4}
    scene.lands(2.0, **{STEP: torch.tensor([5.0]), TAKEN: torch.tensor([9.0, 0.0])})
    assert scene.anchor.pushed == {7.0: 4, 9.0: 5}
    scene.anchor.rolled_back()
    assert scene.anchor.pushed == {7.0: 4}
    scene.anchor.forget()
    assert scene.anchor.pushed == {}


def test_an_anchor_that_was_forgotten_does_not_return_with_an_undone_version() -> None:
    scene = Scene()
    scene.lands(1.0)
    scene.anchor.forget()
    scene.anchor.rolled_back()
    assert scene.at is None


def test_until_the_parameters_follow_the_anchor_before_belongs_to_them() -> None:
    scene = Scene()
    scene.anchor.takes(filled(1.0), None)
    assert scene.at == 1.0
    found = scene.anchor.describe(None, "")
    assert found is not None
    assert found[1]["w/anchor"].equal(torch.zeros(3))


def test_parts_that_a_window_did_not_carry_keep_their_anchor() -> None:
    scene = Scene()
    scene.lands(1.0)
    scene.anchor.takes({}, None)
    assert scene.at == 1.0
    scene.anchor.takes({"w": torch.full((3,), 2.0)}, None)
    state = scene.anchor.state
    assert state is not None
    assert state.momentum["w"].equal(torch.zeros(3)), "the server sent none"
    scene.anchor.forget()
    scene.anchor.takes(filled(3.0), None)
    assert scene.at == 3.0, "a cell without an anchor takes the result's"


async def test_a_part_of_an_anchor_is_none_and_the_whole_is_looked_for() -> None:
    scene = Scene()
    scene.anchor.forget()
    scene.anchor.takes({}, None)
    assert scene.anchor.lacking, "the window carried another fragment"
    scene.gives = FETCHED
    scene.answered.set()
    scene.anchor.look_for(WITH_MATE)
    await scene.anchor.arrived(9.0)
    assert scene.at == 7.0


def test_a_checkpoint_has_anchor_momentum_and_feedback_of_its_version() -> None:
    scene = Scene(FEEDBACK)
    scene.lands(1.0)
    saved = scene.anchor.saved(NEXT)
    assert saved["w" + SAVED].keys() == {"anchor", "momentum"}
    assert scene.anchor.saved(BEGUN)["w" + SAVED]["anchor"].equal(torch.zeros(3))
    scene.anchor.words = filled(5.0)
    saved = scene.anchor.saved(NEXT)
    found = Scene(FEEDBACK)
    found.anchor.restored(saved, 4)
    assert (found.at, found.anchor.step) == (1.0, 4)
    assert found.anchor.words["w"].equal(torch.full((3,), 5.0))
    assert Scene(PARAMETERS).anchor.saved(BEGUN) == {}


@pytest.mark.parametrize("lacks", ["anchor", "momentum", "all"])
def test_a_checkpoint_without_a_part_of_the_anchor_restores_none(lacks: str) -> None:
    scene = Scene()
    saved = scene.anchor.saved(BEGUN)
    if lacks == "all":
        saved = {}
    else:
        del saved["w" + SAVED][lacks]
    scene.anchor.restored(saved, 4)
    assert scene.at is None
    assert scene.anchor.lacking


def test_a_checkpoint_restores_no_anchor_into_a_run_without() -> None:
    saved = Scene().anchor.saved(BEGUN)
    scene = Scene(PARAMETERS)
    scene.anchor.restored(saved, 0)
    assert scene.at is None


def test_another_format_forgets_the_error_feedback_of_the_one_before() -> None:
    scene = Scene(FEEDBACK)
    scene.anchor.words = filled(5.0)
    scene.anchor.follow(replace(FEEDBACK, mixing=0.5))
    assert scene.anchor.words.keys() == {"w"}
    scene.anchor.follow(replace(FEEDBACK, codec="int4"))
    assert (scene.anchor.words, scene.at) == ({}, 0.0)
    scene.anchor.follow(PARAMETERS)
    assert scene.at is None


def test_feedback_is_described_for_newcomers() -> None:
    scene = Scene(FEEDBACK)
    found = scene.anchor.describe(0, "")
    assert found is not None
    assert found[1][f"w/{WORDS}"].equal(torch.zeros(3)), "none is owed yet"
    scene.anchor.words = filled(5.0)
    found = scene.anchor.describe(0, "")
    assert found is not None
    assert found[1][f"w/{WORDS}"].equal(torch.full((3,), 5.0))
    plain = Scene().anchor.describe(0, "")
    assert plain is not None
    assert plain[1].keys() == {"w/anchor", "w/momentum"}


# ------------------------------------------------------------ from other replicas


def plan(*members: PlanMember) -> Plan:
    return Plan(1, 1, MATE, (PlanMember(ME, 1), *members), (), {}, lineage=NEXT.lineage)


WITH_MATE = plan(PlanMember(MATE, 1))


async def test_a_newcomer_fetches_the_anchor_while_the_epoch_runs() -> None:
    scene = Scene(FEEDBACK)
    scene.anchor.forget()
    for _ in range(2):
        scene.anchor.look_for(WITH_MATE)
        await asyncio.sleep(0)
    assert scene.asked == [([MATE], NEXT, set(FETCHED))], "it is asked for once at a time"
    scene.gives = FETCHED
    scene.answered.set()
    await scene.anchor.arrived(9.0)
    assert scene.at == 7.0
    assert scene.anchor.words["w"].equal(torch.full((3,), 9.0))
    scene.anchor.look_for(WITH_MATE)
    await asyncio.sleep(0)
    assert len(scene.asked) == 1, "it has one"


@pytest.mark.parametrize(
    "members",
    [(), (PlanMember(MATE, 2),), (PlanMember(MATE, 1, 0.0, False),)],
    ids=["alone", "of-another-stage", "a-listener"],
)
async def test_only_other_replicas_that_hold_the_version_are_asked(
    members: tuple[PlanMember, ...],
) -> None:
    scene = Scene()
    scene.anchor.forget()
    scene.anchor.look_for(plan(*members))
    await asyncio.sleep(0)
    assert scene.asked == []


async def test_nobody_waits_for_an_anchor_that_is_not_asked_for() -> None:
    await Scene().anchor.arrived(1e9)


async def test_a_replica_without_an_anchor_is_asked_again_in_the_next_epoch() -> None:
    scene = Scene()
    scene.anchor.forget()
    scene.answered.set()
    for _ in range(2):
        scene.anchor.look_for(WITH_MATE)
        await scene.anchor.arrived(9.0)
    assert len(scene.asked) == 2
    assert scene.at is None
    assert [e.kind for e in scene.journal.recent()] == ["anchor-not-here"] * 2


async def test_an_anchor_that_came_meanwhile_is_not_replaced_by_a_fetched_one() -> None:
    scene = Scene()
    scene.anchor.forget()
    scene.anchor.look_for(WITH_MATE)
    await asyncio.sleep(0)
    await scene.anchor.begin_with(filled(2.0))
    scene.gives = FETCHED
    scene.answered.set()
    await scene.anchor.arrived(9.0)
    assert scene.at == 2.0


async def test_an_anchor_that_comes_while_one_is_made_up_is_kept() -> None:
    scene = Scene()
    scene.anchor.forget()

    async def comes_meanwhile(fn: Callable[..., Any], *args: Any) -> Any:
        scene.anchor.state = OuterState.begin(filled(7.0))
        return fn(*args)

    scene.anchor._engines.aside = comes_meanwhile  # type: ignore[method-assign]
    await scene.anchor.begin_with(filled(2.0))
    assert scene.at == 7.0


OTHER = PeerId("other")


@pytest.mark.parametrize(
    ("why", "nobody"),
    [
        ({MATE: NONE_HERE, OTHER: NONE_HERE}, True),
        ({MATE: NONE_HERE, OTHER: "over its limits: all snapshots are in use"}, False),
        ({MATE: "connection lost", OTHER: "no answer in time"}, False),
        ({MATE: NONE_HERE}, False),
    ],
    ids=["all", "one-is-busy", "no-one-answers", "one-says-nothing"],
)
async def test_nobody_has_an_anchor_if_all_other_replicas_say_so(
    why: dict[PeerId, str], nobody: bool
) -> None:
    scene = Scene()
    scene.anchor.forget()
    assert scene.anchor.nobody_has_one, "there is nobody to ask"
    scene.why = why
    scene.anchor.look_for(plan(PlanMember(MATE, 1), PlanMember(OTHER, 1)))
    assert not scene.anchor.nobody_has_one, "nobody has said so yet"
    scene.answered.set()
    await scene.anchor.arrived(9.0)
    assert scene.anchor.nobody_has_one is nobody


async def test_a_replica_that_is_in_no_plan_any_more_is_not_waited_for() -> None:
    scene = Scene()
    scene.anchor.forget()
    scene.anchor.look_for(WITH_MATE)
    await asyncio.sleep(0)
    scene.anchor.look_for(plan(PlanMember(OTHER, 1)))
    await asyncio.sleep(0)
    assert [donors for donors, *_ in scene.asked] == [[MATE], [OTHER]]
    scene.anchor.look_for(plan())
    assert scene.anchor.nobody_has_one
    scene.gives = FETCHED
    scene.answered.set()
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    assert scene.at is None


@pytest.mark.parametrize("ends", ["forget", "stop", "follow"])
async def test_a_fetch_ends_with_its_reason(ends: str) -> None:
    scene = Scene()
    scene.anchor.forget()
    scene.anchor.look_for(WITH_MATE)
    await asyncio.sleep(0)
    stop = {
        "forget": scene.anchor.forget,
        "stop": scene.anchor.stop,
        "follow": lambda: scene.anchor.follow(PARAMETERS),
    }
    stop[ends]()
    scene.gives = FETCHED
    scene.answered.set()
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    assert scene.at is None


async def test_copied_parameters_come_with_their_anchor() -> None:
    scene = Scene()
    scene.anchor.words = filled(5.0)
    scene.gives = FETCHED
    scene.answered.set()
    await scene.anchor.copy([MATE], NEXT)
    assert scene.at == 7.0
    assert scene.asked == [([MATE], NEXT, {"w/anchor", "w/momentum"})]
    assert scene.anchor.words["w"][0] == 5.0, "without feedback none is sent"
    state = scene.anchor.state
    assert isinstance(state, OuterState)
    assert state.momentum["w"].equal(torch.full((3,), 8.0))
    scene.anchor.rolled_back()
    assert scene.at == 0.0
    scene.gives = None
    await scene.anchor.copy([MATE], NEXT)
    assert scene.at is None, "the one here is of other parameters"


async def test_a_copied_anchor_is_not_replaced_by_one_of_the_version_before() -> None:
    scene = Scene()
    scene.anchor.forget()
    scene.anchor.look_for(WITH_MATE)
    await asyncio.sleep(0)
    before = scene.anchor._search
    assert before is not None
    assert before.task is not None
    scene.answered.set()
    await scene.anchor.copy([MATE], NEXT)
    await asyncio.wait([before.task])
    assert before.task.cancelled()
    assert scene.at is None


async def test_without_anchors_none_is_copied() -> None:
    plain = Scene(PARAMETERS)
    await plain.anchor.copy([MATE], NEXT)
    assert plain.asked == []
