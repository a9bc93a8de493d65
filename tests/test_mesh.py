"""`ParallelContext`: which ranks form which group, contexts after one another, sizes that do not fit, whole <-> share."""

import copy
import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import close, far, seeded
from pool import FORKS, ranks

from tpattn import (
    ColumnParallelLinear,
    ContextClosed,
    LayerNorm,
    ParallelContext,
    ParallelSelfAttention,
    RowParallelLinear,
    SequenceLayout,
    Unsupported,
    comm,
    ledger,
    sequence_attention,
)
from tpattn.mesh import resolve_sizes

ROOT = Path(__file__).parents[1]


def sum_of_ranks(axis):
    return int(comm.all_reduce(torch.tensor(float(dist.get_rank())), axis))


def splits(world):
    return [(d, c, world // d // c) for d in range(1, world + 1) for c in range(1, world + 1) if world % (d * c) == 0]


# ---- groups ----------------------------------------------------------------------------------------------------------------


@ranks(4)
def test_groups_of_a_mesh_are_these_lists(rank, world):
    """C47: tp fastest, then cp, then dp; the sum of the rank numbers over each group is right on all ranks."""
    with ParallelContext.from_env(dp=1, cp=2, tp=2, timeout=60) as ctx:
        assert ctx.tp.ranks == [(0, 1), (0, 1), (2, 3), (2, 3)][rank] and sum_of_ranks(ctx.tp) == [1, 1, 5, 5][rank]
        assert ctx.cp.ranks == [(0, 2), (1, 3), (0, 2), (1, 3)][rank] and sum_of_ranks(ctx.cp) == [2, 4, 2, 4][rank]
        assert ctx.dp.ranks == (rank,) and ctx.dp.group.size() == 1 and sum_of_ranks(ctx.dp) == rank
        assert ctx.dp_cp.ranks == ctx.cp.ranks and ctx.world.ranks == (0, 1, 2, 3) and sum_of_ranks(ctx.world) == 6
        assert (ctx.tp.rank, ctx.cp.rank, ctx.dp.rank, ctx.world.rank) == (rank % 2, rank // 2, 0, rank)


@ranks(2, 3, 4)
def test_groups_of_every_split(rank, world):
    """Every factorisation of the world: ranks by rank = (d * cp + c) * tp + t, and a sum over each axis that proves it."""
    for dp, cp, tp in splits(world):
        with ParallelContext.from_env(dp=dp, cp=cp, tp=tp, timeout=60) as ctx:
            d, c, t = rank // (cp * tp), rank // tp % cp, rank % tp
            want = {"dp": [(i * cp + c) * tp + t for i in range(dp)], "cp": [(d * cp + i) * tp + t for i in range(cp)],
                    "tp": [(d * cp + c) * tp + i for i in range(tp)], "dp_cp": list(range(t, world, tp)),
                    "world": list(range(world))}
            for name, members in want.items():
                axis = getattr(ctx, name)
                assert (axis.ranks, axis.size, axis.ranks[axis.rank]) == (tuple(members), len(members), rank)
                assert sum_of_ranks(axis) == sum(members), name
            assert list(ctx.mesh.mesh_dim_names) == ["dp", "cp", "tp"] and ctx.mesh.mesh.shape == (dp, cp, tp)


@ranks(4)
def test_contexts_made_and_closed_twenty_times(rank, world):
    """C47: different splits in a row, two of them open at once, groups gone after each: no hang, no group mixed with another."""
    before = len(dist.distributed_c10d._world.pg_map)
    for (dp, cp, tp), _ in zip(itertools.cycle([s for s in splits(4) if s != (1, 1, 4)]), range(10), strict=False):
        with ParallelContext.from_env(dp=dp, cp=cp, tp=tp) as first, ParallelContext.from_env(dp=1, cp=tp, tp=cp * dp) as second:
            for axis in (first.tp, second.cp, first.cp, second.tp, first.world, second.world):
                assert sum_of_ranks(axis) == sum(axis.ranks)
    assert len(dist.distributed_c10d._world.pg_map) == before


@ranks(4)
def test_every_group_has_the_timeout_that_was_given(rank, world):
    """torch's default for sub-groups is half an hour; read back from each group, those of two axes joined too."""
    for sizes in ((1, 2, 2), (2, 1, 2), (2, 2, 1)):
        with ParallelContext.from_env(*sizes, timeout=37) as ctx:
            groups = [axis.group for axis in (ctx.dp, ctx.cp, ctx.tp, ctx.dp_cp, ctx.world) if axis.size > 1]
            assert len(groups) >= 3
            for group in groups:
                assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 37


# ---- life ------------------------------------------------------------------------------------------------------------------


def one_step(ctx):
    """Loss and input gradient of a column -> row pair and of attention over the tokens, equal on every split of two ranks."""
    torch.manual_seed(3)
    column, row = ColumnParallelLinear(6, 8, ctx=ctx, dtype=torch.float64), RowParallelLinear(8, 6, ctx=ctx, dtype=torch.float64)
    layout = SequenceLayout.zigzag(7, ctx.cp.size)
    x = seeded(2, 7, 6, seed=1).requires_grad_()
    y = row(column(ctx.cp.shard(x, layout))).unflatten(-1, (2, 3))
    out = ctx.cp.gather(sequence_attention(y, y, y, ctx=ctx, layout=layout), layout)
    (out * seeded(*out.shape, seed=2)).sum().backward()
    return out.detach(), x.grad, (column, row)


@ranks(2)
def test_tear_down_and_start_again(rank, world, tmp_path):
    """C46: context(tp=2), step, close, destroy, init again, context(cp=2), step: right values; the old module says why not."""
    want = one_step(ParallelContext.single())
    ctx = ParallelContext.from_env(tp=2, timeout=60)
    out, grad, (column, row) = one_step(ctx)
    close([out, grad], want[:2])
    ctx.close()
    ctx.close()     # a second one does nothing
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), world), rank=rank, world_size=world)
    with ParallelContext.from_env(cp=2, timeout=60) as again:
        out, grad, _ = one_step(again)
        close([out, grad], want[:2])
        for module, x in ((column, torch.ones(1, 6)), (row, torch.ones(1, 4))):
            with pytest.raises(ContextClosed, match="context .*closed"):
                module(x.double())
    assert dist.is_initialized(), "close() leaves a default group that was there before"


@ranks(2)
def test_everything_on_a_closed_context_says_so(rank, world):
    """C46: modules that would send nothing too, gradients of a graph made before, new modules, attention, axes."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        norm, column = LayerNorm(4, ctx=ctx), ColumnParallelLinear(4, 4, ctx=ctx)
        x = torch.ones(2, 4, requires_grad=True)
        y = column(x)
    q = torch.ones(1, 2, 2, 4)
    layout = SequenceLayout.contiguous(2, 2)
    with ledger() as book:
        for call in (lambda: norm(x), lambda: y.sum().backward(), lambda: ColumnParallelLinear(4, 4, ctx=ctx),
                     lambda: sequence_attention(q, q, q, ctx=ctx), lambda: ctx.tp.gather(x, SequenceLayout.of_lengths([2, 2]), 0),
                     lambda: ParallelSelfAttention(4, 2, ctx=ctx), lambda: comm.reduce(x, ctx.world),
                     lambda: ctx.tp.shard(torch.ones(2, 2), layout, 0)):
            with pytest.raises(ContextClosed, match="context .*closed"):
                call()
    assert not book.messages and not dist.distributed_c10d._world.pg_map.keys() - {dist.group.WORLD}


def own_group_after_single(rank, store, pipe):
    """A user's program: tpattn on one process first, then a process group of its own."""
    ctx = ParallelContext.single()
    layer = ColumnParallelLinear(3, 5, ctx=ctx)
    before = dist.is_initialized()
    layer(torch.ones(3)).sum().backward()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    with ParallelContext.from_env(tp=2) as wide:
        pipe.send((before, total.item(), wide.tp.ranks, list(ColumnParallelLinear(3, 6, ctx=wide).weight.to_local().shape)))
    layer(torch.ones(3))
    dist.destroy_process_group()
    pipe.send("done")


def test_single_makes_no_group_and_leaves_room_for_ones_own(tmp_path):
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = FORKS.Pipe()
        processes.append(FORKS.Process(target=own_group_after_single, args=(rank, str(tmp_path / "store"), theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    try:
        for pipe in pipes:
            assert pipe.poll(60) and pipe.recv() == (False, 2.0, (0, 1), [3, 3])
            assert pipe.poll(30) and pipe.recv() == "done"
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_without_torchrun_one_process_is_all_there_is():
    """from_env is single() when the sizes allow it, and refuses others, telling how to start more."""
    with ParallelContext.from_env() as ctx, ParallelContext.from_env(1, -1, 1) as other:
        for one in (ctx, other, ParallelContext.single()):
            assert one.mesh is None and [a.size for a in (one.dp, one.cp, one.tp, one.world)] == [1] * 4
            assert one.tp.group is one.tp and one.tp.ranks == (0,) and one.device.type in ("cpu", "cuda")
    assert not dist.is_initialized()
    for sizes, words in (((1, 2, 1), ["product 2", "1 processes", "not started by torchrun", "--nproc-per-node 2"]),
                         ((-1, 2, 2), ["product 4 times dp", "torchrun"])):
        with pytest.raises(Unsupported) as error:
            ParallelContext.from_env(*sizes)
        assert all(word in str(error.value) for word in words), str(error.value)


def test_a_copy_of_a_context_is_the_context():
    """copy.deepcopy of a module shares its context and its groups."""
    ctx = ParallelContext.single()
    assert copy.deepcopy(ctx) is ctx and copy.deepcopy(ctx.tp) is ctx.tp
    assert copy.deepcopy(LayerNorm(4, ctx=ctx)).ctx is ctx


SCRIPT = """
import os, torch
torch.manual_seed(0)
from tpattn import ColumnParallelLinear, ParallelContext
for sizes in ({"dp": 1, "tp": 2}, {"dp": 1, "cp": 2}, {"dp": -1}):
    with ParallelContext.from_env(**sizes, timeout=30) as ctx:
        ColumnParallelLinear(4, 4, ctx=ctx)(torch.ones(1, 4)).sum().backward()
        line = f"{os.environ['RANK']} {ctx!r} {ctx.tp.ranks} {ctx.cp.ranks} {ctx.dp.ranks}\\n"
        os.write(1, line.encode())  # at once, so that two ranks' lines do not mix
assert not torch.distributed.is_initialized()
try:
    ParallelContext.from_env(dp=1, cp=3, tp=2)
except ValueError as error:
    os.write(1, f"{os.environ['RANK']} refused {torch.distributed.is_initialized()} {error}\\n".encode())
"""


@pytest.mark.long
def test_a_script_under_torchrun_makes_contexts_after_one_another(tmp_path):
    """C46: the store prefix is tagged, so that a second start in one process does not read the first one's addresses."""
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, str(tmp_path / "script.py")], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line)
    assert [line.partition(" ")[2] for line in lines[:3]] == [
        "ParallelContext(dp=1, cp=1, tp=2, device=cpu) (0, 1) (0,) (0,)",
        "ParallelContext(dp=1, cp=2, tp=1, device=cpu) (0,) (0, 1) (0,)",
        "ParallelContext(dp=2, cp=1, tp=1, device=cpu) (0,) (0,) (0, 1)"]
    assert sum("refused False dp=1 x cp=3 x tp=2: product 6 does not give the 2 processes" in line for line in lines) == 2


# ---- sizes -----------------------------------------------------------------------------------------------------------------

WRONG = {
    "product": ({"tp": 3, "cp": 2, "dp": 1}, ["product 6", "dp=1 cp=2 tp=2"]),
    "idle": ({"tp": 2, "cp": 1, "dp": 1}, ["product 2"]),
    "zero": ({"tp": 0}, ["tp=0", "positive"]),
    "two free": ({"dp": -1, "cp": -1, "tp": 2}, ["only one of dp, cp, tp may be -1"]),
    "word": ({"tp": "two"}, ["tp='two'"]),
    "rest": ({"dp": -1, "tp": 3}, ["product 3 times dp"]),
    "float": ({"cp": 2.0}, ["cp=2.0"]),
    "bool": ({"cp": True}, ["cp=True"]),
    "negative": ({"tp": -2}, ["tp=-2"]),
}


@ranks(4)
@pytest.mark.parametrize("name", WRONG)
def test_sizes_that_do_not_fit_are_one_error_on_every_rank(rank, world, name):
    """C53: the equation with its numbers, the 4 processes, and sizes that work; a ValueError before any group is made."""
    sizes, words = WRONG[name]
    before = len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(ValueError) as error:
        ParallelContext.from_env(**sizes)
    text = str(error.value)
    assert all(word in text for word in (*words, "dp=", "cp=", "tp=", "4 processes", "sizes that work: ")), text
    texts = [None] * world
    dist.all_gather_object(texts, text)
    assert set(texts) == {text} and len(dist.distributed_c10d._world.pg_map) == before


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 64])
def test_sizes_resolve_to_the_number_of_processes(world):
    for dp, cp, tp in splits(world):
        assert resolve_sizes(dp, cp, tp, world) == (dp, cp, tp)
        for free in ((-1, cp, tp), (dp, -1, tp), (dp, cp, -1)):
            assert resolve_sizes(*free, world) == (dp, cp, tp)
    with pytest.raises(Unsupported) as error:
        resolve_sizes(world + 1, 1, 1, world)
    suggestions = str(error.value).split("sizes that work: ")[1].split(", or start")[0].split(", ")
    for suggestion in suggestions:      # each of them does work
        values = dict(part.split("=") for part in suggestion.split())
        assert resolve_sizes(int(values["dp"]), int(values["cp"]), int(values["tp"]), world)


def test_timeout_and_device_are_checked():
    for timeout in (0, -1, "5", True, None, float("nan")):
        with pytest.raises(Unsupported, match="timeout="):
            ParallelContext.from_env(timeout=timeout)
    with pytest.raises(Unsupported, match="cpu .gloo. and cuda"):
        ParallelContext.single(device="meta")


@dataclasses.dataclass
class Parallel:
    dp: int = 1
    cp: int = 2
    tp: int = 2
    sequence_parallel: bool = True


@ranks(4)
def test_from_config_takes_mappings_and_objects(rank, world):
    """The keys of the group `parallel`, alone or in a whole config; sequence_parallel is the layers' matter."""
    for cfg in ({"dp": 1, "cp": 2, "tp": 2, "timeout": 50}, Parallel(), {"parallel": Parallel()},
                SimpleNamespace(parallel=Parallel()),
                {"parallel": {"dp": -1, "cp": 2, "tp": 2, "sequence_parallel": False}, "model": {}}):
        with ParallelContext.from_config(cfg) as ctx:
            assert (ctx.dp.size, ctx.cp.size, ctx.tp.size) == (1, 2, 2)
    for cfg, word in (({"tpp": 2}, "parallel.tpp"), ({"parallel": {"dp": 1, "cp": 1}}, "product 1"), ({"cp": "2"}, "cp='2'")):
        with pytest.raises(Unsupported, match=word):
            ParallelContext.from_config(cfg)


@ranks(4)
def test_describe_draws_who_holds_what(rank, world):
    with ParallelContext.from_env(dp=2, cp=1, tp=2, timeout=60) as ctx:
        lines = ctx.describe().splitlines()
        assert lines[0] == "4 ranks = dp 2 x cp 1 x tp 2, on cpu"
        assert "weights 1/2" in lines[1] and "weights 2/2" in lines[1]
        assert len({len(line) for line in lines[2:-1]}) == 1, "the picture is a rectangle"
        rows = [line for line in lines if line.startswith("sequences")]
        assert [row.split("|")[0].strip() for row in rows] == ["sequences 1/2  tokens 1/1", "sequences 2/2  tokens 1/1"]
        cells = [cell.strip() for row in rows for cell in row.split("|")[1:3]]
        assert cells == [f"rank {r}" + "*" * (r == rank) for r in range(4)]
        assert repr(ctx) == "ParallelContext(dp=2, cp=1, tp=2, device=cpu)"
    assert ParallelContext.single().describe() == \
        "1 rank = dp 1 x cp 1 x tp 1, on cpu\nrank 0 holds everything: whole sequences, whole weights"


# ---- whole <-> share on an axis --------------------------------------------------------------------------------------------


@ranks(2, 3, 4)
def test_sharding_and_gathering_is_the_identity(rank, world):
    """C29: every layout, sequence axis and number type; tokens and labels stay pairs; C28: [3, B, T] is cut on the last."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for T in (8, 16, 24, 7, 2, 0):
            order = torch.randperm(T, generator=torch.Generator().manual_seed(T))
            for layout in (*(getattr(SequenceLayout, kind)(T, world) for kind in ("contiguous", "zigzag", "striped")),
                           SequenceLayout.of(order.tensor_split(world))):
                p = layout.positions(rank)
                for dim, dtype in ((0, torch.int64), (1, torch.float64), (-1, torch.bool), (2, torch.bfloat16)):
                    shape = [3, 2, 4]
                    shape[dim] = T
                    x = seeded(*shape, seed=1, dtype=torch.int64).to(dtype)
                    share = ctx.cp.shard(x, layout, dim)
                    assert torch.equal(share, x.index_select(dim, p)) and torch.equal(ctx.cp.gather(share, layout, dim), x)
                    assert torch.equal(ctx.cp.gather_sum(share, layout, dim), x)
                tokens = torch.arange(T).expand(2, T)
                assert torch.equal(ctx.cp.shard(tokens, layout) + 1, ctx.cp.shard(tokens + 1, layout))


@ranks(2, 3)
def test_gradients_of_shard_gather_and_gather_sum(rank, world):
    """shard gathers the gradient, gather keeps the own piece, gather_sum sums; in the order of the sequence, for any layout."""
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        T = 7
        gs = [seeded(2, T, seed=10 + r) for r in range(world)]
        for layout in (SequenceLayout.zigzag(T, world), SequenceLayout.of(torch.arange(T).flip(0).tensor_split(world))):
            p = layout.positions(rank)
            whole, share = seeded(2, T, seed=1).requires_grad_(), seeded(2, p.numel(), seed=2).requires_grad_()
            ctx.cp.shard(whole, layout).backward(gs[rank][:, p])
            close(whole.grad, sum(torch.zeros(2, T).double().index_add(1, layout.positions(r), gs[r][:, layout.positions(r)])
                                  for r in range(world)))
            for call, want in ((ctx.cp.gather, gs[rank][:, p]), (ctx.cp.gather_sum, sum(gs)[:, p])):
                (got,) = torch.autograd.grad(call(share, layout), share, gs[rank])
                close(got, want)
                far(got, sum(gs)[:, p] if call == ctx.cp.gather else gs[rank][:, p])


@ranks(2)
def test_a_whole_where_a_share_is_due_is_refused(rank, world):
    """C27: declared T=8 on 2 ranks: feeding 8 where 4 are due names 8, 4 and the function that shards; feeding 4 works."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx, ledger() as book:
        layout, x = SequenceLayout.contiguous(8, 2), seeded(1, 8, 2, 4, seed=0)
        module = ParallelSelfAttention(8, 2, ctx=ctx, dtype=torch.float64)
        sent = len(book.messages)       # the constructor compares the ranks' seeds
        for call in (lambda: ctx.cp.gather(x, layout), lambda: sequence_attention(x, x, x, ctx=ctx, layout=layout),
                     lambda: module(x.flatten(2), layout=layout)):
            with pytest.raises(Unsupported) as error:
                call()
            assert all(word in str(error.value) for word in ("8", "4", "ctx.cp.shard(")), str(error.value)
        for call, words in ((lambda: ctx.cp.shard(x[:, :4], layout), ["T=8", "[1, 4, 2, 4]"]),
                            (lambda: ctx.cp.shard(x, layout, dim=5), ["dim=5"]),
                            (lambda: ctx.cp.shard(x, SequenceLayout.contiguous(8, 4)), ["4 ranks", "cp has 2", "n=2"])):
            with pytest.raises(Unsupported) as error:
                call()
            assert all(word in str(error.value) for word in words), str(error.value)
        assert len(book.messages) == sent
        share = ctx.cp.shard(x, layout)
        close(module(share.flatten(2), layout=layout), module(share.flatten(2)))
