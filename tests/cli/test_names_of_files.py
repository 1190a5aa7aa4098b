"""Files and directories with names that mean something to a shell, a URL, a list or a multiaddr."""

import shlex

import pytest

from node.app.launch import as_flags
from node.commands.line import launching
from node.commands.line.options import assignments
from node.config import NodeConfig
from node.manifest import read_manifest

STRANGE = (
    "a b",
    "a,b",
    "#1?%41&c=d",
    'it\'s "so"',
    "größe-日本",
    "line\nbreak",
    "p2p/12D3Koo",
    "-d",
    " blank ",
    "{000..003}",
)


@pytest.mark.parametrize("name", STRANGE)
def test_a_run_is_made_checked_and_started_wherever_its_files_are(
    tutti, home, tmp_path, monkeypatch, name
):
    here = tmp_path / name
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    # Line of a manifest that names its data.
    stem = name.replace("/", "-").replace("\n", "-")
    at = here / f"{stem}.txt"
    at.write_text("one two three " * 4000)
    file = here / f"{stem}.toml"
    lines = tutti("swarm", "init", str(file), "--data", str(at)).good().splitlines()
    if "\n" not in name:
        printed = next(line for line in lines if line.startswith("start"))
        assert shlex.split(printed)[1:] == ["tutti", "start", str(file)]
    tutti("swarm", "validate", str(file)).good()
    tutti("swarm", "inspect", str(file)).good()
    tutti("doctor", "data").good()
    ran = []
    monkeypatch.setattr(launching, "run_daemon", lambda *swarm: ran.append(swarm))
    tutti("start", str(file), "--data", str(at)).good()
    ((ours, manifest, invite),) = ran
    assert (manifest.run_id, invite) == (read_manifest(file).run_id, None)
    assert ours.places(manifest.run_id).data == str(at)


@pytest.mark.parametrize("name", STRANGE)
def test_a_path_reaches_another_process_as_it_is(tmp_path, name):
    path = str(tmp_path / name)
    words = as_flags({"data": path, "name": "anna"})
    given = assignments([word for word in words if word != "--set"])
    assert NodeConfig.load({"home": tmp_path, **given}, {}).node.data == path


def test_an_assignment_may_be_written_as_in_toml():
    assert assignments(["name = anna"]) == {"name": "anna"}
