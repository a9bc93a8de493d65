"""Who computes what and who sends what, without a process: each allowed pair once, nothing travels unneeded, bytes as derived."""

import functools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpattn import AttentionGrid, SequenceLayout, Unsupported, masks
from tpattn.schedule import Schedule, Spec, choose_grid, count, find_tiles, resolve_grid, schedule, table_tiles

FULL, CAUSAL = masks.full(), masks.causal()


def plan(layout, mask, grid, H=4, K=2, kv_layout=None):
    grid = grid if isinstance(grid, AttentionGrid) else AttentionGrid(*grid)
    return schedule(Spec(layout, kv_layout or layout, mask.structure(), mask.has_table, grid, H, K))


# ---- tiles -----------------------------------------------------------------------------------------------------------------


def cover(tiles, T, S):
    """How many tiles count each (row, key) pair: [T, S]."""
    counts = torch.zeros(T, S, dtype=torch.int64)
    for tile in tiles:
        assert tile.rows > 0 and tile.keys > 0 and tile.row >= 0 and tile.key >= 0
        assert tile.row + tile.rows <= T and tile.key + tile.keys <= S
        i, j = torch.arange(tile.rows)[:, None], torch.arange(tile.keys)[None]
        if tile.kind == "ragged":
            assert tile.lo.numel() == tile.hi.numel() == tile.rows and (tile.lo <= tile.hi).all()
            inside = (j >= tile.lo[:, None]) & (j < tile.hi[:, None])
        else:
            assert tile.kind == "full" or tile.rows == tile.keys
            inside = {"full": i + j >= 0, "causal": j <= i, "flipped": j >= i}[tile.kind]
            inside = inside & (i // (tile.side or tile.rows) == j // (tile.side or tile.rows) if tile.side else inside)
        assert tile.pairs == inside.sum()
        counts[tile.row : tile.row + tile.rows, tile.key : tile.key + tile.keys] += inside
    return counts


def exactly(tiles, lo, hi, S):
    want = (torch.arange(S) >= lo[:, None]) & (torch.arange(S) < hi[:, None])
    counts = cover(tiles, lo.numel(), S)
    assert torch.equal(counts, want.long()), f"{int((counts != want).sum())} pairs wrong, counts up to {int(counts.max())}"


@st.composite
def limits(draw):
    """lo, hi of rows joined from pieces of every kind: flat, causal, flipped, band, empty, random, with any lengths."""
    S, los, his = draw(st.sampled_from([1, 5, 40, 300, 700])), [], []
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    for _ in range(draw(st.integers(1, 4))):
        rows, kind = draw(st.sampled_from([1, 2, 31, 32, 33, 100, 150, 300])), draw(st.integers(0, 5))
        a, b = sorted(torch.randint(0, S + 1, (2,), generator=generator).tolist())
        steps = torch.arange(rows)
        lo, hi = torch.full((rows,), a), torch.full((rows,), b)
        if kind == 4:
            hi = lo
        elif kind == 5:
            lo, hi = torch.randint(0, S + 1, (2, rows), generator=generator).sort(dim=0).values
        else:
            lo, hi = lo + steps * (kind // 2), hi + steps * (kind % 2)
        los.append(lo.clamp(max=S))
        his.append(torch.maximum(hi.clamp(max=S), los[-1]))
    return torch.cat(los), torch.cat(his), S


@given(limits())
def test_tiles_cover_each_allowed_pair_exactly_once(drawn):
    lo, hi, S = drawn
    exactly(find_tiles(lo, hi), lo, hi, S)


@given(limits())
def test_table_tiles_cover_each_allowed_pair_exactly_once(drawn):
    lo, hi, S = drawn
    tiles = table_tiles(lo, hi)
    exactly(tiles, lo, hi, S)
    assert all(tile.table for tile in tiles)


@pytest.mark.parametrize("T", [0, 1, 2, 127, 128, 129, 1000])
def test_structured_masks_need_no_table_of_their_rows(T):
    """Full, causal and wide window rows of a contiguous share become rectangles, squares and bands: nothing ragged, few tiles."""
    for mask in (FULL, CAUSAL, CAUSAL & masks.window(300), masks.window(290, 40), masks.window(None, 9)):
        lo, hi = (x[0, 0] for x in mask.intervals(torch.arange(T), T))
        tiles = find_tiles(lo, hi)
        exactly(tiles, lo, hi, T)
        if T == 1000:
            assert len(tiles) < 40 and sum(tile.kind == "ragged" for tile in tiles) <= 2, mask


def test_rows_of_no_key_give_no_tile():
    nothing = torch.zeros(300, dtype=torch.int64)
    assert find_tiles(nothing, nothing) == [] and table_tiles(nothing, nothing) == []
    assert find_tiles(nothing[:0], nothing[:0]) == [] and table_tiles(nothing[:0], nothing[:0]) == []


# ---- whole schedules: every pair and head once -----------------------------------------------------------------------------


@st.composite
def calls(draw):
    """(layout, kv_layout, mask, grid, H, K) of a small attention, cross-attention sometimes."""
    n = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    T, S = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    if draw(st.booleans()):
        S = T
    grid = draw(st.sampled_from(AttentionGrid.all_of(n)))
    K = draw(st.integers(1, 3))
    H = K * draw(st.integers(1, 3))

    def layout(length):
        kind = draw(st.sampled_from(["contiguous", "zigzag", "striped", "of"]))
        if kind != "of":
            return getattr(SequenceLayout, kind)(length, n, block=draw(st.sampled_from([1, 3])))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        owner, order = torch.randint(0, n, (length,), generator=generator), torch.randperm(length, generator=generator)
        return SequenceLayout.of([order[owner == r] for r in range(n)])

    q_layout = layout(T)
    kv_layout = q_layout if S == T and draw(st.booleans()) else layout(S)
    edges = sorted(draw(st.lists(st.integers(0, S), max_size=3)))
    documents = masks.documents([b - a for a, b in zip([0, *edges], edges, strict=False)])
    mask = draw(st.sampled_from([
        FULL, CAUSAL, CAUSAL & masks.window(3), documents, documents & CAUSAL, CAUSAL | masks.prefix(4), masks.window(2, 5),
        masks.prefix(0),
        masks.documents([[S // 2], [S - S // 3, S // 3]]), masks.padding(torch.arange(2 * S).view(2, S) % 3 > 0) & CAUSAL]))
    return q_layout, kv_layout, mask, grid, H, K


def held(p, c, s, positions, ranges):
    """Positions of rank s's tokens that rank c holds, numbered as its tiles number them."""
    if c == s:
        return positions
    return torch.cat([positions[slice(*r)] for r in ranges]) if ranges else positions[:0]


@given(calls(), st.sampled_from([(128, 32), (8, 3), (5, 1)]))
def test_every_pair_of_every_head_is_computed_by_exactly_one_rank(call, sizes):
    """Also with blocks of 8 and 5 rows in place of 128, so that these short sequences meet every kind of tile."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("EDGE", "_SHORT"), sizes, strict=True):
            patch.setattr(f"tpattn.schedule.{name}", size)
        count_pairs(*call)


def count_pairs(q_layout, kv_layout, mask, grid, H, K):
    T, S = q_layout.T, kv_layout.T
    p = Schedule(Spec(q_layout, kv_layout, mask.structure(), mask.has_table, grid, H, K))
    allowed = masks.allowed(mask, torch.arange(T), S)[:, 0]
    counts = torch.zeros(p.parts, H, T, S, dtype=torch.int64)
    for part in range(p.parts):
        for c in range(p.n):
            for a in range(p.n):
                rows = held(p, c, a, p.q_positions[a], p.rows(part, c, a))
                for b in range(p.n):
                    if tiles := p.tiles(part, c, a, b):
                        keys = held(p, c, b, p.k_positions[b], p.keys(part, c, b))
                        place = cover(tiles, rows.numel(), keys.numel())
                        whole = torch.zeros(T, S, dtype=torch.int64).index_put((rows[:, None], keys[None]), place)
                        counts[part, p.heads(c)] += whole
    assert torch.equal(counts, allowed[:, None].expand(p.parts, H, T, S).long())


@given(calls())
def test_only_rows_and_keys_that_the_mask_needs_travel(call):
    """A row travels where it reads a key there; a key where a row of the ring coordinate reads it; each range is tight."""
    q_layout, kv_layout, mask, grid, H, K = call
    p = plan(q_layout, mask, grid, H, K, kv_layout)
    allowed = masks.allowed(mask, torch.arange(q_layout.T), kv_layout.T)[:, 0]
    for part in range(p.parts):
        for c in range(p.n):
            group_rows = torch.cat([p.q_positions[s] for s in range(p.n) if p.coordinates[s][1] == p.coordinates[c][1]])
            group_keys = torch.cat([p.k_positions[s] for s in range(p.n) if p.coordinates[s][2] == p.coordinates[c][2]])
            for s in range(p.n):
                if s == c:
                    continue
                same_ring, same_merge = (p.coordinates[s][leg] == p.coordinates[c][leg] and p.num_heads(c) > 0 for leg in (1, 2))
                rows = allowed[part][p.q_positions[s]][:, group_keys].any(1) & same_ring
                keys = allowed[part][group_rows][:, p.k_positions[s]].any(0) & same_merge
                for flags, ranges in ((rows, p.rows(part, c, s)), (keys, p.keys(part, c, s))):
                    got = [i for start, stop in ranges for i in range(start, stop)]
                    assert got == flags.nonzero().flatten().tolist()
                    assert all(a[1] < b[0] for a, b in zip(ranges, ranges[1:], strict=False)), "ranges that touch are one"
    travel = [(c, s) for c in range(p.n) for s in range(p.n) for part in range(p.parts) if c != s and p.rows(part, c, s)]
    assert p.rows_travel == bool(travel)
    assert p.inputs_travel == (bool(travel) or any(p.keys(*x) for x in p._pairs()))


@given(calls())
def test_work_is_the_number_of_pairs_times_heads(call):
    q_layout, kv_layout, mask, grid, H, K = call
    p = plan(q_layout, mask, grid, H, K, kv_layout)
    total = int(masks.allowed(mask, torch.arange(q_layout.T), kv_layout.T).sum()) * H
    assert sum(p.work(c) for c in range(p.n)) == total
    for c in range(p.n):
        pairs = sum(t.pairs for part in range(p.parts) for a in range(p.n) for b in range(p.n) for t in p.tiles(part, c, a, b))
        assert p.work(c) == pairs * p.num_heads(c)


@pytest.mark.parametrize("ulysses", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("H", "K"), [(1, 1), (4, 4), (6, 3), (6, 2), (14, 7), (12, 4), (5, 1), (3, 3)])
def test_heads_divide_and_read_their_own_key_heads(ulysses, H, K):
    """C31: at most three groups, each with a whole ratio; query head i reads key head i // (H // K); none is padded or lost."""
    p = plan(SequenceLayout.contiguous(8, ulysses), FULL, (ulysses, 1, 1), H, K)
    seen = []
    for c in range(ulysses):
        groups, kv = p.head_groups(c), p.kv_heads(c)
        assert len(groups) <= 3
        for q_heads, kv_heads in groups:
            q = range(p.heads(c).start + q_heads.start, p.heads(c).start + q_heads.stop)
            k = range(kv.start + kv_heads.start, kv.start + kv_heads.stop)
            assert len(q) % len(k) == 0
            assert [i // (H // K) for i in q] == [j for j in k for _ in range(len(q) // len(k))]
            seen += q
    assert seen == list(range(H))


def test_equal_specs_share_one_schedule():
    def make():
        return plan(SequenceLayout.zigzag(12, 2), CAUSAL & masks.documents([5, 7]), (1, 2, 1))

    assert make() is make() and make() is not plan(SequenceLayout.zigzag(12, 2), CAUSAL, (1, 2, 1))


# ---- bytes -----------------------------------------------------------------------------------------------------------------


def formula(T, H, K, D, N, grid):
    """Elements received per rank forward, and backward, by DESIGN section 5; None where its terms are no whole numbers."""
    u, r, m = grid.ulysses, grid.ring, grid.merge
    k = K // u if K % u == 0 else 1 if u % K == 0 else None
    if H % u or k is None:
        return None
    h = H // u
    volume = 2 * D * T * (h * (1 / r - 1 / N) + k * (1 / m - 1 / N))
    many = m > 1
    return volume + many * (m * H - h) * T / N, volume + many * 2 * h * (1 / r - 1 / N) * T


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8, 16, 64])
@pytest.mark.parametrize(("H", "K"), [(16, 2), (8, 8), (12, 3), (64, 64), (4, 1)])
def test_unmasked_bytes_are_the_formula(n, H, K):
    """Even shares, no mask: received() equals V of DESIGN section 5, forward and backward, for every grid of n ranks."""
    T, D, checked = 2 * n, 5, 0
    for grid in AttentionGrid.all_of(n):
        want = formula(T, H, K, D, n, grid)
        if want is None:
            continue
        p, checked = plan(SequenceLayout.contiguous(T, n), FULL, grid, H, K), checked + 1
        for c in {0, n // 3, n - 1}:
            got = p.received(c, D, D, 4)
            assert got["forward in"] + got["forward out"] == round(4 * want[0]), (grid, c)
            assert got["backward in"] + got["backward out"] == round(4 * want[1]), (grid, c)
    assert checked


@given(st.sampled_from([2, 3, 4, 6, 8]), st.integers(1, 40), st.integers(1, 40), st.integers(1, 3), st.integers(1, 3),
       st.integers(0, 99), st.booleans())
def test_unmasked_bytes_of_uneven_shares(n, T, S, K, ratio, seed, low):
    """ENGINE section 1, integer form: uneven heads, tokens and Dv, fewer tokens than ranks, low precision, any grid."""
    grid = AttentionGrid.all_of(n)[seed % len(AttentionGrid.all_of(n))]
    H, D, E = K * ratio, 4, 7
    q, k = SequenceLayout.contiguous(T, n), SequenceLayout.zigzag(S, n)
    p = plan(q, FULL, grid, H, K, k)
    e, item, wide = int(grid.merge > 1), 2 if low else 4, 4
    totals = [[sum(x.sizes[s] for s in range(n) if p.coordinates[s][leg] == i) for i in range(size)]
              for x, leg, size in ((q, 1, grid.ring), (k, 2, grid.merge))]
    for c in range(n):
        h, kv, t, s = p.num_heads(c), p.num_kv_heads(c), q.sizes[c], k.sizes[c]
        rows, keys = totals[0][p.coordinates[c][1]], totals[1][p.coordinates[c][2]]
        groups, readers = sum(x > 0 for x in totals[1]), sum(x > 0 for x in totals[0])
        sum_k = sum(p.num_kv_heads(i) for i in range(grid.ulysses))
        many_dkv = wide if p.several_dkv else item
        away_rows = (rows - t) * bool(h and keys)
        away_keys = (keys - s) * bool(h and rows)
        own_out, own_kv = h * bool(keys), kv * bool(rows)
        assert p.received(c, D, E, item, batch=3) == {
            "forward in": 3 * item * (h * D * away_rows + kv * (D + E) * away_keys),
            "forward out": 3 * t * (groups * H - own_out) * (E * (wide if e else item) + wide * e),
            "backward in": 3 * h * away_rows * (E * item + 2 * wide * e),
            "backward out": 3 * (D * t * (groups * H - own_out) * (wide if e else item)
                                 + (D + E) * s * (readers * sum_k - own_kv) * many_dkv),
        }


@pytest.mark.parametrize("n", [2, 3, 4, 8, 64])
def test_causal_zigzag_needs_three_quarters_of_the_ring(n):
    """On each rank, forward and backward together, exactly 3/4 of the key traffic of an unmasked ring."""
    T, D = 8 * n, 3
    layout = SequenceLayout.zigzag(T, n)
    full, zigzag = (plan(layout, mask, (1, n, 1)) for mask in (FULL, CAUSAL))
    ratios = set()
    for c in range(n):
        whole, pruned = full.received(c, D, D, 4), zigzag.received(c, D, D, 4)
        assert 4 * sum(pruned.values()) == 3 * sum(whole.values()), c
        assert pruned["forward out"] == pruned["backward in"] == 0
        ratios.add(pruned["forward in"] / whole["forward in"])
    assert len(ratios) > 1, "forward alone is uneven, so only the sum of both is 3/4 on each rank"
    contiguous = plan(SequenceLayout.contiguous(T, n), CAUSAL, (1, n, 1))
    assert len({sum(contiguous.received(c, D, D, 4).values()) for c in range(n)}) == 1


@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_causal_zigzag_is_even_work(n):
    """Each rank's work is within 1.05 of the mean in every ring, at lengths that divide nothing; contiguous shares are not."""
    T = 64 * n + 3
    for ring, merge in ((n, 1), (1, n), (n // 2, 2)):
        for kind in ("zigzag", "contiguous"):
            p = plan(getattr(SequenceLayout, kind)(T, n), CAUSAL, (1, ring, merge))
            work = [p.work(c) for c in range(n)]
            assert (max(work) <= 1.05 * sum(work) / n) == (kind == "zigzag"), (ring, merge)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("left", [1, 7, 16])
def test_a_window_needs_one_halo_on_contiguous_and_two_on_zigzag(n, left):
    """Keys received: `left` for each piece whose predecessor lies elsewhere; striped shares need nearly everything."""
    T, mask = 32 * n, CAUSAL & masks.window(left)
    expected = {"contiguous": [left * (c > 0) for c in range(n)],
                "zigzag": [left * ((c > 0) + (c < n - 1)) for c in range(n)]}
    for kind, halos in expected.items():
        p = plan(getattr(SequenceLayout, kind)(T, n), mask, (1, n, 1))
        assert [sum(count(p.keys(0, c, s)) for s in range(n) if s != c) for c in range(n)] == halos, kind
    p = plan(SequenceLayout.striped(T, n), mask, (1, n, 1))
    everything = [T - T // n if left >= n - 1 else None for _ in range(n)]
    got = [sum(count(p.keys(0, c, s)) for s in range(n) if s != c) for c in range(n)]
    assert all(w is None or g >= w - n for g, w in zip(got, everything, strict=True))


def test_documents_inside_shares_send_nothing():
    """A mask that no pair of ranks shares: no exchange is called at all, in any grid of rings."""
    p = plan(SequenceLayout.contiguous(12, 3), masks.documents([2, 2, 4, 3, 1]) & CAUSAL, (1, 3, 1))
    assert not p.inputs_travel and not p.rows_travel
    assert all(set(p.received(c, 4, 4, 8).values()) == {0} for c in range(3))
    assert plan(SequenceLayout.contiguous(12, 3), masks.documents([3, 9]), (1, 3, 1)).inputs_travel


# ---- choosing a grid -------------------------------------------------------------------------------------------------------


def ungridded(layout, kv_layout, mask, H, K, **options):
    """A spec whose grid is to be chosen."""
    return Spec(layout, kv_layout, mask.structure(), mask.has_table, AttentionGrid(), H, K, **options)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_auto_takes_ulysses_for_contiguous_causal_shares(n):
    """A ring would leave the first rank idle; ulysses is even. A zigzag layout needs no such thing."""
    layout = SequenceLayout.contiguous(8 * n, n)
    assert choose_grid(ungridded(layout, layout, CAUSAL, 2 * n, 2 * n), 8, 8, 4).grid == AttentionGrid(n, 1, 1)
    ring = plan(layout, CAUSAL, (1, n, 1), 2 * n, 2 * n)
    assert max(ring.work(c) for c in range(n)) > 1.3 * sum(ring.work(c) for c in range(n)) / n


@functools.cache
def best(n, H, K, T, kind, mask, itemsize):
    layout = getattr(SequenceLayout, kind)(T, n)
    return choose_grid(ungridded(layout, layout, mask, H, K), 16, 16, itemsize).grid


@pytest.mark.parametrize(("n", "H", "K", "kind", "mask", "grid"), [
    (4, 8, 8, "contiguous", FULL, (4, 1, 1)),       # as many KV heads: ulysses sends 1/n of everything
    (4, 16, 1, "contiguous", FULL, (1, 4, 1)),      # one KV head: a ring sends least
    (4, 16, 1, "zigzag", CAUSAL, (1, 4, 1)),
    (3, 2, 2, "zigzag", CAUSAL, (1, 3, 1)),         # ulysses would leave a rank without heads
])
def test_auto_sends_least_among_the_balanced(n, H, K, kind, mask, grid):
    assert best(n, H, K, 16 * n, kind, mask, 4) == AttentionGrid(*grid)


@pytest.mark.long
@pytest.mark.parametrize("itemsize", [2, 4])
def test_auto_on_64_ranks(itemsize):
    assert best(64, 16, 2, 64, "contiguous", FULL, itemsize) == AttentionGrid(2, 16, 2)


def test_the_best_grid_of_64_ranks_by_the_formula():
    """N=64, H=16, K=2: ulysses=2, ring=16, merge=2; 1.29x less than the best of merge=1 and 2.3x less than a ring."""
    layout = SequenceLayout.contiguous(128, 64)
    sent = {}
    for grid in AttentionGrid.all_of(64):
        if grid.ulysses <= 16:      # with more, ranks without heads would idle
            sent[grid] = sum(plan(layout, FULL, grid, 16, 2).received(17, 128, 128, 4).values())
    least = min(sent, key=sent.get)
    assert least == AttentionGrid(2, 16, 2)
    assert min(v for g, v in sent.items() if g.merge == 1) / sent[least] == pytest.approx(1.29, abs=0.02)
    assert sent[AttentionGrid(1, 64, 1)] / sent[least] == pytest.approx(2.3, abs=0.05)


def test_grids_that_do_not_fit_are_refused():
    layout = SequenceLayout.contiguous(8, 2)
    arguments = ungridded(layout, layout, FULL, 2, 2), 4, 4, 4
    assert resolve_grid(AttentionGrid(ring=-1), *arguments) == AttentionGrid(1, 2, 1)
    refused = [(AttentionGrid(3), ["ulysses=3", "cp=2"]), ("best", ["'best'", "auto"]), (None, ["None"]), ((2, 1), ["(2, 1)"])]
    for grid, words in refused:
        with pytest.raises(Unsupported) as error:
            resolve_grid(grid, *arguments)
        assert all(word in str(error.value) for word in words)
    alone = SequenceLayout.contiguous(8, 1)
    few_queries = SequenceLayout.contiguous(2, 2), layout, FULL, 1, 1
    assert resolve_grid("auto", ungridded(*few_queries), 4, 4, 4).merge == 2
    assert resolve_grid("auto", ungridded(*few_queries, fixed=True), 4, 4, 4).merge == 1    # deterministic=True can hold no other
    assert resolve_grid("auto", ungridded(alone, alone, FULL, 2, 2), 4, 4, 4) == AttentionGrid()


def test_a_choice_says_why():
    """AttentionGrid.choose gives what "auto" takes, and a line for each grid: taken, or too uneven, with its bytes."""
    layout = SequenceLayout.contiguous(32, 4)
    choice = AttentionGrid.choose(layout, CAUSAL, 4, 4, 8)
    assert choice.grid == resolve_grid("auto", ungridded(layout, layout, CAUSAL, 4, 4), 8, 8, 4) == AttentionGrid(4, 1, 1)
    lines = choice.explain().splitlines()
    assert len(lines) == 2 + len(AttentionGrid.all_of(4))
    assert lines[1].startswith("4 x 1 x 1") and lines[1].endswith("taken")
    assert next(line for line in lines if line.startswith("1 x 4 x 1")).endswith("work too uneven")


@pytest.mark.parametrize("n", [3, 4, 8])
def test_balanced_layouts_even_out_any_mask(n):
    """20 mixes of documents of very unequal lengths: work within 1.05 of the mean, equal token counts, 0.6 of a ring's keys."""
    r, traffic = random.Random(n), []
    T = 64 * 128 * n
    for _ in range(20):
        lengths = []
        while sum(lengths) < T:
            lengths.append(min(int(math.exp(r.uniform(math.log(16), math.log(T)))), T - sum(lengths)))
        mask = CAUSAL & masks.documents(lengths)
        layout = SequenceLayout.balanced(mask, T, n)
        assert max(layout.sizes) - min(layout.sizes) <= 128
        assert torch.equal(layout.rank_order.sort().values, torch.arange(T))
        assert all(layout.ascending(c) for c in range(n))
        p = plan(layout, mask, (1, n, 1))
        work = [p.work(c) for c in range(n)]
        assert max(work) <= 1.05 * sum(work) / n
        plain = plan(SequenceLayout.contiguous(T, n), mask, (1, n, 1))
        assert max(work) <= max(plain.work(c) for c in range(n))
        traffic.append(sum(count(p.keys(0, c, s)) for c in range(n) for s in range(n) if s != c) / ((n - 1) * T))
    assert sum(traffic) / len(traffic) <= 0.6
    assert SequenceLayout.balanced(CAUSAL, 5, 4) == SequenceLayout.balanced(CAUSAL, 5, 4)
    assert sum(SequenceLayout.balanced(CAUSAL, 0, 4).sizes) == 0


@pytest.mark.parametrize("n", [2, 4])
def test_auto_counts_the_rows_of_a_dense_table(n):
    """Under ulysses the rows of the table travel, a byte for each key: with few heads that is most of the bytes."""
    layout, table = SequenceLayout.contiguous(512, n), masks.dense(torch.ones(512 // n, 512, dtype=torch.bool))
    choice = AttentionGrid.choose(layout, table, n, n, 8)
    assert choice.grid.ulysses == 1
    bytes_of = {c.grid: c.bytes for c in choice.candidates}
    without = {c.grid: c.bytes for c in AttentionGrid.choose(layout, FULL, n, n, 8).candidates}
    assert bytes_of[AttentionGrid(n, 1, 1)] - without[AttentionGrid(n, 1, 1)] == 512 // n * (n - 1) * 512
    assert bytes_of[AttentionGrid(1, n, 1)] == without[AttentionGrid(1, n, 1)]
