"""The shipped checkpoints load where others load them, without this package."""

import pytest
from transformers import AutoConfig, AutoTokenizer

from collab_llm_nodes.assets import shipped_model
from collab_llm_nodes.models.loading import auto_class

SHIPPED = sorted(
    folder.name for folder in shipped_model("nav-target").parent.iterdir() if folder.is_dir()
)


@pytest.mark.parametrize("name", SHIPPED)
def test_plain_transformers_load_every_tensor_beside_the_configuration(name: str) -> None:
    """Stock servers such as vLLM read all safetensors of the folder, and refuse unknown tensors."""
    folder = shipped_model(name)
    vision = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    model, report = auto_class(vision).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    files = list(folder.glob("*.safetensors"))
    assert [file.name for file in files] == ["model.safetensors"]
    rows = len(model.get_input_embeddings().weight)
    assert len(AutoTokenizer.from_pretrained(folder)) <= rows
