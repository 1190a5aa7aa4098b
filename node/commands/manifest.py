"""A new manifest: ``swarm init``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from node.commands.line import options, shared
from node.commands.line.usage import FileArgument, argument, command, flag, option, repeatable
from node.core.errors import ExitCode, UsageFault, writing

if TYPE_CHECKING:
    from node.app.capacity import Cut
    from node.data.sources import Corpus
    from node.data.streamed.stream import Stream
    from node.manifest import Manifest

FIELDS = {
    "stages": "pipeline.stages",
    "ends_layers": "model.ends_layers",
    "epochs": "training.epochs",
}
"""Fields of the manifest that have an option of their own, by its parameter."""


@command()
@argument(
    "out",
    metavar="[FILE]",
    default=None,
    type=options.FILE,
    help="File to write. Default: swarm.toml; with --from a new name beside that one.",
)
@option("--name", help="Name of the swarm.")
@option("--stages", type=int, help="Block stages.")
@option(
    "--machines",
    metavar="SIZE,SIZE",
    help="Memory of the machines that will train, such as 8GB,8GB,24GB: the block stages follow "
    "from it.",
)
@option(
    "--ends-layers",
    type=int,
    metavar="N",
    help="Keep the first N layers at the ends: what a peer sends of its text is N layers deep.",
)
@option("--epochs", type=int, help="Epochs of the run.")
@option("--shape", metavar="NAME", help="The shape of a published model, e.g. qwen3-0.6b.")
@option(
    "--data",
    type=FileArgument(),
    help="A file, http(s)://…, hf:NAME, synthetic:SEED or builtin:pydoc.",
)
@option("--tokenizer", type=FileArgument(), help='A tokenizer.json, or "bytes".')
@flag("--private", help="Admit only bearers of an invite signed by you.")
@option(
    "--from",
    "source",
    type=options.FILE,
    help="Start from this manifest, which becomes yours, a run of its own from epoch 0; or from "
    "the model in a Hugging Face directory.",
)
@option(
    "--continue",
    "go_on",
    type=options.FILE,
    metavar="FILE",
    help="Like --from, but from the last epoch of that run, with more --epochs.",
)
@options.sets("Any field, e.g. model.layers=12.")
@repeatable("--address", metavar="MULTIADDR", help="A rendezvous for the invite.")
@flag("--force", help="Replace the file.")
@options.no_open
@options.as_json
def init(
    *,
    out: Path | None,
    source: Path | None,
    go_on: Path | None,
    data: str | None,
    tokenizer: str | None,
    machines: str | None,
    settings: dict[str, Any],
    as_json: bool,
    **more: Any,
) -> int:
    """Open the data, write a manifest with its hash, signed with this node's key, and print how to
    start and join it. Every call makes another run."""
    import secrets

    from node import fine_tuning
    from node.app import joining
    from node.config import write_atomically
    from node.identity.keys import Identity
    from node.manifest import Manifest, amended, read_manifest, typed
    from node.model.shapes import shape_named

    out = _target(out, source, force=more["force"])
    name = more["name"]
    shape = more["shape"]
    changes = dict[str, Any]()
    if shape:
        changes = {f"model.{k}": v for k, v in shape_named(shape).items()}
    changes |= settings
    of_model = dict[str, Any]()
    model: Path | None = None
    here = dict[str, Any]()
    if source is not None and os.path.isdir(source):
        if shape:
            raise UsageFault("--from DIR and --shape", "give one: the directory says the shape")
        model = source
        source = None
        of_model = joining.model_fields(model)
        tokenizer = tokenizer or str(model / "tokenizer.json")
        here = {"weights": os.path.abspath(model)}
    if name is None and source is None and go_on is None:
        content_of = str(data or changes.get("data.source", ""))
        name = changes.pop("swarm.name", joining.run_name(model, shape, content_of))
    if name is not None:
        changes["swarm.name"] = name
    changes |= {field: more[word] for word, field in FIELDS.items() if more[word] is not None}
    if more["private"]:
        changes["swarm.admission"] = "invite"
    data = data or changes.pop("data.source", None)
    tokenizer = tokenizer or changes.pop("data.tokenizer", None)
    content, files = joining.named_content(data, tokenizer)
    here |= files
    ours = shared.config({})
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
    anew = "data.windows" not in changes and joining.measured_otherwise(made, base)
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
    if more["no_open"] and anew:
        made = joining.unmeasured(made)
    if not more["no_open"]:
        made, beside = joining.with_files(ours, made, base, places, model)
        made = joining.recognised(made, places, changes)
        made, corpus, words = joining.with_hashes(
            ours, made, places, files=joining.files_beside(beside), said=changes, anew=anew
        )
        shown = []
        if not as_json:
            shown = joining.samples_shown(
                corpus, made, words, [0, 1], bold=shared.bold(), short=True
            )
    raw = made.sign(identity)
    manifest = Manifest.parse(raw)
    invite = ""
    if more["address"]:
        invite = joining.invite_text(manifest, tuple(more["address"]), identity)
    with writing(out, "choose another place"):
        write_atomically(out, raw)
    ours.keep_places(manifest.run_id, places)
    ours.keep_files(manifest.run_id, beside)
    made_of = _Made(out, manifest, corpus, cut, invite)
    if as_json:
        shared.print_json(made_of.document())
        return ExitCode.OK
    rates = model is not None and file is None
    for line in made_of.lines(identity.name, shown, rates=rates):
        print(shared.advice(line))
    return ExitCode.OK


def _target(out: Path | None, source: Path | None, *, force: bool) -> Path:
    """The file to write. Raises UsageFault if it exists, without ``force``."""
    from node.app import joining

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
    return out


@dataclass(frozen=True)
class _Made:
    """A manifest that was written.

    ``corpus``: its data, None if it was not opened. ``cut``: the stages that follow from the
    machines named. ``invite``: empty if no address was given.
    """

    out: Path
    manifest: Manifest
    corpus: Corpus | Stream | None
    cut: Cut | None
    invite: str

    def document(self) -> dict[str, Any]:
        """The document of ``--json``."""
        from node.app import joining

        document: dict[str, Any] = {
            "file": str(self.out),
            "run_id": self.manifest.run_id,
            "owner": self.manifest.swarm.owner,
            "invite": self.invite or None,
            "notes": list(self.notes()),
        }
        if self.cut is not None:
            document["machines"] = joining.cut_document(self.cut)
        return document | joining.content_document(self.manifest, self.corpus)

    def notes(self) -> Iterator[str]:
        """Sentences about settings that are allowed and seldom meant."""
        sequences = self.manifest.training.target_batch
        at_once = self.manifest.pipeline.micro_batch
        if sequences < 2 * at_once:
            yield (
                f"an epoch is one micro-batch ({sequences} sequences, {at_once} at a time), so it "
                "takes one path, and further peers of a stage get no work; more:  --set "
                f"training.target_batch={8 * at_once}"
            )

    def lines(self, signer: str, samples: Sequence[str], *, rates: bool) -> Iterator[str]:
        """The report on stdout. ``rates``: with how the rates were chosen."""
        from node import fine_tuning
        from node.app import joining
        from node.app.capacity import cut_lines

        yield f"wrote    {self.out}   run {self.manifest.run_id[:12]}, signed by {signer}"
        yield f"model    {self.manifest.model_said()}"
        if self.cut:
            yield from cut_lines(self.cut)
        if rates:
            yield from fine_tuning.explained(self.manifest)
        else:
            t = self.manifest.training
            tokens = t.target_batch * self.manifest.model.seq_len
            yield f"epoch    {tokens:,} tokens; the run has {t.epochs:,} epochs"
        yield f"data     {joining.content_line(self.manifest, self.corpus)}"
        yield from samples
        for line in self.notes():
            yield f"note     {line}"
        yield f"start    tutti start {quote(str(self.out))}"
        if self.invite:
            yield f"join     tutti join {self.invite}"
        else:
            yield "join     when it runs:  tutti swarm invite   prints the line for others"
