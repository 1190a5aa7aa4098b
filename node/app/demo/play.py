"""The demo from its start to its last line: start, watch, kill if asked, generate, stop."""

import contextlib
import dataclasses
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from node.app.demo.daemons import DemoOptions, DemoSwarm, child_maker
from node.app.demo.page import DemoPage
from node.app.demo.picture import Scene, Show, picture, say
from node.app.demo.writing import PROMPT, SHORT_TOKENS, Writer, request
from node.app.launch import Child, stop_all
from node.control.text import compare_digests
from node.core import interrupts
from node.core.errors import ExitCode, LocalFault, TimedOut
from node.core.interrupts import held, raising
from protos.control_pb2 import Snapshot

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
SAMPLE_TOKENS = 160
NEXT = """next:
  tutti start                  a swarm of your own; it prints an invite for your friends
  tutti swarm init --help      train on your text, or from a model that you have
  tutti join INVITE            help somebody else's swarm"""


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
    """Seconds from the start to the first plan."""
    first_epoch_seconds: float = 0.0
    """Seconds from the start to the first epoch that the swarm had committed."""
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
    work: dict[str, float] = field(default_factory=dict)
    """Share of each daemon in the work of all, by label."""
    sample: str = ""


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
    with held(), child_maker() as make, _home(options) as home:
        swarm: DemoSwarm | None = None
        page = DemoPage(options.page)
        try:
            with raising():
                began = time.monotonic()
                say(f"tutti demo: {outcome.nodes} daemons on this machine, their files in {home}")
                swarm = DemoSwarm(home, options, make)
                outcome = Demo(swarm, outcome, began, page).play()
        except KeyboardInterrupt:
            say("stopping every daemon; a second Ctrl-C does not wait for them")
            raise
        finally:
            page.close()
            stop_all(swarm.children if swarm else ())
        _summary(outcome)
    return outcome


class Demo:
    """One demo. ``began``: monotonic second of its start."""

    def __init__(
        self, swarm: DemoSwarm, outcome: DemoOutcome, began: float, page: DemoPage
    ) -> None:
        self.swarm = swarm
        self.options = swarm.options
        self.outcome = outcome
        self.began = began
        self.page = page
        self.writer = Writer(swarm)
        # A program that reads the result sees no picture, and the samples cost some speed.
        self.writes = self.options.sample and not self.options.json
        self.kill = Kill(swarm, outcome)

    def play(self) -> DemoOutcome:
        """Start the daemons, watch them until the end, and have them write a last sample."""
        for child in self.swarm.children:
            child.start()
        with picture(self.swarm.manifest.training.epochs, self.options.json) as show:
            self.wait_for_start(show)
            self.watch(show)
            if self.writes:
                self.writer.wait(self.writer.longest_s(SHORT_TOKENS))
        return self._finish()

    def wait_for_start(self, show: Show) -> None:
        """Watch until the first plan. Raises LocalFault for a daemon that ends, TimedOut."""
        while True:
            snapshots = self.swarm.poll()
            now = time.monotonic()
            if any(s.epoch > 0 or s.state == "training" for s in snapshots if s.role == "ends"):
                self.outcome.start_seconds = round(now - self.began, 1)
                return
            note = f"{now - self.began:.0f} s"
            show(Scene(snapshots, note, starting=self._starting()))
            for child in self.swarm.children:
                if not child.running:
                    raise LocalFault(
                        f"the daemon of {child.label} ended while starting",
                        f"the end of its output:\n{child.tail()}",
                    )
            if now - self.began > START_S:
                raise TimedOut(
                    f"no epoch was planned in {START_S:.0f} s",
                    f"see daemon.out of each peer below {self.swarm.home}",
                )
            time.sleep(POLL_S)

    def _starting(self) -> list[tuple[str, str]]:
        """Label and activity of each daemon."""
        found: list[tuple[str, str]] = []
        for child in self.swarm.children:
            s = self.swarm.snapshots.get(child.label)
            if s is None:
                does = "loads torch and hivemind"
            elif s.state == "starting":
                does = s.step or "starts"
            else:
                does = f"{s.state}: {s.reason}" if s.reason else s.state
            found.append((child.label, does))
        return found

    def watch(self, show: Show) -> None:
        """Watch until the run is complete or its time is over. Raises LocalFault when the daemons
        of the ends have ended, TimedOut when no epoch ends."""
        began = time.monotonic()
        moved = began
        last = -1
        epochs = self.swarm.manifest.training.epochs
        seconds = self.options.seconds
        while True:
            snapshots = self.swarm.poll()
            self.swarm.chief()
            self.page.look()
            now = time.monotonic()
            ends = [s for s in snapshots if s.role == "ends" and s.state != "lost"]
            epoch = max((s.epoch for s in ends), default=0)
            if epoch > last:
                last = epoch
                moved = now
                self._reached(epoch, now)
            if now - moved > STUCK_S:
                raise TimedOut(
                    f"epoch {last} did not end in {STUCK_S:.0f} s",
                    f"see daemon.out of each peer below {self.swarm.home}",
                )
            done = epoch / epochs
            if seconds:
                done = max(done, (now - began) / seconds)
            self.kill.look(done, epoch, now)
            note = f"{now - self.began:.0f} s   {self.kill.words}"
            show(Scene(snapshots, note, written=self.writer.written, page=self.page.address))
            finished = ends and all(s.state == "finished" for s in ends)
            over = 0 < seconds < now - began
            if finished or (over and not self.kill.awaited(now)):
                self.outcome.seconds = round(now - began, 1)
                return
            time.sleep(POLL_S)

    def _reached(self, epoch: int, now: float) -> None:
        if epoch > 0 and not self.outcome.first_epoch_seconds:
            self.outcome.first_epoch_seconds = round(now - self.began, 1)
            self.page.open(self.swarm)
        if self.writes and epoch > 0:
            self.writer.reached(epoch)

    def _finish(self) -> DemoOutcome:
        polls = 0
        while True:
            time.sleep(POLL_S)
            snapshots = [s for s in self.swarm.poll() if s.state != "lost"]
            compared, unequal = compare_digests(snapshots)
            polls += 1
            still = any(s.state == "training" for s in snapshots)
            if compared or polls == COMPARISONS or not still:
                break
        ends = next((s for s in snapshots if s.role == "ends"), None)
        if ends is None:
            raise LocalFault(
                "no daemon at the ends has answered",
                f"see daemon.out of each peer below {self.swarm.home}",
            )
        kinds = sorted({kind for s in snapshots for kind in s.time_s})
        children = self.swarm.children
        outcome = dataclasses.replace(
            self.outcome,
            epochs=ends.epoch,
            tokens=ends.tokens,
            tokens_per_s=round(ends.tokens / max(self.outcome.seconds, 1e-9), 1),
            loss_first=round(ends.loss_first, 4),
            loss_val=round(ends.loss_val, 4),
            compared=compared,
            digests_equal=compared > 0
            and not unequal
            and not any(s.digest_mismatches for s in snapshots),
            failures=sum(not c.running for c in children if c.label != self.outcome.killed),
            bytes_sent=sum(s.bytes_sent for s in snapshots),
            time_s={k: round(sum(s.time_s.get(k, 0.0) for s in snapshots), 1) for k in kinds},
            cpu_s=round(sum(s.cpu_s for s in snapshots), 1),
            work=shares(snapshots),
        )
        if self.options.sample:
            outcome.sample = self._last_sample()
        return outcome

    def _last_sample(self) -> str:
        """Have the swarm write, token by token on the terminal, as long as the samples before let
        expect. Returns the text, which is shorter where that time is over."""
        label = self.swarm.chief()
        seconds = self.writer.longest_s(SAMPLE_TOKENS)
        say("\na sample, generated through the swarm:")
        sys.stderr.write(f"  {PROMPT}")
        text = ""
        with contextlib.suppress(TimedOut), self.swarm.client(label) as client:
            for piece in client.generate(request(SAMPLE_TOKENS), seconds):
                text += piece.text
                # The model may say anything, terminal commands included.
                sys.stderr.write("".join(map(_shown, piece.text)))
                sys.stderr.flush()
        say("\n")
        return text


class Kill:
    """The kill of a daemon in the middle of a run, and its replacement."""

    def __init__(self, swarm: DemoSwarm, outcome: DemoOutcome) -> None:
        self._swarm = swarm
        self._outcome = outcome
        self._victim: Child | None = None
        self._replacement: Child | None = None
        self._at = 0.0

    @property
    def words(self) -> str:
        """The kill in a few words, "" before it."""
        if self._victim is None:
            return ""
        if self._outcome.replaced_in_s:
            return (
                f"killed {self._victim.label}; its replacement was in a plan "
                f"{self._outcome.replaced_in_s:.0f} s later"
            )
        if self._replacement is not None:
            return f"killed {self._victim.label}; {self._replacement.label} takes its place"
        return f"killed {self._victim.label}"

    def look(self, done: float, epoch: int, now: float) -> None:
        """Strike when the share ``done`` of the run is enough, and see to the replacement."""
        if not self._swarm.options.kill:
            return
        if self._victim is None:
            if done >= KILL_AT:
                self._strike(epoch, now)
            return
        if self._replacement is None:
            if now - self._at > REPLACE_AFTER_S:
                self._replace(self._victim)
            return
        s = self._swarm.snapshots.get(self._replacement.label, Snapshot())
        works = s.epoch >= epoch - 1 and s.state == "training" and s.micro_batches > 0
        if works and not self._outcome.replaced_in_s:
            self._outcome.replaced_in_s = round(now - self._at, 1)
            say(
                f"{s.name} fetched its state and is in a plan again, "
                f"{self._outcome.replaced_in_s} s after the kill"
            )

    def awaited(self, now: float) -> bool:
        """True while the replacement has not worked yet and may do so: the end waits for it, so
        that a slow machine gives the same outcome."""
        return (
            self._replacement is not None
            and self._replacement.running
            and not self._outcome.replaced_in_s
            and now - self._at < START_S
        )

    def _strike(self, epoch: int, now: float) -> None:
        stage_label = "stage-1-"
        if len(self._swarm.options.nodes) > 2:
            stage_label = "stage-2-"
        victim = next(c for c in self._swarm.children if c.label.startswith(stage_label))
        victim.kill()
        self._victim = victim
        self._outcome.killed = victim.label
        self._at = now
        say(f"killed {victim.label} with SIGKILL at epoch {epoch}")

    def _replace(self, victim: Child) -> None:
        stage = int(victim.label.split("-")[1])
        self._replacement = self._swarm.add(stage, self._swarm.options.nodes[stage])
        self._replacement.start()
        say(f"a fresh daemon, {self._replacement.label}, takes its place")


def shares(snapshots: Sequence[Snapshot]) -> dict[str, float]:
    """Share of each daemon in the micro-batches that all have computed, by name."""
    total = sum(s.micro_batches for s in snapshots)
    if not total:
        return {}
    return {s.name: round(s.micro_batches / total, 4) for s in snapshots if s.micro_batches}


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
    say(
        f"{o.nodes} daemons trained {o.epochs} epochs, {o.tokens / 1e6:.2f} M tokens in "
        f"{o.seconds:.0f} s: {o.tokens_per_s:,.0f} tokens/s"
    )
    say(
        f"loss {o.loss_first:.3f} -> held-out {o.loss_val:.3f} nats per byte; replicas {equal}; "
        f"{o.failures} failures"
    )
    if o.work:
        each = ", ".join(f"{name} {share:.0%}" for name, share in o.work.items())
        say(f"share of the work: {each}")
    if o.killed:
        back = "in no plan yet"
        if o.replaced_in_s:
            back = f"in a plan {o.replaced_in_s:.0f} s later"
        say(f"{o.killed} was killed; its replacement was {back}")
    say(f"\n{NEXT}")


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
    except BaseException:  # whatever it is, the files may say why
        say(f"the daemons' files are kept in {home}")
        raise
    if options.keep:
        say(f"the daemons' files are in {home}")
    else:
        shutil.rmtree(home, ignore_errors=True)
