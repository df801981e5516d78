"""The guide of a request: its configuration, and what it stands for."""

from __future__ import annotations

import json
from dataclasses import dataclass

from collab_llm_nodes.config import ANY, check_ranges, from_mapping, setting
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.guide import KINDS, Guide, refused
from collab_llm_nodes.protocols.base import Request
from collab_llm_nodes.robot.grammar import GrammarConfig, actions_pattern


@dataclass(frozen=True)
class AnswerConfig:
    """Limits on the text of an answer."""

    guide: str = setting(
        "actions",
        "Limit on the text of answers. actions: one order of the action grammar, where the robot is"
        " to move by the answer; json: an object of the schema in guide_source; regex: a text of"
        " that regular expression; choice: one of its lines; none: any text.",
        choices=("actions", *KINDS, "none"),
        per_request=ANY,
    )
    guide_source: str = setting(
        "",
        "Source of the guide. For actions: the settings of navigation_action_parser's grammar that"
        " differ from its defaults, as a JSON object.",
        per_request=ANY,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


def guide_of(request: Request, answer: AnswerConfig) -> Guide | None:
    """Return the guide of ``request``, whose configuration holds ``answer``; None: any text.

    Actions limit answers for motion, and those whose request names this guide itself: other
    questions to the same model are no orders.

    Raises:
        InvalidInput: as :func:`guide_from`.
    """
    order = request.for_motion or "answer.guide" in request.options
    return guide_from(answer, order=order)


def guide_from(answer: AnswerConfig, *, order: bool) -> Guide | None:
    """Return the guide that ``answer`` stands for; None: any text.

    Args:
        order: the answer is to be an order to the robot.

    Raises:
        InvalidInput: the source is missing, too long, or none of the grammar's settings.
    """
    if answer.guide == "actions":
        return Guide("regex", _actions(answer.guide_source)) if order else None
    return None if answer.guide == "none" else Guide(answer.guide, answer.guide_source)


def _actions(settings: str) -> str:
    try:
        grammar = from_mapping(GrammarConfig, json.loads(settings or "{}"))
    except (ValueError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        raise refused(
            f"guide_source holds no settings of the action grammar: {error}",
            'such as {"max_distance": 0.5}, or leave it empty',
        ) from error
    return actions_pattern(grammar)
