"""Receipts of work: ``ledger``, ``ledger export``."""

from collections.abc import Sequence
from pathlib import Path

import click

from node.commands.line import options, shared
from node.commands.line.usage import VerbGroup, argument, command
from node.core.errors import ExitCode


@command()
@argument(
    "files",
    metavar="[FILE]...",
    nargs=-1,
    type=options.FILE,
    help="Files of receipts, of any peers. Default: this node's own.",
)
@options.as_json
def show(files: Sequence[Path], as_json: bool) -> int:
    """Verify receipts of work, and show their sums for each peer. No daemon is asked.

    A receipt counts if both neighbours on a micro-batch's route confirm it, in an epoch that a
    quorum certificate proves. Exit code 5: something was refused; 9: records are damaged.
    """
    from node.tools import ledger as tool

    ours = shared.config({})
    found = tool.load(files or tool.files_of(ours.home), ours.names)
    if as_json:
        shared.print_json(tool.document(found))
    else:
        print("\n".join(tool.picture(found)))
    return found.code


@command("export")
@argument("file", metavar="FILE", type=options.FILE, help="File to write.")
def export_receipts(file: Path) -> int:
    """Write this node's receipts to one file, which anybody can verify without a daemon."""
    from node.tools import ledger as tool

    count, nbytes = tool.export(shared.config({}).home, file)
    shared.say(tool.exported(file, count, nbytes))
    return ExitCode.OK


class _WithoutVerb(VerbGroup):
    """A group that takes words without a verb as those of ``show``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {*self.commands, *ctx.help_option_names}
        if not ctx.resilient_parsing and (not args or args[0] not in known):
            args = ["show", *args]
        return super().parse_args(ctx, args)


ledger = _WithoutVerb(
    "ledger",
    {"Commands": (show, export_receipts)},
    help="Verify receipts of work and their sums. Without a verb: show.",
)
