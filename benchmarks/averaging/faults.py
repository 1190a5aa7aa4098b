"""A round of four with a faulty member: late, frozen, killed with SIGKILL at every phase, or lying.

Three survivors run the daemon's own round in this process, over gRPC on loopback sockets; the
fourth speaks the same protocol by hand and lies (benchmarks/averaging/rogue.py), or is a process of
its own that dies (benchmarks/peers/victim.py). A row's value is the time at which the last survivor
knew the round's outcome. Its target is that the outcome passes every check of
benchmarks/averaging/meeting.py, and that one repair by the survivors completes the round. Part 4 of
``python -m benchmarks.averaging``.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from statistics import median

import psutil

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it would tell of every connection that dies

from benchmarks.averaging import meeting
from benchmarks.averaging.meeting import (
    CHUNK,
    FAULTY,
    SETTINGS,
    SURVIVORS,
    repaired,
    request,
    wrong,
)
from benchmarks.averaging.rogue import Lie, Rogue, all_of, framed, one_of
from benchmarks.peers.victim import PHASES
from benchmarks.report import Report
from node.averaging.exchange.request import RoundOutcome
from node.averaging.exchange.service import CellRound
from node.core.ids import PeerId
from testbed.fakes.memory_net import MemoryNet

DEADLINE_S = 4.0
"""Deadline in s of the study that measured another engine in these rows."""
LATE_S = 0.5
"""A busy machine wakes nobody at the very instant of a deadline."""
HANGS = 3
"""Deadlines after which a survivor without an outcome is said to hang."""
TOO_LONG = 65 << 20
"""Bytes of a frame above the 64 MiB that gRPC takes in."""

LIES: dict[str, Lie] = {
    "never sends": Lie(silent=True),
    "stalls after some of its chunks": Lie(cut=lambda frames: frames[:3], since=1, stalls=True),
    "hangs up after some of its chunks": Lie(cut=lambda frames: frames[:3], since=1),
    "sends NaN": Lie(bend=all_of(float("nan"))),
    "sends one NaN": Lie(bend=one_of(float("nan"))),
    "sends Inf": Lie(bend=one_of(float("inf"))),
    "sends numbers 1000 times too large": Lie(bend=lambda tensor: tensor * 1000, owns=False),
    "wrong weight, 1e9": Lie(tokens=10**9, owns=False),
    "wrong weight, -3": Lie(tokens=2**64 - 3, owns=False),
    "wrong shape, one number": Lie(bend=lambda tensor: tensor.new_full((1,), 1000.0)),
    "half size": Lie(bend=lambda tensor: tensor[: tensor.numel() // 2]),
    "half of the bytes it announced": Lie(cut=lambda frames: frames[: len(frames) // 2]),
    "more bytes than it announced": Lie(
        cut=lambda frames: [*frames[:-1], framed(2 * CHUNK, 2 * CHUNK)]
    ),
    "a frame of 65 MiB": Lie(cut=lambda frames: [framed(TOO_LONG, TOO_LONG)]),
    "a frame that says it has 4 GiB": Lie(cut=lambda frames: [framed(64, 4 << 30)]),
}
"""Lies by name. A member with `owns=False` owns nothing, since its own parts would follow its lie:
an owner is believed if its numbers are finite."""


@dataclass(frozen=True)
class Played:
    """One round and its repair. `faults`: errors of the round; `said`: reasons of the survivors to
    go on without the faulty member."""

    seconds: float
    repair_s: float
    kept: int
    faults: list[str]
    said: set[str] = field(default_factory=set)


class Table:
    """The three survivors and, here or elsewhere, the fourth."""

    def __init__(self) -> None:
        self.net = MemoryNet()
        self.rounds: dict[PeerId, CellRound] = {}
        self.errors: list[str] = []

    async def start(self) -> None:
        for peer in SURVIVORS:
            transport = self.net.transport(peer)
            self.rounds[peer] = CellRound(
                transport,
                SETTINGS,
                chunk=CHUNK,
                on_error=lambda name, e: self.errors.append(f"{name}: {e!r}"),
            )
            await transport.start()

    async def close(self) -> None:
        for service in self.rounds.values():
            await service.close()
        await self.net.close()

    async def play(
        self, who: dict[str, PeerId], deadline_s: float, fourth: Callable[[], Awaitable[object]]
    ) -> Played:
        """A round with the fourth, then its repair without."""
        faulty = asyncio.ensure_future(fourth())
        try:
            return await self._played(who, deadline_s)
        except TimeoutError:
            return Played(HANGS * deadline_s, 0.0, 0, ["a survivor hangs", *self.errors])
        finally:
            faulty.cancel()
            await asyncio.gather(faulty, return_exceptions=True)

    async def _played(self, who: dict[str, PeerId], deadline_s: float) -> Played:
        seconds, first = await self._round(who, deadline_s, 0)
        faults = wrong(first, who)
        kept = min(len(o.fresh) for o in first.values())
        again = repaired(who, first)
        repair_s, second = await self._round(again, deadline_s, 1)
        faults += [f"after the repair: {text}" for text in wrong(second, again)]
        faults += [
            f"after the repair {p} lacks {', '.join(o.missing)}"
            for p, o in second.items()
            if o.missing
        ]
        said = {
            o.failed.get(FAULTY) or o.refused.get(FAULTY) or o.quarantined.get(FAULTY, "")
            for o in first.values()
        }
        # to which port says nothing
        said = {text.partition(": failed to connect")[0] for text in said if text}
        return Played(seconds, repair_s, kept, faults + self.errors, said)

    async def _round(
        self, who: dict[str, PeerId], deadline_s: float, attempt: int
    ) -> tuple[float, dict[PeerId, RoundOutcome]]:
        began = time.monotonic()
        asked = {peer: request(peer, 1, who, deadline_s, attempt) for peer in SURVIVORS}
        async with asyncio.timeout(HANGS * deadline_s):
            outcomes = await asyncio.gather(
                *(self.rounds[p].run_round(r, lambda means: means) for p, r in asked.items())
            )
        return time.monotonic() - began, dict(zip(asked, outcomes, strict=True))


@contextlib.asynccontextmanager
async def seated() -> AsyncIterator[Table]:
    """A table that is cleared afterwards, and stays silent about the connections that die in it."""
    table = Table()
    await table.start()
    try:
        yield table
    finally:
        await table.close()


async def lied(lie: Lie, deadline_s: float = DEADLINE_S) -> tuple[Played, dict[str, str]]:
    """The fourth lies; also how the owners took it."""
    async with seated() as table:
        transport = table.net.transport(FAULTY)
        rogue = Rogue(transport, lie)
        await transport.start()
        who = meeting.owners() if lie.owns else meeting.owners(SURVIVORS)
        played = await table.play(
            who, deadline_s, lambda: rogue.run(request(FAULTY, 1, who, deadline_s))
        )
        return played, dict(rogue.told)


async def killed(phase: str, deadline_s: float = DEADLINE_S) -> tuple[Played, str]:
    """The fourth dies or stops; also how it was found afterwards, "SIGKILL" or "SIGSTOP"."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.peers.victim",
        phase,
        str(deadline_s),
        "1",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        async with seated() as table, asyncio.timeout(60 + 2 * HANGS * deadline_s):
            said = process.stdout
            heard = process.stdin
            if said is None or heard is None:
                raise RuntimeError("a process without pipes")
            table.net.elsewhere(FAULTY, json.loads(await said.readline()))
            heard.write(json.dumps({p: table.net.address(p) for p in SURVIVORS}).encode() + b"\n")
            await said.readline()

            async def begin() -> None:
                heard.write(b"begin\n")

            played = await table.play(meeting.owners(), deadline_s, begin)
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                    return played, "SIGSTOP"
            heard.close()
            status = await process.wait()
            return played, signal.Signals(-status).name if status < 0 else f"exit status {status}"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def faulty(report: Report, runs: int = 3, peers: bool = True) -> None:
    """Rows of item 4; with ``peers``, hivemind's beside them."""
    for name, lie in LIES.items():
        told = [asyncio.run(lied(lie)) for _ in range(runs)]
        took = sorted({answer for _, answers in told for answer in answers.values()})
        _row(
            report,
            name,
            [played for played, _ in told],
            f"owners said to it: {', '.join(took) or 'nothing'}",
        )
    for phase, name in PHASES.items():
        told = [asyncio.run(killed(phase)) for _ in range(runs)]
        ends = {end for _, end in told}
        wanted = {"SIGSTOP" if phase == "frozen" else "SIGKILL"}
        _row(
            report,
            name,
            [played for played, _ in told],
            f"found with {', '.join(sorted(ends))}",
            ends == wanted,
        )
    if peers:
        from benchmarks.averaging.hivemind import beside

        beside(report)


def _row(report: Report, name: str, rows: list[Played], how: str, holds: bool = True) -> None:
    faults = sorted({text for row in rows for text in row.faults})
    worst = max(row.seconds for row in rows)
    in_time = max(worst, *(row.repair_s for row in rows)) <= DEADLINE_S + LATE_S
    how = "; ".join(
        [
            how,
            *sorted(set().union(*(row.said for row in rows))),
            *(f"WRONG: {text}" for text in faults[:5]),
        ]
    )
    report.add(
        f"4 {name}",
        round(median(row.seconds for row in rows), 3),
        "s",
        f"at most {worst:.3f} s; {min(row.kept for row in rows)} of {meeting.PARTS} parts at every "
        "survivor, all after a repair of "
        f"{median(row.repair_s for row in rows):.3f} s; {how}",
        f"ends by the deadline of {DEADLINE_S:g} s, survivors identical, all there is a mean of "
        "all survivors' contributions",
        holds and in_time and not faults,
    )
