import json
import os
import re
import signal
import subprocess

import httpx
import pytest

from node.app.change import read
from node.core.errors import ExitCode
from node.identity.keys import Identity
from node.manifest import read_manifest
from protos.control_pb2 import Event, Piece
from testbed.fakes.canned_window import training_snapshot
from tests.cli.conftest import refused, started


def test_status_is_for_people_and_for_machines(tutti, daemon):
    shown = tutti("status")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "brisk-otter" in shown.stdout
    assert "\x1b" not in shown.stdout  # not a terminal: no colour
    document = json.loads(tutti("status", "--json").stdout)
    assert document["epoch"] == len(document["loss_history"]) == 120


def test_the_exit_code_of_status_is_the_health(tutti, daemon):
    daemon.said = training_snapshot(healthy=False, reason="alone", next_step="tutti swarm invite")
    for form in ("--plain", "--json"):
        shown = tutti("status", form)
        assert shown.returncode == 9
        assert "alone" in shown.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("peers",),
        ("cells",),
        ("stop",),
        ("drain",),
        ("monitor",),
        ("generate", "x"),
        ("chat",),
        ("serve",),
        ("web",),
        ("web", "--export", "out"),
        ("eval",),
        ("logs",),
        ("ping", "abc"),
        ("export", "out"),
    ],
)
def test_every_command_without_a_daemon_exits_with_code_three(tutti, home, words):
    shown = tutti(*words)
    assert shown.returncode == 3
    assert shown.stdout == ""
    first, second = shown.stderr.splitlines()[:2]
    assert first.startswith("tutti: no daemon is running")
    assert str(home) in first
    assert "tutti start" in second
    assert not (home / "ctl.sock").exists()


def test_cells_lists_the_own_cell_first_and_what_others_lack(tutti, daemon):
    own, other = tutti("cells").stdout.splitlines()[1:3]
    assert own.split()[:5] == ["aaaaaa", "training", "120", "900", "1-2"]
    assert "lacks a stage" in other
    assert "3 cells, 2 in sight" in tutti("cells").stdout
    assert [c["own"] for c in json.loads(tutti("cells", "--json").stdout)["seen"]] == [True, False]


def test_peers_shows_lost_ones_for_a_minute_and_why_this_one_waits(tutti, daemon):
    assert "lost 41s" in tutti("peers").stdout
    daemon.seen.peers[5].seen_s = 61.0
    assert "sunny-stoat" not in tutti("peers").stdout
    assert "sunny-stoat" in tutti("peers", "--all").stdout
    daemon.seen.reason = "waiting for stage 2"
    daemon.seen.next_step = "invite one"
    assert "This peer: waiting for stage 2\n  → invite one" in tutti("peers").stdout
    assert [
        p["stage"] for p in json.loads(tutti("peers", "--json", "--stage", "1").stdout)["peers"]
    ] == [1]
    refused(tutti("peers", "--sort", "beauty"), 2, "allowed: stage, name")


def test_ping_shows_round_trips_and_refuses_unknown_peers(tutti, daemon):
    assert tutti("ping", "b7Lq3d", "-c", "2").stdout.count("31.0 ms") >= 2
    refused(tutti("ping", "zzz"), 5, "tutti peers --all")


def test_logs_come_from_the_file_when_the_daemon_is_gone(tutti, daemon, home):
    daemon.journal.emit("training", "epoch-committed", "epoch 7 committed", epoch=7)
    line = json.loads(tutti("logs", "--json").stdout)
    assert (line["kind"], line["fields"]) == ("epoch-committed", {"epoch": 7})
    (home / "log").mkdir()
    event = {
        "at": 1.0,
        "level": "error",
        "component": "r",
        "kind": "k",
        "text": "from the file",
        "fields": {},
    }
    (home / "log" / "events.jsonl").write_text(
        json.dumps(event) + "\n" + json.dumps(event | {"level": "debug"}) + '\n{"at": 2'
    )
    assert tutti("stop").returncode == 0
    assert tutti("logs").good().count("from the file") == 1


def test_drain_and_stop_wait_until_the_daemon_is_gone(tutti, daemon):
    shown = tutti("drain", "--timeout", "9")
    assert shown.returncode == 0
    assert "left the swarm" in shown.stderr
    assert (daemon.drained, tutti("status").returncode) == (9.0, 3)


def test_generate_and_export_end_in_one_json_document(tutti, daemon):
    assert tutti("generate", "hello").stdout == "HELLO\n"
    shown = tutti("generate", "hello", "--json", "--max-tokens", "2")
    assert json.loads(shown.stdout)["text"] == "HE"
    shown = tutti("export", "out", "--json")
    document = json.loads(shown.stdout)
    assert document["kind"] == "exported"
    assert document["text"].endswith("/out")  # the daemon was told a whole path
    assert shown.stderr == ""


@pytest.mark.parametrize(
    ("fields", "loads"), [("{}", "transformers"), ('{"adapter": true}', "peft")]
)
def test_export_says_what_loads_it(tutti, daemon, fields, loads):
    async def export(request):
        yield Event(at=1.0, level="info", kind="exported", text="", fields=fields)

    daemon.export = export
    assert f"with  {loads}." in tutti("export", "out").stderr


def test_export_says_how_far_it_is_now_and_then(tutti, daemon):
    def progress(at, here):
        figures = {
            "stages": 4,
            "stages_done": 1,
            "bytes": here << 20,
            "bytes_total": 100 << 20,
            "bytes_per_s": 2 << 20,
        }
        fields = json.dumps(figures)
        text = "gathering epoch 7"
        return Event(at=at, level="info", kind="export-progress", text=text, fields=fields)

    async def export(request):
        for second in range(12):
            yield progress(100.0 + second, 10 + second)
        yield Event(at=112.0, level="info", kind="exported", text="wrote it", fields="{}")

    daemon.export = export
    lines = tutti("export", "out").stderr.splitlines()
    assert lines[:3] == [
        f"gathering epoch 7   1 of 4 stages   {here}.0 MiB of 100.0 MiB   2.0 MiB/s   {left}s left"
        for here, left in ((10, 45), (15, 42), (20, 40))
    ]
    assert lines[3].endswith("wrote it")
    shown = tutti("export", "out", "--json")
    assert (json.loads(shown.stdout)["kind"], shown.stderr) == ("exported", "")


def test_export_passes_on_which_tokenizer(tutti, daemon):
    asked = []

    async def export(request):
        asked.append(request)
        yield Event(at=1.0, level="info", kind="exported", text="", fields="{}")

    daemon.export = export
    assert tutti("export", "out", "--tokenizer", "words.json").returncode == 0
    assert asked[0].tokenizer.startswith("/")
    assert asked[0].tokenizer.endswith("/words.json")
    assert not asked[0].without_tokenizer
    assert tutti("export", "out", "--no-tokenizer").returncode == 0
    assert (asked[1].tokenizer, asked[1].without_tokenizer) == ("", True)
    refused(tutti("export", "out", "--no-tokenizer", "--tokenizer", "x"), 2, "give one of the two")


def test_few_tokens_a_second_come_with_the_reason(tutti, daemon):
    async def generate(request):
        yield Piece(text="A", by="12D3KooWxxxxkJ4m2a", by_name="brisk-otter")
        yield Piece(last=True, tokens_per_s=2.0, slow="the swarm trains at the same time")

    daemon.generate = generate
    shown = tutti("generate", "a")
    assert shown.stderr.splitlines()[-1] == "2.0 tok/s: the swarm trains at the same time"
    assert "asked ends peer brisk-otter (kJ4m2a)" in shown.stderr
    assert json.loads(tutti("generate", "a", "--json").stdout)["slow"]


def test_generate_reports_missing_stages(tutti, daemon):
    shown = tutti("generate", "hello", "--drop-stages", "6,5")
    assert shown.stdout == "HELLO\n"
    assert "without block stages 5, 6 (as asked) and 1 (nobody answers), of 8" in shown.stderr
    document = json.loads(tutti("generate", "hello", "--drop-stages", "5", "--json").stdout)
    assert (document["left_out"], document["dead"], document["text"]) == ([5], [1], "HELLO")
    wrong = tutti("generate", "hello", "--drop-stages", "5,x")
    refused(wrong, 2, "'x' is not the number of a stage")


def test_eval_prints_every_choice_beside_the_first(tutti, daemon):
    first, one, _, mean = tutti("eval", "--drop", "0.5").stdout.splitlines()[1:]
    assert first.startswith("all block stages")
    assert first.endswith("loss 1.0000   perplexity 2.718")
    assert one.startswith("without block stage 1 (as asked), of 4")
    assert "mean of 2 choices" in mean
    assert mean.endswith("loss 2.5000   perplexity 12.182   x 4.482")
    document = json.loads(tutti("eval", "--drop", "0.25", "--drop-stages", "4", "--json").stdout)
    assert [c["left_out"] for c in document["choices"]] == [[4], [4, 1]]
    assert (document["loss"], document["epoch"], document["tokens"]) == (2.0, 7, 64)
    assert document["perplexity_ratio"] == pytest.approx(2.71828, abs=1e-4)
    assert json.loads(tutti("eval", "--json").stdout)["loss"] == 1.0


def test_a_second_start_is_refused_before_anything_is_loaded(tutti, daemon):
    refused(tutti("start"), 5, "already running", f"pid {os.getpid()}", "tutti stop")
    assert tutti("status").returncode == 0, "the first one is unharmed"


@pytest.fixture
def owned(tutti, home, ours, daemon):
    """A run of two cells that this home owns; its daemon takes part in it."""
    cells = ("--set", "averaging.cell=1", "--set", "outer.window_s=20")
    tutti("swarm", "init", "swarm.toml", *cells).good()
    manifest = read_manifest(home.parent / "swarm.toml")
    ours.remember(manifest)
    daemon.said.swarm.run_id = manifest.run_id
    return manifest


def test_the_owner_changes_how_a_running_swarm_averages(tutti, home, ours, daemon, owned):
    (home.parent / "diloco.toml").write_text(
        "[averaging]\ncell = 2\n[outer]\nwindow_s = 20\n"
        'carries = "deltas"\noptimizer = "nesterov"\n'
    )
    (home.parent / "other.toml").write_text("[model]\nlayers = 9\n")
    daemon.said.swarm.run_id = "0" * 64
    unknown = tutti("swarm", "switch", "diloco.toml")
    assert (unknown.returncode, daemon.switched) == (2, "")
    daemon.said.swarm.run_id = owned.run_id
    daemon.said.change.revision = 4
    assert "change 5" in tutti("swarm", "switch", "diloco.toml").good()
    rules = read(owned, daemon.switched)
    assert (rules.revision, rules.cell, rules.outer.carries) == (5, 2, "deltas")
    said = json.loads(tutti("swarm", "switch", "diloco.toml", "--json").stdout)
    assert said["run_id"] == owned.run_id
    for file, says in (("other.toml", "not model.layers"), ("none.toml", "cannot read")):
        refused(tutti("swarm", "switch", file), 2, says)
    ours.identity_path.unlink()
    Identity.create(ours.identity_path)
    assert tutti("swarm", "switch", "diloco.toml").returncode == ExitCode.REFUSED


def test_the_owner_puts_peers_out_of_a_running_swarm(tutti, home, ours, daemon, owned):
    one, two = (Identity.ephemeral().peer_id for _ in range(2))
    assert "change 1" in tutti("swarm", "revoke", one).good()
    rules = read(owned, daemon.switched)
    assert (rules.revokes(one), rules.revokes(two), rules.cell) == (True, False, 1)
    daemon.said.change.revision = 1
    daemon.said.change.signed = daemon.switched
    assert tutti("swarm", "revoke", two).returncode == 0
    rules = read(owned, daemon.switched)
    assert (rules.revokes(one), rules.revokes(two)) == (True, True), "who was out stays out"
    daemon.said.change.revision = 2
    daemon.said.change.signed = daemon.switched
    (home.parent / "more.toml").write_text("[averaging]\ncell = 2\n[outer]\nwindow_s = 20\n")
    assert tutti("swarm", "switch", "more.toml").returncode == 0
    rules = read(owned, daemon.switched)
    assert (rules.cell, rules.revokes(one)) == (2, True), "and another change leaves it so"
    assert tutti("swarm", "revoke", one, "--back").returncode == 0
    assert not read(owned, daemon.switched).revokes(one)
    refused(tutti("swarm", "revoke", "nobody"), 2, "no peer in sight", "tutti peers")
    mine = Identity.load(ours.identity_path).peer_id
    refused(tutti("swarm", "revoke", mine), 2, "this node itself")


def test_a_pipe_talks_with_the_model(home, daemon):
    with started(home, "chat", "--system", "be brief", stdin=subprocess.PIPE) as process:
        out, said = process.communicate(b"hello\n/reset\nyou\n", timeout=60)
    assert (out, said, process.returncode) == (b"HELLO\nYOU\n", b"", 0)


def test_serve_answers_until_it_is_interrupted(home, daemon):
    with started(home, "serve", "--port", "0") as process:
        line = process.stderr.readline().decode()
        url = re.search(r"http://127\.0\.0\.1:\d+/v1", line)[0]
        body = {"messages": [{"role": "user", "content": "hello"}]}
        answer = httpx.post(f"{url}/chat/completions", json=body, timeout=60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert answer.json()["choices"][0]["message"]["content"] == "HELLO"
    assert (process.returncode, said.decode()) == (130, "interrupted\n")


def test_serve_needs_a_token_where_others_reach_it(tutti, daemon):
    shown = tutti("serve", "--host", "0.0.0.0", "--port", "0")
    assert shown.returncode == 2
    assert "--token" in shown.stderr
