"""State replicas: the peers that keep copies for others, and the copies worth keeping."""

import pytest
import torch

from node.core.ids import PeerId
from node.core.journey import Version
from node.optim import state_replica
from node.optim.state_replica import Spares, VersionTrail, buddy, wards

A = PeerId("a")
B = PeerId("b")
C = PeerId("c")
LINE = "0" * 32
OTHER = "f" * 32


def state(x: float) -> dict[str, torch.Tensor]:
    return {"momentum": torch.full((2,), x), "steps": torch.tensor([x])}


@pytest.mark.parametrize(
    ("cell", "owner", "keeper"),
    [
        *(((C, A, B), owner, keeper) for owner, keeper in ((A, B), (B, C), (C, A))),
        ((A,), A, None),
        ((B, A), A, B),
        ((B, A), B, A),
        ((A, C), B, C),  # also of an owner that has left the cell
    ],
)
def test_the_buddy_is_the_next_member_and_wraps_around(cell, owner, keeper) -> None:
    assert buddy(owner, cell) == keeper


@pytest.mark.parametrize(
    ("me", "cell", "kept"),
    [
        *((me, (B, C, A), (of,)) for me, of in ((A, C), (B, A), (C, B))),
        (A, (A,), ()),
        (C, (A, B), ()),  # a peer that is no member keeps nothing
    ],
)
def test_everybody_is_the_buddy_of_one_and_nobody_of_itself(me, cell, kept) -> None:
    assert wards(me, cell) == kept


def test_the_newest_copy_stays() -> None:
    spares = Spares()
    spares.put("x", Version(4, LINE), state(4))
    spares.put("x", Version(2, LINE), state(2))
    held = spares.get("x")
    assert (held.version, held.state["steps"]) == (Version(4, LINE), 4)
    spares.put("x", Version(6, LINE), state(6))
    assert spares.versions() == {"x": Version(6, LINE)}


def test_copies_of_one_version_are_shown_together() -> None:
    spares = Spares()
    spares.put("x", Version(4, LINE), state(1))
    spares.put("y", Version(4, LINE), state(2))
    spares.put("z", Version(2, LINE), state(3))
    found = spares.at(4)
    assert found[0] == Version(4, LINE)
    assert found[1].keys() == {"x/momentum", "x/steps", "y/momentum", "y/steps"}
    assert spares.at(4, OTHER) is None
    assert spares.at(3) is None
    spares.drop(["x", "y", "never"])
    assert spares.versions() == {"z": Version(2, LINE)}
    assert spares.at(4) is None


@pytest.mark.parametrize(
    ("version", "led"),
    [
        (Version(5, LINE), True),
        (Version(4, LINE), True),
        (Version(4, OTHER), False),
        (Version(6, LINE), False),  # a version that is not here yet
        (Version(0, ""), False),
        (Version(2, OTHER), True),  # too old to be in the trail
    ],
)
def test_a_trail_knows_what_led_here(
    version: Version, led: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_replica, "MOST_VERSIONS", 3)
    trail = VersionTrail()
    for epoch in range(1, 6):
        trail.stand(Version(epoch, LINE))
    assert trail.leads_from(version) is led
    assert [trail.at(epoch) for epoch in (4, 1)] == [Version(4, LINE), Version(1, "")]


@pytest.mark.parametrize(
    ("back", "led"),
    [
        # a rollback keeps the trail
        (LINE, {Version(4, LINE): False, Version(2, OTHER): False}),
        # another lineage is unknown before epoch 3
        (OTHER, {Version(2, OTHER): True, Version(3, LINE): False}),
    ],
)
def test_a_rollback_keeps_the_trail_a_new_lineage_clears_it(back: str, led: dict) -> None:
    trail = VersionTrail()
    for version in [*(Version(epoch, LINE) for epoch in range(1, 6)), Version(3, back)]:
        trail.stand(version)
    assert {version: trail.leads_from(version) for version in led} == led


def test_copies_of_a_history_that_was_given_up_go() -> None:
    spares = Spares()
    trail = VersionTrail()
    for name, version in {
        "old": Version(2, LINE),
        "undone": Version(5, LINE),
        "foreign": Version(3, OTHER),
    }.items():
        spares.put(name, version, state(1))
    for epoch in (2, 3, 4):
        trail.stand(Version(epoch, LINE))
    spares.keep_only(trail)
    assert set(spares.versions()) == {"old"}
    spares.clear()
    assert spares.versions() == {}
