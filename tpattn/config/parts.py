"""The parts of a run that a checked `Config` describes, on one mesh: text, batches, layout, model, optimizer, schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tpattn.config.build import build
from tpattn.config.check import vocabulary
from tpattn.config.schema import Config, ConfigError
from tpattn.data import (
    Batches,
    Corpus,
    Layout,
    PackedTokens,
    Prepared,
    TokenFolder,
    Tokenizer,
    layout_for,
    prepare,
    tokenizer_sha256,
)
from tpattn.fsdp import shard
from tpattn.mesh import ParallelContext
from tpattn.training import Schedule, adamw, check_same, together


@dataclass
class Parts:
    """What `training.train` needs, and the text it comes from.

    corpus      `source`, `sha256` and `describe()` of the text, or of the folder of tokens
    valid       tokens of the held-out documents, for `ValidBatches`; None when none are held out
    """

    corpus: Corpus | TokenFolder
    batches: Batches
    layout: Layout
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    tokenizer: Tokenizer
    valid: PackedTokens | None


def parts(cfg: Config, ctx: ParallelContext) -> Parts:
    """The parts of the run `cfg` on the mesh of `ctx`; the same text, model and order on every rank of any mesh.

    raises      a TpattnError on every rank for text that cannot be read or differs between ranks, and for what does not fit
    """
    train, optim = cfg.train, cfg.optim

    def text() -> Prepared:
        made = prepare(cfg.data.path, train.seq_len, tokenizer=cfg.data.tokenizer, valid=cfg.data.valid)
        for message in vocabulary(cfg.model, made.tokenizer):
            raise ConfigError(message)
        return made

    made = together(text, ctx)
    check_same("the text's sha256", made.corpus.sha256, ctx)
    check_same("the tokenizer's sha256", tokenizer_sha256(made.tokenizer), ctx)
    batches = Batches(made.train, train.batch_size, train.seed, cfg.data.document_mask)
    layout = layout_for(cfg.attention.layout, train.seq_len, ctx.cp.size, cfg.data.document_mask)
    batches.batch(0, ctx, layout)  # whatever does not fit is found now
    vocab_size = cfg.model.vocab_size or made.tokenizer.vocab_size
    model = build(replace(cfg, model=replace(cfg.model, vocab_size=vocab_size)), ctx)
    if train.fsdp:
        model = shard(model, ctx)
    optimizer = adamw(model, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)
    schedule = Schedule(optim.lr, train.steps, optim.warmup_steps, optim.min_lr_fraction)
    return Parts(made.corpus, batches, layout, model, optimizer, schedule, made.tokenizer, made.valid)


def deciding(cfg: Config, run: Parts, ctx: ParallelContext) -> dict[str, Any]:
    """The arguments of `training.train` that decide a run's numbers; the others decide what is told, saved and spared."""
    return {
        "model": run.model,
        "optimizer": run.optimizer,
        "batches": run.batches,
        "ctx": ctx,
        "schedule": run.schedule,
        "layout": run.layout,
        "seed": cfg.train.seed,
        "clip": cfg.optim.clip,
    }
