"""A round with a quorum at its owner: when a group is stepped without the late, and what the late
are given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import pytest

from node.averaging.exchange.events import (
    PeerFoundDead,
    QuorumRule,
    Read,
    ReduceAndStep,
    Serve,
    Stepped,
    TimePassed,
    Uploaded,
    Wait,
    WakeAt,
)
from node.averaging.exchange.machine import RoundMachine
from node.averaging.settings import AveragingSettings
from tests.averaging.conftest import with_peers
from tests.averaging.test_machine import OPEN, A, B, C, P, began, feed

TWO = replace(OPEN, quorum=QuorumRule(2, 5.0))


K = TypeVar("K")


def of(kind: type[K], actions: Sequence[object]) -> list[K]:
    return [a for a in actions if isinstance(a, kind)]


def test_a_group_is_stepped_without_the_late_after_the_grace() -> None:
    machine = RoundMachine()
    feed(machine, TWO, now=10.0)
    assert of(WakeAt, feed(machine, began(1, B), now=10.0)) == [], (
        "our own and nobody else's: one of two"
    )
    assert feed(machine, Uploaded(1), now=12.0) == [WakeAt(17.0)]
    assert feed(machine, TimePassed(), now=16.9) == [], "said once"
    (step,) = of(ReduceAndStep, feed(machine, TimePassed(), now=17.0))
    assert (step.contributors, step.names) == ((A, B), (P,))
    late = feed(machine, began(2, C), now=18.0)
    assert of(Read, late) == [], "what is claimed is not claimed again"
    assert of(Wait, late)
    served = of(Serve, feed(machine, Stepped(OPEN.round.epoch, frozenset({P})), now=19.0))
    assert {s.stream for s in served} == {1, 2}, "who is late gathers what the others made"


def test_a_contribution_within_the_grace_is_included() -> None:
    machine = RoundMachine()
    feed(machine, TWO, began(1, B), Uploaded(1), began(2, C), now=1.0)
    (step,) = of(ReduceAndStep, feed(machine, Uploaded(2), now=5.9))
    assert step.contributors == (A, B, C)
    machine = RoundMachine()
    feed(machine, replace(TWO, contribute_by=(4.0,)), began(1, B), now=0.0)
    assert feed(machine, Uploaded(1), now=2.0) == [WakeAt(4.0)], (
        "a grace does not outlast the round's own patience"
    )
    assert of(ReduceAndStep, feed(machine, TimePassed(), now=4.0))


def test_without_a_quorum_every_contribution_is_awaited() -> None:
    machine = RoundMachine()
    feed(machine, replace(TWO, quorum=QuorumRule(0, 5.0)), began(1, B), now=0.0)
    assert feed(machine, Uploaded(1), now=0.0) == []
    assert feed(machine, TimePassed(), now=50.0) == []
    machine = RoundMachine()
    feed(machine, replace(TWO, quorum=QuorumRule(3, 5.0)), began(1, B), now=0.0)
    assert of(WakeAt, feed(machine, Uploaded(1), now=0.0)) == []
    (step,) = of(ReduceAndStep, feed(machine, PeerFoundDead(C), now=1.0))
    assert step.contributors == (A, B)


@pytest.mark.parametrize("group", [0, 1])
def test_every_group_has_a_grace_of_its_own(group: int) -> None:
    from tests.averaging.test_machine import Q, one

    groups = (*one(P), *(replace(g, index=1) for g in one(Q)))
    facts = replace(TWO, groups=groups, contribute_by=(100.0, 200.0))
    machine, names = RoundMachine(), ((P,), (Q,))
    feed(machine, facts, now=0.0)
    actions = feed(
        machine, began(1, B, names=names[group], groups=groups, group=group), Uploaded(1), now=3.0
    )
    assert of(WakeAt, actions) == [WakeAt(8.0)]
    (step,) = of(ReduceAndStep, feed(machine, TimePassed(), now=8.0))
    assert (step.group, step.names) == (group, names[group])


def test_a_grace_is_what_the_overlap_leaves() -> None:
    machine = RoundMachine()
    feed(machine, replace(TWO, quorum=QuorumRule(2, 5.0, 10.0)), began(1, B), now=0.0)
    (wake,) = feed(machine, Uploaded(1), now=6.0)
    assert wake == WakeAt(6.0 + 0.8 * 4.0)
    assert QuorumRule(2, 5.0, 10.0).grace(6.0) == pytest.approx(3.2)
    assert QuorumRule(2, 5.0).grace(6.0) == 5.0
    late = RoundMachine()
    feed(late, replace(TWO, quorum=QuorumRule(2, 5.0, 10.0)), began(1, B), now=0.0)
    assert of(ReduceAndStep, feed(late, Uploaded(1), now=11.0)), "nothing of it is left"


async def test_an_owner_wakes_when_the_grace_is_over(cell_of):
    cell, p0, p1, _ = await with_peers(cell_of(3, AveragingSettings(round_timeout_s=600.0)))
    owners = dict.fromkeys(cell.owners(), p0)
    asked = {p: cell.request(p, owners=owners, quorum=QuorumRule(2, 0.01)) for p in (p0, p1)}
    outcomes = await asyncio.wait_for(cell.run_all(asked), 100)
    assert all(not o.missing and o.contributors == {p0, p1} for o in outcomes.values()), (
        "without the silent one, long before 0.6 of a round"
    )
