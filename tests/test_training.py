"""Steps of training: schedule, optimizer, loss curves on every mesh against one process, counting of tokens (C13 to C16)."""

import functools
import itertools
import math

import pytest
import torch
from helpers import close, far
from pool import ranks
from small_run import Curve, T, V, small, text

import tpattn
from tpattn import ParallelContext, SequenceLayout, Transformer
from tpattn.data import IGNORE, Batch, Batches, PackedTokens, ValidBatches, layout_for
from tpattn.params import sharded_parameters, to_local, whole
from tpattn.training import NonFiniteLoss, Schedule, adamw, evaluate, train, train_step

# ------------------------------------------------------------------------------------------------- schedule and optimizer


def test_the_schedule_rises_then_falls_as_a_cosine():
    schedule = Schedule(2.0, steps=110, warmup_steps=10, min_lr_fraction=0.1)
    assert [schedule.at(step) for step in (1, 5, 10)] == [0.2, 1.0, 2.0]
    close(schedule.at(60), 2.0 * (0.1 + 0.9 * 0.5), 1e-12)  # half of the way down
    close(schedule.at(110), 0.2, 1e-12)
    rates = [schedule.at(step) for step in range(1, 111)]
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 5), (5, 5), (9, 5), (4, 5), (1, 1)])
def test_any_warmup_gives_a_rate_for_every_step(warmup, steps):
    """A warm-up as long as the run, or longer, only rises; without one the first step is below the top already."""
    schedule = Schedule(1.0, steps, warmup, 0.25)
    rates = [schedule.at(step) for step in range(1, steps + 1)]
    assert all(0 < rate <= 1 for rate in rates)
    if warmup >= steps:
        close(rates, [step / warmup for step in range(1, steps + 1)], 1e-12)
    else:
        close(rates[-1], 0.25, 1e-12)


def test_matrices_decay_and_norms_and_biases_do_not():
    """By the shape in the undivided model: q [H, D, M] is a matrix there, its bias [H, D] is not."""
    model = Transformer(29, 12, 1, 3, bias=True, norm="layernorm", ctx=ParallelContext.single(), seed=0)
    optimizer = adamw(model, lr=1.0, weight_decay=0.5)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    names = {name: decays[id(p)] for name, p in model.named_parameters()}
    assert {name for name, decay in names.items() if decay == 0.0} == {name for name in names if "bias" in name or "norm" in name}
    assert set(names.values()) == {0.0, 0.5}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)


# ------------------------------------------------------------------------------------------------------------------- curves

STEPS = 20
MESHES = {  # dp, cp, tp, sequence_parallel, (ulysses, ring), layout
    2: [
        (1, 1, 2, False, None, "zigzag"),
        (1, 1, 2, True, None, "zigzag"),
        (1, 2, 1, False, (1, 2), "zigzag"),
        (1, 2, 1, False, (2, 1), "contiguous"),
        (2, 1, 1, False, None, "zigzag"),
    ],
    3: [(1, 3, 1, False, (1, 3), "zigzag"), (1, 3, 1, False, (3, 1), "striped")],
    4: [
        (1, 2, 2, False, (1, 2), "striped"),
        (1, 2, 2, True, (2, 1), "zigzag"),
        (2, 1, 2, True, None, "zigzag"),
        (1, 4, 1, False, (2, 2), "zigzag"),
        (4, 1, 1, False, None, "contiguous"),
    ],
}


def meshes(world):
    def name(dp, cp, tp, sp, grid, kind):
        return f"dp{dp}cp{cp}tp{tp}{'sp' * sp}-{'x'.join(map(str, grid or ['auto']))}-{kind}"

    return [pytest.param(*mesh, id=name(*mesh)) for mesh in MESHES[world]]


def curve(ctx, grid, kind, steps=STEPS, fused_loss=False, **options):
    """Loss and gradient norm of each step, and the whole weights after them."""
    model, record = small(ctx, grid, **options), Curve()
    optimizer = adamw(model, lr=0.03)
    layout = getattr(SequenceLayout, kind)(T, ctx.cp.size)
    schedule = Schedule(0.03, STEPS + 5, warmup_steps=3)
    train(
        model, optimizer, text(), ctx=ctx, schedule=schedule, layout=layout, seed=7, clip=1.0, fused_loss=fused_loss, last=steps,
        record=record)
    return torch.tensor(record.rows, dtype=torch.float64), tpattn.whole_state_dict(model)


@functools.cache
def serial_curve(**options):
    return curve(ParallelContext.single(), None, "contiguous", **options)


def check_curve(dp, cp, tp, sp, grid, kind, fused_loss=False, **options):
    if tp > 1:
        options |= {"num_heads": 6, "num_kv_heads": 2}  # tp needs whole groups of heads
    with ParallelContext.from_env(dp=dp, cp=cp, tp=tp, timeout=60) as ctx:
        rows, weights = curve(ctx, grid, kind, fused_loss=fused_loss, sequence_parallel=sp, **options)
    want, want_weights = serial_curve(**options)
    assert want[-3:, 0].mean() < 0.8 * want[0, 0], "a model that does not learn proves nothing"
    close(rows[:, 0], want[:, 0], 1e-9)
    close(rows[:, 1], want[:, 1], 1e-8)
    for name, value in weights.items():
        close(value.view_as(want_weights[name]), want_weights[name], 1e-7)  # AdamW divides by roots of tiny squares


@ranks(2)
@pytest.mark.parametrize(("dp", "cp", "tp", "sp", "grid", "kind"), meshes(2))
def test_loss_curve_equals_one_process_2(rank, world, dp, cp, tp, sp, grid, kind):
    """Loss of 20 steps in which it falls by a fifth, gradient norms and final weights, in float64."""
    check_curve(dp, cp, tp, sp, grid, kind)


@ranks(3)
@pytest.mark.parametrize(("dp", "cp", "tp", "sp", "grid", "kind"), meshes(3))
def test_loss_curve_equals_one_process_3(rank, world, dp, cp, tp, sp, grid, kind):
    check_curve(dp, cp, tp, sp, grid, kind)


@ranks(4)
@pytest.mark.parametrize(("dp", "cp", "tp", "sp", "grid", "kind"), meshes(4))
def test_loss_curve_equals_one_process_4(rank, world, dp, cp, tp, sp, grid, kind):
    check_curve(dp, cp, tp, sp, grid, kind)


@ranks(1, 4)
def test_loss_curve_with_the_fused_loss_equals_one_process_without(rank, world):
    """train(fused_loss=True): the same losses, norms and weights, and the loss from logits is never called."""
    serial_curve(num_heads=6, num_kv_heads=2, tied=True)  # before it is refused
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpattn.training.loop.vocab_parallel_cross_entropy", None)
        mesh = (1, 2, 2, True) if world == 4 else (1, 1, 1, False)
        check_curve(*mesh, None, "zigzag", num_heads=6, num_kv_heads=2, tied=True, fused_loss=True)


@ranks(4)
@pytest.mark.parametrize(("dp", "cp", "tp", "sp"), [(2, 1, 2, True), (1, 2, 2, True), (2, 2, 1, False)])
def test_loss_curve_with_dropout_equals_one_process(rank, world, dp, cp, tp, sp):
    """The loop's key: every rank draws what one process draws for its sequences, positions and step."""
    options = {"dropout": 0.1, "attention_dropout": 0.1, "qk_norm": True, "tied": True}
    check_curve(dp, cp, tp, sp, None, "zigzag", **options)
    if rank == 0:
        for one in ("dropout", "attention_dropout"):
            far(serial_curve(**options)[0], serial_curve(**options | {one: 0.0})[0], 1e-3)


@ranks(4)
def test_c46_a_second_context_of_equal_sizes_trains_on_groups_of_its_own(rank, world):
    """C46: made while the first is open, and after it is closed. DTensor takes meshes of equal sizes for one another."""
    options = {"grid": None, "kind": "zigzag", "steps": 2, "num_heads": 4}
    first = ParallelContext.from_env(cp=2, tp=2, timeout=60)
    rows, _ = curve(first, **options)
    second = ParallelContext.from_env(cp=2, tp=2, timeout=60)
    close(curve(second, **options)[0], rows, 0)
    first.close()
    close(curve(second, **options)[0], rows, 0)
    second.close()
    with ParallelContext.from_env(cp=2, tp=2, timeout=60) as third:
        close(curve(third, **options)[0], rows, 0)
        assert small(third, num_heads=4).head.weight.device_mesh.get_group() == third.tp.group


# -------------------------------------------------------------------------------------------------------- counting of tokens


def gradients(model, ctx):
    """Every finished gradient, whole, by name."""
    return {name: whole(to_local(m.get_parameter(key).grad), spec, ctx.tp) for name, m, key, spec in sharded_parameters(model)}


def loss_and_gradients(ctx, tokens, targets, layout, **options):
    """The global mean loss of a whole batch [B, T] (the same on every rank), and every whole gradient."""
    model = Transformer(V, 16, 1, 4, ctx=ctx, seed=2, dtype=torch.float64, **options)
    tokens, targets = (x.tensor_split(ctx.dp.size)[ctx.dp.rank] for x in (tokens, targets))
    tokens, targets = (ctx.cp.shard(x, layout) for x in (tokens, targets))
    total = tpattn.vocab_parallel_cross_entropy(model(tokens, layout=layout), targets, ctx=ctx, vocab_size=V)
    loss = tpattn.token_mean(total, (targets != IGNORE).sum(), ctx=ctx)
    loss.backward()
    tpattn.finish_gradients(model)
    return loss.detach(), gradients(model, ctx)


def check_split(ctx, tokens, targets, layout, **options):
    """The loss, on every rank, after checking it and all gradients against one process and torch's own cross entropy."""
    loss, grads = loss_and_gradients(ctx, tokens, targets, layout, **options)
    alone = ParallelContext.single()
    one = SequenceLayout.contiguous(tokens.shape[1], 1)
    want, want_grads = loss_and_gradients(alone, tokens, targets, one)
    close(loss, want)
    for name, grad in grads.items():
        assert grad.isfinite().all()
        close(grad, want_grads[name])
    twin = Transformer(V, 16, 1, 4, ctx=alone, seed=2, dtype=torch.float64)
    logits = twin(tokens, layout=one).flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    close(loss, total / (targets != IGNORE).sum().clamp(min=1))
    return loss


def words(B, T, seed=4):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, V, (B, T), generator=g), torch.randint(0, V, (B, T), generator=g)


@ranks(4)
@pytest.mark.parametrize(("dp", "cp", "tp"), [(4, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (1, 1, 4)])
def test_c13_every_split_of_four_ranks_gives_the_loss_and_gradients_of_one(rank, world, dp, cp, tp):
    """C13: a global batch of 4 x 8 tokens, some ignored, as dp4, cp4, dp2 cp2, tp2 cp2, tp4."""
    tokens, targets = words(4, 8)
    targets[0, :5] = targets[3] = IGNORE  # other counts on every rank
    with ParallelContext.from_env(dp=dp, cp=cp, tp=tp, timeout=60) as ctx:
        check_split(ctx, tokens, targets, SequenceLayout.contiguous(8, cp), sequence_parallel=tp > 1)


@ranks(2)
def test_c14_the_mean_is_over_all_counted_tokens(rank, world):
    """C14: losses 1, 2, 3 on one rank and 10 on the other are 4 on average, where a mean of means is 6."""
    losses = torch.tensor([[1.0, 2.0, 3.0], [10.0, 7.0, 7.0]], dtype=torch.float64)[rank]
    counted = torch.tensor([[1, 1, 1], [1, 0, 0]])[rank]
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        mean = tpattn.token_mean((losses * counted).sum(), counted.sum(), ctx=ctx)
        close(mean, 4.0)
        far(mean, 6.0)


@ranks(2, 4)
def test_c14_one_counted_token_in_the_batch_gives_the_gradients_of_one_process(rank, world):
    """C14: neither half nor a quarter of them."""
    tokens, targets = words(1, 8)
    targets[0, [i for i in range(8) if i != 5]] = IGNORE
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        check_split(ctx, tokens, targets, SequenceLayout.contiguous(8, world))


@ranks(2, 4)
def test_c15_a_rank_whose_labels_are_all_ignored(rank, world):
    """C15: the last cp rank counts nothing; the loss is finite and the same everywhere."""
    tokens, targets = words(2, 8)
    targets[:, 8 - 8 // world :] = IGNORE
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        loss = check_split(ctx, tokens, targets, SequenceLayout.contiguous(8, world))
        assert loss > 1


@ranks(2, 4)
def test_c15_all_labels_ignored_everywhere_is_a_loss_of_zero_and_no_step_of_nan(rank, world):
    """C15: loss 0, gradients 0, and a training step that leaves finite weights; the same values are recorded on every rank."""
    tokens, targets = words(2, 8)
    targets[:] = IGNORE
    layout = SequenceLayout.contiguous(8, world)
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        loss, grads = loss_and_gradients(ctx, tokens, targets, layout)
        assert loss == 0
        assert all(bool((grad == 0).all()) for grad in grads.values())
        model = Transformer(V, 16, 1, 4, ctx=ctx, seed=2, dtype=torch.float64)
        mine = layout.positions(ctx.cp.rank)
        batch = Batch(tokens[:, mine], targets[:, mine], [[8], [8]], 0, [0, 1], layout)
        assert train_step(model, adamw(model, lr=0.1), batch, ctx=ctx, clip=1.0) == (0.0, 0.0)
        assert all(bool(p.isfinite().all()) for p in model.parameters())


@ranks(2, 4)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_c16_targets_at_the_edges_of_shards_are_counted_once(rank, world, kind):
    """C16: 8 tokens 0 to 7 have 7 targets on any cp; token 3, the last of its shard at cp=2, is followed by 4."""
    packed = PackedTokens(torch.arange(8), [0], 8)
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        layout = getattr(SequenceLayout, kind)(8, world)
        batch = Batches(packed, 1, seed=0).batch(0, ctx, layout)
        pairs = [(t, y) for t, y in zip(batch.tokens[0].tolist(), batch.targets[0].tolist(), strict=True) if y != IGNORE]
        count = tpattn.comm.all_reduce(torch.tensor(len(pairs)), ctx.cp)
        assert int(count) == 7
        assert all(y == t + 1 for t, y in pairs)
        holders = tpattn.comm.all_reduce(torch.tensor(int((3, 4) in pairs)), ctx.cp)
        assert int(holders) == 1
        model = Transformer(V, 16, 1, 4, ctx=ctx, seed=2, dtype=torch.float64)
        total = tpattn.vocab_parallel_cross_entropy(model(batch.tokens, layout=layout), batch.targets, ctx=ctx, vocab_size=V)
        total = tpattn.comm.all_reduce(total.detach(), ctx.cp)
    alone = ParallelContext.single()
    logits = Transformer(V, 16, 1, 4, ctx=alone, seed=2, dtype=torch.float64)(torch.arange(8)[None])[0]
    want = torch.nn.functional.cross_entropy(logits[:-1], torch.arange(1, 8), reduction="sum")
    close(total, want)
    shifted_inside = torch.tensor([i for i in range(7) if (i + 1) % (8 // world)])  # the likely mistake: shift after sharding
    far(total, torch.nn.functional.cross_entropy(logits[shifted_inside], shifted_inside + 1, reduction="sum"))


# ------------------------------------------------------------------------------------------------------------ non-finite loss


@ranks(2)
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2}, {"dp": 2}])
def test_a_loss_that_is_no_number_ends_the_run_on_every_rank_and_names_the_step(rank, world, mesh):
    """Only rank 1's share turns bad; both raise the same error, before the weights change."""
    with ParallelContext.from_env(**{"dp": 1, **mesh}, timeout=60) as ctx:
        model = small(ctx)
        optimizer = adamw(model, lr=0.01)
        layout = SequenceLayout.zigzag(T, ctx.cp.size)
        schedule = Schedule(0.01, 9)
        train(model, optimizer, text(), ctx=ctx, schedule=schedule, layout=layout, last=2)
        if rank == 1:
            with torch.no_grad():
                to_local(model.blocks[1].mlp.up.weight)[0, 0] = math.inf
        before = tpattn.whole_state_dict(model)
        with pytest.raises(NonFiniteLoss, match=r"^step 3 of 9: the loss is (nan|inf)"):
            train(model, optimizer, text(), ctx=ctx, schedule=schedule, layout=layout, done=2)
        for name, value in tpattn.whole_state_dict(model).items():
            assert torch.equal(value, before[name]), name


def test_a_gradient_that_is_no_number_counts_too():
    ctx = ParallelContext.single()
    model = small(ctx)
    next(model.parameters()).register_hook(lambda g: g * math.nan)
    with pytest.raises(NonFiniteLoss, match="step 1 of 4: the loss is .* and the gradient norm nan"):
        train(model, adamw(model, lr=0.01), text(), ctx=ctx, schedule=Schedule(0.01, 4), layout=SequenceLayout.contiguous(T, 1))


def test_saves_when_told_and_after_the_last_step():
    ctx = ParallelContext.single()
    for every, last, saved in ((0, 5, [5]), (2, 5, [2, 4, 5]), (5, 5, [5]), (1, 3, [1, 2, 3])):
        model, seen, plan = small(ctx), [], {"schedule": Schedule(0.01, 9), "layout": SequenceLayout.contiguous(T, 1)}
        train(model, adamw(model, lr=0.01), text(), ctx=ctx, **plan, last=last, save=seen.append, save_every=every)
        assert seen == saved


def test_bfloat16_computation_learns_about_as_well_and_keeps_float32_weights():
    """The dtype of a run that is not its parameters'."""
    low, _ = serial_curve(dtype=torch.float32, compute_dtype=torch.bfloat16)
    high, weights = serial_curve(dtype=torch.float32)
    assert all(value.dtype == torch.float32 for value in weights.values())
    close(low[:, 0], high[:, 0], 0.05)
    far(low[:, 0], high[:, 0], 1e-5)


# ------------------------------------------------------------------------------------------- documents, held-out text, leaving


@functools.cache
def by_hand(step):
    """Loss of a step's batch by plain torch: each document of each row alone, in a model of one process."""
    batches, model = text(document_mask=True), small(ParallelContext.single(), num_heads=6, num_kv_heads=2)
    batch = batches.share(step)
    total, count = 0.0, 0
    with torch.no_grad():
        for tokens, targets, documents in zip(batch.tokens, batch.targets, batch.documents, strict=True):
            for piece, target in zip(tokens.split(documents), targets.split(documents), strict=True):
                loss = torch.nn.functional.cross_entropy(model(piece[None])[0], target, ignore_index=IGNORE, reduction="sum")
                total, count = total + float(loss), count + int((target != IGNORE).sum())
    return torch.tensor(total / count, dtype=torch.float64)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("fused_loss", [False, True])
def test_documents_that_do_not_see_each_other(rank, world, fused_loss):
    """Every mesh, its layout made for each batch: the loss of the first step is that of the documents one by one; all the steps
    are those of one process; without the mask they are others."""
    kind = layout_for("auto", T, world, document_mask=True)
    with ParallelContext.from_env(dp=1, cp=world, timeout=60) as ctx:
        rows = {}
        for mask in (True, False):
            model, record = small(ctx, num_heads=6, num_kv_heads=2), Curve()
            layout = kind if mask else SequenceLayout.zigzag(T, world)
            plan = {"schedule": Schedule(0.03, 9), "layout": layout, "fused_loss": fused_loss}
            train(model, adamw(model, lr=0.03), text(mask), ctx=ctx, **plan, last=4, record=record)
            rows[mask] = torch.tensor(record.rows, dtype=torch.float64)
    close(rows[True][0, 0], by_hand(0), 1e-9)
    far(rows[False][0, 0], by_hand(0), 1e-4)
    alone, record = ParallelContext.single(), Curve()
    model = small(alone, num_heads=6, num_kv_heads=2)
    train(model, adamw(model, lr=0.03), text(True), ctx=alone, schedule=Schedule(0.03, 9), last=4, record=record)
    close(rows[True], torch.tensor(record.rows, dtype=torch.float64), 1e-8)


def held_out():
    """7 samples: rows that only fill a batch on every mesh."""
    packed = text().packed
    return PackedTokens(packed.stream[: 7 * T + 2], packed.starts[packed.starts < 7 * T], T)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_the_loss_on_held_out_text_is_that_of_one_process(rank, world, axis):
    """Over all samples, each once; without dropout; the model is left in training mode."""
    packed, alone = held_out(), ParallelContext.single()
    model = small(alone, num_heads=6, num_kv_heads=2)
    tokens, targets = (torch.stack([get(i) for i in range(7)]) for get in (packed.tokens, packed.targets))
    with torch.no_grad():
        want = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    with ParallelContext.from_env(**{"dp": 1, axis: world}, timeout=60) as ctx:
        twin = small(ctx, num_heads=6, num_kv_heads=2, dropout=0.5).train()
        twin.blocks[0].eval()
        layout = SequenceLayout.zigzag(T, ctx.cp.size)
        for batch_size in (4, 5, 9):
            got = evaluate(twin, ValidBatches(packed, batch_size), ctx=ctx, layout=layout, fused_loss=batch_size == 5)
            close(torch.tensor(got, dtype=torch.float64), want, 1e-10)
        some = evaluate(twin, ValidBatches(packed, 4), ctx=ctx, layout=layout, most=1)
        far(some, want, 1e-4)
        assert twin.training and not twin.blocks[0].training and not twin.blocks[0].mlp.training


class Told(Curve):
    """Also keeps what it is told of held-out text."""

    def __init__(self):
        super().__init__()
        self.told = []

    def valid(self, step, loss):
        self.told.append(step)


def test_held_out_text_is_looked_at_when_told_and_after_the_last_step():
    ctx = ParallelContext.single()
    for every, last, steps in ((0, 3, [3]), (2, 5, [2, 4, 5])):
        model, record, plan = small(ctx), Told(), {"schedule": Schedule(0.01, 9), "valid": held_out(), "valid_every": every}
        train(model, adamw(model, lr=0.01), text(), ctx=ctx, **plan, last=last, record=record)
        assert record.told == steps


@ranks(1, 3)
def test_a_request_to_stop_on_one_rank_ends_all_after_the_same_step_and_saves_once(rank, world):
    with ParallelContext.from_env(dp=world, timeout=60) as ctx:
        for every, saved in ((0, [4]), (4, [4]), (3, [3, 4])):
            asked, seen, model = itertools.count(1), [], small(ctx)
            made = train(
                model, adamw(model, lr=0.01), text(), ctx=ctx, schedule=Schedule(0.01, 9), save=seen.append, save_every=every,
                stop=lambda asked=asked: rank == world - 1 and next(asked) > 4)
            assert (made, seen) == (4, saved)
        seen = []
        assert train(model, adamw(model, lr=0.01), text(), ctx=ctx, schedule=Schedule(0.01, 9), done=2, save=seen.append,
                     stop=lambda: True) == 2
        assert seen == []  # nothing new
