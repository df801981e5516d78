"""Wrapped paragraphs are joined; headings, lists, tables, code and records stay apart."""

from __future__ import annotations

import textwrap
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.unwrapping import WRAP, tidy, unwrapped

MANUAL = """\
FLOW CONTROL
       flow_limit litres
           Set the largest flow that the pump is allowed to deliver before the
           controller closes the valve. Defaults to 40.

           The limit is read again when the process gets the signal SIGHUP. It
           has no effect on a pump which delivers already.

       The valve opens in these cases, in which nobody has to confirm what the
       controller does:

       •   the pressure has been below the threshold for more than the thirty
           seconds of the first stage

       •   somebody presses the red button beside the door of the pump chamber
       •   the test of the valve on the first day of each month has been begun

       -v, --verbose   Write each change of the pressure to the journal, with
                       the number of the stage.
       -q              Write errors only.
"""


def joined(text: str) -> list[str]:
    return [tidy(line).strip() for line in unwrapped(text).split("\n") if line.strip()]


def test_paragraphs_items_and_definitions_of_a_manual_become_lines() -> None:
    assert joined(MANUAL) == [
        "FLOW CONTROL",
        "flow_limit litres",
        "Set the largest flow that the pump is allowed to deliver before the controller closes the"
        " valve. Defaults to 40.",
        "The limit is read again when the process gets the signal SIGHUP. It has no effect on a"
        " pump which delivers already.",
        "The valve opens in these cases, in which nobody has to confirm what the controller does:",
        "• the pressure has been below the threshold for more than the thirty seconds of the first"
        " stage",
        "• somebody presses the red button beside the door of the pump chamber",
        "• the test of the valve on the first day of each month has been begun",
        "-v, --verbose Write each change of the pressure to the journal, with the number of the"
        " stage.",
        "-q Write errors only.",
    ]


PROSE = (
    "The controller reads the pressure of the line ten times a second and compares the mean of the"
    " last five values with the threshold of the stage"
)


@given(st.integers(45, 100), st.integers(0, 12), st.integers(2, 6))
def test_what_was_wrapped_is_whole_again(width: int, indent: int, paragraphs: int) -> None:
    text = textwrap.fill(PROSE, width, initial_indent=" " * indent, subsequent_indent=" " * indent)
    assert joined("\n\n".join([text] * paragraphs)) == [PROSE] * paragraphs


def table(rows: list[list[str]]) -> str:
    return "\n".join("   ".join(cell.ljust(30) for cell in row) for row in rows)


def numbers(count: int) -> list[int]:
    return [Random(n).randint(1, 10**6) for n in range(count)]


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"2026-11-03 10:{n:02} INFO pump: pressure {n} mbar at stage {n % 7}, valve shut"
                  for n in range(60)),
        "\n".join(f"Nov  3 10:0{n % 10}:11 robot kernel: [{n}] usb 1-1: new device number {n}"
                  for n in numbers(60)),
        "\n".join(f"robot{n},2026-11-03,{n},{n * 7},{n % 3},the corridor of the second floor"
                  for n in numbers(60)),
        "\n".join(f'{{"time": {n}, "level": "info", "text": "the robot reached waypoint {n % 9}"}}'
                  for n in numbers(60)),
        "\n".join(f"{name} called {n} times about the delivery of the gripper"[: 60 - n % 5]
                  for n, name in zip(numbers(60), ["Ann", "Bob", "Eve"] * 20, strict=True)),
        table([["signal", "default"], *([f"SIG{n}", "x" * 30] for n in range(9))]),
        "def stop(robot):\n    robot.halt()\n    return robot.state\n\ndef go(robot):\n    pass\n",
        "# Wheels\nTighten the wheel nuts\n\n- the front wheels\n- the rear wheels\n",
        "",
        "\n\n\n",
    ],
    ids=["log", "syslog", "csv", "json", "notes", "table", "code", "markdown", "empty", "blank"],
)  # fmt: skip
def test_records_tables_and_code_stay_as_they_are(text: str) -> None:
    assert unwrapped(text) == text


@given(st.text(st.sampled_from(list("ab1 -.\t\r\n\f\n•\N{LINE SEPARATOR}")), max_size=400))
def test_places_stay_where_they_were(text: str) -> None:
    found = unwrapped(text)
    assert len(found) == len(text)
    changed = {(a, b) for a, b in zip(text, found, strict=True) if a != b}
    assert changed <= {("\n", WRAP)}


def test_a_word_that_was_divided_is_whole_again() -> None:
    text = f"{PROSE} authenti\N{HYPHEN}|   cation with a pre-shared-|   key - or|   two"
    whole = f"{PROSE} authentication with a pre-shared-key - or two"
    assert tidy(text.replace("|", WRAP)) == whole


def test_no_chunk_ends_within_a_sentence() -> None:
    document = Document("manual", MANUAL)
    found = [*chunks(document, ChunkPlan(by="sentence", characters=240))]
    assert any("the controller closes the valve. Defaults to 40." in each.text for each in found)
    for each in found:
        assert each.text.split() == MANUAL[each.start : each.end].split()
        assert MANUAL[each.end :][:1] in (" ", "\n")
        assert each.text.endswith((".", ":", "litres", "begun", "stage", "chamber", "CONTROL"))
