"""Verbs on terminals that cannot show everything, that are closed, or are none: as processes, for
a stream's encoding is decided when a process starts."""

import json
import os
import re
import subprocess
import sys

import pytest

from node.core.errors import ExitCode
from node.identity.invites import Invite
from node.identity.keys import Identity
from node.manifest import Manifest
from protos.control_pb2 import InviteReply
from testbed.fakes.canned_window import some_peers, training_snapshot
from tests.cli.conftest import ROOT, refused, started

VERBS = (
    ("status",),
    ("status", "--plain"),
    ("peers", "--all", "-v"),
    ("cells",),
    ("ps",),
    ("ping", "b7Lq3d"),
    ("logs",),
    ("generate", "größe → 日本"),
    ("eval", "--drop", "0.5"),
    ("swarm", "inspect"),
    ("swarm", "invite", "--qr"),
    ("swarm", "validate", "--no-open"),
    ("id",),
    ("help",),
    ("help", "swarm", "init"),
    ("schedule", "ünbekannt…"),
    ("partition", "ünbekannt…"),
    ("swarm", "validate", "ünbekannt…"),
    ("monitor",),
)
SLOW = (
    ("simulate", "--small", "--epochs", "2"),
    ("simulate", "--averaging", "gossip", "--peers", "8", "--seeds", "1"),
)
"""Verbs that load torch: their charts are tried on the poorest terminal only."""
ALL = """
import json, sys, traceback
import cli
home, verbs = sys.argv[1], json.loads(sys.argv[2])
codes = []
for words in verbs:
    try:
        codes.append(int(cli.main(["--home", home, *words])))
    except BaseException:
        traceback.print_exc()
        codes.append(-1)
open(sys.argv[3], "w").write(json.dumps(codes))
"""


@pytest.fixture
def run_here(ours, daemon):
    """A run that this home owns, with names that no ASCII terminal shows, and its invite."""
    me = Identity.load_or_create(ours.identity_path)
    manifest = Manifest.parse(Manifest.default_demo().sign(me))
    ours.remember(manifest)
    daemon.said = training_snapshot(name="größe-日本")
    daemon.said.warnings.append("→ 1")
    daemon.seen = some_peers()
    daemon.seen.peers[1].name = "größe-日本"
    place = f"/ip4/127.0.0.1/tcp/1/p2p/{me.peer_id}"
    reply = InviteReply(invite=Invite(manifest.run_id, me.peer_id, (place,)).encode())
    daemon.invite = lambda: reply
    daemon.journal.emit("training", "k", "größe → 日本…")


@pytest.mark.usefixtures("run_here")
@pytest.mark.parametrize(
    ("environment", "encoding"),
    [
        ({"PYTHONIOENCODING": "ascii"}, "ascii"),
        ({"PYTHONIOENCODING": "latin-1"}, "latin-1"),
        ({"PYTHONIOENCODING": "cp1252"}, "cp1252"),
        ({"LC_ALL": "C"}, "utf-8"),
    ],
    ids=str,
)
def test_every_verb_is_readable_on_every_terminal(home, tmp_path, environment, encoding):
    codes = tmp_path / "codes"
    verbs = VERBS + SLOW if "PYTHONIOENCODING" in environment and encoding == "ascii" else VERBS
    done = subprocess.run(
        [sys.executable, "-c", ALL, home, json.dumps(verbs), codes],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160", **environment},
        timeout=120,
    )
    said = done.stdout.decode(encoding)
    complaints = done.stderr.decode(encoding)
    assert "Traceback" not in complaints, complaints
    assert "unexpected" not in complaints
    assert dict(zip(verbs, json.loads(codes.read_text()), strict=True)) == {
        words: 2 if words[-1] in ("ünbekannt…", "monitor") else 0 for words in verbs
    }, complaints
    assert "Stage cover" in said
    if encoding == "ascii":
        assert "grosse" not in said
        assert "gro?e-????" in said
        assert "##" in said


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    "words", [("status",), ("peers",), ("config",), ("help",), ("ps", "--json"), ("doctor", "net")]
)
def test_a_reader_that_has_gone_ends_a_command_quietly(home, words):
    end, out = os.pipe()
    os.close(end)
    with started(home, *words, stdout=out) as process:
        os.close(out)
        assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == ExitCode.READER_GONE == 141


@pytest.mark.usefixtures("daemon")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device")
@pytest.mark.parametrize("words", [("status",), ("peers", "--json"), ("help",)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_said(home, words, unbuffered):
    environment = {"PYTHONUNBUFFERED": unbuffered}
    with (
        open("/dev/full", "w") as full,
        started(home, *words, stdout=full, environment=environment) as process,
    ):
        complaint = process.communicate(timeout=60)[1]
    assert process.returncode == ExitCode.RESOURCES
    assert b"cannot write the output: No space left on device" in complaint


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_the_monitor_says_what_to_use_where_there_is_no_screen(tutti, monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    refused(tutti("monitor"), ExitCode.USAGE, "needs a terminal", "tutti status --watch")


def test_words_that_are_no_text_are_refused(home):
    with started(home, "generate", os.fsdecode(b"\xff")) as process:
        complaint = process.communicate(timeout=60)[1]
    assert process.returncode == ExitCode.USAGE
    assert b"is not UTF-8" in complaint


def test_a_working_directory_that_is_gone_is_said(home, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    leave = f'rmdir "$PWD"; exec {sys.executable} {ROOT / "tutti.py"} status'
    done = subprocess.run(["sh", "-c", leave], cwd=here, capture_output=True, timeout=60)
    assert done.returncode == ExitCode.USAGE
    assert b"the working directory is gone" in done.stderr


def test_settings_are_printed_as_the_file_that_they_become(home):
    name = {"TUTTI_NAME": "größe", "PYTHONIOENCODING": "latin-1"}
    with started(home, "config", environment=name) as process:
        said = process.communicate(timeout=60)[0]
    assert re.search(r'^name = "größe"$', said.decode(), re.MULTILINE)
