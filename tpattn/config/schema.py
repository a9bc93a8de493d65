"""The legal keys of a run, their types, defaults and meanings; one dataclass per config group.

A hint is what `convert` checks and --help prints: the type (a `Literal` is a word from a list, `X | None` takes null), then the
meaning with its unit, then, where the type does not say it, the allowed values in words.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Annotated, Literal

from tpattn.errors import TpattnError

Auto = Literal["auto"]


class ConfigError(TpattnError, ValueError):
    """A mistake in a command line or config file: the same on every rank, found before any process group exists."""


@dataclass
class ParallelConfig:
    """How the ranks are divided: dp x cp x tp = their number."""

    dp: Annotated[int, "ranks that see other batches; -1 = what is left"] = -1
    cp: Annotated[int, "ranks that share the tokens of one sequence; -1 = what is left"] = 1
    tp: Annotated[int, "ranks that share each weight; -1 = what is left"] = 1
    sequence_parallel: Annotated[bool, "tokens sharded over tp between the linear layers"] = False
    timeout: Annotated[float, "seconds a rank waits for another before it gives up"] = 300.0


@dataclass
class AttentionConfig:
    """How attention is divided over cp: cp = ulysses x ring x merge."""

    ulysses: Annotated[int | Auto, "ranks that exchange heads for tokens; auto (all three or none), -1 = what is left"] = "auto"
    ring: Annotated[int | Auto, "ranks between which keys and values travel; auto, -1 = what is left"] = "auto"
    merge: Annotated[int | Auto, "ranks whose partial outputs are merged; auto, -1 = what is left"] = "auto"
    layout: Annotated[
        Literal["auto", "contiguous", "zigzag", "striped", "balanced"],
        "which tokens a cp rank holds; auto = zigzag, equal causal work for each rank; balanced with data.document_mask",
    ] = "auto"
    transport: Annotated[
        Literal["auto", "exchange", "rotate"],
        "how keys and values travel; auto = exchange (one message), rotate = around the ring in steps",
    ] = "auto"


@dataclass
class ModelConfig:
    """The arguments of `tpattn.Transformer` that decide its size and shape."""

    vocab_size: Annotated[int | None, "token ids the model knows; null = the tokenizer's"] = None
    hidden: Annotated[int, "width of the model, numbers per token"] = 256
    num_layers: Annotated[int, "transformer blocks"] = 2
    num_heads: Annotated[int, "query heads"] = 8
    num_kv_heads: Annotated[int | None, "key and value heads, a divisor of num_heads; null = num_heads"] = None
    head_dim: Annotated[int | None, "numbers per head; null = hidden / num_heads"] = None
    ffn: Annotated[int | None, "width of the feed-forward layer; null = the model's own rule"] = None
    activation: Annotated[Literal["gelu", "relu", "silu", "swiglu"], "of the feed-forward layer"] = "swiglu"
    norm: Annotated[Literal["rmsnorm", "layernorm"], "normalisation before attention and feed-forward layer"] = "rmsnorm"
    tied: Annotated[bool, "the output layer uses the embedding's weights"] = False
    rope_base: Annotated[float | None, "rotary base; larger for longer sequences; null = no rotary positions"] = 10000.0
    qk_norm: Annotated[bool, "RMSNorm on queries and keys, per head"] = False
    gate: Annotated[bool, "a gate on each head's output"] = False
    dropout: Annotated[float, "share of the numbers dropped from embedding and residual branches while training"] = 0.0
    attention_dropout: Annotated[float, "share of the attention weights dropped while training"] = 0.0


@dataclass
class OptimConfig:
    """AdamW with a linear warm-up, then a cosine."""

    lr: Annotated[float, "largest learning rate, reached after the warm-up"] = 3e-3
    betas: Annotated[tuple[float, float], "decay of AdamW's running mean and square, per step"] = (0.9, 0.95)
    eps: Annotated[float, "added to the root of AdamW's running square"] = 1e-8
    weight_decay: Annotated[float, "share of a weight taken off per step, times the learning rate; matrices only"] = 0.1
    warmup_steps: Annotated[int, "steps in which the learning rate rises from 0"] = 10
    min_lr_fraction: Annotated[float, "learning rate at the last step, as a fraction of lr"] = 0.1
    clip: Annotated[float | None, "largest norm of all gradients together; null = no clipping"] = 1.0


@dataclass
class DataConfig:
    """The text."""

    path: Annotated[
        str | None,
        "a file or a folder of UTF-8 text, or a folder of scripts/make_tokens.py; null = the source of Python's standard library",
    ] = None
    tokenizer: Annotated[
        str,
        "what turns text into tokens; auto = the one that made the folder of tokens, bytes for text",
        "auto, bytes or the path of a tokenizer.json",
    ] = "auto"
    valid: Annotated[
        float | Auto,
        "share of the tokens whose documents are held out for validation; auto = 0.02 of 20 documents or more, else 0",
        "auto or a share from 0 up, below 1",
    ] = "auto"
    document_mask: Annotated[bool, "tokens see their own document only, though several are packed into a sequence"] = False


@dataclass
class TrainConfig:
    """How long, on how much at once, from which start."""

    steps: Annotated[int, "optimizer steps the learning-rate schedule is planned for"] = 100
    stop_at: Annotated[int | None, "save and stop after this step, the schedule still planned for steps; null = go on"] = None
    seed: Annotated[int, "of initial weights, order of the text and dropout"] = 0
    dtype: Annotated[Literal["float32", "bfloat16", "float64"], "number format of the computation"] = "float32"
    batch_size: Annotated[int, "sequences per step over all ranks"] = 8
    seq_len: Annotated[int, "tokens per sequence over all ranks"] = 256
    fused_loss: Annotated[bool, "last layer and loss in one, without making the logits: less memory for large vocabularies"] = (
        False
    )
    fsdp: Annotated[bool, "weights, gradients and optimizer state divided over dp x cp too (FSDP2): less memory per rank"] = False
    checkpoint_every: Annotated[int, "steps between checkpoints; 0 = only one, at the end"] = 0
    checkpoint_keep: Annotated[int, "newest checkpoints that stay when another is on disk; 0 = all"] = 3
    valid_every: Annotated[int, "steps between losses on the held-out documents; 0 = only one, at the end"] = 0
    valid_batches: Annotated[int, "batches of held-out text that such a loss is measured on, spread over it; 0 = all"] = 16
    resume: Annotated[
        bool | str,
        "auto = continue from this run's newest checkpoint; false = start new; or a checkpoint's path",
        "auto, false or a checkpoint's path",
    ] = "auto"
    log_every: Annotated[int, "steps between lines on the terminal; metrics.jsonl has every step"] = 1


@dataclass
class RunConfig:
    """Where the run keeps its files."""

    dir: Annotated[str | None, "the run's folder; null = a new one, runs/ID"] = None
    tensorboard: Annotated[bool, "also write TensorBoard's files there; needs the extra tb"] = False
    chdir: Annotated[bool, "work inside the run's folder; paths you give still count from where you started"] = False


@dataclass
class Config:
    """A whole run. Paths are absolute once `load` has returned it."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)


def dump(cfg: Config) -> str:
    """`cfg` as YAML, two levels deep, for the run's folder. (JSON's scalars and lists are YAML.)"""
    lines = []
    for group, keys in dataclasses.asdict(cfg).items():
        lines.append(f"{group}:")
        lines += [f"  {key}: {json.dumps(value)}" for key, value in keys.items()]
    return "\n".join(lines) + "\n"
