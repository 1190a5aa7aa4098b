"""``tutti data show``, and what ``tutti swarm init`` finds out about data by looking at it."""

import gzip
import json
from pathlib import Path

import pytest

from node.data.tokenizer import ByteTokenizer
from node.manifest import read_manifest
from testbed.fakes.web_server import FileServer
from tests.cli.conftest import refused
from tests.data.streamed import served

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a tokenizer and its template."""
    where = tmp_path / "model"
    where.mkdir()
    (where / "tokenizer.json").write_bytes(ByteTokenizer().to_json())
    said = {"chat_template": TEMPLATE, "eos_token": "<|eos|>"}
    (where / "tokenizer_config.json").write_text(json.dumps(said))
    return where


def talk(i: int) -> str:
    user = {"role": "user", "content": f"what is {i}?"}
    return json.dumps({"messages": [user, {"role": "assistant", "content": f"number {i}"}]})


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join([*map(talk, range(60)), '{"messages": null}']))
    return path


def test_init_recognises_conversations_and_shows_two_samples(tutti, home, model, chat):
    words = ("--tokenizer", str(model / "tokenizer.json"), "--set", "model.seq_len=32")
    said = tutti("swarm", "init", "--data", str(chat), *words).good()
    made = read_manifest(home.parent / "swarm.toml")
    assert (made.data.rows, made.data.document_mask) == ("chat", True)
    assert said.count("sample ") == 2
    assert "<|eos|>" in said
    assert "{+number" in said
    # The samples that the swarm trains on are those that a later start reads.
    assert "signature good" in tutti("swarm", "validate", "swarm.toml").good()
    shown = json.loads(tutti("data", "show", "swarm.toml", "3", "--json").good())
    assert shown["sample"] == 3
    assert 0 < sum(shown["trained"]) < len(shown["ids"]) == 33
    # A user without a template is told where it is.
    elsewhere = ("--home", str(home.parent / "guest"), "--data", str(chat))
    (home.parent / "alone").mkdir()
    (home.parent / "alone" / "tokenizer.json").write_bytes(ByteTokenizer().to_json())
    alone = ("--tokenizer", str(home.parent / "alone" / "tokenizer.json"))
    refused(tutti("swarm", "validate", "swarm.toml", *elsewhere, *alone), 2, "tokenizer_config")


def test_what_the_user_says_is_kept(tutti, home, model, chat):
    words = ("--tokenizer", str(model / "tokenizer.json"), "--set", "data.document_mask=false")
    tutti("swarm", "init", "--data", str(chat), *words, "--set", "model.seq_len=32").good()
    made = read_manifest(home.parent / "swarm.toml")
    assert (made.data.rows, made.data.document_mask) == ("chat", False)


def test_conversations_without_a_template_are_refused(tutti, chat):
    refused(tutti("swarm", "init", "--data", str(chat)), 2, "no chat template", "--from DIR")


def test_a_source_is_shown_without_a_manifest(tutti, tmp_path, home):
    where = tmp_path / "mine"
    where.mkdir()
    (where / "wide.txt").write_bytes("grün ist es hier\n".encode("utf-16") * 20)
    said = tutti("data", "show", str(where), "2", "--set", "model.seq_len=16").good()
    assert "sample 2: 16 tokens, all trained on" in said
    assert "grün" in said
    (where / "old.txt").write_bytes("grün".encode("latin-1"))
    refused(tutti("data", "show", str(where)), 2, "old.txt is not UTF-8", "iconv")
    refused(tutti("data", "show", str(where / "wide.txt"), "0"), 2, "counted from 1")


def test_a_directory_that_the_library_saved_is_named_as_one(tutti, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    said = tutti("swarm", "init", "--data", str(tmp_path / "saved"))
    refused(said, 2, "saved by the library datasets", f"--data hf:{tmp_path}")


def test_streamed_conversations_are_recognised(tutti, home, model, tmp_path):
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "a.jsonl").write_text("\n".join(map(talk, range(400))))
    words = ("--tokenizer", str(model / "tokenizer.json"), "--set", "model.seq_len=32")
    with served(tmp_path / "web") as server:
        assert isinstance(server, FileServer)
        said = tutti("swarm", "init", "--data", f"{server.url}/a.jsonl", *words).good()
    assert read_manifest(home.parent / "swarm.toml").data.rows == "chat"
    assert "{+" in said


def test_streamed_text_without_content_is_not_called_conversations(tutti, tmp_path):
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "a.txt.gz").write_bytes(gzip.compress(b""))
    with served(tmp_path / "web") as server:
        said = tutti("swarm", "init", "--data", f"{server.url}/a.txt.gz")
    refused(said, 2, "it is empty")
    assert "data.rows" not in said.stderr
