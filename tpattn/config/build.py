"""A model or a layer from a config: a name from a list, ordinary arguments, nothing else.

Python paths (`_target_`) are refused, so a config from anybody calls nothing but tpattn's own constructors.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tpattn.config.convert import closest, did_you_mean, show
from tpattn.config.schema import Config, ConfigError, ModelConfig
from tpattn.data import ByteTokenizer, tokenizer_for

if TYPE_CHECKING:
    import torch

NAMES = {  # what a config may name, and the room it is in
    "ColumnParallelLinear": "linear",
    "DistributedDotProductAttn": "attention",
    "LayerNorm": "norm",
    "ParallelMLP": "blocks",
    "ParallelSelfAttention": "attention.layers",
    "QKVParallelLinear": "linear",
    "RMSNorm": "norm",
    "RowParallelLinear": "linear",
    "Transformer": "model",
    "TransformerBlock": "blocks",
    "VocabParallelEmbedding": "embedding",
}


def build(cfg: Any, ctx: Any) -> torch.nn.Module:
    """The module that `cfg` describes, on the mesh of `ctx`.

    cfg         a mapping (a dict or a Hydra node) {"name": one of NAMES, argument: value, ...}; without a name, Transformer.
                `dtype` may be its name ("float64"), `grid` a mapping {"ulysses": 2, "ring": 1, "merge": 1}.
                Or the model group alone (vocab_size null is then that of bytes), or a whole `Config`, whose other groups then
                give the tokenizer's vocab_size, seed, dtype, grid, transport and sequence_parallel
    raises      ConfigError for an unknown name or argument and for a missing one, with the legal ones; what the constructor
                raises
    """
    if isinstance(cfg, Config):
        return _build_run(cfg, ctx)
    arguments = _plain(cfg)
    name = arguments.pop("name", "Transformer")
    return _make(name, arguments, ctx)


def _build_run(cfg: Config, ctx: Any) -> torch.nn.Module:
    """The decoder of a run: parameters stay float32 where the computation is bfloat16."""
    legs = (cfg.attention.ulysses, cfg.attention.ring, cfg.attention.merge)
    other_groups: dict[str, Any] = {
        "seed": cfg.train.seed,
        "dtype": "float64" if cfg.train.dtype == "float64" else "float32",
        "compute_dtype": cfg.train.dtype,
        "grid": "auto" if "auto" in legs else dict(zip(("ulysses", "ring", "merge"), legs, strict=True)),
        "transport": cfg.attention.transport,
        "sequence_parallel": cfg.parallel.sequence_parallel,
    }
    if cfg.model.vocab_size is None:
        other_groups["vocab_size"] = tokenizer_for(cfg.data.path, cfg.data.tokenizer).vocab_size
    return _make("Transformer", _plain(cfg.model) | other_groups, ctx)


def _make(name: Any, arguments: dict[str, Any], ctx: Any) -> torch.nn.Module:
    made = _class(name)
    parameters = _parameters(made)
    for argument in arguments:
        if argument not in parameters:
            close = closest(argument, parameters)
            raise ConfigError(f"{name}: no argument {argument!r}. {did_you_mean(close)}Arguments: {', '.join(parameters)}")
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in arguments]
    if missing:
        raise ConfigError(f"{name}: needs {', '.join(missing)}; given: {', '.join(arguments) or 'nothing'}")
    for argument in ("dtype", "compute_dtype"):
        if isinstance(arguments.get(argument), str):
            arguments[argument] = _dtype(arguments[argument])
    if isinstance(arguments.get("grid"), Mapping):
        arguments["grid"] = _grid(arguments["grid"])
    module: torch.nn.Module = made(**arguments, ctx=ctx)
    return module


def _plain(cfg: Any) -> dict[str, Any]:
    """`cfg` as a dict of ordinary values."""
    if isinstance(cfg, ModelConfig):
        plain = dataclasses.asdict(cfg)
        plain["vocab_size"] = ByteTokenizer.vocab_size if cfg.vocab_size is None else cfg.vocab_size
        return plain
    if type(cfg).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        cfg = OmegaConf.to_container(cfg, resolve=True)
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"build: got {show(cfg)}; needed: a mapping such as {{'name': 'RMSNorm', 'hidden': 256}} or a Config")
    if _names_a_target(cfg):
        raise ConfigError(
            f"build: _target_ is not used, nothing is called by its Python path; give name: one of {', '.join(NAMES)}"
        )
    return {str(key): value for key, value in cfg.items()}


def _names_a_target(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(_names_a_target(item) for item in value.values())
    return isinstance(value, list | tuple) and any(_names_a_target(item) for item in value)


def _class(name: Any) -> Any:
    if name not in NAMES:
        close = closest(name, {known.lower(): known for known in NAMES})
        guess = next((known for known in NAMES if known.lower() == close), None)
        raise ConfigError(f"name={show(name)}: no such layer. {did_you_mean(guess)}Names: {', '.join(NAMES)}")
    return getattr(importlib.import_module(f"tpattn.{NAMES[name]}"), name)


def _parameters(made: Any) -> dict[str, inspect.Parameter]:
    """The constructor's arguments, without ctx, which the mesh gives."""
    named = inspect.signature(made).parameters.values()
    return {p.name: p for p in named if p.name != "ctx" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _dtype(name: str) -> Any:
    import torch

    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype={name!r}: no such number format; float32, bfloat16 or float64 would work")
    return dtype


def _grid(sizes: Mapping[str, Any]) -> Any:
    from tpattn.layout import AttentionGrid

    legs = ("ulysses", "ring", "merge")
    if unknown := [leg for leg in sizes if leg not in legs]:
        raise ConfigError(f"grid: no leg {unknown[0]!r}; legs: {', '.join(legs)}")
    return AttentionGrid(**sizes)
