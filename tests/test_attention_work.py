"""What the kernels are asked to compute: (query, key) pairs counted at their door, against those that the mask allows.

The bound: no rank computes more than its allowed pairs plus 128 for each of its rows, in any layout of up to four ranks. Where
neighbouring tokens do not stay together (stripes of single tokens, tokens dealt at random), a row's limits are an edge in the
keys of every rank, and each edge costs up to 16: more ranks may compute 32 more a row for each of them.
"""

import pytest
import torch
from pool import ranks

from tpattn import AttentionGrid, ParallelContext, SequenceLayout, masks, sequence_attention
from tpattn.attention import engine
from tpattn.kernels import Accumulator, Gradients, Total, attend, attend_backward
from tpattn.kernels.backends import CpuFlash
from tpattn.schedule import Spec, schedule

T = 2100
CAUSAL = masks.causal()
DOCUMENTS, SHORT = [700, 3, 150, 150, 40, 257, 800], 25
MASKS = {
    "full": masks.full(), "causal": CAUSAL, "window": CAUSAL & masks.window(300), "two-sided window": masks.window(60, 200),
    "narrow window": CAUSAL & masks.window(9), "documents": masks.documents(DOCUMENTS),
    "causal documents": masks.documents(DOCUMENTS) & CAUSAL, "short documents": masks.documents([SHORT] * (T // SHORT)) & CAUSAL,
    "prefix": CAUSAL | masks.prefix(333), "padding": masks.padding(torch.arange(T)[None] < 1900),
    "left padding": masks.padding(torch.arange(T)[None] >= 77) & CAUSAL,
    "window in documents": masks.documents(DOCUMENTS) & CAUSAL & masks.window(100),
    "window or documents": (masks.window(100) & CAUSAL) | masks.documents([900, 1200]),
}


class Counting(CpuFlash):
    """Computes nothing and counts (query, key) pairs of each head, as the op computes them: whole blocks.

    leaf        side of the causal squares that are computed whole; None = as the op is used in float32, 0 = never split, as in
                bfloat16 on a CPU that has it
    """

    def __init__(self, leaf=None):
        self.side, self.pairs = leaf, {"forward": 0, "backward": 0}

    def leaf(self, dtype, backward, rows):
        return super().leaf(dtype, backward, rows) if self.side is None else self.side

    def count(self, direction, q, k, mask):
        rows, keys = q.shape[2], k.shape[2]
        pairs = rows * keys
        if isinstance(mask, str):   # the op goes through blocks of rows, each over the keys up to its last row (torch 2.13, CPU)
            block = 256 if rows >= 768 else 64 if rows >= 192 else 32
            pairs = sum(min(block, rows - i) * min(i + block, keys) for i in range(0, rows, block))
        self.pairs[direction] += q.shape[0] * q.shape[1] * pairs

    def forward(self, q, k, v, mask, scale, change=None):
        self.count("forward", q, k, mask)
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3])

    def backward(self, g, q, k, v, out, lse, mask, scale, change=None):
        self.count("backward", q, k, mask)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def computed(plan, c, leaf, backward=False):
    """Pairs times heads that rank c computes, by its tiles alone."""
    backend, groups = Counting(leaf), plan.head_groups(c)
    for part in range(plan.parts):
        for a in range(plan.n):
            for b in range(plan.n):
                if tiles := plan.tiles(part, c, a, b):
                    rows, keys = plan.row_positions(part, c, a).numel(), plan.key_positions(part, c, b).numel()
                    q, k = torch.zeros(1, plan.num_heads(c), rows, 1), torch.zeros(1, plan.num_kv_heads(c), keys, 1)
                    if backward:
                        into = Gradients(*(Total(x) for x in (q, k, k)))
                        attend_backward(into, q, k, k, q, q, q[..., 0], tiles, groups, 1.0, backend)
                    else:
                        attend(Accumulator(q.shape[:3], 1, q), q, k, k, tiles, groups, 1.0, backend)
    return backend.pairs["backward" if backward else "forward"]


def check_bound(layout, n, leaf, allowance, names=MASKS):
    """Computed <= allowed + rows x allowance on the first and the last rank, in the grids whose tiles differ."""
    over = {}
    for name in names:
        mask = MASKS[name]
        shares = layout(mask)
        table = masks.allowed(mask, torch.arange(T), T)[0, 0]
        for grid in {(1, n, 1), (1, 1, n), (n, 1, 1), (1, 2, n // 2) if n % 2 == 0 else (1, n, 1)}:
            plan = schedule(Spec(shares, shares, mask.structure(), False, AttentionGrid(*grid), 2 * n, n))
            for c in (0, n - 1):
                group = [s for s in range(n) if plan.coordinates[s][1] == plan.coordinates[c][1]]
                here = table[torch.cat([plan.q_positions[s] for s in group])][:, plan.columns(c)]
                allowed, rows = int(here.sum()), int(here.any(1).sum())
                extra = computed(plan, c, leaf) / plan.num_heads(c) - allowed
                assert extra >= 0
                if extra > rows * allowance:
                    over[name, grid, c] = f"{extra / rows:.0f} a row"
    assert not over, over


NEIGHBOURS = {"contiguous": lambda n: lambda mask: SequenceLayout.contiguous(T, n),
              "zigzag": lambda n: lambda mask: SequenceLayout.zigzag(T, n),
              "balanced": lambda n: lambda mask: SequenceLayout.balanced(mask, T, n),
              "striped by blocks": lambda n: lambda mask: SequenceLayout.striped(T, n, block=128)}


def dealt(n):
    owner = torch.randint(0, n, (T,), generator=torch.Generator().manual_seed(1))
    return SequenceLayout.of([(owner == rank).nonzero().flatten() for rank in range(n)])


LAYOUTS = NEIGHBOURS | {"striped": lambda n: lambda mask: SequenceLayout.striped(T, n), "dealt": lambda n: lambda mask: dealt(n)}


@pytest.mark.parametrize("n", [4, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3, 8))])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_no_rank_computes_much_more_than_the_mask_allows(kind, n):
    """At most 128 pairs a row more, for every structured mask and its combinations, wherever the tokens are."""
    check_bound(LAYOUTS[kind](n), n, None, 128 if kind in NEIGHBOURS else max(128, 32 * n))


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_whole_causal_squares_cost_what_the_op_s_own_blocks_cost(kind):
    """Where squares are left whole, the op's blocks of 256 rows add up to 128 a row to the 128 of the tiles."""
    check_bound(NEIGHBOURS[kind](4), 4, 0, 256)


@ranks(2, 4)
def test_the_engine_asks_for_these_pairs_and_no_others(rank, world):
    """Counted in sequence_attention itself: on each rank, forward and backward, the pairs of its tiles."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx, pytest.MonkeyPatch.context() as patch:
        for kind in ("zigzag", "striped"):
            layout = getattr(SequenceLayout, kind)(T, world)
            for grid in AttentionGrid.all_of(world):
                for name, transport in (("causal", "exchange"), ("window in documents", "rotate")):
                    backend = Counting()
                    patch.setattr(engine, "choose", lambda *_, backend=backend: backend)
                    q, k = (torch.zeros(1, layout.sizes[rank], h, 1, requires_grad=True) for h in (4, 2))
                    options = {"grid": grid, "layout": layout, "transport": transport}
                    out = sequence_attention(q, k, k, ctx=ctx, mask=MASKS[name], **options)
                    out.backward(out.detach())
                    plan = schedule(Spec(layout, layout, MASKS[name].structure(), False, grid, 4, 2, transport))
                    want = computed(plan, rank, None)
                    assert backend.pairs == {"forward": want, "backward": want}, (kind, grid, transport, name)
                    assert computed(plan, rank, None, backward=True) == want
