"""Reasons for which no epoch is under way, in words."""

import pytest

from node.core.ids import PeerId
from node.epoch.waiting import Lack, Wait

PEERS = tuple(PeerId(f"a long name of peer-{n}") for n in range(5))


@pytest.mark.parametrize(
    ("wait", "text"),
    [
        (Wait(Lack.ENDS), "a peer at the ends"),
        (Wait(Lack.PLAN, peers=PEERS[:1]), "a plan from peer-0"),
        (Wait(Lack.NEXT_LEADER), "the next leader"),
        (Wait(Lack.PEERS, stages=(0, 2)), "a peer for the ends and stage 2"),
        (Wait(Lack.SETTLING), "more peers"),
        (Wait(Lack.WAYS, detail="a connection"), "a connection"),
        (Wait(Lack.MEMORY, detail="memory for it"), "memory for it"),
        (Wait(Lack.EPOCH, stages=(1,), epoch=7), "a peer of stage 1 that holds epoch 7"),
        (Wait(Lack.EPOCH, epoch=7), "a peer of every stage that holds epoch 7"),
        (Wait(Lack.COMMON), "a version that every stage holds"),
        (
            Wait(Lack.COMMON, stages=(1, 2), epoch=7),
            "a version that every stage holds: nobody at stages 1, 2 has epoch 7 as the others "
            "have it",
        ),
        (Wait(Lack.HISTORY, epoch=7), "the history of epoch 7"),
        (
            Wait(Lack.SIDE, peers=PEERS[:1]),
            "the side of peer-0, which says it has counted more tokens",
        ),
        (
            Wait(Lack.VOTERS, here=2, of=4),
            "more than half of the voters (2 of 4 are here)",
        ),
        (
            Wait(Lack.VOTERS, here=3, of=6, peers=PEERS[:3]),
            "more than half of the voters (3 of 6 are here; without peer-0, peer-1, peer-2)",
        ),
        (
            Wait(Lack.VOTERS, here=3, of=7, peers=PEERS[:4]),
            "more than half of the voters (3 of 7 are here; without peer-0, peer-1, peer-2 and 1 "
            "more)",
        ),
        (
            Wait(Lack.VOTERS, here=3, of=8, peers=PEERS),
            "more than half of the voters (3 of 8 are here; without peer-0, peer-1, peer-2 and 2 "
            "more)",
        ),
    ],
)
def test_a_reason_is_said_with_its_peers_and_stages(wait: Wait, text: str) -> None:
    assert str(wait) == text
