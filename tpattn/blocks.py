"""How layers make a transformer block: the feed-forward network, and norm, attention, norm, feed-forward with residuals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpattn.attention.layers import ParallelSelfAttention, share_layout
from tpattn.errors import Unsupported
from tpattn.layout import AttentionGrid, SequenceLayout
from tpattn.linear import ColumnParallelLinear, RowParallelLinear, agreed_sizes, check_counts, column_product
from tpattn.masks import Mask
from tpattn.mesh import ParallelContext
from tpattn.norm import LayerNorm, RMSNorm, check_width
from tpattn.params import Init, agree_on_gradients, deferred_init, finish_init
from tpattn.random import RandomKey, dropout

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "swiglu": F.silu}
_NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


class ParallelMLP(nn.Module):
    """Feed-forward network: up-projection by columns, activation, down-projection by rows; swiglu has a gate beside it.

    hidden              model width M
    ffn                 inner width F; None = 4 M, or 8 M / 3 rounded up to a multiple of 8 for swiglu (as many weights)
    activation          gelu, relu, silu or swiglu: silu(gate(x)) * up(x)
    sequence_parallel   input and output are token shards over tp; the input is gathered once for gate and up
    keep_gathered, chunks   as in `ColumnParallelLinear`
    source              GLU variants: Shazeer, arXiv:2002.05202
    """

    def __init__(
        self,
        hidden: int,
        ffn: int | None = None,
        activation: str = "gelu",
        *,
        ctx: ParallelContext,
        bias: bool = True,
        sequence_parallel: bool = False,
        keep_gathered: bool = True,
        chunks: int | str = "auto",
        dtype: torch.dtype | None = None,
        init: Init = "default",
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise Unsupported(f"activation={activation!r}: expected {', '.join(_ACTIVATIONS)}")
        check_counts(self, hidden=hidden)
        if ffn is None:
            ffn = -(-8 * hidden // 24) * 8 if activation == "swiglu" else 4 * hidden
        self.ctx, self.hidden, self.activation, self.sequence_parallel = ctx, hidden, activation, sequence_parallel
        with deferred_init():

            def column() -> ColumnParallelLinear:
                return ColumnParallelLinear(
                    hidden,
                    ffn,
                    ctx=ctx,
                    bias=bias,
                    sequence_parallel=sequence_parallel,
                    keep_gathered=keep_gathered,
                    chunks=chunks,
                    dtype=dtype,
                    init=init,
                )

            self.gate = column() if activation == "swiglu" else None
            self.up = column()
            self.down = RowParallelLinear(
                ffn, hidden, ctx=ctx, bias=bias, sequence_parallel=sequence_parallel, chunks=chunks, dtype=dtype, init=init
            )
        finish_init(self, ctx)

    def forward(self, x: Tensor, token_sizes: Sequence[int] | None = None) -> Tensor:
        """x [.., M], the same on every tp rank (a token shard with sequence_parallel) -> the same shape."""
        check_width(self, x, self.hidden)
        agree_on_gradients(self, self.ctx.tp, x=x)
        token_sizes = agreed_sizes(self, x, token_sizes)
        columns = [self.up] if self.gate is None else [self.up, self.gate]
        if all(
            type(column) is ColumnParallelLinear for column in columns
        ):  # one gather, one sum of the input's gradient for both
            weights = [column.weight_and_bias(x.dtype) for column in columns]
            options: Any = {"keep": self.up.keep_gathered, "chunks": self.up.chunks}
            up, *gate = column_product(x, weights, self.ctx.tp, self.sequence_parallel, token_sizes, **options)
        else:  # a module that the user has put in place of one
            up, *gate = (column(x, token_sizes) for column in columns)
        act = _ACTIVATIONS[self.activation]
        return self.down(act(gate[0]) * up if gate else act(up), token_sizes)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): a pre-norm block.

    hidden, num_heads, num_kv_heads, head_dim, rope_base, qk_norm, gate, grid, transport, kernel     as in `ParallelSelfAttention`
    ffn, activation     as in `ParallelMLP`
    norm                rmsnorm or layernorm
    dropout             of the two residual branches, while training; forward then needs a key
    attention_dropout   of the softmax weights, while training; forward then needs a key
    sequence_parallel   input and output are token shards over tp: the rows of x divide by tensor_split
    keep_gathered, chunks   as in `ColumnParallelLinear`
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn: int | None = None,
        activation: str = "swiglu",
        norm: str = "rmsnorm",
        *,
        ctx: ParallelContext,
        grid: AttentionGrid | str = "auto",
        transport: str = "auto",
        kernel: str = "auto",
        rope_base: float | None = 10000.0,
        qk_norm: bool = False,
        gate: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        sequence_parallel: bool = False,
        keep_gathered: bool = True,
        chunks: int | str = "auto",
        dtype: torch.dtype | None = None,
        init: Init = "default",
    ) -> None:
        super().__init__()
        if norm not in _NORMS:
            raise Unsupported(f"norm={norm!r}: expected {', '.join(_NORMS)}")
        if not 0.0 <= dropout < 1.0:
            raise Unsupported(f"dropout={dropout} must lie in [0, 1)")
        self.ctx, self.sequence_parallel, self.dropout = ctx, sequence_parallel, dropout
        with deferred_init():
            self.attention_norm = _NORMS[norm](hidden, ctx=ctx, sequence_parallel=sequence_parallel, dtype=dtype)
            self.attention = ParallelSelfAttention(
                hidden,
                num_heads,
                num_kv_heads,
                head_dim,
                ctx=ctx,
                bias=bias,
                rope_base=rope_base,
                qk_norm=qk_norm,
                gate=gate,
                dropout=attention_dropout,
                grid=grid,
                transport=transport,
                kernel=kernel,
                sequence_parallel=sequence_parallel,
                keep_gathered=keep_gathered,
                chunks=chunks,
                dtype=dtype,
                init=init,
            )
            self.mlp_norm = _NORMS[norm](hidden, ctx=ctx, sequence_parallel=sequence_parallel, dtype=dtype)
            self.mlp = ParallelMLP(
                hidden,
                ffn,
                activation,
                ctx=ctx,
                bias=bias,
                sequence_parallel=sequence_parallel,
                keep_gathered=keep_gathered,
                chunks=chunks,
                dtype=dtype,
                init=init,
            )
        finish_init(self, ctx)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        layout: SequenceLayout | None = None,
        key: RandomKey | None = None,
        token_sizes: list[int] | None = None,
    ) -> Tensor:
        """x [B, t, M] of this cp rank's tokens (a token shard [B, t', M] over tp with sequence_parallel) -> the same shape.

        mask        None = full
        layout      which positions each cp rank holds; None = contiguous, lengths agreed by one small all-gather
        key         random numbers of the dropout; needed in training when dropout > 0
        token_sizes with sequence_parallel: tokens of each tp rank; None = agreed by one small all-gather
        """
        if x.dim() != 3:
            raise Unsupported(f"TransformerBlock needs an input [B, tokens, width], got {list(x.shape)}")
        agree_on_gradients(self, self.ctx.cp, self.ctx.tp, x=x)
        token_sizes = agreed_sizes(self, x, token_sizes)
        t = x.shape[1] if token_sizes is None else sum(token_sizes)
        layout = share_layout(self.ctx, t, layout)
        attention = self.attention(
            self.attention_norm(x), mask=mask, layout=layout, key=key and key.child("attention"), token_sizes=token_sizes
        )
        x = x + self._drop(attention, layout, token_sizes, key and key.child("attention_dropout"))
        mlp = self.mlp(self.mlp_norm(x), token_sizes)
        return x + self._drop(mlp, layout, token_sizes, key and key.child("mlp_dropout"))

    def _drop(self, x: Tensor, layout: SequenceLayout, token_sizes: list[int] | None, key: RandomKey | None) -> Tensor:
        return drop(self, x, self.dropout, self.ctx, layout, token_sizes, key)


def drop(
    module: nn.Module,
    x: Tensor,
    p: float,
    ctx: ParallelContext,
    layout: SequenceLayout,
    token_sizes: list[int] | None,
    key: RandomKey | None,
) -> Tensor:
    """Dropout of x [B, t, M] (or its token shard over tp) by global positions, while the module trains."""
    if not module.training or p == 0.0:
        return x
    positions = layout.positions(ctx.cp.rank)
    if token_sizes:
        positions = positions.split(token_sizes)[ctx.tp.rank]
    return dropout(x, p, key, positions=positions)
