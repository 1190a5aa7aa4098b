"""Files of the run, named by a hash in its manifest, that this peer has."""

import hashlib
from pathlib import Path

from node.config import NodeConfig
from node.core.errors import LocalFault
from node.data.tokenizer import Tokenizer, open_tokenizer
from node.manifest import Manifest


class RunFiles:
    """The tokenizer of a run at one peer: in memory at the ends, else a file that the operator
    named, else a copy that was fetched from another peer. Methods block on the disk."""

    def __init__(self, config: NodeConfig, manifest: Manifest, tokenizer: Tokenizer | None) -> None:
        self._config = config
        self._manifest = manifest
        self._tokenizer = tokenizer

    def read(self, sha256: str) -> bytes | None:
        """The file with this hex sha256, None where it is not here or not one of the run's."""
        data = self._manifest.data
        if not sha256 or sha256 != data.tokenizer_sha256:
            return None
        if self._tokenizer is not None:
            return self._tokenizer.to_json()
        try:
            kept = self._kept().read_bytes()
            if hashlib.sha256(kept).hexdigest() == sha256:
                return kept
        except OSError:
            pass  # never fetched, or gone
        try:
            return open_tokenizer(data, self._config.places_of(self._manifest)).to_json()
        except LocalFault:
            return None

    def keep(self, tokenizer_json: bytes) -> None:
        """Keep a copy that was fetched and verified. Raises Refused and OutOfResources."""
        self._config.keep_tokenizer(self._manifest.run_id, tokenizer_json)

    def _kept(self) -> Path:
        return self._config.tokenizer_path(self._manifest.run_id)
