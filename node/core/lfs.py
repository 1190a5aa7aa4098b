"""Git LFS pointers: small text files that stand in a clone for files that were not downloaded.

Enters: the first bytes of a file that somebody named. Leaves: an error that says what the file is.
Never: a download.
"""

from pathlib import Path

from node.core.errors import UsageFault

POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of every pointer."""


def check_pointer(path: Path, first: bytes) -> None:
    """Raise UsageFault if ``first``, the first bytes of the file at ``path``, are those of a Git
    LFS pointer."""
    if first.startswith(POINTER):
        raise UsageFault(
            f"{path} is a Git LFS pointer: the clone holds a text in place of the file",
            f"fetch the files:  git -C {path.parent} lfs pull  , or download them again",
        )


def check_file(path: Path) -> None:
    """Raise UsageFault if the file at ``path`` is a Git LFS pointer. A file that cannot be read
    is left to its reader. Blocks on the disk."""
    try:
        with path.open("rb") as file:
            first = file.read(len(POINTER))
    except (OSError, ValueError):  # a name with a zero byte is a ValueError
        return
    check_pointer(path, first)
