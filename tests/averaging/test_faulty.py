"""One of four lies on the wire or is killed: the benchmark's rows, without their clocks."""

import pytest
import torch

from benchmarks.averaging_faults import LIES, killed, lied
from benchmarks.lab import meeting
from node.averaging.exchange.request import PartOrigin, RoundOutcome

GENEROUS_S = 100.0
QUICK = [
    name for name, lie in LIES.items() if not (lie.silent or lie.stalls) and "65 MiB" not in name
]


@pytest.mark.parametrize("name", QUICK)
async def test_a_lie_poisons_nobody(name):
    played, told = await lied(LIES[name], GENEROUS_S)
    assert not played.faults
    assert set(told) == set(meeting.SURVIVORS)
    assert played.kept == 16 if not LIES[name].owns else 12 <= played.kept < 16


async def test_a_killed_owner_is_repaired_with_equal_bits_everywhere():
    played, end = await killed("serving", GENEROUS_S)
    assert end == "SIGKILL"
    assert not played.faults


def test_the_judge_sees_what_is_wrong():
    who = meeting.owners()
    names = [n for n in meeting.SHAPES if who[n] != meeting.FAULTY]
    lost = tuple(n for n in meeting.SHAPES if who[n] == meeting.FAULTY)

    def outcome(by=meeting.SURVIVORS, also=None, parts=names, missing=lost):
        fresh = {n: meeting.truth(n, by) for n in parts} | (also or {})
        return RoundOutcome(
            fresh,
            frozenset(by),
            {},
            0,
            0.0,
            missing=missing,
            parts={n: PartOrigin(meeting.FAULTY, 1, by) for n in fresh},
        )

    fine = {p: outcome() for p in meeting.SURVIVORS}
    assert meeting.wrong(fine, who) == []
    bent = meeting.truth(names[0], meeting.SURVIVORS).clone()
    bent[0] += 1e-3
    bad = {
        "that is not the mean of a, b, c": outcome(also={names[0]: bent}),
        "not finite": outcome(also={names[0]: torch.full_like(bent, float("nan"))}),
        "from a, b": outcome(by=meeting.SURVIVORS[:2]),
        f"{names[0]} differs": outcome(by=meeting.MEMBERS),
        f"lacks {names[0]}": outcome(parts=names[1:], missing=(names[0], *lost)),
        "does not say": outcome(missing=lost[1:]),
    }
    for text, one in bad.items():
        assert any(
            text in said for said in meeting.wrong(fine | {meeting.SURVIVORS[2]: one}, who)
        ), text
