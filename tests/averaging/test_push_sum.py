"""Push-sum's mass in virtual time: messages are lost, repeated and late, leaders and cells die, and
not one unit is made or lost."""

from dataclasses import replace

import pytest

from benchmarks.between import mass as played
from benchmarks.between.mass import Play, Trial, under_way
from node.averaging.strategies import push_sum as machine
from node.averaging.strategies.push_sum import PushSum, weights
from node.core.ids import CellId
from node.core.mass import KEEP, MOST, MOST_UNITS, WHOLE_MASS, Books, parse_books

A, B, C = (CellId(letter * 16) for letter in "abc")
ROUGH = Trial(
    cells=5, windows=12, loss=0.15, twice=0.15, leader_dies=0.15, cell_dies=0.02, divides=0.02
)


def exact(play: Play) -> None:
    assert play.missing == 0, f"at {play.now}"


@pytest.mark.parametrize("seed", range(60))
def test_no_unit_is_made_or_lost(seed: int) -> None:
    play = Play(replace(ROUGH, fanout=1 + seed % 2), seed, exact)
    play.run()
    exact(play)
    assert play.moved > 0


def test_what_the_dead_held_is_known_by_name() -> None:
    play = Play(replace(ROUGH, cells=8, windows=30, cell_dies=0.05, divides=0.0), 3, exact)
    play.run()
    dead = {name: play.books[name].held for name in play.dead}
    assert len(dead) == play.deaths > 0
    owed = {ends: units for ends, units in under_way(play.books).items() if ends[1] in dead}
    assert owed
    left = {name: books for name, books in play.books.items() if name not in dead}
    for stage in range(played.STAGES + 1):
        named = sum(u[stage] for u in (*dead.values(), *owed.values()))
        lost = {ends: u for ends, u in under_way(play.books).items() if ends[0] in dead}
        named += sum(u[stage] for ends, u in lost.items() if ends[1] not in dead)
        assert sum(b.held[stage] for b in left.values()) < WHOLE_MASS
        between = {e: u for e, u in under_way(left).items() if e[1] in left}
        alive = sum(u[stage] for u in (*(b.held for b in left.values()), *between.values()))
        assert alive == WHOLE_MASS - named


def test_cells_agree_on_the_mean() -> None:
    play = Play(Trial(cells=8, windows=40, loss=0, twice=0, leader_dies=0, cell_dies=0), 1, exact)
    play.run()
    assert play.apart < 1e-6
    values = [cell.value[0] for cell in play.cells.values()]
    assert values == pytest.approx([3.5] * 8, abs=0.3), "near the mean: values move while they go"


@pytest.mark.parametrize("seed", range(4))
def test_cells_with_older_books_are_told_what_they_forgot(seed: int) -> None:
    went = replace(ROUGH, windows=30, returns=0.1, cell_dies=0.0, divides=0.0)
    play = Play(went, seed)
    play.run()
    assert play.returned > 0
    play.trial = replace(went, returns=0.0, loss=0.0, twice=0.0, leader_dies=0.0)
    play.run(30)
    exact(play)


def test_the_play_finds_answers_that_nobody_else_knows_of(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hasty(PushSum):
        """Answers before a plan has it."""

        def handle(self, event: machine.Event, now: float) -> list[machine.Action]:
            if isinstance(event, machine.UnitsAsked):
                super().handle(event, now)
                self._sure = self.books
            return super().handle(event, now)

    monkeypatch.setattr(played, "PushSum", Hasty)
    play = Play(replace(ROUGH, windows=100, divides=0.0, cell_dies=0.0), 1, exact)
    with pytest.raises(AssertionError, match="at "):
        play.run()


def committed(p: PushSum) -> None:
    assert p.books is not None
    p.handle(machine.BooksCommitted(p.books, {}), 0.0)


def leader(units: int = 64) -> PushSum:
    p = PushSum(1, Books.begin(0, units))
    committed(p)
    return p


COMMIT = "a plan with the books is committed"
ASKS = machine.UnitsAsked(B, 3, 0, {})
ANSWER = machine.UnitsGranted(B, 3, 3, {0: 32}, {})
GAVE = machine.UnitsAsked(B, 5, 3, {0: 32})
CAME = machine.UnitsGranted(A, 3, 2, {0: 16}, {})


def begins(window: int, givers: tuple[CellId, ...] = (), takers: tuple[CellId, ...] = ()):
    """The window, which gives its cells 10 seconds from its number times 10 on."""
    return machine.WindowBegan(window, givers, takers, 10.0 * window + 10.0)


def told(p: PushSum, *script: tuple) -> PushSum:
    """What happens when, and what the machine does about it."""
    for now, event, done in script:
        if event == COMMIT:
            committed(p)
        else:
            assert p.handle(event, now) == done, (now, event)
    return p


def test_a_taker_is_answered_once_its_grant_is_committed() -> None:
    p = told(
        leader(),
        (30.0, begins(3, takers=(B,)), []),
        (31.0, ASKS, [machine.NotYet(B)]),
        (32.0, ASKS, [machine.NotYet(B)]),  # no second grant
        (32.0, COMMIT, None),
        (33.0, ASKS, [ANSWER, machine.SharesCame(3, {})]),
        (34.0, ASKS, [ANSWER]),  # a repeated question has the same answer
    )
    assert p.books.held == {0: 32}
    told(
        PushSum(1),
        (35.0, machine.BooksRead(p.books), []),
        (35.0, ASKS, [machine.NotYet(B)]),  # a successor does not know what is sure
        (35.0, COMMIT, None),
        (36.0, ASKS, [ANSWER]),
    )


def test_only_targets_that_confirm_are_given_more() -> None:
    told(
        leader(),
        (30.0, begins(3, takers=(B,)), []),
        (31.0, machine.UnitsAsked(C, 3, 0, {}), [machine.UnitsGranted(C, 3, 0, {}, {})]),
        (31.0, ASKS, [machine.NotYet(B)]),
        (31.0, COMMIT, None),
        (40.0, machine.TimePassed(), [machine.SharesCame(3, {})]),
        (40.0, begins(4, takers=(B,)), []),
        (
            41.0,
            machine.UnitsAsked(B, 4, 0, {}),
            [machine.UnitsGranted(B, 4, 3, {0: 32}, {}), machine.SharesCame(4, {})],
        ),
        (50.0, begins(5, takers=(B,)), []),
        (51.0, GAVE, [machine.NotYet(B)]),
        (51.0, COMMIT, None),
        (
            52.0,
            GAVE,
            [machine.UnitsGranted(B, 5, 3, {0: 48}, {0: 32}), machine.SharesCame(5, {})],
        ),
    )


def test_a_taker_counts_what_is_in_place_and_says_so_next_time() -> None:
    p = told(
        leader(16),
        (30.0, begins(3, (A,)), [machine.UnitsAsked(A, 3, 0, {})]),
        (31.0, machine.TimePassed(), [machine.UnitsAsked(A, 3, 0, {})]),  # nobody has answered
        (32.0, CAME, [machine.SharesCame(3, {0: {A: 16}})]),
        (33.0, CAME, []),  # twice
    )
    assert weights(p.books, {0: {A: 16}}, 0) == {A: 0.5}
    told(
        p,
        (34.0, machine.BooksCommitted(p.books, {0: {A: 16}}), []),
        (50.0, begins(5, (A,)), [machine.UnitsAsked(A, 5, 2, {0: 16})]),
        (
            51.0,
            machine.UnitsGranted(A, 5, 2, {0: 16}, {0: 16}),
            [machine.SharesCame(5, {})],  # nothing new
        ),
    )
    assert p.books.held == {0: 32}


def test_a_window_does_not_wait_for_who_says_nothing() -> None:
    p = told(leader(), (30.0, begins(3, (A,), (B,)), [machine.UnitsAsked(A, 3, 0, {})]))
    assert p.asks
    told(p, (40.0, machine.TimePassed(), [machine.SharesCame(3, {})]))
    assert not p.asks
    p.handle(ASKS, 41.0)
    assert p.books.held == {0: 64}, "the cell has given already"


@pytest.mark.parametrize(
    "claims",
    [
        [machine.UnitsGranted(A, 3, 3, {0: MOST_UNITS - 1}, {})],
        [machine.UnitsGranted(A, 3, 1 << 63, {0: 16}, {})],
        [machine.UnitsGranted(CellId(f"{n:016x}"), 3, 3, {0: 16}, {}) for n in range(3 * MOST)],
        [machine.UnitsAsked(cell, 3, 3, {0: MOST_UNITS - 1}) for cell in (B, C)],
        [machine.UnitsAsked(CellId(f"{n:016x}"), 3, 3, {0: 16}) for n in range(3 * MOST)],
    ],
)
def test_claims_never_make_books_that_no_plan_can_say(
    claims: list[machine.UnitsAsked | machine.UnitsGranted],
) -> None:
    p = leader()
    p.handle(begins(3, tuple(c.cell for c in claims), (B, C)), 30.0)
    for claim in claims:
        p.handle(claim, 31.0)
    (came,) = p.handle(machine.TimePassed(), 40.0)
    assert p.books is not None
    assert isinstance(came, machine.SharesCame)
    p.handle(machine.BooksCommitted(p.books, came.shares), 41.0)
    assert parse_books(p.books.rows()) == p.books


def test_books_keep_only_what_is_open() -> None:
    books = Books.begin(0, 64).grants(B, 3, {0: 8}).grants(C, 3, {0: 8})
    books = books.receipt(B, 4, 3, {0: 8})
    tidy = books.tidied(4 + KEEP + 1)
    assert (tidy.given.keys(), (tidy.floor, tidy.held)) == ({C}, (3, {0: 48}))
    assert tidy.receipt(B, 90, 3, {0: 8}) == tidy, "it was paid"
    for n in range(2 * MOST):
        tidy = tidy.grants(CellId(f"{n:016x}"), 200, {0: 1})
    assert len(tidy.given) == MOST


def test_a_taker_that_forgot_is_not_given_the_same_again() -> None:
    """The giver has granted once more, and the two have not met since."""
    taker = Books.begin(0, 8).answered(A, 3, 3, {}).took({0: {A: 5}}).answered(A, 4, 3, {0: 5})
    later = taker.tidied(4 + 2 * KEEP + 1)
    assert not later.taken
    assert later.owed(A, 3, {0: 7}, {0: 5}) == {0: 2}
    again = later.answered(A, 200, 3, {0: 5}).took({0: {A: 2}})
    assert (again.held, again.taken[A].units) == ({0: 15}, {0: 7})
    assert later.owed(B, 150, {0: 7}, {0: 5}) == {0: 7}, "these books have returned to before it"


def test_books_are_read_as_they_were_written() -> None:
    stays, founded = Books.begin(2, 65).grants(B, 3, {0: 8, 2: 9}).divided(A, C, 5)
    for books in (stays, founded):
        assert parse_books(books.rows()) == books
    assert founded.held == {0: 28, 1: 32, 2: 28}


NONSENSE = r"push-sum|whole number|unpack|mass"


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (None, NONSENSE),
        ([], NONSENSE),
        ([1, 2, 0, {}, [], 3], NONSENSE),
        ([1, 2, 0, {"0": "x"}, [], []], NONSENSE),
        ([-1, 0, 0, {}, [], []], NONSENSE),
        ([0, 0, 0, {}, [[A, 1, 1, {}, {}]] * (2 * MOST + 1), []], "accounts"),
        ([0, 0, 0, {}, [["no cell", 1, 1, {}, {}]], []], "hex"),
    ],
)
def test_rows_that_are_no_books_are_refused(rows: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_books(rows)
