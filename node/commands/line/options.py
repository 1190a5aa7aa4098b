"""Options and types of values that several commands share."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from node.commands.line.usage import Decorator, FileArgument, OneOf, flag, option, repeatable
from node.core.errors import UsageFault

ROLES = ("auto", "ends", "stage", "rendezvous")
LOG_FORMATS = ("auto", "text", "json")
"""Words of options, here so that a wrong one is refused before anything is loaded."""
IDLE_MINUTES = 10.0
"""Minutes of ``--idle-only`` without a number."""
FILE = click.Path(path_type=Path)
"""The type of a file's name."""


def assignments(pairs: Sequence[str]) -> dict[str, Any]:
    """``key=value`` words as settings. A value stays text until the type of its setting is known.
    Raises UsageFault for a word without "="."""
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageFault(f"--set {pair}", "write  --set section.key=value")
        # "name = anna" is written as in TOML; else a blank may belong to a path.
        if value[:1].isspace():
            value = value.strip()
        found[key.strip()] = value
    return found


def sets(help: str) -> Decorator:
    """Add ``--set KEY=VALUE``, which may be given several times; the command gets a dictionary."""
    return click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help=help,
        callback=lambda ctx, param, pairs: assignments(pairs),
    )


class StageNumbers(click.ParamType):
    """Numbers of stages, such as "2,5", as a sorted list without duplicates."""

    name = "text"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """Raises UsageFault for a word that is not the number of a stage."""
        if isinstance(value, list):
            return value
        words = [word.strip() for word in value.split(",") if word.strip()]
        for word in words:
            if not (word.isascii() and word.isdigit() and len(word) < 6):
                raise UsageFault(
                    f"--drop-stages {value}: {word!r} is not the number of a stage",
                    "write  --drop-stages 2,5",
                )
        return sorted({int(word) for word in words})


def several(*decorators: Decorator) -> Decorator:
    """Add options in this order."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorate in reversed(decorators):
            function = decorate(function)
        return function

    return add


as_json = flag("--json", "as_json", help="One JSON document on stdout.")
verbose = flag("--verbose", "-v", help="The parts of the memory too, item by item.")
settings = sets("Any other setting, e.g. limits.in_flight=4.")
config = option("--config", type=FILE, help="A TOML file of settings for this node.")
background = flag("--background", "-d", help="Return as soon as the daemon answers; it goes on.")
listen = option("--listen", metavar="HOST", help="Address to listen on; default: all.")
p2p_port = option("--p2p-port", "--port", type=int, help="Port of the p2p daemon; 0 picks one.")
max_up = option("--max-up", metavar="RATE", help="Most it sends a second, in all: 20Mbit, 2.5MB.")
max_down = option("--max-down", metavar="RATE", help="Most it receives a second, in all.")
joins = repeatable(
    "--join", metavar="INVITE|MULTIADDR", help="Peers to connect to first; repeatable."
)
data_places = several(
    option(
        "--data",
        type=FileArgument(),
        metavar="PATH",
        help="Where the run's data is here: a file, or its directory.",
    ),
    repeatable(
        "--data-host",
        "data_hosts",
        metavar="HOST",
        help="A host of this machine or the LAN from which the run's data may be fetched; "
        "repeatable.",
    ),
    option(
        "--tokenizer",
        type=FileArgument(),
        metavar="PATH",
        help="Where the run's tokenizer.json is here, in the same way.",
    ),
)
"""Where data and tokenizer of a run are on this machine: parameters data, data_hosts, tokenizer."""
peer_settings = several(
    option(
        "--name",
        help="Human name of this node, for this start; kept by  tutti config set name NAME",
    ),
    option("--role", type=OneOf(ROLES), metavar="ROLE", help="auto, ends, stage, rendezvous."),
    option("--stage", help="auto, or the block stage to host."),
    option("--device", help="auto, cpu, cuda:N."),
    option("--local-devices", type=int, help="GPUs (or CPU processes) that share the stage."),
    option("--threads", type=int, help="CPU threads of a device; 0 for all cores."),
    option("--memory", help="Most device memory: 80% or 20GiB."),
    option("--reserve", help="Device memory left to others: 2GiB."),
    listen,
    p2p_port,
    option("--grpc-port", type=int, help="Port of the gRPC server; 0 picks one."),
    max_up,
    max_down,
    option("--max-disk", help="Most disk for streamed data and checkpoints: 50GiB."),
    option(
        "--idle-only",
        metavar="[MINUTES]",
        is_flag=False,
        flag_value=IDLE_MINUTES,
        type=float,
        help="Work only while nobody uses this machine: after 10 minutes, or so many, without "
        "keyboard, mouse, another program on the GPU and other load.",
    ),
    option("--hours", metavar="HH-HH", help="Work only at these hours, by the local clock: 22-07."),
    option(
        "--max-load",
        metavar="PERCENT",
        type=float,
        help="Pause while other programs keep more of the cores busy.",
    ),
    repeatable("--announce", metavar="HOST:PORT", help="Address that others should dial for gRPC."),
    click.option(
        "--force-tunnel", is_flag=True, default=None, help="Be reached through libp2p only."
    ),
)
"""Settings of this peer that a daemon can be started with. The parameter of each has the name of
its setting, and is None if it was not given."""
run_settings = several(
    data_places,
    option(
        "--weights",
        type=FileArgument("dir"),
        metavar="DIR",
        help="Where the model is that the run begins from; without it, it is fetched from others.",
    ),
    option(
        "--from",
        "restore",
        metavar="ADDRESS",
        help="Take the stage back from copies of checkpoints there: a directory, or s3://...",
    ),
    option("--metrics-port", type=int, help="Port of the metrics page; 0 picks one, -1 none."),
    option("--log-format", type=OneOf(LOG_FORMATS), metavar="FORMAT", help="auto, text, json."),
    option(
        "--record",
        type=FileArgument(),
        metavar="FILE",
        help="Record the state machines, for a bug report: tutti replay.",
    ),
    option(
        "--tensorboard",
        type=FileArgument("dir"),
        metavar="DIR",
        help="Write the curves of the run for TensorBoard there.",
    ),
    config,
    settings,
)
"""Settings of the run on this peer and of its daemon, in the same form; and ``settings``, the
dictionary of all that were given by ``--set``."""
no_open = flag(
    "--no-open", help="Open neither data nor tokenizer: fields and signature only, no hashes."
)
drop_stages = option(
    "--drop-stages",
    default="",
    type=StageNumbers(),
    metavar="S,S",
    help="Block stages to go without, e.g. 2,5.",
)
first = option(
    "--first",
    default=0,
    type=click.IntRange(min=0),
    metavar="K",
    help="Early exit: only the first K block stages; 0: all.",
)
top_p = option(
    "--top-p",
    default=0.0,
    type=click.FloatRange(0.0, 1.0),
    help="Choose among the likeliest tokens with so much probability together; 0 among all.",
)
