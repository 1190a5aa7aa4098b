"""The model of the live swarm: ``eval`` and ``export``."""

from pathlib import Path

import click

from node.commands.line import options, shared
from node.commands.line.usage import FileArgument, argument, command, flag, option
from node.core.errors import NotRunning, UsageFault


@command("eval")
@options.drop_stages
@option(
    "--drop",
    default=0.0,
    type=click.FloatRange(0, 0.999),
    help="Share of the block stages to leave out, in several choices; mean over them.",
)
@option(
    "--choices",
    default=8,
    type=click.IntRange(1, 1000),
    help="With --drop: choices of missing stages.",
)
@options.first
@option(
    "--batches",
    default=0,
    type=click.IntRange(0, 10_000),
    help="Held-out micro-batches; 0: as many as the run's own evaluation.",
)
@options.as_json
def evaluate(
    drop_stages: list[int], drop: float, choices: int, first: int, batches: int, as_json: bool
) -> int:
    """Held-out loss through the live swarm, with block stages missing if you say so."""
    from node.control import commands
    from protos.control_pb2 import EvaluateRequest, LeaveOut

    leave_out = LeaveOut(stages=drop_stages, after=first)
    request = EvaluateRequest(leave_out=leave_out, share=drop, choices=choices, batches=batches)
    with shared.client() as client:
        return commands.evaluate(client, request, as_json=as_json)


@command()
@argument(
    "directory",
    metavar="DIR",
    type=FileArgument("dir"),
    help="Where to write it; made if it is not there.",
)
@option(
    "--tokenizer",
    type=options.FILE,
    metavar="FILE",
    help="The run's tokenizer.json. Default: the one here, or of another peer.",
)
@flag("--no-tokenizer", "without", help="Write the model without a tokenizer.")
@flag("--merge", help="Of a run that trains adapters: write whole weights.")
@flag("--gguf", help="Write the model as GGUF (f16) too, for llama.cpp.")
@option(
    "--base",
    default="",
    metavar="NAME",
    help="The model beside which adapters were trained, for loaders.",
)
@options.as_json
def export(
    directory: str,
    tokenizer: Path | None,
    without: bool,
    merge: bool,
    gguf: bool,
    base: str,
    as_json: bool,
) -> int:
    """Gather every stage and write a Hugging Face directory."""
    from node.control import commands
    from protos.control_pb2 import ExportRequest

    if tokenizer is not None and without:
        raise UsageFault("--tokenizer and --no-tokenizer", "give one of the two")
    tokenizer_file = ""
    if tokenizer is not None:
        tokenizer_file = str(tokenizer)
    request = ExportRequest(
        directory=str(Path(directory)),
        tokenizer=tokenizer_file,
        without_tokenizer=without,
        merge=merge,
        gguf=gguf,
        base=base,
    )
    try:
        client = shared.client()
    except NotRunning as fault:
        raise shared.with_last_known(fault) from None
    with client:
        return commands.export(client, request, as_json=as_json)
