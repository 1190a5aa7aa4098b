"""Content that a manifest names: each peer keeps the file where it likes, and the hash proves that
it is the same."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from node.core.errors import Refused, UsageFault
from node.data.places import open_regular, read_regular
from node.data.settings import DataSettings, Places
from node.data.sources import open_data
from node.data.tokenizer import ByteTokenizer, open_tokenizer
from tests.data.conftest import open_source

TEXT = b"a line of text\n" * 100


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "mine" / "corpus.txt"
    path.parent.mkdir()
    path.write_bytes(TEXT)
    return path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_file_is_found_where_this_peer_keeps_it(tmp_path, text):
    named = DataSettings(source="file:corpus.txt", sha256=sha256(TEXT))
    for place in (text, text.parent):
        assert open_source(named, 16, tmp_path, Places(str(place))).tokens == len(TEXT)
    # The file under another name, and in place of a path on somebody else's machine.
    other = text.rename(tmp_path / "renamed")
    for source in ("file:corpus.txt", "file:/srv/nowhere/corpus.txt"):
        assert (
            open_source(DataSettings(source=source), 16, tmp_path, Places(str(other))).sha256
            == named.sha256
        )
    # Without a place a path in the manifest goes on to mean that path.
    moved = tmp_path / "moved.txt"
    moved.write_bytes(TEXT)
    assert open_source(DataSettings(source=f"file:{moved}"), 16, tmp_path).sha256 == named.sha256


def test_the_manifests_word_is_the_format(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("".join(json.dumps({"text": "some words here"}) + "\n" for _ in range(9)))
    settings = DataSettings(source="file:notes.jsonl")
    corpus = open_source(settings, 16, tmp_path / "home", Places(str(path)))
    assert corpus.tokens == 9 * len("some words here") + 9


@pytest.mark.parametrize("place", ["", "/nowhere/corpus.txt", "."])
def test_a_missing_data_file_error_names_the_data_option(tmp_path, place):
    place = str(tmp_path) if place == "." else place
    named = DataSettings(source="file:corpus.txt")
    with pytest.raises(UsageFault, match=r"cannot read .*corpus\.txt: No such file") as refused:
        open_source(named, 16, tmp_path, Places(place, own=True))
    assert "--data PATH" in refused.value.next_step


def test_another_file_than_the_manifest_means_is_refused(tmp_path, text):
    with pytest.raises(Refused, match=f"sha256 is {sha256(TEXT)[:16]}") as refused:
        open_source(
            DataSettings(source="file:corpus.txt", sha256=sha256(b"other")),
            16,
            tmp_path,
            Places(str(text)),
        )
    assert "block stage" in refused.value.next_step


def test_a_file_for_a_run_without_one_is_refused(tmp_path, text):
    for source in ("builtin:pydoc", "synthetic:3"):
        with pytest.raises(UsageFault, match="which is no file") as refused:
            open_source(DataSettings(source=source), 16, tmp_path, Places(str(text)))
        assert f"swarm init --data {text}" in refused.value.next_step
        assert open_source(
            DataSettings(source=source), 16, tmp_path, Places(str(text.parent))
        ).tokens
    with pytest.raises(UsageFault, match="which is no file"):
        open_tokenizer(DataSettings(), Places(tokenizer=str(text)))


def test_a_tokenizer_is_compared_too(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(ByteTokenizer().to_json())
    right = sha256(path.read_bytes())
    named = DataSettings(tokenizer="words.json", tokenizer_sha256=right)
    assert open_tokenizer(named, Places(tokenizer=str(path))).digest == right
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(Refused, match="tokenizer's sha256") as refused:
        open_data(named, 16, 259, tmp_path, Places(tokenizer=str(path)))
    assert refused.value.next_step
    with pytest.raises(UsageFault, match=r"words\.json: No such file") as missing:
        open_tokenizer(named)
    assert "--tokenizer PATH" in missing.value.next_step


def test_the_note_beside_an_array_of_ids_is_content(tmp_path):
    path = tmp_path / "ids.bin"
    (np.arange(400, dtype="<u4") % 200).tofile(path)
    note = tmp_path / "ids.bin.json"
    note.write_text('{"dtype": "uint32", "vocab": 200}')
    settings = DataSettings(source=f"file:{path}")
    pinned = replace(settings, sha256=open_source(settings, 16, tmp_path).sha256)
    # Manifests that name the array alone stay valid.
    for named in (settings, pinned, replace(settings, sha256=sha256(path.read_bytes()))):
        assert open_source(named, 16, tmp_path).tokens == 400
    # Without the note the same bytes mean other ids, none of them out of range.
    note.unlink()
    assert open_source(settings, 16, tmp_path).tokens == 800
    with pytest.raises(Refused):
        open_source(pinned, 16, tmp_path)


def test_a_saved_data_set_is_found_where_this_peer_keeps_it(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["some words"] * 20}).save_to_disk(
        str(tmp_path / "sets" / "words")
    )
    for place in (tmp_path / "sets" / "words", tmp_path / "sets"):
        corpus = open_source(
            DataSettings(source="hf:someone/words"),
            16,
            tmp_path / "home",
            Places(str(place), own=place.name == "sets"),
        )
        assert corpus.tokens == 20 * 11


def test_a_git_lfs_pointer_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid x\n")
    with pytest.raises(UsageFault, match=r"text\.jsonl is a Git LFS pointer") as fault:
        open_regular(tmp_path / "text.jsonl", "next")
    assert "lfs pull" in fault.value.next_step


def test_a_file_is_read_up_to_its_largest_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_regular(tmp_path / "a", 5, "next") == b"12345"
    with pytest.raises(UsageFault, match="a has more than 4 bytes") as fault:
        read_regular(tmp_path / "a", 4, "next")
    assert fault.value.next_step == "next"
