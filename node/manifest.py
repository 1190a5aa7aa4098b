"""The manifest: what every peer of a run agreed on. The hash of its immutable part names the run.

A manifest arrives from a file or from a stranger, so every field is checked for its type, its range
and against the others before anybody uses it; the owner's signature proves who wrote it.

Its format says what is hashed. Format 1 hashes every value, format 2 the format's number and the
values that differ from their defaults, so a new setting changes no run id. The price: the default
of a setting never changes within a format.
"""

import dataclasses
import hashlib
import json
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from node.averaging.settings import AveragingSettings
from node.averaging.strategies.outer import (
    REMOVED,
    OuterSettings,
    carried,
)
from node.core.errors import Refused, Removed, TooNew, UsageFault, WireError, refuse
from node.core.ids import PeerId, RunId
from node.core.tables import FieldRule, build, check, setting, settings_of, unknown
from node.core.version import PROTOCOL, UPDATE, WIRES_SINCE
from node.data.settings import DataSettings
from node.epoch.settings import TrainingSettings
from node.identity.keys import Identity, verify
from node.identity.signed_text import signature_of, spelled
from node.model.settings import DIGEST, ModelSettings
from node.model.shapes import all_shapes, check_settings, count
from node.optim.settings import OptimSettings
from node.pipeline.settings import PipelineSettings
from node.scheduler.settings import SchedulerSettings

FORMAT = 2
"""Of the manifests that are made here. Those from 1 to this one are read."""
MAX_MANIFEST = 64 * 1024
"""Bytes of a manifest; a longer one is refused unread."""
MAX_DOTS = 64
"""Dots of a line that is no comment. tomllib keeps every beginning of a dotted key: 64 KiB of one
key would take 4 GiB."""
WIDTH = 96
"""Of a comment in a file, without its mark."""
HEADER = "# What every peer of this swarm agreed on."
"""How every signed manifest that is written here begins; a file that begins so and has no signature
was cut."""
_HEADERS = {
    1: f"{HEADER} Changing one character makes another run.",
    2: f"{HEADER} Changing a value makes another run.",
}
_FIRST = {
    "swarm": "name owner protocol admission",
    "model": (
        "layers d_model heads kv_heads d_ff vocab seq_len rope_theta norm_eps qk_norm tied "
        "init_std init_seed"
    ),
    "pipeline": "stages micro_batch wire forward_timeout_s may_skip watch",
    "scheduler": "paths skip max_swaps max_jump keep_first",
    "averaging": (
        "cell wire group_bytes round_timeout_s max_gradient_norm quarantine reducer trim clip "
        "clip_iterations"
    ),
    "outer": (
        "strategy carries optimizer lr momentum codec feedback grid shards staleness fragments "
        "mixing quorum"
    ),
    "optimizer": (
        "name lr momentum ns_steps coefficients stack shampoo_lr soap_lr precondition_every "
        "precondition_side adam_lr adam_beta1 adam_beta2 adam_eps weight_decay warmup decay"
    ),
    "data": "source sha256 tokenizer seed holdout",
    "training": (
        "epochs target_batch epoch_timeout_s eval_every eval_batches min_replicas buddy_every "
        "rebalance_every_s"
    ),
}
"""Keys of the settings that the oldest runs have, by section. This table is closed."""
FIRST = frozenset(f"{section}.{key}" for section, keys in _FIRST.items() for key in keys.split())
"""Names of these settings. A manifest of format 1 leaves out all younger ones that have their
defaults, so older runs keep their ids."""
_BY_THE_CLOCK = "cells average by the clock: give  outer.window_s  in seconds"
GONE: dict[str, tuple[Any, str, str]] = {
    "outer.every": (0, "outer.optimizer", _BY_THE_CLOCK),
    "outer.reducer": ("mean", "outer.grid", "leave it out: a cell far from others counts for less"),
    "outer.overlap": (0, "outer.mixing", _BY_THE_CLOCK),
    "outer.grace_s": (30.0, "outer.window_s", "leave it out: a quorum waits for most of a window"),
    "outer.fanout": (1, "outer.shards", f"leave it out; instead of push-sum {REMOVED['push-sum']}"),
}
"""Settings that were: their defaults, the setting that they stood before, what to do instead. A
manifest of format 1 has them all, and its run id counts them; there a default is read over."""


@dataclass(frozen=True)
class SwarmSettings:
    """Who runs it and who may come."""

    name: str = setting(
        "demo",
        "Name for people; the run id is what counts.",
        pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}",
        says="letters, digits, dot, dash, underscore; at most 63",
    )
    owner: PeerId = setting(
        PeerId(""),
        "Whose signature the manifest carries; empty only before it is signed.",
        pattern=r"(12D3Koo[1-9A-HJ-NP-Za-km-z]{45})?",
        says='a PeerId, "12D3Koo" and 45 more characters',
    )
    protocol: int = setting(
        1, "The oldest protocol version that a peer of this run may speak.", least=1, most=1_000_000
    )
    admission: str = setting(
        "open",
        "open: anybody with an address | invite: only bearers of a token signed by the owner.",
        choices=("open", "invite"),
    )
    lead: str = setting(
        "any",
        "Who may lead a cell. any: who takes part | admitted: the owner, and bearers of a token.",
        choices=("any", "admitted"),
    )
    salt: str = setting(
        "",
        "Drawn by tutti swarm init, so that a second run of the same settings is another run.",
        pattern=r"([0-9a-f]{16})?",
        says="16 hex digits, or empty",
    )
    continues: str = setting(
        "",
        "Id of the run whose last epoch this one goes on from: who has checkpoints of it begins "
        "with them. Empty: from the start.",
        pattern=r"([0-9a-f]{64})?",
        says="the id of a run, 64 hex digits, or empty",
    )

    @property
    def tokens(self) -> bool:
        """Whether a token lets its bearer do what others may not: take part, or lead."""
        return self.admission == "invite" or self.lead == "admitted"


@dataclass(frozen=True)
class Signature:
    """The owner's Ed25519 signature over the canonical immutable part."""

    key: PeerId
    sig: bytes


@dataclass(frozen=True)
class Manifest:
    """The agreement of all peers of one run. Equal manifests have equal :attr:`run_id`."""

    swarm: SwarmSettings = field(default_factory=SwarmSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    averaging: AveragingSettings = field(default_factory=AveragingSettings)
    outer: OuterSettings = field(default_factory=OuterSettings)
    optimizer: OptimSettings = field(default_factory=OptimSettings)
    data: DataSettings = field(default_factory=DataSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    signature: Signature | None = None
    format: int = FORMAT
    """What the file looks like and what of it is hashed."""

    @classmethod
    def default_demo(cls) -> "Manifest":
        """The swarm of ``tutti start`` and ``tutti demo``: a byte model of the built-in text, a few
        minutes on a CPU."""
        return cls()

    @classmethod
    def parse(cls, raw: bytes) -> "Manifest":
        """A manifest file. Raises UsageFault naming the field, the bad value and what is allowed,
        TooNew for a format of the future; checks no signature."""
        number, table = _read(raw)
        for name in table:
            if name not in SECTIONS and name != "signature":
                raise unknown(name, [*SECTIONS, "signature", "format"])
        if "signature" not in table and raw.startswith(HEADER.encode()):
            raise UsageFault(
                "the manifest ends before its signature: a part of the file is missing",
                f"{_WHOLE}; who took the signature out to sign anew takes out the first line too",
            )
        parts = {name: build(kind, table.get(name, {}), name) for name, kind in SECTIONS.items()}
        manifest = cls(**parts, signature=_signature(table.get("signature")), format=number)
        manifest.check()
        return manifest

    def check(self) -> None:
        """Check settings against each other; each was in its range when it was read. Raises
        UsageFault naming both sides."""
        m, p, a, d, t = self.model, self.pipeline, self.averaging, self.data, self.training
        if self.swarm.protocol > PROTOCOL:
            raise TooNew(
                f"swarm.protocol = {self.swarm.protocol}, this tutti speaks protocol {PROTOCOL}",
                UPDATE,
            )
        check_settings(m)
        shared = m.layers - m.ends_layers
        shared_said = f"model.layers = {m.layers}"
        if m.ends_layers:
            shared_said = f"model.layers - model.ends_layers = {shared}"
        refuse(
            (
                p.stages > shared,
                f"pipeline.stages = {p.stages}",
                f"at most {shared_said}: a stage holds a layer or more",
            ),
            (
                m.weights and len(m.weights) != p.stages + 1,
                f"model.weights has {len(m.weights)} digests",
                f"must have {p.stages + 1}, one of the ends and one of each of pipeline.stages: "
                "give the model again,  tutti swarm init --from DIR",
            ),
            (
                not all(re.fullmatch(f"{DIGEST}[0-9a-f]{{64}}", w) for w in m.weights),
                "model.weights",
                f"must be digests of {DIGEST} and 64 hex digits each; without that word they are "
                "of a tutti before protocol 7: give the model again,  tutti swarm init --from DIR",
            ),
        )
        p.check()
        refuse(
            (
                t.target_batch % p.micro_batch,
                f"training.target_batch = {t.target_batch}",
                f"must be a multiple of pipeline.micro_batch = {p.micro_batch}",
            ),
        )
        a.check()
        self.scheduler.check(p.stages, t.target_batch // p.micro_batch, p.may_skip)
        carried(self.outer, a.peers, p.stages)
        refuse(
            (
                self.optimizer.masters and self.outer.windows,
                f'optimizer.parameters = "{self.optimizer.parameters}" while outer.window_s = '
                f"{self.outer.window_s:g}",
                'take "fp32", or one cell (outer.window_s = 0): what cells differ by is less than '
                "bf16 can say",
            ),
        )
        d.check(m.vocab, t.eval_every)

    def check_continues(self, before: "Manifest") -> None:
        """Raises UsageFault unless this run can go on from the last epoch of ``before``."""
        had, epochs = before.training.epochs, self.training.epochs
        same = (
            ("model", before.model, self.model),
            ("pipeline.stages", before.pipeline.stages, self.pipeline.stages),
            ("optimizer.name", before.optimizer.name, self.optimizer.name),
            ("optimizer.parameters", before.optimizer.parameters, self.optimizer.parameters),
        )
        step = "leave it as it is, or begin anew with  --from"
        refuse(
            *(
                (old != new, f"{name} differs from the run to continue", step)
                for name, old, new in same
            ),
            (
                epochs <= had,
                f"training.epochs = {epochs}, and the run to continue has {had}",
                f"give more:  --epochs {2 * had}",
            ),
        )

    def immutable(self) -> bytes:
        """The bytes that are hashed and signed: JSON, keys sorted. Format 1: the settings of
        :data:`FIRST`, and younger ones that differ from their defaults. From format 2 on: the
        format's number and what differs from the defaults."""
        body: dict[str, Any] = {"format": self.format} if self.format > 1 else {}
        for section, key, value, kept in self._values():
            if kept:
                body.setdefault(section, {})[key] = value
        return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    def _values(self) -> Iterator[tuple[str, str, Any, bool]]:
        """Section, key and value of every setting of this format, and whether it is hashed."""
        first = self.format == 1
        for section in SECTIONS:
            settings = getattr(self, section)
            usual = dataclasses.asdict(type(settings)())
            for key, value in dataclasses.asdict(settings).items():
                name = f"{section}.{key}"
                for gone, (default, place, _) in GONE.items() if first else ():
                    if place == name:
                        yield section, gone.partition(".")[2], default, True
                yield section, key, value, value != usual[key] or (first and name in FIRST)

    @property
    def oldest_protocol(self) -> int:
        """The oldest protocol version that a peer of this run may speak: ``swarm.protocol``, or the
        one that brought a number format which the run uses."""
        if self.pipeline.blockwise:
            return max(self.swarm.protocol, WIRES_SINCE)
        return self.swarm.protocol

    @property
    def domain(self) -> str:
        """Uses of the owner's signature."""
        return f"tutti/manifest/{self.format}"

    @cached_property
    def run_id(self) -> RunId:
        return RunId(hashlib.sha256(self.immutable()).hexdigest())

    def parameter_count(self) -> int:
        """Numbers in the whole model."""
        return count(all_shapes(self.model))

    def model_said(self) -> str:
        """The shape of the model in one line, for people."""
        m = self.model
        said = (
            f"{m.layers} layers, width {m.d_model}, vocabulary {m.vocab}, sequences of {m.seq_len}"
        )
        if m.ends_layers:
            said += f", the first {m.ends_layers} at the ends"
        if m.weights:
            said += f", begins from weights {m.weights[0][len(DIGEST) :][:12]}"
        return said

    def owned_by(self, owner: PeerId) -> "Manifest":
        """The same swarm in another's name, unsigned: another run."""
        return dataclasses.replace(
            self, swarm=dataclasses.replace(self.swarm, owner=owner), signature=None
        )

    def sign(self, identity: Identity) -> bytes:
        """The signed manifest as a TOML file, ready to be shared and parsed.

        It is of the newest format, whatever it was made from. An empty owner is filled in with the
        signer; Refused when somebody else owns it.
        """
        if self.swarm.owner not in ("", identity.peer_id):
            raise Refused(
                f"swarm.owner is {self.swarm.owner}, not you",
                f"sign with the owner's key, or set owner = {identity.peer_id}",
            )
        signed = dataclasses.replace(self.owned_by(identity.peer_id), format=FORMAT)
        signed.check()
        signature = Signature(identity.peer_id, identity.sign(signed.immutable(), signed.domain))
        return dataclasses.replace(signed, signature=signature).to_toml()

    def to_toml(self) -> bytes:
        """The manifest as a TOML file, with its signature if it has one.

        From format 2 on settings with defaults are comments: a tutti that does not know a newer
        one of them reads the file all the same.
        """
        lines = [_HEADERS[self.format]] if self.signature is not None else []
        if self.format > 1:
            lines += ["# Settings behind a # have their defaults.", f"format = {self.format}"]
        for section, rows in groupby(self._values(), lambda row: row[0]):
            kind = SECTIONS[section]
            said = settings_of({section: kind})
            about = (kind.__doc__ or "").strip().splitlines()[0]
            lines += ["", f"[{section}] # {about}"]
            for _, key, value, kept in rows:
                if value is None:  # TOML has no word for it, and it is the default
                    continue
                meaning = ""
                name = f"{section}.{key}"
                if name in said:  # and not in GONE
                    meaning = said[name].text
                entry = toml_entry(key, value, meaning, behind=not kept)
                if self.format > 1:
                    lines += ["", *entry]
                elif kept:
                    lines.append(entry[-1])
        if self.signature is not None:
            sig = spelled(self.signature.sig)
            lines += ["", "[signature]", f'key = "{self.signature.key}"', f'sig = "{sig}"']
        return ("\n".join(lines).strip() + "\n").encode()

    def verify(
        self,
        expected_run_id: RunId | None = None,
        expected_owner: PeerId | None = None,
        me: PeerId | None = None,
    ) -> None:
        """Raises Refused unless this is the expected run, of the expected owner, truly signed by
        its owner. The advice is for ``me``, who may be the owner."""
        again = "ask the owner for a fresh invite or swarm.toml"
        if me is not None and me == self.swarm.owner:
            again = (
                "you are its owner: undo the change, or sign it as another run with  tutti "
                "swarm init --from FILE"
            )
        if expected_run_id is not None and self.run_id != expected_run_id:
            raise Refused(
                f"the manifest is of run {self.run_id[:12]}, not {expected_run_id[:12]}", again
            )
        if expected_owner is not None and self.swarm.owner != expected_owner:
            raise Refused(
                f"the manifest belongs to {self.swarm.owner or 'nobody'}, not to {expected_owner}",
                again,
            )
        if self.signature is None or not self.swarm.owner:
            raise Refused(
                "the manifest is not signed",
                "the owner signs it with  tutti swarm init --from FILE",
            )
        if self.signature.key != self.swarm.owner:
            raise Refused(
                f"the manifest is signed by {self.signature.key}, not by its owner "
                f"{self.swarm.owner}",
                again,
            )
        try:
            verify(self.swarm.owner, self.immutable(), self.signature.sig, self.domain)
        except (Refused, WireError) as e:
            raise Refused(
                "the manifest's signature does not fit its content: it was changed after signing",
                again,
            ) from e


SECTIONS: dict[str, type] = {
    "swarm": SwarmSettings,
    "model": ModelSettings,
    "pipeline": PipelineSettings,
    "scheduler": SchedulerSettings,
    "averaging": AveragingSettings,
    "outer": OuterSettings,
    "optimizer": OptimSettings,
    "data": DataSettings,
    "training": TrainingSettings,
}


_WHOLE = "take the whole file again from who signed it"


def left_out(raw: bytes) -> list[str]:
    """Sections that a manifest file does not have, so that all their fields keep their defaults.
    ``raw`` has been parsed."""
    _, table = _read(raw)
    return [name for name in SECTIONS if name not in table]


def named(raw: bytes) -> list[tuple[str, str]]:
    """Section and key of every setting that a manifest file gives a value.
    ``raw`` has been parsed."""
    _, table = _read(raw)
    return [(section, key) for section in SECTIONS for key in table.get(section, {})]


def _read(raw: bytes) -> tuple[int, dict[str, Any]]:
    """The format of a manifest file, and its tables, without settings that are gone. Raises
    UsageFault."""
    if len(raw) > MAX_MANIFEST:
        raise UsageFault(f"the manifest is {len(raw)} bytes long", f"allowed: {MAX_MANIFEST}")
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.count(b".") > MAX_DOTS and not line.lstrip().startswith(b"#"):
            raise UsageFault(f"line {number} of the manifest has more than {MAX_DOTS} dots", _WHOLE)
    try:
        table = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as e:
        if "at end of document" in str(e):
            raise UsageFault(
                f"the manifest ends in the middle of a line: {str(e)[:200]}", _WHOLE
            ) from e
        raise UsageFault(
            f"the manifest is not TOML: {str(e)[:200]}", f"mend that line, or {_WHOLE}"
        ) from e
    number = check("format", table.pop("format", 1), int, FieldRule(1))
    if number > FORMAT:
        raise TooNew(
            f"the manifest is of format {number}, and this tutti reads formats 1 to {FORMAT}",
            UPDATE,
        )
    for name, (usual, *_) in GONE.items():
        section, _, key = name.partition(".")
        body = table.get(section)
        if isinstance(body, dict) and key in body and (body.pop(key) != usual or number > 1):
            raise gone(name)
    return number, table


def gone(name: str) -> Removed:
    """The complaint about one of the settings in :data:`GONE`."""
    return Removed(f"{name} is not a setting any more", GONE[name][2])


def _signature(table: Any) -> Signature | None:
    if table is None:
        return None
    if not isinstance(table, dict) or set(table) != {"key", "sig"}:
        raise UsageFault(
            "signature is not a table of key and sig",
            "the owner signs with  tutti swarm init --from FILE",
        )
    owner = settings_of(SECTIONS)["swarm.owner"]
    key = check("signature.key", table["key"], str, owner.rule)
    try:
        sig = signature_of(check("signature.sig", table["sig"], str))
    except ValueError as e:
        raise UsageFault(
            "signature.sig is not base64 in its usual spelling", "expected 64 bytes in base64"
        ) from e
    if len(sig) != 64:
        raise UsageFault(f"signature.sig holds {len(sig)} bytes", "expected 64 bytes in base64")
    return Signature(PeerId(key), sig)


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file. UsageFault when it cannot be read or does not hold one; checks no
    signature."""
    try:
        with path.open("rb") as f:
            raw = f.read(MAX_MANIFEST + 1)
    except OSError as e:
        raise UsageFault(
            f"cannot read {path}: {e.strerror}", "make one with  tutti swarm init"
        ) from e
    return Manifest.parse(raw)


def typed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their names ("model.layers": 12), each checked by itself; text is read as the
    setting's type.

    Raises UsageFault that names the setting, the bad value and the allowed values.
    """
    known = settings_of(SECTIONS)
    found = dict[str, Any]()
    for name, value in changes.items():
        if name in GONE:
            raise gone(name)
        if name not in known:
            raise unknown(name, [*known])
        found[name] = known[name].check(known[name].read(value))
    return found


def amended(manifest: Manifest, changes: Mapping[str, Any]) -> Manifest:
    """The manifest with some fields changed, as :func:`typed` reads them, checked, unsigned.

    Raises UsageFault as :meth:`Manifest.parse` does.
    """
    parts = dict[str, Any]()
    for name, value in typed(changes).items():
        section, _, key = name.partition(".")
        parts.setdefault(section, {})[key] = value
    changed = {
        s: dataclasses.replace(getattr(manifest, s), **fields) for s, fields in parts.items()
    }
    result = dataclasses.replace(manifest, signature=None, **changed)
    result.check()
    return result


def toml_entry(key: str, value: Any, meaning: str, *, behind: bool) -> list[str]:
    """A setting as lines of a TOML file, below a comment with its meaning; ``behind`` a # or
    not."""
    import tomlkit
    from tomlkit.items import Array

    plain = tomlkit.item(list(value) if isinstance(value, tuple) else value)
    if isinstance(plain, Array) and any(isinstance(v, float) for v in value):
        plain.multiline(True)  # a line has MAX_DOTS at most
    item = plain.as_string()
    comment = [f"# {line}" for line in textwrap.wrap(meaning, WIDTH)]
    mark = "# " if behind else ""
    return [*comment, f"{mark}{key} = {item}"]
