"""The rule that chooses between the ways of multiplying, and its derivation from times."""

import pytest
import torch

from node.optim.kernel_rule import (
    CPU,
    CUDA,
    GAIN,
    MEASURED_FROM,
    NEVER,
    ON_CPU,
    ON_CUDA,
    PANELS_GAIN,
    SMALLER,
    KernelRule,
    KernelTrial,
    following,
    layer_format,
    rule_from,
    way,
)
from node.optim.newton_schulz import follow, followed, newton_schulz_all, rule_of

SQUARES = ON_CPU.squares
OPERANDS = ON_CPU.operands
LAYERS = ON_CPU.layers
UNITS = {64: 5.6, 128: 5.0, 256: 6.0, 512: 8.0, 768: 9.0}
"""Speed of bf16 relative to fp32 on square matrices, by side, on a processor with matrix units."""
NONE = dict.fromkeys(SQUARES, 0.5)
"""The same on a processor that emulates bf16."""
NOWHERE = dict.fromkeys(OPERANDS, 0.9)
MIXED = KernelRule(bf16_from=4096)


def machine(faster, panels=NOWHERE, stacks_to=64, stacks_bf16_to=512, layers=None, gram_from=0):
    """A processor or a GPU: a function from a trial to its seconds."""

    def seconds(trial):
        work = 1e-9 * trial.many * trial.rows**2 * trial.cols
        if trial.form in ("standard", "gram"):
            return work / (1.3 if (trial.form == "gram") == (trial.rows >= gram_from) else 1.0)
        if trial.form == "layer":
            return work / (layers or {}).get(trial.rows, 1.0) ** (trial.precision == "bf16")
        if trial.many == 1:
            return work / (panels[trial.rows, trial.cols] if trial.form == "panels" else 1.0)
        to, rate = (
            (stacks_to, 1.0) if trial.precision == "fp32" else (stacks_bf16_to, faster[trial.rows])
        )
        return work / rate * ((1.0 if trial.rows <= to else 1.5) if trial.form == "stack" else 1.2)

    return seconds


def measured(seconds, menu=ON_CPU):
    """All times that the rule asks for on a device, and the groups of trials."""
    times = {}
    groups = []
    while group := following(times, menu):
        groups.append(group)
        times.update((trial, seconds(trial)) for trial in group)
    return times, groups


OWN = KernelRule(bf16_from=16, stack_bf16_to=16, gram_aspect=1.0, gram_from=1)


@pytest.mark.parametrize(
    ("shape", "rule", "expected"),
    [
        ((64, 64), MIXED, {"precision": "bf16", "stacked": True}),
        ((1024, 1024), MIXED, {"precision": "bf16", "stacked": False}),
        ((16, 16), MIXED, {"precision": "fp32", "stacked": True}),
        ((128, 128), CPU, {"stacked": False}),
        ((64, 64), OWN, {"precision": "bf16", "stacked": False, "gram": True}),
        # a product made by panels is not stacked
        ((512, 1024), KernelRule(bf16_from=1, panels_bf16=512 * 2048), {"stacked": True}),
        ((512, 2048), KernelRule(bf16_from=1, panels_bf16=512 * 2048), {"stacked": False}),
        ((512, 2048), KernelRule(bf16_from=1, panels_bf16=0), {"stacked": True}),
        *(
            (shape, rule, expected)
            for rule in (CPU, MIXED)
            for shape, expected in (
                ((1024, 3072), {"gram": True}),
                ((1024, 1024), {"gram": False}),
                ((1024, 1536), {"gram": False}),
                ((8, 64), {"gram": False}),
                ((7, 64), {"stacked": False}),
            )
        ),
        *(((m, n), CPU, {"precision": "fp32"}) for m in (8, 64, 512) for n in (8, 64, 4096)),
    ],
)
def test_a_shape_and_its_transpose_are_computed_alike(shape, rule, expected):
    chosen = way(*shape, rule)
    assert chosen == way(*shape[::-1], rule)
    assert {name: getattr(chosen, name) for name in expected} == expected


def test_without_times_the_rule_is_the_same_everywhere():
    assert (rule_from({}), CPU.bf16_from) == (CPU, 0)
    assert rule_from({}, ON_CUDA) == CUDA


CARD = {side: 4.0 for side in ON_CUDA.squares}
CARD_NOWHERE = dict.fromkeys(ON_CUDA.operands, 0.9)


def on_card(faster, panels=CARD_NOWHERE, **more):
    """The rule of a GPU, and the times it is made of."""
    times, _ = measured(machine(faster, panels, stacks_bf16_to=1024, **more), ON_CUDA)
    return rule_from(times, ON_CUDA), times


def test_a_gpu_is_measured_at_sizes_of_its_own():
    rule, times = on_card(CARD, gram_from=2048)
    assert rule == KernelRule(
        bf16_from=128 * 128,
        stack_bf16_to=1024,
        stack_fp32_to=SMALLER,
        panels_bf16=0,
        panels_fp32=0,
        gram_aspect=CUDA.gram_aspect,
        gram_from=2048,
    )
    assert not any(trial.form == "layer" for trial in times)


def test_a_gpu_without_units_for_bf16_steps_in_fp32():
    rule, times = on_card(dict.fromkeys(CARD, 0.1))
    assert rule.bf16_from == 0
    assert {trial.rows for trial in times if trial.precision == "bf16"} == {128}


@pytest.mark.parametrize(("gram_from", "expected"), [(0, 512), (1024, 1024), (9999, NEVER)])
def test_a_gpu_takes_the_gram_form_from_where_it_is_faster(gram_from, expected):
    rule, _ = on_card(CARD, gram_from=gram_from)
    assert rule.gram_from == expected
    assert way(4096, 16384, rule).gram is (gram_from < 9999)


def test_a_gpu_takes_panels_where_they_gain():
    rule, _ = on_card(CARD, panels={**CARD_NOWHERE, (4096, 4096): 1.5})
    assert rule.panels_bf16 == 4096 * 4096
    assert not way(4096, 4096, rule).stacked


def test_a_processor_with_matrix_units_works_in_bf16():
    times, _ = measured(machine(UNITS, panels={**NOWHERE, (1024, 2048): 1.25}))
    assert rule_from(times) == KernelRule(
        bf16_from=64 * 64,
        stack_bf16_to=512,
        stack_fp32_to=64,
        panels_bf16=1024 * 2048,
        panels_fp32=CPU.panels_fp32,
    )


def test_bf16_that_gains_little_is_not_taken():
    for gain, bf16_from in ((GAIN * 0.99, 0), (GAIN * 1.01, MEASURED_FROM)):
        times, _ = measured(machine(dict.fromkeys(SQUARES, gain)))
        assert rule_from(times).bf16_from == bf16_from


@pytest.mark.parametrize("slow", SQUARES)
def test_bf16_begins_where_it_is_faster_on_all_that_is_larger(slow):
    faster = {side: (0.9 if side == slow else 3.0) for side in SQUARES}
    larger = min((side for side in SQUARES if side > slow), default=0)
    assert rule_from(measured(machine(faster))[0]).bf16_from == larger**2


def test_hopeless_bf16_is_tried_on_one_size_only():
    times, groups = measured(machine(dict.fromkeys(SQUARES, 0.01)))
    assert {trial.rows for trial in times if trial.precision == "bf16"} == {64}
    assert {trial.precision for group in groups[1:] for trial in group} == {"fp32"}
    assert rule_from(times).bf16_from == 0
    assert {trial.rows for trial in measured(machine(NONE))[0] if trial.precision == "bf16"} == set(
        SQUARES
    )


def test_panels_apply_from_the_size_where_all_larger_ones_gain():
    gains = [
        {},
        {OPERANDS[2]: 1.4},
        {OPERANDS[2]: 1.4, OPERANDS[1]: 1.3},
        {OPERANDS[1]: 1.4},
        {OPERANDS[2]: PANELS_GAIN * 0.99},
    ]
    found = [
        rule_from(measured(machine(NONE, {**NOWHERE, **gain}))[0]).panels_fp32 for gain in gains
    ]
    assert found == [0, 1024 * 2048, 1024 * 1024, 0, 0]


@pytest.mark.parametrize(
    ("gains", "from_"),
    [
        ({}, 0),
        ({128: 1.4, 256: 1.4, 512: 1.6}, 128),
        ({128: 1.4, 256: 1.0, 512: 1.6}, 512),
        ({128: 1.4, 256: 1.4, 512: GAIN * 0.99}, 0),
    ],
)
def test_layers_are_computed_in_bf16_from_the_width_where_all_larger_ones_gain(gains, from_):
    rule = rule_from(measured(machine(UNITS, layers=gains))[0])
    assert rule.layers_bf16_from == from_
    assert layer_format(from_ - 1, rule) == "fp32"
    assert layer_format(max(LAYERS), rule) == ("bf16" if from_ else "fp32")


def test_layers_are_not_tried_where_bf16_is_hopeless():
    assert not any(t.form == "layer" for t in measured(machine(dict.fromkeys(SQUARES, 0.01)))[0])


@pytest.mark.parametrize(("to", "expected"), [(0, SMALLER), (64, 64), (256, 256), (768, 768)])
def test_stacks_are_taken_up_to_where_they_lose(to, expected):
    assert rule_from(measured(machine(NONE, stacks_to=to))[0]).stack_fp32_to == expected


def test_only_trials_that_are_compared_run_together_and_once():
    times, groups = measured(machine(UNITS))
    assert sum(map(len, groups)) == len(times)
    for group in groups:
        assert len({(trial.rows, trial.cols, trial.many) for trial in group}) == 1
    assert all(isinstance(trial, KernelTrial) for trial in times)
    (lost, *_) = times
    assert following({trial: t for trial, t in times.items() if trial != lost}) == groups[0]


def test_a_process_follows_the_rule_it_is_given(monkeypatch):
    monkeypatch.setattr("node.optim.newton_schulz._followed", {"cpu": CPU, "cuda": CUDA})
    m = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert newton_schulz_all([m], 5, True)[0].dtype is torch.float32
    follow(MIXED)
    assert rule_of(torch.device("cpu")) == followed() == MIXED
    assert newton_schulz_all([m], 5, True)[0].dtype is torch.bfloat16
    assert rule_of(torch.device("cuda", 0)) == followed("cuda") == CUDA
    follow(OWN, "cuda")
    assert (rule_of(torch.device("cuda", 0)), followed()) == (OWN, MIXED)
