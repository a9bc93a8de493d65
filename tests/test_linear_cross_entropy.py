"""linear_cross_entropy: loss and gradients of an undivided head and torch's cross entropy, without ever making the logits."""

import copy

import pytest
import torch
from helpers import close, far, seeded
from oracle import token_losses
from pool import ranks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tpattn import (
    ColumnParallelLinear,
    ParallelContext,
    SequenceLayout,
    TpattnError,
    Transformer,
    Unsupported,
    VocabParallelEmbedding,
    comm,
    finish_gradients,
    ledger,
    linear_cross_entropy,
    token_mean,
    vocab_parallel_cross_entropy,
)
from tpattn.layout import chunk_sizes
from tpattn.params import sharded_parameters, to_local, whole

V, M, F64 = 29, 6, torch.float64


def own(x, ctx):
    """This tp rank's rows of a weight, or its entries of a bias."""
    return x.split(chunk_sizes(x.shape[0], ctx.tp.size))[ctx.tp.rank].clone()


def problem(B=3, T=5):
    """x [B, T, M], weight [V, M], bias [V], targets with ignored ones and a sequence of nothing else, token weights."""
    x, weight, bias = seeded(B, T, M, seed=0), seeded(V, M, seed=1), seeded(V, seed=2)
    target = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(3))
    target[0, 1:3] = target[-1] = -100
    target[1, 0], target[1, 1] = 0, V - 1
    return x, weight, bias, target, seeded(B, T, seed=4).abs()


def serial(x, matrix, bias, target, scale=1.0, **options):
    """[sum of the losses, and scale times the gradients of x, matrix and bias] by torch on one process."""
    leaves = [None if p is None else p.detach().clone().requires_grad_() for p in (x, matrix, bias)]
    loss = token_losses(F.linear(*leaves), target, **options).sum()
    grads = torch.autograd.grad(scale * loss, [p for p in leaves if p is not None])
    return [loss.detach(), *grads]


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("chunk", [None, 1, 4, 15, 99])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradients_equal_torchs(rank, world, smoothing, chunk):
    """29 words over up to 4 ranks, 15 tokens in chunks of 4: loss and gradients of x, weight and bias; scaled upstream."""
    x, weight, bias, target, factors = problem()
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        for z_loss, factor, with_bias in ((0.0, None, False), (0.01, factors, False), (0.01, factors, True)):
            mine = [x.clone().requires_grad_(), own(weight, ctx).requires_grad_()]
            mine += [own(bias, ctx).requires_grad_()] if with_bias else []
            loss = linear_cross_entropy(
                mine[0], mine[1], target, ctx=ctx, vocab_size=V, bias=mine[2] if with_bias else None, label_smoothing=smoothing,
                z_loss=z_loss, token_weight=factor, chunk=chunk)
            (0.37 * loss).backward()
            want = serial(
                x, weight, bias if with_bias else None, target, 0.37, smoothing=smoothing, z_loss=z_loss, weight=factor)
            close(loss, want[0], 1e-12)
            close(mine[0].grad, want[1], 1e-12)
            for p, grad in zip(mine[1:], want[2:], strict=True):
                close(p.grad, own(grad, ctx), 1e-12)
            assert (mine[0].grad[2] == 0).all() and mine[0].grad.dtype == F64
    far(want[1], want[1] / 0.37)        # the upstream gradient forgotten


@ranks(2, 3)
def test_the_gradient_of_x_is_summed_over_tp_exactly_once(rank, world):
    """What this rank's own columns give is not the gradient, and neither is the sum of all ranks' sums."""
    x, weight, _, target, _ = problem()
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        mine = x.clone().requires_grad_()
        linear_cross_entropy(mine, own(weight, ctx), target, ctx=ctx, vocab_size=V).backward()
        want = serial(x, weight, None, target)[1]
        close(mine.grad, want, 1e-12)
        p = torch.softmax(F.linear(x, weight), -1) - F.one_hot(target.clamp(min=0), V)
        part = own((p * (target != -100)[..., None]).movedim(-1, 0), ctx).movedim(0, -1) @ own(weight, ctx)
        far(part, want)
        close(comm.all_reduce(part, ctx.tp), want, 1e-12)
        far(comm.all_reduce(mine.grad, ctx.tp), want)


@ranks(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("empty", [False, True])
def test_a_head_on_cp_2_x_tp_2_equals_one_process(rank, world, sequence_parallel, empty):
    """A ColumnParallelLinear's weight and bias; each cp rank has other tokens (or none); token shards over tp."""
    x, _, _, target, _ = problem(2, 9)
    layout = SequenceLayout.of([range(9), range(0)] if empty else [range(7), range(7, 9)])
    twin = None
    with ParallelContext.from_env(cp=2, tp=2, timeout=60) as ctx:
        heads = []
        for place in (ctx, ParallelContext.single()):
            torch.manual_seed(0)
            heads.append(ColumnParallelLinear(M, V, ctx=place, dtype=F64))
        head, twin = heads
        share, labels = ctx.cp.shard(x, layout), ctx.cp.shard(target, layout)
        t = share.shape[1]
        for sizes in (None, [t // 3, t - t // 3]) if sequence_parallel else (None,):
            rows = SequenceLayout.contiguous(t, 2).sizes if sizes is None else sizes
            mine = share.split(rows, dim=1)[ctx.tp.rank] if sequence_parallel else share
            mine = mine.clone().requires_grad_()
            loss = linear_cross_entropy(
                mine, head.weight, labels, ctx=ctx, vocab_size=V, bias=head.bias, chunk=5, sequence_parallel=sequence_parallel,
                token_sizes=sizes)
            mean = token_mean(loss, (labels != -100).sum(), ctx=ctx)
            mean.backward()
            if not empty:
                far(whole(to_local(head.bias.grad), head.specs["bias"], ctx.tp), torch.zeros(V, dtype=F64))
            part = to_local(head.weight.grad).clone()
            finish_gradients(head)
            n = int((target != -100).sum())
            want = serial(x, twin.weight, twin.bias, target, 1.0 / n)
            close(mean, want[0] / n, 1e-12)
            wanted = want[1][:, layout.positions(ctx.cp.rank)]
            close(mine.grad, wanted.split(rows, dim=1)[ctx.tp.rank] if sequence_parallel else wanted, 1e-12)
            for name, module, key, spec in sharded_parameters(head):
                close(whole(to_local(module.get_parameter(key).grad), spec, ctx.tp), want[{"weight": 2, "bias": 3}[name]], 1e-12)
            if not empty:
                far(part, to_local(head.weight.grad))       # one cp rank's tokens are not all
            head.zero_grad(set_to_none=True)


@ranks(1, 2, 3)
def test_tied_weights_and_accumulation(rank, world):
    """One table as embedding and head: its gradient is the sum of both uses, over two backward passes; hooks see it."""
    ids = torch.randint(0, V, (2, 7), generator=torch.Generator().manual_seed(0))
    target = ids.roll(-1, 1)
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        torch.manual_seed(0)
        embedding = VocabParallelEmbedding(V, M, ctx=ctx, dtype=F64)
        seen = []
        embedding.weight.register_post_accumulate_grad_hook(lambda p: seen.append(to_local(p.grad).clone()))
        ((_, _, _, spec),) = sharded_parameters(embedding)
        table = whole(to_local(embedding.weight.detach()), spec, ctx.tp).requires_grad_()
        for scale in (1.0, 0.25):
            (scale * linear_cross_entropy(embedding(ids), embedding.weight, target, ctx=ctx, vocab_size=V, chunk=3)).backward()
            (scale * token_losses(F.linear(F.embedding(ids, table), table), target).sum()).backward()
        assert len(seen) == 2
        finish_gradients(embedding)
        close(whole(to_local(embedding.weight.grad), spec, ctx.tp), table.grad, 1e-12)
        far(whole(seen[0], spec, ctx.tp), table.grad)


class Products(TorchDispatchMode):
    """Bytes of the largest tensor that an operator returns, and how many operators are matrix products."""

    def __init__(self):
        super().__init__()
        self.largest, self.count = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.count += "mm" in function.__name__
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return out


@ranks(1, 2)
def test_only_wanted_gradients_are_formed(rank, world):
    """Products per chunk: 3 for both gradients, 2 for one, 1 without; no gradient of x and nobody sums it."""
    x, weight, _, target, _ = problem()
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        want = serial(x, weight, None, target)
        for x_grad, weight_grad, on in ((True, True, True), (True, False, True), (False, True, True), (False, False, True),
                                        (True, True, False)):
            mine, share = x.clone().requires_grad_(x_grad), own(weight, ctx).requires_grad_(weight_grad)
            with torch.set_grad_enabled(on), Products() as products, ledger() as book:
                loss = linear_cross_entropy(mine, share, target, ctx=ctx, vocab_size=V, chunk=5)
            assert products.count == 3 * (1 + (x_grad + weight_grad) * on)
            close(loss, want[0], 1e-12)
            assert loss.requires_grad == (on and (x_grad or weight_grad))
            if loss.requires_grad:
                with ledger() as back:
                    loss.backward()
                assert len(back.messages) == (x_grad and world > 1)
            assert len(book.messages) == 3 * (world > 1)
            for p, grad in ((mine, want[1]), (share, own(want[2], ctx))):
                if p.requires_grad and on:
                    close(p.grad, grad, 1e-12)
                else:
                    assert p.grad is None


@ranks(1, 2, 3)
def test_no_tensor_is_larger_than_a_chunk_of_logits(rank, world):
    """T = 96, chunks of 8: of 8 x v numbers at most, more than x or the gradients. Unfused makes 96 x v, 12 times that."""
    T, vocabulary, M = 96, 150, 4
    x, weight = seeded(1, T, M, seed=0), seeded(vocabulary, M, seed=1)
    target = torch.randint(0, vocabulary, (1, T), generator=torch.Generator().manual_seed(3))
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        for dtype, wide in ((F64, 8), (torch.bfloat16, 4)):
            mine, share = (p.to(dtype, copy=True).requires_grad_() for p in (x, own(weight, ctx)))
            v = share.shape[0]
            assert 8 * v >= max(T * M, v * M)
            with Products() as products:
                linear_cross_entropy(mine, share, target, ctx=ctx, vocab_size=vocabulary, chunk=8, label_smoothing=0.1).backward()
            assert products.largest <= 8 * v * wide
            with Products() as products:
                logits = F.linear(comm.replicate(mine, ctx.tp), share)
                vocab_parallel_cross_entropy(logits, target, ctx=ctx, vocab_size=vocabulary).backward()
            assert products.largest == T * v * wide


def test_the_default_chunk_keeps_an_eighth_of_unfused():
    """Without tp, V = 4000, T = 2048: the logits would be 32 MB in float32; no tensor has more than an eighth of that."""
    ctx, T, vocabulary = ParallelContext.single(), 2048, 4000
    x, weight = seeded(T, 8, seed=0).float().requires_grad_(), seeded(vocabulary, 8, seed=1).float().requires_grad_()
    with Products() as products:
        linear_cross_entropy(x, weight, torch.zeros(T, dtype=torch.int64), ctx=ctx, vocab_size=vocabulary).backward()
    assert products.largest <= 4 * T * vocabulary / 8


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bytes_are_those_of_the_docstring(rank, world, sequence_parallel):
    """Forward: (N - 1) x 2 numbers per token, 3 with smoothing, in one message per chunk; backward: the gradient of x."""
    x, weight, _, target, _ = problem(2, 8)
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        for dtype, wide in ((torch.float32, 4), (F64, 8)):
            for smoothing in (0.0, 0.1):
                rows = SequenceLayout.contiguous(8, world).sizes
                share = x.split(rows, dim=1)[rank] if sequence_parallel else x
                mine, mine_weight = (p.to(dtype).clone().requires_grad_() for p in (share, own(weight, ctx)))
                with ledger() as book:
                    linear_cross_entropy(
                        mine, mine_weight, target, ctx=ctx, vocab_size=V, label_smoothing=smoothing, chunk=6,
                        sequence_parallel=sequence_parallel, token_sizes=rows if sequence_parallel else None).backward()
                others, item = world - 1, dtype.itemsize
                forward = others * 16 * (3 if smoothing else 2) * wide
                backward = 2 * others * 16 * M * item // world
                if sequence_parallel:
                    forward += (x.numel() - share.numel()) * item
                    backward = others * share.numel() * item
                assert book.bytes(axis="tp", direction="forward") == forward
                assert book.bytes(axis="tp", direction="backward") == backward
                assert book.bytes() == forward + backward
                assert len(book.messages) == ((3 + 1) + sequence_parallel) * (world > 1)


@ranks(1, 2, 3)
def test_extreme_and_hidden_logits(rank, world):
    """Logits of 1e4 in float32; words that a bias of -inf hides, all of one rank's among them: finite, and torch's numbers."""
    x, weight, bias, target, _ = problem()
    bias[1:4] = -torch.inf
    if world > 1:
        bias[-chunk_sizes(V, world)[-1] :] = -torch.inf
    target[(target >= 1) & ((target < 4) | bias[target.clamp(min=0)].isinf())] = 0
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        for scale, hidden, dtype, tol in ((1e4, None, torch.float32, 1e-5), (1e4, None, F64, 1e-12), (1.0, bias, F64, 1e-12)):
            mine, share = (scale * x).to(dtype).requires_grad_(), own(weight.to(dtype), ctx).requires_grad_()
            mine_bias = None if hidden is None else own(hidden, ctx)
            loss = linear_cross_entropy(mine, share, target, ctx=ctx, vocab_size=V, bias=mine_bias, chunk=4)
            loss.backward()
            want = serial(mine.detach().double(), weight.to(dtype).double(), hidden, target)
            close(loss, want[0], tol)
            close(mine.grad, want[1], tol)
            close(share.grad, own(want[2], ctx), tol)


@ranks(1, 2, 3)
def test_nothing_counts(rank, world):
    """All tokens ignored, weights of 0, no tokens at all: a loss and gradients of 0, which exist."""
    x, weight, _, target, _ = problem()
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        for n, changes in ((5, {"target": torch.full_like(target, -100)}), (5, {"token_weight": torch.zeros(3, 5)}), (0, {})):
            given = {"target": target, **changes}
            mine, share = x[:, :n].clone().requires_grad_(), own(weight, ctx).requires_grad_()
            loss = linear_cross_entropy(mine, share, given.pop("target")[:, :n], ctx=ctx, vocab_size=V, z_loss=0.1, **given)
            loss.backward()
            assert loss.item() == 0.0 and loss.shape == ()
            assert mine.grad.shape == (3, n, M) and share.grad.shape == share.shape
            assert not mine.grad.any() and not share.grad.any()


@ranks(1, 2)
def test_strided_x_and_weight_are_taken(rank, world):
    x, weight, _, target, _ = problem()
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        leaves = seeded(M, 5, 3, seed=5).requires_grad_(), own(weight, ctx).t().contiguous().requires_grad_()
        linear_cross_entropy(leaves[0].permute(2, 1, 0), leaves[1].t(), target, ctx=ctx, vocab_size=V, chunk=4).backward()
        want = serial(leaves[0].permute(2, 1, 0), weight, None, target)
        close(leaves[0].grad.permute(2, 1, 0), want[1], 1e-12)
        close(leaves[1].grad.t(), own(want[2], ctx), 1e-12)


@ranks(1, 2)
@pytest.mark.parametrize("master", [torch.bfloat16, torch.float32])
def test_bfloat16_errs_no_more_than_unfused(rank, world, master):
    """Against float32: loss and gradients of x and of a bfloat16 weight (or of the float32 one behind it), root mean square."""
    T, vocabulary, width = 192, 301, 48
    x, weight = seeded(T, width, seed=0).bfloat16(), (0.3 * seeded(vocabulary, width, seed=1)).bfloat16()
    target = torch.randint(0, vocabulary, (T,), generator=torch.Generator().manual_seed(2))
    want = serial(x.float(), weight.float(), None, target)
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        errors = []
        for fused in (False, True):
            mine, share = x.clone().requires_grad_(), own(weight.to(master), ctx).requires_grad_()
            if fused:
                loss = linear_cross_entropy(mine, share, target, ctx=ctx, vocab_size=vocabulary, chunk=32)
            else:
                logits = F.linear(comm.replicate(mine, ctx.tp), share.bfloat16())
                loss = vocab_parallel_cross_entropy(logits, target, ctx=ctx, vocab_size=vocabulary)
            loss.backward()
            assert mine.grad.dtype == torch.bfloat16 and share.grad.dtype == master and loss.dtype == torch.float32
            got = loss.detach(), mine.grad, share.grad
            wanted = want[0], want[1], own(want[2], ctx)
            errors.append([(a.double() - b.double()).pow(2).mean().sqrt().item() for a, b in zip(got, wanted, strict=True)])
        rounded_twice = 1.4 if master == torch.bfloat16 else 1.05       # its gradient: in each chunk, and at last
        for unfused, fused, limit in zip(*errors, (1.0, 1.05, rounded_twice), strict=True):
            assert 0 < fused <= limit * unfused, errors


@ranks(2)
def test_losses_without_gradient_and_what_is_refused(rank, world):
    """reduction="none" where no gradient is needed; refusals are those of vocab_parallel_cross_entropy, and send nothing."""
    x, weight, _, target, _ = problem()
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        share = own(weight, ctx)
        v = share.shape[0]
        losses = linear_cross_entropy(x, share, target, ctx=ctx, vocab_size=V, reduction="none", label_smoothing=0.1, chunk=4)
        close(losses, token_losses(F.linear(x, weight), target, 0.1), 1e-12)
        with ledger() as book:
            for changes, words in (
                ({"weight": weight}, ["vocab_size=29", f"[{v}, 6]", "[29, 6]"]), ({"target": target[:2]}, ["[2, 5]"]),
                ({"x": x[..., :4]}, [f"[{v}, 6]", "[3, 5, 4]"]), ({"x": x.long()}, ["int64"]),
                ({"weight": share.long()}, ["int64"]),
                ({"target": torch.full((3, 5), V)}, ["29", "vocabulary"]), ({"target": torch.zeros(3, 5)}, ["float32"]),
                ({"reduction": "mean"}, ["'mean'", "token_mean"]), ({"label_smoothing": 1.5}, ["1.5"]),
                ({"z_loss": -1.0}, ["-1.0"]),
                ({"x": x.clone().requires_grad_(), "reduction": "none"}, ["token_weight", "no_grad"]),
                ({"weight": share.clone().requires_grad_(), "reduction": "none"}, ["token_weight", "no_grad"]),
                ({"token_weight": torch.ones(3)}, ["[3, 5]", "[3]"]), ({"vocab_size": 33}, ["vocab_size=33"]),
                ({"vocab_size": 1}, ["tp=2", "hold none"]), ({"bias": torch.ones(V)}, ["bias", f"[{v}]", "[29]"]),
                ({"chunk": 0}, ["chunk=0"]), ({"chunk": True}, ["chunk=True"]), ({"token_sizes": [2, 3]}, ["sequence_parallel"]),
                ({"sequence_parallel": True, "token_sizes": [3, 3]}, ["[3, 3]", "5"]),
                ({"sequence_parallel": True, "token_sizes": [5]}, ["[5]"]),
                ({"sequence_parallel": True, "x": x[0, 0], "target": target[0, 0]}, ["[.., tokens, width]"]),
            ):
                given = {"x": x, "weight": share, "target": target, "vocab_size": V, **changes}
                with pytest.raises(Unsupported) as error:
                    linear_cross_entropy(given.pop("x"), given.pop("weight"), given.pop("target"), ctx=ctx, **given)
                assert all(word in str(error.value) for word in words), str(error.value)
            assert not book.messages


def test_a_second_backward_is_refused():
    """The gradients were made once, in forward, and are given away by the first backward."""
    x, weight, _, target, _ = problem()
    loss = linear_cross_entropy(x.requires_grad_(), weight, target, ctx=ParallelContext.single(), vocab_size=V)
    loss.backward(retain_graph=True)
    with pytest.raises(TpattnError, match="once"):
        loss.backward()


@ranks(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_models_loss_is_that_of_its_logits(rank, world, sequence_parallel, tied):
    """Transformer.loss on cp 2 x tp 2: value and every gradient those of vocab_parallel_cross_entropy on model(tokens)."""
    g = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, V, (2, 9), generator=g), torch.randint(0, V, (2, 9), generator=g)
    targets[0, 3:] = -100
    with ParallelContext.from_env(cp=2, tp=2, timeout=60) as ctx:
        layout = SequenceLayout.zigzag(9, 2)
        tokens, targets = ctx.cp.shard(tokens, layout), ctx.cp.shard(targets, layout)
        options = {"sequence_parallel": sequence_parallel, "tied": tied, "dtype": F64, "seed": 3, "ffn": 21}
        model = Transformer(V, 24, 1, 4, ctx=ctx, **options)
        twin = copy.deepcopy(model)
        loss = model.loss(tokens, targets, layout=layout, z_loss=0.1, chunk=4)
        logits = twin(tokens, layout=layout)
        want = vocab_parallel_cross_entropy(logits, targets, ctx=ctx, vocab_size=V, z_loss=0.1)
        for total, m in ((loss, model), (want, twin)):
            token_mean(total, (targets != -100).sum(), ctx=ctx).backward()
            finish_gradients(m)
        close(loss, want, 1e-12)
        far(loss, vocab_parallel_cross_entropy(logits, targets, ctx=ctx, vocab_size=V))
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            close(to_local(mine.grad), to_local(theirs.grad))
