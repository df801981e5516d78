"""The choice of a hand-written layer loop for a model and its device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from collab_llm_nodes.engine.backend import LayerLoop, plain_weight
from collab_llm_nodes.engine.cuda import CudaBackend
from collab_llm_nodes.engine.kernels import Head
from collab_llm_nodes.engine.static import StaticBackend
from collab_llm_nodes.models.loading import LoadedModel

log = logging.getLogger(__name__)


def choose_layer_loop(
    loaded: LoadedModel, head: Head, exit_layers: Sequence[int] = (), paged: bool | None = None
) -> LayerLoop:
    """Return the backend for a model that ``StaticBackend.supports``.

    Args:
        exit_layers: as for ``CudaBackend``.
        paged: take ``CudaBackend``, on any device, unless the model's layers have another form;
            None: on CUDA.
    """
    if paged or paged is None and plain_weight(loaded.model).is_cuda:
        try:
            return CudaBackend(loaded, head, exit_layers)
        except NotImplementedError as error:
            log.warning("%s runs without pages: its %s", loaded.config.path, error)
    return StaticBackend(loaded, head)
