"""A peer as a process of its own, for tests: prints one JSON line when it serves, ends when its
input ends.

argv: JSON with the options of ``make_transport``.
"""

import asyncio
import json
import sys

from node.core.errors import TuttiError
from tests.transport.conftest import make_transport


async def main() -> None:
    transport = make_transport(**json.loads(sys.argv[1]))
    try:
        await transport.start()
    except TuttiError as e:
        print(json.dumps({"error": str(e)}), flush=True)
        return
    p2p = transport.p2p
    facts = {
        "peer": p2p.peer_id,
        "multiaddrs": p2p.addresses(),
        "p2pd": p2p.pid,
        "runtime": str(p2p.runtime),
    }
    print(json.dumps(facts), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


if __name__ == "__main__":
    asyncio.run(main())
