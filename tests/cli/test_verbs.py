"""Verbs that people type without having read about them; and words that are refused before anything
is loaded."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import click
import pytest

import cli
from node.app import launch
from node.app.last import ANEW, STARTED, STOPPING
from node.commands.line import launching, shared
from node.consensus.rules import mark
from node.control import commands
from node.core.errors import ExitCode
from node.core.version import VERSION
from node.identity.keys import Identity
from node.manifest import Manifest
from tests.cli.conftest import in_a_process, refused

APP = cli.app


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_the_version_is_found_by_any_of_its_names(tutti, word):
    assert tutti(word).good().startswith(f"tutti {VERSION} ")
    assert json.loads(tutti(word, "--json").good())["tutti"] == VERSION


def test_help_of_everything_of_a_verb_and_of_a_verb_of_a_group(tutti):
    assert tutti("help").good() == tutti("-h").good()
    assert tutti("help", "start").good() == tutti("start", "-h").good()
    assert tutti("help", "swarm", "init").good() == tutti("swarm", "init", "-h").good()
    refused(tutti("help", "strt"), 2, "start")


def test_id_alone_shows_it(tutti, ours):
    refused(tutti("id"), 5, "tutti id new")
    made = tutti("id", "new").good()
    assert tutti("id").good() == tutti("id", "show").good() == made
    assert Identity.load(ours.identity_path).peer_id in made


def test_validate_alone_takes_the_manifest_that_is_meant(tutti, ours, home):
    refused(tutti("swarm", "validate"), 2, "tutti swarm validate FILE")
    manifest = Manifest.parse(Manifest.default_demo().sign(Identity.ephemeral()))
    ours.remember(manifest)
    assert manifest.run_id[:12] in tutti("swarm", "validate", "--no-open").good()
    tutti("swarm", "init", "--no-open").good()
    assert "ok   swarm.toml" in tutti("swarm", "validate", "--no-open").good()


def test_join_has_every_setting_that_start_has():
    options = {
        verb: {p.name for p in APP.commands[verb].params if isinstance(p, click.Option)}
        for verb in ("start", "join")
    }
    assert options["start"] - {"join"} <= options["join"]


HEAVY = {"torch", "hivemind", "libp2p", "grpc", "textual", "matplotlib", "scipy", "trio"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("simulate", "--scenario", "nope"), "--scenario nope"),
        (("simulate", "--averaging", "nope"), "--averaging nope"),
        (("simulate", "nope.toml"), "nope.toml"),
        (("simulate", "--replay", "nope.json"), "nope.json"),
        (("simulate", "--svg", "x.jpg"), "x.jpg"),
        (("peers", "--sort", "nope"), "--sort nope"),
        (("logs", "--level", "nope"), "--level nope"),
        (("doctor", "nope"), "'nope'"),
        (("start", "--role", "nope"), "--role nope"),
        (("start", "--log-format", "nope"), "--log-format nope"),
        (("start", "--device", "nope"), "device"),
        (("start", "--memory", "nope"), "memory"),
        (("join", "--role", "nope", "--lan"), "--role nope"),
        (("join", "--max-up", "nope", "--lan"), "max_up"),
        (("bootstrap", "--max-up", "nope"), "max_up"),
        (("demo", "--manifest", "nope.toml"), "nope.toml"),
        (("swarm", "init", "--shape", "nope"), "nope"),
        (("eval", "--drop-stages", "nope"), "nope"),
    ],
    ids=lambda p: " ".join(p) if isinstance(p, tuple) else None,
)
def test_a_wrong_word_is_refused_before_anything_is_loaded(tutti, home, words, says):
    refused(tutti(*words), ExitCode.USAGE, says)


def test_the_refusals_load_nothing_heavy(home):
    """All in one process: what the first one has loaded would be there at its end, too."""
    lines = [list(case[0]) for case in _cases() if case[0][0] != "eval"]
    done = in_a_process(
        f"import sys, cli\n"
        f"codes = [cli.main(['--home', {str(home)!r}, *words]) for words in {lines!r}]\n"
        f"heavy = {HEAVY!r} & set(sys.modules)\n"
        f"assert not heavy, heavy\n"
        f"assert set(codes) == {{2}}, codes"
    )
    assert done.returncode == 0, done.stderr


def _cases():
    (marked,) = [
        m
        for m in test_a_wrong_word_is_refused_before_anything_is_loaded.pytestmark
        if m.name == "parametrize"
    ]
    return marked.args[1]


# ------------------------------------------------------------ daemons of this machine


def test_ps_lists_who_listens_and_the_own_home(tutti, home, daemon):
    daemon.said.home = str(home)
    rows = [row for row in json.loads(tutti("ps", "--json").good()) if row["home"] == str(home)]
    assert [(r["pid"], r["state"], r["swarm"], r["work"], r["epoch"]) for r in rows] == [
        (os.getpid(), "training", "tiny-demo", "stage 2", 120)
    ]
    (line,) = [line for line in tutti("ps").good().splitlines() if line.endswith(str(home))]
    assert line.split()[:2] == [str(os.getpid()), "training"]


def test_ps_shows_the_own_home_without_a_daemon(tutti, home):
    (row,) = [r for r in json.loads(tutti("ps", "--json").good()) if r["home"] == str(home)]
    assert (row["pid"], row["state"]) == (0, "not running")


def test_status_without_a_daemon_says_what_is_known(tutti, ours, home):
    refused(tutti("status"), ExitCode.NOT_RUNNING, "tutti start")
    assert "last" not in json.loads(tutti("status", "--json").stdout)
    manifest = Manifest.parse(Manifest.default_demo().sign(Identity.ephemeral()))
    ours.remember(manifest)
    for stage, epoch in ((0, 20), (0, 40), (2, 40)):
        (ours.checkpoint_dir(manifest.run_id) / f"stage-{stage}" / f"epoch-{epoch}").mkdir(
            parents=True
        )
    entry = {"level": "info", "component": "daemon", "fields": {}}
    at = time.time() - 90.0
    told = [
        entry | {"at": at - 9, "kind": STARTED, "text": ""},
        entry | {"at": at, "kind": STOPPING, "text": "signal SIGTERM"},
    ]
    ours.events_path.parent.mkdir()
    ours.events_path.write_text("".join(json.dumps(e) + "\n" for e in told) + '{"at": 1, "ki')
    shown = tutti("status")
    refused(shown, 3, "demo " + manifest.run_id[:6], "the ends, epoch 40/120", "stage 2, epoch 40")
    assert "1m ago: signal SIGTERM" in shown.stderr
    last = json.loads(tutti("status", "--json").stdout)["last"]
    assert last["epochs"] == {"0": 40, "2": 40}
    assert (last["run_id"], last["at"], last["why"]) == (manifest.run_id, at, "signal SIGTERM")
    # One that is killed after another start says nothing.
    with ours.events_path.open("a") as file:
        file.write("\n" + json.dumps(entry | {"at": at + 60, "kind": STARTED, "text": ""}) + "\n")
    assert "30s ago; it did not say why it ended" in tutti("status").stderr
    moves = entry | {"at": time.time() - 20.0, "kind": ANEW, "text": "moving to stage 2"}
    with ours.events_path.open("a") as file:
        file.write(json.dumps(moves) + "\n")
    refused(tutti("status"), 3, "anew since 20s: moving to stage 2", "look again in a moment")
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    (home / launch.LOG).write_text("tutti: config.toml is not TOML")
    with ours.events_path.open("a") as file:
        file.write(json.dumps(moves | {"fields": {"pid": gone.pid}}) + "\n")
    refused(tutti("status"), 3, "ago: moving to stage 2, and has not come back", launch.LOG)


# ------------------------------------------------------------ while a daemon starts itself anew


@pytest.fixture
def moving(ours, daemon, monkeypatch):
    """A daemon that moves to stage 2: its socket is there again when a command has waited."""
    socket = ours.control_socket
    aside = socket.with_name("aside")
    socket.rename(aside)
    moves = {
        "at": time.time() - 5.0,
        "level": "info",
        "component": "daemon",
        "kind": ANEW,
        "text": "moving to stage 2",
        "fields": {"pid": os.getpid()},
    }
    ours.events_path.parent.mkdir(parents=True)
    ours.events_path.write_text(json.dumps(moves) + "\n")

    def sleep(seconds: float) -> None:
        if aside.exists():
            aside.rename(socket)

    monkeypatch.setattr(shared, "time", SimpleNamespace(time=time.time, sleep=sleep))
    return daemon


@pytest.mark.parametrize("words", [("pause", "2h"), ("stop",), ("drain",)])
def test_a_daemon_that_starts_itself_anew_is_waited_for(tutti, moving, words):
    shown = tutti(*words)
    assert shown.returncode == 0, shown.stderr
    assert "starts anew (moving to stage 2): waiting" in shown.stderr
    if words[0] == "pause":
        assert moving.paused == (7200.0, "", False)
    else:
        assert moving.stopped.is_set()


@pytest.mark.parametrize("verb", ["pause", "resume", "stop", "drain", "restart"])
def test_a_daemon_that_has_not_come_back_is_not_waited_for(tutti, moving, ours, verb):
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    told = ours.events_path.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {gone.pid}')
    ours.events_path.write_text(told)
    refused(tutti(verb), 3, "no daemon is running")


# ------------------------------------------------------------ in the background, again


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Lets the program that is started be this text; answers are a file that it makes."""

    def make(text: str) -> None:
        path = tmp_path / "program.py"
        path.write_text("import sys, time, signal, pathlib\n" + text)
        monkeypatch.setattr(launch, "PROGRAM", str(path))

    return make


def test_a_start_in_the_background_returns_when_the_daemon_answers(tutti, home, program):
    answers = home / "answers"
    program(f"pathlib.Path({str(answers)!r}).touch(); print('out', *sys.argv[1:]); time.sleep(600)")
    home.mkdir()
    (home / launch.LOG).write_text("of the start before")
    pid = launch.in_background(["start", "x"], home / launch.LOG, lambda _: answers.exists())
    try:
        assert os.getsid(pid) == pid, "no terminal of ours reaches it"
        assert (home / f"{launch.LOG}.1").read_text() == "of the start before"
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_the_output_in_the_background_can_be_emptied_while_it_is_written(home, program):
    answers = home / "answers"
    program(
        "import os; print('old', flush=True); os.ftruncate(1, 0); print('new', flush=True)\n"
        f"pathlib.Path({str(answers)!r}).touch(); time.sleep(600)"
    )
    pid = launch.in_background([], home / launch.LOG, lambda _: answers.exists())
    try:
        assert (home / launch.LOG).read_bytes() == b"new\n"
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_of_a_long_output_the_end_alone_is_read(home, monkeypatch):
    home.mkdir()
    log = home / launch.LOG
    log.write_text("".join(f"line {i:03}\n" for i in range(100)))
    assert launch.tail(log, 2) == "line 098\nline 099"
    monkeypatch.setattr(launch, "LAST_BYTES", 20)
    assert launch.tail(log, 50) == "line 098\nline 099", "a cut line is left out"
    assert launch.tail(home / "none", 50) == ""


def test_a_start_that_fails_in_the_background_fails_with_its_own_words(tutti, home, program):
    program("print('loading'); print('tutti: no way\\n  try another'); sys.exit(4)")
    with pytest.raises(launch.LocalFault) as fault:
        launch.in_background([], home / launch.LOG, lambda _: False)
    assert (fault.value.what, fault.value.next_step) == ("no way", "try another")
    assert fault.value.code is ExitCode.NETWORK
    program("sys.exit(77)")
    with pytest.raises(launch.LocalFault, match="code 77") as fault:
        launch.in_background([], home / launch.LOG, lambda _: False)
    assert launch.LOG in fault.value.next_step


def test_a_ctrl_c_before_it_answers_ends_it(home, program, monkeypatch):
    started = home / "started"
    program(f"pathlib.Path({str(started)!r}).write_text('x'); time.sleep(600)")
    ended: list[int] = []
    end = launch._end
    monkeypatch.setattr(launch, "_end", lambda p: (end(p), ended.append(p.returncode)))

    def answers(pid: int) -> bool:
        if started.exists():
            raise KeyboardInterrupt
        return False

    launch.in_background([], home / launch.LOG, answers)
    assert ended == [-15]


def test_a_start_that_does_not_answer_is_left_to_go_on(home, program, monkeypatch):
    program("time.sleep(600)")
    monkeypatch.setattr(launch, "START_S", 0.0)
    with pytest.raises(launch.TimedOut, match="does not answer") as fault:
        launch.in_background([], home / launch.LOG, lambda _: False)
    pid = int(fault.value.what.split("pid ")[1].split(",")[0])
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def test_a_start_is_not_told_of_the_daemon_of_another_start(ours, program, daemon):
    """Both begin while nobody listens; the later one fails when it has loaded."""
    daemon.said.addresses.append("/ip4/127.0.0.1/tcp/1")
    program("print('tutti: the key is in use\\n  see tutti status'); sys.exit(5)")
    with pytest.raises(launch.LocalFault, match="the key is in use"):
        launching.launched(ours, ["start"])


@pytest.mark.parametrize("verb", ["start", "bootstrap"])
def test_the_flags_of_a_background_start_reach_the_daemon(tutti, home, monkeypatch, verb):
    asked: list[list[str]] = []
    monkeypatch.setattr(
        launch, "in_background", lambda words, log, answers: asked.append(words) or 7
    )
    said = tutti(verb, "-d", "--listen", "127.0.0.1", "--max-up", "20Mbit").good()
    assert f"tutti --home {home} stop" in said
    assert str(home / launch.LOG) in said
    ran = []
    monkeypatch.setattr(launching, "run_daemon", lambda ours, *_: ran.append(ours))
    tutti(*asked[0]).good()
    (ours,) = ran
    assert (ours.home, ours.transport.host, ours.transport.max_up) == (home, "127.0.0.1", 2.5e6)
    assert (ours.node.role == "rendezvous") is (verb == "bootstrap")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (["python", "-m", "cli", "start", "--name", "x"], ("start", "--name", "x")),
        (["python", "-u", "-P", "/a/cli.py", "--home", "/h", "start"], ("--home", "/h", "start")),
        (["/v/bin/python", "/v/bin/tutti", "start"], ("start",)),
        (["/v/bin/python", launch.PROGRAM, "start", "tutti"], ("start", "tutti")),
    ],
)
def test_the_arguments_of_a_running_daemon(command, arguments):
    assert launch.arguments_of(command) == arguments


def test_what_is_not_tutti_is_not_started_again():
    with pytest.raises(launch.LocalFault, match="not started by tutti"):
        launch.arguments_of(["sleep", "600"])


def test_restart_stops_waits_and_starts_with_the_same(tutti, home, daemon, monkeypatch, tmp_path):
    steps: list[object] = []
    before = launch.Started(("start", "x.toml"), tmp_path, {"TUTTI_NAME": "anna"}, False)
    monkeypatch.setattr(launch.Started, "of", lambda pid: steps.append(pid) or before)
    stop = commands.stop
    monkeypatch.setattr(
        commands, "stop", lambda client, now: (stop(client, now=now), steps.append("stopped"))
    )
    monkeypatch.setattr(launch, "become", lambda words: sys.exit(len(steps.append(words) or "")))
    monkeypatch.setenv("TUTTI_NAME", "nobody")  # so that it is put back afterwards
    monkeypatch.setenv("TUTTI_DATA", "of this shell")
    with pytest.raises(SystemExit):
        tutti("restart")
    assert steps == [os.getpid(), "stopped", [launch.PROGRAM, "start", "x.toml"]]
    assert (os.environ["TUTTI_NAME"], "TUTTI_DATA" in os.environ) == ("anna", False)
    assert daemon.stopped.is_set()


def test_the_command_folder_and_settings_of_a_process_are_read(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    script = tmp_path / "tutti.py"
    script.write_text("print('here', flush=True)\ninput()")
    with subprocess.Popen(
        [sys.executable, script, "start", "--name", "a b"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=here,
        env={**os.environ, "TUTTI_NAME": "anna", "TUTTI_MOVED": "2"},
        start_new_session=True,
    ) as process:
        # The kernel shows an empty command line for a moment after the program was started.
        assert process.stdout is not None
        process.stdout.readline()
        found = launch.Started.of(process.pid)
        here.rmdir()
        with pytest.raises(launch.UsageFault, match="which is gone"):
            launch.Started.of(process.pid)
        process.communicate(b"\n")
    assert found.arguments == ("start", "--name", "a b")
    assert (found.folder, found.background) == (here, True)
    assert {"TUTTI_NAME": "anna"}.items() <= found.environment.items()
    assert "TUTTI_MOVED" not in found.environment, "the change of a stage does not outlive it"
    with pytest.raises(launch.LocalFault, match="not known"):
        launch.Started.of(process.pid)


def test_restart_without_a_daemon_says_so(tutti):
    refused(tutti("restart"), ExitCode.NOT_RUNNING, "tutti start")


# ------------------------------------------------------------ peers by any name


@pytest.fixture
def owned_run(request, ours, daemon):
    me = Identity.load_or_create(ours.identity_path)
    manifest = Manifest.default_demo()
    admission = getattr(request, "param", "open")
    manifest = replace(manifest, swarm=replace(manifest.swarm, admission=admission))
    manifest = Manifest.parse(manifest.sign(me))
    ours.remember(manifest)
    daemon.said.swarm.run_id = manifest.run_id
    for line, name in zip(daemon.seen.peers[1:], ("anna", "twin", "twin"), strict=False):
        line.peer = Identity.ephemeral().peer_id
        line.name = name
    return manifest


@pytest.mark.parametrize("by", ["name", "last letters", "PeerId"])
def test_a_peer_is_revoked_by_any_name(tutti, ours, daemon, owned_run, by):
    from node.app.change import read

    peer = daemon.seen.peers[1].peer
    word = {"name": "anna", "last letters": peer[-6:], "PeerId": peer}[by]
    shown = tutti("swarm", "revoke", word)
    assert f"revokes  anna ({peer})" in shown.stderr
    assert mark(peer) in read(owned_run, daemon.switched).revoked
    refused(tutti("swarm", "revoke", "twin"), 2, "2 peers are called 'twin'", "give one PeerId")
    refused(tutti("swarm", "revoke", peer[-3:]), 2, "no peer in sight")


@pytest.mark.parametrize("owned_run", ["invite"], indirect=True)
def test_the_invite_of_a_revoked_peer_ends_unless_others_came_with_it(
    tutti, ours, daemon, owned_run
):
    from node.app.change import read

    anna, twin = (line.peer for line in daemon.seen.peers[1:3])
    key = Identity.ephemeral().peer_id

    def marks(*more):
        assert tutti("swarm", "revoke", "anna", *more).returncode == 0
        return read(owned_run, daemon.switched).revoked

    daemon.seen.invites[anna] = key
    assert marks() == {mark(anna), mark(key)}
    assert marks("--invite", "keep") == {mark(anna)}
    daemon.seen.invites[twin] = key
    refused(tutti("swarm", "revoke", "anna"), 2, f"came twin ({twin})", "--invite keep")
    assert marks("--invite", "keep") == {mark(anna)}
    assert marks("--invite", "end") == {mark(anna), mark(key), mark(twin)}
    shown = tutti("swarm", "revoke", "anna", "--invite", "end").stderr
    assert f"its key is {key}" in shown
    assert f"puts out twin ({twin})" in shown
    assert f"tutti swarm revoke --back {twin} {key}\n" in shown
    daemon.said.change.revision = 1
    daemon.said.change.signed = daemon.switched
    assert tutti("swarm", "revoke", "--back", twin, key).returncode == 0
    assert read(owned_run, daemon.switched).revoked == {mark(anna)}


@pytest.mark.parametrize("owned_run", ["invite"], indirect=True)
def test_a_peer_whose_invite_has_ended_comes_back_with_it_or_by_a_new_one(
    tutti, ours, daemon, owned_run
):
    from node.app.change import read

    anna = daemon.seen.peers[1].peer
    key = Identity.ephemeral().peer_id
    daemon.seen.invites[anna] = key
    assert tutti("swarm", "revoke", "anna").returncode == 0
    daemon.said.change.revision = 1
    daemon.said.change.signed = daemon.switched

    def left(*words):
        assert tutti("swarm", "revoke", "--back", *words).returncode == 0
        return read(owned_run, daemon.switched).revoked

    for more in ((), ("--invite", "keep")):
        refused(tutti("swarm", "revoke", "--back", "anna", *more), 2, f"anna ({anna})", key)
    assert left("anna", key) == set()
    assert left("anna", "--invite", "end") == {mark(key)}
    del daemon.seen.invites[anna]
    assert left("anna") == {mark(key)}, "it has come with another invite"


@pytest.mark.parametrize("more", [(), ("--invite", "end")])
def test_in_an_open_run_no_invite_ends(tutti, ours, daemon, owned_run, more):
    from node.app.change import read

    anna, twin = (line.peer for line in daemon.seen.peers[1:3])
    daemon.seen.invites.update({anna: "K", twin: "K"})
    assert tutti("swarm", "revoke", "anna", *more).returncode == 0
    assert read(owned_run, daemon.switched).revoked == {mark(anna)}


def test_whole_peer_ids_can_be_copied(tutti, daemon, monkeypatch):
    peer = daemon.seen.peers[1].peer
    assert peer not in tutti("peers").good()
    assert peer in tutti("peers", "-v").good()
    assert json.loads(tutti("peers", "--json").good())["peers"][1]["peer"] == peer
    monkeypatch.setenv("COLUMNS", "140")
    assert peer in tutti("peers").good()
