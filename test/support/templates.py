"""All that a sentence template can say."""

from __future__ import annotations

import random
from collections.abc import Mapping

from collab_llm_lab.phrases import Phrase, Voice


def sentences(template: str, fields: Mapping[str, str] | None = None) -> set[str]:
    """Return what a template of some dozen sentences or fewer says in 200 draws."""
    voice = Voice(random.Random(3))
    return {Phrase(template).say(voice, fields or {}) for _ in range(200)}
