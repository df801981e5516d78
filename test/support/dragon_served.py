"""The node of DRAGON in a running graph, clients of it, and a cloud in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dragon_bed import QUESTION, TEXTS, config_of, engine_of, side_with
from rclpy.action import ActionClient
from rclpy.parameter import Parameter
from tiny_models import tiny_folder

from collab_llm.action import Generate
from collab_llm.msg import DragonRetrieval, GeneratedText
from collab_llm.srv import DragonGenerate, DragonIndex
from collab_llm_nodes.errors import Cancelled
from collab_llm_nodes.nodes.dragon_server import DragonServer
from collab_llm_nodes.protocols.dragon.generation import DocumentsDecoder, ModelSide
from collab_llm_nodes.protocols.dragon.service import CloudServiceConfig, DragonService
from collab_llm_nodes.ros.qos import RESULT
from collab_llm_nodes.transport.server import ServerHandle

LONG_S = 120.0
PRIVATE = ("ball", "key")
PUBLIC = ("lamp", "pump")
TOKENS = 12


class _HeldDecoder:
    """A decoder that makes ``passes`` passes; the next one lasts until it is cancelled."""

    def __init__(self, decoder: DocumentsDecoder, passes: int) -> None:
        self._decoder, self._left = decoder, passes
        self._ended = threading.Event()
        self.push, self.rollback, self.close = decoder.push, decoder.rollback, decoder.close
        self.read_on = decoder.read_on

    def next(self) -> tuple[np.ndarray, float]:
        if not self._left:
            self._ended.wait(LONG_S)
            raise Cancelled("ended")
        self._left -= 1
        return self._decoder.next()

    def cancel(self) -> None:
        self._ended.set()
        self._decoder.cancel()


class _HeldSide:
    """A side whose decoders stop after a number of passes."""

    def __init__(self, side: ModelSide, passes: int) -> None:
        self._side, self._passes = side, passes
        self.info, self.pieces = side.info, side.pieces

    def decoder(self, query: str, max_tokens: int) -> _HeldDecoder:
        return _HeldDecoder(self._side.decoder(query, max_tokens), self._passes)


def cloud_with(
    names: Sequence[str] = PUBLIC, passes: int | None = None
) -> ServerHandle[DragonService]:
    """Serve a cloud whose store holds the texts of ``names``; the caller stops it.

    Args:
        passes: it makes so many for each answer and no more; None: as many as are needed.
    """
    side: Any = side_with(
        {name: TEXTS[name] for name in names}, engine_of(), config_of(documents=2)
    )
    side = side if passes is None else _HeldSide(side, passes)
    config = CloudServiceConfig(address="127.0.0.1:0")
    return ServerHandle(DragonService(config, side, "tiny", "1.0"))


def parameters_of(folder: Path, port: int) -> dict[str, Any]:
    """Parameters of the node for a store in ``folder`` and the cloud of ``cloud_with``."""
    return {
        "model.path": str(tiny_folder("llama")),
        "side.store": str(folder),
        "side.retrieval.chunks": 2,
        "side.retrieval.temperature": 0.3,
        "cloud.address": f"127.0.0.1:{port}",
        "patience.patience_s": 60.0,
        "patience.silence_s": 30.0,
        "max_tokens": TOKENS,
        "deadline_s": LONG_S,
    }


class Served:
    """The node, started, and clients of it."""

    def __init__(self, graph: Any, folder: Path, port: int, **more: Any) -> None:
        parameters = parameters_of(folder, port)
        parameters |= {name.replace("__", "."): value for name, value in more.items()}
        overrides = [Parameter(name, value=value) for name, value in parameters.items()]
        self.graph = graph
        self.server = DragonServer(context=graph.context, parameter_overrides=overrides)
        graph.add(self.server)
        graph.do(self.server.start)
        self.user = graph.node("user")
        self.generate = self.user.create_client(DragonGenerate, "dragon_generate")
        self.documents = self.user.create_client(DragonIndex, "dragon_index")
        self.action = ActionClient(self.user, Generate, "dragon/generate")
        self.found = graph.collect(self.user, DragonRetrieval, "dragon/retrieval", RESULT)
        self.texts = graph.collect(self.user, GeneratedText, "generated_text", RESULT)
        self.ready()

    @property
    def _seen(self) -> list[bool]:
        """For each service and action whether the user sees one."""
        services = (self.generate, self.documents)
        return [*(each.service_is_ready() for each in services), self.action.server_is_ready()]

    def ready(self) -> None:
        self.graph.wait_for(lambda: all(self._seen), LONG_S)

    def restart(self) -> None:
        """Stop the node and start it, once nobody would take the old services for the new ones."""
        self.graph.do(self.server.stop)
        self.graph.wait_for(lambda: not any(self._seen), LONG_S)
        self.graph.do(self.server.start)
        self.ready()

    def ask(self, **fields: Any) -> DragonGenerate.Response:
        request = DragonGenerate.Request(**{"prompt": QUESTION, "temperature": 1.0, **fields})
        return self.graph.ask(self.generate.call_async, request, timeout=LONG_S)

    def index(self, operation: int, **fields: Any) -> DragonIndex.Response:
        request = DragonIndex.Request(operation=operation, **fields)
        return self.graph.ask(self.documents.call_async, request, timeout=LONG_S)

    def add(self, *names: str, **fields: Any) -> DragonIndex.Response:
        texts = [TEXTS.get(name, f"Nothing is known about {name}.") for name in names]
        given = {"document_names": list(names), "document_contents": texts, **fields}
        return self.index(DragonIndex.Request.ADD, **given)

    def listed(self) -> list[str]:
        return list(self.index(DragonIndex.Request.LIST).names)

    def send(self, told: list[Any], **fields: Any) -> Any:
        """Send a goal and return its handle; feedback is added to ``told``."""
        goal = Generate.Goal(**{"prompt": QUESTION, "temperature": 1.0, **fields})
        return self.graph.ask(
            self.action.send_goal_async, goal, lambda message: told.append(message.feedback)
        )

    def result(self, handle: Any) -> Any:
        return self.graph.ask(handle.get_result_async, timeout=LONG_S)
