"""Saving in the background: what is saved is what was there at the call, one at a time, and nothing that goes wrong is lost."""

import os
import resource
import threading
import time

import pytest
import torch
from checkpoint_files import read_tensors
from pool import ranks
from small_run import small

import tpattn
from tpattn import ParallelContext
from tpattn.checkpoint import CheckpointError, Saver, complete, load, save, storage
from tpattn.training import adamw


def make(ctx, seed=5):
    """A model and an optimizer that has made a step."""
    model = small(ctx, num_heads=6, num_kv_heads=2, seed=seed)
    optimizer = adamw(model, lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer


def spoil(model, optimizer):
    """Change all that a save reads, in place."""
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7)
            for x in optimizer.state[p].values():
                x.fill_(7)


@pytest.fixture
def slow_files(monkeypatch):
    """Writing begins only when the returned event is set."""
    go = threading.Event()
    begin = storage.Writer.write_data
    monkeypatch.setattr(storage.Writer, "write_data", lambda self, *a: go.wait(20) and begin(self, *a))
    return go


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path, slow_files):
    ctx = ParallelContext.single()
    model, optimizer = make(ctx)
    slow_files.set()
    save(tmp_path / "at once", model, optimizer, ctx=ctx, step=1)
    slow_files.clear()
    with Saver(tmp_path, ctx=ctx) as saver:
        path = saver.save(model, optimizer, step=1)
        spoil(model, optimizer)
        assert not path.exists()
        slow_files.set()
    want, got = read_tensors(tmp_path / "at once" / path.name), read_tensors(path)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert not any(torch.equal(got[f"model.{name}"], p) for name, p in model.named_parameters())  # a test that can fail


def test_one_save_at_a_time_and_the_last_is_on_disk_at_the_end(tmp_path, slow_files):
    ctx = ParallelContext.single()
    model, optimizer = make(ctx)
    with Saver(tmp_path, ctx=ctx, keep=2) as saver:
        saver.save(model, optimizer, step=1)
        threading.Timer(0.2, slow_files.set).start()
        saver.save(model, optimizer, step=2)  # waits for the first
        assert [p.name for p in complete(tmp_path)][-1:] == ["step_000001"]
        saver.save(model, optimizer, step=3)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step_000002", "step_000003"]
    assert not [t for t in threading.enumerate() if t.name.startswith("tpattn saves")]


def test_closing_the_context_waits_for_the_files(tmp_path, slow_files):
    ctx = ParallelContext.single()
    saver = Saver(tmp_path, ctx=ctx)
    saver.save(*make(ctx), step=1)
    threading.Timer(0.2, slow_files.set).start()
    ctx.close()
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_a_fault_is_raised_by_the_next_call_once_and_the_runs_own_error_first(tmp_path, monkeypatch):
    ctx = ParallelContext.single()
    model, optimizer = make(ctx)
    (tmp_path / "file").write_text("")
    saver = Saver(tmp_path / "file", ctx=ctx)
    saver.save(model, optimizer, step=1)
    with pytest.raises(CheckpointError, match="step_000001: cannot be written: on rank 0: Not a directory"):
        saver.save(model, optimizer, step=2)
    saver.wait()
    with pytest.raises(CheckpointError, match="step_000003"), saver:
        saver.save(model, optimizer, step=3)
    with pytest.raises(ZeroDivisionError), saver:
        saver.save(model, optimizer, step=4)
        raise ZeroDivisionError
    with pytest.raises(CheckpointError, match="step_000004"):
        saver.wait()
    optimizer.state[next(model.parameters())]["x"] = "word"
    with pytest.raises(CheckpointError, match="only tensors are saved"):  # found in the run's own thread
        saver.save(model, optimizer, step=5)


def test_two_savers_on_one_folder_do_not_mix(tmp_path, slow_files):
    """The second says what is wrong, and the first one's draft stays."""
    ctx = ParallelContext.single()
    model, optimizer = make(ctx)
    one, two = Saver(tmp_path, ctx=ctx), Saver(tmp_path, ctx=ctx)
    one.save(model, optimizer, step=1)
    while not (tmp_path / "step_000001.draft").exists():
        time.sleep(0.01)
    two.save(model, optimizer, step=1)
    with pytest.raises(CheckpointError, match="another save is writing there"):
        two.wait()
    slow_files.set()
    one.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert read_tensors(tmp_path / "step_000001")


def test_the_folder_is_that_of_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ctx = ParallelContext.single()
    model, optimizer = make(ctx)
    with Saver("here", ctx=ctx) as saver:
        (tmp_path / "sub").mkdir()
        monkeypatch.chdir(tmp_path / "sub")
        assert saver.save(model, optimizer, step=1) == tmp_path / "here" / "step_000001"


def test_switches_that_decide_which_state_there_is_must_be_as_they_were(tmp_path):
    ctx = ParallelContext.single()
    model, optimizer = make(ctx)
    save(tmp_path, model, optimizer, ctx=ctx, step=1)
    other = torch.optim.AdamW(model.parameters(), amsgrad=True)
    with pytest.raises(CheckpointError, match="the optimizer's amsgrad was False, is now True"):
        load(tmp_path, model, other, ctx=ctx, own_options=True)


@ranks(2, 4)
def test_ranks_save_while_their_own_messages_go_on(rank, world, tmp_path):
    """The saver's messages and the run's never meet: 40 sums while 4 saves are written."""
    with ParallelContext.from_env(cp=world // 2, tp=2, timeout=60) as ctx:
        model, optimizer = make(ctx)
        with Saver(tmp_path, ctx=ctx, keep=1) as saver:
            for step in range(4):
                saver.save(model, optimizer, step=step)
                for i in range(10):
                    assert tpattn.comm.agree([rank * i], ctx.world) == [[r * i] for r in range(world)]
        other, optimizer2 = make(ctx, seed=6)
        assert load(tmp_path, other, optimizer2, ctx=ctx)["step"] == 3
        assert all(torch.equal(a, b) for a, b in zip(tpattn.whole_state_dict(model).values(),
                                                     tpattn.whole_state_dict(other).values(), strict=True))


@ranks(2)
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_one_error_on_all_ranks_and_nothing_that_was_there_is_lost(rank, world, background, tmp_path):
    """Only rank 1 has too little room; the draft goes, so that a full disk is no fuller; the run can go on."""
    with ParallelContext.from_env(dp=2, timeout=60) as ctx:
        model, optimizer = make(ctx)
        path = save(tmp_path, model, optimizer, ctx=ctx, step=1)
        before = read_tensors(path)
        spoil(model, optimizer)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        saver = Saver(tmp_path, ctx=ctx)
        try:
            if rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
            with pytest.raises(CheckpointError, match="step_000002: cannot be written: on rank 1: File too large"):
                if background:
                    saver.save(model, optimizer, step=2)
                    saver.wait()
                else:
                    save(tmp_path, model, optimizer, ctx=ctx, step=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        tpattn.comm.agree([0], ctx.world)
        assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
        assert all(torch.equal(x, before[name]) for name, x in read_tensors(path).items())
        saver.save(model, optimizer, step=2)
        saver.wait()
        assert len(complete(tmp_path)) == 2


@ranks(2)
def test_a_folder_that_not_all_see_is_named(rank, world, tmp_path):
    """As on two hosts without a shared disk."""
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        model, optimizer = make(ctx)
        with pytest.raises(CheckpointError, match="on rank 1: No such file or directory"):
            save(tmp_path / str(rank), model, optimizer, ctx=ctx, step=1)
        path = save(tmp_path / "both", model, optimizer, ctx=ctx, step=1)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:  # another checkpoint under the same name
                read = type(path).read_bytes
                patch.setattr(type(path), "read_bytes", lambda self: read(self) + b" " * (self.name == "manifest.json"))
            with pytest.raises(CheckpointError, match="rank 1 sees another checkpoint there than rank 0"):
                load(path, model, optimizer, ctx=ctx)


def test_a_place_where_nothing_can_be_written():
    ctx = ParallelContext.single()
    model, optimizer = make(ctx)
    if not os.path.isdir("/proc/self"):
        pytest.skip("no /proc, whose folders take no files from anybody")
    with pytest.raises(CheckpointError, match="/proc/self/step_000001: cannot be written: on rank 0: "):
        save("/proc/self", model, optimizer, ctx=ctx, step=1)


@ranks(2, 3)
def test_large_tensors_are_divided_into_files_which_the_ranks_verify_in_turn(rank, world, tmp_path):
    with ParallelContext.from_env(tp=world, timeout=60) as ctx, pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "_FILE_BYTES", 1000)
        model, optimizer = make(ctx)
        path = save(tmp_path, model, optimizer, ctx=ctx, step=1)
        files = sorted(p.name for p in path.glob("*.bin"))
        assert len(files) > 4 * world
        damaged = path / files[len(files) // 2]
        raw = bytearray(damaged.read_bytes())
        tpattn.comm.agree([0], ctx.world)
        if rank == 0:
            damaged.write_bytes(bytes(raw[:-1]) + bytes([raw[-1] ^ 1]))
        tpattn.comm.agree([0], ctx.world)
        with pytest.raises(CheckpointError, match=f"{damaged.name}: the SHA-256 is not that"):
            load(path, model, optimizer, ctx=ctx)


@ranks(2)
def test_a_peer_that_dies_while_files_are_written_ends_the_save_with_an_error(rank, world, tmp_path):
    """Here: its thread never comes. The wait is bounded by the context's timeout."""
    with ParallelContext.from_env(dp=2, timeout=2) as ctx:
        model, optimizer = make(ctx)
        saver = Saver(tmp_path, ctx=ctx)
        if rank == 0:
            saver.save(model, optimizer, step=1)
            begin = time.monotonic()
            with pytest.raises(Exception, match="(?i)timed? ?out|connection closed"):
                saver.wait()
            assert time.monotonic() - begin < 20
            assert not complete(tmp_path)
        else:
            time.sleep(4)


def test_weights_alone_and_back(tmp_path):
    pytest.importorskip("safetensors", reason="the extra hf")
    from tpattn.checkpoint import export_weights, import_weights

    ctx = ParallelContext.single()
    model, _ = make(ctx)
    path = export_weights(model, tmp_path / "a" / "model.safetensors", about={"x": 1})
    other, _ = make(ctx, seed=9)
    assert import_weights(other, path) == {"x": 1}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    from safetensors.torch import load_file, save_file

    state = load_file(path)
    assert {name: list(x.shape) for name, x in state.items()} == {
        name: list(x.shape) for name, x in tpattn.whole_state_dict(model).items()
    }
    save_file({**state, "more": torch.ones(2)}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"more.safetensors: of another model: .*unknown \['more'\]"):
        import_weights(other, tmp_path / "more.safetensors")
    import_weights(other, tmp_path / "more.safetensors", strict=False)
    (tmp_path / "bad.safetensors").write_bytes(b"x" * 100)
    for name, told in (("bad", "no safetensors file, or a broken one"), ("none", "No such file")):
        with pytest.raises(CheckpointError, match=f"{name}.safetensors: .*{told}"):
            import_weights(other, tmp_path / f"{name}.safetensors")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        export_weights(model, tmp_path / "file" / "model.safetensors")


@ranks(2, 4)
def test_weights_alone_from_any_mesh_to_any(rank, world, tmp_path):
    """tp 2 (x cp or FSDP2 over dp) writes, one process and the other mesh read; bit for bit."""
    pytest.importorskip("safetensors", reason="the extra hf")
    from tpattn.checkpoint import export_weights, import_weights

    with ParallelContext.from_env(dp=world // 2, tp=2, timeout=60) as ctx:
        model, _ = make(ctx)
        if world == 4:
            model = tpattn.shard(model, ctx)
        path = export_weights(model, tmp_path / f"{rank}.safetensors")  # rank 0's path counts
        assert path.name == "0.safetensors"
        want = tpattn.whole_state_dict(model)
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        other, _ = make(ctx, seed=9)
        import_weights(other, path)
        assert all(torch.equal(x, want[name]) for name, x in tpattn.whole_state_dict(other).items())
    alone, _ = make(ParallelContext.single(), seed=9)
    import_weights(alone, path)
    assert all(torch.equal(x, want[name]) for name, x in tpattn.whole_state_dict(alone).items())
