"""Finishing gradients once per step, and the gradient norm: sums over exactly the ranks that hold parts, each element once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tpattn import comm
from tpattn.errors import TpattnError, Unsupported
from tpattn.mesh import ParallelContext
from tpattn.params import (
    WAITS,
    ReplicatedParameter,
    agree_on_gradients,
    context_of,
    data_dim,
    gradient_state,
    is_unit,
    require_finished,
    reshard,
    sharded_parameters,
    to_local,
    track,
)

REPLICATED = "_tpattn_replicated"  # on an FSDP2 unit: (module, name, rule) of the `replicated` parameters it has divided
_COPIES_APART = 1e-5  # largest difference of copies that counts as rounding, as a share of the largest value
_BUCKET = 1 << 25  # bytes of gradients that are summed in one message


def finish_gradients(model: nn.Module, check: bool = False) -> None:
    """Complete every gradient of `model`: sum this rank's parts over the ranks that saw other tokens or other heads.

    Call it once per step, after the last backward and before clipping. Gradients partial over tp (norms under sequence_parallel)
    are summed over the whole mesh, those of key-value weights that some tp ranks share over dp x cp x these ranks, all others
    over dp x cp, in buckets per dtype; a gradient missing on some ranks counts as zero there, one missing everywhere stays None.
    A second call does nothing.

    On a model that `shard` divided FSDP2 has summed over dp x cp, and over tp what is partial there, when the backward ended;
    what is left is one message that tells which gradients no rank has (FSDP2 makes them zeros, they become None), and the sum
    over tp of `replicated` parameters.

    check       True: compare what all tp ranks should hold alike, values and finished gradients of parameters that are not
                divided, and what `replicated` declared partial, which should differ; costs a gather of each, for a first step
    raises      CollectiveMismatch when dp ranks differ in requires_grad of a parameter; looked at in the first call
                TpattnError when a backward ran between two calls: its part would be added to sums that are complete; with check
                when copies differ: the parameter, the ranks, and how to declare it
                also when the last backward ran inside `no_sync`
                Unsupported for a model without a tpattn layer, or one that was divided by torch's fully_shard instead of `shard`
    """
    ctx, rules = _rules(model)
    if ctx.world.size == 1:
        return
    reshard(model)
    agree_on_gradients(model, ctx.dp)  # its other ranks took part in each forward, and agreed there
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        track(p, ctx)
        state = gradient_state(p)
        if state is not None and state.mixed and p.grad is not None:
            raise TpattnError(
                f"finish_gradients: a backward ran after the gradients were finished and added to {names[id(p)]}; call it once "
                "per step, after the last backward, and zero_grad(set_to_none=True) before the next step"
            )
        if state is not None and state.waits:
            raise TpattnError(f"finish_gradients: the gradient of {names[id(p)]} {WAITS}")
    open_ = [p for p in parameters if not _is_finished(p)]
    _drop_unused([p for p in open_ if data_dim(p) is not None], ctx)
    if check and ctx.tp.size > 1:
        _check_parts([(names[id(p)], p) for p in open_ if isinstance(p, ReplicatedParameter) and p.rule == "partial"], ctx)
    for axis in dict.fromkeys([*rules.values(), ctx.dp_cp]):  # in the order of the parameters, the same on every rank
        if axis is not None and axis.size > 1:
            for bucket in _buckets([p for p in open_ if rules.get(id(p), ctx.dp_cp) is axis]):
                _sum_bucket(bucket, axis)
    for p in open_:
        state = gradient_state(p)
        assert state is not None
        state.finish(p.grad)
    if check and ctx.tp.size > 1:
        _check_copies(model, ctx)


@torch.no_grad()
def _drop_unused(parameters: Sequence[Tensor], ctx: ParallelContext) -> None:
    """Take away the gradients, zeros by FSDP2, of parameters that no rank's backward has reached."""
    if not parameters:
        return
    states = [gradient_state(p) for p in parameters]
    used = torch.tensor([float(s is None or s.used or not s.watched) for s in states], device=ctx.device)
    for p, ranks in zip(parameters, comm.all_reduce(used, ctx.world, direction="backward").tolist(), strict=True):
        if ranks == 0:
            p.grad = None


@torch.no_grad()
def _check_parts(parameters: Sequence[tuple[str, Tensor]], ctx: ParallelContext) -> None:
    """Raise TpattnError, on every tp rank, for a gradient declared partial that tp ranks hold alike: the sum is too large."""
    for name, p in parameters:
        own = torch.zeros_like(p) if p.grad is None else p.grad
        copies = comm.all_gather(own, [own.shape] * ctx.tp.size, ctx.tp, direction="backward")
        if bool(copies[0].any()) and all(torch.equal(copy, copies[0]) for copy in copies):
            raise TpattnError(
                f"finish_gradients: the gradient of {name} {list(p.shape)} is the same on all ranks {list(ctx.tp.ranks)} of tp "
                "before the sum, but was declared tpattn.replicated(..., grad='partial'); declare it same, else it grows with tp"
            )


@torch.no_grad()
def _check_copies(model: nn.Module, ctx: ParallelContext) -> None:
    """Raise TpattnError, on every tp rank, naming the first parameter whose copies on tp ranks differ in value or gradient."""
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and any(isinstance(x, Shard) for x in p.placements[data_dim(p) is not None :]):
            continue
        for what, x in (("value", p), ("gradient", torch.zeros_like(p) if p.grad is None else p.grad)):
            own = to_local(x.detach())
            copies = comm.all_gather(own, [own.shape] * ctx.tp.size, ctx.tp, direction="backward")
            scale = max(float(c.abs().max()) for c in copies) if own.numel() else 0.0
            apart = [float((c - copies[0]).abs().max()) if own.numel() else 0.0 for c in copies]
            if differ := [r for r, d in zip(ctx.tp.ranks, apart, strict=True) if not d <= _COPIES_APART * scale]:
                raise TpattnError(
                    f"finish_gradients: the {what} of {name} {list(p.shape)} should be the same on ranks {list(ctx.tp.ranks)} of "
                    f"tp, but on {differ} it differs from rank {ctx.tp.ranks[0]} by up to {max(apart):.3g}" + _remedy(p, what)
                )


def _remedy(p: Tensor, what: str) -> str:
    if what == "value":
        return "; give it the same initial values on all ranks (seed torch alike before building the model)"
    if isinstance(p, ReplicatedParameter):
        return f"; it was declared tpattn.replicated(..., grad={p.rule!r}): each rank's gradient is a part, declare it partial"
    return "; each rank's gradient is a part: make it tpattn.replicated(tensor, ctx), so that the parts are summed"


def _is_finished(p: Tensor) -> bool:
    state = gradient_state(p)
    return state is not None and state.is_complete(p.grad)


def _rules(model: nn.Module) -> tuple[ParallelContext, dict[int, comm.Group | None]]:
    """The context of the model's layers, and for each parameter the ranks that hold parts of its gradient; None = it is complete.

    Where a parameter is not named these are dp x cp.
    """
    ctx = context_of(model)
    rules: dict[int, comm.Group | None] = {}
    for _, module, key, spec in sharded_parameters(model):
        over_tp = ctx.world if spec.parts == ctx.tp.size else ctx.split_tp(spec.parts).sums
        rules[id(module.get_parameter(key))] = over_tp if spec.partial else ctx.dp_cp
    for p in model.parameters():
        if isinstance(p, ReplicatedParameter):
            rules[id(p)] = ctx.world if p.rule == "partial" and ctx.tp.size > 1 else ctx.dp_cp
        elif data_dim(p) is not None:
            rules[id(p)] = None
    for unit in model.modules():
        if is_unit(unit) and not hasattr(unit, REPLICATED):
            raise Unsupported(
                f"finish_gradients: {type(unit).__name__} was divided by torch's fully_shard, which takes means where we sum; "
                "divide the model with tpattn.shard(model, ctx)"
            )
        for owner, key, rule in getattr(unit, REPLICATED, ()):
            rules[id(owner.get_parameter(key))] = ctx.tp if rule == "partial" else None
    return ctx, rules


def _buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters in order, cut where the dtype changes or the bucket is full; the same on every rank."""
    buckets: list[list[Tensor]] = []
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        size = _BUCKET
        for p in (p for p in parameters if p.dtype == dtype):
            if size >= _BUCKET:
                buckets.append([])
                size = 0
            buckets[-1].append(p)
            size += to_local(p.detach()).numel() * p.element_size()
    return buckets


@torch.no_grad()
def _sum_bucket(parameters: Sequence[Tensor], axis: comm.Group) -> None:
    """One all-reduce of the gradients end to end, with one more number each: on how many ranks there was one."""
    shares = [to_local(p.detach()) for p in parameters]
    sizes = [share.numel() for share in shares]
    flat = torch.zeros(sum(sizes) + len(sizes), dtype=shares[0].dtype, device=shares[0].device)
    for i, (p, piece) in enumerate(zip(parameters, flat.split([*sizes, len(sizes)])[:-1], strict=True)):
        if p.grad is not None:
            piece.copy_(to_local(p.grad).reshape(-1))
            flat[sum(sizes) + i] = 1
    total = comm.all_reduce(flat, axis, direction="backward")
    for i, (p, share, piece) in enumerate(zip(parameters, shares, total.split([*sizes, len(sizes)])[:-1], strict=True)):
        if total[sum(sizes) + i] > 0:
            p.grad = _like_parameter(piece.view(share.shape).clone(), p)


def _like_parameter(grad: Tensor, p: Tensor) -> Tensor:
    """A complete local gradient, placed as its parameter is."""
    if not isinstance(p, DTensor):
        return grad
    return DTensor.from_local(grad, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _largest(x: Tensor, group: comm.Group) -> Tensor:
    """The maximum over the group, nan when any rank has nan: gloo's own maximum drops it (torch 2.13)."""
    values = torch.stack([x.nan_to_num(0.0, torch.inf), x.isnan().to(x.dtype)])
    largest, lost = comm.all_reduce(values, group, op="max", direction="backward")
    return torch.where(lost > 0, torch.nan, largest)


# ---- the norm --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their common norm is at most `max_norm`; every element of the model counts once.

    parameters  an iterable (a generator too) or one tensor; plain and divided ones may mix; those without gradient are skipped
    norm_type   any positive number, or inf
    foreach     None and True scale all gradients in one call, False one by one; the result is the same
    returns     the norm before clipping, a plain scalar, equal on every rank (float32; float64 for float64 gradients)
    raises      TpattnError when finish_gradients was not called; RuntimeError for a non-finite norm if asked to
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    require_finished(parameters, "clip_grad_norm_")
    parameters = [p for p in parameters if p.grad is not None]
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise Unsupported(f"clip_grad_norm_: max_norm={max_norm} must be at least 0")
    if not norm_type > 0:
        raise Unsupported(f"clip_grad_norm_: norm_type={norm_type} must be positive, or inf")
    infinite = norm_type == float("inf")
    grads = [to_local(p.grad) for p in parameters if p.grad is not None]
    device = grads[0].device if grads else torch.device("cpu")
    group: comm.Group
    sums: dict[int, tuple[comm.Group, Tensor]] = {}  # mesh -> its group, and the local sum (or maximum) of its gradients
    plain = torch.zeros((), dtype=torch.float64, device=device)
    for p, g in zip(parameters, grads, strict=True):
        part = g.abs().max().double() if infinite and g.numel() else torch.zeros((), dtype=torch.float64, device=device)
        if not infinite:
            part = torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) ** norm_type
        kinds = p.grad.placements if isinstance(p.grad, DTensor) else ()
        if any(x.is_partial() for x in kinds):
            raise TpattnError("clip_grad_norm_: a gradient is still partial over tp; call tpattn.finish_gradients(model) first")
        if isinstance(p.grad, DTensor) and not all(isinstance(x, Replicate) for x in kinds):
            state, mesh = gradient_state(p), p.grad.device_mesh
            copies = math.prod(mesh.size(i) for i, x in enumerate(kinds) if isinstance(x, Replicate))
            if data_dim(p.grad) is not None:
                assert state is not None, "finish_gradients has seen every gradient of FSDP2"
                group, copies = state.world, copies if mesh.ndim > 1 else state.tp.size
            else:
                group = state.tp if state is not None else comm.group_of(mesh.get_group(), "tp")
            if not infinite:
                part = part / copies
            before = sums.get(id(group), (group, torch.zeros_like(plain)))[1]
            sums[id(group)] = group, torch.maximum(before, part) if infinite else before + part
        else:
            plain = torch.maximum(plain, part) if infinite else plain + part
    for group, part in sums.values():
        part = _largest(part, group) if infinite else comm.all_reduce(part, group, direction="backward")
        plain = torch.maximum(plain, part) if infinite else plain + part
    norm = plain if infinite else plain ** (1.0 / norm_type)
    norm = norm.to(torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} is {float(norm)}; disable error_if_nonfinite to scale anyway"
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if foreach is None or foreach:
        for dtype in dict.fromkeys(g.dtype for g in grads):
            torch._foreach_mul_([g for g in grads if g.dtype == dtype], scale.to(dtype))
    else:
        for g in grads:
            g.mul_(scale.to(g.dtype))
    return norm
