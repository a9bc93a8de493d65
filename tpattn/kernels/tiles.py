"""The values of local attention: which pairs of a block count, what happens to their scores, where results add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tpattn.random import bits, fold, uniform

_VECTOR = 32  # elements; the longest stretch that an elementwise kernel takes at once


@dataclass(frozen=True, eq=False)
class Tile:
    """The pairs of rows [row, row + rows) and keys [key, key + keys) that count.

    kind    full; causal: row i reads keys 0..i of the tile; flipped: row i reads keys i..; ragged: row i reads keys lo[i]..hi[i]
    side    causal and flipped: squares of this side along the diagonal, the last one smaller; 0 = one square
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
    side: int = 0

    @property
    def pairs(self) -> int:
        """Number of (row, key) pairs that count, a table aside."""
        if self.kind == "full":
            return self.rows * self.keys
        if self.kind == "ragged":
            assert self.lo is not None and self.hi is not None
            return int((self.hi - self.lo).sum())
        side = self.side or self.rows
        rest = self.rows % side
        return (self.rows - rest) * (side + 1) // 2 + rest * (rest + 1) // 2


@dataclass(frozen=True)
class Call:
    """`count` equal calls, the i-th moved by i * step rows and keys. kind: full, causal, flipped."""

    kind: str
    row: int
    rows: int
    key: int
    keys: int
    count: int = 1
    step: int = 0


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

    def cut(self, call: Call, sequences: slice, heads: slice) -> Change:
        """The change for one call's rows and keys, for these sequences and query heads of the block."""

        def windows(x: Tensor, start: int, length: int) -> Tensor:
            return torch.stack([x[0, start + i * call.step : start + i * call.step + length] for i in range(call.count)])

        rows, keys = windows(self.rows, call.row, call.rows), windows(self.keys, call.key, call.keys)
        return replace(self.of_heads(heads), sequences=self.sequences[sequences], rows=rows, keys=keys)

    def of_heads(self, heads: slice) -> Change:
        """The change for these query heads."""
        return replace(self, heads=self.heads[heads], slopes=None if self.slopes is None else self.slopes[heads])

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


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which attention in `dtype` is summed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def windows(x: Tensor, start: int, length: int, count: int = 1, step: int = 0) -> Tensor:
    """x [1, H, T, ..] -> [count, H, length, ..]: windows along T as a view; one window for any batch."""
    if count == 1:
        return x[:, :, start : start + length]
    strides = (step * x.stride(2), *x.stride()[1:])
    return x.as_strided((count, x.shape[1], length, *x.shape[3:]), strides, x.storage_offset() + start * x.stride(2))


def _zeros(B: int, H: int, T: int, D: int, like: Tensor) -> Tensor:
    """Zeros [B, H, T, D] with memory in public order [B, T, H, D]."""
    return torch.zeros(B, T, H, D, dtype=wide_dtype(like.dtype), device=like.device).transpose(1, 2)


class Accumulator:
    """Softmax attention summed over calls: out [B, H, T, Dv], in public memory order, and lse [B, H, T], in `wide_dtype`.

    A row that nothing was added to has out = 0 and lse = -inf. A first result that covers all rows and heads is taken over as it
    is, which has the same bits as adding it.
    source      online softmax: Milakov and Gimelshein, arXiv:1805.02867
    """

    def __init__(self, shape: Sequence[int], Dv: int, like: Tensor) -> None:
        self._shape, self.Dv, self._like = tuple(shape), Dv, like
        self._held: tuple[Tensor, Tensor] | None = None

    def _values(self) -> tuple[Tensor, Tensor]:
        if self._held is None:
            B, H, T = self._shape
            out = _zeros(B, H, T, self.Dv, self._like)
            self._held = out, torch.full(self._shape, -torch.inf, dtype=out.dtype, device=out.device)
        return self._held

    @property
    def out(self) -> Tensor:
        """[B, H, T, Dv]"""
        return self._values()[0]

    @property
    def lse(self) -> Tensor:
        """[B, H, T]"""
        return self._values()[1]

    def add(
        self, out: Tensor, lse: Tensor, place: tuple[slice, slice], start: int, length: int, count: int = 1, step: int = 0
    ) -> None:
        """Add one call's result, a fresh tensor of its backend, to these (sequences, heads) at `windows` of rows."""
        wide = wide_dtype(self._like.dtype)
        if self._held is None and lse.shape == self._shape and out.dtype == wide and out.transpose(1, 2).is_contiguous():
            self._held = out, lse.to(wide).contiguous()
            return
        rows = start, length, count, step
        merge(windows(self.out[place], *rows), windows(self.lse[place], *rows), out, lse)


class Total:
    """A sum of gradients over calls, shaped like a tensor [B, H, T, D], in `wide_dtype`; 0 until something is added.

    A first summand that covers all of it is taken over as it is.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._held: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The sum so far, itself: what is added to it in place counts."""
        if self._held is None:
            B, H, T, D = self._like.shape
            self._held = _zeros(B, H, T, D, self._like)
        return self._held

    def add(
        self, piece: Tensor, place: tuple[slice, ...] = (), start: int = 0, length: int = -1, count: int = 1, step: int = 0
    ) -> None:
        """Add a fresh tensor [count or b, h, length, D] to these (sequences, heads), all unless said, at `windows` of rows."""
        if self._held is None and piece.shape == self._like.shape:
            self._held = piece.to(wide_dtype(self._like.dtype))
        else:
            length = piece.shape[2] if length < 0 else length
            windows(self.value[place], start, length, count, step).add_(piece)


@dataclass
class Gradients:
    """Where the gradients of one block are summed: dq like q [B, H, T, D], dk, dv like k, v [B, K, S, ..]."""

    dq: Total
    dk: Total
    dv: Total


def whole_vectors(x: Tensor) -> Tensor:
    """x [.., T] with contiguous rows, padded to whole vectors.

    exp and log of a number may differ in the last bit between a full vector and its tail (torch 2.13, CPU): so a row's bits do
    not depend on how many others or which strides come with it.
    """
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % _VECTOR)).contiguous()


def merge(total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Add a partial result to a total, in place: both sides weighted by exp(lse). out [.., Dv], lse [..]; -inf = no key."""
    rows = lse.shape[-1]
    old, new = whole_vectors(total_lse), whole_vectors(lse)
    weight = torch.sigmoid(new - old)
    weight.nan_to_num_(nan=0.0)  # -inf minus -inf: neither side has a key, the total stays 0
    out, weight = out.to(total.dtype), weight[..., :rows].unsqueeze(-1)
    if out.shape[-1] > 1:
        total.lerp_(out, weight)
    else:  # vectors would run along the rows, and lerp's differ from its tail's in the last bit, as above
        total.add_((out - total).mul_(weight))
    total_lse.copy_(torch.logaddexp(old, new)[..., :rows])
