"""A stage of 1 GiB joined over slow lines: each daemon on a host of its own (a network namespace),
three donors behind lines of 100 Mbit/s, one of which dies in the middle. Needs root.

The newcomer has half of the machine's cores to itself and the swarm the other half, as if they were
different machines. Others who use the machine are in the figures; how much they took is said.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
import transformers

from benchmarks.models.directories import SETTINGS
from benchmarks.report import Report
from node.identity.keys import Identity
from node.manifest import read_manifest
from node.model.shapes import base_shapes, count
from node.reach.interfaces import free_port
from testbed.daemons.books import COMMITTED
from testbed.daemons.fleet import Box, Hang, Host, Peer, named
from testbed.models.directories import TINY
from testbed.networks.internet import Internet, why_not

SHAPE = {
    **TINY,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "initializer_range": 0.02,
}
"""One block stage of 1 GiB in fp32."""
RUN = {
    **SETTINGS,
    "model.adapter": 2,
    "model.seq_len": 16,
    "pipeline.micro_batch": 1,
    "training.target_batch": 8,
    "training.epochs": 100_000,
}
"""A frozen base: of a stage that is trained whole four peers would not fit into 24 GiB."""
LINE = 100e6
"""Bits per second that leave a donor."""
DONORS = 3
WARM = 4
BEFORE = 8
SLOWER = 1.3
SPEED = 0.8
LOAD_S = 300.0


def rows(report: Report, root: Path) -> None:
    """How long the fetch takes beside the lines, and how fast the others train meanwhile."""
    if why := why_not("open"):
        what = "6 a stage of 1 GiB over lines of 100 Mbit/s"
        report.add(what, 0, "stages fetched", why, "1", holds=False)
        return
    root.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model("llama", **SHAPE)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / "hf")
    names = [f"h{i}" for i in range(DONORS + 1)]
    with Internet(dict.fromkeys(names, "open")) as net:
        hosts = [
            Host(net[name].address, (*net[name].through, "taskset", "-c", cores))
            for name, cores in zip(names, halves(DONORS), strict=True)
        ]
        box = Box(root / "box", tuple(hosts))
        try:
            joined(report, net, box, names, root / "hf")
        except Hang:
            print(box.story())
            raise
        finally:
            box.clean_up()


def halves(donors: int) -> list[str]:
    """The cores of every host, as taskset names them."""
    cores = sorted(os.sched_getaffinity(0))
    ours = cores[: len(cores) // 2] or cores
    others = cores[len(cores) // 2 :]
    return [",".join(map(str, ours))] * donors + [",".join(map(str, others))]


@dataclass
class Cores:
    """How busy the machine is from now on, and how much of that is not this benchmark's."""

    box: Box
    began: float = field(default_factory=time.monotonic)
    idle: float = field(default_factory=lambda: psutil.cpu_times().idle)

    def __post_init__(self) -> None:
        self._ours = self._used()

    def _used(self) -> dict[int, float]:
        used = {}
        for process in (psutil.Process(), *self.box.family()):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used[process.pid] = times.user + times.system
        return used

    def said(self) -> str:
        """The load of the cores in words. Time used by a daemon that has died meanwhile counts as
        other work."""
        room = (time.monotonic() - self.began) * (psutil.cpu_count() or 1)
        busy = 1 - (psutil.cpu_times().idle - self.idle) / room
        ours = sum(used - self._ours.get(pid, 0.0) for pid, used in self._used().items()) / room
        return f"cores {busy:.0%} busy, {max(0.0, busy - ours):.0%} with other work"


def joined(report: Report, net: Internet, box: Box, names: Sequence[str], there: Path) -> None:
    """The ends with the directory and two peers of the stage give; a third one joins."""
    *givers, newcomer = swarm(box, there)
    for peer in givers:
        peer.start()
    chief = givers[0]
    dies = givers[-1]
    box.wait("training", lambda: epochs(chief) >= WARM, LOAD_S, tuple(givers))
    box.until_training(*givers)
    size = 4 * count(base_shapes(box.manifest.model, box.manifest.pipeline.stages, 1))
    for name in names[:DONORS]:
        net.shape(name, LINE)
    before = Cores(box)
    usual = Pace(chief)
    box.wait("epochs", lambda: usual.done() >= BEFORE, LOAD_S, tuple(givers))
    usual_s = usual.seconds()
    idle = before.said()
    newcomer.start()
    started = time.time()
    hosts = box.wait("a stage", lambda: newcomer.events("hosting"), LOAD_S, (newcomer,))
    begun = float(hosts[0]["at"])
    cores = Cores(box)
    meanwhile = Pace(chief)
    box.wait("half", lambda: 0.5 <= newcomer.status().progress < 1, LOAD_S, (newcomer,))
    half = time.time() - begun
    dies.kill()
    there_now = box.wait("it all", lambda: newcomer.events("state-fetched"), LOAD_S, (newcomer,))
    took = float(there_now[0]["at"]) - begun
    meanwhile_s = meanwhile.seconds()
    busy = cores.said()
    box.until_training(newcomer)
    whole = time.time() - started
    least = 8 * size / LINE * (0.5 / DONORS + 0.5 / (DONORS - 1))
    if int(there_now[0]["fields"]["bytes"]) != size:
        raise Hang(f"not the stage was fetched: {there_now[0]}")
    report.add(
        "6 a stage fetched and verified from three donors, one killed at half: over the least",
        took / least,
        f"times; {took:.1f} s, {half:.1f} s to the half; {busy}",
        f"{least:.1f} s: {size / 2**30:.2f} GiB over lines of {LINE / 1e6:.0f} Mbit/s",
        f"at most {SLOWER}",
        holds=took / least <= SLOWER,
    )
    report.add(
        "6 from the start of the program to its first plan",
        whole / least,
        f"times; {whole:.1f} s, {begun - started:.1f} s of them until it knew its stage",
        f"{least:.1f} s, as above",
    )
    report.add(
        "6 speed of the swarm meanwhile",
        usual_s / meanwhile_s,
        f"times; {meanwhile_s:.2f} s an epoch; {busy}",
        f"{usual_s:.2f} s an epoch before; {idle}",
        f"at least {SPEED}",
        holds=usual_s / meanwhile_s >= SPEED,
    )


@dataclass
class Pace:
    """Epochs that a peer has committed from now on."""

    peer: Peer
    began: float = field(default_factory=time.time)

    def done(self) -> int:
        return len(self._at())

    def seconds(self) -> float:
        """Mean seconds of an epoch, up to the newest one. Raises Hang when there is none."""
        if not (at := self._at()):
            raise Hang("no epoch was committed")
        return (at[-1] - self.began) / len(at)

    def _at(self) -> list[float]:
        return [t.at for t in self.peer.told() if t.kind == COMMITTED and t.at > self.began]


def swarm(box: Box, there: Path) -> list[Peer]:
    """The manifest as a user makes it; one peer of the ends and three of the stage, not started."""
    box.root.mkdir(parents=True)
    file = box.root / "swarm.toml"
    words = ["swarm", "init", str(file), "--from", str(there), "--stages", "1"]
    words += ["--tokenizer", "bytes", "--data", "synthetic:7"]
    for key, value in RUN.items():
        words += ["--set", f"{key}={value}"]
    done = box.tutti(*words, home="ends-0")
    if done.returncode:
        raise Hang(f"no manifest: {done.stderr}")
    box.manifest = read_manifest(file)
    labels = [named(0, "0"), *(named(1, str(i)) for i in range(DONORS))]
    box.place(labels)
    key = Identity.load(box.root / "ends-0" / "identity.key").peer_id
    box.doors[labels[0]] = (
        f"/ip4/{box.host(labels[0]).address}/tcp/{free_port(['127.0.0.1'])}/p2p/{key}"
    )
    return [box.member(0, "0"), *(box.member(1, str(i)) for i in range(DONORS))]


def epochs(peer: Peer) -> int:
    """Epochs that this peer has committed."""
    return sum(told.kind == COMMITTED for told in peer.told())
