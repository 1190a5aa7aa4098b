"""Attacks in one process: what the code does with the worst input, in bytes and processor time."""

import contextlib
import json
import time
import tracemalloc

from benchmarks.report import Report
from benchmarks.strangers.siege import CALLBACK_S, GROWTH_MIB
from node.core.errors import WireError
from node.core.ids import PeerId
from node.dht.topics import MAX_POSTING
from node.identity.faults import PEERS_KEPT
from node.outer import census
from node.transport.handshake import Tokens

RECORDS = 64
HONEST = 8


def tokens(report: Report) -> None:
    """Row 14: honest peers that still have their tokens after a flood of accepted strangers."""
    honest = {PeerId(f"honest-{number}") for number in range(HONEST)}
    kept = Tokens(established=lambda peer: peer in honest)
    for peer in honest:
        kept.accept(peer)
    for number in range(2 * PEERS_KEPT):
        kept.accept(PeerId(f"stranger-{number}"))
    left = sum(kept.knows(peer) for peer in honest)
    report.add(
        "14 established peers that keep their tokens",
        left,
        "peers",
        f"of {HONEST}, after {2 * PEERS_KEPT} accepted strangers",
        f"{HONEST}",
        holds=left == HONEST,
    )


def records(report: Report) -> None:
    """Rows 16: records of cells at the limit of replicas, which are read, and of the largest
    posting, which are refused."""
    _postings(report, "records of cells", [4] * (census.MAX_PEERS // 4), read=RECORDS)
    largest = census.MAX_REPLICAS - 1
    left = MAX_POSTING - len(_posting([]))
    too_many = [largest] * (left // len(f"{largest}, "))
    _postings(report, "records of cells that are refused", too_many, read=0)


def _posting(replicas: list[int]) -> bytes:
    body = {
        "cell": "c" * 16,
        "epoch": 1,
        "lineage": "f" * 32,
        "replicas": replicas,
        "works": True,
        "tokens_per_s": 1.0,
        "counts": "",
    }
    return json.dumps(body).encode()


def _postings(report: Report, what: str, replicas: list[int], read: int) -> None:
    """The cost of :data:`RECORDS` records, of which ``read`` have to be read."""
    raw = _posting(replicas)
    begin = time.process_time()
    found = len(_read(raw))
    took = time.process_time() - begin
    tracemalloc.start()
    _read(raw)
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    report.add(
        f"16 memory of {RECORDS} {what}",
        peak,
        "MiB",
        f"{len(raw)} bytes and {sum(replicas)} replicas each, {found} were read",
        f"at most {GROWTH_MIB:.0f}, {read} are read",
        holds=peak <= GROWTH_MIB and found == read,
    )
    report.add(
        f"16 processor time of {RECORDS} {what}",
        took,
        "s",
        "at once, between two looks of the event loop at anything else",
        f"below {CALLBACK_S}",
        holds=took < CALLBACK_S and found == read,
    )


def _read(raw: bytes) -> list[list[int]]:
    """The stages of the peers of each cell; records that are refused are left out."""
    found: list[list[int]] = []
    for _ in range(RECORDS):
        with contextlib.suppress(WireError):
            found.append(census.CellRecord.parse(raw).stages)
    return found
