"""Files that come with a model beside its tokenizer.json: roles of special tokens, chat template.

Enters: a model directory, or the names and hashes of a manifest with a reader of files by hash.
Leaves: the files to the byte, and their meaning. Never: a file that is larger than its limit, that
has another hash than the manifest names, or that is no text of its kind. A template does not run in
this process.

Ids of the roles come from generation_config.json, else config.json, else tokenizer_config.json.
Without such files in the manifest the roles are found by the usual words of tokenizer.json.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from node.core.errors import Refused, UsageFault, refuse
from node.data.places import read_regular
from node.data.prompts import PromptRenderer
from node.data.settings import DataSettings
from node.data.tokenizer import ByteTokenizer, read_tokenizer
from node.model.files import LIMITS, MODEL_FILES, TOKENIZER, TOKENIZER_FILES, check_pointer

ROLES = ("bos", "eos", "pad", "unk")
_WORDS = {
    "bos": ("<|bos|>", "<s>", "<|begin_of_text|>", "<|im_start|>"),
    "eos": ("<|eos|>", "</s>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>"),
    "pad": ("<|pad|>", "<pad>", "<|endoftext|>"),
    "unk": (),
}
"""Words by which the roles are found in a tokenizer.json without other files."""
_AGAIN = "download the model directory again, or leave that file out of it"
_MOST_IDS = 256
"""Ids that end a text, at most."""

Read = Callable[[str], bytes | None]
"""Content of the run's file with this hex sha256; None where it is not here."""


class FilesMissing(UsageFault):
    """Files of the run are not at this peer. ``missing``: their names and hashes."""

    def __init__(self, missing: Mapping[str, str]) -> None:
        super().__init__(
            f"files of the run's model are not here: {', '.join(missing)}",
            "they are fetched from peers of the run:  tutti status  shows who is there",
        )
        self.missing = dict(missing)


@dataclass(frozen=True)
class TokenizerFiles:
    """Files of one model directory, with their meaning.

    ``chat_template``: Jinja source, None for a model without one. ``special_tokens``: text of
    ``bos_token``, ``eos_token``, ``pad_token`` and ``unk_token``; a role without a token is absent.
    ``eos_ids``: every id that ends a text; ``end_id``: the one that ends a document.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Content by name, without tokenizer.json."""
    tokenizer_json: bytes | None = None

    # ------------------------------------------------------------ where they come from

    @classmethod
    def beside(cls, tokenizer: Path | None, model: Path | None) -> "TokenizerFiles":
        """Read the files of a tokenizer from the directory of its tokenizer.json. The files of the
        model in ``model`` are read too if both are one directory. Blocks on the disk. Raises
        UsageFault for a file that is too large, damaged, or a Git LFS pointer."""
        found: dict[str, bytes] = {}
        content = None
        if tokenizer is not None:
            content = read_tokenizer(tokenizer)
            found |= _read_all(tokenizer.parent, TOKENIZER_FILES)
        # The ids in a model's files belong to its own tokenizer.
        if tokenizer is not None and model is not None and _same(tokenizer.parent, model):
            found |= _read_all(model, MODEL_FILES)
        files = cls(found, content)
        files.check()
        return files

    @classmethod
    def of_manifest(cls, settings: DataSettings, read: Read) -> "TokenizerFiles":
        """Files that the data settings of a manifest name. ``read`` may block. Raises FilesMissing
        where some are not here, Refused for content that does not have its hash, UsageFault for a
        damaged file."""
        wanted = named_files(settings)
        content: bytes | None = None
        if settings.tokenizer == "bytes":
            content = ByteTokenizer().to_json()
        elif settings.tokenizer_sha256:
            wanted[TOKENIZER] = settings.tokenizer_sha256
        found = {name: read(sha256) for name, sha256 in wanted.items()}
        if missing := {name: wanted[name] for name, data in found.items() if data is None}:
            raise FilesMissing(missing)
        here = {name: data for name, data in found.items() if data is not None}
        for name, data in here.items():
            if hashlib.sha256(data).hexdigest() != wanted[name]:
                raise Refused(f"{name} does not have the hash of the manifest", _AGAIN)
        content = here.pop(TOKENIZER, content)
        files = cls(here, content)
        files.check()
        return files

    def check(self) -> None:
        """Raise UsageFault for a file that is too large or not of the kind that its name says."""
        for name, content in self.files.items():
            most = LIMITS.get(name, 0)
            refuse((len(content) > most, f"{name} has more than {most} bytes", _AGAIN))
        _ = self.chat_template, self.special_tokens, self.bos_id, self.eos_ids, self.pad_id

    @property
    def entries(self) -> tuple[str, ...]:
        """Names and hashes of the files, as a manifest lists them; tokenizer.json is named by
        settings of its own."""
        return tuple(
            f"{name}:{hashlib.sha256(content).hexdigest()}"
            for name, content in sorted(self.files.items())
        )

    # ------------------------------------------------------------ their meaning

    @cached_property
    def chat_template(self) -> str | None:
        raw = self.files.get("chat_template.jinja")
        if raw is not None:
            return _text("chat_template.jinja", raw)
        for name in ("chat_template.json", "tokenizer_config.json"):
            found = self._json(name).get("chat_template")
            if isinstance(found, list):
                found = _default_template(found)
            elif isinstance(found, dict):
                found = found.get("default")
            if isinstance(found, str):
                return found
        return None

    @cached_property
    def prompts(self) -> PromptRenderer | None:
        """Renderer of prompts by the chat template, None for a model without one."""
        if self.chat_template is None:
            return None
        return PromptRenderer(self.chat_template, self.special_tokens)

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        if not self._described:
            return {f"{role}_token": word for role, (word, _) in self._by_words.items()}
        config = self._json("tokenizer_config.json")
        legacy = self._json("special_tokens_map.json")
        # The library reads the map only where the configuration does not list the added tokens.
        order = (legacy, config)
        if "added_tokens_decoder" in config:
            order = (config, legacy)
        found: dict[str, str] = {}
        for role in ROLES:
            texts = (_content(table.get(f"{role}_token")) for table in order)
            text = next((text for text in texts if text), None)
            if text:
                found[f"{role}_token"] = text
        return found

    @property
    def bos_id(self) -> int | None:
        return next(iter(self._ids("bos")), None)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._ids("eos")

    @property
    def pad_id(self) -> int | None:
        return next(iter(self._ids("pad")), None)

    @property
    def end_id(self) -> int | None:
        """Id that ends a document: the tokenizer's own, else the first that ends a text."""
        own = self.id_of(self.special_tokens.get("eos_token", ""))
        if own is None and self.eos_ids:
            own = self.eos_ids[0]
        return own

    def id_of(self, word: str) -> int | None:
        """Id of a token by its text, None for a word that is no token."""
        if not word:
            return None
        return self._added.get(word, self._vocabulary.get(word))

    def beyond(self, vocab: int) -> dict[str, int]:
        """Added tokens by text with ids from ``vocab`` on: a vocabulary of that size lacks them."""
        return {word: i for word, i in self._added.items() if i >= vocab}

    @property
    def _described(self) -> bool:
        """True if a file says the roles, so that no word has to be guessed."""
        return any(
            name in self.files for name in ("tokenizer_config.json", "special_tokens_map.json")
        )

    def _ids(self, role: str) -> tuple[int, ...]:
        for name in ("generation_config.json", "config.json"):
            value = self._json(name).get(f"{role}_token_id")
            if ids := _id_list(name, f"{role}_token_id", value):
                return ids
        found = self.id_of(self.special_tokens.get(f"{role}_token", ""))
        if found is None:
            return ()
        return (found,)

    @cached_property
    def _by_words(self) -> dict[str, tuple[str, int]]:
        found: dict[str, tuple[str, int]] = {}
        for role, words in _WORDS.items():
            word = next((word for word in words if word in self._added), None)
            if word is not None:
                found[role] = word, self._added[word]
        return found

    @cached_property
    def _added(self) -> dict[str, int]:
        """Ids of added tokens by their text."""
        found: dict[str, int] = {}
        try:
            for token in self._tokenizer.get("added_tokens") or []:
                found[str(token["content"])] = int(token["id"])
            decoder = self._json("tokenizer_config.json").get("added_tokens_decoder") or {}
            for number, token in decoder.items():
                found.setdefault(str(token["content"]), int(number))
            for word, number in self._json("added_tokens.json").items():
                found.setdefault(str(word), int(number))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as e:
            raise UsageFault(f"the tokenizer's added tokens cannot be read: {e!r}", _AGAIN) from e
        return found

    @cached_property
    def _vocabulary(self) -> Mapping[str, int]:
        """Ids by text of a vocabulary that is a table or a list; empty for others."""
        model = self._tokenizer.get("model")
        vocabulary = None
        if isinstance(model, dict):
            vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            return {word: i for word, i in vocabulary.items() if isinstance(i, int)}
        if isinstance(vocabulary, list):  # Unigram: pairs of a piece and its score
            pairs = enumerate(vocabulary)
            return {str(pair[0]): i for i, pair in pairs if isinstance(pair, list) and pair}
        return {}

    @cached_property
    def _tokenizer(self) -> dict[str, Any]:
        if self.tokenizer_json is None:
            return {}
        return _parsed("the tokenizer.json", self.tokenizer_json)

    def _json(self, name: str) -> dict[str, Any]:
        found = self._parsed.get(name)
        if found is None:
            raw = self.files.get(name)
            found = dict[str, Any]()
            if raw is not None:
                found = _parsed(name, raw)
            self._parsed[name] = found
        return found

    @cached_property
    def _parsed(self) -> dict[str, dict[str, Any]]:
        return {}


def named_files(settings: DataSettings) -> dict[str, str]:
    """Names and hashes of the files that a manifest lists and this version knows. Others, of a
    later version, are left out."""
    pairs = (entry.partition(":") for entry in settings.files)
    return {name: sha256 for name, _, sha256 in pairs if name in LIMITS}


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _read_all(directory: Path, limits: Mapping[str, int]) -> dict[str, bytes]:
    return {
        name: read_regular(directory / name, most, _AGAIN)
        for name, most in limits.items()
        if (directory / name).is_file()
    }


def _text(name: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise UsageFault(f"{name} is no UTF-8", _AGAIN) from e


def _parsed(name: str, raw: bytes) -> dict[str, Any]:
    check_pointer(Path(name), raw)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise UsageFault(f"{name} is no JSON: {str(e)[:200]}", _AGAIN) from e
    if not isinstance(found, dict):
        raise UsageFault(f"{name} holds no object", _AGAIN)
    return found


def _default_template(templates: Sequence[Any]) -> str | None:
    """Template of the name "default" in a list of named templates."""
    for entry in templates:
        if isinstance(entry, dict) and entry.get("name") == "default":
            found = entry.get("template")
            return found if isinstance(found, str) else None
    return None


def _content(token: Any) -> str | None:
    """Text of a token, which stands there as a string or as a table with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _id_list(name: str, key: str, value: Any) -> tuple[int, ...]:
    """Ids of a field that holds one, a list, or null. Negative ids mean none."""
    ids = [value]
    if value is None:
        ids = []
    elif isinstance(value, list):
        ids = list(value)
    proper = all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not proper or len(ids) > _MOST_IDS:
        raise UsageFault(f"{name}: {key} = {str(value)[:80]}", "it must be an id or a list of ids")
    return tuple(i for i in ids if i >= 0)
