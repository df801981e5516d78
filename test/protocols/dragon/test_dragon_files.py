"""The shipped configurations: both sides of a pair agree on everything that must be equal."""

from __future__ import annotations

import pytest

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.knowledge.evidence import load_calibration
from collab_llm_nodes.protocols.dragon.settings import DragonConfig, load_cloud_config
from collab_llm_nodes.protocols.parameter_files import server_parameters


@pytest.mark.parametrize(
    ("device_file", "cloud_file", "with_encoder"),
    [
        ("dragon.yaml", "dragon_cloud.yaml", False),
        ("dragon_instruct.yaml", "dragon_cloud_instruct.yaml", True),
    ],
)
def test_both_sides_of_a_pair_agree(device_file: str, cloud_file: str, with_encoder: bool) -> None:
    given = server_parameters(device_file, "dragon_server", ("memory",))
    device, cloud = from_mapping(DragonConfig, given), load_cloud_config(cloud_file)
    for field in ("encoder", "evidence", "relevance", "answers", "reranker"):
        assert getattr(device.side, field) == getattr(cloud.side, field), field
    for field in ("method", "temperature", "chunks"):
        assert getattr(device.side.retrieval, field) == getattr(cloud.side.retrieval, field), field
    assert device.model.path == cloud.model.path
    assert device.side.store != cloud.side.store
    assert bool(device.side.encoder.path) == with_encoder
    calibration = load_calibration(device.side.evidence.calibration)
    assert bool(calibration.similarity) == with_encoder
