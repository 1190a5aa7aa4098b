"""A source's name to a corpus: tokens in memory or on disk, hashed, split into training and
held-out text.

``builtin:pydoc`` is the text of Python's own help; it differs between Python versions, so peers
that share a run compare its hash. Readers of the formats are in ``readers.py``.
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from node.core.errors import Refused, UsageFault, refuse
from node.data import readers
from node.data.kinds import READ, FileKind, kind_of, known_kind
from node.data.places import (
    data_directory,
    data_file,
    directory,
    files_below,
    is_directory,
    named_for_one_run,
    open_regular,
)
from node.data.readers import LeftOut, RowFormat
from node.data.settings import NO_PLACES, DataSettings, Places
from node.data.splits import card_of, files_of_split
from node.data.streamed.shards import is_streamed
from node.data.streamed.stream import DATA_DISK, Stream, open_stream
from node.data.token_file import Documents, TokenFile, cached
from node.data.tokenizer import Tokenizer, mark_between, open_tokenizer
from node.data.tokenizer_files import FilesMissing, TokenizerFiles

Ids = np.ndarray | TokenFile
"""Token ids [n]; ``numpy.asarray`` of a slice is an array."""

SYNTHETIC_TOKENS = 1 << 20
"""Length of the synthetic text."""
Files = Callable[[], TokenizerFiles]
"""Reads the files that come with the tokenizer of a run."""
NO_FILES: Files = TokenizerFiles
"""For a tokenizer without other files."""
MOST_CARD = 1 << 20
"""Bytes of the README.md of a directory that are read."""


@dataclass(frozen=True)
class Corpus:
    """``train`` and ``held_out`` are unsigned token ids [n].

    Windows are ``seq_len + 1`` tokens long and begin ``seq_len`` apart, so each token but the first
    is a target once.
    """

    train: Ids
    held_out: Ids
    sha256: str
    vocab: int
    seq_len: int
    end: int | None = None
    """The id that ends a document, where documents are kept apart; the mark LAST where ids are
    marked."""
    marked: bool = False
    """The ids carry marks, as :mod:`node.data.marks` has them."""

    @property
    def windows(self) -> int:
        """Samples in one data pass."""
        return max(0, (len(self.train) - 1) // self.seq_len)

    @property
    def held_out_windows(self) -> int:
        return max(0, (len(self.held_out) - 1) // self.seq_len)

    @property
    def tokens(self) -> int:
        return len(self.train) + len(self.held_out)

    @property
    def said(self) -> str:
        """Size of the text, for people."""
        return f"{self.tokens:,} tokens"


def open_source(
    settings: DataSettings,
    seq_len: int,
    vocab: int,
    home: Path,
    places: Places = NO_PLACES,
    cap: int = DATA_DISK,
    files: Files = NO_FILES,
) -> tuple[Corpus | Stream, Tokenizer]:
    """Open the data of a peer that holds the ends of a model with ``vocab`` token ids. Return a
    corpus, or a stream for a source that is read in pieces, of which at most ``cap`` bytes are
    kept. ``files``: reads the files of the tokenizer, for conversations.

    Raises as :func:`open_data` and :func:`open_stream` do.
    """
    if not streams(settings, places):
        return open_data(settings, seq_len, vocab, home, places, files)
    tokenizer = _tokenizer(settings, vocab, places)
    refuse(
        _no_file(settings, places),
        (
            not settings.windows,
            f"data.windows = 0, and {settings.source} is a stream: nobody has looked how much text "
            "its pieces have",
            "make a manifest with  tutti swarm init , without --no-open",
        ),
    )
    form = row_format(settings, files)
    stream = open_stream(settings, seq_len, tokenizer, home, places, cap, form)
    _check_hash(stream.sha256, settings.sha256)
    return stream, tokenizer


def open_data(
    settings: DataSettings,
    seq_len: int,
    vocab: int,
    home: Path,
    places: Places = NO_PLACES,
    files: Files = NO_FILES,
) -> tuple[Corpus, Tokenizer]:
    """Open ``settings.source`` as a whole: read, hashed, tokenised and split. Tokenised files are
    kept under ``home/data``.

    Raises UsageFault for a source that is not there, does not parse, or is too short for one
    window of training text, for a place of a source that is no file, and when the model could meet
    an id it has no embedding for, in the data or in a prompt; Refused when a hash differs from the
    one in ``settings``; OutOfResources when the disk is full.
    """
    tokenizer = _tokenizer(settings, vocab, places)
    kind, _, name = settings.source.partition(":")
    left = LeftOut(settings.source)
    if kind in ("file", "hf"):
        form = row_format(settings, files)
        read = {"file": _file, "hf": _hub}[kind]
        if kind == "file" and is_directory(name):
            read = _directory
        asked = _Asked(name, settings.sha256, places, tokenizer, form, home, left)
        tokens, digest, ids = read(asked)
    else:
        refuse(_no_file(settings, places))
        row_format(settings).check("text", settings.source)
        if kind == "builtin":
            raw = readers.pydoc()
        else:
            raw = MarkovLanguage(int(name)).generate(SYNTHETIC_TOKENS).tobytes()
        digest = hashlib.sha256(raw).hexdigest()
        ids = tokenizer.vocab
        _check_hash(digest, settings.sha256)
        tokens = tokenizer.encode(raw)
    corpus = _split(tokens, settings, seq_len, digest, ids)
    _require(vocab, ids, f"the data {settings.source}")
    end = mark_between(settings, tokenizer, np.iinfo(corpus.train.dtype).max)
    marked = settings.rows == "chat"
    return replace(corpus, end=end, marked=marked), tokenizer


def row_format(settings: DataSettings, files: Files = NO_FILES) -> RowFormat:
    """Rule that makes documents of the data's rows. Raises exceptions of ``files`` if a chat
    template is needed."""
    form = RowFormat(settings.column, settings.rows == "chat", settings.encoding)
    if not form.chat:
        return form
    try:
        found = files()
    except FilesMissing as e:
        step = "name the tokenizer.json of the model's directory:  --tokenizer DIR/tokenizer.json"
        raise UsageFault(e.what, step) from e
    special = tuple(sorted(found.special_tokens.items()))
    return replace(form, template=found.chat_template, special=special)


def _tokenizer(settings: DataSettings, vocab: int, places: Places) -> Tokenizer:
    tokenizer = open_tokenizer(settings, places)
    _require(vocab, tokenizer.vocab, f"the tokenizer {settings.tokenizer}")
    return tokenizer


def streams(settings: DataSettings, places: Places) -> bool:
    """Return True if a source is read in pieces. Older runs on a data set of the Hub, which name
    the hash of all of it, read it whole."""
    old = settings.source.startswith("hf:") and settings.sha256 and not settings.windows
    return not old and is_streamed(settings.source, places)


def _require(vocab: int, ids: int, what: str) -> None:
    refuse(
        (
            ids > vocab,
            f"{what} has {ids} token ids, the model {vocab}",
            f"set model.vocab to at least {ids}",
        )
    )


def _no_file(settings: DataSettings, places: Places) -> tuple[bool, str, str]:
    return (
        named_for_one_run(places.data) and not settings.source.startswith("file:"),
        f"this run trains on {settings.source}, which is no file, and  data = {places.data}  "
        "is set here",
        "leave  --data  away, or make a run on that file:  "
        f"tutti swarm init --data {shlex.quote(places.data)}",
    )


@dataclass(frozen=True)
class _Asked:
    """A source to be read whole. ``wanted``: its hash in the manifest, "" for any."""

    name: str
    wanted: str
    places: Places
    tokenizer: Tokenizer
    form: RowFormat
    home: Path
    left: LeftOut

    def cached(self, source: str, documents: Documents, *, plain: bool = False) -> TokenFile:
        """Token ids of documents, which are read unless they are on the disk. ``plain``: it is a
        text without documents."""
        end = None
        if not plain:
            end = self.tokenizer.eos
        named = source
        if self.form.key:
            named = f"{source}:{self.form.key}"
        counted = self._counted(documents)
        return cached(self.home, named, counted, self.tokenizer, end, marked=self.form.chat)

    def documents(self, files: Iterable[tuple[Path, FileKind]]) -> Documents:
        """Documents of files of this disk, one behind the other."""
        with closing(self.form.parsers()) as parsers:
            for path, kind in files:
                yield from readers.documents(parsers, path, kind, self.form, self.left)

    def _counted(self, documents: Documents) -> Documents:
        yield from documents
        self.left.check()


_Found = tuple[Ids, str, int]
"""Token ids, the hash of the bytes they were made from, and the number of token ids that exist."""


def _file(a: _Asked) -> _Found:
    path = data_file(a.name, a.wanted, a.places)
    tokenizer = a.tokenizer
    # The ending by the manifest, not by the file here: all peers must read it in the same way.
    ending = Path(a.name).suffix.lower()
    digest = readers.file_sha256(path)
    side = readers.note_beside(path)
    if ending == ".bin" and side.is_file() and digest != a.wanted.lower():
        # A peer without the note would read other ids from the same bytes. Older manifests name
        # the array alone.
        digest = hashlib.sha256(f"{digest}:{readers.file_sha256(side)}".encode()).hexdigest()
    _check_hash(digest, a.wanted)  # before minutes of tokenising
    if ending == ".bin":
        refuse((a.form.chat, f"{a.name} has token ids, no conversations", "leave data.rows away"))
        tokens, vocab = readers.pretokenised(path, tokenizer.vocab)
        return tokens, digest, vocab
    kind = known_kind(a.name)
    if kind is None:
        step = f"{READ}; or .bin, or a directory"
        raise UsageFault(f"cannot read {a.name}: unknown ending", step)
    a.form.check(kind.form, a.name)
    if kind == FileKind("text") and tokenizer.digest == "bytes-1" and a.form.encoding == "utf-8":
        return readers.token_file(path, np.dtype(np.uint8)), digest, tokenizer.vocab
    plain = kind.form == "text"
    found = a.documents([(path, kind)])
    # Caches of older versions are named by the ending.
    source = f"{ending}:{digest}"
    if kind.packed:
        source = f"{kind.form}.{kind.packed}:{digest}"
    return a.cached(source, found, plain=plain), digest, tokenizer.vocab


def _directory(a: _Asked) -> _Found:
    base = data_directory(a.name, a.wanted, a.places)
    names = split_below(base)
    listed = [(name, readers.file_sha256(base / name)) for name in names]
    digest = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    _check_hash(digest, a.wanted)
    for name in names:
        a.form.check(kind_of(name).form, name)
    found = a.documents((base / name, kind_of(name)) for name in names)
    return a.cached(f"directory:{digest}", found), digest, a.tokenizer.vocab


def split_below(base: Path) -> list[str]:
    """Names of the training files of a directory. Raises UsageFault where there are none."""
    names = files_below(base)
    card = dict[str, object]()
    if "README.md" in names:
        with open_regular(base / "README.md", "remove it") as file:
            card = card_of(file.read(MOST_CARD).decode("utf-8", "replace"))
    try:
        return files_of_split(names, card, "", "train")
    except UsageFault as e:
        raise UsageFault(f"{base} has {e.what}", f"{READ}; {e.next_step}") from e


def _hub(a: _Asked) -> _Found:
    where, colon, rest = a.name.partition(":")
    saved = directory(where, a.places)
    refuse(
        (
            saved is None and not a.places.own,
            f"hf:{a.name} is read whole, as runs of older versions do, and is not on this disk",
            "save it with the library  datasets  and name its directory:  --data DIR",
        )
    )
    dataset, column = readers.hub(f"{saved or where}{colon}{rest}", saved is not None)
    form = a.form
    if column:
        form = replace(form, column=column)
    unseen = LeftOut(a.name)
    texts = readers.hub_rows(dataset)
    if not form.chat:
        texts = readers.hub_texts(dataset, form.column, unseen)
    digest = readers.documents_sha256(texts)
    _check_hash(digest, a.wanted)
    documents = ((found, True) for found in readers.hub_documents(dataset, form, a.left))
    return replace(a, form=form).cached(f"hf:{digest}", documents), digest, a.tokenizer.vocab


def _check_hash(digest: str, wanted: str) -> None:
    if wanted and digest != wanted.lower():
        raise Refused(
            f"the data's sha256 is {digest[:16]}…, the run asks for {wanted[:16]}…",
            "get the same data as the run's other peers, or join as a block stage, which needs "
            "none",
        )


def _split(tokens: Ids, settings: DataSettings, seq_len: int, digest: str, vocab: int) -> Corpus:
    window = seq_len + 1
    held = 0
    if settings.holdout:
        held = max(int(len(tokens) * settings.holdout), window)
    cut = len(tokens) - held
    uses = "to train on"
    if held:
        uses = "to train on and to hold out"
    refuse(
        (not len(tokens), f"{settings.source} has no text", "name a file with text in it"),
        (
            cut < window,
            f"{settings.source} has {len(tokens)} tokens, too few for windows of {window} {uses}",
            "give a longer text or a shorter model.seq_len",
        ),
    )
    return Corpus(tokens[:cut], tokens[cut:], digest, vocab, seq_len)


LETTERS = b"abcdefghijklmnopqrstuvwxyz .,;?\n"
"""Letters of the symbols, so that samples can be read; also their token ids under the byte
tokenizer."""

_V = len(LETTERS)
_BITS = 12
_FAVOURITES = (0.5, 0.25, 0.125, 0.0625)
"""Shares of a context's four favourite successors; the rest, a sixteenth, is spread evenly over all
letters, which makes the chain ergodic: there is one entropy rate, whatever the first letters."""


class MarkovLanguage:
    """A language without a file and with a known lowest loss: a seeded Markov chain over 32
    letters, in which each letter depends on the two before it. Every machine makes the same text
    from the same seed: probabilities are multiples of 2**-12 and the dice are the raw words of a
    counter-based generator."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        dice = self._dice("grammar")
        favourites = dice.random_raw(_V * _V * len(_FAVOURITES)) % np.uint64(_V)
        counts = np.full((_V * _V, _V), (1 << _BITS) // 16 // _V, dtype=np.int64)
        rows = np.arange(_V * _V)
        for share, successor in zip(
            _FAVOURITES, favourites.reshape(len(_FAVOURITES), -1).astype(np.int64), strict=True
        ):
            np.add.at(counts, (rows, successor), int(share * (1 << _BITS)))
        self.counts = counts
        """[V * V, V] int64: row ``a * V + b`` says how many of 2**-12 each letter has after the
        letters number a, b."""

    def _dice(self, use: str) -> np.random.Philox:
        digest = hashlib.sha256(f"{self.seed}:{use}".encode()).digest()
        return np.random.Philox(key=int.from_bytes(digest[:16], "little"))

    def generate(self, tokens: int) -> np.ndarray:
        """The first ``tokens`` token ids of the language's only text, uint8."""
        # One table entry per (context, throw of 12 bits): the next letter.
        table = np.repeat(
            np.tile(np.arange(_V, dtype=np.uint8), _V * _V), self.counts.reshape(-1)
        ).tobytes()
        throws = (
            (self._dice("text").random_raw(tokens) >> np.uint64(64 - _BITS))
            .astype(np.int64)
            .tolist()
        )
        out = bytearray(tokens)
        context = 0
        for i, throw in enumerate(throws):
            letter = table[context << _BITS | throw]
            out[i] = letter
            context = (context % _V) * _V + letter
        return np.frombuffer(LETTERS, dtype=np.uint8)[np.frombuffer(out, dtype=np.uint8)]
