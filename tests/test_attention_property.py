"""sequence_attention equals float64 attention of one process: seeded draws over everything that it takes, to the byte sent."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from helpers import close, seeded
from oracle import attention_and_gradients
from pool import ranks

from tpattn import AttentionGrid, ParallelContext, SequenceLayout, ledger, masks, sequence_attention
from tpattn.schedule import Spec, count, resolve_grid, schedule

DRAWS = 150     # for each world size


@dataclasses.dataclass
class Draw:
    """The numbers of one call; its repr stands in the message of a failure."""

    seed: int
    B: int
    H: int
    K: int
    D: int
    E: int
    layout: SequenceLayout | None
    kv_layout: SequenceLayout | None
    mask: Any
    grid: AttentionGrid | str
    dtype: torch.dtype
    options: dict
    strides: str


def draw(seed, n, longest=300):
    r = random.Random(seed)
    T = r.choice([r.randint(1, 12), r.randint(1, 40), r.randint(1, 40), r.randint(30, longest)])
    S = T if r.random() < 0.65 else r.choice([r.randint(0, 12), r.randint(1, 40), r.randint(30, longest)])
    K = r.randint(1, 3)
    B = r.choice([1, 1, 2, 3])
    H, D = K * r.randint(1, 3), r.choice([1, 2, 4, 5, 8])
    layout = some_layout(r, T, n)
    kv_layout = layout if S == T and r.random() < 0.7 else some_layout(r, S, n)
    mask = some_mask(r, B, H, T, S)
    options = {"kernel": r.choice(["auto", "auto", "math"]), "remat": r.random() < 0.3, "return_lse": r.random() < 0.3,
               "scale": r.choice([None, None, 0.37, -0.2]), "transport": r.choice(["auto", "exchange"])}
    return Draw(seed, B, H, K, D, r.choice([D, D, 3, 9]), layout, kv_layout, mask, r.choice(["auto", *AttentionGrid.all_of(n)]),
                r.choice([torch.float64] * 5 + [torch.float32]), options, r.choice(["plain", "transposed", "sliced", "expanded"]))


def some_layout(r, T, n):
    kind = r.choice(["lengths", "contiguous", "zigzag", "zigzag", "striped", "of"])
    if kind == "lengths":
        cuts = sorted(r.randint(0, T) for _ in range(n - 1))
        return SequenceLayout.of_lengths([b - a for a, b in zip([0, *cuts], [*cuts, T], strict=True)])
    if kind == "of":
        owners, order = [r.randrange(n) for _ in range(T)], r.sample(range(T), T)
        return SequenceLayout.of([[p for p in order if owners[p] == i] for i in range(n)])
    return getattr(SequenceLayout, kind)(T, n, block=r.choice([1, 1, 4]))


def some_mask(r, B, H, T, S):
    edges = sorted(r.randint(0, S) for _ in range(r.randint(1, 4)))
    documents = [b - a for a, b in zip([0, *edges], edges, strict=False)]
    other = sorted(r.randint(0, S) for _ in range(2))
    generator = torch.Generator().manual_seed(r.randrange(1000))
    valid = torch.rand(B, S, generator=generator) < 0.8
    shape = r.choice([(T, S), (B, 1, T, S), (B, H, T, S)])
    table = torch.rand(shape, generator=generator) < r.choice([0.1, 0.6])
    if T > 2:
        table[..., r.randrange(T), :] = False
    band = masks.window(r.randint(0, max(1, T // 2)), r.choice([None, 0, 3, 40]))
    return r.choice([
        None, masks.causal(), masks.causal(), masks.causal() & masks.window(r.randint(0, T)), band, masks.documents(documents),
        masks.causal() & masks.documents(documents), masks.causal() | masks.prefix(r.randint(0, S)), masks.padding(valid),
        masks.padding(valid) & masks.causal(), masks.documents([documents] + [[other[0], other[1] - other[0]]] * (B - 1)),
        masks.dense(table), masks.dense(table) & masks.causal(), (masks.dense(table) | masks.causal()) & masks.window(S // 2),
        masks.prefix(0), band | masks.documents(documents),
    ])


def shares_of(mask, layout, rank):
    """The mask as this rank passes it: a dense table's rows in its local order, the rest unchanged."""
    if isinstance(mask, masks._Dense):
        return masks.dense(mask.allowed[..., layout.positions(rank), :])
    if isinstance(mask, masks._Pair):
        return type(mask)(shares_of(mask.a, layout, rank), shares_of(mask.b, layout, rank))
    return mask


def restride(x, kind):
    if kind == "transposed":
        return x.transpose(1, 3).contiguous().transpose(1, 3)
    if kind == "sliced":
        return torch.stack([x, torch.full_like(x, 1e6)], dim=-1)[..., 0]
    return x[:, :, :, :1].expand(x.shape) if kind == "expanded" and x.shape[3] else x


def messages(d, plan, axis, mask, itemsize):
    """(direction, bytes) of each exchange, as the schedule predicts them, with the tables of a dense mask."""
    c, got = axis.rank, plan.received(axis.rank, d.D, d.E, itemsize, d.B, d.options["return_lse"])
    inputs = got["forward in"]
    if mask.has_table:
        shape = mask.table(torch.arange(d.layout.T), d.kv_layout.T).shape
        rows = sum(count(plan.rows(p, c, s)) for p in range(plan.parts) for s in range(axis.size) if s != c)
        sequences = shape[0] if plan.parts == 1 else 1
        inputs += rows * sequences * (plan.num_heads(c) if shape[1] > 1 else 1) * plan.columns(c).numel()
    want = [("forward", inputs)] * plan.inputs_travel + [("forward", got["forward out"])] * plan.rows_travel
    want += [("backward", inputs)] * (d.options["remat"] and plan.inputs_travel)
    want += [("backward", got["backward in"])] * plan.rows_travel + [("backward", got["backward out"])] * plan.inputs_travel
    return want


def check(d, ctx, seed):
    """One draw on one group: out, lse, dq, dk, dv against the whole in float64, and the ledger against the schedule."""
    axis, T, S = ctx.cp, d.layout.T, d.kv_layout.T
    mask = masks.full() if d.mask is None else d.mask
    shapes = (d.B, T, d.H, d.D), (d.B, S, d.K, d.D), (d.B, S, d.K, d.E), (d.B, T, d.H, d.E)
    q, k, v, g = (restride(seeded(*s, seed=seed + i, dtype=d.dtype), d.strides) for i, s in enumerate(shapes))
    allowed = masks.allowed(mask, torch.arange(T), S)
    want = attention_and_gradients(q, k, v, g, allowed, d.options["scale"])
    mine, keys = d.layout.positions(axis.rank), d.kv_layout.positions(axis.rank)
    inputs = [restride(x[:, p], d.strides).detach().requires_grad_() for x, p in ((q, mine), (k, keys), (v, keys))]
    before = [x.detach().clone() for x in inputs]
    given = {"mask": d.mask and shares_of(d.mask, d.layout, axis.rank)}
    if not (d.layout.kind == d.kv_layout.kind == "of_lengths"):     # else the lengths are agreed
        given |= {"layout": d.layout, "kv_layout": None if d.kv_layout is d.layout else d.kv_layout}
    with ledger() as book:
        out = sequence_attention(*inputs, ctx=ctx, grid=d.grid, **given, **d.options)
        out, lse = out if d.options["return_lse"] else (out, None)
        out.backward(restride(g[:, mine], d.strides))
    assert out.dtype == d.dtype and (lse is None or not lse.requires_grad)
    wants = [want[0][:, mine], want[1][:, mine], want[2][:, mine], want[3][:, keys], want[4][:, keys]]
    for name, got, right in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *(x.grad for x in inputs)), wants, strict=True):
        if got is not None:
            try:
                close(got.double(), right, 1e-5 if got.dtype == torch.float32 else None)    # of size one: what cancels may be 0
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True)), "an input was modified"
    item = d.dtype.itemsize
    grid = resolve_grid(d.grid, d.layout, d.kv_layout, mask, d.H, d.K, d.D, d.E, item)
    plan = schedule(Spec(d.layout, d.kv_layout, mask.structure(), mask.has_table, grid, d.H, d.K))
    sent = [(m.direction, m.bytes) for m in book.select(operation="exchange")]
    assert sent == messages(d, plan, axis, mask, item), f"sent {sent}, planned {messages(d, plan, axis, mask, item)}"
    assert {m.axis for m in book.messages} <= {"cp"}


def run(ctx, seeds):
    for seed in seeds:
        d = draw(seed, ctx.cp.size)
        try:
            check(d, ctx, seed=10 * seed + 100_000 * min(ctx.cp.ranks))     # each group has data of its own
        except Exception as error:
            raise AssertionError(f"{d}\nrank {ctx.cp.rank} of {ctx.cp.size}: {type(error).__name__}: {error}") from error


@ranks(1, 2, 3, 4)
def test_random_calls_equal_one_process(rank, world):
    """C06: grids, layouts, masks, heads, lengths, widths, strides: output, lse, gradients, and bytes as the schedule says."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        run(ctx, range(1000 * world, 1000 * world + DRAWS))


@ranks(4)
@pytest.mark.parametrize("sizes", [{"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}])
def test_random_calls_on_two_groups_at_once(rank, world, sizes):
    """C48: cp groups {0,2} and {1,3}, then {0,1} and {2,3}, each with other data at the same time."""
    with ParallelContext.from_env(**{"dp": 1, **sizes}, timeout=60) as ctx:
        run(ctx, range(50))


@ranks(2, 3, 4, timeout=600)
@pytest.mark.long
@pytest.mark.parametrize("part", range(3))
def test_many_more_random_calls(rank, world, part):
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        run(ctx, range(100_000 + 1000 * part, 100_000 + 1000 * part + 500))
