"""An order of the run's owner, numbered and signed. Enters: the owner's wish, or a text from a
peer. Leaves: the signed text, or the order in it. Never: a file, a socket.

The text is the signature in base64, a line feed, and the signed JSON. It names the run, so it is
worth nothing in another. An order has one text: peers compare orders by it.
"""

import json
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from node.availability.words import ago, rounded
from node.core.errors import Refused, UsageFault
from node.core.ids import PeerId, RunId
from node.identity.keys import Identity
from node.identity.signed_text import sign_text, signed_body

DOMAIN = "tutti/order/1"
MAX_ORDER = 1023
"""Characters of a signed order, all of them ASCII, so that one of each kind fits in a posting."""
KINDS = 2
"""Kinds of orders that hold beside each other: a pause or a resume, and an end."""
MAX_REASON = 120
"""Characters of the owner's reason."""
MAX_NUMBER = 1 << 53
MAX_AT = 1e11
"""Upper bound on Unix seconds, later than any clock."""
_AGAIN = "only the owner of the run gives orders:  tutti swarm pause | resume | end"


class Verb(StrEnum):
    """Actions that an owner can order."""

    PAUSE = "pause"
    RESUME = "resume"
    END = "end"


@dataclass(frozen=True, slots=True)
class Order:
    """An order whose signature was checked. ``number``: larger than that of every earlier order of
    the run; ``begins``: Unix seconds from which it is in force; ``text``: the signed text."""

    number: int
    verb: Verb
    begins: float
    reason: str
    text: str

    def outranks(self, other: "Order | None") -> bool:
        """Return True if this order counts and the other one does not. An end is final; of two
        other orders the one with the larger number counts. If two orders have the same number, all
        peers choose the same one."""
        if other is None:
            return True
        return self._rank() > other._rank()

    def _rank(self) -> tuple[bool, int, str]:
        return self.is_final, self.number, self.text

    @property
    def is_final(self) -> bool:
        """True for an end. Pauses and resumes are of the other kind, and replace each other."""
        return self.verb is Verb.END

    def sentence(self, wall: float) -> str:
        """The order as a predicate about the run: "was paused by the run's owner 12 min ago"."""
        done = {Verb.PAUSE: "paused", Verb.RESUME: "resumed", Verb.END: "ended"}[self.verb]
        verb = "was"
        if self.begins > wall:
            verb = "will be"
        return f"{verb} {done} {self.words(wall)}"

    def words(self, wall: float) -> str:
        """The order as a part of a sentence: "by the run's owner 12 min ago: 'moving disks'";
        ``wall``: Unix time."""
        when = ago(wall - self.begins)
        if self.begins > wall:
            when = f"in {rounded(self.begins - wall)}"
        said = f"by the run's owner {when}"
        if self.reason:
            said += f": '{self.reason}'"
        return said


class RunEnded(Refused):
    """The owner of the run has ended it, so no peer takes part any more. ``next_step``: advice for
    this machine's people, by :func:`going_on` for the owner."""

    def __init__(self, order: Order, next_step: str = "") -> None:
        invited = (
            "its owner may go on in another run, also to export this one: ask for an invite to "
            "that one, and join it with the same home, whose checkpoints it begins with"
        )
        super().__init__(f"this run {order.sentence(time.time())}", next_step or invited)


def going_on(epochs: int, file: str) -> str:
    """Advice for the owner of an ended run: the way to train on from its last epoch, or to export
    it. No peer of an ended run answers, so the stages come together in the next one. ``epochs``:
    number of the run; ``file``: its manifest on this machine."""
    return (
        "go on from its last epoch in another run, and export it from there:  tutti swarm init "
        f"--continue {shlex.quote(file)} more.toml --epochs {2 * epochs} , then  tutti start "
        "more.toml ; stages that are not on this disk come with the machines that had them: each "
        "joins that run with the same home; then  tutti export DIR"
    )


def next_number(known: int, wall: float) -> int:
    """The number of the owner's next order. ``known``: the largest known number, 0 for none. The
    number follows the clock as well, so that an owner whose machine knows of no earlier order does
    not repeat a number."""
    return max(known + 1, int(1000 * wall))


def signed(
    run_id: RunId,
    owner: str,
    identity: Identity,
    verb: Verb,
    *,
    number: int,
    begins: float,
    reason: str = "",
) -> str:
    """The order that others obey. ``begins``: Unix seconds. Raises UsageFault for a run that nobody
    owns and for a reason that is too long or not printable, Refused if ``identity`` does not own
    the run."""
    if not owner:
        raise UsageFault(
            "this run has no owner, so nobody can give it an order",
            "each peer pauses and stops for itself:  tutti pause ,  tutti stop ; a run with an "
            "owner begins with  tutti swarm init --from FILE",
        )
    if identity.peer_id != owner:
        raise Refused(f"the run belongs to {owner}, not to you ({identity.peer_id})", _AGAIN)
    if len(reason) > MAX_REASON or not (reason.isprintable() and reason == reason.strip()):
        raise UsageFault(
            f"a reason has at most {MAX_REASON} printable characters on one line",
            f"say it in fewer words than these {len(reason)} characters",
        )
    if not 0 < number < MAX_NUMBER:
        raise UsageFault(f"order number {number}", "orders are numbered from 1 on")
    body = _packed(
        {
            "run": run_id,
            "number": number,
            "verb": verb.value,
            "begins": round(begins, 3),
            "reason": reason,
        }
    )
    text = sign_text(identity, body, DOMAIN)
    if len(text) > MAX_ORDER:
        raise UsageFault(
            f"the reason does not fit into an order of {MAX_ORDER} characters", "shorten it"
        )
    return text


def read(run_id: RunId, owner: str, text: str) -> Order:
    """The order in a text. Raises Refused, with the reason, for one that nobody may obey: too long,
    of another run, not signed by the owner, or spelled in another way than :func:`signed` does."""
    if len(text) > MAX_ORDER:
        raise Refused(f"an order of {len(text)} characters, at most {MAX_ORDER} are read", _AGAIN)
    try:
        body = signed_body(PeerId(owner), text, DOMAIN)
        table: dict[str, Any] = json.loads(body)
        if set(table) != {"run", "number", "verb", "begins", "reason"}:
            raise ValueError("other fields than an order has")
        if table["run"] != run_id:
            raise ValueError("an order to another run")
        number = table["number"]
        begins = table["begins"]
        reason = table["reason"]
        if type(number) is not int or not 0 < number < MAX_NUMBER:
            raise ValueError("its number is none")
        if type(begins) not in (int, float) or not 0 <= begins < MAX_AT:
            raise ValueError("it begins at no time")
        if type(reason) is not str or len(reason) > MAX_REASON or not reason.isprintable():
            raise ValueError("its reason is no line of text")
        verb = Verb(table["verb"])
        if body != _packed(table):
            raise ValueError("its JSON is spelled in another way than an order is")
    except (ValueError, TypeError, RecursionError, Refused) as e:
        raise Refused(
            f"not an order that the owner signed for this run: {str(e)[:200]}", _AGAIN
        ) from e
    return Order(number, verb, float(begins), reason, text)


def together(orders: Iterable[Order]) -> str:
    """The text of the orders that hold, one of each kind: the lines of each, in their order."""
    return "\n".join(order.text for order in orders)


def read_all(run_id: RunId, owner: str, text: str) -> tuple[Order, ...]:
    """The orders in a text of :func:`together`. Raises Refused as :func:`read`, and for a text that
    holds no order, two of a kind, or an end before another."""
    lines = text.split("\n", 2 * KINDS)
    found: list[Order] = []
    for at in range(0, max(len(lines), 1), 2):
        found.append(read(run_id, owner, "\n".join(lines[at : at + 2])))
    if [order.is_final for order in found] not in ([False], [True], [False, True]):
        raise Refused("not one order of each kind, and an end as the last", _AGAIN)
    return tuple(found)


def ended(run_id: RunId, owner: str, text: str, wall: float) -> Order | None:
    """The order in a text of :func:`together` that has ended the run by ``wall``, in Unix seconds;
    None for any other text."""
    try:
        last = read_all(run_id, owner, text)[-1]
    except Refused:
        return None
    if last.verb is Verb.END and last.begins <= wall:
        return last
    return None


def _packed(table: dict[str, Any]) -> str:
    return json.dumps(table, sort_keys=True, separators=(",", ":"), allow_nan=False)
