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

    def cut(self, call: Call, heads: slice) -> Change:
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


@dataclass
class Gradients:
    """Where the gradients of one block are summed, float32 (float64 for float64): dq [B, H, T, D], dk, dv [B, K, S, ..]."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


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
