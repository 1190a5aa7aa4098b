"""A canned daemon on a real control socket, to look at the command line and the monitor: python
tests/tui/fake_daemon.py HOME."""

import asyncio
import sys
from pathlib import Path

from benchmarks.lab.canned_window import CannedWindow, training_snapshot
from node.config import NodeConfig
from node.control.service import ControlService


async def serve(home: Path, degraded: bool) -> None:
    window = CannedWindow()
    if degraded:
        window.said = training_snapshot(
            healthy=False,
            state="waiting",
            reason="waiting for a peer for stage 3",
            next_step="invite one:  tutti swarm invite",
        )
    service = ControlService(window, NodeConfig.load({"home": str(home)}).prepare_control_socket())
    await service.start()
    print("listening", flush=True)
    for epoch in range(115, 121):
        window.journal.emit(
            "training", "epoch-committed", f"epoch {epoch} committed by 6 peers in 0.42 s"
        )
    window.journal.emit(
        "training", "peer-lost", "peer Tz9Uaa lost; its parts have new owners", "warning"
    )
    await window.stopped.wait()
    await service.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), "degraded" in sys.argv[2:]))
