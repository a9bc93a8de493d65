"""Token embedding with the vocabulary divided over tp."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tpattn.errors import Unsupported
from tpattn.layout import chunk_sizes
from tpattn.linear import check_counts, leave
from tpattn.mesh import ParallelContext
from tpattn.params import Init, ShardedModule, agree_on_gradients, finish_init, weight_fill


class VocabParallelEmbedding(ShardedModule):
    """The rows of a [V, M] table at the given ids; each tp rank holds v rows and adds 0 for the others' ids.

    num_embeddings      V, by torch.chunk's rule; any number that gives each rank a row
    embedding_dim       M, not divided
    sequence_parallel   the output is this rank's token shard over tp
    init                "default" is torch.nn.Embedding's own: standard normal
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        ctx: ParallelContext,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        init: Init = "default",
    ) -> None:
        super().__init__(ctx, dtype)
        check_counts(self, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.num_embeddings, self.embedding_dim, self.sequence_parallel = num_embeddings, embedding_dim, sequence_parallel
        fill = ("normal", 1.0) if init == "default" else weight_fill(init, embedding_dim, num_embeddings)
        self.add_parameter("weight", (num_embeddings, embedding_dim), dim=0, fill=fill)
        finish_init(self, ctx)

    def forward(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """ids [B, t] int64, the same on every tp rank -> [B, t, M] the same on every tp rank (a token shard [B, t', M]).

        dtype       of the output and of all computation behind it; None = that of the weight
        raises      Unsupported for an id outside the vocabulary
        """
        if ids.dtype not in (torch.int64, torch.int32) or ids.dim() < 1:
            raise Unsupported(f"VocabParallelEmbedding needs integer ids [B, t], got {ids.dtype} {list(ids.shape)}")
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self.num_embeddings):
            raise Unsupported(
                f"an id lies outside the vocabulary of {self.num_embeddings}: smallest {int(ids.min())}, largest {int(ids.max())}"
            )
        agree_on_gradients(self, self.ctx.tp)
        tp, weight = self.ctx.tp, self.local("weight", dtype)
        if tp.size == 1:
            return F.embedding(ids, weight)
        start = sum(chunk_sizes(self.num_embeddings, tp.size)[: tp.rank])
        own = (ids >= start) & (ids < start + weight.shape[0])
        rows = F.embedding(torch.where(own, ids - start, 0), weight)
        return leave(
            torch.where(own[..., None], rows, torch.zeros((), dtype=rows.dtype, device=rows.device)), tp, self.sequence_parallel
        )
