"""Which swarm to run, and what it is: from a file, an invite, an address, the memory of this home, or newly made.

Never in the daemon's process after :func:`observe`: py-libp2p and hivemind cannot live in one.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from node.config import NodeConfig
from node.control.diagnose import fault_of
from node.control.doctor import LIMIT_S, Checkup, examine
from node.control.sockets import listener
from node.control.text import consent_lines
from node.control.words import clean
from node.core.errors import NetworkFault, Refused, UsageFault, WireError
from node.core.ids import PeerId, RunId, short
from node.identity.admission import admission_token, is_grant, shown
from node.identity.invites import Invite, fitting_addresses, is_invite, within_limits
from node.identity.keys import Identity
from node.manifest import Manifest, read_manifest
from protos.ask_pb2 import Answer, Ask, AskManifest, AskPeers, PeersAnswer

if TYPE_CHECKING:
    from node.reach.nearby import Found

LAN_S = 4.0
"""For peers on the LAN to answer, in seconds."""


def choose(ours: NodeConfig, what: str | None) -> tuple[Manifest | None, Invite | None]:
    """The swarm to run: the one named, that of an invite, the one used last, or a new solo one."""
    places = [*([what] if what and what.startswith("/") and "/p2p/" in what else []), *ours.join]
    invite = next((Invite.decode(text) for text in ([what] if what else []) + places if is_invite(text)), None)
    addresses = tuple(p for p in places if p.startswith("/"))
    named = what is not None and not is_invite(what) and what not in places
    file = Path(what) if named and what else ours.swarm
    if file is not None:
        manifest = read_manifest(file)
        manifest.verify(invite.run_id if invite else None, me=who(ours))
        kept = ours.remembered(manifest.run_id)
        if invite is None and kept is not None and kept[1]:
            invite = Invite.decode(kept[1])
        ours.remember(manifest)
    elif invite is not None:
        known = ours.remembered(invite.run_id)
        # Not known yet: the daemon asks the swarm for it and checks it against the invite.
        manifest = known[0] if known else None
        if manifest is not None:
            manifest.verify(invite.run_id, invite.owner)
    elif addresses and ours.role != "rendezvous":
        manifest, _ = look(ours, *addresses)
        ours.remember(manifest)
    else:
        manifest, invite = last_or_solo(ours)
    if manifest is not None and addresses:
        known_addresses = invite.addresses if invite else ()
        admission = invite.admission if invite else ours.admission
        invite = Invite(manifest.run_id, manifest.swarm.owner, within_limits((*addresses, *known_addresses)), admission)
    return manifest, invite


def last_or_solo(ours: NodeConfig) -> tuple[Manifest | None, Invite | None]:
    """The swarm this home ran last, with the invite it came by; a new one of its own when there was none (not at a rendezvous)."""
    known = ours.remembered()
    if known is not None:
        manifest, text = known
        manifest.verify(me=who(ours))
        return manifest, Invite.decode(text) if text else None
    if ours.role == "rendezvous":
        return None, None
    identity = Identity.load_or_create(ours.identity_path)
    manifest = Manifest.parse(Manifest.default_demo().sign(identity))
    ours.remember(manifest)
    return manifest, None


def beside(file: Path) -> Path:
    """A name for a manifest made from ``file`` that nothing has yet: mine-2.toml, mine-3.toml, …"""
    named = (file.with_name(f"{file.stem}-{n}{file.suffix or '.toml'}") for n in itertools.count(2))
    return next(path for path in named if not path.exists())


def on_the_lan(seconds: float = LAN_S) -> list[Found]:
    """Peers of open runs that announce themselves on this LAN. Raises NetworkFault when no interface can take part."""
    from node.reach.nearby import look as listen

    return asyncio.run(listen(seconds))


def lan_lines(found: Sequence[Found]) -> list[str]:
    """For people: one line for each swarm."""
    if not found:
        return ["no swarm announces itself on this LAN"]
    lines = [f"{'SWARM':16} {'RUN':12} {'PEERS':>5}  OWNER"]
    for run_id, peers in _by_run(found).items():
        lines.append(f"{clean(peers[0].swarm, 16):16} {run_id[:12]} {len(peers):5}  {short(PeerId(peers[0].owner))}")
    return [*lines, "nobody but those who announce them vouches for these: compare the run with whoever runs it"]


def chosen(found: Sequence[Found], named: str | None) -> str:
    """The invite to the swarm on the LAN that is meant: the one named by its name or the beginning of its run, or the only one.

    Raises UsageFault where that is none or several.
    """
    runs = {r: peers for r, peers in _by_run(found).items() if named is None or r.startswith(named) or peers[0].swarm == named}
    if len(runs) != 1:
        what = f"{len(runs)} swarms on this LAN" + (f" are called {named!r}" if named else "")
        step = (
            "tutti join --lan RUN" if runs else "ask for an invite; is the other machine on this LAN, and its run an open one?"
        )
        raise NetworkFault(what, step) if not runs else UsageFault(what, step)
    run_id, peers = next(iter(runs.items()))
    addresses = fitting_addresses(a for p in peers for a in p.addresses)
    return Invite(RunId(run_id), PeerId(peers[0].owner), addresses).encode()


def _by_run(found: Sequence[Found]) -> dict[str, list[Found]]:
    runs: dict[str, list[Found]] = {}
    for one in sorted(found, key=lambda f: (f.swarm, f.run_id, f.peer)):
        if one.addresses:
            runs.setdefault(one.run_id, []).append(one)
    return runs


def look(ours: NodeConfig, *places: str) -> tuple[Manifest, str]:
    """The verified manifest behind an invite or addresses, asked from the swarm unless remembered; and the invite as text."""
    if places[0].startswith("/"):
        answer = observe(places, Ask(manifest=AskManifest()), "manifest")
        manifest = Manifest.parse(answer.manifest.toml)
        manifest.verify()
        print(
            f"run {manifest.run_id[:12]} is taken on the word of {places[0]}: an address proves no swarm, an invite does",
            file=sys.stderr,
        )
        return manifest, Invite(manifest.run_id, manifest.swarm.owner, within_limits(places)).encode()
    invite = Invite.decode(places[0])
    known = ours.remembered(invite.run_id)
    if known is not None:
        manifest = known[0]
    else:
        token, seed = introduced(ours, invite)
        answer = observe(invite.addresses, Ask(manifest=AskManifest(run_id=invite.run_id, admission=token)), "manifest", seed)
        manifest = Manifest.parse(answer.manifest.toml)
    manifest.verify(invite.run_id, invite.owner)
    return manifest, invite.encode()


def check(ours: NodeConfig, invite: Invite, seconds: float = LIMIT_S) -> None:
    """What would go wrong right after the start, asked of a peer of ``invite`` in at most ``seconds``.

    Raises Refused when the clock of this machine differs from theirs by more than a minute, or somebody else runs with
    the key of this home. Nothing is raised when nobody answers.
    """
    token, seed = introduced(ours, invite)
    found = examine(invite.addresses, me=_resting(ours), admission=token, seed=seed, first=True, seconds=seconds)
    if any(f.ok for f in found.findings) and not found.verdict.ok:
        raise fault_of(found.verdict, found.findings)


def examined(ours: NodeConfig, places: Sequence[str]) -> Checkup:
    """What keeps this machine from the swarm at ``places``, invites and addresses; with none, at the remembered invite.

    Raises UsageFault for what is neither.
    """
    known = None if places else ours.remembered()
    texts = list(places) or ([known[1]] if known is not None and known[1] else [])
    for text in texts:
        if not (is_invite(text) or text.startswith("/")):
            raise UsageFault(f"neither an invite nor an address: {text[:80]!r}", "give what  tutti swarm invite  printed")
    invites = [Invite.decode(text) for text in texts if is_invite(text)]
    token, seed = introduced(ours, invites[0]) if invites else (b"", None)
    addresses = [*(a for invite in invites for a in invite.addresses), *(t for t in texts if t.startswith("/"))]
    return examine(addresses, me=_resting(ours), admission=token, seed=seed)


def who(ours: NodeConfig) -> PeerId | None:
    """The PeerId of this home, if it has a key."""
    return Identity.load(ours.identity_path).peer_id if ours.identity_path.exists() else None


def _resting(ours: NodeConfig) -> PeerId | None:
    """The PeerId of this home if it has one and no daemon runs in it."""
    return who(ours) if listener(ours.control_socket) is None else None


def introduced(ours: NodeConfig, invite: Invite) -> tuple[bytes, bytes | None]:
    """What to show with a question about the run of ``invite``, and the seed of the key to ask with; (b"", None) in an open run."""
    if not invite.admission:
        return b"", None
    # A grant is good for anybody, so the key of this node may stay out of it; a token is good for its peer only.
    asker = Identity.ephemeral() if is_grant(invite.admission) else Identity.load_or_create(ours.identity_path)
    return shown(invite.admission, asker, invite.run_id), asker.seed()


def ask_peers(ours: NodeConfig, place: str) -> PeersAnswer:
    """Whom the node at ``place`` sees; of a private run only an invite tells."""
    if place.startswith("/"):
        return observe((place,), Ask(peers=AskPeers()), "peers").peers
    invite = Invite.decode(place)
    token, seed = introduced(ours, invite)
    return observe(invite.addresses, Ask(peers=AskPeers(admission=token)), "peers", seed).peers


def observe(places: tuple[str, ...], question: Ask, kind: str, seed: bytes | None = None) -> Answer:
    """Ask a node from outside the swarm, as the key of ``seed`` or a new one. Its refusal is Refused; another kind of
    answer is WireError."""
    begin = time.monotonic()
    from node.control.observer import PATIENCE_S, ask_first  # takes its time on a busy machine

    left = begin + LIMIT_S - time.monotonic()
    answer = ask_first(places, question, max(1.0, min(PATIENCE_S, left)), seed)
    said = answer.WhichOneof("answer")
    if said == "refusal":
        raise Refused(
            f"{places[0]} refused: {answer.refusal.reason[:300]}", "ask with an invite of that run, or try another peer"
        )
    if said != kind:
        raise WireError(f"{places[0]} answered something else than it was asked")
    return answer


def invite_text(
    manifest: Manifest, addresses: tuple[str, ...], identity: Identity, peer: PeerId | None = None, days: float = 30.0
) -> str:
    """An invite; with an admission token when the swarm is private. Refused for a private swarm of somebody else."""
    token = b""
    if manifest.swarm.admission == "invite":
        if identity.peer_id != manifest.swarm.owner:
            raise Refused("this swarm is private and you are not its owner", "ask the owner for an invite")
        token = admission_token(identity, manifest.run_id, peer, time.time() + days * 86400)
    return Invite(manifest.run_id, manifest.swarm.owner, addresses, token).encode()


def sheet(manifest: Manifest, *, signed: bool) -> list[str]:
    """What joining means."""
    m, t, p = manifest.model, manifest.training, manifest.pipeline
    return consent_lines(
        name=manifest.swarm.name,
        run_id=manifest.run_id,
        owner=manifest.swarm.owner,
        signed=signed,
        admission=manifest.swarm.admission,
        model=manifest.model_said(),
        parameters=manifest.parameter_count(),
        data=f"{manifest.data.source}, tokenizer {manifest.data.tokenizer}",
        cut=f"ends and {p.stages} block stages, activations as {p.wire}, gradients as {manifest.averaging.wire}",
        work=f"{t.epochs:,} epochs of {t.target_batch * m.seq_len:,} tokens, {manifest.optimizer.name}",
        fetches_data=manifest.data.source.startswith("hf:"),
    )
