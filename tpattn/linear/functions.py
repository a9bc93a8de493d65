"""Products with a divided weight: the seed's two functions, and the two of the layers, which hide messages behind products.

A column-divided product takes an input that all tp ranks share and gives each its outputs; a row-divided one takes such outputs
and sums. Under `sequence_parallel` tokens are divided over tp outside: all-gather in front, reduce-scatter behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tpattn import comm
from tpattn.errors import Unsupported
from tpattn.kernels import fast_on_cpu
from tpattn.layout import chunk_sizes, split_sizes

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


# ---- the layers' products --------------------------------------------------------------------------------------------------


def column_product(
    x: Tensor,
    weights: Sequence[tuple[Tensor, Tensor | None]],
    tp: comm.Group,
    sequence_parallel: bool = False,
    token_sizes: Sequence[int] | None = None,
    *,
    keep: bool = True,
    chunks: int = 1,
) -> list[Tensor]:
    """This rank's outputs x W^T + b for each (weight, bias) of an input that all tp ranks share.

    x           [.., I] the same on every tp rank; with sequence_parallel a token shard [.., t', I], which is gathered first
    weights     [o, I] and [o], this rank's rows
    token_sizes tokens of each tp rank; None = agreed by one small all-gather
    keep        with sequence_parallel: keep the gathered input for backward; False: keep the shard and gather it again
    chunks      with sequence_parallel: in how many pieces tokens travel, each behind the product of the one before
    returns     [.., o] for each weight
    gradient    of x: summed over tp (its token shard), in one message that travels while the weights' gradients are computed
    """
    x, params = _as_autocast(x, [p for pair in weights for p in pair])
    if tp.size == 1:
        return [_linear(x, w, b) for w, b in zip(params[::2], params[1::2], strict=True) if w is not None]
    sizes = comm.share_sizes(x, token_dim(x), token_sizes, tp)[1] if sequence_parallel else None
    return list(_apply(_Column, x, tp, sizes, keep, chunks, *params))


def row_product(
    x: Tensor,
    weight: Tensor,
    tp: comm.Group,
    sequence_parallel: bool = False,
    token_sizes: Sequence[int] | None = None,
    *,
    chunks: int = 1,
) -> Tensor:
    """x W^T summed over tp, for this rank's features x [.., i] and its columns of the weight [O, i].

    token_sizes with sequence_parallel: tokens of each tp rank's shard; None = as equal as can be
    chunks      in how many pieces tokens are computed; the sum of each travels behind the product of the next
    returns     [.., O] on every tp rank; with sequence_parallel this rank's token shard [.., t', O]
    gradient    of x: nothing is sent (with sequence_parallel the upstream gradient is gathered)
    """
    x, (given,) = _as_autocast(x, [weight])
    assert given is not None
    if tp.size == 1:
        return _linear(x, given)
    sizes = comm.whole_sizes(x, token_dim(x), token_sizes, tp)[1] if sequence_parallel else None
    return _apply(_Row, x, given, tp, sizes, chunks)


@comm.not_compiled
def _apply(product: type[torch.autograd.Function], *arguments: Any) -> Any:
    return product.apply(*arguments)


def _as_autocast(x: Tensor, params: Sequence[Tensor | None]) -> tuple[Tensor, list[Tensor | None]]:
    """The tensors in autocast's dtype where it is on: the products below are no single operation that it could cast."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return x, list(params)
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), [p if p is None else p.to(dtype) for p in params]


def _arrive(
    x: Tensor, sizes: Sequence[int], tp: comm.Group, chunks: int, direction: str
) -> Iterator[tuple[Tensor, list[tuple[int, int]]]]:
    """Token shards x [.., t', M] of all tp ranks in `chunks` pieces, each started before the one before is handed out.

    Yields one piece of every rank's shard, end to end, and the rows of the whole where each belongs.
    """
    dim = token_dim(x)
    edges = [_edges(size, chunks) for size in sizes]
    first = [sum(sizes[:r]) for r in range(len(sizes))]

    def start(j: int) -> Callable[[], list[Tensor]]:
        a, b = edges[tp.rank][j]
        shapes = [[*x.shape[:dim], stop - begin, *x.shape[dim + 1 :]] for begin, stop in (e[j] for e in edges)]
        return comm.start_gather(x.narrow(dim, a, b - a), shapes, tp, direction=direction)

    wait = start(0)
    for j in range(chunks):
        parts = wait()
        if j + 1 < chunks:
            wait = start(j + 1)
        yield torch.cat(parts, dim=dim), [(f + e[j][0], f + e[j][1]) for f, e in zip(first, edges, strict=True)]


def _edges(size: int, chunks: int) -> list[tuple[int, int]]:
    stops = list(accumulate(split_sizes(size, chunks)))
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _place(whole: Tensor | None, block: Tensor, rows: list[tuple[int, int]], T: int) -> Tensor:
    """`whole` [.., T, M] with the block's tokens at their rows; the block itself when it is all of them."""
    dim = token_dim(block)
    if block.shape[dim] == T:
        return block
    if whole is None:
        whole = block.new_empty([*block.shape[:dim], T, *block.shape[dim + 1 :]])
    for (a, b), piece in zip(rows, block.split([b - a for a, b in rows], dim=dim), strict=True):
        whole.narrow(dim, a, b - a).copy_(piece)
    return whole


def _weight_gradient(g: Tensor, x: Tensor) -> Tensor:
    """g^T x over all tokens: [.., o] and [.., i] -> [o, i]."""
    return _product(g.reshape(-1, g.shape[-1]).mT, x.reshape(-1, x.shape[-1]))


def _linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """F.linear, as `_product` computes."""
    if not _slow(x):
        return F.linear(x, w, b)
    return F.linear(x.float(), w.float(), None if b is None else b.float()).to(x.dtype)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, in float32 and rounded once where the CPU has no products in this dtype: torch's are 5 to 90 times slower."""
    return (x.float() @ y.float()).to(x.dtype) if _slow(x) else x @ y


def _slow(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and not fast_on_cpu(x.dtype)


class _Column(torch.autograd.Function):
    """replicate -> shard (of features), or token shards -> feature shards: product, after an all-gather of tokens.

    Gradient of the input: all-reduce, or reduce-scatter to token shards, while the gradients of the weights are computed.
    """

    @staticmethod
    def forward(
        node: Any, x: Tensor, tp: comm.Group, sizes: list[int] | None, keep: bool, chunks: int, *params: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = params[::2], params[1::2]
        node.set_materialize_grads(False)
        node.saved = tp, sizes, [b is not None for b in biases]
        if sizes is None:
            node.save_for_backward(x, *weights)
            return tuple(_linear(x, w, b) for w, b in zip(weights, biases, strict=True) if w is not None)
        outs: list[Any] = [None] * len(weights)
        whole = None
        for block, rows in _arrive(x, sizes, tp, chunks, "forward"):
            for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
                assert w is not None
                outs[i] = _place(outs[i], _linear(block, w, b), rows, sum(sizes))
            whole = _place(whole, block, rows, sum(sizes)) if keep else None
        node.save_for_backward(x if whole is None else whole, *weights)
        node.again = whole is None
        return tuple(outs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(node: Any, *gs: Tensor | None) -> Any:
        (x, *weights), (tp, sizes, biased) = node.saved_tensors, node.saved
        dim, wanted = token_dim(x) if sizes else 0, node.needs_input_grad
        arriving = None
        if sizes and node.again and any(wanted[5::2]):
            shapes = [[*x.shape[:dim], n, *x.shape[dim + 1 :]] for n in sizes]
            arriving = comm.start_gather(x, shapes, tp, direction="backward")
        finish = None
        if wanted[0] and (parts := [_product(g, w) for g, w in zip(gs, weights, strict=True) if g is not None]):
            d = parts[0]
            for part in parts[1:]:
                d += part
            if sizes:
                finish = comm.start_reduce_scatter(d.split(sizes, dim=dim), tp, direction="backward")
            else:
                finish = comm.start_all_reduce(d, tp, direction="backward")
        if arriving is not None:
            x = torch.cat(arriving(), dim=dim)
        grads: list[Tensor | None] = []
        for i, (g, has_bias) in enumerate(zip(gs, biased, strict=True)):
            grads.append(_weight_gradient(g, x) if g is not None and wanted[5 + 2 * i] else None)
            grads.append(g.reshape(-1, g.shape[-1]).sum(0) if g is not None and has_bias and wanted[6 + 2 * i] else None)
        return finish() if finish else None, None, None, None, None, *grads


class _Row(torch.autograd.Function):
    """shard (of features) -> invariant: product, then all-reduce; or -> token shards: product, then reduce-scatter.

    Gradient: nothing is sent; or the token shards of the upstream gradient are gathered.
    """

    @staticmethod
    def forward(node: Any, x: Tensor, weight: Tensor, tp: comm.Group, sizes: list[int] | None, chunks: int) -> Tensor:
        node.save_for_backward(x, weight)
        node.saved = tp, sizes, chunks
        if sizes is None and chunks == 1:
            return comm.all_reduce(_linear(x, weight), tp)
        dim = token_dim(x)
        waits: list[Callable[[], Tensor]] = []
        if sizes is None:
            for piece in x.split(split_sizes(x.shape[dim], chunks), dim=dim):
                waits.append(comm.start_all_reduce(_linear(piece, weight), tp))
        elif chunks == 1:
            waits.append(comm.start_reduce_scatter(_linear(x, weight).split(sizes, dim=dim), tp))
        else:
            shares, edges = x.split(sizes, dim=dim), [_edges(size, chunks) for size in sizes]
            for j in range(chunks):
                mine = [share.narrow(dim, e[j][0], e[j][1] - e[j][0]) for share, e in zip(shares, edges, strict=True)]
                waits.append(comm.start_reduce_scatter([_linear(piece, weight) for piece in mine], tp))
        return torch.cat([wait() for wait in waits], dim=dim) if len(waits) > 1 else waits[0]()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(node: Any, g: Tensor) -> Any:
        (x, weight), (tp, sizes, chunks) = node.saved_tensors, node.saved
        if sizes is None:
            blocks: Any = [(g, None)]
        else:
            blocks = _arrive(g, sizes, tp, chunks, "backward")
        dx = dw = None
        for block, rows in blocks:
            if rows is None or block.shape == (*x.shape[:-1], block.shape[-1]):
                here = x
            else:
                here = torch.cat([x.narrow(token_dim(x), a, b - a) for a, b in rows], dim=token_dim(x))
            if node.needs_input_grad[0]:
                d = _product(block, weight)
                dx = d if rows is None else _place(dx, d, rows, x.shape[token_dim(x)])
            if node.needs_input_grad[1]:
                d = _weight_gradient(block, here)
                dw = d if dw is None else dw.add_(d)
        return dx, dw, None, None, None


def enter(x: Tensor, tp: comm.Group, sequence_parallel: bool, token_sizes: Sequence[int] | None) -> Tensor:
    """The input of a column-divided product: all tokens, on every tp rank. Gradient: summed over tp."""
    if sequence_parallel:
        return comm.gather_sum(x, tp, token_dim(x), token_sizes)
    return comm.replicate(x, tp)


def leave(y: Tensor, tp: comm.Group, sequence_parallel: bool, token_sizes: Sequence[int] | None = None) -> Tensor:
    """The output of a row-divided product: the sum over tp, whole or as this rank's token shard (None = as equal as can be)."""
    return comm.scatter_sum(y, tp, token_dim(y), token_sizes) if sequence_parallel else comm.reduce(y, tp)


def token_dim(x: Tensor) -> int:
    """The dimension of the tokens of [.., t, M], from the front."""
    if x.dim() < -_TOKENS:
        raise Unsupported(f"sequence_parallel divides tokens: it needs [.., tokens, width], got {list(x.shape)}")
    return x.dim() + _TOKENS
