"""FSDP2 over dp x cp: on every mesh gradients, norm, steps and files are those of the undivided model in float64."""

import pytest
import torch
from helpers import close, far, seeded
from pool import ranks
from torch import nn

import tpattn
from tpattn import (
    ParallelContext,
    SequenceLayout,
    TpattnError,
    Transformer,
    TransformerBlock,
    Unsupported,
    clip_grad_norm_,
    finish_gradients,
    no_sync,
    shard,
    token_mean,
    vocab_parallel_cross_entropy,
)
from tpattn.params import data_dim, gather_data_shares, sharded_parameters, tp_share_shape, whole

F64, V, T, B = torch.float64, 17, 9, 5


def decoder(ctx, **options):
    """Odd sizes: 17 words, 6 query heads that share 2 key-value heads, 11 inner features, norms of q and k."""
    options = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 4, "ffn": 11, "qk_norm": True, "gate": True, "bias": True, **options}
    return Transformer(V, 10, 2, ctx=ctx, seed=1, dtype=F64, **options)


def batch(ctx, layout, rows=slice(None), seed=0):
    """(tokens, targets) of this rank, with ignored targets in uneven numbers."""
    ids = seeded(B, T + 1, seed=seed, dtype=torch.int64) % V
    ids = ids[rows].tensor_split(ctx.dp.size)[ctx.dp.rank]
    return tuple(ctx.cp.shard(x, layout) for x in (ids[:, :-1], ids[:, 1:]))


def counted(seed=0):
    return int(((seeded(B, T + 1, seed=seed, dtype=torch.int64) % V)[:, 1:] != 3).sum())


def backward(model, ctx, fused=False, kind="zigzag", rows=slice(None)):
    """The backward of these sequences' part in the mean loss over the whole batch."""
    layout = getattr(SequenceLayout, kind)(T, ctx.cp.size)
    tokens, targets = batch(ctx, layout, rows)
    if fused:
        loss = model.loss(tokens, targets, layout=layout, ignore_index=3)
    else:
        loss = vocab_parallel_cross_entropy(model(tokens, layout=layout), targets, ctx=ctx, vocab_size=V, ignore_index=3)
    (loss / counted()).backward()
    return token_mean(loss.detach(), (targets != 3).sum(), ctx=ctx)


def undivided(model, ctx, what=lambda p: p.grad):
    """What each parameter has, undivided, by name."""
    specs = {id(m.get_parameter(key)): spec for _, m, key, spec in sharded_parameters(model)}
    found = {}
    for name, p in model.named_parameters():
        spec, x = specs.get(id(p)), what(p)
        if x is not None:
            x = gather_data_shares(x, p.shape if spec is None else tp_share_shape(spec, ctx.tp), ctx)
            x = x if spec is None else whole(x, spec, ctx.tp)
        found[name] = x
    return found


def same(got, want):
    assert list(got) == list(want)
    for name, value in want.items():
        assert (got[name] is None) == (value is None), name
        if value is not None:
            try:
                close(got[name], value)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def serial(options, fused=False):
    """(loss, gradients by name, norm) of one process."""
    alone = ParallelContext.single()
    twin = decoder(alone, **options)
    loss = backward(twin, alone, fused)
    return loss, undivided(twin, alone), clip_grad_norm_(twin.parameters(), 1e9)


MESHES = {
    2: [(2, 1, 1, False), (1, 2, 1, False)], 3: [(3, 1, 1, False), (1, 3, 1, False)],
    4: [(2, 1, 2, False), (2, 1, 2, True), (1, 2, 2, True), (2, 2, 1, False)],
}
EVERY_MESH = {n: pytest.mark.parametrize("mesh", meshes, ids=[f"dp{d}cp{c}tp{t}{'sp' * s}" for d, c, t, s in meshes])
              for n, meshes in MESHES.items()}


def check_gradients(mesh, fused, **options):
    *sizes, sp = mesh
    want_loss, want, norm = serial(options, fused)
    with ParallelContext.from_env(*sizes, timeout=60) as ctx:
        model = shard(decoder(ctx, sequence_parallel=sp, **options), ctx)
        assert all(data_dim(p) is not None for p in model.parameters())
        for _ in range(2):          # the second step too
            close(backward(model, ctx, fused), want_loss)
            finish_gradients(model, check=True)
            same(undivided(model, ctx), want)
            close(clip_grad_norm_(model.parameters(), 1e9), norm)
            model.zero_grad(set_to_none=True)


@ranks(2)
@EVERY_MESH[2]
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_equal_the_undivided_ones_2(rank, world, mesh, fused):
    check_gradients(mesh, fused, tied=fused)


@ranks(3)
@EVERY_MESH[3]
def test_gradients_equal_the_undivided_ones_3(rank, world, mesh):
    """17 words, 2 heads, 10 features over 3 ranks: uneven, and one rank without a key-value head."""
    check_gradients(mesh, mesh[0] == 3)


@ranks(4)
@EVERY_MESH[4]
def test_gradients_equal_the_undivided_ones_4(rank, world, mesh):
    check_gradients(mesh, mesh[3], tied=not mesh[3])
