"""Group forming without a leader: machines in virtual time with a slow and forgetful directory,
lossy lines, differing clocks, and callers that bind others and fall silent."""

import random
from collections.abc import Collection, Iterable
from dataclasses import replace

import pytest

from node.averaging.strategies import group_forming as f
from node.averaging.strategies.group_forming import GroupFormed, GroupForming, WindowSkipped
from node.core.ids import CellId
from testbed.planning.meetings import Window

LOSS = 0.02
UNSEEN = 0.05
A, B, C, D = map(CellId, "abcd")


class Net(Window):
    """``count`` cells that look for groups of ``most`` in a window that begins at 0. Its lines lose
    messages, its directory forgets, and the ``silent`` cells name no group."""

    def __init__(
        self, count: int, most: int, seed: int, silent: int = 0, keys: tuple[str, ...] = ("key",)
    ) -> None:
        cells = [CellId(f"c{i:02}") for i in range(count)]
        super().__init__(dict.fromkeys(cells, (keys, most)), seed, random.Random(seed))
        self.silent = set(cells[:silent])
        self.at: dict[CellId, float] = {}
        self.took: set[tuple[CellId, CellId]] = set()

    def run(self) -> dict[CellId, Collection[CellId]]:
        """The groups of honest cells."""
        return {cell: group for cell, group in super().run().items() if cell not in self.silent}

    def _at(self, time: float, cell: CellId, event: f.Event) -> None:
        if isinstance(event, f.CellsRead):
            event = replace(
                event,
                cells=frozenset(c for c in sorted(event.cells) if self.dice.random() >= UNSEEN),
            )
        super()._at(time, cell, event)

    def _send(self, to: Iterable[CellId], event: f.Event) -> None:
        super()._send([cell for cell in sorted(to) if self.dice.random() >= LOSS], event)

    def _act(self, me: CellId, action: f.Action) -> None:
        match action:
            case f.NameGroup() if me in self.silent:
                return
            case f.NameGroup(key, members):
                # the exchange's first messages say it again
                for member in sorted(members - {me}):
                    self._at(self.now + 1.0, member, f.GroupNamed(me, key, members))
            case f.AnswerOffer(caller, _, True):
                self.took.add((me, caller))
            case GroupFormed():
                self.at[me] = self.now
            case _:
                pass
        super()._act(me, action)


@pytest.mark.parametrize(
    ("silent", "within", "least"), [(0, 24.0, 0.95), (0, 60.0, 0.96), (2, 60.0, 0.94)]
)
def test_most_of_eight_cells_meet_in_groups_of_four(silent, within, least):
    nets = [Net(8, 4, seed, silent) for seed in range(200)]
    found = sum(net.at[cell] <= within for net in nets for cell in net.run())
    assert found / (len(nets) * (8 - silent)) >= least


@pytest.mark.parametrize("seed", range(40))
def test_members_of_a_group_accepted_it_and_are_in_no_other(seed):
    net = Net(13, 3, seed, silent=seed % 3, keys=("long key", "key"))
    groups = net.run()
    for cell, members in groups.items():
        assert cell in members
        assert 2 <= len(members) <= 3
        callers = [c for c in members if all((m, c) in net.took for m in members - {c})]
        assert callers, "somebody offered, and everybody else accepted"
        for other in members:
            told = groups.get(other)
            # A member that the caller counts and that got no message may have gone elsewhere.
            assert told in (None, members) or cell in callers
    assert all(m.done is not None for m in net.machines.values())


def test_a_cell_that_is_alone_tries_a_shorter_key_and_then_skips():
    machine = GroupForming(A, 7, ("long", "short"), 4, 0.0)
    assert [(at, a) for at in wakes(machine) for a in machine.handle(f.TimePassed(), at)] == [
        (-5.0, f.Post("long")),
        (3.0, f.ReadCells("long")),
        (55.0, f.Post("short")),
        (63.0, f.ReadCells("short")),
        (115.0, WindowSkipped()),
    ]


def reading(me: CellId, *others: CellId) -> GroupForming:
    machine = GroupForming(me, 7, ("key",), 2, 0.0)
    machine.handle(f.CellsRead("key", frozenset(others)), 3.0)
    return machine


def told(machine: GroupForming, *script: tuple) -> GroupForming:
    """Feed the machine a script of (time, event, expected actions) and return the machine."""
    for now, event, done in script:
        assert machine.handle(event, now) == done, (now, event)
    return machine


def takes(caller: CellId, accepts: bool = True) -> list[f.Action]:
    return [f.AnswerOffer(caller, "key", accepts)]


def test_a_caller_that_names_no_group_is_barred():
    told(
        reading(A, B, C),
        (6.0, f.Offered(B, "key"), takes(B)),
        (7.0, f.Offered(C, "key"), takes(C, False)),
        (13.0, f.TimePassed(), [f.Post("key"), f.ReadCells("key"), f.BarCaller(B)]),
        (14.0, f.Offered(B, "key"), takes(B, False)),
    )


def test_a_caller_that_names_its_group_late_is_not_barred_any_more():
    """On a busy machine the name may come after the offer has stopped to bind."""
    group = frozenset({A, B})
    machine = told(
        reading(A, B, C),
        (6.0, f.Offered(B, "key"), takes(B)),
        (13.0, f.TimePassed(), [f.Post("key"), f.ReadCells("key"), f.BarCaller(B)]),
        (13.1, f.GroupNamed(B, "key", group), [f.Unbar(B), GroupFormed("key", group)]),
    )
    assert not machine.barred


def test_a_group_nobody_accepted_is_not_believed():
    named = f.GroupNamed(B, "key", frozenset({A, B}))
    told(
        reading(A, B, C),
        (6.0, named, []),
        (6.0, f.Offered(C, "key"), takes(C)),
        (6.5, named, []),
    )
    for wrong in (frozenset({C, B}), frozenset({A, B, C})):
        other = told(
            reading(A, C),
            (6.0, f.Offered(C, "key"), takes(C)),
            (7.0, f.GroupNamed(C, "key", wrong), [f.BarCaller(C)]),
        )
        assert other.done is None


def test_a_cell_that_calls_joins_no_other_group_meanwhile():
    machine = told(
        reading(A, B, C, D),
        (4.0, f.Offered(B, "key"), takes(B)),
        (5.0, f.Released(B), []),
    )
    turn = next(at for at in wakes(machine) if step(machine, at))
    machine.handle(f.OfferAnswered(C, "key", True), turn + 1.0)
    assert machine.handle(f.GroupNamed(B, "key", frozenset({A, B})), turn + 1.0) == []
    machine.handle(f.TimePassed(), turn + f.TIMES.answers)
    assert machine.done == GroupFormed("key", frozenset({A, C}))


def test_a_cell_that_accepts_in_vain_is_released():
    machine = reading(A, B, C, D)
    turn = next(at for at in wakes(machine) if step(machine, at))
    assert turn >= f.TIMES.turns
    told(machine, *((turn + 1.0, f.OfferAnswered(cell, "key", True), []) for cell in (B, C)))
    _, released, grouped = machine.handle(f.TimePassed(), turn + f.TIMES.answers)
    assert isinstance(grouped, GroupFormed)
    assert released == f.Release(tuple({B, C} - grouped.members))
    told(
        machine,
        (turn + 4.0, f.OfferAnswered(D, "key", True), [f.Release((D,))]),
        (turn + 4.0, f.OfferAnswered(B, "key", True), []),  # it is known already
    )
    told(
        reading(B, A),
        (6.0, f.Offered(A, "key"), takes(A)),
        (7.0, f.Released(A), []),
        (8.0, f.Offered(C, "key"), takes(C)),
    )


def crowd(me: CellId, *others: CellId, together: bool = True) -> GroupForming:
    """A machine that looks for the one group of two cells."""
    machine = GroupForming(me, 7, ("key",), 2, 0.0, together=together)
    machine.handle(f.CellsRead("key", frozenset(others)), 3.0)
    return machine


@pytest.mark.parametrize("released", [7.0, 20.0], ids=["while-bound", "when-free-again"])
def test_a_cell_without_a_place_in_the_one_group_stays_alone(released: float) -> None:
    machine = told(crowd(A, B, C), (6.0, f.Offered(B, "key"), takes(B)))
    if released > 6.0 + f.TIMES.lock:
        assert f.BarCaller(B) in machine.handle(f.TimePassed(), 6.0 + f.TIMES.lock)
    told(
        machine,
        (released, f.Released(C), []),  # it accepted no offer of that cell
        (released, f.Released(B), [WindowSkipped()]),
        (released + 1.0, f.Offered(C, "key"), takes(C, False)),
    )
    assert machine.wakes_at is None


def test_a_released_cell_looks_on_where_all_fit_or_groups_may_differ() -> None:
    for machine in (crowd(A, B), crowd(A, B, C, together=False)):
        told(
            machine,
            (6.0, f.Offered(B, "key"), takes(B)),
            (7.0, f.Released(B), []),
            (8.0, f.Offered(C, "key"), takes(C)),
        )


def test_a_cell_bound_to_another_caller_is_not_released_by_the_one_before() -> None:
    machine = told(crowd(A, B, C), (6.0, f.Offered(B, "key"), takes(B)))
    assert f.BarCaller(B) in machine.handle(f.TimePassed(), 6.0 + f.TIMES.lock)
    told(
        machine,
        (14.0, f.Offered(C, "key"), takes(C)),
        (15.0, f.Released(B), []),
        (16.0, f.GroupNamed(C, "key", frozenset({A, C})), [GroupFormed("key", frozenset({A, C}))]),
    )


@pytest.mark.parametrize("seed", range(10))
def test_more_cells_than_one_group_takes_form_no_second_one(seed: int) -> None:
    cells = [CellId(f"c{i:02}") for i in range(20)]
    net = Window(dict.fromkeys(cells, (("key",), 16)), seed, random.Random(seed))
    for machine in net.machines.values():
        machine._together = True
    groups = net.run()
    assert len(groups) == 16
    assert len({frozenset(group) for group in groups.values()}) == 1


def test_nobody_calls_too_late_for_answers():
    others = [CellId(f"x{i}") for i in range(6)]
    machines = [reading(cell, *(c for c in others if c != cell)) for cell in others]
    for machine in machines:
        offered = [at for at in wakes(machine) if step(machine, at)]
        assert all(at + f.TIMES.answers <= f.TIMES.attempt + f.TIMES.post for at in offered)


def wakes(machine: GroupForming) -> Iterable[float]:
    """Times at which the machine wants to be woken, until it wants no more."""
    return iter(lambda: machine.wakes_at, None)


def step(machine: GroupForming, at: float) -> bool:
    """Let the clock tick; returns True if the machine offered a group."""
    return any(isinstance(a, f.Offer) for a in machine.handle(f.TimePassed(), at))
