"""Whether tpattn works on this machine: what is installed, and a sum and a small model on two processes against one.

`check` starts the processes itself; each runs this file (`python -m tpattn.selfcheck`). Under torchrun its ranks are taken.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from tpattn import comm, kernels
from tpattn.errors import PeerLost, TpattnError
from tpattn.gradients import finish_gradients
from tpattn.layout import SequenceLayout
from tpattn.loss import token_mean, vocab_parallel_cross_entropy
from tpattn.mesh import ParallelContext, backends
from tpattn.model import Transformer
from tpattn.params import sharded_parameters, to_local, whole

LIMIT_SECONDS = 60.0  # for all of it; a machine that is busy needs more than the usual few
TOLERANCE = 1e-10  # of the largest value, in float64
_NEEDED = ("torch", "einops", "hydra-core", "lovely-tensors")
_OPTIONAL = {"tensorboard": "tb", "tokenizers": "hf", "safetensors": "hf"}  # package -> the extra that brings it


class CheckFailed(TpattnError, RuntimeError):
    """Something computed other numbers than it should."""


def check(limit: float = LIMIT_SECONDS) -> int:
    """Prints what there is and whether it works, and gives the exit status: 0 when it works, else 1.

    limit       seconds after which it has failed
    """
    begin = time.monotonic()
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    told = os.environ.get("RANK", "0") == "0" if launched else True
    if launched:
        _end_after(limit, told)
        if told:
            print(*facts(), sep="\n", flush=True)
        faults = _examine_here(told)
        size = int(os.environ["WORLD_SIZE"])
    else:
        size = 2
        with tempfile.TemporaryDirectory() as folder:
            ranks = _start(size, Path(folder))  # they import torch while the facts are gathered
            try:
                print(*facts(), sep="\n", flush=True)
                faults = _wait(ranks, Path(folder), begin + limit)
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()
    missing = [name for name in _NEEDED if _version(name) is None]
    if missing:
        faults.append(f"{' and '.join(missing)} not installed: pip install {' '.join(missing)}")
    if told:
        print(_verdict(faults, size, time.monotonic() - begin), flush=True)
    return 1 if faults else 0


def facts() -> Iterator[str]:
    """Lines that tell the versions, back ends, devices and attention kernels there are."""
    here = f"python {platform.python_version()}, " + ", ".join(f"{n} {_version(n) or 'MISSING'}" for n in ("tpattn", *_NEEDED))
    extras = (f"{n} {_version(n) or f'not installed ({chr(34)}tpattn[{extra}]{chr(34)})'}" for n, extra in _OPTIONAL.items())
    yield f"versions    {here}; optional: {', '.join(extras)}"
    found = backends()
    yield f"back ends   {', '.join(found) or 'none'}" + ("" if "nccl" in found else "; no nccl, which GPUs need")
    count = torch.cuda.device_count()
    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(count)) or "no GPU"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield f"devices     {platform.machine()} CPU, {cores} cores for this process, torch takes {torch.get_num_threads()}; {gpus}"
    for device in ["cpu", *["cuda"][:count]]:
        for dtype in (torch.float32, torch.bfloat16):
            names = ", ".join(kernels.available(device, dtype))
            yield f"kernels     {device}, {str(dtype).removeprefix('torch.')}: {names or 'none'}"


def examine() -> Iterator[str]:
    """Lines about groups, a sum and parity with one process, on the ranks whose variables torchrun (or `check`) has set.

    raises      CheckFailed for other numbers, and what a message or a constructor raises
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    device = "cuda" if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", size)) else "cpu"
    for axis in ("tp", "cp"):
        with ParallelContext.from_env(**{"dp": 1, axis: size}, timeout=LIMIT_SECONDS / 2, device=device) as ctx:
            if axis == "tp":
                yield f"groups      {ctx.describe().splitlines()[0]}"
                yield f"all-reduce  {_sum(ctx)}"
            yield f"parity      {axis}={size}: {_parity(ctx)}"


def _sum(ctx: ParallelContext) -> str:
    got = float(comm.all_reduce(torch.tensor([ctx.world.rank + 1.0], device=ctx.device), ctx.world))
    want = ctx.world.size * (ctx.world.size + 1) / 2
    if got != want:
        raise CheckFailed(f"the sum of 1 to {ctx.world.size} over the ranks is {got:g}, wanted {want:g}")
    return f"the sum of 1 to {ctx.world.size} over the ranks is {got:g}"


def _parity(ctx: ParallelContext) -> str:
    """Loss and every gradient of a small model in float64 beside those of one process with the same seed."""
    n = ctx.world.size
    layout, one = SequenceLayout.zigzag(6 * n + 1, ctx.cp.size), SequenceLayout.contiguous(6 * n + 1, 1)
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(8 * n, (2, 2, layout.T), generator=generator).to(ctx.device)
    alone = ParallelContext.single(ctx.device)
    model, twin = (
        Transformer(8 * n, 12, 2, 2 * n, n, 4, 8 * n, ctx=c, seed=0, dtype=torch.float64, sequence_parallel=True)
        for c in (ctx, alone)
    )
    losses = []
    for one_model, c, shares in ((model, ctx, layout), (twin, alone, one)):
        logits = one_model(c.cp.shard(tokens, shares), layout=shares)
        target = c.cp.shard(targets, shares)
        total = vocab_parallel_cross_entropy(logits, target, ctx=c, vocab_size=8 * n)
        loss = token_mean(total, target.numel(), ctx=c)
        loss.backward()
        finish_gradients(one_model)
        losses.append(loss.detach())
    worst = _difference("the loss", losses[0], losses[1])
    count = 0
    for (name, module, key, spec), (_, other, _, _) in zip(sharded_parameters(model), sharded_parameters(twin), strict=True):
        got, want = (to_local(m.get_parameter(key).grad) for m in (module, other))  # type: ignore[arg-type]
        worst = max(worst, _difference(f"the gradient of {name}", whole(got, spec, ctx.tp).view(want.shape), want))
        count += 1
    return f"loss and {count} gradients within {worst:.0e} of one process, float64 on {ctx.device.type}"


def _difference(what: str, got: torch.Tensor, want: torch.Tensor) -> float:
    apart = float((got - want).abs().max() / want.abs().max())
    if not apart <= TOLERANCE:
        raise CheckFailed(f"{what} is {apart:.1e} away from that of one process; {TOLERANCE:g} would be rounding")
    return apart


# ---- processes -------------------------------------------------------------------------------------------------------------


def _start(size: int, folder: Path) -> list[subprocess.Popen[bytes]]:
    """This file in `size` processes that find each other; what each says goes to files in the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    package = Path(__file__).resolve().parents[1]
    started = []
    for rank in range(size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        place["PYTHONPATH"] = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
            command = [sys.executable, "-m", "tpattn.selfcheck"]
            started.append(subprocess.Popen(command, env={**os.environ, **place}, stdout=out, stderr=err))
    return started


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, deadline: float) -> list[str]:
    """Prints what rank 0 said, and gives what went wrong: the rank's own faults before those of ranks that lost it."""
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        if any(process.poll() for process in ranks):
            deadline = min(deadline, time.monotonic() + 5)  # the others have heard of it by then
        time.sleep(0.05)
    print((folder / "0.out").read_text(), end="", flush=True)
    faults = []
    for rank, process in enumerate(ranks):
        said = (folder / f"{rank}.err").read_text().strip().splitlines()
        if process.returncode:
            faults.append(said[-1] if said else f"rank {rank} ended with exit code {process.returncode}")
        elif process.returncode is None:
            faults.append(f"{PeerLost.__name__}: rank {rank} had not ended when the time was over")
    return sorted(faults, key=lambda fault: fault.startswith(PeerLost.__name__))


def _examine_here(told: bool) -> list[str]:
    """Runs `examine` as one rank; prints its lines if `told`. What went wrong, on one line."""
    try:
        for line in examine():
            if told:
                print(line, flush=True)
    except Exception as error:  # whatever a broken machine brings
        return [f"{type(error).__name__}: {' '.join(str(error).split())}"]
    return []


def _end_after(limit: float, told: bool) -> None:
    """A message that never arrives must not hang the check: the process ends with the verdict."""

    def end() -> None:
        if told:
            print(_verdict([f"it had not ended after {limit:g} seconds"], 0, limit), flush=True)
        os._exit(1)

    timer = threading.Timer(limit, end)
    timer.daemon = True
    timer.start()


def _verdict(faults: list[str], size: int, seconds: float) -> str:
    if faults:
        return f"tpattn does NOT work here: {faults[0]}"
    return f"tpattn works here: {size} process{'es' * (size > 1)} compute what one does ({seconds:.1f} s)"


def _version(package: str) -> str | None:
    if package == "torch":
        return str(torch.__version__)
    if package == "tpattn":  # a checkout need not be installed
        return str(sys.modules["tpattn"].__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    wrong = _examine_here(os.environ.get("RANK") == "0")
    print(*wrong, sep="\n", file=sys.stderr, flush=True)
    os._exit(1 if wrong else 0)  # not sys.exit: groups of a lost peer may wait for it at the end
