"""FSDP2 over dp x cp: on every mesh gradients, norm, steps and files are those of the undivided model in float64."""

import functools
import math

import pytest
import torch
from helpers import close, far, seeded
from pool import ranks
from small_run import Curve, small, text
from small_run import T as SMALL_T
from torch import nn

import tpattn
from tpattn import (
    ParallelContext,
    SequenceLayout,
    TpattnError,
    Transformer,
    TransformerBlock,
    Unsupported,
    clip_grad_norm_,
    finish_gradients,
    no_sync,
    shard,
    token_mean,
    vocab_parallel_cross_entropy,
)
from tpattn.params import data_dim, gather_data_shares, sharded_parameters, tp_share_shape, whole

F64, V, T, B = torch.float64, 17, 9, 5


def decoder_of(ctx, **options):
    """Odd sizes: 17 words, 6 query heads that share 2 key-value heads, 11 inner features, norms of q and k."""
    options = {"hidden": 10, "num_heads": 6, "num_kv_heads": 2, "head_dim": 4, "ffn": 11, "bias": True, **options}
    options = {"seed": 1, "dtype": F64, "qk_norm": True, "gate": True, **options}
    return Transformer(V, num_layers=2, ctx=ctx, **options)


def batch(ctx, layout, rows=slice(None), seed=0):
    """(tokens, targets) of this rank, with ignored targets in uneven numbers."""
    ids = seeded(B, T + 1, seed=seed, dtype=torch.int64) % V
    ids = ids[rows].tensor_split(ctx.dp.size)[ctx.dp.rank]
    return tuple(ctx.cp.shard(x, layout) for x in (ids[:, :-1], ids[:, 1:]))


def counted(seed=0):
    return int(((seeded(B, T + 1, seed=seed, dtype=torch.int64) % V)[:, 1:] != 3).sum())


def backward(model, ctx, fused=False, kind="zigzag", rows=slice(None)):
    """The backward of these sequences' part in the mean loss over the whole batch."""
    layout = getattr(SequenceLayout, kind)(T, ctx.cp.size)
    tokens, targets = batch(ctx, layout, rows)
    if fused:
        loss = model.loss(tokens, targets, layout=layout, ignore_index=3)
    else:
        loss = vocab_parallel_cross_entropy(model(tokens, layout=layout), targets, ctx=ctx, vocab_size=V, ignore_index=3)
    (loss / counted()).backward()
    return token_mean(loss.detach(), (targets != 3).sum(), ctx=ctx)


def undivided(model, ctx, what=lambda p: p.grad):
    """What each parameter has, undivided, by name."""
    specs = {id(m.get_parameter(key)): spec for _, m, key, spec in sharded_parameters(model)}
    found = {}
    for name, p in model.named_parameters():
        spec, x = specs.get(id(p)), what(p)
        if x is not None:
            x = gather_data_shares(x, p.shape if spec is None else tp_share_shape(spec, ctx.tp), ctx)
            x = x if spec is None else whole(x, spec, ctx.tp)
        found[name] = x
    return found


def same(got, want):
    assert list(got) == list(want)
    for name, value in want.items():
        assert (got[name] is None) == (value is None), name
        if value is not None:
            try:
                close(got[name], value)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def serial(options, fused=False):
    """(loss, gradients by name, norm) of one process."""
    alone = ParallelContext.single()
    twin = decoder_of(alone, **options)
    loss = backward(twin, alone, fused)
    return loss, undivided(twin, alone), clip_grad_norm_(twin.parameters(), 1e9)


MESHES = {
    2: [(2, 1, 1, False), (1, 2, 1, False)], 3: [(3, 1, 1, False), (1, 3, 1, False)],
    4: [(2, 1, 2, False), (2, 1, 2, True), (1, 2, 2, True), (2, 2, 1, False)],
}
EVERY_MESH = {n: pytest.mark.parametrize("mesh", meshes, ids=[f"dp{d}cp{c}tp{t}{'sp' * s}" for d, c, t, s in meshes])
              for n, meshes in MESHES.items()}


def check_gradients(mesh, fused, **options):
    *sizes, sp = mesh
    want_loss, want, norm = serial(options, fused)
    with ParallelContext.from_env(*sizes, timeout=60) as ctx:
        model = shard(decoder_of(ctx, sequence_parallel=sp, **options), ctx)
        assert all(data_dim(p) is not None for p in model.parameters())
        for _ in range(2):          # the second step too
            close(backward(model, ctx, fused), want_loss)
            finish_gradients(model, check=True)
            same(undivided(model, ctx), want)
            close(clip_grad_norm_(model.parameters(), 1e9), norm)
            model.zero_grad(set_to_none=True)


@ranks(2)
@EVERY_MESH[2]
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_equal_the_undivided_ones_2(rank, world, mesh, fused):
    check_gradients(mesh, fused, tied=fused)


@ranks(3)
@EVERY_MESH[3]
def test_gradients_equal_the_undivided_ones_3(rank, world, mesh):
    """17 words, 2 heads, 10 features over 3 ranks: uneven, and one rank without a key-value head."""
    check_gradients(mesh, mesh[0] == 3)


@ranks(4)
@EVERY_MESH[4]
def test_gradients_equal_the_undivided_ones_4(rank, world, mesh):
    check_gradients(mesh, mesh[3], tied=not mesh[3])


@ranks(8)
def test_gradients_of_key_value_heads_that_tp_ranks_share(rank, world):
    """2 key-value heads on tp = 4: their weights lie on a mesh of their own."""
    check_gradients((2, 1, 4, True), False)


@ranks(4)
@pytest.mark.parametrize("heads", [{"num_heads": 6, "num_kv_heads": 3}, {"num_heads": 3, "num_kv_heads": 3}, {"num_kv_heads": 1}],
                         ids=["6 of 3", "3 of 3", "6 of 1"])
def test_gradients_of_uneven_heads(rank, world, heads):
    """Query and key-value heads that tp = 2 does not divide: together, or the key-value heads on both ranks."""
    check_gradients((1, 2, 2, True) if heads["num_kv_heads"] == 3 else (2, 1, 2, False), True, **heads)


# ---- states ----------------------------------------------------------------------------------------------------------------


def optimizer_of(model):
    return tpattn.training.adamw(model, lr=0.05)


def trained(ctx, steps, model=None, optimizer=None, **options):
    """(model, optimizer) after these steps."""
    model = shard(decoder_of(ctx, **options), ctx) if model is None else model
    optimizer = optimizer_of(model) if optimizer is None else optimizer
    for _ in range(steps):
        backward(model, ctx)
        finish_gradients(model)
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model, optimizer


STATE_MESHES = {2: [(2, 1, 1)], 3: [(3, 1, 1)], 4: [(2, 1, 2), (1, 2, 2)]}
EVERY_STATE = {n: pytest.mark.parametrize("sizes", m) for n, m in STATE_MESHES.items()}


def check_states(sizes, folder):
    """Weights after steps, whole and from files: fsdp -> one process -> fsdp, with the optimizer's state.

    With 9 features that 2 ranks do not divide, tp and FSDP2 divide the same dimension, unevenly.
    """
    alone, decoder = ParallelContext.single(), functools.partial(decoder_of, hidden=9)
    twin, twin_optimizer = trained(alone, 2, decoder(alone))
    with ParallelContext.from_env(*sizes, timeout=60) as ctx:
        model, optimizer = trained(ctx, 2, shard(decoder(ctx), ctx))
        got, want = tpattn.whole_state_dict(model), tpattn.whole_state_dict(twin)
        assert list(got) == list(want)
        close(list(got.values()), list(want.values()), 1e-8)        # AdamW divides by roots of tiny squares
        tpattn.save(folder / "fsdp", model, optimizer, ctx=ctx, step=2)
        # on one process
        back = decoder(alone)
        back_optimizer = optimizer_of(back)
        tpattn.load_latest(folder / "fsdp", back, back_optimizer, ctx=alone)
        close(list(tpattn.whole_state_dict(back).values()), list(got.values()), 0)
        trained(alone, 1, back, back_optimizer)
        trained(ctx, 1, model, optimizer)
        close(list(tpattn.whole_state_dict(model).values()), list(tpattn.whole_state_dict(back).values()), 1e-8)
        # and back, from what rank 0 alone saves
        if ctx.world.rank == 0:
            tpattn.save(folder / "one", back, back_optimizer, ctx=alone, step=3)
        tpattn.training.from_rank0("saved", ctx)
        other = shard(decoder(ctx), ctx)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        other_optimizer = optimizer_of(other)
        tpattn.load_latest(folder / "one", other, other_optimizer, ctx=ctx)
        close(list(tpattn.whole_state_dict(other).values()), list(tpattn.whole_state_dict(back).values()), 0)
        for name in ("exp_avg", "exp_avg_sq"):
            mine = undivided(other, ctx, lambda p, name=name: other_optimizer.state[p][name])
            same(mine, undivided(back, alone, lambda p, name=name: back_optimizer.state[p][name]))
        # whole state dicts the other way
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        tpattn.load_whole_state_dict(other, want)
        close(list(tpattn.whole_state_dict(other).values()), list(want.values()), 0)


@ranks(2)
@EVERY_STATE[2]
def test_states_2(rank, world, sizes, tmp_path):
    check_states(sizes, tmp_path)


@ranks(3)
@EVERY_STATE[3]
def test_states_3(rank, world, sizes, tmp_path):
    check_states(sizes, tmp_path)


@ranks(4)
@EVERY_STATE[4]
def test_states_4(rank, world, sizes, tmp_path):
    check_states(sizes, tmp_path)


@ranks(6)
def test_torchs_own_offsets_would_lose_rows(rank, world, tmp_path):
    """What the blocks are for: 7 rows over tp = 2 and then over dp = 3 lie as 2 2 0 | 1 1 1, of which torch loses the last."""
    with ParallelContext.from_env(dp=3, tp=2, timeout=60) as ctx:
        model, want = shard(tpattn.ColumnParallelLinear(4, 7, ctx=ctx, dtype=F64), ctx), seeded(7, 4, seed=4)
        tpattn.load_whole_state_dict(model, {"weight": want, "bias": want[:, 0]})
        for blocks in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                if not blocks:
                    for room in (tpattn.checkpoint.saving, tpattn.checkpoint.loading):
                        patch.setattr(room, "in_blocks", lambda tensors, *rest: tensors)
                alone = ParallelContext.single()
                tpattn.save(tmp_path / str(blocks), model, None, ctx=ctx, step=1)
                torch.manual_seed(1)
                other = tpattn.ColumnParallelLinear(4, 7, ctx=alone, dtype=F64)
                try:
                    tpattn.load_latest(tmp_path / str(blocks), other, ctx=alone)
                except TpattnError:
                    assert not blocks
                if blocks:
                    close(other.weight, want, 0)
                    close(other.bias, want[:, 0], 0)
                else:
                    far(other.weight, want)


# ---- one step --------------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A user's own model: a block, plain layers, parameters declared by `replicated`, one that nobody uses, one frozen."""

    def __init__(self, ctx, sequence_parallel=False):
        super().__init__()
        torch.manual_seed(0)
        self.ctx, self.sp = ctx, sequence_parallel
        self.block = TransformerBlock(10, 6, 2, 4, ffn=11, ctx=ctx, bias=True, sequence_parallel=sequence_parallel, dtype=F64)
        torch.manual_seed(1)
        self.plain, self.unused, self.frozen = nn.Linear(10, 5, dtype=F64), nn.Linear(2, 2, dtype=F64), nn.Linear(5, 5, dtype=F64)
        self.frozen.requires_grad_(False)
        self.scale = tpattn.replicated(seeded(10, seed=8), ctx)
        self.shift = tpattn.replicated(seeded(10, seed=9), ctx, grad="same")
        self.sometimes = nn.Parameter(seeded(10, seed=7))

    def forward(self, x, layout, use=True):
        if use:
            x = x + self.sometimes
        if self.sp:
            rows = SequenceLayout.contiguous(x.shape[1], self.ctx.tp.size)
            x = self.block(self.ctx.tp.shard(x, rows), layout=layout) * self.scale
            x = self.ctx.tp.gather(x, rows)
        else:
            x = self.block(x, layout=layout) * self.scale
        return self.frozen(self.plain(x + self.shift)) * 1.0        # FSDP2 warns of an output that is a view


def mixed_backward(model, ctx, rows=slice(None), use=True):
    layout = SequenceLayout.zigzag(T, ctx.cp.size)
    x, g = (ctx.cp.shard(seeded(B, T, n, seed=n)[rows].tensor_split(ctx.dp.size)[ctx.dp.rank], layout) for n in (10, 5))
    model(x, layout, use).backward(g)


def mixed_twin(**how):
    alone = ParallelContext.single()
    twin = Mixed(alone)
    mixed_backward(twin, alone, **how)
    return undivided(twin, alone), clip_grad_norm_(twin.parameters(), 1e9), twin


@ranks(4)
@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 2), (2, 2, 1)])
def test_a_model_of_ones_own(rank, world, sizes):
    """Plain, frozen and replicated parameters; None where no rank has a gradient; norms of any order from a generator."""
    want, norm, twin = mixed_twin()
    assert want["unused.weight"] is None and want["frozen.weight"] is None
    with ParallelContext.from_env(*sizes, timeout=60) as ctx:
        model = shard(Mixed(ctx, sequence_parallel=ctx.tp.size > 1), ctx)
        for _ in range(2):
            mixed_backward(model, ctx)
            if ctx.tp.size > 1:
                far(undivided(model, ctx)["scale"], want["scale"])      # each tp rank scaled other tokens
            finish_gradients(model, check=True)
            same(undivided(model, ctx), want)
            finish_gradients(model)         # a second call does nothing
            same(undivided(model, ctx), want)
            for order in (2.0, 1.0, math.inf):
                close(clip_grad_norm_((p for p in model.parameters()), 1e9, order),
                      nn.utils.clip_grad_norm_(twin.parameters(), 1e9, order))
            close(clip_grad_norm_(model.parameters(), norm / 3), norm)
            close(clip_grad_norm_(model.parameters(), 1e9), norm / 3, 1e-6)
            model.zero_grad(set_to_none=True)
        optimizer = torch.optim.AdamW(tpattn.param_groups(model), lr=0.1, foreach=True)
        before = tpattn.whole_state_dict(model)
        mixed_backward(model, ctx)
        finish_gradients(model)
        optimizer.step()
        after = tpattn.whole_state_dict(model)
        moved = {name for name in after if not torch.equal(before[name], after[name])}
        assert moved == {name for name, grad in want.items() if grad is not None}


@ranks(2)
def test_a_weight_that_one_rank_alone_uses(rank, world):
    """C54: the others count as zero there."""
    alone = ParallelContext.single()
    twin = Mixed(alone)
    for rows, use in ((slice(0, 3), True), (slice(3, 5), False)):
        mixed_backward(twin, alone, rows, use)
    with ParallelContext.from_env(dp=2, timeout=60) as ctx:
        model = shard(Mixed(ctx), ctx)
        mixed_backward(model, ctx, use=rank == 0)
        finish_gradients(model)
        same(undivided(model, ctx), undivided(twin, alone))


@ranks(2, 4)
def test_micro_batches_equal_one_batch(rank, world):
    """C18: uneven micro-batches, all but the last inside no_sync or none at all; on a model that is not divided too."""
    alone = ParallelContext.single()
    twin = decoder_of(alone)
    backward(twin, alone)
    want = undivided(twin, alone)
    splits = [slice(0, 2), slice(2, 5)] if world == 2 else [slice(0, 3), slice(3, 4), slice(4, 5)]
    with ParallelContext.from_env(*((2, 1, 1) if world == 2 else (1, 2, 2)), timeout=60) as ctx:
        for quiet, divided in ((True, True), (False, True), (True, False)):
            model = decoder_of(ctx, sequence_parallel=world == 4)
            model = shard(model, ctx) if divided else model
            for _ in range(1 + (quiet and divided)):        # what is kept between backwards is gone after a step
                for rows in splits[:-1]:
                    if quiet:
                        with no_sync(model):
                            backward(model, ctx, rows=rows)
                    else:
                        backward(model, ctx, rows=rows)
                if divided and quiet:
                    assert all(p.grad is None for p in model.parameters()), "nothing was reduced yet"
                backward(model, ctx, rows=splits[-1])
                finish_gradients(model)
                same(undivided(model, ctx), want)
                model.zero_grad(set_to_none=True)


@ranks(2)
def test_what_is_forgotten_is_noticed(rank, world):
    """A step or a clip before finish_gradients, a backward after it, a last backward inside no_sync, an optimizer made before."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        model = decoder_of(ctx)
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        shard(model, ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, ctx)
        with pytest.raises(TpattnError, match="make the optimizer after tpattn.shard"):
            early.step()
        for call in (optimizer.step, lambda: clip_grad_norm_(model.parameters(), 1.0)):
            with pytest.raises(TpattnError, match=r"finish_gradients\(model\)"):
                call()
        finish_gradients(model)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with pytest.raises(TpattnError, match="a backward ran after"):
            backward(model, ctx)
            finish_gradients(model)
        model.zero_grad(set_to_none=True)
        with no_sync(model):
            backward(model, ctx)
        for call in (optimizer.step, lambda: finish_gradients(model), lambda: clip_grad_norm_(model.parameters(), 1.0)):
            with pytest.raises(TpattnError, match="outside tpattn.no_sync"):
                call()


@ranks(2)
def test_evaluation_between_steps(rank, world):
    """A forward without backward leaves the root whole in torch; states, steps and files take the shares all the same."""
    alone = ParallelContext.single()
    with ParallelContext.from_env(dp=2, timeout=60) as ctx:
        model, optimizer = trained(ctx, 1)
        with torch.no_grad():
            logits = model(torch.arange(6).view(2, 3))
        state = tpattn.whole_state_dict(model)
        twin = decoder_of(alone)
        tpattn.load_whole_state_dict(twin, state)
        close(logits, twin(torch.arange(6).view(2, 3)))
        with torch.no_grad():
            model(torch.arange(6).view(2, 3))
        trained(ctx, 1, model, optimizer)
        model.eval()
        twin_model, _ = trained(alone, 2)
        close(list(tpattn.whole_state_dict(model).values()), list(tpattn.whole_state_dict(twin_model).values()), 1e-8)


# ---- with the rest ---------------------------------------------------------------------------------------------------------


@ranks(2, 4)
@pytest.mark.parametrize("fused", [False, True], ids=["logits", "fused"])
def test_a_loss_curve_is_that_of_one_process(rank, world, fused):
    """The trainer's loop: loss, gradient norm and final weights of 8 steps, with dropout."""
    options = {"num_heads": 6, "num_kv_heads": 2, "tied": fused, "dropout": 0.1, "attention_dropout": 0.1}

    def curve(ctx, **more):
        model, record = small(ctx, **options, **more), Curve()
        model = shard(model, ctx)
        optimizer = optimizer_of(model)
        tpattn.training.train(model, optimizer, text(), ctx=ctx, schedule=tpattn.training.Schedule(0.03, 8, 2), seed=7, clip=1.0,
                              layout=SequenceLayout.zigzag(SMALL_T, ctx.cp.size), fused_loss=fused, record=record)
        return torch.tensor(record.rows, dtype=F64), tpattn.whole_state_dict(model)

    want, want_weights = curve(ParallelContext.single())
    with ParallelContext.from_env(*((1, 2, 1) if world == 2 else (2, 1, 2)), timeout=60) as ctx:
        got, weights = curve(ctx, sequence_parallel=world == 4)
    assert want[-1, 0] < want[0, 0]
    close(got[:, 0], want[:, 0], 1e-9)
    close(got[:, 1], want[:, 1], 1e-8)
    close(list(weights.values()), list(want_weights.values()), 1e-7)


@ranks(2)
def test_memory_of_a_rank_is_divided(rank, world):
    """What the rank holds of weights, gradients and AdamW's state is half, up to uneven dimensions."""
    with ParallelContext.from_env(dp=2, timeout=60) as ctx:
        model, optimizer = trained(ctx, 1)
        backward(model, ctx)
        finish_gradients(model)
        whole_size = sum(p.numel() for p in model.parameters())
        own = sum(p.to_local().numel() for p in model.parameters())
        assert own <= 0.51 * whole_size
        assert own == sum(p.grad.to_local().numel() for p in model.parameters())
        assert own == sum(optimizer.state[p]["exp_avg"].to_local().numel() for p in model.parameters())


@ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(rank, world, reentrant):
    """Of each block, in both of torch's forms: the same gradients."""
    from torch.utils.checkpoint import checkpoint

    _, want, _ = serial({})
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        model = shard(decoder_of(ctx), ctx)
        for block in model.blocks:
            run = block.forward
            block.forward = lambda x, run=run, **options: checkpoint(lambda y: run(y, **options), x, use_reentrant=reentrant)
        for _ in range(2):
            backward(model, ctx)
            finish_gradients(model)
            same(undivided(model, ctx), want)
            model.zero_grad()


@ranks(4)
def test_low_precision_is_the_layers(rank, world):
    """compute_dtype and autocast: float32 weights and gradients, summed in float32, as near to float64 as on one process."""
    want = {name: g.float() for name, g in serial({})[1].items()}

    def error(ctx, how, **options):
        model = decoder_of(ctx, dtype=torch.float32, compute_dtype=torch.bfloat16 if how == "layers" else None, **options)
        model = shard(model, ctx)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            backward(model, ctx)
        finish_gradients(model)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        return max(float((g - want[n]).norm() / want[n].norm()) for n, g in undivided(model, ctx).items())

    for how in ("layers", "autocast"):
        alone = error(ParallelContext.single(), how)
        with ParallelContext.from_env(dp=2, tp=2, timeout=60) as ctx:
            assert error(ctx, how, sequence_parallel=True) <= 2 * alone


@ranks(4)
def test_initial_values_and_meta_parameters(rank, world):
    """Divided after it was filled, a model has the values of one process; divided on meta, it is filled the same afterwards."""
    from tpattn.params import finish_init

    alone = ParallelContext.single()
    want = tpattn.whole_state_dict(decoder_of(alone, hidden=9))
    with ParallelContext.from_env(dp=2, tp=2, timeout=60) as ctx:
        close(list(tpattn.whole_state_dict(shard(decoder_of(ctx, hidden=9), ctx)).values()), list(want.values()), 0)
        with torch.device("meta"):
            model = shard(decoder_of(ctx, hidden=9), ctx)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(torch.nan)
        finish_init(model, ctx, 1)
        close(list(tpattn.whole_state_dict(model).values()), list(want.values()), 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, ctx)
        with pytest.raises(TpattnError, match="finish_gradients"):
            optimizer.step()
        finish_gradients(model)
        twin = decoder_of(alone, hidden=9)
        backward(twin, alone)
        same(undivided(model, ctx), undivided(twin, alone))


@ranks(2)
def test_units_and_methods_of_ones_own(rank, world):
    """units= and methods=: a model without blocks; a method that is not named is refused where it would compute with a share."""
    class Net(nn.Module):
        def __init__(self, ctx):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([tpattn.ParallelMLP(6, 10, ctx=ctx, dtype=F64) for _ in range(2)])
            self.norm = tpattn.RMSNorm(6, ctx=ctx, dtype=F64)

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return self.norm(x)

        def score(self, x):
            return self(x).square().sum() + self.norm(x).sum()

        def other(self, x):
            return self.norm(x).sum()

    alone = ParallelContext.single()
    twin, x = Net(alone), seeded(4, 6, seed=0)
    twin.score(x).backward()
    with ParallelContext.from_env(dp=2, timeout=60) as ctx:
        whole_net = Net(ctx)
        model = shard(whole_net, ctx, units=whole_net.layers, methods=["score"])
        assert model is whole_net
        assert sum(isinstance(m, torch.distributed.fsdp.FSDPModule) for m in model.modules()) == 3
        model.score(x.tensor_split(2)[rank]).backward()
        finish_gradients(model)
        same(undivided(model, ctx), undivided(twin, alone))
        with pytest.raises(Unsupported, match="RMSNorm.weight is used while FSDP2 has divided it"):
            model.other(x)
        model = Net(ctx)
        with pytest.raises(Unsupported, match="head: weight is used|linear_cross_entropy: weight is used"):
            lone = shard(tpattn.ColumnParallelLinear(6, 8, ctx=ctx, bias=False, dtype=F64), ctx)
            tpattn.linear_cross_entropy(x, lone.weight, torch.zeros(4).long(), ctx=ctx, vocab_size=8)


@ranks(2)
def test_what_torch_cannot_is_said_as_torch_says_it(rank, world):
    """copy.deepcopy of a divided model is torch's own refusal; with dp x cp = 1 the model stays as it is; fully_shard is told."""
    import copy

    from torch.distributed.fsdp import fully_shard

    with ParallelContext.from_env(dp=2, timeout=60) as ctx:
        with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
            copy.deepcopy(shard(decoder_of(ctx), ctx))
        other = fully_shard(decoder_of(ctx), mesh=ctx.dp_cp_mesh())
        with pytest.raises(Unsupported, match="fully_shard"):
            finish_gradients(other)
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        model = decoder_of(ctx)
        before = list(model.parameters())
        assert shard(model, ctx) is model and all(p is q for p, q in zip(before, model.parameters(), strict=True))


@ranks(2)
@pytest.mark.filterwarnings("ignore")           # torch's own, of what it compiles
def test_under_torch_compile(rank, world):
    """Blocks compiled before or after they are divided: the same gradients; nothing is dropped for not having been watched."""
    _, want, _ = serial({})
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        for early in (True, False):
            torch._dynamo.reset()
            model = decoder_of(ctx)
            if not early:
                shard(model, ctx)
            for block in model.blocks:
                block.compile(backend="eager")
            if early:
                shard(model, ctx)
            for _ in range(2):
                backward(model, ctx)
                finish_gradients(model)
                same(undivided(model, ctx), want)
                model.zero_grad()


@ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1)])
def test_ranks_that_differ_in_requires_grad_are_told_in_the_first_forward(rank, world, sizes, when):
    """C50: FSDP2 would reduce other lengths and abort; both ranks get the same error instead, and go on once they agree."""
    with ParallelContext.from_env(*sizes, timeout=60) as ctx:
        model = Transformer(17, 8, 2, 4, 2, ctx=ctx, seed=1, dtype=torch.float64)
        weight = "blocks.0.mlp.up.weight"
        if when == "before":
            model.get_parameter(weight).requires_grad_(rank == 0)
        model = tpattn.shard(model, ctx)
        if when == "after":
            model.get_parameter(weight).requires_grad_(rank == 0)
        tokens = torch.arange(6).view(2, 3)
        with pytest.raises(tpattn.CollectiveMismatch, match=weight):
            model.loss(tokens, tokens)
        if when == "after":
            model.get_parameter(weight).requires_grad_(True)
            model.loss(tokens, tokens).backward()
            tpattn.finish_gradients(model)
