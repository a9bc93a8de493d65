"""The CUDA back ends without CUDA: their calls fit torch's signatures, and their guards give an op all that it is known to want.

The numbers come from stand-ins of the ops, which compute in plain torch and refuse what the ops are documented to refuse. Nothing
here replaces a run on a GPU; `available()` says so.
"""

import pytest
import torch
from helpers import seeded
from test_kernels import TILES, Tile, check, problem

from tpattn.kernels import backends

NAMES = ["cuda_flash", "cuda_efficient"]


def weights(q, k, bias, causal, scale):
    """Scores [B, H, T, S] with key heads repeated."""
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores if bias is None else scores + bias


def gradients(g, q, k, v, out, lse, bias, causal, scale):
    p = torch.exp(weights(q, k, bias, causal, scale) - lse[..., None])
    d = p * (torch.einsum("bhte,bhse->bhts", g, v) - (g * out).sum(-1, keepdim=True)) * scale
    return d @ k, d.mT @ q, p.mT @ g


def same_width(*tensors):
    """What both ops want of heads: widths that are multiples of 8, elements side by side."""
    for x in tensors:
        assert x.shape[-1] % 8 == 0 and x.stride(-1) == 1 and x.numel()


class FlashOp:
    """Takes K key heads as they are, no bias, a causal flag on squares alone."""

    @staticmethod
    def forward(q, k, v, dropout, causal, debug, *, scale):
        same_width(q, k, v)
        assert q.shape[-1] == v.shape[-1] and scale > 0 and not dropout and (not causal or q.shape[2] == k.shape[2])
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        s = weights(q, k, None, causal, scale)
        return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1), None, None, q.shape[2], k.shape[2], None, None, None

    @staticmethod
    def backward(g, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset, *, scale):
        same_width(g, q, k, v, out)
        assert cum_q is None and cum_k is None and (max_q, max_k) == (q.shape[2], k.shape[2]) and lse.is_contiguous()
        K, G = k.shape[1], q.shape[1] // k.shape[1]
        wide = (x.repeat_interleave(G, 1) for x in (k, v))
        dq, dk, dv = gradients(g, q, *wide, out, lse, None, causal, scale)
        return dq, dk.unflatten(1, (K, G)).sum(2), dv.unflatten(1, (K, G)).sum(2)


class EfficientOp:
    """Takes as many key heads as query heads, a bias whose rows start at multiples of 16 elements, an lse padded to 32 rows."""

    @staticmethod
    def forward(q, k, v, bias, with_lse, dropout, causal, *, scale):
        same_width(q, k, v)
        EfficientOp.fits(q, k, bias)
        assert with_lse and scale > 0 and not dropout
        s = weights(q, k, bias, causal, scale)
        lse = torch.nn.functional.pad(torch.logsumexp(s, -1), (0, -q.shape[2] % 32), value=7.0)
        return torch.softmax(s, -1) @ v, lse, None, None  # nan in rows without keys

    @staticmethod
    def backward(g, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal, *, scale):
        same_width(g, q, k, v, out)
        EfficientOp.fits(q, k, bias)
        assert lse.shape[2] == q.shape[2] + -q.shape[2] % 32 and wanted == [True, True, True, False]
        return *gradients(g, q, k, v, out, lse[..., : q.shape[2]], bias, causal, scale), None

    @staticmethod
    def fits(q, k, bias):
        assert q.shape[:2] == k.shape[:2]
        if bias is not None:
            assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.stride(2) % 16 == 0 and bias.dtype == q.dtype


@pytest.fixture
def stand_ins(monkeypatch):
    """The ops of aten replaced; the back ends believe that the CPU is theirs."""
    for op, name in ((FlashOp, "flash"), (EfficientOp, "efficient")):
        monkeypatch.setattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention", op.forward)
        monkeypatch.setattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention_backward", op.backward)
    for backend in (backends.CudaFlash, backends.CudaEfficient):
        monkeypatch.setattr(backend, "device", "cpu")
        monkeypatch.setattr(backend, "dtypes", (torch.float64,))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", sorted(TILES))
def test_every_tile_with_guards_around_the_ops(stand_ins, name, kind):
    """Odd widths, Dv != D, grouped heads, batch 2, a scale of any sign: what reaches the op fits it, what comes back is right."""
    T, S = 37, 37
    check(name, problem(2, T, S, 6, 2, 5, 3), TILES[kind](T, S))
    check(name, problem(1, T, S, 3, 3, 8, 16), TILES[kind](T, S), scale=-0.3)


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_keys_in_a_dense_table(stand_ins, name):
    table = seeded(2, 4, 13, 11, seed=3) > 0
    table[:, :, 4] = False
    check(name, problem(2, 13, 11, 4, 2, 8, 8), [Tile("full", 0, 13, 0, 11, table=True)], table=table)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("masked", [False, True])
def test_calls_fit_the_signatures_of_torch(name, masked):
    """On meta tensors torch checks the arguments of the real ops and gives the shapes of their results."""
    backend = next(b for b in backends._BACKENDS if b.name == name)
    make = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16, device="meta")  # noqa: E731
    q, k, v, g = make(2, 6, 40, 5), make(2, 2, 24, 5), make(2, 2, 24, 3), make(2, 6, 40, 3)
    mask = torch.ones(40, 24, dtype=torch.bool, device="meta") if masked else None
    out, lse = backend.forward(q, k, v, mask, 0.3)
    assert out.shape == g.shape and lse.shape == (2, 6, 40) and lse.dtype == torch.float32
    dq, dk, dv = backend.backward(g, q, k, v, out, lse, mask, 0.3)
    assert [x.shape for x in (dq, dk, dv)] == [x.shape for x in (q, k, v)]
