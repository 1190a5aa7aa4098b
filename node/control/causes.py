"""The reason for which a peer does not train, and the next step. Pure.

:data:`ROWS` is the table of reasons in order of precedence: the first row that applies is shown by
``tutti status``, ``tutti monitor``, ``tutti peers``, the terminal of the daemon and its log. A row
looks at a :class:`Situation`, the facts that the daemon knows of itself and of others. Texts have
short ids of peers; the code that shows them adds names (:class:`node.core.names.Names`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from node.availability.words import paused_words
from node.control.words import ahead_or_behind, lasting
from node.coordinator.vitals import Life
from node.core.ids import ENDS, PeerId, short, stage_name, stage_names
from node.core.numbers import several
from node.epoch.waiting import Lack, Wait
from node.transport.clocks import ClockOffset

START_S = 120.0
"""Seconds of a start that takes no longer than usual."""
STALL_S = 15.0
"""Seconds in which nothing was received or done before that is a fault."""
WOKE_S = 60.0
"""Seconds that a peer has to find the others after it woke."""
WEIGHTS_S = 30.0
"""Seconds after its start in which a peer may still be looking for weights."""
NEXT_PLAN_S = 120.0
"""Seconds within which a leader that answers takes a peer into its next plan, as a rule."""
CONTENDED = 0.5
"""Share of the time spent waiting for a processor from which on slow answers are blamed on this
machine."""
SHOWN = 3
"""Peers that a sentence names; the others are counted."""
LOGS = "see tutti logs"
ADMISSION_STEP = (
    "ask the owner of the run for a new invite, then  tutti join INVITE  and  tutti restart"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The facts about a daemon. Times are seconds; a field that is empty or 0 says nothing."""

    state: str = "training"
    """The state of the peer, as ``tutti status`` shows it."""
    up_s: float = 0.0
    fault: tuple[str, str] = ("", "")
    """An error that ends the daemon, and the next step."""
    admission: str = ""
    """A sentence about this peer's admission to a private run, if others do not admit it."""
    p2p_up: bool = True
    clock: ClockOffset | None = None
    """The difference to the clocks of others, if it is too large."""
    stopped_s: float = 0.0
    """Seconds that this process stood still the last time."""
    slept: bool = False
    woke_s: float = 0.0
    """Seconds since it runs again."""
    paused: str = ""
    """The reason of a pause, and whether it still gives its stage up."""
    paused_by_run: bool = False
    """The run's owner pauses the run."""
    owns: bool = False
    """This peer's operator owns the run."""
    starting: str = ""
    """The step of the start that is under way."""
    starting_s: float = 0.0
    """Seconds since that step began."""
    disk: str = ""
    """A sentence about a disk that is full."""
    awaits_weights: bool = False
    """The weights that the run begins from are not here yet."""
    fetched: float = 1.0
    """Share of a state that has been received, 1 when none is fetched."""
    fetch_still_s: float = 0.0
    """Seconds since something of it was received."""
    text: str = ""
    """The reason for which an ends peer gets no text to train on."""
    wait: Wait | None = None
    """The reason for which no epoch is under way."""
    leader: PeerId | None = None
    leads: bool = False
    """This peer leads."""
    unled: bool = False
    """No peer leads, by this peer's knowledge."""
    leader_answers: bool = False
    """The leader answered the last heartbeat."""
    leader_waits: str = ""
    """The reason that it gave for waiting."""
    voters: tuple[PeerId, ...] = ()
    """Voters on the next version, this peer among them or not."""
    life: Mapping[PeerId, tuple[Life, float]] = field(default_factory=dict)
    """Peers that are silent or lost, and for how many seconds."""
    hosts: Mapping[PeerId, int] = field(default_factory=dict)
    """Other peers with the stage that they host, the silent ones included."""
    coming: Mapping[PeerId, int | None] = field(default_factory=dict)
    """Peers that are about to take part, or about to report to this leader, and at which stage;
    None while they choose one."""
    children: tuple[int, ...] = ()
    """Stages that daemons of this machine are loading for this one."""
    children_s: float = 0.0
    """Seconds since the last of these daemons was started."""
    child_trouble: tuple[str, ...] = ()
    unreached: tuple[PeerId, ...] = ()
    """Peers that this one has tried to reach in vain."""
    beside: frozenset[PeerId] = frozenset()
    """The peers among them, and among those that a leader's wait names, that run on this machine,
    this one included."""
    contended: float = 0.0
    """Share of the time for which threads of this process lately waited for a processor."""
    ways_had_time: bool = False
    """There was enough time to find a route to every peer."""
    idle_s: float = 0.0
    """Seconds since the last useful work here."""
    idle_most_s: float = STALL_S
    """Seconds without work that are usual now."""

    @property
    def stands(self) -> bool:
        """True if no epoch is under way, or this peer has been idle for too long."""
        return self.wait is not None or self.idle_s > self.idle_most_s

    def lives(self, peer: PeerId) -> bool:
        """Return True unless ``peer`` is silent or lost."""
        return peer not in self.life


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason and its next step. ``kind`` is a stable word. ``usual``: it belongs to a start or
    passes by itself, so the peer counts as healthy."""

    kind: str = ""
    what: str = ""
    step: str = ""
    usual: bool = False


NONE = Cause()
"""Cause of a peer that nothing keeps from training, or that is not meant to train."""
Row = Callable[[Situation], Cause | None]


def cause(s: Situation) -> Cause:
    """The first row of :data:`ROWS` that applies, else :data:`NONE`."""
    return next((found for row in ROWS if (found := row(s)) is not None), NONE)


# ----------------------------------------------------------- the table


def _fault(s: Situation) -> Cause | None:
    what, step = s.fault
    if not what:
        return None
    return Cause("fault", what, step)


def _paused(s: Situation) -> Cause | None:
    """A pause is the will of the operator or of the run's owner, so the peer is healthy."""
    if not s.paused:
        return None
    step = "go on at once with  tutti resume"
    if s.paused_by_run:
        step = "nothing to do here: it goes on when the run's owner resumes it"
    if s.paused_by_run and s.owns:
        step = "let it go on with  tutti swarm resume"
    what = paused_words(s.paused)
    if s.state == "pausing":
        what = f"leaves the plan for a pause: {s.paused}"
    return Cause("paused", what, step, usual=True)


def _leaves(s: Situation) -> Cause | None:
    """A peer that leaves, moves or has finished does not train; this is no fault."""
    if s.state in ("finished", "draining", "moving", "stopping"):
        return NONE
    return None


def _admission(s: Situation) -> Cause | None:
    if not s.admission:
        return None
    return Cause("admission", s.admission, ADMISSION_STEP)


def _p2p(s: Situation) -> Cause | None:
    if s.p2p_up or s.starting:
        return None
    return Cause(
        "p2p-down", "the p2p daemon is not running", f"it is started again by itself; {LOGS}"
    )


def _clock(s: Situation) -> Cause | None:
    if s.clock is None:
        return None
    step = "set the clock: timedatectl set-ntp true; compare it with  tutti doctor clock"
    return Cause("clock", clock_words(s.clock), step)


def _woke(s: Situation) -> Cause | None:
    if not s.stopped_s or s.woke_s > WOKE_S or s.idle_s < s.woke_s:
        return None
    what = "this machine slept" if s.slept else "this process stood still"
    return Cause(
        "woke",
        f"{what} for {lasting(s.stopped_s)} until {lasting(s.woke_s)} ago, and looks for the "
        "others again",
        "nothing to do: it takes part again within a minute",
    )


def _starting(s: Situation) -> Cause | None:
    if not s.starting:
        return None
    if s.starting_s < START_S:
        return Cause("starting", s.starting, "", usual=True)
    return Cause("starting", f"{s.starting}, for {lasting(s.starting_s)} so far", LOGS)


def _disk(s: Situation) -> Cause | None:
    if not s.disk or not (s.stands or s.fetched < 1.0):
        return None
    return Cause("disk-full", s.disk, "free some space on that disk; see  tutti doctor disk")


def _fetches(s: Situation) -> Cause | None:
    if s.fetched >= 1.0:
        return None
    if s.fetch_still_s < STALL_S:
        return NONE
    return Cause(
        "fetch-stalled",
        f"no state received for {lasting(s.fetch_still_s)} ({s.fetched:.0%} received so far)",
        LOGS,
    )


def _weights(s: Situation) -> Cause | None:
    if not s.awaits_weights:
        return None
    return Cause(
        "weights",
        "waiting for the weights that the run begins from: no peer in sight gives them",
        "start a peer that has them (the run's owner), or give a copy:  --weights DIR",
        usual=s.up_s < WEIGHTS_S,
    )


def _children(s: Situation) -> Cause | None:
    """Stages that this machine loads itself are not missing."""
    lacking = _lacking(s)
    own = [stage for stage in lacking if stage in s.children]
    filled = {s.coming[p] for p in _joining(s)}
    if not own or not filled.issuperset(set(lacking) - set(own)):
        return None
    if s.child_trouble:
        return Cause("child-ended", s.child_trouble[0], f"it is started again; {LOGS}")
    load = "load" if len(own) > 1 else "loads"
    what = f"{stage_names(own)} {load} on this machine, for {lasting(s.children_s)} so far"
    if s.children_s < START_S:
        return Cause("children", what, "", usual=True)
    return Cause("children", what, LOGS)


def _text(s: Situation) -> Cause | None:
    if not s.text or not s.stands:
        return None
    return Cause("text", f"text for training cannot be had: {s.text}", "it is asked for again")


_FEW_VOTERS = (
    "start the others again; where every stage still has a peer, those go on without them after a "
    "minute"
)


def _silent_leader(s: Situation) -> Cause | None:
    if s.leader is None or s.leads or s.lives(s.leader):
        return None
    voters = len(s.voters)
    living = sum(map(s.lives, s.voters))
    votes = ""
    if voters:
        votes = f"; {living} of {voters} voters live"
    step = "nothing to do: the voters that live follow another leader within seconds"
    if voters and 2 * living <= voters:
        step = _FEW_VOTERS
    return Cause("leader-silent", f"the leader {_silent(s, s.leader)}{votes}", step)


def _voters(s: Situation) -> Cause | None:
    if s.wait is None or s.wait.lack is not Lack.VOTERS:
        return None
    w = s.wait
    silent = [p for p in w.peers if not s.lives(p)]
    reach = [p for p in w.peers if s.lives(p)]
    parts = [f"{w.here} of {w.of} voters report to this leader, and more than half must"]
    parts += [f"{w.of - len(silent)} of {w.of} live"]
    if silent:
        parts.append(f"no sign of life: {_some(s, silent)}")
    if reach:
        parts.append(f"not heard here yet: {_some(s, reach)}")
    step = _FEW_VOTERS
    if 2 * (w.of - len(silent)) > w.of:
        step = "nothing to do: those that live report within seconds"
    return Cause("voters", "; ".join(parts), step)


def _stages(s: Situation) -> Cause | None:
    """Stages without enough peers: somebody is coming, somebody is silent, or nobody is there."""
    lacking = _lacking(s)
    if not lacking or s.wait is None:
        return None
    coming = _joining(s)
    filled = {s.coming[p] for p in coming}
    gone = [p for p, stage in s.hosts.items() if stage in lacking and not s.lives(p)]
    what = f"waiting for {s.wait}"
    if coming:
        are = "is" if len(coming) == 1 else "are"
        what += f"; {_some(s, coming)} {are} joining"
    if gone:
        what += f"; no sign of life: {_some(s, gone)}"
    if filled >= set(lacking):
        return Cause("stages", what, "", usual=True)
    return Cause("stages", what, "invite one: tutti swarm invite")


def _ends(s: Situation) -> Cause | None:
    # The epoch that a leader has left is under way here until another leader ends it.
    left = s.wait is None and s.unled and s.idle_s > s.idle_most_s
    if not left and (s.wait is None or s.wait.lack is not Lack.ENDS):
        return None
    ends = [p for p, stage in s.hosts.items() if stage == ENDS]
    living = [p for p in ends if s.lives(p)]
    if living:
        what = f"nobody leads: {_some(s, living)} did not answer a moment ago"
        return Cause("ends", what, "nothing to do: it is asked again when it renews its record")
    what = "no peer at the ends is in sight, so nobody leads"
    if ends:
        what = f"no peer at the ends answers, so nobody leads: {_some(s, ends)}"
    coming = [p for p, stage in s.coming.items() if stage in (ENDS, None) and s.lives(p)]
    if coming:
        return Cause("ends", f"{what}; {_some(s, coming)} may take them", "", usual=True)
    step = (
        "wait for the peer that founded the run; a peer that has the run's data can hold the ends: "
        "tutti start --role ends"
    )
    return Cause("ends", what, step)


def _ways(s: Situation) -> Cause | None:
    if s.wait is None or s.wait.lack is not Lack.WAYS:
        return None
    if s.unreached or s.ways_had_time:
        return Cause("ways", f"waiting for {s.wait}{_no_way(s)}", _unreached_step(s))
    return Cause("ways", f"waiting for {s.wait}, which try to reach each other", "", usual=True)


_OPEN_PORT = (
    "let a router map a port (UPnP), forward one by hand, or start  tutti bootstrap  on a public "
    "machine; see tutti doctor net"
)


def _unreached_step(s: Situation) -> str:
    """Advice if peers do not answer. The load of this machine comes first; peers that run on this
    machine are no reason to open ports."""
    apart = {*s.unreached}
    if s.wait is not None and s.wait.lack is Lack.WAYS:
        apart.update(s.wait.peers)
    if s.contended >= CONTENDED:
        return (
            f"this machine has too little processor time: this daemon waits for {s.contended:.0%} "
            "of its time; end other programs, or run fewer daemons here"
        )
    if apart and s.beside.issuperset(apart):
        return f"they run on this machine, so no port is in the way: see  tutti ps ; {LOGS}"
    return _OPEN_PORT


def _plan(s: Situation) -> Cause | None:
    if s.wait is None or s.wait.lack is not Lack.PLAN:
        return None
    if s.unreached:
        return Cause("plan", f"waiting for {s.wait}{_no_way(s)}", _unreached_step(s))
    if s.leader_waits:
        what = f"waiting for {s.wait}, which waits for {s.leader_waits}"
        return Cause("plan", what, "see  tutti peers")
    if s.leader_answers and s.idle_s < NEXT_PLAN_S:
        return Cause("plan", f"waiting for {s.wait}: the next one takes this peer in", "", True)
    return Cause("plan", f"waiting for {s.wait}", "see  tutti status  at that peer")


_STEPS: Mapping[Lack, tuple[str, bool]] = {
    Lack.SETTLING: ("", True),
    Lack.NEXT_LEADER: ("", True),
    Lack.HISTORY: ("", True),
    Lack.SIDE: ("nothing to do: it gets a few seconds", False),
    Lack.EPOCH: (
        "start its peers again; after ten seconds the swarm goes back to an older epoch",
        False,
    ),
    Lack.COMMON: ("start a peer of these stages again that has it, in memory or on disk", False),
    Lack.MEMORY: ("bring another peer for these stages, or allow more:  --memory", False),
}
"""Next step for each other kind of lack, and if the wait is usual."""


def _other_waits(s: Situation) -> Cause | None:
    if s.wait is None:
        return None
    step, usual = _STEPS.get(s.wait.lack, (LOGS, False))
    if s.wait.lack is Lack.SETTLING:
        return Cause("settling", "waits a moment, so that all peers can report", "", True)
    return Cause(s.wait.lack.value, f"waiting for {s.wait}", step, usual)


def _idle(s: Situation) -> Cause | None:
    if s.idle_s <= s.idle_most_s:
        return None
    step = LOGS
    if s.unreached or s.contended >= CONTENDED:
        step = _unreached_step(s)
    return Cause("idle", f"no useful work for {lasting(s.idle_s)}{_no_way(s)}", step)


ROWS: tuple[Row, ...] = (
    _fault,
    _paused,
    _leaves,
    _admission,
    _p2p,
    _clock,
    _woke,
    _starting,
    _disk,
    _fetches,
    _weights,
    _children,
    _text,
    _silent_leader,
    _voters,
    _stages,
    _ends,
    _ways,
    _plan,
    _other_waits,
    _idle,
)


# ----------------------------------------------------------- sentences


def clock_words(offset: ClockOffset) -> str:
    """The difference of clocks as a sentence. With one other clock nobody knows which is wrong."""
    way = ahead_or_behind(offset.ahead_s)
    by = f"the clock of this machine is {lasting(abs(offset.ahead_s))} {way}"
    if len(offset.peers) == 1:
        return f"{by} that of {short(offset.peers[0])}: one of the two is wrong"
    return f"{by} the middle one of {_names(offset.peers)}"


def _lacking(s: Situation) -> tuple[int, ...]:
    if s.wait is not None and s.wait.lack is Lack.PEERS:
        return s.wait.stages
    return ()


def _joining(s: Situation) -> list[PeerId]:
    """Peers that are about to take part at a stage which lacks peers."""
    lacking = _lacking(s)
    return [p for p, stage in s.coming.items() if stage in lacking and s.lives(p)]


def _no_way(s: Situation) -> str:
    if not s.unreached:
        return ""
    return f"; no way to {_some(s, s.unreached)}"


def _some(s: Situation, peers: Sequence[PeerId]) -> str:
    """The first few of ``peers`` with their stages and silences, and the number of the others."""
    said = [_silent(s, p) if not s.lives(p) else _placed(s, p) for p in peers[:SHOWN]]
    return ", ".join(said) + _more(peers)


def _silent(s: Situation, peer: PeerId) -> str:
    life, seconds = s.life[peer]
    if life is Life.LOST:
        return f"{_placed(s, peer)} was lost {lasting(seconds)} ago"
    if life is Life.LEFT:
        return f"{_placed(s, peer)} left {lasting(seconds)} ago"
    return f"{_placed(s, peer)} has been silent for {lasting(seconds)}"


def _placed(s: Situation, peer: PeerId) -> str:
    stage = s.hosts.get(peer)
    if stage is None:
        return short(peer)
    return f"{short(peer)} of {stage_name(stage)}"


def _names(peers: Sequence[PeerId]) -> str:
    return ", ".join(map(short, peers[:SHOWN])) + _more(peers)


def _more(peers: Sequence[PeerId]) -> str:
    more = len(peers) - SHOWN
    if more > 0:
        return f" and {several(more, 'other')}"
    return ""
