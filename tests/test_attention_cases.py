"""Known faults of other sequence-sharded attentions, each as the input that showed it, in every attention grid and transport."""

import itertools

import pytest
import torch
from helpers import close, every_way, far, seeded
from oracle import attention_and_gradients
from pool import ranks

from tpattn import (
    AttentionGrid,
    ParallelContext,
    ParallelSelfAttention,
    SequenceLayout,
    Unsupported,
    comm,
    finish_gradients,
    ledger,
    masks,
    sequence_attention,
)

KINDS = ["contiguous", "zigzag", "striped"]
PROBE = 10.0 / 7.0


def problem(B, T, H, K, D, S=None, E=None, dtype=torch.float64, seed=0):
    """Whole q, k, v and upstream gradient."""
    S, E = S or T, E or D
    shapes = (B, T, H, D), (B, S, K, D), (B, S, K, E), (B, T, H, E)
    return [seeded(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


def run(ctx, inputs, layout, kv_layout=None, mask=None, **options):
    """[out, dq, dk, dv] of this rank's shares, each with its rows of the whole in front: (got, rows)."""
    mine, keys = layout.positions(ctx.cp.rank), (kv_layout or layout).positions(ctx.cp.rank)
    q, k, v, g = inputs
    q, k, v = (x[:, p].clone().requires_grad_() for x, p in ((q, mine), (k, keys), (v, keys)))
    out = sequence_attention(q, k, v, ctx=ctx, layout=layout, kv_layout=kv_layout, mask=mask, **options)
    out.backward(g[:, mine])
    return [out.detach(), q.grad, k.grad, v.grad], [mine, mine, keys, keys]


def check(ctx, inputs, layout, kv_layout=None, mask=None, allowed=None, **options):
    """Output and every gradient equal the whole; returns what this rank got."""
    S = inputs[1].shape[1]
    if allowed is None and mask is not None:
        allowed = masks.allowed(mask, torch.arange(layout.T), S)
    want = attention_and_gradients(*inputs, allowed, options.get("scale"))
    got, rows = run(ctx, inputs, layout, kv_layout, mask, **options)
    for name, mine, theirs, p in zip(("out", "dq", "dk", "dv"), got, (want[0], *want[2:]), rows, strict=True):
        try:
            close(mine, theirs[:, p])
        except AssertionError as error:
            raise AssertionError(f"{name}, {layout}, {options}: {error}") from None
    return got


def every_mode(n, kinds=KINDS):
    """(options, layout) of each grid with each transport, on each kind of layout."""
    return itertools.product(every_way(n), kinds)


def layout_of(kind, T, n):
    return getattr(SequenceLayout, kind)(T, n)


# ---- gradients -------------------------------------------------------------------------------------------------------------


@ranks(2, 3, 4)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_each_chunk(rank, world, causal):
    """C11: dq, dk, dv of each chunk equal serial; changing only the last rank's keys changes rank 0's dq when not causal."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        inputs, mask = problem(1, 12, 2, 2, 4), masks.causal() if causal else None
        for way, kind in every_mode(world):
            check(ctx, inputs, layout_of(kind, 12, world), mask=mask, **way)
        layout = SequenceLayout.contiguous(12, world)
        first = run(ctx, inputs, layout, mask=mask)[0][1]
        inputs[1] = inputs[1].clone()
        inputs[1][:, layout.positions(world - 1)] += 1.0
        second = run(ctx, inputs, layout, mask=mask)[0][1]
        if rank == 0 and causal:
            close(first, second, 0)
        elif rank == 0:
            far(first, second)


@ranks(1, 2)
def test_gradcheck_with_every_option(rank, world):
    """C12: each argument at its default and at another value, forward and backward; gradcheck passes at N=1 and N=2."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        layout = SequenceLayout.zigzag(4, world)
        q, k, v, _ = (x.requires_grad_() for x in problem(1, 4, 2, 1, 2))
        others = {"mask": masks.causal(), "layout": layout, "kv_layout": layout, "grid": AttentionGrid(ring=-1), "scale": 0.3,
                  "transport": "rotate", "return_lse": True, "kernel": "math", "remat": True}
        for options in ({}, *({name: value} for name, value in others.items()), others):
            given = {"layout": layout, **options}

            def whole(q, k, v, given=given):
                out = sequence_attention(*(ctx.cp.shard(x, layout) for x in (q, k, v)), ctx=ctx, **given)
                return ctx.cp.gather(out[0] if given.get("return_lse") else out, layout)

            assert torch.autograd.gradcheck(whole, (q, k, v), fast_mode=options not in ({}, others))


# ---- masks -----------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@ranks(2, 4)
def test_no_nan_where_a_whole_step_is_masked(rank, world):
    """C19: causal, T=8, every grid: no nan in output or gradients; rows masked for all keys give 0 and gradients 0."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        inputs = problem(2, 8, 4, 2, 4)
        dark = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.4
        dark[2] = dark[7] = False
        empty = masks.documents([0, 3]) & masks.causal()
        for way, kind in every_mode(world):
            layout = layout_of(kind, 8, world)
            p = layout.positions(rank)
            check(ctx, inputs, layout, mask=masks.causal(), **way)
            got = check(ctx, inputs, layout, mask=masks.dense(dark[p]), allowed=dark, **way)
            assert (got[0][:, (p == 2) | (p == 7)] == 0).all() and (got[1][:, (p == 2) | (p == 7)] == 0).all()
            got = check(ctx, inputs, layout, mask=empty, **way)
            assert all((x[:, p >= 3] == 0).all() for x in got)


WINDOW = masks.allowed(masks.causal() & masks.window(2), torch.arange(12), 12)[0, 0]      # 3 keys, itself and 2 before


@ranks(2)
def test_a_window_as_a_table_has_no_influence_beyond_it(rank, world):
    """C20: window 3 as a boolean mask equals serial, and changing token 0 changes nothing at position 6 and later: exactly 0."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        inputs = problem(1, 12, 2, 2, 4)
        for way, kind in every_mode(2):
            layout = layout_of(kind, 12, 2)
            p = layout.positions(rank)
            first = check(ctx, inputs, layout, mask=masks.dense(WINDOW[p]), allowed=WINDOW, **way)[0]
            other = [x.clone() for x in inputs]
            for x in other[:3]:
                x[:, 0] += 5.0
            second = run(ctx, other, layout, mask=masks.dense(WINDOW[p]), **way)[0][0]
            assert torch.equal(first[:, p >= 6], second[:, p >= 6])
            if 0 in p:
                far(first[:, p < 3], second[:, p < 3])
            causal = run(ctx, inputs, layout, mask=masks.causal(), **way)[0][0]       # the mask dropped for causal
            if (p >= 6).any():
                far(first[:, p >= 6], causal[:, p >= 6])


@ranks(2)
def test_a_layer_honours_a_window_as_a_table(rank, world):
    """C20: the same through ParallelSelfAttention, which equals the undivided layer; token 0 has no influence from 6 on."""
    x = seeded(2, 12, 8, seed=0)
    other = x.clone()
    other[:, 0] += 5.0
    alone, _ = layer_and_twin(ParallelContext.single(), 8, 2, 2)
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        for way, kind in every_mode(2):
            layer, layout = layer_and_twin(ctx, 8, 2, 2, **way)[0], layout_of(kind, 12, 2)
            p = layout.positions(rank)
            out, changed = (layer(y[:, p], mask=masks.dense(WINDOW[p]), layout=layout) for y in (x, other))
            close(out, alone(x, mask=masks.dense(WINDOW))[:, p])
            assert torch.equal(out[:, p >= 6], changed[:, p >= 6])
            far(out, alone(x, mask=masks.causal())[:, p])


@pytest.mark.sample(1)
@ranks(2, 4)
def test_uneven_lengths_by_hand(rank, world):
    """C21: T=7, K=0, V=[1,1,1,1,2,2,2]: each row is 10/7; a pad token of 100 behind a padding mask changes nothing."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        v = torch.tensor([1.0, 1, 1, 1, 2, 2, 2, 100]).double().view(1, 8, 1, 1)
        q, k = seeded(1, 8, 1, 1, seed=0), torch.zeros(1, 8, 1, 1).double()
        for way, kind in every_mode(world):
            for T, mask in ((7, None), (8, masks.padding(torch.arange(8)[None] < 7))):
                layout = layout_of(kind, T, world)
                share = [x[:, layout.positions(rank)] for x in (q, k, v)]
                out = sequence_attention(*share, ctx=ctx, layout=layout, mask=mask, **way)
                close(out, torch.full_like(out, PROBE))
            far(torch.tensor(9 / 6), PROBE)     # the last token ignored, as a length of T // N per rank would have it
            for T in range(5, 10) if kind != "striped" else ():
                check(ctx, problem(1, T, 2, 2, 4, seed=T), layout_of(kind, T, world), **way)


@ranks(2)
def test_dense_masks_of_each_shape_follow_the_heads(rank, world):
    """C22: [t, S], [B, 1, t, S], [B, H, t, S] with another mask for each head, and padding [B, S], with heads exchanged too."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        B, T, H = 2, 9, 4
        inputs = problem(B, T, H, 2, 4)
        generator = torch.Generator().manual_seed(1)
        tables = [torch.rand(*shape, T, T, generator=generator) < 0.5 for shape in ((), (B, 1), (B, H), (1, H))]
        for way, kind in every_mode(2):
            layout = layout_of(kind, T, 2)
            for table in tables:
                mine = ctx.cp.shard(table, layout, dim=-2)
                got = check(ctx, inputs, layout, mask=masks.dense(mine), allowed=table, **way)
                if table.dim() == 4 and table.shape[1] == H:
                    wrong = attention_and_gradients(*inputs, table.roll(1, dims=1))[0]
                    far(got[0], wrong[:, layout.positions(rank)])
            valid = torch.tensor([[True] * 7 + [False] * 2, [True] * 4 + [False] * 5])
            check(ctx, inputs, layout, mask=masks.padding(valid), **way)
        with pytest.raises(Unsupported, match=r"masks.dense\(additive == 0\)"):
            masks.dense(torch.zeros(T, T))


@ranks(2)
@pytest.mark.parametrize(("T", "S"), [(4, 6), (6, 5), (1, 8), (8, 1), (2, 0)])
def test_cross_attention_of_any_lengths(rank, world, T, S):
    """C23: key lengths that do not divide; causal is aligned top-left as torch's; with a layout whole keys are refused."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        inputs = problem(2, T, 4, 2, 4)
        inputs[1:3] = seeded(2, S, 2, 4, seed=5), seeded(2, S, 2, 4, seed=6)
        for way, kind in every_mode(2):
            for mask in (None, masks.causal()):
                check(ctx, inputs, layout_of(kind, T, 2), layout_of(kind, S, 2), mask=mask, **way)
        top_left = torch.ones(T, S, dtype=torch.bool).tril()
        assert torch.equal(masks.allowed(masks.causal(), torch.arange(T), S)[0, 0], top_left)
        if S > 1:
            layout, kv_layout = SequenceLayout.contiguous(T, 2), SequenceLayout.contiguous(S, 2)
            q = ctx.cp.shard(inputs[0], layout)
            with pytest.raises(Unsupported, match=r"ctx\.cp\.shard\(k, layout, dim=1\)"):
                sequence_attention(q, *inputs[1:3], ctx=ctx, layout=layout, kv_layout=kv_layout)


@ranks(2, 4)
def test_keys_that_were_not_cut_are_refused_without_a_layout_too(rank, world):
    """C23: only lengths are known then: T keys on each rank for T queries on all are a whole. As n T keys they need a layout."""
    T = 2 * world + 1
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        layout = SequenceLayout.contiguous(T, world)
        inputs = problem(1, T, 2, 2, 4)
        q = ctx.cp.shard(inputs[0], layout)
        with ledger() as book, pytest.raises(Unsupported, match=rf"{world} ranks .* {T} keys.*ctx\.cp\.shard\(k.*kv_layout="):
            sequence_attention(q, *inputs[1:3], ctx=ctx)
        assert [m.operation for m in book.messages] == ["all_gather"]       # the lengths
        shares = SequenceLayout.contiguous(world * T, world)
        as_shares = [inputs[0], *(x.repeat(1, world, 1, 1) for x in inputs[1:3]), inputs[3]]
        check(ctx, as_shares, layout, shares)
        # What lengths cannot tell: one query on one rank, as in decoding; whole keys of another length than the queries'.
        one = sequence_attention(inputs[0][:, : int(rank == 0)], *(x[:, :1] for x in inputs[1:3]), ctx=ctx)
        assert one.shape[1] == int(rank == 0)
        sequence_attention(q, *(x[:, 1:] for x in inputs[1:3]), ctx=ctx)


# ---- lengths and memory ----------------------------------------------------------------------------------------------------


class Poisoned:
    """torch, whose new empty tensors hold huge numbers, as reused memory may."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def empty(*sizes, **options):
        x = torch.empty(*sizes, **options)
        return x.fill_(0x7F if x.dtype == torch.uint8 else 1e30)


@pytest.mark.sample(1)
@ranks(3, 4)
def test_uneven_shares_leave_no_trace_of_the_buffers(rank, world):
    """C24: T=10 on 4 ranks and T=7 on 3, every grid and layout, with receive buffers full of 1e30."""
    T = {3: 7, 4: 10}[world]
    with ParallelContext.from_env(cp=world, timeout=60) as ctx, pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "torch", Poisoned())
        assert comm.torch.empty(2).min() == 1e30
        for way, kind in every_mode(world, [*KINDS, "of"]):
            layout = layout_of(kind, T, world) if kind != "of" else SequenceLayout.of(torch.arange(T).flip(0).tensor_split(world))
            for mask in (None, masks.causal(), masks.documents([[3, T - 3], [T]])):
                check(ctx, problem(2, T, 4, 2, 4), layout, mask=mask, **way)


@ranks(2, 4)
def test_rotary_attention_equals_serial(rank, world):
    """C28: rotary angles come from global positions, for every layout; output and weight gradients equal one process."""
    x, g = seeded(2, 13, 16, seed=0), seeded(2, 13, 16, seed=1)
    alone, want = layer_and_twin(ParallelContext.single(), 16, 4, 2, (x, g))
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for way, kind in every_mode(world):
            layout = layout_of(kind, 13, world)
            layer, got = layer_and_twin(ctx, 16, 4, 2, (x, g), layout, **way)
            p = layout.positions(rank)
            close(got[0], want[0][:, p])
            close(got[1:], want[1:])
            if kind != "contiguous":        # positions counted in local order
                far(layer(x[:, p], mask=masks.causal()), got[0])


def layer_and_twin(ctx, hidden, H, K, data=None, layout=None, **options):
    """Attention with the weights of seed 0 on any mesh; with data (x, g) also [causal output, the whole weight gradients]."""
    torch.manual_seed(0)
    layer = ParallelSelfAttention(hidden, H, K, 4, ctx=ctx, dtype=torch.float64, **options)
    if data is None:
        return layer, None
    p = slice(None) if layout is None else layout.positions(ctx.cp.rank)
    out = layer(data[0][:, p], mask=masks.causal(), layout=layout)
    out.backward(data[1][:, p])
    finish_gradients(layer)
    return layer, [out.detach(), *(getattr(w.grad, "full_tensor", lambda w=w: w.grad)() for w in layer.parameters())]


# ---- heads and batch -------------------------------------------------------------------------------------------------------


@ranks(2, 4)
@pytest.mark.parametrize(("H", "K"), [(8, 2), (8, 1), (6, 3), (14, 7), (5, 5), (3, 1), (1, 1)])
def test_heads_that_do_not_divide(rank, world, H, K):
    """C30, C31: fewer KV heads than ranks, odd heads, fewer query heads than ranks: equal serial, exactly H heads come out."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for way in every_way(world):
            got = check(ctx, problem(2, 9, H, K, 4), SequenceLayout.zigzag(9, world), mask=masks.causal(), **way)
            assert got[0].shape[2] == H


LEAVE_A_RANK_WITHOUT = {(4, 5, 5), (4, 6, 3)}       # (tp, H, K)


@ranks(2, 4)
@pytest.mark.parametrize(("H", "K"), [(8, 2), (8, 1), (6, 3), (14, 7), (5, 5)])
def test_heads_of_a_layer_that_do_not_divide(rank, world, H, K):
    """C30, C31: over cp any heads, the weights' gradients summed; over tp equal serial, or a refusal that names H, K and tp."""
    x, g = seeded(2, 9, 12, seed=0), seeded(2, 9, 12, seed=1)
    _, want = layer_and_twin(ParallelContext.single(), 12, H, K, (x, g))
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        layout = SequenceLayout.zigzag(9, world)
        for way in every_way(world):
            _, got = layer_and_twin(ctx, 12, H, K, (x, g), layout, **way)
            close(got[0], want[0][:, layout.positions(rank)])
            close(got[1:], want[1:])
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        if (world, H, K) not in LEAVE_A_RANK_WITHOUT:
            close(layer_and_twin(ctx, 12, H, K, (x, g))[1], want)
            return
        words = f"{H} query heads and {K} key-value heads over tp={world}.*tp could be"
        with ledger() as book, pytest.raises(Unsupported, match=words):
            layer_and_twin(ctx, 12, H, K)
        assert not book.messages


@ranks(2, 4)
@pytest.mark.parametrize("B", [1, 2, 3, 5])
def test_batch_tokens_heads_and_width_are_told_apart(rank, world, B):
    """C32: B, T=8, H=4, D=5 all different, and B = T or H in turn, so that no reshape can mix them unseen."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for way, kind in every_mode(world, ["contiguous", "zigzag"]):
            check(ctx, problem(B, 8, 4, 4, 5), layout_of(kind, 8, world), **way)
            check(ctx, problem(B, 4, B, B, 4), layout_of(kind, 4, world), mask=masks.causal(), **way)


@ranks(1, 2, 4)
def test_scale_is_honoured_in_every_mode(rank, world):
    """C33: scale=0.37 and None in every grid, by a layer too; a keyword of torch's function that tpattn lacks is an error."""
    x = seeded(1, 9, 8, seed=0)
    alone = [layer_and_twin(ParallelContext.single(), 8, 2, 1, scale=s)[0](x) for s in (0.37, None)]
    far(*alone)
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        inputs = problem(1, 9, 4, 2, 4)
        for way, kind in every_mode(world):
            layout = layout_of(kind, 9, world)
            given, default = (check(ctx, inputs, layout, mask=masks.causal(), **way, scale=s)[0] for s in (0.37, None))
            rows = layout.positions(rank) > 0       # row 0 reads one key, whatever the scale
            if rows.any():
                far(given[:, rows], default[:, rows])
            for s, want in zip((0.37, None), alone, strict=True):
                layer = layer_and_twin(ctx, 8, 2, 1, scale=s, **way)[0]
                close(layer(x[:, layout.positions(rank)], layout=layout), want[:, layout.positions(rank)])
        for name in ("attn_mask", "dropout_p", "is_causal", "enable_gqa"):
            with pytest.raises(TypeError, match=name):
                sequence_attention(*inputs[:3], ctx=ctx, **{name: True})


# ---- numerics --------------------------------------------------------------------------------------------------------------


@ranks(1, 2, 4)
def test_bfloat16_is_no_worse_than_serial(rank, world):
    """C35: causal, mean over 6 seeds of the largest error against float64: out <= 1.1 x serial bf16 SDPA, gradients <= 1.5 x."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for way in every_way(world):
            layout, errors, allowances = SequenceLayout.zigzag(64, world), torch.zeros(4), torch.zeros(4)
            for seed in range(6):
                inputs = problem(1, 64, 2, 2, 16, dtype=torch.bfloat16, seed=100 * seed)
                want = attention_and_gradients(*inputs, torch.ones(64, 64, dtype=torch.bool).tril())
                leaves = [x.transpose(1, 2).clone().requires_grad_() for x in inputs[:3]]
                serial = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
                grads = torch.autograd.grad(serial, leaves, inputs[3].transpose(1, 2))
                got, rows = run(ctx, inputs, layout, mask=masks.causal(), **way)
                for i, (mine, p, theirs, other) in enumerate(zip(got, rows, (want[0], *want[2:]), (serial, *grads), strict=True)):
                    assert mine.dtype == torch.bfloat16
                    errors[i] += (mine.double() - theirs[:, p]).abs().max()
                    allowances[i] += (other.detach().transpose(1, 2).double() - theirs).abs().max()
            worst = comm.all_reduce(errors, ctx.cp, op="max")
            assert (worst <= allowances * torch.tensor([1.1, 1.5, 1.5, 1.5])).all(), f"{way}: {worst / allowances}"


# ---- groups ----------------------------------------------------------------------------------------------------------------


@ranks(4)
def test_rings_in_sub_groups(rank, world):
    """C48: over {0,2} and {1,3} at once, then {0,1} and {2,3}: each group's attention equals serial of its own data."""
    for sizes in ({"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}):
        with ParallelContext.from_env(**{"dp": 1, **sizes}, timeout=60) as ctx:
            inputs = problem(1, 7, 2, 2, 4, seed=10 * min(ctx.cp.ranks))
            for way, kind in every_mode(2):
                check(ctx, inputs, layout_of(kind, 7, 2), mask=masks.causal(), **way)
