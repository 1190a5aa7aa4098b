"""A peer as a process of its own, for tests: prints one JSON line when it serves, ends when its
input ends.

argv: JSON with the fields of TransportSettings, and "run".
"""

import asyncio
import json
import os
import sys

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from node.core.errors import TuttiError
from node.identity.keys import Identity
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from node.transport.handshake import Facts
from node.transport.service import Transport
from node.transport.settings import TransportSettings
from protos import state_pb2, state_pb2_grpc, training_pb2, training_pb2_grpc


class Parrot(training_pb2_grpc.TrainingServicer):
    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    async def Tell(self, request, context):
        return training_pb2.NoteReply(accepted=True, reason=self.transport.caller(context))


class Source(state_pb2_grpc.StateServicer):
    async def Fetch(self, request, context):
        piece = bytes(1 << 20)
        for offset in range(0, request.length, len(piece)):
            yield state_pb2.StateChunk(offset=offset, data=piece)


def new_transport(run: str = "a" * 64, admit=lambda peer, hello: None, **settings) -> Transport:
    transport = Transport(
        Identity.ephemeral(),
        TransportSettings(**{"host": "127.0.0.1", **settings}),
        Journal(),
        Metrics(),
        lambda: Facts(run, "test", "0"),
        admit,
    )
    training_pb2_grpc.add_TrainingServicer_to_server(Parrot(transport), transport.server)
    state_pb2_grpc.add_StateServicer_to_server(Source(), transport.server)
    return transport


async def main() -> None:
    transport = new_transport(**json.loads(sys.argv[1]))
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
    if os.environ.get("UV") == "uv":
        import uvloop

        uvloop.install()
    asyncio.run(main())
