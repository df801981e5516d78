"""Search memory: what the robot remembers of its own actions and answers."""

from __future__ import annotations

import random

from collab_llm_nodes.robot.prompt import SEARCH_TEMPLATE, user_text
from collab_llm_nodes.robot.search import Report, SearchMemory, read_report

LEFT, AHEAD = "turn left 45 degree", "move forward 75 cm"


def _nothing(way: str, action: str = LEFT) -> str:
    return f"the red ball is not in view, the way is {way}. the next action is {action}."


def _looked_round(ways: list[str], memory: SearchMemory | None = None) -> SearchMemory:
    memory = memory or SearchMemory()
    for way in ways:
        memory = memory.after(LEFT, _nothing(way))
    return memory


def test_a_look_round_counts_degrees_and_finds_the_open_way() -> None:
    memory = SearchMemory()
    assert memory.text == "place 1, turned 0"
    memory = _looked_round(["short", "short", "very short"])
    assert memory.text == "place 1, turned 135"
    memory = _looked_round(["short", "very short", "open", *["very short"] * 4])
    assert memory.text == "place 1, turned 315, open behind left"
    assert memory.after(LEFT, "?").text == "place 1, turned 315, open left"
    assert memory.after("turn right 45 degree", "?").text == "place 1, turned 315, open behind"


def test_nowhere_is_open_and_what_was_open_can_turn_out_blocked() -> None:
    assert _looked_round(["very short"] * 7).text == "place 1, turned 315, open nowhere"
    memory = _looked_round(["open", *["very short"] * 6])
    assert memory.text.endswith("open ahead left")
    memory = memory.after(LEFT, _nothing("very short"))
    assert memory.text.endswith("open ahead")
    assert memory.after("stop", _nothing("very short")).text.endswith("open nowhere")


def test_a_walk_is_measured_and_a_turn_ends_it_at_a_new_place() -> None:
    memory = _looked_round(["open", *["short"] * 6])
    memory = memory.after(AHEAD, _nothing("open")).after("move forward 50 cm", "")
    assert memory.text == "place 1, walked 125"
    memory = memory.after(LEFT, _nothing("very short"))
    assert memory.text == "place 2, turned 45"


def test_a_step_cut_short_is_blocked_until_the_next_one() -> None:
    memory = SearchMemory().after(AHEAD, _nothing("open"), 0.1)
    assert memory.text == "place 1, turned 0, blocked"
    memory = memory.after(LEFT, _nothing("very short"))
    assert memory.text == "place 1, turned 45"
    memory = _looked_round(["very short"] * 6, memory)
    assert memory.text.endswith("open nowhere")  # not even where it looked open
    walked = SearchMemory().after(AHEAD, "").after(AHEAD, "", 0.4)
    assert walked.text == "place 1, walked 100, blocked"  # by whole paces
    seen = "the red ball is straight ahead and near."
    memory = SearchMemory().after(AHEAD, seen, 0.0)
    assert memory.text == "seen red ball ahead, near, blocked"
    assert memory.after(AHEAD, seen, 0.6).text == "seen red ball ahead, very close"


def test_the_way_back_is_the_last_choice() -> None:
    memory = _looked_round(["open"] + ["short"] * 6)
    for _ in range(4):
        memory = memory.after(AHEAD, _nothing("open"))
    memory = _looked_round(["very short", *["open"] * 7], memory)
    assert memory.text == "place 2, turned 315, open ahead left"  # behind is open as well


def test_a_turn_to_the_other_side_begins_the_look_round_again() -> None:
    memory = _looked_round(["open", "open"])
    assert memory.after("turn right 30 degree", "").text == "place 1, turned 30"
    assert SearchMemory().after("turn right 45 degree", "").text == "place 1, turned 45"


def test_a_thing_that_leaves_the_picture_is_remembered_where_it_is() -> None:
    seen = "the red ball is straight ahead and distant, the way is on the right."
    memory = SearchMemory().after("turn right 30 degree", seen)
    assert memory.text == "seen red ball ahead left, distant"
    hidden = "i cannot see the red ball, it is ahead on the left."
    memory = memory.after(AHEAD, hidden)
    memory = memory.after(AHEAD, hidden)
    assert memory.text == "seen red ball ahead left, some way off"
    memory = memory.after(AHEAD, hidden).after(AHEAD, hidden).after(AHEAD, hidden)
    assert memory.seen is not None
    assert memory.seen.bearing > 90.0


def test_a_remembered_thing_is_forgotten_in_time() -> None:
    memory = SearchMemory().after(AHEAD, "i see the red ball on the left, distant.")
    for _ in range(20):
        assert memory.seen is not None
        memory = memory.after("turn left 30 degree", "the red ball is not in view")
    assert memory.seen is not None
    memory = memory.after("turn left 30 degree", "the red ball is not in view")
    assert memory.text == "place 1, turned 30"


def test_a_remembered_thing_that_is_not_there_is_forgotten() -> None:
    memory = SearchMemory().after("stop", "the red ball is straight ahead and close.")
    assert memory.text == "seen red ball ahead, close"
    assert memory.after("stop", "i cannot see the red ball").text == "place 1, turned 0"


def test_any_text_and_any_actions_are_taken() -> None:
    rng = random.Random(1)
    words = ["the", "red", "way", "is", "on", "left", "far", ",", ".", "not", "close", "ahead"]
    actions = [LEFT, AHEAD, "stop", "", "turn", "move forward cm", "turn left 99999 degree"]
    memory = SearchMemory()
    for _ in range(500):
        memory = memory.after(rng.choice(actions), " ".join(rng.choices(words, k=12)))
        assert 0 < len(memory.text) < 80
    assert len(memory.earlier) <= 16
    assert memory.after("turn left 45 degree", "\ud800\x00" * 5000) is not None


def test_answers_of_other_models_are_read_too() -> None:
    text = "A sofa is near. I see the Red Chair straight ahead, some way off! The next action is"
    assert read_report(text) == Report("red chair", True, "ahead", "some way off")
    assert read_report("") == Report()
    assert read_report("on the left.").name == ""


def test_the_prompt_has_a_place_for_it() -> None:
    text = user_text("Find the mug!", [LEFT], SEARCH_TEMPLATE, search=SearchMemory().text)
    assert text == f"find the mug. history: {LEFT}. search: place 1, turned 0."
    assert user_text("go", [], "{search}") == "none"
