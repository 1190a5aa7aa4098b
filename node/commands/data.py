"""Data as a model sees it: ``data show``."""

import dataclasses
from pathlib import Path
from typing import Any

from node.commands.line import options, shared
from node.commands.line.usage import FileArgument, VerbGroup, argument, command
from node.core.errors import ExitCode


@command()
@argument(
    "what",
    metavar="SOURCE|MANIFEST",
    type=FileArgument(),
    help="A file, a directory, hf:NAME, a swarm.toml.",
)
@argument("number", metavar="[N]", default=1, type=int, help="Sample to show, from 1.")
@options.data_places
@options.sets("Any field, e.g. model.seq_len=1024.")
@options.as_json
def show(
    what: str,
    number: int,
    tokenizer: str | None,
    settings: dict[str, Any],
    as_json: bool,
    **at: Any,
) -> int:
    """Show a sample as the model sees it: the text of its tokens, and where it is trained on."""
    from node.app import joining
    from node.manifest import Manifest, amended, read_manifest

    ours = shared.config({**at, "tokenizer": tokenizer})
    if what.endswith(".toml"):
        manifest = read_manifest(Path(what))
        corpus, words = joining.opened(ours, manifest, ours.places_of(manifest))
    else:
        content, here = joining.named_content(what, tokenizer)
        base = Manifest.default_demo()
        manifest = amended(base, {"model.vocab": joining.ANY_VOCAB} | content | settings)
        places = dataclasses.replace(ours.places_of(base), **here, own=True, for_all_runs=())
        manifest, beside = joining.with_files(ours, manifest, base, places, None)
        manifest = joining.recognised(manifest, places, settings)
        manifest, corpus, words = joining.with_hashes(
            ours, manifest, places, files=joining.files_beside(beside), said=settings
        )
    if as_json:
        shared.print_json(joining.sample_document(corpus, manifest, words, number - 1))
        return ExitCode.OK
    print(f"data     {joining.content_line(manifest, corpus)}")
    for line in joining.samples_shown(
        corpus, manifest, words, [number - 1], bold=shared.bold(), short=False
    ):
        print(line)
    return ExitCode.OK


data = VerbGroup("data", {"Commands": (show,)}, help="Look at data as a model sees it.")
