"""``collab-llm knowledge``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collab_llm_nodes.cli.options import JsonOption
from collab_llm_nodes.cli.output import console, write_json
from collab_llm_nodes.errors import InvalidInput

if TYPE_CHECKING:
    from collab_llm_nodes.knowledge.encoders import Encoder
    from collab_llm_nodes.knowledge.store import Store

app = typer.Typer(help="Keep documents in a store, and find what they say.", no_args_is_help=True)

StoreArgument = Annotated[Path, typer.Argument(help="Folder of the store.", file_okay=False)]
EncoderOption = Annotated[
    str, typer.Option(help="Folder of an encoder model, or `words` for hashes of words.")
]


@app.command()
def add(
    store: StoreArgument,
    files: Annotated[
        list[Path], typer.Argument(help="PDF, Markdown or text.", exists=True, dir_okay=False)
    ],
    by: Annotated[
        str, typer.Option(help="window, page, section, paragraph, sentence or code.")
    ] = "window",
    characters: Annotated[int, typer.Option(help="Of a chunk at most.")] = 1000,
    overlap: Annotated[int, typer.Option(help="Characters that two windows share.")] = 0,
    pages: Annotated[int, typer.Option(help="Of a chunk, by page.")] = 1,
    encoder: EncoderOption = "",
    json_file: JsonOption = None,
) -> None:
    """Add files, cut into chunks; one that is there already is replaced. Makes the store.

    A file that is refused is named, and the others are added.
    """
    from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
    from collab_llm_nodes.knowledge.documents import DocumentLimits
    from collab_llm_nodes.knowledge.files import Folders, read_document
    from collab_llm_nodes.knowledge.store import Store

    plan = ChunkPlan(by=by, characters=characters, overlap=overlap, pages=pages)
    model = _encoder(encoder)
    refused: list[InvalidInput] = []
    with Store(store) as opened:
        for file in files:
            try:
                folders = Folders([file.resolve().parent])
                document = read_document(file.resolve(), folders, DocumentLimits(), str(file))
                opened.add(document, chunks(document, plan))
            except InvalidInput as error:
                refused.append(error)
                console.print(f"refused: {error}", highlight=False)
            else:
                console.print(f"added {document.name}", highlight=False)
        if model is not None:
            _embed(opened, model)
        listed = [asdict(entry) for entry in opened.documents()]
        write_json(json_file, {"version": opened.version, "documents": listed})
    if refused:
        raise refused[0]


@app.command("list")
def show(store: StoreArgument, json_file: JsonOption = None) -> None:
    """List the documents of a store."""
    from rich.table import Table

    from collab_llm_nodes.knowledge.store import Store

    with Store(store, create=False) as opened:
        found, version, encoder = opened.documents(), opened.version, opened.encoder
    table = Table("document", "characters", "chunks")
    for entry in found:
        table.add_row(entry.name, str(entry.characters), str(entry.chunks))
    console.print(table)
    write_json(
        json_file,
        {"version": version, "encoder": encoder, "documents": [asdict(entry) for entry in found]},
    )


@app.command()
def search(
    store: StoreArgument,
    question: Annotated[str, typer.Argument(help="What to look for.")],
    count: Annotated[int, typer.Option("--chunks", help="Chunks to find.")] = 5,
    method: Annotated[str, typer.Option(help="bm25, dense or rescored.")] = "bm25",
    encoder: EncoderOption = "",
    json_file: JsonOption = None,
) -> None:
    """Find the chunks that fit a question best."""
    from collab_llm_nodes.knowledge.retrieval import RetrievalConfig, retrieve
    from collab_llm_nodes.knowledge.store import Store

    config = RetrievalConfig(method=method, chunks=count)
    with Store(store, create=False) as opened:
        found = retrieve(opened, question, config, _encoder(encoder))
    results: list[dict[str, Any]] = []
    for hit, weight in zip(found.hits, found.weights.tolist(), strict=True):
        place = f", page {hit.chunk.page}" if hit.chunk.page else ""
        section = f", {hit.chunk.section}" if hit.chunk.section else ""
        console.print(f"{hit.score:.3f}  {hit.name}{place}{section}", style="bold")
        console.print(hit.chunk.text, highlight=False)
        chunk = {key: value for key, value in asdict(hit.chunk).items() if key != "document"}
        results.append({"document": hit.name, "score": hit.score, "weight": weight, **chunk})
    write_json(json_file, {"scorer": found.scorer, "chunks": results})


@app.command()
def remove(
    store: StoreArgument,
    names: Annotated[list[str], typer.Argument(help="As `list` shows them.")],
    json_file: JsonOption = None,
) -> None:
    """Remove documents with everything that was derived from them."""
    from collab_llm_nodes.knowledge.store import Store

    with Store(store, create=False) as opened:
        try:
            for name in names:
                version = opened.remove(name)
        finally:  # no words of those before an unknown name stay on the disk
            opened.compact()
    write_json(json_file, {"version": version})


@app.command()
def embed(
    store: StoreArgument,
    encoder: EncoderOption = "words",
    json_file: JsonOption = None,
) -> None:
    """Replace the vectors of a store by those of another encoder."""
    from collab_llm_nodes.knowledge.store import Store

    model = _encoder(encoder or "words")
    assert model is not None
    with Store(store, create=False) as opened:
        model.encode(["words"])  # an encoder that fails must not cost the old vectors
        opened.forget_vectors()
        _embed(opened, model)
        write_json(json_file, {"version": opened.version, "encoder": opened.encoder})


def _embed(store: Store, encoder: Encoder) -> None:
    while left := store.embed(encoder):
        console.print(f"{left} chunks to embed", highlight=False)


def _encoder(name: str) -> Encoder | None:
    """Return the encoder that ``--encoder`` names."""
    if not name:
        return None
    if name == "words":
        from collab_llm_nodes.knowledge.encoders import WordHashes

        return WordHashes()
    from collab_llm_nodes.knowledge.text_encoder import TextEncoder, TextEncoderConfig

    return TextEncoder(TextEncoderConfig(path=name))
