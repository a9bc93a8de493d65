"""Linear layers divided over tp: by columns (outputs), by rows (inputs), and the fused q, k, v projection by heads.

Between a column-divided and a row-divided layer nothing is sent, and elementwise activations commute with the column split (not
with the row split).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpattn import comm
from tpattn.errors import Unsupported
from tpattn.layout import chunk_sizes
from tpattn.linear.functions import column_product, row_product, token_dim
from tpattn.linear.heads import HeadShares
from tpattn.mesh import ParallelContext
from tpattn.norm import check_width
from tpattn.params import Init, ShardedModule, agree_on_gradients, bias_fill, finish_init, row_spans, weight_fill


class ColumnParallelLinear(ShardedModule):
    """y = x W^T + b with the outputs divided over tp.

    in_features         I, not divided
    out_features        O, by torch.chunk's rule: o = ceil(O / tp) on each rank, the last fewer
    weight, bias        [O, I] and [O], each rank o rows
    gather_output       True: the outputs are gathered, every rank gets all O (their gradient: own piece)
    sequence_parallel   the input is a token shard over tp and is gathered first
    keep_gathered       with sequence_parallel: keep the gathered input for backward; False: keep the shard, gather it again
    chunks              with sequence_parallel: pieces in which tokens travel, each behind the product before; "auto" = 1
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
        keep_gathered: bool = True,
        chunks: int | str = "auto",
        dtype: torch.dtype | None = None,
        init: Init = "default",
    ) -> None:
        super().__init__(ctx, dtype)
        check_counts(self, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        self.keep_gathered, self.chunks = keep_gathered, chunk_count(type(self).__name__, chunks)
        self.add_parameter("weight", (out_features, in_features), dim=0, fill=weight_fill(init, in_features, out_features))
        if bias:
            self.add_parameter("bias", (out_features,), dim=0, fill=bias_fill(in_features))
        finish_init(self, ctx)

    def forward(self, x: Tensor, token_sizes: Sequence[int] | None = None) -> Tensor:
        """x [.., I] the same on every tp rank -> [.., o]; with sequence_parallel x [.., t', I] -> [.., t, o].

        token_sizes     with sequence_parallel: tokens of each tp rank; None = agreed by one small all-gather
        """
        check_width(self, x, self.in_features)
        agree_on_gradients(self, self.ctx.tp, x=x)
        weights = [self.weight_and_bias(x.dtype)]
        options: Any = {"keep": self.keep_gathered, "chunks": self.chunks}
        (y,) = column_product(x, weights, self.ctx.tp, self.sequence_parallel, token_sizes, **options)
        if self.gather_output:
            y = comm.gather(y, self.ctx.tp, y.dim() - 1, chunk_sizes(self.out_features, self.ctx.tp.size))
        return y

    def weight_and_bias(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """This rank's rows [o, I] and [o] as plain tensors of that dtype."""
        return self.local("weight", dtype), self.local("bias", dtype) if "bias" in self.specs else None


class RowParallelLinear(ShardedModule):
    """y = x W^T + b with the inputs divided over tp; the bias is added once, after the sum.

    in_features         I, by torch.chunk's rule: i on each rank; or (H, D): heads of D features, divided by heads
    parts               heads divide over so many parts of tp first, as `HeadShares.parts` says; None = over tp at once
    out_features        O, not divided
    weight              [O, I] (or [O, H, D]), each rank its columns; bias [O] on every rank
    input_is_parallel   True: x holds this rank's i features, as a column-divided layer gives them; False: x is whole and is cut
    sequence_parallel   the output is this rank's token shard; the bias gradient is then partial
    chunks              pieces of tokens; the sum of each travels behind the product of the next; "auto" = 1
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
        chunks: int | str = "auto",
        dtype: torch.dtype | None = None,
        init: Init = "default",
    ) -> None:
        super().__init__(ctx, dtype)
        shape = tuple(in_features) if isinstance(in_features, Sequence) else (in_features,)  # a config's list is no list
        for size in shape:
            check_counts(self, in_features=size, out_features=out_features)
        self.in_features, self.out_features = math.prod(shape), out_features
        self.input_shape, self.parts = in_features, parts  # what another layer of the same input needs
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel
        self.chunks = chunk_count(type(self).__name__, chunks)
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
        agree_on_gradients(self, tp, x=x)
        weight = self.local("weight", x.dtype).flatten(1)
        y = row_product(x, weight, tp, self.sequence_parallel, token_sizes, chunks=self.chunks)
        return y + self.local("bias", x.dtype) if "bias" in self.specs else y


class QKVParallelLinear(ShardedModule):
    """The q, k and v projections of grouped-query attention, divided over tp by heads, as one product.

    hidden              M, not divided
    num_heads           H query heads, num_kv_heads K key-value heads (None = H; K divides H), head_dim D (None = M / H)
    q, k, v             weights [H, D, M], [K, D, M], [K, D, M]; q_bias, k_bias, v_bias [H, D], [K, D], [K, D] with bias=True.
                        Separate parameters, so that no checkpoint depends on tp; each rank holds whole heads
    gate                True: a weight [H, M] more, one number per token and query head
    keep_gathered, chunks   as in `ColumnParallelLinear`
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
        keep_gathered: bool = True,
        chunks: int | str = "auto",
        dtype: torch.dtype | None = None,
        init: Init = "default",
    ) -> None:
        super().__init__(ctx, dtype)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = head_dims(type(self).__name__, hidden, num_heads, num_kv_heads, head_dim)
        self.hidden, self.num_heads, self.num_kv_heads, self.head_dim = hidden, num_heads, num_kv_heads, head_dim
        self.sequence_parallel, self.shares = sequence_parallel, HeadShares(num_heads, num_kv_heads, ctx.tp.size)
        self.keep_gathered, self.chunks = keep_gathered, chunk_count(type(self).__name__, chunks)
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
        agree_on_gradients(self, self.ctx.tp, x=x)
        needed = self.shares.needed(self.ctx.tp.rank)
        weights = [self.local("q", x.dtype), *(self.local(name, x.dtype)[needed] for name in ("k", "v"))]
        sizes, rows, bias = [len(w) for w in weights], torch.cat(weights).flatten(0, 1), None
        if "q_bias" in self.specs:
            biases = [self.local("q_bias", x.dtype), *(self.local(f"{name}_bias", x.dtype)[needed] for name in ("k", "v"))]
            bias = torch.cat(biases).flatten()
        products = [(rows, bias)]
        if "gate" in self.specs:
            products.append((self.local("gate", x.dtype), None))
        options: Any = {"keep": self.keep_gathered, "chunks": self.chunks}
        heads, *gate = column_product(x, products, self.ctx.tp, self.sequence_parallel, token_sizes, **options)
        return *heads.unflatten(-1, (-1, self.head_dim)).split(sizes, dim=-2), *gate


def agreed_sizes(layer: Any, x: Tensor, token_sizes: Sequence[int] | None) -> list[int] | None:
    """Tokens of each tp rank of a layer with sequence_parallel: the given ones, or agreed by one small all-gather; else None.

    raises      Unsupported when sizes are given to a layer whose tokens are not divided over tp
    """
    if not layer.sequence_parallel:
        if token_sizes is not None:
            raise Unsupported(f"{type(layer).__name__}: token_sizes={list(token_sizes)} needs sequence_parallel=True")
        return None
    if token_sizes is None:
        return [row[0] for row in comm.agree([x.shape[token_dim(x)]], layer.ctx.tp)]
    return list(token_sizes)


def chunk_count(layer: str, chunks: int | str) -> int:
    """The number of pieces that `chunks` means: "auto" is 1, since no shape is known yet where more are faster."""
    if chunks == "auto":
        return 1
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise Unsupported(f"{layer}: chunks={chunks!r} must be a positive integer, or the word auto")
    return chunks


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
