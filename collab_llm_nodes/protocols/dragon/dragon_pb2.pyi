from collab_llm_nodes.transport import wire_pb2 as _wire_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeviceMessage(_message.Message):
    __slots__ = ("open", "draft", "target")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    open: Open
    draft: Draft
    target: Target
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., target: _Optional[_Union[Target, _Mapping]] = ...) -> None: ...

class CloudMessage(_message.Message):
    __slots__ = ("opened", "draft", "target", "failure")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    draft: Draft
    target: Target
    failure: _wire_pb2.Failure
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., target: _Optional[_Union[Target, _Mapping]] = ..., failure: _Optional[_Union[_wire_pb2.Failure, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("query", "max_tokens", "identity", "law", "temperature", "seed", "aggregate_on", "max_ahead", "rtt_s", "replay", "decode")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAW_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    AGGREGATE_ON_FIELD_NUMBER: _ClassVar[int]
    MAX_AHEAD_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    query: str
    max_tokens: int
    identity: Identity
    law: Law
    temperature: float
    seed: int
    aggregate_on: str
    max_ahead: int
    rtt_s: float
    replay: _containers.RepeatedScalarFieldContainer[int]
    decode: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, query: _Optional[str] = ..., max_tokens: _Optional[int] = ..., identity: _Optional[_Union[Identity, _Mapping]] = ..., law: _Optional[_Union[Law, _Mapping]] = ..., temperature: _Optional[float] = ..., seed: _Optional[int] = ..., aggregate_on: _Optional[str] = ..., max_ahead: _Optional[int] = ..., rtt_s: _Optional[float] = ..., replay: _Optional[_Iterable[int]] = ..., decode: _Optional[_Iterable[float]] = ...) -> None: ...

class Identity(_message.Message):
    __slots__ = ("vocabulary", "model", "scorer")
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    vocabulary: str
    model: str
    scorer: str
    def __init__(self, vocabulary: _Optional[str] = ..., model: _Optional[str] = ..., scorer: _Optional[str] = ...) -> None: ...

class Law(_message.Message):
    __slots__ = ("law", "gamma", "top_p", "max_support", "paper_faithful")
    LAW_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MAX_SUPPORT_FIELD_NUMBER: _ClassVar[int]
    PAPER_FAITHFUL_FIELD_NUMBER: _ClassVar[int]
    law: str
    gamma: float
    top_p: float
    max_support: int
    paper_faithful: bool
    def __init__(self, law: _Optional[str] = ..., gamma: _Optional[float] = ..., top_p: _Optional[float] = ..., max_support: _Optional[int] = ..., paper_faithful: _Optional[bool] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("model", "decode", "documents")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    decode: _containers.RepeatedScalarFieldContainer[float]
    documents: int
    def __init__(self, model: _Optional[str] = ..., decode: _Optional[_Iterable[float]] = ..., documents: _Optional[int] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("position", "epoch", "index", "gaps", "probs", "log_weight", "decode_us", "known", "held_us")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    LOG_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    HELD_US_FIELD_NUMBER: _ClassVar[int]
    position: int
    epoch: int
    index: int
    gaps: _containers.RepeatedScalarFieldContainer[int]
    probs: bytes
    log_weight: float
    decode_us: int
    known: int
    held_us: int
    def __init__(self, position: _Optional[int] = ..., epoch: _Optional[int] = ..., index: _Optional[int] = ..., gaps: _Optional[_Iterable[int]] = ..., probs: _Optional[bytes] = ..., log_weight: _Optional[float] = ..., decode_us: _Optional[int] = ..., known: _Optional[int] = ..., held_us: _Optional[int] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("position", "token", "flags", "expected_device", "expected_cloud", "decode_us", "rtt_us")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_DEVICE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CLOUD_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    RTT_US_FIELD_NUMBER: _ClassVar[int]
    position: int
    token: int
    flags: int
    expected_device: int
    expected_cloud: int
    decode_us: int
    rtt_us: int
    def __init__(self, position: _Optional[int] = ..., token: _Optional[int] = ..., flags: _Optional[int] = ..., expected_device: _Optional[int] = ..., expected_cloud: _Optional[int] = ..., decode_us: _Optional[int] = ..., rtt_us: _Optional[int] = ...) -> None: ...

class CloudInfo(_message.Message):
    __slots__ = ("model", "identity", "vocab_size", "version", "max_tokens", "max_query_chars", "sessions")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUERY_CHARS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    identity: Identity
    vocab_size: int
    version: str
    max_tokens: int
    max_query_chars: int
    sessions: int
    def __init__(self, model: _Optional[str] = ..., identity: _Optional[_Union[Identity, _Mapping]] = ..., vocab_size: _Optional[int] = ..., version: _Optional[str] = ..., max_tokens: _Optional[int] = ..., max_query_chars: _Optional[int] = ..., sessions: _Optional[int] = ...) -> None: ...
