"""How much a contribution weighs: never more tokens than the plan lets its sender have worked on.
Enters: claims and what the plan assigned. Leaves: weights.
Never: a tensor."""

from __future__ import annotations

from collections.abc import Mapping

from node.core.ids import PeerId


def weights(
    claims: Mapping[PeerId, int], allowed: Mapping[PeerId, int], total: int
) -> dict[PeerId, int]:
    """Tokens each contribution counts for, at most those it claims; a function of the arguments,
    whatever their order.

    ``allowed``: tokens the plan assigned, by member; ``total``: tokens of all micro-batches that
    count. A member that claims more than it was assigned may have done the work of a replica that
    died, so all may claim the tokens that nobody else accounts for:

        w_i = min(t_i, allowed_i + max(0, total - sum_j min(t_j, allowed_j)))

    Without ``allowed``, or with 0 for an unknown ``total``, every claim stands. A claim below 1
    weighs nothing.
    """
    if not allowed or total <= 0:
        return {peer: max(0, tokens) for peer, tokens in claims.items()}
    assigned = {peer: max(0, allowed.get(peer, 0)) for peer in claims}
    spare = max(
        0, total - sum(max(0, min(tokens, assigned[peer])) for peer, tokens in claims.items())
    )
    return {peer: max(0, min(tokens, assigned[peer] + spare)) for peer, tokens in claims.items()}
