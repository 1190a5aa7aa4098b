"""A daemon that rests: ``pause`` and ``resume``."""

from node.commands.line import shared
from node.commands.line.usage import argument, command, flag, option


@command()
@argument(
    "duration",
    metavar="[DURATION]",
    default=None,
    help="2h, 90m, 1h30m, 1d; default: until  tutti resume.",
)
@option("--reason", default="", help="A word for this machine's people.")
@flag("--now", help="Do not finish the epoch under way; others do its part again.")
def pause(duration: str | None, reason: str, now: bool) -> int:
    """Leave the training and give the memory back. The daemon goes on: it keeps its identity and
    its connections, and may take another stage after a long pause."""
    from node.control import pausing

    with shared.client_when_back() as client:
        return pausing.pause(client, duration, reason, now=now)


@command()
def resume() -> int:
    """End a pause: take a stage again and train, whatever --idle-only, --hours and --max-load say
    at this moment."""
    from node.control import pausing

    with shared.client_when_back() as client:
        return pausing.resume(client)
