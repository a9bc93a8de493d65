"""Which (query position, key position) pairs count: a small algebra of values, evaluated without any process.

Every structured mask allows a short list of intervals [lo, hi) of key positions per query; only `dense` needs a table, known to
the rank that holds its rows. Pruning, work and tiles are all computed from lo and hi. Positions are global, so a mask means the
same on every rank. S = number of keys of the whole sequence, t = number of query rows asked about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpattn.errors import Unsupported

_NO_LIMIT = 1 << 40  # a window or prefix longer than this is none: positions plus it stay far from the end of int64
Intervals = tuple[Tensor, Tensor]  # lo, hi: int64 [b, i, t]; b is 1 or the batch size, i intervals per row, disjoint


class Mask:
    """A set of allowed (query, key) pairs. Combine with `&` and `|`; make with the functions of this module."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What the mask says, as a hashable value; a dense table counts by identity."""
        raise NotImplementedError

    @property
    def has_table(self) -> bool:
        """True when a part of the mask is a dense table."""
        return False

    def structure(self) -> Mask:
        """The mask as every rank knows it: a dense part, known to its rows' rank only, counts as "everything"."""
        return self

    def intervals(self, positions: Tensor, S: int) -> Intervals:
        """Allowed key positions of the queries at `positions` [t]: lo, hi [b, i, t]. A dense part counts as "everything"."""
        raise NotImplementedError

    def table(self, positions: Tensor, S: int) -> Tensor | None:
        """The dense part for this rank's rows at `positions` [t]: bool [b, h, t, S], b and h 1 or whole; None without one."""
        return None

    def check(self, B: int, H: int, t: int, S: int) -> None:
        """Raise Unsupported when the mask does not fit B sequences of t local rows, H heads and S keys."""

    def __and__(self, other: Mask) -> Mask:
        return _And(self, _mask(other))

    def __or__(self, other: Mask) -> Mask:
        return _Or(self, _mask(other))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"masks.{self.key[0]}{self.key[1:]}"


# ---- constructors ----------------------------------------------------------------------------------------------------------


def full() -> Mask:
    """Every query may read every key."""
    return _Band("full", None, None)


def causal() -> Mask:
    """Query i may read key j <= i. Positions are global; with another number of keys the alignment is top-left, as in torch."""
    return _Band("causal", None, 0)


def window(left: int | None, right: int | None = None) -> Mask:
    """Query i may read keys i - left <= j <= i + right; None = no limit. Hugging Face's window w is `window(w - 1)`."""
    for name, value in (("left", left), ("right", right)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise Unsupported(f"masks.window: {name}={value!r} must be None (no limit) or an integer >= 0")
    left, right = (None if value is not None and value > _NO_LIMIT else value for value in (left, right))
    return _Band("window", left, right)


def prefix(n: int) -> Mask:
    """Every query may read the first n keys (join it with `causal() | prefix(n)`)."""
    if not isinstance(n, int) or isinstance(n, bool) or n < 0:
        raise Unsupported(f"masks.prefix: n={n!r} must be an integer >= 0")
    return _Prefix(min(n, _NO_LIMIT))


def documents(lengths: Sequence[int] | Sequence[Sequence[int]]) -> Mask:
    """Query and key must lie in the same document. `lengths` in tokens, one list for all or one list per batch element.

    Positions behind the last document belong to none: they read nothing and nobody reads them.
    """
    if not isinstance(lengths, (list, tuple)):
        raise Unsupported(f"masks.documents needs a list of lengths, or one list per batch element, got {type(lengths).__name__}")
    rows: list[Any] = list(lengths) if lengths and isinstance(lengths[0], (list, tuple)) else [lengths]
    for row in rows:
        for length in row if isinstance(row, (list, tuple)) else [row]:
            if not isinstance(length, int) or isinstance(length, bool) or length < 0:
                raise Unsupported(f"masks.documents: length {length!r} must be an integer >= 0")
        if not isinstance(row, (list, tuple)):
            raise Unsupported(f"masks.documents: {row!r} stands among lists of lengths; give one list, or one per batch element")
    return _Documents(tuple(tuple(r) for r in rows))


def document_ids(ids: Tensor) -> Mask:
    """Query and key must have the same id: `ids` int [S] or [B, S] of the whole sequence, the same on every rank.

    A document may lie in several pieces; time and memory grow with the most pieces of one: it is made for few. A position with a
    negative id belongs to none: it reads nothing and nobody reads it.
    """
    whole = isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if not whole or ids.dim() not in (1, 2):
        raise Unsupported(f"masks.document_ids needs integers [S] or [B, S], one id for each token; got {_kind(ids)}")
    return _DocumentIds((ids if ids.dim() == 2 else ids[None]).detach().cpu().to(torch.int64, copy=True))


def padding(valid: Tensor) -> Mask:
    """Key j of sequence b may be read where `valid[b, j]`; valid is bool [B, S], the same on every rank.

    Time and memory grow with the number of pieces that the valid keys of a sequence lie in: it is made for few.
    """
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.dim() != 2:
        raise Unsupported(f"masks.padding needs bool [B, S], True for real keys; got {_kind(valid)}")
    return _Padding(valid.detach().cpu().clone())  # the caller may use its buffer again


def dense(allowed: Tensor) -> Mask:
    """Any pairs at all: bool, True = allowed, [t, S], [B, 1, t, S] or [B, H, t, S]; rows in local order, columns global.

    Only the rank that holds the rows knows the table, so it saves computing, never traffic.
    """
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
        raise Unsupported(
            f"masks.dense needs a bool tensor, True where a query may read a key, got {_kind(allowed)}; additive masks are not "
            "supported (for 0 / -inf use masks.dense(additive == 0))"
        )
    if allowed.dim() not in (2, 4):
        raise Unsupported(f"masks.dense needs [t, S], [B, 1, t, S] or [B, H, t, S], got {list(allowed.shape)}")
    return _Dense(allowed)


def _kind(x: object) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


# ---- leaves ----------------------------------------------------------------------------------------------------------------


class _Band(Mask):
    """Keys from `left` before to `right` behind the query; None = no limit. Full, causal and window are three of these."""

    def __init__(self, name: str, left: int | None, right: int | None) -> None:
        self.name, self.left, self.right = name, left, right

    @property
    def key(self) -> tuple[Any, ...]:
        return self.name, self.left, self.right

    def intervals(self, positions: Tensor, S: int) -> Intervals:
        lo = torch.zeros_like(positions) if self.left is None else positions - self.left
        hi = torch.full_like(positions, S) if self.right is None else positions + self.right + 1
        return _clip(lo[None, None], hi[None, None], S)


class _Prefix(Mask):
    def __init__(self, n: int) -> None:
        self.n = n

    @property
    def key(self) -> tuple[Any, ...]:
        return "prefix", self.n

    def intervals(self, positions: Tensor, S: int) -> Intervals:
        lo = torch.zeros_like(positions)
        return _clip(lo[None, None], torch.full_like(lo, self.n)[None, None], S)


class _Documents(Mask):
    def __init__(self, lengths: tuple[tuple[int, ...], ...]) -> None:
        self.lengths = lengths

    @property
    def key(self) -> tuple[Any, ...]:
        return "documents", self.lengths

    def check(self, B: int, H: int, t: int, S: int) -> None:
        if len(self.lengths) not in (1, B):
            raise Unsupported(
                f"masks.documents: {len(self.lengths)} lists of lengths for a batch of {B}; give one, or one for each"
            )
        for row in self.lengths:
            if sum(row) > S:
                raise Unsupported(
                    f"masks.documents: lengths sum to {sum(row)} but there are only {S} keys; give those of the whole sequence, "
                    "the same on every rank"
                )

    def intervals(self, positions: Tensor, S: int) -> Intervals:
        los, his = [], []
        for row in self.lengths:
            edges = torch.tensor([0, *row], dtype=torch.int64).cumsum(0)
            which = torch.searchsorted(edges, positions, right=True)  # edges[which - 1] <= position < edges[which]
            inside = which < edges.numel()
            los.append(torch.where(inside, edges[(which - 1).clamp(min=0)], 0))
            his.append(torch.where(inside, edges[which.clamp(max=edges.numel() - 1)], 0))
        return _clip(torch.stack(los)[:, None], torch.stack(his)[:, None], S)


class _DocumentIds(Mask):
    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    @property
    def key(self) -> tuple[Any, ...]:
        return "document_ids", tuple(self.ids.shape), self.ids.numpy().tobytes()

    def check(self, B: int, H: int, t: int, S: int) -> None:
        b, length = self.ids.shape
        if b not in (1, B) or length != S:
            raise Unsupported(f"masks.document_ids is {[b, length]}, needs [S] or [B, S] with B={B} sequences and S={S} keys")

    def intervals(self, positions: Tensor, S: int) -> Intervals:
        """For every row the pieces of its document."""
        if not len(self.ids):  # an empty batch, of a data rank without sequences
            return prefix(0).intervals(positions, S)
        found = [self._pieces(row, positions) for row in self.ids]
        most = max(lo.shape[0] for lo, _ in found)
        padded = [[torch.nn.functional.pad(x, (0, 0, 0, most - x.shape[0])) for x in pair] for pair in found]
        return torch.stack([lo for lo, _ in padded]), torch.stack([hi for _, hi in padded])

    @staticmethod
    def _pieces(ids: Tensor, positions: Tensor) -> Intervals:
        """lo, hi [pieces, t] of one sequence."""
        values, lengths = torch.unique_consecutive(ids, return_counts=True)
        stops = lengths.cumsum(0)
        names, document = torch.unique(values, return_inverse=True)  # of each piece
        order = document.argsort(stable=True)
        counts = torch.bincount(document, minlength=max(1, names.numel()))
        nth = torch.arange(order.numel()) - (counts.cumsum(0) - counts)[document[order]]
        edges = torch.zeros(2, max(1, int(counts.max())), counts.numel(), dtype=torch.int64)
        edges[0, nth, document[order]], edges[1, nth, document[order]] = (stops - lengths)[order], stops[order]
        edges[:, :, : names.numel()].masked_fill_(names < 0, 0)
        piece = torch.searchsorted(stops, positions, right=True)
        inside = piece < stops.numel()
        which = document[piece[inside]]
        lo, hi = torch.zeros(2, edges.shape[1], positions.numel(), dtype=torch.int64)
        lo[:, inside], hi[:, inside] = edges[0][:, which], edges[1][:, which]
        return lo, hi


class _Padding(Mask):
    def __init__(self, valid: Tensor) -> None:
        self.valid = valid

    @property
    def key(self) -> tuple[Any, ...]:
        return "padding", tuple(self.valid.shape), self.valid.numpy().tobytes()

    def check(self, B: int, H: int, t: int, S: int) -> None:
        if self.valid.shape != (B, S):
            raise Unsupported(
                f"masks.padding is {list(self.valid.shape)}, needs [B, S] = [{B}, {S}]: all keys, the same table on every rank"
            )

    def intervals(self, positions: Tensor, S: int) -> Intervals:
        """The runs of valid keys of each sequence, the same for every row."""
        if not len(self.valid):  # an empty batch, of a data rank without sequences
            return prefix(0).intervals(positions, S)
        edges = torch.nn.functional.pad(self.valid.to(torch.int8), (1, 1)).diff(dim=1)
        starts = [torch.nonzero(row == 1).flatten() for row in edges]
        stops = [torch.nonzero(row == -1).flatten() for row in edges]
        most = max([s.numel() for s in starts] + [1])
        lo = torch.stack([torch.nn.functional.pad(s, (0, most - s.numel())) for s in starts])
        hi = torch.stack([torch.nn.functional.pad(s, (0, most - s.numel())) for s in stops])
        rows = positions.numel()
        return lo[:, :, None].expand(-1, -1, rows), hi[:, :, None].expand(-1, -1, rows)


class _Dense(Mask):
    def __init__(self, allowed: Tensor) -> None:
        self.allowed = allowed if allowed.dim() == 4 else allowed[None, None]

    @property
    def key(self) -> tuple[Any, ...]:
        return "dense", id(self)

    @property
    def has_table(self) -> bool:
        return True

    def check(self, B: int, H: int, t: int, S: int) -> None:
        b, h, rows, columns = self.allowed.shape
        if (rows, columns) != (t, S) or b not in (1, B) or h not in (1, H):
            raise Unsupported(
                f"masks.dense is {[b, h, rows, columns]}, needs [t, S], [B, 1, t, S] or [B, H, t, S] with B={B}, H={H}, t={t} "
                f"local rows (cut them with ctx.cp.shard(mask, layout, dim=-2)) and all S={S} key columns"
            )

    def structure(self) -> Mask:
        return full()

    def intervals(self, positions: Tensor, S: int) -> Intervals:
        return full().intervals(positions, S)

    def table(self, positions: Tensor, S: int) -> Tensor | None:
        return self.allowed


# ---- combinations ----------------------------------------------------------------------------------------------------------


class _Pair(Mask):
    name = "pair"

    def __init__(self, a: Mask, b: Mask) -> None:
        self.a, self.b = a, b

    @property
    def key(self) -> tuple[Any, ...]:
        return self.name, self.a.key, self.b.key

    @property
    def has_table(self) -> bool:
        return self.a.has_table or self.b.has_table

    def check(self, B: int, H: int, t: int, S: int) -> None:
        self.a.check(B, H, t, S)
        self.b.check(B, H, t, S)


class _And(_Pair):
    name = "and"

    def structure(self) -> Mask:
        return _And(self.a.structure(), self.b.structure())

    def intervals(self, positions: Tensor, S: int) -> Intervals:
        (lo_a, hi_a), (lo_b, hi_b) = self.a.intervals(positions, S), self.b.intervals(positions, S)
        lo = torch.maximum(lo_a[:, :, None], lo_b[:, None]).flatten(1, 2)
        hi = torch.minimum(hi_a[:, :, None], hi_b[:, None]).flatten(1, 2)
        return _drop_empty(lo, hi)

    def table(self, positions: Tensor, S: int) -> Tensor | None:
        tables = [x for x in (self.a.table(positions, S), self.b.table(positions, S)) if x is not None]
        return tables[0] & tables[1] if len(tables) == 2 else tables[0] if tables else None


class _Or(_Pair):
    name = "or"

    def structure(self) -> Mask:
        return full() if self.has_table else self

    def intervals(self, positions: Tensor, S: int) -> Intervals:
        if self.has_table:  # which pairs the table adds is known to its rows' rank only
            return full().intervals(positions, S)
        (lo_a, hi_a), (lo_b, hi_b) = self.a.intervals(positions, S), self.b.intervals(positions, S)
        b = max(lo_a.shape[0], lo_b.shape[0])
        lo = torch.cat([lo_a.expand(b, -1, -1), lo_b.expand(b, -1, -1)], dim=1)
        hi = torch.cat([hi_a.expand(b, -1, -1), hi_b.expand(b, -1, -1)], dim=1)
        return _drop_empty(*_disjoint(lo, hi, S))

    def table(self, positions: Tensor, S: int) -> Tensor | None:
        return allowed(self.a, positions, S) | allowed(self.b, positions, S) if self.has_table else None


def allowed(mask: Mask, positions: Tensor, S: int) -> Tensor:
    """The mask as a table for the queries at `positions` [t]: bool [b, h, t, S]. For small tiles, tests and pictures."""
    device = None
    lo, hi = mask.intervals(positions, S)
    j = torch.arange(S)
    inside = ((j >= lo[..., None]) & (j < hi[..., None])).any(dim=1)[:, None]
    table = mask.table(positions, S)
    if table is not None:
        device = table.device
        inside = inside.to(device) & table
    return inside


def _mask(value: object) -> Mask:
    if not isinstance(value, Mask):
        raise Unsupported(
            f"a mask can be combined with another mask of tpattn.masks only, got {type(value).__name__}; a bool tensor becomes "
            "masks.dense(x)"
        )
    return value


def _clip(lo: Tensor, hi: Tensor, S: int) -> Intervals:
    """Intervals inside [0, S); an empty one becomes lo = hi."""
    lo = lo.clamp(0, S)
    return lo, torch.maximum(hi.clamp(0, S), lo)


def _drop_empty(lo: Tensor, hi: Tensor) -> Intervals:
    """Without the intervals that are empty for every row (one is kept), empties as lo = hi."""
    hi = torch.maximum(lo, hi)
    keep = (hi > lo).any(dim=2).any(dim=0)
    keep[0] = keep[0] | ~keep.any()
    return lo[:, keep], hi[:, keep]


def _disjoint(lo: Tensor, hi: Tensor, S: int) -> Intervals:
    """The union of each row's intervals as disjoint intervals: a later one begins where the earlier ones end.

    Of those that begin alike the longest comes first and hides the others, so that no row is computed in two pieces.
    """
    lo = torch.where(hi > lo, lo, S)  # empty ones to the end
    order = (lo * (S + 1) - hi).argsort(dim=1)
    lo, hi = lo.gather(1, order), hi.gather(1, order)
    reach = hi.cummax(dim=1).values
    before = torch.cat([torch.zeros_like(reach[:, :1]), reach[:, :-1]], dim=1)
    return torch.maximum(lo, before), torch.maximum(hi, before)
