"""Layouts are partitions of the sequence with exact inverse maps, for any length, ranks and block; grids factorise cp."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpattn import AttentionGrid, SequenceLayout, Unsupported
from tpattn.layout import chunk_sizes, split_sizes

KINDS = ["contiguous", "zigzag", "striped"]
SIZES = {"T": st.integers(0, 200), "n": st.sampled_from([1, 2, 3, 4, 5, 8, 64]), "block": st.sampled_from([1, 2, 3, 7, 16, 256])}


def layouts(T, n, block, seed=0):
    """One layout of each kind, the last with random owners in a random order."""
    order = torch.randperm(T, generator=torch.Generator().manual_seed(seed))
    owner = torch.randint(0, n, (T,), generator=torch.Generator().manual_seed(seed + 1))
    return [getattr(SequenceLayout, kind)(T, n, block=block) for kind in KINDS] + [
        SequenceLayout.of([order[owner == r] for r in range(n)])]


# ---- what each rank holds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "shares"), [
    (SequenceLayout.zigzag(8, 2), [[0, 1, 6, 7], [2, 3, 4, 5]]),
    (SequenceLayout.zigzag(16, 4), [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
    (SequenceLayout.zigzag(7, 2), [[0, 1, 6], [2, 3, 4, 5]]),
    (SequenceLayout.contiguous(7, 3), [[0, 1, 2], [3, 4], [5, 6]]),
    (SequenceLayout.contiguous(10, 4), [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]),
    (SequenceLayout.contiguous(10, 2, block=4), [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9]]),
    (SequenceLayout.striped(7, 3), [[0, 3, 6], [1, 4], [2, 5]]),
    (SequenceLayout.striped(9, 2, block=2), [[0, 1, 4, 5, 8], [2, 3, 6, 7]]),
    (SequenceLayout.striped(9, 2, 2), [[0, 1, 4, 5, 8], [2, 3, 6, 7]]),
    (SequenceLayout.of_lengths([2, 0, 3]), [[0, 1], [], [2, 3, 4]]),
    (SequenceLayout.of([[3, 1], torch.tensor([0, 2])]), [[3, 1], [0, 2]]),
], ids=repr)
def test_positions_are_these_lists(layout, shares):
    """C28: index lists computed by hand."""
    assert [layout.positions(r).tolist() for r in range(layout.n)] == shares
    assert layout.sizes == tuple(map(len, shares))
    assert all(layout.positions(r).dtype == torch.int64 for r in range(layout.n))


@given(**SIZES)
def test_every_position_belongs_to_exactly_one_rank(T, n, block):
    for layout in layouts(T, n, block):
        assert (layout.T, layout.n, sum(layout.sizes)) == (T, n, T)
        assert torch.cat([layout.positions(r) for r in range(n)]).sort().values.tolist() == list(range(T))
        assert torch.equal(layout.rank_order, torch.cat([layout.positions(r) for r in range(n)]))


@given(**SIZES)
def test_shares_are_as_equal_as_the_block_allows(T, n, block):
    """No rank has a whole block more than another, but for the last, ragged block; striped and zigzag too."""
    for layout in layouts(T, n, block)[:3]:
        blocks = [-(-size // block) for size in layout.sizes]
        assert max(blocks) - min(blocks) <= 1, layout
        assert layout.block == block and all(layout.ascending(r) for r in range(n))


@given(**SIZES)
def test_edges_lie_at_multiples_of_the_block(T, n, block):
    """A step that is not +1 inside a share, and the start of a share, is at a multiple of `block`."""
    for layout in layouts(T, n, block)[:3]:
        for r in range(n):
            p = layout.positions(r)
            starts = p[torch.cat([torch.ones(min(1, p.numel()), dtype=torch.bool), p.diff() != 1])]
            assert (starts % block == 0).all(), (layout, r)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 64])
def test_zigzag_gives_every_rank_the_same_causal_work(n):
    T = 6 * n
    work = [int((SequenceLayout.zigzag(T, n).positions(r) + 1).sum()) for r in range(n)]
    assert set(work) == {T * (T + 1) // 2 // n}
    if n > 1:
        assert len({int((SequenceLayout.contiguous(T, n).positions(r) + 1).sum()) for r in range(n)}) == n


@pytest.mark.parametrize("n", [1, 3, 8, 64])
@pytest.mark.parametrize("T", [0, 1, 2, 5])
def test_fewer_tokens_than_ranks_leaves_some_without(T, n):
    for layout in layouts(T, n, 1)[:3]:
        assert sorted(layout.sizes, reverse=True) == ([1] * T + [0] * n)[:n] if T <= n else sum(layout.sizes) == T
        assert layout.is_in_order or layout.kind != "contiguous"
        assert layout.from_rank_order(layout.to_rank_order(torch.arange(T), 0), 0).tolist() == list(range(T))


# ---- whole <-> share -------------------------------------------------------------------------------------------------------


@given(**SIZES, dim=st.integers(-3, 2))
def test_rank_order_and_back_is_the_identity_on_every_dimension(T, n, block, dim):
    """C29: what was sharded by a layout and gathered by it is what it was, on every axis."""
    shape = [2, 3, 2]
    shape[dim] = T
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    for layout in layouts(T, n, block):
        ordered = layout.to_rank_order(x, dim)
        assert torch.equal(layout.from_rank_order(ordered, dim), x)
        assert torch.equal(layout.to_rank_order(layout.from_rank_order(x, dim), dim), x)
        for r, share in enumerate(ordered.split(list(layout.sizes), dim=dim)):
            assert torch.equal(share, x.index_select(dim, layout.positions(r)))


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("T", [8, 16, 24])
def test_tokens_and_labels_stay_pairs(T, n):
    """C29: x and its labels, cut by the same layout, still belong together; gathering in rank order alone permutes them."""
    x = torch.arange(T)
    for layout in layouts(T, n, 1)[1:]:
        tokens, labels = (layout.to_rank_order(y, 0) for y in (x, x + 100))
        assert torch.equal(tokens + 100, labels)
        assert not torch.equal(tokens, x), "laid end to end by rank these are not the sequence"
        assert torch.equal(layout.from_rank_order(tokens, 0), x)


@given(T=st.integers(0, 60), n=st.integers(1, 9))
def test_is_in_order_exactly_when_the_shares_lie_end_to_end(T, n):
    for layout in layouts(T, n, 1):
        assert layout.is_in_order == (torch.cat([layout.positions(r) for r in range(n)]).tolist() == list(range(T)))
    assert SequenceLayout.contiguous(T, n).is_in_order and SequenceLayout.of_lengths([T, 0, 2]).is_in_order


def test_ascending_is_told_of_each_rank():
    layout = SequenceLayout.of([[4, 0, 2], [1, 3], []])
    assert [layout.ascending(r) for r in range(3)] == [False, True, True]


@given(size=st.integers(0, 80), n=st.integers(1, 70))
def test_split_sizes_are_torchs_tensor_split_and_chunk(size, n):
    """Tokens divide as evenly as can be, weights by DTensor's rule; 6 over 4 by the latter is 2, 2, 2, 0."""
    assert split_sizes(size, n) == [piece.numel() for piece in torch.arange(size).tensor_split(n)]
    chunks = [piece.numel() for piece in torch.arange(size).chunk(n)]
    assert chunk_sizes(size, n) == (chunks + [0] * n)[:n]
    assert chunk_sizes(6, 4) == [2, 2, 2, 0] and split_sizes(6, 4) == [2, 2, 1, 1]


# ---- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("positions", "words"), [
    ([[0, 1], [1, 2]], ["held twice [1]", "nobody [3]"]),
    ([[0, 1], [3]], ["nobody [2]", "largest 3"]),
    ([[0, -1]], ["smallest -1"]),
    ([[0, 7]], ["largest 7", "nobody [1]"]),
    ([[], [1]], ["nobody [0]"]),
    ([], ["one list of positions for each rank"]),
    ([torch.tensor([0.0, 1.0])], ["integers"]),
    ([[0.5, 1.7]], ["integers"]),
    ([torch.tensor([False, True])], ["integers"]),
    ([torch.tensor([[0, 1]])], ["one list", "[1, 2]"]),
])
def test_of_refuses_what_is_no_partition(positions, words):
    with pytest.raises(Unsupported) as error:
        SequenceLayout.of(positions)
    assert isinstance(error.value, ValueError)
    assert all(word in str(error.value) for word in words), str(error.value)


@given(n=st.integers(1, 5), T=st.integers(1, 30), seed=st.integers(0, 99), damage=st.integers(0, 2))
def test_of_refuses_every_damaged_partition(n, T, seed, damage):
    layout = layouts(T, n, 1, seed)[3]
    shares = [layout.positions(r).clone() for r in range(n)]
    victim = next(share for share in shares if share.numel())
    victim[0] = [T, -1, int(shares[-1][-1]) if T > 1 and shares[-1].numel() and shares[-1] is not victim else T][damage]
    with pytest.raises(Unsupported):
        SequenceLayout.of(shares)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("T", "n", "block", "word"), [
    (-1, 2, 1, "T=-1"), (8, 0, 1, "n=0"), (8, 2, 0, "block=0"), (8.0, 2, 1, "T=8.0"), (8, True, 1, "n=True"),
    ("8", 2, 1, "T='8'")])
def test_sizes_that_are_no_counts_are_refused(kind, T, n, block, word):
    with pytest.raises(Unsupported, match=word):
        getattr(SequenceLayout, kind)(T, n, block=block)


# ---- values ----------------------------------------------------------------------------------------------------------------


def test_layouts_are_values():
    """Equal when made alike, with equal hashes; different in any number, kind, order or share that differs."""
    def all_of_them():
        return [
            SequenceLayout.contiguous(8, 2), SequenceLayout.contiguous(8, 4), SequenceLayout.contiguous(9, 2),
            SequenceLayout.contiguous(8, 2, block=2), SequenceLayout.zigzag(8, 2), SequenceLayout.zigzag(8, 2, block=2),
            SequenceLayout.striped(8, 2), SequenceLayout.striped(8, 2, 2), SequenceLayout.of_lengths([5, 3]),
            SequenceLayout.of_lengths([3, 5]), SequenceLayout.of([[0, 1], [2, 3]]), SequenceLayout.of([[0, 1, 2], [3]]),
            SequenceLayout.of([[1, 0], [2, 3]]), SequenceLayout.of([[0, 1], [2, 3], []])]

    first, second = all_of_them(), all_of_them()
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            assert (a == b) == (i == j), (a, b)
        assert hash(a) == hash(second[i])
    assert len(set(first) | set(second)) == len(first)
    assert SequenceLayout.of([[0, 1]]) == SequenceLayout.of([torch.tensor([0, 1], dtype=torch.int32)])
    assert first[0] != "contiguous"
    assert "zigzag" in repr(first[4]) and "T=8" in repr(first[4]) and "block=2" in repr(first[5])


# ---- attention grids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 8, 64])
def test_grids_are_all_factorisations_and_coordinates_number_the_ranks(n):
    """Each rank has coordinates of its own, ulysses fastest, then ring, then merge."""
    grids = AttentionGrid.all_of(n)
    assert len(set(grids)) == len(grids)
    assert {(g.ulysses, g.ring, g.merge) for g in grids} == {
        (u, r, n // u // r) for u in range(1, n + 1) if n % u == 0 for r in range(1, n + 1) if n // u % r == 0}
    for grid in grids:
        assert grid.size == n and grid.resolve(n) == grid
        seen = [grid.coordinates(rank) for rank in range(n)]
        assert seen == [(u, r, m) for m in range(grid.merge) for r in range(grid.ring) for u in range(grid.ulysses)]


@pytest.mark.parametrize("n", [1, 3, 8, 64])
def test_minus_one_is_the_rest(n):
    assert AttentionGrid(ulysses=-1).resolve(n) == AttentionGrid(n, 1, 1)
    assert AttentionGrid(ring=-1).resolve(n) == AttentionGrid(1, n, 1)
    assert AttentionGrid(merge=-1).resolve(n) == AttentionGrid(1, 1, n)
    assert AttentionGrid(n, -1).resolve(n) == AttentionGrid(n, 1, 1)


@pytest.mark.parametrize(("sizes", "cp", "words"), [
    ({"ulysses": 3}, 4, ["ulysses=3", "cp=4", "1, 2, 4"]),
    ({"ulysses": 2, "ring": 2}, 2, ["covers 4 ranks", "cp=2"]),
    ({"ulysses": 3, "ring": -1}, 4, ["ulysses=3", "ring=-1", "cp=4"]),
    ({"merge": 2}, 64, ["merge=2", "cp=64", "16, 32, 64"]),
    ({}, 2, ["covers 1 ranks", "cp=2"]),
])
def test_a_grid_that_does_not_fit_is_refused_with_what_would(sizes, cp, words):
    with pytest.raises(Unsupported) as error:
        AttentionGrid(**sizes).resolve(cp)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("sizes", [{"ulysses": 0}, {"ring": -2}, {"merge": 1.5}, {"ring": "2"}, {"ulysses": True},
                                   {"ulysses": -1, "ring": -1}])
def test_grid_sizes_are_counts_or_one_minus_one(sizes):
    with pytest.raises(Unsupported) as error:
        AttentionGrid(**sizes)
    assert all(name in str(error.value) for name in sizes)
