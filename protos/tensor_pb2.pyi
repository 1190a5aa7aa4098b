from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WireType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WIRE_UNSPECIFIED: _ClassVar[WireType]
    FP32: _ClassVar[WireType]
    BF16: _ClassVar[WireType]
    FP16: _ClassVar[WireType]
    INT8: _ClassVar[WireType]
    INT4: _ClassVar[WireType]
    TOP_K: _ClassVar[WireType]
WIRE_UNSPECIFIED: WireType
FP32: WireType
BF16: WireType
FP16: WireType
INT8: WireType
INT4: WireType
TOP_K: WireType

class TensorHead(_message.Message):
    __slots__ = ("name", "shape", "wire", "nbytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    wire: WireType
    nbytes: int
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., wire: _Optional[_Union[WireType, str]] = ..., nbytes: _Optional[int] = ...) -> None: ...
