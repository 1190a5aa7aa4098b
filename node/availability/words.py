"""Sentences about a pause. Pure."""

import re
import time
from collections.abc import Mapping

from node.availability.machine import By, Pause
from node.core.errors import UsageFault

PUBLIC: Mapping[By, str] = {
    By.OPERATOR: "by its operator",
    By.RUN: "by the run's owner",
    By.MEMORY: "its memory is in use",
    By.HOURS: "outside its hours",
    By.GPU: "its machine is in use",
    By.LOAD: "its machine is in use",
    By.INPUT: "its machine is in use",
}
"""Reasons for other peers. They name no program and no time, which are nobody's business."""
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(min|[smhd])")
_PAST = re.compile(r"^[^(:]* ago\b")
"""Pattern of a reason that names a time in the past, before any words of a person."""
MOST_S = 30 * 86400.0
"""Longest pause with an end, in seconds."""


def reason(pause: Pause, ends_at: float | None) -> str:
    """One line for this machine's people, without "paused". ``ends_at``: end of the pause in Unix
    seconds, None while nobody knows."""
    match pause.by:
        case By.OPERATOR:
            until = "until  tutti resume"
            if ends_at is not None:
                until = f"until {clock_words(ends_at)}"
            if pause.detail:
                return f"by its operator ({pause.detail}), {until}"
            return f"by its operator, {until}"
        case By.RUN:
            said = f"by the run's owner {ago(time.time() - pause.since)}"
            if pause.detail:
                return f"{said}: '{pause.detail}'"
            return said
        case By.MEMORY:
            return f"its memory is in use, tried again within a minute: {pause.detail}"
        case By.HOURS:
            return f"outside its hours {pause.detail}"
        case By.GPU:
            return f"another program uses the GPU: {pause.detail}"
        case By.LOAD:
            return f"other programs need the cores: {pause.detail} of them"
        case By.INPUT:
            return f"this machine is in use, until {pause.detail} min pass without key and mouse"


def paused_words(reason: str) -> str:
    """A reason with its verb: "by its operator" -> "paused by its operator". A reason that is a
    whole sentence follows a colon."""
    if reason.startswith(("by ", "outside ")):
        return f"paused {reason}"
    return f"paused: {reason}"


def is_paused(reason: str) -> str:
    """The same behind a noun: "is paused by its operator", and "was paused by the run's owner 12
    min ago"."""
    verb = "is"
    if _PAST.search(reason):
        verb = "was"
    return f"{verb} {paused_words(reason)}"


def ago(seconds: float) -> str:
    """A moment that is past: "12 min ago"."""
    if seconds < 60:
        return "a moment ago"
    return f"{rounded(seconds)} ago"


def rounded(seconds: float) -> str:
    """A duration in one unit: "12 min"."""
    whole = int(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 2 * 3600:
        return f"{whole // 60} min"
    if whole < 2 * 86400:
        return f"{whole // 3600} h"
    return f"{whole // 86400} d"


def clock_words(at: float) -> str:
    """A moment in Unix seconds as local time, with the date if it is not today."""
    there = time.localtime(at)
    if time.strftime("%F", there) == time.strftime("%F"):
        return time.strftime("%H:%M", there)
    return time.strftime("%F %H:%M", there)


def seconds_of(text: str) -> float:
    """Seconds of "2h", "90m", "1h30m", "45s", "1d". Raises UsageFault for anything else, for 0 and
    for more than 30 days."""
    word = text.strip().lower()
    parts = _PART.findall(word)
    if not parts or _PART.sub("", word).strip():
        raise UsageFault(f"{text!r} is no duration", "write such as  2h , 90m , 1h30m  or  1d")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not 0 < seconds <= MOST_S:
        raise UsageFault(f"a pause of {text} is not possible", "at most 30 days, or no duration")
    return seconds
