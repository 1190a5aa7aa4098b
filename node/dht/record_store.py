"""What is posted in one run's directory, as far as this peer has heard: decides which records
stand.

Pure: time is an argument, and nothing is sent or fetched here. The adapter and the fake both feed
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from node.core.errors import Refused, WireError
from node.core.ids import PeerId, RunId
from node.dht.record import PeerBody, PeerEntry, peers_key, unwrap
from node.dht.settings import DirectorySettings
from node.identity.records import open_record

SLACK_S = 0.001
"""A record may be stored until this much beside its signed expiry: what a float loses on its
way."""


Admit = Callable[[PeerId, bytes, float], float]
"""``admit(writer, token, now)``: the Unix time until which the writer may take part. Raises
Refused."""


class Outdated(WireError):
    """The writer has posted something newer. Nobody's fault: a copy elsewhere takes a moment to be
    replaced."""


@dataclass(frozen=True, slots=True)
class _Posted:
    raw: bytes
    seq: int
    not_after: float
    entry: PeerEntry | None
    """None for a withdrawal, which is kept until it expires so that no older record can take its
    place."""
    admitted: float = math.inf
    """Unix time from which on the writer is no part of the run."""


class RecordStore:
    """The newest valid record of every writer.

    Sequence numbers are remembered per writer for as long as an older record could still be valid;
    after that an old record is refused because it has expired. So the memory is bounded, and a
    writer whose clock was set back is heard again after one life of a record. At most ``max_peers``
    writers are remembered, and always ``me``; with one record of at most ``max_record`` bytes each,
    that is all the memory strangers can take. ``admit`` decides whose records stand in a private
    run; None: everybody's.
    """

    def __init__(
        self,
        run_id: RunId,
        settings: DirectorySettings,
        me: PeerId | None = None,
        admit: Admit | None = None,
    ) -> None:
        self.key, self._me, self._admit = peers_key(run_id), me, admit
        self._settings = settings
        self._posted: dict[str, _Posted] = {}
        self.refused = 0
        """Records refused so far that no honest peer would have passed on."""

    def offer(self, writer: str, raw: bytes, expires: float, now: float) -> bool:
        """Consider a sealed record found under subkey ``writer``, stored until ``expires`` (Unix
        seconds, as ``now``).

        True when it is news, False when it was known. Raises WireError when it must not be stored
        or passed on: too large, expired or living too long, one writer too many, not signed by
        ``writer`` for this board, stored for another time than was signed, older than what the
        writer has posted since, without a valid admission, or not a peer's body.
        """
        try:
            return self._offer(writer, raw, expires, now)
        except Outdated:
            raise
        except WireError:
            self.refused += 1
            raise

    def _offer(self, writer: str, raw: bytes, expires: float, now: float) -> bool:
        limit = self._settings
        if not now < expires <= now + limit.max_ttl_s:  # false for NaN as well
            raise WireError(f"a record lives at most {limit.max_ttl_s:.0f} s from now")
        if len(raw) > limit.max_record:
            raise WireError(f"a record has at most {limit.max_record} bytes, not {len(raw)}")
        known = self._posted.get(writer)
        if known is not None and known.not_after <= now:
            del self._posted[writer]
            known = None
        if known is not None and known.raw == raw and abs(known.not_after - expires) <= SLACK_S:
            return False  # saves checking the same signature at every reading
        if known is None and writer != self._me and len(self._posted) >= limit.max_peers:
            self._forget_expired(now)
            if len(self._posted) >= limit.max_peers:
                raise WireError(f"{limit.max_peers} peers are posted already")
        peer = PeerId(writer)
        record = open_record(
            raw,
            key=self.key,
            writer=peer,
            now_wall=now,
            max_ttl_s=limit.max_ttl_s,
            max_bytes=limit.max_record,
        )
        if abs(record.not_after - expires) > SLACK_S:
            raise WireError(
                "a record is stored for as long as its writer signed, not for longer or shorter"
            )
        if known is not None and record.seq <= known.seq:
            raise Outdated(f"record {record.seq} comes after {known.seq} of the same writer")
        token, body = unwrap(record.body)
        admitted = self._admitted(peer, token, now)
        entry = (
            PeerEntry(peer, PeerBody.parse(body), record.seq, record.not_after) if body else None
        )
        self._posted[writer] = _Posted(raw, record.seq, record.not_after, entry, admitted)
        return True

    def _admitted(self, peer: PeerId, token: bytes, now: float) -> float:
        """Our own records stand whatever others think of our token. Raises WireError."""
        if self._admit is None or peer == self._me:
            return math.inf
        try:
            return self._admit(peer, token, now)
        except Refused as e:
            raise WireError(f"a record of somebody who is no part of this run: {e.what}") from e

    def newest(self, writer: PeerId) -> tuple[int, float]:
        """Sequence number and expiry of the writer's newest record, withdrawn or not; zeros for
        none."""
        posted = self._posted.get(writer)
        return (posted.seq, posted.not_after) if posted is not None else (0, 0.0)

    def entries(self, now: float) -> dict[PeerId, PeerEntry]:
        """Everybody admitted whose record holds at ``now`` and is not withdrawn, in PeerId
        order."""
        self._forget_expired(now)
        present = [
            p.entry for p in self._posted.values() if p.entry is not None and p.admitted > now
        ]
        return {entry.peer: entry for entry in sorted(present, key=lambda entry: entry.peer)}

    def _forget_expired(self, now: float) -> None:
        for writer in [w for w, posted in self._posted.items() if posted.not_after <= now]:
            del self._posted[writer]
