"""A crowd that joins one founder: 60 times ``tutti join INVITE --yes`` within 5 seconds, on one
machine.

    python -m benchmarks.crowd [--peers 60] [--within 5] [--limit 180] [--seed 1] [--json -]

A founder, which hosts the ends and leads, and a peer of the only block stage train a tiny model
over loopback. Then strangers join by the founder's invite, at moments drawn from the seed; each has
its own key, asks its way in and chooses its stage. All share the cores of this machine, so the
epochs of the members slow down by what the crowd takes; joiners are nice, as by default. Daemons
are forked from processes that have loaded torch, hivemind and libp2p: a real crowd loads these on
machines of its own. Takes up to four minutes on two cores.

  joiners in a plan         most joiners that are members of one plan, within the limit
  joins that ended          exit codes, and the last words
  epochs a second           committed by the members before the crowd came, and while it came
  longest time without ...  between two commits, from the first join until all are in a plan
  told to wait              joiners that printed that they wait in the founder's queue
  processor seconds ...     with p2pd: the founder's while the crowd came, for each joiner; and a
                            joiner's until all are in a plan, median and most
  memory of a joiner        private (USS) and resident, with its p2pd, median
"""

import random
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from benchmarks.report import Report, command_line
from testbed.daemons.books import COMMITTED, PLANNED
from testbed.daemons.fleet import WORKING, Box, Hang, Peer, folder
from testbed.daemons.forks import Forks
from testbed.daemons.told import Chronicle

PEERS = 60
WITHIN_S = 5.0
LIMIT_S = 180.0
QUIET_S = 10.0
"""Seconds for which the members train undisturbed before the crowd comes."""
POLL_S = 0.5
SAY_S = 10.0
EPOCHS = 1_000_000
"""More epochs than any run makes."""
BATCH = 256
"""Sequences of an epoch, of 32 tokens each: half a second of training by two peers on two cores."""
MEMBER = {"TUTTI_NICE": "0", "TUTTI_DIRECTORY_REFRESH_S": "5"}
JOINER = {"TUTTI_NICE": "10", "TUTTI_DIRECTORY_REFRESH_S": "5"}
"""Environment of the daemons. The directory has its defaults, not the settings of tests. Joiners
have the default niceness; members have none, because each would have a machine of its own."""
MET = "before: 29 joins within 8.4 s, 22 of them ended after 2.8 s with exit code 4"
MIB = 1 << 20


@dataclass(frozen=True)
class Used:
    """Processor seconds and MiB of a daemon and its p2pd."""

    daemon_s: float
    p2pd_s: float
    private: float
    resident: float

    @property
    def seconds(self) -> float:
        return self.daemon_s + self.p2pd_s


@dataclass
class Ran:
    """One crowd. Times are Unix seconds."""

    peers: int
    limit_s: float
    began: float = 0.0
    ended: float = 0.0
    planned: list[tuple[float, int]] = field(default_factory=list)
    """Time of each plan that the founder made after the crowd came, and the number of joiners in
    it."""
    commits: list[float] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    """Joiners that ended: exit code and last words."""
    working: int = 0
    """Joiners that say themselves, at the end, that they take part."""
    told_to_wait: int = 0
    founder: Used = Used(0.0, 0.0, 0.0, 0.0)
    joiners: list[Used] = field(default_factory=list)

    @property
    def in_plan(self) -> int:
        return self.planned[-1][1] if self.planned else 0

    def until(self, count: int) -> float | None:
        """Seconds from the first join until ``count`` of the crowd were in one plan."""
        return next((at - self.began for at, members in self.planned if members >= count), None)

    def rate(self, begin: float, end: float) -> float:
        """Epochs a second committed in this time."""
        return sum(begin <= at < end for at in self.commits) / (end - begin)

    @property
    def longest_gap_s(self) -> float:
        during = [at for at in self.commits if self.began <= at < self.ended]
        return max(b - a for a, b in pairwise([self.began, *during, self.ended]))


def main() -> int:
    """Let the crowd come, print, and exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--peers", type=int, default=PEERS, help="joiners")
    parser.add_argument("--within", type=float, default=WITHIN_S, help="seconds in which they come")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds until all are in")
    parser.add_argument("--seed", type=int, default=1, help="of the moments at which they come")
    args = parser.parse_args()
    report = Report()
    try:
        with folder() as root:
            tell(report, run(root, args.peers, args.within, args.limit, args.seed))
    except Hang as e:
        report.add("3 did not come to its end", str(e), "", holds=False)
    return report.end(args.json)


def run(
    root: Path,
    peers: int = PEERS,
    within_s: float = WITHIN_S,
    limit_s: float = LIMIT_S,
    seed: int = 1,
) -> Ran:
    """Let ``peers`` join within ``within_s``, and watch until all are in a plan, ``limit_s`` at
    most. Homes are made in ``root``. Raises Hang when the members do not train before."""
    box = Box(root, forks=Forks())
    try:
        return _crowd(box, Ran(peers, limit_s), within_s, seed)
    finally:
        box.clean_up()


def _crowd(box: Box, ran: Ran, within_s: float, seed: int) -> Ran:
    founder, *others = box.swarm(
        (1, 1),
        pipeline__stages=1,
        training__min_replicas=1,
        training__epochs=EPOCHS,
        training__target_batch=BATCH,
        training__eval_every=EPOCHS,
    )
    members = [founder, *others]
    for peer in members:
        peer.environment = {**peer.environment, **MEMBER}
    box.start(*members)
    chronicle = Chronicle()
    chronicle.follow(founder.label, founder.events_path)
    joiners = box.newcomers([f"joiner-{number}" for number in range(ran.peers)], founder)
    for peer in joiners:
        peer.environment = {**peer.environment, **JOINER}
    time.sleep(QUIET_S)
    before = _used(founder)
    dice = random.Random(seed)
    ran.began = time.time()
    for peer, moment in zip(
        joiners, sorted(dice.uniform(0, within_s) for _ in joiners), strict=True
    ):
        time.sleep(max(0.0, ran.began + moment - time.time()))
        peer.start()
    _watch(ran, chronicle, joiners, len(members))
    after = _used(founder)
    ran.founder = Used(
        after.daemon_s - before.daemon_s,
        after.p2pd_s - before.p2pd_s,
        after.private,
        after.resident,
    )
    ran.joiners = [_used(peer) for peer in joiners if peer.running]
    ran.told_to_wait = sum("in its queue" in peer.said() for peer in joiners)
    ran.working = sum(peer.running and peer.status().state in WORKING for peer in joiners)
    chronicle.close()
    return ran


def _watch(ran: Ran, chronicle: Chronicle, joiners: list[Peer], members: int) -> None:
    """Follow the founder's plans until all joiners that still run are in one, or time is over."""
    said = ran.began
    while (now := time.time()) < ran.began + ran.limit_s:
        told = chronicle.read()
        ran.planned = [
            (e.at, int(e.get("members", 0)) - members)
            for e in told
            if e.kind == PLANNED and e.at >= ran.began
        ]
        ran.commits = [e.at for e in told if e.kind == COMMITTED]
        for peer in joiners:
            if peer.label not in ran.left and not peer.running and peer.child.process is not None:
                ran.left[peer.label] = f"{peer.child.process.returncode}: {peer.child.tail(3)}"
        if now - said >= SAY_S:
            said = now
            daemons = sum(peer.events_path.exists() for peer in joiners)
            print(
                f"{now - ran.began:.0f} s: {daemons} daemons, {ran.in_plan} in the newest plan, "
                f"{len(ran.left)} ended",
                file=sys.stderr,
                flush=True,
            )
        if ran.in_plan >= len(joiners) - len(ran.left):
            break
        time.sleep(POLL_S)
    ran.ended = time.time()


def _used(peer: Peer) -> Used:
    """Measure a daemon and its p2pd from their starts until now."""
    daemon = psutil.Process(peer.pid)
    found: list[tuple[float, float, float]] = []
    for process in (daemon, peer.p2pd()):
        if process is not None:
            spent = process.cpu_times()
            held = process.memory_full_info()
            found.append((spent.user + spent.system, held.uss / MIB, held.rss / MIB))
    seconds, private, resident = zip(*found, strict=True)
    return Used(seconds[0], sum(seconds[1:]), sum(private), sum(resident))


def tell(report: Report, ran: Ran) -> None:
    """The rows of item 3."""
    crowd = f"of {ran.peers} that join one founder"
    seconds = ran.until(ran.peers)
    report.add(
        "3.a joiners in a plan",
        ran.in_plan,
        f"{crowd}; {ran.working} say so themselves",
        MET,
        f"{ran.peers}",
        ran.in_plan == ran.peers,
    )
    report.add(
        "3.b seconds until all are in a plan",
        round(seconds, 1) if seconds is not None else None,
        f"s; half of them after {_s(ran.until(ran.peers // 2))}",
        "",
        f"<= {ran.limit_s:.0f}",
        seconds is not None and seconds <= ran.limit_s,
    )
    words = " | ".join(f"{label} {why}" for label, why in ran.left.items())
    report.add("3.c joins that ended", len(ran.left), words[:500], MET, "0", not ran.left)
    quiet = ran.rate(ran.began - QUIET_S, ran.began)
    during = ran.rate(ran.began, ran.ended)
    report.add(
        "3.d epochs a second while the crowd came",
        round(during, 3),
        f"{round(during * (ran.ended - ran.began))} epochs in {ran.ended - ran.began:.0f} s",
        f"{quiet:.2f} a second by two members before",
        "> 0",
        during > 0,
    )
    report.add("3.e longest time without an epoch", round(ran.longest_gap_s, 1), "s", "", "", None)
    report.add("3.f told to wait in the queue", ran.told_to_wait, crowd)
    report.add(
        "3.g processor seconds of the founder for each joiner",
        round(ran.founder.seconds / ran.peers, 2),
        f"s, of these {ran.founder.p2pd_s / ran.peers:.2f} in its p2pd, epochs included",
    )
    if not ran.joiners:
        return
    spent = [used.seconds for used in ran.joiners]
    report.add(
        "3.h processor seconds of a joiner",
        round(median(spent), 2),
        f"s, of these {median(used.p2pd_s for used in ran.joiners):.2f} in its p2pd; "
        f"{max(spent):.2f} at most",
    )
    report.add(
        "3.i memory of a joiner",
        round(median(used.private for used in ran.joiners)),
        f"MiB private, {median(used.resident for used in ran.joiners):.0f} resident, "
        "its p2pd included",
    )


def _s(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
