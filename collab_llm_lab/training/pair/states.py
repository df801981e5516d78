"""Hidden states and laws of a frozen target at the tokens of its answers.

The forward pass is the engine's over transformers' own code, so any model is trained that runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from collab_llm_lab.training.pair.collecting import LIMITS
from collab_llm_lab.training.pair.data import Data, Sample
from collab_llm_lab.training.pair.tensor_files import TensorFiles
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.interface import Feed
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import encode

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
        self._files, self._budget = TensorFiles(folder), budget
        self.held = self._files.size

    def close(self) -> None:
        """Leave the model as it was found."""
        self._engine.close()

    def of(self, sample: Sample) -> Tensor:
        """Return [layers, n, hidden] at the n tokens of the answer, on the target's device.

        Raises:
            InvalidInput: the prompt cannot be read.
            ModelError: there is no memory for the pass, or the cache cannot be read or written.
        """
        if sample in self._files:
            return self._files.read(sample, self._target.device)["states"]
        states = self._compute(sample)
        size = states.nbytes + _HEADER
        if self.held + size <= self._budget:
            self._files.write(sample, states=states)
            self.held += size
        return states

    def _compute(self, sample: Sample) -> Tensor:
        with layer_outputs(self._target.model, self._layers) as outputs:
            read_answer(self._engine, self._data, sample)
        return torch.stack([outputs[layer][-len(sample.answer) :] for layer in self._layers])


def read_answer(engine: Engine, data: Data, sample: Sample, last: int = 0) -> Tensor:
    """Run a model over a prompt and the target's answer; return its logits [last, V].

    Args:
        last: logits are wanted where it says so many of the answer's last tokens.

    Raises:
        InvalidInput: the prompt cannot be read.
        ModelError: there is no memory for the pass.
    """
    prompt = encode(data.prompt(sample), engine.loaded, LIMITS)
    ids = (*prompt.ids, *sample.answer[:-1])
    with closing(engine.open(prompt)) as session:
        (result,) = engine.run([Feed(session, ids, last=last)])
    if isinstance(result, Exception):
        raise result
    return result


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
