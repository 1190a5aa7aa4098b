"""A swarm that only signs: plans, statements of work and quorum certificates of epochs in a row,
with real keys. Nobody trains; every micro-batch takes its planned route."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from node.consensus.votes import Ballot, Certificate, Vote, names, signing_domain
from node.coordinator.credit.record import EpochRecord
from node.coordinator.credit.statement import Signed, Statement, statement_of, work_domain
from node.core.ids import ENDS, NO_CELL, PeerId
from node.core.journey import Electorate, Hop, Path, Plan, PlanMember, Version, lineage_after
from node.identity.keys import Identity
from node.pipeline.events import Neighbours

RUN = "ab" * 32
DIGEST = "cd" * 32


class SigningSwarm:
    """Peers at the ends and ``replicas`` of each of ``stages`` block stages, and the history that
    they have signed so far. ``tokens``: of one micro-batch."""

    def __init__(
        self,
        ends: int = 2,
        stages: int = 2,
        replicas: int = 2,
        micro_batches: int = 8,
        tokens: int = 16,
        seed: int = 0,
    ) -> None:
        self.dice = random.Random(seed)
        self.keys: dict[PeerId, Identity] = {}
        self.stages: dict[int, list[PeerId]] = {}
        self.micro_batches = micro_batches
        self.tokens = tokens
        for stage in range(stages + 1):
            count = replicas
            if stage == ENDS:
                count = ends
            self.stages[stage] = [self._newcomer() for _ in range(count)]
        self.version = Version(0)
        self.counted = 0
        self.last: dict[PeerId, bytes] = {}
        """Hash of each signer's newest statement."""

    def _newcomer(self) -> PeerId:
        key = Identity.ephemeral()
        self.keys[key.peer_id] = key
        return key.peer_id

    @property
    def peers(self) -> list[PeerId]:
        """All peers, by stage."""
        return [peer for stage in sorted(self.stages) for peer in self.stages[stage]]

    def replace_some(self, count: int) -> None:
        """As many peers, drawn at random, go; newcomers take their places."""
        for _ in range(count):
            stage = self.dice.choice(sorted(self.stages))
            place = self.dice.randrange(len(self.stages[stage]))
            self.stages[stage][place] = self._newcomer()

    def plan(self) -> Plan:
        """The next plan."""
        members = [PlanMember(p, stage, 1.0, True) for stage, of in self.stages.items() for p in of]
        paths = []
        for i in range(self.micro_batches):
            hops = [
                Hop(stage, of[(i + self.version.epoch) % len(of)])
                for stage, of in self.stages.items()
                if stage != ENDS
            ]
            origin = self.stages[ENDS][i % len(self.stages[ENDS])]
            paths.append(Path(i, origin, (i,), tuple(hops)))
        return Plan(
            epoch=self.version.epoch,
            term=self.version.epoch + 1,
            leader=self.stages[ENDS][0],
            members=tuple(members),
            paths=tuple(paths),
            owners={},
            tokens=self.counted,
            lineage=self.version.lineage,
            electorate=Electorate(tuple(self.peers), ()),
        )

    def epoch(
        self,
        dropped: Collection[int] = (),
        silent: Collection[PeerId] = (),
        change: Callable[[PeerId, Statement], Statement] = lambda peer, said: said,
    ) -> EpochRecord:
        """Make an epoch. ``silent`` peers sign no work; ``change``: what a peer signs instead of
        its own statement."""
        plan = self.plan()
        lost = tuple(sorted(dropped))
        made = Version(plan.epoch + 1, lineage_after(plan, lost))
        counted = self.tokens * (self.micro_batches - len(lost))
        signed = list[Signed]()
        for peer, neighbours in neighbours_of(plan, lost, self.tokens).items():
            said = statement_of(plan, made, counted, self.last.get(peer, b""), neighbours)
            if said is not None and peer not in silent:
                signed.append(self.sign(peer, change(peer, said)))
                self.last[peer] = signed[-1].hash
        record = EpochRecord(RUN, plan, lost, counted, self.certificate(plan, made), tuple(signed))
        self.version = made
        self.counted += counted
        return record

    def outer_round(self) -> EpochRecord:
        """Make an epoch without micro-batches, as an outer round is."""
        plan = replace(self.plan(), paths=(), outer=1)
        self.version = Version(plan.epoch + 1, lineage_after(plan, ()))
        return EpochRecord(RUN, plan, (), 0, self.certificate(plan, self.version), ())

    def sign(self, peer: PeerId, said: Statement) -> Signed:
        """A statement under the signature of ``peer``."""
        raw = said.said()
        return Signed(peer, raw, self.keys[peer].sign(raw, work_domain(RUN)))

    def certificate(self, plan: Plan, made: Version, votes: int | None = None) -> Certificate:
        """The quorum certificate of a version, by the first ``votes`` voters; by default all."""
        voters = plan.electorate.voters
        ballots = list[Ballot]()
        for peer in voters[:votes]:
            member = plan.member(peer)
            stage = ENDS
            if member is not None:
                stage = member.stage
            vote = Vote(NO_CELL, plan.term, 0, made, names(voters), stage, DIGEST)
            signature = self.keys[peer].sign(vote.said(), signing_domain("vote", RUN))
            ballots.append(Ballot(peer, stage, 0, DIGEST, signature))
        return Certificate(NO_CELL, plan.term, made, voters, tuple(ballots))


def neighbours_of(
    plan: Plan, dropped: Sequence[int], tokens: int
) -> dict[PeerId, list[Neighbours]]:
    """Neighbours of each peer, where every micro-batch takes its planned route."""
    found: dict[PeerId, list[Neighbours]] = {}
    for path in plan.paths:
        if path.index in dropped:
            continue
        ring = [path.origin, *(h.peer for h in path.hops)]
        for i, peer in enumerate(ring):
            taker = ring[i - 1]
            giver = ring[(i + 1) % len(ring)]
            found.setdefault(peer, []).append(Neighbours(path.index, tokens, taker, giver))
    return found
