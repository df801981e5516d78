"""Answers of a random model, collected as a user would collect them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_models import scene, tiny_folder, tiny_model

from collab_llm_lab.training.pair.collecting import CollectConfig, collect
from collab_llm_nodes.models.loading import ModelConfig


def collect_answers(folder: Path, model: str, count: int, **changed: Any) -> Path:
    """Return a data folder in ``folder``; questions are about a picture where ``model`` sees.

    Args:
        changed: settings of ``CollectConfig``.
    """
    (folder / "room.jpg").write_bytes(scene(0))
    images = ["room.jpg"] if tiny_model(model).sees else []
    lines = [json.dumps({"text": f"question {i}", "images": images}) for i in range(count)]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    target, out = ModelConfig(str(tiny_folder(model))), folder / "data"
    collect(CollectConfig(target, (folder / "questions.jsonl",), out, max_tokens=8, **changed))
    return out
