"""Parameters divided over tp: placements, whole state dicts between any two meshes, and torch's own layers as their twin."""

import pytest
import torch
from helpers import close, seeded
from pool import ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tpattn import (
    ColumnParallelLinear,
    ParallelContext,
    ParallelSelfAttention,
    RowParallelLinear,
    Transformer,
    Unsupported,
    comm,
    load_whole_state_dict,
    masks,
    param_groups,
    whole_state_dict,
)
from tpattn.params import sharded_parameters, to_local

F64 = torch.float64
MESHES = {"single": None, "tp1": (4, 1, 1), "tp2": (2, 1, 2), "cp2tp2": (1, 2, 2), "tp4": (1, 1, 4)}


def context(name):
    return ParallelContext.single() if MESHES[name] is None else ParallelContext.from_env(*MESHES[name], timeout=60)


class TorchAttention(nn.Module):
    """Grouped-query attention of plain torch layers, with the names that ParallelSelfAttention has."""

    def __init__(self, M, H, K):
        super().__init__()
        self.qkv = nn.ParameterDict({name: nn.Parameter(torch.empty(heads * (M // H), M, dtype=F64))
                                     for name, heads in (("q", H), ("k", K), ("v", K))})
        self.qkv |= {f"{name}_bias": nn.Parameter(torch.empty(len(self.qkv[name]), dtype=F64)) for name in "qkv"}
        self.out = nn.Linear(M, M, dtype=F64)
        self.H, self.K = H, K

    def forward(self, x):
        q, k, v = (nn.functional.linear(x, self.qkv[n], self.qkv[f"{n}_bias"]).unflatten(-1, (heads, -1)).transpose(1, 2)
                   for n, heads in (("q", self.H), ("k", self.K), ("v", self.K)))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


@ranks(4)
@pytest.mark.parametrize("source", ["single", "tp1", "tp2", "tp4"])
def test_state_moves_between_any_two_meshes(rank, world, source):
    """C42: H=4, KV=2 and 4, with biases: the whole state of tp 1, 2 or 4 loads at tp 1, 2, 4; outputs stay, 2-D shapes."""
    x = seeded(2, 5, 16, seed=1)
    for K in (2, 4):
        with context(source) as ctx:
            torch.manual_seed(0)
            layer = ParallelSelfAttention(16, 4, K, ctx=ctx, bias=True, rope_base=None, dtype=F64)
            state, want = whole_state_dict(layer), layer(x, mask=masks.causal()) if ctx.cp.size == 1 else None
        twin = TorchAttention(16, 4, K)
        twin.load_state_dict(state, strict=True)
        close(twin(x), want, 1e-12)
        for target in ("single", "tp1", "tp2", "tp4"):
            with context(target) as ctx:
                torch.manual_seed(1)
                other = ParallelSelfAttention(16, 4, K, ctx=ctx, bias=True, rope_base=None, dtype=F64)
                load_whole_state_dict(other, state)
                close(other(x, mask=masks.causal()), want, 1e-12)
                again = whole_state_dict(other)
                assert list(again) == list(state) and all(torch.equal(again[n], state[n]) for n in state)
                load_whole_state_dict(other, twin.state_dict())      # a serial state loads as it is
                close(other(x, mask=masks.causal()), want, 1e-12)


@ranks(4)
@pytest.mark.parametrize("mesh", ["tp2", "cp2tp2"])
def test_the_whole_is_not_permuted(rank, world, mesh):
    """C43: arange(64) as [8, 8] and arange(30) as [6, 5], divided by columns and by rows: the original on every rank."""
    with context(mesh) as ctx:
        for rows, columns in ((8, 8), (6, 5)):
            weight = torch.arange(float(rows * columns)).view(rows, columns)
            for kind in (ColumnParallelLinear, RowParallelLinear):
                layer = kind(columns, rows, ctx=ctx, bias=False)
                load_whole_state_dict(layer, {"weight": weight})
                assert torch.equal(whole_state_dict(layer)["weight"], weight)
                assert torch.equal(to_local(layer.weight), weight.chunk(2, int(kind is RowParallelLinear))[ctx.tp.rank])
                everyone = comm.all_gather(whole_state_dict(layer)["weight"], [[rows, columns]] * 4, ctx.world)
                assert all(torch.equal(w, weight) for w in everyone)


@ranks(4)
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"bias": True, "norm": "layernorm", "activation": "gelu"}],
                         ids=["plain", "tied", "biases"])
def test_a_model_starts_and_moves_alike_on_every_mesh(rank, world, options):
    """C36: the whole state of a Transformer is bit-equal on every mesh, and survives save, other seed, load."""
    def model(ctx, seed):
        return Transformer(29, 24, 2, 4, 4, 6, ffn=21, seed=seed, ctx=ctx, **options)

    want = whole_state_dict(model(ParallelContext.single(), 5))
    for name in ("tp1", "tp2", "cp2tp2", "tp4"):
        with context(name) as ctx:
            first, second = model(ctx, 5), model(ctx, 6)
            for other in (first, second):
                if other is second:
                    assert any(not torch.equal(x, want[n]) for n, x in whole_state_dict(other).items())
                    load_whole_state_dict(other, want)
                got = whole_state_dict(other)
                assert list(got) == list(want) and all(torch.equal(got[n], want[n]) and got[n].is_contiguous() for n in want)
            if options.get("tied"):
                assert second.head.weight is second.embedding.weight


@ranks(2)
def test_parameters_are_dtensors_of_the_tp_mesh(rank, world):
    """tp > 1: Shard or Replicate with the whole's shape; tp = 1: plain. param_groups keeps the two kinds apart."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        layer = RowParallelLinear((5, 3), 4, ctx=ctx)
        assert layer.weight.placements == (Shard(1),) and layer.bias.placements == (Replicate(),)
        assert layer.weight.shape == (4, 5, 3) and layer.weight.device_mesh.mesh.tolist() == [0, 1]
        assert layer.weight.to_local().shape == (4, 3 - rank, 3) and isinstance(layer.weight, nn.Parameter)
        mixed = nn.ModuleList([layer, nn.Linear(2, 2)])
        groups = param_groups(mixed)
        assert [{isinstance(p, DTensor) for p in g["params"]} for g in groups] == [{False}, {True}]
        assert sum(len(g["params"]) for g in groups) == 4 and len(param_groups(layer)) == 1
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        assert not any(isinstance(p, DTensor) for p in RowParallelLinear(4, 4, ctx=ctx).parameters())


@ranks(2)
def test_each_parameter_is_listed_once(rank, world):
    """A tied weight has two names in the state and one parameter; names are those of named_parameters."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        model = Transformer(10, 8, 1, 2, tied=True, seed=0, ctx=ctx)
        names = [name for name, *_ in sharded_parameters(model)]
        assert names == [name for name, _ in model.named_parameters()] and len(set(names)) == len(names)
        assert "head.weight" in whole_state_dict(model) and "head.weight" not in names


@ranks(2)
def test_states_that_do_not_fit_are_refused_before_anything_changes(rank, world):
    """Missing and unknown names, and shapes, by name; strict=False loads what both have; dtypes are converted."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        layer = ColumnParallelLinear(3, 4, ctx=ctx)
        state = whole_state_dict(layer)
        changed = {name: x + 1 for name, x in state.items()}
        for bad, words in (
            ({"weight": changed["weight"]}, ["missing ['bias']"]), ({**changed, "extra": torch.ones(1)}, ["unknown ['extra']"]),
            ({**changed, "bias": torch.ones(5)}, ["bias", "[4]", "[5]"]),
            ({**changed, "weight": torch.ones(3, 4)}, ["weight", "[4, 3]", "[3, 4]"]),
        ):
            with pytest.raises(Unsupported) as error:
                load_whole_state_dict(layer, bad)
            assert all(word in str(error.value) for word in words), str(error.value)
            assert all(torch.equal(x, state[n]) for n, x in whole_state_dict(layer).items())
        load_whole_state_dict(layer, {"weight": changed["weight"].double(), "extra": torch.ones(1)}, strict=False)
        got = whole_state_dict(layer)
        close(got["weight"], changed["weight"])
        assert torch.equal(got["bias"], state["bias"]) and got["weight"].dtype == torch.float32
        got["weight"].zero_()
        close(whole_state_dict(layer)["weight"], changed["weight"])      # what is given out is a copy


@ranks(2)
def test_plain_modules_and_buffers_are_in_the_state(rank, world):
    """A model of tpattn and torch layers: every entry of state_dict(), buffers too, goes through unchanged."""
    def model(ctx):
        torch.manual_seed(0)
        return nn.Sequential(ColumnParallelLinear(3, 4, ctx=ctx, gather_output=True), nn.BatchNorm1d(4), nn.Linear(4, 2))

    alone = model(ParallelContext.single())
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        mine = model(ctx)
        state = whole_state_dict(mine)
        assert list(state) == list(alone.state_dict())
        alone.load_state_dict(state, strict=True)
        with torch.no_grad():
            for p in mine.parameters():
                to_local(p).zero_()
        load_whole_state_dict(mine, alone.state_dict())
        x = torch.randn(5, 3)
        close(mine.eval()(x), alone.eval()(x))
