"""Tokenizers: text to token ids and back, and a description from which the same tokenizer is made again.

The byte tokenizer needs nothing. Others are those of Hugging Face's package `tokenizers` (the extra `hf`), read from a
tokenizer.json or trained here; the package is imported when one is made.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from tpattn.data.text import DataError, Document, shown

# The special token that ends a document, by the names it has in published files: the first one that the file has.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


class Tokenizer(Protocol):
    """What the rest of tpattn asks of a tokenizer.

    end         the id that ends a document
    vocab_size  ids are 0 to vocab_size - 1
    """

    @property
    def end(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str | bytes) -> torch.Tensor:
        """Ids of `text`: [n], int64, without an end. DataError for bytes that are not UTF-8."""

    def decode(self, ids: torch.Tensor | Sequence[int]) -> str:
        """The text of `ids` [n]; document ends are left out. DataError for an id outside the vocabulary."""

    def state(self) -> dict[str, Any]:
        """JSON values from which `tokenizer_from` makes the same tokenizer."""


class ByteTokenizer:
    """Token ids 0 to 255 are the bytes of UTF-8 text, 256 ends a document."""

    end = 256
    vocab_size = 257

    def encode(self, text: str | bytes) -> torch.Tensor:
        """Ids of `text`: [n], int64, without an end. Any bytes."""
        raw = text.encode("utf-8") if isinstance(text, str) else text
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long() if raw else torch.empty(0, dtype=torch.int64)

    def decode(self, ids: torch.Tensor | Sequence[int]) -> str:
        """The text of `ids`; document ends are left out, bytes that are no UTF-8 become U+FFFD. DataError for other ids."""
        numbers = _inside(ids, self.vocab_size, "the byte tokenizer's")
        return bytes(number for number in numbers if number != self.end).decode("utf-8", "replace")

    def state(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class SubwordTokenizer:
    """A tokenizer of the package `tokenizers`, as its tokenizer.json describes it.

    Text is encoded whole, without the file's truncation and padding, and without the special tokens that its template adds; a
    special token's name inside a text is ordinary text. `end` is the first of ENDS that is a special token of the file.

    text        the content of a tokenizer.json
    name        where it comes from, for messages
    raises      DataError for a file that the package does not take, for one without an end, and without the package
    """

    def __init__(self, text: str, name: str = "tokenizer.json") -> None:
        package = _package(name)
        try:
            made = package.Tokenizer.from_str(text)
        except Exception as error:  # the package raises a plain Exception
            raise DataError(f"{name}: no tokenizer of the package tokenizers: {' '.join(str(error).split())[:200]}") from error
        made.no_truncation()
        made.no_padding()
        made.encode_special_tokens = True  # the names of special tokens in a text are text
        special = {token.content: number for number, token in made.get_added_tokens_decoder().items() if token.special}
        ends = [special[token] for token in ENDS if token in special]
        if not ends:
            held = ", ".join(list(special)[:10]) or "none"
            raise DataError(
                f"{name}: no special token that ends a document; needed: one of {', '.join(ENDS)} among its added_tokens with "
                f"special=true (it has: {held}); adding one, or data.tokenizer=bytes, would work"
            )
        self.end: int = ends[0]
        self.vocab_size: int = max(made.get_vocab(with_added_tokens=True).values()) + 1  # ids may leave gaps
        self.name, self._text, self._made = name, text, made

    def encode(self, text: str | bytes) -> torch.Tensor:
        """Ids of `text`: [n], int64, without an end. DataError for bytes that are not UTF-8."""
        if isinstance(text, bytes):
            try:
                text = text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{self.name}: got bytes that are not UTF-8, at offset {error.start}; needed: text") from error
        return torch.tensor(self._made.encode(text, add_special_tokens=False).ids, dtype=torch.int64)

    def decode(self, ids: torch.Tensor | Sequence[int]) -> str:
        """The text of `ids`; document ends and other special tokens are left out. DataError for an id outside the vocabulary."""
        text: str = self._made.decode(_inside(ids, self.vocab_size, f"{self.name}'s"), skip_special_tokens=True)
        return text

    def state(self) -> dict[str, Any]:
        return {"kind": "tokenizers", "json": self._text}


class TextStream:
    """Text piece by piece while ids arrive: what is given out is never taken back, and never half a character.

    A character whose bytes are spread over several tokens comes with its last one. The pieces, put together, are
    `tokenizer.decode` of all ids.
    """

    _LONG, _KEPT = 64, 16  # ids decoded again with each new one, and about how many of them stay when there are more
    _UNFINISHED = 3  # at most so many bytes, so ids, of a character wait for its last one; after more it is no UTF-8

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._told = 0  # characters of decode(_ids) that were given out
        self._waiting = 0  # ids since the text last ended with a whole character

    def add(self, *ids: int) -> str:
        """The text that these ids complete; often "" for a part of a character."""
        return "".join(self._add(int(i)) for i in ids)

    def end(self) -> str:
        """What is left when no more ids come: U+FFFD for an unfinished character, else ""."""
        piece = self.tokenizer.decode(self._ids)[self._told :]
        self._ids, self._told, self._waiting = [], 0, 0
        return piece

    def _add(self, number: int) -> str:
        self._ids.append(number)
        text = self.tokenizer.decode(self._ids)
        unfinished = len(text) - len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        self._waiting = self._waiting + 1 if unfinished else 0
        # A decoder that joins single bytes may write U+FFFD for all bytes in a row while the last character is unfinished.
        held = unfinished if self._waiting <= self._UNFINISHED else min(unfinished, self._UNFINISHED)
        ready = len(text) - held
        piece = text[self._told : ready]
        self._told = max(self._told, ready)
        if not unfinished and len(self._ids) > self._LONG:
            self._forget(text)
        return piece

    def _forget(self, text: str) -> None:
        """Drop ids from the front, up to a place from which the rest decodes as it does after all of them."""
        for first in range(len(self._ids) - self._KEPT, len(self._ids) - 2 * self._KEPT, -1):
            rest = self.tokenizer.decode(self._ids[first:])
            if rest and text.endswith(rest):
                self._ids, self._told = self._ids[first:], len(rest)
                return


def tokenizer_from(state: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer whose `state()` this is. DataError for anything else."""
    kind = state.get("kind")
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "tokenizers" and isinstance(state.get("json"), str):
        return SubwordTokenizer(state["json"], "the kept tokenizer")
    raise DataError(f"a tokenizer of kind {kind!r}: needed: bytes, or tokenizers with its json")


def load_tokenizer(path: str | os.PathLike[str]) -> SubwordTokenizer:
    """The tokenizer of a tokenizer.json. DataError, naming the file, when it cannot be read or is none."""
    name = shown(path)
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"{name}: cannot read the file: {error.strerror}; needed: bytes or a tokenizer.json") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 (offset {error.start}); needed: bytes or a tokenizer.json") from error
    return SubwordTokenizer(text, name)


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> SubwordTokenizer:
    """Byte-level byte-pair encoding learnt from `documents`, <|endoftext|> its end; the same text gives the same tokenizer.

    vocab_size  257 or more: 256 bytes, the end, and merges
    raises      DataError when the text has too few pairs for so many, without the package, and for a smaller vocabulary
    """
    package = _package("training a tokenizer")
    if vocab_size < 257:
        raise DataError(f"vocab_size={vocab_size}: needed: 257 or more, the 256 bytes, the end of a document, and pairs of them")
    pieces, trainers = package.pre_tokenizers.ByteLevel, package.trainers
    made = package.Tokenizer(package.models.BPE())
    made.pre_tokenizer, made.decoder = pieces(add_prefix_space=False), package.decoders.ByteLevel()
    alphabet = sorted(pieces.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[ENDS[0]], initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    made.train_from_iterator((document.text.decode("utf-8") for document in documents), trainer)
    found = made.get_vocab_size(with_added_tokens=True)
    if found != vocab_size:
        raise DataError(
            f"vocab_size={vocab_size}: the text has pairs for {found} tokens only; vocab_size={found} or more text would work"
        )
    return SubwordTokenizer(made.to_str(), "the trained tokenizer")


def tokenizer_sha256(tokenizer: Tokenizer) -> str:
    """A hash of what the tokenizer does: equal on two machines exactly when its state is."""
    return hashlib.sha256(json.dumps(tokenizer.state(), sort_keys=True).encode()).hexdigest()


def _package(what: str) -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise DataError(f'{what}: needs the package tokenizers, which is not here; pip install "tpattn[hf]"') from error


def _inside(ids: torch.Tensor | Sequence[int], vocab_size: int, whose: str) -> list[int]:
    """`ids` as plain numbers. DataError for one that is outside the vocabulary."""
    numbers = ids.tolist() if isinstance(ids, torch.Tensor) else [int(i) for i in ids]
    for number in numbers:
        if not 0 <= number < vocab_size:
            raise DataError(f"token id {number} is outside {whose} 0 to {vocab_size - 1}")
    return numbers
