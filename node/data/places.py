"""Where this peer keeps the files that a manifest names. A manifest names content; a path is each
peer's own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Places:
    """A field: the file, or a directory that holds it under the manifest's name; "" for the path
    the manifest gives."""

    data: str = ""
    tokenizer: str = ""
    weights: str = ""


AS_NAMED = Places()


def local(name: str, place: str) -> Path:
    """The file that a manifest calls ``name``, of a peer that keeps it at ``place``."""
    path = Path(os.path.expanduser(place or name))
    return path / Path(name).name if place and os.path.isdir(path) else path


def meant_for_one(place: str) -> bool:
    """Whether a place says that this very run reads a file: a directory may be set once for all
    runs of a peer."""
    return bool(place) and not os.path.isdir(os.path.expanduser(place))
