"""Checkpoints of a run: model, optimizer, step, and what they belong to, through torch.distributed.checkpoint.

A checkpoint is a folder step_000040. It is written under another name and renamed when all of it is on disk, so a folder of that
name is complete. Tensors are saved by the names of the undivided model, so any mesh can load what another saved. state.json lists
tensors and files. torch's own index (.metadata) is a pickle: load checkpoints that you trust.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpattn.errors import TpattnError
from tpattn.mesh import ParallelContext
from tpattn.params import block_of, context_of, data_dim, reshard, sharded_parameters, to_local
from tpattn.training import from_rank0, together

FOLDER = "checkpoints"
_STATE = "state.json"
_FORMAT = 1
_NAME = re.compile(r"step_(\d+)")
_SHOWN = 4
_REMEDY = "remove it, or name an older one"


class CheckpointError(TpattnError, ValueError):
    """A checkpoint that cannot be written, is broken, or belongs to another model; the same on every rank."""


def _processes(ctx: ParallelContext) -> dict[str, Any]:
    """Who takes part, in DCP's words."""
    return {"no_dist": True} if ctx.world.size == 1 else {"process_group": ctx.world.group}


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    ctx: ParallelContext,
    step: int,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """The new folder `folder`/step_NNNNNN with everything a run needs to go on after `step` steps. Every rank calls it.

    about       JSON values to keep beside it: the run's config, for example
    raises      CheckpointError on every rank; what was there before is then still there
    """
    import torch.distributed.checkpoint as dcp  # 0.2 s, not at the import of tpattn

    final = Path(folder).absolute() / f"step_{step:06}"
    draft = final.with_name(final.name + ".tmp")
    tensors = _tensors(model, optimizer)
    state = {
        "format": _FORMAT,
        "step": step,
        "mesh": {"dp": ctx.dp.size, "cp": ctx.cp.size, "tp": ctx.tp.size},
        "torch": torch.__version__,
        "about": dict(about or {}),
        "tensors": {name: [list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in tensors.items()},
    }
    _on_rank0(lambda: _begin(draft), ctx, f"{final}: cannot be written")
    with _errors(f"{final}: cannot be written"):
        dcp.save(_in_blocks(tensors, model), storage_writer=dcp.FileSystemWriter(draft), **_processes(ctx))
    _on_rank0(lambda: _publish(draft, final, state), ctx, f"{final}: cannot be written")
    return final


def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, ctx: ParallelContext
) -> dict[str, Any]:
    """Fill model and optimizer from a checkpoint, saved on any mesh. Every rank calls it; rank 0's path counts.

    optimizer   gets what it kept for each parameter; its options, such as the learning rate, stay the caller's
    path        a checkpoint, or a folder of them (its newest is taken), or a run's folder
    returns     step, mesh, torch and about, as `save` kept them
    raises      CheckpointError on every rank: not a checkpoint, broken, or of another model. When files are found broken while
                tensors are read, some of the model's are changed already
    """
    import torch.distributed.checkpoint as dcp

    chosen = Path(from_rank0(str(_choose(Path(path).absolute())), ctx))
    state = together(lambda: _read_state(chosen), ctx)
    tensors = together(lambda: _targets(chosen, state, model, optimizer), ctx)
    with _errors(f"{chosen}: the checkpoint is broken, {_REMEDY}"):
        dcp.load(_in_blocks(tensors, model), storage_reader=dcp.FileSystemReader(chosen), **_processes(ctx))
    if optimizer is not None:
        _put(optimizer, model, tensors)
    return {key: state[key] for key in ("step", "mesh", "torch", "about")}


def load_latest(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, ctx: ParallelContext
) -> dict[str, Any] | None:
    """`load` of the newest checkpoint in `folder`; None when there is none. What was left half written does not count."""
    found = from_rank0(str(newest(folder) or ""), ctx)
    return load(found, model, optimizer, ctx=ctx) if found else None


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint with the highest step in `folder`."""
    numbered = [(int(m[1]), path) for path in Path(folder).absolute().glob("step_*") if (m := _NAME.fullmatch(path.name))]
    return max(numbered)[1] if numbered else None


# ---- files -----------------------------------------------------------------------------------------------------------------


def _begin(draft: Path) -> None:
    if draft.exists():
        shutil.rmtree(draft)  # a killed run's
    draft.mkdir(parents=True)


def _publish(draft: Path, final: Path, state: Mapping[str, Any]) -> None:
    """Give a written draft its name. An old checkpoint of that name steps aside first, and goes when the new one is in place."""
    files = {path.name: path.stat().st_size for path in sorted(draft.iterdir())}
    with (draft / _STATE).open("w") as file:
        json.dump({**state, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(draft)
    aside = final.with_name(final.name + ".old")
    if final.exists():
        if aside.exists():
            shutil.rmtree(aside)
        final.rename(aside)
    draft.rename(final)
    _sync(final.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _sync(folder: Path) -> None:
    """Put a folder's names on disk, where the system lets a folder be opened."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _choose(path: Path) -> Path:
    """The checkpoint that `path` means."""
    if (path / _STATE).exists() or _NAME.fullmatch(path.name):
        return path
    return newest(path) or newest(path / FOLDER) or path


def _read_state(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; needed: a checkpoint (step_NNNNNN), or a run's folder that has one")
    if not (path / _STATE).exists():
        raise CheckpointError(f"{path}: no checkpoint: it has no {_STATE}")
    try:
        state = json.loads((path / _STATE).read_text())
        whole = {"step", "tensors", "files", "mesh", "torch", "about"} <= set(state) and isinstance(state["step"], int)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: the checkpoint is broken: {_STATE} cannot be read: {error}; {_REMEDY}") from error
    if not whole or state.get("format") != _FORMAT:
        have = state.get("format") if isinstance(state, dict) else None
        raise CheckpointError(f"{path}: {_STATE} is of format {have!r}; this version of tpattn reads format {_FORMAT}")
    for name, size in state["files"].items():
        file = path / Path(name).name
        have = f"has {file.stat().st_size} bytes of {size}" if file.exists() else "is missing"
        if have != f"has {size} bytes of {size}":
            raise CheckpointError(f"{path}: the checkpoint is broken: {file.name} {have}; {_REMEDY}")
    return dict(state)


def _on_rank0(act: Callable[[], object], ctx: ParallelContext, what: str) -> None:
    """Let rank 0 act while the others wait; what fails there is the same CheckpointError on every rank."""

    fault = ""
    if ctx.world.rank == 0:
        try:
            act()
        except OSError as error:
            fault = f"{what}: {error.strerror}: {error.filename}"
    fault = from_rank0(fault, ctx)
    if fault:
        raise CheckpointError(fault)


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """torch's CheckpointException (a BaseException), which names every rank that failed, as one CheckpointError."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # torch 2.13 says that it works without a process group even when it is told to (no_dist=True).
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
            yield
    except CheckpointException as error:
        rank, (fault, _) = next(iter(sorted(error.failures.items())))
        text = " ".join(str(fault).split())
        raise CheckpointError(f"{what}: on rank {rank}: {type(fault).__name__}: {text[:300]}") from error


# ---- tensors ---------------------------------------------------------------------------------------------------------------


class _Block(Tensor):
    """This rank's block of an FSDP2 parameter (or its state), which tells torch.distributed.checkpoint where it lies.

    DTensor itself tells other places for some uneven sizes, which loses rows without a word (torch 2.13). To be deleted, and the
    DTensors saved as they are, when a DTensor divided by tp and FSDP2 on one dimension knows where its rows lie.
    """

    share: Tensor
    starts: tuple[int, ...]

    @staticmethod
    def __new__(cls, share: Tensor, starts: tuple[int, ...], shape: torch.Size) -> _Block:
        block: _Block = Tensor._make_wrapper_subclass(cls, shape, dtype=share.dtype, device=share.device)
        block.share, block.starts = share, starts
        return block

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"a block of a checkpoint is no tensor to compute with: {func}")

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(self.starts), self.share.shape)] if self.share.numel() else []

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(self.share), self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        assert index.offset is None or tuple(index.offset) == self.starts
        return self.share


def _in_blocks(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The same tensors for torch.distributed.checkpoint, those that FSDP2 divided as blocks, sharing their memory."""
    if not any(data_dim(x) is not None for x in tensors.values()):
        return dict(tensors)
    ctx, specs = context_of(model), {name: spec for name, _, _, spec in sharded_parameters(model)}
    blocks = {}
    for full, x in tensors.items():
        if data_dim(x) is not None:
            kind, _, name = full.partition(".")
            starts, _ = block_of(x, specs.get(name if kind == "model" else name.rpartition(".")[0]), ctx)
            x = _Block(to_local(x.detach()), starts, x.shape)
        blocks[full] = x
    return blocks


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Everything to save, by name: each parameter and buffer once, and what the optimizer keeps for each parameter."""
    reshard(model)
    tensors = {f"model.{name}": x.detach() for name, x in _model_tensors(model).items()}
    if optimizer is not None:
        ours = {id(p) for p in model.parameters()}
        strangers = [list(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in ours]
        if strangers:
            raise CheckpointError(f"the optimizer holds parameters that are not the model's, of shapes {strangers[:_SHOWN]}")
        for name, p in model.named_parameters():
            for key, value in optimizer.state.get(p, {}).items():
                if not isinstance(value, Tensor):
                    raise CheckpointError(f"{type(optimizer).__name__} keeps {key}={value!r} for {name}: only tensors are saved")
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, a tied one under its first name, and the buffers of the state dict."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return parameters | {name: x for name, x in model.state_dict().items() if name not in every}


def _targets(
    path: Path, state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """The tensors to read into: the model's own, and new ones for the optimizer.

    raises      CheckpointError when the checkpoint's list does not fit the model
    """
    reshard(model)
    saved = {name: (tuple(shape), dtype) for name, (shape, dtype) in state["tensors"].items()}
    targets = {f"model.{name}": x.detach() for name, x in _model_tensors(model).items()}
    kept = {name for name in saved if name.startswith("model.")}
    faults = [f"{name[6:]} is missing" for name in targets if name not in kept]
    faults += [f"{name[6:]} is not in the model" for name in sorted(kept) if name not in targets]
    for name in targets:
        have = tuple(targets[name].shape), str(targets[name].dtype).removeprefix("torch.")
        if name in kept and saved[name] != have:
            faults.append(f"{name[6:]} is {list(saved[name][0])} {saved[name][1]}, in the model {list(have[0])} {have[1]}")
    if faults:
        more = f", and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CheckpointError(f"{path}: of another model: {'; '.join(faults[:_SHOWN])}{more}")
    if optimizer is None:
        return targets
    for name, p in model.named_parameters():
        for key in _kept_for(name, saved):
            full = f"optimizer.{name}.{key}"
            shape, dtype = saved[full][0], getattr(torch, saved[full][1])
            like = shape == tuple(p.shape)
            targets[full] = torch.zeros_like(p.detach(), dtype=dtype) if like else torch.zeros(shape, dtype=dtype)
    return targets


def _kept_for(name: str, tensors: Iterable[str]) -> list[str]:
    """The keys under which the optimizer's state of parameter `name` is saved: exp_avg, for example."""
    prefix = f"optimizer.{name}."
    return [full[len(prefix) :] for full in tensors if full.startswith(prefix) and "." not in full[len(prefix) :]]


def _put(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the optimizer what was read for each parameter. A count of steps lives where the optimizer wants it."""
    on_device = {
        id(p): bool(group.get("fused") or group.get("capturable")) for group in optimizer.param_groups for p in group["params"]
    }
    for name, p in model.named_parameters():
        found = {key: tensors[f"optimizer.{name}.{key}"] for key in _kept_for(name, tensors)}
        if found and id(p) in on_device:
            optimizer.state[p] = {key: x.to(p.device) if x.dim() == 0 and on_device[id(p)] else x for key, x in found.items()}
