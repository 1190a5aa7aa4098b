"""A whole swarm on one machine: real daemons as processes, real p2pd, real TLS, watched until it
has learnt to write.

``tutti demo`` is the product itself, started several times; nothing here knows how training works.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from node.app.launch import OWN_PORTS, Child, as_flags, stop_all
from node.control.client import ControlClient
from node.control.text import compare_digests, swarm_picture
from node.core import interrupts
from node.core.errors import ExitCode, LocalFault, TimedOut, UsageFault
from node.core.home import control_socket
from node.core.ids import ENDS
from node.core.interrupts import held, raising
from node.identity.keys import Identity
from node.manifest import Manifest, amended
from node.reach.interfaces import free_port
from protos.control_pb2 import GenerateRequest, Snapshot

START_S = 180.0
"""Longest wait for the first plan: importing torch in eight processes on two cores takes a
while."""
STUCK_S = 120.0
"""Longest time without a new epoch."""
POLL_S = 1.0
KILL_AT = 0.35
"""Share of the run after which ``--kill`` strikes: of its epochs, or of its seconds where these are
over sooner."""
REPLACE_AFTER_S = 2.0
COMPARISONS = 5
"""Polls at the end until two replicas are seen at the same epoch: they may train on."""
PROMPT = "The "
SAMPLE_TOKENS = 160


@dataclass(frozen=True)
class DemoOptions:
    """``nodes``: peers of the ends, then of each block stage. ``epochs`` 0: the manifest's;
    ``seconds`` 0: no limit. With ``kill`` it lasts until the replacement is in a plan, at most
    :data:`START_S` after the kill.

    ``rendezvous``: everybody meets at a peer that holds no part of the model, as in
    docker-compose.yml.
    """

    nodes: tuple[int, ...] = (1, 2, 2, 2)
    kill: bool = False
    json: bool = False
    epochs: int = 0
    seconds: float = 0.0
    home: Path | None = None
    keep: bool = False
    manifest: Manifest | None = None
    sample: bool = True
    rendezvous: bool = False


def spread(ends: int, stages: int, replicas: int, peers: int) -> tuple[int, ...]:
    """Peers of the ends and of each block stage: ``replicas`` of each, or ``peers`` in all. Raises
    UsageFault for too few."""
    if not peers:
        return (ends, *([replicas] * stages))
    each, more = divmod(peers - ends, stages)
    if each < 1:
        raise UsageFault(
            f"{peers} peers are too few",
            f"{ends} at the ends and one for each of {stages} block stages",
        )
    return (ends, *(each + (i < more) for i in range(stages)))


@dataclass
class DemoOutcome:
    """Outcome of the demo; the JSON line of ``tutti demo --json``."""

    nodes: int
    epochs: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    loss_first: float = 0.0
    loss_val: float = 0.0
    seconds: float = 0.0
    start_seconds: float = 0.0
    compared: int = 0
    """Replicas that another one of their cell and epoch could be compared with."""
    digests_equal: bool = False
    failures: int = 0
    killed: str = ""
    replaced_in_s: float = 0.0
    """Seconds from the kill until the replacement worked; 0 if it never did."""
    bytes_sent: int = 0
    cpu_s: float = 0.0
    time_s: dict[str, float] = field(default_factory=dict)
    sample: str = ""


class DemoSwarm:
    """The daemons of one demo and their latest snapshots."""

    def __init__(self, home: Path, options: DemoOptions) -> None:
        self.home = home
        self.options = options
        chief = Identity.load_or_create(home / "ends-0" / "identity.key")
        base = options.manifest or Manifest.default_demo()
        changes = {
            "training.min_replicas": min(options.nodes[1:]),
            "training.epochs": options.epochs or base.training.epochs,
            "pipeline.stages": len(options.nodes) - 1,
        }
        self.manifest = Manifest.parse(amended(base, changes).sign(chief))
        self.swarm_toml = home / "swarm.toml"
        self.swarm_toml.write_bytes(self.manifest.to_toml())
        self._port = free_port(["127.0.0.1"])
        host = chief
        if options.rendezvous:
            host = Identity.load_or_create(home / "rendezvous" / "identity.key")
        self.join = f"/ip4/127.0.0.1/tcp/{self._port}/p2p/{host.peer_id}"
        self.children: list[Child] = []
        self.snapshots: dict[str, Snapshot] = {}
        if options.rendezvous:
            meet = (
                "bootstrap",
                "--listen",
                "127.0.0.1",
                "--swarm",
                str(self.swarm_toml),
                *as_flags(OWN_PORTS | {"transport.p2p_port": self._port}),
            )
            self.children.append(Child("rendezvous", home / "rendezvous", meet))
        for stage, count in enumerate(options.nodes):
            for i in range(count):
                self.add(stage, i)

    def add(self, stage: int, number: int) -> Child:
        """One more daemon, not started yet."""
        label = f"ends-{number}"
        role = ("--role", "ends")
        if stage != ENDS:
            label = f"stage-{stage}-{number}"
            role = ("--role", "stage", "--stage", str(stage))
        first = stage == ENDS and number == 0 and not self.options.rendezvous
        where = {"transport.p2p_port": self._port} if first else {"join": self.join}
        arguments = (
            "start",
            str(self.swarm_toml),
            *role,
            *as_flags(OWN_PORTS | where),
            "--listen",
            "127.0.0.1",
            "--threads",
            "1",
            "--name",
            label,
        )
        child = Child(label, self.home / label, arguments)
        self.children.append(child)
        return child

    def client(self, label: str) -> ControlClient:
        """A conversation with a daemon that runs. Raises NotRunning."""
        return ControlClient(control_socket(self.home / label), timeout_s=5.0)

    def poll(self) -> list[Snapshot]:
        """Ask every daemon for its snapshot; one that has died is remembered as lost."""
        for child in self.children:
            if child.running:
                with contextlib.suppress(LocalFault), self.client(child.label) as client:
                    self.snapshots[child.label] = client.status()
            elif child.label in self.snapshots:
                self.snapshots[child.label].state = "lost"
        return [self.snapshots[c.label] for c in self.children if c.label in self.snapshots]


def run(options: DemoOptions) -> int:
    """Run the demo; the exit code. Raises TimedOut when the swarm does not start or stands
    still."""
    outcome = play(options)
    if options.json:
        print(json.dumps(dataclasses.asdict(outcome)), flush=True)
    # Replicas must be equal where there are two of a stage, and cells that hold more than one.
    several = options.manifest is None or options.manifest.averaging.cell != 1
    pairs = max(options.nodes) > 1 and several
    fine = outcome.digests_equal or not (outcome.compared or pairs)
    if fine and not outcome.failures:
        return int(ExitCode.OK)
    return int(ExitCode.DEGRADED)


def play(options: DemoOptions) -> DemoOutcome:
    """Start, watch, kill if asked, generate, stop. Returns the result. Raises KeyboardInterrupt
    after a Ctrl-C, when everything is taken down."""
    interrupts.resume(signal.SIGTERM, signal.SIGHUP)  # both end the children too
    outcome = DemoOutcome(nodes=sum(options.nodes) + options.rendezvous)
    with held(), _home(options) as home:
        swarm: DemoSwarm | None = None
        try:
            with raising():
                swarm = DemoSwarm(home, options)
                outcome = _train(swarm, options, outcome)
        except KeyboardInterrupt:
            _say("stopping every daemon; a second Ctrl-C does not wait for them")
            raise
        finally:
            stop_all(swarm.children if swarm else ())
        _summary(outcome)
    return outcome


def _train(swarm: DemoSwarm, options: DemoOptions, outcome: DemoOutcome) -> DemoOutcome:
    _say(f"tutti demo: {outcome.nodes} daemons on this machine, their files in {swarm.home}")
    began = time.monotonic()
    for child in swarm.children:
        child.start()
    with _picture(options, swarm) as show:
        _wait_for_start(swarm, show, began)
        outcome.start_seconds = round(time.monotonic() - began, 1)
        _watch(swarm, options, outcome, show)
    return _finish(swarm, outcome)


def _wait_for_start(swarm: DemoSwarm, show: "Show", began: float) -> None:
    while True:
        snapshots = swarm.poll()
        show(
            snapshots,
            "starting: every process loads torch and hivemind, finds the others and is told its "
            "stage",
        )
        if any(s.epoch > 0 or s.state == "training" for s in snapshots if s.role == "ends"):
            return
        for child in swarm.children:
            if not child.running:
                raise LocalFault(
                    f"the daemon of {child.label} ended while starting",
                    f"the end of its output:\n{child.tail()}",
                )
        if time.monotonic() - began > START_S:
            raise TimedOut(
                f"no epoch was planned in {START_S:.0f} s",
                f"see daemon.out of each peer below {swarm.home}",
            )
        time.sleep(POLL_S)


def _watch(swarm: DemoSwarm, options: DemoOptions, outcome: DemoOutcome, show: "Show") -> None:
    began = moved = time.monotonic()
    last = -1
    victim = None
    replacement = None
    killed_at = 0.0
    epochs = swarm.manifest.training.epochs
    while True:
        snapshots = swarm.poll()
        chiefs = [c for c in swarm.children if c.label.startswith("ends-")]
        if not any(c.running for c in chiefs):
            raise LocalFault(
                "every daemon at the ends has ended",
                f"the end of the output of {chiefs[0].label}:\n{chiefs[0].tail()}",
            )
        now = time.monotonic()
        ends = [s for s in snapshots if s.role == "ends" and s.state != "lost"]
        epoch = max((s.epoch for s in ends), default=0)
        if epoch > last:
            last = epoch
            moved = now
        if now - moved > STUCK_S:
            raise TimedOut(
                f"epoch {last} did not end in {STUCK_S:.0f} s",
                f"see daemon.out of each peer below {swarm.home}",
            )
        done = epoch / epochs
        if options.seconds:
            done = max(done, (now - began) / options.seconds)
        if options.kill and victim is None and done >= KILL_AT:
            stage_label = "stage-1-"
            if len(options.nodes) > 2:
                stage_label = "stage-2-"
            victim = next(c for c in swarm.children if c.label.startswith(stage_label))
            victim.kill()
            outcome.killed = victim.label
            killed_at = now
            _say(f"killed {victim.label} with SIGKILL at epoch {epoch}")
        if victim is not None and replacement is None and now - killed_at > REPLACE_AFTER_S:
            stage = int(victim.label.split("-")[1])
            replacement = swarm.add(stage, options.nodes[stage])
            replacement.start()
            _say(f"a fresh daemon, {replacement.label}, takes its place")
        s = Snapshot()
        if replacement:
            s = swarm.snapshots.get(replacement.label, s)
        works = s.epoch >= epoch - 1 and s.state == "training" and s.micro_batches > 0
        if works and not outcome.replaced_in_s:
            outcome.replaced_in_s = round(now - killed_at, 1)
            _say(
                f"{s.name} fetched its state and is in a plan again, "
                f"{outcome.replaced_in_s} s after the kill"
            )
        note = f"{now - began:.0f} s"
        if outcome.killed:
            note += f"   killed {outcome.killed}"
        show(snapshots, note)
        finished = ends and all(s.state == "finished" for s in ends)
        over = 0 < options.seconds < now - began
        # The end waits for the replacement, so that a slow machine gives the same outcome.
        awaited = (
            replacement is not None
            and replacement.running
            and not outcome.replaced_in_s
            and now - killed_at < START_S
        )
        if finished or (over and not awaited):
            outcome.seconds = round(now - began, 1)
            return
        time.sleep(POLL_S)


def _finish(swarm: DemoSwarm, outcome: DemoOutcome) -> DemoOutcome:
    polls = 0
    while True:
        time.sleep(POLL_S)
        snapshots = [s for s in swarm.poll() if s.state != "lost"]
        compared, unequal = compare_digests(snapshots)
        polls += 1
        if compared or polls == COMPARISONS or not any(s.state == "training" for s in snapshots):
            break
    ends = next(s for s in snapshots if s.role == "ends")
    kinds = sorted({kind for s in snapshots for kind in s.time_s})
    outcome = dataclasses.replace(
        outcome,
        epochs=ends.epoch,
        tokens=ends.tokens,
        tokens_per_s=round(ends.tokens / max(outcome.seconds, 1e-9), 1),
        loss_first=round(ends.loss_first, 4),
        loss_val=round(ends.loss_val, 4),
        compared=compared,
        digests_equal=compared > 0
        and not unequal
        and not any(s.digest_mismatches for s in snapshots),
        failures=sum(not c.running for c in swarm.children if c.label != outcome.killed),
        bytes_sent=sum(s.bytes_sent for s in snapshots),
        time_s={k: round(sum(s.time_s.get(k, 0.0) for s in snapshots), 1) for k in kinds},
        cpu_s=round(sum(s.cpu_s for s in snapshots), 1),
    )
    if not swarm.options.sample:
        return outcome
    _say("\na sample, generated through the swarm:")
    request = GenerateRequest(
        prompt=PROMPT, max_tokens=SAMPLE_TOKENS, temperature=0.7, seed=1, top_k=40
    )
    sys.stderr.write(f"  {PROMPT}")
    label = next(c.label for c in swarm.children if c.label.startswith("ends-") and c.running)
    with swarm.client(label) as client:
        for piece in client.generate(request):
            outcome.sample += piece.text
            # The model may say anything, terminal commands included.
            sys.stderr.write("".join(map(_shown, piece.text)))
            sys.stderr.flush()
    _say("\n")
    return outcome


def _shown(character: str) -> str:
    """A character of a sample on the terminal: lines are indented, and nothing controls it."""
    if character == "\n":
        return "\n  "
    if character.isprintable():
        return character
    return " "


def _summary(o: DemoOutcome) -> None:
    equal = "not compared: no two are of one cell and epoch"
    if o.digests_equal:
        equal = "equal"
    elif o.compared:
        equal = "NOT equal"
    _say(
        f"{o.nodes} daemons trained {o.epochs} epochs, {o.tokens / 1e6:.2f} M tokens in "
        f"{o.seconds:.0f} s: {o.tokens_per_s:,.0f} tokens/s"
    )
    _say(
        f"loss {o.loss_first:.3f} -> held-out {o.loss_val:.3f} nats per byte; replicas {equal}; "
        f"{o.failures} failures"
    )
    if o.killed:
        back = "in no plan yet"
        if o.replaced_in_s:
            back = f"in a plan {o.replaced_in_s:.0f} s later"
        _say(f"{o.killed} was killed; its replacement was {back}")


# ------------------------------------------------------------ what the person sees


Show = Callable[[list[Snapshot], str], None]
"""Called with every poll and a note; draws, or says a line now and then."""


class _Lines:
    """Progress for pipes and logs: a line when a new tenth of the epochs is reached."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._said = -1

    def __call__(self, snapshots: list[Snapshot], note: str) -> None:
        ahead = max(snapshots, key=lambda s: s.epoch, default=None)
        tenth = -1
        if ahead:
            tenth = 10 * ahead.epoch // max(1, self._epochs)
        if ahead is not None and tenth > self._said and ahead.loss:
            self._said = tenth
            val = ""
            if ahead.loss_val:
                val = f", held-out {ahead.loss_val:.3f}"
            _say(
                f"epoch {ahead.epoch}/{self._epochs}  loss {ahead.loss:.3f}{val}  "
                f"{ahead.tokens_per_s:,.0f} tok/s  {note}"
            )


@contextlib.contextmanager
def _picture(options: DemoOptions, swarm: DemoSwarm) -> Iterator[Show]:
    if options.json or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _Lines(swarm.manifest.training.epochs)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    with Live(console=console, refresh_per_second=4, transient=False) as live:

        def draw(snapshots: list[Snapshot], note: str) -> None:
            width = min(console.width, 120)
            height = min(console.height, 30) - 1
            live.update(swarm_picture(snapshots, width=width, height=height, note=note))

        yield draw


@contextlib.contextmanager
def _home(options: DemoOptions) -> Iterator[Path]:
    if options.home is not None:
        options.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        yield options.home.absolute()
        return
    home = Path(tempfile.mkdtemp(prefix="tutti-demo-"))
    try:
        yield home
    except KeyboardInterrupt:
        if not options.keep:
            shutil.rmtree(home, ignore_errors=True)
        raise
    except BaseException:
        _say(f"the daemons' files are kept in {home}")
        raise
    if options.keep:
        _say(f"the daemons' files are in {home}")
    else:
        shutil.rmtree(home, ignore_errors=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
