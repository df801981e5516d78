from collab_llm_nodes.transport import wire_pb2 as _wire_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClientMessage(_message.Message):
    __slots__ = ("open", "draft", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: Open
    draft: Draft
    close: Close
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("opened", "early_exit", "verdict", "failure")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    EARLY_EXIT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    early_exit: EarlyExit
    verdict: Verdict
    failure: _wire_pb2.Failure
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., early_exit: _Optional[_Union[EarlyExit, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., failure: _Optional[_Union[_wire_pb2.Failure, _Mapping]] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Guide(_message.Message):
    __slots__ = ("kind", "source")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    source: str
    def __init__(self, kind: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("text", "images", "sampling", "max_tokens", "vocabulary", "replay", "round", "turns", "raw", "for_motion", "guide", "co_located")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    FOR_MOTION_FIELD_NUMBER: _ClassVar[int]
    GUIDE_FIELD_NUMBER: _ClassVar[int]
    CO_LOCATED_FIELD_NUMBER: _ClassVar[int]
    text: str
    images: _containers.RepeatedScalarFieldContainer[bytes]
    sampling: _wire_pb2.Sampling
    max_tokens: int
    vocabulary: str
    replay: _containers.RepeatedScalarFieldContainer[int]
    round: int
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    raw: bool
    for_motion: bool
    guide: Guide
    co_located: int
    def __init__(self, text: _Optional[str] = ..., images: _Optional[_Iterable[bytes]] = ..., sampling: _Optional[_Union[_wire_pb2.Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., vocabulary: _Optional[str] = ..., replay: _Optional[_Iterable[int]] = ..., round: _Optional[int] = ..., turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ..., raw: _Optional[bool] = ..., for_motion: _Optional[bool] = ..., guide: _Optional[_Union[Guide, _Mapping]] = ..., co_located: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("session_id", "prompt_tokens", "guided")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GUIDED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    prompt_tokens: int
    guided: bool
    def __init__(self, session_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., guided: _Optional[bool] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("round", "start", "tokens", "cached", "probs", "after", "autoregressive_rounds")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    AUTOREGRESSIVE_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    round: int
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    cached: bool
    probs: Distributions
    after: _containers.RepeatedScalarFieldContainer[int]
    autoregressive_rounds: int
    def __init__(self, round: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., cached: _Optional[bool] = ..., probs: _Optional[_Union[Distributions, _Mapping]] = ..., after: _Optional[_Iterable[int]] = ..., autoregressive_rounds: _Optional[int] = ...) -> None: ...

class Distributions(_message.Message):
    __slots__ = ("sizes", "gaps", "probs")
    SIZES_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    gaps: _containers.RepeatedScalarFieldContainer[int]
    probs: bytes
    def __init__(self, sizes: _Optional[_Iterable[int]] = ..., gaps: _Optional[_Iterable[int]] = ..., probs: _Optional[bytes] = ...) -> None: ...

class EarlyExit(_message.Message):
    __slots__ = ("round", "layer", "tokens", "accepted", "finished", "confidence")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    round: int
    layer: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted: int
    finished: bool
    confidence: float
    def __init__(self, round: _Optional[int] = ..., layer: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted: _Optional[int] = ..., finished: _Optional[bool] = ..., confidence: _Optional[float] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("round", "tokens", "accepted", "finished", "compute_s", "queue_s", "draft_s")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    round: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted: int
    finished: bool
    compute_s: float
    queue_s: float
    draft_s: float
    def __init__(self, round: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted: _Optional[int] = ..., finished: _Optional[bool] = ..., compute_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., draft_s: _Optional[float] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_sessions", "max_message_bytes", "max_prompt_chars", "max_images", "max_image_bytes", "max_tokens", "idle_s", "max_streams", "max_connections", "max_image_pixels", "max_image_scans", "max_turns")
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_CHARS_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_STREAMS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_SCANS_FIELD_NUMBER: _ClassVar[int]
    MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
    max_sessions: int
    max_message_bytes: int
    max_prompt_chars: int
    max_images: int
    max_image_bytes: int
    max_tokens: int
    idle_s: float
    max_streams: int
    max_connections: int
    max_image_pixels: int
    max_image_scans: int
    max_turns: int
    def __init__(self, max_sessions: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_prompt_chars: _Optional[int] = ..., max_images: _Optional[int] = ..., max_image_bytes: _Optional[int] = ..., max_tokens: _Optional[int] = ..., idle_s: _Optional[float] = ..., max_streams: _Optional[int] = ..., max_connections: _Optional[int] = ..., max_image_pixels: _Optional[int] = ..., max_image_scans: _Optional[int] = ..., max_turns: _Optional[int] = ...) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("model", "vocabulary", "vocab_size", "exit_layers", "version", "limits", "sessions", "draft")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXIT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    model: str
    vocabulary: str
    vocab_size: int
    exit_layers: _containers.RepeatedScalarFieldContainer[int]
    version: str
    limits: Limits
    sessions: int
    draft: str
    def __init__(self, model: _Optional[str] = ..., vocabulary: _Optional[str] = ..., vocab_size: _Optional[int] = ..., exit_layers: _Optional[_Iterable[int]] = ..., version: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., sessions: _Optional[int] = ..., draft: _Optional[str] = ...) -> None: ...
