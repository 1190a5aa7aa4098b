"""The daemon as a service of this machine: ``service install``, ``uninstall`` and ``status``."""

from collections.abc import Sequence
from typing import Any

from node.commands.line import options, shared
from node.commands.line.usage import (
    FileArgument,
    VerbGroup,
    argument,
    command,
    flag,
    option,
    repeatable,
)
from node.core.errors import ExitCode


@command()
@argument(
    "what",
    metavar="[swarm.toml]",
    default=None,
    type=FileArgument(),
    help="Default: the swarm used last, else a solo one.",
)
@flag("--now", help="Start it at once, too.")
@repeatable(
    "--writable",
    type=FileArgument("dir"),
    metavar="DIR",
    help="A directory that the daemon may write beside its home, for  tutti export; repeatable.",
)
@option(
    "--memory-max",
    default="",
    metavar="SIZE",
    help="Main memory of the daemon and its children together, such as 16GiB or 80%: the kernel "
    "ends what takes more.",
)
@flag("--no-sandbox", help="See and write all of your files, as a daemon in a shell.")
@flag("--print", "show", help="Print the unit, and install nothing.")
@options.peer_settings
@options.joins
@options.run_settings
def install(
    *,
    what: str | None,
    now: bool,
    writable: Sequence[str] | None,
    memory_max: str,
    no_sandbox: bool,
    show: bool,
    settings: dict[str, Any],
    **given: Any,
) -> int:
    """Install the daemon of this home as a systemd service of this user, which starts at every
    login or boot.

    It starts with the options of  tutti start  that are given here, and with the TUTTI_* settings
    of this shell. Installed again it replaces the service.
    """
    from node.app.owner import service as owner

    ours = shared.config(given | settings)
    wanted = owner.Wanted(
        what=what or "",
        home=shared.HOME.get("home", ""),
        config=str(given["config"] or ""),
        writable=tuple(writable or ()),
        memory_max=memory_max,
        confined=not no_sandbox,
    )
    if show:
        print(owner.unit_of(ours, wanted).text(), end="")
    else:
        print(shared.advice("\n".join(owner.install(ours, wanted, now=now))))
    return ExitCode.OK


@command()
def uninstall() -> int:
    """Stop the service of this home, in order, and remove it. The home stays."""
    from node.app.owner import service as owner

    print(shared.advice("\n".join(owner.uninstall(shared.config({})))))
    return ExitCode.OK


@command()
@options.as_json
def status(as_json: bool) -> int:
    """Show the service of this home as systemd sees it. Exits with 0 if it runs, 3 if not, 34
    without systemd."""
    from node.app.owner import service as owner

    ours = shared.config({})
    found = owner.state(ours)
    if as_json:
        shared.print_json(found.document())
    else:
        print("\n".join(found.lines(ours.home_flag)))
    return found.code


service = VerbGroup(
    "service",
    {"Commands": (install, uninstall, status)},
    help="The daemon as a service of this machine, by systemd.",
)
