from protos import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    PARAMETERS: _ClassVar[Kind]
    OPTIMIZER: _ClassVar[Kind]
    SPARE: _ClassVar[Kind]
    SNAPSHOT: _ClassVar[Kind]
    MEAN: _ClassVar[Kind]
    OUTER: _ClassVar[Kind]
    BASE: _ClassVar[Kind]
KIND_UNSPECIFIED: Kind
PARAMETERS: Kind
OPTIMIZER: Kind
SPARE: Kind
SNAPSHOT: Kind
MEAN: Kind
OUTER: Kind
BASE: Kind

class DescribeRequest(_message.Message):
    __slots__ = ("stage", "kind", "epoch", "any_epoch", "names", "lineage")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ANY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    stage: int
    kind: Kind
    epoch: int
    any_epoch: bool
    names: _containers.RepeatedScalarFieldContainer[str]
    lineage: str
    def __init__(self, stage: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ..., epoch: _Optional[int] = ..., any_epoch: _Optional[bool] = ..., names: _Optional[_Iterable[str]] = ..., lineage: _Optional[str] = ...) -> None: ...

class StateManifest(_message.Message):
    __slots__ = ("epoch", "stage", "kind", "digest", "tensors", "lineage")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    stage: int
    kind: Kind
    digest: str
    tensors: _containers.RepeatedCompositeFieldContainer[StateTensor]
    lineage: str
    def __init__(self, epoch: _Optional[int] = ..., stage: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ..., digest: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[StateTensor, _Mapping]]] = ..., lineage: _Optional[str] = ...) -> None: ...

class StateTensor(_message.Message):
    __slots__ = ("head", "hashes")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    head: _tensor_pb2.TensorHead
    hashes: bytes
    def __init__(self, head: _Optional[_Union[_tensor_pb2.TensorHead, _Mapping]] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("stage", "kind", "epoch", "name", "offset", "length", "lineage")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    stage: int
    kind: Kind
    epoch: int
    name: str
    offset: int
    length: int
    lineage: str
    def __init__(self, stage: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ..., epoch: _Optional[int] = ..., name: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., lineage: _Optional[str] = ...) -> None: ...

class StateChunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("stage", "kind")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    stage: int
    kind: Kind
    def __init__(self, stage: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ...) -> None: ...

class StateList(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[PartVersion]
    def __init__(self, parts: _Optional[_Iterable[_Union[PartVersion, _Mapping]]] = ...) -> None: ...

class PartVersion(_message.Message):
    __slots__ = ("name", "epoch", "lineage")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    lineage: str
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., lineage: _Optional[str] = ...) -> None: ...

class FileRequest(_message.Message):
    __slots__ = ("sha256", "offset")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    offset: int
    def __init__(self, sha256: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...
