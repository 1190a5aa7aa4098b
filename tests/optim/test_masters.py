"""Parameters in bf16 with fp32 masters at their owners: no update is rounded away."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from node.core.errors import StepFault
from node.optim.owner import Owner
from node.optim.parts import LOW, parts_of, step_scratch
from node.optim.steps import join, split
from testbed.models.owner_group import METHODS, SHAPES, numbers, settings_of
from testbed.reference.swarm import step_all
from tests.optim.conftest import matrix_by_matrix

UP = "model.layers.0.up"


def halves(seed: int = 0) -> dict[str, Tensor]:
    return {name: t.to(torch.bfloat16) for name, t in numbers(seed).items()}


def trained(method: str, epochs: int, parameters: dict[str, Tensor], **more: Any) -> Any:
    """Train bf16 parameters for this number of epochs; returns the owner and the parameters."""
    owner = Owner(replace(settings_of(method, "bf16"), **more), 0)
    for epoch in range(epochs):
        parameters = step_all(owner, parameters, numbers(epoch + 1, scale=0.01), epoch)
    return owner, parameters


def test_halves_are_the_number_to_the_bit() -> None:
    g = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (1 << 18,), generator=g)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0, -(2**31), 1])
    whole = torch.cat((bits, ties)).to(torch.int32).view(torch.float32)
    whole = whole[whole.abs() < 3e38]
    upper, lower = split(whole)
    assert torch.equal(join(upper, lower).view(torch.int32), whole.view(torch.int32))
    # Rounding to nearest, as torch does, except for ties.
    apart = (upper.double() - whole.double()).abs()
    assert torch.equal(apart, (whole.bfloat16().double() - whole.double()).abs())
    # Any lower half fits any upper half.
    other = lower.roll(1)
    again = split(join(upper, other))
    assert torch.equal(again[0].view(torch.int16), upper.view(torch.int16))
    assert torch.equal(again[1], other)


@pytest.mark.parametrize("method", METHODS)
@matrix_by_matrix()
def test_masters_are_what_fp32_training_has(method: str) -> None:
    plain = Owner(settings_of(method), 0)
    whole = {name: t.float() for name, t in halves().items()}
    owner, parameters = trained(method, 5, halves())
    for epoch in range(5):
        whole = step_all(plain, whole, numbers(epoch + 1, scale=0.01), epoch)
    for name, parameter in parameters.items():
        state = owner.state(name)
        low = state.pop(LOW)
        assert (parameter.dtype, low.dtype) == (torch.bfloat16, torch.int16)
        assert torch.equal(join(parameter, low), whole[name])
        assert {k: t.tolist() for k, t in state.items()} == {
            k: t.tolist() for k, t in plain.state(name).items()
        }


@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
def test_a_large_part_is_stepped_some_rows_at_a_time(parameters: str, monkeypatch: Any) -> None:
    name = "model.embed_tokens.weight"
    settings = settings_of("adamw", parameters)
    shape = SHAPES[name]
    begin = {name: numbers(0)[name].to(torch.bfloat16 if settings.masters else torch.float32)}
    found = []
    for at_once in (1 << 22, 5 * shape[1]):
        monkeypatch.setattr("node.optim.steps.AT_ONCE", at_once)
        owner = Owner(settings, 0)
        now = begin
        for epoch in range(3):
            now = step_all(owner, now, {name: numbers(epoch + 1)[name]}, epoch)
        found.append(now | owner.state(name))
    one, other = found
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_updates_below_the_resolution_of_bf16_add_up() -> None:
    """Steps are 1e-5 and the numbers about 1; the neighbours of 1 in bf16 are 0.004 and 0.008
    away."""
    rates = {"adam_lr": 1e-5, "decay": 0.0, "weight_decay": 0.0}
    ones = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    up = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    owner = Owner(replace(settings_of("adamw", "bf16"), **rates), 0)
    rounded = Owner(replace(settings_of("adamw"), **rates), 0)
    kept = ones
    lost = ones
    for epoch in range(500):
        kept = step_all(owner, kept, up, epoch)
        # Without masters every step is rounded away.
        lost = {n: t.bfloat16() for n, t in step_all(rounded, lost, up, epoch).items()}
        assert epoch > 300 or all(bool((t == 1).all()) for t in kept.values())
    assert all(bool((t == 1).all()) for t in lost.values())
    for name, parameter in kept.items():
        master = join(parameter, owner.state(name)[LOW])
        torch.testing.assert_close(master, torch.full(SHAPES[name], 1.005))
        assert bool((parameter == 1.0078125).all()), "the next number after 1"


@pytest.mark.parametrize("method", METHODS)
def test_a_lower_half_of_others_moves_little(method: str) -> None:
    """Such a half comes from an older copy, or from a peer that made it up."""
    owner, parameters = trained(method, 3, halves())
    state = owner.state(UP)
    gradient = {UP: numbers(9, scale=0.01)[UP]}
    made = []
    for low in (torch.zeros_like(state[LOW]), torch.full_like(state[LOW], -(2**15))):
        taker = Owner(replace(settings_of(method, "bf16"), weight_decay=0.0), 0)
        taker.load_state(UP, SHAPES[UP], state | {LOW: low.float()}, 2)
        made.append(taker.step_parts(parameters, gradient, 3)[UP].float())
    resolution = parameters[UP].float().abs() / 128
    assert bool(((made[0] - made[1]).abs() <= 2 * resolution + 1e-3).all())


@pytest.mark.parametrize(
    ("parameters", "wrong", "says"),
    [
        ("bf16", None, "should have"),  # with a lower half where no owner has masters
        ("fp32", 0.0, "should have"),  # with one where nobody has masters
        ("bf16", float("inf"), "not finite"),
        ("bf16", 0.5, "16 bits"),
        ("bf16", 40_000.0, "16 bits"),
    ],
)
def test_a_lower_half_that_cannot_be_is_refused(parameters: str, wrong: Any, says: str) -> None:
    state = trained("muon", 1, halves())[0].state(UP)
    low = state.pop(LOW).float()
    if wrong is not None:
        low[0, 0] = wrong
        state[LOW] = low
    with pytest.raises(StepFault, match=says):
        Owner(settings_of("muon", parameters), 0).load_state(UP, SHAPES[UP], state)


def test_masters_are_planned_for() -> None:
    whole, half = (parts_of(SHAPES, settings_of("muon", p)) for p in ("fp32", "bf16"))
    for one, other in zip(whole, half, strict=True):
        assert other.state == one.state + one.bytes // 2
        assert (other.cost, other.bytes) == (one.cost, one.bytes)
    assert step_scratch(half, settings_of("muon", "bf16"), 1 << 20) > step_scratch(
        whole, settings_of("muon"), 1 << 20
    )
