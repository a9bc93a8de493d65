"""Rotary position embedding from global positions, so that a token's angle is the same on whichever rank it lies."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(
    positions: Tensor, head_dim: int, base: float = 10000.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles of tokens at global `positions` [t]: two tensors [t, D / 2].

    The angles are computed in float64: position 1e6 times a frequency has no correct digit left in bfloat16.
    source      RoFormer: Su et al., arXiv:2104.09864
    """
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    angle = positions.to(torch.float64)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_BtHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys [B, t, H, D] turned by their angles cos, sin [t, D / 2]; first and second half of D form the pairs."""
    a, b = x_BtHD.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
