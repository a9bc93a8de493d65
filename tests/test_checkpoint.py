"""Checkpoints: a resumed run is the uninterrupted one, on any mesh; what is broken or of another model is refused by name."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from helpers import close
from pool import ranks
from small_run import Curve, T, small, text

import tpattn
from tpattn import ParallelContext, SequenceLayout
from tpattn.checkpoint import CheckpointError, load, load_latest, newest, save
from tpattn.training import Schedule, adamw, train

HEADS = {"num_heads": 6, "num_kv_heads": 2}


class Run:
    """A model and its optimizer on a mesh, and the loss and gradient norm of its steps."""

    def __init__(self, ctx, **options):
        self.ctx, self.curve = ctx, Curve()
        self.model = small(ctx, **{**HEADS, **options})
        self.optimizer = adamw(self.model, lr=0.03)

    def go(self, first, last):
        """Steps first + 1 to last of 12."""
        layout = SequenceLayout.zigzag(T, self.ctx.cp.size)
        plan = {"ctx": self.ctx, "schedule": Schedule(0.03, 12, 3), "layout": layout, "seed": 7}
        train(self.model, self.optimizer, text(), **plan, done=first, last=last, record=self.curve)
        return self

    def state(self):
        return {name: value.clone() for name, value in tpattn.whole_state_dict(self.model).items()}


def check_resume(folder, ctx, **options):
    """8 steps at once, and 5, a save, a new start from the files, 3 more."""
    want = Run(ctx, **options).go(0, 8)
    first = Run(ctx, **options).go(0, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing to ignore
        path = save(folder, first.model, first.optimizer, ctx=ctx, step=5, about={"config": {"a": [1, 2]}})
        second = Run(ctx, **{**options, "seed": 99})  # other initial values: all must come from the files
        found = load_latest(folder, second.model, second.optimizer, ctx=ctx)
    assert path == Path(folder) / "step_000005"
    mesh = {"dp": ctx.dp.size, "cp": ctx.cp.size, "tp": ctx.tp.size}
    assert found == {"step": 5, "mesh": mesh, "torch": torch.__version__, "about": {"config": {"a": [1, 2]}}}
    second.go(5, 8)
    assert first.curve.rows + second.curve.rows == want.curve.rows
    for name, value in second.state().items():
        assert torch.equal(value, want.state()[name]), name
    assert [p.name for p in Path(folder).iterdir()] == ["step_000005"]


@pytest.mark.parametrize(
    "options", [{}, {"tied": True, "dropout": 0.1}, {"dtype": torch.float32, "compute_dtype": torch.bfloat16}]
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, options):
    """Losses, gradient norms and weights, on one process."""
    check_resume(tmp_path / "new", ParallelContext.single(), **options)


@ranks(2, 4)
@pytest.mark.parametrize("mesh", ["tp", "cp", "dp"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit_on_the_same_mesh(rank, world, mesh, tmp_path):
    """Two ranks on one axis; four with tp or cp beside it."""
    sizes = {mesh: 2, **({} if world == 2 else {"cp" if mesh == "tp" else "tp": 2})}
    with ParallelContext.from_env(**{"dp": 1, **sizes}, timeout=60) as ctx:
        check_resume(tmp_path, ctx, sequence_parallel=ctx.tp.size > 1)


@ranks(4)
def test_a_run_saved_on_one_mesh_goes_on_on_another(rank, world, tmp_path):
    """Saved on cp 2 x tp 2, loaded on one process (by every rank), on dp 2 x tp 2 and on cp 4; and from one process on tp 2."""
    with ParallelContext.from_env(cp=2, tp=2, timeout=60) as ctx:
        run = Run(ctx, sequence_parallel=True).go(0, 3)
        save(tmp_path, run.model, run.optimizer, ctx=ctx, step=3)
        saved, want = run.state(), run.go(3, 6).curve.rows[3:]
    alone = ParallelContext.single()
    one = Run(alone, seed=99)
    assert load_latest(tmp_path, one.model, one.optimizer, ctx=alone)["mesh"] == {"dp": 1, "cp": 2, "tp": 2}
    assert all(torch.equal(value.view(-1), saved[name].view(-1)) for name, value in one.state().items())
    close(torch.tensor(one.go(3, 6).curve.rows), torch.tensor(want), 1e-5)
    for sizes in ({"dp": 2, "tp": 2}, {"dp": 1, "cp": 4}):
        with ParallelContext.from_env(**sizes, timeout=60) as ctx:
            other = Run(ctx, seed=99)
            load(tmp_path, other.model, other.optimizer, ctx=ctx)
            assert all(torch.equal(value, saved[name]) for name, value in other.state().items())
            other.go(3, 6)
            close(torch.tensor(other.curve.rows, dtype=torch.float64), torch.tensor(want, dtype=torch.float64), 1e-9)
    if rank == 0:
        save(tmp_path / "one", one.model, one.optimizer, ctx=alone, step=6)
    with ParallelContext.from_env(dp=2, tp=2, timeout=60) as ctx:
        tpattn.comm.agree([0], ctx.world)  # rank 0 has written
        last = Run(ctx, seed=99)
        assert load(tmp_path / "one", last.model, last.optimizer, ctx=ctx)["step"] == 6
        assert all(torch.equal(value.view(-1), one.state()[name].view(-1)) for name, value in last.state().items())


# ------------------------------------------------------------------------------------------------------------- which is taken


@pytest.fixture
def saved(tmp_path):
    """A run on one process with checkpoints of steps 1 and 2, and its folder."""
    run = Run(ParallelContext.single())
    for step in (1, 2):
        run.go(step - 1, step)
        save(tmp_path / "checkpoints", run.model, run.optimizer, ctx=run.ctx, step=step)
    return run, tmp_path / "checkpoints"


def test_the_newest_complete_one_is_taken_and_a_path_may_name_run_folder_or_checkpoint(saved):
    run, folder = saved
    (folder / "step_000009.tmp").mkdir()
    (folder / "step_000010.old").mkdir()
    (folder / "notes").mkdir()
    assert newest(folder) == folder / "step_000002"
    for path, step in ((folder, 2), (folder.parent, 2), (folder / "step_000001", 1), (folder / "step_000002", 2)):
        assert load(path, run.model, run.optimizer, ctx=run.ctx)["step"] == step
    save(folder, run.model, run.optimizer, ctx=run.ctx, step=1_234_567)  # more digits than are padded
    assert newest(folder).name == "step_1234567"
    assert load_latest(folder.parent / "nowhere", run.model, ctx=run.ctx) is None


def test_saving_again_replaces_and_a_killed_runs_draft_is_no_obstacle(saved):
    run, folder = saved
    (folder / "step_000002.tmp").mkdir()
    (folder / "step_000002.tmp" / "__0_0.distcp").write_bytes(b"half")
    run.go(2, 3)
    save(folder, run.model, run.optimizer, ctx=run.ctx, step=2)
    assert sorted(p.name for p in folder.iterdir()) == ["step_000001", "step_000002"]
    other = Run(run.ctx, seed=99)
    load(folder / "step_000002", other.model, ctx=run.ctx)
    assert all(torch.equal(value, run.state()[name]) for name, value in other.state().items())


def test_a_model_without_its_optimizer_and_an_optimizer_without_its_state(saved):
    """Weights alone can be loaded; a checkpoint of weights alone leaves an optimizer new."""
    run, folder = saved
    other = Run(run.ctx, seed=99)
    load(folder, other.model, ctx=run.ctx)
    assert all(torch.equal(value, run.state()[name]) for name, value in other.state().items())
    save(folder / "weights", run.model, None, ctx=run.ctx, step=2)
    load(folder / "weights", other.model, other.optimizer, ctx=run.ctx)
    assert not other.optimizer.state


# ---------------------------------------------------------------------------------------------------------------- bad input


def _cut(path):
    path.write_bytes(path.read_bytes()[:1000])


def _blank(path):
    path.write_bytes(bytes(path.stat().st_size))


BROKEN = {
    "no folder": (shutil.rmtree, "no such folder"),
    "no list": (lambda p: (p / "state.json").unlink(), "no checkpoint: it has no state.json"),
    "list is cut": (lambda p: (p / "state.json").write_text("{"), "the checkpoint is broken: state.json cannot be read"),
    "list is another": (lambda p: (p / "state.json").write_text("[1]"), "state.json is of format None; this version of tpattn"),
    "format is newer": (
        lambda p: (p / "state.json").write_text(json.dumps({**json.loads((p / "state.json").read_text()), "format": 7})),
        "state.json is of format 7; this version of tpattn reads format 1",
    ),
    "index is missing": (lambda p: (p / ".metadata").unlink(), r"the checkpoint is broken: \.metadata is missing"),
    "index is cut": (lambda p: _cut(p / ".metadata"), r"the checkpoint is broken: \.metadata has 1000 bytes of \d+"),
    "data is missing": (lambda p: (p / "__0_0.distcp").unlink(), "the checkpoint is broken: __0_0.distcp is missing"),
    "data is cut": (lambda p: _cut(p / "__0_0.distcp"), r"the checkpoint is broken: __0_0.distcp has 1000 bytes of \d+"),
    "data is zero": (lambda p: _blank(p / "__0_0.distcp"), "the checkpoint is broken, remove it, .* older one: on rank 0: "),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_checkpoint_is_an_error_that_names_it(saved, fault, capfd):
    """And nothing else is said; the one before it can still be loaded."""
    run, folder = saved
    path = folder / "step_000002"
    breaks, told = BROKEN[fault]
    breaks(path)
    with pytest.raises(CheckpointError, match=f"^{path}: {told}"):
        load(path, run.model, run.optimizer, ctx=run.ctx)
    assert capfd.readouterr() == ("", "")
    assert load(folder / "step_000001", run.model, run.optimizer, ctx=run.ctx)["step"] == 1


@ranks(2)
@pytest.mark.parametrize("fault", ["no list", "data is cut", "data is zero"])
def test_a_broken_checkpoint_is_the_same_error_on_every_rank(rank, world, fault, tmp_path):
    with ParallelContext.from_env(dp=1, tp=2, timeout=60) as ctx:
        run = Run(ctx).go(0, 1)
        path = save(tmp_path, run.model, run.optimizer, ctx=ctx, step=1)
        breaks, told = BROKEN[fault]
        if rank == 0:
            breaks(path)
        tpattn.comm.agree([0], ctx.world)
        with pytest.raises(CheckpointError, match=f"^{path}: {told}"):
            load(path, run.model, run.optimizer, ctx=ctx)
        run.go(1, 2)  # the ranks are still in step


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ffn": 22}, r"blocks.0.mlp.gate.weight is \[21, 24\] float64, in the model \[22, 24\] float64; .*, and 2 more"),
        ({"bias": True}, "blocks.0.attention.qkv.q_bias is missing; "),
        ({"tied": True}, "head.weight is not in the model"),
        ({"dtype": torch.float32}, "embedding.weight is .* float64, in the model .* float32"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(saved, options, told):
    run, folder = saved
    other = Run(run.ctx, **options)
    before = other.state()
    with pytest.raises(CheckpointError, match=f"^{folder}/step_000002: of another model: {told}"):
        load(folder, other.model, other.optimizer, ctx=run.ctx)
    assert all(torch.equal(value, before[name]) for name, value in other.state().items())


@ranks(2)
def test_a_place_that_cannot_be_written_is_the_same_error_on_every_rank_and_nothing_is_lost(rank, world, tmp_path):
    with ParallelContext.from_env(dp=1, tp=2, timeout=60) as ctx:
        run = Run(ctx).go(0, 1)
        if rank == 0:
            (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="step_000001: cannot be written: Not a directory: "):
            save(tmp_path / "file", run.model, run.optimizer, ctx=ctx, step=1)
        save(tmp_path / "good", run.model, run.optimizer, ctx=ctx, step=1)
        assert load(tmp_path / "good", run.model, run.optimizer, ctx=ctx)["step"] == 1


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    run, other = Run(ParallelContext.single()), Run(ParallelContext.single())
    with pytest.raises(CheckpointError, match=r"holds parameters that are not the model's, of shapes \[\[29, 24\], "):
        save(tmp_path, run.model, other.optimizer, ctx=run.ctx, step=1)
    assert not list(tmp_path.iterdir())


def test_an_optimizer_that_keeps_other_things_than_tensors_is_refused(tmp_path):
    run = Run(ParallelContext.single()).go(0, 1)
    p = next(run.model.parameters())
    run.optimizer.state[p]["history"] = [1, 2]
    with pytest.raises(CheckpointError, match=r"AdamW keeps history=\[1, 2\] for embedding.weight: only tensors are saved"):
        save(tmp_path, run.model, run.optimizer, ctx=run.ctx, step=1)
