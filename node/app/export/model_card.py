"""Model card of an export: README.md as the Hugging Face hub reads it.

Enters: the manifest, the exported version as the plan reports it, the directory of the model that
the run began from, where it is on this disk. Leaves: Markdown below a head of YAML. Never: a
license that nobody stated.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.core.journey import UNKNOWN, Losses, Version
from node.core.version import VERSION
from node.manifest import Manifest
from node.model.export import CARD, config_of
from node.model.settings import DIGEST

MOST_CARD = 1 << 20
"""Bytes of another model's card that are read."""
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_CACHED = re.compile(r"models--(.+)")
_LICENSE = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class StartingModel:
    """The model that a run began from, as its directory describes it."""

    repository: str = ""
    """Name on the Hugging Face hub, "" for unknown."""
    license: tuple[tuple[str, str], ...] = ()
    """Fields of the card that state the license; empty where none does."""


@dataclass(frozen=True)
class Result:
    """Figures of the exported version, as the plan that starts from it reports them."""

    version: Version
    tokens: int
    """Tokens counted in the whole history of the version."""
    loss: float
    """Training loss of the epoch before, in nats per token; 0 for unknown."""
    loss_val: float
    """Held-out loss measured last, in nats per token; 0 for unknown."""
    before: Losses = UNKNOWN
    """Losses before the first step, where the run keeps them."""


def source_in(directory: str) -> StartingModel:
    """Read the description of a model in its directory. Blocks on the disk. Fields that cannot be
    read are unknown; "" stands for no directory."""
    if not directory:
        return StartingModel()
    # The hub's own cache: models--ORG--NAME/snapshots/COMMIT.
    snapshot = Path(directory).absolute()
    cached = _CACHED.fullmatch(snapshot.parent.parent.name)
    name = ""
    if cached and snapshot.parent.name == "snapshots":
        name = cached[1].replace("--", "/")
    if not _REPOSITORY.fullmatch(name):
        name = ""
    head = _head(snapshot / CARD)
    stated = ((key, head.get(key)) for key in _LICENSE)
    return StartingModel(
        name,
        tuple((key, value) for key, value in stated if isinstance(value, str) and value),
    )


def _head(card: Path) -> dict[str, Any]:
    """The YAML head of a model card; empty where there is none."""
    import yaml  # only an export needs it

    try:
        with card.open("rb") as file:
            text = file.read(MOST_CARD).decode()
        found = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
        if not found:
            return {}
        head = yaml.safe_load(found[1])
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    if not isinstance(head, dict):
        return {}
    return head


def model_card(
    manifest: Manifest,
    result: Result,
    source: StartingModel,
    *,
    tokenizer: bool,
    adapters: bool | None = None,
) -> str:
    """The card of an export of ``manifest``'s run. ``tokenizer``: the export has one;
    ``adapters``: it holds adapters, by default if the run trains adapters."""
    import yaml

    if adapters is None:
        adapters = manifest.model.adapter > 0
    fields = _fields(manifest, source, adapters)
    head = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    if not source.license:
        head += "# license: name the one you publish this model under\n"
    rows = "".join(f"| {name} | {value} |\n" for name, value in _rows(manifest, result, source))
    return (
        f"---\n{head}---\n\n# {manifest.swarm.name}\n\n{_what(manifest, adapters)}\n\n"
        f"| | |\n|---|---|\n{rows}\n## Load it\n\n{_loading(source, tokenizer, adapters)}"
    )


def _fields(manifest: Manifest, source: StartingModel, adapter: bool) -> dict[str, Any]:
    relation = "finetune"
    library = "transformers"
    tags = ["tutti", "decentralized-training"]
    if adapter:
        relation = "adapter"
        library = "peft"
        tags.append("lora")
    fields: dict[str, Any] = {}
    if source.repository:
        fields["base_model"] = source.repository
        fields["base_model_relation"] = relation
    fields |= dict(source.license)
    fields["library_name"] = library
    fields["pipeline_tag"] = "text-generation"
    if data := _dataset(manifest.data.source):
        fields["datasets"] = [data]
    fields["tags"] = tags
    return fields


def _dataset(source: str) -> str:
    """Name of a data set on the hub, "" for other sources."""
    if not source.startswith("hf:"):
        return ""
    name = source.removeprefix("hf:").partition(":")[0].partition("@")[0]
    if not _REPOSITORY.fullmatch(name):
        return ""
    return name


def _what(manifest: Manifest, adapters: bool) -> str:
    m = manifest.model
    kind = str(config_of(m)["model_type"]).capitalize()
    shape = (
        f"{kind} decoder of {m.layers} layers, width {m.d_model}, "
        f"{manifest.parameter_count():,} parameters"
    )
    by = "trained by a swarm of peers with tutti"
    if adapters:
        return f"LoRA adapters of rank {m.adapter} beside a {shape}, {by}."
    if m.adapter:
        return f"A {shape}, with LoRA adapters of rank {m.adapter} merged in, {by}."
    return f"A {shape}, {by}."


def _rows(manifest: Manifest, result: Result, source: StartingModel) -> list[tuple[str, str]]:
    m = manifest.model
    d = manifest.data
    version = f"epoch {result.version.epoch:,} of {manifest.training.epochs:,}"
    if result.version.lineage:
        version += f", lineage {_code(result.version.lineage)}"
    data = _code(d.source)
    if d.sha256:
        data += f", sha256 {_code(d.sha256)}"
    rows = [
        ("Run", _code(manifest.run_id)),
        ("Owner", _code(manifest.swarm.owner)),
        ("Version", version),
        ("Tokens", f"{result.tokens:,}"),
        ("Training loss", _loss(result.loss, result.before.training)),
        ("Held-out loss", _loss(result.loss_val, result.before.held_out)),
        ("Data", data),
        ("Sequence", f"{m.seq_len:,} tokens"),
        ("Optimizer", _code(manifest.optimizer.name)),
    ]
    if m.weights:
        name = ""
        if source.repository:
            name = f"{_code(source.repository)}, "
        digests = ", ".join(_code(w.removeprefix(DIGEST)) for w in m.weights)
        rows.append(("Began from", f"{name}weights with the BLAKE3 digests {digests}"))
    if d.tokenizer_sha256:
        rows.append(("Tokenizer", f"sha256 {_code(d.tokenizer_sha256)}"))
    rows.append(("Written by", f"tutti {VERSION}"))
    return rows


def _loss(loss: float, before: float) -> str:
    """A loss, beside the loss before the first step if that is known (above 0)."""
    said = "not measured"
    if loss > 0:
        said = _nats(loss)
    if before > 0:
        said += f"; before the first step {_nats(before)}"
    return said


def _nats(loss: float) -> str:
    said = f"{loss:.4f} nats per token"
    if loss < 20:
        said += f", perplexity {math.exp(loss):,.2f}"
    return said


def _loading(source: StartingModel, tokenizer: bool, adapters: bool) -> str:
    if adapters:
        base = source.repository or "DIRECTORY OF THE MODEL THAT THE RUN BEGAN FROM"
        lines = [
            "import peft, transformers",
            "",
            f'base = transformers.AutoModelForCausalLM.from_pretrained("{base}")',
            'model = peft.PeftModel.from_pretrained(base, "PATH OF THIS DIRECTORY")',
        ]
    else:
        lines = [
            "import transformers",
            "",
            'path = "PATH OF THIS DIRECTORY"',
            "model = transformers.AutoModelForCausalLM.from_pretrained(path)",
        ]
        if tokenizer:
            lines.append("tokenizer = transformers.AutoTokenizer.from_pretrained(path)")
    return "\n".join(["```python", *lines, "```", ""])


def _code(text: str) -> str:
    """Text of the manifest as a span of code in a table; nothing in it is read as Markdown."""
    plain = "".join(c if c.isprintable() and c != "`" else " " for c in text)
    return f"`{plain}`".replace("|", "\\|")
