"""Servers as people have them: without HEAD, busy, packing what nobody asked them to pack."""

import asyncio
import gzip

import pytest

from node.core.errors import NetworkFault, UsageFault
from node.data.kinds import FileKind
from node.data.streamed import files
from node.data.streamed.files import Shard, size_and_tag
from tests.data.streamed import TEXT, opened, reply, stream


def part_of(handler, tag: str = '"one"', **more: str) -> None:
    """Answer with the requested range, or with the whole file."""
    asked = handler.headers.get("range", "").removeprefix("bytes=")
    if not asked:
        reply(handler, 200, TEXT, etag=tag, **more)
        return
    start, _, stop = asked.partition("-")
    first = int(start)
    last = int(stop or len(TEXT) - 1)
    whole = {"content_range": f"bytes {first}-{last}/{len(TEXT)}", "etag": tag}
    reply(handler, 206, TEXT[first : last + 1], **{**whole, **more})


@pytest.mark.parametrize("status", [403, 404, 405, 501])
@pytest.mark.parametrize("ranges", [True, False])
def test_a_server_without_head_is_asked_for_a_byte(answers, tmp_path, status, ranges):
    def say(handler):
        if handler.command == "HEAD":
            reply(handler, status, b"")
        elif ranges:
            part_of(handler)
        else:
            reply(handler, 200, TEXT, etag='"one"')

    server = answers(say)
    found = opened(tmp_path)
    assert size_and_tag(server.url, found._client) == (len(TEXT), '"one"')
    assert found.read(Shard(server.url, len(TEXT)), 5, 9) == TEXT[5:9]


async def test_403_is_patience_for_ten_minutes_and_said(answers, tmp_path, monkeypatch, small):
    refuses = []

    def say(handler):
        if refuses and handler.command == "GET":
            refuses.pop()
            reply(handler, 403, b"")
        else:
            part_of(handler)

    server = answers(say)
    made = stream(server.url, tmp_path)
    refuses += [1, 2, 3]
    said = list[str]()
    failed = made._failed

    async def told(e):
        await failed(e)
        said.append(made.trouble)

    monkeypatch.setattr(made, "_failed", told)
    assert len(await asyncio.wait_for(made.rows(range(4)), 60)) == 4
    assert said
    assert all("the server says 403" in trouble for trouble in said)
    assert made.trouble == ""
    await made.close()


async def test_a_refusal_after_failures_of_the_network_is_the_first_one(
    answers, tmp_path, caplog, small
):
    says = []

    def say(handler):
        if says and handler.command == "GET":
            reply(handler, says.pop(0), b"")
        else:
            part_of(handler)

    made = stream(answers(say).url, tmp_path)
    says += [404, 503, 503, 503, 503, 404]
    assert len(await asyncio.wait_for(made.rows(range(4)), 60)) == 4
    assert not says
    assert "other text" not in caplog.text
    await made.close()


@pytest.mark.parametrize(("total", "refusals"), [("*", 0), ("9", 1)])
def test_the_rest_of_a_shard_comes_without_a_total_or_all_of_it_is_asked_for(
    answers, tmp_path, total, refusals
):
    came = []

    def say(handler):
        if not came:
            came.append(1000)
            handler.close_connection = True
            reply(handler, 200, TEXT[:1000], content_length=str(len(TEXT)))
        elif handler.headers.get("range"):
            part_of(handler, content_range=f"bytes 1000-{len(TEXT) - 1}/{total}")
        else:
            part_of(handler)

    server = answers(say)
    found = opened(tmp_path)
    shard = Shard(server.url, len(TEXT))
    with pytest.raises(NetworkFault, match="1000 bytes"):
        found.whole(shard)
    for _ in range(refusals):
        with pytest.raises(UsageFault, match="another part"):
            found.whole(shard)
    assert found.whole(shard).read_bytes() == TEXT
    assert server.headers[1]["range"] == "bytes=1000-"


def test_403_for_longer_is_a_refusal(answers, tmp_path, monkeypatch):
    server = answers(lambda handler: reply(handler, 403, b""))
    found = opened(tmp_path)
    shard = Shard(server.url, len(TEXT))
    with pytest.raises(NetworkFault, match="403"):
        found.read(shard, 0, 10)
    monkeypatch.setattr(files, "FORBIDDEN_S", 0.0)
    with pytest.raises(UsageFault, match="403"):
        found.read(shard, 0, 10)


def test_what_a_server_packs_unasked_is_unpacked_where_all_of_it_comes(answers, tmp_path):
    packed = gzip.compress(TEXT)

    def say(handler):
        if handler.headers.get("range") and handler.command == "GET":
            part_of(handler)
        else:
            reply(handler, 200, packed, content_encoding="gzip")

    server = answers(say)
    found = opened(tmp_path)
    size, _ = size_and_tag(server.url, found._client)
    assert size == len(TEXT)
    assert found.read(Shard(server.url, size), 0, len(TEXT)) == TEXT
    stored = server.url.replace("a.txt", "a.txt.gz")  # a packed file, of which some say the same
    assert size_and_tag(stored, found._client)[0] == len(packed)
    assert found.whole(Shard(stored, len(packed))).read_bytes() == packed


def test_packed_parts_and_other_parts_are_refused(answers, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WHOLE", 0)
    wrong = {}

    def say(handler):
        part_of(handler, **(wrong if handler.command == "GET" else {}))

    server = answers(say)
    found = opened(tmp_path)
    shard = Shard(server.url, len(TEXT))
    for more, says in (
        ({"content_encoding": "gzip"}, "packs what it sends"),
        ({"content_range": f"bytes 0-9/{len(TEXT) + 1}"}, "gives no parts"),
        ({"content_range": "bytes */4000"}, "gives no parts"),
    ):
        wrong.clear()
        wrong.update(more)
        with pytest.raises(UsageFault, match=says):
            found.read(shard, 10, 20)
    wrong.clear()
    wrong["content_range"] = "bytes 10-19/*"  # a total that a server does not know
    assert found.read(shard, 10, 20) == TEXT[10:20]


@pytest.mark.parametrize(
    ("given", "same"), [('"one-gzip"', True), ('"one;gzip"', True), ('"two-gzip"', False)]
)
def test_a_tag_that_a_server_adds_to_names_the_same_version(
    answers, tmp_path, monkeypatch, given, same
):
    monkeypatch.setattr(files, "WHOLE", 0)

    def say(handler):
        if handler.command == "HEAD":
            part_of(handler, tag='"one"')
        elif "if-match" in handler.headers:
            reply(handler, 412, b"")
        else:
            part_of(handler, tag=given)

    server = answers(say)
    found = opened(tmp_path)
    shard = Shard(server.url, len(TEXT))
    if same:
        assert found.read(shard, 10, 20) == TEXT[10:20]
    else:
        with pytest.raises(UsageFault, match="another version"):
            found.read(shard, 10, 20)


def test_a_window_of_zstd_that_is_too_large_is_said(tmp_path):
    path = tmp_path / "a.txt.zst"
    # The head of a frame of unknown size, with a window of 2 GiB.
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([(31 - 10) << 3]) + b"\x01\x00\x00")
    found = opened(tmp_path)
    with pytest.raises(UsageFault, match="a window of 2048 MiB") as fault:
        found.unpacked(Shard(str(path), path.stat().st_size), FileKind("text", "zstd"))
    assert "--long=27" in fault.value.next_step
