"""Parts of commands: this node's settings, its daemon, and output."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from node.core.errors import LocalFault, NotRunning, UsageFault
from node.core.interrupts import telling

if TYPE_CHECKING:
    from node.config import NodeConfig
    from node.control.client import ControlClient
    from node.manifest import Manifest

HOME_OPTION = "--home"
HOME: dict[str, str] = {}
"""The directory given by ``--home``, which may stand anywhere on the command line: under "home",
and absent if it was not given."""
LOOK_S = 0.2
"""Seconds between two looks at whether a daemon answers again."""


def take_home(words: list[str]) -> list[str]:
    """Take ``--home DIR`` out of a command line into :data:`HOME`, and return the other words.
    Raises UsageFault if the directory is missing."""
    rest: list[str] = []
    it = iter(words)
    for word in it:
        if word == "--":
            return [*rest, word, *it]
        if word == HOME_OPTION:
            value = next(it, None)
            if value is None:
                raise UsageFault("--home needs a directory", "tutti --home DIR status")
            HOME["home"] = value
        elif word.startswith(f"{HOME_OPTION}="):
            HOME["home"] = word.partition("=")[2]
        else:
            rest.append(word)
    return rest


def config(flags: Mapping[str, Any]) -> NodeConfig:
    """Settings of this node, with the ones given on the command line; None stands for one that was
    not given. Raises UsageFault."""
    from node.config import NodeConfig

    return NodeConfig.load({**HOME, **flags})


def client(ours: NodeConfig | None = None) -> ControlClient:
    """A client of the daemon of ``ours``. Without ``ours`` it is the daemon of the named home, and
    no settings are read, which would take as long as the question. Raises NotRunning."""
    from node.control.client import ControlClient
    from node.core.home import control_socket, home_named, user_dir

    if ours:
        home = ours.home
    else:
        home = home_named(HOME.get("home")) or user_dir("data")
    return ControlClient(control_socket(home), home=home)


def client_when_back(ours: NodeConfig | None = None) -> ControlClient:
    """As :func:`client`, for a command that changes the daemon. A daemon that starts itself anew,
    to host another stage, is waited for. Raises NotRunning if none runs, or it does not come
    back."""
    try:
        return client(ours)
    except NotRunning as fault:
        missing = fault
    from node.app.last import last_known, lives
    from node.control.words import clean

    try:
        last = last_known(ours or config({}))
    except LocalFault:  # settings that cannot be read are no reason to say less than before
        raise missing from None
    if not last.starts(time.time()):
        raise missing
    say(f"the daemon starts anew ({clean(last.why, 300)}): waiting until it answers")
    with telling("the daemon was asked nothing, and goes on starting"):
        while lives(last.pid) and last.starts(time.time()):
            time.sleep(LOOK_S)
            with suppress(NotRunning):
                return client(ours)
    raise with_last_known(missing)


def with_last_known(fault: NotRunning) -> NotRunning:
    """The fault of a command without a daemon, with the last run of this home, its checkpoints, and
    the next step if the run was ended."""
    from node.app.last import last_known

    try:
        last = last_known(config({}))
    except LocalFault:  # settings that cannot be read are no reason to say less than before
        return fault
    now = time.time()
    lines = last.lines(now)
    details = {}
    if lines:
        details = {"last": last.document()}
    step = last.next_step or fault.next_step
    if last.starts(now):
        step = "it answers again when it has loaded; look again in a moment"
    return NotRunning("\n".join([fault.what, *lines]), step, details=details)


def home_flag() -> str:
    """The flag with which the command line named the home: " --home DIR", or "" without a flag."""
    if "home" not in HOME:
        return ""
    return f" {HOME_OPTION} {shlex.quote(HOME['home'])}"


def advice(text: str) -> str:
    """The text with the home of this command line named in its commands."""
    from node.core.home import advice

    return advice(text)


def manifest_of_run(ours: NodeConfig, run_id: str) -> Manifest:
    """The manifest of the run in which the daemon takes part; ``run_id``: as its status says it.
    Raises UsageFault if it takes part in none, or in one that is not known here."""
    known = None
    if run_id:
        known = ours.remembered(run_id)
    if known is None:
        raise UsageFault(
            "the daemon takes no part in a run that is known here", "see  tutti status"
        )
    return known[0]


def say(text: str) -> None:
    """Print a line on stderr, which has everything that is not data."""
    print(advice(text), file=sys.stderr, flush=True)


def print_json(document: Any) -> None:
    """Print a document on stdout."""
    from node.control.commands import say_json

    say_json(document)


def bold() -> bool:
    """Return True if stdout is a terminal and its user wants colour."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
