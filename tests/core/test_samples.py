"""Shares of the sample order: the cursors that a stranger may send, halves, and no position lost or
doubled."""

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.samples import (
    MOST_BITS,
    MOST_CLASSES,
    WHOLE,
    Cursor,
    SampleClass,
    merged,
    parse_cursor,
    rows,
    split,
)
from node.data.order import Sampler


@pytest.mark.parametrize(
    ("cursor", "low", "high"),
    [
        (WHOLE, (SampleClass(0, 1, 0),), (SampleClass(1, 1, 1),)),
        (
            (SampleClass(0, 0, 7, (2, 3, 6)),),
            (SampleClass(0, 1, 8, (2, 6)),),
            (SampleClass(1, 1, 7, (3,)),),
        ),
        (
            (SampleClass(1, 1, 9, (3,)), SampleClass(2, 2, 2)),
            (SampleClass(1, 2, 9), SampleClass(2, 3, 2)),
            (SampleClass(3, 2, 11, (3,)), SampleClass(6, 3, 6)),
        ),
    ],
)
def test_each_half_begins_at_the_first_position_never_taken(cursor, low, high) -> None:
    assert split(cursor) == (low, high)


def even(start: int) -> SampleClass:
    return SampleClass(0, 1, start)


def odd(start: int) -> SampleClass:
    return SampleClass(1, 1, start)


@pytest.mark.parametrize(
    ("a", "b", "whole"),
    [
        (
            (SampleClass(0, 1, 8, (2,)),),
            (SampleClass(1, 1, 7, (3,)),),
            (SampleClass(0, 0, 7, (2, 3)),),
        ),
        ((odd(9),), (even(8),), (SampleClass(0, 0, 8),)),
        # Two classes that were taken unequally far both stay.
        *(((even(a),), (odd(b),), (even(a), odd(b))) for a, b in ((10, 7), (6, 9), (0, 7))),
        (
            (SampleClass(0, 2, 4), SampleClass(1, 2, 5)),
            (SampleClass(2, 2, 6),),
            (even(4), SampleClass(1, 2, 5)),
        ),
    ],
)
def test_halves_that_were_taken_from_equally_far_are_joined(a, b, whole) -> None:
    assert merged(a, b) == whole


def test_unequal_classes_are_joined_once_one_has_caught_up() -> None:
    sampler = Sampler(merged((SampleClass(0, 1, 40),), (SampleClass(1, 1, 3),)))
    sampler.take(30)
    assert split(sampler.cursor()) == ((SampleClass(0, 1, 52),), (SampleClass(1, 1, 51),))


LOW, HIGH = split(WHOLE)


@pytest.mark.parametrize(
    ("a", "b"), [(WHOLE, LOW), (LOW, LOW), (WHOLE, merged(LOW, HIGH)), (split(HIGH)[1], HIGH)]
)
def test_shares_that_overlap_are_not_merged(a: Cursor, b: Cursor) -> None:
    with pytest.raises(ValueError, match="share positions"):
        merged(a, b)


def test_a_class_is_not_halved_for_ever() -> None:
    cursor = WHOLE
    for _ in range(MOST_BITS):
        cursor = split(cursor)[1]
    assert cursor == (SampleClass(2**MOST_BITS - 1, MOST_BITS, 2**MOST_BITS - 1),)
    with pytest.raises(ValueError, match="modulo"):
        split(cursor)


def test_a_cursor_has_few_classes() -> None:
    many = [SampleClass(r, 8, r) for r in range(0, 2 * MOST_CLASSES + 2, 2)]
    most = tuple(many[:MOST_CLASSES])
    assert parse_cursor(rows(most)) == most
    with pytest.raises(ValueError, match="a few"):
        parse_cursor(rows(tuple(many)))
    with pytest.raises(ValueError, match="classes"):
        merged(tuple(many[:40]), (*many[40:], SampleClass(255, 8, 255)))


@pytest.mark.parametrize(
    "said",
    [
        None,
        7,
        "",
        {},
        [],
        [7],
        [8, [9]],
        [8],
        [8, 3],
        [[0, 0, 5]],
        [[0, 0, 5, [], 0]],
        [[0, 0, 5, 3]],
        [[0, 0, 5, "3"]],
        [[0, 0, 5, {"3": 3}]],
        [["0", 0, 5, []]],
        [[0, True, 5, []]],
        [[0, 0, 5.0, []]],
        [[0, 0, 5, [3.0]]],
        [[0, 0, 5, [[3]]]],
        [[0, 0, 5, [None]]],
        [[0, 0, -1, []]],
        [[0, 0, 5, [-1]]],
        [[0, -1, 5, []]],
        [[-1, 1, 5, []]],
        [[0, 0, 2**63, []]],
        [[0, MOST_BITS + 1, 0, []]],
        [[0, 2**62, 0, []]],
        [[1, 0, 1, []]],
        [[4, 2, 4, []]],
        [[1, 1, 4, []]],
        [[1, 1, 5, [2]]],
        [[0, 0, 5, [5]]],
        [[0, 0, 5, [1, 1]]],
        [[0, 0, 5, [3, 2]]],
        [[0, 0, 5, []], [0, 0, 5, []]],
        [[0, 1, 4, []], [0, 2, 4, []]],
        [[1, 1, 5, []], [3, 2, 7, []]],
        [[1, 1, 5, []], [0, 1, 4, []]],
    ],
)
def test_a_hostile_cursor_is_refused(said: object) -> None:
    with pytest.raises(ValueError, match=r"class|cursor|position"):
        parse_cursor(said)


class Owner:
    """Owner of a share, and the positions that are out from it."""

    def __init__(self, cursor: Cursor, out: set[int]) -> None:
        self.sampler = Sampler(cursor)
        self.out = out

    def has(self, position: int) -> bool:
        return any(c.has(position) for c in self.sampler.cursor())


@given(st.integers(0, 2**32))
def test_every_position_is_out_given_back_or_counted_once(seed: int) -> None:
    rng = random.Random(seed)
    owners = [Owner(WHOLE, set())]
    counted = Counter[int]()
    for _ in range(60):
        one = rng.choice(owners)
        match rng.choice(("take", "take", "back", "count", "split", "merge", "send")):
            case "take":
                got = one.sampler.take(rng.randrange(12))
                assert len(set(got)) == len(got)
                assert all(o.out.isdisjoint(got) for o in owners)
                assert all(one.has(p) and not counted[p] for p in got)
                one.out.update(got)
            case "back":
                back = rng.sample(sorted(one.out), rng.randint(0, len(one.out)))
                one.sampler.give_back(back)
                one.out.difference_update(back)
            case "count":
                done = rng.sample(sorted(one.out), rng.randint(0, len(one.out)))
                counted.update(done)
                one.out.difference_update(done)
            case "split" if len(owners) < 6:
                low, high = (Owner(c, set()) for c in split(one.sampler.cursor()))
                for position in one.out:
                    (low if low.has(position) else high).out.add(position)
                owners.remove(one)
                owners += [low, high]
            case "merge" if len(owners) > 1:
                other = rng.choice([o for o in owners if o is not one])
                cursor = merged(one.sampler.cursor(), other.sampler.cursor())
                owners = [o for o in owners if o not in (one, other)]
                owners.append(Owner(cursor, one.out | other.out))
            case _:
                sent = json.loads(json.dumps(rows(one.sampler.cursor())))
                one.sampler = Sampler(parse_cursor(sent))
    assert set(counted.values()) <= {1}
    cursors = [o.sampler.cursor() for o in owners]
    classes = [c for cursor in cursors for c in cursor]
    end = max(c.next for c in classes) + 64
    for p in range(end):
        (of,) = (c for c in classes if c.has(p))
        out = (p in o.out for o in owners)
        assert sum([p >= of.next, p in of.returned, counted[p] == 1, *out]) == 1, p
    # Every free position comes, whichever owner goes on.
    for cursor in cursors:
        free = {p for c in cursor for p in range(end) if c.has(p) and p >= c.next}
        free.update(p for c in cursor for p in c.returned)
        assert free <= set(Sampler(cursor).take(end + len(free)))
