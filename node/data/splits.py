"""Files of one split of a data set, from the names of its files and its card, by the rules of the
library ``datasets``. Enters: names and patterns of strangers. Never: a disk, a network.
"""

import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from node.core.errors import UsageFault, refuse
from node.data.kinds import known_kind
from node.data.library import library

MOST_PATTERNS = 256
"""Patterns of a configuration, beside names of single files."""
MOST_STARS = 3
"""Stars in one part of a pattern, and parts that stand for any directories."""
_STARS = re.compile(r"[*?\[]")
_OTHER_SPLITS = ("validation", "test")
_CARD = re.compile(r"---\s*\n(.*?)\n---\s*(\n|$)", re.DOTALL)


def files_of_split(
    names: Iterable[str],
    configs: Mapping[str, Any],
    config: str,
    split: str,
    *,
    of_one_form: bool = False,
) -> list[str]:
    """Names of the files of a split that can be read, sorted.

    ``configs``: configurations of the card by their names. Without one of the name ``config`` the
    files below a directory of that name are meant. A file that is also of the validation or test
    split is not of the training split. ``of_one_form``: of the format alone that most of them have.

    Raises UsageFault for a split that is not there, and without the library.
    """
    readable = sorted(name for name in names if known_kind(name))
    if config:
        chosen = configs.get(config)
    else:
        chosen = _default(configs)
    if chosen is None and config:
        readable = [name for name in readable if config in name.split("/")[:-1]]
        refuse((not readable, f"no configuration and no directory {config!r}", _names(configs)))
    chosen = chosen or {}
    patterns = _patterns(chosen.get("data_files"))
    below = str(chosen.get("data_dir") or "").strip("/")
    found = _resolved(readable, patterns, below)
    if split not in found:
        what = ", ".join(sorted(found)) or "none that can be read"
        raise UsageFault(f"no files of {split!r}", f"the splits are: {what}")
    files = set(found[split])
    if split == "train" and not patterns:
        for other in _OTHER_SPLITS:
            files -= set(found.get(other, ()))
    refuse((not files, f"no files of {split!r} alone", "name the files in the card, README.md"))
    if of_one_form:
        return sorted(_of_most(files))
    return sorted(files)


def card_of(readme: str) -> dict[str, Any]:
    """Configurations in the card at the beginning of a README.md, by their names. A card that
    cannot be read has none."""
    import yaml

    match = _CARD.match(readme)
    if match is None:
        return {}
    try:
        return configurations(yaml.safe_load(match[1]))
    except (yaml.YAMLError, RecursionError):
        return {}


def configurations(card: Any) -> dict[str, Any]:
    """The configurations that a data set's card names, by their names."""
    named = None
    if isinstance(card, dict):
        named = card.get("configs")
    rows = []
    if isinstance(named, list):
        rows = [c for c in named or () if isinstance(c, dict)]
    return {str(c.get("config_name", "default")): c for c in rows}


def _default(configs: Mapping[str, Any]) -> Any:
    """The configuration that is meant without a name: the one that says so, or is called so, or is
    the first."""
    marked = [c for c in configs.values() if c.get("default") is True]
    return next(iter([*marked, *filter(None, [configs.get("default")]), *configs.values()]), None)


def _names(configs: Mapping[str, Any]) -> str:
    known = ", ".join(list(configs)[:16])
    if known:
        return f"the configurations are: {known}"
    return "leave the configuration away"


def _patterns(given: Any) -> dict[str, list[str]]:
    """Patterns of each split that a card gives; none where it gives none."""
    found = dict[str, list[str]]()
    if not isinstance(given, list):
        given = [given]
    for entry in given:
        if isinstance(entry, dict):
            path = entry.get("path", [])
            if not isinstance(path, list):
                path = [path]
            found.setdefault(str(entry.get("split", "train")), []).extend(map(str, path))
        elif isinstance(entry, str):
            found.setdefault("train", []).append(entry)
    return found


def _resolved(
    names: Sequence[str], patterns: dict[str, list[str]], below: str
) -> dict[str, list[str]]:
    """Names of each split, by patterns or else by the names of the files."""
    data_files = library("datasets.data_files", "a directory of files, or hf:")
    fsspec = library("fsspec", "a directory of files, or hf:")
    memory = fsspec.filesystem("memory")
    if not _is_inside(below):
        return {}
    # The library resolves patterns on a file system: here on one that has names and nothing else.
    root = f"/{secrets.token_hex(8)}"
    try:
        for name in names:
            memory.pipe_file(f"{root}/{name}", b"")
        base = "/".join(filter(None, (f"memory:/{root}", below)))
        patterns = patterns or data_files.get_data_patterns(base)
        _check_patterns(patterns)
        known = {f"{root}/{name}" for name in names}
        found = dict[str, list[str]]()
        for split, some in patterns.items():
            files = [file for p in some for file in _matching(data_files, str(p), base, known)]
            found[str(split)] = [file.partition(f"{root}/")[2] for file in dict.fromkeys(files)]
        return {split: files for split, files in found.items() if files}
    except (OSError, ValueError, AssertionError):  # names that the library does not understand
        return {}
    finally:
        # Removing the directory would look through all names once for each of them.
        for name in names:
            memory.store.pop(f"{root}/{name}", None)


def _check_patterns(patterns: Mapping[str, Sequence[str]]) -> None:
    """Raises UsageFault for more patterns than :data:`MOST_PATTERNS`, each of which is compared
    with every name; names themselves do not count."""
    count = sum(_STARS.search(str(p)) is not None for some in patterns.values() for p in some)
    refuse(
        (
            count > MOST_PATTERNS,
            f"the card has {count} patterns of names, at most {MOST_PATTERNS} are compared",
            "name another configuration",
        )
    )


def _is_inside(path: str) -> bool:
    """Return True for a pattern or directory of the data set itself. A card of a stranger could
    name files of this disk or of a server."""
    parts = path.split("/")
    return not ("::" in path or ":" in parts[0] or path.startswith("/") or ".." in parts)


def _matching(data_files: Any, pattern: str, base: str, known: Collection[str]) -> list[str]:
    """Files that a pattern of a card means; none for a pattern outside the data set, and for one
    that would take too long to compare."""
    pattern = pattern.removeprefix("./")
    if not _is_inside(pattern):
        return []
    if (name := f"{base}/{pattern}".removeprefix("memory:/")) in known:
        return [name]
    # The time to compare a name grows with its length to the power of the stars.
    parts = pattern.split("/")
    if parts.count("**") > MOST_STARS or any(part.count("*") > MOST_STARS for part in parts):
        return []
    try:
        return data_files.resolve_pattern(pattern, base)
    except (FileNotFoundError, ValueError, re.error):
        return []


def _of_most(files: Iterable[str]) -> list[str]:
    """The files of the format that most of them have."""
    forms = {file: kind.form for file in files if (kind := known_kind(file))}
    (most, _), *_ = Counter(sorted(forms.values())).most_common(1)
    return [file for file, form in forms.items() if form == most]
