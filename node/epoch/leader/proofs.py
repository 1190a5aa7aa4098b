"""Proofs that a version counts: doubts about versions that were made elsewhere. Pure. Enters: the
newest quorum certificate that this peer believes. Leaves: whether to ask for another one."""

import math

from node.consensus.voters import Quorum
from node.core.journey import Version
from node.epoch.leader.roster import Roster

PROOF_AGAIN_S = 60.0
"""Seconds for which no other certificate is asked for after nobody had one for a claimed version:
claims cost nothing, and asking delays the next plan."""


class Proofs:
    """The newest certificate, and the search for others."""

    def __init__(self) -> None:
        self._quorum = Quorum()
        self._none_until = -math.inf

    def newest(self, quorum: Quorum) -> None:
        """This is the newest certificate that this peer believes."""
        self._quorum = quorum

    def doubts(self, version: Version, roster: Roster, now: float) -> bool:
        """Return True if this version was made elsewhere, and too few of the last voters can have
        committed it (:meth:`Quorum.doubts`)."""
        versions = roster.versions
        return not versions.is_own(version) and self._quorum.doubts(
            version, versions.holders(version), roster.peers.candidates, now
        )

    def not_found(self, now: float) -> None:
        """Nobody has shown the certificate of a version."""
        self._none_until = now + PROOF_AGAIN_S

    def may_be_asked(self, now: float) -> bool:
        """Return True if it is time to ask for a certificate."""
        return now >= self._none_until
