"""What metadata.json says: the run's state, and in which file each block of each tensor lies. Knows no processes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tpattn.checkpoint.files import FORMAT, METADATA, REMEDY, CheckpointError, File, read_json, step_of

DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


@dataclass(frozen=True)
class Block:
    """A rectangular part of a tensor: first index and length of each dim, and where its bytes (row-major) begin in a file."""

    file: str
    place: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One tensor: the undivided shape, the dtype's name, and the blocks that make it up."""

    shape: tuple[int, ...]
    dtype: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Index:
    """The contents of metadata.json.

    optimizer   None, or its class and the options of its groups, each with the names of its parameters
    """

    step: int
    mesh: dict[str, int]
    versions: dict[str, str]
    about: dict[str, Any]
    optimizer: dict[str, Any] | None
    tensors: dict[str, Entry]

    def dump(self) -> dict[str, Any]:
        """As JSON values."""
        return {"format": FORMAT, "byteorder": sys.byteorder, **asdict(self)}


def read_index(path: Path, files: Mapping[str, File]) -> Index:
    """The index of the checkpoint `path`: every tensor whole, every block inside its file.

    raises      CheckpointError
    """
    value = read_json(path, METADATA)
    try:
        order = value.pop("byteorder")
        if value.pop("format") != FORMAT:
            raise ValueError("another format than the manifest's")
        tensors = {name: _entry(name, entry, files) for name, entry in value.pop("tensors").items()}
        index = Index(tensors=tensors, **value)
        _check_types(index, step_of(path, ".replaced"))
        _check_places(index, files)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path}: the checkpoint is broken: {METADATA}: {error}; {REMEDY}") from error
    if order != sys.byteorder:
        raise CheckpointError(f"{path}: saved on a {order}-endian machine, this one is {sys.byteorder}-endian")
    return index


def _check_types(index: Index, named: int | None) -> None:
    kinds = [(index.mesh, dict), (index.versions, dict), (index.about, dict)]
    if type(index.step) is not int or any(not isinstance(value, kind) for value, kind in kinds):
        raise ValueError("step, mesh, versions or about is of another kind")
    if named is not None and index.step != named:
        raise ValueError(f"step is {index.step}, not that of the folder's name")
    if index.optimizer is not None:
        groups = index.optimizer["groups"]
        words = [index.optimizer["class"], *(name for group in groups for name in group["parameters"])]
        if not all(isinstance(group["options"], dict) for group in groups) or not all(isinstance(w, str) for w in words):
            raise ValueError("the optimizer's groups are of another kind")


def _entry(name: str, value: Mapping[str, Any], files: Mapping[str, File]) -> Entry:
    shape, dtype = tuple(value["shape"]), value["dtype"]
    blocks = tuple(Block(b["file"], b["place"], tuple(b["starts"]), tuple(b["lengths"])) for b in value["blocks"])
    numbers = [*shape, *(n for b in blocks for n in (b.place, *b.starts, *b.lengths))]
    if dtype not in DTYPES or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        raise ValueError(f"{name} has no shape, dtype or place")
    if math.prod(n for n in shape if n) >= 2**62:
        raise ValueError(f"{name} is too large")
    for block in blocks:
        if 0 in block.lengths:
            raise ValueError(f"{name} has an empty block")
        if not len(block.starts) == len(block.lengths) == len(shape):
            raise ValueError(f"{name} has a block of another number of dims")
        if any(start + length > size for start, length, size in zip(block.starts, block.lengths, shape, strict=True)):
            raise ValueError(f"{name} has a block outside its shape")
        if block.file not in files or block.place % DTYPES[dtype].itemsize:
            raise ValueError(f"{name} has a block in no file")
    if sum(math.prod(b.lengths) for b in blocks) != math.prod(shape) or _overlap([(b.starts, b.lengths) for b in blocks]):
        raise ValueError(f"{name}'s blocks do not make up its shape")
    return Entry(shape, dtype, blocks)


def _overlap(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether two boxes share an element: found along the first dim, in order."""
    boxes = sorted(boxes)
    for i, (starts, lengths) in enumerate(boxes):
        for others, other_lengths in boxes[i + 1 :]:
            if starts and others[0] >= starts[0] + lengths[0]:
                break
            each = zip(starts, lengths, others, other_lengths, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in each):
                return True
    return False


def _extents(index: Index) -> Iterator[tuple[str, int, int]]:
    for entry in index.tensors.values():
        for block in entry.blocks:
            yield block.file, block.place, block.place + math.prod(block.lengths) * DTYPES[entry.dtype].itemsize


def _check_places(index: Index, files: Mapping[str, File]) -> None:
    """Blocks lie inside their files and apart, so no shape can ask for more memory than the files have."""
    extents = sorted(_extents(index))
    if any(stop > files[file].bytes for file, _, stop in extents):
        raise ValueError("a block ends after its file")
    if any(a == b and stop > start for (a, _, stop), (b, start, _) in pairwise(extents)):
        raise ValueError("two blocks share bytes of a file")
