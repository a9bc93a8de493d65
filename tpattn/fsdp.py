"""FSDP2 over dp x cp: what each tp rank holds of a model is divided again over the ranks that see other tokens.

Owns the choice of units and of the dimension that divides, and torch's settings under which its sums are ours. Leaves to torch
the gathering before and the sums after each unit, so their messages are not in tpattn's ledger; to `params` what a share is; to
`gradients` what is left to do before a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tpattn.blocks import TransformerBlock
from tpattn.errors import Unsupported
from tpattn.gradients import REPLICATED
from tpattn.mesh import ParallelContext
from tpattn.params import (
    ReplicatedParameter,
    ShardedModule,
    agree_on_gradients,
    gradient_state,
    is_unit,
    track,
    track_gathered,
)


def shard(
    model: nn.Module, ctx: ParallelContext, *, units: Iterable[nn.Module] | None = None, methods: Sequence[str] = ("loss",)
) -> nn.Module:
    """`model` itself, with parameters, gradients and optimizer state divided over dp x cp by FSDP2. Every rank calls it.

    Numbers stay those of the undivided model. Call it before the optimizer is made and after any copy.deepcopy, which FSDP2
    refuses; with dp x cp = 1 it changes nothing. A parameter divides along the first dimension that tp does not divide and that
    dp x cp divides evenly, else along its first one, unevenly if it must be (ranks may then hold nothing of it).

    units       modules of `model` whose weights are gathered and freed together, each called as a module, by every rank; None =
                each TransformerBlock. The rest, such as embedding, last norm and head, is the unit of `model` itself
    methods     methods of `model` that compute with its weights beside forward; those that it lacks are skipped
    raises      Unsupported, before anything is sent and alike on all ranks: a model of another context, one that is divided
                already, a module list as model or unit, a unit that is no part of the model, a weight that two units share, a
                parameter without dimensions or elements or one that is not contiguous, trainable parameters of two dtypes in
                a unit. In the first forward CollectiveMismatch, on every rank, when ranks differ in requires_grad. What FSDP2
                sends raises torch's own errors: RuntimeError for a lost or late rank

    There is no low-precision option: gradients that are parts of sums over tp would be rounded before they are summed. The
    layers' compute_dtype and torch.autocast cast inside the layers instead. FSDP2's messages are not in tpattn's ledger.
    """
    groups = _units(model, ctx, units)
    if ctx.dp_cp.size == 1:
        return model
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method  # 0.06 s, not at the import of tpattn

    mesh, before = ctx.dp_cp_mesh(), list(model.parameters())
    for p in before:
        track(p, ctx)
    for unit, owned in groups:
        rules = [(m, key, p.rule) for m, key, p in owned if isinstance(p, ReplicatedParameter)]
        fully_shard(unit, mesh=mesh, shard_placement_fn=lambda p: Shard(divided_dim(p, ctx.dp_cp.size)))
        setattr(unit, REPLICATED, rules)
        sharded: Any = unit
        sharded.set_gradient_divide_factor(1.0)  # losses are sums already divided by the number of all ranks' tokens
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        sharded.set_reduce_scatter_unused_params(True)  # a weight that one rank alone uses would abort the process (torch 2.13)
        unit.register_forward_pre_hook(lambda module, args: _watch(module, ctx))
        for m, key, _ in owned:
            track(m.get_parameter(key), ctx)
    for method in methods:
        if hasattr(model, method):
            setattr(model, method, _watched(model, method, ctx))
            register_fsdp_forward_method(model, method)
    kept = {id(p) for p in model.parameters()}
    for p in before:
        state = gradient_state(p)
        if state is not None and id(p) not in kept:
            state.replaced = True
    return model


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside add to gradients that are not reduced yet: every micro-batch of a step but the last runs inside.

    On a model that `shard` divided it saves a sum over dp x cp per micro-batch, and keeps whole gradients meanwhile; nothing
    changes on any other, whose gradients `finish_gradients` sums once in any case. The last backward must run outside:
    finish_gradients, clip_grad_norm_ and the optimizer's step raise TpattnError otherwise. zero_grad does not reach what FSDP2
    keeps in between, so a step that was begun must be ended.
    """
    units: list[Any] = [module for module in model.modules() if is_unit(module)]
    for unit in units:
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)


def divided_dim(p: Tensor, ranks: int) -> int:
    """The dimension along which a parameter divides over dp x cp: the same on every rank, as it depends on whole sizes alone."""
    over_tp = {x.dim for x in p.placements if isinstance(x, Shard)} if isinstance(p, DTensor) else set()
    even = [dim for dim in range(p.dim()) if dim not in over_tp and p.shape[dim] % ranks == 0]
    return even[0] if even else 0  # torch 2.13 divides other dimensions than the first only evenly


# ---- units -----------------------------------------------------------------------------------------------------------------

_Owned = list[tuple[nn.Module, str, nn.Parameter]]  # (module, name there, parameter)


def _units(model: nn.Module, ctx: ParallelContext, units: Iterable[nn.Module] | None) -> list[tuple[nn.Module, _Owned]]:
    """Each unit with the parameters it divides, inner ones first and the model last."""
    contexts = {id(m.ctx) for m in model.modules() if isinstance(m, ShardedModule)}
    if contexts != {id(ctx)}:
        raise Unsupported(
            f"shard needs a model with tpattn layers, all of the context it is given; {type(model).__name__} has layers of "
            f"{len(contexts)} contexts{' and not of this one' if contexts and id(ctx) not in contexts else ''}"
        )
    ctx.tp.require_open()
    names = {id(m): name for name, m in model.named_modules()}
    if units is None:
        units = [m for m in model.modules() if isinstance(m, TransformerBlock)]
    chosen = {id(m): m for m in units}
    for unit in chosen.values():
        if not isinstance(unit, nn.Module) or id(unit) not in names:
            raise Unsupported(f"shard: the unit {type(unit).__name__} is no part of the model; units must be modules inside it")
    chosen[id(model)] = model
    for m in model.modules():
        if is_unit(m):
            raise Unsupported(f"shard: {names[id(m)] or type(m).__name__} is divided by FSDP2 already; shard a model once")
        if id(m) in chosen and type(m).forward is nn.Module.forward:
            raise Unsupported(
                f"shard: {names[id(m)] or 'the model'} is a {type(m).__name__} without a forward of its own; give its modules as "
                "units=, inside a model that calls them"
            )
    owners: dict[int, _Owned] = {key: [] for key in chosen}
    first: dict[int, tuple[int, str]] = {}  # parameter -> its unit and name

    def walk(module: nn.Module, unit: int, prefix: str) -> None:
        unit = id(module) if id(module) in chosen else unit
        for key, p in module._parameters.items():
            if p is None:
                continue
            other, name = first.setdefault(id(p), (unit, prefix + key))
            if other != unit:
                raise Unsupported(
                    f"shard: {name} and {prefix}{key} are one parameter in two units, of which FSDP2 would make two; give units= "
                    "that leave both to the same one"
                )
            if name == prefix + key:
                _check(p, name)
                owners[unit].append((module, key, p))
        for key, child in module.named_children():
            if (id(child), unit) not in seen:
                seen.add((id(child), unit))
                walk(child, unit, f"{prefix}{key}.")

    seen: set[tuple[int, int]] = set()
    walk(model, id(model), "")
    for key, owned in owners.items():
        dtypes = {p.dtype for _, _, p in owned if p.requires_grad}
        if len(dtypes) > 1:
            raise Unsupported(
                f"shard: the unit {names[key] or type(model).__name__} has trainable parameters of "
                f"{', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))}, and FSDP2 reduces one dtype per unit; give "
                "the modules of each dtype as units="
            )
    inner_first = sorted(chosen, key=lambda key: -names[key].count(".") - (names[key] != ""))
    return [(chosen[key], owners[key]) for key in inner_first]


def _check(p: nn.Parameter, name: str) -> None:
    if p.dim() == 0:
        raise Unsupported(f"shard: {name} has no dimension that could divide; make it a parameter of shape [1]")
    if p.numel() == 0:
        raise Unsupported(f"shard: {name} {list(p.shape)} has no elements, on which FSDP2 fails; remove it, or make it a buffer")
    if not p.is_contiguous():
        raise Unsupported(f"shard: {name} {list(p.shape)} is not contiguous, which FSDP2 needs; make it so with .contiguous()")


# ---- at each forward -------------------------------------------------------------------------------------------------------


def _watch(unit: Any, ctx: ParallelContext) -> None:
    """See to it that the gradients of a unit's parameters, whole by now, are noticed, and that all ranks reduce in one order.

    Both once. The order: units whose input needs no gradient are reduced when the backward ends, and torch starts with the
    outermost there. A rank where that input needs one reduces the inner unit first, and the messages of two units meet (torch
    2.13: the process aborts). From the last unit to the outermost all ranks agree. torch has no public way to either.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    state = unit._get_fsdp_state()
    if state._is_root:  # FSDP2 sends in backward what needs a gradient: ranks that differ would abort the process
        agree_on_gradients(unit, ctx.dp, ctx.cp)
    order = state._state_ctx.all_states
    if state._is_root and order[0] is state:
        order.reverse()
    for group in state._fsdp_param_groups:
        for p in group.fsdp_params:
            if p.sharded_param.requires_grad:
                track_gathered(p.unsharded_param, p.sharded_param, ctx)


def _watched(model: nn.Module, method: str, ctx: ParallelContext) -> Any:
    """A method of the model that watches first; inside the one that FSDP2 makes of it."""
    run = getattr(model, method)

    @wraps(run)
    def watched(*args: Any, **kwargs: Any) -> Any:
        _watch(model, ctx)
        return run(*args, **kwargs)

    return watched
