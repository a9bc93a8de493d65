"""Which text a run learns from, and which of its tokens each rank holds at each step.

Owns reading files, the byte tokenizer, packing documents into samples of one length, the order of the samples, and the share
of a batch that a (dp, cp) pair of ranks holds. Knows no processes: rank and size are plain arguments, the order is a function of
(seed, step), so any rank of any mesh computes its own share without a message. Letters: B sequences in a batch, T tokens in a
sequence; b and t are one rank's share of them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tpattn.errors import TpattnError
from tpattn.layout import SequenceLayout
from tpattn.random import bits, fold

IGNORE = -100  # the target of a token whose successor belongs to another document, or does not exist
_NAMES_SHOWN = 5
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class DataError(TpattnError, ValueError):
    """A text file, folder or token stream that cannot be trained on; the message names it and says why."""


# ------------------------------------------------------------------------------------------------------------- text on disk


@dataclass(frozen=True)
class Document:
    """One text, whole: `name` relative to the corpus' folder with forward slashes, `text` as UTF-8 bytes."""

    name: str
    text: bytes


@dataclass(frozen=True)
class Corpus:
    """The documents of one source in the order of their names.

    source      where they come from, for a person
    skipped     (name, reason) of each file in the folder that is no text
    sha256      hash of every name, length and byte: equal on two machines exactly when the training text is
    """

    source: str
    documents: tuple[Document, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for document in self.documents:
            name = os.fsencode(document.name)
            digest.update(f"{len(name)} {len(document.text)} ".encode())
            digest.update(name)
            digest.update(document.text)
        object.__setattr__(self, "sha256", digest.hexdigest())

    @property
    def num_bytes(self) -> int:
        return sum(len(document.text) for document in self.documents)

    def describe(self) -> str:
        """One line for the log: source, size, hash, and every kind of file that was left out."""
        line = f"{self.source}: {len(self.documents):,} documents, {self.num_bytes:,} bytes, sha256 {self.sha256[:16]}"
        return f"{line}; skipped {_list_skipped(self.skipped)}" if self.skipped else line


def read_documents(path: str | os.PathLike[str] | None = None) -> Corpus:
    """The documents at `path`, sorted by name; without a path, the source of Python's own standard library.

    path        a file (one document), or a folder, searched recursively: any suffix, every file that is UTF-8 text is one
                document. Hidden files and folders are not looked at. Files that are empty, binary or not UTF-8 are left out and
                named in `skipped`; a file or folder that cannot be read is an error, and so is a folder without any text.
                None: about 12 MB of .py files, without installed packages and tests
    raises      DataError, naming the file
    """
    if path is None:
        return _read_standard_library()
    root = Path(path)
    if not root.exists():
        raise DataError(f"data.path={_shown(root)}: no such file or folder (looked for {_shown(root.absolute())})")
    if root.is_dir():
        corpus = _read_folder(root, sorted(_files_below(root)), source=_shown(root))
        if not corpus.documents:
            found = _list_skipped(corpus.skipped) if corpus.skipped else "no files that are not hidden"
            raise DataError(f"data.path={_shown(root)}: the folder holds no UTF-8 text: {found}")
        return corpus
    text, fault = _read_text(root)
    if fault:
        raise DataError(f"data.path={_shown(root)}: the file is {fault}; needed: UTF-8 text")
    return Corpus(_shown(root), (Document(root.name, text),))


def _read_standard_library() -> Corpus:
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(
        name for name in _files_below(folder, _STDLIB_LEFT_OUT) if name.endswith(".py") and (folder / name).stat().st_size
    )
    corpus = _read_folder(folder, names, source=f"source of Python {platform.python_version()}'s standard library")
    if not corpus.documents:
        raise DataError(
            "this Python has no readable standard-library source (.py files); give a text with data.path=FILE_OR_FOLDER"
        )
    return corpus


def _read_folder(root: Path, names: Sequence[str], source: str) -> Corpus:
    documents, skipped = [], []
    for name in names:
        text, fault = _read_text(root / name)
        if fault:
            skipped.append((name, fault))
        else:
            documents.append(Document(name, text))
    return Corpus(source, tuple(documents), tuple(skipped))


def _files_below(root: Path, left_out: Iterable[str] = ()) -> Iterator[str]:
    """Names, relative to `root`, of all files below it that are not hidden; of a linked folder its own name only."""

    def unreadable(error: OSError) -> None:
        raise DataError(f"{_shown(error.filename)}: cannot read the folder: {error.strerror}") from error

    for folder, subfolders, files in os.walk(root, onerror=unreadable):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in left_out]
        linked = [name for name in subfolders if (Path(folder) / name).is_symlink()]  # not walked into: links can be circles
        for name in files + linked:
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _read_text(path: Path) -> tuple[bytes, str]:
    """The bytes of `path` and "", or no bytes and the fault that makes it no text."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            return b"", "a linked folder" if path.is_dir() else "not a regular file"
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"{_shown(path)}: cannot read the file: {error.strerror}") from error
    if not text:
        return b"", "empty"
    if b"\0" in text:
        return b"", "binary (it holds a zero byte)"
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return b"", f"not UTF-8 (byte 0x{text[error.start]:02x} at offset {error.start})"
    return text, ""


def _list_skipped(skipped: Sequence[tuple[str, str]]) -> str:
    kinds: dict[str, list[str]] = {}
    for name, reason in skipped:
        kinds.setdefault(reason.split(" (")[0], []).append(_shown(name))
    lists = (f"{len(names)} {kind} ({', '.join(names[:_NAMES_SHOWN])}{', ...' if len(names) > _NAMES_SHOWN else ''})"
             for kind, names in kinds.items())  # fmt: skip
    return ", ".join(lists)


def _shown(name: object) -> str:
    """A file name that any terminal can print."""
    return str(name).encode("utf-8", "replace").decode("utf-8")


# ------------------------------------------------------------------------------------------------------------------- tokens


class ByteTokenizer:
    """Token ids 0 to 255 are the bytes of UTF-8 text, 256 ends a document."""

    end = 256
    vocab_size = 257

    def encode(self, text: str | bytes) -> torch.Tensor:
        """Ids of `text`: [n], int64, without an end."""
        raw = text.encode("utf-8") if isinstance(text, str) else text
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long() if raw else torch.empty(0, dtype=torch.int64)

    def decode(self, ids: torch.Tensor | Sequence[int]) -> str:
        """The text of `ids`; document ends are left out, bytes that are no UTF-8 become U+FFFD. DataError for other ids."""
        numbers = [int(i) for i in ids]
        for number in numbers:
            if not 0 <= number < self.vocab_size:
                raise DataError(f"token id {number} is outside the byte tokenizer's 0 to {self.vocab_size - 1}")
        return bytes(number for number in numbers if number != self.end).decode("utf-8", "replace")


class PackedTokens:
    """Documents laid end to end in one stream of tokens and cut into samples of T tokens, their boundaries known.

    Sample i holds tokens [i T, (i + 1) T) of the stream; the tail that fills no sample (`dropped` tokens) is not used. The target
    of a token is its successor in the stream, so it is found before anything is sharded, and `IGNORE` where the successor
    starts another document or is missing: the end of a document is predicted, what follows it is not.

    stream      [N] integer token ids
    starts      [documents] places in the stream where a document begins: rising, the first is 0
    raises      DataError when the stream is too short for one sample
    """

    def __init__(self, stream: torch.Tensor, starts: torch.Tensor | Sequence[int], seq_len: int) -> None:
        self.stream, self.seq_len = stream, seq_len
        self.starts = torch.as_tensor(starts, dtype=torch.int64)
        if seq_len < 1:
            raise DataError(f"seq_len={seq_len}: a sample needs at least 1 token")
        rising = bool((self.starts[1:] > self.starts[:-1]).all())
        if len(stream) and (len(self.starts) == 0 or self.starts[0] != 0 or not rising or self.starts[-1] >= len(stream)):
            raise DataError(f"document starts must rise from 0 and stay below the {len(stream):,} tokens of the stream")
        self.num_samples, self.dropped = divmod(len(stream), seq_len)
        if self.num_samples == 0:
            works = f"seq_len={len(stream)} or less would work" if len(stream) else "there is nothing to train on"
            raise DataError(f"the text has {len(stream):,} tokens, too few for one sample of seq_len={seq_len}; {works}")

    @classmethod
    def from_documents(cls, documents: Iterable[Document], seq_len: int, tokenizer: ByteTokenizer | None = None) -> PackedTokens:
        """Every document's bytes and an end, one document after the other; the stream takes 2 bytes per token."""
        tokenizer = tokenizer or ByteTokenizer()
        texts = [document.text for document in documents]
        stream = torch.empty(sum(len(text) + 1 for text in texts), dtype=torch.uint16)
        starts, place = [], 0
        for text in texts:
            starts.append(place)
            stream[place : place + len(text)] = tokenizer.encode(text).to(torch.uint16)
            place += len(text) + 1
            stream[place - 1 : place] = tokenizer.end
        return cls(stream, starts, seq_len)

    def tokens(self, i: int) -> torch.Tensor:
        """Tokens of sample i: [T], int64."""
        first = self._first(i)
        return self.stream[first : first + self.seq_len].to(torch.int64)

    def targets(self, i: int) -> torch.Tensor:
        """The successor of each token of sample i, or IGNORE: [T], int64."""
        first = self._first(i)
        successors = self.stream[first + 1 : first + self.seq_len + 1].to(torch.int64)
        targets = torch.full((self.seq_len,), IGNORE)
        targets[: len(successors)] = successors
        targets[self._starts_between(first + 1, first + self.seq_len + 1) - first - 1] = IGNORE
        return targets

    def documents(self, i: int) -> list[int]:
        """Lengths of the pieces of documents in sample i, in order; they sum to T. What `masks.documents` takes."""
        first = self._first(i)
        inner = self._starts_between(first + 1, first + self.seq_len)
        edges = [first, *inner.tolist(), first + self.seq_len]
        return [after - before for before, after in pairwise(edges)]

    def _first(self, i: int) -> int:
        if not 0 <= i < self.num_samples:
            raise IndexError(f"sample {i} of {self.num_samples}")
        return i * self.seq_len

    def _starts_between(self, low: int, high: int) -> torch.Tensor:
        """Document starts in [low, high)."""
        first, after = torch.searchsorted(self.starts, torch.tensor([low, high])).tolist()
        return self.starts[first:after]


# ------------------------------------------------------------------------------------------------------------------ batches


@dataclass(frozen=True)
class Batch:
    """What one (dp, cp) pair of ranks holds of one step's batch; the same on all of their tp ranks.

    tokens, targets   [b, t] int64: column j is global position layout.positions(cp_rank)[j]; targets hold IGNORE
    documents         per row, the lengths of the documents in the *whole* sequence (their sum is T)
    first_sequence    place of the first row in this step's global batch of B sequences
    samples           per row, the sample of the packed text it is
    layout            which positions each cp rank holds; None when one rank holds all of them
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    documents: list[list[int]]
    first_sequence: int
    samples: list[int]
    layout: SequenceLayout | None


class Batches:
    """The batches of a run, found by counting: sequence b of step s is number g = s B + b of the run.

    Number g is place g % samples of epoch g // samples, and each epoch visits every sample once, in an order that
    depends on (seed, epoch) alone: so the order is the same on every mesh, and resuming needs nothing but the step.
    Steps count from 0: `step` is the number of steps already done.
    """

    def __init__(self, packed: PackedTokens, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size}: a step needs at least 1 sequence")
        self.packed, self.batch_size, self.seed = packed, batch_size, seed
        self._orders: dict[int, torch.Tensor] = {}

    def order(self, epoch: int) -> torch.Tensor:
        """The samples of one epoch in the order they are visited: [samples] int64, a permutation."""
        if epoch not in self._orders:
            if len(self._orders) >= 2:  # a batch touches two neighbours, rarely more
                self._orders.clear()
            self._orders[epoch] = _permutation(self.packed.num_samples, self.seed, epoch)
        return self._orders[epoch]

    def samples(self, step: int) -> list[int]:
        """The samples in the global batch of `step`: B numbers."""
        if step < 0:
            raise ValueError(f"step={step}: steps count from 0")
        numbers = range(step * self.batch_size, (step + 1) * self.batch_size)
        return [int(self.order(g // self.packed.num_samples)[g % self.packed.num_samples]) for g in numbers]

    def share(
        self, step: int, layout: SequenceLayout | None = None, *, dp_rank: int = 0, dp_size: int = 1, cp_rank: int = 0
    ) -> Batch:
        """The rows of dp rank `dp_rank` (B divided as `tensor_split` does) and, of each, the tokens of cp rank `cp_rank`."""
        if self.batch_size < dp_size:
            raise DataError(
                f"batch_size={self.batch_size} gives nothing to some of the dp={dp_size} ranks: it counts the sequences of all "
                f"ranks together; batch_size={dp_size} or more would work, or dp={self.batch_size} at most"
            )
        if layout is not None and layout.T != self.packed.seq_len:
            raise DataError(f"the layout is for {layout.T} tokens, the samples have seq_len={self.packed.seq_len}")
        each, more = divmod(self.batch_size, dp_size)
        first = dp_rank * each + min(dp_rank, more)
        mine = self.samples(step)[first : first + each + (dp_rank < more)]
        tokens = torch.stack([self.packed.tokens(i) for i in mine])
        targets = torch.stack([self.packed.targets(i) for i in mine])  # of the whole sequence, so shards cannot lose any
        if layout is not None:
            positions = layout.positions(cp_rank)
            tokens, targets = tokens[:, positions], targets[:, positions]
        return Batch(tokens, targets, [self.packed.documents(i) for i in mine], first, mine, layout)

    def batch(self, step: int, ctx: Any, layout: SequenceLayout | None = None) -> Batch:
        """`share` for this process of a ParallelContext (anything with dp.rank, dp.size, cp.rank, cp.size)."""
        holders = 1 if layout is None else layout.n
        if holders != ctx.cp.size:
            raise DataError(f"the layout divides the tokens over {holders} ranks, but cp={ctx.cp.size}")
        return self.share(step, layout, dp_rank=ctx.dp.rank, dp_size=ctx.dp.size, cp_rank=ctx.cp.rank)


def held_out_batches(packed: PackedTokens, batch_size: int, ctx: Any, layout: SequenceLayout | None = None) -> Iterator[Batch]:
    """Every sample of `packed` once, in order, as this process of `ctx` holds them; all dp ranks get as many batches.

    Where samples run out before the rows of a batch, a row repeats sample 0 with no target, so that it counts for nothing.
    """
    if batch_size < ctx.dp.size:
        raise DataError(f"batch_size={batch_size} gives nothing to some of the dp={ctx.dp.size} ranks")
    each, more = divmod(batch_size, ctx.dp.size)
    begin = ctx.dp.rank * each + min(ctx.dp.rank, more)
    positions = slice(None) if layout is None else layout.positions(ctx.cp.rank)
    for first in range(0, packed.num_samples, batch_size):
        rows = range(first + begin, first + begin + each + (ctx.dp.rank < more))
        mine = [i if i < packed.num_samples else 0 for i in rows]
        targets = torch.stack([packed.targets(i) for i in mine])
        targets[[i >= packed.num_samples for i in rows]] = IGNORE
        tokens = torch.stack([packed.tokens(i) for i in mine])
        documents = [packed.documents(i) for i in mine]
        yield Batch(tokens[:, positions], targets[:, positions], documents, first + begin, mine, layout)


def layout_for(word: str, seq_len: int, cp: int) -> SequenceLayout:
    """The layout that `attention.layout` names, for a decoder: auto is zigzag, which gives each rank equal causal work."""
    if word not in ("auto", "contiguous", "zigzag", "striped"):
        raise DataError(f"attention.layout={word!r}: needed: auto, contiguous, zigzag or striped")
    layout: SequenceLayout = getattr(SequenceLayout, "zigzag" if word == "auto" else word)(seq_len, cp)
    return layout


def _permutation(n: int, seed: int, epoch: int) -> torch.Tensor:
    """0 to n - 1 in an order drawn from (seed, epoch): [n] int64. `bits` is one-to-one for one key, so there are no ties."""
    return torch.argsort(bits(fold(seed, "epoch", epoch), torch.arange(n)))
