"""The options of sequence_attention: rotate, changed scores, sinks, dropout, deterministic; against float64 on the whole."""

import dataclasses
import random

import pytest
import torch
from helpers import close, far, seeded
from pool import ranks
from test_attention import draw, shares_of

from tpattn import AttentionGrid, ParallelContext, RandomKey, SequenceLayout, Unsupported, ledger, masks, sequence_attention
from tpattn.kernels import Change
from tpattn.schedule import Spec, resolve_grid, schedule

DRAWS = 40  # for each world size


@dataclasses.dataclass
class Changes:
    """What is done to the scores and weights of one call."""

    softcap: float | None
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    dropout: tuple[float, RandomKey] | None


def some_changes(seed, H):
    r = random.Random(seed)
    return Changes(
        r.choice([None, None, 1.3]),
        seeded(H, seed=seed).abs() if r.random() < 0.3 else None,
        seeded(H, seed=seed + 1) if r.random() < 0.4 else None,
        (0.3, RandomKey(3, seed, 2)) if r.random() < 0.3 else None,
    )


def kept(dropout, B, H, T, S):
    """The factors of the weights [B, H, T, S] of the whole, by global indices."""
    p, key = dropout
    rows, keys = torch.arange(T)[None], torch.arange(S)[None]
    change = Change(None, None, p, key.number(), rows, keys, torch.arange(B) + key.first_sequence, torch.arange(H))
    return change.kept(torch.zeros(B, H, 1, T, S, dtype=torch.float64), slice(None)).view(B, H, T, S)


def whole(q, k, v, g, allowed, scale, c):
    """out, lse, dq, dk, dv, dsinks of the undivided computation in float64."""
    B, T, H, D = q.shape
    S, K = k.shape[1:3]
    q, k, v = (x.double().detach().requires_grad_() for x in (q, k, v))
    sinks = None if c.sinks is None else c.sinks.clone().requires_grad_()
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(H // K, 2)) * (D**-0.5 if scale is None else scale)
    if c.softcap is not None:
        scores = c.softcap * torch.tanh(scores / c.softcap)
    if c.slopes is not None:
        scores = scores - c.slopes[:, None, None] * (torch.arange(T)[:, None] - torch.arange(S)).abs()
    scores = scores.masked_fill(~allowed, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None])
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    if c.dropout is not None:
        weights = weights * kept(c.dropout, B, H, T, S)
    out = torch.einsum("bhts,bshd->bthd", weights, v.repeat_interleave(H // K, 2))
    out.backward(g.double())
    return out.detach(), lse.transpose(1, 2).detach(), q.grad, k.grad, v.grad, None if sinks is None else sinks.grad


def check(ctx, seed):
    d = draw(seed, ctx.cp.size, 200)
    c, mask = some_changes(seed, d.H), masks.full() if d.mask is None else d.mask
    transport = random.Random(seed + 7).choice(["exchange", "rotate", "rotate"])
    T, S = d.layout.T, d.kv_layout.T
    shapes = (d.B, T, d.H, d.D), (d.B, S, d.K, d.D), (d.B, S, d.K, d.E), (d.B, T, d.H, d.E)
    q, k, v, g = (seeded(*s, seed=seed + i) for i, s in enumerate(shapes))
    want = whole(q, k, v, g, masks.allowed(mask, torch.arange(T), S), d.options["scale"], c)
    mine, keys = d.layout.positions(ctx.cp.rank), d.kv_layout.positions(ctx.cp.rank)
    inputs = [x[:, p].clone().requires_grad_() for x, p in ((q, mine), (k, keys), (v, keys))]
    sinks = None if c.sinks is None else c.sinks.clone().requires_grad_()
    changed = {"softcap": c.softcap, "alibi_slopes": c.slopes, "sinks": sinks, "dropout": c.dropout}
    options = d.options | {"transport": transport, "return_lse": True, "kernel": "auto"}
    given = {"mask": shares_of(mask, d.layout, ctx.cp.rank), "layout": d.layout, "kv_layout": d.kv_layout, "grid": d.grid}
    with ledger() as book:
        out, lse = sequence_attention(*inputs, ctx=ctx, **given, **options, **changed)
        out.backward(g[:, mine])
    close(out, want[0][:, mine])
    close(lse, want[1][:, mine])
    for x, right, p in zip(inputs, want[2:5], (mine, keys, keys), strict=True):
        close(x.grad, right[:, p])
    if sinks is not None:
        torch.distributed.all_reduce(sinks.grad, group=ctx.cp.group)
        close(sinks.grad, want[5])
    if not mask.has_table and not d.options["remat"]:
        grid = resolve_grid(d.grid, d.layout, d.kv_layout, mask, d.H, d.K, d.D, d.E, 8, transport)
        plan = schedule(Spec(d.layout, d.kv_layout, mask, False, grid, d.H, d.K, transport))
        assert book.bytes() == sum(plan.received(ctx.cp.rank, d.D, d.E, 8, d.B, lse=True).values())


def run(ctx, seeds):
    for seed in seeds:
        try:
            check(ctx, seed)
        except Exception as error:
            d = draw(seed, ctx.cp.size, 200)
            raise AssertionError(f"{d} {some_changes(seed, d.H)}: {type(error).__name__}: {error}") from error


@ranks(1, 2, 3, 4)
def test_random_calls_with_options_equal_one_process(rank, world):
    """Rotate and exchange, softcap, ALiBi, sinks and dropout on drawn grids, layouts and masks; bytes as the schedule says."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        run(ctx, range(500_000 + 1000 * world, 500_000 + 1000 * world + DRAWS))


@ranks(2, 4, timeout=600)
@pytest.mark.long
def test_many_more_calls_with_options(rank, world):
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        run(ctx, range(600_000, 600_200))


def one_call(ctx, layout, grid="auto", mask=None, T=1100, dtype=torch.float32, **options):
    """out, lse, dq, dk, dv of a fixed problem, gathered to the whole."""
    x = [seeded(1, T, 4, 32, seed=i, dtype=dtype) for i in range(4)]
    q, k, v, g = (ctx.cp.shard(a, layout) for a in x)
    q, k, v = (a.clone().requires_grad_() for a in (q, k, v))
    out, lse = sequence_attention(q, k, v, ctx=ctx, mask=mask, layout=layout, grid=grid, return_lse=True, **options)
    out.backward(g)
    return [ctx.cp.gather(a.detach(), layout) for a in (out, lse, q.grad, k.grad, v.grad)]


@ranks(2, 4)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", ["causal", "full", "documents"])
def test_deterministic_gives_the_bits_of_one_process(rank, world, kind, name):
    """out, lse and dq on any grid with merge 1 and edges at multiples of 256; dk and dv too for contiguous equal blocks."""
    mask = {"causal": masks.causal(), "full": None, "documents": masks.documents([300, 3, 700]) & masks.causal()}[name]
    for T in (1024, 1100):
        want = one_call(ParallelContext.single(), SequenceLayout.contiguous(T, 1), mask=mask, T=T, deterministic=True)
        with ParallelContext.from_env(cp=world, timeout=60) as ctx:
            layout = getattr(SequenceLayout, kind)(T, world, block=256)
            for grid in (AttentionGrid(ring=world), AttentionGrid(ulysses=world), AttentionGrid(ulysses=2, ring=-1)):
                got = one_call(ctx, layout, grid, mask, T, deterministic=True)
                same = 5 if kind == "contiguous" and T == 1024 else 3
                assert all(torch.equal(a, b) for a, b in zip(got[:same], want[:same], strict=True)), (grid, T)
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
