"""What a server makes of pushes: in whatever order they come, each is applied once and answered
with what is there then."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.averaging.strategies.diloco import pushed
from node.averaging.strategies.outer import OuterSettings
from node.averaging.strategies.pushes import Served
from node.averaging.strategies.pushes import push as pushed_by
from node.core.errors import StepFault

HOGWILD = OuterSettings("hogwild", "deltas", "sgd", lr=0.5)
BOUND = replace(HOGWILD, strategy="parameter-server", staleness=1)
ONE = torch.ones(3)


def push(
    here: Served, cell: int, delta: torch.Tensor | None, s: OuterSettings
) -> tuple[Served, bool]:
    return pushed_by(here, cell, delta, s.staleness, lambda value, by: pushed(value, by, s.lr))


def served(s: OuterSettings, *cells: int) -> tuple[Served, list[bool]]:
    here, applied = Served(torch.zeros(3)), []
    for cell in cells:
        here, one = push(here, cell, ONE, s)
        applied.append(one)
    return here, applied


def test_every_push_is_a_step_of_sgd_by_itself_without_momentum():
    here, applied = served(HOGWILD, 0, 1, 2, 0)
    assert applied == [True] * 4
    assert torch.equal(here.value, torch.full((3,), -2.0))
    assert (here.version, here.pulled) == (4, {0: 4, 1: 2, 2: 3})
    assert torch.equal(
        served(replace(HOGWILD, momentum=0.5), 0, 1)[0].value, served(HOGWILD, 0, 1)[0].value
    )


def test_a_push_older_than_the_staleness_bound_only_pulls():
    here, applied = served(BOUND, 0, 1, 2, 0, 0)
    assert applied == [True, True, True, False, True], (
        "two others since its pull are one more than the bound; then it has pulled"
    )
    assert here.version == 4
    assert torch.equal(here.value, torch.full((3,), -2.0))
    assert served(replace(BOUND, staleness=2), 0, 1, 2, 0)[1] == [True] * 4
    assert served(replace(BOUND, staleness=0), 0, 0, 1, 1, 0)[1] == [
        True,
        True,
        True,
        True,
        False,
    ], "its own push is none of others"


def test_who_only_pulls_is_as_young_as_can_be():
    here, _ = served(BOUND, 0, 1, 2)
    pulled, applied = push(here, 0, None, BOUND)
    assert not applied
    assert torch.equal(pulled.value, here.value)
    assert (pulled.version, pulled.age(0)) == (3, 0)
    assert push(pulled, 0, ONE, BOUND)[1]


def test_a_cell_that_never_pulled_here_is_not_called_late():
    here, _ = served(BOUND, 0, 1, 2)
    assert here.age(7) == 0
    assert push(here, 7, ONE, BOUND)[1]


def test_nonsense_is_refused_and_nothing_moves():
    here, _ = served(HOGWILD, 0)
    with pytest.raises(StepFault, match="a push of"):
        push(here, 1, torch.ones(4), HOGWILD)
    with pytest.raises(StepFault, match="not finite"):
        push(here, 1, torch.full((3,), float("inf")), HOGWILD)
    assert torch.equal(here.value, torch.full((3,), -0.5))


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40), st.integers(0, 6))
def test_the_bound_is_on_others_pushes_since_the_last_pull(
    schedule: list[tuple[int, bool]], bound: int
) -> None:
    s, here = replace(BOUND, staleness=bound), Served(torch.zeros(1))
    since = dict.fromkeys(range(5), 0)
    known: set[int] = set()
    moved = 0
    for cell, pushes in schedule:
        late = since[cell] if cell in known else 0
        here, applied = push(here, cell, torch.ones(1) if pushes else None, s)
        assert applied == (pushes and late <= bound)
        moved += applied
        since = {c: n + applied for c, n in since.items()} | {cell: 0}
        known.add(cell)
        assert here.version == moved
        assert float(here.value) == -s.lr * moved
