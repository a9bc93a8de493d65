"""What the benchmark compares: a table per topic, with its sides, its columns and what its numbers should be.

Each topic is a function of (quick, ranks); quick ones are small and take seconds.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import files
from bench.picture import draw_memory
from bench.race import Measured, MiB, Side
from bench.work import (
    allowed_pairs,
    make_layout,
    serial_attention,
    serial_block,
    serial_module,
    serial_product,
    sharded_attention,
    sharded_block,
    sharded_loss,
    sharded_module,
    sharded_product,
    torch_block,
)
from tpattn import AttentionGrid, SequenceLayout, masks


@dataclass(frozen=True)
class Topic:
    """One table.

    title       with the sizes
    meaning     what its numbers say, and what they should be
    heads       of the columns
    races       sides that run in turn with each other
    rows        makes lines of the table from one race
    once        True: one call of each side, no turns
    draw        makes a picture of all sides: (title, sides, file)
    """

    title: str
    meaning: str
    heads: tuple[str, ...]
    races: list[list[Side]]
    rows: Callable[[list[Measured]], list[list[str]]]
    once: bool = False
    draw: Callable[[str, list[Measured], Path], None] | None = None


SERIAL_AND_SHARDED = (
    *("ratio", "quartiles", "processor", "serial ms", "sharded ms"),
    *("peak serial MiB", "peak rank MiB", "received MiB"),
)
COSTS_NOTHING = "Ratio is serial / sharded time: 1.00 = sharding costs nothing."


def serial_and_sharded(label: tuple[str, ...], serial: Measured, sharded: Measured) -> list[str]:
    """A row with the columns SERIAL_AND_SHARDED."""
    processor = statistics.median(serial.processor) / statistics.median(sharded.processor)
    numbers = [*ratio(serial, sharded), f"{processor:.2f}", f"{serial.ms:.0f}", f"{sharded.ms:.0f}"]
    return [*label, *numbers, f"{serial.peak:.0f}", f"{sharded.peak:.0f}", f"{sharded.received:.2f}"]


def ratio(above: Measured, below: Measured, factor: float = 1) -> list[str]:
    """Median time over median time, and the quartiles of that ratio within a turn; all times `factor`."""
    value = above.ms / below.ms * factor
    each = [a / b * factor for a, b in zip(above.seconds, below.seconds, strict=True)]
    low, _, high = statistics.quantiles(each, n=4, method="inclusive")
    return [f"**{value:.2f}**", f"{low:.2f} to {high:.2f}"]


def against_first(measured: list[Measured]) -> list[list[str]]:
    """The first side is serial, the others are sharded: a row for each of them."""
    return [serial_and_sharded(sharded.side.label, measured[0], sharded) for sharded in measured[1:]]


def products(quick: bool, ranks: int) -> Topic:
    """The seed's nt, all and tn."""
    T, D = (1024, 96) if quick else (8192, 768)
    races = []
    for backward in (False, True):
        for kind, offsets in (("nt", (T, 256, 32)), ("all", (T, 256, 32)), ("tn", (T,))):
            sizes, tiny = {"kind": kind, "T": T, "D": D, "backward": backward}, {"T": 64, "D": 8}
            sides = [Side((), serial_product, sizes, tiny, sharded=False)]
            for offset in offsets:
                label = kind, "one message" if offset == T else str(offset), "forward + backward" if backward else "forward"
                sides.append(Side(label, sharded_product, {**sizes, "offset": offset}, tiny))
            races.append(sides)
    heads = "product", "offset", "pass", *SERIAL_AND_SHARDED
    return Topic(f"Products, T={T}, D={D}", COSTS_NOTHING, heads, races, against_first)


def attention(quick: bool, ranks: int) -> Topic:
    """sequence_attention against scaled_dot_product_attention."""
    H, D, lengths, low_T = (2, 16, (256,), 256) if quick else (8, 64, (1024, 2048, 4096, 8192), 4096)
    races = []
    for T, dtype in [*((T, torch.float32) for T in lengths), (low_T, torch.bfloat16)]:
        for causal in (False, True):
            sizes = {"T": T, "H": H, "D": D, "dtype": dtype}
            sides = [Side((), serial_attention, {**sizes, "causal": causal}, {"T": 64}, sharded=False)]
            mask = masks.causal() if causal else masks.full()
            for scheme in ("ring", "ulysses", "rotate"):
                label = str(T), "causal" if causal else "full", str(dtype).removeprefix("torch."), scheme
                layout = "zigzag" if causal and scheme != "ulysses" else "contiguous"
                more = {"scheme": scheme, "mask": mask, "layout": layout}
                sides.append(Side(label, sharded_attention, {**sizes, **more}, {"T": 64}))
            races.append(sides)
    heads = "T", "mask", "dtype", "scheme", *SERIAL_AND_SHARDED
    meaning = f"{COSTS_NOTHING} Serial is torch's attention in the same dtype; causal rings have zigzag shares."
    return Topic(f"Attention, B=1 H={H} D={D}, forward + backward", meaning, heads, races, against_first)


def window(quick: bool, ranks: int) -> Topic:
    """The cost of a pair inside a causal window, which the length should not change."""
    H, D, width, lengths = (2, 16, 128, (512, 1024)) if quick else (8, 64, 1024, (4096, 8192, 16384, 32768))
    mask, base = masks.window(width - 1, 0), lengths[0]
    sides = [full_kernel(base, H, D, ranks)]
    for T in lengths:
        busiest = max(allowed_pairs(mask, SequenceLayout.contiguous(T, ranks)))
        sizes = {"T": T, "H": H, "D": D, "scheme": "ring", "mask": mask}
        sides.append(Side((str(T),), sharded_attention, sizes, {"T": 64}, pairs=busiest * H))

    def rows(measured: list[Measured]) -> list[list[str]]:
        full, first = measured[:2]
        lines = []
        for m in measured[1:]:
            over_full = ratio(m, full, full.side.pairs / m.side.pairs)
            numbers = [f"{m.ns:.2f}", f"{full.ns:.2f}", f"**{m.ns / first.ns:.2f}**", *over_full]
            lines.append([*m.side.label, f"{m.ms:.0f}", *numbers, f"{m.peak:.0f}", f"{m.received:.2f}"])
        return lines

    meaning = (
        f"Time of a pair, those of the rank with most of them (the first {width} rows have few): over T={base} it should be at "
        f"most 1.10, since a window is linear; over torch's full attention without a mask at T={base} at most 1.40."
    )
    compared = f"over T={base}", "over full kernel", "quartiles"
    heads = "T", "ms", "ns per pair", "full kernel ns", *compared, "peak rank MiB", "received MiB"
    title = f"Window of {width}, causal, contiguous shares, ring, B=1 H={H} D={D}, forward + backward"
    return Topic(title, meaning, heads, [sides], rows)


def full_kernel(T: int, H: int, D: int, ranks: int) -> Side:
    """Torch's attention without a mask: what one pair costs at best."""
    return Side((), serial_attention, {"T": T, "H": H, "D": D}, {"T": 64}, sharded=False, pairs=T * T * H / ranks)


def documents(quick: bool, ranks: int) -> Topic:
    """Packed documents of many lengths: the work is the pairs inside them, and 128 pairs a token for their edges."""
    H, D, T, kernel_T = (2, 16, 512, 512) if quick else (8, 64, 8192, 4096)
    races = []
    for longest in (32, T) if quick else (200, 1000, 8192):
        lengths = document_lengths(T, longest)
        for causal in (False, True):
            mask = masks.documents(lengths) & masks.causal() if causal else masks.documents(lengths)
            sides = [full_kernel(kernel_T, H, D, ranks)]
            for kind in ("contiguous", "balanced"):
                layout = make_layout(kind, mask, T, ranks)
                grid = AttentionGrid.choose(layout, mask, H, H, D).grid
                pairs = sum(allowed_pairs(mask, layout))
                label = str(longest), str(len(lengths)), "causal" if causal else "full", kind, _leg(grid), f"{pairs / 1e6:.2f}"
                sizes = {"T": T, "H": H, "D": D, "scheme": "auto", "mask": mask, "layout": kind}
                tiny = {"T": 64, "mask": masks.documents([40, 24])}
                sides.append(Side(label, sharded_attention, sizes, tiny, pairs=(pairs + 128 * T) * H / ranks))
            races.append(sides)

    def rows(measured: list[Measured]) -> list[list[str]]:
        full, *others = measured
        lines = []
        for m in others:
            numbers = [f"{m.ms:.0f}", f"{m.first_ms:.0f}", *ratio(m, full, full.side.pairs / m.side.pairs)]
            lines.append([*m.side.label, *numbers, f"{m.peak:.0f}", f"{m.received:.2f}"])
        return lines

    meaning = (
        f"Over full kernel is time / ((allowed pairs + 128 T) x the time of a pair in torch's full attention at T={kernel_T}): "
        "it should be at most 1.40. Lengths are log-uniform from 1 to the longest; the grid is the one that auto takes; the "
        "first call also plans."
    )
    about = "longest", "documents", "mask", "layout", "grid", "10^6 pairs"
    heads = *about, "ms", "first ms", "over full kernel", "quartiles", "peak rank MiB", "received MiB"
    return Topic(f"Documents, T={T}, B=1 H={H} D={D}, forward + backward", meaning, heads, races, rows)


def document_lengths(T: int, longest: int) -> list[int]:
    """Log-uniform in 1 to `longest`, the same at each call, T in sum; the last one is cut."""
    draw = random.Random(0)
    lengths: list[int] = []
    while (left := T - sum(lengths)) > 0:
        lengths.append(min(left, round(math.exp(draw.uniform(0, math.log(longest))))))
    return lengths


def _leg(grid: AttentionGrid) -> str:
    sizes = {"ulysses": grid.ulysses, "ring": grid.ring, "merge": grid.merge}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def seed(quick: bool, ranks: int) -> Topic:
    """The seed's attention module."""
    T, M, H = (256, 64, 2) if quick else (4096, 768, 2)
    sizes, tiny = {"T": T, "M": M, "H": H}, {"T": 64}
    sides = [
        Side(("the module, distributed=False",), serial_module, {**sizes, "by_torch": False}, tiny, sharded=False),
        Side(("torch's attention, same projections",), serial_module, {**sizes, "by_torch": True}, tiny, sharded=False),
        Side((), sharded_module, sizes, tiny),
    ]

    def rows(measured: list[Measured]) -> list[list[str]]:
        *serial, sharded = measured
        return [serial_and_sharded(one.side.label, one, sharded) for one in serial]

    meaning = f"{COSTS_NOTHING} It should be at least 0.90. Parameter gradients are made, not yet summed over the ranks."
    heads = "against", *SERIAL_AND_SHARDED
    title = f"DistributedDotProductAttn({M}, num_heads={H}), T={T}, forward + backward"
    return Topic(title, meaning, heads, [sides], rows)


def memory(quick: bool, ranks: int) -> Topic:
    """How far memory and time grow with the sequence under a window, for each way to move keys."""
    H, D, width = 8, 64, 1024
    mask, races = masks.window(width - 1, 0), []
    for T in (2048, 8192) if quick else (8192, 16384, 32768, 65536, 131072):
        for scheme, name in (("ring", "ring, exchange"), ("rotate", "ring, rotate"), ("ulysses", "ulysses")):
            sizes = {"T": T, "H": H, "D": D, "scheme": scheme, "mask": mask}
            races.append([Side((str(T), name), sharded_attention, sizes, {"T": 64})])

    def rows(measured: list[Measured]) -> list[list[str]]:
        lines = []
        for m in measured:
            q = m.side.sizes["T"] / ranks * H * D * 4 / MiB
            numbers = [f"{m.highest:.0f}", f"**{m.peak:.0f}**", f"{m.peak / q:.1f}", f"{m.first_ms / 1e3:.2f}"]
            lines.append([*m.side.label, *numbers, f"{m.received:.2f}"])
        return lines

    meaning = (
        "High water is all resident memory of the worst rank in one call; growth is its part beyond torch, q, k, v and the "
        "upstream gradient, also in multiples of a rank's q. Growth and the seconds of the call should be linear in T."
    )
    heads = "T", "scheme", "high water MiB", "growth MiB", "growth / q", "s", "received MiB"
    title = f"Memory, window of {width}, causal, contiguous shares, {ranks} ranks, B=1 H={H} D={D}, forward + backward"
    return Topic(title, meaning, heads, races, rows, once=True, draw=draw_memory)


def loss(quick: bool, ranks: int) -> Topic:
    """The fused head and cross entropy against the two of them."""
    T, M, V = (512, 64, 4000) if quick else (4096, 1024, 32000)
    sizes, tiny = {"T": T, "M": M, "V": V}, {"T": 64, "M": 8, "V": 64}
    sides = [
        Side((name,), sharded_loss, {**sizes, "fused": fused}, tiny)
        for name, fused in (("vocab_parallel_cross_entropy", False), ("linear_cross_entropy", True))
    ]
    gradients = (T + -(-V // ranks)) * M * 4 / MiB

    def rows(measured: list[Measured]) -> list[list[str]]:
        unfused, lines = measured[0], []
        for m in measured:
            processor = statistics.median(m.processor) / statistics.median(unfused.processor)
            numbers = [f"{m.ms:.0f}", *ratio(m, unfused), f"{processor:.2f}", f"{m.peak:.0f}", f"**{m.peak - gradients:.0f}**"]
            lines.append([*m.side.label, *numbers, f"{m.received:.2f}"])
        return lines

    meaning = (
        f"Over unfused should be at most 1.15; beyond gradients is the peak without the gradients of x and weight, "
        f"{gradients:.0f} MiB: fused at most {V * T * 4 / 8 / MiB:.1f} MiB, an eighth of V x T numbers."
    )
    heads = "loss", "ms", "over unfused", "quartiles", "processor", "peak rank MiB", "beyond gradients MiB", "received MiB"
    title = f"Head and cross entropy, V={V}, T={T}, M={M}, tp={ranks}, forward + backward"
    return Topic(title, meaning, heads, [sides], rows)


def block(quick: bool, ranks: int) -> Topic:
    """A transformer block over tp, against plain torch layers on one process and divided by torch's own parallelize_module."""
    T, M, H, F = BLOCK_SIZES[quick]
    races = []
    for dtype in (torch.float32, torch.bfloat16):
        sizes, word = {"T": T, "M": M, "H": H, "F": F, "dtype": dtype}, str(dtype).removeprefix("torch.")
        sides = [Side((), serial_block, sizes, BLOCK_TINY, sharded=False)]
        for sp, tokens in ((False, "whole"), (True, "divided")):
            sides.append(Side((word, tokens, "parallelize_module"), torch_block, {**sizes, "sp": sp}, BLOCK_TINY))
            sides.append(Side((word, tokens, "tpattn"), sharded_block, {**sizes, "sp": sp}, BLOCK_TINY))
        again = {**sizes, "sp": True, "keep": False}
        sides.append(Side((word, "divided", "tpattn, gathered again"), sharded_block, again, BLOCK_TINY))
        races.append(sides)

    def rows(measured: list[Measured]) -> list[list[str]]:
        serial, *others = measured
        theirs = {m.side.sizes["sp"]: m for m in others if m.side.build is torch_block}
        lines = []
        for m in others:
            row = serial_and_sharded(m.side.label, serial, m)
            if m.side.build is torch_block:
                row[-1] = "not counted"  # the ledger knows tpattn's messages alone
            lines.append([*row, *ratio(theirs[m.side.sizes["sp"]], m)])
        return lines

    each = 2 * (ranks - 1) / ranks * T * M * 4 / MiB
    meaning = (
        f"{COSTS_NOTHING} It should be at least 0.98, and theirs / this, parallelize_module's time over this one's, at least "
        f"1.00. Received in float32 should be {4 * each:.2f} MiB, {5 * each:.2f} when gathered again, half of that in bfloat16. "
        "Tokens divided: with sequence_parallel, over tp between the linear layers. On a CPU without products in bfloat16 torch "
        "needs a minute for one of its blocks."
    )
    heads = "dtype", "tokens", "block", *SERIAL_AND_SHARDED, "theirs / this", "quartiles of it"
    title = f"Transformer block, hidden {M}, {H} heads, SwiGLU {F}, T={T}, causal, tp={ranks}, forward + backward"
    return Topic(title, meaning, heads, races, rows)


def chunks(quick: bool, ranks: int) -> Topic:
    """The same block with its tokens travelling in pieces behind the products."""
    T, M, H, F = BLOCK_SIZES[quick]
    races = []
    for sp in (False, True):
        sizes = {"T": T, "M": M, "H": H, "F": F, "dtype": torch.float32, "sp": sp}
        label = "divided" if sp else "whole"
        races.append(
            [Side((label, str(n)), sharded_block, {**sizes, "chunks": n}, {**BLOCK_TINY, "chunks": 1}) for n in (1, 2, 4)]
        )

    def rows(measured: list[Measured]) -> list[list[str]]:
        one = measured[0]
        lines = []
        for m in measured:
            processor = statistics.median(one.processor) / statistics.median(m.processor)
            lines.append([*m.side.label, *ratio(one, m), f"{processor:.2f}", f"{m.ms:.0f}", f"{m.peak:.0f}", f"{m.received:.2f}"])
        return lines

    meaning = 'Ratio is the time of one piece over this one\'s: above 1.00 pieces pay, and chunks="auto" takes one.'
    heads = "tokens", "chunks", "ratio", "quartiles", "processor", "ms", "peak rank MiB", "received MiB"
    title = f"Chunks of a transformer block, hidden {M}, {H} heads, SwiGLU {F}, T={T}, float32, tp={ranks}, forward + backward"
    return Topic(title, meaning, heads, races, rows)


def checkpoint(quick: bool, ranks: int) -> Topic:
    """Checkpoints against plain torch.distributed.checkpoint; what a save costs the steps beside it; a restart."""
    races = files.sides(quick, ranks)
    size = files.bytes_of(**{key: races[0][0].sizes[key] for key in ("M", "layers")}) / MiB

    def rows(measured: list[Measured]) -> list[list[str]]:
        first, lines = measured[0], []
        for m in measured:
            rate = f"{size / m.ms * 1e3:.0f}" if m.side.build is files.move_files else ""
            lines.append([*m.side.label, f"{m.ms:.0f}", rate, *(ratio(first, m) if m is not first else ("", ""))])
        return lines

    meaning = (
        f"{size:.0f} MiB of weights and AdamW state. Ratio is the time of the row that begins the group over this one's. load "
        "verifies every byte, and should be at least 0.5 of torch's, which verifies nothing; hash is the verifying alone. A save "
        "beside 50 steps should leave at least 0.98. restart is from SIGKILL of a rank to the next attempt's first step, at most "
        "10 s on two cores."
    )
    return Topic(f"Checkpoints, tp={ranks}", meaning, ("what", "ms", "MiB/s", "ratio", "quartiles"), races, rows)


BLOCK_SIZES = {True: (256, 64, 4, 176), False: (2048, 1024, 16, 2816)}  # quick: T, M, H, F
BLOCK_TINY = {"T": 64, "M": 64, "H": 4, "F": 64}

TOPICS: dict[str, Callable[[bool, int], Topic]] = {
    "products": products,
    "checkpoint": checkpoint,
    "attention": attention,
    "window": window,
    "documents": documents,
    "seed": seed,
    "memory": memory,
    "loss": loss,
    "block": block,
    "chunks": chunks,
}
