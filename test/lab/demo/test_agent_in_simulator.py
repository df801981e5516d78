"""An agent drives the simulated robot and asks its memory, by MCP through the whole graph."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")
pytest.importorskip("mcp", reason="pip install -r requirements/mcp.txt")

from mcp import Client, StdioServerParameters
from mcp_robot import kinds, said
from rclpy.action import ActionClient
from std_msgs.msg import String
from std_srvs.srv import Trigger

from collab_llm.action import Generate, Navigate
from collab_llm_lab.demo.drive import robot_process
from collab_llm_lab.demo.memory import memory_processes
from collab_llm_nodes.processes import START_DEADLINE_S, free_port
from collab_llm_nodes.protocols.edge_cloud.process import verifier_process
from collab_llm_nodes.ros.qos import STATE

pytestmark = [pytest.mark.ros, pytest.mark.exhaustive, pytest.mark.timeout(900)]
SEED, THING = 7, "white bucket"
"""A room, and what is in view there at the start."""


def test_an_agent_looks_drives_with_approval_and_asks_the_memory(ros_graph: Any) -> None:
    person = ros_graph.node("person")
    confirms = person.create_client(Trigger, "confirm_instruction")
    approved = []

    def on_pending(msg: String) -> None:
        if msg.data:
            approved.append(msg.data)
            confirms.call_async(Trigger.Request())

    servers = [ActionClient(person, Navigate, "navigate")]
    servers += [ActionClient(person, Generate, f"{p}/generate") for p in ("edge_cloud", "dragon")]
    person.create_subscription(String, "pending_instruction", on_pending, STATE)
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "collab_llm_nodes.cli", "mcp"], env=dict(os.environ)
    )

    async def drive() -> None:
        async with Client(command) as agent:
            text = f"find the {THING}"
            result = await agent.call_tool("navigate", {"instruction": text})
            assert not result.is_error, said(result)
            assert approved == [text]
            assert result.structured_content["result"]["distance_m"] > 0.3
            seen = await agent.call_tool("look")
            assert kinds(seen) == ["image/jpeg", "text"]
            assert "motion_guard" in said(seen)
            where = {"question": f"Where was the {THING} last seen?"}
            for _ in range(20):  # until the drive is in the robot's documents
                answer = await agent.call_tool("memory", where)
                if not answer.is_error:
                    break
                await asyncio.sleep(0.5)
            assert not answer.is_error, said(answer)
            assert THING in said(answer)

    with contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{free_port()}"
        stack.enter_context(verifier_process(address))
        stack.enter_context(memory_processes(None))
        overrides = {"sim_go2:seed": str(SEED)}
        stack.enter_context(robot_process("graph", [], address, overrides=overrides))
        stack.enter_context(
            robot_process("motion", ["--driver", "sim"], address, overrides=overrides)
        )
        for client in servers:
            ros_graph.wait_for(client.server_is_ready, START_DEADLINE_S)
        asyncio.run(asyncio.wait_for(drive(), 300))
