"""How sequence_attention behaves in a program: what it refuses, under no_grad and checkpointing, twice in one graph, in parts."""

import pytest
import torch
from helpers import close, far, seeded
from oracle import attention_and_gradients
from pool import ranks
from torch.utils.checkpoint import checkpoint

from tpattn import AttentionGrid, ParallelContext, SequenceLayout, Unsupported, ledger, masks, sequence_attention

T, B, H, K, D = 11, 2, 4, 2, 8


def problem(seed=0, dtype=torch.float64):
    shapes = (B, T, H, D), (B, T, K, D), (B, T, K, D), (B, T, H, D)
    return [seeded(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


# ---- what is refused -------------------------------------------------------------------------------------------------------

LAYOUT = SequenceLayout.zigzag(8, 2)
Q, KV = torch.ones(2, 4, 4, 6), torch.ones(2, 4, 2, 6)
REFUSED = {
    "rotat": ({"transport": "rotat"}, ["transport='rotat'", "exchange", "rotate"]),
    "transport": ({"transport": None}, ["transport=None"]),
    "bool tensor": ({"mask": torch.ones(4, 8, dtype=torch.bool)}, ["Tensor", "masks.dense(x)", "masks.padding"]),
    "additive": ({"mask": torch.zeros(4, 8)}, ["Tensor", "additive"]),
    "word": ({"mask": "causal"}, ["str", "tpattn.masks"]),
    "dense rows": ({"mask": masks.dense(torch.ones(8, 8, dtype=torch.bool))}, ["[1, 1, 8, 8]", "t=4", "ctx.cp.shard"]),
    "dense columns": ({"mask": masks.dense(torch.ones(4, 4, dtype=torch.bool))}, ["S=8"]),
    "dense heads": ({"mask": masks.dense(torch.ones(2, 2, 4, 8, dtype=torch.bool))}, ["H=4"]),
    "padding": ({"mask": masks.padding(torch.ones(2, 4, dtype=torch.bool))}, ["[2, 8]"]),
    "documents": ({"mask": masks.documents([9])}, ["sum to 9", "8 keys"]),
    "document lists": ({"mask": masks.documents([[8], [8], [8]])}, ["3 lists", "batch of 2"]),
    "layout n": ({"layout": SequenceLayout.zigzag(8, 4)}, ["4 ranks", "cp=2", "n=2"]),
    "layout T": ({"layout": SequenceLayout.zigzag(16, 2)}, ["q has 4 tokens", "8 of 16", "ctx.cp.shard"]),
    "kv layout n": ({"kv_layout": SequenceLayout.contiguous(8, 3)}, ["kv_layout", "3 ranks"]),
    "kv layout T": ({"kv_layout": SequenceLayout.contiguous(12, 2)}, ["k has 4 tokens", "6 of 12"]),
    "no layout": ({"layout": "zigzag"}, ["layout", "str", "SequenceLayout"]),
    "no kv layout": ({"kv_layout": [4, 4]}, ["kv_layout", "list", "SequenceLayout"]),
    "grid": ({"grid": AttentionGrid(3)}, ["ulysses=3", "cp=2", "1, 2"]),
    "grid word": ({"grid": "ring"}, ["grid='ring'", "auto"]),
    "kernel": ({"kernel": "flash"}, ["kernel='flash'", "auto, cpu_flash", "math"]),
    "scale": ({"scale": "half"}, ["scale='half'"]),
    "nan scale": ({"scale": float("nan")}, ["scale=nan"]),
    "heads": ({"k": torch.ones(2, 4, 3, 6), "v": torch.ones(2, 4, 3, 6)}, ["divide", "[2, 4, 3, 6]"]),
    "widths": ({"k": torch.ones(2, 4, 2, 5)}, ["[2, 4, 2, 5]"]),
    "key lengths": ({"v": torch.ones(2, 3, 2, 6)}, ["v [2, 3, 2, 6]"]),
    "batch": ({"k": torch.ones(1, 4, 2, 6), "v": torch.ones(1, 4, 2, 6)}, ["k [1, 4, 2, 6]"]),
    "dimensions": ({"q": torch.ones(2, 4, 24)}, ["q must be [B, tokens, heads, head_dim]", "[2, 4, 24]"]),
    "no heads": ({"q": torch.ones(2, 4, 0, 6)}, ["[2, 4, 0, 6]"]),
    "mixed dtypes": ({"v": torch.ones(2, 4, 2, 6, dtype=torch.float64)}, ["float32", "float64", "for v"]),
    "integers": ({name: torch.ones(2, 4, 2, 6, dtype=torch.int64) for name in "qkv"}, ["int64", "bfloat16"]),
    "no tensor": ({"q": [1.0]}, ["q", "list"]),
}


@ranks(2)
@pytest.mark.parametrize("agreed", [False, True])
def test_what_is_refused_is_refused_on_every_rank_before_anything_is_sent(rank, world, agreed):
    """One ValueError with what was given and what works. Without a layout the lengths are agreed first, no more is sent."""
    with ParallelContext.from_env(cp=2, timeout=30) as ctx:
        for name, (changes, words) in REFUSED.items():
            if agreed and "layout" in name:
                continue
            given = {"q": Q, "k": KV, "v": KV, **({} if agreed else {"layout": LAYOUT}), **changes}
            with ledger() as book, pytest.raises(Unsupported) as error:
                sequence_attention(ctx=ctx, **given)
            assert all(word in str(error.value) for word in words), f"{name}: {error.value}"
            needs_lengths = agreed and name.partition(" ")[0] in ("dense", "padding", "documents", "document")
            assert [m.operation for m in book.messages] == ["all_gather"] * needs_lengths, name


# ---- graphs ----------------------------------------------------------------------------------------------------------------


def each_grid(n):
    return [*AttentionGrid.all_of(n), "auto"]


@ranks(2, 4)
@pytest.mark.parametrize("remat", [False, True])
def test_without_gradient(rank, world, remat):
    """no_grad and inference_mode give the same output, no graph and no backward message; inputs without gradient neither."""
    inputs = problem()
    layout = SequenceLayout.zigzag(T, world)
    p = layout.positions(rank)
    want = attention_and_gradients(*inputs, CAUSAL)[0][:, p]
    q, k, v = (x[:, p].requires_grad_() for x in inputs[:3])
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for grid in each_grid(world):
            options = {"ctx": ctx, "mask": masks.causal(), "layout": layout, "grid": grid, "remat": remat}
            for block in (torch.no_grad, torch.inference_mode):
                with block(), ledger() as book:
                    out = sequence_attention(q, k, v, **options)
                close(out, want)
                assert not out.requires_grad and not book.select(direction="backward")
            assert not sequence_attention(q.detach(), k.detach(), v.detach(), **options).requires_grad


@ranks(2, 4)
def test_some_inputs_need_no_gradient(rank, world):
    """Any of q, k, v may be frozen, the same on every rank: the others' gradients are right, the frozen one has none."""
    inputs = problem()
    layout = SequenceLayout.zigzag(T, world)
    p = layout.positions(rank)
    want = [x[:, p] for x in attention_and_gradients(*inputs, CAUSAL)[2:]]
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for grid in each_grid(world):
            for which in range(1, 8):
                leaves = [x[:, p].clone().requires_grad_(bool(which >> i & 1)) for i, x in enumerate(inputs[:3])]
                out = sequence_attention(*leaves, ctx=ctx, mask=masks.causal(), layout=layout, grid=grid)
                out.backward(inputs[3][:, p])
                for x, g in zip(leaves, want, strict=True):
                    assert x.requires_grad or x.grad is None
                    if x.requires_grad:
                        close(x.grad, g)


@ranks(2, 3)
@pytest.mark.parametrize("remat", [False, True])
def test_twice_in_one_graph(rank, world, remat):
    """The output of one call is the input of the next, and one tensor is q, k and v: gradients add up as in one process."""
    x_whole, g = seeded(B, T, K, D, seed=0), seeded(B, T, K, D, seed=1)
    x = x_whole.clone().requires_grad_()

    def serial(q, k, v):
        scores = torch.einsum("bthd,bshd->bhts", q, k) * D**-0.5
        return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~CAUSAL, -torch.inf).softmax(-1), v)

    first = serial(x, x, x)
    want = serial(first, x, first)
    want.backward(g)
    layout = SequenceLayout.zigzag(T, world)
    p = layout.positions(rank)
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for grid in each_grid(world):
            mine = x_whole[:, p].clone().requires_grad_()
            options = {"ctx": ctx, "mask": masks.causal(), "layout": layout, "grid": grid, "remat": remat}
            first = sequence_attention(mine, mine, mine, **options)
            out = sequence_attention(first, mine, first, **options)
            out.backward(g[:, p])
            close(out, want[:, p])
            close(mine.grad, x.grad[:, p])


@ranks(2)
def test_two_calls_may_be_backwarded_in_any_order_and_again(rank, world):
    """retain_graph: a second backward through the same call gives the same gradients; two calls go backward in reverse order."""
    inputs, layout = problem(), SequenceLayout.contiguous(T, 2)
    p = layout.positions(rank)
    want = attention_and_gradients(*inputs)
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        for grid in each_grid(2):
            q, k, v = (x[:, p].clone().requires_grad_() for x in inputs[:3])
            a = sequence_attention(q, k, v, ctx=ctx, layout=layout, grid=grid)
            b = sequence_attention(q, k, v, ctx=ctx, layout=layout, grid=grid)
            for out in (a, b, b, a):
                got = torch.autograd.grad(out, (q, k, v), inputs[3][:, p], retain_graph=True)
                for mine, theirs in zip(got, want[2:], strict=True):
                    close(mine, theirs[:, p])


@ranks(2, 4)
@pytest.mark.parametrize("remat", [False, True])
def test_activation_checkpointing(rank, world, remat):
    """torch.utils.checkpoint around the call: recomputed in backward, the same numbers; its messages are counted both times."""
    inputs, layout = problem(), SequenceLayout.zigzag(T, world)
    p = layout.positions(rank)
    want = attention_and_gradients(*inputs, CAUSAL)
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for grid in each_grid(world):
            def call(q, k, v, grid=grid):
                return sequence_attention(q * 1.0, k, v, ctx=ctx, mask=masks.causal(), layout=layout, grid=grid, remat=remat)

            leaves = [x[:, p].clone().requires_grad_() for x in inputs[:3]]
            with ledger() as plain:
                call(*leaves).backward(inputs[3][:, p])
            grads = [x.grad for x in leaves]
            leaves = [x[:, p].clone().requires_grad_() for x in inputs[:3]]
            with ledger() as twice:
                out = checkpoint(call, *leaves, use_reentrant=False)
                out.backward(inputs[3][:, p])
            close(out, want[0][:, p])
            for x, g, theirs in zip(leaves, grads, want[2:], strict=True):
                close(x.grad, g, 0)
                close(g, theirs[:, p])
            assert twice.bytes() == plain.bytes() + plain.bytes(direction="forward")


@ranks(2)
def test_lse_comes_without_gradient_and_writing_into_results_is_noticed(rank, world):
    """lse [B, t, H] requires none; an output changed in place before backward raises and is not silently used."""
    inputs, layout = problem(), SequenceLayout.contiguous(T, 2)
    p = layout.positions(rank)
    want = attention_and_gradients(*inputs, CAUSAL)[1]
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        for grid in each_grid(2):
            for which in (0, 1):
                leaves = [x[:, p].clone().requires_grad_() for x in inputs[:3]]
                results = sequence_attention(*leaves, ctx=ctx, mask=masks.causal(), layout=layout, grid=grid, return_lse=True)
                close(results[1], want[:, p])
                assert results[1].shape == (B, p.numel(), H) and not results[1].requires_grad
                keep = results[0].sum()
                with torch.no_grad():
                    results[which].mul_(2.0)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    keep.backward()


@ranks(2)
def test_an_upstream_gradient_of_zero_and_of_one_number(rank, world):
    """sum() hands an expanded gradient of strides 0; a gradient of zeros gives zeros, with merged outputs too."""
    inputs, layout = problem(), SequenceLayout.zigzag(T, 2)
    p = layout.positions(rank)
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        for grid in each_grid(2):
            for factor in (1.0, 0.0):
                leaves = [x[:, p].clone().requires_grad_() for x in inputs[:3]]
                (sequence_attention(*leaves, ctx=ctx, mask=masks.causal(), layout=layout, grid=grid) * factor).sum().backward()
                want = attention_and_gradients(*inputs[:3], torch.full_like(inputs[3], factor), CAUSAL)[2:]
                for x, g in zip(leaves, want, strict=True):
                    close(x.grad, g[:, p])


@ranks(2)
def test_lengths_are_agreed_when_no_layout_is_given(rank, world):
    """One small all-gather of the lengths; shares are then neighbours in rank order, whatever their lengths, one of them 0."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        for sizes in ([7, 4], [0, 11], [11, 0]):
            layout = SequenceLayout.of_lengths(sizes)
            inputs, p = problem(), layout.positions(rank)
            want = attention_and_gradients(*inputs, CAUSAL)
            leaves = [x[:, p].clone().requires_grad_() for x in inputs[:3]]
            with ledger() as book:
                out = sequence_attention(*leaves, ctx=ctx, mask=masks.causal())
            assert book.messages[0].operation == "all_gather" and book.messages[0].bytes == 16
            out.backward(inputs[3][:, p])
            close(out, want[0][:, p])
            for x, g in zip(leaves, want[2:], strict=True):
                close(x.grad, g[:, p])


def test_one_process_is_ordinary_attention():
    """single(): no group, nothing sent, with a mask for each sequence and an unsorted layout too."""
    ctx, inputs = ParallelContext.single(), problem()
    order = torch.randperm(T, generator=torch.Generator().manual_seed(0))
    valid = torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.7
    allowed = CAUSAL & valid[:, None, None]
    want = attention_and_gradients(*inputs, allowed)
    for layout, p in ((None, torch.arange(T)), (SequenceLayout.of([order]), order)):
        leaves = [x[:, p].clone().requires_grad_() for x in inputs[:3]]
        with ledger() as book:
            out = sequence_attention(*leaves, ctx=ctx, mask=masks.causal() & masks.padding(valid), layout=layout)
            out.backward(inputs[3][:, p])
        close(out, want[0][:, p])
        for x, g in zip(leaves, want[2:], strict=True):
            close(x.grad, g[:, p])
        assert not book.messages
    far(out, want[0])
