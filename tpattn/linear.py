"""Linear layers divided over tp: by columns (outputs), by rows (inputs), and the fused q, k, v projection by heads.

A column-divided layer takes an input that all tp ranks share and gives each its outputs; a row-divided one takes such outputs and
sums. Between the two nothing is sent, and elementwise activations commute with the column split (not with the row split). Under
`sequence_parallel` tokens are divided over tp outside: all-gather in front, reduce-scatter behind, the bytes of one all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tpattn import comm
from tpattn.errors import Unsupported
from tpattn.layout import chunk_sizes
from tpattn.mesh import ParallelContext
from tpattn.norm import check_width
from tpattn.params import Init, ShardedModule, bias_fill, finish_init, row_spans, weight_fill

_TOKENS = -2  # the dimension of the tokens in [.., t, M]


# ---- the seed's functions, with an explicit group --------------------------------------------------------------------------


def split_tensor(data: Tensor, dim: int, group: Any = None) -> Tensor:
    """This rank's piece of `data` along `dim` by torch.chunk's rule, contiguous; sends nothing.

    group       a torch process group; None = all processes
    raises      Unsupported when a rank would get nothing (torch.chunk would give fewer pieces than ranks)
    """
    ranks = comm.group_of(group)
    if not -data.dim() <= dim < data.dim():
        raise Unsupported(f"split_tensor: dim={dim} for a tensor {list(data.shape)}")
    sizes = chunk_sizes(data.shape[dim], ranks.size)
    if sizes[-1] == 0:
        raise Unsupported(
            f"split_tensor: {data.shape[dim]} along dim={dim} over {ranks.size} ranks gives {sizes}: a rank would get nothing"
        )
    return data.split(sizes, dim=dim)[ranks.rank].contiguous()


def column_linear(x: Tensor, local_weight: Tensor, group: Any = None) -> Tensor:
    """x [.., I] (the same on all ranks) times this rank's rows [o, I] of the weight -> [.., o]; gradient of x: all-reduce.

    Gradient of the weight: this rank's share, g^T x.
    """
    return F.linear(comm.replicate(x, comm.group_of(group)), local_weight)


def row_linear(x: Tensor, local_weight: Tensor, group: Any = None, input_is_parallel: bool = True) -> Tensor:
    """This rank's features x [.., i] times its columns [O, i] of the weight, summed over ranks -> [.., O] on every rank.

    input_is_parallel   False: x is the whole [.., I] on every rank; it is cut first, and its gradient gathered
    gradient            of x: nothing is sent (or the all-gather above); of the weight: this rank's share, never the whole
    """
    ranks = comm.group_of(group)
    if not input_is_parallel:
        x = comm.shard(x, ranks, -1, chunk_sizes(x.shape[-1], ranks.size))
    return comm.reduce(F.linear(x, local_weight), ranks)


# ---- layers ----------------------------------------------------------------------------------------------------------------


def enter(x: Tensor, tp: comm.Group, sequence_parallel: bool, token_sizes: Sequence[int] | None) -> Tensor:
    """The input of a column-divided product: all tokens, on every tp rank. Gradient: summed over tp."""
    if sequence_parallel:
        return comm.gather_sum(x, tp, _token_dim(x), token_sizes)
    return comm.replicate(x, tp)


def leave(y: Tensor, tp: comm.Group, sequence_parallel: bool, token_sizes: Sequence[int] | None = None) -> Tensor:
    """The output of a row-divided product: the sum over tp, whole or as this rank's token shard (None = as equal as can be)."""
    return comm.scatter_sum(y, tp, _token_dim(y), token_sizes) if sequence_parallel else comm.reduce(y, tp)


def agreed_sizes(layer: Any, x: Tensor, token_sizes: Sequence[int] | None) -> list[int] | None:
    """Tokens of each tp rank of a layer with sequence_parallel: the given ones, or agreed by one small all-gather; else None.

    raises      Unsupported when sizes are given to a layer whose tokens are not divided over tp
    """
    if not layer.sequence_parallel:
        if token_sizes is not None:
            raise Unsupported(f"{type(layer).__name__}: token_sizes={list(token_sizes)} needs sequence_parallel=True")
        return None
    if token_sizes is None:
        return [row[0] for row in comm.agree([x.shape[_token_dim(x)]], layer.ctx.tp)]
    return list(token_sizes)


def _token_dim(x: Tensor) -> int:
    """The dimension of the tokens of [.., t, M], from the front."""
    if x.dim() < -_TOKENS:
        raise Unsupported(f"sequence_parallel divides tokens: it needs [.., tokens, width], got {list(x.shape)}")
    return x.dim() + _TOKENS


class ColumnParallelLinear(ShardedModule):
    """y = x W^T + b with the outputs divided over tp.

    in_features         I, not divided
    out_features        O, by torch.chunk's rule: o = ceil(O / tp) on each rank, the last fewer
    weight, bias        [O, I] and [O], each rank o rows
    gather_output       True: the outputs are gathered, every rank gets all O (their gradient: own piece)
    sequence_parallel   the input is a token shard over tp and is gathered first
    raises              Unsupported when a rank would hold no output
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        ctx: ParallelContext,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        init: Init = "default",
    ) -> None:
        super().__init__(ctx, dtype)
        check_counts(self, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        self.add_parameter("weight", (out_features, in_features), dim=0, fill=weight_fill(init, in_features, out_features))
        if bias:
            self.add_parameter("bias", (out_features,), dim=0, fill=bias_fill(in_features))
        finish_init(self, ctx)

    def forward(self, x: Tensor, token_sizes: Sequence[int] | None = None) -> Tensor:
        """x [.., I] the same on every tp rank -> [.., o]; with sequence_parallel x [.., t', I] -> [.., t, o].

        token_sizes     with sequence_parallel: tokens of each tp rank; None = agreed by one small all-gather
        """
        check_width(self, x, self.in_features)
        y = self.project(enter(x, self.ctx.tp, self.sequence_parallel, token_sizes))
        if self.gather_output:
            y = comm.gather(y, self.ctx.tp, y.dim() - 1, chunk_sizes(self.out_features, self.ctx.tp.size))
        return y

    def project(self, x: Tensor) -> Tensor:
        """This rank's outputs of an input that already entered (see `enter`); sends nothing."""
        bias = self.local("bias", x.dtype) if "bias" in self.specs else None
        return F.linear(x, self.local("weight", x.dtype), bias)


class RowParallelLinear(ShardedModule):
    """y = x W^T + b with the inputs divided over tp; the bias is added once, after the sum.

    in_features         I, by torch.chunk's rule: i on each rank; or (H, D): heads of D features, divided by heads
    parts               heads divide over so many parts of tp first, as `HeadShares.parts` says; None = over tp at once
    out_features        O, not divided
    weight              [O, I] (or [O, H, D]), each rank its columns; bias [O] on every rank
    input_is_parallel   True: x holds this rank's i features, as a column-divided layer gives them; False: x is whole and is cut
    sequence_parallel   the output is this rank's token shard; the bias gradient is then partial
    raises              Unsupported when a rank would hold no input
    """

    def __init__(
        self,
        in_features: int | tuple[int, int],
        out_features: int,
        *,
        ctx: ParallelContext,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        parts: int | None = None,
        dtype: torch.dtype | None = None,
        init: Init = "default",
    ) -> None:
        super().__init__(ctx, dtype)
        shape = tuple(in_features) if isinstance(in_features, Sequence) else (in_features,)  # a config's list is no list
        for size in shape:
            check_counts(self, in_features=size, out_features=out_features)
        self.in_features, self.out_features = math.prod(shape), out_features
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel
        self._input_sizes = [(b - a) * math.prod(shape[1:]) for a, b in row_spans(shape[0], ctx.tp.size, parts)]
        fill = weight_fill(init, self.in_features, out_features)
        flat = out_features, self.in_features
        self.add_parameter("weight", (out_features, *shape), dim=1, fill=fill, flat=flat, parts=parts)
        if bias:
            self.add_parameter("bias", (out_features,), dim=None, fill=bias_fill(self.in_features), partial=sequence_parallel)
        finish_init(self, ctx)

    def forward(self, x: Tensor, token_sizes: Sequence[int] | None = None) -> Tensor:
        """x [.., i] (or whole [.., I]) -> [.., O] the same on every tp rank; with sequence_parallel a token shard [.., t', O].

        token_sizes     with sequence_parallel: tokens of each tp rank's shard; None = as equal as can be
        """
        tp = self.ctx.tp
        if token_sizes is not None:
            agreed_sizes(self, x, token_sizes)
        if not self.input_is_parallel:
            check_width(self, x, self.in_features)
            x = comm.shard(x, tp, x.dim() - 1, self._input_sizes)
        check_width(self, x, self._input_sizes[tp.rank])
        y = leave(F.linear(x, self.local("weight", x.dtype).flatten(1)), tp, self.sequence_parallel, token_sizes)
        return y + self.local("bias", x.dtype) if "bias" in self.specs else y


class QKVParallelLinear(ShardedModule):
    """The q, k and v projections of grouped-query attention, divided over tp by heads, as one product.

    hidden              M, not divided
    num_heads           H query heads, num_kv_heads K key-value heads (None = H; K divides H), head_dim D (None = M / H)
    q, k, v             weights [H, D, M], [K, D, M], [K, D, M]; q_bias, k_bias, v_bias [H, D], [K, D], [K, D] with bias=True.
                        Separate parameters, so that no checkpoint depends on tp; each rank holds whole heads
    gate                True: a weight [H, M] more, one number per token and query head
    shares              `HeadShares`: the heads of each tp rank. Where tp does not divide K, ranks share key-value heads: each
                        computes those that its query heads read, and only gradients of their weights cross
    sequence_parallel   the input is a token shard over tp and is gathered first
    raises              Unsupported when a tp rank would hold no query head
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        ctx: ParallelContext,
        bias: bool = False,
        gate: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        init: Init = "default",
    ) -> None:
        super().__init__(ctx, dtype)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = head_dims(type(self).__name__, hidden, num_heads, num_kv_heads, head_dim)
        self.hidden, self.num_heads, self.num_kv_heads, self.head_dim = hidden, num_heads, num_kv_heads, head_dim
        self.sequence_parallel, self.shares = sequence_parallel, HeadShares(num_heads, num_kv_heads, ctx.tp.size)
        self.shares.check(type(self).__name__)
        for name, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
            fill, split = weight_fill(init, hidden, heads * head_dim), self.shares.split(name == "q")
            self.add_parameter(name, (heads, head_dim, hidden), fill=fill, flat=(heads * head_dim, hidden), **split)
            if bias:
                flat = (heads * head_dim,)
                self.add_parameter(f"{name}_bias", (heads, head_dim), fill=bias_fill(hidden), flat=flat, **split)
        if gate:
            fill, split = weight_fill(init, hidden, num_heads), self.shares.split(True)
            self.add_parameter("gate", (num_heads, hidden), fill=fill, **split)
        finish_init(self, ctx)

    @property
    def reads(self) -> list[int] | None:
        """For each of this rank's query heads which of its key-value heads it reads; None = the usual groups."""
        return self.shares.reads(self.ctx.tp.rank)

    @property
    def first_head(self) -> int:
        """Index of this rank's first query head among all."""
        return self.shares.queries[self.ctx.tp.rank][0]

    def forward(self, x: Tensor, token_sizes: Sequence[int] | None = None) -> tuple[Tensor, ...]:
        """x [B, t, M] (a token shard [B, t', M] with sequence_parallel) -> q [B, t, h, D], k and v [B, t, k, D]: own heads.

        With gate=True a fourth result: the gate's numbers [B, t, h].
        """
        check_width(self, x, self.hidden)
        x = enter(x, self.ctx.tp, self.sequence_parallel, token_sizes)
        needed = self.shares.needed(self.ctx.tp.rank)
        weights = [self.local("q", x.dtype), *(self.local(name, x.dtype)[needed] for name in ("k", "v"))]
        bias = None
        if "q_bias" in self.specs:
            biases = [self.local("q_bias", x.dtype), *(self.local(f"{name}_bias", x.dtype)[needed] for name in ("k", "v"))]
            bias = torch.cat(biases).flatten()
        rows = torch.cat(weights).flatten(0, 1)
        if "gate" not in self.specs:
            return F.linear(x, rows, bias).unflatten(-1, (-1, self.head_dim)).split([len(w) for w in weights], dim=-2)
        gate = self.local("gate", x.dtype)
        if bias is not None:
            bias = torch.cat([bias, bias.new_zeros(len(gate))])
        heads, gate = F.linear(x, torch.cat([rows, gate]), bias).split([len(rows), len(gate)], dim=-1)
        return *heads.unflatten(-1, (-1, self.head_dim)).split([len(w) for w in weights], dim=-2), gate


@dataclass(frozen=True)
class HeadShares:
    """Which of H query heads and K key-value heads each of tp ranks holds.

    Where torch.chunk's rule gives every rank the query heads of its key-value heads, it divides both. Else tp becomes
    parts x tp / parts with parts = gcd(K, tp): heads divide over the parts, and the part's query heads over its ranks; so do its
    key-value heads if that keeps every query head with the head it reads, and else the ranks of the part share them.
    """

    H: int
    K: int
    tp: int

    @property
    def parts(self) -> int:
        """Into how many parts tp divides first; tp where that is all."""
        return self.tp if self._together(self.tp) and chunk_sizes(self.K, self.tp)[-1] else math.gcd(self.K, self.tp)

    @property
    def shared(self) -> bool:
        """Whether the ranks of a part share its key-value heads."""
        return not self._together(self.parts)

    def _together(self, parts: int) -> bool:
        """Whether dividing both kinds of heads alike keeps every query head with the head it reads."""
        ratio = self.H // self.K
        return row_spans(self.H, self.tp, parts) == tuple((ratio * a, ratio * b) for a, b in row_spans(self.K, self.tp, parts))

    @property
    def queries(self) -> tuple[tuple[int, int], ...]:
        """First and last + 1 of the query heads of each rank."""
        return row_spans(self.H, self.tp, self.parts)

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """First and last + 1 of the key-value heads whose weights each rank holds."""
        return row_spans(self.K, self.tp, self.parts, self.shared)

    def split(self, queries: bool) -> dict[str, Any]:
        """How a parameter [heads, ..] divides, as arguments of `add_parameter`."""
        if queries or not self.shared:
            return {"dim": 0, "parts": self.parts}
        if self.parts == 1:
            return {"dim": None, "partial": True}
        return {"dim": 0, "parts": self.parts, "shared": True, "partial": True}

    def needed(self, rank: int) -> slice:
        """Those of the rank's key-value heads that its query heads read, counted from its first."""
        (first, last), ratio = self.queries[rank], self.H // self.K
        start = self.keys[rank][0]
        return slice(first // ratio - start, (last - 1) // ratio + 1 - start)

    def reads(self, rank: int) -> list[int] | None:
        """For each query head of the rank the head of `needed` that it reads; None when these are the usual equal groups."""
        (first, last), ratio = self.queries[rank], self.H // self.K
        found = [head // ratio - first // ratio for head in range(first, last)]
        count = found[-1] + 1
        usual = len(found) % count == 0 and found == [i // (len(found) // count) for i in range(len(found))]
        return None if usual else found

    def check(self, layer: str) -> None:
        """Raise Unsupported when a rank would hold no query head."""
        sizes = [b - a for a, b in self.queries]
        if min(sizes) == 0:
            fits = [n for n in range(1, self.H + 1) if min(b - a for a, b in HeadShares(self.H, self.K, n).queries)]
            raise Unsupported(
                f"{layer}: {self.H} query heads and {self.K} key-value heads over tp={self.tp} give {sizes} query heads: a rank "
                f"would hold none; tp could be {', '.join(map(str, fits[:12]))}"
            )


def check_counts(layer: Any, **sizes: Any) -> None:
    """Raise Unsupported for a size that is not a positive integer."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise Unsupported(
                f"{layer if isinstance(layer, str) else type(layer).__name__}: {name}={size!r} must be a positive integer"
            )


def head_dims(layer: str, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> int:
    """head_dim, after checking that K divides H and that the sizes are positive integers.

    raises      Unsupported with the numbers and what would work
    """
    check_counts(layer, hidden=hidden, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if num_heads % num_kv_heads:
        raise Unsupported(f"{layer}: num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
    if head_dim is None:
        if hidden % num_heads:
            raise Unsupported(f"{layer}: hidden={hidden} is not a multiple of num_heads={num_heads}; pass head_dim=")
        head_dim = hidden // num_heads
    check_counts(layer, head_dim=head_dim)
    return head_dim
