"""A run on shards of a web server: made, looked at, and joined."""

import json

import pytest

from node.app.joining import sheet
from node.config import NodeConfig
from node.manifest import Manifest, amended, read_manifest
from tests.cli.conftest import refused
from tests.data.streamed import documents, listed, published, served


@pytest.fixture
def web(tmp_path):
    shards = {f"part-{i}.jsonl": documents(2000, i) for i in range(3)}
    with served(published(tmp_path / "web", shards).parent) as server:
        yield server


def test_init_measures_a_stream_and_validate_finds_it_again(tutti, home, web):
    source = f"{web.url}/SHA256SUMS"
    said = json.loads(tutti("swarm", "init", "--data", source, "--json").good())
    made = read_manifest(home.parent / "swarm.toml")
    assert (made.data.source, said["data"]["sha256"]) == (source, made.data.sha256)
    assert 1 < made.data.windows < 8192
    assert "in 3 shards, streamed" in tutti("swarm", "validate", "swarm.toml").good()
    # Another version of the data is another run.
    (web.directory / "part-1.jsonl").write_text('{"text": "other"}\n')
    listed(web.directory)
    elsewhere = ("swarm", "validate", "swarm.toml", "--home", str(home.parent / "guest"))
    host = web.url.removeprefix("http://")
    refused(tutti(*elsewhere), 2, "not on the public Internet", f"--data-host {host}")
    refused(tutti(*elsewhere, "--data-host", host), 5, "the data's sha256 is")


def test_init_writes_the_sizes_of_many_shards(tutti, home, web):
    for i in range(3, 70):
        (web.directory / f"part-{i}.jsonl").write_text('{"text": "more"}\n')
    tutti("swarm", "init", "--data", f"{web.url}/part-{{0..69}}.jsonl").good()
    made = read_manifest(home.parent / "swarm.toml")
    assert len(made.data.sizes) == 70
    web.asked.clear()
    guest = ("--home", str(home.parent / "guest"), "--data-host", "127.0.0.0/8")
    assert "in 70 shards" in tutti("swarm", "validate", "swarm.toml", *guest).good()
    assert not web.asked


def test_what_cannot_be_streamed_is_refused(tutti, home, web):
    for path, words, says in (
        ("gone.txt", (), "404"),
        ("x.csv", (), "404"),
        ("SHA256SUMS", ("--set", "data.column=body"), "body"),
    ):
        refused(tutti("swarm", "init", "--data", f"{web.url}/{path}", *words), 2, says)
    assert not (home.parent / "swarm.toml").exists()


def test_too_small_a_cap_is_refused_with_one_that_would_do(tutti, home, web):
    (web.directory / "a.jsonl.zst").write_bytes(b"x" * (80 << 20))
    home.mkdir()
    (home / "config.toml").write_text(f"data_disk = {1 << 27}\n")
    said = tutti("swarm", "init", "--data", f"{web.url}/a.jsonl.zst")
    refused(said, said.returncode, "320 MiB are read by turns, and data_disk is 128 MiB", "config")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("https://data.example/SHA256SUMS", "fetches this data from data.example"),
        ("hf:owner/name:train", "fetches this data from the Hugging Face hub"),
        ("http://[broken/a.txt", "fetches this data from http://[broken/a.txt"),
        ("builtin:pydoc", ""),
    ],
)
def test_the_sheet_says_from_where_data_is_fetched(source, says, tmp_path):
    made = amended(Manifest.default_demo(), {"data.source": source, "data.sha256": ""})
    text = " ".join(" ".join(sheet(NodeConfig(tmp_path), made, signed=False)).split())
    assert says in text
    assert ("fetches this data" in text) == bool(says)
