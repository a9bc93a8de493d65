"""Local attention of some query rows over one block of keys: (out, lse) forward, and a backward from the global (out, lse).

Knows no ranks. A tile says which pairs of a rectangle of rows and keys count; `attend` adds tiles into an `Accumulator`,
`attend_backward` adds their gradients. Each backend only knows how to do one call (no mask, its own causal flag, or a small
boolean mask) and the sizes it is fastest at. Here tensors are in kernel order [B, H, T, D], any strides: T rows, S keys,
K key-value heads (never repeated in memory), Dv the width of v.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tpattn.errors import Unsupported
from tpattn.random import bits, fold, uniform

_VECTOR = 32  # elements; the longest stretch that an elementwise kernel takes at once
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HeadGroups = Sequence[tuple[slice, slice]]  # query heads and the key-value heads they read, each with one whole ratio


@dataclass(frozen=True, eq=False)
class Tile:
    """The pairs of rows [row, row + rows) and keys [key, key + keys) that count.

    kind    full; causal: row i reads keys 0..i of the tile; flipped: row i reads keys i..; ragged: row i reads keys lo[i]..hi[i]
    lo, hi  int64 [rows], ragged only, counted from `key`
    table   True when the dense mask's table decides too
    """

    kind: str
    row: int
    rows: int
    key: int
    keys: int
    lo: Tensor | None = None
    hi: Tensor | None = None
    table: bool = False

    @property
    def pairs(self) -> int:
        """Number of (row, key) pairs that count, a table aside."""
        if self.kind == "full":
            return self.rows * self.keys
        if self.kind == "ragged":
            assert self.lo is not None and self.hi is not None
            return int((self.hi - self.lo).sum())
        return self.rows * (self.rows + 1) // 2


@dataclass(frozen=True, eq=False)
class Change:
    """What happens to the scores of one block beside the scale, by global indices, so that it is the same on any grid.

    softcap     c: a score s becomes c tanh(s / c)
    slopes      [H] ALiBi: -slope |i - j| is added, after the softcap
    dropout     probability with which a softmax weight is dropped; the rest is divided by 1 - p
    key         of the dropout's random numbers: an element's fate depends on (key, sequence, head, row, key position) alone
    rows, keys  [1, T] and [1, S] global positions (a first dimension of more windows for strided calls)
    sequences   [B] and heads [H]: global indices
    source      ALiBi: Press et al., arXiv:2108.12409; softcap: Gemma 2, arXiv:2408.00118
    """

    softcap: float | None
    slopes: Tensor | None
    dropout: float
    key: int
    rows: Tensor
    keys: Tensor
    sequences: Tensor
    heads: Tensor

    def to(self, device: torch.device) -> Change:
        """The same with its tensors on `device`."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def cut(self, call: _Call, heads: slice) -> Change:
        """The change for one call's rows, keys and query heads."""

        def windows(x: Tensor, start: int, length: int) -> Tensor:
            return torch.stack([x[0, start + i * call.step : start + i * call.step + length] for i in range(call.count)])

        rows, keys = windows(self.rows, call.row, call.rows), windows(self.keys, call.key, call.keys)
        slopes = None if self.slopes is None else self.slopes[heads]
        return replace(self, rows=rows, keys=keys, heads=self.heads[heads], slopes=slopes)

    def scores(self, scores: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
        """The changed scores [b, K, G, T, S] and their derivative by the given ones (None = 1)."""
        slope = None
        if self.softcap is not None:
            bent = torch.tanh(scores / self.softcap)
            scores, slope = bent * self.softcap, 1.0 - bent * bent
        if self.slopes is not None:
            distance = (self.rows[:, rows, None] - self.keys[:, None, :]).abs().to(scores.dtype)[:, None, None]
            scores = scores - self.slopes.to(scores.dtype).view(1, *scores.shape[1:3], 1, 1) * distance
        return scores, slope

    def kept(self, like: Tensor, rows: slice) -> Tensor | None:
        """Factors of the softmax weights [b, K, G, T, S]: 0 where dropped, else 1 / (1 - p); None without dropout."""
        if not self.dropout:
            return None
        owner = bits(self.key, self.sequences[:, None] * 2**20 + self.heads)  # [B, H]
        row = bits(fold(self.key, "row"), self.rows[:, rows])
        column = bits(fold(self.key, "column"), self.keys)
        index = owner[:, :, None, None] ^ (row[:, None, :, None] ^ column[:, None, None, :])
        keep = uniform(fold(self.key, "pair"), index) >= self.dropout
        return (keep.to(like.dtype) / (1.0 - self.dropout)).view(like.shape)


class Accumulator:
    """Softmax attention summed over tiles: out [B, H, T, Dv] and lse [B, H, T], float32 (float64 for float64).

    A row that nothing was added to has out = 0 and lse = -inf.
    source      online softmax: Milakov and Gimelshein, arXiv:1805.02867
    """

    def __init__(self, shape: Sequence[int], Dv: int, like: Tensor) -> None:
        B, H, T = shape
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.out = torch.zeros(B, T, H, Dv, dtype=wide, device=like.device).transpose(1, 2)  # memory in public order
        self.lse = torch.full((B, H, T), -torch.inf, dtype=wide, device=like.device)


def merge(total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Add a partial result to a total, in place: both sides weighted by exp(lse). out [.., Dv], lse [..]; -inf = no key."""
    # exp and log of a number may differ in the last bit between a full vector and its tail (torch 2.13, CPU): with contiguous
    # rows padded to whole vectors a row's bits do not depend on how many others or which strides come with it.
    rows, pad = lse.shape[-1], (0, -lse.shape[-1] % _VECTOR)
    old, new = (torch.nn.functional.pad(x, pad).contiguous() for x in (total_lse, lse))
    weight = torch.sigmoid(new - old)
    weight.nan_to_num_(nan=0.0)  # -inf minus -inf: neither side has a key, the total stays 0
    total.lerp_(out.to(total.dtype), weight[..., :rows].unsqueeze(-1))
    total_lse.copy_(torch.logaddexp(old, new)[..., :rows])


# ---- backends: one call each -----------------------------------------------------------------------------------------------


class Backend:
    """How one call is computed. `mask` is None (all pairs), the word "causal", or a bool [.., T, S].

    leaf            side of the causal squares that are computed whole, forward and backward, by dtype (0 = never split)
    """

    name = "backend"
    note = ""

    def supports(self, device: torch.device, dtype: torch.dtype, changes: bool = False) -> bool:
        """Whether this backend can compute there, also with changed scores (softcap, ALiBi, dropout)."""
        raise NotImplementedError

    def leaf(self, dtype: torch.dtype, backward: bool) -> int:
        """Side in tokens of the causal squares that one call computes; larger squares are split as a binary tree."""
        return 128

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | str | None, scale: float, change: Change | None = None
    ) -> tuple[Tensor, Tensor]:
        """out [B, H, T, Dv], in the dtype of q or wider, and lse [B, H, T]; a row without keys gives 0 and -inf."""
        raise NotImplementedError

    def backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | str | None,
        scale: float,
        change: Change | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this call's pairs, from the gradient, output and lse of the whole row."""
        raise NotImplementedError


def _as_bool(mask: Tensor | str | None, T: int, S: int, device: torch.device) -> Tensor | None:
    if isinstance(mask, str):
        return _square("causal", T, device) if T == S else torch.ones(T, S, dtype=torch.bool, device=device).tril()
    return mask


class Math(Backend):
    """Plain matrix products: any device, float dtype and change of scores, the reference. Sums in float32 at least."""

    name = "math"
    note = "any device; builds one block of scores at a time"
    _most_scores = 1 << 22  # elements of one block of scores

    def supports(self, device: torch.device, dtype: torch.dtype, changes: bool = False) -> bool:
        return dtype in _FLOATS

    def _blocks(self, q: Tensor, k: Tensor, mask: Tensor | str | None) -> Iterator[tuple[slice, Tensor | None]]:
        T, S = q.shape[2], k.shape[2]
        allowed = _as_bool(mask, T, S, q.device)
        step = max(1, self._most_scores // max(1, q.shape[0] * q.shape[1] * S))
        for start in range(0, T, step):
            rows = slice(start, min(T, start + step))
            yield rows, None if allowed is None else allowed[..., rows, :]

    @staticmethod
    def _wide(*tensors: Tensor) -> list[Tensor]:
        wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        return [x.to(wide) for x in tensors]

    @staticmethod
    def _scores(
        q_BKGTD: Tensor, k_BKSD: Tensor, allowed: Tensor | None, scale: float, change: Change | None, rows: slice
    ) -> tuple[Tensor, Tensor | None]:
        scores, slope = torch.einsum("bkgtd,bksd->bkgts", q_BKGTD, k_BKSD) * scale, None
        if change is not None:
            scores, slope = change.scores(scores, rows)
        if allowed is not None:
            if allowed.dim() == 4:  # [b, h, T, S]: heads as their groups
                heads = allowed.shape[1]
                K, G = scores.shape[1:3]
                allowed = allowed.unflatten(1, (K, G)) if heads != 1 else allowed[:, :, None]
            scores = scores.masked_fill(~allowed, -torch.inf)
        return scores, slope

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | str | None, scale: float, change: Change | None = None
    ) -> tuple[Tensor, Tensor]:
        K = k.shape[1]
        outs, lses = [], []
        wide_k, wide_v = self._wide(k, v)
        for rows, allowed in self._blocks(q, k, mask):
            (block,) = self._wide(q[:, :, rows].unflatten(1, (K, -1)))
            scores, _ = self._scores(block, wide_k, allowed, scale, change, rows)
            lse = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
            if change is not None and (kept := change.kept(weights, rows)) is not None:
                weights = weights * kept
            outs.append(torch.einsum("bkgts,bksd->bkgtd", weights, wide_v).flatten(1, 2))
            lses.append(lse.flatten(1, 2))
        return torch.cat(outs, dim=2).to(q.dtype), torch.cat(lses, dim=2)

    def backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | str | None,
        scale: float,
        change: Change | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        K = k.shape[1]
        wide_k, wide_v = self._wide(k, v)
        dk, dv, dqs = torch.zeros_like(wide_k), torch.zeros_like(wide_v), []
        for rows, allowed in self._blocks(q, k, mask):
            bq, bg, bo, bl = self._wide(*(x[:, :, rows].unflatten(1, (K, -1)) for x in (q, g, out, lse)))
            scores, slope = self._scores(bq, wide_k, allowed, scale, change, rows)
            weights = torch.exp(scores - torch.where(bl == -torch.inf, 0.0, bl)[..., None])
            delta = (bg * bo).sum(-1, keepdim=True)
            dweights = torch.einsum("bkgtd,bksd->bkgts", bg, wide_v)
            kept = None if change is None else change.kept(weights, rows)
            dv += torch.einsum("bkgts,bkgtd->bksd", weights if kept is None else weights * kept, bg)
            dscores = weights * ((dweights if kept is None else dweights * kept) - delta) * scale
            if slope is not None:
                dscores = dscores * slope
            dk += torch.einsum("bkgts,bkgtd->bksd", dscores, bq)
            dqs.append(torch.einsum("bkgts,bksd->bkgtd", dscores, wide_k).flatten(1, 2))
        return torch.cat(dqs, dim=2), dk, dv


class CpuFlash(Backend):
    """torch's flash attention for CPU, the op behind scaled_dot_product_attention, which also hands out the lse.

    Guards (torch 2.13): empty tensors kill the process, so they never get here; a fully masked row reports lse 0.0; masks are
    additive in q's dtype; Dv must equal D, so the narrower side is padded with zeros, which change neither scores nor outputs;
    a last dimension that is not contiguous is read as if it were (numbers from other memory), so such a tensor is copied; its
    causal flag multiplies -inf by the scale, so a scale of 0 or less goes into q. In bfloat16 and float16 it rounds the output of
    each call, which adds up when a row is the sum of many small calls: those are computed in float32, at no cost in time.
    """

    _few_keys = 128
    name = "cpu_flash"
    note = "CPU, float32, float64, bfloat16, float16"

    def supports(self, device: torch.device, dtype: torch.dtype, changes: bool = False) -> bool:
        return device.type == "cpu" and dtype in _FLOATS and not changes

    def leaf(self, dtype: torch.dtype, backward: bool) -> int:
        """128: the op's causal flag saves nothing up to 512 (torch 2.13); whole squares where bfloat16 dislikes small calls."""
        return 0 if backward and dtype in (torch.bfloat16, torch.float16) else 128

    @staticmethod
    def _pad(q: Tensor, k: Tensor, v: Tensor, *like_v: Tensor) -> list[Tensor]:
        D, Dv = q.shape[-1], v.shape[-1]
        pad = torch.nn.functional.pad
        if D < Dv:
            q, k = pad(q, (0, Dv - D)), pad(k, (0, Dv - D))
        elif Dv < D:
            v, *like_v = (pad(x, (0, D - Dv)) for x in (v, *like_v))  # type: ignore[assignment]
        return [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, *like_v)]

    @staticmethod
    def _positive(q: Tensor, scale: float) -> tuple[Tensor, float, int]:
        """q, scale and sign: sign * q times a positive scale is what the caller's q and scale are."""
        sign = (scale > 0) - (scale < 0)
        return (q, scale, sign) if sign == 1 else (q * sign, abs(scale) or 1.0, sign)

    @staticmethod
    def _additive(mask: Tensor | str | None, dtype: torch.dtype) -> Tensor | None:
        if mask is None or isinstance(mask, str):
            return None
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | str | None, scale: float, change: Change | None = None
    ) -> tuple[Tensor, Tensor]:
        Dv = v.shape[-1]
        q, scale, _ = self._positive(q, scale)
        if k.shape[2] <= self._few_keys and q.dtype in (torch.bfloat16, torch.float16):
            q, k, v = q.float(), k.float(), v.float()
        q, k, v = self._pad(q, k, v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, isinstance(mask, str), attn_mask=self._additive(mask, q.dtype), scale=scale
        )
        if isinstance(mask, Tensor):
            lse = lse.masked_fill(~mask.any(-1), -torch.inf)
        return out[..., :Dv], lse

    def backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | str | None,
        scale: float,
        change: Change | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        D, Dv = q.shape[-1], v.shape[-1]
        q, scale, sign = self._positive(q, scale)
        q, k, v, g, out = self._pad(q, k, v, g, out)
        if isinstance(mask, Tensor):
            lse = torch.where(lse == -torch.inf, 0.0, lse)  # the row has no key anywhere, so none here: exp(-inf - 0) = 0
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, out, lse, 0.0, isinstance(mask, str), attn_mask=self._additive(mask, q.dtype), scale=scale
        )
        return dq[..., :D] if sign == 1 else dq[..., :D] * sign, dk[..., :D], dv[..., :Dv]


_BACKENDS: tuple[Backend, ...] = (CpuFlash(), Math())


NAMES = tuple(b.name for b in _BACKENDS)


def available(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """The backends that can compute there, best first, each with a note on where it runs."""
    return {b.name: b.note for b in _BACKENDS if b.supports(torch.device(device), dtype)}


def choose(name: str, device: torch.device, dtype: torch.dtype, changes: bool = False) -> Backend:
    """The backend called `name`, or with "auto" the first that supports the device, the dtype and changed scores if asked.

    raises      Unsupported for an unknown name, or one that cannot compute that there
    """
    if dtype not in _FLOATS:
        raise Unsupported(f"attention in {dtype} is not supported; use float32, float64, bfloat16 or float16")
    for backend in _BACKENDS:
        if name in ("auto", backend.name) and backend.supports(device, dtype, changes):
            return backend
    able = [b.name for b in _BACKENDS if b.supports(device, dtype, changes)]
    what = f"{dtype} on {device.type}" + (" with softcap, ALiBi or dropout" if changes else "")
    raise Unsupported(f"kernel={name!r} cannot compute {what}; there are auto, {', '.join(able)}")


# ---- tiles become calls ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """`count` equal calls, the i-th moved by i * step rows and keys. kind: full, causal, flipped."""

    kind: str
    row: int
    rows: int
    key: int
    keys: int
    count: int = 1
    step: int = 0


@lru_cache(maxsize=256)
def _tree(kind: str, n: int, leaf: int) -> tuple[_Call, ...]:
    """A causal (or flipped) square of side n as leaf squares on the diagonal and the full rectangles of a binary tree.

    All rectangles of one level are one strided call where they are equal in size; a ragged last one is a call of its own.
    """
    if leaf == 0 or n <= leaf:
        return (_Call(kind, 0, n, 0, n),)
    calls, whole = [], n // leaf
    calls.append(_Call(kind, 0, leaf, 0, leaf, whole, leaf))
    if n % leaf:
        calls.append(_Call(kind, whole * leaf, n % leaf, whole * leaf, n % leaf))
    side = leaf
    while side < n:
        pairs = n // (2 * side)
        row, key = (side, 0) if kind == "causal" else (0, side)
        if pairs:
            calls.append(_Call("full", row, side, key, side, pairs, 2 * side))
        rest = n - pairs * 2 * side
        if rest > side:  # the last pair has a short second half
            start, short = pairs * 2 * side, rest - side
            if kind == "causal":
                calls.append(_Call("full", start + side, short, start, side))
            else:
                calls.append(_Call("full", start, side, start + side, short))
        side *= 2
    return tuple(calls)


@lru_cache(maxsize=64)
def _square(kind: str, n: int, device: torch.device) -> Tensor:
    ones = torch.ones(n, n, dtype=torch.bool, device=device)
    return ones.tril() if kind == "causal" else ones.triu()


def _windows(x: Tensor, start: int, length: int, count: int, step: int) -> Tensor:
    """x [1, H, T, ..] -> [count, H, length, ..]: windows along T as a view."""
    if count == 1:
        return x[:, :, start : start + length]
    strides = (step * x.stride(2), *x.stride()[1:])
    return x.as_strided((count, x.shape[1], length, *x.shape[3:]), strides, x.storage_offset() + start * x.stride(2))


def _calls(
    tile: Tile, B: int, leaf: int, table: Tensor | None, device: torch.device
) -> Iterator[tuple[_Call, Tensor | str | None]]:
    """The calls of a tile, placed in its block, each with its mask. Only a batch of one can take strided windows."""
    if tile.kind == "ragged" or tile.table:
        keys = torch.arange(tile.keys, device=device)
        block = torch.ones(tile.rows, tile.keys, dtype=torch.bool, device=device)
        if tile.kind == "ragged":
            assert tile.lo is not None and tile.hi is not None
            block = (keys >= tile.lo.to(device)[:, None]) & (keys < tile.hi.to(device)[:, None])
        if tile.table:
            assert table is not None
            block = block & table[:, :, tile.row : tile.row + tile.rows, tile.key : tile.key + tile.keys]
            if not bool(block.any()):
                return
        call = _Call("full", tile.row, tile.rows, tile.key, tile.keys)
        yield call, None if tile.table and bool(block.all()) else block
        return
    if tile.kind == "full":
        yield _Call("full", tile.row, tile.rows, tile.key, tile.keys), None
        return
    for call in _tree(tile.kind, tile.rows, leaf):
        mask: Tensor | str | None = None
        if call.kind != "full":
            mask = "causal" if call.kind == "causal" else _square("flipped", call.rows, device)
        for i in range(1 if B == 1 else call.count):
            row, key = tile.row + call.row + i * call.step, tile.key + call.key + i * call.step
            yield _Call(call.kind, row, call.rows, key, call.keys, call.count if B == 1 else 1, call.step), mask


def _of_heads(mask: Tensor | str | None, heads: slice) -> Tensor | str | None:
    return mask[:, heads] if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1 else mask


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
        for call, mask in _calls(tile, q.shape[0], backend.leaf(q.dtype, False), table, q.device):
            for q_heads, kv_heads in groups:
                rows = (call.row, call.rows, call.count, call.step)
                keys = (call.key, call.keys, call.count, call.step)
                out, lse = backend.forward(
                    _windows(q[:, q_heads], *rows),
                    _windows(k[:, kv_heads], *keys),
                    _windows(v[:, kv_heads], *keys),
                    _of_heads(mask, q_heads),
                    scale,
                    None if change is None else change.cut(call, q_heads),
                )
                merge(_windows(into.out[:, q_heads], *rows), _windows(into.lse[:, q_heads], *rows), out, lse)


@dataclass
class Gradients:
    """Where the gradients of one block are summed, float32 (float64 for float64): dq [B, H, T, D], dk, dv [B, K, S, ..]."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


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
        for call, mask in _calls(tile, q.shape[0], backend.leaf(q.dtype, True), table, q.device):
            for q_heads, kv_heads in groups:
                rows = (call.row, call.rows, call.count, call.step)
                keys = (call.key, call.keys, call.count, call.step)
                dq, dk, dv = backend.backward(
                    _windows(g[:, q_heads], *rows),
                    _windows(q[:, q_heads], *rows),
                    _windows(k[:, kv_heads], *keys),
                    _windows(v[:, kv_heads], *keys),
                    _windows(out[:, q_heads], *rows),
                    _windows(lse[:, q_heads], *rows),
                    _of_heads(mask, q_heads),
                    scale,
                    None if change is None else change.cut(call, q_heads),
                )
                _windows(into.dq[:, q_heads], *rows).add_(dq)
                _windows(into.dk[:, kv_heads], *keys).add_(dk)
                _windows(into.dv[:, kv_heads], *keys).add_(dv)


def stand_in(g: Tensor, delta: Tensor) -> Tensor:
    """A tensor o like g [B, H, T, Dv] with rowsum(g * o) = delta [B, H, T], for backward calls that want `out` only for that.

    delta / g_j stands at the column j of the largest |g|, 0 elsewhere; rows whose gradient is all 0 have delta 0.
    """
    column = g.abs().argmax(dim=-1, keepdim=True)
    largest = g.gather(-1, column)
    value = torch.where(largest == 0, 0.0, delta.unsqueeze(-1) / torch.where(largest == 0, 1.0, largest.to(delta.dtype)))
    return torch.zeros_like(g).scatter_(-1, column, value.to(g.dtype))
