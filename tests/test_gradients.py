"""Gradients are completed exactly once per step, over exactly the ranks that hold parts; forgetting it, or twice, is an error."""

import copy
import pickle
import time
import weakref

import pytest
import torch
from helpers import close, far, seeded
from pool import ranks
from torch import nn
from torch.nn import functional as F

import tpattn
from tpattn import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelContext,
    RMSNorm,
    RowParallelLinear,
    SequenceLayout,
    TpattnError,
    Transformer,
    TransformerBlock,
    Unsupported,
    finish_gradients,
    ledger,
    token_mean,
    vocab_parallel_cross_entropy,
)
from tpattn.errors import CollectiveMismatch
from tpattn.params import sharded_parameters, to_local, whole

F64 = torch.float64
MESHES = {2: [(1, 2, 1), (1, 1, 2), (2, 1, 1)], 4: [(1, 2, 2), (2, 1, 2), (2, 2, 1)]}
EVERY_MESH = {world: pytest.mark.parametrize("sizes", meshes, ids=[f"dp{d}cp{c}tp{t}" for d, c, t in meshes])
              for world, meshes in MESHES.items()}
T, M = 7, 12


class Mixed(nn.Module):
    """A tpattn block beside plain torch layers: what a user's model may look like."""

    def __init__(self, ctx, sequence_parallel=False):
        super().__init__()
        torch.manual_seed(0)
        self.block = TransformerBlock(M, 6, 2, ffn=10, ctx=ctx, bias=True, sequence_parallel=sequence_parallel, dtype=F64)
        torch.manual_seed(1)
        self.plain = nn.Linear(M, 5, dtype=F64)
        self.unused = nn.Linear(2, 2, dtype=F64)

    def forward(self, x, layout):
        return self.plain(self.block(x, layout=layout))


def backward(model, ctx, seed=0, x_grad=False):
    """One backward of this rank's part of a batch of 4 sequences; returns its input."""
    layout = SequenceLayout.zigzag(T, ctx.cp.size)

    def share(x):
        return ctx.cp.shard(x.tensor_split(ctx.dp.size)[ctx.dp.rank], layout)

    x = share(seeded(4, T, M, seed=seed)).requires_grad_(x_grad)
    model(x, layout).backward(share(seeded(4, T, 5, seed=seed + 1)))
    return x


def same_gradients(model, twin, ctx):
    """Every gradient of the model, undivided, equals the twin's; None where the twin has none."""
    specs = {id(m.get_parameter(key)): spec for _, m, key, spec in sharded_parameters(model)}
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            got = whole(to_local(p.grad), specs[id(p)], ctx.tp) if id(p) in specs else p.grad
            try:
                close(got, q.grad)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def pair(sizes):
    """(context, model on it, the same model on one process after its backward)."""
    ctx = ParallelContext.from_env(*sizes, timeout=60)
    alone = ParallelContext.single()
    twin = Mixed(alone)
    backward(twin, alone)
    return ctx, Mixed(ctx), twin


# ---- finishing -------------------------------------------------------------------------------------------------------------


def check_finishing(sizes):
    ctx, model, twin = pair(sizes)
    backward(model, ctx)
    if ctx.dp_cp.size > 1:
        far(model.plain.weight.grad, twin.plain.weight.grad)
    finish_gradients(model)
    same_gradients(model, twin, ctx)
    before = [None if p.grad is None else to_local(p.grad).clone() for p in model.parameters()]
    finish_gradients(model)
    after = [None if p.grad is None else to_local(p.grad) for p in model.parameters()]
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(before, after, strict=True)), "a second call does nothing"
    with pytest.raises(TpattnError, match=r"backward ran after .* added to block\."):
        backward(model, ctx)
        finish_gradients(model)
    model.zero_grad(set_to_none=True)
    backward(model, ctx)
    finish_gradients(model)
    same_gradients(model, twin, ctx)
    ctx.close()


@ranks(2)
@EVERY_MESH[2]
def test_finishing_2(rank, world, sizes):
    """Complete after one call, unchanged by a second, refused after a backward in between, and again in the next step."""
    check_finishing(sizes)


@ranks(4)
@EVERY_MESH[4]
def test_finishing_4(rank, world, sizes):
    check_finishing(sizes)


@ranks(4)
def test_each_gradient_travels_over_its_own_axes(rank, world):
    """Norms of token shards over the world, the rest over dp x cp, nothing where nothing is missing; one message for each."""
    with ParallelContext.from_env(1, 2, 2, timeout=60) as ctx:
        model = TransformerBlock(M, 6, 2, ffn=10, ctx=ctx, sequence_parallel=True, dtype=F64)
        rows = SequenceLayout.contiguous(4, 2)
        x = ctx.tp.shard(ctx.cp.shard(seeded(2, 8, M, seed=0), SequenceLayout.contiguous(8, 2)), rows)
        model(x).sum().backward()
        with ledger() as book:
            finish_gradients(model)
        norms = 2 * M + 2                                           # numbers, and one more for each parameter
        others = sum(to_local(p.detach()).numel() + 1 for n, p in model.named_parameters() if "norm" not in n)
        assert [(m.axis, m.operation, m.bytes) for m in book.messages] == [
            ("world", "all_reduce", 2 * 3 * norms * 8 // 4), ("dp_cp", "all_reduce", others * 8)]
        with ledger() as book:
            finish_gradients(model)
        assert not book.messages
    with ParallelContext.from_env(1, 1, 4, timeout=60) as ctx, ledger() as book:
        model = nn.ModuleList([ColumnParallelLinear(4, 8, ctx=ctx), RMSNorm(4, ctx=ctx)])
        model[0](model[1](torch.ones(2, 4))).sum().backward()
        sent = len(book.messages)
        finish_gradients(model)
        assert len(book.messages) == sent


@ranks(2)
def test_a_gradient_missing_on_one_rank_counts_as_zero(rank, world):
    """A branch that only dp rank 0 takes: every rank gets its gradient; one that nobody takes keeps None on all."""
    with ParallelContext.from_env(2, 1, 1, timeout=60) as ctx:
        torch.manual_seed(0)
        layers = nn.ModuleList([ColumnParallelLinear(3, 2, ctx=ctx, dtype=F64) for _ in range(3)])
        x = seeded(4, 3, seed=rank)
        (layers[0](x) if rank else layers[0](x) + layers[1](x)).sum().backward()
        finish_gradients(layers)
        close(layers[1].weight.grad, seeded(4, 3, seed=0).sum(0).expand(2, 3))
        close(layers[0].weight.grad, (seeded(4, 3, seed=0) + seeded(4, 3, seed=1)).sum(0).expand(2, 3))
        assert layers[2].weight.grad is None and layers[2].bias.grad is None


@ranks(2)
@pytest.mark.parametrize("bucket", [1, 200, 1 << 25])
def test_buckets_change_nothing(rank, world, bucket):
    """Any bucket size gives the same numbers, in more messages; dtypes never share a bucket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpattn.gradients._BUCKET", bucket)
        ctx, model, twin = pair((1, 2, 1))
        model.other = ColumnParallelLinear(4, 3, ctx=ctx, dtype=torch.float32)
        backward(model, ctx)
        model.other(torch.full((2, 4), rank + 1.0)).sum().backward()
        with ledger() as book:
            finish_gradients(model)
        close(model.other.weight.grad, torch.full((3, 4), 6.0))
        del model.other
        same_gradients(model, twin, ctx)
        count = len(list(model.parameters())) + 2
        assert len(book.messages) == (count if bucket == 1 else 2 if bucket > 1000 else len(book.messages))
        assert 2 <= len(book.messages) <= count
        ctx.close()


@ranks(2)
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2)], ids=["cp2", "tp2"])
@pytest.mark.parametrize("case", ["input without grad", "one bias", "only the input"])
def test_frozen_parameters(rank, world, sizes, case):
    """C50: (a) an input without gradient, (b) all frozen but one bias, (c) all frozen but the input: equal serial, no hang."""
    results = []
    for ctx in (ParallelContext.single(), ParallelContext.from_env(*sizes, timeout=60)):
        model = Mixed(ctx)
        if case != "input without grad":
            for name, p in model.named_parameters():
                p.requires_grad_(case == "one bias" and name == "block.attention.qkv.v_bias")
        flags = [p.requires_grad for p in model.parameters()]
        x = backward(model, ctx, x_grad=case == "only the input")
        finish_gradients(model)
        assert [p.requires_grad for p in model.parameters()] == flags
        results.append((model, x, ctx))
    (twin, whole_x, _), (model, x, ctx) = results
    same_gradients(model, twin, ctx)
    assert (x.grad is None) == (case != "only the input")
    if x.grad is not None:
        close(x.grad, whole_x.grad[:, SequenceLayout.zigzag(T, ctx.cp.size).positions(ctx.cp.rank)])
    ctx.close()


@ranks(2)
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 1, 2)], ids=["dp2", "tp2"])
def test_a_model_is_cast_moved_and_pickled_as_any_other(rank, world, sizes):
    """.double(), .to(device), to_empty and a pickle of a parameter, before a step and after; a forgotten finish is noticed."""
    with ParallelContext.from_env(*sizes, timeout=60) as ctx:
        model = TransformerBlock(M, 6, 2, ctx=ctx)
        for kind in (torch.float64, "cpu", torch.float32):
            model.to(kind)
            x = seeded(1, T, M, seed=0, dtype=model.mlp.up.weight.dtype)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(x).sum().backward()
            with pytest.raises(TpattnError, match="finish_gradients"):
                optimizer.step()
            finish_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        weight = model.attention_norm.weight
        assert torch.equal(tpattn.params.to_local(pickle.loads(pickle.dumps(weight))), tpattn.params.to_local(weight))
        model.to_empty(device="cpu")


@ranks(2)
def test_tp_ranks_that_read_other_tokens(rank, world):
    """A loader seeded by rank gives an error on both ranks in the first forward; cp ranks hold other tokens as they should."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        model = Transformer(29, M, 1, 3, 1, ctx=ctx, seed=1, dtype=F64)
        with pytest.raises(tpattn.CollectiveMismatch, match="other tokens.*ctx.dp.rank"):
            model(seeded(2, T, seed=rank, dtype=torch.int64) % 29)
        model(seeded(2, T, seed=0, dtype=torch.int64) % 29)
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        Transformer(29, M, 1, 3, 1, ctx=ctx, seed=1, dtype=F64)(seeded(2, T, seed=rank, dtype=torch.int64) % 29)


def differing(part, ctx, rank):
    """(module, input, what differs) with another requires_grad on rank 1."""
    x, odd = seeded(2, T, M, seed=0), rank == 1
    if part == "embedding":
        model = Transformer(29, M, 1, 3, ctx=ctx, seed=1, dtype=F64)
        model.requires_grad_(False).embedding.weight.requires_grad_(not odd)
        return model, torch.zeros(2, T, dtype=torch.int64), "embedding.weight"
    if part == "input of a linear layer":
        layer = ColumnParallelLinear(M, 5, ctx=ctx, dtype=F64)
        return layer, x.requires_grad_(odd), "its input"
    if part == "weight of a linear layer":
        layer = RowParallelLinear(M, 5, ctx=ctx, input_is_parallel=False, dtype=F64)
        layer.requires_grad_(False).weight.requires_grad_(odd)
        return layer, x, "weight"
    model = TransformerBlock(M, 6, 2, ctx=ctx, dtype=F64)
    if part == "input of a block":
        return model.requires_grad_(False), x.requires_grad_(odd), "its input"
    attention = tpattn.ParallelSelfAttention(M, 6, 2, ctx=ctx, dtype=F64) if part == "attention" else model
    name = "qkv.v" if part == "attention" else "mlp.down.weight"
    attention.get_parameter(name).requires_grad_(odd)
    return attention, x, name


@ranks(2)
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2)], ids=["cp2", "tp2"])
@pytest.mark.parametrize("part", ["embedding", "input of a linear layer", "weight of a linear layer", "input of a block", "block",
                                  "attention"])
def test_ranks_that_differ_in_requires_grad(rank, world, sizes, part):
    """C50: (d) the same error on both ranks in the first forward, within 10 s; none once they agree. A layer looks over tp."""
    with ParallelContext.from_env(*sizes, timeout=60) as ctx:
        torch.manual_seed(0)
        model, x, name = differing(part, ctx, rank)
        start = time.monotonic()
        if ctx.cp.size == 2 and "linear" in part:
            with ledger() as book:
                model(x)
            assert not book.messages and not book.once
            return
        with pytest.raises(CollectiveMismatch) as error:
            model(x)
        assert time.monotonic() - start < 10
        assert str(error.value) == (
            f"{type(model).__name__}: requires_grad of {name} is True on some ranks of {'cp' if ctx.cp.size == 2 else 'tp'} and "
            "False on others; set it alike on all: a backward sends what it needs")
        model.requires_grad_(True)
        x.requires_grad_(x.is_floating_point())
        with ledger() as book:
            for _ in range(2):
                model(x).sum().backward()
        assert len(book.once) == 1 and "once" in str(book)
        finish_gradients(model)


@ranks(4)
def test_one_rank_of_four_that_differs_is_told_by_all(rank, world):
    """C50: (d) on cp=2 x tp=2, from the other corner of the mesh too."""
    with ParallelContext.from_env(1, 2, 2, timeout=60) as ctx:
        model = Mixed(ctx).block
        model.mlp.requires_grad_(rank != 2)
        with pytest.raises(CollectiveMismatch, match=r"of mlp\.gate\.weight is True on some ranks of cp x tp .* \(and 5 more\)"):
            model(seeded(2, 3, M, seed=0))


@ranks(2)
def test_dp_ranks_that_differ_in_requires_grad(rank, world):
    """C50: (d) they exchange nothing in a forward, so finish_gradients tells, before it sums."""
    with ParallelContext.from_env(2, 1, 1, timeout=60) as ctx:
        model = Mixed(ctx)
        model.plain.weight.requires_grad_(rank == 0)
        backward(model, ctx)
        with pytest.raises(CollectiveMismatch, match=r"Mixed: requires_grad of plain\.weight .* ranks of dp "):
            finish_gradients(model)


# ---- what is forgotten is noticed ------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_a_step_without_finishing_is_an_error(rank, world, make):
    """C04: the optimizer's step, and clipping before, raise and name finish_gradients; in-place scaling needs no second call."""
    with ParallelContext.from_env(1, 2, 1, timeout=60) as ctx:
        model = Mixed(ctx)
        optimizer = make(tpattn.param_groups(model), lr=0.1)
        for _ in range(3):
            weights = [to_local(p.detach()).clone() for p in model.parameters()]
            backward(model, ctx)
            for call, name in ((optimizer.step, f"{make.__name__}.step"),
                               (lambda: tpattn.clip_grad_norm_(model.parameters(), 1.0), "clip_grad_norm_")):
                with pytest.raises(TpattnError, match=rf"{name}: .*tpattn\.finish_gradients\(model\)"):
                    call()
            assert all(torch.equal(to_local(p), w) for p, w in zip(model.parameters(), weights, strict=True))
            finish_gradients(model)
            tpattn.clip_grad_norm_(model.parameters(), 1.0)
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)        # unscaling is no backward
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        plain = nn.Linear(2, 2)
        plain(torch.ones(2)).sum().backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()      # other models are not concerned
    plain(torch.ones(2)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()


@ranks(2)
def test_a_copied_model_trains_and_is_watched(rank, world):
    """copy.deepcopy shares nothing but the context: it trains like the first, and its forgotten finish is noticed too."""
    with ParallelContext.from_env(1, 2, 1, timeout=60) as ctx:
        first = Mixed(ctx)
        other = copy.deepcopy(first)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, other)]
        backward(other, ctx)
        with pytest.raises(TpattnError, match="finish_gradients"):
            optimizers[1].step()
        other.zero_grad(set_to_none=True)
        for step in range(3):
            for model, optimizer in zip((first, other), optimizers, strict=True):
                backward(model, ctx, seed=step)
                finish_gradients(model)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        for a, b in zip(first.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b) and a is not b


@ranks(2)
def test_a_finished_gradient_is_freed_by_zero_grad(rank, world):
    """What is remembered of a gradient between its finish and the next step does not keep it in memory."""
    with ParallelContext.from_env(1, 2, 1, timeout=60) as ctx:
        model = ColumnParallelLinear(3, 4, ctx=ctx)
        model(torch.ones(1, 3)).sum().backward()
        finish_gradients(model)
        finish_gradients(model)
        held = [weakref.ref(p.grad) for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        assert all(ref() is None for ref in held), "the gradient is still held"


def test_finishing_needs_tpattn_layers_of_one_context():
    with pytest.raises(Unsupported, match="found 0 contexts in Linear"):
        finish_gradients(nn.Linear(2, 2))
    two = nn.ModuleList([LayerNorm(2, ctx=ParallelContext.single()), LayerNorm(2, ctx=ParallelContext.single())])
    with pytest.raises(Unsupported, match="found 2 contexts"):
        finish_gradients(two)
    model = Mixed(ParallelContext.single())
    backward(model, ParallelContext.single())
    with ledger() as book:
        finish_gradients(model)
    assert not book.messages


# ---- micro-batches ---------------------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1, 1), (1, 1, 2)], ids=["cp2", "dp2", "tp2"])
def test_micro_batches_of_unequal_counts(rank, world, sizes):
    """C18: micro-batches with 3 and 1 counted tokens accumulate to the gradient of one batch of 4; split 2 + 2 the same."""
    V, length = 11, 4
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, V, (2, 4, length), generator=generator)
    keep = torch.zeros(4, length, dtype=torch.bool)
    keep[0, 0] = keep[0, 2] = keep[1, 3] = keep[2, 1] = True
    targets = torch.where(keep, targets, -100)

    def gradients(ctx, splits):
        model = Transformer(V, 8, 1, 2, ffn=8, seed=3, ctx=ctx, dtype=F64)
        layout = SequenceLayout.contiguous(length, ctx.cp.size)
        total = int((targets != -100).sum())
        for rows in splits:
            x, y = (ctx.cp.shard(z[rows].tensor_split(ctx.dp.size)[ctx.dp.rank], layout) for z in (tokens, targets))
            loss = vocab_parallel_cross_entropy(model(x, layout=layout), y, ctx=ctx, vocab_size=V)
            (loss / total).backward()
        finish_gradients(model)
        return model

    twin = gradients(ParallelContext.single(), [[0, 1, 2, 3]])
    alone = ParallelContext.single()
    loss = vocab_parallel_cross_entropy(twin(tokens), targets, ctx=alone, vocab_size=V)
    mean = token_mean(loss, (targets != -100).sum(), ctx=alone)
    close(mean, F.cross_entropy(twin(tokens).flatten(0, 1), targets.flatten()))
    with ParallelContext.from_env(*sizes, timeout=60) as ctx:
        for splits in ([[0, 1], [2, 3]], [[0, 3], [1, 2]], [[0, 1, 2, 3]]):
            same_gradients(gradients(ctx, splits), twin, ctx)


@ranks(2)
def test_row_bias_of_token_shards_is_summed_over_the_world(rank, world):
    """The bias of a row-divided layer under sequence_parallel is a replicated weight on token shards: its parts are summed."""
    with ParallelContext.from_env(1, 1, 2, timeout=60) as ctx:
        layer = RowParallelLinear(4, 3, ctx=ctx, sequence_parallel=True, dtype=F64)
        g = seeded(5, 3, seed=0)
        layer(torch.ones(5, 2, dtype=F64)).backward(g.tensor_split(2)[rank])
        far(to_local(layer.bias.grad), g.sum(0))
        finish_gradients(layer)
        close(to_local(layer.bias.grad), g.sum(0))


# ---- a user's own parameters -----------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Rows, times a parameter of the user's own, through a block whose tokens are divided over tp."""

    def __init__(self, ctx, make, sequence_parallel=True):
        super().__init__()
        torch.manual_seed(0)
        self.block = TransformerBlock(M, 6, 2, ffn=10, ctx=ctx, sequence_parallel=sequence_parallel, dtype=F64)
        self.scale = make(torch.linspace(0.5, 1.5, M, dtype=F64))

    def forward(self, x, layout):
        return self.block(x * self.scale, layout=layout)


def run_scaled(model, ctx, sequence_parallel=True):
    layout = SequenceLayout.zigzag(T, ctx.cp.size)
    x, g = (ctx.cp.shard(seeded(4, T, M, seed=i).tensor_split(ctx.dp.size)[ctx.dp.rank], layout) for i in (0, 1))
    if sequence_parallel and ctx.tp.size > 1:
        rows = SequenceLayout.contiguous(x.shape[1], ctx.tp.size)
        x, g = ctx.tp.shard(x, rows), ctx.tp.shard(g, rows)
    model(x, layout).backward(g)


@ranks(2, 4)
def test_c03_a_users_own_parameter_declares_its_rule(rank, world):
    """C03: under sequence sharding a plain parameter's gradient is a part on each tp rank. Declared, it is the sum."""
    alone = ParallelContext.single()
    twin = Scaled(alone, nn.Parameter, False)
    run_scaled(twin, alone)
    for sizes in MESHES[world]:
        ctx = ParallelContext.from_env(*sizes, timeout=60)
        model = copy.deepcopy(Scaled(ctx, lambda x, ctx=ctx: tpattn.replicated(x, ctx)))
        run_scaled(model, ctx)
        finish_gradients(model, check=True)
        same_gradients(model, twin, ctx)
        if sizes[2] > 1:
            model = Scaled(ctx, nn.Parameter)
            run_scaled(model, ctx)
            with pytest.raises(TpattnError, match=rf"gradient of scale \[{M}\].*on \[\d\].*tpattn.replicated\(tensor, ctx\)"):
                finish_gradients(model, check=True)
            far(model.scale.grad, twin.scale.grad)
            model = Scaled(ctx, lambda x, ctx=ctx: tpattn.replicated(x, ctx, "same"))
            run_scaled(model, ctx)
            with pytest.raises(TpattnError, match="declared .*'same'.*declare it partial"):
                finish_gradients(model, check=True)
            model = Scaled(ctx, lambda x, ctx=ctx: tpattn.replicated(x + ctx.tp.rank, ctx))
            run_scaled(model, ctx)
            with pytest.raises(TpattnError, match="value of scale.*same initial values"):
                finish_gradients(model, check=True)
        model = Scaled(ctx, nn.Parameter, False)
        run_scaled(model, ctx, False)
        finish_gradients(model, check=True)
        same_gradients(model, twin, ctx)
        ctx.close()


@ranks(2)
def test_a_declared_parameter_keeps_its_rule_and_refuses_what_it_cannot_be(rank, world):

    ctx = ParallelContext.from_env(tp=2, timeout=60)
    scale = tpattn.replicated(torch.ones(3), ctx)
    for other in (copy.deepcopy(scale), pickle.loads(pickle.dumps(scale))):
        assert type(other) is type(scale) and other.rule == "partial" and torch.equal(other, scale) and other is not scale
    module = nn.Module()
    module.scale = scale
    assert dict(module.double().named_parameters())["scale"].rule == "partial" and module.scale.dtype == F64
    with pytest.raises(Unsupported, match="grad='sum' must be partial"):
        tpattn.replicated(torch.ones(3), ctx, "sum")
    with pytest.raises(Unsupported, match="floating-point"):
        tpattn.replicated(torch.ones(3, dtype=torch.int64), ctx)
    ctx.close()
