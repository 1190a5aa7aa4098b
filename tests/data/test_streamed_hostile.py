"""Servers with answers that nobody asked for, shards that nobody can read, a disk that is full."""

import asyncio
import errno
import fcntl
import os
import threading
from pathlib import Path
from unittest.mock import Mock

import pyarrow
import pyarrow.parquet as pq
import pytest

from node.core.errors import NetworkFault, OutOfResources, UsageFault
from node.data.kinds import FileKind
from node.data.readers import TEXTS, LeftOut
from node.data.settings import OWN_MANIFEST, DataSettings, Places
from node.data.streamed import fetching, files
from node.data.streamed import stream as stream_module
from node.data.streamed.documents import documents_of
from node.data.streamed.fetching import host_entry, web_client
from node.data.streamed.files import Files, Shard
from node.data.streamed.pieces import Part
from node.data.streamed.shards import is_streamed
from node.data.streamed.shards import listed as listed_by
from tests.data.streamed import (
    CAP,
    TEXT,
    documents,
    given,
    listed,
    opened,
    published,
    reply,
    served,
    shard_of,
    stream,
    write,
    zstd,
)


@pytest.fixture
def web(tmp_path, small):
    """A server of eight shards of documents, and of a list of them."""
    shards = {f"part-{i}.jsonl": documents(100, i) for i in range(8)}
    with served(published(tmp_path / "web", shards).parent) as server:
        yield server


def first_shard(made, web) -> Path:
    """The file in which the first piece of a stream begins."""
    name = made.listing.shards[made.pieces.parts(0)[0].shard].name
    return web.directory / name.rpartition("/")[2]


# ---------------------------------------------------------------- servers


def test_a_part_that_nobody_asked_for_is_refused(answers, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WHOLE", 0)
    part = {"content_range": f"bytes 0-99/{len(TEXT)}"}

    def say(handler):
        if handler.command == "HEAD":
            reply(handler, 200, TEXT)
        else:
            reply(handler, 206, TEXT[:100], **part)

    server = answers(say)
    found = opened(tmp_path)
    shard = Shard(server.url, len(TEXT))
    assert found.read(shard, 0, 100) == TEXT[:100]
    with pytest.raises(UsageFault, match="gives no parts"):
        found.read(shard, 100, 200)


def test_another_part_is_not_put_behind_what_is_here(answers, tmp_path):
    def say(handler):
        if "range" not in handler.headers:
            handler.close_connection = True
            reply(handler, 200, TEXT[:1000], content_length=str(len(TEXT)))
        else:  # the right number of bytes, from the wrong place
            reply(handler, 206, TEXT[:3000], content_range=f"bytes 0-2999/{len(TEXT)}")

    found = opened(tmp_path)
    shard = Shard(answers(say).url, len(TEXT))
    for fault in (NetworkFault, UsageFault):
        with pytest.raises(fault):
            found.whole(shard)
    assert not list((tmp_path / "kept").glob("*.shard"))


def test_a_body_that_hardly_comes_is_given_up(answers, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "GRACE_S", 0.0)
    monkeypatch.setattr(fetching, "SLOWEST", 1 << 40)
    server = answers(lambda h: reply(h, 200, TEXT))
    client = web_client(host_entry(server.url), {})
    found = Files(client, tmp_path / "kept", CAP)
    with pytest.raises(NetworkFault, match="bytes come a second"):
        found.whole(Shard(server.url, len(TEXT)))
    # Heads, too, and lists.
    with pytest.raises(NetworkFault, match="bytes come a second"):
        stream(server.url, tmp_path)


async def test_shards_are_asked_for_as_they_are_stored(answers, tmp_path, small):
    server = answers(lambda h: reply(h, 200, TEXT))
    made = stream(server.url, tmp_path)
    await made.rows(range(2))
    await made.close()
    assert {h["accept-encoding"] for h in server.headers} == {"identity"}


@pytest.mark.parametrize("size", ["\u00b2", "9" * 5000, "-1", "", "0x10"])
def test_a_size_that_is_no_number(answers, tmp_path, size):
    def say(handler):
        handler.close_connection = True
        reply(handler, 200, b"", content_length=size)

    with pytest.raises((UsageFault, NetworkFault)):
        stream(answers(say).url, tmp_path)


@pytest.mark.parametrize("name", ["http://127.0.0.1:9/x.txt", "//127.0.0.1:9/x.txt", "a #?%2e.txt"])
def test_names_of_a_list_are_files_of_its_server(answers, tmp_path, small, name):
    asked = []

    def say(handler):
        asked.append(handler.path)
        sums = f"{'0' * 64}  {name}\n".encode()
        reply(handler, 200, sums if "SHA256SUMS" in handler.path else TEXT)

    server = answers(say)
    made = stream(server.url.replace("a.txt", "d/SHA256SUMS"), tmp_path)
    assert [s.size for s in made.listing.shards] == [len(TEXT)]
    assert asked[0] == "/d/SHA256SUMS"
    assert asked[1].startswith("/d/")
    asyncio.run(made.close())


async def test_closing_does_not_wait_for_a_slow_server(answers, tmp_path, small):
    begun = threading.Event()
    ended = threading.Event()

    def say(handler):
        reply(handler, 200, b"", content_length=str(len(TEXT)))
        for i in range(len(TEXT) if handler.command == "GET" else 0):
            if ended.wait(0.05):
                return
            handler.wfile.write(TEXT[i : i + 1])
            begun.set()

    made = stream(answers(say).url, tmp_path)
    asking = asyncio.ensure_future(made.rows(range(4)))
    await asyncio.to_thread(begun.wait)
    await asyncio.wait_for(made.close(), 30)  # all of it would take minutes
    with pytest.raises(asyncio.CancelledError):
        await asking
    ended.set()


async def test_closing_waits_for_no_hash_and_no_sizes(web, tmp_path, opens):
    made = opens(f"file:{web.directory}/SHA256SUMS", tmp_path)
    made.files.stop()
    with pytest.raises(NetworkFault, match="not read any more"):
        made.files.whole(made.listing.shards[0])
    settings = DataSettings(source=f"{web.url}/SHA256SUMS")
    client = web_client(host_entry(web.url), {})
    with pytest.raises(NetworkFault, match="not read any more"):
        listed_by(settings, OWN_MANIFEST, client, made.files.go_on)
    assert [method for method, _, _ in web.asked] == ["GET"]


async def test_a_shard_that_is_gone_is_replaced_by_other_text(web, tmp_path, caplog, opens):
    made = opens(f"{web.url}/SHA256SUMS", tmp_path, windows=40)
    (web.directory / "part-3.jsonl").unlink()
    (web.directory / "part-5.jsonl").write_bytes(b"other")
    every = range(2 * made.pieces.count * 40)
    found = [await asyncio.wait_for(made.rows(every[i : i + 40]), 60) for i in every[::40]]
    assert sum(map(len, found)) == len(every)
    assert "part-3.jsonl: the server says 404; other text is read in its place" in caplog.text
    assert "part-5.jsonl is not the shard of the list" in caplog.text


async def test_a_refusal_of_a_moment_replaces_nothing(web, tmp_path, caplog, monkeypatch, opens):
    monkeypatch.setattr(stream_module, "REFUSED_S", 600.0)
    source = f"{web.url}/SHA256SUMS"
    wanted = await opens(source, tmp_path / "other").rows(range(32))
    made = opens(source, tmp_path)
    path = first_shard(made, web)
    away = path.rename(path.with_suffix(".away"))
    failed = made._failed
    faults = list[Exception]()

    async def told(e):
        faults.append(e)
        if len(faults) == 6:
            away.rename(path)
        await failed(e)

    monkeypatch.setattr(made, "_failed", told)
    assert (await asyncio.wait_for(made.rows(range(32)), 20) == wanted).all()
    assert "other text" not in caplog.text


@pytest.mark.parametrize("restarted", [True, False])
async def test_a_shard_that_was_replaced_is_read_when_it_is_back(
    web, tmp_path, monkeypatch, opens, restarted
):
    source = f"{web.url}/SHA256SUMS"
    wanted = await opens(source, tmp_path / "other").rows(range(32))
    made = opens(source, tmp_path)
    path = first_shard(made, web)
    away = path.rename(path.with_suffix(".away"))
    replaced = await asyncio.wait_for(made.rows(range(32)), 20)
    assert (replaced != wanted).any()
    away.rename(path)
    assert (await made.rows(range(32)) == replaced).all()
    if restarted:
        await made.close()
        made = opens(source, tmp_path)
    else:
        monkeypatch.setattr(stream_module, "AGAIN_S", 0.0)
    assert (await asyncio.wait_for(made.rows(range(32)), 20) == wanted).all()


async def test_a_list_that_grew_leaves_the_one_that_is_kept(web, tmp_path, opens):
    source = f"{web.url}/SHA256SUMS"
    made = opens(source, tmp_path)
    digest = made.sha256
    await made.close()
    write(web.directory / "part-8.jsonl", documents(100, 8))
    (web.directory / "part-0.jsonl").unlink()
    listed(web.directory)
    again = opens(source, tmp_path, sha256=digest)
    assert await asyncio.wait_for(again.rows(range(32)), 20) is not None
    await again.close()
    assert opens(source, tmp_path, sha256=digest).sha256 == digest


async def test_what_waits_for_a_server_is_queued_once(web, tmp_path, opens):
    made = opens(f"{web.url}/SHA256SUMS", tmp_path, windows=4)
    web.down = True
    for _ in range(200):
        asking = asyncio.ensure_future(made.rows(range(16)))
        await asyncio.sleep(0)
        asking.cancel()
    assert len(made._making) <= 2 * made.pieces.lanes


async def test_what_no_library_can_read_is_said_and_replaced(
    web, tmp_path, caplog, monkeypatch, opens
):
    made = opens(f"{web.url}/SHA256SUMS", tmp_path)
    broken = made.pieces.place(0)[0]
    encode = made._tokenised

    def tokenised(number):
        if number == broken:
            raise MemoryError("a library's own error")
        return encode(number)

    monkeypatch.setattr(made, "_tokenised", tokenised)
    assert len(await asyncio.wait_for(made.rows(range(8)), 20)) == 8
    assert "a library's own error; other text is read" in caplog.text


# ---------------------------------------------------------------- shards


def test_parquet_is_read_over_the_edges_of_what_is_fetched(web, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WHOLE", 0)
    monkeypatch.setattr(files, "BLOCK", 1000)
    texts = documents(700)
    size = write(web.directory / "a.parquet", texts).stat().st_size
    assert size > 20_000
    found = opened(tmp_path)
    assert given(found, Shard(f"{web.url}/a.parquet", size)) == [t.encode() for t in texts]
    assert not found._making  # no lock is kept for a shard that was read


NO_UTF8 = pyarrow.Array.from_buffers(
    pyarrow.string(),
    3,
    pyarrow.array([b"\xff\xfe abc", None, b"fine"], type=pyarrow.binary()).buffers(),
)
AGAIN = ["again", "and", "again"] * 400


@pytest.mark.parametrize(
    ("columns", "texts"),
    [
        ([NO_UTF8], [b"\xff\xfe abc", b"fine"]),
        ([pyarrow.array(AGAIN).dictionary_encode()], [t.encode() for t in AGAIN]),
        ([pyarrow.array(AGAIN, pyarrow.string_view())], [t.encode() for t in AGAIN]),
        ([pyarrow.array(["a", "b"]), pyarrow.array(["c", "d"])], [b"a", b"b"]),
    ],
    ids=["no UTF-8", "coded by dictionary", "views", "of two of one name the first"],
)
def test_columns_of_parquet_as_libraries_write_them(tmp_path, columns, texts):
    path = tmp_path / "a.parquet"
    pq.write_table(pyarrow.table(columns, names=["text"] * len(columns)), path)
    assert given(opened(tmp_path), shard_of(path)) == texts


def test_a_line_that_never_ends_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("node.data.streamed.documents.LONGEST", 1 << 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b"x" * (5 << 20) + b'\n{"text": "b"}\n')
    read = opened(tmp_path)
    shard = shard_of(path)
    cuts = [0, 100, 1000, 3 << 20, shard.size]
    parts = [Part(0, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    left = LeftOut("a")
    found = [d for part in parts for d in documents_of(read, shard, part, TEXTS, left)[0]]
    assert found == [b"a", b"b"]
    assert left.reasons == {"a line that is no JSON object": 1}


def test_a_shard_that_unpacks_to_far_more_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WHOLE", 1 << 20)
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstd(bytes(8 << 20)))
    found = opened(tmp_path)
    found.put(tmp_path / "kept" / "of-another.ids", bytes(1000))
    with pytest.raises(UsageFault, match="more than 1 MiB of text"):
        given(found, shard_of(path))
    assert [p.name for p in (tmp_path / "kept").iterdir()] == ["of-another.ids"]


# ---------------------------------------------------------------- the disk


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    found = opened(tmp_path)

    def full(self, content):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutOfResources, match="No space left"):
        found.put(tmp_path / "kept" / "a.ids", b"content")
    assert not list((tmp_path / "kept").iterdir())


async def test_two_processes_fetch_the_same_shard_into_two_files(answers, tmp_path, monkeypatch):
    begun = threading.Event()
    go_on = threading.Event()

    def say(handler):
        if begun.is_set():
            start = int(handler.headers.get("range", "bytes=0-")[6:-1])
            whole = {"content_range": f"bytes {start}-{len(TEXT) - 1}/{len(TEXT)}"}
            reply(handler, 206 if start else 200, TEXT[start:], **(whole if start else {}))
            return
        reply(handler, 200, TEXT[:1000], content_length=str(len(TEXT)))
        go_on.wait(60)
        handler.wfile.write(TEXT[1000:])

    shard = Shard(answers(say).url, len(TEXT))
    kept = tmp_path / "kept"
    one, other = opened(tmp_path), opened(tmp_path)
    coming = one._coming

    def told(answer):
        for piece in coming(answer):
            yield piece
            begun.set()  # it has been written

    monkeypatch.setattr(one, "_coming", told)
    first = asyncio.create_task(asyncio.to_thread(one.whole, shard))
    await asyncio.to_thread(begun.wait, 60)
    try:
        assert (await asyncio.to_thread(other.whole, shard)).read_bytes() == TEXT
    finally:
        go_on.set()
    assert (await asyncio.wait_for(first, 60)).read_bytes() == TEXT
    assert [path.suffix for path in kept.iterdir()] == [".shard"]


def test_an_unfinished_shard_of_another_process_makes_no_room(tmp_path):
    found = opened(tmp_path, 2500)
    part, old, new, last = (tmp_path / "kept" / name for name in ("a.part", "b.ids", "c", "d"))
    for age, path in enumerate((part, old)):
        path.write_bytes(bytes(1000))
        os.utime(path, (1 + age, 1 + age))
    with open(part, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found.put(new, bytes(1000))
        assert part.exists()
        assert not old.exists()
    found.put(last, bytes(1000))
    assert not part.exists()
    assert new.exists()


def test_a_file_gets_its_name_when_the_disk_has_it(answers, tmp_path, monkeypatch):
    synced = []
    packed = zstd(TEXT)
    monkeypatch.setattr(files.os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    url = answers(lambda h: reply(h, 200, packed)).url
    found = opened(tmp_path)
    shard = Shard(url.replace(".txt", ".txt.zst"), len(packed))
    assert [found.whole(shard).stat().st_ino] == synced
    text = Path(found.unpacked(shard, FileKind("text", "zstd")).name)
    found.put(tmp_path / "kept" / "0.block", TEXT)
    assert synced[1:] == [p.stat().st_ino for p in (text, tmp_path / "kept" / "0.block")]


@pytest.mark.parametrize("content", [b"", bytes(20_000)])
async def test_a_kept_shard_that_lost_its_content_is_fetched_anew(web, tmp_path, content):
    shard = stream(f"{web.url}/SHA256SUMS", tmp_path).listing.shards[0]
    path = opened(tmp_path).whole(shard)
    text = path.read_bytes()
    path.write_bytes(content)
    again = opened(tmp_path)
    assert again.read(shard, 0, shard.size) == text
    path.write_bytes(content)  # while the daemon runs, it notices only a shorter file
    if not content:
        with pytest.raises(UsageFault, match="cut short"):
            again.read(shard, 0, shard.size)
        assert again.read(shard, 0, shard.size) == text


async def test_a_disk_that_fails_does_not_end_training(web, tmp_path, monkeypatch, caplog, opens):
    made = opens(f"{web.url}/SHA256SUMS", tmp_path)
    faults = [errno.EIO, errno.ENXIO]
    wanted = await made.rows(range(8))

    def failing(*what):
        if faults:
            raise OSError(faults.pop(), "the disk fails")
        return open(*what)

    monkeypatch.setattr(stream_module, "open", failing, raising=False)
    assert (await asyncio.wait_for(made.rows(range(8)), 20) == wanted).all()
    assert "the disk fails; tried again" in caplog.text


async def test_tokens_on_a_disk_that_can_only_be_read_are_read(web, tmp_path, monkeypatch, opens):
    made = opens(f"{web.url}/SHA256SUMS", tmp_path)
    wanted = await made.rows(range(8))
    fixed = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr(files.os, "utime", Mock(side_effect=fixed))
    assert (await made.rows(range(8)) == wanted).all()


def test_a_shard_of_this_disk_that_is_cut_while_it_is_read(tmp_path):
    path = write(tmp_path / "a.jsonl", documents(50))
    shard = shard_of(path)
    found = opened(tmp_path)
    assert len(given(found, shard)) == 50
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UsageFault, match="cut short"):
        given(found, shard, part=Part(0, 900, 1100))


async def test_a_list_in_the_directory_that_a_peer_has_for_all_runs(tmp_path, opens):
    folder = published(tmp_path / "all", {"a.jsonl": documents(50)}).parent
    assert is_streamed("file:SHA256SUMS", Places(str(folder)))
    assert not is_streamed("file:a.jsonl", Places(str(folder / "SHA256SUMS")))
    made = opens("file:SHA256SUMS", tmp_path, places=Places(str(folder), own=True))
    assert (await made.rows(range(2))).shape == (2, 17)
