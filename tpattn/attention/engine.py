"""The one loop that runs every grid, layout and mask, forward and backward. It follows the schedule and knows no scheme by name.

Forward: rows and keys go in one exchange to every rank that uses them, own keys are computed while it travels, partial outputs go
straight back to the owners of the rows and are merged there. Backward is the mirror: upstream gradients go where the outputs came
from, gradients of others' rows and keys go home while own ones are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from tpattn import comm
from tpattn.errors import Unsupported
from tpattn.kernels import (
    NAMES,
    Accumulator,
    Backend,
    Change,
    Gradients,
    HeadByHead,
    Tile,
    Total,
    attend,
    attend_backward,
    choose,
    merge,
    stand_in,
    whole_vectors,
    wide_dtype,
)
from tpattn.layout import AttentionGrid, SequenceLayout
from tpattn.masks import Mask, full
from tpattn.random import RandomKey
from tpattn.schedule import ALL, FIXED, Ranges, Schedule, Spec, count, given_grid, inside, minus, resolve_grid, schedule

Blocks = dict[tuple[Any, ...], list[Tensor]]  # tensors in kernel order [b, heads, n, ..], by (part, rank)
RowTotals = dict[tuple[Any, ...], Total]  # the sums of dq, by (part, rank of the rows)
KeyTotals = dict[tuple[Any, ...], list[Total]]  # the sums [dk, dv], by (part, rank of the keys)


class SharesTokens(Protocol):
    """What this room needs of a context: a `ParallelContext`, or anything else with an axis `cp`."""

    @property
    def cp(self) -> comm.Group:
        """The ranks that share the tokens of a sequence."""


@comm.not_compiled
def sequence_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ctx: SharesTokens,
    mask: Mask | None = None,
    layout: SequenceLayout | None = None,
    kv_layout: SequenceLayout | None = None,
    grid: AttentionGrid | str = "auto",
    transport: str = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: tuple[float, RandomKey] | None = None,
    kv_heads: Sequence[int] | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    deterministic: bool = False,
    remat: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of this rank's queries over the keys of all ranks of `ctx.cp`.

    q           [B, t, H, D]    this rank's share of the tokens, all of its heads
    k, v        [B, s, K, D], [B, s, K, Dv]   K divides H: query head i reads key head i // (H // K), unless kv_heads says
    mask        which (query, key) pairs of global positions count; None = all. See `tpattn.masks`
    layout      which positions each rank holds; None = contiguous, the lengths agreed by one small all-gather
    kv_layout   the same for the keys; None = `layout`. With neither, keys that are on every rank as long as all queries together
                are taken for a whole that was not cut, and refused; whole keys of another length look like shares
    grid        how cp is factorised; "auto" keeps the work even, then sends least
    transport   exchange: keys come in one exact-size all-to-all, all at once; rotate: they pass around the ring in steps, each
                overlapped with the work on the one before, two blocks held at a time; with ring=1 nothing rotates, and
                grid="auto" then takes a grid with a ring. "auto" is exchange
    scale       multiplies q @ k; None = D ** -0.5
    softcap     c: a score s becomes c tanh(s / c), after the scale
    alibi_slopes  [H] (no gradient): -slope |i - j| is added to the score of global positions i and j, after scale and softcap
    sinks       [H] learnable logits of a key without value: they take their share of each row's weight. Their gradient is the
                part of this rank's rows; `finish_gradients` sums it
    dropout     (p, key): softmax weights are dropped by (key, sequence, head, positions) alone, the same on every grid
    kv_heads    the key head that each query head reads, ascending from 0 to K - 1, alike on every rank; None = the usual groups
    kernel      auto, or a name of `tpattn.kernels.available()`; softcap, ALiBi and dropout need math
    deterministic  out, lse and dq have the same bits on any number of ranks when the edges of the shares are multiples of 256
                (layouts take block=256): rows are computed in blocks of 256, head by head, each over the same calls. dk and dv
                too for contiguous shares of equally many blocks on a power of two of ranks, when no key head is read by two
    remat       keys and rows of others are fetched again in backward instead of kept
    returns     [B, t, H, Dv] in the dtype of q; with return_lse also lse [B, t, H] (float32; float64 for float64), no gradient.
                A row that may read no key gives 0, lse -inf and gradient 0
    raises      Unsupported, before anything is sent, for shapes, layouts, masks or options that do not fit (without a layout
                the lengths are agreed before a mask can be checked against them)
    compile     torch.compile breaks its graph here and calls this function as it stands
    autocast    q, k and v are computed with in the dtype they have, as `ParallelSelfAttention` casts them
    source      online softmax: Milakov and Gimelshein, arXiv:1805.02867; blockwise over ranks: Liu et al., arXiv:2310.01889
    """
    _check_tensors(q, k, v, kv_heads)
    check_options(grid, transport, kernel, scale, ctx.cp.size)
    if mask is not None and not isinstance(mask, Mask):
        raise Unsupported(
            f"mask must be a value of tpattn.masks, got {type(mask).__name__}; a bool tensor becomes masks.dense(x) (True = "
            "allowed), key padding masks.padding(valid); additive masks are not supported"
        )
    _check_changes(q, softcap, alibi_slopes, sinks, dropout)
    changes = softcap is not None or alibi_slopes is not None or (dropout is not None and dropout[0] > 0)
    backend = choose(kernel, q.device, q.dtype, changes, max(q.shape[3], v.shape[3]))
    if deterministic:
        backend = HeadByHead(backend)
    axis, mask = ctx.cp, full() if mask is None else mask
    if q.device.type == "meta" and axis.size > 1:
        raise Unsupported("q, k, v are on the meta device, where there is nothing to send to the other ranks of cp")
    axis.require_open()
    q_layout, kv_layout = _layouts(q, k, axis, layout, kv_layout)
    B, t, H, D = q.shape
    K, Dv = k.shape[2], v.shape[3]
    mask.check(B, H, t, kv_layout.T)
    way = "rotate" if transport == "rotate" else "exchange"
    reads = () if kv_heads is None else tuple(kv_heads)
    spec = Spec(
        q_layout, kv_layout, mask.structure(), mask.has_table, AttentionGrid(), H, K, way, deterministic, reads
    )  # its grid is chosen next
    found = resolve_grid(grid, spec, D, Dv, q.element_size())
    plan = schedule(replace(spec, grid=found))
    if deterministic and (plan.rotates or found.merge > 1 or not plan.whole_blocks):
        raise Unsupported(
            f"deterministic=True needs transport exchange, a grid with merge=1 and shares whose edges are multiples of {FIXED}, "
            f"got {transport}, {found} and {q_layout!r}; SequenceLayout.contiguous(T, n, block={FIXED}) has such, zigzag too"
        )
    q_order, k_order = _ascending(q_layout, axis.rank), _ascending(kv_layout, axis.rank)
    if q_order is not None:
        q = q.index_select(1, q_order)
    if k_order is not None:
        k, v = k.index_select(1, k_order), v.index_select(1, k_order)
    table = mask.table(q_layout.positions(axis.rank), kv_layout.T)
    if table is not None:
        table = table.to(q.device)
        table = table if q_order is None else table.index_select(2, q_order)
        if plan.rows_travel:
            _agree_tables(table, axis)
    scale = D**-0.5 if scale is None else float(scale)
    slopes = None if alibi_slopes is None else alibi_slopes.detach()
    run = _Run(plan, axis, backend, scale, return_lse, remat, table, softcap, slopes, dropout if changes else None)
    out, lse = _SequenceAttention.apply(q, k, v, sinks, run)
    if q_order is not None:
        back = q_order.argsort()
        out, lse = out.index_select(1, back), lse.index_select(1, back)
    return (out, lse) if return_lse else out


# ---- checks ----------------------------------------------------------------------------------------------------------------


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, kv_heads: Sequence[int] | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise Unsupported(f"{name} must be [B, tokens, heads, head_dim], got {got}")
        if hasattr(x, "to_local"):
            raise Unsupported(f"{name} is a {type(x).__name__}; pass the plain tensor of this rank, {name}.to_local()")
        if x.dtype != q.dtype or x.device != q.device:
            raise Unsupported(
                f"q, k, v must share dtype and device, got {q.dtype} {q.device} for q, {x.dtype} {x.device} for {name}; cast "
                f"them alike, {name}.to(q) (torch.autocast casts the output of a projection, not that of a norm)"
            )
    B, _, H, D = q.shape
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if k.shape[0] != B or k.shape[3] != D or v.shape[:3] != k.shape[:3]:
        raise Unsupported(f"needs q [B, t, H, D], k [B, s, K, D], v [B, s, K, Dv], got {shapes}")
    K = k.shape[2]
    if 0 in (H, D, K, v.shape[3]) or (kv_heads is None and H % K):
        raise Unsupported(
            f"the number of key heads must divide that of query heads, and no size but batch and tokens may be 0; got {shapes}"
        )
    if kv_heads is not None:
        given = list(kv_heads) if isinstance(kv_heads, Sequence) else kv_heads
        if not isinstance(given, list) or len(given) != H or sorted(given) != given or set(given) != set(range(K)):
            raise Unsupported(f"kv_heads must name one of {K} key heads for each of {H} query heads, ascending; got {given!r}")


def check_options(grid: AttentionGrid | str, transport: str, kernel: str, scale: float | None, n: int) -> None:
    """Raise Unsupported for options that no call on n ranks could honour, before any tensor is there."""
    if transport not in ("auto", "exchange", "rotate"):
        raise Unsupported(f"transport={transport!r} is not known; there are auto, exchange and rotate")
    if kernel not in ("auto", *NAMES):
        raise Unsupported(f"kernel={kernel!r} is not known; there are auto, {', '.join(NAMES)}")
    if scale is not None and not _finite(scale):
        raise Unsupported(f"scale={scale!r} must be a finite number, or None for head_dim ** -0.5")
    given_grid(grid, n)


def _finite(x: object) -> bool:
    """Whether x is a number, of numpy too, that a float can hold."""
    try:
        return isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(float(x))
    except OverflowError:
        return False


def _agree_tables(table: Tensor, axis: comm.Group) -> None:
    """Rows travel with their part of the table, so all ranks must hold it in one form; one small all-gather."""
    forms = [tuple(row) for row in comm.agree([table.shape[0], table.shape[1]], axis)]
    if len(set(forms)) > 1:
        raise Unsupported(
            f"the dense masks of the ranks of {axis.name} have other batch and head dimensions, {forms}; give every rank [t, S], "
            "[B, 1, t, S] or [B, H, t, S] alike"
        )


def _check_changes(
    q: Tensor, softcap: float | None, slopes: Tensor | None, sinks: Tensor | None, dropout: tuple[float, RandomKey] | None
) -> None:
    if softcap is not None and not (isinstance(softcap, (int, float)) and 0 < softcap < math.inf):
        raise Unsupported(f"softcap={softcap!r} must be a positive number, or None")
    for name, x in (("alibi_slopes", slopes), ("sinks", sinks)):
        if x is not None and (not isinstance(x, Tensor) or x.shape != (q.shape[2],) or not x.is_floating_point()):
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise Unsupported(f"{name} must be a float tensor [H] = [{q.shape[2]}], got {got}")
    if slopes is not None and slopes.requires_grad:
        raise Unsupported("alibi_slopes get no gradient, these require one; pass alibi_slopes.detach() if they are not learnt")
    if dropout is not None:
        p, key = dropout if isinstance(dropout, (tuple, list)) and len(dropout) == 2 else (dropout, None)
        if not isinstance(p, (int, float)) or not 0.0 <= p < 1.0 or not isinstance(key, RandomKey):
            raise Unsupported(f"dropout must be (p, RandomKey) with p in [0, 1), got ({p!r}, {type(key).__name__})")


def _layouts(
    q: Tensor, k: Tensor, axis: comm.Group, layout: SequenceLayout | None, kv_layout: SequenceLayout | None
) -> tuple[SequenceLayout, SequenceLayout]:
    """The layouts of queries and keys, checked against the shares; lengths are agreed where no layout is given."""
    for which, given in (("layout", layout), ("kv_layout", kv_layout)):
        if given is not None and not isinstance(given, SequenceLayout):
            raise Unsupported(f"{which} must be a SequenceLayout, or None for contiguous shares; got {type(given).__name__}")
        if given is not None and given.n != axis.size:
            raise Unsupported(f"{which} {given!r} is for {given.n} ranks but cp={axis.size}; make it with n={axis.size}")
    if layout is None and kv_layout is None:
        lengths = comm.agree([q.shape[1], k.shape[1]], axis)
        _check_cut(lengths)
        return (SequenceLayout.of_lengths([r[0] for r in lengths]), SequenceLayout.of_lengths([r[1] for r in lengths]))
    if layout is None:
        layout = SequenceLayout.of_lengths([r[0] for r in comm.agree([q.shape[1]], axis)])
    kv_layout = layout if kv_layout is None else kv_layout
    for name, x, wanted in (("q", q, layout), ("k", k, kv_layout)):
        which = "layout" if name == "q" else "kv_layout"
        need = wanted.sizes[axis.rank]
        if x.shape[1] != need:
            whole = f"; {x.shape[1]} is the whole sequence" if x.shape[1] == wanted.T else ""
            if x.shape[2] == need and not whole:
                raise Unsupported(
                    f"{name} {list(x.shape)} has {x.shape[1]} tokens of {x.shape[2]} heads, but {which} gives rank {axis.rank} "
                    f"of cp {need} tokens: it seems to be [B, heads, tokens, head_dim]; pass {name}.transpose(1, 2)"
                )
            raise Unsupported(
                f"{name} has {x.shape[1]} tokens, but {which} {wanted!r} gives rank {axis.rank} of cp {need} of {wanted.T}"
                f"{whole}; cut it with ctx.cp.shard({name}, layout, dim=1)"
                + ("" if name == "q" else ", or pass kv_layout= of its own")
            )
    return layout, kv_layout


def _check_cut(lengths: list[list[int]]) -> None:
    """Refuse keys that every rank holds as a whole: q was cut, k and v were forgotten. `lengths`: [t, s] of each rank.

    Only where lengths show it: as many keys on each rank as queries on all, more than any rank's.
    """
    queries, keys = [t for t, _ in lengths], {s for _, s in lengths}
    T, n = sum(queries), len(lengths)
    if n > 1 and max(queries) < T and keys == {T}:
        raise Unsupported(
            f"each of the {n} ranks of cp has {T} keys, as many as there are queries on all ranks together: k and v are whole "
            "where shares are due; cut them with ctx.cp.shard(k, layout, dim=1). If they are shares of "
            f"{n * T} keys, say so with kv_layout=SequenceLayout.contiguous({n * T}, {n})"
        )


def _ascending(layout: SequenceLayout, rank: int) -> Tensor | None:
    """The order that sorts this rank's tokens by position; None when they are sorted, as in every layout but some `of`."""
    return None if layout.ascending(rank) else layout.positions(rank).argsort()


# ---- one call --------------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """What one call needs beside its tensors."""

    plan: Schedule
    axis: comm.Group
    backend: Backend
    scale: float
    return_lse: bool
    remat: bool
    table: Tensor | None  # bool [b, h, t, S], the dense part of the mask for this rank's rows
    softcap: float | None
    slopes: Tensor | None
    dropout: tuple[float, RandomKey] | None

    @property
    def me(self) -> int:
        """This rank's place in the cp group."""
        return self.axis.rank

    @property
    def merges(self) -> bool:
        """Whether an output row is a sum over ranks; then outputs travel in float32 and with their lse."""
        return self.plan.spec.grid.merge > 1

    @property
    def others(self) -> list[int]:
        """The other ranks, ascending."""
        return [c for c in range(self.axis.size) if c != self.me]

    def parts(self, B: int) -> list[tuple[int, slice]]:
        """(part, the sequences of the batch it is for)."""
        return [(0, slice(0, B))] if self.plan.parts == 1 else [(p, slice(p, p + 1)) for p in range(B)]

    def change_at(self, part: int, seqs: slice, a: int, b: int) -> Change | None:
        """What happens to the scores of the rows held of rank a and the keys held of rank b; None = nothing."""
        if self.softcap is None and self.slopes is None and self.dropout is None:
            return None
        plan, me = self.plan, self.me
        p, key = self.dropout or (0.0, RandomKey(0))
        heads = plan.heads(me)
        return Change(
            self.softcap,
            None if self.slopes is None else self.slopes[heads],
            p,
            key.number(),
            plan.row_positions(part, me, a)[None],
            plan.key_positions(part, me, b)[None],
            torch.arange(seqs.start, seqs.stop) + key.first_sequence,
            torch.arange(heads.start, heads.stop) + key.first_head,
        ).to(self.axis.device)

    def own_table(self, seqs: slice, c: int) -> list[Tensor]:
        """The dense table of these sequences for the heads and columns of rank c; empty without one."""
        if self.table is None:
            return []
        seqs = seqs if self.table.shape[0] > 1 else slice(None)
        heads = self.plan.heads(c) if self.table.shape[1] > 1 else slice(None)
        columns = self.plan.columns(c)
        table = self.table[seqs, heads]
        return [table if columns.numel() == table.shape[-1] else table[..., columns.to(table.device)]]

    def table_at(self, rows: list[Tensor], part: int, b: int) -> Tensor | None:
        """The part of the rows' table at the keys that this rank holds of rank b."""
        if self.table is None:
            return None
        positions = self.plan.k_positions[b]
        if b != self.me:
            positions = self.plan.key_positions(part, self.me, b)
        return rows[1][..., torch.searchsorted(self.plan.columns(self.me), positions).to(rows[1].device)]


class _Mail:
    """One exchange being put together: what goes to each peer, and what comes from it under which key."""

    def __init__(self, axis: comm.Group, direction: str) -> None:
        self.axis, self.direction = axis, direction
        self.send: list[list[Tensor]] = [[] for _ in range(axis.size)]
        self.expected: list[list[tuple[Any, list[tuple[Sequence[int], torch.dtype]]]]] = [[] for _ in range(axis.size)]

    def post(self, peer: int, *tensors: Tensor) -> None:
        """Send these to `peer`."""
        self.send[peer] += tensors

    def expect(self, peer: int, key: Any, *shapes: tuple[Sequence[int], torch.dtype]) -> None:
        """Tensors of these shapes come from `peer` and are handed out under `key`."""
        self.expected[peer].append((key, list(shapes)))

    def start(self, called: bool) -> Callable[[], Blocks]:
        """Start the exchange, or nothing when the plan knows that no rank sends anything; wait() gives key -> tensors."""
        if not called:
            return dict
        receive = [[shape for _, shapes in peer for shape in shapes] for peer in self.expected]
        wait = comm.exchange(self.send, receive, self.axis, direction=self.direction)

        def arrived() -> Blocks:
            got = [iter(pieces) for pieces in wait()]
            return {key: [next(got[p]) for _ in shapes] for p, peer in enumerate(self.expected) for key, shapes in peer}

        return arrived


def _take(x: Tensor, ranges: Ranges) -> Tensor:
    """The rows (dimension 2) of `ranges`, end to end; a view when it is one range."""
    if len(ranges) == 1:
        return x[:, :, slice(*ranges[0])]
    return torch.cat([x[:, :, slice(*r)] for r in ranges], dim=2)


def _places(x: Tensor, ranges: Ranges, block: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each range of x (dimension 2) with its rows of `block`, which holds the ranges end to end."""
    pieces = block.split([stop - start for start, stop in ranges], dim=2)
    return [(x[:, :, slice(*r)], piece) for r, piece in zip(ranges, pieces, strict=True)]


def _fetch(run: _Run, q: Tensor, k: Tensor, v: Tensor, direction: str) -> Callable[[], tuple[Blocks, Blocks]]:
    """Start the exchange of inputs; wait() gives rows[(part, rank)] = [q] or [q, table] and keys[(part, rank)] = [k, v]."""
    plan, me, mail = run.plan, run.me, _Mail(run.axis, direction)
    h, h_kv = plan.num_heads(me), plan.num_kv_heads(me)
    for part, seqs in run.parts(q.shape[0]):
        b = seqs.stop - seqs.start
        for c in run.others:
            if rows := plan.rows(part, c, me):
                mail.post(c, _take(q[seqs, plan.heads(c)], rows), *(_take(x, rows) for x in run.own_table(seqs, c)))
            if (keys := plan.held(part, c, me)) and not plan.hops(c, me):
                mail.post(c, *(_take(x[seqs, plan.kv_heads(c)], keys) for x in (k, v)))
            if n := count(plan.rows(part, me, c)):
                tables = [((*x.shape[:2], n, x.shape[3]), x.dtype) for x in run.own_table(seqs, me)]
                mail.expect(c, ("rows", part, c), ((b, h, n, q.shape[3]), q.dtype), *tables)
            if (n := count(plan.held(part, me, c))) and not plan.hops(me, c):
                mail.expect(c, ("keys", part, c), *(((b, h_kv, n, x.shape[3]), x.dtype) for x in (k, v)))
    wait = mail.start(plan.inputs_travel)

    def arrived() -> tuple[Blocks, Blocks]:
        got = wait()
        rows, keys = ({key[1:]: x for key, x in got.items() if key[0] == kind} for kind in ("rows", "keys"))
        return rows, keys

    return arrived


def _own_blocks(run: _Run, q: Tensor, k: Tensor, v: Tensor) -> tuple[Blocks, Blocks]:
    """This rank's own rows and keys, the heads it computes, as views."""
    plan, me = run.plan, run.me
    parts = run.parts(q.shape[0])
    rows = {(part, me): [q[seqs, plan.heads(me)], *run.own_table(seqs, me)] for part, seqs in parts}
    keys = {(part, me): [k[seqs, plan.kv_heads(me)], v[seqs, plan.kv_heads(me)]] for part, seqs in parts}
    return rows, keys


class _Ring:
    """The key blocks that pass around the ring, and in backward the sums of their gradients behind them.

    After `hops` steps the blocks of the ranks `plan.sources(me, hops)` are here. The next step's messages are started before this
    one's work, so at most two blocks are held. A gradient starts at the first rank that a block visits, follows the block from
    visitor to visitor, and its rows go home from the last visitor that reads them. Between any two ranks all messages start in
    the same order at both ends: keys 1, keys 2, sums 1, keys 3, sums 2, ..., home.
    """

    def __init__(self, run: _Run, keys: Blocks, direction: str) -> None:
        self.run, self.direction, self.keys = run, direction, keys
        plan = run.plan
        self.steps = range(1, plan.spec.grid.ring) if plan.rotates else range(0)
        self.like = keys[0, run.me]
        B = sum(block[0].shape[0] for (_, s), block in keys.items() if s == run.me)
        self.parts = [(part, seqs.stop - seqs.start) for part, seqs in run.parts(B)]
        self.wide = wide_dtype(self.like[0].dtype)
        self.waits: dict[object, Callable[[], Blocks]] = {}
        if self.steps:  # which way around is best is not asked where nothing rotates
            self.next, self.before = (plan.neighbour(run.me, by) for by in (1, -1))
            self._send_keys(1)

    def _here(self, part: int, s: int) -> Ranges | None:
        """The ranges of rank s's keys as they lie here; None = all, they are this rank's own."""
        return None if s == self.run.me else self.run.plan.held(part, self.run.me, s)

    def _blocks(self, hops: int) -> list[tuple[int, int]]:
        """(part, rank) of the blocks that are here after so many steps; 0: those that this rank sends off."""
        own = [self.run.me] if hops == 0 else []
        return [(part, s) for part, _ in self.parts for s in sorted([*own, *self.run.plan.sources(self.run.me, hops)])]

    def _start(
        self, key: object, to: int, send: list[Tensor], source: int, expect: list[tuple[Any, Ranges]], dtype: torch.dtype
    ) -> None:
        """One message each way; `expect`: (key, ranges) of the pairs (k, v) or (dk, dv) that arrive."""
        b, shapes = dict(self.parts), []
        for (part, *_), ranges in expect:
            shapes += [((b[part], self.like[0].shape[1], count(ranges), x.shape[3]), dtype) for x in self.like]
        wait = comm.start_pass(send, to, shapes, source, self.run.axis, direction=self.direction, operation="rotate")

        def arrived() -> Blocks:
            got = iter(wait())
            return {key: [next(got), next(got)] for key, _ in expect}

        self.waits[key] = arrived

    def _send_keys(self, hops: int) -> None:
        """Start the messages after which the blocks of step `hops` are here: they come from the rank before, one step earlier."""
        plan, me, send = self.run.plan, self.run.me, []
        for part, s in self._blocks(hops - 1):
            if ranges := plan.held(part, self.next, s):
                send += [_take(x, inside(self._here(part, s), ranges)) for x in self.keys[part, s]]
        expect = [((part, s), ranges) for part, s in self._blocks(hops) if (ranges := plan.held(part, me, s))]
        self._start(("keys", hops), self.next, send, self.before, expect, self.like[0].dtype)

    def arrive(self, hops: int) -> Blocks:
        """The blocks of step `hops`, also put into `keys`; the messages of the next step are under way."""
        plan, me = self.run.plan, self.run.me
        blocks = self.waits.pop(("keys", hops))()
        self.keys.update(blocks)
        if self.direction == "backward" and hops > 1:  # sums of those who had these blocks before
            expect = [((part, s), ranges) for part, s in self._blocks(hops) if (ranges := plan.held(part, me, s))]
            self._start(("sums", hops), self.next, [], self.before, expect, self.wide)
        if hops + 1 < self.run.plan.spec.grid.ring:
            self._send_keys(hops + 1)
        return blocks

    def pass_on(self, hops: int, dkv: KeyTotals) -> None:
        """Add the sums that came with step `hops`; rows that others still read go on to them, the rest goes home."""
        plan, me, last = self.run.plan, self.run.me, hops == self.run.plan.spec.grid.ring - 1
        if hops > 1:
            for key, sums in self.waits.pop(("sums", hops))().items():
                for total, part_sum in zip(dkv[key], sums, strict=True):
                    total.add(part_sum)
        onward, home = [], []
        for part, s in self._blocks(hops):
            here = plan.held(part, me, s)
            further: Ranges = () if last else plan.held(part, self.next, s)
            if further:
                onward += [_take(x.value, inside(here, further)) for x in dkv[part, s]]
            if done := minus(here, further):
                home += [_take(x.value, inside(here, done)) for x in dkv[part, s]]
        if not last:
            self._start(("sent", hops), self.next, onward, self.before, [], self.wide)
        # The rank whose blocks these are, and the rank that now finishes the blocks of this one.
        to, source = plan.neighbour(me, -hops), plan.neighbour(me, hops)
        expect = []
        for part, s in self._blocks(0):
            there = plan.held(part, source, s)
            further = () if last else plan.held(part, plan.neighbour(source, 1), s)
            if done := minus(there, further):
                expect.append(((part, s, done), done))
        self._start(("home", hops), to, home, source, [(key, done) for key, done in expect], self.wide)

    def drop(self, hops: int, *held: dict[tuple[Any, ...], Any]) -> None:
        """Forget the blocks of step `hops`."""
        for blocks in held:
            for key in self._blocks(hops):
                blocks.pop(key, None)

    def come_home(self, dkv: KeyTotals) -> None:
        """Add what the others have summed for the blocks that this rank sent off."""
        for key in [k for k in self.waits if isinstance(k, tuple) and k[0] == "sent"]:
            self.waits.pop(key)()
        for hops in self.steps:
            for (part, s, done), sums in self.waits.pop(("home", hops))().items():
                for total, rows in zip(dkv[part, s], sums, strict=True):
                    for place, piece in _places(total.value, inside(self._here(part, s), done), rows):
                        place.add_(piece)


def _as_given(compute: Callable[..., Any]) -> Any:
    """A forward or backward with torch.autocast off: products stay in the dtype of q, sums in the wide one."""

    @wraps(compute)
    def run(node: Any, *tensors: Any) -> Any:
        with torch.autocast(tensors[0].device.type, enabled=False):
            return compute(node, *tensors)

    return run


class _SequenceAttention(torch.autograd.Function):
    """shard -> shard: exchange of rows and keys, exchange of partial outputs; gradient: the same two exchanges, mirrored."""

    @staticmethod
    @_as_given
    def forward(
        node: Any, q_BtHD: Tensor, k_BsKD: Tensor, v_BsKE: Tensor, sinks: Tensor | None, run: _Run
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q_BtHD, k_BsKD, v_BsKE))
        plan, me, groups = run.plan, run.me, run.plan.head_groups(run.me)
        wait = _fetch(run, q, k, v, "forward")
        rows, keys = _own_blocks(run, q, k, v)
        sums: dict[tuple[Any, ...], Accumulator] = {}

        def compute(a: int, b: int) -> None:
            for part, seqs in run.parts(q.shape[0]):
                if tiles := plan.tiles(part, me, a, b):
                    (k_b, v_b), table = keys[part, b], run.table_at(rows[part, a], part, b)
                    change = run.change_at(part, seqs, a, b)
                    attend(sums[part, a], rows[part, a][0], k_b, v_b, tiles, groups, run.scale, run.backend, table, change)

        def accumulate(blocks: Blocks) -> None:
            for key, (block, *_) in blocks.items():
                sums[key] = Accumulator(block.shape[:3], v.shape[3], block)

        accumulate(rows)
        for b in plan.early(me):
            compute(me, b)
        other_rows, other_keys = wait()
        accumulate(other_rows)
        rows.update(other_rows)
        keys.update(other_keys)
        ring = _Ring(run, keys, "forward")
        _join(run, keys)
        for hops in (0, *ring.steps):  # rows of others first: their outputs travel while own ones are computed
            if hops:
                ring.arrive(hops)
            here = plan.sources(me, hops) if hops else [*plan.early(me), *plan.later(me)]
            for a in run.others:
                for b in here:
                    compute(a, b)
            if hops == max((0, *ring.steps)):
                home = _send_home(run, sums, q, sinks)
            for b in here:
                if b != me:
                    compute(me, b)
            if hops:
                ring.drop(hops, keys)
        out, lse = _bring_home(run, home(), sums, q, sinks)
        # Rows computed here for others are final unless outputs merge: then the owner sends lse and delta in backward.
        final = {} if run.merges else {key: [sums[key].out.to(q.dtype), sums[key].lse] for key in other_rows}
        kept: list[Blocks] = [{}, {}, final] if run.remat else [other_rows, other_keys, final]
        node.run, node.kept = run, [[(key, len(blocks[key])) for key in blocks] for blocks in kept]
        numbers = run.table, run.slopes  # saved as q is, so that torch sees a caller's change of them before backward
        node.save_for_backward(
            q_BtHD, k_BsKD, v_BsKE, sinks, *numbers, out, lse, *(x for blocks in kept for key in blocks for x in blocks[key])
        )
        lse_BtH = lse.transpose(1, 2)
        node.mark_non_differentiable(lse_BtH)
        return out, lse_BtH

    @staticmethod
    @_as_given
    @torch.autograd.function.once_differentiable
    def backward(node: Any, g_BtHE: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        run: _Run = node.run
        plan, me, groups, mine = run.plan, run.me, run.plan.head_groups(run.me), run.plan.heads(run.me)
        q_BtHD, k_BsKD, v_BsKE, sinks, _, _, out_BtHE, lse, *saved = node.saved_tensors
        q, k, v, g, out = (x.transpose(1, 2) for x in (q_BtHD, k_BsKD, v_BsKE, g_BtHE, out_BtHE))
        rest = iter(saved)
        other_rows, other_keys, final = ({key: [next(rest) for _ in range(n)] for key, n in kept} for kept in node.kept)
        if run.remat:
            other_rows, other_keys = _fetch(run, q, k, v, "backward")()
        rows, keys = _own_blocks(run, q, k, v)
        rows.update(other_rows)
        keys.update(other_keys)
        ring = _Ring(run, keys, "backward")
        wait = _send_upstream(run, g, out, lse)
        upstream = {(p, me): [x[seqs, mine] for x in (g, out, lse)] for p, seqs in run.parts(q.shape[0])}  # dO, out, lse of rows
        dq = {key: Total(block[0]) for key, block in rows.items()}
        dkv = {key: [Total(x) for x in block] for key, block in keys.items() if key[1] != ALL}

        def compute(a: int, b: int) -> None:
            for part, seqs in run.parts(q.shape[0]):
                if tiles := plan.tiles(part, me, a, b):
                    into = Gradients(dq[part, a], *dkv[part, b])
                    (k_b, v_b), table = keys[part, b], run.table_at(rows[part, a], part, b)
                    g_a, out_a, lse_a = upstream[part, a]
                    q_a, change = rows[part, a][0], run.change_at(part, seqs, a, b)
                    attend_backward(into, q_a, k_b, v_b, g_a, out_a, lse_a, tiles, groups, run.scale, run.backend, table, change)

        _join(run, keys)
        for b in plan.later(me) if plan.early(me) else ():  # own rows need nothing that still travels
            compute(me, b)
        for key, (g_a, *numbers) in wait().items():
            upstream[key] = [g_a, stand_in(g_a, numbers[1]), numbers[0]] if run.merges else [g_a, *final[key]]
        for hops in ring.steps:
            dkv.update({key: [Total(x) for x in block] for key, block in ring.arrive(hops).items()})
            for a in (me, *run.others):
                for b in plan.sources(me, hops):
                    compute(a, b)
            ring.pass_on(hops, dkv)
            ring.drop(hops, keys, dkv)
        for a in run.others if plan.early(me) else ():
            for b in (*plan.later(me), me):
                compute(a, b)
        if plan.spec.fixed:
            _fixed_backward(run, rows, keys, upstream, dq, dkv)
        ring.come_home(dkv)
        home = _send_gradients(run, dq, dkv, q, k, v)
        for b in plan.early(me):
            compute(me, b)
        totals = _sum_gradients(run, home(), dq, dkv, q, k, v)
        dsinks = None
        if sinks is not None:  # a key without value: d score = weight (0 - delta), the weight exp(sink - lse)
            delta = (g.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            dsinks = -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
        return (*(d.transpose(1, 2).to(q.dtype) for d in totals), dsinks, None)


def _join(run: _Run, keys: Blocks) -> None:
    """Under `fixed`: all keys that are here as one block in ascending order, in `keys` under ALL."""
    if run.plan.spec.fixed:
        for part in range(run.plan.parts):
            sources, order = run.plan.joined(part, run.me)
            whole = [torch.cat([keys[part, s][i] for s in sources], dim=2) for i in range(2)]
            in_order = bool((order[1:] > order[:-1]).all())
            keys[part, ALL] = whole if in_order else [x.index_select(2, order.to(x.device)) for x in whole]


def _fixed_backward(run: _Run, rows: Blocks, keys: Blocks, upstream: Blocks, dq: RowTotals, dkv: KeyTotals) -> None:
    """All gradients of this rank, with dk and dv summed over row blocks by halves of their number, as any rank count does."""
    plan, me, groups = run.plan, run.me, run.plan.head_groups(run.me)
    for part, seqs in run.parts(sum(x[0].shape[0] for (_, s), x in rows.items() if s == me)):
        jobs: dict[int, list[tuple[int, Tile]]] = {}  # block of rows -> its (rank of the rows, tile)
        for a in sorted(r for p, r in rows if p == part):
            first = plan.row_positions(part, me, a)
            for tile in plan.tiles(part, me, a, ALL):
                jobs.setdefault(int(first[tile.row]) // FIXED, []).append((a, tile))

        def total(blocks: list[int], part: int = part, seqs: slice = seqs, jobs: Any = jobs) -> list[Tensor]:
            if len(blocks) > 1:
                half = (len(blocks) + 1) // 2
                left, right = total(blocks[:half]), total(blocks[half:])
                return [x.add_(y) for x, y in zip(left, right, strict=True)]
            sums = [Total(x) for x in keys[part, ALL]]
            for a, tile in (job for b in blocks for job in jobs[b]):
                table, change = run.table_at(rows[part, a], part, ALL), run.change_at(part, seqs, a, ALL)
                g, out, lse = upstream[part, a]
                into, (k, v) = Gradients(dq[part, a], *sums), keys[part, ALL]
                attend_backward(into, rows[part, a][0], k, v, g, out, lse, [tile], groups, run.scale, run.backend, table, change)
            return [x.value for x in sums]

        sources, order = plan.joined(part, me)
        back = order.argsort().to(keys[part, ALL][0].device)
        sizes = [keys[part, s][0].shape[2] for s in sources]
        for i, x in enumerate(total(sorted(jobs))):
            for s, piece in zip(sources, x.index_select(2, back).split(sizes, dim=2), strict=True):
                dkv[part, s][i].add(piece)


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Give every row of out [B, h, T, Dv], lse [B, h, T] one more key without value, in place; a row without keys stays 0."""
    rows, old = lse.shape[-1], whole_vectors(lse)
    total = torch.logaddexp(old, sinks.to(lse.dtype)[:, None].expand_as(old).contiguous())
    out.mul_(torch.exp(old - total)[..., :rows].unsqueeze(-1))
    lse.copy_(total[..., :rows])


def _send_home(run: _Run, sums: dict[tuple[Any, ...], Accumulator], q: Tensor, sinks: Tensor | None) -> Callable[[], Blocks]:
    """Start sending outputs to the owners of the rows, in float32 and with lse when they merge there; wait() gives [out, lse]."""
    plan, me, mail = run.plan, run.me, _Mail(run.axis, "forward")
    with_lse, wide = run.merges or run.return_lse or sinks is not None, wide_dtype(q.dtype)
    travels = wide if run.merges else q.dtype
    for part, seqs in run.parts(q.shape[0]):
        for s in run.others:
            if plan.rows(part, me, s):
                done = sums[part, s]
                if sinks is not None and not run.merges:
                    _add_sinks(done.out, done.lse, sinks[plan.heads(me)])
                mail.post(s, done.out.to(travels), *([done.lse] if with_lse else []))
            if n := count(plan.rows(part, s, me)):
                shape = seqs.stop - seqs.start, plan.num_heads(s), n
                Dv = sums[0, me].Dv
                mail.expect(s, (part, s), ((*shape, Dv), travels), *([(shape, wide)] if with_lse else []))
    return mail.start(plan.rows_travel)


def _bring_home(
    run: _Run, got: Blocks, sums: dict[tuple[Any, ...], Accumulator], q: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Own outputs and those that came, merged by ascending merge coordinate: out [B, t, H, Dv], lse [B, H, t]."""
    plan, me = run.plan, run.me
    if sinks is not None and not run.merges:
        for part, _ in run.parts(q.shape[0]):
            _add_sinks(sums[part, me].out, sums[part, me].lse, sinks[plan.heads(me)])
    if plan.rows_travel or plan.parts > 1 or plan.num_heads(me) < q.shape[1]:
        whole = Accumulator(q.shape[:3], sums[0, me].Dv, q)
    else:
        whole = sums[0, me]
    for part, seqs in run.parts(q.shape[0]) if whole is not sums[0, me] else ():
        for c in range(run.axis.size):  # ranks ascend with their merge coordinate
            pieces: list[Tensor]
            ranges: Ranges
            if c == me:
                pieces, ranges = [sums[part, me].out, sums[part, me].lse], ((0, q.shape[2]),)
            elif (part, c) in got:
                pieces, ranges = got[part, c], plan.rows(part, c, me)
            else:
                continue
            targets = [x[seqs, plan.heads(c)] for x in (whole.out, whole.lse)]
            places = [_places(target, ranges, piece) for target, piece in zip(targets, pieces, strict=False)]  # lse may stay away
            if run.merges:
                for (place, out), (lse_place, lse) in zip(*places, strict=True):
                    merge(place, lse_place, out, lse)
            else:
                for place, rows in (pair for pairs in places for pair in pairs):
                    place.copy_(rows)
    if sinks is not None and run.merges:
        _add_sinks(whole.out, whole.lse, sinks)
    elif sinks is not None:  # rows without keys, which nobody computed
        whole.lse.copy_(torch.where(whole.lse == -torch.inf, sinks.to(whole.lse.dtype)[:, None], whole.lse))
    return whole.out.transpose(1, 2).to(q.dtype), whole.lse


def _send_upstream(run: _Run, g: Tensor, out: Tensor, lse: Tensor) -> Callable[[], Blocks]:
    """Start sending the upstream gradient of rows to the ranks that computed them; wait() gives [dO] or [dO, lse, delta].

    When outputs merged, the computing rank lacks the row's lse and delta = rowsum(dO * out): two numbers per row and head.
    """
    plan, me, mail = run.plan, run.me, _Mail(run.axis, "backward")
    numbers = [lse, (g.to(lse.dtype) * out.to(lse.dtype)).sum(-1)] if run.merges else []
    for part, seqs in run.parts(g.shape[0]):
        for c in run.others:
            if rows := plan.rows(part, c, me):
                mail.post(c, *(_take(x[seqs, plan.heads(c)], rows) for x in (g, *numbers)))
            if n := count(plan.rows(part, me, c)):
                shape = seqs.stop - seqs.start, plan.num_heads(me), n
                mail.expect(c, (part, c), ((*shape, g.shape[3]), g.dtype), *((shape, x.dtype) for x in numbers))
    return mail.start(plan.rows_travel)


def _send_gradients(run: _Run, dq: RowTotals, dkv: KeyTotals, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Blocks]:
    """Start sending gradients of others' rows and keys home: float32 where several ranks add to one, else q's dtype."""
    plan, me, mail = run.plan, run.me, _Mail(run.axis, "backward")
    wide = wide_dtype(q.dtype)
    q_dtype, kv_dtype = (wide if several else q.dtype for several in (plan.several_dq, plan.several_dkv))
    for part, seqs in run.parts(q.shape[0]):
        b = seqs.stop - seqs.start
        for s in run.others:
            if plan.rows(part, me, s):
                mail.post(s, dq[part, s].value.to(q_dtype))
            if plan.held(part, me, s) and not plan.hops(me, s):
                mail.post(s, *(x.value.to(kv_dtype) for x in dkv[part, s]))
            if n := count(plan.rows(part, s, me)):
                mail.expect(s, ("rows", part, s), ((b, plan.num_heads(s), n, q.shape[3]), q_dtype))
            if (n := count(plan.held(part, s, me))) and not plan.hops(s, me):
                mail.expect(s, ("keys", part, s), *(((b, plan.num_kv_heads(s), n, x.shape[3]), kv_dtype) for x in (k, v)))
    return mail.start(plan.inputs_travel)


def _sum_gradients(
    run: _Run, got: Blocks, dq: RowTotals, dkv: KeyTotals, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's own tokens: its own part, then what came home in rank order (under `fixed`: by halves)."""
    plan, me = run.plan, run.me

    def none() -> tuple[Tensor, Tensor, Tensor]:
        return Total(q).value, Total(k).value, Total(v).value

    def add(c: int, totals: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        for part, seqs in run.parts(q.shape[0]):
            heads = plan.heads(c), plan.kv_heads(c), plan.kv_heads(c)
            homes = [x[seqs, h] for x, h in zip(totals, heads, strict=True)]
            if c == me:
                for home, own in zip(homes, (dq[part, me], *dkv[part, me]), strict=True):
                    home.add_(own.value)
                continue
            pieces = [*got.get(("rows", part, c), []), *got.get(("keys", part, c), [])]
            keys = () if plan.hops(c, me) else plan.held(part, c, me)
            wanted = [plan.rows(part, c, me), keys, keys]
            arrived = [(home, ranges) for home, ranges in zip(homes, wanted, strict=True) if ranges]
            for (home, ranges), piece in zip(arrived, pieces, strict=True):
                for place, rows in _places(home, ranges, piece):
                    place.add_(rows)
        return totals

    if plan.spec.fixed:
        shares = [add(c, none()) for c in range(run.axis.size)]
        while len(shares) > 1:  # by halves, as the sums over blocks
            pairs = [shares[i : i + 2] for i in range(0, len(shares), 2)]
            shares = [tuple(sum(x) for x in zip(*pair, strict=True)) for pair in pairs]
        return shares[0]
    if plan.parts == 1 and plan.num_heads(me) == q.shape[1]:
        totals = dq[0, me].value, dkv[0, me][0].value, dkv[0, me][1].value  # all heads: the sum starts where it is
    else:
        totals = add(me, none())
    for c in run.others:
        add(c, totals)
    return totals
