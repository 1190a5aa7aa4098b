"""Faults as data: a time, a kind, and a victim. A schedule is a list of faults; it can be saved,
replayed and shrunk. A scenario lays one over a time line, drawn from a seed.

The victim of a fault is a number that picks among the peers it may hit when it strikes, so that a
schedule still means something when another fault is taken out. A fault does not strike if it would
leave a stage with nobody who holds its parameters: nothing could bring those back.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from node.core.errors import UsageFault
from node.core.ids import ENDS, PeerId
from node.sim.lies import LIES, OVERSTEP, SILENT, Stranger
from node.sim.names import SCENARIOS
from node.sim.process import SimPeer
from node.sim.setup import Setup
from node.sim.swarm import SimSwarm
from node.sim.world.network import Wall

SLOWEST = 100.0
"""Largest slowness of a peer, as a multiple of the nominal work times: more is as good as dead."""
MILD = {"kill", "stranger"}
"""Faults that need not cost an epoch; a kill may, depending on the peers that are left."""
Trouble = Iterator[float]
"""A fault with its end: the generator strikes at once, yields the seconds that the fault lasts, and
then undoes it. A fault of a moment yields nothing, or is a function without a result."""


@dataclass(frozen=True)
class Fault:
    """One fault: ``kind`` strikes at ``at`` seconds and lasts ``seconds``; ``who`` picks the
    victim, ``stage`` limits it to one stage (-1: any), ``size`` is the fault's strength."""

    at: float
    kind: str
    who: int = 0
    stage: int = -1
    seconds: float = 0.0
    size: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """A seed and the faults laid over it."""

    seed: int
    faults: tuple[Fault, ...]

    @property
    def healed(self) -> float:
        """Time at which the last fault is over, in seconds."""
        return max((f.at + f.seconds for f in self.faults), default=0.0)

    def to_json(self) -> str:
        return json.dumps({"seed": self.seed, "faults": [asdict(f) for f in self.faults]}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Schedule":
        """The schedule in a JSON text. Raises UsageFault if the text is no schedule."""
        try:
            body = json.loads(text)
            faults = tuple(Fault(**f) for f in body["faults"])
            unknown = {f.kind for f in faults} - KINDS.keys()
            if unknown:
                raise ValueError(f"unknown faults {sorted(unknown)}")
            for f in faults:
                if not (0 <= f.at < 1e6 and 0 <= f.seconds < 1e6 and abs(f.size) < 1e6):
                    raise ValueError("a number out of bounds")
                if type(f.who) is not int or type(f.stage) is not int:
                    raise ValueError("who and stage are whole numbers")
            return cls(int(body["seed"]), faults)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as e:
            raise UsageFault(
                f"this is no schedule: {e}", "write one with  tutti simulate --save FILE"
            ) from e


def strike(swarm: SimSwarm, fault: Fault) -> None:
    """Begin a fault now."""
    _play(swarm, KINDS[fault.kind](swarm, fault) or iter(()))


def _play(swarm: SimSwarm, trouble: Trouble) -> None:
    """Let trouble go on until it has ended, or for the seconds that it yields. Until these are over
    the swarm is not calm."""
    seconds = next(trouble, None)
    if seconds is not None:
        swarm.troubles += 1
        swarm.world.push(seconds, _over, swarm, trouble)


def _over(swarm: SimSwarm, trouble: Trouble) -> None:
    swarm.troubles -= 1
    swarm.watch.one_fault.fault("over")
    _play(swarm, trouble)


# ----------------------------------------------------------- picking


def _pick(
    swarm: SimSwarm, f: Fault, able: Callable[[SimPeer], bool] = lambda p: True
) -> SimPeer | None:
    stage = None
    if f.stage >= 0:
        stage = f.stage
    found = [p for p in swarm.live(stage) if able(p)]
    if not found:
        return None
    return found[f.who % len(found)]


def _say(swarm: SimSwarm, f: Fault, who: object = "") -> None:
    """Record that a fault strikes, and that it may cost the epochs under way."""
    swarm.watch.note(f"*** {f.kind} {who}")
    swarm.struck.append((swarm.world.now, f.kind, str(who), f.seconds))
    if f.kind not in MILD:
        swarm.watch.one_fault.fault(f.kind)


def _one(
    effect: Callable[[SimSwarm, Fault, SimPeer], Trouble | None],
    able: Callable[[SimSwarm, SimPeer], bool] = lambda swarm, peer: True,
) -> Callable[[SimSwarm, Fault], Trouble]:
    """The fault of one peer: the peer is picked among the able ones, named, and suffers
    ``effect``."""

    def strikes(swarm: SimSwarm, f: Fault) -> Trouble:
        victim = _pick(swarm, f, lambda p: able(swarm, p))
        if victim is not None:
            _say(swarm, f, victim.name)
            yield from effect(swarm, f, victim) or ()

    return strikes


# ----------------------------------------------------------- processes


def _down(swarm: SimSwarm, f: Fault, victim: SimPeer) -> None:
    """Kill a peer. An epoch may survive the death if the peer does not lead it and another current
    member of the peer's stage is left."""
    chief = swarm.chief()
    plan = None
    if chief is not None and chief.leader is not None:
        plan = chief.leader.plan
    spared = victim is not chief and victim.leader is None
    if spared and plan is not None and (m := plan.member(victim.name)) is not None and m.current:
        spared = any(
            n.current
            and n.peer != victim.name
            and swarm.peers[n.peer].alive
            and not swarm.peers[n.peer].leaving
            for n in plan.stage(m.stage)
        )
    if f.kind == "kill":
        swarm.watch.one_fault.fault(f.kind, victim.name if spared else None)
    swarm.watch.died[victim.name] = swarm.world.now
    victim.kill()


_kill = _one(_down, SimSwarm.spare)


def _replace(swarm: SimSwarm, f: Fault, victim: SimPeer) -> None:
    _down(swarm, f, victim)
    swarm.world.push(f.seconds, swarm.add, victim.stage)


def _restart(swarm: SimSwarm, f: Fault, victim: SimPeer) -> Trouble:
    """Killed, and started again from its disk."""
    _down(swarm, f, victim)
    yield f.seconds
    victim.boot()


def _stop(swarm: SimSwarm, f: Fault, victim: SimPeer) -> Trouble:
    """``tutti stop`` at a peer, which then starts again from its disk."""
    swarm.watch.died[victim.name] = swarm.world.now
    victim.halt()
    yield f.seconds
    victim.boot_when_down()


def _stop_all(swarm: SimSwarm, f: Fault) -> Trouble:
    """``tutti stop`` at every peer, in any order within ``size`` seconds; then all start again."""
    victims = swarm.live()
    _say(swarm, f, len(victims))
    for victim in victims:
        swarm.world.push(f.size * swarm.world.rng.random(), victim.halt)
    yield f.size + f.seconds
    for victim in victims:
        swarm.world.push(swarm.world.rng.random(), victim.boot_when_down)


def _outage(swarm: SimSwarm, f: Fault) -> Trouble:
    """Everybody of a block stage dies and comes back from its disk, if there is anything on it."""
    stage = f.stage
    if stage <= 0:
        stage = 1 + f.who % swarm.setup.stages
    victims = swarm.live(stage)
    if any(v.disk.places for v in victims):
        yield from _all_restart(swarm, f, victims)


def _all_restart(swarm: SimSwarm, f: Fault, victims: list[SimPeer]) -> Trouble:
    """They die and come back from their disks."""
    _say(swarm, f, len(victims))
    for victim in victims:
        _down(swarm, f, victim)
    yield f.seconds
    for victim in victims:
        swarm.world.push(swarm.world.rng.random(), victim.boot)


def _kill_each(swarm: SimSwarm, f: Fault) -> Trouble:
    """One replica of every stage at once."""
    for stage in range(swarm.setup.stages + 1):
        yield from _kill(swarm, replace(f, stage=stage))


def _pause(swarm: SimSwarm, f: Fault, victim: SimPeer) -> Trouble:
    """SIGSTOP, then SIGCONT."""
    loop = victim.loop
    loop.frozen = True
    yield f.seconds
    loop.thaw()


def _join(swarm: SimSwarm, f: Fault) -> None:
    stage = f.stage
    if stage < 0:
        stage = f.who % (swarm.setup.stages + 1)
    _say(swarm, f, swarm.add(stage).name)


def _come(swarm: SimSwarm, f: Fault) -> None:
    """Somebody comes and chooses a stage; every third would host block stages only."""
    _say(swarm, f, swarm.add(None, "auto" if f.who % 3 else "stage").name)


# ----------------------------------------------------------- lines


def _group(swarm: SimSwarm, f: Fault) -> frozenset[PeerId]:
    """A share ``size`` of the peers, by the number ``who``; never nobody, never everybody."""
    live = [p.name for p in swarm.live()]
    if len(live) < 2:
        return frozenset(live[:1])
    count = min(len(live) - 1, max(1, round(len(live) * f.size)))
    first = f.who % len(live)
    step = 1 + f.who // len(live) % (len(live) - 1)
    order = sorted(range(len(live)), key=lambda i: ((i * step + first) % len(live), i))
    return frozenset(live[i] for i in order[:count])


def _behind(swarm: SimSwarm, seconds: float, *walls: Wall) -> Trouble:
    swarm.links.walls.extend(walls)
    yield seconds
    for wall in walls:
        swarm.links.walls.remove(wall)


def _partition(swarm: SimSwarm, f: Fault) -> Trouble:
    inside = _group(swarm, f)
    outside = frozenset(p.name for p in swarm.live()) - inside
    _say(swarm, f, f"{len(inside)} | {len(outside)}: {' '.join(sorted(inside))}")
    yield from _behind(swarm, f.seconds, Wall(inside, outside), Wall(outside, inside))


def _one_way(swarm: SimSwarm, f: Fault, victim: SimPeer) -> Trouble:
    only = frozenset({victim.name})
    way = (only, frozenset()) if f.size < 0.5 else (frozenset(), only)
    return _behind(swarm, f.seconds, Wall(*way))


def _partial(swarm: SimSwarm, f: Fault, victim: SimPeer) -> Trouble:
    """A peer and the leader cannot reach each other; everybody else reaches both."""
    only = frozenset({victim.name})
    chief = frozenset({p.name for p in (swarm.chief(),) if p is not None})
    return _behind(swarm, f.seconds, Wall(only, chief), Wall(chief, only))


def _flap(swarm: SimSwarm, f: Fault, victim: SimPeer) -> Trouble:
    """Cut off and back again, ``size`` seconds each, or once in a shorter time."""
    only = frozenset({victim.name})
    period = max(0.2, min(f.size, f.seconds / 2))
    for _ in range(int(f.seconds / period / 2)):
        yield from _behind(swarm, period, Wall(only, frozenset()), Wall(frozenset(), only))
        yield period


def _worse(swarm: SimSwarm, f: Fault, victim: SimPeer, **more: float) -> Trouble:
    """Add ``more`` to the profile of all links of a peer, in both directions, for a while. Several
    troubles of one link add up and end one by one."""
    me = victim.name
    links = swarm.links
    lines = [links.link(*way) for p in swarm.peers if p != me for way in ((me, p), (p, me))]

    def change(sign: int) -> None:
        for line in lines:
            now = {what: getattr(line.profile, what) + sign * by for what, by in more.items()}
            line.profile = replace(line.profile, **{w: max(0.0, size) for w, size in now.items()})

    change(1)
    yield f.seconds
    change(-1)


def _slow_link(swarm: SimSwarm, f: Fault, victim: SimPeer) -> Trouble:
    """Every line of a peer gets ``size`` times the latency and the jitter of it."""
    factor = max(1.0, f.size)
    usual = swarm.setup.links.latency_s
    return _worse(swarm, f, victim, latency_s=usual * (factor - 1), jitter_s=usual * factor)


def _loss(swarm: SimSwarm, f: Fault, victim: SimPeer) -> Trouble:
    """Every line of a peer loses a share ``size`` of its messages."""
    return _worse(swarm, f, victim, loss=f.size)


# ----------------------------------------------------------- machines and people


def _slow_peer(swarm: SimSwarm, f: Fault, victim: SimPeer) -> Trouble:
    """Troubles on one peer do not multiply without bound: a job of a second is not to take
    hours."""
    device = victim.device
    factor = max(1.0, min(f.size, SLOWEST / device.slowness))
    device.slowness *= factor
    yield f.seconds
    device.slowness /= factor


def _skew(swarm: SimSwarm, f: Fault, victim: SimPeer) -> Trouble:
    """A peer's wall clock runs ``size`` seconds beside the others'."""
    victim.machine_clock.skew += f.size
    yield f.seconds
    victim.machine_clock.skew -= f.size


def _corrupt(swarm: SimSwarm, f: Fault, victim: SimPeer) -> None:
    """A bit of a peer's parameters flips."""
    victim.flip = True


def _broken_step(swarm: SimSwarm, f: Fault, victim: SimPeer) -> None:
    """The optimizer of a peer gives up on its next step (out of memory)."""
    if victim.owner is not None:
        victim.owner.broken = 1


def _lie(swarm: SimSwarm, f: Fault) -> Trouble:
    crowd = Counter(p.stage for p in swarm.live() if p.ready and swarm.honest(p.name))
    victim = _pick(swarm, f, lambda p: p.stage != ENDS and crowd[p.stage] > 2 and swarm.spare(p))
    if victim is not None:
        kind = sorted(LIES)[int(f.size) % len(LIES)]
        _say(swarm, f, f"{victim.name} ({kind})")
        yield from _lies_as(swarm, f, victim, kind)


def _lies_as(swarm: SimSwarm, f: Fault, victim: SimPeer, kind: str) -> Trouble:
    """A peer lies for a while."""
    swarm.liars.add(victim.name)
    victim.lie = kind
    yield f.seconds
    victim.lie = ""
    # The peer tells the truth from now on. Its earlier work stays false, so the peer starts anew.
    victim.kill()
    victim.disk.places.clear()
    swarm.liars.discard(victim.name)
    victim.boot()


def _silent(swarm: SimSwarm, f: Fault, victim: SimPeer) -> Trouble:
    """A peer takes plans, and neither takes part in their rounds nor commits."""
    swarm.liars.add(victim.name)
    victim.lie = SILENT
    yield f.seconds
    victim.lie = ""
    swarm.liars.discard(victim.name)


def _overstep(swarm: SimSwarm, f: Fault, victim: SimPeer) -> Trouble:
    """A peer gives parameters that no step of the optimizer makes, as owner of parts."""
    return _lies_as(swarm, f, victim, OVERSTEP)


def _deceives(swarm: SimSwarm, peer: SimPeer) -> bool:
    """Return True for a peer that may deceive the others: it does not lead, and its stage has
    enough honest ones without it."""
    honest = [p for p in swarm.live(peer.stage) if p.ready and swarm.honest(p.name)]
    return peer in honest and len(honest) > 2 and peer.leader is None and swarm.spare(peer)


def _stranger(swarm: SimSwarm, f: Fault) -> Trouble:
    """Somebody without parameters says that it leads, and worse."""
    name = PeerId(f"0-stranger-{len(swarm.strangers)}")
    swarm.strangers.add(name)
    one = Stranger(swarm, name)
    _say(swarm, f, name)
    yield f.seconds
    one.kill()


KINDS: dict[str, Callable[[SimSwarm, Fault], Trouble | None]] = {
    "kill": _kill,
    "kill-leader": _one(_down, lambda swarm, p: p is swarm.chief() and swarm.spare(p)),
    "kill-each": _kill_each,
    "replace": _one(_replace, SimSwarm.spare),
    "restart": _one(_restart, SimSwarm.spare),
    "restart-all": lambda swarm, f: _all_restart(swarm, f, swarm.live()),
    "stop": _one(_stop, lambda swarm, p: not p.leaving and p.ready),
    "stop-all": _stop_all,
    "outage": _outage,
    "pause": _one(_pause, lambda swarm, p: not p.loop.frozen),
    "pause-leader": _one(_pause, lambda swarm, p: p is swarm.chief() and not p.loop.frozen),
    "join": _join,
    "come": _come,
    "leave": _one(
        lambda swarm, f, victim: victim.leave(),
        lambda swarm, p: not p.leaving and p.ready and swarm.spare(p),
    ),
    "partition": _partition,
    "one-way": _one(_one_way),
    "partial-partition": _one(_partial, lambda swarm, p: swarm.chief() not in (p, None)),
    "flap": _one(_flap),
    "slow-link": _one(_slow_link),
    "loss": _one(_loss),
    "slow-peer": _one(_slow_peer),
    "skew": _one(_skew),
    "corrupt": _one(_corrupt, SimSwarm.spare),
    "broken-step": _one(_broken_step),
    "lie": _lie,
    "silent": _one(_silent, _deceives),
    "overstep": _one(_overstep, _deceives),
    "stranger": _stranger,
}

# ----------------------------------------------------------- scenarios

Lay = Callable[[random.Random, float, Setup], list[Fault]]
"""``(dice, seconds the run takes undisturbed, setup) -> faults``"""


def _some(
    kind: str,
    count: int = 1,
    seconds: tuple[float, float] = (0.0, 0.0),
    size: tuple[float, float] = (0.0, 0.0),
) -> Lay:
    """``count`` faults of a kind at any time of the run."""

    def lay(dice: random.Random, span: float, setup: Setup) -> list[Fault]:
        return [
            Fault(
                round(dice.uniform(0.1, 0.9) * span, 3),
                kind,
                dice.randrange(1 << 16),
                -1,
                round(dice.uniform(*seconds), 3),
                round(dice.uniform(*size), 3),
            )
            for _ in range(count)
        ]

    return lay


def _share(kind: str, share: float) -> Lay:
    """A scenario in which ``kind`` hits this share of the swarm at one time."""

    def lay(dice: random.Random, span: float, setup: Setup) -> list[Fault]:
        at = round(dice.uniform(0.3, 0.6) * span, 3)
        count = max(1, round(setup.peers * share))
        return [Fault(round(at + 0.01 * i, 3), kind, dice.randrange(1 << 16)) for i in range(count)]

    return lay


def _crowd(dice: random.Random, span: float, setup: Setup) -> list[Fault]:
    """A crowd of new peers, half the size of the swarm, comes within one second, to any stage that
    needs them."""
    at = dice.uniform(0.2, 0.6) * span
    count = max(2, setup.peers // 2)
    times = sorted(at + dice.random() for _ in range(count))
    return [Fault(round(t, 3), "come", dice.randrange(1 << 16)) for t in times]


def _churn(dice: random.Random, span: float, setup: Setup) -> list[Fault]:
    """Every few epochs a peer dies and another comes; more of them in a bigger swarm."""
    every = max(span / setup.epochs * 3, 2.0)
    each = max(1, round(setup.peers / 50))
    times = [every * i for i in range(1, int(span * 0.9 / every) + 1)]
    return [
        Fault(round(t + dice.uniform(0, every / 2), 3), "replace", dice.randrange(1 << 16), -1, 1.0)
        for t in times
        for _ in range(each)
    ]


def _lies(dice: random.Random, span: float, setup: Setup) -> list[Fault]:
    return [
        Fault(
            round(dice.uniform(0.1, 0.7) * span, 3),
            "lie",
            dice.randrange(1 << 16),
            -1,
            6.0,
            float(dice.randrange(len(LIES))),
        )
    ]


MIX: tuple[tuple[str, float, tuple[float, float], tuple[float, float]], ...] = (
    ("kill", 2, (0, 0), (0, 0)),
    ("replace", 4, (0.5, 4), (0, 0)),
    ("restart", 3, (0.5, 8), (0, 0)),
    ("pause", 4, (0.3, 12), (0, 0)),
    ("partition", 3, (0.5, 15), (0.2, 0.8)),
    ("one-way", 2, (0.5, 12), (0, 1)),
    ("flap", 1, (2, 8), (0.3, 1.5)),
    ("slow-link", 2, (1, 10), (2, 40)),
    ("loss", 2, (1, 10), (0.05, 0.6)),
    ("slow-peer", 2, (1, 10), (2, 60)),
    ("skew", 1, (3, 20), (-8, 8)),
    ("corrupt", 1, (0, 0), (0, 0)),
    ("broken-step", 1, (0, 0), (0, 0)),
    ("lie", 1, (3, 10), (0, 100)),
    ("join", 2, (0, 0), (0, 0)),
    ("leave", 2, (0, 0), (0, 0)),
    ("kill-leader", 2, (0, 0), (0, 0)),
    ("kill-each", 1, (0, 0), (0, 0)),
    ("restart-all", 0.5, (1, 3), (0, 0)),
)
"""Kinds of :data:`random`: weight of its choice, range of seconds, range of sizes."""


def _random(dice: random.Random, span: float, setup: Setup) -> list[Fault]:
    faults = []
    for _ in range(dice.randint(1, 6)):
        kind, _, seconds, size = dice.choices(MIX, [m[1] for m in MIX])[0]
        faults += _some(kind, 1, seconds, size)(dice, span, setup)
    return faults


LAYS: dict[str, Lay] = {
    "quiet": lambda dice, span, setup: [],
    "kill": _some("kill"),
    "pause": _some("pause", 2, (1, 12)),
    "partition": _some("partition", 1, (3, 20), (0.2, 0.8)),
    "one-way": _some("one-way", 2, (2, 12), (0, 1)),
    "partial-partition": _some("partial-partition", 2, (2, 12)),
    "slow-link": _some("slow-link", 2, (3, 15), (5, 40)),
    "slow-peer": _some("slow-peer", 2, (3, 15), (5, 60)),
    "flapping": _some("flap", 2, (4, 12), (0.3, 1.5)),
    "loss": _some("loss", 2, (3, 15), (0.1, 0.6)),
    "skew": _some("skew", 3, (5, 30), (-10, 10)),
    "corrupt": _some("corrupt"),
    "broken-step": _some("broken-step", 2),
    "liar": _lies,
    "silent": _some("silent", 1, (20, 60)),
    "overstep": _some("overstep", 1, (5, 20)),
    "stranger": _some("stranger", 2, (5, 20)),
    "mass-join": _share("join", 0.5),
    "crowd": _crowd,
    "mass-leave": _share("leave", 0.34),
    "mass-kill": _share("kill", 0.25),
    "leader-kill": _some("kill-leader", 2),
    "leader-pause": _some("pause-leader", 2, (5, 40)),
    "each-stage": _some("kill-each"),
    "outage": _some("outage", 1, (4, 12)),
    "restart": _some("restart-all", 1, (1, 3)),
    "stop": _some("stop", 4, (0.5, 6)),
    "stop-all": _some("stop-all", 2, (1, 3), (0, 2)),
    "churn": _churn,
    "random": _random,
}
"""Rule by which each of :data:`node.sim.names.SCENARIOS` is laid."""


def lay(names: Sequence[str], setup: Setup, seed: int, span: float | None = None) -> Schedule:
    """The faults of these scenarios together. Raises UsageFault for a name that is none.

    ``span``: seconds the run takes undisturbed; estimated when None.
    """
    faults: list[Fault] = []
    for name in names:
        if name not in SCENARIOS:
            raise UsageFault(
                f"there is no scenario {name!r}", f"choose among {', '.join(SCENARIOS)}"
            )
        dice = random.Random(f"{name} {seed}")
        faults += LAYS[name](dice, estimate(setup) if span is None else span, setup)
    return Schedule(seed, tuple(sorted(faults, key=lambda f: f.at)))


def estimate(setup: Setup) -> float:
    """Seconds of a quiet run, roughly."""
    way = setup.links.latency_s + setup.links.jitter_s / 2
    if setup.links.bandwidth:
        way += setup.activation * 8 / setup.links.bandwidth
    hops = setup.stages + 1
    first = 2 * hops * way + 3 * (setup.stages * setup.work.forward_s + 2 * setup.work.ends_s)
    slots = max(1, min(setup.replicas, setup.ends * setup.in_flight))
    work = setup.micro_batches / slots * 3 * setup.work.forward_s * (1 + setup.work.unequal) / 2
    parts = max(sum(p.bytes for p in ps) for ps in setup.parts.values())
    wire = 0.0
    if setup.links.bandwidth:
        wire = 2 * parts * 8 / setup.links.bandwidth
    return 2.0 + setup.epochs * (first + work + 8 * way + wire + setup.work.step_s * 3)
