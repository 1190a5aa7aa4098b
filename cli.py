"""The command ``tutti``: argv to one call. Answers at once: torch, hivemind and libp2p are imported
only by the verbs that need them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import click
import typer
from typer import Argument, Option

from node.control import terminal
from node.control.sockets import clear_stale
from node.control.usage import PANELS, App, OneOf, what_was_wrong
from node.core import interrupts, libraries
from node.core.errors import (
    DISK_FULL,
    ExitCode,
    LocalFault,
    NotRunning,
    OutOfResources,
    PeerFault,
    UsageFault,
    WireError,
    writing,
)
from node.core.ids import PeerId
from node.core.version import OLDEST_PROTOCOL, PROTOCOL, PROTOCOLS, VERSION
from node.sim.names import AVERAGING, SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from node.app.capacity import Cut
    from node.config import NodeConfig
    from node.control.client import ControlClient
    from node.data.sources import Corpus
    from node.data.streamed.stream import Stream
    from node.data.tokenizer import Tokenizer
    from node.identity.invites import Invite
    from node.identity.keys import Identity
    from node.manifest import Manifest
    from node.training.protocol.rules import Rules

RUN, WATCH, OWN, MODEL, ABOUT = PANELS
ROLES = ("auto", "ends", "stage", "rendezvous")
LOG_FORMATS = ("auto", "text", "json")
PEER_SORTS = ("stage", "name", "state", "rtt", "speed", "epoch", "up")
EVENT_LEVELS = ("debug", "info", "warning", "error")
"""Words of options, here so that a wrong one is refused before anything is loaded."""
CHECKS = ("versions", "device", "disk", "data", "clock", "net")
"""Checks of ``tutti doctor``, in the order in which they run; the first fault gives the exit
code."""
STYLE: dict[str, Any] = {"context_settings": {"help_option_names": ["-h", "--help"]}}
app = App(
    help="Train one language model together, peer to peer.",
    epilog="--home DIR, anywhere in the line: directory of this node's files (or TUTTI_HOME). "
    "--version, -V: as the verb version.",
    add_completion=False,  # its two options would load pydantic at every start
    **STYLE,
)
swarm_app = App(help="Make, check and hand out swarms.", **STYLE)
id_app = App(
    help="Who this node is. Without a verb: show.",
    no_args_is_help=False,
    invoke_without_command=True,
    **STYLE,
)
data_app = App(help="Look at data as a model sees it.", **STYLE)
app.add_typer(data_app, name="data", rich_help_panel=OWN)
app.add_typer(swarm_app, name="swarm", rich_help_panel=OWN)
app.add_typer(id_app, name="id", rich_help_panel=ABOUT)

Verbose = Annotated[
    bool, Option("--verbose", "-v", help="The parts of the memory too, item by item.")
]
Json = Annotated[bool, Option("--json", help="One JSON document on stdout.")]
Sets = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Any other setting, e.g. limits.in_flight=4."),
]
ConfigFile = Annotated[
    Path | None, Option("--config", help="A TOML file of settings for this node.")
]
Name = Annotated[str | None, Option("--name", help="Human name of this node.")]
Device = Annotated[str | None, Option("--device", help="auto, cpu, cuda:N.")]
LocalDevices = Annotated[
    int | None, Option("--local-devices", help="GPUs (or CPU processes) that share the stage.")
]
Threads = Annotated[
    int | None, Option("--threads", help="CPU threads of a device; 0 for all cores.")
]
Memory = Annotated[str | None, Option("--memory", help="Most device memory: 80% or 20GiB.")]
Reserve = Annotated[str | None, Option("--reserve", help="Device memory left to others: 2GiB.")]
Role = Annotated[
    str | None,
    Option(
        "--role", click_type=OneOf(ROLES), metavar="ROLE", help="auto, ends, stage, rendezvous."
    ),
]
StageToHost = Annotated[str | None, Option("--stage", help="auto, or the block stage to host.")]
ForceTunnel = Annotated[
    bool | None, Option("--force-tunnel", help="Be reached through libp2p only.")
]
MetricsPort = Annotated[
    int | None, Option("--metrics-port", help="Port of the metrics page; 0 picks one, -1 none.")
]
LogFormat = Annotated[
    str | None,
    Option(
        "--log-format", click_type=OneOf(LOG_FORMATS), metavar="FORMAT", help="auto, text, json."
    ),
]
RecordFile = Annotated[
    str | None,
    Option(
        "--record",
        metavar="FILE",
        help="Record the state machines, for a bug report: tutti replay.",
    ),
]
Background = Annotated[
    bool,
    Option("--background", "-d", help="Return as soon as the daemon answers; it goes on."),
]
Listen = Annotated[
    str | None, Option("--listen", metavar="HOST", help="Address to listen on; default: all.")
]
MaxUp = Annotated[
    str | None,
    Option("--max-up", metavar="RATE", help="Most it sends a second, in all: 20Mbit, 2.5MB."),
]
MaxDown = Annotated[
    str | None, Option("--max-down", metavar="RATE", help="Most it receives a second, in all.")
]
P2pPort = Annotated[
    int | None, Option("--p2p-port", "--port", help="Port of the p2p daemon; 0 picks one.")
]
GrpcPort = Annotated[
    int | None, Option("--grpc-port", help="Port of the gRPC server; 0 picks one.")
]
Announce = Annotated[
    list[str] | None,
    Option("--announce", metavar="HOST:PORT", help="Address that others should dial for gRPC."),
]
Joins = Annotated[
    list[str] | None,
    Option("--join", metavar="INVITE|MULTIADDR", help="Peers to connect to first; repeatable."),
]
Data = Annotated[
    str | None,
    Option(
        "--data", metavar="PATH", help="Where the run's data is here: a file, or its directory."
    ),
]
DataHosts = Annotated[
    list[str] | None,
    Option(
        "--data-host",
        metavar="HOST",
        help="A host of this machine or the LAN from which the run's data may be fetched; "
        "repeatable.",
    ),
]
TokenizerPath = Annotated[
    str | None,
    Option(
        "--tokenizer",
        metavar="PATH",
        help="Where the run's tokenizer.json is here, in the same way.",
    ),
]
WeightsPath = Annotated[
    str | None,
    Option(
        "--weights",
        metavar="DIR",
        help="Where the model is that the run begins from; without it, it is fetched from others.",
    ),
]
NoOpen = Annotated[
    bool,
    Option(
        "--no-open", help="Open neither data nor tokenizer: fields and signature only, no hashes."
    ),
]
DropStages = Annotated[
    str, Option("--drop-stages", metavar="S,S", help="Block stages to go without, e.g. 2,5.")
]
First = Annotated[
    int,
    Option(
        "--first", min=0, metavar="K", help="Early exit: only the first K block stages; 0: all."
    ),
]
TopP = Annotated[
    float,
    Option(
        min=0.0,
        max=1.0,
        help="Choose among the likeliest tokens with so much probability together; 0 among all.",
    ),
]
RENDEZVOUS_PORT = 31337
"""Where others find a rendezvous that is set to no port."""
HOME: dict[str, str] = {}
"""``--home``, which may stand anywhere on the command line."""


@app.callback()
def _everywhere() -> None:
    """Takes no option of its own: typer would load pydantic (0.1 s) to convert it. ``main`` takes
    ``--home`` out before."""


# ------------------------------------------------------------ run


@app.command(rich_help_panel=RUN)
def start(
    what: Annotated[
        str | None,
        Argument(
            metavar="[INVITE|swarm.toml]", help="Default: the swarm used last, else a solo one."
        ),
    ] = None,
    background: Background = False,
    name: Name = None,
    role: Role = None,
    stage: StageToHost = None,
    device: Device = None,
    local_devices: LocalDevices = None,
    threads: Threads = None,
    memory: Memory = None,
    reserve: Reserve = None,
    listen: Listen = None,
    p2p_port: P2pPort = None,
    grpc_port: GrpcPort = None,
    max_up: MaxUp = None,
    max_down: MaxDown = None,
    announce: Announce = None,
    force_tunnel: ForceTunnel = None,
    join: Joins = None,
    data: Data = None,
    data_host: DataHosts = None,
    tokenizer: TokenizerPath = None,
    weights: WeightsPath = None,
    metrics_port: MetricsPort = None,
    log_format: LogFormat = None,
    record: RecordFile = None,
    config: ConfigFile = None,
    settings: Sets = None,
) -> int:
    """Run a node, in the foreground unless --background. With nothing configured: a solo swarm on
    built-in data that others can join."""
    flags = dict(
        name=name,
        role=role,
        stage=stage,
        device=device,
        threads=threads,
        memory=memory,
        reserve=reserve,
        listen=listen,
        p2p_port=p2p_port,
        grpc_port=grpc_port,
        announce=announce,
        force_tunnel=force_tunnel,
        local_devices=local_devices,
        data=data,
        data_hosts=data_host,
        tokenizer=tokenizer,
        weights=weights,
        max_up=max_up,
        max_down=max_down,
        join=join,
        metrics_port=metrics_port,
        log_format=log_format,
        record=record,
        config=config,
    ) | _assignments(settings)
    ours = _config(flags)
    clear_stale(ours.control_socket)  # refuses a second daemon
    if background:
        command = ["start"]
        if what:
            command.append(what)
        return _in_background(ours, command, flags)
    from node.app import joining

    manifest, invite = joining.choose(ours, what)
    if "libp2p" in sys.modules and manifest is not None and invite is not None:
        _again(ours.manifest_path(manifest.run_id), flags | {"join": invite.addresses})
    return _run_daemon(ours, manifest, invite)


@app.command(rich_help_panel=RUN)
def join(
    invite: Annotated[
        str | None,
        Argument(
            metavar="INVITE|MULTIADDR",
            help="What the other side's  tutti swarm invite  printed; with --lan a swarm's name.",
        ),
    ] = None,
    lan: Annotated[
        bool,
        Option(
            "--lan", help="List the swarms on this LAN, and join the one there is or the one named."
        ),
    ] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Accept without asking.")] = False,
    no_start: Annotated[bool, Option("--no-start", help="Only remember the swarm.")] = False,
    verbose: Verbose = False,
    background: Background = False,
    name: Name = None,
    role: Role = None,
    stage: StageToHost = None,
    device: Device = None,
    local_devices: LocalDevices = None,
    threads: Threads = None,
    memory: Memory = None,
    reserve: Reserve = None,
    listen: Listen = None,
    p2p_port: P2pPort = None,
    grpc_port: GrpcPort = None,
    max_up: MaxUp = None,
    max_down: MaxDown = None,
    announce: Announce = None,
    force_tunnel: ForceTunnel = None,
    data: Data = None,
    data_host: DataHosts = None,
    tokenizer: TokenizerPath = None,
    weights: WeightsPath = None,
    metrics_port: MetricsPort = None,
    log_format: LogFormat = None,
    record: RecordFile = None,
    config: ConfigFile = None,
    settings: Sets = None,
) -> int:
    """Show a swarm, ask for your consent, remember it, and start. Nothing runs before you say
    yes."""
    flags = dict(
        name=name,
        role=role,
        stage=stage,
        device=device,
        threads=threads,
        memory=memory,
        reserve=reserve,
        listen=listen,
        p2p_port=p2p_port,
        grpc_port=grpc_port,
        announce=announce,
        force_tunnel=force_tunnel,
        local_devices=local_devices,
        data=data,
        data_hosts=data_host,
        tokenizer=tokenizer,
        weights=weights,
        max_up=max_up,
        max_down=max_down,
        metrics_port=metrics_port,
        log_format=log_format,
        record=record,
        config=config,
    ) | _assignments(settings)
    ours = _config(flags)
    if not no_start:
        clear_stale(ours.control_socket)  # refuses a second daemon
    from node.app import joining

    if lan:
        found = joining.on_the_lan()
        _say("\n".join(joining.lan_lines(found)))
        invite = joining.chosen(found, invite)
    elif invite is None:
        raise UsageFault(
            "no invite was given",
            "tutti join INVITE, or  tutti join --lan  for what is on this LAN",
        )
    manifest, asked = joining.look(ours, invite)
    joining.check(ours, asked)
    _say("\n".join(joining.sheet(ours, manifest, signed=True, verbose=verbose)))
    if yes:
        joining.check_reading(ours, manifest)
    else:
        if not sys.stdin.isatty():
            raise UsageFault(
                "joining needs your consent", "look at the above and repeat with  --yes"
            )
        with interrupts.raising():  # the prompt leaves the terminal as it was
            if not typer.confirm("Join this swarm?", err=True):
                return ExitCode.REFUSED
        # The user has seen which files are read, and agreed for this run.
        agreed = dataclasses.replace(ours.places(manifest.run_id), for_all_runs=())
        ours.keep_places(manifest.run_id, agreed)
    path = ours.remember(manifest, asked)
    _say(f"remembered in {path}")
    if no_start:
        _say("start it with  tutti start")
        return ExitCode.OK
    # Not the invite, which is remembered: others can read command lines, and it may have a token.
    flags |= {"join": asked.addresses}
    if background:
        return _in_background(ours, ["start", str(path)], flags)
    _again(path, flags)


@app.command(rich_help_panel=RUN)
def demo(
    ends: Annotated[int, Option(min=1, max=16, help="Peers that hold the ends.")] = 1,
    stages: Annotated[int, Option(min=1, max=16, help="Block stages.")] = 3,
    replicas: Annotated[int, Option(min=1, max=16, help="Peers a block stage.")] = 2,
    manifest: Annotated[
        Path | None,
        Option("--manifest", help="Train this one, with as many block stages as it has."),
    ] = None,
    peers: Annotated[
        int,
        Option(min=0, max=64, help="Peers in all, spread over the stages; 0: as --replicas says."),
    ] = 0,
    kill: Annotated[
        bool, Option("--kill", help="Kill peers in the middle and watch the swarm go on.")
    ] = False,
    epochs: Annotated[int, Option(min=0, help="Stop after so many epochs; 0: the default.")] = 0,
    seconds: Annotated[
        float,
        Option(
            min=0,
            help="Stop after so many seconds, with --kill when the new daemon works; 0: no limit.",
        ),
    ] = 0.0,
    keep: Annotated[bool, Option("--keep", help="Keep the peers' directories.")] = False,
    rendezvous: Annotated[
        bool, Option("--rendezvous", help="Meet at a peer of its own, as in docker-compose.yml.")
    ] = False,
    as_json: Json = False,
) -> int:
    """A whole swarm on this machine, real daemons and real sockets, training in front of your
    eyes."""
    from node.manifest import read_manifest

    chosen = None
    if manifest:
        chosen = read_manifest(manifest)
    from node.app import joining
    from node.app.demo import DemoOptions, run, spread

    if chosen:
        joining.check_demo(_config({}), chosen)
    if chosen and chosen.model.weights:
        raise UsageFault(
            f"{manifest} begins from a model, which the homes of the demo do not have",
            f"host every stage on this machine:  tutti start {quote(str(manifest))}",
        )
    if chosen:
        stages = chosen.pipeline.stages
    nodes = spread(ends, stages, replicas, peers)
    home = None
    if "home" in HOME:
        home = Path(HOME["home"])
    options = DemoOptions(
        nodes, kill, as_json, epochs, seconds, home, keep, manifest=chosen, rendezvous=rendezvous
    )
    return run(options)


@app.command(
    rich_help_panel=RUN,
    epilog="Scenarios. " + "; ".join(f"{name}: {says}" for name, says in SCENARIOS.items()),
)
def simulate(
    swarm: Annotated[
        Path | None, Argument(metavar="[SWARM.toml]", help="Default: the manifest of the demo.")
    ] = None,
    peers: Annotated[int, Option(min=2, max=10_000, help="Peers in all.")] = 12,
    ends: Annotated[
        int, Option(min=0, max=1000, help="Of them at the ends; 0: one in twelve.")
    ] = 0,
    stages: Annotated[int, Option(min=0, max=512, help="Block stages; 0: the manifest's.")] = 0,
    epochs: Annotated[int, Option(min=0, help="Epochs of the run; 0: the manifest's.")] = 0,
    scenario: Annotated[
        list[str] | None,
        Option(
            "--scenario",
            click_type=OneOf(SCENARIOS),
            metavar="NAME",
            help="Faults to simulate; may be repeated.",
        ),
    ] = None,
    seed: Annotated[int, Option(min=0, help="Seed of all random choices.")] = 0,
    replay: Annotated[
        Path | None, Option("--replay", metavar="FILE", help="Replay the faults in this file.")
    ] = None,
    save: Annotated[
        Path | None, Option("--save", metavar="FILE", help="Write the faults to this file.")
    ] = None,
    picture: Annotated[
        Path | None,
        Option("--svg", "--png", metavar="FILE", help="Draw the time line: .svg, or .png."),
    ] = None,
    small: Annotated[
        bool, Option("--small", help="The small swarm of the tests; of sizes only --epochs counts.")
    ] = False,
    averaging: Annotated[
        str | None,
        Option(
            "--averaging",
            click_type=OneOf((*AVERAGING, "all")),
            metavar="NAME|all",
            help="Simulate averaging alone, by this strategy.",
        ),
    ] = None,
    grid: Annotated[
        str, Option(metavar="M,M[,M]", help="With --averaging: axes of the Moshpit grid.")
    ] = "",
    failure: Annotated[
        float, Option(min=0, max=0.99, help="With --averaging: chance to miss a round.")
    ] = 0.0,
    seeds: Annotated[
        int, Option(min=1, max=10_000, help="With --averaging: runs to take the mean of.")
    ] = 20,
    as_json: Json = False,
) -> int:
    """A swarm of any size in virtual time: the daemon's own decisions, simulated lines and faults,
    every invariant checked."""
    from node.manifest import read_manifest
    from node.telemetry.pictures import check

    if picture:
        check(picture)
    if swarm and not small:
        read_manifest(swarm)  # wrong ones are refused before the simulator is loaded
    if replay and not os.path.exists(replay):
        raise UsageFault(f"there is no {replay}", "name a file that --save has written")
    from node.sim.command import run_averaging, run_command, setup_of

    if averaging:
        return run_averaging(averaging, peers, grid, failure, seeds, seed, as_json=as_json)
    setup = setup_of(swarm, peers=peers, ends=ends, stages=stages, epochs=epochs, small=small)
    return run_command(
        setup,
        scenario or ("quiet",),
        seed,
        replay=replay,
        save=save,
        picture=picture,
        as_json=as_json,
    )


@app.command(rich_help_panel=RUN)
def bootstrap(
    port: P2pPort = None,
    listen: Listen = None,
    join: Joins = None,
    swarm: Annotated[
        Path | None, Option("--swarm", help="swarm.toml this rendezvous serves.")
    ] = None,
    background: Background = False,
    max_up: MaxUp = None,
    max_down: MaxDown = None,
    config: ConfigFile = None,
    settings: Sets = None,
) -> int:
    """Run a rendezvous: helps peers find each other, holds no part of the model. Its port is 31337
    where none is set."""
    served = None
    if swarm:
        served = str(swarm)
    flags = dict(
        role="rendezvous",
        p2p_port=port,
        listen=listen,
        join=join,
        swarm=served,
        max_up=max_up,
        max_down=max_down,
        config=config,
    ) | _assignments(settings)
    ours = _config(flags)
    if "transport.p2p_port" not in ours.sources:
        flags |= {"p2p_port": RENDEZVOUS_PORT}
        ours = _config(flags)
    clear_stale(ours.control_socket)  # refuses a second daemon
    if background:
        return _in_background(ours, ["start"], flags)
    from node.app import joining

    manifest, invite = joining.choose(ours, None)
    return _run_daemon(ours, manifest, invite)


@app.command(rich_help_panel=RUN)
def drain(
    timeout: Annotated[float, Option(min=1, help="Seconds to finish in.")] = 600.0,
    as_json: Json = False,
) -> int:
    """Finish what is in flight, hand over, leave the swarm and stop."""
    from node.control import commands

    with _client() as client:
        return commands.drain(client, timeout, as_json=as_json)


@app.command(rich_help_panel=RUN)
def stop(
    now: Annotated[
        bool, Option("--now", help="Kill it when it takes longer than five seconds.")
    ] = False,
) -> int:
    """Stop the daemon and wait until its process is gone. A longer wait is explained."""
    from node.control import commands

    with _client() as client:
        return commands.stop(client, now=now)


@app.command(rich_help_panel=RUN)
def restart(
    background: Annotated[
        bool | None,
        Option(
            "--background/--foreground",
            "-d/-f",
            help="Default: in the background if the daemon has no terminal now.",
        ),
    ] = None,
) -> int:
    """Stop the daemon, wait until it is gone, and start it with the arguments, the directory and
    the TUTTI_* settings that it was started with."""
    from node.app.launch import PROGRAM, Started, become
    from node.control import commands

    ours = _config({})
    with _client(ours) as client:
        before = Started.of(client.pid)
        commands.stop(client, now=False)
    with interrupts.telling("the daemon has ended and is not started again"):
        before.enter()
        if background is None:
            background = before.background
        if background:
            return _launched(ours, before.arguments)
        become([PROGRAM, *before.arguments])


# ------------------------------------------------------------ watch


@app.command(rich_help_panel=WATCH)
def status(
    as_json: Json = False,
    plain: Annotated[bool, Option("--plain", help="No colour, no wrapping.")] = False,
    watch: Annotated[bool, Option("--watch", "-w", help="Again every second.")] = False,
    verbose: Verbose = False,
) -> int:
    """One screen about this node. Exits with 0 healthy, 9 degraded, 3 not running."""
    from node.control import commands

    try:
        client = _client()
    except NotRunning as fault:
        raise _with_last_known(fault) from None
    with client:
        return commands.status(client, as_json=as_json, bare=plain, watch=watch, verbose=verbose)


@app.command(rich_help_panel=WATCH)
def ps(as_json: Json = False) -> int:
    """The daemons of this machine: home, run, process id, state. Each daemon of a solo swarm and of
    a demo has a line."""
    from node.control import daemons
    from node.core.home import home_named, user_dir

    known = [home_named(HOME.get("home")) or user_dir("data"), user_dir("data")]
    found = daemons.found(known)
    if as_json:
        _json([one.document() for one in found])
    else:
        print("\n".join(daemons.lines(found)))
    return ExitCode.OK


@app.command(rich_help_panel=WATCH)
def peers(
    everybody: Annotated[
        bool, Option("--all", "-a", help="Lost peers and rendezvous too.")
    ] = False,
    stage: Annotated[int | None, Option(min=0, help="Only this stage; 0 is the ends.")] = None,
    sort: Annotated[
        str, Option("--sort", click_type=OneOf(PEER_SORTS), help=f"{', '.join(PEER_SORTS)}.")
    ] = "stage",
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Whole PeerIds, as in a wide terminal.")
    ] = False,
    join: Annotated[
        str | None,
        Option(
            "--join",
            metavar="INVITE|MULTIADDR",
            help="Ask that node instead; no daemon needed here.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Who is in the swarm, as this node sees it."""
    from node.control import commands

    if join is None:
        with _client() as client:
            answer = client.peers(everybody=everybody)
    else:
        from node.app import joining
        from node.control.text import present

        answer = joining.ask_peers(_config({}), join)
        for line in answer.peers:
            if line.path == "self":
                line.path = "asked"
        if not everybody:
            kept = present(answer.peers)
            del answer.peers[:]
            answer.peers.extend(kept)
    return commands.peers(answer, as_json=as_json, sort=sort, stage=stage, verbose=verbose)


@app.command(rich_help_panel=WATCH)
def cells(as_json: Json = False) -> int:
    """Which cells the run has: their epochs, speeds, and peers at the ends and in each stage."""
    from node.control import commands

    with _client() as client:
        return commands.cells(client.cells(), as_json=as_json)


@app.command(rich_help_panel=WATCH)
def ping(
    peer: Annotated[
        str,
        Argument(
            metavar="PEER|MULTIADDR", help="A name, a PeerId, its last letters, or an address."
        ),
    ],
    count: Annotated[int, Option("--count", "-c", min=1, max=1000, help="Round trips.")] = 3,
    as_json: Json = False,
) -> int:
    """Measure the way to a peer, after trying every better way than the one there is. An address is
    dialled from here even when no daemon runs."""
    from node.app import joining
    from node.control import commands
    from protos.ask_pb2 import Ask, AskPing
    from protos.control_pb2 import PingReport

    try:
        with _client() as client:
            report = client.ping(peer, count, improve=not peer.startswith("/"))
    except NotRunning:
        if not peer.startswith("/"):
            raise
        report = PingReport(peer=peer.rpartition("/p2p/")[2], path="dialled")
        for _ in range(count):
            nonce, begin = os.urandom(16), time.perf_counter()
            answer = joining.observe((peer,), Ask(ping=AskPing(nonce=nonce))).ping
            if answer.nonce != nonce:
                raise WireError("the node answered something else than it was asked") from None
            report.rtt_s.append(time.perf_counter() - begin)
            report.name = answer.name
    return commands.ping(report, as_json=as_json)


@app.command(rich_help_panel=WATCH)
def monitor() -> int:
    """Full screen view of the running node. Leaving it with q leaves the node running."""
    with _client() as client:
        if not terminal.full_screen():
            raise UsageFault(
                "monitor needs a terminal on which it can move the cursor",
                "use  tutti status --watch",
            )
        from node.tui.app import Monitor

        monitor = Monitor(client)
        with interrupts.raising():
            last_word = monitor.run()
        if last_word:
            _say(last_word)
    return monitor.return_code or ExitCode.OK


@app.command(rich_help_panel=WATCH)
def logs(
    follow: Annotated[bool, Option("--follow", "-f", help="Go on until interrupted.")] = False,
    last: Annotated[
        int, Option("--lines", "-n", min=0, max=10_000, help="The newest so many.")
    ] = 50,
    level: Annotated[
        str,
        Option(
            "--level",
            click_type=OneOf(EVENT_LEVELS),
            help=f"Least level: {', '.join(EVENT_LEVELS)}.",
        ),
    ] = "info",
    as_json: Json = False,
) -> int:
    """What happened. Without a running daemon: from its event file."""
    from node.control import commands

    ours = _config({})
    try:
        client = _client(ours)
    except NotRunning:
        if follow:
            raise
        return commands.logs(
            None, ours.events_path, follow=False, last=last, level=level, as_json=as_json
        )
    with client:
        return commands.logs(
            client, ours.events_path, follow=follow, last=last, level=level, as_json=as_json
        )


@app.command(rich_help_panel=WATCH)
def replay(
    file: Annotated[
        Path, Argument(metavar="FILE", help="A recording by  tutti start --record FILE.")
    ],
    as_json: Json = False,
) -> int:
    """Play a daemon's recording into fresh state machines, and show the first other action."""
    if not file.is_file():
        raise UsageFault(f"there is no {file}", "name a file of  tutti start --record")
    from node.training.recording.command import run_command

    return run_command(file, as_json=as_json)


@app.command(rich_help_panel=WATCH)
def doctor(
    what: Annotated[
        str | None,
        Argument(
            metavar="[CHECK]",
            click_type=OneOf(CHECKS),
            help="versions, device, disk, data, clock or net. Default: all of them.",
        ),
    ] = None,
    places: Annotated[
        list[str] | None,
        Argument(
            metavar="[INVITE|MULTIADDR...]", help="Default: the invite of the swarm used last."
        ),
    ] = None,
    fix: Annotated[
        bool, Option("--fix", help="Mend what can be mended without a loss, and look again.")
    ] = False,
    verbose: Verbose = False,
    config: ConfigFile = None,
    settings: Sets = None,
    as_json: Json = False,
) -> int:
    """Find out what does not work here, and why: cause, effect and fix of each fault. No daemon
    needed.

    net looks for the swarm layer by layer. Exits with the code of the first fault;
    docs/operating.md lists them.
    """
    from node.app import doctoring

    ours = _config(dict(config=config) | _assignments(settings))
    wanted = CHECKS
    if what is not None:
        wanted = (what,)
    return doctoring.run(ours, wanted, places or (), fix=fix, verbose=verbose, as_json=as_json)


# ------------------------------------------------------------ swarm


@swarm_app.command("init")
def swarm_init(
    out: Annotated[
        Path | None,
        Argument(
            metavar="[FILE]",
            help="File to write. Default: swarm.toml; with --from a new name beside that one.",
        ),
    ] = None,
    name: Annotated[str | None, Option(help="Name of the swarm.")] = None,
    stages: Annotated[int | None, Option(help="Block stages.")] = None,
    machines: Annotated[
        str | None,
        Option(
            metavar="SIZE,SIZE",
            help="Memory of the machines that will train, such as 8GB,8GB,24GB: the block stages "
            "follow from it.",
        ),
    ] = None,
    ends_layers: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Keep the first N layers at the ends: what a peer sends of its text is N layers "
            "deep.",
        ),
    ] = None,
    epochs: Annotated[int | None, Option(help="Epochs of the run.")] = None,
    shape: Annotated[
        str | None,
        Option(metavar="NAME", help="The shape of a published model, e.g. qwen3-0.6b."),
    ] = None,
    data: Annotated[
        str | None, Option(help="A file, http(s)://…, hf:NAME, synthetic:SEED or builtin:pydoc.")
    ] = None,
    tokenizer: Annotated[str | None, Option(help='A tokenizer.json, or "bytes".')] = None,
    private: Annotated[
        bool, Option("--private", help="Admit only bearers of an invite signed by you.")
    ] = False,
    source: Annotated[
        Path | None,
        Option(
            "--from",
            help="Start from this manifest, which becomes yours, a run of its own from epoch 0; or "
            "from the model in a Hugging Face directory.",
        ),
    ] = None,
    go_on: Annotated[
        Path | None,
        Option(
            "--continue",
            metavar="FILE",
            help="Like --from, but from the last epoch of that run, with more --epochs.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Any field, e.g. model.layers=12."),
    ] = None,
    address: Annotated[
        list[str] | None,
        Option("--address", metavar="MULTIADDR", help="A rendezvous for the invite."),
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace the file.")] = False,
    no_open: NoOpen = False,
    as_json: Json = False,
) -> int:
    """Open the data, write a manifest with its hash, signed with this node's key, and print how to
    start and join it. Every call makes another run."""
    import secrets

    from node import fine_tuning
    from node.app import joining
    from node.app.capacity import cut_lines
    from node.config import write_atomically
    from node.identity.keys import Identity
    from node.manifest import Manifest, amended, read_manifest, typed
    from node.model.shapes import shape_named

    if out is None:
        out = Path("swarm.toml")
        if source and os.path.isfile(source):
            out = joining.beside(source)
    if os.path.exists(out) and not force:
        raise UsageFault(
            f"{out} exists already",
            f"give another name:  tutti swarm init {quote(str(joining.beside(out)))}  , or replace "
            "it with  --force",
        )
    changes = dict[str, Any]()
    if shape:
        changes = {f"model.{k}": v for k, v in shape_named(shape).items()}
    changes |= _assignments(settings)
    of_model = dict[str, Any]()
    model: Path | None = None
    here = dict[str, Any]()
    if source is not None and os.path.isdir(source):
        if shape:
            raise UsageFault("--from DIR and --shape", "give one: the directory says the shape")
        model, source = source, None
        of_model = joining.model_fields(model)
        tokenizer = tokenizer or str(model / "tokenizer.json")
        here = {"weights": os.path.abspath(model)}
    if name is None and source is None and go_on is None:
        content_of = str(data or changes.get("data.source", ""))
        name = changes.pop("swarm.name", joining.run_name(model, shape, content_of))
    named = {
        "swarm.name": name,
        "pipeline.stages": stages,
        "model.ends_layers": ends_layers,
        "training.epochs": epochs,
    }
    changes |= {k: v for k, v in named.items() if v is not None}
    if private:
        changes["swarm.admission"] = "invite"
    data, tokenizer = (
        data or changes.pop("data.source", None),
        tokenizer or changes.pop("data.tokenizer", None),
    )
    content, files = joining.named_content(data, tokenizer)
    here |= files
    ours = _config({})
    identity = Identity.load_or_create(ours.identity_path)
    if source and go_on:
        raise UsageFault(
            "--from and --continue",
            "give one: --from repeats a run, --continue goes on from its last epoch",
        )
    file = source or go_on
    if file:
        base = read_manifest(file)
    else:
        base = Manifest.default_demo()
    if machines is not None and "pipeline.stages" in changes:
        raise UsageFault(
            "--machines and a number of block stages",
            "give one: the number follows from the machines",
        )
    usual = {}
    if not file:
        usual = fine_tuning.usual(typed(of_model), typed(changes))
    continues = ""
    if go_on:
        continues = base.run_id
    changes = {
        **of_model,
        **usual,
        "swarm.salt": secrets.token_hex(8),
        "swarm.continues": continues,
        **changes,
    }
    made = amended(base.owned_by(identity.peer_id), content | changes)
    cut: Cut | None = None
    if machines is not None:
        fixed = changes.get("model.ends_layers", base.model.ends_layers or None)
        made, cut = joining.cut_to(ours, made, machines, fixed)
    if go_on:
        made.check_continues(base)
    if model is not None:
        made = joining.with_weights(made, model)
    else:
        joining.check_weights(made, base)
    places = ours.places_of(base)
    of_all = tuple(setting for setting in places.for_all_runs if setting not in here)
    places = dataclasses.replace(places, **{**here, "for_all_runs": of_all})
    if file is None:  # no words but this user's
        places = dataclasses.replace(places, own=True)
    corpus = None
    shown = list[str]()
    beside: Mapping[str, bytes] = {}
    if not no_open:
        made, beside = joining.with_files(ours, made, base, places, model)
        made = joining.recognised(made, places, changes)
        made, corpus, words = joining.with_hashes(
            ours, made, places, files=joining.files_beside(beside), said=changes
        )
        shown = []
        if not as_json:
            shown = _samples(corpus, made, words, [0, 1], short=True)
    raw = made.sign(identity)
    manifest = Manifest.parse(raw)
    invite = ""
    if address:
        invite = joining.invite_text(manifest, tuple(address or ()), identity)
    with writing(out, "choose another place"):
        write_atomically(out, raw)
    ours.keep_places(manifest.run_id, places)
    ours.keep_files(manifest.run_id, beside)
    if as_json:
        document: dict[str, Any] = {
            "file": str(out),
            "run_id": manifest.run_id,
            "owner": manifest.swarm.owner,
            "invite": invite or None,
        }
        if cut is not None:
            document["machines"] = joining.cut_document(cut)
        _json(document | joining.content_document(manifest, corpus))
        return ExitCode.OK
    print(f"wrote    {out}   run {manifest.run_id[:12]}, signed by {identity.name}")
    if model is not None:
        print(f"model    {manifest.model_said()}")
    if cut:
        for line in cut_lines(cut):
            print(line)
    if model is not None and file is None:
        for line in fine_tuning.explained(manifest):
            print(line)
    print(f"data     {joining.content_line(manifest, corpus)}")
    for line in shown:
        print(line)
    print(f"start    tutti start {quote(str(out))}")
    if invite:
        print(f"join     tutti join {invite}")
    else:
        print("join     when it runs:  tutti swarm invite   prints the line for others")
    return ExitCode.OK


def _samples(
    corpus: Corpus | Stream,
    manifest: Manifest,
    words: Tokenizer,
    positions: Sequence[int],
    *,
    short: bool,
) -> list[str]:
    from node.app import joining

    bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return joining.samples_shown(corpus, manifest, words, positions, bold=bold, short=short)


@data_app.command("show")
def data_show(
    what: Annotated[
        str, Argument(metavar="SOURCE|MANIFEST", help="A file, a directory, hf:NAME, a swarm.toml.")
    ],
    number: Annotated[int, Argument(metavar="[N]", help="Sample to show, from 1.")] = 1,
    data: Data = None,
    data_host: DataHosts = None,
    tokenizer: TokenizerPath = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Any field, e.g. model.seq_len=1024."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show a sample as the model sees it: the text of its tokens, and where it is trained on."""
    from node.app import joining
    from node.manifest import Manifest, amended, read_manifest

    ours = _config(dict(data=data, data_hosts=data_host, tokenizer=tokenizer))
    if what.endswith(".toml"):
        manifest = read_manifest(Path(what))
        corpus, words = joining.opened(ours, manifest, ours.places_of(manifest))
    else:
        changes = _assignments(settings)
        content, here = joining.named_content(what, tokenizer)
        base = Manifest.default_demo()
        manifest = amended(base, {"model.vocab": joining.ANY_VOCAB} | content | changes)
        places = dataclasses.replace(ours.places_of(base), **here, own=True, for_all_runs=())
        manifest, beside = joining.with_files(ours, manifest, base, places, None)
        manifest = joining.recognised(manifest, places, changes)
        manifest, corpus, words = joining.with_hashes(
            ours, manifest, places, files=joining.files_beside(beside), said=changes
        )
    if as_json:
        _json(joining.sample_document(corpus, manifest, words, number - 1))
        return ExitCode.OK
    print(f"data     {joining.content_line(manifest, corpus)}")
    for line in _samples(corpus, manifest, words, [number - 1], short=False):
        print(line)
    return ExitCode.OK


@swarm_app.command("validate")
def swarm_validate(
    file: Annotated[
        Path | None,
        Argument(
            metavar="[FILE]",
            help="The manifest to check. Default: ./swarm.toml, else that of the swarm used last.",
        ),
    ] = None,
    data: Data = None,
    data_host: DataHosts = None,
    tokenizer: TokenizerPath = None,
    no_open: NoOpen = False,
    as_json: Json = False,
) -> int:
    """Check every field of a manifest, its signature when it has one, and the data and the
    tokenizer that it names."""
    from node.app import joining
    from node.manifest import left_out, read_manifest

    ours = _config(dict(data=data, data_hosts=data_host, tokenizer=tokenizer))
    file = file or _usual_manifest(ours)
    manifest = read_manifest(file)
    signed = manifest.signature is not None
    if signed:
        manifest.verify(me=joining.who(ours))
    corpus = None
    if not no_open:
        corpus = joining.opened(ours, manifest, ours.places_of(manifest))[0]
    if as_json:
        document = {"valid": True, "signed": signed, "run_id": manifest.run_id}
        _json(document | joining.content_document(manifest, corpus))
        return ExitCode.OK
    note = f"   not signed yet:  tutti swarm init --from {quote(str(file))}"
    if signed:
        note = "signature good"
    print(f"ok   {file}   run {manifest.run_id[:12]}   {note}")
    print(f"data {joining.content_line(manifest, corpus)}")
    if not signed and (missing := left_out(file.read_bytes())):
        print(
            "not in the file, so built-in values hold:  "
            f"{', '.join(f'[{name}]' for name in missing)}"
        )
    return ExitCode.OK


@swarm_app.command("inspect")
def swarm_inspect(
    what: Annotated[
        str | None,
        Argument(metavar="[FILE|INVITE|MULTIADDR]", help="Default: the swarm used last."),
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Show what a swarm is, without joining it."""
    from node.app import joining
    from node.identity.invites import is_invite
    from node.manifest import SECTIONS, read_manifest

    ours = _config({})
    if what is None:
        known = ours.remembered()
        if known is None:
            raise UsageFault(
                "no swarm is remembered here", "name a swarm.toml, an invite or an address"
            )
        manifest = known[0]
    elif (is_invite(what) or what.startswith(("/ip", "/dns"))) and not os.path.isfile(what):
        manifest, _ = joining.look(ours, what)
    else:
        manifest = read_manifest(Path(what))
    if manifest.signature is not None:
        manifest.verify(me=joining.who(ours))
    if as_json:
        parts = {name: dataclasses.asdict(getattr(manifest, name)) for name in SECTIONS}
        signed = manifest.signature is not None
        _json({"run_id": manifest.run_id, "format": manifest.format, "signed": signed, **parts})
    else:
        signed = manifest.signature is not None
        print("\n".join(joining.sheet(ours, manifest, signed=signed, verbose=verbose)))
    return ExitCode.OK


@swarm_app.command("invite")
def swarm_invite(
    peer: Annotated[
        str | None,
        Option(
            "--for",
            "--peer",
            metavar="PEER",
            help="Of a private swarm: for this peer only. A PeerId, or a peer in sight.",
        ),
    ] = None,
    days: Annotated[
        float, Option(min=0.001, max=366, help="Of a private swarm: how long it is good.")
    ] = 30.0,
    code: Annotated[
        bool, Option("--qr", help="As a QR code as well, for a telephone to read.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Print the string that brings another machine into the swarm this node runs."""
    from node.app import joining
    from node.control.text import invite_note
    from node.identity.invites import Invite
    from node.identity.keys import Identity

    ours = _config({})
    with _client(ours) as client:
        guest = None
        if peer:
            guest = _meant(client, [peer])[0][0]
        reply = client.invite()
    invite = Invite.decode(reply.invite)
    known = ours.remembered(invite.run_id)
    if known is not None and known[0].swarm.tokens:
        identity = Identity.load(ours.identity_path)
        text = joining.invite_text(known[0], invite.addresses, identity, guest, days)
    else:
        text = reply.invite
    if as_json:
        document = {"invite": text, "addresses": list(invite.addresses), "run_id": invite.run_id}
        _json(document | {"only_on": reply.only_on})
    else:
        if code:
            _print_code(text)
        print(text)
    if note := invite_note(reply.only_on):
        _say(note)
    return ExitCode.OK


@swarm_app.command("switch")
def swarm_switch(
    file: Annotated[
        Path,
        Argument(metavar="FILE", help="TOML with averaging.cell and [outer], as they are to be."),
    ],
    as_json: Json = False,
) -> int:
    """Change how the cells of a running swarm average. Only its owner can; it comes into force with
    the next epoch."""
    from node.app.change import wanted

    try:
        raw = file.read_bytes()
    except OSError as e:
        raise UsageFault(
            f"cannot read {file}: {e.strerror}", "name a file with averaging.cell and [outer]"
        ) from e
    return _sign_change(as_json, lambda manifest, rules: (wanted(manifest, raw), rules.revoked))


@swarm_app.command("revoke")
def swarm_revoke(
    peers: Annotated[
        list[str],
        Argument(
            metavar="PEER...", help="A PeerId, its last letters, or a name, as  tutti peers  shows."
        ),
    ],
    back: Annotated[bool, Option("--back", help="Let them take part again.")] = False,
    as_json: Json = False,
) -> int:
    """Put peers out of a running swarm, or let them back in. Only its owner can do this. Every peer
    that learns of it refuses them at once, also in a private run and whatever token they hold."""
    from node.app.change import under
    from node.control.naming import called
    from node.identity.keys import Identity
    from node.training.protocol.rules import mark

    ours = _config({})
    with _client(ours) as client:
        revoked, known = _meant(client, peers)
    if Identity.load(ours.identity_path).peer_id in revoked:
        raise UsageFault("that is this node itself", "an owner cannot revoke the own key")
    verb = "revokes"
    if back:
        verb = "lets in"
    for peer in revoked:
        _say(f"{verb}  {called(peer, known)}")
    marks = frozenset(map(mark, revoked))
    return _sign_change(
        as_json,
        lambda manifest, rules: (
            under(manifest, rules),
            rules.revoked - marks if back else rules.revoked | marks,
        ),
    )


def _sign_change(
    as_json: bool, make: Callable[[Manifest, Rules], tuple[Manifest, Collection[str]]]
) -> int:
    """Sign what ``make`` wants of the run's manifest and the rules known now: the manifest with
    other averaging, and whom to revoke; and give it to the daemon."""
    from node.app.change import read, signed
    from node.identity.keys import Identity

    ours = _config({})
    with _client(ours) as client:
        snapshot = client.status()
        known = None
        if snapshot.swarm.run_id:
            known = ours.remembered(snapshot.swarm.run_id)
        if known is None:
            raise UsageFault(
                "the daemon takes no part in a run that is known here", "see  tutti status"
            )
        manifest, last = known[0], snapshot.change
        changed, revoked = make(manifest, read(manifest, last.signed))
        me = Identity.load(ours.identity_path)
        revision = client.switch(signed(manifest, changed, last.revision + 1, me, revoked))
    if as_json:
        _json({"revision": revision, "run_id": manifest.run_id, "epoch": snapshot.epoch})
    else:
        print(
            f"signed   change {revision} of run {manifest.run_id[:12]}: it comes into force with "
            "the next epoch; see  tutti status"
        )
    return ExitCode.OK


# ------------------------------------------------------------ model


@app.command(rich_help_panel=MODEL)
def generate(
    prompt: Annotated[str, Argument(metavar="TEXT", help="What the model goes on from.")],
    max_tokens: Annotated[
        int, Option(min=1, max=4096, help="Length of what it says, in tokens.")
    ] = 100,
    temperature: Annotated[
        float, Option(min=0.0, max=10.0, help="0 always takes the likeliest.")
    ] = 0.8,
    top_k: Annotated[
        int, Option(min=0, max=2**31 - 1, help="Choose among so many; 0 among all.")
    ] = 0,
    top_p: TopP = 0.0,
    seed: Annotated[
        int, Option(min=0, max=2**63 - 1, help="The same seed and parameters give the same text.")
    ] = 0,
    drop_stages: DropStages = "",
    first: First = 0,
    as_json: Json = False,
) -> int:
    """Generate text with the live swarm. A stage that no peer serves is left out if the run's skip
    ratio allows it."""
    from node.control import commands
    from protos.control_pb2 import GenerateRequest, LeaveOut

    leave_out = LeaveOut(stages=_stages(drop_stages), after=first)
    request = GenerateRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        top_k=top_k,
        top_p=top_p,
        leave_out=leave_out,
    )
    with _client() as client:
        return commands.generate(client, request, as_json=as_json)


@app.command(rich_help_panel=MODEL)
def chat(
    system: Annotated[
        str, Option("--system", metavar="TEXT", help="What the model is told before everything.")
    ] = "",
    max_tokens: Annotated[int, Option(min=1, max=4096, help="Most tokens of an answer.")] = 1024,
    temperature: Annotated[
        float, Option(min=0.0, max=10.0, help="0 always takes the likeliest.")
    ] = 0.7,
    top_p: TopP = 0.0,
    seed: Annotated[
        int | None, Option(min=0, max=2**63 - 1, help="Default: another one for each conversation.")
    ] = None,
) -> int:
    """Talk with the model of the live swarm, by its own chat template. Reads lines from a terminal
    or a pipe."""
    import secrets

    from node.control.chat import chat
    from protos.control_pb2 import GenerateRequest

    if seed is None:
        seed = secrets.randbits(63)
    settings = GenerateRequest(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    with _client() as client:
        return chat(client, settings, system, client.path.parent / "chat-history")


@app.command(rich_help_panel=MODEL)
def serve(
    host: Annotated[str, Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option("--port", min=0, max=65535, help="0 picks one.")] = 8000,
    token: Annotated[
        str,
        Option(
            "--token",
            envvar="TUTTI_SERVE_TOKEN",
            help="What clients give as API key; needed where others reach it.",
        ),
    ] = "",
) -> int:
    """Serve the model of the live swarm to clients of the OpenAI API, until interrupted."""
    import asyncio

    with _client() as client:
        from node.serve.command import listen, serve

        with listen(host, port, token) as sock:
            where = f"[{host}]" if ":" in host else host
            _say(f"serving on http://{where}:{sock.getsockname()[1]}/v1  (Ctrl-C ends it)")
            with interrupts.raising():
                return asyncio.run(serve(client.path, sock, token))


@app.command("eval", rich_help_panel=MODEL)
def evaluate(
    drop_stages: DropStages = "",
    drop: Annotated[
        float,
        Option(
            "--drop",
            min=0,
            max=0.999,
            help="Share of the block stages to leave out, in several choices; mean over them.",
        ),
    ] = 0.0,
    choices: Annotated[
        int, Option(min=1, max=1000, help="With --drop: choices of missing stages.")
    ] = 8,
    first: First = 0,
    batches: Annotated[
        int,
        Option(
            min=0,
            max=10_000,
            help="Held-out micro-batches; 0: as many as the run's own evaluation.",
        ),
    ] = 0,
    as_json: Json = False,
) -> int:
    """Held-out loss through the live swarm, with block stages missing if you say so."""
    from node.control import commands
    from protos.control_pb2 import EvaluateRequest, LeaveOut

    leave_out = LeaveOut(stages=_stages(drop_stages), after=first)
    request = EvaluateRequest(leave_out=leave_out, share=drop, choices=choices, batches=batches)
    with _client() as client:
        return commands.evaluate(client, request, as_json=as_json)


@app.command(rich_help_panel=MODEL)
def partition(
    file: Annotated[
        str,
        Argument(
            metavar="MATRICES.json", help="Matrices, ranks, speeds, previous owners; - for stdin."
        ),
    ],
    as_json: Json = False,
) -> int:
    """Plan which rank steps which matrix: owners, time over the ideal and over the floor, bytes
    moved, hash."""
    from node.tools import partition as command

    asked = command.read(file)
    plan = command.planned(asked)
    for field in command.unknown(asked):
        _say(f"unknown field {field!r} is ignored")
    if as_json:
        _json(command.document(plan))
    else:
        print("\n".join(command.picture(plan, asked)))
    return ExitCode.OK


@app.command(rich_help_panel=MODEL)
def schedule(
    file: Annotated[
        str, Argument(metavar="PROBLEM.json", help="Peers, delays, stages, rules; - for stdin.")
    ],
    gantt: Annotated[
        Path | None,
        Option("--gantt", metavar="FILE", help="Draw a Gantt chart: .svg, or .png."),
    ] = None,
    limit: Annotated[
        float,
        Option("--limit", min=0, help="Seconds of one core to plan in; 0: 4, more for many paths."),
    ] = 0.0,
    moves: Annotated[
        int,
        Option("--moves", min=0, help="Plans to try instead: the same result on every machine."),
    ] = 0,
    slots_ends: Annotated[
        int, Option("--slots-ends", min=0, help="In flight at an ends peer; 0: as in the problem.")
    ] = 0,
    seed: Annotated[int, Option("--seed", min=0, help="Of the search.")] = 0,
    assign: Annotated[
        bool,
        Option(
            "--assign", help="First look for better places of the peers, stages of the same sizes."
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """Plan which peers every micro-batch of an epoch visits: paths in launch order, makespan, lower
    bound.

    PROBLEM.json: {"delays_s": [[...]], "compute_s": [...], "stages": [[ends peers], [stage 1],
    ...], "path_length": stages of a path with stage 0, "microbatches_per_end": n or [...]} and, if
    wanted, slots_ends, slots_stage, backward_ratio, loss_ratio, gap_s, max_swaps,
    max_swap_distance, max_jump, equal_visits, owed ({"ends peer": [stages it must train]} or
    "all"); for --assign: may_host ({"peer": [stages it can host]}), sync_ratio (weight of the worst
    link inside a stage).
    """
    from node.tools import schedule as command

    return command.run_command(
        file,
        as_json=as_json,
        chart=gantt,
        limit=limit,
        moves=moves,
        slots_ends=slots_ends,
        seed=seed,
        assign=assign,
    )


@app.command(rich_help_panel=MODEL)
def export(
    directory: Annotated[
        Path, Argument(metavar="DIR", help="Where to write it; made if it is not there.")
    ],
    tokenizer: Annotated[
        Path | None,
        Option(
            "--tokenizer",
            metavar="FILE",
            help="The run's tokenizer.json. Default: the one here, or of another peer.",
        ),
    ] = None,
    without: Annotated[
        bool, Option("--no-tokenizer", help="Write the model without a tokenizer.")
    ] = False,
    merge: Annotated[
        bool, Option("--merge", help="Of a run that trains adapters: write whole weights.")
    ] = False,
    gguf: Annotated[
        bool, Option("--gguf", help="Write the model as GGUF (f16) too, for llama.cpp.")
    ] = False,
    base: Annotated[
        str,
        Option(metavar="NAME", help="The model beside which adapters were trained, for loaders."),
    ] = "",
    as_json: Json = False,
) -> int:
    """Gather every stage and write a Hugging Face directory."""
    from node.control import commands
    from protos.control_pb2 import ExportRequest

    if tokenizer is not None and without:
        raise UsageFault("--tokenizer and --no-tokenizer", "give one of the two")
    tokenizer_file = ""
    if tokenizer is not None:
        tokenizer_file = str(tokenizer)
    request = ExportRequest(
        directory=str(directory),
        tokenizer=tokenizer_file,
        without_tokenizer=without,
        merge=merge,
        gguf=gguf,
        base=base,
    )
    with _client() as client:
        return commands.export(client, request, as_json=as_json)


# ------------------------------------------------------------ about


@app.command(rich_help_panel=ABOUT)
def version(as_json: Json = False) -> int:
    """The version of this software and of the protocol it speaks."""
    if as_json:
        spoken = {"protocol": PROTOCOL, "oldest_protocol": OLDEST_PROTOCOL}
        _json({"tutti": VERSION, **spoken, "python": sys.version.split()[0]})
    else:
        print(f"tutti {VERSION}   {PROTOCOLS}   python {sys.version.split()[0]}")
    return ExitCode.OK


@app.command("help", rich_help_panel=ABOUT)
def help_of(
    verb: Annotated[
        list[str] | None, Argument(metavar="[VERB...]", help="Default: all verbs.")
    ] = None,
) -> int:
    """Explain a verb, as its option --help does."""
    words = [*(verb or ()), "--help"]
    return app.built(words).main(args=words, prog_name="tutti", standalone_mode=False) or 0


@app.command(rich_help_panel=ABOUT)
def config(file: ConfigFile = None, settings: Sets = None, as_json: Json = False) -> int:
    """Every setting of this node with its meaning and its value, as a config.toml to begin with:
    tutti config > config.toml"""
    from node.config import config_document, config_toml

    ours = _config(dict(config=file) | _assignments(settings))
    if as_json:
        _json(config_document(ours))
    else:
        terminal.as_file(sys.stdout)
        print(config_toml(ours), end="")
    return ExitCode.OK


@id_app.callback()
def _id(ctx: typer.Context) -> int:
    """Show it when no verb is given."""
    if ctx.invoked_subcommand:
        return ExitCode.OK
    return id_show()


@id_app.command("new")
def id_new(as_json: Json = False) -> int:
    """Make this node's key and show its PeerId. A key that is there stays."""
    from node.identity.keys import Identity

    _show_identity(Identity.create(_config({}).identity_path), as_json=as_json)
    return ExitCode.OK


@id_app.command("show")
def id_show(as_json: Json = False) -> int:
    """PeerId, name and key file."""
    from node.identity.keys import Identity

    _show_identity(Identity.load(_config({}).identity_path), as_json=as_json)
    return ExitCode.OK


# ------------------------------------------------------------ shared by the verbs


def _config(flags: dict[str, Any]) -> NodeConfig:
    from node.config import NodeConfig

    return NodeConfig.load({**HOME, **flags})


def _client(ours: NodeConfig | None = None) -> ControlClient:
    """The daemon of ``ours``; without it of the home named, whose settings are then not read: that
    would take as long as asking."""
    from node.control.client import ControlClient
    from node.core.home import control_socket, home_named, user_dir

    if ours:
        home = ours.home
    else:
        home = home_named(HOME.get("home")) or user_dir("data")
    return ControlClient(control_socket(home), home=home)


def _in_background(ours: NodeConfig, words: list[str], flags: dict[str, Any]) -> int:
    """Start a daemon with these words and settings, and return when it answers."""
    from node.app.launch import as_flags

    home = ["--home", HOME["home"]] if "home" in HOME else []
    return _launched(ours, [*home, *words, *as_flags(_given(flags))])


def _launched(ours: NodeConfig, words: Sequence[str]) -> int:
    from node.app.launch import LOG, in_background

    def answers() -> bool:
        with contextlib.suppress(LocalFault), _client(ours) as client:
            return bool(client.status().addresses)
        return False

    log = ours.home / LOG
    pid = in_background(words, log, answers)
    about = ours.home_flag
    print(f"started  pid {pid}, in the background")
    print(f"log      {log}, or  tutti logs -f{about}")
    print(f"see      tutti status{about} ,  tutti monitor{about}")
    print(f"stop     tutti stop{about}")
    return ExitCode.OK


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _with_last_known(fault: NotRunning) -> NotRunning:
    """The fault of ``tutti status`` without a daemon, with what this home knows."""
    from node.app.last import last_known

    try:
        last = last_known(_config({}))
    except LocalFault:  # settings that cannot be read are no reason to say less than before
        return fault
    lines = last.lines(time.time())
    details = {"last": last.document()} if lines else {}
    return NotRunning("\n".join([fault.what, *lines]), fault.next_step, details=details)


def _usual_manifest(ours: NodeConfig) -> Path:
    """``swarm.toml`` in the working directory, else the manifest of the swarm used last. Raises
    UsageFault."""
    here = Path("swarm.toml")
    if here.exists():
        return here
    if (run_id := ours.current()) and (file := ours.manifest_path(run_id)).exists():
        return file
    raise UsageFault(
        "there is no swarm.toml here, and no swarm is remembered",
        "name a manifest:  tutti swarm validate FILE",
    )


def _meant(
    client: ControlClient, peers: Sequence[str]
) -> tuple[list[PeerId], Mapping[PeerId, str]]:
    """The peers that were typed, by PeerId, last letters or name; and the names of all peers in
    sight. Raises UsageFault."""
    from node.control.naming import resolve

    known = {PeerId(p.peer): p.name for p in client.peers(everybody=True).peers}
    return [resolve(peer, known) for peer in peers], known


def _print_code(text: str) -> None:
    import shutil

    from node.control import qr

    halves = terminal.shows("█▀▄", sys.stdout)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size().columns
    print("\n".join(qr.lines(text, width, halves=halves, colour=colour)))


def _run_daemon(ours: NodeConfig, manifest: Manifest | None, invite: Invite | None) -> int:
    if sys.stderr.isatty():
        _say(f"tutti {VERSION}   loading torch and hivemind, a few seconds")
    from node.app.daemon import main as run

    return run(ours, manifest, invite)


def _show_identity(identity: Identity, *, as_json: bool) -> None:
    if as_json:
        _json({"peer": identity.peer_id, "name": identity.name, "key": str(identity.path)})
    else:
        print(
            f"{identity.peer_id}   {identity.name}\nkey   {identity.path}   (keep a backup; never "
            "share it)"
        )


def _stages(text: str) -> list[int]:
    """ "2,5" as numbers. Raises UsageFault."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 6):
            raise UsageFault(
                f"--drop-stages {text}: {word!r} is not the number of a stage",
                "write  --drop-stages 2,5",
            )
    return sorted({int(word) for word in words})


def _assignments(pairs: list[str] | None) -> dict[str, Any]:
    """``key=value`` words; the value stays text until the type of its setting is known."""
    found = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageFault(f"--set {pair}", "write  --set section.key=value")
        # "name = anna" is written as in TOML; else a blank may belong to a path.
        if value[:1].isspace():
            value = value.strip()
        found[key.strip()] = value
    return found


def _again(manifest: Path, flags: dict[str, Any]) -> NoReturn:
    """Become a fresh ``tutti start`` of this swarm, whichever the settings name: the observer's
    libp2p and the daemon's hivemind cannot live in one process."""
    from node.app.launch import PROGRAM, as_flags, become

    home = ["--home", HOME["home"]] if "home" in HOME else []
    become([PROGRAM, *home, "start", str(manifest), *as_flags(_given(flags))])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _json(document: Any) -> None:
    from node.control.commands import say_json

    say_json(document)


def _hoist_home(words: list[str]) -> list[str]:
    """Take ``--home DIR`` out of the line, wherever it stands."""
    rest: list[str] = []
    it = iter(words)
    for word in it:
        if word == "--":
            return [*rest, word, *it]
        if word == "--home":
            value = next(it, None)
            if value is None:
                raise UsageFault("--home needs a directory", "tutti --home DIR status")
            HOME["home"] = value
        elif word.startswith("--home="):
            HOME["home"] = word.partition("=")[2]
        else:
            rest.append(word)
    return rest


def _crashed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For an unexpected error: the traceback into a file, one sentence on stderr."""
    import traceback

    story = "".join(traceback.format_exception(kind, error, trace))
    folder = Path(HOME.get("home") or os.path.expanduser("~/.cache/tutti"))
    try:
        (folder / "log").mkdir(parents=True, exist_ok=True)
        path = folder / "log" / "crash.log"
        path.write_text(story, encoding="utf-8", errors="backslashreplace")
        where = f"the traceback is in {path}; please send it with your report"
    except OSError:
        where = story
    _say(f"tutti: unexpected {kind.__name__}: {error}\n  {where}")


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if argv is None:
        argv = sys.argv[1:]
    words = list(argv)
    libraries.prepare()
    sys.excepthook = _crashed
    terminal.prepare()
    HOME.clear()
    code = _run(words)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        terminal.mute(sys.stdout, sys.stderr)
        return _unwritten(error, words)
    return code


def _run(words: list[str]) -> int:
    """Run one command; its exit code, after every fault has been shown."""
    try:
        _check_text(words)
        line = _hoist_home(words)
        if line[:1] in (["--version"], ["-V"]):
            line[0] = "version"
        code = app.built(line).main(args=line, prog_name="tutti", standalone_mode=False)
        if code == ExitCode.INTERRUPTED:  # typer has caught the Ctrl-C already
            _say(interrupts.LAST_WORDS)
        return int(code or 0)
    except LocalFault as fault:
        return _fail(fault, words)
    except (PeerFault, WireError) as error:
        return _fail(LocalFault(str(error), "try another peer, or again", ExitCode.NETWORK), words)
    except click.exceptions.NoArgsIsHelpError as error:
        _say(error.format_message())
        return ExitCode.USAGE
    except click.ClickException as error:
        return _fail(UsageFault(*what_was_wrong(error)), words)
    except (KeyboardInterrupt, typer.Abort) as end:
        asked = isinstance(end, typer.Abort) and sys.stderr.isatty()  # behind a question
        _say(("\n" if asked else "") + interrupts.LAST_WORDS)
        return ExitCode.INTERRUPTED
    except SystemExit as end:
        # rich and typer make one of a broken pipe.
        if not _caused(end, BrokenPipeError):
            raise
        terminal.mute(sys.stdout, sys.stderr)
        return ExitCode.READER_GONE
    except OSError as error:
        if not isinstance(error, BrokenPipeError) and error.errno not in DISK_FULL:
            raise
        terminal.mute(sys.stdout)
        return _unwritten(error, words)


def _unwritten(error: OSError, words: list[str]) -> int:
    """The exit code after output that could not be written, said unless its reader has gone."""
    if isinstance(error, BrokenPipeError):
        terminal.mute(sys.stdout, sys.stderr)
        return ExitCode.READER_GONE
    what = f"cannot write the output: {error.strerror or error}"
    return _fail(OutOfResources(what, "free some space, or write to another place"), words)


def _caused(error: BaseException, kind: type[BaseException]) -> bool:
    """Return True if an exception of ``kind`` led to ``error``."""
    while error.__context__ is not None:
        error = error.__context__
        if isinstance(error, kind):
            return True
    return False


def _check_text(words: list[str]) -> None:
    """Raises UsageFault for words that are no text, and for a working directory that is none or
    gone: paths go into messages and files as UTF-8."""
    try:
        here = os.getcwd()
    except OSError as e:
        raise UsageFault("the working directory is gone", "cd  to one that exists") from e
    for text in (*words, here, HOME.get("home", ""), os.environ.get("TUTTI_HOME", "")):
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise UsageFault(f"{text!r} is not UTF-8", "use names that are") from e


def _fail(fault: LocalFault, words: list[str]) -> int:
    from node.control.commands import show_fault

    try:
        show_fault(fault, as_json="--json" in words)
    except (OSError, SystemExit):  # nobody reads it; the exit code says it
        terminal.mute(sys.stdout, sys.stderr)
    return int(fault.code)


if __name__ == "__main__":
    sys.exit(main())
