"""Known secrets of a home and its user, which a report of a bug must not carry: the key, tokens,
invites, names of data, hosts. Enters: a home, the environment. Leaves: texts and their kinds, for
:mod:`node.app.owner.redaction`."""

import base64
import contextlib
import getpass
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from node.app.launch import PROGRAM
from node.app.owner.redaction import names_of
from node.config import NodeConfig
from node.core.errors import LocalFault
from node.identity.keys import Identity
from node.manifest import Manifest, read_manifest

_USUAL = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "swarm.toml",
    "SHA256SUMS",
    "bytes",
    "data",
    "models",
    "home",
    "Users",
    "root",
    "media",
    "volume",
    "storage",
    "Documents",
    "Downloads",
)
"""Names of files and directories that tell nothing about their owner."""
_SENSITIVE = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH", re.IGNORECASE)


def secrets_of(ours: NodeConfig) -> tuple[dict[str, str], dict[str, str]]:
    """(secret to its kind, text to what stands in its place) of this home and this user. What
    cannot be read is no secret that is known here; rules for unknown ones are the redactor's."""
    known: dict[str, str] = {}
    with contextlib.suppress(LocalFault):
        identity = Identity.load(ours.identity_path)
        for raw in (identity.seed(), identity.key_file_bytes()):
            known |= dict.fromkeys((raw.hex(), base64.b64encode(raw).decode()), "key")
    if ours.node.admission:
        known |= dict.fromkeys((ours.node.admission, ours.node.admission.lower()), "token")
    for variable, value in os.environ.items():
        if _SENSITIVE.search(variable) and len(value) >= 6 and not value.isdigit():
            known[value] = "token"
    places = [ours.node.data, ours.node.tokenizer, ours.node.weights, ours.node.record]
    places.append(ours.node.tensorboard)
    runs = list(_runs(ours))
    places += [ours.node.swarm, *_sources(runs)]
    hosts = [*ours.node.data_hosts, *ours.transport.announce]
    for run in _places(ours):
        places += [path for path in run.values() if isinstance(path, str)]
        if isinstance(run.get("hosts"), list):
            hosts += [host for host in run["hosts"] if isinstance(host, str)]
    known |= names_of((p for p in places if p), _USUAL)
    for invite in [*ours.node.join, *_invites(ours)]:
        known[invite] = "invite"
    for host in hosts:
        known[host] = "host"
        known[host.rpartition(":")[0] or host] = "host"
    if ours.node.name:
        known[ours.node.name] = "name"
    user = _user()
    if user not in ("", "root", "user"):
        known[user] = "user"
    host = socket.gethostname()
    if host not in ("", "localhost", "vm"):
        known[host] = "host"
    root = str(Path(PROGRAM).parent)
    kept = {str(ours.home): "<home>", root: "<tutti>", sys.prefix: "<python>"}
    kept |= {run.run_id: run.run_id[:12] for run in runs}
    if sys.base_prefix not in ("/usr", "/usr/local"):
        kept[sys.base_prefix] = "<python>"
    return known, {text: mark for text, mark in kept.items() if len(text) > 1}


def _places(ours: NodeConfig) -> Iterator[Mapping[str, Any]]:
    """Places of the files of each run of this home."""
    for file in sorted((ours.home / "swarms").glob("*/places.json")):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(found, Mapping):
                yield found


def _runs(ours: NodeConfig) -> Iterator[Manifest]:
    """Manifests of all runs of this home."""
    for file in sorted((ours.home / "swarms").glob("*/swarm.toml")):
        with contextlib.suppress(LocalFault, OSError):
            yield read_manifest(file)


def _sources(runs: Sequence[Manifest]) -> Iterator[str]:
    """Names of the data and the tokenizers of runs."""
    for run in runs:
        scheme, colon, name = run.data.source.partition(":")
        if colon and scheme not in ("builtin", "synthetic"):
            yield name
        yield run.data.tokenizer
        yield from (one.partition(":")[0] for one in run.data.files)


def _invites(ours: NodeConfig) -> Iterator[str]:
    for file in sorted((ours.home / "swarms").glob("*/invite")):
        with contextlib.suppress(OSError, ValueError):
            yield file.read_text(encoding="utf-8").strip()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
