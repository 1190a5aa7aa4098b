"""Four members of a round, one of them faulty: the tensors they give, the result that the others
must have, and its check. Enters: outcomes of the survivors. Leaves: their errors. Never: arithmetic
of node/averaging."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import torch

from node.averaging.exchange.request import RoundOutcome, RoundRequest, WeightCaps
from node.averaging.settings import AveragingSettings
from node.core.ids import PeerId, RoundId

SURVIVORS = (PeerId("a"), PeerId("b"), PeerId("c"))
FAULTY = PeerId("d")
MEMBERS = (*SURVIVORS, FAULTY)
PARTS, NUMBERS = 16, 1 << 16
"""4 MiB of fp32 a member, four parts for each owner, which travel in two groups of eight chunks."""
SHAPES = {f"part.{i:02}": (NUMBERS,) for i in range(PARTS)}
SETTINGS = AveragingSettings(group_bytes=2 * 4 * NUMBERS)
CHUNK = NUMBERS
TOKENS = {peer: 10 * (i + 1) for i, peer in enumerate(MEMBERS)}


@cache
def given(peer: PeerId) -> dict[str, torch.Tensor]:
    """Sums over ``TOKENS[peer]`` tokens; the same in every process."""
    seed = int.from_bytes(hashlib.sha256(peer.encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * TOKENS[peer]
        for name, shape in SHAPES.items()
    }


@cache
def truth(name: str, contributors: tuple[PeerId, ...]) -> torch.Tensor:
    """The exact mean of these contributions, summed in the order of PeerIds."""
    first, *rest = sorted(contributors)
    total = given(first)[name].clone()
    for peer in rest:
        total += given(peer)[name]
    return total / sum(TOKENS[p] for p in contributors)


def owners(among: Sequence[PeerId] = MEMBERS) -> dict[str, PeerId]:
    """Owners of the parts in turns, so that all have equally many."""
    return {name: among[i % len(among)] for i, name in enumerate(SHAPES)}


def request(
    me: PeerId, epoch: int, who: Mapping[str, PeerId], deadline_s: float, attempt: int = 0
) -> RoundRequest:
    """Attempt 0 is of all four, a later one of the survivors."""
    members = MEMBERS if attempt == 0 else SURVIVORS
    return RoundRequest(
        round=RoundId(epoch, 1, attempt),
        plan_hash="plan",
        members=members,
        listeners=frozenset(),
        owners=who,
        ownership_hash=f"owners {attempt}",
        shapes=SHAPES,
        gradients=given(me),
        tokens=TOKENS[me],
        deadline_s=deadline_s,
        caps=WeightCaps(sum(TOKENS.values()), TOKENS, sum(TOKENS.values())),
    )


def repaired(
    who: Mapping[str, PeerId], outcomes: Mapping[PeerId, RoundOutcome]
) -> dict[str, PeerId]:
    """As a leader repairs: what the faulty one owned goes to a survivor that holds it, else to each
    in turn."""
    made = {}
    for i, (name, owner) in enumerate(who.items()):
        holders = [p for p, o in outcomes.items() if name in o.fresh]
        made[name] = (
            owner if owner != FAULTY else (holders or SURVIVORS)[i % len(holders or SURVIVORS)]
        )
    return made


def wrong(outcomes: Mapping[PeerId, RoundOutcome], who: Mapping[str, PeerId]) -> list[str]:
    """Why this is no honest result, in words; nothing when it is one.

    Every part that a survivor owns is there; every part that is there is finite, is the mean of all
    survivors' contributions, with the faulty one's or without, and has the same bits at everybody
    that has it. Nobody else is named as a contributor.
    """
    said: list[str] = []
    for peer, outcome in outcomes.items():
        lost = [n for n in outcome.missing if who[n] != FAULTY]
        said += [f"{peer} lacks {', '.join(lost)}"] if lost else []
        if outcome.fresh.keys() | set(
            outcome.missing
        ) != SHAPES.keys() or outcome.fresh.keys() & set(outcome.missing):
            said.append(f"{peer} does not say what became of some parts")
        for name, tensor in outcome.fresh.items():
            if not bool(torch.isfinite(tensor).all()):
                said.append(f"{peer} has a {name} that is not finite")
            elif not any(torch.equal(tensor, truth(name, by)) for by in (SURVIVORS, MEMBERS)):
                said.append(f"{peer} has a {name} that is no mean of all survivors' contributions")
        by = outcome.contributors
        if outcome.fresh and not set(SURVIVORS) <= by <= set(MEMBERS):
            said.append(f"{peer} names as contributors {', '.join(sorted(by))}")
    return said + [f"{name} differs" for name in SHAPES if _differs(name, outcomes.values())]


def _differs(name: str, outcomes: Iterable[RoundOutcome]) -> bool:
    have = [o for o in outcomes if name in o.fresh]
    return any(not torch.equal(o.fresh[name], have[0].fresh[name]) for o in have[1:])
