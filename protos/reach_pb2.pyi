from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RelayAsk(_message.Message):
    __slots__ = ("run_id", "admission", "reserve", "connect")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    admission: bytes
    reserve: Reserve
    connect: Connect
    def __init__(self, run_id: _Optional[str] = ..., admission: _Optional[bytes] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., connect: _Optional[_Union[Connect, _Mapping]] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Connect(_message.Message):
    __slots__ = ("target", "stream")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    target: str
    stream: str
    def __init__(self, target: _Optional[str] = ..., stream: _Optional[str] = ...) -> None: ...

class RelayAnswer(_message.Message):
    __slots__ = ("granted", "reason", "port", "ticket")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    granted: bool
    reason: str
    port: int
    ticket: bytes
    def __init__(self, granted: _Optional[bool] = ..., reason: _Optional[str] = ..., port: _Optional[int] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class Relayed(_message.Message):
    __slots__ = ("source", "stream", "port", "ticket")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    source: str
    stream: str
    port: int
    ticket: bytes
    def __init__(self, source: _Optional[str] = ..., stream: _Optional[str] = ..., port: _Optional[int] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class BypassAsk(_message.Message):
    __slots__ = ("ticket", "port", "addresses")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    port: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ticket: _Optional[bytes] = ..., port: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class BypassAnswer(_message.Message):
    __slots__ = ("accepted", "reason", "addresses")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, accepted: _Optional[bool] = ..., reason: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class PunchAsk(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class PunchAnswer(_message.Message):
    __slots__ = ("accepted", "reason", "addresses")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, accepted: _Optional[bool] = ..., reason: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class ShareAsk(_message.Message):
    __slots__ = ("address", "secret")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    address: bytes
    secret: bytes
    def __init__(self, address: _Optional[bytes] = ..., secret: _Optional[bytes] = ...) -> None: ...

class ShareAnswer(_message.Message):
    __slots__ = ("accepted", "reason")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    def __init__(self, accepted: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...
