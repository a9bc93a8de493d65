"""clip_grad_norm_ gives the norm and the gradients of one process: every element once, whatever is divided or copied."""

import math

import pytest
import torch
from helpers import close, far, seeded
from pool import ranks
from torch import nn
from torch.distributed.tensor import DTensor

from tpattn import (
    ColumnParallelLinear,
    ParallelContext,
    RMSNorm,
    SequenceLayout,
    TransformerBlock,
    Unsupported,
    clip_grad_norm_,
    finish_gradients,
    ledger,
)
from tpattn.params import sharded_parameters, to_local, whole

F64 = torch.float64
M, T = 12, 7
SIZES = {1: [(1, 1, 1)], 2: [(1, 1, 2), (1, 2, 1), (2, 1, 1)], 3: [(1, 3, 1)], 4: [(1, 2, 2), (2, 1, 2), (1, 4, 1)]}


def give(parameter, local):
    """Set a gradient from this rank's local values, placed as the parameter."""
    if isinstance(parameter, DTensor):
        local = DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                                   stride=parameter.stride())
    parameter.grad = local


@ranks(2)
def test_the_norm_counts_every_element_once(rank, world):
    """C39: gradients 3 and 4 of a divided weight, 12 of a copied one: 13, not 17.69; clipped to 6.5 each is halved."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        column, norm = ColumnParallelLinear(1, 2, ctx=ctx, bias=False, dtype=F64), RMSNorm(1, ctx=ctx, dtype=F64)
        give(column.weight, torch.tensor([[3.0 + rank]], dtype=F64))
        give(norm.weight, torch.tensor([12.0], dtype=F64))
        got = clip_grad_norm_([column.weight, norm.weight], 6.5)
        close(got, 13.0)
        far(got, math.sqrt(3**2 + 4**2 + 2 * 12**2))
        close(to_local(column.weight.grad), torch.tensor([[(3.0 + rank) / 2]], dtype=F64), 1e-6)
        close(to_local(norm.weight.grad), torch.tensor([6.0], dtype=F64), 1e-6)
        assert type(got) is torch.Tensor and got.dim() == 0 and not got.requires_grad


class Model(nn.Module):
    def __init__(self, ctx, sequence_parallel):
        super().__init__()
        torch.manual_seed(0)
        self.block = TransformerBlock(M, 6, 2, ffn=10, ctx=ctx, bias=True, sequence_parallel=sequence_parallel, dtype=F64)
        torch.manual_seed(1)
        self.plain, self.unused = nn.Linear(M, 3, dtype=F64), nn.Linear(3, 3, dtype=F64)


def with_gradients(ctx, sequence_parallel=False):
    """A block beside a plain layer, its gradients complete; `unused` has none."""
    model = Model(ctx, sequence_parallel)
    layout = SequenceLayout.zigzag(T, ctx.cp.size)
    x, g = (ctx.cp.shard(seeded(4, T, M, seed=s).tensor_split(ctx.dp.size)[ctx.dp.rank], layout) for s in (1, 2))
    h = (seeded(4, T, 3, seed=3).tensor_split(ctx.dp.size)[ctx.dp.rank])[:, layout.positions(ctx.cp.rank)]
    if sequence_parallel and ctx.tp.size > 1:
        rows = SequenceLayout.contiguous(x.shape[1], ctx.tp.size)
        y = ctx.tp.gather(model.block(ctx.tp.shard(x, rows), layout=layout), rows)
    else:
        y = model.block(x, layout=layout)
    ((y * g).sum() + (model.plain(x) * h).sum()).backward()
    finish_gradients(model)
    return model


def same(model, twin, ctx):
    specs = {id(m.get_parameter(key)): spec for _, m, key, spec in sharded_parameters(model)}
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            close(whole(to_local(p.grad), specs[id(p)], ctx.tp) if id(p) in specs else p.grad, q.grad)


@ranks(1, 2, 3, 4)
def test_clipping_equals_torchs_on_one_process(rank, world):
    """C40, C41: a hybrid block beside a plain layer: the serial norm on every rank, the serial gradients after; any norm."""
    twin = with_gradients(ParallelContext.single())
    for sizes in SIZES[world]:
        for sequence_parallel in {False, sizes[2] > 1}:
            with ParallelContext.from_env(*sizes, timeout=60) as ctx:
                model = with_gradients(ctx, sequence_parallel)
                grads = [to_local(p.grad) for m in (model, twin) for p in m.parameters() if p.grad is not None]
                before = [g.clone() for g in grads]
                for norm_type in (1.0, 2.0, 3.0, 0.5, math.inf):
                    for max_norm, foreach in ((0.3, None), (0.3, True), (0.3, False), (1e9, None)):
                        want = nn.utils.clip_grad_norm_(twin.parameters(), max_norm, norm_type)
                        got = clip_grad_norm_(model.parameters(), max_norm, norm_type, foreach=foreach)
                        close(got, want)
                        same(model, twin, ctx)
                        torch._foreach_copy_(grads, before)


@ranks(2)
def test_generators_lists_and_single_tensors(rank, world):
    """C41: an iterator is read once and still clips, by any norm; what has no gradient is skipped; one tensor is a list."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        results = []
        for give_it in (lambda m: m.parameters(), lambda m: list(m.parameters()), lambda m: tuple(m.parameters()),
                        lambda m: (p for p in m.parameters()), lambda m: iter(list(m.parameters()))):
            model = with_gradients(ctx)
            norm = clip_grad_norm_(give_it(model), 0.5)
            results.append([norm, *(to_local(p.grad).clone() for p in model.parameters() if p.grad is not None)])
            close(clip_grad_norm_(give_it(model), 1e9), 0.5, 1e-5)
        for other in results[1:]:
            close(other, results[0], 0)
        weight, weight_spec = model.block.attention.qkv.q, model.block.attention.qkv.specs["q"]
        grads = [to_local(p.grad) for p in model.parameters() if p.grad is not None]
        before = [g.clone() for g in grads]
        for norm_type in (1.0, 2.0, math.inf):
            results = []
            for give_it in (lambda m: m.parameters(), lambda m: list(m.parameters())):
                for foreach in (True, False):
                    norm = clip_grad_norm_(give_it(model), 0.1, norm_type, foreach=foreach)
                    assert float(norm) > 0.1
                    results.append([norm, *(g.clone() for g in grads)])
                    torch._foreach_copy_(grads, before)
            for other in results[1:]:
                close(other, results[0], 0)
            grad = whole(to_local(weight.grad), weight_spec, ctx.tp)
            for foreach in (True, False):
                close(clip_grad_norm_(weight, 0.01, norm_type, foreach=foreach), torch.linalg.vector_norm(grad, norm_type))
                torch._foreach_copy_(grads, before)
        model = with_gradients(ctx)
        weight = model.block.attention.qkv.q
        before = to_local(weight.grad).clone()
        norm = clip_grad_norm_(weight, 0.1)
        close(to_local(weight.grad), before * 0.1 / (norm + 1e-6))
        with ledger() as book:
            assert clip_grad_norm_([], 1.0).item() == 0.0 and clip_grad_norm_(model.unused.parameters(), 1.0).item() == 0.0
        assert not book.messages


@ranks(2)
def test_mixed_dtypes_and_what_is_not_finite(rank, world):
    """float32, bfloat16 and float64 gradients have one norm; a nan or inf is told on every rank if asked for."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        layers = [ColumnParallelLinear(3, 4, ctx=ctx, bias=False, dtype=d) for d in (torch.float32, torch.bfloat16, F64)]
        whole_grads = [seeded(4, 3, seed=i, dtype=layer.weight.dtype) for i, layer in enumerate(layers)]
        for layer, g in zip(layers, whole_grads, strict=True):
            give(layer.weight, g.chunk(2)[rank].clone())
        want = math.sqrt(sum(float((g.double() ** 2).sum()) for g in whole_grads))
        got = clip_grad_norm_([layer.weight for layer in layers], 1.0)
        close(got, torch.tensor(want, dtype=F64), 1e-12)
        assert got.dtype == F64
        close(to_local(layers[2].weight.grad), whole_grads[2].chunk(2)[rank] / (want + 1e-6))
        close(to_local(layers[1].weight.grad), whole_grads[1].chunk(2)[rank].double() / want, 1e-2)
        assert clip_grad_norm_([layers[0].weight], 1.0).dtype == torch.float32
        for bad in (torch.inf, torch.nan):
            for where in (0, 1):
                if rank == where:
                    to_local(layers[0].weight.grad)[0, 0] = bad
                for norm_type in (2.0, math.inf):
                    with pytest.raises(RuntimeError, match="norm of order"):
                        clip_grad_norm_([layers[0].weight], 1.0, norm_type, error_if_nonfinite=True)
                to_local(layers[0].weight.grad)[0, 0] = 1.0
        for norm_type in (0.0, -1.0):
            with pytest.raises(Unsupported, match="norm_type"):
                clip_grad_norm_([layers[0].weight], 1.0, norm_type)


@ranks(2)
def test_a_gradient_that_is_partial_is_refused(rank, world):
    """Norm weights on token shards: clipping before finish_gradients raises, on every rank, before anything is sent."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        norm = RMSNorm(4, ctx=ctx, sequence_parallel=True)
        norm(torch.full((2, 4), rank + 1.0)).sum().backward()
        with ledger() as book, pytest.raises(Exception, match="finish_gradients"):
            clip_grad_norm_(norm.parameters(), 1.0)
        assert not book.messages
