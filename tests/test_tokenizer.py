"""Tokenizers: what goes in comes back, the same one from its state, text piece by piece without half a character."""

import json
import sys

import pytest
import torch

from tpattn.data import (
    ByteTokenizer,
    DataError,
    Document,
    SubwordTokenizer,
    TextStream,
    load_tokenizer,
    tokenizer_from,
    tokenizer_sha256,
    train_tokenizer,
)

TEXTS = [
    *("naïve ☃ says: na na na 🙂🙂, 漢字かな", "line one\r\nline two\t\n\n", " leading and trailing "),
    *("\ufeffmark", "e\u0301 é", "", "☃"),
]


def documents(*texts):
    return [Document(str(i), text.encode()) for i, text in enumerate(texts)]


WORDS = documents(*TEXTS, *(f"the step {i} of the run, then the loss {i * i % 97} and again the next one" for i in range(60)))


@pytest.fixture(scope="module")
def trained():
    pytest.importorskip("tokenizers", reason='needs the extra hf: pip install "tpattn[hf]"')
    return train_tokenizer(WORDS, 300)


@pytest.fixture(params=["bytes", "trained"])
def tokenizer(request):
    return ByteTokenizer() if request.param == "bytes" else request.getfixturevalue("trained")


def wordpiece(**options):
    """A tokenizer.json as BERT's: words, no bytes, [SEP] ends, with a template, truncation and padding."""
    package = pytest.importorskip("tokenizers", reason='needs the extra hf: pip install "tpattn[hf]"')
    vocab = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "the": 3, "run": 4, "##s": 5}
    made = package.Tokenizer(package.models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = package.pre_tokenizers.Whitespace()
    made.decoder = package.decoders.WordPiece()
    made.add_special_tokens(options.get("special", ["[UNK]", "[CLS]", "[SEP]"]))
    made.post_processor = package.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    made.enable_truncation(3)
    made.enable_padding(length=8)
    return made.to_str()


# ---------------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_its_ids(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == torch.int64 and ids.dim() == 1
    assert torch.equal(ids, tokenizer.encode(text.encode()))
    assert not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text == tokenizer.decode(ids.tolist())
    assert tokenizer.decode([*ids.tolist(), tokenizer.end]) == text
    assert tokenizer.end not in ids


def test_the_same_tokenizer_is_made_from_its_state(tokenizer):
    state = json.loads(json.dumps(tokenizer.state()))  # as a checkpoint keeps it
    again = tokenizer_from(state)
    assert type(again) is type(tokenizer)
    assert (again.end, again.vocab_size, again.state()) == (tokenizer.end, tokenizer.vocab_size, tokenizer.state())
    assert tokenizer_sha256(again) == tokenizer_sha256(tokenizer)
    for text in TEXTS:
        assert torch.equal(again.encode(text), tokenizer.encode(text))


def test_an_id_outside_the_vocabulary_is_named(tokenizer):
    for bad in (tokenizer.vocab_size, -1):
        with pytest.raises(DataError, match=f"token id {bad} is outside .* 0 to {tokenizer.vocab_size - 1}"):
            tokenizer.decode(torch.tensor([1, bad]))


def test_a_state_of_another_kind_is_refused():
    for state in ({"kind": "sentences"}, {}, {"kind": "tokenizers"}):
        with pytest.raises(DataError, match="needed: bytes, or tokenizers with its json"):
            tokenizer_from(state)


# ------------------------------------------------------------------------------------------------------------------ training


def test_training_is_the_same_each_time_and_learns(trained):
    again = train_tokenizer(iter(WORDS), 300)
    assert again.state() == trained.state()
    assert (trained.vocab_size, trained.end) == (300, 0)
    text = " and again the next one"
    assert len(trained.encode(text)) < len(text) // 2
    assert tokenizer_sha256(trained) != tokenizer_sha256(train_tokenizer(WORDS, 299))


def test_a_vocabulary_that_the_text_cannot_fill_is_refused(trained):
    with pytest.raises(DataError, match=r"vocab_size=5000: the text has pairs for (\d+) tokens only; vocab_size=\1 or more text"):
        train_tokenizer(WORDS[:3], 5000)
    with pytest.raises(DataError, match="vocab_size=256: needed: 257 or more"):
        train_tokenizer(WORDS, 256)


# --------------------------------------------------------------------------------------------------------------- from a file


def test_a_file_is_loaded_without_its_truncation_padding_and_template(tmp_path):
    (tmp_path / "tokenizer.json").write_text(wordpiece())
    made = load_tokenizer(tmp_path / "tokenizer.json")
    assert (made.end, made.vocab_size) == (2, 6)
    assert made.encode("the runs the runs").tolist() == [3, 4, 5, 3, 4, 5]  # the file's own encoding: 3 ids, padded to 8
    assert made.decode([3, 4, 5, 2]) == "the runs"
    assert tokenizer_from(made.state()).encode("the runs the runs").tolist() == [3, 4, 5, 3, 4, 5]


def test_a_special_tokens_name_in_a_text_is_text(trained):
    """A document cannot end another one, or itself, by writing the token's name."""
    text = "one<|endoftext|>two"
    ids = trained.encode(text)
    assert trained.end not in ids
    assert trained.decode(ids) == text


def test_a_file_that_is_no_tokenizer_or_has_no_end_is_refused_by_name(tmp_path, trained):
    place = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot read the file: No such file"):
        load_tokenizer(place)
    with pytest.raises(DataError, match="cannot read the file: Is a directory"):
        load_tokenizer(tmp_path)
    place.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        load_tokenizer(place)
    for text in ("", "{}", '{"a": 1'):
        place.write_text(text)
        with pytest.raises(DataError, match=r"tokenizer\.json: no tokenizer of the package tokenizers: ") as error:
            load_tokenizer(place)
        assert "\n" not in str(error.value)
    place.write_text(wordpiece(special=["[UNK]", "[CLS]"]))
    with pytest.raises(DataError, match=r"no special token that ends a document; needed: one of <\|endoftext\|>.*has: \[UNK\]"):
        load_tokenizer(place)
    with pytest.raises(DataError, match="not UTF-8, at offset 1"):
        trained.encode(b"a\xff")


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for attempt in (lambda: SubwordTokenizer("{}"), lambda: train_tokenizer(WORDS, 300)):
        with pytest.raises(DataError, match=r'needs the package tokenizers, which is not here; pip install "tpattn\[hf\]"'):
            attempt()


# ------------------------------------------------------------------------------------------------------------ piece by piece


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_together_the_text(tokenizer, text):
    stream, pieces, ids = TextStream(tokenizer), [], tokenizer.encode(text).tolist()
    for number in [*ids, tokenizer.end]:
        pieces.append(stream.add(number))
        assert "\N{REPLACEMENT CHARACTER}" not in pieces[-1]
    assert "".join(pieces) == text
    assert stream.end() == ""
    if "☃" in text:  # what the likely mistake gives: each token decoded alone
        assert tokenizer.vocab_size != 257 or "".join(tokenizer.decode([number]) for number in ids) != text


def test_a_character_comes_with_its_last_token_and_as_soon_as_that():
    stream = TextStream(ByteTokenizer())
    assert [stream.add(byte) for byte in "a🙂b".encode()] == ["a", "", "", "", "🙂", "b"]
    assert [stream.add(*"é☃".encode()[:3]), stream.add(*"☃".encode()[1:])] == ["é", "☃"]


def test_what_is_unfinished_at_the_end_and_what_is_no_utf8_is_said_once():
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer)
    assert [stream.add(byte) for byte in "☃".encode()[:2]] == ["", ""]
    assert stream.end() == "\N{REPLACEMENT CHARACTER}"
    assert stream.add(97) == "a"  # a new text
    ids = list(b"\xffa\xfe\xfe\xfe\xfe\xfe\xfe\xfeb\xe2\x98c\xef\xbf\xbd")
    stream = TextStream(tokenizer)
    pieces = [stream.add(number) for number in ids]
    assert "".join(pieces) + stream.end() == tokenizer.decode(ids)
    assert "".join(pieces[:8]).count("\N{REPLACEMENT CHARACTER}") >= 4  # a stream of bad bytes is not held back for ever


def test_a_long_text_is_streamed_in_constant_work(tokenizer):
    """The ids that are decoded again with each new one stay few."""
    text = "".join(TEXTS) * 40
    stream, most = TextStream(tokenizer), 0
    pieces = []
    for number in tokenizer.encode(text).tolist():
        pieces.append(stream.add(number))
        most = max(most, len(stream._ids))
    assert "".join(pieces) == text
    assert most < 80


def test_words_of_a_decoder_that_joins_by_spaces_are_streamed(tmp_path):
    tokenizer = SubwordTokenizer(wordpiece())
    ids = [3, 4, 5] * 50
    stream = TextStream(tokenizer)
    assert "".join(stream.add(number) for number in ids) == tokenizer.decode(ids)


def test_bytes_that_a_decoder_puts_together_in_a_row_are_streamed():
    """As in Llama's files: a row of byte tokens is decoded as one, and all of it is U+FFFD while a character is unfinished."""
    package = pytest.importorskip("tokenizers", reason='needs the extra hf: pip install "tpattn[hf]"')
    vocab = {"</s>": 0, "\u2581a": 1, "b": 2, "<0xE2>": 3, "<0x98>": 4, "<0x83>": 5}
    made = package.Tokenizer(package.models.BPE(vocab, [], byte_fallback=True))
    kinds = package.decoders
    made.decoder = kinds.Sequence([kinds.Replace("\u2581", " "), kinds.ByteFallback(), kinds.Fuse(), kinds.Strip(" ", 1, 0)])
    made.add_special_tokens(["</s>"])
    tokenizer = SubwordTokenizer(made.to_str())
    assert tokenizer.decode([3, 4, 5, 3]) == "\N{REPLACEMENT CHARACTER}" * 4
    snow = [3, 4, 5]
    for ids in ([1, *snow, 2, 1], snow * 40, [1, 2, *snow * 2] * 30, [*snow * 7, 1, 1] * 9):
        stream = TextStream(tokenizer)
        assert "".join(stream.add(number) for number in ids) == tokenizer.decode(ids)
        assert len(stream._ids) < 80
