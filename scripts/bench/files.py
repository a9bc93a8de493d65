"""What the topic `checkpoint` times: saving, loading and verifying files, steps beside a save, a restart after SIGKILL."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from bench.race import Side
from tpattn import ParallelContext, Transformer, checkpoint
from tpattn.checkpoint import files as disk
from tpattn.checkpoint.tensors import in_blocks, tensors_of
from tpattn.config import load, parts
from tpattn.training import adamw, train

ROOT = Path(__file__).resolve().parents[2]


def _at_end(act: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Call it when this process ends, the last one first. (Processes of multiprocessing end without `atexit`.)"""
    Finalize(None, act, args, options, exitpriority=len(_ends))
    _ends.append(act)


_ends: list[Any] = []


def _folder(ctx: ParallelContext | None = None) -> Path:
    """A new folder, the same on all ranks, removed at the end of this process."""
    path = tempfile.mkdtemp(prefix="tpattn-benchmark-")
    if ctx is not None:
        from tpattn.training import from_rank0

        own, path = path, from_rank0(path, ctx)
        if own != path:
            shutil.rmtree(own)
    _at_end(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def _run(ranks: int, M: int, layers: int) -> tuple[ParallelContext, Transformer, torch.optim.Optimizer]:
    ctx = ParallelContext.from_env(dp=1, tp=ranks)
    model = Transformer(8000, M, layers, num_heads=8, seed=0, ctx=ctx)
    optimizer = adamw(model, lr=1e-3)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return ctx, model, optimizer


def move_files(rank: int, ranks: int, way: str, M: int, layers: int) -> Callable[[], Any]:
    """way: save or load, with "torch " before it by plain torch.distributed.checkpoint; or hash, which verifies alone."""
    ctx, model, optimizer = _run(ranks, M, layers)
    folder = _folder(ctx)
    blocks = in_blocks(tensors_of(model, optimizer, ctx), model, ctx)
    path = checkpoint.save(folder, model, optimizer, ctx=ctx, step=0)
    dcp.save(blocks, checkpoint_id=folder / "torch")
    files = disk.read_manifest(path)
    mine = disk.share_of(files, rank, ranks)

    numbers = itertools.count()

    def again() -> None:
        number = next(numbers)
        dcp.save(blocks, checkpoint_id=folder / f"again{number}")
        if rank == 0:  # as tpattn does: the one before goes when the new one is there
            shutil.rmtree(folder / f"again{number - 1}", ignore_errors=True)

    ways: dict[str, Callable[[], Any]] = {
        "torch save": again,
        "save": lambda: checkpoint.save(folder, model, optimizer, ctx=ctx, step=0),
        "torch load": lambda: dcp.load(blocks, checkpoint_id=folder / "torch"),
        "load": lambda: checkpoint.load(path, model, optimizer, ctx=ctx),
        "hash": lambda: disk.changed_files(path, files, mine, torch.get_num_threads()),
    }
    return ways[way]


def bytes_of(M: int, layers: int) -> int:
    """Bytes of such a checkpoint's tensors."""
    model = Transformer(8000, M, layers, num_heads=8, ctx=ParallelContext.single())
    return 3 * 4 * sum(p.numel() for p in model.parameters())


def steps(rank: int, ranks: int, count: int, saves: bool) -> Callable[[], Any]:
    """`count` steps of the quickstart's model and text, over tp, with one save in the background after the first."""
    cfg = load(["experiment=quickstart", f"parallel.tp={ranks}", "parallel.cp=1", "parallel.dp=1"], ROOT / "configs")
    ctx = ParallelContext.from_config(cfg.parallel)
    run = parts(cfg, ctx)
    saver = checkpoint.Saver(_folder(ctx), ctx=ctx, keep=1)

    def save(step: int) -> None:
        if saves and step == 1:
            saver.save(run.model, run.optimizer, step=step)

    def go() -> None:
        plan: dict[str, Any] = {"ctx": ctx, "schedule": run.schedule, "layout": run.layout, "log_every": 10**9}
        train(run.model, run.optimizer, run.batches, **plan, last=count, save=save, save_every=1)
        saver.wait()

    return go


def restart(ranks: int) -> Callable[[], Any]:
    """From SIGKILL of the last rank to the line of the first step that its successor makes: the quickstart's model and text."""
    if not ranks:  # the tiny call
        return lambda: None
    folder = _folder()
    words = ["experiment=quickstart", f"parallel.tp={ranks}", "parallel.cp=1", f"run.dir={folder / 'run'}", "train.steps=1000000"]
    words += ["train.checkpoint_every=5", "train.log_every=1", "parallel.sequence_parallel=true"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "100"]
    process = subprocess.Popen(
        [sys.executable, *launch, str(ROOT / "scripts" / "train.py"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    _at_end(process.wait)
    _at_end(process.terminate)

    def until(pattern: str) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if re.match(pattern, line):
                return
        sys.exit("torchrun ended")

    until(r"step +6/")  # there is a checkpoint

    def go() -> None:
        os.kill(_ranks(process.pid)[-1], signal.SIGKILL)
        until("run ")  # the next attempt
        until("step ")

    return go


def _ranks(agent: int) -> list[int]:
    """The processes that torchrun started, in the order of their starts."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == agent:
            pids.append((int(fields[19]), int(path.parent.name)))
    return [pid for _, pid in sorted(pids)]


def sides(quick: bool, ranks: int) -> list[list[Side]]:
    """The races of the topic."""
    M, layers = (64, 2) if quick else (512, 12)
    sizes, tiny = {"M": M, "layers": layers}, {"M": 64, "layers": 1}
    names = ("torch load", "load", "hash"), ("torch save", "save")
    races = [[Side((way,), move_files, {**sizes, "way": way}, tiny) for way in ways] for ways in names]
    count = 5 if quick else 50
    labels = {False: f"{count} steps", True: f"{count} steps, 1 save beside them"}
    races.append([Side((labels[s],), steps, {"count": count, "saves": s}, {"count": 2}) for s in (False, True)])
    races.append([Side(("restart",), restart, {"ranks": ranks}, {"ranks": 0}, sharded=False)])
    return races
