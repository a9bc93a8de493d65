"""The first seed's attention module equals its own mathematics on one process, in float64, on any number of ranks."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from helpers import close, far, seeded
from pool import ranks

from tpattn import ParallelContext, Unsupported, ledger
from tpattn.attention import DistributedDotProductAttn

PATHS = pytest.mark.parametrize("build_scores", [False, True], ids=["blockwise", "scores"])


def whole_attention(module, keys, queries, values, attn_mask):
    """The original's definition on undivided tensors: softmax over the last axis of K Q^T / sqrt(D), rows are keys."""
    def heads(x):
        return x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)

    k, q, v = heads(module.keys(keys)), heads(module.queries(queries)), heads(module.values(values))
    scores = k @ q.mT / math.sqrt(module.key_dim / module.num_heads)
    if attn_mask is not None:
        scores = scores.masked_fill(attn_mask[:, None] != 0, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)        # a row with everything hidden
    return module.composition((weights @ v).transpose(1, 2).flatten(2))


class Problem:
    """Whole inputs, the same on every rank, and a module with the same weights."""

    def __init__(self, t, s=None, B=3, num_heads=2, key_dim=8, value_dim=None, query_dim=None, masked=True, seed=0, **options):
        self.t, self.s = t, t if s is None else s
        T, S = sum(self.t), sum(self.s)
        torch.manual_seed(seed)
        self.module = DistributedDotProductAttn(key_dim, value_dim, query_dim, num_heads, **options).double()
        m = self.module
        self.keys, self.queries, self.values = (
            seeded(B, n, width, seed=seed + i)
            for i, (n, width) in enumerate(((T, m.key_dim), (S, m.query_dim), (S, m.value_dim))))
        self.mask = (seeded(B, T, S, seed=seed + 3) > 0.3).to(torch.int64) * 7 if masked else None
        self.g = seeded(B, T, m.value_dim, seed=seed + 4)

    def want(self):
        """Output, gradients of the three inputs and of every parameter, from one process."""
        module = copy.deepcopy(self.module)
        inputs = [x.clone().requires_grad_() for x in (self.keys, self.queries, self.values)]
        out = whole_attention(module, *inputs, self.mask)
        return [out, *torch.autograd.grad(out, inputs, self.g)], torch.autograd.grad(
            whole_attention(module, *inputs, self.mask), list(module.parameters()), self.g)

    def run(self, rank):
        """The same by the module, of one rank's shares; parameters' gradients are its part."""
        inputs = [x.split(n, dim=1)[rank].clone().requires_grad_() for x, n in
                  zip((self.keys, self.queries, self.values), (self.t, self.s, self.s), strict=True)]
        mask = None if self.mask is None else self.mask.split(self.t, dim=1)[rank]
        out = self.module(*inputs, mask)
        self.module.zero_grad()
        out.backward(self.g.split(self.t, dim=1)[rank])
        return [out, *(x.grad for x in inputs)], [p.grad for p in self.module.parameters()]

    def check(self, rank, group=None):
        """Assert that outputs and input gradients are this rank's rows, and that parameter gradients sum to the whole ones."""
        (rows, whole), (got, parts) = self.want(), self.run(rank)
        for mine, all_rows, n in zip(got, rows, (self.t, self.t, self.s, self.s), strict=True):
            close(mine, all_rows.split(n, dim=1)[rank])
        for part, total in zip(parts, whole, strict=True):
            if dist.is_initialized():
                dist.all_reduce(part, group=group)
            close(part, total)


@ranks(1, 2, 3, 4)
@PATHS
@pytest.mark.parametrize("rows", ["even", "uneven", "empty"])
@pytest.mark.parametrize("masked", [False, True])
def test_module_equals_one_process(rank, world, build_scores, rows, masked):
    """C24, C32: output, gradients of keys, queries, values and of all weights; any lengths, batch 3, several heads."""
    t = {"even": [6] * 4, "uneven": [5, 1, 8, 3], "empty": [0, 6, 1, 0]}[rows][:world]
    Problem(t, build_scores=build_scores, masked=masked, add_bias=True).check(rank)


@ranks(2, 3)
@PATHS
@pytest.mark.parametrize("dims", [
    {"key_dim": 6, "num_heads": 3, "value_dim": 9, "query_dim": 5},
    {"key_dim": 4, "num_heads": 1},
    {"key_dim": 8, "value_dim": 2},
])
def test_value_and_query_widths(rank, world, build_scores, dims):
    """value_dim != key_dim with several heads, where the original breaks."""
    Problem([5, 2, 4][:world], build_scores=build_scores, B=2, **dims).check(rank)


@ranks(2)
@PATHS
def test_keys_and_queries_of_other_lengths(rank, world, build_scores):
    Problem([5, 2], [3, 8], build_scores=build_scores).check(rank)


@ranks(1, 2)
@PATHS
@pytest.mark.parametrize("offset", [1, 3, 1000])
def test_offset_changes_nothing(rank, world, build_scores, offset):
    Problem([5, 4][:world], build_scores=build_scores, offset=offset).check(rank)


@ranks(1, 2)
@PATHS
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_rows_with_everything_hidden_give_zero(rank, world, build_scores, dtype):
    """No NaN, forward or backward: such a row is 0 before `composition`, so with its bias after; nonzero of any dtype hides."""
    problem = Problem([4, 3][:world], build_scores=build_scores, add_bias=True)
    problem.mask[:, ::2] = 1
    problem.mask = problem.mask.to(dtype)
    problem.check(rank)
    out, *gradients = problem.run(rank)[0]
    assert all(x.isfinite().all() for x in (out, *gradients))
    hidden = (problem.mask.split(problem.t, dim=1)[rank] != 0).all(-1)
    assert hidden.any()
    close(out[hidden], problem.module.composition.bias.detach().expand_as(out[hidden]))


@ranks(2)
@PATHS
def test_a_mask_on_one_rank_only(rank, world, build_scores):
    """None, or a mask that hides nothing, next to one that hides: all ranks take part in the same messages."""
    problem = Problem([4, 3], build_scores=build_scores)
    problem.mask[:, :4] = 0
    rows = problem.want()[0]
    for absent in (False, True):
        inputs = [x.split(problem.t, dim=1)[rank] for x in (problem.keys, problem.queries, problem.values)]
        mask = problem.mask.split(problem.t, dim=1)[rank]
        close(problem.module(*inputs, None if absent and rank == 0 else mask), rows[0].split(problem.t, dim=1)[rank])


@ranks(2)
def test_the_softmax_runs_over_queries(rank, world):
    """The usual attention, rows of queries over keys, is another function: swapped arguments are far."""
    problem = Problem([4, 3], masked=False, num_heads=1)
    module = copy.deepcopy(problem.module)
    usual = copy.deepcopy(module)
    usual.keys, usual.queries = module.queries, module.keys
    k, q, v = (x.split(problem.t, dim=1)[rank] for x in (problem.keys, problem.queries, problem.values))
    far(usual(q, k, v, None), module(k, q, v, None))


@ranks(2)
def test_a_parameter_gradient_is_a_part_until_it_is_summed(rank, world):
    problem = Problem([4, 3])
    for part, total in zip(problem.run(rank)[1], problem.want()[1], strict=True):
        far(part, total)


@ranks(2)
@PATHS
def test_strided_inputs(rank, world, build_scores):
    """C06: transposed and expanded inputs, masks and upstream gradients equal contiguous ones."""
    problem = Problem([4, 4], build_scores=build_scores, B=2)
    problem.keys = problem.keys.mT.contiguous().mT
    problem.queries = problem.queries[:1].expand(problem.queries.shape)
    problem.mask = problem.mask[:1].expand(problem.mask.shape)
    problem.g = problem.g[:, :, :1].expand(problem.g.shape)
    problem.check(rank)


@ranks(4)
@PATHS
def test_contexts_share_time_over_cp(rank, world, build_scores):
    """C47, C48: cp groups {0,2} and {1,3}, then {0,1} and {2,3}, each with its own data; two contexts in a row work."""
    for sizes in ({"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}):
        with ParallelContext.from_env(**{"dp": 1, **sizes}) as ctx:
            problem = Problem([5, 2], build_scores=build_scores, ctx=ctx, seed=10 * min(ctx.cp.ranks))
            problem.check(ctx.cp.rank, ctx.cp.group)


@ranks(2)
@PATHS
def test_not_distributed_is_local(rank, world, build_scores):
    """distributed=False: the tensors of this rank are all there is, whatever groups exist, and nothing is sent."""
    problem = Problem([5 + rank], build_scores=build_scores, distributed=False, seed=rank)
    with ledger() as book:
        (rows, whole), (got, parts) = problem.want(), problem.run(0)
        close(got, rows)
        close(parts, list(whole))
    assert not book.messages


@PATHS
def test_one_process_without_a_group(build_scores):
    problem = Problem([7], build_scores=build_scores)
    with ledger() as book:
        problem.check(0)
    assert not dist.is_initialized() and not book.messages
    single = Problem([7], build_scores=build_scores, ctx=ParallelContext.single())
    single.check(0)


@ranks(2)
def test_scores_are_not_built_unless_asked_for(rank, world):
    """The default path sends each query and value row once, in one message each way, whatever the offset."""
    problem = Problem([40, 24], offset=1, B=1)
    with ledger() as book:
        problem.run(rank)
    other = problem.t[1 - rank]
    forward = book.select(direction="forward")
    assert [m.operation for m in forward] == ["all_gather", "exchange"]
    assert forward[1].bytes == other * (problem.module.key_dim + problem.module.value_dim) * 8
    assert len(book.select(direction="backward")) == 1


@ranks(2)
def test_scores_travel_in_messages_of_offset(rank, world):
    problem = Problem([4, 6], offset=3, B=2, num_heads=2, key_dim=8, value_dim=12, build_scores=True)
    with ledger() as book:
        problem.run(rank)
    B, H, D, E, other = 2, 2, 4, 6, problem.t[1 - rank]
    sent = [m.bytes // (B * H * 8) for m in book.select(direction="forward") if m.bytes > 64]      # without the small agreements
    assert sent == [3 * D, (other - 3) * D] + [other * 3] * (E // 3)        # rows of the queries, columns of the values


def test_projections_are_ordinary_linear_modules():
    """Names, shapes and biases of the original."""
    module = DistributedDotProductAttn(6, 9, 5, num_heads=3, add_bias=True)
    shapes = {name: list(p.shape) for name, p in module.named_parameters()}
    assert shapes == {
        "keys.weight": [6, 6], "keys.bias": [6], "queries.weight": [6, 5], "queries.bias": [6],
        "values.weight": [9, 9], "values.bias": [9], "composition.weight": [9, 9], "composition.bias": [9],
    }
    assert all(type(m) is torch.nn.Linear for m in module.children())
    assert [n for n, _ in DistributedDotProductAttn(6).named_parameters()] == [
        "keys.weight", "queries.weight", "values.weight", "composition.weight"]
    assert DistributedDotProductAttn(6).queries.in_features == DistributedDotProductAttn(6).values.in_features == 6


@pytest.mark.parametrize("options, message", [
    ({"num_heads": 4}, "num_heads=4 does not divide key_dim=6.*could be 1, 2, 3"),
    ({"num_heads": 3, "value_dim": 8}, "num_heads=3 does not divide value_dim=8.*could be 1, 2"),
    ({"num_heads": 0}, "num_heads=0"),
    ({"offset": 0}, "offset=0"),
    ({"value_dim": -1}, "value_dim=-1"),
    ({"query_dim": 2.5}, "query_dim=2.5"),
])
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(Unsupported, match=message):
        DistributedDotProductAttn(6, **options)


X = torch.ones(2, 3, 4)


@ranks(2)
@PATHS
@pytest.mark.parametrize("keys, queries, values, mask, message", [
    (X[0], X, X, None, r"keys must be \[B, tokens, 4\], got \[3, 4\]"),
    (X, X[..., :3], X, None, r"queries must be \[B, tokens, 4\], got \[2, 3, 3\]"),
    (X, X, X[:, :2], None, r"values \[B, s, ..\], got \[2, 3, 4\], \[2, 3, 4\], \[2, 2, 4\]"),
    (X, X, X, torch.zeros(2, 2, 6), r"\[B, t, S\] = \[2, 3, queries of all ranks\], got \[2, 2, 6\]"),
    (X, X, X, torch.zeros(2, 3, 3), r"3 \+ 3 = 6, but has \[3, 3\]"),
])
def test_inputs_that_do_not_fit_are_refused(rank, world, build_scores, keys, queries, values, mask, message):
    """On every rank, before a row is sent; the next call works."""
    module = DistributedDotProductAttn(4, build_scores=build_scores)
    with ledger() as book, pytest.raises(Unsupported, match=message):
        module(keys, queries, values, mask)
    assert len(book.messages) <= 1
    assert module(X, X, X, torch.zeros(2, 3, 6)).shape == X.shape


@ranks(2)
def test_a_batch_that_differs_between_ranks_is_refused(rank, world):
    x = torch.ones(1 + rank, 3, 4)
    with pytest.raises(Unsupported, match=r"same on every rank.*\[1, 2\]"):
        DistributedDotProductAttn(4)(x, x, x, None)
