"""The news that a leader is told before its next event."""

from dataclasses import replace

from node.consensus.tally import VoteTally
from node.consensus.trust import Trust
from node.consensus.voters import Quorum
from node.coordinator.briefing import Briefing
from node.core.ids import ENDS, NO_CELL, PeerId
from node.core.journey import Version
from node.core.samples import SampleClass
from node.epoch import events as ev
from node.epoch.leader.leader import Leader
from node.epoch.leader.roster import Roster
from node.epoch.plan_context import PlanContext
from tests.training.run_facts import facts
from tests.training.test_double_votes import proof as double_vote
from tests.training.test_leader import S1, S2, T1, E, heard
from tests.training.test_unproven import OURS, THEIRS, proof
from tests.training.test_votes import RUN, certificate, checks, trusting

HERE = PlanContext((SampleClass(0, 0, 96),), {}, 1000)
TICK = ev.ClockTick()


def briefing(trust: Trust | None = None, **about: object) -> Briefing:
    ports: dict[str, object] = {
        "saved": lambda: (),
        "recall": lambda version: None,
        "may_lead": lambda peer: True,
        **about,
    }
    return Briefing(trust or Trust(RUN, checks), **ports)  # type: ignore[arg-type]


def test_without_news_there_is_only_the_event() -> None:
    assert briefing().before(TICK) == [TICK]


def test_each_news_is_told_once() -> None:
    trust = trusting()
    told = briefing(trust, saved=lambda: (OURS, Version(0)), recall={OURS: HERE}.get)
    assert trust.doubles.shown(double_vote(PeerId("c")))
    news = told.before(TICK)
    assert news == [
        ev.QuorumChanged(Quorum(trust.voters, trust.version, trust.quorum.at)),
        ev.Equivocated(frozenset({PeerId("c")})),
        ev.ContextsKept(((OURS, HERE),)),
        TICK,
    ]
    assert told.before(TICK) == [TICK]


def test_a_certificate_reaches_the_leader_if_its_peer_believes_it() -> None:
    trust = Trust(RUN, checks)
    trust.learns(proof((E, S1, S2), of=Version(11, "cc" * 16), term=19), 4.0)
    told = briefing(trust)
    tally = VoteTally(trust)
    good = proof((E, S1, S2), of=OURS, term=20)
    assert tally.show(good, NO_CELL, 5.0) == OURS
    assert tally.certificate(OURS) == good
    assert told.before(TICK) == [ev.QuorumChanged(trust.quorum), TICK]
    bad = certificate(of=THEIRS, term=20, by=(T1,), voters=(E, S1, T1))
    assert tally.show(bad, NO_CELL, 6.0) is None
    assert tally.certificate(THEIRS) is None


def test_one_peer_that_is_asked_names_no_voters() -> None:
    """A leader that has just started knows no voters, and shows all members what it believes."""
    trust = Trust(RUN, checks)
    tally = VoteTally(trust)
    own = certificate(of=OURS, term=10**6, by=(T1, S1), voters=(T1, S1))
    assert tally.show(own, NO_CELL, 5.0) is None
    assert tally.certificate(OURS) is None
    assert trust.quorum == Quorum()


def test_a_heartbeat_says_whether_its_sender_may_lead() -> None:
    told = briefing(may_lead=lambda peer: peer == E)
    assert told.before(heard(E)) == [heard(E)]
    (barred,) = told.before(replace(heard(S1), stage=ENDS))
    assert not barred.membership.may_lead
    assert told.before(heard(S1)) == [heard(S1)], "others are not asked about"


def test_to_ask_for_the_anchor_changes_no_choice_of_replicas() -> None:
    """A leader is asked for it by another service, which no event tells of."""
    asked = Roster(1, E, prove=True)
    plain = Roster(1, E, prove=True)
    for roster in (asked, plain):
        for peer in (E, S1, T1):
            roster.hear(heard(peer), 0.0)
    assert asked.anchor() == ""
    assert asked.peers.present() == plain.peers.present()
    chosen, other = ({**vars(r.participants), "_peers": None} for r in (asked, plain))
    assert chosen == other


def test_a_leader_keeps_its_own_records_of_conduct() -> None:
    first = Leader(E, facts())
    first.conduct.cost(S1, 5.0, 1.0)
    second = Leader(E, facts(), conduct=first.conduct.records)
    assert second.conduct.on_probation(2.0) == {S1}
    second.conduct.good(S1)
    assert (first.conduct.epochs(S1), second.conduct.epochs(S1)) == (0, 1)
