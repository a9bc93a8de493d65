"""The proof: every parameter of every module has, on every mesh, the gradient of the undivided module.

`MODULES` names every module of the library; a test fails for one that nobody added. The models of all configs run too. `MUTANTS`
takes away one reduction at a time, and each time the proof must fail.
"""

import importlib
import itertools
import pkgutil
from pathlib import Path

import pytest
import torch
from helpers import close, seeded
from pool import ranks
from torch import nn

import tpattn
from tpattn import ParallelContext, RandomKey, SequenceLayout, comm, finish_gradients, gradients, masks, token_mean
from tpattn.config import load
from tpattn.params import ShardedModule, sharded_parameters, to_local, whole

F64, T, M, V = torch.float64, 9, 12, 17
MESHES = {2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 4: [(1, 2, 2), (2, 1, 2), (1, 1, 4)]}    # dp, cp, tp


def rows_of(x, ctx):
    """This rank's sequences and tokens of a whole [4, T, ..]."""
    return ctx.cp.shard(x.tensor_split(ctx.dp.size)[ctx.dp.rank], SequenceLayout.zigzag(T, ctx.cp.size))


def tokens_of(x, ctx, sequence_parallel):
    """Of these its token shard over tp."""
    return ctx.tp.shard(x, SequenceLayout.contiguous(x.shape[1], ctx.tp.size)) if sequence_parallel else x


def features_of(x, sizes, ctx):
    """This tp rank's features."""
    return x.split(sizes, dim=-1)[ctx.tp.rank]


def layout_of(ctx):
    return {"layout": SequenceLayout.zigzag(T, ctx.cp.size)}


def tokens_to_tokens(make, **call):
    """A module from tokens [4, T, M] to tokens of the same width: every tp rank (or its token shard) gets them all."""
    def run(ctx, sp):
        module = make(ctx, sp)
        x, g = (tokens_of(rows_of(seeded(4, T, M, seed=i), ctx), ctx, sp) for i in (0, 1))
        more = {key: value(ctx) if callable(value) else value for key, value in call.items()}
        module(x, **more).backward(g)
        return module

    return run


def column(ctx, sp):
    module = tpattn.ColumnParallelLinear(M, 10, ctx=ctx, sequence_parallel=sp, dtype=F64)
    x, g = (rows_of(seeded(4, T, n, seed=n), ctx) for n in (M, 10))
    out = module(tokens_of(x, ctx, sp))
    out.backward(features_of(g, tpattn.layout.chunk_sizes(10, ctx.tp.size), ctx))
    return module


def row(ctx, sp):
    module = tpattn.RowParallelLinear(10, M, ctx=ctx, sequence_parallel=sp, dtype=F64)
    x, g = (rows_of(seeded(4, T, n, seed=n), ctx) for n in (10, M))
    out = module(features_of(x, tpattn.layout.chunk_sizes(10, ctx.tp.size), ctx))
    out.backward(tokens_of(g, ctx, sp))
    return module


def qkv(ctx, sp):
    module = tpattn.QKVParallelLinear(M, 6, 2, 4, ctx=ctx, bias=True, gate=True, sequence_parallel=sp, dtype=F64)
    q, k, v, gate = module(tokens_of(rows_of(seeded(4, T, M, seed=0), ctx), ctx, sp))
    first, last = module.shares.queries[ctx.tp.rank]
    reads = module.reads or [i * k.shape[2] // q.shape[2] for i in range(q.shape[2])]
    out = torch.cat([q, k[:, :, reads], v[:, :, reads], gate[..., None]], dim=-1)      # per query head, whoever holds the keys
    out.backward(rows_of(seeded(4, T, 6, 13, seed=1), ctx)[:, :, first:last])
    return module


def embedding(ctx, sp):
    module = tpattn.VocabParallelEmbedding(V, M, ctx=ctx, sequence_parallel=sp, dtype=F64)
    ids = rows_of(seeded(4, T, seed=0, dtype=torch.int64) % V, ctx)
    module(ids).backward(tokens_of(rows_of(seeded(4, T, M, seed=1), ctx), ctx, sp))
    return module


def loss_of(module, ctx):
    """One backward of the mean loss over all ranks' tokens, with dropout; positions in the order of the layout."""
    ids = seeded(4, T + 1, seed=0, dtype=torch.int64) % V
    tokens, targets = rows_of(ids[:, :-1], ctx), rows_of(ids[:, 1:], ctx)
    first = sum(len(x) for x in torch.arange(4).tensor_split(ctx.dp.size)[: ctx.dp.rank])
    logits = module(tokens, key=RandomKey(1, 2, first), **layout_of(ctx))
    loss = tpattn.vocab_parallel_cross_entropy(logits, targets, ctx=ctx, vocab_size=V, ignore_index=3)
    token_mean(loss, (targets != 3).sum(), ctx=ctx).backward()
    return module


def transformer(ctx, sp):
    return loss_of(tpattn.Transformer(V, M, 2, 6, 2, 4, ctx=ctx, seed=1, sequence_parallel=sp, tied=True, qk_norm=True, gate=True,
                                      bias=True, dropout=0.2, attention_dropout=0.1, dtype=F64), ctx)


def seed_attention(ctx, sp):
    """Its projections are plain; rows are keys, so keys and values are of the same tokens, the mask of theirs."""
    module = tpattn.DistributedDotProductAttn(M, num_heads=2, ctx=ctx).double()
    x = ctx.cp.shard(seeded(4, T, M, seed=0).tensor_split(ctx.dp.size)[ctx.dp.rank], contiguous(ctx))
    g = ctx.cp.shard(seeded(4, T, M, seed=1).tensor_split(ctx.dp.size)[ctx.dp.rank], contiguous(ctx))
    hidden = torch.zeros(*x.shape[:2], T, dtype=torch.bool)
    out = module(x, x, x, hidden)
    out.backward(g)
    for p in module.parameters():       # no layer of tpattn in it: the user's own sum over the ranks that saw other tokens
        p.grad = comm.all_reduce(p.grad, ctx.dp_cp, direction="backward")
    return module


def contiguous(ctx):
    return SequenceLayout.contiguous(T, ctx.cp.size)


OPTIONS = {"bias": True, "dtype": F64}
CONFIG_DIR = Path(__file__).parents[1] / "configs"
MODULES = {
    "ColumnParallelLinear": column, "RowParallelLinear": row, "QKVParallelLinear": qkv, "VocabParallelEmbedding": embedding,
    "Transformer": transformer, "DistributedDotProductAttn": seed_attention,
    "RMSNorm": tokens_to_tokens(lambda ctx, sp: tpattn.RMSNorm(M, ctx=ctx, sequence_parallel=sp, dtype=F64)),
    "LayerNorm": tokens_to_tokens(lambda ctx, sp: tpattn.LayerNorm(M, ctx=ctx, sequence_parallel=sp, dtype=F64)),
    "ParallelMLP": tokens_to_tokens(
        lambda ctx, sp: tpattn.ParallelMLP(M, 10, "swiglu", ctx=ctx, sequence_parallel=sp, **OPTIONS)),
    "ParallelSelfAttention": tokens_to_tokens(
        lambda ctx, sp: tpattn.ParallelSelfAttention(M, 6, 2, 4, ctx=ctx, sequence_parallel=sp, qk_norm=True, **OPTIONS),
        mask=masks.causal(), layout=lambda ctx: SequenceLayout.zigzag(T, ctx.cp.size)),
    "TransformerBlock": tokens_to_tokens(
        lambda ctx, sp: tpattn.TransformerBlock(M, 6, 2, 4, norm="layernorm", ctx=ctx, sequence_parallel=sp, **OPTIONS),
        mask=masks.causal(), layout=lambda ctx: SequenceLayout.zigzag(T, ctx.cp.size)),
}
ABSTRACT = {"ShardedModule"}


def gradients_of(module, ctx):
    """Every gradient of a module, undivided."""
    if any(isinstance(m, ShardedModule) for m in module.modules()):
        finish_gradients(module, check=True)
    specs = {id(m.get_parameter(key)): spec for _, m, key, spec in sharded_parameters(module)}
    assert all(p.grad is not None for p in module.parameters()), "a parameter without a gradient proves nothing"
    return {name: whole(to_local(p.grad), specs[id(p)], ctx.tp) if id(p) in specs else p.grad
            for name, p in module.named_parameters()}


def prove(name, ctx, sp):
    """Raise AssertionError, naming the parameter, when a gradient is not that of the undivided module."""
    torch.manual_seed(3)
    got = gradients_of(MODULES[name](ctx, sp), ctx)
    alone = ParallelContext.single()
    torch.manual_seed(3)
    want = gradients_of(MODULES[name](alone, False), alone)
    assert list(got) == list(want)
    for parameter, grad in want.items():
        assert grad.abs().max() > 1e-6, f"{name}.{parameter}: a gradient of 0 proves nothing"
        try:
            close(got[parameter], grad)
        except AssertionError as error:
            raise AssertionError(f"{name}.{parameter}: {error}") from None


def test_every_module_of_the_library_is_in_the_list():
    found = set()
    for room in pkgutil.walk_packages(tpattn.__path__, "tpattn."):
        for value in vars(importlib.import_module(room.name)).values():
            if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__.startswith("tpattn."):
                found.add(value.__name__)
    assert found - ABSTRACT == set(MODULES), "add the new module to MODULES, with a forward and backward of it"


def test_the_list_would_miss_a_new_module(monkeypatch):
    new = type("Newcomer", (nn.Module,), {"__module__": "tpattn.blocks"})
    monkeypatch.setattr(tpattn.blocks, "Newcomer", new, raising=False)
    with pytest.raises(AssertionError, match="Newcomer"):
        test_every_module_of_the_library_is_in_the_list()


@ranks(2, 4)
@pytest.mark.parametrize("name", MODULES)
def test_every_gradient_equals_the_undivided_one(rank, world, name):
    for sizes, sp in itertools.product(MESHES[world], (False, True)):
        if sp and (sizes[2] == 1 or name == "DistributedDotProductAttn"):
            continue
        with ParallelContext.from_env(*sizes, timeout=60) as ctx:
            try:
                prove(name, ctx, sp)
            except AssertionError as error:
                raise AssertionError(f"dp, cp, tp = {sizes}, sequence_parallel={sp}: {error}") from None


CONFIGS = sorted(p.stem for p in (CONFIG_DIR / "model").glob("*.yaml"))


@ranks(4)
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_gradient_of_every_configs_model(rank, world, config, sp):
    """The model of each file under configs/model, with a small width, on cp=2 x tp=2."""
    from tpattn import build

    cfg = load([f"model={config}", "parallel=tp2_cp2", f"parallel.sequence_parallel={str(sp).lower()}", "train.dtype=float64",
                "model.hidden=16", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn=24",
                "model.num_layers=1", "model.head_dim=4"], CONFIG_DIR)
    cfg.model.vocab_size = V
    with ParallelContext.from_env(cp=2, tp=2, timeout=60) as ctx:
        got = gradients_of(loss_of(build(cfg, ctx), ctx), ctx)
    alone = ParallelContext.single()
    cfg.parallel.sequence_parallel = False
    want = gradients_of(loss_of(build(cfg, alone), alone), alone)
    for name, grad in want.items():
        close(got[name], grad)


# ---- mutants: each takes away one reduction --------------------------------------------------------------------------------


def no_sum_in_backward(monkeypatch, start):
    """Messages of the gradients of activations: each rank goes on with its own part."""
    real = getattr(comm, start)

    def mutant(x, group, *, direction="forward", **options):
        if direction == "forward":
            return real(x, group, direction=direction, **options)
        own = x if isinstance(x, torch.Tensor) else x[group.rank]
        return lambda: own.clone()

    monkeypatch.setattr(comm, start, mutant)


def no_bucket(monkeypatch, axis):
    """The sums that finish_gradients makes over one axis."""
    real = gradients._sum_bucket
    monkeypatch.setattr(gradients, "_sum_bucket", lambda ps, group: None if group.name == axis else real(ps, group))


MUTANTS = {
    "of inputs over tp": ("TransformerBlock", (1, 1, 4), False, lambda m: no_sum_in_backward(m, "start_all_reduce")),
    "of inputs to token shards": ("TransformerBlock", (1, 1, 4), True, lambda m: no_sum_in_backward(m, "start_reduce_scatter")),
    "over dp x cp": ("TransformerBlock", (2, 1, 2), False, lambda m: no_bucket(m, "dp_cp")),
    "over cp alone": ("ParallelSelfAttention", (1, 2, 2), False, lambda m: no_bucket(m, "dp_cp")),
    "of norms over the whole mesh": ("RMSNorm", (1, 1, 4), True, lambda m: no_bucket(m, "world")),
    "of the norms of q and k": ("ParallelSelfAttention", (1, 1, 4), False, lambda m: no_bucket(m, "world")),
    "of biases behind token shards": ("RowParallelLinear", (1, 1, 4), True, lambda m: no_bucket(m, "world")),
    "of key-value weights that ranks share": ("QKVParallelLinear", (1, 1, 4), False, lambda m: no_bucket(m, "dp_cp_share")),
}


@ranks(4)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_one_reduction_the_proof_fails(rank, world, mutant):
    name, sizes, sp, change = MUTANTS[mutant]
    with ParallelContext.from_env(*sizes, timeout=60) as ctx:
        prove(name, ctx, sp)
        with pytest.MonkeyPatch.context() as patch:     # the fixture would not be undone in a rank
            patch.setattr(gradients, "_check_copies", lambda *_: None)
            change(patch)
            with pytest.raises(AssertionError, match=rf"{name}\."):
                prove(name, ctx, sp)
