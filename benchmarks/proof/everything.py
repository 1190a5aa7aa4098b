"""Everything at once, live: SmolLM2 behind routers, with the techniques of configs/full.toml, peers
that die and arrive, a slow line, a damaged disk, and somebody who has a text written all the time;
beside the same run in peace. Needs root.

Both runs train the same number of tokens from the same manifest, and their loss on held-out text is
compared at the end. Every host is a network namespace; all routers but those of the rendezvous and
of the ends translate addresses.
"""

import contextlib
import json
import random
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.real.moby_dick import moby_dick
from benchmarks.real.pretrained import smollm2
from benchmarks.report import ROOT, Report
from node.control.client import ControlClient
from node.core.errors import LocalFault
from node.core.home import control_socket
from protos.control_pb2 import GenerateRequest
from testbed.daemons.books import COMMITTED, commits
from testbed.daemons.fleet import START_S, WORKING, Box, Hang, Peer
from testbed.networks.internet import Internet, why_not
from testbed.swarms.routed import boxed, daemon, printed

STAGES = 3
REPLICAS = 2
CONFIG = ROOT / "configs" / "full.toml"
ENDS = tuple(f"ends-{i}" for i in range(REPLICAS))
OWNER = ENDS[0]
"""Its home has the model, which the others fetch."""
MEMBERS = {
    f"stage-{stage}-{i}": kind
    for i in range(REPLICAS)
    for stage, kind in enumerate(("home", "symmetric", "cgnat"), start=1)
}
NEWCOMERS = {
    f"new-{i}": kind
    for i, kind in enumerate(("home", "cgnat", "home", "symmetric", "home", "cgnat"))
}
SLOW, SLOW_BPS = "stage-2-1", 20e6
STRIKES_S = (30.0, 60.0)
"""Least and most seconds between two of these."""
RANK = 8
EPOCHS = {"adapters": 40, "all weights": 16}
MOST_LOSS, MOST_WAIT_S = 1.03, 5.0
STUCK_S = 300.0
PROMPT = "The whale rose beside the boat, and the captain"
TOKENS = 60
SETTINGS: dict[str, Any] = {
    "model.seq_len": 128,
    "training.target_batch": 8,
    "pipeline.micro_batch": 2,
    "training.min_replicas": 1,
    "training.eval_every": 0,
    "training.epoch_timeout_s": 300,
    "outer.window_s": 60.0,
}


@dataclass
class Lived:
    """One run. ``waits``: seconds from each token of the text, or from the question, to the next
    token; ``cells``: commits by cell."""

    loss: float = 0.0
    before: float = 0.0
    seconds: float = 0.0
    cells: dict[str, int] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    damaged: str = ""
    killed: list[str] = field(default_factory=list)
    arrived: int = 0
    audit: dict[str, Any] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    """Daemons that ended though nobody killed them."""


def rows(report: Report, root: Path, quick: bool = False) -> None:
    """Rows of the runs by adapters, and without ``quick`` of all weights too."""
    if reason := why_not():
        raise Hang(reason)
    for kind, epochs in EPOCHS.items():
        if quick and kind != "adapters":
            continue
        peace = _live(root / f"{kind} peace", kind, epochs, disturbed=False)
        war = _live(root / f"{kind} war", kind, epochs, disturbed=True)
        _tell(report, kind, peace, war)


def _tell(report: Report, kind: str, peace: Lived, war: Lived) -> None:
    ratio = war.loss / peace.loss
    report.add(
        f"9 {kind}: held-out loss over that of the run in peace, at equal tokens",
        ratio,
        "ratio",
        f"{war.loss:.4f} and {peace.loss:.4f}; {peace.before:.4f} before; {war.seconds:.0f} and "
        f"{peace.seconds:.0f} s; epochs of cells {sorted(war.cells.values())} and "
        f"{sorted(peace.cells.values())}",
        f"at most {MOST_LOSS}",
        holds=ratio <= MOST_LOSS,
    )
    report.add(
        f"9 {kind}: longest wait for a token of a text",
        max(war.waits, default=float("inf")),
        "s",
        f"{len(war.waits)} tokens; {max(peace.waits, default=0.0):.1f} s in peace; "
        f"{len(war.unanswered)} texts broke off {war.unanswered[:2]}",
        f"at most {MOST_WAIT_S}, no text breaks off",
        holds=bool(war.waits) and max(war.waits) <= MOST_WAIT_S and not war.unanswered,
    )
    report.add(
        f"9 {kind}: daemons that ended though nobody killed them",
        len(war.ended) + len(peace.ended),
        f"of {len(MEMBERS) + len(ENDS) + war.arrived}; {len(war.killed)} killed, {war.arrived} "
        "came in their place",
        "; ".join(war.ended + peace.ended)[:300],
        "0",
        holds=not war.ended and not peace.ended,
    )
    harms = (war.killed, war.arrived, war.damaged)
    report.add(
        f"9 {kind}: deaths, arrivals and damaged disks, kinds that happened",
        sum(map(bool, harms)),
        "kinds",
        f"{len(war.killed)} killed, {war.arrived} arrived, damaged: {war.damaged or 'no disk'}",
        f"{len(harms)}",
        holds=all(harms),
    )
    runs = war.audit.get("runs", [])
    report.add(
        f"9 {kind}: receipts of the owner's cell that an audit refuses or that nobody has signed",
        sum(len(run["refused"]) + run["unsigned"] for run in runs),
        f"of {sum(run['tokens'] for run in runs)} tokens in {sum(run['epochs'] for run in runs)} "
        "epochs",
        f"damaged files: {len(war.audit.get('damaged', []))}",
        "0",
        holds=war.audit.get("verified") is True
        and not war.audit["damaged"]
        and not any(run["refused"] or run["unsigned"] for run in runs),
    )


# A run
# ------------------------------------------------------------


def _live(root: Path, kind: str, epochs: int, *, disturbed: bool) -> Lived:
    """A run from its start to its last epoch."""
    hosts = {"hub": "open", **dict.fromkeys(ENDS, "home"), **MEMBERS, **NEWCOMERS}
    lived = Lived()
    with Internet(hosts) as net, boxed(root) as box:
        file = _manifest(box, kind, epochs)
        hub = daemon(box, net, "hub", "bootstrap", "--swarm", str(file))
        box.wait("the rendezvous", lambda: "tutti join" in hub.said(), START_S, (hub,))
        world = World(box, net, file, printed(hub), lived)
        owner = world.start(OWNER)
        box.wait("the owner", lambda: owner.status().healthy, START_S, (owner,))
        for label in (*ENDS[1:], *MEMBERS):
            world.start(label)
        box.wait("the first epochs", lambda: world.epochs() >= 2, STUCK_S, every=1.0)
        lived.before = world.peers[OWNER].status().loss_val_before
        began = time.monotonic()
        with Reader(world.peers[OWNER], lived) as reader:
            world.until_over(disturbed)
            reader.over.set()
        lived.seconds = time.monotonic() - began
        world.close()
    return lived


def _manifest(box: Box, kind: str, epochs: int) -> Path:
    """The run's manifest, as its owner writes it."""
    file = box.root / "swarm.toml"
    changes = _techniques() | SETTINGS | {"training.epochs": epochs}
    if kind == "adapters":
        changes |= {"model.adapter": RANK, "optimizer.name": "adamw"}
    words = ["swarm", "init", str(file), "--from", str(smollm2()), "--stages", str(STAGES)]
    words += ["--data", str(moby_dick())]
    for key, value in changes.items():
        said = ",".join(map(str, value)) if isinstance(value, list) else value
        words += ["--set", f"{key}={said}"]
    done = box.tutti(*words, home=OWNER, timeout=STUCK_S)
    if done.returncode:
        raise Hang(f"no manifest: {done.stderr}")
    return file


def _techniques() -> dict[str, Any]:
    """The settings of configs/full.toml that are not the shape of its model or of its epochs."""
    full: Mapping[str, Mapping[str, Any]] = tomllib.loads(CONFIG.read_text())
    return {
        f"{table}.{key}": value
        for table in ("averaging", "outer", "scheduler", "optimizer")
        for key, value in full[table].items()
    } | {"pipeline.may_skip": full["pipeline"]["may_skip"]}


@dataclass
class World:
    """The daemons of a run, and what happens to them."""

    box: Box
    net: Internet
    file: Path
    invite: str
    lived: Lived
    peers: dict[str, Peer] = field(default_factory=dict)
    spare: list[str] = field(default_factory=lambda: list(NEWCOMERS))
    dice: random.Random = field(default_factory=lambda: random.Random(1))

    def start(self, label: str) -> Peer:
        """Start the daemon of a host in its place in the swarm."""
        role = ("--role", "ends", "--data", str(moby_dick()))
        if label not in ENDS:
            role = ("--stage", label.split("-")[1])
        words = ("join", self.invite, "--yes", *role)
        found = self.peers[label] = daemon(self.box, self.net, label, *words)
        return found

    def epochs(self) -> int:
        """Epochs of the cell that has gone furthest."""
        return max((peer.status().epoch for peer in self.peers.values()), default=0)

    def until_over(self, disturbed: bool) -> None:
        """Wait for the end of the run, and disturb it meanwhile."""
        strikes = self._strikes() if disturbed else iter(())
        strike_at = time.monotonic() + STRIKES_S[0]
        moved_at = time.monotonic()
        newest = -1
        while True:
            states = {label: peer.status() for label, peer in self.peers.items()}
            if all(states[label].state == "finished" for label in ENDS):
                break
            now = time.monotonic()
            epochs = sum(states[label].epoch for label in ENDS)
            if epochs > newest:
                newest = epochs
                moved_at = now
            if now - moved_at > STUCK_S:
                raise Hang(f"no epoch for {STUCK_S:.0f} s: {self._why(states)}")
            if now >= strike_at:
                next(strikes, None)
                strike_at = now + self.dice.uniform(*STRIKES_S)
            self._mind()
            time.sleep(1.0)
        ends = self.peers[OWNER]
        done = self.box.tutti("eval", "--json", home=ends.home, timeout=STUCK_S)
        if done.returncode:
            raise Hang(f"no loss: {done.stderr}")
        self.lived.loss = json.loads(done.stdout.splitlines()[0])["loss"]
        told = self.box.tutti("ledger", "show", "--json", home=ends.home, timeout=STUCK_S)
        with contextlib.suppress(ValueError):
            self.lived.audit = json.loads(told.stdout)

    def _strikes(self) -> Iterator[None]:
        """A slow line, then arrivals in turns with a damaged disk and deaths. A cell that loses the
        only peer of a stage goes on without it, and cannot end."""
        self.net.shape(SLOW, SLOW_BPS)
        yield
        while self.spare or self._able():
            if self.spare:
                newcomer = self.spare.pop(0)
                words = ("join", self.invite, "--yes")
                self.peers[newcomer] = daemon(self.box, self.net, newcomer, *words)
                self.lived.arrived += 1
                yield
            if able := self._able():
                victim = self.dice.choice(able)
                if self.lived.damaged:
                    self.peers.pop(victim).kill()
                    self.lived.killed.append(victim)
                else:
                    self.lived.damaged = victim
                    self._damage(self.peers[victim])
            yield

    def _able(self) -> list[str]:
        """Peers whose stage has another one at work in their cell."""
        working = {
            label: found
            for label, peer in self.peers.items()
            if label not in ENDS and (found := peer.status()).state in WORKING
        }
        places = Counter((found.cell.cell, found.stage) for found in working.values())
        return sorted(
            label for label, found in working.items() if places[found.cell.cell, found.stage] > 1
        )

    def _damage(self, peer: Peer) -> None:
        """End a daemon, spoil some bytes of each of its large files, and start it again."""
        peer.kill()
        for path in sorted((peer.home / "swarms").rglob("*")):
            if path.is_file() and path.stat().st_size > 1 << 16:
                with path.open("r+b") as file:
                    file.seek(path.stat().st_size // 2)
                    file.write(bytes(64))
        peer.start()

    def _mind(self) -> None:
        """Record daemons that ended by themselves."""
        for label, peer in self.peers.items():
            if not peer.running and not any(said.startswith(label) for said in self.lived.ended):
                self.lived.ended.append(f"{label}: {peer.child.tail(3)}")

    def _why(self, states: Mapping[str, Any]) -> str:
        return "; ".join(f"{label} {s.state} {s.epoch}" for label, s in states.items())

    def close(self) -> None:
        """Count the epochs of the cells."""
        for peer in self.box.made.values():
            for told in commits(e for e in peer.told() if e.kind == COMMITTED):
                cell = str(told.get("cell", ""))
                self.lived.cells[cell] = max(
                    self.lived.cells.get(cell, 0), int(told.get("epoch", 0))
                )


class Reader:
    """Somebody who has one text after the other written while the block lasts."""

    def __init__(self, peer: Peer, lived: Lived) -> None:
        self._peer = peer
        self._lived = lived
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> "Reader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join()

    def _read(self) -> None:
        seed = 0
        while not self.over.is_set():
            seed += 1
            request = GenerateRequest(prompt=PROMPT, max_tokens=TOKENS, temperature=0.8, seed=seed)
            try:
                with ControlClient(control_socket(self._peer.home)) as client:
                    self._one(client, request)
            except LocalFault as e:
                self._lived.unanswered.append(str(e)[:100])
                self.over.wait(1.0)

    def _one(self, client: ControlClient, request: GenerateRequest) -> None:
        last = time.monotonic()
        for piece in client.generate(request):
            if piece.HasField("token"):
                now = time.monotonic()
                self._lived.waits.append(now - last)
                last = now
