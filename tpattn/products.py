"""The three products of attention with the tokens shared over ranks: A B^T (nt), A B (all) and A^T B (tn), with their gradients.

Letters: t rows on this rank (lengths may differ between ranks, 0 too), s its part of the S columns of A; D and E are not divided.
nt and all fetch the others' rows in messages of at most `offset` rows or columns, tn is one reduce-scatter. Each product's
gradients are two of the others, so the same three functions run forward and backward. Every message is left to `comm`.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tpattn import comm
from tpattn.errors import Unsupported
from tpattn.layout import split_sizes

_IN_FLIGHT = 2  # messages on their way
_WIDTH = 128  # pieces are joined to this many rows or columns before they are multiplied: by 32 it would take 1.6 times as long
_ROWS = 1024  # thin products are made by blocks of this many rows, 5 to 10 % faster on CPU: the block stays in the cache


def distributed_matmul_nt(left: Tensor, right: Tensor, offset: int = 32, group: Any = None) -> Tensor:
    """A B^T: this rank's rows of A times the rows of B on all ranks; gradient: dA = dC B, dB = dC^T A.

    left        A [*, t, D]     this rank's rows
    right       B [*, s, D]     this rank's rows, s may differ from t. Leading dimensions broadcast as in torch.matmul
    offset      most rows of B in one message; two messages are on their way while two others are multiplied, in backward too
    group       torch's process group; None = all processes, or this one alone when torch.distributed is not initialised
    returns     [*, t, S], columns in rank order. `offset` changes nothing but the rounding of local products
    raises      Unsupported (a ValueError), on every rank and before a row is sent, for what does not fit
    source      the package distributed-dot-product, whose names and argument order these are
    """
    return RightTransposeMultiplication.apply(left, right, offset, group)


def distributed_matmul_all(left: Tensor, right: Tensor, offset: int = 32, group: Any = None) -> Tensor:
    """A B: this rank's rows of A times the rows of B on all ranks; gradient: dA = dC B^T, dB = A^T dC summed over ranks.

    left        A [*, t, S]     this rank's rows, columns in rank order
    right       B [*, s, E]     this rank's rows. Leading dimensions broadcast as in torch.matmul
    offset      most columns of B in one message; two messages are on their way while two others are multiplied
    group       as for `distributed_matmul_nt`
    returns     [*, t, E]; bfloat16 and float16 are summed over ranks in float32 and rounded once
    raises      Unsupported (a ValueError), on every rank and before a row is sent, for what does not fit
    """
    return FullMultiplication.apply(left, right, offset, group)


def distributed_matmul_tn(left: Tensor, right: Tensor, group: Any = None) -> Tensor:
    """A^T B summed over ranks, this rank's rows of it; gradient: dA = B dC^T, dB = A dC.

    left        A [*, t, S]     this rank's rows
    right       B [*, t, E]     this rank's rows. Leading dimensions broadcast as in torch.matmul
    group       as for `distributed_matmul_nt`
    returns     [*, s, E]. When S is the number of rows on all ranks this rank gets the rows it holds tokens of (s = t), else S is
                divided as evenly as can be. One message to each peer, of exactly what it gets; sums in float32 at least
    raises      Unsupported (a ValueError), on every rank and before a row is sent, for what does not fit
    """
    return LeftTransposeMultiplication.apply(left, right, 32, group)


# ---- with gradients --------------------------------------------------------------------------------------------------------


class _Nt(torch.autograd.Function):
    """shard -> shard, A B^T: rows of B travel; gradient: columns of B travel for dA, parts of dB are summed at their owners."""

    @staticmethod
    def forward(node: Any, left: Tensor, right: Tensor, call: _Call) -> Tensor:
        node.call = call
        node.save_for_backward(left, right)
        return _nt(left, right, call)

    @staticmethod
    def backward(node: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (left, right), call = node.saved_tensors, node.call
        d_left = _All.apply(g, right.conj(), call.backward) if call.left_needs_gradient else None
        d_right = _Tn.apply(g, left.conj(), call.backward, right.shape[:-2]) if call.right_needs_gradient else None
        return _like(left, d_left), d_right, None


class _All(torch.autograd.Function):
    """shard -> shard, A B: columns of B travel; gradient: rows of B travel for dA, parts of dB are summed at their owners."""

    @staticmethod
    def forward(node: Any, left: Tensor, right: Tensor, call: _Call) -> Tensor:
        node.call = call
        node.save_for_backward(left, right)
        return _all(left, right, call)

    @staticmethod
    def backward(node: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (left, right), call = node.saved_tensors, node.call
        d_left = _Nt.apply(g, right.conj(), call.backward) if call.left_needs_gradient else None
        d_right = _Tn.apply(left.conj(), g, call.backward, right.shape[:-2]) if call.right_needs_gradient else None
        return _like(left, d_left), d_right, None


class _Tn(torch.autograd.Function):
    """partial -> shard, A^T B: parts of the sum travel to their owners; gradient: rows of dC travel for dA, columns for dB."""

    @staticmethod
    def forward(node: Any, left: Tensor, right: Tensor, call: _Call, lead: torch.Size) -> Tensor:
        node.call = call
        node.save_for_backward(left, right)
        return _tn(left, right, call, lead)

    @staticmethod
    def backward(node: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (left, right), call = node.saved_tensors, node.call
        d_left = _Nt.apply(right.conj(), g, call.backward) if call.left_needs_gradient else None
        d_right = _All.apply(left.conj(), g, call.backward) if call.right_needs_gradient else None
        return _like(left, d_left), _like(right, d_right), None, None


def _like(x: Tensor, gradient: Tensor | None) -> Tensor | None:
    """The gradient of x, summed over the leading dimensions along which x was broadcast."""
    return None if gradient is None else gradient.sum_to_size(x.shape)


class RightTransposeMultiplication(_Nt):
    """`distributed_matmul_nt` by the original's name and arguments: `.apply(left, right, offset=32, group=None)`."""

    @classmethod
    def apply(cls, left: Tensor, right: Tensor, offset: int = 32, group: Any = None) -> Tensor:
        """A B^T."""
        return super().apply(left, right, _agree("nt", left, right, offset, group))


class FullMultiplication(_All):
    """`distributed_matmul_all` by the original's name and arguments: `.apply(left, right, offset=32, group=None)`."""

    @classmethod
    def apply(cls, left: Tensor, right: Tensor, offset: int = 32, group: Any = None) -> Tensor:
        """A B."""
        return super().apply(left, right, _agree("all", left, right, offset, group))


class LeftTransposeMultiplication(_Tn):
    """`distributed_matmul_tn` by the original's name: `.apply(left, right, offset=32, group=None)`; offset is for backward."""

    @classmethod
    def apply(cls, left: Tensor, right: Tensor, offset: int = 32, group: Any = None) -> Tensor:
        """A^T B."""
        call = _agree("tn", left, right, offset, group)
        return super().apply(left, right, call, torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]))


# ---- what all ranks know before the first row is sent ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """What the ranks agreed on.

    axis        the ranks
    shares      s of each rank, the parts of S
    offset      most rows or columns in one message
    ..._gradient    whether any rank needs that input's gradient: then all take part in its messages
    direction   forward or backward, for the ledger
    """

    axis: comm.Group
    shares: list[int]
    offset: int
    left_needs_gradient: bool
    right_needs_gradient: bool
    direction: str = "forward"

    @property
    def backward(self) -> _Call:
        """The call of a product that computes a gradient. If it is differentiated again, every rank sends everything."""
        return replace(self, left_needs_gradient=True, right_needs_gradient=True, direction="backward")

    def span(self, rank: int) -> slice:
        """The part of S that `rank` holds."""
        start = sum(self.shares[:rank])
        return slice(start, start + self.shares[rank])


def _agree(kind: str, left: Tensor, right: Tensor, offset: int, group: Any) -> _Call:
    """Check the arguments, tell the others the sizes (one small all-gather), and check that they fit together."""
    _check(kind, left, right, offset)
    axis = comm.group_of(group)
    axis.require_open()
    lead = right.shape[:-2] if kind != "tn" else torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    needs = [int(torch.is_grad_enabled() and x.requires_grad) for x in (left, right)]
    dtype = zlib.crc32(str(left.dtype).encode())
    table = comm.agree([left.shape[-1], *right.shape[-2:], lead.numel(), offset, dtype, *needs], axis)
    widths, rows, *same, left_needs, right_needs = ([row[i] for row in table] for i in range(8))
    names = {
        "last dimension of right": right.shape[-1],
        "number of batch elements": lead.numel(),
        "offset": offset,
        "dtype": left.dtype,
    }
    for (name, mine), values in zip(names.items(), same, strict=True):
        if others := [r for r, value in enumerate(values) if value != values[axis.rank]]:
            raise Unsupported(
                f"distributed {kind}: the {name} must be the same on every rank, it is {mine} on rank {axis.rank} and "
                f"another on ranks {others} of {axis.name}"
            )
    if kind == "all" and any(width != sum(rows) for width in widths):
        raise Unsupported(
            f"distributed all needs {_NEEDS[kind]}, S the sum of all s; got {widths} columns on ranks 0 to {axis.size - 1} for "
            f"{' + '.join(map(str, rows))} = {sum(rows)} rows"
        )
    if kind == "tn" and len(set(widths)) > 1:
        raise Unsupported(f"distributed tn: left must have the same number of columns on every rank, got {widths}")
    silent = [r for r in range(axis.size) if not (left_needs[r] or right_needs[r])]
    if 0 < len(silent) < axis.size:
        raise Unsupported(
            f"distributed {kind}: an input needs a gradient on some ranks but none does on ranks {silent}, for whose messages "
            "backward would wait; set requires_grad, or torch.no_grad(), alike on all ranks"
        )
    shares = rows if kind != "tn" or widths[0] == sum(rows) else split_sizes(widths[0], axis.size)
    return _Call(axis, shares, offset, any(left_needs), any(right_needs))


_NEEDS = {
    "nt": "left [*, t, D] and right [*, s, D]",
    "all": "left [*, t, S] and right [*, s, E]",
    "tn": "left [*, t, S] and right [*, t, E]",
}


def _check(kind: str, left: Tensor, right: Tensor, offset: int) -> None:
    """Raise Unsupported for what this rank can see without the others."""
    for name, x in (("left", left), ("right", right)):
        if not isinstance(x, Tensor) or x.dim() < 2 or x.layout != torch.strided:
            got = f"{x.layout} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise Unsupported(f"distributed {kind} needs dense tensors {_NEEDS[kind]}, got {got} for {name}")
    got = f"left {list(left.shape)} {left.dtype} on {left.device}, right {list(right.shape)} {right.dtype} on {right.device}"
    if left.dtype != right.dtype or left.device != right.device:
        raise Unsupported(
            f"distributed {kind} needs left and right of one dtype and device, got {got}; convert one with .to(...)"
        )
    if not isinstance(offset, int) or isinstance(offset, bool) or offset < 1:
        raise Unsupported(f"offset={offset!r} must be an integer >= 1: the most rows (nt) or columns (all) in one message")
    if (kind == "nt" and left.shape[-1] != right.shape[-1]) or (kind == "tn" and left.shape[-2] != right.shape[-2]):
        raise Unsupported(f"distributed {kind} needs {_NEEDS[kind]}, got {got}")
    try:
        lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    except RuntimeError:
        raise Unsupported(
            f"distributed {kind}: the leading dimensions do not broadcast, got {got}; make them equal or 1"
        ) from None
    if not _multiplies(left.dtype, left.device.type, lead.numel() > 1):
        raise Unsupported(f"distributed {kind}: torch multiplies no such matrices, got {got}; convert both with .to(...)")


@lru_cache
def _multiplies(dtype: torch.dtype, device: str, batched: bool) -> bool:
    """Whether torch multiplies matrices of this dtype there."""
    try:
        x = torch.ones(1, 1, device=device).to(dtype)
        torch.bmm(x.expand(2, 1, 1), x.expand(2, 1, 1)) if batched else torch.mm(x, x)
    except (RuntimeError, TypeError):
        return False
    return True


# ---- the products ----------------------------------------------------------------------------------------------------------


def _nt(left: Tensor, right: Tensor, call: _Call) -> Tensor:
    """left [*, t, D], right [*, s, D] -> [*, t, S]."""
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    a_ntD = _flat(left, lead)
    new = torch.empty if a_ntD.shape[-1] else torch.zeros  # D = 0: nothing travels
    out_ntS = new(*a_ntD.shape[:2], sum(call.shares), dtype=left.dtype, device=left.device)
    for rank, first, piece in _pieces(right, -2, call):
        start = call.span(rank).start + first
        _multiply(out_ntS[..., start : start + piece.shape[-2]], a_ntD, _flat(piece, lead).mT)
    return out_ntS.view(*lead, *out_ntS.shape[1:])


def _all(left: Tensor, right: Tensor, call: _Call) -> Tensor:
    """left [*, t, S], right [*, s, E] -> [*, t, E]."""
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    a_ntS = _flat(left, lead)
    low = left.dtype.is_floating_point and left.dtype.itemsize < 4 and call.axis.size > 1
    dtype = torch.float32 if low else left.dtype
    out_ntE = torch.empty(*a_ntS.shape[:2], right.shape[-1], dtype=dtype, device=left.device)
    for rank, first, piece in _pieces(right, -1, call):
        columns = out_ntE[..., first : first + piece.shape[-1]]
        _multiply(columns, a_ntS[..., call.span(rank)], _flat(piece, lead), add=rank != call.axis.rank)
    return out_ntE.to(left.dtype).view(*lead, *out_ntE.shape[1:])


def _tn(left: Tensor, right: Tensor, call: _Call, lead: torch.Size) -> Tensor:
    """left [*, t, S], right [*, t, E] -> [*, s, E], summed over the leading dimensions that `lead` has not."""
    axis, full = call.axis, torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    a_nSt, b_ntE = _flat(left, full).mT, _flat(right, full)

    def empty(rank: int, lead: torch.Size) -> Tensor:
        return torch.empty(*lead, call.shares[rank], b_ntE.shape[-1], dtype=left.dtype, device=left.device)

    def compute(rank: int, into: Tensor) -> Tensor:
        part = into if lead == full else empty(rank, full)
        _multiply(part.view(full.numel(), *part.shape[-2:]), a_nSt[:, call.span(rank)], b_ntE)
        return into if lead == full else into.copy_(part.sum_to_size(into.shape))

    own = empty(axis.rank, lead)
    if axis.size == 1:
        return compute(0, own)
    parts = [own if rank == axis.rank else compute(rank, empty(rank, lead)) for rank in range(axis.size)]
    wait = comm.start_reduce_scatter(parts, axis, direction=call.direction)
    del parts  # they are packed
    compute(axis.rank, own)  # while the others' parts travel
    return wait()


def _pieces(right: Tensor, dim: int, call: _Call) -> Iterator[tuple[int, int, Tensor]]:
    """(rank, first, piece): `right` of every rank, cut along `dim` from `first` on. Own rows first, whole: the others travel.

    Two messages of at most `offset` are on their way while the two before are multiplied; these come as one piece.
    """
    axis, right = call.axis, right.resolve_conj()
    length = max(call.shares) if dim == -2 else right.shape[-1]
    starts = range(0, length if axis.size > 1 and right.shape[:-2].numel() * right.shape[-1] else 0, call.offset)

    def sizes(start: int) -> list[int]:
        wholes = call.shares if dim == -2 else [length] * axis.size
        return [max(0, min(call.offset, whole - start)) for whole in wholes]

    def start_message(start: int) -> Any:
        shapes = [[*right.shape[:-2], s, right.shape[-1]] for s in call.shares]
        for shape, size in zip(shapes, sizes(start), strict=True):
            shape[dim] = size
        own = right.narrow(dim, min(start, right.shape[dim]), shapes[axis.rank][dim])
        return comm.start_gather(own, shapes, axis, direction=call.direction)

    waits = deque(start_message(start) for start in starts[:_IN_FLIGHT])
    yield axis.rank, 0, right
    joined: list[list[Tensor]] = [[] for _ in range(axis.size)]  # by rank, what has arrived since `first`
    first = 0
    for i, start in enumerate(starts):
        arrived = waits.popleft()()
        waits.extend(start_message(later) for later in starts[i + _IN_FLIGHT : i + _IN_FLIGHT + 1])
        for rank, piece in enumerate(arrived):
            if rank != axis.rank and piece.shape[dim]:
                joined[rank].append(piece)
        del arrived, piece
        stop = start + call.offset
        if stop - first >= _WIDTH or i == len(starts) - 1:
            for rank, shares in enumerate(joined):
                if shares:
                    yield rank, first, shares[0] if len(shares) == 1 else torch.cat(shares, dim)
            joined, first = [[] for _ in range(axis.size)], stop


def _flat(x: Tensor, lead: torch.Size) -> Tensor:
    """x [*, a, b] as [n, a, b] for the n elements of `lead`, with strides that a matrix product takes without a copy."""
    x = x.resolve_conj().expand(*lead, *x.shape[-2:]).reshape(lead.numel(), *x.shape[-2:])
    rows, columns = x.stride()[1:]
    fits = (columns == 1 and rows >= x.shape[2]) or (rows == 1 and columns >= x.shape[1])
    return x if fits else x.contiguous()


def _multiply(out: Tensor, a: Tensor, b: Tensor, add: bool = False) -> None:
    """out [n, i, k] = a [n, i, j] b [n, j, k], or += that; in the dtype of a, added in that of out."""
    if out.is_cpu and b.shape[2] <= 2 * _WIDTH and a.shape[1] > _ROWS:
        for block, rows in zip(out.split(_ROWS, 1), a.split(_ROWS, 1), strict=True):
            _multiply(block, rows, b, add)
    elif out.dtype != a.dtype:
        product = torch.bmm(a, b) if a.shape[0] != 1 else torch.mm(a[0], b[0])[None]
        out.add_(product.to(out.dtype)) if add else out.copy_(product)
    elif a.shape[0] == 1:
        out[0].addmm_(a[0], b[0]) if add else torch.mm(a[0], b[0], out=out[0])
    else:
        out.baddbmm_(a, b, beta=int(add))
