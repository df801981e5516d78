"""``collab-llm mcp``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from collab_llm_nodes.cli.options import require, writable
from collab_llm_nodes.cli.output import write_json
from collab_llm_nodes.config import check_address
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.network import listen

app = typer.Typer()


@app.command()
def mcp(
    http: Annotated[
        str, typer.Option(help="Serve HTTP at host:port instead of standard input and output.")
    ] = "",
    token_file: Annotated[
        str, typer.Option(help="With --http: a line NAME TOKEN for each client.")
    ] = "",
    approval: Annotated[
        bool, typer.Option(help="A person confirms each instruction before the robot moves.")
    ] = True,
    motion_s: Annotated[
        float, typer.Option(help="Longest motion by one instruction [s].", min=1.0, max=3600.0)
    ] = 120.0,
    answer_s: Annotated[
        float, typer.Option(help="Longest wait for an answer [s].", min=1.0, max=600.0)
    ] = 60.0,
    namespace: Annotated[str, typer.Option(help="Of the robot's nodes.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write host and port here.", callback=writable)
    ] = None,
) -> None:
    """Offer the robot to agent frameworks: navigate, look, memory, ask, stop (docs/agents.md)."""
    if http:
        check_address("--http", http)
    if bool(http) != bool(token_file):
        raise ConfigError(
            "a server that a network can reach needs tokens, and no other does",
            field="--token-file",
            remedy="give --http and --token-file together",
        )
    # See docs/safety.md: a process killed while it uses shared memory can block the guard.
    os.environ.setdefault("FASTDDS_BUILTIN_TRANSPORTS", "UDPv4")
    require("mcp", "mcp")
    from collab_llm_nodes.agents.graph import AgentGraph
    from collab_llm_nodes.agents.server import mcp_server
    from collab_llm_nodes.agents.settings import AgentConfig

    config = AgentConfig(approval=approval, motion_s=motion_s, answer_s=answer_s)
    if not http:
        with AgentGraph(config, namespace) as robot:
            mcp_server(robot, config).run("stdio")
        return
    from collab_llm_nodes.agents.http import Tokens, http_server

    tokens = Tokens(token_file)
    host, _, port = http.rpartition(":")
    with listen(host, int(port)) as listening, AgentGraph(config, namespace) as robot:
        server = http_server(mcp_server(robot, config), tokens, host.strip("[]"))
        where = {"host": host, "port": listening.getsockname()[1]}
        write_json(json_file, where, report=False)
        server.run([listening])
