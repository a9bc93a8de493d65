"""A model from a run's checkpoint alone: its config and tokenizer stand in there, so that nothing else of the run is needed."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from tpattn.checkpoint import CheckpointError, load, read_about
from tpattn.config.build import build
from tpattn.config.convert import to_config
from tpattn.config.schema import AttentionConfig, Config, ConfigError, ParallelConfig
from tpattn.data import DataError, Tokenizer, tokenizer_from
from tpattn.mesh import ParallelContext
from tpattn.training import together


def saved_model(path: str | os.PathLike[str], ctx: ParallelContext) -> tuple[torch.nn.Module, Tokenizer, Config]:
    """The trained model on the mesh of `ctx`, whatever mesh it was trained on, its tokenizer, and the run's config.

    path        a run's folder (its newest checkpoint is taken), or a checkpoint of `scripts/train.py`
    returns     the config with parallel and attention at their defaults: those of the run are not this mesh's
    raises      CheckpointError on every rank: no checkpoint, a broken one, or one that does not say which model it is of
    """
    cfg, tokenizer = together(lambda: _described(path), ctx)
    model = build(cfg, ctx)
    load(path, model, ctx=ctx)
    return model, tokenizer, cfg


def _described(path: str | os.PathLike[str]) -> tuple[Config, Tokenizer]:
    about = read_about(path)["about"]
    if "config" not in about:
        raise CheckpointError(f"{path}: its checkpoint does not say which model it is of; needed: one of scripts/train.py")
    try:
        tokenizer = tokenizer_from(about.get("tokenizer", {"kind": "bytes"}))
        cfg = to_config(about["config"])
    except (ConfigError, DataError) as error:
        raise CheckpointError(f"{path}: made by another version of tpattn: {error}") from None
    size = cfg.model.vocab_size or tokenizer.vocab_size
    return replace(
        cfg, parallel=ParallelConfig(), attention=AttentionConfig(), model=replace(cfg.model, vocab_size=size)
    ), tokenizer
