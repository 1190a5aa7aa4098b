"""A new leader goes on with the epoch of the one before it, or plans it anew."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from node.consensus.admission import OTHER_LEADER, undoes
from node.coordinator import notes
from node.coordinator.following import PlanReports
from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.core.journey import Plan
from node.epoch import events as ev
from node.epoch.leader.attempt import ATTEMPTS
from node.epoch.leader.leader import Leader, Phase
from node.epoch.member import Member, MemberState
from node.epoch.plan_context import GENESIS, PastPlan, makes
from node.pipeline.events import MicroBatchDone
from protos import training_pb2 as pb
from tests.training.run_facts import facts
from tests.training.test_damaged import stands, taking_part
from tests.training.test_leader import S1, S2, T1, T2, E, begun, heard, kinds, tell, the_plan
from tests.training.test_member import LEADER, ME, ended, opened, plan_from, refusal
from tests.training.test_member import told as member_told

SECOND, THIRD = PeerId("ends2"), PeerId("ends3")
ALL = (E, SECOND, THIRD, S1, T1, S2, T2)
DONE = 3
"""Steps that each peer has computed."""


def left() -> Plan:
    """The plan of a leader that is gone."""
    _, plan = begun(map(heard, ALL), target_batch=24)
    assert plan.leader == E
    return plan


def runs(peer: PeerId, plan: Plan, computed: int = DONE, **about: Any) -> ev.Heartbeat:
    """The report of a peer in which this plan's micro-batches run."""
    said = heard(peer, term=plan.term, **about)
    running = ev.Running(plan.hash, computed)
    return replace(said, capacity=replace(said.capacity, running=running))


def successor(plan: Plan, *reports: ev.Heartbeat) -> tuple[Leader, list[Any]]:
    """The next leader and its actions, after these reports or, without any, those of all others."""
    leader = Leader(
        SECOND, facts(target_batch=24, late_s=4.0), term=plan.term, history=PastPlan(plan)
    )
    rows = reports or [runs(p, plan) for p in ALL if p != E]
    done = tell(leader, rows, 0.0)
    return leader, done + leader.handle(ev.ClockTick(), 1.5)


def takeover(actions: list[Any]) -> ev.SendTakeover | None:
    return next((a for a in actions if isinstance(a, ev.SendTakeover)), None)


def rows_of(plan: Plan, origin: PeerId) -> tuple[MicroBatchDone, ...]:
    return tuple(MicroBatchDone(p.index, True, 1.0, 64) for p in plan.paths if p.origin == origin)


def test_a_new_leader_goes_on_with_the_epoch_under_way() -> None:
    plan = left()
    leader, done = successor(plan)
    others = tuple(m.peer for m in plan.members if m.peer != E)
    assert takeover(done) == ev.SendTakeover(others, plan, (E,))
    assert the_plan(done) is None
    assert kinds(done) == ["epoch-taken-over"]
    assert (leader.phase, leader.plan) == (Phase.RUN, plan)


def test_the_work_of_those_that_are_gone_is_given_back_and_the_rest_is_committed() -> None:
    plan = left()
    leader, _ = successor(plan)
    done: list[Any] = []
    for origin in (SECOND, THIRD):
        rows = rows_of(plan, origin)
        assert rows
        done += leader.handle(ev.MicroBatchesReported(origin, plan.hash, rows), 2.0)
    rounds = [a.round for a in done if isinstance(a, ev.SendRound)]
    given_back = tuple(p.index for p in plan.paths if p.origin == E)
    assert given_back
    assert {r.dropped for r in rounds} == {given_back}
    assert {r.leader for r in rounds} == {SECOND}
    assert {r.dead for r in rounds} == {(E,)}
    first = {r.attempt for r in rounds}.pop()
    assert first == ATTEMPTS * (1 + [m.peer for m in plan.members].index(SECOND))
    made = makes(plan, given_back)
    committed: list[Any] = []
    for m in plan.members:
        if m.peer != E:
            word = ev.Committed(m.peer, plan.hash, first, f"digest {m.stage} next", voted=True)
            committed += leader.handle(word, 3.0)
    assert "epoch-committed" in kinds(committed)
    following = the_plan(committed)
    assert following is not None
    assert (following.base, following.leader) == (made, SECOND)
    assert following.term > plan.term
    assert {p for c in following.cursor for p in c.returned} == {
        s for p in plan.paths if p.index in given_back for s in p.samples
    }


def test_who_was_found_dead_by_the_leader_before_stays_dead() -> None:
    """It may be awake again; the others wait for it no more, and it would wait for them."""
    plan = left()
    past = PastPlan(plan, dead=(S1,))
    leader = Leader(SECOND, facts(target_batch=24, late_s=4.0), term=plan.term, history=past)
    done = tell(leader, [runs(p, plan) for p in ALL if p != E], 0.0)
    done += leader.handle(ev.ClockTick(), 1.5)
    taken = takeover(done)
    assert taken is not None
    assert set(taken.dead) == {E, S1}
    assert S1 not in taken.to


def averages(plan: Plan) -> list[ev.Heartbeat]:
    rows = [runs(p, plan) for p in ALL if p not in (E, S1)]
    return [*rows, heard(S1, term=plan.term)]


def elsewhere(plan: Plan) -> list[ev.Heartbeat]:
    rows = [runs(p, plan) for p in ALL if p not in (E, S1)]
    return [*rows, runs(S1, replace(plan, term=plan.term + 1))]


def hardly_begun(plan: Plan) -> list[ev.Heartbeat]:
    return [runs(p, plan, int(p == S1)) for p in ALL if p != E]


def test_a_member_that_has_not_begun_the_epoch_holds_nobody_up() -> None:
    plan = left()
    late = heard(T1, term=plan.term - 1)
    _, done = successor(plan, *(runs(p, plan) for p in ALL if p not in (E, T1)), late)
    taken = takeover(done)
    assert taken is not None
    assert set(taken.dead) == {E, T1}
    assert T1 not in taken.to


@pytest.mark.parametrize("reports", [averages, elsewhere, hardly_begun])
def test_what_cannot_go_on_is_planned_anew(reports: Any) -> None:
    plan = left()
    _, done = successor(plan, *reports(plan))
    assert takeover(done) is None
    anew = the_plan(done)
    assert anew is not None
    assert anew.base == plan.base
    assert anew.term > plan.term


def test_a_claim_counts_for_no_more_than_the_work_of_its_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.epoch.leader.takeover.WORTH", 0.4)
    plan = left()
    _, done = successor(plan, *(runs(p, plan, 10_000 * (p == S1)) for p in ALL if p != E))
    assert takeover(done) is None
    assert the_plan(done) is not None


def test_a_leader_that_was_no_member_plans_anew() -> None:
    plan = left()
    newcomer = PeerId("ends4")
    leader = Leader(newcomer, facts(target_batch=24), term=plan.term, history=PastPlan(plan))
    done = tell(leader, [heard(newcomer), *(runs(p, plan) for p in ALL if p != E)], 0.0)
    done += leader.handle(ev.ClockTick(), 2.0)
    assert takeover(done) is None
    assert the_plan(done) is not None


def test_an_epoch_is_taken_over_once() -> None:
    plan = left()
    leader, done = successor(plan)
    assert takeover(done) is not None
    done = leader.handle(ev.Declined(plan.hash, "no longer"), 2.0)
    done += leader.handle(ev.ClockTick(), 2.3)
    assert takeover(done) is None
    assert the_plan(done) is not None


def test_a_leader_does_not_go_on_with_an_epoch_that_it_has_given_up() -> None:
    leader, plan = begun(map(heard, ALL), target_batch=24)
    tell(leader, [runs(p, plan) for p in ALL], 2.1)
    done = leader.handle(ev.Declined(plan.hash, "no reason"), 2.2)
    done += leader.handle(ev.ClockTick(), 2.5)
    assert takeover(done) is None
    assert the_plan(done) is not None


def test_a_leader_that_leads_again_does_not_take_its_own_epoch_over() -> None:
    plan = left()
    again = Leader(E, facts(target_batch=24), term=plan.term, history=PastPlan(plan))
    done = tell(again, [runs(p, plan) for p in ALL], 0.0) + again.handle(ev.ClockTick(), 2.0)
    assert takeover(done) is None
    assert the_plan(done) is not None


def test_repairs_count_from_the_first_attempt_of_this_leader() -> None:
    plan = left()
    leader, _ = successor(plan)
    for origin in (SECOND, THIRD):
        leader.handle(ev.MicroBatchesReported(origin, plan.hash, rows_of(plan, origin)), 2.0)
    attempt = leader.attempt
    assert attempt is not None
    first = attempt.attempts[1]
    missing = [ev.Incomplete(p, plan.hash, first, (), ()) for p in (S1, T1)]
    done = tell(leader, missing, 3.0)
    (again,) = (a.round for a in done if isinstance(a, ev.SendRound))
    assert again.attempt == first + 1
    assert "round-repaired" in kinds(done)


# ------------------------------------------------------------ the member

NEXT = PeerId("next")


def following() -> tuple[Member, Plan]:
    """A member in which a plan runs."""
    plan = plan_from(GENESIS, 3)
    member = Member(ME, plan.base)
    member_told(member, ev.PlanArrived(plan))
    assert (member.state, member.leader) == (MemberState.RUN, LEADER)
    return member, plan


def test_a_member_reports_again_to_the_new_leader_and_averages_for_it_alone() -> None:
    member, plan = following()
    assert member_told(member, ev.TakenOver(NEXT, plan.hash)) == [ev.ReportAgain(plan)]
    assert member.leader == NEXT
    assert "only the leader of this epoch" in refusal(member, opened(plan))
    (start,) = member_told(member, opened(plan, ATTEMPTS, leader=NEXT))
    assert isinstance(start, ev.StartRound)
    assert member.state is MemberState.AVERAGE


def test_a_member_that_averages_or_has_voted_is_not_taken_over() -> None:
    member, plan = following()
    member_told(member, opened(plan))
    assert "have ended here" in refusal(member, ev.TakenOver(NEXT, plan.hash))
    result = ended(plan)
    member_told(member, result)
    member_told(member, ev.Adopted(result, "d"))
    assert "have ended here" in refusal(member, ev.TakenOver(NEXT, plan.hash))
    assert member.leader == LEADER


def test_a_member_that_is_told_twice_goes_on() -> None:
    member, plan = following()
    member_told(member, ev.TakenOver(NEXT, plan.hash))
    member_told(member, opened(plan, ATTEMPTS, leader=NEXT))
    assert member_told(member, ev.TakenOver(NEXT, plan.hash)) == []
    assert member.state is MemberState.AVERAGE


def test_an_epoch_of_another_plan_is_not_taken_over() -> None:
    member, plan = following()
    other = replace(plan, term=plan.term + 1)
    assert "not under way here" in refusal(member, ev.TakenOver(NEXT, other.hash))


def test_the_next_plan_has_its_own_leader_again() -> None:
    member, plan = following()
    member_told(member, ev.TakenOver(NEXT, plan.hash))
    member_told(member, ev.PlanArrived(replace(plan, term=plan.term + 1)))
    assert member.leader == LEADER


class Heard:
    """A leader that hears reports, or does not answer."""

    def __init__(self) -> None:
        self.answers = True
        self.outcome: asyncio.Future[bool] | None = None
        """If the next report is to stay on its way: set to end it, heard or not."""
        self.on_its_way = asyncio.Event()
        self.results: list[int] = []
        self.words: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.reports = PlanReports(plan_from(GENESIS, 3), self._tell, self._spawn)

    async def _tell(self, note: pb.Note) -> bool:
        await asyncio.sleep(0)
        if (outcome := self.outcome) is not None:
            self.outcome = None
            self.on_its_way.set()
            return await outcome
        if not self.answers:
            return False
        if note.WhichOneof("say") == "finished":
            self.results.extend(r.index for r in note.finished.results)
        else:
            self.words.append(note.committed.digest)
        return True

    def _spawn(self, work: Any, name: str) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def told(self) -> None:
        """Wait until all that is under way has ended."""
        await asyncio.gather(*self._tasks)


async def test_a_new_leader_hears_all_results_also_those_that_the_former_one_heard() -> None:
    heard = Heard()
    for index in range(3):
        heard.reports.add(MicroBatchDone(index, True, 1.0, 8))
    await heard.told()
    assert heard.results == [0, 1, 2]
    heard.reports.again()
    await heard.told()
    assert heard.results == [0, 1, 2, 0, 1, 2]


async def test_a_report_on_its_way_to_the_former_leader_holds_no_results_back() -> None:
    heard = Heard()
    outcome = asyncio.get_running_loop().create_future()
    heard.outcome = outcome
    for index in range(3):
        heard.reports.add(MicroBatchDone(index, True, 1.0, 8))
    await heard.on_its_way.wait()
    heard.reports.again()
    outcome.set_result(False)
    await heard.told()
    assert heard.results == [0, 1, 2]


async def test_a_leader_that_was_out_of_reach_hears_what_it_missed() -> None:
    heard = Heard()
    heard.reports.add(MicroBatchDone(0, True, 1.0, 8))
    await heard.told()
    heard.answers = False
    heard.reports.add(MicroBatchDone(1, True, 1.0, 8))
    heard.reports.says(pb.Note(committed=pb.CommittedNote(digest="first")))
    await heard.told()
    heard.reports.says(pb.Note(committed=pb.CommittedNote(digest="second")))
    await heard.told()
    assert (heard.results, heard.words) == ([0], [])
    heard.answers = True
    heard.reports.answers()
    await heard.told()
    assert (heard.results, heard.words) == ([0, 1], ["second"])
    heard.reports.answers()
    await heard.told()
    assert (heard.results, heard.words) == ([0, 1], ["second"]), "each is told once"


async def test_a_leader_that_accepts_a_heartbeat_hears_what_it_missed(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = await rig.add("a")
    t = taking_part(a)
    stands(t, a.work.stage.version)
    plan = rig.plan((a,), dict.fromkeys(rig.shapes, a))
    member_told(t.member, ev.PlanArrived(plan))
    assert plan.leader != a.me
    heard: list[str] = []
    silent = PeerFault(plan.leader, "it does not answer")
    answers: list[PeerFault | None] = [silent, None, None]

    async def send(leader: PeerId, note: pb.Note) -> str | None:
        if (fault := answers.pop(0)) is not None:
            t.candidacy.election.shun(leader, t.kit.clock.now())
            raise fault
        heard.append(note.WhichOneof("say") or "")
        return None

    monkeypatch.setattr(t.reporting, "_send", send)
    heartbeat = ev.Heartbeat(a.me, 1, a.work.stage.version, "", ev.Capacity(1.0))
    monkeypatch.setattr(t.reporting.own, "heartbeat", lambda leader: heartbeat)
    ready = pb.Note(ready=pb.ReadyNote())
    monkeypatch.setattr(t.reporting.own, "note", lambda heartbeat, leader: ready)
    t.following._reports_on(plan).says(pb.Note(committed=pb.CommittedNote()))
    await asyncio.sleep(0.05)
    assert heard == []
    t.candidacy.election.forgive(plan.leader)
    assert await t.reporting._report_to(plan.leader)
    await asyncio.sleep(0.05)
    assert heard == ["ready", "committed"]
    await t.close()


async def test_after_a_takeover_no_leader_is_trusted_without_support(rig: Any) -> None:
    (a,) = await rig.add("a")
    t = taking_part(a)
    stands(t, a.work.stage.version)
    owners = dict.fromkeys(rig.shapes, a)
    plan = rig.plan((a,), owners)
    member_told(t.member, ev.PlanArrived(plan))
    assert t._here().follows == plan.leader
    member_told(t.member, ev.TakenOver(NEXT, plan.hash))
    member_told(t.member, replace(rig.round(plan, ATTEMPTS), leader=NEXT))
    result = ended(plan, ATTEMPTS)
    member_told(t.member, result)
    member_told(t.member, ev.Adopted(result, "d"))
    here = t._here()
    assert (here.follows, here.committed) == (None, True)
    of_the_former = rig.plan((a,), owners, plan, again=True)
    assert of_the_former.leader == plan.leader
    assert "the leader does not know it" in undoes(of_the_former, here)
    await t.close()


async def test_only_the_peer_that_is_taken_for_the_leader_takes_over(rig: Any) -> None:
    (a,) = await rig.add("a")
    t = taking_part(a)
    stands(t, a.work.stage.version)
    plan = rig.plan((a,), dict.fromkeys(rig.shapes, a))
    member_told(t.member, ev.PlanArrived(plan))
    note = pb.Note(takeover=pb.TakeoverNote(plan_hash=plan.hash))
    assert await t._hear(PeerId("stranger"), note) == OTHER_LEADER
    assert t.member.leader == plan.leader
    await t.close()


async def test_a_round_that_comes_before_its_takeover_is_taken_part_in(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = await rig.add("a")
    t = taking_part(a)
    stands(t, a.work.stage.version)
    plan = rig.plan((a,), dict.fromkeys(rig.shapes, a))
    assert await t.happens(ev.PlanArrived(plan)) is None
    monkeypatch.setattr(t, "leader_id", lambda: NEXT)
    monkeypatch.setattr(t.candidacy, "heeds", lambda peer: True)
    note = notes.round_note(replace(rig.round(plan, ATTEMPTS), leader=NEXT))
    assert await t._hear(NEXT, note) is None
    assert t.member.leader == NEXT
    assert t.member.state is not MemberState.RUN
    takeover_note = notes.takeover_note(ev.SendTakeover((a.me,), plan, ()))
    assert await t._hear(NEXT, takeover_note) is None, "it comes too late, and harms nobody"
    await t.close()
