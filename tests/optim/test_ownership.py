"""Ownership: exactly one owner, the same for everybody, near-equal load, little movement."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.ids import PeerId
from node.optim.ownership import WORTH_MOVING, assign, makespan, ownership_hash
from node.optim.parts import Part, parts_of, step_cost
from node.optim.settings import OptimSettings

peers = st.lists(st.integers(0, 30), min_size=1, max_size=9, unique=True).map(lambda ns: [PeerId(f"p{n:02}") for n in ns])
costs = st.lists(st.integers(0, 50), min_size=0, max_size=40)


def parts(values):
    return tuple(Part(f"w{i:03}", (v, 1), float(v), 4 * v, True) for i, v in enumerate(values))


def model(layers=8, d=64):
    shapes = {"model.embed_tokens.weight": (259, d), "lm_head.weight": (259, d)}
    for i in range(layers):
        base = f"model.layers.{i}."
        shapes |= {base + f"self_attn.{p}_proj.weight": (d, d) for p in "qkvo"}
        shapes |= {base + "mlp.up_proj.weight": (3 * d, d), base + "mlp.down_proj.weight": (d, 3 * d)}
        shapes |= {base + "input_layernorm.weight": (d,)}
    return shapes


@given(costs, peers, peers, st.data())
def test_every_part_has_exactly_one_living_owner(values, before, after, data):
    ps = parts(values)
    speeds = data.draw(st.lists(st.floats(0, 10), min_size=len(after), max_size=len(after)))
    first = assign(ps, [(p, 1.0) for p in before])
    second = assign(ps, list(zip(after, speeds, strict=True)), first)
    assert set(second) == {p.name for p in ps}
    assert set(second.values()) <= set(after)


@given(costs, peers, st.randoms())
def test_the_order_of_the_inputs_does_not_matter(values, members, dice):
    ps, ms = list(parts(values)), [(p, float(1 + i % 3)) for i, p in enumerate(members)]
    previous = assign(ps, ms[: 1 + len(ms) // 2])
    expected = assign(ps, ms), assign(ps, ms, previous)
    dice.shuffle(ps)
    dice.shuffle(ms)
    shuffled = dict(sorted(previous.items(), reverse=True))
    assert (assign(ps, ms), assign(ps, ms, shuffled)) == expected
    assert ownership_hash(dict(sorted(expected[0].items(), reverse=True))) == ownership_hash(expected[0])


@given(costs, peers, peers)
def test_equal_peers_have_near_equal_loads(values, before, after):
    ps, ms = parts(values), [(p, 0.0) for p in after]
    mean, largest = sum(values) / len(after), max(values, default=0)
    assert makespan(ps, ms, assign(ps, ms)) <= mean + largest * (1 - 1 / len(after)) + 1e-9
    repaired = assign(ps, ms, assign(ps, [(p, 0.0) for p in before]))
    assert makespan(ps, ms, repaired) <= mean + largest + WORTH_MOVING * mean + 1e-9


@given(costs, peers)
def test_nothing_moves_when_nobody_comes_or_goes(values, members):
    ps, ms = parts(values), [(p, 1.0) for p in members]
    before = assign(ps, ms)
    after = assign(ps, ms, before)
    assert makespan(ps, ms, after) <= makespan(ps, ms, before)
    assert assign(ps, ms, after) == after


@pytest.mark.parametrize("count", [4, 8, 16])
def test_leaving_and_joining_move_about_one_share(count):
    ps = parts_of(model(layers=28), OptimSettings())
    members = [(PeerId(f"p{i:02}"), 1.0 + (i % 3) * 0.5) for i in range(count)]
    total = sum(p.bytes for p in ps)
    before = assign(ps, members)
    for changed in (members[:3] + members[4:], [*members, (PeerId("p99"), 1.0)]):
        after = assign(ps, changed, before)
        moved = sum(p.bytes for p in ps if before[p.name] != after[p.name])
        assert moved <= 2.0 / count * total
        assert makespan(ps, changed, after) <= 1.35 * makespan(ps, changed, assign(ps, changed))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_newcomer_gets_its_share_from_the_slowest(count):
    ps, members = parts([5] * 80), [(PeerId(f"p{i}"), 1.0) for i in range(count)]
    after = assign(ps, [*members, (PeerId("new"), 1.0)], assign(ps, members))
    assert sum(o == "new" for o in after.values()) >= 0.7 * 80 / (count + 1)
    assert makespan(ps, [*members, (PeerId("new"), 1.0)], after) <= 1.15 * 400 / (count + 1)


def test_only_orphans_move_when_the_rest_is_balanced():
    ps, members = parts([10] * 12), [(PeerId(p), 1.0) for p in "abcd"]
    before = assign(ps, members)
    after = assign(ps, members[:3], before)
    assert {n for n in before if before[n] != after[n]} == {n for n, o in before.items() if o == "d"}


def test_the_fast_own_more():
    ps = parts([1] * 40)
    owners = assign(ps, [(PeerId("slow"), 1.0), (PeerId("fast"), 3.0)])
    assert sum(o == "fast" for o in owners.values()) == 30


def test_members_that_make_no_sense_are_refused():
    a = PeerId("a")
    for members in ([], [(a, 1.0), (a, 2.0)], [(a, -1.0)], [(a, float("nan"))], [(a, float("inf"))]):
        with pytest.raises(ValueError, match="own|twice|speed"):
            assign(parts([1]), members)
    with pytest.raises(ValueError, match="twice"):
        assign(parts([1]) * 2, [(a, 1.0)])


def test_costs_follow_the_iteration():
    s = OptimSettings(ns_steps=5)
    name = "model.layers.0.mlp.up_proj.weight"
    assert step_cost(name, (30, 10), s) == step_cost(name, (10, 30), s)
    assert step_cost(name, (30, 10), s) - step_cost("lm_head.weight", (30, 10), s) == 5 * (4 * 30 * 100 + 2 * 1000)
    by_name = {p.name: p for p in parts_of(model(), s)}
    assert by_name[name].atomic
    assert not by_name["lm_head.weight"].atomic
    assert not by_name["model.layers.0.input_layernorm.weight"].atomic
    assert by_name[name].bytes == 4 * 64 * 192


def test_another_process_computes_the_same_map():
    program = (
        "from node.optim.parts import Part; from node.optim.ownership import assign, ownership_hash; import sys\n"
        "ps = [Part(f'w{i}', (i, 1), float(i * 7 % 13), i, True) for i in range(50)]\n"
        "print(ownership_hash(assign(ps, [(f'p{i}', i / 3) for i in range(7)])))\n"
        "assert 'torch' not in sys.modules"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": str(s)}, capture_output=True, text=True, check=True
        ).stdout
        for s in range(2)
    }
    assert len(hashes) == 1
    assert len(hashes.pop().strip()) == 64
