"""A decoder: token embedding, blocks, norm, head over a divided vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tpattn.attention.layers import share_layout, tokens_over_tp
from tpattn.blocks import _NORMS, TransformerBlock, drop
from tpattn.embedding import VocabParallelEmbedding
from tpattn.errors import Unsupported
from tpattn.layout import AttentionGrid, SequenceLayout
from tpattn.linear import ColumnParallelLinear, check_counts
from tpattn.loss import linear_cross_entropy
from tpattn.masks import Mask, causal
from tpattn.mesh import ParallelContext
from tpattn.params import Init, agree_on_gradients, as_dtype, deferred_init, finish_init
from tpattn.random import RandomKey


class Transformer(nn.Module):
    """A causal language model whose weights are divided over tp and whose tokens are divided over cp.

    vocab_size          V; embedding and head hold v rows on each tp rank
    hidden ... norm     as in `TransformerBlock`
    num_layers          number of blocks
    tied                the head uses the embedding's weight
    seed                of the initial values, by (seed, full name, global index): the same model on any mesh; None = one draw
                        from torch's CPU generator, which must agree on all ranks
    dropout             of the embedding and of the residual branches, while training; forward then needs a key
    attention_dropout   of the softmax weights, while training; forward then needs a key
    dtype               of the parameters; compute_dtype that of the computation (None = the same)
    sequence_parallel   tokens are divided over tp between the linear layers
    keep_gathered, chunks   as in `ColumnParallelLinear`
    """

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn: int | None = None,
        activation: str = "swiglu",
        norm: str = "rmsnorm",
        tied: bool = False,
        seed: int | None = None,
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
        compute_dtype: torch.dtype | None = None,
        init: Init = "default",
    ) -> None:
        super().__init__()
        check_counts(self, vocab_size=vocab_size, hidden=hidden, num_layers=num_layers)
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise Unsupported(f"Transformer: seed={seed!r} must be an integer, or None for a draw from torch's generator")
        if not 0.0 <= dropout < 1.0:
            raise Unsupported(f"Transformer: dropout={dropout} must lie in [0, 1)")
        self.ctx, self.vocab_size, self.sequence_parallel, self.tied = ctx, vocab_size, sequence_parallel, tied
        self.dropout, self.compute_dtype = dropout, as_dtype(compute_dtype)
        with deferred_init():
            self.embedding = VocabParallelEmbedding(
                vocab_size, hidden, ctx=ctx, sequence_parallel=sequence_parallel, dtype=dtype, init=init
            )
            self.blocks = nn.ModuleList(
                TransformerBlock(
                    hidden,
                    num_heads,
                    num_kv_heads,
                    head_dim,
                    ffn,
                    activation,
                    norm,
                    ctx=ctx,
                    grid=grid,
                    transport=transport,
                    kernel=kernel,
                    rope_base=rope_base,
                    qk_norm=qk_norm,
                    gate=gate,
                    bias=bias,
                    dropout=dropout,
                    attention_dropout=attention_dropout,
                    sequence_parallel=sequence_parallel,
                    keep_gathered=keep_gathered,
                    chunks=chunks,
                    dtype=dtype,
                    init=init,
                )
                for _ in range(num_layers)
            )
            self.norm = _NORMS[norm](hidden, ctx=ctx, sequence_parallel=sequence_parallel, dtype=dtype)
            self.head = ColumnParallelLinear(
                hidden,
                vocab_size,
                ctx=ctx,
                bias=False,
                sequence_parallel=sequence_parallel,
                keep_gathered=keep_gathered,
                chunks=chunks,
                dtype=dtype,
                init=init,
            )
            if tied:
                self.head.weight = self.embedding.weight
        finish_init(self, ctx, seed)

    def forward(
        self, tokens: Tensor, *, mask: Mask | None = None, layout: SequenceLayout | None = None, key: RandomKey | None = None
    ) -> Tensor:
        """Logits [B, t, v], this tp rank's share of the vocabulary, for this cp rank's tokens [B, t].

        mask        None = causal
        layout      which positions each cp rank holds; None = contiguous, lengths agreed by one small all-gather
        key         random numbers of the dropout; needed in training when dropout > 0
        """
        x, token_sizes = self._before_head(tokens, mask, layout, key)
        return self.head(x, token_sizes)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        mask: Mask | None = None,
        layout: SequenceLayout | None = None,
        key: RandomKey | None = None,
        **options: Any,
    ) -> Tensor:
        """Sum of the cross entropy of this cp rank's tokens [B, t] against targets [B, t], the same on every tp rank.

        As `vocab_parallel_cross_entropy` of the logits, which are never made (nor is `head.forward` called).

        options     of `linear_cross_entropy`: ignore_index, label_smoothing, z_loss, token_weight, chunk, reduction
        """
        if not isinstance(self.head, ColumnParallelLinear):
            raise Unsupported(
                f"Transformer.loss needs the weight of a ColumnParallelLinear as head, got {type(self.head).__name__}; take "
                "vocab_parallel_cross_entropy of model(tokens)"
            )
        x, token_sizes = self._before_head(tokens, mask, layout, key)
        return linear_cross_entropy(
            x,
            self.head.local("weight"),
            targets,
            ctx=self.ctx,
            vocab_size=self.vocab_size,
            sequence_parallel=self.sequence_parallel,
            token_sizes=token_sizes,
            **options,
        )

    def _before_head(
        self, tokens: Tensor, mask: Mask | None, layout: SequenceLayout | None, key: RandomKey | None
    ) -> tuple[Tensor, list[int] | None]:
        """The input of the head [B, t, M], and under sequence_parallel [B, t', M] with the tokens of each tp rank."""
        mask = causal() if mask is None else mask
        layout = share_layout(self.ctx, tokens.shape[1], layout)
        agree_on_gradients(self, self.ctx.cp, self.ctx.tp, tokens=tokens)
        token_sizes = tokens_over_tp(tokens.shape[1], self.ctx, self.sequence_parallel)
        x = self.embedding(tokens, self.compute_dtype)
        x = drop(self, x, self.dropout, self.ctx, layout, token_sizes, key and key.child("embedding_dropout"))
        for i, block in enumerate(self.blocks):
            x = block(x, mask=mask, layout=layout, key=key and key.child(f"blocks.{i}"), token_sizes=token_sizes)
        return self.norm(x), token_sizes
