"""Stories of sessions on an engine, whose logits two engines should give alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tiny_models import tiny_prompt
from torch import Tensor

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.models.prompt import encode


def opened(engine: Engine, seed: int = 0, tokens: int = 0) -> Session:
    """Return a session that holds its prompt, and then some tokens, up to ``tokens`` of both."""
    model_type = engine.loaded.model.config.model_type
    prompt = encode(tiny_prompt(model_type, seed), engine.loaded)
    session = engine.open(prompt)
    session.feed([*prompt.ids, *words(tokens - len(prompt.ids), seed)], last=0)
    return session


def words(count: int, seed: int = 0) -> list[int]:
    """Return token ids that are not the prompt's."""
    return [20 + (7 * seed + 13 * i) % 200 for i in range(count)]


def chunked(engine: Engine, folder: Path) -> list[Tensor]:
    """A prompt in three parts, of which a picture may lie in two; then greedy decoding."""
    prompt = encode(tiny_prompt(engine.loaded.model.config.model_type), engine.loaded)
    session = engine.open(prompt)
    found = [session.feed(prompt.ids[begin : begin + 9]) for begin in range(0, len(prompt.ids), 9)]
    for _ in range(6):
        found.append(session.feed([int(found[-1][-1].argmax())]))
    session.length -= 4
    return [*found, session.feed(words(5)), session.feed(words(30))]


def exits(engine: Engine, folder: Path) -> list[Tensor]:
    """Two exit layers, in a pass of one session and in one of two."""
    found: list[Tensor] = []
    first, second = opened(engine), opened(engine, 1, 60)
    found.append(first.feed(words(5), lambda layer, logits: found.append(logits), last=3))
    feeds = [Feed(s, words(4), lambda layer, x: found.append(x)) for s in (first, second)]
    return [*found, *results_of(engine, feeds)]


def trees(engine: Engine, folder: Path) -> list[Tensor]:
    session = opened(engine)
    trunk = session.length
    found = [session.grow(words(5), [trunk - 1, trunk - 1, trunk, trunk + 2, trunk + 1])]
    found.append(session.grow(words(2, 1), [trunk + 3, trunk - 1]))
    kept = session.retain(trunk + 2)
    found.append(session.grow(words(1, 2), [kept[trunk + 3]]))
    return [*found, session.feed(words(3))]


def forks(engine: Engine, folder: Path) -> list[Tensor]:
    """Forks of a long prefix, which is held once, in one pass; and forks of a short one."""
    found: list[Tensor] = []
    for tokens in (200, 0):
        session = opened(engine, tokens=tokens)
        family = [session, session.fork(), session.fork()]
        feeds = [Feed(member, words(i + 1, i)) for i, member in enumerate(family)]
        found += results_of(engine, feeds)
        session.close()
        found += results_of(engine, [Feed(member, words(2)) for member in family[1:]])
    return found


def together(engine: Engine, folder: Path) -> list[Tensor]:
    """Many sessions, of several lengths and numbers of new tokens, a tree and a prompt."""
    sessions = [opened(engine, seed, 20 * seed) for seed in range(7)]
    found: list[Tensor] = []
    for new in (1, 5):
        feeds = [Feed(session, words(new + seed % 3)) for seed, session in enumerate(sessions)]
        found += results_of(engine, feeds)
    prompt = encode(tiny_prompt(engine.loaded.model.config.model_type, 9), engine.loaded)
    trunk = sessions[0].length
    feeds = [Feed(session, words(2)) for session in sessions[1:]]
    feeds += [Feed(sessions[0], words(3), parents=[trunk - 1, trunk - 1, trunk])]
    return [*found, *results_of(engine, [*feeds, Feed(engine.open(prompt), prompt.ids, last=1)])]


def saved(engine: Engine, folder: Path) -> list[Tensor]:
    session = opened(engine, tokens=50)
    session.save(folder / "session")
    return [engine.restore(folder / "session").feed(words(5)), session.feed(words(5))]


def results_of(engine: Engine, feeds: Sequence[Feed]) -> list[Tensor]:
    return logits_of(engine.run(feeds))


def logits_of(results: Sequence[Tensor | Exception]) -> list[Tensor]:
    """Return the results; raise the first that is an exception."""
    found: list[Tensor] = []
    for result in results:
        if isinstance(result, Exception):
            raise result
        found.append(result)
    return found


def compare(found: Sequence[Tensor], expected: Sequence[Tensor], atol: float, rtol: float) -> None:
    """Compare tensors of the device with tensors of the CPU."""
    torch.testing.assert_close([x.cpu() for x in found], expected, atol=atol, rtol=rtol)


STORIES = (chunked, exits, trees, forks, together, saved)
