"""Random numbers are those of splitmix64, look independent, and depend on (seed, name, global index) alone, on any mesh."""

import math

import pytest
import torch
from helpers import close, far, seeded
from pool import ranks
from torch import nn

from tpattn import ParallelContext, ParallelSelfAttention, RandomKey, SequenceLayout, TransformerBlock, comm, dropout
from tpattn.blocks import drop
from tpattn.params import to_local
from tpattn.random import bits, fold, normal, uniform

N = 100_000


def correlation(a, b):
    a, b = a.flatten() - a.mean(), b.flatten() - b.mean()
    return float((a * b).sum() / (a.norm() * b.norm()))


# ---- the generator ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "outputs"), [
    (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]),
    (0, [16294208416658607535, 7960286522194355700, 487617019471545679]),
])
def test_bits_are_splitmix64(seed, outputs):
    """The published outputs of splitmix64 from these seeds: its i-th number is bits(seed, i), i from 1."""
    got = bits(seed, torch.arange(1, len(outputs) + 1))
    assert [x % 2**64 for x in got.tolist()] == outputs


def test_every_bit_is_set_half_of_the_time():
    """An arithmetic right shift would copy sign bits and show in the high ones."""
    x = bits(fold(1, "a"), torch.arange(10_000))
    shares = ((x[:, None] >> torch.arange(64)) & 1).double().mean(0)
    assert (shares - 0.5).abs().max() < 6 * 0.5 / 100
    assert x.unique().numel() == 10_000


def test_numbers_do_not_depend_on_how_the_index_is_cut():
    """Any piece of the indices, in any shape and order, gets the numbers of these indices."""
    whole = torch.stack([f(7, torch.arange(600)) for f in (bits, uniform, normal)][1:])
    order = torch.randperm(600)
    for index in (torch.arange(13, 77), order, torch.arange(600).view(2, 3, 100).transpose(0, 2)):
        assert torch.equal(torch.stack([f(7, index) for f in (uniform, normal)]), whole[:, index])


def test_fold_gives_other_keys_for_other_words():
    words = [(), ("a",), ("b",), ("a", "b"), ("b", "a"), ("ab",), (1,), ("1",), (1, 2), (12,), (-1,), ("",), ("a", "")]
    keys = {fold(seed, *w) for w in words for seed in (0, 1, -1, 2**63 - 1)}
    assert len(keys) == 4 * len(words)
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert fold(0, "a") == -6622753171121109593, "another value here gives every model other initial weights"


# ---- its distributions -----------------------------------------------------------------------------------------------------


def test_uniform_is_uniform():
    """Mean, variance, the tenths, and the finest digit: multiples of 2 ** -53 in [0, 1)."""
    u = uniform(fold(3, "u"), torch.arange(N))
    assert u.dtype == torch.float64 and 0.0 <= u.min() and u.max() < 1.0
    assert abs(float(u.mean()) - 0.5) < 6 * math.sqrt(1 / 12 / N)
    assert abs(float(u.var()) - 1 / 12) < 6 * math.sqrt(1 / 180 / N)
    tenths = torch.histc(u, 10, 0.0, 1.0) / N
    assert (tenths - 0.1).abs().max() < 6 * math.sqrt(0.09 / N)
    assert torch.equal(u * 2.0**53, (u * 2.0**53).floor()) and ((u * 2.0**53) % 2).mean() > 0.4


def test_normal_is_normal():
    """Mean, variance, skew, kurtosis and the share beyond 1, 2 and 3 standard deviations."""
    z = normal(fold(3, "z"), torch.arange(N))
    assert z.isfinite().all()
    for power, want, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((z**power).mean()) - want) < 6 * math.sqrt(variance / N), power
    for limit in (1.0, 2.0, 3.0):
        share = math.erfc(limit / math.sqrt(2))
        assert abs(float((z.abs() > limit).double().mean()) - share) < 6 * math.sqrt(share * (1 - share) / N), limit


@pytest.mark.parametrize("draw", [uniform, normal])
def test_numbers_are_uncorrelated_along_the_index_and_between_keys(draw):
    """Neighbours, rows of a weight, and the same index under neighbouring seeds, names and steps."""
    index, limit = torch.arange(N), 6 / math.sqrt(N)
    x = draw(fold(11, "w"), index)
    for lag in (1, 2, 3, 64, 1000):
        assert abs(correlation(x[:-lag], x[lag:])) < limit, lag
    for key in (fold(12, "w"), fold(11, "v"), fold(11, "w", 1), 0, 1, 2):
        assert abs(correlation(x, draw(key, index))) < limit, key
    assert abs(correlation(draw(5, index), draw(6, index))) < limit, "keys that differ by one"


# ---- dropout ---------------------------------------------------------------------------------------------------------------


def test_dropout_zeroes_a_share_p_and_scales_the_rest():
    x = torch.ones(4, 200, 50, dtype=torch.float64)
    for p in (0.1, 0.5, 0.9):
        y = dropout(x, p, RandomKey(3), positions=torch.arange(200))
        kept = y != 0
        assert abs(float(kept.double().mean()) - (1 - p)) < 6 * math.sqrt(p * (1 - p) / x.numel())
        close(y[kept], torch.full((int(kept.sum()),), 1 / (1 - p), dtype=torch.float64))


def test_dropout_is_independent_over_sequences_positions_and_channels():
    """No two rows, columns or sequences drop together: pair counts are those of independent draws."""
    kept = (dropout(torch.ones(8, 64, 64), 0.5, RandomKey(9), positions=torch.arange(64)) != 0).double()
    for rows in (kept.flatten(0, 1), kept.permute(2, 0, 1).flatten(1), kept.permute(1, 0, 2).flatten(1), kept.flatten(1)):
        centred = rows - 0.5
        products = centred @ centred.T / 0.25 / rows.shape[1]
        off = products - products.diag().diag()
        assert off.abs().max() < 6.5 / math.sqrt(rows.shape[1])


def test_dropout_is_the_same_on_every_split():
    """Tokens by any layout, channels by any piece, batch by dp: each part equals its part of the whole."""
    x = seeded(6, 40, 10, seed=0)
    key = RandomKey(5, step=2).child("mlp")
    whole = dropout(x, 0.3, key, positions=torch.arange(40))
    for layout in (SequenceLayout.contiguous(40, 3), SequenceLayout.zigzag(40, 4), SequenceLayout.of([range(39, -1, -1)])):
        for r in range(layout.n):
            p = layout.positions(r)
            assert torch.equal(dropout(x[:, p], 0.3, key, positions=p), whole[:, p])
    part = dropout(x[..., 3:7], 0.3, key, positions=torch.arange(40), channels=torch.arange(3, 7))
    assert torch.equal(part, whole[..., 3:7])
    second = dropout(x[2:], 0.3, RandomKey(5, 2, first_sequence=2).child("mlp"), positions=torch.arange(40))
    assert torch.equal(second, whole[2:])
    far(dropout(x[:, 20:], 0.3, key, positions=torch.arange(20)), whole[:, 20:])     # positions counted from zero on each rank
    far(dropout(x[2:], 0.3, key, positions=torch.arange(40)), whole[2:])             # dp ranks that draw alike


def test_dropout_draws_anew_for_each_seed_step_and_name():
    """C38: over 64 elements and more, equal fractions of the masks of two keys lie near 1/2."""
    x = torch.ones(1, 64, 16)
    keys = [RandomKey(0), RandomKey(1), RandomKey(0, step=1), RandomKey(0).child("a"), RandomKey(0).child("b"),
            RandomKey(0).child("a").child("b"), RandomKey(0, first_sequence=1)]
    kept = [dropout(x, 0.5, key, positions=torch.arange(64)) != 0 for key in keys]
    for i, a in enumerate(kept):
        for b in kept[:i]:
            assert 0.4 < float((a == b).double().mean()) < 0.6
    assert RandomKey(0).child("a").child("b") == RandomKey(0, name="a.b")


def test_dropout_has_the_gradient_of_its_mask_in_every_dtype():
    x = seeded(2, 9, 5, seed=1).requires_grad_()
    y = dropout(x, 0.4, RandomKey(1), positions=torch.arange(9))
    g = seeded(2, 9, 5, seed=2)
    y.backward(g)
    close(x.grad, torch.where(y.detach() != 0, g / 0.6, 0.0))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        low = dropout(x.detach().to(dtype), 0.4, RandomKey(1), positions=torch.arange(9))
        assert low.dtype == dtype and torch.equal(low != 0, y != 0)


def test_dropout_of_nothing_and_without_a_key():
    x = seeded(2, 3, 4, seed=1)
    assert dropout(x, 0.0, None, positions=torch.arange(3)) is x
    assert dropout(x[:, :0], 0.5, RandomKey(0), positions=torch.arange(0)).shape == (2, 0, 4)
    with pytest.raises(ValueError, match="needs key=RandomKey"):
        dropout(x, 0.5, None, positions=torch.arange(3))
    for p in (-0.1, 1.0, 2.0, math.nan):
        with pytest.raises(ValueError, match=r"\[0, 1\)"):
            dropout(x, p, RandomKey(0), positions=torch.arange(3))


# ---- in a block, on ranks --------------------------------------------------------------------------------------------------


def block_output(ctx, layout, key, x, sequence_parallel=False, p=0.5):
    block = TransformerBlock(16, 4, 2, ffn=8, ctx=ctx, dropout=p, sequence_parallel=sequence_parallel, dtype=torch.float64)
    x = x.tensor_split(ctx.dp.size)[ctx.dp.rank]
    share = ctx.cp.shard(x, layout)
    if sequence_parallel:
        rows = SequenceLayout.contiguous(share.shape[1], ctx.tp.size)
        return ctx.tp.gather(block(ctx.tp.shard(share, rows), layout=layout, key=key), rows)
    return block(share, layout=layout, key=key)


@ranks(2)
@pytest.mark.parametrize(("dp", "cp", "tp", "sp"), [(1, 1, 2, False), (1, 1, 2, True), (1, 2, 1, False), (2, 1, 1, False)])
def test_dropout_in_a_block_equals_one_process(rank, world, dp, cp, tp, sp):
    """C38: replicated activations drop alike, divided tokens and other sequences drop as their part of the whole does."""
    x = seeded(4, 11, 16, seed=3)
    torch.manual_seed(1)
    want = block_output(ParallelContext.single(), SequenceLayout.contiguous(11, 1), RandomKey(7, 3), x)
    torch.manual_seed(1)
    without = block_output(ParallelContext.single(), SequenceLayout.contiguous(11, 1), None, x, p=0.0)
    with ParallelContext.from_env(dp=dp, cp=cp, tp=tp, timeout=60) as ctx:
        layout = SequenceLayout.zigzag(11, cp)
        torch.manual_seed(1)
        got = block_output(ctx, layout, RandomKey(7, 3, first_sequence=2 * ctx.dp.rank), x, sp)
        mine = [y.tensor_split(dp)[ctx.dp.rank][:, layout.positions(ctx.cp.rank)] for y in (want, without)]
        close(got, mine[0])
        far(got, mine[1])


@ranks(2)
def test_dropout_differs_between_ranks_that_hold_other_data(rank, world):
    """C38: with ones on every rank, the masks of two token shares and of two dp shares agree on less than 0.9 of 64 elements."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        layout, ones = SequenceLayout.contiguous(8, 2), torch.ones(1, 4, 16)
        kept = dropout(ones, 0.5, RandomKey(0), positions=layout.positions(rank)) != 0
        both = ctx.cp.gather(kept, layout)
        assert float((both[:, :4] == both[:, 4:]).double().mean()) < 0.9
        kept = dropout(ones, 0.5, RandomKey(0, first_sequence=rank), positions=torch.arange(4)) != 0
        both = ctx.cp.gather(kept, layout)
        assert float((both[:, :4] == both[:, 4:]).double().mean()) < 0.9


@ranks(2)
@pytest.mark.parametrize("sp", [False, True])
def test_dropout_over_tp_is_alike_or_differs(rank, world, sp):
    """C38: p=0.5 on tp=2: of ones that both ranks hold the masks are equal; of token shards, and of heads, they differ."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        layout, sizes = SequenceLayout.contiguous(8, 1), [4, 4] if sp else None
        y = drop(nn.Module(), torch.ones(1, 4 if sp else 8, 16), 0.5, ctx, layout, sizes, RandomKey(0))
        mine, other = (share != 0 for share in comm.all_gather(y, [y.shape] * 2, ctx.tp))
        agree = float((mine == other).double().mean())
        assert 0.1 < agree < 0.9 if sp else agree == 1.0
        attention = ParallelSelfAttention(8, 2, ctx=ctx, rope_base=None, dropout=0.5, sequence_parallel=sp, dtype=torch.float64)
        with torch.no_grad():
            for p in attention.parameters():
                to_local(p).fill_(0.25)     # all heads alike, so only what is dropped can make them differ
        seen = []
        attention.out.register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
        x = seeded(1, 8, 8, seed=1)
        attention(x.split(4, dim=1)[rank] if sp else x, key=RandomKey(0))
        heads = comm.all_gather(seen[0], [seen[0].shape] * 2, ctx.tp)
        assert float(torch.isclose(heads[0], heads[1]).double().mean()) < 0.9
        attention.eval()(x.split(4, dim=1)[rank] if sp else x)
        heads = comm.all_gather(seen[1], [seen[1].shape] * 2, ctx.tp)
        close(heads[0], heads[1], 1e-12)


@ranks(2)
def test_dropout_is_off_in_eval_and_at_p_zero(rank, world):
    """C38: eval() and p=0 give exactly the numbers without dropout, those of one process; training without a key is refused."""
    torch.manual_seed(0)
    want = TransformerBlock(8, 2, ctx=ParallelContext.single(), dropout=0.5, dtype=torch.float64).eval()(seeded(2, 5, 8, seed=1))
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        blocks = []
        for p in (0.5, 0.0):
            torch.manual_seed(0)
            blocks.append(TransformerBlock(8, 2, ctx=ctx, dropout=p, dtype=torch.float64))
        x = seeded(2, 5, 8, seed=1)
        assert torch.equal(blocks[0].eval()(x, key=RandomKey(0)), blocks[1](x))
        close(blocks[1](x), want, 1e-12)
        with pytest.raises(ValueError, match="needs key"):
            blocks[0].train()(x)
