"""The file of receipts: what is damaged costs the records that it hits, and the size is bounded."""

import zlib
from itertools import pairwise
from pathlib import Path

import pytest

from node.coordinator.credit import book as books
from node.coordinator.credit.book import (
    LONGEST,
    MARK,
    Damage,
    FileBook,
    framed,
    read,
    records,
)
from node.core.errors import UsageFault

RECORDS = [bytes([n]) * 50 for n in range(6)]


def written(tmp_path: Path, most: int = 1 << 20) -> FileBook:
    book = FileBook(tmp_path / "deep" / "receipts", most)
    for record in RECORDS:
        book.append(record)
    return book


def test_records_come_back_in_their_order(tmp_path: Path) -> None:
    book = written(tmp_path)
    assert list(records(read(book.path))) == RECORDS
    assert book.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("at", range(0, 6 * 62, 7))
def test_a_damaged_byte_costs_one_record_and_its_place_is_named(tmp_path: Path, at: int) -> None:
    raw = bytearray(read(written(tmp_path).path))
    raw[at] ^= 0x55
    found = list(records(bytes(raw)))
    lost = at // len(framed(RECORDS[0]))
    assert [r for r in found if isinstance(r, bytes)] == RECORDS[:lost] + RECORDS[lost + 1 :]
    (damage,) = (d for d in found if isinstance(d, Damage))
    assert damage.at <= at < damage.at + damage.nbytes
    assert damage.nbytes == len(framed(RECORDS[0]))


def test_a_record_that_breaks_off_costs_nothing_before_and_behind_it(tmp_path: Path) -> None:
    book = written(tmp_path)
    raw = read(book.path)
    book.path.write_bytes(raw[:-20])
    book.append(RECORDS[0])
    found = list(records(read(book.path)))
    assert found[:5] == RECORDS[:5]
    assert isinstance(found[5], Damage)
    assert found[6] == RECORDS[0]


def test_old_records_go_when_two_files_are_full(tmp_path: Path) -> None:
    size = len(framed(RECORDS[0]))
    book = written(tmp_path, most=2 * size)
    older, newer = book.files
    kept = [*records(read(older)), *records(read(newer))]
    assert kept == RECORDS[2:]
    assert all(f.stat().st_size <= 2 * size for f in book.files)
    assert all(a < b for a, b in pairwise(kept) if isinstance(a, bytes) and isinstance(b, bytes))


def test_a_record_larger_than_a_file_is_kept_alone(tmp_path: Path) -> None:
    book = FileBook(tmp_path / "receipts", 10)
    book.append(RECORDS[0])
    book.append(RECORDS[1])
    assert [list(records(read(f))) for f in book.files] == [[RECORDS[0]], [RECORDS[1]]]


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageFault):
        read(tmp_path / "nothing")
    with pytest.raises(UsageFault):
        read(tmp_path)


def compared(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> tuple[list[bytes | Damage], int, int]:
    """The pieces of a file, the bytes that were compared for them, and the comparisons."""
    sizes: list[int] = []

    class Counting:
        @staticmethod
        def crc32(piece: bytes | memoryview) -> int:
            sizes.append(len(piece))
            return zlib.crc32(piece[:16])  # the hostile ones are wrong in any case

    with monkeypatch.context() as patched:
        patched.setattr(books, "zlib", Counting)
        found = list(records(raw))
    return found, sum(sizes), len(sizes)


@pytest.mark.parametrize(
    "size",
    [pytest.param(LONGEST, id="long records"), pytest.param(0, id="empty ones")],
)
def test_a_file_full_of_marks_is_given_up_in_linear_time(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(books, "LOST_LEAST", 1 << 20)
    heads = (MARK + size.to_bytes(4, "big") + b"\1\2\3\4") * 1_000_000
    before = framed(RECORDS[0])
    found, nbytes, count = compared(monkeypatch, heads)
    assert found == [Damage(0, len(heads))]
    assert nbytes <= books.LOST * len(heads) + LONGEST
    assert count <= books.LOST * len(heads) // books.MARK_COST + 1
    assert list(records(before + heads))[0] == RECORDS[0], "what comes before the damage counts"


def test_damaged_lengths_cost_no_other_record() -> None:
    """A length that is too large makes the reader compare everything behind it in vain."""
    longest = b"x" * (1 << 20)
    raw = bytearray(b"".join(framed(bytes([n]) + longest) for n in range(8)))
    for n in (0, 3, 5):
        at = n * len(framed(b"0" + longest))
        raw[at + 4 : at + 8] = (LONGEST - 1).to_bytes(4, "big")
    found = list(records(bytes(raw)))
    assert [r[0] for r in found if isinstance(r, bytes)] == [1, 2, 4, 6, 7]
    assert sum(isinstance(r, Damage) for r in found) == 3
