"""The benchmark of a GPU, tested on a CPU."""

import contextlib
import json
import math
import os
import queue
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import autocast, swarm
from benchmarks.gpu.bench import Bench, differs
from benchmarks.gpu.imports import APART, EACH
from benchmarks.gpu.wheels import MODULES, MOST, SOURCE, THERE, digests, pins
from benchmarks.report import Report
from node.app.daemon import TUNING_S
from node.core.errors import ExitCode, UsageFault
from node.model.device import Device
from node.model.stages import build

ROW = json.dumps({"name": "6.x one", "value": 1, "unit": "of 2", "target": "2", "holds": False})
ONLY = """
import importlib.abc, sys
from importlib import metadata
known = metadata.packages_distributions()
kept = set(sys.argv.pop(1).split())
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        owners = known.get(name.partition(".")[0], ())
        if owners and not kept & {o.lower().replace("_", "-") for o in owners}:
            raise ModuleNotFoundError(f"{name} is of {owners[0]}, which is not there", name=name)
sys.meta_path.insert(0, Absent())
"""


def test_a_machine_without_a_gpu_is_told_so_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == ExitCode.RESOURCES
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert "there is no GPU" in said.err
    assert "--rehearse" in said.err


def test_rows_are_added_until_the_time_is_over():
    told: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    report = Report()
    told.put(ROW)
    told.put("a library prints\n")
    assert not gpu.added(report, told, time.monotonic() - 1)
    assert [row.name for row in report.rows] == ["6.x one"]
    told.put(ROW)
    told.put(None)
    assert gpu.added(report, told, time.monotonic() + 60)
    assert len(report.rows) == 2


@pytest.mark.parametrize(
    ("end", "limit", "holds", "said"),
    [
        ("", 60.0, True, ""),
        ("sys.exit('no such card')", 60.0, False, "no such card"),
        ("sys.stdout.close(); os.close(1); signal.pause()", 60.0, False, "code -"),
        ("signal.pause()", 0.0, False, "killed at its limit"),
    ],
    ids=["ends", "fails", "hangs after its rows", "hangs"],
)
def test_how_a_part_ended_is_a_row(end, limit, holds, said, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE_S", 0.5)
    report = Report()
    program = f"import os, signal, sys; print({ROW!r}, flush=True); {end}"
    gpu.run(report, "6.x", [sys.executable, "-c", program], limit)
    last = report.rows[-1]
    assert last.name == "6.x, the part"
    assert last.holds is holds
    assert said in last.peer
    if limit:
        assert report.rows[0].name == "6.x one", "what it told before counts"


PAUSED = f"import os, signal; print({ROW!r}, flush=True); print(os.getpid(), flush=True)"
ENDED = f"""
import sys
from benchmarks.gpu import __main__ as gpu
gpu.command_of = lambda letter, words: [sys.executable, "-c", {PAUSED!r} + "; signal.pause()"]
sys.exit(gpu.main())
"""


def test_an_end_from_outside_ends_the_part_and_leaves_a_whole_result(root: Path, tmp_path: Path):
    made = tmp_path / "gpu.json"
    words = ["--rehearse", "--only", "b,d", "--json", str(made), "--commit", "abc"]
    command = [sys.executable, "-c", ENDED, *words]
    with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        # What is no row is repeated there.
        part = next(int(line) for line in program.stderr if line.strip().isdigit())
        before = json.loads(made.read_text())
        program.terminate()
        program.stderr.read()
    assert program.returncode == 1
    with pytest.raises(ProcessLookupError):
        os.kill(part, 0)
    for found in (before, json.loads(made.read_text())):
        assert found["commit"] == "abc"
        rows = {row["name"]: row["holds"] for row in found["results"]}
        missing = ["6.b swarm, the part", "6.d memory, the part"]
        assert rows == {"6.x one": False, **dict.fromkeys(missing, False)}


def test_all_parts_together_fit_into_the_time_of_a_lent_machine():
    assert gpu.PARTS.keys() == gpu.LIMIT_S.keys()
    assert max(gpu.LIMIT_S.values()) < gpu.WITHIN_S <= 180


@pytest.mark.parametrize("kind", ["cuda:0", "cpu"])
def test_daemons_have_time_to_start(kind: str):
    """Each waits for the measurement of the optimizer's products, and none tries kernels."""
    device = Device(torch.device(kind))
    assert ("kernels=eager" in swarm.settings(Bench(kind, device, False))) is device.is_cuda
    assert swarm.START_S > TUNING_S


def test_a_visit_by_the_threads_of_a_daemon_gives_the_same_tensors():
    stage = build(autocast.TINY, 1, 1)
    x, dy = torch.randn(2, 1, 64, 64)
    one, other = (
        autocast.once(stage, x, dy, (5,), contextlib.nullcontext),
        autocast.through_lanes(stage, Bench("cpu", cpu(), True), x, dy, (5,)),
    )
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert one[2].keys() == other[2].keys()
    assert all(torch.equal(one[2][name], g) for name, g in other[2].items())


def test_what_is_carried_is_pinned_and_written_down(root: Path):
    versions = pins()
    page = (root / "benchmarks" / "gpu.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\S+) \| ([0-9.]+) \|$", page, re.M)
    assert {name: version for name, version, _ in rows} == versions
    assert sum(float(size) for _, _, size in rows) * 2**20 <= MOST
    assert set(SOURCE) <= MODULES.keys()
    with pytest.raises(UsageFault):
        pins(("no-such-package",))


def test_what_is_carried_is_fetched_by_its_digests():
    entries = re.findall(r"^(\S+)==(\S+) \\$", digests(tuple(MODULES)), re.M)
    versions = {canonicalize_name(name): version for name, version in pins().items()}
    assert {canonicalize_name(name): version for name, version in entries} == versions
    assert re.fullmatch(r"varint==\S+ \\\n( {4}--hash=sha256:[0-9a-f]{64}\n)", digests(("varint",)))
    with pytest.raises(UsageFault):
        digests(("no-such-package",))


def test_a_daemon_needs_nothing_but_torch_and_what_is_carried(root: Path):
    """Every module is imported, while packages that are not on the list cannot be."""
    allowed = {canonicalize_name(name) for name in MODULES}
    waiting = [*THERE, "setuptools"]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in allowed:
            allowed.add(name)
            needs = [Requirement(text) for text in metadata.requires(name) or []]
            waiting += [r.name for r in needs if r.marker is None or r.marker.evaluate({})]
    words = [sys.executable, "-c", ONLY + EACH, " ".join(allowed | {"tutti"}), *APART]
    done = subprocess.run(words, capture_output=True, text=True, cwd=root, timeout=120, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 200
    assert {name: why for name, why in found.items() if why} == {}


def test_the_most_that_tensors_took_is_counted_in_bytes():
    bench = Bench("cpu", cpu(), rehearse=False)
    with bench.peak() as most:
        a = torch.ones(1000)
        view = a[:10].view(2, 5)
        del a
        kept = torch.cat([view.reshape(-1), torch.zeros(990)])
        del view
        torch.zeros(500)
    assert most == [4 * (1000 + 990 + 1000)]
    assert kept.numel() == 1000


def cpu():
    return Device.pick("cpu")


def test_a_difference_that_is_no_number_is_within_no_bound():
    whole = torch.ones(4)
    broken = torch.tensor([1.0, math.nan, 1.0, 1.0])
    assert differs(whole, whole) == 0.0
    assert differs(1.5 * whole, whole) == pytest.approx(0.5)
    assert not differs(broken, whole) <= 1e9
