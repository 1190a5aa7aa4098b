from protos import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefusalKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_UNSPECIFIED: _ClassVar[RefusalKind]
    PLAN: _ClassVar[RefusalKind]
    OWNERSHIP: _ClassVar[RefusalKind]
    STRANGER: _ClassVar[RefusalKind]
    HEADS: _ClassVar[RefusalKind]
    VALUES: _ClassVar[RefusalKind]
    BUSY: _ClassVar[RefusalKind]
    LATE: _ClassVar[RefusalKind]
    SUPERSEDED: _ClassVar[RefusalKind]
    FORGOTTEN: _ClassVar[RefusalKind]
    FAILED: _ClassVar[RefusalKind]
    GROUPS: _ClassVar[RefusalKind]
REFUSAL_UNSPECIFIED: RefusalKind
PLAN: RefusalKind
OWNERSHIP: RefusalKind
STRANGER: RefusalKind
HEADS: RefusalKind
VALUES: RefusalKind
BUSY: RefusalKind
LATE: RefusalKind
SUPERSEDED: RefusalKind
FORGOTTEN: RefusalKind
FAILED: RefusalKind
GROUPS: RefusalKind

class ContributionHead(_message.Message):
    __slots__ = ("epoch", "term", "attempt", "plan_hash", "ownership_hash", "tokens", "tensors", "group", "group_digest")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    OWNERSHIP_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GROUP_DIGEST_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    term: int
    attempt: int
    plan_hash: str
    ownership_hash: str
    tokens: int
    tensors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.TensorHead]
    group: int
    group_digest: str
    def __init__(self, epoch: _Optional[int] = ..., term: _Optional[int] = ..., attempt: _Optional[int] = ..., plan_hash: _Optional[str] = ..., ownership_hash: _Optional[str] = ..., tokens: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[_tensor_pb2.TensorHead, _Mapping]]] = ..., group: _Optional[int] = ..., group_digest: _Optional[str] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("head", "chunk")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    head: ContributionHead
    chunk: bytes
    def __init__(self, head: _Optional[_Union[ContributionHead, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class LabelledContribution(_message.Message):
    __slots__ = ("head", "chunk")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    head: Label
    chunk: bytes
    def __init__(self, head: _Optional[_Union[Label, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class Label(_message.Message):
    __slots__ = ("epoch", "term", "attempt", "plan_hash", "tensors")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    term: int
    attempt: int
    plan_hash: str
    tensors: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, epoch: _Optional[int] = ..., term: _Optional[int] = ..., attempt: _Optional[int] = ..., plan_hash: _Optional[str] = ..., tensors: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FreshHead(_message.Message):
    __slots__ = ("tensors", "made")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.TensorHead]
    made: _containers.RepeatedCompositeFieldContainer[Made]
    def __init__(self, tensors: _Optional[_Iterable[_Union[_tensor_pb2.TensorHead, _Mapping]]] = ..., made: _Optional[_Iterable[_Union[Made, _Mapping]]] = ...) -> None: ...

class Made(_message.Message):
    __slots__ = ("tensors", "tokens", "contributors")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    tensors: int
    tokens: int
    contributors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tensors: _Optional[int] = ..., tokens: _Optional[int] = ..., contributors: _Optional[_Iterable[str]] = ...) -> None: ...

class Fresh(_message.Message):
    __slots__ = ("head", "chunk", "refusal")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    head: FreshHead
    chunk: bytes
    refusal: Refusal
    def __init__(self, head: _Optional[_Union[FreshHead, _Mapping]] = ..., chunk: _Optional[bytes] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: RefusalKind
    text: str
    def __init__(self, kind: _Optional[_Union[RefusalKind, str]] = ..., text: _Optional[str] = ...) -> None: ...
