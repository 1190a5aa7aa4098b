"""A window at one member, in virtual time: the contributions that it fetches, when they are enough,
and the parameters that the mean makes."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from node.averaging.strategies.diloco import OuterState
from node.averaging.strategies.keys import server_of
from node.averaging.strategies.outer import OuterSettings
from node.checkpoint.errors import NOT_HELD, NoDonor
from node.checkpoint.state import StateKind, StateSnapshot
from node.core.errors import PeerFault
from node.core.ids import CellId, PeerId
from node.core.journey import Host, Partner, Plan, PlanMember, Version, Window
from node.core.tasks import Tasks
from node.epoch import events as ev
from node.outer.anchor import WAIT_SHARE, Anchor
from node.outer.merging import MOST_NAMED, MOST_STEPS, STEP, TAKEN
from node.outer.window import (
    AGAIN_S,
    AT_ONCE,
    OWN_SHARE,
    PATIENT,
    SOME_SHARE,
    WindowRound,
)
from node.sim.world.loop import ProcessLoop, VirtualTime, bury
from node.stage.inner_round import Rounds
from node.stage.state import StageState
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from node.wire.tensors import digest

Attempt = tuple[ev.RoundEnded, dict[str, Tensor]]
STAGE = 1
NUMBER = 4
WITHIN_S = 100.0
NONE_HERE = f"answered NOT_FOUND: {NOT_HELD}"
"""The reason with which a fetch fails at a replica that has no anchor."""
ME, MATE, OTHER = (PeerId(name) for name in ("me", "mate", "other"))
OURS, B, C, D = (CellId(letter * 16) for letter in "abcd")
PARAMETERS = OuterSettings("butterfly", window_s=60.0)
DELTAS = OuterSettings("butterfly", "deltas", "sgd", lr=1.0, momentum=0.0, window_s=60.0)
HOGWILD = replace(DELTAS, strategy="hogwild")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))


def filled(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((2,), value)}


def host(cell: CellId) -> PeerId:
    return PeerId(f"host-{cell[0]}")


def partner(cell: CellId, *stages: int) -> Partner:
    return Partner(cell, host(cell), {stage: (Host(host(cell)),) for stage in stages or (STAGE,)})


class Scene:
    """One member of stage 1 with parameters 1.0. ``gives``: the tensors that each peer gives, by
    kind, and the second from which it does; ``asked``: (second, peers, kind) of every request.
    ``stuck``: peers that send forever, without an end; ``under_way``: peers that are sending;
    ``takes_s``: seconds that every other request takes; ``anchorless``: the reason of each replica
    that gives no anchor, None while none of them answers."""

    def __init__(self, settings: OuterSettings = PARAMETERS) -> None:
        self.settings = settings
        self.number = NUMBER
        self.time = VirtualTime(0)
        self.loop = ProcessLoop(self.time)
        self.gives: dict[tuple[PeerId, StateKind], tuple[float, dict[str, Tensor]]] = {}
        self.asked: list[tuple[float, list[PeerId], StateKind]] = []
        self.stuck: set[PeerId] = set()
        self.under_way: list[PeerId] = []
        self.takes_s = 0.0
        self.anchorless: dict[PeerId, str] | None = None
        self.apart: list[str] = []
        """Names of the functions that were called aside."""
        self.faults: list[PeerId] = []
        self.journal = Journal()
        self.metrics = Metrics()
        self.stage = StageState(Layer(), STAGE)
        engines: Any = SimpleNamespace(
            fetch=self.fetch,
            aside=self.aside,
            journal=self.journal,
            metrics=self.metrics,
            transport=SimpleNamespace(fault=lambda peer, why: self.faults.append(peer)),
        )
        self.held: list[int] = []
        export: Any = SimpleNamespace(hold=self.hold)
        optimizer: Any = SimpleNamespace(name="adamw")
        parts: Any = [SimpleNamespace(name="w", bytes=8, cost=1.0)]
        self.errors: list[BaseException] = []
        """Errors of tasks, which end a daemon."""
        tasks = Tasks("test", lambda name, error: self.errors.append(error))
        rounds = Rounds(self.stage, engines, optimizer, ME, parts)
        self.anchor = Anchor(self.stage, settings, engines, tasks, ME)
        self.round = WindowRound(self.anchor, engines, export, rounds, tasks, ME)

    async def aside(self, fn: Callable[..., Any], *args: Any) -> Any:
        self.apart.append(fn.__name__)
        return fn(*args)

    async def hold(self, plan: Plan, dead: Sequence[PeerId], deadline_s: float) -> None:
        self.held.append(plan.outer)

    async def fetch(
        self,
        donors: Sequence[PeerId],
        stage: int,
        kind: StateKind,
        version: Version,
        shapes: Mapping[str, Sequence[int]],
    ) -> StateSnapshot:
        if kind is StateKind.OUTER:
            if self.anchorless is None:
                await asyncio.Event().wait()
            raise NoDonor("its anchor", self.anchorless or {})
        assert (stage, version) == (STAGE, Version(self.number))
        self.asked.append((self.time.now, list(donors), kind))
        self.under_way += donors
        try:
            if self.stuck & set(donors):
                await asyncio.Event().wait()
            await asyncio.sleep(self.takes_s)
        finally:
            for donor in donors:
                self.under_way.remove(donor)
        for donor in donors:
            at, tensors = self.gives.get((donor, kind), (float("inf"), {}))
            if self.time.now >= at:
                assert {n: tuple(t.shape) for n, t in tensors.items()} == dict(shapes)
                return StateSnapshot(version, tensors, {donor: 8})
        raise PeerFault(donors[0], "does not have it")

    def comes(
        self, cell: CellId, tensors: dict[str, Tensor], at: float = 0.0, peer: PeerId | None = None
    ) -> None:
        """The contribution of this cell can be fetched from second ``at`` on."""
        self.gives[peer or host(cell), StateKind.SNAPSHOT] = at, tensors

    def plan(self, *partners: Partner, number: int = NUMBER, **more: Any) -> Plan:
        about = {"window": Window(number, partners, WITHIN_S), "cell_id": OURS, **more}
        members = about.pop("members", (PlanMember(ME, STAGE),))
        return Plan(0, 1, ME, members, (), {}, **about)

    def begin(self, plan: Plan, listener: bool = False, settings: Any = None) -> None:
        """A plan is in force now."""

        async def run() -> None:
            self.round.begin(plan, settings or self.settings, listener)

        self.do(run())

    def do(self, coro: Any, seconds: float = 0.0) -> Any:
        """Run this at once, and the world for so many seconds."""
        done: list[Any] = []

        async def run() -> None:
            done.append(await coro)

        self.time.push(0.0, lambda: self.loop.create_task(run()), loop=self.loop)
        self.time.run(self.time.now + seconds)
        return done[0] if done else None

    def until(self, second: float) -> None:
        self.time.run(second)

    def trains(self, value: float) -> None:
        """The parameters in place are others now."""
        self.stage.adopt(filled(value), Version(self.stage.version.epoch + 1, "f" * 32))
        self.stage.settle()

    def moves(self) -> None:
        """Let a window pass in which the own training moves the parameters from 1 to 2, so that
        partners as far away are usual."""
        self.begin(self.plan(number=0))
        self.trains(2.0)

    @property
    def made(self) -> float | None:
        """The number in the mean; None while there is none."""
        found = self.round.describe(StateKind.MEAN, NUMBER)
        if found is None:
            return None
        assert found[0] == Version(NUMBER)
        return float(found[1]["w"][0])

    def attempt(self, plan: Plan, *, listens: bool = False) -> Attempt:
        arrived = ev.RoundArrived(ME, 0, 1, plan.hash, 0, (), {}, (), (), 9.0)
        return self.do(self.round.attempt(plan, arrived, listens))

    def landing(self, *partners: Partner, wanted: str | None = None, **more: Any) -> Plan:
        """Plan of the outer round that puts the mean in place."""
        said = wanted
        if said is None:
            said = self.round.mean[1]
        window = Window(0, partners, means={STAGE: said} if said else {})
        return self.plan(**{"window": window, "outer": NUMBER, **more})


@pytest.fixture(scope="module", autouse=True)
def worlds() -> Iterator[None]:
    yield
    bury()


def times(scene: Scene, peer: PeerId) -> list[float]:
    """Seconds at which this peer was asked."""
    return [at for at, peers, _ in scene.asked if peer in peers]


def test_the_mean_is_made_when_the_last_contribution_has_come() -> None:
    scene = Scene()
    scene.moves()
    scene.comes(B, filled(2.5))
    scene.comes(C, filled(3.0), at=9.5)
    scene.begin(scene.plan(partner(B), partner(C)))
    assert scene.round.mean == (0, "")
    assert scene.round.describe(StateKind.SNAPSHOT, NUMBER)[1]["w"].equal(torch.full((2,), 2.0))
    scene.until(9.0)
    assert scene.made is None
    scene.until(11.0)
    assert scene.made == 2.5
    assert scene.round.mean == (NUMBER, digest(filled(2.5)))
    assert times(scene, host(B)) == [0.0], "what is here is not fetched again"
    assert times(scene, host(C)) == [float(n) for n in range(11)]
    assert AGAIN_S == 1.0


def test_of_another_window_nothing_is_described() -> None:
    scene = Scene()
    assert scene.round.describe(StateKind.SNAPSHOT, None) is None
    scene.begin(scene.plan(partner(B)))
    scene.until(1.0)
    assert scene.round.describe(StateKind.SNAPSHOT, NUMBER) is not None
    assert scene.round.describe(StateKind.SNAPSHOT, NUMBER + 1) is None
    assert scene.round.describe(StateKind.MEAN, NUMBER) is None


def test_late_in_the_window_the_contributions_that_came_are_enough() -> None:
    scene = Scene()
    scene.moves()
    scene.comes(B, filled(3.0))
    scene.do(asyncio.sleep(50.0), 50.0)
    begun = scene.time.now
    scene.begin(scene.plan(partner(B), partner(C)))
    scene.until(begun + SOME_SHARE * WITHIN_S - 1.0)
    assert scene.made is None
    scene.until(begun + SOME_SHARE * WITHIN_S + 1.0)
    assert scene.made == 2.5


def test_without_any_contribution_there_is_no_mean() -> None:
    scene = Scene()
    scene.begin(scene.plan(partner(B)))
    scene.until(3 * WITHIN_S)
    assert scene.made is None
    assert max(times(scene, host(B))) < WITHIN_S, "the window is over"


@pytest.mark.parametrize(("quorum", "made"), [(0, False), (1, True), (2, True), (3, False)])
def test_equal_anchors_need_every_contribution_or_a_quorum(quorum: int, made: bool) -> None:
    scene = Scene(replace(DELTAS, quorum=quorum))
    scene.begin(scene.plan(number=0))
    scene.trains(2.0)
    scene.comes(B, filled(-3.0))
    scene.begin(scene.plan(partner(B), partner(C)))
    scene.until(SOME_SHARE * WITHIN_S - 1.0)
    assert scene.made is None
    scene.until(WITHIN_S)
    assert (scene.made is not None) is made


@pytest.mark.parametrize("weights", ["equal", "agreement"])
def test_a_difference_against_the_others_counts_less_by_agreement(weights: str) -> None:
    scene = Scene(replace(DELTAS, weights=weights))
    scene.begin(scene.plan(number=0))
    scene.trains(2.0)
    scene.comes(B, {"w": torch.tensor([-0.2, -1.0])})
    scene.comes(C, filled(1.0))
    scene.comes(D, {"w": torch.tensor([-1.0, -0.2])})
    scene.begin(scene.plan(partner(B), partner(C), partner(D)))
    scene.until(WITHIN_S)
    weighed = [e.fields["cell"] for e in scene.journal.recent() if e.kind == "partner-weighed"]
    assert weighed == ([C] if weights == "agreement" else [])
    assert scene.made is not None


# ------------------------------------------------------------ partners that are slow


PUSHED = replace(HOGWILD, strategy="parameter-server", staleness=4)


def gives(settings: OuterSettings, value: float) -> dict[str, Tensor]:
    """A contribution under these settings."""
    if settings.pushes:
        return pushed(value)
    return filled(value)


@pytest.mark.parametrize(
    ("settings", "made"),
    [(PARAMETERS, 2.5), (replace(DELTAS, quorum=2), 2.0), (PUSHED, 1.0 + 2 / 3)],
    ids=["a-barrier", "a-quorum", "a-server"],
)
@pytest.mark.parametrize("first", [True, False], ids=["asked-first", "asked-last"])
def test_a_partner_that_never_ends_to_send_holds_up_no_other(
    settings: OuterSettings, made: float, first: bool
) -> None:
    slow, quick = (B, C) if first else (C, B)
    ours = server_of(STAGE, [OURS, B, C], 1) if settings.served else OURS
    slow, quick = (OURS if cell == ours else cell for cell in (slow, quick))
    scene = Scene(settings)
    scene.moves()
    scene.stuck.add(host(slow))
    scene.comes(quick, gives(settings, 3.0 if settings is PARAMETERS else -1.0))
    partners = sorted((partner(slow), partner(quick)), key=lambda p: p.cell)
    scene.begin(scene.plan(*partners, cell_id=ours))
    scene.until(SOME_SHARE * WITHIN_S - 1.0)
    assert scene.made is None
    scene.until(SOME_SHARE * WITHIN_S)
    assert scene.made == pytest.approx(made)
    assert scene.under_way == [], "what has not come is ended"


def test_a_quorum_that_is_late_counts_as_soon_as_it_is_there() -> None:
    scene = Scene(replace(DELTAS, quorum=2))
    scene.moves()
    scene.stuck.add(host(B))
    late = SOME_SHARE * WITHIN_S + 5.0
    scene.comes(C, filled(-1.0), at=late)
    scene.begin(scene.plan(partner(B), partner(C)))
    scene.until(late - 1.0)
    assert scene.made is None
    scene.until(late + AGAIN_S)
    assert scene.made == 2.0


def test_what_still_comes_when_a_window_is_over_is_ended() -> None:
    scene = Scene(DELTAS)
    scene.moves()
    scene.stuck.add(host(B))
    scene.begin(scene.plan(partner(B), members=MATES))
    scene.until(WITHIN_S - 1.0)
    assert host(B) in scene.under_way
    scene.until(WITHIN_S)
    assert (scene.made, scene.under_way) == (None, [])


def test_partners_are_pulled_several_at_a_time_and_slow_ones_make_room() -> None:
    cells = [CellId(letter * 16) for letter in "bcdef0123456789"]
    scene = Scene(PARAMETERS)
    scene.moves()
    scene.takes_s = 0.1
    scene.stuck |= {host(cell) for cell in cells[:AT_ONCE]}
    for cell in cells:
        scene.comes(cell, filled(3.0))
    scene.begin(scene.plan(*(partner(cell) for cell in cells)))
    scene.until(1.0)
    assert scene.under_way == [host(cell) for cell in cells[:AT_ONCE]]
    scene.until(SOME_SHARE * WITHIN_S)
    assert scene.round._meeting is not None
    assert scene.round._meeting.news.cells == 1 + len(cells) - AT_ONCE


def test_a_replica_that_never_ends_to_send_its_mean_holds_up_no_other() -> None:
    scene = Scene()
    scene.moves()
    scene.stuck.add(MATE)
    scene.comes(B, filled(2.5))
    scene.begin(scene.plan(partner(B), members=MATES))
    scene.until(OWN_SHARE * WITHIN_S / 2 + AGAIN_S)
    assert (scene.made, scene.under_way) == (2.25, [])


def test_a_mean_that_a_replica_sends_is_taken_after_its_turn_too() -> None:
    scene = Scene()
    scene.moves()
    scene.takes_s = OWN_SHARE * WITHIN_S / 2 + 5.0
    scene.gives[MATE, StateKind.MEAN] = (0.0, filled(7.0))
    scene.stuck.add(host(B))
    scene.begin(scene.plan(partner(B), members=MATES))
    scene.until(scene.takes_s - 1.0)
    assert host(B) in scene.under_way
    scene.until(scene.takes_s)
    assert (scene.made, scene.under_way) == (7.0, [])


def test_a_cell_that_copies_takes_the_mean_of_a_partner_that_is_not_slow() -> None:
    scene = Scene(DELTAS)
    scene.stuck.add(host(B))
    plan = scene.plan(partner(B), partner(C))
    mean = {"w": torch.full((2,), 4.0), "w#momentum": torch.ones(2)}
    scene.gives[host(C), StateKind.MEAN] = (2.0, mean)
    scene.begin(replace(plan, window=replace(plan.window, copies=True)))
    scene.until(WITHIN_S / 2 + 1.0)
    assert (scene.made, scene.under_way) == (4.0, [])


def test_long_reads_of_a_result_and_copies_of_a_stage_are_made_aside() -> None:
    scene = Scene(DELTAS)
    scene.anchor.forget()
    scene.gives[MATE, StateKind.MEAN] = (
        0.0,
        {"w": torch.full((2,), 4.0), "w#momentum": torch.ones(2)},
    )
    scene.anchorless = {MATE: NONE_HERE}
    scene.begin(scene.plan(partner(B), members=MATES))
    scene.until(1.0)
    assert scene.made == 4.0
    assert {"checks", "begin"} <= set(scene.apart)


# ------------------------------------------------------------ replicas without an anchor


def without_anchor(*replicas: PeerId, **anchorless: str) -> tuple[Scene, Plan]:
    """A member that has no anchor, and the plan of a window with these replicas beside it.
    ``anchorless``: what each of them says; none: they do not answer."""
    scene = Scene(DELTAS)
    scene.anchor.forget()
    if anchorless:
        scene.anchorless = {PeerId(name): why for name, why in anchorless.items()}
    members = tuple(PlanMember(peer, STAGE) for peer in (ME, *replicas))
    return scene, scene.plan(partner(B), members=members)


def test_a_replica_whose_anchor_is_still_on_its_way_takes_no_part() -> None:
    scene, plan = without_anchor(OTHER)
    scene.begin(plan)
    scene.until(WITHIN_S)
    assert scene.anchor.lacking, "it makes up none, which would differ from the other's"
    assert scene.round.describe(StateKind.SNAPSHOT, NUMBER) is None
    assert scene.asked == []
    ended, fresh = scene.attempt(scene.landing(partner(B), wanted="x"))
    assert (ended.missing, fresh) == (("w",), {}), "it copies the result"


@pytest.mark.parametrize("why", ["connection lost", "over its limits: busy"])
def test_a_replica_that_may_have_the_anchor_is_not_given_up_at_once(why: str) -> None:
    scene, plan = without_anchor(OTHER, other=why)
    scene.begin(plan)
    scene.until(WITHIN_S)
    assert scene.anchor.lacking


def test_an_anchor_that_comes_in_time_is_contributed_from() -> None:
    scene, plan = without_anchor(OTHER)
    scene.begin(plan)
    scene.do(asyncio.sleep(5.0), 5.0)
    scene.anchor.state = OuterState.begin(filled(3.0))
    scene.until(WAIT_SHARE * WITHIN_S + 1.0)
    found = scene.round.describe(StateKind.SNAPSHOT, NUMBER)
    assert found is not None
    assert found[1]["w"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("replicas", [(), (OTHER,), (OTHER, MATE)], ids=len)
def test_a_cell_in_which_nobody_has_an_anchor_begins_with_its_parameters(
    replicas: tuple[PeerId, ...],
) -> None:
    scene, plan = without_anchor(*replicas, **dict.fromkeys(replicas, NONE_HERE))
    scene.begin(plan)
    scene.until(1.0)
    state = scene.anchor.state
    assert state is not None
    assert state.anchor["w"].tolist() == [1.0, 1.0]
    assert scene.round.describe(StateKind.SNAPSHOT, NUMBER) is not None


def test_nobody_waits_for_an_anchor_of_a_replica_that_has_left() -> None:
    scene, plan = without_anchor(OTHER)
    scene.begin(plan)
    scene.until(WITHIN_S)
    assert scene.anchor.lacking
    scene.number += 1
    scene.begin(scene.plan(partner(B), number=scene.number, lineage="e" * 32))
    scene.until(WITHIN_S + 1.0)
    assert not scene.anchor.lacking


def test_a_replica_that_never_answers_is_waited_for_in_a_few_windows_only() -> None:
    scene, plan = without_anchor(OTHER)
    for number in range(NUMBER, NUMBER + PATIENT + 1):
        assert scene.anchor.lacking
        scene.number = number
        window = replace(plan.window, number=number)
        scene.begin(replace(plan, window=window, lineage=f"{number:032x}"))
        scene.do(asyncio.sleep(WITHIN_S), WITHIN_S)
    assert not scene.anchor.lacking


@pytest.mark.parametrize("forgotten", ["all", "anchor"])
def test_a_window_whose_anchor_is_forgotten_ends_without_a_mean(forgotten: str) -> None:
    scene = Scene(DELTAS)
    scene.trains(2.0)
    scene.comes(B, filled(-3.0), at=5.0)
    members = (PlanMember(ME, STAGE), PlanMember(OTHER, STAGE))
    scene.begin(scene.plan(partner(B), members=members))
    scene.until(1.0)
    assert scene.round.describe(StateKind.SNAPSHOT, NUMBER) is not None

    async def forget() -> None:
        (scene.round if forgotten == "all" else scene.anchor).forget()

    scene.do(forget())
    scene.begin(scene.plan(number=0, members=members, lineage="e" * 32))
    scene.until(WITHIN_S)
    assert scene.anchor.lacking, "the other replica's is still on its way"
    assert (scene.made, scene.errors) == (None, [])
    assert bool(times(scene, host(B))[2:]) is (forgotten == "anchor"), "nobody asks any more"


def test_an_anchor_is_named_while_the_epoch_runs() -> None:
    for settings, named in ((DELTAS, True), (PARAMETERS, False)):
        scene = Scene(settings)
        scene.begin(scene.plan(number=0))
        scene.until(1.0)
        assert bool(scene.anchor.name) is named


def test_a_cell_without_partners_makes_an_outer_step_by_itself_where_anchors_are_equal() -> None:
    for settings, made in ((DELTAS, True), (PARAMETERS, False)):
        scene = Scene(settings)
        scene.trains(2.0)
        scene.begin(scene.plan())
        scene.until(1.0)
        assert (scene.made is not None) is made


def test_partners_without_hosts_of_the_stage_are_not_asked() -> None:
    scene = Scene()
    scene.moves()
    scene.comes(B, filled(2.5))
    scene.begin(scene.plan(partner(B), partner(C, STAGE + 1)))
    scene.until(WITHIN_S)
    assert scene.made == 2.25
    assert times(scene, host(C)) == []


def test_a_garbled_contribution_is_a_fault_and_fetched_again() -> None:
    scene = Scene()
    scene.moves()
    scene.comes(B, filled(float("nan")))
    scene.begin(scene.plan(partner(B)))
    scene.until(1.5)
    assert scene.faults == [host(B), host(B)]
    scene.comes(B, filled(2.5))
    scene.until(3.5)
    assert scene.made == 2.25


MATES = (PlanMember(ME, STAGE), PlanMember(MATE, STAGE))


def test_another_replica_pulls_first_in_each_window() -> None:
    asked = []
    for number in (NUMBER, NUMBER + 1):
        scene = Scene()
        scene.number = number
        scene.begin(scene.plan(partner(B), number=number, members=MATES))
        scene.until(1.5)
        asked.append({(peers[0], kind) for _, peers, kind in scene.asked})
    assert asked == [{(MATE, StateKind.MEAN)}, {(host(B), StateKind.SNAPSHOT)}]


def test_a_mean_of_a_replica_is_taken_while_its_turn_lasts() -> None:
    scene = Scene()
    scene.gives[MATE, StateKind.MEAN] = (10.0, filled(7.0))
    scene.begin(scene.plan(partner(B), members=MATES))
    scene.until(12.0)
    assert scene.made == 7.0
    assert {kind for _, _, kind in scene.asked} == {StateKind.MEAN}


def test_after_a_silent_replicas_turn_this_one_pulls() -> None:
    scene = Scene()
    scene.moves()
    scene.comes(B, filled(2.5))
    scene.begin(scene.plan(partner(B), members=MATES))
    turn = OWN_SHARE * WITHIN_S / 2
    scene.until(turn - 1.0)
    assert times(scene, host(B)) == []
    scene.until(turn + 2.0)
    assert scene.made == 2.25


def test_a_mean_that_is_not_finite_is_not_taken() -> None:
    scene = Scene()
    scene.gives[MATE, StateKind.MEAN] = (0.0, filled(float("inf")))
    scene.begin(scene.plan(partner(B), members=MATES))
    scene.until(0.5)
    assert scene.made is None
    assert scene.faults == [MATE]


# ------------------------------------------------------------ the outer round


def met(settings: OuterSettings = PARAMETERS) -> Scene:
    """A member whose window has a mean of 2.5, made of its own 2.0 and a partner's 3.0."""
    scene = Scene(settings)
    scene.moves()
    scene.comes(B, filled(3.0))
    scene.begin(scene.plan(partner(B)))
    scene.until(2.0)
    assert scene.made == 2.5
    return scene


def test_training_meanwhile_stays_when_the_mean_is_put_in_place() -> None:
    scene = met()
    scene.trains(5.0)
    plan = scene.landing(partner(B))
    ended, fresh = scene.attempt(plan)
    assert fresh["w"].tolist() == [5.5, 5.5]
    assert (ended.missing, scene.held) == ((), [NUMBER])
    assert scene.round.news.number == 0, "it may still be undone"
    scene.do(scene.round.takes())
    news = scene.round.news
    assert (news.number, news.cells, news.peers, news.nbytes) == (NUMBER, 2, 1, 8)
    assert news.seconds == 0.0
    assert news.apart == pytest.approx(0.5)


def test_mixing_leaves_a_share_of_the_own_parameters() -> None:
    scene = met(replace(PARAMETERS, mixing=0.5))
    _, fresh = scene.attempt(scene.landing(partner(B)))
    assert fresh["w"].tolist() == [2.25, 2.25]


def test_a_mean_that_a_replica_made_is_of_all_cells_of_the_group() -> None:
    scene = Scene()
    scene.gives[MATE, StateKind.MEAN] = (0.0, filled(7.0))
    scene.begin(scene.plan(partner(B), partner(C), members=MATES))
    scene.until(1.0)
    scene.attempt(scene.landing(partner(B), partner(C), members=MATES))
    scene.do(scene.round.takes())
    assert (scene.round.news.cells, scene.round.news.peers) == (3, 2)


@pytest.mark.parametrize("what", ["digest", "window"])
def test_another_mean_than_the_plans_is_not_put_in_place(what: str) -> None:
    scene = met()
    plan = scene.landing(partner(B), **({"wanted": "x"} if what == "digest" else {"outer": 9}))
    ended, fresh = scene.attempt(plan)
    assert (ended.missing, fresh) == (("w",), {})
    scene.do(scene.round.takes())
    assert scene.round.news.number == 0


def test_a_stage_without_a_mean_keeps_its_parameters() -> None:
    scene = Scene()
    ended, fresh = scene.attempt(scene.landing(partner(B)))
    assert (ended.missing, fresh["w"].tolist()) == ((), [1.0, 1.0])


def test_a_listener_copies_the_result() -> None:
    scene = met()
    ended, fresh = scene.attempt(scene.landing(partner(B)), listens=True)
    assert (ended.missing, fresh, scene.held) == (("w",), {}, [])


def test_an_attempt_that_fails_after_one_that_did_not_is_not_taken() -> None:
    scene = met()
    scene.attempt(scene.landing(partner(B)))
    scene.attempt(scene.landing(partner(B), wanted="x"))
    scene.do(scene.round.takes())
    assert scene.round.news.number == 0


def test_dead_members_are_no_peers_of_the_result() -> None:
    scene = met()
    plan = scene.landing(partner(B), members=MATES)
    arrived = ev.RoundArrived(ME, 0, 1, plan.hash, 0, (MATE,), {}, (), (), 9.0)
    scene.do(scene.round.attempt(plan, arrived, False))
    scene.do(scene.round.takes())
    assert scene.round.news.peers == 1


def test_a_copied_result_is_news_of_its_window() -> None:
    scene = Scene()
    plan = scene.landing(partner(B), partner(C), wanted="x", members=MATES)
    scene.do(scene.round.copied(plan, [MATE], Version(1), 16))
    news = scene.round.news
    assert (news.number, news.cells, news.peers, news.nbytes) == (NUMBER, 3, 2, 16)
    scene = Scene()
    scene.do(scene.round.copied(scene.landing(wanted=""), [MATE], Version(1), 16))
    assert scene.round.news.number == 0


# ------------------------------------------------------------ plans


def test_a_plan_repeated_leaves_the_window_under_way() -> None:
    scene = Scene()
    plan = scene.plan(partner(B))
    scene.begin(plan)
    scene.until(1.5)
    scene.begin(replace(plan, term=2))
    scene.until(3.5)
    assert times(scene, host(B)) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("why", ["listener", "settings"])
def test_a_window_ends_with_its_reason(why: str) -> None:
    scene = met()
    changed = replace(PARAMETERS, mixing=0.5) if why == "settings" else None
    scene.begin(scene.plan(number=0), why == "listener", changed)
    assert (scene.made, scene.round.mean) == (None, (0, ""))


def test_a_plan_without_a_window_leaves_the_last_mean_for_others() -> None:
    scene = met()
    scene.begin(scene.plan(number=0))
    assert scene.made == 2.5


def test_another_window_replaces_the_one_under_way() -> None:
    scene = Scene()
    scene.begin(replace(scene.plan(partner(B)), lineage="e" * 32))
    scene.until(1.5)
    scene.begin(scene.plan(partner(C)))
    scene.until(4.0)
    assert times(scene, host(B)) == [0.0, 1.0]


def second_window(landed: bool, settings: OuterSettings = PARAMETERS) -> Scene:
    """A member that trained from 1.9 to 2.0, met a partner at 2.28, put their mean of 2.14 in place
    if it ``landed``, and trained to 1.9."""
    scene = Scene(settings)
    scene.trains(1.9)
    scene.begin(scene.plan(number=0))
    scene.trains(2.0)
    scene.comes(B, filled(2.28))
    scene.begin(scene.plan(partner(B)))
    scene.until(2.0)
    assert scene.made == pytest.approx(2.14)
    if landed:
        scene.attempt(scene.landing(partner(B)))
        scene.do(scene.round.takes())
    scene.trains(1.9)
    return scene


@pytest.mark.parametrize(("landed", "clipped"), [(True, False), (False, True)])
def test_the_usual_distance_is_that_of_the_training_since_the_last_mean(
    landed: bool, clipped: bool
) -> None:
    """The own training went from 2.14 to 1.9, or only from 2.0, and the partner is 0.57 away."""
    scene = second_window(landed)
    scene.number = NUMBER + 1
    scene.comes(B, filled(2.47))
    scene.begin(scene.plan(partner(B), number=NUMBER + 1, lineage="e" * 32))
    scene.until(4.0)
    said = [e.kind for e in scene.journal.recent()]
    assert ("partner-clipped" in said) is clipped


def test_training_since_a_window_whose_mean_was_not_placed_is_measured_too() -> None:
    scene = second_window(landed=False)
    scene.trains(1.0)
    scene.number = NUMBER + 1
    scene.comes(B, filled(1.5))
    scene.begin(scene.plan(partner(B), number=NUMBER + 1, lineage="e" * 32))
    scene.until(4.0)
    assert scene.round.mean[0] == NUMBER + 1
    assert "partner-clipped" not in [e.kind for e in scene.journal.recent()]


# ------------------------------------------------------------ one cell makes the mean


def pushed(w: float, step: float = 0.0) -> dict[str, Tensor]:
    return {**filled(w), STEP: torch.tensor([step])}


def serving(settings: OuterSettings, letters: str = "bc") -> Scene:
    """A member of the cell that serves, with partners that push -1."""
    scene = Scene(settings)
    scene.anchor.step = 3
    scene.trains(2.0)
    cells = [CellId(letter * 16) for letter in letters]
    for cell in cells:
        scene.comes(cell, pushed(-1.0, 3.0))
    return scene


def server_cell(settings: OuterSettings, cells: Sequence[CellId]) -> CellId:
    return CellId(server_of(STAGE, list(cells), settings.shards))


def test_a_server_reports_the_pushes_that_it_applies_and_refuses() -> None:
    settings = replace(HOGWILD, strategy="parameter-server", staleness=1)
    cells = (OURS, B, C, D)
    ours = server_cell(settings, cells)
    others = [cell for cell in cells if cell != ours]
    scene = serving(settings, "".join(cell[0] for cell in others))
    scene.comes(others[0], pushed(-1.0, 1.0))
    scene.begin(scene.plan(*(partner(cell) for cell in others), cell_id=ours))
    scene.until(1.0)
    assert scene.made == pytest.approx(1.0 + 3 / 4)
    counted = scene.metrics.registry.get_sample_value
    assert counted("tutti_pushes_total", {"result": "applied"}) == 2
    assert counted("tutti_pushes_total", {"result": "refused"}) == 1
    (said,) = [e for e in scene.journal.recent() if e.kind == "pushes"]
    assert said.level == "warning"
    assert "applies 2 pushes" in said.text
    assert f"those of cell {others[0]}" in said.text
    assert said.fields["ages"] == {others[0]: 2, others[1]: 0, others[2]: 0}


def test_a_server_reports_pushes_that_contain_one_that_was_taken() -> None:
    ours = server_cell(HOGWILD, (OURS, B))
    other = B if ours == OURS else OURS
    scene = serving(HOGWILD, other[0])
    scene.comes(other, pushed(-1.0, 2.0))
    scene.anchor.pushed = {float(int(other[:6], 16)): 3}
    scene.begin(scene.plan(partner(other), cell_id=ours))
    scene.until(1.0)
    assert scene.made == pytest.approx(1.0 + 1 / 2)
    (said,) = [e for e in scene.journal.recent() if e.kind == "pushes"]
    assert said.level == "warning"
    assert said.text.endswith(f"contain one that was taken: those of cell {other}")
    counted = scene.metrics.registry.get_sample_value
    assert counted("tutti_pushes_total", {"result": "refused"}) == 1


@pytest.mark.parametrize(("quorum", "made"), [(0, None), (2, 2.0)])
def test_a_server_with_a_barrier_needs_all_or_a_quorum(quorum: int, made: float | None) -> None:
    settings = replace(DELTAS, strategy="parameter-server", quorum=quorum)
    ours = server_cell(settings, (OURS, B, C))
    near, gone = sorted({OURS, B, C} - {ours})
    scene = Scene(settings)
    scene.moves()
    scene.comes(near, filled(-1.0))
    scene.begin(scene.plan(partner(near), partner(gone), cell_id=ours))
    scene.until(WITHIN_S)
    assert scene.made == made


def test_a_cell_takes_the_result_of_the_server_and_only_of_it() -> None:
    cells = (OURS, B, C)
    server = server_cell(HOGWILD, cells)
    me = next(cell for cell in cells if cell != server)
    scene = Scene(HOGWILD)
    scene.trains(2.0)
    others = [cell for cell in cells if cell != me]
    taken = torch.tensor([float(int(server[:6], 16)), *[0.0] * (MOST_NAMED - 1)])
    result = {**filled(4.0), STEP: torch.tensor([5.0]), TAKEN: taken}
    scene.gives[host(server), StateKind.MEAN] = (3.0, result)
    scene.begin(scene.plan(*(partner(cell) for cell in others), cell_id=me))
    scene.until(4.5)
    assert scene.made == 4.0
    assert {tuple(peers) for _, peers, _ in scene.asked} == {(host(server),)}
    # The push is not in the result: training since the anchor at 1.0 stays.
    _, fresh = scene.attempt(scene.landing(partner(server)))
    assert fresh["w"].tolist() == [5.0, 5.0]
    scene.do(scene.round.takes())
    assert scene.anchor.step == 5


def served(step: float) -> tuple[Scene, CellId, Plan]:
    """A member in a window with the server's cell, which is returned, and the window's plan. The
    server gives a mean of 4.0 at this step."""
    server = server_cell(HOGWILD, (OURS, B))
    me = next(cell for cell in (OURS, B) if cell != server)
    scene = Scene(HOGWILD)
    scene.trains(2.0)
    result = {**filled(4.0), STEP: torch.tensor([step]), TAKEN: torch.zeros(MOST_NAMED)}
    scene.gives[host(server), StateKind.MEAN] = (0.0, result)
    return scene, server, scene.plan(partner(server), cell_id=me)


@pytest.mark.parametrize("step", [-1.0, 0.5, float(MOST_STEPS)])
def test_a_servers_mean_of_a_step_that_nobody_made_is_a_fault_and_not_taken(step: float) -> None:
    scene, server, plan = served(step)
    scene.begin(plan)
    scene.until(0.5)
    assert scene.made is None
    assert scene.faults == [host(server)]
    later = replace(plan.window, number=NUMBER + 1)
    scene.number = NUMBER + 1
    scene.gives[host(server), StateKind.MEAN][1][STEP] = torch.tensor([6.0])
    scene.begin(replace(plan, window=later, lineage="e" * 32))
    scene.until(1.0)
    assert scene.round.mean[0] == NUMBER + 1
    assert scene.errors == []


def test_a_contribution_that_cannot_be_made_costs_its_cell_the_window_alone() -> None:
    scene, _, plan = served(6.0)
    scene.anchor.step = -1
    scene.begin(plan)
    scene.until(0.5)
    assert (scene.made, scene.errors) == (None, [])
    assert scene.round.describe(StateKind.SNAPSHOT, NUMBER) is None, "it gives nothing"
    assert [e.level for e in scene.journal.recent() if e.kind == "window-failed"] == ["warning"]


def test_a_cell_that_lacks_its_partners_anchor_takes_their_mean() -> None:
    scene = Scene(DELTAS)
    scene.trains(2.0)
    plan = scene.plan(partner(B), partner(C, STAGE + 1))
    scene.gives[host(B), StateKind.MEAN] = (
        2.0,
        {"w": torch.full((2,), 4.0), "w#momentum": torch.ones(2)},
    )
    scene.begin(replace(plan, window=replace(plan.window, copies=True)))
    scene.until(3.5)
    assert scene.made == 4.0
    assert scene.round.describe(StateKind.SNAPSHOT, NUMBER) is None, "it gives nothing"
    _, fresh = scene.attempt(scene.landing(partner(B)))
    assert fresh["w"].tolist() == [5.0, 5.0]
    scene.do(scene.round.takes())
    state = scene.anchor.state
    assert state is not None
    assert state.momentum["w"].tolist() == [1.0, 1.0]
