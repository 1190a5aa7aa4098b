"""A run on shards of a web server: made, looked at, and joined."""

import json
from dataclasses import replace

import pytest

from node.app import joining
from node.app.joining import sheet
from node.config import NodeConfig
from node.core.errors import OutOfResources
from node.data.settings import NO_PLACES, OWN_MANIFEST
from node.data.sources import streams
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


def test_a_run_made_from_another_counts_its_samples_anew(tutti, home, web):
    tutti("swarm", "init", "--data", f"{web.url}/SHA256SUMS").good()
    base = read_manifest(home.parent / "swarm.toml")
    half = ("--from", "swarm.toml", "--set", f"model.seq_len={base.model.seq_len // 2}")
    tutti("swarm", "init", "half.toml", *half).good()
    made = read_manifest(home.parent / "half.toml")
    assert made.data.windows - 2 * base.data.windows in (0, 1)
    assert made.data.sha256 == base.data.sha256
    tutti("swarm", "init", "same.toml", "--from", "swarm.toml", "--name", "same").good()
    assert read_manifest(home.parent / "same.toml").data == base.data
    tutti("swarm", "init", "said.toml", *half, "--set", "data.windows=7").good()
    assert read_manifest(home.parent / "said.toml").data.windows == 7
    tutti("swarm", "init", "later.toml", *half, "--no-open").good()
    refused(tutti("swarm", "validate", "later.toml"), 2, "data.windows = 0", "without --no-open")


@pytest.mark.parametrize(
    "change",
    [
        {"data.rows": "chat"},
        {"data.column": "body"},
        {"data.encoding": "latin-1"},
        {"data.tokenizer": "tokenizer.json", "data.tokenizer_sha256": "1" * 64},
        {"model.vocab": 300, "data.seed": 7},
    ],
)
def test_samples_are_counted_again_where_a_piece_has_others(change):
    base = amended(Manifest.default_demo(), {"data.source": "https://host/a.txt"})
    counted = amended(base, {"data.windows": 8})
    made = amended(counted, change)
    assert joining.measured_otherwise(made, counted) == ("data.seed" not in change)
    assert not joining.measured_otherwise(made, base)


def test_a_stream_of_the_hub_that_nobody_counted_is_no_run_of_an_older_version():
    source = {"data.source": "hf:owner/name@main:train", "data.sha256": "0" * 64}
    counted = amended(Manifest.default_demo(), {**source, "data.windows": 8})
    made = joining.unmeasured(counted)
    assert made.data.windows == 0
    assert streams(made.data, NO_PLACES)


def test_data_show_gives_the_samples_that_the_run_has(tutti, web):
    source = f"{web.url}/SHA256SUMS"
    tutti("swarm", "init", "--data", source).good()
    for number in ("1", "2"):
        ofs = [
            json.loads(tutti("data", "show", what, number, "--json").good())["ids"]
            for what in (source, "swarm.toml")
        ]
        assert ofs[0] == ofs[1]


def test_a_cap_that_is_too_small_to_start_with_is_refused_at_once(ours, web):
    largest = max(path.stat().st_size for path in web.directory.iterdir())
    ours = replace(ours, node=replace(ours.node, data_disk=2 * largest + (1 << 16)))
    data = {"data.source": f"{web.url}/SHA256SUMS"}
    with pytest.raises(OutOfResources, match="are read by turns"):
        joining.with_hashes(ours, amended(Manifest.default_demo(), data), OWN_MANIFEST)


def test_held_out_text_without_a_document_is_refused(tutti, web):
    lines = [*documents(50), "x" * 20000]
    text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (web.directory / "long.jsonl").write_text(text, encoding="utf-8")
    said = tutti("swarm", "init", "--data", f"{web.url}/long.jsonl")
    refused(said, 2, "no document begins in the last", "data.holdout")


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
