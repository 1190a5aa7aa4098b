"""Large classes and long signatures of node/ that may stay, each with its reason. The packages that
coordinate peers have none; elsewhere a reason is needed, and goes when what it excuses has become
small."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.codebase.reading import Large

WITHOUT = ("node/consensus/", "node/epoch/", "node/outer/", "node/coordinator/")
"""Packages in which every class and every signature is small."""


@dataclass(frozen=True)
class Excuse:
    """The reason for which a large class or a long signature stays. ``name``: as
    :attr:`~benchmarks.codebase.reading.Large.name`."""

    path: str
    name: str
    reason: str


SECTION = "the settings of one section: one field a setting"
UNCUT = "badly cut; its parts change together, so that cutting it is a change of its own: "

CLASSES = (
    Excuse("node/app/assembly.py", "Assembled", "one stage ready to start: one field a part"),
    Excuse("node/app/assembly.py", "Ports", "the surroundings of a peer: one field a port"),
    Excuse("node/app/daemon.py", "Daemon", UNCUT + "what starts, moves and ends with a daemon"),
    Excuse("node/app/demo/play.py", "DemoOutcome", "a line of JSON: one field a number"),
    Excuse("node/app/node.py", "Node", UNCUT + "the state of a process that its operator sees"),
    Excuse("node/app/peer.py", "Peer", UNCUT + "a place, a move and a pause of one peer"),
    Excuse("node/app/snapshot.py", "SnapshotBuilder", UNCUT + "what a snapshot is made from"),
    Excuse(
        "node/averaging/exchange/owner.py",
        "ExchangeServer",
        "the surroundings of a service, of which its caller hands in nine",
    ),
    Excuse(
        "node/averaging/exchange/request.py",
        "RoundRequest",
        "an attempt as its plan has it: one field each",
    ),
    Excuse(
        "node/averaging/strategies/group_forming.py",
        "GroupForming",
        "a state machine whose offers, answers and timers are one decision",
    ),
    Excuse("node/averaging/strategies/outer.py", "OuterSettings", SECTION),
    Excuse("node/checkpoint/fetch.py", "_Fetch", UNCUT + "one download from several donors"),
    Excuse(
        "node/checkpoint/service.py",
        "StateService",
        "a service with the streams, pins and digests that all its methods look at",
    ),
    Excuse("node/config.py", "NodeSettings", SECTION),
    Excuse("node/control/causes.py", "Situation", "facts about a daemon: one field a fact"),
    Excuse("node/core/journey.py", "Plan", "a message of the wire, hashed whole: one field each"),
    Excuse("node/data/settings.py", "DataSettings", SECTION),
    Excuse(
        "node/data/streamed/stream.py",
        "Stream",
        UNCUT + "pieces, their readers and tokenizing are one pool of work",
    ),
    Excuse("node/dht/directory.py", "Directory", UNCUT + "own record, postings and readings"),
    Excuse("node/dht/record.py", "PeerBody", "a record of the directory: one field each"),
    Excuse("node/model/settings.py", "ModelSettings", SECTION),
    Excuse("node/optim/settings.py", "OptimSettings", SECTION),
    Excuse(
        "node/pipeline/device.py",
        "DeviceThread",
        "one device: jobs that wait, run and come down, and the threads that carry them",
    ),
    Excuse(
        "node/pipeline/machine.py",
        "PipelineMachine",
        UNCUT + "a state machine with the visits, places and credits of one plan",
    ),
    Excuse("node/pipeline/visit_buffers.py", "VisitBuffers", "one visit: one field a tensor"),
    Excuse(
        "node/pipeline/visit_buffers.py",
        "StageMath",
        "the module with the modes that forward and backward read for each micro-batch",
    ),
    Excuse(
        "node/reach/nearby.py",
        "Nearby",
        "a listener of zeroconf, which calls methods of one object",
    ),
    Excuse("node/reach/portmap.py", "PortMapper", UNCUT + "mappings, their gateway and renewal"),
    Excuse(
        "node/scheduler/planning/problem.py",
        "PathProblem",
        "a path problem as its file has it: one field a number or row",
    ),
    Excuse(
        "node/scheduler/planning/replay.py",
        "ReplayedRun",
        "lists by peer and by micro-batch in an inner loop: an object each would slow it down",
    ),
    Excuse("node/sim/process.py", "Swarm", "a simulated swarm: one attribute a part of its world"),
    Excuse(
        "node/sim/process.py",
        "SimPeer",
        "a machine with its process and the faults that strike it: one attribute each",
    ),
    Excuse("node/sim/run.py", "ScheduleOutcome", "the outcome of a run: one field a number"),
    Excuse("node/sim/setup.py", "Setup", "the numbers of a simulation: one field each"),
    Excuse("node/sim/watch.py", "HistoryRecorder", "one attribute a checker or a count"),
    Excuse(
        "node/sim/world/network.py",
        "SimTransport",
        "stands for the transport, whose port has the parts it names",
    ),
    Excuse(
        "node/stage/local_checkpoints.py",
        "LocalCheckpoints",
        UNCUT + "a schedule, one writer and the versions on the disk",
    ),
    Excuse("node/stage/runtime.py", "StageRuntime", "the stage's parts: one attribute a part"),
    Excuse(
        "node/stage/state_export.py",
        "StateExport",
        UNCUT + "copies that are due, given and kept follow one plan",
    ),
    Excuse("node/telemetry/metrics.py", "Metrics", "a registry: one attribute a metric"),
    Excuse(
        "node/transport/auth.py",
        "LabelledChannel",
        "a channel of grpc, whose four kinds of calls are attributes",
    ),
    Excuse("node/transport/p2p.py", "P2pDaemon", UNCUT + "a child process and its streams"),
    Excuse("node/transport/service.py", "Transport", UNCUT + "all connections of a peer"),
    Excuse("node/transport/settings.py", "TransportSettings", SECTION),
    Excuse(
        "node/transport/ways/lines.py",
        "Lines",
        "the surroundings of a service, of which its caller hands in twelve",
    ),
    Excuse(
        "node/transport/ways/reachable.py",
        "Reachable",
        "the surroundings of two state machines, with what was said of them",
    ),
    Excuse(
        "node/transport/ways/relay.py",
        "Relay",
        "the surroundings of a service, of which its caller hands in nine",
    ),
    Excuse(
        "node/transport/ways/relays.py",
        "Relays",
        "the surroundings of a service, of which its caller hands in eleven",
    ),
)

FUNCTIONS = (
    Excuse("node/app/assembly.py", "assemble", "the daemon's assembly: one argument a part"),
    Excuse(
        "node/averaging/exchange/owner.py",
        "ExchangeServer.__init__",
        "a service: one argument a part of its surroundings",
    ),
    Excuse("node/checkpoint/fetch.py", "fetch", "a download: five arguments, eight options"),
    Excuse("node/checkpoint/fetch.py", "_Fetch.__init__", "the arguments of fetch, kept"),
    Excuse(
        "node/checkpoint/service.py",
        "StateService.__init__",
        "a service: one argument a source of what it serves",
    ),
    Excuse("node/control/text.py", "banner", "a page of text: one argument a fact on it"),
    Excuse("node/control/text.py", "consent_lines", "a page of text: one argument a fact on it"),
    Excuse(
        "node/dht/directory.py",
        "Directory.__init__",
        "a service: one argument a part of its surroundings",
    ),
    Excuse("node/local/stage.py", "open_stage", "a stage on several devices: one argument a part"),
    Excuse("node/model/cost.py", "stage_bytes", "a formula: one argument a quantity"),
    Excuse("node/model/cost.py", "fits", "a formula: one argument a quantity"),
    Excuse("node/pipeline/frames.py", "frames", "a message of the wire: one argument a field"),
    Excuse(
        "node/pipeline/service.py",
        "Pipeline.__init__",
        "the assembly of a pipeline: one argument a part or a setting of the manifest",
    ),
    Excuse(
        "node/stage/runtime.py",
        "StageRuntime.__init__",
        "the assembly of a stage: one argument a part",
    ),
    Excuse(
        "node/transport/service.py",
        "Transport.__init__",
        "the assembly of the transport: one argument a part",
    ),
    Excuse(
        "node/transport/ways/lines.py",
        "Lines.__init__",
        "a service: one argument a part of its surroundings",
    ),
    Excuse(
        "node/transport/ways/reachable.py",
        "Reachable.__init__",
        "a service: one argument a part of its surroundings",
    ),
    Excuse(
        "node/transport/ways/relay.py",
        "Relay.__init__",
        "a service: one argument a part of its surroundings",
    ),
    Excuse(
        "node/transport/ways/relays.py",
        "Relays.__init__",
        "a service: one argument a part of its surroundings",
    ),
)


@dataclass(frozen=True)
class Verdict:
    """Large classes, or long signatures, beside their reasons. ``forbidden``: in a package without
    any; ``unexcused``: elsewhere, without a reason; ``stale``: reasons that excuse nothing."""

    forbidden: tuple[str, ...]
    unexcused: tuple[str, ...]
    stale: tuple[str, ...]

    @property
    def wrong(self) -> tuple[str, ...]:
        """Everything that must go."""
        return self.forbidden + self.unexcused + self.stale


def judge(found: Sequence[Large], excuses: Sequence[Excuse]) -> Verdict:
    """Compare what was counted with the reasons. A reason that is empty, or given twice, excuses
    nothing."""
    keys = [(one.path, one.name) for one in excuses]
    good = {
        key for key, one in zip(keys, excuses, strict=True) if one.reason and keys.count(key) == 1
    }
    outside = [one for one in found if not one.path.startswith(WITHOUT)]
    there = {(one.path, one.name) for one in outside}
    return Verdict(
        tuple(str(one) for one in found if one.path.startswith(WITHOUT)),
        tuple(str(one) for one in outside if (one.path, one.name) not in good),
        tuple(
            f"{path} {name}: no reason is needed"
            for path, name in keys
            if (path, name) not in there
        ),
    )
