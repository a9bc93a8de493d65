"""How sequence_attention behaves in a program: without gradient, checkpointed, twice in one graph, under autocast, compiled."""

import pytest
import torch
from helpers import close, every_way, far, seeded
from oracle import attention_and_gradients
from pool import ranks
from torch.utils.checkpoint import checkpoint

from tpattn import ParallelContext, SequenceLayout, TransformerBlock, finish_gradients, ledger, masks, sequence_attention

T, B, H, K, D = 11, 2, 4, 2, 8


def problem(seed=0, dtype=torch.float64):
    shapes = (B, T, H, D), (B, T, K, D), (B, T, K, D), (B, T, H, D)
    return [seeded(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


# ---- graphs ----------------------------------------------------------------------------------------------------------------


@ranks(2, 4)
@pytest.mark.parametrize("remat", [False, True])
def test_without_gradient(rank, world, remat):
    """no_grad and inference_mode give the same output, no graph and no backward message; inputs without gradient neither."""
    inputs = problem()
    layout = SequenceLayout.zigzag(T, world)
    p = layout.positions(rank)
    want = attention_and_gradients(*inputs, CAUSAL)[0][:, p]
    q, k, v = (x[:, p].requires_grad_() for x in inputs[:3])
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for way in every_way(world):
            options = {"ctx": ctx, "mask": masks.causal(), "layout": layout, **way, "remat": remat}
            for block in (torch.no_grad, torch.inference_mode):
                with block(), ledger() as book:
                    out = sequence_attention(q, k, v, **options)
                close(out, want)
                assert not out.requires_grad and not book.select(direction="backward")
            assert not sequence_attention(q.detach(), k.detach(), v.detach(), **options).requires_grad


@ranks(2, 4)
def test_some_inputs_need_no_gradient(rank, world):
    """Any of q, k, v may be frozen, the same on every rank: the others' gradients are right, the frozen one has none."""
    inputs = problem()
    layout = SequenceLayout.zigzag(T, world)
    p = layout.positions(rank)
    want = [x[:, p] for x in attention_and_gradients(*inputs, CAUSAL)[2:]]
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for way in every_way(world):
            for which in range(1, 8):
                leaves = [x[:, p].clone().requires_grad_(bool(which >> i & 1)) for i, x in enumerate(inputs[:3])]
                out = sequence_attention(*leaves, ctx=ctx, mask=masks.causal(), layout=layout, **way)
                out.backward(inputs[3][:, p])
                for x, g in zip(leaves, want, strict=True):
                    assert x.requires_grad or x.grad is None
                    if x.requires_grad:
                        close(x.grad, g)


@ranks(2, 3)
@pytest.mark.parametrize("remat", [False, True])
def test_twice_in_one_graph(rank, world, remat):
    """The output of one call is the input of the next, and one tensor is q, k and v: gradients add up as in one process."""
    x_whole, g = seeded(B, T, K, D, seed=0), seeded(B, T, K, D, seed=1)
    x = x_whole.clone().requires_grad_()

    def serial(q, k, v):
        scores = torch.einsum("bthd,bshd->bhts", q, k) * D**-0.5
        return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~CAUSAL, -torch.inf).softmax(-1), v)

    first = serial(x, x, x)
    want = serial(first, x, first)
    want.backward(g)
    layout = SequenceLayout.zigzag(T, world)
    p = layout.positions(rank)
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for way in every_way(world):
            mine = x_whole[:, p].clone().requires_grad_()
            options = {"ctx": ctx, "mask": masks.causal(), "layout": layout, **way, "remat": remat}
            first = sequence_attention(mine, mine, mine, **options)
            out = sequence_attention(first, mine, first, **options)
            out.backward(g[:, p])
            close(out, want[:, p])
            close(mine.grad, x.grad[:, p])


@ranks(2)
def test_two_calls_may_be_backwarded_in_any_order_and_again(rank, world):
    """retain_graph: a second backward through the same call gives the same gradients; two calls go backward in reverse order."""
    inputs, layout = problem(), SequenceLayout.contiguous(T, 2)
    p = layout.positions(rank)
    want = attention_and_gradients(*inputs)
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        for way in every_way(2):
            q, k, v = (x[:, p].clone().requires_grad_() for x in inputs[:3])
            a = sequence_attention(q, k, v, ctx=ctx, layout=layout, **way)
            b = sequence_attention(q, k, v, ctx=ctx, layout=layout, **way)
            for out in (a, b, b, a):
                got = torch.autograd.grad(out, (q, k, v), inputs[3][:, p], retain_graph=True)
                for mine, theirs in zip(got, want[2:], strict=True):
                    close(mine, theirs[:, p])


@ranks(2, 4)
@pytest.mark.parametrize(("remat", "reentrant"), [(False, False), (True, False), (False, True)])
def test_activation_checkpointing(rank, world, remat, reentrant):
    """torch.utils.checkpoint around the call: recomputed in backward, the same numbers; its messages are counted both times."""
    inputs, layout = problem(), SequenceLayout.zigzag(T, world)
    p = layout.positions(rank)
    want = attention_and_gradients(*inputs, CAUSAL)
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for way in every_way(world):
            def call(q, k, v, way=way):
                return sequence_attention(q * 1.0, k, v, ctx=ctx, mask=masks.causal(), layout=layout, **way, remat=remat)

            leaves = [x[:, p].clone().requires_grad_() for x in inputs[:3]]
            with ledger() as plain:
                call(*leaves).backward(inputs[3][:, p])
            grads = [x.grad for x in leaves]
            leaves = [x[:, p].clone().requires_grad_() for x in inputs[:3]]
            with ledger() as twice:
                out = checkpoint(call, *leaves, use_reentrant=reentrant)
                out.backward(inputs[3][:, p])
            close(out, want[0][:, p])
            for x, g, theirs in zip(leaves, grads, want[2:], strict=True):
                close(x.grad, g, 0)
                close(g, theirs[:, p])
            assert twice.bytes() == plain.bytes() + plain.bytes(direction="forward")


@ranks(2, 4)
def test_gradients_of_two_micro_batches_add_up(rank, world):
    """A backward for each sequence of the batch leaves in .grad what one backward for both does."""
    inputs, layout = problem(), SequenceLayout.zigzag(T, world)
    p = layout.positions(rank)
    want = attention_and_gradients(*inputs, CAUSAL)[2:]
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for way in every_way(world):
            leaves = [x[:, p].clone().requires_grad_() for x in inputs[:3]]
            for b in range(B):
                out = sequence_attention(*(x[b : b + 1] for x in leaves), ctx=ctx, mask=masks.causal(), layout=layout, **way)
                out.backward(inputs[3][b : b + 1, p])
            for x, g in zip(leaves, want, strict=True):
                close(x.grad, g[:, p])


@ranks(2)
def test_lse_comes_without_gradient_and_writing_into_results_is_noticed(rank, world):
    """lse [B, t, H] requires none; an output changed in place before backward raises and is not silently used."""
    inputs, layout = problem(), SequenceLayout.contiguous(T, 2)
    p = layout.positions(rank)
    want = attention_and_gradients(*inputs, CAUSAL)[1]
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        for way in every_way(2):
            for which in (0, 1):
                leaves = [x[:, p].clone().requires_grad_() for x in inputs[:3]]
                results = sequence_attention(*leaves, ctx=ctx, mask=masks.causal(), layout=layout, **way, return_lse=True)
                close(results[1], want[:, p])
                assert results[1].shape == (B, p.numel(), H) and not results[1].requires_grad
                keep = results[0].sum()
                with torch.no_grad():
                    results[which].mul_(2.0)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    keep.backward()


@ranks(2)
def test_an_upstream_gradient_of_zero_and_of_one_number(rank, world):
    """sum() hands an expanded gradient of strides 0; a gradient of zeros gives zeros, with merged outputs too."""
    inputs, layout = problem(), SequenceLayout.zigzag(T, 2)
    p = layout.positions(rank)
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        for way in every_way(2):
            for factor in (1.0, 0.0):
                leaves = [x[:, p].clone().requires_grad_() for x in inputs[:3]]
                (sequence_attention(*leaves, ctx=ctx, mask=masks.causal(), layout=layout, **way) * factor).sum().backward()
                want = attention_and_gradients(*inputs[:3], torch.full_like(inputs[3], factor), CAUSAL)[2:]
                for x, g in zip(leaves, want, strict=True):
                    close(x.grad, g[:, p])


@ranks(2)
def test_lengths_are_agreed_when_no_layout_is_given(rank, world):
    """One small all-gather of the lengths; shares are then neighbours in rank order, whatever their lengths, one of them 0."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        for sizes in ([7, 4], [0, 11], [11, 0]):
            layout = SequenceLayout.of_lengths(sizes)
            inputs, p = problem(), layout.positions(rank)
            want = attention_and_gradients(*inputs, CAUSAL)
            leaves = [x[:, p].clone().requires_grad_() for x in inputs[:3]]
            with ledger() as book:
                out = sequence_attention(*leaves, ctx=ctx, mask=masks.causal())
            assert book.messages[0].operation == "all_gather" and book.messages[0].bytes == 16
            out.backward(inputs[3][:, p])
            close(out, want[0][:, p])
            for x, g in zip(leaves, want[2:], strict=True):
                close(x.grad, g[:, p])


@ranks(2, 4)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block(rank, world, reentrant):
    """cp=2, and cp=2 x tp=2: checkpointed as a whole, a block equals the undivided one."""
    x, g, alone = seeded(B, T, 32, seed=0), seeded(B, T, 32, seed=1), ParallelContext.single()
    everyone, whole = torch.arange(T), SequenceLayout.contiguous(T, 1)
    want = output_and_gradients(block(alone, torch.float64), x, everyone, whole, g, False)
    with ParallelContext.from_env(cp=2, tp=world // 2, timeout=60) as ctx:
        layout, model = SequenceLayout.zigzag(T, 2), block(ctx, torch.float64)

        def call(x, mask, layout):
            return checkpoint(lambda x: model(x, mask=mask, layout=layout), x, use_reentrant=reentrant)

        p = layout.positions(ctx.cp.rank)
        got = output_and_gradients(model, x, p, layout, g, False, call)
        close(got[:2], [a[:, p] for a in want[:2]])
        close(got[2:], want[2:])


# ---- autocast --------------------------------------------------------------------------------------------------------------


@ranks(2, 4)
def test_autocast_leaves_attention_in_the_dtype_it_is_given(rank, world):
    """float32 in, the bits of float32 out, forward and backward, also with backward inside; products in bfloat16 are far."""
    inputs, layout = problem(dtype=torch.float32), SequenceLayout.zigzag(T, world)
    p = layout.positions(rank)
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for way in every_way(world):
            got = []
            for enabled in (False, True):
                leaves = [x[:, p].clone().requires_grad_() for x in inputs[:3]]
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                    out = sequence_attention(*leaves, ctx=ctx, mask=masks.causal(), layout=layout, kernel="math", **way)
                    out.backward(inputs[3][:, p])
                got.append([out.detach(), *(x.grad for x in leaves)])
            close(got[1], got[0], 0)


def block(ctx, dtype, norm="rmsnorm", **options):
    """A block with the weights of seed 0, on any mesh."""
    torch.manual_seed(0)
    return TransformerBlock(32, 4, 2, norm=norm, ctx=ctx, dtype=dtype, **options)


def output_and_gradients(model, x, p, layout, g, autocast, call=None):
    """Of a block under autocast (or not), on this rank's positions p: [out, dx, the whole gradient of every weight]."""
    x = x[:, p].clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = (call or model)(x, mask=masks.causal(), layout=layout)
    out.backward(g[:, p].to(out.dtype))
    finish_gradients(model)
    return [out.detach(), x.grad, *(getattr(w.grad, "full_tensor", lambda w=w: w.grad)() for w in model.parameters())]


@ranks(2, 4)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_block_under_autocast_errs_as_the_undivided_one(rank, world, norm, tp):
    """bfloat16 autocast of a float32 block: output, input and weight gradients err at most twice as much as undivided."""
    x, g, alone = seeded(B, T, 32, seed=0), seeded(B, T, 32, seed=1), ParallelContext.single()
    everyone, whole = torch.arange(T), SequenceLayout.contiguous(T, 1)
    want = output_and_gradients(block(alone, torch.float64, norm), x, everyone, whole, g, False)
    serial = output_and_gradients(block(alone, torch.float32, norm), x.float(), everyone, whole, g, True)
    with ParallelContext.from_env(cp=world // tp, tp=tp, timeout=60) as ctx:
        layout = SequenceLayout.zigzag(T, ctx.cp.size)
        p = layout.positions(ctx.cp.rank)
        got = output_and_gradients(block(ctx, torch.float32, norm), x.float(), p, layout, g, True)
        assert got[0].dtype == serial[0].dtype == torch.float32
        assert sum(a.abs().max() for a in got[1:]) > 0
        for i, (mine, theirs, right) in enumerate(zip(got, serial, want, strict=True)):
            error, allowed = ((a.double() - b).abs().max() for a, b in ((mine, right[:, p] if i < 2 else right), (theirs, right)))
            assert allowed > 1e-5 and error <= 2 * allowed, f"{i}: {error} > 2 x {allowed}"


# ---- torch.compile ---------------------------------------------------------------------------------------------------------


def compiled(call, **options):
    """`call` compiled by aot_eager, and a function that gives the reasons of its graph breaks so far."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()
    counters.clear()

    def reasons():
        assert counters["stats"]["unique_graphs"] > 1       # what stands around the breaks is compiled
        return list(counters["graph_break"])

    return torch.compile(call, backend="aot_eager", **options), reasons


@ranks(2)
def test_a_compiled_function_breaks_its_graph_at_attention_only(rank, world):
    """torch.compile of a function around sequence_attention: the same numbers; fullgraph=True says by name what it cannot be."""
    inputs, layout = problem(), SequenceLayout.zigzag(T, world)
    p = layout.positions(rank)
    want = attention_and_gradients(*inputs, CAUSAL)
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        def call(q, k, v):
            return sequence_attention(q * 0.5, k * 2.0, v, ctx=ctx, mask=masks.causal(), layout=layout) + 0.0

        function, reasons = compiled(call)
        leaves = [x[:, p].clone().requires_grad_() for x in inputs[:3]]
        out = function(*leaves)
        out.backward(inputs[3][:, p])
        close(out, want[0][:, p])
        for x, g in zip(leaves, want[2:], strict=True):
            close(x.grad, g[:, p])
        assert reasons() and all("tpattn.sequence_attention sends messages" in reason for reason in reasons())
        function, _ = compiled(call, fullgraph=True)
        with ledger() as book, pytest.raises(torch._dynamo.exc.Unsupported, match=r"tpattn\.sequence_attention sends messages"):
            function(*leaves)
        assert not book.messages


def check_compiled_block(layout, where, **sizes):
    """A compiled block equals the undivided one, and its graph breaks at the functions named in `where`, nowhere else."""
    x, g, alone = seeded(B, T, 32, seed=0), seeded(B, T, 32, seed=1), ParallelContext.single()
    everyone, whole = torch.arange(T), SequenceLayout.contiguous(T, 1)
    want = output_and_gradients(block(alone, torch.float64), x, everyone, whole, g, False)
    with ParallelContext.from_env(**sizes, timeout=60) as ctx:
        p = (layout or SequenceLayout.contiguous(T, 2)).positions(ctx.cp.rank)
        model = block(ctx, torch.float64)
        model.compile(backend="aot_eager")
        _, reasons = compiled(model)
        got = output_and_gradients(model, x, p, layout, g, False)
        close(got[:2], [a[:, p] for a in want[:2]])
        close(got[2:], want[2:])
        at = {name: [r for r in reasons() if f"tpattn.{name} sends messages" in r] for name in where}
        assert all(at.values()), f"no break at {where}"
        assert sum(map(len, at.values())) == len(reasons()), "\n".join(reasons())


@ranks(2)
@pytest.mark.parametrize("layout", [SequenceLayout.zigzag(T, 2), None])
def test_a_compiled_block_breaks_its_graph_at_attention_only(rank, world, layout):
    """cp=2, with a layout; without one also where lengths are agreed."""
    check_compiled_block(layout, ["sequence_attention"] if layout else ["sequence_attention", "_agree"], cp=2)


@ranks(4)
@pytest.mark.long
def test_a_compiled_block_on_cp_and_tp_breaks_its_graph_at_messages_only(rank, world):
    check_compiled_block(SequenceLayout.zigzag(T, 2), ["sequence_attention", "_apply"], cp=2, tp=2)


# ---- no ranks, no layout ---------------------------------------------------------------------------------------------------


def test_one_process_is_ordinary_attention():
    """single(): no group, nothing sent, with a mask for each sequence and an unsorted layout too."""
    ctx, inputs = ParallelContext.single(), problem()
    order = torch.randperm(T, generator=torch.Generator().manual_seed(0))
    valid = torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.7
    allowed = CAUSAL & valid[:, None, None]
    want = attention_and_gradients(*inputs, allowed)
    for layout, p in ((None, torch.arange(T)), (SequenceLayout.of([order]), order)):
        leaves = [x[:, p].clone().requires_grad_() for x in inputs[:3]]
        with ledger() as book:
            out = sequence_attention(*leaves, ctx=ctx, mask=masks.causal() & masks.padding(valid), layout=layout)
            out.backward(inputs[3][:, p])
        close(out, want[0][:, p])
        for x, g in zip(leaves, want[2:], strict=True):
            close(x.grad, g[:, p])
        assert not book.messages
    far(out, want[0])
