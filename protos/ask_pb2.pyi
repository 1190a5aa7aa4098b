from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Ask(_message.Message):
    __slots__ = ("manifest", "peers", "ping", "reach")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    manifest: AskManifest
    peers: AskPeers
    ping: AskPing
    reach: AskReach
    def __init__(self, manifest: _Optional[_Union[AskManifest, _Mapping]] = ..., peers: _Optional[_Union[AskPeers, _Mapping]] = ..., ping: _Optional[_Union[AskPing, _Mapping]] = ..., reach: _Optional[_Union[AskReach, _Mapping]] = ...) -> None: ...

class AskManifest(_message.Message):
    __slots__ = ("run_id", "admission")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    admission: bytes
    def __init__(self, run_id: _Optional[str] = ..., admission: _Optional[bytes] = ...) -> None: ...

class AskPeers(_message.Message):
    __slots__ = ("admission", "call")
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    admission: bytes
    call: str
    def __init__(self, admission: _Optional[bytes] = ..., call: _Optional[str] = ...) -> None: ...

class AskPing(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class AskReach(_message.Message):
    __slots__ = ("ports",)
    PORTS_FIELD_NUMBER: _ClassVar[int]
    ports: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ports: _Optional[_Iterable[int]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("manifest", "peers", "ping", "refusal", "reach", "oldest_protocol", "newest_protocol", "version", "time")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    manifest: ManifestAnswer
    peers: PeersAnswer
    ping: PingAnswer
    refusal: Refusal
    reach: ReachAnswer
    oldest_protocol: int
    newest_protocol: int
    version: str
    time: float
    def __init__(self, manifest: _Optional[_Union[ManifestAnswer, _Mapping]] = ..., peers: _Optional[_Union[PeersAnswer, _Mapping]] = ..., ping: _Optional[_Union[PingAnswer, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., reach: _Optional[_Union[ReachAnswer, _Mapping]] = ..., oldest_protocol: _Optional[int] = ..., newest_protocol: _Optional[int] = ..., version: _Optional[str] = ..., time: _Optional[float] = ...) -> None: ...

class ManifestAnswer(_message.Message):
    __slots__ = ("toml", "order")
    TOML_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    toml: bytes
    order: str
    def __init__(self, toml: _Optional[bytes] = ..., order: _Optional[str] = ...) -> None: ...

class PeersAnswer(_message.Message):
    __slots__ = ("peers", "swarm", "called", "reason", "next_step", "invites")
    class InvitesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PEERS_FIELD_NUMBER: _ClassVar[int]
    SWARM_FIELD_NUMBER: _ClassVar[int]
    CALLED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    INVITES_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[PeerLine]
    swarm: SwarmLine
    called: bool
    reason: str
    next_step: str
    invites: _containers.ScalarMap[str, str]
    def __init__(self, peers: _Optional[_Iterable[_Union[PeerLine, _Mapping]]] = ..., swarm: _Optional[_Union[SwarmLine, _Mapping]] = ..., called: _Optional[bool] = ..., reason: _Optional[str] = ..., next_step: _Optional[str] = ..., invites: _Optional[_Mapping[str, str]] = ...) -> None: ...

class PingAnswer(_message.Message):
    __slots__ = ("nonce", "version", "name", "time")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    version: str
    name: str
    time: float
    def __init__(self, nonce: _Optional[bytes] = ..., version: _Optional[str] = ..., name: _Optional[str] = ..., time: _Optional[float] = ...) -> None: ...

class ReachAnswer(_message.Message):
    __slots__ = ("seen", "open", "bypass")
    SEEN_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    BYPASS_FIELD_NUMBER: _ClassVar[int]
    seen: str
    open: _containers.RepeatedScalarFieldContainer[int]
    bypass: int
    def __init__(self, seen: _Optional[str] = ..., open: _Optional[_Iterable[int]] = ..., bypass: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "reason", "again_s", "place")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGAIN_S_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    again_s: float
    place: int
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., again_s: _Optional[float] = ..., place: _Optional[int] = ...) -> None: ...

class PeerLine(_message.Message):
    __slots__ = ("peer", "name", "state", "stage", "role", "path", "rtt_s", "tokens_per_s", "epoch", "up_s", "version", "seen_s", "progress", "via", "oldest_protocol", "newest_protocol", "cell", "silent_s", "leads", "wire", "wire_error", "paused")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UP_S_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SEEN_S_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    VIA_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    WIRE_ERROR_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    peer: str
    name: str
    state: str
    stage: int
    role: str
    path: str
    rtt_s: float
    tokens_per_s: float
    epoch: int
    up_s: float
    version: str
    seen_s: float
    progress: float
    via: str
    oldest_protocol: int
    newest_protocol: int
    cell: str
    silent_s: float
    leads: bool
    wire: str
    wire_error: float
    paused: str
    def __init__(self, peer: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[str] = ..., stage: _Optional[int] = ..., role: _Optional[str] = ..., path: _Optional[str] = ..., rtt_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., epoch: _Optional[int] = ..., up_s: _Optional[float] = ..., version: _Optional[str] = ..., seen_s: _Optional[float] = ..., progress: _Optional[float] = ..., via: _Optional[str] = ..., oldest_protocol: _Optional[int] = ..., newest_protocol: _Optional[int] = ..., cell: _Optional[str] = ..., silent_s: _Optional[float] = ..., leads: _Optional[bool] = ..., wire: _Optional[str] = ..., wire_error: _Optional[float] = ..., paused: _Optional[str] = ...) -> None: ...

class SwarmLine(_message.Message):
    __slots__ = ("name", "run_id", "epoch", "epochs", "loss", "stages")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    run_id: str
    epoch: int
    epochs: int
    loss: float
    stages: int
    def __init__(self, name: _Optional[str] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., epochs: _Optional[int] = ..., loss: _Optional[float] = ..., stages: _Optional[int] = ...) -> None: ...
