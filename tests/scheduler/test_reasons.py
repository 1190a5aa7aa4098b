"""The reason why a micro-batch goes where it goes, in words for people."""

from node.core.ids import PeerId, short
from node.core.journey import Hop, Path, Plan, PlanMember
from node.scheduler.costs import Costs
from node.scheduler.reasons import SHOWN, reasons

E, A, B, C = (PeerId(f"12D3KooW{c * 44}") for c in "EABC")


def plan(hops: list[list[tuple[int, PeerId]]], members: list[tuple[PeerId, int, float]]) -> Plan:
    paths = tuple(Path(i, E, (i,), tuple(Hop(s, p) for s, p in row)) for i, row in enumerate(hops))
    return Plan(0, 1, E, tuple(PlanMember(p, s, v) for p, s, v in members), paths, {})


def test_skips_swaps_and_slow_or_far_replicas_are_named() -> None:
    members = [(E, 0, 0.0), (A, 1, 1.0), (B, 1, 2.1), (C, 2, 0.0)]
    p = plan([[(1, B)], [(2, C), (1, B)], [(1, A), (2, C)]], members)
    lines = reasons(p, 3)
    assert lines[0].endswith("skips stage 2 (its turn), skips stage 3 (nobody there)")
    assert "stage 1 after 2" in lines[1]
    assert lines[-1] == f"stage 1: {short(A)} gets 1 of 3, it is 2.1x slower than {short(B)}"
    far = Costs({A: 1.0, B: 1.0}, ways={(E, A): 0.4, (E, B): 0.1})
    assert reasons(p, 3, far)[-1].endswith(f"it is 4.0x farther from the ends than {short(B)}")
    equal = Costs({A: 1.0, B: 1.0})
    assert reasons(p, 3, equal)[-1].endswith("1 of 3, 3 cannot be dealt equally to 2 peers")
    uneven = plan([[(1, B)], [(1, B)], [(1, A)], [(1, B)]], members)
    assert reasons(uneven, 3, equal)[-1].endswith("so the paths of this epoch were dealt")


def test_micro_batches_of_one_way_share_a_line() -> None:
    members = [(E, 0, 0.0), (A, 1, 1.0), (B, 1, 1.0)]
    lines = reasons(plan([[(1, A)], [(1, A)], [(1, B)], [(1, A)]], members), 1)
    assert lines[:2] == [
        f"0-1, 3 from {short(E)} > 1:{short(A)}",
        f"2 from {short(E)} > 1:{short(B)}",
    ]
    assert (
        reasons(plan([[(1, A)], [(1, B)]] * 9, members), 1)[1]
        == f"1, 3, 5, 6 more from {short(E)} > 1:{short(B)}"
    )


def test_many_ways_are_counted_instead_of_listed() -> None:
    rows = [[(s, A) for s in range(1, 5) if n >> s - 1 & 1] for n in range(1, SHOWN + 3)]
    lines = reasons(plan([*rows, rows[-1]], [(E, 0, 0.0), (A, 1, 1.0)]), 4)
    assert (len(lines), lines[-1]) == (SHOWN + 1, "and 3 more")
