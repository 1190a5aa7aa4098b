"""A swarm that loses peers, children, connections and its whole self, and goes on. One swarm, one
misfortune after the other."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.store import CheckpointStore
from node.transport import ask, handshake
from node.transport.ways import tunnel

pytestmark = pytest.mark.swarm
VANDAL = Path(__file__).with_name("vandal.py")


@pytest.fixture(scope="module")
def swarm(box):
    box.start(*box.swarm((1, 2, 2), training__epochs=100_000))
    box.goes_on(3)
    return box


def test_a_killed_replica_is_replaced_by_an_invited_joiner(swarm):
    swarm.made["stage-1-1"].kill()
    swarm.goes_on(5)
    del swarm.made["stage-1-1"]
    # A newcomer fetches the state that the directory shows at other peers.
    left = swarm.made["stage-1-0"].key
    swarm.wait(
        "its record",
        lambda: any(p.peer == left and p.epoch > 0 for p in swarm.made["ends-0"].peers().peers),
    )

    invite = swarm.tutti("swarm", "invite", home="ends-0")
    assert invite.returncode == 0, invite.stderr
    fresh = swarm.peer(
        "newcomer",
        "join",
        invite.stdout.strip(),
        "--yes",
        "--role",
        "stage",
        "--stage",
        "1",
        "--listen",
        "127.0.0.1",
        "--name",
        "newcomer",
        "--set",
        "threads=1",
        "--set",
        "checkpoint.every=5",
    )
    swarm.start(fresh)
    swarm.wait(
        "micro-batches done by the newcomer",
        lambda: fresh.status().micro_batches > 0,
        must_run=(fresh,),
    )
    # A newcomer whose fetch came too late gets everything from a round.
    assert all(e["fields"]["epoch"] > 0 for e in fresh.events("state-fetched"))
    assert fresh.status().stage == 1
    swarm.digests_equal()


def test_a_killed_p2p_daemon_comes_back_as_the_same_peer(swarm):
    peer = swarm.made["stage-2-0"]
    before = peer.status()
    old = peer.p2pd()
    old.send_signal(signal.SIGKILL)
    swarm.wait("a new p2pd", lambda: (p := peer.p2pd()) and p.pid != old.pid, must_run=(peer,))
    swarm.wait("it to be up", lambda: peer.events("p2pd-up"), must_run=(peer,))
    assert peer.status().p2pd_restarts == 1
    assert peer.status().addresses[0] == before.addresses[0], (
        "others know it by this port and this PeerId"
    )
    # Micro-batches may go to the other replica for minutes: a path that was slow once is avoided.
    begin = peer.status().round.done
    swarm.wait(
        "three more rounds of it", lambda: peer.status().round.done >= begin + 3, must_run=(peer,)
    )
    seen = swarm.wait(
        "a stranger to reach it",
        lambda: (
            (done := swarm.tutti("ping", before.addresses[0], "-c", "1")).returncode == 0
            and done.stdout
        ),
    )
    assert before.peer[-6:] in seen
    swarm.digests_equal()


@pytest.fixture(scope="module")
def full_disk(swarm):
    """A directory for checkpoints on a disk of 64 kB, for the peer "stage-2-behind-nat"; None when
    this user may not mount."""
    place = swarm.root / "stage-2-behind-nat" / "swarms" / swarm.manifest.run_id[:12] / "ckpt"
    place.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    yield place if done.returncode == 0 else None
    if done.returncode == 0:
        swarm.clean_up()
        subprocess.run(["umount", str(place)], check=True)


def test_a_peer_that_only_libp2p_reaches_takes_part(swarm, full_disk):
    peer = swarm.member(2, "behind-nat", "--force-tunnel")
    swarm.start(peer)
    # A path that was slow while the daemon started is measured again once a minute, and until then
    # the plan prefers the other replica.
    swarm.wait(
        "micro-batches done there", lambda: peer.status().micro_batches > 0, 200.0, must_run=(peer,)
    )
    swarm.digests_equal()
    other = swarm.made["stage-1-0"]
    ways = {peer.label: "tunnel", "stage-2-1": "direct"}
    for name in ways:
        # A way is made for what goes over it, and plans may send nothing from here to there.
        said = swarm.tutti("ping", name, "-c", "1", home=other.home)
        assert said.returncode == 0, said.stderr

    def shown() -> bool:
        seen = {p.name: p.path for p in other.peers().peers}
        return {name: seen.get(name) for name in ways} == ways

    swarm.wait("its neighbour's directory to show both ways", shown, 120.0)
    swarm.wait("its count of ways", lambda: other.status().paths_to["tunnel"] == 1)


def test_a_full_disk_costs_checkpoints_and_nothing_else(swarm, full_disk):
    if full_disk is None:
        pytest.skip("this user may not mount a small disk")
    peer = swarm.made["stage-2-behind-nat"]
    failed = swarm.wait(
        "the error to be told", lambda: peer.events("checkpoint-failed"), must_run=(peer,)
    )
    assert failed[0]["level"] == "error"
    assert "space" in failed[0]["text"]
    shown = swarm.tutti("logs", "--level", "error", home=peer.home)
    assert shown.returncode == 0
    assert "space" in shown.stdout
    begin = peer.status().epoch
    swarm.wait("it to go on", lambda: peer.status().epoch > begin + 3, must_run=(peer,))


def test_drain_hands_over_and_ends_with_0(swarm):
    peer = swarm.made["stage-2-behind-nat"]
    done = swarm.tutti("drain", home=peer.home)
    assert done.returncode == 0, done.stderr
    assert peer.wait() == 0
    begin = swarm.epoch()

    def undisturbed() -> bool:
        told = swarm.made["ends-0"].events("epoch-committed")
        last = [e["fields"] for e in told if e["fields"]["epoch"] > begin][-5:]
        return len(last) == 5 and not any(c["dead"] or c["dropped"] for c in last)

    # On a busy machine somebody else may be late in one of them.
    swarm.wait("five epochs in which nobody is missed", undisturbed, 120.0)
    swarm.digests_equal()


def test_garbage_stops_nobody(swarm):
    victim = swarm.made["ends-0"]
    streams = [handshake.STREAM, ask.STREAM, tunnel.STREAM]
    done = subprocess.run(
        [sys.executable, str(VANDAL), swarm.door, *streams],
        capture_output=True,
        text=True,
        timeout=90,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(streams)
    ours = [
        c.laddr.port
        for c in psutil.Process(victim.pid).net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    ]
    ports = [port for port in ours if f":{port}/" not in victim.status().metrics_url]
    assert ports, "its gRPC port"
    for port in ports:
        for filth in (
            b"\x16\x03\x01\xff\xff" + os.urandom(1000),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            os.urandom(100_000),
            b"",
        ):
            with socket.create_connection(("127.0.0.1", port), 5.0) as s:
                try:
                    s.sendall(filth)
                except OSError:
                    continue
    swarm.goes_on(3)
    assert victim.events("fault"), "garbage is counted"
    assert all(p.running for p in swarm.made.values() if p.label != "stage-2-behind-nat")
    swarm.digests_equal()


def test_the_whole_swarm_comes_back_from_its_checkpoints(swarm):
    """All daemons are killed at once."""
    peers = swarm.live
    swarm.goes_on(6)
    for peer in peers:
        os.kill(peer.pid, signal.SIGKILL)
    for peer in peers:
        peer.wait()
    common = newest_common(swarm, peers)
    restored = {p.label: len(p.events("restored")) for p in peers}
    committed = len(peers[0].events("epoch-committed"))
    assert common > 0

    swarm.start(*peers)
    swarm.goes_on(3)
    first = peers[0].events("epoch-committed")[committed]["fields"]["epoch"]
    assert first == common + 1
    for peer in peers:
        assert len(peer.events("restored")) == restored[peer.label] + 1
    swarm.digests_equal()


def newest_common(box, peers) -> int:
    """The newest epoch that every stage has on some disk."""
    run = box.manifest.run_id
    held = {}
    for peer in peers:
        store = CheckpointStore(peer.config.checkpoint_dir(run), CheckpointSettings(), run)
        stage = int(next(p.name for p in store.root.iterdir()).removeprefix("stage-"))
        held.setdefault(stage, set()).update(store.epochs(stage))
    assert sorted(held) == [0, 1, 2]
    return max(set.intersection(*held.values()), default=0)
