"""Products that hide messages behind others: the same numbers and bytes in any number of pieces, kept or gathered again."""

import pytest
import torch
from helpers import close, far, seeded
from pool import ranks

from tpattn import (
    ColumnParallelLinear,
    ParallelContext,
    ParallelMLP,
    RowParallelLinear,
    SequenceLayout,
    TransformerBlock,
    comm,
    ledger,
    masks,
)
from tpattn.linear import column_product, functions, row_product
from tpattn.params import to_local

I, O, F64 = 6, 5, torch.float64      # features in and out, of each rank for the divided side


def whole(T, world, seed=0, shape=(2,)):
    """Input [2, T, I], the ranks' weights [world, O, I] and biases [world, O], upstream gradients [world, 2, T, O]."""
    return (seeded(*shape, T, I, seed=seed), seeded(world, O, I, seed=seed + 1), seeded(world, O, seed=seed + 2),
            seeded(world, *shape, T, O, seed=seed + 3))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sizes", ["equal", "uneven", "one empty"])
def test_column_product_in_pieces(rank, world, sizes):
    """Outputs and gradients of one process for every number of pieces, kept or gathered again; bytes of one gather each."""
    T = 11
    lengths = {"equal": [len(range(T)[r::world]) for r in range(world)], "uneven": [T - world + 1] + [1] * (world - 1),
               "one empty": [0] * (world - 1) + [T]}[sizes]
    ctx = ParallelContext.from_env(tp=world, timeout=60)
    x, w, b, g = whole(T, world)
    x.requires_grad_()
    wants = [x @ w[r].mT + b[r] for r in range(world)]
    (dx,) = torch.autograd.grad(sum((y * z).sum() for y, z in zip(wants, g, strict=True)), x)
    dw = g[rank].flatten(0, 1).mT @ x.detach().flatten(0, 1)
    shares = x.detach().split(lengths, dim=1), dx.split(lengths, dim=1)
    for keep in (True, False):
        for chunks in (1, 2, 3, 20):
            mine, own_w, own_b = (t.clone().requires_grad_() for t in (shares[0][rank], w[rank], b[rank]))
            with ledger() as book:
                out, other = column_product(
                    mine, [(own_w, own_b), (2 * own_w, None)], ctx.tp, True, lengths, keep=keep, chunks=chunks)
                close([out, other], [wants[rank], 2 * (wants[rank] - b[rank])])
                out.backward(g[rank])
            close([mine.grad, own_w.grad, own_b.grad], [shares[1][rank], dw, g[rank].sum((0, 1))])
            gathered, scattered = 2 * (T - lengths[rank]) * I * 8, 2 * lengths[rank] * I * 8 * (world - 1)
            assert book.bytes(direction="forward") == gathered
            assert book.bytes(direction="backward") == scattered + (0 if keep or world == 1 else gathered)
            if world > 1:
                assert len(book.select(direction="forward")) == chunks
                far(mine.grad, g[rank].split(lengths, dim=1)[rank] @ w[rank]) if lengths[rank] else None
    ctx.close()


@ranks(2, 3)
@pytest.mark.parametrize("chunks", [1, 2, 5, 20])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_row_product_in_pieces(rank, world, chunks, sequence_parallel):
    """The sum over ranks, whole or as token shards, and its gradients; the bytes are those of one message."""
    T, ctx = 11, ParallelContext.from_env(tp=world, timeout=60)
    x, w = seeded(world, 2, T, I, seed=0), seeded(world, O, I, seed=1)
    g = seeded(2, T, O, seed=2)
    want = sum(x[r] @ w[r].mT for r in range(world))
    lengths = [T - 2 * (world - 1)] + [2] * (world - 1)
    mine, own = (t[rank].clone().requires_grad_() for t in (x, w))
    with ledger() as book:
        out = row_product(mine, own, ctx.tp, sequence_parallel, lengths if sequence_parallel else None, chunks=chunks)
        part = g.split(lengths, dim=1)[rank] if sequence_parallel else g
        close(out, want.split(lengths, dim=1)[rank] if sequence_parallel else want)
        out.backward(part)
    close([mine.grad, own.grad], [g @ w[rank], g.flatten(0, 1).mT @ x[rank].flatten(0, 1)])
    forward, backward = book.bytes(direction="forward"), book.bytes(direction="backward")
    if sequence_parallel:
        assert forward == 2 * lengths[rank] * O * 8 * (world - 1) and backward == 2 * (T - lengths[rank]) * O * 8
    else:
        assert abs(forward - 2 * (world - 1) * 2 * T * O * 8 // world) < 8 * chunks and backward == 0
    assert len(book.select(direction="forward")) == chunks
    ctx.close()


@ranks(2)
def test_the_input_gradient_travels_while_weight_gradients_are_computed(rank, world):
    """Its message is started before the first product of a weight's gradient and waited for after the last."""
    ctx, log = ParallelContext.from_env(tp=2, timeout=60), []
    product = functions._weight_gradient

    def told(start):
        def spy(*arguments, **options):
            log.append("start")
            wait = start(*arguments, **options)
            return lambda: (log.append("wait"), wait())[1]

        return spy

    with pytest.MonkeyPatch.context() as patch:
        for name in ("start_all_reduce", "start_reduce_scatter"):
            patch.setattr(comm, name, told(getattr(comm, name)))
        patch.setattr(functions, "_weight_gradient", lambda *x: (log.append("product"), product(*x))[1])
        torch.manual_seed(0)
        for sequence_parallel in (False, True):
            mlp = ParallelMLP(8, 12, "swiglu", ctx=ctx, sequence_parallel=sequence_parallel, dtype=F64)
            x = seeded(2, 6, 8, seed=1).requires_grad_()
            out = mlp(x)
            log.clear()
            out.sum().backward()
            assert log == ["product", "start", "product", "product", "wait"], log
    ctx.close()


def block_bytes(T, M, tp, again=False):
    """What each of `tp` ranks receives in forward + backward of a float32 block: 4 sums of [T, M], or 4 halves of one and 4 (6)
    gathers, the other halves."""
    return (10 if again else 8) * (tp - 1) * T * M * 4 // tp


@ranks(2, 4)
@pytest.mark.parametrize("mode", ["whole", "kept", "gathered again"])
def test_a_block_sends_one_sum_each_way_per_half(rank, world, mode):
    """Of [2048, 1024] float32 on tp=2 32 MiB in forward + backward in both modes, 40 when gathered again; here of [24, 16]."""
    assert (block_bytes(2048, 1024, 2), block_bytes(2048, 1024, 2, again=True)) == (32 * 2**20, 40 * 2**20)
    T, M, again = 24, 16, mode == "gathered again"
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        sp = mode != "whole"
        block = TransformerBlock(M, 4, ffn=20, ctx=ctx, sequence_parallel=sp, keep_gathered=not again)
        x = seeded(1, T // world if sp else T, M, seed=rank if sp else 0, dtype=torch.float32).requires_grad_()
        options = {"layout": SequenceLayout.contiguous(T, 1), "token_sizes": [T // world] * world if sp else None}
        with ledger() as book:
            block(x, mask=masks.causal(), **options).sum().backward()
        assert book.bytes() == block_bytes(T, M, world, again)
        for direction in ("forward", "backward"):
            sent = [(m.axis, m.operation) for m in book.select(direction=direction)]
            if sp:
                more = 2 * (again and direction == "backward")
                assert sorted(sent) == [("tp", "all_gather")] * (2 + more) + [("tp", "reduce_scatter")] * 2
            else:
                assert sent == [("tp", "all_reduce")] * 2


@ranks(2)
@pytest.mark.parametrize(("keep", "chunks"), [(True, 1), (False, 1), (True, 3), (False, 2)])
def test_block_with_every_option_equals_one_process(rank, world, keep, chunks):
    """The options reach every layer of a block; gathering again costs one gather of the block's input for each half block."""
    alone, ctx = ParallelContext.single(), ParallelContext.from_env(tp=2, timeout=60)
    T, M = 9, 8
    x, g = seeded(2, T, M, seed=0), seeded(2, T, M, seed=1)
    torch.manual_seed(0)
    twin = TransformerBlock(M, 4, 2, ctx=alone, dtype=F64)
    whole_x = x.clone().requires_grad_()
    want = twin(whole_x, mask=masks.causal())
    want.backward(g)
    torch.manual_seed(0)
    block = TransformerBlock(M, 4, 2, ctx=ctx, sequence_parallel=True, keep_gathered=keep, chunks=chunks, dtype=F64)
    lengths = [5, 4]
    mine = x.split(lengths, dim=1)[rank].clone().requires_grad_()
    with ledger() as book:
        out = block(mine, mask=masks.causal(), token_sizes=lengths)
        out.backward(g.split(lengths, dim=1)[rank])
    close([out, mine.grad], [t.split(lengths, dim=1)[rank] for t in (want, whole_x.grad)])
    share = lambda n: 2 * n * M * 8  # noqa: E731
    gathers, scatters = share(T - lengths[rank]), share(lengths[rank])
    assert book.bytes(axis="tp", direction="forward") == 2 * (gathers + scatters)
    assert book.bytes(axis="tp", direction="backward") == 2 * (gathers + scatters) + (0 if keep else 2 * gathers)
    assert len(book.select(axis="tp", direction="forward")) == 4 * chunks
    ctx.close()


@ranks(1, 2)
@pytest.mark.parametrize("fast", [True, False])
def test_low_precision_errs_no_more_than_one_product_on_any_cpu(rank, world, fast):
    """Where the CPU has no bfloat16 products they are made in float32: outputs and gradients err no more than torch's, twice."""
    def run(ctx, dtype):
        torch.manual_seed(3)
        up = ColumnParallelLinear(40, 24, ctx=ctx, dtype=torch.bfloat16).to(dtype)
        down = RowParallelLinear(24, 40, ctx=ctx, dtype=torch.bfloat16).to(dtype)
        x = seeded(2, 9, 40, seed=1, dtype=torch.bfloat16).to(dtype).requires_grad_()
        y = down(up(x))
        y.backward(seeded(2, 9, 40, seed=2, dtype=torch.bfloat16).to(dtype))
        return [y.detach(), x.grad, *(to_local(p.grad) for layer in (up, down) for p in layer.parameters())]

    with ParallelContext.from_env(tp=world, timeout=60) as ctx, pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "fast_on_cpu", lambda _: fast)
        got, want = run(ctx, torch.bfloat16), run(ctx, torch.float64)
        for x, y in zip(got, want, strict=True):
            assert x.dtype == torch.bfloat16
            assert (x.double() - y).abs().max() <= 2 * 2**-8 * y.abs().max()
