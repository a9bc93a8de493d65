"""Any heads on any tp: key-value heads fewer than tp ranks, or not divided by it, with the gradients of one process."""

import itertools

import pytest
import torch
from helpers import close, far, seeded
from oracle import attention_and_gradients
from pool import ranks
from test_gradients import same_gradients

from tpattn import (
    ParallelContext,
    ParallelSelfAttention,
    RandomKey,
    SequenceLayout,
    Transformer,
    TransformerBlock,
    Unsupported,
    clip_grad_norm_,
    finish_gradients,
    ledger,
    load_whole_state_dict,
    masks,
    sequence_attention,
    whole_state_dict,
)
from tpattn.linear import HeadShares

F64 = torch.float64
T, M = 9, 12
HEADS = [(4, 2), (6, 3), (4, 1), (14, 2), (6, 6), *(pytest.param(*heads, marks=pytest.mark.long) for heads in (
    (2, 1), (6, 2), (5, 5), (3, 3), (12, 3)))]      # (H, K)


def mesh_sizes(world):
    """Meshes of so many ranks with tp > 1."""
    return [(d, c, world // d // c) for d in (1, 2) for c in (1, 2) if world % (d * c) == 0 and world // d // c > 1]


@pytest.mark.parametrize("tp", range(1, 9))
def test_every_query_head_stays_with_the_head_it_reads(tp):
    """Each query head once, each key-value head somewhere, and on every rank those that its query heads read."""
    for ratio, K in itertools.product((1, 2, 3, 7), range(1, 9)):
        H = ratio * K
        shares = HeadShares(H, K, tp)
        if min(b - a for a, b in shares.queries) == 0:
            with pytest.raises(Unsupported, match=f"{H} query heads and {K} key-value heads over tp={tp}"):
                shares.check("layer")
            continue
        shares.check("layer")
        assert [h for a, b in shares.queries for h in range(a, b)] == list(range(H))
        for rank in range(tp):
            (first, last), held = shares.queries[rank], range(*shares.keys[rank])
            needed = list(held)[shares.needed(rank)]
            reads = shares.reads(rank) or [i * len(needed) // (last - first) for i in range(last - first)]
            assert [needed[i] for i in reads] == [h // ratio for h in range(first, last)], (H, K, tp, rank)
        assert {k for a, b in shares.keys for k in range(a, b)} == set(range(K))
        copies = sum(b - a for a, b in shares.keys) // K
        assert copies == (tp // shares.parts if shares.shared else 1) and not (shares.shared and ratio == 1)


def test_sizes_that_work_are_named():
    with pytest.raises(Unsupported, match=r"tp=4 give \[2, 2, 1, 0\] query heads.*tp could be 1, 2, 3, 5"):
        HeadShares(5, 5, 4).check("layer")


@ranks(1, 2, 4)
@pytest.mark.parametrize("transport", ["exchange", "rotate"])
def test_attention_with_uneven_groups(rank, world, transport):
    """kv_heads: query heads that read any ascending key heads, under every grid, ulysses cutting groups too."""
    from tpattn import AttentionGrid

    ctx, reads = ParallelContext.from_env(cp=world, timeout=60), [0, 0, 0, 1, 2, 2, 2]
    B, D = 2, 4
    layout = SequenceLayout.zigzag(13, world)
    q, g = seeded(B, 13, 7, D, seed=0), seeded(B, 13, 7, D, seed=3)
    k, v = seeded(B, 13, 3, D, seed=1), seeded(B, 13, 3, D, seed=2)
    allowed = masks.allowed(masks.causal(), torch.arange(13), 13)
    out, _, dq, dk, dv = attention_and_gradients(q, k[:, :, reads], v[:, :, reads], g, allowed)
    dk, dv = (torch.zeros_like(k).index_add_(2, torch.tensor(reads), x) for x in (dk, dv))
    mine = layout.positions(ctx.cp.rank)
    for grid in AttentionGrid.all_of(world):
        inputs = [x[:, mine].clone().requires_grad_() for x in (q, k, v)]
        got = sequence_attention(
            *inputs, ctx=ctx, mask=masks.causal(), layout=layout, grid=grid, transport=transport, kv_heads=reads)
        got.backward(g[:, mine])
        close([got, *(x.grad for x in inputs)], [x[:, mine] for x in (out, dq, dk, dv)])
    far(sequence_attention(*inputs, ctx=ctx, mask=masks.causal(), layout=layout, kv_heads=[0, 0, 1, 1, 1, 2, 2]), out[:, mine])
    for wrong in ([0, 1], [0, 0, 0, 2, 1, 2, 2], [0, 0, 0, 0, 0, 2, 2], [0, 0, 0, 1, 2, 2, 3]):
        with pytest.raises(Unsupported, match="kv_heads must name"):
            sequence_attention(*inputs, ctx=ctx, layout=layout, kv_heads=wrong)
    ctx.close()


def block_on(ctx, H, K, sequence_parallel):
    torch.manual_seed(5)
    return TransformerBlock(M, H, K, 4, ctx=ctx, bias=True, sequence_parallel=sequence_parallel, dtype=F64)


def run_block(model, ctx, sequence_parallel=False):
    """One forward and backward of this rank's sequences and tokens; this rank's output."""
    layout, part = SequenceLayout.zigzag(T, ctx.cp.size), (lambda x: x.tensor_split(ctx.dp.size)[ctx.dp.rank])
    x, g = (ctx.cp.shard(part(seeded(4, T, M, seed=seed)), layout) for seed in (0, 1))
    if sequence_parallel:
        rows = SequenceLayout.contiguous(x.shape[1], ctx.tp.size)
        x, g = ctx.tp.shard(x, rows), ctx.tp.shard(g, rows)
    out = model(x, mask=masks.causal(), layout=layout)
    out.backward(g)
    return ctx.tp.gather(out.detach(), rows) if sequence_parallel else out.detach()


@ranks(2, 3, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("H", "K"), HEADS)
def test_block_equals_one_process(rank, world, H, K, sequence_parallel):
    """C30 C31: output, every gradient (those of shared key-value weights summed over their copies), norm, initial values."""
    alone = ParallelContext.single()
    twin = block_on(alone, H, K, False)
    want = run_block(twin, alone)
    for sizes in mesh_sizes(world):
        if min(b - a for a, b in HeadShares(H, K, sizes[2]).queries) == 0:
            continue
        ctx = ParallelContext.from_env(*sizes, timeout=60)
        model = block_on(ctx, H, K, sequence_parallel)
        for name, value in whole_state_dict(twin).items():
            assert torch.equal(whole_state_dict(model)[name], value), name
        with ledger() as book:
            got = run_block(model, ctx, sequence_parallel)
        layout = SequenceLayout.zigzag(T, ctx.cp.size)
        close(got, ctx.cp.shard(want.tensor_split(ctx.dp.size)[ctx.dp.rank], layout))
        assert {m.axis for m in book.messages} <= {"tp", "cp"}, "no key or value crosses between tp ranks"
        if not sequence_parallel:
            assert len(book.select(axis="tp")) == 4, "two all-reduces forward, two backward, whoever shares heads"
        finish_gradients(model)
        same_gradients(model, twin, ctx)
        for norm in (2.0, 3.0, float("inf")):
            close(clip_grad_norm_(model.parameters(), 1e9, norm), torch.nn.utils.clip_grad_norm_(twin.parameters(), 1e9, norm))
        state = {name: seeded(*x.shape, seed=3) for name, x in whole_state_dict(twin).items()}
        load_whole_state_dict(model, state)
        for name, value in whole_state_dict(model).items():
            assert torch.equal(value, state[name]), name
        ctx.close()


@ranks(4)
def test_forgetting_the_sum_over_the_ranks_that_share_heads_is_seen(rank, world):
    """The mutant: shared key-value weights treated as divided ones have a part of the gradient only."""
    from dataclasses import replace

    alone = ParallelContext.single()
    twin = block_on(alone, 14, 2, False)
    run_block(twin, alone)
    ctx = ParallelContext.from_env(tp=4, timeout=60)
    model = block_on(ctx, 14, 2, False)
    qkv = model.attention.qkv
    qkv.specs["k"] = replace(qkv.specs["k"], partial=False)
    run_block(model, ctx)
    finish_gradients(model)
    with pytest.raises(AssertionError, match=r"attention\.qkv\.k"):
        same_gradients(model, twin, ctx)
    ctx.close()


@ranks(4)
def test_checkpoints_do_not_know_how_heads_were_shared(rank, world, tmp_path):
    """Saved on tp=4 (two ranks share each head), loaded on tp=2 x cp=2 and on one process: the same tensors, bit for bit."""
    from tpattn import load_latest, save

    ctx = ParallelContext.from_env(tp=4, timeout=60)
    make = lambda c: Transformer(17, M, 1, 14, 2, 4, seed=1, ctx=c, dtype=F64)  # noqa: E731
    model = make(ctx)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.arange(8).view(1, 8)).sum().backward()
    finish_gradients(model)
    optimizer.step()
    save(tmp_path, model, optimizer, ctx=ctx, step=1)
    want = whole_state_dict(model)
    other = ParallelContext.from_env(cp=2, tp=2, timeout=60)
    for c in (other, ParallelContext.single()):
        again = make(c)
        load_latest(tmp_path, again, torch.optim.AdamW(again.parameters(), foreach=False), ctx=c)
        for name, value in whole_state_dict(again).items():
            assert torch.equal(value, want[name]), name
    other.close()
    ctx.close()


# ---- norms of q and k, gates, dropout of the softmax weights ----------------------------------------------------------------


def options_on(ctx, H, K, sequence_parallel=False, **options):
    torch.manual_seed(5)
    options = {"qk_norm": True, "gate": True, "dropout": 0.3, "bias": True} | options
    model = ParallelSelfAttention(M, H, K, 4, ctx=ctx, sequence_parallel=sequence_parallel, dtype=F64, **options)
    if model.q_norm is not None:
        load_whole_state_dict(model, {f"{n}.weight": seeded(4, seed=i) for i, n in enumerate(("q_norm", "k_norm"))}, strict=False)
    return model


def run_attention(model, ctx, sequence_parallel=False):
    layout, first = SequenceLayout.zigzag(T, ctx.cp.size), sum(len(range(4)[i::ctx.dp.size]) for i in range(ctx.dp.rank))
    x, g = (ctx.cp.shard(seeded(4, T, M, seed=seed).tensor_split(ctx.dp.size)[ctx.dp.rank], layout) for seed in (0, 1))
    if sequence_parallel:
        rows = SequenceLayout.contiguous(x.shape[1], ctx.tp.size)
        x, g = ctx.tp.shard(x, rows), ctx.tp.shard(g, rows)
    out = model(x, mask=masks.causal(), layout=layout, key=RandomKey(3, 4, first, "here"))
    out.backward(g)
    return ctx.tp.gather(out.detach(), rows) if sequence_parallel else out.detach()


def test_options_of_attention_on_one_process_are_their_definitions():
    """Norm, rotation, softmax, gate, written out; biases of q, k and v; the gate has none."""
    ctx = ParallelContext.single()
    model = options_on(ctx, 6, 2, dropout=0.0, rope_base=None)
    w, x = whole_state_dict(model), seeded(4, T, M, seed=0)

    def heads(name, norm=None):
        y = (x @ w[f"qkv.{name}"].mT + w[f"qkv.{name}_bias"]).unflatten(-1, (-1, 4))
        return y if norm is None else y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * w[f"{norm}.weight"]

    q, k, v = heads("q", "q_norm"), heads("k", "k_norm"), heads("v")
    out, *_ = attention_and_gradients(q, k, v, torch.zeros(4, T, 6, 4), torch.ones(T, T).tril().bool())
    out = out * torch.sigmoid(x @ w["qkv.gate"].mT)[..., None]
    close(model(x, mask=masks.causal()), out.flatten(2) @ w["out.weight"].mT + w["out.bias"])
    model.dropout = 0.3
    with pytest.raises(ValueError, match="needs key=RandomKey"):
        model(x)
    close(model.eval()(x, mask=masks.causal()), out.flatten(2) @ w["out.weight"].mT + w["out.bias"])
    with pytest.raises(Unsupported, match=r"dropout=1.5 must lie in \[0, 1\)"):
        options_on(ctx, 6, 2, dropout=1.5)


@ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("H", "K"), [(6, 2), (14, 2), (6, 3), (4, 4)])
def test_options_of_attention_equal_one_process(rank, world, H, K, sequence_parallel):
    """C02: the norms' gradients are parts on every tp rank, for their heads; dropout is by global head, position and sequence."""
    alone = ParallelContext.single()
    twin = options_on(alone, H, K)
    want = run_attention(twin, alone)
    far(run_attention(options_on(alone, H, K, dropout=0.0), alone), want)
    for sizes in mesh_sizes(world):
        if min(b - a for a, b in HeadShares(H, K, sizes[2]).queries) == 0:
            continue
        ctx = ParallelContext.from_env(*sizes, timeout=60)
        model = options_on(ctx, H, K, sequence_parallel)
        got = run_attention(model, ctx, sequence_parallel)
        layout = SequenceLayout.zigzag(T, ctx.cp.size)
        close(got, ctx.cp.shard(want.tensor_split(ctx.dp.size)[ctx.dp.rank], layout))
        finish_gradients(model)
        same_gradients(model, twin, ctx)
        ctx.close()
