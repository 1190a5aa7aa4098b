"""One suite for the adapter and the fake: what every DirectoryPort promises."""

import time

import pytest

from node.core.errors import WireError
from node.dht.settings import DirectorySettings
from tests.dht.conftest import eventually


async def test_everybody_sees_everybody_in_order(three, body) -> None:
    for i, directory in enumerate(three.directories):
        assert directory.me not in await directory.read()
        assert await directory.publish(body(f"peer-{i}", stage=i))

    async def complete(directory):
        entries = await directory.read()
        return len(entries) == 3 and entries

    for reader in three.directories:
        entries = await eventually(lambda reader=reader: complete(reader))
        assert list(entries) == sorted(d.me for d in three.directories)
        assert [entries[d.me].body.stage for d in three.directories] == [0, 1, 2]


async def test_a_new_record_replaces_the_old_one(three, body) -> None:
    writer, reader = three.directories[:2]
    for epoch in (1, 2, 3):
        await writer.publish(body(epoch=epoch))

        async def seen(epoch=epoch):
            entry = (await reader.read()).get(writer.me)
            return entry is not None and entry.body.epoch == epoch

        assert await eventually(seen)


async def sees(reader, writer) -> bool:
    return writer.me in await reader.read()


async def test_a_withdrawn_peer_is_gone_and_may_come_back(three, body) -> None:
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


async def test_a_record_ends_with_its_life(three, body) -> None:
    writer, reader = three.directories[:2]
    posted = three.clocks[0].held_wall = time.time()
    await writer.publish(body())
    assert await eventually(lambda: sees(reader, writer))
    await writer.close()
    three.clocks[1].held_wall = posted + DirectorySettings().ttl_s - 1
    assert await sees(reader, writer)
    three.clocks[1].held_wall = posted + DirectorySettings().ttl_s + 1
    assert not await sees(reader, writer)


async def found(reader, topic: str) -> dict:
    return {peer: posting.body for peer, posting in (await reader.look(topic)).items()}


async def test_postings_are_seen_under_their_topic_alone(three, body) -> None:
    first, second, third = three.directories
    cell = f"cell/{'0a' * 8}"
    prefix = "cells/3f"
    pair = "outer/7/1.2"
    await first.publish(body())
    for writer, topic, said in (
        (first, cell, b"first"),
        (second, cell, b"second"),
        (second, prefix, b"\x00leader\n"),
        (third, pair, bytes(2048)),
    ):
        assert await writer.post(topic, said, 60.0)

    async def complete(reader) -> bool:
        return (
            await found(reader, cell) == {first.me: b"first", second.me: b"second"}
            and await found(reader, prefix) == {second.me: b"\x00leader\n"}
            and await found(reader, pair) == {third.me: bytes(2048)}
        )

    for reader in three.directories:
        assert await eventually(lambda reader=reader: complete(reader))
        assert list(await reader.look(cell)) == sorted([first.me, second.me])
        assert await reader.look("outer/8/1.2") == {}
    assert all(entry.body == body() for entry in (await third.read()).values())


async def test_a_newer_posting_that_expires_sooner_replaces_the_older(three) -> None:
    writer, reader = three.directories[:2]
    for said, life in ((b"1", 60.0), (b"2", 30.0), (b"3", 90.0)):
        assert await writer.post("outer/7/all", said, life)

        async def seen(said=said):
            return await found(reader, "outer/7/all") == {writer.me: said}

        assert await eventually(seen)
    posting = (await reader.look("outer/7/all"))[writer.me]
    assert posting.peer == writer.me
    assert posting.seq / 1000 == pytest.approx(time.time(), abs=600)


async def test_a_posting_ends_with_its_life(three) -> None:
    writer, reader = three.directories[:2]
    posted = three.clocks[0].held_wall = three.clocks[1].held_wall = time.time()
    assert await writer.post("cells/00", b"leads", 100.0)

    async def seen():
        return await found(reader, "cells/00") == {writer.me: b"leads"}

    assert await eventually(seen)
    three.clocks[1].held_wall = posted + 99
    assert await seen()
    three.clocks[1].held_wall = posted + 101
    assert await found(reader, "cells/00") == {}


async def test_nothing_is_posted_that_others_would_refuse(three) -> None:
    directory = three.directories[0]
    for topic, said, life in (
        ("peers", b"x", 60.0),
        ("outer/07/all", b"x", 60.0),
        ("outer/7/all", b"", 60.0),
        ("outer/7/all", bytes(2049), 60.0),
        ("outer/7/all", b"x", 0.0),
        ("outer/7/all", b"x", float("nan")),
    ):
        with pytest.raises(WireError):
            await directory.post(topic, said, life)
    for topic in ("peers", "", "cell/", "cells/g0"):
        with pytest.raises(WireError):
            await directory.look(topic)
    assert await directory.look("outer/7/all") == {}
