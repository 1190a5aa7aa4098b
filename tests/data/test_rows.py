"""Files as people have them: tables, JSON, packed files, directories, other encodings."""

import csv
import gzip
import io
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import pytest

from node.core.errors import Refused, UsageFault
from node.data.confined import rows
from node.data.confined.process import Confined
from node.data.encodings import encoding_of
from node.data.kinds import FileKind, known_kind
from node.data.readers import LeftOut, RowFormat, documents
from node.data.recognised import settings_found
from node.data.settings import OWN_MANIFEST, DataSettings, Places
from tests.data.conftest import open_source
from tests.data.streamed import zstd

TEXTS = ["one", 'two, with "quotes"\nand a line', "drei: naïve 🤖", "vier; fünf"]


def as_csv(comma: str = ",", name: str = "text") -> bytes:
    out = io.StringIO()
    table = csv.writer(out, delimiter=comma)
    table.writerow(["id", name])
    for i, text in enumerate(TEXTS):
        table.writerow([i, text])
    table.writerow([9, ""])
    return out.getvalue().encode()


def as_lines(name: str = "text") -> bytes:
    rows = [{name: text} for text in TEXTS] + [{name: None}]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def as_json(**how: object) -> bytes:
    rows = [{"text": text} for text in TEXTS] + [{"text": 3}]
    return json.dumps(rows, **how).encode()  # type: ignore[arg-type]


FILES = {
    "a.csv": as_csv(),
    "semicolons.csv": as_csv(";"),
    "a.tsv": as_csv("\t"),
    "a.json": as_json(),
    "pretty.json": b"\xef\xbb\xbf" + as_json(indent=2),
    "object.json": b'{"version": 1, "rows": ' + as_json() + b"}",
    "lines.json": as_lines(),
    "a.jsonl": as_lines(),
    "a.jsonl.gz": gzip.compress(as_lines()),
    "a.jsonl.zst": zstd(as_lines()[:50]) + zstd(as_lines()[50:]),
    "a.csv.gz": gzip.compress(as_csv()),
    "a.json.zst": zstd(as_json()),
}


def read(path: Path, form: RowFormat = RowFormat()) -> tuple[list[bytes], LeftOut]:  # noqa: B008
    left = LeftOut(path.name)
    kind = known_kind(path.name)
    assert kind is not None
    with closing(form.parsers()) as parsers:
        found = [found for found, _ in documents(parsers, path, kind, form, left)]
    return found, left  # type: ignore[return-value]


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_its_rows_and_counts_those_without_text(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    found, left = read(tmp_path / name)
    assert [text.decode() for text in found] == TEXTS
    assert (left.given, left.reasons.total()) == (4, 1)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_rows_are_the_same_however_a_file_is_cut_into_pieces(monkeypatch, size):
    raw = as_json(indent=1)
    pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
    found = list(rows._json_rows(rows._decoded(pieces), "a.json"))
    assert found == json.loads(raw)
    raw = as_csv()
    pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
    table = rows._table_rows(rows._decoded(pieces), {"form": "csv", "name": "a.csv"})
    assert [row.get("text") for row in table] == [*TEXTS, None]
    lines = [b"one", b"", b"three" * 9, b"four"]
    raw = b"\n".join(lines)
    pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
    assert list(rows._split(pieces)) == lines


def test_a_line_that_is_too_long_is_left_out(monkeypatch):
    monkeypatch.setattr(rows, "LONGEST", 20)
    pieces = [b"short\n", b"x" * 15, b"x" * 15, b"x" * 15 + b"\nafter\n"]
    assert list(rows._split(pieces)) == [b"short", None, b"after"]


@pytest.mark.parametrize("content", [b"[{", b'[{"text": "a"} 3', b'{"text": "a"} nonsense'])
def test_json_that_is_cut_is_a_fault(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UsageFault, match="is no JSON, or is cut"):
        read(tmp_path / "a.json")


def test_a_field_of_any_name_is_read(tmp_path):
    for name, raw in {"a.jsonl": as_lines("body"), "a.csv": as_csv(name="body")}.items():
        (tmp_path / name).write_bytes(raw)
        found, _ = read(tmp_path / name, RowFormat("body"))
        assert [text.decode() for text in found] == TEXTS
        settings = DataSettings(source=f"file:{tmp_path / name}", column="body")
        corpus = open_source(settings, 4, tmp_path / "home")
        assert corpus.tokens == sum(len(t.encode()) + 1 for t in TEXTS)
        other = replace(settings, column="text")
        with pytest.raises(UsageFault, match=r"no row .* no field 'text'.*body") as fault:
            open_source(other, 4, tmp_path / "home")
        assert "data.column" in fault.value.next_step
    table = pyarrow.table({"text": TEXTS, "body": [f"{t}!" for t in TEXTS]})
    pq.write_table(table, tmp_path / "a.parquet")
    found, _ = read(tmp_path / "a.parquet", RowFormat("body"))
    assert [text.decode() for text in found] == [f"{t}!" for t in TEXTS]


def test_the_format_is_the_last_ending_of_the_name():
    assert known_kind("a?b.txt") == FileKind("text")
    assert known_kind("https://host/a.jsonl.zst?token=x.txt") == FileKind("lines", "zstd")
    assert known_kind("A.CSV.GZ") == FileKind("csv", "gzip")
    for name in ("a", "a.png", "a.parquet.gz", "a.txt.bz2", ".gz"):
        assert known_kind(name) is None


def test_left_out_rows_are_said_once_for_each_doubling(caplog):
    left = LeftOut("a.jsonl")
    left.given = 1
    for i in range(9):
        left.add("no text" if i else "no object")
        left.report()
    assert [r.getMessage() for r in caplog.records] == [
        "a.jsonl: 1 row is left out (no object)",
        "a.jsonl: 2 rows are left out (1: no object; 1: no text)",
        "a.jsonl: 4 rows are left out (3: no text; 1: no object)",
        "a.jsonl: 8 rows are left out (7: no text; 1: no object)",
    ]
    for i in range(100):
        left.add(f"reason {i}")
    assert len(left.reasons) == 17


# ------------------------------------------------------------ encodings


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ("plain naïve".encode(), "utf-8"),
        ("mit Marke".encode("utf-16"), "utf-16-le"),
        (b"\xfe\xff" + "mit Marke".encode("utf-16-be"), "utf-16-be"),
        ("ohne Marke".encode("utf-16-le"), "utf-16-le"),
        ("ohne Marke".encode("utf-16-be"), "utf-16-be"),
    ],
)
def test_encodings_are_recognised(raw, found):
    assert encoding_of([raw], "a.txt") == found


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        (["Grüße".encode("latin-1")], "not UTF-8 .near byte 2"),
        ([b"x" * 10, b"caf\xe9"], "not UTF-8 .near byte 1[34]"),
        ([b"cut \xc3"], "not UTF-8"),
        ([b"text\x00\x01\x02 and bytes"], "NUL bytes"),
        (["vier".encode("utf-32")], "UTF-32"),
    ],
)
def test_what_is_not_recognised_is_refused_with_the_command(pieces, says):
    with pytest.raises(UsageFault, match=says) as fault:
        encoding_of(pieces, "a.txt")
    assert "iconv" in fault.value.next_step


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "latin-1"])
def test_other_encodings_are_read_as_text(tmp_path, name, encoding):
    text = "id,text\n1,naïve\n" if name == "a.csv" else '{"text": "naïve"}\n'
    mark = b"\xff\xfe" if encoding == "utf-16-le" else b""
    (tmp_path / name).write_bytes(mark + text.encode(encoding))
    found, _ = read(tmp_path / name, RowFormat(encoding=encoding))
    assert found == [text.encode() if name == "a.txt" else "naïve".encode()]


def test_settings_are_found_by_looking(tmp_path):
    def found(name: str, raw: bytes, **more: str) -> dict[str, object]:
        (tmp_path / name).write_bytes(raw)
        settings = DataSettings(source=f"file:{tmp_path / name}", **more)  # type: ignore[arg-type]
        return settings_found(settings, OWN_MANIFEST)

    chat = {"data.rows": "chat", "data.document_mask": True}
    assert found("a.txt", b"plain") == {}
    assert found("a.txt", "breit".encode("utf-16")) == {"data.encoding": "utf-16-le"}
    assert found("a.txt", b"caf\xe9", encoding="latin-1") == {}
    row = json.dumps({"messages": [{"role": "user", "content": "a"}]})
    assert found("a.jsonl", row.encode()) == chat
    assert found("b.jsonl", row.encode(), column="body") == {}
    wide = found("c.json", f"[{row}]".encode("utf-16"))
    assert wide == chat | {"data.encoding": "utf-16-le"}
    assert found("a.csv", b"prompt,completion\na,b\n") == chat
    assert found("b.csv", b"text,completion\na,b\n") == {}
    table = pyarrow.Table.from_pylist([json.loads(row)])
    pq.write_table(table, tmp_path / "a.parquet")
    assert found("a.parquet", (tmp_path / "a.parquet").read_bytes()) == chat
    assert settings_found(DataSettings(), OWN_MANIFEST) == {}


# ------------------------------------------------------------ directories


def directory(tmp_path: Path) -> Path:
    base = tmp_path / "mine"
    for name in ("b.txt", "sub/a.md", "c.jsonl", ".hidden/x.txt", "logo.png"):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(as_lines() if name.endswith("jsonl") else name.encode())
    return base


def ids_of(corpus) -> list[int]:
    return [int(i) for part in (corpus.train, corpus.held_out) for i in part.__array__()]


def test_a_directory_is_all_its_files_each_a_document_or_more(tmp_path):
    base = directory(tmp_path)
    settings = DataSettings(source="file:mine/", holdout=0.0)
    places = Places(data=str(base), own=True)
    corpus = open_source(settings, 4, tmp_path / "home", places)
    expected = ["b.txt", *TEXTS, "sub/a.md"]
    assert ids_of(corpus) == [i for text in expected for i in (*text.encode(), 257)]

    pinned = replace(settings, sha256=corpus.sha256)
    for place in (base, tmp_path):  # itself, or the directory that it lies in
        again = open_source(pinned, 4, tmp_path / "home", Places(data=str(place)))
        assert again.sha256 == corpus.sha256
    (base / "b.txt").write_text("other")
    with pytest.raises(Refused, match="sha256"):
        open_source(pinned, 4, tmp_path / "home", Places(data=str(base)))


def test_one_process_reads_all_files_of_a_directory(tmp_path, monkeypatch):
    base = tmp_path / "mine"
    base.mkdir()
    for i in range(4):
        (base / f"{i}.jsonl").write_bytes(as_lines())
        (base / f"{i}.csv.gz").write_bytes(gzip.compress(as_csv()))
    began = list[None]()
    begin = Confined.__init__
    monkeypatch.setattr(Confined, "__init__", lambda *given: (began.append(None), begin(*given))[1])
    settings = DataSettings(source="file:mine/", holdout=0.0)
    places = Places(data=str(base), own=True)
    open_source(settings, 4, tmp_path / "home", places)
    assert len(began) == 1
    settings_found(settings, places)
    assert len(began) <= 3  # the encodings, and the rows that are looked at


def test_a_directory_of_a_strangers_manifest_is_not_looked_at(tmp_path):
    base = directory(tmp_path)
    named = DataSettings(source=f"file:{base}/")
    for settings, places in (
        (named, Places(data=str(base))),  # no hash proves the content
        (replace(named, sha256="0" * 64), Places()),  # nobody named a directory here
        (replace(named, source="file:../"), Places(data=str(base), own=True)),
        (replace(named, source="file:gone/"), Places(data=str(base / "gone"), own=True)),
    ):
        with pytest.raises(UsageFault):
            open_source(settings, 4, tmp_path / "home", places)
    everything = Places(data=str(tmp_path / "home"), for_all_runs=("data",))
    with pytest.raises(UsageFault, match="is no directory"):
        open_source(replace(named, sha256="0" * 64), 4, tmp_path / "home", everything)


def test_what_is_held_out_by_its_name_is_not_trained_on(tmp_path):
    base = tmp_path / "mine"
    for name in ("train/0.jsonl", "train_test/test-0.jsonl", "validation/0.jsonl"):
        (base / name).parent.mkdir(parents=True)
        (base / name).write_text(json.dumps({"text": name}))
    settings = DataSettings(source="file:mine/", holdout=0.0)
    corpus = open_source(settings, 4, tmp_path / "home", Places(data=str(base), own=True))
    assert bytes(ids_of(corpus)[:-1]) == b"train/0.jsonl"


def test_a_directory_without_text_says_what_can_be_read(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "logo.png").write_bytes(b"x")
    settings = DataSettings(source="file:mine/")
    places = Places(data=str(tmp_path / "mine"), own=True)
    with pytest.raises(UsageFault, match="has no files of 'train'") as fault:
        open_source(settings, 4, tmp_path, places)
    assert ".jsonl" in fault.value.next_step
