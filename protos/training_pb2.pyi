from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Note(_message.Message):
    __slots__ = ("epoch", "term", "plan", "finished", "round", "committed", "incomplete", "fault", "ready", "dead", "move", "lead", "takeover")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    LEAD_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    term: int
    plan: PlanNote
    finished: FinishedNote
    round: RoundNote
    committed: CommittedNote
    incomplete: IncompleteNote
    fault: FaultNote
    ready: ReadyNote
    dead: DeadNote
    move: MoveNote
    lead: LeadNote
    takeover: TakeoverNote
    def __init__(self, epoch: _Optional[int] = ..., term: _Optional[int] = ..., plan: _Optional[_Union[PlanNote, _Mapping]] = ..., finished: _Optional[_Union[FinishedNote, _Mapping]] = ..., round: _Optional[_Union[RoundNote, _Mapping]] = ..., committed: _Optional[_Union[CommittedNote, _Mapping]] = ..., incomplete: _Optional[_Union[IncompleteNote, _Mapping]] = ..., fault: _Optional[_Union[FaultNote, _Mapping]] = ..., ready: _Optional[_Union[ReadyNote, _Mapping]] = ..., dead: _Optional[_Union[DeadNote, _Mapping]] = ..., move: _Optional[_Union[MoveNote, _Mapping]] = ..., lead: _Optional[_Union[LeadNote, _Mapping]] = ..., takeover: _Optional[_Union[TakeoverNote, _Mapping]] = ...) -> None: ...

class NoteReply(_message.Message):
    __slots__ = ("accepted", "reason", "waits_for", "lost", "lacking")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    waits_for: str
    lost: _containers.RepeatedScalarFieldContainer[str]
    lacking: LackingNote
    def __init__(self, accepted: _Optional[bool] = ..., reason: _Optional[str] = ..., waits_for: _Optional[str] = ..., lost: _Optional[_Iterable[str]] = ..., lacking: _Optional[_Union[LackingNote, _Mapping]] = ...) -> None: ...

class LackingNote(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peers: _Optional[_Iterable[str]] = ...) -> None: ...

class PlanNote(_message.Message):
    __slots__ = ("plan", "signature", "certificate", "supporters", "doubles", "receipts", "inspects")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SUPPORTERS_FIELD_NUMBER: _ClassVar[int]
    DOUBLES_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    INSPECTS_FIELD_NUMBER: _ClassVar[int]
    plan: bytes
    signature: bytes
    certificate: CertificateNote
    supporters: _containers.RepeatedCompositeFieldContainer[SupporterNote]
    doubles: _containers.RepeatedCompositeFieldContainer[DoubleVoteNote]
    receipts: ReceiptsNote
    inspects: bool
    def __init__(self, plan: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., certificate: _Optional[_Union[CertificateNote, _Mapping]] = ..., supporters: _Optional[_Iterable[_Union[SupporterNote, _Mapping]]] = ..., doubles: _Optional[_Iterable[_Union[DoubleVoteNote, _Mapping]]] = ..., receipts: _Optional[_Union[ReceiptsNote, _Mapping]] = ..., inspects: _Optional[bool] = ...) -> None: ...

class SketchesNote(_message.Message):
    __slots__ = ("indices", "takers", "givers", "sketches")
    INDICES_FIELD_NUMBER: _ClassVar[int]
    TAKERS_FIELD_NUMBER: _ClassVar[int]
    GIVERS_FIELD_NUMBER: _ClassVar[int]
    SKETCHES_FIELD_NUMBER: _ClassVar[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    takers: _containers.RepeatedScalarFieldContainer[int]
    givers: _containers.RepeatedScalarFieldContainer[int]
    sketches: bytes
    def __init__(self, indices: _Optional[_Iterable[int]] = ..., takers: _Optional[_Iterable[int]] = ..., givers: _Optional[_Iterable[int]] = ..., sketches: _Optional[bytes] = ...) -> None: ...

class WorkNote(_message.Message):
    __slots__ = ("cell", "made", "tokens", "before", "indices", "sizes", "takers", "givers")
    CELL_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    TAKERS_FIELD_NUMBER: _ClassVar[int]
    GIVERS_FIELD_NUMBER: _ClassVar[int]
    cell: str
    made: VersionNote
    tokens: int
    before: bytes
    indices: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    takers: _containers.RepeatedScalarFieldContainer[int]
    givers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cell: _Optional[str] = ..., made: _Optional[_Union[VersionNote, _Mapping]] = ..., tokens: _Optional[int] = ..., before: _Optional[bytes] = ..., indices: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., takers: _Optional[_Iterable[int]] = ..., givers: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkReceipt(_message.Message):
    __slots__ = ("peer", "work", "signature")
    PEER_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    work: bytes
    signature: bytes
    def __init__(self, peer: _Optional[str] = ..., work: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ReceiptsNote(_message.Message):
    __slots__ = ("receipts",)
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    receipts: _containers.RepeatedCompositeFieldContainer[WorkReceipt]
    def __init__(self, receipts: _Optional[_Iterable[_Union[WorkReceipt, _Mapping]]] = ...) -> None: ...

class EpochReceipts(_message.Message):
    __slots__ = ("run", "plan", "dropped", "tokens", "certificate", "receipts")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    run: str
    plan: bytes
    dropped: _containers.RepeatedScalarFieldContainer[int]
    tokens: int
    certificate: CertificateNote
    receipts: _containers.RepeatedCompositeFieldContainer[WorkReceipt]
    def __init__(self, run: _Optional[str] = ..., plan: _Optional[bytes] = ..., dropped: _Optional[_Iterable[int]] = ..., tokens: _Optional[int] = ..., certificate: _Optional[_Union[CertificateNote, _Mapping]] = ..., receipts: _Optional[_Iterable[_Union[WorkReceipt, _Mapping]]] = ...) -> None: ...

class VoteNote(_message.Message):
    __slots__ = ("cell", "term", "attempt", "version", "voters", "stage", "digest", "signature")
    CELL_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VOTERS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    cell: str
    term: int
    attempt: int
    version: VersionNote
    voters: str
    stage: int
    digest: str
    signature: bytes
    def __init__(self, cell: _Optional[str] = ..., term: _Optional[int] = ..., attempt: _Optional[int] = ..., version: _Optional[_Union[VersionNote, _Mapping]] = ..., voters: _Optional[str] = ..., stage: _Optional[int] = ..., digest: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class DoubleVoteNote(_message.Message):
    __slots__ = ("peer", "one", "other")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ONE_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    one: VoteNote
    other: VoteNote
    def __init__(self, peer: _Optional[str] = ..., one: _Optional[_Union[VoteNote, _Mapping]] = ..., other: _Optional[_Union[VoteNote, _Mapping]] = ...) -> None: ...

class CertificateNote(_message.Message):
    __slots__ = ("cell", "term", "version", "voters", "ballots")
    CELL_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VOTERS_FIELD_NUMBER: _ClassVar[int]
    BALLOTS_FIELD_NUMBER: _ClassVar[int]
    cell: str
    term: int
    version: VersionNote
    voters: _containers.RepeatedScalarFieldContainer[str]
    ballots: _containers.RepeatedCompositeFieldContainer[BallotNote]
    def __init__(self, cell: _Optional[str] = ..., term: _Optional[int] = ..., version: _Optional[_Union[VersionNote, _Mapping]] = ..., voters: _Optional[_Iterable[str]] = ..., ballots: _Optional[_Iterable[_Union[BallotNote, _Mapping]]] = ...) -> None: ...

class BallotNote(_message.Message):
    __slots__ = ("peer", "stage", "attempt", "digest", "signature")
    PEER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    stage: int
    attempt: int
    digest: str
    signature: bytes
    def __init__(self, peer: _Optional[str] = ..., stage: _Optional[int] = ..., attempt: _Optional[int] = ..., digest: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class SupporterNote(_message.Message):
    __slots__ = ("peer", "term", "at", "signature")
    PEER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    term: int
    at: int
    signature: bytes
    def __init__(self, peer: _Optional[str] = ..., term: _Optional[int] = ..., at: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class FinishedNote(_message.Message):
    __slots__ = ("plan_hash", "results")
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    plan_hash: str
    results: _containers.RepeatedCompositeFieldContainer[MicroBatchResult]
    def __init__(self, plan_hash: _Optional[str] = ..., results: _Optional[_Iterable[_Union[MicroBatchResult, _Mapping]]] = ...) -> None: ...

class MicroBatchResult(_message.Message):
    __slots__ = ("index", "counted", "loss_sum", "tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    counted: bool
    loss_sum: float
    tokens: int
    def __init__(self, index: _Optional[int] = ..., counted: _Optional[bool] = ..., loss_sum: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class RoundNote(_message.Message):
    __slots__ = ("plan_hash", "attempt", "dead", "owners", "sources", "dropped", "deadline_s", "digest", "tokens", "sample")
    class OwnersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    plan_hash: str
    attempt: int
    dead: _containers.RepeatedScalarFieldContainer[str]
    owners: _containers.ScalarMap[str, str]
    sources: _containers.RepeatedScalarFieldContainer[str]
    dropped: _containers.RepeatedScalarFieldContainer[int]
    deadline_s: float
    digest: str
    tokens: int
    sample: str
    def __init__(self, plan_hash: _Optional[str] = ..., attempt: _Optional[int] = ..., dead: _Optional[_Iterable[str]] = ..., owners: _Optional[_Mapping[str, str]] = ..., sources: _Optional[_Iterable[str]] = ..., dropped: _Optional[_Iterable[int]] = ..., deadline_s: _Optional[float] = ..., digest: _Optional[str] = ..., tokens: _Optional[int] = ..., sample: _Optional[str] = ...) -> None: ...

class CommittedNote(_message.Message):
    __slots__ = ("plan_hash", "attempt", "digest", "speed", "vote", "work", "work_signature", "sketches")
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    WORK_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SKETCHES_FIELD_NUMBER: _ClassVar[int]
    plan_hash: str
    attempt: int
    digest: str
    speed: float
    vote: bytes
    work: bytes
    work_signature: bytes
    sketches: SketchesNote
    def __init__(self, plan_hash: _Optional[str] = ..., attempt: _Optional[int] = ..., digest: _Optional[str] = ..., speed: _Optional[float] = ..., vote: _Optional[bytes] = ..., work: _Optional[bytes] = ..., work_signature: _Optional[bytes] = ..., sketches: _Optional[_Union[SketchesNote, _Mapping]] = ...) -> None: ...

class IncompleteNote(_message.Message):
    __slots__ = ("plan_hash", "attempt", "holds", "failed", "impossible")
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    IMPOSSIBLE_FIELD_NUMBER: _ClassVar[int]
    plan_hash: str
    attempt: int
    holds: _containers.RepeatedScalarFieldContainer[str]
    failed: _containers.RepeatedScalarFieldContainer[str]
    impossible: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, plan_hash: _Optional[str] = ..., attempt: _Optional[int] = ..., holds: _Optional[_Iterable[str]] = ..., failed: _Optional[_Iterable[str]] = ..., impossible: _Optional[_Iterable[str]] = ...) -> None: ...

class FaultNote(_message.Message):
    __slots__ = ("about",)
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    about: str
    def __init__(self, about: _Optional[str] = ...) -> None: ...

class ReadyNote(_message.Message):
    __slots__ = ("stage", "at", "digest", "speed", "reachable", "term", "tokens", "leaving", "seen", "room", "costs", "change", "window", "mean", "orphan", "anchor", "supports_at", "supports", "doubles", "cell", "runs", "computed")
    class SeenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STAGE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_AT_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_FIELD_NUMBER: _ClassVar[int]
    DOUBLES_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    stage: int
    at: VersionNote
    digest: str
    speed: float
    reachable: _containers.RepeatedCompositeFieldContainer[VersionNote]
    term: int
    tokens: int
    leaving: bool
    seen: _containers.ScalarMap[str, float]
    room: int
    costs: CostNote
    change: str
    window: int
    mean: str
    orphan: bool
    anchor: str
    supports_at: int
    supports: bytes
    doubles: _containers.RepeatedCompositeFieldContainer[DoubleVoteNote]
    cell: str
    runs: str
    computed: int
    def __init__(self, stage: _Optional[int] = ..., at: _Optional[_Union[VersionNote, _Mapping]] = ..., digest: _Optional[str] = ..., speed: _Optional[float] = ..., reachable: _Optional[_Iterable[_Union[VersionNote, _Mapping]]] = ..., term: _Optional[int] = ..., tokens: _Optional[int] = ..., leaving: _Optional[bool] = ..., seen: _Optional[_Mapping[str, float]] = ..., room: _Optional[int] = ..., costs: _Optional[_Union[CostNote, _Mapping]] = ..., change: _Optional[str] = ..., window: _Optional[int] = ..., mean: _Optional[str] = ..., orphan: _Optional[bool] = ..., anchor: _Optional[str] = ..., supports_at: _Optional[int] = ..., supports: _Optional[bytes] = ..., doubles: _Optional[_Iterable[_Union[DoubleVoteNote, _Mapping]]] = ..., cell: _Optional[str] = ..., runs: _Optional[str] = ..., computed: _Optional[int] = ...) -> None: ...

class CostNote(_message.Message):
    __slots__ = ("forward", "backward", "loss", "slots", "ways", "rates", "up", "down", "tera", "product")
    class WaysEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    TERA_FIELD_NUMBER: _ClassVar[int]
    PRODUCT_FIELD_NUMBER: _ClassVar[int]
    forward: int
    backward: int
    loss: int
    slots: int
    ways: _containers.ScalarMap[str, int]
    rates: _containers.ScalarMap[str, int]
    up: int
    down: int
    tera: int
    product: int
    def __init__(self, forward: _Optional[int] = ..., backward: _Optional[int] = ..., loss: _Optional[int] = ..., slots: _Optional[int] = ..., ways: _Optional[_Mapping[str, int]] = ..., rates: _Optional[_Mapping[str, int]] = ..., up: _Optional[int] = ..., down: _Optional[int] = ..., tera: _Optional[int] = ..., product: _Optional[int] = ...) -> None: ...

class VersionNote(_message.Message):
    __slots__ = ("epoch", "lineage")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    lineage: str
    def __init__(self, epoch: _Optional[int] = ..., lineage: _Optional[str] = ...) -> None: ...

class DeadNote(_message.Message):
    __slots__ = ("plan_hash", "dead")
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    plan_hash: str
    dead: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, plan_hash: _Optional[str] = ..., dead: _Optional[_Iterable[str]] = ...) -> None: ...

class TakeoverNote(_message.Message):
    __slots__ = ("plan_hash", "dead")
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    plan_hash: str
    dead: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, plan_hash: _Optional[str] = ..., dead: _Optional[_Iterable[str]] = ...) -> None: ...

class MoveNote(_message.Message):
    __slots__ = ("stage",)
    STAGE_FIELD_NUMBER: _ClassVar[int]
    stage: int
    def __init__(self, stage: _Optional[int] = ...) -> None: ...

class LeadNote(_message.Message):
    __slots__ = ("cell",)
    CELL_FIELD_NUMBER: _ClassVar[int]
    cell: str
    def __init__(self, cell: _Optional[str] = ...) -> None: ...

class HistoryRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: VersionNote
    def __init__(self, version: _Optional[_Union[VersionNote, _Mapping]] = ...) -> None: ...

class HistoryReply(_message.Message):
    __slots__ = ("plan", "dropped", "past", "certificate")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    PAST_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    plan: bytes
    dropped: _containers.RepeatedScalarFieldContainer[int]
    past: _containers.RepeatedCompositeFieldContainer[MilestoneNote]
    certificate: CertificateNote
    def __init__(self, plan: _Optional[bytes] = ..., dropped: _Optional[_Iterable[int]] = ..., past: _Optional[_Iterable[_Union[MilestoneNote, _Mapping]]] = ..., certificate: _Optional[_Union[CertificateNote, _Mapping]] = ...) -> None: ...

class MilestoneNote(_message.Message):
    __slots__ = ("version", "tokens")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    version: VersionNote
    tokens: int
    def __init__(self, version: _Optional[_Union[VersionNote, _Mapping]] = ..., tokens: _Optional[int] = ...) -> None: ...
