"""Dataclasses to bytes and back, by protobuf messages with the same names.

A service declares its messages once in a ``.proto`` file and once as frozen dataclasses. A
:class:`Codec` derives the rest from both:

- a nested dataclass is a nested message, a tuple or frozenset a repeated field, an ``IntEnum`` its
  number;
- None is an absent field, or an empty repeated one; an absent message is the field's default;
- a fixed64 holds a number modulo 2**64, which is how seeds are used.

Messages of a peer are checked here before anyone else sees them, by the ``checks`` of the service's
:class:`WireRules`.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import IntEnum
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from collab_llm_nodes.decoding.sampling import SparseDistribution
from collab_llm_nodes.errors import (
    BY_CODE,
    CollabError,
    ConfigError,
    InvalidInput,
    ProtocolError,
    Replay,
)

UPDATE = "the two sides differ in version; update both"
"""The remedy for messages that the other side would not send if it had this version."""

M = TypeVar("M")
"""A message, as a dataclass."""

Form = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""Functions that turn a value into what protobuf holds, and back."""


@dataclass(frozen=True)
class Failure:
    """The last message of a stream: the error that ends it.

    An unknown ``code`` becomes that of ``CollabError``: codes turn into statuses, names of metrics
    and decisions.
    """

    code: str
    message: str
    field: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.code not in BY_CODE and self.code != Replay.code:
            object.__setattr__(self, "code", CollabError.code)

    @classmethod
    def of(cls, error: CollabError) -> Failure:
        """Return the message that carries ``error``."""
        return cls(error.code, str(error.args[0]), error.field, error.remedy)

    def error(self) -> CollabError:
        """Return the error that this carries."""
        kind = BY_CODE.get(self.code, CollabError)
        return kind(self.message, field=self.field, remedy=self.remedy)


@dataclass(frozen=True)
class WireRules:
    """The peculiarities of a service's messages.

    Attributes:
        checks: by dataclass, a function that is called with each parsed message before Python
            objects are made of its fields: 16 MB of bytes could become 500. It raises CollabError.
        forms: by type, how its values are written and read where that is not as usual.
        refusal: the error for a value that the dataclass does not allow.
    """

    checks: Mapping[Any, Callable[[Any], None]] = field(default_factory=dict)
    forms: Mapping[Any, Form] = field(default_factory=dict)
    refusal: type[CollabError] = InvalidInput


PLAIN = WireRules()
"""The rules of messages without peculiarities."""


class _Field(NamedTuple):
    """One field of a dataclass, and how it is written and read."""

    name: str
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    default: Any
    nullable: bool
    has_presence: bool
    nested: bool


class MessageCodec(Generic[M]):
    """One dataclass as one protobuf message.

    Args:
        kind: the dataclass.
        made: the generated class, with the same fields.
    """

    def __init__(self, kind: Callable[..., M], made: Any, rules: WireRules = PLAIN) -> None:
        self._kind, self._made, self._rules = kind, made, rules
        self._check = rules.checks.get(kind, lambda parsed: None)
        hints = typing.get_type_hints(kind)
        declared = made.DESCRIPTOR.fields_by_name
        own = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
        assert set(own) == set(declared.keys()), f"{made.DESCRIPTOR.full_name} is not {kind}"
        self._fields = [_field(f, hints[f.name], declared[f.name], rules) for f in own.values()]

    def encode(self, message: M) -> bytes:
        """Serialise ``message``.

        Raises:
            InvalidInput: a value does not fit its field.
        """
        return _serialise(message, self.write)

    def decode(self, data: bytes) -> M:
        """Parse ``data``.

        Raises:
            ProtocolError: not a message of this kind.
            CollabError: a field holds what the rules forbid.
        """
        return self.read(_parse(self._made, data))

    def write(self, message: M) -> Any:
        """Return ``message`` as an object of the generated class."""
        values = ((f, getattr(message, f.name)) for f in self._fields)
        return self._made(
            **{
                f.name: f.write(value)
                for f, value in values
                if value is not None and not (f.has_presence and value == f.default)
            }
        )

    def read(self, parsed: Any) -> M:
        """Return the dataclass for ``parsed``; raises CollabError for what the rules forbid."""
        self._check(parsed)
        values = {f.name: _value(f, parsed) for f in self._fields}
        try:
            return self._kind(**values)
        except ConfigError as error:
            refusal = self._rules.refusal
            raise refusal(str(error.args[0]), field=error.field, remedy=error.remedy) from error


class Codec(Generic[M]):
    """The messages of one direction of a stream.

    Args:
        envelope: generated class whose oneof ``message`` holds one message of each kind.
        kinds: the dataclasses, each named as its message. A :class:`Failure` may be among them.
    """

    def __init__(self, envelope: Any, *kinds: Any, rules: WireRules = PLAIN) -> None:
        self._envelope = envelope
        self._writers: dict[type, tuple[str, Callable[[Any], Any]]] = {}
        self._readers: dict[str | None, Callable[[Any], M]] = {}
        parts = {f.message_type.name: f for f in envelope.DESCRIPTOR.oneofs[0].fields}
        for kind in kinds:
            part = parts.pop(kind.__name__)
            write, read = _message_form(kind, part, rules)
            self._writers[kind] = part.name, write
            self._readers[part.name] = read
        assert not parts, f"{envelope.DESCRIPTOR.full_name} has more kinds: {[*parts]}"

    def encode(self, message: M | CollabError) -> bytes:
        """Serialise ``message``; an error goes as a :class:`Failure`.

        Raises:
            InvalidInput: a value does not fit its field, such as a negative token id or text that
                is not Unicode.
        """
        said = Failure.of(message) if isinstance(message, CollabError) else message
        name, write = self._writers[type(said)]
        return _serialise(said, lambda said: self._envelope(**{name: write(said)}))

    def decode(self, data: bytes) -> M:
        """Parse what the peer sent.

        Raises:
            ProtocolError: not a message of this protocol.
            CollabError: a field holds what the rules forbid.
        """
        parsed = _parse(self._envelope, data)
        name = parsed.WhichOneof("message")
        read = self._readers.get(name)
        if read is None:
            raise ProtocolError("empty or unknown message", field="message", remedy=UPDATE)
        return read(getattr(parsed, name))


def at_most(count: int, limit: int, field: str, unit: str = "") -> None:
    """Check that a count or a number is within its limit.

    Raises:
        InvalidInput: for ``field``.
    """
    if count > limit:
        what = f"{count} {unit}".strip()
        raise InvalidInput(f"{what} are too many", field=field, remedy=f"at most {limit}")


def pack_distribution(q: SparseDistribution) -> tuple[list[int], bytes]:
    """Return the gaps between the ids of ``q``, and its probabilities in half precision.

    Raises:
        ValueError: half precision does not hold the probabilities exactly.
    """
    half = q.probs.astype("<f2")
    if not np.array_equal(half.astype(np.float32), q.probs):
        raise ValueError("probabilities must be exact in half precision; make them by to_wire")
    return np.diff(q.ids, prepend=0).tolist(), half.tobytes()


def unpack_distribution(gaps: Sequence[int], probs: bytes, field: str) -> SparseDistribution:
    """Return the distribution of one gap and two bytes for each entry.

    Raises:
        InvalidInput: the entries are none of a distribution; for ``field`` if an id is too large.
    """
    ids = np.cumsum(np.array(gaps, dtype=np.int64))
    if ids[-1] > np.iinfo(np.int32).max:
        raise InvalidInput(f"token id {ids[-1]} is too large", field=field, remedy=UPDATE)
    values = np.frombuffer(probs, dtype="<f2").astype(np.float32)
    return SparseDistribution(ids.astype(np.int32), values)


def _serialise(message: Any, write: Callable[[Any], Any]) -> bytes:
    try:
        data: bytes = write(message).SerializeToString()
    except (ValueError, TypeError) as error:
        raise InvalidInput(
            f"cannot be sent: {error}",
            field=type(message).__name__,
            remedy="token ids and counts are >= 0, text is Unicode",
        ) from error
    return data


def _parse(made: Any, data: bytes) -> Any:
    try:
        return made.FromString(data)
    except DecodeError as error:
        raise ProtocolError(
            f"{len(data)} bytes that are no {made.DESCRIPTOR.name}", field="message", remedy=UPDATE
        ) from error


def _field(own: Any, hint: Any, declared: FieldDescriptor, rules: WireRules) -> _Field:
    options = [option for option in typing.get_args(hint) if option is not NoneType]
    nullable = NoneType in typing.get_args(hint)
    if nullable:
        (hint,) = options
    write, read = _form(hint, declared, rules)
    default = own.default_factory() if own.default_factory is not MISSING else own.default
    kinds = (hint, *typing.get_args(hint)[:1])
    # The errors of a form name the field themselves.
    nested = hint not in rules.forms and any(is_dataclass(kind) for kind in kinds)
    return _Field(own.name, write, read, default, nullable, declared.has_presence, nested)


def _value(field: _Field, parsed: Any) -> Any:
    if field.has_presence and field.default is not MISSING and not parsed.HasField(field.name):
        return field.default
    try:
        value = field.read(getattr(parsed, field.name))
    except CollabError as error:
        if field.nested:
            error.field = f"{field.name}.{error.field}"
        raise
    return None if field.nullable and not field.has_presence and not value else value


def _form(hint: Any, declared: FieldDescriptor, rules: WireRules) -> Form:
    """Return the form of values of type ``hint`` in the field ``declared``."""
    if hint in rules.forms:
        return rules.forms[hint]
    if is_dataclass(hint):
        return _message_form(hint, declared, rules)
    container = typing.get_origin(hint)
    if container is not None:
        write, read = _form(typing.get_args(hint)[0], declared, rules)
        if write is _same:
            return (sorted if container is frozenset else _same), container
        return (lambda values: list(map(write, values))), lambda values: container(
            map(read, values)
        )
    if issubclass(hint, IntEnum):
        return int, hint
    if declared.type == FieldDescriptor.TYPE_FIXED64:
        return (lambda value: value % 2**64), _same
    return _same, _same


def _message_form(kind: Any, declared: FieldDescriptor, rules: WireRules) -> Form:
    if kind in rules.forms:
        return rules.forms[kind]
    codec: MessageCodec[Any] = MessageCodec(kind, GetMessageClass(declared.message_type), rules)
    return codec.write, codec.read


def _same(value: Any) -> Any:
    return value
