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


@ranks(8)
def test_gradients_of_key_value_heads_that_tp_ranks_share(rank, world):
    """2 key-value heads on tp = 4: their weights lie on a mesh of their own, and 3 uneven ones on tp = 2 are held by both ranks."""
    check_gradients((2, 1, 4, True), False)


@ranks(4)
@pytest.mark.parametrize("heads", [{"num_heads": 6, "num_kv_heads": 3}, {"num_heads": 3, "num_kv_heads": 3}, {"num_kv_heads": 1}],
                         ids=["6 of 3", "3 of 3", "6 of 1"])
def test_gradients_of_uneven_heads(rank, world, heads):
    """Query and key-value heads that tp = 2 does not divide: together, or the key-value heads on both ranks."""
    check_gradients((2, 1, 2, False), False, **heads)
    check_gradients((1, 2, 2, True), True, **heads)


# ---- states ----------------------------------------------------------------------------------------------------------------


def optimizer_of(model):
    return tpattn.training.adamw(model, lr=0.05)


def trained(ctx, steps, model=None, optimizer=None, **options):
    """(model, optimizer) after these steps."""
    model = shard(decoder(ctx, **options), ctx) if model is None else model
    optimizer = optimizer_of(model) if optimizer is None else optimizer
    for _ in range(steps):
        backward(model, ctx)
        finish_gradients(model)
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model, optimizer


STATE_MESHES = {2: [(2, 1, 1)], 3: [(3, 1, 1)], 4: [(2, 1, 2), (1, 2, 2)]}
EVERY_STATE = {n: pytest.mark.parametrize("sizes", m) for n, m in STATE_MESHES.items()}


def check_states(sizes, folder):
    """Weights after steps, whole and from files: fsdp -> one process -> fsdp, with the optimizer's state."""
    alone = ParallelContext.single()
    twin, twin_optimizer = trained(alone, 2)
    with ParallelContext.from_env(*sizes, timeout=60) as ctx:
        model, optimizer = trained(ctx, 2)
        got, want = tpattn.whole_state_dict(model), tpattn.whole_state_dict(twin)
        assert list(got) == list(want)
        close(list(got.values()), list(want.values()), 1e-8)        # AdamW divides by roots of tiny squares
        tpattn.save(folder / "fsdp", model, optimizer, ctx=ctx, step=2)
        # on one process
        back = decoder(alone)
        back_optimizer = optimizer_of(back)
        tpattn.load_latest(folder / "fsdp", back, back_optimizer, ctx=alone)
        close(list(tpattn.whole_state_dict(back).values()), list(got.values()), 0)
        trained(alone, 1, back, back_optimizer)
        trained(ctx, 1, model, optimizer)
        close(list(tpattn.whole_state_dict(model).values()), list(tpattn.whole_state_dict(back).values()), 1e-8)
        # and back, from what rank 0 alone saves
        if ctx.world.rank == 0:
            tpattn.save(folder / "one", back, back_optimizer, ctx=alone, step=3)
        tpattn.training.from_rank0("saved", ctx)
        other, other_optimizer = shard(decoder(ctx), ctx), None
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        other_optimizer = optimizer_of(other)
        tpattn.load_latest(folder / "one", other, other_optimizer, ctx=ctx)
        close(list(tpattn.whole_state_dict(other).values()), list(tpattn.whole_state_dict(back).values()), 0)
        for name in ("exp_avg", "exp_avg_sq"):
            mine = undivided(other, ctx, lambda p: other_optimizer.state[p][name])
            same(mine, undivided(back, alone, lambda p: back_optimizer.state[p][name]))
        # whole state dicts the other way
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        tpattn.load_whole_state_dict(other, want)
        close(list(tpattn.whole_state_dict(other).values()), list(want.values()), 0)


@ranks(2)
@EVERY_STATE[2]
def test_states_2(rank, world, sizes, tmp_path):
    check_states(sizes, tmp_path)


@ranks(3)
@EVERY_STATE[3]
def test_states_3(rank, world, sizes, tmp_path):
    check_states(sizes, tmp_path)


@ranks(4)
@EVERY_STATE[4]
def test_states_4(rank, world, sizes, tmp_path):
    check_states(sizes, tmp_path)
