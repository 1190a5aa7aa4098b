"""Orders that the owner of a run signs, and that nobody else can."""

import base64
import json
import string
from pathlib import Path

import pytest

from node.core.errors import Refused, UsageFault
from node.core.ids import RunId
from node.dht.topics import MAX_POSTING
from node.identity.keys import Identity
from node.identity.signed_text import sign_text
from node.orders.order import (
    DOMAIN,
    MAX_ORDER,
    MAX_REASON,
    RunEnded,
    Verb,
    ended,
    going_on,
    next_number,
    read,
    read_all,
    signed,
    together,
)

RUN = RunId("ab" * 32)
WALL = 1_800_000_000.0


@pytest.fixture
def owner(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "owner.key")


def test_an_order_is_read_as_it_was_signed(owner: Identity) -> None:
    text = signed(
        RUN, owner.peer_id, owner, Verb.PAUSE, number=7, begins=WALL, reason="moving disks"
    )
    order = read(RUN, owner.peer_id, text)
    assert (order.number, order.verb, order.begins, order.reason) == (
        7,
        Verb.PAUSE,
        WALL,
        "moving disks",
    )
    assert order.words(WALL + 725) == "by the run's owner 12 min ago: 'moving disks'"
    assert order.words(WALL - 30) == "by the run's owner in 30 s: 'moving disks'"
    widest = signed(
        RUN,
        owner.peer_id,
        owner,
        Verb.END,
        number=1,
        begins=WALL,
        reason="\N{LATIN SMALL LETTER E WITH ACUTE}" * MAX_REASON,
    )
    assert len(widest) <= MAX_ORDER
    assert widest.isascii()


def test_an_end_is_known_from_the_text_that_was_kept(owner: Identity) -> None:
    def text(verb: Verb) -> str:
        return signed(RUN, owner.peer_id, owner, verb, number=1, begins=WALL)

    order = ended(RUN, owner.peer_id, text(Verb.END), WALL)
    assert order is not None
    assert order.sentence(WALL + 725) == "was ended by the run's owner 12 min ago"
    assert order.sentence(WALL - 30) == "will be ended by the run's owner in 30 s"
    assert ended(RUN, owner.peer_id, text(Verb.END), WALL - 1) is None, "not in force yet"
    for other in (text(Verb.PAUSE), "", "rubbish", text(Verb.END)[1:]):
        assert ended(RUN, owner.peer_id, other, WALL) is None


def test_only_the_owner_of_a_run_that_has_one_gives_orders(owner: Identity, tmp_path: Path) -> None:
    other = Identity.load_or_create(tmp_path / "other.key")
    with pytest.raises(UsageFault, match="no owner") as e:
        signed(RUN, "", owner, Verb.PAUSE, number=1, begins=WALL)
    assert "tutti pause" in e.value.next_step
    with pytest.raises(Refused, match="belongs to"):
        signed(RUN, owner.peer_id, other, Verb.PAUSE, number=1, begins=WALL)
    for reason in ("x" * (MAX_REASON + 1), "two\nlines", " blank", "\x1b[2J"):
        with pytest.raises(UsageFault, match="reason"):
            signed(RUN, owner.peer_id, owner, Verb.PAUSE, number=1, begins=WALL, reason=reason)
    wide = "\N{GRINNING FACE}" * MAX_REASON
    with pytest.raises(UsageFault, match="does not fit"):
        signed(RUN, owner.peer_id, owner, Verb.PAUSE, number=1, begins=WALL, reason=wide)
    for number in (0, -1, 1 << 53):
        with pytest.raises(UsageFault, match="number"):
            signed(RUN, owner.peer_id, owner, Verb.PAUSE, number=number, begins=WALL)


def spelled(table: dict[str, object]) -> str:
    return json.dumps(table, sort_keys=True, separators=(",", ":"))


def test_an_order_has_one_text(owner: Identity) -> None:
    text = signed(RUN, owner.peer_id, owner, Verb.PAUSE, number=3, begins=WALL)
    signature, body = text.split("\n")
    digits = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
    last = digits.index(signature[85])
    same = [signature[:85] + digits[last & ~15 | n] + "==" for n in range(16)]
    assert len({base64.b64decode(s, validate=True) for s in same}) == 1
    assert signature in same
    read_ones = [s for s in same if reads(owner, s + "\n" + body)]
    assert read_ones == [signature]
    table = json.loads(body)
    assert reads(owner, sign_text(owner, spelled(table), DOMAIN))
    for other in (
        json.dumps(table),
        spelled(table) + "\n",
        body.replace('"number":3', '"number":3,"number":3'),
        body.replace("pause", "p\\u0061use"),
        body.replace('"number":3', '"number":3 '),
    ):
        assert json.loads(other) == table
        assert not reads(owner, sign_text(owner, other, DOMAIN)), other


def reads(owner: Identity, text: str) -> bool:
    try:
        return read(RUN, owner.peer_id, text).number == 3
    except Refused:
        return False


def test_a_forged_damaged_or_foreign_order_is_refused(owner: Identity, tmp_path: Path) -> None:
    text = signed(RUN, owner.peer_id, owner, Verb.PAUSE, number=3, begins=WALL)
    signature, body = text.split("\n")
    stranger = Identity.load_or_create(tmp_path / "other.key")

    def by_owner(**changes: object) -> str:
        return sign_text(owner, spelled(json.loads(body) | changes), DOMAIN)

    assert read(RUN, owner.peer_id, by_owner()).number == 3
    for bad in (
        signature + "\n" + body.replace('"number":3', '"number":4'),
        sign_text(stranger, body, DOMAIN),
        sign_text(owner, body, "tutti/change/1"),
        signed(RunId("cd" * 32), owner.peer_id, owner, Verb.PAUSE, number=3, begins=WALL),
        by_owner(more=1),
        by_owner(number=0),
        by_owner(number=True),
        by_owner(number=1 << 53),
        by_owner(verb="stop"),
        by_owner(verb=None),
        by_owner(begins=-1),
        by_owner(begins="now"),
        by_owner(begins=1e300),
        by_owner(reason="a\nb"),
        by_owner(reason="x" * (MAX_REASON + 1)),
        by_owner(reason=7),
        body,
        "x",
        "\n",
        "é\n{}",
        text + " ",
        "x" * (MAX_ORDER + 1),
        sign_text(owner, "[]", DOMAIN),
    ):
        with pytest.raises(Refused):
            read(RUN, owner.peer_id, bad)
    with pytest.raises(Refused):
        read(RUN, "", text)


def test_one_order_of_each_kind_is_one_text(owner: Identity) -> None:
    def order(verb: Verb, number: int, reason: str = ""):
        text = signed(RUN, owner.peer_id, owner, verb, number=number, begins=WALL, reason=reason)
        return read(RUN, owner.peer_id, text)

    pause, resume, end = (order(verb, n) for n, verb in enumerate(Verb, 1))
    for good in ((pause,), (end,), (pause, end), (resume, end)):
        assert read_all(RUN, owner.peer_id, together(good)) == good
    for bad in ((), (pause, resume), (end, pause), (end, end), (pause, resume, end)):
        with pytest.raises(Refused):
            read_all(RUN, owner.peer_id, together(bad))
    for text in (together((pause, end)) + "\n", "\n" + pause.text, pause.text + "\n\n" + end.text):
        with pytest.raises(Refused):
            read_all(RUN, owner.peer_id, text)
    wide = "\N{LATIN SMALL LETTER E WITH ACUTE}" * MAX_REASON
    longest = together((order(Verb.RESUME, (1 << 53) - 1, wide), order(Verb.END, 1, wide)))
    assert len(longest) <= 2 * MAX_ORDER + 1 <= MAX_POSTING


def test_numbers_grow_whatever_the_owners_machine_remembers() -> None:
    assert next_number(0, WALL) == int(1000 * WALL)
    assert next_number(int(1000 * WALL) + 5, WALL) == int(1000 * WALL) + 6


def test_an_end_is_final_and_the_number_decides_otherwise(owner: Identity) -> None:
    def order(verb: Verb, number: int, reason: str = ""):
        text = signed(RUN, owner.peer_id, owner, verb, number=number, begins=WALL, reason=reason)
        return read(RUN, owner.peer_id, text)

    pause = order(Verb.PAUSE, 1)
    resume = order(Verb.RESUME, 2)
    end = order(Verb.END, 1)
    assert pause.outranks(None)
    assert resume.outranks(pause)
    assert not pause.outranks(resume)
    assert not pause.outranks(pause)
    assert end.outranks(resume)
    assert not order(Verb.RESUME, 99).outranks(end)
    twin = order(Verb.PAUSE, 1, "the same number")
    assert twin.outranks(pause) != pause.outranks(twin), "all peers choose the same of two"
    assert "an invite" in RunEnded(end).next_step
    assert "the same home" in RunEnded(end).next_step
    step = RunEnded(end, going_on(150, "/a b/swarm.toml")).next_step
    assert "tutti swarm init --continue '/a b/swarm.toml' more.toml --epochs 300 " in step
    assert "stages that are not on this disk" in step
