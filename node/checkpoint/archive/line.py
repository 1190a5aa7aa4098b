"""Selection of the copies that belong to the current history of a run. Pure. Enters: whole copies
of one stage. Leaves: the copies without the epochs that were given up when the run went back to an
earlier epoch. A version names its plan by a hash, and not its parent, so two copies do not show
whether one comes from the other. But each peer numbers its copies: if a later copy has a lower
epoch, the run went back, and the higher epochs that this peer copied before belong to the history
that was given up.
"""

from collections.abc import Iterable

from node.checkpoint.archive.place import Whole


def line(copies: Iterable[Whole]) -> list[Whole]:
    """The copies of one peer that belong to the history of its last one, newest first."""
    found: list[Whole] = []
    for whole in sorted(copies, key=lambda w: (-w.number, -w.epoch)):
        if not found or whole.epoch < found[-1].epoch:
            found.append(whole)
    return found


def current(copies: Iterable[Whole], me: str) -> list[Whole]:
    """The copies of all peers without the epochs that were given up, newest first; within an epoch,
    this peer's copies come first. Another peer's copies belong to another history from the first
    epoch on at which its version differs from the version of this peer's copy."""
    by_peer: dict[str, list[Whole]] = {}
    for whole in copies:
        by_peer.setdefault(whole.peer, []).append(whole)
    lines = {peer: line(of) for peer, of in by_peer.items()}
    own = {whole.epoch: whole.lineage for whole in lines.get(me, ())}
    found: list[Whole] = []
    for of in lines.values():
        other = [w.epoch for w in of if w.lineage != own.get(w.epoch, w.lineage) and w.lineage]
        found += [w for w in of if not other or w.epoch < min(other)]
    return sorted(found, key=lambda w: (-w.epoch, w.peer != me, w.peer))
