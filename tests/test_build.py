"""Models and layers from a config, by name."""

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch

import tpattn
from tpattn.config import ConfigError, ModelConfig, build, load
from tpattn.config.build import NAMES
from tpattn.errors import Unsupported
from tpattn.layout import AttentionGrid
from tpattn.mesh import ParallelContext

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


class Layer(torch.nn.Module):
    """A stand-in with the look of a layer's constructor."""

    def __init__(self, in_features, out_features, *, ctx, bias=True, dtype=None, grid="auto"):
        super().__init__()
        self.got = (in_features, out_features, ctx, bias, dtype, grid)


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(tpattn, "ColumnParallelLinear", Layer, raising=False)


def test_build_gives_a_layer_ordinary_values(stand_in):
    from omegaconf import OmegaConf

    plain = {"name": "ColumnParallelLinear", "in_features": 4, "out_features": 6, "dtype": "float64"}
    plain["grid"] = {"ulysses": 2, "ring": 3}
    for cfg in (plain, OmegaConf.create(plain)):
        assert build(cfg, "ctx").got == (4, 6, "ctx", True, torch.float64, AttentionGrid(ulysses=2, ring=3))
    assert plain["name"] == "ColumnParallelLinear"  # untouched


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
        ({"name": "ColumnParallelLinear", "in_features": 4, "out_features": 6, "grid": {"rinng": 2}}, "no leg 'rinng'"),
        (3, "needed: a mapping"),
    ],
)
def test_build_refuses_unknown_names_and_arguments(stand_in, cfg, words):
    with pytest.raises(ConfigError) as error:
        build(cfg, None)
    assert words in str(error.value)


def test_build_of_a_run_refuses_what_the_model_cannot_honour(monkeypatch):
    class Model(torch.nn.Module):
        def __init__(self, vocab_size, hidden, num_layers, num_heads, num_kv_heads=None, head_dim=None, ffn=None, activation="",
                     norm="", tied=False, rope_base=1.0, seed=None, *, ctx, grid="auto"):  # fmt: skip
            super().__init__()
            self.got = (vocab_size, hidden, seed, grid)

    monkeypatch.setattr(tpattn, "Transformer", Model, raising=False)
    cfg = load(["model=tiny", "train.seed=5"], CONFIGS)
    assert build(cfg, None).got == (257, 48, 5, "auto")
    assert build(cfg.model, None).got == (257, 48, None, "auto")
    for word in ("attention.transport=rotate", "train.dtype=bfloat16", "parallel.sequence_parallel=true"):
        with pytest.raises(Unsupported, match=word.split("=")[0]):
            build(load([word], CONFIGS), None)
    assert build(load(["attention=usp", "parallel=cp4"], CONFIGS), None).got[3] == AttentionGrid(ulysses=2, ring=-1)


@pytest.mark.skipif(not all(hasattr(tpattn, name) for name in NAMES), reason="the layers are being written")
def test_the_model_group_is_what_transformer_takes():
    arguments = inspect.signature(tpattn.Transformer).parameters
    assert {field.name for field in dataclasses.fields(ModelConfig)} <= set(arguments)
    assert set(arguments) >= {"seed", "dtype", "grid", "sequence_parallel", "ctx"}
    with ParallelContext.from_config(load([], CONFIGS)) as ctx:
        for model in ("tiny", "small"):
            made = build(load([f"model={model}"], CONFIGS), ctx)
            assert isinstance(made, tpattn.Transformer)
            assert sum(p.numel() for p in made.parameters()) > (1_000_000 if model == "small" else 10_000)
