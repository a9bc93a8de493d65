"""One training step and many: the schedule, AdamW, and the order in which a sharded step must happen."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpattn import comm
from tpattn.data import IGNORE, Batch, Batches, Layout, PackedTokens, ValidBatches
from tpattn.decode import evaluating
from tpattn.errors import TpattnError
from tpattn.gradients import clip_grad_norm_, finish_gradients
from tpattn.loss import token_mean, vocab_parallel_cross_entropy
from tpattn.mesh import ParallelContext
from tpattn.params import param_groups, sharded_parameters
from tpattn.random import RandomKey
from tpattn.training.record import Record


class NonFiniteLoss(TpattnError, ValueError):
    """The loss or the gradient norm of a step is no finite number: raised on every rank, before the weights change."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each step: a straight rise to lr in `warmup_steps`, then a cosine to lr * min_lr_fraction at `steps`.

    A warm-up longer than the run only rises. Steps count from 1.
    """

    lr: float
    steps: int
    warmup_steps: int = 0
    min_lr_fraction: float = 0.1

    def at(self, step: int) -> float:
        """The learning rate of `step`."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        after = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.lr * (self.min_lr_fraction + (1.0 - self.min_lr_fraction) * 0.5 * (1.0 + math.cos(math.pi * after)))


def adamw(
    model: nn.Module, *, lr: float, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1
) -> torch.optim.AdamW:
    """AdamW over `param_groups(model)`; weights that are matrices in the undivided model decay, norms and biases do not."""
    matrices = {id(m.get_parameter(key)): len(spec.flat) > 1 for _, m, key, spec in sharded_parameters(model)}
    groups = []
    for group in param_groups(model):
        for decays in (True, False):
            chosen = [p for p in group["params"] if matrices.get(id(p), p.dim() > 1) is decays]
            if chosen:
                groups.append({"params": chosen, "weight_decay": weight_decay if decays else 0.0})
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    ctx: ParallelContext,
    key: RandomKey | None = None,
    clip: float | None = None,
    fused_loss: bool = False,
    name: str = "this step",
) -> tuple[float, float]:
    """(loss, gradient norm before clipping) of one update on this rank's share of a batch; the same on every rank.

    model       called as model(tokens, layout=, key=), gives logits [b, t, v]; has `vocab_size`
    loss        mean over the counted tokens of the whole batch; 0 when none is counted
    clip        largest norm of all gradients together; None = no clipping
    fused_loss  takes model.loss, which makes no logits: the same up to rounding, in less memory
    raises      NonFiniteLoss on every rank, with `name`, and the weights stay as they were
    """
    optimizer.zero_grad(set_to_none=True)
    total, counted = _loss(model, batch, key, ctx, fused_loss)
    loss = token_mean(total, counted, ctx=ctx)
    loss.backward()
    finish_gradients(model)
    norm = clip_grad_norm_(model.parameters(), math.inf if clip is None else clip)
    numbers = float(loss.detach()), float(norm)
    if not all(math.isfinite(number) for number in numbers):
        raise NonFiniteLoss(
            f"{name}: the loss is {numbers[0]:g} and the gradient norm {numbers[1]:g}; the weights are those of the step before. "
            "A smaller learning rate, a longer warm-up, stronger clipping or float32 may help"
        )
    optimizer.step()
    return numbers


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    *,
    ctx: ParallelContext,
    schedule: Schedule,
    layout: Layout | None = None,
    seed: int = 0,
    clip: float | None = 1.0,
    fused_loss: bool = False,
    done: int = 0,
    last: int | None = None,
    record: Record | None = None,
    log_every: int = 1,
    save: Callable[[int], object] | None = None,
    save_every: int = 0,
    stop: Callable[[], bool] | None = None,
    valid: PackedTokens | None = None,
    valid_every: int = 0,
    valid_batches: int = 0,
) -> int:
    """Steps `done` + 1 to `last` of a run; every rank calls it alike.

    layout      which tokens each cp rank holds; or a function that makes it for the mask of each batch
    seed        of the dropout; step and sequence are folded in, so a mesh or a resumed run draws the same
    fused_loss  as in `train_step`
    last        None = schedule.steps; the schedule is planned for schedule.steps in any case
    record      told of each step; rank 0 has one, others None
    log_every   steps between the lines of `record`; then the ranks also agree on the highest memory
    save        called on every rank with the number of steps made, every `save_every` steps (0 = never) and after the last
    stop        asked before each step; when it says so on any rank, all save, if there is something new, and return
    valid       text that is held out; its loss is measured (`evaluate`) every `valid_every` steps (0 = never) and after the last,
                on `valid_batches` batches of it (0 = all)
    returns     the number of steps made, `done` included
    raises      NonFiniteLoss, naming the step
    """
    last = schedule.steps if last is None else last
    held_out = None if valid is None else ValidBatches(valid, batches.batch_size, batches.document_mask)
    model.train()
    saved = done
    for step in range(done + 1, last + 1):
        if stop is not None and any(row[0] for row in comm.agree([stop()], ctx.world)):
            if save is not None and saved < step - 1:
                save(step - 1)
            return step - 1
        start, waited = time.perf_counter(), comm.waited()
        for group in optimizer.param_groups:
            group["lr"] = schedule.at(step)
        batch = batches.batch(step - 1, ctx, layout)
        key = RandomKey(seed, step - 1, batch.first_sequence)
        name = f"step {step} of {schedule.steps}"
        loss, norm = train_step(model, optimizer, batch, ctx=ctx, key=key, clip=clip, fused_loss=fused_loss, name=name)
        seconds = time.perf_counter() - start
        speed, share = batches.batch_size * batches.packed.seq_len / seconds, (comm.waited() - waited) / seconds
        memory = _memory(ctx) if step in (done + 1, last) or step % log_every == 0 else None
        if record is not None:
            record.step(step, loss, norm, speed, memory, comm_share=share if ctx.world.size > 1 else None)
        if held_out is not None and (step == last or (valid_every and step % valid_every == 0)):
            valid_loss = evaluate(model, held_out, ctx=ctx, layout=layout, fused_loss=fused_loss, most=valid_batches)
            if record is not None:
                record.valid(step, valid_loss)
        if save is not None and (step == last or (save_every and step % save_every == 0)):
            save(step)
            saved = step
    return max(done, last)


def evaluate(
    model: nn.Module,
    batches: ValidBatches,
    *,
    ctx: ParallelContext,
    layout: Layout | None = None,
    fused_loss: bool = False,
    most: int = 0,
) -> float:
    """Mean loss over the counted tokens of held-out text, without dropout; the same on every rank and (up to rounding) mesh.

    most        batches to take, spread evenly over the text, the same on every mesh and at every call; 0 = all
    model       its modules are left in the modes they were in
    """
    total, count = torch.zeros((), dtype=torch.float64), 0
    some = min(most or len(batches), len(batches))
    with evaluating(model):
        for i in range(some):
            batch = batches.batch(i * len(batches) // some, ctx, layout)
            loss, counted = _loss(model, batch, None, ctx, fused_loss)
            total += loss.double().cpu()
            count += int(counted)
    return float(token_mean(total.to(ctx.device), torch.tensor(count, device=ctx.device), ctx=ctx))


def _loss(decoder: Any, batch: Batch, key: RandomKey | None, ctx: ParallelContext, fused_loss: bool) -> tuple[Tensor, Tensor]:
    """Sum of the loss over this rank's tokens, and their number."""
    tokens, targets = batch.tokens.to(ctx.device), batch.targets.to(ctx.device)
    how: dict[str, Any] = {"layout": batch.layout, "key": key}
    if batch.mask is not None:
        how["mask"] = batch.mask
    if fused_loss:
        total = decoder.loss(tokens, targets, ignore_index=IGNORE, **how)
    else:
        logits = decoder(tokens, **how)
        total = vocab_parallel_cross_entropy(logits, targets, ctx=ctx, vocab_size=decoder.vocab_size, ignore_index=IGNORE)
    return total, (targets != IGNORE).sum()


def _memory(ctx: ParallelContext) -> int:
    """Bytes of memory at the highest so far on the worst rank: of the GPU, else resident; 0 where the system does not tell."""
    if ctx.device.type == "cuda":
        own = torch.cuda.max_memory_allocated(ctx.device)
    else:
        try:
            import resource
        except ImportError:  # Windows
            own = 0
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return max(row[0] for row in comm.agree([own], ctx.world))
