"""Captured passes: launches that are recorded once, and replayed with other numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from collab_llm_nodes.engine.paged_pass import Batch, Layout, PagedPass
from collab_llm_nodes.engine.paging import PagePool

PAGES = 1 << 14
"""Pages that a captured pass reads at most: a million columns."""


class Graph:
    """The layers of a pass with room for some rows, in segments that end at the early exits.

    Args:
        layout: of its integers.
        x: like its hidden states [rows, hidden].

    Attributes:
        x: before the first segment its input, after the last its output.
        states: of each exit, the hidden states [rows, hidden] at the end of its segment.
        segments: launch one each.
    """

    def __init__(self, layout: Layout, x: Tensor, pool: PagePool) -> None:
        self.layout = layout
        self.x = x
        self.states: list[Tensor] = []
        self.segments: list[Callable[[], None]] = []
        self._pool_tensor = pool.tensor
        size = layout.begins[-1] + PAGES
        self._packed = torch.zeros(size, dtype=torch.int32, device=x.device)
        self.batch = Batch.of(self._packed, layout, ())

    def reads(self, pool: PagePool) -> bool:
        """Return True if the pool's pages are those that were captured."""
        return self._pool_tensor is pool.tensor

    def fits(self, made: PagedPass) -> bool:
        """Return True if there is room for a pass."""
        needed = made.smallest
        return (
            needed.rows <= self.layout.rows
            and needed.words <= self.layout.words
            and needed.items <= self.layout.items
            and made.pages <= PAGES
            and not made.spatial
            and not made.reads_prompts
        )

    def load(self, packed: Tensor, embedded: Tensor) -> None:
        """Set the input of the next replay."""
        self._packed[: len(packed)].copy_(packed)
        self.x[: len(embedded)].copy_(embedded)


class Recorder:
    """Records launches in graphs that share their memory, since one of them runs at a time.

    They are captured on a stream of their own. Its priority is that of the calling thread's, since
    kernels in a graph keep it, whichever stream they are replayed on: else a verifier's would not
    come before the pictures' encoder. Products use the workspace of that stream, which no other
    engine's graphs may write to meanwhile.
    """

    _one = threading.Lock()  # torch: one capture at a time in a process

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            self._memory = torch.cuda.graph_pool_handle()
            own = torch.cuda.current_stream(device)
            self._stream = torch.cuda.Stream(device, priority=own.priority)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that launches again all that ``run`` launches; off CUDA ``run``."""
        if self._device.type != "cuda":
            return run
        run()  # compiles kernels, and lets libraries allocate
        graph = torch.cuda.CUDAGraph()
        own = torch.cuda.current_stream(self._device)
        # A failed capture leaves its stream as the thread's own, hence the outer context.
        with (
            self._one,
            torch.cuda.stream(own),
            torch.cuda.graph(
                graph,
                pool=self._memory,
                stream=self._stream,
                capture_error_mode="thread_local",  # other threads may use the device meanwhile
            ),
        ):
            run()
        return graph.replay


class SideStream:
    """A stream beside that of the passes, for what is read from them while they go on."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def mark(self) -> Any:
        """Return a mark of what the calling thread has launched so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        """Let what is launched here from now on wait for a mark."""
        if self._stream is not None:
            mark.wait(self._stream)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Launch on this stream; after that, the calling thread's own waits for it."""
        if self._stream is None:
            yield
            return
        own = torch.cuda.current_stream(self._stream.device)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            own.wait_stream(self._stream)
