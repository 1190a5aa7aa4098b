"""The choice between kernels: what is tried, and what is taken."""

import math
from dataclasses import replace

import pytest

from node.kernels.choice import GAIN, KernelTime, Kind, StageFacts, decide, tried

CARD = StageFacts(
    "auto", cuda=True, format="bf16", documents=False, has_triton=True, has_liger=True
)
CPU = StageFacts(
    "auto", cuda=False, format="fp32", documents=False, has_triton=False, has_liger=False
)


@pytest.mark.parametrize(
    ("facts", "kinds"),
    [
        (CARD, ["liger", "compile"]),
        (replace(CARD, has_liger=False), ["compile"]),
        (replace(CARD, has_triton=False), []),
        (replace(CARD, documents=True), ["liger"]),
        (replace(CARD, format="fp16"), []),
        (CPU, []),
        (replace(CPU, has_triton=True, has_liger=True), []),
        (replace(CARD, asked="liger"), ["liger"]),
        (replace(CARD, asked="eager"), []),
        (replace(CPU, asked="compile"), ["compile"]),
    ],
)
def test_what_is_tried(facts: StageFacts, kinds: list[Kind]) -> None:
    assert tried(facts) == (kinds, [])


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (replace(CPU, asked="liger"), "liger: its kernels are for GPUs"),
        (replace(CARD, asked="liger", has_liger=False), "liger: liger-kernel is not installed"),
        (replace(CARD, asked="compile", has_triton=False), "compile: triton is not installed"),
    ],
)
def test_kernels_that_were_asked_for_and_cannot_be_had_are_reported(
    facts: StageFacts, why: str
) -> None:
    kinds, problems = tried(facts)
    assert (kinds, problems) == ([], [why])
    found = decide(facts, {}, problems)
    assert (found.name, found.said, found.problems) == ("eager", f"eager ({why})", (why,))


def test_nothing_is_said_where_there_is_no_choice() -> None:
    assert decide(CPU, {}).said == ""
    assert decide(replace(CARD, asked="eager"), {}).said == ""


def test_the_fastest_kernels_that_agree_are_taken() -> None:
    times: dict[Kind, KernelTime] = {
        "liger": KernelTime(1.2, 0.01),
        "compile": KernelTime(1.4, 0.01),
    }
    found = decide(CARD, times)
    assert (found.name, found.said) == ("compile", "compile, 1.40 times as fast as eager")
    times["compile"] = KernelTime(1.4, 0.2)
    found = decide(CARD, times)
    assert (found.name, found.problems) == ("liger", ("compile: off by 0.2 of eager's numbers",))


@pytest.mark.parametrize("error", [math.nan, math.inf, 1e-3])
def test_kernels_that_do_not_agree_in_fp32_are_never_taken(error: float) -> None:
    for asked in ("auto", "liger"):
        found = decide(replace(CARD, format="fp32", asked=asked), {"liger": KernelTime(9.0, error)})
        assert found.name == "eager"
        assert "off by" in found.said


def test_a_small_gain_is_taken_by_those_alone_who_asked_for_it() -> None:
    times: dict[Kind, KernelTime] = {"compile": KernelTime(GAIN - 0.01, 0.001)}
    assert decide(CARD, times).said == "eager (compile 1.04 times as fast)"
    assert decide(replace(CARD, asked="compile"), times).name == "compile"


def test_a_failure_is_said_beside_the_others() -> None:
    times: dict[Kind, KernelTime] = {
        "liger": KernelTime(0.9, 0.0),
        "compile": KernelTime(problem="no compiler"),
    }
    found = decide(CARD, times)
    assert found.said == "eager (liger 0.90 times as fast, compile: no compiler)"
    assert found.problems == ("compile: no compiler",)
