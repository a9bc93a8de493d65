"""sequence_attention equals float64 attention of one process: draws over everything that it takes, to the byte sent.

hypothesis draws in pytest's process, one call at a time, as plain numbers and words (`Draw`), and every rank computes it; so a
failure shrinks to a small call, which its text names. The normal run draws DRAWS calls, --all 240 more. For thousands, other
ones with each seed:

    TPATTN_DRAWS=5000 TPATTN_SEED=7 python -m pytest --all tests/test_attention_property.py -k many_more
"""

import os
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import close, seeded
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from oracle import changed_attention_and_gradients
from pool import ranks
from wire import wire

from tpattn import AttentionGrid, ParallelContext, RandomKey, SequenceLayout, Unsupported, ledger, masks, sequence_attention
from tpattn.schedule import Spec, count, resolve_grid, schedule

DRAWS = {1: 40, 2: 90, 3: 90, 4: 120}   # for each number of ranks
MANY = int(os.environ.get("TPATTN_DRAWS", 60))
SEED = int(os.environ.get("TPATTN_SEED", 0))
MESHES = {1: [(1, 1, 1)], 2: [(1, 2, 1)], 3: [(1, 3, 1)], 4: [(1, 4, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)]}     # dp, cp, tp
BLOCK = 256     # edges of shares under deterministic=True
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


@dataclass(frozen=True)
class Draw:
    """One call, in plain values: any process makes the same tensors, layouts and masks of it."""

    mesh: tuple
    seed: int
    B: int
    T: int
    S: int
    H: int
    K: int
    D: int
    E: int
    layout: tuple
    kv_layout: tuple | None     # None = that of the queries
    told: bool                  # False: contiguous shares whose lengths the ranks agree on
    mask: tuple | None
    grid: tuple | str
    dtype: str
    strides: str
    transport: str = "auto"
    kernel: str = "auto"
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    dropout: float | None = None
    return_lse: bool = False
    remat: bool = False
    deterministic: bool = False
    twice: bool = False         # a second run must give the same bits


# ---- drawing ---------------------------------------------------------------------------------------------------------------


@st.composite
def draws(draw, world):
    def one(*values):
        return draw(st.sampled_from(values))

    def tokens():
        return draw(st.one_of(st.integers(0, 12), st.integers(1, 40), st.integers(30, 300)))

    mesh, fixed, B, K, D = one(*MESHES[world]), one(*[False] * 7, True), one(1, 1, 2, 3), one(1, 2, 3), one(1, 2, 4, 5, 8, 16)
    n = mesh[1]
    T = draw(st.integers(1, 800)) if fixed else tokens()
    S = T if one(True, True, False) else tokens()
    told = fixed or one(True, True, True, False)
    kinds = ["of_lengths"] if not told else ["contiguous", "zigzag", "striped", "of", "of_lengths", *["balanced"] * (S == T)]
    layout = (one("contiguous", "zigzag", "striped"), BLOCK) if fixed else draw(layouts(T, n, kinds))
    kv_layout = None if S == T and one(True, True, False) else draw(layouts(S, n, kinds))
    grids = [(g.ulysses, g.ring, g.merge) for g in AttentionGrid.all_of(n)]
    grid = one("auto", *(g for g in grids if not (fixed and g[2] > 1)))
    softcap, alibi, dropout = one(None, None, None, 1.3), one(False, False, False, True), one(None, None, None, 0.3)
    plain = softcap is None and not alibi and dropout is None
    return Draw(
        mesh, draw(st.integers(0, 9999)), B, T, S, K * one(1, 2, 3, 4), K, D, one(D, D, 3, 9), layout, kv_layout, told,
        draw(some_masks(B, S)), grid, one("float64", "float64", "float64", "float32", "bfloat16", "float16"),
        one("plain", "transposed", "sliced", "expanded"), one("auto", "exchange") if fixed else one("auto", "exchange", "rotate"),
        one("auto", "math", *["cpu_flash"] * plain), one(None, None, 0.37, -0.2), softcap, alibi, one(False, False, True),
        dropout, one(False, True), one(False, False, True), fixed, one(False, False, False, True))


@st.composite
def layouts(draw, T, n, kinds):
    kind = draw(st.sampled_from(kinds))
    if kind == "of":
        return kind, draw(st.integers(0, 999))
    if kind == "of_lengths":
        return kind, tuple(sorted(draw(st.lists(st.integers(0, T), min_size=n - 1, max_size=n - 1))))
    return kind, draw(st.sampled_from([1, 1, 4]))


def some_masks(B, S):
    edges = st.lists(st.integers(0, S), min_size=1, max_size=4).map(lambda x: tuple(sorted(x)))
    leaves = st.one_of(
        st.just(("causal",)), st.just(("causal",)),
        st.tuples(st.just("documents"), st.one_of(st.tuples(edges), st.tuples(*[edges] * B))),
        st.tuples(st.just("window"), st.one_of(st.none(), st.integers(0, 150)), st.sampled_from([None, 0, 3, 40])),
        st.tuples(st.just("prefix"), st.integers(0, S)), st.tuples(st.just("padding"), st.integers(0, 999)),
        st.tuples(st.just("dense"), st.sampled_from(["t", "Bt", "BHt"]), st.integers(0, 999), st.sampled_from([0.1, 0.6])),
    )
    pairs = st.tuples(st.sampled_from("&|"), leaves, leaves)
    return st.one_of(st.none(), leaves, leaves, pairs, st.tuples(st.sampled_from("&|"), pairs, leaves))


def make_layout(what, T, n, mask):
    kind, number = what
    if kind == "of":    # any owner of any token in any order; every third one leaves the last rank without tokens
        generator = torch.Generator().manual_seed(number)
        owner = torch.randint(0, max(1, n - (number % 3 == 0)), (T,), generator=generator)
        order = torch.randperm(T, generator=generator) if number % 2 else torch.arange(T)
        return SequenceLayout.of([order[owner[order] == rank] for rank in range(n)])
    if kind == "of_lengths":
        return SequenceLayout.of_lengths([b - a for a, b in zip((0, *number), (*number, T), strict=True)])
    if kind == "balanced":
        return SequenceLayout.balanced(mask, T, n, block=number)
    return getattr(SequenceLayout, kind)(T, n, block=number)


def make_mask(what, d, rows):
    """The mask; of a dense table the part for the rows at these positions, in this order."""
    if what is None:
        return masks.full()
    kind, *values = what
    if kind in "&|":
        a, b = (make_mask(x, d, rows) for x in values)
        return a & b if kind == "&" else a | b
    if kind == "documents":
        lengths = [[b - a for a, b in zip((0, *edges), edges, strict=False)] for edges in values[0]]
        return masks.documents(lengths if len(lengths) > 1 else lengths[0])
    if kind == "padding":
        return masks.padding(torch.rand(d.B, d.S, generator=torch.Generator().manual_seed(values[0])) < 0.8)
    if kind == "dense":
        form, number, share = values
        shape = {"t": (), "Bt": (d.B, 1), "BHt": (d.B, d.H)}[form]
        table = torch.rand(*shape, d.T, d.S, generator=torch.Generator().manual_seed(number)) < share
        table[..., number % max(1, d.T) :, :][..., :1, :] = False   # a row without keys
        return masks.dense(table[..., rows, :])
    return getattr(masks, kind)(*values)


def restride(x, kind):
    if kind == "transposed":
        return x.transpose(1, 3).contiguous().transpose(1, 3)
    if kind == "sliced":
        return torch.stack([x, torch.full_like(x, 1e3)], dim=-1)[..., 0]
    return x[:, :, :, :1].expand(x.shape) if kind == "expanded" and x.shape[3] else x


# ---- one call --------------------------------------------------------------------------------------------------------------


def call(d, ctx, whole, changes, layout, kv_layout, **options):
    """[out, lse, dq, dk, dv, dsinks] of this rank's shares of the whole [q, k, v, g]; None for what was not asked for."""
    rows, keys = layout.positions(ctx.cp.rank), kv_layout.positions(ctx.cp.rank)
    *inputs, g = (restride(x[:, p], d.strides).detach() for x, p in zip(whole, (rows, keys, keys, rows), strict=True))
    before = [x.clone() for x in inputs]
    sinks = [] if changes["sinks"] is None else [changes["sinks"].clone()]
    leaves = [x.requires_grad_() for x in (*inputs, *sinks)]
    mask = None if d.mask is None else make_mask(d.mask, d, rows)
    if d.told or ctx.cp.size == 1:
        options |= {"layout": layout, "kv_layout": None if kv_layout is layout else kv_layout}
    given = {"scale": d.scale, "return_lse": d.return_lse, "kernel": d.kernel, **changes, "sinks": sinks[0] if sinks else None}
    out = sequence_attention(*inputs, ctx=ctx, mask=mask, **given, **options)
    out, lse = out if d.return_lse else (out, None)
    assert out.dtype == inputs[0].dtype and (lse is None or not lse.requires_grad)
    gradients = torch.autograd.grad(out, leaves, g)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True)), "an input was modified"
    return [out.detach(), lse, *gradients, *[None] * (not sinks)]


def check(d, ctx):
    """One draw on one group: every result against the whole in float64, every byte against the schedule and against torch."""
    axis, dtype = ctx.cp, getattr(torch, d.dtype)
    first = 100 * d.seed + 10 * min(axis.ranks)     # each group has data of its own
    shapes = (d.B, d.T, d.H, d.D), (d.B, d.S, d.K, d.D), (d.B, d.S, d.K, d.E), (d.B, d.T, d.H, d.E)
    whole = [restride(seeded(*shape, seed=first + i, dtype=dtype), d.strides) for i, shape in enumerate(shapes)]
    wide = torch.float64 if d.dtype == "float64" else torch.float32
    changes = {"softcap": d.softcap, "alibi_slopes": seeded(d.H, seed=first + 5).abs().to(wide) if d.alibi else None,
               "sinks": seeded(d.H, seed=first + 6, dtype=wide) if d.sinks else None,
               "dropout": d.dropout and (d.dropout, RandomKey(3, d.seed, 2))}
    mask = make_mask(d.mask, d, torch.arange(d.T))
    layout = make_layout(d.layout, d.T, axis.size, mask)
    kv_layout = layout if d.kv_layout is None else make_layout(d.kv_layout, d.S, axis.size, mask)
    allowed = masks.allowed(mask, torch.arange(d.T), d.S)
    want = changed_attention_and_gradients(*whole, allowed, d.scale, *changes.values())
    grid = "auto" if d.grid == "auto" else AttentionGrid(*d.grid)
    options = {"grid": grid, "transport": d.transport, "remat": d.remat, "deterministic": d.deterministic}
    with ledger() as book, wire() as seen:
        got = call(d, ctx, whole, changes, layout, kv_layout, **options)
    check_bytes(d, axis, mask, layout, kv_layout, book, seen)
    if d.twice:
        again = call(d, ctx, whole, changes, layout, kv_layout, **options)
        for name, x, y in zip(NAMES, got, again, strict=True):
            assert x is None or torch.equal(x, y), f"{name} has other bits in a second run"
    alone = None
    if dtype != torch.float64 or d.deterministic:
        one = [SequenceLayout.contiguous(x, 1) for x in (d.T, d.S)]
        alone = call(d, ParallelContext.single(), whole, changes, *one, deterministic=d.deterministic)
    if d.sinks:     # each rank has the part of its rows
        torch.distributed.all_reduce(got[5], group=axis.group) if axis.size > 1 else None
    rows, keys = layout.positions(axis.rank), kv_layout.positions(axis.rank)
    for i, (name, x) in enumerate(zip(NAMES, got, strict=True)):
        if x is not None:
            mine = ... if name == "dsinks" else (slice(None), keys if name in ("dk", "dv") else rows)
            try:
                if dtype != torch.float64 and name != "lse":
                    no_worse(x, want[i][mine], dtype, alone[i], want[i])
                else:
                    close(x.double(), want[i][mine], 1e-10 if dtype == torch.float64 else 1e-5)
                assert not (d.deterministic and i < 3) or torch.equal(x, alone[i][mine]), "other bits than one process"
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def no_worse(got, want, dtype, alone, whole):
    """Within float32's 1e-5 of the largest value, 1 at least, for what cancels may be 0; else at most twice the error of one
    process in this dtype, which at least rounds the largest value. In float32 the scores of ALiBi may be too large for 1e-5.
    """
    if got.numel():
        error, undivided = (got.double() - want).abs().max(), (alone.double() - whole).abs().max()
        largest = whole.abs().max()
        rounding = torch.finfo(dtype).eps / 2 * largest
        allowed = max(1e-5 * largest.clamp(min=1), 2 * undivided, 2 * rounding)
        assert error <= allowed, f"error {error:.3g}, undivided {undivided:.3g}, rounding {rounding:.3g}"


def check_bytes(d, axis, mask, layout, kv_layout, book, seen):
    """The ledger against what torch received, and against the schedule: each exchange, and what rotates in sum."""
    assert [m.bytes for m in book.messages if m.bytes] == [b for _, b in seen if b], (book.messages, seen)
    assert {m.axis for m in book.messages} <= {"cp"}
    c, item, way = axis.rank, getattr(torch, d.dtype).itemsize, "rotate" if d.transport == "rotate" else "exchange"
    grid = "auto" if d.grid == "auto" else AttentionGrid(*d.grid)
    table = mask.table(torch.arange(d.T), d.S).shape[:2] if mask.has_table else (1, 1)
    spec = Spec(layout, kv_layout, mask.structure(), mask.has_table, AttentionGrid(), d.H, d.K, way, d.deterministic)
    plan = schedule(replace(spec, grid=resolve_grid(grid, spec, d.D, d.E, item)))
    got = plan.received(c, d.D, d.E, item, d.B, d.return_lse or d.sinks, table)
    first, agreed = got["forward in"], 0
    if axis.size > 1:
        agreed = 8 * (axis.size - 1) * (2 * (not d.told) + 2 * (mask.has_table and plan.rows_travel))
    # Keys that rotate come again in backward in any case, so remat fetches the others only.
    held = sum(count(plan.held(p, c, s)) * (d.B if plan.parts == 1 else 1)
               for p in range(plan.parts) for s in range(axis.size) if s != c and plan.hops(c, s))
    again = (first - item * plan.num_kv_heads(c) * (d.D + d.E) * held) * d.remat
    assert book.bytes(direction="forward") == agreed + first + got["forward out"]
    assert book.bytes(direction="backward") == again + got["backward in"] + got["backward out"]
    if not plan.rotates:
        want = [("forward", first)] * plan.inputs_travel + [("forward", got["forward out"])] * plan.rows_travel
        want += [("backward", again)] * (d.remat and plan.inputs_travel)
        want += [("backward", got["backward in"])] * plan.rows_travel + [("backward", got["backward out"])] * plan.inputs_travel
        assert [(m.direction, m.bytes) for m in book.select(operation="exchange")] == want


CONTEXTS = {}   # mesh -> its context, in the process of a rank: making one for each draw would take as long as the draw


@ranks(1, 2, 3, 4)
def on_each_rank(rank, world, d):
    """Not a test of its own: one draw, skipped when every rank refuses it."""
    if d.mesh not in CONTEXTS:
        dp, cp, tp = d.mesh
        CONTEXTS[d.mesh] = ParallelContext.from_env(dp=dp, cp=cp, tp=tp, timeout=60)
    try:
        check(d, CONTEXTS[d.mesh])
    except Unsupported as error:
        pytest.skip(str(error))
    except Exception as error:
        raise AssertionError(f"{d}\nrank {rank} of {world}: {type(error).__name__}: {error}") from error


@ranks(1, 2, 3, 4)
def close_contexts(rank, world):
    while CONTEXTS:
        CONTEXTS.popitem()[1].close()


# ---- all of them -----------------------------------------------------------------------------------------------------------

LEGS = ("ulysses", "ring", "merge")
ANYWHERE = {
    *("full", "causal", "window", "documents", "prefix", "padding", "dense", "&", "|"),
    *("float64", "float32", "bfloat16", "float16", "plain", "transposed", "sliced", "expanded", "other width", "other keys"),
    *("groups of heads", "scale", "softcap", "alibi", "sinks", "dropout", "return_lse", "remat", "deterministic", "twice"),
}
ON_SEVERAL = {
    *LEGS, "contiguous", "zigzag", "striped", "balanced", "of", "of_lengths", "lengths agreed", "no token for a rank",
    *("other layout of keys", "grid chosen", "keys rotate", "heads not divided by ulysses"),
}


def words(d):
    """What this draw has of all that can be drawn."""
    asked = ("scale", "softcap", "alibi", "sinks", "dropout", "return_lse", "remat", "deterministic", "twice")
    grid = (0, 0, 0) if d.grid == "auto" else d.grid
    said = {
        "lengths agreed": not d.told, "other keys": d.S != d.T, "other layout of keys": d.kv_layout is not None,
        "other width": d.E != d.D, "groups of heads": d.H > d.K, "grid chosen": d.grid == "auto",
        "no token for a rank": d.T < d.mesh[1], "keys rotate": d.transport == "rotate" and grid[1] > 1,
        "heads not divided by ulysses": grid[0] > 0 and d.H % grid[0] > 0, "part of the world": d.mesh[0] * d.mesh[2] > 1,
        **{name: bool(getattr(d, name)) for name in asked}, **{leg: size > 1 for leg, size in zip(LEGS, grid, strict=True)},
    }
    drawn = {d.dtype, d.strides, d.layout[0], f"transport {d.transport}", f"kernel {d.kernel}", *kinds_of(d.mask)}
    return drawn | {word for word, is_so in said.items() if is_so}


def kinds_of(mask):
    if mask is None:
        return {"full"}
    return {mask[0]}.union(*(kinds_of(part) for part in mask[1:] if mask[0] in "&|"))


def run_draws(world, number, start):
    """`number` different draws, of the seeds from `start` on; how often each word occurred. At most 2 % are refused."""
    refusals = {}       # draw -> why every rank refused it, or None

    def each(d):
        if d not in refusals:
            try:
                on_each_rank(world=world, d=d)
                refusals[d] = None
            except pytest.skip.Exception as refusal:
                refusals[d] = refusal.msg

    # Rounds of ten: of more draws in a row hypothesis makes most by changing one place of the one before.
    ten = settings(max_examples=10, phases=(Phase.generate, Phase.shrink), report_multiple_bugs=False)
    while len(refusals) < number:
        seed(start)(ten(given(draws(world))(each)))()
        start += 1
    close_contexts(world=world)
    refused = {d: why for d, why in refusals.items() if why}
    assert len(refused) <= 0.02 * len(refusals), refused
    return Counter(word for d in refusals for word in words(d))


@pytest.mark.timeout(600)       # a failure takes a while to shrink: each try that fails costs a pool
@pytest.mark.parametrize("world", DRAWS, ids=lambda world: f"{world}ranks")
def test_drawn_calls_equal_one_process(world):
    """C06: output, lse, gradients and bytes of every kind of call; at most 2 % are refused; each word is drawn."""
    drawn = run_draws(world, DRAWS[world], 0)
    few = {word for word in ANYWHERE | (ON_SEVERAL if world > 1 else set()) if not drawn[word]}
    assert not few, f"never drawn: {few}"


@pytest.mark.long
@pytest.mark.timeout(1200 + MANY)
@pytest.mark.parametrize("world", DRAWS, ids=lambda world: f"{world}ranks")
def test_many_more_drawn_calls_equal_one_process(world):
    run_draws(world, MANY, 1_000_000 * (1 + SEED))
