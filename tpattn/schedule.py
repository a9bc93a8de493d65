"""Which tiles one attention call computes on each rank and which rows and keys it sends, from layout x mask x grid alone.

A `Schedule` is a value without processes: everything about who sends what to whom is computed from it, so it can be tested for 64
ranks. The engine in `attention` only follows it. Letters: c is a rank that computes, s a rank that owns tokens, both ranks of the
cp group; a *part* is one mask of the batch (one for all sequences, or one for each); a row range is (start, stop) in the owner's
local order. Local positions are ascending here (the engine sorts shares that are not).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from tpattn.errors import Unsupported
from tpattn.kernels import Tile
from tpattn.layout import AttentionGrid, SequenceLayout, split_sizes
from tpattn.masks import Mask

Ranges = tuple[tuple[int, int], ...]
EDGE = 128  # least keys of a rectangle inside a ragged block; rows of a block whose table is looked at
_BAND = 256  # keys; bands of more a row are cut into rectangles and edges, blocks of as many rows
_SHORT = 32  # runs of fewer rows are joined into ragged blocks of as many
FIXED = 256  # rows of one call under `fixed`, whole blocks of global positions
ALL = -1  # stands for all ranks' keys joined in one block, ascending
_TABLE_KEYS = 2048  # most keys of one tile whose table is looked at


@dataclass(frozen=True)
class Spec:
    """What a schedule depends on. q and kv layouts are over the same ranks; positions of both count in one sequence.

    mask        its structure alone (`Mask.structure()`): a dense table changes no traffic
    has_table   whether tiles must look at such a table
    reads       for each query head the key-value head that it reads, ascending; empty = i // (num_heads // num_kv_heads)
    """

    q_layout: SequenceLayout
    kv_layout: SequenceLayout
    mask: Mask
    has_table: bool
    grid: AttentionGrid
    num_heads: int
    num_kv_heads: int
    transport: str = "exchange"
    fixed: bool = False  # deterministic: the same calls for the same rows, however tokens are divided
    reads: tuple[int, ...] = ()


@lru_cache(maxsize=128)
def schedule(spec: Spec) -> Schedule:
    """The schedule of a spec; equal specs share one, so a training loop plans each layout and mask once."""
    return Schedule(spec)


@lru_cache(maxsize=512)
def _ascending(layout: SequenceLayout, s: int) -> Tensor:
    """Positions of rank s's tokens, ascending."""
    return layout.positions(s).sort().values


@lru_cache(maxsize=512)
def _limits(mask: Mask, layout: SequenceLayout, s: int, S: int) -> tuple[Tensor, Tensor]:
    """lo, hi [parts, i, t] of the rows of rank s, ascending; the same in every grid."""
    lo, hi = mask.intervals(_ascending(layout, s), S)
    return lo.contiguous(), hi.contiguous()


@lru_cache(maxsize=512)
def _read_by(mask: Mask, layout: SequenceLayout, members: tuple[int, ...], S: int) -> list[tuple[Tensor, Tensor]]:
    """For each part: the key positions that any row of these ranks reads, as disjoint ascending intervals."""
    limits = [_limits(mask, layout, s, S) for s in members]
    lo, hi = (torch.cat([pair[i].flatten(1) for pair in limits], dim=1) for i in range(2))
    return [_union(*part) for part in zip(lo, hi, strict=True)]


@lru_cache(maxsize=512)
def _readers(
    mask: Mask, layout: SequenceLayout, kv_layout: SequenceLayout, owners: tuple[int, ...], fixed: bool
) -> list[tuple[list[Ranges], int]]:
    """For each rank: its rows that read keys of these owners, by part, and how many pairs that are."""
    theirs = torch.zeros(kv_layout.T + 1, dtype=torch.int64)
    for s in owners:
        theirs[_ascending(kv_layout, s) + 1] = 1
    before = theirs.cumsum(0)  # how many of these keys lie before each position
    found = []
    for s in range(layout.n):
        lo, hi = _limits(mask, layout, s, kv_layout.T)
        pairs = before[hi] - before[lo]  # [parts, i, t]
        rows = []
        for some in (pairs > 0).any(1):
            if fixed:  # whole blocks travel, or the same rows would meet other numbers of rows in a call
                block = _ascending(layout, s) // FIXED
                some = torch.isin(block, block[some])
            edges = torch.nn.functional.pad(some.to(torch.int8), (1, 1)).diff()
            starts, stops = (torch.nonzero(edges == sign).flatten().tolist() for sign in (1, -1))
            rows.append(tuple(zip(starts, stops, strict=True)))
        found.append((rows, int(pairs.sum())))
    return found


class Schedule:
    """Who computes what and who sends what, for every rank of the cp group."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.n = spec, spec.q_layout.n
        self.q_positions = [_ascending(spec.q_layout, s) for s in range(self.n)]
        self.k_positions = [_ascending(spec.kv_layout, s) for s in range(self.n)]
        self.coordinates = [spec.grid.coordinates(c) for c in range(self.n)]
        self._heads = _bounds(split_sizes(spec.num_heads, spec.grid.ulysses))
        self._reads = spec.reads or tuple(i * spec.num_kv_heads // spec.num_heads for i in range(spec.num_heads))
        self._cache: dict[tuple[object, ...], Any] = {}

    # ---- heads ----------------------------------------------------------------------------------------------------------

    def heads(self, c: int) -> slice:
        """Query heads that rank c computes."""
        return slice(*self._heads[self.coordinates[c][0]])

    def num_heads(self, c: int) -> int:
        """Number of query heads that rank c computes."""
        return self.heads(c).stop - self.heads(c).start

    def kv_heads(self, c: int) -> slice:
        """Key-value heads that rank c's query heads read."""
        heads = self.heads(c)
        return slice(0, 0) if heads.start == heads.stop else slice(self._reads[heads.start], self._reads[heads.stop - 1] + 1)

    def num_kv_heads(self, c: int) -> int:
        """Number of key-value heads that rank c reads."""
        return self.kv_heads(c).stop - self.kv_heads(c).start

    def head_groups(self, c: int) -> list[tuple[slice, slice]]:
        """Rank c's heads as (query heads, key-value heads) with a whole ratio each, counted from its first.

        At most three for the usual groups: the end of one, whole ones, the beginning of one.
        """
        heads, first = self.heads(c), self.kv_heads(c).start
        reads = [kv - first for kv in self._reads[heads]]
        groups: list[tuple[slice, slice]] = []
        for kv in dict.fromkeys(reads):
            start, n = reads.index(kv), reads.count(kv)
            if groups:
                queries, keys = groups[-1]
                if keys.stop == kv and queries.stop - queries.start == n * (keys.stop - keys.start):
                    groups[-1] = slice(queries.start, start + n), slice(keys.start, kv + 1)
                    continue
            groups.append((slice(start, start + n), slice(kv, kv + 1)))
        return groups

    # ---- the mask at this layout ----------------------------------------------------------------------------------------

    def _intervals(self, s: int) -> tuple[Tensor, Tensor]:
        """lo, hi [parts, i, t] of rank s's rows."""
        return _limits(self.spec.mask, self.spec.q_layout, s, self.spec.kv_layout.T)

    @cached_property
    def parts(self) -> int:
        """Number of masks of the batch: 1, or one for each sequence."""
        return int(self._intervals(0)[0].shape[0])

    def _members(self, leg: int, coordinate: int) -> list[int]:
        def find() -> list[int]:
            return [c for c in range(self.n) if self.coordinates[c][leg] == coordinate]

        return self._once(("members", leg, coordinate), find)

    def columns(self, c: int) -> Tensor:
        """Global key positions of rank c's merge group, ascending: the columns of a dense table it needs."""
        m = self.coordinates[c][2]
        return self._once(("columns", m), lambda: torch.cat([self.k_positions[s] for s in self._members(2, m)]).sort().values)

    def _needed(self, part: int, r: int) -> tuple[Tensor, Tensor]:
        """The key positions that any row of ring coordinate r reads, as disjoint ascending intervals (starts, stops)."""

        def find() -> tuple[Tensor, Tensor]:
            spec = self.spec
            return _read_by(spec.mask, spec.q_layout, tuple(self._members(1, r)), spec.kv_layout.T)[part]

        return self._once(("needed", part, r), find)

    def _once(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    # ---- messages -------------------------------------------------------------------------------------------------------

    def rows(self, part: int, c: int, s: int) -> Ranges:
        """Ranges of rank s's rows that rank c computes (for its heads and keys); empty ones do not travel."""
        if self.coordinates[c][1] != self.coordinates[s][1] or not self.num_heads(c):
            return ()
        m = self.coordinates[c][2]  # ranks that differ in their heads alone need the same rows
        return self._reading(m)[s][0][part]

    def _reading(self, m: int) -> list[tuple[list[Ranges], int]]:
        """For each rank s: its rows that read keys of merge coordinate m, by part, and how many pairs that are."""

        def find() -> list[tuple[list[Ranges], int]]:
            spec = self.spec
            return _readers(spec.mask, spec.q_layout, spec.kv_layout, tuple(self._members(2, m)), spec.fixed)

        return self._once(("reading", m), find)

    def keys(self, part: int, c: int, s: int) -> Ranges:
        """Ranges of rank s's keys that rank c reads."""
        if self.coordinates[c][2] != self.coordinates[s][2] or not self.num_heads(c):
            return ()
        r = self.coordinates[c][1]
        return self._once(("keys", part, r, s), lambda: self._find_keys(part, r, s))

    def _find_keys(self, part: int, r: int, s: int) -> Ranges:
        return self._ranges_of(s, *self._needed(part, r))

    def _ranges_of(self, s: int, starts: Tensor, stops: Tensor) -> Ranges:
        """Ranges of rank s's keys whose positions lie in the intervals [starts, stops)."""
        starts, stops = torch.searchsorted(self.k_positions[s], starts), torch.searchsorted(self.k_positions[s], stops)
        return tuple(zip(*(x.tolist() for x in _union(starts, stops)), strict=True))

    # ---- how keys come ----------------------------------------------------------------------------------------------------

    @property
    def rotates(self) -> bool:
        """Whether key blocks pass around the ring instead of coming in the exchange."""
        return self.spec.transport == "rotate" and self.spec.grid.ring > 1

    def hops(self, c: int, s: int, direction: int | None = None) -> int:
        """Steps around the ring after which rank s's keys reach rank c; 0 = they come in the exchange."""
        if not self.rotates:
            return 0
        direction = self.direction if direction is None else direction
        return (self.coordinates[c][1] - self.coordinates[s][1]) * direction % self.spec.grid.ring

    def neighbour(self, c: int, by: int) -> int:
        """The rank `by` steps further around rank c's ring, in the direction of travel."""
        u, r, m = self.coordinates[c]
        grid = self.spec.grid
        return u + grid.ulysses * ((r + by * self.direction) % grid.ring + grid.ring * m)

    def sources(self, c: int, hops: int) -> list[int]:
        """The other ranks whose keys reach rank c after so many steps, ascending."""
        same = self._members(2, self.coordinates[c][2])
        return [s for s in same if s != c and self.hops(c, s) == hops]

    @cached_property
    def direction(self) -> int:
        """+1 or -1: the way around the ring in which the mask lets fewer keys travel."""

        def travel(direction: int) -> int:
            return sum(count(self._held(p, c, s, direction)) for p, c, s in self._pairs())

        return 1 if travel(1) <= travel(-1) else -1

    def held(self, part: int, c: int, s: int) -> Ranges:
        """Ranges of rank s's keys that come to rank c: those it reads and, when blocks rotate, those it passes on."""
        return self._once(("held", part, c, s), lambda: self._held(part, c, s, self.direction if self.rotates else 0))

    def _held(self, part: int, c: int, s: int, direction: int) -> Ranges:
        if not self.rotates:
            return self.keys(part, c, s)
        if self.coordinates[c][2] != self.coordinates[s][2] or not self.num_heads(c):
            return ()
        ring, mine = self.spec.grid.ring, self.coordinates[c][1]
        visits = ring - self.hops(c, s, direction)  # rank c itself and everyone behind it
        needed = [self._needed(part, (mine + direction * j) % ring) for j in range(visits)]
        return self._ranges_of(s, *_union(torch.cat([n[0] for n in needed]), torch.cat([n[1] for n in needed])))

    @cached_property
    def inputs_travel(self) -> bool:
        """Whether any rank gets rows or keys in the exchange of inputs: if not, it is not called, on any rank."""
        return any(self.rows(p, c, s) or (not self.hops(c, s) and self.held(p, c, s)) for p, c, s in self._pairs())

    @cached_property
    def rows_travel(self) -> bool:
        """Whether any rank computes another's rows: if not, no partial outputs and no upstream gradients are exchanged."""
        return any(self.rows(p, c, s) for p, c, s in self._pairs())

    def _pairs(self) -> list[tuple[int, int, int]]:
        return [(p, c, s) for p in range(self.parts) for c in range(self.n) for s in range(self.n) if c != s]

    @cached_property
    def several_dq(self) -> bool:
        """Whether a query row's gradient is a sum over ranks (then it travels in float32)."""
        return self.spec.grid.merge > 1

    @cached_property
    def several_dkv(self) -> bool:
        """Whether a key's gradient is a sum over ranks: rows of several ring coordinates, or a key head read by two ranks."""
        grid = self.spec.grid
        reads = sum(self.num_kv_heads(c) for c in range(grid.ulysses))  # ranks 0..ulysses-1 are the ulysses coordinates
        return grid.ring > 1 or reads > self.spec.num_kv_heads

    # ---- tiles ----------------------------------------------------------------------------------------------------------

    def tiles(self, part: int, c: int, a: int, b: int) -> list[Tile]:
        """Tiles of rank c for the rows of rank a and the keys of rank b.

        Rows and keys are numbered as rank c holds them: all local ones of its own, the ranges that travel of others.
        """
        return self._once(("tiles", part, c, a, b), lambda: self._find_tiles(part, c, a, b))

    @staticmethod
    def _indices(ranges: Ranges, own: bool, positions: Tensor) -> Tensor:
        if own:
            return torch.arange(positions.numel())
        return torch.cat([torch.arange(*r) for r in ranges]) if ranges else torch.empty(0, dtype=torch.int64)

    @cached_property
    def whole_blocks(self) -> bool:
        """Whether every block of FIXED neighbouring rows lies on one rank, as `fixed` needs."""
        blocks = [torch.unique(p // FIXED) for p in self.q_positions]
        return sum(b.numel() for b in blocks) == -(-self.spec.q_layout.T // FIXED)

    def early(self, c: int) -> list[int]:
        """Key sources that are here from the start."""
        return [] if self.spec.fixed else [c]

    def later(self, c: int) -> list[int]:
        """Key sources that are here after the exchange of inputs."""
        return [ALL] if self.spec.fixed else self.sources(c, 0)

    def joined(self, part: int, c: int) -> tuple[list[int], Tensor]:
        """The ranks whose keys rank c holds, and the order that sorts their keys, end to end, by position."""

        def find() -> tuple[list[int], Tensor]:
            sources = sorted([c, *(s for s in self.sources(c, 0) if self.held(part, c, s))])
            return sources, torch.cat([self.key_positions(part, c, s) for s in sources]).argsort()

        return self._once(("joined", part, c), find)

    def row_positions(self, part: int, c: int, a: int) -> Tensor:
        """Global positions of rank a's rows as rank c holds them: [T]."""
        return self.q_positions[a][self._indices(self.rows(part, c, a), a == c, self.q_positions[a])]

    def key_positions(self, part: int, c: int, b: int) -> Tensor:
        """Global positions of rank b's keys as rank c holds them: [S]."""
        if b == ALL:
            sources, order = self.joined(part, c)
            return torch.cat([self.key_positions(part, c, s) for s in sources])[order]
        return self.k_positions[b][self._indices(self.held(part, c, b), b == c, self.k_positions[b])]

    def _find_tiles(self, part: int, c: int, a: int, b: int) -> list[Tile]:
        rows = self.rows(part, c, a)
        if not rows or (b != ALL and not self.keys(part, c, b)):
            return []
        row_index = self._indices(rows, a == c, self.q_positions[a])
        key_positions = self.key_positions(part, c, b)
        lo, hi = (x[part][:, row_index] for x in self._intervals(a))
        tiles: list[Tile] = []
        for i in range(lo.shape[0]):
            if self.spec.fixed:  # found by global positions: keys that nobody reads are not held everywhere
                for tile in fixed_tiles(lo[i], hi[i], self.q_positions[a][row_index] // FIXED, self.spec.has_table):
                    tiles.append(replace(tile, key=int(torch.searchsorted(key_positions, tile.key))))
                continue
            first, last = torch.searchsorted(key_positions, lo[i]), torch.searchsorted(key_positions, hi[i])
            tiles += table_tiles(first, last) if self.spec.has_table else find_tiles(first, last)
        return tiles

    def work(self, c: int) -> int:
        """(query, key) pairs times heads that rank c computes, as the mask allows them (a dense table aside)."""
        _, r, m = self.coordinates[c]
        return sum(self._reading(m)[s][1] for s in self._members(1, r)) * self.num_heads(c)

    # ---- bytes ----------------------------------------------------------------------------------------------------------

    def received(
        self, c: int, D: int, Dv: int, itemsize: int, batch: int = 1, lse: bool = False, table: tuple[int, int] = (1, 1)
    ) -> dict[str, int]:
        """Bytes that rank c receives in each exchange: forward in, forward out, backward in, backward out.

        Predicts the ledger to the byte. `batch` is the whole batch; lse: return_lse was asked for; table: sequences and heads of
        the dense table, whose rows travel with the queries.
        """
        merge = self.spec.grid.merge > 1
        wide = max(itemsize, 4)
        sums = {"forward in": 0, "forward out": 0, "backward in": 0, "backward out": 0}
        h, k = self.num_heads(c), self.num_kv_heads(c)
        _, r, m = self.coordinates[c]
        for part in range(self.parts):
            b = batch if self.parts == 1 else 1
            for s in self._members(1, r):  # rows travel among these, keys among those below
                if s != c:
                    rows_in, rows_out = count(self.rows(part, c, s)), self.num_heads(s) * count(self.rows(part, s, c))
                    sums["forward in"] += b * itemsize * h * D * rows_in
                    if self.spec.has_table:
                        copies = min(b, table[0]) * (h if table[1] > 1 else 1)
                        sums["forward in"] += rows_in * copies * self.columns(c).numel()
                    sums["forward out"] += b * rows_out * (Dv * (wide if merge else itemsize) + wide * (merge or lse))
                    sums["backward in"] += b * h * rows_in * (Dv * itemsize + 2 * wide * merge)
                    sums["backward out"] += b * rows_out * D * (wide if self.several_dq else itemsize)
            for s in self._members(2, m):
                if s != c:
                    keys_in = b * k * (D + Dv) * count(self.held(part, c, s))
                    sums["forward in"] += itemsize * keys_in
                    if self.hops(c, s):  # keys come again, then the sums of those who had them before
                        sums["backward in"] += itemsize * keys_in
                        sums["backward out"] += wide * keys_in * (self.hops(c, s) > 1)
                    else:
                        keys_out = b * self.num_kv_heads(s) * (D + Dv) * count(self.held(part, s, c))
                        sums["backward out"] += keys_out * (wide if self.several_dkv else itemsize)
            if self.rotates:  # what leaves the ring comes home once: all that the first visitor held
                home = sum(count(self.held(part, self.neighbour(c, 1), s)) for s in [*self.sources(c, 0), c])
                sums["backward out"] += b * wide * k * (D + Dv) * home
        return sums


# ---- tiles from limits -----------------------------------------------------------------------------------------------------


def find_tiles(lo: Tensor, hi: Tensor) -> list[Tile]:
    """Tiles that cover exactly the pairs lo[row] <= key < hi[row]; lo, hi int64 [rows].

    Rows are cut into runs in which lo and hi both step by 0 or 1: (0, 0) is a rectangle, (0, 1) a rectangle and a causal square,
    (1, 0) a flipped one, (1, 1) a band: per block of rows a rectangle, with flipped and causal squares along its edges, when it
    is wide. Narrow bands are ragged blocks, short runs are joined into such.
    """
    tiles: list[Tile] = []
    waiting: list[int] = []  # [first, stop) rows of short runs that wait for a ragged block

    def flush() -> None:
        if waiting:
            for start in range(waiting[0], waiting[1], _SHORT):
                tiles.extend(_ragged(lo, hi, start, min(_SHORT, waiting[1] - start)))
            waiting.clear()

    for row, rows, step_lo, step_hi in _runs(lo, hi):
        if rows < _SHORT:
            if waiting and waiting[1] != row:
                flush()
            waiting[:] = [waiting[0] if waiting else row, row + rows]
            continue
        flush()
        tiles.extend(_run_tiles(int(lo[row]), int(hi[row]), row, rows, step_lo, step_hi))
    flush()
    return [t for t in tiles if t.rows and t.keys]


def _runs(lo: Tensor, hi: Tensor) -> list[tuple[int, int, int, int]]:
    """Runs of rows that read something: (row, rows, step of lo, step of hi); rows with other steps are runs of one."""
    if lo.numel() == 0:
        return []
    some = hi > lo
    d_lo, d_hi = lo.diff(), hi.diff()
    regular = (d_lo >= 0) & (d_lo <= 1) & (d_hi >= 0) & (d_hi <= 1) & some[1:] & some[:-1]
    code = torch.where(regular, 2 * d_lo + d_hi, -1)
    runs, free, pair = [], 0, 0  # free: first row not yet in a run
    values, counts = torch.unique_consecutive(code, return_counts=True)
    some_rows = some.tolist()
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        last = pair + count  # pairs pair..last-1 join rows pair..last
        if value >= 0:
            if free < last:
                runs.append((free, last - free + 1, value // 2, value % 2))
                free = last + 1
        else:
            runs += [(row, 1, 0, 0) for row in range(free, last) if some_rows[row]]
            free = max(free, last)
        pair = last
    runs += [(row, 1, 0, 0) for row in range(free, lo.numel()) if some_rows[row]]
    return runs


def _run_tiles(lo: int, hi: int, row: int, rows: int, step_lo: int, step_hi: int) -> list[Tile]:
    """Tiles of one run whose first row reads [lo, hi)."""
    if (step_lo, step_hi) == (0, 0):
        return [Tile("full", row, rows, lo, hi - lo)]
    if (step_lo, step_hi) == (0, 1):
        return [Tile("full", row, rows, lo, hi - 1 - lo), Tile("causal", row, rows, hi - 1, rows)]
    if (step_lo, step_hi) == (1, 0):
        return [Tile("flipped", row, rows, lo, rows), Tile("full", row, rows, lo + rows, hi - lo - rows)]
    width = hi - lo
    side = _BAND if width > _BAND else _SHORT
    blocks = [(start, min(side, rows - start)) for start in range(0, rows, side)]
    if width > _BAND:
        inner = [Tile("full", row + at, here, lo + at + here, width - 1 - here) for at, here in blocks]
        edges = Tile("flipped", row, rows, lo, rows, side=side), Tile("causal", row, rows, hi - 1, rows, side=side)
        return [*inner, *edges]
    steps = torch.arange(min(side, rows))
    return [Tile("ragged", row + at, n, lo + at, n + width - 1, steps[:n], steps[:n] + width) for at, n in blocks]


def _ragged(lo: Tensor, hi: Tensor, row: int, rows: int) -> list[Tile]:
    """One block of rows with any limits: what all rows read as a rectangle when it is large, the edges as ragged tiles."""
    lo, hi = lo[row : row + rows], hi[row : row + rows]
    some = hi > lo
    if not bool(some.any()):
        return []
    inside_lo, inside_hi = int(lo.max()), int(hi.min())
    if rows == 1:
        return [Tile("full", row, 1, int(lo[0]), int(hi[0] - lo[0]))]
    pieces = [(int(lo[some].min()), int(hi[some].max()))]
    tiles = []
    if bool(some.all()) and inside_hi - inside_lo >= EDGE:
        tiles.append(Tile("full", row, rows, inside_lo, inside_hi - inside_lo))
        pieces = [(pieces[0][0], inside_lo), (inside_hi, pieces[0][1])]
    for start, stop in pieces:
        if stop > start:
            first = (lo - start).clamp(0, stop - start)
            last = torch.maximum((hi - start).clamp(0, stop - start), first)
            tiles.append(Tile("ragged", row, rows, start, stop - start, first, last))
    return tiles


def fixed_tiles(lo: Tensor, hi: Tensor, block: Tensor, table: bool) -> list[Tile]:
    """Tiles that depend on the limits of whole row blocks alone; lo, hi, block int64 [rows].

    Each block of rows is computed run by run of the keys that any of its rows reads: left edge, what all rows read, right edge.
    """
    tiles = []
    for b in torch.unique_consecutive(block).tolist():
        row = int(torch.nonzero(block == b)[0])
        rows = int((block == b).sum())
        first, last = lo[row : row + rows], hi[row : row + rows]
        for start, stop in zip(*(x.tolist() for x in _union(first, last)), strict=True):
            left = first.clamp(start, stop) - start
            right = torch.maximum(last.clamp(start, stop) - start, left)
            inner, outer = int(left.max()), int(right.min())
            cuts = [0, inner, outer, stop - start] if outer > inner and not table else [0, stop - start]
            for a, e in zip(cuts[:-1], cuts[1:], strict=True):
                lo_here = left.clamp(a, e) - a
                hi_here = torch.maximum(right.clamp(a, e) - a, lo_here)
                if e > a and not table and bool((lo_here == 0).all() and (hi_here == e - a).all()):
                    tiles.append(Tile("full", row, rows, start + a, e - a))
                elif e > a:
                    tiles.append(Tile("ragged", row, rows, start + a, e - a, lo_here, hi_here, table))
    return tiles


def table_tiles(lo: Tensor, hi: Tensor) -> list[Tile]:
    """Tiles in which a dense table decides: blocks of rows and keys, each with the limits of the structured part."""
    tiles = []
    for row in range(0, lo.numel(), EDGE):
        first, last = lo[row : row + EDGE], hi[row : row + EDGE]
        some = last > first
        if not bool(some.any()):
            continue
        start, stop = int(first[some].min()), int(last[some].max())
        for key in range(start, stop, _TABLE_KEYS):
            keys = min(_TABLE_KEYS, stop - key)
            left = (first - key).clamp(0, keys)
            right = torch.maximum((last - key).clamp(0, keys), left)
            tiles.append(Tile("ragged", row, first.numel(), key, keys, left, right, table=True))
    return tiles


def _union(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Intervals joined where they touch or overlap: ascending, disjoint, none empty."""
    keep = hi > lo
    lo, order = lo[keep].sort()
    hi = hi[keep][order].cummax(0).values if lo.numel() else lo
    if not lo.numel():
        return lo, lo
    begins = torch.ones_like(lo, dtype=torch.bool)
    begins[1:] = lo[1:] > hi[:-1]
    ends = torch.ones_like(begins)
    ends[:-1] = begins[1:]
    return lo[begins], hi[ends]


def inside(outer: Ranges | None, inner: Ranges) -> Ranges:
    """`inner` numbered as the rows of `outer` lie end to end; every inner row lies in an outer range. None = all rows."""
    if outer is None:
        return inner
    found, place, edges = [], 0, iter(inner)
    current = next(edges, None)
    for start, stop in outer:
        while current is not None and current[1] <= stop and current[0] >= start:
            found.append((current[0] - start + place, current[1] - start + place))
            current = next(edges, None)
        place += stop - start
    assert current is None, "an inner range lies outside"
    return tuple(found)


def minus(outer: Ranges, inner: Ranges) -> Ranges:
    """The rows of `outer` that are not in `inner`; both ascending, every inner range inside an outer one."""
    left = []
    for start, stop in outer:
        for a, b in inner:
            if start <= a and b <= stop:
                if a > start:
                    left.append((start, a))
                start = b
        if stop > start:
            left.append((start, stop))
    return tuple(left)


def count(ranges: Ranges) -> int:
    """Number of rows in the ranges."""
    return sum(stop - start for start, stop in ranges)


def _bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    return list(zip(edges[:-1], edges[1:], strict=True))


# ---- choosing a grid -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """One grid as `choose_grid` sees it.

    unevenness  most work of a rank as a multiple of the mean
    bytes       that the rank with the most receives, forward and backward, for one sequence
    messages    collectives of one call, forward and backward
    """

    grid: AttentionGrid
    unevenness: float
    bytes: int
    messages: int

    def cost(self) -> tuple[int, int, int, int]:
        """What decides among grids of even work: bytes, then messages, then the legs that hold more in memory."""
        return self.bytes, self.messages, self.grid.merge, self.grid.ring


@dataclass(frozen=True)
class Choice:
    """Every grid of a problem, and the one taken."""

    candidates: tuple[Candidate, ...]

    @property
    def grid(self) -> AttentionGrid:
        """The grid that sends least among those within 5 % of the best balance of work."""
        return self._taken().grid

    def _limit(self) -> float:
        return 1.05 * min(c.unevenness for c in self.candidates)

    def _taken(self) -> Candidate:
        return min((c for c in self.candidates if c.unevenness <= self._limit()), key=Candidate.cost)

    def explain(self) -> str:
        """Why: a line for each grid, best first, with what it would send and how even its work would be."""
        taken, limit = self._taken(), self._limit()
        head = f"{'ulysses x ring x merge':<24}{'work, max / mean':>18}{'MiB received':>14}{'messages':>10}"
        lines = [head]
        for c in sorted(self.candidates, key=lambda c: (c.unevenness > limit, c.cost())):
            name = f"{c.grid.ulysses} x {c.grid.ring} x {c.grid.merge}"
            why = "taken" if c is taken else "work too uneven" if c.unevenness > limit else ""
            lines.append(f"{name:<24}{c.unevenness:>18.3f}{c.bytes / 2**20:>14.2f}{c.messages:>10}  {why}".rstrip())
        lines.append(f"least bytes among grids within 5 % of the best balance ({limit / 1.05:.3f}); the largest rank counts")
        return "\n".join(lines)


@lru_cache(maxsize=256)
def choose_grid(spec: Spec, D: int, Dv: int, itemsize: int) -> Choice:
    """Every factorisation of the ranks with its work, bytes and messages; `.grid` is the one that "auto" takes.

    spec        everything but the grid, which is not looked at; under `fixed` only grids without merge count, and to rotate only
                those with a ring
    """
    n, found = spec.q_layout.n, []
    for grid in AttentionGrid.all_of(n):
        if (spec.fixed and grid.merge > 1) or (spec.transport == "rotate" and grid.ring == 1 < n):
            continue
        plan = schedule(replace(spec, grid=grid))
        work = [plan.work(c) for c in range(n)]
        bytes_ = max(sum(plan.received(c, D, Dv, itemsize).values()) for c in range(n))
        messages = 2 * plan.inputs_travel + 2 * plan.rows_travel + (4 * grid.ring - 5 if plan.rotates else 0)
        found.append(Candidate(grid, max(work) * n / max(1, sum(work)), bytes_, messages))
    return Choice(tuple(found))


def _choose(
    layout: SequenceLayout,
    mask: Mask,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    kv_layout: SequenceLayout | None = None,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    transport: str = "exchange",
) -> Choice:
    """What grid="auto" would take for these layouts, mask, heads and dtype, with `.explain()` to say why."""
    if not isinstance(layout, SequenceLayout) or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise Unsupported(
            "AttentionGrid.choose needs a SequenceLayout and key heads that divide the query heads, got "
            f"{layout!r}, num_heads={num_heads}, num_kv_heads={num_kv_heads}"
        )
    kv_layout, grid, has_table = kv_layout or layout, AttentionGrid(), mask.has_table
    spec = Spec(layout, kv_layout, mask.structure(), has_table, grid, num_heads, num_kv_heads, transport)
    return choose_grid(spec, head_dim, head_dim if value_dim is None else value_dim, dtype.itemsize)


AttentionGrid.choose = staticmethod(_choose)  # declared there, made here: choosing needs masks, work and bytes


def given_grid(grid: AttentionGrid | str, n: int) -> AttentionGrid | None:
    """`grid` for n ranks as far as it is known before any layout: None when "auto" is to be chosen.

    raises      Unsupported when the sizes do not multiply to n, or the word is another one
    """
    if isinstance(grid, AttentionGrid):
        return grid.resolve(n)
    if grid != "auto":
        raise Unsupported(f"grid={grid!r} must be an AttentionGrid(ulysses=, ring=, merge=) or the word auto")
    return AttentionGrid() if n == 1 else None


def resolve_grid(grid: AttentionGrid | str, spec: Spec, D: int, Dv: int, itemsize: int) -> AttentionGrid:
    """`grid` as an AttentionGrid of the ranks of a spec, whose own grid is not looked at; "auto" is chosen by `choose_grid`.

    raises      Unsupported when the sizes do not multiply to the number of ranks, or the word is another one
    """
    given = given_grid(grid, spec.q_layout.n)
    return choose_grid(spec, D, Dv, itemsize).grid if given is None else given
