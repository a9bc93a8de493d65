"""Reading text, packing it, and which tokens each rank holds. No processes: rank and size are plain arguments."""

import os
import socket
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tpattn.data import (
    IGNORE,
    Batches,
    ByteTokenizer,
    Corpus,
    DataError,
    Document,
    PackedTokens,
    Selection,
    ValidBatches,
    held_out,
    layout_for,
    prepare,
    read_documents,
)
from tpattn.layout import SequenceLayout

LAYOUTS = ["contiguous", "zigzag", "striped"]


def packed_of(*lengths: int, seq_len: int) -> PackedTokens:
    """Documents of these lengths (ends included) whose tokens are 0, 1, 2, ... over the whole stream."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return PackedTokens(torch.arange(sum(lengths)), starts, seq_len)


# ------------------------------------------------------------------------------------------------------------- text on disk


def test_default_text_is_the_standard_library_without_tests():
    corpus = read_documents()
    names = [document.name for document in corpus.documents]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert all(name.endswith(".py") and not name.startswith(("test/", "site-packages/")) for name in names)
    assert 5e6 < corpus.num_bytes < 30e6
    argparse = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    assert dict((d.name, d.text) for d in corpus.documents)["argparse.py"] == argparse
    assert corpus.sha256 == read_documents().sha256
    assert corpus.sha256[:16] in corpus.describe()


def test_a_file_is_one_document(tmp_path):
    (tmp_path / "my text (1).md").write_text("naïve ☃\r\n", encoding="utf-8", newline="")
    corpus = read_documents(tmp_path / "my text (1).md")
    assert [(d.name, d.text.decode()) for d in corpus.documents] == [("my text (1).md", "naïve ☃\r\n")]


def test_bytes_stay_as_they_are(tmp_path):
    """Line ends of Windows, a byte-order mark, characters in two forms: nothing is put right."""
    text = b"\xef\xbb\xbfone\r\ntwo\rthree\n\n e\xcc\x81 \xc3\xa9 \x1a\t"
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.txt").write_bytes(text[3:])
    assert [d.text for d in read_documents(tmp_path).documents] == [text, text[3:]]
    assert prepare(tmp_path, 8).train.stream.tolist() == [*text, 256, *text[3:], 256]


def test_a_folder_is_read_recursively_in_the_order_of_names_and_what_is_no_text_is_named(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, content in {"z.txt": b"last", "a": b"first", "b/c.rst": b"middle", ".git": b"x", ".hidden/x.txt": b"x"}.items():
        (tmp_path / name).write_bytes(content)
    for name, content in {"b/picture.png": b"\x89PNG\0\0", "empty.txt": b"", "latin1.txt": "naïve".encode("latin-1")}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "linked").symlink_to(tmp_path / "b")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    corpus = read_documents(tmp_path)
    assert [d.name for d in corpus.documents] == ["a", "b/c.rst", "z.txt"]
    assert dict(corpus.skipped) == {
        "b/picture.png": "binary (it holds a zero byte)",
        "empty.txt": "empty",
        "latin1.txt": "not UTF-8 (byte 0xef at offset 2)",
        "linked": "a linked folder",
        "pipe": "not a regular file",
    }
    for name in ("3 documents", "b/picture.png", "empty.txt", "latin1.txt", "linked", "pipe"):
        assert name in corpus.describe()


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "empty"), (b"MZ\0\0", "binary"), (b"caf\xe9 au lait", "not UTF-8 (byte 0xe9 at offset 3)")],
    ids=["empty", "binary", "latin1"],
)
def test_a_bad_file_is_refused_by_name(tmp_path, content, words):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError) as error:
        read_documents(tmp_path / "bad.txt")
    assert "bad.txt" in str(error.value)
    assert words in str(error.value)


def test_missing_unreadable_and_textless_places_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.txt: no such file or folder"):
        read_documents(tmp_path / "nowhere.txt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="folder: the folder holds no UTF-8 text: no files"):
        read_documents(tmp_path / "folder")
    (tmp_path / "folder" / "only.bin").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"1 binary \(only\.bin\)"):
        read_documents(tmp_path / "folder")
    (tmp_path / "folder" / "good.txt").write_text("good")
    (tmp_path / "folder" / "broken.txt").symlink_to(tmp_path / "gone")  # unreadable for root, too
    with pytest.raises(DataError, match=r"broken\.txt: cannot read the file"):
        read_documents(tmp_path / "folder")


def test_a_file_and_a_folder_that_the_system_refuses_are_named(tmp_path, monkeypatch):
    """As without the right to read them, which root has always."""
    (tmp_path / "secret.txt").write_text("secret")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        for path in (tmp_path, tmp_path / "secret.txt"):
            with pytest.raises(DataError, match=r"secret\.txt: cannot read the file: Permission denied"):
                read_documents(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(DataError, match=f"{tmp_path}: cannot read the folder: Permission denied"):
            read_documents(tmp_path)


def test_a_socket_is_no_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        with pytest.raises(DataError, match="not a regular file"):
            read_documents("s")


def test_the_hash_sees_names_contents_and_where_documents_end():
    one = Corpus("", (Document("a", b"xy"), Document("b", b"z")))
    others = [(("a", b"xy"), ("b", b"y")), (("a", b"xy"), ("c", b"z")), (("a", b"x"), ("b", b"yz")), (("a", b"xy"),)]
    hashes = {Corpus("", tuple(Document(*d) for d in other)).sha256 for other in others}
    assert len(hashes | {one.sha256}) == 5


# ------------------------------------------------------------------------------------------------------------------- tokens


def test_tokenizer_gives_back_what_it_got():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("naïve ☃")
    assert ids.dtype == torch.int64
    assert ids.tolist() == list("naïve ☃".encode())
    assert tokenizer.decode(ids) == "naïve ☃"
    assert tokenizer.decode([104, 256, 105]) == "hi"
    assert tokenizer.decode(tokenizer.encode("☃")[:2]) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.encode("").tolist() == []
    for bad in (257, -1):
        with pytest.raises(DataError, match=f"{bad} is outside"):
            tokenizer.decode([1, bad])


def test_documents_are_packed_end_to_end_with_an_end_each():
    packed = PackedTokens.from_documents([Document("a", b"abc"), Document("e", b""), Document("b", b"de")], seq_len=4)
    assert packed.stream.tolist() == [97, 98, 99, 256, 256, 100, 101, 256]
    assert packed.stream.element_size() == 2
    assert packed.starts.tolist() == [0, 4, 5]
    assert (packed.num_samples, packed.dropped) == (2, 0)
    assert packed.tokens(1).tolist() == [256, 100, 101, 256]
    # the end is a target; what follows it is not, in the middle, at a sample's edge and at the stream's
    assert packed.targets(0).tolist() == [98, 99, 256, IGNORE]
    assert packed.targets(1).tolist() == [IGNORE, 101, 256, IGNORE]
    assert [packed.documents(i) for i in range(2)] == [[4], [1, 3]]
    assert packed.tokens(0).dtype == packed.targets(0).dtype == torch.int64


@pytest.mark.parametrize("seq_len", [1, 3, 5, 8])
def test_targets_and_documents_equal_the_stream_walked_token_by_token(seq_len):
    lengths = (5, 1, 1, 9, 2, 13)
    packed = packed_of(*lengths, seq_len=seq_len)
    owner = [d for d, length in enumerate(lengths) for _ in range(length)]
    assert packed.dropped == len(owner) - packed.num_samples * seq_len
    for i in range(packed.num_samples):
        places = range(i * seq_len, (i + 1) * seq_len)
        want = [p + 1 if p + 1 < len(owner) and owner[p + 1] == owner[p] else IGNORE for p in places]
        assert packed.targets(i).tolist() == want
        assert packed.documents(i) == [[owner[p] for p in places].count(d) for d in sorted({owner[p] for p in places})]


def test_a_text_too_short_for_one_sample_says_what_would_work():
    with pytest.raises(DataError, match="has 9 tokens, too few for one sample of seq_len=10; seq_len=9 or less would work"):
        packed_of(4, 5, seq_len=10)
    assert packed_of(4, 5, seq_len=9).num_samples == 1
    with pytest.raises(DataError, match="0 tokens"):
        PackedTokens.from_documents([], seq_len=4)
    with pytest.raises(DataError, match="seq_len=0"):
        packed_of(4, seq_len=0)


@pytest.mark.parametrize("starts", [[], [1], [0, 3, 3], [0, 4, 2], [0, 9]])
def test_wrong_document_starts_are_refused(starts):
    with pytest.raises(DataError, match="document starts"):
        PackedTokens(torch.arange(9), starts, 3)


# ----------------------------------------------------------------------------------------------------------------- held out


def test_a_selection_is_the_stream_of_its_documents():
    lengths = (5, 1, 4, 9, 2, 13)
    packed = packed_of(*lengths, seq_len=3)
    pieces = packed.stream.split(list(lengths))
    for chosen in ([0], [5], [1, 2, 4], [0, 1, 2, 3, 4, 5], [0, 2, 5]):
        part = Selection(packed.stream, packed.starts, torch.tensor(chosen))
        want = torch.cat([pieces[i] for i in chosen])
        assert len(part) == len(want)
        assert part.starts.tolist() == [sum(lengths[j] for j in chosen[:n]) for n in range(len(chosen))]
        for low in range(len(want) + 1):
            for high in range(low, len(want) + 3):
                assert torch.equal(part[low:high], want[low:high])
        if len(want) >= 3:
            copied, mapped = PackedTokens(want, part.starts, 3), PackedTokens(part, part.starts, 3)
            for i in range(copied.num_samples):
                assert torch.equal(copied.targets(i), mapped.targets(i)) and torch.equal(copied.tokens(i), mapped.tokens(i))
                assert copied.documents(i) == mapped.documents(i)


@pytest.mark.parametrize("share", [0.001, 0.02, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("lengths", [[7, 7], [1, 1000], [3] * 50, [*range(1, 300)], [1000, *[10] * 200]], ids=len)
def test_held_out_documents_come_near_the_share_and_are_some_but_not_all(lengths, share):
    chosen = held_out(torch.tensor(lengths), share)
    assert 0 < len(chosen) < len(lengths)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert torch.equal(held_out(torch.tensor(lengths), share), chosen)
    got = sum(lengths[i] for i in chosen.tolist()) / sum(lengths)
    if len(lengths) > 200 and 0.01 < share < 0.95:
        assert abs(got - share) < 0.01
    near = min(length / sum(lengths) for length in lengths)
    assert got <= max(2 * share, near)


def test_held_out_documents_are_the_same_on_every_machine():
    assert held_out(torch.full((40,), 10), 0.1).tolist() == [11, 19, 23, 31]


def written(folder, count, length=100):
    for i in range(count):
        (folder / f"{i:03}").write_bytes(bytes([97 + i % 26]) * (length - 1))
    return folder


def test_every_document_is_either_learnt_or_held_out(tmp_path):
    written(tmp_path, 40)
    made = prepare(tmp_path, 100, valid=0.1)
    whole = PackedTokens.from_documents(read_documents(tmp_path).documents, 100)
    both = [tuple(packed.tokens(i).tolist()) for packed in (made.train, made.valid) for i in range(packed.num_samples)]
    assert sorted(both) == sorted(tuple(whole.tokens(i).tolist()) for i in range(40))
    assert (made.valid.num_samples, made.train.num_samples, made.corpus.held_out) == (4, 36, 4)
    assert "; 4 held out for validation" in made.corpus.describe()
    assert made.corpus.sha256 == read_documents(tmp_path).sha256


def test_auto_holds_out_a_fiftieth_of_20_documents_or_more(tmp_path):
    written(tmp_path, 19)
    assert prepare(tmp_path, 50).valid is None and prepare(tmp_path, 50).corpus.held_out == 0
    assert prepare(tmp_path, 50).train.num_samples == 38
    written(tmp_path, 100)
    made = prepare(tmp_path, 50)
    assert (made.corpus.held_out, made.valid.num_samples, made.train.num_samples) == (2, 4, 196)
    made = prepare(tmp_path, 201)  # the two have 200 tokens, so they are learnt from
    assert made.valid is None and made.corpus.held_out == 0
    assert len(made.train.stream) == 10_000


def test_a_share_that_cannot_be_honoured_is_refused_with_what_would_work(tmp_path):
    written(tmp_path, 1)
    with pytest.raises(DataError, match="data.valid=0.1: whole documents .*, and the text is one; .*data.valid=0 would work"):
        prepare(tmp_path, 10, valid=0.1)
    assert prepare(tmp_path, 10, valid=0).valid is None
    written(tmp_path, 4)
    with pytest.raises(DataError, match=r"data.valid=0.1: .* with these 4 the nearest share is 0.25; data.valid=0.25, "):
        prepare(tmp_path, 10, valid=0.1)
    assert prepare(tmp_path, 10, valid=0.25).corpus.held_out == 1
    with pytest.raises(DataError, match=r"data.valid=0.25 holds out 100 tokens, too few .* seq_len=101; train.seq_len=100 "):
        prepare(tmp_path, 101, valid=0.25)
    with pytest.raises(DataError, match="data.valid=0.75 leaves for training 100 tokens, too few for one sample of seq_len=150"):
        prepare(tmp_path, 150, valid=0.75)
    with pytest.raises(DataError, match="the text has 400 tokens, too few for one sample of seq_len=401"):
        prepare(tmp_path, 401, valid=0.25)
    for wrong in (1, -0.1, float("nan")):
        with pytest.raises(DataError, match="needed: auto, or a share from 0 up, below 1"):
            prepare(tmp_path, 10, valid=wrong)


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [3, 4, 11])
def test_batches_of_held_out_samples_count_each_sample_once(dp, batch_size):
    packed = packed_of(4, 60, 46, seq_len=10)  # 11 samples
    batches = ValidBatches(packed, batch_size)
    assert len(batches) == -(-11 // batch_size)
    seen = []
    for step in range(len(batches)):
        shares = [batches.share(step, dp_rank=rank, dp_size=dp) for rank in range(dp)]
        assert sum(len(share.tokens) for share in shares) == batch_size  # as many rows on every rank at every step
        for share in shares:
            for row, sample in enumerate(share.samples):
                if sample < 0:
                    assert bool((share.targets[row] == IGNORE).all())
                else:
                    assert torch.equal(share.targets[row], packed.targets(sample))
                    seen.append(sample)
    assert seen == list(range(11))
    with pytest.raises(IndexError, match="of "):
        batches.samples(len(batches))


# ------------------------------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [2, 4])
def test_c16_next_token_loss_counts_each_of_seven_pairs_once(layout, n):
    """C16: T=8, token ids 0..7. Shifting inside a shard would lose the pair (3 -> 4) at the cp=2 boundary."""
    T = 8
    batches = Batches(packed_of(T, seq_len=T), batch_size=1, seed=0)
    logits = torch.randn(T, T, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = F.cross_entropy(logits[:-1], torch.arange(1, T), reduction="sum")
    total, pairs, shifted_inside = 0.0, [], []
    cut = getattr(SequenceLayout, layout)(T, n)
    for rank in range(n):
        share = batches.share(0, cut, cp_rank=rank)
        tokens, targets = share.tokens[0], share.targets[0]
        total += F.cross_entropy(logits[tokens], targets, ignore_index=IGNORE, reduction="sum")
        pairs += [(int(a), int(b)) for a, b in zip(tokens, targets, strict=True) if b != IGNORE]
        shifted_inside += list(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))
    assert sorted(pairs) == [(i, i + 1) for i in range(7)]
    assert pairs.count((3, 4)) == 1
    assert abs(total - whole) < 1e-12
    assert sorted(shifted_inside) != sorted(pairs)  # what the likely mistake would give


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("T", [8, 13, 24])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_c29_tokens_and_targets_stay_pairs_and_give_the_whole_back(layout, T, n):
    """C29: what one layout shards, the same layout undoes, for tokens and targets alike."""
    batches = Batches(packed_of(7, 3, 90, seq_len=T), batch_size=3, seed=5)
    cut = getattr(SequenceLayout, layout)(T, n)
    whole = batches.share(2)
    shares = [batches.share(2, cut, cp_rank=rank) for rank in range(n)]
    for name in ("tokens", "targets"):
        back = torch.empty_like(whole.tokens)
        for rank, share in enumerate(shares):
            back[:, cut.positions(rank)] = getattr(share, name)
        assert torch.equal(back, getattr(whole, name))
    for share in shares:
        counted = share.targets != IGNORE
        assert torch.equal(share.targets[counted], share.tokens[counted] + 1)
        assert share.documents == whole.documents


def test_rows_of_a_batch_are_divided_over_dp_and_the_order_is_the_same_for_every_dp():
    batches = Batches(packed_of(1000, seq_len=10), batch_size=7, seed=3)
    for step in (0, 5, 14):
        whole = batches.share(step)
        assert whole.samples == batches.samples(step)
        for dp in (1, 2, 3, 7):
            shares = [batches.share(step, dp_rank=rank, dp_size=dp) for rank in range(dp)]
            assert [len(s.tokens) for s in shares] == [len(p) for p in torch.arange(7).tensor_split(dp)]
            assert torch.equal(torch.cat([s.tokens for s in shares]), whole.tokens)
            assert [s.first_sequence for s in shares] == [int(p[0]) for p in torch.arange(7).tensor_split(dp)]


def test_each_epoch_visits_every_sample_once_in_an_order_of_its_own():
    batches = Batches(packed_of(230, seq_len=10), batch_size=4, seed=11)
    visited = [sample for step in range(23) for sample in batches.samples(step)]  # 92 sequences: four epochs of 23
    epochs = [visited[i : i + 23] for i in range(0, 92, 23)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[0] != list(range(23))
    assert [batches.order(e).tolist() for e in range(4)] == epochs
    assert Batches(batches.packed, 4, seed=12).order(0).tolist() != epochs[0]


def test_order_resumes_from_a_step_and_depends_on_nothing_that_ran_before():
    packed = packed_of(230, seq_len=10)
    run = Batches(packed, batch_size=4, seed=1)
    whole = [run.share(step).tokens for step in range(20)]
    torch.manual_seed(99)
    resumed = Batches(packed, batch_size=4, seed=1)
    assert all(torch.equal(resumed.share(step).tokens, whole[step]) for step in range(12, 20))
    # and another batch size goes through the same sequences
    assert [s for step in range(40) for s in Batches(packed, 2, 1).samples(step)] == [
        s for step in range(20) for s in run.samples(step)
    ]


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_the_order_is_the_same_for_every_dp_and_resumes_at_any_step(dp):
    """A run that stops and goes on with another dp sees what a run of one process sees, in batches that dp does not divide."""
    packed = packed_of(430, seq_len=10)
    whole = [Batches(packed, 5, seed=6).share(step) for step in range(12)]
    for first, sizes in ((0, [dp] * 12), (7, [dp] * 5), (3, [1 + (dp + step) % 4 for step in range(9)])):
        for step, size in enumerate(sizes, first):
            batches = Batches(packed, 5, seed=6)  # a new process
            shares = [batches.share(step, dp_rank=rank, dp_size=size) for rank in range(size)]
            assert [i for share in shares for i in share.samples] == whole[step].samples
            assert torch.equal(torch.cat([share.targets for share in shares]), whole[step].targets)


def test_order_is_the_same_on_every_machine():
    assert Batches(packed_of(80, seq_len=10), 8, seed=0).samples(0) == [3, 2, 6, 0, 1, 5, 4, 7]


def test_a_batch_may_be_larger_than_the_text():
    batches = Batches(packed_of(30, seq_len=10), batch_size=8, seed=0)
    assert len(batches.samples(0)) == 8
    assert sorted(batches.samples(0)[:3]) == sorted(batches.samples(0)[3:6]) == [0, 1, 2]


def test_too_small_a_batch_and_a_layout_that_does_not_fit_are_refused():
    batches = Batches(packed_of(80, seq_len=10), batch_size=3, seed=0)
    with pytest.raises(DataError, match=r"batch_size=3 .* dp=4 ranks.*batch_size=4 or more would work, or dp=3 at most"):
        batches.share(0, dp_rank=3, dp_size=4)
    with pytest.raises(DataError, match="layout is for 12 tokens, the samples have seq_len=10"):
        batches.share(0, SequenceLayout.zigzag(12, 2))
    with pytest.raises(DataError, match="batch_size=0"):
        Batches(batches.packed, 0, 0)
    with pytest.raises(ValueError, match="step=-1"):
        batches.share(-1)


def test_batch_takes_its_place_from_a_context():
    batches = Batches(packed_of(80, seq_len=10), batch_size=5, seed=0)
    ctx = SimpleNamespace(dp=SimpleNamespace(rank=1, size=2), cp=SimpleNamespace(rank=2, size=3))
    layout = layout_for("auto", 10, 3)
    batch = batches.batch(4, ctx, layout)
    assert torch.equal(batch.tokens, batches.share(4).tokens[3:][:, layout.positions(2)])
    assert (batch.first_sequence, batch.layout) == (3, layout)
    for wrong in (None, SequenceLayout.zigzag(10, 2)):
        with pytest.raises(DataError, match="but cp=3"):
            batches.batch(4, ctx, wrong)


def test_layout_words():
    """C28: zigzag positions by hand."""
    assert [layout_for("auto", 8, 2).positions(r).tolist() for r in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert layout_for("zigzag", 16, 4).positions(1).tolist() == [2, 3, 12, 13]
    assert layout_for("contiguous", 8, 2).positions(1).tolist() == [4, 5, 6, 7]
    assert layout_for("striped", 8, 2).positions(1).tolist() == [1, 3, 5, 7]
    with pytest.raises(DataError, match="zigzg"):
        layout_for("zigzg", 8, 2)
