"""Which positions of a sequence each rank holds, and how a rank's number becomes coordinates of an attention grid.

Owns index maps only: no processes, no communication. `T` is the length of the whole sequence, `n` the number of ranks that
share it, `t` one rank's share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tpattn.errors import Unsupported


class SequenceLayout:
    """Which global positions each of `n` ranks holds, in which local order. A value: comparable, hashable, no processes.

    T        length of the whole sequence
    n        number of ranks that share it
    kind     name of the constructor; for people, nothing depends on it
    sizes    number of tokens of each rank; may differ, may be 0
    """

    def __init__(
        self, kind: str, T: int, shares: Sequence[Tensor], block: int | None = None, numbers: tuple[int, ...] | None = None
    ) -> None:
        """Use the named constructors; `shares` are the positions of every rank, a partition of range(T).

        numbers     what decides the shares of this kind, to compare by; None = the positions themselves
        """
        self.kind, self.T, self.n, self.block = kind, T, len(shares), block
        self._shares, self._numbers = tuple(shares), numbers
        self.sizes = tuple(p.numel() for p in shares)  # not a cached property, at whose lock torch.compile breaks its graph

    # ---- constructors -------------------------------------------------------------------------------------------------

    @staticmethod
    def contiguous(T: int, n: int, *, block: int = 1) -> SequenceLayout:
        """Rank r holds the r-th of n neighbouring pieces; edges lie at multiples of `block`, earlier ranks take the rest."""
        return SequenceLayout("contiguous", T, _pieces(T, n, block), block, (T, n, block))

    @staticmethod
    def zigzag(T: int, n: int, *, block: int = 1) -> SequenceLayout:
        """Rank r holds pieces r and 2n - 1 - r of 2n: one early and one late, so that causal work is equal."""
        _check_sizes(T, n, block)
        pieces = _pieces(T, 2 * n, block)
        shares = [torch.cat((pieces[r], pieces[2 * n - 1 - r])) for r in range(n)]
        return SequenceLayout("zigzag", T, shares, block, (T, n, block))

    @staticmethod
    def striped(T: int, n: int, block: int = 1) -> SequenceLayout:
        """Rank r holds the blocks r, r + n, r + 2n, ... of `block` neighbouring positions each."""
        _check_sizes(T, n, block)
        everyone = torch.arange(T)
        owner = everyone.div(block, rounding_mode="floor") % n
        return SequenceLayout("striped", T, [everyone[owner == r] for r in range(n)], block, (T, n, block))

    @staticmethod
    def balanced(mask: _HasIntervals, T: int, n: int, block: int | None = None) -> SequenceLayout:
        """Shares of equal size whose attention work under `mask` is equal too: at most 1.05 times the mean where blocks allow it.

        Starts from contiguous and from zigzag shares of whole blocks, swaps blocks between a heavy and a light rank until the
        work is even, and keeps the one whose ranks need fewer keys of others. The same on every rank: a function of its
        arguments. Token counts differ by at most one block. A part of the mask in a dense table counts as "everything".

        mask        a value of tpattn.masks (one for all sequences, or the sum over those of a batch)
        block       tokens that stay together; edges lie at its multiples; None = 128, fewer for less than four blocks a rank
        """
        _check_sizes(T, n, 1 if block is None else block)
        block = min(128, max(1, T // (4 * n))) if block is None else block
        everyone = torch.arange(T)
        lo, hi = mask.structure().intervals(everyone, T)
        pieces = list(everyone.split(block)) if T else []
        work = torch.stack([w.sum() for w in (hi - lo).sum((0, 1)).split(block)]) if T else everyone
        starts = [_equal_blocks(len(pieces), n, zigzag) for zigzag in (False, True)]
        owners = [_even_out(owner, work.double(), n) for owner in starts]
        best = min(owners, key=lambda owner: _unevenness_and_traffic(owner, work.double(), n, lo, hi, block))
        shares = [
            torch.cat([p for p, o in zip(pieces, best.tolist(), strict=True) if o == r] or [everyone[:0]]) for r in range(n)
        ]
        return SequenceLayout("balanced", T, shares, block)

    @staticmethod
    def of_lengths(lengths: Sequence[int]) -> SequenceLayout:
        """Rank r holds the r-th of n neighbouring pieces, `lengths[r]` tokens long: contiguous shares of any lengths."""
        everyone = torch.arange(sum(lengths))
        return SequenceLayout("of_lengths", sum(lengths), everyone.split(list(lengths)), numbers=tuple(lengths))

    @staticmethod
    def of(positions: Sequence[Sequence[int] | Tensor]) -> SequenceLayout:
        """Rank r holds `positions[r]`, in that order. Every position of the sequence belongs to exactly one rank.

        raises      Unsupported when a position is held twice, by nobody, or is negative, or is no integer
        """
        shares = [_integers(p, rank) for rank, p in enumerate(positions)]
        if not shares:
            raise Unsupported("SequenceLayout.of needs one list of positions for each rank, got none")
        everyone = torch.cat(shares)
        T = everyone.numel()
        counts = torch.bincount(everyone.clamp(min=0), minlength=T) if T else everyone
        if T and (int(everyone.min()) < 0 or counts.numel() > T or bool((counts != 1).any())):
            twice = [int(p) for p in torch.nonzero(counts > 1).flatten()[:5]]
            nobody = [int(p) for p in torch.nonzero(counts[:T] == 0).flatten()[:5]]
            raise Unsupported(
                f"SequenceLayout.of got {T} positions that are not 0..{T - 1} once each: held twice {twice}, held by nobody "
                f"{nobody}, smallest {int(everyone.min())}, largest {int(everyone.max())}; give each position to exactly one rank"
            )
        return SequenceLayout("of", T, shares)

    # ---- what a rank holds ---------------------------------------------------------------------------------------------

    def positions(self, rank: int) -> Tensor:
        """Positions in the whole sequence of the tokens `rank` holds, in local order: [t], int64."""
        return self._shares[rank]

    @cached_property
    def rank_order(self) -> Tensor:
        """Global position of the i-th token when the shares are laid end to end by rank: [T], int64."""
        return torch.cat(self._shares) if self._shares else torch.empty(0, dtype=torch.int64)

    @cached_property
    def is_in_order(self) -> bool:
        """True when laying the shares end to end already gives the whole sequence (contiguous shares)."""
        return bool(torch.equal(self.rank_order, torch.arange(self.T)))

    def ascending(self, rank: int) -> bool:
        """True when `rank` holds its tokens in ascending order of position; so do all layouts but some made by `of`."""
        p = self._shares[rank]
        return bool((p[1:] > p[:-1]).all())

    def to_rank_order(self, x: Tensor, dim: int) -> Tensor:
        """Whole tensor [.., T, ..] reordered so that the shares lie end to end along `dim`."""
        return x if self.is_in_order else x.index_select(dim, self.rank_order.to(x.device))

    def from_rank_order(self, x: Tensor, dim: int) -> Tensor:
        """Undo `to_rank_order`: shares laid end to end along `dim` become the whole sequence."""
        return x if self.is_in_order else x.index_select(dim, torch.argsort(self.rank_order).to(x.device))

    # ---- value semantics ----------------------------------------------------------------------------------------------

    @cached_property
    def _key(self) -> tuple[object, ...]:
        if self._numbers is not None:
            return self.kind, self._numbers
        bytes_ = self.rank_order.numpy().tobytes()
        return self.kind, self.sizes, hashlib.sha256(bytes_).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SequenceLayout) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        block = f", block={self.block}" if self.block not in (None, 1) else ""
        return f"SequenceLayout.{self.kind}(T={self.T}, n={self.n}{block})"


def _integers(positions: Sequence[int] | Tensor, rank: int) -> Tensor:
    """One rank's positions as [t] int64."""
    p = torch.as_tensor(positions).cpu()
    if p.dim() != 1 or (p.numel() and (p.is_floating_point() or p.is_complex() or p.dtype == torch.bool)):
        raise Unsupported(
            f"SequenceLayout.of: the positions of rank {rank} must be one list of integers, got {p.dtype} {list(p.shape)}"
        )
    return p.to(torch.int64)


class _HasIntervals(Protocol):
    """What `balanced` needs of a mask (masks are a room above)."""

    def structure(self) -> Any: ...  # noqa: D102


_EVEN = 1.05  # most work of a rank, as a multiple of the mean, that needs no further swap
_SPLIT_COST = 0.01  # what one more boundary between blocks of other ranks weighs against unevenness


def _equal_blocks(blocks: int, n: int, zigzag: bool) -> Tensor:
    """Owner of each block: contiguous shares, or an early and a late one each; sizes differ by at most one block."""
    if not zigzag:
        return torch.repeat_interleave(torch.arange(n), torch.tensor(split_sizes(blocks, n)))
    halves = split_sizes(blocks, 2 * n)
    ranks = [*range(n), *reversed(range(n))]
    owner = torch.repeat_interleave(torch.tensor(ranks), torch.tensor(halves))
    for r, size in enumerate(split_sizes(blocks, n)):  # even out a block here and there
        while int((owner == r).sum()) > size:
            short = next(q for q in range(n) if int((owner == q).sum()) < split_sizes(blocks, n)[q])
            owner[torch.nonzero(owner == r).flatten()[-1]] = short
    return owner


def _even_out(owner: Tensor, work: Tensor, n: int) -> Tensor:
    """Swap blocks of the heaviest rank with blocks of a lighter one until the work is even or no swap helps."""
    owner = owner.clone()
    loads = torch.zeros(n, dtype=torch.float64).index_add_(0, owner, work)
    mean = float(loads.mean())
    for _ in range(8 * owner.numel()):
        heavy = int(loads.argmax())
        if mean == 0 or float(loads[heavy]) <= _EVEN * mean:
            break
        mine = torch.nonzero(owner == heavy).flatten()
        lighter = torch.argsort(loads)[: max(1, n // 2)]
        theirs = torch.nonzero(torch.isin(owner, lighter) & (owner != heavy)).flatten()
        if not mine.numel() or not theirs.numel():
            break
        moved = work[mine][:, None] - work[theirs][None]
        loads_a, loads_b = loads[heavy] - moved, loads[owner[theirs]][None] + moved
        worst = torch.maximum(loads_a, loads_b) / mean
        cost = worst + _SPLIT_COST * _boundaries(owner, mine, theirs, heavy)
        cost = torch.where(worst < float(loads[heavy]) / mean - 1e-12, cost, torch.inf)
        best = int(cost.argmin())
        if not bool(torch.isfinite(cost.flatten()[best])):
            break
        a, b = mine[best // theirs.numel()], theirs[best % theirs.numel()]
        other = int(owner[b])
        loads[heavy] -= work[a] - work[b]
        loads[other] += work[a] - work[b]
        owner[a], owner[b] = other, heavy
    return owner


def _boundaries(owner: Tensor, mine: Tensor, theirs: Tensor, heavy: int) -> Tensor:
    """How many boundaries between neighbouring blocks of two ranks each swap would add: [mine, theirs]."""
    padded = torch.nn.functional.pad(owner, (1, 1), value=-1)

    def beside(blocks: Tensor, rank: Tensor) -> Tensor:
        return (padded[blocks] == rank).double() + (padded[blocks + 2] == rank).double()

    other = owner[theirs]
    lost = beside(mine, torch.tensor(heavy))[:, None] + beside(theirs, other)[None]
    gained = beside(mine[:, None], other[None]) + beside(theirs, torch.tensor(heavy))[None]
    return lost - gained


def _unevenness_and_traffic(owner: Tensor, work: Tensor, n: int, lo: Tensor, hi: Tensor, block: int) -> tuple[bool, float]:
    """Whether the work is uneven, then how many keys of others the ranks need together."""
    loads = torch.zeros(n, dtype=torch.float64).index_add_(0, owner, work)
    uneven = float(loads.max()) > _EVEN * float(loads.mean())
    T = lo.shape[-1]
    rank_of = owner.repeat_interleave(block)[:T]
    total = 0.0
    for r in range(n):
        rows = rank_of == r
        edges = torch.zeros(T + 1, dtype=torch.int64)
        a, b = lo[..., rows].flatten(), hi[..., rows].flatten()
        edges.index_add_(0, a[b > a], torch.ones_like(a[b > a]))
        edges.index_add_(0, b[b > a], -torch.ones_like(b[b > a]))
        total += float(((edges.cumsum(0)[:T] > 0) & ~rows).sum())
    return uneven, total


def split_sizes(size: int, n: int) -> list[int]:
    """Lengths of `torch.tensor_split(arange(size), n)`: as equal as can be, earlier pieces longer. Tokens divide this way."""
    return [size // n + (r < size % n) for r in range(n)]


def chunk_sizes(size: int, n: int) -> list[int]:
    """Lengths by DTensor's rule (`torch.chunk`): ceil(size / n) each, the last pieces shorter or empty. Weights divide so."""
    step = -(-size // n)
    return [max(0, min(step, size - r * step)) for r in range(n)]


def _check_sizes(T: int, n: int, block: int) -> None:
    for name, value, least in (("T", T, 0), ("n", n, 1), ("block", block, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise Unsupported(f"SequenceLayout: {name}={value!r} must be an integer of at least {least}")


def _pieces(T: int, n: int, block: int) -> list[Tensor]:
    """Positions 0..T-1 in n neighbouring pieces whose edges are multiples of `block`."""
    _check_sizes(T, n, block)
    everyone, pieces, start = torch.arange(T), [], 0
    for blocks in split_sizes(-(-T // block), n):
        stop = min(start + blocks * block, T)
        pieces.append(everyone[start:stop])
        start = stop
    return pieces


@dataclass(frozen=True)
class AttentionGrid:
    """How one attention factorises its cp group: cp = ulysses x ring x merge, ulysses fastest. One size may be -1, "the rest".

    ulysses     ranks that exchange heads for tokens
    ring        ranks among which keys and values travel
    merge       ranks among which partial outputs travel, merged by their log-sum-exp
    """

    ulysses: int = 1
    ring: int = 1
    merge: int = 1
    choose: ClassVar[Callable[..., Any]]  # (layout, mask, num_heads, num_kv_heads, head_dim) -> Choice; made in `schedule`

    def __post_init__(self) -> None:
        sizes = {"ulysses": self.ulysses, "ring": self.ring, "merge": self.merge}
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
                raise Unsupported(f"AttentionGrid: {name}={size!r} must be a positive integer, or -1 for what is left")
        if list(sizes.values()).count(-1) > 1:
            raise Unsupported(f"AttentionGrid: only one of ulysses, ring, merge may be -1, got {sizes}")

    def resolve(self, cp: int) -> AttentionGrid:
        """The same grid with -1 replaced, checked against the number of ranks.

        raises      Unsupported when the product is not `cp`, with the sizes that would work
        """
        sizes = [self.ulysses, self.ring, self.merge]
        known = 1
        for size in sizes:
            known *= size if size != -1 else 1
        if -1 in sizes and cp % known == 0:
            sizes[sizes.index(-1)] = cp // known
        elif known != cp:
            words = " x ".join(f"{n}={s}" for n, s in zip(("ulysses", "ring", "merge"), sizes, strict=True))
            divisors = ", ".join(str(d) for d in range(1, cp + 1) if cp % d == 0)
            raise Unsupported(
                f"attention grid {words} covers {known} ranks but cp={cp}; the three sizes must multiply to {cp}, so each must "
                f"be one of {divisors} (or one of them -1)"
            )
        return AttentionGrid(*sizes)

    @property
    def size(self) -> int:
        """Number of ranks of a resolved grid."""
        return self.ulysses * self.ring * self.merge

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(ulysses, ring, merge) coordinate of cp rank `rank`."""
        return rank % self.ulysses, rank // self.ulysses % self.ring, rank // (self.ulysses * self.ring)

    @staticmethod
    def all_of(cp: int) -> list[AttentionGrid]:
        """Every factorisation of `cp` into ulysses x ring x merge."""
        return [
            AttentionGrid(u, r, cp // u // r)
            for u in range(1, cp + 1)
            if cp % u == 0
            for r in range(1, cp // u + 1)
            if cp // u % r == 0
        ]
