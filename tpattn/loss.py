"""Cross entropy over a vocabulary divided over tp, as sums; and the mean over all counted tokens of dp x cp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpattn import comm
from tpattn.errors import Unsupported
from tpattn.layout import chunk_sizes
from tpattn.mesh import ParallelContext


class _CrossEntropy(torch.autograd.Function):
    """Per-token loss of this rank's share of the logits: all-reduce of maxima and of sums; gradient: nothing, own share."""

    @staticmethod
    def forward(
        node: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor,
        group: comm.Group,
        start: int,
        V: int,
        smoothing: float,
        z_loss: float,
    ) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        x = logits.to(wide)
        largest = comm.all_reduce(x.amax(-1), group, op="max")
        own = (target >= start) & (target < start + x.shape[-1])
        column = torch.where(own, target - start, 0)
        picked = torch.where(own, x.gather(-1, column[:, None])[:, 0], 0.0)
        sums = [torch.exp(x - largest[:, None]).sum(-1), picked]
        if smoothing:
            sums.append(x.sum(-1))
        total = comm.all_reduce(torch.stack(sums), group)
        lse = largest + torch.log(total[0])
        loss = (1.0 - smoothing) * (lse - total[1]) + z_loss * lse**2
        if smoothing:
            loss = loss + smoothing * (lse - total[2] / V)
        node.save_for_backward(logits, lse, weight, own, column)
        node.numbers = V, smoothing, z_loss
        return torch.where(weight == 0, 0.0, loss * weight)  # an ignored token may stand on a logit of -inf

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(node: Any, g: Tensor) -> Any:
        logits, lse, weight, own, column = node.saved_tensors
        V, smoothing, z_loss = node.numbers
        d = torch.exp(logits.to(lse.dtype) - lse[:, None])
        d *= (1.0 + 2.0 * z_loss * lse)[:, None]
        if smoothing:
            d -= smoothing / V
        d.scatter_add_(-1, column[:, None], (own.to(d.dtype) * (smoothing - 1.0))[:, None])
        d *= (g.to(d.dtype) * weight)[:, None]
        return d.to(logits.dtype), None, None, None, None, None, None, None


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
    raises          Unsupported for shapes, ids or options that do not fit
    source          Megatron-LM: Shoeybi et al., arXiv:1909.08053, section 3; z-loss: PaLM, arXiv:2204.02311
    """
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or vocab_size < 1:
        raise Unsupported(f"vocab_parallel_cross_entropy: vocab_size={vocab_size!r} must be a positive integer")
    sizes = chunk_sizes(vocab_size, ctx.tp.size)
    if sizes[-1] == 0:
        raise Unsupported(
            f"vocab_parallel_cross_entropy: vocab_size={vocab_size} over tp={ctx.tp.size} gives {sizes}: a rank would hold none"
        )
    if logits.dim() < 1 or logits.shape[-1] != sizes[ctx.tp.rank] or logits.shape[:-1] != target.shape:
        raise Unsupported(
            f"vocab_parallel_cross_entropy: vocab_size={vocab_size} over tp={ctx.tp.size} gives rank {ctx.tp.rank} logits [.., "
            f"{sizes[ctx.tp.rank]}] with targets [..], got {list(logits.shape)} and {list(target.shape)}"
        )
    if target.dtype not in (torch.int64, torch.int32) or not logits.is_floating_point():
        raise Unsupported(
            f"vocab_parallel_cross_entropy needs float logits and integer targets, got {logits.dtype} and {target.dtype}"
        )
    if reduction not in ("none", "sum"):
        raise Unsupported(
            f"reduction={reduction!r} must be none or sum; for the mean over all counted tokens use tpattn.token_mean"
        )
    if not 0.0 <= label_smoothing <= 1.0 or not 0.0 <= z_loss < float("inf"):
        raise Unsupported(f"label_smoothing={label_smoothing} must lie in [0, 1] and z_loss={z_loss} must be at least 0")
    if token_weight is not None and token_weight.shape != target.shape:
        raise Unsupported(f"token_weight must be {list(target.shape)} as the targets, got {list(token_weight.shape)}")
    counted = target != ignore_index
    if target.numel() and bool((counted & ((target < 0) | (target >= vocab_size))).any()):
        bad = target[counted & ((target < 0) | (target >= vocab_size))][0]
        raise Unsupported(
            f"target {int(bad)} lies outside the vocabulary of {vocab_size} (and is not ignore_index={ignore_index})"
        )
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    weight = counted.to(wide) if token_weight is None else counted * token_weight.detach().to(wide)
    rows = logits.reshape(-1, logits.shape[-1])
    ids = torch.where(counted, target, 0).reshape(-1).long()
    start = sum(sizes[: ctx.tp.rank])
    loss = _CrossEntropy.apply(rows, ids, weight.reshape(-1), ctx.tp, start, vocab_size, float(label_smoothing), float(z_loss))
    return loss.sum() if reduction == "sum" else loss.view(target.shape)


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
