"""Documents laid end to end and cut into samples of one length, and which documents are held out for validation.

A stream is a tensor of token ids, in memory or mapped from a file, or a `Selection` of its documents, which copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch

from tpattn.data.text import DataError, Document
from tpattn.data.tokenizer import ByteTokenizer, Tokenizer
from tpattn.random import bits, fold

IGNORE = -100  # the target of a token whose successor belongs to another document, or does not exist


class Selection:
    """Some documents of a stream one after the other, as a stream of their own; nothing is copied.

    stream      [N] token ids
    starts      [documents] places in the stream where a document begins
    chosen      [c] numbers of documents, rising
    attributes  starts [c]: places in the selection where a document begins. `len` and slices [low:high] are as a tensor's
    """

    def __init__(self, stream: torch.Tensor, starts: torch.Tensor, chosen: torch.Tensor) -> None:
        lengths = document_lengths(len(stream), starts)[chosen]
        self.stream, self.starts = stream, lengths.cumsum(0) - lengths
        self._len = int(lengths.sum())
        parted = torch.ones(len(chosen), dtype=torch.bool)  # neighbours in the stream are one run
        parted[1:] = chosen[1:] != chosen[:-1] + 1
        self._from, self._at = starts[chosen][parted], self.starts[parted]

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, part: slice) -> torch.Tensor:
        low, high, step = part.indices(self._len)
        assert step == 1
        pieces = [self.stream[:0]]
        run = int(torch.searchsorted(self._at, low, right=True)) - 1
        while low < high:
            after = int(self._at[run + 1]) if run + 1 < len(self._at) else self._len
            place, take = int(self._from[run] - self._at[run]) + low, min(high, after) - low
            pieces.append(self.stream[place : place + take])
            low, run = low + take, run + 1
        return torch.cat(pieces)


class PackedTokens:
    """Documents laid end to end in one stream of tokens and cut into samples of T tokens, their boundaries known.

    Sample i holds tokens [i T, (i + 1) T) of the stream; the tail that fills no sample (`dropped` tokens) is not used. The target
    of a token is its successor in the stream, so it is found before anything is sharded, and `IGNORE` where the successor
    starts another document or is missing: the end of a document is predicted, what follows it is not.

    stream      [N] integer token ids
    starts      [documents] places in the stream where a document begins: rising, the first is 0
    raises      DataError when the stream is too short for one sample
    """

    def __init__(self, stream: torch.Tensor | Selection, starts: torch.Tensor | Sequence[int], seq_len: int) -> None:
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
    def from_documents(cls, documents: Iterable[Document], seq_len: int, tokenizer: Tokenizer | None = None) -> PackedTokens:
        """Every document's tokens and an end, one document after the other; None = bytes."""
        return cls(*encode_documents(documents, tokenizer or ByteTokenizer()), seq_len)

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


def id_dtype(vocab_size: int) -> torch.dtype:
    """The smallest format for ids below vocab_size that torch can map: 2 bytes a token, or 4."""
    return torch.uint16 if vocab_size <= 1 << 16 else torch.int32


def encode_documents(documents: Iterable[Document], tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """(stream [N], starts [documents]): every document's ids and an end, in the smallest format."""
    dtype = id_dtype(tokenizer.vocab_size)
    end = torch.tensor([tokenizer.end]).to(dtype)
    pieces, starts, place = [torch.empty(0, dtype=dtype)], [], 0
    for document in documents:
        ids = tokenizer.encode(document.text)
        starts.append(place)
        pieces += [ids.to(dtype), end]
        place += len(ids) + 1
    return torch.cat(pieces), torch.tensor(starts, dtype=torch.int64)


def document_lengths(tokens: int, starts: torch.Tensor) -> torch.Tensor:
    """Tokens of each document, its end included: [documents], int64."""
    return torch.diff(starts, append=torch.tensor([tokens]))


def held_out(lengths: torch.Tensor, share: float) -> torch.Tensor:
    """The documents that are kept for validation: [h] numbers, rising; at least one, never all.

    Documents are drawn by their number alone, without a run's seed or mesh, so every run on a text keeps the same ones. One
    that is drawn is kept if that brings the tokens kept so far nearer to `share` of all.

    lengths     [documents] tokens of each, two documents or more
    share       more than 0, less than 1
    """
    assert len(lengths) > 1
    order = torch.argsort(bits(fold(0, "held-out documents"), torch.arange(len(lengths))))
    missing, shortest = share * int(lengths.sum()), int(lengths.min())
    kept: list[int] = []
    for document, length in _pairs(order, lengths):
        if shortest >= 2 * missing or len(kept) == len(lengths) - 1:
            break
        if length < 2 * missing:
            kept.append(document)
            missing -= length
    return torch.tensor(sorted(kept) or [int(lengths.argmin())])


def _pairs(order: torch.Tensor, lengths: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(document, its length) in this order; as Python's numbers only some at a time, since there may be millions."""
    for part in order.split(1 << 16):
        yield from zip(part.tolist(), lengths[part].tolist(), strict=True)
