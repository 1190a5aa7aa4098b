from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CellsNote(_message.Message):
    __slots__ = ("window", "caller", "key", "offer", "named", "released")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    window: int
    caller: str
    key: str
    offer: OfferNote
    named: GroupNote
    released: ReleaseNote
    def __init__(self, window: _Optional[int] = ..., caller: _Optional[str] = ..., key: _Optional[str] = ..., offer: _Optional[_Union[OfferNote, _Mapping]] = ..., named: _Optional[_Union[GroupNote, _Mapping]] = ..., released: _Optional[_Union[ReleaseNote, _Mapping]] = ...) -> None: ...

class OfferNote(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GroupNote(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[AcceptanceNote]
    def __init__(self, members: _Optional[_Iterable[_Union[AcceptanceNote, _Mapping]]] = ...) -> None: ...

class ReleaseNote(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CellsReply(_message.Message):
    __slots__ = ("accepts", "reason", "acceptance")
    ACCEPTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    accepts: bool
    reason: str
    acceptance: AcceptanceNote
    def __init__(self, accepts: _Optional[bool] = ..., reason: _Optional[str] = ..., acceptance: _Optional[_Union[AcceptanceNote, _Mapping]] = ...) -> None: ...

class AcceptanceNote(_message.Message):
    __slots__ = ("cell", "leader", "hosts", "signature")
    CELL_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    cell: str
    leader: str
    hosts: _containers.RepeatedCompositeFieldContainer[StageHosts]
    signature: bytes
    def __init__(self, cell: _Optional[str] = ..., leader: _Optional[str] = ..., hosts: _Optional[_Iterable[_Union[StageHosts, _Mapping]]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class StageHosts(_message.Message):
    __slots__ = ("stage", "peers")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    peers: _containers.RepeatedCompositeFieldContainer[StageHost]
    def __init__(self, stage: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[StageHost, _Mapping]]] = ...) -> None: ...

class StageHost(_message.Message):
    __slots__ = ("peer", "maddrs")
    PEER_FIELD_NUMBER: _ClassVar[int]
    MADDRS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    maddrs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer: _Optional[str] = ..., maddrs: _Optional[_Iterable[str]] = ...) -> None: ...
