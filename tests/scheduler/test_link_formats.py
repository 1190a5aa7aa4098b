"""Formats of links: which get a coarser one, and when one goes back."""

from dataclasses import replace

import pytest

from node.core.ids import PeerId
from node.core.journey import MOST_LINKS, Hop, Path, Plan, PlanMember
from node.scheduler.costs import Costs, LinkCost, Measured, believe
from node.scheduler.link_formats import FINER, SHARE, link_formats, links

ORIGIN, A, B = (PeerId(p) for p in ("o", "a", "b"))
SIZES = {"bf16": 1000, "int8": 500, "int4": 250}
PATHS = tuple(Path(i, ORIGIN, (i,), (Hop(1, A), Hop(2, B))) for i in range(10))
SLOW = (A, B)
"""The link whose bytes are counted; every peer sends to others too."""


def costs(ratio: float, paths=PATHS, link=SLOW) -> Costs:
    """Costs by which the bytes of the link take ``ratio`` of the work of the busiest device, and
    those of others nothing."""
    count = links(paths)[link]
    device = {ORIGIN: 0.02, A: 0.1, B: 0.05}
    bodies = {(a, b): 1e-9 for a, b in links(paths)}
    bodies[link] = ratio * len(paths) * device[A] / count
    return Costs(device=device, bodies=bodies)


def chosen(ratio: float, before: str = "") -> str:
    had = {}
    if before:
        had = {SLOW: before}
    return link_formats(PATHS, costs(ratio), SIZES, had).get(SLOW, "bf16")


@pytest.mark.parametrize(
    ("ratio", "wire"),
    [(0.0, "bf16"), (0.79, "bf16"), (0.81, "int8"), (1.59, "int8"), (1.61, "int4"), (99, "int4")],
)
def test_a_link_gets_the_finest_format_in_which_its_bytes_are_no_limit(
    ratio: float, wire: str
) -> None:
    assert chosen(ratio) == wire


def test_only_links_of_the_peers_at_the_slow_line_are_coarse() -> None:
    found = link_formats(PATHS, costs(3.0), SIZES, {})
    assert found == {(A, B): "int4", (A, ORIGIN): "int4", (ORIGIN, B): "int4"}
    assert (B, A) not in found
    assert (ORIGIN, A) not in found


@pytest.mark.parametrize(
    ("ratio", "before", "wire"),
    [
        (0.79, "int8", "int8"),
        (0.51, "int8", "int8"),
        (0.49, "int8", "bf16"),
        (1.1, "int4", "int4"),
        (0.9, "int4", "int8"),
        (0.4, "int4", "bf16"),
        (3.0, "int8", "int4"),
        (0.1, "fp16", "bf16"),
    ],
)
def test_a_link_goes_back_to_a_finer_format_by_some_distance(
    ratio: float, before: str, wire: str
) -> None:
    assert chosen(ratio, before) == wire
    assert FINER < SHARE


def test_all_links_of_a_peer_share_its_line() -> None:
    device = {ORIGIN: 0.1, A: 0.1, B: 0.1}
    bodies = dict.fromkeys(links(PATHS), 0.06)
    alone = link_formats(PATHS, Costs(device=device, bodies={(A, B): 0.06}), SIZES, {})
    assert alone == {(A, ORIGIN): "int8", (A, B): "int8"} or not alone
    assert set(link_formats(PATHS, Costs(device=device, bodies=bodies), SIZES, {})) == set(
        links(PATHS)
    )


def test_nothing_is_chosen_without_a_choice_or_a_measurement() -> None:
    assert link_formats(PATHS, costs(9.0), {"bf16": 1000}, {}) == {}
    assert link_formats(PATHS, costs(9.0), {}, {}) == {}
    nothing = replace(costs(9.0), bodies={})
    assert link_formats(PATHS, nothing, SIZES, {}) == {}
    unmeasured = replace(costs(9.0), device={})
    had = {SLOW: "int4", (A, PeerId("gone")): "int4", (ORIGIN, A): "top-k"}
    assert link_formats(PATHS, unmeasured, SIZES, had) == {SLOW: "int4"}


def test_the_choice_is_the_same_in_any_order_of_the_paths() -> None:
    found = link_formats(PATHS, costs(3.0), SIZES, {})
    assert link_formats(tuple(reversed(PATHS)), costs(3.0), SIZES, {}) == found


def test_a_plan_names_no_more_links_than_its_readers_take_and_the_slowest_ones() -> None:
    firsts = [PeerId(f"f{i:03d}") for i in range(100)]
    seconds = [PeerId(f"s{i:03d}") for i in range(100)]
    hops = [(Hop(1, a), Hop(2, b)) for a in firsts for b in seconds]
    paths = tuple(Path(i, ORIGIN, (i,), row) for i, row in enumerate(hops))
    bodies = {link: 1.0 + (link[0] in firsts[:5]) for link in links(paths)}
    device = dict.fromkeys([ORIGIN, *firsts, *seconds], 1e-6)
    found = link_formats(paths, Costs(device=device, bodies=bodies), SIZES, {})
    assert len(links(paths)) > MOST_LINKS == len(found)
    assert all((a, b) in found for a in firsts[:5] for b in seconds)
    members = (
        PlanMember(ORIGIN, 0, 1.0, True),
        *(PlanMember(p, 1, 1.0, True) for p in firsts),
        *(PlanMember(p, 2, 1.0, True) for p in seconds),
    )
    plan = Plan(0, 1, ORIGIN, members, paths, {}, wires=found)
    assert Plan.parse(plan.canonical()).wires == found


def test_costs_say_the_bytes_in_the_runs_format_and_delays_in_the_coarsest() -> None:
    said = {
        A: Measured(0.1, 0.2, ways=((B, LinkCost(0.5, 0.1)),)),
        B: Measured(0.1, 0.2, ways=((A, LinkCost(0.5, 0.1)),), up=1000.0),
    }
    fine = believe(said, {ORIGIN}, {}, 1000)
    least = believe(said, {ORIGIN}, {}, 1000, 0.25)
    assert fine.body(A, B) == pytest.approx(0.4)
    assert least.body(A, B) == pytest.approx(0.4)
    assert fine.delay(A, B) == pytest.approx(0.05 + 0.4)
    assert least.delay(A, B) == pytest.approx(0.05 + 0.1)
    # The cap of B: a second for a tensor in the run's format, two of them for a micro-batch.
    assert fine.body(B, A) == least.body(B, A) == pytest.approx(1.0)
    assert (fine.compute[B], least.compute[B]) == (pytest.approx(2.0), pytest.approx(0.5))
    assert fine.device[B] == least.device[B] == pytest.approx(0.3)
