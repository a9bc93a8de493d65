"""The end of a text that no batch size divides: the same on every rank, in every kind of attention."""

import pytest
import torch
from helpers import close, far
from pool import ranks

import tpattn
from tpattn import AttentionGrid, ParallelContext, SequenceLayout, Transformer
from tpattn.data import IGNORE, Batches, PackedTokens
from tpattn.params import whole_state_dict
from tpattn.training import adamw, train_step

V, T = 29, 12


def five_samples():
    g = torch.Generator().manual_seed(1)
    return PackedTokens(torch.randint(0, V, (5 * T + 3,), generator=g), [0, 17, 30], T)


def steps(ctx, batch_size, count, grid="auto", transport="auto", **options):
    """(loss, gradient norm) of each step, the weights after them, and the samples of every step."""
    packed = five_samples()
    model = Transformer(V, 16, 1, 4, ctx=ctx, seed=2, dtype=torch.float64, grid=grid, transport=transport, **options)
    optimizer, batches = adamw(model, lr=0.01), Batches(packed, batch_size, seed=3)
    layout = SequenceLayout.zigzag(T, ctx.cp.size)
    numbers = [train_step(model, optimizer, batches.batch(step, ctx, layout), ctx=ctx) for step in range(count)]
    return torch.tensor(numbers, dtype=torch.float64), whole_state_dict(model), [batches.samples(step) for step in range(count)]


@ranks(2, 4)
def test_c51_five_samples_in_micro_batches_of_two_on_dp_2(rank, world):
    """C51: dp2, and dp2 x tp2. Documented: the fifth sample shares its batch with the first of the next epoch, on all ranks."""
    want, weights, order = steps(ParallelContext.single(), 4, 5)
    with ParallelContext.from_env(dp=2, tp=world // 2, timeout=60) as ctx:
        got, mine, samples = steps(ctx, 4, 5, sequence_parallel=world == 4)
    assert samples == order
    seen = [i for step in order for i in step]
    assert all(sorted(seen[i : i + 5]) == [0, 1, 2, 3, 4] for i in (0, 5, 10, 15))
    close(got, want, 1e-10)
    for name, value in mine.items():
        close(value, weights[name], 1e-8)


@ranks(2)
def test_c51_the_loss_is_that_of_the_samples_that_were_used(rank, world):
    """C51: the second step's loss is torch's own over sample 5 and three of the next epoch; over sample 5 alone it is another."""
    packed, alone = five_samples(), ParallelContext.single()
    batches = Batches(packed, 4, seed=3)
    model = Transformer(V, 16, 1, 4, ctx=alone, seed=2, dtype=torch.float64)

    def loss_of(samples):
        tokens = torch.stack([packed.tokens(i) for i in samples])
        targets = torch.stack([packed.targets(i) for i in samples])
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE).detach()

    with ParallelContext.from_env(dp=2, timeout=60) as ctx:
        twin = Transformer(V, 16, 1, 4, ctx=ctx, seed=2, dtype=torch.float64)
        batch = batches.batch(1, ctx, SequenceLayout.contiguous(T, 1))
        assert len(batch.tokens) == 2
        total = tpattn.vocab_parallel_cross_entropy(twin(batch.tokens, layout=batch.layout), batch.targets, ctx=ctx, vocab_size=V)
        loss = tpattn.token_mean(total, (batch.targets != IGNORE).sum(), ctx=ctx).detach()
    close(loss, loss_of(batches.samples(1)), 1e-10)
    far(loss, loss_of(batches.samples(1)[:1]), 1e-3)


MODES = {
    "ulysses": ((2, 1, 1), "exchange"),
    "ring-exchange": ((1, 2, 1), "exchange"),
    "ring-rotate": ((1, 2, 1), "rotate"),
    "merge": ((1, 1, 2), "exchange"),
    "dp": (None, "auto"),
    "tp": (None, "auto"),
}


@ranks(2)
@pytest.mark.parametrize("batch_size", [1, 3, 5])
@pytest.mark.parametrize("mode", MODES)
def test_c51_odd_batches_in_every_attention(rank, world, mode, batch_size):
    """C51: 1, 3 and 5 sequences on two ranks, each as one process; 1 on dp=2 is refused on both, before anything is sent."""
    grid, transport = MODES[mode]
    mesh = {"dp": 2 if mode == "dp" else 1, "cp": 2 if grid else 1, "tp": 2 if mode == "tp" else 1}
    options = {"grid": AttentionGrid(*grid), "transport": transport} if grid else {}
    with ParallelContext.from_env(**mesh, timeout=60) as ctx:
        if mode == "dp" and batch_size == 1:
            with pytest.raises(tpattn.TpattnError, match="batch_size=1 gives nothing to some of the dp=2 ranks"):
                steps(ctx, 1, 1)
            return
        got, mine, _ = steps(ctx, batch_size, 3, **options)
    want, weights, _ = steps(ParallelContext.single(), batch_size, 3)
    close(got, want, 1e-10)
    for name, value in mine.items():
        close(value, weights[name], 1e-8)
