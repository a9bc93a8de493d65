"""Linear layers divided over tp equal the undivided layer: outputs, gradients and initial values, for uneven sizes."""

import copy
import math

import pytest
import torch
from helpers import close, far, seeded
from pool import ranks

from tpattn import (
    ColumnParallelLinear,
    ParallelContext,
    QKVParallelLinear,
    RowParallelLinear,
    SequenceLayout,
    finish_gradients,
    ledger,
    whole_state_dict,
)
from tpattn.layout import chunk_sizes
from tpattn.params import sharded_parameters, to_local, whole

F64 = torch.float64
WIDTHS = {2: (5, 7, 9, 12), 3: (5, 7, 9, 12), 4: (7, 11, 12)}       # over so many ranks; the last rank has fewer rows, never none


def with_twin(make, ctx, seed=1):
    """A layer on ctx and the same undivided one, from the same seed."""
    layers = []
    for place in (ctx, ParallelContext.single()):
        torch.manual_seed(seed)
        layers.append(make(place))
    return layers


def same_gradients(layer, twin, ctx):
    finish_gradients(layer)
    twins = dict(twin.named_parameters())
    for name, module, key, spec in sharded_parameters(layer):
        close(whole(to_local(module.get_parameter(key).grad), spec, ctx.tp).view(spec.flat), twins[name].grad.view(spec.flat))


def own(x, ctx, dim=-1):
    """This tp rank's features of a whole, as weights divide."""
    return x.split(chunk_sizes(x.shape[dim], ctx.tp.size), dim=dim)[ctx.tp.rank]


def tokens_of(x, ctx):
    """This tp rank's rows of [B, T, M], as tokens divide, and the layout."""
    layout = SequenceLayout.contiguous(x.shape[1], ctx.tp.size)
    return ctx.tp.shard(x, layout), layout


# ---- column ----------------------------------------------------------------------------------------------------------------


@ranks(2, 3, 4)
@pytest.mark.parametrize("bias", [True, False])
def test_column_equals_one_process(rank, world, bias):
    """C26: outputs 5 and 9 over 2, 7 over 4..., gathered or not; the input gradient is summed, weight gradients are shares."""
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        for out_features in WIDTHS[world]:
            for gather in (False, True):
                options = {"bias": bias, "gather_output": gather, "dtype": F64}
                layer, twin = with_twin(lambda c, o=out_features, w=options: ColumnParallelLinear(6, o, ctx=c, **w), ctx)
                x, y = seeded(2, 5, 6, seed=2).requires_grad_(), seeded(2, 5, 6, seed=2).requires_grad_()
                g = seeded(2, 5, out_features, seed=3)
                with ledger() as book:
                    out = layer(x)
                    out.backward(g if gather else own(g, ctx))
                want = twin(y)
                want.backward(g)
                close(out, want if gather else own(want, ctx))
                close(x.grad, y.grad)
                same_gradients(layer, twin, ctx)
                local = own(g, ctx) @ own(twin.weight, ctx, 0)
                far(x.grad, local)      # the sum left out
                assert [m.operation for m in book.messages] == ["all_gather"] * gather + ["all_reduce"]


@ranks(2, 3, 4)
@pytest.mark.parametrize("T", [7, 12, 2])
def test_column_of_token_shards(rank, world, T):
    """sequence_parallel: shards of any lengths (0 tokens too) are gathered; the gradient comes back by reduce-scatter."""
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        layer, twin = with_twin(lambda c: ColumnParallelLinear(6, 7, ctx=c, sequence_parallel=True, dtype=F64), ctx)
        x, g = seeded(3, T, 6, seed=2), seeded(3, T, 7, seed=3)
        share, layout = tokens_of(x, ctx)
        for sizes in (None, layout.sizes):
            layer.zero_grad()
            mine, y = share.clone().requires_grad_(), x.clone().requires_grad_()
            with ledger() as book:
                out = layer(mine, sizes)
                out.backward(own(g, ctx))
            want = twin(y)
            twin.zero_grad()
            want.backward(g)
            close(out, own(want, ctx))
            close(mine.grad, y.grad[:, layout.positions(rank)])
            same_gradients(layer, twin, ctx)
            assert [m.operation for m in book.messages] == ["all_gather"] * (1 + (sizes is None)) + ["reduce_scatter"]


@ranks(2)
def test_a_strided_upstream_gradient(rank, world):
    """C07: fed x.transpose(0, 1), with a loss whose gradient is transposed: the reduced copy is returned, not the original."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        layer, twin = with_twin(lambda c: ColumnParallelLinear(6, 8, ctx=c, dtype=F64), ctx)
        x, y = seeded(3, 5, 6, seed=1).requires_grad_(), seeded(3, 5, 6, seed=1).requires_grad_()
        weights = seeded(3, 5, 8, seed=2)
        (layer(x.transpose(0, 1)) * own(weights, ctx).transpose(0, 1)).sum().backward()
        (twin(y.transpose(0, 1)) * weights.transpose(0, 1)).sum().backward()
        close(x.grad, y.grad)
        far(x.grad, own(weights, ctx) @ own(twin.weight, ctx, 0))


# ---- row -------------------------------------------------------------------------------------------------------------------


@ranks(2, 3, 4)
@pytest.mark.parametrize("parallel", [True, False])
def test_row_equals_one_process(rank, world, parallel):
    """Inputs of any width (and heads of features) over tp, divided or whole; bias once; nothing is sent back if divided."""
    heads = {2: 5, 3: 5, 4: 7}[world]
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        for in_features in (*WIDTHS[world], (heads, 3)):
            for bias in (True, False):
                options = {"bias": bias, "input_is_parallel": parallel, "dtype": F64}
                layer, twin = with_twin(lambda c, i=in_features, w=options: RowParallelLinear(i, 5, ctx=c, **w), ctx)
                of_heads = isinstance(in_features, tuple)
                width = 3 * heads if of_heads else in_features
                sizes = [3 * n for n in chunk_sizes(heads, world)] if of_heads else chunk_sizes(width, world)
                x, g = seeded(2, 5, width, seed=2), seeded(2, 5, 5, seed=3)
                mine, y = (x.split(sizes, -1)[rank] if parallel else x).clone().requires_grad_(), x.clone().requires_grad_()
                with ledger() as book:
                    out = layer(mine)
                    out.backward(g)
                want = twin(y)
                want.backward(g)
                close(out, want)
                close(mine.grad, y.grad.split(sizes, -1)[rank] if parallel else y.grad)
                same_gradients(layer, twin, ctx)
                if bias:
                    far(out, want + (world - 1) * twin.bias)
                assert [m.operation for m in book.messages] == ["all_reduce"] + ["all_gather"] * (not parallel)


@ranks(2, 3, 4)
@pytest.mark.parametrize("T", [7, 12, 2])
def test_row_to_token_shards(rank, world, T):
    """sequence_parallel: a reduce-scatter to shards of any lengths; the bias gradient is a part, summed by finish_gradients."""
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        layer, twin = with_twin(lambda c: RowParallelLinear(7, 5, ctx=c, sequence_parallel=True, dtype=F64), ctx)
        x, g = seeded(3, T, 7, seed=2), seeded(3, T, 5, seed=3)
        p = SequenceLayout.contiguous(T, world).positions(rank)
        mine, y = own(x, ctx).clone().requires_grad_(), x.clone().requires_grad_()
        with ledger() as book:
            out = layer(mine)
            out.backward(g[:, p])
        want = twin(y)
        want.backward(g)
        close(out, want[:, p])
        close(mine.grad, own(y.grad, ctx))
        if T > world:
            far(to_local(layer.bias.grad), twin.bias.grad)
        same_gradients(layer, twin, ctx)
        assert [m.operation for m in book.messages] == ["reduce_scatter", "all_gather"]


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_bias_is_added_once(rank, world, sequence_parallel):
    """C05: x=[1,2,3,4], W=[[1,1,1,1]], b=[100] gives 110 on every rank; 210 or 410 would be the bias once per rank."""
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        layer = RowParallelLinear(4, 1, ctx=ctx, sequence_parallel=sequence_parallel)
        with torch.no_grad():
            to_local(layer.weight).fill_(1.0)
            to_local(layer.bias).fill_(100.0)
        x = torch.tensor([1.0, 2, 3, 4]).expand(8, 4)
        out = layer(own(x, ctx))
        assert out.flatten().tolist() == [110.0] * (8 // world if sequence_parallel else 8)


# ---- composition -----------------------------------------------------------------------------------------------------------


@ranks(1, 2, 4)
@pytest.mark.parametrize(("hidden", "sequence_parallel"), [(8, False), (8, True), (7, False), (7, True)])
def test_column_gelu_row(rank, world, hidden, sequence_parallel):
    """C09: dX, dW1, dW2, db equal serial and the ratio of ||dX|| is 1, not W; between the two nothing is sent."""
    def build(ctx, on):
        return torch.nn.ModuleList([ColumnParallelLinear(6, hidden, ctx=ctx, sequence_parallel=on, dtype=F64),
                                    RowParallelLinear(hidden, 6, ctx=ctx, sequence_parallel=on, dtype=F64)])

    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        mlp, twin = with_twin(lambda c: build(c, sequence_parallel), ctx)
        x, g = seeded(2, 9, 6, seed=2), seeded(2, 9, 6, seed=3)
        share, layout = tokens_of(x, ctx)
        rows = layout.positions(rank) if sequence_parallel else slice(None)
        mine, y = (share if sequence_parallel else x).clone().requires_grad_(), x.clone().requires_grad_()
        with ledger() as book:
            out = mlp[1](torch.nn.functional.gelu(mlp[0](mine)))
            out.backward(g[:, rows])
        want = twin[1](torch.nn.functional.gelu(twin[0](y)))
        want.backward(g)
        close(out, want[:, rows])
        close(mine.grad, y.grad[:, rows])
        close(mine.grad.norm() / y.grad[:, rows].norm(), 1.0)
        same_gradients(mlp, twin, ctx)
        operations = ["all_gather", "all_gather", "reduce_scatter", "all_gather", "reduce_scatter"] if sequence_parallel else \
            ["all_reduce", "all_reduce"]
        assert [m.operation for m in book.messages] == operations * (world > 1)


@ranks(2)
def test_a_copy_computes_and_trains_alone(rank, world):
    """copy.deepcopy: the same numbers, the same groups, gradients of its own."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        layer, twin = with_twin(lambda c: ColumnParallelLinear(4, 5, ctx=c, dtype=F64), ctx)
        other = copy.deepcopy(layer)
        x = seeded(3, 4, seed=0)
        close(other(x), layer(x), 0)
        other(x).sum().backward()
        twin(x).sum().backward()
        assert layer.weight.grad is None and other.ctx is ctx
        same_gradients(other, twin, ctx)


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_a_cast_in_the_layer(rank, world, dtype):
    """float32 weights, input in bfloat16: output and input gradient in bfloat16, weight gradients in float32."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        for make in (lambda c: ColumnParallelLinear(6, 8, ctx=c), lambda c: RowParallelLinear(8, 6, ctx=c)):
            layer, twin = with_twin(make, ctx)
            column = isinstance(layer, ColumnParallelLinear)
            x = seeded(4, 6 if column else 8, seed=1, dtype=dtype)
            mine = (x if column else own(x, ctx)).clone().requires_grad_()
            out = layer(mine)
            out.sum().backward()
            assert out.dtype == mine.grad.dtype == dtype and layer.weight.grad.dtype == torch.float32
            want = twin(x.float())
            close(out, own(want, ctx) if column else want, 2e-2 if dtype == torch.bfloat16 else None)


# ---- initial values --------------------------------------------------------------------------------------------------------


def ramp(weight):
    weight.copy_(torch.arange(weight.numel(), dtype=weight.dtype).view(weight.shape))


INITS = ["default", "xavier", "kaiming", "normal", torch.nn.init.orthogonal_, ramp]


@ranks(2, 3, 4)
def test_initial_values_do_not_depend_on_the_mesh(rank, world):
    """C36: the gathered weights and biases of every kind of layer are bit-identical to those of one process, for every init."""
    def layers(ctx, init):
        return torch.nn.ModuleList([
            ColumnParallelLinear(16, 13, ctx=ctx, init=init), RowParallelLinear(13, 16, ctx=ctx, init=init),
            RowParallelLinear((world, 5), 16, ctx=ctx, init=init),
            QKVParallelLinear(16, 12, 12, 4, ctx=ctx, bias=True, init=init)])

    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        for init in INITS:
            divided, undivided = with_twin(lambda c, i=init: layers(c, i), ctx, seed=0)
            want = whole_state_dict(undivided)
            for name, value in whole_state_dict(divided).items():
                assert torch.equal(value, want[name]), f"{name}, init={init}"


@ranks(2, 4)
def test_shards_are_parts_and_not_copies(rank, world):
    """C37: no two shards are equal; the std of the whole follows the fan-in of the whole layer within 5 %."""
    E = 64
    stds = {"default": 1 / math.sqrt(3 * E), "kaiming": math.sqrt(2 / E), "xavier": math.sqrt(2 / (E + 4 * E)), "normal": 0.02}
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        for init, std in stds.items():
            for layer in (ColumnParallelLinear(E, 4 * E, ctx=ctx, init=init), RowParallelLinear(E, 4 * E, ctx=ctx, init=init)):
                weight = whole_state_dict(layer)["weight"]
                shards = weight.chunk(world, dim=0 if isinstance(layer, ColumnParallelLinear) else 1)
                assert not any(torch.equal(a, b) for i, a in enumerate(shards) for b in shards[:i])
                assert abs(float(weight.std()) / std - 1) < 0.05, (init, float(weight.std()), std)
                other = (type(layer)(E, 4 * E, ctx=ctx, init=init)).weight
                assert not torch.equal(to_local(other), to_local(layer.weight)), "two layers draw different numbers"


# ---- q, k, v ---------------------------------------------------------------------------------------------------------------


@ranks(2, 4)
@pytest.mark.parametrize(("H", "K"), [(8, 4), (4, 4), (12, 4)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_qkv_equals_one_process(rank, world, H, K, sequence_parallel):
    """C34: grouped heads: each rank its own query heads with the key heads they read; any strides; separate parameters."""
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        options = {"bias": True, "sequence_parallel": sequence_parallel, "dtype": F64}
        layer, twin = with_twin(lambda c: QKVParallelLinear(10, H, K, 3, ctx=c, **options), ctx)
        x = seeded(10, 7, 2, seed=1).permute(2, 1, 0)
        gs = [seeded(2, 7, n, 3, seed=5 + n) for n in (H, K, K)]
        share, layout = tokens_of(x, ctx)
        mine, y = (share if sequence_parallel else x).detach().clone().requires_grad_(), x.clone().requires_grad_()
        outs, wants = layer(mine), twin(y)
        torch.autograd.backward(outs, [own(g, ctx, 2) for g in gs])
        torch.autograd.backward(wants, gs)
        for out, want in zip(outs, wants, strict=True):
            close(out, own(want, ctx, 2))
        close(mine.grad, y.grad[:, layout.positions(rank)] if sequence_parallel else y.grad)
        same_gradients(layer, twin, ctx)
        assert sorted(layer.state_dict()) == sorted(f"{n}{b}" for n in "qkv" for b in ("", "_bias"))
