"""Which text a run learns from, and which of its tokens each rank holds at each step.

Owns reading files (`text`), tokenizers (`tokenizer`), documents packed into samples and the ones held out (`packed`), the
memory-mapped folder of tokens (`folder`), all of it for one run (`prepare`), and the order and the shares of its batches
(`batches`). Knows no processes: rank and size are plain arguments, the order is a function of (seed, step), so any rank of any
mesh computes its own share without a message. Letters: B sequences in a batch, T tokens in a sequence; b and t are one rank's
share of them.
"""

from tpattn.data.batches import Batch, Batches, Layout, ValidBatches, layout_for
from tpattn.data.folder import TokenFolder, check_tokens, is_token_folder, open_tokens, write_tokens
from tpattn.data.packed import IGNORE, PackedTokens, Selection, held_out
from tpattn.data.prepare import Prepared, prepare, tokenizer_for
from tpattn.data.text import Corpus, DataError, Document, TextFiles, read_documents
from tpattn.data.tokenizer import (
    ByteTokenizer,
    SubwordTokenizer,
    TextStream,
    Tokenizer,
    load_tokenizer,
    tokenizer_from,
    tokenizer_sha256,
    train_tokenizer,
)

__all__ = [
    "IGNORE",
    "Batch",
    "Batches",
    "ByteTokenizer",
    "Corpus",
    "DataError",
    "Document",
    "Layout",
    "PackedTokens",
    "Prepared",
    "Selection",
    "SubwordTokenizer",
    "TextFiles",
    "TextStream",
    "TokenFolder",
    "Tokenizer",
    "ValidBatches",
    "check_tokens",
    "held_out",
    "is_token_folder",
    "layout_for",
    "load_tokenizer",
    "open_tokens",
    "prepare",
    "read_documents",
    "tokenizer_for",
    "tokenizer_from",
    "tokenizer_sha256",
    "train_tokenizer",
    "write_tokens",
]
