"""The result of a replay, for people and as JSON. Pure."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from node.coordinator.recording.player import Difference, Played, Player
from node.core.ids import short
from node.core.version import VERSION
from node.transport.port import printable

MOST_FIELDS = 8
"""Fields that are shown of two actions that differ."""
MOST_TEXT = 160
"""Characters that are shown of one value."""
MOST_LINE = 1024
"""Characters of a line."""
DEPTH = 16
"""Levels of a document that are compared field by field."""
MISSING = "nothing"

Shared = Callable[[str], Any]


def lines(player: Player, *, damaged: bool) -> list[str]:
    """The result of a replay, without control characters: somebody else wrote the recording.
    ``damaged``: it went only to the first damaged record."""
    said: list[str] = []
    for line in _lines(player, damaged=damaged):
        indent = len(line) - len(line.lstrip(" "))
        said.append(" " * indent + printable(line, MOST_LINE))
    return said


def _lines(player: Player, *, damaged: bool) -> list[str]:
    played = player.played
    said: list[str] = []
    if (setup := played.setup) is not None:
        run = f"run {setup.run.run_id[:12]}" if setup.run.run_id else "a run without an id"
        other = f"; this is tutti {VERSION}" if setup.version != VERSION else ""
        by = f"recorded by peer {short(setup.peer)} with tutti {setup.version}"
        said.append(f"{by}, {run}{other}")
    for machine, count in sorted(played.events.items()):
        said.append(f"{machine:<8}{count} events, {played.machines[machine]} started")
    if played.difference is not None:
        said += difference_lines(played.difference, player.shared)
    else:
        said.append(f"the same actions: {played.actions}")
    if not damaged:
        said.append(ending(played))
    return said


def ending(played: Played) -> str:
    """How the recording ended."""
    if played.early:
        return f"the recording ended before the daemon: {played.end}"
    if played.end:
        return f"the recording is complete: {played.end}"
    return (
        "the recording has no end: the daemon was killed or still runs, or the file was cut there"
    )


def difference_lines(d: Difference, shared: Shared) -> list[str]:
    """The first event to which a fresh machine answers otherwise."""
    said = [
        f"other actions of the {d.machine} at its event {d.number}, {d.event[0]} at {d.now:.3f} s "
        f"(record {d.record}), action {d.at + 1} of {max(len(d.expected), len(d.found))}:"
    ]
    expected = _action(d.expected, d.at)
    found = _action(d.found, d.at)
    if expected is None or found is None or expected[0] != found[0]:
        return [*said, f"  expected  {_text(expected)}", f"  found     {_text(found)}"]
    rows = list(differing(expected[1], found[1], shared))
    for name, was, now in rows[:MOST_FIELDS]:
        said += [
            f"  {expected[0]}.{name}",
            f"    expected  {_text(was)}",
            f"    found     {_text(now)}",
        ]
    if len(rows) > MOST_FIELDS:
        said.append(f"  and {len(rows) - MOST_FIELDS} more fields")
    return said


def differing(
    expected: Any, found: Any, shared: Shared, depth: int = DEPTH
) -> Iterator[tuple[str, Any, Any]]:
    """The fields in which two documents differ: name, expected and found value. A plan is looked at
    field by field. ``depth``: levels to go down at most."""
    if expected == found:
        return
    if not depth:
        yield "", expected, found
        return
    if isinstance(expected, str) and isinstance(found, str):
        pair = _opened(shared(expected)), _opened(shared(found))
        if None not in pair:
            yield from differing(*pair, shared, depth - 1)
            return
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in sorted(expected.keys() | found.keys()):
            pair = expected.get(name, MISSING), found.get(name, MISSING)
            for inner, was, now in differing(*pair, shared, depth - 1):
                yield f"{name}.{inner}" if inner else name, was, now
        return
    yield "", expected, found


def document(player: Player) -> dict[str, Any]:
    """The result of a replay as JSON."""
    played = player.played
    d = played.difference
    found = None
    if d is not None:
        found = {
            "record": d.record,
            "machine": d.machine,
            "event": d.number,
            "kind": d.event[0],
            "at_s": d.now,
            "action": d.at,
            "expected": _action(d.expected, d.at),
            "found": _action(d.found, d.at),
        }
    setup = played.setup
    origin = {"peer": "", "run": "", "version": ""}
    if setup is not None:
        origin = {"peer": setup.peer, "run": setup.run.run_id, "version": setup.version}
    return {
        **origin,
        "records": played.records,
        "machines": dict(played.machines),
        "events": dict(played.events),
        "actions": played.actions,
        "end": played.end,
        "difference": found,
    }


def _action(actions: list[Any], number: int) -> Any:
    """Action ``number`` of the answer to an event; None if the answer has fewer actions."""
    if number >= len(actions):
        return None
    return actions[number]


def _opened(value: Any) -> dict[str, Any] | list[Any] | None:
    """A shared plan as a document, or the members of a shared set; None for anything else."""
    if isinstance(value, list):
        return value
    if not isinstance(value, str):
        return None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    return found


def _text(value: Any) -> str:
    text = MISSING if value is None else json.dumps(value)
    if len(text) > MOST_TEXT:
        return f"{text[: MOST_TEXT - 1]}…"
    return text
