"""Files of the run, named by a hash in its manifest: read here, or fetched from other peers."""

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from node.checkpoint.run_file import fetch_file
from node.config import NodeConfig
from node.core.errors import LocalFault, UsageFault
from node.core.home import expanded
from node.core.ids import PeerId
from node.data.places import named_for_one_run, tokenizer_file
from node.data.settings import Places
from node.data.tokenizer import MOST_TOKENIZER, Tokenizer
from node.data.tokenizer_files import FilesMissing, TokenizerFiles, named_files
from node.manifest import Manifest
from node.model.files import LIMITS, TOKENIZER
from node.transport.port import TransportPort


class RunFiles:
    """The tokenizer of a run and the files beside it, at one peer.

    The tokenizer is in memory at the ends, else a file that the operator named, else a copy that
    was fetched from another peer. Other files are copies in the home, made by ``swarm init`` or
    fetched, else they lie beside the files that the operator named. Methods block on the disk.
    """

    def __init__(self, config: NodeConfig, manifest: Manifest, tokenizer: Tokenizer | None) -> None:
        self._config = config
        self._manifest = manifest
        self._tokenizer = tokenizer
        self._names = {sha256: name for name, sha256 in named_files(manifest.data).items()}

    def read(self, sha256: str) -> bytes | None:
        """The file with this hex sha256, None where it is not here or not one of the run's."""
        data = self._manifest.data
        if name := self._names.get(sha256):
            return self._beside(name, sha256)
        if not sha256 or sha256 != data.tokenizer_sha256:
            return None
        if self._tokenizer is not None:
            return self._tokenizer.to_json()
        if (kept := _read(self._kept(), sha256, MOST_TOKENIZER)) is not None:
            return kept
        return self._given(self._config.places_of(self._manifest))

    def located(self, places: Places) -> Places:
        """Return ``places``, with the copy of the tokenizer that was fetched if the user's places
        have none with the hash of the manifest. A file that the user named for this run stays."""
        data = self._manifest.data
        sha256 = data.tokenizer_sha256
        if not sha256 or _names_tokenizer(places) or self._given(places) is not None:
            return places
        if _read(self._kept(), sha256, MOST_TOKENIZER) is None:
            return places
        others = tuple(name for name in places.for_all_runs if name != "tokenizer")
        return replace(places, tokenizer=str(self._kept()), for_all_runs=others)

    def keep(self, tokenizer_json: bytes) -> None:
        """Keep a copy that was fetched and verified. Raises Refused and OutOfResources."""
        self._config.keep_tokenizer(self._manifest.run_id, tokenizer_json)

    def keep_all(self, files: Mapping[str, bytes]) -> None:
        """Keep copies of files by name, verified before. Raises Refused and OutOfResources."""
        others = dict(files)
        if (tokenizer := others.pop(TOKENIZER, None)) is not None:
            self.keep(tokenizer)
        self._config.keep_files(self._manifest.run_id, others)

    def load(self) -> TokenizerFiles:
        """All files of the run. Raises FilesMissing where some are not here, and as
        :meth:`TokenizerFiles.of_manifest`."""
        return TokenizerFiles.of_manifest(self._manifest.data, self.read)

    async def fetched(self, transport: TransportPort, donors: Sequence[PeerId]) -> TokenizerFiles:
        """Like :meth:`load`, but missing files are fetched from ``donors`` and kept. Raises NoDonor
        if none of them gave a file."""
        try:
            return await asyncio.to_thread(self.load)
        except FilesMissing as e:
            missing = e.missing
        found: dict[str, bytes] = {}
        for name, sha256 in missing.items():
            found[sha256] = await fetch_file(transport, donors, name, sha256)
            with contextlib.suppress(LocalFault):  # without a copy it is fetched again
                await asyncio.to_thread(self.keep_all, {name: found[sha256]})

        def read(sha256: str) -> bytes | None:
            return found.get(sha256) or self.read(sha256)

        return await asyncio.to_thread(TokenizerFiles.of_manifest, self._manifest.data, read)

    def missing_for_text(self) -> dict[str, str]:
        """Names and hashes of the files without which the text cannot be read here, and which other
        peers may give: the tokenizer, and for conversations the files beside it."""
        data = self._manifest.data
        wanted = dict[str, str]()
        if data.rows == "chat":
            wanted = named_files(data)
        if not _names_tokenizer(self._config.places_of(self._manifest)):
            wanted[TOKENIZER] = data.tokenizer_sha256
        return {n: sha256 for n, sha256 in wanted.items() if sha256 and self.read(sha256) is None}

    async def fetch_for_text(self, transport: TransportPort, donors: Sequence[PeerId]) -> None:
        """Fetch and keep :meth:`missing_for_text`. Raises NoDonor where no donor gives a file,
        Refused and OutOfResources where it cannot be kept."""
        for name, sha256 in (await asyncio.to_thread(self.missing_for_text)).items():
            content = await fetch_file(transport, donors, name, sha256)
            await asyncio.to_thread(self.keep_all, {name: content})

    def _given(self, places: Places) -> bytes | None:
        """The tokenizer with the hash of the manifest at the user's places; None for none."""
        data = self._manifest.data
        try:
            path = tokenizer_file(data.tokenizer, data.tokenizer_sha256, places)
        except UsageFault:
            return None
        return _read(path, data.tokenizer_sha256, MOST_TOKENIZER)

    def _kept(self) -> Path:
        return self._config.tokenizer_path(self._manifest.run_id)

    def _beside(self, name: str, sha256: str) -> bytes | None:
        places = self._config.places_of(self._manifest)
        candidates = [self._config.file_path(self._manifest.run_id, name)]
        if places.weights:
            candidates.append(expanded(places.weights) / name)
        if places.tokenizer:
            named = expanded(places.tokenizer)
            candidates.append((named if named.is_dir() else named.parent) / name)
        for path in candidates:
            if (found := _read(path, sha256, LIMITS[name])) is not None:
                return found
        return None


class ModelFiles:
    """The files of the model and its tokenizer, read and checked at the first call. A call that
    fails is tried again by the next one."""

    def __init__(self, read: Callable[[], Awaitable[TokenizerFiles]]) -> None:
        self._read = read
        self._reading = asyncio.Lock()
        self._found: TokenizerFiles | None = None

    async def __call__(self) -> TokenizerFiles:
        """The files. Raises as ``read`` does."""
        async with self._reading:
            if self._found is None:
                self._found = await self._read()
            return self._found


def _names_tokenizer(places: Places) -> bool:
    """Return True if the user named a tokenizer.json for this run."""
    return named_for_one_run(places.tokenizer) and "tokenizer" not in places.for_all_runs


def _read(path: Path, sha256: str, most: int) -> bytes | None:
    """Content of a file of at most ``most`` bytes, None unless it has the hash."""
    try:
        sound = path.is_file() and path.stat().st_size <= most
        content = path.read_bytes() if sound else b""
    except (OSError, ValueError):  # gone, not readable, or a zero byte in its name
        return None
    if hashlib.sha256(content).hexdigest() != sha256:
        return None
    return content
