"""Daemons that hold their stages on two devices each learn what one process learns, and end when a
device is gone."""

import os
import signal

import psutil
import pytest

from node.core.errors import ExitCode
from testbed.reference.swarm import Reference

pytestmark = pytest.mark.swarm
EPOCHS = 4


def workers(peer) -> list[psutil.Process]:
    return [p for p in psutil.Process(peer.pid).children() if "node.local.worker" in p.cmdline()]


def test_the_loss_equals_one_process_and_a_lost_device_ends_it(box, tmp_path):
    ends, blocks = box.swarm(
        (1, 1),
        model__kv_heads=2,
        pipeline__stages=1,
        training__min_replicas=1,
        training__epochs=EPOCHS,
    )
    for peer in (ends, blocks):
        peer.child.arguments += ("--local-devices", "2")
        peer.start()

    def complete():
        """The last plan has told the loss of the last epoch."""
        now = ends.status()
        return len(now.loss_history) == EPOCHS and now.state == "finished" and now

    status = box.wait("the last epoch", complete, 150.0, (ends, blocks))
    losses = [e.loss for e in Reference(box.manifest, tmp_path).train(EPOCHS)]
    assert status.loss_first == pytest.approx(losses[0], rel=1e-5)
    assert status.loss == pytest.approx(losses[-1], rel=1e-3)
    assert losses[-1] < losses[0]
    assert status.device.startswith("2 x cpu")

    (worker,) = workers(blocks)
    os.kill(worker.pid, signal.SIGKILL)
    assert blocks.wait(60.0) == ExitCode.RESTART_WANTED
    assert "local device 1 ended with code -9" in blocks.said()
    blocks.start()
    (worker,) = box.wait("its device again", lambda: workers(blocks), 120.0, (blocks,))
    blocks.kill()
    _, left = psutil.wait_procs([worker], timeout=30.0)
    assert not left, "orphans"

    (worker,) = workers(ends)
    assert ends.end(60.0) == 0
    assert not worker.is_running()
    assert not (ends.home / "devices").exists()
