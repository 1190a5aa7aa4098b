import errno
import hashlib
import json
import os
import sys
from dataclasses import replace
from functools import partial
from pydoc_data.topics import topics
from unittest.mock import Mock

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
import tokenizers

from node.core.errors import OutOfResources, Refused, UsageFault
from node.data import readers, token_file
from node.data.order import SampleOrder
from node.data.settings import DataSettings
from node.data.sources import MarkovLanguage
from node.data.token_file import TokenFile
from node.data.tokenizer import ByteTokenizer
from node.stage.text import Text
from tests.data.conftest import open_source


def ids_of(corpus):
    return np.concatenate([corpus.train, corpus.held_out]).astype(np.int64).tolist()


def test_pydoc_is_the_joined_help_text(tmp_path):
    raw = "".join(topics[k] for k in sorted(topics)).encode()
    corpus = open_source(DataSettings(), 128, tmp_path)
    assert (bytes(ids_of(corpus)), corpus.sha256) == (raw, hashlib.sha256(raw).hexdigest())
    assert len(corpus.held_out) == int(len(raw) * 0.05)
    assert corpus.windows == (len(corpus.train) - 1) // 128
    assert corpus.vocab == 259
    assert list(tmp_path.iterdir()) == []


def test_a_pinned_hash_is_checked(tmp_path):
    right = open_source(DataSettings(), 128, tmp_path).sha256.upper()
    open_source(DataSettings(sha256=right), 128, tmp_path)
    for source in ("builtin:pydoc", "synthetic:1", f"file:{__file__[:-3]}.py"):
        with pytest.raises(Refused):
            open_source(DataSettings(source=source, sha256="0" * 64), 128, tmp_path)


def test_synthetic_text_is_drawn_from_its_seed(tmp_path):
    corpus = open_source(DataSettings(source="synthetic:5", holdout=0.0), 64, tmp_path)
    assert corpus.train[:500].tolist() == MarkovLanguage(5).generate(500).tolist()
    assert corpus.held_out_windows == 0


def test_a_text_file_is_read_in_place(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("Grüße\n".encode() * 100 + b"\xff broken utf-8 is bytes all the same")
    corpus = open_source(DataSettings(source=f"file:{path}"), 16, tmp_path / "home")
    assert bytes(ids_of(corpus)) == path.read_bytes()
    assert isinstance(corpus.train, TokenFile)
    assert not (tmp_path / "home").exists()


def test_a_file_that_is_cut_while_in_use_is_an_error(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(200)))
    corpus = open_source(DataSettings(source=f"file:{path}", holdout=0.2), 16, tmp_path)
    text = Text(corpus, SampleOrder(corpus.windows, 0), 1)
    whole = sorted(text.at(range(corpus.windows))[0].flatten().tolist())
    assert whole == list(range(16 * corpus.windows))
    os.truncate(tmp_path / "a.txt", 100)
    with pytest.raises(OSError, match=r"a\.txt was cut"):
        text.at(range(corpus.windows))
    with pytest.raises(OSError, match="was cut"):
        text.held_out(0)


DOCUMENTS = [f"Dokument {i}: naïve 🤖\nline" * 3 for i in range(20)]


EXPECTED = [i for d in DOCUMENTS for i in (*ByteTokenizer().encode(d).tolist(), 257)]


def write_parquet(path, column="text", texts=(*DOCUMENTS, None)):
    """Bytes among the texts stand for strings, whether they are UTF-8 or not."""
    said = [t.encode() if isinstance(t, str) else t for t in texts]
    strings = pyarrow.array(said, pyarrow.binary()).view(pyarrow.string())
    pq.write_table(pyarrow.table({"id": list(range(len(said))), column: strings}), path)


def write_jsonl(path):
    path.write_text("".join(json.dumps({"text": d, "n": 1}) + "\n\n" for d in DOCUMENTS))


@pytest.mark.parametrize(
    ("name", "write"), [("a.parquet", write_parquet), ("a.jsonl", write_jsonl)]
)
def test_documents_end_with_eos_and_are_tokenised_once(tmp_path, monkeypatch, name, write):
    write(tmp_path / name)
    settings = DataSettings(source=f"file:{tmp_path / name}")
    corpus = open_source(settings, 16, tmp_path / "home")
    assert (ids_of(corpus), corpus.train.dtype) == (EXPECTED, np.uint16)
    assert corpus.sha256 == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert len(list((tmp_path / "home" / "data").iterdir())) == 1

    monkeypatch.setattr(ByteTokenizer, "encode", lambda *_: pytest.fail("tokenised again"))
    again = open_source(settings, 16, tmp_path / "home")
    assert ids_of(again) == ids_of(corpus)
    assert isinstance(again.train, TokenFile)


def test_documents_are_kept_apart_where_they_end(tmp_path):
    write_jsonl(tmp_path / "a.jsonl")
    plain = DataSettings(source=f"file:{tmp_path / 'a.jsonl'}")
    assert open_source(plain, 16, tmp_path / "home").end is None
    assert open_source(replace(plain, document_mask=True), 16, tmp_path / "home").end == 257


@pytest.mark.parametrize("source", ["builtin:pydoc", "synthetic:1", "a.txt", "a.jsonl"])
def test_a_mask_without_ends_of_documents_is_refused(tmp_path, source):
    (tmp_path / "a.txt").write_text("no document ends here\n" * 50)
    write_jsonl(tmp_path / "a.jsonl")
    name = source if ":" in source else f"file:{tmp_path / source}"
    settings = DataSettings(source=name, document_mask=True)
    if source == "a.jsonl":  # a tokenizer that has no word for it
        whole = json.loads(ByteTokenizer().to_json())
        del whole["added_tokens"]
        whole["model"]["vocab"] = {w: i for w, i in whole["model"]["vocab"].items() if i < 256}
        (tmp_path / "t.json").write_text(json.dumps(whole))
        settings = replace(settings, tokenizer=str(tmp_path / "t.json"))
    with pytest.raises(UsageFault, match="document_mask = true, and .* has nothing that ends"):
        open_source(settings, 16, tmp_path / "home")


@pytest.mark.parametrize("damage", ["altered", "cut", "emptied", "longer"])
def test_a_damaged_cache_file_is_made_anew(tmp_path, caplog, damage):
    write_jsonl(tmp_path / "a.jsonl")
    settings = DataSettings(source=f"file:{tmp_path / 'a.jsonl'}")
    whole = ids_of(open_source(settings, 16, tmp_path / "home"))
    (file,) = (tmp_path / "home" / "data").iterdir()
    good = file.read_bytes()
    spoilt = {
        "altered": b"\xff" * 8 + good[8:],
        "cut": good[: len(good) // 2],
        "emptied": b"",
        "longer": good + b"ab",
    }
    file.write_bytes(spoilt[damage])
    assert ids_of(open_source(settings, 16, tmp_path / "home")) == whole
    assert file.read_bytes() == good
    assert [str(file) in r.getMessage() for r in caplog.records] == [True]


def test_changed_content_or_tokenizer_is_another_cache_file(tmp_path):
    path = tmp_path / "a.jsonl"
    trained = tmp_path / "t.json"
    write_jsonl(path)
    open_source(DataSettings(source=f"file:{path}"), 16, tmp_path / "home")
    path.write_text(path.read_text() + '{"text": "one more"}\n')
    changed = open_source(DataSettings(source=f"file:{path}"), 16, tmp_path / "home")
    assert len(ids_of(changed)) == len(EXPECTED) + 9
    trained.write_bytes(ByteTokenizer().to_json())
    open_source(DataSettings(source=f"file:{path}", tokenizer=str(trained)), 16, tmp_path / "home")
    assert len(list((tmp_path / "home" / "data").iterdir())) == 3


def test_a_trained_tokenizer_over_a_text_file(tmp_path, trained):
    path = tmp_path / "a.txt"
    rust = tokenizers.Tokenizer.from_file(str(trained))
    path.write_text("the cat sat on the mat\n" * 200)
    corpus = open_source(
        DataSettings(source=f"file:{path}", tokenizer=str(trained)), 16, tmp_path / "home"
    )
    assert rust.decode(ids_of(corpus)) == path.read_text()
    assert corpus.vocab == rust.get_vocab_size() <= 300


@pytest.mark.parametrize("piece", [1, 3, 10, 1000])
@pytest.mark.parametrize(
    "text", ["ein Satz\nnoch einer\n\nEnde", "日本語" * 30, "a" * 50, "🤖" * 20 + "\n" + "é" * 99]
)
def test_a_text_is_cut_at_lines_and_never_in_a_character(monkeypatch, piece, text):
    monkeypatch.setattr(readers, "PIECE", piece)
    parts = cut(text.encode(), piece)
    assert b"".join(parts) == text.encode()
    if piece > 1:
        assert "".join(p.decode() for p in parts) == text
    assert b"".join(cut(b"\x80" * 100, piece)) == b"\x80" * 100


def cut(raw: bytes, piece: int) -> list[bytes]:
    return list(readers.cut_at_lines(raw[at : at + piece] for at in range(0, len(raw), piece)))


@pytest.mark.parametrize(
    "line", ['{"text": 3}', "{}", "[1]", "nonsense", "null", '"text"', "[" * 100_000]
)
def test_a_bad_line_is_left_out_and_counted(tmp_path, caplog, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine and long enough"}\n' + line + "\n")
    corpus = open_source(DataSettings(source=f"file:{path}"), 4, tmp_path / "home")
    assert bytes(ids_of(corpus)[:-1]) == b"fine and long enough"
    assert "1 row is left out" in caplog.text
    path.write_text(line + "\n")
    with pytest.raises(UsageFault, match="no row that can be read"):
        open_source(DataSettings(source=f"file:{path}"), 4, tmp_path / "home")
    assert len(list((tmp_path / "home" / "data").iterdir())) == 1


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (partial(write_parquet, column="body"), "no column 'text'"),
        (partial(write_parquet, texts=[b"fine", b"\xff\xfe"]), "cannot read"),
        (lambda path: path.write_bytes(b"PAR1 not really"), "cannot read"),
    ],
    ids=["no column", "no UTF-8", "no parquet"],
)
def test_a_parquet_file_without_text_is_refused(tmp_path, write, says):
    write(tmp_path / "a.parquet")
    with pytest.raises(UsageFault, match=says):
        open_source(DataSettings(source=f"file:{tmp_path / 'a.parquet'}"), 4, tmp_path)


def test_parquet_without_its_library_names_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageFault) as caught:
        open_source(DataSettings(source=f"file:{tmp_path / 'a.parquet'}"), 4, tmp_path)
    assert "pip install" in caught.value.next_step


def test_a_file_of_token_ids_is_read_as_it_is(tmp_path):
    path = tmp_path / "a.bin"
    ids = np.arange(1000, dtype="<u2") % 200
    path.write_bytes(ids.tobytes())
    corpus = open_source(DataSettings(source=f"file:{path}"), 16, tmp_path)
    assert (ids_of(corpus), corpus.vocab) == (ids.tolist(), 259)

    wide = np.arange(1000, dtype="<u4") + 99_000
    path.write_bytes(wide.tobytes())
    side = tmp_path / "a.bin.json"
    side.write_text('{"dtype": "uint32", "vocab": 100000}')
    corpus = open_source(DataSettings(source=f"file:{path}"), 16, tmp_path)
    assert (ids_of(corpus), corpus.vocab) == (wide.tolist(), 100_000)

    for note in (
        '{"dtype": "uint32", "vocab": 99500}',
        '{"dtype": "int8"}',
        '{"vocab": "x"}',
        "[",
        "[]",
        '{"vocab": 0}',
    ):
        side.write_text(note)
        with pytest.raises(UsageFault):
            open_source(DataSettings(source=f"file:{path}"), 16, tmp_path)
    side.unlink()
    path.write_bytes(b"\x01\x00\x01")
    with pytest.raises(UsageFault, match="multiple"):
        open_source(DataSettings(source=f"file:{path}"), 16, tmp_path)


def test_a_directory_of_the_datasets_library(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets.disable_progress_bars()
    splits = {
        "train": {"text": DOCUMENTS, "n": list(range(20))},
        "validation": {"body": [*DOCUMENTS[:10], None]},
    }
    sets = {name: datasets.Dataset.from_dict(columns) for name, columns in splits.items()}
    where = tmp_path / "set"
    datasets.DatasetDict(sets).save_to_disk(str(where))
    corpus = open_source(DataSettings(source=f"hf:{where}"), 16, tmp_path / "home")
    assert ids_of(corpus) == EXPECTED
    assert corpus.sha256 == readers.documents_sha256(d.encode() for d in DOCUMENTS)
    other = open_source(DataSettings(source=f"hf:{where}:validation:body"), 16, tmp_path / "home")
    assert ids_of(other) == EXPECTED[: len(ids_of(other))]
    for wrong in (f"hf:{where}:test", f"hf:{where}:train:body", f"hf:{where}:train:n"):
        with pytest.raises(UsageFault):
            open_source(DataSettings(source=wrong), 16, tmp_path / "home")
    with pytest.raises(Refused):
        open_source(DataSettings(source=f"hf:{where}", sha256="0" * 64), 16, tmp_path / "home")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageFault) as caught:
        open_source(DataSettings(source=f"hf:{where}"), 16, tmp_path / "home")
    assert "tutti[data]" in caught.value.next_step


@pytest.mark.parametrize(
    "source",
    [
        "file:/nowhere.txt",
        "file:/",
        "file:pyproject.toml",
        "file:~nobody-here/a.txt",
        "hf:~nobody-here/a",
        "file:a\0.txt",
    ],
)
def test_an_unknown_source_is_refused_with_a_next_step(tmp_path, source):
    with pytest.raises(UsageFault) as caught:
        open_source(DataSettings(source=source), 16, tmp_path)
    assert caught.value.next_step


@pytest.mark.parametrize("size", [0, 1, 33])
def test_a_text_too_short_for_a_window_is_refused(tmp_path, size):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * size)
    with pytest.raises(UsageFault, match="too few" if size else "has no text"):
        open_source(DataSettings(source=f"file:{path}"), 16, tmp_path)
    path.write_bytes(b"x" * 34)
    corpus = open_source(DataSettings(source=f"file:{path}"), 16, tmp_path)
    assert (corpus.windows, corpus.held_out_windows) == (1, 1)


@pytest.mark.parametrize(
    ("number", "fault"), [(errno.ENOSPC, OutOfResources), (errno.EACCES, UsageFault)]
)
def test_a_disk_that_does_not_take_it(tmp_path, monkeypatch, number, fault):
    write_jsonl(tmp_path / "a.jsonl")
    monkeypatch.setattr(token_file.os, "fsync", Mock(side_effect=OSError(number, "no")))
    with pytest.raises(fault):
        open_source(DataSettings(source=f"file:{tmp_path / 'a.jsonl'}"), 16, tmp_path / "home")
    assert list((tmp_path / "home" / "data").iterdir()) == []
