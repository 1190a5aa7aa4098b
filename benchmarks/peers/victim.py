"""A member of a round in a process of its own, which ends itself with SIGKILL at a certain point of
it, or stops with SIGSTOP.

    python -m benchmarks.peers.victim PHASE DEADLINE_S EPOCH

It is the daemon's own round, not a copy: what stops it hangs on the words it uses. Speaks lines of
JSON: says where it listens, hears where the others do, says that it is ready, hears that the round
begins; then it dies, or is neither dead nor alive.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from benchmarks.averaging import meeting
from node.averaging.exchange import member, owner, parcel
from node.averaging.exchange.service import CellRound
from node.core.ids import PeerId
from testbed.fakes.memory_net import MemoryNet, MemoryTransport

PHASES = {
    "frozen": "frozen (SIGSTOP) after some of its chunks",
    "before": "killed: before it sends",
    "sending": "killed: after some of its chunks",
    "sent": "killed: after it sent all, before its own part is reduced",
    "serving": "killed: while it sends its reduced part back",
}
SOME_SENT, SOME_SERVED = 10, 30
"""Number of chunks given to the others, of 48, and number of chunks served, of 48, at the victim's
death."""


def die(how: signal.Signals = signal.SIGKILL) -> None:
    """Kill this process at once: no handler runs. SIGKILL closes the sockets; after SIGSTOP they
    stay open, and the kernel still accepts data."""
    os.kill(os.getpid(), how)


class Waits(Executor):
    """Is asked to reduce the first part when all have given to it, and never begins."""

    def __init__(self, asked: Callable[[], None]) -> None:
        self._asked = asked

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._asked()
        return Future()


def arm(phase: str, transport: MemoryTransport, exchanges: int) -> Executor | None:
    """Set the trap; the executor that the round needs for it."""
    if phase == "before":
        _override(member, "expected_head", lambda *_: die())
    elif phase in ("sending", "frozen"):
        _replace(
            member,
            messages=_counted(SOME_SENT, signal.SIGSTOP if phase == "frozen" else signal.SIGKILL),
        )
    elif phase == "serving":
        _replace(owner, messages=_counted(SOME_SERVED))
    else:
        left = exchanges + 1

        def done(*_: Any, **__: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                die()

        # An exchange is counted when its answer is here, so what went up is in the others' means.
        transport.count = lambda peer, sent=0, received=0, plane="": (
            done() if sent and received else None
        )
        return Waits(done)
    return None


def _override(module: ModuleType, name: str, value: object) -> None:
    vars(module)[name] = value


def _replace(module: ModuleType, **names: Any) -> None:
    vars(module)["parcel"] = SimpleNamespace(**(vars(parcel) | names))


def _counted(
    most: int, how: signal.Signals = signal.SIGKILL
) -> Callable[[Iterable[torch.Tensor], int], Iterator[bytes]]:
    said = 0

    def messages(parts: Iterable[torch.Tensor], size: int) -> Iterator[bytes]:
        nonlocal said
        for message in parcel.messages(parts, size):
            if said == most:
                die(how)
            said += 1
            yield message

    return messages


async def main(phase: str, deadline_s: float, epoch: int) -> None:
    """One round, of which it does not see the end."""
    net = MemoryNet()
    transport = net.transport(meeting.FAULTY)
    request = meeting.request(meeting.FAULTY, epoch, meeting.owners(), deadline_s)
    groups = [request.groups_of(o, meeting.SETTINGS.group_bytes) for o in meeting.SURVIVORS]
    executor = arm(phase, transport, sum(map(len, groups)))
    cell = CellRound(transport, meeting.SETTINGS, executor=executor, chunk=meeting.CHUNK)
    await transport.start()
    _say(transport.address)
    for peer, address in json.loads(await asyncio.to_thread(sys.stdin.readline)).items():
        net.elsewhere(PeerId(peer), address)
    _say("ready")
    await asyncio.to_thread(sys.stdin.readline)
    await cell.run_round(request, lambda means: means)
    _say("survived")
    await cell.close()
    await net.close()


def _say(line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
