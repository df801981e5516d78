"""The prompt of a request, in the form that models read."""

from __future__ import annotations

from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.base import Request


def prompt_of(request: Request) -> Prompt:
    """Return the request's chat, or raw text, with its images."""
    return Prompt(request.prompt, request.images, turns=request.turns[:-1], raw=request.raw)


def name_prompt(error: CollabError) -> None:
    """Rename the field of an error about a prompt's text to that of the request."""
    if error.field == "text":
        error.field = "prompt"
