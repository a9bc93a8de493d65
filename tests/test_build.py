"""Models and layers from a config, by name."""

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch

import tpattn
from tpattn.config import ConfigError, ModelConfig, build, load
from tpattn.layout import AttentionGrid
from tpattn.mesh import ParallelContext

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def test_build_gives_a_layer_ordinary_values():
    """A name, a dtype's name and a grid as a mapping become a layer; dicts and Hydra's nodes alike."""
    from omegaconf import OmegaConf

    ctx = ParallelContext.single()
    plain = {"name": "ParallelSelfAttention", "hidden": 12, "num_heads": 3, "dtype": "float64"}
    plain["grid"] = {"ulysses": 1, "ring": -1}
    for cfg in (plain, OmegaConf.create(plain)):
        layer = build(cfg, ctx)
        assert type(layer) is tpattn.ParallelSelfAttention and layer.ctx is ctx
        assert layer.grid == AttentionGrid(ulysses=1, ring=-1)
        assert layer.qkv.q.shape == (3, 4, 12) and layer.qkv.q.dtype == torch.float64
    assert plain["name"] == "ParallelSelfAttention"  # untouched


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        ({"name": "ColumnParalelLinear"}, "no such layer. Did you mean ColumnParallelLinear? Names: Column"),
        ({"name": "columnparallellinear"}, "Did you mean ColumnParallelLinear?"),
        ({"name": "os.mkdir"}, "no such layer"),
        ({"name": None}, "no such layer"),
        (
            {"name": "ColumnParallelLinear", "in_feature": 4, "out_features": 6},
            "no argument 'in_feature'. Did you mean in_features?",
        ),
        ({"name": "ColumnParallelLinear", "in_features": 4}, "needs out_features; given: in_features"),
        ({"name": "ColumnParallelLinear", "in_features": 4, "out_features": 6, "ctx": 1}, "no argument 'ctx'"),
        ({"name": "ColumnParallelLinear", "in_features": 4, "out_features": 6, "dtype": "float23"}, "no such number format"),
        ({"name": "ParallelSelfAttention", "hidden": 4, "num_heads": 2, "grid": {"rinng": 2}}, "no leg 'rinng'"),
        (3, "needed: a mapping"),
    ],
)
def test_build_refuses_unknown_names_and_arguments(cfg, words):
    with pytest.raises(ConfigError) as error:
        build(cfg, ParallelContext.single())
    assert words in str(error.value)


def test_build_of_a_run_takes_every_group():
    """Seed, dtype, grid, transport and sequence_parallel of a whole Config arrive in the model."""
    ctx = ParallelContext.single()
    words = ["model=tiny", "train.seed=5", "train.dtype=bfloat16", "attention.ulysses=1", "attention.ring=1", "attention.merge=1"]
    cfg = load([*words, "attention.transport=exchange", "parallel.sequence_parallel=true"], CONFIGS)
    model = build(cfg, ctx)
    attention = model.blocks[0].attention
    assert (model.vocab_size, model.compute_dtype, model.sequence_parallel) == (257, torch.bfloat16, True)
    assert (attention.grid, attention.transport) == (AttentionGrid(1, 1, 1), "exchange")
    again = tpattn.Transformer(257, 48, 2, 8, 4, ffn=cfg.model.ffn, seed=5, ctx=ctx)
    assert torch.equal(model.blocks[1].mlp.up.weight, again.blocks[1].mlp.up.weight)
    assert model.head.weight.dtype == torch.float32


def test_the_model_group_is_what_transformer_takes():
    arguments = inspect.signature(tpattn.Transformer).parameters
    assert {field.name for field in dataclasses.fields(ModelConfig)} <= set(arguments)
    assert set(arguments) >= {"seed", "dtype", "grid", "sequence_parallel", "ctx"}
    with ParallelContext.from_config(load([], CONFIGS)) as ctx:
        for model in ("tiny", "small"):
            made = build(load([f"model={model}"], CONFIGS), ctx)
            assert isinstance(made, tpattn.Transformer)
            assert sum(p.numel() for p in made.parameters()) > (1_000_000 if model == "small" else 10_000)
