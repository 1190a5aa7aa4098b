"""What measuring makes of a rule: crossovers from outcomes, the budget, and that the result is one that can be used."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

import node.optim.calibrate as calibration
from node.optim.calibrate import ASPECTS, NEVER, STACKS, calibrate, since, until
from node.optim.kernel_rule import AMX, CPU
from node.optim.newton_schulz import newton_schulz_all, reference

CPU_DEVICE = torch.device("cpu")


@pytest.mark.parametrize(
    ("faster", "least", "most"),
    [
        ([True, True, True], 1, 3),
        ([False, True, True], 2, 0),
        ([True, False, True], 3, 1),
        ([True, True, False], NEVER, 2),
        ([False, False, False], NEVER, 0),
        ([], NEVER, 0),
    ],
)
def test_crossovers(faster, least, most):
    measured = list(enumerate(faster, 1))
    assert since(measured) == least
    assert until(measured) == most


@pytest.mark.parametrize("rule", [CPU, AMX])
def test_without_time_nothing_changes(rule):
    assert calibrate(CPU_DEVICE, rule, budget=0.0) == rule


def shrunk(monkeypatch, faster):
    """Small trials whose outcome is given: both ways are run, the clock is not asked."""

    def outcome(new, old, _):
        new()
        old()
        return faster

    monkeypatch.setattr(calibration, "_faster", outcome)
    monkeypatch.setattr(calibration, "SIDES", (8, 16))
    monkeypatch.setattr(calibration, "STACKS", (8, 16))


def test_where_everything_wins_the_crossovers_are_the_first_tried(monkeypatch):
    shrunk(monkeypatch, True)
    rule = calibrate(CPU_DEVICE, AMX, budget=1e9, side=8)
    assert (rule.bf16_from, rule.stack_bf16_to, rule.stack_fp32_to) == (8, 16, 16)
    assert (rule.gram_bf16, rule.gram_fp32) == (ASPECTS[0], ASPECTS[0])
    assert (rule.panels_fp32, rule.panels_bf16) == (8 * 8, 16 * 16)


def test_where_nothing_wins_all_is_left_simple(monkeypatch):
    shrunk(monkeypatch, False)
    rule = calibrate(CPU_DEVICE, AMX, budget=1e9, side=8)
    assert (rule.bf16_from, rule.stack_bf16_to, rule.stack_fp32_to) == (NEVER, 0, 0)
    assert (rule.gram_bf16, rule.gram_fp32, rule.panels_fp32, rule.panels_bf16) == (NEVER, NEVER, 0, 0)
    m = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    (found,) = newton_schulz_all([m], 5, True, rule=rule)
    assert torch.allclose(found.double(), reference(m), atol=1e-5)


def test_without_matrix_units_bf16_is_not_tried(monkeypatch):
    shrunk(monkeypatch, True)
    rule = calibrate(CPU_DEVICE, CPU, budget=1e9, side=8)
    low = {f.name for f in fields(CPU) if "bf16" in f.name}
    assert {name: getattr(rule, name) for name in low} == {name: getattr(CPU, name) for name in low}
    assert not rule.units


def test_a_real_measurement_ends_and_gives_sizes_that_were_tried():
    rule = calibrate(CPU_DEVICE, CPU, budget=0.3, side=32)
    assert rule.gram_fp32 in {*ASPECTS, NEVER, CPU.gram_fp32}
    assert rule.stack_fp32_to in {*STACKS, 0}
    assert rule.bf16_from == CPU.bf16_from
