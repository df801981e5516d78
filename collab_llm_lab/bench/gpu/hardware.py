"""The device by itself: bandwidth, products of few rows, launches, kernels of attention."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from collab_llm_lab.bench.gpu.lab import Lab, fewer_layers
from collab_llm_lab.bench.gpu.timing import copy_bytes_per_s, synchronize, timed
from collab_llm_lab.bench.gpu.transformers_peer import full_pass
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError

ROWS = (1, 5, 9, 64, 320)
LENGTHS = tuple(101 + 3 * i for i in range(16))
"""Cached columns before a verification; most of them are no multiple of eight."""
DRAFT = 5
KERNELS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
LAUNCHES = 1000


@torch.inference_mode()
def machine(lab: Lab) -> None:
    """Read off versions, and measure bandwidth, products and the cost of a launch."""
    lab.figure("torch", torch.__version__)
    lab.figure("transformers", transformers.__version__)
    if lab.cuda:
        facts = torch.cuda.get_device_properties(lab.device)
        lab.figure("card", facts.name)
        lab.figure("capability", f"{facts.major}.{facts.minor}")
        lab.figure("multiprocessors", facts.multi_processor_count)
        free, total = torch.cuda.mem_get_info(lab.device)
        lab.figure("memory_gib", {"free": free / 2**30, "total": total / 2**30})
        lab.figure("cuda", torch.version.cuda)
        lab.figure("cudnn", torch.backends.cudnn.version())
    order: list[int] = getattr(torch._C, "_get_sdp_priority_order", list)()
    lab.figure("attention_order", [SDPBackend(number).name for number in order])
    bandwidth = copy_bytes_per_s(lab.device, lab.form.copied_bytes)
    lab.figure("copy_gb_per_s", bandwidth / 1e9)
    lab.figure("products", _products(lab, bandwidth))
    one = torch.zeros(1, device=lab.device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    lab.figure("launch_us", 1e3 * timed(lab.device, launch, 5)["host_ms"] / LAUNCHES)
    wide = torch.randn(8192 if lab.cuda else 256, 8192 if lab.cuda else 256, device=lab.device)
    wide = wide.bfloat16()
    took_ms = timed(lab.device, lambda: wide @ wide, 10)["ms"]
    lab.figure("tflop_per_s", 2 * len(wide) ** 3 / took_ms / 1e9)


def _products(lab: Lab, bandwidth: float) -> dict[str, Any]:
    """Multiply few rows with a bfloat16 weight in both layouts; the result must be right."""
    out, into = lab.form.product
    # Several weights in turn, so that none of them waits in the cache.
    stored = [torch.randn(out, into, device=lab.device).bfloat16() for _ in range(3)]
    turned = [weight.t().contiguous() for weight in stored]
    found: dict[str, Any] = {}
    for rows in ROWS:
        x = torch.randn(rows, into, device=lab.device).bfloat16()
        exact = x.float() @ stored[0].float().t()
        for layout, weights, multiply in (
            ("out_in", stored, lambda x, w: functional.linear(x, w)),
            ("in_out", turned, torch.mm),
        ):

            def in_turn(
                x: Tensor = x,
                weights: list[Tensor] = weights,
                multiply: Callable[[Tensor, Tensor], Tensor] = multiply,
            ) -> None:
                for weight in weights:
                    multiply(x, weight)

            took_ms = timed(lab.device, in_turn, lab.form.repeats)["ms"] / len(weights)
            found[f"{rows} {layout}"] = {
                "us": 1e3 * took_ms,
                "bandwidth_share": stored[0].nbytes / bandwidth / took_ms * 1e3,
            }
            lab.near(f"product {rows} {layout}", distance(multiply(x, weights[0]), exact), 0.01)
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the size of the difference over that of ``expected``, in float64."""
    a, b = found.double(), expected.double()
    return float((a - b).norm() / b.norm())


def worst(errors: Sequence[float]) -> float:
    """Return the largest error; NaN if there is one, or none at all."""
    return max(errors, key=lambda e: math.inf if math.isnan(e) else e, default=math.nan)


def attention(lab: Lab) -> None:
    """Verify drafts after caches of 16 lengths, and try each kernel alone with masks.

    An engine without pages, as OPT has it, runs two layers of the large model in bfloat16, as
    it is by default, and then with cuDNN's attention allowed and forbidden. Only the first must
    work.
    """
    sizes = fewer_layers(lab.form.large, 2)
    loaded, peer = lab.build(sizes, "bfloat16"), lab.build(sizes, "bfloat16")
    exact = lab.build(sizes, "bfloat16")
    exact.model.float()
    prompt = lab.text(max(LENGTHS) + DRAFT)
    engine = Engine(loaded, paged=False)
    usual = _by_length(lab, engine, prompt.ids)
    errors = []
    for length in LENGTHS:
        read = lab.text(0), prompt.ids[: length + DRAFT], DRAFT
        right = full_pass(exact, *read)[0]
        own = usual["logits"].get(length)
        if own is not None:
            errors.append((distance(own, right), distance(full_pass(peer, *read)[0], right)))
    lab.verdict("every length is verified", not usual["raised"], raised=usual["raised"])
    ratios = [own / other for own, other in errors]
    lab.near("error over that of transformers", worst(ratios), 1.5, errors=errors)
    lab.figure("engine as it is", usual["times"])
    for allowed in (True, False):
        with _cudnn(allowed):
            found = _by_length(lab, engine, prompt.ids)
        name = f"engine, cuDNN {'allowed' if allowed else 'forbidden'}"
        lab.figure(name, {**found["times"], "raised": found["raised"]})
    try:
        _kernels(lab)
    except RuntimeError as error:  # such as of an address that a kernel before has got wrong
        lab.figure("kernels ended by", str(error).splitlines()[0][:200])
        lab.spoil()


def _by_length(lab: Lab, engine: Engine, ids: tuple[int, ...]) -> dict[str, Any]:
    """Verify after each length twice: logits, errors, times of first and second calls."""
    logits: dict[int, Tensor] = {}
    raised: dict[int, str] = {}
    times: dict[str, list[float]] = {"first": [], "second": []}
    session = engine.open(lab.text(0))
    for length in LENGTHS:
        try:
            session.length = min(session.length, length)
            session.feed(ids[session.length : length], last=0)
            for turn in times.values():
                session.length = length
                synchronize(lab.device)
                begun = time.perf_counter()
                logits[length] = session.feed(ids[length : length + DRAFT])
                synchronize(lab.device)
                turn.append(1e3 * (time.perf_counter() - begun))
        except (RuntimeError, CollabError) as error:
            raised[length] = str(error).splitlines()[0]
    session.close()
    found = {f"{turn}_ms": sorted(t)[len(t) // 2] if t else None for turn, t in times.items()}
    return {"logits": logits, "raised": raised, "times": found}


@contextlib.contextmanager
def _cudnn(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@torch.inference_mode()
def _kernels(lab: Lab) -> None:
    """Try each kernel with a mask cut out of a wide table, and with one of its own."""
    sizes, heads = lab.form.large, lab.form.large.key_heads
    rows, width = DRAFT * (sizes.heads // heads), sizes.hidden // sizes.heads
    table = torch.zeros(rows, 4096, device=lab.device).bfloat16()
    table.masked_fill_(torch.rand(table.shape, device=lab.device) < 0.1, -math.inf)
    for kernel in KERNELS:
        for cut in (True, False):
            times: dict[str, list[float]] = {"first": [], "second": []}
            raised: dict[str, int] = {}
            errors: list[float] = []
            for length in LENGTHS:
                columns = length + DRAFT
                mask = table[:, 2000 - length : 2000 + DRAFT]
                query, key, value = (
                    torch.randn(1, heads, n, width, device=lab.device).bfloat16()
                    for n in (rows, columns, columns)
                )
                scores = query.double() @ key.double().transpose(2, 3) / math.sqrt(width)
                right = (scores + mask.double()).softmax(-1) @ value.double()
                try:
                    for turn in times.values():
                        begun = time.perf_counter()
                        with sdpa_kernel(kernel):
                            output = functional.scaled_dot_product_attention(
                                query,
                                key,
                                value,
                                attn_mask=(mask if cut else mask.contiguous())[None, None],
                            )
                        synchronize(lab.device)
                        turn.append(1e3 * (time.perf_counter() - begun))
                    errors.append(distance(output, right))
                except RuntimeError as error:
                    message = str(error).splitlines()[0][:120]
                    raised[message] = raised.get(message, 0) + 1
            name = f"{kernel.name}, mask {'cut from a table' if cut else 'of its own'}"
            medians = {f"{k}_ms": sorted(t)[len(t) // 2] for k, t in times.items() if t}
            lab.figure(name, {**medians, "error": worst(errors), "raised": raised})
