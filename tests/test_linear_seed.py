"""The second seed: every example of its file with its numbers, its functions with an explicit group, and what layers refuse."""

import pytest
import torch
import torch.distributed as dist
from helpers import close, far, seeded
from pool import ranks
from torch.nn.functional import gelu

from tpattn import (
    CollectiveMismatch,
    ColumnParallelLinear,
    ParallelContext,
    QKVParallelLinear,
    RowParallelLinear,
    Unsupported,
    column_linear,
    comm,
    ledger,
    row_linear,
    split_tensor,
)

X = torch.arange(4 * 2, dtype=torch.float32).reshape(4, 2)
W = torch.arange(1, 5, dtype=torch.float32).reshape(2, 2) * 10
W2 = torch.arange(1, 5, dtype=torch.float32).reshape(2, 2)


def reference(*weights):
    """x @ w.t() for each weight in turn by plain torch: (outputs of each, gradient of x, gradients of the weights) of the sum."""
    x, ws = X.clone().requires_grad_(), [w.clone().requires_grad_() for w in weights]
    outs = [x]
    for w in ws:
        outs.append(outs[-1] @ w.t())
    grads = torch.autograd.grad(outs[-1].sum(), [*outs[1:-1], x, *ws])
    return [y.detach() for y in outs[1:]], grads[: len(ws) - 1], grads[len(ws) - 1], grads[len(ws) :]


# ---- the examples ----------------------------------------------------------------------------------------------------------


@ranks(2)
def test_example_column_linear(rank, world):
    """example_column_linear of the seed: outputs are the columns of Y, the input gradient is summed, the weight's is the share.

    The numbers by hand: X = [[0, 1], [2, 3], [4, 5], [6, 7]], W = [[10, 20], [30, 40]], Y = [[20, 40], [80, 180], [140, 320],
    [200, 460]], dX = [40, 60] in each row, dW = [12, 16] in each row.
    """
    (want,), _, dx, (dw,) = reference(W)
    assert want.tolist() == [[20, 40], [80, 180], [140, 320], [200, 460]]
    assert dx.tolist() == [[40, 60]] * 4 and dw.tolist() == [[12, 16]] * 2
    x, w = X.clone().requires_grad_(), split_tensor(W, dim=0).requires_grad_()
    y = column_linear(x, w, dist.group.WORLD)
    close(y, split_tensor(want, dim=1), 0)
    y.sum().backward()
    close(x.grad, dx, 0)
    close(w.grad, split_tensor(dw, dim=0), 0)
    far(x.grad, W[rank].expand(4, 2))       # this rank's part, not yet summed


@ranks(2)
def test_example_row_linear(rank, world):
    """example_row_linear of the seed, whose 'single' variant takes the whole X and gathers its gradient.

    Different there: row_linear_backward_single is given the whole X and returns the *whole* weight gradient, which the example
    compares with W_ref.grad. Ours returns this rank's share, the columns of the weight that it holds; the seed's other variant,
    row_linear_backward, does too when it is given the local X.
    """
    (want,), _, dx, (dw,) = reference(W)
    x, w = X.clone().requires_grad_(), split_tensor(W, dim=1).requires_grad_()
    y = row_linear(x, w, dist.group.WORLD, input_is_parallel=False)
    close(y, want, 0)
    y.sum().backward()
    close(x.grad, dx, 0)
    close(w.grad, split_tensor(dw, dim=1), 0)
    assert w.grad.shape != dw.shape
    local, w = split_tensor(X, dim=1).requires_grad_(), split_tensor(W, dim=1).requires_grad_()
    with ledger() as book:
        y = row_linear(local, w, dist.group.WORLD)
        y.sum().backward()
    close(y, want, 0)
    close(local.grad, split_tensor(dx, dim=1), 0)
    close(w.grad, split_tensor(dw, dim=1), 0)
    assert [(m.operation, m.direction) for m in book.messages] == [("all_reduce", "forward")]


def test_example_gelu():
    """example_gelu of the seed: an elementwise activation commutes with the column split, and not with the row split.

    False there: the second half of the example asserts gelu(X0 W0) + gelu(X1 W1) = gelu(X0 W0 + X1 W1), which does not hold. So
    column -> gelu -> row needs no message between the two layers, and row -> gelu needs its sum first.
    """
    x, w = seeded(4, 2, seed=0), seeded(2, 2, seed=1)
    left, right = w.chunk(2, dim=1)
    close(torch.cat([gelu(x @ left), gelu(x @ right)], dim=1), gelu(torch.cat([x @ left, x @ right], dim=1)), 1e-14)
    (x0, x1), (w0, w1) = x.chunk(2, dim=1), w.chunk(2, dim=0)
    far(gelu(x0 @ w0) + gelu(x1 @ w1), gelu(x0 @ w0 + x1 @ w1))


@ranks(2)
def test_gelu_between_the_layers(rank, world):
    """The same argument on ranks: gelu on column shares is the share of gelu; before the row's sum it is something else."""
    x, w = seeded(5, 4, seed=0), seeded(6, 4, seed=1)
    whole = gelu(x @ w.t())
    close(gelu(column_linear(x, split_tensor(w, 0))), split_tensor(whole, 1))
    group = comm.group_of(None)
    close(gelu(row_linear(split_tensor(x, 1), split_tensor(w, 1))), whole)
    far(comm.reduce(gelu(split_tensor(x, 1) @ split_tensor(w, 1).t()), group), whole)


@ranks(2)
def test_example_column_row_linear(rank, world):
    """example_column_row_linear of the seed: two all-reduces, one forward and one backward; every gradient with its numbers."""
    (first, want), (dfirst,), dx, (dw, dw2) = reference(W, W2)
    assert want[0].tolist() == [100, 220] and dx.tolist() == [[10 * 4 + 30 * 6, 20 * 4 + 40 * 6]] * 4
    x = X.clone().requires_grad_()
    w, w2 = split_tensor(W, dim=0).requires_grad_(), split_tensor(W2, dim=1).requires_grad_()
    with ledger() as book:
        y = column_linear(x, w)
        y.retain_grad()
        out = row_linear(y, w2)
        out.sum().backward()
    close(y, split_tensor(first, dim=1), 0)
    close(out, want, 0)
    close(y.grad, split_tensor(dfirst, dim=1), 0)
    close(w2.grad, split_tensor(dw2, dim=1), 0)
    close(x.grad, dx, 0)
    close(w.grad, split_tensor(dw, dim=0), 0)
    assert [(m.operation, m.direction) for m in book.messages] == [("all_reduce", "forward"), ("all_reduce", "backward")]


# ---- the functions, with explicit groups -----------------------------------------------------------------------------------


@ranks(4)
def test_functions_in_sub_groups(rank, world):
    """Groups {0, 2} and {1, 3}: each with its own data, while the default group is larger; random values, odd sizes."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, group = rank // 2, groups[rank % 2]
    x, w, g = seeded(3, 5, seed=rank % 2), seeded(7, 5, seed=10 + rank % 2), seeded(3, 7, seed=20 + rank % 2)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    want = leaves[0] @ leaves[1].t()
    dx, dw = torch.autograd.grad(want, leaves, g)
    sizes = {0: [4, 3], 1: [3, 2]}      # of 7 rows and of 5 columns over two ranks

    def part(y, dim, n):
        return y.split(sizes[0] if n == 7 else sizes[1], dim)[mine]

    a, b = x.clone().requires_grad_(), split_tensor(w, 0, group).requires_grad_()
    close(b, part(w, 0, 7), 0)
    y = column_linear(a, b, group)
    y.backward(part(g, 1, 7))
    close([y, a.grad, b.grad], [part(want, 1, 7), dx, part(dw, 0, 7)])
    for whole_input in (False, True):
        a = (x if whole_input else split_tensor(x, 1, group)).clone().requires_grad_()
        b = split_tensor(w, 1, group).requires_grad_()
        y = row_linear(a, b, group, input_is_parallel=not whole_input)
        y.backward(g)
        close([y, a.grad, b.grad], [want, dx if whole_input else part(dx, 1, 5), part(dw, 1, 5)])
    for made in groups:
        if made != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(made)


@ranks(3)
def test_split_tensor_cuts_as_torch_chunk_and_copies(rank, world):
    """Contiguous, from the front or the end, a copy; sizes that would leave a rank without a piece are refused by number."""
    x = torch.arange(14).view(2, 7)
    for dim in (1, -1):
        piece = split_tensor(x, dim)
        assert torch.equal(piece, x.chunk(3, 1)[rank]) and piece.is_contiguous()
    for size in (4, 1, 2):      # 4 over 3 is 2, 2, 0
        with pytest.raises(Unsupported, match=f"{size} along dim=0 over 3 ranks"):
            split_tensor(torch.ones(size), 0)
    with pytest.raises(Unsupported, match="dim=2"):
        split_tensor(x, 2)


def test_functions_on_one_process():
    """Without a group the functions are plain products."""
    (want,), _, dx, (dw,) = reference(W)
    for call in (column_linear, row_linear, lambda x, w: row_linear(x, w, input_is_parallel=False)):
        x, w = X.clone().requires_grad_(), split_tensor(W, 0).requires_grad_()
        y = call(x, w)
        y.sum().backward()
        close([y, x.grad, w.grad], [want, dx, dw], 0)


# ---- what layers refuse ----------------------------------------------------------------------------------------------------

SIZES = {
    "3 on 4": (lambda c: ColumnParallelLinear(4, 3, ctx=c), ["ColumnParallelLinear", "3", "tp=4", "[1, 1, 1, 0]"]),
    "5 on 4": (lambda c: ColumnParallelLinear(4, 5, ctx=c), ["ColumnParallelLinear", "5", "tp=4", "[2, 2, 1, 0]", "1, 2, 3"]),
    "6 on 4": (lambda c: RowParallelLinear(6, 4, ctx=c), ["RowParallelLinear", "6", "tp=4", "[2, 2, 2, 0]", "7"]),
    "H=5": (lambda c: QKVParallelLinear(15, 5, ctx=c), ["QKVParallelLinear", "5 query heads", "tp=4", "[2, 2, 1, 0]", "1, 2, 3"]),
    "K=1": (lambda c: QKVParallelLinear(6, 3, 1, ctx=c), ["3 query heads", "1 key-value heads", "tp=4", "1, 2, 3"]),
    "chunks": (lambda c: ColumnParallelLinear(4, 4, ctx=c, chunks=0), ["chunks=0", "positive integer", "auto"]),
    "chunks word": (lambda c: RowParallelLinear(4, 4, ctx=c, chunks="many"), ["chunks='many'"]),
    "K not in H": (lambda c: QKVParallelLinear(16, 8, 3, ctx=c), ["num_kv_heads=3", "num_heads=8"]),
    "head_dim": (lambda c: QKVParallelLinear(18, 4, ctx=c), ["hidden=18", "num_heads=4", "head_dim="]),
    "zero": (lambda c: ColumnParallelLinear(0, 4, ctx=c), ["in_features=0"]),
    "float": (lambda c: ColumnParallelLinear(4, 4.0, ctx=c), ["out_features=4.0"]),
    "bool": (lambda c: RowParallelLinear(4, True, ctx=c), ["out_features=True"]),
    "row float": (lambda c: RowParallelLinear(4.0, 4, ctx=c), ["in_features=4.0"]),
    "row word": (lambda c: RowParallelLinear("ab", 4, ctx=c), ["in_features='"]),
    "init": (lambda c: ColumnParallelLinear(4, 4, ctx=c, init="xaver"), ["init='xaver'", "xavier, kaiming, normal"]),
}


@ranks(4)
def test_sizes_that_do_not_divide_are_refused_in_the_constructor(rank, world):
    """C26, C34: the layer, the size and tp in one ValueError on every rank, before anything is sent, with sizes that work."""
    with ParallelContext.from_env(tp=4, timeout=60) as ctx, ledger() as book:
        for name, (make, words) in SIZES.items():
            with pytest.raises(Unsupported) as error:
                make(ctx)
            assert all(word in str(error.value) for word in words), f"{name}: {error.value}"
        assert not book.messages
        with pytest.raises(TypeError, match="ctx"):
            ColumnParallelLinear(4, 4, ctx=None)


@ranks(2)
def test_inputs_that_do_not_fit_are_refused(rank, world):
    """The last dimension is checked against the layer, with its name; a token shard needs a dimension of tokens."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        column, row = ColumnParallelLinear(6, 4, ctx=ctx), RowParallelLinear(6, 4, ctx=ctx)
        whole_row = RowParallelLinear(6, 4, ctx=ctx, input_is_parallel=False)
        tokens = [make(6, 4, ctx=ctx, sequence_parallel=True) for make in (ColumnParallelLinear, RowParallelLinear)]
        calls = [(lambda: column(torch.ones(2, 3)), ["ColumnParallelLinear", "[.., 6]", "[2, 3]"]),
                 (lambda: row(torch.ones(2, 6)), ["RowParallelLinear", "[.., 3]", "[2, 6]"]),
                 (lambda: whole_row(torch.ones(2, 3)), ["RowParallelLinear", "[.., 6]"]),
                 (lambda: column(torch.ones(())), ["ColumnParallelLinear"]),
                 (lambda: tokens[0](torch.ones(6)), ["[6]", "tokens"]),
                 (lambda: tokens[1](torch.ones(3)), ["[3]", "tokens"]),
                 (lambda: tokens[0](torch.ones(1, 2, 6), [3, 1]), ["2", "[3, 1]"])]
        with ledger() as book:
            for call, words in calls:
                with pytest.raises(Unsupported) as error:
                    call()
                assert all(word in str(error.value) for word in words), str(error.value)
        assert not book.messages


@ranks(2)
def test_ranks_that_draw_different_seeds_are_told(rank, world):
    """Initial values need the same torch seed on all ranks: the constructor compares one number and names both."""
    torch.manual_seed(rank)
    with ParallelContext.from_env(tp=2, timeout=60) as ctx, pytest.raises(CollectiveMismatch, match="torch.manual_seed"):
        ColumnParallelLinear(4, 4, ctx=ctx)
