"""Tiles become calls of a back end: causal squares as trees, strided windows, head groups; results are added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from tpattn.kernels.backends import Backend, of_heads, square
from tpattn.kernels.tiles import Accumulator, Call, Change, Gradients, Tile, windows

_COLUMNS = 128  # keys of a stretch that a dense table may leave out
_TOGETHER = 2048  # most rows of one strided call: its results are held beside the sums
HeadGroups = Sequence[tuple[slice, slice]]  # query heads and the key-value heads they read, each with one whole ratio


@lru_cache(maxsize=256)
def _tree(kind: str, n: int, leaf: int, top: int) -> tuple[Call, ...]:
    """Causal (or flipped) squares of side `top` along n rows as leaf squares on the diagonal and full rectangles of binary trees.

    All rectangles of one level are one strided call where they are equal in size; a ragged last one is a call of its own.
    """
    leaf = min(leaf or top, top)
    calls, whole = [], n // leaf
    if whole:
        calls.append(Call(kind, 0, leaf, 0, leaf, whole, leaf))
    if n % leaf:
        calls.append(Call(kind, whole * leaf, n % leaf, whole * leaf, n % leaf))
    side = leaf
    while side < min(n, top):
        pairs = n // (2 * side)
        row, key = (side, 0) if kind == "causal" else (0, side)
        if pairs:
            calls.append(Call("full", row, side, key, side, pairs, 2 * side))
        rest = n - pairs * 2 * side
        if rest > side:  # the last pair has a short second half
            start, short = pairs * 2 * side, rest - side
            if kind == "causal":
                calls.append(Call("full", start + side, short, start, side))
            else:
                calls.append(Call("full", start, side, start + side, short))
        side *= 2
    return tuple(calls)


def _spans(block: Tensor) -> list[tuple[int, int]]:
    """The stretches of columns of a mask [.., T, S], in steps of _COLUMNS, in which any pair counts."""
    S = block.shape[-1]
    columns = torch.nn.functional.pad(block.flatten(0, -2).any(0), (0, -S % _COLUMNS)).view(-1, _COLUMNS).any(1)
    edges = torch.nn.functional.pad(columns.to(torch.int8), (1, 1)).diff()
    starts, stops = (torch.nonzero(edges == sign).flatten().tolist() for sign in (1, -1))
    return [(a * _COLUMNS, min(S, b * _COLUMNS)) for a, b in zip(starts, stops, strict=True)]


def _calls(
    tile: Tile, B: int, leaf: int, table: Tensor | None, device: torch.device
) -> Iterator[tuple[slice, Call, Tensor | str | None]]:
    """The calls of a tile, placed in its block, each with the sequences it is for and its mask.

    Windows are strided along the batch, so only one sequence at a time can have several: whichever way takes fewer calls.
    """
    everyone = slice(0, B)
    if tile.kind == "ragged" or tile.table:
        keys = torch.arange(tile.keys, device=device)
        block = torch.ones(tile.rows, tile.keys, dtype=torch.bool, device=device)
        if tile.kind == "ragged":
            assert tile.lo is not None and tile.hi is not None
            block = (keys >= tile.lo.to(device)[:, None]) & (keys < tile.hi.to(device)[:, None])
        spans = [(0, tile.keys)]
        if tile.table:
            assert table is not None
            block = block & table[:, :, tile.row : tile.row + tile.rows, tile.key : tile.key + tile.keys]
            spans = _spans(block)
        for start, stop in spans:
            some = block[..., start:stop]
            call = Call("full", tile.row, tile.rows, tile.key + start, stop - start)
            yield everyone, call, None if tile.table and bool(some.all()) else some
        return
    if tile.kind == "full":
        yield everyone, Call("full", tile.row, tile.rows, tile.key, tile.keys), None
        return
    for call in _tree(tile.kind, tile.rows, leaf, tile.side or tile.rows):
        mask: Tensor | str | None = None
        if call.kind != "full":
            mask = "causal" if call.kind == "causal" else square("flipped", call.rows, device)
        together = max(1, _TOGETHER // call.rows) if call.count > B or B == 1 else 1
        for seqs in [slice(b, b + 1) for b in range(B)] if together > 1 else [everyone]:
            for i in range(0, call.count, together):
                row, key = tile.row + call.row + i * call.step, tile.key + call.key + i * call.step
                yield seqs, Call(call.kind, row, call.rows, key, call.keys, min(together, call.count - i), call.step), mask


def attend(
    into: Accumulator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Sequence[Tile],
    groups: HeadGroups,
    scale: float,
    backend: Backend,
    table: Tensor | None = None,
    change: Change | None = None,
) -> None:
    """Add the attention of q [B, H, T, D] over k [B, K, S, D], v [B, K, S, Dv] at the pairs of `tiles` into the accumulator.

    groups      which query heads read which key-value heads
    table       bool [b, h, T, S] of the dense mask for these rows and keys, for tiles that ask for it
    change      what happens to the scores of these rows and keys, for backends that support it
    """
    for tile in tiles if q.shape[0] else ():  # an empty batch kills the CPU op
        for seqs, call, mask in _calls(tile, q.shape[0], backend.leaf(q.dtype, False, tile.rows), table, q.device):
            for q_heads, kv_heads in groups:
                rows = (call.row, call.rows, call.count, call.step)
                keys = (call.key, call.keys, call.count, call.step)
                out, lse = backend.forward(
                    windows(q[seqs, q_heads], *rows),
                    windows(k[seqs, kv_heads], *keys),
                    windows(v[seqs, kv_heads], *keys),
                    of_heads(mask, q_heads),
                    scale,
                    None if change is None else change.cut(call, seqs, q_heads),
                )
                into.add(out, lse, (seqs, q_heads), *rows)


def attend_backward(
    into: Gradients,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Sequence[Tile],
    groups: HeadGroups,
    scale: float,
    backend: Backend,
    table: Tensor | None = None,
    change: Change | None = None,
) -> None:
    """Add the gradients of `attend` for the upstream gradient g [B, H, T, Dv], from the *global* out and lse of the rows."""
    for tile in tiles if q.shape[0] else ():  # an empty batch kills the CPU op
        for seqs, call, mask in _calls(tile, q.shape[0], backend.leaf(q.dtype, True, tile.rows), table, q.device):
            for q_heads, kv_heads in groups:
                rows = (call.row, call.rows, call.count, call.step)
                keys = (call.key, call.keys, call.count, call.step)
                dq, dk, dv = backend.backward(
                    windows(g[seqs, q_heads], *rows),
                    windows(q[seqs, q_heads], *rows),
                    windows(k[seqs, kv_heads], *keys),
                    windows(v[seqs, kv_heads], *keys),
                    windows(out[seqs, q_heads], *rows),
                    windows(lse[seqs, q_heads], *rows),
                    of_heads(mask, q_heads),
                    scale,
                    None if change is None else change.cut(call, seqs, q_heads),
                )
                into.dq.add(dq, (seqs, q_heads), *rows)
                into.dk.add(dk, (seqs, kv_heads), *keys)
                into.dv.add(dv, (seqs, kv_heads), *keys)


def stand_in(g: Tensor, delta: Tensor) -> Tensor:
    """A tensor o like g [B, H, T, Dv] with rowsum(g * o) = delta [B, H, T], for backward calls that want `out` only for that.

    delta / g_j stands at the column j of the largest |g|; what rounding that leaves of delta stands, likewise, at the column of
    the second largest, so delta is as exact as in float32. 0 elsewhere; rows whose gradient is all 0 have delta 0.
    """
    columns = g.abs().topk(min(2, g.shape[-1]), dim=-1).indices
    stands, rest = torch.zeros_like(g), delta.unsqueeze(-1)
    for column in columns.split(1, dim=-1):
        here = g.gather(-1, column).to(rest.dtype)
        value = torch.where(here == 0, 0.0, rest / torch.where(here == 0, 1.0, here)).to(g.dtype)
        value = torch.where(value.isfinite(), value, 0.0)  # a second gradient may be tiny
        stands.scatter_(-1, column, value)
        rest = rest - here * value.to(rest.dtype)
    return stands
