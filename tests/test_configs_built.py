"""Every config file builds its model at its own mesh size: torch's fake back end plays all the other ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
WORDS = [f"{f.parent.name}={f.stem}" for f in sorted(CONFIGS.glob("*/*.yaml")) if f.stem != "text"]

BUILD = """
import sys, math, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import tpattn
from tpattn.config import build, load

for words in sys.argv[2:]:
    word = words.split("+")
    cfg = load(word, sys.argv[1])
    p = cfg.parallel
    world = max(1, p.dp) * p.cp * p.tp
    for rank in {0, world - 1}:
        dist.init_process_group("fake", world_size=world, rank=rank, store=FakeStore())
        with tpattn.ParallelContext.from_config(cfg) as ctx, torch.device("meta"):
            model = build(cfg, ctx)
            assert (ctx.dp.size, ctx.cp.size, ctx.tp.size) == (max(1, p.dp), p.cp, p.tp), words
            grid = model.blocks[0].attention.grid
            assert grid == "auto" or grid.resolve(ctx.cp.size).size == ctx.cp.size, words
            mine = sum(x.to_local().numel() if hasattr(x, "to_local") else x.numel() for x in model.parameters())
            whole = sum(x.numel() for x in model.parameters())
            assert (mine < whole) == (p.tp > 1), words
        dist.destroy_process_group()
    print(words, world, whole, mine)
"""


def built(words):
    """The script's lines for these choices (several joined by +)."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(CONFIGS), *words], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_config_file_builds_at_its_own_mesh_size():
    """Each file alone, with what else it needs to fit: an attention grid of N ranks goes with cp = N."""
    cp = {"attention=usp": "parallel=cp4", "attention=ring": "parallel=cp2", "attention=ulysses": "parallel=cp2"}
    words = [f"{word}+{cp[word]}" if word in cp else word for word in WORDS]
    lines = built(words)
    assert len(lines) == len(words)
    assert any(" 4 " in line for line in lines)


@pytest.mark.parametrize("words", ["parallel=tp4+model.num_heads=5+model.num_kv_heads=5+model.hidden=60"])
def test_a_model_that_does_not_divide_is_refused_by_name(words):
    with pytest.raises(AssertionError, match="5 query heads and 5 key-value heads over tp=4"):
        built([words])
