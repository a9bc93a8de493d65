"""The parts of a run that a checked `Config` describes, on one mesh: text, batches, layout, model, optimizer, schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpattn.config.build import build
from tpattn.config.schema import Config
from tpattn.data import Batches, Corpus, PackedTokens, layout_for, read_documents
from tpattn.fsdp import shard
from tpattn.layout import SequenceLayout
from tpattn.mesh import ParallelContext
from tpattn.training import Schedule, adamw, check_same, together


@dataclass
class Parts:
    """What `training.train` needs, and the text it comes from."""

    corpus: Corpus
    batches: Batches
    layout: SequenceLayout
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule


def parts(cfg: Config, ctx: ParallelContext) -> Parts:
    """The parts of the run `cfg` on the mesh of `ctx`; the same text, model and order on every rank of any mesh.

    raises      a TpattnError on every rank for text that cannot be read or differs between ranks, and for what does not fit
    """
    train, optim = cfg.train, cfg.optim

    def text() -> tuple[Corpus, Batches]:
        corpus = read_documents(cfg.data.path)
        return corpus, Batches(PackedTokens.from_documents(corpus.documents, train.seq_len), train.batch_size, train.seed)

    corpus, batches = together(text, ctx)
    check_same("the text's sha256", corpus.sha256, ctx)
    layout = layout_for(cfg.attention.layout, train.seq_len, ctx.cp.size)
    batches.batch(0, ctx, layout)  # whatever does not fit is found now
    model = build(cfg, ctx)
    if train.fsdp:
        model = shard(model, ctx)
    optimizer = adamw(model, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)
    schedule = Schedule(optim.lr, train.steps, optim.warmup_steps, optim.min_lr_fraction)
    return Parts(corpus, batches, layout, model, optimizer, schedule)
