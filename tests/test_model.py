"""The whole model and its training against one process: loss, every gradient, weights after steps, on each mesh."""

import pytest
import torch
from helpers import close, far
from pool import ranks

import tpattn
from tpattn import AttentionGrid, ParallelContext, SequenceLayout, Transformer
from tpattn.params import sharded_parameters, to_local, whole

MESHES = {
    1: [(1, 1, 1, False, "auto")],
    2: [(1, 1, 2, False, "auto"), (1, 1, 2, True, "auto"), (1, 2, 1, False, (1, 2)), (1, 2, 1, False, (2, 1))],
    3: [(1, 3, 1, False, "auto")],
    4: [
        (1, 2, 2, True, (1, 2)),
        (1, 2, 2, False, (2, 1)),
        (2, 1, 2, True, "auto"),
        (1, 4, 1, False, (2, 2)),
        (2, 2, 1, False, "auto"),
        (4, 1, 1, False, "auto"),
    ],
}
V, B, T = 29, 4, 13


def small(ctx, grid="auto", **options):
    """A model whose head counts, widths and vocabulary are odd wherever they may be."""
    grid = grid if grid == "auto" else AttentionGrid(*grid)
    options = {"ffn": 21, "dtype": torch.float64, "seed": 5, **options}
    return Transformer(V, 24, 2, 6, 2, 6, ctx=ctx, grid=grid, **options)


def batch(step):
    """The global batch of a step: tokens and targets [B, T], some ignored, a whole sequence ignored now and then."""
    g = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, V, (B, T), generator=g)
    targets = torch.randint(0, V, (B, T), generator=g)
    targets[torch.rand(B, T, generator=g) < 0.3] = -100
    targets[step % B] = -100
    return tokens, targets


def mean_loss(model, ctx, step, layout):
    """The global mean loss of this rank's share of the batch: rows over dp, tokens over cp."""
    tokens, targets = (x.tensor_split(ctx.dp.size)[ctx.dp.rank] for x in batch(step))
    tokens, targets = (ctx.cp.shard(x, layout) for x in (tokens, targets))
    logits = model(tokens, layout=layout)
    total = tpattn.vocab_parallel_cross_entropy(logits, targets, ctx=ctx, vocab_size=V)
    return tpattn.token_mean(total, (targets != -100).sum(), ctx=ctx)


def train(model, ctx, steps, layout, lr=0.05):
    """Losses and gradient norms of some AdamW steps with clipping."""
    optimizer = torch.optim.AdamW(tpattn.param_groups(model), lr=lr, weight_decay=0.1)
    curve = []
    for step in range(steps):
        loss = mean_loss(model, ctx, step % 3, layout)
        loss.backward()
        tpattn.finish_gradients(model)
        norm = tpattn.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curve.append([loss.item(), norm.item()])
    return torch.tensor(curve, dtype=torch.float64)


def serial(**options):
    ctx = ParallelContext.single()
    return small(ctx, **options), ctx, SequenceLayout.contiguous(T, 1)


def meshes(world):
    return [pytest.param(*m, id=f"dp{m[0]}cp{m[1]}tp{m[2]}{'sp' * m[3]}-{m[4]}") for m in MESHES[world]]


def check_gradients(dp, cp, tp, sp, grid, kind, **options):
    ctx = ParallelContext.from_env(dp=dp, cp=cp, tp=tp, timeout=60)
    layout = getattr(SequenceLayout, kind)(T, cp)
    model = small(ctx, grid, sequence_parallel=sp, **options)
    twin, alone, one = serial(**options)
    for (name, value), want in zip(tpattn.whole_state_dict(model).items(), twin.state_dict().values(), strict=True):
        assert torch.equal(value.view(want.shape), want), name
    loss, want_loss = mean_loss(model, ctx, 1, layout), mean_loss(twin, alone, 1, one)
    loss.backward()
    want_loss.backward()
    unfinished = to_local(model.norm.weight.grad).clone()
    tpattn.finish_gradients(model)
    close(loss, want_loss)
    twins = dict(twin.named_parameters())
    for name, module, key, spec in sharded_parameters(model):
        got = whole(to_local(module.get_parameter(key).grad), spec, ctx.tp)
        close(got, twins[name].grad)
    if sp or dp * cp > 1:  # C01: each rank saw other tokens, so before the sum its part is not the gradient
        far(unfinished, twins["norm.weight"].grad)
    ctx.close()


@ranks(2)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("dp", "cp", "tp", "sp", "grid"), meshes(2))
def test_gradients_equal_one_process_2(rank, world, dp, cp, tp, sp, grid, kind):
    """Loss and the gradient of every parameter, on two ranks; the initial weights are bit-equal to one process (C36)."""
    check_gradients(dp, cp, tp, sp, grid, kind)


@ranks(3)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_gradients_equal_one_process_3(rank, world, kind):
    check_gradients(*MESHES[3][0], kind)


@ranks(4)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("dp", "cp", "tp", "sp", "grid"), meshes(4))
def test_gradients_equal_one_process_4(rank, world, dp, cp, tp, sp, grid, kind):
    check_gradients(dp, cp, tp, sp, grid, kind)
