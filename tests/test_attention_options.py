"""The options of sequence_attention beyond their numbers (test_attention_property.py): bits, steps of rotate, what is refused."""

import pytest
import torch
from helpers import close, far, seeded
from oracle import kept
from pool import ranks

from tpattn import AttentionGrid, ParallelContext, RandomKey, SequenceLayout, Unsupported, ledger, masks, sequence_attention


def one_call(ctx, layout, grid="auto", mask=None, T=1100, D=32, dtype=torch.float32, **options):
    """out, lse, dq, dk, dv of a fixed problem, gathered to the whole."""
    x = [seeded(1, T, 4, D, seed=i, dtype=dtype) for i in range(4)]
    q, k, v, g = (ctx.cp.shard(a, layout) for a in x)
    q, k, v = (a.clone().requires_grad_() for a in (q, k, v))
    out, lse = sequence_attention(q, k, v, ctx=ctx, mask=mask, layout=layout, grid=grid, return_lse=True, **options)
    out.backward(g)
    return [ctx.cp.gather(a.detach(), layout) for a in (out, lse, q.grad, k.grad, v.grad)]


@ranks(2, 4)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", ["causal", "full", "documents", "gaps"])
def test_deterministic_gives_the_bits_of_one_process(rank, world, kind, name):
    """out, lse and dq on any grid with merge 1 and edges at multiples of 256; dk and dv too for contiguous equal blocks.

    Also where torch's own bits depend on the strides or on how many heads come together: odd head_dim, and the math kernel.
    Gaps are keys that no row reads, which only their owner holds.
    """
    read = torch.tensor([i % 230 > 40 for i in range(1100)])
    for T, options in ((1024, {}), (1100, {"D": 5, "kernel": "cpu_flash"}), (1100, {"D": 16, "kernel": "math"})):
        mask = {"causal": masks.causal(), "full": None, "documents": masks.documents([300, 3, 700]) & masks.causal(),
                "gaps": masks.padding(read[None, :T]) | masks.documents([1])}[name]
        options |= {"mask": mask, "T": T, "deterministic": True, "sinks": torch.linspace(-1, 2, 4)}
        want = one_call(ParallelContext.single(), SequenceLayout.contiguous(T, 1), **options)
        with ParallelContext.from_env(cp=world, timeout=60) as ctx:
            layout = getattr(SequenceLayout, kind)(T, world, block=256)
            for grid in (AttentionGrid(ring=world), AttentionGrid(ulysses=world), AttentionGrid(ulysses=2, ring=-1)):
                got = one_call(ctx, layout, grid, **options)
                same = 5 if kind == "contiguous" and T == 1024 else 3
                assert all(torch.equal(a, b) for a, b in zip(got[:same], want[:same], strict=True)), (grid, options)
                close(got, want)


@ranks(2)
def test_deterministic_refuses_what_it_cannot_hold(rank, world):
    with ParallelContext.from_env(cp=2, timeout=60) as ctx, ledger() as book:
        for layout, options in (
            (SequenceLayout.contiguous(1100, 2), {}),
            (SequenceLayout.contiguous(1100, 2, block=256), {"transport": "rotate", "grid": AttentionGrid(ring=2)}),
            (SequenceLayout.contiguous(1100, 2, block=256), {"grid": AttentionGrid(merge=2)}),
        ):
            with pytest.raises(Unsupported, match="multiples of 256"):
                x = torch.zeros(1, layout.sizes[rank], 2, 4)
                sequence_attention(x, x, x, ctx=ctx, layout=layout, deterministic=True, **options)
        assert not book.messages


@ranks(2, 3)
def test_rotate_holds_two_blocks_and_follows_the_mask(rank, world):
    """A window needs its halo only, from one side; two runs are bit-equal; a wrong direction would send more."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        layout, mask = SequenceLayout.contiguous(600, world), masks.causal() & masks.window(50)
        with ledger() as book:
            first = one_call(ctx, layout, AttentionGrid(ring=world), mask, 600, transport="rotate")
        again = one_call(ctx, layout, AttentionGrid(ring=world), mask, 600, transport="rotate")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        halo = 50 * 4 * 2 * 32 * 4  # tokens x heads x (k and v) x head_dim x float32
        forward = book.select(operation="rotate", direction="forward")
        assert [m.bytes for m in forward if m.bytes] == ([halo] if rank > 0 else [])


@ranks(2)
def test_dropout_is_the_same_on_every_grid_and_drops_its_share(rank, world):
    """C38: the pattern depends on global indices alone; another step or sequence gives another one."""
    options = {"T": 90, "dtype": torch.float64}
    want = one_call(ParallelContext.single(), SequenceLayout.contiguous(90, 1), dropout=(0.5, RandomKey(1, 2)), **options)
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        for kind in ("contiguous", "zigzag", "striped"):
            for grid in (AttentionGrid(ring=2), AttentionGrid(ulysses=2), AttentionGrid(merge=2)):
                close(one_call(ctx, getattr(SequenceLayout, kind)(90, 2), grid, dropout=(0.5, RandomKey(1, 2)), **options), want)
        for key in (RandomKey(1, 3), RandomKey(1, 2, 1), RandomKey(2, 2), RandomKey(1, 2, name="x")):
            far(one_call(ctx, SequenceLayout.contiguous(90, 2), dropout=(0.5, key), **options)[0], want[0])
    factors = kept((0.5, RandomKey(1, 2)), 2, 3, 64, 64)
    assert abs(float((factors > 0).double().mean()) - 0.5) < 0.02
    assert set(factors.unique().tolist()) == {0.0, 2.0}


@ranks(1)
def test_changes_need_a_kernel_that_makes_them(rank, world):
    x = torch.zeros(1, 4, 2, 4)
    ctx = ParallelContext.single()
    with pytest.raises(Unsupported, match="cpu_flash.*softcap.*math"):
        sequence_attention(x, x, x, ctx=ctx, softcap=2.0, kernel="cpu_flash")
    for options, word in (
        ({"softcap": -1.0}, "softcap"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes"),
        ({"sinks": torch.zeros(2, dtype=torch.int64)}, "sinks"),
        ({"dropout": (1.0, RandomKey(0))}, "dropout"),
        ({"dropout": (0.1, 5)}, "dropout"),
        ({"transport": "rotat"}, "rotate"),
    ):
        with pytest.raises(Unsupported, match=word):
            sequence_attention(x, x, x, ctx=ctx, **options)
