"""Converts notes on the wire to events and back. Pure. Notes that do not parse raise WireError."""

import math
from collections.abc import Iterable, Sequence

from node.consensus.equivocation import MOST_TOLD, DoubleVote
from node.consensus.terms import MOST_TERM
from node.consensus.trust import NO_WARRANT, Warrant
from node.consensus.votes import Ballot, Certificate, Supporter, Vote
from node.core.errors import WireError
from node.core.ids import CellId, PeerId, is_cell
from node.core.journey import MOST_PATHS, Plan, Version, lineage
from node.core.numbers import few, peer_name
from node.epoch import events as ev
from node.epoch.plan_context import makes
from node.identity.keys import SIGNATURE_BYTES
from node.pipeline.events import MicroBatchDone
from node.scheduler.costs import MOST_SLOTS, LinkCost, Measured, code, decoded
from node.wire.limits import MOST_RESULTS, PARTS, PAST, PEERS, PLAN, REACHABLE, SEEN
from protos import training_pb2 as pb

CODES = 512
"""Number of steps of the scale for seconds on the wire."""
MAX_COUNT = 1 << 53
"""Largest count that a peer may report. Reports end up in the leader's plan, and beyond these
bounds nobody could read that plan any more."""
MAX_AMOUNT = 1e12
"""Largest number of any other kind."""
MAX_DIGEST = 64
"""Letters of the longest digest."""
LEAST_RATE = 1e-9
"""Smallest rate above 0."""


def plan_note(plan: Plan, signature: bytes, warrant: Warrant = NO_WARRANT) -> pb.Note:
    """ "Here is the epoch, and this is why it may be followed.\""""
    return pb.Note(
        epoch=plan.epoch,
        term=plan.term,
        plan=pb.PlanNote(
            plan=plan.canonical(),
            signature=signature,
            certificate=certificate_note(warrant.certificate),
            supporters=[
                pb.SupporterNote(peer=s.peer, term=s.term, at=s.at, signature=s.signature)
                for s in warrant.supporters
            ],
            doubles=map(double_note, warrant.doubles),
            inspects=True,
        ),
    )


def double_note(d: DoubleVote) -> pb.DoubleVoteNote:
    """The proof that a peer has voted twice, as a message."""
    one, other = (
        pb.VoteNote(
            cell=v.cell,
            term=v.term,
            attempt=v.attempt,
            version=version_note(v.version),
            voters=v.voters,
            stage=v.stage,
            digest=v.digest,
            signature=signature,
        )
        for v, signature in zip((d.one, d.other), d.signatures, strict=True)
    )
    return pb.DoubleVoteNote(peer=d.peer, one=one, other=other)


def parse_doubles(told: Sequence[pb.DoubleVoteNote]) -> tuple[DoubleVote, ...]:
    """Parse proofs of double votes; no signature is checked. Raises WireError for more proofs than
    any peer sends."""
    return tuple(
        DoubleVote(
            peer_name(d.peer),
            _vote(d.one),
            _vote(d.other),
            (_signature(d.one.signature), _signature(d.other.signature)),
        )
        for d in few(told, MOST_TOLD, "peers that voted twice")
    )


def _vote(v: pb.VoteNote) -> Vote:
    term = _count(v.term, MOST_TERM)
    version = parse_version(v.version)
    named = _digest(v.voters)
    digest = _digest(v.digest)
    return Vote(_cell(v.cell), term, v.attempt, version, named, v.stage, digest)


def certificate_note(c: Certificate | None) -> pb.CertificateNote | None:
    """A certificate as a message."""
    if c is None:
        return None
    return pb.CertificateNote(
        cell=c.cell,
        term=c.term,
        version=version_note(c.version),
        voters=c.voters,
        ballots=[
            pb.BallotNote(
                peer=b.peer,
                stage=b.stage,
                attempt=b.attempt,
                digest=b.digest,
                signature=b.signature,
            )
            for b in c.ballots
        ],
    )


def parse_warrant(note: pb.PlanNote) -> Warrant:
    """Parse the evidence that a plan may be followed; no signature is checked. Raises WireError for
    more votes or supporters than a cell has."""
    supporters = tuple(
        Supporter(
            peer_name(s.peer), _count(s.term, MOST_TERM), _count(s.at), _signature(s.signature)
        )
        for s in few(note.supporters, PEERS, "supporters")
    )
    certificate = None
    if note.HasField("certificate"):
        certificate = parse_certificate(note.certificate)
    return Warrant(certificate, supporters, parse_doubles(note.doubles))


def parse_certificate(c: pb.CertificateNote) -> Certificate:
    """Parse a certificate; no signature is checked. Raises WireError for more votes than a cell
    has."""
    return Certificate(
        _cell(c.cell),
        _count(c.term, MOST_TERM),
        parse_version(c.version),
        _peers(c.voters),
        tuple(
            Ballot(
                peer_name(b.peer), b.stage, b.attempt, _digest(b.digest), _signature(b.signature)
            )
            for b in few(c.ballots, PEERS, "ballots")
        ),
    )


def round_note(r: ev.RoundArrived) -> pb.Note:
    """ "Average now.\""""
    return pb.Note(
        epoch=r.epoch,
        term=r.term,
        round=pb.RoundNote(
            plan_hash=r.plan_hash,
            attempt=r.attempt,
            dead=r.dead,
            owners=r.owners,
            sources=r.sources,
            dropped=r.dropped,
            deadline_s=r.deadline_s,
            digest=r.digest,
            tokens=r.tally.tokens,
            sample=r.tally.sample,
        ),
    )


def takeover_note(a: ev.SendTakeover) -> pb.Note:
    """ "I lead this epoch from here on.\""""
    return pb.Note(
        epoch=a.plan.epoch,
        term=a.plan.term,
        takeover=pb.TakeoverNote(plan_hash=a.plan.hash, dead=a.dead),
    )


def takeover_event(note: pb.Note, leader: PeerId) -> ev.TakenOver:
    """A takeover by ``leader`` as an event of a member."""
    return ev.TakenOver(leader, _digest(note.takeover.plan_hash))


def dead_note(a: ev.SendLost) -> pb.Note:
    """ "Do not wait for these.\""""
    return pb.Note(
        epoch=a.plan.epoch, term=a.plan.term, dead=pb.DeadNote(plan_hash=a.plan.hash, dead=a.dead)
    )


def finished_note(plan: Plan, results: tuple[MicroBatchDone, ...]) -> pb.Note:
    """ "These micro-batches are done.\""""
    return pb.Note(
        epoch=plan.epoch,
        term=plan.term,
        finished=pb.FinishedNote(
            plan_hash=plan.hash,
            results=[
                pb.MicroBatchResult(
                    index=r.index, counted=r.counted, loss_sum=r.loss_sum, tokens=r.tokens
                )
                for r in results
            ],
        ),
    )


def committed_note(a: ev.TellCommitted, speed: float, vote: bytes = b"") -> pb.Note:
    """ "I hold every fresh part.\" ``vote``: the signature under that."""
    return pb.Note(
        epoch=a.plan.epoch,
        term=a.plan.term,
        committed=pb.CommittedNote(
            plan_hash=a.plan.hash,
            attempt=a.attempt,
            digest=a.digest,
            speed=speed,
            vote=vote,
        ),
    )


def incomplete_note(a: ev.TellIncomplete) -> pb.Note:
    """ "Parts are missing.\""""
    e = a.ended
    return pb.Note(
        epoch=a.plan.epoch,
        term=a.plan.term,
        incomplete=pb.IncompleteNote(
            plan_hash=a.plan.hash,
            attempt=e.attempt,
            holds=e.holds,
            failed=e.failed,
            impossible=e.impossible,
        ),
    )


def ready_note(
    e: ev.Heartbeat, support: Supporter | None = None, doubles: Sequence[DoubleVote] = ()
) -> pb.Note:
    """ "I am alive, and this is where I stand.\" ``support``: the sender's, for the receiver as
    leader; ``doubles``: proofs of double votes."""
    supports_at = 0
    supports = b""
    if support is not None:
        supports_at = support.at
        supports = support.signature
    return pb.Note(
        epoch=e.at.epoch,
        term=e.term,
        ready=pb.ReadyNote(
            stage=e.stage,
            at=version_note(e.at),
            digest=e.digest,
            speed=e.capacity.speed,
            reachable=[version_note(v) for v in e.reachable[-REACHABLE:]],
            term=e.term,
            tokens=e.tokens,
            leaving=e.leaving,
            seen=dict(e.capacity.seen[:SEEN]),
            room=e.capacity.room,
            costs=cost_note(e.capacity.costs),
            change=e.membership.change,
            window=e.outer.mean[0],
            mean=e.outer.mean[1],
            orphan=e.orphan,
            anchor=e.outer.anchor,
            supports_at=supports_at,
            supports=supports,
            doubles=map(double_note, doubles),
            cell=e.membership.cell,
            runs=e.capacity.running.plan_hash,
            computed=e.capacity.running.computed,
        ),
    )


def cost_note(m: Measured) -> pb.CostNote:
    """Measured costs as a message. Seconds are steps of a logarithmic scale; connections that carry
    tensors come first."""
    ways = sorted(m.ways, key=lambda row: (not row[1].tensor_s, row[0]))[:SEEN]
    return pb.CostNote(
        forward=code(m.forward_s),
        backward=code(m.backward_s),
        loss=code(m.loss_s),
        slots=min(m.slots, MOST_SLOTS),
        ways={p: code(way.tensor_s) * CODES + code(way.trip_s) for p, way in ways},
        rates={p: max(1, int(way.rate)) for p, way in ways if way.rate > 0},
        up=int(m.up),
        down=int(m.down),
        tera=code(m.tera_s),
        product=code(m.product_s),
    )


def parse_costs(note: pb.CostNote) -> Measured:
    """Parse measured costs. Raises WireError for invalid seconds, and for more connections than any
    peer reports."""
    ways = tuple(
        (
            peer_name(p),
            LinkCost(
                decoded(number // CODES), decoded(number % CODES), float(note.rates.get(p, 0))
            ),
        )
        for p, number in sorted(few(note.ways.items(), SEEN, "ways"))
    )
    return Measured(
        decoded(note.forward),
        decoded(note.backward),
        decoded(note.loss),
        min(note.slots, MOST_SLOTS),
        ways,
        float(note.up),
        float(note.down),
        decoded(note.tera),
        decoded(note.product),
    )


def parse_capacity(note: pb.ReadyNote) -> ev.Capacity:
    """The capacity of a heartbeat's sender. Raises WireError for numbers that no peer sends."""
    rates = sorted(note.seen.items())[:SEEN]
    return ev.Capacity(
        _rate(note.speed),
        _count(note.room),
        tuple((peer_name(peer), _rate(rate)) for peer, rate in rates),
        parse_costs(note.costs),
        ev.Running(_digest(note.runs), note.computed),
    )


def version_note(version: Version) -> pb.VersionNote:
    return pb.VersionNote(epoch=version.epoch, lineage=version.lineage)


def parse_version(note: pb.VersionNote) -> Version:
    """Parse a version. Raises WireError for an invalid lineage or an epoch beyond the limit."""
    return Version(_count(note.epoch), lineage(note.lineage))


def history_reply(
    plan: Plan | None,
    dropped: tuple[int, ...],
    past: Iterable[tuple[Version, int]],
    certificate: Certificate | None = None,
) -> pb.HistoryReply:
    """The reply to a question about a version. ``past``: versions this peer held with the tokens
    counted until each, newest first; ``certificate``: the newest it believes."""
    return pb.HistoryReply(
        plan=plan.canonical() if plan else b"",
        dropped=dropped,
        past=[pb.MilestoneNote(version=version_note(v), tokens=tokens) for v, tokens in past],
        certificate=certificate_note(certificate),
    )


def parse_history(
    version: Version, reply: pb.HistoryReply, most_paths: int = MOST_PATHS
) -> tuple[ev.Recalled, Certificate | None, list[tuple[Version, int]]]:
    """The inverse of :func:`history_reply`; no signature is checked. Raises WireError if a field is
    invalid, or if the plan neither makes nor starts from ``version``."""
    past = [(parse_version(m.version), _count(m.tokens)) for m in few(reply.past, PAST, "versions")]
    certificate = None
    if reply.HasField("certificate"):
        certificate = parse_certificate(reply.certificate)
    if not reply.plan:
        return ev.Recalled(version), certificate, past
    plan = Plan.parse(few(reply.plan, PLAN, "bytes of a plan"), most_paths)
    dropped = tuple(reply.dropped)
    if version not in (plan.base, makes(plan, dropped)):
        raise WireError("a plan that did not make this version")
    return ev.Recalled(version, plan, dropped), certificate, past


def parse_plan(note: pb.PlanNote, most_paths: int = MOST_PATHS) -> Plan:
    """The plan in a note; the caller checks its signature."""
    return Plan.parse(few(note.plan, PLAN, "bytes of a plan"), most_paths)


def parse_support(note: pb.ReadyNote, peer: PeerId) -> Supporter | None:
    """The signed support of ``peer`` in its heartbeat; None without one. Raises WireError for
    numbers that no peer sends."""
    if len(note.supports) not in range(1, SIGNATURE_BYTES + 1):
        return None
    term = _count(note.term, MOST_TERM)
    return Supporter(peer, term, _count(note.supports_at), note.supports)


def leader_event(note: pb.Note, peer: PeerId) -> object | None:
    """A member's note as an event of the leader; None for a note that is not for the leader."""
    match note.WhichOneof("say"):
        case "ready":
            r = note.ready
            return ev.Heartbeat(
                peer,
                r.stage,
                parse_version(r.at),
                _digest(r.digest),
                parse_capacity(r),
                tuple(parse_version(v) for v in r.reachable[-REACHABLE:]),
                _count(r.term, MOST_TERM),
                _count(r.tokens),
                r.leaving,
                ev.OuterReport((_count(r.window), _digest(r.mean)), _digest(r.anchor)),
                r.orphan,
                ev.Membership(_cell(r.cell), r.change),
            )
        case "finished":
            rows = tuple(
                MicroBatchDone(r.index, r.counted, _finite(r.loss_sum), _count(r.tokens, 1 << 40))
                for r in few(note.finished.results, MOST_RESULTS, "results")
            )
            return ev.MicroBatchesReported(peer, _digest(note.finished.plan_hash), rows)
        case "committed":
            c = note.committed
            return ev.Committed(
                peer,
                _digest(c.plan_hash),
                c.attempt,
                _digest(c.digest),
                _rate(c.speed),
                bool(_signature(c.vote)),
            )
        case "incomplete":
            i = note.incomplete
            return ev.Incomplete(
                peer,
                _digest(i.plan_hash),
                i.attempt,
                tuple(few(i.holds, PARTS, "parts")),
                _peers(i.failed),
                _peers(i.impossible),
            )
        case "fault":
            return ev.Accused(peer_name(note.fault.about), peer)
    return None


def round_event(note: pb.Note, leader: PeerId) -> ev.RoundArrived:
    """The leader's round note as an event of a member."""
    r = note.round
    return ev.RoundArrived(
        leader,
        note.epoch,
        note.term,
        _digest(r.plan_hash),
        r.attempt,
        _peers(r.dead),
        {k: peer_name(v) for k, v in few(r.owners, PARTS, "owners").items()},
        _peers(r.sources),
        tuple(r.dropped),
        min(_finite(r.deadline_s), 3600.0),
        _digest(r.digest),
        ev.EpochTally(_count(r.tokens), _digest(r.sample)),
    )


def _signature(told: bytes) -> bytes:
    return few(told, SIGNATURE_BYTES, "bytes of a signature")


def _finite(value: float) -> float:
    if not (math.isfinite(value) and 0 <= value <= MAX_AMOUNT):
        raise WireError("expected a number from 0 to the limit")
    return value


def _rate(value: float) -> float:
    """``value`` as a rate, 0 for unknown. Rates so small that a quotient of two of them would be
    infinite are refused."""
    if 0 < _finite(value) < LEAST_RATE:
        raise WireError("a rate that is too small to be one")
    return value


def _count(value: int, most: int = MAX_COUNT) -> int:
    if value > most:
        raise WireError("a count above the limit")
    return value


def _peers(told: Sequence[str]) -> tuple[PeerId, ...]:
    return tuple(map(peer_name, few(told, PEERS, "peers")))


def _cell(text: str) -> CellId:
    if not is_cell(text):
        raise WireError("a cell's name is 16 hex digits, or empty")
    return CellId(text)


def _digest(text: str) -> str:
    return few(text, MAX_DIGEST, "letters of a digest")
