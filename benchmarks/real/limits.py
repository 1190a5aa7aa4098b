"""A solo start within a limit: a control group with 2 GiB, a quota of processor time, an affinity.
The numbers of its status are compared with the system's. Two machines with the same nine bridges.

The limit is in force before the daemon's first instruction: its process stops itself, is put into
the group, and goes on. If no group or no network namespace can be made, the row says so and does
not hold.
"""

import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.real.pretrained import smollm2
from benchmarks.report import Report
from node.core.memory import of_files
from node.identity.invites import Invite
from testbed.daemons.fleet import WORKING, Box, Hang, Host, Peer
from testbed.daemons.limits import Limits, Unavailable
from testbed.networks.internet import Internet, why_not
from testbed.swarms.routed import boxed, daemon, printed, to_it

GIB = 1 << 30
MEMORY = 2 * GIB
CLOSE = 0.1
"""Largest relative difference between the bytes that status shows and the system's bytes, where
both change meanwhile."""
WAIT_S = 400.0
COUNTED_S = 10.0
STOPPED = ("sh", "-c", 'kill -STOP $$; exec "$@"', "sh")
"""Command that runs another once it is told to continue."""
SETTINGS = {
    "pipeline.stages": 1,
    "model.layers": 4,
    "training.min_replicas": 1,
    "training.eval_every": 0,
    "training.target_batch": 32,
}
"""Settings of a small model with random weights."""
REAL = {
    "model.adapter": 8,
    "model.seq_len": 128,
    "pipeline.micro_batch": 4,
    "training.min_replicas": 1,
    "training.eval_every": 0,
    "training.target_batch": 8,
    "training.epoch_timeout_s": 600,
}
"""Settings of adapters for SmolLM2."""
EPOCHS = 4
"""Epochs after which the memory is compared: the first ones load what a forward, a backward and a
step need."""
BRIDGES = 9


def rows(report: Report, root: Path) -> None:
    """Rows of each limit, then of the bridges."""
    there = len(os.sched_getaffinity(0))
    few = 2 if there > 2 else 1
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:few]))

    def in_two_gib(limits: Limits, pid: int) -> None:
        limits.memory(pid, MEMORY)

    def by_quota(limits: Limits, pid: int) -> None:
        limits.processor(pid, few)

    small = Case("a group of 2 GiB", _memory, in_two_gib)
    real = Case("SmolLM2 in a group of 2 GiB", _memory, in_two_gib, of_smollm2=True)
    quota = Case(f"a quota of {few} of {there} cores", _threads(few), by_quota)
    affinity = Case(
        f"an affinity of {few} of {there} cores", _threads(few), through=("taskset", "-c", cores)
    )
    for number, case in enumerate((small, real, quota, affinity)):
        _limited(report, root / f"case-{number}", case)
    _bridges(report, root / "bridges")


@dataclass(frozen=True)
class Case:
    """A solo start within one limit. ``judge`` adds its rows; ``limit`` puts a process into its
    control group; ``through``: the command that starts it."""

    name: str
    judge: Callable[[Report, str, Box, Peer], None]
    limit: Callable[[Limits, int], None] | None = None
    through: tuple[str, ...] = ()
    of_smollm2: bool = False


def _limited(report: Report, root: Path, case: Case) -> None:
    """Rows of one case."""
    root.mkdir(parents=True)
    box = Box(root, (Host(through=(*STOPPED, *case.through)),))
    limits = Limits()
    box.place(["solo"])
    try:
        case.judge(report, case.name, box, _started(box, limits, case))
    except Unavailable as e:
        report.add(f"8 {case.name}", str(e), "", holds=False)
    except Hang as e:
        print(box.story(), file=sys.stderr)
        report.add(f"8 {case.name}: {e}"[:300], 0, "", holds=False)
    finally:
        box.clean_up()
        limits.close()


def _started(box: Box, limits: Limits, case: Case) -> Peer:
    """The daemon of the ends, in training. Its child hosts the only block stage."""
    file = box.root / "swarm.toml"
    words = ["swarm", "init", str(file)]
    if case.of_smollm2:
        words += ["--from", str(smollm2()), "--stages", "1"]
    for key, value in (REAL if case.of_smollm2 else SETTINGS).items():
        words += ["--set", f"{key}={value}"]
    done = box.tutti(*words, home="solo", timeout=WAIT_S)
    if done.returncode:
        raise Hang(f"no manifest: {done.stderr}")
    solo = box.bare("solo", "start", str(file), "--name", "solo").start()
    process = psutil.Process(solo.pid)
    box.wait("the stop", lambda: process.status() == psutil.STATUS_STOPPED, 60.0, (solo,))
    try:
        if case.limit is not None:
            case.limit(limits, solo.pid)
    finally:
        process.send_signal(signal.SIGCONT)
    box.wait(
        f"{EPOCHS} epochs",
        lambda: solo.status().state in WORKING and solo.status().epoch >= EPOCHS,
        WAIT_S,
        (solo,),
    )
    return solo


def _status(box: Box, home: Path) -> dict[str, Any]:
    done = box.tutti("status", "--json", home=home, timeout=WAIT_S)
    if done.returncode:
        raise Hang(f"no status: {done.stderr}")
    return json.loads(done.stdout)


def _memory(report: Report, name: str, box: Box, solo: Peer) -> None:
    """The limit divided between the stages, and the bytes of each daemon."""
    homes = {"the ends": solo.home, "stage 1": solo.home / "local" / "stage-1"}
    found = {what: _status(box, home) for what, home in homes.items()}
    most = sum(int(s["memory_limit"]) + int(s["memory_process"]) for s in found.values())
    # Pages of libraries are in the memory once, and in each process.
    most -= of_files(solo.pid)
    report.add(
        f"8 {name}: limits that two daemons show together, their libraries once",
        most / GIB,
        "GiB",
        f"the machine has {psutil.virtual_memory().total / GIB:.1f}",
        f"at most {MEMORY / GIB:g}",
        holds=most <= MEMORY,
    )
    # Weights are read through a map of their file, which ends a minute after a peer has them.
    box.wait("the file of the weights to be closed", lambda: not _maps_weights(solo), WAIT_S)
    found = {what: _status(box, home) for what, home in homes.items()}
    for what, s in found.items():
        family = _family(solo, homes[what])
        resident = sum(p.memory_info().rss for p in family)
        shown = int(s["memory_used"])
        planned = int(s["memory_process"]) + int(s["memory_planned"])
        ratio = shown / resident
        report.add(
            f"8 {name}: memory that {what} shows",
            ratio,
            f"of {resident >> 20} MiB resident in {len(family)} processes; planned at most "
            f"{planned >> 20} MiB",
            "psutil",
            f"within {CLOSE:g} of 1, and no more resident than planned",
            holds=abs(ratio - 1) <= CLOSE and resident <= planned * (1 + CLOSE),
        )


def _maps_weights(solo: Peer) -> bool:
    """True while the daemon of the ends maps a file of weights into its memory."""
    maps = Path(f"/proc/{solo.pid}/maps").read_text(encoding="utf-8")
    return ".safetensors" in maps


def _bridges(report: Report, root: Path) -> None:
    """Rows of two machines of one LAN with the same bridges, of which one joins the other."""
    name = f"8 {BRIDGES} bridges on each machine"
    if reason := why_not("lan"):
        report.add(name, reason, "", holds=False)
        return
    with Internet({"one": "lan", "two": "lan"}) as net, boxed(root) as box:
        for host in ("one", "two"):
            net.add_bridges(host, BRIDGES)
        founder = daemon(box, net, "one", "start")
        box.wait("the founder", lambda: founder.status().epoch >= 1, WAIT_S, (founder,))
        invite = printed(founder)
        addresses = Invite.decode(invite).addresses
        foreign = [at for at in addresses if f"/ip4/{net['one'].address}/" not in at]
        report.add(
            f"{name}: addresses of the printed invite that are not the LAN's",
            len(foreign),
            f"of {len(addresses)}: {', '.join(at.partition('/p2p/')[0] for at in addresses)}",
            f"the address on the LAN is {net['one'].address}",
            "0",
            holds=not foreign and len(addresses) > 0,
        )
        joiner = daemon(box, net, "two", "join", invite, "--yes")
        box.wait("the joiner", lambda: joiner.status().state in WORKING, WAIT_S, (joiner,))
        ends_s = time.monotonic() + WAIT_S
        ways = ("", "")
        while ways != ("direct", "direct") and time.monotonic() < ends_s:
            time.sleep(0.5)
            ways = (to_it(joiner, founder.key), to_it(founder, joiner.key))
        report.add(
            f"{name}: direct ways between the two",
            ways.count("direct"),
            f"of 2: {' and '.join(ways)}, while both train",
            "before: reversed ways",
            "2",
            holds=ways == ("direct", "direct"),
        )


def _threads(few: int) -> Callable[[Report, str, Box, Peer], None]:
    """Judge of the threads of the ends, where ``few`` cores may be used."""

    def judge(report: Report, name: str, box: Box, solo: Peer) -> None:
        device = _status(box, solo.home)["device"]
        threads = int(re.findall(r"(\d+) threads?", device)[0])
        own = _family(solo, solo.home)
        go = next(p.environ().get("GOMAXPROCS", "") for p in own if p.name() == "p2pd")
        before = _processor_s(own)
        began = time.monotonic()
        time.sleep(COUNTED_S)
        busy = (_processor_s(own) - before) / (time.monotonic() - began)
        report.add(
            f"8 {name}: threads that compute at the ends",
            threads,
            f"of {psutil.Process(solo.pid).num_threads()} in the process; p2pd has {go or 'all'}; "
            f"{busy:.2f} cores busy",
            "psutil",
            f"{few}, and p2pd as many",
            holds=threads == few and go == str(few) and busy <= few + CLOSE,
        )

    return judge


def _family(solo: Peer, home: Path) -> list[psutil.Process]:
    """The daemon of a home, and its p2pd."""
    root = psutil.Process(solo.pid)
    others = root.children(recursive=True)
    daemons = [p for p in (root, *others) if ["--home", str(home)] in _pairs(p.cmdline())]
    p2pd = [p for p in others if p.name() == "p2pd" and p.parent() in daemons]
    return [*daemons, *p2pd]


def _pairs(words: list[str]) -> list[list[str]]:
    """Each word with the one behind it."""
    return [list(pair) for pair in itertools.pairwise(words)]


def _processor_s(family: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in family)
