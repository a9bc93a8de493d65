"""What attention and the loss are, undivided and in float64: the oracles of the tests."""

import torch
from torch.nn import functional as F

from tpattn.kernels import Change


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


def kept(dropout, B, H, T, S):
    """The factors [B, H, T, S] that dropout (p, key) gives the weights of the whole: by global indices, 0 or 1 / (1 - p)."""
    p, key = dropout
    rows, keys = torch.arange(T)[None], torch.arange(S)[None]
    change = Change(None, None, p, key.number(), rows, keys, torch.arange(B) + key.first_sequence, torch.arange(H))
    return change.kept(torch.zeros(B, H, 1, T, S, dtype=torch.float64), slice(None)).view(B, H, T, S)


def changed_attention_and_gradients(q, k, v, g, allowed, scale=None, softcap=None, slopes=None, sinks=None, dropout=None):
    """[out, lse, dq, dk, dv, dsinks] as `attention_and_gradients`, of scores and weights that are changed; dsinks may be None.

    softcap, slopes [H] (ALiBi), sinks [H], dropout (p, key): as sequence_attention takes them
    """
    (B, T, H, D), (S, K) = q.shape, k.shape[1:3]
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    sinks = None if sinks is None else sinks.detach().double().requires_grad_()
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(H // K, 2)) * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (torch.arange(T)[:, None] - torch.arange(S)).abs()
    scores = scores.masked_fill(~allowed, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None])
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    if dropout is not None:
        weights = weights * kept(dropout, B, H, T, S)
    out = torch.einsum("bhts,bshd->bthd", weights, v.repeat_interleave(H // K, 2))
    gradients = torch.autograd.grad(out, (q, k, v, *([] if sinks is None else [sinks])), g.double(), allow_unused=True)
    return [out.detach(), lse.transpose(1, 2).detach(), *gradients, *([None] if sinks is None else [])]


def token_losses(logits, target, smoothing=0.0, z_loss=0.0, weight=None, ignore=-100):
    """Per-token loss by torch: cross_entropy with its label smoothing, plus z_loss times lse squared, 0 for ignored tokens."""
    options = {"reduction": "none", "label_smoothing": smoothing, "ignore_index": ignore}
    losses = F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)
    losses = losses.view(target.shape) + z_loss * logits.logsumexp(-1) ** 2
    losses = torch.where(target == ignore, 0.0, losses)
    return losses if weight is None else losses * weight
