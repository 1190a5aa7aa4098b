"""The page of a run in a browser: ``web``."""

from pathlib import Path

import click

from node.commands.line import shared
from node.commands.line.usage import OneOf, command, flag, option
from node.core import interrupts
from node.core.errors import ExitCode

DIRECTORY = click.Path(file_okay=False, path_type=Path)
WHEN = ("viewed", "always", "never")
"""When the model goes on with the prompt, here so that a wrong word is refused before anything is
loaded."""


@command()
@option("--host", default="127.0.0.1", help="Address to listen on.")
@option("--port", default=8010, type=click.IntRange(0, 65535), help="0 picks one.")
@option(
    "--token",
    default="",
    envvar="TUTTI_WEB_TOKEN",
    show_envvar=True,
    help="What visitors type at the entrance; needed where others reach it.",
)
@option("--prompt", default="The ", metavar="TEXT", help="What the model goes on with at times.")
@option(
    "--sample",
    default=WHEN[0],
    type=OneOf(WHEN),
    metavar="WHEN",
    help="When it does: viewed (while somebody looks), always, never.",
)
@flag("--no-chat", help="Do not let visitors talk with the model.")
@option(
    "--export",
    type=DIRECTORY,
    metavar="DIR",
    help="Write the page as it is now into DIR, and end.",
)
def web(
    host: str,
    port: int,
    token: str,
    prompt: str,
    sample: str,
    no_chat: bool,
    export: Path | None,
) -> int:
    """Show the run in a browser, until interrupted."""
    import asyncio

    with shared.client() as client:
        from node.core.numbers import several
        from node.web import command as page

        if export is not None:
            files = asyncio.run(page.export(client.path, export, prompt))
            shared.say(f"wrote {several(len(files), 'file')}; open {export / 'index.html'}")
            return ExitCode.OK
        with page.listen(host, port, token) as sock:
            where = f"[{host}]" if ":" in host else host
            shared.say(
                f"showing the run at http://{where}:{sock.getsockname()[1]}/  (Ctrl-C ends it)"
            )
            serving = page.serve(
                client.path, sock, token, prompt=prompt, when=sample, chat=not no_chat
            )
            with interrupts.raising():
                return asyncio.run(serving)
