"""Settings of the data: the manifest's, and the permissions of this peer's user to read and fetch.
A manifest names content; a path is each peer's own."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DataSettings:
    """A source of tokens and its order."""

    source: str = "builtin:pydoc"
    """builtin:pydoc | file:NAME (txt, md, jsonl, json, csv, tsv, parquet, bin; SHA256SUMS for
    shards beside it) | file:NAME/ (the files of a directory) |
    http(s)://… (SHA256SUMS, one shard, or shards x-{000..012}.jsonl) | hf:NAME[:CONFIG]:SPLIT |
    synthetic:SEED. The name of a file may be a path, where it lies at peers that say nothing else;
    its ending is the format. Sources of shards are streamed."""
    sha256: str = ""
    """Hex hash of the source's bytes, or of a stream's list of shards. Every peer that opens the
    source compares it; empty: not compared."""
    windows: int = 0
    """Samples that a stream takes from each piece of 1 MiB, as stored; found by ``swarm init``."""
    sizes: tuple[int, ...] = ()
    """Bytes of each shard of a web server, in their order; empty: each peer asks the server."""
    column: str = "text"
    """Field of a row with the text of its document. If ``rows = "chat"`` it is the field with its
    messages; "text" then stands for messages, conversations, or prompt and completion."""
    rows: str = "text"
    """text: a document is one text | chat: a document is a conversation, written by the chat
    template of the tokenizer, and only the tokens of its assistant are trained on."""
    encoding: str = "utf-8"
    """How the text of files is encoded: utf-8, utf-16-le, utf-16-be, latin-1, cp1252."""
    tokenizer: str = "bytes"
    """"bytes", or the name of a Hugging Face tokenizer.json; a path as in ``source``."""
    tokenizer_sha256: str = ""
    """Hex hash of that file, compared as ``sha256`` is."""
    files: tuple[str, ...] = ()
    """Other files of the tokenizer and of the model that the run begins from, each as NAME:SHA256;
    exports contain them unchanged, and they say the chat template and the special tokens."""
    end: int = -1
    """Id that ends a document, as those files say it; -1: found by the usual words."""
    document_mask: bool = False
    """Documents that are packed into one sequence do not see each other: a token attends to tokens
    of its own document, positions count from its beginning, and its last token has no target."""
    seed: int = 42
    """Seed of the sample order."""
    holdout: float = 0.05
    """Share of the text, at its end, that is never trained on."""


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
