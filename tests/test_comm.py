"""Each pair of a collective and its gradient equals its one-process emulation, for any shares, strides and sub-group."""

import time

import pytest
import torch
import torch.distributed as dist
from helpers import close, far, seeded
from pool import ranks

from tpattn import ParallelContext, Unsupported, comm, ledger

STRIDES = ["plain", "transposed", "sliced", "expanded", "offset"]


def with_size(dim, size):
    shape = [3, 5, 4]
    shape[dim] = size
    return shape


def restride(x, kind):
    """The same values with other strides."""
    if kind == "transposed":
        return x.transpose(0, 2).contiguous().transpose(0, 2)
    if kind == "sliced":
        return torch.stack([x, torch.full_like(x, 77)], dim=-1)[..., 0]
    if kind == "offset":
        return torch.cat([torch.full_like(x[:1], 77), x])[1:]
    return x[..., :1].expand(x.shape) if kind == "expanded" else x


def values(shape, seed, kind, dtype=torch.float64):
    """Random numbers; constant along the last dimension where they are to be expanded."""
    x = seeded(*shape, seed=seed, dtype=dtype)
    return x[..., :1].expand(shape).contiguous() if kind == "expanded" and 0 not in shape else x


def total(xs):
    return torch.stack(xs).sum(0)


# name -> (call, is the input a share, is the output a share, (outputs, gradients) of all ranks from all inputs and upstreams,
# (operation, direction) of what is sent). `own(x, r)` is rank r's piece of a whole.
def pairs(own, n, dim):
    ranks_ = range(n)
    return {
        "replicate": (lambda x, g, d, s: comm.replicate(x, g), False, False,
                      lambda xs, gs: (xs, [total(gs)] * n), [("all_reduce", "backward")]),
        "reduce": (lambda x, g, d, s: comm.reduce(x, g), False, False,
                   lambda xs, gs: ([total(xs)] * n, gs), [("all_reduce", "forward")]),
        "gather": (comm.gather, True, False,
                   lambda xs, gs: ([torch.cat(xs, dim)] * n, [own(gs[r], r) for r in ranks_]), [("all_gather", "forward")]),
        "gather_sum": (comm.gather_sum, True, False,
                       lambda xs, gs: ([torch.cat(xs, dim)] * n, [own(total(gs), r) for r in ranks_]),
                       [("all_gather", "forward"), ("reduce_scatter", "backward")]),
        "scatter_sum": (comm.scatter_sum, False, True,
                        lambda xs, gs: ([own(total(xs), r) for r in ranks_], [torch.cat(gs, dim)] * n),
                        [("reduce_scatter", "forward"), ("all_gather", "backward")]),
        "shard": (comm.shard, False, True,
                  lambda xs, gs: ([own(xs[r], r) for r in ranks_], [torch.cat(gs, dim)] * n), [("all_gather", "backward")]),
        "own_piece": (comm.own_piece, False, True,
                      lambda xs, gs: ([own(xs[r], r) for r in ranks_], [padded(gs, r, dim) for r in ranks_]), []),
    }


def padded(gs, r, dim):
    return torch.cat([g if s == r else torch.zeros_like(g) for s, g in enumerate(gs)], dim)


def received(operation, out_bytes, in_bytes, n, own_bytes):
    """Bytes as DESIGN section 3 defines them, from those of the whole and of the own share."""
    whole = max(out_bytes, in_bytes)
    parts = (n - 1) * own_bytes     # of a reduce-scatter; for even shares also whole - share
    return {"all_reduce": 2 * (n - 1) * whole // n, "all_gather": whole - own_bytes, "reduce_scatter": parts}[operation]


def check_pair(name, axis, dim, sizes, kind):
    """One pair on one group: output, gradient, untouched inputs, and the messages that were sent."""
    n, me, seed = axis.size, axis.rank, 1000 * min(axis.ranks)      # each group has data of its own
    call, in_share, out_share, emulate, sent = pairs(lambda x, r: x.split(sizes, dim)[r], n, dim)[name]
    shapes = [[with_size(dim, sizes[r] if share else sum(sizes)) for r in range(n)] for share in (in_share, out_share)]
    xs = [values(shape, seed + r, kind) for r, shape in enumerate(shapes[0])]
    gs = [values(shape, seed + 50 + r, kind) for r, shape in enumerate(shapes[1])]
    outs, grads = emulate(xs, gs)
    x, g = restride(xs[me], kind).detach().requires_grad_(), restride(gs[me], kind)
    with ledger() as book:
        out = call(x, axis, dim, sizes)
        assert out.requires_grad
        out.backward(g)
    close(out, outs[me])
    close(x.grad, grads[me])
    assert torch.equal(x.detach(), xs[me]) and torch.equal(g, gs[me]), "an input was modified"
    own_bytes = 8 * torch.Size(with_size(dim, sizes[me])).numel()
    want = [(op, direction, received(op, out.numel() * 8, x.numel() * 8, n, own_bytes)) for op, direction in sent]
    assert [(m.operation, m.direction, m.bytes) for m in book.messages] == want
    assert all(m.axis == axis.name and m.site.startswith("test_comm.py:") for m in book.messages), book.messages
    if kind == "plain" and all(sizes):      # the likely mistakes: a sum left out, or one too many
        if name in ("replicate", "gather_sum"):
            far(x.grad, g if name == "replicate" else g.split(sizes, dim)[me])
        if name == "scatter_sum":
            far(out, x.detach().split(sizes, dim)[me])
        if name in ("reduce", "gather"):
            far(x.grad, total(gs) if name == "reduce" else total(gs).split(sizes, dim)[me])


def check_all(axis):
    n = axis.size
    for sizes in ([2] * n, [3, 1, 4, 2][:n], [0, 3, 0, 2][:n], [5] + [0] * (n - 1)):
        for dim, kind in [(0, "plain"), (2, "transposed"), *((1, kind) for kind in STRIDES)]:
            for name in pairs(None, n, dim):
                try:
                    check_pair(name, axis, dim, sizes, kind)
                except AssertionError as error:
                    raise AssertionError(f"{name}, {sizes} along {dim}, {kind}: {error}") from None


@ranks(2, 3, 4)
def test_every_pair_equals_its_emulation(rank, world):
    """C06: even and uneven shares, some of them 0, along every dimension, with every kind of strides; other g on each rank."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        check_all(ctx.cp)


@ranks(4)
@pytest.mark.parametrize("sizes", [{"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}])
def test_every_pair_on_two_groups_at_once(rank, world, sizes):
    """C48: cp groups {0,2} and {1,3}, then {0,1} and {2,3}, each with its own data."""
    with ParallelContext.from_env(**{"dp": 1, **sizes}, timeout=60) as ctx:
        check_all(ctx.cp)


@ranks(2, 3)
def test_sizes_may_be_left_out(rank, world):
    """Shares agree on their lengths by one small all-gather; wholes are cut as evenly as can be; dim may count from the end."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        share = seeded(2, rank + 1, 3, seed=rank)
        with ledger() as book:
            whole = comm.gather(share, ctx.cp, -2)
        close(whole, torch.cat([seeded(2, r + 1, 3, seed=r) for r in range(world)], 1), 0)
        assert [m.operation for m in book.messages] == ["all_gather", "all_gather"] and book.messages[0].bytes == 8 * (world - 1)
        x = seeded(7, 2, seed=1)
        close(comm.shard(x, ctx.cp, 0), x.tensor_split(world)[rank], 0)
        close(comm.scatter_sum(x, ctx.cp, -2), world * x.tensor_split(world)[rank])


# ---- exchange and shift ----------------------------------------------------------------------------------------------------


@ranks(2, 3, 4)
@pytest.mark.parametrize(("tokens", "heads"), [
    ([2, 2, 2, 2], [3, 3, 3, 3]), ([4, 1, 3, 2], [1, 2, 3, 1]), ([3, 0, 2, 1], [2, 1, 0, 1])])
def test_swap_shards_exchanges_tokens_for_heads(rank, world, tokens, heads):
    """q_BtHD -> q_BThD is what Ulysses does; the gradient goes back the same way; bytes are exact."""
    t, h = tokens[:world], heads[:world]
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        whole, g = seeded(3, sum(t), sum(h), 2, seed=0), seeded(3, sum(t), sum(h), 2, seed=1)
        for kind in ("plain", "transposed"):
            x = restride(whole.split(t, 1)[rank], kind).detach().requires_grad_()
            with ledger() as book:
                out = comm.swap_shards(x, ctx.cp, split=2, join=1, split_sizes=h, join_sizes=t)
                out.backward(restride(g.split(h, 2)[rank], kind))
            close(out, whole.split(h, 2)[rank], 0)
            close(x.grad, g.split(t, 1)[rank], 0)
            own, each = t[rank] * h[rank], 3 * 2 * 8
            assert [m.bytes for m in book.messages] == [each * (sum(t) * h[rank] - own), each * (t[rank] * sum(h) - own)]
            assert [m.operation for m in book.messages] == ["exchange", "exchange"]


@ranks(2, 3, 4)
@pytest.mark.parametrize("by", [1, 2, -1, 5])
@pytest.mark.parametrize("size", [1, 16 << 10, 4 << 20], ids=["4B", "64KiB", "16MiB"])
def test_shift_of_any_size_and_step(rank, world, by, size):
    """C49: no message is too large for a ring in which all send at once; odd N; gradient shifted back; bytes counted."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        x = torch.full((size,), float(rank), requires_grad=True)
        with ledger() as book:
            out = comm.shift(x, ctx.cp, by)
            (out * (rank + 1)).sum().backward()
        assert torch.equal(out.detach(), torch.full((size,), float((rank - by) % world)))
        assert torch.equal(x.grad, torch.full((size,), (rank + by) % world + 1.0))
        moves = by % world != 0
        assert [(m.operation, m.bytes, m.direction) for m in book.messages] == [
            ("shift", 4 * size, "forward"), ("shift", 4 * size, "backward")] * moves


@ranks(4)
def test_shift_in_sub_groups(rank, world):
    """C48: neighbours are ranks of the group, not of the world: rings {0,2} and {1,3}, then {0,1} and {2,3}."""
    for sizes in ({"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}):
        with ParallelContext.from_env(**{"dp": 1, **sizes}, timeout=60) as ctx:
            peer = ctx.cp.ranks[1 - ctx.cp.rank]
            assert comm.shift(torch.tensor([rank]), ctx.cp).item() == peer


@ranks(3)
def test_shift_of_uneven_and_strided_tensors(rank, world):
    """Each rank sends another length, transposed, one of them empty; the gradient has the shape of what was sent."""
    with ParallelContext.from_env(cp=3, timeout=60) as ctx:
        lengths = [4, 0, 2]
        x = seeded(3, lengths[rank], seed=rank).t().requires_grad_()
        source, to = (rank - 1) % 3, (rank + 1) % 3
        out = comm.shift(x, ctx.cp, 1, shape=(lengths[source], 3))
        close(out, seeded(3, lengths[source], seed=source).t(), 0)
        out.backward(torch.full_like(out, 1.0 + rank).t().contiguous().t())
        close(x.grad, torch.full_like(x, 1.0 + to), 0)


DTYPES = [torch.uint8, torch.float64, torch.bool, torch.bfloat16, torch.complex64, torch.int32, torch.float16, torch.int64]


def pieces(sender, receiver):
    """What one rank sends another: another number of tensors, of other shapes and dtypes, for each pair."""
    if receiver == sender:
        return []
    some = []
    for i, dtype in enumerate(DTYPES[sender : 8 - receiver]):
        shape = (sender + 1, receiver + 1, 3)[: i % 4]
        some.append(seeded(*shape, seed=10 * sender + i, dtype=torch.int8 if dtype == torch.bool else dtype).to(dtype))
    return some if sender == 1 else [*some, torch.empty(0, 5), torch.arange(4.0).double()[::2][1:]]     # one element, stride 2


@ranks(2, 3)
def test_an_exchange_of_any_pieces(rank, world):
    """Several dtypes in one message, unaligned, of any shape, conjugated, empty or none at all; each arrives as it was sent."""
    def restrided(x):
        x = x.conj().resolve_conj().conj() if x.is_complex() else x
        return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x

    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        want = [pieces(peer, rank) for peer in range(world)]
        with ledger() as book:
            wait = comm.exchange([[restrided(x) for x in pieces(rank, peer)] for peer in range(world)],
                                 [[(x.shape, x.dtype) for x in some] for some in want], ctx.cp)
            got = wait()
        for mine, theirs in zip(got, want, strict=True):
            assert len(mine) == len(theirs)
            assert all(a.dtype == b.dtype and a.is_contiguous() and torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert book.bytes() == sum(x.numel() * x.element_size() for some in want for x in some)
        assert comm.exchange([[]] * world, [[]] * world, ctx.cp)() == [[]] * world


@ranks(3)
def test_messages_may_overlap(rank, world):
    """Started in one order on all ranks, waited for in another."""
    with ParallelContext.from_env(cp=3, timeout=60) as ctx:
        a, b = seeded(4, seed=rank), seeded(3, 5, seed=10 + rank)
        waits = [comm.start_gather(a, [[4]] * 3, ctx.cp), comm.start_reduce_scatter(list(b), ctx.cp),
                 comm.start_shift(a, ctx.cp, 1, (4,))]
        shifted, summed, gathered = (wait() for wait in waits[::-1])
        close(torch.stack(gathered), torch.stack([seeded(4, seed=r) for r in range(3)]), 0)
        close(summed, total([seeded(3, 5, seed=10 + r)[rank] for r in range(3)]))
        close(shifted, seeded(4, seed=(rank - 1) % 3), 0)


# ---- sums ------------------------------------------------------------------------------------------------------------------


@ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_low_precision_are_rounded_once(rank, world, dtype):
    """C35: sums run in float32 and in rank order, so they equal the float32 sum rounded; a running sum in bf16 does not."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        xs = [seeded(world * 50, 7, seed=r, dtype=dtype) for r in range(world)]
        want = total([x.float() for x in xs]).to(dtype)
        with ledger() as book:
            got = comm.reduce(xs[rank], ctx.cp)
        close(got, want, 0)
        close(comm.scatter_sum(xs[rank], ctx.cp, 0), want.tensor_split(world)[rank], 0)
        assert book.bytes() == 2 * (world - 1) * want.numel() * 2 // world
        running = xs[0]
        for x in xs[1:]:
            running = running + x
        if world > 2:
            assert not torch.equal(running, want)
        odd = torch.full((3,), 1 + rank, dtype=dtype)[1:]
        assert comm.reduce(odd, ctx.cp).tolist() == [world * (world + 1) / 2] * 2


@ranks(3, 4)
def test_sums_have_the_same_bits_on_every_rank(rank, world):
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for dtype in (torch.float32, torch.bfloat16):
            got = comm.reduce(seeded(1001, seed=rank, dtype=dtype), ctx.cp)
            everyone = comm.all_gather(got, [[1001]] * world, ctx.cp)
            assert all(torch.equal(x, got) for x in everyone)


@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_max_and_min(rank, world, dtype):
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        xs = [seeded(4, 3, seed=r, dtype=dtype) for r in range(world)]
        for op, want in (("max", torch.stack(xs).amax(0)), ("min", torch.stack(xs).amin(0))):
            x = xs[rank].t().contiguous().t()
            close(comm.all_reduce(x, ctx.cp, op=op), want, 0)
            assert torch.equal(x, xs[rank])


@ranks(2)
def test_sums_of_every_number_type(rank, world):
    """Integers and complex numbers, forward; the input stays."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.complex128, torch.complex64):
            xs = [seeded(3, 4, seed=r, dtype=dtype if dtype != torch.uint8 else torch.int64).abs().to(dtype) for r in range(2)]
            x = xs[rank].clone()
            close(comm.all_reduce(x, ctx.cp), xs[0] + xs[1])
            close(comm.all_reduce(x.conj(), ctx.cp), (xs[0] + xs[1]).conj())
            close(comm.reduce_scatter([x[0], x[1]], ctx.cp), xs[0][rank] + xs[1][rank])
            assert torch.equal(x, xs[rank])


@ranks(2)
def test_strided_integers_by_hand(rank, world):
    """C06: x[:, ::2] of arange(8) + 100 rank sums to [[100, 104], [108, 112]]; every operation equals that on a copy."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        axis, base = ctx.cp, torch.arange(8).reshape(2, 4) + 100 * rank
        calls = [
            lambda y: comm.reduce(y, axis), lambda y: comm.gather(y, axis, 0), lambda y: comm.scatter_sum(y, axis, 1),
            lambda y: comm.shard(y, axis, 0), lambda y: comm.swap_shards(y, axis, split=0, join=1), lambda y: comm.shift(y, axis),
            lambda y: comm.all_reduce(y, axis, op="max")]
        for x in (base[:, ::2], base.t()[::2], base[:, :1].expand(2, 2)):
            for call in calls:
                assert torch.equal(call(x), call(x.contiguous()))
        assert comm.reduce(base[:, ::2], axis).tolist() == [[100, 104], [108, 112]]


# ---- groups ----------------------------------------------------------------------------------------------------------------


@ranks(3)
def test_group_of_takes_members_only(rank, world):
    """None is all processes; a process that is no member is refused on that rank, by number."""
    assert comm.group_of(None).ranks == (0, 1, 2)
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(Unsupported, match="rank 1 is not a member"):
            comm.group_of(group)
    else:
        mine = comm.group_of(group, "pair")
        assert (mine.ranks, mine.rank, mine.size, mine.name) == ((0, 2), rank // 2, 2, "pair")
        assert comm.reduce(torch.tensor(rank), mine).item() == 2
        assert comm.group_of(mine) is mine
        dist.destroy_process_group(group)


def test_without_torch_distributed_this_process_is_the_group():
    mine = comm.group_of(None)
    assert (mine.ranks, mine.rank, mine.size) == ((0,), 0, 1)


REFUSED = {
    "gather": (lambda x, a: comm.gather(x, a, 0, [2, 3]), ["share of 4", "[2, 3]"]),
    "gather_sum": (lambda x, a: comm.gather_sum(x, a, 0, [4]), ["[4]", "2 ranks"]),
    "scatter_sum": (lambda x, a: comm.scatter_sum(x, a, 0, [2, 3]), ["4 along dimension 0", "sum of 5"]),
    "shard": (lambda x, a: comm.shard(x, a, 0, [4]), ["1 pieces"]),
    "own_piece": (lambda x, a: comm.own_piece(x, a, 0, [1, 1, 2]), ["3 pieces"]),
    "split": (lambda x, a: comm.swap_shards(x, a, split=0, join=1, split_sizes=[4, 4], join_sizes=[3, 3]), ["sum of 8"]),
    "join": (lambda x, a: comm.swap_shards(x, a, split=0, join=1, split_sizes=[2, 2], join_sizes=[4, 4]), ["share of 3"]),
}


@ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_sent(rank, world, name):
    call, words = REFUSED[name]
    with ParallelContext.from_env(cp=2, timeout=60) as ctx, ledger() as book:
        with pytest.raises(Unsupported) as error:
            call(torch.ones(4, 3), ctx.cp)
        assert all(word in str(error.value) for word in (*words, "cp")), str(error.value)
        assert not book.messages


@ranks(2)
def test_waited_counts_the_seconds_blocked_in_messages_and_nothing_else(rank, world):
    """Rank 1 comes 0.3 s late: rank 0 waits that long. A message that arrived while a rank computed costs it nothing."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        x = torch.ones(3)
        comm.all_reduce(x, ctx.cp)      # both are here now
        before = comm.waited()
        if rank == 1:
            time.sleep(0.3)
        close(comm.all_reduce(x, ctx.cp), 2 * x)
        late = comm.waited() - before
        assert 0.25 < late < 3 if rank == 0 else late < 0.25
        before = comm.waited()
        work = comm.start_all_reduce(x, ctx.cp)
        time.sleep(0.3)                 # computing
        work()
        assert comm.waited() - before < 0.25
        before = comm.waited()
        comm.agree([1], ctx.tp)         # a group of one sends nothing
        assert comm.waited() == before


def test_counting_costs_microseconds_at_most():
    """Each message is counted twice; it takes 50 microseconds and more."""
    start = time.perf_counter()
    for _ in range(10_000):
        with comm._counted():
            pass
    assert (time.perf_counter() - start) / 10_000 < 10e-6
