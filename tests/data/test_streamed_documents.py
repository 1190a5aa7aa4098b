"""Parts of shards of every format: each document comes once, wherever the parts are cut."""

import json
import random
from itertools import pairwise

import pytest

from node.core.errors import OutOfResources, UsageFault
from node.data.readers import TEXTS, LeftOut, RowFormat
from node.data.streamed.documents import documents_of, kind_in
from node.data.streamed.pieces import Part
from tests.data.streamed import documents, given, listed, opened, shard_of, stream, write

NAMES = (
    "a.txt", "a.txt.zst", "a.txt.gz", "a.jsonl", "a.jsonl.zst", "a.jsonl.gz", "a.parquet",
    "a.json", "lines.json", "a.csv", "a.csv.gz",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_parts_side_by_side_give_each_document_once(tmp_path, name, seed):
    texts = documents(120, seed)
    shard = shard_of(write(tmp_path / name, texts))
    rng = random.Random(seed)
    inside = [rng.randrange(shard.size) for _ in range(rng.choice((0, 1, 5, 60)))]
    cuts = sorted({0, *inside, shard.size})
    read = opened(tmp_path)
    found = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        left = LeftOut(name)
        given, ended = documents_of(read, shard, Part(0, start, stop), TEXTS, left)
        found += [d.decode() for d in given]
        assert ended == (".txt" not in name)
    if ".txt" in name:
        assert "".join(found) == "".join(texts)
    else:  # a table knows no difference between an empty field and none
        assert found == [text for text in texts if text or ".csv" not in name]


LINES = [json.dumps({"text": text}) for text in documents(40)]
ROWS = [json.loads(line) for line in LINES]


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"version": 1, "data": ROWS}),
        json.dumps({"version": 1, "data": ROWS}) + "\n",
        json.dumps({"version": 1, "data": ROWS}, indent=2),
        '{"data": [\n' + ",\n".join(LINES) + "\n]}",
        '{"data": [' + "\n,".join(LINES) + "]}",
        "\n".join(json.dumps(row, indent=1) for row in ROWS),
        "\n" + "\n\n".join(LINES),
    ],
    ids=["one line", "one line, ended", "indented", "a row a line", "comma first",
         "indented objects", "lines"],
)  # fmt: skip
@pytest.mark.parametrize("block", [7, 1 << 20])
def test_rows_of_json_come_however_they_are_laid_out(tmp_path, monkeypatch, content, block):
    monkeypatch.setattr("node.data.streamed.documents.BLOCK", block)
    path = tmp_path / "a.json"
    path.write_text(content, encoding="utf-8")
    read = opened(tmp_path)
    shard = shard_of(path)
    assert kind_in(read, shard, TEXTS).form == ("lines" if content[0] == "\n" else "json")
    cuts = [0, shard.size // 3, shard.size // 2, shard.size]
    parts = [Part(0, start, stop) for start, stop in pairwise(cuts)]
    found = [text.decode() for part in parts for text in given(read, shard, part=part)]
    assert found == documents(40)


def test_json_in_utf_16_is_no_text_until_it_is_said(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "weit"}]', encoding="utf-16")
    with pytest.raises(UsageFault, match="NUL bytes"):
        given(opened(tmp_path), shard_of(path))


def test_a_line_that_is_no_document_is_left_out_and_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": "one"}), "{broken", "[]", "7", '{"other": 1}', '{"text": 3}']
    path.write_text("\n".join([*lines, "", json.dumps({"text": "two"})]))
    left = LeftOut("a")
    shard = shard_of(path)
    found, _ = documents_of(opened(tmp_path), shard, Part(0, 0, shard.size), TEXTS, left)
    assert list(found) == [b"one", b"two"]
    assert left.reasons == {
        "a line that is no JSON object": 1,
        "a row that is no object": 2,
        "no field 'text'; the fields are other": 1,
        "int in 'text' in place of a text": 1,
    }


def test_a_column_of_another_name(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x", "text": "y"}\n')
    assert given(opened(tmp_path), shard_of(path), "body") == [b"x"]


@pytest.mark.parametrize(
    ("name", "content", "column", "why"),
    [
        ("a.parquet", b"no parquet", "text", "cannot read"),
        ("a.parquet", None, "absent", "no column 'absent'"),
        ("a.parquet", None, "id", "holds int"),
        ("a.txt.zst", b"no zstd", "text", "cannot unpack"),
        ("a.txt.gz", b"no gzip at all", "text", "cannot unpack"),
    ],
)
def test_a_shard_that_is_not_what_its_name_says(tmp_path, name, content, column, why):
    path = write(tmp_path / name, ["a", "b"])
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageFault, match=why):
        given(opened(tmp_path), shard_of(path), column)


def test_a_packed_shard_that_grows_above_the_cap_is_refused(tmp_path):
    path = write(tmp_path / "a.txt.zst", ["x" * (9 << 20)], frames=1)
    with pytest.raises(Exception, match="not fit below data_disk"):
        given(opened(tmp_path, 4 << 20), shard_of(path))
    assert not any((tmp_path / "kept").iterdir())


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_utf_16_is_no_text_until_it_is_said(tmp_path, name):
    path = tmp_path / name
    path.write_text('{"text": "weit"}\n' * 9, encoding="utf-16")
    with pytest.raises(UsageFault, match="NUL bytes") as fault:
        given(opened(tmp_path), shard_of(path))
    assert "data.encoding=utf-16-le" in fault.value.next_step
    part = Part(0, 0, path.stat().st_size)
    form = RowFormat(encoding="utf-16-le")
    found, _ = documents_of(opened(tmp_path), shard_of(path), part, form, LeftOut("a"))
    (tmp_path / "a.json").write_text(' [{"text": "weit"}]', encoding=form.encoding)
    shard = shard_of(tmp_path / "a.json")
    array, _ = documents_of(opened(tmp_path), shard, part, form, LeftOut("a"))
    assert list(array) == [b"weit"]
    wanted = [b"weit"] * 9 if name == "a.jsonl" else [b'{"text": "weit"}\n' * 9]
    assert list(found) == wanted


@pytest.mark.parametrize(
    ("name", "content", "encoding", "fits"),
    [
        ("a.jsonl", b'{"text": "weit"}\n', "utf-8", True),
        ("a.jsonl", b'{"text": "weit"}\n', "latin-1", False),
        ("a.csv", b"text\nweit\n", "utf-8", False),
        ("a.json", b'{"text": "weit"}\n', "utf-8", True),
        ("a.json", b'[{"text": "weit"},\n', "utf-8", False),
    ],
)
def test_text_that_is_made_anew_must_fit_on_the_disk(tmp_path, name, content, encoding, fits):
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / name).write_bytes(content * 9000)
    source = f"file:{listed(tmp_path / 'web')}"
    large = {"windows": 1, "encoding": encoding, "cap": 4 * (9000 * len(content)) - 1}
    if fits:
        assert stream(source, tmp_path, **large).pieces.count
        return
    with pytest.raises(OutOfResources, match="are read by turns"):
        stream(source, tmp_path, **large)
