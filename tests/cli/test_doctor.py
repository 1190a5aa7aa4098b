"""Each check of ``tutti doctor`` seen failing with an exit code of its own, passing, and mended
where it can be."""

import errno
import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from node.app import checks, doctoring
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.store import CheckpointStore
from node.config import NodeConfig
from node.control.diagnose import Diagnosis, failed
from node.core.errors import ExitCode
from node.core.version import PROTOCOL
from node.identity.keys import Identity
from node.manifest import Manifest, amended
from tests.cli.conftest import in_a_process, refused

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/" + Identity.ephemeral().peer_id


@pytest.fixture
def found(tutti):
    """Checks in the report of `tutti doctor WORDS --json`; fails unless it ends with this exit
    code."""

    def run(code, *words):
        shown = tutti("doctor", *words, "--json")
        document = json.loads(shown.stdout)
        assert document["exit_code"] == shown.returncode == code, document
        return document["checks"]

    return run


@pytest.fixture
def first(found):
    """The first of them."""
    return lambda code, *words: found(code, *words)[0]


def remembered(home: Path, **changes) -> Manifest:
    """A run of this home's own."""
    ours = NodeConfig.load({"home": home}, {})
    identity = Identity.load_or_create(ours.identity_path)
    fields = {"data.source": "synthetic:7"} | {k.replace("__", "."): v for k, v in changes.items()}
    manifest = Manifest.parse(
        amended(Manifest.default_demo().owned_by(identity.peer_id), fields).sign(identity)
    )
    ours.remember(manifest)
    return manifest


@pytest.fixture
def manifest(home):
    """The run that this home used last."""
    return remembered(home)


def faults(found):
    return [one["check"] for one in found if not one["ok"]]


@pytest.mark.parametrize("name", ["versions", "device", "disk", "data", "service", "clock"])
@pytest.mark.usefixtures("manifest")
def test_a_sound_home_passes_every_check(found, name):
    for one in found(0, name):
        assert (one["check"], one["ok"]) == (name, True)
        assert one["cause"]


@pytest.mark.usefixtures("manifest")
def test_the_device_check_says_what_takes_the_memory(found, tutti):
    ends, block = found(0, "device")[1:]
    assert ends["cause"].startswith("the ends take ")
    assert block["cause"].startswith("stage 1 of 3 takes ")
    for words in ("always parameters", "while micro-batches pass activations", "averaging"):
        assert words not in block["cause"]
        assert words in " ".join(block["details"])
    assert "always parameters" not in tutti("doctor", "device").stdout
    assert "always parameters" in tutti("doctor", "device", "-v").stdout


def test_checks_run_in_order_and_the_first_fault_sets_the_code(tutti, found, home):
    remembered(home, data__source="file:/nowhere/text.txt")
    said = found(ExitCode.DATA_UNFIT)
    assert list(dict.fromkeys(one["check"] for one in said)) == [
        "versions",
        "device",
        "disk",
        "data",
        "service",
        "clock",
    ]
    shown = tutti("doctor")
    assert "this machine" in shown.stdout  # of the network
    for line in shown.stdout.splitlines():
        assert len(line) <= 80 or max(map(len, line.split())) > 60, "a path is not broken"


@pytest.mark.usefixtures("manifest")
def test_a_fault_does_not_stop_independent_checks(found, home):
    os.chmod(home / "identity.key", 0o644)
    assert faults(found(ExitCode.DISK_UNFIT)) == ["disk", "clock", "net"]
    assert faults(found(0, "--fix")) == []


@pytest.mark.usefixtures("manifest")
def test_a_run_that_is_not_to_be_read_stops_no_other_check(found, home):
    remembered(home, data__source="synthetic:8")
    (home / "swarms" / "current").unlink()
    assert faults(found(ExitCode.VERSIONS_UNFIT)) == ["versions", "clock", "net"]


def test_a_stage_that_the_run_does_not_have_is_a_fault(found, manifest):
    stage = manifest.pipeline.stages + 1
    assert faults(found(ExitCode.USAGE, "--set", f"stage={stage}")) == ["device"]


def test_an_unknown_check_is_a_usage_error(tutti):
    refused(tutti("doctor", "weather"), 2, "versions, device, disk")


def test_each_check_is_shown_as_it_ends_and_a_slow_one_says_what_it_does(
    tutti, monkeypatch, capsys
):
    """The second check looks at the output of the first, and lasts until it was said to be slow."""
    told = threading.Event()
    printed = list[str]()
    said = list[str]()
    ran = checks.run

    def says(name: str) -> None:
        said.append(name)
        if name == "device":
            told.set()

    def run(name, *args, **how):
        if name == "device":
            printed.append(capsys.readouterr().out)
            assert told.wait(60.0)
        return ran(name, *args, **how)

    monkeypatch.setattr(doctoring, "SLOW_S", 0.01)
    monkeypatch.setattr(doctoring, "_say_does", says)
    monkeypatch.setattr(checks, "run", run)
    tutti("doctor")
    assert re.search(r"^(ok|fault) +versions ", printed[0], re.M)
    said.clear()
    tutti("doctor", "--json")
    assert said == []


# ------------------------------------------------------------ versions


def test_a_library_that_is_missing_or_another_is_named(found, monkeypatch):
    monkeypatch.setattr(
        checks.metadata,
        "requires",
        lambda name: ["numpy>=99", "nosuchlib>=1", "torch", 'extra-one; extra == "x"'],
    )
    said = found(ExitCode.VERSIONS_UNFIT, "versions")
    assert [one["fix"] for one in said] == ['pip install "numpy>=99"', 'pip install "nosuchlib>=1"']
    assert "not installed" in said[1]["cause"]


def test_a_p2p_daemon_that_may_not_be_run_is_made_executable(first, monkeypatch, tmp_path):
    binary = tmp_path / "p2pd"
    binary.write_bytes(b"\x7fELF")
    binary.chmod(0o600)
    monkeypatch.setattr(checks, "p2p_daemon", lambda: binary)
    assert first(ExitCode.VERSIONS_UNFIT, "versions")["can_mend"]
    assert "executable" in first(0, "versions", "--fix")["mended"]
    assert os.access(binary, os.X_OK)
    monkeypatch.setattr(checks, "p2p_daemon", lambda: None)
    first(ExitCode.VERSIONS_UNFIT, "versions")


def test_a_daemon_of_another_version_is_a_warning(found, daemon):
    daemon.said.version = "0.0.1"
    said = found(0, "versions")
    assert "the daemon that runs here is tutti 0.0.1" in said[-1]["cause"]
    assert said[-1]["fix"].endswith("restart")
    assert said[-1]["code"] == ExitCode.VERSIONS_UNFIT


def test_peers_of_another_protocol_are_a_warning_until_all_are(found, daemon):
    others = [p for p in daemon.seen.peers if p.path != "self" and p.state != "lost"]
    newer = PROTOCOL + 1
    others[0].oldest_protocol = others[0].newest_protocol = newer
    said = found(0, "versions")
    assert (
        f"1 of {len(others)} other peers speaks protocol {newer}, this tutti" in said[-1]["cause"]
    )
    assert (said[-1]["code"], said[-1]["ok"]) == (ExitCode.VERSIONS_UNFIT, True)
    assert "update this tutti" in said[-1]["fix"]
    for p in others:
        p.oldest_protocol = p.newest_protocol = newer
    found(ExitCode.VERSIONS_UNFIT, "versions")


def test_a_run_of_another_protocol_is_a_fault(first, ours, manifest):
    path = ours.manifest_path(manifest.run_id)
    path.write_text(path.read_text().replace("# protocol = 1", "protocol = 9"))
    assert "protocol" in first(ExitCode.VERSIONS_UNFIT, "versions")["cause"]


# ------------------------------------------------------------ device


@pytest.mark.parametrize(
    ("device", "ok"), [("auto", [True, True]), ("cuda", [False]), ("cuda:0", [False])]
)
def test_a_card_without_kernels_in_this_torch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, ok: list[bool]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA GeForce GTX 1080")
    found = checks.device(NodeConfig.load({"home": tmp_path, "device": device}, {}))
    assert [one.finding.ok for one in found] == ok
    assert "GTX 1080, compute capability 6.1) needs a build of torch" in found[-1].finding.cause
    if device == "auto":
        assert found[0].finding.cause.startswith("cpu")


@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_a_card_that_is_full_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    def full(index: int) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    (found,) = checks.device(NodeConfig.load({"home": tmp_path, "device": device}, {}))
    assert not found.finding.ok
    assert "cuda:0 cannot be used by this process: CUDA error" in found.finding.cause


@pytest.mark.parametrize(
    ("setting", "cause", "fix"),
    [("device=cuda:63", "cuda:63", "use device cpu"), ("memory=1MB", "does not fit", "memory")],
)
@pytest.mark.usefixtures("manifest")
def test_a_device_that_is_not_here_or_too_small(first, setting, cause, fix):
    said = first(ExitCode.DEVICE_UNFIT, "device", "--set", setting)
    assert cause in said["cause"]
    assert fix in said["fix"]


def test_ends_that_do_not_fit_are_a_warning_where_a_block_fits(found, home):
    remembered(home, model__vocab=1 << 20, pipeline__stages=6)
    said = found(0, "device", "--set", "memory=400MB")
    assert [one["ok"] for one in said] == [True, True, True]
    assert [one["code"] for one in said] == [0, 0, ExitCode.DEVICE_UNFIT]
    found(ExitCode.DEVICE_UNFIT, "device", "--set", "memory=400MB", "--set", "role=ends")


# ------------------------------------------------------------ disk


def test_a_home_that_is_a_file(first, home):
    home.write_text("in the way")
    assert "not a directory" in first(ExitCode.DISK_UNFIT, "disk")["cause"]
    first(ExitCode.DISK_UNFIT, "disk", "--fix")  # nothing of anybody's is removed
    assert home.read_text() == "in the way"


def test_a_home_that_may_not_be_written_is_mended(first, home, monkeypatch):
    home.mkdir(mode=0o500)
    if os.geteuid() == 0:  # no mode stops root
        allowed = os.access
        monkeypatch.setattr(
            os,
            "access",
            lambda p, m: bool(home.stat().st_mode & 0o200) if Path(p) == home else allowed(p, m),
        )
    first(ExitCode.DISK_UNFIT, "disk")
    assert "made" in first(0, "disk", "--fix")["mended"]


@pytest.mark.usefixtures("manifest")
def test_a_key_that_others_can_read_is_closed_again(first, home):
    key = home / "identity.key"
    key.chmod(0o644)
    assert first(ExitCode.DISK_UNFIT, "disk")["can_mend"]
    first(0, "disk", "--fix")
    assert key.stat().st_mode & 0o777 == 0o600
    key.write_bytes(b"damaged")
    assert not first(ExitCode.DISK_UNFIT, "disk", "--fix")["can_mend"]
    assert key.read_bytes() == b"damaged"


@pytest.mark.usefixtures("manifest")
@pytest.mark.parametrize("file", ["data/text.uint16", "swarms/9f3c21/export/stage-1/ab.piece"])
def test_a_full_disk_is_freed_of_what_is_made_again(first, home, monkeypatch, file):
    text = home / file
    text.parent.mkdir(parents=True)
    text.write_bytes(b"\0" * 4096)
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda place: SimpleNamespace(free=1 << 20 if text.exists() else 1 << 40),
    )
    assert "1.0 MiB free" in first(ExitCode.DISK_UNFIT, "disk")["cause"]
    assert "4.0 KiB" in first(0, "disk", "--fix")["mended"]
    assert (home / "identity.key").exists()


@pytest.mark.usefixtures("manifest")
@pytest.mark.parametrize(
    ("number", "says", "advises"),
    [
        (errno.ENOSPC, "is full: ", "free some space"),
        (errno.EDQUOT, "is full: ", "free some space"),
        (errno.EROFS, "Read-only file system", "mount that for writing"),
        (errno.EIO, "Input/output error", "look at that disk"),
        (errno.EACCES, "Permission denied", "chmod u+rwx"),
    ],
)
def test_a_write_that_fails_is_answered_by_its_reason(first, monkeypatch, number, says, advises):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", fails)
    said = first(ExitCode.DISK_UNFIT, "disk")
    assert says in said["cause"]
    assert advises in said["fix"]
    assert ("chmod" in said["fix"]) == (number == errno.EACCES)


@pytest.mark.usefixtures("manifest")
def test_checkpoints_that_ask_for_more_than_the_disk_has(first, home):
    first(0, "disk", "--set", "checkpoint.keep=1000")
    remembered(
        home,
        model__layers=64,
        model__d_model=8192,
        model__heads=64,
        model__kv_heads=64,
        model__d_ff=32768,
        pipeline__stages=1,
    )
    assert "TiB" in first(ExitCode.DISK_UNFIT, "disk", "--set", "checkpoint.keep=1000")["cause"]


def test_a_damaged_checkpoint_is_moved_aside(first, home, ours, manifest):
    run = manifest.run_id
    store = CheckpointStore(ours.checkpoint_dir(run), CheckpointSettings(), run)
    for epoch in (1, 2):
        store.save(1, epoch, {"w": torch.full((4,), float(epoch))}, {}, {})
    first(0, "disk")
    file = store.path(1, 2) / "parameters.safetensors"
    raw = file.read_bytes()[:-8] + b"\xff" * 8
    file.write_bytes(raw)
    assert "epoch-2" in first(ExitCode.DISK_UNFIT, "disk")["cause"]
    first(0, "disk", "--fix")
    assert store.epochs(1) == [1]
    (moved,) = (home / "damaged").iterdir()
    assert (moved / "parameters.safetensors").read_bytes() == raw


@pytest.mark.usefixtures("daemon")
def test_what_a_daemon_uses_is_mended_after_it_has_ended(found, home, ours, manifest, monkeypatch):
    (home / "data").mkdir()
    (home / "data" / "text.uint16").write_bytes(b"\0" * 4096)
    (ours.checkpoint_dir(manifest.run_id) / "stage-1" / "epoch-1").mkdir(parents=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1 << 20))
    said = found(ExitCode.DISK_UNFIT, "disk", "--fix")
    assert len(faults(said)) == 2, "too little room, and a damaged checkpoint"
    for one in (one for one in said if not one["ok"]):
        assert "tutti stop" in one["fix"]
        assert not one["mended"]


# ------------------------------------------------------------ data


def test_data_that_is_not_there_or_not_the_runs(first, home, tmp_path):
    missing = tmp_path / "text.txt"
    remembered(home, data__source=f"file:{missing}")
    assert "text.txt" in first(ExitCode.DATA_UNFIT, "data")["cause"]
    missing.write_bytes(b"To be, or not to be. " * 2000)
    first(0, "data")
    remembered(home, data__source=f"file:{missing}", data__sha256="ab" * 32)
    assert "sha256" in first(ExitCode.DATA_UNFIT, "data")["cause"]
    first(0, "data", "--set", "role=stage")


def test_data_is_a_warning_to_who_can_host_a_block_stage(first, ours):
    owner = Identity.ephemeral()
    fields = {"data.source": "file:/nowhere/text.txt"}
    ours.remember(
        Manifest.parse(amended(Manifest.default_demo().owned_by(owner.peer_id), fields).sign(owner))
    )
    said = first(0, "data")
    assert (said["ok"], said["code"]) == (True, ExitCode.DATA_UNFIT)
    first(ExitCode.DATA_UNFIT, "data", "--set", "role=ends")


# ------------------------------------------------------------ clock


def test_a_clock_that_others_contradict(first, network):
    for ahead, code in ((3600.0, ExitCode.CLOCK_WRONG), (0.5, ExitCode.OK)):
        network(Diagnosis(ADDRESS, "answer", True, "answered", clock_s=ahead))
        assert "ahead of" in first(code, "clock")["cause"]


@pytest.fixture
def behind(home, manifest):
    """The home has a file from later on."""
    later = time.time() + 7200
    os.utime(home / "identity.key", (later, later))


@pytest.mark.usefixtures("behind")
def test_a_clock_that_is_behind_what_it_has_written(first, home):
    assert "behind a file" in first(ExitCode.CLOCK_WRONG, "clock")["cause"]
    os.utime(home / "identity.key")
    first(0, "clock")


@pytest.mark.usefixtures("behind")
def test_a_clock_is_mended_by_the_system(ours, monkeypatch):
    asked = []
    monkeypatch.setattr(checks.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(checks.subprocess, "run", lambda command, **_: asked.append(command))
    said = checks.run("clock", ours, fix=True)
    assert asked == [["/usr/bin/timedatectl", "set-ntp", "true"]]
    assert not said[0].finding.ok  # the second look decides, not the attempt
    assert "NTP" in said[0].mended


# ------------------------------------------------------------ net, and beside it


def test_the_network_is_looked_at_last(tutti, network):
    network(failed(ADDRESS, "connect", ExitCode.PORT_CLOSED, "connection refused"))
    shown = tutti("doctor", "--json")
    assert shown.returncode == ExitCode.PORT_CLOSED
    assert json.loads(shown.stdout)["net"]["verdict"]["code"] == ExitCode.PORT_CLOSED


@pytest.mark.usefixtures("manifest")
def test_the_checks_live_beside_libp2p(home):
    done = in_a_process(
        f"import sys, cli; import libp2p; ended = cli.main(['--home', {str(home)!r}, 'doctor', "
        "'--json']); assert 'hivemind' not in sys.modules; sys.exit(ended)"
    )
    assert done.returncode == 0, done.stderr + done.stdout
