"""One peer of four that averages with hivemind's averager while one of them is faulty, as a process
of its own.

    python -m benchmarks.peers.hive RANK WORLD NUMBERS SENDER_TIMEOUT REDUCER_TIMEOUT

Speaks lines of JSON as benchmarks/peers/speed.py does. All numbers of peer i are i + 1. An order
says whether to begin when the group is found. The answers are that it has begun, then its resulting
values, and whether hivemind calls the round a success.
"""

import json
import sys
import time
from typing import Any

import torch

PATIENCE_S = 12.0
"""Of a step that has timeouts of 2 and 4 s; one that takes longer hangs."""


HANGS = f"nothing for {PATIENCE_S:g} s"


def main() -> None:
    """Take orders until stdin ends."""
    import hivemind
    from hivemind.averaging import DecentralizedAverager

    torch.set_num_threads(1)
    rank, world, count = map(int, sys.argv[1:4])
    sender, reducer = map(float, sys.argv[4:6])
    dht = hivemind.DHT(start=True) if rank == 0 else None
    _say([str(a) for a in dht.get_visible_maddrs()] if dht else [])
    others = json.loads(sys.stdin.readline())
    dht = dht or hivemind.DHT(initial_peers=others, start=True)
    averager = DecentralizedAverager(
        [torch.zeros(count)],
        dht,
        start=True,
        prefix="faulty",
        target_group_size=world,
        min_group_size=world,
        bandwidth=1e9,
        min_matchmaking_time=1.0,
        request_timeout=0.5,
        sender_timeout=sender,
        reducer_timeout=reducer,
    )
    _say("ready")
    while line := sys.stdin.readline():
        _round(averager, rank, json.loads(line)["begin"])


def _round(averager: Any, rank: int, begins: bool) -> None:
    with averager.get_tensors() as tensors:
        tensors[0].fill_(rank + 1.0)
    step = averager.step(
        wait=False, timeout=PATIENCE_S, allow_retries=False, require_trigger=not begins
    )
    while begins and not step.done() and not step.began_allreduce:
        time.sleep(0.002)
    _say({"at": time.monotonic()})
    if not begins:
        return
    try:
        fault = step.exception(PATIENCE_S)
        fine = step.result() is not None if fault is None else type(fault).__name__
    except TimeoutError:
        _say({"at": time.monotonic(), "fine": HANGS, "found": {}})
        return
    at = time.monotonic()
    with averager.get_tensors() as tensors:
        values, many = torch.unique((tensors[0] * 1000).round() / 1000, return_counts=True)
        found = {
            f"{v:g}": round(float(m) / tensors[0].numel(), 2)
            for v, m in zip(values, many, strict=True)
        }
    _say({"at": at, "fine": fine, "found": found})


def _say(line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
