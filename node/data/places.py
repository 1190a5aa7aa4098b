"""Files of this machine that a manifest names. Enters: names of a manifest, and the locations that
the user gave. Never: a file that neither the user has named nor a hash proves.
"""

import os
import stat
from io import BufferedReader
from pathlib import Path

from node.core.errors import UsageFault, refuse
from node.core.home import expanded
from node.data.settings import Places
from node.model.files import POINTER, check_pointer

_KERNEL = ("/proc", "/sys", "/dev")
"""Directories of interfaces of the kernel: reading one can block, or change something."""
_SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of which a directory has one that the library ``datasets`` has saved."""
MOST_FILES = 20_000
"""Files of a directory that is read whole."""
_SHARED_MEMORY = "/dev/shm"


def data_file(name: str, sha256: str, places: Places) -> Path:
    """Path of the data that a manifest calls ``name``. Raises UsageFault as :func:`_located`."""
    return _located(name, "data", places.data, places, proven=bool(sha256))


def tokenizer_file(name: str, sha256: str, places: Places) -> Path:
    """Path of the tokenizer.json that a manifest calls ``name``. Raises UsageFault as
    :func:`_located`."""
    return _located(name, "tokenizer", places.tokenizer, places, proven=bool(sha256))


def is_directory(name: str) -> bool:
    """Return True for a name in a manifest that means all files of a directory."""
    return name.endswith("/")


def data_directory(name: str, sha256: str, places: Places) -> Path:
    """The directory of files that a manifest calls ``name``: one that the user named, or one of its
    name in that. A hash proves the files of the directory, or the manifest is the user's own.
    Raises UsageFault for every other directory."""
    base = Path(name).name
    step = "name the directory by  --data DIR"
    refuse((not base or base == "..", f"{name!r} is no name of a directory", step))
    refuse(
        (
            not (sha256 or places.own),
            f"the manifest names the directory {name} and no hash of its files, so none is opened",
            "ask who owns the run for a manifest with a hash; a block stage needs no data",
        ),
        (
            not (places.data or places.own),
            f"the manifest names the directory {name}, and none was named here",
            f"{step} ; a block stage needs no data",
        ),
    )
    place = expanded(places.data or name)
    inside = place / base
    # A directory that is set for all runs holds the directory of each run under its name.
    within = places.data and (inside.is_dir() or "data" in places.for_all_runs)
    found = place
    if within:
        found = inside
    refuse((not found.is_dir(), f"{found} is no directory", step))
    return found


def check_not_saved(place: Path) -> None:
    """Raises UsageFault for a directory that the library ``datasets`` has saved, which holds tables
    of its own format."""
    refuse(
        (
            any((place / mark).is_file() for mark in _SAVED),
            f"{place} was saved by the library datasets",
            f"name it as a data set:  --data hf:{place}",
        )
    )


def files_below(base: Path) -> list[str]:
    """Names of all files below a directory, sorted, with "/" between their parts. Links to
    directories are not followed, and names that begin with a dot are passed over. Raises UsageFault
    for more than :data:`MOST_FILES`."""
    found = list[str]()
    for parent, directories, files in os.walk(base):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        inside = Path(parent).relative_to(base)
        found += [(inside / name).as_posix() for name in files if not name.startswith(".")]
        refuse(
            (
                len(found) > MOST_FILES,
                f"{base} has more than {MOST_FILES} files",
                "make a list of them,  sha256sum FILES > SHA256SUMS , and name that",
            )
        )
    return sorted(found)


def directory(name: str, places: Places) -> Path | None:
    """The directory of a data set that a manifest calls ``name``, as the library ``datasets`` saves
    it: the one that the user named for this run, or one of the user's own manifest. None where the
    name is one of the Hub."""
    if places.data:
        place = expanded(places.data)
        named = places.own or "data" not in places.for_all_runs
        if named and any((place / mark).is_file() for mark in _SAVED):
            return place
        inside = place / Path(name).name
        if places.own and inside.is_dir():
            return inside
        return None
    if places.own and (own := expanded(name)).is_dir():
        return own
    return None


def _located(name: str, setting: str, place: str, places: Places, *, proven: bool) -> Path:
    """Path of the file that a manifest calls ``name`` and this user keeps at ``place``.

    The user names a file for this run by its path. A directory, a file set for all runs, and the
    path in a manifest are places to look only: a file there is read if its hash is in the manifest,
    or if the manifest is the user's own. Raises UsageFault for every other file, and for a name
    without a last part.
    """
    is_file = named_for_one_run(place)
    if is_file and setting not in places.for_all_runs:
        return expanded(place)
    base = Path(name).name
    step = f"name it by  --{setting} PATH"
    refuse((not base or base == "..", f"{name!r} is no name of a file", step))
    path = expanded(place or name)
    if place and not is_file:
        path /= base
    refuse(
        (
            not (proven or places.own),
            f"the manifest names the {setting} {name} and no hash of it, so {path} is not opened: "
            "it could be any file of yours",
            f"if you want this run to read a file of yours, name it:  --{setting} FILE ; a block "
            "stage needs none",
        )
    )
    return path


def named_for_one_run(place: str) -> bool:
    """Return True if the user has named a file, which one run reads: a directory may hold the files
    of all runs of a peer."""
    return bool(place) and not os.path.isdir(expanded(place))


def read_regular(path: Path, most: int, next_step: str) -> bytes:
    """Content of a file. Raises UsageFault as :func:`open_regular`, for a file of more than
    ``most`` bytes, and for one that cannot be read."""
    with open_regular(path, next_step) as file:
        try:
            found = file.read(most + 1)
        except OSError as e:
            raise UsageFault(f"cannot read {path}: {e.strerror}", next_step) from e
    refuse((len(found) > most, f"{path} has more than {most} bytes", next_step))
    return found


def open_regular(path: Path, next_step: str) -> BufferedReader:
    """A file opened to be read. Raises UsageFault for one that cannot be opened, and for a
    directory, a device, a pipe, a socket, a file of the kernel, or a Git LFS pointer."""
    try:
        real = os.path.realpath(path)
        inside = any(real == d or real.startswith(f"{d}/") for d in _KERNEL)
        refuse(
            (
                inside and not real.startswith(f"{_SHARED_MEMORY}/"),
                f"{path} is an interface of the kernel, no file of data",
                next_step,
            ),
            (not stat.S_ISREG(os.stat(path).st_mode), f"{path} is not a regular file", next_step),
        )
        # A pipe that has taken the file's name meanwhile would block here for ever.
        file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        try:
            check_pointer(path, file.peek(len(POINTER)))
        except Exception:
            file.close()
            raise
        return file
    except (OSError, ValueError) as e:  # a name with a zero byte is a ValueError
        why = e.strerror if isinstance(e, OSError) else e
        raise UsageFault(f"cannot read {path}: {why}", next_step) from e
