"""Options of one request: fields of a protocol's configuration, set for this answer only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from collab_llm_nodes.config import Direction, check_ranges
from collab_llm_nodes.errors import ConfigError, InvalidInput, did_you_mean, quoted

C = TypeVar("C")


def names(config: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of all fields marked ``per_request``, nested ones included.

    Raises:
        ConfigError: the type of such a field cannot be read from a request's text, or its
            ``per_request`` is no ``Direction``.
    """
    found = []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            found += names(value, f"{name}.")
        elif (direction := field.metadata.get("per_request")) is not None:
            if not isinstance(direction, Direction):
                raise ConfigError(
                    f"per_request is {direction!r}", field=name, remedy="one of config.Direction"
                )
            if type(value) not in (bool, int, float, str):
                raise ConfigError(
                    f"a request cannot set a {type(value).__name__}",
                    field=name,
                    remedy="per_request is for a bool, int, float or str",
                )
            found.append(name)
    return found


def named_values(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return names and values of options that are written as NAME=VALUE.

    Raises:
        InvalidInput: one has no value.
    """
    pairs = [option.partition("=") for option in options]
    for name, equals, _ in pairs:
        if not equals:
            raise InvalidInput(
                f"{quoted(name)} has no value", field="--set", remedy=f"write {name}=VALUE"
            )
    return [name for name, _, _ in pairs], [value for *_, value in pairs]


def with_options(
    config: C, keys: Sequence[str], values: Sequence[str], *, by_operator: bool = False
) -> C:
    """Return ``config`` with the fields ``keys`` set to ``values``.

    Args:
        config: a frozen dataclass, with the operator's values; nested ones are reached by dotted
            keys ("client.gamma").
        by_operator: the operator sets them, who may also let more leave the robot.

    Raises:
        InvalidInput: a key that is unknown, given twice or not for requests (the remedy names the
            nearest), a value of the wrong type, out of its range or in the wrong direction, or
            lists of unequal length.
    """
    if len(keys) != len(values):
        raise InvalidInput(
            f"{len(keys)} names and {len(values)} values",
            field="option_values",
            remedy="give one value for each name",
        )
    known = names(config)
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        if key not in known:
            may_be = f"one of {', '.join(known)}" if known else "this protocol has no options"
            raise InvalidInput(
                "is no option of this protocol",
                field=quoted(key)[1:-1] if key.strip() else f"option_names[{i}]",
                remedy=did_you_mean(key, known, may_be),
            )
        if key in keys[:i]:
            raise InvalidInput("is given twice", field=key, remedy="give it once")
        try:
            config = _replaced(config, key.split("."), value, by_operator)
        except ConfigError as error:
            raise InvalidInput(str(error.args[0]), field=key, remedy=error.remedy) from error
    return config


def _replaced(config: Any, path: list[str], value: str, by_operator: bool) -> Any:
    name, *rest = path
    old = getattr(config, name)
    new = _replaced(old, rest, value, by_operator) if rest else _converted(value, old)
    changed = dataclasses.replace(config, **{name: new})
    check_ranges(changed)  # whether or not the dataclass does so itself
    if not rest and not by_operator:
        (field,) = (each for each in dataclasses.fields(config) if each.name == name)
        _check_direction(field.metadata["per_request"], old, new)
    return changed


def _check_direction(direction: Direction, old: Any, new: Any) -> None:
    if direction.width(new) > direction.width(old):
        raise ConfigError(
            f"{new!r} would let more leave the robot than {old!r}, which its operator has set",
            remedy=f"a request may {direction.label}",
        )


def _converted(value: str, like: Any) -> Any:
    """Convert ``value`` to the type of ``like``: bool, int, float or str.

    Raises:
        ConfigError: it has another type.
    """
    kind = type(like)
    try:
        if kind is bool:
            return {"true": True, "false": False}[value.strip().lower()]
        return kind(value)
    except (KeyError, ValueError):
        remedy = "true or false" if kind is bool else f"give a value such as {like!r}"
        raise ConfigError(f"{quoted(value)} is no {kind.__name__}", remedy=remedy) from None
