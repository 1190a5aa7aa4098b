from protos import ask_pb2 as _ask_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("peer", "name", "version", "up_s", "state", "healthy", "reason", "next_step", "swarm", "stage", "role", "layers", "replicas", "epoch", "phase", "loss", "loss_val", "loss_first", "tokens_per_s", "tokens", "micro_batches", "last_work_s", "bytes_sent", "bytes_received", "paths_to", "reachable", "round", "device", "memory_used", "memory_limit", "stash_bytes", "stash_limit", "warnings", "leader", "digest", "time_s", "loss_history", "home", "metrics_url", "addresses", "p2pd_restarts", "digest_mismatches", "cpu_s", "progress", "momentum_lost", "momentum_age", "paths", "cell", "change", "up_rate", "down_rate", "max_up", "max_down", "optimizer_bytes", "recompute", "memory_planned", "memory_plan", "memory_peak", "cause", "leader_name", "left_s", "left_over_s", "warmup", "memory_process", "placed", "texts", "text_bytes", "loss_before", "loss_val_before", "step", "precision", "receipts", "paused", "paused_until", "pauses", "paused_s", "sent", "given_back", "order", "paused_by_run", "kernels", "archive")
    class PathsToEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TimeSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UP_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    SWARM_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LOSS_VAL_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIRST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    LAST_WORK_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    PATHS_TO_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    STASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    STASH_LIMIT_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_HISTORY_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    METRICS_URL_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    P2PD_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_LOST_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_AGE_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    UP_RATE_FIELD_NUMBER: _ClassVar[int]
    DOWN_RATE_FIELD_NUMBER: _ClassVar[int]
    MAX_UP_FIELD_NUMBER: _ClassVar[int]
    MAX_DOWN_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PLANNED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PLAN_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PEAK_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    LEADER_NAME_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    LEFT_OVER_S_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PROCESS_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOSS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    LOSS_VAL_BEFORE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_UNTIL_FIELD_NUMBER: _ClassVar[int]
    PAUSES_FIELD_NUMBER: _ClassVar[int]
    PAUSED_S_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    GIVEN_BACK_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PAUSED_BY_RUN_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    ARCHIVE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    name: str
    version: str
    up_s: float
    state: str
    healthy: bool
    reason: str
    next_step: str
    swarm: _ask_pb2.SwarmLine
    stage: int
    role: str
    layers: str
    replicas: int
    epoch: int
    phase: str
    loss: float
    loss_val: float
    loss_first: float
    tokens_per_s: float
    tokens: int
    micro_batches: int
    last_work_s: float
    bytes_sent: int
    bytes_received: int
    paths_to: _containers.ScalarMap[str, int]
    reachable: str
    round: RoundLine
    device: str
    memory_used: int
    memory_limit: int
    stash_bytes: int
    stash_limit: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    leader: str
    digest: str
    time_s: _containers.ScalarMap[str, float]
    loss_history: _containers.RepeatedScalarFieldContainer[float]
    home: str
    metrics_url: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    p2pd_restarts: int
    digest_mismatches: int
    cpu_s: float
    progress: float
    momentum_lost: int
    momentum_age: int
    paths: PathsLine
    cell: CellLine
    change: ChangeLine
    up_rate: float
    down_rate: float
    max_up: float
    max_down: float
    optimizer_bytes: int
    recompute: str
    memory_planned: int
    memory_plan: _containers.RepeatedCompositeFieldContainer[MemoryLine]
    memory_peak: int
    cause: str
    leader_name: str
    left_s: float
    left_over_s: float
    warmup: int
    memory_process: int
    placed: bool
    texts: int
    text_bytes: int
    loss_before: float
    loss_val_before: float
    step: str
    precision: str
    receipts: ReceiptsLine
    paused: str
    paused_until: float
    pauses: int
    paused_s: float
    sent: _containers.RepeatedCompositeFieldContainer[SentLine]
    given_back: str
    order: OrderLine
    paused_by_run: bool
    kernels: str
    archive: ArchiveLine
    def __init__(self, peer: _Optional[str] = ..., name: _Optional[str] = ..., version: _Optional[str] = ..., up_s: _Optional[float] = ..., state: _Optional[str] = ..., healthy: _Optional[bool] = ..., reason: _Optional[str] = ..., next_step: _Optional[str] = ..., swarm: _Optional[_Union[_ask_pb2.SwarmLine, _Mapping]] = ..., stage: _Optional[int] = ..., role: _Optional[str] = ..., layers: _Optional[str] = ..., replicas: _Optional[int] = ..., epoch: _Optional[int] = ..., phase: _Optional[str] = ..., loss: _Optional[float] = ..., loss_val: _Optional[float] = ..., loss_first: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., tokens: _Optional[int] = ..., micro_batches: _Optional[int] = ..., last_work_s: _Optional[float] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., paths_to: _Optional[_Mapping[str, int]] = ..., reachable: _Optional[str] = ..., round: _Optional[_Union[RoundLine, _Mapping]] = ..., device: _Optional[str] = ..., memory_used: _Optional[int] = ..., memory_limit: _Optional[int] = ..., stash_bytes: _Optional[int] = ..., stash_limit: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., leader: _Optional[str] = ..., digest: _Optional[str] = ..., time_s: _Optional[_Mapping[str, float]] = ..., loss_history: _Optional[_Iterable[float]] = ..., home: _Optional[str] = ..., metrics_url: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., p2pd_restarts: _Optional[int] = ..., digest_mismatches: _Optional[int] = ..., cpu_s: _Optional[float] = ..., progress: _Optional[float] = ..., momentum_lost: _Optional[int] = ..., momentum_age: _Optional[int] = ..., paths: _Optional[_Union[PathsLine, _Mapping]] = ..., cell: _Optional[_Union[CellLine, _Mapping]] = ..., change: _Optional[_Union[ChangeLine, _Mapping]] = ..., up_rate: _Optional[float] = ..., down_rate: _Optional[float] = ..., max_up: _Optional[float] = ..., max_down: _Optional[float] = ..., optimizer_bytes: _Optional[int] = ..., recompute: _Optional[str] = ..., memory_planned: _Optional[int] = ..., memory_plan: _Optional[_Iterable[_Union[MemoryLine, _Mapping]]] = ..., memory_peak: _Optional[int] = ..., cause: _Optional[str] = ..., leader_name: _Optional[str] = ..., left_s: _Optional[float] = ..., left_over_s: _Optional[float] = ..., warmup: _Optional[int] = ..., memory_process: _Optional[int] = ..., placed: _Optional[bool] = ..., texts: _Optional[int] = ..., text_bytes: _Optional[int] = ..., loss_before: _Optional[float] = ..., loss_val_before: _Optional[float] = ..., step: _Optional[str] = ..., precision: _Optional[str] = ..., receipts: _Optional[_Union[ReceiptsLine, _Mapping]] = ..., paused: _Optional[str] = ..., paused_until: _Optional[float] = ..., pauses: _Optional[int] = ..., paused_s: _Optional[float] = ..., sent: _Optional[_Iterable[_Union[SentLine, _Mapping]]] = ..., given_back: _Optional[str] = ..., order: _Optional[_Union[OrderLine, _Mapping]] = ..., paused_by_run: _Optional[bool] = ..., kernels: _Optional[str] = ..., archive: _Optional[_Union[ArchiveLine, _Mapping]] = ...) -> None: ...

class ArchiveLine(_message.Message):
    __slots__ = ("to", "epoch", "known", "at", "trouble")
    TO_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    to: str
    epoch: int
    known: bool
    at: float
    trouble: str
    def __init__(self, to: _Optional[str] = ..., epoch: _Optional[int] = ..., known: _Optional[bool] = ..., at: _Optional[float] = ..., trouble: _Optional[str] = ...) -> None: ...

class OrderLine(_message.Message):
    __slots__ = ("number", "verb", "reason", "begins", "in_force")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    IN_FORCE_FIELD_NUMBER: _ClassVar[int]
    number: int
    verb: str
    reason: str
    begins: float
    in_force: bool
    def __init__(self, number: _Optional[int] = ..., verb: _Optional[str] = ..., reason: _Optional[str] = ..., begins: _Optional[float] = ..., in_force: _Optional[bool] = ...) -> None: ...

class ReceiptsLine(_message.Message):
    __slots__ = ("own", "work", "unsigned", "epochs")
    OWN_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    UNSIGNED_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    own: int
    work: int
    unsigned: int
    epochs: int
    def __init__(self, own: _Optional[int] = ..., work: _Optional[int] = ..., unsigned: _Optional[int] = ..., epochs: _Optional[int] = ...) -> None: ...

class SentLine(_message.Message):
    __slots__ = ("peer", "name", "wire", "error", "measured")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    peer: str
    name: str
    wire: str
    error: float
    measured: int
    def __init__(self, peer: _Optional[str] = ..., name: _Optional[str] = ..., wire: _Optional[str] = ..., error: _Optional[float] = ..., measured: _Optional[int] = ...) -> None: ...

class MemoryLine(_message.Message):
    __slots__ = ("when", "what", "bytes")
    WHEN_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    when: str
    what: str
    bytes: int
    def __init__(self, when: _Optional[str] = ..., what: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class PathsLine(_message.Message):
    __slots__ = ("how", "run_s", "round_s", "last_said_s", "last_took_s", "why")
    HOW_FIELD_NUMBER: _ClassVar[int]
    RUN_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_S_FIELD_NUMBER: _ClassVar[int]
    LAST_SAID_S_FIELD_NUMBER: _ClassVar[int]
    LAST_TOOK_S_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    how: str
    run_s: float
    round_s: float
    last_said_s: float
    last_took_s: float
    why: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, how: _Optional[str] = ..., run_s: _Optional[float] = ..., round_s: _Optional[float] = ..., last_said_s: _Optional[float] = ..., last_took_s: _Optional[float] = ..., why: _Optional[_Iterable[str]] = ...) -> None: ...

class CellLine(_message.Message):
    __slots__ = ("cell", "peers", "cells", "window_s", "window", "next_s", "met", "met_cells", "last", "cells_averaged", "bytes", "last_s", "alone", "alone_windows", "averaged_windows", "apart")
    CELL_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    NEXT_S_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    MET_CELLS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CELLS_AVERAGED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_S_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    ALONE_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    AVERAGED_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    APART_FIELD_NUMBER: _ClassVar[int]
    cell: str
    peers: int
    cells: int
    window_s: float
    window: int
    next_s: float
    met: int
    met_cells: int
    last: int
    cells_averaged: int
    bytes: int
    last_s: float
    alone: bool
    alone_windows: int
    averaged_windows: int
    apart: float
    def __init__(self, cell: _Optional[str] = ..., peers: _Optional[int] = ..., cells: _Optional[int] = ..., window_s: _Optional[float] = ..., window: _Optional[int] = ..., next_s: _Optional[float] = ..., met: _Optional[int] = ..., met_cells: _Optional[int] = ..., last: _Optional[int] = ..., cells_averaged: _Optional[int] = ..., bytes: _Optional[int] = ..., last_s: _Optional[float] = ..., alone: _Optional[bool] = ..., alone_windows: _Optional[int] = ..., averaged_windows: _Optional[int] = ..., apart: _Optional[float] = ...) -> None: ...

class ChangeLine(_message.Message):
    __slots__ = ("revision", "in_force", "says", "signed")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    IN_FORCE_FIELD_NUMBER: _ClassVar[int]
    SAYS_FIELD_NUMBER: _ClassVar[int]
    SIGNED_FIELD_NUMBER: _ClassVar[int]
    revision: int
    in_force: int
    says: str
    signed: str
    def __init__(self, revision: _Optional[int] = ..., in_force: _Optional[int] = ..., says: _Optional[str] = ..., signed: _Optional[str] = ...) -> None: ...

class RoundLine(_message.Message):
    __slots__ = ("done", "repaired", "failed", "last_s", "members", "contributors", "bytes")
    DONE_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LAST_S_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    done: int
    repaired: int
    failed: int
    last_s: float
    members: int
    contributors: int
    bytes: int
    def __init__(self, done: _Optional[int] = ..., repaired: _Optional[int] = ..., failed: _Optional[int] = ..., last_s: _Optional[float] = ..., members: _Optional[int] = ..., contributors: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class RunHistoryRequest(_message.Message):
    __slots__ = ("after", "edition")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    EDITION_FIELD_NUMBER: _ClassVar[int]
    after: int
    edition: int
    def __init__(self, after: _Optional[int] = ..., edition: _Optional[int] = ...) -> None: ...

class RunHistory(_message.Message):
    __slots__ = ("edition", "epochs", "work", "stage_bytes")
    EDITION_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    STAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    edition: int
    epochs: _containers.RepeatedCompositeFieldContainer[EpochLine]
    work: _containers.RepeatedCompositeFieldContainer[WorkLine]
    stage_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, edition: _Optional[int] = ..., epochs: _Optional[_Iterable[_Union[EpochLine, _Mapping]]] = ..., work: _Optional[_Iterable[_Union[WorkLine, _Mapping]]] = ..., stage_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class EpochLine(_message.Message):
    __slots__ = ("epoch", "tokens", "loss", "loss_val", "seconds", "repaired", "epochs")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LOSS_VAL_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    tokens: int
    loss: float
    loss_val: float
    seconds: float
    repaired: int
    epochs: int
    def __init__(self, epoch: _Optional[int] = ..., tokens: _Optional[int] = ..., loss: _Optional[float] = ..., loss_val: _Optional[float] = ..., seconds: _Optional[float] = ..., repaired: _Optional[int] = ..., epochs: _Optional[int] = ...) -> None: ...

class WorkLine(_message.Message):
    __slots__ = ("peer", "name", "stage", "micro_batches", "epochs", "of_stage")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    OF_STAGE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    name: str
    stage: int
    micro_batches: int
    epochs: int
    of_stage: int
    def __init__(self, peer: _Optional[str] = ..., name: _Optional[str] = ..., stage: _Optional[int] = ..., micro_batches: _Optional[int] = ..., epochs: _Optional[int] = ..., of_stage: _Optional[int] = ...) -> None: ...

class PeersRequest(_message.Message):
    __slots__ = ("all",)
    ALL_FIELD_NUMBER: _ClassVar[int]
    all: bool
    def __init__(self, all: _Optional[bool] = ...) -> None: ...

class PingPeer(_message.Message):
    __slots__ = ("peer", "count", "improve")
    PEER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    IMPROVE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    count: int
    improve: bool
    def __init__(self, peer: _Optional[str] = ..., count: _Optional[int] = ..., improve: _Optional[bool] = ...) -> None: ...

class PingReport(_message.Message):
    __slots__ = ("peer", "name", "path", "rtt_s", "error", "via", "tried", "via_name")
    class TriedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    VIA_FIELD_NUMBER: _ClassVar[int]
    TRIED_FIELD_NUMBER: _ClassVar[int]
    VIA_NAME_FIELD_NUMBER: _ClassVar[int]
    peer: str
    name: str
    path: str
    rtt_s: _containers.RepeatedScalarFieldContainer[float]
    error: str
    via: str
    tried: _containers.ScalarMap[str, str]
    via_name: str
    def __init__(self, peer: _Optional[str] = ..., name: _Optional[str] = ..., path: _Optional[str] = ..., rtt_s: _Optional[_Iterable[float]] = ..., error: _Optional[str] = ..., via: _Optional[str] = ..., tried: _Optional[_Mapping[str, str]] = ..., via_name: _Optional[str] = ...) -> None: ...

class ReachRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReachReport(_message.Message):
    __slots__ = ("standing", "reachable", "addresses", "seen", "relays", "mapping", "ways", "clients", "circuits", "bootstrap", "lan", "ports")
    class MappingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class BootstrapEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class PortsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STANDING_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    MAPPING_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    CIRCUITS_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_FIELD_NUMBER: _ClassVar[int]
    LAN_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    standing: str
    reachable: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    seen: _containers.RepeatedScalarFieldContainer[str]
    relays: _containers.RepeatedScalarFieldContainer[str]
    mapping: _containers.ScalarMap[str, str]
    ways: _containers.RepeatedCompositeFieldContainer[WayLine]
    clients: int
    circuits: int
    bootstrap: _containers.ScalarMap[str, str]
    lan: str
    ports: _containers.ScalarMap[str, int]
    def __init__(self, standing: _Optional[str] = ..., reachable: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., seen: _Optional[_Iterable[str]] = ..., relays: _Optional[_Iterable[str]] = ..., mapping: _Optional[_Mapping[str, str]] = ..., ways: _Optional[_Iterable[_Union[WayLine, _Mapping]]] = ..., clients: _Optional[int] = ..., circuits: _Optional[int] = ..., bootstrap: _Optional[_Mapping[str, str]] = ..., lan: _Optional[str] = ..., ports: _Optional[_Mapping[str, int]] = ...) -> None: ...

class WayLine(_message.Message):
    __slots__ = ("peer", "name", "stage", "role", "path", "via", "rtt_s", "up", "down", "proven_s", "tried", "standing")
    class TriedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    VIA_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    PROVEN_S_FIELD_NUMBER: _ClassVar[int]
    TRIED_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    peer: str
    name: str
    stage: int
    role: str
    path: str
    via: str
    rtt_s: float
    up: float
    down: float
    proven_s: float
    tried: _containers.ScalarMap[str, str]
    standing: str
    def __init__(self, peer: _Optional[str] = ..., name: _Optional[str] = ..., stage: _Optional[int] = ..., role: _Optional[str] = ..., path: _Optional[str] = ..., via: _Optional[str] = ..., rtt_s: _Optional[float] = ..., up: _Optional[float] = ..., down: _Optional[float] = ..., proven_s: _Optional[float] = ..., tried: _Optional[_Mapping[str, str]] = ..., standing: _Optional[str] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("follow", "last", "level")
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    follow: bool
    last: int
    level: str
    def __init__(self, follow: _Optional[bool] = ..., last: _Optional[int] = ..., level: _Optional[str] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("at", "level", "component", "kind", "text", "fields")
    AT_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    at: float
    level: str
    component: str
    kind: str
    text: str
    fields: str
    def __init__(self, at: _Optional[float] = ..., level: _Optional[str] = ..., component: _Optional[str] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ..., fields: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("now",)
    NOW_FIELD_NUMBER: _ClassVar[int]
    now: bool
    def __init__(self, now: _Optional[bool] = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("seconds", "reason", "now")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    reason: str
    now: bool
    def __init__(self, seconds: _Optional[float] = ..., reason: _Optional[str] = ..., now: _Optional[bool] = ...) -> None: ...

class PauseReply(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "max_tokens", "temperature", "seed", "top_k", "leave_out", "top_p", "stop", "messages")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    LEAVE_OUT_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    top_k: int
    leave_out: LeaveOut
    top_p: float
    stop: _containers.RepeatedScalarFieldContainer[str]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, prompt: _Optional[str] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., seed: _Optional[int] = ..., top_k: _Optional[int] = ..., leave_out: _Optional[_Union[LeaveOut, _Mapping]] = ..., top_p: _Optional[float] = ..., stop: _Optional[_Iterable[str]] = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class LeaveOut(_message.Message):
    __slots__ = ("stages", "after")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedScalarFieldContainer[int]
    after: int
    def __init__(self, stages: _Optional[_Iterable[int]] = ..., after: _Optional[int] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("text", "last", "tokens_per_s", "missing", "by", "by_name", "slow", "token", "logprob", "prompt_tokens", "finish")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    BY_NAME_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    text: str
    last: bool
    tokens_per_s: float
    missing: Missing
    by: str
    by_name: str
    slow: str
    token: int
    logprob: float
    prompt_tokens: int
    finish: str
    def __init__(self, text: _Optional[str] = ..., last: _Optional[bool] = ..., tokens_per_s: _Optional[float] = ..., missing: _Optional[_Union[Missing, _Mapping]] = ..., by: _Optional[str] = ..., by_name: _Optional[str] = ..., slow: _Optional[str] = ..., token: _Optional[int] = ..., logprob: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., finish: _Optional[str] = ...) -> None: ...

class Missing(_message.Message):
    __slots__ = ("asked", "dead", "stages")
    ASKED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    asked: _containers.RepeatedScalarFieldContainer[int]
    dead: _containers.RepeatedScalarFieldContainer[int]
    stages: int
    def __init__(self, asked: _Optional[_Iterable[int]] = ..., dead: _Optional[_Iterable[int]] = ..., stages: _Optional[int] = ...) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("leave_out", "share", "choices", "batches")
    LEAVE_OUT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    leave_out: LeaveOut
    share: float
    choices: int
    batches: int
    def __init__(self, leave_out: _Optional[_Union[LeaveOut, _Mapping]] = ..., share: _Optional[float] = ..., choices: _Optional[int] = ..., batches: _Optional[int] = ...) -> None: ...

class Evaluated(_message.Message):
    __slots__ = ("missing", "loss", "tokens", "epoch", "by", "loss_before", "by_name")
    MISSING_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    LOSS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    BY_NAME_FIELD_NUMBER: _ClassVar[int]
    missing: Missing
    loss: float
    tokens: int
    epoch: int
    by: str
    loss_before: float
    by_name: str
    def __init__(self, missing: _Optional[_Union[Missing, _Mapping]] = ..., loss: _Optional[float] = ..., tokens: _Optional[int] = ..., epoch: _Optional[int] = ..., by: _Optional[str] = ..., loss_before: _Optional[float] = ..., by_name: _Optional[str] = ...) -> None: ...

class ExportRequest(_message.Message):
    __slots__ = ("directory", "tokenizer", "without_tokenizer", "merge", "gguf", "base")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    GGUF_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    directory: str
    tokenizer: str
    without_tokenizer: bool
    merge: bool
    gguf: bool
    base: str
    def __init__(self, directory: _Optional[str] = ..., tokenizer: _Optional[str] = ..., without_tokenizer: _Optional[bool] = ..., merge: _Optional[bool] = ..., gguf: _Optional[bool] = ..., base: _Optional[str] = ...) -> None: ...

class SwitchRequest(_message.Message):
    __slots__ = ("change",)
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    change: str
    def __init__(self, change: _Optional[str] = ...) -> None: ...

class SwitchReply(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class OrderRequest(_message.Message):
    __slots__ = ("order",)
    ORDER_FIELD_NUMBER: _ClassVar[int]
    order: str
    def __init__(self, order: _Optional[str] = ...) -> None: ...

class OrderReply(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class CellsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CellsAnswer(_message.Message):
    __slots__ = ("cells", "seen")
    CELLS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    cells: int
    seen: _containers.RepeatedCompositeFieldContainer[CellSeen]
    def __init__(self, cells: _Optional[int] = ..., seen: _Optional[_Iterable[_Union[CellSeen, _Mapping]]] = ...) -> None: ...

class CellSeen(_message.Message):
    __slots__ = ("cell", "own", "works", "epoch", "tokens_per_s", "replicas")
    CELL_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    WORKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    cell: str
    own: bool
    works: bool
    epoch: int
    tokens_per_s: float
    replicas: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cell: _Optional[str] = ..., own: _Optional[bool] = ..., works: _Optional[bool] = ..., epoch: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., replicas: _Optional[_Iterable[int]] = ...) -> None: ...

class InviteRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InviteReply(_message.Message):
    __slots__ = ("invite", "addresses", "only_on")
    INVITE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ONLY_ON_FIELD_NUMBER: _ClassVar[int]
    invite: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    only_on: str
    def __init__(self, invite: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., only_on: _Optional[str] = ...) -> None: ...
