"""Edges that once gave silent numbers, other errors on other ranks, or a crash: groups of one, empty batches, odd shards."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import close, far, seeded
from pool import ranks

import tpattn
from tpattn import AttentionGrid, ParallelContext, SequenceLayout, Unsupported, ledger, masks, sequence_attention

F64 = torch.float64


@ranks(2)
def test_the_group_of_an_axis_of_one_is_not_all_processes(rank, world):
    """ctx.tp.group with tp=1 sums, cuts and gathers over this rank alone, in single() too."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        for one in (ctx, ParallelContext.single()):
            x = torch.ones(1, 4, requires_grad=True)
            assert tpattn.row_linear(x, torch.ones(2, 4), one.tp.group).tolist() == [[4.0, 4.0]]
            assert tpattn.split_tensor(torch.arange(4), 0, one.tp.group).tolist() == [0, 1, 2, 3]
            tpattn.column_linear(x, torch.ones(2, 4), one.tp.group).sum().backward()
            assert x.grad.tolist() == [[2.0] * 4]
            assert tpattn.distributed_matmul_nt(torch.ones(2, 3), torch.ones(2, 3), 32, one.tp.group).shape == (2, 2)
        with pytest.raises(Unsupported, match="ctx.cp.group"):
            tpattn.row_linear(torch.ones(1, 4), torch.ones(2, 4), "tp")


@ranks(2)
def test_a_rescaled_gradient_is_not_summed_again(rank, world):
    """finish, p.grad = p.grad / 2, finish: a half of the sum, since no backward ran between."""
    with ParallelContext.from_env(dp=2, timeout=60) as ctx:
        torch.manual_seed(0)
        model = tpattn.ColumnParallelLinear(3, 2, ctx=ctx, bias=False, dtype=F64)
        model(seeded(4, 3, seed=rank)).sum().backward()
        tpattn.finish_gradients(model)
        whole = model.weight.grad.clone()
        model.weight.grad = model.weight.grad / 2
        tpattn.finish_gradients(model)
        close(model.weight.grad, whole / 2)


@ranks(3)
def test_a_data_rank_without_sequences_takes_part(rank, world):
    """Two rows over dp=3: the empty rank computes nothing, raises nothing, and the gradients are those of two rows."""
    tokens = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(0))

    def gradients(ctx, mine):
        model = tpattn.Transformer(11, 8, 1, 2, ctx=ctx, seed=1, dtype=F64)
        logits = model(mine[:, :-1], layout=SequenceLayout.contiguous(5, 1))
        total = tpattn.vocab_parallel_cross_entropy(logits, mine[:, 1:], ctx=ctx, vocab_size=11)
        loss = tpattn.token_mean(total, mine[:, 1:].numel(), ctx=ctx)
        loss.backward()
        tpattn.finish_gradients(model)
        return loss.detach(), [p.grad for p in model.parameters()]

    with ParallelContext.from_env(dp=3, timeout=60) as ctx:
        got = gradients(ctx, tokens.tensor_split(3)[rank])
    want = gradients(ParallelContext.single(), tokens)
    close(got[0], want[0])
    close(got[1], want[1])


@ranks(2, 3)
@pytest.mark.parametrize("sizes", [[1, 2, 4], [3, 1, 0], [0, 4, 1]])
def test_token_shards_of_any_lengths_keep_them(rank, world, sizes):
    """A block, an MLP and attention under sequence_parallel give back the shards they were given; lone layers too."""
    sizes = sizes[:world]
    whole = seeded(3, sum(sizes), 12, seed=0)
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        for make in (
            lambda c, sp: tpattn.TransformerBlock(12, 3, ctx=c, dtype=F64, sequence_parallel=sp),
            lambda c, sp: tpattn.ParallelMLP(12, 13, ctx=c, dtype=F64, sequence_parallel=sp),
            lambda c, sp: tpattn.ParallelSelfAttention(12, 3, ctx=c, dtype=F64, sequence_parallel=sp),
        ):
            torch.manual_seed(5)
            layer = make(ctx, True)
            torch.manual_seed(5)
            twin = make(ParallelContext.single(), False)
            got = layer(whole.split(sizes, dim=1)[rank])
            close(got, twin(whole).detach().split(sizes, dim=1)[rank])
            with pytest.raises(Unsupported, match="token_sizes.*sequence_parallel"):
                twin(whole, token_sizes=[sum(sizes)])


@ranks(4)
def test_an_empty_batch_of_one_data_rank_takes_every_mask(rank, world):
    """dp=2 x cp=2, one sequence: the cp group without any runs its collectives under padding, documents and dense masks too."""
    with ParallelContext.from_env(dp=2, cp=2, timeout=60) as ctx:
        B = 1 - ctx.dp.rank
        layout = SequenceLayout.zigzag(9, 2)
        q = seeded(B, layout.sizes[ctx.cp.rank], 2, 4, seed=rank).requires_grad_()
        dense = masks.dense(torch.ones(B, 1, layout.sizes[ctx.cp.rank], 9, dtype=torch.bool))
        for mask in (masks.padding(torch.ones(B, 9, dtype=torch.bool)), masks.documents([4, 5]), dense, masks.causal()):
            for grid in tpattn.AttentionGrid.all_of(2):
                out = tpattn.sequence_attention(q, q, q, ctx=ctx, mask=mask, layout=layout, grid=grid)
                assert out.shape == q.shape
                out.sum().backward()


@ranks(2)
def test_dense_masks_of_different_forms_are_refused_on_every_rank(rank, world):
    """Rank 0 gives [t, S], rank 1 [B, H, t, S]: rows travel with their table, so all must agree before it does."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        q = seeded(2, 3, 2, 4, seed=rank)
        table = torch.ones(3, 6, dtype=torch.bool) if rank == 0 else torch.ones(2, 2, 3, 6, dtype=torch.bool)
        with pytest.raises(Unsupported, match=r"\(1, 1\), \(2, 2\)"):
            tpattn.sequence_attention(q, q, q, ctx=ctx, mask=masks.dense(table), grid=tpattn.AttentionGrid(ulysses=2))


@ranks(2)
def test_what_no_rank_can_use_is_refused_alike(rank, world):
    """Wrong dtypes, widths, vocabularies, functions and options: one named error on both ranks, nothing sent."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        torch.manual_seed(0)
        column, mlp = tpattn.ColumnParallelLinear(4, 4, ctx=ctx), tpattn.ParallelMLP(8, 8, ctx=ctx)
        attention = {"hidden": 8, "num_heads": 2, "ctx": ctx}
        loss = tpattn.vocab_parallel_cross_entropy
        with ledger() as book:
            for wrong, word in (
                (lambda: column(torch.ones(2, 4, dtype=torch.int64)), "floating-point"),
                (lambda: mlp(torch.ones(2, 3, 7)), "7"),
                (lambda: tpattn.RowParallelLinear(4, 4, ctx=ctx, init=torch.randn_like), "in place"),
                (lambda: tpattn.RMSNorm(0, ctx=ctx), "hidden=0"),
                (lambda: tpattn.RMSNorm(4, eps=-1.0, ctx=ctx), "eps=-1.0"),
                (lambda: tpattn.RMSNorm(4, ctx=ctx, dtype="float23"), "float23"),
                (lambda: tpattn.Transformer(8, 8, -1, 2, ctx=ctx), "num_layers=-1"),
                (lambda: tpattn.Transformer(8, 8, 1, 2, ctx=ctx, seed=1.5), "seed=1.5"),
                (lambda: tpattn.ParallelSelfAttention(**attention, transport="zz"), "zz"),
                (lambda: tpattn.ParallelSelfAttention(**attention, kernel="zz"), "zz"),
                (lambda: tpattn.ParallelSelfAttention(**attention, scale="zz"), "zz"),
                (lambda: loss(torch.zeros(2, 0), torch.zeros(2).long(), ctx=ctx, vocab_size=1), "none"),
                (lambda: loss(torch.zeros(2, 4), torch.zeros(2).long(), ctx=ctx, vocab_size=8.0), "8.0"),
                (lambda: loss(torch.zeros(2, 4), torch.zeros(2).long(), ctx=ctx, vocab_size=8, z_loss=float("nan")), "z_loss"),
                (lambda: tpattn.token_mean(torch.tensor(1.0), -3, ctx=ctx), "at least 0"),
                (lambda: tpattn.clip_grad_norm_(column.parameters(), float("nan")), "max_norm"),
            ):
                before = len(book.messages)
                with pytest.raises(Unsupported, match=word):
                    wrong()
                sent = book.messages[before:]
                assert not [m for m in sent if m.operation != "all_gather"], word  # a lone layer agrees on its seed first


@ranks(2)
def test_a_mean_counts_in_full_precision(rank, world):
    """257 tokens are not the 256 that bfloat16 can hold; weights may sum to less than one; one rank's mistake reaches all."""
    with ParallelContext.from_env(dp=2, timeout=60) as ctx:
        with pytest.raises(Unsupported, match="at least 0"):
            tpattn.token_mean(torch.tensor(1.0), -3 if rank == 0 else 5, ctx=ctx)
        close(tpattn.token_mean(torch.tensor(1.0), 0.1, ctx=ctx), torch.tensor(10.0))
        got = tpattn.token_mean(torch.tensor(1024.0, dtype=torch.bfloat16), 257, ctx=ctx)  # 2048 / 514
        assert float(got) == 3.984375
        far(got.double(), torch.tensor(2048 / 512, dtype=F64), 1e-3)


@pytest.mark.long
def test_two_runs_never_share_a_folder(tmp_path):
    """A second run in a folder that a living one works in is refused; once that one has ended, it goes on there."""
    code = "import sys, pathlib; from tpattn.config.run import _take; _take(pathlib.Path(sys.argv[1])); print('in', flush=True); "
    first = subprocess.Popen(
        [sys.executable, "-c", code + "sys.stdin.read()", str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert first.stdout.readline() == "in\n"
    second = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(second, capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[1])
    assert done.returncode != 0 and "another run is working in this folder" in done.stderr
    first.communicate(timeout=60)
    done = subprocess.run(second, capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr


# ---- attention: what a caller may do to its arguments ------------------------------------------------------------------------


@ranks(2)
def test_a_window_longer_than_any_sequence_is_no_limit(rank, world):
    """right = sys.maxsize, and more than 64 bits, equal no limit: positions plus it would run over."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        q, k, v = (seeded(1, 8, 2, 4, seed=3 * rank + i) for i in range(3))
        want = sequence_attention(q, k, v, ctx=ctx, layout=SequenceLayout.contiguous(16, 2))
        for huge in (sys.maxsize, 10**30):
            for mask in (masks.window(None, huge), masks.window(huge, huge), masks.prefix(huge)):
                close(sequence_attention(q, k, v, ctx=ctx, mask=mask, layout=SequenceLayout.contiguous(16, 2)), want)


@ranks(2)
@pytest.mark.parametrize("grid", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_a_buffer_that_changes_before_backward_is_an_error_or_no_matter(rank, world, grid):
    """A dense table or slopes changed in place between forward and backward: torch's error, never other gradients."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        layout, grid = SequenceLayout.contiguous(16, 2), AttentionGrid(*grid)
        table, slopes = torch.ones(8, 16, dtype=torch.bool).tril(), torch.ones(2, dtype=torch.float64)
        for buffer, options in ((table, {"mask": masks.dense(table)}), (slopes, {"alibi_slopes": slopes})):
            q, k, v = (seeded(1, 8, 2, 4, seed=3 * rank + i).requires_grad_() for i in range(3))
            out = sequence_attention(q, k, v, ctx=ctx, layout=layout, grid=grid, **options)
            buffer.fill_(True)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        for make in (masks.padding, masks.document_ids):
            buffer = torch.arange(16)[None] < 9
            buffer = buffer if make is masks.padding else buffer.long()
            grads = []
            for change in (False, True):
                q, k, v = (seeded(1, 8, 2, 4, seed=3 * rank + i).requires_grad_() for i in range(3))
                mine = buffer.clone()
                out = sequence_attention(q, k, v, ctx=ctx, mask=make(mine), layout=layout, grid=grid, remat=True)
                if change:
                    mine.fill_(0)
                grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
            close(grads[1], grads[0], 0)


@ranks(2)
def test_rotate_with_auto_takes_a_grid_that_rotates(rank, world):
    with ParallelContext.from_env(cp=2, timeout=60) as ctx, ledger() as book:
        q, k, v = (seeded(1, 32, 4, 4, seed=i) for i in range(3))
        layout = SequenceLayout.contiguous(64, 2)
        sequence_attention(q, k, v, ctx=ctx, mask=masks.causal(), layout=layout, transport="rotate")
    assert [m.operation for m in book.messages] == ["rotate"], "though an exchange would take ulysses"
    assert AttentionGrid.choose(layout, masks.causal(), 4, 4, 4).grid == AttentionGrid(2, 1, 1)


def test_arguments_of_other_kinds_are_refused_by_name():
    ctx, q = ParallelContext.single(), torch.ones(1, 4, 2, 2)
    for words, options in (
        ("scale=1000", {"scale": 10**400}), ("scale=True", {"scale": True}), ("kv_heads must name.*got 4", {"kv_heads": 4}),
        ("alibi_slopes.detach", {"alibi_slopes": torch.ones(2, requires_grad=True)}),
    ):
        with pytest.raises(Unsupported, match=words):
            sequence_attention(q, q, q, ctx=ctx, **options)
    for arguments in ((64, masks.causal(), 4, 4, 8), (SequenceLayout.zigzag(64, 2), masks.causal(), 5, 2, 8)):
        with pytest.raises(Unsupported, match=r"AttentionGrid\.choose needs"):
            AttentionGrid.choose(*arguments)
