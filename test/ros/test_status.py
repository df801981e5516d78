"""Errors as the message ``Status``, and back."""

from __future__ import annotations

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from collab_llm.msg import Status
from collab_llm_nodes.errors import BY_CODE, CollabError, InvalidInput, Replay, Unavailable
from collab_llm_nodes.ros.convert import error_from, raise_for, status_named, status_of

pytestmark = pytest.mark.ros


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_every_error_comes_back_with_its_words(code: str) -> None:
    error = BY_CODE[code]("is wrong: it is", field="client.gamma", remedy="correct it")
    back = error_from(status_of(error))
    assert type(back) is type(error)
    assert (back.field, str(back)) == (error.field, str(error))


@pytest.mark.parametrize(
    ("field", "called"),
    [
        ("turns[2].content", "turn_contents[2]"),
        ("turns[0].role", "turn_roles[0]"),
        ("turns", "turn_contents"),
        ("prompt", "prompt"),
        ("images[1]", "images[1]"),
        ("max_turns", "max_turns"),
    ],
)
def test_turns_are_named_as_the_interfaces_have_them(field: str, called: str) -> None:
    status = status_of(InvalidInput("is empty", field=field, remedy="say something"))
    assert status.message == f"{called}: is empty (say something)"
    assert error_from(status).field == called


@pytest.mark.parametrize(
    "message", ["RuntimeError: as asked", "no answer: none came", "first/generate: gone", ""]
)
def test_words_before_a_colon_are_not_always_a_field(message: str) -> None:
    error = error_from(Status(code=Status.UNAVAILABLE, message=message))
    assert isinstance(error, Unavailable)
    assert (error.field, str(error)) == ("", message)


def test_unknown_codes_are_internal() -> None:
    assert status_named("NONSENSE", "x").code == Status.INTERNAL
    assert status_of(Replay("let go")).code == Status.INTERNAL
    assert type(error_from(Status(code=200, message="x"))) is CollabError


def test_ok_is_no_error() -> None:
    raise_for(Status())
    with pytest.raises(Unavailable, match="gone"):
        raise_for(status_named("UNAVAILABLE", "gone"))
