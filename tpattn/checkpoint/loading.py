"""Loading a run: verify first, then read what this rank holds, from whatever mesh the checkpoint was saved on."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpattn.checkpoint import files as disk
from tpattn.checkpoint.files import REMEDY, CheckpointError
from tpattn.checkpoint.index import Index, read_index
from tpattn.checkpoint.saving import processes, raise_on_all
from tpattn.checkpoint.tensors import in_blocks, put, restored_options, saved_random_states, targets_of
from tpattn.mesh import ParallelContext
from tpattn.training import from_rank0


class CheckpointWarning(UserWarning):
    """A checkpoint was passed over; said once, by rank 0."""


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    ctx: ParallelContext,
    own_options: bool = False,
) -> dict[str, Any]:
    """Fill model and optimizer from a checkpoint, saved on any mesh. Every rank calls it; rank 0's path counts.

    All files are verified first, each by one rank: nothing changes when one is not as it was written, or does not fit.

    path        a checkpoint, or a folder of them (its newest is taken), or a run's folder
    optimizer   gets what it kept for each parameter, and the options of its groups; then torch's generators, too, go on on this
                rank from where the rank of the same number was
    own_options True: the optimizer keeps its learning rate and other options as they are
    returns     step, mesh, versions and about, as `save` kept them
    raises      CheckpointError on every rank: not a checkpoint, broken, or of another model or optimizer
    """
    chosen = Path(from_rank0(str(disk.choose(Path(path).absolute())), ctx))
    return _fill(chosen, _verified(chosen, ctx), model, optimizer, ctx, own_options)


def load_latest(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    ctx: ParallelContext,
    own_options: bool = False,
) -> dict[str, Any] | None:
    """`load` of the newest checkpoint in `folder` that is complete and sound; None when there is none at all.

    returns     as `load`, and skipped: for each newer one that was passed over, why. Rank 0 warns of them too
    raises      CheckpointError on every rank: there are checkpoints, but none is sound; or the one that is does not fit
    """
    folder = Path(folder).absolute()
    found = {
        "file": folder.exists() and not folder.is_dir(),
        "complete": [str(p) for p in disk.complete(folder)],
        "unfinished": [(step, str(p)) for step, p in disk.unfinished(folder)],
    }
    found = json.loads(from_rank0(json.dumps(found), ctx))
    if found["file"]:
        raise CheckpointError(f"{folder}: is a file; needed: the folder in which checkpoints are")
    skipped = []
    for path in map(Path, found["complete"]):
        try:
            index = _verified(path, ctx)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        skipped = [f"{p}: was not finished" for step, p in found["unfinished"] if step > index.step] + skipped
        if skipped and ctx.world.rank == 0:
            text = "; ".join(skipped)
            warnings.warn(f"{path} is taken, since newer ones cannot be: {text}", CheckpointWarning, stacklevel=2)
        return {**_fill(path, index, model, optimizer, ctx, own_options), "skipped": skipped}
    if skipped:
        raise CheckpointError(f"{folder}: no checkpoint in it is sound: {'; '.join(skipped)}")
    return None


def read_about(path: str | os.PathLike[str]) -> dict[str, Any]:
    """step, mesh, versions and about of a checkpoint, without its tensors: this process alone, no messages.

    path        as for `load`
    raises      CheckpointError
    """
    chosen = disk.choose(Path(path).absolute())
    files = disk.read_manifest(chosen)
    _require_unchanged(chosen, disk.changed_files(chosen, files, [disk.METADATA]))
    return _about(read_index(chosen, files))


def _about(index: Index) -> dict[str, Any]:
    return {"step": index.step, "mesh": index.mesh, "versions": index.versions, "about": index.about}


def _require_unchanged(path: Path, changed: list[str]) -> None:
    if changed:
        raise CheckpointError(
            f"{path}: the checkpoint is broken: {', '.join(changed)}: the SHA-256 is not that of the bytes that were written; "
            f"{REMEDY}"
        )


def _verified(path: Path, ctx: ParallelContext) -> Index:
    """The index of a checkpoint all of whose files are as they were written; each rank reads its part of them.

    raises      CheckpointError, the same on every rank
    """
    index, fault, manifest = None, "", b""
    try:
        files = disk.read_manifest(path)
        manifest = (path / disk.MANIFEST).read_bytes()
        mine = disk.share_of(files, ctx.world.rank, ctx.world.size)
        changed = disk.changed_files(path, files, [disk.METADATA, *mine], torch.get_num_threads())
        _require_unchanged(path, sorted(set(changed)))
        index = read_index(path, files)
    except CheckpointError as error:
        fault = str(error)
    except OSError as error:
        fault = f"{path}: {error.strerror}: {error.filename}"
    raise_on_all(fault, ctx)
    same = from_rank0(disk.digest(manifest), ctx) == disk.digest(manifest)
    raise_on_all("" if same else f"{path}: rank {ctx.world.rank} sees another checkpoint there than rank 0", ctx)
    assert index is not None
    return index


def _fill(
    path: Path, index: Index, model: nn.Module, optimizer: torch.optim.Optimizer | None, ctx: ParallelContext, own_options: bool
) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp  # 0.2 s, not at the import of tpattn

    from tpattn.checkpoint import storage

    tensors, options, random, fault = {}, [], {}, ""
    reader = storage.Reader(path, index)
    try:
        tensors = targets_of(path, index, model, optimizer)
        if optimizer is not None:
            options = restored_options(path, index.optimizer or {"groups": []}, model, optimizer, own_options)
            random = saved_random_states(path, index, ctx, reader.whole)
    except CheckpointError as error:
        fault = str(error)
    raise_on_all(fault, ctx)
    blocks = in_blocks(tensors, model, ctx)
    storage.quiet_without_group()
    storage.run(lambda: dcp.load(blocks, storage_reader=reader, **processes(ctx)), f"{path}: cannot be read")
    if optimizer is not None:
        put(optimizer, model, {**tensors, **random}, options)
    return _about(index)
