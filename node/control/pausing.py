"""The verbs ``pause`` and ``resume``: ask the daemon, print its sentence, return an exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from node.availability.words import seconds_of
from node.core.errors import ExitCode
from node.core.interrupts import telling

if TYPE_CHECKING:
    from node.control.client import ControlClient


def pause(client: ControlClient, duration: str | None, reason: str, *, now: bool) -> ExitCode:
    """Pause for a duration such as "2h", or until a resume if None, and wait until the daemon has
    given its memory back. Raises UsageFault for a text that is no duration."""
    seconds = None
    if duration is not None:
        seconds = seconds_of(duration)
    with telling("the daemon goes on pausing;  tutti resume  ends it"):
        print(client.pause(seconds, reason, now=now))
    return ExitCode.OK


def resume(client: ControlClient) -> ExitCode:
    """Let the daemon work again."""
    print(client.resume())
    return ExitCode.OK
