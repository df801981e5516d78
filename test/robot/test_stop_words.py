"""Instructions that only ask to stop."""

from __future__ import annotations

import timeit
from itertools import product

import numpy as np
import pytest

from collab_llm_lab.home.requests import About, Kind
from collab_llm_lab.home.wording import HELD_OUT, TRAINED
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.robot.stop_words import STOP_WORDS, asks_to_stop, check_stop_words


@pytest.mark.parametrize("word", STOP_WORDS)
def test_every_word_asks_to_stop_however_it_is_written(word: str) -> None:
    for frame in ("{}", " {}!!\n", "please {}", "{} now, robot", "Could you {} right away?"):
        assert asks_to_stop(frame.format(word))
        assert asks_to_stop(frame.format(word).upper())


@pytest.mark.parametrize(
    "instruction",
    [
        "stop stop stop",
        "Stop! Don't move!",
        "don\u2019t move",
        "dont move",
        "stop the robot",
        "STOP_NOW",
        "s\u200btop",
        "\uff53\uff54\uff4f\uff50",
        "arrete-toi",
        "\u00a1Alto!",
        "no, stop it",
        "stop moving forward",
        "do not move forward",
        "stop turning left",
        "stop driving around",
        "stop walking around",
        "stop the mission",
        "cancel mission",
        "cancel the mission",
        "abort mission",
        "stop navigating",
        "stop following",
        "stop what you are doing",
        "I want you to stop",
        "you must stop",
        "it is time to stop",
        "I told you to stop",
        "come to a halt",
        "stop all motors",
        "wait until I say so",
        "don't you move",
        "You must not move!",
        "stop please, thank you very much",
        "STOP NOW OR ELSE",
        "wait a moment",
        "wait 5 seconds",
        "wait for 5s",
        "wait for me",
        "hold your position",
        "stay where you are",
        "be still",
        "do nothing",
        "brake",
        "quit",
        "end",
        "power off",
        "Power off the motors!",
        "power the robot down",
        "turn off",
        "turn it off now",
        "turn off the engine, please",
        "could you turn yourself off?",
        "turn off to the left",  # it may be a way to go, but in doubt it is a stop
        "switch off all motors",
        "switch the motors off",
        "shut down",
        "shut it down",
        "Shut off the power!",
        "motors off",
        "deactivate the wheels",
        "back off",
        "emergency",
        "this is an emergency",
        "\N{OCTAGONAL SIGN}",
        "ne bouge pas",
        "no te muevas",
        "nicht bewegen",
        "do not go to the door",
        "please stop driving to the red ball",
        "Stop! Never turn to the window.",
    ],
)
def test_asks_to_stop(instruction: str) -> None:
    assert asks_to_stop(instruction)


@pytest.mark.parametrize(
    "instruction",
    [
        "find the stop sign",
        "go to the bus stop",
        "stop at the door",
        "stop next to the red box",
        "stop in front of the table",
        "stop when you see the ball",
        "wait at the door",
        "wait until you see the ball",
        "find the emergency exit",
        "go to the end of the hall",
        "find the ball and stop",
        "turn left and stop",
        "go forward, then stop",
        "move 2 m forward",
        "turn off the light",
        "turn the light off",
        "turn off at the door",
        "switch off the lamp",
        "shut down the computer on the desk",
        "shut the door",
        "power on",
        "turn on the motors",
        "find the power switch",
        "go to the off switch",
        "do not shut down",
        "never switch off",
        "the ball is 2 m off",
        "do not stop moving",
        "never stop driving",
        "do not stop",
        "don't stop",
        "never stop",
        "turn right now",
        "paragraph",
        "please",
        "no",
        "",
        "?!",
    ],
)
def test_says_something_else(instruction: str) -> None:
    assert not asks_to_stop(instruction)


@pytest.mark.parametrize(
    "instruction",
    [
        # Other words for it.
        *("full stop", "come to a full stop", "cut the power", "kill the motors", "kill switch"),
        *("hit the brakes", "stop it", "hold it", "never mind", "no further", "disengage"),
        *("don't come closer", "do not enter the kitchen", "no more driving", "no moving"),
        *("停下来", "站住", "стоп!", "alto!", "stoppen Sie bitte"),
        *("woah", "Woaaah!", "no!", "No no no!", "NOOO!", "nein!", "no! go back"),
        *("don't take another step", "do not take any more steps", "not another inch"),
        *("that's far enough", "far enough!", "no movement", "no motion please"),
        *("why don't you stop", "why not stop now", "Robot, why do you not wait?"),
        *("why aren't you stopping", "why won't you halt"),
        *("stillgestanden", "keine Bewegung", "berhenti", "jangan bergerak", "sta stil"),
        *("stå stille", "Σταμάτα!", "зупинись", "หยุด"),
        # Spelt in other ways.
        *("s t o p", "S.T.O.P.", "s-t-o-p", "s  t  o  p !", "sto p", "hal t", "E STOP", "s_t_o_p"),
        *("please s t o p now", "stoooop", "STOPPPP!!!", "sssstttoooppp", "st0p", "5top", "ha1t"),
        *("$top", "h4lt", "sotp", "tsop", "hatl", "STOPSTOPSTOP", "stopnow", "pleasestop", "#stop"),
        *("st\u043ep", "\u0405\u0422\u041e\u0420", "st\u03bfp", "\u24e2\u24e3\u24de\u24df"),
        *("\ua731\u1d1b\u1d0f\u1d18", "s\u0336t\u0336o\u0336p\u0336", "s\u3164t\u3164o\u3164p"),
        *("\U0001d5cc\U0001d5cd\U0001d5c8\U0001d5c9", "\U0001f1f8\U0001f1f9\U0001f1f4\U0001f1f5"),
        *(
            "\N{BLACK SQUARE FOR STOP}\ufe0f",
            "\N{RAISED HAND}\N{EMOJI MODIFIER FITZPATRICK TYPE-3}",
        ),
        # In company.
        *("stop!!! there is a child", "Stop, you are going to hit me", "Wait! Go to the door."),
        *("stop you idiot", "stop hitting the wall", "stop the robot from hitting the wall"),
        *("for god's sake stop", "I beg you stop", "mind the child, stop", "robot.stop()"),
    ],
)
def test_what_resembles_a_stop_is_one(instruction: str) -> None:
    assert asks_to_stop(instruction)


@pytest.mark.parametrize(
    "instruction",
    [
        *("stop sign", "bus stop", "the next stop", "go to the tram stop", "find the stop button"),
        *("stop near the ball", "stop 50 cm from the wall", "stop before the wall", "post office"),
        *("go to the door. stop", "go to the door, stop there", "find the ball, then stop"),
        *("don't stop at the door", "non-stop to the kitchen", "find the emergency exit"),
        *(
            "step forward",
            "the shop",
            "go to the hall",
            "find the hat",
            "the post",
            "find the spot",
        ),
        *("why don't you go to the door", "why not look behind you", "go far enough to see it"),
        *("take another step", "take a step forward", "no", "no, the red one", "no problem"),
        *("find a spot with no movement", "go close enough to read it", "is there no exit sign?"),
        *("cut the grass", "hold the door", "find the stopwatch", "freeze when you see me"),
        *("go back", "turn right", "come here", "cross the road", "start", "wait for anna there"),
    ],
)
def test_what_only_holds_such_a_word_is_followed(instruction: str) -> None:
    assert not asks_to_stop(instruction)


@pytest.mark.parametrize(
    "piece", ["stop ", "s t o p ", "s", "o", "stop please ", "a b ", "s t o x ", "\ufdfa", "no. "]
)
def test_it_takes_time_in_proportion_to_the_text_at_most(piece: str) -> None:
    def seconds(length: int) -> float:
        text = (piece * length)[:length]
        return min(timeit.repeat(lambda: asks_to_stop(text), number=1, repeat=5))

    assert seconds(1_000_000) < 4.0 * seconds(250_000) + 0.05


def test_the_default_ones_are_phrases() -> None:
    check_stop_words(STOP_WORDS)


def test_a_phrase_that_would_never_be_found_is_refused() -> None:
    with pytest.raises(ConfigError, match="too long"):
        check_stop_words(["stop " * 20])


def test_every_wording_of_a_stop_asks_to_stop() -> None:
    frames = {*TRAINED.frames[Kind.STOP], *HELD_OUT["frame"].frames[Kind.STOP]}
    stops = (*TRAINED.stops, *HELD_OUT["frame"].stops)
    for number, (frame, phrase) in enumerate(product(sorted(frames), stops)):
        said = frame.format(stop=phrase) + ("", "?", ".", "!")[number % 4]
        assert asks_to_stop(said), said


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in (Kind.STOP, Kind.DO_NOT)])
def test_no_other_request_of_the_training_asks_to_stop(kind: Kind) -> None:
    rng = np.random.default_rng(1)
    for wordings in (TRAINED, *HELD_OUT.values()):
        for name in ("red ball", "mug", "sofa", "purple stool") * 50:
            noun = str(rng.choice(wordings.nouns)) if kind is Kind.UNKNOWN else name
            subject = About("mug") if kind is Kind.HOW_MANY else About(noun)
            said = wordings.draw(rng, kind, subject)
            assert not asks_to_stop(said), said


def test_other_words_may_be_given() -> None:
    assert asks_to_stop("please halt here", ["halt here"])
    assert not asks_to_stop("stop", ["halt here"])
    assert not asks_to_stop("do not move", ["halt here"])


@pytest.mark.parametrize("words", [(), ("",), ("please",), ("stop", "!?")])
def test_words_that_are_none_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="stop_words"):
        check_stop_words(words)
