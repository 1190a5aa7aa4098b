"""Accounts of epochs: work counts if both neighbours confirm it, and every token is accounted
for."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from node.coordinator.credit.account import NOBODY, CreditGround, EpochAccount, Gap, settle
from node.coordinator.credit.record import EpochRecord
from node.coordinator.credit.statement import Statement
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path
from testbed.swarms.signing import SigningSwarm

TOKENS = 16


def statements(record: EpochRecord) -> dict[PeerId, Statement]:
    return {s.peer: Statement.parse(s.said) for s in record.signed}


def account(record: EpochRecord, said: dict[PeerId, Statement] | None = None) -> EpochAccount:
    if said is None:
        said = statements(record)
    made = settle(record.plan, record.made, record.dropped, record.tokens, said)
    assert made.sums() == dict.fromkeys(made.stages, record.tokens)
    return made


def test_honest_peers_get_receipts_for_all_tokens_but_dropped_ones() -> None:
    record = SigningSwarm().epoch(dropped=(3,))
    a = account(record)
    work: dict[tuple[int, PeerId], int] = {}
    for path in record.plan.paths:
        for hop in path.journey[:-1]:
            if path.index != 3:
                work[hop.stage, hop.peer] = work.get((hop.stage, hop.peer), 0) + TOKENS
    assert a.receipts == work
    assert (a.unsigned, a.left_out, a.refused) == ({}, {}, [])


def test_a_peer_without_statements_leaves_its_neighbours_unsigned_and_is_named() -> None:
    swarm = SigningSwarm(ends=1, stages=3, replicas=1)
    origin, first, second, third = swarm.peers
    a = account(swarm.epoch(silent=[second]))
    tokens = TOKENS * swarm.micro_batches
    assert a.receipts == {(ENDS, origin): tokens, (2, second): tokens}
    assert a.unsigned == {
        Gap(1, (first,), (second,)): tokens,
        Gap(3, (third,), (second,)): tokens,
    }
    assert a.silent() == [second]


def test_without_the_origin_tokens_are_those_that_all_others_say() -> None:
    swarm = SigningSwarm(ends=1, stages=3, replicas=1)
    origin, first, second, third = swarm.peers
    a = account(swarm.epoch(silent=[origin]))
    assert {stage for stage, _ in a.receipts} == {ENDS, 2}
    assert a.silent() == [origin]


def test_micro_batches_that_nobody_signed_are_the_rest_of_the_epoch() -> None:
    swarm = SigningSwarm()
    record = swarm.epoch()
    gone = record.plan.paths[0]
    journey = {h.peer for h in gone.journey}
    said = {
        peer: without(s, gone.index) if peer in journey else s
        for peer, s in statements(record).items()
    }
    a = account(record, said)
    assert sum(a.unsigned.values()) == TOKENS * len(a.stages)
    assert {g.silent for g in a.unsigned} == {(gone.origin,)}
    assert {g.workers for g in a.unsigned} == {(h.peer,) for h in gone.journey}


def without(said: Statement, index: int) -> Statement:
    keep = [i for i, n in enumerate(said.indices) if n != index]

    def of(column: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(column[i] for i in keep)

    return replace(
        said,
        indices=of(said.indices),
        sizes=of(said.sizes),
        takers=of(said.takers),
        givers=of(said.givers),
    )


def test_a_stage_that_a_way_led_around_is_left_out() -> None:
    swarm = SigningSwarm(ends=1, stages=3, replicas=1)
    record = swarm.epoch()
    places = {m.peer: i for i, m in enumerate(record.plan.members)}
    origin, first, second, third = swarm.peers
    said = statements(record)
    del said[second]
    count = swarm.micro_batches
    said[first] = replace(said[first], givers=(places[third],) * count)
    said[third] = replace(said[third], takers=(places[first],) * count)
    a = account(record, said)
    assert a.left_out == {2: record.tokens}
    assert {p for _, p in a.receipts} == {origin, first, third}
    assert not a.unsigned
    assert not a.refused


def test_a_path_planned_around_a_stage_leaves_it_out() -> None:
    swarm = SigningSwarm(ends=1, stages=2, replicas=1, micro_batches=2)
    record = swarm.epoch()
    origin, first, second = swarm.peers
    short = Path(0, origin, (0,), (Hop(1, first),))
    plan = replace(record.plan, paths=(short, record.plan.paths[1]))
    a = settle(plan, record.made, (), record.tokens, {})
    assert a.left_out == {}, "nobody signed anything"
    places = {m.peer: i for i, m in enumerate(plan.members)}

    def two(takers: tuple[PeerId, PeerId], givers: tuple[PeerId, PeerId]) -> Statement:
        return replace(
            statements(record)[origin],
            takers=tuple(places[p] for p in takers),
            givers=tuple(places[p] for p in givers),
        )

    said = {
        origin: two((first, second), (first, first)),
        first: two((origin, origin), (origin, second)),
        second: without(two((first, first), (origin, origin)), 0),
    }
    a = account(replace(record, plan=plan), {**said, **resigned(record, plan, said)})
    assert a.left_out == {2: TOKENS}
    assert a.receipts == {
        (ENDS, origin): 2 * TOKENS,
        (1, first): 2 * TOKENS,
        (2, second): TOKENS,
    }


def resigned(
    record: EpochRecord, plan: object, said: dict[PeerId, Statement]
) -> dict[PeerId, Statement]:
    """The statements, of the version that the other plan makes."""
    made = replace(record, plan=plan).made
    return {peer: replace(s, made=made) for peer, s in said.items()}


# ----------------------------------------------------------------- what is refused


def thief(swarm: SigningSwarm) -> tuple[EpochRecord, dict[PeerId, Statement], PeerId]:
    """An epoch of one micro-batch, its statements, and the replica of stage 2 that had no work."""
    record = swarm.epoch()
    used = {h.peer for p in record.plan.paths for h in p.journey}
    (idle,) = set(swarm.stages[2]) - used
    return record, statements(record), idle


def changed(said: Statement, **columns: int) -> Statement:
    return replace(said, **{name: (value,) for name, value in columns.items()})


def naming_a_thief(
    record: EpochRecord, said: dict[PeerId, Statement], idle: PeerId
) -> dict[PeerId, Statement]:
    """Both neighbours of the peer at stage 2 name the idle replica instead of it."""
    place = [m.peer for m in record.plan.members].index(idle)
    (path,) = record.plan.paths
    before = path.hops[0].peer
    behind = path.hops[2].peer
    return {
        **said,
        before: changed(said[before], givers=place),
        behind: changed(said[behind], takers=place),
    }


def test_work_that_its_worker_claims_is_not_given_to_another_by_its_neighbours() -> None:
    swarm = SigningSwarm(ends=1, stages=3, replicas=2, micro_batches=1)
    record, said, idle = thief(swarm)
    a = account(record, naming_a_thief(record, said, idle))
    worker = record.plan.paths[0].hops[1].peer
    assert (2, idle) not in a.receipts
    assert (2, worker) not in a.receipts
    assert {(r.ground, r.peer) for r in a.refused} == {
        (CreditGround.DOUBLE, idle),
        (CreditGround.DOUBLE, worker),
    }


def test_claims_of_many_micro_batches_are_refused_once() -> None:
    swarm = SigningSwarm(ends=1, stages=3, replicas=2, micro_batches=8)
    record = swarm.epoch()
    thief, victim = swarm.stages[2]
    places = {m.peer: i for i, m in enumerate(record.plan.members)}
    said = statements(record)
    for peer in (*swarm.stages[1], *swarm.stages[3]):
        turned = {places[victim]: places[thief]}
        said[peer] = replace(
            said[peer],
            takers=tuple(turned.get(p, p) for p in said[peer].takers),
            givers=tuple(turned.get(p, p) for p in said[peer].givers),
        )
    a = account(record, said)
    refused = {(r.ground, r.peer): r.text for r in a.refused}
    assert len(a.refused) == len(refused) == 2
    assert "and 3 others" in refused[CreditGround.DOUBLE, thief]


def test_a_replacement_gets_the_receipt_for_work_that_nobody_else_claims() -> None:
    swarm = SigningSwarm(ends=1, stages=3, replicas=2, micro_batches=1)
    record, said, idle = thief(swarm)
    said = naming_a_thief(record, said, idle)
    del said[record.plan.paths[0].hops[1].peer]
    a = account(record, said)
    assert a.receipts[2, idle] == TOKENS
    assert not a.refused


def test_a_peer_that_claims_planned_work_of_another_does_not_block_it() -> None:
    swarm = SigningSwarm(ends=1, stages=3, replicas=2, micro_batches=1)
    record, said, idle = thief(swarm)
    worker = record.plan.paths[0].hops[1].peer
    a = account(record, {**said, idle: said[worker]})
    assert a.receipts[2, worker] == TOKENS
    assert not a.unsigned


Lie = Callable[[Statement, EpochRecord], Statement]
LIES: dict[str, tuple[Lie, CreditGround]] = {
    "a peer of its own stage as its neighbour": (
        lambda s, r: changed(s, takers=[m.stage for m in r.plan.members].index(1)),
        CreditGround.STOLEN,
    ),
    "a member that there is not": (lambda s, r: changed(s, takers=999), CreditGround.STOLEN),
    "a micro-batch that there is not": (lambda s, r: changed(s, indices=5), CreditGround.STOLEN),
    "another version": (
        lambda s, r: replace(s, made=replace(s.made, lineage="0" * 32)),
        CreditGround.ELSEWHERE,
    ),
    "another cell": (lambda s, r: replace(s, cell="0" * 16), CreditGround.ELSEWHERE),
    "more tokens of the micro-batch": (lambda s, r: changed(s, sizes=99), CreditGround.SIZE),
    "more tokens of the epoch": (lambda s, r: replace(s, tokens=99), CreditGround.SUM),
}


@pytest.mark.parametrize("name", LIES)
def test_a_statement_with_a_lie_counts_for_nobody(name: str) -> None:
    """The liar is at stage 1, so the origin and stage 2 lose its confirmation."""
    lie, ground = LIES[name]
    swarm = SigningSwarm(ends=1, stages=3, replicas=1, micro_batches=1)
    record = swarm.epoch()
    origin, liar, second, third = swarm.peers
    said = statements(record)
    a = account(record, {**said, liar: lie(said[liar], record)})
    assert [(r.ground, r.peer) for r in a.refused] == [(ground, liar)]
    assert {p for _, p in a.receipts} == {liar, third}
    assert a.silent() == [liar]


def test_a_peer_outside_of_the_plan_confirms_nothing() -> None:
    record = SigningSwarm().epoch()
    said = statements(record)
    a = account(record, {**said, PeerId("stranger"): next(iter(said.values()))})
    assert [(r.ground, r.peer) for r in a.refused] == [(CreditGround.STRANGER, "stranger")]
    assert not a.unsigned


def sized(said: Statement, tokens: int, *indices: int) -> Statement:
    """The statement with another size of these micro-batches, or of all."""
    pairs = zip(said.indices, said.sizes, strict=True)
    sizes = [tokens if i in indices or not indices else size for i, size in pairs]
    return replace(said, sizes=tuple(sizes))


@pytest.mark.parametrize("tokens", [0, 15, 17, 10**9])
@pytest.mark.parametrize("hops", [2, 3])
@pytest.mark.parametrize("stage", ["origin", "hop"])
def test_a_liar_about_sizes_costs_its_own_statement_and_is_named_alone(
    tokens: int, hops: int, stage: str
) -> None:
    swarm = SigningSwarm(ends=2, stages=hops, replicas=2)
    record = swarm.epoch()
    liar = swarm.stages[1][0]
    if stage == "origin":
        liar = swarm.stages[ENDS][1]
    said = statements(record)
    honest = account(record, {p: s for p, s in said.items() if p != liar})
    a = account(record, said | {liar: sized(said[liar], tokens)})
    assert [(r.ground, r.peer) for r in a.refused] == [(CreditGround.SIZE, liar)]
    assert a.receipts == honest.receipts
    assert a.silent() == [liar]


def test_without_a_majority_the_micro_batches_are_unsigned_and_nobody_is_named() -> None:
    """Two peers sign each micro-batch. Two that lie together, one beside an honest peer, choose
    sizes whose sum is right without that peer."""
    swarm = SigningSwarm(ends=1, stages=1, replicas=2, micro_batches=4)
    record = swarm.epoch()
    first, second = swarm.stages[1]
    said = statements(record)
    lies = {
        first: sized(said[first], TOKENS - 6),
        second: sized(said[second], TOKENS + 6),
    }
    a = account(record, said | lies)
    assert not a.refused
    assert not a.receipts
    assert not a.silent()


def test_two_liars_that_agree_do_not_get_the_third_named() -> None:
    swarm = SigningSwarm(ends=1, stages=2, replicas=1)
    record = swarm.epoch()
    _, *liars = swarm.peers
    said = statements(record)
    a = account(record, said | {p: sized(said[p], 99) for p in liars})
    assert not a.refused
    assert not a.silent()


def test_two_that_agree_on_a_wrong_size_do_not_get_a_lone_signer_named() -> None:
    """The sum is right without the honest peer, which alone signs another micro-batch."""
    swarm = SigningSwarm(ends=2, stages=1, replicas=2)
    record = swarm.epoch()
    wrong, alone = record.plan.paths[:2]
    liars = (wrong.origin, wrong.hops[0].peer)
    said = statements(record)
    said |= {p: sized(said[p], TOKENS + 6, wrong.index) for p in liars}
    said[alone.hops[0].peer] = without(said[alone.hops[0].peer], alone.index)
    a = account(record, said)
    assert [(r.ground, r.peer) for r in a.refused] == [(CreditGround.SUM, NOBODY)]


def test_where_nobody_can_tell_the_liar_the_micro_batch_alone_is_unsigned() -> None:
    """Another micro-batch has no signer, so the sum does not tell who is right."""
    swarm = SigningSwarm(ends=2, stages=1, replicas=2)
    record = swarm.epoch()
    disputed, missing = record.plan.paths[0], record.plan.paths[1]
    said = {peer: without(s, missing.index) for peer, s in statements(record).items()}
    liar = disputed.hops[0].peer
    said[liar] = sized(said[liar], TOKENS - 1, disputed.index)
    a = account(record, said)
    assert not a.refused
    assert sum(a.unsigned.values()) == 2 * TOKENS * len(a.stages)
    assert a.silent() == [missing.origin], "nobody was silent about the disputed one"


def test_a_lie_that_nobody_else_saw_costs_the_micro_batch() -> None:
    swarm = SigningSwarm(ends=2, stages=1, replicas=2)
    record = swarm.epoch()
    seen = record.plan.paths[0]
    liar = seen.origin
    worker = seen.hops[0].peer
    said = statements(record)
    said[worker] = without(said[worker], seen.index)
    said[liar] = sized(said[liar], 99, seen.index)
    a = account(record, said)
    assert [(r.ground, r.peer) for r in a.refused] == [(CreditGround.SUM, NOBODY)]
    assert sum(a.receipts.values()) > 0


def test_a_sum_that_nothing_explains_leaves_the_epoch_unsigned_and_names_nobody() -> None:
    record = SigningSwarm().epoch()
    said = {p: replace(s, tokens=record.tokens + 1) for p, s in statements(record).items()}
    a = account(replace(record, tokens=record.tokens + 1), said)
    assert {(r.ground, r.peer) for r in a.refused} == {(CreditGround.SUM, NOBODY)}
    assert not a.receipts
    assert not a.silent()
    assert sum(a.unsigned.values()) == (record.tokens + 1) * len(a.stages)


def test_an_epoch_without_micro_batches_has_no_work() -> None:
    record = SigningSwarm().epoch()
    plan = replace(record.plan, paths=())
    a = settle(plan, record.made, (), 0, {})
    assert (a.stages, a.sums()) == ((), {})
