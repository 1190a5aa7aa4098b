"""Nothing configured: a swarm on one machine that another daemon joins with the invite it prints,
and that leaves nothing behind."""

import os
import re
import signal

import psutil
import pytest

from node.core.errors import ExitCode
from node.reach.interfaces import free_port

pytestmark = pytest.mark.swarm


def test_a_bare_start_trains_can_be_joined_and_leaves_nothing(box, monkeypatch):
    runtime = box.root / "rt #%41?"  # in which gRPC would read a URL
    runtime.mkdir()
    monkeypatch.setenv("TMPDIR", str(runtime))
    monkeypatch.setenv("TUTTI_THREADS", "1")
    first = box.bare("first", "start")
    image = {f"TUTTI_{kind}_PORT": str(free_port(["127.0.0.1"])) for kind in ("P2P", "GRPC")}
    first.environment = {**first.environment, "TUTTI_LISTEN": "0.0.0.0", **image}
    first.start()
    reasons = dict[str, bool]()

    def trains() -> bool:
        now = first.status()
        if now.peer:
            reasons[now.cause] = reasons.get(now.cause, True) and now.healthy
        return now.epoch >= 1

    box.wait("the first epoch", trains, 120.0, (first,))
    said = first.said()
    status = first.status()
    assert reasons["children"]
    assert reasons.get("stages", True), "its own stages load: nobody has to be invited for them"
    # With the process itself the plan is comparable to the memory used.
    planned = status.memory_process + status.memory_planned
    assert 0.5 < planned / status.memory_used < 1.5
    assert status.memory_process > 10 * status.memory_planned
    assert "solo" in said
    assert status.stage == 0
    assert status.healthy
    # One p2pd of this daemon, and one of the child for every block stage.
    stages = box.manifest.pipeline.stages
    assert sum(p.name() == "p2pd" for p in box.family()) == stages + 1
    # Restarted by hand it would find its swarm again; another machine finds it by the invite.
    invite = re.search(r"tutti join (tutti2\w+)", said)

    second = box.bare("second", "join", invite[1], "--yes").start()
    box.wait(
        "the guest in a plan",
        lambda: second.status().state == "training" and second.status().epoch,
        120.0,
        (first, second),
    )
    assert second.status().swarm.run_id == status.swarm.run_id
    box.wait(
        "work done by the guest", lambda: second.status().micro_batches > 0, 60.0, (first, second)
    )

    hosts = [
        p
        for p in box.family()
        if p.pid != second.pid and psutil.Process(second.pid) not in p.parents()
    ]
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait(40.0) == 0
    _, left = psutil.wait_procs(hosts, timeout=5.0)
    assert not left, "orphans"
    assert second.running
    assert not first.config.control_socket.exists()
    known = box.tutti("status", home="first")
    assert known.returncode == ExitCode.NOT_RUNNING
    assert "ago: signal SIGTERM" in known.stderr
    assert not list(first.home.rglob("*.sock"))
    os.kill(second.pid, signal.SIGINT)
    assert second.wait(40.0) == ExitCode.INTERRUPTED
    assert not list(runtime.glob("tutti-*")), "sockets of p2pd"
    assert not [e for p in (first, second) for e in p.events() if e["level"] == "error"]


def test_children_die_with_a_solo_daemon_that_is_killed(box, monkeypatch):
    first = box.made["first"]
    first.start()
    family = box.wait(
        "its children",
        lambda: len(found := box.family()) > 2 * box.manifest.pipeline.stages and found,
        120.0,
        (first,),
    )
    first.kill()
    _, left = psutil.wait_procs(family, timeout=10.0)
    assert not left, "orphans"
    assert first.config.control_socket.exists(), "nobody was there to remove it"
    first.start()
    box.wait(
        "it to start over its own remains",
        lambda: first.status().state not in ("", "starting"),
        120.0,
        (first,),
    )
    assert first.end(40.0) == 0
    assert not first.config.control_socket.exists()
