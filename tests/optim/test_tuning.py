"""The file of times: a good file is read; in place of any other a new one is measured and written,
and there is never an error."""

import asyncio
import fcntl
import json
import threading
from types import SimpleNamespace

import pytest
import torch

from node.app import tuning
from node.app.tuning import (
    LOCK,
    precision_of,
    read_times,
    this_machine,
    tune,
    tune_meanwhile,
    worth,
)
from node.core.ids import ENDS
from node.manifest import Manifest, amended
from node.model.device import Device
from node.optim.kernel_rule import CPU, CUDA, ON_CUDA, KernelRule, following, rule_from
from node.optim.newton_schulz import follow, followed
from node.optim.trials import HEAD
from node.telemetry.events import Journal
from testbed.fakes.clock import VirtualClock
from tests.optim.test_kernel_rule import CARD, CARD_NOWHERE, UNITS, machine, measured

TIMES, _ = measured(machine(UNITS))
RULE = rule_from(TIMES)


@pytest.fixture(autouse=True)
def nothing_followed(monkeypatch):
    monkeypatch.setattr("node.optim.newton_schulz._followed", {"cpu": CPU, "cuda": CUDA})


class Counting:
    """Stand-in for the measurement."""

    def __init__(self, times=TIMES):
        self.calls = 0
        self.times = times

    def __call__(self, stop, device):
        self.calls += 1
        return self.times


def test_the_first_start_measures_and_later_ones_read(tmp_path):
    one = Counting()
    assert followed() == CPU != RULE
    first = tune(tmp_path / "made", measured=one)
    assert (first.rule, first.problem, followed()) == (RULE, "", RULE)
    follow(CPU)
    again = tune(tmp_path / "made", measured=one)
    assert ((again.rule, again.seconds, followed()), one.calls) == ((RULE, 0.0, RULE), 1)


def file_in(folder):
    tune(folder, measured=Counting())
    (path,) = folder.glob("kernels-*.json")
    return path


def signed_again(change):
    """The same file with a digest that fits."""

    def write(path):
        found = json.loads(path.read_text())
        change(found)
        content = {key: value for key, value in found.items() if key != "digest"}
        path.write_text(json.dumps({**content, "digest": tuning._digest(content)}))

    return write


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a digit": lambda path: path.write_bytes(
        path.read_bytes().replace(b"64, 64, 64", b"64, 64, 65", 1)
    ),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes()),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b" " * (1 << 17)),
    "nested": lambda path: path.write_text("[" * 60_000),
    "another value": lambda path: path.write_text("[1, 2]"),
    "a number": lambda path: path.write_text("1"),
    "another machine": signed_again(lambda found: found.update(machine="a faster one")),
    "a later format": signed_again(lambda found: found.update(format=tuning.FORMAT + 1)),
    "one field more": signed_again(lambda found: found.update(more=1)),
    "no times": signed_again(lambda found: found.update(times=[])),
    "times are words": signed_again(lambda found: found.update(times="fast")),
    "one is missing": signed_again(lambda found: found["times"].pop()),
    "a time is negative": signed_again(lambda found: found["times"][0].__setitem__(5, -1.0)),
    "a time is no number": signed_again(
        lambda found: found["times"][0].__setitem__(5, float("nan"))
    ),
    "a time is text": signed_again(lambda found: found["times"][0].__setitem__(5, "1.0")),
    "a trial is short": signed_again(lambda found: found["times"][0].pop()),
    "a trial is nested": signed_again(lambda found: found["times"][0].__setitem__(0, [64])),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to(path.parent / "nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_file_is_measured_anew_and_written_over(tmp_path, damage):
    path = file_in(tmp_path)
    DAMAGE[damage](path)
    assert read_times(path, this_machine()) is None
    follow(CPU)
    one = Counting()
    found = tune(tmp_path, measured=one)
    assert (one.calls, found.rule, followed()) == (1, RULE, RULE)
    if damage == "a directory":
        assert "cannot write" in found.problem
    else:
        assert (found.problem, read_times(path, this_machine())) == ("", TIMES)


def test_each_gpu_has_a_file_and_a_rule_of_its_own(tmp_path, monkeypatch):
    """By its name, so that a card of another kind in this machine is measured too."""
    names = iter(["NVIDIA H100", "Tesla T4", "NVIDIA H100"])
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(
            name=next(names), major=9, minor=0, multi_processor_count=132
        ),
    )
    times, _ = measured(machine(CARD, CARD_NOWHERE, stacks_bf16_to=1024), ON_CUDA)
    one = Counting(times)
    card = Device(torch.device("cuda", 0))
    for _ in range(3):
        found = tune(tmp_path, device=card, measured=one)
        assert found.rule == rule_from(times, ON_CUDA) == followed("cuda")
    assert (one.calls, len(list(tmp_path.glob("kernels-*.json"))), followed()) == (2, 2, CPU)


def test_an_unwritable_cache_is_measured_again_next_start(tmp_path):
    (tmp_path / "taken").write_text("no folder")
    one = Counting()
    for _ in range(2):
        found = tune(tmp_path / "taken" / "tutti", measured=one)
        assert found.rule == RULE
        assert "cannot write" in found.problem
    assert one.calls == 2


def test_limits_on_the_processor_have_times_of_their_own(tmp_path, monkeypatch):
    one = Counting()
    tune(tmp_path, measured=one)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    tune(tmp_path, measured=one)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    tune(tmp_path, measured=one)
    assert (one.calls, len(list(tmp_path.glob("kernels-*.json")))) == (2, 2)


def test_what_was_stopped_is_not_kept(tmp_path):
    some = dict(list(TIMES.items())[:4])
    assert following(some)
    assert tune(tmp_path, measured=Counting(some)).problem == ""
    assert not list(tmp_path.glob("kernels-*.json"))
    one = Counting()
    tune(tmp_path, measured=one)
    assert one.calls == 1


def test_of_two_processes_one_measures_and_the_other_reads(tmp_path):
    begun = threading.Event()
    done = threading.Event()

    def slow(stop, device):
        begun.set()
        assert done.wait(60)
        return TIMES

    other = threading.Thread(target=tune, args=(tmp_path,), kwargs={"measured": slow})
    other.start()
    assert begun.wait(60)
    threading.Timer(0.3, done.set).start()
    late = Counting()
    assert tune(tmp_path, measured=late).rule == RULE
    other.join(60)
    assert late.calls == 0


def test_waiting_for_another_process_ends_when_stopped(tmp_path):
    with open(tmp_path / LOCK, "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        stop = threading.Event()
        stop.set()
        assert tune(tmp_path, stop, measured=Counting({})).rule == CPU
    assert not list(tmp_path.glob("kernels-*.json"))


def demo(**changes):
    return amended(
        Manifest.default_demo(), {key.replace("__", "."): value for key, value in changes.items()}
    )


LARGE = {"model__d_model": 64, "model__d_ff": 128}


@pytest.mark.parametrize(
    ("changes", "stage", "device", "measures"),
    [
        (LARGE, 1, "cpu", True),
        (LARGE, ENDS, "cpu", False),
        (LARGE, 1, "cuda", True),
        (LARGE, ENDS, "cuda", False),
        (LARGE | {"optimizer__name": "adamw"}, 1, "cpu", False),
        ({"model__d_model": 32, "model__d_ff": 64}, 1, "cpu", False),
    ],
)
def test_only_who_steps_large_matrices_by_muon_measures(changes, stage, device, measures):
    assert worth(demo(**changes), stage, torch.device(device)) is measures


@pytest.mark.parametrize("units", [True, False])
def test_a_processor_with_units_for_bf16_measures_where_a_run_allows_bf16(monkeypatch, units):
    monkeypatch.setattr(tuning, "bf16_units", lambda: units)
    mixed = demo(training__mixed_precision=True)
    assert worth(mixed, ENDS, torch.device("cpu")) is units
    assert not worth(mixed, ENDS, torch.device("cuda"))


def test_layers_follow_the_measured_rule_where_the_run_allows_it(monkeypatch):
    cpu = Device(torch.device("cpu"))
    width = demo().model.d_model
    old = demo()
    new = demo(training__mixed_precision=True)
    plain = precision_of(old, cpu)
    mixed = precision_of(new, cpu)
    assert (plain.format, mixed.format) == ("fp32", "fp32"), "not measured yet"
    follow(KernelRule(layers_bf16_from=width))
    assert (plain.format, mixed.format) == ("fp32", "bf16")
    follow(KernelRule(layers_bf16_from=2 * width))
    assert mixed.format == "fp32"
    assert precision_of(demo(optimizer__parameters="bf16"), cpu).format == "bf16"


@pytest.mark.parametrize(
    ("capability", "parameters", "slow", "found"),
    [
        ((7, 5), "fp32", {"fp32": 9}, "fp16"),
        ((6, 1), "fp32", {"fp16": 9}, "fp32"),
        ((7, 5), "fp32", {"fp16": None}, "fp32"),
        ((7, 5), "fp32", {"fp16": None, "fp32": None}, "fp32"),
        ((7, 5), "bf16", {"bf16": 9}, "fp16"),
        ((7, 5), "bf16", {"fp16": 9}, "bf16"),
        ((8, 0), "fp32", {"bf16": 9}, "bf16"),
    ],
)
def test_an_old_card_computes_in_the_format_that_is_faster(
    monkeypatch, capability, parameters, slow, found
):
    """None: the card refuses the format. Cards with units for bf16 are not measured."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    clock = VirtualClock(0.0)
    monkeypatch.setattr(tuning.time, "perf_counter", clock.now)

    def make(device, width, tokens, kind):
        assert width % HEAD == 0

        def act():
            if (seconds := slow.get(kind, 1)) is None:
                raise RuntimeError("not implemented for this card")
            clock.advance(seconds)

        return act

    monkeypatch.setattr(tuning, "layer_pass", make)
    card = Device(torch.device("cuda", 0))
    assert precision_of(demo(optimizer__parameters=parameters), card).format == found


async def test_a_daemon_reports_its_kernel_rule_and_can_be_stopped(tmp_path, monkeypatch):
    journal = Journal()
    monkeypatch.setattr(
        tuning, "tune", lambda folder, stop, device: tune(tmp_path, stop, device, Counting())
    )
    await tune_meanwhile(journal)
    (event,) = journal.recent()
    assert (event.component, event.kind, event.fields["bf16_from"]) == (
        "optim",
        "kernels-tuned",
        RULE.bf16_from,
    )

    begun = asyncio.Event()
    ended = threading.Event()
    loop = asyncio.get_running_loop()

    def endless(folder, stop, device):
        loop.call_soon_threadsafe(begun.set)
        if stop.wait(60):
            ended.set()

    monkeypatch.setattr(tuning, "tune", endless)
    task = asyncio.ensure_future(tune_meanwhile(journal))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 60)
