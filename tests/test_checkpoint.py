"""Checkpoints: a resumed run is the uninterrupted one, on any mesh; what is broken or of another model is refused by name."""

import platform
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
    versions = {"torch": torch.__version__, "tpattn": tpattn.__version__, "python": platform.python_version()}
    assert found == {"step": 5, "mesh": mesh, "versions": versions, "about": {"config": {"a": [1, 2]}}, "skipped": []}
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
    for ending in ("draft", "removed", "left"):
        (folder / f"step_000009.{ending}").mkdir()
    (folder / "notes").mkdir()
    assert newest(folder) == folder / "step_000002"
    for path, step in ((folder, 2), (folder.parent, 2), (folder / "step_000001", 1), (folder / "step_000002", 2)):
        assert load(path, run.model, run.optimizer, ctx=run.ctx)["step"] == step
    save(folder, run.model, run.optimizer, ctx=run.ctx, step=1_234_567)  # more digits than are padded
    assert newest(folder).name == "step_1234567"
    assert load_latest(folder.parent / "nowhere", run.model, ctx=run.ctx) is None


def test_saving_again_replaces_and_a_killed_runs_draft_is_no_obstacle(saved):
    run, folder = saved
    (folder / "step_000002.draft").mkdir()
    (folder / "step_000002.draft" / "rank_0000_000.bin").write_bytes(b"half")
    (folder / "step_000001.removed").mkdir()
    run.go(2, 3)
    save(folder, run.model, run.optimizer, ctx=run.ctx, step=2)
    assert sorted(p.name for p in folder.iterdir()) == ["step_000001", "step_000002"]
    other = Run(run.ctx, seed=99)
    load(folder / "step_000002", other.model, ctx=run.ctx)
    assert all(torch.equal(value, run.state()[name]) for name, value in other.state().items())


def test_a_model_without_its_optimizer_and_an_optimizer_without_its_state(saved):
    """Weights alone can be loaded; a checkpoint of weights alone, or of another optimizer, is refused for an optimizer."""
    run, folder = saved
    other = Run(run.ctx, seed=99)
    load(folder, other.model, ctx=run.ctx)
    assert all(torch.equal(value, run.state()[name]) for name, value in other.state().items())
    sgd = torch.optim.SGD(other.model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="step_000002: the optimizer was AdamW, is now SGD; load the weights alone"):
        load(folder, other.model, sgd, ctx=run.ctx)
    save(folder / "weights", run.model, None, ctx=run.ctx, step=2)
    load(folder / "weights", other.model, ctx=run.ctx)
    with pytest.raises(CheckpointError, match="step_000002: was saved without an optimizer; load the weights alone"):
        load_latest(folder / "weights", other.model, other.optimizer, ctx=run.ctx)


def test_options_of_the_optimizer_come_back_unless_the_caller_keeps_their_own(saved):
    """Also where the parameters are grouped otherwise; not where one group had several."""
    run, folder = saved
    want = [(group["lr"], group["betas"], group["weight_decay"]) for group in run.optimizer.param_groups]
    other = Run(run.ctx, seed=99)
    for group in other.optimizer.param_groups:
        group.update(lr=1.0, betas=(0.5, 0.5))
    load(folder, other.model, other.optimizer, ctx=run.ctx, own_options=True)
    assert [group["lr"] for group in other.optimizer.param_groups] == [1.0, 1.0]
    load(folder, other.model, other.optimizer, ctx=run.ctx)
    assert [(group["lr"], group["betas"], group["weight_decay"]) for group in other.optimizer.param_groups] == want
    single = torch.optim.AdamW([{"params": [p]} for p in other.model.parameters()], lr=1.0)
    load(folder, other.model, single, ctx=run.ctx)
    assert {group["weight_decay"] for group in single.param_groups} == {0.0, 0.1} and single.param_groups[3]["lr"] == want[0][0]
    one = torch.optim.AdamW(other.model.parameters(), lr=1.0)
    with pytest.raises(CheckpointError, match="parameters of the optimizer's group 0 had different options"):
        load(folder, other.model, one, ctx=run.ctx)
    fewer = torch.optim.AdamW([p for name, p in run.model.named_parameters() if "norm" not in name])
    save(folder / "fewer", run.model, fewer, ctx=run.ctx, step=1)
    with pytest.raises(CheckpointError, match="the optimizer had no parameter .*norm"):
        load(folder / "fewer", other.model, other.optimizer, ctx=run.ctx)


def test_torchs_own_random_numbers_go_on(saved):
    """For a user's module that draws from torch's generator; weights alone leave it as it is."""
    run, folder = saved
    torch.manual_seed(3)
    save(folder, run.model, run.optimizer, ctx=run.ctx, step=3)
    want = torch.rand(3)
    load(folder, run.model, run.optimizer, ctx=run.ctx)
    assert torch.equal(torch.rand(3), want)
    torch.manual_seed(4)
    other = torch.get_rng_state()
    load(folder, run.model, ctx=run.ctx)
    assert torch.equal(torch.get_rng_state(), other)


# ---------------------------------------------------------------------------------------------------------------- bad input


def _cut(path):
    path.write_bytes(path.read_bytes()[:1000])


def _blank(path):
    path.write_bytes(bytes(path.stat().st_size))


BIN = "rank_0000_000.bin"


def _foreign(path):
    """A shard of the checkpoint before, of the same name and size."""
    shutil.copy(path.with_name("step_000001") / BIN, path / BIN)


def _linked(path):
    (path / BIN).rename(path / "x")
    (path / BIN).symlink_to("x")


BROKEN = {
    "no folder": (shutil.rmtree, "no such folder"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "no checkpoint: it has no manifest.json"),
    "manifest is cut": (lambda p: (p / "manifest.json").write_text("{"), "the checkpoint is broken: manifest.json cannot be"),
    "manifest is another": (lambda p: (p / "manifest.json").write_text("[\n 1\n]\n"), "the checkpoint is broken: manifest.json"),
    "manifest is spaced": (
        lambda p: (p / "manifest.json").write_text((p / "manifest.json").read_text() + " "),
        "the checkpoint is broken: manifest.json cannot be read: its text was changed",
    ),
    "format is newer": (
        lambda p: (p / "manifest.json").write_text((p / "manifest.json").read_text().replace('"format": 2', '"format": 7')),
        "manifest.json is of format 7; this version of tpattn reads format 2",
    ),
    "index is missing": (lambda p: (p / "metadata.json").unlink(), "the checkpoint is broken: metadata.json is missing"),
    "index is cut": (lambda p: _cut(p / "metadata.json"), r"the checkpoint is broken: metadata.json has 1000 bytes of \d+"),
    "data is missing": (lambda p: (p / BIN).unlink(), f"the checkpoint is broken: {BIN} is missing"),
    "data is cut": (lambda p: _cut(p / BIN), rf"the checkpoint is broken: {BIN} has 1000 bytes of \d+"),
    "data is zero": (lambda p: _blank(p / BIN), f"the checkpoint is broken: {BIN}: the SHA-256 is not that of the bytes"),
    "data is another's": (_foreign, f"the checkpoint is broken: {BIN}: the SHA-256 is not that of the bytes"),
    "data is a link": (_linked, f"the checkpoint is broken: {BIN} is not an ordinary file"),
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
@pytest.mark.parametrize("fault", ["no manifest", "data is cut", "data is zero"])
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
        with pytest.raises(CheckpointError, match="step_000001: cannot be written: on rank 0: Not a directory: "):
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
