"""A model's weights alone, undivided, in one safetensors file: for other programs, and back."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tpattn.checkpoint.files import sync
from tpattn.checkpoint.saving import raise_on_all
from tpattn.params import context_of, load_whole_state_dict, whole_tensors
from tpattn.training import from_rank0


def export_weights(model: nn.Module, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> Path:
    """Write all weights and buffers, undivided, with the names of `state_dict()` and torch's 2-D shapes, to one safetensors file.

    Every rank calls it; one tensor at a time is gathered, and rank 0 alone holds all of them, in its CPU memory, until they are
    written. Tied weights stand there once for each name. A file of that name is replaced when the new one is on disk.

    about       JSON values, kept as text in the file's metadata
    raises      CheckpointError on every rank: the package safetensors is missing, or the file cannot be written
    """
    ctx = context_of(model)
    final = Path(from_rank0(str(Path(path).absolute()), ctx))
    raise_on_all("" if ctx.world.rank else _missing(), ctx)
    held: dict[str, Tensor] = {}
    for name, x in whole_tensors(model):
        if ctx.world.rank == 0:
            held[name] = x.to("cpu").contiguous().clone()  # safetensors takes no two tensors of one memory
    fault = ""
    if ctx.world.rank == 0:
        draft = final.with_name(final.name + ".draft")
        try:
            from safetensors.torch import save_file

            final.parent.mkdir(parents=True, exist_ok=True)
            save_file(held, draft, metadata={"format": "pt", "tpattn": json.dumps(dict(about or {}))})
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
            draft.replace(final)
            sync(final.parent)
        except Exception as error:  # OSError, or safetensors' own around it
            with contextlib.suppress(OSError):
                draft.unlink()
            fault = f"{final}: cannot be written: {getattr(error, 'strerror', None) or error}"
    raise_on_all(fault, ctx)
    return final


def import_weights(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> dict[str, Any]:
    """Fill the model's shares from a safetensors file of undivided weights; every rank reads its rows of the mapped file.

    strict      refuse a file that lacks weights, or has others; False loads what both have
    returns     what `export_weights` kept as `about`; {} for another program's file
    raises      CheckpointError on every rank: no safetensors file, or one that does not fit the model
    """
    ctx = context_of(model)
    chosen = Path(from_rank0(str(Path(path).absolute()), ctx))
    fault, about = _missing(), {}
    if not fault:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(chosen, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("tpattn", "{}"))
                load_whole_state_dict(model, _File(file), strict)
        except SafetensorError as error:
            fault = f"{chosen}: no safetensors file, or a broken one: {error}"
        except OSError as error:
            fault = f"{chosen}: cannot be read: {error.strerror or error}"
        except ValueError as error:  # Unsupported, or about is no JSON
            fault = f"{chosen}: of another model: {error}"
    raise_on_all(fault, ctx)
    return dict(about)


class _File(Mapping[str, Tensor]):
    """The tensors of an open safetensors file, each read when it is asked for."""

    def __init__(self, file: Any) -> None:
        self._file, self._names = file, dict.fromkeys(file.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own would read the tensor

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        x: Tensor = self._file.get_tensor(name)
        return x

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _missing() -> str:
    try:
        import safetensors  # noqa: F401
    except ImportError:
        return 'weights in safetensors need the package safetensors: pip install "tpattn[hf]"'
    return ""
