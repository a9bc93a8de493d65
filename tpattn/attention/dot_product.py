"""`DistributedDotProductAttn`, the attention module of the first seed: its constructor, its forward, its mathematics.

Owns the four projections and the seed's order of things: rows are keys, the softmax runs over queries. Leaves the attention to
`sequence_attention`, or to the products when the scores are asked for. Letters: t keys and s queries of this rank, S queries on
all ranks, D = key_dim / num_heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from tpattn import comm, masks
from tpattn.attention.engine import sequence_attention
from tpattn.errors import Unsupported
from tpattn.layout import AttentionGrid, SequenceLayout
from tpattn.mesh import ParallelContext
from tpattn.products import distributed_matmul_all, distributed_matmul_nt

_Layouts = tuple[SequenceLayout, SequenceLayout]  # of keys, of queries


class DistributedDotProductAttn(torch.nn.Module):
    """Multi-head attention with the tokens shared over ranks: softmax(K Q^T / sqrt(D), over all queries) V, then `composition`.

    As the original defines it, and unlike most attention: the rows of the result are this rank's *keys*, the softmax runs over
    the last axis of K Q^T, which are the queries of all ranks, and V belongs to the queries. For self-attention in the usual
    words pass queries where the signature says keys, and the other way round.

    key_dim         width of keys, divided by num_heads; queries are projected to it
    value_dim       width of values and of the result, divided by num_heads; None = key_dim
    query_dim       width of queries; None = key_dim
    add_bias        whether the projections have a bias
    offset          most rows or columns in one message of the products; matters with build_scores only
    distributed     False: ordinary attention of one process over the tensors it is given, nothing is sent
    ctx             tokens are shared over ctx.cp; None = over all processes, or this one alone without a process group
    build_scores    True: the scores [B, H, t, S] are built, by the products nt and all. False gives the same result blockwise
                    and never holds them
    parameters      keys [key_dim, key_dim], queries [key_dim, query_dim], values and composition [value_dim, value_dim]:
                    ordinary Linear modules, whole on every rank, so seed all ranks alike before making the module. After
                    backward each .grad is the part of this rank's tokens: sum it over the ranks before the optimizer's step
                    (finish_gradients does in a model that has layers of tpattn with the same ctx)
    raises          Unsupported (a ValueError) for sizes that do not fit
    source          the package distributed-dot-product
    """

    def __init__(
        self,
        key_dim: int,
        value_dim: int | None = None,
        query_dim: int | None = None,
        num_heads: int = 1,
        add_bias: bool = False,
        offset: int = 32,
        distributed: bool = True,
        *,
        ctx: ParallelContext | None = None,
        build_scores: bool = False,
    ) -> None:
        super().__init__()
        self.key_dim = key_dim
        self.value_dim = key_dim if value_dim is None else value_dim
        self.query_dim = key_dim if query_dim is None else query_dim
        self.num_heads, self.offset, self.distributed = num_heads, offset, distributed
        self.ctx, self.build_scores = ctx, build_scores
        sizes = {"key_dim": key_dim, "value_dim": self.value_dim, "query_dim": self.query_dim}
        sizes |= {"num_heads": num_heads, "offset": offset}
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise Unsupported(f"DistributedDotProductAttn: {name}={size!r} must be an integer >= 1")
        for name in ("key_dim", "value_dim"):
            if sizes[name] % num_heads:
                fits = [n for n in range(1, num_heads + 1) if key_dim % n == 0 and self.value_dim % n == 0]
                raise Unsupported(
                    f"DistributedDotProductAttn: num_heads={num_heads} does not divide {name}={sizes[name]}; num_heads could be "
                    f"{', '.join(map(str, fits))}"
                )
        self.keys = torch.nn.Linear(key_dim, key_dim, bias=add_bias)
        self.queries = torch.nn.Linear(self.query_dim, key_dim, bias=add_bias)
        self.values = torch.nn.Linear(self.value_dim, self.value_dim, bias=add_bias)
        self.composition = torch.nn.Linear(self.value_dim, self.value_dim, bias=add_bias)

    def forward(self, keys: Tensor, queries: Tensor, values: Tensor, attn_mask: Tensor | None) -> Tensor:
        """This rank's rows of the attention: [B, t, value_dim].

        keys        [B, t, key_dim]     this rank's rows; t may differ between ranks
        queries     [B, s, query_dim]   this rank's queries; s may differ from t
        values      [B, s, value_dim]
        attn_mask   [B, t, S] or [1, t, S], any dtype, nonzero = hidden; columns are the queries of all ranks in rank order. None
                    hides nothing. A row with everything hidden gives 0 before `composition`
        raises      Unsupported (a ValueError) on every rank, before a row is sent
        """
        if not self.distributed:
            axis = comm.Group("local", (0,), 0)
        else:
            axis = comm.group_of() if self.ctx is None else self.ctx.cp
        layouts, hidden = self._agree(keys, queries, values, attn_mask, axis)
        k = rearrange(self.keys(keys), "B t (H D) -> B t H D", H=self.num_heads)
        q = rearrange(self.queries(queries), "B s (H D) -> B s H D", H=self.num_heads)
        v = rearrange(self.values(values), "B s (H E) -> B s H E", H=self.num_heads)
        if self.build_scores:
            out = self._with_scores(k, q, v, hidden, axis)
        else:
            out = self._blockwise(k, q, v, hidden, layouts, axis)
        return self.composition(rearrange(out, "B t H E -> B t (H E)"))

    def _agree(
        self, keys: Tensor, queries: Tensor, values: Tensor, attn_mask: Tensor | None, axis: comm.Group
    ) -> tuple[_Layouts, Tensor | None]:
        """Who holds which rows and columns, and the mask when any rank hides anything: by one small all-gather."""
        widths = {"keys": self.key_dim, "queries": self.query_dim, "values": self.value_dim}
        for (name, width), x in zip(widths.items(), (keys, queries, values), strict=True):
            if x.dim() != 3 or x.shape[-1] != width:
                raise Unsupported(f"{name} must be [B, tokens, {width}], got {list(x.shape)}")
        (B, t, _), s = keys.shape, queries.shape[1]
        if queries.shape[0] != B or values.shape[:2] != queries.shape[:2]:
            got = ", ".join(str(list(x.shape)) for x in (keys, queries, values))
            raise Unsupported(f"needs keys [B, t, ..], queries [B, s, ..] and values [B, s, ..], got {got}")
        if attn_mask is not None and (attn_mask.dim() != 3 or attn_mask.shape[:2] not in ((B, t), (1, t))):
            raise Unsupported(f"attn_mask must be [B, t, S] = [{B}, {t}, queries of all ranks], got {list(attn_mask.shape)}")
        hidden = None if attn_mask is None else attn_mask != 0
        hides = 0 if hidden is None else int(hidden.any())
        table = comm.agree([B, t, s, -1 if hidden is None else hidden.shape[2], hides], axis)
        batches, rows, columns, mask_columns, hide = ([row[i] for row in table] for i in range(5))
        if len(set(batches)) > 1:
            raise Unsupported(f"the batch must be the same on every rank of {axis.name}, got {batches}")
        S = sum(columns)
        if any(width not in (-1, S) for width in mask_columns):
            raise Unsupported(
                f"attn_mask must have a column for each query of all ranks, {' + '.join(map(str, columns))} = {S}, but has "
                f"{mask_columns} on ranks 0 to {axis.size - 1} of {axis.name} (-1 = no mask)"
            )
        if not any(hide):
            hidden = None
        elif hidden is None:  # others hide something, and all ranks run the same plan
            hidden = torch.zeros(1, t, S, dtype=torch.bool, device=keys.device)
        return (SequenceLayout.of_lengths(rows), SequenceLayout.of_lengths(columns)), hidden

    def _blockwise(self, k: Tensor, q: Tensor, v: Tensor, hidden: Tensor | None, layouts: _Layouts, axis: comm.Group) -> Tensor:
        """The attention of k [B, t, H, D] over q [B, s, H, D] and v [B, s, H, E], without its scores: [B, t, H, E]."""
        rows, columns = layouts
        if hidden is None:
            out = sequence_attention(k, q, v, ctx=_Axis(axis), layout=rows, kv_layout=columns)
        else:  # a ring: rows stay, and with them the table, which would be the largest message by far
            mask, grid = masks.dense(~hidden[:, None]), AttentionGrid(ring=axis.size)
            out = sequence_attention(k, q, v, ctx=_Axis(axis), mask=mask, layout=rows, kv_layout=columns, grid=grid)
        assert isinstance(out, Tensor)
        return out

    def _with_scores(self, k: Tensor, q: Tensor, v: Tensor, hidden: Tensor | None, axis: comm.Group) -> Tensor:
        """The same by the products."""
        k, q, v = (x.transpose(1, 2) for x in (k / math.sqrt(k.shape[-1]), q, v))
        scores_BHtS = distributed_matmul_nt(k, q, self.offset, axis)
        if hidden is None:
            weights_BHtS = scores_BHtS.softmax(-1)
        else:
            hidden = hidden[:, None]  # for all heads
            empty = hidden.all(-1, keepdim=True)  # such a row would be 0 / 0
            scores_BHtS = scores_BHtS.masked_fill(hidden, -torch.inf).masked_fill(empty, 0)
            weights_BHtS = scores_BHtS.softmax(-1).masked_fill(empty, 0)
        return distributed_matmul_all(weights_BHtS, v, self.offset, axis).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, distributed={self.distributed}, build_scores={self.build_scores}"


@dataclass(frozen=True)
class _Axis:
    """A context with nothing but the ranks that share the tokens."""

    cp: comm.Group
