"""``collab-llm bench``: the commands of all benchmarks, which stand beside them."""

from __future__ import annotations

import typer

from collab_llm_lab.bench.chat_command import bench_chat
from collab_llm_lab.bench.collective.command import bench_collective
from collab_llm_lab.bench.documents_command import bench_documents
from collab_llm_lab.bench.dragon.command import bench_dragon, bench_dragon_quality
from collab_llm_lab.bench.edge_cloud_command import bench_edge_cloud
from collab_llm_lab.bench.engine_command import bench_engine, bench_engine_host
from collab_llm_lab.bench.gpu.command import bench_gpu
from collab_llm_lab.bench.guided_command import bench_guided
from collab_llm_lab.bench.hostile.command import bench_dragon_hostile, bench_jupiter_hostile
from collab_llm_lab.bench.jupiter.command import bench_jupiter
from collab_llm_lab.bench.link.command import bench_link
from collab_llm_lab.bench.minions.command import bench_minions
from collab_llm_lab.bench.pair.command import bench_pair
from collab_llm_lab.bench.ros_command import bench_ros
from collab_llm_lab.bench.safety.command import bench_safety
from collab_llm_lab.bench.verifier_command import bench_verifier

COMMANDS = (
    bench_link,
    bench_engine,
    bench_engine_host,
    bench_verifier,
    bench_edge_cloud,
    bench_gpu,
    bench_guided,
    bench_collective,
    bench_jupiter,
    bench_dragon,
    bench_dragon_hostile,
    bench_jupiter_hostile,
    bench_dragon_quality,
    bench_chat,
    bench_minions,
    bench_documents,
    bench_pair,
    bench_ros,
    bench_safety,
)

app = typer.Typer(no_args_is_help=True, help="Benchmarks; each can write JSON, most a plot.")
for command in COMMANDS:
    app.command(command.__name__.removeprefix("bench_").replace("_", "-"))(command)
