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

_KERNEL = ("/proc", "/sys", "/dev")
"""Directories whose files are interfaces of the kernel: to read one can block, or change
something."""
_SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of which a directory has one that the library ``datasets`` has saved."""
_SHARED_MEMORY = "/dev/shm"


def data_file(name: str, sha256: str, places: Places) -> Path:
    """Path of the data that a manifest calls ``name``. Raises UsageFault as :func:`_located`."""
    return _located(name, places.data, "data", "--data", proven=bool(sha256), own=places.own)


def tokenizer_file(name: str, sha256: str, places: Places) -> Path:
    """Path of the tokenizer.json that a manifest calls ``name``. Raises UsageFault as
    :func:`_located`."""
    own = places.own
    return _located(
        name, places.tokenizer, "tokenizer", "--tokenizer", proven=bool(sha256), own=own
    )


def directory(name: str, places: Places) -> Path | None:
    """The directory of a data set that a manifest calls ``name``, as the library saves it; None
    where the name is one of the Hub. Raises UsageFault for a directory in a place for all runs that
    the user has not named for this one, unless the manifest is the user's own."""
    if not places.data:
        own = expanded(name) if places.own else None
        return own if own is not None and own.is_dir() else None
    place = expanded(places.data)
    if any((place / mark).is_file() for mark in _SAVED):
        return place
    base = Path(name).name
    if not base or base == ".." or not (place / base).is_dir():
        return None
    refuse(
        (
            not places.own,
            f"the manifest names the data set {name}, and {place / base} is not opened: it could "
            "be any data set of yours",
            f"if you want this run to read it, name it:  --data {place / base}",
        )
    )
    return place / base


def _located(name: str, place: str, what: str, flag: str, *, proven: bool, own: bool) -> Path:
    """Path of the file that a manifest calls ``name`` and this user keeps at ``place``.

    The user names a file by its path. A directory, and the path in a manifest, are a place to look
    only: what is found there is read if its hash is in the manifest, or if the manifest is the
    user's own. Raises UsageFault for every other file, and for a name that is none.
    """
    if place and not os.path.isdir(place):
        return expanded(place)
    base = Path(name).name
    refuse((not base or base == "..", f"{name!r} is no name of a file", f"name it by  {flag} PATH"))
    path = expanded(place) / base if place else expanded(name)
    refuse(
        (
            not (proven or own),
            f"the manifest names the {what} {name} and no hash of it, so {path} is not opened: it "
            "could be any file of yours",
            f"if you want this run to read a file of yours, name it:  {flag} FILE ; a block stage "
            "needs none",
        )
    )
    return path


def named_for_one_run(place: str) -> bool:
    """Return True if the user has named a file, which one run reads: a directory may hold the files
    of all runs of a peer."""
    return bool(place) and not os.path.isdir(expanded(place))


def open_regular(path: Path, next_step: str) -> BufferedReader:
    """A file opened to be read. Raises UsageFault for one that cannot be opened, and for a
    directory, a device, a pipe, a socket, or a file of the kernel."""
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
        return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except (OSError, ValueError) as e:  # a name with a zero byte is a ValueError
        why = e.strerror if isinstance(e, OSError) else e
        raise UsageFault(f"cannot read {path}: {why}", next_step) from e
