"""Every mask, and every combination of masks, allows exactly the pairs that its one-line definition allows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpattn import Unsupported, masks

B, H = 3, 4     # of the drawn masks with one table per sequence or head


# ---- the definitions, pair by pair -----------------------------------------------------------------------------------------


def pairs(rule, T, S):
    """bool [1, 1, T, S] of rule(i, j)."""
    return torch.tensor([[bool(rule(i, j)) for j in range(S)] for i in range(T)], dtype=torch.bool).view(1, 1, T, S)


def document_of(lengths, position):
    """Number of the document a position lies in, None behind the last."""
    for number, length in enumerate(lengths):
        if position < length:
            return number
        position -= length
    return None


def documents_table(rows, T, S):
    def same(row):
        return lambda i, j: document_of(row, i) is not None and document_of(row, i) == document_of(row, j)

    return torch.cat([pairs(same(row), T, S) for row in rows])


@st.composite
def leaves(draw, T, S):
    """A mask without combination, and its table [b, h, T, S]."""
    kind = draw(st.sampled_from(["full", "causal", "window", "prefix", "documents", "ids", "padding", "dense", "dense", "empty"]))
    number = st.integers(0, max(T, S) + 2)
    if kind == "full":
        return masks.full(), pairs(lambda i, j: True, T, S)
    if kind == "causal":
        return masks.causal(), pairs(lambda i, j: j <= i, T, S)
    if kind == "window":
        left, right = draw(st.none() | number), draw(st.none() | number)
        return masks.window(left, right), pairs(
            lambda i, j: (left is None or j >= i - left) and (right is None or j <= i + right), T, S)
    if kind in ("prefix", "empty"):
        n = draw(number) if kind == "prefix" else 0
        return masks.prefix(n), pairs(lambda i, j: j < n, T, S)
    if kind == "documents":
        rows = []
        for _ in range(draw(st.sampled_from([1, B]))):
            edges = sorted(draw(st.lists(st.integers(0, S), max_size=4)))
            rows.append([b - a for a, b in zip([0, *edges], edges, strict=False)])
        return masks.documents(rows if len(rows) > 1 else rows[0]), documents_table(rows, T, S)
    if kind == "ids":
        rows = draw(st.lists(st.lists(st.integers(-1, 2), min_size=S, max_size=S), min_size=1, max_size=1) |
                    st.lists(st.lists(st.integers(-1, 2), min_size=S, max_size=S), min_size=B, max_size=B))
        ids = torch.tensor(rows, dtype=torch.int64).view(len(rows), S)
        return masks.document_ids(ids if len(ids) > 1 else ids[0]), torch.cat([
            pairs(lambda i, j, row=row: i < S and row[i] >= 0 and row[i] == row[j], T, S) for row in rows])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    if kind == "padding":
        valid = torch.rand(B, S, generator=generator) < draw(st.sampled_from([0.2, 0.8]))
        return masks.padding(valid), valid[:, None, None].expand(B, 1, T, S)
    shape = draw(st.sampled_from([(T, S), (B, 1, T, S), (B, H, T, S), (1, 1, T, S)]))
    table = torch.rand(shape, generator=generator) < 0.5
    return masks.dense(table), table.expand(*(1, 1)[len(shape) - 2:], *shape)


@st.composite
def expressions(draw):
    """(mask, its whole table [b, h, T, S], T, S): up to four leaves joined by & and |."""
    T, S = draw(st.integers(1, 17)), draw(st.integers(0, 14))
    mask, table = draw(leaves(T, S))
    for _ in range(draw(st.integers(0, 3))):
        other, other_table = draw(leaves(T, S))
        flip, meet = draw(st.booleans()), draw(st.booleans())
        a, b = (other, mask) if flip else (mask, other)
        mask, table = (a & b, table & other_table) if meet else (a | b, table | other_table)
    return mask, table, T, S


@given(expressions())
def test_every_expression_allows_what_its_definition_allows(drawn):
    mask, table, T, S = drawn
    mask.check(B, H, T, S)
    got = masks.allowed(mask, torch.arange(T), S)
    assert torch.equal(*torch.broadcast_tensors(got, table))


@given(expressions(), st.integers(0, 99))
def test_rows_may_be_asked_for_in_any_number_and_order(drawn, seed):
    """A structured mask speaks of global positions: any subset of the rows gets its rows of the table."""
    mask, table, T, S = drawn
    if mask.has_table:
        return
    some = torch.randperm(T, generator=torch.Generator().manual_seed(seed))[:T // 2]
    assert torch.equal(*torch.broadcast_tensors(masks.allowed(mask, some, S), table[:, :, some]))
    assert masks.allowed(mask, some[:0], S).shape[-2:] == (0, S)


@given(expressions())
def test_intervals_are_disjoint_ascending_and_inside(drawn):
    """No pair is counted twice and none lies outside [0, S), so that sums of hi - lo are exact numbers of pairs."""
    mask, table, T, S = drawn
    lo, hi = mask.intervals(torch.arange(T), S)
    assert lo.shape == hi.shape and lo.shape[2] == T and lo.shape[0] in (1, B) and lo.shape[1] >= 1
    assert (lo >= 0).all() and (hi <= S).all() and (lo <= hi).all()
    covered = ((torch.arange(S) >= lo[..., None]) & (torch.arange(S) < hi[..., None])).sum(dim=1)
    assert covered.max() <= 1 if covered.numel() else True
    if mask.has_table:      # the structure may only allow more: it prunes what no rank needs
        assert (covered[:, None].bool() | ~table).all()
    else:
        assert (hi - lo).sum() == table.expand(lo.shape[0], 1, T, S).sum()
    structure = mask.structure()
    assert not structure.has_table
    assert all(torch.equal(x, y) for x, y in zip(structure.intervals(torch.arange(T), S), (lo, hi), strict=True))


# ---- by hand ---------------------------------------------------------------------------------------------------------------


def table_of(mask, T, S):
    return masks.allowed(mask, torch.arange(T), S).int().squeeze(0).squeeze(0).tolist()


def test_causal_with_other_lengths_is_aligned_top_left():
    """C23: row 0 sees key 0, row 1 sees keys 0 and 1, as torch's is_causal does; later rows see every key."""
    assert table_of(masks.causal(), 2, 4) == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert table_of(masks.causal(), 4, 2) == [[1, 0], [1, 1], [1, 1], [1, 1]]


def test_huggingface_window_w_is_window_w_minus_one():
    """Three keys with their own, as sliding_window=3 counts."""
    mask = masks.causal() & masks.window(2)
    assert table_of(mask, 5, 5) == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert table_of(masks.window(0, 0), 3, 3) == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_prefix_and_documents():
    assert table_of(masks.causal() | masks.prefix(2), 3, 4) == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert table_of(masks.documents([2, 0, 1]), 4, 4) == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert table_of(masks.documents([]), 2, 2) == [[0, 0], [0, 0]]
    assert table_of(masks.document_ids(torch.tensor([5, 2, 5])), 3, 3) == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
    two = masks.allowed(masks.documents([[2], [1, 1]]), torch.arange(2), 2)
    assert two[:, 0].int().tolist() == [[[1, 1], [1, 1]], [[1, 0], [0, 1]]]


@pytest.mark.parametrize("mask", [
    masks.prefix(0), masks.documents([]), masks.documents([0]), masks.padding(torch.zeros(1, 5, dtype=torch.bool)),
    masks.causal() & masks.prefix(0), masks.prefix(0) | masks.documents([0, 0]), masks.dense(torch.zeros(4, 5, dtype=torch.bool)),
])
def test_a_mask_may_allow_nothing(mask):
    """C19: rows masked for all keys are legal, and are empty intervals (or an empty table), not an error."""
    assert not masks.allowed(mask, torch.arange(4), 5).any()
    if not mask.has_table:
        lo, hi = mask.intervals(torch.arange(4), 5)
        assert (lo == hi).all()


def test_some_rows_may_be_empty():
    """C19: window(1) of a document that ends before: rows 3 and 4 read nothing."""
    mask = masks.documents([3]) & masks.window(1)
    assert masks.allowed(mask, torch.arange(5), 5)[0, 0].any(-1).tolist() == [True, True, True, False, False]


def test_a_union_of_overlaps_counts_each_key_once():
    """The union of three overlapping windows is one run; lengths add up to the number of pairs, not more."""
    mask = masks.window(2, 2) | masks.window(1, 3) | masks.causal()
    lo, hi = mask.intervals(torch.arange(6), 6)
    assert (hi - lo).sum() == masks.allowed(mask, torch.arange(6), 6).sum()
    assert (hi - lo).sum() != sum((h - l).sum() for l, h in (m.intervals(torch.arange(6), 6) for m in (mask.a, mask.b)))


# ---- values ----------------------------------------------------------------------------------------------------------------


def test_masks_are_values():
    """Equal when made alike, with equal hashes: a schedule is planned once for each. A dense table counts by identity."""
    def some():
        valid = torch.tensor([[True, False], [True, True]])
        return [masks.full(), masks.causal(), masks.window(1), masks.window(1, 1), masks.window(None, 1), masks.prefix(1),
                masks.documents([1, 1]), masks.documents([2]), masks.documents([[1, 1], [2]]), masks.padding(valid),
                masks.padding(~valid), masks.causal() & masks.window(1), masks.window(1) & masks.causal(),
                masks.causal() | masks.window(1),
                masks.document_ids(torch.tensor([0, 1])), masks.document_ids(torch.tensor([0, 0]))]

    for i, a in enumerate(some()):
        for j, b in enumerate(some()):
            assert (a == b) == (i == j), (a, b)
        assert hash(a) == hash(some()[i])
    table = torch.ones(2, 2, dtype=torch.bool)
    dense = masks.dense(table)
    assert dense == dense and dense != masks.dense(table) and masks.full() != "full"
    assert masks.documents([[1, 1]]) == masks.documents([1, 1])
    assert "causal" in repr(masks.causal() & dense)


def test_structure_forgets_the_table_alone():
    dense = masks.dense(torch.zeros(4, 4, dtype=torch.bool))
    assert (masks.causal() & dense).structure() == masks.causal() & masks.full()
    assert (masks.causal() | dense).structure() == masks.full()
    assert ((masks.causal() | dense) & masks.window(1)).structure() == masks.full() & masks.window(1)
    assert masks.causal().structure() == masks.causal()
    lo, hi = (masks.causal() & dense).intervals(torch.arange(4), 4)
    assert hi.flatten().tolist() == [1, 2, 3, 4], "a dense table joined to causal still prunes by causal"


# ---- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "words"), [
    (lambda: masks.dense(torch.zeros(2, 2)), ["bool", "float32", "additive", "masks.dense(additive == 0)"]),
    (lambda: masks.dense(torch.full((2, 2), -torch.inf, dtype=torch.bfloat16)), ["bfloat16", "additive"]),
    (lambda: masks.dense(torch.zeros(2, 2, dtype=torch.int64)), ["int64"]),
    (lambda: masks.dense([[True]]), ["list"]),
    (lambda: masks.dense(torch.ones(2, 3, 3, dtype=torch.bool)), ["[B, H, t, S]", "[2, 3, 3]"]),
    (lambda: masks.dense(torch.ones(3, dtype=torch.bool)), ["[3]"]),
    (lambda: masks.padding(torch.ones(2, 3)), ["float32", "[B, S]"]),
    (lambda: masks.padding(torch.ones(3, dtype=torch.bool)), ["[3]"]),
    (lambda: masks.padding([[True]]), ["list"]),
    (lambda: masks.window(-1), ["left=-1"]),
    (lambda: masks.window(1, 2.0), ["right=2.0"]),
    (lambda: masks.window(True), ["left=True"]),
    (lambda: masks.prefix(-1), ["n=-1"]),
    (lambda: masks.prefix(1.5), ["n=1.5"]),
    (lambda: masks.documents([2, -1]), ["-1"]),
    (lambda: masks.documents([2.0]), ["2.0"]),
    (lambda: masks.documents([[1], [0.5]]), ["0.5"]),
    (lambda: masks.documents(torch.tensor([3, 2])), ["Tensor", "list"]),
    (lambda: masks.documents([[1], 2]), ["2"]),
    (lambda: masks.documents(5), ["int", "list"]),
    (lambda: masks.document_ids([0, 1]), ["list", "integers"]),
    (lambda: masks.document_ids(torch.zeros(3)), ["float32", "integers"]),
    (lambda: masks.document_ids(torch.zeros(2, 1, 3, dtype=torch.int32)), ["[2, 1, 3]", "[B, S]"]),
    (lambda: masks.causal() & torch.ones(2, 2, dtype=torch.bool), ["Tensor"]),
    (lambda: masks.causal() | None, ["NoneType"]),
])
def test_what_is_no_mask_is_refused(make, words):
    with pytest.raises(Unsupported) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(("mask", "words"), [
    (masks.dense(torch.ones(5, 7, dtype=torch.bool)), ["[1, 1, 5, 7]", "t=4", "S=6", "ctx.cp.shard"]),
    (masks.dense(torch.ones(6, 6, dtype=torch.bool)), ["t=4"]),
    (masks.dense(torch.ones(3, 1, 4, 6, dtype=torch.bool)), ["B=2"]),
    (masks.dense(torch.ones(2, 2, 4, 6, dtype=torch.bool)), ["H=3"]),
    (masks.padding(torch.ones(2, 5, dtype=torch.bool)), ["[2, 6]"]),
    (masks.padding(torch.ones(1, 6, dtype=torch.bool)), ["[2, 6]"]),
    (masks.documents([[3], [3], [3]]), ["3 lists", "batch of 2"]),
    (masks.documents([4, 3]), ["sum to 7", "6 keys"]),
    (masks.causal() & masks.documents([7]), ["7"]),
    (masks.document_ids(torch.zeros(7, dtype=torch.int64)), ["[1, 7]", "S=6"]),
    (masks.document_ids(torch.zeros(3, 6, dtype=torch.int64)), ["[3, 6]", "B=2"]),
    (masks.documents([7]) | masks.causal(), ["7"]),
])
def test_a_mask_that_does_not_fit_the_call_is_refused(mask, words):
    """The check names what it got and what was needed: B=2, H=3, t=4 local rows, S=6 keys."""
    with pytest.raises(Unsupported) as error:
        mask.check(2, 3, 4, 6)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("mask", [
    masks.full(), masks.causal(), masks.window(99), masks.prefix(99), masks.documents([3, 3]), masks.documents([[6], [2]]),
    masks.padding(torch.ones(2, 6, dtype=torch.bool)), masks.dense(torch.ones(4, 6, dtype=torch.bool)),
    masks.dense(torch.ones(2, 3, 4, 6, dtype=torch.bool)), masks.dense(torch.ones(2, 1, 4, 6, dtype=torch.bool)),
    masks.dense(torch.ones(1, 3, 4, 6, dtype=torch.bool)),
])
def test_a_mask_that_fits_is_taken(mask):
    mask.check(2, 3, 4, 6)
