"""Inspection of the members' tensors by made up observations: who is a liar, and who never is."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from node.core.ids import PeerId
from node.core.journey import Hop, Path
from node.epoch.leader.inspection import FORGOTTEN, LEAST, WINDOW, Inspection, Liar, Usual
from node.epoch.leader.routing import PARTNERS, crossed
from node.epoch.peers.observations import Observation, Observed, TensorKind
from node.pipeline.events import Direction

REPLICAS = {0: 2, 1: 2, 2: 3, 3: 2}
ME = PeerId("s0a")
PAIR = (PeerId("s1a"), PeerId("s1b"))


def name(stage: int, number: int) -> PeerId:
    return PeerId(f"s{stage}{'abc'[number]}")


class Stream:
    """Observations of a cell whose tensors drift. A peer has deviations of its own, as devices of
    another number format. ``spreads``: standard deviations of likeness and growth between
    micro-batches."""

    def __init__(
        self,
        seed: int,
        *,
        mixed: bool = False,
        spreads: tuple[float, float] = (0.13, 0.05),
    ) -> None:
        self._dice = random.Random(seed)
        self._spreads = spreads
        self.usual = {
            (stage, way): [self._dice.uniform(0.2, 2.5), self._dice.uniform(-0.2, 1.0)]
            for stage in range(1, 4)
            for way in Direction
        }
        self._device = {
            name(stage, i): mixed * self._dice.uniform(-0.01, 0.01)
            for stage, count in REPLICAS.items()
            for i in range(count)
        }

    def drift(self, by: float) -> None:
        """The model has learned."""
        for values in self.usual.values():
            values[0] = min(3.0, max(0.15, values[0] + self._dice.gauss(0.0, by)))
            values[1] += self._dice.gauss(0.0, by)

    def epoch(
        self,
        micro_batches: int = 8,
        change: Callable[[Observation], Observation | None] = lambda o: o,
        disjoint: bool = True,
    ) -> Observed:
        """One epoch. `change` makes an observation another one, or none."""
        found: list[Observation] = []
        for index in range(micro_batches):
            route = [
                name(stage, (index if disjoint else self._dice.randrange(60)) % count)
                for stage, count in REPLICAS.items()
            ]
            ring = [*route, route[0]]
            for stage in range(1, 4):
                for way, place, sender, receiver in (
                    (Direction.FORWARD, stage, ring[stage - 1], ring[stage + 1]),
                    (Direction.BACKWARD, 8 - stage, ring[stage + 1], ring[stage - 1]),
                ):
                    peer = route[stage]
                    likeness, growth = self.usual[stage, way]
                    errors = [self._dice.gauss(self._device[peer], s) for s in self._spreads]
                    made = change(
                        Observation(
                            peer,
                            TensorKind(stage, way, int(sender[1])),
                            index,
                            place,
                            sender=sender,
                            receiver=receiver,
                            likeness=likeness + errors[0],
                            growth=growth + errors[1],
                            confirmed=True,
                        )
                    )
                    if made is not None:
                        found.append(made)
        return Observed(tuple(found), frozenset())


def pairs(
    *of: tuple[str, str], agreed: Iterable[tuple[str, str]] = (), working: str = ""
) -> Observed:
    """Neighbours that contradict each other, and those that agree. ``working``: the peers on the
    paths of the plan."""
    disputes, same = (frozenset(frozenset(map(PeerId, p)) for p in rows) for rows in (of, agreed))
    stages = {PeerId(peer): int(peer[1]) for peer in working.split()}
    return Observed((), disputes, same, stages)


def judged(inspection: Inspection, epochs: Iterable[Observed]) -> list[tuple[int, Liar]]:
    return [
        (number, liar)
        for number, seen in enumerate(epochs, 1)
        for liar in inspection.judge(seen, number, ME)
    ]


def test_nobody_is_banned_in_1000_honest_epochs_of_mixed_devices() -> None:
    stream = Stream(1, mixed=True)
    inspection = Inspection()

    def epochs() -> Iterable[Observed]:
        for number in range(1000):
            stream.drift(0.03)
            if number % 97 == 96:
                stream.drift(1.0)  # another rate, other skips
            yield stream.epoch(disjoint=number % 2 == 0)

    assert judged(inspection, epochs()) == []


YOUNG = (0.27, 0.2)
"""Standard deviations between the micro-batches of a young model."""


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_nobody_is_banned_in_a_young_model_with_few_micro_batches(micro_batches: int) -> None:
    """A replica's micro-batches differ more than those of a trained model, and one or two do not
    show it in one epoch."""
    for seed in range(2):
        stream = Stream(seed, spreads=YOUNG)
        inspection = Inspection()

        def epochs(stream: Stream) -> Iterable[Observed]:
            for _ in range(300):
                stream.drift(0.05)
                yield stream.epoch(micro_batches)

        assert judged(inspection, epochs(stream)) == []


@pytest.mark.parametrize("about", [{"likeness": -2.0}, {"growth": 1.1}])
def test_a_liar_in_a_young_model_is_banned(about: dict[str, float]) -> None:
    stream = Stream(8, spreads=YOUNG)
    inspection = Inspection()
    assert judged(inspection, (stream.epoch(4) for _ in range(10))) == []

    def lies(o: Observation) -> Observation:
        if o.peer != PAIR[0]:
            return o
        return replace(o, **{field: getattr(o, field) + by for field, by in about.items()})

    found = judged(inspection, (stream.epoch(4, change=lies) for _ in range(10)))
    assert {liar.peer for _, liar in found} == {PAIR[0]}


def test_a_spread_is_learned_from_two_micro_batches_an_epoch() -> None:
    usual = Usual(first=0.15)
    assert usual.spread == pytest.approx(0.15)
    dice = random.Random(9)
    for epoch in range(200):
        one, other = dice.gauss(0.0, 0.6), dice.gauss(0.0, 0.6)
        usual.learn(0.0, (one - other) ** 2 / 2, 1, epoch)
    assert usual.spread == pytest.approx(0.6, rel=0.3)
    assert usual.error(4.0) == pytest.approx(usual.spread / 2)


@pytest.mark.parametrize("way", list(Direction))
@pytest.mark.parametrize(
    "about", [{"likeness": -0.3}, {"growth": 0.4}, {"growth": -0.4}, {"likeness": 0.5}]
)
def test_of_two_replicas_the_one_that_leaves_the_usual_is_banned(
    way: Direction, about: dict[str, float]
) -> None:
    stream = Stream(2)
    inspection = Inspection()
    assert judged(inspection, (stream.epoch() for _ in range(10))) == []

    def lies(o: Observation) -> Observation:
        if o.peer != PAIR[0] or o.kind.way is not way:
            return o
        return replace(o, **{field: getattr(o, field) + by for field, by in about.items()})

    found = judged(inspection, (stream.epoch(change=lies) for _ in range(10)))
    assert found
    assert {liar.peer for _, liar in found} == {PAIR[0]}
    assert LEAST <= found[0][0] <= 8


def test_two_epochs_prove_nothing() -> None:
    stream = Stream(3)
    inspection = Inspection()
    judged(inspection, (stream.epoch() for _ in range(10)))

    def lies(o: Observation) -> Observation:
        return replace(o, likeness=-2.0) if o.peer == PAIR[0] else o

    again = [stream.epoch(change=lies), stream.epoch(change=lies)]
    again += [stream.epoch() for _ in range(10)]
    assert judged(inspection, again) == []


def test_a_change_of_all_replicas_is_no_lie() -> None:
    stream = Stream(4)
    inspection = Inspection()

    def jumps(number: int) -> Observed:
        return stream.epoch(change=lambda o: replace(o, growth=o.growth + number // 10))

    assert judged(inspection, (jumps(number) for number in range(60))) == []


def test_peers_behind_a_liar_are_not_blamed_for_its_tensors() -> None:
    stream = Stream(5)
    inspection = Inspection()
    judged(inspection, (stream.epoch() for _ in range(10)))

    def lies(o: Observation) -> Observation:
        # Routes are disjoint, so all that one replica of stage 2 gets comes from the liar.
        if o.index % 2 or o.place < 1:
            return o
        return replace(o, likeness=o.likeness - 1.0, growth=o.growth + 0.5)

    found = judged(inspection, (stream.epoch(12, change=lies) for _ in range(10)))
    assert {liar.peer for _, liar in found} == {PAIR[0]}


def test_a_silent_peer_is_banned_by_two_senders_and_two_receivers_only() -> None:
    def lies(o: Observation) -> Observation:
        return replace(o, likeness=-2.0, confirmed=False) if o.peer == PAIR[0] else o

    for disjoint in (True, False):
        stream = Stream(6)
        inspection = Inspection()
        judged(inspection, (stream.epoch() for _ in range(10)))
        epochs = [stream.epoch(12, lies, disjoint) for _ in range(10)]
        # The leader sends to the liar, so one of its receivers could be the one that lies.
        found = {liar.peer for _, liar in judged(inspection, epochs)}
        receivers = {o.receiver for e in epochs for o in e.observations if o.peer == PAIR[0]}
        assert len(receivers) > 1
        assert found <= {PAIR[0]}
        if not disjoint:
            assert found == {PAIR[0]}


def test_of_two_that_contradict_each_other_nobody_is_banned() -> None:
    inspection = Inspection()
    assert judged(inspection, [pairs(("s1a", "s2a"))] * 20) == []
    assert inspection.apart() == {frozenset(("s1a", "s2a"))}


ONE_BEFORE_THREE = "s0a s1a s2a s2b s2c"
WITHOUT_ONE = "s0a s1a s2a s2c"


def disputed(accused: str, others: Iterable[str], working: str = ONE_BEFORE_THREE) -> Observed:
    """The only replica of stage 1 contradicts one of stage 2, and agrees with the others."""
    return pairs(("s1a", accused), agreed=[("s1a", p) for p in others], working=working)


HONEST = pairs(agreed=[("s1a", "s2a"), ("s1a", "s2c")], working=WITHOUT_ONE)


def test_who_contradicts_the_only_replica_that_another_agrees_with_is_banned() -> None:
    found = judged(Inspection(), [disputed("s2b", ["s2a", "s2c"])] * LEAST)
    assert [(number, liar.peer) for number, liar in found] == [(LEAST, "s2b")]
    parted = disputed("s2b", ["s2a"], ONE_BEFORE_THREE + " s1b")
    assert judged(Inspection(), [parted] * 20) == [], "another replica can be put between"
    assert judged(Inspection(), [disputed("s2b", [])] * 20) == [], "nobody agrees with it"
    elsewhere = pairs(("s1a", "s2b"), agreed=[("s1a", "s0a")], working=ONE_BEFORE_THREE)
    assert judged(Inspection(), [elsewhere] * 20) == [], "only a peer of another stage does"
    assert judged(Inspection(), [disputed("s2a", [], "s0a s1a s2a")] * 20) == [], "both are alone"


def test_the_only_replica_gets_at_most_one_of_its_neighbours_out() -> None:
    inspection = Inspection()
    seen = [disputed("s2b", ["s2a", "s2c"])] * LEAST
    seen += [disputed("s2c", ["s2a"], WITHOUT_ONE)] * 30
    assert [(number, liar.peer) for number, liar in judged(inspection, seen)] == [(LEAST, "s2b")]
    found = judged(inspection, [disputed("s2a", ["s2c"], WITHOUT_ONE)] * 30)
    assert [liar.peer for _, liar in found] == ["s1a"], "it contradicts two within few epochs"
    again = judged(inspection, [HONEST] * WINDOW + [disputed("s2b", ["s2a", "s2c"])] * LEAST)
    assert [liar.peer for _, liar in again] == ["s2b"], "it may be the liar of the first time"


def test_a_second_liar_does_not_get_the_only_replica_banned() -> None:
    seen = [disputed("s2b", ["s2a", "s2c"])] * LEAST + [HONEST] * 20
    seen += [disputed("s2c", ["s2a"], WITHOUT_ONE)] * 30
    assert [(n, liar.peer) for n, liar in judged(Inspection(), seen)] == [(LEAST, "s2b")]


def test_a_silent_peer_beside_the_only_replica_of_a_stage_is_banned_once() -> None:
    def seen(stream: Stream, liar: PeerId) -> Observed:
        def lies(o: Observation) -> Observation:
            lone = replace(o, sender=PeerId("s0b"), receiver=PeerId("s2a"))
            if o.peer not in PAIR:
                return o
            return replace(lone, likeness=-2.0, confirmed=False) if o.peer == liar else lone

        found = stream.epoch(change=lies)
        agreed = [(p, other) for p in PAIR if p != liar for other in ("s0b", "s2a")]
        return Observed(
            found.observations,
            frozenset(),
            pairs(agreed=agreed).agreed,
            {PeerId("s0b"): 0, **dict.fromkeys(PAIR, 1), PeerId("s2a"): 2},
        )

    stream = Stream(7)
    inspection = Inspection()
    assert judged(inspection, (seen(stream, ME) for _ in range(10))) == []
    found = judged(inspection, (seen(stream, PAIR[0]) for _ in range(10)))
    assert {liar.peer for _, liar in found} == {PAIR[0]}
    assert judged(inspection, (seen(stream, PAIR[1]) for _ in range(10))) == []


def test_records_of_peers_that_have_long_gone_are_deleted() -> None:
    inspection = Inspection()
    judged(inspection, [pairs(("s1a", "s2a"))])
    judged(inspection, [pairs(("s1b", "s2b"))] * (FORGOTTEN - 1))
    assert inspection._records.keys() == {"s1a", "s2a", "s1b", "s2b"}
    judged(inspection, [pairs(("s1b", "s2b"))])
    assert inspection._records.keys() == {"s1b", "s2b"}


def test_who_contradicts_two_others_is_banned() -> None:
    inspection = Inspection()
    seen = [pairs(("s1a", "s2a")), pairs(("s1a", "s2b")), pairs(("s1a", "s2a"))]
    ((number, liar),) = judged(inspection, seen)
    assert (number, liar.peer) == (LEAST, "s1a")


def test_two_liars_do_not_hide_each_other() -> None:
    seen = [pairs(*((liar, f"s2{replica}") for liar in ("s1a", "s3a") for replica in "abc"))]
    found = judged(Inspection(), seen * LEAST)
    assert [(number, liar.peer) for number, liar in found] == [(LEAST, "s1a"), (LEAST, "s3a")]


def test_of_many_that_contradict_each_other_alike_nobody_is_banned() -> None:
    seen = [pairs(("s1a", "s2a"), ("s1a", "s2b"), ("s1b", "s2a"), ("s1b", "s2b"))]
    assert judged(Inspection(), seen * 20) == []


def test_who_contradicts_the_leader_is_banned() -> None:
    ((number, liar),) = judged(Inspection(), [pairs((ME, "s1a"))] * LEAST)
    assert (number, liar.peer) == (LEAST, "s1a")


def test_few_paths_are_tried_for_two_that_cannot_be_parted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer's disputes must not hold the leader's loop."""
    paths = [
        Path(i, name(0, 0), (i,), (Hop(1, name(1, 0)), Hop(2, PeerId(f"s2-{i % 100}"))))
        for i in range(4000)
    ]
    apart = {frozenset((name(1, 0), PeerId(f"s2-{i}"))) for i in range(100)}
    tried: list[int] = []

    def exchanged(one: Path, other: Path, at: int) -> tuple[Path, ...]:
        tried.append(other.index)
        return ()

    monkeypatch.setattr("node.epoch.leader.routing._exchanged", exchanged)
    assert crossed(paths, apart, lambda a, b: True) == tuple(paths)
    assert len(tried) <= 100 * PARTNERS


def test_paths_exchange_the_rest_behind_two_that_should_be_apart() -> None:
    letters = "ab"
    paths = [
        Path(i, name(0, i % 2), (i,), tuple(Hop(s, name(s, i % 2)) for s in (1, 2, 3)))
        for i in range(4)
    ]

    def texts(found: Iterable[Path]) -> list[str]:
        return ["".join(hop.peer[2] for hop in path.journey[:-1]) for path in found]

    assert texts(paths) == ["aaaa", "bbbb"] * 2
    for a, b in (("s1a", "s2a"), ("s2b", "s3b"), ("s0b", "s1b"), ("s3a", "s0a")):
        apart = {frozenset((PeerId(a), PeerId(b)))}
        found = crossed(paths, apart, lambda a, b: True)
        met = {
            frozenset((x.peer, y.peer))
            for p in found
            for x, y in zip(p.journey, p.journey[1:], strict=False)
        }
        assert not met & apart
        for stage in range(4):
            count = [text[stage] for text in texts(found)]
            assert sorted(count) == sorted(letters * 2)
    proven = crossed(paths, {frozenset((PeerId("s1a"), PeerId("s2a")))}, lambda a, b: a[2] == b[2])
    assert texts(proven) == texts(paths)
