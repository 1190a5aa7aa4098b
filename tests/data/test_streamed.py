"""A stream against a real server that stops, lies and comes back; and its cap."""

import asyncio
import os
import threading

import numpy as np
import pytest
import torch

from node.core.errors import NetworkFault, Refused, UsageFault
from node.data.settings import OWN_MANIFEST, DataSettings
from node.data.sources import open_source
from node.data.streamed import files, shards
from node.data.streamed.shards import is_streamed
from node.model.documents import NO_TARGET
from node.stage.text import StreamedText
from tests.data.streamed import documents, listed, published, served, stream

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture
def web(tmp_path):
    """A server of eight shards of text, 20,000 bytes each, and of their list."""
    texts = ["".join(f"{i}.{j:05} " for j in range(2500))[:20000] for i in range(8)]
    shards = {f"part-{i:03}.txt": [text] for i, text in enumerate(texts)}
    with served(published(tmp_path / "web", shards).parent) as server:
        yield server


async def rows(made, count: int, at_once: int = 16) -> np.ndarray:
    """The first `count` samples, read `at_once` at a time."""
    found = [await made.rows(range(i, i + at_once)) for i in range(0, count, at_once)]
    return np.concatenate(found)


def text_of(row: np.ndarray) -> bytes:
    return bytes(row.astype(np.uint8))


async def test_samples_are_windows_of_the_text_wherever_one_begins(web, tmp_path, opens):
    source = f"{web.url}/SHA256SUMS"
    one, two = (opens(source, tmp_path / name, windows=200) for name in ("a", "b"))
    wholes = [p.read_bytes() for p in sorted(web.directory.glob("*.txt"))]
    first = await rows(one, 512)
    for row in first:
        # Two neighbouring shards may meet in a window.
        assert any(text_of(row)[:8] in whole for whole in wholes)
    assert len({row.tobytes() for row in first}) > 480
    later = await two.rows(range(300, 316))
    assert (later == first[300:316]).all()
    assert one.sha256 == two.sha256


async def test_held_out_text_is_never_trained_on(web, tmp_path, opens):
    made = opens(f"{web.url}/SHA256SUMS", tmp_path, windows=255, holdout=0.05)
    assert made.held_out_windows
    held = await made.held_out_rows(0, 16)
    text = b"".join(p.read_bytes() for p in sorted(web.directory.glob("*.txt")))
    edge = int(len(text) * 0.95)
    assert all(text.find(text_of(row)) >= edge for row in held)
    trained = await rows(made, made.pieces.count // 4 * 255 // 16 * 16)
    assert max(text.find(text_of(row)) for row in trained) < edge
    assert opens(f"{web.url}/SHA256SUMS", tmp_path, holdout=0.0).held_out_windows == 0


async def test_a_micro_batch_goes_over_a_small_text_many_times(tmp_path, opens):
    """Every pass has pieces of its own, and this micro-batch needs those of all its passes at
    once."""
    source = published(tmp_path / "files", {f"{i}.txt": [f"{i} cat " * 200] for i in range(3)})
    made = opens(f"file:{source}", tmp_path, windows=2)
    assert made.pieces.count == 1
    at_once = await asyncio.wait_for(made.rows(range(64)), 20)
    assert (at_once == await rows(made, 64, 1)).all()


async def test_a_server_that_is_away_is_asked_until_it_is_back(web, tmp_path, caplog, opens):
    caplog.set_level("INFO")
    made = opens(f"{web.url}/SHA256SUMS", tmp_path)
    web.down = True
    asking = asyncio.ensure_future(made.rows(range(8)))
    await asyncio.sleep(0.3)
    assert not asking.done()
    assert caplog.text.count("cannot be had") == 1
    web.down = False
    found = await asyncio.wait_for(asking, 20)
    assert "can be had again" in caplog.text
    assert (await opens(made.listing.source, tmp_path / "other").rows(range(8)) == found).all()


async def test_what_came_of_a_shard_is_not_fetched_again(web, tmp_path, opens):
    made = opens(f"{web.url}/part-000.txt", tmp_path)
    web.cut = 12000
    web.asked[:] = []
    await asyncio.wait_for(made.rows(range(8)), 20)
    assert made.files.received == 20000
    assert [r for m, _, r in web.asked if m == "GET"] == ["", "bytes=12000-"]


async def test_large_shards_are_read_in_parts_alone(web, tmp_path, monkeypatch, opens):
    source = f"{web.url}/part-{{000..007}}.txt"
    wanted = await opens(source, tmp_path / "whole").rows(range(8))
    monkeypatch.setattr(files, "WHOLE", 0)
    made = opens(source, tmp_path)
    assert (await made.rows(range(8)) == wanted).all()
    assert 0 < made.files.received < 8 * 20000 / 2
    web.parts = False
    with pytest.raises(UsageFault, match="gives no parts"):
        made.files.read(made.listing.shards[7], 0, 10)
    web.parts = True
    made.files.read(made.listing.shards[7], 0, 10)
    os.utime(web.directory / "part-007.txt", (1, 1))
    with pytest.raises(UsageFault, match="another version"):
        made.files.read(made.listing.shards[7], 0, 10)


async def test_parts_of_a_shard_with_a_new_tag_are_read_again(web, tmp_path, monkeypatch, opens):
    monkeypatch.setattr(files, "WHOLE", 0)
    made = opens(f"{web.url}/part-{{000..007}}.txt", tmp_path)
    for path in web.directory.glob("*.txt"):
        os.utime(path, (1, 1))
    assert len(await asyncio.wait_for(made.rows(range(8)), 20)) == 8


async def test_a_shard_with_another_hash_is_never_trained_on(web, tmp_path, caplog):
    made = stream(f"{web.url}/SHA256SUMS", tmp_path)
    for path in web.directory.glob("*.txt"):
        path.write_bytes(b"x" * 20000)
    asking = asyncio.ensure_future(made.rows(range(8)))
    await asyncio.sleep(0.5)
    assert not asking.done()
    assert "is not the shard of the list" in caplog.text
    asking.cancel()
    await made.close()
    assert not list((tmp_path / "data" / "stream").glob("*.ids"))


async def test_the_cap_is_never_exceeded_and_every_sample_comes(web, tmp_path, opens):
    cap = 120_000
    most = 0
    made = opens(f"{web.url}/SHA256SUMS", tmp_path, windows=250, cap=cap)
    folder = tmp_path / "data" / "stream"
    stat = files._stat

    def watch():
        nonlocal most
        before: dict[str, int] = {}
        while not ended.is_set():
            here = {p.name: s.st_size for p in folder.iterdir() if (s := stat(p)) is not None}
            # What both looks found was there at the same time, between them.
            most = max(most, sum(min(here[n], before[n]) for n in here.keys() & before.keys()))
            before = here

    count = made.pieces.count * 250 // 50 * 50
    ended = threading.Event()
    watching = asyncio.create_task(asyncio.to_thread(watch))
    assert len(await asyncio.wait_for(rows(made, count, 50), 120)) == count
    ended.set()
    await watching
    assert cap / 2 < most <= cap


async def test_a_restart_needs_no_server_for_what_is_here(web, tmp_path):
    source = f"{web.url}/SHA256SUMS"
    made = stream(source, tmp_path)
    digest = made.sha256
    found = await made.rows(range(8))
    await made.close()
    web.down = True
    again = stream(source, tmp_path, sha256=digest)
    assert (await asyncio.wait_for(again.rows(range(8)), 20) == found).all()
    await again.close()
    with pytest.raises(NetworkFault, match="503"):
        stream(source, tmp_path)


async def test_damaged_tokens_on_the_disk_are_made_anew(web, tmp_path, opens):
    source = f"{web.url}/SHA256SUMS"
    made = opens(source, tmp_path)
    found = await made.rows(range(8))
    await made.close()
    for path in (tmp_path / "data" / "stream").glob("*.ids"):
        path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    assert (await opens(source, tmp_path).rows(range(8)) == found).all()


async def test_what_is_expected_is_there_before_it_is_asked_for(web, tmp_path, opens):
    made = opens(f"{web.url}/SHA256SUMS", tmp_path)
    made.expect(range(64))
    await asyncio.wait_for(asyncio.gather(*made._making.values()), 20)
    web.down = True
    assert len(await asyncio.wait_for(rows(made, 64), 20)) == 64


async def test_a_stream_of_documents_keeps_them_apart(web, tmp_path):
    source = published(tmp_path / "here", {"a.jsonl": documents(200)})
    made = stream(f"file:{source}", tmp_path, seq_len=64, masked=True)
    text = StreamedText(made, 16)
    tokens, targets = (await text.fetch(range(16)))()
    _, held = await text.fetch_held_out(0)
    assert int((tokens == 257).sum()) == int((targets == NO_TARGET).sum()) > 0
    assert torch.equal(targets == NO_TARGET, tokens == 257)
    assert (held == NO_TARGET).any()
    await text.close()
    with pytest.raises(UsageFault, match="document_mask = true"):
        stream(f"{web.url}/SHA256SUMS", tmp_path / "plain", masked=True)


async def test_text_without_a_document_in_a_piece_is_that_of_the_next(tmp_path, opens):
    source = published(tmp_path / "here", {"a.jsonl": ["x" * 20000, *documents(200)]})
    made = opens(f"file:{source}", tmp_path, holdout=0.0)
    assert len(await asyncio.wait_for(rows(made, 64), 20)) == 64


async def test_held_out_text_in_which_no_document_begins_is_refused(tmp_path, opens):
    source = published(tmp_path / "here", {"a.jsonl": [*documents(200), "x" * 20000]})
    made = opens(f"file:{source}", tmp_path, holdout=0.1)
    assert made.pieces.held > 1
    with pytest.raises(UsageFault, match="no document begins in the last") as fault:
        made.measured()
    assert str(made.pieces.held_bytes) in fault.value.what
    assert "data.holdout" in fault.value.next_step
    with pytest.raises(UsageFault, match="which are held out"):
        await asyncio.wait_for(made.held_out_rows(0, 4), 20)
    assert made.trouble == ""  # text to train on comes
    assert len(await asyncio.wait_for(made.rows(range(4)), 20)) == 4


def test_open_source_compares_the_list_and_asks_for_the_measure(web, tmp_path):
    def opened(**more):
        settings = DataSettings(source=f"{web.url}/SHA256SUMS", **more)
        return open_source(settings, 16, 300, tmp_path, OWN_MANIFEST)[0]

    with pytest.raises(UsageFault, match=r"data\.windows = 0"):
        opened()
    made = opened(windows=1)
    assert made.measured() == 4096 // 16 - 1 or made.measured() == 4096 // 16
    asyncio.run(made.close())
    with pytest.raises(Refused, match="sha256"):
        opened(windows=1, sha256="0" * 64)


@pytest.mark.parametrize(
    ("source", "streamed"),
    [
        ("http://host/a.jsonl", True),
        ("https://host/SHA256SUMS", True),
        ("file:/x/SHA256SUMS", True),
        ("file:SHA256SUMS.txt", True),
        ("file:/x/a.txt", False),
        ("hf:owner/name:train", True),
        ("hf:/:train", False),
        ("builtin:pydoc", False),
        ("synthetic:3", False),
    ],
)
def test_a_source_is_streamed_or_read_whole(source, streamed):
    assert is_streamed(source, OWN_MANIFEST) == streamed


def test_the_home_of_nobody_is_said():
    with pytest.raises(UsageFault, match="no such user"):
        is_streamed("hf:~nobody-here/a", OWN_MANIFEST)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("absent.txt", "404"),
        ("SHA256SUMS.bad", "line 2: not a hash and a name"),
        ("SHA256SUMS.empty", "has no text"),
        ("SHA256SUMS.far", "404"),
        ("a.png", "unknown ending"),
        ("a-{9..2}.txt", "is -6 shards"),
        ("a-{0..999999999}.txt", "is 1000000000 shards"),
        (f"a-{{0..{'9' * 5000}}}.txt", "is no range of shards"),
    ],
)
def test_what_is_no_source_is_said(web, tmp_path, path, why):
    folder = web.directory
    (folder / "a.png").write_text("x")
    good = (folder / "SHA256SUMS").read_text().splitlines()[0]
    (folder / "SHA256SUMS.bad").write_text(f"{good}\nno hash here\n")
    (folder / "SHA256SUMS.empty").write_text("")
    (folder / "SHA256SUMS.far").write_text(f"{'0' * 64}  gone.txt\n")
    with pytest.raises(UsageFault, match=why):
        stream(f"{web.url}/{path}", tmp_path)


@pytest.mark.parametrize(
    ("url", "fault", "says"),
    [
        ("http://127.0.0.1:9/SHA256SUMS", NetworkFault, "cannot fetch"),
        ("http://[broken/a.txt", UsageFault, "no address"),
    ],
)
def test_an_address_that_nobody_serves(tmp_path, url, fault, says):
    with pytest.raises(fault, match=says):
        stream(url, tmp_path)


@pytest.mark.parametrize(
    ("limit", "most", "says"),
    [("MOST_SHARDS", 3, "more than 3 shards"), ("MOST_LIST", 100, "larger than 100 bytes")],
)
def test_a_list_that_is_too_long(web, tmp_path, monkeypatch, limit, most, says):
    monkeypatch.setattr(shards, limit, most)
    with pytest.raises(UsageFault, match=says):
        stream(f"{web.url}/SHA256SUMS", tmp_path)


def test_the_hash_of_a_list_says_names_sizes_and_hashes(web, tmp_path):
    before = stream(f"{web.url}/SHA256SUMS", tmp_path / "a").sha256
    assert before == stream(f"file:{web.directory}/SHA256SUMS", tmp_path / "b").sha256
    (web.directory / "part-003.txt").write_bytes(b"y" * 20000)
    listed(web.directory)
    assert stream(f"{web.url}/SHA256SUMS", tmp_path / "c").sha256 != before
