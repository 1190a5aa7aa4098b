"""Git LFS pointers: small text files that stand in a clone for files that were not downloaded.

Enters: the first bytes of a file that somebody named. Leaves: an error that says what the file is.
Never: a download.
"""

from pathlib import Path

from node.core.errors import UsageFault

POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of every pointer."""


def check_pointer(path: Path, first: bytes) -> None:
    """Raise UsageFault if the file at ``path`` is a Git LFS pointer. ``first``: its first
    bytes."""
    if first.startswith(POINTER):
        raise UsageFault(
            f"{path} is a Git LFS pointer: the clone holds a text in place of the file",
            f"fetch the files:  git -C {path.parent} lfs pull  , or download them again",
        )
