"""Early-exit adapters (paper 003, Fig. 3): a small residual per exit, then the model's own head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.architectures import DecoderParts
from collab_llm_nodes.models.heads import head_fingerprint
from collab_llm_nodes.models.trained import check_fingerprint, read_trained, write_trained

NAME = "adapters"
"""Name of the files."""


class ExitAdapters(nn.Module):
    """One residual correction per exit layer, identity until trained (last matrix is zero).

    An exit's logits are ``parts.logits(adapters(layer, hidden))``: final norm and LM head are the
    model's own and stay frozen.

    Args:
        hidden_size: width of the model between layers.
        layers: exits, counted in decoder layers done: 1 is after the first one.
        width: of the bottleneck; 0 is a single linear map.
        fingerprint: ``head_fingerprint`` of the model that they were trained with; empty: unknown.
    """

    def __init__(
        self, hidden_size: int, layers: Sequence[int], width: int = 0, fingerprint: str = ""
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.layers = tuple(sorted(layers))
        self.width = width
        self.fingerprint = fingerprint
        self.corrections = nn.ModuleDict(
            {str(layer): _correction(hidden_size, width) for layer in self.layers}
        )

    def forward(self, layer: int, hidden: Tensor) -> Tensor:
        """[..., hidden_size] after ``layer`` -> the same, corrected towards the last layer."""
        corrected: Tensor = hidden + self.corrections[str(layer)](hidden)
        return corrected

    def save(self, folder: str | Path) -> None:
        """Write ``adapters.safetensors`` and ``adapters.json`` to the subfolder of ``folder``."""
        facts = {
            "hidden_size": self.hidden_size,
            "layers": self.layers,
            "width": self.width,
            "fingerprint": self.fingerprint,
        }
        write_trained(folder, NAME, self, facts)

    @classmethod
    def load(
        cls, folder: str | Path, parts: DecoderParts, layers: Sequence[int] = ()
    ) -> ExitAdapters:
        """Read trained adapters for the model that ``parts`` belongs to.

        Args:
            layers: the exits wanted; all trained ones when empty.

        Raises:
            ModelError: files absent or unreadable, made for another model, or an exit not trained.
        """
        trained = read_trained(
            folder,
            NAME,
            lambda facts: cls(
                facts["hidden_size"], facts["layers"], facts["width"], facts.get("fingerprint", "")
            ),
            parts.hidden_size,
            kind="early-exit adapters",
            field="exits",
        )
        if trained.fingerprint:  # older files have none
            check_fingerprint(trained.fingerprint, head_fingerprint(parts), "adapters", "exits")
        check_exit_layers(trained.layers, len(parts.layers))
        missing = sorted(set(layers) - set(trained.layers))
        if missing:
            raise ModelError(
                f"no adapter was trained for layers {missing}",
                field="exit_layers",
                remedy=f"choose among {list(trained.layers)}",
            )
        return trained.restrict(layers) if layers else trained

    def restrict(self, layers: Sequence[int]) -> ExitAdapters:
        """Return the same adapters at fewer exits."""
        fewer = ExitAdapters(self.hidden_size, (), self.width, self.fingerprint)
        fewer.layers = tuple(sorted(layers))
        fewer.corrections = nn.ModuleDict({str(n): self.corrections[str(n)] for n in fewer.layers})
        return fewer


def check_exit_layers(layers: Sequence[int], num_layers: int) -> None:
    """Refuse exits that are no intermediate layers of a model with ``num_layers``.

    Raises:
        ModelError: an exit before the first layer's end or at the last one.
    """
    if any(not 1 <= layer < num_layers for layer in layers):
        raise ModelError(
            f"exits {list(layers)} of a model with {num_layers} layers",
            field="exit_layers",
            remedy=f"choose from 1 to {num_layers - 1}",
        )


def _correction(hidden_size: int, width: int) -> nn.Module:
    last = nn.Linear(width or hidden_size, hidden_size, bias=False)
    nn.init.zeros_(last.weight)
    if not width:
        return last
    return nn.Sequential(nn.Linear(hidden_size, width, bias=False), nn.SiLU(), last)
