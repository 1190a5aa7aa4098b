"""Text from the model of the live swarm: ``generate``, ``chat`` and ``serve``."""

from typing import Any

import click

from node.commands.line import options, shared
from node.commands.line.usage import argument, command, option
from node.core import interrupts

SEED = click.IntRange(0, 2**63 - 1)
TEMPERATURE = click.FloatRange(0.0, 10.0)
LENGTH = click.IntRange(1, 4096)


@command()
@argument("prompt", metavar="TEXT", help="What the model goes on from.")
@option("--max-tokens", default=100, type=LENGTH, help="Length of what it says, in tokens.")
@option("--temperature", default=0.8, type=TEMPERATURE, help="0 always takes the likeliest.")
@option(
    "--top-k",
    default=0,
    type=click.IntRange(0, 2**31 - 1),
    help="Choose among so many; 0 among all.",
)
@options.top_p
@option("--seed", default=0, type=SEED, help="The same seed and parameters give the same text.")
@options.drop_stages
@options.first
@options.as_json
def generate(drop_stages: list[int], first: int, as_json: bool, **asked: Any) -> int:
    """Generate text with the live swarm. A stage that no peer serves is left out if the run's skip
    ratio allows it."""
    from node.control import commands
    from protos.control_pb2 import GenerateRequest, LeaveOut

    leave_out = LeaveOut(stages=drop_stages, after=first)
    request = GenerateRequest(leave_out=leave_out, **asked)
    with shared.client() as client:
        return commands.generate(client, request, as_json=as_json)


@command()
@option("--system", default="", metavar="TEXT", help="What the model is told before everything.")
@option("--max-tokens", default=1024, type=LENGTH, help="Most tokens of an answer.")
@option("--temperature", default=0.7, type=TEMPERATURE, help="0 always takes the likeliest.")
@options.top_p
@option("--seed", type=SEED, help="Default: another one for each conversation.")
def chat(system: str, max_tokens: int, temperature: float, top_p: float, seed: int | None) -> int:
    """Talk with the model of the live swarm, by its own chat template. Reads lines from a terminal
    or a pipe."""
    import secrets

    from node.control.chat import chat
    from protos.control_pb2 import GenerateRequest

    if seed is None:
        seed = secrets.randbits(63)
    asked = GenerateRequest(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    with shared.client() as client:
        return chat(client, asked, system, client.path.parent / "chat-history")


@command()
@option("--host", default="127.0.0.1", help="Address to listen on.")
@option("--port", default=8000, type=click.IntRange(0, 65535), help="0 picks one.")
@option(
    "--token",
    default="",
    envvar="TUTTI_SERVE_TOKEN",
    show_envvar=True,
    help="What clients give as API key; needed where others reach it.",
)
def serve(host: str, port: int, token: str) -> int:
    """Serve the model of the live swarm to clients of the OpenAI API, until interrupted."""
    import asyncio

    with shared.client() as client:
        from node.serve.command import listen, serve

        with listen(host, port, token) as sock:
            where = f"[{host}]" if ":" in host else host
            shared.say(f"serving on http://{where}:{sock.getsockname()[1]}/v1  (Ctrl-C ends it)")
            with interrupts.raising():
                return asyncio.run(serve(client.path, sock, token))
