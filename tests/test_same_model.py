"""Ten steps of training give one curve of losses and gradient norms on every mesh: all that a run does, at once, in float64.

Every step accumulates two micro-batches of other lengths, with other numbers of counted tokens; embedding, residual branches and
softmax weights drop; gradients are clipped; AdamW steps. A point is dp x cp x tp <= 4 with a grid of attention; what else a run
chooses (sequence_parallel, layout, transport, heads, the fused loss) is drawn for it.
"""

import functools
import random
from typing import NamedTuple

import pytest
import torch
from helpers import close, far
from pool import ranks
from small_run import V

import tpattn
from tpattn import AttentionGrid, ParallelContext, RandomKey, SequenceLayout, comm, finish_gradients, gradients
from tpattn.data import IGNORE
from tpattn.errors import TpattnError
from tpattn.training import adamw

STEPS, CLIP = 10, 0.8
SIZES = (5, 13), (4, 10)            # sequences and tokens of the two micro-batches: dp, cp and zigzag cut them unevenly
HEADS = {"6/2": (6, 2), "3/3": (3, 3)}
DROPS = {"dropout": 0.1, "attention_dropout": 0.2}      # the first also of the embedding


class Point(NamedTuple):
    dp: int
    cp: int
    tp: int
    grid: tuple             # ulysses, ring, merge
    sp: bool                # sequence_parallel
    layout: str
    transport: str
    heads: str
    fused: bool             # Transformer.loss, which makes no logits

    @property
    def world(self):
        return self.dp * self.cp * self.tp

    def kinds(self):
        legs = {name for name, size in zip(("ulysses", "ring", "merge"), self.grid, strict=True) if size > 1}
        axes = {name for name in ("dp", "cp", "tp") if getattr(self, name) > 1}
        return axes | legs | ({"hybrid"} if {"cp", "tp"} <= axes else set()) | {f"tp, sp={self.sp}" for _ in axes & {"tp"}}

    def __str__(self):
        words = [f"dp{self.dp}cp{self.cp}tp{self.tp}{'sp' * self.sp}", "x".join(map(str, self.grid)), self.layout, self.heads]
        return "-".join(words + [self.transport] * (self.grid[1] > 1) + ["fused"] * self.fused).replace("/", "of")


KINDS = {"dp", "cp", "tp", "ulysses", "ring", "merge", "hybrid", "tp, sp=True", "tp, sp=False"}
MESHES = [(dp, cp, tp, (grid.ulysses, grid.ring, grid.merge))
          for dp in range(1, 5) for cp in range(1, 5) for tp in range(1, 5) if 1 < dp * cp * tp <= 4
          for grid in AttentionGrid.all_of(cp)]


def options(mesh, draw):
    """What a run on `mesh` chooses besides, drawn."""
    tp, ring = mesh[2], mesh[3][1]
    return Point(*mesh, tp > 1 and draw.random() < 0.5, draw.choice(["contiguous", "zigzag", "striped"]),
                 draw.choice(["exchange", "rotate"]) if ring > 1 else "auto",
                 draw.choice(["6/2", "3/3"]) if tp < 4 else "6/2", draw.random() < 0.3)      # 3 heads leave a rank of 4 without


def twelve(seed):
    """Twelve points on different meshes, together of every kind."""
    draw = random.Random(seed)
    while True:
        points = [options(mesh, draw) for mesh in draw.sample(MESHES, 12)]
        if set().union(*(point.kinds() for point in points)) == KINDS:
            return points


def batches():
    """Tokens and targets of the two micro-batches of each step; a word mostly decides the next, unequal numbers are counted."""
    g = torch.Generator().manual_seed(4)
    for _ in range(STEPS):
        pair = []
        for (B, T), ignored in zip(SIZES, (0.2, 0.7), strict=True):
            words = torch.randint(0, V, (B, T + 1), generator=g)
            for i in range(1, T + 1):
                words[:, i] = torch.where(torch.rand(B, generator=g) < 0.9, (3 * words[:, i - 1] + 1) % V, words[:, i])
            targets = torch.where(torch.rand(B, T, generator=g) < ignored, IGNORE, words[:, 1:])
            targets[-1] = targets[-1] if ignored < 0.5 else IGNORE      # the last dp rank of 4 counts nothing
            pair.append((words[:, :-1], targets))
        yield pair


def train(ctx, point, steps=STEPS, mean_of_means=False):
    """Loss and gradient norm of each step: [steps, 2]."""
    H, K = HEADS[point.heads]
    transport = {} if point.grid[1] == 1 else {"transport": point.transport}
    model = tpattn.Transformer(
        V, 24, 1, H, K, 6, ffn=21, seed=5, ctx=ctx, grid=AttentionGrid(*point.grid), sequence_parallel=point.sp,
        dtype=torch.float64, **DROPS, **transport)
    optimizer, rows = adamw(model, lr=0.03), []
    for step, pair in zip(range(steps), batches()):     # noqa: B905 -- only so many
        counts = [sum(int((y != IGNORE).sum()) for _, y in pair)] * 2
        if mean_of_means:
            counts = [2 * int((y != IGNORE).sum()) for _, y in pair]
        loss, first = 0.0, 0
        for count, (tokens, targets) in zip(counts, pair, strict=True):
            layout = getattr(SequenceLayout, point.layout)(tokens.shape[1], ctx.cp.size)
            rows_here = torch.arange(len(tokens)).tensor_split(ctx.dp.size)[ctx.dp.rank]
            x, y = (ctx.cp.shard(z[rows_here], layout) for z in (tokens, targets))
            key = RandomKey(9, step, first + int(rows_here[0]))
            if point.fused:
                total = model.loss(x, y, layout=layout, key=key, ignore_index=IGNORE)
            else:
                logits = model(x, layout=layout, key=key)
                total = tpattn.vocab_parallel_cross_entropy(logits, y, ctx=ctx, vocab_size=V, ignore_index=IGNORE)
            (total / count).backward()
            loss, first = loss + total.detach() / count, first + len(tokens)
        finish_gradients(model)
        norm = tpattn.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        rows.append(torch.stack([comm.all_reduce(loss, ctx.dp_cp), norm]))
    return torch.stack(rows)


@functools.cache
def serial(heads):
    alone = ParallelContext.single()
    return train(alone, Point(1, 1, 1, (1, 1, 1), False, "contiguous", "auto", heads, False))


@pytest.fixture(scope="module")
def curves():
    """The curves of one process, made once and handed to the ranks."""
    return {heads: serial(heads) for heads in HEADS}


def check(point, curves, steps=STEPS):
    with ParallelContext.from_env(point.dp, point.cp, point.tp, timeout=60) as ctx:
        close(train(ctx, point, steps), curves[point.heads][:steps], 1e-9)


def of_world(points, world):
    return [pytest.param(point, id=str(point)) for point in points if point.world == world]


def test_the_curves_learn_clip_and_see_every_dropout(curves):
    """A model that does not learn proves nothing, nor does a clip that never cuts."""
    alone = ParallelContext.single()
    point = Point(1, 1, 1, (1, 1, 1), False, "contiguous", "auto", "6/2", False)
    for curve in curves.values():
        assert curve[-3:, 0].mean() < 0.9 * curve[0, 0] and (curve[:, 1] > CLIP).sum() > 2
    with pytest.MonkeyPatch.context() as patch:
        for one in DROPS:
            patch.setitem(DROPS, one, 0.0)
            far(train(alone, point, 2), curves["6/2"][:2])
    far(train(alone, point, 2, mean_of_means=True), curves["6/2"][:2])


def test_the_points_are_of_every_kind():
    """Every mesh of up to four ranks with every grid is drawn from; the twelve hold each axis, leg and kind of tp."""
    assert len(MESHES) == 25
    for seed in range(3):
        points = twelve(seed)
        assert len({point[:4] for point in points}) == 12 and set().union(*(point.kinds() for point in points)) == KINDS
    assert {p.layout for p in twelve(0)} == {"contiguous", "zigzag", "striped"} and {p.fused for p in twelve(0)} == {True, False}


@ranks(2)
@pytest.mark.parametrize("point", of_world(twelve(0), 2))
def test_ten_steps_equal_one_process_2(rank, world, point, curves):
    """Losses and gradient norms of ten steps within 1e-9."""
    check(point, curves)


@ranks(3)
@pytest.mark.parametrize("point", of_world(twelve(0), 3))
def test_ten_steps_equal_one_process_3(rank, world, point, curves):
    check(point, curves)


@ranks(4)
@pytest.mark.parametrize("point", of_world(twelve(0), 4))
def test_ten_steps_equal_one_process_4(rank, world, point, curves):
    check(point, curves)


@pytest.mark.long
@ranks(2, 3, 4)
@pytest.mark.parametrize("seed", range(1, 5))
def test_ten_steps_on_every_mesh_and_grid_equal_one_process(rank, world, seed, curves):
    """All meshes of so many ranks with all their grids, the rest of each drawn anew for each seed."""
    draw = random.Random(seed)
    for point in [options(mesh, draw) for mesh in MESHES]:
        if point.world == world:
            try:
                check(point, curves)
            except AssertionError as error:
                raise AssertionError(f"{point}: {error}") from None


# ---- mutants: each does one thing as if a rank were alone ------------------------------------------------------------------


def local_positions(patch):
    real = tpattn.blocks.dropout
    patch.setattr(tpattn.blocks, "dropout", lambda x, p, key, positions: real(x, p, key, positions=torch.arange(len(positions))))


def local_heads(patch):
    real = tpattn.attention.layers.replace
    patch.setattr(tpattn.attention.layers, "replace", lambda key, first_head: real(key, first_head=0))


def no_sum(patch, axis):
    real = gradients._sum_bucket
    patch.setattr(gradients, "_sum_bucket", lambda ps, group: None if group.name == axis else real(ps, group))


def local_norm(patch):
    """Clipping by the norm of the rank's own share."""
    real = comm.all_reduce
    patch.setattr(gradients.comm, "all_reduce", lambda x, group, **o: x if x.dim() == 0 and o else real(x, group, **o))


MUTANTS = {
    "dropout by local positions": (Point(1, 2, 1, (1, 2, 1), False, "zigzag", "exchange", "3/3", False), local_positions),
    "dropout by local positions over tp": (Point(1, 1, 2, (1, 1, 1), True, "zigzag", "auto", "6/2", False), local_positions),
    "attention's dropout by local heads": (Point(1, 1, 2, (1, 1, 1), False, "zigzag", "auto", "6/2", False), local_heads),
    "no sum over dp": (Point(2, 1, 1, (1, 1, 1), False, "zigzag", "auto", "6/2", False), lambda p: no_sum(p, "dp_cp")),
    "no sum over cp": (Point(1, 2, 1, (2, 1, 1), False, "zigzag", "auto", "6/2", False), lambda p: no_sum(p, "dp_cp")),
    "no sum over tp": (Point(1, 1, 2, (1, 1, 1), True, "zigzag", "auto", "6/2", False), lambda p: no_sum(p, "world")),
    "the norm of the own share": (Point(1, 1, 2, (1, 1, 1), False, "zigzag", "auto", "6/2", False), local_norm),
}


@ranks(2)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_one_rule_the_curves_part(rank, world, mutant, curves):
    """Two steps suffice to see it; as it should be they are equal."""
    point, change = MUTANTS[mutant]
    check(point, curves, steps=2)
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        with pytest.raises((AssertionError, TpattnError), match="largest difference|still partial over tp"):
            check(point, curves, steps=2)
