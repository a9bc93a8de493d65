"""What a checkpoint holds: a run's tensors by the names of the undivided model, each as the block that this rank has.

Owns which tensors these are, where a rank's block lies in the undivided one (tp divides first, FSDP2 last), and how model and
optimizer get them back. Files are another room's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpattn.checkpoint.files import CheckpointError
from tpattn.checkpoint.index import DTYPES, Entry, Index
from tpattn.mesh import ParallelContext
from tpattn.params import block_of, data_dim, reshard, sharded_parameters, to_local

MODEL, OPTIMIZER, RANDOM = "model", "optimizer", "random"  # first words of the tensors' names
_SHOWN = 4
_STATE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8)
_HOW = (
    "foreach",
    "fused",
    "capturable",
    "differentiable",
)  # options of how, not what, an optimizer computes: always the caller's


class OwnBlock(Tensor):
    """This rank's block of a tensor, which tells torch.distributed.checkpoint where it lies.

    DTensor itself tells other places for some uneven sizes divided by tp and FSDP2 on one dimension, which loses rows without a
    word (torch 2.13).
    """

    share: Tensor
    starts: tuple[int, ...]

    @staticmethod
    def __new__(cls, share: Tensor, starts: tuple[int, ...], shape: torch.Size) -> OwnBlock:
        block: OwnBlock = Tensor._make_wrapper_subclass(cls, shape, dtype=share.dtype, device=share.device)
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


def in_blocks(tensors: Mapping[str, Tensor], model: nn.Module, ctx: ParallelContext, copy: bool = False) -> dict[str, Tensor]:
    """The same tensors for torch.distributed.checkpoint, as this rank's blocks; with `copy` in memory of their own, on the CPU.

    A DTensor of the user's own that is no tpattn parameter stays one. What has no elements is left out: its shape says all.
    """
    specs = {name: spec for name, _, _, spec in sharded_parameters(model)}
    blocks: dict[str, Tensor] = {}
    for full, x in tensors.items():
        kind, _, name = full.partition(".")
        spec = specs.get(name if kind == MODEL else name.rpartition(".")[0])
        if spec is not None and tuple(x.shape) != spec.shape:  # a count of steps, say
            spec = None
        share = to_local(x.detach())
        if copy:
            share = share.to("cpu", copy=True)
        if isinstance(x, DTensor) and spec is None and data_dim(x) is None:
            blocks[full] = x.detach().clone() if copy else x
        elif x.numel():
            blocks[full] = OwnBlock(share, block_of(x, spec, ctx)[0], x.shape)
    return blocks


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, ctx: ParallelContext) -> dict[str, Tensor]:
    """Everything to save, by name: each parameter and buffer once, what the optimizer keeps for each, and the random state.

    raises      CheckpointError for an optimizer of another model, or one that keeps other things than tensors
    """
    reshard(model)
    tensors = {f"{MODEL}.{name}": x.detach() for name, x in _model_tensors(model).items()}
    for name, x in tensors.items():
        local = to_local(x)
        if any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True)):
            raise CheckpointError(f"{name[6:]} is an expanded view, which could not be filled again; make it .contiguous()")
    if optimizer is not None:
        _require_ours(model, optimizer)
        for name, p in model.named_parameters():
            for key, value in optimizer.state.get(p, {}).items():
                if not isinstance(value, Tensor):
                    raise CheckpointError(f"{type(optimizer).__name__} keeps {key}={value!r} for {name}: only tensors are saved")
                tensors[f"{OPTIMIZER}.{name}.{key}"] = value
        tensors |= _random_states(ctx)
    return tensors


def _require_ours(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ours = {id(p) for p in model.parameters()}
    strangers = [list(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in ours]
    if strangers:
        raise CheckpointError(f"the optimizer holds parameters that are not the model's, of shapes {strangers[:_SHOWN]}")


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, a tied one under its first name, and the buffers of the state dict."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return parameters | {name: x for name, x in model.state_dict().items() if name not in every}


def _random_states(ctx: ParallelContext) -> dict[str, Tensor]:
    """The state of torch's own generators on this rank: for a user's random numbers; tpattn's depend on seed and step alone."""
    states = {f"{RANDOM}.cpu.{ctx.world.rank}": torch.get_rng_state()}
    if ctx.device.type == "cuda":
        states[f"{RANDOM}.cuda.{ctx.world.rank}"] = torch.cuda.get_rng_state(ctx.device)
    return states


def entries_of(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Shape and dtype of each tensor, without blocks."""
    return {name: Entry(tuple(x.shape), str(x.dtype).removeprefix("torch."), ()) for name, x in tensors.items()}


# ---- the optimizer's options -------------------------------------------------------------------------------------------------


def options_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
    """The optimizer's class and the options of its groups (lr, betas, ...) with the names of their parameters, as JSON values.

    raises      CheckpointError for an option that is no number, text or list of them
    """
    if optimizer is None:
        return None
    names = {id(p): name for name, p in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        options = {}
        for key, value in group.items():
            if key == "params" or key in _HOW:
                continue
            value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            values = value if isinstance(value, (tuple, list)) else [value]
            if not all(x is None or isinstance(x, (bool, int, float, str)) for x in values):
                raise CheckpointError(
                    f"{type(optimizer).__name__} has the option {key}={value!r}: only numbers and text are saved"
                )
            options[key] = list(value) if isinstance(value, tuple) else value
        groups.append({"options": options, "parameters": [names[id(p)] for p in group["params"]]})
    return {"class": type(optimizer).__name__, "groups": groups}


def restored_options(
    path: Path, saved: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, own: bool
) -> list[dict[str, Any]]:
    """For each group of the optimizer what its options were; by parameter, since another mesh groups them otherwise.

    own         True: the caller's stay, so nothing is given back, but switches (amsgrad, ...) must be as they were: they decide
                which state there is
    raises      CheckpointError where the parameters of one group had different options, or were not in the optimizer, and for a
                value of another kind than the group has
    """
    by_name = {name: group["options"] for group in saved["groups"] for name in group["parameters"]}
    names = {id(p): name for name, p in model.named_parameters()}
    found = []
    for i, group in enumerate(optimizer.param_groups):
        members = [names[id(p)] for p in group["params"]]
        unknown = [name for name in members if name not in by_name]
        if unknown:
            raise CheckpointError(
                f"{path}: the optimizer had no parameter {', '.join(unknown[:_SHOWN])} when it was saved; "
                "make it over the same parameters, or load without it"
            )
        options = by_name[members[0]] if members else {}
        for key, was in options.items():
            fault = _unlike(was, group[key]) if key in group and key != "params" else "no option of it"
            if fault or (own and isinstance(was, bool) and was != group[key]):
                raise CheckpointError(
                    f"{path}: the optimizer's {key} was {was!r}, is now {group.get(key)!r}: {fault or 'its state fits not'}"
                )
        if not own and any(by_name[name] != options for name in members):
            raise CheckpointError(
                f"{path}: parameters of the optimizer's group {i} had different options when it was saved; group them as then, "
                "or keep your own with own_options=True"
            )
        found.append({} if own else options)
    return found


def _unlike(was: Any, now: Any) -> str:
    """What is wrong with putting the saved value in the place of the present one; "" when nothing is."""
    now = now.item() if isinstance(now, Tensor) and now.numel() == 1 else now
    number = (int, float)
    if isinstance(was, bool) or was is None or isinstance(now, bool) or now is None:
        fits = all(x is None or isinstance(x, bool) for x in (was, now))
    elif isinstance(now, number):
        fits = isinstance(was, number) and math.isfinite(was)
    elif isinstance(now, (tuple, list)):
        fits = isinstance(was, list) and len(was) == len(now) and not any(_unlike(a, b) for a, b in zip(was, now, strict=True))
    else:
        fits = type(was) is type(now)
    return "" if fits else "a value of another kind"


# ---- loading -----------------------------------------------------------------------------------------------------------------


def targets_of(path: Path, index: Index, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """The tensors to read into: the model's own, and new ones for the optimizer.

    raises      CheckpointError when the checkpoint does not fit
    """
    reshard(model)
    saved = {name: (entry.shape, entry.dtype) for name, entry in index.tensors.items()}
    targets = {f"{MODEL}.{name}": x.detach() for name, x in _model_tensors(model).items()}
    kept = {name for name in saved if name.startswith(f"{MODEL}.")}
    own = {name.partition(".")[2]: have for name, have in entries_of(targets).items()}
    faults = [f"{name} is missing" for name in own if f"{MODEL}.{name}" not in kept]
    faults += [f"{name[6:]} is not in the model" for name in sorted(kept) if name not in targets]
    for name, have in own.items():
        was = saved.get(f"{MODEL}.{name}")
        if was is not None and was != (have.shape, have.dtype):
            faults.append(f"{name} is {list(was[0])} {was[1]}, in the model {list(have.shape)} {have.dtype}")
    if faults:
        more = f", and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CheckpointError(f"{path}: of another model: {'; '.join(faults[:_SHOWN])}{more}")
    if optimizer is None:
        return targets
    _require_ours(model, optimizer)
    _require_same_optimizer(path, index, optimizer)
    for name, p in model.named_parameters():
        for key in _kept_for(name, saved):
            full = f"{OPTIMIZER}.{name}.{key}"
            shape, dtype = saved[full][0], DTYPES[saved[full][1]]
            if dtype not in _STATE_DTYPES or math.prod(shape) > max(1, p.numel()):
                raise CheckpointError(
                    f"{path}: the optimizer's {key} of {name} is {list(shape)} {saved[full][1]}: no state of it"
                )
            like = shape == tuple(p.shape)
            targets[full] = torch.zeros_like(p.detach(), dtype=dtype) if like else torch.zeros(shape, dtype=dtype)
    return targets


def saved_random_states(path: Path, index: Index, ctx: ParallelContext, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """The states of torch's generators that the rank of this number saved, if it did, each tried on a generator of its own.

    raises      CheckpointError for what is no such state
    """
    found = {}
    for name, own in _random_states(ctx).items():
        entry = index.tensors.get(name)
        if entry is None:
            continue
        try:
            if (entry.shape, entry.dtype) != (tuple(own.shape), "uint8"):
                raise RuntimeError(f"{list(entry.shape)} {entry.dtype}")
            found[name] = read(name)
            torch.Generator("cpu" if ".cpu." in name else ctx.device).set_state(found[name])
        except RuntimeError as error:
            raise CheckpointError(f"{path}: {name} is no state of torch's generator: {error}") from error
    return found


def _require_same_optimizer(path: Path, index: Index, optimizer: torch.optim.Optimizer) -> None:
    have, need = (index.optimizer or {}).get("class"), type(optimizer).__name__
    if have is None:
        raise CheckpointError(f"{path}: was saved without an optimizer; load the weights alone, with optimizer=None")
    if have != need:
        raise CheckpointError(f"{path}: the optimizer was {have}, is now {need}; load the weights alone, with optimizer=None")


def _kept_for(name: str, tensors: Iterable[str]) -> list[str]:
    """The keys under which the optimizer's state of parameter `name` is saved: exp_avg, for example."""
    prefix = f"{OPTIMIZER}.{name}."
    return [full[len(prefix) :] for full in tensors if full.startswith(prefix) and "." not in full[len(prefix) :]]


def put(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], options: Sequence[Mapping[str, Any]]
) -> None:
    """Give the optimizer what was read for each parameter, and these options to its groups; and torch's generators their state.

    A count of steps lives where the optimizer wants it.
    """
    on_device = {
        id(p): bool(group.get("fused") or group.get("capturable")) for group in optimizer.param_groups for p in group["params"]
    }
    for name, p in model.named_parameters():
        found = {key: tensors[f"{OPTIMIZER}.{name}.{key}"] for key in _kept_for(name, tensors)}
        if found and id(p) in on_device:
            optimizer.state[p] = {key: x.to(p.device) if x.dim() == 0 and on_device[id(p)] else x for key, x in found.items()}
        else:
            optimizer.state.pop(p, None)  # it had none
    for group, was in zip(optimizer.param_groups, options, strict=False):
        for key, value in was.items():
            now = group[key]
            if isinstance(now, Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value
    for name, x in tensors.items():
        if name.startswith(f"{RANDOM}.cpu."):
            torch.set_rng_state(x)
        elif name.startswith(f"{RANDOM}.cuda."):
            torch.cuda.set_rng_state(x)
