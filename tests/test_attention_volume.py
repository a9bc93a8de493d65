"""What published schemes are known to send, each by a formula of its own paper's counting, against the schedule and the wire.

All in elements that one rank receives, batch 1, even shares: t = T / N tokens, H query heads, K key heads, head_dim D.
The causal zigzag ring and the halos of windows stand in test_schedule.py.
"""

import pytest
import torch
from helpers import seeded
from pool import ranks
from test_schedule import FULL, formula
from wire import wire

from tpattn import AttentionGrid, ParallelContext, SequenceLayout, ledger, sequence_attention
from tpattn.schedule import Spec, schedule

H, K, D = 128, 64, 3
NS = [2, 4, 8, 16, 64]
ITEM = 4    # bytes of float32


def sent(n, grid, transport="exchange", H=H, K=K):
    """(forward, backward) elements that each rank receives, by the schedule; they are the same for all ranks."""
    layout = SequenceLayout.contiguous(4 * n, n)
    p = schedule(Spec(layout, layout, FULL, False, AttentionGrid(*grid), H, K, transport))
    each = set()
    for c in range(n):
        got = p.received(c, D, D, ITEM)
        each.add((got["forward in"] + got["forward out"], got["backward in"] + got["backward out"]))
    (forward, backward), = each
    return forward / ITEM, backward / ITEM


@pytest.mark.parametrize("n", NS)
def test_ring_or_all_gather_of_keys(n):
    """ring = N: everyone else's keys and values forward; the N - 1 others' gradients of one's own backward."""
    t = 4
    assert sent(n, (1, n, 1)) == ((n - 1) * t * 2 * K * D, (n - 1) * t * 2 * K * D)


@pytest.mark.parametrize("n", NS[:-1])
def test_rotating_ring(n):
    """N - 1 hops of keys forward; backward the keys again, and their gradients N - 2 hops on and one home: not N."""
    hop = 4 * 2 * K * D
    assert sent(n, (1, n, 1), "rotate") == ((n - 1) * hop, (n - 1) * hop + (n - 2) * hop + hop)


@pytest.mark.parametrize("n", NS)
def test_ulysses(n):
    """ulysses = N, DeepSpeed-Ulysses: all-to-all of q, k, v and out, each its own size times (N - 1) / N; the same backward."""
    t = 4
    forward = (H + K + K + H) * D * t * (n - 1) / n
    assert sent(n, (n, 1, 1)) == (forward, forward)


def test_ulysses_on_more_ranks_than_key_heads():
    """Each rank needs the one key head that its query heads read: no head is sent to ranks that only pad with it."""
    n, t = 16, 4
    forward = (64 + 64) * D * t * 15 / 16 + 2 * D * t * 15
    assert sent(n, (n, 1, 1), H=64, K=4) == (forward, forward)


@pytest.mark.parametrize(("u", "r"), [(2, 2), (4, 2), (2, 4), (8, 8)])
def test_usp(u, r):
    """ulysses x ring, USP and LoongTrain: all-to-all of q, k, v, out among u, then a ring of r over K / u heads of u t tokens."""
    t = 4
    forward = (2 * H + 2 * K) * D * t * (u - 1) / u + (r - 1) * 2 * (K / u) * D * u * t
    assert sent(u * r, (u, r, 1)) == (forward, forward)


@pytest.mark.parametrize(("r", "m"), [(2, 2), (4, 2), (2, 4), (8, 8)])
def test_attention2d(r, m):
    """ring x merge, Attention2D: queries gathered among m, keys among r, m partial outputs with lse reduced."""
    t = 4
    queries, keys, partials = (m - 1) * t * H, (r - 1) * t * 2 * K, (m - 1) * t * H
    forward = queries * D + keys * D + partials * (D + 1)
    backward = queries * (D + 2) + keys * D + partials * D      # up: dO, lse, delta; down: dq, and dk, dv
    assert sent(r * m, (1, r, m)) == (forward, backward)


@pytest.mark.parametrize("n", NS)
def test_tree_attention(n):
    """merge = N, tree attention, for decoding: queries to all keys, partial outputs with their lse back; no key travels."""
    t = 4
    assert sent(n, (1, 1, n)) == ((n - 1) * t * H * (D + D + 1), (n - 1) * t * H * (D + 2 + D))


@ranks(2, 4)
def test_the_wire_carries_the_formula(rank, world):
    """In every grid torch's process groups receive what the ledger says and the closed formula gives, forward and backward."""
    T, checked = 6 * world, 0
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for grid in AttentionGrid.all_of(world):
            for heads, kv_heads in ((8, 8), (12, 3), (16, 2)):
                if (want := formula(T, heads, kv_heads, 5, world, grid)) is None:
                    continue
                layout, checked = SequenceLayout.contiguous(T, world), checked + 1
                q, k, v = (seeded(1, T // world, h, 5, seed=h, dtype=torch.float32) for h in (heads, kv_heads, kv_heads))
                g, (q, k, v) = seeded(*q.shape, seed=1).float(), (x.requires_grad_() for x in (q, k, v))
                with ledger() as book, wire() as forward:
                    out = sequence_attention(q, k, v, ctx=ctx, layout=layout, grid=grid)
                with ledger() as back, wire() as backward:
                    out.backward(g)
                for one, seen, elements in ((book, forward, want[0]), (back, backward, want[1])):
                    assert one.bytes() == sum(b for _, b in seen) == round(4 * elements), (grid, heads, kv_heads)
        assert checked >= 6


@ranks(3, 4)
def test_rotate_takes_its_hops(rank, world):
    """Messages on the wire: N - 1 of one block forward; backward N - 1 of keys, N - 2 of their gradients and one home."""
    t, block = 4, 4 * 2 * 2 * 8 * 4     # tokens x (k and v) x heads x head_dim x float32
    layout = SequenceLayout.contiguous(t * world, world)
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        q, k, v = (seeded(1, t, h, 8, seed=h, dtype=torch.float32).requires_grad_() for h in (4, 2, 2))
        with wire() as forward:
            out = sequence_attention(q, k, v, ctx=ctx, layout=layout, grid=AttentionGrid(ring=world), transport="rotate")
        with wire() as backward:
            out.backward(out)
    got, back = ([b for name, b in seen if name == "recv"] for seen in (forward, backward))
    assert got == [block] * (world - 1)
    assert back == [block] * (world - 1 + world - 2 + 1)
