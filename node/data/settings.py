"""Settings of the data: the manifest's, and the permissions of this peer's user to read and fetch.
A manifest names content; a path is each peer's own."""

import re
from dataclasses import dataclass

from node.core.errors import refuse
from node.core.tables import setting

BYTE_VOCAB = 259
MOST_FILES = 32
"""Files beside the tokenizer that a manifest names, at most."""
_FILE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}:[0-9a-f]{64}"
"""Name and hash of one such file."""
_PRINTED = r"[^\x00-\x1f\x7f-\x9f]"
"""A character that is no control character: text of a manifest goes to terminals."""


@dataclass(frozen=True)
class DataSettings:
    """A source of tokens and its order."""

    source: str = setting(
        "builtin:pydoc",
        "builtin:pydoc | file:NAME (txt, md, jsonl, json, csv, tsv, parquet, bin; SHA256SUMS for "
        "shards beside it) | file:NAME/ (the files of a directory) | http(s)://… (SHA256SUMS, one "
        "shard, or shards x-{000..012}.jsonl) | hf:NAME[:CONFIG]:SPLIT | synthetic:SEED. The name "
        "of a file may be a path, where it lies at peers that say nothing else; its ending is the "
        "format. Sources of shards are streamed.",
        pattern=f"builtin:pydoc|synthetic:[0-9]{{1,18}}|(file:|hf:|https?://){_PRINTED}{{1,4096}}",
        says="builtin:pydoc, file:NAME, hf:NAME, http(s)://… or synthetic:SEED, without control "
        "characters",
    )
    sha256: str = setting(
        "",
        "Hex hash of the source's bytes, or of a stream's list of shards. Every peer that opens "
        "the source compares it; empty: not compared.",
        pattern=r"([0-9a-f]{64})?",
        says="64 hex digits, or empty",
    )
    windows: int = setting(
        0,
        "Samples that a stream takes from each piece of 1 MiB, as stored; found by swarm init.",
        least=0,
        most=1 << 20,
    )
    sizes: tuple[int, ...] = setting(
        (), "Bytes of each shard of a web server, in their order; empty: each peer asks the server."
    )
    column: str = setting(
        "text",
        'Field of a row with the text of its document. If rows = "chat" it is the field with its '
        'messages; "text" then stands for messages, conversations, or prompt and completion.',
        pattern=_PRINTED + "{1,256}",
        says="the name of a field",
    )
    rows: str = setting(
        "text",
        "text: a document is one text | chat: a document is a conversation, written by the chat "
        "template of the tokenizer, and only the tokens of its assistant are trained on.",
        choices=("text", "chat"),
    )
    encoding: str = setting(
        "utf-8",
        "How the text of files is encoded: utf-8, utf-16-le, utf-16-be, latin-1, cp1252.",
        choices=("utf-8", "utf-16-le", "utf-16-be", "latin-1", "cp1252"),
    )
    tokenizer: str = setting(
        "bytes",
        '"bytes", or the name of a Hugging Face tokenizer.json; a path as in source.',
        pattern=_PRINTED + "{1,4096}",
        says='"bytes" or the name of a tokenizer.json',
    )
    tokenizer_sha256: str = setting(
        "",
        "Hex hash of that file, compared as sha256 is.",
        pattern=r"([0-9a-f]{64})?",
        says="64 hex digits, or empty",
    )
    files: tuple[str, ...] = setting(
        (),
        "Other files of the tokenizer and of the model that the run begins from, each as "
        "NAME:SHA256; exports contain them unchanged, and they say the chat template and the "
        "special tokens.",
    )
    end: int = setting(
        -1,
        "Id that ends a document, as those files say it; -1: found by the usual words.",
        least=-1,
        most=1 << 22,
    )
    document_mask: bool = setting(
        False,
        "Documents that are packed into one sequence do not see each other: a token attends to "
        "tokens of its own document, positions count from its beginning, and its last token has no "
        "target.",
    )
    seed: int = setting(42, "Seed of the sample order.", least=0, most=2**63 - 1)
    holdout: float = setting(
        0.05, "Share of the text, at its end, that is never trained on.", least=0.0, most=0.5
    )

    def check(self, vocab: int, eval_every: int) -> None:
        """Raises UsageFault for settings that cannot hold together in a run with a vocabulary of
        ``vocab`` ids and an evaluation every ``eval_every`` epochs."""
        refuse(
            (
                not all(0 <= size < 1 << 48 for size in self.sizes),
                "data.sizes",
                "must be bytes of shards, 0 or more",
            ),
            (
                self.tokenizer == "bytes" and self.tokenizer_sha256,
                "data.tokenizer_sha256 is set",
                'leave it empty: data.tokenizer = "bytes" is no file',
            ),
            (
                len(self.files) > MOST_FILES
                or not all(re.fullmatch(_FILE, entry) for entry in self.files)
                or len({entry.partition(":")[0] for entry in self.files}) < len(self.files),
                "data.files",
                f"must be at most {MOST_FILES} entries  NAME:SHA256  of different names: give the "
                "model again,  tutti swarm init --from DIR",
            ),
            (
                self.tokenizer == "bytes" and self.end >= 0,
                f"data.end = {self.end}",
                'leave it out: data.tokenizer = "bytes" has an end of its own',
            ),
            (
                self.end >= vocab,
                f"data.end = {self.end} is no id of model.vocab = {vocab}",
                "give an id of the vocabulary, or leave it out",
            ),
            (
                self.tokenizer == "bytes" and vocab < BYTE_VOCAB,
                f"model.vocab = {vocab}",
                f'data.tokenizer = "bytes" needs {BYTE_VOCAB}',
            ),
            (
                eval_every and self.holdout == 0.0,
                "data.holdout = 0",
                f"must be above 0 while training.eval_every = {eval_every}",
            ),
        )


@dataclass(frozen=True)
class Places:
    """Locations that the user of this peer has given. A file, or a directory that holds files under
    the manifest's names; "" where none was given."""

    data: str = ""
    tokenizer: str = ""
    weights: str = ""
    hosts: tuple[str, ...] = ()
    """Addresses, networks and names outside the public Internet from which data may be fetched."""
    for_all_runs: tuple[str, ...] = ()
    """The fields of these places that are set for all runs of a peer, not named for this one."""
    own: bool = False
    """The key of this peer has signed the manifest, so its paths are this user's."""


NO_PLACES = Places()
OWN_MANIFEST = Places(own=True)
