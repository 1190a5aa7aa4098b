"""Shards of a source: a list of checksums, a pattern of addresses, or a data set of the Hub.

Enters: the answers of the server that keeps them. Never: text.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path, PurePosixPath
from urllib.parse import quote, urljoin, urlsplit

import httpx2

from node.core.errors import NetworkFault, UsageFault, refuse
from node.data.kinds import kind_of
from node.data.library import library
from node.data.places import data_file, directory, open_regular
from node.data.settings import NO_PLACES, DataSettings, Places
from node.data.splits import configurations, files_of_split
from node.data.streamed.fetching import asked
from node.data.streamed.files import Shard, size_and_tag

MOST_SHARDS = 100_000
MOST_SIZED = 2048
"""Most shards of a web server that have their sizes in the manifest."""
MOST_ASKED = 64
"""Most shards whose sizes a peer asks a web server for, if the manifest does not have them."""
MOST_LIST = 16 << 20
"""Bytes of a list of checksums."""
AT_ONCE = 16
"""Questions for a shard's size at the same time."""
HUB_S = 30.0
"""Seconds without a byte after which the Hub is held to be gone."""
SUMS = "SHA256SUMS"
"""How a list of checksums is called, as ``sha256sum`` writes it; an ending may follow."""
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")


def is_streamed(source: str, places: Places = NO_PLACES) -> bool:
    """Return True for a source that is read in pieces. A file is judged by its name in the
    manifest, because all peers must read it in the same way. Raises UsageFault for the home of an
    unknown user."""
    kind, _, name = source.partition(":")
    if kind == "hf":
        return directory(name.partition(":")[0], places) is None
    return kind in ("http", "https") or (kind == "file" and _is_list(name))


def _is_list(name: str) -> bool:
    return name.rpartition("/")[2].startswith(SUMS)


@dataclass(frozen=True)
class Listing:
    """Shards found in a source. ``source`` names exactly this state of it."""

    source: str
    shards: tuple[Shard, ...]
    sizes: tuple[int, ...] = ()
    """Bytes of all shards that a web server was asked for, also of shards without text; empty for
    other sources, and where this was read from the disk."""

    @property
    def sha256(self) -> str:
        """Hex hash of every shard's name, size and, where the list says it, hash."""
        body = [[s.name.rpartition("/")[2], s.size, s.sha256] for s in self.shards]
        return hashlib.sha256(json.dumps(body).encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps({"source": self.source, "shards": [astuple(s) for s in self.shards]})

    @classmethod
    def from_json(cls, text: str) -> "Listing":
        """Raises ValueError, TypeError or KeyError for anything else."""
        found = json.loads(text)
        return cls(found["source"], tuple(Shard(*shard) for shard in found["shards"]))


def listed(
    settings: DataSettings, places: Places, client: httpx2.Client, go_on: Callable[[], None]
) -> Listing:
    """List the shards of a source that :func:`is_streamed`. ``go_on`` is called between requests
    and ends the call by raising.

    Raises NetworkFault when the server does not answer; UsageFault for a source that does not
    exist, a list that cannot be read, and a shard in an unknown format.
    """
    source = settings.source
    kind, _, name = source.partition(":")
    if kind == "hf":
        listing = _hub(name, admitted(settings, places))
    elif kind == "file":
        listing = Listing(source, _local(data_file(name, settings.sha256, places)))
    else:
        found = _named(source, client)
        if settings.sizes:
            sized = _with_sizes(found, settings)
        else:
            most = MOST_ASKED
            if places.own:
                most = MOST_SIZED
            sized = _sized(found, client, go_on, most)
        listing = Listing(source, sized, tuple(shard.size for shard in sized))
    shards = tuple(s for s in listing.shards if s.size)
    refuse((not shards, f"{source} has no text", "name a source with at least one shard"))
    for shard in shards:
        kind_of(shard.name)  # before anything is read
    return replace(listing, shards=shards)


def _named(source: str, client: httpx2.Client) -> list[Shard]:
    """The shards of a web server, of sizes that are not known yet."""
    if not _is_list(_path(source)):
        return [Shard(url, 0) for url in _expanded(source)]
    # A path on the server of the list, whatever the name looks like: nobody agreed to another.
    return [
        Shard(urljoin(source, quote(f"./{file}")), 0, digest)
        for file, digest in _sums(_text(source, client), source)
    ]


def _path(url: str) -> str:
    try:
        return urlsplit(url).path
    except ValueError as e:
        raise UsageFault(f"{url} is no address: {e}", "give http://… or https://…") from e


def _expanded(source: str) -> list[str]:
    """``x-{000..012}.jsonl`` as 13 addresses; numbers have the width of the first."""
    found = _RANGE.search(source)
    if found is None:
        return [source]
    step = f"give a range that rises, of at most {MOST_SIZED}"
    # Python reads no number of more than 4,300 digits.
    refuse((len(found[0]) > 100, f"{found[0][:40]}… is no range of shards", step))
    first = int(found[1])
    last = int(found[2])
    refuse(
        (
            not 0 <= last - first < MOST_SIZED,
            f"{found[0]} in {source} is {last - first + 1} shards",
            step,
        )
    )
    width = len(found[1])
    before = source[: found.start()]
    after = source[found.end() :]
    return [f"{before}{n:0{width}}{after}" for n in range(first, last + 1)]


def _sums(text: str, where: str) -> list[tuple[str, str]]:
    """(name, hex sha256) of each line that ``sha256sum`` has written."""
    found: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.rstrip("\r"))
        if match is None or len(found) >= MOST_SHARDS:
            why = "not a hash and a name"
            if match is not None:
                why = f"more than {MOST_SHARDS} shards"
            raise UsageFault(f"{where}, line {number}: {why}", "write it with  sha256sum")
        found.append((match[2], match[1].lower()))
    return found


def _text(url: str, client: httpx2.Client) -> str:
    with asked(url, client, "GET") as answer:
        body = b""
        for piece in answer.iter_raw():
            body += piece
            if len(body) > MOST_LIST:
                raise UsageFault(f"{url} is larger than {MOST_LIST} bytes", "name a list of shards")
    return body.decode("utf-8", errors="replace")


def _with_sizes(shards: Sequence[Shard], settings: DataSettings) -> tuple[Shard, ...]:
    """The shards with the sizes that the manifest says: no server is asked."""
    refuse(
        (
            len(shards) != len(settings.sizes),
            f"{settings.source} has {len(shards)} shards, and the manifest {len(settings.sizes)} "
            "sizes",
            "ask who owns the run; there may be a newer version",
        )
    )
    sizes = zip(shards, settings.sizes, strict=True)
    return tuple(replace(shard, size=size) for shard, size in sizes)


def _sized(
    shards: Sequence[Shard], client: httpx2.Client, go_on: Callable[[], None], most: int
) -> tuple[Shard, ...]:
    """The shards with the sizes that their server reports; it is asked for at most ``most`` of
    them."""
    step = "make larger shards"
    if most < MOST_SIZED:
        step = "make the manifest again with  tutti swarm init  , which writes their sizes"
    refuse(
        (
            len(shards) > most,
            f"{len(shards)} shards whose sizes the manifest does not say: a server would be asked "
            f"for each, and is for {most} at most",
            step,
        )
    )

    def look(shard: Shard) -> Shard:
        go_on()
        return replace(shard, size=size_and_tag(shard.name, client)[0])

    with ThreadPoolExecutor(AT_ONCE, "shards") as pool:
        return tuple(pool.map(look, shards))


def _local(path: Path) -> tuple[Shard, ...]:
    """The shards of a list beside them on this disk."""
    step = f"name the list, or its directory, with  --data PATH ;  sha256sum * > {SUMS}  makes it"
    with open_regular(path, step) as file:
        text = file.read(MOST_LIST + 1)
    refuse((len(text) > MOST_LIST, f"{path} is larger than {MOST_LIST} bytes", step))
    sums = _sums(text.decode("utf-8", errors="replace"), str(path))
    for file, _ in sums:
        parts = PurePosixPath(file).parts
        refuse(
            (
                file.startswith("/") or ".." in parts,
                f"{path} lists {file[:200]!r}, which is not beside it",
                step,
            )
        )
    try:
        return tuple(
            Shard(str(path.parent / file), (path.parent / file).stat().st_size, digest)
            for file, digest in sums
        )
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise UsageFault(f"cannot read {getattr(e, 'filename', path)}: {why}", step) from e


def admitted(settings: DataSettings, places: Places) -> bool:
    """Return True if the Hub may learn the asker's identity, which opens data sets of this user:
    for a manifest of the user's own, and for one that names the content by its hash."""
    return places.own or bool(settings.sha256)


def _hub(name: str, admitted: bool) -> Listing:
    """NAME[@REVISION][:CONFIG]:SPLIT of the Hugging Face Hub, at one commit. ``admitted``: with the
    user's token, if there is one."""
    hub = library("huggingface_hub", "hf:")
    errors = library("huggingface_hub.errors", "hf:")
    where, *rest = name.split(":")
    repository, _, revision = where.partition("@")
    if len(rest) > 1:
        config, split = rest[:2]
    else:
        config, split = ("", *rest, "train")[:2]
    try:
        info = hub.HfApi(token=None if admitted else False).dataset_info(
            repository, revision=revision or None, timeout=HUB_S, files_metadata=True
        )
    except (errors.HfHubHTTPError, errors.HFValidationError) as e:
        status = getattr(getattr(e, "response", None), "status_code", 0)
        if status >= 500:
            raise NetworkFault(f"the Hub says {status}", "try again later") from e
        raise UsageFault(
            f"the Hub has no data set {repository!r} for us: {e}",
            "check hf:NAME:CONFIG:SPLIT, and HF_TOKEN where one must be admitted",
        ) from e
    except (httpx2.HTTPError, OSError) as e:
        raise NetworkFault(f"cannot reach the Hub: {e}", "check the network") from e
    files = {f.rfilename: f for f in info.siblings or ()}
    card = {}
    if info.card_data is not None:
        card = info.card_data.to_dict()
    try:
        chosen = files_of_split(files, configurations(card), config, split, of_one_form=True)
    except UsageFault as e:
        said = split
        if config:
            said = f"{config}:{split}"
        raise UsageFault(
            f"{repository} has no files of {said}: {e.what}",
            f"check hf:NAME:CONFIG:SPLIT ; {e.next_step}",
        ) from e
    shards = tuple(
        Shard(
            hub.hf_hub_url(repository, file, repo_type="dataset", revision=info.sha),
            int(files[file].size or 0),
            str(lfs.sha256) if (lfs := files[file].lfs) else "",
            pinned=True,
        )
        for file in chosen
    )
    return Listing(":".join(("hf", f"{repository}@{info.sha}", *rest)), shards)
