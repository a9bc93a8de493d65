"""Which tiles one attention call computes on each rank and which rows and keys it sends, from layout x mask x grid alone.

A `Schedule` is a value without processes: everything about who sends what to whom is computed from it, so it can be tested for 64
ranks. The engine in `attention` only follows it. Letters: c is a rank that computes, s a rank that owns tokens, both ranks of the
cp group; a *part* is one mask of the batch (one for all sequences, or one for each); a row range is (start, stop) in the owner's
local order. Local positions are ascending here (the engine sorts shares that are not).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from tpattn.errors import Unsupported
from tpattn.kernels import Tile
from tpattn.layout import AttentionGrid, SequenceLayout, split_sizes
from tpattn.masks import Mask

Ranges = tuple[tuple[int, int], ...]
EDGE = 128  # side in tokens of the blocks in which rows with irregular limits are computed
_SHORT = 32  # runs of fewer rows are joined into such blocks
_TABLE_KEYS = 2048  # most keys of one tile whose table is looked at


@dataclass(frozen=True)
class Spec:
    """What a schedule depends on. q and kv layouts are over the same ranks; positions of both count in one sequence.

    mask        its structure alone (`Mask.structure()`): a dense table changes no traffic
    has_table   whether tiles must look at such a table
    """

    q_layout: SequenceLayout
    kv_layout: SequenceLayout
    mask: Mask
    has_table: bool
    grid: AttentionGrid
    num_heads: int
    num_kv_heads: int


@lru_cache(maxsize=128)
def schedule(spec: Spec) -> Schedule:
    """The schedule of a spec; equal specs share one, so a training loop plans each layout and mask once."""
    return Schedule(spec)


class Schedule:
    """Who computes what and who sends what, for every rank of the cp group."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.n = spec, spec.q_layout.n
        self.q_positions = [spec.q_layout.positions(s).sort().values for s in range(self.n)]
        self.k_positions = [spec.kv_layout.positions(s).sort().values for s in range(self.n)]
        self.coordinates = [spec.grid.coordinates(c) for c in range(self.n)]
        self._heads = _bounds(split_sizes(spec.num_heads, spec.grid.ulysses))
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
        heads, ratio = self.heads(c), self.spec.num_heads // self.spec.num_kv_heads
        return slice(0, 0) if heads.start == heads.stop else slice(heads.start // ratio, (heads.stop - 1) // ratio + 1)

    def num_kv_heads(self, c: int) -> int:
        """Number of key-value heads that rank c reads."""
        return self.kv_heads(c).stop - self.kv_heads(c).start

    def head_groups(self, c: int) -> list[tuple[slice, slice]]:
        """Rank c's heads as (query heads, key-value heads) with a whole ratio each, counted from its first: at most three."""
        heads, ratio = self.heads(c), self.spec.num_heads // self.spec.num_kv_heads
        first_kv = self.kv_heads(c).start
        groups, h = [], heads.start
        while h < heads.stop:
            whole = heads.stop - heads.stop % ratio
            if h % ratio == 0 and whole > h:
                stop = whole
            else:
                stop = min(heads.stop, h - h % ratio + ratio)
            groups.append(
                (slice(h - heads.start, stop - heads.start), slice(h // ratio - first_kv, (stop - 1) // ratio + 1 - first_kv))
            )
            h = stop
        return groups

    # ---- the mask at this layout ----------------------------------------------------------------------------------------

    def _intervals(self, s: int) -> tuple[Tensor, Tensor]:
        """lo, hi [parts, i, t] of rank s's rows."""

        def find() -> tuple[Tensor, ...]:
            return tuple(x.contiguous() for x in self.spec.mask.intervals(self.q_positions[s], self.spec.kv_layout.T))

        return self._once(("intervals", s), find)

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
            pairs = [self._intervals(s) for s in self._members(1, r)]
            lo = torch.cat([lo[part].flatten() for lo, _ in pairs])
            hi = torch.cat([hi[part].flatten() for _, hi in pairs])
            return _union(lo, hi)

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
        return self._once(("rows", part, m, s), lambda: self._find_rows(part, self.columns(c), s))

    def _find_rows(self, part: int, columns: Tensor, s: int) -> Ranges:
        lo, hi = (x[part] for x in self._intervals(s))
        some = (torch.searchsorted(columns, hi) > torch.searchsorted(columns, lo)).any(dim=0)
        edges = torch.nn.functional.pad(some.to(torch.int8), (1, 1)).diff()
        starts, stops = (torch.nonzero(edges == sign).flatten().tolist() for sign in (1, -1))
        return tuple(zip(starts, stops, strict=True))

    def keys(self, part: int, c: int, s: int) -> Ranges:
        """Ranges of rank s's keys that rank c reads."""
        if self.coordinates[c][2] != self.coordinates[s][2] or not self.num_heads(c):
            return ()
        r = self.coordinates[c][1]
        return self._once(("keys", part, r, s), lambda: self._find_keys(part, r, s))

    def _find_keys(self, part: int, r: int, s: int) -> Ranges:
        starts, stops = self._needed(part, r)
        starts, stops = torch.searchsorted(self.k_positions[s], starts), torch.searchsorted(self.k_positions[s], stops)
        return tuple(zip(*(x.tolist() for x in _union(starts, stops)), strict=True))

    @cached_property
    def inputs_travel(self) -> bool:
        """Whether any rank gets rows or keys from another: if not, the exchange of inputs is not called, on any rank."""
        return any(self.rows(p, c, s) or self.keys(p, c, s) for p, c, s in self._pairs())

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

    def _held(self, ranges: Ranges, own: bool, positions: Tensor) -> Tensor:
        if own:
            return torch.arange(positions.numel())
        return torch.cat([torch.arange(*r) for r in ranges]) if ranges else torch.empty(0, dtype=torch.int64)

    def _find_tiles(self, part: int, c: int, a: int, b: int) -> list[Tile]:
        rows, keys = self.rows(part, c, a), self.keys(part, c, b)
        if not rows or not keys:
            return []
        row_index = self._held(rows, a == c, self.q_positions[a])
        key_positions = self.k_positions[b][self._held(keys, b == c, self.k_positions[b])]
        lo, hi = (x[part][:, row_index] for x in self._intervals(a))
        tiles: list[Tile] = []
        for i in range(lo.shape[0]):
            first, last = torch.searchsorted(key_positions, lo[i]), torch.searchsorted(key_positions, hi[i])
            tiles += table_tiles(first, last) if self.spec.has_table else find_tiles(first, last)
        return tiles

    def work(self, c: int) -> int:
        """(query, key) pairs times heads that rank c computes, as the mask allows them (a dense table aside)."""
        total, columns = 0, self.columns(c)
        for s in self._members(1, self.coordinates[c][1]):
            lo, hi = self._intervals(s)
            total += int((torch.searchsorted(columns, hi) - torch.searchsorted(columns, lo)).sum())
        return total * self.num_heads(c)

    # ---- bytes ----------------------------------------------------------------------------------------------------------

    def received(self, c: int, D: int, Dv: int, itemsize: int, batch: int = 1, lse: bool = False) -> dict[str, int]:
        """Bytes that rank c receives in each exchange: forward in, forward out, backward in, backward out.

        Predicts the ledger to the byte for masks without a table. `batch` is the whole batch; lse: return_lse was asked for.
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
                    sums["forward out"] += b * rows_out * (Dv * (wide if merge else itemsize) + wide * (merge or lse))
                    sums["backward in"] += b * h * rows_in * (Dv * itemsize + 2 * wide * merge)
                    sums["backward out"] += b * rows_out * D * (wide if self.several_dq else itemsize)
            for s in self._members(2, m):
                if s != c:
                    keys_in, keys_out = count(self.keys(part, c, s)), self.num_kv_heads(s) * count(self.keys(part, s, c))
                    sums["forward in"] += b * itemsize * k * (D + Dv) * keys_in
                    sums["backward out"] += b * keys_out * (D + Dv) * (wide if self.several_dkv else itemsize)
        return sums


# ---- tiles from limits -----------------------------------------------------------------------------------------------------


def find_tiles(lo: Tensor, hi: Tensor) -> list[Tile]:
    """Tiles that cover exactly the pairs lo[row] <= key < hi[row]; lo, hi int64 [rows].

    Rows are cut into runs in which lo and hi both step by 0 or 1: (0, 0) is a rectangle, (0, 1) a rectangle and a causal square,
    (1, 0) a flipped one, (1, 1) a band: per block of rows a flipped square, a rectangle, a causal square. Short runs are joined
    into ragged blocks.
    """
    tiles: list[Tile] = []
    waiting: list[int] = []  # [first, stop) rows of short runs that wait for a ragged block

    def flush() -> None:
        if waiting:
            for start in range(waiting[0], waiting[1], EDGE):
                tiles.extend(_ragged(lo, hi, start, min(EDGE, waiting[1] - start)))
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
    width, tiles = hi - lo, []
    side = EDGE if width > EDGE else max(_SHORT, width)
    for start in range(0, rows, side):
        here, first = min(side, rows - start), lo + start
        if width > here:
            tiles += [
                Tile("flipped", row + start, here, first, here),
                Tile("full", row + start, here, first + here, width - 1 - here),
                Tile("causal", row + start, here, first + width - 1, here),
            ]
        else:
            steps = torch.arange(here)
            tiles.append(Tile("ragged", row + start, here, first, here + width - 1, steps, steps + width))
    return tiles


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


def count(ranges: Ranges) -> int:
    """Number of rows in the ranges."""
    return sum(stop - start for start, stop in ranges)


def _bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    return list(zip(edges[:-1], edges[1:], strict=True))


# ---- choosing a grid -------------------------------------------------------------------------------------------------------


def choose_grid(
    q_layout: SequenceLayout,
    kv_layout: SequenceLayout,
    mask: Mask,
    num_heads: int,
    num_kv_heads: int,
    D: int,
    Dv: int,
    itemsize: int,
) -> AttentionGrid:
    """The grid that sends least among those within 5 % of the best balance of work; fewer messages decide a tie.

    "Sends" is the largest rank's bytes received, forward and backward together.
    """
    return _choose_grid(q_layout, kv_layout, mask.structure(), num_heads, num_kv_heads, D, Dv, itemsize)


@lru_cache(maxsize=256)
def _choose_grid(
    q_layout: SequenceLayout,
    kv_layout: SequenceLayout,
    mask: Mask,
    num_heads: int,
    num_kv_heads: int,
    D: int,
    Dv: int,
    itemsize: int,
) -> AttentionGrid:
    n = q_layout.n
    found = []
    for grid in AttentionGrid.all_of(n):
        plan = schedule(Spec(q_layout, kv_layout, mask, False, grid, num_heads, num_kv_heads))
        work = [plan.work(c) for c in range(n)]
        balance = max(work) * n / max(1, sum(work))
        bytes_ = max(sum(plan.received(c, D, Dv, itemsize).values()) for c in range(n))
        messages = 2 * plan.inputs_travel + 2 * plan.rows_travel
        found.append((balance, bytes_, messages, grid.merge, grid.ring, grid))
    limit = 1.05 * min(f[0] for f in found)
    return min((f for f in found if f[0] <= limit), key=lambda f: f[1:5])[-1]


def given_grid(grid: AttentionGrid | str, n: int) -> AttentionGrid | None:
    """`grid` for n ranks as far as it is known before any layout: None when "auto" is to be chosen.

    raises      Unsupported when the sizes do not multiply to n, or the word is another one
    """
    if isinstance(grid, AttentionGrid):
        return grid.resolve(n)
    if grid != "auto":
        raise Unsupported(f"grid={grid!r} must be an AttentionGrid(ulysses=, ring=, merge=) or the word auto")
    return AttentionGrid() if n == 1 else None


def resolve_grid(
    grid: AttentionGrid | str,
    q_layout: SequenceLayout,
    kv_layout: SequenceLayout,
    mask: Mask,
    num_heads: int,
    num_kv_heads: int,
    D: int,
    Dv: int,
    itemsize: int,
) -> AttentionGrid:
    """`grid` as an AttentionGrid of the layout's ranks; "auto" is chosen by `choose_grid`.

    raises      Unsupported when the sizes do not multiply to the number of ranks, or the word is another one
    """
    if (given := given_grid(grid, q_layout.n)) is not None:
        return given
    return choose_grid(q_layout, kv_layout, mask, num_heads, num_kv_heads, D, Dv, itemsize)
