"""The parts of a run from its config, on one mesh; and a config that was written to a run's folder."""

from pathlib import Path

import pytest
import torch
from pool import ranks

from tpattn import ParallelContext, Unsupported, comm
from tpattn.config import ConfigError, build, dump, load, load_dumped, parts
from tpattn.data import ByteTokenizer, DataError, Document, read_documents, train_tokenizer, write_tokens

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
WORDS = "some words, again and again; " * 40


def config(*argv):
    return load(["model=tiny", "train=smoke", *argv], CONFIGS)


@ranks(2)
def test_ranks_that_read_another_text_are_told_so_before_training(rank, world, tmp_path):
    """As on two machines whose disks differ: in what the file says, and in whether it is there."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(WORDS + name)
    cfg = config(f"data.path={tmp_path / 'a'}")
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        assert parts(cfg, ctx).corpus.num_bytes == len(WORDS) + 1
        if rank == 1:
            cfg.data.path = str(tmp_path / "b")
        with pytest.raises(Unsupported, match="^the text's sha256 is not the same on all ranks: [0-9a-f]{64} on rank 0; "):
            parts(cfg, ctx)
        if rank == 1:
            cfg.data.path = str(tmp_path / "c")
        with pytest.raises(Unsupported, match=f"^rank 1: data.path={tmp_path / 'c'}: no such file or folder"):
            parts(cfg, ctx)


def written(folder, count=40):
    for i in range(count):
        (folder / f"{i:02}.txt").write_text(WORDS[: 300 + 7 * i])
    return folder


def test_tokenizer_and_held_out_documents_of_a_run(tmp_path):
    """Of text, and of a folder of tokens: the same tokens, the vocabulary of bytes, a share that is honoured."""
    (tmp_path / "texts").mkdir()
    texts = written(tmp_path / "texts")
    write_tokens(read_documents(texts).documents, tmp_path / "tokens", ByteTokenizer(), "texts")
    with ParallelContext.single(device="cpu") as ctx:
        text, tokens = (parts(config(f"data.path={tmp_path / name}", "data.valid=0.1"), ctx) for name in ("texts", "tokens"))
        assert text.corpus.held_out == tokens.corpus.held_out == 4
        assert torch.equal(text.valid.tokens(3), tokens.valid.tokens(3))
        for step in (0, 5):
            one, other = (run.batches.batch(step, ctx, run.layout) for run in (text, tokens))
            assert torch.equal(one.tokens, other.tokens) and torch.equal(one.targets, other.targets)
        assert text.tokenizer.state() == tokens.tokenizer.state() == {"kind": "bytes"}
        assert text.model.vocab_size == 257
        assert parts(config(f"data.path={texts}", "data.valid=0"), ctx).valid is None
        assert parts(config(f"data.path={texts}"), ctx).valid.num_samples > 0
        with pytest.raises(ConfigError, match="a folder of tokens, has its own; needed: auto"):
            config(f"data.path={tmp_path / 'tokens'}", "data.tokenizer=bytes")


def test_the_model_takes_the_vocabulary_of_the_tokenizer(tmp_path):
    """From a tokenizer.json and from a folder; a smaller model.vocab_size is refused, a larger one is kept."""
    pytest.importorskip("tokenizers", reason='needs the extra hf: pip install "tpattn[hf]"')
    (tmp_path / "texts").mkdir()
    texts = written(tmp_path / "texts")
    learnt = train_tokenizer(read_documents(texts).documents, 270)
    (tmp_path / "tokenizer.json").write_text(learnt.state()["json"])
    write_tokens(read_documents(texts).documents, tmp_path / "tokens", learnt, "texts")
    ways = [[f"data.path={texts}", f"data.tokenizer={tmp_path / 'tokenizer.json'}"], [f"data.path={tmp_path / 'tokens'}"]]
    with ParallelContext.single(device="cpu") as ctx:
        runs = [parts(config(*way), ctx) for way in ways]
        for run, way in zip(runs, ways, strict=True):
            assert run.model.vocab_size == run.tokenizer.vocab_size == build(config(*way), ctx).vocab_size == 270
            assert run.tokenizer.decode(run.tokenizer.encode(WORDS)) == WORDS
            assert parts(config(*way, "model.vocab_size=320"), ctx).model.vocab_size == 320
            with pytest.raises(ConfigError, match="model.vocab_size=269: the tokenizer of the text has 270 ids"):
                parts(config(*way, "model.vocab_size=269"), ctx)
        assert torch.equal(runs[0].batches.share(0).tokens, runs[1].batches.share(0).tokens)
        assert runs[0].tokenizer.state() == runs[1].tokenizer.state()


@ranks(2)
def test_ranks_with_another_tokenizer_are_told_so(rank, world, tmp_path):
    """A tokenizer.json that differs between machines: other tokens of the same text, even where the vocabulary is as large."""
    pytest.importorskip("tokenizers", reason='needs the extra hf: pip install "tpattn[hf]"')
    if rank == 0:
        (tmp_path / "text").write_text(WORDS * 3)
    words = WORDS if rank == 0 else WORDS.replace("words", "names")
    learnt = train_tokenizer([Document("", words.encode())], 265)
    place = tmp_path / f"tokenizer-{rank}.json"
    place.write_text(learnt.state()["json"])
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        comm.agree([0], ctx.world)  # rank 0 has written the text
        with pytest.raises(Unsupported, match="^the tokenizer's sha256 is not the same on all ranks"):
            parts(config(f"data.path={tmp_path / 'text'}", f"data.tokenizer={place}"), ctx)


@ranks(2)
def test_what_does_not_fit_is_found_before_training(rank, world, tmp_path):
    (tmp_path / "a").write_text(WORDS)
    with ParallelContext.from_env(dp=2, timeout=60) as ctx:
        with pytest.raises(DataError, match="batch_size=1 gives nothing to some of the dp=2 ranks"):
            parts(config(f"data.path={tmp_path / 'a'}", "train.batch_size=1", "parallel.dp=-1"), ctx)
        with pytest.raises(DataError, match="too few for one sample of seq_len=9000"):
            parts(config(f"data.path={tmp_path / 'a'}", "train.seq_len=9000"), ctx)


@pytest.mark.parametrize(
    ("dtype", "weights", "logits"),
    [("float32", torch.float32, None), ("float64", torch.float64, None), ("bfloat16", torch.float32, torch.bfloat16)],
)
def test_train_dtype_is_that_of_the_computation(tmp_path, dtype, weights, logits):
    """Weights and the optimizer's state stay in float32 under bfloat16."""
    (tmp_path / "a").write_text(WORDS)
    with ParallelContext.single(device="cpu") as ctx:
        run = parts(config(f"data.path={tmp_path / 'a'}", f"train.dtype={dtype}"), ctx)
        batch = run.batches.batch(0, ctx, run.layout)
        assert run.model(batch.tokens, layout=run.layout).dtype == (logits or weights)
        assert {p.dtype for p in run.model.parameters()} == {weights}


@pytest.mark.parametrize("argv", [[], ["experiment=quickstart"], ["train=gpu", "model=base", "attention=usp", "parallel=cp4"]])
def test_a_written_config_reads_back_as_it_was(tmp_path, argv):
    cfg = load([*argv, "optim.lr=1e-17", "train.stop_at=null", "run.dir=a: b #c", "optim.clip=null"], CONFIGS)
    (tmp_path / "config.yaml").write_text(dump(cfg))
    assert load_dumped(tmp_path / "config.yaml") == cfg


@pytest.mark.parametrize(
    ("text", "told"),
    [(None, "cannot read the file: No such file"), ("a: [", "no config of a run: "), ("- 1", "needed: groups of keys"),
     ("trian: {}", "trian"), ("train: {stepps: 3}", "Did you mean train.steps")],
)  # fmt: skip
def test_what_is_no_written_config_is_one_message(tmp_path, text, told):
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=told) as error:
        load_dumped(tmp_path / "config.yaml")
    assert "\n" not in str(error.value)


@ranks(2)
def test_train_fsdp_divides_the_model_before_the_optimizer_is_made(rank, world, tmp_path):
    """Every weight is divided over dp x cp, and the optimizer holds these; a step runs. Off by default."""
    from tpattn.params import data_dim
    from tpattn.training import train_step

    (tmp_path / "a").write_text(WORDS)
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        for on in (True, False):
            run = parts(config(f"data.path={tmp_path / 'a'}", *(["train.fsdp=true"] if on else [])), ctx)
            assert {data_dim(p) is not None for p in run.model.parameters()} == {on}
            held = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
            assert held == {id(p) for p in run.model.parameters()}
            train_step(run.model, run.optimizer, run.batches.batch(0, ctx, run.layout), ctx=ctx, fused_loss=on)
