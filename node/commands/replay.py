"""Recordings of a daemon: ``replay``."""

from pathlib import Path

from node.commands.line import options
from node.commands.line.usage import argument, command
from node.core.errors import UsageFault


@command()
@argument(
    "file",
    metavar="FILE",
    type=options.FILE,
    help="A recording by  tutti start --record FILE.",
)
@options.as_json
def replay(file: Path, as_json: bool) -> int:
    """Play a daemon's recording into fresh state machines, and show the first other action."""
    if not file.is_file():
        raise UsageFault(f"there is no {file}", "name a file of  tutti start --record")
    from node.coordinator.recording.command import run_command

    return run_command(file, as_json=as_json)
