"""Trains a transformer, its weights sharded over tp and its tokens over cp, and writes the run's folder.

    torchrun --standalone --nproc-per-node 4 scripts/train.py parallel=tp2_cp2 data.path=my.txt
    python scripts/train.py                           one process, all cores
    python scripts/train.py --help                    every group and key

The folder (runs/ID, or run.dir) gets config.yaml, metrics.jsonl and metrics.csv with a line per step, loss.png, and checkpoints/,
from which the same command with run.dir=FOLDER goes on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import signal
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the tpattn beside this script, installed or not

from torch.distributed.elastic.multiprocessing.errors import record as for_torchrun  # noqa: E402

from tpattn import ParallelContext, PeerLost, checkpoint  # noqa: E402
from tpattn.checkpoint import CheckpointError  # noqa: E402
from tpattn.config import Config, Parts, deciding, dump, load, make_run_dir, one_message, parts  # noqa: E402
from tpattn.decode import generate  # noqa: E402
from tpattn.training import (  # noqa: E402
    NonFiniteLoss,
    Record,
    StopSignal,
    draw_loss,
    from_rank0,
    need_tensorboard,
    read_metrics,
    together,
    train,
)

CONFIGS = ROOT / "configs"
PROMPT, SAMPLE, SAMPLE_SECONDS = 24, 150, 5.0  # tokens of a document, tokens written at most, and the time for it
# What may be another when a run goes on, without a word: it changes no number. (Text and tokenizer are compared themselves.)
FREE = (
    *("parallel.", "attention.", "run.", "data.path", "data.tokenizer", "train.checkpoint_"),
    *("train.stop_at", "train.resume", "train.log_every", "train.valid_", "train.fused_loss", "train.fsdp"),
)


@for_torchrun  # an error's traceback goes into torchrun's report too
def main() -> None:
    argv = sys.argv[1:]
    with ExitStack() as stack, the_peers_error_first():
        stop = stack.enter_context(StopSignal())
        with one_message():
            cfg = load(argv, CONFIGS)
            ctx = stack.enter_context(ParallelContext.from_config(cfg.parallel))
            if cfg.run.tensorboard:  # rank 0 writes; what it lacks ends all
                together(need_tensorboard if ctx.world.rank == 0 else str, ctx)
            run = parts(cfg, ctx)
            folder, done = begin(cfg, run, ctx)
        try:
            made = go(cfg, run, ctx, folder, done, stop)
        except (NonFiniteLoss, CheckpointError):  # every rank has it
            with one_message():
                raise
        if made < last_step(cfg):
            left_early(made, cfg, ctx, folder, stop)
        else:
            finish(cfg, run, ctx, folder, argv)


@contextmanager
def the_peers_error_first() -> Iterator[None]:
    """A rank that lost a peer waits: the peer's own error is the one to read, and torchrun ends all when it has seen that."""
    try:
        yield
    except PeerLost:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is nothing to finish any more
        time.sleep(5)
        raise


def begin(cfg: Config, run: Parts, ctx: ParallelContext) -> tuple[Path, int]:
    """The run's folder, and the steps that were made before this start: those of the checkpoint that train.resume means."""
    resume, found = cfg.train.resume, None
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

    def load_named() -> None:
        nonlocal found
        if isinstance(resume, str) and resume != "auto":
            found = checkpoint.load(resume, run.model, run.optimizer, ctx=ctx, own_options=True)

    if not restarted:  # before a folder is made: it may be a mistake
        load_named()
    folder = make_run_dir(cfg, ctx.world.rank, lambda text: from_rank0(text, ctx))
    if restarted:  # torchrun's next attempt goes on with what the first one made, wherever that had begun
        if from_rank0(str(checkpoint.newest(folder / checkpoint.FOLDER) or ""), ctx):
            resume = "auto"
        load_named()
    if resume == "auto":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", checkpoint.CheckpointWarning)  # told below
            found = checkpoint.load_latest(folder / checkpoint.FOLDER, run.model, run.optimizer, ctx=ctx, own_options=True)
    done = 0 if found is None else int(found["step"])
    if ctx.world.rank == 0:
        left = checkpoint.set_aside(folder / checkpoint.FOLDER, after=done)
        weights = sum(p.numel() for p in run.model.parameters())
        print(ctx.describe())
        print(f"text    {run.corpus.source}")
        facts = run.corpus.describe().removeprefix(f"{run.corpus.source}: ")
        print(textwrap.fill(facts, 100, initial_indent=" " * 8, subsequent_indent=" " * 8, break_long_words=False))
        print(f"model   {weights:,} weights in {cfg.model.num_layers} layers, {cfg.train.dtype}")
        print(f"run     {shown(folder)}")
        for text in (found or {}).get("skipped", []):
            print(f"skipped {text}")
        if found is not None:
            print(f"resume  after step {done}", *changes(found["about"], about(cfg, run)), sep="\n        ")
        for path in left:
            print(f"        {shown(path)} is of the steps that are made anew now: set aside")
        if done >= last_step(cfg):
            print("        nothing is left to do; train.steps, or train.stop_at, says how far to go")
        sys.stdout.flush()
    return folder, done


def last_step(cfg: Config) -> int:
    """The step after which this start ends."""
    return cfg.train.steps if cfg.train.stop_at is None else cfg.train.stop_at


def about(cfg: Config, run: Parts) -> dict[str, Any]:
    """What a checkpoint keeps beside the tensors."""
    return {"config": dataclasses.asdict(cfg), "text": run.corpus.sha256, "tokenizer": run.tokenizer.state()}


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line for each thing that decides the numbers and is not as it was when the checkpoint was saved."""
    now = json.loads(json.dumps(now))  # as it would come back: lists for tuples
    lines = []
    for group, keys in now["config"].items():
        for key, value in keys.items():
            was = before.get("config", {}).get(group, {}).get(key)
            if was != value and not f"{group}.{key}".startswith(FREE):
                lines.append(f"{group}.{key} was {json.dumps(was)}, is now {json.dumps(value)}")
    if before.get("text") != now["text"]:
        lines.append("the text is another one: its sha256 differs")
    if before.get("tokenizer", now["tokenizer"]) != now["tokenizer"]:
        lines.append("the tokenizer is another one")
    return lines


def go(cfg: Config, run: Parts, ctx: ParallelContext, folder: Path, done: int, stop: StopSignal) -> int:
    """The steps from `done` + 1 on, recorded by rank 0; the number of steps made."""
    record = None
    if ctx.world.rank == 0:
        cfg.parallel.dp, cfg.parallel.cp, cfg.parallel.tp = ctx.dp.size, ctx.cp.size, ctx.tp.size  # no -1: compare.py reads them
        (folder / "config.yaml").write_text(dump(cfg))
        record = Record(folder, steps=cfg.train.steps, done=done, last=last_step(cfg), tensorboard=cfg.run.tensorboard)

    saver = checkpoint.Saver(folder / checkpoint.FOLDER, ctx=ctx, keep=cfg.train.checkpoint_keep)
    facts = about(cfg, run)

    def save(step: int) -> None:
        saver.save(run.model, run.optimizer, step=step, about=facts)

    try:
        with saver:
            return train(
                **deciding(cfg, run, ctx),
                fused_loss=cfg.train.fused_loss,
                done=done,
                last=last_step(cfg),
                record=record,
                log_every=cfg.train.log_every,
                save=save,
                save_every=cfg.train.checkpoint_every,
                stop=stop,
                valid=run.valid,
                valid_every=cfg.train.valid_every,
                valid_batches=cfg.train.valid_batches,
            )
    finally:
        if record is not None:
            record.close()


def left_early(made: int, cfg: Config, ctx: ParallelContext, folder: Path, stop: StopSignal) -> None:
    """What a run says that was told to stop."""
    if ctx.world.rank == 0:
        saved = f", saved after step {made}" if made else ""
        words = f"run.dir={shlex.quote(shown(folder))}" + (" train.resume=auto" if cfg.train.resume != "auto" else "")
        print(f"stopped by {stop.name}{saved}; the same command with {words} goes on")


def finish(cfg: Config, run: Parts, ctx: ParallelContext, folder: Path, argv: list[str]) -> None:
    """What has come of it: text that the model writes, numbers, the picture, and what to do next. Every rank takes part."""
    prompt, text = sample(cfg, run, ctx)
    if ctx.world.rank != 0:
        return
    print(f"sample  its first {PROMPT} tokens are a document's own:\n        {text}")
    for line in summary(cfg, folder):
        print(line)
    parallel = f"dp {ctx.dp.size} x cp {ctx.cp.size} x tp {ctx.tp.size}"
    picture = draw_loss(folder, f"{cfg.model.num_layers} layers, hidden {cfg.model.hidden}, {cfg.train.dtype}, {parallel}")
    print(f"picture {shown(picture)}")
    script = Path(sys.argv[0])
    start = command("python") if ctx.world.size == 1 else f"{command('torchrun')} --standalone --nproc-per-node {ctx.world.size}"
    if ctx.world.size > 1 and ctx.device.type == "cpu":
        print(f"compare {command('python')} {shlex.quote(shown(script.with_name('compare.py')))} {shlex.quote(shown(folder))}")
    words = [shown(script.with_name("generate.py")), shown(folder), prompt, "--temperature", "0.8", "--top-p", "0.95"]
    if ctx.device.type == "cpu":
        print(f"write   {command('python')} {shlex.join(words)}")
    else:
        print(f"write   {start} {shlex.join([*words, '--cp', str(ctx.cp.size), '--tp', str(ctx.tp.size)])}")
    words = [word for word in argv if not word.startswith(("run.dir=", "train.stop_at=", "train.resume="))]
    if last_step(cfg) < cfg.train.steps:
        words.append(f"run.dir={shown(folder)}")
    else:
        words = [word for word in words if not word.startswith(("data=", "data.path="))] + ["data.path=FILE_OR_FOLDER"]
    print(f"next    {start} {shlex.quote(shown(script))} {shlex.join(words)}")


def sample(cfg: Config, run: Parts, ctx: ParallelContext) -> tuple[str, str]:
    """The beginning of a document, and with it what the model writes on from there, as some lines. Every rank takes part."""
    tokenizer = run.tokenizer
    ids = run.batches.packed.tokens(0)[:PROMPT].tolist()
    until = time.monotonic() + SAMPLE_SECONDS
    new = generate(
        run.model,
        ids,
        ctx=ctx,
        max_new_tokens=min(SAMPLE, cfg.train.seq_len),
        temperature=0.8,
        top_p=0.95,
        seed=cfg.train.seed,
        end=tokenizer.end,
        window=cfg.train.seq_len,
        limit=tokenizer.vocab_size,
        stop=lambda: time.monotonic() > until,
    )
    text = tokenizer.decode([*ids, *new])
    lines = ["".join(c if c.isprintable() else "\ufffd" for c in line.expandtabs(4)) for line in text.splitlines()]
    cut = [piece for line in lines for piece in (textwrap.wrap(line, 90, drop_whitespace=False) or [""])]
    return (tokenizer.decode(ids).strip().splitlines() or [""])[0].strip(" \t-"), "\n        ".join(cut).strip()


def summary(cfg: Config, folder: Path) -> Iterator[str]:
    """The run in numbers, as its metrics.jsonl has them."""
    metrics = read_metrics(folder)
    if not metrics:
        return
    per_step = cfg.train.batch_size * cfg.train.seq_len
    tokens, seconds = per_step * len(metrics), sum(per_step / entry["tokens_per_second"] for entry in metrics)
    took = f"{round(seconds) // 60}:{round(seconds) % 60:02}"
    yield f"total   {len(metrics):,} steps in {took}, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s"
    best = min(metrics, key=lambda entry: entry["loss"])
    line = f"loss    {metrics[-1]['loss']:.4f} at the end, {best['loss']:.4f} at best, step {best['step']}"
    if valid := [entry["valid_loss"] for entry in metrics if "valid_loss" in entry]:
        line += f"; on held-out documents {valid[-1]:.4f}, at best {min(valid):.4f}"
    yield line
    shares = [entry["comm_share"] for entry in metrics if "comm_share" in entry]
    costs = [f"{max(entry.get('memory_bytes', 0) for entry in metrics) / 1e9:.2f} GB of memory at most on a rank"]
    costs += [f"{sum(shares) / len(shares):.0%} of the time in communication"] if shares else []
    yield f"cost    {', '.join(costs)}"


def command(name: str) -> str:
    """How the user starts this Python's `name`: by its name, if that finds it."""
    own = Path(sys.executable).with_name(name)
    return name if shutil.which(name) == str(own) else shlex.quote(shown(own))


def shown(path: Path) -> str:
    """`path` as seen from the folder the user works in, if that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


if __name__ == "__main__":
    main()
