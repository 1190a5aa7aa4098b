"""A live swarm in a quiet minute and in one under attack: what the attack costs it.

Both minutes have the same attackers connected, both have a newcomer that joins, and both are
counted from the same event files. The attack is all that differs.
"""

import contextlib
import json
import math
import os
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers import bent
from benchmarks.report import NOT_JUDGED, Report
from benchmarks.strangers.table import Attack, Ground
from benchmarks.strangers.watched import MODULE, Block, read_blocks
from testbed.daemons.books import COMMITTED
from testbed.daemons.fleet import REPOSITORY, START_S, WORKING, Box, Hang, Peer
from testbed.daemons.forks import Forks
from testbed.daemons.told import Told

FULL_S, QUICK_S = 60.0, 40.0
AFTER_S = 30.0
"""Seconds after a minute in which memory is given back."""
NEWCOMER_AT_S = 5.0
"""Seconds after the begin of a minute at which a newcomer is started."""
EPOCHS_BETWEEN = 3
"""Epochs between two minutes, for the swarm to go on without the newcomer of the first."""
LOOK_S = 0.5
SETTLE_S = 20.0
SETTLED_MIB = 5.0
"""A daemon whose memory grows by less in :data:`SETTLE_S` has taken what its own work needs."""
SETTLE_MOST_S = 120.0
WEIGH_S = 2.5
"""Seconds between two looks at the memory: each takes some milliseconds for every daemon."""
RIPE_S = 45.0
"""Seconds of working with each other after which peers count as colleagues."""

CALLBACK_S = 0.25
GROWTH_MIB, LEFT_MIB = 128.0, 32.0
EPOCHS = 0.9
FEWEST = 10
"""Fewest epochs of a quiet minute for which a ratio is judged: of fewer, one is already more than
what may be lost."""
SATURATED = 0.9
"""Share of this machine's processors that members and attackers keep busy together, above which the
system's scheduler decides how many epochs are left, and not the daemons."""
JOIN_S = 30.0
HELLO_S = 2.0
"""Seconds for a handshake with a server of this machine."""

BLAMED = ("fault", "banned", "voted-twice", "peer-on-probation", "false-tensors", "shares-unnamed")
"""Events that blame the peer that they name."""
HARMED = ("banned", "rate-limited", "peer-lost")
"""Events of a peer that has refused, or given up, the peer that the event names. A fault alone
refuses nobody."""


# ------------------------------------------------------------ attackers


class Attackers:
    """A process of :mod:`benchmarks.strangers.band`."""

    def __init__(self, home: Path, manifest: Path, victims: Sequence[Peer], keys: int) -> None:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._errors = home / "stderr"
        asked = {
            "home": str(home),
            "manifest": str(manifest),
            "victims": {peer.key: list(peer.status().addresses) for peer in victims},
            "targets": {peer.key: bulk_address(peer) for peer in victims},
            "keys": keys,
        }
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.strangers.band", json.dumps(asked)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=REPOSITORY,
            )
        self.peers: list[str] = self._read()["peers"]

    def attack(self, name: str, seconds: float) -> dict[str, Any]:
        """Run an attack to its end. Returns what the attackers were answered."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"attack": name, "seconds": seconds}) + "\n")
        self._process.stdin.flush()
        return self._read()

    @property
    def pid(self) -> int:
        """Process id of the attackers; their p2pds are its children."""
        return self._process.pid

    def errors(self) -> str:
        """The first words of attackers that failed; later ones are about loops that have ended."""
        return self._errors.read_text()[:1500]

    def end(self) -> None:
        """Kill the attackers; their p2pds die with them."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the attackers ended: {self.errors()}")
        said = json.loads(line)
        if "error" in said:
            raise RuntimeError(f"the attack failed: {said['error']}")
        return said


def bulk_address(peer: Peer) -> str:
    """HOST:PORT of the gRPC server of a daemon, as a scan of ports would find it."""
    listening = [
        connection.laddr.port
        for connection in psutil.Process(peer.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    found = [port for port in listening if _speaks_http2(port)]
    if len(found) != 1:
        raise RuntimeError(f"{peer.label} speaks HTTP/2 at {found} of its ports {listening}")
    return f"127.0.0.1:{found[0]}"


def _speaks_http2(port: int) -> bool:
    """True if a server over TLS that speaks HTTP/2 listens on this port of loopback."""
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname = False
    anyone.verify_mode = ssl.CERT_NONE
    anyone.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection(("127.0.0.1", port), HELLO_S) as raw,
            anyone.wrap_socket(raw) as line,
        ):
            return line.selected_alpn_protocol() == "h2"
    except OSError:
        return False


# ------------------------------------------------------------ the swarm


@dataclass
class Siege:
    """A swarm of live daemons that can be attacked. ``peers``: its honest members."""

    box: Box
    peers: list[Peer]
    invite: str
    capped: tuple[str, ...]
    """Settings of a line like the members': all work would go to a newcomer without a cap."""
    count: int = 0
    """Numbers of newcomers and attackers so far."""

    @property
    def well(self) -> bool:
        """True when two more epochs are committed soon, and all members run and train."""
        try:
            self.box.goes_on(2)
            self.box.until_training(*self.peers)
        except Hang:
            return False
        return True

    @contextlib.contextmanager
    def attackers(self, keys: int) -> Iterator[Attackers]:
        """Attackers that have met every member."""
        self.count += 1
        home = self.box.root / f"band-{self.count}"
        made = Attackers(home, self.box.root / "swarm.toml", self.peers, keys)
        try:
            yield made
        finally:
            made.end()

    def newcomer(self) -> Peer:
        """A peer with an invite, not started yet."""
        self.count += 1
        label = f"new-{self.count}"
        settings = [word for one in ("threads=1", *self.capped) for word in ("--set", one)]
        words = ("join", self.invite, "--yes", "--name", label, *settings)
        return self.box.bare(label, *words, "--role", "stage", "--stage", "1")


@contextlib.contextmanager
def siege(root: Path, ground: Ground) -> Iterator[Siege]:
    """A swarm of members that have worked with each other; all gone afterwards."""
    root.mkdir(parents=True, exist_ok=True)
    # Tensors in shared memory are not sent, so the cap would not bound them.
    capped = (f"transport.max_up={ground.up}", "transport.shared_memory=off")
    box = Box(root, settings=("checkpoint.every=5", *capped), forks=Forks(MODULE))
    try:
        peers = start_members(box, ground)
        box.until_training(*peers)
        box.goes_on(3, 2 * START_S)
        time.sleep(RIPE_S)
        yield Siege(box, peers, box.invite(peers[0]), capped)
    finally:
        box.clean_up()


def start_members(box: Box, ground: Ground) -> list[Peer]:
    """Start the members of a swarm and return them. In a private run the owner starts first, and
    the others join by its invite. Raises Hang."""
    quiet = {"training__epochs": 100_000, "training__eval_every": 0}
    changes = dict(ground.changes)
    peers = box.swarm(ground.nodes, **quiet, training__rebalance_every_s=0.0, **changes)
    if changes.get("swarm__admission") == "invite":
        owner = peers[0].start()
        box.wait("an owner that answers", lambda: owner.status().state, START_S, (owner,))
        invite = box.invite(owner)
        settings = [word for one in box.settings for word in ("--set", one)]
        for place, peer in enumerate(peers[1:], start=1):
            stage = peer.label.split("-")[1]
            words = ("--role", "stage", "--stage", stage, *settings)
            peers[place] = box.invited(peer.label, invite, *words).start()
        return peers
    for peer in peers:
        peer.start()
    return peers


# ------------------------------------------------------------ minutes


@dataclass
class Minute:
    """Measurements of a swarm in one minute, and in the time after it."""

    seconds: float
    epochs: int = 0
    joined_s: float | None = None
    """Seconds from the start of the newcomer until it was in a plan; None: it never was."""
    grown_mib: float = 0.0
    left_mib: float = 0.0
    """Growth that is left :data:`AFTER_S` later. Members grow by their own work too, so the time
    after a quiet minute is the measure for the time after an attack."""
    grown_p2pd_mib: float = 0.0
    block: Block | None = None
    harmed: Counter[str] = field(default_factory=Counter)
    """Honest peers that honest peers refused or gave up, by event."""
    banned: int = 0
    """Attackers that some member has banned."""
    said: dict[str, Any] = field(default_factory=dict)
    """The answers that the attackers heard, see :mod:`benchmarks.strangers.band`."""
    cores: float = 0.0
    cores_of_attackers: float = 0.0
    """Processors that the members kept busy on average, and the attackers."""
    told: Counter[str] = field(default_factory=Counter)
    """Warnings and errors of the members, by kind."""


@dataclass
class _Memory:
    """Unique set sizes of daemons and their p2pds, MiB."""

    daemon: dict[str, float]
    p2pd: dict[str, float]

    def beyond(self, before: "_Memory") -> tuple[float, float]:
        """The largest growth of a daemon and of a p2pd."""
        return _growth(self.daemon, before.daemon), _growth(self.p2pd, before.p2pd)


def _growth(now: dict[str, float], before: dict[str, float]) -> float:
    return max((size - before[name] for name, size in now.items() if name in before), default=0.0)


def memory(peers: Sequence[Peer]) -> _Memory:
    """The memory of these peers now; one that has ended is left out."""
    found = _Memory({}, {})
    for peer in peers:
        with contextlib.suppress(psutil.Error):
            found.daemon[peer.label] = psutil.Process(peer.pid).memory_full_info().uss / 2**20
            if (p2pd := peer.p2pd()) is not None:
                found.p2pd[peer.label] = p2pd.memory_full_info().uss / 2**20
    return found


def processor_s(pids: Iterable[int]) -> float:
    """Processor seconds of these processes and of their children so far, those that have ended
    included."""
    found = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            ended = process.cpu_times()
            found += ended.children_user + ended.children_system
            for one in (process, *process.children()):
                with contextlib.suppress(psutil.Error):
                    times = one.cpu_times()
                    found += times.user + times.system
    return found


def settle(peers: Sequence[Peer]) -> None:
    """Wait until the daemons' memory grows no more by their own work, at most
    :data:`SETTLE_MOST_S`."""
    ends = time.monotonic() + SETTLE_MOST_S
    grown = math.inf
    while grown > SETTLED_MIB and time.monotonic() < ends:
        before = memory(peers)
        time.sleep(SETTLE_S)
        grown = memory(peers).beyond(before)[0]


def minute(
    place: Siege,
    seconds: float,
    *,
    enemies: Sequence[str] = (),
    enemy_pid: int = 0,
    attack: Callable[[], dict[str, Any]] | None = None,
) -> Minute:
    """Measure the swarm for ``seconds`` while ``attack`` runs beside it, and after it. Raises what
    the attack raises."""
    peers = place.peers
    made = Minute(seconds)
    newcomer = place.newcomer()
    # A daemon's memory grows with its own work too, so the last size before counts.
    before = memory(peers)
    since = time.time()
    members_s = processor_s(peer.pid for peer in peers)
    enemies_s = processor_s([enemy_pid] if enemy_pid else [])
    threads = ThreadPoolExecutor(1)
    attacking = threads.submit(attack) if attack is not None else None
    begin = time.monotonic()
    started = math.inf
    weighed = begin
    while (now := time.monotonic()) < begin + seconds:
        if started == math.inf and now >= begin + NEWCOMER_AT_S:
            newcomer.start()
            started = now
        if now > started and made.joined_s is None and newcomer.status().state in WORKING:
            made.joined_s = time.monotonic() - started
        if now - weighed >= WEIGH_S:
            weighed = now
            grown, grown_p2pd = memory(peers).beyond(before)
            made.grown_mib = max(made.grown_mib, grown)
            made.grown_p2pd_mib = max(made.grown_p2pd_mib, grown_p2pd)
        time.sleep(LOOK_S)
    until = time.time()
    made.cores = (processor_s(peer.pid for peer in peers) - members_s) / seconds
    if enemy_pid:
        made.cores_of_attackers = (processor_s([enemy_pid]) - enemies_s) / seconds
    if attacking is not None:
        made.said = attacking.result(2 * AFTER_S)
    time.sleep(AFTER_S)
    made.left_mib = memory(peers).beyond(before)[0]
    threads.shutdown(wait=False)
    _end(newcomer)
    _read(made, place, [*peers, newcomer], since, until, enemies)
    return made


def _end(peer: Peer) -> None:
    """End a peer that was a guest, in order if it can."""
    try:
        if peer.running:
            peer.end()
    except Hang:
        peer.kill()


def _read(
    made: Minute,
    place: Siege,
    honest: Sequence[Peer],
    since: float,
    until: float,
    enemies: Sequence[str],
) -> None:
    """Fill in what the event files tell."""
    now = time.time()
    told = [t for peer in place.peers for t in peer.told() if since <= t.at <= now]
    made.epochs = len({t.get("epoch") for t in told if t.kind == COMMITTED and t.at <= until})
    keys = {peer.key for peer in honest if (peer.home / "identity.key").is_file()}
    for event in told:
        if (
            event.kind in HARMED
            and event.get("peer") in keys
            and not _left(event, honest[-1], until)
        ):
            made.harmed[event.kind] += 1
        if event.level in ("warning", "error"):
            made.told[event.kind] += 1
    banned = {t.get("peer") for t in told if t.kind == "banned"}
    made.banned = len(banned & set(enemies))
    blocks = [b for peer in place.peers for b in read_blocks(peer.home, since, now)]
    made.block = max(blocks, key=lambda block: block.seconds, default=None)


def _left(event: Told, newcomer: Peer, until: float) -> bool:
    """True for the loss of a newcomer after its minute, at the end of which it leaves."""
    lost = event.kind == "peer-lost" and event.at > until
    return lost and event.get("peer") == newcomer.key


# ------------------------------------------------------------ an attack


def assault(report: Report, place: Siege, attack: Attack, name: str, seconds: float) -> None:
    """The rows of one attack. ``name``: how they begin."""
    settle(place.peers)
    if attack.bent:
        # One member more takes its share of the lines, so the quiet minute has an honest one.
        with _member(place, attack.stage, "true"):
            quiet = minute(place, seconds)
        place.box.goes_on(EPOCHS_BETWEEN)
        attacked = _betrayed(place, attack, seconds)
        rows(report, name, quiet, attacked, attack)
        return
    with place.attackers(attack.keys) as band:
        quiet = minute(place, seconds, enemies=band.peers)
        place.box.goes_on(EPOCHS_BETWEEN)
        attacked = minute(
            place,
            seconds,
            enemies=band.peers,
            enemy_pid=band.pid,
            attack=lambda: band.attack(attack.run, seconds),
        )
        rows(report, name, quiet, attacked, attack)


@contextlib.contextmanager
def _member(place: Siege, stage: int, name: str, through: tuple[str, ...] = ()) -> Iterator[Peer]:
    """One member more inside of the block, which the command ``through`` starts."""
    place.count += 1
    made = place.box.member(stage, f"{name}-{place.count}")
    made.child.through = through
    try:
        place.box.start(made)
        yield made
    finally:
        made.kill()


def _betrayed(place: Siege, attack: Attack, seconds: float) -> Minute:
    """A minute with a bent member, and what the others have said of it."""
    begin = time.time()
    with _member(place, attack.stage, "bent", bent.through(attack.bent)) as traitor:
        key = traitor.key
        attacked = minute(place, seconds, enemies=[key], attack=dict)
    told = [t for peer in place.peers for t in peer.told() if begin <= t.at]
    about = Counter(t.kind for t in told if t.level != "debug" and t.get("peer") == key)
    blamed = sum(about[kind] for kind in BLAMED)
    attacked.said = {"met": 1, "sent": 0, "calls": 0, "refused": blamed, "heard": dict(about)}
    return attacked


# ------------------------------------------------------------ rows


def rows(
    report: Report,
    name: str,
    quiet: Minute,
    attacked: Minute,
    attack: Attack,
) -> None:
    """The rows of one attack. ``name``: how they begin."""
    said = attacked.said
    block = attacked.block or Block(0.0, 0.0, "")
    calm = quiet.block.seconds if quiet.block else 0.0
    report.add(
        f"{name}: longest event-loop callback",
        block.seconds,
        "s",
        f"quiet {calm:.3f} s; {block.where or 'below what is looked up'}",
        f"below {CALLBACK_S}",
        holds=block.seconds < CALLBACK_S,
    )
    report.add(
        f"{name}: memory growth of a peer",
        attacked.grown_mib,
        "MiB",
        f"quiet {quiet.grown_mib:.0f} MiB; its p2pd {attacked.grown_p2pd_mib:.0f} MiB",
        f"at most {GROWTH_MIB:.0f}",
        holds=attacked.grown_mib <= GROWTH_MIB,
    )
    report.add(
        f"{name}: memory kept {AFTER_S:.0f} s after",
        attacked.left_mib,
        "MiB",
        f"quiet {quiet.left_mib:.0f} MiB",
        f"at most {LEFT_MIB:.0f} more than after a quiet time",
        holds=attacked.left_mib <= max(0.0, quiet.left_mib) + LEFT_MIB,
    )
    ratio = attacked.epochs / max(1, quiet.epochs)
    unjudged = _why_not(quiet, attacked)
    report.add(
        f"{name}: epochs over those of a quiet time",
        ratio,
        "x",
        f"{attacked.epochs} and {quiet.epochs} in {attacked.seconds:.0f} s each; members kept "
        f"{attacked.cores:.2f} processors busy ({quiet.cores:.2f}), attackers "
        f"{attacked.cores_of_attackers:.2f}; "
        f"{_most(attacked.told)}",
        f"at least {EPOCHS}{unjudged}",
        holds=None if unjudged else ratio >= EPOCHS,
    )
    report.add(
        f"{name}: honest peers banned, refused or given up",
        attacked.harmed.total(),
        "cases",
        _most(attacked.harmed),
        "0",
        holds=not attacked.harmed,
    )
    joined = attacked.joined_s
    waited = "" if quiet.joined_s is None else f"quiet {quiet.joined_s:.1f} s"
    report.add(
        f"{name}: a newcomer joins",
        "never" if joined is None else joined,
        "" if joined is None else "s",
        waited,
        f"within {JOIN_S:.0f} s",
        holds=joined is not None and joined <= JOIN_S,
    )
    answers = "; ".join(f"{count} x {text or 'accepted'}" for text, count in said["heard"].items())
    # A private run lets nobody in who was not invited: the connections themselves are the attack.
    met = said["met"] > 0 or attack.ground == "private"
    attempted = met and (said["calls"] > 0 or bool(attack.bent))
    refused = attempted and said["refused"] > 0
    keys = 1 if attack.bent else attack.keys
    report.add(
        f"{name}: attackers refused",
        said["refused"],
        "refusals",
        f"{said['met']} handshakes before, {said['calls']} calls, {said['sent'] / 2**20:.0f} MiB; "
        f"{attacked.banned} of {keys} banned; {answers}"[:600],
        "with the reason" + (", and banned" if attack.bans else ""),
        holds=refused and (attacked.banned > 0 or not attack.bans),
    )


def _why_not(quiet: Minute, attacked: Minute) -> str:
    """The reason why the epochs of a minute are not judged; "" if they are."""
    if quiet.epochs < FEWEST:
        return f"; {NOT_JUDGED}: a quiet time has fewer than {FEWEST} epochs"
    processors = os.cpu_count() or 1
    busy = attacked.cores + attacked.cores_of_attackers
    if busy <= SATURATED * processors:
        return ""
    return (
        f"; {NOT_JUDGED}: members and attackers kept {busy:.2f} of {processors} processors busy, "
        "so the system's scheduler decides"
    )


def _most(counted: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counted.most_common(5))
