"""Importing tpattn does nothing and costs nothing beyond torch (C58): looked at in fresh processes."""

import json
import subprocess
import sys

import pytest

# Prints one JSON object at the end; what the import itself prints would stand before it.
LOOK = """
import json, os, sys, threading
import torch, torch.distributed.tensor
import torch.distributed as dist

def state():
    return {
        "environment": dict(os.environ), "folder": os.getcwd(), "threads": threading.active_count(),
        "repr": repr(torch.Tensor.__repr__), "dtype": str(torch.get_default_dtype()), "torch_threads": torch.get_num_threads(),
        "group": dist.is_initialized(), "path": list(sys.path), "excepthook": repr(sys.excepthook),
        "seed": torch.initial_seed(), "filters": len(__import__("warnings").filters),
    }

before, modules, real = state(), set(sys.modules), torch.Tensor.__repr__
IMPORT
assert torch.Tensor.__repr__ is real
print(json.dumps({"before": before, "after": state(), "new": sorted(set(sys.modules) - modules)}))
"""


def look(statement):
    script = LOOK.replace("IMPORT", statement)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    return result, json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def imported():
    return look("import tpattn")


def test_the_import_prints_nothing(imported):
    result, _ = imported
    assert result.stderr == "" and len(result.stdout.splitlines()) == 1


def test_the_import_changes_nothing(imported):
    """C58, C59: no process group, no patched repr, no environment variable, no thread."""
    _, seen = imported
    assert seen["after"] == seen["before"]
    assert seen["after"]["group"] is False


def test_the_import_loads_little_beyond_torch(imported):
    """C58: under a second, said by names: of other packages only einops, and nothing of torch that is slow to load."""
    _, seen = imported
    new = seen["new"]
    assert "tpattn" in new
    packages = {name.split(".")[0] for name in new} - set(sys.stdlib_module_names)
    assert packages <= {"tpattn", "einops", "torch", "numpy"}, f"loaded by the import: {sorted(packages)}"
    slow = [name for name in new if name in ("torch._dynamo", "torch._inductor", "torch.onnx", "torch.utils.tensorboard")]
    assert not slow


def test_the_test_would_see_a_slow_import():
    _, seen = look("import lovely_tensors")
    assert "matplotlib" in seen["new"]
