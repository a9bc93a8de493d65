"""The direction of imports: a room imports lower floors, or rooms named earlier on its own; only `comm` talks between ranks."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tpattn"
FLOORS = [
    ("ground", ["errors", "layout", "masks", "rope", "random"]),
    ("first", ["comm", "mesh", "kernels"]),
    ("second", ["params", "gradients", "schedule", "products"]),
    ("third", ["norm", "linear", "embedding", "loss", "attention"]),
    ("fourth", ["blocks", "model", "decode"]),
    ("fifth", ["fsdp", "data", "training", "checkpoint", "planner", "debug", "selfcheck"]),
    ("roof", ["config", "integrations", "hf", "__main__"]),
]
ROOMS = [room for _, rooms in FLOORS for room in rooms]
# comm calls collectives; the others need torch.distributed's names for groups, meshes, FSDP2 and files.
KNOW_PROCESSES = {"comm", "mesh", "params", "fsdp", "checkpoint"}
KNOW_DTENSOR = KNOW_PROCESSES | {"gradients"}      # torch.distributed.tensor alone: DTensor and its placements
COLLECTIVE = re.compile(
    r"(_?all_?reduce|_?all_?gather|_?reduce_?scatter|_?all_?to_?all|broadcast|gather|scatter|reduce(_|$)"
    r"|i?send|i?recv|batch_isend_irecv|P2POp|(monitored_)?barrier)(?!.*Options)"
)
# Methods of a ProcessGroup. Its other ones (broadcast, gather, send...) are also the names of what comm offers.
GROUP_METHODS = re.compile(r"(allreduce|allgather|alltoall|_allgather_base|_reduce_scatter_base)")


def faults(path, source):
    """What is wrong with the imports and the calls of one file; path is relative to the package, as in "config/build.py"."""
    room = _room(path)
    if room not in ROOMS and path != "__init__.py":
        return [f"{path}: {room!r} is in no floor of {Path(__file__).name}"]
    tree = ast.parse(source)
    found = []
    aliases = {}        # local name -> the module it stands for

    def fault(node, text):
        found.append(f"tpattn/{path}:{node.lineno}: {text}")

    for node in ast.walk(tree):
        for module, name, bound in _imports(node, path):
            whole = f"{module}.{name}" if name else module
            aliases[bound] = whole if name or bound != module.split(".")[0] else bound
            if module.split(".")[0] == "tpattn":
                problem = _direction(path, room, module, name)
                if problem:
                    fault(node, problem)
            elif room not in KNOW_PROCESSES and _below("torch.distributed", whole):
                if not (room in KNOW_DTENSOR and _below("torch.distributed.tensor", whole)):
                    fault(node, f"{room} imports {whole}; only {', '.join(sorted(KNOW_PROCESSES))} know processes")
            if room != "comm" and name and _below("torch.distributed", module) and COLLECTIVE.match(name):
                fault(node, f"{room} imports {whole}; collectives are called in comm")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or room == "comm":
            continue
        chain = _chain(node)
        if chain:
            chain[0] = aliases.get(chain[0], chain[0])
            owner = ".".join(chain[:-1])
            speaks = _below("torch.distributed", owner) or "c10d" in owner
            if speaks and COLLECTIVE.match(node.attr):
                fault(node, f"{room} uses {owner}.{node.attr}; collectives are called in comm")
            elif ".".join(chain) == "torch.distributed" and room not in KNOW_DTENSOR:
                fault(node, f"{room} uses torch.distributed; only {', '.join(sorted(KNOW_PROCESSES))} know processes")
        if GROUP_METHODS.match(node.attr):
            fault(node, f"{room} uses the process group's .{node.attr}; collectives are called in comm")
    return found


def _direction(path, room, module, name):
    """What is wrong with this import from the package, or None."""
    if path == "__init__.py":
        return None
    parts = module.split(".")[1:] + ([name] if name else [])
    if not parts or parts[0] not in ROOMS:
        return f"{room} imports {'.'.join(parts) or 'tpattn'} from the package's root; import the room that owns it"
    there = parts[0]
    if ROOMS.index(there) > ROOMS.index(room):
        return f"{room} ({_floor(room)} floor) imports {there} ({_floor(there)} floor)"
    return None


def _imports(node, path):
    """(module, name or None, local name) of each thing that an import statement, or import_module("..."), brings."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, None, alias.asname or alias.name.split(".")[0]
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if node.level:
            here = ["tpattn", *path.split("/")[:-1]]
            module = ".".join([*here[:len(here) - node.level + 1], *([module] if module else [])])
        for alias in node.names:
            yield module, alias.name, alias.asname or alias.name
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            yield node.args[0].value, None, ""


def _chain(node):
    """["torch", "distributed", "all_reduce"] for torch.distributed.all_reduce; [] when it does not start with a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def _below(parent, module):
    return module == parent or module.startswith(parent + ".")


def _room(path):
    return path.split("/")[0].removesuffix(".py")


def _floor(room):
    return next(floor for floor, rooms in FLOORS if room in rooms)


@pytest.mark.parametrize("path", sorted(str(file.relative_to(PACKAGE).as_posix()) for file in PACKAGE.rglob("*.py")))
def test_imports_go_down_and_only_comm_communicates(path):
    found = faults(path, (PACKAGE / path).read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path, source", [
    ("layout.py", "from tpattn.errors import Unsupported"),
    ("layout.py", "import tpattn.errors"),
    ("layout.py", "from .errors import Unsupported"),
    ("attention/engine.py", "from ..kernels import attend\nfrom . import layers\nfrom tpattn.attention.layers import x"),
    ("mesh.py", "from tpattn import comm"),
    ("mesh.py", "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.ReduceOp.SUM"),
    ("params.py", "from torch.distributed.tensor import DTensor, Shard"),
    ("gradients.py", "from torch.distributed.tensor import DTensor"),
    ("comm.py", "import torch.distributed as dist\ndist.all_reduce(x)\nfrom torch.distributed import batch_isend_irecv"),
    ("linear.py", "from tpattn import comm\ncomm.all_gather(x)\nctx.tp.gather(x)\ntorch.gather(x, 0, i)\nx.scatter(0, i, y)"),
    ("__init__.py", "from tpattn.config import build\nfrom tpattn import masks"),
    ("config/build.py", "from tpattn.model import Transformer\nimport hydra"),
])
def test_right_files_pass(path, source):
    assert faults(path, source) == []


@pytest.mark.parametrize("path, source, told", [
    ("errors.py", "from tpattn.layout import split_sizes", "errors (ground floor) imports layout (ground floor)"),
    ("comm.py", "from tpattn.mesh import ParallelContext", "comm (first floor) imports mesh"),
    ("comm.py", "def f():\n    import tpattn.mesh", "comm (first floor) imports mesh"),
    ("layout.py", "from .masks import causal", "imports masks"),
    ("layout.py", "from . import kernels", "imports kernels"),
    ("layout.py", "if TYPE_CHECKING:\n    from tpattn.mesh import ParallelContext", "imports mesh"),
    ("attention/engine.py", "from tpattn.model import Transformer", "attention (third floor) imports model (fourth floor)"),
    ("attention/engine.py", "from ..blocks import x", "imports blocks"),
    ("model.py", "import importlib\nimportlib.import_module('tpattn.config')", "imports config"),
    ("linear.py", "from tpattn import ParallelContext", "ParallelContext from the package's root"),
    ("linear.py", "import tpattn", "from the package's root"),
    ("linear.py", "from tpattn import *", "from the package's root"),
    ("novelty.py", "", "'novelty' is in no floor"),
    ("config/build.py", "import tpattn.novelty", "novelty from the package's root"),
    ("linear.py", "import torch.distributed as dist", "linear imports torch.distributed"),
    ("linear.py", "from torch import distributed", "linear imports torch.distributed"),
    ("linear.py", "from torch.distributed.tensor import Partial", "linear imports torch.distributed.tensor.Partial"),
    ("gradients.py", "import torch.distributed as dist", "gradients imports torch.distributed"),
    ("linear.py", "import torch\ntorch.distributed.get_rank()", "linear uses torch.distributed"),
    ("__init__.py", "import torch.distributed as dist\ndist.barrier()", "uses torch.distributed.barrier"),
    *[("mesh.py", f"import torch.distributed as dist\nx = dist.{name}", f"mesh uses torch.distributed.{name}") for name in (
        "all_reduce", "all_gather", "all_gather_object", "all_gather_single", "reduce_scatter", "reduce_scatter_tensor",
        "all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "send", "recv", "isend", "irecv",
        "batch_isend_irecv", "P2POp", "barrier", "monitored_barrier", "reduce", "gather", "gather_object", "scatter")],
    ("mesh.py", "import torch\ntorch.distributed.all_reduce(x)", "mesh uses torch.distributed.all_reduce"),
    ("mesh.py", "import torch.distributed\ntorch.distributed.all_reduce(x)", "mesh uses torch.distributed.all_reduce"),
    ("mesh.py", "from torch import distributed as d\nd.send(x, 1)", "mesh uses torch.distributed.send"),
    ("mesh.py", "from torch.distributed import all_reduce as f\nf(x)", "mesh imports torch.distributed.all_reduce"),
    ("params.py", "import torch.distributed._functional_collectives as funcol\nfuncol.all_reduce(x, 'sum', g)", "funct"),
    ("params.py", "import torch.distributed.nn.functional as f\nf.all_gather(x)", "distributed.nn.functional.all_gather"),
    ("params.py", "import torch\ntorch.ops._c10d_functional.all_reduce(x, 'sum', g)", "_c10d_functional.all_reduce"),
    ("loss.py", "ctx.tp.group.allreduce([x]).wait()", "process group's .allreduce"),
    ("loss.py", "self.groups[0]._allgather_base(x, y)", "process group's ._allgather_base"),
])
def test_wrong_files_are_found(path, source, told):
    found = faults(path, source)
    assert any(told in fault for fault in found), found
