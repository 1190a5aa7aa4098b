"""Scenarios of a swarm, one small object each: a fault, and its allowed consequences.

The swarm has two ends peers and two replicas of each of three block stages, each on a host of its
own.
"""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from testbed.daemons.fleet import Hang, Peer
from testbed.daemons.limits import Unavailable, fill
from testbed.swarms.arena import Arena

KILLED_S, SILENT_S, RECOVER_S = 2.0, 5.0, 10.0
"""Targets: until a killed process, and until a silent one, is noticed; from there to the next
commit."""
HOLD_S = 10.0
"""How long a pause or a cut lasts."""
NODES = (2, 2, 2, 2)
SHAPE: dict[str, Any] = {
    "model__layers": 3,
    "pipeline__stages": 3,
    "training__target_batch": 32,
    "training__epochs": 100_000,
    "training__rebalance_every_s": 0.0,
    "training__eval_batches": 16,
    "optimizer__lr": 0.005,
    "optimizer__adam_lr": 1.5e-3,
}
"""Epochs of about a second on two cores. Nobody changes its stage, so that every scenario finds the
same swarm."""
SMALL_DISK = "stage-3-1"


@dataclass
class Strike:
    """A fault that was made: its time, its victims (labels), its undoing, and its hold, which lasts
    until then. `apart`: labels of daemons that commit a history of their own meanwhile."""

    at: float
    victims: tuple[str, ...]
    undo: Callable[[], None] = lambda: None
    hold: Callable[[], None] = lambda: None
    apart: tuple[str, ...] = ()
    notes: dict[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """``detect_s``, ``recover_s``: the targets, None when nobody need notice, and when daemons have
    to start first.

    ``again`` and ``abandoned``: most epochs that may be lost after their commit, and before;
    ``again`` None: counted, and no promise. ``twins``: the victims' own words count too.
    """

    name: str
    says: str
    do: Callable[[Arena], Strike]
    detect_s: float | None = None
    recover_s: float | None = RECOVER_S
    again: int | None = 0
    abandoned: int | None = 1
    twins: bool = False


# ------------------------------------------------------------ the deeds


def _kill(*peers: Peer) -> Strike:
    at = time.time()
    for peer in peers:
        if peer.child.process is not None:
            peer.child.process.kill()
    for peer in peers:
        peer.kill()
    return Strike(at, tuple(p.label for p in peers))


def _in_phase(phase: str) -> Callable[[Arena], Strike]:
    def do(a: Arena) -> Strike:
        victim = a.peers["stage-2-0"]
        seen = a.when(victim, phase)
        strike = _kill(victim)
        strike.notes["phase"] = phase if seen else "unknown"
        return strike

    return do


def _other_ends(a: Arena) -> Peer:
    leader = a.leader()
    return next(p for label, p in a.peers.items() if label.startswith("ends") and p is not leader)


def _pause(a: Arena, victim: Peer) -> Strike:
    victim.close()
    at = time.time()
    victim.signal(signal.SIGSTOP, family=True)
    return Strike(
        at, (victim.label,), lambda: victim.signal(signal.SIGCONT, family=True), _until(at + HOLD_S)
    )


def _p2pd(a: Arena) -> Strike:
    victim = a.peers["stage-2-1"]
    child = victim.p2pd()
    at = time.time()
    if child is None:
        raise Hang(f"{victim.label} has no p2pd")
    child.send_signal(signal.SIGKILL)

    def back() -> None:
        a.wait("a new p2pd", lambda: (p := victim.p2pd()) and p.pid != child.pid, 30.0)

    return Strike(at, (victim.label,), hold=back)


def _cut(a: Arena, one: Sequence[str], *, outward: bool = True, inward: bool = True) -> Strike:
    wan = network(a)
    here = {a.host(label) for label in one}
    there = set(range(len(a.peers))) - here
    at = time.time()
    if outward:
        wan.cut(here, there, both=False)
    if inward:
        wan.cut(there, here, both=False)
    return Strike(at, tuple(one), wan.heal, _until(at + HOLD_S))


def _slow_link(a: Arena) -> Strike:
    wan = network(a)
    victim = "stage-2-1"
    others = [i for i in range(len(a.peers)) if i != a.host(victim)]
    for i in others:
        wan.shape(a.host(victim), i, rate_bps=20e6)
    a.epochs(3, 60.0)
    at = time.time()
    for i in others:
        wan.shape(a.host(victim), i, rate_bps=2e6)
    return Strike(at, (victim,), wan.heal, lambda: a.epochs(8, 90.0))


def _far(a: Arena) -> Strike:
    wan = network(a)
    at = time.time()
    wan.shape_all(delay_s=0.08, loss=0.01)
    return Strike(at, (), wan.heal, lambda: a.epochs(6, 150.0))


def _full_disk(a: Arena) -> Strike:
    victim = a.peers[SMALL_DISK]
    place = victim.config.checkpoint_dir(a.manifest.run_id)
    if not place.is_mount():
        raise Unavailable("no small disk under the checkpoints")
    at = time.time()
    junk = fill(place)

    def told() -> None:
        a.wait(
            "the full disk to be told",
            lambda: [e for e in victim.told() if e.kind == "checkpoint-failed" and e.at >= at],
            60.0,
        )
        a.epochs(3, 60.0)

    return Strike(at, (victim.label,), lambda: junk.unlink(missing_ok=True), told)


def _short_of_memory(a: Arena) -> Strike:
    victim = a.peers["stage-3-0"]
    began = time.time()
    lived = began

    def dead() -> bool:
        nonlocal lived
        now = time.time()
        lived = now if victim.running else lived
        return not victim.running

    a.limits.memory(victim.pid, 1 << 20)
    a.wait("the kernel to kill it", dead, 60.0)
    return Strike(
        lived, (victim.label,), a.limits.lift, notes={"killed_after_s": round(lived - began, 1)}
    )


def _partition(a: Arena) -> Strike:
    one = tuple(label for label in a.peers if label.endswith("-1"))
    strike = _cut(a, one)

    def hold() -> None:
        other = [label for label in a.peers if label not in one]
        a.epochs(8, 120.0, led_by=other)
        a.epochs(1, 60.0, led_by=one)

    strike.hold = hold
    strike.apart = one
    return strike


def _everybody(a: Arena) -> Strike:
    a.wait(
        "checkpoints",
        lambda: all(
            any(e.kind == "checkpoint-written" for e in p.told()) for p in a.peers.values()
        ),
        120.0,
    )
    strike = _kill(*a.peers.values())
    for peer in a.peers.values():
        peer.start()
    return strike


def _straggler(a: Arena) -> Strike:
    victim = a.peers["stage-1-1"]
    before = _pace(a, 5)
    at = time.time()
    a.limits.processor(victim.pid, 0.05)
    strike = Strike(at, (victim.label,), a.limits.lift)

    def hold() -> None:
        a.epochs(6, 180.0)
        strike.notes["slower"] = round(_pace(a, 4) / max(before, 1e-9), 2)

    strike.hold = hold
    return strike


def _pace(a: Arena, epochs: int) -> float:
    """Seconds of an epoch, over the next few."""
    begin = time.monotonic()
    a.epochs(epochs, 180.0)
    return (time.monotonic() - begin) / epochs


def _drain(a: Arena) -> Strike:
    victim = a.peers["stage-1-0"]
    at = time.time()
    done = a.box.tutti("drain", home=victim.home, timeout=90.0)
    code = victim.wait(30.0)
    return Strike(at, (victim.label,), notes={"exit": code or done.returncode})


def _until(moment: float) -> Callable[[], None]:
    return lambda: time.sleep(max(0.0, moment - time.time()))


def network(a: Arena):
    """The arena's network. Raises Unavailable when there is none."""
    if a.wan is None:
        raise Unavailable("no network of hosts")
    return a.wan


# ------------------------------------------------------------ the table

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "kill-stage-run",
        "kill -9 of a stage peer while micro-batches run",
        _in_phase("run"),
        KILLED_S,
    ),
    Scenario(
        "kill-stage-round", "kill -9 of a stage peer in the round", _in_phase("average"), KILLED_S
    ),
    Scenario("kill-leader", "kill -9 of the leader", lambda a: _kill(a.leader()), KILLED_S),
    Scenario(
        "kill-ends",
        "kill -9 of the ends peer that does not lead",
        lambda a: _kill(_other_ends(a)),
        KILLED_S,
    ),
    Scenario(
        "pause-stage",
        "a stage peer stands still for 10 s",
        lambda a: _pause(a, a.peers["stage-1-0"]),
        SILENT_S,
    ),
    Scenario(
        "pause-leader",
        "the leader stands still for 10 s",
        lambda a: _pause(a, a.leader()),
        SILENT_S,
    ),
    Scenario("kill-p2pd", "kill -9 of one peer's p2pd alone", _p2pd, twins=True),
    Scenario(
        "cut-both-ways",
        "no packet to or from one peer for 10 s",
        lambda a: _cut(a, ("stage-2-1",)),
        SILENT_S,
    ),
    Scenario(
        "cut-outward",
        "no packet from one peer for 10 s",
        lambda a: _cut(a, ("stage-3-0",), inward=False),
        SILENT_S,
    ),
    Scenario(
        "cut-inward",
        "no packet to one peer for 10 s",
        lambda a: _cut(a, ("stage-3-0",), outward=False),
        SILENT_S,
    ),
    Scenario(
        "slow-link",
        "one peer's bandwidth falls from 20 to 2 Mbit/s",
        _slow_link,
        abandoned=0,
        twins=True,
    ),
    Scenario("far-apart", "80 ms and 1% loss on every link", _far, abandoned=0, twins=True),
    Scenario(
        "disk-full", "no room for one peer's checkpoints", _full_disk, abandoned=0, twins=True
    ),
    Scenario(
        "out-of-memory", "the kernel kills a peer that is out of memory", _short_of_memory, KILLED_S
    ),
    Scenario(
        "half-at-once",
        "kill -9 of one replica of every stage at once",
        lambda a: _kill(_other_ends(a), *(a.peers[f"stage-{s}-1"] for s in (1, 2, 3))),
        KILLED_S,
    ),
    Scenario(
        "partition",
        "two halves that each hold every stage; heals after 8 epochs",
        _partition,
        SILENT_S,
        again=None,
    ),
    Scenario(
        "everybody",
        "kill -9 of everybody, then all start again",
        _everybody,
        None,
        None,
        6,
        2,
        twins=True,
    ),
    Scenario(
        "straggler", "one peer gets a twentieth of a core", _straggler, abandoned=0, twins=True
    ),
    Scenario("drain", "an owner is asked to leave in order", _drain, abandoned=0),
)
QUICK = ("kill-stage-run", "pause-stage", "kill-leader", "cut-both-ways")
