"""Starts of a daemon: in this process, in the background, and in a fresh image of the program."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from node.commands.line import shared
from node.core.errors import ExitCode, LocalFault
from node.core.version import VERSION

if TYPE_CHECKING:
    from node.config import NodeConfig
    from node.identity.invites import Invite
    from node.manifest import Manifest


def run_daemon(ours: NodeConfig, manifest: Manifest | None, invite: Invite | None) -> int:
    """Run the daemon in this process; returns its exit code."""
    if sys.stderr.isatty():
        shared.say(f"tutti {VERSION}   loading torch and hivemind, a few seconds")
    from node.app.daemon import main as run

    return run(ours, manifest, invite)


def in_background(ours: NodeConfig, words: Sequence[str], flags: Mapping[str, Any]) -> int:
    """Start a daemon with these words and settings, and return when it answers."""
    return launched(ours, [*_home(), *words, *_as_words(flags)])


def launched(ours: NodeConfig, words: Sequence[str]) -> int:
    """Start a daemon by this command line, and return when it answers. Raises LocalFault."""
    from node.app.launch import LOG, in_background

    def answers(pid: int) -> bool:
        with contextlib.suppress(LocalFault), shared.client(ours) as client:
            # Another start of this home may have been faster; 0: the system does not tell.
            return client.pid in (0, pid) and bool(client.status().addresses)
        return False

    log = ours.home / LOG
    pid = in_background(words, log, answers)
    about = ours.home_flag
    print(f"started  pid {pid}, in the background")
    print(f"log      {log}, or  tutti{about} logs -f")
    print(f"see      tutti{about} status ,  tutti{about} monitor")
    print(f"stop     tutti{about} stop")
    return ExitCode.OK


def again(manifest: Path, flags: Mapping[str, Any]) -> NoReturn:
    """Become a fresh ``tutti start`` of this swarm, whichever the settings name: the observer's
    libp2p and the daemon's hivemind cannot live in one process."""
    from node.app.launch import PROGRAM, become

    become([PROGRAM, *_home(), "start", str(manifest), *_as_words(flags)])


def _home() -> list[str]:
    if "home" not in shared.HOME:
        return []
    return ["--home", shared.HOME["home"]]


def _as_words(flags: Mapping[str, Any]) -> tuple[str, ...]:
    from node.app.launch import as_flags

    return as_flags({name: value for name, value in flags.items() if value is not None})
