"""Advice of the command line: each next step can be followed, and help shows every option."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from rich.text import Text

import cli
from node.config import EXAMPLE, KNOWN, NodeConfig
from node.control import commands
from node.control.text import fitted
from node.core import interrupts
from node.core.errors import LocalFault
from node.core.home import ABOUT_A_HOME, name_home, pasteable
from node.core.tables import ALIASES, settings_of
from node.identity.keys import Identity
from node.manifest import SECTIONS, Manifest
from tests.cli.conftest import refused


def verbs(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from verbs(inner, (*path, name))
    else:
        yield path, command


VERBS = dict(verbs(cli.app))


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_help_shows_every_word_of_every_argument_and_option(tutti, path):
    shown = tutti(*path, "-h")
    assert shown.returncode == 0
    assert "Usage: tutti" in shown.stdout
    said = re.sub(r"\s+", " ", shown.stdout).replace("- ", "-")
    for parameter in VERBS[path].params:
        text = getattr(parameter, "help", None)
        assert text, f"{parameter.name} says nothing of itself"
        assert re.sub(r"\s+", " ", text).replace("- ", "-") in said
    doc = (VERBS[path].help or "").replace("\b", "")
    assert re.sub(r"\s+", " ", doc).strip().replace("- ", "-") in said


def test_help_of_schedule_keeps_its_brackets(tutti):
    said = tutti("schedule", "--help").stdout
    assert '"delays_s": [[...]]' in said
    assert "[stages it must train]" in re.sub(r"\s+", " ", said)


def test_the_verbs_stand_under_their_headings(tutti):
    shown = tutti("-h").stdout
    headings = [
        line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")
    ]
    assert headings == ["Options:", "Run:", "Watch:", "Swarm owner:", "Model:", "About:"]
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("ping",), "tutti ping -h"),
        (("start", "--nope"), "tutti start -h"),
        (("peers", "--stage", "x"), "tutti peers -h"),
        (("status", "--set"), "tutti status -h"),
        (("swarm", "ini"), "tutti swarm -h"),
        (("swarm", "init", "--stages", "x"), "tutti swarm init -h"),
        (("strt",), "tutti -h"),
    ],
)
def test_a_wrong_line_points_to_the_help_of_its_verb(tutti, words, where):
    shown = tutti(*words)
    refused(shown, 2)
    assert shown.stderr.splitlines()[-1] == f"  see  {where}"
    helped = tutti(*where.split()[1:])
    assert (helped.returncode, helped.stdout[:13]) == (0, "Usage: tutti ")


def test_a_group_without_a_verb_shows_its_verbs(tutti):
    for words in ((), ("swarm",)):
        shown = tutti(*words)
        assert shown.returncode == 2
        assert shown.stderr.startswith("Usage: tutti")


def test_commands_of_a_home_are_verbs_and_name_it():
    assert set(ABOUT_A_HOME) <= {path[0] for path in VERBS}
    text = "see  tutti logs , then  tutti swarm init --continue a b ; tutti trains; tutti status -h"
    assert pasteable(text, "") == text
    assert pasteable(text, " --home /h") == (
        "see  tutti --home /h logs , then  tutti --home /h swarm init --continue a b ; tutti "
        "trains; tutti status -h"
    )
    named = "see  tutti service status --home /x ,  tutti status --home /x"
    assert pasteable(named, " --home /h") == named
    beside = pasteable("with  tutti start , or name one with  --home DIR", " --home /h")
    assert beside == "with  tutti --home /h start , or name one with  --home DIR"
    once = pasteable(text, r" --home '/a \1'")
    assert pasteable(once, " --home /h") == once


@pytest.fixture
def home_of_this_line() -> Iterator[None]:
    name_home(" --home /h")
    yield
    name_home("")


@pytest.mark.usefixtures("home_of_this_line")
def test_all_that_a_command_says_names_its_home(capsys):
    with interrupts.telling("it goes on;  tutti resume  ends it"):
        assert interrupts._State.words == "it goes on;  tutti --home /h resume  ends it"
    commands.say("note: see  tutti export DIR")
    commands.show_fault(LocalFault("tutti start FILE failed", "see  tutti logs"), as_json=False)
    said = capsys.readouterr().err
    assert "see  tutti --home /h export DIR" in said
    assert "tutti: tutti --home /h start FILE failed\n  see  tutti --home /h logs" in said
    lines = [Text("a line"), *(Text(f"row {n}") for n in range(9))]
    assert fitted(lines, 60, 4)[-1].plain.endswith("tutti --home /h status --plain")


def test_a_name_is_suggested_once(tutti):
    assert tutti("swarm", "ini").stderr.lower().count("did you mean") == 1


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("swarm", "init", "--set", "model.layer=3"), "model.layers"),
        (("swarm", "init", "--set", "modl.layers=3"), "model.layers"),
        (("swarm", "init", "--set", "model.stages=3"), "pipeline.stages"),
        (("swarm", "init", "--set", "data.sha=3"), "data.sha256"),
        (("start", "--set", "checkpoint.evry=3"), "checkpoint.every"),
        (("swarm", "init", "--set", "model.width=64"), "model.d_model"),
        (("swarm", "init", "--set", "model.hidden_size=64"), "model.d_model"),
        (("swarm", "init", "--set", "model.n_layer=3"), "model.layers"),
        (("swarm", "init", "--set", "model.num_attention_heads=3"), "model.heads"),
        (("swarm", "init", "--set", "training.batch_size=8"), "training.target_batch"),
        (("swarm", "init", "--set", "model.batch_size=8"), "training.target_batch"),
        (("swarm", "init", "--set", "optimizer.learning_rate=1"), "optimizer.lr"),
    ],
)
def test_a_slip_of_the_pen_is_understood(tutti, words, meant):
    refused(tutti(*words), 2, f"did you mean  {meant}  ?")


def test_names_of_other_libraries_stand_for_settings_that_exist():
    keys = {field.rpartition(".")[2] for field in settings_of(SECTIONS)}
    assert set(ALIASES.values()) <= keys
    assert not set(ALIASES) & keys, "a setting is no alias"


def test_a_name_like_no_other_gets_the_names_of_its_section(tutti):
    said = tutti("swarm", "init", "--set", "model.hiden=64").stderr
    assert "did you mean" not in said
    assert "model.d_model" in said
    assert "pipeline" not in said


def test_a_manifest_is_made_from_another_without_naming_a_file(tutti, home):
    tutti("swarm", "init").good()
    path = home.parent / "swarm.toml"
    path.write_text(path.read_text().replace("# epochs = 120", "epochs = 121"))
    for name in ("swarm-2.toml", "swarm-3.toml"):
        assert f"tutti start {name}" in tutti("swarm", "init", "--from", "swarm.toml").good()
        made = Manifest.parse((home.parent / name).read_bytes())
        made.verify()
        assert made.training.epochs == 121


def test_a_name_that_is_taken_comes_with_one_that_is_free(tutti, home):
    tutti("swarm", "init", "mine.toml")
    taken = tutti("swarm", "init", "mine.toml")
    assert taken.returncode == 2
    advised = re.search(r"tutti (swarm init \S+)", taken.stderr)
    assert advised
    assert tutti(*advised[1].split()).returncode == 0
    assert (home.parent / "mine-2.toml").exists()


def test_an_owner_is_not_sent_to_the_owner(tutti, home):
    tutti("swarm", "init", "mine.toml")
    mine = home.parent / "mine.toml"
    mine.write_text(mine.read_text().replace("# epochs = 120", "epochs = 121"))
    for words in (("swarm", "validate"), ("swarm", "inspect"), ("start",)):
        shown = tutti(*words, "mine.toml")
        refused(shown, 5, "changed after signing", "undo the change", "--from FILE")
        assert "ask the owner" not in shown.stderr
    assert tutti("swarm", "init", "--from", "mine.toml").returncode == 0  # as it was told
    raw = Manifest.default_demo().sign(Identity.ephemeral())
    (home.parent / "others.toml").write_bytes(raw.replace(b"# epochs = 120", b"epochs = 121"))
    assert "ask the owner" in tutti("swarm", "validate", "others.toml").stderr


def test_a_missing_key_error_names_the_command_that_makes_one(tutti, home):
    missing = tutti("id", "show")
    refused(missing, 5, "tutti id new")
    assert "start" not in missing.stderr
    made = tutti("id", "new").good()
    key = home / "identity.key"
    identity = Identity.load(key)
    assert identity.peer_id in made
    assert tutti("id", "show").stdout == made
    shown = {"peer": identity.peer_id, "name": identity.name, "key": str(key)}
    assert json.loads(tutti("id", "show", "--json").stdout) == shown
    assert tutti("id", "new").returncode == 5  # a key is never replaced


def test_only_devices_that_exist_are_offered(tutti):
    assert "mps" not in tutti("start", "-h").stdout
    refused(tutti("start", "--device", "mps"), 2, "auto, cpu, cuda or cuda:N")


def test_invalid_toml_settings_are_answered_with_an_example(tutti, home):
    home.mkdir()
    (home / "config.toml").write_text("x = = 3\n")
    refused(tutti("id", "new"), 2, "p2p_port = 31337")
    (home / "config.toml").write_text(EXAMPLE)
    assert tutti("id", "new").returncode == 0
    assert NodeConfig.load({"home": home}, {}).transport.p2p_port == 31337


def test_the_example_of_the_manual_can_be_read(home):
    manual = (Path(cli.__file__).parent / "docs" / "operating.md").read_text()
    examples = re.findall(r"```toml\n(.*?)```", manual, re.S)
    assert examples
    home.mkdir()
    for text in examples:
        (home / "config.toml").write_text(text)
        NodeConfig.load({"home": home}, {})
        tables = {k: v for k, v in tomllib.loads(text).items() if isinstance(v, dict)}
        assert {f"{table}.{key}" for table, keys in tables.items() for key in keys} <= set(KNOWN)
