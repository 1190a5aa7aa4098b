"""A host behind a router: maps the given ports, prints the mappings it gets, ends with its input.

One JSON object a line. A listener on every TCP port answers "here".
"""

import asyncio
import json
import sys

import uvloop

from node.reach.portmap import PortMapper
from node.telemetry.events import Journal


async def here(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"here")
    writer.close()


async def main(ports: list[tuple[str, int]]) -> None:
    loop = asyncio.get_running_loop()
    servers = [await asyncio.start_server(here, "0.0.0.0", p) for name, p in ports if name == "tcp"]
    ended = loop.run_in_executor(None, sys.stdin.read)
    mapper = PortMapper(Journal(), lambda: None)
    mapper.want(ports)
    await mapper.start()
    said = None
    while not ended.done():
        mapped = [[m.protocol, m.internal, m.host, m.external, m.how] for m in mapper.mappings]
        now = {"what": "state", "mappings": mapped, "tried": mapper.tried}
        if now != said:
            said = now
            print(json.dumps(now), flush=True)
        await asyncio.wait([ended], timeout=0.05)
    await mapper.close()
    for server in servers:
        server.close()
    print(json.dumps({"what": "closed", "left": {"mapped": mapper.mappings}}), flush=True)


if __name__ == "__main__":
    uvloop.run(main([(text.split(":")[0], int(text.split(":")[1])) for text in sys.argv[1:]]))
