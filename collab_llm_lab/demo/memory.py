"""The robot's memory in the demo: DRAGON's two sides as processes, and a question at the end.

While it drives, the robot writes documents about its sights and actions. The cloud has public ones.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from collab_llm_nodes.assets import config_file
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.processes import Process, free_port, run_process
from collab_llm_nodes.protocols.base import Source
from collab_llm_nodes.protocols.dragon.process import cloud_process
from collab_llm_nodes.sim.rooms import COLOURS, SHAPES

PUBLIC = {
    "things": f"The rooms hold {', '.join(SHAPES)} and furniture.",
    "colours": f"A thing is {', '.join(COLOURS)}.",
    "robot": "The robot turns in place and drives ahead, one step at a time.",
    "places": "A place is told by two numbers, the metres along x and along y.",
}
"""Documents of the cloud."""
_STYLES = {
    Source.ACCEPTED: ("green", "both sides"),
    Source.DEVICE: ("magenta", "the robot"),
    Source.CLOUD: ("blue", "the cloud"),
    Source.RECOVERED: ("red", "neither's draft"),
    Source.UNVERIFIED: ("dim", "the robot alone"),
}


@dataclass(frozen=True)
class Piece:
    """A part of an episode that an answer is based on; ``weight`` is its share."""

    name: str
    text: str
    weight: float


@dataclass(frozen=True)
class Recollection:
    """A question to the robot's memory, and the answer.

    Attributes:
        words: the answer, each token with its source.
        found: pieces of the robot's own documents.
        missing: the reason why there is no answer, such as that no document names the thing.
        verified: False if the robot wrote a part of the answer alone.
    """

    question: str
    text: str
    words: tuple[tuple[str, int], ...]
    found: tuple[Piece, ...]
    verified: bool
    seconds: float
    missing: str = ""


@contextlib.contextmanager
def memory_processes(params: Path | None) -> Iterator[tuple[Process, Process]]:
    """Run the cloud's side and the robot's, in a store that is deleted at the end.

    ``params`` are ROS parameters read after the shipped ones.
    """
    with (
        tempfile.TemporaryDirectory(prefix="collab_llm_memory_") as folder,
        contextlib.ExitStack() as stack,
    ):
        root, address = Path(folder), f"127.0.0.1:{free_port()}"
        with Store(root / "public") as store:
            for name, text in PUBLIC.items():
                document = Document(name, text)
                store.add(document, chunks(document, ChunkPlan(by="sentence", characters=240)))
        settings = yaml.safe_load(config_file("dragon_cloud.yaml").read_text(encoding="utf-8"))
        settings["address"], settings["side"]["store"] = address, str(root / "public")
        file = root / "cloud.yaml"
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        command = [sys.executable, "-m", "collab_llm_nodes.nodes.protocol_server", "dragon"]
        files = [config_file("dragon.yaml"), *([params] if params else [])]
        command += ["--ros-args", *(word for f in files for word in ("--params-file", str(f)))]
        for value in (
            f"side.store:={root / 'private'}",
            f"cloud.address:={address}",
            "memory.fill:=true",
        ):
            command += ["-p", value]
        cloud = stack.enter_context(cloud_process(file))
        yield cloud, stack.enter_context(run_process("dragon_server", command))


def show(recollection: Recollection, console: Console) -> None:
    """Print the question, the answer in the colours of its writers, and the pieces found."""
    answer = Text()
    for word, source in recollection.words:
        answer.append(word, _STYLES.get(Source(source), ("", ""))[0])
    console.print(Text(f"asked its memory: {recollection.question}", "bold"))
    if recollection.missing:
        console.print(Text(f"not in memory: {recollection.missing}"))
        return
    console.print(Text("answer: ") + answer)
    written = {source for _, source in recollection.words}
    legend = (Text(who, style) for source, (style, who) in _STYLES.items() if source in written)
    console.print(Text("written by: ") + Text(", ").join(legend))
    table = Table(title="what the robot remembered")
    table.add_column("share", justify="right")
    table.add_column("document")
    table.add_column("text")
    for piece in recollection.found:
        table.add_row(f"{piece.weight:.0%}", Text(piece.name), Text(piece.text))
    console.print(table)


def figures_of(recollection: Recollection) -> dict[str, Any]:
    """Return the memory's part of the demo's JSON file."""
    counts = {
        source.name.lower(): sum(own == source for _, own in recollection.words)
        for source in _STYLES
    }
    return {
        "question": recollection.question,
        "answer": recollection.text,
        "missing": recollection.missing,
        "tokens_by_source": counts,
        "verified": recollection.verified,
        "seconds": recollection.seconds,
        "found": [asdict(piece) for piece in recollection.found],
    }
