"""Local attention of some query rows over one block of keys: (out, lse) forward, and a backward from the global (out, lse).

Knows no ranks. A tile says which pairs of a rectangle of rows and keys count; `attend` adds tiles into an `Accumulator`,
`attend_backward` adds their gradients. Each backend only knows how to do one call (no mask, its own causal flag, or a small
boolean mask) and the sizes it is fastest at. Here tensors are in kernel order [B, H, T, D], any strides: T rows, S keys,
K key-value heads (never repeated in memory), Dv the width of v.
"""

from tpattn.kernels.backends import NAMES, Backend, HeadByHead, available, choose, fast_on_cpu
from tpattn.kernels.calls import HeadGroups, attend, attend_backward, stand_in
from tpattn.kernels.tiles import Accumulator, Call, Change, Gradients, Tile, Total, merge, whole_vectors, wide_dtype

__all__ = [
    "NAMES",
    "Accumulator",
    "Backend",
    "Call",
    "Change",
    "Gradients",
    "HeadByHead",
    "HeadGroups",
    "Tile",
    "Total",
    "attend",
    "attend_backward",
    "available",
    "choose",
    "fast_on_cpu",
    "merge",
    "stand_in",
    "whole_vectors",
    "wide_dtype",
]
