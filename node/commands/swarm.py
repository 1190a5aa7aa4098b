"""Manifests, invites and rules of a swarm: ``swarm``."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from node.commands.line import options, shared
from node.commands.line.usage import FileArgument, VerbGroup, argument, command, flag, option
from node.commands.manifest import init
from node.commands.orders import end, pause, resume
from node.control import terminal
from node.core.errors import ExitCode, UsageFault
from node.core.ids import PeerId

if TYPE_CHECKING:
    from node.config import NodeConfig
    from node.consensus.rules import Rules
    from node.control.client import ControlClient
    from node.manifest import Manifest


@command()
@argument(
    "file",
    metavar="[FILE]",
    default=None,
    type=options.FILE,
    help="The manifest to check. Default: ./swarm.toml, else that of the swarm used last.",
)
@options.data_places
@options.no_open
@options.as_json
def validate(file: Path | None, no_open: bool, as_json: bool, **at: Any) -> int:
    """Check every field of a manifest, its signature when it has one, and the data and the
    tokenizer that it names."""
    from node.app import joining
    from node.manifest import left_out, read_manifest

    ours = shared.config(at)
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
        shared.print_json(document | joining.content_document(manifest, corpus))
        return ExitCode.OK
    note = f"   not signed yet:  tutti swarm init --from {quote(str(file))}"
    if signed:
        note = "signature good"
    print(shared.advice(f"ok   {file}   run {manifest.run_id[:12]}   {note}"))
    print(f"data {joining.content_line(manifest, corpus)}")
    if not signed and (missing := left_out(file.read_bytes())):
        print(
            "not in the file, so built-in values hold:  "
            f"{', '.join(f'[{name}]' for name in missing)}"
        )
    return ExitCode.OK


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


@command()
@argument(
    "what",
    metavar="[FILE|INVITE|MULTIADDR]",
    default=None,
    type=FileArgument(),
    help="Default: the swarm used last.",
)
@options.verbose
@options.as_json
def inspect(what: str | None, verbose: bool, as_json: bool) -> int:
    """Show what a swarm is, without joining it."""
    from node.app import joining
    from node.identity.invites import is_invite
    from node.manifest import SECTIONS, read_manifest

    ours = shared.config({})
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
        shared.print_json(
            {"run_id": manifest.run_id, "format": manifest.format, "signed": signed, **parts}
        )
    else:
        signed = manifest.signature is not None
        print("\n".join(joining.sheet(ours, manifest, signed=signed, verbose=verbose)))
    return ExitCode.OK


@command()
@option(
    "--for",
    "--peer",
    "peer",
    metavar="PEER",
    help="Of a private swarm: for this peer only. A PeerId, or a peer in sight.",
)
@option(
    "--days",
    default=30.0,
    type=click.FloatRange(0.001, 366),
    help="Of a private swarm: how long it is good.",
)
@flag("--qr", "code", help="As a QR code as well, for a telephone to read.")
@options.as_json
def invite(peer: str | None, days: float, code: bool, as_json: bool) -> int:
    """Print the string that brings another machine into the swarm this node runs."""
    from node.app import joining
    from node.control.text import invite_note
    from node.identity.invites import Invite
    from node.identity.keys import Identity

    ours = shared.config({})
    with shared.client(ours) as client:
        guest = None
        if peer:
            guest = _meant(client, [peer])[0][0]
        reply = client.invite()
    told = Invite.decode(reply.invite)
    known = ours.remembered(told.run_id)
    if known is not None and known[0].swarm.tokens:
        identity = Identity.load(ours.identity_path)
        text = joining.invite_text(known[0], told.addresses, identity, guest, days)
    else:
        text = reply.invite
    if as_json:
        document = {"invite": text, "addresses": list(told.addresses), "run_id": told.run_id}
        shared.print_json(document | {"only_on": reply.only_on})
    else:
        if code:
            _print_code(text)
        print(text)
    if note := invite_note(reply.only_on):
        shared.say(note)
    return ExitCode.OK


def _print_code(text: str) -> None:
    import shutil

    from node.control import qr

    halves = terminal.shows("█▀▄", sys.stdout)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size().columns
    print("\n".join(qr.lines(text, width, halves=halves, colour=colour)))


def _meant(
    client: ControlClient, peers: Sequence[str]
) -> tuple[list[PeerId], Mapping[PeerId, str]]:
    """PeerIds of the peers that were typed (by PeerId, last letters or name), and the names of all
    peers in sight. Raises UsageFault for a word that fits no peer or several."""
    from node.control.naming import resolve

    known = {PeerId(p.peer): p.name for p in client.peers(everybody=True).peers}
    return [resolve(peer, known) for peer in peers], known


@command()
@argument(
    "file",
    metavar="FILE",
    type=options.FILE,
    help="TOML with averaging.cell and [outer], as they are to be.",
)
@options.as_json
def switch(file: Path, as_json: bool) -> int:
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


@command()
@argument(
    "peers",
    metavar="PEER...",
    nargs=-1,
    required=True,
    help="A PeerId, its last letters, or a name, as  tutti peers  shows.",
)
@option(
    "--invite",
    "invites",
    type=click.Choice(["end", "keep"]),
    help="In a private swarm, the fate of an invite for anybody with which these peers came. end: "
    "nobody can use it any more, and all who came with it are out. keep: its holders can come back "
    "with a new key. By default it ends, but if others in sight came with it, nothing is done.",
)
@flag(
    "--back",
    help="Let them take part again. If the invite with which they came has ended, name its key "
    "too, or leave it so with --invite end and give each a new one.",
)
@options.as_json
def revoke(peers: Sequence[str], invites: str | None, back: bool, as_json: bool) -> int:
    """Put peers out of a running swarm, or let them back in. Only its owner can do this. Every peer
    that learns of it refuses them at once, also in a private run and whatever token they hold."""
    from node.app.change import under
    from node.consensus.rules import mark
    from node.identity.keys import Identity

    ours = shared.config({})
    with shared.client(ours) as client:
        named, known = _meant(client, peers)
        told = client.peers(everybody=True).invites
        came = {PeerId(peer): PeerId(key) for peer, key in told.items()}
    if Identity.load(ours.identity_path).peer_id in named:
        raise UsageFault("that is this node itself", "an owner cannot revoke the own key")

    def changed(manifest: Manifest, rules: Rules) -> tuple[Manifest, Collection[str]]:
        private = manifest.swarm.admission == "invite"
        if not private:
            came.clear()  # all take part in an open run, also with an invite that has ended
        unseen = private and not known.keys() >= set(named)
        if back:
            _let_in(named, invites, rules, known, came)
            left = rules.revoked - set(map(mark, named))
            if unseen and left:
                shared.say("peers whose invite has ended stay out until its key is named too")
            return under(manifest, rules), left
        put_out = _put_out(named, invites, known, came)
        if unseen:
            shared.say("invites of peers that are not in sight stay good for whoever has them")
        return under(manifest, rules), rules.revoked | set(map(mark, put_out))

    return _sign_change(as_json, changed)


def _put_out(
    named: Sequence[PeerId],
    fate: str | None,
    known: Mapping[PeerId, str],
    came: Mapping[PeerId, PeerId],
) -> list[PeerId]:
    """Print the peers to put out; return their keys and the keys of the invites that end. ``fate``:
    the option ``--invite``; ``known``: names of the peers in sight; ``came``: for each the key of
    the invite for anybody with which it came. Raises UsageFault if ``fate`` is None and others came
    with the same invite."""
    from node.control.naming import called

    ended: dict[PeerId, PeerId] = {}
    if fate != "keep":
        ended = {came[peer]: peer for peer in named if peer in came}
    # Leaders know the voters that are out by their own marks alone, so these get marks as well.
    with_them = [peer for peer, key in came.items() if key in ended and peer not in named]
    others = ", ".join(called(peer, known) for peer in with_them)
    if with_them and fate is None:
        raise UsageFault(
            f"with the same invite came {others}",
            "put them out too, and let nobody in by it any more:  --invite end\n"
            "or leave it good for whoever has it, with a new key too:  --invite keep",
        )
    for peer in named:
        shared.say(f"revokes  {called(peer, known)}")
    for key, peer in ended.items():
        shared.say(f"revokes  the invite of {called(peer, known)}; its key is {key}")
    if with_them:
        shared.say(f"puts out {others}; with a new invite one of them can come back:")
        shared.say("    tutti swarm revoke --back PEER --invite end; tutti swarm invite --for PEER")
        shared.say("to make the old invite good again, name them and its key:")
        shared.say(f"    tutti swarm revoke --back {' '.join([*with_them, *ended])}")
    return [*named, *ended, *with_them]


def _let_in(
    named: Sequence[PeerId],
    fate: str | None,
    rules: Rules,
    known: Mapping[PeerId, str],
    came: Mapping[PeerId, PeerId],
) -> None:
    """Print the peers to let in; ``fate``, ``known`` and ``came`` as for :func:`_put_out`. Raises
    UsageFault if a peer would stay out because its invite is revoked under ``rules``, unless
    ``fate`` is "end" or ``named`` has the invite's key too."""
    from node.control.naming import called

    for peer in named:
        key = came.get(peer)
        if fate == "end" or key is None or key in named or not rules.revokes(key):
            continue
        raise UsageFault(
            f"the invite with which {called(peer, known)} came has ended",
            f"make it good again for whoever has it, and name its key too:  {key}\n"
            "or leave it so, and give each a new one:  --invite end\n"
            "then:  tutti swarm invite --for PEER",
        )
    for peer in named:
        shared.say(f"lets in  {called(peer, known)}")


def _sign_change(
    as_json: bool, make: Callable[[Manifest, Rules], tuple[Manifest, Collection[str]]]
) -> int:
    """Sign a change of the daemon's run, and give it to the daemon; returns the exit code.

    ``make`` gets the run's manifest and the rules in force, and returns the manifest as it is to be
    and the marks of all revoked peers. Raises UsageFault if the run is not known here.
    """
    from node.app.change import read, signed
    from node.identity.keys import Identity

    ours = shared.config({})
    with shared.client(ours) as client:
        snapshot = client.status()
        manifest = shared.manifest_of_run(ours, snapshot.swarm.run_id)
        last = snapshot.change
        changed, revoked = make(manifest, read(manifest, last.signed))
        me = Identity.load(ours.identity_path)
        revision = client.switch(signed(manifest, changed, last.revision + 1, me, revoked))
    if as_json:
        shared.print_json(
            {"revision": revision, "run_id": manifest.run_id, "epoch": snapshot.epoch}
        )
    else:
        said = (
            f"signed   change {revision} of run {manifest.run_id[:12]}: it comes into force with "
            "the next epoch; see  tutti status"
        )
        print(shared.advice(said))
    return ExitCode.OK


swarm = VerbGroup(
    "swarm",
    {"Commands": (init, validate, inspect, invite, switch, revoke, pause, resume, end)},
    help="Make, check and hand out swarms.",
)
