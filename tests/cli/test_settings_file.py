"""``tutti config get|set|unset|explain``: one setting, its source, and the file of its user."""

import json
import os
import socket
import threading
import tomllib

import pytest

from node.app.owner.settings import set_value
from node.config import ENVIRONMENT, KNOWN, NodeConfig, settings_file
from node.core.errors import LocalFault
from tests.cli.conftest import refused

FILE = """# mine
name = "anna"   # as at the door

# the line is slow
[transport]
max_up = "20Mbit"
"""


@pytest.fixture
def file(home):
    """The settings file of this home, with comments."""
    home.mkdir()
    (home / "config.toml").write_text(FILE)
    return home / "config.toml"


def test_a_value_comes_with_its_source(tutti, file, monkeypatch):
    got = tutti("config", "get", "name")
    assert (got.good(), got.stderr) == ("anna\n", f"name: {file}\n")
    assert tutti("config", "get", "threads").stderr == "threads: built in\n"
    assert tutti("config", "get", "max_up").good() == "2500000.0\n"
    monkeypatch.setenv("TUTTI_NAME", "berta")
    assert tutti("config", "get", "name").stderr == "name: TUTTI_NAME\n"
    got = json.loads(tutti("config", "get", "name", "--set", "name=carl", "--json").good())
    assert got == {"name": "name", "value": "carl", "source": "--name"}


@pytest.mark.parametrize(
    ("name", "text", "kept", "meant"),
    [
        ("threads", "4", 4, 4),
        ("metrics_port", "-1", -1, -1),
        ("may_move", "no", False, False),
        ("stage", "3", "3", "3"),
        ("max_down", "2.5MB", "2.5MB", 2.5e6),
        ("transport.keepalive_s", "5", 5.0, 5.0),
        ("announce", "a:1,b:2", ["a:1", "b:2"], ("a:1", "b:2")),
        ("TUTTI_P2P_PORT", "31337", 31337, 31337),
        ("name", 'an"na \\ é', 'an"na \\ é', None),
    ],
)
def test_a_value_is_kept_as_it_was_written(tutti, home, file, name, text, kept, meant):
    shown = tutti("config", "set", name, text)
    if meant is None:  # a name may not have these characters
        refused(shown, 2, "letters")
        assert file.read_text() == FILE
        return
    dotted = shown.good().split()[0]
    table = tomllib.loads(file.read_text())
    for key in dotted.split("."):
        table = table[key]
    assert table == kept
    config = NodeConfig.load({"home": home}, {})
    section, _, key = dotted.rpartition(".")
    assert getattr(getattr(config, section or "node"), key) == meant
    assert config.sources[dotted] == str(file)
    assert "# as at the door" in file.read_text()
    assert "# the line is slow" in file.read_text()


def test_a_value_is_changed_and_taken_out(tutti, file):
    assert "was anna" in tutti("config", "set", "name", "berta").good()
    assert file.read_text() == FILE.replace("anna", "berta")
    assert "was berta" in tutti("config", "unset", "name").good()
    assert tomllib.loads(file.read_text()) == {"transport": {"max_up": "20Mbit"}}
    refused(tutti("config", "unset", "name"), 2, "is not set in")


def test_a_value_may_stand_behind_an_equals_sign(tutti, file):
    tutti("config", "set", "threads=2").good()
    assert tomllib.loads(file.read_text())["threads"] == 2


def test_a_section_without_settings_goes_unless_its_user_wrote_in_it(tutti, file):
    tutti("config", "set", "hours", "22-07").good()
    tutti("config", "unset", "hours").good()
    assert file.read_text().strip() == FILE.strip()
    tutti("config", "unset", "max_up").good()
    assert tomllib.loads(file.read_text()) == {"name": "anna"}
    file.write_text("[transport]\n# slow\nmax_up = 2500000\n")
    tutti("config", "unset", "max_up").good()
    assert "# slow" in file.read_text()


def test_a_running_daemon_takes_a_change_with_its_next_start(tutti, ours, file):
    with socket.socket(socket.AF_UNIX) as listening:
        ours.prepare_control_socket()
        listening.bind(str(ours.control_socket))
        listening.listen()
        shown = tutti("config", "set", "threads", "3")
    assert shown.returncode == 0
    assert "holds from the next start on" in shown.stderr
    assert "tutti restart" in shown.stderr
    assert not tutti("config", "set", "threads", "4").stderr


def test_a_setting_without_a_flag_is_named_as_it_was_given(tutti):
    shown = tutti("start", "--set", "limits.in_flight=many")
    refused(shown, 2, "--set limits.in_flight")


@pytest.mark.parametrize("words", [("start",), ("join", "tutti1:AAAA", "--yes")])
@pytest.mark.parametrize("setting", ["data", "tokenizer", "weights"])
def test_a_file_that_is_named_and_missing_is_said_first(tutti, words, setting):
    refused(tutti(*words, f"--{setting}", "/no/such"), 2, "/no/such does not exist", setting)


def test_the_file_is_made_for_its_user_alone(tutti, home):
    tutti("config", "set", "threads", "2").good()
    assert (home / "config.toml").read_text() == "threads = 2\n"
    assert ((home / "config.toml").stat().st_mode & 0o777) == 0o600
    assert sorted(p.name for p in home.iterdir()) == ["config.toml"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("thread", "3"), "did you mean  threads  ?"),
        (("max_upp", "3"), "did you mean  max_up  ?"),
        (("transprt.max_up", "3"), "did you mean  transport.max_up  ?"),
        (("threads", "many"), "expected a whole number, between 0 and 1024"),
        (("threads", "2000"), "between 0 and 1024"),
        (("role", "boss"), "one of auto, ends, stage, rendezvous"),
        (("max_up", "3"), "too little to take part"),
        (("may_move", "perhaps"), "true or false"),
        (("hours", "25-07"), "no time of the day"),
        (("hours", "22-22"), "begins when it ends"),
        (("threads",), "tutti config set threads VALUE"),
    ],
)
def test_a_wrong_value_changes_nothing(tutti, file, words, says):
    refused(tutti("config", "set", *words), 2, says)
    assert file.read_text() == FILE


@pytest.mark.parametrize("verb", ["get", "explain"])
def test_a_slip_of_the_pen_is_understood(tutti, verb):
    refused(tutti("config", verb, "limits.in_fligt"), 2, "did you mean  limits.in_flight  ?")


def test_a_file_that_is_no_toml_is_left_as_it_is(tutti, file):
    file.write_text("name = = 3\n")
    refused(tutti("config", "set", "threads", "3"), 2, str(file), "nothing was changed")
    assert file.read_text() == "name = = 3\n"


def test_a_wrong_value_in_the_file_can_be_mended(tutti, file):
    file.write_text('threads = "many"\nnice = "very"\n')
    shown = tutti("config", "set", "threads", "3")
    assert "nice" in shown.stderr  # is still wrong
    assert shown.returncode == 0
    shown = tutti("config", "unset", "nice")
    assert (shown.good(), shown.stderr) == (f"nice is no longer set in {file}   (was very)\n", "")


def test_a_value_that_is_not_in_force_is_said(tutti, file, monkeypatch):
    monkeypatch.setenv("TUTTI_THREADS", "5")
    shown = tutti("config", "set", "threads", "3")
    assert shown.stderr == f"not in force: TUTTI_THREADS comes before {file}\n"
    shown = tutti("config", "set", "threads", "4", "--json")
    assert json.loads(shown.good())["note"].startswith("not in force")


def test_another_file_is_written_where_it_is_named(tutti, home, monkeypatch):
    tutti("config", "set", "threads", "3", "--config", "mine.toml").good()
    assert (home.parent / "mine.toml").read_text() == "threads = 3\n"
    monkeypatch.setenv("TUTTI_CONFIG", str(home.parent / "other.toml"))
    tutti("config", "set", "threads", "4").good()
    assert (home.parent / "other.toml").read_text() == "threads = 4\n"
    assert not home.exists()


def test_the_file_of_a_user_without_a_home_is_in_the_config_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert settings_file(None, None, {}) == tmp_path / "tutti" / "config.toml"
    assert settings_file(None, None, {"TUTTI_HOME": "/h"}).parts[-2:] == ("h", "config.toml")


def test_a_link_to_a_file_kept_elsewhere_stays_a_link(tutti, file, tmp_path):
    kept = tmp_path / "dotfiles.toml"
    kept.write_text(FILE)
    file.unlink()
    file.symlink_to(kept)
    tutti("config", "set", "threads", "3").good()
    assert file.is_symlink()
    assert tomllib.loads(kept.read_text())["threads"] == 3


def test_the_file_keeps_its_mode_and_its_ends_of_lines(tutti, file):
    file.write_bytes(FILE.replace("\n", "\r\n").encode())
    file.chmod(0o640)
    tutti("config", "set", "name", "berta").good()
    assert file.read_bytes().decode() == FILE.replace("\n", "\r\n").replace("anna", "berta")
    assert (file.stat().st_mode & 0o777) == 0o640


@pytest.mark.parametrize(
    ("name", "text", "secret"),
    [
        ("admission", "aabb", True),
        ("join", "tutti2" + "a" * 60, True),
        ("checkpoint.to", "s3://key:password@bucket/run", True),
        ("checkpoint.to", "s3://bucket/run", False),
        ("join", "/ip4/127.0.0.1/tcp/1/p2p/x", False),
        ("threads", "2", False),
    ],
)
def test_a_file_that_gets_a_secret_is_for_its_user_alone(tutti, file, name, text, secret):
    file.chmod(0o644)
    said = tutti("config", "set", name, text).good()
    assert (file.stat().st_mode & 0o777) == (0o600 if secret else 0o644)
    assert ("only you can from now on" in said) is secret
    assert "only you can" not in tutti("config", "set", name, text).good()


@pytest.mark.parametrize("words", [("set", "limits.in_flight", "3"), ("unset", "limits.in_flight")])
def test_a_value_with_the_name_of_a_section_is_refused(tutti, file, words):
    file.write_text("limits = 3\n")
    refused(tutti("config", *words), 2, "limits is a value")
    assert file.read_text() == "limits = 3\n"


def test_a_full_disk_costs_the_change_and_not_the_file(file, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LocalFault, match="no space"):
        set_value(file, "threads", "3")
    assert file.read_text() == FILE
    assert sorted(p.name for p in file.parent.iterdir()) == ["config.toml"]


def test_changes_at_the_same_time_are_all_kept(file):
    names = ["threads", "nice", "limits.in_flight", "checkpoint.keep", "reach.relay_clients"]
    workers = [threading.Thread(target=set_value, args=(file, name, "7")) for name in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    config = NodeConfig.load({"home": file.parent}, {})
    assert {name for name, source in config.sources.items() if source == str(file)} == {
        *names,
        "name",
        "transport.max_up",
    }


@pytest.mark.parametrize("name", KNOWN)
def test_every_setting_is_explained(tutti, name, ours):
    from node.app.owner.settings import explained

    found = explained(ours, name)
    assert found.meaning
    assert set(found.variables) == {v for v, one in ENVIRONMENT.items() if one == name}
    shown = "\n".join(found.lines())
    assert found.kind in shown
    assert found.allowed in shown


def test_an_explanation_has_everything(tutti, file):
    shown = tutti("config", "explain", "max_up").good()
    said = " ".join(shown.split())
    for word in (
        "transport.max_up (also max_up)",
        "Most bytes a second this peer sends",
        "type a number",
        '"20Mbit"',
        "default 0.0",
        f"value 2500000.0 ({file})",
        "TUTTI_TRANSPORT_MAX_UP, TUTTI_MAX_UP",
        "tutti config set transport.max_up VALUE",
    ):
        assert word in said
    document = json.loads(tutti("config", "explain", "role", "--json").good())
    assert (document["value"], document["source"]) == ("auto", "built in")
    assert document["allowed"] == "one of auto, ends, stage, rendezvous"


def test_options_before_a_verb_are_refused(tutti):
    refused(tutti("config", "--json", "get", "threads"), 2, "behind  tutti config get")
