"""The one loop that runs every grid, layout and mask, forward and backward. It follows the schedule and knows no scheme by name.

Forward: rows and keys go in one exchange to every rank that uses them, own keys are computed while it travels, partial outputs go
straight back to the owners of the rows and are merged there. Backward is the mirror: upstream gradients go where the outputs came
from, gradients of others' rows and keys go home while own ones are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tpattn import comm
from tpattn.errors import Unsupported
from tpattn.kernels import Accumulator, Backend, Gradients, attend, attend_backward, choose, merge, stand_in
from tpattn.layout import AttentionGrid, SequenceLayout
from tpattn.masks import Mask, full
from tpattn.schedule import Ranges, Schedule, Spec, count, given_grid, resolve_grid, schedule

Blocks = dict[tuple[Any, ...], list[Tensor]]  # tensors in kernel order [b, heads, n, ..], by (part, rank)
Sums = dict[tuple[Any, ...], Tensor]


class SharesTokens(Protocol):
    """What this room needs of a context: a `ParallelContext`, or anything else with an axis `cp`."""

    @property
    def cp(self) -> comm.Group:
        """The ranks that share the tokens of a sequence."""


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
    return_lse: bool = False,
    kernel: str = "auto",
    remat: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of this rank's queries over the keys of all ranks of `ctx.cp`.

    q           [B, t, H, D]    this rank's share of the tokens, all of its heads
    k, v        [B, s, K, D], [B, s, K, Dv]   K divides H: query head i reads key head i // (H // K)
    mask        which (query, key) pairs of global positions count; None = all. See `tpattn.masks`
    layout      which positions each rank holds; None = contiguous, the lengths agreed by one small all-gather
    kv_layout   the same for the keys; None = `layout`
    grid        how cp is factorised; "auto" keeps the work even, then sends least
    transport   exchange (one exact-size all-to-all); "auto" is that
    scale       multiplies q @ k; None = D ** -0.5
    kernel      auto, or a name of `tpattn.kernels.available()`
    remat       keys and rows of others are fetched again in backward instead of kept
    returns     [B, t, H, Dv] in the dtype of q; with return_lse also lse [B, t, H] (float32; float64 for float64), no gradient.
                A row that may read no key gives 0, lse -inf and gradient 0
    raises      Unsupported, before anything is sent, for shapes, layouts, masks or options that do not fit (without a layout
                the lengths are agreed before a mask can be checked against them)
    source      online softmax: Milakov and Gimelshein, arXiv:1805.02867; blockwise over ranks: Liu et al., arXiv:2310.01889
    """
    _check_tensors(q, k, v)
    if transport not in ("auto", "exchange"):
        raise Unsupported(f"transport={transport!r} is not supported; there are auto and exchange")
    if mask is not None and not isinstance(mask, Mask):
        raise Unsupported(
            f"mask must be a value of tpattn.masks, got {type(mask).__name__}; a bool tensor becomes masks.dense(x) (True = "
            "allowed), key padding masks.padding(valid); additive masks are not supported"
        )
    if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise Unsupported(f"scale={scale!r} must be a finite number, or None for head_dim ** -0.5")
    backend = choose(kernel, q.device, q.dtype)
    axis, mask = ctx.cp, full() if mask is None else mask
    axis.require_open()
    given_grid(grid, axis.size)
    q_layout, kv_layout = _layouts(q, k, axis, layout, kv_layout)
    B, t, H, D = q.shape
    K, Dv = k.shape[2], v.shape[3]
    mask.check(B, H, t, kv_layout.T)
    found = resolve_grid(grid, q_layout, kv_layout, mask, H, K, D, Dv, q.element_size())
    plan = schedule(Spec(q_layout, kv_layout, mask.structure(), mask.has_table, found, H, K))
    q_order, k_order = _ascending(q_layout, axis.rank), _ascending(kv_layout, axis.rank)
    if q_order is not None:
        q = q.index_select(1, q_order)
    if k_order is not None:
        k, v = k.index_select(1, k_order), v.index_select(1, k_order)
    table = mask.table(q_layout.positions(axis.rank), kv_layout.T)
    if table is not None:
        table = table.to(q.device)
        table = table if q_order is None else table.index_select(2, q_order)
    run = _Run(plan, axis, backend, D**-0.5 if scale is None else float(scale), return_lse, remat, table)
    out, lse = _SequenceAttention.apply(q, k, v, run)
    if q_order is not None:
        back = q_order.argsort()
        out, lse = out.index_select(1, back), lse.index_select(1, back)
    return (out, lse) if return_lse else out


# ---- checks ----------------------------------------------------------------------------------------------------------------


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise Unsupported(f"{name} must be [B, tokens, heads, head_dim], got {got}")
        if x.dtype != q.dtype or x.device != q.device:
            raise Unsupported(
                f"q, k, v must share dtype and device, got {q.dtype} {q.device} for q, {x.dtype} {x.device} for {name}"
            )
    B, _, H, D = q.shape
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if k.shape[0] != B or k.shape[3] != D or v.shape[:3] != k.shape[:3]:
        raise Unsupported(f"needs q [B, t, H, D], k [B, s, K, D], v [B, s, K, Dv], got {shapes}")
    if 0 in (B, H, D, k.shape[2], v.shape[3]) or H % k.shape[2]:
        raise Unsupported(
            f"the number of key heads must divide the number of query heads, and no size but tokens may be 0; got {shapes}"
        )


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
        return (SequenceLayout.of_lengths([r[0] for r in lengths]), SequenceLayout.of_lengths([r[1] for r in lengths]))
    if layout is None:
        layout = SequenceLayout.of_lengths([r[0] for r in comm.agree([q.shape[1]], axis)])
    kv_layout = layout if kv_layout is None else kv_layout
    for name, x, wanted in (("q", q, layout), ("k", k, kv_layout)):
        which = "layout" if name == "q" else "kv_layout"
        need = wanted.sizes[axis.rank]
        if x.shape[1] != need:
            whole = f"; {x.shape[1]} is the whole sequence" if x.shape[1] == wanted.T else ""
            raise Unsupported(
                f"{name} has {x.shape[1]} tokens, but {which} {wanted!r} gives rank {axis.rank} of cp {need} of {wanted.T}"
                f"{whole}; cut it with ctx.cp.shard({name}, layout, dim=1)"
                + ("" if name == "q" else ", or pass kv_layout= of its own")
            )
    return layout, kv_layout


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
            positions = torch.cat([positions[slice(*r)] for r in self.plan.keys(part, self.me, b)])
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
            if keys := plan.keys(part, c, me):
                mail.post(c, *(_take(x[seqs, plan.kv_heads(c)], keys) for x in (k, v)))
            if n := count(plan.rows(part, me, c)):
                tables = [((*x.shape[:2], n, x.shape[3]), x.dtype) for x in run.own_table(seqs, me)]
                mail.expect(c, ("rows", part, c), ((b, h, n, q.shape[3]), q.dtype), *tables)
            if n := count(plan.keys(part, me, c)):
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


class _SequenceAttention(torch.autograd.Function):
    """shard -> shard: exchange of rows and keys, exchange of partial outputs; gradient: the same two exchanges, mirrored."""

    @staticmethod
    def forward(node: Any, q_BtHD: Tensor, k_BsKD: Tensor, v_BsKE: Tensor, run: _Run) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q_BtHD, k_BsKD, v_BsKE))
        plan, me, groups = run.plan, run.me, run.plan.head_groups(run.me)
        wait = _fetch(run, q, k, v, "forward")
        rows, keys = _own_blocks(run, q, k, v)
        sums: dict[tuple[Any, ...], Accumulator] = {}

        def compute(a: int, b: int) -> None:
            for part, _ in run.parts(q.shape[0]):
                if tiles := plan.tiles(part, me, a, b):
                    (k_b, v_b), table = keys[part, b], run.table_at(rows[part, a], part, b)
                    attend(sums[part, a], rows[part, a][0], k_b, v_b, tiles, groups, run.scale, run.backend, table)

        def accumulate(blocks: Blocks) -> None:
            for key, (block, *_) in blocks.items():
                sums[key] = Accumulator(block.shape[:3], v.shape[3], block)

        accumulate(rows)
        compute(me, me)
        other_rows, other_keys = wait()
        accumulate(other_rows)
        rows.update(other_rows)
        keys.update(other_keys)
        for a in (*run.others, me):
            for b in (me, *run.others):
                if (a, b) != (me, me):
                    compute(a, b)
        out, lse = _send_home(run, sums, q)
        # Rows computed here for others are final unless outputs merge: then the owner sends lse and delta in backward.
        final = {} if run.merges else {key: [sums[key].out.to(q.dtype), sums[key].lse] for key in other_rows}
        kept: list[Blocks] = [{}, {}, final] if run.remat else [other_rows, other_keys, final]
        node.run, node.kept = run, [[(key, len(blocks[key])) for key in blocks] for blocks in kept]
        node.save_for_backward(q_BtHD, k_BsKD, v_BsKE, out, lse, *(x for blocks in kept for key in blocks for x in blocks[key]))
        lse_BtH = lse.transpose(1, 2)
        node.mark_non_differentiable(lse_BtH)
        return out, lse_BtH

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(node: Any, g_BtHE: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        run: _Run = node.run
        plan, me, groups, mine = run.plan, run.me, run.plan.head_groups(run.me), run.plan.heads(run.me)
        q_BtHD, k_BsKD, v_BsKE, out_BtHE, lse, *saved = node.saved_tensors
        q, k, v, g, out = (x.transpose(1, 2) for x in (q_BtHD, k_BsKD, v_BsKE, g_BtHE, out_BtHE))
        rest = iter(saved)
        other_rows, other_keys, final = ({key: [next(rest) for _ in range(n)] for key, n in kept} for kept in node.kept)
        if run.remat:
            other_rows, other_keys = _fetch(run, q, k, v, "backward")()
        rows, keys = _own_blocks(run, q, k, v)
        rows.update(other_rows)
        keys.update(other_keys)
        wait = _send_upstream(run, g, out, lse)
        upstream = {(p, me): [x[seqs, mine] for x in (g, out, lse)] for p, seqs in run.parts(q.shape[0])}  # dO, out, lse of rows
        dq = {key: _zeros(block[0], lse.dtype) for key, block in rows.items()}
        dkv = {key: [_zeros(x, lse.dtype) for x in block] for key, block in keys.items()}

        def compute(a: int, b: int) -> None:
            for part, _ in run.parts(q.shape[0]):
                if tiles := plan.tiles(part, me, a, b):
                    into = Gradients(dq[part, a], *dkv[part, b])
                    (k_b, v_b), table = keys[part, b], run.table_at(rows[part, a], part, b)
                    g_a, out_a, lse_a = upstream[part, a]
                    q_a = rows[part, a][0]
                    attend_backward(into, q_a, k_b, v_b, g_a, out_a, lse_a, tiles, groups, run.scale, run.backend, table)

        for b in run.others:  # own rows need nothing that still travels
            compute(me, b)
        for key, (g_a, *numbers) in wait().items():
            upstream[key] = [g_a, stand_in(g_a, numbers[1]), numbers[0]] if run.merges else [g_a, *final[key]]
        for a in run.others:
            for b in (*run.others, me):
                compute(a, b)
        home = _send_gradients(run, dq, dkv, q, k)
        compute(me, me)
        totals = _sum_gradients(run, home(), dq, dkv, q, k, v)
        return (*(d.transpose(1, 2).to(q.dtype) for d in totals), None)


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros [B, H, T, D] with memory in public order [B, T, H, D]."""
    B, H, T, D = like.shape
    return torch.zeros(B, T, H, D, dtype=dtype, device=like.device).transpose(1, 2)


def _send_home(run: _Run, sums: dict[tuple[Any, ...], Accumulator], q: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs to the owners of the rows, merged there by ascending merge coordinate: out [B, t, H, Dv], lse [B, H, t]."""
    plan, me, mail = run.plan, run.me, _Mail(run.axis, "forward")
    own = sums[0, me]
    if not plan.rows_travel and plan.parts == 1 and plan.num_heads(me) == q.shape[1]:
        return own.out.transpose(1, 2).to(q.dtype), own.lse
    wide, with_lse, Dv = own.out.dtype, run.merges or run.return_lse, own.out.shape[-1]
    travels = wide if run.merges else q.dtype
    for part, seqs in run.parts(q.shape[0]):
        for s in run.others:
            if plan.rows(part, me, s):
                done = sums[part, s]
                mail.post(s, done.out.to(travels), *([done.lse] if with_lse else []))
            if n := count(plan.rows(part, s, me)):
                shape = seqs.stop - seqs.start, plan.num_heads(s), n
                mail.expect(s, (part, s), ((*shape, Dv), travels), *([(shape, wide)] if with_lse else []))
    got = mail.start(plan.rows_travel)()
    whole = Accumulator(q.shape[:3], Dv, q)
    for part, seqs in run.parts(q.shape[0]):
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


def _send_gradients(run: _Run, dq: Sums, dkv: Blocks, q: Tensor, k: Tensor) -> Callable[[], Blocks]:
    """Start sending gradients of others' rows and keys home: float32 where several ranks add to one, else q's dtype."""
    plan, me, mail = run.plan, run.me, _Mail(run.axis, "backward")
    wide = dq[0, me].dtype
    q_dtype, kv_dtype = (wide if several else q.dtype for several in (plan.several_dq, plan.several_dkv))
    for part, seqs in run.parts(q.shape[0]):
        b = seqs.stop - seqs.start
        for s in run.others:
            if plan.rows(part, me, s):
                mail.post(s, dq[part, s].to(q_dtype))
            if plan.keys(part, me, s):
                mail.post(s, *(x.to(kv_dtype) for x in dkv[part, s]))
            if n := count(plan.rows(part, s, me)):
                mail.expect(s, ("rows", part, s), ((b, plan.num_heads(s), n, q.shape[3]), q_dtype))
            if n := count(plan.keys(part, s, me)):
                widths = [x.shape[3] for x in dkv[part, me]]
                mail.expect(s, ("keys", part, s), *(((b, plan.num_kv_heads(s), n, width), kv_dtype) for width in widths))
    return mail.start(plan.inputs_travel)


def _sum_gradients(
    run: _Run, got: Blocks, dq: Sums, dkv: Blocks, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's own tokens: its own part and what came home, added in rank order."""
    plan, me = run.plan, run.me
    wide = dq[0, me].dtype
    if not got and plan.parts == 1 and plan.num_heads(me) == q.shape[1]:
        return dq[0, me], dkv[0, me][0], dkv[0, me][1]
    totals = _zeros(q, wide), _zeros(k, wide), _zeros(v, wide)
    for part, seqs in run.parts(q.shape[0]):
        for c in range(run.axis.size):
            heads = plan.heads(c), plan.kv_heads(c), plan.kv_heads(c)
            homes = [x[seqs, h] for x, h in zip(totals, heads, strict=True)]
            if c == me:
                for home, piece in zip(homes, (dq[part, me], *dkv[part, me]), strict=True):
                    home.add_(piece)
                continue
            pieces = [*got.get(("rows", part, c), []), *got.get(("keys", part, c), [])]
            wanted = [plan.rows(part, c, me), plan.keys(part, c, me), plan.keys(part, c, me)]
            arrived = [(home, ranges) for home, ranges in zip(homes, wanted, strict=True) if ranges]
            for (home, ranges), piece in zip(arrived, pieces, strict=True):
                for place, rows in _places(home, ranges, piece):
                    place.add_(rows)
    return totals
