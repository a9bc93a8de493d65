"""What attention and the loss are, undivided and in float64: the oracles of the tests."""

import torch
from torch.nn import functional as F


def attention(q, k, v, allowed=None, scale=None):
    """out [B, T, H, E] and lse [B, T, H] of q [B, T, H, D], k [B, S, K, D], v [B, S, K, E], by autograd alone.

    allowed     bool, broadcast to [B, H, T, S]; a query that may read no key gives out = 0, lse = -inf and gradient 0
    """
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    allowed = torch.ones(scores.shape, dtype=torch.bool) if allowed is None else allowed.expand(scores.shape)
    some = allowed.any(-1, keepdim=True)
    if scores.shape[-1] == 0:
        out = torch.einsum("bhts,bshe->bthe", scores, v)
        return out, torch.full(scores.shape[:3], -torch.inf, dtype=scores.dtype).transpose(1, 2)
    weights = torch.softmax(scores.masked_fill(~allowed & some, -torch.inf), dim=-1) * some
    lse = torch.logsumexp(scores.detach().masked_fill(~allowed, -torch.inf), dim=-1)
    return torch.einsum("bhts,bshe->bthe", weights, v), lse.transpose(1, 2)


def attention_and_gradients(q, k, v, g, allowed=None, scale=None):
    """[out, lse, dq, dk, dv] in float64, for the upstream gradient g [B, T, H, E]."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out, lse = attention(q, k, v, allowed, scale)
    return [out.detach(), lse, *torch.autograd.grad(out, (q, k, v), g.double())]


def token_losses(logits, target, smoothing=0.0, z_loss=0.0, weight=None, ignore=-100):
    """Per-token loss by torch: cross_entropy with its label smoothing, plus z_loss times lse squared, 0 for ignored tokens."""
    options = {"reduction": "none", "label_smoothing": smoothing, "ignore_index": ignore}
    losses = F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)
    losses = losses.view(target.shape) + z_loss * logits.logsumexp(-1) ** 2
    losses = torch.where(target == ignore, 0.0, losses)
    return losses if weight is None else losses * weight
