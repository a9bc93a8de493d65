"""Norms, embedding and cross entropy divided over tp (tokens over cp) equal torch's own on one process, value and gradient."""

import math

import pytest
import torch
from helpers import close, far, seeded
from oracle import token_losses
from pool import ranks
from torch.nn import functional as F

from tpattn import (
    LayerNorm,
    ParallelContext,
    RMSNorm,
    SequenceLayout,
    TransformerBlock,
    Unsupported,
    VocabParallelEmbedding,
    comm,
    finish_gradients,
    ledger,
    token_mean,
    vocab_parallel_cross_entropy,
)
from tpattn.layout import chunk_sizes
from tpattn.params import sharded_parameters, to_local, whole

V, F64 = 29, torch.float64


def own(x, ctx, dim=-1):
    return x.split(chunk_sizes(x.shape[dim], ctx.tp.size), dim=dim)[ctx.tp.rank]


# ---- norms -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_norms_are_torchs_own(eps):
    """One process: values and gradients, any number of leading dimensions, strided input, in float64 and bfloat16."""
    ctx = ParallelContext.single()
    for norm, plain in ((RMSNorm(6, eps, ctx=ctx, dtype=F64), torch.nn.RMSNorm(6, eps, dtype=F64)),
                        (LayerNorm(6, eps, ctx=ctx, dtype=F64), torch.nn.LayerNorm(6, eps, dtype=F64)),
                        (LayerNorm(6, eps, bias=False, ctx=ctx, dtype=F64), torch.nn.LayerNorm(6, eps, bias=False, dtype=F64))):
        for i, (mine, theirs) in enumerate(zip(norm.parameters(), plain.parameters(), strict=True)):
            close(mine, theirs, 0)
            mine.data, theirs.data = seeded(6, seed=i), seeded(6, seed=i)
        for x in (seeded(6, seed=5), seeded(3, 4, 6, seed=6), seeded(6, 4, 3, seed=7).permute(2, 1, 0)):
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            g = seeded(*x.shape, seed=8)
            out, want = norm(a), plain(b)
            out.backward(g)
            want.backward(g)
            close([out, a.grad], [want, b.grad])
        close([p.grad for p in norm.parameters()], [p.grad for p in plain.parameters()])
        assert norm(x.bfloat16()).dtype == torch.bfloat16
        close(norm(x.bfloat16()), plain(x.bfloat16().double()), 2e-2)
        with pytest.raises(Unsupported, match=r"\[.., 6\], got \[2, 5\]"):
            norm(torch.ones(2, 5))


@ranks(2, 4)
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norm_of_token_shards(rank, world, kind):
    """C01: the weight's gradient is a part on each rank until finish_gradients; then bit-equal on all, and equal to serial."""
    T = 7
    x, g = seeded(2, T, 6, seed=0), seeded(2, T, 6, seed=1)
    twin = kind(6, ctx=ParallelContext.single(), dtype=F64)
    twin(x).backward(g)
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        norm, p = kind(6, ctx=ctx, sequence_parallel=True, dtype=F64), SequenceLayout.contiguous(T, world).positions(rank)
        out = norm(x[:, p])
        out.backward(g[:, p])
        close(out, twin(x)[:, p])
        for mine, theirs in zip(norm.parameters(), twin.parameters(), strict=True):
            far(to_local(mine.grad), theirs.grad)
        finish_gradients(norm)
        for mine, theirs in zip(norm.parameters(), twin.parameters(), strict=True):
            close(to_local(mine.grad), theirs.grad, 1e-12)
            copies = comm.all_gather(to_local(mine.grad), [[6]] * world, ctx.tp)
            assert all(torch.equal(copy, copies[0]) for copy in copies)


@ranks(2, 4)
def test_norm_weights_stay_equal_over_steps(rank, world):
    """C01: a block of 16 features on 8 tokens, sequence-sharded: after 3 SGD steps norm weights are bit-equal and serial."""
    def train(ctx, steps=3):
        torch.manual_seed(0)
        block = TransformerBlock(16, 4, ctx=ctx, ffn=12, norm="layernorm", sequence_parallel=True, dtype=F64)
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
        rows = SequenceLayout.contiguous(8, ctx.tp.size)
        for step in range(steps):
            out = block(ctx.tp.shard(seeded(2, 8, 16, seed=step), rows))
            out.backward(ctx.tp.shard(seeded(2, 8, 16, seed=10 + step), rows))
            finish_gradients(block)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return block

    want = train(ParallelContext.single())
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        block = train(ctx)
        for name in ("attention_norm", "mlp_norm"):
            for mine, theirs in zip(getattr(block, name).parameters(), getattr(want, name).parameters(), strict=True):
                close(to_local(mine), theirs, 1e-12)
                copies = comm.all_gather(to_local(mine).detach(), [[16]] * world, ctx.tp)
                assert all(torch.equal(copy, copies[0]) for copy in copies)


# ---- embedding -------------------------------------------------------------------------------------------------------------


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("vocabulary", [29, 10, 4])
def test_embedding_equals_torchs(rank, world, sequence_parallel, vocabulary):
    """29, 10 and 4 ids over up to 4 ranks: rows and weight gradient, ids repeated, of shards that nobody asks for; exact."""
    if chunk_sizes(vocabulary, world)[-1] == 0:
        vocabulary = 7
    ids = torch.randint(0, vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    ids[0] = 0
    g = seeded(2, 9, 5, seed=1)
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        layers = []
        for place in (ctx, ParallelContext.single()):
            torch.manual_seed(0)
            layers.append(VocabParallelEmbedding(vocabulary, 5, ctx=place, sequence_parallel=sequence_parallel, dtype=F64))
        layer, twin = layers
        rows = SequenceLayout.contiguous(9, world).positions(rank) if sequence_parallel else slice(None)
        with ledger() as book:
            out = layer(ids)
            out.backward(g[:, rows])
        weight = twin.weight.detach().requires_grad_()
        want = F.embedding(ids, weight)
        want.backward(g)
        close(out, want[:, rows], 0)
        finish_gradients(layer)
        ((_, _, _, spec),) = sharded_parameters(layer)
        close(whole(to_local(layer.weight.grad), spec, ctx.tp), weight.grad)
        operations = ["reduce_scatter", "all_gather"] if sequence_parallel else ["all_reduce"]
        assert [m.operation for m in book.messages] == operations * (world > 1)
        assert layer(ids[:, :0]).shape == (2, 0, 5) and layer(ids.int(), torch.float32).dtype == torch.float32


@ranks(2)
def test_ids_outside_the_vocabulary_are_refused(rank, world):
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        layer = VocabParallelEmbedding(29, 5, ctx=ctx)
        with ledger() as book:
            for ids, words in ((torch.tensor([[29]]), ["29", "largest 29"]), (torch.tensor([[-1, 3]]), ["smallest -1"]),
                               (torch.tensor([[1.0]]), ["float32"]), (torch.tensor(3), ["[]"])):
                with pytest.raises(Unsupported) as error:
                    layer(ids)
                assert all(word in str(error.value) for word in words), str(error.value)
            with pytest.raises(Unsupported, match="tp=2"):
                VocabParallelEmbedding(1, 5, ctx=ctx)
        assert not book.messages


# ---- cross entropy ---------------------------------------------------------------------------------------------------------


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy_equals_torchs(rank, world, smoothing):
    """C17: label smoothing over the whole vocabulary; z_loss, token weights, ignored tokens, none and sum: value and gradient."""
    B, T = 3, 5
    logits, weight = 3 * seeded(B, T, V, seed=0), seeded(B, T, seed=1).abs()
    target = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(2))
    target[0, 1:3] = target[2] = -100
    target[1, 0], target[1, 1] = 0, V - 1
    g = seeded(B, T, seed=3)
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        for z_loss in (0.0, 0.01):
            for token_weight in (None, weight):
                for reduction in ("none", "sum"):
                    whole_logits, mine = logits.clone().requires_grad_(), own(logits, ctx).clone().requires_grad_()
                    want = token_losses(whole_logits, target, smoothing, z_loss, token_weight)
                    out = vocab_parallel_cross_entropy(
                        mine, target, ctx=ctx, vocab_size=V, label_smoothing=smoothing, z_loss=z_loss, token_weight=token_weight,
                        reduction=reduction)
                    (want * g).sum().backward() if reduction == "none" else want.sum().backward()
                    (out * g).sum().backward() if reduction == "none" else out.backward()
                    close(out, want if reduction == "none" else want.sum(), 1e-12)
                    close(mine.grad, own(whole_logits.grad, ctx), 1e-12)
                    assert (mine.grad[2] == 0).all()
        if world > 1 and smoothing:     # the local slice's size and mean
            local = own(logits, ctx)
            careless = token_losses(logits, target, 0.0) * (1 - smoothing) + smoothing * (logits.logsumexp(-1) - local.mean(-1))
            far(torch.where(target == -100, 0.0, careless), token_losses(logits, target, smoothing))


@ranks(2, 3)
def test_cross_entropy_of_extreme_and_low_precision_logits(rank, world):
    """Logits of 1e4, masked columns of -inf (also where ignored tokens point), bfloat16, other ignore_index, strided logits."""
    target = torch.randint(1, V, (7,), generator=torch.Generator().manual_seed(2))
    target[3] = -100
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        def both(logits, target=target, tol=1e-12, **options):
            whole_logits, mine = logits.double().requires_grad_(), own(logits, ctx).detach().requires_grad_()
            want = token_losses(whole_logits, target, ignore=options.get("ignore_index", -100))
            out = vocab_parallel_cross_entropy(mine, target, ctx=ctx, vocab_size=V, reduction="none", **options)
            want.sum().backward()
            out.sum().backward()
            assert mine.grad.dtype == logits.dtype and out.dtype == (F64 if logits.dtype == F64 else torch.float32)
            close(out, want, tol)
            close(mine.grad, own(whole_logits.grad, ctx), max(tol, 4e-3 if logits.dtype == torch.bfloat16 else tol))

        logits = seeded(7, V, seed=0)
        both(1e4 * logits)
        masked = logits.clone()
        masked[:, 0] = -torch.inf
        both(masked)
        both(logits.bfloat16(), tol=1e-5)
        both(logits.float(), tol=1e-5)
        both(logits, torch.where(target == -100, 5, target), ignore_index=5)
        both(seeded(V, 7, seed=0).t())
        empty = vocab_parallel_cross_entropy(own(logits, ctx)[:0], target[:0], ctx=ctx, vocab_size=V)
        assert empty.item() == 0.0


@ranks(2)
def test_cross_entropy_refuses_what_does_not_fit(rank, world):
    with ParallelContext.from_env(tp=2, timeout=60) as ctx, ledger() as book:
        share = own(torch.ones(4, V), ctx)
        target = torch.zeros(4, dtype=torch.int64)
        for changes, words in (
            ({"logits": torch.ones(4, V)}, ["vocab_size=29", "[4, 29]"]), ({"target": target[:3]}, ["[3]"]),
            ({"target": torch.full((4,), V)}, ["29", "vocabulary"]),
            ({"target": torch.full((4,), -1)}, ["-1", "ignore_index=-100"]),
            ({"target": torch.zeros(4)}, ["float32"]), ({"logits": share.long()}, ["int64"]),
            ({"reduction": "mean"}, ["'mean'", "token_mean"]), ({"label_smoothing": 1.5}, ["1.5"]), ({"z_loss": -1.0}, ["-1.0"]),
            ({"token_weight": torch.ones(3)}, ["[4]", "[3]"]), ({"vocab_size": 33}, ["vocab_size=33"]),
        ):
            given = {"logits": share, "target": target, "vocab_size": V, **changes}
            with pytest.raises(Unsupported) as error:
                vocab_parallel_cross_entropy(given.pop("logits"), given.pop("target"), ctx=ctx, **given)
            assert all(word in str(error.value) for word in words), str(error.value)
        assert not book.messages


# ---- means -----------------------------------------------------------------------------------------------------------------


@ranks(2, 4)
def test_the_mean_counts_tokens_and_not_ranks(rank, world):
    """C14: rank 0 has losses 1, 2, 3, the last rank one of 10: 16 / 4 = 4.0 on every rank; 6.0 would be a mean of means."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        losses = {0: [1.0, 2.0, 3.0], world - 1: [10.0]}.get(rank, [])
        x = torch.tensor(losses, requires_grad=True)
        with ledger() as book:
            mean = token_mean(x.sum(), len(losses), ctx=ctx)
        assert mean.item() == 4.0 and [m.axis for m in book.messages] == ["dp_cp"] * 2
        mean.backward()
        close(x.grad, torch.full_like(x, 0.25))
        assert token_mean(torch.tensor(0.0), 0, ctx=ctx).item() == 0.0
        weighted = token_mean(torch.tensor(0.1 * (rank + 1)), 0.05, ctx=ctx)        # a count of weights may be below one
        close(weighted, 0.1 * sum(range(1, world + 1)) / (0.05 * world), 1e-6)
        for bad in ((torch.ones(2), 1), (torch.tensor(1.0), torch.ones(2))):
            with pytest.raises(Unsupported, match="scalars"):
                token_mean(*bad, ctx=ctx)


@ranks(2, 4)
@pytest.mark.parametrize("ignored", ["last rank", "all but one", "all"])
def test_ranks_without_counted_tokens(rank, world, ignored):
    """C14, C15: labels all ignored on one rank, on all but one token, or everywhere: finite, equal to serial, on all ranks."""
    T = 8
    target = torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(0))
    if ignored == "last rank":
        target[:, T - T // world :] = -100
    else:
        keep = target[1, 2].clone()
        target[:] = -100
        target[1, 2] = keep if ignored == "all but one" else -100
    logits = seeded(2, T, V, seed=1)
    serial = logits.clone().requires_grad_()
    want = F.cross_entropy(serial.flatten(0, 1), target.flatten(), reduction="sum") / max(1, int((target != -100).sum()))
    want.backward()
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        layout = SequenceLayout.contiguous(T, world)
        mine, labels = ctx.cp.shard(logits, layout).requires_grad_(), ctx.cp.shard(target, layout)
        total = vocab_parallel_cross_entropy(mine, labels, ctx=ctx, vocab_size=V)
        loss = token_mean(total, (labels != -100).sum(), ctx=ctx)
        loss.backward()
        assert math.isfinite(loss.item()) and mine.grad.isfinite().all()
        close(loss, want)
        close(mine.grad, serial.grad[:, layout.positions(rank)])


@ranks(2, 4)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_targets_are_shifted_before_they_are_shared(rank, world, kind):
    """C16: ids 0..7 predict the next: exactly 7 targets are counted; the pair (3 -> 4) at the border of two shares once."""
    T = 8
    ids = torch.arange(T)[None]
    target = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)
    logits = seeded(1, T, T, seed=0)
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        layout = getattr(SequenceLayout, kind)(T, world)
        mine, labels = ctx.cp.shard(logits, layout), ctx.cp.shard(target, layout)
        tokens = ctx.cp.shard(ids, layout)
        assert torch.equal(labels[labels != -100], tokens[labels != -100] + 1)
        counts = comm.all_reduce((labels == 4).sum(), ctx.cp), comm.all_reduce((labels != -100).sum(), ctx.cp)
        assert (int(counts[0]), int(counts[1])) == (1, 7)
        loss = token_mean(vocab_parallel_cross_entropy(mine, labels, ctx=ctx, vocab_size=T), (labels != -100).sum(), ctx=ctx)
        close(loss, F.cross_entropy(logits[0, :-1], ids[0, 1:]))
        shifted = torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], dim=1)       # shifted after sharing
        lost = comm.all_reduce((shifted != -100).sum(), ctx.cp)
        assert int(lost) == T - world
