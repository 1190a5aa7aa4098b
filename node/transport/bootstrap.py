"""The way into the swarm: initial peers, dialled in the background until each has answered, and
addresses learned later."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from node.core.errors import WireError
from node.core.ids import PeerId
from node.core.newest import Newest
from node.identity.faults import PEERS_KEPT
from node.telemetry.events import Journal
from node.transport.addresses import split_multiaddr

NOT_TRIED = "not tried yet"
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
ADDRESSES_KEPT = 8


class AddressBook:
    """Where peers may be dialled: the newest eight addresses of the 4096 peers learned last."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._pages: Newest[PeerId, tuple[str, ...]] = Newest(PEERS_KEPT)

    def learn(self, peer: PeerId, multiaddrs: Sequence[str]) -> None:
        """Remember multiaddrs that end in ``peer``; other text is ignored."""
        good = []
        for text in multiaddrs[:ADDRESSES_KEPT]:
            with contextlib.suppress(WireError):
                address, named = split_multiaddr(text)
                if named == peer:
                    good.append(address)
        if not good or peer == self._me:
            return
        old = [a for a in self._pages.get(peer, ()) if a not in good]
        self._pages[peer] = tuple((good + old)[:ADDRESSES_KEPT])

    def of(self, peer: PeerId) -> tuple[str, ...]:
        """Addresses without the PeerId, newest first."""
        return self._pages.get(peer, ())


class Bootstrap:
    """``results``: each initial peer's multiaddr, with "" when connected, else why not (yet)."""

    def __init__(
        self, connect: Callable[[Sequence[str]], Awaitable[dict[str, str]]], journal: Journal
    ) -> None:
        self._connect, self._journal = connect, journal
        self.results: dict[str, str] = {}

    async def run(self) -> None:
        """Dial every initial peer, and those that failed again and again; returns when all have
        answered."""
        delay, missing = FIRST_RETRY_S, list(self.results)
        while missing:
            found = await self._connect(missing)
            for address, why in found.items():
                self._note(address, why)
            missing = [address for address, why in found.items() if why]
            if missing:
                await asyncio.sleep(delay)
                delay = min(2 * delay, LONGEST_RETRY_S)

    def _note(self, address: str, why: str) -> None:
        before = self.results[address]
        if before == NOT_TRIED or bool(why) != bool(before):
            said = (
                f"cannot reach initial peer {address}: {why}"
                if why
                else f"connected to initial peer {address}"
            )
            self._journal.emit(
                "transport", "bootstrap", said, level="warning" if why else "info", address=address
            )
        # "backoff" only says that it was tried a moment ago; the earlier reason tells more.
        told = bool(before) and before != NOT_TRIED
        self.results[address] = before if "dial backoff" in why and told else why
