"""A member's results from its partners' parameters in a window."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from node.averaging.strategies.outer import OuterSettings
from node.checkpoint.state import StateSnapshot
from node.core.ids import CellId, PeerId
from node.core.journey import Host, Partner, Version
from node.outer.merging import Merge, WindowState, mean_of
from node.outer.window import FAR, REMEMBERED, USUAL, Contributions, WindowRound, _Meeting

A, B, C = (CellId(letter * 16) for letter in "abc")


class Made(WindowRound):
    """A round that only computes; `said`: kinds of its journal entries."""

    def __init__(self, went: float = 0.1) -> None:
        """`went`: distance that its own training goes in a window; 0: not known."""
        self.said: list[str] = []
        journal = SimpleNamespace(emit=lambda room, kind, *a, **k: self.said.append(kind))
        engines: Any = SimpleNamespace(journal=journal)
        super().__init__(None, engines, None, None, None, None)
        self._went.extend([went] if went else [])

    def after(self, own: Tensor, **partners: Tensor) -> Tensor:
        """Mean of its own parameters and the partners'."""
        merge = Merge(WindowState(), OuterSettings(), {})
        gathered = Contributions(A, own={"w": own})
        gathered.came = {CellId(name * 16): {"w": t} for name, t in partners.items()}
        self._clip(_Meeting(1, Version(1), {}, merge, gathered))
        return gathered.mean(merge)["w"]


def used(apart: float) -> tuple[Made, Tensor]:
    """A round with partners that were usually this far away, and its own parameters."""
    made = Made()
    own = torch.ones(100)
    for _ in range(USUAL):
        made.after(own, b=own + apart)
    return made, own


def test_a_mean_is_the_same_bits_in_every_cell() -> None:
    given = {cell: {"w": torch.randn(1000)} for cell in (A, B, C)}
    means = [
        mean_of({cell: given[cell] for cell in order})["w"] for order in ((A, B, C), (C, A, B))
    ]
    assert torch.equal(*means)
    exact = torch.stack([g["w"] for g in given.values()]).double().mean(0)
    assert torch.allclose(means[0].double(), exact, atol=1e-6)


def test_partners_that_are_usually_near_count_whole() -> None:
    made = Made()
    own = torch.ones(100)
    for _ in range(USUAL + 2):
        assert torch.allclose(made.after(own, b=own + 0.1), own + 0.05)
    assert not made.said


@pytest.mark.parametrize("what", ["noise", "100 times its weight"])
def test_one_that_has_another_model_is_left_out(what: str) -> None:
    made, own = used(0.1)
    bad = 50 * torch.randn(100) if what == "noise" else 100 * own
    assert torch.equal(made.after(own, b=bad), own)
    assert torch.allclose(made.after(own, b=bad, c=own + 0.1), own + 0.05)
    assert made.said == 2 * ["partner-clipped"]


def test_one_that_is_far_away_pulls_as_a_usual_one() -> None:
    made, own = used(0.1)
    after = made.after(own, b=own + 0.4)
    assert float((after - own).norm() / own.norm()) == pytest.approx(0.1 / 2, rel=1e-3)
    assert made.said == ["partner-clipped"]


@pytest.mark.parametrize("count", [1, 2])
def test_noise_in_the_first_window_spoils_little(count: int) -> None:
    """Before anything is known of partners the own training is the measure."""
    made = Made(0.1)
    own = torch.ones(100)
    partners = {"b": 50 * torch.randn(100)} | ({"c": own + 0.1} if count > 1 else {})
    after = made.after(own, **partners)
    assert float((after - own).norm() / own.norm()) <= 2 * 0.1 / 2
    assert made.said == ["partner-clipped"]


def test_a_cell_that_does_not_know_how_far_it_goes_takes_nothing_yet() -> None:
    made = Made(0.0)
    own = torch.ones(100)
    assert torch.equal(made.after(own, b=100 * own), own)
    assert torch.equal(made.after(own, b=own + 0.1), own), "nor has it learned from that"
    assert made.after(own, b=own).equal(own)


@pytest.mark.parametrize("partners", [("b",), ("b", "c")])
def test_noise_that_comes_in_every_window_never_becomes_usual(partners: tuple[str, ...]) -> None:
    """The noise comes alone, or as often as a partner that is near."""
    made = Made(0.1)
    own = torch.ones(100)
    for _ in range(8 * REMEMBERED):
        came = {"b": 50 * torch.randn(100), "c": own + 0.1}
        after = made.after(own, **{name: came[name] for name in partners})
    most = 2 * 0.1 / 3 if len(partners) > 1 else FAR * 0.1 / 2
    assert float((after - own).norm() / own.norm()) <= most * 1.001


def test_cells_that_drift_apart_are_followed() -> None:
    """The usual distance grows with the distances seen, up to the distance of the own training, so
    nobody is clipped for ever."""
    made, own = used(0.001)
    for _ in range(4 * REMEMBERED):
        after = made.after(own, b=own + 0.1)
    assert torch.allclose(after, own + 0.05)


async def test_of_a_partners_hosts_those_that_gave_are_blamed() -> None:
    """Other hosts have the same values only if they say so, and may be honest."""
    partner = Partner(B, PeerId("bad"), {1: (Host(PeerId("bad")), Host(PeerId("good")))})
    blamed: list[PeerId] = []

    async def fetch(*_: Any) -> StateSnapshot:
        return StateSnapshot(Version(7), {"w": torch.full((4,), math.nan)}, {PeerId("bad"): 16})

    made = Made()
    merge = Merge(WindowState(), OuterSettings(), {"w": (4,)})
    made._engines.transport = SimpleNamespace(fault=lambda peer, why: blamed.append(peer))
    made._engines.fetch = fetch
    made._engines.aside = asyncio.to_thread
    made._rounds = SimpleNamespace(stage=1)  # type: ignore[assignment]
    gathered = Contributions(A, given={"w": torch.ones(4)})
    m = _Meeting(7, Version(1), {}, merge, gathered)
    await made._pull(m, partner)
    assert (gathered.came, blamed) == ({}, ["bad"])
