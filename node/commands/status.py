"""The running daemon, and its peers as it sees them: ``status``, ``ps``, ``peers``, ``cells``,
``ping``, ``monitor`` and ``logs``."""

import os
import time

import click

from node.commands.line import options, shared
from node.commands.line.usage import OneOf, argument, command, flag, option
from node.control import terminal
from node.core import interrupts
from node.core.errors import ExitCode, NotRunning, UsageFault, WireError

PEER_SORTS = ("stage", "name", "state", "rtt", "speed", "epoch", "up")
EVENT_LEVELS = ("debug", "info", "warning", "error")
"""Words of options, here so that a wrong one is refused before anything is loaded."""


@command()
@options.as_json
@flag("--plain", help="No colour, no wrapping.")
@flag("--watch", "-w", help="Again every second.")
@options.verbose
def status(as_json: bool, plain: bool, watch: bool, verbose: bool) -> int:
    """One screen about this node. Exits with 0 healthy, 9 degraded, 3 not running."""
    from node.control import commands

    try:
        client = shared.client()
    except NotRunning as fault:
        raise shared.with_last_known(fault) from None
    with client:
        return commands.status(client, as_json=as_json, bare=plain, watch=watch, verbose=verbose)


@command()
@options.as_json
def ps(as_json: bool) -> int:
    """The daemons of this machine: home, run, process id, state. Each daemon of a solo swarm and of
    a demo has a line."""
    from node.control import daemons
    from node.core.home import home_named, user_dir

    known = [home_named(shared.HOME.get("home")) or user_dir("data"), user_dir("data")]
    found = daemons.found(known)
    if as_json:
        shared.print_json([one.document() for one in found])
    else:
        print("\n".join(daemons.lines(found)))
    return ExitCode.OK


@command()
@click.option("--all", "-a", "everybody", is_flag=True, help="Lost peers and rendezvous too.")
@option("--stage", type=click.IntRange(min=0), help="Only this stage; 0 is the ends.")
@option("--sort", default="stage", type=OneOf(PEER_SORTS), help=f"{', '.join(PEER_SORTS)}.")
@flag("--verbose", "-v", help="Whole PeerIds, as in a wide terminal.")
@option("--join", metavar="INVITE|MULTIADDR", help="Ask that node instead; no daemon needed here.")
@options.as_json
def peers(
    everybody: bool, stage: int | None, sort: str, verbose: bool, join: str | None, as_json: bool
) -> int:
    """Print the peers of the swarm, as this node sees them."""
    from node.control import commands

    if join is None:
        with shared.client() as client:
            answer = client.peers(everybody=everybody)
    else:
        from node.app import joining
        from node.control.text import present

        answer = joining.ask_peers(shared.config({}), join)
        for line in answer.peers:
            if line.path == "self":
                line.path = "asked"
        if not everybody:
            kept = present(answer.peers)
            del answer.peers[:]
            answer.peers.extend(kept)
    return commands.peers(answer, as_json=as_json, sort=sort, stage=stage, verbose=verbose)


@command()
@options.as_json
def cells(as_json: bool) -> int:
    """Which cells the run has: their epochs, speeds, and peers at the ends and in each stage."""
    from node.control import commands

    with shared.client() as client:
        return commands.cells(client.cells(), as_json=as_json)


@command()
@argument(
    "peer", metavar="PEER|MULTIADDR", help="A name, a PeerId, its last letters, or an address."
)
@option("--count", "-c", default=3, type=click.IntRange(1, 1000), help="Round trips.")
@options.as_json
def ping(peer: str, count: int, as_json: bool) -> int:
    """Measure the way to a peer, after trying every better way than the one there is. An address is
    dialled from here even when no daemon runs."""
    from node.app import joining
    from node.control import commands
    from protos.ask_pb2 import Ask, AskPing
    from protos.control_pb2 import PingReport

    try:
        with shared.client() as client:
            report = client.ping(peer, count, improve=not peer.startswith("/"))
    except NotRunning:
        if not peer.startswith("/"):
            raise
        report = PingReport(peer=peer.rpartition("/p2p/")[2], path="dialled")
        for _ in range(count):
            nonce = os.urandom(16)
            begin = time.perf_counter()
            answer = joining.observe((peer,), Ask(ping=AskPing(nonce=nonce))).ping
            if answer.nonce != nonce:
                raise WireError("the node answered something else than it was asked") from None
            report.rtt_s.append(time.perf_counter() - begin)
            report.name = answer.name
    return commands.ping(report, as_json=as_json)


@command()
def monitor() -> int:
    """Full screen view of the running node. Leaving it with q leaves the node running."""
    with shared.client() as client:
        if not terminal.full_screen():
            raise UsageFault(
                "monitor needs a terminal on which it can move the cursor",
                "use  tutti status --watch",
            )
        from node.tui.app import Monitor

        screen = Monitor(client)
        with interrupts.raising():
            last_word = screen.run()
        if last_word:
            shared.say(last_word)
    return screen.return_code or ExitCode.OK


@command()
@flag("--follow", "-f", help="Go on until interrupted.")
@option(
    "--lines",
    "-n",
    "last",
    default=50,
    type=click.IntRange(0, 10_000),
    help="The newest so many.",
)
@option(
    "--level",
    default="info",
    type=OneOf(EVENT_LEVELS),
    help=f"Least level: {', '.join(EVENT_LEVELS)}.",
)
@options.as_json
def logs(follow: bool, last: int, level: str, as_json: bool) -> int:
    """Print the events of the daemon. Without a running daemon: from its event file."""
    from node.control import commands

    ours = shared.config({})
    try:
        client = shared.client(ours)
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
