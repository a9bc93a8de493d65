"""Turns text into a folder of token ids, which a run maps into memory instead of reading and encoding text.

    python scripts/make_tokens.py texts/ tokens/                                       bytes
    python scripts/make_tokens.py texts/ tokens/ --tokenizer tokenizer.json            a tokenizer of Hugging Face's tokenizers
    python scripts/make_tokens.py texts/ tokens/ --tokenizer train --vocab-size 8192   one that is learnt from these texts
    python scripts/make_tokens.py --check tokens/                                      is a folder as it was written?

    torchrun --standalone --nproc-per-node 4 scripts/train.py data.path=tokens/

SOURCE is a file or a folder of UTF-8 text. One document is in memory at a time.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the tpattn beside this script, installed or not

from tpattn.config import one_message  # noqa: E402
from tpattn.data import (  # noqa: E402
    ByteTokenizer,
    DataError,
    TextFiles,
    TokenFolder,
    Tokenizer,
    check_tokens,
    is_token_folder,
    load_tokenizer,
    open_tokens,
    train_tokenizer,
    write_tokens,
)
from tpattn.data.text import list_skipped  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="a file or a folder of UTF-8 text")
    parser.add_argument("out", nargs="?", metavar="OUT", help="the folder to make; it must not exist")
    parser.add_argument("--tokenizer", default="bytes", metavar="WORD", help="bytes (default), train, or a tokenizer.json")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="with --tokenizer train: ids to learn (default 8192)")
    parser.add_argument("--check", metavar="FOLDER", help="compare every byte of a folder with its sha256, and make nothing")
    args = parser.parse_args()
    if args.check is not None and args.source is not None:
        parser.error("--check FOLDER makes nothing: give it alone")
    if args.check is None and args.out is None:
        parser.error("needed: SOURCE and OUT, or --check FOLDER")
    if args.vocab_size is not None and args.tokenizer != "train":
        parser.error("--vocab-size is for --tokenizer train: another tokenizer has its own")
    with one_message():
        if args.check is not None:
            print(f"as it was written: {check_tokens(args.check).describe()}")
            return
        made = make(args.source, args.out, args.tokenizer, 8192 if args.vocab_size is None else args.vocab_size)
        print(made.describe())
        script = min(str(ROOT / "scripts" / "train.py"), os.path.relpath(ROOT / "scripts" / "train.py"), key=len)
        print(f"next    python {shlex.quote(script)} data.path={shlex.quote(args.out)}")


def make(source: str, out: str, word: str, vocab_size: int) -> TokenFolder:
    """The new folder `out`, opened."""
    if Path(out).exists():  # before a tokenizer is learnt for an hour
        raise DataError(f"{out}: is there already; give another place, or remove it")
    if is_token_folder(source):
        raise DataError(f"{source}: is a folder of tokens already; needed: text")
    files = TextFiles(source)
    tokenizer: Tokenizer
    if word not in ("bytes", "train") and not Path(word).exists():
        raise DataError(f"--tokenizer {word}: needed: bytes, train, or the path of a tokenizer.json, and there is no such file")
    if word == "bytes":
        tokenizer = ByteTokenizer()
    elif word == "train":
        tokenizer = train_tokenizer(files, vocab_size)
    else:
        tokenizer = load_tokenizer(word)
    write_tokens(files, out, tokenizer, files.source)
    if files.skipped:
        print(f"skipped {list_skipped(files.skipped)}")
    return open_tokens(out)


if __name__ == "__main__":
    main()
