"""The writer's side of a record: numbers, expiry, seal."""

from __future__ import annotations

from node.core.errors import UsageFault
from node.core.ids import RunId
from node.dht.record import wrap
from node.dht.settings import DirectorySettings
from node.dht.topics import PEERS, key_of
from node.identity.keys import Identity
from node.identity.records import seal


class Author:
    """Seals one identity's records for one run's directory, each newer and longer-lived than the
    one before under its topic.

    Sequence numbers are the milliseconds of the writer's wall clock, so they keep growing over
    restarts without a file. The expiry must grow too: storages keep whichever record expires later.
    Raises UsageFault for a life that others would refuse. ``admission`` is the writer's token for a
    private run, part of every record.
    """

    def __init__(
        self,
        identity: Identity,
        run_id: RunId,
        settings: DirectorySettings,
        admission: bytes = b"",
    ) -> None:
        if not 0 < settings.ttl_s <= settings.max_ttl_s:
            raise UsageFault(
                f"ttl_s {settings.ttl_s} is not between 0 and max_ttl_s {settings.max_ttl_s}",
                "lower ttl_s",
            )
        self._identity, self._run_id = identity, run_id
        self._settings, self._admission = settings, admission

    def seal(
        self,
        body: bytes,
        now: float,
        heard: tuple[int, float] = (0, 0.0),
        times: float = 1.0,
        topic: str = PEERS,
    ) -> tuple[bytes, float]:
        """The sealed record of ``body`` (empty: a withdrawal) and the Unix time until which it
        holds: ``times`` ``ttl_s`` from now, as far as others take it.

        ``heard`` is the number and expiry of the newest own record that is known under the topic:
        also after a restart with a clock that was set back, others still hold that one.
        """
        # what is rounded below must not live longer than others take
        longest = self._settings.max_ttl_s - 0.001
        life = min(times * self._settings.ttl_s, longest)
        until, after_last = now + life, heard[1] + 0.002
        # further off: the clock was wrong, nobody took it
        if until < after_last <= now + longest:
            until = after_last
        # within SLACK_S of board.py, and the same number on every way it travels
        not_after = round(until, 3)
        key, sealed = key_of(self._run_id, topic), wrap(self._admission, body)
        seq = max(heard[0] + 1, int(now * 1000))
        return seal(self._identity, key, sealed, seq, not_after), not_after
