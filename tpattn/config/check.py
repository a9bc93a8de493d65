"""What must hold between keys, as far as it can be known without processes: each rule with its numbers and a remedy.

How dp x cp x tp meets the number of ranks is for `ParallelContext` to say, which knows it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from tpattn.config.schema import AttentionConfig, Config, ConfigError, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from tpattn.data import ByteTokenizer, Tokenizer, is_token_folder


def check(cfg: Config) -> None:
    """ConfigError with the first rule that `cfg` breaks."""
    for message in _broken(cfg):
        raise ConfigError(message)


def _broken(cfg: Config) -> Iterator[str]:
    if not 0.001 <= cfg.parallel.timeout <= 1e7:
        yield f"parallel.timeout={cfg.parallel.timeout}: needed: more than 0 seconds, 0.001 to 10,000,000"
    yield from _grid(cfg.attention, cfg.parallel)
    yield from _model(cfg.model)
    yield from _optim(cfg.optim)
    yield from _train(cfg.train, cfg.parallel)
    yield from _data(cfg)


def _grid(attention: AttentionConfig, parallel: ParallelConfig) -> Iterator[str]:
    legs = {"ulysses": attention.ulysses, "ring": attention.ring, "merge": attention.merge}
    shown = " ".join(f"attention.{leg}={size}" for leg, size in legs.items())
    numbers = [size for size in legs.values() if not isinstance(size, str)]
    if not numbers:
        return
    if len(numbers) < 3:
        example = " ".join(f"attention.{leg}={1 if isinstance(size, str) else size}" for leg, size in legs.items())
        yield f"{shown}: needed: three whole numbers or auto for all three, such as {example}"
        return
    product, free = 1, numbers.count(-1)
    for size in numbers:
        product *= 1 if size == -1 else size
    if free > 1 or any(size < 1 and size != -1 for size in numbers):
        yield f"{shown}: needed: numbers from 1 up, of which one may be -1 (what is left of cp)"
    elif parallel.cp > 0 and (parallel.cp % product if free else parallel.cp != product):
        yield (
            f"{shown}: ulysses x ring x merge must be cp, but {'a multiple of ' if free else ''}{product} is not "
            f"parallel.cp={parallel.cp}; parallel.cp={product} or attention=auto would work"
        )


def _model(model: ModelConfig) -> Iterator[str]:
    for name in ("hidden", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn"):
        size = getattr(model, name)
        if size is not None and size < 1:
            yield f"model.{name}={size}: needed: 1 or more"
    kv = model.num_kv_heads
    if kv is not None and model.num_heads % kv:
        work = ", ".join(str(n) for n in range(1, model.num_heads + 1) if model.num_heads % n == 0)
        yield f"model.num_kv_heads={kv} does not divide model.num_heads={model.num_heads}; {work} would work"
    if model.head_dim is None and model.hidden % model.num_heads:
        yield (
            f"model.hidden={model.hidden} does not divide by model.num_heads={model.num_heads}; "
            f"model.hidden={-(-model.hidden // model.num_heads) * model.num_heads} would work, or give model.head_dim"
        )
    head_dim = model.head_dim or model.hidden // model.num_heads
    if head_dim % 2 and model.rope_base is not None:
        yield f"model.head_dim={head_dim}: rotary positions need an even number; {head_dim + 1} would work"
    if model.vocab_size is not None and model.vocab_size < 1:
        yield f"model.vocab_size={model.vocab_size}: needed: 1 or more, or null"
    if model.rope_base is not None and model.rope_base <= 0:
        yield f"model.rope_base={model.rope_base}: needed: more than 0, or null"


def _data(cfg: Config) -> Iterator[str]:
    data = cfg.data
    if data.path is not None and not os.path.exists(data.path):
        yield f"data.path={data.path}: no such file or folder"
    words = data.tokenizer in ("auto", "bytes")
    if data.tokenizer != "auto" and is_token_folder(data.path):
        yield f"data.tokenizer={data.tokenizer}: data.path={data.path}, a folder of tokens, has its own; needed: auto"
    if not words and not os.path.isfile(data.tokenizer):
        yield f"data.tokenizer={data.tokenizer}: no such file; needed: auto, bytes or the path of a tokenizer.json"
    if data.valid != "auto" and not 0 <= data.valid < 1:
        yield f"data.valid={data.valid}: needed: auto, or a share from 0 up, below 1"
    if words and not is_token_folder(data.path):
        yield from vocabulary(cfg.model, ByteTokenizer())


def vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> Iterator[str]:
    """What is wrong between a model's vocabulary and the tokenizer's, which `check` knows only for bytes."""
    if model.vocab_size is not None and model.vocab_size < tokenizer.vocab_size:
        name = "byte tokenizer" if isinstance(tokenizer, ByteTokenizer) else "tokenizer of the text"
        yield f"model.vocab_size={model.vocab_size}: the {name} has {tokenizer.vocab_size} ids; needed: at least as many, or null"


def _optim(optim: OptimConfig) -> Iterator[str]:
    if optim.lr <= 0:
        yield f"optim.lr={optim.lr}: needed: more than 0"
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield f"optim.betas={list(optim.betas)}: needed: two numbers from 0 up, below 1"
    if optim.eps <= 0:
        yield f"optim.eps={optim.eps}: needed: more than 0"
    if optim.weight_decay < 0:
        yield f"optim.weight_decay={optim.weight_decay}: needed: 0 or more"
    if optim.warmup_steps < 0:
        yield f"optim.warmup_steps={optim.warmup_steps}: needed: 0 or more steps"
    if not 0 <= optim.min_lr_fraction <= 1:
        yield f"optim.min_lr_fraction={optim.min_lr_fraction}: needed: 0 to 1, a fraction of optim.lr"
    if optim.clip is not None and optim.clip <= 0:
        yield f"optim.clip={optim.clip}: needed: more than 0, or null for no clipping"


def _train(train: TrainConfig, parallel: ParallelConfig) -> Iterator[str]:
    for name in ("steps", "batch_size", "seq_len", "log_every"):
        if getattr(train, name) < 1:
            yield f"train.{name}={getattr(train, name)}: needed: 1 or more"
    if train.checkpoint_every < 0:
        yield f"train.checkpoint_every={train.checkpoint_every}: needed: 1 or more steps, or 0 for one at the end"
    if train.valid_every < 0:
        yield f"train.valid_every={train.valid_every}: needed: 1 or more steps, or 0 for one at the end"
    if train.valid_batches < 0:
        yield f"train.valid_batches={train.valid_batches}: needed: 1 or more batches, or 0 for all"
    if train.checkpoint_keep < 0:
        yield f"train.checkpoint_keep={train.checkpoint_keep}: needed: 1 or more checkpoints, or 0 to keep all"
    if train.stop_at is not None and not 1 <= train.stop_at <= train.steps:
        yield f"train.stop_at={train.stop_at}: needed: 1 to train.steps={train.steps}, or null"
    if not 0 <= train.seed < 1 << 63:
        yield f"train.seed={train.seed}: needed: 0 to 2^63 - 1"
    if parallel.dp > train.batch_size:
        yield (
            f"train.batch_size={train.batch_size} counts the sequences of all ranks and gives nothing to some of the "
            f"parallel.dp={parallel.dp}; train.batch_size={parallel.dp} or more would work"
        )
    if train.resume is True or train.resume == "":
        yield f"train.resume={str(train.resume).lower() or repr('')}: needed: auto, false or a checkpoint's path"
    elif isinstance(train.resume, str) and train.resume != "auto" and not os.path.exists(train.resume):
        yield f"train.resume={train.resume}: no such file or folder; needed: auto, false or a checkpoint's path"
