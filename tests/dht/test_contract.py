"""One suite for the adapter and the fake: what every DirectoryPort promises."""

from __future__ import annotations

import time

import pytest

from node.core.errors import WireError
from node.dht.settings import DirectorySettings


async def test_a_first_peer_reads_its_own_record(three, body) -> None:
    first = three.directories[0]
    assert await first.read() == {}
    assert await first.publish(body("first", maddrs=("/ip4/127.0.0.1/tcp/1",)))
    entries = await first.read()
    assert list(entries) == [first.me]
    assert entries[first.me].body == body("first", maddrs=("/ip4/127.0.0.1/tcp/1",))


async def test_everybody_sees_everybody_in_order(three, body, eventually) -> None:
    for i, directory in enumerate(three.directories):
        await directory.publish(body(f"peer-{i}", stage=i))

    async def complete(directory):
        entries = await directory.read()
        return len(entries) == 3 and entries

    for reader in three.directories:
        entries = await eventually(lambda reader=reader: complete(reader))
        assert list(entries) == sorted(d.me for d in three.directories)
        assert [entries[d.me].body.stage for d in three.directories] == [0, 1, 2]


async def test_a_new_record_replaces_the_old_one(three, body, eventually) -> None:
    writer, reader = three.directories[:2]
    for epoch in (1, 2, 3):
        await writer.publish(body(epoch=epoch))

        async def seen(epoch=epoch):
            entry = (await reader.read()).get(writer.me)
            return entry is not None and entry.body.epoch == epoch

        assert await eventually(seen)


async def sees(reader, writer) -> bool:
    return writer.me in await reader.read()


async def test_a_withdrawn_peer_is_gone_and_may_come_back(three, body, eventually) -> None:
    writer, reader = three.directories[:2]

    async def sees_not():
        return not await sees(reader, writer)

    await writer.publish(body())
    assert await eventually(lambda: sees(reader, writer))
    await writer.withdraw()
    assert not await sees(writer, writer)
    assert await eventually(sees_not)
    await writer.publish(body())
    assert await eventually(lambda: sees(reader, writer))


async def test_a_record_ends_with_its_life(three, body, eventually) -> None:
    writer, reader = three.directories[:2]
    posted = three.clocks[0].stands = time.time()
    await writer.publish(body())
    assert await eventually(lambda: sees(reader, writer))
    await writer.close()
    three.clocks[1].stands = posted + DirectorySettings().ttl_s - 1
    assert await sees(reader, writer)
    three.clocks[1].stands = posted + DirectorySettings().ttl_s + 1
    assert not await sees(reader, writer)


async def test_a_body_others_would_refuse_is_not_posted(three, body) -> None:
    directory = three.directories[0]
    with pytest.raises(WireError):
        await directory.publish(body(speed=float("nan")))
    assert await directory.read() == {}
