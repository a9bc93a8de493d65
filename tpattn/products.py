"""The three products of attention with the tokens shared over ranks: A B^T (nt), A B (all) and A^T B (tn), with their gradients.

Letters: T rows in total, t of them on this rank (lengths may differ, 0 too); S = sum of the ranks' s; D and E are not divided.
nt and all fetch the others' rows in messages of at most `offset` rows or columns, tn is one reduce-scatter. Each product is the
gradient of another one, so the same three functions run forward and backward. Leaves every message to `comm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tpattn import comm
from tpattn.errors import Unsupported
from tpattn.layout import split_sizes

_IN_FLIGHT = 2  # messages; they are multiplied together when they have arrived, as one product of twice the width


def distributed_matmul_nt(left: Tensor, right: Tensor, offset: int = 32, group: Any = None) -> Tensor:
    """A B^T: this rank's rows of `left` times the rows of `right` on all ranks; gradient: dA = dC B, dB = dC^T A.

    left        [*, t, D]   this rank's rows
    right       [*, s, D]   this rank's rows; s may differ from t. Leading dimensions broadcast as in torch.matmul
    offset      most rows of `right` in one message; at most two messages are on their way and two being multiplied
    group       torch's process group; None = all processes, or this one alone when torch.distributed is not initialised
    returns     [*, t, S], columns in rank order. The same numbers for any offset, up to the rounding of the local product
    raises      Unsupported (a ValueError), on every rank and before a row is sent, for what does not fit
    source      Distributed dot products: the package distributed-dot-product of E. Margffoy-Tuay; same names, same order
    """
    return RightTransposeMultiplication.apply(left, right, offset, group)


def distributed_matmul_all(left: Tensor, right: Tensor, offset: int = 32, group: Any = None) -> Tensor:
    """A B: this rank's rows of `left` times the whole of `right`; gradient: dA = dC B^T, dB = A^T dC summed over ranks.

    left        [*, t, S]   this rank's rows, columns in rank order
    right       [*, s, E]   this rank's rows of S. Leading dimensions broadcast as in torch.matmul
    offset      most columns of `right` in one message; at most two messages are on their way and two being multiplied
    group       as for `distributed_matmul_nt`
    returns     [*, t, E]. bfloat16 and float16 are summed over ranks in float32
    raises      Unsupported (a ValueError), on every rank and before a row is sent, for what does not fit
    """
    return FullMultiplication.apply(left, right, offset, group)


def distributed_matmul_tn(left: Tensor, right: Tensor, group: Any = None) -> Tensor:
    """A^T B, summed over ranks, this rank's rows of it; gradient: dA = B dC^T, dB = A dC.

    left        [*, t, S]   this rank's rows
    right       [*, t, E]   this rank's rows. Leading dimensions broadcast as in torch.matmul
    group       as for `distributed_matmul_nt`
    returns     [*, s, E]: when S is the number of rows on all ranks, the same rows that this rank holds (s = t); else S is divided
                as evenly as can be. One message to each peer, no larger than its result; sums in float32 at least
    raises      Unsupported (a ValueError), on every rank and before a row is sent, for what does not fit
    """
    return LeftTransposeMultiplication.apply(left, right, 32, group)


# ---- what all ranks know of a call -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """What the ranks agreed on before the first row is sent.

    axis        the ranks
    rows        t of each rank: rows of the undivided-by-column operand
    shares      s of each rank: how S is divided
    offset      most rows or columns of one message
    """

    axis: comm.Group
    shares: list[int]
    offset: int

    @property
    def spans(self) -> list[slice]:
        """The part of S that each rank holds."""
        stops = [sum(self.shares[: r + 1]) for r in range(self.axis.size)]
        return [slice(stop - size, stop) for stop, size in zip(stops, self.shares, strict=True)]


@lru_cache
def _multiplies(dtype: torch.dtype, device: str, batched: bool) -> bool:
    """Whether torch multiplies matrices of this dtype there."""
    try:
        x = torch.ones(1, 1, device=device).to(dtype)
        torch.bmm(x[None].expand(2, 1, 1), x[None].expand(2, 1, 1)) if batched else torch.mm(x, x)
    except (RuntimeError, TypeError):
        return False
    return True
