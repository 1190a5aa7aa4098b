"""Leaders that find groups over the wire, among honest leaders and among some that are silent, lie,
or pretend to be others."""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest

from node.averaging.strategies.group_forming import TIMES
from node.core.ids import CellId, PeerId
from node.core.journey import Host, Partner
from node.dht.topics import outer_topic
from node.outer import notes
from node.outer.forming import BARRED_WINDOWS, CellGroup, GroupFinder
from node.outer.notes import Acceptance, Accepting
from node.sim.process import SimSigner
from protos import cells_pb2 as pb
from tests.cells.leaders import (
    KEY,
    RUN,
    START,
    WALL,
    WINDOW,
    Accepter,
    Leader,
    Peer,
    Recorder,
    World,
    by_turn,
    cell_id,
    facts,
)


def agree(leaders: Collection[Leader], found: Mapping[CellId, CellGroup | None], most: int) -> None:
    """Assert that all members of a group have the same group, with the facts that each stated."""
    by_cell = {leader.cell: leader for leader in leaders}
    for cell, group in found.items():
        if group is None:
            continue
        assert cell in group.members
        assert 2 <= len(group.members) <= most
        for other, partner in group.members.items():
            assert found[other] == group
            assert partner == Partner(other, by_cell[other].me, by_cell[other].facts.hosts)


def all_look(leaders: list[Leader], **more: Any) -> dict[CellId, CellGroup | None]:
    asked = {leader.cell: leader.looks(**more) for leader in leaders}
    leaders[0].world.run(more.get("start", START) + 200.0)
    assert not [e for leader in leaders for e in leader.errors]
    return {cell: future.result() for cell, future in asked.items()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("count", "most", "least"), [(2, 4, 2), (3, 4, 3), (5, 4, 4), (5, 2, 4), (8, 4, 7), (8, 2, 6)]
)
def test_cells_meet_in_groups_that_everybody_in_them_agrees_on(seed, count, most, least):
    world = World(seed)
    leaders = [Leader(world, n, world.dice.uniform(-1, 1)) for n in range(count)]
    found = all_look(leaders, most=most)
    agree(leaders, found, most)
    assert sum(group is not None for group in found.values()) >= least
    assert not [fault for leader in leaders for fault in leader.faults]


@pytest.mark.parametrize("seed", range(4))
def test_where_all_belong_together_a_cell_without_a_place_stays_alone(seed):
    world = World(seed)
    leaders = [Leader(world, n, world.dice.uniform(-1, 1)) for n in range(6)]
    found = all_look(leaders, most=4, together=True)
    agree(leaders, found, 4)
    assert sorted(len(group.members) for group in found.values() if group) == [4, 4, 4, 4]
    assert not [e for leader in leaders for e in leader.events("caller-barred")]


def test_a_cell_that_is_alone_under_a_key_tries_a_shorter_one(world: World):
    a = Leader(world, 1)
    b = Leader(world, 2)
    found = a.looks(keys=("1.4", "4")), b.looks(keys=("2.4", "4"))
    world.run()
    group = found[0].result()
    assert group == found[1].result()
    assert a.events("outer-grouped")[0].fields["key"] == "4"
    assert group.members.keys() == {a.cell, b.cell}


def test_a_group_has_the_anchors_that_its_cells_posted(world: World):
    leaders = [Leader(world, n, anchor=f"a{n}") for n in (1, 2)]
    found = all_look(leaders)
    for leader in leaders:
        group = found[leader.cell]
        assert group is not None
        assert group.anchors == {cell_id(1): "a1", cell_id(2): "a2"}


def test_the_addresses_of_other_leaders_are_learned(world: World):
    a = Leader(world, 1, maddrs=("/ip4/10.0.0.1/tcp/9",))
    b = Leader(world, 2, maddrs=("/ip4/10.0.0.2/tcp/9",))
    all_look([a, b])
    assert a.learned == {b.me: b.facts.maddrs}
    assert b.learned == {a.me: a.facts.maddrs}


def test_a_posting_stays_as_long_as_an_offer_under_its_key_may_bind(world: World):
    leader = Leader(world, 1)
    all_look([leader])
    assert leader.directory.lives == [TIMES.attempt - TIMES.post + TIMES.lock + TIMES.clocks]


class Unwilling(Accepter):
    """Accepts offers, and refuses the groups that are made of them."""

    async def Tell(self, request: pb.CellsNote, context: Any) -> pb.CellsReply:
        reply = await super().Tell(request, context)
        if request.WhichOneof("say") == "named":
            return pb.CellsReply(accepts=False, reason="no")
        return reply


def test_a_leader_that_refuses_its_group_is_reported(world: World):
    leader = Leader(world, 1)
    other = Unwilling(world, 2)
    all_look([leader])
    assert other.told == ["offer", "named"], "what was answered is not said again"
    (event,) = leader.events("outer-refused")
    assert event.fields["peer"] == other.me


class Silent(GroupFinder):
    """Finder that binds others and names no group while `silent` is True."""

    silent = True

    def _name(self, search, key, members) -> None:
        if not self.silent:
            super()._name(search, key, members)


class SilentLeader(Leader):
    finds = Silent


def test_a_caller_that_goes_silent_costs_one_turn_and_is_barred(world: World):
    first, *others = by_turn([cell_id(n) for n in range(4)])
    silent = SilentLeader(world, int(first, 16))
    leaders = [Leader(world, int(cell, 16)) for cell in others]
    silent.looks()
    found = all_look(leaders)
    agree([silent, *leaders], found, 4)
    assert all(g is not None and g.members.keys() == set(others) for g in found.values())
    for leader in leaders:
        (event,) = leader.events("caller-barred")
        assert event.fields["cell"] == first


class Late(GroupFinder):
    """Finder that names its group when its offer binds nobody any more, while `late` is True."""

    late = True

    def _name(self, search, key, members) -> None:
        name = partial(super()._name, search, key, members)
        if self.late:
            asyncio.get_running_loop().call_later(TIMES.lock, name)
        else:
            name()


class LateLeader(Leader):
    finds = Late


def test_a_cell_that_named_its_group_late_is_met_in_the_next_window(world: World):
    first, second = by_turn([cell_id(1), cell_id(2)])
    late = LateLeader(world, int(first, 16))
    other = Leader(world, int(second, 16))
    met: list[bool] = []
    for n in range(2):
        start = START + n * 300.0
        late.looks(window=WINDOW + n, start=start)
        met.append(all_look([other], window=WINDOW + n, start=start)[second] is not None)
        late.finder.late = False
    assert met == [True, True]
    (event,) = other.events("caller-barred")
    assert event.fields["cell"] == first


def test_a_barred_cell_is_met_again_when_the_windows_are_over(world: World):
    first, second = by_turn([cell_id(1), cell_id(2)])
    silent = SilentLeader(world, int(first, 16))
    other = Leader(world, int(second, 16))
    met: list[bool] = []
    for n in range(BARRED_WINDOWS + 2):
        start = START + n * 300.0
        silent.looks(window=WINDOW + n, start=start)
        met.append(all_look([other], window=WINDOW + n, start=start)[second] is not None)
        silent.finder.silent = False
    assert met == [False] * (BARRED_WINDOWS + 1) + [True]


def test_a_cell_that_never_answers_costs_nothing_but_itself(world: World):
    leaders = [Leader(world, n) for n in range(3)]
    gone = Peer(world, "gone")
    frozen = Leader(world, 8)
    gone.posts(facts(cell_id(9)), -5)
    frozen.posts(frozen.facts, -5)
    gone.transport.serving = False
    frozen.loop.frozen = True
    found = all_look(leaders)
    agree(leaders, found, 4)
    assert all(group is not None and len(group.members) == 3 for group in found.values())


def test_a_member_that_the_naming_did_not_reach_is_told_again(world: World):
    first, second = by_turn([cell_id(1), cell_id(2)])
    caller = Leader(world, int(first, 16))
    member = Leader(world, int(second, 16))
    hear = member.finder.Tell
    lost = []

    async def loses_the_first(request: pb.CellsNote, context: Any) -> Any:
        if request.WhichOneof("say") == "named" and not lost:
            lost.append(request)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
        return await hear(request, context)

    handler = grpc.unary_unary_rpc_method_handler(loses_the_first)
    first_asked = grpc.method_handlers_generic_handler("tutti.v1.Cells", {"Tell": handler})
    member.transport.server._generic.insert(0, first_asked)
    found = all_look([caller, member])
    assert lost
    assert found[first] is not None
    agree([caller, member], found, 4)


def test_nobody_is_found_while_the_directory_is_down():
    world = World(down=True)
    leaders = [Leader(world, n) for n in range(2)]
    assert set(all_look(leaders).values()) == {None}
    assert all(leader.events("outer-not-posted") for leader in leaders)
    world.down = False
    assert all(all_look(leaders, window=WINDOW + 1, start=START + 300).values()), "it comes back"


def test_a_directory_that_never_answers_is_not_waited_for():
    world = World(delay=(500.0, 500.0))
    leader = Leader(world, 1)
    assert all_look([leader]) == {leader.cell: None}
    assert leader.events("outer-not-read")


# ----------------------------------------------------------- the cells asked


def test_only_those_are_asked_that_fit(world: World):
    leader = Leader(world, 1, anchor="aa", change=2)
    postings = {
        "fits": facts(cell_id(2), anchor="aa", change=2),
        "no-anchor": facts(cell_id(3), anchor="", change=2),
        "another-change": facts(cell_id(4), anchor="aa", change=1),
        "own-cell": facts(leader.cell, anchor="aa", change=2),
        "late": facts(cell_id(5), anchor="aa", change=2),
        "clock-ahead": facts(cell_id(6), anchor="aa", change=2),
    }
    peers = {name: Recorder(world, name) for name in (*postings, "garbage")}
    at = {"late": TIMES.post + TIMES.clocks + 0.1, "clock-ahead": TIMES.post + TIMES.clocks - 0.1}
    for name, about in postings.items():
        peers[name].posts(about, at.get(name, TIMES.post))
    world.write(outer_topic(WINDOW, KEY), PeerId("garbage"), b'{"cell": 3}', START - 5)
    assert all_look([leader]) == {leader.cell: None}
    assert {name for name, peer in peers.items() if peer.heard} == {"fits", "clock-ahead"}
    for peer in peers.values():
        assert {n.WhichOneof("say") for n in peer.heard} <= {"offer"}
    assert [e.fields["cell"] for e in leader.events("cell-led-twice")] == [leader.cell]


def test_an_anchor_does_not_matter_to_who_has_none(world: World):
    leader = Leader(world, 1)
    other = Recorder(world, "other")
    other.posts(facts(cell_id(2), anchor="bb"), -5)
    all_look([leader])
    assert other.heard


def test_of_two_who_claim_a_cell_the_first_in_order_is_asked(world: World):
    leader = Leader(world, 1)
    a = Recorder(world, "a")
    b = Recorder(world, "b")
    for peer in (b, a):
        peer.posts(facts(cell_id(2)), -5)
    all_look([leader])
    assert [peer.me for peer in (a, b) if peer.heard] == ["a"]
    assert leader.events("cell-led-twice")


def test_a_caller_names_its_group_and_releases_who_is_not_in_it(world: World):
    leader = Leader(world, 1)
    quick = [Accepter(world, n) for n in (2, 3, 4)]
    late = Accepter(world, 5, TIMES.answers + 1)
    found = all_look([leader], most=3)[leader.cell]
    assert len(found.members) == 3
    for peer in quick:
        cell = peer.facts.cell
        inside = found.members.get(cell) == Partner(cell, peer.me, peer.facts.hosts)
        assert peer.told == ["offer", "named" if inside else "released"]
        for note in peer.heard[1:] if inside else ():
            told = notes.parse_note(note)
            assert told.keys() == found.members.keys()
            for shown in told.values():
                Accepting(peer.signer, RUN).check(shown, WINDOW, KEY, leader.cell)
    assert late.told == ["offer", "released"]


# ----------------------------------------------------------- offers of others


def offered(
    peer: Peer, to: Leader, caller: CellId, at: float, patience_s: float = 10.0, **changes: Any
) -> Any:
    """Send an offer under the usual key and return the reply."""
    what = {"window": WINDOW, "key": KEY, "caller": caller, **changes}
    return peer.do(peer.tell(to.me, notes.offer_note(**what), patience_s), at)


def test_an_offer_by_who_does_not_lead_the_cell_is_refused(world: World):
    victim = Leader(world, 1)
    honest = Peer(world, "honest")
    liar = Peer(world, "a-liar")
    honest.posts(facts(cell_id(2)), -5)
    victim.looks()
    lie = offered(liar, victim, cell_id(2), START + 5)
    unposted = offered(liar, victim, cell_id(3), START + 5.1)
    truth = offered(honest, victim, cell_id(2), START + 12)
    world.run(START + 15)
    assert [r.result().accepts for r in (lie, unposted, truth)] == [False, False, True]
    shown = notes.parse_acceptance(truth.result().acceptance)
    assert (shown.cell, shown.leader, shown.hosts) == (victim.cell, victim.me, victim.facts.hosts)
    Accepting(honest.signer, RUN).check(shown, WINDOW, KEY, cell_id(2))
    assert victim.faults == []


def test_an_offer_of_a_late_or_bound_cell_is_refused(world: World):
    victim = Leader(world, 1)
    peers = [Peer(world, f"p{n}") for n in range(3)]
    for n, at in enumerate((-5.0, -5.0, -1.0)):
        peers[n].posts(facts(cell_id(n + 2)), at)
    victim.looks()
    replies = [offered(p, victim, cell_id(n + 2), START + 5.5 + n) for n, p in enumerate(peers)]
    world.run(START + 12)
    assert [r.result().accepts for r in replies] == [True, False, False]


@pytest.mark.parametrize("patience_s", [10.0, 0.12], ids=["waits", "hangs-up"])
def test_strangers_do_not_make_a_peer_read_the_directory_often(patience_s):
    world = World(delay=(0.1, 0.2))
    victim = Leader(world, 1)
    stranger = Peer(world, "stranger")
    victim.looks()
    for n in range(200):
        offered(stranger, victim, cell_id(9), START + 10 + n / 10, patience_s=patience_s)
    world.run(START + 30.0)
    assert 2 <= world.reads(victim.me) <= 2 + 20 / TIMES.answers


def test_a_caller_seen_late_is_looked_for_again(world: World):
    victim = Leader(world, 1)
    caller = Peer(world, "caller")
    victim.looks()
    world.run(START + 6.0)
    caller.posts(facts(cell_id(2)), -5)  # it took its time to be found
    reply = offered(caller, victim, cell_id(2), START + 11.0)
    world.run(START + 20.0)
    assert reply.result().accepts


def test_the_first_in_order_leads_a_cell_though_seen_later():
    world = World(delay=(0.1, 0.2))
    victim = Leader(world, 1)
    a = Peer(world, "a")
    b = Peer(world, "b")
    b.posts(facts(cell_id(2)), -5)
    victim.looks()
    world.run(START + 6.0)
    a.posts(facts(cell_id(2)), -5)
    replies = [
        offered(a, victim, cell_id(3), START + 8.0),  # has the directory read again
        offered(b, victim, cell_id(2), START + 9.0),
        offered(a, victim, cell_id(2), START + 10.0),
    ]
    world.run(START + 11.0)
    assert [r.result().accepts for r in replies] == [False, False, True]


def test_everybody_else_is_answered_busy(world: World):
    victim = Leader(world, 1)
    caller = Peer(world, "caller")
    caller.posts(facts(cell_id(2)), -5)
    replies = [offered(caller, victim, cell_id(2), 1.0)]  # it looks for nothing yet
    victim.looks()
    replies += [
        offered(caller, victim, cell_id(2), START + 5, window=WINDOW + 1),
        offered(caller, victim, cell_id(2), START + 5, key="9"),
        offered(caller, victim, cell_id(2), START + 150),  # it found none
    ]
    unsigned = notes.Acceptance(cell_id(2), caller.me, facts(cell_id(2)).hosts, bytes(64))
    for note in (
        notes.group_note(WINDOW, KEY, cell_id(2), [unsigned]),
        notes.release_note(WINDOW, cell_id(2)),
    ):
        replies.append(caller.do(caller.tell(victim.me, note), START + 5))
    world.run()
    assert not any(reply.result().accepts for reply in replies)
    assert victim.faults == []


def test_a_cell_that_is_released_is_free_at_once(world: World):
    victim = Leader(world, 1)
    a = Peer(world, "a")
    b = Peer(world, "b")
    for n, peer in enumerate((a, b)):
        peer.posts(facts(cell_id(n + 2)), -5)
    victim.looks()
    free = notes.release_note(WINDOW, cell_id(2))
    replies = [
        offered(a, victim, cell_id(2), START + 5.5),
        b.do(b.tell(victim.me, free), START + 6.0),  # not the one it is bound to
        a.do(a.tell(victim.me, free), START + 7.0),
        offered(b, victim, cell_id(3), START + 8.0),
    ]
    world.run(START + 10.0)
    assert [r.result().accepts for r in replies] == [True, False, True, True]


# ----------------------------------------------------------- groups that are named


class Scene:
    """A victim that is bound to a caller with a third cell beside, all three of which posted; the
    third's posting is by "third"."""

    def __init__(self) -> None:
        self.world = World()
        self.victim = Leader(self.world, 1)
        self.caller = Peer(self.world, "caller")
        self.third = Peer(self.world, "third")
        self.caller.posts(facts(cell_id(2)), -5)
        self.third.posts(facts(cell_id(3)), -5)
        self.found = self.victim.looks()
        reply = offered(self.caller, self.victim, cell_id(2), START + 5.5)
        self.world.run(START + 7.5)
        assert reply.result().accepts
        self.own = notes.parse_acceptance(reply.result().acceptance)

    def accept(
        self, peer: Peer, number: int, key: str = KEY, caller: int = 2, run: str = RUN
    ) -> Acceptance:
        said = Accepting(peer.signer, run)
        return said.accept(facts(cell_id(number)), WINDOW, key, cell_id(caller))

    def name(self, *members: Acceptance, by: Peer | None = None) -> Any:
        """Name a group of these members to the victim and return the victim's reply."""
        note = notes.group_note(WINDOW, KEY, cell_id(2), members)
        sender = by or self.caller
        reply = sender.do(sender.tell(self.victim.me, note))
        self.world.run(self.world.time.now + 200.0)
        return reply.result()

    def is_void(self, *members: Acceptance, by: Peer | None = None) -> bool:
        """Return True if the victim takes no part in this group and blames nobody."""
        refused = not self.name(*members, by=by).accepts
        return refused and self.found.result() is None and self.victim.faults == []

    @property
    def barred(self) -> bool:
        return any(e.fields["cell"] == cell_id(2) for e in self.victim.events("caller-barred"))


def test_a_group_counts_when_posted_leaders_signed_for_it():
    s = Scene()
    caller = s.accept(s.caller, 2)
    third = s.accept(s.third, 3)
    assert s.name(caller, third, s.own).accepts
    group = s.found.result()
    assert group.members.keys() == {cell_id(1), cell_id(2), cell_id(3)}
    assert group.members[cell_id(3)] == Partner(cell_id(3), s.third.me, third.hosts)
    assert s.name(caller, third, s.own).accepts, "it may be repeated"
    assert s.victim.faults == []


@pytest.mark.parametrize(
    ("signer", "signed", "shown"),
    [
        ("caller", {}, {"leader": PeerId("third")}),
        ("third", {"caller": 9}, {}),
        ("third", {"key": "9"}, {}),
        ("third", {"run": "another"}, {}),
        ("third", {}, {"hosts": {1: (Host(PeerId("caller")),)}}),
    ],
    ids=["forged", "another-caller", "another-key", "another-run", "other-hosts"],
)
def test_a_wrong_acceptance_is_a_fault_of_the_groups_caller(signer, signed, shown):
    s = Scene()
    wrong = replace(s.accept(getattr(s, signer), 3, **signed), **shown)
    assert s.name(s.accept(s.caller, 2), wrong, s.own) is grpc.StatusCode.INVALID_ARGUMENT
    assert [peer for peer, _ in s.victim.faults] == [s.caller.me]
    assert s.found.result() is None
    assert s.barred


def test_a_group_with_a_cell_not_posted_by_its_leader_is_void():
    for number, by in ((9, "third"), (3, "stranger")):
        s = Scene()
        peer = s.third if by == "third" else Peer(s.world, by)
        members = s.accept(s.caller, 2), s.accept(peer, number), s.own
        assert s.is_void(*members), "its posting may just not be seen here"
        assert s.barred


def test_a_group_is_named_by_its_caller_and_has_the_receiver():
    s = Scene()
    assert s.is_void(s.accept(s.caller, 2), s.own, by=s.third)
    s = Scene()
    assert s.is_void(s.accept(s.caller, 2), s.accept(s.third, 3))
    s = Scene()  # an acceptance in the receiver's name that the receiver did not sign
    stolen = replace(s.own, leader=s.caller.me)
    assert s.name(s.accept(s.caller, 2), stolen) is grpc.StatusCode.INVALID_ARGUMENT
    s = Scene()  # an acceptance signed by a peer that does not lead its cell
    assert s.is_void(s.accept(s.caller, 2), s.accept(s.caller, 1))


def test_a_malformed_note_is_a_fault(world: World):
    leader = Leader(world, 1)
    other = Peer(world, "other")
    bad = other.do(other.tell(leader.me, pb.CellsNote(window=1, caller="x")), 1.0)
    world.run(START)
    assert bad.result() is grpc.StatusCode.INVALID_ARGUMENT
    assert [peer for peer, _ in leader.faults] == [other.me]


@pytest.mark.parametrize(
    ("number", "signer", "window"),
    [(2, "accepter-2", WINDOW + 1), (3, "accepter-2", WINDOW), (2, "another", WINDOW)],
)
def test_an_acceptance_of_another_window_or_leader_is_a_fault(number, signer, window, world: World):
    leader = Leader(world, 1)
    other = Accepter(world, 2)
    other.says = lambda request: Accepting(SimSigner(PeerId(signer)), RUN).accept(
        facts(cell_id(number)), window, KEY, leader.cell
    )
    assert all_look([leader]) == {leader.cell: None}
    assert {peer for peer, _ in leader.faults} == {other.me}


# ----------------------------------------------------------- the service


def test_one_window_at_a_time_and_not_too_late(world: World):
    leader = Leader(world, 1)
    other = Leader(world, 2)
    first = leader.looks()
    again = leader.looks(window=WINDOW + 1, start=START + 5)
    late = other.looks(lead_s=0.0)
    world.run()
    assert again.done()
    assert (first.result(), late.result()) == (None, None)
    assert other.events("outer-late")
    assert not other.events("outer-alone")


def test_a_cell_that_is_late_for_the_first_key_tries_the_next(world: World):
    leader = Leader(world, 1)
    other = Leader(world, 2)
    asked = leader.looks(keys=("1", "2")), other.looks(keys=("1", "2"), lead_s=0.0)
    world.run()
    assert asked[0].result() == asked[1].result()
    assert leader.events("outer-grouped")[0].fields["key"] == "2"


def test_closing_ends_the_search(world: World):
    leader = Leader(world, 1)
    other = Leader(world, 2)
    asked = leader.looks()
    other.looks()
    leader.do(leader.finder.close(), START + 4.0)
    world.run(START + 5.0)
    assert asked.result() is None
    assert len(leader.finder.tasks) == 0
    world.run()
    assert not other.errors


def test_a_clock_that_is_set_back_ends_the_search(world: World):
    leader = Leader(world, 1)
    search = leader.looks()
    world.run(START + 10)
    assert not search.done()
    leader.clock.skew -= 3600.0
    world.run(START + 10 + TIMES.turn)
    assert search.result() is None


def test_a_search_that_is_cancelled_leaves_nobody_bound():
    world = World(delay=(0.1, 0.2))
    leader = Leader(world, 1)
    quick = Accepter(world, 2)
    slow = Accepter(world, 3, slow=1.5)

    async def cancelled() -> str:
        try:
            finding = leader.finder.find(leader.facts, WINDOW, (KEY,), 4, WALL + START)
            async with asyncio.timeout(WALL + START - leader.clock.wall() + offers + 1.0):
                await finding
        except TimeoutError:
            return "cancelled"
        return "found"

    order = by_turn([cell_id(n) for n in (1, 2, 3)])
    offers = TIMES.turns + order.index(leader.cell) * TIMES.turn
    ended = leader.do(cancelled(), START - 10.0)
    world.run()
    assert ended.result() == "cancelled"
    assert quick.told == slow.told == ["offer", "released"]
