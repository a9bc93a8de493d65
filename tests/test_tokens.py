"""A folder of tokens: the same batches as from the text, memory that stays small, and a message for every kind of fault."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts import make_tokens
from tpattn.data import (
    Batches,
    ByteTokenizer,
    DataError,
    Document,
    PackedTokens,
    check_tokens,
    is_token_folder,
    layout_for,
    load_tokenizer,
    open_tokens,
    prepare,
    read_documents,
    write_tokens,
)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def texts(tmp_path):
    """A folder of 30 documents of odd lengths."""
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    for i in range(30):
        (folder / ("sub" if i % 4 == 0 else "") / f"{i:02}.txt").write_text(f"document {i} ☃\r\n" * (1 + 7 * i % 23), newline="")
    return folder


@pytest.fixture
def folder(texts, tmp_path):
    write_tokens(read_documents(texts).documents, tmp_path / "tokens", ByteTokenizer(), "texts")
    return tmp_path / "tokens"


def facts(folder, **changed):
    """The folder's JSON, rewritten with these values (None = left out)."""
    place = folder / "tpattn-tokens.json"
    kept = {key: value for key, value in (json.loads(place.read_text()) | changed).items() if value is not None}
    place.write_text(json.dumps(kept))
    return kept


def main(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["make_tokens.py", *map(str, argv)])
    try:
        make_tokens.main()
    except SystemExit as leave:
        return leave.code
    return 0


# ------------------------------------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("valid", ["auto", 0, 0.2])
@pytest.mark.parametrize("dp, cp", [(1, 1), (2, 1), (3, 2)])
def test_batches_from_the_folder_equal_batches_from_the_text(texts, folder, dp, cp, valid):
    text, tokens = (prepare(path, 16, valid=valid) for path in (texts, folder))
    layout = layout_for("auto", 16, cp)
    assert (text.valid is None) == (tokens.valid is None) == (valid == 0)
    for one, other in ((text.train, tokens.train), (text.valid, tokens.valid)):
        if one is None:
            continue
        assert one.num_samples == other.num_samples
        for step in (0, 3, 11):
            for place in [{"dp_rank": d, "dp_size": dp, "cp_rank": c} for d in range(dp) for c in range(cp)]:
                want, got = (Batches(packed, 5, seed=2).share(step, layout, **place) for packed in (one, other))
                assert torch.equal(got.tokens, want.tokens) and torch.equal(got.targets, want.targets)
                assert (got.documents, got.samples) == (want.documents, want.samples)
    assert tokens.corpus.held_out == text.corpus.held_out


def test_what_the_files_hold(folder, texts):
    made = open_tokens(folder)
    packed = PackedTokens.from_documents(read_documents(texts).documents, 16)
    assert made.stream.tolist() == packed.stream.tolist() and made.starts.tolist() == packed.starts.tolist()
    assert (folder / "tokens.bin").read_bytes()[:4] == bytes([ord("d"), 0, ord("o"), 0])  # little-endian, 2 bytes
    assert (folder / "starts.bin").stat().st_size == 8 * 30
    assert sorted(file.name for file in folder.iterdir()) == ["starts.bin", "tokens.bin", "tpattn-tokens.json"]
    kept = facts(folder)
    assert (kept["format"], kept["dtype"], kept["vocab_size"], kept["tokenizer"]) == (1, "uint16", 257, {"kind": "bytes"})
    assert made.describe() == (
        f"{folder} (tokens of texts): 30 documents, {len(packed.stream):,} tokens, vocabulary 257, sha256 {kept['sha256'][:16]}"
    )


def test_the_hash_sees_tokens_and_where_documents_end(tmp_path):
    def sha256(*texts):
        place = tmp_path / "-".join(texts)
        write_tokens([Document("", text.encode()) for text in texts], place, ByteTokenizer(), "")
        return open_tokens(place).sha256

    assert len({sha256("ab", "c"), sha256("a", "bc"), sha256("abc"), sha256("ab", "d")}) == 4


class Wide(ByteTokenizer):
    """Ids that need 4 bytes."""

    vocab_size = 70_000

    def encode(self, text):
        return super().encode(text) + 69_000


def test_a_large_vocabulary_takes_4_bytes_a_token(tmp_path, monkeypatch):
    monkeypatch.setattr("tpattn.data.folder.tokenizer_from", lambda state: Wide())
    write_tokens([Document("a", b"abc"), Document("b", b"d")], tmp_path / "wide", Wide(), "")
    made = open_tokens(tmp_path / "wide")
    assert made.stream.dtype == torch.int32
    assert made.stream.tolist() == [69_097, 69_098, 69_099, 256, 69_100, 256]
    assert prepare(tmp_path / "wide", 3).train.tokens(1).tolist() == [256, 69_100, 256]
    in_memory = PackedTokens.from_documents([Document("a", b"abc"), Document("b", b"d")], 3, Wide())
    assert in_memory.stream.tolist() == made.stream.tolist()


# -------------------------------------------------------------------------------------------------------------------- memory

LOOK = """
import sys
from tpattn.data import prepare

def resident(*kinds):
    return sum(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(kinds)) >> 10

small = prepare(sys.argv[2], 64, valid=0.1)  # what torch itself loads at the first use does not count
[small.train.tokens(i) for i in range(3)]
before, own = resident("RssAnon", "RssFile"), resident("RssAnon")
made = prepare(sys.argv[1], 64, valid=0.1)
opened = resident("RssAnon", "RssFile")
for step in range(50):
    made.train.tokens(step * (made.train.num_samples // 50))
print(opened - before, resident("RssAnon") - own, made.train.stream.stream.dtype)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from Linux's /proc")
def test_a_folder_is_mapped_and_not_read_into_memory(folder, tmp_path):
    """96 MB of tokens: opening, which looks at every id, and samples from everywhere need less than a quarter of it.

    Pages of the file that samples have touched are not counted: the system drops them when it needs the memory.
    """
    shutil.copytree(folder, tmp_path / "small")
    n = 48 << 20
    os.truncate(folder / "tokens.bin", 2 * n)
    (folder / "starts.bin").write_bytes(b"".join(i.to_bytes(8, "little") for i in range(0, n, n // 64)))
    facts(folder, tokens=n, documents=64)
    command = [sys.executable, "-c", LOOK, str(folder), str(tmp_path / "small")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    opened, used, dtype = done.stdout.split()
    assert int(opened) < 24 and int(used) < 24, done.stdout
    assert dtype == "torch.uint16"


def test_writing_holds_one_document_at_a_time(tmp_path):
    """The documents come from a generator, and each is on its way to disk before the next is asked for."""
    sizes = []

    def documents():
        for i in range(4):
            yield Document(str(i), b"x" * 1_000_000)
            (draft,) = tmp_path.glob(".tokens.draft-*")
            sizes.append((draft / "tokens.bin").stat().st_size)

    write_tokens(documents(), tmp_path / "tokens", ByteTokenizer(), "")
    assert sizes == sorted(sizes) and sizes[0] > 1_900_000 and sizes[2] > 5_900_000
    assert [p.name for p in tmp_path.iterdir()] == ["tokens"]


# -------------------------------------------------------------------------------------------------------------------- faults


def test_an_existing_place_is_kept_and_a_failed_writing_leaves_nothing(tmp_path, folder):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(DataError, match="tokens: is there already; give another place, or remove it"):
        write_tokens([Document("a", b"a")], folder, ByteTokenizer(), "")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before

    def broken():
        yield Document("a", b"a")
        raise DataError("b.txt: cannot read the file")

    with pytest.raises(DataError, match="b.txt"):
        write_tokens(broken(), tmp_path / "new", ByteTokenizer(), "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["texts", "tokens"]
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="out: cannot write the folder: Not a directory"):
        write_tokens([Document("a", b"a")], tmp_path / "file" / "out", ByteTokenizer(), "")


def test_a_token_beyond_the_vocabulary_is_named_with_its_place(folder):
    raw = bytearray((folder / "tokens.bin").read_bytes())
    raw[2 * 77 : 2 * 77 + 2] = (257).to_bytes(2, "little")
    (folder / "tokens.bin").write_bytes(raw)
    with pytest.raises(DataError, match=r"tokens\.bin: token 77 is 257, outside the vocabulary of 257 ids, 0 to 256"):
        open_tokens(folder)


def test_the_place_counts_from_the_start_of_the_file_and_negative_ids_are_found(tmp_path, monkeypatch):
    """Beyond the first chunk that is read, and with 4 bytes a token."""
    monkeypatch.setattr("tpattn.data.folder.tokenizer_from", lambda state: Wide())
    monkeypatch.setattr("tpattn.data.folder._CHUNK_BYTES", 16)
    write_tokens([Document("a", b"abcdefghij")], tmp_path / "wide", Wide(), "")
    raw = bytearray((tmp_path / "wide" / "tokens.bin").read_bytes())
    raw[36:40] = b"\xff" * 4
    (tmp_path / "wide" / "tokens.bin").write_bytes(raw)
    with pytest.raises(DataError, match="token 9 is -1, outside"):
        open_tokens(tmp_path / "wide")


@pytest.mark.parametrize(("name", "cut"), [("tokens.bin", 3), ("tokens.bin", -2), ("starts.bin", 8), ("starts.bin", -8)])
def test_a_file_that_was_cut_or_grew_is_named_with_both_sizes(folder, name, cut):
    size = (folder / name).stat().st_size
    os.truncate(folder / name, size - cut)
    with pytest.raises(DataError, match=rf"{name}: has {size - cut:,} bytes, .* {size:,} in all; it was cut or changed"):
        open_tokens(folder)


@pytest.mark.parametrize("chunk", [16, 1 << 20])
@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (0, 5, "document 0 starts at token 5; needed: starts that rise from 0"),
        (4, 0, "document 4 starts at token 0, after "),
        (5, -1, "document 5 starts at token -1, after "),
        (29, 1 << 40, f"document 29 starts at token {1 << 40}, after "),
    ],
)
def test_document_starts_that_do_not_rise_are_named(folder, monkeypatch, chunk, place, value, told):
    monkeypatch.setattr("tpattn.data.folder._CHUNK_BYTES", chunk)
    raw = bytearray((folder / "starts.bin").read_bytes())
    raw[8 * place : 8 * place + 8] = value.to_bytes(8, "little", signed=True)
    (folder / "starts.bin").write_bytes(raw)
    with pytest.raises(DataError, match=r"starts\.bin: ") as error:
        open_tokens(folder)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"format": 2}, "format 2, this tpattn reads 1; make it again with"),
        ({"format": None}, "format None"),
        ({"tokens": "12"}, "tokens is '12'; needed: int"),
        ({"documents": True}, "documents is True; needed: int"),
        ({"sha256": None}, "sha256 is None; needed: str"),
        ({"dtype": "float32"}, "dtype is 'float32'; needed: uint16 or int32"),
        ({"tokens": 0}, "there is nothing to train on"),
        ({"tokenizer": {"kind": "words"}}, "a tokenizer of kind 'words'"),
        ({"vocab_size": 300}, "vocab_size is 300, but its tokenizer has 257 ids"),
    ],
)
def test_a_description_that_does_not_fit_is_named(folder, changed, told):
    facts(folder, **changed)
    with pytest.raises(DataError, match=r"tpattn-tokens\.json: ") as error:
        open_tokens(folder)
    assert told in str(error.value)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"", b"[1]"])
def test_a_description_that_is_no_json_object_is_named(folder, content):
    (folder / "tpattn-tokens.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tpattn-tokens\.json: (is not JSON|format None)"):
        open_tokens(folder)


@pytest.mark.parametrize("name", ["tokens.bin", "starts.bin", "tpattn-tokens.json"])
def test_a_file_that_is_missing_or_unreadable_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name}: cannot read the file: No such file"):
        open_tokens(folder)
    assert is_token_folder(folder) == (name != "tpattn-tokens.json")
    (folder / name).symlink_to(folder / name)  # unreadable for root, too
    with pytest.raises(DataError, match=f"{name}: cannot read the file: Too many levels"):
        open_tokens(folder)


def test_another_tokenizer_than_the_folders_is_refused(folder):
    for word in ("bytes", "my/tokenizer.json"):
        with pytest.raises(DataError, match=f"data.tokenizer={word}: .* its own tokenizer; data.tokenizer=auto"):
            prepare(folder, 16, tokenizer=word)


def test_check_compares_every_byte(folder):
    assert check_tokens(folder).sha256 == facts(folder)["sha256"]
    raw = bytearray((folder / "tokens.bin").read_bytes())
    raw[20] ^= 1
    (folder / "tokens.bin").write_bytes(raw)
    open_tokens(folder)  # still numbers of the vocabulary: only the hash knows
    with pytest.raises(DataError, match="they are not as they were written"):
        check_tokens(folder)


# ---------------------------------------------------------------------------------------------------------------- the script


def test_the_script_makes_a_folder_and_checks_it(texts, tmp_path, monkeypatch, capsys):
    (texts / "empty.txt").write_text("")
    assert main(monkeypatch, texts, tmp_path / "out") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "skipped 1 empty (empty.txt)"
    assert out[1].startswith(f"{tmp_path / 'out'} (tokens of {texts}): 30 documents, ")
    assert out[2] == f"next    python scripts/train.py data.path={tmp_path / 'out'}"
    assert main(monkeypatch, "--check", tmp_path / "out") == 0
    assert capsys.readouterr().out.startswith("as it was written: ")
    os.truncate(tmp_path / "out" / "tokens.bin", 4)
    assert main(monkeypatch, "--check", tmp_path / "out") == 1
    assert "error: " in capsys.readouterr().err


def test_the_script_trains_a_tokenizer_that_another_folder_takes(texts, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers", reason='needs the extra hf: pip install "tpattn[hf]"')
    assert main(monkeypatch, texts, tmp_path / "one", "--tokenizer", "train", "--vocab-size", 280) == 0
    learnt = tmp_path / "one" / "tokenizer.json"
    assert main(monkeypatch, texts, tmp_path / "two", "--tokenizer", learnt) == 0
    one, two = (open_tokens(tmp_path / name) for name in ("one", "two"))
    assert one.sha256 == two.sha256 and one.tokenizer.state() == two.tokenizer.state() == load_tokenizer(learnt).state()
    assert len(one.stream) < len(prepare(texts, 16).train.stream)
    documents = read_documents(texts).documents
    starts = [*one.starts.tolist(), len(one.stream)]
    for i in (0, 7, 29):
        ids = one.stream[starts[i] : starts[i + 1]].tolist()
        assert ids[-1] == one.tokenizer.end and one.tokenizer.decode(ids) == documents[i].text.decode()
    text = prepare(texts, 16, tokenizer=str(learnt))  # the same tokens without a folder
    assert text.train.stream[:400].tolist() == prepare(tmp_path / "one", 16).train.stream[:400].tolist()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["nowhere", "out"], "data.path=nowhere: no such file or folder"),
        (["texts", "texts"], "texts: is there already"),
        (["tokens", "out"], "tokens: is a folder of tokens already"),
        (["texts", "out", "--tokenizer", "no.json"], "--tokenizer no.json: needed: bytes, train, or the path"),
        (["texts/latin1.txt", "out"], "not UTF-8 (byte 0xef at offset 2)"),
        (["texts"], "needed: SOURCE and OUT, or --check FOLDER"),
        (["texts", "out", "--vocab-size", "300"], "--vocab-size is for --tokenizer train"),
        (["texts", "out", "--check", "tokens"], "give it alone"),
    ],
)
def test_the_scripts_mistakes_are_one_message_and_make_nothing(texts, folder, monkeypatch, capsys, argv, told):
    (texts / "latin1.txt").write_bytes("naïve".encode("latin-1"))
    monkeypatch.chdir(texts.parent)
    assert main(monkeypatch, *argv) in (1, 2)
    assert told in capsys.readouterr().err.splitlines()[-1]
    assert sorted(p.name for p in texts.parent.iterdir()) == ["texts", "tokens"]


def test_an_unreadable_document_ends_the_script_by_name(texts, monkeypatch, capsys):
    (texts / "broken.txt").symlink_to(texts / "gone")
    assert main(monkeypatch, texts, texts.parent / "out") == 1
    assert "broken.txt: cannot read the file" in capsys.readouterr().err
    assert not (texts.parent / "out").exists()
