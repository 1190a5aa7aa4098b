import json

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from node.core.errors import UsageFault
from node.data.settings import OWN_MANIFEST, DataSettings
from node.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    byte_letters,
    open_tokenizer,
    pieces,
)

BYTES = ByteTokenizer()
RUST = tokenizers.Tokenizer.from_str(BYTES.to_json().decode())
UTF8 = st.text(st.characters(exclude_categories=("Cs",)))


@given(UTF8)
@example("  two  spaces\n\n\ttabs\r\n")
@example("naïve façade — 你好 🤖\x00\x7f\xad")
@example("<|bos|")
def test_the_exported_tokenizer_gives_equal_ids_and_text(text):
    ids = BYTES.encode(text)
    assert (ids.tolist(), RUST.encode(text).ids) == (list(text.encode()), ids.tolist())
    assert (BYTES.decode(ids), RUST.decode(ids.tolist())) == (text, text)


def test_special_words_are_bytes_when_asked_so():
    fresh = tokenizers.Tokenizer.from_str(BYTES.to_json().decode())
    text = "a<|eos|>b"
    assert fresh.encode(text).ids == [97, 257, 98]
    fresh.encode_special_tokens = True
    assert fresh.encode(text).ids == BYTES.encode(text).tolist()


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([256, 72, 105, 257, 258, 1000, -5], "Hi"),
        ([0xE4, 0xBD], "\ufffd"),
        (np.array([72, 105], dtype=np.uint16), "Hi"),
    ],
    ids=["specials are nothing", "half a character", "an array"],
)
def test_ids_are_decoded_to_text(ids, text):
    assert BYTES.decode(ids) == text


def test_259_ids_and_a_lone_surrogate_is_a_question_mark():
    assert RUST.get_vocab_size() == BYTES.vocab == 259
    assert BYTES.encode("a\ud800b").tolist() == [97, 63, 98]


def test_letters_are_those_of_the_library():
    assert sorted(byte_letters()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert len(set(byte_letters())) == 256


def test_a_trained_tokenizer_is_loaded_and_exported_unchanged(trained):
    ours = open_tokenizer(DataSettings(tokenizer=str(trained)), OWN_MANIFEST)
    text = "the cat sat on the mat\n" * 3
    ids = ours.encode(text)
    assert len(ids) > 4  # the file's truncation is for short inputs, not for a training text
    assert len(ids) < len(text)
    assert ours.decode(ids) == text
    assert ours.encode(text.encode()).tolist() == ids.tolist()
    assert ours.to_json() == trained.read_bytes()
    assert int(ids.max()) < ours.vocab
    assert ours.eos == 0


def words() -> tokenizers.Tokenizer:
    """A tokenizer of words with the space before them; its decoder drops the first word's space."""
    known = ["<unk>", "\u2581the", "\u2581cat", "\u2581sat"]
    rust = tokenizers.Tokenizer(tokenizers.models.Unigram([(w, -1.0) for w in known], unk_id=0))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    rust.decoder = tokenizers.decoders.Metaspace()
    return rust


def lone_bytes() -> tokenizers.Tokenizer:
    """A tokenizer of single bytes and one letter; bytes beside a broken character are broken
    too."""
    ids = {f"<0x{i:02X}>": i for i in range(256)} | {"m": 256}
    rust = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [], byte_fallback=True))
    rust.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    return rust


def said(ours: Tokenizer, before: str, ids: list[int]) -> list[str]:
    """The text that each of these ids completes after the text `before`."""
    return [*map(ours.stream(ours.encode(before).tolist()), ids)]


def test_what_each_id_completes_is_all_of_the_text(trained):
    level = FileTokenizer(trained)
    assert said(level, "the", [0, *level.encode(" hat").tolist()]) == ["", " hat"]
    for ours in (BYTES, level):
        parts = said(ours, "the cat", ours.encode(" \u4f60\U0001f916!").tolist())
        assert [p for p in parts if p] == [" ", "\u4f60", "\U0001f916", "!"]
    words().save(str(trained))
    assert said(FileTokenizer(trained), "the cat", [3, 1]) == [" sat", " the"]
    lone_bytes().save(str(trained))
    broken = said(FileTokenizer(trained), "", [0x61, 0xE4, 256])
    assert broken == ["a", "", "\ufffdm"]


@pytest.mark.parametrize("content", [None, b"{", b"{}", b"\xff", json.dumps({"model": 3}).encode()])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageFault):
        open_tokenizer(DataSettings(tokenizer=str(path)), OWN_MANIFEST)


@given(st.text(st.sampled_from("ab\n")), st.integers(1, 9))
def test_pieces_join_to_the_text_and_end_behind_lines(text, size):
    parts = list(pieces(text, size))
    assert "".join(parts) == text
    assert all(0 < len(p) <= size for p in parts)
    assert all(p.endswith("\n") for p in parts[:-1] if "\n" in p)
