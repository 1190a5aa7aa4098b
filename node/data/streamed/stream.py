"""Text that is larger than the disk: pieces of it are fetched, tokenised by threads, kept below a
cap, and forgotten.

Only wanted pieces, and the ones that follow them, are fetched. A server that is gone is asked again
for as long as somebody waits. The list of shards is kept on the disk too, so that a later start
need not ask.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from math import inf
from pathlib import Path

import numpy as np

from node.core.errors import LocalFault, NetworkFault, OutOfResources, UsageFault, refuse
from node.core.newest import Newest
from node.core.tasks import Tasks
from node.data.confined.process import ParseFault
from node.data.kinds import FileKind, kind_of
from node.data.library import library
from node.data.readers import TEXTS, LeftOut, RowFormat
from node.data.settings import NO_PLACES, DataSettings, Places
from node.data.streamed.documents import documents_of, kind_in, made_anew
from node.data.streamed.fetching import host_entry, web_client
from node.data.streamed.files import WHOLE, Files, Shard
from node.data.streamed.pieces import Pieces
from node.data.streamed.shards import Listing, admitted, listed
from node.data.token_file import SUM, id_type, whole, with_sum
from node.data.tokenizer import BYTES, Tokenizer, document_ids, mark_between
from node.telemetry.resources import cores

WORKERS = 4
"""Threads that fetch and tokenise, or fewer on a machine with fewer cores."""
FIRST_PAUSE_S = 0.5
"""First pause, in seconds, after a piece could not be fetched."""
LONGEST_PAUSE_S = 30.0
"""Longest pause, in seconds, after a piece could not be fetched."""
DATA_DISK = 8 << 30
"""Bytes of a stream that are kept, where nothing else is said."""
REFUSED_S = 15.0
"""Seconds for which a shard that its server refuses is asked for again, before other text is read
in its place: servers refuse for a moment while files are replaced."""
ELSEWHERE = 4
"""Other pieces that are tried in place of a piece that cannot be read."""
AGAIN_S = 600.0
"""Seconds after which a piece that was replaced is asked for again."""
SAMPLED = 4
"""Pieces that are read to tell how many windows one has."""
SOUND = 1 << 17
"""Most pieces that are known to be sound: more than the samples of a micro-batch. With fewer than a
micro-batch needs, the pieces being read would push each other out for ever."""
_FORMAT = 1
_NOW, _SOON, _LATER = range(3)
_ARRAY = FileKind("json")
_LINES = FileKind("lines")
_log = logging.getLogger("tutti.data")


class NoDocument(UsageFault):
    """No document begins in any piece of the text to train on, or of the text that is held out. It
    is the same at every try."""


def open_stream(
    settings: DataSettings,
    seq_len: int,
    tokenizer: Tokenizer,
    home: Path,
    places: Places = NO_PLACES,
    cap: int = DATA_DISK,
    form: RowFormat = TEXTS,
) -> "Stream":
    """Open the text that ``settings.source`` names; at most ``cap`` bytes of it are kept under
    ``home/data/stream``. ``form``: how its rows become documents. Blocks while the source is asked
    for its list of shards, unless that is known here for ``settings.sha256``.

    Raises NetworkFault if the source does not answer, UsageFault if there is no such source or it
    is at a place that is not allowed, and OutOfResources if the pieces that are read at the same
    time do not fit below the cap.
    """
    # Shards are wanted as they are stored: the list has the sizes and hashes of the stored bytes.
    plain = {"user-agent": "tutti", "accept-encoding": "identity"}
    token = _token(settings, places)
    client = web_client(_hosts(settings, places), plain | token)
    if form == TEXTS:
        form = RowFormat(settings.column, encoding=settings.encoding)
    files = Files(client, home / "data" / "stream", cap, form.parsers())
    named = hashlib.sha256(f"{settings.source}\n{places.data}".encode()).hexdigest()[:32]
    kept = home / "data" / f"{named}.shards"
    listing = _known(kept, settings.sha256)
    if listing is None:
        listing = listed(settings, places, client, files.go_on)
        if settings.sha256.lower() in ("", listing.sha256):
            with contextlib.suppress(OutOfResources):  # it is asked for again at the next start
                files.put(kept, listing.to_json().encode())
    refuse(
        (
            bool(token) and not places.own and not all(s.sha256 for s in listing.shards),
            f"{settings.source} has files without a hash, which are fetched in your name: they "
            "could be a data set that only you may read",
            "ask who owns the run for a public data set, or join as a block stage",
        )
    )
    stream = Stream(listing, settings, seq_len, tokenizer, files, form)
    piece = settings.windows * seq_len * id_type(tokenizer, form.chat).itemsize
    ids = 2 * stream.pieces.lanes * piece
    largest, room = _largest(listing.shards, form, _ARRAY)
    if ids + 2 * room > cap and kind_in(files, largest, form) == _LINES != kind_of(largest.name):
        _, room = _largest(listing.shards, form, _LINES)
    needed = ids + 2 * room
    if needed > cap:
        raise OutOfResources(
            f"{settings.source}: {needed >> 20} MiB are read by turns, and data_disk is "
            f"{cap >> 20} MiB",
            f"set  data_disk = {needed}  or more in config.toml",
        )
    return stream


def _largest(shards: Sequence[Shard], form: RowFormat, json: FileKind) -> tuple[Shard, int]:
    """Return the shard that takes most of this disk, and its bytes: twice its size if its text is
    made anew, 0 if it is read in parts. ``json``: format of the shards called .json."""

    def room(shard: Shard) -> int:
        kind = kind_of(shard.name)
        if made_anew(json if kind == _ARRAY else kind, form):
            return 2 * shard.size
        if shard.remote and shard.size <= WHOLE:
            return shard.size
        return 0

    found = max(shards, key=room)
    return found, room(found)


def _known(kept: Path, sha256: str) -> Listing | None:
    """The listing of an earlier start, None if there is none or its hash is another one."""
    try:
        found = Listing.from_json(kept.read_text(encoding="utf-8"))
        return found if found.sha256 == sha256.lower() else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _hosts(settings: DataSettings, places: Places) -> tuple[str, ...]:
    """Hosts outside the public Internet that may be fetched from: hosts that the user allows, the
    user's own Hub, and the host of a manifest that is the user's own."""
    if settings.source.startswith("hf:"):
        endpoint = library("huggingface_hub.constants", "hf:").ENDPOINT
        return (*places.hosts, *host_entry(endpoint))
    if places.own:
        return (*places.hosts, *host_entry(settings.source))
    return tuple(places.hosts)


def _token(settings: DataSettings, places: Places) -> dict[str, str]:
    """Header with the user's token for the Hub, if one was set up here and the Hub may learn it. A
    redirect to another host leaves it out."""
    if not settings.source.startswith("hf:") or not admitted(settings, places):
        return {}
    token = library("huggingface_hub", "hf:").get_token()
    if not token:
        return {}
    return {"authorization": f"Bearer {token}"}


class Stream:
    """Windows of ``seq_len + 1`` tokens of a listing's text, by the position of their sample.

    Pieces are kept as token ids in ``files``, the folder of this stream.
    """

    def __init__(
        self,
        listing: Listing,
        settings: DataSettings,
        seq_len: int,
        tokenizer: Tokenizer,
        files: Files,
        form: RowFormat = TEXTS,
    ) -> None:
        """Raises UsageFault when there is nothing to train on, and for plain text where rows are
        conversations."""
        for shard in listing.shards:
            form.check(kind_of(shard.name).form, shard.name)
        self.listing = listing
        self.seq_len = seq_len
        self.files = files
        self.pieces = Pieces(
            [s.size for s in listing.shards], settings.windows, settings.holdout, settings.seed
        )
        self.tokenised = 0
        """Tokens made since the start."""
        self.form = form
        """Rule that makes documents of rows."""
        self.marked = form.chat
        """The ids carry marks, as :mod:`node.data.marks` has them."""
        self.left = LeftOut(settings.source)
        """Rows without a document that were met."""
        plain = all(kind_of(s.name).form == "text" for s in listing.shards)
        most = tokenizer.vocab
        if plain and settings.tokenizer == "bytes":
            most = BYTES
        self.end = mark_between(settings, tokenizer, most)
        """The id that ends a document, where documents are kept apart."""
        self._tokenizer = tokenizer
        self._kind = id_type(tokenizer, form.chat)
        self._named = [_FORMAT, listing.sha256, settings.column, settings.holdout, settings.seed]
        if form.key and form != RowFormat(settings.column):
            self._named.append(form.key)
        if settings.end >= 0:
            self._named.append(settings.end)
        self._sound = Newest[int, None](SOUND)
        """Pieces with a file that was found sound since the start."""
        self._replacements = Newest[int, tuple[int, float]](SOUND)
        """Pieces that are read in place of others, and the time of the loop at each choice."""
        self._refused = dict[int, float]()
        """Shards that are refused though the network works: the time of the loop at the first
        refusal since one of their pieces was read."""
        self._making = dict[int, asyncio.Future[None]]()
        """Pieces that are wanted and not here yet, in the order in which they were asked for."""
        self._urgency = dict[int, int]()
        """Highest urgency of each piece in ``_making``."""
        self._under_way = set[int]()
        self._waiting_again = set[int]()
        """Pieces that could not be had at the last try."""
        self._working = 0
        self._pause = 0.0
        self._warned = False
        self.trouble = ""
        """The reason for which text cannot be had, empty for none."""
        self._reported = Newest[str, None](1000)
        """Reasons, already reported, for which pieces were replaced by others."""
        self._workers = min(WORKERS, cores())
        self._pool = ThreadPoolExecutor(self._workers, "data")
        self._tasks = Tasks("data")

    tokens = None
    """Number of tokens; nobody has counted them."""

    @property
    def sha256(self) -> str:
        return self.listing.sha256

    @property
    def said(self) -> str:
        """Size of the text, for people."""
        total = sum(self.pieces.sizes)
        return f"{total / 1e6:,.1f} MB in {len(self.pieces.sizes)} shards, streamed"

    @property
    def held_out_windows(self) -> int:
        return self.pieces.held * self.pieces.windows

    def measured(self) -> int:
        """Windows that a piece has on average, by a few of them; at least 1. Blocks. Raises what
        :func:`documents_of` raises, and UsageFault where there is nothing to train on or to
        evaluate with."""
        count = min(SAMPLED, self.pieces.count)
        numbers = [i * self.pieces.count // count for i in range(count)]
        ids = sum(map(len, self._pool.map(self._tokenised, numbers)))
        refuse(
            (
                not ids,
                f"{self.listing.source} has no text in the field {self.form.column!r} where it was "
                f"read: {self.left.said or 'it is empty'}",
                "name the field of its documents:  --set data.column=NAME",
            )
        )
        if self.pieces.held:
            self._filled(-1)
        self.left.report()
        return max(1, ids // count // self.seq_len)

    def expect(self, positions: Iterable[int]) -> None:
        """Fetch the pieces of these samples soon, in this order. Two pieces of each lane have room
        on the disk for certain: later ones would push them out before they are read."""
        numbers = dict.fromkeys(self.pieces.piece(p) for p in positions)
        for number in islice(numbers, 2 * self.pieces.lanes):
            self._want(number, _SOON)

    async def rows(self, positions: Sequence[int]) -> np.ndarray:
        """Token ids of the samples at these positions, int64 [B, T + 1]; waits until they can be
        had."""
        places = [self.pieces.place(p) for p in positions]
        found = await self._rows(places)
        for number in dict.fromkeys(n for n, _ in places):
            self._want(self.pieces.following(number), _LATER)
        return found

    async def held_out_rows(self, i: int, size: int) -> np.ndarray:
        """Token ids of the ``i``-th ``size`` held-out windows, round again at the end, as
        :meth:`rows` gives them."""
        return await self._rows([self.pieces.held_out(i * size + j) for j in range(size)])

    async def close(self) -> None:
        """Stop fetching, and cancel everything that waits."""
        self.files.stop()
        self._tokenizer.interrupt()
        await self._tasks.close()
        for future in self._making.values():
            future.cancel()
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)
        self.files.close()

    # ------------------------------------------------------------ on the loop

    async def _rows(self, places: Sequence[tuple[int, int]]) -> np.ndarray:
        numbers = dict.fromkeys(number for number, _ in places)
        while True:
            missing = [n for n in numbers if not self._there(n)]
            if not missing:
                try:
                    read = [(self._stands_for(number), window) for number, window in places]
                    found = await asyncio.to_thread(self._read, read)
                except OSError as e:
                    for number in numbers:
                        self._sound.pop(number, None)
                    await self._failed(e)
                    continue
                if found is not None:
                    return found
            await asyncio.gather(*(asyncio.shield(self._want(n, _NOW)) for n in missing))

    def _stands_for(self, number: int) -> int:
        """The piece that is read for this one: itself, unless it was replaced."""
        return self._replacements.get(number, (number, inf))[0]

    def _there(self, number: int) -> bool:
        read, chosen = self._replacements.get(number, (number, inf))
        if number not in self._sound or asyncio.get_running_loop().time() - chosen >= AGAIN_S:
            return False
        return self.files.used(self._path(read))

    def _want(self, number: int, urgency: int) -> asyncio.Future[None]:
        future = self._making.get(number)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            if self._there(number):
                future.set_result(None)
                return future
            self._making[number] = future
        self._urgency[number] = min(urgency, self._urgency.get(number, _LATER))
        if self._working < self._workers:
            self._working += 1
            self._tasks.spawn(self._work(), "tokenise")
        return future

    async def _work(self) -> None:
        """Make pieces, the most urgent first, until none is left."""
        try:
            while waiting := [n for n in self._making if n not in self._under_way]:
                number = min(waiting, key=self._urgency.__getitem__)
                others = self._others(number)
                self._under_way.add(number)
                try:
                    read = await asyncio.get_running_loop().run_in_executor(
                        self._pool, self._make, number, others
                    )
                except (LocalFault, OSError) as e:
                    if isinstance(e, NoDocument) or (others and isinstance(e, ParseFault)):
                        self._give_up(number, e)
                        continue
                    self._waiting_again.add(number)
                    self._note_refusal(number, e)
                    await self._failed(e)
                    self._making[number] = self._making.pop(number)  # behind the others
                except asyncio.CancelledError:
                    raise
                except BaseException as e:  # a panic of a library in Rust is no Exception
                    self._give_up(number, e)
                    raise
                else:
                    self._waiting_again.discard(number)
                    self._pause = 0.0
                    if self._warned and not self._waiting_again:
                        self._warned = False
                        self.trouble = ""
                        _log.info("text for training can be had again")
                    del self._urgency[number]
                    self._note_read(number, read)
                    self._sound[number] = None
                    future = self._making.pop(number)
                    if not future.done():
                        future.set_result(None)
                finally:
                    self._under_way.discard(number)
        finally:
            self._working -= 1

    def _others(self, number: int) -> int:
        """How many other pieces may be tried in place of this one."""
        now = asyncio.get_running_loop().time()
        since = min(self._refused.get(part.shard, now) for part in self.pieces.parts(number))
        if now - since < REFUSED_S:
            return 0
        return ELSEWHERE

    def _note_refusal(self, number: int, e: Exception) -> None:
        """Take note that a piece could not be had. A fault of the network or of this disk is no
        refusal, and the next refusal counts as the first."""
        now = asyncio.get_running_loop().time()
        for part in self.pieces.parts(number):
            if isinstance(e, NetworkFault | OutOfResources | OSError):
                self._refused.pop(part.shard, None)
            else:
                self._refused.setdefault(part.shard, now)

    def _note_read(self, number: int, read: int) -> None:
        """Take note of the piece that was read for this one."""
        if read != number:
            self._replacements[number] = (read, asyncio.get_running_loop().time())
            return
        self._replacements.pop(number, None)
        for part in self.pieces.parts(number):
            self._refused.pop(part.shard, None)

    def _give_up(self, number: int, why: BaseException) -> None:
        """Raise ``why`` where a piece is waited for: neither it nor other text can be read, and
        that is nobody's to mend but the owner of the run."""
        if number >= 0:
            self.trouble = str(why)
        self._waiting_again.discard(number)
        self._urgency.pop(number, None)
        future = self._making.pop(number)
        if not future.done():
            future.set_exception(why)
            future.exception()  # nobody may wait for a piece that was only expected

    async def _failed(self, e: Exception) -> None:
        step = ""
        if isinstance(e, LocalFault):
            step = f"; {e.next_step}"
        self.trouble = f"{e}{step}"
        if not self._warned:
            self._warned = True
            _log.warning("text for training cannot be had: %s%s; tried again", e, step)
        self._pause = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause))
        await asyncio.sleep(self._pause)

    # ------------------------------------------------------------ on threads

    def _make(self, number: int, others: int = 0) -> int:
        """Tokenise a piece, unless that was done before, and return its number. If it cannot be
        read though the server answers, that is done with one of up to ``others`` other pieces,
        because samples that no peer can read would come back in every epoch. If none of them can
        be read either, raises the fault."""
        path = self._path(number)
        if self.files.used(path) and whole(path):
            return number
        try:
            ids = self._filled(number)
        except (NetworkFault, OutOfResources, OSError, NoDocument):
            raise
        except Exception as e:
            if not others and isinstance(e, LocalFault):
                raise
            if not others:  # of a library, for bytes that it cannot read
                raise UsageFault(f"cannot read piece {number}: {e!r}", "report this") from e
            if str(e) not in self._reported:
                self._reported[str(e)] = None
                _log.warning("%s; other text is read in its place", e)
            # Under its own name: this piece is asked for again later.
            return self._make(self.pieces.elsewhere(number), others - 1)
        self.files.put(path, with_sum(ids.astype(self._kind).tobytes()))
        return number

    def _filled(self, number: int) -> np.ndarray:
        """Token ids of a piece, of the next one where no document begins in it. Raises NoDocument
        if none begins in the others either."""
        most = self.pieces.count + self.pieces.held
        fault = NoDocument(f"{self.listing.source} has no text", "ask who owns the run")
        if number < 0:
            most = self.pieces.held
            fault = NoDocument(
                f"no document begins in the last {self.pieces.held_bytes} bytes of "
                f"{self.listing.source}, which are held out",
                "set data.holdout to a larger share:  tutti swarm init --set data.holdout=SHARE",
            )
        for _ in range(most):
            ids = self._tokenised(number)
            self.left.report()
            if len(ids):
                return ids
            number = self.pieces.after(number)
        raise fault

    def _tokenised(self, number: int) -> np.ndarray:
        """Token ids of a piece, none for one in which no document begins."""
        ids: list[np.ndarray] = []
        for part in self.pieces.parts(number):
            documents, ended = documents_of(
                self.files, self.listing.shards[part.shard], part, self.form, self.left
            )
            end = None
            if ended:
                end = self._tokenizer.eos
            ids += [document_ids(d, self._tokenizer, end).astype(self._kind) for d in documents]
        found = np.empty(0, dtype=self._kind)
        if ids:
            found = np.concatenate(ids)
        self.tokenised += len(found)
        return found

    def _path(self, number: int) -> Path:
        parts = [[p.shard, p.start, p.stop] for p in self.pieces.parts(number)]
        name = json.dumps([*self._named, self._tokenizer.digest, parts])
        return self.files.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.ids"

    def _read(self, places: Sequence[tuple[int, int]]) -> np.ndarray | None:
        """The windows at these places, or None when a piece has been deleted meanwhile."""
        length = self.seq_len + 1
        rows = np.empty((len(places), self.seq_len + 1), dtype=np.int64)
        for row, (number, window) in zip(rows, places, strict=True):
            try:
                with open(self._path(number), "rb") as file:
                    ids = (os.fstat(file.fileno()).st_size - SUM) // self._kind.itemsize
                    spare = ids - length
                    if spare > 0 and self.pieces.windows > 1:
                        file.seek(window * spare // (self.pieces.windows - 1) * self._kind.itemsize)
                    read = file.read(min(ids, length) * self._kind.itemsize)
            except FileNotFoundError:
                return None
            row[:] = np.resize(np.frombuffer(read, dtype=self._kind), length)
        return rows
