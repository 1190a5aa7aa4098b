"""``tutti config get|set|unset|explain``: one setting of a peer, and the file in which its user
keeps it. Enters: a name, a value as text. Leaves: lines, or the file, whole or not at all. Never: a
file that could not be read back."""

import dataclasses
import difflib
import fcntl
import os
import stat
import tomllib
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Table

from node.checkpoint.archive.address import masked
from node.config import (
    ENVIRONMENT,
    KNOWN,
    SHORT_NAMES,
    NodeConfig,
    config_document,
    write_atomically,
)
from node.core.errors import UsageFault, writing
from node.core.tables import unknown
from node.identity.invites import is_invite

BUILT_IN = "built in"
"""Source of a value that nobody has set."""
_CAN_WRITE = "make that file writable, or name another with --config"


@dataclass(frozen=True)
class SettingValue:
    """The value of a setting here. ``source``: a file, a variable of the environment, an option, or
    :data:`BUILT_IN`."""

    name: str
    value: Any
    source: str

    def document(self) -> dict[str, Any]:
        """JSON-ready values."""
        return dataclasses.asdict(self)

    def shown(self) -> str:
        """The value as a line: lists with commas, true and false as in TOML."""
        return text_of(self.value)


def text_of(value: Any) -> str:
    """A value as it is typed behind ``tutti config set NAME``."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def named(name: str) -> str:
    """The setting that a user means: its dotted name, or its short one. Raises UsageFault with the
    nearest name."""
    found = SHORT_NAMES.get(name, name)
    found = ENVIRONMENT.get(found, found)
    if found in KNOWN:
        return found
    near = difflib.get_close_matches(name, SHORT_NAMES, n=1, cutoff=0.8)
    if near:
        raise UsageFault(f"{name} is not a setting", f"did you mean  {near[0]}  ?")
    raise unknown(name, [*KNOWN])


def value_of(ours: NodeConfig, name: str) -> SettingValue:
    """The value of a setting, and where it comes from. Raises UsageFault for an unknown name."""
    name = named(name)
    said = config_document(ours)[name]
    return SettingValue(name, said["value"], said["source"] or BUILT_IN)


@dataclass(frozen=True)
class Explained:
    """Everything about a setting. ``kind``: its type in words; ``allowed``: the range in words, ""
    for any; ``short``: its short name, "" for none; ``variables``: of the environment."""

    here: SettingValue
    default: Any
    kind: str
    allowed: str
    meaning: str
    short: str
    variables: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """JSON-ready values."""
        found = dataclasses.asdict(self)
        return found.pop("here") | found

    def lines(self) -> list[str]:
        """Lines for people."""
        name = self.here.name
        if self.short:
            name += f"   (also {self.short})"
        lines = [name, f"  {self.meaning}", ""]
        kind = self.kind
        if self.allowed:
            kind += f", {self.allowed}"
        lines += [
            f"  type         {kind}",
            f"  default      {text_of(self.default) or '(empty)'}",
            f"  value        {self.here.shown() or '(empty)'}   ({self.here.source})",
            f"  environment  {', '.join(self.variables)}",
            f"  set it       tutti config set {self.here.name} VALUE",
            f"  once         tutti start --set {self.here.name}=VALUE",
        ]
        return lines


def explained(ours: NodeConfig, name: str) -> Explained:
    """Explain a setting. Raises UsageFault for an unknown name."""
    here = value_of(ours, name)
    setting = KNOWN[here.name]
    return Explained(
        here=here,
        default=setting.default,
        kind=setting.type_sentence,
        allowed=setting.rule.sentence,
        meaning=setting.text,
        short=next((s for s, name in SHORT_NAMES.items() if name == here.name), ""),
        variables=tuple(v for v, name in ENVIRONMENT.items() if name == here.name),
    )


@dataclass(frozen=True)
class SettingChange:
    """A change of the settings file. ``value``: the new one, None for none; ``before``: the value
    that the file had, None for none; ``closed``: others could read the file, and cannot any more,
    because the new value is a secret."""

    name: str
    value: Any
    before: Any
    file: Path
    closed: bool = False

    def document(self) -> dict[str, Any]:
        """JSON-ready values."""
        return dataclasses.asdict(self) | {"file": str(self.file)}

    def lines(self) -> list[str]:
        """Lines for people."""
        before = "was not set"
        if self.before is not None:
            before = f"was {text_of(self.before)}"
        if self.value is None:
            return [f"{self.name} is no longer set in {self.file}   ({before})"]
        lines = [f"{self.name} = {text_of(self.value)} in {self.file}   ({before})"]
        if self.closed:
            lines.append(
                f"this is a secret, and others could read {self.file}: only you can from now on"
            )
        return lines

    def overruled(self, ours: NodeConfig) -> str:
        """A sentence on the source that comes before the file, "" for none. ``ours``: settings that
        were read after the change."""
        source = ours.sources.get(self.name, "")
        if source in ("", str(self.file)):
            return ""
        return f"not in force: {source} comes before {self.file}"


def set_value(file: Path, name: str, text: str) -> SettingChange:
    """Keep a value in the user's file; comments and other settings in it stay. A file that gets a
    secret is for its owner alone from then on. Raises UsageFault for a name or a value that is
    none, and for a file that is no TOML; LocalFault if it cannot be written."""
    name = named(name)
    value = KNOWN[name].read(text)
    KNOWN[name].check(value)  # the file keeps the user's own words, not their bytes a second
    section, _, key = name.rpartition(".")
    secret = _is_secret(name, value)
    closed = secret and _is_open(file)
    with _edited(file, private=secret) as document:
        table = document
        if section:
            table = _table(document.setdefault(section, tomlkit.table()), section, file)
        before = table.get(key)
        table[key] = value
    return SettingChange(name, value, _plain(before), file, closed)


def _is_secret(name: str, value: Any) -> bool:
    """Return True for an admission token, an invite, which may hold one, and an address with a user
    or a password in it."""
    if name == "admission":
        return bool(value)
    texts = value if isinstance(value, list | tuple) else [value]
    return any(
        is_invite(text) or ("://" in text and masked(text) != text)
        for text in texts
        if isinstance(text, str)
    )


def _is_open(file: Path) -> bool:
    """Return True if others than its owner can read a file."""
    try:
        return bool(file.stat().st_mode & 0o077)
    except OSError:
        return False


def unset(file: Path, name: str) -> SettingChange:
    """Take a value out of the user's file. Raises as :func:`set_value`, and UsageFault if the file
    does not have it."""
    name = named(name)
    section, _, key = name.rpartition(".")
    with _edited(file) as document:
        table = document
        if section:
            table = _table(document.get(section, {}), section, file)
        if key not in table:
            raise UsageFault(
                f"{name} is not set in {file}", f"tutti config get {name}  says where it comes from"
            )
        before = table[key]
        del table[key]
        if isinstance(table, Table) and not table.as_string().strip():
            del document[section]  # with a comment in it, it stays
    return SettingChange(name, None, _plain(before), file)


def _table(item: Any, section: str, file: Path) -> MutableMapping[str, Any]:
    if not isinstance(item, MutableMapping):
        raise UsageFault(
            f"{section} is a value in {file}, and the name of a section",
            "take that line out; nothing was changed",
        )
    return item


def _plain(item: Any) -> Any:
    if item is None:
        return None
    return getattr(item, "unwrap", lambda: item)()


@contextmanager
def _edited(file: Path, *, private: bool = False) -> Iterator[tomlkit.TOMLDocument]:
    """The document of a file, which is written after the block if it ends well and reads back;
    ``private``: for its owner alone. Two commands at once do one after the other."""
    target = Path(os.path.realpath(file))  # a link to a file kept elsewhere stays a link
    with writing(file, _CAN_WRITE):
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(target.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        document = _read(target)
        yield document
        text = tomlkit.dumps(document)
        tomllib.loads(text)
        with writing(file, _CAN_WRITE):
            _replace(target, text.encode(), private=private)
    finally:
        os.close(lock)


def _replace(file: Path, content: bytes, *, private: bool) -> None:
    """Write the file anew, with the mode and the owner that it had; ``private``: without the rights
    of others."""
    try:
        had = file.stat()
    except FileNotFoundError:
        write_atomically(file, content)
        return
    mode = stat.S_IMODE(had.st_mode)
    if private:
        mode &= stat.S_IRWXU
    write_atomically(file, content, mode, (had.st_uid, had.st_gid))


def _read(file: Path) -> tomlkit.TOMLDocument:
    try:
        # As bytes: the ends of lines stay.
        return tomlkit.parse(file.read_bytes().decode())
    except FileNotFoundError:
        return tomlkit.document()
    except OSError as e:
        raise UsageFault(f"cannot read {file}: {e.strerror}", _CAN_WRITE) from e
    except (ValueError, TOMLKitError, RecursionError) as e:
        raise UsageFault(
            f"{file} is not TOML: {e}", "mend it, or move it away; nothing was changed"
        ) from e
