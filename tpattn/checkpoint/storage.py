"""How torch.distributed.checkpoint writes and reads our files: it plans who writes which block, these move the bytes.

Imported when a checkpoint is first written or read: torch.distributed.checkpoint takes 0.2 s.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tpattn.checkpoint import files as disk
from tpattn.checkpoint.files import File
from tpattn.checkpoint.index import DTYPES, Block, Entry, Index

_FILE_BYTES = 64 * 2**20  # a rank begins a new file after as many, so that many ranks can verify at once
_ALIGNED = 64  # bytes: a block of any dtype can be mapped


def _done(value: Any = None) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


@dataclass
class _Place:
    """Where a block's bytes begin, and, with the last block of a file, what the file became."""

    file: str
    place: int
    file_done: File | None = None


class Writer(StorageWriter):
    """Writes this rank's blocks into files of the draft; rank 0 makes the folder before, and index, manifest and name after.

    index       all that the index says, tensors with their shapes and dtypes but no blocks yet; rank 0's counts
    """

    def __init__(self, final: Path, rank: int, index: Index, keep: int = 0) -> None:
        self.final, self.rank, self.index, self.keep = final, rank, index, keep
        self.draft = final.with_name(final.name + ".draft")
        self._lock: int | None = None
        self._began = False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from an earlier save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Rank 0 makes the draft's folder."""
        if is_coordinator:
            self._lock = disk.begin(self.draft)
            self._began = True

    def close(self) -> None:
        """After success and failure: what this writer began and did not finish goes, so that a full disk stays no fuller."""
        if self._began:
            shutil.rmtree(self.draft, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """This rank's blocks, one after the other, each file put on disk."""
        results: list[WriteResult] = []
        items = list(plan.items)
        number = 0
        while items:
            name = f"rank_{self.rank:04}_{number:03}.bin"
            with (self.draft / name).open("wb") as file:
                digest, size = hashlib.sha256(), 0
                while items and size < _FILE_BYTES:
                    item = items.pop(0)
                    assert item.type != WriteItemType.BYTE_IO, item
                    raw = _bytes_of(planner.resolve_data(item))
                    for piece in (raw, bytes(-len(raw) % _ALIGNED)):
                        file.write(piece)
                        digest.update(piece)
                    results.append(WriteResult(item.index, len(raw), _Place(name, size)))
                    size += len(raw) + -len(raw) % _ALIGNED
                file.flush()
                os.fsync(file.fileno())
            results[-1].storage_data.file_done = File(size, digest.hexdigest())
            number += 1
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0: index, manifest, the plain name; then what is older than the `keep` newest goes."""
        files: dict[str, File] = {}
        blocks: dict[str, list[Block]] = {}
        lengths = {
            (name, tuple(chunk.offsets)): tuple(chunk.sizes)
            for name, told in metadata.state_dict_metadata.items()
            for chunk in told.chunks  # type: ignore[union-attr]
        }
        for result in (one for some in results for one in some):
            name, starts, where = result.index.fqn, tuple(result.index.offset or ()), result.storage_data
            if where.file_done is not None:
                files[where.file] = where.file_done
            blocks.setdefault(name, []).append(Block(where.file, where.place, starts, lengths[name, starts]))
        entries = dict(self.index.tensors)
        for name, some in blocks.items():
            told: Any = metadata.state_dict_metadata[name]
            entry = entries.get(name) or Entry(tuple(told.size), _name(told.properties.dtype), ())
            entries[name] = replace(entry, blocks=tuple(some))
        self._require_all_seen(files)
        index = replace(self.index, tensors=entries)
        files[disk.METADATA] = disk.write_json(self.draft / disk.METADATA, index.dump())
        disk.publish(self.draft, self.final, files)
        disk.prune(self.final.parent, self.keep, self.final)

    def _require_all_seen(self, files: dict[str, File]) -> None:
        for name, file in files.items():
            if not (self.draft / name).is_file() or (self.draft / name).stat().st_size != file.bytes:
                raise OSError(f"rank 0 does not see {name}, which another rank has written: the folder must be on a shared disk")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Never chosen by a path's look."""
        return False


class Reader(StorageReader):
    """Copies from the files of a verified checkpoint, mapped into memory, into the blocks that a rank holds."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path, self.index = path, index
        self._mapped: dict[str, Tensor] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from an earlier load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in torch's words."""
        return Metadata({name: _metadata(entry) for name, entry in self.index.tensors.items() if entry.blocks})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Copy what the plan names."""
        for item in plan.items:
            source = self._block(item.storage_index)
            target = planner.resolve_tensor(item).detach()
            target.copy_(_part(source, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        self._mapped.clear()
        return _done()

    def whole(self, name: str) -> Tensor:
        """A tensor put together from its blocks, for small ones that must be seen before others are read."""
        entry = self.index.tensors[name]
        made = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        for block in entry.blocks:
            _part(made, block.starts, block.lengths).copy_(self._block(MetadataIndex(name, block.starts)))
        return made

    def _block(self, index: MetadataIndex) -> Tensor:
        entry = self.index.tensors[index.fqn]
        block = next(b for b in entry.blocks if index.offset is None or b.starts == tuple(index.offset))
        if block.file not in self._mapped:
            path = self.path / block.file
            self._mapped[block.file] = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        dtype = DTYPES[entry.dtype]
        raw = self._mapped[block.file][block.place : block.place + math.prod(block.lengths) * dtype.itemsize]
        return raw.view(dtype).view(block.lengths)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Never chosen by a path's look."""
        return False


def _part(x: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """The block of x that begins at `starts`; a view."""
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        x = x.narrow(dim, start, length)
    return x


def _bytes_of(data: Any) -> memoryview:
    x = data.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return memoryview(x.reshape(-1).view(torch.uint8).numpy())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _metadata(entry: Entry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(b.starts), torch.Size(b.lengths)) for b in entry.blocks]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)


def quiet_without_group() -> None:
    """From now on be silent of working without a process group: torch 2.13 warns of it even when it is told to (no_dist=True).

    For good, since a thread cannot change the filters for a while without changing them for all.
    """
    text = "torch.distributed is disabled, unavailable or uninitialized"
    if not any(f[0] == "ignore" and f[1] is not None and f[1].pattern == text for f in warnings.filters):
        warnings.filterwarnings("ignore", text, UserWarning)


def run(act: Callable[[], Any], what: str) -> None:
    """`act()`, one save or load of torch.distributed.checkpoint.

    raises      CheckpointError, the same on every rank, naming the first that failed: torch's own (a BaseException) names all
    """
    try:
        act()
    except CheckpointException as error:
        rank, (fault, _) = next(iter(sorted(error.failures.items())))
        if isinstance(fault, OSError) and fault.strerror:
            told = f"{fault.strerror}: {fault.filename}" if fault.filename else fault.strerror
        else:
            told = f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"
        raise disk.CheckpointError(f"{what}: on rank {rank}: {told}") from error
