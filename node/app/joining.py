"""Choice of the swarm to run, and its manifest: from a file, an invite, an address, the memory of
this home, or newly made.

Never in the daemon's process after :func:`observe`: py-libp2p and hivemind cannot live in one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from node.app.capacity import Cut, Forecast, cut_for, forecast, planned_memory
from node.config import NodeConfig, sizes_of
from node.control.diagnose import NobodyAnswers, fault_of
from node.control.doctor import LIMIT_S, Checkup, examine
from node.control.retries import ATTEMPT_S, Busy, GiveUp, Retries, busy_s
from node.control.sockets import listener
from node.control.text import consent_lines
from node.control.words import bits, clean
from node.core import interrupts
from node.core.errors import (
    ExitCode,
    LocalFault,
    NetworkFault,
    ProtocolMismatch,
    Refused,
    UsageFault,
    WireError,
)
from node.core.home import advice
from node.core.ids import ENDS, PeerId, RunId, short
from node.core.numbers import human, several
from node.core.version import PROTOCOLS
from node.data.places import check_not_saved, directory, named_for_one_run, tokenizer_file
from node.data.settings import Places
from node.identity.admission import admission_token, check_admission, is_grant, shown
from node.identity.invites import Invite, fitting_addresses, is_invite, within_limits
from node.identity.keys import Identity
from node.manifest import Manifest, amended, read_manifest
from node.model.shapes import layers_said
from node.orders.order import RunEnded, Verb, read_all
from protos.ask_pb2 import Answer, Ask, AskManifest, AskPeers, PeersAnswer

if TYPE_CHECKING:
    from node.data.sources import Corpus, Files
    from node.data.streamed.stream import Stream
    from node.data.tokenizer import Tokenizer
    from node.reach.nearby import Found

LONGEST_NAME = 40
"""Characters of the name of a swarm."""
LAN_S = 4.0
"""Seconds for peers on the LAN to answer."""


class PeerBusy(LocalFault):
    """A peer answers others first. ``outcome``: its place in the queue."""

    code = ExitCode.RESOURCES

    def __init__(self, place: str, outcome: Busy) -> None:
        ahead = ""
        if outcome.place:
            ahead = f"; this is number {outcome.place} in its queue"
        super().__init__(
            f"{place} is busy{ahead}", f"ask again in {max(1.0, outcome.again_s):.0f} s"
        )
        self.outcome = outcome


def choose(ours: NodeConfig, what: str | None) -> tuple[Manifest | None, Invite | None]:
    """The swarm to run: the named one, the invite's, the one in which this process has moved, the
    one used last, or a new solo swarm. It is remembered for the next start, with its invite."""
    places = [*ours.node.join]
    if what and _is_address(what):
        places = [what, *places]
    texts = places
    if what:
        texts = [what, *places]
    invite = next((Invite.decode(text) for text in texts if is_invite(text)), None)
    if invite is not None and ours.moved_run not in ("", invite.run_id):
        invite = None  # of settings for the next start
    if invite is not None:
        invite = _lasting(ours, invite)
    addresses = tuple(p for p in places if p.startswith("/"))
    named = what is not None and not is_invite(what) and what not in places
    file = ours.swarm
    if named and what:
        file = Path(what)
    elif what and is_invite(what):
        # The run that the user names at this start comes before the one of the settings.
        file = None
    manifest: Manifest | None = None
    if file is not None:
        manifest = _of_file(ours, file, invite)
    if manifest is not None:
        _remember(ours, manifest, invite)
        invite = invite or _invite_of(ours, manifest)
    elif invite is not None:
        # Not known yet: the daemon asks the swarm for it and checks it against the invite.
        manifest = _known(ours, invite)
        if manifest is not None:
            _remember(ours, manifest, invite)
    elif addresses and ours.node.role != "rendezvous" and not ours.moved_run:
        manifest, _ = look(ours, *addresses, joins=True)
        ours.remember(manifest)
    else:
        manifest, invite = last_or_solo(ours)
    if manifest is not None and addresses:
        known: tuple[str, ...] = ()
        admission = ours.admission
        if invite:
            known = invite.addresses
            admission = invite.admission
        reachable = within_limits((*addresses, *known))
        invite = Invite(manifest.run_id, manifest.swarm.owner, reachable, admission)
    return manifest, invite


def _of_file(ours: NodeConfig, file: Path, invite: Invite | None) -> Manifest | None:
    """The verified manifest in ``file``. None in a process that has moved, if the file is gone or
    has become another run's: the process goes on in its run. Raises UsageFault and Refused."""
    expected = None
    if invite is not None:
        expected = invite.run_id
    try:
        manifest = read_manifest(file)
        manifest.verify(expected, me=who(ours))
    except (UsageFault, Refused):
        if not ours.moved_run:
            raise
        return None
    if ours.moved_run and manifest.run_id != ours.moved_run:
        return None
    return manifest


def _remember(ours: NodeConfig, manifest: Manifest, invite: Invite | None) -> None:
    """Keep the run for the next start. A process that has moved keeps nothing: its user may have
    joined another run since, or got a fresh invite."""
    if not ours.moved_run:
        ours.remember(manifest, invite)


def _lasting(ours: NodeConfig, invite: Invite) -> Invite:
    """The invite as it was given; or the one that this home has kept of the same run, if that one
    admits this peer for longer: a daemon that is started again has the words of its first start."""
    try:
        kept = ours.kept_invite(invite.run_id)
    except Refused:
        return invite
    if kept is None or (kept.run_id, kept.owner) != (invite.run_id, invite.owner):
        return invite
    if admitted_until(ours, kept) > admitted_until(ours, invite):
        return kept
    return invite


def admitted_until(ours: NodeConfig, invite: Invite) -> float:
    """Unix time until which an invite admits the peer of this home; 0.0 if it does not, or no
    more."""
    if not invite.admission or not ours.identity_path.exists():
        return 0.0
    try:
        me = Identity.load(ours.identity_path)
        return check_admission(
            shown(invite.admission, me, invite.run_id),
            run_id=invite.run_id,
            owner=invite.owner,
            peer=me.peer_id,
            now_wall=time.time(),
        ).until
    except LocalFault:
        return 0.0


def renew(ours: NodeConfig, text: str) -> Path:
    """Remember another invite to a run that this home knows; returns the file of the run. Raises
    Refused for an invite to a private run that does not admit the peer of this home."""
    manifest, invite = look(ours, text, joins=True)
    private = manifest.swarm.admission == "invite" and manifest.swarm.owner != who(ours)
    if private and not admitted_until(ours, invite):
        raise Refused(
            "this invite does not admit this peer to its private run, or no more",
            "ask the owner for an invite for this peer, which  tutti id show  names",
        )
    return ours.remember(manifest, invite)


def _is_address(text: str) -> bool:
    """Return True for a multiaddr of a peer; a path may have a directory p2p, too."""
    return text.startswith("/") and "/p2p/" in text and not os.path.exists(text)


def last_or_solo(ours: NodeConfig) -> tuple[Manifest | None, Invite | None]:
    """The swarm this home ran last, or in which this process has moved, with the invite it came by;
    a new one of its own when there was none (not at a rendezvous). Raises Refused where the run of
    a move is gone from this home."""
    try:
        known = ours.remembered(ours.moved_run)
        if known is not None:
            known[0].verify(me=who(ours))
            return known
    except Refused as e:
        return _mended(ours, e)
    if ours.moved_run:
        raise Refused(
            f"run {ours.moved_run[:12]} was removed from {ours.home} while its daemon ran",
            "start another one with  tutti start , or join this one again:  tutti join INVITE",
        )
    if ours.node.role == "rendezvous":
        return None, None
    identity = Identity.load_or_create(ours.identity_path)
    manifest, _, _ = with_hashes(
        ours, Manifest.default_demo(), Places(ours.node.data, ours.node.tokenizer)
    )
    manifest = Manifest.parse(manifest.sign(identity))
    ours.remember(manifest)
    return manifest, None


def beside(file: Path) -> Path:
    """A name for a manifest made from ``file`` that nothing has yet: mine-2.toml, mine-3.toml, …"""
    named = (file.with_name(f"{file.stem}-{n}{file.suffix or '.toml'}") for n in itertools.count(2))
    return next(path for path in named if not path.exists())


def _mended(ours: NodeConfig, why: Refused) -> tuple[Manifest | None, Invite]:
    """Source for the swarm when either its manifest or its invite is damaged: the sound invite, or
    the sound manifest with the peers that were met last. Raises ``why`` where neither will do."""
    run_id = ours.moved_run or ours.current()
    with contextlib.suppress(Refused):
        if (invite := ours.kept_invite(run_id)) is not None:
            print(
                f"{why.what}\n  the swarm is asked for it again, by the invite it was joined by",
                file=sys.stderr,
            )
            return None, invite
    try:
        manifest = read_manifest(ours.manifest_path(run_id))
        manifest.verify()
    except (Refused, UsageFault):
        raise why from None
    met = ours.acquaintances(run_id)
    if not met or manifest.swarm.admission != "open":
        raise why from None
    print(f"{why.what}\n  the peers met last are asked instead", file=sys.stderr)
    return manifest, Invite(manifest.run_id, manifest.swarm.owner, met)


def _known(ours: NodeConfig, invite: Invite) -> Manifest | None:
    """The manifest that is remembered of the invite's run; None for none, or one that is damaged:
    the swarm has it.

    Raises Refused for one of another owner.
    """
    try:
        known = read_manifest(ours.manifest_path(invite.run_id))
        known.verify(invite.run_id)
    except (UsageFault, Refused):
        return None
    known.verify(expected_owner=invite.owner)
    return known


def _invite_of(ours: NodeConfig, manifest: Manifest) -> Invite | None:
    """The invite a run was joined by; a damaged one is said and left."""
    try:
        return ours.kept_invite(manifest.run_id)
    except Refused as e:
        print(advice(f"{e.what}\n  going on without it; {e.next_step}"), file=sys.stderr)
        return None


ANY_VOCAB = 1 << 22
"""Token ids of a model that has embeddings for the ids of any data."""


def named_content(data: str | None, tokenizer: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of a manifest for the data and tokenizer that the owner of a new run names on the
    command line, and fields of :class:`Places` for their paths here.

    A file goes into the manifest by its name: its path is nobody else's business.
    """
    fields = dict[str, Any]()
    places = dict[str, Any]()
    if data is not None:
        kind, _, rest = data.partition(":")
        fields["data.source"] = data
        fields["data.sha256"] = ""
        places["data"] = ""
        fields["data.rows"] = "text"
        fields["data.encoding"] = "utf-8"
        fields["data.windows"] = 0
        fields["data.sizes"] = ()
        if kind in ("http", "https"):
            from node.data.streamed.fetching import host_entry  # takes its time to load

            places["hosts"] = host_entry(data)
        if kind not in ("builtin", "hf", "http", "https", "synthetic"):
            named = data
            if kind == "file":
                named = rest
            path = Path(os.path.abspath(os.path.expanduser(named)))
            name = path.name
            if path.is_dir():
                check_not_saved(path)
                name = f"{name}/"
            fields["data.source"] = f"file:{name}"
            places["data"] = str(path)
    if tokenizer is not None:
        fields["data.tokenizer"] = tokenizer
        fields["data.tokenizer_sha256"] = ""
        places["tokenizer"] = ""
        fields["data.files"] = ()
        fields["data.end"] = -1
        if tokenizer != "bytes":
            path = Path(os.path.abspath(os.path.expanduser(tokenizer)))
            fields["data.tokenizer"] = path.name
            places["tokenizer"] = str(path)
    return fields, places


def run_name(model: Path | None, shape: str | None, data: str) -> str | None:
    """Name of a new run if its owner gave none: the name of the model's directory, of the published
    shape, or of the data. None for a run on built-in data."""
    kind, _, rest = data.partition(":")
    if model is not None:
        said = _model_name(Path(os.path.abspath(model)))
    elif shape:
        said = shape
    elif kind in ("http", "https"):
        said = PurePosixPath(urlsplit(data).path).parent.name
    elif kind == "hf":
        said = rest.partition("@")[0].partition(":")[0].rpartition("/")[2]
    elif data and kind not in ("builtin", "synthetic"):
        named = data
        if kind == "file":
            named = rest
        said = Path(named).name.partition(".")[0]
    else:
        return None
    kept = re.sub(r"[^A-Za-z0-9._-]+", "-", said).strip("._-")
    return kept[:LONGEST_NAME].strip("._-") or "run"


def _model_name(directory: Path) -> str:
    """The name of a model's directory; of a snapshot in the cache of the Hugging Face hub the name
    that the model has there."""
    parts = directory.parts
    if len(parts) > 2 and parts[-2] == "snapshots":
        return parts[-3].rpartition("--")[2]
    return directory.name


def model_fields(directory: Path) -> dict[str, Any]:
    """Fields of a manifest for the model in a Hugging Face directory. Raises what
    :func:`model_of` raises."""
    from node.model.pretrained import model_of  # torch takes its time to load

    fields = {f"model.{key}": value for key, value in model_of(directory)[0].items()}
    if name := hub_name(directory):
        fields["model.base"] = name
    return fields


def hub_name(directory: Path) -> str:
    """Name on the Hugging Face hub of the model in a directory of the hub's own cache, "" for other
    directories."""
    parts = Path(os.path.abspath(directory)).parts
    if len(parts) < 3 or parts[-2] != "snapshots" or not parts[-3].startswith("models--"):
        return ""
    return parts[-3].removeprefix("models--").replace("--", "/")


def with_weights(manifest: Manifest, directory: Path) -> Manifest:
    """The manifest, unsigned, with the digests of the weights in a Hugging Face directory. Raises
    UsageFault if the weights do not fit the manifest's model, or if its sequences are longer than
    the model was made for."""
    from node.model.pretrained import Weights, model_of

    m = manifest.model
    _, most = model_of(directory)
    weights = Weights(directory, manifest.optimizer.parameters)
    if m.seq_len > most:
        raise UsageFault(
            f"model.seq_len = {m.seq_len}, and the model in {directory} sees {most} positions",
            f"give  --set model.seq_len={most}  , or less",
        )
    weights.check(m)
    return amended(manifest, {"model.weights": list(weights.digests(m, manifest.pipeline.stages))})


def cut_to(
    ours: NodeConfig, manifest: Manifest, machines: str, ends_layers: Any = None
) -> tuple[Manifest, Cut]:
    """The manifest, unsigned, with the block stages that fit into ``machines`` (sizes of memory in
    words), and the cut. ``ends_layers``: layers that stay at the ends, if their number is given.
    The machines are other people's as well, so their settings are the defaults.

    Raises UsageFault for words that are no sizes, OutOfResources if no cut fits.
    """
    given = None
    if ends_layers is not None:
        given = int(ends_layers)
    cut = cut_for(NodeConfig(ours.home), manifest, sizes_of(machines), given)
    return amended(manifest, cut.settings), cut


def cut_document(cut: Cut) -> dict[str, Any]:
    """A cut for programs; sizes in bytes."""
    return {
        "stages": [place._asdict() for place in cut.places],
        "more": list(cut.more),
        "too_small": list(cut.small),
        "holds_all": cut.alone,
    }


def with_files(
    ours: NodeConfig, manifest: Manifest, base: Manifest, places: Places, model: Path | None
) -> tuple[Manifest, Mapping[str, bytes]]:
    """Return ``manifest``, unsigned, with the names and hashes of the files beside its tokenizer,
    and the content of each file by name.

    The files come from the tokenizer's directory. If that is ``model``, they include the files of a
    model. A manifest that names files keeps these, and their content is read as ``base`` names
    it. Blocks on the disk. Raises UsageFault as :meth:`TokenizerFiles.beside`.
    """
    from node.app.run_files import RunFiles
    from node.data.tokenizer_files import TokenizerFiles, named_files

    if manifest.data.files:
        here = RunFiles(ours, base, None)
        found = {name: here.read(sha256) for name, sha256 in named_files(manifest.data).items()}
        return manifest, {name: content for name, content in found.items() if content is not None}
    if manifest.data.tokenizer == "bytes" or manifest.data.tokenizer_sha256:
        return manifest, {}
    place = tokenizer_file(manifest.data.tokenizer, "", places)
    files = TokenizerFiles.beside(place, model)
    if model is not None and (beyond := files.beyond(manifest.model.vocab)):
        word, number = max(beyond.items(), key=lambda pair: pair[1])
        raise UsageFault(
            f"{word} is id {number} of the tokenizer, and the model in {model} has "
            f"{manifest.model.vocab} ids",
            "give the model a row for each id, and begin from the result:\n"
            f"{resize_command(model, number + 1)}",
        )
    if not files.files:
        return manifest, {}
    changes: dict[str, Any] = {"data.files": files.entries}
    if files.end_id is not None and manifest.data.end < 0:
        changes["data.end"] = files.end_id
    return amended(manifest, changes), files.files


def resize_command(model: Path, ids: int) -> str:
    """A command that writes the model in a directory with rows for ``ids`` ids beside it."""
    out = f"{os.path.normpath(model)}-{ids}"
    lines = (
        "import sys, transformers as t",
        "m = t.AutoModelForCausalLM.from_pretrained(sys.argv[1])",
        "m.resize_token_embeddings(int(sys.argv[3]))",
        "m.save_pretrained(sys.argv[2])",
        "t.AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])",
    )
    words = (sys.executable, "-c", "; ".join(lines), str(model), out, str(ids))
    return f"{shlex.join(words)}\ntutti swarm init --from {shlex.quote(out)} …"


def check_weights(manifest: Manifest, base: Manifest) -> None:
    """Raises UsageFault if the run begins from weights and its stages hold other layers than the
    stages of ``base``, which the digests of the weights belong to."""
    cut = manifest.model.ends_layers
    before = base.model.ends_layers
    if manifest.model.weights and cut != before:
        raise UsageFault(
            f"model.ends_layers = {cut}, and the weights are those of a run with {before}",
            "give the model again,  tutti swarm init --from DIR",
        )


def opened(
    ours: NodeConfig, manifest: Manifest, places: Places, files: Files | None = None
) -> tuple[Corpus | Stream, Tokenizer]:
    """The data of a run and its tokenizer, opened as an ends peer opens them. ``files``: reads the
    files beside the tokenizer; None for those that are kept here. Raises what :func:`open_source`
    raises."""
    from node.app.run_files import RunFiles
    from node.data.sources import open_source  # takes its time to load

    m = manifest.model
    here = RunFiles(ours, manifest, None)
    files = files or here.load
    places = here.located(places)
    disk = ours.node.data_disk
    return open_source(manifest.data, m.seq_len, m.vocab, ours.home, places, disk, files)


def files_beside(beside: Mapping[str, bytes]) -> Files | None:
    """Reader of the files beside a tokenizer, as :func:`with_files` gives them; None where there
    are none."""
    from node.data.tokenizer_files import TokenizerFiles

    if not beside:
        return None
    return partial(TokenizerFiles, beside)


def samples_shown(
    corpus: Corpus | Stream,
    manifest: Manifest,
    tokenizer: Tokenizer,
    positions: Sequence[int],
    *,
    bold: bool,
    short: bool,
) -> list[str]:
    """Lines that show samples of the run, the first is 0. Raises the exceptions of reading them."""
    from node.data.sample_text import SHORT, sample_lines
    from node.data.samples import samples_at

    found = samples_at(corpus, positions, manifest.data.seed)
    most = 0
    if short:
        most = SHORT
    lines = list[str]()
    for position, sample in zip(positions, found, strict=True):
        lines += sample_lines(sample, position + 1, tokenizer, bold=bold, most=most)
    return lines


def sample_document(
    corpus: Corpus | Stream, manifest: Manifest, tokenizer: Tokenizer, position: int
) -> dict[str, object]:
    """A sample of the run for machines; the first is 0."""
    from node.data.samples import samples_at

    (sample,) = samples_at(corpus, [position], manifest.data.seed)
    return {
        "sample": position + 1,
        "text": tokenizer.decode(sample.ids.tolist(), special=True),
        "ids": sample.ids.tolist(),
        "trained": [bool(counts) for counts in sample.trained],
        "ends": [bool(last) for last in sample.ends],
    }


def recognised(manifest: Manifest, places: Places, said: Collection[str]) -> Manifest:
    """The manifest, unsigned, with the properties found in its data: its encoding, and
    conversations. ``said``: settings that the user gave, which are kept. A manifest that has a hash
    of its data is returned unchanged. Raises as :func:`settings_found`."""
    from node.data.recognised import settings_found

    if manifest.data.sha256:
        return manifest
    found = settings_found(manifest.data, places)
    return amended(manifest, {key: value for key, value in found.items() if key not in said})


def with_hashes(
    ours: NodeConfig,
    manifest: Manifest,
    places: Places,
    *,
    files: Files | None = None,
    said: Collection[str] = (),
    anew: bool = False,
) -> tuple[Manifest, Corpus | Stream, Tokenizer]:
    """The manifest, unsigned, with the hashes of its data and tokenizer, both opened; hashes that
    it has already are compared. A few pieces of a new stream are read, and of any stream if
    ``anew``: if they have no text, they are read as conversations, unless the settings ``said`` are
    against it. ``files`` as for :func:`opened`.

    Raises as :func:`open_source`.
    """
    from node.data.sources import streams
    from node.data.streamed.stream import Stream

    if streams(manifest.data, places) and (anew or not manifest.data.windows):
        manifest = _measured(ours, manifest, places, files, said)
    corpus, tokenizer = opened(ours, manifest, places, files)
    hashes: dict[str, Any] = {"data.sha256": corpus.sha256}
    if isinstance(corpus, Stream):
        hashes["data.source"] = corpus.listing.source
        hashes |= _sizes(corpus)
    if manifest.data.tokenizer != "bytes":
        hashes["data.tokenizer_sha256"] = tokenizer.digest
    return amended(manifest, hashes), corpus, tokenizer


def _measured(
    ours: NodeConfig,
    manifest: Manifest,
    places: Places,
    files: Files | None,
    said: Collection[str],
) -> Manifest:
    """The manifest of a stream with the samples that its pieces have, and the hash of its list of
    shards; arguments as for :func:`with_hashes`."""
    from node.data.recognised import CHAT
    from node.data.streamed.stream import NoDocument

    try:
        return _counted(ours, manifest, places, files)
    except NoDocument:
        raise
    except UsageFault as e:
        chat = {key: value for key, value in CHAT.items() if key not in said}
        if "data.rows" not in chat or manifest.data.column != "text":
            raise
        try:
            return _counted(ours, amended(manifest, chat), places, files)
        except UsageFault:
            raise e from None


def _counted(ours: NodeConfig, manifest: Manifest, places: Places, files: Files | None) -> Manifest:
    """As :func:`_measured`, with rows as the manifest has them."""
    looked_at = amended(manifest, {"data.windows": 1})
    stream = cast("Stream", opened(ours, looked_at, places, files)[0])
    try:
        found = {"data.windows": stream.measured(), "data.sha256": stream.sha256}
        return amended(manifest, found | _sizes(stream))
    finally:
        asyncio.run(stream.close())


def _sizes(stream: Stream) -> dict[str, Any]:
    """Field of a manifest for the sizes of many shards of a web server, if they are known."""
    from node.data.streamed.shards import MOST_ASKED

    if len(stream.listing.sizes) <= MOST_ASKED:
        return {}
    return {"data.sizes": stream.listing.sizes}


def measured_otherwise(manifest: Manifest, base: Manifest) -> bool:
    """Return True if the number of samples in ``base`` is out of date for ``manifest``, a changed
    copy of it."""

    def measure(m: Manifest) -> tuple[object, ...]:
        d = m.data
        tokenizer = (d.tokenizer, d.tokenizer_sha256, d.files, d.end)
        return m.model.seq_len, d.rows, d.column, d.encoding, *tokenizer

    return bool(base.data.windows) and measure(manifest) != measure(base)


def unmeasured(manifest: Manifest) -> Manifest:
    """The manifest of a stream, unsigned, for a later ``init`` that counts its samples."""
    changes: dict[str, Any] = {"data.windows": 0}
    if manifest.data.source.startswith("hf:"):
        # A hash without a number of samples marks a run of an older version, which reads the source
        # whole. The source names the commit.
        changes["data.sha256"] = ""
    return amended(manifest, changes)


def on_the_lan() -> list[Found]:
    """Peers of open runs that announce themselves on this LAN. Raises NetworkFault when no
    interface can take part."""
    from node.reach.nearby import look as listen

    return asyncio.run(listen(LAN_S))


def lan_lines(found: Sequence[Found]) -> list[str]:
    """Lines for people: one for each swarm."""
    if not found:
        return ["no swarm announces itself on this LAN"]
    return [
        f"{'SWARM':16} {'RUN':12} {'PEERS':>5}  OWNER",
        *(
            f"{clean(peers[0].swarm, 16):16} {run_id[:12]} {len(peers):5}  "
            f"{short(PeerId(peers[0].owner))}"
            for run_id, peers in _by_run(found).items()
        ),
        "anybody on this LAN can announce a swarm: before you join, compare the run with the "
        "person who runs it",
    ]


def chosen(found: Sequence[Found], named: str | None) -> str:
    """The invite to the swarm on the LAN that is meant: the one named by its name or the beginning
    of its run, or the only one.

    Raises UsageFault where that is none or several.
    """
    runs = {
        r: peers
        for r, peers in _by_run(found).items()
        if named is None or r.startswith(named) or peers[0].swarm == named
    }
    if len(runs) != 1:
        what = f"{len(runs)} swarms on this LAN"
        if named:
            what += f" are called {named!r}"
        if runs:
            raise UsageFault(what, "tutti join --lan RUN")
        raise NetworkFault(
            what, "ask for an invite; is the other machine on this LAN, and its run an open one?"
        )
    run_id, peers = next(iter(runs.items()))
    addresses = fitting_addresses(a for p in peers for a in p.addresses)
    return Invite(RunId(run_id), PeerId(peers[0].owner), addresses).encode()


def _by_run(found: Sequence[Found]) -> dict[str, list[Found]]:
    runs: dict[str, list[Found]] = {}
    for one in sorted(found, key=lambda f: (f.swarm, f.run_id, f.peer)):
        if one.addresses:
            runs.setdefault(one.run_id, []).append(one)
    return runs


def look(ours: NodeConfig, *places: str, joins: bool = False) -> tuple[Manifest, Invite]:
    """The verified manifest behind an invite or addresses, asked from the swarm unless remembered;
    and the invite. If the run's owner has paused or ended the run, and the peer that answers knows
    that, stderr has a line about it. ``joins``: this machine is to take part, so that an end is
    raised as RunEnded."""
    if places[0].startswith("/"):
        answer = _await_answer(places, Ask(manifest=AskManifest()), _asker().seed())
        manifest = Manifest.parse(answer.manifest.toml)
        manifest.verify()
        print(
            f"only {places[0]} says that this is run {manifest.run_id[:12]}: an address does not "
            "prove which run you join, an invite does",
            file=sys.stderr,
        )
        _heed(manifest, answer.manifest.order, joins)
        return manifest, Invite(manifest.run_id, manifest.swarm.owner, within_limits(places))
    invite = Invite.decode(places[0])
    manifest = _known(ours, invite)
    if manifest is None:
        token, seed = introduced(ours, invite)
        answer = _await_answer(
            invite.addresses,
            Ask(manifest=AskManifest(run_id=invite.run_id, admission=token)),
            seed,
        )
        manifest = Manifest.parse(answer.manifest.toml)
        manifest.verify(invite.run_id, invite.owner)
        _heed(manifest, answer.manifest.order, joins)
    manifest.verify(invite.run_id, invite.owner)
    return manifest, invite


def _heed(manifest: Manifest, text: str, joins: bool) -> None:
    """Print the orders of the run's owner, if a peer has told any. Raises RunEnded for an end that
    is in force if this machine ``joins``."""
    if not text:
        return
    try:
        orders = read_all(manifest.run_id, manifest.swarm.owner, text)
    except Refused:
        return  # the peer made it up
    wall = time.time()
    for order in orders:
        begun = order.begins <= wall
        if order.verb is Verb.END and begun and joins:
            raise RunEnded(order)
        if order.verb is Verb.RESUME:
            continue
        waits = ""
        if order.verb is Verb.PAUSE:
            waits = "; a peer that joins waits until the owner lets it go on"
        print(f"the run {order.sentence(wall)}{waits}", file=sys.stderr)


def _await_answer(places: tuple[str, ...], question: Ask, seed: bytes) -> Answer:
    """Ask as :func:`observe` does, and again as long as somebody is there. The reason for waiting
    is printed on stderr. Raises Unreachable when no peer is there, or none answers anybody."""
    # A program that has replaced another one blocks it until it can end in order. A wait just ends.
    interrupts.unblock(signal.SIGTERM)
    began = time.monotonic()
    began_at = time.strftime("%H:%M:%S")
    retries = Retries(began)
    within_s = ATTEMPT_S
    waited = False
    while True:
        try:
            answer = observe(places, question, seed, within_s)
        except (PeerBusy, NobodyAnswers) as e:
            decided = retries.handle(e.outcome, time.monotonic(), random.random())
            if isinstance(decided, GiveUp):
                if decided.why and isinstance(e, NobodyAnswers):
                    raise NobodyAnswers(e.findings, decided.why) from e
                raise
            if decided.says:
                waited = True
                print(
                    f"waiting since {began_at}: {decided.says}   (Ctrl-C ends it)",
                    file=sys.stderr,
                    flush=True,
                )
            # py-libp2p leaves connections that timed out to the garbage collector.
            gc.collect()
            time.sleep(decided.after_s)
            within_s = decided.within_s
            continue
        if waited:
            print(f"answered after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return answer


def check(ours: NodeConfig, invite: Invite, seconds: float = LIMIT_S) -> None:
    """Ask a peer of ``invite`` for faults that would show right after the start, in at most
    ``seconds``.

    Raises Refused when the clock of this machine differs from theirs by more than 15 s, when
    somebody else runs with the key of this home, or when every peer that answers speaks other
    protocol versions than this one. Nothing is raised when nobody answers.
    """
    token, seed = introduced(ours, invite)
    found = examine(
        invite.addresses, me=_resting(ours), admission=token, seed=seed, first=True, seconds=seconds
    )
    met = any(f.ok or f.code is ExitCode.PROTOCOL for f in found.findings)
    if met and not found.verdict.ok:
        raise fault_of(found.verdict, found.findings)


def examined(ours: NodeConfig, places: Sequence[str]) -> Checkup:
    """Checkup of the connection to the swarm at ``places``, which are invites or addresses; without
    any, at the remembered invite.

    Raises UsageFault for a place that is neither an invite nor an address.
    """
    known = None
    if not places:
        known = ours.remembered()
    for text in places:
        if not (is_invite(text) or text.startswith("/")):
            raise UsageFault(
                f"neither an invite nor an address: {text[:80]!r}",
                "give what  tutti swarm invite  printed",
            )
    invites = [Invite.decode(text) for text in places if is_invite(text)]
    if known and known[1]:
        invites.append(known[1])
    token, seed = introduced(ours, invites[0]) if invites else (b"", None)
    addresses = [
        *(a for invite in invites for a in invite.addresses),
        *(text for text in places if text.startswith("/")),
    ]
    return examine(addresses, me=_resting(ours), admission=token, seed=seed)


def who(ours: NodeConfig) -> PeerId | None:
    """The PeerId of this home, if it has a key."""
    if not ours.identity_path.exists():
        return None
    return Identity.load(ours.identity_path).peer_id


def _resting(ours: NodeConfig) -> PeerId | None:
    """The PeerId of this home if it has one and no daemon runs in it."""
    if listener(ours.control_socket) is not None:
        return None
    return who(ours)


def introduced(ours: NodeConfig, invite: Invite) -> tuple[bytes, bytes]:
    """The token to show with a question about the run of ``invite``, b"" in an open run, and the
    seed of the key to ask with."""
    if not invite.admission:
        return b"", _asker().seed()
    # A grant is good for anybody, so the key of this node may stay out of it; a token is good for
    # its peer only.
    if is_grant(invite.admission):
        asker = _asker()
    else:
        asker = Identity.load_or_create(ours.identity_path)
    return shown(invite.admission, asker, invite.run_id), asker.seed()


@cache
def _asker() -> Identity:
    """A passing identity for all questions of this process: a busy peer keeps the place of a key
    in its queue, and the key of this node stays out of it."""
    return Identity.ephemeral()


def ask_peers(ours: NodeConfig, place: str) -> PeersAnswer:
    """Peers that the node at ``place`` sees. A private run answers only with an invite."""
    if place.startswith("/"):
        return observe((place,), Ask(peers=AskPeers())).peers
    invite = Invite.decode(place)
    token, seed = introduced(ours, invite)
    return observe(invite.addresses, Ask(peers=AskPeers(admission=token)), seed).peers


def observe(
    places: tuple[str, ...],
    question: Ask,
    seed: bytes | None = None,
    within_s: float = ATTEMPT_S,
) -> Answer:
    """Ask a node from outside the swarm once, as the key of ``seed`` or a new one. Raises PeerBusy
    when it answers others first, Refused for another refusal, Unreachable when nobody answers
    within ``within_s``, WireError for another kind of answer, ProtocolMismatch for the manifest of
    a peer that shares no protocol version with this one."""
    # Loaded before time is taken: that is slow on a busy machine.
    from node.control.observer import ask_first, protocols_of

    answer = ask_first(places, question, within_s, seed)
    theirs = protocols_of(answer)
    if question.HasField("manifest") and not PROTOCOLS.common(theirs):
        raise ProtocolMismatch(
            f"{places[0]} speaks {theirs}, this tutti {PROTOCOLS}", PROTOCOLS.advice(theirs)
        )
    said = answer.WhichOneof("answer")
    if again_s := busy_s(answer):
        raise PeerBusy(places[0], Busy(answer.refusal.place, again_s))
    if said == "refusal":
        step = "ask with an invite of that run, or try another peer"
        by_address = question.HasField("manifest") and not question.manifest.run_id
        if by_address and answer.refusal.code == ExitCode.PROTOCOL:
            step = (
                "name the run by its file,  tutti start FILE --join ADDRESS , or by an invite, "
                "which  tutti swarm invite  prints at a peer of the run"
            )
        raise Refused(f"{places[0]} refused: {answer.refusal.reason[:300]}", step)
    if said != question.WhichOneof("question"):
        raise WireError(f"{places[0]} answered something else than it was asked")
    return answer


def invite_text(
    manifest: Manifest,
    addresses: tuple[str, ...],
    identity: Identity,
    peer: PeerId | None = None,
    days: float = 30.0,
) -> str:
    """An invite; with an admission token when the swarm is private, or only those it admits may
    lead. Refused for a private swarm of somebody else."""
    token = b""
    mine = identity.peer_id == manifest.swarm.owner
    if manifest.swarm.tokens and (mine or manifest.swarm.admission == "invite"):
        if not mine:
            raise Refused(
                "this swarm is private and you are not its owner", "ask the owner for an invite"
            )
        token = admission_token(identity, manifest.run_id, peer, time.time() + days * 86400)
    return Invite(manifest.run_id, manifest.swarm.owner, addresses, token).encode()


def unproven_files(manifest: Manifest) -> list[tuple[str, str]]:
    """The files that a manifest names without a hash, each as the setting that says where it is
    ("data", "tokenizer") and the manifest's name of it."""
    d = manifest.data
    found = list[tuple[str, str]]()
    if d.source.startswith("file:") and not d.sha256:
        found.append(("data", d.source.removeprefix("file:")))
    if d.tokenizer != "bytes" and not d.tokenizer_sha256:
        found.append(("tokenizer", d.tokenizer))
    return found


def check_demo(ours: NodeConfig, manifest: Manifest) -> None:
    """Raises UsageFault for a manifest of somebody else that names files without a hash: the demo
    signs it again, as if its paths were this user's own words."""
    if not ours.places_of(manifest).own:
        for setting, name in unproven_files(manifest):
            raise UsageFault(
                f"the manifest names the {setting} {name} and no hash of it, so it is not opened: "
                "it could be any file of yours",
                f"make a manifest of your own:  tutti swarm init --{setting} FILE",
            )


def check_reading(ours: NodeConfig, manifest: Manifest) -> None:
    """Raises UsageFault if a peer that asks no person would read a file of this user which no hash
    proves and which was set for all runs, not for this one."""
    places = ours.places_of(manifest)
    if ours.node.role in ("stage", "rendezvous") or places.own:
        return
    for setting, name in unproven_files(manifest):
        place = str(getattr(places, setting))
        if named_for_one_run(place) and setting in places.for_all_runs:
            source = ours.sources[setting]
            raise UsageFault(
                f"this run asks for the {setting} {name} and names no hash of it, and  {setting} = "
                f"{place}  is set ({source}):  --yes  does not agree to reading a file of yours",
                f"name it for this run:  --{setting} {shlex.quote(place)} ; or repeat without  "
                "--yes ; or take a block stage:  --role stage",
            )


def reading_lines(ours: NodeConfig, manifest: Manifest) -> list[str]:
    """Lines on the files of this machine that a peer at the ends reads, and on the parts of them
    that it sends to others."""
    d = manifest.data
    places = ours.places_of(manifest)
    unproven = dict(unproven_files(manifest))
    kind, _, name = d.source.partition(":")
    named = list[tuple[str, str, str]]()
    lines = list[str]()
    if kind == "hf" and (saved := directory(name.partition(":")[0], places)) is not None:
        lines.append(f"{saved}, the data set that you named")
    if kind == "file":
        named.append(("data", name, places.data))
    if d.tokenizer != "bytes":
        named.append(("tokenizer", d.tokenizer, places.tokenizer))
    for setting, name, place in named:
        if named_for_one_run(place):
            lines.append(f"{place}, which you set as the {setting}")
        elif setting not in unproven:
            where = ""
            if place:
                where = f" in {place}"
            lines.append(f"{name}{where}, if a file there has the hash of the run's {setting}")
        elif places.own:
            lines.append(f"{name}, the {setting} in your own manifest")
        else:
            lines.append(
                f"no {setting}: the manifest names no hash of {name}; a peer at the ends needs  "
                f"--{setting} FILE  from you"
            )
    if not lines:
        return ["no file of yours"]
    return [
        *lines,
        "text that is read here leaves as activations, from which peers of stage 1 can tell it; "
        "hosts of block stages read none",
    ]


def sheet(
    ours: NodeConfig, manifest: Manifest, *, signed: bool, verbose: bool = False
) -> list[str]:
    """Lines on the consequences of joining with these settings. ``verbose``: with the parts of the
    memory."""
    m = manifest.model
    t = manifest.training
    p = manifest.pipeline
    wire = p.wire
    if p.wire_least:
        wire = f"{p.wire} to {p.wire_least}"
    return consent_lines(
        name=manifest.swarm.name,
        run_id=manifest.run_id,
        owner=manifest.swarm.owner,
        signed=signed,
        admission=manifest.swarm.admission,
        model=manifest.model_said(),
        parameters=manifest.parameter_count(),
        data=f"{manifest.data.source}, {_hash(manifest.data.sha256)}, tokenizer "
        f"{manifest.data.tokenizer}",
        cut=f"ends ({layers_said(m, p.stages, ENDS)}) and {p.stages} block stages, activations "
        f"as {wire}, gradients as {manifest.averaging.wire}",
        ends_layers=m.ends_layers,
        work=f"{t.epochs:,} epochs of {t.target_batch * m.seq_len:,} tokens, "
        f"{manifest.optimizer.name}",
        reads=reading_lines(ours, manifest),
        fetched_from=_host(manifest.data.source),
        memory=planned_memory(ours, manifest, verbose),
        traffic=traffic_lines(manifest),
        width=shutil.get_terminal_size().columns,
    )


def _host(source: str) -> str:
    """Server that the text of a run is fetched from, "" if each peer has the text."""
    kind = source.partition(":")[0]
    if kind == "hf":
        return "the Hugging Face hub"
    try:
        if kind not in ("http", "https"):
            return ""
        return urlsplit(source).netloc
    except ValueError:
        return source


def content_line(manifest: Manifest, corpus: Corpus | Stream | None) -> str:
    """The data that a manifest names, beside the data found here. ``corpus``: None if it was not
    opened."""
    d = manifest.data
    if corpus is None:
        return f"{d.source}, {_hash(d.sha256)}; not opened"
    said = f"{d.source}, {corpus.said}, sha256 {corpus.sha256[:12]}"
    if d.sha256:
        return said
    return (
        f"{said}; the manifest has no hash of it, so peers cannot tell whether they train on "
        "the same"
    )


def content_document(manifest: Manifest, corpus: Corpus | Stream | None) -> dict[str, object]:
    """The same for machines: hashes as the manifest has them, "" for none; ``tokens`` None where
    nothing was opened."""
    d = manifest.data
    tokens = corpus.tokens if corpus else None
    return {
        "data": {
            "source": d.source,
            "sha256": d.sha256,
            "tokenizer_sha256": d.tokenizer_sha256,
            "tokens": tokens,
        }
    }


def _hash(sha256: str) -> str:
    if sha256:
        return f"sha256 {sha256[:12]}"
    return "no hash"


def traffic_lines(manifest: Manifest) -> list[str]:
    """Lines on the traffic of an epoch and of an hour over a peer's line, by its role."""
    hosts = manifest.training.min_replicas
    alone = forecast(manifest, 1)
    more = forecast(manifest, 1, {1: hosts + 1})
    ends = forecast(manifest, ENDS)

    def each(f: Forecast) -> str:
        averaging = ""
        if f.averaging:
            averaging = f", {human(f.averaging)} of averaging"
        return f"{human(f.activations)} of activations and their gradients{averaging}"

    minute = max(ends.over(1, 60, leads=True)[0], alone.over(1, 60)[0]) / 60
    return [
        "up, and as much down, for each epoch:",
        f"{several(hosts, 'peer')} in a block stage, each: {each(alone)}",
        f"{several(hosts + 1, 'peer')} in a block stage, each: {each(more)}",
        f"{several(hosts, 'peer')} at the ends, each: {each(ends)}; the leader sends "
        f"{human(ends.plans)} of plans as well",
        f"an epoch a minute is up to {bits(minute)} each way, {human(3600 * minute)} an hour",
        f"without epochs {bits(alone.idle)} each way; a block stage is fetched once, "
        f"{human(alone.state)}",
        "--max-up RATE and --max-down RATE cap all of it",
    ]
