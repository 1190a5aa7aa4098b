"""The same two faults at hivemind's averager: one of four never sends, one is killed in mid-round.

Four processes with their families (benchmarks/peers/hive.py), 16 MiB each, its timeouts set to 2
and 4 s; by default it has none and waits for ever. Nothing is asked of these rows: they stand
beside ours in part 4 of ``python -m benchmarks.averaging``.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks.peers.hive import HANGS, PATIENCE_S
from benchmarks.report import Report

WORLD = 4
NUMBERS = 4 << 20
TIMEOUTS_S = (2.0, 4.0)
KILLED_AFTER_S = 0.1
"""Into an all-reduce that takes more than a second here."""
START_S = 45.0


def beside(report: Report) -> None:
    """Rows of item 4 that are not ours."""
    try:
        asyncio.run(_beside(report))
    except TimeoutError:
        report.add("4 hivemind", "nothing", "", f"its peers did not come together in {START_S:g} s")


async def _beside(report: Report) -> None:
    words = [str(x) for x in (WORLD, NUMBERS, *TIMEOUTS_S)]
    peers = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.peers.hive",
            str(rank),
            *words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HIVEMIND_LOGLEVEL": "ERROR"},
        )
        for rank in range(WORLD)
    ]
    families: list[list[psutil.Process]] = []
    try:
        addresses = [await _hear(peer) for peer in peers][0]
        for peer in peers:
            _tell(peer, addresses)
        for peer in peers:
            await _hear(peer)
        families = [_family(peer.pid) for peer in peers]
        *survivors, last = peers
        began = await _begin(survivors, last, begins=False)
        _row(report, "never sends", began, await asyncio.gather(*map(_outcome, survivors)))
        began = await _begin(survivors, last, begins=True)
        await asyncio.sleep(KILLED_AFTER_S)
        for process in families[-1]:
            process.kill()
        _row(report, "killed: in mid-round", began, await asyncio.gather(*map(_outcome, survivors)))
    finally:
        for process in {
            p for peer in peers if peer.returncode is None for p in _family(peer.pid)
        } | {p for f in families for p in f}:
            # psutil knows a process by more than its number
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for peer in peers:
            await peer.communicate()


async def _begin(survivors: Sequence[Process], last: Process, begins: bool) -> float:
    for peer in survivors:
        _tell(peer, {"begin": True})
    _tell(last, {"begin": begins})
    await _hear(last)
    return min([(await _hear(peer))["at"] for peer in survivors])


def _row(report: Report, name: str, began: float, told: list[dict[str, Any]]) -> None:
    has = "; ".join(
        " and ".join(f"{value} in {share:.0%}" for value, share in t["found"].items()) or "?"
        for t in told
    )
    says = ", ".join("success" if t["fine"] is True else str(t["fine"]) for t in told)
    same = (
        "survivors agree"
        if len({json.dumps(t["found"]) for t in told}) == 1
        else "survivors differ"
    )
    report.add(
        f"4 hivemind, {name}",
        round(max(t["at"] for t in told) - began, 3),
        "s",
        f"from its first to know the group; timeouts {TIMEOUTS_S[0]:g} and {TIMEOUTS_S[1]:g} s; it "
        f"says: {says}; {same}: of 1, 2, 3 (and 4) they have {has}",
    )


async def _outcome(peer: Process) -> dict[str, Any]:
    """A survivor's report of its round. Its process may hang with it: after the time that it would
    have had, the report is a hang."""
    try:
        async with asyncio.timeout(PATIENCE_S + 3):
            return await _hear(peer)
    except TimeoutError:
        return {"at": time.monotonic(), "fine": HANGS, "found": {}}


async def _hear(peer: Process) -> Any:
    if peer.stdout is None:
        raise RuntimeError("a process without pipes")
    return json.loads(await asyncio.wait_for(peer.stdout.readline(), START_S))


def _tell(peer: Process, line: Any) -> None:
    if peer.stdin is None:
        raise RuntimeError("a process without pipes")
    peer.stdin.write(json.dumps(line).encode() + b"\n")


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
