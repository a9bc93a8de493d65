"""Saving a run: at once, or in the background while it goes on."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpattn.checkpoint import files as disk
from tpattn.checkpoint.files import CheckpointError
from tpattn.checkpoint.index import Index
from tpattn.checkpoint.tensors import entries_of, in_blocks, options_of, tensors_of
from tpattn.mesh import ParallelContext
from tpattn.training import first_fault


def processes(ctx: ParallelContext, group: Any = None) -> dict[str, Any]:
    """Who takes part, in torch.distributed.checkpoint's words."""
    return {"no_dist": True} if ctx.world.size == 1 else {"process_group": group or ctx.world.group}


def raise_on_all(fault: str, ctx: ParallelContext) -> None:
    """CheckpointError on every rank with the first rank's fault that is not ""."""
    fault = first_fault(fault, ctx)
    if fault:
        raise CheckpointError(fault)


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    ctx: ParallelContext,
    step: int,
    about: Mapping[str, Any] | None = None,
    keep: int = 0,
) -> Path:
    """The new folder `folder`/step_NNNNNN with everything a run needs to go on after `step` steps. Every rank calls it.

    optimizer   None keeps the weights alone; else its state, its options, and the state of torch's generators are kept too
    about       JSON values to keep beside it: the run's config, for example
    keep        when the new one is on disk, older ones than the `keep` newest are removed; 0 = all stay
    raises      CheckpointError on every rank; what was there before is then still there
    """
    job = _prepare(folder, model, optimizer, ctx, step, about, keep, copy=False)
    job.run(ctx.world.group)
    return job.final


class Saver:
    """Saves a run while it goes on: `save` copies the tensors, a thread writes them; one save at a time.

        with Saver(folder, ctx=ctx, keep=3) as saver:
            ... saver.save(model, optimizer, step=step, about=about)

    Every rank makes one (collective: it has a process group of its own, so that its messages never meet the run's) and makes
    the same calls. `save` waits for the save before, if that still runs; what went wrong in it is raised then, or by `wait`.
    Leaving the `with` block waits; the last save is on disk afterwards. The arguments are those of the function `save`.
    """

    def __init__(self, folder: str | os.PathLike[str], *, ctx: ParallelContext, keep: int = 0) -> None:
        self.folder, self.ctx, self.keep = Path(folder).absolute(), ctx, keep
        self._group = ctx.group_for_files() if ctx.world.size > 1 else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        ctx.on_close.append(self._join)

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, step: int, about: Mapping[str, Any] | None = None
    ) -> Path:
        """Begin to save; the folder that will be there when it is done.

        raises      CheckpointError for what cannot be saved, and for what went wrong in the save before
        """
        self.wait()
        job = _prepare(self.folder, model, optimizer, self.ctx, step, about, self.keep, copy=True)

        def write() -> None:
            try:
                job.run(self._group)
            except BaseException as error:  # raised in the run's own thread, by `wait`
                self._error = error

        self._thread = threading.Thread(target=write, name=f"tpattn saves step {step}", daemon=True)
        self._thread.start()
        return job.final

    def wait(self) -> None:
        """Return when nothing is being saved any more.

        raises      what went wrong, once
        """
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.wait()
        else:  # the run's own error is the one to show
            self._join()


class _Job:
    """One save, with all that it needs from the run."""

    def __init__(self, final: Path, blocks: dict[str, Tensor], index: Index, ctx: ParallelContext, keep: int) -> None:
        self.final, self.blocks, self.index, self.ctx, self.keep = final, blocks, index, ctx, keep

    def run(self, group: Any) -> None:
        """Write it. Collective over `group`."""
        import torch.distributed.checkpoint as dcp  # 0.2 s, not at the import of tpattn

        from tpattn.checkpoint import storage

        writer = storage.Writer(self.final, self.ctx.world.rank, self.index, self.keep)
        try:
            storage.run(
                lambda: dcp.save(self.blocks, storage_writer=writer, **processes(self.ctx, group)),
                f"{self.final}: cannot be written",
            )
        finally:
            writer.close()


def _prepare(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    ctx: ParallelContext,
    step: int,
    about: Mapping[str, Any] | None,
    keep: int,
    copy: bool,
) -> _Job:
    from tpattn.checkpoint import storage

    for name, number in (("step", step), ("keep", keep)):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 10**18:
            raise CheckpointError(f"{name}={number!r}: needed: a whole number from 0 on, below 10**18")
    if about is not None and not isinstance(about, Mapping):
        raise CheckpointError(f"about={about!r}: needed: a mapping of names to JSON values")
    storage.quiet_without_group()  # in the run's own thread, which owns the filters
    tensors = tensors_of(model, optimizer, ctx)
    index = Index(
        step=step,
        mesh={"dp": ctx.dp.size, "cp": ctx.cp.size, "tp": ctx.tp.size},
        versions={"tpattn": sys.modules["tpattn"].__version__, "torch": torch.__version__, "python": platform.python_version()},
        about=disk.json_values(dict(about or {})),
        optimizer=options_of(model, optimizer),
        tensors=entries_of(tensors),
    )
    return _Job(Path(folder).absolute() / disk.name_of(step), in_blocks(tensors, model, ctx, copy), index, ctx, keep)
