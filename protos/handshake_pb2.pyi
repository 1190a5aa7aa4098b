from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("protocol", "run_id", "addresses", "certificate", "token", "admission", "name", "version", "mapped", "newest_protocol")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    certificate: bytes
    token: bytes
    admission: bytes
    name: str
    version: str
    mapped: _containers.RepeatedScalarFieldContainer[str]
    newest_protocol: int
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., certificate: _Optional[bytes] = ..., token: _Optional[bytes] = ..., admission: _Optional[bytes] = ..., name: _Optional[str] = ..., version: _Optional[str] = ..., mapped: _Optional[_Iterable[str]] = ..., newest_protocol: _Optional[int] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("code", "reason", "oldest_protocol", "newest_protocol", "version")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    oldest_protocol: int
    newest_protocol: int
    version: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., oldest_protocol: _Optional[int] = ..., newest_protocol: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class HandshakeFrame(_message.Message):
    __slots__ = ("hello", "farewell")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    farewell: Farewell
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ...) -> None: ...
