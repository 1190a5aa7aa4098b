"""The page that makes a directory a checkpoint: what is in it, of which run, and a hash of every
file and of itself."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from node.core.errors import Refused
from node.core.numbers import whole

FORMAT = 2
"""1 named parameters by another digest; its files are hashed alike, and it is still read."""
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Bytes and hex sha256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """``digest`` is the stage digest of the parameters, "" in format 1;
    ``meta`` is JSON of whoever saved (the sampler's place, …)."""

    run_id: str
    stage: int
    epoch: int
    digest: str
    files: dict[str, FileEntry]
    meta: dict[str, Any]

    def encode(self) -> bytes:
        """The file: the facts and the sha256 of their canonical form. ``meta`` is lists, numbers
        and objects with strings for keys, as JSON gives them back."""
        body = {"format": FORMAT} | asdict(self)
        page = {"checkpoint": body, "sha256": _hash(body)}
        return json.dumps(page, sort_keys=True, indent=1, allow_nan=False).encode()

    @classmethod
    def parse(cls, raw: bytes) -> CheckpointManifest:
        """The inverse of :meth:`encode`. Raises Refused for bytes that are torn, garbled or of
        another format."""
        try:
            page = json.loads(raw)
            body = page["checkpoint"]
            if page["sha256"] != _hash(body):
                raise Refused("its manifest is garbled: it does not have the hash it names")
            if body["format"] not in (1, FORMAT):
                raise Refused(
                    f"its manifest has format {body['format']}, this software reads 1 and {FORMAT}"
                )
            files = {
                str(name): FileEntry(whole(f["size"]), _hex(f["sha256"]))
                for name, f in body["files"].items()
            }
            if not isinstance(body["meta"], dict):
                raise ValueError("meta is no object")
            return cls(
                str(body["run_id"]),
                whole(body["stage"]),
                whole(body["epoch"]),
                _hex(body["digest"]) if body["format"] == FORMAT else "",
                files,
                body["meta"],
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise Refused(f"its manifest cannot be read: {e}") from e


def _hash(body: Any) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _hex(value: Any) -> str:
    if not isinstance(value, str) or _HEX.fullmatch(value) is None:
        raise ValueError("expected a hex sha256")
    return value
