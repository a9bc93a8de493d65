"""Which positions of a sequence each rank holds, and how a rank's number becomes coordinates of an attention grid.

Owns index maps only: no processes, no communication. `T` is the length of the whole sequence, `n` the number of ranks that
share it, `t` one rank's share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tpattn.errors import Unsupported


class SequenceLayout:
    """Which global positions each of `n` ranks holds, in which local order. A value: comparable, hashable, no processes.

    T        length of the whole sequence
    n        number of ranks that share it
    kind     contiguous, zigzag, striped or of; for people, nothing depends on it
    """

    def __init__(self, kind: str, T: int, shares: Sequence[Tensor], block: int | None = None) -> None:
        """Use the named constructors; `shares` are the positions of every rank, a partition of range(T)."""
        self.kind, self.T, self.n, self.block = kind, T, len(shares), block
        self._shares = tuple(shares)

    # ---- constructors -------------------------------------------------------------------------------------------------

    @staticmethod
    def contiguous(T: int, n: int, *, block: int = 1) -> SequenceLayout:
        """Rank r holds the r-th of n neighbouring pieces; edges lie at multiples of `block`, earlier ranks take the rest."""
        return SequenceLayout("contiguous", T, _pieces(T, n, block), block)

    @staticmethod
    def zigzag(T: int, n: int, *, block: int = 1) -> SequenceLayout:
        """Rank r holds pieces r and 2n - 1 - r of 2n: one early and one late, so that causal work is equal."""
        _check_sizes(T, n, block)
        pieces = _pieces(T, 2 * n, block)
        return SequenceLayout("zigzag", T, [torch.cat((pieces[r], pieces[2 * n - 1 - r])) for r in range(n)], block)

    @staticmethod
    def striped(T: int, n: int, block: int = 1) -> SequenceLayout:
        """Rank r holds the blocks r, r + n, r + 2n, ... of `block` neighbouring positions each."""
        _check_sizes(T, n, block)
        everyone = torch.arange(T)
        owner = everyone.div(block, rounding_mode="floor") % n
        return SequenceLayout("striped", T, [everyone[owner == r] for r in range(n)], block)

    @staticmethod
    def of_lengths(lengths: Sequence[int]) -> SequenceLayout:
        """Rank r holds the r-th of n neighbouring pieces, `lengths[r]` tokens long: contiguous shares of any lengths."""
        everyone = torch.arange(sum(lengths))
        return SequenceLayout("of_lengths", sum(lengths), everyone.split(list(lengths)))

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
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens of each rank; may differ, may be 0."""
        return tuple(p.numel() for p in self._shares)

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
        if self.kind == "of_lengths":
            return self.kind, self.sizes
        if self.kind != "of":
            return self.kind, self.T, self.n, self.block
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
