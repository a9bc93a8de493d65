"""All the text of a run from the words of its config: tokenizer, packed training tokens, packed held-out tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from tpattn.data.folder import TokenFolder, is_token_folder, open_tokens, tokenizer_of
from tpattn.data.packed import PackedTokens, Selection, document_lengths, encode_documents, held_out
from tpattn.data.text import Corpus, DataError, read_documents, shown
from tpattn.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

AUTO_SHARE, AUTO_DOCUMENTS = 0.02, 20  # data.valid=auto: so much is held out where there are at least so many documents


@dataclass(frozen=True)
class Prepared:
    """The text of a run.

    corpus      what the documents are: `source`, `sha256`, `describe()`
    train       tokens to learn from
    valid       tokens of the held-out documents; None when none are
    """

    corpus: Corpus | TokenFolder
    tokenizer: Tokenizer
    train: PackedTokens
    valid: PackedTokens | None


def tokenizer_for(path: str | os.PathLike[str] | None, word: str = "auto") -> Tokenizer:
    """The tokenizer of the text at `path` (as in `prepare`) that `word` names. DataError as in `prepare`."""
    if is_token_folder(path):
        _refuse_another(path, word)
        return tokenizer_of(path)  # type: ignore[arg-type]
    return ByteTokenizer() if word in ("auto", "bytes") else load_tokenizer(word)


def prepare(
    path: str | os.PathLike[str] | None, seq_len: int, *, tokenizer: str = "auto", valid: float | str = "auto"
) -> Prepared:
    """The documents at `path` as samples of `seq_len` tokens to train on, and as others that are held out.

    path        as in `read_documents`, or a folder of tokens
    tokenizer   auto: the folder's own, bytes for text; bytes; or the path of a tokenizer.json
    valid       share of the tokens, 0 to below 1, whose documents are held out; auto: 0.02 where there are at least 20 documents
                and both parts have a sample, else none
    raises      DataError for what cannot be read, for another tokenizer than the folder's, and for a share of which whole
                documents cannot come near (half to twice) or that leaves either part without a sample
    """
    corpus: Corpus | TokenFolder
    if is_token_folder(path):
        _refuse_another(path, tokenizer)
        corpus = open_tokens(path)  # type: ignore[arg-type]
        stream, starts, made = corpus.stream, corpus.starts, corpus.tokenizer
    else:
        made = tokenizer_for(path, tokenizer)
        corpus = read_documents(path)
        stream, starts = encode_documents(corpus.documents, made)
    whole = PackedTokens(stream, starts, seq_len)
    chosen = _choose(document_lengths(len(stream), starts), valid)
    if chosen is None:
        return Prepared(corpus, made, whole, None)
    kept = torch.ones(len(starts), dtype=torch.bool)
    kept[chosen] = False
    train = Selection(stream, starts, kept.nonzero().flatten())
    test = Selection(stream, starts, chosen)
    if valid == "auto" and min(len(train), len(test)) < seq_len:
        return Prepared(corpus, made, whole, None)
    for part, words in ((test, "holds out"), (train, "leaves for training")):
        if len(part) < seq_len:
            raise DataError(
                f"data.valid={valid} {words} {len(part):,} tokens, too few for one sample of seq_len={seq_len}; "
                f"train.seq_len={len(part)} or less, another share, or data.valid=0 would work"
            )
    parts = (PackedTokens(part, part.starts, seq_len) for part in (train, test))
    return Prepared(replace(corpus, held_out=len(chosen)), made, *parts)


def _choose(lengths: torch.Tensor, valid: float | str) -> torch.Tensor | None:
    """The documents to hold out, or None."""
    if valid == 0 or (valid == "auto" and len(lengths) < AUTO_DOCUMENTS):
        return None
    if valid == "auto":
        return held_out(lengths, AUTO_SHARE)
    share = float(valid)
    if not 0 < share < 1:
        raise DataError(f"data.valid={valid}: needed: auto, or a share from 0 up, below 1")
    if len(lengths) < 2:
        raise DataError(
            f"data.valid={valid}: whole documents are held out, and the text is one; more files, or data.valid=0 would work"
        )
    chosen = held_out(lengths, share)
    near = int(lengths[chosen].sum()) / int(lengths.sum())
    if not share / 2 <= near <= 2 * share:
        raise DataError(
            f"data.valid={valid}: whole documents are held out, and with these {len(lengths):,} the nearest share is {near:.2g}; "
            f"data.valid={near:.2g}, a text in more files, or data.valid=0 would work"
        )
    return chosen


def _refuse_another(path: object, word: str) -> None:
    if word != "auto":
        raise DataError(
            f"data.tokenizer={shown(word)}: data.path={shown(path)} is a folder of tokens with its own tokenizer; "
            "data.tokenizer=auto, or the text itself as data.path, would work"
        )
