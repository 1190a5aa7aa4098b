from protos import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    TRAIN: _ClassVar[Purpose]
    EVALUATE: _ClassVar[Purpose]
    GENERATE: _ClassVar[Purpose]

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    ACCEPTED: _ClassVar[Verdict]
    DONE: _ClassVar[Verdict]
    BUSY: _ClassVar[Verdict]
    REFUSED: _ClassVar[Verdict]
PURPOSE_UNSPECIFIED: Purpose
TRAIN: Purpose
EVALUATE: Purpose
GENERATE: Purpose
VERDICT_UNSPECIFIED: Verdict
ACCEPTED: Verdict
DONE: Verdict
BUSY: Verdict
REFUSED: Verdict

class PathHop(_message.Message):
    __slots__ = ("stage", "peer")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    stage: int
    peer: str
    def __init__(self, stage: _Optional[int] = ..., peer: _Optional[str] = ...) -> None: ...

class TextTurn(_message.Message):
    __slots__ = ("text", "past", "kept", "positions")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PAST_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    text: int
    past: int
    kept: int
    positions: int
    def __init__(self, text: _Optional[int] = ..., past: _Optional[int] = ..., kept: _Optional[int] = ..., positions: _Optional[int] = ...) -> None: ...

class FrameHead(_message.Message):
    __slots__ = ("epoch", "plan_hash", "index", "purpose", "journey", "position", "tensor", "deadline_s", "document_ends", "patient", "untrained", "text")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    JOURNEY_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_ENDS_FIELD_NUMBER: _ClassVar[int]
    PATIENT_FIELD_NUMBER: _ClassVar[int]
    UNTRAINED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    plan_hash: str
    index: int
    purpose: Purpose
    journey: _containers.RepeatedCompositeFieldContainer[PathHop]
    position: int
    tensor: _tensor_pb2.TensorHead
    deadline_s: float
    document_ends: _containers.RepeatedScalarFieldContainer[int]
    patient: bool
    untrained: int
    text: TextTurn
    def __init__(self, epoch: _Optional[int] = ..., plan_hash: _Optional[str] = ..., index: _Optional[int] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., journey: _Optional[_Iterable[_Union[PathHop, _Mapping]]] = ..., position: _Optional[int] = ..., tensor: _Optional[_Union[_tensor_pb2.TensorHead, _Mapping]] = ..., deadline_s: _Optional[float] = ..., document_ends: _Optional[_Iterable[int]] = ..., patient: _Optional[bool] = ..., untrained: _Optional[int] = ..., text: _Optional[_Union[TextTurn, _Mapping]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("head", "chunk", "left")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    head: FrameHead
    chunk: bytes
    left: bytes
    def __init__(self, head: _Optional[_Union[FrameHead, _Mapping]] = ..., chunk: _Optional[bytes] = ..., left: _Optional[bytes] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("verdict", "reason", "waited_s")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    verdict: Verdict
    reason: str
    waited_s: float
    def __init__(self, verdict: _Optional[_Union[Verdict, str]] = ..., reason: _Optional[str] = ..., waited_s: _Optional[float] = ...) -> None: ...

class FetchInput(_message.Message):
    __slots__ = ("epoch", "plan_hash", "index", "position", "skipped")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    plan_hash: str
    index: int
    position: int
    skipped: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., plan_hash: _Optional[str] = ..., index: _Optional[int] = ..., position: _Optional[int] = ..., skipped: _Optional[_Iterable[int]] = ...) -> None: ...

class LostNote(_message.Message):
    __slots__ = ("epoch", "plan_hash", "index", "reason", "purpose")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    plan_hash: str
    index: int
    reason: str
    purpose: Purpose
    def __init__(self, epoch: _Optional[int] = ..., plan_hash: _Optional[str] = ..., index: _Optional[int] = ..., reason: _Optional[str] = ..., purpose: _Optional[_Union[Purpose, str]] = ...) -> None: ...

class LostReply(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    def __init__(self, accepted: _Optional[bool] = ...) -> None: ...

class CountedNote(_message.Message):
    __slots__ = ("epoch", "plan_hash", "indices")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    plan_hash: str
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., plan_hash: _Optional[str] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class CountedReply(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    def __init__(self, accepted: _Optional[bool] = ...) -> None: ...
