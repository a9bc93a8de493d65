"""Multi-head self-attention divided over tp by heads and over cp by tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tpattn import comm
from tpattn.attention.engine import check_options, sequence_attention
from tpattn.errors import Unsupported
from tpattn.layout import AttentionGrid, SequenceLayout, split_sizes
from tpattn.linear import QKVParallelLinear, RowParallelLinear, agreed_sizes
from tpattn.masks import Mask
from tpattn.mesh import ParallelContext
from tpattn.norm import RMSNorm
from tpattn.params import Init, agree_on_gradients, deferred_init, finish_init
from tpattn.random import RandomKey
from tpattn.rope import rotary_angles, rotate


class ParallelSelfAttention(torch.nn.Module):
    """Grouped-query self-attention: q, k, v by heads over tp, tokens over cp, output summed over tp.

    hidden              model width M
    num_heads           H; num_kv_heads K (None = H) divides it; head_dim D (None = M / H)
    rope_base           base of the rotary angles; None = no rotary embedding
    qk_norm             True: RMSNorm over head_dim on q and k before the rotary embedding, q_norm.weight and k_norm.weight [D]
    gate                True: each head's output times the sigmoid of one number per token, from qkv.gate [H, M]
    dropout             of the softmax weights, while training, by global indices; forward then needs a key
    grid, transport, kernel, scale     as in `sequence_attention`
    sequence_parallel   input and output are token shards over tp
    keep_gathered, chunks   as in `ColumnParallelLinear`
    parameters          qkv.q [H, D, M], qkv.k, qkv.v [K, D, M], out.weight [M, H, D], and biases with bias=True
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
        rope_base: float | None = 10000.0,
        qk_norm: bool = False,
        gate: bool = False,
        dropout: float = 0.0,
        grid: AttentionGrid | str = "auto",
        transport: str = "auto",
        kernel: str = "auto",
        scale: float | None = None,
        sequence_parallel: bool = False,
        keep_gathered: bool = True,
        chunks: int | str = "auto",
        dtype: torch.dtype | None = None,
        init: Init = "default",
    ) -> None:
        super().__init__()
        self.ctx, self.sequence_parallel = ctx, sequence_parallel
        self.rope_base, self.grid, self.transport, self.kernel, self.scale = rope_base, grid, transport, kernel, scale
        check_options(grid, transport, kernel, scale, ctx.cp.size)
        if not 0.0 <= dropout < 1.0:
            raise Unsupported(f"ParallelSelfAttention: dropout={dropout} must lie in [0, 1)")
        self.dropout = dropout
        with deferred_init():
            self.qkv = QKVParallelLinear(
                hidden,
                num_heads,
                num_kv_heads,
                head_dim,
                ctx=ctx,
                bias=bias,
                gate=gate,
                sequence_parallel=sequence_parallel,
                keep_gathered=keep_gathered,
                chunks=chunks,
                dtype=dtype,
                init=init,
            )
            # Kept here: a user may put another module in the place of qkv.
            self.head_dim, self.reads, self.first_head = self.qkv.head_dim, self.qkv.reads, self.qkv.first_head
            norms = (RMSNorm(self.head_dim, ctx=ctx, sequence_parallel=True, dtype=dtype) for _ in range(2 * qk_norm))
            self.q_norm, self.k_norm = next(norms, None), next(norms, None)  # each tp rank sees other heads
            heads = num_heads, self.head_dim
            self.out = RowParallelLinear(
                heads,
                hidden,
                ctx=ctx,
                bias=bias,
                sequence_parallel=sequence_parallel,
                parts=self.qkv.shares.parts,
                chunks=chunks,
                dtype=dtype,
                init=init,
            )
        if rope_base is not None and self.head_dim % 2:
            raise Unsupported(f"rotary embedding turns pairs: head_dim={self.head_dim} must be even, or rope_base=None")
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
            raise Unsupported(f"ParallelSelfAttention needs an input [B, tokens, width], got {list(x.shape)}")
        agree_on_gradients(self, self.ctx.cp, self.ctx.tp, x=x)
        token_sizes = agreed_sizes(self, x, token_sizes)
        t = x.shape[1] if token_sizes is None else sum(token_sizes)
        layout = share_layout(self.ctx, t, layout)
        drops = None
        if self.training and self.dropout:
            if key is None:
                raise ValueError(f"ParallelSelfAttention: dropout={self.dropout} needs key=RandomKey(seed, step, first_sequence)")
            drops = self.dropout, replace(key, first_head=key.first_head + self.first_head)
        q, k, v, *gate = self.qkv(x, token_sizes)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_base is not None:
            positions = layout.positions(self.ctx.cp.rank).to(x.device)
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            cos, sin = rotary_angles(positions, self.head_dim, self.rope_base, wide)
            q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)  # of v: under autocast not that of x
        out = sequence_attention(
            q,
            k,
            v,
            ctx=self.ctx,
            mask=mask,
            layout=layout,
            grid=self.grid,
            transport=self.transport,
            scale=self.scale,
            kernel=self.kernel,
            kv_heads=self.reads,
            dropout=drops,
        )
        assert isinstance(out, Tensor)
        for numbers in gate:
            out = out * torch.sigmoid(numbers)[..., None]
        return self.out(out.flatten(2), token_sizes)


def share_layout(ctx: ParallelContext, t: int, layout: SequenceLayout | None) -> SequenceLayout:
    """The layout of this rank's t tokens: the given one, checked, or contiguous shares whose lengths are agreed.

    raises      Unsupported when t is not this rank's share, naming the function that makes shares
    """
    if layout is None:
        return SequenceLayout.of_lengths([row[0] for row in comm.agree([t], ctx.cp)])
    if layout.n != ctx.cp.size:
        raise Unsupported(f"{layout!r} is for {layout.n} ranks but cp={ctx.cp.size}; make it with n={ctx.cp.size}")
    need = layout.sizes[ctx.cp.rank]
    if t != need:
        whole = " (the whole sequence)" if t == layout.T else ""
        raise Unsupported(
            f"got {t} tokens{whole}, but {layout!r} gives rank {ctx.cp.rank} of cp {need} of {layout.T}; cut the whole with "
            "ctx.cp.shard(x, layout, dim=1)"
        )
    return layout


def tokens_over_tp(t: int, ctx: ParallelContext, sequence_parallel: bool) -> list[int] | None:
    """With sequence_parallel: how the t local tokens divide over tp, as equal as can be."""
    return split_sizes(t, ctx.tp.size) if sequence_parallel and ctx.tp.size > 1 else None
