"""Orders of a run's owner to all of its peers: ``swarm pause``, ``swarm resume``, ``swarm end``."""

import sys
import time

import click

from node.commands.line import options, shared
from node.commands.line.usage import command, flag, option
from node.core import interrupts
from node.core.errors import ExitCode, UsageFault

_delay = option(
    "--in",
    "delay",
    metavar="DURATION",
    default="30s",
    help="When it is in force, such as 30s or 2h. Every peer should know it by then.",
)
_reason = option(
    "--reason", default="", metavar="TEXT", help="For everybody to see, up to 120 characters."
)


@command()
@_reason
@_delay
@options.as_json
def pause(reason: str, delay: str, as_json: bool) -> int:
    """Pause the whole run. Only its owner can. Every peer finishes the epoch, writes its state,
    gives its memory back and waits for  tutti swarm resume ."""
    return _order("pause", reason, delay, as_json)


@command()
@_reason
@options.as_json
def resume(reason: str, as_json: bool) -> int:
    """Let a paused run go on where it was. Only its owner can."""
    return _order("resume", reason, "", as_json)


@command()
@_reason
@_delay
@flag("--yes", "-y", help="Do not ask.")
@options.as_json
def end(reason: str, delay: str, yes: bool, as_json: bool) -> int:
    """End the whole run, for good. Only its owner can. Every peer finishes the epoch, writes its
    state, and its daemon ends. Export the model before:  tutti export DIR ."""
    if not yes:
        if not sys.stdin.isatty():
            raise UsageFault(
                "an end is final: no order takes it back",
                "export the model if you want it now ( tutti export DIR ), and repeat with  --yes",
            )
        shared.say("an end is final; the model is exported with  tutti export DIR  before")
        with interrupts.raising():  # the prompt leaves the terminal as it was
            if not click.confirm("End the run for all of its peers?", err=True):
                return ExitCode.REFUSED
    return _order("end", reason, delay, as_json)


def _order(word: str, reason: str, delay: str, as_json: bool) -> int:
    """Sign an order to the daemon's run, and give it to the daemon; returns the exit code. Raises
    UsageFault if the run is not known here or nobody owns it, Refused if this node does not own
    it."""
    from node.availability.words import clock_words, seconds_of
    from node.identity.keys import Identity
    from node.orders.order import Verb, next_number, signed

    seconds = 0.0
    if delay not in ("", "0", "0s"):
        seconds = seconds_of(delay)
    ours = shared.config({})
    with shared.client(ours) as client:
        snapshot = client.status()
        manifest = shared.manifest_of_run(ours, snapshot.swarm.run_id)
        wall = time.time()
        begins = wall + seconds
        text = signed(
            manifest.run_id,
            manifest.swarm.owner,
            Identity.load(ours.identity_path),
            Verb(word),
            number=next_number(snapshot.order.number, wall),
            begins=begins,
            reason=reason,
        )
        number = client.order(text)
    if as_json:
        shared.print_json(
            {"number": number, "verb": word, "begins": begins, "run_id": manifest.run_id}
        )
    else:
        said = (
            f"signed   {word} of run {manifest.run_id[:12]}, from {clock_words(begins)} on; "
            "see  tutti status"
        )
        print(shared.advice(said))
    return ExitCode.OK
