"""A folder of tokens: ids and document starts as raw numbers on disk, mapped into memory instead of read, and what they mean.

tpattn-tokens.json   format, counts, dtype, vocabulary, the tokenizer's state, sha256, where the text came from
tokens.bin           ids, little-endian, 2 bytes each (4 for a vocabulary above 65536)
starts.bin           int64, little-endian: the place in tokens.bin where each document begins
tokenizer.json       only with a tokenizer of the package `tokenizers`: its file, for use elsewhere
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpattn.data.packed import id_dtype
from tpattn.data.text import DataError, Document, shown
from tpattn.data.tokenizer import Tokenizer, tokenizer_from

FORMAT = 1
FACTS, TOKENS, STARTS, TOKENIZER = "tpattn-tokens.json", "tokens.bin", "starts.bin", "tokenizer.json"
_DTYPES = {"uint16": torch.uint16, "int32": torch.int32}
_TYPES = {"tokens": int, "documents": int, "dtype": str, "vocab_size": int, "sha256": str, "source": str, "tokenizer": dict}
_CHUNK_BYTES = 1 << 20  # what is read at once: memory stays small for any folder


@dataclass(frozen=True)
class TokenFolder:
    """An opened folder of tokens; stands where a `Corpus` does.

    source      the folder, and where its text came from, for a person
    stream      [tokens] ids, mapped: the system reads the pages that are used and may drop them again
    starts      [documents] int64, mapped
    sha256      hash of tokens.bin and starts.bin, as kept when they were written (`check_tokens` verifies it)
    held_out    how many of the documents are kept for validation
    """

    source: str
    stream: torch.Tensor
    starts: torch.Tensor
    tokenizer: Tokenizer
    sha256: str
    held_out: int = 0

    def describe(self) -> str:
        """One line for the log: source, size, hash and documents held out."""
        line = f"{self.source}: {len(self.starts):,} documents, {len(self.stream):,} tokens, "
        line += f"vocabulary {self.tokenizer.vocab_size:,}, sha256 {self.sha256[:16]}"
        return f"{line}; {self.held_out:,} held out for validation" if self.held_out else line


def is_token_folder(path: str | os.PathLike[str] | None) -> bool:
    """Whether `path` is a folder of tokens, by the file that describes it."""
    return path is not None and Path(path, FACTS).is_file()


def tokenizer_of(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that a folder of tokens was made with, without a look at the tokens. DataError, naming the file."""
    folder = Path(path)
    facts = _facts(folder)
    try:
        tokenizer = tokenizer_from(facts["tokenizer"])
    except DataError as error:
        raise DataError(f"{shown(folder / FACTS)}: {error}") from error
    if tokenizer.vocab_size != facts["vocab_size"]:
        raise DataError(
            f"{shown(folder / FACTS)}: vocab_size is {facts['vocab_size']}, but its tokenizer has {tokenizer.vocab_size} ids; "
            "make the folder again with scripts/make_tokens.py"
        )
    return tokenizer


def write_tokens(documents: Iterable[Document], out: str | os.PathLike[str], tokenizer: Tokenizer, source: str) -> None:
    """Every document's ids and an end, as a new folder `out`; one document is held at a time.

    The folder is written beside `out` under a draft's name and renamed when it is whole.

    source      where the documents come from, for a person
    raises      DataError when `out` exists or cannot be written, and what iterating over `documents` raises
    """
    _little_endian()
    out = Path(os.path.abspath(out))
    if os.path.lexists(out):
        raise DataError(f"{shown(out)}: is there already; give another place, or remove it")
    draft = out.with_name(f".{out.name}.draft-{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        facts = _write_ids(documents, draft, tokenizer)
        state = tokenizer.state()
        if isinstance(state.get("json"), str):
            (draft / TOKENIZER).write_text(state["json"], encoding="utf-8")
        facts = {"format": FORMAT, **facts, "vocab_size": tokenizer.vocab_size, "source": source, "tokenizer": state}
        (draft / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        draft.rename(out)
    except OSError as error:
        raise DataError(f"{shown(out)}: cannot write the folder: {error.strerror}: {shown(error.filename)}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_ids(documents: Iterable[Document], folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """tokens.bin and starts.bin; their counts, dtype and hash."""
    dtype = id_dtype(tokenizer.vocab_size)
    end, place, count = torch.tensor([tokenizer.end]), 0, 0
    digest = hashlib.sha256()
    with open(folder / TOKENS, "wb") as tokens, open(folder / STARTS, "wb") as starts:
        for document in documents:
            ids = torch.cat([tokenizer.encode(document.text), end])
            raw = ids.to(dtype).numpy().tobytes()
            tokens.write(raw)
            digest.update(raw)
            starts.write(place.to_bytes(8, "little"))
            place, count = place + len(ids), count + 1
    _add_file(digest, folder / STARTS)
    return {
        "tokens": place, "documents": count, "dtype": str(dtype).removeprefix("torch."), "sha256": digest.hexdigest()
    }  # fmt: skip


def open_tokens(path: str | os.PathLike[str]) -> TokenFolder:
    """The folder of tokens at `path`, mapped, after a look at all of it: sizes, document starts, ids within the vocabulary.

    raises      DataError, naming the file, the place and what is wrong there
    """
    _little_endian()
    folder = Path(path)
    facts = _facts(folder)
    vocab_size, n, documents = facts["vocab_size"], facts["tokens"], facts["documents"]
    dtype = _DTYPES[facts["dtype"]]
    _check_size(folder / TOKENS, n, dtype.itemsize)
    _check_size(folder / STARTS, documents, 8)
    tokenizer = tokenizer_of(folder)
    _check_ids(folder / TOKENS, dtype, vocab_size)
    _check_starts(folder / STARTS, n)
    stream = torch.from_file(os.fspath(folder / TOKENS), shared=False, size=n, dtype=dtype)
    starts = torch.from_file(os.fspath(folder / STARTS), shared=False, size=documents, dtype=torch.int64)
    return TokenFolder(f"{shown(folder)} (tokens of {facts['source']})", stream, starts, tokenizer, facts["sha256"])


def check_tokens(path: str | os.PathLike[str]) -> TokenFolder:
    """`open_tokens`, and every byte compared by its hash. DataError when it is not the one kept at writing."""
    made = open_tokens(path)
    digest = hashlib.sha256()
    for name in (TOKENS, STARTS):
        _add_file(digest, Path(path) / name)
    if digest.hexdigest() != made.sha256:
        raise DataError(
            f"{shown(path)}: {TOKENS} and {STARTS} have the sha256 {digest.hexdigest()}, {FACTS} says {made.sha256}: "
            "they are not as they were written; make the folder again with scripts/make_tokens.py"
        )
    return made


def _facts(folder: Path) -> dict[str, Any]:
    """What the folder's JSON says, each value of the right type."""
    name = shown(folder / FACTS)
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{name}: cannot read the file: {error.strerror}; needed: a folder of scripts/make_tokens.py") from error
    except ValueError as error:
        raise DataError(f"{name}: is not JSON ({error}); make the folder again with scripts/make_tokens.py") from error
    form = facts.get("format") if isinstance(facts, dict) else None
    if form != FORMAT:
        raise DataError(
            f"{name}: format {form!r}, this tpattn reads {FORMAT}; make it again with this version's scripts/make_tokens.py"
        )
    for key, kind in _TYPES.items():
        if type(facts.get(key)) is not kind:
            raise DataError(f"{name}: {key} is {facts.get(key)!r}; needed: {kind.__name__}")
    if facts["dtype"] not in _DTYPES:
        raise DataError(f"{name}: dtype is {facts['dtype']!r}; needed: {' or '.join(_DTYPES)}")
    if facts["tokens"] < 1 or facts["documents"] < 1:
        raise DataError(f"{name}: {facts['documents']} documents with {facts['tokens']} tokens: there is nothing to train on")
    return dict(facts)


def _check_size(file: Path, count: int, item_bytes: int) -> None:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise DataError(f"{shown(file)}: cannot read the file: {error.strerror}") from error
    if size != count * item_bytes:
        raise DataError(
            f"{shown(file)}: has {size:,} bytes, {FACTS} says {count:,} numbers of {item_bytes} bytes, {count * item_bytes:,} "
            "in all; it was cut or changed; make the folder again, or copy it again"
        )


def _check_ids(file: Path, dtype: torch.dtype, vocab_size: int) -> None:
    """Every id is within the vocabulary. Reads the file, since mapped pages that were looked at would count as memory."""
    place = 0
    for part in _numbers(file, dtype):
        ids = part.to(torch.int32)  # most reductions of torch 2.13 do not take uint16
        low, high = ids.aminmax()
        if low < 0 or high >= vocab_size:
            wrong = int(((ids < 0) | (ids >= vocab_size)).nonzero()[0])
            raise DataError(
                f"{shown(file)}: token {place + wrong:,} is {int(ids[wrong])}, outside the vocabulary of {vocab_size} ids, "
                f"0 to {vocab_size - 1}; the file was changed, or made with another tokenizer"
            )
        place += len(ids)


def _check_starts(file: Path, tokens: int) -> None:
    """Document starts rise from 0 and stay below the number of tokens."""
    place, last = 0, torch.tensor([-1])
    for part in _numbers(file, torch.int64):
        both = torch.cat([last, part])
        fault = (both[1:] <= both[:-1]) | (both[1:] >= tokens)
        if place == 0:
            fault[0] |= part[0] != 0
        if fault.any():
            wrong = int(fault.nonzero()[0])
            before = "" if place + wrong == 0 else f", after {int(both[wrong])}"
            raise DataError(
                f"{shown(file)}: document {place + wrong:,} starts at token {int(part[wrong])}{before}; needed: starts that rise "
                f"from 0 and stay below the {tokens:,} tokens"
            )
        place, last = place + len(part), part[-1:].clone()


def _numbers(file: Path, dtype: torch.dtype) -> Iterable[torch.Tensor]:
    """The numbers of a file, some at a time; each tensor is overwritten by the next."""
    held = bytearray(_CHUNK_BYTES)
    try:
        with open(file, "rb", buffering=0) as opened:
            while count := _fill(opened, held):
                yield torch.frombuffer(held, dtype=dtype, count=count // dtype.itemsize)
    except OSError as error:
        raise DataError(f"{shown(file)}: cannot read the file: {error.strerror}") from error


def _fill(opened: io.FileIO, held: bytearray) -> int:
    """Read until `held` is full or the file ends: the number of bytes."""
    view, count = memoryview(held), 0
    while count < len(held) and (more := opened.readinto(view[count:])):
        count += more
    return count


def _add_file(digest: Any, file: Path) -> None:
    try:
        with open(file, "rb") as opened:
            while raw := opened.read(_CHUNK_BYTES):
                digest.update(raw)
    except OSError as error:
        raise DataError(f"{shown(file)}: cannot read the file: {error.strerror}") from error


def _little_endian() -> None:
    if sys.byteorder != "little":
        raise DataError("folders of tokens are little-endian and this machine is not; a text file or folder would work")
