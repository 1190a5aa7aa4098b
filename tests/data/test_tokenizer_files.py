"""The files beside a tokenizer: roles of special tokens, chat template, hashes and limits."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from node.core.errors import Refused, UsageFault
from node.data.settings import DataSettings, Places
from node.data.tokenizer import open_tokenizer
from node.data.tokenizer_files import FilesMissing, TokenizerFiles, named_files
from node.model.files import LIMITS
from testbed.models.directories import files_of

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<｜end▁of▁sentence｜>", "<pad>"]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"


def model_at(directory: Path, **files: Any) -> Path:
    """A directory with a tokenizer of the five words and two letters, and with ``files``; "__" in
    a name stands for its dot."""
    directory.mkdir(exist_ok=True)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    body = {
        "version": "1.0",
        "added_tokens": [
            {"id": 10 + i, "content": word, "special": True, **flags}
            for i, word in enumerate(WORDS)
        ],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(body))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name.replace("__", ".")).write_text(text)
    return directory


@pytest.mark.parametrize(
    ("files", "bos", "eos", "pad", "end"),
    [
        ({}, 11, (10,), 14, 10),  # by words alone, as before
        (
            {"tokenizer_config__json": {"bos_token": None, "eos_token": WORDS[2]}},
            None,
            (12,),
            None,
            12,
        ),
        ({"tokenizer_config__json": {"eos_token": {"content": WORDS[3]}}}, None, (13,), None, 13),
        (
            {
                "tokenizer_config__json": {"eos_token": WORDS[2], "pad_token": WORDS[0]},
                "generation_config__json": {"eos_token_id": [12, 10], "bos_token_id": 11},
                "config__json": {"eos_token_id": 10, "pad_token_id": 14},
            },
            11,
            (12, 10),
            14,
            12,
        ),
        ({"special_tokens_map__json": {"eos_token": WORDS[3]}}, None, (13,), None, 13),
        ({"tokenizer_config__json": {"eos_token": "b"}}, None, (1,), None, 1),
        (
            {
                "tokenizer_config__json": {},
                "config__json": {"eos_token_id": 10, "pad_token_id": -1},
            },
            None,
            (10,),
            None,
            10,
        ),
    ],
)
def test_roles_come_from_the_files(
    tmp_path: Path,
    files: dict[str, Any],
    bos: int | None,
    eos: tuple[int, ...],
    pad: int | None,
    end: int | None,
) -> None:
    found = files_of(model_at(tmp_path, **files))
    assert (found.bos_id, found.eos_ids, found.pad_id, found.end_id) == (bos, eos, pad, end)
    settings = DataSettings(tokenizer="t", end=found.end_id if found.end_id is not None else -1)
    opened = open_tokenizer(settings, Places(tokenizer=str(tmp_path / "tokenizer.json")))
    assert opened.eos == end


def test_the_template_is_found_where_the_library_looks(tmp_path: Path) -> None:
    config: dict[str, Any] = {"eos_token": WORDS[2]}
    assert files_of(model_at(tmp_path)).chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for template, wanted in (("C", "C"), (named, "D"), (None, None), (named[:1], None)):
        where = model_at(tmp_path, tokenizer_config__json=config | {"chat_template": template})
        assert files_of(where).chat_template == wanted
    model_at(tmp_path, chat_template__jinja="{{ messages }}\n")
    assert files_of(tmp_path).chat_template == "{{ messages }}\n"


def test_a_manifest_names_the_files_by_hash(tmp_path: Path) -> None:
    where = model_at(
        tmp_path,
        tokenizer_config__json={"eos_token": WORDS[2], "chat_template": "C"},
        generation_config__json={"eos_token_id": [12, 10]},
        README__md="no file of a tokenizer",
    )
    made = files_of(where)
    assert sorted(made.files) == ["generation_config.json", "tokenizer_config.json"]
    raw = (where / "tokenizer.json").read_bytes()
    sha256 = hashlib.sha256(raw).hexdigest()
    settings = DataSettings(
        tokenizer="tokenizer.json",
        tokenizer_sha256=sha256,
        files=(*made.entries, f"later.bin:{'0' * 64}"),
    )
    store = {hashlib.sha256(content).hexdigest(): content for content in made.files.values()}
    with pytest.raises(FilesMissing, match=r"tokenizer\.json") as missing:
        TokenizerFiles.of_manifest(settings, store.get)
    assert missing.value.missing == {"tokenizer.json": sha256}
    store[sha256] = raw
    again = TokenizerFiles.of_manifest(settings, store.get)
    assert again.files == made.files
    assert (again.chat_template, again.eos_ids) == ("C", (12, 10))
    assert "later.bin" not in named_files(settings)
    with pytest.raises(Refused, match="hash"):
        TokenizerFiles.of_manifest(settings, lambda wanted: store[wanted] + b" ")


def test_files_of_another_tokenizer_say_nothing_of_this_one(tmp_path: Path) -> None:
    model = model_at(tmp_path / "model", generation_config__json={"eos_token_id": 0})
    other = model_at(tmp_path / "other", tokenizer_config__json={"eos_token": WORDS[0]})
    found = TokenizerFiles.beside(other / "tokenizer.json", model)
    assert (sorted(found.files), found.eos_ids) == (["tokenizer_config.json"], (10,))


def test_bytes_have_roles_of_their_own() -> None:
    found = TokenizerFiles.of_manifest(DataSettings(), lambda _: None)
    assert (found.bos_id, found.eos_ids, found.pad_id, found.end_id) == (256, (257,), 258, 257)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer_config__json", "[]", "holds no object"),
        ("tokenizer_config__json", "{" * 100_000, "no JSON"),
        ("tokenizer_config__json", POINTER.decode(), "Git LFS pointer"),
        ("tokenizer__json", POINTER.decode(), "Git LFS pointer"),
        ("generation_config__json", {"eos_token_id": "two"}, "eos_token_id"),
        ("generation_config__json", {"eos_token_id": [1.5]}, "eos_token_id"),
        ("generation_config__json", {"eos_token_id": list(range(500))}, "eos_token_id"),
        ("generation_config__json", " " * (LIMITS["generation_config.json"] + 1), "more than"),
        ("added_tokens__json", {"a": "x"}, "added tokens"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: Any, said: str) -> None:
    where = model_at(tmp_path, tokenizer_config__json={"eos_token": "a"})
    model_at(where, **{name: content})
    with pytest.raises(UsageFault, match=said):
        files_of(where)
