"""Program on one host of the lab that announces and finds peers with node.reach.nearby; prints a
JSON line for each event."""

import asyncio
import contextlib
import json
import logging
import socket
import sys
import threading

import uvloop

from node.identity.keys import peer_id_of
from node.reach import nearby
from node.telemetry.events import Journal

PORT = 4001
RUN = "0123456789abcdef" * 4


def say(what: str, **more: object) -> None:
    print(json.dumps({"what": what, **more}), flush=True)


def advert(number: int, name: str) -> nearby.Advert:
    owner = peer_id_of(bytes(32))
    return nearby.Advert(RUN, "lab", owner, peer_id_of(bytes([number]) * 32), name, 3, PORT)


async def lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


async def tell(journal: Journal) -> None:
    with journal.subscribe() as events:
        async for event in events:
            say("event", kind=event.kind, level=event.level, text=event.text)


async def announce(number: str) -> None:
    """Listen, announce, take new names from standard input until it ends, say goodbye."""
    nearby.RESCAN_S = 0.5
    listening = socket.create_server(("::", PORT), family=socket.AF_INET6, dualstack_ipv6=True)
    journal = Journal()
    telling = asyncio.ensure_future(tell(journal))

    async def announced(name: str) -> nearby.Nearby:
        def told(kind: str, error: BaseException) -> None:
            say("error", text=f"{kind}: {error}")

        made = nearby.Nearby(journal, lambda found: None, told, advert(int(number), name))
        await made.start()
        return made

    announcer = await announced("first")
    reader = await lines()
    while name := (await reader.readline()).decode().strip():
        await announcer.close()
        announcer = await announced(name)
    await announcer.close()
    listening.close()
    telling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await telling
    tell_what_is_left()


async def browse() -> None:
    """Print the peers found whenever they change, until standard input ends."""
    journal = Journal()
    browser = nearby.Nearby(journal, lambda found: say("found", peer=found.peer, name=found.name))
    await browser.start()
    reader = await lines()
    before = None
    while not reader.at_eof():
        there = sorted(f.peer for f in browser.found)
        if there != before:
            before = there
            say("there", peers=there)
        await asyncio.sleep(0.02)
    await browser.close()
    tell_what_is_left()


async def look(seconds: str) -> None:
    """Look once, and dial every address that was found."""
    for one in await nearby.look(float(seconds)):
        for address in one.addresses:
            _, _, host, _, port, _, peer = address.split("/")
            with socket.create_connection((host, int(port)), timeout=5):
                say("connected", address=address, peer=peer, run=one.run_id, stages=one.stages)
    tell_what_is_left()


def tell_what_is_left() -> None:
    handlers = map(str, logging.getLogger("zeroconf").handlers)
    left = {
        "tasks": [t.get_name() for t in asyncio.all_tasks() - {asyncio.current_task()}],
        "threads": [t.name for t in threading.enumerate() if t is not threading.main_thread()],
        "handlers": [text for text in handlers if "Journal" in text],
    }
    say("closed", left=left)


if __name__ == "__main__":
    loop, verb, *rest = sys.argv[1:]
    run = uvloop.run if loop == "uvloop" else asyncio.run
    run({"announce": announce, "browse": browse, "look": look}[verb](*rest))
