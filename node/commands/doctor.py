"""Faults of this machine: ``doctor``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node.commands.line import options, shared
from node.commands.line.usage import OneOf, argument, command, flag
from node.core.errors import UsageFault

CHECKS = ("versions", "device", "disk", "data", "service", "clock", "net")
"""Checks of ``tutti doctor``, in the order in which they run; the first fault gives the exit
code."""
ASKING = ("clock", "net")
"""Checks that ask other peers."""


@command()
@argument(
    "what",
    metavar="[CHECK]",
    default=None,
    type=OneOf(CHECKS),
    help="versions, device, disk, data, service, clock or net. Default: all of them.",
)
@argument(
    "places",
    metavar="[INVITE|MULTIADDR...]",
    nargs=-1,
    help="Default: the invite of the swarm used last.",
)
@flag("--fix", help="Mend what can be mended without a loss, and look again.")
@flag("--offline", help="Ask no other peer: all checks but clock and net.")
@options.verbose
@options.config
@options.settings
@options.as_json
def doctor(
    *,
    what: str | None,
    places: Sequence[str],
    fix: bool,
    offline: bool,
    verbose: bool,
    config: Path | None,
    settings: dict[str, Any],
    as_json: bool,
) -> int:
    """Find out what does not work here, and why: cause, effect and fix of each fault. No daemon
    needed.

    net looks for the swarm layer by layer. Exits with the code of the first fault;
    docs/operating.md lists them.
    """
    from node.app import doctoring

    ours = shared.config({"config": config} | settings)
    if offline and what in ASKING:
        raise UsageFault(f"{what} and --offline", f"{what} asks other peers: give one of the two")
    wanted = CHECKS
    if offline:
        wanted = tuple(name for name in CHECKS if name not in ASKING)
    if what is not None:
        wanted = (what,)
    return doctoring.run(
        ours,
        wanted,
        places,
        fix=fix,
        verbose=verbose,
        as_json=as_json,
        home_flag=shared.home_flag(),
    )
