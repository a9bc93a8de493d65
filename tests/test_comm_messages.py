"""What surrounds a message: the ledger, gradients that are not cut, groups of one, and named errors when a peer is gone."""

import os
import signal
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import close, far, seeded
from pool import FORKS, ranks

from tpattn import CollectiveTimeout, ParallelContext, PeerLost, comm, ledger
from tpattn.layout import SequenceLayout

# ---- gradients -------------------------------------------------------------------------------------------------------------


@ranks(2, 4)
def test_two_gathers_with_two_gradients(rank, world):
    """C08: a loss that differs between ranks needs gather_sum (3 at W=2, 10 at W=4), the same loss on each needs gather (1)."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        layout = SequenceLayout.contiguous(2 * world, world)
        for call, factor, want in ((ctx.cp.gather_sum, 1 + rank, world * (world + 1) / 2), (ctx.cp.gather, 1, 1.0)):
            x = torch.ones(2, requires_grad=True)
            (call(x, layout, dim=0) * factor).sum().backward()
            close(x.grad, torch.full((2,), want))
        x = torch.ones(2, requires_grad=True)
        (ctx.cp.gather(x, layout, dim=0) * (1 + rank)).sum().backward()     # the likely mistake
        far(x.grad, torch.full((2,), world * (world + 1) / 2))


@ranks(2)
def test_functions_for_metrics_have_no_gradient(rank, world):
    """C10: all_reduce, all_gather and reduce_scatter return tensors that require none, of inputs that do; pairs keep theirs."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        x = torch.ones(4, requires_grad=True) * (rank + 1)
        results = [comm.all_reduce(x, ctx.cp), comm.all_reduce(x, ctx.cp, op="max"), comm.all_reduce(x.bfloat16(), ctx.cp),
                   *comm.all_gather(x, [[4], [4]], ctx.cp), comm.reduce_scatter(x.split(2), ctx.cp),
                   *comm.exchange([[x] if r != rank else [] for r in range(2)],
                                  [[(x.shape, x.dtype)] if r != rank else [] for r in range(2)], ctx.cp)()[1 - rank],
                   comm.start_shift(x, ctx.cp, 1, x.shape)()]
        assert not any(y.requires_grad for y in results)
        for function in (comm.all_reduce, comm.all_gather, comm.reduce_scatter):
            assert "ithout a gradient" in function.__doc__
    alone = ParallelContext.single().cp
    assert not comm.all_reduce(x, alone).requires_grad and not comm.all_gather(x, [[4]], alone)[0].requires_grad
    assert not comm.reduce_scatter([x], alone).requires_grad


@ranks(2)
def test_a_pair_needs_no_gradient_when_its_input_needs_none(rank, world):
    """Under no_grad, and for inputs without gradient: the same numbers, no graph, no backward message."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            assert not comm.gather_sum(x, ctx.cp, 0, [2, 2]).requires_grad
        for call in (comm.replicate, comm.reduce):
            assert not call(x.detach(), ctx.cp).requires_grad


@ranks(2)
def test_a_second_derivative_is_refused(rank, world):
    """No pair is silently wrong under create_graph: differentiating its gradient again raises, on every rank."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        for call in (comm.replicate, comm.reduce, comm.shift, lambda y, a: comm.gather(y, a, 0, [4, 4]),
                     lambda y, a: comm.gather_sum(y, a, 0, [4, 4]), lambda y, a: comm.scatter_sum(y, a, 0),
                     lambda y, a: comm.shard(y, a, 0)):
            x = torch.ones(4, dtype=torch.float64, requires_grad=True)
            (g,) = torch.autograd.grad((call(x * x, ctx.cp) ** 2).sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                g.sum().backward()


# ---- the ledger ------------------------------------------------------------------------------------------------------------


@ranks(4)
def test_the_ledger_tells_operation_axis_direction_bytes_and_site(rank, world):
    """Each message once, with the line that asked; a gradient's message names the line that asked for its forward."""
    with ParallelContext.from_env(dp=1, cp=2, tp=2, timeout=60) as ctx:
        with ledger() as book:
            x = torch.ones(6, requires_grad=True)
            line = sys._getframe().f_lineno + 1
            y = comm.scatter_sum(comm.replicate(x, ctx.cp), ctx.tp, 0)
            y.sum().backward()
        got = [(m.operation, m.axis, m.direction, m.bytes, m.site) for m in book.messages]
        here = f"test_comm_messages.py:{line}"
        assert got == [("reduce_scatter", "tp", "forward", 12, here), ("all_gather", "tp", "backward", 12, here),
                       ("all_reduce", "cp", "backward", 24, here)]
        assert (book.bytes(), book.bytes(axis="tp"), book.bytes(axis="tp", direction="backward")) == (48, 24, 12)
        assert book.select(operation="all_reduce") == [book.messages[2]]
        rows = str(book).splitlines()
        assert len(rows) == 4 and rows[1].split() == ["cp", "all_reduce", "backward", "1", "24"]


@ranks(2)
def test_ledgers_nest(rank, world):
    """Each records what is sent while it is open; one that is closed, by an exception too, records no more."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        def send():
            comm.all_reduce(torch.ones(1), ctx.cp)

        with ledger() as outer:
            send()
            with pytest.raises(ZeroDivisionError), ledger() as inner:
                send()
                1 / 0       # noqa: B018
            send()
            with ledger() as second:
                pass
        send()
        assert [len(book.messages) for book in (outer, inner, second)] == [3, 1, 0]


@ranks(2)
def test_an_all_gather_counts_what_the_others_send(rank, world):
    """Whole - share: with shares of 5 and 2 rows rank 0 receives 2 rows and rank 1 receives 5."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx, ledger() as book:
        comm.gather(torch.ones([5, 2][rank], 3), ctx.cp, 0, [5, 2])
        assert book.bytes() == 12 * [2, 5][rank]


# ---- groups of one ---------------------------------------------------------------------------------------------------------


def calls_on_a_group_of_one(axis):
    x = seeded(4, 6, seed=0).requires_grad_()
    layout = SequenceLayout.contiguous(4, 1)
    with ledger() as book:
        for y in (comm.replicate(x, axis), comm.reduce(x, axis), comm.gather(x, axis, 0), comm.gather_sum(x, axis, 0),
                  comm.scatter_sum(x, axis, 0), comm.shard(x, axis, 0), comm.own_piece(x, axis, 0), comm.shift(x, axis),
                  comm.swap_shards(x, axis, split=0, join=1), axis.shard(x, layout, 0), axis.gather(x, layout, 0),
                  axis.gather_sum(x, layout, 0)):
            close(y, x, 0)
            (g,) = torch.autograd.grad(y.sum(), x)
            close(g, torch.ones_like(x), 0)
        close(comm.all_reduce(x, axis), x, 0)
        close(comm.all_gather(x, [x.shape], axis)[0], x, 0)
        close(comm.reduce_scatter([x], axis), x, 0)
        assert comm.agree([3, 4], axis) == [[3, 4]]
    assert not book.messages


def test_one_process_sends_nothing():
    calls_on_a_group_of_one(ParallelContext.single().cp)
    assert not dist.is_initialized()


@ranks(2)
def test_a_group_of_one_sends_nothing(rank, world):
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        calls_on_a_group_of_one(ctx.tp)


# ---- peers that are gone ---------------------------------------------------------------------------------------------------

OPERATIONS = {
    "all_reduce": lambda x, group: comm.reduce(x, group),
    "all_gather": lambda x, group: comm.gather(x, group, 0, [x.shape[0]] * group.size),
    "shift": lambda x, group: comm.shift(x, group, 1),
}


def wait_for_a_peer(rank, world, store, pipe, operation, lost):
    """One process: a call that works, then one that the last rank never joins; the error it got, and after how long."""
    limit = timedelta(seconds=20 if lost else 2)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=limit)
    group, x = comm.group_of(None, "cp"), torch.ones(1000)
    OPERATIONS[operation](x, group)
    if rank == world - 1:
        if lost:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    start = time.monotonic()
    try:
        for _ in range(50):     # the peer's end may be noticed only by the next call
            OPERATIONS[operation](x, group)
        pipe.send((None, "no error", 0.0))
    except Exception as error:
        pipe.send((type(error), str(error), time.monotonic() - start))
    pipe.recv()     # stay, so that the others see the missing rank and not this one's end


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("lost", "error"), [(True, PeerLost), (False, CollectiveTimeout)], ids=["lost", "late"])
def test_a_peer_that_is_gone_is_an_error_within_seconds(tmp_path, operation, world, lost, error):
    """C45: SIGKILL of a peer is PeerLost, a peer that does not come is CollectiveTimeout: named, with operation and ranks."""
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = FORKS.Pipe()
        arguments = rank, world, str(tmp_path / "store"), theirs, operation, lost
        process = FORKS.Process(target=wait_for_a_peer, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for rank in range(world - 1):
            assert pipes[rank].poll(60), f"rank {rank} is still waiting"
            kind, text, waited = pipes[rank].recv()
            assert kind is error, f"rank {rank}: {text}"
            assert waited < 15
            assert operation in text and "over cp" in text and f"this is rank {rank}" in text
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(("text", "error"), [
    ("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3", PeerLost),
    ("Broken pipe", PeerLost), ("Socket Timeout", CollectiveTimeout),
    ("Timed out waiting 2000ms for recv operation to complete", CollectiveTimeout),
    ("Watchdog caught collective operation timeout", CollectiveTimeout),
    ("shape mismatch", RuntimeError),
])
def test_messages_of_the_back_ends_become_named_errors(text, error):
    with pytest.raises(RuntimeError) as raised, comm._named_errors("shift", comm.Group("cp", (4, 7), 1)):
        raise RuntimeError(text)
    assert type(raised.value) is error
    if error is not RuntimeError:
        assert "shift over cp (ranks [4, 7], this is rank 7)" in str(raised.value) and raised.value.__cause__ is not None
