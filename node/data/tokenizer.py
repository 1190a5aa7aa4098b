"""Text to token ids and back: bytes, or any Hugging Face tokenizer.json."""

import codecs
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from node.core.errors import Refused, refuse
from node.data.confined.process import KEPT, Confined, ParseFault, Pool, explained
from node.data.marks import CONTEXT, LAST, Conversation, ids_in
from node.data.places import named_for_one_run, read_regular, tokenizer_file
from node.data.settings import NO_PLACES, DataSettings, Places

PIECE = 1 << 20
"""Characters given to a trained tokenizer at once; longer texts are cut behind a line end near
it."""
BEHIND = 16
"""Ids behind which the first id of a stream is decoded."""


MOST_TOKENIZER = 256 << 20
"""Bytes of a tokenizer.json."""
GET_TOKENIZER = (
    "check the path; a peer of somebody else's run names its own copy with  --tokenizer PATH , "
    "and a block stage needs none"
)
ENDS = ("<|eos|>", "</s>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>")
"""Words by which trained tokenizers end a document."""
BYTES = 255
"""The largest id of text, where ids are bytes."""


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8, then bos, eos, pad. Nothing to train, nothing to download.
    ``vocab``: number of ids; ``eos``: the id that ends a document; ``digest``: name of the
    tokenizer, for caches."""

    vocab = 259
    eos: int | None = 257
    digest = "bytes-1"
    SPECIAL = {"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258}

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids [n] of the text, uint8, no special ids added. Bytes are taken as UTF-8. A lone
        surrogate, which UTF-8 cannot say, becomes "?"."""
        if not isinstance(text, bytes):
            text = text.encode("utf-8", errors="replace")
        return np.frombuffer(text, dtype=np.uint8)

    def encode_marked(self, found: Conversation) -> np.ndarray:
        """Ids [n] of the text of a conversation, uint32; CONTEXT marks tokens that are not trained
        on."""
        pieces = list[np.ndarray]()
        at = 0
        for start, stop in (*found.trained, (len(found.text), len(found.text))):
            pieces.append(self.encode(found.text[at:start]).astype(np.uint32) | CONTEXT)
            pieces.append(self.encode(found.text[start:stop]).astype(np.uint32))
            at = stop
        return np.concatenate(pieces)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of ids; unknown ids, and special ones unless ``special``, leave nothing; broken
        UTF-8 becomes U+FFFD."""
        if special:
            words = {i: word.encode() for word, i in self.SPECIAL.items()}
            raw = (bytes((i,)) if i < 256 else words.get(i, b"") for i in map(int, ids))
            return b"".join(raw).decode("utf-8", errors="replace")
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")

    def stream(self, before: Iterable[int]) -> Callable[[int], str]:
        """A function of the next id that returns the text which that id completes, after the ids
        ``before``."""
        partial = codecs.getincrementaldecoder("utf-8")("replace")
        partial.decode(bytes(i for i in before if 0 <= i < 256))
        return lambda i: partial.decode(bytes([i])) if 0 <= i < 256 else ""

    def interrupt(self) -> None:
        """Do nothing: no call here takes long."""

    def to_json(self) -> bytes:
        """A Hugging Face tokenizer.json, which encodes as :meth:`encode` does in the
        ``tokenizers`` library: byte-level BPE without merges.

        Only the three special words themselves are read as their ids there, unless
        ``encode_special_tokens`` is set.
        """
        flags = {
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        body = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": i, "content": word, **flags} for word, i in self.SPECIAL.items()
            ],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {letter: byte for byte, letter in enumerate(byte_letters())}
                | self.SPECIAL,
                "merges": [],
            },
        }
        return json.dumps(body, ensure_ascii=False, indent=1).encode()


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself where it prints, else the next free letter from U+0100
    on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    shown = set(printable)
    letters = []
    spare = 256
    for byte in range(256):
        if byte in shown:
            letters.append(chr(byte))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters


class FileTokenizer:
    """A trained tokenizer from a Hugging Face tokenizer.json; as :class:`ByteTokenizer`, but it
    may lack an ``eos``.

    Somebody else wrote the file, and its patterns can take any time and memory, so it works in
    processes of its own. :meth:`encode` and :meth:`decode` block, and raise UsageFault where it
    fails, or needs more than they may have.
    """

    def __init__(self, path: Path, sha256: str = "", end: int = -1) -> None:
        """``sha256``: of the file, compared before anything of it is used; "" for any. ``end``: the
        id that ends a document, -1 to find it by the usual words. Raises UsageFault when the file
        is missing or not a tokenizer, Refused when it is another one."""
        self._end = end
        self._path = path
        self._file = read_tokenizer(path)
        self.digest = hashlib.sha256(self._file).hexdigest()
        if sha256 and self.digest != sha256:
            raise Refused(
                f"the tokenizer's sha256 is {self.digest[:16]}…, the run asks for {sha256[:16]}…",
                "leave  --tokenizer  away, and it is fetched from other peers of the run; a block "
                "stage needs none",
            )
        self._pool = Pool(self._load, most=KEPT)
        self.vocab = 0
        self.eos: int | None = None
        list(self._pool.call({"op": "encode"}, b""))

    def _load(self, process: Confined) -> None:
        found = process.call({"op": "load", "ends": ENDS}, self._file)
        what = f"cannot read the tokenizer {self._path}"
        said = json.loads(b"".join(explained(found, what, GET_TOKENIZER)))
        self.vocab = said["ids"]
        self.eos = next((i for i in said["ends"] if i is not None), None)
        if self._end >= 0:
            self.eos = self._end

    def _call(self, operation: str, body: bytes, **words: object) -> bytes:
        found = self._pool.call({"op": operation} | words, body)
        what = f"the tokenizer {self._path} fails at {len(body)} bytes"
        return b"".join(explained(found, what, "the run needs a tokenizer without such patterns"))

    def encode(self, text: str | bytes) -> np.ndarray:
        """As :meth:`ByteTokenizer.encode`, uint32."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        raw = b"".join(self._call("encode", p.encode("utf-8", "replace")) for p in pieces(text))
        return self._checked(np.frombuffer(raw, dtype=np.uint32))

    def encode_marked(self, found: Conversation) -> np.ndarray:
        """As :meth:`ByteTokenizer.encode_marked`. A token belongs to the part of the text in which
        it begins."""
        body = found.text.encode("utf-8", "replace")
        raw = self._call("marked", body, trained=found.trained, mark=CONTEXT)
        ids = np.frombuffer(raw, dtype=np.uint32)
        self._checked(ids_in(ids))
        return ids

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        if len(ids) and ids.max() >= self.vocab:
            raise ParseFault(
                f"the tokenizer {self._path} gives ids that it does not have", GET_TOKENIZER
            )
        return ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        known = np.asarray([i for i in map(int, ids) if 0 <= i < self.vocab], dtype=np.uint32)
        raw = self._call("decode", known.tobytes(), special=special)
        return raw.decode("utf-8", errors="replace")

    def stream(self, before: Iterable[int]) -> Callable[[int], str]:
        # An id is decoded behind others, because a decoder may take the first space away. The
        # library's own DecodeStream fails on bytes that are no UTF-8.
        said = list(before)[-BEHIND:]
        fresh = list[int]()

        def say(i: int) -> str:
            nonlocal said, fresh
            fresh.append(i)
            known = self.decode(said)
            text = self.decode(said + fresh)
            if text.endswith("\ufffd") or len(text) <= len(known):
                return ""
            said = fresh
            fresh = []
            return text[len(known) :]

        return say

    def interrupt(self) -> None:
        """End the calls that other threads wait for: they raise there."""
        self._pool.interrupt()

    def to_json(self) -> bytes:
        return self._file


def read_tokenizer(path: Path) -> bytes:
    """Content of a tokenizer.json. Raises UsageFault for a file that cannot be read, and for one
    of more than :data:`MOST_TOKENIZER` bytes."""
    return read_regular(path, MOST_TOKENIZER, GET_TOKENIZER)


Tokenizer = ByteTokenizer | FileTokenizer


def document_ids(
    document: bytes | Conversation, tokenizer: Tokenizer, end: int | None
) -> np.ndarray:
    """Token ids of a document, followed by the id ``end`` unless that is None. The ids of a
    conversation are marked; it ends itself, or is followed by the end that the tokenizer has."""
    if isinstance(document, bytes):
        ids = tokenizer.encode(document)
        if end is None:
            return ids
        return np.append(ids, np.uint32(end))
    ids = tokenizer.encode_marked(document)
    if document.open and tokenizer.eos is not None:
        ids = np.append(ids, np.uint32(tokenizer.eos))
    else:
        ids = ids.copy()
    ids[-1:] |= LAST
    return ids


def pieces(text: str, size: int = PIECE) -> Iterable[str]:
    """The text in order, in pieces of about ``size`` characters that end behind a line end where
    there is one in reach."""
    start = 0
    while start < len(text):
        stop = min(start + size, len(text))
        if stop < len(text):
            line = text.rfind("\n", start, stop)
            if line >= 0:
                stop = line + 1
        yield text[start:stop]
        start = stop


def mark_between(settings: DataSettings, tokenizer: Tokenizer, largest: int) -> int | None:
    """The id that ends a document if ``settings`` keep documents apart, else None. For
    conversations, which have marked ids, it is the mark LAST. ``largest``: the largest id that the
    text can have. Raises UsageFault for a text without documents."""
    if not settings.document_mask:
        return None
    if settings.rows == "chat":
        return LAST
    eos = tokenizer.eos
    what = settings.source
    if eos is None:
        what = f"the tokenizer {settings.tokenizer}"
    refuse(
        (
            eos is None or eos > largest,
            f"data.document_mask = true, and {what} has nothing that ends a document",
            "give documents (jsonl, parquet, hf) and a tokenizer with an end-of-text token, or "
            "leave the mask away",
        )
    )
    return eos


def open_tokenizer(settings: DataSettings, places: Places = NO_PLACES) -> Tokenizer:
    """Open the tokenizer that ``settings`` name. Raises UsageFault for a missing file, a file that
    is no tokenizer or that neither this user nor a hash has named, and for a place given for the
    tokenizer "bytes"; Refused if the hash differs from the manifest's."""
    name = settings.tokenizer
    wanted = settings.tokenizer_sha256
    refuse(
        (
            name == "bytes" and named_for_one_run(places.tokenizer),
            'this run\'s tokenizer is "bytes", which is no file, and  tokenizer = '
            f"{places.tokenizer}  is set here",
            "leave  --tokenizer  away, or make a run with that one:  tutti swarm init --tokenizer "
            f"{places.tokenizer}",
        )
    )
    if name == "bytes":
        return ByteTokenizer()
    return FileTokenizer(tokenizer_file(name, wanted, places), wanted, settings.end)
