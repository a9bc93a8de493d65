"""Every message of tpattn: the exact-size exchange, the sum, the ring shift, and the pairs of a collective with its gradient.

No other room calls a collective or a point-to-point operation. Each message passes `_call`, which records it in open ledgers
and turns failures into named errors. An all-gather and a reduce-scatter are exchanges here: on gloo that is 1.3 to 2 times
faster than its own (own pieces never travel), shares may differ in size, and a sum runs in float32 and in rank order, so low
precision is rounded once. Nothing writes into its input, and any strides are accepted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpattn.errors import CollectiveTimeout, ContextClosed, PeerLost, Unsupported
from tpattn.layout import split_sizes

Pieces = Sequence[Sequence[Tensor]]
Shapes = Sequence[Sequence[tuple[Sequence[int], torch.dtype]]]


# ---- groups ----------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Group:
    """Ranks that communicate. A group of one never does.

    name        axis for the ledger and for messages: dp, cp, tp, ...
    ranks       global rank of each member
    rank        this process's place among them
    group       torch's process group; a group of one needs none
    device      where small messages of the group live: the GPU under NCCL, else the CPU
    closed      set by the owner's close(): any later use raises ContextClosed
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    group: Any = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    closed: bool = False

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a copied module communicates with the same ranks

    def require_open(self) -> None:
        """Raise ContextClosed when the context that made this group was closed."""
        if self.closed:
            raise ContextClosed(f"the context of axis {self.name} is closed; build a new ParallelContext, and the modules on it")


def group_of(group: Any = None, name: str = "group") -> Group:
    """A `Group` for a torch process group; None = all processes, or this one alone when torch.distributed is not initialised.

    raises      Unsupported on a process that is not a member
    """
    if isinstance(group, Group):
        return group
    if not dist.is_available() or not dist.is_initialized():
        return Group(name, (0,), 0)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise Unsupported(
            f"rank {dist.get_rank()} is not a member of the group it was given; call this on the group's ranks only"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        got = type(group).__name__
        raise Unsupported(f"group must be a torch process group, such as ctx.cp.group, or None for all, got {got}")
    nccl = "nccl" in str(dist.get_backend_config(group))
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    return Group(name, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group), group, device)


# ---- torch.compile ---------------------------------------------------------------------------------------------------------

Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Function) -> Function:
    """`function`, at which torch.compile breaks its graph: it is called as it stands, with all that it calls.

    Traced messages crash, or give other numbers in silence (torch 2.13). The public `torch.compiler.disable` would load the
    compiler, half a second, with `import tpattn`; torch's own form does so at the first call, as optimizers and DTensors do.
    """
    call = torch._disable_dynamo(function)
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = f"tpattn.{function.__name__} sends messages"  # type: ignore[attr-defined]
    return cast(Function, call)


# ---- the ledger and the one function that every message passes -------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """One collective or point-to-point operation, as this rank saw it.

    operation   exchange, all_gather, reduce_scatter, all_reduce, shift
    axis        name of the group
    direction   forward or backward; or once, see `Ledger`
    bytes       what this rank must at least receive
    site        file:line of the room that asked for it; a gradient's message names the line that asked forward
    """

    operation: str
    axis: str
    direction: str
    bytes: int
    site: str


@dataclass
class Ledger:
    """Messages in the order they were sent, from `with ledger() as book`. FSDP2's and DCP's own messages are not in it.

    once        kept apart: what ranks agree on in the first forward of a module, which no later step repeats
    """

    messages: list[Message] = field(default_factory=list)
    once: list[Message] = field(default_factory=list)

    def bytes(self, **where: str) -> int:
        """Sum of the bytes of the messages with these fields, for example `bytes(axis="cp", direction="forward")`."""
        return sum(m.bytes for m in self.select(**where))

    def select(self, **where: str) -> list[Message]:
        """The messages with these fields."""
        return [m for m in self.messages if all(getattr(m, k) == v for k, v in where.items())]

    def __str__(self) -> str:
        rows: dict[tuple[str, str, str], list[int]] = {}
        for m in [*self.messages, *self.once]:
            row = rows.setdefault((m.axis, m.operation, m.direction), [0, 0])
            row[0] += 1
            row[1] += m.bytes
        lines = [f"{'axis':<8}{'operation':<16}{'direction':<10}{'messages':>9}{'bytes':>14}"]
        lines += [f"{a:<8}{o:<16}{d:<10}{n:>9}{b:>14}" for (a, o, d), (n, b) in sorted(rows.items())]
        return "\n".join(lines)


_open_ledgers: list[Ledger] = []


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Record every message tpattn sends inside the `with` block, forward and backward."""
    book = Ledger()
    _open_ledgers.append(book)
    try:
        yield book
    finally:
        _open_ledgers[:] = [b for b in _open_ledgers if b is not book]


_DISABLED = {torch.__file__.replace("__init__.py", name) for name in ("_compile.py", "_dynamo/eval_frame.py")}
_BETWEEN = {__file__, torch.autograd.function.__file__, *_DISABLED}  # frames between a caller and `_call`
_asker: ContextVar[str] = ContextVar("tpattn_asker", default="")  # in a backward: the site of its forward


def _site() -> str:
    """file:line of the nearest caller outside this file; in the backward of a pair, of the caller of its forward."""
    if site := _asker.get():
        return site
    frame = sys._getframe(1)
    while frame.f_code.co_filename in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


def _call(operation: str, group: Group, direction: str, received: int, start: Callable[[], Any]) -> Callable[[], None]:
    """Start one message and return the function that waits for it. `received`: bytes this rank must at least receive."""
    group.require_open()
    if _open_ledgers:
        message = Message(operation, group.name, direction, received, _site())
        for book in _open_ledgers:
            (book.once if direction == "once" else book.messages).append(message)
    with _named_errors(operation, group), _counted():
        works = start()

    def wait() -> None:
        with _named_errors(operation, group), _counted():
            for work in works if isinstance(works, list) else [works]:
                work.wait()

    return wait


class _counted:
    """Adds the time of the `with` block to what `waited` tells, also when it raises."""

    __slots__ = ("start",)
    seconds = 0.0

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        _counted.seconds += time.perf_counter() - self.start


def waited() -> float:
    """Seconds that this process was blocked in messages of tpattn since it started: starting them, and waiting for them to end.

    The difference of two calls over the time between them is the share of communication that computing did not hide; waiting for
    a rank that is late counts. Under CUDA a wait only makes the stream wait, so there this is next to nothing, and a profiler is
    the tool. FSDP2's and DCP's own messages are not in it.
    """
    return _counted.seconds


@contextmanager
def _named_errors(operation: str, group: Group) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        what = f"{operation} over {group.name} (ranks {list(group.ranks)}, this is rank {group.ranks[group.rank]})"
        if "timed out" in text or "timeout" in text:
            raise CollectiveTimeout(f"{what}: a peer did not arrive in time; look at the other ranks' output") from error
        if any(word in text for word in ("connection", "closed by peer", "socket", "peer", "remote process", "broken pipe")):
            raise PeerLost(f"{what}: a peer ended; its own error is in its output") from error
        raise


# ---- messages without a gradient -------------------------------------------------------------------------------------------


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count


def exchange(
    send: Pieces, receive: Shapes, group: Group, *, direction: str = "forward", operation: str = "exchange"
) -> Callable[[], list[list[Tensor]]]:
    """Start sending `send[peer]` to each peer; the returned function waits and gives the tensors received from each peer.

    send        for each rank of the group the tensors it shall get, any shapes and strides; nothing for this rank itself
    receive     for each rank the (shape, dtype) of what it sends here, in its order
    returns     wait() -> for each rank the tensors, contiguous
    bytes       exact: no padding, own pieces do not travel
    """
    device = next((x.device for pieces in send for x in pieces), group.device)
    out_bytes = [sum(x.numel() * x.element_size() for x in pieces) for pieces in send]
    in_bytes = [sum(_bytes(*piece) for piece in pieces) for pieces in receive]
    assert not out_bytes[group.rank] and not in_bytes[group.rank], "a rank's own pieces do not travel"
    outbox = _pack([x for pieces in send for x in pieces], sum(out_bytes), device)
    inbox = torch.empty(sum(in_bytes), dtype=torch.uint8, device=device)

    def start() -> Any:
        return dist.all_to_all_single(inbox, outbox, in_bytes, out_bytes, group=group.group, async_op=True)

    wait_all = _call(operation, group, direction, sum(in_bytes), start)

    def wait() -> list[list[Tensor]]:
        wait_all()
        nonlocal outbox
        del outbox  # the bytes are away: their memory is free while the caller goes on
        got = iter(_unpack(inbox, [piece for pieces in receive for piece in pieces]))
        return [[next(got) for _ in pieces] for pieces in receive]

    return wait


def _pack(tensors: Sequence[Tensor], size: int, device: torch.device) -> Tensor:
    """The tensors' bytes end to end: [size] uint8; each is copied once, a single contiguous one not at all."""
    if len(tensors) == 1 and (x := tensors[0]).is_contiguous() and x.numel() > 1 and not (x.is_conj() or x.is_neg()):
        return x.detach().view(-1).view(torch.uint8)
    box = torch.empty(size, dtype=torch.uint8, device=device)
    place = 0
    for x in (x.detach() for x in tensors):
        count = x.numel() * x.element_size()
        raw = box[place : place + count]
        if place % x.element_size() == 0:
            raw.view(x.dtype).view(x.shape).copy_(x)
        else:
            flat = x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1)
            raw.copy_(flat.view(torch.uint8))  # not contiguous(): a dimension of size 1 would keep its stride
        place += count
    return box


def _unpack(box: Tensor, pieces: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """Views of the tensors whose bytes lie end to end in a box; copies where a view would not be aligned."""
    got, place = [], 0
    for shape, dtype in pieces:
        size = _bytes(shape, dtype)
        raw = box[place : place + size]
        if place % dtype.itemsize:
            raw = raw.clone()
        got.append(raw.view(dtype).view(list(shape)))
        place += size
    return got


def start_gather(
    x: Tensor, shapes: Sequence[Sequence[int]], group: Group, *, direction: str = "forward"
) -> Callable[[], list[Tensor]]:
    """Start an all-gather of shares that may differ in shape; wait() gives every rank's share in rank order, own one uncopied."""
    x = x.detach()
    if x.is_cuda:  # NCCL reads one buffer for all peers; an exchange would copy it for each
        parts = [torch.empty(list(s), dtype=x.dtype, device=x.device) for s in shapes]
        received = sum(p.numel() for p in parts) * x.element_size() - x.numel() * x.element_size()
        own = x.contiguous()
        wait_all = _call(
            "all_gather", group, direction, received, lambda: dist.all_gather(parts, own, group.group, async_op=True)
        )

        def wait_native() -> list[Tensor]:
            wait_all()
            return parts

        return wait_native
    others = [peer != group.rank for peer in range(group.size)]
    own = x.contiguous() if group.size > 2 else x  # packed once for each peer
    send = [[own] if other else [] for other in others]
    receive = [[(s, x.dtype)] if other else [] for s, other in zip(shapes, others, strict=True)]
    arrive = exchange(send, receive, group, direction=direction, operation="all_gather")

    def wait() -> list[Tensor]:
        return [pieces[0] if pieces else x for pieces in arrive()]

    return wait


def all_gather(x: Tensor, shapes: Sequence[Sequence[int]], group: Group, *, direction: str = "forward") -> list[Tensor]:
    """Every rank's share in rank order; shares may differ in shape. Without a gradient."""
    return [x.detach()] if group.size == 1 else start_gather(x, shapes, group, direction=direction)()


def start_reduce_scatter(pieces: Sequence[Tensor], group: Group, *, direction: str = "forward") -> Callable[[], Tensor]:
    """Start a reduce-scatter: `pieces[r]` is this rank's part of the sum that rank r gets; wait() gives the own sum.

    The sum runs in rank order and in float32 at least, so it is the same whichever rank computes it and is rounded once.
    """
    own = pieces[group.rank].detach()
    send = [[p] if peer != group.rank else [] for peer, p in enumerate(pieces)]
    receive = [[(own.shape, own.dtype)] if peer != group.rank else [] for peer in range(group.size)]
    wait_all = exchange(send, receive, group, direction=direction, operation="reduce_scatter")

    def wait() -> Tensor:
        got = wait_all()
        return sum_in_order([p[0] if p else own for p in got])

    return wait


def reduce_scatter(pieces: Sequence[Tensor], group: Group, *, direction: str = "forward") -> Tensor:
    """The sum over ranks of `pieces[my rank]`; pieces may differ in shape. Without a gradient."""
    return pieces[0].detach().clone() if group.size == 1 else start_reduce_scatter(pieces, group, direction=direction)()


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of equal-shaped tensors, added first to last, in float32 for lower precisions, rounded once: a new tensor."""
    if len(parts) == 1:
        return parts[0].clone()
    wide = _sum_dtype(parts[0].dtype)
    if wide is parts[0].dtype:
        total = parts[0] + parts[1]
    else:
        total = parts[0].to(wide) + parts[1].to(wide)
    for part in parts[2:]:
        total += part.to(wide)
    return total.to(parts[0].dtype)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def start_all_reduce(x: Tensor, group: Group, *, op: str = "sum", direction: str = "forward") -> Callable[[], Tensor]:
    """Start an all-reduce; wait() gives what `all_reduce` gives."""
    x = x.detach()
    if group.size == 1:
        return lambda: x.clone()
    if op == "sum" and x.dtype in (torch.bfloat16, torch.float16):
        flat = x.contiguous().view(-1)
        sizes = split_sizes(flat.numel(), group.size)
        sums = start_reduce_scatter(flat.split(sizes), group, direction=direction)
        return lambda: torch.cat(all_gather(sums(), [[s] for s in sizes], group, direction=direction)).view(x.shape)
    total = x.resolve_conj().clone(memory_format=torch.contiguous_format)
    received = 2 * (group.size - 1) * total.numel() * total.element_size() // group.size
    reduction = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
    work = _call("all_reduce", group, direction, received, lambda: dist.all_reduce(total, reduction, group.group, async_op=True))

    def wait() -> Tensor:
        work()
        return total

    return wait


def all_reduce(x: Tensor, group: Group, *, op: str = "sum", direction: str = "forward") -> Tensor:
    """The sum (or max, min) of x over the group, as a new tensor, bit-equal on all ranks. Without a gradient.

    A nan survives a sum; gloo's max and min may drop it (torch 2.13).
    Sums in low precision travel as exchange, float32 sum and all-gather: the same bytes, rounded once per direction.
    """
    return start_all_reduce(x, group, op=op, direction=direction)()


def agree(values: Sequence[int], group: Group, *, direction: str = "forward") -> list[list[int]]:
    """Every rank's `values` (int64, the same number of them on each rank), by one small all-gather."""
    return [list(values)] if group.size == 1 else _agree(values, group, direction)


@not_compiled
def _agree(values: Sequence[int], group: Group, direction: str) -> list[list[int]]:
    own = torch.tensor(list(values), dtype=torch.int64, device=group.device)
    return [share.tolist() for share in all_gather(own, [[len(values)]] * group.size, group, direction=direction)]


def is_fake(group: Group) -> bool:
    """True for torch's fake back end, which moves nothing: checks that compare ranks have nothing to compare there."""
    return group.size > 1 and dist.get_backend(group.group) == "fake"


def start_pass(
    send: Sequence[Tensor],
    to: int,
    receive: Sequence[tuple[Sequence[int], torch.dtype]],
    source: int,
    group: Group,
    *,
    direction: str = "forward",
    operation: str = "pass",
) -> Callable[[], list[Tensor]]:
    """Start one point-to-point message to rank `to` and one from rank `source`; wait() gives the tensors received.

    Both go out together, so no order of blocking sends can lock up, whatever their size. An empty side is not called: the two
    ends know it alike. Between two ranks messages arrive in the order they were sent, so both must start theirs in one order.
    """
    out_bytes = sum(x.numel() * x.element_size() for x in send)
    in_bytes = sum(_bytes(*piece) for piece in receive)
    if not out_bytes + in_bytes:
        return lambda: [torch.empty(list(shape), dtype=dtype, device=group.device) for shape, dtype in receive]
    device = next((x.device for x in send), group.device)
    outbox, inbox = _pack(send, out_bytes, device), torch.empty(in_bytes, dtype=torch.uint8, device=device)

    def start() -> Any:
        operations = [dist.P2POp(dist.isend, outbox, group.ranks[to], group.group)] if out_bytes else []
        operations += [dist.P2POp(dist.irecv, inbox, group.ranks[source], group.group)] if in_bytes else []
        return dist.batch_isend_irecv(operations)

    wait_all = _call(operation, group, direction, in_bytes, start)

    def wait() -> list[Tensor]:
        wait_all()
        return _unpack(inbox, receive)

    return wait


def start_shift(x: Tensor, group: Group, by: int, shape: Sequence[int], *, direction: str = "forward") -> Callable[[], Tensor]:
    """Start sending x to rank + by; wait() gives the tensor of rank - by, whose shape is `shape`."""
    x, to, source = x.detach(), (group.rank + by) % group.size, (group.rank - by) % group.size
    if to == group.rank:
        return lambda: x
    wait = start_pass([x], to, [(shape, x.dtype)], source, group, direction=direction, operation="shift")
    return lambda: wait()[0]


# ---- pairs: a collective and its gradient ----------------------------------------------------------------------------------
# Each public function skips a group of one, and states both directions in its first line. `dim` is a dimension of the tensor;
# `sizes` are the lengths of the ranks' shares along it.


def _shapes(x: Tensor, dim: int, sizes: Sequence[int]) -> list[list[int]]:
    return [[*x.shape[:dim], size, *x.shape[dim + 1 :]] for size in sizes]


def share_sizes(x: Tensor, dim: int, sizes: Sequence[int] | None, group: Group) -> tuple[int, list[int]]:
    """dim counted from the front, and the agreed lengths of the shares along it."""
    dim = dim % x.dim()
    if sizes is None:
        sizes = [row[0] for row in agree([x.shape[dim]], group)]
    if len(sizes) != group.size or sizes[group.rank] != x.shape[dim]:
        raise Unsupported(
            f"a share of {x.shape[dim]} along dimension {dim} does not fit the shares {list(sizes)} of the {group.size} ranks of "
            f"{group.name} (this is rank {group.rank} of it)"
        )
    return dim, list(sizes)


def whole_sizes(x: Tensor, dim: int, sizes: Sequence[int] | None, group: Group) -> tuple[int, list[int]]:
    """dim counted from the front, and the lengths in which the whole is cut (as equal as can be unless given)."""
    dim = dim % x.dim()
    sizes = split_sizes(x.shape[dim], group.size) if sizes is None else sizes
    if len(sizes) != group.size or sum(sizes) != x.shape[dim]:
        raise Unsupported(
            f"{x.shape[dim]} along dimension {dim} cannot be cut into {list(sizes)} for the {group.size} ranks of {group.name}: "
            f"that is {len(sizes)} pieces with a sum of {sum(sizes)}"
        )
    return dim, list(sizes)


def _gradient(compute: Callable[..., Any]) -> Any:
    """The backward of a pair: its messages carry the site of the forward (`node.site`), and no gradient of it is offered."""

    @wraps(compute)
    def backward(node: Any, *gradients: Tensor) -> Any:
        token = _asker.set(node.site)
        try:
            return compute(node, *gradients)
        finally:
            _asker.reset(token)

    return staticmethod(once_differentiable(backward))


class _Replicate(torch.autograd.Function):
    """invariant -> replicate: nothing; gradient: all-reduce."""

    @staticmethod
    def forward(node: Any, x: Tensor, group: Group) -> Tensor:
        node.site, node.group = _site(), group
        return x.view_as(x)

    @_gradient
    def backward(node: Any, g: Tensor) -> Any:
        return all_reduce(g, node.group, direction="backward"), None


class _Sum(torch.autograd.Function):
    """partial -> invariant: all-reduce; gradient: nothing."""

    @staticmethod
    def forward(node: Any, x: Tensor, group: Group) -> Tensor:
        node.site = _site()
        return all_reduce(x, group)

    @_gradient
    def backward(node: Any, g: Tensor) -> Any:
        return g, None


class _Gather(torch.autograd.Function):
    """shard -> replicate: all-gather; gradient: reduce-scatter. shard -> invariant: all-gather; gradient: own piece."""

    @staticmethod
    def forward(node: Any, x: Tensor, group: Group, dim: int, sizes: list[int], sum_gradient: bool) -> Tensor:
        node.site, node.saved = _site(), (group, dim, sizes, sum_gradient)
        return torch.cat(all_gather(x, _shapes(x, dim, sizes), group), dim=dim)

    @_gradient
    def backward(node: Any, g: Tensor) -> Any:
        group, dim, sizes, sum_gradient = node.saved
        pieces = g.split(sizes, dim=dim)
        own = reduce_scatter(pieces, group, direction="backward") if sum_gradient else pieces[group.rank]
        return own, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    """partial -> shard: reduce-scatter; gradient: all-gather."""

    @staticmethod
    def forward(node: Any, x: Tensor, group: Group, dim: int, sizes: list[int]) -> Tensor:
        node.site, node.saved = _site(), (group, dim, sizes)
        return reduce_scatter(x.split(sizes, dim=dim), group)

    @_gradient
    def backward(node: Any, g: Tensor) -> Any:
        group, dim, sizes = node.saved
        return torch.cat(all_gather(g, _shapes(g, dim, sizes), group, direction="backward"), dim=dim), None, None, None


class _Shard(torch.autograd.Function):
    """invariant -> shard: nothing; gradient: all-gather."""

    @staticmethod
    def forward(node: Any, x: Tensor, group: Group, dim: int, sizes: list[int]) -> Tensor:
        node.site, node.saved = _site(), (group, dim, sizes)
        return x.split(sizes, dim=dim)[group.rank].clone()

    @_gradient
    def backward(node: Any, g: Tensor) -> Any:
        group, dim, sizes = node.saved
        return torch.cat(all_gather(g, _shapes(g, dim, sizes), group, direction="backward"), dim=dim), None, None, None


class _Exchange(torch.autograd.Function):
    """shards along one dimension -> shards along another: all-to-all; gradient: all-to-all back."""

    @staticmethod
    def forward(
        node: Any, x: Tensor, group: Group, split: int, split_sizes: list[int], join: int, join_sizes: list[int]
    ) -> Tensor:
        node.site, node.saved = _site(), (group, split, split_sizes, join, join_sizes)
        return _all_to_all(x, group, split, split_sizes, join, join_sizes, "forward")

    @_gradient
    def backward(node: Any, g: Tensor) -> Any:
        group, split, split_sizes, join, join_sizes = node.saved
        back = _all_to_all(g, group, join, join_sizes, split, split_sizes, "backward")
        return back, None, None, None, None, None


def _all_to_all(x: Tensor, group: Group, split: int, pieces: list[int], join: int, shares: list[int], direction: str) -> Tensor:
    parts = x.split(pieces, dim=split)
    shapes = [[*x.shape] for _ in shares]
    for shape, share in zip(shapes, shares, strict=True):
        shape[split], shape[join] = pieces[group.rank], share
    send = [[p] if peer != group.rank else [] for peer, p in enumerate(parts)]
    receive = [[(shape, x.dtype)] if peer != group.rank else [] for peer, shape in enumerate(shapes)]
    got = exchange(send, receive, group, direction=direction)()
    return torch.cat([p[0] if p else parts[group.rank] for p in got], dim=join)


class _Shift(torch.autograd.Function):
    """x of rank r -> rank r + by: one message each way; gradient: the shift back."""

    @staticmethod
    def forward(node: Any, x: Tensor, group: Group, by: int, shape: tuple[int, ...]) -> Tensor:
        node.site, node.saved = _site(), (group, by, tuple(x.shape))
        return start_shift(x, group, by, shape)()

    @_gradient
    def backward(node: Any, g: Tensor) -> Any:
        group, by, shape = node.saved
        return start_shift(g, group, -by, shape, direction="backward")(), None, None, None


@not_compiled
def _apply(pair: type[torch.autograd.Function], *arguments: Any) -> Any:
    return pair.apply(*arguments)


def replicate(x: Tensor, group: Group) -> Tensor:
    """invariant -> replicate: sends nothing; gradient: all-reduce. In front of a use that differs between ranks."""
    return x if group.size == 1 else _apply(_Replicate, x, group)


def reduce(x: Tensor, group: Group) -> Tensor:
    """partial -> invariant: all-reduce; gradient: nothing, each rank already holds the whole one."""
    return x if group.size == 1 else _apply(_Sum, x, group)


def gather(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """shard -> invariant: all-gather; gradient: own piece. For a whole from which every rank computes the same loss.

    sizes       lengths of the shares along `dim`; None = agreed by one small all-gather
    """
    if group.size == 1:
        return x
    return _apply(_Gather, x, group, *share_sizes(x, dim, sizes, group), False)


def gather_sum(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """shard -> replicate: all-gather; gradient: reduce-scatter. For a whole that each rank uses differently."""
    if group.size == 1:
        return x
    return _apply(_Gather, x, group, *share_sizes(x, dim, sizes, group), True)


def scatter_sum(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """partial -> shard: reduce-scatter; gradient: all-gather.

    sizes       lengths of the shares along `dim`; None = as equal as can be
    """
    return x if group.size == 1 else _apply(_ReduceScatter, x, group, *whole_sizes(x, dim, sizes, group))


def shard(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """invariant -> shard: sends nothing; gradient: all-gather. A copy of this rank's share of what every rank holds."""
    return x if group.size == 1 else _apply(_Shard, x, group, *whole_sizes(x, dim, sizes, group))


def own_piece(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """replicate -> shard: sends nothing; gradient: own piece, zeros elsewhere. (Someone before it sums the gradient.)"""
    if group.size == 1:
        return x
    dim, sizes = whole_sizes(x, dim, sizes, group)
    return x.split(list(sizes), dim=dim)[group.rank]


def swap_shards(
    x: Tensor,
    group: Group,
    *,
    split: int,
    join: int,
    split_sizes: Sequence[int] | None = None,
    join_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Shards along `join` -> shards along `split`: all-to-all; gradient: all-to-all back. Tokens for heads, for example.

    x           whole along `split`, this rank's share along `join`
    returns     this rank's share along `split`, whole along `join`
    """
    if group.size == 1:
        return x
    split, pieces = whole_sizes(x, split, split_sizes, group)
    join, shares = share_sizes(x, join, join_sizes, group)
    return _apply(_Exchange, x, group, split, pieces, join, shares)


def shift(x: Tensor, group: Group, by: int = 1, shape: Sequence[int] | None = None) -> Tensor:
    """The x of rank - by, around the ring: one point-to-point message; gradient: shifted back.

    shape       of the tensor that arrives, when ranks hold different ones; None = that of x
    """
    if group.size == 1 or by % group.size == 0:
        return x
    return _apply(_Shift, x, group, by, tuple(x.shape if shape is None else shape))
