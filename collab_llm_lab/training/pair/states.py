"""Hidden states of a frozen target at its answers, on disk as far as a budget goes.

The forward pass is the one of transformers, so any model is trained that the engine runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from collab_llm_lab.training.pair.collecting import LIMITS
from collab_llm_lab.training.pair.data import Data, Sample
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.interface import Feed
from collab_llm_nodes.errors import ModelError, translate_errors
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import encode

_NAME = "states"
_HEADER = 256
"""Bytes of a file beside the states, at most."""


class HiddenStates:
    """The states after some layers where the target says the tokens of an answer.

    Args:
        layers: counted in layers done; the last one is that of the model's own logits.
        folder: of the cache; files of earlier runs on the same data and layers are used.
        budget: bytes of the cache; what does not fit is computed whenever it is asked for.

    Attributes:
        held: bytes of the cache.
    """

    def __init__(
        self, target: LoadedModel, data: Data, layers: Sequence[int], folder: Path, budget: int
    ) -> None:
        self._target, self._data, self._layers = target, data, tuple(layers)
        self._engine = Engine(target, eager=True)
        self._folder, self._budget = folder, budget
        self.held = sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    def close(self) -> None:
        """Leave the model as it was found."""
        self._engine.close()

    def of(self, sample: Sample) -> Tensor:
        """Return [layers, n, hidden] at the n tokens of the answer, on the target's device.

        Raises:
            InvalidInput: the prompt cannot be read.
            ModelError: there is no memory for the pass, or a file of the cache is damaged.
        """
        file = self._folder / f"{sample.key}.safetensors"
        if file.exists():
            return self._read(file)
        states = self._compute(sample)
        if self.held + states.nbytes + _HEADER <= self._budget:
            self._folder.mkdir(parents=True, exist_ok=True)
            building = file.with_suffix(".part")
            save_file({_NAME: states.cpu().contiguous()}, building)
            self.held += building.stat().st_size
            os.replace(building, file)
        return states

    def _read(self, file: Path) -> Tensor:
        with translate_errors(
            ModelError, f"{file} is damaged", field="--out", remedy="delete it; it is made again"
        ):
            return load_file(file, str(self._target.device))[_NAME]

    def _compute(self, sample: Sample) -> Tensor:
        prompt = encode(self._data.prompt(sample), self._target, LIMITS)
        ids = [*prompt.ids, *sample.answer[:-1]]
        with (
            closing(self._engine.open(prompt)) as session,
            layer_outputs(self._target.model, self._layers) as outputs,
        ):
            (result,) = self._engine.run([Feed(session, ids, last=0)])
        if isinstance(result, Exception):
            raise result
        rows = [outputs[layer][-len(sample.answer) :] for layer in self._layers]
        return torch.stack(rows)


@contextmanager
def layer_outputs(model: Any, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Yield a dictionary in which the next pass of transformers leaves the outputs of layers.

    Each is [rows, hidden] of the first sequence, by the number of layers done.
    """
    found: dict[int, Tensor] = {}

    def keep(layer: int, module: nn.Module, args: object, output: Any) -> None:
        found[layer] = (output[0] if isinstance(output, tuple) else output)[0]

    own = decoder_parts(model).layers
    hooks = [own[layer - 1].register_forward_hook(partial(keep, layer)) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
