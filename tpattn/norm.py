"""RMSNorm and LayerNorm over the model width, with one weight that every tp rank holds.

Under `sequence_parallel` each tp rank normalises other tokens, so the weight's gradient is partial until `finish_gradients`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tpattn.errors import Unsupported
from tpattn.mesh import ParallelContext
from tpattn.params import ShardedModule, finish_init


class RMSNorm(ShardedModule):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    hidden              width M, not divided
    sequence_parallel   x is a token (or head) shard over tp; the gradient of the weight is then partial
    source              Zhang and Sennrich, arXiv:1910.07467
    """

    def __init__(
        self,
        hidden: int,
        eps: float = 1e-6,
        *,
        ctx: ParallelContext,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(ctx, dtype)
        if not isinstance(hidden, int) or isinstance(hidden, bool) or hidden < 1 or not eps >= 0:
            raise Unsupported(f"{type(self).__name__}: hidden={hidden!r} must be a positive integer and eps={eps} at least 0")
        self.hidden, self.eps = hidden, eps
        self.add_parameter("weight", (hidden,), dim=None, fill=("constant", 1.0), partial=sequence_parallel)
        finish_init(self, ctx, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., M] -> [.., M]."""
        check_width(self, x, self.hidden)
        return torch.nn.functional.rms_norm(x, (self.hidden,), self.local("weight", x.dtype), self.eps)


class LayerNorm(ShardedModule):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension.

    hidden              width M, not divided
    sequence_parallel   x is a token (or head) shard over tp; the gradients of weight and bias are then partial
    """

    def __init__(
        self,
        hidden: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        ctx: ParallelContext,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(ctx, dtype)
        if not isinstance(hidden, int) or isinstance(hidden, bool) or hidden < 1 or not eps >= 0:
            raise Unsupported(f"{type(self).__name__}: hidden={hidden!r} must be a positive integer and eps={eps} at least 0")
        self.hidden, self.eps = hidden, eps
        self.add_parameter("weight", (hidden,), dim=None, fill=("constant", 1.0), partial=sequence_parallel)
        if bias:
            self.add_parameter("bias", (hidden,), dim=None, fill=("constant", 0.0), partial=sequence_parallel)
        finish_init(self, ctx, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., M] -> [.., M]."""
        check_width(self, x, self.hidden)
        bias = self.local("bias", x.dtype) if "bias" in self.specs else None
        return torch.nn.functional.layer_norm(x, (self.hidden,), self.local("weight", x.dtype), bias, self.eps)


def check_width(layer: nn.Module, x: Tensor, width: int) -> None:
    """Raise Unsupported when the last dimension of a layer's input is not what it was built for, or its numbers are no floats."""
    if not x.is_floating_point():
        raise Unsupported(f"{type(layer).__name__} needs a floating-point input, got {x.dtype}")
    if x.dim() < 1 or x.shape[-1] != width:
        raise Unsupported(f"{type(layer).__name__} needs an input [.., {width}], got {list(x.shape)}")
