"""Parameters that are divided over tp: their placement, their initial values, and whole <-> share.

With tp > 1 a parameter is a DTensor on the tp mesh, `Shard(dim)` or `Replicate()`; with tp = 1 it is plain. Initial values are
those of the undivided model, from (seed, full name, global index). What a layer knows of its parameters stands in its `specs`,
not on the tensors, where deepcopy would lose it. `fsdp.shard` divides each tp share again over dp x cp; that a parameter is so
divided is read from its mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tpattn import comm, random
from tpattn.errors import CollectiveMismatch, TpattnError, Unsupported
from tpattn.layout import chunk_sizes
from tpattn.mesh import ParallelContext

Init = str | Callable[[Tensor], Any]
INITS = ("default", "xavier", "kaiming", "normal")
_NORMAL_STD = 0.02
DATA_AXIS = "dp_cp"  # name of the mesh dimension over which FSDP2 divides
_AT_ONCE = 1 << 20  # initial values made at a time, to bound the memory of their indices


@dataclass(frozen=True)
class Spec:
    """What one parameter is, the same on every rank.

    shape       of the undivided parameter
    dim         the dimension divided over tp, by torch.chunk's rule; None = every rank holds all of it
    partial     its gradient on each rank that holds the same rows is a part of a sum (used on token or head shards)
    fill        ("uniform", bound), ("normal", std), ("constant", value) or ("call", function of the whole tensor)
    flat        its shape in whole state dicts, as torch's own layers have it
    spans       first and last + 1 of the rows along `dim` of each tp rank; ranks may hold the same ones
    parts       tp as parts x tp / parts: the rows divide over the parts first; tp itself where that is all
    """

    shape: tuple[int, ...]
    dim: int | None
    partial: bool
    fill: tuple[str, Any]
    flat: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    parts: int

    @property
    def shared(self) -> bool:
        """Whether several tp ranks hold the same rows."""
        return len(set(self.spans)) < len(self.spans)


def row_spans(size: int, tp: int, parts: int | None = None, shared: bool = False) -> tuple[tuple[int, int], ...]:
    """Rows of each of tp ranks: `size` rows over `parts` by torch.chunk's rule, each part's again over its tp / parts ranks.

    shared      the ranks of a part all hold all of its rows
    """
    parts = tp if parts is None else parts
    spans, first = [], 0
    for rows in chunk_sizes(size, parts):
        inner = [rows] * (tp // parts) if shared else chunk_sizes(rows, tp // parts)
        for n in inner:
            spans.append((first, first + n))
            first += 0 if shared else n
        first += rows if shared else 0
    return tuple(spans)


class ShardedModule(nn.Module):
    """A layer with parameters divided over `ctx.tp`. Sub-classes call `add_parameter`, and `finish_init` at the end."""

    def __init__(self, ctx: ParallelContext, dtype: torch.dtype | None) -> None:
        super().__init__()
        if not isinstance(ctx, ParallelContext):
            raise TypeError(f"{type(self).__name__} needs ctx=ParallelContext..., got {type(ctx).__name__}")
        ctx.tp.require_open()
        self.ctx = ctx
        self.specs: dict[str, Spec] = {}
        self._dtype = as_dtype(dtype) or torch.get_default_dtype()

    def add_parameter(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dim: int | None,
        fill: tuple[str, Any],
        partial: bool = False,
        flat: Sequence[int] | None = None,
        parts: int | None = None,
        shared: bool = False,
    ) -> None:
        """Register parameter `name`; its values come with `finish_init`.

        parts, shared   how rows divide over tp, as in `row_spans`; None and False: over all tp ranks
        raises      Unsupported when the size along `dim` would leave a tp rank without a row
        """
        tp = self.ctx.tp
        local = list(shape)
        spans: tuple[tuple[int, int], ...] = ((0, 0),) * tp.size
        if dim is not None:
            spans = row_spans(shape[dim], tp.size, parts, shared)
            sizes = [stop - start for start, stop in spans]
            if min(sizes) == 0:
                fits = [n for n in range(1, tp.size + 1) if chunk_sizes(shape[dim], n)[-1]]
                raise Unsupported(
                    f"{type(self).__name__}: {name} has {shape[dim]} rows to divide over tp={tp.size}, which gives {sizes}: a "
                    f"rank would hold none; tp could be {', '.join(map(str, fits))}, or the size {_least(tp.size, shape[dim])}"
                )
            local[dim] = sizes[tp.rank]
        parts = tp.size if parts in (None, 1) or dim is None else parts
        meta = torch.get_default_device().type == "meta"
        share = torch.empty(local, dtype=self._dtype, device="meta" if meta else self.ctx.device)
        self.specs[name] = Spec(tuple(shape), dim, partial and tp.size > 1, fill, tuple(flat or shape), spans, parts)
        self.register_parameter(name, nn.Parameter(_wrap(share, self.specs[name], self.ctx)))
        track(self.get_parameter(name), self.ctx)

    def local(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's share of parameter `name` as a plain tensor, in the dtype of the computation.

        The gradient rule stands here: a partial one is declared `Partial()`, so that `finish_gradients` sums it over tp.

        raises      ContextClosed when the context of this layer was closed; Unsupported when FSDP2 has not gathered the parameter
        """
        self.ctx.tp.require_open()
        parameter, spec = self.get_parameter(name), self.specs[name]
        require_gathered(parameter, f"{type(self).__name__}.{name}")
        if not torch.compiler.is_compiling():
            track(parameter, self.ctx)  # a parameter that deepcopy, to_empty or the user put in place is watched too
        share = to_local(parameter, spec.partial)
        return share if dtype is None or share.dtype == dtype else share.to(dtype)


class ReplicatedParameter(nn.Parameter):
    """A user's own parameter that every tp rank holds, with the rule of its gradient; made by `replicated`."""

    rule: str

    def __new__(cls, data: Tensor, rule: str, requires_grad: bool = True) -> ReplicatedParameter:
        parameter = super().__new__(cls, data, requires_grad)
        parameter.rule = rule
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicatedParameter:
        copy = ReplicatedParameter(self.data.clone(memory_format=torch.preserve_format), self.rule, self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ReplicatedParameter, (self.data, self.rule, self.requires_grad)


def replicated(tensor: Tensor, ctx: ParallelContext, grad: str = "partial") -> nn.Parameter:
    """A parameter of your own that every tp rank holds whole: `self.scale = tpattn.replicated(torch.ones(8), ctx)`.

    tensor      initial values, the same on every rank
    grad        "partial": tp ranks use it on other tokens or heads (under sequence_parallel, say), so the gradient of each is a
                part, which `finish_gradients` sums over the whole mesh. "same": all tp ranks compute the same gradient, which is
                summed over dp x cp alone, as that of a plain parameter
    returns     a plain parameter to compute with; deepcopy and pickle keep its rule
    raises      Unsupported for another word, or what is no floating-point tensor
    """
    if grad not in ("partial", "same"):
        raise Unsupported(f"replicated: grad={grad!r} must be partial (each tp rank has a part) or same")
    if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor) or not tensor.is_floating_point():
        raise Unsupported(f"replicated needs a plain floating-point tensor, got {type(tensor).__name__}")
    parameter = ReplicatedParameter(tensor.detach().clone(), grad)
    track(parameter, ctx)
    return parameter


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype, or one from its name in a config ("float64").

    raises      Unsupported for what is no floating-point dtype
    """
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found is not None and (not isinstance(found, torch.dtype) or not found.is_floating_point):
        raise Unsupported(f"dtype={dtype!r} must be a floating-point dtype such as torch.float32")
    if found is None and dtype is not None:
        raise Unsupported(f"dtype={dtype!r} is no dtype of torch; float32, float64 or bfloat16 would work")
    return found


def to_local(parameter: Tensor, partial: bool = False) -> Tensor:
    """The plain local tensor of a parameter; `partial`: its gradient is a part of a sum over the ranks that hold the same."""
    if not isinstance(parameter, DTensor):
        return parameter
    rule = [Partial() if isinstance(x, Replicate) else x for x in parameter.placements] if partial else None
    return parameter.to_local(grad_placements=rule)


def data_dim(x: Tensor) -> int | None:
    """The dimension along which FSDP2 has divided a parameter (or its gradient or state) over dp x cp; None = it has not."""
    if not isinstance(x, DTensor) or (x.device_mesh.mesh_dim_names or ("",))[0] != DATA_AXIS:
        return None
    placement: Any = x.placements[0]  # Shard, or torch's private _StridedShard where tp divides the same dimension
    return int(placement.dim)


def require_gathered(parameter: Tensor, what: str) -> None:
    """Raise Unsupported for a parameter to compute with that is divided over dp x cp at the moment."""
    if data_dim(parameter) is not None:
        raise Unsupported(
            f"{what} is used while FSDP2 has divided it over dp x cp: it is whole only inside the forward of the unit that holds "
            "it; call the unit itself, or name the method in tpattn.shard(model, ctx, methods=...), and give a layer whose "
            "weight others read no unit of its own"
        )


def reshard(model: nn.Module) -> None:
    """Put back the shares of what FSDP2 has left whole: parameters of the outermost unit, after a forward without backward."""
    for module in model.modules():
        if is_unit(module):
            module.reshard()  # type: ignore[operator]


def is_unit(module: nn.Module) -> bool:
    """Whether FSDP2 gathers and divides the parameters of this module together."""
    return hasattr(module, "_get_fsdp_state")


def _least(tp: int, size: int) -> int:
    """The smallest size from `size` up that gives every one of tp ranks a row by torch.chunk's rule."""
    while chunk_sizes(size, tp)[-1] == 0:
        size += 1
    return size


def _wrap(share: Tensor, spec: Spec, ctx: ParallelContext) -> Tensor:
    """A share as a DTensor on the tp mesh; plain with tp = 1."""
    if ctx.tp.size == 1:
        return share
    placement = Replicate() if spec.dim is None else Shard(spec.dim)
    if spec.parts == ctx.tp.size:
        assert ctx.mesh is not None
        mesh, placements = ctx.mesh["tp"], [placement]
    else:
        mesh, placements = ctx.split_tp(spec.parts).mesh, [placement, Replicate() if spec.shared else placement]
    stride = torch.empty(spec.shape, device="meta").stride()
    return DTensor.from_local(share, mesh, placements, run_check=False, shape=torch.Size(spec.shape), stride=stride)


def sharded_parameters(model: nn.Module) -> Iterator[tuple[str, ShardedModule, str, Spec]]:
    """(full name, module, its name there, spec) of every parameter of tpattn's layers in `model`, each parameter once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, ShardedModule):
            for name, spec in module.specs.items():
                parameter = module.get_parameter(name)
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield (f"{prefix}.{name}" if prefix else name), module, name, spec


# ---- gradients: which are still this rank's part ---------------------------------------------------------------------------


class _Gradients:
    """What is known of the gradients of one parameter between its backward and the optimizer's step.

    It is an attribute of the parameter: a table of weak references would keep torch from casting or moving a model whose
    parameters are DTensors (2.13). Copies and pickles of a parameter begin without one.
    """

    def __init__(self, ctx: ParallelContext) -> None:
        # The context's groups: the parameter's own mesh may be another one of equal sizes (see mesh._forget_meshes).
        self.tp, self.world = ctx.tp, ctx.world
        self.watched = False  # FSDP2 only: `used` and `waits` are known
        self.used = False  # FSDP2 only: a backward has reached the gathered parameter since the last finish
        self.waits = False  # FSDP2 only: what that backward added is kept for a later one to reduce (no_sync)
        self.replaced = False  # `shard` has put another parameter in this one's place
        self.raw = False  # a backward has added this rank's part
        self.completed = False  # a gradient was completed, and no backward has run since
        self.mixed = False  # a backward has added to a completed gradient
        self._finished: Any = None  # the gradient that finish_gradients has completed; weak, so that zero_grad frees it

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    def finish(self, grad: Tensor | None) -> None:
        """Remember that `grad` is complete."""
        self.raw = self.mixed = self.used = self.waits = False
        self.completed = grad is not None
        self._finished = None if grad is None else torch.utils.weak.TensorWeakRef(grad)

    def is_complete(self, grad: Tensor | None) -> bool:
        """Whether `grad` needs no sum: it is the completed one, or what a caller made of it, for no backward ran since."""
        return grad is not None and not self.raw and self.completed

    def has_finished(self, grad: Tensor | None) -> bool:
        """Whether `grad` is the one that was completed."""
        return grad is not None and self._finished is not None and self._finished() is grad


_STATE = "_tpattn_gradients"  # attribute of a parameter; only with contexts of several ranks


def track(parameter: Tensor, ctx: ParallelContext) -> None:
    """Watch a parameter's gradient from now on, so that an unreduced one is noticed; unless it is frozen, or ctx has one rank."""
    if ctx.world.size == 1 or gradient_state(parameter) is not None or not parameter.requires_grad:
        return
    if not ctx.watches_optimizers:
        ctx.watches_optimizers = True
        ctx.on_close.append(register_optimizer_step_pre_hook(_before_step).remove)
    setattr(parameter, _STATE, _Gradients(ctx))
    _call_after_backward(parameter, _after_backward)


def _call_after_backward(parameter: Any, hook: Callable[[Tensor], None]) -> None:
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is not None:  # after a cast of a DTensor parameter its hooks are still listed but not called (torch 2.13)
        parameter._post_accumulate_grad_hooks = hooks
    if hooks is None or hook not in hooks.values():
        parameter.register_post_accumulate_grad_hook(hook)


def _after_backward(p: Tensor) -> None:
    if (state := gradient_state(p)) is not None:
        state.mixed = state.has_finished(p.grad)  # a new tensor after zero_grad is not
        state.raw, state.completed, state.waits = True, False, False


def track_gathered(gathered: Tensor, share: Tensor, ctx: ParallelContext) -> None:
    """Watch the whole parameter that FSDP2 computes with, on behalf of the share that the optimizer has."""
    track(share, ctx)
    state = gradient_state(share)
    if state is None or gradient_state(gathered) is state:
        return
    setattr(gathered, _STATE, state)
    state.watched = True
    _call_after_backward(gathered, _after_backward_of_gathered)


def _after_backward_of_gathered(p: Tensor) -> None:
    if (state := gradient_state(p)) is not None:
        state.used = state.waits = True  # until FSDP2 has reduced it and calls the hook of the share


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        require_finished(group["params"], f"{type(optimizer).__name__}.step")


WAITS = (
    "was not reduced: the last backward of a step must run outside tpattn.no_sync; a backward that failed, or a unit that runs "
    "twice in one forward under checkpointing with use_reentrant=True (take False), leaves it so too"
)


def require_finished(parameters: Iterable[Tensor], what: str) -> None:
    """Raise TpattnError when a gradient is still this rank's part of a sum, or will never come."""
    for p in parameters:
        state = gradient_state(p)
        if state is not None and state.replaced:
            raise TpattnError(
                f"{what}: a parameter of shape {list(p.shape)} is no longer the model's: tpattn.shard has put its share in its "
                "place; make the optimizer after tpattn.shard"
            )
        if state is not None and state.waits:
            raise TpattnError(f"{what}: the gradient of a parameter of shape {list(p.shape)} {WAITS}")
        if state is not None and state.raw and p.grad is not None:
            raise TpattnError(
                f"{what}: a gradient of shape {list(p.shape)} is still this rank's part; call tpattn.finish_gradients(model) "
                "after the last backward of the step"
            )


def gradient_state(parameter: Tensor) -> _Gradients | None:
    """What is known of a parameter's gradient; None for a parameter that nobody watches."""
    state: _Gradients | None = getattr(parameter, _STATE, None)
    return state


# ---- what needs a gradient -------------------------------------------------------------------------------------------------

_AGREED = "_agreed_on_gradients"  # attribute of a module: the axes whose ranks agreed
_FLAGS = 31  # to a word of 64 bits: for each, whether some rank needs a gradient and whether some rank needs none


def agree_on_gradients(module: nn.Module, *axes: comm.Group, x: Tensor | None = None, tokens: Tensor | None = None) -> None:
    """In the first forward of `module` that makes gradients: check that the ranks of `axes` agree on what needs one.

    What a backward sends depends on it: for a rank that needs no gradient the others would wait. A few bytes over each axis,
    once; the modules inside need no check of their own. A later change on one rank alone is not seen.

    x           the module's input
    tokens      integers that all ranks of tp must have been given alike: a loader seeded by rank trains on nonsense, silently
    raises      CollectiveMismatch on every rank of the axis whose ranks differ, naming the first that does, and then PeerLost on
                those that wait for them; ContextClosed
    """
    for axis in axes:
        axis.require_open()
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    agreed = {axis.name for axis in axes if axis.size > 1 and not comm.is_fake(axis)}
    if agreed <= module.__dict__.get(_AGREED, set()):
        return
    names = ["its input", *(name for name, _ in module.named_parameters())]
    needs = [x is not None and x.requires_grad, *(p.requires_grad for p in module.parameters())]
    seen = [0] * math.ceil(len(needs) / _FLAGS)
    for i, need in enumerate(needs):
        seen[i // _FLAGS] |= (1 if need else 2) << 2 * (i % _FLAGS)
    for axis in axes:
        if axis.name in agreed:
            *rows, digests = zip(*comm.agree([*seen, _digest(tokens)], axis, direction="once"), strict=True)
            seen = [reduce(or_, words) for words in rows]
            if axis.name == "tp" and len(set(digests)) > 1:
                raise CollectiveMismatch(
                    f"{type(module).__name__}: the ranks {list(axis.ranks)} of tp were given other tokens; what a rank reads "
                    "depends on ctx.dp.rank alone, then ctx.cp.shard cuts it: seed loaders by ctx.dp.rank"
                )
    if differ := [name for i, name in enumerate(names) if seen[i // _FLAGS] >> 2 * (i % _FLAGS) & 3 == 3]:
        where = " x ".join(axis.name for axis in axes if axis.name in agreed)
        raise CollectiveMismatch(
            f"{type(module).__name__}: requires_grad of {differ[0]} is True on some ranks of {where} and False on others"
            f"{f' (and {len(differ) - 1} more)' if len(differ) > 1 else ''}; set it alike on all: a backward sends what it needs"
        )
    for inner in module.modules():
        inner.__dict__[_AGREED] = inner.__dict__.get(_AGREED, set()) | agreed


def _digest(tokens: Tensor | None) -> int:
    """A number that differs, in all likelihood, between other tokens or orders of them."""
    if tokens is None:
        return 0
    numbers = tokens.detach().flatten().to(torch.int64)
    return int((numbers * torch.arange(1, numbers.numel() + 1, device=numbers.device)).sum())


# ---- initial values --------------------------------------------------------------------------------------------------------


def weight_fill(init: Init, fan_in: int, fan_out: int) -> tuple[str, Any]:
    """How a weight with these fans of the *undivided* layer is filled.

    default     uniform up to 1 / sqrt(fan_in), as torch.nn.Linear; xavier uniform up to sqrt(6 / (fan_in + fan_out)); kaiming
                uniform up to sqrt(6 / fan_in); normal with std 0.02; or a function that fills the whole tensor in place
    raises      Unsupported for another word
    """
    if callable(init):
        return "call", init
    if init == "default":
        return "uniform", 1.0 / math.sqrt(max(1, fan_in))
    if init == "xavier":
        return "uniform", math.sqrt(6.0 / (fan_in + fan_out))
    if init == "kaiming":
        return "uniform", math.sqrt(6.0 / max(1, fan_in))
    if init == "normal":
        return "normal", _NORMAL_STD
    raise Unsupported(f"init={init!r}: expected {', '.join(INITS)} or a function that fills a tensor in place")


def bias_fill(fan_in: int) -> tuple[str, Any]:
    """torch.nn.Linear's own bias: uniform up to 1 / sqrt(fan_in), whatever the weight's init."""
    return "uniform", 1.0 / math.sqrt(max(1, fan_in))


_deferred: ContextVar[bool] = ContextVar("tpattn_init_deferred", default=False)


@contextmanager
def deferred_init() -> Iterator[None]:
    """Layers made inside leave their values to the composite module around them."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def finish_init(module: nn.Module, ctx: ParallelContext, seed: int | None = None) -> None:
    """Fill the parameters of `module` from `seed`; None = one draw from torch's CPU generator, which must agree on all ranks.

    raises      CollectiveMismatch when ranks drew different seeds (torch.manual_seed differs between them)
    """
    if _deferred.get():
        return
    if seed is None:
        seed = int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64))
        if not comm.is_fake(ctx.world):
            seeds = [row[0] for row in comm.agree([seed], ctx.world)]
            if len(set(seeds)) > 1:
                raise CollectiveMismatch(
                    f"{type(module).__name__}: ranks drew different initial seeds "
                    f"{dict(zip(ctx.world.ranks, seeds, strict=True))}; call torch.manual_seed with the same number on all ranks "
                    "before building layers (a Transformer also takes seed=)"
                )
    for name, owner, key, spec in sharded_parameters(module):
        parameter = owner.get_parameter(key).detach()
        share = to_local(parameter)
        if share.is_meta:
            continue
        if data_dim(parameter) is None:
            fill_share(share, spec, random.fold(seed, name), ctx.tp)
        else:  # FSDP2 has divided the tp share again
            of_tp = torch.empty(tp_share_shape(spec, ctx.tp), dtype=share.dtype, device=share.device)
            fill_share(of_tp, spec, random.fold(seed, name), ctx.tp)
            share.copy_(own_data_share(of_tp, parameter, ctx))


def fill_share(share: Tensor, spec: Spec, key: int, tp: comm.Group) -> None:
    """Write this rank's part of the initial values of the undivided parameter into `share`; the same on any mesh."""
    kind, value = spec.fill
    if kind == "constant":
        share.fill_(value)
    elif kind == "call":
        whole = torch.full(spec.flat, torch.nan, dtype=share.dtype, device=share.device)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(key & (2**63 - 1))
            value(whole)
        if bool(whole.isnan().any()):
            raise Unsupported(
                f"init={value!r} must fill the tensor it is given in place; some of its {list(spec.flat)} were left as is"
            )
        share.copy_(own_share(whole.view(spec.shape), spec, tp))
    else:
        flat = share.view(-1)
        for start in range(0, flat.numel(), _AT_ONCE):
            index = _global_index(spec, tp, start, min(flat.numel(), start + _AT_ONCE), share.device)
            if kind == "uniform":
                values = (2.0 * random.uniform(key, index) - 1.0) * value
            else:
                values = random.normal(key, index) * value
            flat[start : start + index.numel()] = values.to(share.dtype)


def _global_index(spec: Spec, tp: comm.Group, start: int, stop: int, device: torch.device) -> Tensor:
    """Index, in the undivided parameter, of the elements start..stop-1 of this rank's share."""
    local = torch.arange(start, stop, device=device)
    if spec.dim is None or tp.size == 1:
        return local
    first, last = spec.spans[tp.rank]
    inner = math.prod(spec.shape[spec.dim + 1 :])
    here, before = (last - first) * inner, first * inner
    return local.div(here, rounding_mode="floor") * (spec.shape[spec.dim] * inner) + before + local % here


# ---- whole <-> share -------------------------------------------------------------------------------------------------------


def own_share(whole: Tensor, spec: Spec, tp: comm.Group) -> Tensor:
    """This rank's piece of an undivided tensor of the parameter's shape; a view."""
    if spec.dim is None or tp.size == 1:
        return whole
    first, last = spec.spans[tp.rank]
    return whole.narrow(spec.dim, first, last - first)


def whole(share: Tensor, spec: Spec, tp: comm.Group) -> Tensor:
    """The undivided tensor from every tp rank's share (a parameter's values, or a finished gradient): one all-gather."""
    if spec.dim is None or tp.size == 1:
        return share.clone()
    shapes = [[*spec.shape[: spec.dim], b - a, *spec.shape[spec.dim + 1 :]] for a, b in spec.spans]
    pieces = dict(zip(spec.spans, comm.all_gather(share, shapes, tp), strict=True))  # of equal rows one is enough
    return torch.cat(list(pieces.values()), dim=spec.dim)


def tp_share_shape(spec: Spec, tp: comm.Group) -> tuple[int, ...]:
    """The shape of this tp rank's share, before FSDP2 divides it."""
    shape = list(spec.shape)
    if spec.dim is not None:
        first, last = spec.spans[tp.rank]
        shape[spec.dim] = last - first
    return tuple(shape)


def own_data_share(share: Tensor, like: Tensor, ctx: ParallelContext) -> Tensor:
    """This rank's piece over dp x cp of a tp share, divided as the parameter `like` is; a view. All of it without FSDP2."""
    dim = data_dim(like)
    if dim is None:
        return share
    first, last = row_spans(share.shape[dim], ctx.dp_cp.size)[ctx.dp_cp.rank]
    return share.narrow(dim, first, last - first)


def gather_data_shares(x: Tensor, shape: Sequence[int], ctx: ParallelContext) -> Tensor:
    """The tp share, of this shape, of a parameter (or gradient or state): one all-gather over dp x cp if FSDP2 divided it."""
    local, dim = to_local(x).detach(), data_dim(x)
    if dim is None:
        return local
    shapes = [[*shape[:dim], size, *shape[dim + 1 :]] for size in chunk_sizes(shape[dim], ctx.dp_cp.size)]
    assert list(local.shape) == shapes[ctx.dp_cp.rank], (local.shape, shapes)
    return torch.cat(comm.all_gather(local, shapes, ctx.dp_cp), dim=dim)


def block_of(x: Tensor, spec: Spec | None, ctx: ParallelContext) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's share of a parameter (or its state) lies in the undivided one: first index and length of each dim.

    tp divides first and FSDP2 last, each by torch.chunk's rule. torch's own answer for FSDP2 is another one for some uneven sizes
    (2.13).
    """
    dim = data_dim(x)
    starts, lengths = [0] * x.dim(), list(x.shape)
    if spec is not None and spec.dim is not None:
        first, last = spec.spans[ctx.tp.rank]
        starts[spec.dim], lengths[spec.dim] = first, last - first
    if dim is not None:
        first, last = row_spans(lengths[dim], ctx.dp_cp.size)[ctx.dp_cp.rank]
        starts[dim], lengths[dim] = starts[dim] + first, last - first
    assert tuple(to_local(x.detach()).shape) == tuple(lengths), (x.shape, lengths)
    return tuple(starts), tuple(lengths)


def context_of(model: nn.Module) -> ParallelContext:
    """The one context of the model's layers.

    raises      Unsupported when they have none, or several
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise Unsupported(
            "DistributedDataParallel averages gradients that finish_gradients then sums again; pass the model itself to both, "
            "without that wrapper, or divide it by tpattn.shard"
        )
    contexts = {id(m.ctx): m.ctx for m in model.modules() if isinstance(m, ShardedModule)}
    if len(contexts) != 1:
        raise Unsupported(
            "a model with tpattn layers of one ParallelContext is needed, found "
            f"{len(contexts)} contexts in {type(model).__name__}"
        )
    return next(iter(contexts.values()))


def whole_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`whole_state_dict` one entry after the other, for what must not be held all at once; every rank takes all of them."""
    reshard(model)
    named = dict(model.named_modules())
    for name, value in model.state_dict().items():
        prefix, _, key = name.rpartition(".")
        module = named.get(prefix)
        if isinstance(module, ShardedModule) and key in module.specs:
            spec, ctx = module.specs[key], module.ctx
            yield name, whole(gather_data_shares(value, tp_share_shape(spec, ctx.tp), ctx), spec, ctx.tp).view(spec.flat)
        elif data_dim(value) is not None:
            yield name, gather_data_shares(value, value.shape, context_of(model))
        else:
            yield name, to_local(value).detach().clone()


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Every entry of `model.state_dict()` undivided, on every rank, with torch's 2-D weight shapes; the same for every mesh."""
    return dict(whole_tensors(model))


def load_whole_state_dict(model: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
    """Copy undivided tensors (as `whole_state_dict` gives them) into the shares of `model`; every rank passes the same.

    raises      Unsupported for missing or unknown names (with strict) and for shapes that do not fit, before anything is copied
    """
    reshard(model)
    named, own = dict(model.named_modules()), model.state_dict()
    missing, unknown = [n for n in own if n not in state], [n for n in state if n not in own]
    if strict and (missing or unknown):
        raise Unsupported(
            f"state does not fit the model: missing {missing}, unknown {unknown}; strict=False loads what both have"
        )
    chosen = [name for name in own if name in state]
    specs = {}
    for name in chosen:
        prefix, _, key = name.rpartition(".")
        module = named.get(prefix)
        spec = module.specs.get(key) if isinstance(module, ShardedModule) else None
        shape = spec.flat if spec else tuple(own[name].shape)
        found = tuple(state[name].shape)
        if found not in (shape, spec.shape if spec else shape):
            raise Unsupported(f"{name}: the model needs {list(shape)}, got {list(found)}")
        specs[name] = (spec, module)
    with torch.no_grad():
        for name in chosen:  # one at a time, so that a mapping that reads from a file holds one
            part, (spec, module) = state[name], specs[name]
            if spec and isinstance(module, ShardedModule):
                part = own_share(part.reshape(spec.shape), spec, module.ctx.tp)
            if data_dim(own[name]) is not None:
                part = own_data_share(part, own[name], context_of(model))
            to_local(own[name]).copy_(part)


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters for an optimizer, plain ones and DTensors apart (AdamW's foreach and fused fail on a mix, torch 2.13)."""
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    divided = [p for p in model.parameters() if isinstance(p, DTensor)]
    return [{"params": group} for group in (plain, divided) if group]
