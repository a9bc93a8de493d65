"""Saved on any mesh of at most 4 ranks, loaded on any other: the same bits, and the run goes on as it would have."""

import json

import pytest
import torch
from checkpoint_files import read_tensors
from helpers import close
from pool import POOLS, ranks
from small_run import Curve, T, small, text

from tpattn import ParallelContext, SequenceLayout, shard, whole_state_dict
from tpattn.checkpoint import load, save
from tpattn.checkpoint.tensors import in_blocks, tensors_of
from tpattn.training import Schedule, adamw, train

# dp, cp, tp, divided by FSDP2, attention grid
MESHES = [
    *[(1, 1, 1, False, None), (2, 1, 1, False, None), (1, 2, 1, False, None), (1, 1, 2, False, None), (2, 1, 1, True, None)],
    *[(3, 1, 1, False, None), (1, 3, 1, False, None), (1, 1, 3, False, None), (1, 3, 1, True, None)],
    *[(4, 1, 1, False, None), (1, 4, 1, False, (2, 2, 1)), (1, 1, 4, False, None), (2, 2, 1, False, None)],
    *[(2, 1, 2, False, None), (1, 2, 2, False, (1, 1, 2)), (2, 1, 2, True, None), (2, 2, 1, True, None)],
]
NAMES = ["x".join(map(str, m[:3])) + "-fsdp" * m[3] for m in MESHES]


def of_world(world):
    return pytest.mark.parametrize("name", [n for n, m in zip(NAMES, MESHES, strict=True) if m[0] * m[1] * m[2] == world])


class Run:
    """A run on one of MESHES, in float64, with heads and widths that tp does not divide."""

    def __init__(self, name, seed=5):
        dp, cp, tp, fsdp, grid = MESHES[NAMES.index(name)]
        self.ctx, self.curve = ParallelContext.from_env(dp=dp, cp=cp, tp=tp, timeout=60), Curve()
        self.model = small(self.ctx, grid, num_heads=6, num_kv_heads=2, seed=seed, tied=True, sequence_parallel=tp > 1)
        self.model = shard(self.model, self.ctx) if fsdp else self.model
        self.optimizer = adamw(self.model, lr=0.03)

    def go(self, first, last):
        layout = SequenceLayout.zigzag(T, self.ctx.cp.size)
        plan = {"ctx": self.ctx, "schedule": Schedule(0.03, 12, 3), "layout": layout, "seed": 7}
        train(self.model, self.optimizer, text(), **plan, done=first, last=last, record=self.curve)
        return self.curve.rows


@ranks(1, 2, 3, 4)
def save_all(rank, folder, names):
    """On each of these meshes two steps, a checkpoint, and what the next two steps are."""
    for name in names:
        run = Run(name)
        run.go(0, 2)
        save(folder / name, run.model, run.optimizer, ctx=run.ctx, step=2)
        rows = run.go(2, 4)
        if rank == 0:
            (folder / name / "next.json").write_text(json.dumps(rows[2:]))
        run.ctx.close()


SOME = ["1x1x1", "2x1x1-fsdp", "1x1x3", "1x2x2", "2x1x2-fsdp"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, request):
    """A folder with a run's folder for every mesh; for SOME of them without --all."""
    folder = tmp_path_factory.mktemp("meshes")
    for world in (1, 2, 3, 4):
        names = [n for n, m in zip(NAMES, MESHES, strict=True) if m[0] * m[1] * m[2] == world]
        names = [n for n in names if n in SOME or request.config.getoption("--all")]
        POOLS.run(save_all.body, world, {"folder": folder, "names": names, "world": world}, 100)
    return folder


def check_loads(rank, name, saved):
    """Every checkpoint into one model, each bit for bit: weights undivided, optimizer state by this rank's part of it.

    One of them, another for each mesh, goes on for two steps as the run that saved it did.
    """
    run = Run(name, seed=99)
    sources = [n for n in NAMES if (saved / n).exists()]
    follow = sources[(7 * NAMES.index(name) + 3) % len(sources)]
    for source in [*(n for n in sources if n != follow), follow]:
        load(saved / source, run.model, run.optimizer, ctx=run.ctx)
        want = read_tensors(saved / source / "step_000002")
        for key, x in whole_state_dict(run.model).items():
            if key != "head.weight":  # tied
                assert torch.equal(x.flatten(), want[f"model.{key}"].flatten()), (source, key)
        held = in_blocks(tensors_of(run.model, run.optimizer, run.ctx), run.model, run.ctx)
        assert {k for k in held if k[:6] != "random"} <= set(want)
        for key, block in held.items():
            if key.startswith("optimizer."):
                part = want[key]
                for dim, (start, length) in enumerate(zip(block.starts, block.share.shape, strict=True)):
                    part = part.narrow(dim, start, length)
                assert torch.equal(block.share, part), (source, key)
    after = json.loads((saved / follow / "next.json").read_text())
    close(torch.tensor(run.go(2, 4), dtype=torch.float64), torch.tensor(after, dtype=torch.float64), 1e-9)


@pytest.mark.parametrize("name", ["1x1x1"])
@ranks(1)
def test_every_mesh_to_one_process(rank, world, name, saved):
    """A process group of one rank."""
    check_loads(rank, name, saved)


@pytest.mark.sample(1)
@of_world(2)
@ranks(2)
def test_every_mesh_to_two_ranks(rank, world, name, saved):
    check_loads(rank, name, saved)


@pytest.mark.sample(1)
@of_world(3)
@ranks(3)
def test_every_mesh_to_three_ranks(rank, world, name, saved):
    check_loads(rank, name, saved)


@pytest.mark.sample(2)
@of_world(4)
@ranks(4)
def test_every_mesh_to_four_ranks(rank, world, name, saved):
    check_loads(rank, name, saved)
