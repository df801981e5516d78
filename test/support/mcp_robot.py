"""A robot with the tools of ``collab-llm mcp``, and real MCP clients of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from motion_graph import Robot
from std_msgs.msg import String
from std_srvs.srv import Trigger

from collab_llm.msg import LinkState
from collab_llm_nodes.agents.graph import AgentGraph
from collab_llm_nodes.agents.http import Tokens, http_server
from collab_llm_nodes.agents.server import mcp_server
from collab_llm_nodes.agents.settings import AgentConfig
from collab_llm_nodes.network import listen
from collab_llm_nodes.ros.qos import STATE

TOKENS = {"planner": "0123456789abcdef-planner", "other": "0123456789abcdef-other"}


class AgentsRobot(Robot):
    """A robot whose link is up, and a person beside it who may approve."""

    def __init__(self, graph: Any, script: list[Any], **options: Any) -> None:
        super().__init__(graph, script, **options)
        self.links = self.user.create_publisher(LinkState, "link_state", STATE)
        self.links.publish(LinkState(state=LinkState.UP))
        self.person = graph.node("person")
        self.announced: list[str] = []
        self.approves = False
        self.person.create_subscription(String, "pending_instruction", self._on_pending, STATE)
        self._confirms = self.person.create_client(Trigger, "confirm_instruction")
        self.person.create_timer(0.05, self._approve)

    def _on_pending(self, msg: String) -> None:
        self.announced.append(msg.data)

    def _approve(self) -> None:
        if self.approves and self.announced and self.announced[-1]:
            self._confirms.call_async(Trigger.Request())


@contextlib.asynccontextmanager
async def served(robot: Any, config: AgentConfig, folder: Path) -> AsyncIterator[int]:
    """Serve the tools of ``robot`` over HTTP; yield the port."""
    file = folder / "tokens"
    file.write_text("".join(f"{name} {token}\n" for name, token in TOKENS.items()))
    server = http_server(mcp_server(robot, config), Tokens(str(file)), "127.0.0.1")
    with listen("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


@contextlib.asynccontextmanager
async def client(port: int, name: str = "planner", **options: Any) -> AsyncIterator[Client]:
    """Yield a connected client with the token of ``name``."""
    headers = {"authorization": f"Bearer {TOKENS[name]}"}
    async with httpx2.AsyncClient(headers=headers, timeout=60.0) as http:
        transport = streamable_http_client(f"http://127.0.0.1:{port}/mcp", http_client=http)
        async with Client(transport, **options) as connected:
            yield connected


def said(result: Any) -> str:
    """Return the text of a tool's result."""
    return "\n".join(part.text for part in result.content if part.type == "text")


def kinds(result: Any) -> list[str]:
    """Return the MIME types of the parts of a tool's result that have one, else their kinds."""
    return [getattr(part, "mime_type", part.type) for part in result.content]


def with_agents(
    work: Callable[[int], Awaitable[None]], folder: Path, limit_s: float = 60.0, **limits: Any
) -> None:
    """Run ``work(port)`` beside a server of the robot in this ROS domain."""
    config = AgentConfig(**limits)

    async def serve(robot: AgentGraph) -> None:
        async with served(robot, config, folder) as port:
            await asyncio.wait_for(work(port), limit_s)

    with AgentGraph(config) as robot:
        asyncio.run(serve(robot))
