"""Shows the three products of the first seed and its attention module, each next to the undivided computation.

    torchrun --standalone --nproc-per-node 2 scripts/example_products.py      any number of processes, CPU or GPU
    python scripts/example_products.py                                        one process

Every rank makes the whole problem from one seed, keeps its rows, and computes; rank 0 prints its result and how far the result of
all ranks is from torch on the whole. The lengths do not divide: 11 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the tpattn beside this script, installed or not

import lovely_tensors  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from tpattn import ParallelContext, SequenceLayout  # noqa: E402
from tpattn.attention import DistributedDotProductAttn  # noqa: E402
from tpattn.products import distributed_matmul_all, distributed_matmul_nt, distributed_matmul_tn  # noqa: E402

T, DIM, OFFSET = 11, 8, 4  # tokens, width, most rows or columns in one message


def show(ctx: ParallelContext, layout: SequenceLayout, name: str, share: Tensor, whole: Tensor) -> bool:
    """Print rank 0's share of a result, and whether all shares together are the undivided result."""
    difference = (ctx.cp.gather(share, layout, dim=1) - whole).abs().max().item()
    same = difference <= 1e-12
    if ctx.world.rank == 0:
        print(f"\n{name}\n  rank 0 of {ctx.cp.size}: {lovely_tensors.lovely(share.detach())}")
        print(f"  {'equals' if same else 'DIFFERS FROM'} the undivided computation; largest difference {difference:.1e}")
    return same


def main() -> int:
    with ParallelContext.from_env(dp=1, cp=-1) as ctx:
        torch.manual_seed(0)  # the same whole on every rank
        make: Callable[..., Tensor] = lambda *shape: torch.randn(*shape, dtype=torch.float64).to(ctx.device)  # noqa: E731
        layout = SequenceLayout.contiguous(T, ctx.cp.size)
        a_1TD, b_1TD, weights_1TT = make(1, T, DIM), make(1, T, DIM), make(1, T, T)
        a_1tD, b_1tD, weights_1tT = (ctx.cp.shard(x, layout).requires_grad_() for x in (a_1TD, b_1TD, weights_1TT))
        if ctx.world.rank == 0:
            print(f"{T} tokens over {ctx.cp.size} rank{'s' * (ctx.cp.size > 1)} on {ctx.device.type}: {layout.sizes} rows each")

        group = ctx.cp.group
        same = [
            show(ctx, layout, "A B^T", distributed_matmul_nt(a_1tD, b_1tD, OFFSET, group), a_1TD @ b_1TD.mT),
            show(ctx, layout, "A B", distributed_matmul_all(weights_1tT, b_1tD, OFFSET, group), weights_1TT @ b_1TD),
            show(ctx, layout, "A^T B", distributed_matmul_tn(weights_1tT, b_1tD, group), weights_1TT.mT @ b_1TD),
        ]

        # Each rank has its own loss; a gradient holds what all of them contribute to this rank's rows.
        out = distributed_matmul_nt(a_1tD, b_1tD, OFFSET, group)
        (gradient,) = torch.autograd.grad(out.square().sum(), b_1tD)
        whole = b_1TD.clone().requires_grad_()
        (expected,) = torch.autograd.grad((a_1TD @ whole.mT).square().sum(), whole)
        same.append(show(ctx, layout, "gradient of the sum of (A B^T)^2 by B", gradient, expected))

        # Weights are whole on every rank, so all ranks seed alike. The mask hides the future, nonzero = hidden.
        torch.manual_seed(1)
        module = DistributedDotProductAttn(DIM, num_heads=2, ctx=ctx).to(ctx.device, torch.float64)
        undivided = DistributedDotProductAttn(DIM, num_heads=2, distributed=False).to(ctx.device, torch.float64)
        undivided.load_state_dict(module.state_dict())
        mask_1TT = torch.ones(1, T, T, device=ctx.device).triu(1)
        share = module(a_1tD, b_1tD, b_1tD, ctx.cp.shard(mask_1TT, layout))
        same.append(
            show(
                ctx,
                layout,
                "DistributedDotProductAttn, 2 heads, the future hidden",
                share,
                undivided(a_1TD, b_1TD, b_1TD, mask_1TT),
            )
        )
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
