"""The forms that limit replies: everything in them can be read."""

from __future__ import annotations

import numpy as np
import pytest

from collab_llm_lab.random_models import random_tokenizer
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.guided_text import Guides
from collab_llm_nodes.models.tokenizer import token_id
from collab_llm_nodes.models.vocabulary import vocabulary_size
from collab_llm_nodes.protocols.minions.chunkers import CHUNKERS
from collab_llm_nodes.protocols.minions.plan import Plan, plan_form, read_plan
from collab_llm_nodes.protocols.minions.prompts import ANSWER_FORM, QUOTES_FORM, STYLES
from collab_llm_nodes.protocols.minions.reading import worker_output

TOKENIZER = random_tokenizer()
EOS = TOKENIZER.eos_token_id
GUIDES = Guides(TOKENIZER, vocabulary_size(TOKENIZER), {EOS}, TOKENIZER.all_special_ids)


def reply(guide: Guide, seed: int, most: int = 2000) -> str:
    """Return a random reply in the form of ``guide``; quotation marks and brackets end it soon."""
    rng, text = np.random.default_rng(seed), GUIDES.open(guide)
    closing = [token_id(TOKENIZER, sign) for sign in '"]}']
    answer: list[int] = []
    while not answer or answer[-1] != EOS:
        assert len(answer) < most
        allowed = np.flatnonzero(text.allowed(answer))
        ends = [token for token in (EOS, *closing) if token in allowed]
        answer.append(int(rng.choice(ends if ends and rng.random() < 0.5 else allowed)))
    return str(TOKENIZER.decode(answer, skip_special_tokens=True))


@pytest.mark.parametrize("seed", range(8))
def test_every_reply_of_a_worker_is_read(seed: int) -> None:
    text = reply(ANSWER_FORM, seed)
    assert worker_output(text, quotes=False, max_characters=1000) is not None
    quotes = reply(QUOTES_FORM, seed)
    assert quotes.strip() == "{}" or worker_output(quotes, quotes=True, max_characters=1000)


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_plan_is_read_but_for_what_no_schema_says(seed: int, reduce: bool) -> None:
    text = reply(plan_form([*CHUNKERS], reduce=reduce), seed)
    plan = read_plan(text, [*CHUNKERS], reduce=reduce)
    # A task of blanks, or a reduction of tasks that are not there, can be written.
    assert isinstance(plan, Plan) or '"reduce"' in text or '"task":" ' in text.replace(": ", ":")


def test_only_a_worker_that_is_trained_for_its_form_is_free() -> None:
    assert [name for name, style in STYLES.items() if style.reply is None] == ["embedded"]
