"""A source's name to a stream, with what is kept of it on this disk."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import httpx2

from node.core.errors import OutOfResources
from node.data.cache import id_type
from node.data.readers import library
from node.data.settings import DataSettings
from node.data.streamed.files import TIMEOUT, WHOLE, Files, kind_of
from node.data.streamed.shards import Listing, listed
from node.data.streamed.stream import Stream
from node.data.tokenizer import Tokenizer


def open_stream(
    settings: DataSettings, seq_len: int, tokenizer: Tokenizer, home: Path, place: str, cap: int
) -> Stream:
    """The text that ``settings.source`` names, of which at most ``cap`` bytes are kept under
    ``home/data/stream``. Blocks while the source says which shards it has, unless that is known
    here for ``settings.sha256``.

    Raises NetworkFault when it does not answer, UsageFault for what is no such source, and
    OutOfResources when what is read at the same time does not fit below the cap.
    """
    # Shards are wanted as they are stored: their sizes and hashes are those of the list.
    plain = {"user-agent": "tutti", "accept-encoding": "identity"}
    client = httpx2.Client(timeout=TIMEOUT, follow_redirects=True, headers=plain | _token(settings))
    files = Files(client, home / "data" / "stream", cap)
    named = hashlib.sha256(f"{settings.source}\n{place}".encode()).hexdigest()[:32]
    kept = home / "data" / f"{named}.shards"

    def look() -> Listing:
        found = listed(settings.source, place, client, files.go_on)
        if settings.sha256.lower() not in ("", found.sha256):
            return found  # the source has others now; what is kept is still the run's
        with contextlib.suppress(OutOfResources):  # it is asked for again at the next start
            files.put(kept, found.to_json().encode())
        return found

    listing = _known(kept, settings.sha256) or look()
    stream = Stream(listing, settings, seq_len, tokenizer, files, look)
    whole = (
        2 * s.size if kind_of(s.name).packed else s.size
        for s in listing.shards
        if kind_of(s.name).packed or (s.remote and s.size <= WHOLE)
    )
    piece = settings.windows * seq_len * id_type(tokenizer).itemsize
    needed = 2 * stream.pieces.lanes * piece + 2 * max(whole, default=0)
    if needed > cap:
        raise OutOfResources(
            f"{settings.source}: {needed >> 20} MiB are read by turns, and data_disk is "
            f"{cap >> 20} MiB",
            f"set  data_disk = {needed}  or more in config.toml",
        )
    return stream


def _known(kept: Path, sha256: str) -> Listing | None:
    """What was found the last time, if it is what is wanted."""
    try:
        found = Listing.from_json(kept.read_text())
        return found if found.sha256 == sha256.lower() else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _token(settings: DataSettings) -> dict[str, str]:
    """For the Hub, who we are, where that was set up here. A redirect to another host leaves it
    out."""
    if not settings.source.startswith("hf:"):
        return {}
    token = library("huggingface_hub", "hf:").get_token()
    return {"authorization": f"Bearer {token}"} if token else {}
