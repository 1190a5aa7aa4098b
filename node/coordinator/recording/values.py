"""Values of events and machines as JSON, and back by their types. Pure. Enters: frozen dataclasses
of the protocol. Leaves: JSON documents in which every plan is named by its hash. Never: a class
that the reader does not name itself; nothing is unpickled.

A dataclass becomes an object of the fields that differ from their defaults; a group of them has no
object of its own (:data:`BESIDE`). Reading checks every
field against its annotation."""

import base64
import dataclasses
import hashlib
import struct
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import lru_cache
from typing import Any

from node.coordinator.recording.chain import text_of
from node.core.errors import WireError
from node.core.journey import Plan
from node.epoch.events import Capacity, EpochTally, Membership, OuterReport
from node.epoch.facts import EvaluationFacts, GlobalBatch
from node.scheduler.router import SearchJob

MANY = 8
"""Members of a set from which on it is written once and named by its hash."""
NAME = 32
"""Hex digits of the name of a set or a search."""
BESIDE = (Capacity, EpochTally, OuterReport, Membership, GlobalBatch, EvaluationFacts)
"""Groups of fields that a record has beside the other fields of the value around them."""


class ValueGroup:
    """Base of a dataclass that is such a group too."""


class ValueWriter:
    """Converts values to JSON. ``share(name, document)`` is called with every plan and every large
    set, before the value in which it is named; the receiver keeps each once."""

    def __init__(self, share: Callable[[str, Callable[[], Any]], None]) -> None:
        self._share = share
        self._last_set: tuple[AbstractSet[Any], str] = frozenset(), ""
        """The large set written last, and its name: most are the one before."""

    def event(self, value: Any) -> list[Any]:
        """An event or an action: the name of its class and its fields."""
        return [type(value).__name__, self.fields(value)]

    def fields(self, value: Any) -> dict[str, Any]:
        """The fields of a dataclass that differ from their defaults."""
        found: dict[str, Any] = {}
        for name, default in _defaults(type(value)):
            field = getattr(value, name)
            if _is_group(type(field)):
                found |= self.fields(field)
            elif default is dataclasses.MISSING or field != default:
                found[name] = self.value(field)
        return found

    def value(self, value: Any) -> Any:
        """Any value of the protocol."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, bytes):
            return base64.b64encode(value).decode()
        if isinstance(value, Plan):
            self._share(value.hash, lambda: plan_document(value))
            return value.hash
        if isinstance(value, SearchJob):
            return search_name(value)
        if isinstance(value, Enum):
            return value.value
        if dataclasses.is_dataclass(value):
            return self.fields(value)
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, AbstractSet):
            return self._set(value)
        if isinstance(value, Sequence):
            return [self.value(each) for each in value]
        raise TypeError(f"a {type(value).__name__} cannot be recorded")

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        if all(isinstance(key, str) for key in value):
            return {key: self.value(each) for key, each in value.items()}
        rows = [[self.value(key), self.value(each)] for key, each in value.items()]
        return sorted(rows, key=lambda row: text_of(row[0]))

    def _set(self, value: AbstractSet[Any]) -> Any:
        if len(value) < MANY:
            return sorted((self.value(each) for each in value), key=text_of)
        last, name = self._last_set
        if value is not last:
            members = sorted((self.value(each) for each in value), key=text_of)
            name = hashlib.sha256(text_of(members).encode()).hexdigest()[:NAME]
            self._last_set = value, name
            self._share(name, lambda: members)
        return name


def plan_document(plan: Plan) -> str:
    """A plan as others read it."""
    return plan.canonical().decode()


def search_name(job: SearchJob) -> str:
    """The name of a search in a recording: only its leader needs the search itself, and has it."""
    digest = hashlib.sha256()
    for row in job.problem.delays:  # a million numbers among a thousand peers: text takes a second
        digest.update(struct.pack(f"<{len(row)}d", *row))
    rest = dataclasses.replace(job, problem=dataclasses.replace(job.problem, delays=()))
    writer = ValueWriter(lambda name, document: None)
    digest.update(text_of(writer.fields(rest)).encode())
    return digest.hexdigest()[:NAME]


class ValueReader:
    """Converts JSON to values. ``shared``: documents of plans and sets by name; ``searches``: the
    searches that the machine has asked for, by name."""

    def __init__(self, shared: Mapping[str, Any], searches: Mapping[str, SearchJob]) -> None:
        self._shared = shared
        self._searches = searches
        self._plans: dict[str, Plan] = {}

    def event(self, document: Any, kinds: Mapping[str, type[Any]]) -> Any:
        """The event. Raises WireError for a class that is not in ``kinds``."""
        if not isinstance(document, list) or len(document) != 2:
            raise WireError("an event is the name of its class and its fields")
        kind = kinds.get(str(document[0]))
        if kind is None:
            raise WireError(f"there is no event {str(document[0])[:64]}")
        return self.fields(document[1], kind)

    def fields(self, document: Any, kind: type[Any]) -> Any:
        """A dataclass. Raises WireError for anything that is none of this kind."""
        if not isinstance(document, dict):
            raise WireError(f"expected the fields of a {kind.__name__}")
        rest = dict(document)
        given: dict[str, Any] = {}
        for name, hint in _hints(kind).items():
            if _is_group(hint):
                group = {key: rest.pop(key) for key in _hints(hint) if key in rest}
                given[name] = self.fields(group, hint)
            elif name in rest:
                given[name] = self.value(rest.pop(name), hint)
        if rest:
            raise WireError(f"a {kind.__name__} has no field {min(rest)[:64]}")
        try:
            return kind(**given)
        except (TypeError, ValueError) as e:
            raise WireError(f"not a {kind.__name__}: {e}") from e

    def value(self, document: Any, hint: Any) -> Any:
        """A value of this type. Raises WireError for any other."""
        hint = getattr(hint, "__supertype__", hint)
        of = typing.get_origin(hint)
        if of in (typing.Union, types.UnionType):
            return self._optional(document, hint)
        if of is tuple:
            return self._tuple(document, typing.get_args(hint))
        if of in (frozenset, set):
            (each,) = typing.get_args(hint)
            return of(self.value(one, each) for one in _listed(self._found(document)))
        if of in (dict, Mapping):
            return self._mapping(document, *typing.get_args(hint))
        if of is not None:
            raise WireError(f"values of the type {hint} are not recorded")
        if hint is Plan:
            return self._plan(document)
        if hint is SearchJob:
            return self._search(document)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.fields(document, hint)
        return _plain(document, hint)

    def _optional(self, document: Any, hint: Any) -> Any:
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        if document is None and len(kinds) < len(typing.get_args(hint)):
            return None
        if len(kinds) != 1:
            raise WireError(f"values of the type {hint} are not recorded")
        return self.value(document, kinds[0])

    def _tuple(self, document: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
        rows = _listed(document)
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            return tuple(self.value(row, kinds[0]) for row in rows)
        if len(rows) != len(kinds):
            raise WireError(f"{len(rows)} values where {len(kinds)} belong")
        return tuple(self.value(row, kind) for row, kind in zip(rows, kinds, strict=True))

    def _mapping(self, document: Any, key: Any, each: Any) -> dict[Any, Any]:
        if isinstance(document, dict):
            rows = list(document.items())
        else:
            rows = _listed(document)
        if not all(isinstance(row, list | tuple) and len(row) == 2 for row in rows):
            raise WireError("expected pairs of a key and a value")
        return {self.value(k, key): self.value(v, each) for k, v in rows}

    def _found(self, document: Any) -> Any:
        """A set, or the set of that name."""
        if not isinstance(document, str):
            return document
        if document not in self._shared:
            raise WireError("names a set that no earlier record has")
        return self._shared[document]

    def _plan(self, document: Any) -> Plan:
        known = self._plans.get(document) if isinstance(document, str) else None
        if known is not None:
            return known
        text = self._found(document)
        if not isinstance(text, str) or not isinstance(document, str):
            raise WireError("names a plan that no earlier record has")
        plan = Plan.parse(text.encode())
        if plan.hash != document:
            raise WireError("names a plan that has another hash")
        self._plans = {document: plan}  # the newest: most events of a while name one plan
        return plan

    def _search(self, document: Any) -> SearchJob:
        job = self._searches.get(document) if isinstance(document, str) else None
        if job is None:
            raise WireError("is the result of a search that was not asked for")
        return job


_ACCEPTED: Mapping[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int, bool),
    float: (float, int, bool),
    str: (str,),
}
"""Types of JSON that stand for a value of each type, as in Python itself."""


def _listed(document: Any) -> list[Any]:
    if not isinstance(document, list):
        raise WireError("expected a list")
    return document


def _plain(document: Any, kind: Any) -> Any:
    """A number, text, bytes or a member of an Enum."""
    if kind is bytes and isinstance(document, str):
        try:
            return base64.b64decode(document, validate=True)
        except ValueError as e:
            raise WireError(f"no base64: {e}") from e
    if type(document) in _ACCEPTED.get(kind, ()):
        return document
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(document)
        except ValueError as e:
            raise WireError(str(e)) from e
    raise WireError(f"a {type(document).__name__} is no {getattr(kind, '__name__', kind)}")


@lru_cache(256)
def _defaults(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """The fields of a dataclass, each with its default; MISSING for none."""
    found: list[tuple[str, Any]] = []
    for field in dataclasses.fields(kind):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found.append((field.name, default))
    return tuple(found)


@lru_cache(256)
def _hints(kind: type[Any]) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _is_group(kind: Any) -> bool:
    """Return True for a dataclass whose fields stand beside those of the value around it."""
    return kind in BESIDE or (isinstance(kind, type) and issubclass(kind, ValueGroup))
