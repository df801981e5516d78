"""Frozen dataclasses from mappings: unknown keys and wrong types are errors that name the key."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from collab_llm_nodes.errors import ConfigError, InvalidInput, did_you_mean, quoted

T = TypeVar("T")

MAX_TOKENS = 1 << 16
"""Highest length limit of an answer that can be asked for or configured [tokens]."""


@dataclass(frozen=True)
class Direction:
    """The values that a request may give to an option, seen from the operator's value.

    What leaves the robot is for the operator to decide, so a request can only narrow it.

    Attributes:
        width: order of the values by how much leaves with them; a request never raises it.
        label: the choice of a request, after "a request may"; empty: every value is as wide.
    """

    width: Callable[[Any], float]
    label: str = ""


ANY = Direction(lambda value: 0)
LOWER = Direction(float, "only lower it")
LIMIT = Direction(lambda value: value or math.inf, "only lower it; 0 is no limit")
ON = Direction(lambda value: not value, "only switch it on")
OFF = Direction(bool, "only switch it off")
GIVEN = Direction(lambda value: not value, "not leave it open")


def ranked(*groups: tuple[str, ...]) -> Direction:
    """Return the direction of an option whose values are ``groups``, the widest first."""
    place = {value: -i for i, group in enumerate(groups) for value in group}
    order = ", then ".join(" or ".join(group) for group in groups)
    return Direction(place.__getitem__, f"only go on in this order: {order}")


def setting(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] = (),
    read_only: bool = False,
    per_request: Direction | None = None,
) -> Any:
    """A dataclass field that knows its meaning and its range.

    ``check_ranges`` enforces the range wherever the dataclass is built; a ROS node turns the same
    facts into parameter descriptors (``ros/parameters.py``), so a limit is written once.

    Args:
        doc: one sentence for people, with the unit.
        low, high: inclusive limits of a number.
        choices: the values allowed, all of them.
        read_only: fixed when the node starts, as is all that a request may only narrow: otherwise
            a parameter call, which anybody in the graph may make, would undo the operator's bound.
        per_request: a request may set it for itself, in this direction. Never for a path, an
            address or a secret.
    """
    metadata = {
        "doc": doc,
        "low": low,
        "high": high,
        "choices": choices,
        "read_only": read_only or getattr(per_request, "label", "") != "",
        "per_request": per_request,
    }
    return dataclasses.field(default=default, metadata=metadata)


fixed = functools.partial(setting, read_only=True)
"""A setting that cannot be changed while the node runs."""


def check_ranges(config: Any) -> None:
    """Check every ``setting`` of a dataclass; call it from ``__post_init__``.

    Raises:
        ConfigError: a value is not finite, out of its range, or not among its choices.
    """
    for field in dataclasses.fields(config):
        value, facts = getattr(config, field.name), field.metadata
        if facts.get("choices") and value not in facts["choices"]:
            known = ", ".join(repr(c) for c in facts["choices"])
            raise ConfigError(
                f"{quoted(value)} is unknown", field=field.name, remedy=f"one of {known}"
            )
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{value} is not finite", field=field.name, remedy="give a number")
        low, high = facts.get("low"), facts.get("high")
        if (low is not None and value < low) or (high is not None and value > high):
            limits = f"{'-inf' if low is None else low} to {'inf' if high is None else high}"
            raise ConfigError(f"{quoted(value)} is out of range", field=field.name, remedy=limits)


def check_max_tokens(value: int, most: int = MAX_TOKENS) -> None:
    """Check the length limit of an answer.

    Raises:
        InvalidInput: it is not 1 to ``most``.
    """
    if not 1 <= value <= most:
        raise InvalidInput(f"{value} is out of range", field="max_tokens", remedy=f"1 to {most}")


def from_mapping(cls: type[T], mapping: Mapping[str, Any], *, path: str = "") -> T:
    """Build the frozen dataclass ``cls`` from ``mapping``; nested dataclasses from nested mappings.

    Raises:
        ConfigError: an unknown key, a missing one, or a value of the wrong type; ``field`` holds
            its dotted path. Range checks belong to the dataclass's own ``__post_init__``.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in mapping:
        if key not in fields:
            remedy = did_you_mean(str(key), fields, f"known keys: {', '.join(sorted(fields))}")
            raise ConfigError("unknown key", field=_join(path, key), remedy=remedy)
    values = {k: _convert(hints[k], v, _join(path, k)) for k, v in mapping.items()}
    try:
        return cls(**values)
    except ConfigError as error:  # of a range: it knows its own field only
        where = _join(path, error.field) if error.field else path
        raise ConfigError(error.args[0], field=where, remedy=error.remedy) from None
    except TypeError as error:
        raise ConfigError(str(error), field=path, remedy="give every required key") from error


def from_yaml(cls: type[T], file: str | Path) -> T:
    """Read ``cls`` from a YAML file (safe loader)."""
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())  # YAML's has several lines
        raise ConfigError(f"cannot read {file}: {reason}", field="file") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no mapping", field="file")
    return from_mapping(cls, content)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``below`` with the values of ``above`` in place of its own, branch by branch."""
    both = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], Mapping) and isinstance(above[name], Mapping):
            both[name] = merged(below[name], above[name])
    return both


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else str(key)


def _convert(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise _wrong("a mapping", value, path)
        return from_mapping(typing.cast(type, hint), value, path=path)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        inner = next(a for a in typing.get_args(hint) if a is not type(None))
        return _convert(inner, value, path)
    if origin is tuple:
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise _wrong("a list", value, path)
        element = typing.get_args(hint)[0]
        return tuple(_convert(element, v, f"{path}[{i}]") for i, v in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and (
        not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)
    ):
        raise _wrong(hint.__name__, value, path)
    return value


def _wrong(expected: str, value: Any, path: str) -> ConfigError:
    return ConfigError(f"expected {expected}, got {type(value).__name__} ({value!r})", field=path)


def check_address(field_name: str, address: str) -> None:
    """Check an address: gRPC takes 999999 for port 16959, and 443 where there is none.

    Raises:
        ConfigError: ``field`` is ``field_name``.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(
            f"{address!r} is no address",
            field=field_name,
            remedy="host:port, such as 0.0.0.0:50551",
        )
