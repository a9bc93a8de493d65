"""What the benchmark computes: functions that make the inputs of one process and return what is timed. Serial ones have no rank.

Letters: T tokens of the whole sequence, t of this rank, H heads, D head_dim (columns in the products), M width of the module,
F inner width of a feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention, silu

from tpattn import (
    AttentionGrid,
    ColumnParallelLinear,
    DistributedDotProductAttn,
    ParallelContext,
    SequenceLayout,
    TransformerBlock,
    distributed_matmul_all,
    distributed_matmul_nt,
    distributed_matmul_tn,
    linear_cross_entropy,
    masks,
    sequence_attention,
    vocab_parallel_cross_entropy,
)
from tpattn.rope import rotary_angles, rotate


def serial_product(kind: str, T: int, D: int, backward: bool) -> Callable[[], Any]:
    """torch.matmul on the whole."""
    left, right, g = _operands(kind, T, T, D, backward)
    forms: dict[str, Callable[[], Tensor]] = {
        "nt": lambda: torch.matmul(left, right.mT),
        "all": lambda: torch.matmul(left, right),
        "tn": lambda: torch.matmul(left.mT, right),
    }
    return _with_backward(forms[kind], (left, right), g) if backward else forms[kind]


def sharded_product(rank: int, ranks: int, kind: str, T: int, D: int, offset: int, backward: bool) -> Callable[[], Any]:
    """The distributed product on this rank's rows."""
    left, right, g = _operands(kind, SequenceLayout.contiguous(T, ranks).sizes[rank], T, D, backward)
    forms: dict[str, Callable[[], Tensor]] = {
        "nt": lambda: distributed_matmul_nt(left, right, offset),
        "all": lambda: distributed_matmul_all(left, right, offset),
        "tn": lambda: distributed_matmul_tn(left, right),
    }
    return _with_backward(forms[kind], (left, right), g) if backward else forms[kind]


def _operands(kind: str, t: int, T: int, D: int, backward: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Left, right and the upstream gradient of t of the T rows."""
    torch.manual_seed(0)
    left = torch.randn(t, D if kind == "nt" else T, requires_grad=backward)
    right = torch.randn(t, D, requires_grad=backward)
    return left, right, torch.randn(t, T if kind == "nt" else D)


def serial_attention(T: int, H: int, D: int, causal: bool = False, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
    """torch's fused attention, forward and backward, with its own causal flag and no mask tensor."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, H, T, D, dtype=dtype, requires_grad=True) for _ in range(3))
    g = torch.randn(1, H, T, D, dtype=dtype)
    return _with_backward(lambda: scaled_dot_product_attention(q, k, v, is_causal=causal), (q, k, v), g)


def sharded_attention(
    rank: int,
    ranks: int,
    T: int,
    H: int,
    D: int,
    scheme: str,
    mask: masks.Mask,
    layout: str = "contiguous",
    dtype: torch.dtype = torch.float32,
) -> Callable[[], Any]:
    """sequence_attention over cp, forward and backward. scheme: ring, rotate (a ring too), ulysses or auto."""
    ctx = ParallelContext.from_env(dp=1, cp=ranks, device="cpu")
    shares = make_layout(layout, mask, T, ranks)
    t = shares.sizes[rank]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, t, H, D, dtype=dtype, requires_grad=True) for _ in range(3))
    leg = "ulysses" if scheme == "ulysses" else "ring"
    grid: AttentionGrid | str = "auto" if scheme == "auto" else AttentionGrid(**{leg: ranks})
    transport = "rotate" if scheme == "rotate" else "auto"

    def attend() -> Tensor:
        out = sequence_attention(q, k, v, ctx=ctx, mask=mask, layout=shares, grid=grid, transport=transport)
        assert isinstance(out, Tensor)
        return out

    return _with_backward(attend, (q, k, v), torch.randn(1, t, H, D, dtype=dtype))


def make_layout(kind: str, mask: masks.Mask, T: int, ranks: int) -> SequenceLayout:
    """The layout of that name."""
    if kind == "balanced":
        return SequenceLayout.balanced(mask, T, ranks)
    return SequenceLayout.zigzag(T, ranks) if kind == "zigzag" else SequenceLayout.contiguous(T, ranks)


def allowed_pairs(mask: masks.Mask, layout: SequenceLayout) -> list[int]:
    """How many (query, key) pairs the mask allows to the rows of each rank."""
    spans = [mask.intervals(layout.positions(rank), layout.T) for rank in range(layout.n)]
    return [int((hi - lo).sum()) for lo, hi in spans]


def serial_module(T: int, M: int, H: int, by_torch: bool) -> Callable[[], Any]:
    """The seed's attention module on one process, forward and backward; by_torch: its projections around torch's attention."""
    module, x, g = _module_and_rows(T, M, H, distributed=False)

    def by_torch_attend() -> Tensor:
        layers = module.keys, module.queries, module.values  # the seed's rows are keys, its softmax runs over queries
        k, q, v = (rearrange(layer(x), "B T (H D) -> B H T D", H=H) for layer in layers)
        return module.composition(rearrange(scaled_dot_product_attention(k, q, v), "B H T D -> B T (H D)"))

    forward = by_torch_attend if by_torch else lambda: module(x, x, x, None)
    return _with_backward(forward, (x, *module.parameters()), g)


def sharded_module(rank: int, ranks: int, T: int, M: int, H: int) -> Callable[[], Any]:
    """The seed's attention module on this rank's rows, forward and backward, without the sum of parameter gradients."""
    module, x, g = _module_and_rows(SequenceLayout.contiguous(T, ranks).sizes[rank], M, H, distributed=True)
    return _with_backward(lambda: module(x, x, x, None), (x, *module.parameters()), g)


def _module_and_rows(t: int, M: int, H: int, distributed: bool) -> tuple[DistributedDotProductAttn, Tensor, Tensor]:
    torch.manual_seed(0)
    module = DistributedDotProductAttn(M, num_heads=H, distributed=distributed)
    return module, torch.randn(1, t, M, requires_grad=True), torch.randn(1, t, M)


class TorchAttention(nn.Module):
    """Causal attention of plain torch layers; a tensor-parallel plan leaves it a share of the heads."""

    def __init__(self, M: int, H: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.D = M // H
        self.q, self.k, self.v, self.out = (nn.Linear(M, M, bias=False, dtype=dtype) for _ in "qkvo")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.D)) for layer in (self.q, self.k, self.v))
        cos, sin = rotary_angles(torch.arange(q.shape[1]), self.D, 10000.0, torch.float32)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        out = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class TorchMLP(nn.Module):
    """SwiGLU of plain torch layers."""

    def __init__(self, M: int, F: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(M, F, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(F, M, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class TorchBlock(nn.Module):
    """What `TransformerBlock` computes, of plain torch layers."""

    def __init__(self, M: int, H: int, F: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(M, eps=1e-6, dtype=dtype) for _ in range(2))
        self.attention, self.mlp = TorchAttention(M, H, dtype), TorchMLP(M, F, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def serial_block(T: int, M: int, H: int, F: int, dtype: torch.dtype) -> Callable[[], Any]:
    """One transformer block of plain torch layers on one process, forward and backward."""
    torch.manual_seed(0)
    block, (x, g) = TorchBlock(M, H, F, dtype), _own_tokens(0, 1, T, M, dtype, sp=False)
    return _with_backward(lambda: block(x), (x, *block.parameters()), g)


def torch_block(rank: int, ranks: int, T: int, M: int, H: int, F: int, dtype: torch.dtype, sp: bool) -> Callable[[], Any]:
    """The same block divided by torch's parallelize_module; sp: tokens divided too, by its SequenceParallel.

    The input of each half is prepared once, so that its gradient is summed once and not for each product.
    """
    torch.manual_seed(0)
    plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    between = Shard(1) if sp else Replicate()
    plan |= {name: RowwiseParallel(output_layouts=between) for name in ("attention.out", "mlp.down")}
    for half in ("attention", "mlp"):
        plan[half] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    if sp:
        plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
    block = parallelize_module(TorchBlock(M, H, F, dtype), init_device_mesh("cpu", (ranks,)), plan)
    x, g = _own_tokens(rank, ranks, T, M, dtype, sp)
    return _with_backward(lambda: block(x), (x, *block.parameters()), g)


def sharded_block(
    rank: int, ranks: int, T: int, M: int, H: int, F: int, dtype: torch.dtype, sp: bool, keep: bool = True, chunks: int = 1
) -> Callable[[], Any]:
    """tpattn's block divided over tp, forward and backward, without the sum of the norms' gradients."""
    ctx = ParallelContext.from_env(dp=1, tp=ranks, device="cpu")
    torch.manual_seed(0)
    block = TransformerBlock(M, H, ffn=F, ctx=ctx, sequence_parallel=sp, keep_gathered=keep, chunks=chunks, dtype=dtype)
    x, g = _own_tokens(rank, ranks, T, M, dtype, sp)
    layout, sizes = SequenceLayout.contiguous(T, 1), SequenceLayout.contiguous(T, ranks).sizes if sp else None

    def forward() -> Tensor:
        return block(x, mask=masks.causal(), layout=layout, token_sizes=sizes)

    return _with_backward(forward, (x, *block.parameters()), g)


def _own_tokens(rank: int, ranks: int, T: int, M: int, dtype: torch.dtype, sp: bool) -> tuple[Tensor, Tensor]:
    """Input and upstream gradient: of all tokens, or with sp of this rank's."""
    x, g = (torch.randn(1, T, M, dtype=dtype).tensor_split(ranks if sp else 1, dim=1)[rank if sp else 0] for _ in range(2))
    return x.contiguous().requires_grad_(), g.contiguous()


def sharded_loss(rank: int, ranks: int, T: int, M: int, V: int, fused: bool) -> Callable[[], Any]:
    """Head and cross entropy over tp, forward and backward: from logits, or fused."""
    ctx = ParallelContext.from_env(dp=1, tp=ranks, device="cpu")
    torch.manual_seed(0)
    head = ColumnParallelLinear(M, V, ctx=ctx, bias=False)
    x, target = torch.randn(T, M, requires_grad=True), torch.randint(V, (T,))

    def loss() -> Tensor:
        if fused:
            return linear_cross_entropy(x, head.weight, target, ctx=ctx, vocab_size=V)
        return vocab_parallel_cross_entropy(head(x), target, ctx=ctx, vocab_size=V)

    return _with_backward(loss, (x, head.weight), torch.tensor(1.0 / T))


def _with_backward(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], g: Tensor) -> Callable[[], Any]:
    def both() -> None:
        torch.autograd.grad(forward(), inputs, g)

    return both
