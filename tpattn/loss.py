"""Cross entropy over a vocabulary divided over tp, as sums, from logits or fused with their linear layer; and means.

Letters: V the vocabulary, v this rank's share of it, n rows of logits, each of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpattn import comm
from tpattn.errors import TpattnError, Unsupported
from tpattn.layout import chunk_sizes, split_sizes
from tpattn.linear import enter
from tpattn.mesh import ParallelContext
from tpattn.params import require_gathered, to_local

# ---- the loss of some rows, and its gradient: what both functions below share ----------------------------------------------


@dataclass(frozen=True)
class _Task:
    """What is the same for all rows: the vocabulary and the options. `start` is the first id of this rank's columns."""

    tp: comm.Group
    start: int
    V: int
    smoothing: float
    z_loss: float


@dataclass(frozen=True)
class _Rows:
    """What the loss of some rows leaves for their gradient; each [n].

    shift       exp(x - shift) was formed, and is exp(shift - lse) short of the probabilities
    lse         over the whole vocabulary
    column      of the target in this rank's share, 0 where it is not `own`
    factor      of the token
    """

    shift: Tensor
    lse: Tensor
    own: Tensor
    column: Tensor
    factor: Tensor


def _losses(x: Tensor, e: Tensor, ids: Tensor, factor: Tensor, task: _Task) -> tuple[Tensor, _Rows]:
    """The losses [n] of rows of logits, by one all-gather over tp of each rank's lse and target logit (and sum, to smooth).

    x           [n, v] this rank's columns, float32 or wider
    e           [n, v] becomes exp(x - shift); may be x itself
    """
    shift = x.amax(-1)
    shift = torch.where(shift == -torch.inf, 0.0, shift)
    own = (ids >= task.start) & (ids < task.start + x.shape[-1])
    column = torch.where(own, ids - task.start, 0)
    picked = torch.where(own, x.gather(-1, column[:, None])[:, 0], 0.0)
    sums = [x.sum(-1)] if task.smoothing else []
    torch.sub(x, shift[:, None], out=e).exp_()
    part = torch.stack([shift + e.sum(-1).log(), picked, *sums])
    parts = torch.stack(comm.all_gather(part, [part.shape] * task.tp.size, task.tp))
    lse, picked = parts[:, 0].logsumexp(0), parts[:, 1].sum(0)
    loss = (1.0 - task.smoothing) * (lse - picked) + task.z_loss * lse**2
    if task.smoothing:
        loss = loss + task.smoothing * (lse - parts[:, 2].sum(0) / task.V)
    loss = torch.where(factor == 0, 0.0, loss * factor)  # an ignored token may stand on a logit of -inf
    return loss, _Rows(shift, lse, own, column, factor)


def _into_gradient(e: Tensor, rows: _Rows, task: _Task) -> None:
    """Turn e = exp(x - shift) [n, v] into the gradient of the sum of the losses with regard to x, in place."""
    share = torch.exp(rows.shift - rows.lse) * (1.0 + 2.0 * task.z_loss * rows.lse)
    e *= (share * rows.factor)[:, None]
    if task.smoothing:
        e -= (task.smoothing / task.V * rows.factor)[:, None]
    e.scatter_add_(-1, rows.column[:, None], torch.where(rows.own, (task.smoothing - 1.0) * rows.factor, 0.0)[:, None])


def _prepare(
    name: str,
    x: Tensor,
    target: Tensor,
    *,
    ctx: ParallelContext,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    token_weight: Tensor | None,
    reduction: str,
) -> tuple[_Task, Tensor, Tensor]:
    """The task, the ids [n] (0 for ignored tokens) and the factors [n] (0 for them), after every check but that of shapes."""
    ctx.tp.require_open()
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or vocab_size < 1:
        raise Unsupported(f"{name}: vocab_size={vocab_size!r} must be a positive integer")
    sizes = chunk_sizes(vocab_size, ctx.tp.size)
    if sizes[-1] == 0:
        raise Unsupported(f"{name}: vocab_size={vocab_size} over tp={ctx.tp.size} gives {sizes}: a rank would hold none")
    if target.dtype not in (torch.int64, torch.int32) or not x.is_floating_point():
        raise Unsupported(f"{name} needs float input and integer targets, got {x.dtype} and {target.dtype}")
    if reduction not in ("none", "sum"):
        raise Unsupported(
            f"reduction={reduction!r} must be none or sum; for the mean over all counted tokens use tpattn.token_mean"
        )
    if not 0.0 <= label_smoothing <= 1.0 or not 0.0 <= z_loss < float("inf"):
        raise Unsupported(f"label_smoothing={label_smoothing} must lie in [0, 1] and z_loss={z_loss} must be at least 0")
    if token_weight is not None and token_weight.shape != target.shape:
        raise Unsupported(f"token_weight must be {list(target.shape)} as the targets, got {list(token_weight.shape)}")
    counted = target != ignore_index
    outside = counted & ((target < 0) | (target >= vocab_size))
    if target.numel() and bool(outside.any()):
        raise Unsupported(
            f"target {int(target[outside][0])} lies outside the vocabulary of {vocab_size} (and is not ignore_index="
            f"{ignore_index})"
        )
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    factor = counted.to(wide) if token_weight is None else counted * token_weight.detach().to(wide)
    task = _Task(ctx.tp, sum(sizes[: ctx.tp.rank]), vocab_size, float(label_smoothing), float(z_loss))
    return task, torch.where(counted, target, 0).reshape(-1).long(), factor.reshape(-1)


# ---- from logits -----------------------------------------------------------------------------------------------------------


class _CrossEntropy(torch.autograd.Function):
    """Per-token loss of this rank's share of the logits: all-gather of each rank's sums; gradient: nothing, own share."""

    @staticmethod
    def forward(node: Any, logits: Tensor, ids: Tensor, factor: Tensor, task: _Task) -> Tensor:
        x = logits.to(factor.dtype)
        loss, rows = _losses(x, torch.empty_like(x) if x is logits else x, ids, factor, task)
        node.save_for_backward(logits, rows.lse, rows.own, rows.column, factor)
        node.task = task
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(node: Any, g: Tensor) -> Any:
        logits, lse, own, column, factor = node.saved_tensors
        e = torch.sub(logits, lse[:, None]).exp_()
        _into_gradient(e, _Rows(lse, lse, own, column, g.to(e.dtype) * factor), node.task)
        return e.to(logits.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ctx: ParallelContext,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    reduction: str = "sum",
) -> Tensor:
    """Cross entropy of logits whose last dimension is divided over tp; the same on every tp rank.

    logits          [.., v], this rank's share of the V columns (torch.chunk's rule), any float; computed in float32 or wider
    target          [..] int64, ids of the whole vocabulary; `ignore_index` counts 0
    label_smoothing as torch's: that share of the target is spread over all V
    z_loss          adds z_loss * lse^2 per token (0 for ignored ones), which keeps the normaliser near 1
    token_weight    [..] factors of the tokens' losses, without gradient
    reduction       "none" -> [..]; "sum" -> scalar over this rank's tokens. The mean over all ranks is `token_mean`
    sends           one all-gather of 2 numbers per token (3 with label_smoothing), in float32 or wider
    raises          Unsupported for shapes, ids or options that do not fit
    source          Megatron-LM: Shoeybi et al., arXiv:1909.08053, section 3; z-loss: PaLM, arXiv:2204.02311
    """
    task, ids, factor = _prepare(
        "vocab_parallel_cross_entropy", logits, target, ctx=ctx, vocab_size=vocab_size, ignore_index=ignore_index,
        label_smoothing=label_smoothing, z_loss=z_loss, token_weight=token_weight, reduction=reduction,
    )  # fmt: skip
    v = chunk_sizes(vocab_size, ctx.tp.size)[ctx.tp.rank]
    if logits.dim() < 1 or logits.shape[-1] != v or logits.shape[:-1] != target.shape:
        raise Unsupported(
            f"vocab_parallel_cross_entropy: vocab_size={vocab_size} over tp={ctx.tp.size} gives rank {ctx.tp.rank} logits "
            f"[.., {v}] with targets [..], got {list(logits.shape)} and {list(target.shape)}"
        )
    loss = _CrossEntropy.apply(logits.reshape(-1, v), ids, factor, task)
    return loss.sum() if reduction == "sum" else loss.view(target.shape)


# ---- fused with the linear head --------------------------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the losses of x W^T + b; its gradients are formed on the way, for 1 upstream, and scaled in backward.

    The gradient of x is this rank's columns' part.
    """

    @staticmethod
    def forward(
        node: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, factor: Tensor, task: _Task, chunk: int
    ) -> Tensor:
        node.dtypes = [None if p is None else p.dtype for p in (x, weight, bias)]
        losses, node.gradients = _over_chunks(x, weight, bias, ids, factor, task, chunk, node.needs_input_grad[:3])
        return losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(node: Any, g: Tensor) -> Any:
        if node.gradients is None:
            raise TpattnError(
                "linear_cross_entropy: its gradients are made once, in forward, and the first backward has taken them; call it "
                "again, or use vocab_parallel_cross_entropy for several backward passes through one loss"
            )
        gradients, node.gradients = node.gradients, None  # given away: they are scaled in place
        ours = [None if d is None else d.mul_(g).to(dtype) for d, dtype in zip(gradients, node.dtypes, strict=True)]
        return *ours, None, None, None, None


def _over_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    factor: Tensor,
    task: _Task,
    chunk: int,
    wants: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """Losses [T] of x [T, M], weight [v, M] and bias [v], and the gradients of their sum that are wanted, in the factors' dtype.

    Products are in the dtype of x. At most `chunk` rows of logits exist at a time, in one buffer that becomes their gradient.
    """
    (T, M), (v, _), wide = x.shape, weight.shape, factor.dtype
    sizes = split_sizes(T, -(-T // chunk))
    w = weight.detach().to(x.dtype)
    dx, dw, db = (
        torch.zeros(p.shape, dtype=wide, device=x.device) if p is not None and wanted else None
        for p, wanted in zip((x, weight, bias), wants, strict=True)
    )
    buffer = torch.empty((max(sizes, default=0), v), dtype=wide, device=x.device)
    losses, start = [torch.empty(0, dtype=wide, device=x.device)], 0
    for n in sizes:
        here, logits = slice(start, start + n), buffer[:n]
        _product(x[here], w.t(), logits)
        if bias is not None:
            logits += bias.detach()
        loss, rows = _losses(logits, logits, ids[here], factor[here], task)
        losses.append(loss)
        if dx is not None or dw is not None or db is not None:
            _into_gradient(logits, rows, task)
            d = logits.to(x.dtype)
            if dx is not None:
                _product(d, w, dx[here])
            if dw is not None:
                _add_product(d.t(), x[here], dw, n * v // max(1, M))
            if db is not None:
                db += logits.sum(0)
        start += n
    return torch.cat(losses), [dx, dw, db]


def _default_chunk(T: int, v: int, tp: int) -> int:
    """Tokens of a chunk: 2^23 logits (32 MiB), at least 256 tokens, but no more than V x T / 16; never below 64 or 2^18 logits.

    Larger ones waste memory; with smaller ones each addition to the gradient of the weight costs more than its product.
    """
    return max(64, 2**18 // v, min(max(256, 2**23 // v), T * tp // 16))


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b, summed in the dtype of out where the device can: on the CPU a low-precision product is rounded first."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(_wide_product(a, b, out.dtype))


def _add_product(a: Tensor, b: Tensor, out: Tensor, rows: int) -> None:
    """out += a b; where it cannot be done in place, `rows` rows at a time."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        for part, total in zip(a.split(max(1, rows)), out.split(max(1, rows)), strict=True):
            total += _wide_product(part, b, out.dtype)


def _wide_product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    return torch.mm(a, b, out_dtype=wide) if a.is_cuda else torch.mm(a, b)  # no CPU kernel for out_dtype (torch 2.13)


def _check_shapes(
    x: Tensor, w: Tensor, b: Tensor | None, target: Tensor, vocab_size: int, tp: comm.Group, sequence_parallel: bool
) -> None:
    """Raise Unsupported where x, this rank's weight and bias, the targets and the vocabulary do not fit each other."""
    name, v = "linear_cross_entropy", chunk_sizes(vocab_size, tp.size)[tp.rank]
    if x.dim() < 1 + sequence_parallel or x.dim() != target.dim() + 1:
        needed = "[.., tokens, width]" if sequence_parallel else "[.., width]"
        raise Unsupported(f"{name} needs x {needed} and targets of one dimension less, got {list(x.shape)}, {list(target.shape)}")
    alike = x.dim() - 1 - sequence_parallel  # leading dimensions of x and target; a token shard is checked with token_sizes
    if x.shape[:alike] != target.shape[:alike] or w.shape != (v, x.shape[-1]) or not w.is_floating_point():
        raise Unsupported(
            f"{name}: vocab_size={vocab_size} over tp={tp.size} gives rank {tp.rank} a float weight [{v}, M], here "
            f"[{v}, {x.shape[-1]}], with x [.., M] and targets [..], got {w.dtype} {list(w.shape)}, x {list(x.shape)}, targets "
            f"{list(target.shape)}"
        )
    if b is not None and (b.shape != (v,) or not b.is_floating_point()):
        raise Unsupported(f"{name}: bias must be [{v}] as this rank's rows of the weight, got {b.dtype} {list(b.shape)}")


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ctx: ParallelContext,
    vocab_size: int,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    reduction: str = "sum",
    sequence_parallel: bool = False,
    token_sizes: Sequence[int] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Cross entropy of the logits x W^T + b without making them: `vocab_parallel_cross_entropy` of a column-divided head.

    Rows of logits exist for `chunk` tokens at a time and become gradients at once, so the backward only scales: three products
    in all, as without fusing. The gradients are made in forward, and only where one is needed: nothing under no_grad.
    x               [.., M] the same on every tp rank, its gradient summed over tp; with sequence_parallel a token shard
                    [.., t', M]. Its dtype is that of the products; losses and sums over chunks are float32 or wider
    weight, bias    [v, M] and [v] (torch.chunk's rule): the parameters of a ColumnParallelLinear or VocabParallelEmbedding
                    (DTensors), or plain shares; a float32 weight gets a float32 gradient, in whatever dtype x is
    target          [..] (all t tokens with sequence_parallel); this and the options as in vocab_parallel_cross_entropy
    reduction       "sum" -> scalar over this rank's tokens, for one backward; "none" -> [..] where no gradient is needed (a
                    gradient per token would need the logits again: token_weight has fixed factors)
    token_sizes     with sequence_parallel: tokens of each tp rank; None = agreed by one small all-gather
    chunk           tokens, the same on all tp ranks; None = `_default_chunk`: up to 2^23 logits, at most about V x T / 16
    memory          chunk x v float32 beside the gradients; for low-precision x also chunk x v of its dtype, twice, and the
                    weight in it; gradients are float32 or wider until backward
    sends           N = tp, T tokens, in bytes. Forward: an all-gather per chunk, (N - 1) T 8 in all (12 with label_smoothing;
                    double for float64). Backward, if x has a gradient: all-reduce of T M numbers. With sequence_parallel
                    instead all-gather of x forward, reduce-scatter backward
    raises          Unsupported for shapes, ids or options that do not fit; TpattnError for a second backward
    source          gradients in forward: Liger kernel, arXiv:2410.10989; not making logits: Wijmans et al., arXiv:2411.09009
    """
    name = "linear_cross_entropy"
    task, ids, factor = _prepare(
        name, x, target, ctx=ctx, vocab_size=vocab_size, ignore_index=ignore_index, label_smoothing=label_smoothing,
        z_loss=z_loss, token_weight=token_weight, reduction=reduction,
    )  # fmt: skip
    for x_name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            require_gathered(parameter, f"linear_cross_entropy: {x_name}")
    tp, w, b = ctx.tp, to_local(weight), None if bias is None else to_local(bias)
    _check_shapes(x, w, b, target, vocab_size, tp, sequence_parallel)
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise Unsupported(f"{name}: chunk={chunk!r} must be a positive number of tokens, or None")
    needs = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in (x, w, b))
    if needs and reduction == "none":
        raise Unsupported(
            f"{name}: reduction='none' has no gradient; put fixed factors into token_weight, call it under torch.no_grad(), or "
            "use vocab_parallel_cross_entropy"
        )
    if token_sizes is not None and not sequence_parallel:
        raise Unsupported(f"{name}: token_sizes={list(token_sizes)} needs sequence_parallel=True")
    if sequence_parallel:
        if token_sizes is None:
            token_sizes = [row[0] for row in comm.agree([x.shape[-2]], tp)]
        if len(token_sizes) != tp.size or sum(token_sizes) != target.shape[-1] or token_sizes[tp.rank] != x.shape[-2]:
            raise Unsupported(
                f"{name}: token_sizes={list(token_sizes)} over tp={tp.size} do not fit {target.shape[-1]} targets, or x "
                f"{list(x.shape)} of rank {tp.rank}"
            )
    rows = enter(x, tp, sequence_parallel, token_sizes).reshape(-1, x.shape[-1])
    if chunk is None:
        chunk = _default_chunk(rows.shape[0], chunk_sizes(vocab_size, tp.size)[0], tp.size)  # the same on every rank
    if needs:
        total: Tensor = _LinearCrossEntropy.apply(rows, w, b, ids, factor, task, chunk)
        return total
    losses, _ = _over_chunks(rows, w, b, ids, factor, task, chunk, (False, False, False))
    return losses.sum() if reduction == "sum" else losses.view(target.shape)


# ---- means -----------------------------------------------------------------------------------------------------------------


def token_mean(loss_sum: Tensor, count: Tensor | int, *, ctx: ParallelContext) -> Tensor:
    """The mean loss over all counted tokens of dp x cp, the same value on every rank; 0 when none is counted anywhere.

    loss_sum    scalar, sum over this rank's tokens
    count       how many of them are counted, or the sum of their weights; never negative
    gradient    each rank's own part, 1 / (global count); `finish_gradients` sums the parts
    """
    number = torch.as_tensor(count, dtype=torch.float64, device=loss_sum.device)
    if loss_sum.dim() or number.dim():
        raise Unsupported(f"token_mean needs scalars, got loss_sum {list(loss_sum.shape)} and count {list(number.shape)}")
    counted = torch.where(number >= 0, number, torch.nan)  # a rank's own mistake reaches every rank with the sum
    total = comm.all_reduce(counted, ctx.dp_cp) if ctx.dp_cp.size > 1 else counted
    if bool(total.isnan()):
        raise Unsupported(f"token_mean: count must be at least 0 on every rank, it is {float(number)} on this one")
    share = (loss_sum / torch.where(total == 0, 1.0, total)).to(loss_sum.dtype)  # a count of 257 is none in bfloat16
    return comm.reduce(share, ctx.dp_cp)
