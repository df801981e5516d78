from collab_llm_nodes.transport import wire_pb2 as _wire_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerInfo(_message.Message):
    __slots__ = ("version", "model", "weights", "num_layers", "context", "vocab_size", "width", "most_lanes", "eos", "heads", "vocabulary")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    MOST_LANES_FIELD_NUMBER: _ClassVar[int]
    EOS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    weights: str
    num_layers: int
    context: int
    vocab_size: int
    width: int
    most_lanes: int
    eos: _containers.RepeatedScalarFieldContainer[int]
    heads: int
    vocabulary: str
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., weights: _Optional[str] = ..., num_layers: _Optional[int] = ..., context: _Optional[int] = ..., vocab_size: _Optional[int] = ..., width: _Optional[int] = ..., most_lanes: _Optional[int] = ..., eos: _Optional[_Iterable[int]] = ..., heads: _Optional[int] = ..., vocabulary: _Optional[str] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("load", "connect", "link", "ping")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    PASS_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    load: Load
    connect: Connect
    link: Link
    ping: Ping
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ..., connect: _Optional[_Union[Connect, _Mapping]] = ..., link: _Optional[_Union[Link, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., **kwargs) -> None: ...

class Report(_message.Message):
    __slots__ = ("loaded", "connected", "linked", "taken", "result", "pong", "failure")
    LOADED_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    LINKED_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    loaded: Loaded
    connected: Connected
    linked: Linked
    taken: Taken
    result: Result
    pong: Pong
    failure: _wire_pb2.Failure
    def __init__(self, loaded: _Optional[_Union[Loaded, _Mapping]] = ..., connected: _Optional[_Union[Connected, _Mapping]] = ..., linked: _Optional[_Union[Linked, _Mapping]] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., failure: _Optional[_Union[_wire_pb2.Failure, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("coordinator", "chain", "version", "weights", "first", "last", "lanes", "states")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    coordinator: str
    chain: str
    version: str
    weights: str
    first: int
    last: int
    lanes: int
    states: str
    def __init__(self, coordinator: _Optional[str] = ..., chain: _Optional[str] = ..., version: _Optional[str] = ..., weights: _Optional[str] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., lanes: _Optional[int] = ..., states: _Optional[str] = ...) -> None: ...

class Loaded(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class Connect(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class Connected(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Link(_message.Message):
    __slots__ = ("chain",)
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    chain: str
    def __init__(self, chain: _Optional[str] = ...) -> None: ...

class Linked(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Step(_message.Message):
    __slots__ = ("lane", "start", "ids", "parents", "retain", "fork_of", "want", "rows", "position", "sampling", "guesses", "close", "positions", "features", "allowed")
    LANE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    lane: int
    start: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    retain: int
    fork_of: int
    want: int
    rows: int
    position: int
    sampling: _wire_pb2.Sampling
    guesses: int
    close: bool
    positions: _containers.RepeatedScalarFieldContainer[int]
    features: int
    allowed: bytes
    def __init__(self, lane: _Optional[int] = ..., start: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., retain: _Optional[int] = ..., fork_of: _Optional[int] = ..., want: _Optional[int] = ..., rows: _Optional[int] = ..., position: _Optional[int] = ..., sampling: _Optional[_Union[_wire_pb2.Sampling, _Mapping]] = ..., guesses: _Optional[int] = ..., close: _Optional[bool] = ..., positions: _Optional[_Iterable[int]] = ..., features: _Optional[int] = ..., allowed: _Optional[bytes] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: float
    end: float
    def __init__(self, begin: _Optional[float] = ..., end: _Optional[float] = ...) -> None: ...

class Pass(_message.Message):
    __slots__ = ("number", "steps", "states", "spans")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    number: int
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    states: bytes
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, number: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., states: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Taken(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("path", "next", "guesses", "logits")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    path: _containers.RepeatedScalarFieldContainer[int]
    next: int
    guesses: _containers.RepeatedScalarFieldContainer[int]
    logits: bytes
    def __init__(self, path: _Optional[_Iterable[int]] = ..., next: _Optional[int] = ..., guesses: _Optional[_Iterable[int]] = ..., logits: _Optional[bytes] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("number", "outcomes", "spans")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    number: int
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, number: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pong(_message.Message):
    __slots__ = ("received", "begun", "computed", "busy_s")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    received: int
    begun: int
    computed: int
    busy_s: float
    def __init__(self, received: _Optional[int] = ..., begun: _Optional[int] = ..., computed: _Optional[int] = ..., busy_s: _Optional[float] = ...) -> None: ...
