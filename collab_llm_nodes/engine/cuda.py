"""A layer loop for GPUs: pages, a few large kernels, and CUDA graphs.

The rows of all sessions go through each layer together, and the number of launches does not depend
on the number of sessions. A pass of few rows is filled up to one of ``BUCKETS`` and replayed from a
graph, which is cut at the early exits: the device goes on while these are judged. So a row's result
depends on the bucket, and on nothing else in the pass. Long prompts run without a graph.

Nothing here needs a GPU. On other devices the same code runs uncaptured, on the plain torch of
``paged_kernels.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from collab_llm_nodes.engine import paged_kernels
from collab_llm_nodes.engine.backend import AfterLayer, Chunk, Heads, Output, Rows, plain_weight
from collab_llm_nodes.engine.device import OnDevice, Upload, selected
from collab_llm_nodes.engine.graphs import PAGES, Graph, Recorder, SideStream
from collab_llm_nodes.engine.kernels import Head
from collab_llm_nodes.engine.paged_layers import Layer, Norm
from collab_llm_nodes.engine.paged_pass import TILE, Batch, Layout, PagedPass, Span
from collab_llm_nodes.engine.paging import PAGE, PagedCache, PagePool
from collab_llm_nodes.engine.rotations import Rotations, positions_of
from collab_llm_nodes.models.architectures import (
    attention_windows,
    context_length,
    decoder_parts,
    has_plain_attention,
    layer_parts,
)
from collab_llm_nodes.models.devices import shares_host_memory
from collab_llm_nodes.models.loading import LoadedModel

log = logging.getLogger(__name__)

BUCKETS = (8, 16, 64, 128, 320)
"""Rows of the passes that are captured."""
_WORDS = 4
"""Words of tree bits in a captured pass: 128 columns after the common trunk."""
_ITEMS_OF_ROW = 8
"""Items of a captured pass for each of its rows: 2,048 columns in each."""
_ITEMS_BYTES = 64 << 20
"""Most memory for what the items of a captured pass sum up."""
_PROBED = 3
"""Tokens of the pass that checks the graphs."""

Tables = Mapping[str | None, Tensor]


@dataclass(frozen=True)
class Plan:
    """A pass whose arrays wait for their upload.

    Attributes:
        packed: the integers of ``PagedPass``, by ``layout``.
        spatial: M-RoPE's positions [3, rows]; None: one position a row.
        wanted: rows after the last layer whose logits are wanted, filled up; None: all of them.
        graph: that replays the pass; None: it runs launch by launch.
    """

    chunks: Sequence[Chunk]
    spans: Sequence[Span]
    layout: Layout
    packed: OnDevice
    spatial: OnDevice | None
    wanted: OnDevice | None
    graph: Graph | None

    @property
    def rows(self) -> int:
        """Rows of the chunks."""
        return self.spans[-1].rows.stop


class CudaBackend:
    """A ``backend.Backend`` whose sessions share pages and passes.

    Args:
        exit_layers: after which ``after_layer`` is called in a pass from a graph; in others it is
            called after each layer.

    Raises:
        NotImplementedError: naming the part of the model that has a form not followed here.
    """

    batches = True
    session_bytes = 0
    block = PAGE

    def __init__(self, loaded: LoadedModel, head: Head, exit_layers: Sequence[int]) -> None:
        model, parts = loaded.model, decoder_parts(loaded.model)
        if not has_plain_attention(model):
            raise NotImplementedError("attention")
        self._heads = heads = Heads.of(model)
        self._layers = [Layer(layer_parts(layer)) for layer in parts.layers]
        self._like = plain_weight(model)[:0]
        self.device, self.dtype = self._like.device, self._like.dtype
        self._width = parts.hidden_size
        windows = attention_windows(model)
        self._windowed = [window is not None for window in windows]
        self._window = max((window for window in windows if window is not None), default=None)
        self._pool = PagePool(len(self._layers), 2 * heads.key, heads.dim, self._like)
        self._rotations = Rotations(model, self._like, heads.dim)
        self._context = context_length(model.config.get_text_config())
        self._embed_scale = getattr(model.get_input_embeddings(), "embed_scale", None)  # Gemma
        self._head = head
        with selected(self.device):
            self._kernels = paged_kernels.choose(heads, self._width, self._like)
        self._exits = tuple(layer for layer in exit_layers if layer < len(self._layers))
        self._graphs: list[Graph] = []
        self._probe = self.new_cache()  # of the pass that checks the graphs

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the captured passes, beside those that ``footprint.pass_bytes`` counts."""
        rows = BUCKETS[-1] * self._width * self._like.itemsize * (2 + len(self._exits))
        return len(BUCKETS) * (rows + 4 * PAGES) + 2 * _ITEMS_BYTES

    def arrange(self, chunks: Sequence[Chunk]) -> list[int]:
        return list(range(len(chunks)))

    def new_cache(self, expected: int = 0) -> PagedCache:
        return PagedCache(self._pool)

    def filled(self, keys_values: Tensor) -> PagedCache:
        cache = self.new_cache()
        cache.fill(keys_values)
        return cache

    def keep_room(self, room: float) -> float:
        """Make the pool's pages; beyond them no session grows."""
        pages = self._pool.pages + int(room // self._pool.page_bytes)
        if not shares_host_memory(self.device):  # which other processes need as well
            pages = self._pool.grow_up_to(pages)
            self._follow_pages()
        self._pool.limit = pages
        return float((pages - len(self._probe.pages)) * self._pool.page_bytes)

    def close(self) -> None:
        """Forget the graphs: the model is as it was."""
        self._graphs = []

    def plan(self, chunks: Sequence[Chunk], upload: Upload) -> Plan:
        for chunk in chunks:
            chunk.cache.reserve(chunk.start, chunk.end)
        self._follow_pages()
        made = PagedPass(chunks, self._heads, self._window)
        graph = next((graph for graph in self._graphs if graph.fits(made)), None)
        layout = graph.layout if graph is not None else _without_graph(made)
        return Plan(
            chunks,
            made.spans,
            layout,
            upload.add(torch.from_numpy(made.pack(layout))),
            upload.add(positions_of(chunks)) if made.spatial else None,
            _wanted(chunks, upload),
            graph,
        )

    def forward(self, plan: Plan, rows: Rows, after_layer: AfterLayer | None) -> list[Output]:
        with self._pool.lock, selected(self.device):
            graph = plan.graph
            if graph is None or not graph.reads(self._pool) or rows.added:
                x = self._launch(plan, self._enter(rows.embedded), rows.added, after_layer)
                return self.outputs(x, plan.chunks)
            marks = self._replay(plan, graph, self._enter(rows.embedded))
            outputs = self.outputs(_chosen(graph.x, plan.wanted), plan.chunks)
            if after_layer is not None:
                self._judge_exits(plan, graph, marks, after_layer)
            return outputs

    def hidden(
        self, plan: Plan, rows: Rows, after_layer: AfterLayer | None, *, enter: bool = True
    ) -> Tensor:
        """Run a pass without a graph, see ``backend.LayerLoop.hidden``."""
        x = self._enter(rows.embedded) if enter else rows.embedded
        with self._pool.lock, selected(self.device):
            x = self._launch(plan, x, rows.added, after_layer)
        return x[: sum(chunk.keep for chunk in plan.chunks)]

    def _enter(self, embedded: Tensor) -> Tensor:
        scale = self._embed_scale
        return embedded if scale is None else embedded * scale.to(embedded.dtype)

    def _launch(
        self, plan: Plan, embedded: Tensor, added: Sequence[Tensor], after_layer: AfterLayer | None
    ) -> Tensor:
        """Run the layers one by one, and return the states [wanted rows, hidden]."""
        batch = Batch.of(plan.packed(), plan.layout, plan.spans)
        spare = plan.layout.rows - len(embedded)
        x = functional.pad(embedded, (0, 0, 0, spare)) if spare else embedded.clone()
        tables = self._tables
        if plan.spatial is not None:
            positions = functional.pad(plan.spatial(), (0, spare))
            tables = {k: self._rotations.angles(positions, k) for k in self._rotations.kinds}
        last = len(self._layers)
        ends = range(1, last + 1) if after_layer is not None else (*range(1, len(added) + 1), last)
        for first, end in pairwise((0, *dict.fromkeys(ends))):
            chosen = plan.wanted if end == last > len(added) else None
            x = self._through(x, batch, tables, range(first, end), chosen)
            if first < len(added):
                x[: plan.rows] += added[first]
            if after_layer is not None and end < last:
                after_layer(end, x[: plan.rows])
        return x if len(added) < last else _chosen(x, plan.wanted)

    def _replay(self, plan: Plan, graph: Graph, embedded: Tensor) -> list[Any]:
        """Launch all segments; return a mark of the end of each."""
        graph.load(plan.packed(), embedded)
        graph.batch = replace(graph.batch, spans=plan.spans)
        marks = []
        for segment in graph.segments:
            segment()
            marks.append(self._side.mark())
        return marks

    def _judge_exits(
        self, plan: Plan, graph: Graph, marks: Sequence[Any], after_layer: AfterLayer
    ) -> None:
        """Show the exits' states, each as soon as it is there, beside the layers that follow."""
        with self._side.stream():
            for mark, layer, states in zip(marks, self._exits, graph.states, strict=False):
                self._side.wait(mark)
                after_layer(layer, states[: plan.rows])

    def _through(
        self,
        x: Tensor,
        batch: Batch,
        tables: Tables,
        numbers: range,
        wanted: OnDevice | None = None,
    ) -> Tensor:
        """Take x [rows, hidden] through some layers, in place, and return it.

        With ``wanted``, the last one makes keys and values of all rows, and all else of those only:
        they are returned, in another tensor.
        """
        kernels, heads, delta = self._kernels, self._heads, None
        for number in numbers:
            layer, pages = self._layers[number], self._pool.tensor[number]
            table = tables.get(self._rotations.by_layer[number])  # SmolLM3: none in some layers
            qkv = layer.qkv(self._normed(x, delta, layer.attention_norm))
            query = kernels.rotate_and_write(qkv, pages, batch, heads, table, layer.head_norms)
            windowed = self._windowed[number]
            attended = kernels.attend(query, pages, batch, heads, windowed=windowed)
            if number == numbers[-1]:
                x, attended = _chosen(x, wanted), _chosen(attended, wanted)
            delta = layer.out(attended)
            if layer.out_norm is not None:
                delta = self._normed(delta, None, layer.out_norm)
            up = layer.up(self._normed(x, delta, layer.mlp_norm))
            delta = layer.down(kernels.gate(up, layer.activation))
            if layer.down_norm is not None:
                delta = self._normed(delta, None, layer.down_norm)
        return x if delta is None else x.add_(delta)

    def _normed(self, x: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        return self._kernels.add_norm(x, delta, norm.gain, norm.epsilon)

    def outputs(self, x: Tensor, chunks: Sequence[Chunk]) -> list[Output]:
        keeps = [chunk.keep for chunk in chunks]
        states = self._head.norm(x)
        logits = self._head(states)
        begins = [0, *accumulate(keeps)]
        return [Output(logits[a:b], states[a:b]) for a, b in pairwise(begins)]

    @cached_property
    def _tables(self) -> Tables:
        """The rotations [context, 2, head_dim] of each type of layers."""
        kinds = self._rotations.kinds
        return {kind: self._rotations.table(self._context, kind) for kind in kinds}

    @cached_property
    def _side(self) -> SideStream:
        return SideStream(self.device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record passes of few rows in graphs; without them if that does not work here."""
        self._graphs = []
        try:
            with self._pool.lock, selected(self.device):
                self._probe.reserve(0, _PROBED)  # now: pages that are taken may move all others
                recorder = Recorder(self.device)
                self._graphs = [self._captured(rows, recorder) for rows in reversed(BUCKETS)][::-1]
                self._check_graph()
        except Exception as error:  # noqa: BLE001 - libraries refuse a capture in any manner
            self._graphs = []
            log.warning("no CUDA graphs, passes are launched one by one (slower): %s", error)

    def _follow_pages(self) -> None:
        """Capture again after the pool has moved its pages: where none were made in advance."""
        if self._graphs and not self._graphs[0].reads(self._pool):
            self.capture()

    def _captured(self, rows: int, recorder: Recorder) -> Graph:
        """Return the graph of passes of so many rows."""
        item_bytes = 4 * self._heads.key * TILE * self._heads.dim
        items = min(_ITEMS_OF_ROW * rows, max(rows, _ITEMS_BYTES // item_bytes))
        x = self._like.new_zeros(rows, self._width)
        graph = Graph(Layout(rows, _WORDS, items // 4 * 4), x, self._pool)
        for first, end in pairwise((0, *self._exits, len(self._layers))):
            copy = None
            if end < len(self._layers):
                copy = torch.zeros_like(x)
                graph.states.append(copy)
            run = partial(self._segment, graph, first, end, copy)
            graph.segments.append(recorder.record(run))
        return graph

    def _segment(self, graph: Graph, first: int, end: int, copy: Tensor | None) -> None:
        self._through(graph.x, graph.batch, self._tables, range(first, end))
        if copy is not None:
            copy.copy_(graph.x)

    def _check_graph(self) -> None:
        """Run a pass from the smallest graph, and without it.

        Raises:
            ArithmeticError: the logits differ.
        """
        found: list[Tensor] = []
        x = torch.linspace(-0.01, 0.01, _PROBED * self._width).view(_PROBED, -1).to(self._like)
        for graphs in (self._graphs[:1], []):
            all_graphs, self._graphs = self._graphs, graphs
            upload = Upload(self.device)
            plan = self.plan([Chunk(self._probe, 0, _PROBED, 0, None, _PROBED)], upload)
            found.append(self.forward(plan, Rows(x), None)[0].logits)
            self._graphs = all_graphs
        replayed, launched = found
        if not torch.allclose(replayed, launched, atol=0.05 * float(launched.std()), rtol=0.0):
            raise ArithmeticError("a replayed pass gives other logits")


def _without_graph(made: PagedPass) -> Layout:
    """Return the layout of a pass that is not captured, in the same buckets but for prompts."""
    if made.reads_prompts:
        return made.smallest
    return replace(made.smallest, rows=_bucket(made.smallest.rows))


def _chosen(x: Tensor, wanted: OnDevice | None) -> Tensor:
    """Return the wanted rows of x; all of them if it is None."""
    return x if wanted is None else x.index_select(0, wanted())


def _bucket(rows: int) -> int:
    """Return the rows that are computed where ``rows`` are wanted."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), -(-rows // TILE) * TILE)


def _wanted(chunks: Sequence[Chunk], upload: Upload) -> OnDevice | None:
    """Return the numbers of the rows whose logits are wanted, filled up to a bucket."""
    if all(chunk.keep == chunk.new for chunk in chunks):
        return None
    wanted: list[int] = []
    for end, chunk in zip(accumulate(chunk.new for chunk in chunks), chunks, strict=True):
        wanted += range(end - chunk.keep, end)
    return upload.add([*wanted, *[0] * (_bucket(len(wanted)) - len(wanted))] if wanted else [])
